/* Inside of the server: what server.c (listeners, drain), conn.c (phases, timers), input.c and
 * exchange.c (output) share. Nobody else includes it. */
#ifndef PL_CONN_H
#define PL_CONN_H

#include <stdatomic.h>

#include "http/server.h"

#define PL_CONN_READ_BYTES   (64 * 1024)
#define PL_CONN_LINGER_MS    1000
#define PL_CONN_LINGER_BYTES (1024 * 1024)

typedef enum pl_conn_phase {
    PL_CONN_HEAD,    /* between requests, or reading a head */
    PL_CONN_BODY,    /* exchange open, its body is being read */
    PL_CONN_WAIT,    /* exchange open, its request is complete */
    PL_CONN_DISCARD, /* answered before the body was complete: the rest is dropped */
    PL_CONN_ENDING,  /* the last answer is being sent; input is dropped */
    PL_CONN_LINGER,  /* our side is shut down; input is dropped until the client closes */
    PL_CONN_CLOSING  /* uv_close was called; freed by its callback */
} pl_conn_phase;

typedef enum pl_conn_alarm { /* what read_timer stands for */
                             PL_ALARM_NONE,
                             PL_ALARM_IDLE,
                             PL_ALARM_HEAD,
                             PL_ALARM_BODY,
                             PL_ALARM_LINGER
} pl_conn_alarm;

typedef enum pl_framing { /* of the answer's body */
                          PL_FRAMING_NONE,
                          PL_FRAMING_LENGTH,
                          PL_FRAMING_CHUNKED,
                          PL_FRAMING_CLOSE
} pl_framing;

/* Bytes that libuv is writing. */
typedef struct pl_flight {
    uv_write_t req;
    pl_buf bytes;
} pl_flight;

struct pl_conn {
    uv_tcp_t tcp; /* first: the handle is the connection */
    pl_server *s;
    pl_conn *next, **pprev;           /* s->conns */
    pl_conn *next_late, **pprev_late; /* s->late; pprev_late NULL when not in it */
    pl_reader reader;
    pl_exchange *x; /* NULL between exchanges */
    pl_timer read_timer, write_timer;
    pl_buf in;         /* bytes behind the current request, not looked at yet */
    pl_buf out;        /* to be sent: a head waiting for its body, or what is behind flight */
    pl_flight *flight; /* NULL when libuv is writing nothing */
    char *body;        /* of x; x->body shows it once complete */
    size_t body_n, body_cap;
    uint64_t length_left; /* PL_FRAMING_LENGTH: body bytes that the owner still owes */
    uint64_t body_at_ms;  /* wheel's clock when the request's head was complete */
    uint64_t written;     /* bytes handed to the kernel or to libuv */
    uint64_t taken;       /* of these, what the client had taken when last looked */
    uint64_t arrears_ms;  /* how far it is behind the least rate while something waits for it */
    size_t linger_bytes;  /* dropped while lingering */
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } peer;
    uint8_t phase;   /* pl_conn_phase */
    uint8_t alarm;   /* pl_conn_alarm */
    uint8_t framing; /* pl_framing */
    bool busy : 1;   /* conn_input is on the stack */
    bool reading : 1;
    bool peer_eof : 1;
    bool broken : 1;      /* writing failed: closed in the loop's next turn */
    bool counted : 1;     /* in options.connections */
    bool refused : 1;     /* over max_connections */
    bool served : 1;      /* had a request */
    bool announced : 1;   /* the owner has seen x */
    bool telling : 1;     /* on_gone is on the stack */
    bool started : 1;     /* x: the head of the answer is out or waiting in `out` */
    bool keep : 1;        /* x: the connection stays after the answer */
    bool paused : 1;      /* x: a write returned true */
    bool continued : 1;   /* x: the client does not wait for 100 Continue */
    bool body_failed : 1; /* x: no memory for the body */
    bool unwanted : 1;    /* x: its answer has begun in on_head; the body is dropped */
};

typedef struct pl_listener {
    uv_tcp_t tcp; /* first */
    pl_server *s;
    struct pl_listener *next;
} pl_listener;

