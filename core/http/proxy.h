/* A client's request on its way: the state machine between an exchange (http/server.h) and calls
 * (http/upstream.h). */
#ifndef PL_PROXY_H
#define PL_PROXY_H

#include "router.h"

/* Handlers for the public port; ctx is the pl_loop. */
extern const pl_handlers pl_proxy_handlers;

/* Loop-side messages, all on the loop's thread. */
void pl_proxy_view_changed(pl_loop *l); /* l->view is new: drop pools of engines that left */
int pl_proxy_cut_engine(pl_loop *l,
                        const pl_engine *e); /* ends its requests now; returns how many */
void pl_proxy_cut_all(pl_loop *l);           /* the drain's deadline */
int pl_proxy_engine_requests(const pl_loop *l, const pl_engine *e);
void pl_proxy_free_pools(pl_loop *l);

#endif
