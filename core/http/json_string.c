/* Strings of the JSON walk: finding their end, checking what is inside, unescaping. Used by json.c
 * only, except for the two functions that json.h declares; pure.
 *
 * Almost all bytes of a request are inside long strings, so there is a path that takes 64 bytes a
 * step (SSE2). It only ever says "nothing wrong here": what it does not understand or does not like
 * it leaves to the plain code, so that errors have one source and one exact place. Defining
 * PL_JSON_SCALAR leaves the fast path out (tests compare the two). */
#include "http/json_inner.h"

#include "base/err.h"

const uint8_t pl_json_classes[256] = {
    [' '] = PL_JSON_IS_SPACE | PL_JSON_IS_PLAIN,
    ['\t'] = PL_JSON_IS_SPACE,
    ['\n'] = PL_JSON_IS_SPACE,
    ['\r'] = PL_JSON_IS_SPACE,
    ['!'] = PL_JSON_IS_PLAIN,
    ['"'] = PL_JSON_IS_ESCAPE,
    ['#' ... '.'] = PL_JSON_IS_PLAIN,
    ['/'] = PL_JSON_IS_PLAIN | PL_JSON_IS_ESCAPE,
    ['0' ... '9'] = PL_JSON_IS_PLAIN | PL_JSON_IS_DIGIT | PL_JSON_IS_HEX,
    [':' ... '@'] = PL_JSON_IS_PLAIN,
    ['A' ... 'F'] = PL_JSON_IS_PLAIN | PL_JSON_IS_HEX,
    ['G' ... '['] = PL_JSON_IS_PLAIN,
    ['\\'] = PL_JSON_IS_ESCAPE,
    [']' ... '`'] = PL_JSON_IS_PLAIN,
    ['a'] = PL_JSON_IS_PLAIN | PL_JSON_IS_HEX,
    ['b'] = PL_JSON_IS_PLAIN | PL_JSON_IS_HEX | PL_JSON_IS_ESCAPE,
    ['c' ... 'e'] = PL_JSON_IS_PLAIN | PL_JSON_IS_HEX,
    ['f'] = PL_JSON_IS_PLAIN | PL_JSON_IS_HEX | PL_JSON_IS_ESCAPE,
    ['g' ... 'm'] = PL_JSON_IS_PLAIN,
    ['n'] = PL_JSON_IS_PLAIN | PL_JSON_IS_ESCAPE,
    ['o' ... 'q'] = PL_JSON_IS_PLAIN,
    ['r'] = PL_JSON_IS_PLAIN | PL_JSON_IS_ESCAPE,
    ['s'] = PL_JSON_IS_PLAIN,
    ['t'] = PL_JSON_IS_PLAIN | PL_JSON_IS_ESCAPE,
    ['u' ... 0x7f] = PL_JSON_IS_PLAIN,
};

/* Length of the UTF-8 sequence at p; 0 with *bad the first byte that cannot stand there. */
static unsigned sequence(const char *p, const char *end, const char **bad)
{
    unsigned char c = (unsigned char)*p, low = 0x80, high = 0xbf;
    unsigned n;
    if (c >= 0xc2 && c <= 0xdf) {
        n = 2;
    } else if ((c & 0xf0) == 0xe0) { /* no overlong forms, no surrogates */
        n = 3;
        low = c == 0xe0 ? 0xa0 : 0x80;
        high = c == 0xed ? 0x9f : 0xbf;
    } else if (c >= 0xf0 && c <= 0xf4) { /* no overlong forms, nothing above U+10FFFF */
        n = 4;
        low = c == 0xf0 ? 0x90 : 0x80;
        high = c == 0xf4 ? 0x8f : 0xbf;
    } else {
        *bad = p;
        return 0;
    }
    for (unsigned k = 1; k < n; k++) {
        if (p + k == end || (unsigned char)p[k] < low || (unsigned char)p[k] > high) {
            *bad = p + k;
            return 0;
        }
        low = 0x80;
        high = 0xbf;
    }
    return n;
}

/* Length of the escape whose backslash is at p; 0 with *bad the first byte that cannot stand there.
 */
static inline unsigned escape(const char *p, const char *end, const char **bad)
{
    *bad = p + 1;
    if (p + 1 == end)
        return 0;
    if (p[1] != 'u')
        return pl_json_is(p[1], PL_JSON_IS_ESCAPE) ? 2 : 0;
    for (unsigned k = 2; k < 6; k++) {
        *bad = p + k;
        if (p + k == end || !pl_json_is(p[k], PL_JSON_IS_HEX))
            return 0;
    }
    return 6;
}

