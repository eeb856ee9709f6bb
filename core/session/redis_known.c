/* What a process knows of sessions on a shared store: see redis_known.h. Sixteen parts with a lock
 * each, held for a lookup in a chained hash and a list in order of use. */
#include "session/redis_known.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include <xxhash.h>

#define PARTS        16u
#define FRESH_FACTOR 10u

typedef enum writing { WRITTEN, TO_WRITE, BEING_WRITTEN } writing;

typedef struct entry {
    struct entry *next; /* same bucket */
    struct entry *newer, *older;
    uint64_t hash;
    uint64_t heard_ns;
    uint32_t turns; /* counted here, not told */
    writing writing;
    pl_binding b;
    uint16_t tenant_n, id_n;
    char name[];
} entry;

typedef struct part {
    _Alignas(64) pthread_mutex_t lock;
    entry **buckets;
    entry *newest, *oldest;
    entry *scan; /* pl_known_take goes on from here; NULL: from the newest */
    uint32_t count;
    uint32_t to_write;
} part;

struct pl_known {
    _Atomic uint64_t distrust_ns; /* what was heard up to then is not fresh */
    uint64_t seed;
    uint32_t max, mask; /* of a part: entries, buckets less 1 */
    _Atomic uint64_t versions;
    _Atomic uint64_t *forgotten;
    part parts[PARTS];
};

pl_known *pl_known_new(uint32_t max, _Atomic uint64_t *forgotten)
{
    pl_known *k = aligned_alloc(_Alignof(pl_known), sizeof *k);
    if (!k)
        return NULL;
    memset(k, 0, sizeof *k);
    if (getrandom(&k->seed, sizeof k->seed, 0) != sizeof k->seed)
        k->seed = (uintptr_t)k;
    k->forgotten = forgotten;
    k->max = max / PARTS + 1;
    uint32_t buckets = 1;
    while (buckets < k->max)
        buckets *= 2;
    k->mask = buckets - 1;
    bool ok = true;
    for (unsigned i = 0; i < PARTS; i++) {
        pthread_mutex_init(&k->parts[i].lock, NULL);
        k->parts[i].buckets = calloc(buckets, sizeof(entry *));
        ok &= k->parts[i].buckets != NULL;
    }
    if (!ok) {
        pl_known_free(k);
        return NULL;
    }
    return k;
}

void pl_known_free(pl_known *k)
{
    if (!k)
        return;
    for (unsigned i = 0; i < PARTS; i++) {
        for (entry *e = k->parts[i].newest, *older; e; e = older) {
            older = e->older;
            free(e);
        }
        free(k->parts[i].buckets);
        pthread_mutex_destroy(&k->parts[i].lock);
    }
    free(k);
}

static uint64_t hash_of(const pl_known *k, const pl_session_name *n)
{
    uint64_t h = n->tenant.n ? XXH3_64bits_withSeed(n->tenant.p, n->tenant.n, k->seed) : k->seed;
    return XXH3_64bits_withSeed(n->id.p, n->id.n, h);
}

static part *lock_part(pl_known *k, uint64_t hash)
{
    part *p = &k->parts[hash >> 60];
    pthread_mutex_lock(&p->lock);
    return p;
}

static entry **place(const pl_known *k, const part *p, uint64_t hash)
{
    return &p->buckets[hash & k->mask];
}

static entry *find(const pl_known *k, const part *p, const pl_session_name *n, uint64_t hash)
{
    for (entry *e = *place(k, p, hash); e; e = e->next)
        if (e->hash == hash && e->tenant_n == n->tenant.n && e->id_n == n->id.n &&
            (!e->tenant_n || memcmp(e->name, n->tenant.p, e->tenant_n) == 0) &&
            memcmp(e->name + e->tenant_n, n->id.p, e->id_n) == 0)
            return e;
    return NULL;
}

static void order_take(part *p, entry *e)
{
    if (p->scan == e)
        p->scan = e->older;
    *(e->newer ? &e->newer->older : &p->newest) = e->older;
    *(e->older ? &e->older->newer : &p->oldest) = e->newer;
}

