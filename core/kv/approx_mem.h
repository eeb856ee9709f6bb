/* Memory for approximate mode (approx_tree.c, its only caller): many small pieces that come and go
 * by the hundred thousand. From malloc, freeing the last of them can make it give all of the heap
 * back to the kernel in one call, which takes a millisecond for every 10 MB; here no call gives
 * back more than 64 KiB, or the one piece that is larger. Thread-safe. */
#ifndef PL_APPROX_MEM_H
#define PL_APPROX_MEM_H

#include <pthread.h>
#include <stddef.h>

enum { PL_APPROX_MEM_CLASSES = 31 };

typedef struct pl_approx_slab pl_approx_slab;

typedef struct pl_approx_mem {
    pthread_mutex_t lock;
    pl_approx_slab *partial[PL_APPROX_MEM_CLASSES]; /* slabs with a free piece */
} pl_approx_mem;

void pl_approx_mem_init(pl_approx_mem *m);
void pl_approx_mem_destroy(pl_approx_mem *m); /* all pieces are freed */

/* 16-byte aligned; NULL when out of memory. */
void *pl_approx_mem_get(pl_approx_mem *m, size_t n);
void pl_approx_mem_put(pl_approx_mem *m, void *p); /* NULL is fine */
/* What a piece can hold: at least what was asked for. */
size_t pl_approx_mem_size(const void *p);

#endif
