/* An intrusive binary min-heap with removal from the middle: the engine's waiting queue and the
 * prefix cache's eviction order. Items are embedded in what they order; the heap owns only its
 * array. Equal keys never occur in either use, so the order is total and runs repeat exactly. */
#ifndef PL_HEAP_H
#define PL_HEAP_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct pl_heap_item {
    uint64_t major, minor; /* smallest first; change them only while the item is outside */
    int at;                /* 1 + its place in the array; 0 when outside */
} pl_heap_item;

typedef struct pl_heap {
    pl_heap_item **v;
    int n, cap;
} pl_heap;

static inline bool pl_heap_before(const pl_heap_item *a, const pl_heap_item *b)
{
    return a->major != b->major ? a->major < b->major : a->minor < b->minor;
}

static inline void pl_heap_put(pl_heap *h, int i, pl_heap_item *it)
{
    h->v[i] = it;
    it->at = i + 1;
}

/* Moves the item at i up or down to where it belongs. */
static inline void pl_heap_settle(pl_heap *h, int i)
{
    pl_heap_item *it = h->v[i];
    for (; i > 0 && pl_heap_before(it, h->v[(i - 1) / 2]); i = (i - 1) / 2)
        pl_heap_put(h, i, h->v[(i - 1) / 2]);
    for (;;) {
        int c = 2 * i + 1;
        if (c + 1 < h->n && pl_heap_before(h->v[c + 1], h->v[c]))
            c++;
        if (c >= h->n || !pl_heap_before(h->v[c], it))
            break;
        pl_heap_put(h, i, h->v[c]);
        i = c;
    }
    pl_heap_put(h, i, it);
}

/* Room for n items in all, so that pushes up to there cannot fail. */
static inline bool pl_heap_reserve(pl_heap *h, int n)
{
    if (n <= h->cap)
        return true;
    int cap = h->cap ? h->cap : 64;
    while (cap < n)
        cap *= 2;
    pl_heap_item **v = realloc(h->v, (size_t)cap * sizeof *v);
    if (!v)
        return false;
    h->v = v;
    h->cap = cap;
    return true;
}

/* There must be room. */
static inline void pl_heap_push(pl_heap *h, pl_heap_item *it)
{
    h->v[h->n++] = it;
    pl_heap_settle(h, h->n - 1);
}

static inline void pl_heap_remove(pl_heap *h, pl_heap_item *it)
{
    int i = it->at - 1;
    it->at = 0;
    pl_heap_item *last = h->v[--h->n];
    if (last != it) {
        h->v[i] = last;
        pl_heap_settle(h, i);
    }
}

static inline pl_heap_item *pl_heap_top(const pl_heap *h)
{
    return h->n ? h->v[0] : NULL;
}

#endif
