/* The msgpack cursor and a few writers: see msgpack.h. Called by event.c on the indexer's thread
 * and by event_json.c on the threads that take events over HTTP. Nothing is kept; the bytes belong
 * to the caller. */
#include "kv/msgpack.h"

#include <string.h>

#include "base/err.h"

static uint64_t be(const uint8_t *p, unsigned n)
{
    uint64_t v = 0;
    for (unsigned i = 0; i < n; i++)
        v = v << 8 | p[i];
    return v;
}

/* n big-endian bytes as a number. */
static int number(pl_mp *c, unsigned n, uint64_t *v)
{
    if ((size_t)(c->end - c->p) < n)
        return PL_ESYNTAX;
    *v = be(c->p, n);
    c->p += n;
    return 0;
}

static int bytes(pl_mp *c, pl_mp_item *it, pl_mp_type type, uint64_t n)
{
    if ((uint64_t)(c->end - c->p) < n)
        return PL_ESYNTAX;
    it->type = type;
    it->s = (pl_str){(const char *)c->p, (size_t)n};
    c->p += n;
    return 0;
}

/* Each element takes a byte at least, each pair two. */
static int container(pl_mp *c, pl_mp_item *it, pl_mp_type type, uint64_t n)
{
    if (n * (type == PL_MP_MAP ? 2 : 1) > (uint64_t)(c->end - c->p))
        return PL_ESYNTAX;
    it->type = type;
    it->n = (uint32_t)n;
    return 0;
}

static int signed_number(pl_mp *c, pl_mp_item *it, unsigned n)
{
    uint64_t v;
    if (number(c, n, &v))
        return PL_ESYNTAX;
    int64_t i = n == 1 ? (int8_t)v : n == 2 ? (int16_t)v : n == 4 ? (int32_t)v : (int64_t)v;
    it->type = i < 0 ? PL_MP_INT : PL_MP_UINT;
    it->i = i;
    return 0;
}

static int real(pl_mp *c, pl_mp_item *it, unsigned n)
{
    uint64_t v;
    if (number(c, n, &v))
        return PL_ESYNTAX;
    it->type = PL_MP_REAL;
    if (n == 4) {
        uint32_t low = (uint32_t)v;
        float f;
        memcpy(&f, &low, sizeof f);
        it->f = (double)f;
    } else {
        memcpy(&it->f, &v, sizeof it->f);
    }
    return 0;
}

int pl_mp_read(pl_mp *c, pl_mp_item *it)
{
    if (c->p >= c->end)
        return PL_ESYNTAX;
    uint8_t h = *c->p++;
    uint64_t n;
    if (h <= 0x7f || h >= 0xe0) {
        it->type = h <= 0x7f ? PL_MP_UINT : PL_MP_INT;
        it->i = (int8_t)h;
        return 0;
    }
    if (h <= 0x8f)
        return container(c, it, PL_MP_MAP, h & 0x0f);
    if (h <= 0x9f)
        return container(c, it, PL_MP_ARRAY, h & 0x0f);
    if (h <= 0xbf)
        return bytes(c, it, PL_MP_STR, h & 0x1f);
    switch (h) {
    case 0xc0:
        it->type = PL_MP_NIL;
        return 0;
    case 0xc2:
    case 0xc3:
        it->type = PL_MP_BOOL;
        it->u = h == 0xc3;
        return 0;
    case 0xc4:
    case 0xc5:
    case 0xc6:
        return number(c, 1u << (h - 0xc4), &n) ? PL_ESYNTAX : bytes(c, it, PL_MP_BIN, n);
    case 0xc7:
    case 0xc8:
    case 0xc9:
        if (number(c, 1u << (h - 0xc7), &n) || c->p >= c->end)
            return PL_ESYNTAX;
        c->p++; /* the type */
        return bytes(c, it, PL_MP_EXT, n);
    case 0xca:
        return real(c, it, 4);
    case 0xcb:
        return real(c, it, 8);
    case 0xcc:
    case 0xcd:
    case 0xce:
    case 0xcf:
        it->type = PL_MP_UINT;
        return number(c, 1u << (h - 0xcc), &it->u);
    case 0xd0:
    case 0xd1:
    case 0xd2:
    case 0xd3:
        return signed_number(c, it, 1u << (h - 0xd0));
    case 0xd4:
    case 0xd5:
    case 0xd6:
    case 0xd7:
    case 0xd8:
        if (c->p >= c->end)
            return PL_ESYNTAX;
        c->p++;
        return bytes(c, it, PL_MP_EXT, 1u << (h - 0xd4));
    case 0xd9:
    case 0xda:
    case 0xdb:
        return number(c, 1u << (h - 0xd9), &n) ? PL_ESYNTAX : bytes(c, it, PL_MP_STR, n);
    case 0xdc:
    case 0xdd:
        return number(c, h == 0xdc ? 2 : 4, &n) ? PL_ESYNTAX : container(c, it, PL_MP_ARRAY, n);
    case 0xde:
    case 0xdf:
        return number(c, h == 0xde ? 2 : 4, &n) ? PL_ESYNTAX : container(c, it, PL_MP_MAP, n);
    default: /* 0xc1 */
        return PL_ESYNTAX;
    }
}

