/* What the parts of the lifecycle controller share: sessions.c (the whole, expiry, stop), turns.c
 * (a turn's way), gate.c (one turn at a time), opener.c (the open RPC), closer.c (close RPCs),
 * registry.c (what is open where), note.c (what goes with a binding). For these only; everybody
 * else uses sessions.h.
 *
 * An engine-backed session's life, seen from here:
 *
 *     pl_registry_add --open RPC ok, bound--> open --pl_close_submit--> closing --acknowledged, or
 *          |                                                            given up--> dropped
 *          +--never reached the engine, or refused--> dropped
 *
 * From add to drop it counts in its worker's `sessions`; so that is zero exactly when nothing that
 * this process opened can still be held. */
#ifndef PL_SESSIONS_IMPL_H
#define PL_SESSIONS_IMPL_H

#include "base/log.h"
#include "session/sessions.h"

#define PL_NAME_BYTES (PL_SESSION_MAX_TENANT_BYTES + PL_SESSION_MAX_ID_BYTES)

static inline void pl_count(_Atomic uint64_t *c)
{
    atomic_fetch_add_explicit(c, 1, memory_order_relaxed);
}

/* --- note.c: what goes with an engine-backed binding --- */

typedef struct pl_session_note {
    uint64_t nonce; /* the engine's name of it is "<id>~<16 hex digits of this>" */
    pl_history history;
    double held_tokens;
    uint32_t engine_seconds; /* the engine's own timeout, as sent with open */
    uint32_t ttl_ms;         /* as bound by its open: EXTEND binds for another */
    uint32_t extended_ms;    /* since its last turn */
    bool streaming;
} pl_session_note;

void pl_session_note_write(const pl_session_note *in, pl_note *out);
/* False, and *out zero, when it is none of ours. */
bool pl_session_note_read(const pl_note *in, pl_session_note *out);
size_t pl_session_engine_name(pl_str id, uint64_t nonce, char buf[PL_ENGINE_SESSION_MAX]);
/* Copies both strings to `at`, which has room for them. */
pl_session_name pl_session_name_copy(const pl_session_name *name, char *at);

/* --- gate.c: one turn of a session at a time, in this process --- */

typedef struct pl_turn_inner pl_turn_inner;
typedef struct pl_gate pl_gate;
typedef struct pl_gate_entry pl_gate_entry;

/* A close on its way; first in closer.c's own struct. */
typedef struct pl_close {
    pl_message message; /* first: to the control thread */
    struct pl_close *next;
    uint64_t nonce;
} pl_close;

/* Embedded in who waits; zero-initialise. Heap-owned: after a cancel that came too late it lives
 * until `granted` has run. */
typedef struct pl_gate_waiter {
    pl_message message; /* first: the grant, to its loop */
    struct pl_gate_waiter *next, *prev;
    pl_gate_entry *entry;
    pl_mailbox *mailbox;                       /* of its loop */
    void (*granted)(struct pl_gate_waiter *w); /* on its loop, never from inside pl_gate_enter */
    bool granting;                             /* the message is under way; under the lock */
} pl_gate_waiter;

pl_gate *pl_gate_new(void);
void pl_gate_free(pl_gate *g); /* nobody waits or is inside */
/* 0: inside. PL_STORE_PENDING: granted() will run. PL_EBUSY: max_waiting wait already; PL_ENOMEM.
 */
int pl_gate_enter(pl_gate *g, const pl_session_name *name, pl_gate_waiter *w, uint32_t max_waiting);
/* Out of the queue: true. False: granted() is on its way and will run; leave then. */
bool pl_gate_cancel(pl_gate *g, pl_gate_waiter *w);
/* The closes that were kept for the end of this turn, to be sent. */
pl_close *pl_gate_leave(pl_gate *g, pl_gate_waiter *w);
/* Who is inside works on the engine's session of this nonce; 0: on none. */
void pl_gate_mark(pl_gate *g, pl_gate_waiter *w, uint64_t nonce);
/* Keeps c until the turn that works on its session has ended; false: there is none. */
bool pl_gate_keep(pl_gate *g, const pl_session_name *name, pl_close *c);

/* --- registry.c: what this process has open on which worker. Any thread. --- */

typedef struct pl_registry pl_registry;

