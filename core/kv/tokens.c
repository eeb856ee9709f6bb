/* Shared token ids: see tokens.h. Used by tokens_cache.c and by whoever got ids from it. */
#include "kv/tokens.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

struct pl_tokens {
    _Atomic uint32_t refs;
    uint32_t n, total; /* own ones; with the parents' */
    pl_tokens *parent;
    _Atomic uint64_t *bytes;
    uint32_t ids[];
};

static size_t size_of(size_t n)
{
    return sizeof(pl_tokens) + n * sizeof(uint32_t);
}

pl_tokens *pl_tokens_new(pl_tokens *parent, const uint32_t *ids, size_t n, _Atomic uint64_t *bytes)
{
    size_t total = n + (parent ? parent->total : 0);
    pl_tokens *t = total < UINT32_MAX ? malloc(size_of(n)) : NULL;
    if (!t)
        return NULL;
    atomic_init(&t->refs, 1);
    t->n = (uint32_t)n;
    t->total = (uint32_t)total;
    t->parent = parent ? pl_tokens_ref(parent) : NULL;
    t->bytes = bytes;
    if (n)
        memcpy(t->ids, ids, n * sizeof *ids);
    atomic_fetch_add_explicit(bytes, size_of(n), memory_order_relaxed);
    return t;
}

pl_tokens *pl_tokens_ref(pl_tokens *t)
{
    atomic_fetch_add_explicit(&t->refs, 1, memory_order_relaxed);
    return t;
}

void pl_tokens_release(pl_tokens *t)
{
    while (t && atomic_fetch_sub_explicit(&t->refs, 1, memory_order_acq_rel) == 1) {
        pl_tokens *parent = t->parent;
        atomic_fetch_sub_explicit(t->bytes, size_of(t->n), memory_order_relaxed);
        free(t);
        t = parent; /* a loop: conversations may have thousands of turns */
    }
}

size_t pl_tokens_count(const pl_tokens *t)
{
    return t->total;
}

void pl_tokens_copy(const pl_tokens *t, uint32_t *out)
{
    for (; t; t = t->parent)
        if (t->n)
            memcpy(out + (t->total - t->n), t->ids, t->n * sizeof *out);
}

bool pl_tokens_begin(const pl_tokens *t, const uint32_t *ids, size_t n)
{
    if (t->total > n)
        return false;
    for (; t; t = t->parent)
        if (t->n && memcmp(ids + (t->total - t->n), t->ids, t->n * sizeof *ids) != 0)
            return false;
    return true;
}

bool pl_tokens_same_addition(const pl_tokens *a, const pl_tokens *b)
{
    return a->parent == b->parent && a->n == b->n &&
           (a->n == 0 || memcmp(a->ids, b->ids, a->n * sizeof *a->ids) == 0);
}
