/* The admin API's engines: list, add, drain, remove. On the control loop; engines are referenced
 * while they are looked at. */
#include "admin/admin_api.h"

#include <string.h>

#include "base/clock.h"

/* 0 says "no cap" in the records and in the configuration; null says it here. */
static json_t *cap(int64_t value)
{
    return value ? json_integer(value) : json_null();
}

static json_t *count(const _Atomic uint64_t *c)
{
    return json_integer((json_int_t)atomic_load_explicit(c, memory_order_relaxed));
}

static json_t *if_known(double v)
{
    return v >= 0 ? json_real(v) : json_null();
}

static json_t *if_positive(int64_t v)
{
    return v > 0 ? json_integer(v) : json_null();
}

/* What the engine says of itself; null what is not known. */
static void add_gauges(json_t *to, const pl_worker_state *w)
{
    uint64_t at = atomic_load(&w->gauges_at_ns), now = pl_now_ns();
    double age = now > at ? (double)(now - at) / 1e9 : 0;
    json_object_set_new(to, "running_requests", if_known(atomic_load(&w->running_requests)));
    json_object_set_new(to, "waiting_requests", if_known(atomic_load(&w->waiting_requests)));
    json_object_set_new(to, "kv_usage", if_known(atomic_load(&w->kv_usage)));
    json_object_set_new(to, "gauges_age_seconds", if_known(at ? age : -1));
    json_object_set_new(to, "block_tokens", if_positive(atomic_load(&w->block_tokens)));
    json_object_set_new(to, "kv_tokens", if_positive(atomic_load(&w->kv_tokens)));
}

static json_t *worker_json(const pl_worker_state *w)
{
    json_t *j = json_pack(
        "{s:s, s:i, s:i, s:i, s:i, s:i, s:I, s:I, s:i, s:I, s:o, s:f, s:f}", "name", w->name,
        "rank", w->rank, "slot", w->slot, "generation", w->generation, "inflight",
        (int)atomic_load(&w->inflight), "streams", (int)atomic_load(&w->streams),
        "queued_prefill_tokens", (json_int_t)atomic_load(&w->queued_prefill_tokens),
        "decode_blocks", (json_int_t)atomic_load(&w->decode_blocks), "sessions",
        (int)atomic_load(&w->sessions), "session_tokens",
        (json_int_t)atomic_load(&w->session_tokens), "requests", count(&w->requests),
        "prefill_tokens_per_second", atomic_load(&w->prefill_tokens_per_second), "ttft_seconds",
        atomic_load(&w->ttft_seconds));
    if (j)
        add_gauges(j, w);
    return j;
}

static json_t *counters_json(const pl_engine *e)
{
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "requests",
                     count(&e->requests), "failed", count(&e->failed), "client_errors",
                     count(&e->client_errors), "retries", count(&e->retries), "health_checks",
                     count(&e->health_checks), "health_failures", count(&e->health_failures),
                     "breaker_opened", count(&e->breaker_opened), "connects", count(&e->connects),
                     "reuses", count(&e->reuses), "gauge_polls", count(&e->gauge_polls),
                     "gauge_failures", count(&e->gauge_failures));
}

static json_t *models_json(pl_admin *a, pl_exchange *x, const pl_engine *e)
{
    json_t *list = json_array();
    pl_str *ids = NULL;
    int n = pl_fleet_models(a->router->fleet, e, &x->arena, &ids);
    for (int i = 0; list && i < n; i++)
        json_array_append_new(list, json_stringn(ids[i].p, ids[i].n));
    return list;
}

static json_t *engine_json(pl_admin *a, pl_exchange *x, pl_engine *e)
{
    static const char *const caps[] = {"sessions", "streaming_sessions", "session_tag", "retention",
                                       "priority"};
    json_t *can = json_array();
    for (int i = 0; can && i < (int)(sizeof caps / sizeof *caps); i++)
        if (atomic_load(&e->caps) & 1u << i)
            json_array_append_new(can, json_string(caps[i]));
    static const char *const breakers[] = {"closed", "open", "half_open"};
    json_t *workers = json_array();
    for (int i = 0; workers && i < e->workers_n; i++)
        json_array_append_new(workers, worker_json(&e->workers[i]));
    return json_pack(
        "{s:s, s:s, s:s, s:s, s:s, s:s, s:b, s:o, s:o, s:f, s:o, s:o, s:o, s:o}", "name", e->name,
        "url", e->url, "kind", pl_engine_kind_name((pl_engine_kind)atomic_load(&e->kind)), "health",
        pl_health_name((pl_health)atomic_load(&e->health)), "state",
        pl_admin_state_name((pl_admin_state)atomic_load(&e->admin)), "breaker",
        breakers[atomic_load(&e->breaker)], "from_config", e->from_config, "models",
        models_json(a, x, e), "capabilities", can, "weight", e->weight, "max_inflight",
        cap(e->max_inflight), "max_queued_prefill_tokens", cap(e->max_queued_prefill_tokens),
        "counters", counters_json(e), "workers", workers);
}

