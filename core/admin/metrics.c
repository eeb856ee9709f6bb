/* The Prometheus text (exposition format 0.0.4) over all loops, engines and workers. Rendered on
 * whichever thread was asked: the control thread for the admin port, a loop for the public one. It
 * reads live atomics and takes references to what may go away; nothing here is owned by others.
 * metrics_text.c writes the format. */
#include "admin/metrics.h"

#include <math.h>

#include "admin/metrics_text.h"
#include "base/clock.h"
#include "router.h"

/* A sum over loops of an atomic counter at `at` bytes into pl_loop. */
static uint64_t over_loops(const pl_router *r, size_t at)
{
    uint64_t sum = 0;
    for (int i = 0; i < r->loops_n; i++) {
        const _Atomic uint64_t *c =
            (const _Atomic uint64_t *)(const void *)((const char *)&r->loops[i] + at);
        sum += atomic_load_explicit(c, memory_order_relaxed);
    }
    return sum;
}

static void hist_over_loops(const pl_router *r, size_t at, pl_hist *into)
{
    *into = (pl_hist){0};
    for (int i = 0; i < r->loops_n; i++)
        pl_hist_merge(into, (const pl_hist *)(const void *)((const char *)&r->loops[i] + at));
}

/* --- requests --- */

static void responses(pl_text *t, const pl_router *r)
{
    static const struct {
        const char *class;
        size_t at;
    } classes[] = {
        {"2xx", offsetof(pl_loop, metrics.responses_2xx)},
        {"3xx", offsetof(pl_loop, metrics.responses_3xx)},
        {"4xx", offsetof(pl_loop, metrics.responses_4xx)},
        {"5xx", offsetof(pl_loop, metrics.responses_5xx)},
    };
    pl_text_family(t, "perilune_responses_total", "counter", "Answers to clients by class");
    for (int i = 0; i < 4; i++)
        pl_text_value(t, (double)over_loops(r, classes[i].at), 1, "class", classes[i].class);
}

static void counters(pl_text *t, const pl_router *r)
{
    static const struct {
        const char *name, *help;
        size_t at;
    } list[] = {
#define XX(name, help) {"perilune_" #name "_total", help, offsetof(pl_loop, metrics.name)},
        PL_COUNTER_MAP(XX)
#undef XX
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        pl_str name = pl_str_c(list[i].name);
        if (!pl_str_starts(name, PL_STR("perilune_responses_")))
            pl_text_one(t, list[i].name, "counter", list[i].help,
                        (double)over_loops(r, list[i].at));
    }
    responses(t, r);
}

static void latencies(pl_text *t, const pl_router *r)
{
    static const struct {
        const char *name, *help;
        size_t at;
        pl_hist_range range;
    } list[] = {
        {"perilune_ttft_seconds", "From a complete head to the first body byte",
         offsetof(pl_loop, metrics.ttft), PL_RANGE_REQUEST},
        {"perilune_e2e_seconds", "From a complete head to the end of the answer",
         offsetof(pl_loop, metrics.e2e), PL_RANGE_REQUEST},
        {"perilune_queue_wait_seconds", "Waiting for capacity",
         offsetof(pl_loop, metrics.queue_wait), PL_RANGE_REQUEST},
        {"perilune_decision_seconds", "Records, hooks and checks of one decision",
         offsetof(pl_loop, metrics.decision), PL_RANGE_CALL},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        pl_hist h;
        hist_over_loops(r, list[i].at, &h);
        pl_text_family(t, list[i].name, "histogram", list[i].help);
        pl_text_hist(t, &h, list[i].range, NULL, NULL);
    }
}

/* --- connections and limits --- */

