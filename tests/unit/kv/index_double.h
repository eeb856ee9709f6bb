/* An index for tests of what writes into one: as naive as can be, and it checks its callers. It
 * takes the place of the real one at link time, in the test that includes this file. Worker slots
 * below DOUBLE_SLOTS. Any thread may ask; everything is under one lock. */
#ifndef PL_TEST_INDEX_DOUBLE_H
#define PL_TEST_INDEX_DOUBLE_H

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "kv/apply.h"
#include "kv/index.h"

enum { DOUBLE_SLOTS = 16, DOUBLE_ENTRIES = 40000, DOUBLE_SPACES = 64 };

typedef struct double_entry {
    int slot;
    uint64_t engine, local, parent, seed;
    bool has_parent;
    pl_index_space space;
    int copies[PL_TIERS];
} double_entry;

static struct {
    pthread_mutex_t lock;
    double_entry e[DOUBLE_ENTRIES];
    size_t n;
    char space[DOUBLE_SPACES][256]; /* "model/block_tokens[/eagle]/lora" */
    size_t spaces;
    size_t clears[DOUBLE_SLOTS], stores, largest_store;
    int refuse; /* what the next stores return */
} index_double = {.lock = PTHREAD_MUTEX_INITIALIZER};

#define DOUBLE_LOCKED                                                                              \
    for (int once_ = (pthread_mutex_lock(&index_double.lock), 1); once_;                           \
         once_ = 0, pthread_mutex_unlock(&index_double.lock))

static inline void double_reset(void)
{
    DOUBLE_LOCKED
    {
        index_double.n = index_double.spaces = index_double.stores = 0;
        index_double.largest_store = 0;
        index_double.refuse = 0;
        memset(index_double.clears, 0, sizeof index_double.clears);
    }
}

static double_entry *double_find(int slot, uint64_t engine)
{
    for (size_t i = 0; i < index_double.n; i++)
        if (index_double.e[i].slot == slot && index_double.e[i].engine == engine)
            return &index_double.e[i];
    return NULL;
}

static void double_drop(double_entry *e)
{
    *e = index_double.e[--index_double.n];
}

/* --- what tests ask --- */

/* A copy; engine 0 when there is none. */
static inline double_entry double_get(int slot, uint64_t engine)
{
    double_entry out = {0};
    DOUBLE_LOCKED
    {
        double_entry *e = double_find(slot, engine);
        if (e)
            out = *e;
    }
    return out;
}

static inline bool double_has(int slot, pl_tier tier, uint64_t engine)
{
    return double_get(slot, engine).copies[tier] > 0;
}

static inline size_t double_count(int slot)
{
    size_t n = 0;
    DOUBLE_LOCKED for (size_t i = 0; i < index_double.n; i++) n += index_double.e[i].slot == slot;
    return n;
}

static inline size_t double_clears(int slot)
{
    size_t n = 0;
    DOUBLE_LOCKED n = index_double.clears[slot];
    return n;
}

static inline const char *double_space(pl_index_space id)
{
    return id ? index_double.space[id - 1] : "none";
}

/* --- the index --- */

static inline pl_index_space double_open(pl_str model, uint32_t block_tokens, bool eagle,
                                         pl_str lora)
{
    char name[256];
    snprintf(name, sizeof name, "%.*s/%u%s/%.*s", PL_FMT(model), block_tokens,
             eagle ? "/eagle" : "", PL_FMT(lora));
    for (size_t i = 0; i < index_double.spaces; i++)
        if (strcmp(index_double.space[i], name) == 0)
            return (pl_index_space)i + 1;
    if (index_double.spaces == DOUBLE_SPACES)
        return 0;
    strcpy(index_double.space[index_double.spaces++], name);
    return (pl_index_space)index_double.spaces;
}

pl_index_space pl_index_space_open(pl_index *ix, pl_str model, uint32_t block_tokens, bool eagle,
                                   pl_str lora)
{
    (void)ix;
    pl_index_space id = 0;
    DOUBLE_LOCKED id = double_open(model, block_tokens, eagle, lora);
    return id;
}

