/* Messages to an event loop from other threads. post() may be called from any thread and never
 * blocks on the loop; messages run on the loop's thread in the order in which they were posted. */
#ifndef PL_MAILBOX_H
#define PL_MAILBOX_H

#include <uv.h>

/* Embedded in (or first in) the message; run() owns it from then on. */
typedef struct pl_message {
    struct pl_message *next;
    void (*run)(struct pl_message *m, void *loop_ctx);
} pl_message;

typedef struct pl_mailbox {
    uv_async_t async;
    uv_mutex_t lock;
    pl_message *head, **tail;
    pl_message *batch; /* taken from the list, not run yet; the loop's thread only */
    void *loop_ctx;
    int closed;
} pl_mailbox;

/* On the loop's thread (or before it runs). The async handle is unreferenced: it does not keep the
 * loop alive. */
int pl_mailbox_init(pl_mailbox *mb, uv_loop_t *loop, void *loop_ctx);

/* 0, or PL_ECANCELLED when the mailbox is closed: the caller keeps the message. */
int pl_mailbox_post(pl_mailbox *mb, pl_message *m);

/* On the loop's thread, once; a message may do it. Runs what is queued, in order, refuses further
 * posts and closes the handle. The memory must stay until the loop has run once more. */
void pl_mailbox_close(pl_mailbox *mb);

/* After the loop has ended and no thread can post any more. */
void pl_mailbox_destroy(pl_mailbox *mb);

#endif