struct pl_server {
    uv_loop_t *loop;
    pl_wheel *wheel;
    pl_server_options o;
    pl_handlers h;
    void *ctx;
    pl_server_stats *stats, own_stats;
    pl_listener *listeners;
    pl_listener *starved; /* has a connection that there was no memory for */
    pl_timer starved_timer;
    pl_conn *conns; /* all that are not closing */
    pl_conn *late;  /* have something to do in the loop's next turn */
    uv_idle_t idle; /* runs `late` */
    bool idle_active;
    unsigned handles;  /* libuv handles not closed yet: idle, listeners, connections */
    unsigned open;     /* connections not closed yet */
    unsigned refusing; /* of these, refused ones */
    bool draining, freeing;
    void (*on_empty)(void *ctx);
    pl_buf head;          /* an answer's head is composed here */
    uint64_t date_second; /* of the wheel's clock, when `date` was made */
    char date[40];        /* "Date: ...\r\n" */
    size_t date_n;
    char *read_buf; /* PL_CONN_READ_BYTES; libuv reads synchronously into it */
};

/* Only the loop's thread writes these counters. */
static inline void pl_stat_add(_Atomic uint64_t *counter, int64_t n)
{
    uint64_t now = atomic_load_explicit(counter, memory_order_relaxed);
    atomic_store_explicit(counter, now + (uint64_t)n, memory_order_relaxed);
}

/* --- conn.c --- */
/* A connection whose handle is initialised, not yet accepted; NULL when out of memory. */
pl_conn *pl_conn_new(pl_server *s);
/* The handle has its socket: starts reading, or answers that there are too many. */
void pl_conn_begin(pl_conn *c);
/* Closes now; tells the owner of an open exchange. Safe in every phase. reset: with RST. */
void pl_conn_close(pl_conn *c, bool reset);
/* The server itself answers, then the connection ends. */
void pl_conn_error(pl_conn *c, int status, const char *message);
/* The exchange is over, its answer sent or queued: on to the next one or to the end. */
void pl_conn_answered(pl_conn *c);
/* The last answer is sent or queued: flush, shut down our side, linger, close. */
void pl_conn_end(pl_conn *c);
/* Whether what is left of the request's body can be dropped, to keep the connection. */
bool pl_conn_can_discard(const pl_conn *c);
/* Drops the exchange without telling anyone. */
void pl_conn_drop_exchange(pl_conn *c);
/* Looks at the connection in the loop's next turn. */
void pl_conn_later(pl_conn *c);
/* Timer and reading as the phase wants them. */
void pl_conn_settle(pl_conn *c);
/* True when nothing is going on: no request read or being read, nothing to send. */
bool pl_conn_idle(const pl_conn *c);
/* The next message on the connection. */
void pl_conn_next_request(pl_conn *c);
/* An alarm is not wanted any more. */
void pl_conn_quiet(pl_conn *c);
/* Everything queued is out. */
void pl_conn_flushed(pl_conn *c);

/* --- input.c --- */
/* Feeds bytes to the reader and acts on what they make; what has to wait goes to c->in. */
void pl_conn_input(pl_conn *c, const char *p, size_t n);
/* Parsing waits: for the answer of the exchange, or for the client to take the answers it has. */
bool pl_conn_blocked(const pl_conn *c);
int pl_conn_read_start(pl_conn *c);
void pl_conn_body_free(pl_conn *c);
/* The reader's on_body. */
void pl_conn_take_body(void *ctx, const char *p, size_t n);

/* --- exchange.c --- */
/* Bytes not taken by the kernel yet. */
size_t pl_conn_backlog(const pl_conn *c);
/* Sends `out`, then bufs[1..n); bufs[0] is scratch. Copies what cannot be sent now; failure marks
 * the connection broken. */
void pl_conn_send(pl_conn *c, uv_buf_t *bufs, unsigned n);
/* An error answer with Connection: close. */
void pl_conn_send_error(pl_conn *c, int status, pl_str body, bool head_only);

/* --- server.c --- */
void pl_server_conn_closed(pl_server *s);

#endif