int pl_index_store(pl_index *ix, pl_index_space space, int slot, pl_tier tier,
                   const uint64_t *parent, const uint64_t *engine, const uint64_t *local, size_t n)
{
    (void)ix;
    int rc = 0;
    if (space == 0 || slot < 0 || slot >= DOUBLE_SLOTS || (int)tier < 0 || (int)tier >= PL_TIERS ||
        !n)
        abort();
    DOUBLE_LOCKED
    {
        index_double.stores++;
        if (n > index_double.largest_store)
            index_double.largest_store = n;
        rc = index_double.refuse;
        const double_entry *p = parent ? double_find(slot, *parent) : NULL;
        if (rc == 0 && parent && (!p || p->space != space))
            rc = PL_ENOTFOUND;
        if (rc == 0 && index_double.n + n > DOUBLE_ENTRIES)
            rc = PL_ELIMIT;
        uint64_t seed = p ? p->seed : 0;
        for (size_t i = 0; rc == 0 && i < n; i++) {
            double_entry *e = double_find(slot, engine[i]);
            if (!e) {
                e = &index_double.e[index_double.n++];
                *e = (double_entry){.slot = slot, .engine = engine[i]};
            }
            e->local = local[i];
            e->space = space;
            e->seed = seed;
            e->has_parent = i > 0 || parent;
            e->parent = i > 0 ? engine[i - 1] : parent ? *parent : 0;
            e->copies[tier]++;
        }
    }
    return rc;
}

size_t pl_index_remove(pl_index *ix, int slot, pl_tier tier, const uint64_t *engine, size_t n)
{
    (void)ix;
    size_t known = 0;
    DOUBLE_LOCKED for (size_t i = 0; i < n; i++)
    {
        double_entry *e = double_find(slot, engine[i]);
        if (!e || !e->copies[tier])
            continue;
        known++;
        e->copies[tier]--;
        bool left = false;
        for (int t = 0; t < PL_TIERS; t++)
            left |= e->copies[t] > 0;
        if (!left)
            double_drop(e);
    }
    return known;
}

void pl_index_clear(pl_index *ix, int slot, int tier)
{
    (void)ix;
    if (tier != -1 || slot < 0 || slot >= DOUBLE_SLOTS)
        abort();
    DOUBLE_LOCKED
    {
        index_double.clears[slot]++;
        for (size_t i = index_double.n; i-- > 0;)
            if (index_double.e[i].slot == slot)
                double_drop(&index_double.e[i]);
    }
}

bool pl_index_maintain(pl_index *ix)
{
    (void)ix;
    return false;
}

/* --- what goes beyond index.h --- */

static pl_index_space double_space_of(void *ctx, int slot, uint64_t engine, uint64_t *seed)
{
    (void)ctx;
    const double_entry e = double_get(slot, engine);
    *seed = e.seed;
    return e.space;
}

/* As in the real one, the blocks that were stored with the first one have it, too. */
static void double_begins(void *ctx, int slot, uint64_t engine, uint64_t seed)
{
    (void)ctx;
    DOUBLE_LOCKED for (double_entry *e = double_find(slot, engine); e;)
    {
        e->seed = seed;
        engine = e->engine;
        e = NULL;
        for (size_t i = 0; i < index_double.n && !e; i++)
            if (index_double.e[i].slot == slot && index_double.e[i].has_parent &&
                index_double.e[i].parent == engine && index_double.e[i].seed != seed)
                e = &index_double.e[i];
    }
}

static size_t double_also(void *ctx, int slot, pl_tier tier, const uint64_t *engine, size_t n)
{
    (void)ctx;
    size_t known = 0;
    DOUBLE_LOCKED for (size_t i = 0; i < n; i++)
    {
        double_entry *e = double_find(slot, engine[i]);
        if (e) {
            known++;
            e->copies[tier]++;
        }
    }
    return known;
}

static size_t double_keep(void *ctx, int slot, const uint64_t *engine, size_t n)
{
    (void)ctx;
    size_t dropped = 0;
    DOUBLE_LOCKED for (size_t i = index_double.n; i-- > 0;)
    {
        bool keep = index_double.e[i].slot != slot;
        for (size_t j = 0; j < n && !keep; j++)
            keep = engine[j] == index_double.e[i].engine;
        if (!keep) {
            dropped++;
            double_drop(&index_double.e[i]);
        }
    }
    return dropped;
}

static const pl_known double_known = {
    .space_of = double_space_of, .begins = double_begins, .also = double_also, .keep = double_keep};

#endif
