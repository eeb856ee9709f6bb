/* Suspends a policy that keeps failing: `strikes` errors within `window` stop it for 1, 2, 4 .. 60
 * seconds; then one decision probes it. One per decider; its thread only. */
#ifndef PL_GUARD_H
#define PL_GUARD_H

#include <stdbool.h>
#include <stdint.h>

#define PL_GUARD_STRIKES 16 /* most that can be configured */

typedef enum pl_guard_state { PL_GUARD_OPEN, PL_GUARD_SUSPENDED, PL_GUARD_PROBING } pl_guard_state;

typedef struct pl_guard {
    pl_guard_state state;
    unsigned strikes; /* that suspend */
    uint64_t window_ns;
    uint64_t struck_at[PL_GUARD_STRIKES]; /* ring of the last ones */
    unsigned struck;                      /* ever */
    uint64_t until_ns;                    /* end of the suspension */
    uint64_t backoff_ns;                  /* of the last suspension; 0: none yet */
    uint64_t resumed_ns;                  /* when the last probe succeeded */
} pl_guard;

void pl_guard_init(pl_guard *g, unsigned strikes, double window_seconds);

/* May the policy decide now? After a suspension the first that asks becomes the probe. */
bool pl_guard_admits(pl_guard *g, uint64_t now_ns);

/* A decision of the policy went well. True when that ended a suspension. */
bool pl_guard_success(pl_guard *g, uint64_t now_ns);

/* An error. True when it began a suspension (of backoff_ns). */
bool pl_guard_strike(pl_guard *g, uint64_t now_ns);

#endif
