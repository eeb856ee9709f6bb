/* Engine hash -> block, for one holder: open addressing with the entries in descending order of
 * key. Called by the index's writer, the only one that ever looks.
 *
 * A key is the engine hash under a bijection that is secret to this index, so it names the hash
 * exactly and an engine cannot choose where it falls. Its home place is ~key * cap / 2^64, which
 * falls as the key grows; an entry lies at its home or, pushed on by greater keys, behind it. Hence
 * a search ends at the first key that is not greater (an empty place has key 0), and a table is
 * grown by copying it in order. There is no wrapping round: PL_IX_MAP_PAD places follow the last
 * home, and the last of all stays empty. Loaded to LOAD_MAX / 16, grown by a third. */
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "kv/index_impl.h"

enum { MAP_MIN = 24, LOAD_MAX = 13 };

uint64_t pl_ix_key(const pl_index *ix, uint64_t name)
{
    uint64_t h = (name ^ ix->seed) * 0x9e3779b97f4a7c15u;
    h = (h ^ h >> 32) * 0xd6e8feb86659fd93u;
    return h;
}

static inline uint32_t home(const pl_ix_map *m, uint64_t key)
{
    return (uint32_t)(((unsigned __int128)~key * m->cap) >> 64);
}

static size_t table_bytes(uint32_t cap)
{
    return ((size_t)cap + PL_IX_MAP_PAD) * sizeof(pl_ix_entry);
}

/* Those with 0 copies only, or all. False: the last places overflowed. */
static bool copy_into(pl_ix_map *to, const pl_ix_map *from, bool marked)
{
    uint32_t next = 0;
    for (uint32_t i = 0; from->e && i < from->cap + PL_IX_MAP_PAD; i++) {
        if (!from->e[i].run || (marked && pl_ix_copies_of(&from->e[i]) != 0))
            continue;
        uint32_t at = home(to, from->e[i].key);
        if (at < next)
            at = next;
        if (at >= to->cap + PL_IX_MAP_PAD - 1) /* the last place stays empty: searches end */
            return false;
        to->e[at] = from->e[i];
        to->e[at].at_copies += marked;
        to->n++;
        next = at + 1;
    }
    return true;
}

/* *to is a new table with what shall go there. */
static int copy(pl_index *ix, const pl_ix_map *m, uint64_t cap, bool marked, pl_ix_map *to)
{
    for (;; cap += cap / 4) {
        if (cap > UINT32_MAX - 2 * PL_IX_MAP_PAD)
            return PL_ELIMIT;
        *to = (pl_ix_map){.cap = (uint32_t)cap};
        to->e = pl_ix_zalloc(ix, table_bytes(to->cap));
        if (!to->e)
            return PL_ENOMEM;
        if (copy_into(to, m, marked))
            return 0;
        pl_ix_free(ix, to->e, table_bytes(to->cap));
    }
}

static int resize(pl_index *ix, pl_ix_map *m, uint64_t cap)
{
    pl_ix_map to;
    int err = copy(ix, m, cap, false, &to);
    if (err)
        return err;
    pl_ix_free(ix, m->e, table_bytes(m->cap));
    *m = to;
    return 0;
}

int pl_ix_map_reserve(pl_index *ix, pl_ix_map *m, uint32_t more)
{
    uint64_t want = (uint64_t)m->n + more;
    if (m->e && want * 16 <= (uint64_t)m->cap * LOAD_MAX)
        return 0;
    uint64_t cap = m->e ? m->cap + m->cap / 3 + 8 : MAP_MIN;
    if (cap < want * 4 / 3)
        cap = want * 4 / 3 + 8;
    return resize(ix, m, cap);
}

size_t pl_ix_map_growth(const pl_ix_map *m, size_t more)
{
    uint64_t want = (uint64_t)m->n + more;
    return m->e && want * 16 <= (uint64_t)m->cap * LOAD_MAX ? 0
                                                            : (want * 3 / 2 + 64) * sizeof *m->e;
}

