/* What the writer frees over time: names of past lives, and under the byte cap what was matched
 * longest ago. Called by the index's writer, in slices.
 *
 * Eviction begins at 15/16 of the cap and goes on with every store, so that the cap itself is
 * seldom reached; only there a store waits for it. It has two phases. Runs without children that
 * were not matched or stored for min_age ticks are condemned: taken out of the tree, and their
 * bodies freed. When the hand has been round and that was not enough, min_age is halved: what goes
 * is the oldest to within a factor of two. Then the maps of all holders are swept for names of
 * condemned runs and shrunk. An engine's removal of an evicted block is an unknown removal. */
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "kv/index_impl.h"

enum {
    AGE_FIRST = 4096,   /* ticks; 64 ticks are about one turnover of the index */
    NAME_BYTES = 21,    /* a name in a map, with the room beside it */
    BLOCK_BYTES = 64,   /* room that a store asks for, each block: more than it takes */
    STORE_BYTES = 4096, /* and each call */
    SWEPT = 9,          /* sixteenths: just less than a table is filled when it has grown */
    EPISODES = 16,      /* of a store that finds no room, at most */
};

/* --- past lives --- */

static void sweep_name(pl_index *ix, pl_ix_holder *h, uint32_t run)
{
    pl_ix_dir *d = &ix->dir[run];
    d->refs--;
    if (!d->run) {
        if (d->refs == 0)
            pl_ix_dir_release(ix, run);
        return;
    }
    bool changed = pl_ix_run_has(ix, run, h->id);
    if (changed) /* all of it at once: names come in no order */
        pl_ix_run_drop(ix, run, 0, d->run->n, h->id);
    if (changed || d->refs == 0)
        pl_ix_run_prune(ix, run);
}

bool pl_ix_sweep_past(pl_index *ix, uint32_t work)
{
    for (pl_ix_holder *h; (h = ix->past) != NULL;) {
        for (; h->part < h->names.parts; h->part++, h->cursor = 0) {
            const pl_ix_table *t = &h->names.part[h->part];
            uint32_t end = t->cap + PL_IX_MAP_PAD;
            for (; h->cursor < end && work; work--, h->cursor++)
                if (t->e[h->cursor].run)
                    sweep_name(ix, h, t->e[h->cursor].run);
            if (h->cursor < end)
                return true;
        }
        ix->past = h->next;
        pl_ix_holder_free(ix, h);
        atomic_fetch_sub_explicit(&ix->past_lives, 1, memory_order_release);
    }
    return false;
}

/* --- the cap --- */

/* Takes everybody's entries in the run off the counts. */
static void uncount(pl_index *ix, uint32_t run)
{
    pl_ix_view v;
    pl_ix_look(ix->dir[run].run, &v);
    uint32_t begin = 0;
    for (uint32_t i = 0; i < v.n; begin = v.of[i++].end) {
        pl_ix_set s = v.of[i].set;
        pl_ix_holder_id one = s & ~PL_IX_ONE;
        const pl_ix_holder_id *of = &one;
        uint32_t n = s != 0;
        if (s && !(s & PL_IX_ONE)) {
            const pl_ix_members *m = atomic_load_explicit(
                &atomic_load_explicit(&ix->sets, memory_order_relaxed)[s], memory_order_relaxed);
            of = m->of;
            n = m->n;
        }
        for (uint32_t j = 0; j < n; j++) {
            pl_ix_holder *h = pl_ix_holder_of(ix, of[j] >> 16);
            if (!h || h->id != of[j])
                continue;
            pl_ix_count_entries(ix, h, (int64_t)begin - v.of[i].end);
            pl_ix_count(&ix->evicted, v.of[i].end - begin);
        }
    }
}

/* The hand goes down from behind the last run to the first, 1. */
static void condemn_some(pl_index *ix, uint32_t *work)
{
    uint32_t now = atomic_load_explicit(&ix->tick, memory_order_relaxed);
    for (; ix->evict.hand > 1 && *work && ix->evict.found < ix->evict.goal; --*work) {
        uint32_t id = --ix->evict.hand;
        pl_ix_dir *d = &ix->dir[id];
        if (!d->run || d->children ||
            now - atomic_load_explicit(&d->run->seen, memory_order_relaxed) < ix->evict.min_age)
            continue;
        ix->evict.found += (uint64_t)d->refs * NAME_BYTES + sizeof(pl_ix_run) + d->run->cap * 8u;
        uncount(ix, id);
        pl_ix_run_condemn(ix, id);
    }
}

