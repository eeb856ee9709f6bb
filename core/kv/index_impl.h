/* What the index's files share; nobody else includes this. index.c says how the parts fit. */
#ifndef PL_INDEX_IMPL_H
#define PL_INDEX_IMPL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv/index.h"

enum {
    PL_IX_RUN_MAX = 4096, /* blocks in a run; a longer chain goes on in a child run */
    PL_IX_SLOTS = 4096,
    PL_IX_READERS = 1024,
    PL_IX_SPACES_MAX = 65535,
    PL_IX_SPACE_BUCKETS = 1024,
    PL_IX_SEEDS = 4096,
    PL_IX_AHEAD = 16, /* names whose map entries are fetched before the first is looked up */
    PL_IX_SWEEP_EACH_CALL = 64,       /* names of past lives that each call sweeps on the way */
    PL_IX_COPIES_MAX = (1 << 20) - 1, /* counted copies of one (worker, tier, engine hash) */
};

/* A holder is a worker in a tier, in one of its lives: slot << 18 | tier << 16 | life. A clear
 * begins the next life, so that what is left of the last one can be swept later. */
typedef uint32_t pl_ix_holder_id;
#define PL_IX_PLACE(slot, tier) ((uint32_t)(slot) << 2 | (uint32_t)(tier))
#define PL_IX_PLACES            (PL_IX_SLOTS * PL_TIERS)

/* A set of holders in 32 bits: 0 is the empty one, ONE | holder has one member, anything else is
 * the number of an interned set. Equal sets have equal words. */
typedef uint32_t pl_ix_set;
#define PL_IX_ONE 0x80000000u

typedef struct pl_ix_members {
    uint64_t hash;
    uint32_t refs;        /* stretches of runs that use it; the writer's */
    uint32_t n;           /* at least 2 */
    bool plain;           /* all on devices, no worker twice */
    pl_ix_holder_id of[]; /* ascending */
} pl_ix_members;

/* The blocks of a run from the previous stretch's end to `end` are held by exactly `set`. */
typedef struct pl_ix_stretch {
    uint32_t end;
    pl_ix_set set;
} pl_ix_stretch;

typedef struct pl_ix_stretches { /* immutable once published */
    uint32_t n;
    pl_ix_stretch of[];
} pl_ix_stretches;

/* A run's body. Readers get to it by the child table and read held, id, parent, at and local[]; all
 * but held and seen are written before it is published, local[i] before held reaches i, and
 * local[i] once only: other contents at the same place need a new body. */
typedef struct pl_ix_run {
    _Atomic uint64_t held; /* 0, or end << 32 | set, or MANY | the address of pl_ix_stretches */
    uint32_t id;
    uint32_t parent;       /* a run's id, or ROOT | space */
    _Atomic uint32_t seen; /* the index's tick when it was last matched */
    uint16_t space;
    _Atomic uint16_t fork; /* where a child was attached last: readers look there ahead of time */
    uint16_t at;           /* blocks of the parent in front of it */
    uint16_t cap, n;       /* room and blocks in local[]; the writer's */
    uint16_t child_end;    /* no child is attached behind this; perhaps KEEP; the writer's */
    uint64_t local[];
} pl_ix_run;
#define PL_IX_MANY (1ull << 63)
#define PL_IX_KEEP 0x8000u /* names may point at blocks that nobody holds: all blocks must stay */
#define PL_IX_ROOT 0x80000000u

/* The writer's view of a run, by its id. Without a body it was evicted: it lives on in name only
 * until no engine hash points at it any more. */
typedef struct pl_ix_dir {
    pl_ix_run *run;
    uint32_t refs;     /* map entries of all holders that point at it; next free id when free */
    uint32_t children; /* runs attached to it */
    uint64_t seed;     /* pl_index_seed, for runs attached to it too */
} pl_ix_dir;

/* (parent, at, first local hash) -> run. Slots: 0 empty, 1 deleted, else tag << 48 | address. */
typedef struct pl_ix_children {
    uint64_t mask;
    uint64_t used; /* not empty; the writer's */
    uint64_t live;
    _Atomic uint64_t slot[];
} pl_ix_children;

/* --- engine hash -> block, one map for each holder, touched by the writer only --- */

typedef struct pl_ix_entry {
    uint64_t key;       /* the engine hash, mixed by a bijection */
    uint32_t run;       /* 0: an empty place */
    uint32_t at_copies; /* offset in the run << 20 | copies */
} pl_ix_entry;

static inline uint32_t pl_ix_at_of(const pl_ix_entry *e)
{
    return e->at_copies >> 20;
}
static inline uint32_t pl_ix_copies_of(const pl_ix_entry *e)
{
    return e->at_copies & PL_IX_COPIES_MAX;
}