/* From inside a string, at the start of a character, to its closing quote. */
static const char *string_plain(pl_json *j, const char *p, bool utf8, bool *escaped)
{
    const char *end = j->end, *bad;
    for (;;) {
        while (p < end && pl_json_is(*p, PL_JSON_IS_PLAIN))
            p++;
        if (p == end)
            return pl_json_stop(j, p, "");
        unsigned n = 1;
        if (*p == '"')
            return p;
        if (*p == '\\') {
            *escaped = true;
            n = escape(p, end, &bad);
            if (!n)
                return pl_json_stop(j, bad, "not a valid escape");
        } else if ((unsigned char)*p < 0x20) {
            return pl_json_stop(j, p, "a control character in a string");
        } else if (utf8) {
            n = sequence(p, end, &bad);
            if (!n)
                return pl_json_stop(j, bad, "not valid UTF-8");
        }
        p += n;
    }
}

#ifdef PL_JSON_SSE2
/* Quotes, backslashes, control characters and bytes above 0x7f: signed, the latter are small, too.
 */
static inline __m128i special(__m128i v)
{
    __m128i quote = _mm_cmpeq_epi8(v, _mm_set1_epi8('"'));
    __m128i back = _mm_cmpeq_epi8(v, _mm_set1_epi8('\\'));
    return _mm_or_si128(_mm_or_si128(quote, back), _mm_cmplt_epi8(v, _mm_set1_epi8(0x20)));
}

/* UTF-8 in 64 bytes that begin with a character; bit i of `high` is byte i's top bit. Checks the
 * bytes before `limit` (at most 64; byte `limit` itself is ASCII when it is less). Returns how many
 * of them make whole characters, or -1. Continuation bytes must be exactly where the leads ask for
 * them; the second byte of E0, ED, F0 and F4 has a narrower range. */
static int utf8_64(const __m128i v[4], uint64_t high, unsigned limit)
{
    uint64_t tails = PL_JSON_BITS(_mm_cmplt_epi8, 0xc0);             /* 80..BF */
    uint64_t overlong = PL_JSON_BITS(_mm_cmplt_epi8, 0xc2) & ~tails; /* C0, C1 */
    uint64_t three = PL_JSON_BITS(_mm_cmpgt_epi8, 0xdf) & high;      /* E0.. */
    uint64_t four = PL_JSON_BITS(_mm_cmpgt_epi8, 0xef) & high;       /* F0.. */
    uint64_t over = PL_JSON_BITS(_mm_cmpgt_epi8, 0xf4) & high;       /* F5.. */
    uint64_t leads = high & ~tails;
    uint64_t bad = (tails ^ (leads << 1 | three << 2 | four << 3)) | overlong | over;
    uint64_t e0 = PL_JSON_BITS(_mm_cmpeq_epi8, 0xe0), ed = PL_JSON_BITS(_mm_cmpeq_epi8, 0xed);
    if (e0 | ed) {
        uint64_t below_a0 = PL_JSON_BITS(_mm_cmplt_epi8, 0xa0);
        bad |= (e0 << 1 & below_a0) | (ed << 1 & ~below_a0);
    }
    if (four) {
        uint64_t f0 = PL_JSON_BITS(_mm_cmpeq_epi8, 0xf0), f4 = PL_JSON_BITS(_mm_cmpeq_epi8, 0xf4);
        uint64_t below_90 = PL_JSON_BITS(_mm_cmplt_epi8, 0x90);
        bad |= (f0 << 1 & below_90) | (f4 << 1 & ~below_90);
    }
    if (limit < 64) /* byte `limit` included: a character cut by it asks for a tail there */
        bad &= ((uint64_t)2 << limit) - 1;
    if (bad)
        return -1;
    if (limit == 64) {
        if (leads >> 63)
            return 63;
        if (three >> 62 & 1)
            return 62;
        if (four >> 61 & 1)
            return 61;
    }
    return (int)limit;
}

