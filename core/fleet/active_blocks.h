/* assume_kv_reuse: the blocks of the requests under way on each worker, each counted once however
 * many of them share it. The set owns that count: it adds a block to the worker's decode_blocks
 * when the first request that has it begins and takes it back when the last one ends, whichever
 * that is. What a request has beyond (its last, partial block, what it generates, what is over the
 * cap) its ticket counts; so at any time, between two calls,
 *
 *     decode_blocks of a worker = distinct blocks in the set + private blocks of the tickets.
 *
 * Called by the ledger (pl_ticket_begin, pl_ticket_end) on all loops. There is nothing to do when a
 * worker goes: its blocks go with its last ticket. */
#ifndef PL_ACTIVE_BLOCKS_H
#define PL_ACTIVE_BLOCKS_H

#include <stddef.h>
#include <stdint.h>

struct pl_worker_state;

/* A request's blocks beyond these are private to it. */
#define PL_ACTIVE_MAX_REQUEST_BLOCKS 8192
/* So many blocks, give or take a request of each loop, does the set hold of all workers together;
 * while it is full, blocks that are not in it are private to the requests that begin. 8 to 16 bytes
 * each. */
#define PL_ACTIVE_MAX_BLOCKS ((size_t)8 << 20)

typedef struct pl_active pl_active;

/* NULL when out of memory. */
pl_active *pl_active_new(size_t max_blocks);
/* Every hold has ended. NULL is fine. */
void pl_active_free(pl_active *a);

/* A request's blocks: cumulative hashes from the start of the prompt, so that equal ones mean equal
 * prefixes. Whatever else keeps engines from sharing (model, LoRA, salt) is in them. */
typedef struct pl_active_keys {
    const uint64_t *hashes; /* borrowed for the call */
    int32_t n;
    int32_t tokens; /* that each stands for */
} pl_active_keys;

/* What a request holds of the set. Zero: nothing. */
typedef struct pl_active_hold {
    pl_active *active;
    struct pl_worker_state *worker;
    struct pl_active_node *last; /* its path's end */
} pl_active_hold;

/* Counts the request's blocks on w. Returns how many of w's blocks (of w's block size) the set
 * counts for it, new or not; *shared (may be NULL) is how many of them were there. 0 when out of
 * memory, full, or when neither of the two block sizes is a multiple of the other. The worker lives
 * until the end. */
int64_t pl_active_begin(pl_active *a, struct pl_worker_state *w, const pl_active_keys *keys,
                        pl_active_hold *hold, int64_t *shared);
void pl_active_end(pl_active_hold *hold); /* idempotent */

/* Hashes in the set now, all workers together, and the nodes that hold them. */
size_t pl_active_size(const pl_active *a);
size_t pl_active_nodes(const pl_active *a);

#endif
