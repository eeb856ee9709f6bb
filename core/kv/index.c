/* The KV index: see index.h for what it answers. This file is the writer's side: spaces, stores,
 * removals, clears, figures; index_read.c is the readers', index_known.c what workers say by name
 * alone. One thread (the indexer) calls what is here, but for pl_index_space_find,
 * pl_index_stats_of and pl_index_entries, which any may. The index owns all of its memory; strings
 * and arrays of callers are only looked at.
 *
 * The structure is a forest of runs over local hashes, one tree a space:
 *
 *   run     up to 4096 blocks in a row (index_run.c). It is not split where a prompt branches off:
 *           a child hangs at any offset. So (run, offset) names a block for as long as it lives,
 * and a path has a hop only where it leaves what was stored in one go. child   (parent, offset,
 * first local hash) -> run, one table for all (index_run.c). stretch who holds what of a run
 * (index_stretch.c), as words of interned sets (index_set.c). holder  a worker in a tier, in one of
 * its lives; it has a map engine hash -> (run, offset) with the number of copies (index_map.c).
 *
 * Invariants
 * 1. A prefix has at most one path: local[at] of a run differs from the first hash of its children
 *    at that offset, and those differ from each other.
 * 2. A block's set has exactly the holders with a name for it (out of memory while taking one out:
 *    perhaps fewer). So what a worker dropped in the middle is a hole, and what lies behind it
 *    counts again once it is back.
 * 3. A second name of one holder for one block is an alias, counted in `aliases`; the block is
 *    dropped with the last name. The same name again is a copy. A name that comes for another block
 *    leaves the first: the newest event is right.
 * 4. A run stays while names point at it or children hang on it; else it goes, and its parents with
 *    it. What is kept beyond the last held block is what children need, and at most as much again.
 * 5. What readers look at is never changed in place, but for words published by a release store
 *    (held, a slot of the children's table, sets) and blocks behind the last one; retired memory,
 *    run ids and set numbers are used again only when no reader can have seen them
 *    (index_reclaim.c).
 * 6. A clear only begins a new life of the holder: readers leave out holders of past lives, and
 *    later calls sweep their names (index_evict.c). */
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/err.h"
#include "kv/index_impl.h"

enum {
    AHEAD = PL_IX_AHEAD,
    PAST_MAX = 4096, /* lives that wait to be swept */
    SWEEP_EACH_CALL = PL_IX_SWEEP_EACH_CALL,
};
#define TICK_MIN 1024 /* stored blocks between two ticks, at least */

int pl_index_new(const pl_index_options *o, pl_index **out)
{
    pl_index *ix = calloc(1, sizeof *ix);
    if (!ix)
        return PL_ENOMEM;
    pl_ix_count(&ix->bytes, sizeof *ix);
    ix->max_bytes = o && o->max_bytes ? o->max_bytes : UINT64_MAX;
    atomic_init(&ix->epoch, 1);
    atomic_init(&ix->tick, 1);
    if (getrandom(&ix->seed, sizeof ix->seed, 0) != sizeof ix->seed)
        ix->seed = (uint64_t)(uintptr_t)ix * 0x9e3779b97f4a7c15u;
    if (pl_ix_runs_init(ix) != 0) {
        free(ix);
        return PL_ENOMEM;
    }
    *out = ix;
    return 0;
}

void pl_ix_holder_free(pl_index *ix, pl_ix_holder *h)
{
    pl_ix_map_free(ix, &h->names);
    pl_ix_map_free(ix, &h->aliases);
    pl_ix_free(ix, h, sizeof *h);
}

void pl_index_free(pl_index *ix)
{
    if (!ix)
        return;
    for (int slot = 0; slot < PL_IX_SLOTS; slot++) {
        for (int t = 0; ix->holder[slot] && t < PL_TIERS; t++)
            if (ix->holder[slot][t])
                pl_ix_holder_free(ix, ix->holder[slot][t]);
        free(ix->holder[slot]);
    }
    for (pl_ix_holder *h; (h = ix->past) != NULL;) {
        ix->past = h->next;
        pl_ix_holder_free(ix, h);
    }
    pl_ix_runs_free(ix);
    pl_ix_sets_free(ix);
    for (int i = 0; i < PL_IX_SPACE_BUCKETS; i++)
        for (pl_ix_space *s = atomic_load(&ix->space[i]), *next; s; s = next) {
            next = atomic_load(&s->next);
            free(s);
        }
    for (int i = 0; i < PL_IX_READERS; i++)
        free(atomic_load(&ix->reader[i]));
    free(ix);
}

