/* Random events for the KV index and its model: conversations that branch, in several spaces, on
 * several workers and tiers, with what goes wrong in life: holes, duplicates, names that mean
 * another block than before, second names, blocks that go to a further tier by name, lists of all
 * that a worker has, clears, unknown parents. What it makes depends on its
 * seed only. */
#ifndef PL_TEST_INDEX_STORM_H
#define PL_TEST_INDEX_STORM_H

#include "base/rng.h"
#include "index_model.h"

enum { STORM_CHAINS = 48, STORM_DEPTH = 96, STORM_SPACES = 3 };

typedef struct storm {
    pl_rng rng;
    int workers;
    bool honest;   /* a name always means the same block */
    uint32_t wide; /* local hashes are below it: the smaller the more branches meet */
    struct {
        uint32_t space_number, n; /* 0 .. STORM_SPACES - 1 */
        uint64_t local[STORM_DEPTH], name[STORM_DEPTH];
    } chain[STORM_CHAINS];
} storm;

typedef enum storm_kind {
    STORM_STORE,
    STORM_ALSO,
    STORM_KEEP,
    STORM_REMOVE,
    STORM_CLEAR,
    STORM_QUERY
} storm_kind;

typedef struct storm_op {
    storm_kind kind;
    uint32_t space_number;
    int slot, tier; /* tier -1: all, of a clear */
    bool has_parent;
    uint64_t parent;
    uint64_t local[STORM_DEPTH];
    uint64_t name[STORM_CHAINS * STORM_DEPTH]; /* more than STORM_DEPTH: to be kept */
    size_t n;
} storm_op;

static inline uint64_t storm_name(storm *s, uint64_t before, uint64_t local, uint32_t space)
{
    uint64_t h = (before * 3 + (local + 1) * 0x9e3779b97f4a7c15u + space) * 0xd6e8feb86659fd93u;
    if (!s->honest && pl_rng_below(&s->rng, 40) == 0)
        return pl_rng_below(&s->rng, 64); /* few of them: they meet */
    return h ^ h >> 32;
}

/* Chain c from block `from` on becomes new, behind the first `from` blocks of another. */
static inline void storm_renew(storm *s, uint32_t c)
{
    uint32_t of = pl_rng_below(&s->rng, STORM_CHAINS), from = 0;
    if (s->chain[of].n && pl_rng_below(&s->rng, 4)) {
        from = pl_rng_below(&s->rng, s->chain[of].n + 1);
        s->chain[c] = s->chain[of];
    } else {
        s->chain[c].space_number = pl_rng_below(&s->rng, STORM_SPACES);
    }
    uint32_t n = from + 1 + pl_rng_below(&s->rng, 24);
    if (n > STORM_DEPTH)
        n = STORM_DEPTH;
    for (uint32_t i = from; i < n; i++) {
        s->chain[c].local[i] = pl_rng_below(&s->rng, s->wide);
        s->chain[c].name[i] = storm_name(s, i ? s->chain[c].name[i - 1] : 0, s->chain[c].local[i],
                                         s->chain[c].space_number);
    }
    s->chain[c].n = n;
}

static inline int storm_by_value(const void *x, const void *y)
{
    uint64_t a = *(const uint64_t *)x, b = *(const uint64_t *)y;
    return a < b ? -1 : a > b;
}

/* Some of all chains, some of them twice. */
static inline void storm_list(storm *s, storm_op *op)
{
    uint32_t most = pl_rng_below(&s->rng, 8);
    op->kind = STORM_KEEP;
    op->n = 0;
    for (uint32_t c = 0; most && c < STORM_CHAINS; c++) {
        uint32_t n = s->chain[c].n;
        if (n && pl_rng_below(&s->rng, most) == 0)
            n = pl_rng_below(&s->rng, n);
        for (uint32_t i = 0; i < n; i++)
            op->name[op->n++] = s->chain[c].name[i];
    }
    qsort(op->name, op->n, sizeof *op->name, storm_by_value);
}

static inline void storm_next(storm *s, storm_op *op)
{
    uint32_t c = pl_rng_below(&s->rng, STORM_CHAINS);
    if (s->chain[c].n == 0 || pl_rng_below(&s->rng, 30) == 0)
        storm_renew(s, c);
    uint32_t n = s->chain[c].n, a = pl_rng_below(&s->rng, n);
    uint32_t b = a + 1 + pl_rng_below(&s->rng, n - a), kind = pl_rng_below(&s->rng, 1000);
    op->space_number = s->chain[c].space_number;
    op->slot = (int)pl_rng_below(&s->rng, (uint32_t)s->workers);
    uint32_t t = pl_rng_below(&s->rng, 16);
    op->tier = t < 12 ? 0 : (int)t - 12;
    if (kind < 2) {
        op->kind = STORM_CLEAR;
        op->tier = (int)pl_rng_below(&s->rng, 5) - 1;
        return;
    }
    if (kind < 3) {
        storm_list(s, op);
        return;
    }
    if (kind < 400) {
        op->kind = kind < 60 ? STORM_ALSO : STORM_STORE;
        if (op->kind == STORM_ALSO)
            op->tier = (int)pl_rng_below(&s->rng, 4);
        if (pl_rng_below(&s->rng, 2)) /* engines store from where they have something */
            a = 0;
    } else if (kind < 700) {
        op->kind = STORM_REMOVE;
        if (pl_rng_below(&s->rng, 2))
            b = n; /* and drop the last first */
    } else {
        op->kind = STORM_QUERY;
        a = 0;
    }
    op->n = b - a;
    op->has_parent = a > 0;
    op->parent = a ? s->chain[c].name[a - 1] : 0;
    bool backwards = op->kind == STORM_REMOVE && pl_rng_below(&s->rng, 2);
    for (uint32_t i = 0; i < b - a; i++) {
        uint32_t from = backwards ? b - 1 - i : a + i;
        op->local[i] = s->chain[c].local[from];
        op->name[i] = s->chain[c].name[from];
    }
    if (op->kind == STORM_QUERY && pl_rng_below(&s->rng, 4) == 0)
        op->local[pl_rng_below(&s->rng, b)] = pl_rng_below(&s->rng, s->wide);
}

