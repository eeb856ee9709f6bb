/* Mailbox: see mailbox.h. A mutex-guarded list and one uv_async_t. Messages belong to their posters
 * until run() has them. */
#include "base/mailbox.h"

#include <stdbool.h>

#include "base/err.h"

static void drain(pl_mailbox *mb)
{
    /* when a message's run() closes the mailbox, this runs inside itself: the batch is shared, so
     * that the inner one goes on where the outer one stands and nothing is overtaken */
    for (bool took = false;;) {
        if (!mb->batch) {
            if (took)
                return;
            took = true;
            uv_mutex_lock(&mb->lock);
            mb->batch = mb->head;
            mb->head = NULL;
            mb->tail = &mb->head;
            uv_mutex_unlock(&mb->lock);
            if (!mb->batch)
                return;
        }
        pl_message *m = mb->batch;
        mb->batch = m->next; /* run() may free m */
        m->run(m, mb->loop_ctx);
    }
}

static void on_async(uv_async_t *async)
{
    drain(async->data);
}

int pl_mailbox_init(pl_mailbox *mb, uv_loop_t *loop, void *loop_ctx)
{
    mb->head = mb->batch = NULL;
    mb->tail = &mb->head;
    mb->loop_ctx = loop_ctx;
    mb->closed = 0;
    if (uv_mutex_init(&mb->lock) != 0)
        return PL_ENOMEM;
    if (uv_async_init(loop, &mb->async, on_async) != 0) {
        uv_mutex_destroy(&mb->lock);
        return PL_EIO;
    }
    mb->async.data = mb;
    uv_unref((uv_handle_t *)&mb->async);
    return 0;
}

int pl_mailbox_post(pl_mailbox *mb, pl_message *m)
{
    m->next = NULL;
    uv_mutex_lock(&mb->lock);
    int closed = mb->closed;
    if (!closed) {
        *mb->tail = m;
        mb->tail = &m->next;
        uv_async_send(&mb->async);
    }
    uv_mutex_unlock(&mb->lock);
    return closed ? PL_ECANCELLED : 0;
}

void pl_mailbox_close(pl_mailbox *mb)
{
    drain(mb);
    uv_mutex_lock(&mb->lock);
    mb->closed = 1;
    uv_mutex_unlock(&mb->lock);
    drain(mb); /* what slipped in between */
    uv_close((uv_handle_t *)&mb->async, NULL);
}

void pl_mailbox_destroy(pl_mailbox *mb)
{
    uv_mutex_destroy(&mb->lock);
}
