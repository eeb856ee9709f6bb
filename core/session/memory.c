/* The memory store (store.h): all sessions of one process. Any thread may call;
 * whoever drives time calls advance. 256 shards (shard.c) by the top bits of the name's
 * hash, a lock each, never two at once; expired() runs with none held. The hash is seeded per
 * store, so that nobody outside can pile names into one shard.
 *
 * The cap is for all shards together: `held` is what they hold, raised before an insert and lowered
 * after a delete. At the cap a put evicts: each shard publishes when its least recently used
 * router-only session was used, the shard with the smallest gives one up, and its room stays taken
 * for the one who evicted. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include <xxhash.h>

#include "session/shard.h"

#define SHARD_BITS 8
#define SHARDS     (1u << SHARD_BITS)
#define BATCH      32         /* records that one sweep looks at under one lock */
#define LIST_LOOK  65536      /* records that one call of list looks at, a shard counts as one */
#define LIST_HOLD  256        /* of them under one lock */
#define STALE      UINT32_MAX /* not a record: oldest_use[] has to be computed anew */

typedef struct part {
    _Alignas(64) pthread_mutex_t lock;
    pl_shard shard;      /* what a lookup reads of it is in the line of the lock */
    pl_shard_ref oldest; /* what oldest_use[] was computed from */
    uint64_t engine_backed;
    uint64_t expired_router_only, expired_engine_backed, evicted; /* since the start */
} part;

typedef struct memory {
    pl_store base;
    pl_store_options o;
    uint64_t seed;
    _Atomic uint64_t held, refused;
    _Atomic uint64_t oldest_use[SHARDS]; /* ns; UINT64_MAX: nothing to evict */
    part parts[SHARDS];
} memory;

static uint64_t hash_of(const memory *m, const pl_shard_key *k)
{
    return XXH3_64bits_withSeed(k->bytes, k->n, m->seed + k->tenant_n);
}

static void key_of(const memory *m, const pl_session_name *name, pl_shard_key *k)
{
    k->tenant_n = (uint32_t)name->tenant.n;
    k->n = (uint32_t)(name->tenant.n + name->id.n);
    if (k->tenant_n)
        memcpy(k->bytes, name->tenant.p, k->tenant_n);
    memcpy(k->bytes + k->tenant_n, name->id.p, name->id.n);
    k->hash = hash_of(m, k);
}

static part *lock_part(memory *m, uint64_t hash)
{
    part *p = &m->parts[hash >> (64 - SHARD_BITS)];
    pthread_mutex_lock(&p->lock);
    return p;
}

static void unlock_part(memory *m, part *p)
{
    if (p->oldest != p->shard.oldest) {
        p->oldest = p->shard.oldest;
        atomic_store_explicit(&m->oldest_use[p - m->parts], pl_shard_oldest_use_ns(&p->shard),
                              memory_order_relaxed);
    }
    pthread_mutex_unlock(&p->lock);
}

/* Deletes; the room stays taken. */
static void forget(part *p, pl_shard_ref ref, const pl_shard_key *k, pl_session_kind kind)
{
    pl_shard_delete(&p->shard, ref, k);
    if (kind == PL_SESSION_ENGINE_BACKED)
        p->engine_backed--;
}

static void give_room(memory *m)
{
    atomic_fetch_sub_explicit(&m->held, 1, memory_order_relaxed);
}

static void expire(memory *m, part *p, pl_shard_ref ref, const pl_shard_key *k, pl_binding *gone)
{
    pl_shard_read(&p->shard, ref, gone);
    forget(p, ref, k, gone->kind);
    give_room(m);
    if (gone->kind == PL_SESSION_ENGINE_BACKED)
        p->expired_engine_backed++;
    else
        p->expired_router_only++;
}

/* The record of k unless it has expired: then it goes, and *gone is what it was bound to (version 0
 * when nothing went). */
static pl_shard_ref find_live(memory *m, part *p, const pl_shard_key *k, uint64_t now_ns,
                              pl_binding *gone)
{
    pl_shard_ref ref = pl_shard_find(&p->shard, k);
    if (ref && pl_shard_expired(&p->shard, ref, now_ns)) {
        expire(m, p, ref, k, gone);
        return 0;
    }
    return ref;
}

static void report(const memory *m, const pl_session_name *name, pl_binding *gone)
{
    if (gone->version && gone->kind == PL_SESSION_ENGINE_BACKED && m->o.expired)
        m->o.expired(m->o.ctx, name, gone);
    gone->version = 0;
}

