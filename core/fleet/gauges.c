/* Polling of the engines' gauges: see gauges.h. On the control loop. The monitor owns one poll for
 * each engine of the fleet's view; a poll holds a reference to its engine and owns a pool of its
 * own, so that neither traffic nor a slow engine delays the others'.
 *
 *            +------------- read, or no answer in time, or nothing to ask -----------+
 *            v                                                                       |
 *         WAITING --interval, the engine is up--> ASKING /v1/loads (SGLang) --404--> ASKING
 * /metrics ^                                          |
 *            +------------------ read ------------------+
 *
 * Nothing here calls out, so nothing of this file is entered from inside itself. */
#include "fleet/gauges.h"

#include <stdlib.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/rng.h"
#include "fleet/gauge_read.h"
#include "http/upstream.h"

#define MAX_ANSWER (8u << 20) /* a page of histograms for many models is a few MiB */

typedef enum source { LOADS, METRICS } source;

static const pl_str paths[] = {
    [LOADS] = PL_STR_INIT("/v1/loads?include=core"),
    [METRICS] = PL_STR_INIT("/metrics"),
};

typedef struct poll {
    pl_gauges *owner;
    struct poll *next;
    pl_engine *engine; /* referenced */
    pl_pool *pool;
    pl_timer timer;  /* WAITING */
    pl_fetch *fetch; /* ASKING */
    source asked;
    uint64_t asked_ns;
    uint64_t loads_after_ms; /* it has no /v1/loads: not asked for that before */
    bool told;               /* that it fails, or what it lacks */
    bool in_view;            /* used by sync */
} poll;

struct pl_gauges {
    uv_loop_t *loop;
    pl_wheel *wheel;
    pl_fleet *fleet;
    pl_gauges_options o;
    pl_rng rng;
    poll *polls;
    pl_gauge_set set; /* of the answer that is being read */
};

void pl_gauges_options_default(pl_gauges_options *o)
{
    *o = (pl_gauges_options){.interval_ms = 1000, .timeout_ms = 1000};
}

/* --- one poll --- */

static void ask(poll *p);

static void on_timer(pl_timer *t)
{
    ask((poll *)((char *)t - offsetof(poll, timer)));
}

static void wait_ms(poll *p, uint64_t ms)
{
    pl_gauges *g = p->owner;
    double spread = 0.9 + 0.2 * pl_rng_unit(&g->rng);
    p->fetch = NULL;
    pl_wheel_arm(g->wheel, &p->timer, (uint64_t)((double)ms * spread), on_timer);
}

static bool absent(int status)
{
    return status == 404 || status == 405 || status == 501;
}

/* Told once until it works again. */
static void failed(poll *p, const char *why, int status)
{
    atomic_fetch_add_explicit(&p->engine->gauge_failures, 1, memory_order_relaxed);
    if (!p->told)
        pl_log(PL_LOG_WARN, "gauges_unknown", "%s: %s (GET %.*s, status %d)", p->engine->name, why,
               PL_FMT(paths[p->asked]), status);
    p->told = true;
}

static void read_answer(poll *p, const pl_fetch_result *r)
{
    pl_gauge_set *set = &p->owner->set;
    int n =
        p->asked == LOADS ? pl_gauges_of_loads(r->body, set) : pl_gauges_of_metrics(r->body, set);
    if (n < 0) {
        failed(p, "its load cannot be read", r->status);
    } else if (pl_gauges_apply(set, p->engine, p->asked_ns) == 0) {
        failed(p, n == 0 ? "its answer says nothing of its load" : "its load is not told by rank",
               r->status);
    } else {
        if (p->told)
            pl_log(PL_LOG_INFO, "gauges_known", "%s tells its load", p->engine->name);
        p->told = false;
    }
}

static bool start(poll *p, source what);

static void on_answer(void *user, const pl_fetch_result *r)
{
    poll *p = user;
    pl_gauges *g = p->owner;
    p->fetch = NULL;
    if (r->err == PL_EUNAVAILABLE || r->err == PL_ENOMEM) {
        wait_ms(p, g->o.interval_ms); /* the router's own trouble */
        return;
    }
    if (r->err == 0 && absent(r->status)) {
        if (p->asked == LOADS) {
            p->loads_after_ms = g->wheel->now_ms + PL_GAUGES_AGAIN_MS;
            if (start(p, METRICS))
                return;
        } else {
            failed(p, "it does not tell its load", r->status);
            wait_ms(p, PL_GAUGES_AGAIN_MS);
            return;
        }
    } else if (r->err < 0) {
        failed(p, r->detail ? r->detail : pl_strerror(r->err), r->status);
    } else if (r->status < 200 || r->status > 299) {
        failed(p, "it does not tell its load now", r->status);
    } else {
        read_answer(p, r);
    }
    wait_ms(p, g->o.interval_ms);
}