typedef struct pl_registered {
    struct pl_registered *next;
    uint64_t nonce;
    pl_worker_state *worker; /* its engine is referenced */
    uint64_t version;        /* of its binding; 0: not bound yet */
    uint64_t seen_ns;        /* it was bound then */
    uint64_t look_ns;        /* its binding should be gone by then */
    int64_t tokens;          /* held, as last reported */
    uint32_t ttl_ms;
    bool closing;
    bool looking;         /* the store is being asked */
    pl_session_name name; /* points to bytes */
    char bytes[];
} pl_registered;

pl_registry *pl_registry_new(void);
void pl_registry_free(pl_registry *r); /* what is left is dropped */
/* max_sessions, max_tokens of the worker, 0: no cap. PL_ELIMIT: it is full; PL_ENOMEM. */
int pl_registry_add(pl_registry *r, uint64_t nonce, pl_worker_state *w, const pl_session_name *name,
                    uint32_t max_sessions, uint64_t max_tokens);
/* Its binding is this one now, and good until now_ns + ttl. tokens < 0: as they were. Nothing when
 * it is not here. */
void pl_registry_bound(pl_registry *r, uint64_t nonce, uint64_t version, uint32_t ttl_ms,
                       uint64_t now_ns, double tokens);
/* It is being closed; a new reference to its engine, and the worker; NULL: not here. */
pl_engine *pl_registry_closing(pl_registry *r, uint64_t nonce, pl_worker_state **w);
void pl_registry_drop(pl_registry *r, uint64_t nonce);
bool pl_registry_is_open(pl_registry *r, uint64_t nonce); /* and not being closed */
/* Copies of those that are bound and not being closed: on this engine (NULL: all), and of which
 * due_ns says that their binding should be gone (0: all). At most `max`, 0: no bound. A list to
 * free one by one; the copies hold no reference. */
pl_registered *pl_registry_pick(pl_registry *r, const pl_engine *e, uint64_t due_ns, unsigned max);
/* The store's answer to a look came, with the binding at seen_ns, 0: without; ask again at look_ns.
 */
void pl_registry_looked(pl_registry *r, uint64_t nonce, uint64_t seen_ns, uint64_t look_ns);
unsigned pl_registry_count(pl_registry *r);

/* --- closer.c: closes, on the control thread --- */

typedef struct pl_closer pl_closer;

/* Told to a loop when the first attempt has ended, one way or another. The loop's part of the
 * controller keeps it in a list, so that none is posted to a loop that has ended. */
typedef struct pl_close_notice {
    pl_message message;                   /* first */
    struct pl_close_notice *next, **link; /* of its loop's thread alone */
    void *owner;                          /* likewise */
    pl_mailbox *mailbox;                  /* under notice_lock; NULL: the loop has ended */
    bool undelivered;                     /* likewise: its mailbox is closed */
} pl_close_notice;

pl_closer *pl_closer_new(pl_sessions *s);
#define PL_CLOSE_UNCOUNTED PL_CLOSE_CAUSES /* somebody else has counted the cause */
/* Closes the session that b (engine-backed) names on its engine, after the turn that works on it.
 * again: the open may still land after the close: closes twice more, later. Any thread. notice may
 * be NULL. Out of memory: given up. */
void pl_close_submit(pl_sessions *s, const pl_session_name *name, const pl_binding *b,
                     pl_close_cause cause, bool again, pl_close_notice *notice);
void pl_close_send(pl_sessions *s, pl_close *list); /* what pl_gate_leave gave */
/* The engine is gone: what is still to be closed there is given up soon. Control thread. */
void pl_closer_engine_gone(pl_closer *c, const pl_engine *e);
/* No waiting for repeats any more. Control thread. */
void pl_closer_hurry(pl_closer *c);
/* Gives up what is left, and all that is still to come. Control thread. */
void pl_closer_stop(pl_closer *c);
/* Closes that are not over. Any thread. */
unsigned pl_closer_pending(const pl_closer *c);
void pl_closer_free(pl_closer *c); /* after pl_closer_stop */

/* --- opener.c: open RPCs, on the request's loop --- */

typedef struct pl_opening pl_opening;

typedef struct pl_opening_config {
    pl_worker_state *worker;
    pl_session_name name; /* copied */
    uint64_t nonce;
    uint32_t engine_seconds;
    uint32_t capacity_of_str_len;
    bool streaming;
    void (*done)(void *ctx, int rc);
    void *ctx;
} pl_opening_config;

