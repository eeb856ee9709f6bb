/* Active health checks and detection, on the control loop: each engine is asked GET /health every
 * interval; after `rise` good answers in a row it is up, after `fall` bad ones down. When an engine
 * comes up, and every detect_interval after that, its kind and models are read from its own
 * endpoints (/v1/models owned_by, /server_info, /version). The last known models are kept while it
 * is down. */
#ifndef PL_HEALTH_H
#define PL_HEALTH_H

#include <uv.h>

#include "base/wheel.h"
#include "fleet/fleet.h"

typedef struct pl_health_options {
    uint64_t interval_ms;        /* 2,000; spread over the engines by a jitter of 10 % */
    uint64_t timeout_ms;         /* 2,000 */
    unsigned rise, fall;         /* 1, 2 */
    uint64_t detect_interval_ms; /* 30,000 */
    pl_str path;                 /* "/health" */
} pl_health_options;

void pl_health_options_default(pl_health_options *o);

typedef struct pl_health_monitor pl_health_monitor;

/* changed runs when an engine's health changed. */
pl_health_monitor *pl_health_start(uv_loop_t *loop, pl_wheel *wheel, pl_fleet *f,
                                   const pl_health_options *o,
                                   void (*changed)(void *ctx, pl_engine *e), void *ctx);
/* The set of engines has changed: checks new ones at once, forgets removed ones. */
void pl_health_sync(pl_health_monitor *m);
void pl_health_stop(pl_health_monitor *m);

#endif
