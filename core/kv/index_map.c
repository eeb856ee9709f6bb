/* Engine hash -> block, for one holder: open addressing with the entries in descending order of
 * key. Called by the index's writer, the only one that ever looks.
 *
 * A key is the engine hash under a bijection that is secret to this index, so it names the hash
 * exactly and an engine cannot choose where it falls. Its home place is ~key * cap / 2^64, which
 * falls as the key grows; an entry lies at its home or, pushed on by greater keys, behind it. Hence
 * a search ends at the first key that is not greater (an empty place has key 0), and a table is
 * grown by copying it in order. There is no wrapping round: PL_IX_MAP_PAD places follow the last
 * home, and the last of all stays empty. Loaded to LOAD_MAX / 16, grown by a third.
 *
 * A large map is many tables, since a copy of one would keep the writer from its events: linear
 * hashing by the top of the key. With EACH names a table on average, the next one in order is split
 * in two, which is a copy again; so a table has at most some 2 * EACH, and each grows by itself. A
 * map that gets smaller keeps its tables, but for what is too much in each. */
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "kv/index_impl.h"

enum { MAP_MIN = 24, LOAD_MAX = 13, LOAD_FULL = 15, EACH = 16384 };

uint64_t pl_ix_key(const pl_index *ix, uint64_t name)
{
    uint64_t h = (name ^ ix->seed) * 0x9e3779b97f4a7c15u;
    h = (h ^ h >> 32) * 0xd6e8feb86659fd93u;
    return h;
}

static size_t table_bytes(uint32_t cap)
{
    return ((size_t)cap + PL_IX_MAP_PAD) * sizeof(pl_ix_entry);
}

static bool is_full(const pl_ix_table *t, uint64_t n, uint32_t load)
{
    return n * 16 > (uint64_t)t->cap * load;
}

/* What goes into a copy of a table. */
typedef enum choice { ALL, MARKED, FIRST_HALF, SECOND_HALF } choice; /* marked: 0 copies */

static inline bool is_chosen(const pl_ix_table *t, const pl_ix_entry *e, choice c)
{
    bool second = ~e->key << t->shift >> 63;
    return e->run && (c == ALL || (c == MARKED && pl_ix_copies_of(e) == 0) ||
                      (c == FIRST_HALF && !second) || (c == SECOND_HALF && second));
}

/* False: the last places overflowed. */
static bool copy_into(pl_ix_table *to, const pl_ix_table *from, choice c)
{
    uint32_t next = 0;
    for (uint32_t i = 0; from->e && i < from->cap + PL_IX_MAP_PAD; i++) {
        if (!is_chosen(from, &from->e[i], c))
            continue;
        uint32_t at = pl_ix_home(to, from->e[i].key);
        if (at < next)
            at = next;
        if (at >= to->cap + PL_IX_MAP_PAD - 1) /* the last place stays empty: searches end */
            return false;
        to->e[at] = from->e[i];
        to->e[at].at_copies += c == MARKED;
        to->n++;
        next = at + 1;
    }
    return true;
}

/* *to is a new table with what shall go there. */
static int copy(pl_index *ix, const pl_ix_table *t, uint64_t cap, choice c, pl_ix_table *to)
{
    for (;; cap += cap / 4) {
        if (cap > UINT32_MAX - 2 * PL_IX_MAP_PAD)
            return PL_ELIMIT;
        *to = (pl_ix_table){.cap = (uint32_t)cap, .shift = t->shift + (c >= FIRST_HALF)};
        to->e = pl_ix_zalloc(ix, table_bytes(to->cap));
        if (!to->e)
            return PL_ENOMEM;
        if (copy_into(to, t, c))
            return 0;
        pl_ix_free(ix, to->e, table_bytes(to->cap));
    }
}

static int resize(pl_index *ix, pl_ix_table *t, uint64_t cap)
{
    pl_ix_table to;
    int err = copy(ix, t, cap, ALL, &to);
    if (err)
        return err;
    pl_ix_free(ix, t->e, table_bytes(t->cap));
    *t = to;
    return 0;
}

static uint64_t grown(uint32_t cap)
{
    return (uint64_t)cap + cap / 3 + 8;
}

