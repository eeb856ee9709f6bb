/* What json.c and json_string.c share. Private to them. */
#ifndef PL_JSON_INNER_H
#define PL_JSON_INNER_H

#include "http/json.h"

#if defined(__SSE2__) && !defined(PL_JSON_SCALAR)
#include <emmintrin.h>
#define PL_JSON_SSE2 1
#endif

#define PL_JSON_IS_SPACE  1u
#define PL_JSON_IS_DIGIT  2u
#define PL_JSON_IS_HEX    4u
#define PL_JSON_IS_ESCAPE 8u  /* may follow a backslash, u aside */
#define PL_JSON_IS_PLAIN  16u /* in a string it needs no look: ASCII, no quote, no backslash */

extern const uint8_t pl_json_classes[256];

static inline bool pl_json_is(char c, unsigned what)
{
    return (pl_json_classes[(unsigned char)c] & what) != 0;
}

/* pl_json_fail with PL_ESYNTAX, for code that returns the place it has reached: NULL. */
const char *pl_json_stop(pl_json *j, const char *pos, const char *text);

/* From behind a string's opening quote to its closing one; NULL when the walk has failed. *escaped
 * is set when there was a backslash, else left alone. */
const char *pl_json_string_end(pl_json *j, const char *p, bool utf8, bool *escaped);

#ifdef PL_JSON_SSE2
static inline __m128i pl_json_load(const char *p)
{
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

/* One bit per byte: its top bit. */
static inline uint64_t pl_json_bits(__m128i a, __m128i b, __m128i c, __m128i d)
{
    uint32_t low = (uint32_t)_mm_movemask_epi8(a) | (uint32_t)_mm_movemask_epi8(b) << 16;
    uint32_t high = (uint32_t)_mm_movemask_epi8(c) | (uint32_t)_mm_movemask_epi8(d) << 16;
    return low | (uint64_t)high << 32;
}

/* One bit per byte of v[0..3]: does the comparison f with the byte k hold? */
#define PL_JSON_BITS(f, k)                                                                         \
    pl_json_bits(f(v[0], _mm_set1_epi8((char)(k))), f(v[1], _mm_set1_epi8((char)(k))),             \
                 f(v[2], _mm_set1_epi8((char)(k))), f(v[3], _mm_set1_epi8((char)(k))))
#endif

#endif
