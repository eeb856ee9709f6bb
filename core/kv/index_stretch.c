/* Who holds what of a run: a run's blocks fall into stretches, and all blocks of a stretch are held
 * by exactly the same set. Called by the index's writer. A reader takes one word of the run's body
 * and has a consistent picture: it is the only stretch, or the address of a list that is never
 * changed but replaced.
 *
 * Neighbouring stretches differ, the last one is not empty, ends ascend, and the last end is at
 * most the run's number of blocks. Each stretch of the present list owns a reference to its set. */
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "kv/index_impl.h"

static size_t list_bytes(uint32_t n)
{
    return sizeof(pl_ix_stretches) + n * sizeof(pl_ix_stretch);
}

static void publish(pl_ix_run *r, uint64_t held)
{
    atomic_store_explicit(&r->held, held, memory_order_release);
}

static uint64_t word(uint32_t end, pl_ix_set set)
{
    return set ? (uint64_t)end << 32 | set : 0;
}

/* Gives back the list that was there. */
static void retire_list(pl_index *ix, uint64_t held)
{
    if (held & PL_IX_MANY) {
        pl_ix_stretches *l = (pl_ix_stretches *)(uintptr_t)(held & ~PL_IX_MANY);
        for (uint32_t i = 0; i < l->n; i++)
            pl_ix_set_unref(ix, l->of[i].set);
        pl_ix_retire(ix, l, list_bytes(l->n), PL_IX_PLAIN, 0);
    } else {
        pl_ix_set_unref(ix, (pl_ix_set)held);
    }
}

void pl_ix_stretches_clear(pl_index *ix, pl_ix_run *r)
{
    uint64_t held = atomic_load_explicit(&r->held, memory_order_relaxed);
    publish(r, 0);
    retire_list(ix, held);
}

/* The list under construction, in ix->scratch; each entry owns a reference. */
typedef struct builder {
    pl_index *ix;
    uint32_t n, end;
} builder;

static void take(builder *b, uint32_t end, pl_ix_set set)
{
    pl_ix_stretch *s = b->ix->scratch;
    if (end == b->end) {
        pl_ix_set_unref(b->ix, set);
    } else if (b->n && s[b->n - 1].set == set) {
        s[b->n - 1].end = b->end = end;
        pl_ix_set_unref(b->ix, set);
    } else {
        s[b->n++] = (pl_ix_stretch){b->end = end, set};
    }
}

static int change(pl_index *ix, pl_ix_run *r, uint32_t a, uint32_t b, pl_ix_holder_id h, bool in)
{
    int err = 0;
    pl_ix_view v;
    pl_ix_look(r, &v);
    builder to = {.ix = ix};
    uint32_t begin = 0;
    for (uint32_t i = 0; i < v.n && !err; i++) {
        uint32_t end = v.of[i].end;
        pl_ix_set set = v.of[i].set, changed;
        if (begin < a) {
            pl_ix_set_ref(ix, set);
            take(&to, end < a ? end : a, set);
        }
        if (begin < b && end > a) {
            err =
                in ? pl_ix_set_with(ix, set, h, &changed) : pl_ix_set_without(ix, set, h, &changed);
            if (err)
                break;
            take(&to, end < b ? end : b, changed);
        }
        if (end > b) {
            pl_ix_set_ref(ix, set);
            take(&to, end, set);
        }
        begin = end;
    }
    if (!err && in && begin < b) {
        if (begin < a)
            take(&to, a, 0);
        take(&to, b, PL_IX_ONE | h);
    }
    while (to.n && ix->scratch[to.n - 1].set == 0)
        to.n--;
    pl_ix_stretches *l = NULL;
    if (!err && to.n > 1 && !(l = pl_ix_alloc(ix, list_bytes(to.n))))
        err = PL_ENOMEM;
    if (err) {
        for (uint32_t i = 0; i < to.n; i++)
            pl_ix_set_unref(ix, ix->scratch[i].set);
        return err;
    }
    uint64_t held = atomic_load_explicit(&r->held, memory_order_relaxed);
    if (l) {
        l->n = to.n;
        memcpy(l->of, ix->scratch, to.n * sizeof *l->of);
        publish(r, PL_IX_MANY | (uint64_t)(uintptr_t)l);
    } else {
        publish(r, to.n ? word(ix->scratch[0].end, ix->scratch[0].set) : 0);
    }
    retire_list(ix, held);
    return 0;
}

int pl_ix_run_hold(pl_index *ix, uint32_t id, uint32_t a, uint32_t b, pl_ix_holder_id h)
{
    pl_ix_run *r = ix->dir[id].run;
    uint64_t held = atomic_load_explicit(&r->held, memory_order_relaxed);
    uint32_t end = (uint32_t)(held >> 32);
    /* what decoding does: one more block behind those that only this holder has */
    if ((held == 0 && a == 0) ||
        (!(held & PL_IX_MANY) && a <= end && (uint32_t)held == (PL_IX_ONE | h))) {
        publish(r, word(b > end ? b : end, PL_IX_ONE | h));
        return 0;
    }
    return change(ix, r, a, b, h, true);
}

void pl_ix_run_drop(pl_index *ix, uint32_t id, uint32_t a, uint32_t b, pl_ix_holder_id h)
{
    pl_ix_run *r = ix->dir[id].run;
    uint64_t held = atomic_load_explicit(&r->held, memory_order_relaxed);
    if (!(held & PL_IX_MANY) && (uint32_t)held == (PL_IX_ONE | h) && b >= (uint32_t)(held >> 32)) {
        if (a < (uint32_t)(held >> 32))
            publish(r, a ? word(a, PL_IX_ONE | h) : 0);
        return;
    }
    if (change(ix, r, a, b, h, false) != 0) {
        r->child_end |= PL_IX_KEEP;
        pl_ix_stretches_clear(ix, r);
    }
}

bool pl_ix_run_has(const pl_index *ix, uint32_t id, pl_ix_holder_id h)
{
    pl_ix_view v;
    pl_ix_look(ix->dir[id].run, &v);
    for (uint32_t i = 0; i < v.n; i++)
        if (pl_ix_set_has(ix, v.of[i].set, h))
            return true;
    return false;
}
