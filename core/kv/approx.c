/* Approximate mode: see approx.h. Called on the loops' threads, and by whoever decodes events
 * (reconcile) or changes the fleet (worker_gone); owns all memory.
 *
 * A prompt belongs to one of 16 parts, by its first key: a tree (approx_tree.c) under a mutex that
 * is held for one walk, about a microsecond. What all parts share are atomics: the ticks before
 * which a slot's entries are void, and the bytes in use. Above the cap the part with the least
 * recently used run gives, a few runs at a time, so that no call pays for much more than it took.
 */
#include "kv/approx.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "kv/approx_tree.h"

enum {
    PARTS = 16,      /* by the top bits of the first key */
    EVICT_BATCH = 8, /* runs dropped under one lock */
    EXPIRE_BATCH = 4 /* expired runs that an insertion frees by the way */
};
#define TICK_NS      1000000u
#define NEVER        UINT64_MAX
#define ADVANCE_EACH (256 / PARTS)

typedef struct part {
    pthread_mutex_t lock;
    pl_approx_tree tree;
    uint64_t inserted, expired, evicted, corrected;
    _Atomic uint64_t oldest; /* tick of the least recently used run, NEVER without any */
    char apart[64];
} part;

struct pl_approx {
    part parts[PARTS];
    pl_approx_mem mem;
    pl_clock clock;
    uint64_t start_ns, max_bytes;
    uint32_t slots;
    _Atomic uint64_t bytes;
    _Atomic uint64_t *floor; /* by slot */
};

int pl_approx_new(const pl_approx_options *o, pl_approx **out)
{
    *out = NULL;
    if (o->ttl_ms < 1 || o->ttl_ms > PL_APPROX_TTL_MAX_MS || o->slots < 1 ||
        o->slots > UINT16_MAX || o->max_bytes < PL_APPROX_MIN_BYTES || !o->clock.now_ns)
        return PL_EINVALID;
    pl_approx *a = calloc(1, sizeof *a);
    if (!a)
        return PL_ENOMEM;
    a->floor = calloc(o->slots, sizeof *a->floor);
    if (!a->floor) {
        free(a);
        return PL_ENOMEM;
    }
    a->clock = o->clock;
    a->start_ns = pl_clock_now_ns(o->clock);
    a->max_bytes = o->max_bytes;
    a->slots = o->slots;
    atomic_init(&a->bytes, sizeof *a + o->slots * sizeof *a->floor);
    pl_approx_mem_init(&a->mem);
    pthread_mutexattr_t spins; /* a walk is shorter than a thread's way to sleep and back */
    pthread_mutexattr_init(&spins);
    pthread_mutexattr_settype(&spins, PTHREAD_MUTEX_ADAPTIVE_NP);
    for (int i = 0; i < PARTS; i++) {
        pthread_mutex_init(&a->parts[i].lock, &spins);
        pl_approx_tree_init(&a->parts[i].tree, &a->mem, o->ttl_ms, a->floor);
        atomic_init(&a->parts[i].oldest, NEVER);
    }
    pthread_mutexattr_destroy(&spins);
    *out = a;
    return 0;
}

void pl_approx_free(pl_approx *a)
{
    if (!a)
        return;
    for (int i = 0; i < PARTS; i++) {
        pl_approx_tree_destroy(&a->parts[i].tree);
        pthread_mutex_destroy(&a->parts[i].lock);
    }
    pl_approx_mem_destroy(&a->mem);
    free(a->floor);
    free(a);
}

static uint64_t tick_of(const pl_approx *a, uint64_t ns)
{
    return ns > a->start_ns ? (ns - a->start_ns) / TICK_NS : 0;
}

static part *part_of(pl_approx *a, uint64_t key)
{
    return &a->parts[key >> 60];
}

/* Locks the part and brings its time forward: ticks never go back, even when threads read the clock
 * in another order than they get here. */
static void enter(pl_approx *a, part *p, uint64_t tick)
{
    pthread_mutex_lock(&p->lock);
    if (p->tree.tick < tick)
        p->tree.tick = tick;
}

/* Drops up to max runs that have expired. True when there are more. */
static bool expire(part *p, int max)
{
    while (max-- > 0 && pl_approx_tree_stale(&p->tree)) {
        pl_approx_tree_evict(&p->tree);
        p->expired++;
    }
    return pl_approx_tree_stale(&p->tree);
}

/* Settles the part's share of the sum, given what it was at enter, and unlocks. */
static void leave(pl_approx *a, part *p, uint64_t bytes_before)
{
    const pl_approx_tree *t = &p->tree;
    atomic_fetch_add_explicit(&a->bytes, t->bytes - bytes_before, memory_order_relaxed);
    uint64_t age = t->oldest ? (uint32_t)t->tick - t->oldest->time : 0;
    atomic_store_explicit(&p->oldest, t->oldest ? t->tick - age : NEVER, memory_order_relaxed);
    pthread_mutex_unlock(&p->lock);
}

static uint64_t bytes_now(const pl_approx *a)
{
    return atomic_load_explicit(&a->bytes, memory_order_relaxed);
}