/* A new reference, or NULL when it has been answered. */
static pl_engine *find(pl_admin *a, pl_exchange *x, pl_str name)
{
    pl_engine *e = pl_fleet_find(a->router->fleet, name);
    if (!e)
        pl_admin_error(x, 404, "not_found", "no engine is named '%.*s'; GET /engines lists them",
                       PL_FMT(name));
    return e;
}

void pl_admin_engines_list(pl_admin *a, pl_exchange *x, pl_str name)
{
    json_t *list = json_array();
    pl_view *v = pl_fleet_view(a->router->fleet);
    for (int i = 0; v && i < v->engines_n; i++)
        json_array_append_new(list, engine_json(a, x, v->engines[i]));
    pl_view_unref(v);
    pl_admin_json(x, 200, json_pack("{s:o}", "engines", list));
}

void pl_admin_engine_get(pl_admin *a, pl_exchange *x, pl_str name)
{
    pl_engine *e = find(a, x, name);
    if (!e)
        return;
    pl_admin_json(x, 200, engine_json(a, x, e));
    pl_engine_unref(e);
}

void pl_admin_engines_add(pl_admin *a, pl_exchange *x, pl_str name)
{
    pl_errbuf eb = {""};
    pl_engine_spec spec;
    json_t *body = pl_admin_body(x);
    if (!body)
        return;
    if (json_object_get(body, "api_key_file")) { /* else the API would send files of ours about */
        json_decref(body);
        pl_admin_error(x, 400, "invalid_engine",
                       "api_key_file is for the configuration file: send api_key");
        return;
    }
    int rc = pl_config_engine(&x->arena, "body", "", body, &spec, &eb);
    if (rc == 0)
        rc = pl_router_add_engine(a->router, &spec, &eb);
    json_decref(body);
    if (rc == PL_EEXISTS) {
        pl_admin_error(x, 409, "exists", "%s", eb.text);
    } else if (rc == PL_ENOMEM) {
        pl_admin_json(x, 503, NULL);
    } else if (rc != 0) {
        pl_admin_error(x, 400, "invalid_engine", "%s", eb.text[0] ? eb.text : pl_strerror(rc));
    } else {
        pl_engine *e = find(a, x, spec.name);
        if (e)
            pl_admin_json(x, 201, engine_json(a, x, e));
        pl_engine_unref(e);
    }
}

static void set_draining(pl_admin *a, pl_exchange *x, pl_str name, bool draining)
{
    pl_engine *e = find(a, x, name);
    if (!e)
        return;
    int rc = pl_fleet_drain(a->router->fleet, e, draining);
    if (rc != 0) {
        pl_admin_error(x, 409, "conflict", "%s", pl_strerror(rc));
    } else {
        pl_log(PL_LOG_INFO, draining ? "engine_draining" : "engine_active", "%s", e->name);
        pl_admin_json(x, 200, engine_json(a, x, e));
    }
    pl_engine_unref(e);
}

void pl_admin_engine_drain(pl_admin *a, pl_exchange *x, pl_str name)
{
    set_draining(a, x, name, true);
}

void pl_admin_engine_undrain(pl_admin *a, pl_exchange *x, pl_str name)
{
    set_draining(a, x, name, false);
}

/* --- removal: answered when the engine is out --- */

static void on_removed(void *ctx, int cut)
{
    pl_admin_wait *w = ctx;
    pl_engine *e = w->data;
    pl_exchange *x = pl_admin_wait_end(w);
    if (x)
        pl_admin_json(x, 200, json_pack("{s:s, s:i}", "removed", e->name, "cut", cut));
    pl_engine_unref(e);
}

/* deadline_seconds=N, or nothing. */
static bool deadline(const pl_router *r, pl_str query, uint64_t *ms)
{
    pl_str key, value = query;
    double seconds;
    *ms = r->config.remove_timeout_ms;
    if (query.n == 0)
        return true;
    if (!pl_str_cut(&value, '=', &key) || !pl_str_eq(key, PL_STR("deadline_seconds")) ||
        pl_str_double(value, &seconds) != 0 || seconds < 0 || seconds > 86400)
        return false;
    *ms = (uint64_t)(seconds * 1000);
    return true;
}

void pl_admin_engine_remove(pl_admin *a, pl_exchange *x, pl_str name)
{
    uint64_t ms;
    if (!deadline(a->router, x->head.query, &ms)) {
        pl_admin_error(x, 400, "bad_query",
                       "the only query is deadline_seconds=N with N from 0 to 86400");
        return;
    }
    pl_engine *e = find(a, x, name);
    if (!e)
        return;
    pl_admin_wait *w = pl_admin_wait_begin(x, e);
    int rc = w ? pl_router_remove_engine(a->router, e, ms, on_removed, w) : PL_ENOMEM;
    if (rc == 0)
        return; /* on_removed has both from here */
    if (w)
        pl_admin_wait_end(w);
    pl_admin_error(x, rc == PL_ENOMEM ? 503 : 409, "not_removed", "%s", pl_strerror(rc));
    pl_engine_unref(e);
}
