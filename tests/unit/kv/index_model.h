/* The KV index as one would write it without a thought for speed: a node for each block, and for
 * each worker and tier a table of names. The differential tests and the benchmark's long mode put
 * the real one beside it. For one thread; runs out of memory by abort. */
#ifndef PL_TEST_INDEX_MODEL_H
#define PL_TEST_INDEX_MODEL_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "kv/index.h"

/* (a, b) -> two numbers; all zero is as good as absent */
typedef struct model_cell {
    uint64_t a, b;
    uint32_t node, count;
    bool used;
} model_cell;
typedef struct model_map {
    model_cell *cell;
    size_t mask, used;
} model_map;

typedef struct model {
    model_map children; /* (parent node, local) -> node */
    model_map names;    /* (place, engine hash) -> node, copies */
    model_map holds;    /* (place, node) -> -, names */
    uint32_t *space_of; /* by node */
    uint32_t nodes;
    uint32_t life[4096 * PL_TIERS]; /* a clear begins the next: what was there is forgotten */
    uint64_t entries[4096];
} model;

static inline model_cell *model_at(model_map *m, uint64_t a, uint64_t b)
{
    if (m->used * 2 >= m->mask) {
        model_map old = *m;
        m->mask = old.mask ? old.mask * 2 + 1 : 1023;
        m->used = 0;
        if (!(m->cell = calloc(m->mask + 1, sizeof *m->cell)))
            abort();
        for (size_t i = 0; old.cell && i <= old.mask; i++)
            if (old.cell[i].used)
                *model_at(m, old.cell[i].a, old.cell[i].b) = old.cell[i];
        free(old.cell);
    }
    uint64_t h = (a * 0x9e3779b97f4a7c15u ^ b) * 0xd6e8feb86659fd93u;
    size_t i = (h ^ h >> 32) & m->mask;
    for (; m->cell[i].used; i = (i + 1) & m->mask)
        if (m->cell[i].a == a && m->cell[i].b == b)
            return &m->cell[i];
    m->used++;
    m->cell[i] = (model_cell){.a = a, .b = b, .used = true};
    return &m->cell[i];
}

static inline uint64_t model_place(const model *m, int slot, int tier)
{
    uint32_t place = (uint32_t)slot * PL_TIERS + (uint32_t)tier;
    return (uint64_t)m->life[place] << 32 | place;
}

static inline uint32_t model_child(model *m, uint32_t parent, uint32_t space, uint64_t local,
                                   bool make)
{
    /* nodes from 1; the root of a space is beyond all of them */
    model_cell *c = model_at(&m->children, parent ? parent : 0x100000000u + space, local);
    if (c->node == 0 && make) {
        c->node = ++m->nodes;
        if ((m->nodes & (m->nodes - 1)) == 0 &&
            !(m->space_of = realloc(m->space_of, 2 * m->nodes * sizeof *m->space_of)))
            abort();
        m->space_of[c->node] = space;
    }
    return c->node;
}

static inline void model_drop(model *m, int slot, int tier, uint32_t node)
{
    model_cell *c = model_at(&m->holds, model_place(m, slot, tier), node);
    if (--c->count == 0)
        m->entries[slot]--;
}

/* The worker has the node in the tier under that name. */
static inline void model_name(model *m, int slot, int tier, uint64_t name, uint32_t node)
{
    model_cell *c = model_at(&m->names, model_place(m, slot, tier), name);
    if (c->count && c->node == node) {
        c->count++;
        return;
    }
    uint32_t old = c->count ? c->node : 0;
    c->node = node;
    c->count = 1;
    if (model_at(&m->holds, model_place(m, slot, tier), node)->count++ == 0)
        m->entries[slot]++;
    if (old)
        model_drop(m, slot, tier, old);
}

