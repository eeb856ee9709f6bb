/* A turn from the inside: what turns.c (begin, waits, lease, cancel), turn_open.c (open and bind)
 * and turn_end.c (sent, end) share. On the turn's loop alone. The inner turn is on the heap and
 * outlives its pl_turn (t is NULL then: detached) until what it has begun in the store is answered
 * and undone.
 *
 *     begin: LOOKUP -> (engine-backed) GATE -> LEASE <-> POLL -> IDLE
 *     OPEN, CLOSE: GATE -> LOOKUP -> ...
 *     open:  IDLE -> (GATE) -> OPENING -> BINDING -> IDLE; race lost: -> LEASE <-> POLL -> IDLE
 *     sent:  IDLE -> SENT -> IDLE
 *     end:   IDLE, SENT -> ENDING -> over; a release that failed: <-> POLL
 */
#ifndef PL_TURN_H
#define PL_TURN_H

#include "session/sessions_impl.h"

#define PL_TURN_POLL_MS 50 /* between looks at another router's lease */

typedef enum pl_turn_state {
    PL_TURN_IDLE, /* the proxy's move */
    PL_TURN_LOOKUP,
    PL_TURN_GATE,
    PL_TURN_LEASE,
    PL_TURN_POLL,
    PL_TURN_OPENING,
    PL_TURN_BINDING,
    PL_TURN_SENT,
    PL_TURN_ENDING
} pl_turn_state;

struct pl_turn_inner {
    pl_gate_waiter gate; /* first */
    pl_sessions_loop *l; /* NULL: the loop has ended, only a grant is on its way */
    pl_sessions *s;
    pl_turn *t; /* NULL: detached */
    pl_turn_inner *next, **link;
    pl_turn_state state;
    bool inside, told; /* begin or open runs; it has its answer, told_rc */
    int told_rc;
    pl_store_call call;
    bool calling;
    pl_store_call renewal; /* of the lease, while the turn runs */
    bool renewing;
    pl_timer renew_timer;
    pl_timer timer;      /* of GATE and POLL */
    uint64_t wait_by_ms; /* 0: it has not waited */
    uint64_t lease_by_ms;
    uint64_t owner;
    bool gated, leased, fallback;
    bool closes;   /* the wish ends the session */
    bool spoiled;  /* another turn has run while the lease was lost for a while */
    bool poisoned; /* the engine takes no turn of what it is bound to */
    bool taken;    /* POLL in `end`: not for the lease, to give it back */
    bool bound;
    pl_binding binding;
    pl_session_note note; /* of an engine-backed binding */
    uint64_t parent_hash;
    uint64_t begun_ms;
    /* open */
    bool in_open;   /* waits and answers are pl_turn_open's */
    bool race_lost; /* the lease that is waited for is the winner's session's */
    bool opened;    /* by this turn */
    int tries;
    pl_opening *opening;
    pl_worker_state *w; /* its engine is referenced */
    uint32_t ttl_ms;    /* of open and sent */
    bool streaming;
    pl_session_note new_note;
    /* end */
    bool sent, ended;
    pl_turn_end_kind how;
    pl_session_name name; /* points to bytes */
    char bytes[];
};

/* turns.c */
void pl_turn_call(pl_turn_inner *in, pl_turn_state s, pl_store_op op); /* starts in->call */
/* Answers begin or open: the last thing a function does. An error of begin ends the turn. */
void pl_turn_tell(pl_turn_inner *in, int rc);
/* The gate, as a wait of begin or open: 0, or PENDING (state GATE), or an error. */
int pl_turn_enter(pl_turn_inner *in);
void pl_turn_take_lease(pl_turn_inner *in);
void pl_turn_leased(pl_turn_inner *in); /* starts the renewal */
void pl_turn_renew_stop(pl_turn_inner *in);
void pl_turn_show(pl_turn_inner *in); /* fills the pl_turn's part */
void pl_turn_over(pl_turn_inner *in); /* leaves the gate, frees in */
/* Nobody waits for the turn any more and nothing is under way: gives back what it holds. */
void pl_turn_unwind(pl_turn_inner *in);
void pl_turn_poll(pl_turn_inner *in, uint64_t after_ms);

/* turn_open.c */
void pl_turn_open_gated(pl_turn_inner *in);
void pl_turn_on_put(pl_turn_inner *in, int rc); /* BINDING */

/* turn_end.c */
void pl_turn_on_sent(pl_turn_inner *in, int rc);  /* SENT */
void pl_turn_on_ended(pl_turn_inner *in, int rc); /* ENDING */
void pl_turn_finish(pl_turn_inner *in);           /* detached, with how set */
void pl_turn_release(pl_turn_inner *in);

#endif
