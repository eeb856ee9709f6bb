/* A cursor over msgpack bytes that builds nothing: it reads one head after the other, so what a
 * peer announces costs nothing before its bytes are there. (The library's own unpacker allocates
 * 24 bytes for each element that an array claims to have.) Pure, no allocation, constant stack. */
#ifndef PL_MSGPACK_H
#define PL_MSGPACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/buf.h"
#include "base/str.h"

typedef struct pl_mp {
    const uint8_t *p, *end;
} pl_mp;

typedef enum pl_mp_type {
    PL_MP_NIL,
    PL_MP_BOOL,
    PL_MP_UINT,  /* u: 0 and above, whichever way it was encoded */
    PL_MP_INT,   /* i: below 0 */
    PL_MP_REAL,  /* f */
    PL_MP_STR,   /* s; not checked to be UTF-8 */
    PL_MP_BIN,   /* s */
    PL_MP_EXT,   /* s, without its type byte */
    PL_MP_ARRAY, /* n elements follow */
    PL_MP_MAP    /* n pairs follow */
} pl_mp_type;

typedef struct pl_mp_item {
    pl_mp_type type;
    uint32_t n;
    union {
        uint64_t u; /* of BOOL: 0 or 1 */
        int64_t i;
        double f;
    };
    pl_str s; /* in the bytes read */
} pl_mp_item;

static inline pl_mp pl_mp_of(const void *p, size_t n)
{
    return (pl_mp){p, (const uint8_t *)p + n};
}

/* Reads the next head; strings and the like are consumed whole, of containers only the head is. 0,
 * or PL_ESYNTAX at the end of the bytes, on the one unused byte and when a length or a count cannot
 * be true with the bytes left (the cursor is then anywhere). */
int pl_mp_read(pl_mp *c, pl_mp_item *it) __attribute__((warn_unused_result));

/* Takes a number of 0 and above in one of the ways that engines write them. False: it is something
 * else, or near the end of the bytes: nothing was taken, pl_mp_read tells. */
static inline bool pl_mp_fast_uint(pl_mp *c, uint64_t *v)
{
    const uint8_t *p = c->p;
    if (c->end - p < 9)
        return false;
    uint16_t v16;
    uint32_t v32;
    uint64_t v64;
    if (*p <= 0x7f) {
        *v = *p;
        c->p += 1;
    } else if (*p == 0xcd) {
        memcpy(&v16, p + 1, sizeof v16);
        *v = __builtin_bswap16(v16);
        c->p += 3;
    } else if (*p == 0xce) {
        memcpy(&v32, p + 1, sizeof v32);
        *v = __builtin_bswap32(v32);
        c->p += 5;
    } else if (*p == 0xcf) {
        memcpy(&v64, p + 1, sizeof v64);
        *v = __builtin_bswap64(v64);
        c->p += 9;
    } else {
        return false;
    }
    return true;
}

/* Steps over n values, whatever they contain; in time linear in their bytes. 0 or PL_ESYNTAX. */
int pl_mp_skip(pl_mp *c, uint64_t n) __attribute__((warn_unused_result));

/* Steps over what it contains, when it is a container that was just read. */
int pl_mp_skip_inside(pl_mp *c, const pl_mp_item *it) __attribute__((warn_unused_result));

/* Writing, for what the router itself has to say in msgpack. 0 or PL_ENOMEM. */
int pl_mp_put_nil(pl_buf *b) __attribute__((warn_unused_result));
int pl_mp_put_bool(pl_buf *b, bool v) __attribute__((warn_unused_result));
int pl_mp_put_uint(pl_buf *b, uint64_t v) __attribute__((warn_unused_result));
int pl_mp_put_int(pl_buf *b, int64_t v) __attribute__((warn_unused_result));
int pl_mp_put_real(pl_buf *b, double v) __attribute__((warn_unused_result));
int pl_mp_put_str(pl_buf *b, pl_str s) __attribute__((warn_unused_result));
int pl_mp_put_array(pl_buf *b, uint32_t n) __attribute__((warn_unused_result));
int pl_mp_put_map(pl_buf *b, uint32_t n) __attribute__((warn_unused_result));
/* As above, with a count that pl_mp_patch sets later: *at says where. */
int pl_mp_put_open(pl_buf *b, bool map, size_t *at) __attribute__((warn_unused_result));
void pl_mp_patch(pl_buf *b, size_t at, uint32_t n);

#endif