/* Sweeps a map for names of evicted runs; true when it is through. What moves under the cursor in
 * the meantime is left for the next time. */
static bool sweep_map(pl_index *ix, pl_ix_holder *h, uint32_t *work)
{
    for (; h->part < h->names.parts; h->part++, h->cursor = 0) {
        pl_ix_table *t = &h->names.part[h->part];
        while (h->cursor < t->cap + PL_IX_MAP_PAD) {
            if (!*work)
                return false;
            --*work;
            pl_ix_entry *e = &t->e[h->cursor];
            if (!e->run || ix->dir[e->run].run) {
                h->cursor++;
                continue;
            }
            uint32_t run = e->run, at = e->at_copies >> 20;
            pl_ix_map_delete(&h->names, e);
            pl_ix_forget(ix, h, run, at);
        }
        pl_ix_table_shrink(ix, t, SWEPT); /* what was swept shall count */
    }
    h->part = h->cursor = 0;
    if (h->names.n == 0)
        pl_ix_map_shrink(ix, &h->names, SWEPT);
    return true;
}

static void begin(pl_index *ix, uint64_t goal)
{
    ix->evict.phase = PL_IX_CONDEMN;
    ix->evict.hand = ix->dir_n;
    ix->evict.place = 0;
    ix->evict.goal = goal;
    ix->evict.found = 0;
    ix->evict.min_age = ix->evict.min_age ? ix->evict.min_age * 4 : AGE_FIRST;
}

bool pl_ix_evict_step(pl_index *ix, uint32_t work)
{
    if (ix->evict.phase == PL_IX_CONDEMN) {
        condemn_some(ix, &work);
        if (ix->evict.found < ix->evict.goal && ix->evict.hand > 1)
            return true;
        if (ix->evict.found < ix->evict.goal && ix->evict.min_age > 0) {
            ix->evict.min_age /= 2;
            ix->evict.hand = ix->dir_n;
            return true;
        }
        ix->evict.phase = PL_IX_SWEEP;
    }
    while (ix->evict.phase == PL_IX_SWEEP && work) {
        pl_ix_holder *h = pl_ix_holder_of(ix, ix->evict.place);
        if (h && !sweep_map(ix, h, &work))
            return true;
        if (++ix->evict.place == PL_IX_PLACES)
            ix->evict.phase = PL_IX_IDLE;
    }
    return ix->evict.phase != PL_IX_IDLE;
}

int pl_ix_evict_room(pl_index *ix, const pl_ix_map *names, size_t n)
{
    static const pl_ix_map none;
    uint64_t max = ix->max_bytes, soft = max - max / 16, store = n * BLOCK_BYTES + STORE_BYTES;
    if (!names)
        names = &none;
    if (ix->evict.phase == PL_IX_IDLE) {
        uint64_t bytes = pl_ix_get(&ix->bytes) + store;
        if (bytes + pl_ix_map_growth_most(names, n) <= soft ||
            bytes + pl_ix_map_growth(names, n) <= soft)
            return 0;
        begin(ix, max / 16 + n * BLOCK_BYTES);
    }
    pl_ix_evict_step(ix, (uint32_t)(n < 4096 ? n : 4096) * 32 + 64);
    /* fewer names may also mean that the map need not grow */
    for (int i = 0; pl_ix_get(&ix->bytes) + store + pl_ix_map_growth(names, n) > max; i++) {
        if (ix->evict.phase == PL_IX_IDLE)
            begin(ix, max / 16 + n * BLOCK_BYTES);
        while (pl_ix_sweep_past(ix, UINT32_MAX))
            ;
        while (pl_ix_evict_step(ix, UINT32_MAX))
            ;
        pl_ix_reclaim(ix);
        if (i == EPISODES)
            return PL_ELIMIT;
    }
    return 0;
}
