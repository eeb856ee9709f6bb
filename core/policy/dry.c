/* See dry.h. The real decision runs, on the real records; what it would leave behind is kept aside
 * before and put back after. Called by http/explain.c on its loop. */
#include "policy/dry.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "policy/decider.h"

#define BIT(hook) (1u << (hook))

/* So that what no hook has written can be told. */
static void blank_costs(pl_decider *d, const pl_ask *ask)
{
    pl_records *r = pl_vm_records(d->vm);
    for (int i = 0; ask->model && i < ask->model->workers_n && i < PL_MAX_WORKERS; i++)
        r->cost[i] = NAN;
    r->verdict->scored = r->verdict->routed = 0;
}

static const double *costs(pl_decider *d, pl_ask *ask)
{
    pl_records *r = pl_vm_records(d->vm);
    bool scores = pl_vm_hooks(d->vm) & BIT(PL_HOOK_SCORE);
    pl_vm_error err;
    if (scores ? r->verdict->scored : r->verdict->routed)
        return r->cost;
    /* admit, route or a binding has spoken first; what the others would have said is of interest */
    blank_costs(d, ask);
    if (pl_refresh(d, ask, pl_clock_now_ns(d->o.clock)).eligible == 0)
        return NULL;
    if (pl_vm_decide(d->vm, BIT(PL_HOOK_ADMIT) | (scores ? BIT(PL_HOOK_ROUTE) : 0), &err) == 0)
        return r->cost;
    pl_decider_failed(d, pl_vm_records(d->vm)->verdict->hook, &err, 0);
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
        blank_costs(d, ask);
    }
    pl_decide(d, ask, &out->decision);
    out->suspended = !d->vm || pl_vm_broken(d->vm) || d->guard.state == PL_GUARD_SUSPENDED;
    if (!out->suspended && pl_vm_hooks(d->vm) & (BIT(PL_HOOK_SCORE) | BIT(PL_HOOK_ROUTE)))
        out->cost = costs(d, ask);
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