static bool take_room(memory *m)
{
    uint64_t held = atomic_load_explicit(&m->held, memory_order_relaxed);
    while (held < m->o.cap)
        if (atomic_compare_exchange_weak_explicit(&m->held, &held, held + 1, memory_order_relaxed,
                                                  memory_order_relaxed))
            return true;
    return false;
}

/* Makes room and takes it. False when nothing may be evicted. */
static bool evict(memory *m)
{
    for (;;) {
        uint64_t smallest = UINT64_MAX;
        unsigned which = 0;
        for (unsigned i = 0; i < SHARDS; i++) {
            uint64_t use = atomic_load_explicit(&m->oldest_use[i], memory_order_relaxed);
            if (use < smallest) {
                smallest = use;
                which = i;
            }
        }
        if (smallest == UINT64_MAX)
            return take_room(m); /* it may have become free meanwhile */
        part *p = &m->parts[which];
        pthread_mutex_lock(&p->lock);
        pl_shard_ref ref = p->shard.oldest;
        if (ref) {
            pl_shard_key k;
            pl_shard_name(&p->shard, ref, &k);
            k.hash = hash_of(m, &k);
            forget(p, ref, &k, PL_SESSION_ROUTER_ONLY);
            p->evicted++;
        }
        unlock_part(m, p);
        if (ref)
            return true; /* else another thread was faster; what it did is published by now */
    }
}

/* Does the call's condition hold for what is there? Fills old with it. */
static int check(pl_store_call *c, const part *p, pl_shard_ref ref)
{
    if (ref)
        pl_shard_read(&p->shard, ref, &c->old);
    c->had_old = ref != 0;
    if (c->when == PL_STORE_IF_ABSENT)
        return ref ? PL_EEXISTS : 0;
    if (c->when == PL_STORE_IF_VERSION)
        return !ref ? PL_ENOTFOUND : c->old.version != c->version ? PL_EEXISTS : 0;
    return 0;
}

static int put(memory *m, pl_store_call *c, const pl_shard_key *k, uint64_t now_ns)
{
    pl_session_kind kind = c->binding.kind;
    pl_binding gone;
    bool room = false;
    int err;
    gone.version = 0;
    for (;;) {
        part *p = lock_part(m, k->hash);
        pl_shard_ref ref = find_live(m, p, k, now_ns, &gone);
        err = check(c, p, ref);
        if (!err && !ref && !room && !(room = take_room(m))) {
            unlock_part(m, p);
            report(m, &c->name, &gone);
            if (!(room = evict(m))) {
                atomic_fetch_add_explicit(&m->refused, 1, memory_order_relaxed);
                return PL_ELIMIT;
            }
            continue; /* the lock was free meanwhile: look again */
        }
        if (!err && kind == PL_SESSION_ENGINE_BACKED && !pl_shard_extra_ready(&p->shard))
            err = PL_ENOMEM;
        if (!err && !ref) {
            if ((ref = pl_shard_insert(&p->shard, k)))
                room = false; /* used */
            else
                err = PL_ENOMEM;
        }
        if (!err) {
            if (c->had_old && c->old.kind == PL_SESSION_ENGINE_BACKED)
                p->engine_backed--;
            if (kind == PL_SESSION_ENGINE_BACKED)
                p->engine_backed++;
            if (p->oldest == ref)
                p->oldest = STALE; /* the same number, another use */
            pl_shard_bind(&p->shard, ref, &c->binding, now_ns, c->owner,
                          now_ns + c->lease_ms * 1000000ull);
        }
        unlock_part(m, p);
        break;
    }
    if (room)
        give_room(m);
    report(m, &c->name, &gone);
    return err;
}

static int take_out(memory *m, pl_store_call *c, const pl_shard_key *k, uint64_t now_ns)
{
    pl_binding gone;
    gone.version = 0;
    part *p = lock_part(m, k->hash);
    pl_shard_ref ref = find_live(m, p, k, now_ns, &gone);
    int err = check(c, p, ref);
    if (!ref)
        err = PL_ENOTFOUND;
    else if (!err) {
        forget(p, ref, k, c->old.kind);
        give_room(m);
    }
    unlock_part(m, p);
    report(m, &c->name, &gone);
    return err;
}

