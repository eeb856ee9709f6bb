/* The circuit breaker: see breaker.h. Called by the loops around each request and by the health
 * checks, on any thread, without locks: every change of state is one compare-and-swap from the
 * state it was decided in, so two threads never take the same step twice. While closed and healthy
 * it costs a request two loads.
 *
 *   closed --consecutive failures--> open --backoff over, or health check ok--> half open
 *     ^                               ^----------------- probe failed -----------|
 *     +------------------------------- probe succeeded --------------------------+
 *
 * `probes` is the number of probes not handed back yet, over all half-open periods: it is only ever
 * taken up below the limit and given back by its owner, never reset. */
#include "fleet/breaker.h"

#include "fleet/engine.h"

const pl_breaker_options pl_breaker_default = {
    .failures = 5,
    .backoff_ns = 1000000000u,
    .max_backoff_ns = 30000000000u,
    .half_open_probes = 1,
};

const char *pl_breaker_state_name(pl_breaker_state s)
{
    return s == PL_BREAKER_CLOSED ? "closed" : s == PL_BREAKER_OPEN ? "open" : "half_open";
}

static bool swap_state(pl_engine *e, int from, int to)
{
    return atomic_compare_exchange_strong(&e->breaker, &from, to);
}

bool pl_breaker_allows(const pl_engine *e, const pl_breaker_options *o, uint64_t now_ns)
{
    int state = atomic_load_explicit(&e->breaker, memory_order_acquire);
    if (state == PL_BREAKER_CLOSED)
        return true;
    if (state == PL_BREAKER_OPEN && now_ns < atomic_load(&e->open_until_ns))
        return false;
    return atomic_load(&e->probes) < o->half_open_probes;
}

static bool claim_probe(pl_engine *e, const pl_breaker_options *o)
{
    int n = atomic_load(&e->probes);
    while (n < o->half_open_probes)
        if (atomic_compare_exchange_weak(&e->probes, &n, n + 1))
            return true;
    return false;
}

bool pl_breaker_begin(pl_engine *e, const pl_breaker_options *o, uint64_t now_ns, bool *probe)
{
    *probe = false;
    for (;;) {
        int state = atomic_load_explicit(&e->breaker, memory_order_acquire);
        if (state == PL_BREAKER_CLOSED)
            return true;
        if (state == PL_BREAKER_OPEN) {
            if (now_ns < atomic_load(&e->open_until_ns))
                return false;
            swap_state(e, PL_BREAKER_OPEN, PL_BREAKER_HALF_OPEN);
            continue;
        }
        if (!claim_probe(e, o))
            return false;
        if (atomic_load(&e->breaker) == PL_BREAKER_HALF_OPEN) {
            *probe = true;
            return true;
        }
        /* another probe's end changed the state between the look and the claim */
        atomic_fetch_sub(&e->probes, 1);
    }
}

void pl_breaker_success(pl_engine *e, bool probe)
{
    if (probe) {
        if (swap_state(e, PL_BREAKER_HALF_OPEN, PL_BREAKER_CLOSED))
            atomic_store(&e->trips, 0);
        atomic_fetch_sub(&e->probes, 1);
    } else if (atomic_load_explicit(&e->failures, memory_order_relaxed) != 0 &&
               atomic_load_explicit(&e->breaker, memory_order_relaxed) == PL_BREAKER_CLOSED) {
        atomic_store_explicit(&e->failures, 0, memory_order_relaxed);
    }
}

static uint64_t backoff_ns(const pl_breaker_options *o, uint32_t trips)
{
    uint64_t b = o->backoff_ns;
    while (trips-- > 0 && b < o->max_backoff_ns)
        b *= 2;
    return b < o->max_backoff_ns ? b : o->max_backoff_ns;
}

/* The deadline is in place before the state says open, and only ever moves forward: whoever sees
 * "open" sees its deadline or a later one. */
static void trip(pl_engine *e, const pl_breaker_options *o, uint64_t now_ns, int from)
{
    uint32_t trips = atomic_load(&e->trips);
    if (atomic_load(&e->breaker) != from)
        return; /* another failure took this step; seen after `trips`, which counts steps taken */
    uint64_t until = now_ns + backoff_ns(o, trips);
    uint64_t old = atomic_load(&e->open_until_ns);
    while (old < until && !atomic_compare_exchange_weak(&e->open_until_ns, &old, until))
        ;
    if (swap_state(e, from, PL_BREAKER_OPEN)) {
        atomic_fetch_add(&e->trips, 1);
        atomic_store(&e->failures, 0);
        atomic_fetch_add_explicit(&e->breaker_opened, 1, memory_order_relaxed);
    }
}

void pl_breaker_failure(pl_engine *e, const pl_breaker_options *o, uint64_t now_ns, bool probe)
{
    if (probe) {
        trip(e, o, now_ns, PL_BREAKER_HALF_OPEN);
        atomic_fetch_sub(&e->probes, 1); /* after the step: nobody slips into its place */
    } else if (atomic_load(&e->breaker) == PL_BREAKER_CLOSED) {
        if (atomic_fetch_add(&e->failures, 1) + 1 >= o->failures)
            trip(e, o, now_ns, PL_BREAKER_CLOSED);
    }
}

void pl_breaker_neutral(pl_engine *e, bool probe)
{
    if (probe)
        atomic_fetch_sub(&e->probes, 1);
}

void pl_breaker_health_ok(pl_engine *e, uint64_t now_ns)
{
    (void)now_ns;
    if (atomic_load_explicit(&e->breaker, memory_order_relaxed) == PL_BREAKER_OPEN)
        swap_state(e, PL_BREAKER_OPEN, PL_BREAKER_HALF_OPEN);
}
