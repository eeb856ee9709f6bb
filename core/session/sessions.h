/* The sessions of a router: the lifecycle controller between the proxy, the affinity store and the
 * engines. It finds a session's binding, lets one turn of an engine-backed session run at a time,
 * opens the session on an engine and binds it, ends turns, and closes what is over, however it
 * ended. The proxy embeds a pl_turn in each request that names a session; requests without one
 * never come here.
 *
 * A session on an engine is opened under a name of the router's own, "<id>~<16 hex digits>", new
 * for every open: so a late close never hits a newer session of the same name, and two tenants that
 * use the same id never meet on an engine.
 *
 * Order of a turn, all on its loop's thread:
 *
 *     pl_turn_begin   look up, wait for the turn before, take the lease  -> ready()
 *     (session hook, decision: the proxy's)
 *     pl_turn_open    engine-backed and not open yet: RPC, then bind     -> ready()
 *     (forward; what goes to the engine: pl_turn_engine_id, session/history.h)
 *     pl_turn_sent    dispatch succeeded: router-only sessions are bound now
 *     pl_turn_end     exactly once after begin's ready(), however the request ended; or
 *     pl_turn_cancel  while ready() is still to come (the client left): no ready() any more */
#ifndef PL_SESSIONS_H
#define PL_SESSIONS_H

#include "base/hist.h"
#include "base/mailbox.h"
#include "base/rng.h"
#include "base/wheel.h"
#include "fleet/fleet.h"
#include "http/upstream.h"
#include "session/history.h"
#include "session/store.h"
#include "session/wish.h"

typedef struct pl_sessions pl_sessions;           /* one for the router */
typedef struct pl_sessions_loop pl_sessions_loop; /* one for each loop, used on its thread */

typedef struct pl_sessions_options {
    uint64_t open_timeout_ms;      /* of one open RPC: 5,000 */
    uint64_t close_timeout_ms;     /* of one close RPC: 5,000 */
    uint32_t engine_extra_seconds; /* an engine's own timeout is ours plus this: 30 */
    uint32_t capacity_of_str_len;  /* sent with open: 65,536 */
    uint32_t max_waiting_turns;    /* behind one turn of a session: 8; then PL_EBUSY */
    uint64_t turn_wait_ms;         /* a turn waits at most this long for the one before: 60,000 */
    uint64_t lease_ms;             /* 30,000; renewed at half */
    uint32_t max_open_per_worker;  /* engine-backed sessions on one worker, 0: no cap; 256 */
    uint64_t max_held_tokens_per_worker; /* 0: no cap */
    uint64_t max_ttl_ms;
} pl_sessions_options;
void pl_sessions_options_default(pl_sessions_options *o);

/* What closed a session, for counters and logs. */
typedef enum pl_close_cause {
    PL_CLOSE_CLIENT, /* asked for */
    PL_CLOSE_EXPIRED,
    PL_CLOSE_REBOUND,
    PL_CLOSE_POISONED,
    PL_CLOSE_FAILED, /* an open that timed out or lost a race; a first dispatch that failed */
    PL_CLOSE_GONE,   /* its engine leaves the fleet */
    PL_CLOSE_ADMIN,
    PL_CLOSE_SHUTDOWN,
    PL_CLOSE_CAUSES
} pl_close_cause;
extern const char *const pl_close_cause_names[PL_CLOSE_CAUSES];

/* Shared counters, atomics; read by /metrics. */
typedef struct pl_sessions_stats {
    _Atomic uint64_t hits, misses, binds, rebinds, expired, extended, dropped;
    _Atomic uint64_t opens, open_failures, open_races; /* RPCs */
    _Atomic uint64_t closes[PL_CLOSE_CAUSES];
    _Atomic uint64_t close_rpcs, close_failures, close_retries, close_given_up;
    _Atomic uint64_t turns_waited, turns_refused, poisoned, store_unavailable;
    _Atomic uint64_t discarded; /* turns whose client left and whose end was waited for */
} pl_sessions_stats;

typedef struct pl_sessions_config {
    pl_sessions_options o;
    pl_clock clock;
    /* the control thread: closes run there */
    uv_loop_t *control;
    pl_wheel *control_wheel;
    pl_mailbox *control_mailbox;
    const pl_pool_options *pool; /* for its own connections to engines */
    /* an engine-backed session has expired: the router runs the policy's expire hook on the loop of
     * this hash (any thread may call this) and then calls pl_sessions_expire. NULL: closed. */
    void (*expiring)(void *ctx, const pl_session_name *name, const pl_binding *b);
    void *ctx;
    /* an expired binding (its version) needs no more care: its close was acknowledged or given up,
     * or it was extended or dropped. Not told when the router stops before. Control thread. NULL:
     * nobody asks */
    void (*settled)(void *ctx, uint64_t version);
    /* a new reference to the worker's engine, and the worker; NULL when it is gone. Any thread */
    pl_engine *(*find)(void *ctx, int slot, int generation, pl_worker_state **w);
} pl_sessions_config;

