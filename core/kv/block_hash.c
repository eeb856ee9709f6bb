/* Block hashes: see block_hash.h. Called by apply.c (events), the tests and bench_hash. Pure
 * functions for any thread; the caller owns every array.
 *
 * XXH3 comes from the distribution's xxhash.h, compiled into this file: a use of the header as its
 * BSD-2-Clause licence allows it, with no line of it in this repository (who passes on a binary
 * passes on its notice). A call into the shared library for each 64-byte block takes 1.6 times as
 * long: with the length a constant the choice by length is gone, and the seeded constants stay out
 * of the loop. So blocks of 16 and 32 tokens have loops of their own; other sizes share one.
 *
 * What bounds it: a local hash of 64 bytes is five multiplications among some 50 instructions, and
 * blocks are independent, so the core's throughput decides, and memory only once the prompt is out
 * of the caches. The chain is serial: each link waits for the one before (two multiplications,
 * shifts and xors, about 14 cycles a block whatever its size); the local hashes of the same loop
 * run mostly in its shadow. */
#include "kv/block_hash.h"

#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/err.h"
#include "kv/chunk_hash.h"

/* Token ids, and numbers in the chain, are hashed as they lie in memory. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "block hashes need a little-endian host");
_Static_assert(sizeof((pl_block_space *)0)->secret == XXH_SECRET_DEFAULT_SIZE,
               "pl_block_space.secret must hold XXH3's secret");

uint64_t pl_block_seed(pl_str lora, pl_str salt)
{
    uint64_t seed = PL_BLOCK_SEED;
    if (lora.n)
        seed += XXH3_64bits_withSeed(lora.p, lora.n, 0);
    if (salt.n)
        seed += XXH3_64bits_withSeed(salt.p, salt.n, 1);
    return seed;
}

int pl_block_space_seeded(pl_block_space *s, uint32_t block_tokens, bool eagle, uint64_t seed)
{
    if (block_tokens == 0)
        return PL_EINVALID;
    if (block_tokens > PL_BLOCK_TOKENS_MAX)
        return PL_ELIMIT;
    s->seed = seed;
    s->block_tokens = block_tokens;
    s->window_tokens = block_tokens + (eagle ? 1 : 0);
    XXH3_generateSecret_fromSeed(s->secret, s->seed);
    return 0;
}

int pl_block_space_init(pl_block_space *s, uint32_t block_tokens, bool eagle, pl_str lora,
                        pl_str salt)
{
    return pl_block_space_seeded(s, block_tokens, eagle, pl_block_seed(lora, salt));
}

size_t pl_block_count(const pl_block_space *s, size_t n)
{
    return n < s->window_tokens ? 0 : (n - s->window_tokens) / s->block_tokens + 1;
}

static inline uint64_t next_in_chain(uint64_t parent, uint64_t local)
{
    const uint64_t pair[2] = {parent, local};
    return XXH3_64bits_withSeed(pair, sizeof pair, PL_BLOCK_SEED);
}

void pl_block_chain(const uint64_t *parent, const uint64_t *local, size_t n, uint64_t *seq)
{
    if (n == 0)
        return;
    uint64_t h = parent ? next_in_chain(*parent, local[0]) : local[0];
    seq[0] = h;
    for (size_t i = 1; i < n; i++)
        seq[i] = h = next_in_chain(h, local[i]);
}

static inline __attribute__((always_inline)) uint64_t
local_hash(const pl_block_space *s, uint64_t seed, const void *window, size_t bytes)
{
    return XXH3_64bits_withSecretandSeed(window, bytes, s->secret, sizeof s->secret, seed);
}

/* Inlined once per constant (stride, bytes), and once for sizes known at run time. */
static inline __attribute__((always_inline)) void hash_all(const pl_block_space *s,
                                                           const uint32_t *tokens, size_t stride,
                                                           size_t bytes, size_t count,
                                                           uint64_t *local, uint64_t *seq)
{
    const uint64_t seed = s->seed; /* read once: for all the compiler knows, local[] may alias s */
    if (count == 0)
        return;
    if (!seq) {
        for (size_t i = 0; i < count; i++)
            local[i] = local_hash(s, seed, tokens + i * stride, bytes);
        return;
    }
    uint64_t chain = local_hash(s, seed, tokens, bytes);
    seq[0] = chain;
    if (local)
        local[0] = chain;
    for (size_t i = 1; i < count; i++) {
        uint64_t h = local_hash(s, seed, tokens + i * stride, bytes);
        if (local)
            local[i] = h;
        seq[i] = chain = next_in_chain(chain, h);
    }
}

/* Each link waits for the one before: in a loop of their own they take three times as long. */
static inline __attribute__((always_inline)) void
hash_and_link(const pl_block_space *s, const uint32_t *tokens, size_t stride, size_t bytes,
              size_t count, uint64_t *local, uint64_t chain, uint64_t *key)
{
    const uint64_t seed = s->seed;
    for (size_t i = 0; i < count; i++) {
        uint64_t h = local_hash(s, seed, tokens + i * stride, bytes);
        local[i] = h;
        key[i] = chain = pl_kv_canon_link(chain, h);
    }
}

