/* What a worker says about blocks that it has already, by their names alone: where one lies, that
 * they are in a further tier too, that it has no others. Called by the index's writer, for events
 * and snapshots that carry no tokens (known.h); pl_index_seed_known by anybody.
 *
 * A worker has at most one block under a name in a tier, and an honest one the same block in all of
 * them; where tiers disagree, the nearest is right. */
#include "base/err.h"
#include "kv/index_impl.h"

enum { NAMES_A_BLOCK = 4 }; /* sorting out so many takes what room for a block is */

/* The block that the worker calls by the name of that key. */
static bool find(const pl_index *ix, int slot, uint64_t key, uint32_t *run, uint32_t *at)
{
    for (int t = 0; ix->holder[slot] && t < PL_TIERS; t++) {
        const pl_ix_holder *h = ix->holder[slot][t];
        const pl_ix_entry *e = h ? pl_ix_map_find(&h->names, key) : NULL;
        const pl_ix_run *r = e ? ix->dir[e->run].run : NULL;
        if (r && pl_ix_at_of(e) < r->n) {
            *run = e->run;
            *at = pl_ix_at_of(e);
            return true;
        }
    }
    return false;
}

static void prefetch(const pl_index *ix, int slot, uint64_t key)
{
    for (int t = 0; ix->holder[slot] && t < PL_TIERS; t++)
        if (ix->holder[slot][t])
            pl_ix_map_prefetch(&ix->holder[slot][t]->names, key);
}

void pl_index_seed(pl_index *ix, int slot, uint64_t engine, uint64_t seed)
{
    uint32_t run, at;
    atomic_store_explicit(&ix->seed_told[seed % PL_IX_SEEDS], seed, memory_order_relaxed);
    if (slot >= 0 && slot < PL_IX_SLOTS && find(ix, slot, pl_ix_key(ix, engine), &run, &at))
        ix->dir[run].seed = seed;
}

bool pl_index_seed_known(const pl_index *ix, uint64_t seed)
{
    return pl_ix_get(&ix->seed_told[seed % PL_IX_SEEDS]) == seed;
}

pl_index_space pl_index_space_of(const pl_index *ix, int slot, uint64_t engine, uint64_t *seed)
{
    uint32_t run, at;
    *seed = 0;
    if (slot < 0 || slot >= PL_IX_SLOTS || !find(ix, slot, pl_ix_key(ix, engine), &run, &at))
        return 0;
    *seed = ix->dir[run].seed;
    return ix->dir[run].run->space;
}

size_t pl_index_also(pl_index *ix, int slot, pl_tier tier, const uint64_t *engine, size_t n)
{
    if (slot < 0 || slot >= PL_IX_SLOTS || (unsigned)tier >= PL_TIERS)
        return 0;
    if (ix->past)
        pl_ix_sweep_past(ix, PL_IX_SWEEP_EACH_CALL);
    pl_ix_holder *h = pl_ix_holder_of(ix, PL_IX_PLACE(slot, tier));
    if (pl_ix_evict_room(ix, h ? &h->names : NULL, n) != 0)
        return 0;
    pl_ix_tick(ix, n);
    size_t known = 0;
    for (size_t i = 0; i < n;) {
        uint32_t run, at, next_run, next_at, m = 1;
        if (i + PL_IX_AHEAD < n)
            prefetch(ix, slot, pl_ix_key(ix, engine[i + PL_IX_AHEAD]));
        if (!find(ix, slot, pl_ix_key(ix, engine[i]), &run, &at)) {
            i++;
            continue;
        }
        /* blocks in a row are held in one go; names of different blocks differ, so that none of
         * them changes what another one means */
        while (i + m < n && find(ix, slot, pl_ix_key(ix, engine[i + m]), &next_run, &next_at) &&
               next_run == run && next_at == at + m)
            m++;
        if ((!h && !(h = pl_ix_holder_make(ix, slot, tier))) ||
            pl_ix_hold(ix, h, run, at, m, engine + i) != 0)
            break; /* the block's run has the name that was found, so it needs no pruning */
        known += m;
        i += m;
    }
    return known;
}