/* Open addressing with the entries in the order of their keys, greatest first: a search ends at the
 * first that is not greater, and growing is one sequential copy. */
typedef struct pl_ix_table {
    pl_ix_entry *e;
    uint32_t cap; /* home places; the array has PL_IX_MAP_PAD more */
    uint32_t n;
    uint32_t shift; /* bits at the top of its keys that are the same */
} pl_ix_table;
enum { PL_IX_MAP_PAD = 48 };

/* Tables by the top of the complemented key: 2^bits of them, of which the first `split` are two,
 * one bit further. A map that grows splits one table after the other, so no call copies much. */
typedef struct pl_ix_map {
    pl_ix_table *part; /* &one, or parts of them; NULL: never used */
    uint32_t parts, split, bits;
    uint32_t n;    /* entries of all */
    uint32_t turn; /* of the part that is looked at for shrinking next */
    pl_ix_table one;
} pl_ix_map;

typedef struct pl_ix_holder {
    pl_ix_holder_id id;
    pl_ix_map names;           /* engine hash -> block */
    pl_ix_map aliases;         /* blocks with more than one name -> further names, as copies */
    uint64_t entries;          /* blocks held */
    uint32_t part, cursor;     /* of a sweep over names: a table, a place */
    struct pl_ix_holder *next; /* in the list of past lives */
} pl_ix_holder;

/* --- memory that readers may still look at --- */

typedef enum pl_ix_garbage_kind { PL_IX_PLAIN, PL_IX_RUN_ID, PL_IX_SET_ID } pl_ix_garbage_kind;
typedef struct pl_ix_garbage {
    void *p;
    uint64_t epoch;
    size_t bytes;
    uint32_t id; /* to be used again, by kind */
    pl_ix_garbage_kind kind;
} pl_ix_garbage;

struct pl_index_reader {
    _Alignas(64) _Atomic uint64_t epoch; /* 0: not inside a match */
    pl_index *ix;
    _Atomic uint32_t taken;
    uint16_t place[PL_IX_SLOTS]; /* of a slot in the answer; valid if the answer agrees */
};

typedef struct pl_ix_space {
    _Atomic(struct pl_ix_space *) next;
    uint32_t id, block_tokens;
    bool eagle;
    size_t model_n, lora_n;
    char text[];
} pl_ix_space;

struct pl_index {
    /* readers begin here */
    _Atomic(pl_ix_children *) children;
    _Atomic(_Atomic(pl_ix_members *) *) sets;
    _Atomic uint64_t epoch;
    _Atomic uint32_t tick;
    _Atomic uint32_t past_lives; /* holders not swept yet */
    _Atomic uint16_t life[PL_IX_PLACES];
    _Atomic(pl_ix_space *) space[PL_IX_SPACE_BUCKETS];
    _Atomic uint64_t seed_told[PL_IX_SEEDS]; /* by their low bits; a later one takes the place */
    _Atomic(pl_index_reader *) reader[PL_IX_READERS];

    /* figures: the writer's, read by anyone */
    _Atomic uint64_t spaces, blocks, entries, bytes, stored, removed, duplicates, unknown_parents,
        unknown_removals, evicted;
    _Atomic uint64_t slot_entries[PL_IX_SLOTS];

    /* the writer's */
    uint64_t max_bytes, seed;
    pl_ix_holder **holder[PL_IX_SLOTS]; /* by slot, then tier */
    pl_ix_holder *past, *past_last;
    pl_ix_dir *dir; /* from 1 */
    uint32_t dir_n, dir_cap, dir_free;
    uint32_t set_n, set_cap; /* in sets, from 1 */
    uint32_t *set_free;      /* numbers to use again */
    uint32_t set_free_n, set_used;
    uint32_t *intern; /* set numbers by hash; UINT32_MAX deleted */
    uint32_t intern_cap, intern_used;
    pl_ix_garbage *garbage; /* a ring, oldest first */
    uint32_t garbage_cap, garbage_head, garbage_n;
    size_t garbage_bytes;
    uint64_t stored_since_tick;
    struct {
        enum { PL_IX_IDLE, PL_IX_CONDEMN, PL_IX_SWEEP } phase;
        uint32_t hand, min_age, place; /* run id, ticks, holder */
        uint64_t goal, found;          /* bytes that shall and will go */
        bool any;                      /* since the hand last passed the end */
    } evict;
    pl_ix_stretch scratch[PL_IX_RUN_MAX + 8];
    bool held_before[PL_IX_RUN_MAX];
    pl_ix_holder_id members[PL_IX_PLACES];
};

