/* The tree of approximate mode: see approx_tree.h. Called by approx.c with the part's lock held;
 * owns its nodes, their keys and holders.
 *
 * A node is a run of chunks; since keys are cumulative, a node is found by the key of its first
 * chunk alone, in one table for the whole tree, and a run is compared by the key of its last one. A
 * walk so touches a line or two per node and none per chunk; only where a prompt leaves a run, the
 * place is searched for by bisection. A leaf that one worker holds alone grows as its conversation
 * does. The table is a linear hash: it grows and shrinks by one place at a time, so that no
 * insertion pays for all.
 *
 * Why `since`: when a worker has lost a run, all that it was sent below is lost with it. Instead of
 * visiting that, the run's holder says from when on it is good again, and a walk takes a holder
 * only when its time is not before the latest `since` on the way. */
#include "kv/approx_tree.h"

#include <stdatomic.h>
#include <string.h>

typedef pl_approx_tree tree;
typedef pl_approx_node node;
typedef pl_approx_holder holder;

enum { PIECE = 128 }; /* places of the table in a piece */

/* --- memory, counted --- */

static size_t size_of(const void *p)
{
    return p ? pl_approx_mem_size(p) : 0;
}

static void release(tree *t, void *p)
{
    t->bytes -= size_of(p);
    pl_approx_mem_put(t->mem, p);
}

/* A piece that fits already stays, unless it has become more than twice as large as needed. */
static void *resize(tree *t, void *p, size_t bytes)
{
    size_t had = size_of(p);
    if (p && bytes <= had && (bytes > had / 2 || had <= 64))
        return p;
    void *to = pl_approx_mem_get(t->mem, bytes);
    if (!to)
        return NULL;
    t->bytes += size_of(to);
    if (p) {
        memcpy(to, p, had < bytes ? had : bytes);
        release(t, p);
    }
    return to;
}

/* --- the table --- */

static node **place(const tree *t, uint64_t key)
{
    uint32_t at = (uint32_t)key & t->mask;
    if (at >= t->buckets)
        at &= t->mask >> 1;
    return &t->table[at / PIECE][at % PIECE];
}

static node *find(const tree *t, uint64_t key)
{
    if (!t->buckets)
        return NULL;
    node *e = *place(t, key);
    while (e && e->first != key)
        e = e->chain;
    return e;
}

/* Moves the chain at `from` to where its nodes belong by now. */
static void rehash(tree *t, node **from)
{
    node *e = *from, *next;
    *from = NULL;
    for (; e; e = next) {
        node **to = place(t, e->first);
        next = e->chain;
        e->chain = *to;
        *to = e;
    }
}

/* False when out of memory; the table then stays as it was. */
static bool table_grow(tree *t)
{
    uint32_t at = t->buckets, piece = at / PIECE;
    if (piece == t->pieces) {
        if ((piece & (piece - 1)) == 0) {
            node ***to = resize(t, t->table, (piece ? piece * 2 : 1) * sizeof *to);
            if (!to)
                return false;
            t->table = to;
        }
        t->table[piece] = resize(t, NULL, PIECE * sizeof **t->table);
        if (!t->table[piece])
            return false;
        t->pieces++;
    }
    t->table[piece][at % PIECE] = NULL;
    if (at > t->mask)
        t->mask = t->mask * 2 + 1;
    t->buckets++;
    if (at)
        rehash(t, &t->table[(at & t->mask >> 1) / PIECE][(at & t->mask >> 1) % PIECE]);
    return true;
}

static void table_shrink(tree *t)
{
    uint32_t at = --t->buckets;
    node *moved = t->table[at / PIECE][at % PIECE];
    if (t->buckets - 1 <= t->mask >> 1)
        t->mask >>= 1;
    rehash(t, &moved);
    if (at % PIECE == 0 && t->pieces > at / PIECE + 1) { /* one piece is kept in reserve */
        t->pieces--;
        release(t, t->table[t->pieces]);
    }
}

static void table_put(tree *t, node *e)
{
    node **at = place(t, e->first);
    e->chain = *at;
    *at = e;
}

static void table_take(tree *t, node *e)
{
    node **at = place(t, e->first);
    while (*at != e)
        at = &(*at)->chain;
    *at = e->chain;
}

/* --- the order of use --- */

static void order_take(tree *t, node *e)
{
    *(e->newer ? &e->newer->older : &t->newest) = e->older;
    *(e->older ? &e->older->newer : &t->oldest) = e->newer;
}

/* Directly on the newer side of `older`; NULL: the newest of all. */
static void order_put(tree *t, node *e, node *older)
{
    e->older = older ? older : t->newest;
    e->newer = older ? older->newer : NULL;
    *(e->newer ? &e->newer->older : &t->newest) = e;
    *(e->older ? &e->older->newer : &t->oldest) = e;
}

