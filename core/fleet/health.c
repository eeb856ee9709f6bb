/* Health checks: see health.h. On the control loop. The monitor owns one probe for each engine of
 * the fleet's view; a probe holds a reference to its engine and owns a pool of its own, so that
 * checks never wait behind traffic.
 *
 * A probe does one thing at a time:
 *
 *            +--------------------- failure, or nothing to detect --------------------+
 *            v                                                                        |
 *         WAITING --interval--> CHECKING --good, coming up or detection is due--> DETECTING
 *            ^                                                                        |
 *            +---------------- came to an end; now the engine is UP ------------------+
 *
 * Coming up includes the first detection: an engine that is UP has its models in the view. A
 * detection that fails does not keep it down; it is tried again after each good check.
 *
 * `changed` and the fleet's publish may call back into pl_health_sync and pl_health_stop: probes
 * that leave are only marked and freed when no callback of theirs runs (monitor->depth). */
#include "fleet/health.h"

#include <stdlib.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/rng.h"
#include "fleet/detect.h"
#include "fleet/gauge_read.h"
#include "http/upstream.h"

#define MAX_HEALTH_ANSWER 65536

typedef enum probe_state { WAITING, CHECKING, DETECTING } probe_state;

typedef struct probe {
    pl_health_monitor *monitor;
    struct probe *next;
    pl_engine *engine; /* referenced */
    pl_pool *pool;
    probe_state state;
    pl_timer timer;       /* WAITING */
    pl_fetch *fetch;      /* CHECKING */
    pl_detect *detect;    /* DETECTING */
    unsigned good, bad;   /* answers in a row */
    pl_engine_kind given; /* the configured kind, or auto */
    bool detected;        /* the last detection succeeded */
    bool warned;          /* its failure was told already */
    bool no_models_told;
    uint64_t detected_ms; /* when it last succeeded */
    bool in_view;         /* used by sync */
    bool gone;
} probe;

struct pl_health_monitor {
    uv_loop_t *loop;
    pl_wheel *wheel;
    pl_fleet *fleet;
    pl_health_options o;
    char *path;
    void (*changed)(void *ctx, pl_engine *e);
    void (*described)(void *ctx, pl_engine *e, pl_str info);
    void *ctx;
    pl_rng rng;
    probe *probes;
    int depth; /* callbacks of probes under way */
    bool stopped;
};

void pl_health_options_default(pl_health_options *o)
{
    *o = (pl_health_options){.interval_ms = 2000,
                             .timeout_ms = 2000,
                             .rise = 1,
                             .fall = 2,
                             .detect_interval_ms = 30000,
                             .path = PL_STR_INIT("/health")};
}

/* --- the life of a probe --- */

static void probe_end(probe *p)
{
    if (p->gone)
        return;
    p->gone = true;
    pl_wheel_cancel(p->monitor->wheel, &p->timer);
    if (p->fetch)
        pl_fetch_cancel(p->fetch);
    if (p->detect)
        pl_detect_cancel(p->detect);
    pl_pool_free(p->pool);
    p->pool = NULL;
}

/* Frees what has ended, unless a callback still stands on it. */
static void sweep(pl_health_monitor *m)
{
    if (m->depth > 0)
        return;
    for (probe **at = &m->probes; *at;) {
        probe *p = *at;
        if (!p->gone) {
            at = &p->next;
            continue;
        }
        *at = p->next;
        pl_engine_unref(p->engine);
        free(p);
    }
    if (m->stopped) {
        free(m->path);
        free(m);
    }
}

static void enter(pl_health_monitor *m)
{
    m->depth++;
}

static void leave(pl_health_monitor *m)
{
    m->depth--;
    sweep(m);
}

static void set_health(probe *p, pl_health to, const char *why)
{
    pl_engine *e = p->engine;
    int was = atomic_exchange(&e->health, (int)to);
    if (was == (int)to)
        return;
    if (to == PL_HEALTH_UP)
        pl_log(PL_LOG_INFO, "engine_up", "%s at %s is healthy", e->name, e->url);
    else
        pl_log(PL_LOG_WARN, "engine_down", "%s at %s: %s", e->name, e->url, why);
    if (p->monitor->changed)
        p->monitor->changed(p->monitor->ctx, e);
}

/* --- WAITING --- */

static void check(probe *p);

static void on_timer(pl_timer *t)
{
    check((probe *)((char *)t - offsetof(probe, timer)));
}

static void wait_for_next(probe *p)
{
    pl_health_monitor *m = p->monitor;
    p->state = WAITING;
    if (p->gone)
        return;
    double spread = 0.9 + 0.2 * pl_rng_unit(&m->rng);
    pl_wheel_arm(m->wheel, &p->timer, (uint64_t)((double)m->o.interval_ms * spread), on_timer);
}