pl_ix_entry *pl_ix_map_find(const pl_ix_map *m, uint64_t key)
{
    if (!m->e)
        return NULL;
    pl_ix_entry *e = &m->e[home(m, key)];
    while (e->key > key)
        e++;
    return e->run && e->key == key ? e : NULL;
}

pl_ix_entry *pl_ix_map_at(pl_index *ix, pl_ix_map *m, uint64_t key)
{
    pl_ix_entry *e = &m->e[home(m, key)];
    while (e->key > key)
        e++;
    if (e->run && e->key == key)
        return e;
    pl_ix_entry *end = e;
    while (end->run)
        end++;
    if (end == &m->e[m->cap + PL_IX_MAP_PAD - 1])
        return resize(ix, m, m->cap + m->cap / 3 + 8) == 0 ? pl_ix_map_at(ix, m, key) : NULL;
    memmove(e + 1, e, (size_t)(end - e) * sizeof *e);
    *e = (pl_ix_entry){.key = key};
    m->n++;
    return e;
}

void pl_ix_map_delete(pl_ix_map *m, pl_ix_entry *e)
{
    pl_ix_entry *end = e + 1;
    while (end->run && home(m, end->key) < (uint32_t)(end - m->e))
        end++;
    memmove(e, e + 1, (size_t)(end - e - 1) * sizeof *e);
    end[-1] = (pl_ix_entry){0};
    m->n--;
}

void pl_ix_map_shrink(pl_index *ix, pl_ix_map *m, uint32_t below_16ths)
{
    if (!m->e || m->cap <= 4 * MAP_MIN || (uint64_t)m->n * 16 >= (uint64_t)m->cap * below_16ths)
        return;
    if (m->n == 0)
        pl_ix_map_free(ix, m);
    else
        (void)resize(ix, m, (uint64_t)m->n * 4 / 3 + MAP_MIN); /* failed: it stays as it is */
}

/* Ascending, by DIGIT bits at a time; the result is in *a. */
static void sort(uint64_t **a, uint64_t *other, uint32_t n, uint64_t greatest)
{
    enum { DIGIT = 11, DIGITS = 1 << DIGIT };
    for (uint32_t shift = 0; shift < 64 && greatest >> shift; shift += DIGIT) {
        uint32_t first[DIGITS] = {0};
        for (uint32_t i = 0; i < n; i++)
            first[(*a)[i] >> shift & (DIGITS - 1)]++;
        for (uint32_t i = 0, sum = 0; i < DIGITS; i++) {
            uint32_t count = first[i];
            first[i] = sum;
            sum += count;
        }
        for (uint32_t i = 0; i < n; i++)
            other[first[(*a)[i] >> shift & (DIGITS - 1)]++] = (*a)[i];
        uint64_t *sorted = other;
        other = *a;
        *a = sorted;
    }
}

/* The old table has twice the words that the rest can need: room for sorting. */
int pl_ix_map_part(pl_index *ix, pl_ix_map *m, uint32_t kept, uint64_t **rest, uint32_t *rest_n,
                   size_t *rest_bytes)
{
    pl_ix_map to;
    int err = copy(ix, m, (uint64_t)kept * 4 / 3 + MAP_MIN, true, &to);
    if (err)
        return err;
    size_t places = (size_t)m->cap + PL_IX_MAP_PAD;
    uint64_t *words = (uint64_t *)(void *)m->e, greatest = 0;
    uint32_t n = 0;
    for (size_t i = 0; i < places; i++) {
        pl_ix_entry e = m->e[i];
        if (!e.run || pl_ix_copies_of(&e) == 0)
            continue;
        words[n] = (uint64_t)e.run << 12 | pl_ix_at_of(&e);
        greatest |= words[n++];
    }
    uint64_t *sorted = words;
    sort(&sorted, words + places, n, greatest);
    if (sorted != words)
        memcpy(words, sorted, n * sizeof *words);
    *rest = words;
    *rest_n = n;
    *rest_bytes = table_bytes(m->cap);
    *m = to;
    return 0;
}

void pl_ix_map_free(pl_index *ix, pl_ix_map *m)
{
    pl_ix_free(ix, m->e, table_bytes(m->cap));
    *m = (pl_ix_map){0};
}
