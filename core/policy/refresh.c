/* Fills a VM's records from the fleet's atomics: what a policy sees of the workers. Called for
 * every decision on the decider's thread; reads what other threads change, each field relaxed. */
#include "policy/decider.h"

#include <math.h>

#define SAMPLE_EVERY 64 /* decisions of which the filling is timed */

static bool was_tried(const pl_ask *ask, const pl_engine *e)
{
    for (int i = 0; i < ask->tried_n; i++)
        if (ask->tried[i]->engine == e)
            return true;
    return false;
}

/* What the engine of the last worker said: ranks of one engine stand together. */
typedef struct why_cache {
    const pl_engine *engine;
    int why;
} why_cache;

/* What an engine holds already needs no room there. */
__attribute__((noinline)) static bool cannot_open(const pl_ask *ask, const pl_worker_state *w)
{
    return ask->can_open && !(ask->pin_must && w == ask->pin) &&
           !ask->can_open(ask->can_open_ctx, w);
}

static int why_not(const pl_ask *ask, const pl_breaker_options *breaker, const pl_worker_state *w,
                   uint64_t now_ns, why_cache *last)
{
    if (w->engine != last->engine) {
        last->engine = w->engine;
        last->why =
            was_tried(ask, w->engine) ? PL_WHY_TRIED : pl_engine_why(w->engine, breaker, now_ns);
    }
    if (last->why != PL_WHY_ELIGIBLE)
        return last->why;
    /* before the cap: waiting for room would not help */
    if (__builtin_expect(ask->wants_open, 0) && cannot_open(ask, w))
        return PL_WHY_NO_SESSIONS;
    return pl_worker_at_capacity(w) ? PL_WHY_AT_CAPACITY : PL_WHY_ELIGIBLE;
}

static int candidates(const pl_ask *ask)
{
    if (!ask->model)
        return 0;
    return ask->model->workers_n < PL_MAX_WORKERS ? ask->model->workers_n : PL_MAX_WORKERS;
}

static pl_str name_of(void *ctx, int index)
{
    const pl_model *m = ctx;
    return pl_str_c(m->workers[index]->name);
}

/* The match of the decision under way. */
typedef struct hits {
    const pl_kv_hit *by_slot;
    uint32_t stamp;
} hits;

/* The compiler's own judgement ends when there are two callers; the loop of pl_refresh is hot. */
#define INLINE static inline __attribute__((always_inline))

INLINE void fill_worker(struct pl_worker *r, const pl_worker_state *w, int index, int why,
                        double default_rate, const hits *h, uint64_t machine_ns)
{
    const pl_engine *e = w->engine;
    double rate = atomic_load_explicit(&w->prefill_tokens_per_second, memory_order_relaxed);
    r->inflight = atomic_load_explicit(&w->inflight, memory_order_relaxed);
    r->queued_prefill_tokens =
        (double)atomic_load_explicit(&w->queued_prefill_tokens, memory_order_relaxed);
    r->streams = atomic_load_explicit(&w->streams, memory_order_relaxed);
    r->cached_tokens = r->cached_host_tokens = r->cached_disk_tokens = 0;
    if (h->by_slot && h->by_slot[w->slot].stamp == h->stamp) {
        r->cached_tokens = h->by_slot[w->slot].device;
        r->cached_host_tokens = h->by_slot[w->slot].host;
        r->cached_disk_tokens = h->by_slot[w->slot].disk;
    }
    r->decode_blocks = (double)atomic_load_explicit(&w->decode_blocks, memory_order_relaxed);
    r->session_tokens = (double)atomic_load_explicit(&w->session_tokens, memory_order_relaxed);
    r->sessions = atomic_load_explicit(&w->sessions, memory_order_relaxed);
    r->kv_trust = atomic_load_explicit(&w->kv_trust, memory_order_relaxed);
    int32_t block = atomic_load_explicit(&w->block_tokens, memory_order_relaxed);
    r->block_tokens = block > 0 ? block : PL_LEDGER_BLOCK_TOKENS;
    uint64_t gauges_ns = atomic_load_explicit(&w->gauges_at_ns, memory_order_relaxed);
    if (gauges_ns) {
        r->running_requests = atomic_load_explicit(&w->running_requests, memory_order_relaxed);
        r->waiting_requests = atomic_load_explicit(&w->waiting_requests, memory_order_relaxed);
        r->kv_usage = atomic_load_explicit(&w->kv_usage, memory_order_relaxed);
        r->gauges_age_seconds = machine_ns > gauges_ns ? (double)(machine_ns - gauges_ns) / 1e9 : 0;
    } else {
        r->running_requests = r->waiting_requests = r->kv_usage = -1;
        r->gauges_age_seconds = INFINITY;
    }
    r->max_inflight = e->max_inflight > 0 ? e->max_inflight : INFINITY;
    r->max_queued_prefill_tokens =
        e->max_queued_prefill_tokens > 0 ? (double)e->max_queued_prefill_tokens : INFINITY;
    r->prefill_tokens_per_second = rate > 0 ? rate : default_rate;
    r->ttft_seconds = atomic_load_explicit(&w->ttft_seconds, memory_order_relaxed);
    r->weight = e->weight;
    r->index = index;
    r->slot = w->slot;
    r->generation = w->generation;
    r->rank = w->rank;
    r->why = why;
    r->eligible = why == PL_WHY_ELIGIBLE;
}

