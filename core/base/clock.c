/* Clocks: see clock.h. Thread-safe; a virtual clock is as safe as its owner's writes. */
#include "base/clock.h"

#include <time.h>

uint64_t pl_now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

double pl_wall_seconds(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

static uint64_t real_now(void *ctx)
{
    (void)ctx;
    return pl_now_ns();
}

static uint64_t virtual_now(void *ctx)
{
    return *(const uint64_t *)ctx;
}

pl_clock pl_clock_real(void)
{
    return (pl_clock){real_now, 0};
}

pl_clock pl_clock_virtual(uint64_t *now_ns)
{
    return (pl_clock){virtual_now, now_ns};
}