/* --- keep --- */

/* Takes the holder out of the blocks that lost one name each; they are in order. */
static void drop_blocks(pl_index *ix, pl_ix_holder *h, const uint64_t *block, uint32_t n)
{
    for (uint32_t i = 0; i < n;) {
        uint32_t run = (uint32_t)(block[i] >> 12), a = 0, b = 0;
        if (!ix->dir[run].run) { /* evicted: the last name ends it */
            pl_ix_forget(ix, h, run, block[i++] & 4095);
            continue;
        }
        for (; i < n && block[i] >> 12 == run; i++) {
            uint32_t at = block[i] & 4095;
            ix->dir[run].refs--;
            if (pl_ix_take_alias(ix, h, run, at, false))
                continue;
            pl_ix_count_entries(ix, h, -1);
            if (at != b) {
                if (b > a)
                    pl_ix_run_drop(ix, run, a, b, h->id);
                a = at;
            }
            b = at + 1;
        }
        if (b > a)
            pl_ix_run_drop(ix, run, a, b, h->id);
        pl_ix_run_prune(ix, run);
    }
}

/* Without a new table, name by name: none goes, or there is no memory. */
static void drop_unmarked(pl_index *ix, pl_ix_holder *h)
{
    for (uint32_t p = 0; p < h->names.parts; p++)
        for (uint32_t i = 0; i < h->names.part[p].cap + PL_IX_MAP_PAD;) {
            pl_ix_entry *e = &h->names.part[p].e[i];
            if (!e->run || pl_ix_copies_of(e) == 0) {
                e->at_copies += e->run != 0;
                i++;
                continue;
            }
            uint32_t run = e->run, at = pl_ix_at_of(e);
            pl_ix_map_delete(&h->names, e);
            pl_ix_forget(ix, h, run, at);
        }
}

/* Names to be kept are marked by a count of no copies; all others go. */
static uint32_t mark(pl_index *ix, pl_ix_holder *h, const uint64_t *engine, size_t n)
{
    uint32_t kept = 0;
    for (size_t i = 0; i < n; i++) {
        if (i + PL_IX_AHEAD < n)
            pl_ix_map_prefetch(&h->names, pl_ix_key(ix, engine[i + PL_IX_AHEAD]));
        pl_ix_entry *e = pl_ix_map_find(&h->names, pl_ix_key(ix, engine[i]));
        if (!e || pl_ix_copies_of(e) == 0)
            continue;
        e->at_copies -= pl_ix_copies_of(e);
        kept++;
    }
    return kept;
}

size_t pl_index_keep(pl_index *ix, int slot, const uint64_t *engine, size_t n)
{
    if (slot < 0 || slot >= PL_IX_SLOTS)
        return 0;
    uint64_t before = pl_index_entries(ix, slot);
    for (int t = 0; t < PL_TIERS; t++) {
        pl_ix_holder *h = pl_ix_holder_of(ix, PL_IX_PLACE(slot, t));
        uint64_t *rest;
        uint32_t rest_n;
        size_t rest_bytes;
        if (!h)
            continue;
        bool room = pl_ix_evict_room(ix, NULL, h->names.n / NAMES_A_BLOCK + 1) == 0;
        uint32_t kept = mark(ix, h, engine, n);
        if (kept == 0) {
            pl_index_clear(ix, slot, t);
        } else if (kept == h->names.n || !room ||
                   pl_ix_map_part(ix, &h->names, kept, &rest, &rest_n, &rest_bytes) != 0) {
            drop_unmarked(ix, h);
        } else {
            drop_blocks(ix, h, rest, rest_n);
            pl_ix_free(ix, rest, rest_bytes);
        }
    }
    return before - pl_index_entries(ix, slot);
}
