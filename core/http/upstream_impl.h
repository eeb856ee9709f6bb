/* What pool.c (connections: idle ones, new ones, the end of the pool) and upstream.c (calls:
 * sending, receiving, timeouts) share. For these two and fetch.c only; everybody else uses
 * upstream.h.
 *
 * Ownership: the pool owns its connections until libuv has closed them; a connection that serves a
 * call and the call point at each other; a call is freed when it is over. The pool's memory goes
 * when it was given up (pl_pool_free) and no call, handle or name question is left. */
#ifndef PL_UPSTREAM_IMPL_H
#define PL_UPSTREAM_IMPL_H

#include "base/err.h"
#include "http/resolve.h"
#include "http/upstream.h"

typedef struct pl_upconn pl_upconn;
typedef struct pl_upcall pl_upcall;

/* One TCP connection.
 *
 *   CONNECTING --connected--> BUSY --released--> IDLE --taken--> BUSY
 *   any state --close--> CLOSING --libuv's close callback--> freed */
typedef enum pl_upconn_state {
    PL_UPCONN_CONNECTING, /* call is set */
    PL_UPCONN_BUSY,       /* call is set, reading unless the call is paused */
    PL_UPCONN_IDLE,       /* no call, in the pool's list, reading so that a close is noticed */
    PL_UPCONN_CLOSING     /* no call */
} pl_upconn_state;

struct pl_upconn {
    uv_tcp_t tcp;
    pl_pool *pool;
    pl_upcall *call;
    pl_upconn *newer, *older; /* in the idle list */
    uint64_t idle_at_ms;
    pl_reader reader;
    uint8_t state; /* pl_upconn_state */
    bool
        next_message; /* pl_reader_next is due before the next byte: the old head stays till then */
};

typedef struct pl_upcall_list {
    pl_upcall *first;
} pl_upcall_list;

/* One request and its answer; phases as in pl_call_phase. */
struct pl_upcall {
    pl_call pub; /* first: pl_call * and pl_upcall * are the same address */
    pl_pool *pool;
    pl_upconn *conn; /* NULL while a name is resolved and once the call has failed or ended */
    const pl_call_events *ev;
    pl_upcall *next, **link; /* in `resolving` or `failed` of the pool; link NULL: in none */
    pl_timer timer;          /* one for all timeouts; fires at the earliest at deadline_ms */
    uint64_t deadline_ms;    /* 0: none; extended without touching the wheel */
    uint64_t connect_by_ms;
    uint64_t first_byte_timeout_ms;
    uint64_t first_byte_by_ms; /* 0: the request is not sent yet, or no limit */
    int err;                   /* in `failed`: what on_fail will be told */
    uint8_t tried;             /* addresses that did not answer */
    uint8_t interim;           /* 1xx seen */
    bool head_request;
    bool head_seen; /* of the final response */
    bool in_head;   /* some bytes of a head are there */
    bool paused;
    bool sent_all;
    bool send_failed; /* writing is over, what the server said before is still read */
    bool over;        /* on_end or on_fail runs */
    int at, bufs_n;   /* bufs[at ..] are still to be sent */
    uv_buf_t bufs[];  /* over the caller's slices */
};

struct pl_pool {
    uv_loop_t *loop;
    pl_wheel *wheel;
    pl_pool_options o;
    pl_limits limits; /* of responses */
    pl_resolver resolver;
    pl_upconn *newest, *oldest; /* idle connections */
    unsigned idle_n;
    pl_timer idle_timer;                    /* for the oldest one */
    pl_upcall_list resolving;               /* calls that wait for the address */
    pl_upcall_list failed;                  /* calls whose on_fail comes with `soon` */
    uv_timer_t soon;                        /* 0 ms: events that may not run inside pl_call_send */
    unsigned calls_n, conns_n;              /* conns_n: until the close callback */
    bool given_up, soon_closing, soon_gone; /* the steps of pl_pool_free */
};

/* --- pool.c --- */

/* The newest idle connection, now BUSY, or NULL. */
pl_upconn *pl_upconn_take(pl_pool *p);
/* The call is over: back to the idle list when reusable, else closed. */
void pl_upconn_release(pl_upconn *c, bool reusable);
/* Detaches the connection from its call or list and closes it. */
void pl_upconn_close(pl_upconn *c);
/* Connects for the call; upstream.c is told by pl_upcall_connected, failures come by the list
 * `failed`. Fires no event. */
void pl_upcall_connect(pl_upcall *c);
/* This address does not answer in time: the next one, or failure. */
void pl_upcall_connect_next(pl_upcall *c, int uv_err);
void pl_upcall_fail_soon(pl_upcall *c, int err, const char *detail);
void pl_upcall_list_add(pl_upcall_list *l, pl_upcall *c);
void pl_upcall_list_remove(pl_upcall *c);
/* A call is over or a handle is gone: frees a pool that was given up, when nothing is left. */
void pl_pool_settle(pl_pool *p);

/* --- upstream.c --- */

void pl_upcall_connected(pl_upcall *c);
/* The deferred failure of a call in `failed`. */
void pl_upcall_fail(pl_upcall *c, int err, const char *detail);
/* Sets when the call times out, from now; 0: never. */
void pl_upcall_deadline(pl_upcall *c, uint64_t after_ms);
void pl_upcall_on_alloc(uv_handle_t *h, size_t suggested, uv_buf_t *buf);
void pl_upcall_on_read(uv_stream_t *s, ssize_t n, const uv_buf_t *buf);
/* A slice of the body, from the reader. */
void pl_upcall_on_slice(void *conn, const char *p, size_t n);

#endif