/* Index of the worker that the session is bound to; -1 when there is none, or it left. */
static int bound_index(const pl_ask *ask, int n)
{
    if (ask->session.event == PL_SESSION_NONE || ask->session.bound_slot < 0)
        return -1;
    for (int i = 0; i < n; i++) {
        const pl_worker_state *w = ask->model->workers[i];
        if (w->slot == ask->session.bound_slot && w->generation == ask->session.bound_generation)
            return i;
    }
    return -1;
}

/* Binds the request's strings, its record and that of its session; the fleet is left alone. */
INLINE void fill_request(pl_decider *d, pl_ask *ask, int bound_index)
{
    pl_records *r = pl_vm_records(d->vm);
    if (ask->session.event == PL_SESSION_NONE) {
        r->session->event = PL_SESSION_NONE; /* req.session is nil */
    } else {
        ask->strings.session_parent = ask->session_parent;
        *r->session = ask->session;
        r->session->bound_index = bound_index;
    }
    pl_vm_bind(d->vm, &ask->strings);
    *r->req = ask->req;
}

void pl_refresh_alone(pl_decider *d, pl_ask *ask)
{
    pl_records *r = pl_vm_records(d->vm);
    r->fleet->n = r->fleet->eligible = 0;
    fill_request(d, ask, -1);
}

static pl_str name_of_one(void *ctx, int index)
{
    const pl_worker_state *w = ctx;
    return pl_str_c(w->name);
}

void pl_refresh_one(pl_decider *d, pl_ask *ask, pl_worker_state *w, uint64_t now_ns)
{
    pl_records *r = pl_vm_records(d->vm);
    why_cache last = {NULL, 0};
    int why = why_not(ask, &d->o.breaker, w, now_ns, &last);
    bool bound =
        w->slot == ask->session.bound_slot && w->generation == ask->session.bound_generation;
    ask->strings.worker_name = name_of_one;
    ask->strings.worker_ctx = w;
    fill_request(d, ask, bound ? 0 : -1);
    const hits h = {NULL, 0};
    fill_worker(&r->workers[0], w, 0, why, d->o.default_prefill_tokens_per_second, &h, now_ns);
    r->fleet->n = 1;
    r->fleet->eligible = r->workers[0].eligible;
}

pl_pin pl_refresh_pin(const pl_decider *d, const pl_ask *ask, uint64_t now_ns)
{
    why_cache last = {NULL, 0};
    pl_pin none = ask->pin_must ? PL_PIN_OUT : PL_PIN_NONE;
    int n = candidates(ask);
    for (int i = 0; ask->pin && i < n; i++) {
        if (ask->model->workers[i] != ask->pin)
            continue;
        switch (why_not(ask, &d->o.breaker, ask->pin, now_ns, &last)) {
        case PL_WHY_ELIGIBLE:
            return PL_PIN_HELD;
        case PL_WHY_AT_CAPACITY:
            return ask->pin_must ? PL_PIN_WAIT : PL_PIN_FULL;
        default:
            return none;
        }
    }
    return none;
}

