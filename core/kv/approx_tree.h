/* One part of approximate mode (approx.c, its only caller): a tree of runs of keys, with the
 * workers that hold each run. Not thread-safe: approx.c locks.
 *
 * Times are ticks (milliseconds) since the start; holders keep the low 32 bits, so an age is right
 * for 49 days, and nothing older than the TTL is looked at. */
#ifndef PL_APPROX_TREE_H
#define PL_APPROX_TREE_H

#include "kv/approx.h"
#include "kv/approx_mem.h"

typedef struct pl_approx_holder {
    uint32_t time;  /* of the last insertion */
    uint32_t since; /* what was inserted below before this is not held any more */
    uint16_t slot;
} pl_approx_holder;

/* A run of one or more chunks: always held as a whole. Any node's parent was used at least as
 * recently, and is nearer to `newest`. */
typedef struct pl_approx_node {
    uint64_t first, last; /* keys of the run */
    uint64_t *keys;       /* all of them, not in the node; NULL when there are only one or two */
    struct pl_approx_node *parent, *chain, *newer, *older;
    uint32_t n, children;
    uint32_t time; /* of the last insertion by anyone */
    uint16_t holders_n, holders_cap;
    union {
        pl_approx_holder one;   /* holders_cap is 1 */
        pl_approx_holder *many; /* not in the node */
    } h;                        /* by slot */
} pl_approx_node;

typedef struct pl_approx_tree {
    pl_approx_mem *mem;      /* shared by the parts */
    pl_approx_node ***table; /* pieces of the table: first key -> node; it grows by one place a time
                              */
    uint32_t pieces, buckets, mask;
    pl_approx_node *newest, *oldest;
    uint64_t tick;                 /* the latest that was seen */
    uint32_t ttl;                  /* ticks */
    const _Atomic uint64_t *floor; /* by slot: entries with an earlier tick are void */
    uint64_t nodes, chunks, entries, bytes;
} pl_approx_tree;

void pl_approx_tree_init(pl_approx_tree *t, pl_approx_mem *mem, uint32_t ttl,
                         const _Atomic uint64_t *floor);
void pl_approx_tree_destroy(pl_approx_tree *t);

/* All of these see the time as t->tick. */
int pl_approx_tree_match(const pl_approx_tree *t, const uint64_t *keys, size_t n,
                         pl_approx_hit *out, int cap);
int pl_approx_tree_insert(pl_approx_tree *t, const uint64_t *keys, size_t n, uint16_t slot);
/* True when that took something back. */
bool pl_approx_tree_correct(pl_approx_tree *t, const uint64_t *keys, size_t n, uint16_t slot,
                            size_t cached, uint64_t routed_tick);
bool pl_approx_tree_forget(pl_approx_tree *t, const uint64_t *keys, size_t n, uint16_t slot,
                           size_t from);

/* Is the least recently used run older than the TTL? */
bool pl_approx_tree_stale(const pl_approx_tree *t);
/* Drops it; there is one. Constant time. */
void pl_approx_tree_evict(pl_approx_tree *t);

#endif
