/* What this process has open on which worker: for the caps, for the workers' counts, for engines
 * that leave and for the stop. Called by the other parts of the controller on any thread; one lock,
 * held for a few instructions but in pick. It owns its entries, each with a reference to its
 * engine; the key is the nonce, which is random. */
#include <stdlib.h>
#include <string.h>

#include "session/sessions_impl.h"

#define CHAINS 4096

struct pl_registry {
    uv_mutex_t lock;
    unsigned count;
    pl_registered *chains[CHAINS];
};

/* A binding is gone this long after its deadline, in every store. */
#define LOOK_AFTER_NS 6000000000u

pl_registry *pl_registry_new(void)
{
    pl_registry *r = calloc(1, sizeof *r);
    if (r)
        uv_mutex_init(&r->lock);
    return r;
}

static pl_registered **find(pl_registry *r, uint64_t nonce)
{
    pl_registered **at = &r->chains[nonce % CHAINS];
    while (*at && (*at)->nonce != nonce)
        at = &(*at)->next;
    return at;
}

static void let_go(pl_registered *e)
{
    pl_worker_state *w = e->worker;
    atomic_fetch_sub(&w->session_tokens, e->tokens);
    atomic_fetch_sub(&w->sessions, 1);
    pl_engine_unref(w->engine);
    free(e);
}

void pl_registry_free(pl_registry *r)
{
    if (!r)
        return;
    for (int i = 0; i < CHAINS; i++)
        for (pl_registered *e = r->chains[i], *next; e; e = next) {
            next = e->next;
            let_go(e);
        }
    uv_mutex_destroy(&r->lock);
    free(r);
}

int pl_registry_add(pl_registry *r, uint64_t nonce, pl_worker_state *w, const pl_session_name *name,
                    uint32_t max_sessions, uint64_t max_tokens)
{
    pl_registered *e = calloc(1, sizeof *e + name->tenant.n + name->id.n);
    if (!e)
        return PL_ENOMEM;
    int32_t before = atomic_fetch_add(&w->sessions, 1);
    if ((max_sessions && before >= 0 && (uint32_t)before >= max_sessions) ||
        (max_tokens && atomic_load(&w->session_tokens) >= (int64_t)max_tokens)) {
        atomic_fetch_sub(&w->sessions, 1);
        free(e);
        return PL_ELIMIT;
    }
    e->nonce = nonce;
    e->worker = w;
    e->look_ns = UINT64_MAX;
    e->name = pl_session_name_copy(name, e->bytes);
    pl_engine_ref(w->engine);
    uv_mutex_lock(&r->lock);
    e->next = r->chains[nonce % CHAINS];
    r->chains[nonce % CHAINS] = e;
    r->count++;
    uv_mutex_unlock(&r->lock);
    return 0;
}

void pl_registry_bound(pl_registry *r, uint64_t nonce, uint64_t version, uint32_t ttl_ms,
                       uint64_t now_ns, double tokens)
{
    uv_mutex_lock(&r->lock);
    pl_registered *e = *find(r, nonce);
    if (e) {
        e->version = version;
        e->ttl_ms = ttl_ms;
        e->seen_ns = now_ns;
        e->look_ns = now_ns + (uint64_t)ttl_ms * 1000000u + LOOK_AFTER_NS;
        if (tokens >= 0 && tokens < 1e15) {
            atomic_fetch_add(&e->worker->session_tokens, (int64_t)tokens - e->tokens);
            e->tokens = (int64_t)tokens;
        }
    }
    uv_mutex_unlock(&r->lock);
}

pl_engine *pl_registry_closing(pl_registry *r, uint64_t nonce, pl_worker_state **w)
{
    uv_mutex_lock(&r->lock);
    pl_registered *e = *find(r, nonce);
    pl_engine *engine = e ? pl_engine_ref(e->worker->engine) : NULL;
    if (e) {
        e->closing = true;
        *w = e->worker;
    }
    uv_mutex_unlock(&r->lock);
    return engine;
}

void pl_registry_drop(pl_registry *r, uint64_t nonce)
{
    uv_mutex_lock(&r->lock);
    pl_registered **at = find(r, nonce), *e = *at;
    if (e) {
        *at = e->next;
        r->count--;
    }
    uv_mutex_unlock(&r->lock);
    if (e)
        let_go(e);
}

bool pl_registry_is_open(pl_registry *r, uint64_t nonce)
{
    uv_mutex_lock(&r->lock);
    const pl_registered *e = *find(r, nonce);
    bool open = e && !e->closing;
    uv_mutex_unlock(&r->lock);
    return open;
}

pl_registered *pl_registry_pick(pl_registry *r, const pl_engine *engine, uint64_t due_ns,
                                unsigned max)
{
    pl_registered *list = NULL;
    unsigned n = 0;
    uv_mutex_lock(&r->lock);
    for (int i = 0; i < CHAINS; i++)
        for (pl_registered *e = r->chains[i]; e && (max == 0 || n < max); e = e->next) {
            if (e->closing || !e->version || (engine && e->worker->engine != engine) ||
                (due_ns && (e->looking || e->look_ns > due_ns)))
                continue;
            size_t bytes = e->name.tenant.n + e->name.id.n;
            pl_registered *copy = malloc(sizeof *copy + bytes);
            if (!copy)
                continue; /* due again with the next look; at the end the engine's timeout */
            memcpy(copy, e, sizeof *e);
            copy->name = pl_session_name_copy(&e->name, copy->bytes);
            copy->next = list;
            list = copy;
            e->looking = e->looking || due_ns;
            n++;
        }
    uv_mutex_unlock(&r->lock);
    return list;
}

void pl_registry_looked(pl_registry *r, uint64_t nonce, uint64_t seen_ns, uint64_t look_ns)
{
    uv_mutex_lock(&r->lock);
    pl_registered *e = *find(r, nonce);
    if (e) {
        e->looking = false;
        e->look_ns = look_ns;
        if (seen_ns)
            e->seen_ns = seen_ns;
    }
    uv_mutex_unlock(&r->lock);
}

unsigned pl_registry_count(pl_registry *r)
{
    uv_mutex_lock(&r->lock);
    unsigned n = r->count;
    uv_mutex_unlock(&r->lock);
    return n;
}
