/* The store that several routers share, put to use in this one: see affinity.h, which calls it. */
#ifndef PL_SHARED_STORE_H
#define PL_SHARED_STORE_H

#include "router.h"

/* Makes r->redis and r->store, the control thread's handle. Not to reach it is no error. */
int pl_shared_store_start(pl_router *r, pl_errbuf *eb);
/* Makes l->store; on the control thread, before the loop's thread. */
int pl_shared_store_loop(pl_loop *l, pl_errbuf *eb);
/* pl_sessions_config.settled, with the router as its ctx. */
void pl_shared_store_settled(void *router, uint64_t version);

#endif
