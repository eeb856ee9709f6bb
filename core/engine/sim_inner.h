/* Inside of the simulated engine: what the scheduler (sim.c), its sessions (sim_session.c) and its
 * checks (sim_check.c) share. Nobody else includes it.
 *
 * The pool is accounted in tokens of whole pages: what the tree holds (radix.c), what running
 * requests (own) and idle sessions (held) hold beyond it, and the rest. */
#ifndef PL_SIM_INNER_H
#define PL_SIM_INNER_H

#include <stddef.h>

#include "engine/sim.h"
#include "engine/slots.h"

typedef enum pl_req_state { ARRIVING, WAITING, RUNNING, OVER } pl_req_state;

struct pl_sim_req {
    pl_heap_item place;      /* in the waiting queue: inverted priority, then order of arrival */
    pl_sim_req *next, *prev; /* in the list of arriving or of running requests */
    pl_req_state state;
    int priority;
    int64_t ready_us;  /* may wait from then on: api_us after its arrival */
    int64_t retain_us; /* 0: not */
    uint32_t *tokens;  /* the prompt, then what was produced; room for n until admitted, then for
                          all. Of a turn, the slot's array. */
    int n, output_tokens;
    int out;    /* produced */
    int kv;     /* tokens computed or taken from the cache */
    int target; /* kv at which prefill ends: n, or more after a preemption */
    int chunk;  /* tokens of the step under way, 0: not part of it */
    int cached; /* of the prompt, at its first admission */
    bool admitted, decoding;
    pl_radix_node *node; /* locked, ends at depth; the root when it holds no cache */
    int depth, own;
    uint64_t seed;
    pl_slot *slot;      /* a turn of that session, until it is over */
    bool borrowed;      /* tokens is a slot's */
    uint64_t name_hash; /* of a turn; 0: none */
    uint32_t tail;
    bool tailed;
    const pl_sim_events *ev;
    void *user;
};

typedef struct pl_req_list {
    pl_sim_req *head, *tail;
    int n;
} pl_req_list;

struct pl_sim {
    pl_sim_options o;
    pl_radix *tree;
    int64_t pool; /* tokens, whole pages */
    int64_t own;  /* sum over running requests */
    int64_t held; /* sum over slots whose turn does not run */
    pl_req_list arriving, running;
    pl_heap waiting;
    int64_t waiting_tokens;
    uint64_t next_seq;
    int64_t now_us, step_end_us; /* INT64_MAX: no step under way */
    bool blocked;        /* the first in the queue had no room, and nothing has changed since */
    pl_sim_req *cursor;  /* what a walk over `running` looks at next; removal moves it on */
    pl_sim_req *calling; /* a callback of this request is running: abort must not free it */
    pl_slots slots;
    pl_sim_stats count;
};

static inline int64_t pl_sim_whole_pages(const pl_sim *s, int64_t tokens)
{
    int64_t page = s->o.page_tokens;
    return (tokens + page - 1) / page * page;
}

static inline int64_t pl_sim_free_tokens(const pl_sim *s)
{
    return s->pool - pl_radix_tokens(s->tree) - s->own - s->held;
}

/* The uncached part of a waiting request's prompt, as far as it is known. */
static inline int pl_sim_pending(const pl_sim_req *r)
{
    return r->n - (r->slot ? r->slot->kv : 0);
}

static inline pl_sim_req *pl_sim_of_place(pl_heap_item *it)
{
    return it ? (pl_sim_req *)((char *)it - offsetof(pl_sim_req, place)) : NULL;
}

/* --- sim_session.c --- */
uint64_t pl_sim_name_hash(pl_str name); /* of a turn; 0 for the empty one */
/* Ends the sessions that were idle for too long at now_us. */
void pl_sim_reap(pl_sim *s, int64_t now_us);
/* A running turn ended well: what it holds becomes the slot's, what it said the session's. The
 * request holds nothing afterwards. */
void pl_sim_slot_keep(pl_sim *s, pl_sim_req *r);
/* Gives back what a slot holds; its turn, if there is one, does not run. */
void pl_sim_slot_drop(pl_sim *s, pl_slot *slot);
/* The request is no turn any more, however it ended; closes a session that waited for that. */
void pl_sim_slot_over(pl_sim *s, pl_sim_req *r);

#endif