/* --- holders --- */

static holder *holders(node *e)
{
    return e->holders_cap == 1 ? &e->h.one : e->h.many;
}

static const holder *const_holders(const node *e)
{
    return e->holders_cap == 1 ? &e->h.one : e->h.many;
}

static bool dead(const tree *t, const holder *h)
{
    uint32_t age = (uint32_t)t->tick - h->time;
    return age > t->ttl ||
           t->tick - age < atomic_load_explicit(&t->floor[h->slot], memory_order_relaxed);
}

/* a before b; both within the TTL and the future that other threads' clocks can be ahead. */
static bool before(uint32_t a, uint32_t b)
{
    return (int32_t)(a - b) < 0;
}

/* The first holder whose slot is not below it. */
static uint32_t holder_at(const node *e, uint16_t slot)
{
    const holder *h = const_holders(e);
    uint32_t from = 0, to = e->holders_n;
    while (from < to) {
        uint32_t middle = (from + to) / 2;
        if (h[middle].slot < slot)
            from = middle + 1;
        else
            to = middle;
    }
    return from;
}

static holder *holder_of(node *e, uint16_t slot)
{
    uint32_t at = holder_at(e, slot);
    return at < e->holders_n && holders(e)[at].slot == slot ? &holders(e)[at] : NULL;
}

static void holder_drop(tree *t, node *e, const holder *h)
{
    holder *all = holders(e);
    size_t at = (size_t)(h - all);
    e->holders_n--;
    t->entries--;
    memmove(all + at, all + at + 1, (e->holders_n - at) * sizeof *all);
}

/* Room for one more: dead ones go first. */
static bool holder_room(tree *t, node *e)
{
    if (e->holders_n < e->holders_cap)
        return true;
    holder *all = holders(e);
    uint16_t live = 0;
    for (uint16_t i = 0; i < e->holders_n; i++)
        if (!dead(t, &all[i]))
            all[live++] = all[i];
    t->entries -= e->holders_n - live;
    e->holders_n = live;
    if (live < e->holders_cap)
        return true;
    uint32_t cap = e->holders_cap == 1 ? 4 : e->holders_cap + e->holders_cap / 2u;
    if (cap > UINT16_MAX)
        cap = UINT16_MAX;
    holder *to = resize(t, e->holders_cap == 1 ? NULL : e->h.many, cap * sizeof *to);
    if (!to)
        return false;
    if (e->holders_cap == 1)
        to[0] = e->h.one;
    e->h.many = to;
    e->holders_cap = (uint16_t)cap;
    return true;
}

static bool holder_touch(tree *t, node *e, uint16_t slot)
{
    holder *h = holder_of(e, slot);
    uint32_t now = (uint32_t)t->tick;
    if (!h) {
        if (!holder_room(t, e))
            return false;
        uint32_t at = holder_at(e, slot);
        h = &holders(e)[at];
        memmove(h + 1, h, (e->holders_n - at) * sizeof *h);
        *h = (holder){.since = now, .slot = slot};
        e->holders_n++;
        t->entries++;
    } /* one that was dead: so is, then, all that it was sent below, which is no younger */
    h->time = now;
    return true;
}

/* --- nodes --- */

static const uint64_t *keys_of(const node *e, uint64_t two[2])
{
    if (e->keys)
        return e->keys;
    two[0] = e->first;
    two[1] = e->last;
    return two;
}

/* Makes e's run these keys, which may lie in its own. */
static bool set_keys(tree *t, node *e, const uint64_t *keys, uint32_t n)
{
    uint64_t first = keys[0], last = keys[n - 1];
    if (n > 2 && !e->keys) {
        e->keys = resize(t, NULL, n * sizeof *keys);
        if (!e->keys)
            return false;
        memcpy(e->keys, keys, n * sizeof *keys);
    } else if (n > 2) {
        memmove(e->keys, keys, n * sizeof *keys); /* never more than it had */
        uint64_t *to = resize(t, e->keys, n * sizeof *keys);
        if (to)
            e->keys = to;
    } else if (e->keys) {
        release(t, e->keys);
        e->keys = NULL;
    }
    e->first = first;
    e->last = last;
    t->chunks = t->chunks - e->n + n;
    e->n = n;
    return true;
}

