/* What the router knows of its engines' KV caches, put together: the holdings (kv/holdings.h), the
 * feed of their events (kv/feed.h), and which engines are its sources. On the control thread. */
#ifndef PL_KNOWLEDGE_H
#define PL_KNOWLEDGE_H

#include "router.h"

typedef struct pl_knowledge pl_knowledge;

/* Before the loops. */
int pl_knowledge_start(pl_router *r, pl_errbuf *eb);
/* The set of engines has changed. */
void pl_knowledge_sync(pl_router *r);
/* An SGLang engine has told of itself: its /server_info. */
void pl_knowledge_described(pl_router *r, pl_engine *e, pl_str server_info);
/* Ends the feed's thread; while the control loop is still there. */
void pl_knowledge_stop(pl_router *r);
/* After the loops. */
void pl_knowledge_free(pl_router *r);

#endif
