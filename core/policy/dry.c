/* See dry.h. The real decision runs, on the real records; what it would leave behind is kept aside
 * before and put back after. Called by http/explain.c on its loop. */
#include "policy/dry.h"

#include <stdlib.h>
#include <string.h>

#include "policy/decider.h"

static const double *costs(pl_decider *d, pl_ask *ask, pl_dry *out)
{
    const uint32_t others = 1u << PL_HOOK_ADMIT | 1u << PL_HOOK_ROUTE;
    pl_records *r = pl_vm_records(d->vm);
    pl_vm_error err;
    if (r->verdict->scored)
        return r->cost;
    /* admit, route or a binding has spoken first; what score would have said is of interest */
    if (pl_refresh(d, ask, pl_clock_now_ns(d->o.clock)).eligible == 0)
        return NULL;
    if (pl_vm_decide(d->vm, others, &err) == 0)
        return r->verdict->scored ? r->cost : NULL;
    pl_decider_failed(d, PL_HOOK_SCORE, &err, 0);
    return NULL;
}

int pl_decide_dry(pl_decider *d, pl_ask *ask, pl_dry *out)
{
    pl_policy_stats *scratch = calloc(1, sizeof *scratch), *stats = d->stats;
    if (!scratch)
        return PL_ENOMEM;
    memset(out, 0, sizeof *out);
    const pl_guard guard = d->guard;
    const uint64_t refreshes = d->refreshes;
    d->stats = scratch;
    d->dry = out;
    if (d->vm) {
        pl_vm_set_dry(d->vm, true);
        pl_vm_records(d->vm)->verdict->scored = 0;
    }
    pl_decide(d, ask, &out->decision);
    out->suspended = !d->vm || pl_vm_broken(d->vm) || d->guard.state == PL_GUARD_SUSPENDED;
    if (!out->suspended && pl_vm_hooks(d->vm) & 1u << PL_HOOK_SCORE)
        out->cost = costs(d, ask, out);
    if (d->vm)
        pl_vm_set_dry(d->vm, false);
    d->dry = NULL;
    d->stats = stats;
    d->guard = guard;
    d->refreshes = refreshes;
    free(scratch);
    return 0;
}

void pl_decide_shown(const pl_decider *d, const pl_ask *ask, int index, struct pl_worker *out)
{
    pl_refresh_shown(d, ask, index, pl_clock_now_ns(d->o.clock), out);
}