/* The session is in the registry; after a failure the opening has dropped it or handed it to the
 * closer. done: 0 or as pl_turn_open says; never from inside. NULL: out of memory (dropped, too).
 */
pl_opening *pl_opening_start(pl_sessions_loop *l, const pl_opening_config *c);
/* No done any more; what is opened nonetheless is closed. */
void pl_opening_abandon(pl_opening *o);
/* The loop ends: every opening is abandoned, now. */
void pl_openings_stop(pl_sessions_loop *l);

/* --- errand.c: an operation of the store that no turn waits for --- */

typedef struct pl_store_errand pl_store_errand;
typedef struct pl_store_errands { /* of one thread */
    pl_store_errand *first;
} pl_store_errands;
struct pl_store_errand {
    pl_store_call call; /* first; its name points to bytes */
    pl_sessions *s;
    pl_store *store;
    pl_store_errand *next, **link;
    void (*then)(pl_store_errand *e); /* answered: sets again, or it is over */
    bool again;                       /* the call is to be started once more */
    void (*done)(void *ctx, int rc);  /* then()'s own from here on */
    void *ctx;
    uint64_t nonce;
    bool in_hand; /* who removed the binding closes the session */
    int cause, tries;
    char bytes[PL_NAME_BYTES];
};
/* NULL: out of memory. Fill call and then, and go. */
pl_store_errand *pl_store_errand_new(pl_sessions *s, pl_store *store, pl_store_errands *of,
                                     const pl_session_name *name);
void pl_store_errand_go(pl_store_errand *e);
void pl_store_errands_cancel(pl_store_errands *of);
/* Removes the binding to the engine's session of this nonce, when it is there. */
void pl_session_forget(pl_sessions *s, pl_store *store, pl_store_errands *of,
                       const pl_session_name *name, uint64_t nonce);
/* Ends the lease that this owner may have; the note stays. */
void pl_session_unlease(pl_sessions *s, pl_store *store, pl_store_errands *of,
                        const pl_session_name *name, uint64_t owner);
/* Removes whatever it is bound to and closes that; done may be NULL. */
void pl_session_remove(pl_sessions *s, pl_store *store, pl_store_errands *of,
                       const pl_session_name *name, pl_close_cause cause,
                       void (*done)(void *ctx, int rc), void *ctx);

/* --- the whole --- */

struct pl_sessions {
    pl_sessions_config c;
    pl_sessions_stats stats;
    pl_gate *gate;
    pl_registry *registry;
    pl_closer *closer;
    pl_store *store; /* the control thread's handle; NULL before it is set */
    pl_store_errands errands;
    pl_timer look_timer;
    unsigned looks;         /* under way */
    uint64_t outages;       /* of the store, as last seen; look_timer's */
    uint64_t outage_ns;     /* when that was */
    _Atomic unsigned turns; /* inner turns that are not over */
    _Atomic bool stopping;
    _Atomic unsigned posted; /* messages to the control thread that have not arrived */
    bool freed;              /* the last of those frees the struct */
    uv_mutex_t hist_lock, notice_lock;
    pl_hist open_latency, close_latency;
    pl_timer stop_timer;
    uint64_t stop_by_ms;
    void (*stopped)(void *ctx);
    void *stopped_ctx;
};

struct pl_sessions_loop {
    pl_sessions *s;
    pl_sessions_loop_config c;
    pl_rng nonces; /* seeded by the system: routers with one seed must not meet */
    pl_turn_inner *turns;
    pl_opening *openings;
    pl_close_notice *notices;
    pl_store_errands errands;
};

/* To the control thread; 0, or PL_ECANCELLED: it takes none any more. */
int pl_sessions_post(pl_sessions *s, pl_message *m);
/* One of those has arrived. True: too late, the controller is freed (and s gone, maybe): drop it.
 */
bool pl_sessions_arrived(pl_sessions *s);
/* Is this a store's answer that says it is out of reach? Counted; the store has logged it. */
bool pl_sessions_store_lost(pl_sessions *s, int rc);
void pl_sessions_settled(pl_sessions *s, uint64_t version); /* control thread; 0: not expired */
void pl_sessions_latency(pl_sessions *s, pl_hist *h, uint64_t ns);
uint64_t pl_sessions_random(pl_sessions_loop *l); /* never 0 */

#endif
