/* Puts the sessions together: see affinity.h. Called by router.c and loop.c. The control thread
 * owns the controller's life and moves the store's expiry on; a session that has expired at an
 * engine is judged by the expire hook on one loop, the one that its name's hash says, so that a
 * policy's state about a session is in one VM. */
#include "affinity.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "http/request.h"
#include "shared_store.h"

#define STOP_MS 2000 /* for closing what is open on engines, when the router ends */

/* --- expiry --- */

typedef struct expiring {
    pl_message message;
    pl_router *router;
    pl_binding binding;
    uint64_t hash;
    size_t tenant_n, id_n;
    char names[];
} expiring;

static pl_session_name name_of(const expiring *e)
{
    return (pl_session_name){{e->names, e->tenant_n}, {e->names + e->tenant_n, e->id_n}};
}

static void judge(pl_message *m, void *ctx)
{
    expiring *e = (expiring *)m;
    pl_loop *l = ctx;
    const pl_session_name name = name_of(e);
    const pl_binding *b = &e->binding;
    uint64_t now = pl_now_ns();
    const struct pl_session s = {
        .age_seconds = now > b->opened_at_ns ? (double)(now - b->opened_at_ns) / 1e9 : 0,
        .idle_seconds = now > b->used_at_ns ? (double)(now - b->used_at_ns) / 1e9 : 0,
        .ttl_seconds = b->ttl_ms / 1e3,
        .held_tokens = pl_binding_held_tokens(b),
        .id_hash = (double)e->hash,
        .parent_hash = (double)b->parent_hash,
        .turn = (int32_t)b->turns,
        .kind = PL_ENGINE_BACKED,
        .bound_slot = b->slot,
        .bound_generation = b->generation,
        .bound_index = -1,
        .has_parent = b->parent_hash != 0,
    };
    const pl_request_view names = {.tenant = name.tenant, .session_id = name.id};
    double seconds = 0;
    l->vm_used = true;
    int action = pl_decide_expire(l->decider, &s, &names,
                                  l->router->config.wish.max_timeout_seconds, &seconds);
    pl_sessions_expire(l->router->sessions, &name, b, action, seconds);
    free(e);
}

/* Any thread. */
static void on_expiring(void *ctx, const pl_session_name *name, const pl_binding *b)
{
    pl_router *r = ctx;
    expiring *e = malloc(sizeof *e + name->tenant.n + name->id.n);
    if (e) {
        *e = (expiring){.message = {NULL, judge},
                        .router = r,
                        .binding = *b,
                        .tenant_n = name->tenant.n,
                        .id_n = name->id.n};
        e->hash = pl_session_name_hash(name);
        memcpy(e->names, name->tenant.p, name->tenant.n);
        memcpy(e->names + name->tenant.n, name->id.p, name->id.n);
        pl_loop *l = &r->loops[e->hash % (uint64_t)r->loops_n];
        if (l->started && pl_mailbox_post(&l->mailbox, &e->message) == 0)
            return;
        free(e);
    }
    pl_sessions_expire(r->sessions, name, b, PL_CLOSE, 0); /* nobody left to ask */
}

static void on_store_timer(pl_timer *t)
{
    pl_router *r = (pl_router *)((char *)t - offsetof(pl_router, store_timer));
    pl_store_advance(r->store);
    pl_wheel_arm(&r->control_wheel, t, PL_STORE_ADVANCE_MS / 2, on_store_timer);
}

/* --- start --- */

/* Any thread: a worker and a reference to its engine. */
static pl_engine *find_worker(void *ctx, int slot, int generation, pl_worker_state **w)
{
    pl_router *r = ctx;
    pl_view *v = pl_fleet_view(r->fleet);
    pl_engine *found = NULL;
    *w = NULL;
    for (int i = 0; v && i < v->workers_n && !found; i++)
        if (v->workers[i]->slot == slot && v->workers[i]->generation == generation) {
            *w = v->workers[i];
            found = pl_engine_ref(v->workers[i]->engine);
        }
    pl_view_unref(v);
    return found;
}

int pl_affinity_start(pl_router *r, pl_errbuf *eb)
{
    const pl_config *c = &r->config;
    bool shared = c->session_store != 0;
    const pl_sessions_config sc = {
        .o = c->sessions,
        .clock = pl_clock_real(),
        .control = &r->control,
        .control_wheel = &r->control_wheel,
        .control_mailbox = &r->control_mailbox,
        .pool = &c->pool,
        .expiring = on_expiring,
        .settled = shared ? pl_shared_store_settled : NULL,
        .ctx = r,
        .find = find_worker,
    };
    int rc = pl_sessions_new(&sc, &r->sessions);
    if (rc == 0 && shared) {
        rc = pl_shared_store_start(r, eb);
        if (rc != 0)
            return rc;
        pl_sessions_set_store(r->sessions, r->store);
        return 0;
    }
    if (rc == 0) {
        const pl_store_options so = {.clock = pl_clock_real(),
                                     .cap = c->max_sessions,
                                     .expired = pl_sessions_expired,
                                     .ctx = r->sessions};
        rc = pl_store_memory_new(&so, &r->store);
    }
    if (rc != 0)
        return pl_fail(eb, rc, "cannot make the session store: %s", pl_strerror(rc));
    pl_sessions_set_store(r->sessions, r->store);
    pl_wheel_arm(&r->control_wheel, &r->store_timer, PL_STORE_ADVANCE_MS / 2, on_store_timer);
    return 0;
}

static pl_pool *loop_pool(void *ctx, pl_engine *e)
{
    return pl_loop_pool(ctx, e);
}

int pl_affinity_loop(pl_loop *l, pl_errbuf *eb)
{
    int rc = l->router->redis ? pl_shared_store_loop(l, eb) : 0;
    if (rc != 0)
        return rc;
    if (!l->router->redis)
        l->store = l->router->store;
    const pl_sessions_loop_config c = {.store = l->store,
                                       .wheel = &l->wheel,
                                       .mailbox = &l->mailbox,
                                       .rng = &l->rng,
                                       .pool = loop_pool,
                                       .ctx = l};
    l->sessions = pl_sessions_loop_new(l->router->sessions, &c);
    return l->sessions ? 0 : pl_fail(eb, PL_ENOMEM, "out of memory");
}

/* --- stop --- */

typedef struct stopping {
    pl_router *router;
    void (*done)(pl_router *r);
} stopping;

static void on_stopped(void *ctx)
{
    stopping *s = ctx;
    s->done(s->router);
    free(s);
}

void pl_affinity_stop(pl_router *r, void (*done)(pl_router *r))
{
    stopping *s = r->sessions ? malloc(sizeof *s) : NULL;
    if (!s) {
        done(r);
        return;
    }
    *s = (stopping){r, done};
    /* what a shared store has goes on at the other routers */
    pl_sessions_stop(r->sessions, !r->redis, STOP_MS, on_stopped, s);
}

void pl_affinity_loop_stop(pl_loop *l)
{
    pl_sessions_loop_free(l->sessions);
    l->sessions = NULL;
    if (l->router->redis)
        pl_store_free(l->store);
    l->store = NULL;
}

void pl_affinity_free(pl_router *r)
{
    pl_wheel_cancel(&r->control_wheel, &r->store_timer);
    pl_sessions_free(r->sessions);
    pl_store_free(r->store);
    pl_redis_free(r->redis);
    r->sessions = NULL;
    r->store = NULL;
    r->redis = NULL;
}
