/* The readers' side of the KV index: a match walks runs from the root of its space and intersects
 * the sets it meets. Any thread with a reader of its own; it takes no lock, allocates nothing, and
 * writes to shared memory only its own epoch and, once a tick, that a run was matched.
 *
 * A walk costs one comparison of the prompt's hashes with a run's, two dependent reads for each run
 * that the path enters (a slot of the children's table, the run), and work on sets only where the
 * set changes: first all holders of the first block are put down, then those that go on are found
 * in the answer by their slot. */
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "kv/index_impl.h"

pl_index_reader *pl_index_reader_new(pl_index *ix)
{
    for (int i = 0; i < PL_IX_READERS; i++) {
        pl_index_reader *r = atomic_load_explicit(&ix->reader[i], memory_order_acquire);
        if (!r) {
            pl_index_reader *made = aligned_alloc(_Alignof(pl_index_reader), sizeof *made);
            if (!made)
                return NULL;
            memset(made, 0, sizeof *made);
            made->ix = ix;
            atomic_init(&made->taken, 1);
            if (atomic_compare_exchange_strong(&ix->reader[i], &r, made))
                return made;
            free(made);
        }
        uint32_t free_one = 0;
        if (atomic_compare_exchange_strong(&r->taken, &free_one, 1))
            return r;
    }
    return NULL;
}

void pl_index_reader_free(pl_index_reader *r)
{
    if (r)
        atomic_store(&r->taken, 0);
}

typedef struct walk {
    pl_index_reader *r;
    const pl_index *ix;
    pl_match *out;
    int cap, n;
    bool check_lives;
    uint32_t depth; /* blocks that are accounted for in out[] */
    uint32_t more;  /* blocks behind them, all held by set */
    pl_ix_set set;
} walk;

static inline bool past_life(const walk *w, pl_ix_holder_id h)
{
    return w->check_lives && atomic_load_explicit((_Atomic uint16_t *)&w->ix->life[h >> 16],
                                                  memory_order_relaxed) != (uint16_t)h;
}

/* pl_match.blocks at once; tier t of a holder counts for t and all farther ones. */
typedef uint32_t four __attribute__((vector_size(16)));
_Static_assert(PL_TIERS == 4 && sizeof((pl_match *)0)->blocks == sizeof(four), "a vector of tiers");
static const four from_tier[PL_TIERS] = {
    {~0u, ~0u, ~0u, ~0u}, {0, ~0u, ~0u, ~0u}, {0, 0, ~0u, ~0u}, {0, 0, 0, ~0u}};

/* The holders of the first blocks. Ids ascend, so a worker's tiers follow each other. */
static void put_first(walk *w, const pl_ix_holder_id *of, uint32_t n)
{
    const four more = {w->more, w->more, w->more, w->more};
    for (uint32_t i = 0; i < n; i++) {
        int slot = (int)(of[i] >> 18);
        four blocks = more & from_tier[of[i] >> 16 & 3];
        if (past_life(w, of[i]))
            continue;
        if (w->n && w->out[w->n - 1].slot == slot) {
            four old;
            memcpy(&old, w->out[w->n - 1].blocks, sizeof old);
            blocks |= old; /* zero or more, both of them */
            w->n--;
        }
        if (w->n == w->cap)
            return;
        w->out[w->n].slot = slot;
        memcpy(w->out[w->n].blocks, &blocks, sizeof blocks);
        w->r->place[slot] = (uint16_t)w->n++;
    }
}

/* The same for a set that is nothing but workers. */
static void put_plain(walk *w, const pl_ix_holder_id *of, uint32_t n)
{
    const four more = {w->more, w->more, w->more, w->more};
    uint16_t *place = w->r->place;
    pl_match *out = w->out;
    if (n > (uint32_t)w->cap)
        n = (uint32_t)w->cap;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t slot = of[i] >> 18;
        out[i].slot = (int)slot;
        memcpy(out[i].blocks, &more, sizeof more);
        place[slot] = (uint16_t)i;
    }
    w->n = (int)n;
}

/* Those that hold the next blocks as well. A tier without a hole so far has all of depth. */
static bool put_next(walk *w, const pl_ix_holder_id *of, uint32_t n)
{
    const four more = {w->more, w->more, w->more, w->more};
    const four depth = {w->depth, w->depth, w->depth, w->depth};
    bool any = false;
    for (uint32_t i = 0; i < n; i++) {
        int slot = (int)(of[i] >> 18), k = w->r->place[slot];
        if (k >= w->n || w->out[k].slot != slot || past_life(w, of[i]) ||
            w->out[k].blocks[PL_TIERS - 1] != w->depth)
            continue;
        four blocks;
        memcpy(&blocks, w->out[k].blocks, sizeof blocks);
        blocks += more & (four)(blocks == depth) & from_tier[of[i] >> 16 & 3];
        memcpy(w->out[k].blocks, &blocks, sizeof blocks);
        any = true;
    }
    return any;
}

