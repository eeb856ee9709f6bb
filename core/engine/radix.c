/* Prefix cache: see radix.h. Called by the scheduler (sim.c) and its tests, on their thread; it
 * owns its nodes and their copies of the token ids.
 *
 * Children are found through one hash table for the whole tree, keyed by parent and first page:
 * a node needs no child list, and a lookup costs one hash and one compare a node. */
#include "engine/radix.h"

#include <limits.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/err.h"
#include "engine/heap.h"

struct pl_radix_node {
    pl_heap_item order; /* inside `leaves` exactly while evictable; see place() */
    pl_heap_item due;   /* major: retained until then; inside `retained` while it is */
    pl_radix_node *parent;
    pl_radix_node *chain;  /* next in the hash bucket */
    uint32_t *tokens;      /* owned; n of them, a multiple of the page; none in the root */
    pl_sim_kv_name *names; /* owned, of its pages; NULL unless the cache is watched */
    int n;
    int refs;       /* locks on this node or below it */
    int children;   /* how many */
    int uses;       /* requests that made or found it */
    int priority;   /* the highest of them */
    uint64_t stamp; /* of the last use */
    uint32_t id;    /* seeds the children's hashes; addresses would make runs differ */
    uint64_t hash;
};

struct pl_radix {
    int page;
    pl_radix_policy policy;
    uint32_t next_id;
    uint64_t stamp; /* one per match or insert: nodes of equal stamp lie on one path */
    int64_t tokens, evictable;
    int nodes;
    pl_radix_node root;
    pl_heap leaves;   /* unlocked leaves, what goes first on top */
    pl_heap retained; /* nodes, by when that ends */
    int64_t retained_tokens;
    pl_radix_node **bucket;
    size_t mask;
    bool watched;
    pl_sim_kv_events ev;
    void *user;
    pl_namer namer;
};

pl_radix *pl_radix_new(int page_tokens, pl_radix_policy policy)
{
    pl_radix *r = page_tokens < 1 ? NULL : calloc(1, sizeof *r);
    if (!r)
        return NULL;
    r->page = page_tokens;
    r->policy = policy;
    r->mask = 255;
    r->bucket = calloc(r->mask + 1, sizeof *r->bucket);
    if (!r->bucket) {
        free(r);
        return NULL;
    }
    return r;
}

static void node_free(pl_radix_node *n)
{
    free(n->tokens);
    free(n->names);
    free(n);
}

void pl_radix_free(pl_radix *r)
{
    if (!r)
        return;
    for (size_t i = 0; i <= r->mask; i++)
        for (pl_radix_node *n = r->bucket[i], *next; n; n = next) {
            next = n->chain;
            node_free(n);
        }
    free(r->bucket);
    free(r->leaves.v);
    free(r->retained.v);
    pl_namer_free(&r->namer);
    free(r);
}

pl_radix_node *pl_radix_root(pl_radix *r)
{
    return &r->root;
}

int64_t pl_radix_tokens(const pl_radix *r)
{
    return r->tokens;
}

int64_t pl_radix_evictable(const pl_radix *r)
{
    return r->evictable;
}

int64_t pl_radix_retained(const pl_radix *r)
{
    return r->retained_tokens;
}

int pl_radix_nodes(const pl_radix *r)
{
    return r->nodes;
}

/* --- what is told --- */

int pl_radix_watch(pl_radix *r, const pl_sim_kv_events *ev, void *user, pl_sim_kv_names names)
{
    if (r->watched || r->nodes)
        return PL_EINVALID;
    if (!pl_namer_init(&r->namer, names))
        return PL_ENOMEM;
    r->watched = true;
    r->ev = *ev;
    r->user = user;
    return 0;
}

static const pl_sim_kv_name *last_name(const pl_radix *r, const pl_radix_node *n)
{
    return n == &r->root ? NULL : &n->names[n->n / r->page - 1];
}