/* --- spaces: made, never forgotten, so that they can be found without a lock --- */

static uint32_t text_hash(uint32_t h, pl_str s)
{
    for (size_t i = 0; i < s.n; i++)
        h = (h ^ (uint8_t)s.p[i]) * 16777619u;
    return (h ^ 0xff) * 16777619u;
}

static bool same_text(const char *at, size_t n, pl_str s)
{
    return n == s.n && (n == 0 || memcmp(at, s.p, n) == 0);
}

static pl_ix_space *find_space(const pl_index *ix, pl_str model, uint32_t block_tokens, bool eagle,
                               pl_str lora, uint32_t *bucket)
{
    uint32_t h = text_hash(text_hash(2166136261u ^ block_tokens, model), lora);
    *bucket = (h ^ h >> 16) % PL_IX_SPACE_BUCKETS;
    pl_ix_space *s =
        atomic_load_explicit((_Atomic(pl_ix_space *) *)&ix->space[*bucket], memory_order_acquire);
    for (; s; s = atomic_load_explicit(&s->next, memory_order_acquire))
        if (s->block_tokens == block_tokens && s->eagle == eagle &&
            same_text(s->text, s->model_n, model) &&
            same_text(s->text + s->model_n, s->lora_n, lora))
            return s;
    return NULL;
}

pl_index_space pl_index_space_find(const pl_index *ix, pl_str model, uint32_t block_tokens,
                                   bool eagle, pl_str lora)
{
    uint32_t bucket;
    pl_ix_space *s = find_space(ix, model, block_tokens, eagle, lora, &bucket);
    return s ? s->id : 0;
}

uint64_t pl_index_spaces(const pl_index *ix)
{
    return atomic_load_explicit(&ix->spaces, memory_order_acquire);
}

void pl_index_each_space(const pl_index *ix,
                         void (*each)(void *ctx, pl_index_space space, uint32_t block_tokens,
                                      pl_str lora),
                         void *ctx)
{
    for (uint32_t i = 0; i < PL_IX_SPACE_BUCKETS; i++) {
        const pl_ix_space *s =
            atomic_load_explicit((_Atomic(pl_ix_space *) *)&ix->space[i], memory_order_acquire);
        for (; s; s = atomic_load_explicit(&s->next, memory_order_acquire))
            each(ctx, s->id, s->block_tokens, (pl_str){s->text + s->model_n, s->lora_n});
    }
}

pl_index_space pl_index_space_open(pl_index *ix, pl_str model, uint32_t block_tokens, bool eagle,
                                   pl_str lora)
{
    uint32_t bucket;
    pl_ix_space *s = find_space(ix, model, block_tokens, eagle, lora, &bucket);
    if (s)
        return s->id;
    uint64_t number = pl_ix_get(&ix->spaces) + 1;
    size_t n = model.n + lora.n, bytes = sizeof *s + n;
    if (number > PL_IX_SPACES_MAX || n > PL_INDEX_SPACE_NAME_MAX ||
        pl_ix_get(&ix->bytes) + bytes > ix->max_bytes || !(s = pl_ix_alloc(ix, bytes)))
        return 0;
    *s = (pl_ix_space){.id = (uint32_t)number,
                       .block_tokens = block_tokens,
                       .eagle = eagle,
                       .model_n = model.n,
                       .lora_n = lora.n};
    char *at = s->text;
    const pl_str parts[] = {model, lora};
    for (int i = 0; i < 2; at += parts[i++].n)
        if (parts[i].n)
            memcpy(at, parts[i].p, parts[i].n);
    atomic_init(&s->next, atomic_load_explicit(&ix->space[bucket], memory_order_relaxed));
    atomic_store_explicit(&ix->space[bucket], s, memory_order_release);
    atomic_fetch_add_explicit(&ix->spaces, 1, memory_order_release);
    return s->id;
}

/* --- holders --- */

