/* A decider's housekeeping: its life, the statistics, what happens after an error, and the hooks
 * beside the decision itself (degrade, done, tick, save). Used on the decider's thread; the stats
 * are read by others, relaxed. */
#include "policy/decider.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "policy/dry.h"
#include "policy/source.h"
#include "policy/vm_priv.h"

#define SAVE_EVERY_NS        10000000000u
#define FIRST_REBUILD_NS     1000000000u
#define MAX_REBUILD_NS       60000000000u
#define ERRORS_LOGGED_A_HOOK 1 /* a second */

/* --- life --- */

void pl_decider_options_default(pl_decider_options *o)
{
    *o = (pl_decider_options){.breaker = pl_breaker_default,
                              .max_wait_seconds = 30,
                              .max_retry_after_seconds = 3600,
                              .max_retention_seconds = 86400,
                              .default_prefill_tokens_per_second = 8000,
                              .strikes = 5,
                              .strike_window_seconds = 10,
                              .clock = pl_clock_real()};
}

pl_decider *pl_decider_new(const pl_decider_options *o, pl_policy_stats *stats)
{
    pl_decider *d = calloc(1, sizeof *d);
    if (!d)
        return NULL;
    d->o = *o;
    d->limits = (pl_limits){o->max_wait_seconds, o->max_retry_after_seconds};
    d->stats = stats;
    pl_guard_init(&d->guard, o->strikes, o->strike_window_seconds);
    return d;
}

void pl_decider_free(pl_decider *d)
{
    if (!d)
        return;
    pl_vm_free(d->vm);
    json_decref(d->carry);
    free(d);
}

pl_vm *pl_decider_swap(pl_decider *d, pl_vm *vm, uint64_t generation)
{
    pl_vm *old = d->vm;
    d->vm = vm;
    d->wants_cache = vm && pl_policy_source_names(pl_vm_source(vm), PL_STR("cached_"));
    d->generation = generation;
    pl_guard_init(&d->guard, d->o.strikes, d->o.strike_window_seconds);
    atomic_store_explicit(&d->stats->suspended, 0, memory_order_relaxed);
    memset(d->logged, 0, sizeof d->logged);
    json_decref(d->carry);
    d->carry = NULL;
    d->saved_ns = pl_clock_now_ns(d->o.clock);
    d->rebuild_ns = d->rebuild_wait = 0;
    return old;
}

pl_vm *pl_decider_vm(pl_decider *d)
{
    return d->vm;
}

uint64_t pl_decider_generation(const pl_decider *d)
{
    return d->generation;
}

static bool usable(const pl_decider *d)
{
    return d->vm && !pl_vm_broken(d->vm);
}

const char *pl_decider_policy_name(const pl_decider *d)
{
    return usable(d) && d->guard.state != PL_GUARD_SUSPENDED ? pl_vm_name(d->vm)
                                                             : "least_loaded (built in)";
}

/* --- statistics: one writer, so a plain add does --- */

static void add(_Atomic uint64_t *counter, uint64_t by)
{
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + by,
                          memory_order_relaxed);
}

void pl_decider_count(_Atomic uint64_t *counter)
{
    add(counter, 1);
}

void pl_decider_clamped(pl_decider *d, pl_ask *ask, int hook, int n)
{
    if (n == 0)
        return;
    add(&d->stats->clamped[hook], (uint64_t)n);
    ask->clamped += n;
}

static void observe(pl_decider *d, int hook, uint64_t ns)
{
    add(&d->stats->calls[hook], 1);
    pl_hist_observe(&d->stats->latency[hook], ns);
}

void pl_decider_timed(pl_decider *d, uint32_t skip, uint64_t from_ns, bool ok)
{
    const struct pl_verdict *v = pl_vm_records(d->vm)->verdict;
    uint32_t hooks = pl_vm_hooks(d->vm) & ~skip;
    uint64_t to_ns = pl_now_ns();
    if (v->admit_ns > 0) {
        uint64_t admitted = (uint64_t)v->admit_ns;
        observe(d, PL_HOOK_ADMIT, admitted > from_ns ? admitted - from_ns : 0);
        from_ns = admitted;
    }
    int last = ok ? (v->routed ? PL_HOOK_ROUTE : v->scored ? PL_HOOK_SCORE : -1) : v->hook;
    if (last < 0 || (last == PL_HOOK_ADMIT && v->admit_ns > 0))
        return;
    /* a route that left it to score is counted; its time is in score's */
    if (last == PL_HOOK_SCORE && hooks & 1u << PL_HOOK_ROUTE)
        add(&d->stats->calls[PL_HOOK_ROUTE], 1);
    observe(d, last, to_ns > from_ns ? to_ns - from_ns : 0);
}

