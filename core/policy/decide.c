/* The main decision: which worker serves a request. Called by the proxy on its loop, and by the
 * simulator; reads the fleet's atomics, asks the policy in one entry, checks the answer, and falls
 * back: a failed hook is skipped (its default applies), then fewest requests in flight, then
 * nobody. Start reading at pl_decide. The decider owns its VM; what keeps a failing policy away is
 * in guard.c, what judges answers in verdict.c, what feeds the records in refresh.c, the
 * hooks around a session in session_hooks.c, and the decider's housekeeping in decider.c. */
#include "policy/decider.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static void decided(pl_decision *out, pl_worker_state *w, const char *reason, bool by_policy)
{
    out->kind = w ? PL_DECIDED : PL_NO_WORKER;
    out->worker = w;
    out->by_policy = by_policy;
    snprintf(out->reason, sizeof out->reason, "%s", reason);
}

static void shed(pl_decision *out, double retry_after_seconds)
{
    out->kind = PL_ASK_SHED;
    out->retry_after_seconds = retry_after_seconds;
}

/* Waiting has an end: what was waited already counts. */
static void queue(const pl_decider *d, const pl_ask *ask, pl_decision *out, double seconds)
{
    out->kind = PL_ASK_QUEUE;
    out->wait_seconds = fmin(seconds, d->o.max_wait_seconds - ask->req.waited_seconds);
    if (!(out->wait_seconds > 0))
        shed(out, 1);
}

static void all_busy(pl_decider *d, pl_ask *ask, pl_decision *out)
{
    struct pl_fault fault = {.waited_seconds = ask->req.waited_seconds,
                             .kind = PL_ALL_BUSY,
                             .attempts = ask->req.attempt,
                             .delta = ask->session.event && ask->session.delta};
    double arg;
    strcpy(out->reason, "all_busy");
    if (pl_decide_fault(d, ask, &fault, &arg) == PL_QUEUE)
        queue(d, ask, out, arg);
    else
        shed(out, arg);
    out->all_busy = out->kind == PL_ASK_QUEUE;
}

#define SPILL "session_spill"

/* Uses a judged answer. False when the policy chose nobody. */
static bool apply(pl_decider *d, pl_ask *ask, const pl_judged *j, pl_pin pin, pl_decision *out)
{
    for (int hook = 0; hook < PL_HOOK_COUNT; hook++)
        pl_decider_clamped(d, ask, hook, j->clamped[hook]);
    if (j->shrink_max_tokens > 0)
        out->shrink_max_tokens = j->shrink_max_tokens;
    if (j->action == PL_ADMIT && j->index < 0)
        return false;
    bool spill = pin == PL_PIN_FULL && j->index >= 0 && !j->own_reason;
    decided(out, j->index < 0 ? NULL : ask->model->workers[j->index], spill ? SPILL : j->reason,
            true);
    if (j->action == PL_QUEUE)
        queue(d, ask, out, j->arg);
    else if (j->action == PL_SHED)
        shed(out, j->arg);
    return true;
}

/* admit said SHRINK before another hook failed: that stands. */
static void keep_shrink(pl_decider *d, pl_ask *ask, pl_decision *out)
{
    int clamped = 0;
    out->shrink_max_tokens = pl_verdict_shrink(pl_vm_records(d->vm), &clamped);
    pl_decider_clamped(d, ask, PL_HOOK_ADMIT, clamped);
}

#define BIT(hook) (1u << (hook))

/* Hooks that have nothing to say: the session's binding is the choice. */
static uint32_t not_asked(pl_pin pin)
{
    return pin == PL_PIN_HELD || pin == PL_PIN_WAIT ? BIT(PL_HOOK_ROUTE) | BIT(PL_HOOK_SCORE) : 0;
}

/* Admit, route and score in one entry; after an error again without the hook that failed and
 * without those that have answered already. False when no hook chose. */