/* The memory store's `expired` and the controller need each other: the store is made with
 * pl_sessions_expired and this as its ctx, then given with pl_sessions_set_store. */
int pl_sessions_new(const pl_sessions_config *c, pl_sessions **out);
/* The control thread's handle, before the first loop runs; it outlives the controller. */
void pl_sessions_set_store(pl_sessions *s, pl_store *store);
void pl_sessions_expired(void *sessions, const pl_session_name *name, const pl_binding *b);
/* Stops: closes every engine-backed session that this process opened when close_all (a store that
 * dies with it), waits at most deadline_ms; done runs on the control thread. */
void pl_sessions_stop(pl_sessions *s, bool close_all, uint64_t deadline_ms, void (*done)(void *ctx),
                      void *ctx);
/* After the loops' parts. What is still on its way to the control thread is dropped there: that
 * mailbox is closed after this, not before its memory goes. NULL is fine. */
void pl_sessions_free(pl_sessions *s);
const pl_sessions_stats *pl_sessions_stats_of(const pl_sessions *s);
const pl_hist *pl_sessions_open_latency(const pl_sessions *s);  /* of open RPCs, ns */
const pl_hist *pl_sessions_close_latency(const pl_sessions *s); /* of close RPCs, ns */

/* The verdict of the expire hook: PL_CLOSE, PL_EXTEND (seconds: bound again unless it has been
 * bound meanwhile), PL_DROP (forgotten; the engine's own timeout frees it). Since nobody can move
 * the engine's own timeout, all extensions between two turns are at most engine_extra_seconds
 * together; then it is closed. The next turn's end brings its own ttl back. Any thread. */
void pl_sessions_expire(pl_sessions *s, const pl_session_name *name, const pl_binding *b,
                        int action, double seconds);

/* Of an engine-backed binding, as last reported; -1: of another, or not known. */
double pl_binding_held_tokens(const pl_binding *b);

/* The engine leaves: its sessions are closed on it, as far as it still answers. Their bindings
 * stay: the next turn finds that its worker is gone. Control thread. s NULL is fine. */
void pl_sessions_engine_gone(pl_sessions *s, pl_engine *e);

/* Closes one by name (PL_EINVALID: too long for one), for the admin API. Control thread, with the
 * control thread's store handle. done: 0, PL_ENOTFOUND, or the store's error; the engine's close
 * goes on by itself. */
void pl_sessions_close(pl_sessions *s, pl_store *store, const pl_session_name *name,
                       void (*done)(void *ctx, int rc), void *ctx);

typedef struct pl_sessions_loop_config {
    pl_store *store; /* this loop's handle */
    pl_wheel *wheel;
    pl_mailbox *mailbox;
    pl_rng *rng;
    pl_pool *(*pool)(void *ctx, pl_engine *e); /* this loop's connections to it; NULL: no memory */
    void *ctx;
} pl_sessions_loop_config;
pl_sessions_loop *pl_sessions_loop_new(pl_sessions *s, const pl_sessions_loop_config *c);
/* Its last request is over: opens that nobody waits for any more are broken off, and closed. */
void pl_sessions_loop_drained(pl_sessions_loop *l);
void pl_sessions_loop_free(pl_sessions_loop *l);

/* Of (tenant, id), the same in every process: 52 bits, exact in a double; never 0. What a binding's
 * parent_hash is. */
uint64_t pl_session_name_hash(const pl_session_name *name);

/* --- one turn; embed it, zero-initialise --- */

typedef enum pl_turn_end_kind {
    PL_TURN_DONE,    /* the engine has ended it and it succeeded */
    PL_TURN_FAILED,  /* the engine has ended it and it failed; or it was never sent */
    PL_TURN_ABORTED, /* the client left; the engine has ended it */
    PL_TURN_POISONED /* nobody knows whether the engine still works on it, or the engine said so */
} pl_turn_end_kind;

typedef struct pl_turn pl_turn;
struct pl_turn {
    /* set by the caller before begin; strings stay valid until the end (arena or heap) */
    pl_session_name name;
    const pl_wish *wish;
    void (*ready)(pl_turn *t, int rc); /* see begin and open */