static inline void pl_ix_count(_Atomic uint64_t *c, int64_t d)
{
    atomic_store_explicit(c, atomic_load_explicit(c, memory_order_relaxed) + (uint64_t)d,
                          memory_order_relaxed);
}
static inline uint64_t pl_ix_get(const _Atomic uint64_t *c)
{
    return atomic_load_explicit((_Atomic uint64_t *)c, memory_order_relaxed);
}

/* index_reclaim.c. What is allocated counts towards the cap; retired memory does until it is freed.
 */
void *pl_ix_alloc(pl_index *ix, size_t bytes); /* not zeroed */
void *pl_ix_zalloc(pl_index *ix, size_t bytes);
void pl_ix_free(pl_index *ix, void *p, size_t bytes);
void pl_ix_retire(pl_index *ix, void *p, size_t bytes, pl_ix_garbage_kind kind, uint32_t id);
void pl_ix_reclaim(pl_index *ix);     /* frees what no reader can see */
void pl_ix_reclaim_all(pl_index *ix); /* there is no reader any more */

/* index_set.c. The caller owns a reference for each word that it keeps. */
int pl_ix_set_with(pl_index *ix, pl_ix_set s, pl_ix_holder_id h, pl_ix_set *out);
int pl_ix_set_without(pl_index *ix, pl_ix_set s, pl_ix_holder_id h, pl_ix_set *out);
bool pl_ix_set_has(const pl_index *ix, pl_ix_set s, pl_ix_holder_id h);
void pl_ix_set_ref(pl_index *ix, pl_ix_set s);
void pl_ix_set_unref(pl_index *ix, pl_ix_set s);
void pl_ix_sets_free(pl_index *ix);

/* index_map.c */
uint64_t pl_ix_key(const pl_index *ix, uint64_t name);
pl_ix_entry *pl_ix_map_find(const pl_ix_map *m, uint64_t key);
int pl_ix_map_reserve(pl_index *ix, pl_ix_map *m, uint32_t more);
/* Bytes that reserving and filling them will take; at most that, from what is known at once. */
size_t pl_ix_map_growth(const pl_ix_map *m, size_t more);
size_t pl_ix_map_growth_most(const pl_ix_map *m, size_t more);
/* The entry of that key, new (run 0, to be filled in at once) when there was none. Room is
 * reserved; NULL all the same when the last places are full and there is no memory to grow. */
pl_ix_entry *pl_ix_map_at(pl_index *ix, pl_ix_map *m, uint64_t key);
void pl_ix_map_delete(pl_ix_map *m, pl_ix_entry *e);
/* Takes out all entries but those with 0 copies, which get 1; their number is `kept`. *rest is
 * where each of the others was, run << 12 | offset, in ascending order, and belongs to the caller:
 * pl_ix_free(ix, rest, rest_bytes). PL_ENOMEM: nothing changed. */
int pl_ix_map_part(pl_index *ix, pl_ix_map *m, uint32_t kept, uint64_t **rest, uint32_t *rest_n,
                   size_t *rest_bytes);
/* Give back what is too much, if a table is less full than that many sixteenths: of one table, or
 * of the next in turn. */
void pl_ix_table_shrink(pl_index *ix, pl_ix_table *t, uint32_t below_16ths);
void pl_ix_map_shrink(pl_index *ix, pl_ix_map *m, uint32_t below_16ths);
void pl_ix_map_free(pl_index *ix, pl_ix_map *m);
/* Of a map that was used. */
static inline pl_ix_table *pl_ix_table_of(const pl_ix_map *m, uint64_t key)
{
    uint32_t half = (uint32_t)(~key >> (63 - m->bits)), whole = half >> 1;
    uint32_t is_two = -(uint32_t)(whole < m->split); /* no branch: nobody can foretell it */
    return &m->part[(half & is_two) | ((whole + m->split) & ~is_two)];
}
static inline uint32_t pl_ix_home(const pl_ix_table *t, uint64_t key)
{
    return (uint32_t)(((unsigned __int128)(~key << t->shift) * t->cap) >> 64);
}
/* Inlined always: of a call that only fetches, the compiler says that it does nothing. */
static inline __attribute__((always_inline)) void pl_ix_map_prefetch(const pl_ix_map *m,
                                                                     uint64_t key)
{
    if (m->part) {
        const pl_ix_table *t = pl_ix_table_of(m, key);
        __builtin_prefetch(&t->e[pl_ix_home(t, key)], 1);
    }
}