/* --- DETECTING --- */

static void tell_detected(probe *p, const pl_detected *found, int kind)
{
    pl_engine *e = p->engine;
    pl_log(PL_LOG_INFO, "engine_detected", "%s is %s with %d model%s", e->name,
           kind == PL_KIND_AUTO ? "of a kind that it does not tell"
                                : pl_engine_kind_name((pl_engine_kind)kind),
           found->ids_n, found->ids_n == 1 ? "" : "s");
    if (found->dropped)
        pl_log(PL_LOG_WARN, "models_dropped",
               "%s: %d model ids were left out (too long, not printable or too many)", e->name,
               found->dropped);
}

/* Told when something is new or gone; the first time only when there is something. */
static void set_caps(pl_engine *e, uint32_t caps)
{
    uint32_t was = atomic_exchange(&e->caps, caps);
    if (was != caps)
        pl_log(PL_LOG_INFO, "engine_can",
               "%s: sessions %s, streaming sessions %s, session tag %s, "
               "retention %s, priority %s",
               e->name, caps & PL_CAP_SESSIONS ? "yes" : "no",
               caps & PL_CAP_STREAMING_SESSIONS ? "yes" : "no",
               caps & PL_CAP_SESSION_TAG ? "yes" : "no", caps & PL_CAP_RETENTION ? "yes" : "no",
               caps & PL_CAP_PRIORITY ? "yes" : "no");
}

static void apply(probe *p, const pl_detected *found)
{
    pl_engine *e = p->engine;
    int was = atomic_load(&e->kind);
    int kind = p->given != PL_KIND_AUTO || found->kind == PL_KIND_AUTO ? was : (int)found->kind;
    atomic_store(&e->kind, kind);
    if (kind != was || !p->detected)
        tell_detected(p, found, kind);
    if (found->caps_known)
        set_caps(e, found->caps);
    for (int i = 0; i < e->workers_n; i++)
        pl_gauges_sizes(&e->workers[i], found->block_tokens, found->kv_tokens);
    if (found->no_models && !e->models_given && !p->no_models_told) {
        p->no_models_told = true;
        pl_log(PL_LOG_WARN, "engine_without_models",
               "%s has no /v1/models: give its models in the configuration", e->name);
    }
    p->detected = true;
    p->warned = false;
    p->detected_ms = p->monitor->wheel->now_ms;
    /* first: no request shall take one for a model of its own */
    if (pl_fleet_set_adapters(p->monitor->fleet, e, found->adapters, found->adapters_n) < 0)
        p->detected = false;
    if (!e->models_given && pl_fleet_set_models(p->monitor->fleet, e, found->ids, found->ids_n) < 0)
        p->detected = false; /* out of memory: again after the next check */
}

static void on_detected(void *user, const pl_detected *found)
{
    probe *p = user;
    pl_health_monitor *m = p->monitor;
    p->detect = NULL;
    enter(m);
    if (found->err == 0) {
        apply(p, found);
        if (found->info.n && m->described && !p->gone)
            m->described(m->ctx, p->engine, found->info);
    } else {
        p->detected = false;
        if (!p->warned)
            pl_log(PL_LOG_WARN, "engine_not_detected",
                   "%s: %s (status %d); asked again with each health check", p->engine->name,
                   found->detail ? found->detail : pl_strerror(found->err), found->status);
        p->warned = true;
    }
    if (!p->gone) /* apply may have ended in pl_health_sync */
        set_health(p, PL_HEALTH_UP, NULL);
    wait_for_next(p);
    leave(m);
}

void pl_health_on_info(pl_health_monitor *m,
                       void (*described)(void *ctx, pl_engine *e, pl_str info))
{
    m->described = described;
}

/* --- CHECKING --- */

static void on_good(probe *p)
{
    pl_health_monitor *m = p->monitor;
    bool recovers = p->bad > 0 || p->good == 0;
    p->bad = 0;
    p->good++;
    if (recovers)
        pl_breaker_health_ok(p->engine, pl_now_ns());
    bool up = atomic_load(&p->engine->health) == PL_HEALTH_UP;
    if (!up && p->good < m->o.rise) {
        wait_for_next(p);
        return;
    }
    bool due = !p->detected || m->wheel->now_ms - p->detected_ms >= m->o.detect_interval_ms;
    if (!up || due) {
        p->state = DETECTING;
        p->detect = pl_detect_start(p->pool, p->given, m->o.timeout_ms, on_detected, p);
        if (p->detect)
            return;
        set_health(p, PL_HEALTH_UP, NULL);
    }
    wait_for_next(p);
}