/* Bytes of a value whose first byte tells them all; 0: it does not. */
static inline unsigned fixed_size(uint8_t head)
{
    if (head <= 0x7f || head >= 0xe0)
        return 1;
    static const uint8_t size[32] = {
        [0x00] = 1, [0x02] = 1, [0x03] = 1, [0x0a] = 5, [0x0b] = 9, [0x0c] = 2, [0x0d] = 3,
        [0x0e] = 5, [0x0f] = 9, [0x10] = 2, [0x11] = 3, [0x12] = 5, [0x13] = 9};
    return head >= 0xc0 ? size[head - 0xc0] : 0;
}

int pl_mp_skip(pl_mp *c, uint64_t n)
{
    while (n) {
        /* tokens and hashes, nearly all there is to skip */
        unsigned k;
        while (n && c->p < c->end && (k = fixed_size(*c->p)) && (size_t)(c->end - c->p) >= k) {
            c->p += k;
            n--;
        }
        if (n == 0)
            break;
        /* never more values than bytes: so n stays below their number and cannot overflow */
        if (n > (uint64_t)(c->end - c->p))
            return PL_ESYNTAX;
        pl_mp_item it;
        if (pl_mp_read(c, &it))
            return PL_ESYNTAX;
        n--;
        if (it.type == PL_MP_ARRAY)
            n += it.n;
        else if (it.type == PL_MP_MAP)
            n += 2 * (uint64_t)it.n;
    }
    return 0;
}

int pl_mp_skip_inside(pl_mp *c, const pl_mp_item *it)
{
    if (it->type == PL_MP_ARRAY)
        return pl_mp_skip(c, it->n);
    return it->type == PL_MP_MAP ? pl_mp_skip(c, 2 * (uint64_t)it->n) : 0;
}

/* --- writing --- */

/* A head byte and n big-endian bytes of v. */
static int put(pl_buf *b, uint8_t head, uint64_t v, unsigned n)
{
    uint8_t out[9] = {head};
    for (unsigned i = 0; i < n; i++)
        out[1 + i] = (uint8_t)(v >> 8 * (n - 1 - i));
    return pl_buf_add(b, out, 1 + n);
}

int pl_mp_put_nil(pl_buf *b)
{
    return put(b, 0xc0, 0, 0);
}

int pl_mp_put_bool(pl_buf *b, bool v)
{
    return put(b, v ? 0xc3 : 0xc2, 0, 0);
}

int pl_mp_put_uint(pl_buf *b, uint64_t v)
{
    if (v <= 0x7f)
        return put(b, (uint8_t)v, 0, 0);
    if (v <= UINT16_MAX)
        return put(b, 0xcd, v, 2);
    return v <= UINT32_MAX ? put(b, 0xce, v, 4) : put(b, 0xcf, v, 8);
}

int pl_mp_put_int(pl_buf *b, int64_t v)
{
    return v < 0 ? put(b, 0xd3, (uint64_t)v, 8) : pl_mp_put_uint(b, (uint64_t)v);
}

int pl_mp_put_real(pl_buf *b, double v)
{
    uint64_t u;
    memcpy(&u, &v, sizeof u);
    return put(b, 0xcb, u, 8);
}

int pl_mp_put_str(pl_buf *b, pl_str s)
{
    if (s.n > UINT32_MAX)
        return PL_ELIMIT;
    int rc = s.n <= 31 ? put(b, (uint8_t)(0xa0 | s.n), 0, 0) : put(b, 0xdb, s.n, 4);
    return rc || s.n == 0 ? rc : pl_buf_add(b, s.p, s.n);
}

int pl_mp_put_array(pl_buf *b, uint32_t n)
{
    return n <= 15 ? put(b, (uint8_t)(0x90 | n), 0, 0) : put(b, 0xdd, n, 4);
}

int pl_mp_put_map(pl_buf *b, uint32_t n)
{
    return n <= 15 ? put(b, (uint8_t)(0x80 | n), 0, 0) : put(b, 0xdf, n, 4);
}

int pl_mp_put_open(pl_buf *b, bool map, size_t *at)
{
    *at = b->n;
    return put(b, map ? 0xdf : 0xdd, 0, 4);
}

void pl_mp_patch(pl_buf *b, size_t at, uint32_t n)
{
    for (unsigned i = 0; i < 4; i++)
        b->p[at + 1 + i] = (char)(n >> 8 * (3 - i));
}
