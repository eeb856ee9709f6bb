/* The client side of HTTP/1.1: a keep-alive pool for each engine on each loop, and calls over it.
 * One pl_pool per loop and engine address; every call on that loop's thread.
 *
 * A pooled connection that has been idle for pool_idle_ms is closed by us first (vLLM's server
 * closes after 5 s). A reused connection that turns out dead before any response byte, while the
 * request was not yet answered, is reported as PL_ERESET with call->reused set: the owner may send
 * again at once without counting it as the engine's failure. */
#ifndef PL_UPSTREAM_H
#define PL_UPSTREAM_H

#include <uv.h>

#include "base/arena.h"
#include "base/wheel.h"
#include "http/head.h"

typedef struct pl_pool pl_pool;
typedef struct pl_call pl_call;

typedef struct pl_pool_options {
    uint64_t connect_timeout_ms; /* 2 s, name resolution included */
    uint64_t
        first_byte_timeout_ms; /* 600 s, from the request's last byte to the response's first */
    uint64_t
        between_bytes_timeout_ms; /* 60 s between bytes of the body, while reading is not paused */
    uint64_t write_timeout_ms;    /* 30 s without progress in sending the request */
    uint64_t pool_idle_ms;        /* 3.5 s */
    unsigned max_idle;            /* idle connections kept, 64 */
    size_t max_head_bytes;        /* of a response */
    const char *api_key;          /* fetches send it as a bearer token; NULL or "": none. Copied */
} pl_pool_options;

void pl_pool_options_default(pl_pool_options *o);

/* host: literal address or a name (resolved through libuv's pool, cached 30 s). Copies host. */
pl_pool *pl_pool_new(uv_loop_t *loop, pl_wheel *wheel, pl_str host, int port,
                     const pl_pool_options *o);
/* Closes idle connections now; calls under way go on; frees itself when the last is over. */
void pl_pool_free(pl_pool *p);
/* Idle connections now (for tests and metrics). */
unsigned pl_pool_idle(const pl_pool *p);

typedef enum pl_call_phase {
    PL_CALL_CONNECTING,
    PL_CALL_SENDING,
    PL_CALL_AWAITING,  /* request sent, no response byte yet */
    PL_CALL_STREAMING, /* response head is there */
    PL_CALL_OVER
} pl_call_phase;

typedef struct pl_call_events {
    /* 1xx are swallowed (100 of them). head is valid until the call is over. */
    void (*on_head)(pl_call *c, const pl_head *head);
    /* Body bytes, unframed, all slices of one read at once; valid during the call. */
    void (*on_body)(pl_call *c, const pl_str *slices, int n);
    /* Complete. The call is freed after this returns. */
    void (*on_end)(pl_call *c);
    /* phase says how far it came, got_any whether anything was heard. Freed after this returns.
     * PL_ECONNECT, PL_ERESOLVE; PL_ETIMEOUT (any phase); PL_ERESET: closed or reset before the
     * first response byte, or reset inside the body; PL_EEOF: ended inside the head, or closed
     * inside the body; PL_EPROTOCOL: no HTTP/1.1; PL_ENOMEM. */
    void (*on_fail)(pl_call *c, int err);
} pl_call_events;

struct pl_call {
    void *user;
    pl_call_phase phase;
    bool reused;        /* went out on a pooled connection */
    bool sent_any;      /* at least one request byte reached the kernel */
    bool got_any;       /* at least one response byte was seen (a 1xx, too) */
    const char *detail; /* static text of the failure, may be NULL */
    pl_head head;       /* of the response */
    /* internals follow in upstream.c's own struct, which begins with this one */
};

/* Sends a request: `slices` are the complete bytes, head and body; the bytes (not the array) must
 * stay valid until the response head is there or the call is over; so must ev until it is over.
 * head_request: the method is HEAD. fresh: do not take a pooled connection. Timeouts: the pool's,
 * or first_byte_timeout_ms when > 0. NULL when out of memory. Events never fire from inside this
 * call. When the response head comes before all of the request was sent, the rest is not sent. */
pl_call *pl_call_send(pl_pool *p, const pl_str *slices, int n, bool head_request, bool fresh,
                      uint64_t first_byte_timeout_ms, const pl_call_events *ev, void *user);
/* Stops and resumes reading (backpressure). on_body may still bring what has been read already. */
void pl_call_pause(pl_call *c);
void pl_call_resume(pl_call *c);
/* Closes the connection at once; no event follows; c is invalid. Allowed in every event (in on_end
 * and on_fail it does nothing: the call is over). */
void pl_call_cancel(pl_call *c);

/* --- small whole-answer fetches: health checks, detection, the command line --- */
typedef struct pl_fetch_result {
    int err; /* 0 or negative pl_err */
    int status;
    pl_str body;
    const char *detail;
} pl_fetch_result;

/* GET or POST (body non-NULL) with a total timeout; the answer is cut off with PL_ELIMIT above
 * max_body bytes. `extra` are complete header lines ("Name: value\r\n...") or {NULL,0}. done runs
 * once, never from inside; r is valid during it. A GET that met a dead pooled connection is sent
 * once more. Returns a handle for pl_fetch_cancel, or NULL when out of memory or when path is no
 * path. */
typedef struct pl_fetch pl_fetch;
pl_fetch *pl_fetch_start(pl_pool *p, pl_method method, pl_str path, pl_str extra, pl_str body,
                         uint64_t timeout_ms, size_t max_body,
                         void (*done)(void *user, const pl_fetch_result *r), void *user);
void pl_fetch_cancel(pl_fetch *f);
/* Begins with '/' and has no blanks or control bytes. */
bool pl_fetch_path_ok(pl_str path);

#endif
