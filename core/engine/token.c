/* Tokens of the simulated engine: see token.h. Called by its HTTP front; pure functions. */
#include "engine/token.h"

#include <stdlib.h>

#include "base/err.h"

enum { MOST = 1000000000 };

static int reserve(pl_tokens *t, size_t more)
{
    if (more > (size_t)(MOST - t->n))
        return PL_ELIMIT;
    int need = t->n + (int)more;
    if (need <= t->cap)
        return 0;
    int cap = t->cap < MOST / 2 && t->cap * 2 > need ? t->cap * 2 : need + 64;
    uint32_t *v = realloc(t->v, (size_t)cap * sizeof *v);
    if (!v)
        return PL_ENOMEM;
    t->v = v;
    t->cap = cap;
    return 0;
}

int pl_tokens_add(pl_tokens *t, uint32_t id)
{
    int rc = reserve(t, 1);
    if (rc == 0)
        t->v[t->n++] = id;
    return rc;
}

int pl_tokens_mark(pl_tokens *t, pl_mark m)
{
    return pl_tokens_add(t, pl_mark_id(m));
}

static bool continues(char c)
{
    return ((unsigned char)c & 0xc0) == 0x80;
}

int pl_tokens_text(pl_tokens *t, pl_str s)
{
    int rc = reserve(t, s.n);
    for (size_t i = 0; rc == 0 && i < s.n;) {
        size_t n = s.n - i < 4 ? s.n - i : 4;
        while (n > 1 && i + n < s.n && continues(s.p[i + n]))
            n--;
        uint32_t id = 0;
        for (size_t k = 0; k < n; k++)
            id |= (uint32_t)(unsigned char)s.p[i + k] << (8 * k);
        t->v[t->n++] = id;
        i += n;
    }
    return rc;
}

int pl_tokens_to_text(const uint32_t *ids, int n, pl_buf *out)
{
    static const char *const marks[PL_MARK_COUNT] = {"system", "user", "assistant", "tool",
                                                     "role",   "name", "tools",     "call",
                                                     "media",  "text", "end"};
    pl_buf raw = {0};
    int rc = pl_buf_reserve(&raw, (size_t)n * 4 + 1);
    for (int i = 0; i < n && rc == 0; i++) {
        uint32_t mark = (ids[i] >> 8) - 1;
        if ((ids[i] & 0xff) == 0xff && mark < PL_MARK_COUNT) {
            rc = pl_buf_addf(&raw, "<|%s|>", marks[mark]);
            continue;
        }
        char bytes[4];
        size_t len = 0;
        for (uint32_t rest = ids[i]; rest; rest >>= 8)
            bytes[len++] = (char)rest;
        rc = pl_buf_add(&raw, bytes, len);
    }
    pl_str left = pl_buf_str(&raw);
    for (size_t bad; rc == 0 && left.n;) {
        bool whole = pl_str_utf8(left, &bad);
        rc = pl_buf_add(out, left.p, whole ? left.n : bad);
        if (rc == 0 && !whole)
            rc = pl_buf_add(out, "\xef\xbf\xbd", 3);
        size_t step = whole ? left.n : bad + 1;
        left.p += step;
        left.n -= step;
    }
    pl_buf_free(&raw);
    return rc;
}
