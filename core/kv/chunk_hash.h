/* Hashes of whole text chunks of the default size, linked as canon.c links all chunks. What a chunk
 * hashes to may differ from one machine to the next (AES instructions where there are some, else
 * XXH3), so these hashes must not leave the process. Pure, any thread. */
#ifndef PL_CHUNK_HASH_H
#define PL_CHUNK_HASH_H

#include <stddef.h>
#include <stdint.h>

#define PL_CHUNK_BYTES 128

/* The chain of cumulative keys goes on over n chunks at p; of the keys behind them the first `cap`
 * are written. Returns the last. */
uint64_t pl_chunk_chain(uint64_t chain, const char *p, size_t n, uint64_t *keys, size_t cap);

/* The link of a chain of cumulative keys: of the key so far and the hash of what comes next. One
 * multiplication, since a long prompt waits for every one; the hashes are mixed well already. */
static inline uint64_t pl_kv_canon_link(uint64_t key, uint64_t hash)
{
    return key * 0x9e3779b97f4a7c15u + hash;
}

#endif
