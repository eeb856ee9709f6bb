/* Hashes of token blocks, bit for bit as Dynamo's KV router has them, so that its clients and its
 * recorded streams can be used: XXH3-64 over the blocks' token ids (the local hash, which does not
 * know where the block stands) and a chain over local hashes (the sequence hash, which names a
 * whole prefix). A tail that does not fill a block has no hash.
 *
 * Called by apply.c for what engines publish and by keys.c for prompts. Functions are pure:
 * nothing is allocated, locked or kept, any thread may call them on data of its own. */
#ifndef PL_BLOCK_HASH_H
#define PL_BLOCK_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/str.h"

#define PL_BLOCK_SEED       1337  /* of local hashes before LoRA and salt, and of every chain */
#define PL_BLOCK_TOKENS_MAX 65536 /* tokens in a block */

/* What sets one namespace of hashes apart. Fill it with pl_block_space_init, read it from any
 * thread, nothing to free. */
typedef struct pl_block_space {
    uint64_t seed;
    uint32_t block_tokens;
    uint32_t window_tokens; /* hashed per block: one more than block_tokens with Eagle */
    uint8_t secret[192];    /* of seed, for windows above 240 bytes */
} pl_block_space;

/* lora and salt may be empty: as if there were none. */
uint64_t pl_block_seed(pl_str lora, pl_str salt);

/* eagle: each block also hashes the token after it. PL_EINVALID without block_tokens, PL_ELIMIT
 * above PL_BLOCK_TOKENS_MAX. */
int pl_block_space_seeded(pl_block_space *s, uint32_t block_tokens, bool eagle, uint64_t seed)
    __attribute__((warn_unused_result));
/* The same with their seed. */
int pl_block_space_init(pl_block_space *s, uint32_t block_tokens, bool eagle, pl_str lora,
                        pl_str salt) __attribute__((warn_unused_result));

/* How many blocks n tokens fill. */
size_t pl_block_count(const pl_block_space *s, size_t n);

/* Hashes the blocks that tokens[0 .. n) fill into local[] and seq[], each of which has room for cap
 * and may be NULL. Returns their number, or PL_ELIMIT when that is above cap (nothing is written).
 * seq[] begins at the root; pl_block_chain continues from elsewhere. */
int64_t pl_block_hash(const pl_block_space *s, const uint32_t *tokens, size_t n, uint64_t *local,
                      uint64_t *seq, size_t cap) __attribute__((warn_unused_result));

/* Hashes `count` blocks, all of whose windows are there, into local[], and key[i] is the link
 * (chunk_hash.h) of local[i] in the chain of cumulative keys that begins with `chain`. */
void pl_block_hash_linked(const pl_block_space *s, const uint32_t *tokens, size_t count,
                          uint64_t *local, uint64_t chain, uint64_t *key);

/* An image or the like: it has tokens in this block. One that reaches over several blocks is listed
 * in each of them. */
typedef struct pl_block_mm {
    uint64_t block; /* from 0 */
    uint64_t hash;  /* pl_mm_hash */
} pl_block_mm;

/* Puts mm[] into the order that pl_block_hash_mm wants: by block, then by hash. In place. */
void pl_block_mm_sort(pl_block_mm *mm, size_t n);

/* As pl_block_hash, with the objects of each block mixed in; equal entries count as often as they
 * are there, entries behind the last full block are ignored. PL_EINVALID when mm[] is out of order
 * (nothing is written). */
int64_t pl_block_hash_mm(const pl_block_space *s, const uint32_t *tokens, size_t n,
                         const pl_block_mm *mm, size_t mm_n, uint64_t *local, uint64_t *seq,
                         size_t cap) __attribute__((warn_unused_result));

/* Sequence hashes of n blocks after the one whose sequence hash is *parent (NULL: from the root).
 * seq may be local itself. */
void pl_block_chain(const uint64_t *parent, const uint64_t *local, size_t n, uint64_t *seq);

/* The hash of a multimodal object by its identifier: the first 16 digits of a 64-digit hexadecimal
 * id, else XXH3 of its bytes. PL_EINVALID when it is empty. */
int pl_mm_hash(pl_str id, uint64_t *hash) __attribute__((warn_unused_result));

/* The token id that SGLang puts in the places of that object. */
uint32_t pl_mm_pad_token(uint64_t mm_hash);

#endif