pl_ix_holder *pl_ix_holder_of(pl_index *ix, uint32_t place)
{
    pl_ix_holder **tiers = ix->holder[place / PL_TIERS];
    return tiers ? tiers[place % PL_TIERS] : NULL;
}

pl_ix_holder *pl_ix_holder_make(pl_index *ix, int slot, pl_tier tier)
{
    if (!ix->holder[slot] && !(ix->holder[slot] = calloc(PL_TIERS, sizeof *ix->holder[slot])))
        return NULL;
    pl_ix_holder *h = pl_ix_zalloc(ix, sizeof *h);
    if (!h)
        return NULL;
    uint32_t place = PL_IX_PLACE(slot, tier);
    h->id = place << 16 | atomic_load_explicit(&ix->life[place], memory_order_relaxed);
    return ix->holder[slot][tier] = h;
}

void pl_ix_count_entries(pl_index *ix, pl_ix_holder *h, int64_t d)
{
    h->entries += (uint64_t)d;
    pl_ix_count(&ix->entries, d);
    pl_ix_count(&ix->slot_entries[h->id >> 18], d);
}

static uint64_t alias_key(const pl_index *ix, uint32_t run, uint32_t at)
{
    return pl_ix_key(ix, (uint64_t)run << 16 | at);
}

/* One more name for a block that the holder holds already. */
static int add_alias(pl_index *ix, pl_ix_holder *h, uint32_t run, uint32_t at)
{
    if (pl_ix_map_reserve(ix, &h->aliases, 1) != 0)
        return PL_ENOMEM;
    pl_ix_entry *e = pl_ix_map_at(ix, &h->aliases, alias_key(ix, run, at));
    if (!e)
        return PL_ENOMEM;
    if (e->run && pl_ix_copies_of(e) < PL_IX_COPIES_MAX)
        e->at_copies++;
    if (!e->run) {
        e->run = run;
        e->at_copies = at << 20 | 1;
    }
    return 0;
}

bool pl_ix_take_alias(pl_index *ix, pl_ix_holder *h, uint32_t run, uint32_t at, bool all)
{
    if (h->aliases.n == 0)
        return false;
    pl_ix_entry *e = pl_ix_map_find(&h->aliases, alias_key(ix, run, at));
    if (!e)
        return false;
    if (all || pl_ix_copies_of(e) == 1)
        pl_ix_map_delete(&h->aliases, e);
    else
        e->at_copies--;
    return true;
}

void pl_ix_forget(pl_index *ix, pl_ix_holder *h, uint32_t run, uint32_t at)
{
    ix->dir[run].refs--;
    if (!ix->dir[run].run) { /* evicted: nobody holds it any more */
        (void)pl_ix_take_alias(ix, h, run, at, true);
        if (ix->dir[run].refs == 0)
            pl_ix_dir_release(ix, run);
        return;
    }
    if (pl_ix_take_alias(ix, h, run, at, false))
        return;
    pl_ix_count_entries(ix, h, -1);
    pl_ix_run_drop(ix, run, at, at + 1, h->id);
    pl_ix_run_prune(ix, run);
}

/* --- stores --- */

/* Which of the blocks [at, at + n) the holder holds already, in ix->held_before; false: none. */
static bool any_held(pl_index *ix, const pl_ix_holder *h, uint32_t run, uint32_t at, uint32_t n)
{
    bool any = false;
    uint32_t begin = 0;
    pl_ix_view v;
    pl_ix_look(ix->dir[run].run, &v);
    for (uint32_t i = 0; i < v.n && begin < at + n; begin = v.of[i++].end) {
        uint32_t from = begin > at ? begin : at;
        uint32_t to = v.of[i].end < at + n ? v.of[i].end : at + n;
        if (from >= to || !pl_ix_set_has(ix, v.of[i].set, h->id))
            continue;
        if (!any)
            memset(ix->held_before, 0, n * sizeof *ix->held_before);
        any = true;
        memset(ix->held_before + (from - at), 1, to - from);
    }
    return any;
}

