/* Memory of the index: what is allocated is counted, and what a reader may still look at is freed
 * only when no reader can. Called by the index's writer.
 *
 * Epochs: a reader writes the epoch it sees into its own line before it looks at anything and zero
 * when it is done. Memory is first unlinked, then retired under the current epoch, then the epoch
 * goes up; it may be freed once every reader inside a match began after that. A reader never waits;
 * the writer waits for readers only when GARBAGE_MAX has piled up behind one that does not leave.
 *
 * What must hold: a reader that the writer has not seen inside does not find what was unlinked. The
 * writer unlinks, (1) raises the epoch, (2) reads the reader's line; the reader (3) writes its
 * line, (4) reads the epoch again, then follows pointers. All four are sequentially consistent, so
 * when (2) missed (3), the order is 1 2 3 4: (4) reads what (1) wrote or later, and with that
 * acquires all that was unlinked before. The same when the epoch in the line is a later one: (4)
 * reads no earlier one. And when (2) sees zero or a later visit, it acquires the end of the one
 * before. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "kv/index_impl.h"

enum { RECLAIM_EACH = 128 };
#define GARBAGE_MAX ((size_t)64 << 20)

/* What the allocator takes for a block of that size, headers included. */
static size_t heap_bytes(size_t bytes)
{
    size_t n = (bytes + 8 + 15) & ~(size_t)15;
    return n < 32 ? 32 : n;
}

void *pl_ix_alloc(pl_index *ix, size_t bytes)
{
    void *p = malloc(bytes);
    if (p)
        pl_ix_count(&ix->bytes, (int64_t)heap_bytes(bytes));
    return p;
}

void *pl_ix_zalloc(pl_index *ix, size_t bytes)
{
    void *p = calloc(1, bytes);
    if (p)
        pl_ix_count(&ix->bytes, (int64_t)heap_bytes(bytes));
    return p;
}

void pl_ix_free(pl_index *ix, void *p, size_t bytes)
{
    if (!p)
        return;
    pl_ix_count(&ix->bytes, -(int64_t)heap_bytes(bytes));
    free(p);
}

static void dispose(pl_index *ix, const pl_ix_garbage *g)
{
    if (g->kind == PL_IX_RUN_ID) {
        ix->dir[g->id].refs = ix->dir_free;
        ix->dir_free = g->id;
    } else if (g->kind == PL_IX_SET_ID) {
        ix->set_free[ix->set_free_n++] = g->id;
    }
    ix->garbage_bytes -= g->bytes;
    pl_ix_free(ix, g->p, g->bytes);
}

/* The epoch of the reader that has been inside longest; the current one without any. */
static uint64_t oldest(pl_index *ix)
{
    uint64_t least = atomic_load_explicit(&ix->epoch, memory_order_relaxed);
    for (int i = 0; i < PL_IX_READERS; i++) {
        pl_index_reader *r = atomic_load_explicit(&ix->reader[i], memory_order_seq_cst);
        if (!r) /* they are made in order and kept; one that is missed comes after, as in (2) */
            break;
        uint64_t e = atomic_load_explicit(&r->epoch, memory_order_seq_cst);
        if (e && e < least)
            least = e;
    }
    return least;
}

void pl_ix_reclaim(pl_index *ix)
{
    if (ix->garbage_n == 0)
        return;
    atomic_fetch_add_explicit(&ix->epoch, 1, memory_order_seq_cst);
    uint64_t least = oldest(ix);
    while (ix->garbage_n) {
        pl_ix_garbage g = ix->garbage[ix->garbage_head];
        if (g.epoch >= least)
            break;
        ix->garbage_head = (ix->garbage_head + 1) & (ix->garbage_cap - 1);
        ix->garbage_n--;
        dispose(ix, &g);
    }
}

static bool grow(pl_index *ix)
{
    uint32_t cap = ix->garbage_cap ? ix->garbage_cap * 2 : 256;
    pl_ix_garbage *g = pl_ix_alloc(ix, cap * sizeof *g);
    if (!g)
        return false;
    for (uint32_t i = 0; i < ix->garbage_n; i++)
        g[i] = ix->garbage[(ix->garbage_head + i) & (ix->garbage_cap - 1)];
    pl_ix_free(ix, ix->garbage, ix->garbage_cap * sizeof *g);
    ix->garbage = g;
    ix->garbage_cap = cap;
    ix->garbage_head = 0;
    return true;
}

void pl_ix_retire(pl_index *ix, void *p, size_t bytes, pl_ix_garbage_kind kind, uint32_t id)
{
    pl_ix_garbage g = {.p = p,
                       .epoch = atomic_load_explicit(&ix->epoch, memory_order_relaxed),
                       .bytes = bytes,
                       .id = id,
                       .kind = kind};
    ix->garbage_bytes += bytes;
    if (ix->garbage_n % RECLAIM_EACH == RECLAIM_EACH - 1)
        pl_ix_reclaim(ix);
    while (ix->garbage_bytes > GARBAGE_MAX && ix->garbage_n) {
        pl_ix_reclaim(ix);
        if (ix->garbage_bytes > GARBAGE_MAX && ix->garbage_n)
            sched_yield();
    }
    if (ix->garbage_n == ix->garbage_cap && !grow(ix)) {
        /* no memory to remember it with: wait until nobody can see it */
        uint64_t after = atomic_fetch_add_explicit(&ix->epoch, 1, memory_order_seq_cst) + 1;
        while (oldest(ix) < after)
            sched_yield();
        dispose(ix, &g);
        return;
    }
    ix->garbage[(ix->garbage_head + ix->garbage_n++) & (ix->garbage_cap - 1)] = g;
}

void pl_ix_reclaim_all(pl_index *ix)
{
    for (; ix->garbage_n; ix->garbage_n--) {
        dispose(ix, &ix->garbage[ix->garbage_head]);
        ix->garbage_head = (ix->garbage_head + 1) & (ix->garbage_cap - 1);
    }
    pl_ix_free(ix, ix->garbage, ix->garbage_cap * sizeof *ix->garbage);
    ix->garbage = NULL;
    ix->garbage_cap = ix->garbage_head = 0;
}