static bool start(poll *p, source what)
{
    pl_gauges *g = p->owner;
    p->asked = what;
    p->asked_ns = pl_now_ns();
    p->fetch = pl_fetch_start(p->pool, PL_GET, paths[what], (pl_str){NULL, 0}, (pl_str){NULL, 0},
                              g->o.timeout_ms, MAX_ANSWER, on_answer, p);
    if (p->fetch)
        atomic_fetch_add_explicit(&p->engine->gauge_polls, 1, memory_order_relaxed);
    return p->fetch != NULL;
}

static void ask(poll *p)
{
    const pl_engine *e = p->engine;
    int kind = atomic_load(&e->kind);
    bool loads = kind == PL_KIND_SGLANG && p->owner->wheel->now_ms >= p->loads_after_ms;
    if (atomic_load(&e->health) != PL_HEALTH_UP ||
        (kind != PL_KIND_SGLANG && kind != PL_KIND_VLLM) || !start(p, loads ? LOADS : METRICS))
        wait_ms(p, p->owner->o.interval_ms);
}

static void poll_free(poll *p)
{
    pl_wheel_cancel(p->owner->wheel, &p->timer);
    if (p->fetch)
        pl_fetch_cancel(p->fetch);
    pl_pool_free(p->pool);
    pl_engine_unref(p->engine);
    free(p);
}

/* --- all of them --- */

static void add(pl_gauges *g, pl_engine *e)
{
    pl_pool_options o;
    pl_pool_options_default(&o);
    o.connect_timeout_ms = g->o.timeout_ms;
    o.max_idle = 1;
    o.api_key = e->api_key;
    poll *p = calloc(1, sizeof *p);
    pl_pool *pool = p ? pl_pool_new(g->loop, g->wheel, pl_str_c(e->host), e->port, &o) : NULL;
    if (!pool) { /* the next sync tries again */
        free(p);
        pl_log(PL_LOG_ERROR, "gauges_no_memory", "%s is not asked: out of memory", e->name);
        return;
    }
    p->owner = g;
    p->engine = pl_engine_ref(e);
    p->pool = pool;
    p->in_view = true;
    p->next = g->polls;
    g->polls = p;
    ask(p);
}

void pl_gauges_sync(pl_gauges *g)
{
    pl_view *v = g && g->o.interval_ms ? pl_fleet_view(g->fleet) : NULL;
    if (!v)
        return;
    for (poll *p = g->polls; p; p = p->next)
        p->in_view = false;
    for (int i = 0; i < v->engines_n; i++) {
        poll *p = g->polls;
        while (p && p->engine != v->engines[i])
            p = p->next;
        if (p)
            p->in_view = true;
        else
            add(g, v->engines[i]);
    }
    for (poll **at = &g->polls; *at;) {
        poll *p = *at;
        if (p->in_view) {
            at = &p->next;
            continue;
        }
        *at = p->next;
        poll_free(p);
    }
    pl_view_unref(v);
}

void pl_gauges_wake(pl_gauges *g, const pl_engine *e)
{
    for (poll *p = g ? g->polls : NULL; p; p = p->next) {
        if (p->engine != e || p->fetch)
            continue;
        p->loads_after_ms = 0; /* another program may answer there now */
        pl_wheel_cancel(g->wheel, &p->timer);
        ask(p);
    }
}

pl_gauges *pl_gauges_start(uv_loop_t *loop, pl_wheel *wheel, pl_fleet *f,
                           const pl_gauges_options *o)
{
    pl_gauges *g = calloc(1, sizeof *g);
    if (!g)
        return NULL;
    g->loop = loop;
    g->wheel = wheel;
    g->fleet = f;
    g->o = *o;
    g->rng.state = pl_now_ns(); /* only spreads questions */
    pl_gauges_sync(g);
    return g;
}

void pl_gauges_stop(pl_gauges *g)
{
    if (!g)
        return;
    while (g->polls) {
        poll *p = g->polls;
        g->polls = p->next;
        poll_free(p);
    }
    free(g);
}