static int look(memory *m, pl_store_call *c, const pl_shard_key *k, uint64_t now_ns)
{
    pl_binding gone;
    gone.version = 0;
    part *p = lock_part(m, k->hash);
    pl_shard_ref ref = find_live(m, p, k, now_ns, &gone);
    if (ref) {
        uint64_t used_ns = pl_shard_used_ns(&p->shard, ref);
        if (c->op == PL_STORE_GET) {
            pl_shard_touch(&p->shard, ref, now_ns);
            if (p->oldest == ref)
                p->oldest = STALE; /* it is the only one, or moved within its second */
        }
        pl_shard_read(&p->shard, ref, &c->binding);
        c->binding.used_at_ns = used_ns;
    }
    unlock_part(m, p);
    report(m, &c->name, &gone);
    return ref ? 0 : PL_ENOTFOUND;
}

static int turn(memory *m, pl_store_call *c, const pl_shard_key *k, uint64_t now_ns)
{
    pl_note note = {0};
    bool lease = c->op == PL_STORE_LEASE;
    if (!lease)
        note = c->binding.note;
    pl_binding gone;
    gone.version = 0;
    part *p = lock_part(m, k->hash);
    pl_shard_ref ref = find_live(m, p, k, now_ns, &gone);
    int err = PL_ENOTFOUND;
    if (ref && pl_shard_engine_backed(&p->shard, ref)) {
        uint64_t used_ns = pl_shard_used_ns(&p->shard, ref);
        if (lease)
            err = pl_shard_lease(&p->shard, ref, c->owner, now_ns,
                                 now_ns + c->lease_ms * 1000000ull, &c->lapsed)
                      ? 0
                      : PL_EBUSY;
        else if (pl_shard_release(&p->shard, ref, c->owner, &note, now_ns))
            err = 0;
        if (err != PL_ENOTFOUND) {
            pl_shard_read(&p->shard, ref, &c->binding);
            c->binding.used_at_ns = used_ns;
        }
    }
    unlock_part(m, p);
    report(m, &c->name, &gone);
    return err;
}

static int memory_start(pl_store *s, pl_store_call *c)
{
    memory *m = (memory *)s;
    pl_shard_key k;
    c->had_old = c->stale = c->lapsed = false;
    c->result = pl_store_check(c);
    if (c->result)
        return c->result;
    key_of(m, &c->name, &k);
    uint64_t now_ns = pl_clock_now_ns(m->o.clock);
    switch (c->op) {
    case PL_STORE_GET:
    case PL_STORE_PEEK:
        c->result = look(m, c, &k, now_ns);
        break;
    case PL_STORE_PUT:
        c->result = put(m, c, &k, now_ns);
        break;
    case PL_STORE_REMOVE:
        c->result = take_out(m, c, &k, now_ns);
        break;
    case PL_STORE_LEASE:
    case PL_STORE_RELEASE:
        c->result = turn(m, c, &k, now_ns);
        break;
    }
    return c->result;
}

static void memory_cancel(pl_store *s, pl_store_call *c)
{
    (void)s;
    (void)c; /* nothing is ever pending */
}

/* A session copied out of its shard, for callbacks that run without the lock. */
typedef struct due {
    pl_binding binding;
    pl_shard_key key;
} due;

static pl_session_name name_in(const pl_shard_key *k)
{
    return (pl_session_name){{k->bytes, k->tenant_n}, {k->bytes + k->tenant_n, k->n - k->tenant_n}};
}

/* A batch of one shard; false when nothing more is due there. */
static bool sweep(memory *m, part *p, uint64_t now_ns, due *list)
{
    int n = 0, budget = BATCH;
    pl_shard_ref ref;
    pthread_mutex_lock(&p->lock);
    while ((ref = pl_shard_due(&p->shard, now_ns, &budget))) {
        due *d = &list[n];
        pl_shard_name(&p->shard, ref, &d->key);
        d->key.hash = hash_of(m, &d->key);
        expire(m, p, ref, &d->key, &d->binding);
        n += d->binding.kind == PL_SESSION_ENGINE_BACKED;
    }
    unlock_part(m, p);
    for (int i = 0; i < n; i++) {
        pl_session_name name = name_in(&list[i].key);
        report(m, &name, &list[i].binding);
    }
    return budget <= 0;
}

static void memory_advance(pl_store *s)
{
    memory *m = (memory *)s;
    uint64_t now_ns = pl_clock_now_ns(m->o.clock);
    due list[BATCH];
    bool done[SHARDS] = {0};
    for (unsigned left = SHARDS; left;) {
        left = 0;
        /* a batch of each in turn: nobody waits long for a shard with many */
        for (unsigned i = 0; i < SHARDS; i++) {
            if (!done[i])
                done[i] = !sweep(m, &m->parts[i], now_ns, list);
            left += !done[i];
        }
    }
}

