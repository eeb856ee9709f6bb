/* A latency histogram: one writer thread, any readers (relaxed atomics). Buckets are powers of two
 * of a microsecond-scaled unit with 2 sub-buckets each, from 64 ns to about 18 minutes: 2 x 34
 * buckets. */
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

/* Upper bound of bucket i in nanoseconds; UINT64_MAX for the last. */
uint64_t pl_hist_bound_ns(int i);

/* Adds `from` to `into` (both may be live). */
void pl_hist_merge(pl_hist *into, const pl_hist *from);

/* The bound below which the share q (0..1) of the observations lies; 0 when empty. */
uint64_t pl_hist_quantile_ns(const pl_hist *h, double q);

#endif