const char *pl_json_string_end(pl_json *j, const char *p, bool utf8, bool *escaped)
{
    const char *end = j->end, *bad;
    if (end - p >= 16) { /* keys, roles, types */
        unsigned hits = (unsigned)_mm_movemask_epi8(special(pl_json_load(p)));
        if (!hits)
            p += 16;
        else if (p[__builtin_ctz(hits)] == '"')
            return p + __builtin_ctz(hits);
    }
    while (end - p >= 64) {
        const __m128i v[4] = {pl_json_load(p), pl_json_load(p + 16), pl_json_load(p + 32),
                              pl_json_load(p + 48)};
        __m128i s[4] = {special(v[0]), special(v[1]), special(v[2]), special(v[3])};
        __m128i any = _mm_or_si128(_mm_or_si128(s[0], s[1]), _mm_or_si128(s[2], s[3]));
        if (!_mm_movemask_epi8(any)) {
            p += 64;
            continue;
        }
        uint64_t high = pl_json_bits(v[0], v[1], v[2], v[3]);
        uint64_t marks = pl_json_bits(s[0], s[1], s[2], s[3]) & ~high;
        unsigned used = 64; /* more when an escape reaches over the 64 bytes */
        const char *quote = NULL;
        while (marks) {
            unsigned at = (unsigned)__builtin_ctzll(marks);
            if (p[at] == '"') {
                quote = p + at;
                used = at;
                break;
            }
            unsigned n = p[at] == '\\' ? escape(p + at, end, &bad) : 0;
            if (!n)
                return string_plain(j, p, utf8, escaped);
            *escaped = true;
            if (at + n >= 64) {
                used = at + n;
                break;
            }
            marks &= ~(uint64_t)0 << (at + n);
        }
        if (high && utf8) {
            int whole = utf8_64(v, high, used < 64 ? used : 64);
            if (whole < 0)
                return string_plain(j, p, utf8, escaped);
            if (used == 64)
                used = (unsigned)whole;
        }
        if (quote)
            return quote;
        p += used;
    }
    return string_plain(j, p, utf8, escaped);
}

#else
const char *pl_json_string_end(pl_json *j, const char *p, bool utf8, bool *escaped)
{
    return string_plain(j, p, utf8, escaped);
}
#endif

static unsigned hex4(const char *p)
{
    unsigned v = 0;
    for (int i = 0; i < 4; i++) {
        unsigned char c = (unsigned char)p[i];
        v = v << 4 | (c <= '9' ? c - 0x30u : (c | 0x20u) - 'a' + 10u);
    }
    return v;
}

/* Decodes what stands at *p into out and moves *p on: a plain byte, or an escape as UTF-8. */
static unsigned decode(const char **p, const char *end, char out[4])
{
    const char *s = *p;
    if (*s != '\\') {
        out[0] = *s;
        *p = s + 1;
        return 1;
    }
    if (s[1] != 'u') {
        static const char from[] = "bfnrt", to[] = "\b\f\n\r\t";
        const char *at = strchr(from, s[1]);
        out[0] = at ? to[at - from] : s[1];
        *p = s + 2;
        return 1;
    }
    unsigned c = hex4(s + 2);
    s += 6;
    if (c >= 0xd800 && c <= 0xdfff) {
        unsigned low = c < 0xdc00 && end - s >= 6 && s[0] == '\\' && s[1] == 'u' ? hex4(s + 2) : 0;
        if (low >= 0xdc00 && low <= 0xdfff) {
            c = 0x10000 + ((c & 0x3ff) << 10) + (low & 0x3ff);
            s += 6;
        } else {
            c = 0xfffd;
        }
    }
    *p = s;
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (char)(0xc0 | c >> 6);
        out[1] = (char)(0x80 | (c & 0x3f));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (char)(0xe0 | c >> 12);
        out[1] = (char)(0x80 | (c >> 6 & 0x3f));
        out[2] = (char)(0x80 | (c & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | c >> 18);
    out[1] = (char)(0x80 | (c >> 12 & 0x3f));
    out[2] = (char)(0x80 | (c >> 6 & 0x3f));
    out[3] = (char)(0x80 | (c & 0x3f));
    return 4;
}

size_t pl_json_unescape(pl_str raw, char *out)
{
    const char *p = raw.p, *end = raw.p + raw.n;
    size_t n = 0;
    while (p < end) {
        char tmp[4];
        unsigned k = decode(&p, end, tmp);
        memcpy(out + n, tmp, k);
        n += k;
    }
    return n;
}

bool pl_json_name_is(const pl_json_name *name, pl_str plain)
{
    if (!name->escaped)
        return pl_str_eq(name->raw, plain);
    const char *p = name->raw.p, *end = p + name->raw.n;
    size_t n = 0;
    while (p < end) {
        char tmp[4];
        unsigned k = decode(&p, end, tmp);
        if (k > plain.n - n || memcmp(plain.p + n, tmp, k) != 0)
            return false;
        n += k;
    }
    return n == plain.n;
}
