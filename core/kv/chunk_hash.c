/* Hashes of chunks: see chunk_hash.h. Called by canon.c on the loops' threads for every byte of
 * text that has keys, so the hash is made of what a CPU does fastest: rounds of AES, which mix 16
 * bytes each. Owns nothing. */
#include "kv/chunk_hash.h"

#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

static uint64_t plain(uint64_t chain, const char *p, size_t n, uint64_t *keys, size_t cap)
{
    for (size_t i = 0; i < n; i++, p += PL_CHUNK_BYTES) {
        chain = pl_kv_canon_link(chain, XXH3_64bits(p, PL_CHUNK_BYTES));
        if (i < cap)
            keys[i] = chain;
    }
    return chain;
}

#if defined(__x86_64__)
#include <immintrin.h>

#define WITH_AES __attribute__((target("aes,avx")))

WITH_AES static inline __m128i block(const char *p, size_t i)
{
    return _mm_loadu_si128((const __m128i *)(const void *)(p + 16 * i));
}

WITH_AES static inline __m128i two(__m128i v, __m128i key, __m128i next)
{
    return _mm_aesenc_si128(_mm_aesenc_si128(v, key), next);
}

/* Where two blocks meet one of them has had two rounds more, after which each of its bytes has
 * reached all 16; so no difference in the one that texts have could undo one in the other. Three
 * rounds come last, so that the half that is kept depends on every byte. */
WITH_AES static inline uint64_t hash(const char *p, const __m128i k[4])
{
    __m128i a = two(block(p, 0), k[0], block(p, 4)), b = two(block(p, 1), k[1], block(p, 5));
    __m128i c = two(block(p, 2), k[2], block(p, 6)), d = two(block(p, 3), k[3], block(p, 7));
    a = two(two(a, k[1], b), k[2], two(c, k[3], d));
    a = _mm_aesenc_si128(two(a, k[0], k[1]), k[2]);
    return (uint64_t)_mm_cvtsi128_si64(a);
}

WITH_AES static uint64_t with_aes(uint64_t chain, const char *p, size_t n, uint64_t *keys,
                                  size_t cap)
{
    /* the first 512 bits of pi's fraction */
    const __m128i k[4] = {_mm_set_epi64x(0x243f6a8885a308d3, 0x13198a2e03707344),
                          _mm_set_epi64x((long long)0xa4093822299f31d0, 0x082efa98ec4e6c89),
                          _mm_set_epi64x(0x452821e638d01377, (long long)0xbe5466cf34e90c6c),
                          _mm_set_epi64x((long long)0xc0ac29b7c97c50dd, 0x3f84d5b5b5470917)};
    size_t keyed = n < cap ? n : cap;
    const char *end = p + keyed * PL_CHUNK_BYTES;
    for (; p < end; p += PL_CHUNK_BYTES)
        *keys++ = chain = pl_kv_canon_link(chain, hash(p, k));
    for (end += (n - keyed) * PL_CHUNK_BYTES; p < end; p += PL_CHUNK_BYTES)
        chain = pl_kv_canon_link(chain, hash(p, k));
    return chain;
}

uint64_t pl_chunk_chain(uint64_t chain, const char *p, size_t n, uint64_t *keys, size_t cap)
{
    if (__builtin_cpu_supports("aes") && __builtin_cpu_supports("avx"))
        return with_aes(chain, p, n, keys, cap);
    return plain(chain, p, n, keys, cap);
}
#else
uint64_t pl_chunk_chain(uint64_t chain, const char *p, size_t n, uint64_t *keys, size_t cap)
{
    return plain(chain, p, n, keys, cap);
}
#endif