/* --- trust --- */

bool pl_decider_admits(pl_decider *d, uint64_t now_ns)
{
    return usable(d) && pl_guard_admits(&d->guard, now_ns);
}

bool pl_decider_may_ask(const pl_decider *d)
{
    return usable(d) && d->guard.state != PL_GUARD_SUSPENDED;
}

void pl_decider_good(pl_decider *d, uint64_t now_ns)
{
    if (!pl_guard_success(&d->guard, now_ns) || d->dry)
        return;
    atomic_store_explicit(&d->stats->suspended, 0, memory_order_relaxed);
    pl_log(PL_LOG_WARN, "policy_resumed", "policy %s decides again", pl_vm_name(d->vm));
}

static void log_error(pl_decider *d, int hook, const pl_vm_error *err)
{
    if (d->logged[hook] && !pl_log_allow(d->log_state[hook], ERRORS_LOGGED_A_HOOK))
        return;
    unsigned long dropped = d->log_state[hook][1];
    d->log_state[hook][1] = 0;
    d->logged[hook] = true;
    char more[64] = "";
    if (dropped)
        snprintf(more, sizeof more, " (and %lu more since the last line)", dropped);
    pl_log(PL_LOG_ERROR, "policy_error", "policy %s, hook %s: %s:%d: %s%s", pl_vm_name(d->vm),
           pl_hook_name(hook), err->file, err->line, err->message, more);
}

void pl_decider_failed(pl_decider *d, int hook, const pl_vm_error *err, uint64_t now_ns)
{
    if (d->dry) {
        if (!d->dry->failed) {
            d->dry->failed = true;
            d->dry->hook = hook;
            d->dry->error = *err;
        }
        return;
    }
    add(&d->stats->errors[hook], 1);
    log_error(d, hook, err);
    if (!pl_guard_strike(&d->guard, now_ns))
        return;
    add(&d->stats->suspensions, 1);
    atomic_store_explicit(&d->stats->suspended, 1, memory_order_relaxed);
    pl_log(PL_LOG_ERROR, "policy_suspended",
           "policy %s keeps failing: suspended for %.0f s, least_loaded (built in) decides; last: "
           "%s:%d: %s",
           pl_vm_name(d->vm), (double)d->guard.backoff_ns * 1e-9, err->file, err->line,
           err->message);
}

bool pl_decider_has(const pl_decider *d, int hook)
{
    return pl_decider_may_ask(d) && pl_vm_hooks(d->vm) & 1u << hook;
}

void pl_decider_called(pl_decider *d, int hook, uint64_t from_ns, int rc, const pl_vm_error *err)
{
    observe(d, hook, pl_now_ns() - from_ns);
    if (rc < 0)
        pl_decider_failed(d, hook, err, pl_clock_now_ns(d->o.clock));
}

/* --- degrade --- */

/* What degrade answered, or PL_DEFAULT with arg -1. */
static int ask_degrade(pl_decider *d, pl_ask *ask, const struct pl_fault *fault, double *arg)
{
    *arg = -1;
    if (!pl_decider_has(d, PL_HOOK_DEGRADE))
        return PL_DEFAULT;
    pl_records *r = pl_vm_records(d->vm);
    pl_vm_error err;
    pl_refresh_alone(d, ask);
    *r->fault = *fault;
    uint64_t from = pl_now_ns();
    int rc = pl_vm_degrade(d->vm, &err);
    if (rc == 0)
        rc = pl_verdict_judge_fault(d->vm, &err);
    pl_decider_called(d, PL_HOOK_DEGRADE, from, rc, &err);
    if (rc < 0)
        return PL_DEFAULT;
    *arg = r->verdict->arg;
    return (int)r->verdict->action;
}

int pl_decide_fault(pl_decider *d, pl_ask *ask, const struct pl_fault *fault, double *arg)
{
    int clamped = 0;
    double given;
    int action = ask_degrade(d, ask, fault, &given);
    if (action == PL_RETRY && fault->kind == PL_ENGINE_FAILED && !fault->budget_left) {
        action = PL_REJECT;
        given = -1;
        clamped++;
    }
    if (action == PL_DEFAULT) {
        action = pl_verdict_fault_default(fault);
        given = -1;
    }
    if (action == PL_QUEUE)
        *arg = given == -1 ? d->o.max_wait_seconds
                           : pl_verdict_clamp(given, 0, d->o.max_wait_seconds, &clamped);
    else if (action == PL_REJECT)
        *arg = given == -1 ? 1 : pl_verdict_clamp(given, 0, d->o.max_retry_after_seconds, &clamped);
    else
        *arg = given;
    pl_decider_clamped(d, ask, PL_HOOK_DEGRADE, clamped);
    return action;
}

