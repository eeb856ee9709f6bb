/* A bump allocator that frees everything at once: one per request, one per configuration. Not
 * thread-safe. Chunks are malloc'd; a large allocation gets a chunk of its own. */
#ifndef PL_ARENA_H
#define PL_ARENA_H

#include <stddef.h>

#include "base/str.h"

typedef struct pl_arena_chunk pl_arena_chunk;

typedef struct pl_arena {
    pl_arena_chunk *head; /* chunk being filled; NULL until the first allocation */
    size_t used_bytes;    /* sum of what was asked for */
} pl_arena;

#define PL_ARENA_INIT                                                                              \
    {                                                                                              \
        NULL, 0                                                                                    \
    }

/* 16-byte aligned, uninitialised; NULL when out of memory. */
void *pl_arena_alloc(pl_arena *a, size_t n) __attribute__((warn_unused_result));
void *pl_arena_zalloc(pl_arena *a, size_t n) __attribute__((warn_unused_result));

/* A copy in the arena, NUL-terminated past .n; .p is NULL when out of memory. */
pl_str pl_arena_str(pl_arena *a, pl_str s);

/* Formats into the arena; .p is NULL when out of memory. */
pl_str pl_arena_printf(pl_arena *a, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Frees every chunk but the first (kept for reuse). */
void pl_arena_reset(pl_arena *a);
void pl_arena_free(pl_arena *a);

#endif
