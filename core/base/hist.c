/* Histogram: see hist.h. Observed by its owner's thread, read by any. */
#include "base/hist.h"

#include <math.h>

#define FIRST_SHIFT 6 /* 64 ns */

static int bucket_of(uint64_t ns)
{
    if (ns <= (1u << FIRST_SHIFT))
        return 0;
    ns--; /* bounds belong to the bucket below them, as in Prometheus' "le" */
    int log2 = 63 - __builtin_clzll(ns);
    int half = (int)((ns >> (log2 - 1)) & 1);
    int i = (log2 - FIRST_SHIFT) * 2 + half + 1;
    return i < PL_HIST_BUCKETS ? i : PL_HIST_BUCKETS - 1;
}

uint64_t pl_hist_bound_ns(int i)
{
    if (i >= PL_HIST_BUCKETS - 1)
        return UINT64_MAX;
    if (i == 0)
        return 1u << FIRST_SHIFT;
    int log2 = (i - 1) / 2 + FIRST_SHIFT;
    uint64_t base = (uint64_t)1 << log2;
    return (i - 1) % 2 ? base * 2 : base + base / 2;
}

/* One writer: a plain load and store cannot lose a count, and costs no locked instruction. */
static void bump(_Atomic uint64_t *c, uint64_t by)
{
    atomic_store_explicit(c, atomic_load_explicit(c, memory_order_relaxed) + by,
                          memory_order_relaxed);
}

void pl_hist_observe(pl_hist *h, uint64_t ns)
{
    bump(&h->count[bucket_of(ns)], 1);
    bump(&h->total, 1);
    bump(&h->sum_ns, ns);
}

void pl_hist_merge(pl_hist *into, const pl_hist *from)
{
    for (int i = 0; i < PL_HIST_BUCKETS; i++)
        bump(&into->count[i], atomic_load_explicit(&from->count[i], memory_order_relaxed));
    bump(&into->total, atomic_load_explicit(&from->total, memory_order_relaxed));
    bump(&into->sum_ns, atomic_load_explicit(&from->sum_ns, memory_order_relaxed));
}

uint64_t pl_hist_quantile_ns(const pl_hist *h, double q)
{
    uint64_t total = 0;
    for (int i = 0; i < PL_HIST_BUCKETS; i++)
        total += atomic_load_explicit(&h->count[i], memory_order_relaxed);
    uint64_t want = (uint64_t)ceil(q * (double)total - 1e-6), seen = 0;
    if (total == 0)
        return 0;
    for (int i = 0; i < PL_HIST_BUCKETS; i++) {
        seen += atomic_load_explicit(&h->count[i], memory_order_relaxed);
        if (seen >= want && seen > 0)
            return pl_hist_bound_ns(i);
    }
    return pl_hist_bound_ns(PL_HIST_BUCKETS - 1);
}
