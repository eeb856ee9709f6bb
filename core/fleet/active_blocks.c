/* The blocks of the requests under way, each counted once: see active_blocks.h. Called by the
 * ledger on all loops; a worker's blocks are behind one of SHARDS locks.
 *
 * For each worker there is a tree of runs: a node holds a stretch of hashes that the same requests
 * share, and counts those requests. Hashes are cumulative, so a request is a path from the root,
 * and all it needs to keep is the path's last node. A request that leaves a path inside a run
 * splits it; when that request ends, the two halves are joined again: there are never more than
 * two nodes for each request, and beginning or ending costs its own blocks' comparison and a few
 * nodes, not a lookup for each block.
 *
 *     [system prompt: 3] --+-- [conversation A: 2]      refs: the requests whose path leads there
 *                          +-- [conversation B: 1]
 *
 * The lower half of a split keeps the node, because requests that end there point to it. It keeps
 * its memory, too, while that is at most twice what it needs: joining then copies little. */
#include "fleet/active_blocks.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "fleet/ledger.h"

#define SHARDS        64
#define FIRST_BUCKETS 64

typedef struct pl_active_node {
    struct pl_active_node *parent; /* NULL: a run from the start */
    struct pl_active_node *next;   /* in its bucket */
    pl_worker_state *worker;
    uint64_t *memory; /* owned; the run begins at `from` */
    uint32_t from, n;
    uint32_t refs; /* requests whose path leads here or through here; never 0 */
    uint32_t each; /* the worker's blocks that one hash stands for */
    uint32_t children;
    uintptr_t children_xor; /* of their addresses: names the only child when there is one */
} node;

typedef struct shard {
    _Alignas(64) pthread_mutex_t lock;
    node **buckets; /* by parent (the worker for runs from the start) and first hash */
    size_t buckets_n, nodes_n;
} shard;

struct pl_active {
    uint64_t seed; /* who chooses prompts does not choose buckets */
    size_t max_blocks;
    _Atomic size_t blocks_n, nodes_n;
    shard shards[SHARDS];
};

pl_active *pl_active_new(size_t max_blocks)
{
    pl_active *a = aligned_alloc(_Alignof(pl_active), sizeof *a);
    if (!a)
        return NULL;
    memset(a, 0, sizeof *a);
    a->seed = pl_now_ns() * 0x9e3779b97f4a7c15u | 1;
    a->max_blocks = max_blocks;
    for (int i = 0; i < SHARDS; i++)
        pthread_mutex_init(&a->shards[i].lock, NULL);
    return a;
}

void pl_active_free(pl_active *a)
{
    if (!a)
        return;
    for (int i = 0; i < SHARDS; i++) {
        pthread_mutex_destroy(&a->shards[i].lock);
        free(a->shards[i].buckets);
    }
    free(a);
}

size_t pl_active_size(const pl_active *a)
{
    return atomic_load_explicit(&a->blocks_n, memory_order_relaxed);
}

size_t pl_active_nodes(const pl_active *a)
{
    return atomic_load_explicit(&a->nodes_n, memory_order_relaxed);
}

/* --- the table of a shard --- */

static shard *shard_of(pl_active *a, const pl_worker_state *w)
{
    return &a->shards[(unsigned)w->slot % SHARDS];
}

static size_t bucket_of(const pl_active *a, const shard *s, const node *parent,
                        const pl_worker_state *w, uint64_t first)
{
    uint64_t h = (first ^ a->seed) * 0x9e3779b97f4a7c15u;
    h ^= h >> 32;
    h = (h ^ (uintptr_t)(parent ? (const void *)parent : (const void *)w)) * 0xbf58476d1ce4e5b9u;
    return (size_t)(h >> 32) & (s->buckets_n - 1);
}

static uint64_t first_of(const node *x)
{
    return x->memory[x->from];
}

static node **bucket(const pl_active *a, const shard *s, const node *x)
{
    return &s->buckets[bucket_of(a, s, x->parent, x->worker, first_of(x))];
}

static node *find(const pl_active *a, const shard *s, const node *parent, const pl_worker_state *w,
                  uint64_t first)
{
    if (!s->buckets)
        return NULL;
    node *x = s->buckets[bucket_of(a, s, parent, w, first)];
    while (x && (x->parent != parent || x->worker != w || first_of(x) != first))
        x = x->next;
    return x;
}

static void link_node(const pl_active *a, shard *s, node *x)
{
    node **at = bucket(a, s, x);
    x->next = *at;
    *at = x;
    s->nodes_n++;
}

