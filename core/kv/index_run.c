/* Runs of blocks and how they hang together: bodies, the table of children, freeing what nothing
 * needs. Called by the index's writer; readers walk what is published here (index_read.c). Who
 * holds which stretch of a run is index_stretch.c's. Invariants: see index.c. */
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "kv/index_impl.h"

enum { CHILDREN_MIN = 64, DIR_MIN = 64 };
#define DELETED 1u

static size_t run_bytes(uint32_t cap)
{
    return sizeof(pl_ix_run) + cap * sizeof(uint64_t);
}

static size_t children_bytes(uint64_t cap)
{
    return sizeof(pl_ix_children) + cap * sizeof(uint64_t);
}

/* --- the table of children --- */

static pl_ix_children *children(const pl_index *ix)
{
    return atomic_load_explicit((_Atomic(pl_ix_children *) *)&ix->children, memory_order_relaxed);
}

static uint64_t word_of(const pl_ix_run *r, uint64_t hash)
{
    return (hash >> 48) << 48 | (uint64_t)(uintptr_t)r;
}

static uint64_t hash_of(const pl_ix_run *r)
{
    return pl_ix_child_hash(r->parent, r->at, r->local[0]);
}

static void put(pl_ix_children *c, const pl_ix_run *r)
{
    uint64_t h = hash_of(r), i = h & c->mask, s;
    while ((s = atomic_load_explicit(&c->slot[i], memory_order_relaxed)) > DELETED)
        i = (i + 1) & c->mask;
    c->used += s == 0;
    c->live++;
    atomic_store_explicit(&c->slot[i], word_of(r, h), memory_order_release);
}

/* Where the run lies in the table. It does. */
static _Atomic uint64_t *place_of(const pl_index *ix, const pl_ix_run *r)
{
    pl_ix_children *c = children(ix);
    uint64_t h = hash_of(r), i = h & c->mask, word = word_of(r, h);
    while (atomic_load_explicit(&c->slot[i], memory_order_relaxed) != word)
        i = (i + 1) & c->mask;
    return &c->slot[i];
}

static int room_for_child(pl_index *ix)
{
    pl_ix_children *old = children(ix);
    if (old && (old->used + 1) * 8 <= (old->mask + 1) * 5)
        return 0;
    uint64_t live = old ? old->live : 0, cap = CHILDREN_MIN;
    while (live * 5 >= cap * 2)
        cap *= 2;
    pl_ix_children *c = pl_ix_zalloc(ix, children_bytes(cap));
    if (!c)
        return PL_ENOMEM;
    c->mask = cap - 1;
    for (uint64_t i = 0; old && i <= old->mask; i++) {
        uint64_t s = atomic_load_explicit(&old->slot[i], memory_order_relaxed);
        if (s > DELETED)
            put(c, (const pl_ix_run *)(uintptr_t)(s & 0xffffffffffffu));
    }
    atomic_store_explicit(&ix->children, c, memory_order_release);
    if (old)
        pl_ix_retire(ix, old, children_bytes(old->mask + 1), PL_IX_PLAIN, 0);
    return 0;
}

/* --- bodies --- */

int pl_ix_runs_init(pl_index *ix)
{
    ix->dir_n = 1; /* 0 is no run */
    return room_for_child(ix);
}

static int new_id(pl_index *ix, uint32_t *id)
{
    if (ix->dir_free) {
        *id = ix->dir_free;
        ix->dir_free = ix->dir[*id].refs;
        return 0;
    }
    if (ix->dir_n >= ix->dir_cap) {
        if (ix->dir_n >= PL_IX_ROOT)
            return PL_ELIMIT;
        uint32_t cap = ix->dir_cap ? ix->dir_cap + ix->dir_cap / 2 : DIR_MIN;
        pl_ix_dir *d = pl_ix_alloc(ix, cap * sizeof *d);
        if (!d)
            return PL_ENOMEM;
        if (ix->dir)
            memcpy(d, ix->dir, ix->dir_n * sizeof *d);
        pl_ix_free(ix, ix->dir, ix->dir_cap * sizeof *d);
        ix->dir = d;
        ix->dir_cap = cap;
    }
    *id = ix->dir_n++;
    return 0;
}

int pl_ix_run_new(pl_index *ix, uint32_t parent, uint32_t at, uint32_t space, const uint64_t *local,
                  uint32_t n, uint32_t *id)
{
    int err = room_for_child(ix);
    pl_ix_run *r = err ? NULL : pl_ix_alloc(ix, run_bytes(n));
    if (!r)
        return PL_ENOMEM;
    if ((err = new_id(ix, id)) != 0) {
        pl_ix_free(ix, r, run_bytes(n));
        return err;
    }
    *r = (pl_ix_run){.id = *id,
                     .parent = parent,
                     .space = (uint16_t)space,
                     .at = (uint16_t)at,
                     .cap = (uint16_t)n,
                     .n = (uint16_t)n};
    atomic_init(&r->seen, atomic_load_explicit(&ix->tick, memory_order_relaxed));
    memcpy(r->local, local, n * sizeof *local);
    ix->dir[*id] = (pl_ix_dir){.run = r, .seed = parent & PL_IX_ROOT ? 0 : ix->dir[parent].seed};
    if (!(parent & PL_IX_ROOT)) {
        ix->dir[parent].children++;
        pl_ix_run *p = ix->dir[parent].run;
        if ((p->child_end & ~PL_IX_KEEP) < at)
            p->child_end = (uint16_t)((p->child_end & PL_IX_KEEP) | at);
        atomic_store_explicit(&p->fork, (uint16_t)at, memory_order_relaxed);
    }
    put(children(ix), r);
    pl_ix_count(&ix->blocks, n);
    return 0;
}