/* NULL when the index and the model agree on everything; else what they disagree on. */
static inline const char *storm_check(pl_index_reader *r, model *m, uint32_t space,
                                      const storm_op *op, int workers)
{
    static pl_match out[4096];
    static bool seen[4096];
    memset(seen, 0, sizeof seen);
    int n = pl_index_match(r, space, op->local, op->n, out, workers);
    uint32_t want[PL_TIERS];
    for (int i = 0; i < n; i++) {
        if (out[i].slot < 0 || out[i].slot >= workers || seen[out[i].slot])
            return "a worker that does not exist, or twice";
        seen[out[i].slot] = true;
        if (!model_match(m, space, out[i].slot, op->local, op->n, want))
            return "a worker that holds nothing of it";
        if (memcmp(want, out[i].blocks, sizeof want) != 0)
            return "how much a worker holds";
    }
    for (int w = 0; w < workers; w++)
        if (!seen[w] && model_match(m, space, w, op->local, op->n, want))
            return "a worker is missing";
    return NULL;
}

/* Applies an event and returns what the call does; a query is none. */
static inline int64_t storm_index(pl_index *ix, uint32_t space, const storm_op *op)
{
    const uint64_t *parent = op->has_parent ? &op->parent : NULL;
    pl_tier tier = (pl_tier)op->tier;
    switch (op->kind) {
    case STORM_STORE:
        return pl_index_store(ix, space, op->slot, tier, parent, op->name, op->local, op->n);
    case STORM_ALSO:
        return (int64_t)pl_index_also(ix, op->slot, tier, op->name, op->n);
    case STORM_KEEP:
        return (int64_t)pl_index_keep(ix, op->slot, op->name, op->n);
    case STORM_REMOVE:
        return (int64_t)pl_index_remove(ix, op->slot, tier, op->name, op->n);
    case STORM_CLEAR:
        pl_index_clear(ix, op->slot, op->tier);
        return 0;
    case STORM_QUERY:
        return 0;
    }
    return 0;
}

static inline int64_t storm_model(model *m, uint32_t space, const storm_op *op)
{
    const uint64_t *parent = op->has_parent ? &op->parent : NULL;
    pl_tier tier = (pl_tier)op->tier;
    switch (op->kind) {
    case STORM_STORE:
        return model_store(m, space, op->slot, tier, parent, op->name, op->local, op->n);
    case STORM_ALSO:
        return (int64_t)model_also(m, op->slot, tier, op->name, op->n);
    case STORM_KEEP:
        return (int64_t)model_keep(m, op->slot, op->name, op->n);
    case STORM_REMOVE:
        return (int64_t)model_remove(m, op->slot, tier, op->name, op->n);
    case STORM_CLEAR:
        model_clear(m, op->slot, op->tier);
        return 0;
    case STORM_QUERY:
        return 0;
    }
    return 0;
}

/* Applies one event to both. NULL when they agree. */
static inline const char *storm_apply(pl_index *ix, pl_index_reader *r, model *m,
                                      const pl_index_space *space, const storm_op *op, int workers)
{
    static const char *const what[] = {
        [STORM_STORE] = "what a store returns",
        [STORM_ALSO] = "how many blocks are in a tier too",
        [STORM_KEEP] = "how many entries were not kept",
        [STORM_REMOVE] = "what a removal returns",
        [STORM_CLEAR] = "a clear",
        [STORM_QUERY] = "a query",
    };
    uint32_t s = space[op->space_number];
    if (storm_index(ix, s, op) != storm_model(m, s, op))
        return what[op->kind];
    if (op->kind != STORM_QUERY)
        return NULL;
    if (pl_index_entries(ix, op->slot) != m->entries[op->slot])
        return "a worker's number of entries";
    uint64_t seed;
    for (size_t i = 0; i < op->n; i++)
        if (pl_index_space_of(ix, op->slot, op->name[i], &seed) !=
            model_space_of(m, op->slot, op->name[i]))
            return "the space of a name";
    return storm_check(r, m, s, op, workers);
}

#endif
