/* One event loop: its thread, what it owns, and the messages that the control thread sends it. */
#ifndef PL_LOOP_H
#define PL_LOOP_H

#include "router.h"

/* Prepares everything but the thread; on the control thread. The VM is taken. */
int pl_loop_init(pl_loop *l, pl_router *r, int index, pl_vm *vm, const struct sockaddr *addr,
                 bool reuse_port, int *bound_port, pl_errbuf *eb);
int pl_loop_start(pl_loop *l);

/* Messages; any thread. */
void pl_loop_send_view(pl_loop *l, pl_view *v); /* takes the reference */
/* drained runs on the control thread when the loop has no connection left. */
void pl_loop_send_drain(pl_loop *l, void (*drained)(pl_router *r));
/* On the loop, when a request is over while it drains: tells `drained` when it was the last. */
void pl_loop_check_drained(pl_loop *l);
/* Ends every request now: an engine's, or all (e NULL). done runs on the control thread with their
 * number. */
typedef void (*pl_loop_cut_fn)(void *ctx, int cut);
int pl_loop_send_cut(pl_loop *l, pl_engine *e, pl_loop_cut_fn done, void *ctx);
/* Closes everything; the thread ends. */
void pl_loop_send_stop(pl_loop *l);

/* After the thread has ended. */
void pl_loop_free(pl_loop *l);

#endif