/* Appends to the run. */
static bool append_keys(tree *t, node *e, const uint64_t *keys, uint32_t n)
{
    uint64_t two[2];
    uint32_t all = e->n + n;
    if (all > 2) {
        bool inside = !e->keys;
        if (inside || size_of(e->keys) < all * sizeof *keys) {
            uint64_t *to = resize(t, e->keys, (inside ? all : all + e->n / 4) * sizeof *keys);
            if (!to)
                return false;
            if (inside)
                memcpy(to, keys_of(e, two), e->n * sizeof *keys);
            e->keys = to;
        }
        memcpy(e->keys + e->n, keys, n * sizeof *keys);
    }
    e->last = keys[n - 1];
    e->n = all;
    t->chunks += n;
    return true;
}

/* A node that is in no list yet. */
static node *node_new(tree *t, const uint64_t *keys, uint32_t n)
{
    if (t->nodes >= t->buckets && !table_grow(t) && !t->buckets)
        return NULL; /* else longer chains will do */
    node *e = resize(t, NULL, sizeof *e);
    if (!e)
        return NULL;
    memset(e, 0, sizeof *e);
    e->holders_cap = 1;
    if (!set_keys(t, e, keys, n)) {
        release(t, e);
        return NULL;
    }
    t->nodes++;
    return e;
}

static void node_free(tree *t, node *e)
{
    t->nodes--;
    t->chunks -= e->n;
    t->entries -= e->holders_n;
    if (e->holders_cap > 1)
        release(t, e->h.many);
    release(t, e->keys);
    release(t, e);
}

/* Gives `to`, which has none, the holders of `from`. */
static bool holders_copy(tree *t, node *to, const node *from)
{
    if (from->holders_n > 1) {
        holder *many = resize(t, NULL, from->holders_n * sizeof *many);
        if (!many)
            return false;
        memcpy(many, from->h.many, from->holders_n * sizeof *many);
        to->h.many = many;
        to->holders_cap = from->holders_n;
    } else if (from->holders_n) {
        to->h.one = const_holders(from)[0];
    }
    to->holders_n = from->holders_n;
    t->entries += to->holders_n;
    return true;
}

/* Cuts e after m of its chunks: what is before becomes a node of its own above it, which is
 * returned. NULL when out of memory; then nothing has changed. */
static node *split(tree *t, node *e, uint32_t m)
{
    uint64_t two[2];
    const uint64_t *keys = keys_of(e, two);
    node *head = node_new(t, keys, m);
    if (!head)
        return NULL;
    if (!holders_copy(t, head, e)) {
        node_free(t, head);
        return NULL;
    }
    head->time = e->time;
    head->parent = e->parent;
    head->children = 1;
    table_take(t, e);
    set_keys(t, e, keys + m, e->n - m); /* it only gets shorter: cannot fail */
    e->parent = head;
    table_put(t, head);
    table_put(t, e);
    order_put(t, head, e);
    return head;
}

void pl_approx_tree_evict(tree *t)
{
    node *e = t->oldest;
    order_take(t, e);
    table_take(t, e);
    if (e->parent)
        e->parent->children--;
    node_free(t, e);
    if (t->buckets > 1 && t->nodes < t->buckets / 2)
        table_shrink(t);
}

bool pl_approx_tree_stale(const tree *t)
{
    return t->oldest && (uint32_t)t->tick - t->oldest->time > t->ttl;
}

/* How many keys from the start are those of the run. At least the first is. */
static uint32_t shared(const node *e, const uint64_t *keys, size_t n)
{
    if (n >= e->n && keys[e->n - 1] == e->last)
        return e->n;
    if (!e->keys)
        return 1;
    uint32_t same = 1, other = n < e->n ? (uint32_t)n : e->n - 1;
    while (same < other) { /* keys[same - 1] is, all from keys[other] on are not */
        uint32_t middle = same + (other - same + 1) / 2;
        if (keys[middle - 1] == e->keys[middle - 1])
            same = middle;
        else
            other = middle - 1;
    }
    return same;
}

/* --- what approx.c asks for --- */

/* Of out[0 .. live), in order of slot, those who hold e, too, come first and in order; returns
 * their number. */
static int narrow(const tree *t, const node *e, pl_approx_hit *out, int live)
{
    const holder *h = const_holders(e), *end = h + e->holders_n;
    int kept = 0;
    for (int i = 0; i < live && h < end; i++) {
        while (h < end && h->slot < out[i].slot)
            h++;
        if (h == end || h->slot != out[i].slot || dead(t, h))
            continue;
        pl_approx_hit hit = out[i];
        if (before(hit.since, h->since))
            hit.since = h->since;
        if (before(h->time, hit.since))
            continue;
        out[i] = out[kept];
        out[kept++] = hit;
    }
    return kept;
}

