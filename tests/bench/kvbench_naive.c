/* The index that the others are multiples of: see kvbench.h. A node for each block with a set of
 * 256 workers; one table (parent node, local hash) -> node, one (worker, engine hash) -> node; a
 * query looks up block by block. It never frees a node. Kept as plain as it is on purpose. */
#include "kvbench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct set {
    uint64_t w[4];
} set;
typedef struct cell {
    uint64_t a, b;
    uint32_t node, used;
} cell;
typedef struct table {
    cell *cell;
    uint64_t mask, n;
} table;
struct kvbench_naive {
    table child, named;
    set *holders;
    uint32_t nodes, cap;
};

static inline uint64_t home(const table *t, uint64_t a, uint64_t b)
{
    uint64_t h = (a ^ b * 0x9e3779b97f4a7c15u) * 0xd6e8feb86659fd93u;
    return (h ^ h >> 32) & t->mask;
}

static inline uint32_t *lookup(const table *t, uint64_t a, uint64_t b)
{
    for (uint64_t i = home(t, a, b);; i = (i + 1) & t->mask) {
        if (!t->cell[i].used)
            return NULL;
        if (t->cell[i].a == a && t->cell[i].b == b)
            return &t->cell[i].node;
    }
}

static void make(table *t, uint64_t cells)
{
    t->mask = cells - 1;
    t->n = 0;
    if (!(t->cell = calloc(cells, sizeof *t->cell)))
        exit(1);
}

static void put(table *t, uint64_t a, uint64_t b, uint32_t node)
{
    if ((t->n + 1) * 4 > (t->mask + 1) * 3) {
        table old = *t;
        make(t, 2 * (old.mask + 1));
        for (uint64_t i = 0; i <= old.mask; i++)
            if (old.cell[i].used)
                put(t, old.cell[i].a, old.cell[i].b, old.cell[i].node);
        free(old.cell);
    }
    uint64_t i = home(t, a, b);
    for (; t->cell[i].used; i = (i + 1) & t->mask)
        if (t->cell[i].a == a && t->cell[i].b == b) {
            t->cell[i].node = node;
            return;
        }
    t->cell[i] = (cell){a, b, node, 1};
    t->n++;
}

static void take_out(table *t, uint64_t a, uint64_t b)
{
    uint64_t i = home(t, a, b);
    for (; t->cell[i].a != a || t->cell[i].b != b; i = (i + 1) & t->mask)
        if (!t->cell[i].used)
            return;
    for (uint64_t j = (i + 1) & t->mask; t->cell[j].used; j = (j + 1) & t->mask) {
        uint64_t k = home(t, t->cell[j].a, t->cell[j].b);
        if (((j - k) & t->mask) >= ((j - i) & t->mask)) {
            t->cell[i] = t->cell[j];
            i = j;
        }
    }
    t->cell[i].used = 0;
    t->n--;
}

kvbench_naive *kvbench_naive_new(void)
{
    kvbench_naive *x = calloc(1, sizeof *x);
    if (!x)
        exit(1);
    x->nodes = 1;
    make(&x->child, 1024);
    make(&x->named, 1024);
    return x;
}

void kvbench_naive_free(kvbench_naive *x)
{
    free(x->child.cell);
    free(x->named.cell);
    free(x->holders);
    free(x);
}

void kvbench_naive_store(kvbench_naive *x, const kvbench_op *op)
{
    uint32_t node = 0;
    if (op->has_parent) {
        uint32_t *at = lookup(&x->named, op->aux, op->worker);
        if (!at)
            exit(1);
        node = *at;
    }
    for (uint32_t i = 0; i < op->n; i++) {
        uint64_t local = op->p[2 * i], name = op->p[2 * i + 1];
        uint32_t *at = lookup(&x->child, local, node), id;
        if (at) {
            id = *at;
        } else {
            if (x->nodes >= x->cap) {
                x->cap = x->cap ? x->cap * 2 : 1024;
                if (!(x->holders = realloc(x->holders, x->cap * sizeof *x->holders)))
                    exit(1);
            }
            id = x->nodes++;
            memset(&x->holders[id], 0, sizeof *x->holders);
            put(&x->child, local, node, id);
        }
        x->holders[id].w[op->worker / 64] |= 1ull << op->worker % 64;
        put(&x->named, name, op->worker, id);
        node = id;
    }
}

void kvbench_naive_remove(kvbench_naive *x, const kvbench_op *op)
{
    for (uint32_t i = 0; i < op->n; i++) {
        uint32_t *at = lookup(&x->named, op->p[i], op->worker);
        if (!at)
            exit(1);
        x->holders[*at].w[op->worker / 64] &= ~(1ull << op->worker % 64);
        take_out(&x->named, op->p[i], op->worker);
    }
}

uint32_t kvbench_naive_query(const kvbench_naive *x, const kvbench_op *op, kvbench_score *out)
{
    set active;
    memset(&active, 0xff, sizeof active);
    uint32_t node = 0, depth = 0, k = 0;
    for (; depth < op->n; depth++) {
        const uint32_t *at = lookup(&x->child, op->p[depth], node);
        set held = {{0}};
        if (at)
            held = x->holders[node = *at];
        uint64_t any = 0;
        for (uint32_t j = 0; j < 4; j++) {
            uint64_t lost = depth ? active.w[j] & ~held.w[j] : 0;
            for (; lost; lost &= lost - 1)
                out[k++] = (kvbench_score){j * 64 + (uint32_t)__builtin_ctzll(lost), depth};
            any |= active.w[j] &= held.w[j];
        }
        if (!any)
            return k;
    }
    for (uint32_t j = 0; j < 4; j++)
        for (uint64_t a = active.w[j]; a; a &= a - 1)
            out[k++] = (kvbench_score){j * 64 + (uint32_t)__builtin_ctzll(a), depth};
    return k;
}
