/* Writes msgpack for tests from a short notation, so that a test shows the event it sends:
 *
 *     pack(&b, "[f[['BlockStored',[u],n,[1,2,3,4],4,n,'GPU']],0]", 1.5, (uint64_t)7)
 *
 * [ ] array, { } map (values in turn: key, value), 'text', n nil, t true, digits and -digits
 * integers; from the arguments: f double, u uint64_t, i int64_t, s const char *, b (const void *,
 * int) bytes, # (int) an array of that many uint32_t counting up from the next int argument. */
#ifndef PL_TEST_PACK_H
#define PL_TEST_PACK_H

#include <ctype.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "kv/msgpack.h"

#define PACK_MUST(x)                                                                               \
    do {                                                                                           \
        if (!(x))                                                                                  \
            abort();                                                                               \
    } while (0)

static inline void pack(pl_buf *b, const char *f, ...)
{
    size_t at[16];
    uint32_t n[16];
    bool map[16];
    int depth = 0;
    va_list ap;
    va_start(ap, f);
    for (; *f; f++) {
        if (*f == ',' || *f == ' ' || *f == ':')
            continue;
        if (*f == ']' || *f == '}') {
            depth--;
            pl_mp_patch(b, at[depth], map[depth] ? n[depth] / 2 : n[depth]);
            continue;
        }
        if (depth)
            n[depth - 1]++;
        if (*f == '[' || *f == '{') {
            map[depth] = *f == '{';
            n[depth] = 0;
            PACK_MUST(pl_mp_put_open(b, map[depth], &at[depth]) == 0);
            depth++;
        } else if (*f == '\'') {
            const char *end = strchr(f + 1, '\'');
            PACK_MUST(pl_mp_put_str(b, (pl_str){f + 1, (size_t)(end - f - 1)}) == 0);
            f = end;
        } else if (isdigit((unsigned char)*f) || *f == '-') {
            char *end;
            PACK_MUST(pl_mp_put_int(b, strtoll(f, &end, 10)) == 0);
            f = end - 1;
        } else if (*f == 'n') {
            PACK_MUST(pl_mp_put_nil(b) == 0);
        } else if (*f == 't') {
            PACK_MUST(pl_mp_put_bool(b, true) == 0);
        } else if (*f == 'f') {
            PACK_MUST(pl_mp_put_real(b, va_arg(ap, double)) == 0);
        } else if (*f == 'u') {
            PACK_MUST(pl_mp_put_uint(b, va_arg(ap, uint64_t)) == 0);
        } else if (*f == 'i') {
            PACK_MUST(pl_mp_put_int(b, va_arg(ap, int64_t)) == 0);
        } else if (*f == 's') {
            PACK_MUST(pl_mp_put_str(b, pl_str_c(va_arg(ap, const char *))) == 0);
        } else if (*f == 'b') {
            const void *p = va_arg(ap, const void *);
            int len = va_arg(ap, int);
            uint8_t head[2] = {0xc4, (uint8_t)len};
            PACK_MUST(pl_buf_add(b, head, 2) == 0 && pl_buf_add(b, p, (size_t)len) == 0);
        } else if (*f == '#') {
            int count = va_arg(ap, int), from = va_arg(ap, int);
            PACK_MUST(pl_mp_put_array(b, (uint32_t)count) == 0);
            for (int i = 0; i < count; i++)
                PACK_MUST(pl_mp_put_uint(b, (uint64_t)(from + i)) == 0);
        } else {
            abort();
        }
    }
    va_end(ap);
}

#endif
