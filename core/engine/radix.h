/* The prefix cache of a simulated engine: a radix tree over token ids whose nodes hold runs of
 * whole pages, as serving engines keep it. It counts tokens and owns no KV memory: the pool's
 * bookkeeping is its caller's (sim.c). Not thread-safe.
 *
 * A node on the path of a running request is locked (reference-counted, its ancestors too) and
 * stays. Of the others, leaves are evicted whole: those that are not retained first, then in the
 * order of the policy. Recency is the order of calls, not time, so that equal calls give equal
 * trees. */
#ifndef PL_RADIX_H
#define PL_RADIX_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/blocks.h"

typedef struct pl_radix pl_radix;
typedef struct pl_radix_node pl_radix_node;

/* What goes first; the least recently used of those that are equal. */
typedef enum pl_radix_policy {
    PL_RADIX_LRU,
    PL_RADIX_LFU,     /* used by the fewest requests */
    PL_RADIX_SLRU,    /* used by one request only, before those that were found again */
    PL_RADIX_PRIORITY /* of the lowest priority */
} pl_radix_policy;

/* NULL when out of memory or page_tokens < 1. */
pl_radix *pl_radix_new(int page_tokens, pl_radix_policy policy);
void pl_radix_free(pl_radix *r);

/* From now on its blocks have names, and what changes is told. Once, before anything was inserted.
 * PL_EINVALID, PL_ENOMEM. */
int pl_radix_watch(pl_radix *r, const pl_sim_kv_events *ev, void *user, pl_sim_kv_names names);
/* All that it holds, as runs in no order; only when it is watched. */
void pl_radix_each(const pl_radix *r, void (*each)(void *user, const pl_sim_kv_run *run),
                   void *user);

/* The longest cached prefix of tokens[0..n) in whole pages; refreshes it. *node is its last node
 * (the root for 0) and is valid until the next eviction unless locked. Splits a node when the match
 * ends inside it. */
int pl_radix_match(pl_radix *r, const uint32_t *tokens, int n, pl_radix_node **node);

/* The same length without refreshing or changing anything. */
int pl_radix_peek(const pl_radix *r, const uint32_t *tokens, int n);

/* Puts tokens[0..n) under `from`, a locked node (or the root) that holds tokens[0..depth); both are
 * whole pages. *end is the last node, *added how many tokens were not there yet. PL_ENOMEM adds
 * nothing. */
int pl_radix_insert(pl_radix *r, pl_radix_node *from, int depth, const uint32_t *tokens, int n,
                    pl_radix_node **end, int *added);

void pl_radix_lock(pl_radix *r, pl_radix_node *node);
void pl_radix_unlock(pl_radix *r, pl_radix_node *node);
pl_radix_node *pl_radix_root(pl_radix *r);

/* What a locked node and all above it are worth: they count `uses` more requests, are at least of
 * this priority, and are retained at least until then (INT64_MIN: no longer than they are). */
void pl_radix_mark(pl_radix *r, pl_radix_node *node, int uses, int priority, int64_t retain_us);
/* What was retained until now_us or earlier is as any other from here on. */
void pl_radix_decay(pl_radix *r, int64_t now_us);

/* Evicts leaves until at least `want` tokens are gone or nothing may go; returns how many went. */
int64_t pl_radix_evict(pl_radix *r, int64_t want);
/* Evicts all that may go. When that is everything, it is told as one word. */
int64_t pl_radix_flush(pl_radix *r);

int64_t pl_radix_tokens(const pl_radix *r);    /* in all nodes */
int64_t pl_radix_evictable(const pl_radix *r); /* of them, in nodes that are not locked */
int64_t pl_radix_retained(const pl_radix *r);  /* in nodes that are retained */
int pl_radix_nodes(const pl_radix *r);         /* without the root */

/* True when every invariant holds: counts, reference counts, tree shape, eviction order. */
bool pl_radix_sound(const pl_radix *r);

#endif