int pl_ix_hold(pl_index *ix, pl_ix_holder *h, uint32_t run, uint32_t at, uint32_t n,
               const uint64_t *engine)
{
    if (pl_ix_map_reserve(ix, &h->names, n) != 0)
        return PL_ENOMEM;
    bool some = any_held(ix, h, run, at, n);
    int err = pl_ix_run_hold(ix, run, at, at + n, h->id);
    if (err)
        return err;
    atomic_store_explicit(&ix->dir[run].run->seen,
                          atomic_load_explicit(&ix->tick, memory_order_relaxed),
                          memory_order_relaxed);
    ix->dir[run].refs += n; /* so that it stays while other names are taken away */
    uint32_t i = 0;
    for (; i < n && !err; i++) {
        bool held = some && ix->held_before[i];
        if (i + AHEAD < n)
            pl_ix_map_prefetch(&h->names, pl_ix_key(ix, engine[i + AHEAD]));
        pl_ix_entry *e = pl_ix_map_at(ix, &h->names, pl_ix_key(ix, engine[i]));
        if (!e) {
            err = PL_ENOMEM;
            break;
        }
        if (e->run == run && pl_ix_at_of(e) == at + i) {
            if (pl_ix_copies_of(e) < PL_IX_COPIES_MAX)
                e->at_copies++;
            ix->dir[run].refs--;
            pl_ix_count(&ix->duplicates, 1);
            continue;
        }
        uint32_t old = e->run, old_at = pl_ix_at_of(e), later = old_at - at;
        *e = (pl_ix_entry){.key = e->key, .run = run, .at_copies = (at + i) << 20 | 1};
        if (!held)
            pl_ix_count_entries(ix, h, 1);
        else if (add_alias(ix, h, run, at + i) != 0)
            err = PL_ENOMEM; /* the block is dropped with the first of its names */
        if (old == run && later > i && later < n) {
            /* it gets another name in a moment: if this was the last, it stays held until then */
            ix->dir[run].refs--;
            if (!pl_ix_take_alias(ix, h, run, old_at, false)) {
                ix->held_before[later] = false;
                pl_ix_count_entries(ix, h, -1);
            }
        } else if (old) {
            pl_ix_forget(ix, h, old, old_at);
        }
    }
    pl_ix_count(&ix->stored, i);
    for (uint32_t k = i; k < n; k++) { /* what got no name */
        ix->dir[run].refs--;
        if (!some || !ix->held_before[k])
            pl_ix_run_drop(ix, run, at + k, at + k + 1, h->id);
    }
    return err;
}

/* The block that a worker calls by that name: it follows [*run, *at). */
static bool find_parent(pl_index *ix, int slot, pl_index_space space, uint64_t name, uint32_t *run,
                        uint32_t *at)
{
    uint64_t key = pl_ix_key(ix, name);
    for (int t = 0; ix->holder[slot] && t < PL_TIERS; t++) {
        const pl_ix_holder *h = ix->holder[slot][t];
        const pl_ix_entry *e = h ? pl_ix_map_find(&h->names, key) : NULL;
        const pl_ix_run *r = e ? ix->dir[e->run].run : NULL;
        if (r && r->space == space && pl_ix_at_of(e) < r->n) {
            *run = e->run;
            *at = pl_ix_at_of(e) + 1;
            return true;
        }
    }
    return false;
}

/* Finds or makes the longest stretch of local[0 .. n) behind (*run, *at) that lies in one run.
 * Returns its length; *run and *at become its place. */
static int64_t place_blocks(pl_index *ix, pl_index_space space, uint32_t *run, uint32_t *at,
                            const uint64_t *local, size_t n)
{
    uint32_t parent = *run ? *run : PL_IX_ROOT | space, offset = *run ? *at : 0;
    if (n > PL_IX_RUN_MAX)
        n = PL_IX_RUN_MAX;
    pl_ix_run *r = *run ? ix->dir[*run].run : NULL;
    size_t m = 0;
    if (r && offset < r->n)
        m = pl_ix_equal(r->local + offset, local, n < r->n - offset ? n : r->n - offset);
    if (m)
        return (int64_t)m;
    pl_ix_run *child = NULL;
    if (!r || (ix->dir[*run].children && offset <= r->child_end))
        child = pl_ix_child(atomic_load_explicit(&ix->children, memory_order_relaxed), parent,
                            offset, local[0]);
    if (child) {
        *run = child->id;
        *at = 0;
        return (int64_t)pl_ix_equal(child->local, local, n < child->n ? n : child->n);
    }
    int err;
    if (r && offset < PL_IX_RUN_MAX && pl_ix_run_needed(ix, *run) <= offset) {
        m = n < PL_IX_RUN_MAX - offset ? n : PL_IX_RUN_MAX - offset;
        err = pl_ix_run_append(ix, *run, offset, local, (uint32_t)m);
    } else {
        m = n;
        err = pl_ix_run_new(ix, parent, offset, space, local, (uint32_t)m, run);
        *at = 0;
    }
    return err ? err : (int64_t)m;
}

