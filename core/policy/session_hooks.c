/* The hooks around a session: session (before routing), retain (after it) and expire. Called by the
 * proxy, and by the router when a session has expired, on the decider's thread. Each is one entry
 * into the VM; without the hook, and after its failure, what was given stays. An absent hook costs
 * a look at a bit: not even its record is filled. */
#include "policy/decider.h"

#include <math.h>

#define LEAST_TTL_SECONDS 0.001

static double clamp_ttl(double ttl, double max_seconds, int *clamped)
{
    return ttl == 0 ? 0 : pl_verdict_clamp(ttl, LEAST_TTL_SECONDS, max_seconds, clamped);
}

/* What was given is within the limits, too, but that is no mistake of a policy. */
static void within(double max_ttl_seconds, pl_session_choice *choice)
{
    int unused = 0;
    if (choice->ttl_seconds != 0)
        choice->ttl_seconds = clamp_ttl(choice->ttl_seconds, max_ttl_seconds, &unused);
}

static void use_session(const pl_ask *ask, const struct pl_verdict *v, double max_ttl_seconds,
                        pl_session_choice *choice, int *clamped)
{
    if (v->given & 1)
        choice->ttl_seconds = clamp_ttl(v->arg, max_ttl_seconds, clamped);
    if (v->given & 2 && (int)v->action != choice->kind) {
        if (ask->session.bound_slot >= 0)
            ++*clamped; /* bound: its kind stands */
        else
            choice->kind = (int)v->action;
    }
    choice->by_policy = v->given != 0;
}

void pl_decide_session(pl_decider *d, pl_ask *ask, double max_ttl_seconds, pl_session_choice *inout)
{
    inout->by_policy = false;
    if (ask->session.event != PL_SESSION_NONE && pl_decider_has(d, PL_HOOK_SESSION)) {
        pl_vm_error err;
        int clamped = 0;
        pl_refresh_alone(d, ask);
        uint64_t from = pl_now_ns();
        int rc = pl_vm_session(d->vm, &err);
        pl_decider_called(d, PL_HOOK_SESSION, from, rc, &err);
        if (rc == 0)
            use_session(ask, pl_vm_records(d->vm)->verdict, max_ttl_seconds, inout, &clamped);
        pl_decider_clamped(d, ask, PL_HOOK_SESSION, clamped);
    }
    within(max_ttl_seconds, inout);
}

bool pl_decider_wants_retain(const pl_decider *d)
{
    return pl_decider_has(d, PL_HOOK_RETAIN);
}

void pl_decide_retain(pl_decider *d, pl_ask *ask, pl_worker_state *w, pl_retain_choice *inout)
{
    pl_vm_error err;
    int clamped = 0;
    if (!pl_decider_wants_retain(d))
        return;
    pl_refresh_one(d, ask, w, pl_clock_now_ns(d->o.clock));
    uint64_t from = pl_now_ns();
    int rc = pl_vm_retain(d->vm, &err);
    pl_decider_called(d, PL_HOOK_RETAIN, from, rc, &err);
    if (rc < 0)
        return;
    const struct pl_verdict *v = pl_vm_records(d->vm)->verdict;
    if (v->given & 1)
        inout->retention_seconds =
            pl_verdict_clamp(v->arg, 0, d->o.max_retention_seconds, &clamped);
    if (v->given & 2) {
        double whole = trunc(v->action);
        clamped += whole != v->action;
        inout->priority = (int32_t)pl_verdict_clamp(whole, INT32_MIN, INT32_MAX, &clamped);
        inout->has_priority = true;
    }
    pl_decider_clamped(d, ask, PL_HOOK_RETAIN, clamped);
}

int pl_decide_expire(pl_decider *d, const struct pl_session *s, const pl_request_view *names,
                     double max_ttl_seconds, double *seconds)
{
    pl_ask ask = {.strings = *names, .session = *s, .session_parent = names->session_parent};
    pl_vm_error err;
    int clamped = 0;
    *seconds = 0;
    if (!ask.strings.seed) /* of pl.random: there is no request that gave one */
        ask.strings.seed = (uint64_t)s->id_hash ^ pl_clock_now_ns(d->o.clock);
    if (!pl_decider_has(d, PL_HOOK_EXPIRE))
        return PL_CLOSE;
    if (ask.session.event == PL_SESSION_NONE)
        ask.session.event = PL_SESSION_CLOSE;
    pl_refresh_alone(d, &ask);
    uint64_t from = pl_now_ns();
    int rc = pl_vm_expire(d->vm, &err);
    pl_decider_called(d, PL_HOOK_EXPIRE, from, rc, &err);
    if (rc < 0)
        return PL_CLOSE;
    const struct pl_verdict *v = pl_vm_records(d->vm)->verdict;
    if (v->action == PL_EXTEND)
        *seconds = pl_verdict_clamp(v->arg, LEAST_TTL_SECONDS, max_ttl_seconds, &clamped);
    pl_decider_clamped(d, &ask, PL_HOOK_EXPIRE, clamped);
    return (int)v->action;
}
