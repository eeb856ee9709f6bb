/* The KV index as the feed's pl_known: see known.h. Called by apply.c on the indexer's thread, the
 * index's only writer; owns nothing. */
#include "kv/known.h"

static pl_index_space space_of(void *ctx, int slot, uint64_t engine, uint64_t *seed)
{
    return pl_index_space_of(ctx, slot, engine, seed);
}

static void begins(void *ctx, int slot, uint64_t engine, uint64_t seed)
{
    pl_index_seed(ctx, slot, engine, seed);
}

static size_t also(void *ctx, int slot, pl_tier tier, const uint64_t *engine, size_t n)
{
    return pl_index_also(ctx, slot, tier, engine, n);
}

static size_t keep(void *ctx, int slot, const uint64_t *engine, size_t n)
{
    return pl_index_keep(ctx, slot, engine, n);
}

pl_known pl_known_of(pl_index *ix)
{
    return (pl_known){
        .ctx = ix, .space_of = space_of, .begins = begins, .also = also, .keep = keep};
}
