/* Chains of units (messages, bytes, token ids): see canon.h. Called by history.c and reply.c on a
 * loop's thread; pure, owns nothing.
 *
 * A chain over u1 .. un behind a start s is s*B^n + u1*B^(n-1) + ... + un modulo 2^61 - 1, for two
 * bases B. So what an engine holds can be said in two numbers, a prefix of a longer text can be
 * compared with it, and a reply that was seen in pieces can be put behind it, with nothing kept of
 * the text. Bytes go in eight at a time, with one reduction for the eight. */
#include "session/canon.h"

#include <string.h>

#define MODULUS (((uint64_t)1 << 61) - 1)

/* Powers 0 .. 8 of the two bases. */
static const uint64_t powers[2][9] = {
    {0x0000000000000001u, 0x0f1c3a5d7e2b4967u, 0x0e8f340755ff4286u, 0x05589a0492ccf054u,
     0x0433626655a52ae8u, 0x1128647c6d983ec0u, 0x1e5f9e4323d1136fu, 0x0e58907bed570a12u,
     0x0a1c150ad06f4f49u},
    {0x0000000000000001u, 0x1a6d94c2f05e83b1u, 0x07c32311c3e98d36u, 0x001596dd20c79495u,
     0x0db52ca9f2d94a00u, 0x1ef5f312ed35ff58u, 0x1f59b4905f5cb007u, 0x17b650fdc76b33a5u,
     0x049272621f96a89fu}};

/* Of less than 2^124. */
static inline uint64_t reduce(unsigned __int128 x)
{
    uint64_t r = (uint64_t)(x & MODULUS) + (uint64_t)(x >> 61 & MODULUS) + (uint64_t)(x >> 122);
    r = (r & MODULUS) + (r >> 61);
    return r >= MODULUS ? r - MODULUS : r;
}

static inline void add(pl_chain *c, const uint64_t u[2])
{
    for (int k = 0; k < 2; k++)
        c->v[k] = reduce((unsigned __int128)c->v[k] * powers[k][1] + u[k]);
    c->n++;
}

static void digest_unit(pl_digest d, uint64_t u[2])
{
    u[0] = reduce(d.lo);
    u[1] = reduce(d.hi);
}

void pl_chain_begin(pl_chain *c, pl_digest d)
{
    digest_unit(d, c->v);
    c->n = 0;
}

void pl_chain_add(pl_chain *c, pl_digest d)
{
    uint64_t u[2];
    digest_unit(d, u);
    add(c, u);
}

void pl_chain_id(pl_chain *c, uint32_t id)
{
    uint64_t unit = (uint64_t)id + 1;
    add(c, (const uint64_t[2]){unit, unit});
}

void pl_chain_bytes(pl_chain *c, pl_str s)
{
    const unsigned char *p = (const unsigned char *)s.p;
    size_t i = 0;
    for (; s.n - i >= 8; i += 8)
        for (int k = 0; k < 2; k++) {
            unsigned __int128 x = (unsigned __int128)c->v[k] * powers[k][8];
            for (int b = 0; b < 8; b++)
                x += (unsigned __int128)powers[k][7 - b] * (p[i + (size_t)b] + 1u);
            c->v[k] = reduce(x);
        }
    c->n += i;
    for (; i < s.n; i++)
        pl_chain_id(c, p[i]);
}

void pl_chain_join(pl_chain *c, const pl_chain *tail)
{
    for (int k = 0; k < 2; k++) {
        uint64_t shift = 1, square = powers[k][1];
        for (uint64_t n = tail->n; n; n >>= 1) {
            if (n & 1)
                shift = reduce((unsigned __int128)shift * square);
            square = reduce((unsigned __int128)square * square);
        }
        c->v[k] = reduce((unsigned __int128)c->v[k] * shift + tail->v[k]);
    }
    c->n += tail->n;
}

void pl_chain_text(pl_chain *c, pl_str inside, uint64_t cut, pl_chain *at, size_t *raw_at)
{
    size_t i = 0;
    *raw_at = SIZE_MAX;
    if (c->n == cut) {
        *at = *c;
        *raw_at = 0;
    }
    while (i < inside.n) {
        const char *p = inside.p + i;
        size_t left = inside.n - i;
        if (*p == '\\') {
            char out[8];
            size_t n = pl_canon_escape(p, left);
            pl_chain_bytes(c, (pl_str){out, pl_json_unescape((pl_str){p, n}, out)});
            i += n;
        } else {
            const char *back = memchr(p, '\\', left);
            size_t n = back ? (size_t)(back - p) : left;
            if (cut > c->n && cut - c->n < n)
                n = (size_t)(cut - c->n);
            pl_chain_bytes(c, (pl_str){p, n});
            i += n;
        }
        bool inside_character = i < inside.n && ((unsigned char)inside.p[i] & 0xc0) == 0x80;
        if (c->n == cut && !inside_character) {
            *at = *c;
            *raw_at = i;
        }
    }
}

static bool blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

bool pl_chain_ids(pl_chain *c, pl_str array, uint64_t cut, pl_chain *at, size_t *raw_at)
{
    const char *p = array.p + 1, *end = array.p + array.n - 1; /* the closing bracket */
    *raw_at = SIZE_MAX;
    for (;;) {
        while (blank(*p))
            p++;
        bool marked = c->n == cut;
        if (marked)
            *at = *c;
        if (p == end)
            return true;
        if (marked)
            *raw_at = (size_t)(p - array.p);
        uint64_t id = 0;
        const char *from = p;
        for (; *p >= '0' && *p <= '9' && p - from < 11; p++)
            id = id * 10 + (uint64_t)(*p - '0');
        if (p == from || id > UINT32_MAX)
            return false;
        pl_chain_id(c, (uint32_t)id);
        while (blank(*p))
            p++;
        if (*p == ',')
            p++;
        else if (p != end)
            return false; /* a fraction, an exponent, a longer number */
    }
}