/* Makes two of the next table in order. Failed: it stays, and grows. */
static bool split(pl_index *ix, pl_ix_map *m)
{
    uint32_t at = 2 * m->split;
    pl_ix_table old = m->part[at], first, second;
    uint64_t cap = (uint64_t)old.n * 2 / 3 + MAP_MIN;
    pl_ix_table *part = pl_ix_alloc(ix, (m->parts + 1) * sizeof *part);
    if (!part)
        return false;
    if (copy(ix, &old, cap, FIRST_HALF, &first) != 0) {
        pl_ix_free(ix, part, (m->parts + 1) * sizeof *part);
        return false;
    }
    if (copy(ix, &old, cap, SECOND_HALF, &second) != 0) {
        pl_ix_free(ix, first.e, table_bytes(first.cap));
        pl_ix_free(ix, part, (m->parts + 1) * sizeof *part);
        return false;
    }
    pl_ix_free(ix, old.e, table_bytes(old.cap));
    memcpy(part, m->part, at * sizeof *part);
    part[at] = first;
    part[at + 1] = second;
    memcpy(part + at + 2, m->part + at + 1, (m->parts - at - 1) * sizeof *part);
    if (m->part != &m->one)
        pl_ix_free(ix, m->part, m->parts * sizeof *part);
    m->part = part;
    m->parts++;
    if (++m->split == 1u << m->bits) {
        m->bits++;
        m->split = 0;
    }
    return true;
}

int pl_ix_map_reserve(pl_index *ix, pl_ix_map *m, uint32_t more)
{
    uint64_t want = (uint64_t)m->n + more;
    if (!m->part) {
        uint64_t cap = want * 4 / 3 + 8;
        int err = resize(ix, &m->one, cap < MAP_MIN ? MAP_MIN : cap);
        if (err)
            return err;
        m->part = &m->one;
        m->parts = 1;
    }
    while (want > (uint64_t)m->parts * EACH && split(ix, m))
        ;
    if (m->parts > 1 || !is_full(&m->one, want, LOAD_MAX))
        return 0; /* tables of several grow when it is their turn */
    uint64_t cap = grown(m->one.cap);
    return resize(ix, &m->one, cap < want * 4 / 3 ? want * 4 / 3 + 8 : cap);
}

size_t pl_ix_map_growth_most(const pl_ix_map *m, size_t more)
{
    uint64_t want = (uint64_t)m->n + more;
    bool enough = m->parts == 1 && want <= EACH && !is_full(&m->one, want, LOAD_MAX);
    return enough ? 0 : (want * 3 / 2 + 64) * sizeof(pl_ix_entry);
}

/* A table that grows is there twice for a moment; names fall into all of them alike, more or less.
 */
size_t pl_ix_map_growth(const pl_ix_map *m, size_t more)
{
    uint64_t want = (uint64_t)m->n + more;
    size_t bytes = 0;
    if (m->parts <= 1)
        return pl_ix_map_growth_most(m, more);
    for (uint32_t i = 0; i < m->parts; i++) {
        const pl_ix_table *t = &m->part[i];
        uint64_t share = more >> t->shift;
        share += share / 2 + 16 < more ? share / 2 + 16 : more;
        if (is_full(t, t->n + share, LOAD_MAX))
            bytes += table_bytes(t->cap) / 3 * 4 + 128;
    }
    for (uint64_t k = m->parts; want > k * EACH; k++)
        bytes += table_bytes(m->part[2 * m->split].cap) / 3 * 4 + 256;
    return bytes;
}

pl_ix_entry *pl_ix_map_find(const pl_ix_map *m, uint64_t key)
{
    if (!m->part)
        return NULL;
    const pl_ix_table *t = pl_ix_table_of(m, key);
    pl_ix_entry *e = &t->e[pl_ix_home(t, key)];
    while (e->key > key)
        e++;
    return e->run && e->key == key ? e : NULL;
}

/* Room for one more, within the cap while there are places left. */
static bool has_room(pl_index *ix, pl_ix_table *t)
{
    uint64_t cap = grown(t->cap);
    if (!is_full(t, (uint64_t)t->n + 1, LOAD_MAX))
        return true;
    bool allowed = pl_ix_get(&ix->bytes) + table_bytes((uint32_t)cap) <= ix->max_bytes;
    return (allowed && resize(ix, t, cap) == 0) || !is_full(t, (uint64_t)t->n + 1, LOAD_FULL);
}

