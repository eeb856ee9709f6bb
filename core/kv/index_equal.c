/* How many words two arrays have in common from the start: the inner loop of the index, for readers
 * and the writer, pure. Chosen once at start by what the processor has. */
#include <string.h>

#include "kv/index_impl.h"

enum { AHEAD = 64 }; /* words of the index that are fetched in advance */

typedef size_t equal_fn(const uint64_t *a, const uint64_t *b, size_t n);

static size_t equal_plain(const uint64_t *a, const uint64_t *b, size_t n)
{
    size_t i = 0;
    for (; i + 4 <= n; i += 4)
        if ((a[i] ^ b[i]) | (a[i + 1] ^ b[i + 1]) | (a[i + 2] ^ b[i + 2]) | (a[i + 3] ^ b[i + 3]))
            break;
    while (i < n && a[i] == b[i])
        i++;
    return i;
}

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx2"))) static size_t equal_avx2(const uint64_t *a, const uint64_t *b,
                                                         size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __builtin_prefetch(a + i + AHEAD);
        __m256i x = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(a + i)),
                                     _mm256_loadu_si256((const __m256i *)(b + i)));
        __m256i y = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(a + i + 4)),
                                     _mm256_loadu_si256((const __m256i *)(b + i + 4)));
        __m256i both = _mm256_or_si256(x, y);
        if (!_mm256_testz_si256(both, both))
            break;
    }
    while (i < n && a[i] == b[i])
        i++;
    return i;
}

__attribute__((target("avx512f,bmi"))) static size_t equal_avx512(const uint64_t *a,
                                                                  const uint64_t *b, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __builtin_prefetch(a + i + AHEAD);
        __mmask8 differ = _mm512_cmpneq_epu64_mask(_mm512_loadu_si512((const void *)(a + i)),
                                                   _mm512_loadu_si512((const void *)(b + i)));
        if (differ)
            return i + (size_t)__builtin_ctz(differ);
    }
    if (i < n) {
        __mmask8 rest = (__mmask8)((1u << (n - i)) - 1);
        __mmask8 differ = _mm512_mask_cmpneq_epu64_mask(rest, _mm512_maskz_loadu_epi64(rest, a + i),
                                                        _mm512_maskz_loadu_epi64(rest, b + i));
        return differ ? i + (size_t)__builtin_ctz(differ) : n;
    }
    return n;
}

static equal_fn *equal = equal_plain;

__attribute__((constructor)) static void choose(void)
{
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        equal = equal_avx512;
    else if (__builtin_cpu_supports("avx2"))
        equal = equal_avx2;
}

size_t pl_ix_equal(const uint64_t *a, const uint64_t *b, size_t n)
{
    return equal(a, b, n);
}
#else
size_t pl_ix_equal(const uint64_t *a, const uint64_t *b, size_t n)
{
    return equal_plain(a, b, n);
}
#endif