/* Until the sum is under the cap: what has been used least recently goes. */
static void evict(pl_approx *a)
{
    while (bytes_now(a) > a->max_bytes) {
        part *victim = NULL;
        uint64_t oldest = NEVER;
        for (int i = 0; i < PARTS; i++) {
            uint64_t at = atomic_load_explicit(&a->parts[i].oldest, memory_order_relaxed);
            if (at < oldest) {
                oldest = at;
                victim = &a->parts[i];
            }
        }
        if (!victim)
            return;
        enter(a, victim, 0);
        uint64_t before = victim->tree.bytes, over = bytes_now(a) - a->max_bytes;
        for (int i = 0; i < EVICT_BATCH && victim->tree.oldest; i++) {
            if ((int64_t)over <= (int64_t)(before - victim->tree.bytes))
                break;
            pl_approx_tree_evict(&victim->tree);
            victim->evicted++;
        }
        leave(a, victim, before);
    }
}

int pl_approx_match(pl_approx *a, const uint64_t *keys, size_t n, pl_approx_hit *out, int cap)
{
    if (n == 0 || cap <= 0)
        return 0;
    if (n > PL_APPROX_CHUNKS_MAX)
        n = PL_APPROX_CHUNKS_MAX;
    part *p = part_of(a, keys[0]);
    enter(a, p, tick_of(a, pl_clock_now_ns(a->clock)));
    int found = pl_approx_tree_match(&p->tree, keys, n, out, cap);
    pthread_mutex_unlock(&p->lock);
    return found;
}

int pl_approx_insert(pl_approx *a, const uint64_t *keys, size_t n, int slot)
{
    if (slot < 0 || (uint32_t)slot >= a->slots)
        return PL_EINVALID;
    if (n == 0)
        return 0;
    if (n > PL_APPROX_CHUNKS_MAX)
        n = PL_APPROX_CHUNKS_MAX;
    part *p = part_of(a, keys[0]);
    enter(a, p, tick_of(a, pl_clock_now_ns(a->clock)));
    uint64_t before = p->tree.bytes;
    p->inserted++;
    expire(p, EXPIRE_BATCH);
    int rc = pl_approx_tree_insert(&p->tree, keys, n, (uint16_t)slot);
    leave(a, p, before);
    if (bytes_now(a) > a->max_bytes)
        evict(a);
    return rc;
}

void pl_approx_correct(pl_approx *a, const uint64_t *keys, size_t n, int slot, size_t cached,
                       uint64_t routed_ns)
{
    if (n > PL_APPROX_CHUNKS_MAX)
        n = PL_APPROX_CHUNKS_MAX;
    if (slot < 0 || (uint32_t)slot >= a->slots || cached >= n)
        return;
    part *p = part_of(a, keys[0]);
    enter(a, p, tick_of(a, pl_clock_now_ns(a->clock)));
    uint64_t before = p->tree.bytes;
    p->corrected +=
        pl_approx_tree_correct(&p->tree, keys, n, (uint16_t)slot, cached, tick_of(a, routed_ns));
    leave(a, p, before);
}

void pl_approx_forget(pl_approx *a, const uint64_t *keys, size_t n, int slot, size_t from)
{
    if (n > PL_APPROX_CHUNKS_MAX)
        n = PL_APPROX_CHUNKS_MAX;
    if (slot < 0 || (uint32_t)slot >= a->slots || from >= n)
        return;
    part *p = part_of(a, keys[0]);
    enter(a, p, tick_of(a, pl_clock_now_ns(a->clock)));
    uint64_t before = p->tree.bytes;
    p->corrected += pl_approx_tree_forget(&p->tree, keys, n, (uint16_t)slot, from);
    leave(a, p, before);
}

static void raise_floor(pl_approx *a, int slot, uint64_t tick)
{
    if (slot < 0 || (uint32_t)slot >= a->slots)
        return;
    uint64_t had = atomic_load_explicit(&a->floor[slot], memory_order_relaxed);
    while (had < tick &&
           !atomic_compare_exchange_weak_explicit(&a->floor[slot], &had, tick, memory_order_relaxed,
                                                  memory_order_relaxed))
        ;
}

void pl_approx_reconcile(pl_approx *a, int slot, uint64_t until_ns)
{
    raise_floor(a, slot, tick_of(a, until_ns));
}

void pl_approx_worker_gone(pl_approx *a, int slot)
{
    raise_floor(a, slot, tick_of(a, pl_clock_now_ns(a->clock)) + 1);
}

bool pl_approx_advance(pl_approx *a)
{
    uint64_t tick = tick_of(a, pl_clock_now_ns(a->clock));
    bool more = false;
    for (int i = 0; i < PARTS; i++) {
        part *p = &a->parts[i];
        enter(a, p, tick);
        uint64_t before = p->tree.bytes;
        more |= expire(p, ADVANCE_EACH);
        leave(a, p, before);
    }
    return more;
}

void pl_approx_stats_of(pl_approx *a, pl_approx_stats *out)
{
    *out = (pl_approx_stats){.bytes = bytes_now(a)};
    for (int i = 0; i < PARTS; i++) {
        part *p = &a->parts[i];
        pthread_mutex_lock(&p->lock);
        out->nodes += p->tree.nodes;
        out->chunks += p->tree.chunks;
        out->entries += p->tree.entries;
        out->inserted += p->inserted;
        out->expired += p->expired;
        out->evicted += p->evicted;
        out->corrected += p->corrected;
        pthread_mutex_unlock(&p->lock);
    }
}
