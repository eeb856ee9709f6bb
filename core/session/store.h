/* The affinity store: which worker a session is bound to, and until when. An interface, so that one
 * test suite (tests/unit/session/store_suite.h) holds for every store: memory.c is the one of a
 * single router, redis.c the one that several routers share.
 *
 * A session is named by (tenant, id), compared byte by byte. Its binding has a sliding deadline:
 * GET moves it to now + ttl, PEEK does not. A binding leaves the store in one of five ways:
 *
 *     REMOVE        handed back to the remover (call->old)
 *     PUT, a rebind handed back to the one who put (call->old)
 *     expiry        engine-backed: handed to expired(); router-only: silently
 *     eviction      router-only ones alone, the least recently used first, when the cap is reached
 *     free          silently
 *
 * so an engine-backed binding is handed to exactly one place, which closes the engine's session.
 *
 * A turn of an engine-backed session holds a lease: one turn at a time, over all routers. LEASE
 * takes it (or renews one's own) for lease_ms, RELEASE gives it back. A leased binding does not
 * expire before its lease ends; RELEASE moves the deadline to now + ttl, so that the time to live
 * counts from the end of a turn. A lease that is not renewed ends by itself (its router died).
 *
 * The calls are asynchronous in shape: pl_store_start answers at once, or says PL_STORE_PENDING and
 * answers later through call->done. The memory store always answers at once. The shared store
 * (redis.h) sends a command (one script for each operation, so that each is atomic; PUT with `when`
 * is the compare-and-set), is one handle per loop (its connection belongs to the loop), answers on
 * that loop in the order of the replies, and when the server is slow or gone answers PL_ETIMEOUT or
 * PL_EUNAVAILABLE, upon which the caller falls back to a choice that needs no store; or, where this
 * process knows the session's last binding, answers with that and call->stale. Between routers it
 * has to name a worker by its engine's name and rank, since slot and generation mean something in
 * one process only, and translates at its edge: when the engine is not known here GET, PEEK and
 * LEASE answer PL_ENOTFOUND, and `old`, expired() and the list have slot -1. Deadlines are by the
 * server's time, and told in this process's. */
#ifndef PL_STORE_H
#define PL_STORE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/str.h"

#define PL_SESSION_MAX_ID_BYTES     256
#define PL_SESSION_MAX_TENANT_BYTES 255
#define PL_SESSION_MAX_RANK         INT16_MAX
#define PL_SESSION_MAX_TTL_MS       (30u * 24 * 3600 * 1000) /* 30 days */
#define PL_STORE_LIST_MAX           1000                     /* of pl_store_list_call.limit */
#define PL_STORE_DUE_MS             1000 /* a due session has expired after at most this */
#define PL_STORE_ADVANCE_MS         500  /* call pl_store_advance at least this often */

typedef struct pl_session_name {
    pl_str tenant; /* may be empty: without tenants all sessions are of one */
    pl_str id;     /* 1 .. PL_SESSION_MAX_ID_BYTES, any bytes */
} pl_session_name;

typedef enum pl_session_kind {
    PL_SESSION_ROUTER_ONLY,  /* affinity alone: forgetting it costs a cache miss */
    PL_SESSION_ENGINE_BACKED /* the engine holds state for it that must be closed */
} pl_session_kind;

/* What the owner keeps with an engine-backed binding, opaque to the store; travels with it, also
 * between routers (so: fixed-size little-endian fields, no pointers). Router-only bindings have
 * none. */
typedef struct pl_note {
    uint8_t n; /* bytes used */
    uint8_t bytes[79];
} pl_note;

