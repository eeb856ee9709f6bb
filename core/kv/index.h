/* The KV index: which workers hold which prefix of a prompt, per tier. One writer thread (the
 * indexer) applies what engines publish; any number of readers ask without waiting for it.
 *
 * A block is named two ways. Its local hash (block_hash.h) is what a prompt's tokens give; its
 * engine hash is what the engine's events name it by, opaque to us and per worker: the index keeps,
 * for each worker, a map engine hash -> block, with reference counts for copies stored twice.
 *
 * A space is one namespace: model, LoRA adapter, block size. Prefixes of different spaces never
 * meet. A worker's KV is in as many spaces as it publishes for. A cache salt is none: clients make
 * as many as they like, and it is in the local hashes already. */
#ifndef PL_INDEX_H
#define PL_INDEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/str.h"

typedef struct pl_index pl_index;
typedef uint32_t pl_index_space; /* 0 is none */

/* Where a copy lies; a nearer tier is worth more. */
typedef enum pl_tier { PL_TIER_DEVICE, PL_TIER_HOST, PL_TIER_DISK, PL_TIER_EXTERNAL } pl_tier;
enum { PL_TIERS = 4 };
enum { PL_INDEX_SPACE_NAME_MAX = 4096 }; /* bytes of a space's model and LoRA */

typedef struct pl_index_options {
    uint64_t max_bytes; /* the cap on all of it, 0: none; near it the least recently matched go */
} pl_index_options;

int pl_index_new(const pl_index_options *o, pl_index **out);
void pl_index_free(pl_index *ix); /* no reader and no writer is at work */

/* The space of that name, made when it is new. Writer's thread. 0: out of memory or too many. */
pl_index_space pl_index_space_open(pl_index *ix, pl_str model, uint32_t block_tokens, bool eagle,
                                   pl_str lora);
/* The same for readers: 0 when there is none. Any thread. */
pl_index_space pl_index_space_find(const pl_index *ix, pl_str model, uint32_t block_tokens,
                                   bool eagle, pl_str lora);

/* How many there are; they are never forgotten. Who has read a number finds as many. Any thread. */
uint64_t pl_index_spaces(const pl_index *ix);
/* Each of them, in no order. Any thread. */
void pl_index_each_space(const pl_index *ix,
                         void (*each)(void *ctx, pl_index_space space, uint32_t block_tokens,
                                      pl_str lora),
                         void *ctx);

/* --- the writer's thread --- */

/* Worker `slot` has stored n blocks in a tier: local[i] under engine[i], one after the other,
 * behind the block that it calls *parent (NULL: from the start). PL_ENOTFOUND: that parent is
 * unknown (nothing changed); PL_ELIMIT: the cap is reached and nothing could be evicted (nothing
 * stored); PL_ENOMEM (perhaps the first blocks stored); PL_EINVALID: no such slot, tier or space.
 *
 * A name that is stored again for the same block is one more copy and takes one more removal; for
 * another block it leaves the first. Two names of a worker for one block keep it until both are
 * removed. What lies behind a hole stays known and counts again once the hole is filled. An evicted
 * block is as unknown to later events as one that was never stored. */
int pl_index_store(pl_index *ix, pl_index_space space, int slot, pl_tier tier,
                   const uint64_t *parent, const uint64_t *engine, const uint64_t *local, size_t n);
/* It has dropped them from that tier. Returns how many were known. */
size_t pl_index_remove(pl_index *ix, int slot, pl_tier tier, const uint64_t *engine, size_t n);
/* The worker's block of that name is the first of its prefix, and local hashes are made with that
 * seed there (pl_block_space.seed). It is kept with what is stored behind the block from now on;
 * what it is not told of has 0. */
void pl_index_seed(pl_index *ix, int slot, uint64_t engine, uint64_t seed);
/* Was it told of that seed? Of the last few thousand seeds: one that was pushed out by others is
 * not known again until it is told of the next time. Any thread. */
bool pl_index_seed_known(const pl_index *ix, uint64_t seed);
/* The space in which the block lies that the worker has under that name, and *seed; 0: it has
 * none. */
pl_index_space pl_index_space_of(const pl_index *ix, int slot, uint64_t engine, uint64_t *seed);
/* It has stored these blocks, which it has under that name in whatever tier, in `tier` too: what
 * store would do with their hashes, so a name that is in `tier` already gets one more copy. Names
 * that it has in no tier are left out. Returns how many were not (fewer when the cap is reached or
 * out of memory: the first ones). */
size_t pl_index_also(pl_index *ix, int slot, pl_tier tier, const uint64_t *engine, size_t n);
/* It has at most the blocks of these names, in any order: drops all others from all tiers. A name
 * that stays is in the tiers where it was, with one copy in each: lists name what is there once,
 * and a removal that was missed must not leave a copy for good. Returns how many entries that were.
 * Readers see the drop run by run, never less than what stays. */
size_t pl_index_keep(pl_index *ix, int slot, const uint64_t *engine, size_t n);
/* It has nothing any more (tier -1: in no tier). Bounded time for the caller; what is left to free
 * is freed by later calls of the writer. */
void pl_index_clear(pl_index *ix, int slot, int tier);
/* A slice (well below a millisecond) of the work that clear and eviction left. True when there is
 * more. Call it when there is nothing else to do; stores and removals do a little of it, too. */
bool pl_index_maintain(pl_index *ix);

/* --- readers: any thread, registered once --- */

typedef struct pl_index_reader pl_index_reader;
/* For one thread at a time. NULL: out of memory, or more than 1024 at once. */
pl_index_reader *pl_index_reader_new(pl_index *ix);
void pl_index_reader_free(pl_index_reader *r);

/* How much of the prompt a worker holds: blocks[t] counts the blocks from the start that lie in
 * tier t or nearer, without a hole; so blocks[PL_TIER_DEVICE] <= blocks[PL_TIER_HOST] <= ... */
typedef struct pl_match {
    int slot;
    uint32_t blocks[PL_TIERS];
} pl_match;

/* Matches local[0 .. n) in a space. Fills out[] (room for cap) with the workers that hold at least
 * the first block, in no order, and returns their number. Never waits for the writer; sees for each
 * block a state that was true during the call. */
int pl_index_match(pl_index_reader *r, pl_index_space space, const uint64_t *local, size_t n,
                   pl_match *out, int cap);

/* --- figures; any thread --- */
typedef struct pl_index_stats {
    uint64_t spaces, blocks, entries; /* blocks that are kept; (block, worker, tier) */
    uint64_t bytes;                   /* of the heap, with what waits to be freed */
    uint64_t stored, removed, duplicates, unknown_parents, unknown_removals, evicted;
} pl_index_stats;
void pl_index_stats_of(const pl_index *ix, pl_index_stats *out);
/* Entries of one worker. */
uint64_t pl_index_entries(const pl_index *ix, int slot);

#endif
