/* The inside of the shared store, for its own files and tests: redis.c (calls), redis_process.c,
 * redis_wire.c (what goes over the wire), redis_sweep.c (expiry and the list), redis_conn.c,
 * redis_known.c. */
#ifndef PL_REDIS_IMPL_H
#define PL_REDIS_IMPL_H

#include "base/buf.h"
#include "base/hist.h"
#include "session/redis.h"
#include "session/redis_conn.h"
#include "session/redis_known.h"

/* What one handle has counted; written on its loop, read on any thread. The process's, since it
 * outlives the handle. */
typedef struct pl_redis_account {
    struct pl_redis_account *next;
    pl_hist latency; /* of calls, from sent to answered */
    _Atomic uint64_t expired_router_only, expired_engine_backed, evicted, refused;
} pl_redis_account;

struct pl_redis { /* read by all loops, written by none but where atomic */
    pl_redis_options o;
    char *host, *unix_path, *user, *password, *prefix;
    char where[300];   /* for logs */
    char sha[41];      /* of the script */
    pl_buf hello;      /* the first command of a connection */
    pl_known *known;   /* NULL never */
    uint64_t fresh_ns; /* staleness */
    pl_redis_stats stats;
    _Atomic(pl_redis_account *) accounts; /* grows at its head */
};

typedef struct pl_redis_handle {
    pl_store base;
    pl_redis *r;
    uv_loop_t *loop;
    pl_wheel *wheel;
    pl_redis_conn *conn;
    pl_buf out;                          /* a command on its way into the connection */
    struct pl_redis_op *oldest, *newest; /* that somebody waits for, in order of sending */
    pl_timer timer;                      /* of the oldest */
    bool overdue;                        /* as pl_redis_conn's */
    enum { PL_REDIS_STARTING, PL_REDIS_UP, PL_REDIS_DOWN } state;
    uint64_t down_ns;
    uint32_t ops;     /* not replied to, or being answered: they keep the handle */
    uint32_t writing; /* of them: what was bound in an outage */
    bool freed;
    _Atomic uint64_t held, router_only; /* as of the last reply; read on any thread */
    struct pl_redis_account *account;   /* its part of the process's account */
    /* redis_sweep.c */
    bool sweeps, sweeping, again;
    char id[17];
    uint64_t seen; /* stamp of the last claim that arrived */
    pl_timer sweep_timer;
    uint64_t *acks, *passes; /* versions, to be sent with the next sweep */
    uint32_t acks_n, acks_cap, passes_n, passes_cap;
} pl_redis_handle;

typedef enum pl_redis_op_kind {
    PL_REDIS_CALL,
    PL_REDIS_LIST,
    PL_REDIS_SWEEP,
    PL_REDIS_WRITE,  /* own */
    PL_REDIS_UNLEASE /* own */
} pl_redis_op_kind;

/* A command under way. */
typedef struct pl_redis_op {
    pl_redis_cmd cmd; /* first */
    pl_redis_handle *h;
    struct pl_redis_op *older, *newer; /* while somebody waits */
    pl_redis_op_kind kind;
    bool waited;               /* in the handle's list */
    bool in_full;              /* sent with the script's text */
    pl_store_call *call;       /* NULL: nobody waits any more; own: &own[0] */
    pl_store_list_call *list;  /* likewise */
    uint32_t turns;            /* GET: to count */
    uint32_t acks_n, passes_n; /* SWEEP: how many it carries */
    uint64_t sent_ns;          /* first */
    pl_store_call own[];       /* one, for what the handle does by itself, and its name's bytes */
} pl_redis_op;

/* redis.c */
pl_redis_op *pl_redis_op_new(pl_redis_handle *h, pl_redis_op_kind kind, size_t name_bytes);
void pl_redis_op_end(pl_redis_op *op);
int pl_redis_op_send(pl_redis_op *op); /* encodes; 0, PL_ENOMEM, PL_EUNAVAILABLE */
void pl_redis_wait(pl_redis_op *op);   /* somebody waits, so it times out */
void pl_redis_unwait(pl_redis_op *op);
void pl_redis_write_more(pl_redis_handle *h); /* what was bound in an outage */
void pl_redis_counts(pl_redis_handle *h, const redisReply *r);

/* redis_wire.c */
int pl_redis_encode(pl_redis_op *op); /* into h->out; PL_ENOMEM, PL_EINVALID: no such worker */
int pl_redis_encode_hello(pl_redis *r);
int64_t pl_redis_int(const redisReply *r); /* an integer, or a string that is one; else 0 */
/* The answer of the script: 0 or a negative pl_err. PL_EPROTOCOL: it is none. */
int pl_redis_code(const redisReply *r);
const redisReply *pl_redis_part(const redisReply *r, size_t i); /* an array, or NULL */
/* A binding that the script packed, its times in now_ns's clock. PL_ENOTFOUND: its engine is not
 * known here (the rest is filled, slot is -1). PL_EPROTOCOL. */
int pl_redis_binding(pl_redis *r, const redisReply *packed, int64_t now_us, uint64_t now_ns,
                     pl_binding *b);
/* A NAME of the script; points into the reply. */
int pl_redis_name(const redisReply *r, pl_session_name *name);

/* redis_sweep.c */
void pl_redis_timer_start(pl_redis_handle *h); /* what a handle does once a second */
void pl_redis_sweep_now(pl_redis_handle *h);
void pl_redis_timer_stop(pl_redis_handle *h);
void pl_redis_swept(pl_redis_op *op, const redisReply *r); /* r NULL: lost */
int pl_redis_list(pl_store *s, pl_store_list_call *c);
void pl_redis_cancel_list(pl_store *s, pl_store_list_call *c);
void pl_redis_listed(pl_redis_op *op, const redisReply *r);

#endif