    uint32_t capacity_of_str_len; /* before pl_turn_open; 0: the options' */
    bool instead;     /* before pl_turn_sent: what an engine holds elsewhere is given up for this */
    bool only_closes; /* a wish of action CLOSE that is no turn itself: it does not wait for those
                         of the session, only for an open under way */

    /* after ready(): */
    bool bound;    /* `binding` is the session's */
    bool leased;   /* this turn holds the session's lease: it is engine-backed */
    bool fallback; /* the shared store is out of reach: choose by rendezvous. With `bound`: what
                      this process last knew; an engine-backed one is affinity only (not leased) */
    pl_binding binding;
    pl_history history; /* of an engine-backed session; what it holds on its engine */
    double held_tokens; /* of an engine-backed session, as last reported */
    bool streaming;     /* the engine's session is a streaming one */

    struct pl_turn_inner *in; /* the controller's; NULL: begin was not called or the turn is over */
};

/* Answers 0 or a negative pl_err at once, or PL_STORE_PENDING and then ready(t, rc). rc: 0 (bound
 * or not; a fallback is 0, too), PL_EBUSY: max_waiting_turns wait already, PL_ETIMEOUT: the turn
 * before did not end in turn_wait_ms, PL_ENOMEM. After an error the turn is over (no pl_turn_end).
 * Wishes of action OPEN and CLOSE, and all turns of engine-backed sessions, take the session's
 * turn; others do not wait.
 */
int pl_turn_begin(pl_sessions_loop *l, pl_turn *t);

/* The bound worker when it is in this model's view, else NULL: gone. */
pl_worker_state *pl_turn_worker(const pl_turn *t, const pl_model *m);

/* May worker w take one more engine-backed session: is its engine able to (engine->caps; it has not
 * just failed at several), and is it below the caps? 0, PL_EUNAVAILABLE (not able), PL_ELIMIT
 * (full). Cheap, any thread. */
int pl_sessions_can_open(const pl_sessions *s, const pl_worker_state *w);

/* The same for a regular (not streaming) session, which every engine with /open_session does. */
int pl_sessions_can_open_regular(const pl_sessions *s, const pl_worker_state *w);

/* Opens the session on w and binds it, in place of the present binding when there is one (which is
 * closed: PL_CLOSE_REBOUND). PL_STORE_PENDING, then ready(t, rc); or an error at once. rc: 0
 * (bound, leased, history NONE); PL_EEXISTS: another router was first, `binding` is its (this open
 * was closed); PL_EUNAVAILABLE: the engine does not do it (404, 400: engine->caps says so until the
 * next probe); PL_ETIMEOUT, PL_ECONNECT, ...: it failed (and was closed as far as possible);
 * PL_ELIMIT: the store is full, or w is; PL_EIO: the store is out of reach (`fallback` is set);
 * PL_EBUSY: too many turns wait, or after a lost race the winner's turn did not end in
 * turn_wait_ms. After PL_EEXISTS the turn is bound and holds the winner's lease. After another
 * error the turn goes on, as it was. */
int pl_turn_open(pl_turn *t, pl_worker_state *w, uint64_t ttl_ms, bool streaming);

/* The engine takes no turn of the session that it holds: what is opened in its place, or the end,
 * closes it as poisoned. */
void pl_turn_poisoned(pl_turn *t);

/* The engine's name of the session into buf (NUL-terminated, of the ASCII letters, digits and marks
 * that need no care in JSON); its length, 0 when the turn does not hold the lease of an
 * engine-backed one. */
#define PL_ENGINE_SESSION_MAX (PL_SESSION_MAX_ID_BYTES + 18)
size_t pl_turn_engine_id(const pl_turn *t, char buf[PL_ENGINE_SESSION_MAX]);

/* The engine took the request (its answer's head is 2xx). kind ROUTER_ONLY: binds to w or, when it
 * is bound there already, refreshes; an engine-backed binding is left alone, or (t->instead, to
 * another worker than w) replaced and closed. ttl_ms 0: binds nothing. */
void pl_turn_sent(pl_turn *t, pl_worker_state *w, uint64_t ttl_ms);

/* Ends it: gives back lease and turn, records history (LOST unless DONE; as it was when the turn
 * was never sent and `history` is not LOST) and held tokens, closes when the wish says so (close,
 * final), when it is poisoned, or when it was opened by this turn, which was never sent and is not
 * DONE. held_tokens < 0: not known; history NULL: as it was. */
void pl_turn_end(pl_turn *t, pl_turn_end_kind how, const pl_history *history, double held_tokens);
void pl_turn_cancel(pl_turn *t);

#endif
