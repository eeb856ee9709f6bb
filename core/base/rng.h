/* Seeded random numbers: splitmix64 (Steele, Lea, Flood 2014). One stream per request or subsystem,
 * so that a decision can be replayed from its seed. Not for secrets. */
#ifndef PL_RNG_H
#define PL_RNG_H

#include <stdint.h>

typedef struct pl_rng {
    uint64_t state;
} pl_rng;

static inline uint64_t pl_rng_next(pl_rng *r)
{
    uint64_t z = (r->state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Uniform in [0, 1). */
static inline double pl_rng_unit(pl_rng *r)
{
    return (double)(pl_rng_next(r) >> 11) * 0x1.0p-53;
}

/* Uniform in [0, n), n > 0; the bias of the multiply-shift is below 2^-32 for n < 2^32. */
static inline uint32_t pl_rng_below(pl_rng *r, uint32_t n)
{
    return (uint32_t)(((pl_rng_next(r) >> 32) * n) >> 32);
}

#endif