/* Up to a batch of one shard from *at on into list; how many. *more: the shard has more. */
static uint32_t page(part *p, pl_shard_ref *at, int *look, uint64_t now_ns, uint32_t want,
                     due *list, bool *more)
{
    uint32_t n = 0;
    pthread_mutex_lock(&p->lock);
    while (n < want && pl_shard_next(&p->shard, at, look)) {
        if (pl_shard_expired(&p->shard, *at, now_ns))
            continue; /* not found by a lookup either */
        pl_shard_read(&p->shard, *at, &list[n].binding);
        pl_shard_name(&p->shard, *at, &list[n++].key);
    }
    *more = *at < p->shard.unused - 1;
    pthread_mutex_unlock(&p->lock);
    return n;
}

/* The cursor is the shard's number and that of the last record that was looked at. */
static int memory_list(pl_store *s, pl_store_list_call *c)
{
    memory *m = (memory *)s;
    uint64_t now_ns = pl_clock_now_ns(m->o.clock);
    uint64_t i = c->cursor >> 32;
    pl_shard_ref at = (pl_shard_ref)c->cursor;
    if (c->limit == 0 || c->limit > PL_STORE_LIST_MAX || i >= SHARDS)
        return c->result = PL_EINVALID;
    due list[BATCH];
    uint32_t left = c->limit;
    for (int budget = LIST_LOOK; left && budget > 0 && i < SHARDS;) {
        int look = LIST_HOLD;
        bool more;
        uint32_t n =
            page(&m->parts[i], &at, &look, now_ns, left < BATCH ? left : BATCH, list, &more);
        for (uint32_t k = 0; k < n; k++) {
            pl_session_name name = name_in(&list[k].key);
            c->each(c, &name, &list[k].binding);
        }
        left -= n;
        budget -= 1 + LIST_HOLD - look;
        if (!more) {
            i++;
            at = 0;
        }
    }
    c->cursor = i < SHARDS ? i << 32 | at : 0;
    return c->result = 0;
}

static void memory_cancel_list(pl_store *s, pl_store_list_call *c)
{
    (void)s;
    (void)c; /* as memory_cancel */
}

static void memory_stats(pl_store *s, pl_store_stats *out)
{
    memory *m = (memory *)s;
    *out = (pl_store_stats){.bytes = sizeof *m, .refused = atomic_load(&m->refused)};
    for (unsigned i = 0; i < SHARDS; i++) {
        part *p = &m->parts[i];
        pthread_mutex_lock(&p->lock);
        out->engine_backed += p->engine_backed;
        out->router_only += p->shard.count - p->engine_backed;
        out->bytes += p->shard.bytes;
        out->expired_router_only += p->expired_router_only;
        out->expired_engine_backed += p->expired_engine_backed;
        out->evicted += p->evicted;
        pthread_mutex_unlock(&p->lock);
    }
}

static void memory_free(pl_store *s)
{
    memory *m = (memory *)s;
    for (unsigned i = 0; i < SHARDS; i++) {
        pl_shard_destroy(&m->parts[i].shard);
        pthread_mutex_destroy(&m->parts[i].lock);
    }
    free(m);
}

static const pl_store_ops memory_ops = {
    .name = "memory",
    .start = memory_start,
    .cancel = memory_cancel,
    .list = memory_list,
    .cancel_list = memory_cancel_list,
    .advance = memory_advance,
    .stats = memory_stats,
    .free = memory_free,
};

int pl_store_memory_new(const pl_store_options *o, pl_store **out)
{
    *out = NULL;
    if (!o->clock.now_ns || o->cap == 0 || o->cap > UINT32_MAX)
        return PL_EINVALID;
    memory *m = aligned_alloc(_Alignof(memory), sizeof *m);
    if (!m)
        return PL_ENOMEM;
    memset(m, 0, sizeof *m);
    m->base.ops = &memory_ops;
    m->o = *o;
    uint64_t now_ns = pl_clock_now_ns(o->clock);
    if (getrandom(&m->seed, sizeof m->seed, 0) != sizeof m->seed)
        m->seed = pl_now_ns() ^ (uint64_t)(uintptr_t)m; /* worse, not wrong */
    for (unsigned i = 0; i < SHARDS; i++) {
        pthread_mutex_init(&m->parts[i].lock, NULL);
        pl_shard_init(&m->parts[i].shard, now_ns);
        atomic_init(&m->oldest_use[i], UINT64_MAX);
    }
    *out = &m->base;
    return 0;
}
