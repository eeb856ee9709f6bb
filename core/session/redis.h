/* The shared store: the affinity store (store.h) on a server that speaks the Redis protocol, for
 * several routers that must agree. One pl_redis for the process, one handle (a pl_store) for each
 * loop. Tested against redis-server 7.0; needs Lua scripts (EVAL) and nothing else beyond the
 * commands on hashes and sorted sets. Not for a Redis Cluster, unless the prefix has a {hash tag}.
 *
 * When the server does not answer
 *
 * A call is answered after at most command_timeout_ms and three ticks of the wheel. When the server
 * is silent for that long, or the connection breaks, the handle is down: calls are answered
 * PL_EUNAVAILABLE at once, until the server answers again; it is asked with backoff, 0.1 to 2 s,
 * each time up to half of that earlier by chance. Logged once when the first handle goes down and
 * once when all are up again.
 *
 * While it is down a process still knows the sessions that it served (known_sessions of them, all
 * handles together): GET and PEEK of such a session answer with its last known binding and
 * call->stale. So a session that was opened before the outage keeps its worker on every router that
 * has served it before; on another router its first turn finds PL_EUNAVAILABLE and falls to the
 * caller's deterministic choice, which is the wrong worker unless that choice was made when it was
 * opened, too. A router-only PUT answers 0 with call->stale (with
 * `when` judged by what is known here; IF_VERSION by that very binding): remembered here, found by
 * GET, and written when the server is back unless the session is bound there by then (the server's
 * wins). Since every router makes the same deterministic choice, sessions opened during an outage
 * meet without a server. Engine-backed PUTs, all LEASEs and RELEASEs and REMOVEs are
 * PL_EUNAVAILABLE: what the engine holds cannot be agreed on without the store. A server that comes
 * back empty gets the router-only sessions that were used meanwhile; the engine-backed ones are
 * forgotten, and the engine's own timeout frees them.
 *
 * Why GET and PEEK may be answered from memory, up to staleness_ms old, for router-only bindings
 * alone: a stale one costs a cache miss; a stale engine-backed one would send a turn to a session
 * that has been closed or is bound elsewhere. Such a GET moves no deadline on the server, at most
 * staleness_ms are lost, so it is done only for ttls of ten times that; its turn is counted with
 * the next GET that is sent.
 *
 * Expiry
 *
 * Handles that sweep ask for what is due with each pl_store_advance, at the latest a second after
 * the last time (the router's advances four times a second). An expired engine-backed session is
 * claimed by one of them, which calls expired(); the closer then says pl_store_redis_ack. A claim
 * whose handle has not asked for 3 s goes to another one (so within 5 s), which calls expired()
 * again: normally exactly one router closes, and at least one. A claim that is not acknowledged in
 * 15 minutes is dropped; the engine's own timeout has freed it by then. When the engine is not
 * known here, another router gets it, a few times over. */
#ifndef PL_REDIS_H
#define PL_REDIS_H

#include <uv.h>

#include "base/hist.h"
#include "base/wheel.h"
#include "session/store.h"

#define PL_REDIS_WORKER_MAX 255 /* bytes of an engine's name */

/* Everything is copied by pl_redis_new but the callbacks' contexts. {NULL,0} or 0: the default. */
typedef struct pl_redis_options {
    pl_str host;              /* name or address; 127.0.0.1 */
    int port;                 /* 6379 */
    pl_str unix_path;         /* instead of host and port */
    pl_str user, password;    /* password {NULL,0}: no AUTH. Never logged */
    int db;                   /* 0 */
    pl_str prefix;            /* of every key; "perilune:" */
    uint64_t command_ms;      /* 50 */
    uint64_t connect_ms;      /* 1,000: connect, log in and the first answer */
    uint64_t staleness_ms;    /* 1,000; see above */
    bool no_stale;            /* staleness 0: every GET and PEEK asks the server */
    uint32_t known_sessions;  /* 65,536 */
    uint64_t cap;             /* sessions on the server, all routers together; 1,000,000 */
    pl_clock clock;           /* the process's; times in bindings are told in it */
    bool clock_is_the_server; /* deadlines by `clock` instead of the server's time: all routers must
                                 read the same one. For tests and simulations */
    /* Between routers a worker is its engine's name and its rank. Any loop's thread.
     * worker_name: the name's length, 0 when slot and generation are gone. find_worker: 0, or
     * PL_ENOTFOUND when there is no such engine or rank here. */
    size_t (*worker_name)(void *ctx, int32_t slot, int32_t generation,
                          char buf[PL_REDIS_WORKER_MAX]);
    int (*find_worker)(void *ctx, pl_str name, int32_t rank, int32_t *slot, int32_t *generation);
    void *worker_ctx;
    /* As pl_store_options.expired, on the loop of a handle that sweeps; slot is never -1. `store`
     * is that handle, to acknowledge with. */
    void (*expired)(void *ctx, pl_store *store, const pl_session_name *name, const pl_binding *b);
    void *expired_ctx;
} pl_redis_options;

typedef struct pl_redis pl_redis;

/* No I/O. PL_EINVALID with eb filled, PL_ENOMEM. */
int pl_redis_new(const pl_redis_options *o, pl_redis **out, pl_errbuf *eb);
/* After the last handle was freed, and not from inside a callback of one. NULL is fine. */
void pl_redis_free(pl_redis *r);

/* Workers have changed, so other routers may have moved sessions this moment: what was heard before
 * is asked for again. Any thread. */
void pl_redis_distrust(pl_redis *r);

/* A handle for this loop, used on its thread only, as is everything of pl_store. Connects at once.
 * sweeps: expired() runs on this loop; at least one handle of a process should. pl_store_advance
 * asks for what is due now instead of within a second (handles that sweep; one question at a time).
 *
 * pl_store_free may be called while commands are under way, as long as their calls were answered or
 * cancelled. It closes libuv handles: the loop must run once more before uv_loop_close (as for any
 * uv_close), and longer when a name is being resolved. PL_ENOMEM. */
int pl_store_redis_new(pl_redis *r, uv_loop_t *loop, pl_wheel *wheel, bool sweeps, pl_store **out);

/* The engine-backed session that was handed to expired() is closed, or nobody will: on the handle
 * that expired() named, on its thread. Sent within a second. */
void pl_store_redis_ack(pl_store *s, uint64_t version);

/* Is the server answering this handle? */
bool pl_store_redis_up(const pl_store *s);

/* Of the process; read on any thread. */
typedef struct pl_redis_stats {
    _Atomic uint64_t calls, answered;       /* sent to the server, answered by it in time */
    _Atomic uint64_t timeouts, unavailable; /* calls answered so, or from what is known */
    _Atomic uint64_t late, refused;         /* replies after the timeout; error replies */
    _Atomic uint64_t outages, connects;     /* of handles */
    _Atomic uint64_t cached, stale;         /* answered from memory: fresh; in an outage */
    _Atomic uint64_t journalled;            /* PUTs of an outage, remembered */
    _Atomic uint64_t written, conflicts,
        forgotten; /* of those: written; bound elsewhere; dropped */
    _Atomic uint64_t claims, takeovers, acks, given; /* of expired ones; given: engine not known */
    _Atomic uint64_t handles_down;                   /* now */
} pl_redis_stats;
const pl_redis_stats *pl_redis_stats_of(const pl_redis *r);
/* Adds how long calls took, all handles together, to `into`. Any thread. */
void pl_redis_latency(const pl_redis *r, pl_hist *into);

#endif