/* index_run.c */
typedef struct pl_ix_view { /* of a run's stretches */
    const pl_ix_stretch *of;
    uint32_t n;
    pl_ix_stretch one;
} pl_ix_view;
static inline void pl_ix_look(const pl_ix_run *r, pl_ix_view *v)
{
    uint64_t held = atomic_load_explicit((_Atomic uint64_t *)&r->held, memory_order_acquire);
    if (held & PL_IX_MANY) {
        const pl_ix_stretches *s = (const pl_ix_stretches *)(uintptr_t)(held & ~PL_IX_MANY);
        v->of = s->of;
        v->n = s->n;
    } else {
        v->one = (pl_ix_stretch){(uint32_t)(held >> 32), (uint32_t)held};
        v->of = &v->one;
        v->n = held != 0;
    }
}
static inline uint64_t pl_ix_child_hash(uint32_t parent, uint32_t at, uint64_t local)
{
    uint64_t h = local ^ (((uint64_t)parent << 16) + at) * 0x9e3779b97f4a7c15u;
    h = (h ^ h >> 32) * 0xd6e8feb86659fd93u;
    return h ^ h >> 29;
}
static inline pl_ix_run *pl_ix_child(const pl_ix_children *c, uint32_t parent, uint32_t at,
                                     uint64_t local)
{
    uint64_t h = pl_ix_child_hash(parent, at, local), tag = h >> 48;
    for (uint64_t i = h & c->mask;; i = (i + 1) & c->mask) {
        uint64_t s = atomic_load_explicit((_Atomic uint64_t *)&c->slot[i], memory_order_acquire);
        if (s == 0)
            return NULL;
        if (s >> 48 != tag || s == 1)
            continue;
        pl_ix_run *r = (pl_ix_run *)(uintptr_t)(s & 0xffffffffffffu);
        if (r->parent == parent && r->at == at && r->local[0] == local)
            return r;
    }
}
int pl_ix_runs_init(pl_index *ix);
void pl_ix_runs_free(pl_index *ix);
/* A new run with n blocks held by nobody, attached to its parent. */
int pl_ix_run_new(pl_index *ix, uint32_t parent, uint32_t at, uint32_t space, const uint64_t *local,
                  uint32_t n, uint32_t *id);
/* Room in the run, and nothing from `keep` on: then n more blocks. */
int pl_ix_run_append(pl_index *ix, uint32_t id, uint32_t keep, const uint64_t *local, uint32_t n);
uint32_t pl_ix_run_needed(const pl_index *ix, uint32_t id); /* blocks that must stay */
/* Frees the run if nothing needs it, then its parents likewise; else gives back what it can. */
void pl_ix_run_prune(pl_index *ix, uint32_t id);
/* Detaches a run without children: nobody will match it again. */
void pl_ix_run_condemn(pl_index *ix, uint32_t id);
void pl_ix_dir_release(pl_index *ix, uint32_t id); /* an evicted run lost its last name */
/* How many of the first n words are equal. */
size_t pl_ix_equal(const uint64_t *a, const uint64_t *b, size_t n);

/* index_stretch.c. Puts a holder into, or takes it out of, the sets of blocks [a, b). Taking out
 * cannot fail: out of memory it takes everybody out of the run (less is then known, nothing false).
 */
int pl_ix_run_hold(pl_index *ix, uint32_t id, uint32_t a, uint32_t b, pl_ix_holder_id h);
void pl_ix_run_drop(pl_index *ix, uint32_t id, uint32_t a, uint32_t b, pl_ix_holder_id h);
bool pl_ix_run_has(const pl_index *ix, uint32_t id, pl_ix_holder_id h);
void pl_ix_stretches_clear(pl_index *ix, pl_ix_run *r);

/* index.c */
pl_ix_holder *pl_ix_holder_of(pl_index *ix, uint32_t place); /* or NULL */
pl_ix_holder *pl_ix_holder_make(pl_index *ix, int slot, pl_tier tier);
/* The holder has blocks [at, at + n) of a run under these names. Out of memory the first of them
 * may be held already, the others are as they were. */
int pl_ix_hold(pl_index *ix, pl_ix_holder *h, uint32_t run, uint32_t at, uint32_t n,
               const uint64_t *engine);
void pl_ix_tick(pl_index *ix, size_t n); /* n blocks come in: time goes on by stores */
/* True when the block has another name, which it then keeps. */
bool pl_ix_take_alias(pl_index *ix, pl_ix_holder *h, uint32_t run, uint32_t at, bool all);
/* One name of a holder for a block is gone from its map. */
void pl_ix_forget(pl_index *ix, pl_ix_holder *h, uint32_t run, uint32_t at);
void pl_ix_holder_free(pl_index *ix, pl_ix_holder *h);
void pl_ix_count_entries(pl_index *ix, pl_ix_holder *h, int64_t d);

/* index_evict.c */
bool pl_ix_evict_step(pl_index *ix, uint32_t work); /* false: there is nothing to do */
/* Room under the cap for n more blocks of a holder with that map; PL_ELIMIT when there is none. */
int pl_ix_evict_room(pl_index *ix, const pl_ix_map *names, size_t n);
bool pl_ix_sweep_past(pl_index *ix, uint32_t work);

#endif
