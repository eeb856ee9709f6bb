/* The router's side of the store that several routers share (session/redis.h): one handle for each
 * loop and one for the control thread, which sweeps; workers by their engine's name and rank; what
 * has expired goes to the controller, and is acknowledged when it is settled there. Called by
 * affinity.c. The router owns the pl_redis and the control thread's handle, each loop its own. */
#include "shared_store.h"

#include <string.h>

#include "base/clock.h"
#include "loop.h"

/* --- workers; any loop's thread --- */

static size_t worker_name(void *ctx, int32_t slot, int32_t generation,
                          char buf[PL_REDIS_WORKER_MAX])
{
    pl_router *r = ctx;
    pl_view *v = pl_fleet_view(r->fleet);
    size_t n = 0;
    for (int i = 0; v && i < v->workers_n; i++) {
        const pl_worker_state *w = v->workers[i];
        if (w->slot != slot || w->generation != generation)
            continue;
        size_t len = strlen(w->engine->name);
        if (len <= PL_REDIS_WORKER_MAX)
            memcpy(buf, w->engine->name, n = len);
        break;
    }
    pl_view_unref(v);
    return n;
}

static int find_worker(void *ctx, pl_str name, int32_t rank, int32_t *slot, int32_t *generation)
{
    pl_router *r = ctx;
    pl_view *v = pl_fleet_view(r->fleet);
    int rc = PL_ENOTFOUND;
    for (int i = 0; v && i < v->workers_n; i++) {
        const pl_worker_state *w = v->workers[i];
        if (w->rank != rank || !pl_str_eq(pl_str_c(w->engine->name), name))
            continue;
        *slot = w->slot;
        *generation = w->generation;
        rc = 0;
        break;
    }
    pl_view_unref(v);
    return rc;
}

/* --- expiry; the control thread --- */

static void on_expired(void *ctx, pl_store *store, const pl_session_name *name, const pl_binding *b)
{
    pl_router *r = ctx;
    (void)store; /* the control thread's: the only one that sweeps */
    pl_sessions_expired(r->sessions, name, b);
}

void pl_shared_store_settled(void *router, uint64_t version)
{
    pl_router *r = router;
    if (r->store)
        pl_store_redis_ack(r->store, version);
}

/* --- start --- */

int pl_shared_store_start(pl_router *r, pl_errbuf *eb)
{
    pl_errbuf why = {""};
    pl_redis_options o = r->config.redis;
    o.no_stale = o.staleness_ms == 0;
    o.cap = r->config.max_sessions;
    o.clock = pl_clock_real();
    o.worker_name = worker_name;
    o.find_worker = find_worker;
    o.worker_ctx = r;
    o.expired = on_expired;
    o.expired_ctx = r;
    int rc = pl_redis_new(&o, &r->redis, &why);
    if (rc != 0)
        return pl_fail(eb, rc, "sessions.redis: %s", why.text);
    rc = pl_store_redis_new(r->redis, &r->control, &r->control_wheel, true, &r->store);
    return rc == 0 ? 0 : pl_fail(eb, rc, "sessions.redis: %s", pl_strerror(rc));
}

/* The first requests should find the store: before the loop listens it waits for the connection.
 * Only the first loop waits for a store that does not answer at all; that is no reason not to
 * start. */
static void wait_until_up(pl_loop *l)
{
    pl_router *r = l->router;
    const pl_redis_stats *st = pl_redis_stats_of(r->redis);
    uint64_t by_ns = pl_now_ns() + r->config.redis.connect_ms * 1000000u;
    while (!pl_store_redis_up(l->store) && atomic_load(&st->handles_down) == 0 &&
           pl_now_ns() < by_ns)
        uv_run(&l->uv, UV_RUN_ONCE); /* the wheel's timer ends each */
}

int pl_shared_store_loop(pl_loop *l, pl_errbuf *eb)
{
    int rc = pl_store_redis_new(l->router->redis, &l->uv, &l->wheel, false, &l->store);
    if (rc != 0)
        return pl_fail(eb, rc, "sessions.redis: %s", pl_strerror(rc));
    wait_until_up(l);
    return 0;
}
