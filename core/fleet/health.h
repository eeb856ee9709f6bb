/* Active health checks and detection, on the control loop: each engine is asked GET /health every
 * interval; after `rise` good answers (2xx) in a row it is up, after `fall` bad ones down; an
 * engine about which nothing is known yet is down after the first bad one. While an engine comes
 * up, and every detect_interval after that, its kind and models are read from its own endpoints
 * (/v1/models owned_by, /server_info, /version), and what it can do (pl_engine_caps): whoever is
 * told that it is up finds its models in the fleet, unless it would not tell them. The last known
 * models are kept while it is down. */
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

/* changed runs when an engine's health changed. NULL when out of memory or when o->path is no path
 * (pl_fetch_path_ok). */
pl_health_monitor *pl_health_start(uv_loop_t *loop, pl_wheel *wheel, pl_fleet *f,
                                   const pl_health_options *o,
                                   void (*changed)(void *ctx, pl_engine *e), void *ctx);
/* described runs with SGLang's own description of an engine (its /server_info, good until it
 * returns) whenever that was read. */
void pl_health_on_info(pl_health_monitor *m,
                       void (*described)(void *ctx, pl_engine *e, pl_str info));
/* The set of engines has changed: checks new ones at once, forgets removed ones. */
void pl_health_sync(pl_health_monitor *m);
/* Frees m; its connections are gone after the loop's next turns. Sync and stop may be called from
 * changed. */
void pl_health_stop(pl_health_monitor *m);

#endif