static void order_put(part *p, entry *e)
{
    e->newer = NULL;
    e->older = p->newest;
    *(p->newest ? &p->newest->newer : &p->oldest) = e;
    p->newest = e;
}

static void to_front(part *p, entry *e)
{
    if (p->newest != e) {
        order_take(p, e);
        order_put(p, e);
    }
}

static void set_writing(part *p, entry *e, writing w)
{
    p->to_write += (w == TO_WRITE) - (e->writing == TO_WRITE);
    e->writing = w;
}

static void drop(const pl_known *k, part *p, entry *e)
{
    set_writing(p, e, WRITTEN);
    entry **at = place(k, p, e->hash);
    while (*at != e)
        at = &(*at)->next;
    *at = e->next;
    order_take(p, e);
    p->count--;
    free(e);
}

/* A new one, in front, unbound. */
static entry *insert(const pl_known *k, part *p, const pl_session_name *n, uint64_t hash)
{
    entry *e = calloc(1, sizeof *e + n->tenant.n + n->id.n);
    if (!e)
        return NULL;
    if (p->count >= k->max) {
        if (p->oldest->writing != WRITTEN)
            atomic_fetch_add(k->forgotten, 1);
        drop(k, p, p->oldest);
    }
    e->hash = hash;
    e->tenant_n = (uint16_t)n->tenant.n;
    e->id_n = (uint16_t)n->id.n;
    if (n->tenant.n)
        memcpy(e->name, n->tenant.p, n->tenant.n);
    memcpy(e->name + n->tenant.n, n->id.p, n->id.n);
    e->next = *place(k, p, hash);
    *place(k, p, hash) = e;
    order_put(p, e);
    p->count++;
    return e;
}

void pl_known_heard(pl_known *k, const pl_session_name *n, const pl_binding *b, uint64_t now_ns)
{
    uint64_t hash = hash_of(k, n);
    part *p = lock_part(k, hash);
    entry *e = find(k, p, n, hash);
    bool newer = e && !(e->b.version & PL_KNOWN_LOCAL) && e->b.version > b->version;
    if (!newer && (e || (e = insert(k, p, n, hash)))) {
        e->b = *b;
        e->heard_ns = now_ns;
        set_writing(p, e, WRITTEN);
        to_front(p, e);
    }
    pthread_mutex_unlock(&p->lock);
}

void pl_known_forget(pl_known *k, const pl_session_name *n)
{
    uint64_t hash = hash_of(k, n);
    part *p = lock_part(k, hash);
    entry *e = find(k, p, n, hash);
    if (e)
        drop(k, p, e);
    pthread_mutex_unlock(&p->lock);
}

/* Tells the binding as a store would; get uses it. */
static void tell(part *p, entry *e, bool get, uint64_t now_ns, pl_binding *out)
{
    uint64_t used_ns = e->b.used_at_ns;
    if (get) {
        e->b.turns += e->b.turns < UINT32_MAX;
        e->b.deadline_ns = now_ns + e->b.ttl_ms * 1000000ull;
        e->b.used_at_ns = now_ns;
        to_front(p, e);
    }
    *out = e->b;
    out->used_at_ns = used_ns;
}

bool pl_known_fresh(pl_known *k, const pl_session_name *n, bool get, uint64_t fresh_ns,
                    uint64_t now_ns, pl_binding *out)
{
    uint64_t hash = hash_of(k, n);
    part *p = lock_part(k, hash);
    entry *e = find(k, p, n, hash);
    bool ok = e && e->b.kind == PL_SESSION_ROUTER_ONLY && e->writing == WRITTEN &&
              now_ns - e->heard_ns < fresh_ns &&
              e->heard_ns > atomic_load_explicit(&k->distrust_ns, memory_order_relaxed) &&
              e->b.deadline_ns > now_ns && e->b.ttl_ms * 1000000ull >= FRESH_FACTOR * fresh_ns;
    if (ok) {
        tell(p, e, get, now_ns, out);
        e->turns += get;
    }
    pthread_mutex_unlock(&p->lock);
    return ok;
}

void pl_known_distrust(pl_known *k, uint64_t now_ns)
{
    atomic_store_explicit(&k->distrust_ns, now_ns, memory_order_relaxed);
}