int pl_approx_tree_match(const tree *t, const uint64_t *keys, size_t n, pl_approx_hit *out, int cap)
{
    const node *e = n ? find(t, keys[0]) : NULL;
    int all = 0;
    if (!e)
        return 0;
    const holder *h = const_holders(e);
    for (int i = 0; i < e->holders_n && all < cap; i++)
        if (!dead(t, &h[i]) && !before(h[i].time, h[i].since))
            out[all++] = (pl_approx_hit){h[i].slot, 0, h[i].since};
    int live = all;
    for (size_t at = 0; live;) {
        uint32_t m = shared(e, keys + at, n - at);
        at += m;
        for (int i = 0; i < live; i++)
            out[i].chunks = (uint32_t)at;
        if (m < e->n || at == n)
            break;
        e = find(t, keys[at]);
        if (!e)
            break;
        live = narrow(t, e, out, live);
    }
    return all;
}

/* May the leaf grow by what this worker is sent, instead of getting a child? */
static bool grows(const tree *t, const node *e, uint16_t slot)
{
    return !e->children && e->holders_n == 1 && const_holders(e)->slot == slot &&
           !dead(t, const_holders(e));
}

int pl_approx_tree_insert(tree *t, const uint64_t *keys, size_t n, uint16_t slot)
{
    node *last = NULL;
    int rc = 0;
    size_t at = 0;
    while (at < n && rc == 0) {
        node *e = find(t, keys[at]);
        if (e) {
            uint32_t m = shared(e, keys + at, n - at);
            if (m < e->n)
                e = split(t, e, m);
            at += m;
        } else if (last && grows(t, last, slot)) {
            if (!append_keys(t, last, keys + at, (uint32_t)(n - at)))
                rc = PL_ENOMEM;
            at = n;
            continue;
        } else {
            e = node_new(t, keys + at, (uint32_t)(n - at));
            if (e) {
                e->parent = last;
                if (last)
                    last->children++;
                table_put(t, e);
                order_put(t, e, NULL);
            }
            at = n;
        }
        if (e)
            last = e;
        else
            rc = PL_ENOMEM;
    }
    for (node *e = last; e; e = e->parent) { /* so that a parent ends up newer than its children */
        order_take(t, e);
        order_put(t, e, NULL);
        e->time = (uint32_t)t->tick;
        if (!holder_touch(t, e, slot))
            rc = PL_ENOMEM;
    }
    return rc;
}

/* The first node that begins at chunk `from` or behind, after a cut if there has to be one; *at is
 * where it begins. NULL when the prompt is not known that far, or out of memory. */
static node *cut(tree *t, const uint64_t *keys, size_t n, uint16_t slot, size_t from, size_t *at)
{
    for (*at = 0; *at < n;) {
        node *e = find(t, keys[*at]);
        if (!e || *at >= from)
            return e;
        uint32_t m = shared(e, keys + *at, n - *at);
        if (*at + m > from) {
            if (!holder_of(e, slot) || !split(t, e, (uint32_t)(from - *at)))
                return NULL;
            *at = from;
            return e;
        }
        if (m < e->n)
            return NULL;
        *at += m;
    }
    return NULL;
}

bool pl_approx_tree_correct(tree *t, const uint64_t *keys, size_t n, uint16_t slot, size_t cached,
                            uint64_t routed_tick)
{
    size_t at;
    node *e = cached < n ? cut(t, keys, n, slot, cached, &at) : NULL;
    holder *h = e ? holder_of(e, slot) : NULL;
    if (!h || dead(t, h) || !before(h->since, (uint32_t)routed_tick))
        return false;
    h->since = (uint32_t)routed_tick;
    return true;
}

bool pl_approx_tree_forget(tree *t, const uint64_t *keys, size_t n, uint16_t slot, size_t from)
{
    size_t at;
    node *e = from < n ? cut(t, keys, n, slot, from, &at) : NULL;
    bool took = false;
    while (e) { /* a run that the prompt leaves in its middle is cut there, the rest is out of reach
                   as well: it goes on from what was lost */
        holder *h = holder_of(e, slot);
        if (h) {
            took = took || !dead(t, h);
            holder_drop(t, e, h);
        }
        if (shared(e, keys + at, n - at) < e->n)
            break;
        at += e->n;
        e = at < n ? find(t, keys[at]) : NULL;
    }
    return took;
}

void pl_approx_tree_init(tree *t, pl_approx_mem *mem, uint32_t ttl, const _Atomic uint64_t *floor)
{
    *t = (tree){.mem = mem, .ttl = ttl, .floor = floor};
}

void pl_approx_tree_destroy(tree *t)
{
    while (t->oldest)
        pl_approx_tree_evict(t);
    for (uint32_t i = 0; i < t->pieces; i++)
        release(t, t->table[i]);
    release(t, t->table);
}
