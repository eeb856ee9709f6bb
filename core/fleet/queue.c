/* The waiting room: see queue.h. A doubly linked list in order under one mutex; at its bound of
 * about a thousand, insertion from the tail is short because most arrive last. Waiters belong to
 * their requests: the list only links them, and a granted one is out of it.
 *
 * Grants are posted under the lock, so that remove() either finds a waiter in the list or knows
 * that its message is under way. Lock order: the queue's, then a mailbox's. */
#include "fleet/queue.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

enum { OUT, WAITING, GRANTED };

/* A grant is passed on this often: enough for a line of waiters that cannot use the worker, and a
 * bound on the work that one freed place makes when a policy sends all of them back. */
#define MAX_HOPS 16

struct pl_queue {
    uv_mutex_t lock;
    pl_waiter *head, *tail; /* first to be granted, last */
    uint64_t arrivals;
    unsigned max_waiting;
    unsigned granted;         /* messages under way: still hold their places */
    _Atomic unsigned waiting; /* changed under the lock, read without */
};

pl_queue *pl_queue_new(unsigned max_waiting)
{
    pl_queue *q = calloc(1, sizeof *q);
    if (q && uv_mutex_init(&q->lock) != 0) {
        free(q);
        return NULL;
    }
    if (q)
        q->max_waiting = max_waiting;
    return q;
}

void pl_queue_free(pl_queue *q)
{
    if (!q)
        return;
    uv_mutex_destroy(&q->lock);
    free(q);
}

static bool before(int64_t priority, uint64_t arrival, const pl_waiter *w)
{
    return priority > w->priority || (priority == w->priority && arrival < w->arrival);
}

static void link_in_order(pl_queue *q, pl_waiter *w)
{
    pl_waiter *after = q->tail;
    while (after && before(w->priority, w->arrival, after))
        after = after->prev;
    w->prev = after;
    w->next = after ? after->next : q->head;
    *(w->prev ? &w->prev->next : &q->head) = w;
    *(w->next ? &w->next->prev : &q->tail) = w;
    w->state = WAITING;
    atomic_fetch_add(&q->waiting, 1);
}

static void unlink_waiter(pl_queue *q, pl_waiter *w)
{
    *(w->prev ? &w->prev->next : &q->head) = w->next;
    *(w->next ? &w->next->prev : &q->tail) = w->prev;
    w->prev = w->next = NULL;
    w->state = OUT;
    atomic_fetch_sub(&q->waiting, 1);
}

int pl_queue_put(pl_queue *q, pl_waiter *w)
{
    uv_mutex_lock(&q->lock);
    bool again = w->arrival != 0;
    unsigned held = atomic_load_explicit(&q->waiting, memory_order_relaxed) + q->granted;
    int rc = !again && held >= q->max_waiting ? PL_ELIMIT : 0;
    if (rc == 0) {
        if (!again)
            w->arrival = ++q->arrivals;
        w->queue = q;
        link_in_order(q, w);
    }
    uv_mutex_unlock(&q->lock);
    return rc;
}

bool pl_queue_remove(pl_queue *q, pl_waiter *w)
{
    uv_mutex_lock(&q->lock);
    bool out = w->state != GRANTED;
    if (w->state == WAITING)
        unlink_waiter(q, w);
    if (!out)
        w->cancelled = true;
    uv_mutex_unlock(&q->lock);
    return out;
}

static void on_grant(pl_message *m, void *loop_ctx);

/* Under the lock. False: its loop is closing and takes no more messages; it is out, and its owner
 * will find it so. */
static bool grant(pl_queue *q, pl_waiter *w, const pl_worker_state *worker, pl_view *view,
                  unsigned hops)
{
    unlink_waiter(q, w);
    w->state = GRANTED;
    w->message.run = on_grant;
    w->granted = (pl_worker_state *)worker;
    w->view = worker ? pl_view_ref(view) : NULL;
    w->hops = hops;
    q->granted++;
    if (pl_mailbox_post(w->loop, &w->message) == 0)
        return true;
    q->granted--;
    w->state = OUT;
    pl_view_unref(w->view);
    w->view = NULL;
    return false;
}

static bool serves(const pl_worker_state *worker, const pl_view *view, pl_str model)
{
    const pl_model *m = pl_view_model(view, model);
    return m && pl_model_has(m, worker);
}

/* Grants the first waiter from w on that the worker can serve. Under the lock. */
static void grant_from(pl_queue *q, pl_waiter *w, const pl_worker_state *worker, pl_view *view,
                       unsigned hops)
{
    for (pl_waiter *next; w; w = next) {
        next = w->next;
        if (serves(worker, view, w->model) && grant(q, w, worker, view, hops))
            return;
    }
}

void pl_queue_freed(pl_queue *q, const pl_worker_state *worker, pl_view *view)
{
    /* sequentially consistent, against the put: see ledger.c */
    if (atomic_load(&q->waiting) == 0)
        return;
    uv_mutex_lock(&q->lock);
    grant_from(q, q->head, worker, view, 0);
    uv_mutex_unlock(&q->lock);
}

static bool has_room(const pl_worker_state *w)
{
    const pl_engine *e = w->engine;
    return atomic_load(&e->admin) == PL_ENGINE_ACTIVE && atomic_load(&e->health) == PL_HEALTH_UP &&
           atomic_load(&e->breaker) != PL_BREAKER_OPEN && !pl_worker_at_capacity(w);
}

static void pass_on(pl_queue *q, const pl_worker_state *worker, pl_view *view, int64_t priority,
                    uint64_t arrival, unsigned hops)
{
    if (hops >= MAX_HOPS || atomic_load(&q->waiting) == 0 || !has_room(worker))
        return;
    uv_mutex_lock(&q->lock);
    pl_waiter *w = q->head;
    while (w && !before(priority, arrival, w))
        w = w->next;
    grant_from(q, w, worker, view, hops + 1);
    uv_mutex_unlock(&q->lock);
}

static void on_grant(pl_message *m, void *loop_ctx)
{
    (void)loop_ctx;
    pl_waiter *w = (pl_waiter *)((char *)m - offsetof(pl_waiter, message));
    pl_queue *q = w->queue;
    pl_worker_state *worker = w->granted;
    pl_view *view = w->view;
    int64_t priority = w->priority;
    uint64_t arrival = w->arrival;
    unsigned hops = w->hops;
    uv_mutex_lock(&q->lock);
    w->state = OUT;
    w->granted = NULL;
    w->view = NULL;
    q->granted--;
    uv_mutex_unlock(&q->lock);
    w->wake(w); /* w may be gone, or wait again */
    if (worker) {
        pass_on(q, worker, view, priority, arrival, hops);
        pl_view_unref(view);
    }
}

void pl_queue_wake_all(pl_queue *q)
{
    if (atomic_load(&q->waiting) == 0)
        return;
    uv_mutex_lock(&q->lock);
    for (pl_waiter *w = q->head, *next; w; w = next) {
        next = w->next;
        grant(q, w, NULL, NULL, 0);
    }
    uv_mutex_unlock(&q->lock);
}

unsigned pl_queue_waiting(const pl_queue *q)
{
    return atomic_load_explicit(&q->waiting, memory_order_relaxed);
}