typedef struct pl_binding {
    int32_t slot; /* worker */
    int32_t generation;
    int32_t rank;
    pl_session_kind kind;
    uint32_t turns;        /* counted by GET, this one included; PUT sets it */
    uint64_t parent_hash;  /* of the parent session's name; 0: none. PUT sets it */
    uint64_t opened_at_ns; /* by the store's clock; set by the store at the first put of the name */
    uint64_t used_at_ns;   /* the last GET, PUT or RELEASE before this call (a PUT says its own
                              time); set by the store */
    pl_note note;          /* PUT and RELEASE set it; bytes beyond n are undefined */
    uint32_t ttl_ms;       /* 1 .. PL_SESSION_MAX_TTL_MS */
    uint64_t deadline_ns;  /* by the store's clock; set by the store; a lease may end later */
    uint64_t version; /* set by the store; every put of a name gets one it never had; never 0 */
} pl_binding;

typedef enum pl_store_op {
    PL_STORE_GET,    /* fills binding and refreshes; PL_ENOTFOUND */
    PL_STORE_PEEK,   /* fills binding; PL_ENOTFOUND */
    PL_STORE_PUT,    /* binds to `binding`, fills its deadline and version, and old */
    PL_STORE_REMOVE, /* fills old; PL_ENOTFOUND when there was none */
    PL_STORE_LEASE,  /* for `owner`, lease_ms from now (his own is renewed); fills binding.
                        PL_ENOTFOUND: no engine-backed binding. PL_EBUSY: another owner's lease lasts
                        (binding is filled) */
    PL_STORE_RELEASE /* ends `owner`'s lease, moves the deadline to now + ttl, replaces the note
                        when binding.note.n > 0; fills binding. PL_ENOTFOUND: no such binding, or
                        not his lease (one that ended by itself is his until another takes it) */
} pl_store_op;

/* What PUT and REMOVE ask of the present binding. When it is not so they change nothing, and answer
 * PL_EEXISTS with the present binding in old, or PL_ENOTFOUND when there is none. */
typedef enum pl_store_when {
    PL_STORE_ALWAYS,
    PL_STORE_IF_ABSENT, /* PUT: two that open one session end on one worker */
    PL_STORE_IF_VERSION /* it is still the one that the caller saw: call->version */
} pl_store_when;

#define PL_STORE_PENDING 1

/* One operation. The caller owns it and what `name` points to, until it is answered or cancelled.
 */
typedef struct pl_store_call {
    pl_store_op op;
    pl_store_when when; /* GET and PEEK do not look at it */
    pl_session_name name;
    uint64_t version;   /* for PL_STORE_IF_VERSION */
    uint64_t owner;     /* LEASE, RELEASE: random, not 0; one for each turn. PUT: not 0 binds with
                           that owner's lease already held */
    uint32_t lease_ms;  /* LEASE, and PUT with an owner */
    pl_binding binding; /* PUT: in, completed by the store; GET, PEEK: out */
    pl_binding old;     /* out: PUT, REMOVE; only with had_old */
    bool had_old;       /* out */
    bool lapsed; /* out, LEASE: another owner's lease ended without his RELEASE: nobody knows how
                    far his turn got, and the note may be older than what the engine holds */
    bool stale;  /* out, with 0 or PL_EEXISTS from a shared store that is out of reach: GET and
                    PEEK tell what this process last knew, PUT (router-only) is remembered
                    here and written when the server is back, if the session is new there */
    int result;  /* out: what pl_store_start returned, or what came later */
    /* Runs after pl_store_start returned PL_STORE_PENDING, once, on the thread that started it, and
     * may free the call. Unused by a store that never does; NULL is fine there. */
    void (*done)(struct pl_store_call *c);
    void *pending; /* the store's own while pending */
} pl_store_call;

/* A page of sessions, for the admin API: in no order, each session that was there all the while
 * exactly once. Caller owns it until answered, as pl_store_call. */
typedef struct pl_store_list_call {
    uint64_t cursor; /* in: 0 to begin; out: 0 when this was the last page */
    uint32_t limit; /* about how many, 1 .. PL_STORE_LIST_MAX; a page may have fewer, even none, and
                       of a shared store more, up to some 200 */
    void (*each)(struct pl_store_list_call *c, const pl_session_name *name, const pl_binding *b);
    void (*done)(struct pl_store_list_call *c); /* as pl_store_call.done */
    void *ctx;
    int result;
    void *pending;
} pl_store_list_call;

