/* Names of the blocks of a simulated engine: see blocks.h. Called by the prefix cache (radix.c)
 * when it tells what it has, on the thread that drives the engine; the digest context is the
 * namer's. */
#include "engine/blocks.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "kv/page_hash.h"

_Static_assert(sizeof(pl_sim_kv_name) == PL_PAGE_DIGEST, "a name is a whole digest");

bool pl_namer_init(pl_namer *n, pl_sim_kv_names how)
{
    *n = (pl_namer){.how = how};
    if (how == PL_SIM_KV_SHA256)
        n->sha = pl_page_hasher_new();
    return how != PL_SIM_KV_SHA256 || n->sha;
}

void pl_namer_free(pl_namer *n)
{
    pl_page_hasher_free(n->sha);
}

static void quick(const pl_sim_kv_name *parent, const uint32_t *tokens, size_t n,
                  pl_sim_kv_name *out)
{
    XXH64_hash_t seed = 0;
    if (parent)
        memcpy(&seed, parent->b, sizeof seed);
    XXH128_canonical_t v;
    XXH128_canonicalFromHash(&v, XXH3_128bits_withSeed(tokens, n * sizeof *tokens, seed));
    memcpy(out->b, v.digest, 16);
    memcpy(out->b + 16, v.digest, 16);
}

bool pl_namer_name(pl_namer *n, const pl_sim_kv_name *parent, const uint32_t *tokens, int blocks,
                   int block_tokens, pl_sim_kv_name *out)
{
    size_t size = (size_t)block_tokens;
    pl_page_space space = {.page_tokens = (uint32_t)block_tokens};
    for (int i = 0; i < blocks; i++) {
        int64_t wire;
        const uint32_t *block = tokens + (size_t)i * size;
        if (n->how == PL_SIM_KV_QUICK)
            quick(parent, block, size, &out[i]);
        else if (pl_page_hash(n->sha, &space, parent ? parent->b : NULL, block, size, &wire, 1,
                              out[i].b) != 1)
            return false;
        parent = &out[i];
    }
    return true;
}