static void unlink_node(const pl_active *a, shard *s, node *x)
{
    node **at = bucket(a, s, x);
    while (*at != x)
        at = &(*at)->next;
    *at = x->next;
    s->nodes_n--;
}

/* Room for two more nodes. When there is no memory for a bigger table the old one does. */
static bool grow(const pl_active *a, shard *s)
{
    if (s->buckets && s->nodes_n + 2 <= s->buckets_n)
        return true;
    size_t old_n = s->buckets ? s->buckets_n : 0, n = old_n ? 2 * old_n : FIRST_BUCKETS;
    node **fresh = calloc(n, sizeof *fresh), **old = s->buckets;
    if (!fresh)
        return old != NULL;
    s->buckets = fresh;
    s->buckets_n = n;
    s->nodes_n = 0;
    for (size_t i = 0; i < old_n; i++)
        for (node *x = old[i], *next; x; x = next) {
            next = x->next;
            link_node(a, s, x);
        }
    free(old);
    return true;
}

/* --- nodes --- */

static node *node_new(pl_active *a, pl_worker_state *w, uint32_t n, uint32_t each)
{
    node *x = calloc(1, sizeof *x);
    uint64_t *memory = x ? malloc(n * sizeof *memory) : NULL;
    if (!memory) {
        free(x);
        return NULL;
    }
    x->worker = w;
    x->memory = memory;
    x->n = n;
    x->each = each;
    atomic_fetch_add_explicit(&a->nodes_n, 1, memory_order_relaxed);
    return x;
}

static void node_free(pl_active *a, node *x)
{
    if (!x)
        return;
    atomic_fetch_sub_explicit(&a->nodes_n, 1, memory_order_relaxed);
    free(x->memory);
    free(x);
}

static void adopt(node *parent, node *child)
{
    child->parent = parent;
    if (parent) {
        parent->children++;
        parent->children_xor ^= (uintptr_t)child;
    }
}

static void disown(node *child)
{
    node *parent = child->parent;
    if (parent) {
        parent->children--;
        parent->children_xor ^= (uintptr_t)child;
    }
    child->parent = NULL;
}

/* x's first k hashes go to `upper`, which takes its place. */
static void split(pl_active *a, shard *s, node *x, uint32_t k, node *upper)
{
    unlink_node(a, s, x);
    node *parent = x->parent;
    disown(x);
    memcpy(upper->memory, x->memory + x->from, k * sizeof *x->memory);
    upper->refs = x->refs;
    upper->each = x->each;
    x->from += k;
    x->n -= k;
    adopt(parent, upper);
    adopt(upper, x);
    link_node(a, s, upper);
    link_node(a, s, x);
    if (x->from <= x->n)
        return;
    uint64_t *fitting = malloc(x->n * sizeof *fitting);
    if (!fitting)
        return;
    memcpy(fitting, x->memory + x->from, x->n * sizeof *fitting);
    free(x->memory);
    x->memory = fitting;
    x->from = 0;
}

/* x and its only child are one run again when the same requests share them: the child takes x's
 * place. Without memory for that they stay two. */
static void join(pl_active *a, shard *s, node *x)
{
    node *child = x->children == 1 ? (node *)x->children_xor : NULL;
    if (!child || child->refs != x->refs || child->each != x->each)
        return;
    if (child->from < x->n) {
        uint64_t *memory = malloc(((size_t)x->n + child->n) * sizeof *memory);
        if (!memory)
            return;
        memcpy(memory + x->n, child->memory + child->from, child->n * sizeof *memory);
        unlink_node(a, s, child);
        free(child->memory);
        child->memory = memory;
        child->from = x->n;
    } else {
        unlink_node(a, s, child);
    }
    unlink_node(a, s, x);
    node *parent = x->parent;
    disown(child);
    disown(x);
    child->from -= x->n;
    child->n += x->n;
    memcpy(child->memory + child->from, x->memory + x->from, x->n * sizeof *x->memory);
    adopt(parent, child);
    link_node(a, s, child);
    node_free(a, x);
}

static void count(pl_active *a, const node *x, int sign)
{
    int64_t blocks = (int64_t)x->n * x->each;
    if (sign > 0)
        atomic_fetch_add_explicit(&a->blocks_n, x->n, memory_order_relaxed);
    else
        atomic_fetch_sub_explicit(&a->blocks_n, x->n, memory_order_relaxed);
    atomic_fetch_add_explicit(&x->worker->decode_blocks, sign * blocks, memory_order_relaxed);
}

/* --- requests --- */

/* A request's hashes, one for each block of the worker, or one for several. */
typedef struct path {
    const uint64_t *hashes;
    uint32_t n, stride, each;
} path;

