/* Time. A pl_clock is the real monotonic clock or a virtual one that a simulator or a test moves by
 * hand. */
#ifndef PL_CLOCK_H
#define PL_CLOCK_H

#include <stdint.h>

/* Monotonic nanoseconds of the machine. */
uint64_t pl_now_ns(void);

/* Wall-clock seconds since 1970, for logs and reports only. */
double pl_wall_seconds(void);

typedef struct pl_clock {
    uint64_t (*now_ns)(void *ctx);
    void *ctx;
} pl_clock;

/* The machine's monotonic clock. */
pl_clock pl_clock_real(void);

/* A clock that reads *now_ns, which the caller owns and moves. */
pl_clock pl_clock_virtual(uint64_t *now_ns);

static inline uint64_t pl_clock_now_ns(pl_clock c)
{
    return c.now_ns(c.ctx);
}

#endif
