/* A growable byte buffer on the heap. Zero-initialise, pl_buf_free when done. Not thread-safe. */
#ifndef PL_BUF_H
#define PL_BUF_H

#include <stddef.h>

#include "base/str.h"

typedef struct pl_buf {
    char *p;
    size_t n;   /* bytes in use */
    size_t cap; /* bytes allocated */
} pl_buf;

/* Room for `more` bytes past n. 0 or PL_ENOMEM (the contents stay as they were). */
int pl_buf_reserve(pl_buf *b, size_t more) __attribute__((warn_unused_result));
int pl_buf_add(pl_buf *b, const void *p, size_t n) __attribute__((warn_unused_result));
int pl_buf_addf(pl_buf *b, const char *fmt, ...)
    __attribute__((warn_unused_result, format(printf, 2, 3)));

/* Drops the first n bytes. */
void pl_buf_shift(pl_buf *b, size_t n);
void pl_buf_free(pl_buf *b);

static inline pl_str pl_buf_str(const pl_buf *b)
{
    return (pl_str){b->p, b->n};
}

#endif