static void tell(const pl_radix *r, const pl_radix_node *n,
                 void (*to)(void *user, const pl_sim_kv_run *run), void *user)
{
    pl_sim_kv_run run = {.parent = last_name(r, n->parent),
                         .names = n->names,
                         .n = n->n / r->page,
                         .block_tokens = r->page,
                         .tokens = n->tokens};
    to(user, &run);
}

void pl_radix_each(const pl_radix *r, void (*each)(void *user, const pl_sim_kv_run *run),
                   void *user)
{
    for (size_t i = 0; r->watched && i <= r->mask; i++)
        for (const pl_radix_node *n = r->bucket[i]; n; n = n->chain)
            tell(r, n, each, user);
}

/* --- the table of children --- */

static uint64_t page_hash(const pl_radix *r, const pl_radix_node *parent, const uint32_t *tokens)
{
    return XXH3_64bits_withSeed(tokens, (size_t)r->page * sizeof *tokens, parent->id);
}

static pl_radix_node *find(const pl_radix *r, const pl_radix_node *parent, const uint32_t *tokens)
{
    uint64_t hash = page_hash(r, parent, tokens);
    for (pl_radix_node *n = r->bucket[hash & r->mask]; n; n = n->chain)
        if (n->hash == hash && n->parent == parent &&
            memcmp(n->tokens, tokens, (size_t)r->page * sizeof *tokens) == 0)
            return n;
    return NULL;
}

static void table_add(pl_radix *r, pl_radix_node *n)
{
    pl_radix_node **slot = &r->bucket[n->hash & r->mask];
    n->chain = *slot;
    *slot = n;
}

static void table_remove(pl_radix *r, pl_radix_node *n)
{
    pl_radix_node **slot = &r->bucket[n->hash & r->mask];
    while (*slot != n)
        slot = &(*slot)->chain;
    *slot = n->chain;
}

/* Failing to grow costs speed only. */
static void table_grow(pl_radix *r)
{
    if ((size_t)r->nodes <= r->mask)
        return;
    size_t mask = r->mask * 2 + 1;
    pl_radix_node **bucket = calloc(mask + 1, sizeof *bucket);
    if (!bucket)
        return;
    for (size_t i = 0; i <= r->mask; i++)
        for (pl_radix_node *n = r->bucket[i], *next; n; n = next) {
            next = n->chain;
            n->chain = bucket[n->hash & mask];
            bucket[n->hash & mask] = n;
        }
    free(r->bucket);
    r->bucket = bucket;
    r->mask = mask;
}

/* --- nodes --- */

static pl_radix_node *node_new(pl_radix *r, const uint32_t *tokens, int n)
{
    if (r->nodes == INT_MAX / 2 || !pl_heap_reserve(&r->leaves, r->nodes + 1) ||
        !pl_heap_reserve(&r->retained, r->nodes + 1))
        return NULL;
    pl_radix_node *node = calloc(1, sizeof *node);
    if (!node)
        return NULL;
    node->tokens = malloc((size_t)n * sizeof *tokens);
    if (r->watched)
        node->names = malloc((size_t)(n / r->page) * sizeof *node->names);
    if (!node->tokens || (r->watched && !node->names)) {
        node_free(node);
        return NULL;
    }
    memcpy(node->tokens, tokens, (size_t)n * sizeof *tokens);
    node->n = n;
    node->id = ++r->next_id;
    r->nodes++;
    return node;
}

/* Sets a leaf's place in the order of eviction: what is retained after all else, then the policy's
 * rank, then the last use. */
static void place(const pl_radix *r, pl_radix_node *n)
{
    uint64_t rank = 0;
    if (r->policy == PL_RADIX_LFU)
        rank = (uint64_t)n->uses;
    else if (r->policy == PL_RADIX_SLRU)
        rank = n->uses > 1;
    else if (r->policy == PL_RADIX_PRIORITY)
        rank = (uint64_t)((int64_t)n->priority - INT_MIN);
    n->order.major = (uint64_t)(n->due.at != 0) << 63 | rank;
    n->order.minor = n->stamp;
}