bool pl_refresh_others(const pl_decider *d, const pl_ask *ask, uint64_t now_ns)
{
    why_cache last = {NULL, 0};
    for (int i = 0; ask->wants_open && i < candidates(ask); i++)
        if (why_not(ask, &d->o.breaker, ask->model->workers[i], now_ns, &last) ==
            PL_WHY_NO_SESSIONS)
            return true;
    return false;
}

pl_crowd pl_refresh(pl_decider *d, pl_ask *ask, uint64_t now_ns)
{
    uint64_t from = d->refreshes++ % SAMPLE_EVERY ? 0 : pl_now_ns();
    pl_records *r = pl_vm_records(d->vm);
    int n = candidates(ask);
    pl_crowd crowd = {0, 0};
    why_cache last = {NULL, 0};
    ask->strings.worker_name = name_of;
    ask->strings.worker_ctx = (void *)(uintptr_t)ask->model;
    fill_request(d, ask, bound_index(ask, n));
    hits h = {NULL, 0};
    if (ask->match)
        h.by_slot = ask->match(ask->match_ctx, &h.stamp);
    ask->hits = h.by_slot;
    ask->hits_stamp = h.stamp;
    for (int i = 0; i < n; i++) {
        const pl_worker_state *w = ask->model->workers[i];
        int why = why_not(ask, &d->o.breaker, w, now_ns, &last);
        fill_worker(&r->workers[i], w, i, why, d->o.default_prefill_tokens_per_second, &h, now_ns);
        crowd.eligible += why == PL_WHY_ELIGIBLE;
        crowd.busy += why == PL_WHY_AT_CAPACITY;
    }
    r->fleet->n = n;
    r->fleet->eligible = crowd.eligible;
    if (from)
        atomic_store_explicit(&d->stats->refresh_ns, pl_now_ns() - from, memory_order_relaxed);
    return crowd;
}

void pl_refresh_shown(const pl_decider *d, const pl_ask *ask, int index, uint64_t now_ns,
                      struct pl_worker *out)
{
    why_cache last = {NULL, 0};
    const pl_worker_state *w = ask->model->workers[index];
    const hits h = {ask->hits, ask->hits_stamp};
    fill_worker(out, w, index, why_not(ask, &d->o.breaker, w, now_ns, &last),
                d->o.default_prefill_tokens_per_second, &h, now_ns);
}

pl_crowd pl_refresh_count(const pl_decider *d, const pl_ask *ask, uint64_t now_ns)
{
    pl_crowd crowd = {0, 0};
    why_cache last = {NULL, 0};
    for (int i = 0; i < candidates(ask); i++) {
        int why = why_not(ask, &d->o.breaker, ask->model->workers[i], now_ns, &last);
        crowd.eligible += why == PL_WHY_ELIGIBLE;
        crowd.busy += why == PL_WHY_AT_CAPACITY;
    }
    return crowd;
}

pl_worker_state *pl_decide_least_loaded(const pl_ask *ask, const pl_decider_options *o,
                                        uint64_t now_ns)
{
    why_cache last = {NULL, 0};
    pl_rng rng = {ask->strings.seed};
    pl_worker_state *best = NULL;
    double least = INFINITY;
    uint32_t ties = 0;
    for (int i = 0; i < candidates(ask); i++) {
        pl_worker_state *w = ask->model->workers[i];
        if (why_not(ask, &o->breaker, w, now_ns, &last) != PL_WHY_ELIGIBLE)
            continue;
        double load = atomic_load_explicit(&w->inflight, memory_order_relaxed) + 1;
        /* a share of 0 is a last resort */
        load = w->engine->weight > 0 ? load / w->engine->weight : load * 1e12;
        if (load > least)
            continue;
        ties = load < least ? 1 : ties + 1;
        least = load;
        if (ties == 1 || pl_rng_below(&rng, ties) == 0)
            best = w;
    }
    return best;
}