static inline int model_store(model *m, uint32_t space, int slot, pl_tier tier,
                              const uint64_t *parent, const uint64_t *engine, const uint64_t *local,
                              size_t n)
{
    uint32_t node = 0;
    for (int t = 0; parent && !node && t < PL_TIERS; t++) {
        model_cell *c = model_at(&m->names, model_place(m, slot, t), *parent);
        if (c->count && m->space_of[c->node] == space)
            node = c->node;
    }
    if (parent && !node)
        return PL_ENOTFOUND;
    for (size_t i = 0; i < n; i++) {
        node = model_child(m, node, space, local[i], true);
        model_name(m, slot, tier, engine[i], node);
    }
    return 0;
}

static inline size_t model_remove(model *m, int slot, pl_tier tier, const uint64_t *engine,
                                  size_t n)
{
    size_t known = 0;
    for (size_t i = 0; i < n; i++) {
        model_cell *c = model_at(&m->names, model_place(m, slot, tier), engine[i]);
        if (c->count == 0)
            continue;
        known++;
        if (--c->count == 0)
            model_drop(m, slot, tier, c->node);
    }
    return known;
}

/* The node of that name in the nearest tier; 0: none. */
static inline uint32_t model_known(model *m, int slot, uint64_t name)
{
    for (int t = 0; t < PL_TIERS; t++) {
        model_cell *c = model_at(&m->names, model_place(m, slot, t), name);
        if (c->count)
            return c->node;
    }
    return 0;
}

static inline uint32_t model_space_of(model *m, int slot, uint64_t name)
{
    uint32_t node = model_known(m, slot, name);
    return node ? m->space_of[node] : 0;
}

static inline size_t model_also(model *m, int slot, pl_tier tier, const uint64_t *engine, size_t n)
{
    size_t known = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t node = model_known(m, slot, engine[i]);
        known += node != 0;
        if (node)
            model_name(m, slot, tier, engine[i], node);
    }
    return known;
}

/* The names are in ascending order. */
static inline size_t model_keep(model *m, int slot, const uint64_t *engine, size_t n)
{
    uint64_t before = m->entries[slot];
    for (size_t i = 0; m->names.cell && i <= m->names.mask; i++) {
        model_cell *c = &m->names.cell[i];
        int t = 0;
        while (t < PL_TIERS && (!c->count || c->a != model_place(m, slot, t)))
            t++;
        if (t == PL_TIERS)
            continue;
        size_t lo = 0, hi = n;
        while (lo < hi) {
            size_t mid = (lo + hi) / 2;
            if (engine[mid] < c->b)
                lo = mid + 1;
            else
                hi = mid;
        }
        c->count = lo < n && engine[lo] == c->b;
        if (!c->count)
            model_drop(m, slot, t, c->node);
    }
    return (size_t)(before - m->entries[slot]);
}

static inline void model_clear(model *m, int slot, int tier)
{
    for (int t = 0; t < PL_TIERS; t++) {
        if (tier >= 0 && t != tier)
            continue;
        for (size_t i = 0; i <= m->holds.mask && m->holds.cell; i++)
            if (m->holds.cell[i].used && m->holds.cell[i].a == model_place(m, slot, t))
                m->entries[slot] -= m->holds.cell[i].count > 0;
        m->life[slot * PL_TIERS + t]++;
    }
}

/* blocks[] of one worker; false when it does not hold the first block. */
static inline bool model_match(model *m, uint32_t space, int slot, const uint64_t *local, size_t n,
                               uint32_t blocks[PL_TIERS])
{
    bool on[PL_TIERS] = {true, true, true, true};
    memset(blocks, 0, PL_TIERS * sizeof *blocks);
    uint32_t node = 0;
    for (size_t i = 0; i < n && on[PL_TIERS - 1]; i++) {
        if (!(node = model_child(m, node, space, local[i], false)))
            break;
        bool held = false;
        for (int t = 0; t < PL_TIERS; t++) {
            held = held || model_at(&m->holds, model_place(m, slot, t), node)->count > 0;
            if ((on[t] = on[t] && held))
                blocks[t]++;
        }
    }
    return blocks[PL_TIERS - 1] > 0;
}

static inline void model_free(model *m)
{
    free(m->children.cell);
    free(m->names.cell);
    free(m->holds.cell);
    free(m->space_of);
    free(m);
}

#endif