static void leaf_add(pl_radix *r, pl_radix_node *n)
{
    place(r, n);
    pl_heap_push(&r->leaves, &n->order);
}

/* What decides its place has changed. */
static void leaf_moved(pl_radix *r, pl_radix_node *n)
{
    if (!n->order.at)
        return;
    place(r, n);
    pl_heap_settle(&r->leaves, n->order.at - 1);
}

static void touch(pl_radix *r, pl_radix_node *n)
{
    n->stamp = r->stamp;
    leaf_moved(r, n);
}

/* n is no leaf that could be evicted: its place does not change. */
static void retain(pl_radix *r, pl_radix_node *n, int64_t until_us)
{
    uint64_t until = (uint64_t)until_us ^ 1ull << 63; /* in the order of signed numbers */
    if (n->due.at && n->due.major >= until)
        return;
    bool was = n->due.at != 0;
    n->due.major = until;
    n->due.minor = n->id;
    if (was) {
        pl_heap_settle(&r->retained, n->due.at - 1);
        return;
    }
    pl_heap_push(&r->retained, &n->due); /* room was made with the node */
    r->retained_tokens += n->n;
}

static void release(pl_radix *r, pl_radix_node *n)
{
    if (!n->due.at)
        return;
    pl_heap_remove(&r->retained, &n->due);
    r->retained_tokens -= n->n;
}

/* Frees what was never put into the tree. */
static void node_undo(pl_radix *r, pl_radix_node *n)
{
    r->nodes--;
    node_free(n);
}

/* The first `at` tokens of n become a node of their own above it. n stays the lower part, so that
 * locks held on n keep their meaning. NULL when out of memory. */
static pl_radix_node *split(pl_radix *r, pl_radix_node *n, int at)
{
    pl_radix_node *upper = node_new(r, n->tokens, at);
    if (!upper)
        return NULL;
    table_remove(r, n);
    upper->parent = n->parent;
    upper->hash = n->hash;
    upper->refs = n->refs;
    upper->children = 1;
    upper->stamp = n->stamp;
    upper->uses = n->uses;
    upper->priority = n->priority;
    table_add(r, upper);
    n->parent = upper;
    n->n -= at;
    if (n->due.at) {
        r->retained_tokens -= at;
        retain(r, upper, (int64_t)(n->due.major ^ 1ull << 63));
    }
    memmove(n->tokens, n->tokens + at, (size_t)n->n * sizeof *n->tokens);
    uint32_t *less = realloc(n->tokens, (size_t)n->n * sizeof *less);
    if (less)
        n->tokens = less;
    if (r->watched) {
        size_t up = (size_t)(at / r->page), down = (size_t)(n->n / r->page);
        memcpy(upper->names, n->names, up * sizeof *n->names);
        memmove(n->names, n->names + up, down * sizeof *n->names);
        pl_sim_kv_name *fewer = realloc(n->names, down * sizeof *fewer);
        if (fewer)
            n->names = fewer;
    }
    n->hash = page_hash(r, upper, n->tokens);
    table_add(r, n);
    table_grow(r);
    return upper;
}

static int common(const uint32_t *a, const uint32_t *b, int n)
{
    int i = 0;
    while (i + 32 <= n && memcmp(a + i, b + i, 32 * sizeof *a) == 0)
        i += 32;
    while (i < n && a[i] == b[i])
        i++;
    return i;
}

/* Tokens of child that tokens[0..n) shares, in whole pages; at least one page. */
static int shared(const pl_radix *r, const pl_radix_node *child, const uint32_t *tokens, int n)
{
    int same = common(child->tokens, tokens, child->n < n ? child->n : n);
    return same - same % r->page;
}