static uint64_t hash_at(const path *p, uint32_t i)
{
    return p->hashes[(size_t)(i + 1) * p->stride - 1];
}

static path path_of(const pl_active_keys *keys, const pl_worker_state *w)
{
    int32_t block = atomic_load_explicit(&w->block_tokens, memory_order_relaxed);
    path p = {keys->hashes, 0, 1, 1};
    if (block <= 0)
        block = PL_LEDGER_BLOCK_TOKENS;
    if (keys->n <= 0 || keys->tokens <= 0)
        return p;
    if (keys->tokens % block == 0)
        p.each = (uint32_t)(keys->tokens / block);
    else if (block % keys->tokens == 0)
        p.stride = (uint32_t)(block / keys->tokens);
    else
        return p;
    p.n = (uint32_t)keys->n / p.stride;
    if (p.n > PL_ACTIVE_MAX_REQUEST_BLOCKS)
        p.n = PL_ACTIVE_MAX_REQUEST_BLOCKS;
    return p;
}

/* How far a path leads through what is there. */
typedef struct reach {
    node *last;      /* the last node that it reached; NULL: none */
    uint32_t inside; /* hashes of that node, at least 1 */
    uint32_t at;     /* hashes of the path */
    int64_t blocks;  /* that these are */
} reach;

static reach walk(const pl_active *a, const shard *s, const pl_worker_state *w, const path *p)
{
    reach r = {NULL, 0, 0, 0};
    while (r.at < p->n && (!r.last || r.inside == r.last->n)) {
        node *x = find(a, s, r.last, w, hash_at(p, r.at));
        if (!x)
            break;
        uint32_t k = 0, most = x->n < p->n - r.at ? x->n : p->n - r.at;
        while (k < most && x->memory[x->from + k] == hash_at(p, r.at + k))
            k++;
        r.last = x;
        r.inside = k;
        r.at += k;
        r.blocks += (int64_t)k * x->each;
    }
    return r;
}

int64_t pl_active_begin(pl_active *a, pl_worker_state *w, const pl_active_keys *keys,
                        pl_active_hold *hold, int64_t *shared)
{
    path p = path_of(keys, w);
    *hold = (pl_active_hold){NULL, NULL, NULL};
    if (shared)
        *shared = 0;
    if (p.n == 0)
        return 0;
    shard *s = shard_of(a, w);
    pthread_mutex_lock(&s->lock);
    reach r = walk(a, s, w, &p);
    uint32_t fresh = p.n - r.at;
    if (fresh && pl_active_size(a) + fresh > a->max_blocks) {
        fresh = 0; /* full: what is there already is still shared */
        p.n = r.at;
    }
    bool splits = r.last && r.inside<r.last->n, ok = p.n> 0 && grow(a, s);
    node *upper = ok && splits ? node_new(a, w, r.inside, 1) : NULL;
    node *leaf = ok && fresh ? node_new(a, w, fresh, p.each) : NULL;
    if (!ok || (splits && !upper) || (fresh && !leaf)) {
        node_free(a, upper);
        node_free(a, leaf);
        pthread_mutex_unlock(&s->lock);
        return 0;
    }
    node *last = r.last;
    if (splits) {
        split(a, s, last, r.inside, upper);
        last = upper;
    }
    if (leaf) {
        for (uint32_t i = 0; i < fresh; i++)
            leaf->memory[i] = hash_at(&p, r.at + i);
        adopt(last, leaf);
        link_node(a, s, leaf);
        count(a, leaf, 1);
        last = leaf;
    }
    for (node *x = last; x; x = x->parent)
        x->refs++;
    pthread_mutex_unlock(&s->lock);
    *hold = (pl_active_hold){a, w, last};
    if (shared)
        *shared = r.blocks;
    return r.blocks + (int64_t)fresh * p.each;
}

void pl_active_end(pl_active_hold *hold)
{
    pl_active *a = hold->active;
    if (!a)
        return;
    shard *s = shard_of(a, hold->worker);
    pthread_mutex_lock(&s->lock);
    for (node *x = hold->last; x; x = x->parent)
        x->refs--;
    node *x = hold->last;
    while (x && x->refs == 0) { /* the requests of a child are its parent's: it has none */
        node *parent = x->parent;
        unlink_node(a, s, x);
        disown(x);
        count(a, x, -1);
        node_free(a, x);
        x = parent;
    }
    if (x)
        join(a, s, x);
    pthread_mutex_unlock(&s->lock);
    *hold = (pl_active_hold){NULL, NULL, NULL};
}
