/* From a batch of events to the index: which worker it is about, which space its blocks are in,
 * what their local hashes are. What cannot be indexed is counted by reason; nothing is dropped in
 * silence. All of it belongs to the indexer's thread, the index's only writer. */
#ifndef PL_APPLY_H
#define PL_APPLY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/str.h"
#include "kv/index.h"

#define PL_APPLY_NAME_MAX   512   /* bytes of an adapter's name, of a salt, of a model's name */
#define PL_APPLY_SPACES_MAX 65536 /* spaces that are kept open; more are refused */

/* What is asked of an index beyond index.h. A member may be NULL: then what needs it is counted as
 * unresolved (also), a chain goes on in the space that its event names (space_of), and a snapshot
 * cannot be used (keep). */
typedef struct pl_known {
    void *ctx;
    /* The space in which the worker's block of that name lies, 0: it has none; and the seed that
     * `begins` was told of its prefix, else 0. vLLM names the salt with a prompt's first block
     * only, so the blocks behind it are hashed as their parent is. */
    pl_index_space (*space_of)(void *ctx, int slot, uint64_t engine, uint64_t *seed);
    /* A prompt begins with that block, whose hash has that seed. */
    void (*begins)(void *ctx, int slot, uint64_t engine, uint64_t seed);
    /* The worker has stored these blocks in `tier`: those it already has under that name, in
     * whatever tier, are there too from now on. Returns how many that were. */
    size_t (*also)(void *ctx, int slot, pl_tier tier, const uint64_t *engine, size_t n);
    /* The worker has at most these blocks, in any order: drops all others from all tiers. Returns
     * how many entries that were. */
    size_t (*keep)(void *ctx, int slot, const uint64_t *engine, size_t n);
} pl_known;

/* name, what it counts */
#define PL_APPLY_COUNT_MAP(XX)                                                                     \
    XX(batches, "batches applied")                                                                 \
    XX(events, "events in them")                                                                   \
    XX(stores, "BlockStored events")                                                               \
    XX(stored, "blocks put into the index")                                                        \
    XX(copied, "blocks put into a further tier by events without tokens")                          \
    XX(removals, "BlockRemoved events")                                                            \
    XX(removed, "entries taken out of the index")                                                  \
    XX(removed_unknown, "blocks removed that were not in the index")                               \
    XX(clears, "AllBlocksCleared events")                                                          \
    XX(bad_events, "events that have not the shape of their type")                                 \
    XX(bad_block_size, "stores with a block size that is absurd or not the worker's")              \
    XX(bad_counts, "stores whose tokens do not fill their blocks")                                 \
    XX(bad_names, "stores with an adapter or a salt whose name is too long")                       \
    XX(partial, "stores of a block that is not full: never matched, not indexed")                  \
    XX(sparse, "events of layer groups that do not hold whole prefixes")                           \
    XX(unknown_parents, "stores behind a block that is not in the index")                          \
    XX(unresolved, "blocks without tokens that are not in the index")                              \
    XX(unknown_ranks, "events of a rank that the engine does not have")                            \
    XX(unknown_media, "events of a medium that is not known")                                      \
    XX(unknown_types, "events of a type that is not known")                                        \
    XX(unnamed_lora, "stores for a numbered adapter without a name")                               \
    XX(refused, "blocks that the index had no room for")

typedef struct pl_apply_counts {
#define XX(name, text) uint64_t name;
    PL_APPLY_COUNT_MAP(XX)
#undef XX
} pl_apply_counts;

/* One rank of an engine. */
typedef struct pl_apply_rank {
    int slot;
    int32_t group; /* the layer group that speaks for the worker; -1: none has spoken */
    /* since it was cleared: events that could have brought blocks, or are not understood; those
     * that did */
    uint64_t tried, landed;
    bool plain, eagle; /* what its last store with tokens was; neither: none came */
    pl_apply_counts counts;
} pl_apply_rank;

/* An engine. The caller owns it and all it points to. */
typedef struct pl_apply_target {
    pl_str model;
    uint32_t block_tokens; /* 0: not known, the first store says it */
    pl_apply_rank *ranks;  /* by rank */
    int ranks_n;
    uint32_t learned_tokens; /* what it said; by the first store after a clear it may change */
    bool guessed;  /* one block alone has said it, which may have been a short last page */
    uint64_t *fed; /* a bit for each rank that something was stored for; only set. NULL: none */
} pl_apply_target;

/* Tokens in its blocks; 0: not known yet. */
static inline uint32_t pl_apply_block_tokens(const pl_apply_target *t)
{
    return t->block_tokens ? t->block_tokens : t->learned_tokens;
}

typedef struct pl_apply pl_apply;

/* known is copied; NULL: none. PL_ENOMEM. */
int pl_apply_new(pl_index *ix, const pl_known *known, pl_apply **out)
    __attribute__((warn_unused_result));
void pl_apply_free(pl_apply *a); /* NULL is fine */

/* What a batch was, beside its counts. */
typedef struct pl_applied {
    double ts;    /* its time by the engine's clock, seconds since 1970; 0: not said */
    bool emptied; /* the rank that it came from said that it had nothing any more */
} pl_applied;

/* Applies a payload that came in the stream of `rank` (an index of t->ranks); events of another
 * rank go where the batch says. 0; PL_ESYNTAX or PL_EPROTOCOL: not a batch, nothing was done. */
int pl_apply_batch(pl_apply *a, pl_apply_target *t, int rank, const void *payload, size_t n,
                   pl_applied *what) __attribute__((warn_unused_result));

/* The rank has nothing any more. */
void pl_apply_clear(pl_apply *a, pl_apply_rank *r);

/* Drops what is not among the n names. PL_EUNAVAILABLE: the index cannot. */
int pl_apply_keep(pl_apply *a, pl_apply_rank *r, const uint64_t *engine, size_t n, size_t *dropped)
    __attribute__((warn_unused_result));

#endif