typedef struct pl_store_stats {
    uint64_t router_only, engine_backed; /* held now; due ones too until they expired */
    uint64_t bytes;                      /* memory in use for all of it; 0 when elsewhere */
    uint64_t expired_router_only, expired_engine_backed, evicted, refused; /* since the start */
    uint64_t outages; /* times that what it holds may have been lost; a shared store's */
} pl_store_stats;

typedef struct pl_store pl_store;

typedef struct pl_store_ops {
    const char *name; /* in logs and metrics */
    int (*start)(pl_store *s, pl_store_call *c);
    void (*cancel)(pl_store *s, pl_store_call *c);
    int (*list)(pl_store *s, pl_store_list_call *c);
    void (*cancel_list)(pl_store *s, pl_store_list_call *c);
    void (*advance)(pl_store *s);
    void (*stats)(pl_store *s, pl_store_stats *out);
    void (*free)(pl_store *s);
} pl_store_ops;

struct pl_store { /* first in each store's own struct */
    const pl_store_ops *ops;
};

/* 0 or a negative pl_err when answered, PL_STORE_PENDING when done() will be called. Besides what
 * the operations say: PL_EINVALID (name, worker or ttl out of bounds), PL_ELIMIT (a new session
 * while the cap is reached and nothing may be evicted), PL_ENOMEM; from a shared store PL_ETIMEOUT
 * and PL_EUNAVAILABLE. After an error the session is as it was (a shared store's timeout excepted:
 * nobody knows). */
static inline int pl_store_start(pl_store *s, pl_store_call *c)
{
    return s->ops->start(s, c);
}

/* Forgets a pending call: done() does not run, the memory is the caller's at once. What was sent
 * may still take effect. */
static inline void pl_store_cancel(pl_store *s, pl_store_call *c)
{
    s->ops->cancel(s, c);
}

/* 0 or a negative pl_err when answered (each() has run), PL_STORE_PENDING when done() will be
 * called. */
static inline int pl_store_list(pl_store *s, pl_store_list_call *c)
{
    return s->ops->list(s, c);
}

static inline void pl_store_cancel_list(pl_store *s, pl_store_list_call *c)
{
    s->ops->cancel_list(s, c);
}

/* Expires what is due. Late calls lose nothing: an expired session is not found either way. */
static inline void pl_store_advance(pl_store *s)
{
    s->ops->advance(s);
}

static inline void pl_store_stats_read(pl_store *s, pl_store_stats *out)
{
    s->ops->stats(s, out);
}

/* No call is under way or pending. NULL is fine. */
static inline void pl_store_free(pl_store *s)
{
    if (s)
        s->ops->free(s);
}

/* For stores: PL_EINVALID when what the call says is out of bounds, else 0. */
int pl_store_check(const pl_store_call *c);

typedef struct pl_store_options {
    pl_clock clock; /* monotonic; called from every thread that uses the store */
    uint64_t cap;   /* sessions held at most, 1 or more; memory: up to 2^32 - 1 */
    /* An engine-backed binding has expired and is out of the store. Runs without locks on the
     * thread whose call found it, before that call is answered (a shared store: within a second or
     * so, from the loop of a handle that sweeps), and may use the store (not free it). `name` is
     * good until it returns. By then the session may be bound anew, to the same worker too: who
     * closes must order that after or tell the two apart by version. NULL: nobody cares. */
    void (*expired)(void *ctx, const pl_session_name *name, const pl_binding *b);
    void *ctx;
} pl_store_options;

/* The store of one process: one handle for all threads. Never pending, never blocks on more than a
 * lock that is held for microseconds. cap 10,000,000 and more work; memory is taken as sessions
 * come. "Least recently used" is kept to a second. PL_EINVALID, PL_ENOMEM. */
int pl_store_memory_new(const pl_store_options *o, pl_store **out);

#endif
