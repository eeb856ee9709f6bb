/* From a request to the keys that the KV index and approximate mode are asked with.
 *
 * Where the request gives token ids (nvext.token_data, input_ids, prompt, input) the keys are of
 * its token blocks: local[] for the index (index.h), key[] for approximate mode. Else they are of
 * the chunks of its text: the canonical stream of canon.h over tools, documents, system prompt or
 * instructions, and messages, or over the prompt; only key[], and a chunk is worth as many tokens
 * as the request has per byte. What is left of a block or a chunk at the end has no key.
 *
 * A request never fails for its shape: what is not understood gives fewer keys, or none. Of a batch
 * (several prompts in one request) the first one counts.
 *
 *     pl_keys_space_init(&space, model, ...);          once per model (and cache salt)
 *     pl_keys_of_request(&space, &scan, arena, &keys); once per request, keys live in its arena
 *     hits = pl_approx_match(approx, keys.key, keys.n, hit, PL_MAX_WORKERS);
 *     cached_tokens = pl_keys_tokens(&keys, hit[i].chunks, prompt_tokens);
 *     ... a worker is chosen ...
 *     routed_ns = now; pl_approx_insert(approx, keys.key, keys.n, slot);
 *     ... the answer's usage comes ...
 *     cached = pl_keys_held(&keys, predicted_chunks, usage.cached_tokens, usage.prompt_tokens);
 *     pl_approx_correct(approx, keys.key, keys.n, slot, cached, routed_ns);
 *
 * A key stands for a block, but where blocks have one token (SGLang's default) for 16 of them, by
 * position: what was routed is remembered by keys, and needs no finer grain. Two prompts have as
 * many keys in common as whole groups of equal blocks; a last group that is not full has none, so
 * up to 15 tokens less are known of what was routed, never more. The index is asked by local
 * hashes, of single tokens.
 *
 * Pure functions for any thread; a space is read only once it is filled. */
#ifndef PL_KEYS_H
#define PL_KEYS_H

#include "base/arena.h"
#include "http/scan.h"
#include "kv/block_hash.h"
#include "kv/canon.h"

#define PL_KEYS_MAX   65536u  /* keys of one request; what is behind them is not looked at */
#define PL_KEYS_GROUP 16u     /* blocks of one token that a key stands for */
#define PL_KEYS_ONES  262144u /* such blocks of one request */

typedef struct pl_keys_space {
    pl_block_space block; /* of token ids */
    uint64_t ids_seed, text_seed;
    uint32_t chunk_bytes;
} pl_keys_space;

/* block_tokens, eagle, lora, salt as of pl_block_space_init; chunk_bytes 0 is PL_KV_CANON_CHUNK.
 * PL_EINVALID, PL_ELIMIT when a size is out of bounds. */
int pl_keys_space_init(pl_keys_space *s, pl_str model, uint32_t block_tokens, bool eagle,
                       pl_str lora, pl_str salt, uint32_t chunk_bytes)
    __attribute__((warn_unused_result));

typedef enum pl_keys_kind { PL_KEYS_NONE, PL_KEYS_TOKENS, PL_KEYS_TEXT } pl_keys_kind;

typedef struct pl_keys {
    pl_keys_kind kind;
    size_t n;               /* keys, one for each unit */
    const uint64_t *key;    /* key[i] stands for units 0 .. i, the model, LoRA and salt */
    const uint64_t *local;  /* TOKENS: pl_block_hash, for the index; else NULL */
    size_t local_n;         /* as many as n, of blocks of one token more: PL_KEYS_GROUP a unit */
    const uint32_t *tokens; /* TOKENS: the ids */
    size_t tokens_n;
    uint64_t bytes; /* TEXT: of the canonical stream */
    uint32_t unit;  /* TOKENS: tokens that a key stands for; TEXT: bytes in a chunk */
    uint32_t batch; /* prompts in the request, of which the keys are the first one's */
} pl_keys;

/* Everything in *out lives in the arena or the body. PL_ENOMEM: *out has no keys. */
int pl_keys_of_request(const pl_keys_space *s, const pl_scan *scan, pl_arena *a, pl_keys *out)
    __attribute__((warn_unused_result));

/* The same for ids from elsewhere (the engine's /tokenize), which must live as long as *out. */
int pl_keys_of_tokens(const pl_keys_space *s, const uint32_t *tokens, size_t n, pl_arena *a,
                      pl_keys *out) __attribute__((warn_unused_result));

/* How many tokens the first `units` blocks or chunks are, of a prompt of prompt_tokens. */
double pl_keys_tokens(const pl_keys *k, size_t units, double prompt_tokens);

/* What an engine's cached_tokens say about a prediction of `predicted` units: n when they do not
 * speak against it, else how many units were cached. Engines count whole pages and never the whole
 * prompt, and bytes are no tokens, so there is a tolerance: a unit, and of text 1/8 more. */
size_t pl_keys_held(const pl_keys *k, size_t predicted, double cached_tokens, double prompt_tokens);

/* Parses a JSON array of token ids into out[0 .. cap): up to the first element that is none.
 * Returns their number. */
size_t pl_keys_parse_ids(pl_str array, uint32_t *out, size_t cap);

/* Puts what a request asks the model, as pl_keys_of_request sees it without token ids, into c. Of
 * messages only the first `messages` ones. */
void pl_keys_canonical(const pl_scan *scan, size_t messages, pl_kv_canon *c);

#endif
