/* The open sessions of a simulated engine, by id: what each has said so far and what it holds of
 * the pool. A table and a heap of deadlines; what a turn does to its slot is sim_session.c's. Not
 * thread-safe. */
#ifndef PL_SLOTS_H
#define PL_SLOTS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/str.h"
#include "engine/heap.h"

struct pl_sim_req;
struct pl_radix_node;

enum { PL_SLOTS_MAX = 1000000, PL_SLOT_ID_BYTES = 1024 };

typedef struct pl_slot {
    pl_heap_item due; /* major: when it has been idle for too long; outside while it cannot be */
    struct pl_slot *next, *prev; /* in order of opening */
    struct pl_slot *chain;       /* in the hash bucket */
    uint64_t hash;
    char *id; /* owned, id_n bytes */
    size_t id_n;
    bool streaming;
    bool closing;       /* closed or timed out while its turn was under way: over when that ends */
    int64_t timeout_us; /* -1: none */
    int64_t active_us;  /* when it was opened or its last turn began */
    int64_t capacity;   /* capacity_of_str_len: told, not enforced */
    int turns;          /* that ended well */
    uint64_t rid_hash;  /* of the last of them; 0: it had no name */

    /* The conversation: tokens[0..n) of turns that ended well. A turn under way writes behind. */
    uint32_t *tokens;
    int n, cap;
    /* What is computed of it: kv tokens, of which the tree has the first `depth` (locked through
     * `node`) and the slot its `own`, in whole pages. All 0 when nothing is held. While its turn
     * runs, the pages are the turn's, and this is what the slot falls back to. */
    int kv, depth, own;
    struct pl_radix_node *node;
    struct pl_sim_req *turn; /* under way; NULL: idle */
} pl_slot;

typedef struct pl_slots {
    pl_slot **bucket;
    size_t mask;
    int n, streaming_n;
    pl_slot *head, *tail;
    pl_heap due;
    uint64_t next_seq;
} pl_slots;

/* Zero-initialise. Slots go with their token ids; what they hold of the tree is not unlocked. */
void pl_slots_free(pl_slots *t);

pl_slot *pl_slots_find(const pl_slots *t, pl_str id);
/* PL_EEXISTS, PL_ELIMIT (too many, or the id is too long), PL_ENOMEM. The id is copied. */
int pl_slots_add(pl_slots *t, pl_str id, int64_t timeout_us, int64_t now_us, pl_slot **out);
void pl_slots_remove(pl_slots *t, pl_slot *slot); /* frees it */

/* It is active now: its deadline moves. */
void pl_slots_active(pl_slots *t, pl_slot *slot, int64_t now_us);
/* It has no deadline any more. */
void pl_slots_undue(pl_slots *t, pl_slot *slot);
/* The first whose deadline is at now_us or before; NULL: none. */
pl_slot *pl_slots_due(const pl_slots *t, int64_t now_us);
int64_t pl_slots_next_us(const pl_slots *t); /* the next deadline; INT64_MAX: none */

/* Room for n token ids in all; false: out of memory. */
bool pl_slot_reserve(pl_slot *slot, int64_t n);

#endif
