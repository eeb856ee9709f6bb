/* A request's session, inside: what session.c (wish, binding, opening) and session_turn.c (what
 * goes to the engine, the answer, the end) share. Nobody else includes it. */
#ifndef PL_SESSION_INNER_H
#define PL_SESSION_INNER_H

#include "http/request.h"

typedef enum pl_rq_phase {
    PHASE_READ,      /* the wish is known */
    PHASE_BEGINNING, /* pl_turn_begin will answer */
    PHASE_HELD,      /* the turn is ours until pl_turn_end */
    PHASE_OPENING,   /* as HELD, and pl_turn_open will answer */
    PHASE_OVER
} pl_rq_phase;

struct pl_rq_session {
    pl_turn turn;
    pl_request *rq;
    pl_wish wish; /* its strings are in `names` */
    pl_wish_open native;
    pl_rq_phase phase;
    uint64_t hash;      /* of (tenant, id) */
    double ttl_seconds; /* 0: no affinity for this turn */
    int kind;           /* PL_ROUTER_ONLY, PL_ENGINE_BACKED: what it is, or is to be */
    bool open;          /* still to be opened on the worker that is chosen */
    bool opened;        /* by this request */
    int opens;          /* tried */
    bool inside;        /* the try under way goes into the engine's session */
    bool answered_ok;   /* its answer's head was a 2xx */
    bool ended;         /* its answer came to its end */
    bool refused;       /* an engine did not know it (any more): it is opened anew once */
    bool broken;        /* an earlier try went into it and was not ended: nobody knows its state */
    uint8_t not_opened; /* of ask.tried, by bits: the engines that only failed to open it */
    pl_history_plan plan; /* with inside */
    pl_reply *reply;      /* with inside; NULL when out of memory */
    char *sent;           /* the bytes of the try, which outlive the exchange */
    pl_timer discard_timer;
    const char *label; /* x-perilune-session; static */
    char names[];
};

/* 409: the request carries only what is new in a session, which `what` says more of. */
void pl_session_answer_lost(pl_request *rq, const char *what);

/* The APIs whose requests an engine can put into a session of its own. */
static inline bool pl_session_api(enum pl_api_kind api)
{
    return api == PL_API_CHAT || api == PL_API_COMPLETIONS || api == PL_API_GENERATE;
}

#endif
