/* (ptr,len) strings. No state; callable from any thread. */
#include "base/str.h"

#include <errno.h>
#include <math.h>
#include <openssl/crypto.h>
#include <stdlib.h>

#include "base/err.h"

static unsigned char lower(unsigned char c)
{
    return c >= 'A' && c <= 'Z' ? (unsigned char)(c + 32) : c;
}

bool pl_str_ieq(pl_str a, pl_str b)
{
    if (a.n != b.n)
        return false;
    for (size_t i = 0; i < a.n; i++)
        if (lower((unsigned char)a.p[i]) != lower((unsigned char)b.p[i]))
            return false;
    return true;
}

bool pl_str_starts(pl_str s, pl_str prefix)
{
    return s.n >= prefix.n && (prefix.n == 0 || memcmp(s.p, prefix.p, prefix.n) == 0);
}

bool pl_str_ends(pl_str s, pl_str suffix)
{
    return s.n >= suffix.n &&
           (suffix.n == 0 || memcmp(s.p + s.n - suffix.n, suffix.p, suffix.n) == 0);
}

pl_str pl_str_trim(pl_str s)
{
    while (s.n && (s.p[0] == ' ' || s.p[0] == '\t')) {
        s.p++;
        s.n--;
    }
    while (s.n && (s.p[s.n - 1] == ' ' || s.p[s.n - 1] == '\t'))
        s.n--;
    return s;
}

int pl_str_u64(pl_str s, uint64_t max, uint64_t *out)
{
    if (s.n == 0)
        return PL_ESYNTAX;
    uint64_t v = 0;
    bool too_big = false;
    for (size_t i = 0; i < s.n; i++) {
        unsigned d = (unsigned)((unsigned char)s.p[i] - '0');
        if (d > 9)
            return PL_ESYNTAX;
        too_big = too_big || v > (UINT64_MAX - d) / 10;
        v = v * 10 + d;
    }
    if (too_big || v > max)
        return PL_ELIMIT;
    *out = v;
    return 0;
}

int pl_str_double(pl_str s, double *out)
{
    char tmp[64];
    if (s.n == 0 || s.n >= sizeof tmp)
        return PL_ESYNTAX;
    for (size_t i = 0; i < s.n; i++)
        if (!s.p[i] || !strchr("0123456789+-.eE", s.p[i]))
            return PL_ESYNTAX;
    memcpy(tmp, s.p, s.n);
    tmp[s.n] = 0;
    char *end;
    double v = strtod(tmp, &end);
    if (*end || !isfinite(v))
        return PL_ESYNTAX;
    *out = v;
    return 0;
}

char *pl_str_dup(pl_str s)
{
    char *p = malloc(s.n + 1);
    if (!p)
        return NULL;
    if (s.n)
        memcpy(p, s.p, s.n);
    p[s.n] = 0;
    return p;
}

bool pl_str_cut(pl_str *rest, char sep, pl_str *head)
{
    if (!rest->p)
        return false;
    const char *at = rest->n ? memchr(rest->p, sep, rest->n) : NULL;
    if (!at) {
        *head = *rest;
        *rest = (pl_str){NULL, 0};
        return true;
    }
    *head = (pl_str){rest->p, (size_t)(at - rest->p)};
    rest->n -= head->n + 1;
    rest->p = at + 1;
    return true;
}

bool pl_str_utf8(pl_str s, size_t *bad)
{
    const unsigned char *p = (const unsigned char *)s.p;
    size_t i = 0;
    while (i < s.n) {
        unsigned char c = p[i];
        size_t len = c < 0x80                 ? 1
                     : c >= 0xc2 && c <= 0xdf ? 2
                     : (c & 0xf0) == 0xe0     ? 3
                     : c >= 0xf0 && c <= 0xf4 ? 4
                                              : 0;
        bool ok = len && s.n - i >= len;
        for (size_t k = 1; ok && k < len; k++)
            ok = (p[i + k] & 0xc0) == 0x80;
        /* overlong forms, surrogates and code points above U+10FFFF show in the second byte */
        if (ok && len == 3)
            ok = !(c == 0xe0 && p[i + 1] < 0xa0) && !(c == 0xed && p[i + 1] > 0x9f);
        if (ok && len == 4)
            ok = !(c == 0xf0 && p[i + 1] < 0x90) && !(c == 0xf4 && p[i + 1] > 0x8f);
        if (!ok) {
            if (bad)
                *bad = i;
            return false;
        }
        i += len;
    }
    return true;
}

pl_str pl_str_clip(pl_str s, size_t most)
{
    if (s.n <= most)
        return s;
    while (most && ((unsigned char)s.p[most] & 0xc0) == 0x80)
        most--;
    return (pl_str){s.p, most};
}

bool pl_str_eq_secret(pl_str a, pl_str b)
{
    return a.n == b.n && (a.n == 0 || CRYPTO_memcmp(a.p, b.p, a.n) == 0);
}