static bool ask_policy(pl_decider *d, pl_ask *ask, pl_pin pin, pl_decision *out, uint64_t now_ns)
{
    static const uint32_t answered[PL_HOOK_COUNT] = {
        [PL_HOOK_ADMIT] = BIT(PL_HOOK_ADMIT),
        [PL_HOOK_ROUTE] = BIT(PL_HOOK_ADMIT) | BIT(PL_HOOK_ROUTE),
        [PL_HOOK_SCORE] = BIT(PL_HOOK_ADMIT) | BIT(PL_HOOK_ROUTE) | BIT(PL_HOOK_SCORE)};
    uint32_t skip = not_asked(pin);
    bool failed = false;
    while (pl_decider_may_ask(d)) {
        pl_vm_error err;
        pl_judged j;
        uint64_t from = pl_now_ns();
        int rc = pl_vm_decide(d->vm, skip, &err);
        pl_decider_timed(d, skip, from, rc == 0);
        if (rc == 0)
            rc = pl_verdict_judge(d->vm, &d->limits, &j, &err);
        if (rc == 0) {
            if (!failed)
                pl_decider_good(d, now_ns);
            if (apply(d, ask, &j, pin, out))
                return true;
            break;
        }
        failed = true;
        int hook = pl_vm_records(d->vm)->verdict->hook;
        if (hook != PL_HOOK_ADMIT && !(skip & BIT(PL_HOOK_ADMIT)))
            keep_shrink(d, ask, out);
        skip |= answered[hook];
        pl_decider_failed(d, hook, &err, now_ns);
        if (hook == PL_HOOK_SCORE || !answered[hook])
            break; /* the last hook: there is nothing left to ask */
    }
    if (failed)
        pl_decider_count(&d->stats->fallbacks);
    return false;
}

static pl_pin pin_of(const pl_decider *d, const pl_ask *ask, uint64_t now_ns)
{
    if (!ask->pin && !ask->pin_must)
        return PL_PIN_NONE;
    pl_pin pin = pl_refresh_pin(d, ask, now_ns);
    return pin == PL_PIN_HELD && !ask->pin_must && d->vm && pl_vm_soft(d->vm) ? PL_PIN_SOFT : pin;
}

/* The policy chose nobody, failed or was not asked. */
static void fall_back(pl_decider *d, pl_ask *ask, pl_pin pin, pl_crowd crowd, pl_decision *out,
                      uint64_t now_ns)
{
    if (pin == PL_PIN_HELD || pin == PL_PIN_SOFT)
        decided(out, ask->pin, "session", false);
    else if (pin == PL_PIN_WAIT || crowd.eligible == 0)
        all_busy(d, ask, out);
    else
        decided(out, pl_decide_least_loaded(ask, &d->o, now_ns),
                pin == PL_PIN_FULL ? SPILL : "least_loaded", false);
}

static void choose(pl_decider *d, pl_ask *ask, pl_decision *out)
{
    uint64_t now_ns = pl_clock_now_ns(d->o.clock);
    memset(out, 0, offsetof(pl_decision, reason) + 1);
    out->kind = PL_NO_WORKER;
    out->shrink_max_tokens = -1;
    pl_pin pin = pin_of(d, ask, now_ns);
    if (pin == PL_PIN_OUT) {
        out->kind = PL_PIN_LOST;
        return;
    }
    bool bound = not_asked(pin) != 0;
    /* asked in any case: it is what ends a suspension, of the other hooks, too */
    bool policy = pl_decider_admits(d, now_ns) && (!bound || pl_decider_has(d, PL_HOOK_ADMIT));
    pl_crowd crowd = {0, 0};
    if (policy)
        crowd = pl_refresh(d, ask, now_ns);
    else if (!bound)
        crowd = pl_refresh_count(d, ask, now_ns);
    if (!bound && crowd.eligible == 0 && crowd.busy == 0) {
        if (pl_refresh_others(d, ask, now_ns))
            out->kind = PL_NO_SESSION_WORKER;
        return;
    }
    if (!policy || !ask_policy(d, ask, pin, out, now_ns))
        fall_back(d, ask, pin, crowd, out, now_ns);
    out->spilled = pin == PL_PIN_FULL && out->kind == PL_DECIDED;
}

void pl_decide(pl_decider *d, pl_ask *ask, pl_decision *out)
{
    ask->hits = NULL;
    choose(d, ask, out);
    pl_decide_cached(ask, out);
}

void pl_decide_cached(pl_ask *ask, pl_decision *out)
{
    out->cached_tokens = 0;
    if (out->kind != PL_DECIDED)
        return;
    if (!ask->hits && ask->match) /* nobody was asked, but the ledger is to be right */
        ask->hits = ask->match(ask->match_ctx, &ask->hits_stamp);
    if (ask->hits && ask->hits[out->worker->slot].stamp == ask->hits_stamp)
        out->cached_tokens = ask->hits[out->worker->slot].device;
}