uint32_t pl_known_turns(pl_known *k, const pl_session_name *n)
{
    uint64_t hash = hash_of(k, n);
    part *p = lock_part(k, hash);
    entry *e = find(k, p, n, hash);
    uint32_t turns = e ? e->turns : 0;
    if (e)
        e->turns = 0;
    pthread_mutex_unlock(&p->lock);
    return turns;
}

bool pl_known_stale(pl_known *k, const pl_session_name *n, bool get, uint64_t now_ns,
                    pl_binding *out)
{
    uint64_t hash = hash_of(k, n);
    part *p = lock_part(k, hash);
    entry *e = find(k, p, n, hash);
    bool ok = e && e->b.deadline_ns > now_ns;
    if (ok) {
        tell(p, e, get, now_ns, out);
        if (get && e->b.kind == PL_SESSION_ROUTER_ONLY)
            set_writing(p, e, TO_WRITE);
    }
    pthread_mutex_unlock(&p->lock);
    return ok;
}

bool pl_known_owed(pl_known *k, const pl_session_name *n, bool get, uint64_t now_ns,
                   pl_binding *out)
{
    uint64_t hash = hash_of(k, n);
    part *p = lock_part(k, hash);
    entry *e = find(k, p, n, hash);
    bool ok = e && e->writing != WRITTEN && e->b.deadline_ns > now_ns;
    if (ok)
        tell(p, e, get, now_ns, out);
    pthread_mutex_unlock(&p->lock);
    return ok;
}

bool pl_known_bind(pl_known *k, const pl_session_name *n, pl_binding *b, uint64_t now_ns)
{
    uint64_t hash = hash_of(k, n);
    part *p = lock_part(k, hash);
    entry *e = find(k, p, n, hash);
    bool live = e && e->b.deadline_ns > now_ns;
    uint64_t opened_ns = live ? e->b.opened_at_ns : now_ns;
    if (e || (e = insert(k, p, n, hash))) {
        b->deadline_ns = now_ns + b->ttl_ms * 1000000ull;
        b->opened_at_ns = opened_ns;
        b->used_at_ns = now_ns;
        b->note.n = 0;
        b->version = PL_KNOWN_LOCAL | atomic_fetch_add(&k->versions, 1);
        e->b = *b;
        e->turns = 0;
        e->heard_ns = 0;
        set_writing(p, e, TO_WRITE);
        to_front(p, e);
    }
    pthread_mutex_unlock(&p->lock);
    return e != NULL;
}

bool pl_known_take(pl_known *k, uint64_t now_ns, pl_session_name *name,
                   char buf[PL_SESSION_MAX_TENANT_BYTES + PL_SESSION_MAX_ID_BYTES], pl_binding *b)
{
    for (unsigned i = 0; i < PARTS; i++) {
        part *p = &k->parts[i];
        pthread_mutex_lock(&p->lock);
        for (int rounds = 0; p->to_write && rounds < 2;) {
            entry *e = p->scan ? p->scan : p->newest;
            p->scan = e->older;
            rounds += !p->scan; /* at the end: those in front may have to be written again */
            if (e->writing != TO_WRITE)
                continue;
            if (e->b.deadline_ns <= now_ns) {
                drop(k, p, e);
                continue;
            }
            set_writing(p, e, BEING_WRITTEN);
            memcpy(buf, e->name, (size_t)e->tenant_n + e->id_n);
            name->tenant = (pl_str){buf, e->tenant_n};
            name->id = (pl_str){buf + e->tenant_n, e->id_n};
            *b = e->b;
            pthread_mutex_unlock(&p->lock);
            return true;
        }
        pthread_mutex_unlock(&p->lock);
    }
    return false;
}

void pl_known_unwritten(pl_known *k, const pl_session_name *n)
{
    uint64_t hash = hash_of(k, n);
    part *p = lock_part(k, hash);
    entry *e = find(k, p, n, hash);
    if (e && e->writing == BEING_WRITTEN)
        set_writing(p, e, TO_WRITE);
    pthread_mutex_unlock(&p->lock);
}