static void servers(pl_text *t, pl_router *r)
{
    static const struct {
        const char *name, *help;
        size_t at;
    } list[] = {
        {"perilune_connections_accepted_total", "Client connections accepted",
         offsetof(pl_loop, server_stats.accepted)},
        {"perilune_connections_refused_total", "Client connections over the limit",
         offsetof(pl_loop, server_stats.refused)},
        {"perilune_http_requests_total", "Requests of any path whose head was read",
         offsetof(pl_loop, server_stats.requests)},
        {"perilune_bad_requests_total", "Requests refused as malformed or over a limit",
         offsetof(pl_loop, server_stats.bad_requests)},
        {"perilune_client_timeouts_total", "Connections that were too slow",
         offsetof(pl_loop, server_stats.timeouts)},
        {"perilune_trailers_dropped_total", "Requests whose trailers were dropped",
         offsetof(pl_loop, server_stats.trailers_dropped)},
    };
    pl_text_one(t, "perilune_connections", "gauge", "Client connections now",
                atomic_load_explicit(&r->connections, memory_order_relaxed));
    pl_text_one(t, "perilune_body_memory_bytes", "gauge", "Request bodies held now",
                (double)atomic_load_explicit(&r->body_memory, memory_order_relaxed));
    pl_text_one(t, "perilune_queue_length", "gauge", "Requests waiting for capacity now",
                pl_queue_waiting(r->queue));
    for (size_t i = 0; i < sizeof list / sizeof *list; i++)
        pl_text_one(t, list[i].name, "counter", list[i].help, (double)over_loops(r, list[i].at));
}

/* --- policy --- */

static void hook_counters(pl_text *t, const pl_router *r, const char *name, const char *help,
                          size_t at)
{
    pl_text_family(t, name, "counter", help);
    for (int hook = 0; hook < PL_HOOK_COUNT; hook++)
        pl_text_value(t, (double)over_loops(r, at + (size_t)hook * sizeof(_Atomic uint64_t)), 1,
                      "hook", pl_hook_name(hook));
}

static void add_script_metric(void *ctx, pl_str name, double value)
{
    char text[128];
    snprintf(text, sizeof text, "%.*s", PL_FMT(name));
    pl_text_value(ctx, value, 1, "name", text);
}

static void policy(pl_text *t, pl_router *r)
{
    int suspended = 0;
    uint64_t refresh_ns = 0;
    for (int i = 0; i < r->loops_n; i++) {
        const pl_policy_stats *s = &r->loops[i].policy_stats;
        uint64_t ns = atomic_load_explicit(&s->refresh_ns, memory_order_relaxed);
        suspended += atomic_load_explicit(&s->suspended, memory_order_relaxed) != 0;
        refresh_ns = ns > refresh_ns ? ns : refresh_ns;
    }
    pl_text_one(t, "perilune_policy_generation", "gauge", "Generation of the running policy",
                (double)r->generation);
    pl_text_one(t, "perilune_policy_reloads_total", "counter", "Policies swapped in",
                (double)r->policy.reloads);
    pl_text_one(t, "perilune_policy_reload_failures_total", "counter", "Policies refused",
                (double)r->policy.reload_failures);
    pl_text_one(t, "perilune_policy_suspended_loops", "gauge",
                "Loops on which the policy is suspended now", suspended);
    pl_text_one(t, "perilune_policy_suspensions_total", "counter", "Times a loop suspended it",
                (double)over_loops(r, offsetof(pl_loop, policy_stats.suspensions)));
    pl_text_one(t, "perilune_policy_fallbacks_total", "counter",
                "Decisions that the policy did not make because of an error",
                (double)over_loops(r, offsetof(pl_loop, policy_stats.fallbacks)));
    pl_text_one(t, "perilune_policy_vm_rebuilds_total", "counter", "VMs built again",
                (double)over_loops(r, offsetof(pl_loop, policy_stats.vm_rebuilds)));
    pl_text_one(t, "perilune_policy_records_refresh_seconds", "gauge",
                "Filling the records of one decision, slowest loop's last sample",
                (double)refresh_ns / 1e9);
    hook_counters(t, r, "perilune_policy_calls_total", "Calls of a hook",
                  offsetof(pl_loop, policy_stats.calls));
    hook_counters(t, r, "perilune_policy_errors_total", "Calls of a hook that failed",
                  offsetof(pl_loop, policy_stats.errors));
    hook_counters(t, r, "perilune_policy_clamped_total", "Results of a hook that were clamped",
                  offsetof(pl_loop, policy_stats.clamped));
    pl_text_family(t, "perilune_hook_seconds", "histogram", "Time in a hook");
    for (int hook = 0; hook < PL_HOOK_COUNT; hook++) {
        pl_hist h;
        hist_over_loops(r, offsetof(pl_loop, policy_stats.latency) + (size_t)hook * sizeof(pl_hist),
                        &h);
        if (atomic_load(&h.total)) /* most policies have few of the hooks */
            pl_text_hist(t, &h, PL_RANGE_CALL, "hook", pl_hook_name(hook));
    }
    pl_text_family(t, "perilune_script_metric", "gauge", "Set by the policy with pl.metric");
    pl_shared_each_metric(r->shared, add_script_metric, t);
}