pl_ix_entry *pl_ix_map_at(pl_index *ix, pl_ix_map *m, uint64_t key)
{
    pl_ix_table *t = pl_ix_table_of(m, key);
    pl_ix_entry *e = &t->e[pl_ix_home(t, key)];
    while (e->key > key)
        e++;
    if (e->run && e->key == key)
        return e;
    pl_ix_entry *end = e, *old = t->e;
    if (m->parts > 1 && !has_room(ix, t))
        return NULL;
    if (t->e != old)
        return pl_ix_map_at(ix, m, key);
    while (end->run)
        end++;
    if (end == &t->e[t->cap + PL_IX_MAP_PAD - 1])
        return resize(ix, t, grown(t->cap)) == 0 ? pl_ix_map_at(ix, m, key) : NULL;
    memmove(e + 1, e, (size_t)(end - e) * sizeof *e);
    *e = (pl_ix_entry){.key = key};
    t->n++;
    m->n++;
    return e;
}

void pl_ix_map_delete(pl_ix_map *m, pl_ix_entry *e)
{
    pl_ix_table *t = pl_ix_table_of(m, e->key);
    pl_ix_entry *end = e + 1;
    while (end->run && pl_ix_home(t, end->key) < (uint32_t)(end - t->e))
        end++;
    memmove(e, e + 1, (size_t)(end - e - 1) * sizeof *e);
    end[-1] = (pl_ix_entry){0};
    t->n--;
    m->n--;
}

void pl_ix_table_shrink(pl_index *ix, pl_ix_table *t, uint32_t below_16ths)
{
    if (t->cap > 4 * MAP_MIN && (uint64_t)t->n * 16 < (uint64_t)t->cap * below_16ths)
        (void)resize(ix, t, (uint64_t)t->n * 4 / 3 + MAP_MIN); /* failed: it stays as it is */
}

void pl_ix_map_shrink(pl_index *ix, pl_ix_map *m, uint32_t below_16ths)
{
    if (m->n)
        pl_ix_table_shrink(ix, &m->part[m->turn++ % m->parts], below_16ths);
    else if (m->parts > 1 || m->one.cap > 4 * MAP_MIN)
        pl_ix_map_free(ix, m);
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

static void free_tables(pl_index *ix, pl_ix_table *t, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        pl_ix_free(ix, t[i].e, table_bytes(t[i].cap));
}

int pl_ix_map_part(pl_index *ix, pl_ix_map *m, uint32_t kept, uint64_t **rest, uint32_t *rest_n,
                   size_t *rest_bytes)
{
    size_t table_n = m->parts * sizeof(pl_ix_table), bytes = 0;
    pl_ix_table *to = pl_ix_alloc(ix, table_n);
    uint32_t n = 0, done = 0;
    int err = to ? 0 : PL_ENOMEM;
    for (; !err && done < m->parts; done += !err) {
        uint64_t share = (uint64_t)kept * m->part[done].n / m->n; /* more or less */
        err = copy(ix, &m->part[done], share * 4 / 3 + MAP_MIN, MARKED, &to[done]);
    }
    bytes = 2 * (size_t)(m->n - kept) * sizeof(uint64_t); /* and as much for sorting */
    uint64_t *words = err ? NULL : pl_ix_alloc(ix, bytes), greatest = 0;
    if (!words) {
        free_tables(ix, to, done);
        pl_ix_free(ix, to, table_n);
        return PL_ENOMEM;
    }
    for (uint32_t p = 0; p < m->parts; p++)
        for (uint32_t i = 0; i < m->part[p].cap + PL_IX_MAP_PAD; i++) {
            const pl_ix_entry *e = &m->part[p].e[i];
            if (!e->run || pl_ix_copies_of(e) == 0)
                continue;
            words[n] = (uint64_t)e->run << 12 | pl_ix_at_of(e);
            greatest |= words[n++];
        }
    uint64_t *sorted = words;
    sort(&sorted, words + n, n, greatest);
    if (sorted != words)
        memcpy(words, sorted, n * sizeof *words);
    free_tables(ix, m->part, m->parts);
    memcpy(m->part, to, table_n);
    pl_ix_free(ix, to, table_n);
    m->n = kept;
    *rest = words;
    *rest_n = n;
    *rest_bytes = bytes;
    return 0;
}

void pl_ix_map_free(pl_index *ix, pl_ix_map *m)
{
    if (m->part)
        free_tables(ix, m->part, m->parts);
    if (m->part != &m->one)
        pl_ix_free(ix, m->part, m->parts * sizeof *m->part);
    *m = (pl_ix_map){0};
}
