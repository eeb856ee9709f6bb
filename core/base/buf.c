/* Growable buffer: see buf.h. Grows by doubling. */
#include "base/buf.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/err.h"

int pl_buf_reserve(pl_buf *b, size_t more)
{
    if (b->cap - b->n >= more)
        return 0;
    if (more > SIZE_MAX / 2 - b->n)
        return PL_ENOMEM;
    size_t cap = b->cap ? b->cap : 256;
    while (cap < b->n + more)
        cap *= 2;
    char *p = realloc(b->p, cap);
    if (!p)
        return PL_ENOMEM;
    b->p = p;
    b->cap = cap;
    return 0;
}

int pl_buf_add(pl_buf *b, const void *p, size_t n)
{
    int rc = pl_buf_reserve(b, n);
    if (rc == 0 && n) {
        memcpy(b->p + b->n, p, n);
        b->n += n;
    }
    return rc;
}

int pl_buf_addf(pl_buf *b, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    va_list again;
    va_copy(again, ap);
    int n = vsnprintf(b->p ? b->p + b->n : NULL, b->cap - b->n, fmt, ap);
    va_end(ap);
    int rc = n < 0 ? PL_EINVALID : 0;
    if (rc == 0 && (size_t)n >= b->cap - b->n) {
        rc = pl_buf_reserve(b, (size_t)n + 1);
        if (rc == 0)
            vsnprintf(b->p + b->n, (size_t)n + 1, fmt, again);
    }
    va_end(again);
    if (rc == 0)
        b->n += (size_t)n;
    return rc;
}

void pl_buf_shift(pl_buf *b, size_t n)
{
    if (n >= b->n) {
        b->n = 0;
        return;
    }
    memmove(b->p, b->p + n, b->n - n);
    b->n -= n;
}

void pl_buf_free(pl_buf *b)
{
    free(b->p);
    *b = (pl_buf){NULL, 0, 0};
}
