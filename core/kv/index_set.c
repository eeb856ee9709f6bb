/* Interned sets of holders: equal sets have equal words, so that "the same workers as before" is
 * one comparison. Called by the index's writer; readers look members up by the number in a word.
 *
 * Sets of one member are the word itself and take no memory; most blocks are held by one worker.
 * The others are counted by the stretches of runs that use them. A set and its number are given
 * back only when no reader can see them (index_reclaim.c). The hash of a set is the sum of its
 * members' hashes, so that adding one costs one comparison of the members, not a hash of them. */
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "kv/index_impl.h"

#define GONE UINT32_MAX

static uint64_t member_hash(pl_ix_holder_id h)
{
    uint64_t z = (h + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    return z ^ z >> 27;
}

static _Atomic(pl_ix_members *) *table(const pl_index *ix)
{
    return atomic_load_explicit((_Atomic(_Atomic(pl_ix_members *) *) *)&ix->sets,
                                memory_order_relaxed);
}

static pl_ix_members *members(const pl_index *ix, pl_ix_set s)
{
    return atomic_load_explicit(&table(ix)[s], memory_order_relaxed);
}

static size_t members_bytes(uint32_t n)
{
    return sizeof(pl_ix_members) + n * sizeof(pl_ix_holder_id);
}

bool pl_ix_set_has(const pl_index *ix, pl_ix_set s, pl_ix_holder_id h)
{
    if (s == 0 || s & PL_IX_ONE)
        return s == (PL_IX_ONE | h);
    const pl_ix_members *m = members(ix, s);
    uint32_t lo = 0, hi = m->n;
    while (lo < hi) {
        uint32_t mid = (lo + hi) / 2;
        if (m->of[mid] < h)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < m->n && m->of[lo] == h;
}

void pl_ix_set_ref(pl_index *ix, pl_ix_set s)
{
    if (s && !(s & PL_IX_ONE))
        members(ix, s)->refs++;
}

static bool grow_table(pl_index *ix)
{
    uint32_t cap = ix->set_cap ? ix->set_cap * 2 : 64;
    _Atomic(pl_ix_members *) *to = pl_ix_zalloc(ix, cap * sizeof *to), *from = table(ix);
    uint32_t *numbers = pl_ix_alloc(ix, cap * sizeof *numbers);
    if (!to || !numbers) {
        pl_ix_free(ix, to, cap * sizeof *to);
        pl_ix_free(ix, numbers, cap * sizeof *numbers);
        return false;
    }
    for (uint32_t i = 1; i < ix->set_n; i++)
        atomic_store_explicit(&to[i], atomic_load_explicit(&from[i], memory_order_relaxed),
                              memory_order_relaxed);
    if (ix->set_free_n)
        memcpy(numbers, ix->set_free, ix->set_free_n * sizeof *numbers);
    pl_ix_free(ix, ix->set_free, ix->set_cap * sizeof *numbers);
    ix->set_free = numbers;
    uint32_t old = ix->set_cap;
    ix->set_cap = cap;
    if (ix->set_n == 0)
        ix->set_n = 1;
    atomic_store_explicit(&ix->sets, to, memory_order_release);
    if (from)
        pl_ix_retire(ix, from, old * sizeof *from, PL_IX_PLAIN, 0);
    return true;
}

static bool grow_intern(pl_index *ix)
{
    uint32_t cap = 64;
    while (cap < ix->set_used * 3)
        cap *= 2;
    uint32_t *to = pl_ix_zalloc(ix, cap * sizeof *to);
    if (!to)
        return false;
    for (uint32_t i = 0; i < ix->intern_cap; i++) {
        uint32_t s = ix->intern[i];
        if (s == 0 || s == GONE)
            continue;
        uint32_t at = (uint32_t)members(ix, s)->hash & (cap - 1);
        while (to[at])
            at = (at + 1) & (cap - 1);
        to[at] = s;
    }
    pl_ix_free(ix, ix->intern, ix->intern_cap * sizeof *to);
    ix->intern = to;
    ix->intern_cap = cap;
    ix->intern_used = ix->set_used;
    return true;
}

/* The set of ix->members[0 .. n), which has that hash. */
static int intern(pl_index *ix, uint64_t hash, uint32_t n, pl_ix_set *out)
{
    if (n < 2) {
        *out = n ? PL_IX_ONE | ix->members[0] : 0;
        return 0;
    }
    if ((ix->intern_used + 1) * 3 > ix->intern_cap * 2 && !grow_intern(ix))
        return PL_ENOMEM;
    uint32_t at = (uint32_t)hash & (ix->intern_cap - 1), s;
    for (; (s = ix->intern[at]) != 0; at = (at + 1) & (ix->intern_cap - 1)) {
        pl_ix_members *m = s == GONE ? NULL : members(ix, s);
        if (m && m->hash == hash && m->n == n &&
            memcmp(m->of, ix->members, n * sizeof *m->of) == 0) {
            m->refs++;
            *out = s;
            return 0;
        }
    }
    if (ix->set_free_n == 0 && ix->set_n >= ix->set_cap && !grow_table(ix))
        return PL_ENOMEM;
    pl_ix_members *m = pl_ix_alloc(ix, members_bytes(n));
    if (!m)
        return PL_ENOMEM;
    m->hash = hash;
    m->refs = 1;
    m->n = n;
    m->plain = true;
    for (uint32_t i = 0; i < n; i++)
        if ((ix->members[i] >> 16 & 3) != PL_TIER_DEVICE ||
            (i && ix->members[i] >> 18 == ix->members[i - 1] >> 18))
            m->plain = false;
    memcpy(m->of, ix->members, n * sizeof *m->of);
    s = ix->set_free_n ? ix->set_free[--ix->set_free_n] : ix->set_n++;
    atomic_store_explicit(&table(ix)[s], m, memory_order_release);
    ix->intern[at] = s;
    ix->intern_used++;
    ix->set_used++;
    *out = s;
    return 0;
}

void pl_ix_set_unref(pl_index *ix, pl_ix_set s)
{
    if (s == 0 || s & PL_IX_ONE)
        return;
    pl_ix_members *m = members(ix, s);
    if (--m->refs)
        return;
    uint32_t at = (uint32_t)m->hash & (ix->intern_cap - 1);
    while (ix->intern[at] != s)
        at = (at + 1) & (ix->intern_cap - 1);
    ix->intern[at] = GONE;
    ix->set_used--;
    pl_ix_retire(ix, m, members_bytes(m->n), PL_IX_SET_ID, s);
}

/* Copies the members of s to ix->members; returns their number. */
static uint32_t spread(pl_index *ix, pl_ix_set s, uint64_t *hash)
{
    if (s == 0)
        return (uint32_t)(*hash = 0);
    if (s & PL_IX_ONE) {
        ix->members[0] = s & ~PL_IX_ONE;
        *hash = member_hash(ix->members[0]);
        return 1;
    }
    const pl_ix_members *m = members(ix, s);
    memcpy(ix->members, m->of, m->n * sizeof *m->of);
    *hash = m->hash;
    return m->n;
}

int pl_ix_set_with(pl_index *ix, pl_ix_set s, pl_ix_holder_id h, pl_ix_set *out)
{
    if (s == 0) {
        *out = PL_IX_ONE | h;
        return 0;
    }
    uint64_t hash;
    uint32_t n = spread(ix, s, &hash), i = n;
    if (n >= PL_IX_PLACES)
        return PL_ELIMIT;
    while (i && ix->members[i - 1] > h)
        i--;
    if (i && ix->members[i - 1] == h) {
        pl_ix_set_ref(ix, *out = s);
        return 0;
    }
    memmove(ix->members + i + 1, ix->members + i, (n - i) * sizeof *ix->members);
    ix->members[i] = h;
    return intern(ix, hash + member_hash(h), n + 1, out);
}

int pl_ix_set_without(pl_index *ix, pl_ix_set s, pl_ix_holder_id h, pl_ix_set *out)
{
    if (s == (PL_IX_ONE | h) || s == 0) {
        *out = 0;
        return 0;
    }
    uint64_t hash;
    uint32_t n = spread(ix, s, &hash), i = 0;
    while (i < n && ix->members[i] < h)
        i++;
    if (i == n || ix->members[i] != h) {
        pl_ix_set_ref(ix, *out = s);
        return 0;
    }
    memmove(ix->members + i, ix->members + i + 1, (n - i - 1) * sizeof *ix->members);
    return intern(ix, hash - member_hash(h), n - 1, out);
}

void pl_ix_sets_free(pl_index *ix)
{
    _Atomic(pl_ix_members *) *t = table(ix);
    for (uint32_t i = 0; i < ix->intern_cap; i++) {
        uint32_t s = ix->intern[i];
        if (s != 0 && s != GONE)
            pl_ix_free(ix, members(ix, s), members_bytes(members(ix, s)->n));
    }
    pl_ix_free(ix, ix->intern, ix->intern_cap * sizeof *ix->intern);
    pl_ix_free(ix, ix->set_free, ix->set_cap * sizeof *ix->set_free);
    pl_ix_free(ix, t, ix->set_cap * sizeof *t);
}