static void on_bad(probe *p, const char *why)
{
    pl_engine *e = p->engine;
    atomic_fetch_add_explicit(&e->health_failures, 1, memory_order_relaxed);
    p->good = 0;
    p->bad++;
    /* nothing is known yet: the first answer decides */
    if (p->bad >= p->monitor->o.fall || atomic_load(&e->health) == PL_HEALTH_UNKNOWN)
        set_health(p, PL_HEALTH_DOWN, why);
    wait_for_next(p);
}

static void on_checked(void *user, const pl_fetch_result *r)
{
    probe *p = user;
    pl_health_monitor *m = p->monitor;
    p->fetch = NULL;
    enter(m);
    atomic_fetch_add_explicit(&p->engine->health_checks, 1, memory_order_relaxed);
    if (r->err == 0 && r->status >= 200 && r->status <= 299) {
        on_good(p);
    } else if (r->err == PL_EUNAVAILABLE || r->err == PL_ENOMEM) {
        wait_for_next(p); /* the router could not ask: that says nothing about the engine */
    } else if (r->err < 0) {
        on_bad(p, r->detail ? r->detail : pl_strerror(r->err));
    } else {
        char why[64];
        snprintf(why, sizeof why, "the health check answers %d", r->status);
        on_bad(p, why);
    }
    leave(m);
}

static void check(probe *p)
{
    pl_health_monitor *m = p->monitor;
    p->state = CHECKING;
    p->fetch = pl_fetch_start(p->pool, PL_GET, pl_str_c(m->path), (pl_str){NULL, 0},
                              (pl_str){NULL, 0}, m->o.timeout_ms, MAX_HEALTH_ANSWER, on_checked, p);
    if (!p->fetch) /* out of memory is not the engine's fault */
        wait_for_next(p);
}

/* --- the monitor --- */

static void add(pl_health_monitor *m, pl_engine *e)
{
    pl_pool_options o;
    pl_pool_options_default(&o);
    o.connect_timeout_ms = m->o.timeout_ms;
    o.max_idle = 1;
    o.api_key = e->api_key;
    probe *p = calloc(1, sizeof *p);
    pl_pool *pool = p ? pl_pool_new(m->loop, m->wheel, pl_str_c(e->host), e->port, &o) : NULL;
    if (!pool) { /* the next sync tries again */
        free(p);
        pl_log(PL_LOG_ERROR, "health_no_memory", "%s is not checked: out of memory", e->name);
        return;
    }
    p->monitor = m;
    p->engine = pl_engine_ref(e);
    p->pool = pool;
    p->given = (pl_engine_kind)atomic_load(&e->kind);
    p->in_view = true;
    p->next = m->probes;
    m->probes = p;
    check(p);
}

void pl_health_sync(pl_health_monitor *m)
{
    pl_view *v = pl_fleet_view(m->fleet);
    if (!v || m->stopped) {
        pl_view_unref(v);
        return;
    }
    enter(m);
    for (probe *p = m->probes; p; p = p->next)
        p->in_view = false;
    for (int i = 0; i < v->engines_n; i++) {
        probe *p = m->probes;
        while (p && (p->gone || p->engine != v->engines[i]))
            p = p->next;
        if (p)
            p->in_view = true;
        else
            add(m, v->engines[i]);
    }
    for (probe *p = m->probes; p; p = p->next)
        if (!p->in_view)
            probe_end(p);
    pl_view_unref(v);
    leave(m);
}

pl_health_monitor *pl_health_start(uv_loop_t *loop, pl_wheel *wheel, pl_fleet *f,
                                   const pl_health_options *o,
                                   void (*changed)(void *ctx, pl_engine *e), void *ctx)
{
    pl_health_monitor *m = calloc(1, sizeof *m);
    if (!m)
        return NULL;
    m->path = pl_fetch_path_ok(o->path) ? pl_str_dup(o->path) : NULL;
    if (!m->path) {
        free(m);
        return NULL;
    }
    m->loop = loop;
    m->wheel = wheel;
    m->fleet = f;
    m->o = *o;
    m->changed = changed;
    m->ctx = ctx;
    m->rng.state = pl_now_ns(); /* only spreads checks: routers started together drift apart */
    pl_health_sync(m);
    return m;
}

void pl_health_stop(pl_health_monitor *m)
{
    if (!m || m->stopped)
        return;
    m->stopped = true;
    for (probe *p = m->probes; p; p = p->next)
        probe_end(p);
    sweep(m); /* may free m */
}