/* --- engines and workers --- */

static void engine_values(pl_text *t, const pl_view *v, const char *name, const char *type,
                          const char *help, double (*get)(const pl_engine *e))
{
    pl_text_family(t, name, type, help);
    for (int i = 0; i < v->engines_n; i++)
        pl_text_value(t, get(v->engines[i]), 1, "engine", v->engines[i]->name);
}

#define ENGINE_COUNTER_MAP(XX)                                                                     \
    XX(requests, "Requests sent to the engine")                                                    \
    XX(failed, "Requests that failed at the engine")                                               \
    XX(client_errors, "Requests that the engine answered with 4xx")                                \
    XX(retries, "Requests sent to the engine after another had failed")                            \
    XX(health_checks, "Health checks")                                                             \
    XX(health_failures, "Health checks that failed")                                               \
    XX(gauge_polls, "Looks at the engine's own load")                                              \
    XX(gauge_failures, "Looks at the engine's own load that told nothing")                         \
    XX(breaker_opened, "Times the breaker opened")                                                 \
    XX(connects, "Connections opened to the engine")                                               \
    XX(reuses, "Requests sent on a pooled connection")

#define XX(field, help)                                                                            \
    static double engine_##field(const pl_engine *e)                                               \
    {                                                                                              \
        return (double)atomic_load_explicit(&e->field, memory_order_relaxed);                      \
    }
ENGINE_COUNTER_MAP(XX)
#undef XX

static double engine_up(const pl_engine *e)
{
    return atomic_load(&e->health) == PL_HEALTH_UP;
}

static double engine_draining(const pl_engine *e)
{
    return atomic_load(&e->admin) == PL_ENGINE_DRAINING;
}

static void breakers(pl_text *t, const pl_view *v)
{
    static const char *const states[] = {"closed", "open", "half_open"};
    pl_text_family(t, "perilune_engine_breaker", "gauge", "1 for the state that the breaker is in");
    for (int i = 0; i < v->engines_n; i++)
        for (int s = 0; s < 3; s++)
            pl_text_value(t, atomic_load(&v->engines[i]->breaker) == s, 2, "engine",
                          v->engines[i]->name, "state", states[s]);
}