void pl_ix_tick(pl_index *ix, size_t n)
{
    ix->stored_since_tick += n;
    if (ix->stored_since_tick < TICK_MIN || ix->stored_since_tick < pl_ix_get(&ix->entries) / 64)
        return;
    ix->stored_since_tick = 0;
    atomic_store_explicit(&ix->tick, atomic_load_explicit(&ix->tick, memory_order_relaxed) + 1,
                          memory_order_relaxed);
}

int pl_index_store(pl_index *ix, pl_index_space space, int slot, pl_tier tier,
                   const uint64_t *parent, const uint64_t *engine, const uint64_t *local, size_t n)
{
    if (slot < 0 || slot >= PL_IX_SLOTS || (unsigned)tier >= PL_TIERS || space == 0 ||
        space > pl_ix_get(&ix->spaces))
        return PL_EINVALID;
    uint32_t run = 0, at = 0;
    if (ix->past)
        pl_ix_sweep_past(ix, SWEEP_EACH_CALL);
    pl_ix_holder *h = pl_ix_holder_of(ix, PL_IX_PLACE(slot, tier));
    for (size_t i = 0; h && i < n && i < AHEAD; i++)
        pl_ix_map_prefetch(&h->names, pl_ix_key(ix, engine[i]));
    int err = pl_ix_evict_room(ix, h ? &h->names : NULL, n);
    if (err)
        return err;
    if (parent && !find_parent(ix, slot, space, *parent, &run, &at)) {
        pl_ix_count(&ix->unknown_parents, 1);
        return PL_ENOTFOUND;
    }
    if (!h && !(h = pl_ix_holder_make(ix, slot, tier)))
        return PL_ENOMEM;
    pl_ix_tick(ix, n);
    for (size_t i = 0; i < n;) {
        int64_t m = place_blocks(ix, space, &run, &at, local + i, n - i);
        if (m < 0)
            return (int)m;
        err = pl_ix_hold(ix, h, run, at, (uint32_t)m, engine + i);
        if (err) {
            pl_ix_run_prune(ix, run);
            return err;
        }
        i += (size_t)m;
        at += (uint32_t)m;
    }
    return 0;
}

/* --- removals --- */

/* Blocks [a, b) of a run that a holder has no name for any more. Events name blocks in a row. */
typedef struct pending {
    uint32_t run, a, b;
} pending;

static void drop_pending(pl_index *ix, pl_ix_holder *h, pending *p)
{
    if (!p->run)
        return;
    pl_ix_count_entries(ix, h, -(int64_t)(p->b - p->a));
    pl_ix_run_drop(ix, p->run, p->a, p->b, h->id);
    ix->dir[p->run].refs -= p->b - p->a;
    pl_ix_run_prune(ix, p->run);
    p->run = 0;
}

static size_t remove_keys(pl_index *ix, pl_ix_holder *h, const uint64_t *key, size_t n, pending *p)
{
    size_t known = 0;
    for (size_t i = 0; i < n; i++) {
        pl_ix_entry *e = pl_ix_map_find(&h->names, key[i]);
        if (!e)
            continue;
        uint32_t run = e->run, at = pl_ix_at_of(e);
        if (run != p->run)
            __builtin_prefetch(ix->dir[run].run, 1);
        known += ix->dir[run].run != NULL;
        if (ix->dir[run].run && pl_ix_copies_of(e) > 1) {
            e->at_copies--;
            continue;
        }
        pl_ix_map_delete(&h->names, e);
        if (!ix->dir[run].run || h->aliases.n) {
            drop_pending(ix, h, p);
            pl_ix_forget(ix, h, run, at);
        } else if (p->run == run && at + 1 == p->a) {
            p->a--;
        } else if (p->run == run && at == p->b) {
            p->b++;
        } else {
            drop_pending(ix, h, p);
            *p = (pending){run, at, at + 1};
        }
    }
    return known;
}