/* Walks from `at` (which ends at *depth) as far as tokens[0..n) goes, refreshing what it passes. */
static pl_radix_node *walk(pl_radix *r, pl_radix_node *at, int *depth, const uint32_t *tokens,
                           int n)
{
    while (*depth < n) {
        pl_radix_node *child = find(r, at, tokens + *depth);
        if (!child)
            break;
        int same = shared(r, child, tokens + *depth, n - *depth);
        if (same < child->n) {
            child = split(r, child, same);
            if (!child)
                break;
        }
        touch(r, child);
        *depth += same;
        at = child;
    }
    return at;
}

int pl_radix_match(pl_radix *r, const uint32_t *tokens, int n, pl_radix_node **node)
{
    int depth = 0;
    r->stamp++;
    *node = walk(r, &r->root, &depth, tokens, n - n % r->page);
    return depth;
}

int pl_radix_peek(const pl_radix *r, const uint32_t *tokens, int n)
{
    int depth = 0;
    n -= n % r->page;
    const pl_radix_node *at = &r->root;
    while (depth < n && (at = find(r, at, tokens + depth))) {
        int same = shared(r, at, tokens + depth, n - depth);
        depth += same;
        if (same < at->n)
            break;
    }
    return depth;
}

int pl_radix_insert(pl_radix *r, pl_radix_node *from, int depth, const uint32_t *tokens, int n,
                    pl_radix_node **end, int *added)
{
    r->stamp++;
    for (pl_radix_node *p = from; p != &r->root; p = p->parent)
        touch(r, p);
    pl_radix_node *at = walk(r, from, &depth, tokens, n);
    *end = at;
    *added = n - depth;
    if (depth == n)
        return 0;
    if (find(r, at, tokens + depth)) /* a split failed: two children must not share a page */
        return PL_ENOMEM;
    pl_radix_node *leaf = node_new(r, tokens + depth, n - depth);
    if (!leaf)
        return PL_ENOMEM;
    if (r->watched && !pl_namer_name(&r->namer, last_name(r, at), leaf->tokens, leaf->n / r->page,
                                     r->page, leaf->names)) {
        node_undo(r, leaf);
        return PL_ENOMEM;
    }
    leaf->parent = at;
    leaf->hash = page_hash(r, at, leaf->tokens);
    leaf->stamp = r->stamp;
    leaf->uses = 1;
    leaf->priority = INT_MIN;
    table_add(r, leaf);
    table_grow(r);
    at->children++;
    if (at->order.at)
        pl_heap_remove(&r->leaves, &at->order);
    leaf_add(r, leaf);
    r->tokens += leaf->n;
    r->evictable += leaf->n;
    *end = leaf;
    if (r->ev.on_stored)
        tell(r, leaf, r->ev.on_stored, r->user);
    return 0;
}

void pl_radix_lock(pl_radix *r, pl_radix_node *node)
{
    for (; node != &r->root; node = node->parent) {
        if (node->refs++ > 0)
            continue;
        r->evictable -= node->n;
        if (node->order.at)
            pl_heap_remove(&r->leaves, &node->order);
    }
}

void pl_radix_unlock(pl_radix *r, pl_radix_node *node)
{
    for (; node != &r->root; node = node->parent) {
        if (--node->refs > 0)
            continue;
        r->evictable += node->n;
        if (node->children == 0)
            leaf_add(r, node);
    }
}

void pl_radix_mark(pl_radix *r, pl_radix_node *node, int uses, int priority, int64_t retain_us)
{
    for (; node != &r->root; node = node->parent) {
        node->uses = node->uses > INT_MAX - uses ? INT_MAX : node->uses + uses;
        if (priority > node->priority)
            node->priority = priority;
        if (retain_us != INT64_MIN)
            retain(r, node, retain_us);
    }
}

