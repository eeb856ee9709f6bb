/* The engines' own gauges, polled on the control loop: how many requests run and wait in each
 * worker, how full its KV cache is, how big that is. SGLang is asked /v1/loads, and /metrics where
 * it has no such path; vLLM /metrics; others are not asked. The answers go to pl_worker_state
 * (running_requests ... kv_tokens) with the time at which the engine was asked; when an engine does
 * not answer, what it said last stays, and grows old visibly. */
#ifndef PL_GAUGES_H
#define PL_GAUGES_H

#include <uv.h>

#include "base/wheel.h"
#include "fleet/fleet.h"

typedef struct pl_gauges_options {
    uint64_t interval_ms; /* 1,000 after each answer, with a jitter of 10 %; 0: never ask */
    uint64_t timeout_ms;  /* 1,000 */
} pl_gauges_options;

void pl_gauges_options_default(pl_gauges_options *o);

/* An engine that has no gauges to tell is asked again after this time, or when it has come up. */
#define PL_GAUGES_AGAIN_MS 60000

typedef struct pl_gauges pl_gauges;

/* NULL when out of memory. Only engines that are up are asked; each has a connection of its own,
 * and at most one question under way. */
pl_gauges *pl_gauges_start(uv_loop_t *loop, pl_wheel *wheel, pl_fleet *f,
                           const pl_gauges_options *o);
/* The set of engines has changed: asks new ones, forgets removed ones. NULL is fine. */
void pl_gauges_sync(pl_gauges *g);
/* e has just come up: asks it now. NULL is fine. */
void pl_gauges_wake(pl_gauges *g, const pl_engine *e);
/* Frees g; its connections are gone after the loop's next turns. NULL is fine. */
void pl_gauges_stop(pl_gauges *g);

#endif