/* Gives the run a new body with room for cap blocks and the first keep of its blocks. */
static int move(pl_index *ix, uint32_t id, uint32_t keep, uint32_t cap)
{
    pl_ix_run *old = ix->dir[id].run, *r = pl_ix_alloc(ix, run_bytes(cap));
    if (!r)
        return PL_ENOMEM;
    *r = (pl_ix_run){.id = id,
                     .parent = old->parent,
                     .space = old->space,
                     .at = old->at,
                     .cap = (uint16_t)cap,
                     .n = (uint16_t)keep,
                     .child_end = old->child_end};
    atomic_init(&r->held, atomic_load_explicit(&old->held, memory_order_relaxed));
    atomic_init(&r->seen, atomic_load_explicit(&old->seen, memory_order_relaxed));
    atomic_init(&r->fork, atomic_load_explicit(&old->fork, memory_order_relaxed));
    memcpy(r->local, old->local, keep * sizeof *r->local);
    pl_ix_count(&ix->blocks, (int64_t)keep - old->n);
    ix->dir[id].run = r;
    atomic_store_explicit(place_of(ix, old), word_of(r, hash_of(r)), memory_order_release);
    pl_ix_retire(ix, old, run_bytes(old->cap), PL_IX_PLAIN, 0);
    return 0;
}

int pl_ix_run_append(pl_index *ix, uint32_t id, uint32_t keep, const uint64_t *local, uint32_t n)
{
    pl_ix_run *r = ix->dir[id].run;
    if (keep < r->n || keep + n > r->cap) {
        uint32_t cap = keep + n;
        if (cap > r->cap) { /* it grows: a quarter more, in whole lines */
            cap = ((cap + cap / 4 + 3) & ~7u) + 4;
            if (cap > PL_IX_RUN_MAX)
                cap = PL_IX_RUN_MAX;
        }
        int err = move(ix, id, keep, cap);
        if (err)
            return err;
        r = ix->dir[id].run;
    }
    memcpy(r->local + keep, local, n * sizeof *local);
    r->n = (uint16_t)(keep + n);
    pl_ix_count(&ix->blocks, n);
    return 0;
}

uint32_t pl_ix_run_needed(const pl_index *ix, uint32_t id)
{
    const pl_ix_run *r = ix->dir[id].run;
    if (r->child_end & PL_IX_KEEP)
        return r->n;
    pl_ix_view v;
    pl_ix_look(r, &v);
    uint32_t n = v.n ? v.of[v.n - 1].end : 0;
    if (ix->dir[id].children && r->child_end > n)
        n = r->child_end;
    return n ? n : 1; /* its first block is its name in the table */
}

static void detach(pl_index *ix, pl_ix_run *r)
{
    atomic_store_explicit(place_of(ix, r), DELETED, memory_order_release);
    children(ix)->live--;
    pl_ix_count(&ix->blocks, -(int64_t)r->n);
    if (!(r->parent & PL_IX_ROOT)) {
        ix->dir[r->parent].children--;
        if (ix->dir[r->parent].children == 0)
            ix->dir[r->parent].run->child_end &= PL_IX_KEEP;
    }
}

void pl_ix_run_prune(pl_index *ix, uint32_t id)
{
    while (ix->dir[id].refs == 0 && ix->dir[id].children == 0) {
        pl_ix_run *r = ix->dir[id].run;
        uint32_t parent = r->parent;
        detach(ix, r);
        pl_ix_stretches_clear(ix, r);
        ix->dir[id].run = NULL;
        pl_ix_retire(ix, r, run_bytes(r->cap), PL_IX_RUN_ID, id);
        if (parent & PL_IX_ROOT)
            return;
        id = parent;
    }
    uint32_t n = ix->dir[id].run->n, needed = pl_ix_run_needed(ix, id);
    if (n >= 16 && needed < n / 2)
        (void)move(ix, id, needed, needed); /* failed: it stays as it is */
}

void pl_ix_run_condemn(pl_index *ix, uint32_t id)
{
    pl_ix_run *r = ix->dir[id].run;
    uint32_t parent = r->parent;
    detach(ix, r);
    pl_ix_stretches_clear(ix, r);
    ix->dir[id].run = NULL;
    bool named = ix->dir[id].refs > 0;
    pl_ix_retire(ix, r, run_bytes(r->cap), named ? PL_IX_PLAIN : PL_IX_RUN_ID, id);
    if (!(parent & PL_IX_ROOT))
        pl_ix_run_prune(ix, parent);
}

void pl_ix_dir_release(pl_index *ix, uint32_t id)
{
    pl_ix_retire(ix, NULL, 0, PL_IX_RUN_ID, id);
}

void pl_ix_runs_free(pl_index *ix)
{
    for (uint32_t i = 1; i < ix->dir_n; i++) {
        pl_ix_run *r = ix->dir[i].run;
        if (!r)
            continue;
        pl_ix_stretches_clear(ix, r);
        pl_ix_free(ix, r, run_bytes(r->cap));
        ix->dir[i].run = NULL;
    }
    pl_ix_reclaim_all(ix);
    pl_ix_free(ix, ix->dir, ix->dir_cap * sizeof *ix->dir);
    if (children(ix))
        pl_ix_free(ix, children(ix), children_bytes(children(ix)->mask + 1));
}
