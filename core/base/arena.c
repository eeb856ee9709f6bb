/* Arena: see arena.h. The chunk list is newest first; only the newest is bumped. */
#include "base/arena.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define CHUNK_BYTES 4096

struct pl_arena_chunk {
    pl_arena_chunk *next;
    size_t used;
    size_t cap;
    size_t pad; /* keeps data 16-byte aligned */
    char data[];
};

static pl_arena_chunk *chunk_new(size_t cap, pl_arena_chunk *next)
{
    pl_arena_chunk *c = malloc(sizeof *c + cap);
    if (!c)
        return NULL;
    c->next = next;
    c->used = 0;
    c->cap = cap;
    return c;
}

void *pl_arena_alloc(pl_arena *a, size_t n)
{
    if (n > SIZE_MAX / 2)
        return NULL;
    n = (n + 15) & ~(size_t)15;
    pl_arena_chunk *c = a->head;
    if (!c || c->cap - c->used < n) {
        if (c && n > CHUNK_BYTES / 4) {
            /* a big one goes behind the head, so that the head's room stays in use */
            pl_arena_chunk *big = chunk_new(n, c->next);
            if (!big)
                return NULL;
            c->next = big;
            big->used = n;
            a->used_bytes += n;
            return big->data;
        }
        size_t cap = CHUNK_BYTES - sizeof(pl_arena_chunk);
        c = chunk_new(n > cap ? n : cap, a->head);
        if (!c)
            return NULL;
        a->head = c;
    }
    void *p = c->data + c->used;
    c->used += n;
    a->used_bytes += n;
    return p;
}

void *pl_arena_zalloc(pl_arena *a, size_t n)
{
    void *p = pl_arena_alloc(a, n);
    if (p)
        memset(p, 0, n);
    return p;
}

pl_str pl_arena_str(pl_arena *a, pl_str s)
{
    char *p = pl_arena_alloc(a, s.n + 1);
    if (!p)
        return (pl_str){NULL, 0};
    if (s.n)
        memcpy(p, s.p, s.n);
    p[s.n] = 0;
    return (pl_str){p, s.n};
}

pl_str pl_arena_printf(pl_arena *a, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    va_list again;
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    char *p = n < 0 ? NULL : pl_arena_alloc(a, (size_t)n + 1);
    if (p)
        vsnprintf(p, (size_t)n + 1, fmt, again);
    va_end(again);
    return (pl_str){p, p ? (size_t)n : 0};
}

void pl_arena_reset(pl_arena *a)
{
    pl_arena_chunk *keep = NULL;
    for (pl_arena_chunk *c = a->head, *next; c; c = next) {
        next = c->next;
        if (!next && c->cap <= CHUNK_BYTES) {
            keep = c;
            keep->used = 0;
            break;
        }
        free(c);
    }
    a->head = keep;
    a->used_bytes = 0;
}

void pl_arena_free(pl_arena *a)
{
    for (pl_arena_chunk *c = a->head, *next; c; c = next) {
        next = c->next;
        free(c);
    }
    a->head = NULL;
    a->used_bytes = 0;
}