static void engines(pl_text *t, const pl_view *v)
{
    pl_text_one(t, "perilune_engines", "gauge", "Engines configured", v->engines_n);
    pl_text_family(t, "perilune_engine_info", "gauge", "1 for each engine, with its url and kind");
    for (int i = 0; i < v->engines_n; i++) {
        const pl_engine *e = v->engines[i];
        pl_text_value(t, 1, 3, "engine", e->name, "url", e->url, "kind",
                      pl_engine_kind_name((pl_engine_kind)atomic_load(&e->kind)));
    }
    engine_values(t, v, "perilune_engine_up", "gauge", "1 while health checks succeed", engine_up);
    engine_values(t, v, "perilune_engine_draining", "gauge", "1 while it takes no new requests",
                  engine_draining);
    breakers(t, v);
#define XX(field, help)                                                                            \
    engine_values(t, v, "perilune_engine_" #field "_total", "counter", help, engine_##field);
    ENGINE_COUNTER_MAP(XX)
#undef XX
}

#define WORKER_MAP(XX)                                                                             \
    XX(inflight, "inflight", "gauge", "Requests sent to the worker and not ended")                 \
    XX(streams, "streams", "gauge", "Of those in flight, streams")                                 \
    XX(queued_prefill_tokens, "queued_prefill_tokens", "gauge",                                    \
       "Prompt tokens sent to the worker without a first token yet")                               \
    XX(requests, "requests_total", "counter", "Requests sent to the worker")                       \
    XX(decode_blocks, "decode_blocks", "gauge",                                                    \
       "KV blocks of the requests under way: prompt and generated")                                \
    XX(sessions, "sessions", "gauge", "Engine-backed sessions opened on the worker")               \
    XX(session_tokens, "session_tokens", "gauge", "Tokens that they hold, as last reported")       \
    XX(prefill_tokens_per_second, "prefill_tokens_per_second", "gauge",                            \
       "Prefill rate, moving average; 0 until measured")                                           \
    XX(ttft_seconds, "ttft_average_seconds", "gauge",                                              \
       "Time to first token, moving average; 0 until measured")

/* What the engines say of themselves: -1 in each of these means that nothing is known. */
static double worker_running(const pl_worker_state *w)
{
    return atomic_load_explicit(&w->running_requests, memory_order_relaxed);
}

static double worker_waiting(const pl_worker_state *w)
{
    return atomic_load_explicit(&w->waiting_requests, memory_order_relaxed);
}

static double worker_kv_usage(const pl_worker_state *w)
{
    return atomic_load_explicit(&w->kv_usage, memory_order_relaxed);
}

static double worker_gauges_age(const pl_worker_state *w)
{
    uint64_t at = atomic_load_explicit(&w->gauges_at_ns, memory_order_relaxed), now = pl_now_ns();
    if (!at)
        return -1;
    return now > at ? (double)(now - at) / 1e9 : 0;
}

static double worker_block_tokens(const pl_worker_state *w)
{
    int32_t n = atomic_load_explicit(&w->block_tokens, memory_order_relaxed);
    return n > 0 ? n : -1;
}

static double worker_kv_tokens(const pl_worker_state *w)
{
    int64_t n = atomic_load_explicit(&w->kv_tokens, memory_order_relaxed);
    return n > 0 ? (double)n : -1;
}

/* A worker of which a thing is not known has no sample of it. */
static void told_by_engines(pl_text *t, const pl_view *v)
{
    static const struct {
        const char *name, *help;
        double (*get)(const pl_worker_state *w);
    } list[] = {
        {"perilune_worker_running_requests", "Requests running, as the engine says",
         worker_running},
        {"perilune_worker_waiting_requests", "Requests waiting, as the engine says",
         worker_waiting},
        {"perilune_worker_kv_usage", "Share of the KV cache in use, as the engine says",
         worker_kv_usage},
        {"perilune_worker_gauges_age_seconds", "Since the engine was asked for these",
         worker_gauges_age},
        {"perilune_worker_block_tokens", "Tokens in a KV block", worker_block_tokens},
        {"perilune_worker_kv_tokens", "Capacity of the KV cache", worker_kv_tokens},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        pl_text_family(t, list[i].name, "gauge", list[i].help);
        for (int k = 0; k < v->workers_n; k++) {
            double value = list[i].get(v->workers[k]);
            if (value >= 0)
                pl_text_value(t, value, 1, "worker", v->workers[k]->name);
        }
    }
}

static void workers(pl_text *t, const pl_view *v)
{
#define XX(field, suffix, type, help)                                                              \
    pl_text_family(t, "perilune_worker_" suffix, type, help);                                      \
    for (int i = 0; i < v->workers_n; i++)                                                         \
        pl_text_value(t,                                                                           \
                      (double)atomic_load_explicit(&v->workers[i]->field, memory_order_relaxed),   \
                      1, "worker", v->workers[i]->name);
    WORKER_MAP(XX)
#undef XX
}

void pl_router_render_metrics(pl_router *r, pl_buf *out)
{
    pl_text t = {.out = out, .start = out->n};
    pl_text_family(&t, "perilune_build_info", "gauge", "1, with the version");
    pl_text_value(&t, 1, 1, "version", PERILUNE_VERSION);
    counters(&t, r);
    latencies(&t, r);
    servers(&t, r);
    pl_metrics_sessions(&t, r);
    policy(&t, r);
    pl_view *v = pl_fleet_view(r->fleet);
    if (v) {
        engines(&t, v);
        workers(&t, v);
        told_by_engines(&t, v);
        pl_metrics_kv(&t, r, v);
        pl_view_unref(v);
    }
    pl_text_process(&t);
    if (t.err != 0)
        out->n = t.start; /* half a page would look like counters that went away */
}
