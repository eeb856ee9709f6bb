/* The waiting room: requests for which every eligible worker was at its cap. One for the process,
 * ordered by priority (higher first), then arrival. Freed capacity pops the first waiter that the
 * worker can serve and hands it to its loop; that loop decides again (and may put it back in its
 * old place). Any thread; one mutex, taken only while something waits.
 *
 * A grant is not lost: when its waiter has run and the worker still has room (the waiter was
 * cancelled, took another worker, or went back), the queue passes the grant on to the next in line
 * behind that one. So the owner need not; calling pl_queue_freed again for the same capacity does
 * no harm. */
#ifndef PL_QUEUE_H
#define PL_QUEUE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/mailbox.h"
#include "base/str.h"
#include "fleet/fleet.h"

typedef struct pl_queue pl_queue;

/* Embedded in the request. Zero-initialise. */
typedef struct pl_waiter {
    pl_message message; /* carries a grant to the waiter's loop: wake() below runs there */
    pl_mailbox *loop;   /* where the request lives */
    pl_str model;       /* what it waits for; outlives the waiter */
    int64_t priority;   /* higher first */
    uint64_t arrival;   /* set at the first put, kept when put back */
    int state; /* guarded by the queue's lock: 0 out, 1 waiting, 2 granted (message under way) */
    struct pl_waiter *prev, *next;
    void (*wake)(struct pl_waiter *w); /* on the loop's thread, state is 0 again. Must decide again;
                                          may put w back or free it */
    bool cancelled; /* the owner left while a grant was under way: wake() only frees. Written and
                       read on the loop's thread */
    /* the grant under way; the queue's own */
    pl_queue *queue;
    pl_worker_state *granted; /* whose capacity; NULL: everybody was woken */
    pl_view *view;            /* referenced, keeps `granted` */
    unsigned hops;            /* how often this grant was passed on already */
} pl_waiter;

pl_queue *pl_queue_new(unsigned max_waiting);
void pl_queue_free(pl_queue *q); /* nobody waits and no grant is under way */

/* 0, or PL_ELIMIT when full. A waiter that was granted and is put back keeps its place by its
 * arrival, and is never refused: it had been let in before.
 * Capacity that is freed between the owner's decision to wait and its put wakes nobody: after a put
 * the owner looks at the workers once more. Whatever is freed after the put finds the waiter. */
int pl_queue_put(pl_queue *q, pl_waiter *w);

/* Takes w out. True when it was waiting (or out already); false when a grant is under way: the
 * caller sets w->cancelled (done by this call) and keeps the memory until wake() has run. */
bool pl_queue_remove(pl_queue *q, pl_waiter *w);

/* Capacity was freed on this worker (a request ended, or it became healthy): grants the first
 * waiter whose model it serves. `view` tells which models. Cheap when nothing waits (one load). */
void pl_queue_freed(pl_queue *q, const pl_worker_state *worker, pl_view *view);

/* Wakes everyone (an engine was added, or the router drains). */
void pl_queue_wake_all(pl_queue *q);
unsigned pl_queue_waiting(const pl_queue *q);

#endif
