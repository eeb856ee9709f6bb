/* A latency histogram: one writer thread, any readers (relaxed atomics). Buckets: up to 64 ns,
 * then two for each power of two up to 2^39 ns (about 9 minutes), then the rest. */
#ifndef PL_HIST_H
#define PL_HIST_H

#include <stdatomic.h>
#include <stdint.h>

#define PL_HIST_BUCKETS 68

typedef struct pl_hist {
    _Atomic uint64_t count[PL_HIST_BUCKETS];
    _Atomic uint64_t total;  /* observations */
    _Atomic uint64_t sum_ns; /* sum of observations */
} pl_hist;

/* Only the owner thread observes. */
void pl_hist_observe(pl_hist *h, uint64_t ns);

/* Upper bound of bucket i in nanoseconds, inclusive; UINT64_MAX for the last. */
uint64_t pl_hist_bound_ns(int i);

/* Adds `from` (may be live) to `into`, whose writer is the caller. */
void pl_hist_merge(pl_hist *into, const pl_hist *from);

/* The least bound at or below which at least the share q (0..1) of the observations lies; 0 when
 * empty. */
uint64_t pl_hist_quantile_ns(const pl_hist *h, double q);

#endif
