/* The router's sessions put together: the store, the lifecycle controller, expiry with its hook,
 * and their part in start and stop. */
#ifndef PL_AFFINITY_H
#define PL_AFFINITY_H

#include "router.h"

/* Before the loops. */
int pl_affinity_start(pl_router *r, pl_errbuf *eb);
/* A loop's handles; on the control thread, before the loop's thread. */
int pl_affinity_loop(pl_loop *l, pl_errbuf *eb);
/* Every engine's sessions that die with this process are closed (none, when the store is shared);
 * done runs on the control thread.
 */
void pl_affinity_stop(pl_router *r, void (*done)(pl_router *r));
/* On the loop's thread, when it ends; or on the control thread, when it never began. */
void pl_affinity_loop_stop(pl_loop *l);
/* After the loops have ended, with the control loop still there. */
void pl_affinity_free(pl_router *r);

#endif
