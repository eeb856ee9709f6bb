/* What a simulated engine tells of its prefix cache: which blocks (pages) it gained and lost, under
 * which names. Callbacks, on the thread that drives the engine: `perilune engine` puts them on the
 * wire (publish.h), a simulator in virtual time feeds an index with them directly.
 *
 * Told is what a real engine tells, in its order: a run of blocks when it enters the cache (so its
 * parent was told before, and is still there), a run when it is evicted (so nothing that was told
 * to be below it is left), and one word when the whole cache goes. What requests hold beside the
 * cache, and sessions in their slots, is not told. */
#ifndef PL_BLOCKS_H
#define PL_BLOCKS_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* A block's name: a digest over all tokens from the prompt's start to the block's end. */
typedef struct pl_sim_kv_name {
    uint8_t b[32];
} pl_sim_kv_name;

/* How blocks are named. */
typedef enum pl_sim_kv_names {
    PL_SIM_KV_SHA256, /* as SGLang does: kv/page_hash.h makes the same */
    PL_SIM_KV_QUICK   /* any names do: a chain of XXH3, about ten times as fast */
} pl_sim_kv_names;

/* The number that SGLang sends for a name: its first 8 bytes, the first one highest. */
static inline int64_t pl_sim_kv_sglang(const pl_sim_kv_name *name)
{
    uint64_t v;
    memcpy(&v, name->b, sizeof v);
    return (int64_t)__builtin_bswap64(v);
}

/* And vLLM: its last 8 bytes. */
static inline uint64_t pl_sim_kv_vllm(const pl_sim_kv_name *name)
{
    uint64_t v;
    memcpy(&v, name->b + sizeof name->b - sizeof v, sizeof v);
    return __builtin_bswap64(v);
}

/* n blocks, each following the one before it. All borrowed, for the call. */
typedef struct pl_sim_kv_run {
    const pl_sim_kv_name *parent; /* of the first; NULL: it begins a prompt */
    const pl_sim_kv_name *names;
    int n;
    int block_tokens;
    const uint32_t *tokens; /* n * block_tokens */
} pl_sim_kv_run;

/* They must not call the engine. Any may be NULL. */
typedef struct pl_sim_kv_events {
    void (*on_stored)(void *user, const pl_sim_kv_run *run);
    void (*on_removed)(void *user, const pl_sim_kv_run *run);
    void (*on_cleared)(void *user); /* the cache is empty now; what was in it is not told */
} pl_sim_kv_events;

/* --- for radix.c --- */

struct pl_page_hasher;
typedef struct pl_namer {
    pl_sim_kv_names how;
    struct pl_page_hasher *sha; /* owned; NULL when it is not needed */
} pl_namer;

bool pl_namer_init(pl_namer *n, pl_sim_kv_names how); /* false: out of memory */
void pl_namer_free(pl_namer *n);
/* Names `blocks` blocks of block_tokens tokens after `parent` (NULL: from the start). False: out of
 * memory. */
bool pl_namer_name(pl_namer *n, const pl_sim_kv_name *parent, const uint32_t *tokens, int blocks,
                   int block_tokens, pl_sim_kv_name *out);

#endif
