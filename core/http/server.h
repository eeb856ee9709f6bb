/* The server side of HTTP/1.1: listeners, client connections, one exchange (request and response)
 * at a time on each. Used by the router's public port, its admin port and the simulated engine. One
 * pl_server per event loop; every call on that loop's thread.
 *
 * Life of an exchange: head read and checked -> on_head (may answer at once) -> body collected ->
 * on_request -> the owner answers with pl_exchange_respond, or start/write/end -> the next
 * pipelined request. The owner may hold an exchange for as long as it likes; on_gone tells that the
 * client has left (the owner must then drop its pointer before returning: the exchange is freed). A
 * client that half-closes its side while it waits counts as gone: no supported client does it, and
 * work for a client that left is waste. */
#ifndef PL_SERVER_H
#define PL_SERVER_H

#include <uv.h>

#include "base/arena.h"
#include "base/buf.h"
#include "base/wheel.h"
#include "http/head.h"

typedef struct pl_server pl_server;
typedef struct pl_conn pl_conn;
typedef struct pl_exchange pl_exchange;

typedef struct pl_server_stats { /* written by the loop's thread; relaxed reads anywhere */
    _Atomic uint64_t accepted, refused, requests, bad_requests, timeouts, trailers_dropped;
    _Atomic uint64_t open; /* connections now */
} pl_server_stats;

typedef struct pl_server_options {
    pl_limits limits;
    uint64_t head_timeout_ms; /* from the head's first byte, 10 s */
    uint64_t
        body_timeout_ms; /* no body byte for this long, 30 s; after 30 s also 1 KiB/s on average */
    uint64_t keep_alive_timeout_ms; /* idle between requests, 60 s */
    uint64_t write_timeout_ms; /* nothing taken by the client for this long while we have something,
                                  or so little that 1 KiB/s is missed by as much, 60 s */
    size_t high_water_bytes;   /* pl_exchange_write asks to pause above this, 256 KiB */
    size_t low_water_bytes;    /* on_drain below this, 64 KiB */
    _Atomic uint32_t *connections; /* shared by all loops of one listener; the owner's */
    uint32_t max_connections;      /* above: 503 with Retry-After and close */
    _Atomic uint64_t *body_memory; /* request body bytes held by all loops */
    uint64_t max_body_memory;      /* above: 503 */
    pl_server_stats *stats;        /* the owner's: outlive the server; NULL: its own */
} pl_server_options;

void pl_server_options_default(pl_server_options *o); /* counters NULL: not limited */

typedef struct pl_handlers {
    /* The head is there. Return true to go on with the body; false when it has been answered
     * already (the body is then read and dropped up to a bound, else the connection closes after
     * the answer). May be NULL. */
    bool (*on_head)(void *ctx, pl_exchange *x);
    /* Head and body are there. Must be answered now or later. */
    void (*on_request)(void *ctx, pl_exchange *x);
    /* The client is gone (or the server closes it) before the answer was complete. x is freed after
     * this call. */
    void (*on_gone)(void *ctx, pl_exchange *x);
    /* The client's backlog has fallen below low_water after a write returned true. */
    void (*on_drain)(void *ctx, pl_exchange *x);
    /* A request that the server itself answers with an error (bad head, limits, timeouts): renders
     * the body in the API's shape. x may be NULL when there is no usable head; path is {NULL,0}
     * then. May be NULL: plain JSON. */
    void (*render_error)(void *ctx, pl_str path, int status, const char *message, pl_buf *body);
} pl_handlers;

/* wheel: the loop's; the caller advances it. NULL when out of memory. */
pl_server *pl_server_new(uv_loop_t *loop, pl_wheel *wheel, const pl_server_options *o,
                         const pl_handlers *h, void *ctx);

/* Listens on an IPv4 or IPv6 address ([::] takes IPv4, too). reuse_port lets several loops share
 * the port. On success *bound_port (may be NULL) is the real port; else a negative libuv error
 * code. May be called more than once. */
int pl_server_listen(pl_server *s, const struct sockaddr *addr, bool reuse_port, int *bound_port);

/* Graceful end: accepts what is queued, closes the listener, answers with Connection: close, closes
 * idle connections. on_empty runs (once, never from inside) when no connection is left; not after
 * pl_server_free. */
void pl_server_drain(pl_server *s, void (*on_empty)(void *ctx));
/* Closes all connections now; owners get on_gone. */
void pl_server_close_all(pl_server *s);
/* Closes what is left and frees when libuv has let go; run the loop afterwards. */
void pl_server_free(pl_server *s);
const pl_server_stats *pl_server_stats_of(const pl_server *s);

/* --- one exchange. Nothing here calls the owner back from inside: a client that is found to be
 * gone while writing is told by on_gone in the loop's next turn. --- */
struct pl_exchange {
    pl_head head;   /* valid until the exchange ends */
    pl_str body;    /* valid until released or the end */
    pl_arena arena; /* freed with the exchange; the owner may allocate from it */
    struct sockaddr_storage peer;
    void *user;          /* the owner's */
    uint64_t head_at_ns; /* when the head was complete */
    pl_conn *conn;       /* internal */
};

/* A complete answer. Headers: pairs without framing headers (Content-Length, Transfer-Encoding,
 * Connection and Date are the server's). Body is copied only when it cannot be written at once. The
 * exchange is over. */
void pl_exchange_respond(pl_exchange *x, int status, const pl_header *headers, int n, pl_str body);

/* Starts an answer whose body follows. content_length UINT64_MAX: chunked (HTTP/1.0: until close).
 * The head goes out with the first write, or alone in the loop's next turn. */
void pl_exchange_start(pl_exchange *x, int status, const pl_header *headers, int n,
                       uint64_t content_length);
/* Writes body bytes (framed by the server). Returns true when the backlog is above high water:
 * pause the source. The bytes are copied when they cannot be written at once. */
bool pl_exchange_write(pl_exchange *x, const pl_str *slices, int n);
/* Ends the answer; x is invalid afterwards. Fewer bytes than the announced content_length: as
 * abort. */
void pl_exchange_end(pl_exchange *x);
/* Cuts the connection without completing the answer (a body that cannot be completed honestly). x
 * is invalid. No on_gone. */
void pl_exchange_abort(pl_exchange *x);
/* Ends what was started and closes the connection afterwards (a stream that ended with an error
 * event). */
void pl_exchange_end_close(pl_exchange *x);
/* Gives the request body's memory back early (a streaming answer needs it no more). */
void pl_exchange_release_body(pl_exchange *x);
bool pl_exchange_started(const pl_exchange *x);
pl_server *pl_exchange_server(const pl_exchange *x);

#endif