void pl_block_hash_linked(const pl_block_space *s, const uint32_t *tokens, size_t count,
                          uint64_t *local, uint64_t chain, uint64_t *key)
{
    if (s->window_tokens == 16 && s->block_tokens == 16)
        hash_and_link(s, tokens, 16, 16 * sizeof *tokens, count, local, chain, key);
    else if (s->block_tokens == 16)
        hash_and_link(s, tokens, 16, 17 * sizeof *tokens, count, local, chain, key);
    else if (s->window_tokens == 32 && s->block_tokens == 32)
        hash_and_link(s, tokens, 32, 32 * sizeof *tokens, count, local, chain, key);
    else
        hash_and_link(s, tokens, s->block_tokens, s->window_tokens * sizeof *tokens, count, local,
                      chain, key);
}

int64_t pl_block_hash(const pl_block_space *s, const uint32_t *tokens, size_t n, uint64_t *local,
                      uint64_t *seq, size_t cap)
{
    size_t count = pl_block_count(s, n);
    if (count > cap)
        return PL_ELIMIT;
    if (!local && !seq)
        return (int64_t)count;
    if (s->window_tokens == 16 && s->block_tokens == 16)
        hash_all(s, tokens, 16, 16 * sizeof *tokens, count, local, seq);
    else if (s->block_tokens == 16)
        hash_all(s, tokens, 16, 17 * sizeof *tokens, count, local, seq);
    else if (s->window_tokens == 32 && s->block_tokens == 32)
        hash_all(s, tokens, 32, 32 * sizeof *tokens, count, local, seq);
    else if (s->block_tokens == 1 && s->window_tokens == 1)
        hash_all(s, tokens, 1, 1 * sizeof *tokens, count, local, seq);
    else if (s->block_tokens == 1)
        hash_all(s, tokens, 1, 2 * sizeof *tokens, count, local, seq);
    else
        hash_all(s, tokens, s->block_tokens, s->window_tokens * sizeof *tokens, count, local, seq);
    return (int64_t)count;
}

static bool mm_after(const pl_block_mm *a, const pl_block_mm *b)
{
    return a->block != b->block ? a->block > b->block : a->hash > b->hash;
}

/* Restores the heap below `at`. */
static void mm_sift(pl_block_mm *mm, size_t at, size_t n)
{
    pl_block_mm x = mm[at];
    for (size_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && mm_after(&mm[child + 1], &mm[child]))
            child++;
        if (!mm_after(&mm[child], &x))
            break;
        mm[at] = mm[child];
    }
    mm[at] = x;
}

/* A heap sort: qsort may allocate, and the number of objects is the client's choice. */
void pl_block_mm_sort(pl_block_mm *mm, size_t n)
{
    for (size_t i = n / 2; i-- > 0;)
        mm_sift(mm, i, n);
    for (size_t end = n; end > 1; end--) {
        pl_block_mm last = mm[0];
        mm[0] = mm[end - 1];
        mm[end - 1] = last;
        mm_sift(mm, 0, end - 1);
    }
}

/* The hash of a window followed by the hashes of n objects. */
static uint64_t local_hash_mm(const pl_block_space *s, const void *window, size_t bytes,
                              const pl_block_mm *mm, size_t n)
{
    XXH3_state_t state;
    XXH3_INITSTATE(&state);
    XXH3_64bits_reset_withSecretandSeed(&state, s->secret, sizeof s->secret, s->seed);
    XXH3_64bits_update(&state, window, bytes);
    for (size_t i = 0; i < n; i++)
        XXH3_64bits_update(&state, &mm[i].hash, sizeof mm[i].hash);
    return XXH3_64bits_digest(&state);
}

int64_t pl_block_hash_mm(const pl_block_space *s, const uint32_t *tokens, size_t n,
                         const pl_block_mm *mm, size_t mm_n, uint64_t *local, uint64_t *seq,
                         size_t cap)
{
    size_t count = pl_block_count(s, n);
    if (count > cap)
        return PL_ELIMIT;
    for (size_t i = 1; i < mm_n; i++)
        if (mm_after(&mm[i - 1], &mm[i]))
            return PL_EINVALID;
    size_t bytes = s->window_tokens * sizeof *tokens, m = 0;
    uint64_t chain = 0;
    for (size_t i = 0; i < count; i++) {
        size_t first = m;
        while (m < mm_n && mm[m].block == i)
            m++;
        const uint32_t *window = tokens + i * s->block_tokens;
        uint64_t h = m > first ? local_hash_mm(s, window, bytes, mm + first, m - first)
                               : local_hash(s, s->seed, window, bytes);
        if (local)
            local[i] = h;
        chain = i ? next_in_chain(chain, h) : h;
        if (seq)
            seq[i] = chain;
    }
    return (int64_t)count;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

int pl_mm_hash(pl_str id, uint64_t *hash)
{
    if (id.n == 0)
        return PL_EINVALID;
    uint64_t first = 0;
    size_t digits = 0;
    while (id.n == 64 && digits < 64 && hex_digit(id.p[digits]) >= 0) {
        if (digits < 16)
            first = first << 4 | (uint64_t)hex_digit(id.p[digits]);
        digits++;
    }
    *hash = digits == 64 ? first : XXH3_64bits(id.p, id.n);
    return 0;
}

uint32_t pl_mm_pad_token(uint64_t mm_hash)
{
    return 1000000u + (uint32_t)(mm_hash & ((1u << 30) - 1));
}