size_t pl_index_remove(pl_index *ix, int slot, pl_tier tier, const uint64_t *engine, size_t n)
{
    if (slot < 0 || slot >= PL_IX_SLOTS || (unsigned)tier >= PL_TIERS)
        return 0;
    if (ix->past)
        pl_ix_sweep_past(ix, SWEEP_EACH_CALL);
    pl_ix_holder *h = pl_ix_holder_of(ix, PL_IX_PLACE(slot, tier));
    size_t known = 0;
    if (h) {
        pending p = {0};
        for (size_t i = 0; i < n; i += AHEAD) {
            uint64_t key[AHEAD];
            size_t k = n - i < AHEAD ? n - i : AHEAD;
            for (size_t j = 0; j < k; j++) {
                key[j] = pl_ix_key(ix, engine[i + j]);
                pl_ix_map_prefetch(&h->names, key[j]);
            }
            known += remove_keys(ix, h, key, k, &p);
        }
        drop_pending(ix, h, &p);
        pl_ix_map_shrink(ix, &h->names, 5);
    }
    pl_ix_count(&ix->removed, (int64_t)known);
    pl_ix_count(&ix->unknown_removals, (int64_t)(n - known));
    return known;
}

void pl_index_clear(pl_index *ix, int slot, int tier)
{
    if (slot < 0 || slot >= PL_IX_SLOTS || tier >= PL_TIERS)
        return;
    for (int t = tier < 0 ? 0 : tier; t < (tier < 0 ? PL_TIERS : tier + 1); t++) {
        uint32_t place = PL_IX_PLACE(slot, t);
        pl_ix_holder *h = pl_ix_holder_of(ix, place);
        if (!h)
            continue;
        ix->holder[slot][t] = NULL;
        pl_ix_count_entries(ix, h, -(int64_t)h->entries);
        if (h->names.n == 0) { /* without memory, entries may have outlived their names */
            pl_ix_holder_free(ix, h);
            continue;
        }
        atomic_fetch_add_explicit(&ix->past_lives, 1, memory_order_seq_cst);
        atomic_fetch_add_explicit(&ix->life[place], 1, memory_order_seq_cst);
        h->next = NULL;
        h->part = h->cursor = 0; /* eviction may have been half-way through it */
        if (ix->past)
            ix->past_last->next = h;
        else
            ix->past = h;
        ix->past_last = h;
    }
    /* a worker that flaps faster than the writer sweeps: lives must not come round */
    while (atomic_load_explicit(&ix->past_lives, memory_order_relaxed) > PAST_MAX)
        pl_ix_sweep_past(ix, UINT32_MAX);
}

bool pl_index_maintain(pl_index *ix)
{
    bool more = pl_ix_sweep_past(ix, 2048);
    if (!more)
        more = pl_ix_evict_step(ix, 2048);
    pl_ix_reclaim(ix);
    return more || ix->garbage_n > 0;
}

/* --- figures --- */

void pl_index_stats_of(const pl_index *ix, pl_index_stats *out)
{
    *out = (pl_index_stats){.spaces = pl_ix_get(&ix->spaces),
                            .blocks = pl_ix_get(&ix->blocks),
                            .entries = pl_ix_get(&ix->entries),
                            .bytes = pl_ix_get(&ix->bytes),
                            .stored = pl_ix_get(&ix->stored),
                            .removed = pl_ix_get(&ix->removed),
                            .duplicates = pl_ix_get(&ix->duplicates),
                            .unknown_parents = pl_ix_get(&ix->unknown_parents),
                            .unknown_removals = pl_ix_get(&ix->unknown_removals),
                            .evicted = pl_ix_get(&ix->evicted)};
}

uint64_t pl_index_entries(const pl_index *ix, int slot)
{
    return slot < 0 || slot >= PL_IX_SLOTS ? 0 : pl_ix_get(&ix->slot_entries[slot]);
}