/* Accounts for the blocks that are pending. False: nobody holds the prompt that far. */
static bool flush(walk *w)
{
    pl_ix_holder_id one = w->set & ~PL_IX_ONE;
    const pl_ix_holder_id *of = &one;
    uint32_t n = 1;
    bool plain = false;
    if (!(w->set & PL_IX_ONE)) {
        _Atomic(pl_ix_members *) *sets = atomic_load_explicit(
            (_Atomic(_Atomic(pl_ix_members *) *) *)&w->ix->sets, memory_order_acquire);
        const pl_ix_members *m = atomic_load_explicit(&sets[w->set], memory_order_acquire);
        of = m->of;
        n = m->n;
        plain = m->plain;
    }
    bool any = true;
    if (w->depth)
        any = put_next(w, of, n);
    else if (plain && !w->check_lives)
        put_plain(w, of, n);
    else
        put_first(w, of, n);
    w->depth += w->more;
    w->more = 0;
    return any && w->n > 0;
}

/* Blocks [0, m) of the run are the prompt's next. False: nobody holds it that far. */
static inline bool take(walk *w, const pl_ix_view *v, uint32_t m)
{
    for (uint32_t i = 0, begin = 0; begin < m; begin = v->of[i++].end) {
        pl_ix_set set = v->of[i].set;
        if (set != w->set) {
            if (w->more && !flush(w))
                return false;
            w->set = set;
        }
        if (set == 0)
            return false;
        w->more += (v->of[i].end < m ? v->of[i].end : m) - begin;
    }
    return true;
}

/* While the run is compared, its next lines and the child at its likeliest end are fetched: where
 * somebody forked off last, or behind its last block. */
static inline __attribute__((always_inline)) void look_ahead(const pl_ix_children *c,
                                                             const pl_ix_run *run, uint32_t held,
                                                             const uint64_t *local, size_t left)
{
    uint32_t at = atomic_load_explicit((_Atomic uint16_t *)&run->fork, memory_order_relaxed);
    if (at == 0)
        at = held;
    if (at >= left)
        return;
    uint64_t i = pl_ix_child_hash(run->id, at, local[at]) & c->mask;
    uint64_t s = atomic_load_explicit((_Atomic uint64_t *)&c->slot[i], memory_order_relaxed);
    const char *child = (const char *)(uintptr_t)(s & 0xffffffffffffu);
    __builtin_prefetch(child);
    __builtin_prefetch(child + 64);
}

int pl_index_match(pl_index_reader *r, pl_index_space space, const uint64_t *local, size_t n,
                   pl_match *out, int cap)
{
    const pl_index *ix = r->ix;
    if (n == 0 || space == 0 || cap <= 0)
        return 0;
    _Atomic uint64_t *epoch = (_Atomic uint64_t *)&ix->epoch;
    atomic_store_explicit(&r->epoch, atomic_load_explicit(epoch, memory_order_relaxed),
                          memory_order_seq_cst);
    (void)atomic_load_explicit(epoch, memory_order_seq_cst); /* what for: index_reclaim.c */
    walk w = {.r = r,
              .ix = ix,
              .out = out,
              .cap = cap,
              .check_lives = atomic_load_explicit((_Atomic uint32_t *)&ix->past_lives,
                                                  memory_order_acquire) != 0};
    uint32_t tick = atomic_load_explicit((_Atomic uint32_t *)&ix->tick, memory_order_relaxed);
    const pl_ix_children *c =
        atomic_load_explicit((_Atomic(pl_ix_children *) *)&ix->children, memory_order_acquire);
    pl_ix_run *run = pl_ix_child(c, PL_IX_ROOT | space, 0, local[0]);
    for (size_t pos = 0; run;) {
        if (atomic_load_explicit(&run->seen, memory_order_relaxed) != tick)
            atomic_store_explicit(&run->seen, tick, memory_order_relaxed);
        pl_ix_view v;
        pl_ix_look(run, &v);
        uint32_t held = v.n ? v.of[v.n - 1].end : 0;
        size_t left = n - pos;
        look_ahead(c, run, held, local + pos, left);
        uint32_t m = (uint32_t)pl_ix_equal(run->local, local + pos, left < held ? left : held);
        if (!take(&w, &v, m) || m == 0)
            break;
        pos += m;
        if (pos == n)
            break;
        run = pl_ix_child(c, run->id, m, local[pos]);
    }
    if (w.more)
        flush(&w);
    atomic_store_explicit(&r->epoch, 0, memory_order_release);
    return w.n;
}