void pl_radix_decay(pl_radix *r, int64_t now_us)
{
    uint64_t now = (uint64_t)now_us ^ 1ull << 63;
    pl_heap_item *top;
    while ((top = pl_heap_top(&r->retained)) && top->major <= now) {
        pl_radix_node *n = (pl_radix_node *)((char *)top - offsetof(pl_radix_node, due));
        release(r, n);
        leaf_moved(r, n);
    }
}

static int64_t evict(pl_radix *r, int64_t want,
                     void (*on_removed)(void *user, const pl_sim_kv_run *run))
{
    int64_t gone = 0;
    pl_heap_item *top;
    while (gone < want && (top = pl_heap_top(&r->leaves))) {
        pl_radix_node *n = (pl_radix_node *)((char *)top - offsetof(pl_radix_node, order));
        pl_radix_node *parent = n->parent;
        pl_heap_remove(&r->leaves, &n->order);
        release(r, n);
        table_remove(r, n);
        gone += n->n;
        r->nodes--;
        if (on_removed)
            tell(r, n, on_removed, r->user);
        node_free(n);
        if (--parent->children == 0 && parent != &r->root && parent->refs == 0)
            leaf_add(r, parent);
    }
    r->tokens -= gone;
    r->evictable -= gone;
    return gone;
}

int64_t pl_radix_evict(pl_radix *r, int64_t want)
{
    return evict(r, want, r->ev.on_removed);
}

int64_t pl_radix_flush(pl_radix *r)
{
    bool all = r->tokens == r->evictable;
    int64_t gone = evict(r, INT64_MAX, all ? NULL : r->ev.on_removed);
    if (all && r->ev.on_cleared)
        r->ev.on_cleared(r->user);
    return gone;
}

bool pl_radix_sound(const pl_radix *r)
{
    int64_t tokens = 0, evictable = 0, retained = 0, children = r->root.children;
    int nodes = 0, leaves = 0, dues = 0;
    for (size_t i = 0; i <= r->mask; i++)
        for (const pl_radix_node *n = r->bucket[i]; n; n = n->chain) {
            const pl_radix_node *p = n->parent;
            bool is_leaf = n->refs == 0 && n->children == 0;
            if (n->n < r->page || n->n % r->page || (n->hash & r->mask) != i ||
                n->hash != page_hash(r, p, n->tokens) || find(r, p, n->tokens) != n)
                return false;
            if (n->refs < 0 || (p != &r->root && p->refs < n->refs) || n->children < 0 ||
                p->children < 1 ||
                (p != &r->root && (p->stamp < n->stamp || p->priority < n->priority)))
                return false;
            if (is_leaf != (n->order.at != 0) ||
                (is_leaf && r->leaves.v[n->order.at - 1] != &n->order))
                return false;
            if (n->due.at && (r->retained.v[n->due.at - 1] != &n->due ||
                              (p != &r->root && (!p->due.at || p->due.major < n->due.major))))
                return false;
            if (is_leaf) {
                pl_radix_node copy = *n;
                place(r, &copy);
                if (copy.order.major != n->order.major || copy.order.minor != n->order.minor)
                    return false;
            }
            retained += n->due.at ? n->n : 0;
            dues += n->due.at != 0;
            tokens += n->n;
            evictable += n->refs ? 0 : n->n;
            children += n->children;
            nodes++;
            leaves += is_leaf;
        }
    for (int i = 1; i < r->leaves.n; i++)
        if (!pl_heap_before(r->leaves.v[(i - 1) / 2], r->leaves.v[i]))
            return false;
    for (int i = 1; i < r->retained.n; i++)
        if (!pl_heap_before(r->retained.v[(i - 1) / 2], r->retained.v[i]))
            return false;
    if (retained != r->retained_tokens || dues != r->retained.n)
        return false;
    return tokens == r->tokens && evictable == r->evictable && nodes == r->nodes &&
           children == nodes && leaves == r->leaves.n;
}