/* --- done --- */

bool pl_decider_wants_cache(const pl_decider *d)
{
    return d->wants_cache && pl_decider_may_ask(d);
}

bool pl_decider_wants_degrade(const pl_decider *d)
{
    return pl_decider_has(d, PL_HOOK_DEGRADE);
}

bool pl_decider_assumes_reuse(const pl_decider *d)
{
    return usable(d) && pl_vm_assumes_reuse(d->vm);
}

bool pl_decider_wants_done(const pl_decider *d)
{
    return pl_decider_has(d, PL_HOOK_DONE);
}

static int generation_of(const pl_ask *ask, int slot)
{
    for (int i = 0; slot >= 0 && ask->model && i < ask->model->workers_n; i++)
        if (ask->model->workers[i]->slot == slot)
            return ask->model->workers[i]->generation;
    return -1;
}

void pl_decide_done(pl_decider *d, pl_ask *ask, const struct pl_outcome *outcome)
{
    if (!pl_decider_wants_done(d))
        return;
    pl_records *r = pl_vm_records(d->vm);
    pl_vm_error err;
    pl_refresh_alone(d, ask);
    *r->outcome = *outcome;
    r->outcome->generation = generation_of(ask, outcome->slot);
    r->outcome->clamped = ask->clamped;
    uint64_t from = pl_now_ns();
    int rc = pl_vm_done(d->vm, &err);
    pl_decider_called(d, PL_HOOK_DONE, from, rc, &err);
}

/* --- tick: the hook, save, rebuilding --- */

static void save(pl_decider *d, uint64_t now_ns)
{
    json_t *carry;
    pl_vm_error err;
    d->saved_ns = now_ns;
    uint64_t from = pl_now_ns();
    int rc = pl_vm_save(d->vm, &carry, &err);
    pl_decider_called(d, PL_HOOK_SAVE, from, rc, &err);
    if (rc < 0)
        return;
    json_decref(d->carry);
    d->carry = carry;
}

/* The VM met its memory cap: the same bytes again, from the last saved state. */
static void rebuild(pl_decider *d, uint64_t now_ns)
{
    pl_vm *fresh;
    pl_vm_error err;
    if (now_ns < d->rebuild_ns)
        return;
    int rc = pl_vm_new(pl_vm_source(d->vm), pl_vm_options_of(d->vm), &fresh, &err);
    if (rc == 0 && (rc = pl_vm_init(fresh, d->carry, &err)) < 0) {
        pl_vm_free(fresh);
        fresh = NULL;
    }
    if (rc < 0) {
        d->rebuild_wait = d->rebuild_wait ? d->rebuild_wait * 2 : FIRST_REBUILD_NS;
        if (d->rebuild_wait > MAX_REBUILD_NS)
            d->rebuild_wait = MAX_REBUILD_NS;
        d->rebuild_ns = now_ns + d->rebuild_wait;
        pl_log(PL_LOG_ERROR, "policy_rebuild_failed", "policy %s, stage %s: %s:%d: %s",
               pl_vm_name(d->vm), err.stage, err.file, err.line, err.message);
        return;
    }
    pl_vm_free(d->vm);
    d->vm = fresh;
    d->rebuild_wait = 0;
    add(&d->stats->vm_rebuilds, 1);
    pl_log(PL_LOG_WARN, "policy_rebuilt", "policy %s: a fresh VM after the memory cap was reached",
           pl_vm_name(fresh));
}

void pl_decider_tick(pl_decider *d, double now_seconds)
{
    uint64_t now_ns = pl_clock_now_ns(d->o.clock);
    if (!d->vm)
        return;
    if (pl_vm_broken(d->vm))
        rebuild(d, now_ns);
    if (!pl_decider_may_ask(d))
        return;
    if (pl_decider_has(d, PL_HOOK_TICK)) {
        pl_vm_error err;
        uint64_t from = pl_now_ns();
        int rc = pl_vm_tick(d->vm, now_seconds, &err);
        pl_decider_called(d, PL_HOOK_TICK, from, rc, &err);
    }
    if (pl_decider_has(d, PL_HOOK_SAVE) && now_ns - d->saved_ns >= SAVE_EVERY_NS)
        save(d, now_ns);
}
