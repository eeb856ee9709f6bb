/* What the simulated engine answers besides inference: health, models, server information, load,
 * metrics, tokenising, cache and abort control. Called by front.c on the front's thread. The names
 * are those of SGLang or vLLM, as the kind says; a path that only the other one has is unknown. */
#include "engine/front_call.h"

#include <string.h>

#include "base/clock.h"
#include "base/err.h"

static int64_t context_len(const pl_front *f)
{
    return f->o->sim.pool_tokens - f->o->sim.pool_tokens % f->o->sim.page_tokens;
}

static pl_sim_stats stats(const pl_front *f, int rank)
{
    pl_sim_stats st;
    pl_sim_stats_of(f->rank[rank].sim, &st);
    return st;
}

static double share(double part, double whole)
{
    return whole > 0 ? part / whole : 0;
}

static void empty(pl_exchange *x)
{
    pl_exchange_respond(x, 200, NULL, 0, (pl_str){NULL, 0});
}

static void health(pl_front *f, pl_exchange *x)
{
    switch (f->fault[PL_FAULT_REQUESTS].health ? pl_fault_draw(f, PL_FAULT_REQUESTS)
                                               : PL_FAULT_NONE) {
    case PL_FAULT_HANG:
        return; /* until the client leaves */
    case PL_FAULT_REFUSE:
    case PL_FAULT_RESET:
        pl_exchange_abort(x);
        return;
    case PL_FAULT_500:
        pl_front_error(f, x, 500, "Internal server error (a fault on demand)");
        return;
    default:
        empty(x);
    }
}

static void models(pl_front *f, pl_exchange *x)
{
    json_t *data = json_array();
    json_int_t created = (json_int_t)pl_wall_seconds();
    for (int i = 0; i < f->o->models_n; i++)
        json_array_append_new(
            data, json_pack("{s:o,s:s,s:I,s:s,s:o,s:n,s:I}", "id", pl_front_string(f->o->models[i]),
                            "object", "model", "created", created, "owned_by",
                            f->vllm ? "vllm" : "sglang", "root", pl_front_string(f->o->models[i]),
                            "parent", "max_model_len", (json_int_t)context_len(f)));
    pl_front_send(x, 200, json_pack("{s:s,s:o}", "object", "list", "data", data));
}

static void server_info(pl_front *f, pl_exchange *x)
{
    static const char *const eviction[] = {"lru", "lfu", "slru", "priority"};
    json_t *info = json_pack(
        "{s:o,s:o,s:i,s:i,s:i,s:s,s:I,s:I,s:i,s:i,s:i,s:s,s:o,s:n}", "model_path",
        pl_front_string(f->o->models[0]), "served_model_name", pl_front_string(f->o->models[0]),
        "tp_size", 1, "dp_size", f->ranks_n, "pp_size", 1, "disaggregation_mode", "null",
        "context_length", (json_int_t)context_len(f), "max_total_num_tokens",
        (json_int_t)context_len(f), "max_running_requests", f->o->sim.max_running,
        "chunked_prefill_size", f->o->sim.max_batch_tokens, "page_size", f->o->sim.page_tokens,
        "version", "0.1.0+sim", "kv_events", pl_front_kv_info(f), "speculative_algorithm");
    json_t *more = json_pack("{s:b,s:b,s:b,s:s,s:{s:b}}", "enable_streaming_session",
                             f->o->streaming_sessions, "enable_session_radix_cache", 0,
                             "enable_priority_scheduling", 1, "radix_eviction_policy",
                             eviction[f->o->sim.eviction], "perilune_engine", "retention", 1);
    int rc = json_object_update(info, more); /* -1 when either is NULL */
    json_decref(more);
    if (rc != 0) {
        json_decref(info);
        info = NULL;
    }
    pl_front_send(x, 200, info);
}

static void model_info(pl_front *f, pl_exchange *x)
{
    pl_front_send(x, 200,
                  json_pack("{s:o,s:o,s:b,s:b,s:b,s:s}", "model_path",
                            pl_front_string(f->o->models[0]), "tokenizer_path",
                            pl_front_string(f->o->models[0]), "is_generation", 1,
                            "has_image_understanding", 0, "has_audio_understanding", 0,
                            "model_type", "simulated"));
}

static void get_load(pl_front *f, pl_exchange *x)
{
    json_t *list = json_array();
    for (int r = 0; r < f->ranks_n; r++) {
        pl_sim_stats st = stats(f, r);
        json_array_append_new(list, json_pack("{s:i,s:i,s:i,s:I}", "dp_rank", r, "num_reqs",
                                              st.running + st.waiting, "num_waiting_reqs",
                                              st.waiting, "num_tokens",
                                              (json_int_t)(st.used_tokens + st.waiting_tokens)));
    }
    pl_front_send(x, 200, list);
}

static json_t *load_of(const pl_front *f, int r)
{
    pl_sim_stats st = stats(f, r);
    return json_pack(
        "{s:i,s:i,s:i,s:I,s:i,s:I,s:I,s:f,s:f,s:f,s:i}", "dp_rank", r, "num_running_reqs",
        st.running, "num_waiting_reqs", st.waiting, "num_waiting_uncached_tokens",
        (json_int_t)st.waiting_tokens, "num_total_reqs", st.running + st.waiting, "num_used_tokens",
        (json_int_t)st.used_tokens, "max_total_num_tokens", (json_int_t)st.pool_tokens,
        "token_usage", share((double)st.used_tokens, (double)st.pool_tokens), "cache_hit_rate",
        share((double)st.cached_tokens, (double)st.prompt_tokens), "utilization",
        share(st.running, f->o->sim.max_running), "max_running_requests", f->o->sim.max_running);
}

static void loads(pl_front *f, pl_exchange *x)
{
    json_t *list = json_array();
    for (int r = 0; r < f->ranks_n; r++)
        json_array_append_new(list, load_of(f, r));
    pl_front_send(x, 200,
                  json_pack("{s:f,s:s,s:s,s:i,s:o}", "timestamp", pl_wall_seconds(), "version",
                            "0.1.0+sim", "accelerator", f->o->sim.timing.name, "num_accelerators",
                            f->ranks_n, "loads", list));
}

/* --- metrics --- */

static int histogram(pl_buf *out, const char *prefix, const char *name, const char *labels,
                     const pl_hist *h)
{
    int rc = pl_buf_addf(out, "# HELP %s%s Simulated engine.\n# TYPE %s%s histogram\n", prefix,
                         name, prefix, name);
    uint64_t sofar = 0;
    for (int i = 0; i < PL_HIST_BUCKETS && rc == 0; i++) {
        sofar += atomic_load_explicit(&h->count[i], memory_order_relaxed);
        if (i + 1 < PL_HIST_BUCKETS)
            rc = pl_buf_addf(out, "%s%s_bucket{%s,le=\"%.9g\"} %llu\n", prefix, name, labels,
                             (double)pl_hist_bound_ns(i) * 1e-9, (unsigned long long)sofar);
    }
    if (rc != 0)
        return rc;
    return pl_buf_addf(out,
                       "%s%s_bucket{%s,le=\"+Inf\"} %llu\n%s%s_sum{%s} %.9g\n%s%s_count{%s} %llu\n",
                       prefix, name, labels, (unsigned long long)sofar, prefix, name, labels,
                       (double)atomic_load_explicit(&h->sum_ns, memory_order_relaxed) * 1e-9,
                       prefix, name, labels, (unsigned long long)sofar);
}

typedef struct named {
    const char *name, *type;
    double value;
} named;

enum { FIGURES_MAX = 24 };

/* All figures of a rank; returns how many. */
static size_t figures(const pl_front *f, int rank, named out[FIGURES_MAX])
{
    pl_sim_stats st = stats(f, rank);
    double usage = share((double)st.used_tokens, (double)st.pool_tokens);
    double pages = (double)st.pool_tokens / f->o->sim.page_tokens;
    const named sglang[] = {
        {"num_running_reqs", "gauge", st.running},
        {"num_queue_reqs", "gauge", st.waiting},
        {"token_usage", "gauge", usage},
        {"num_used_tokens", "gauge", (double)st.used_tokens},
        {"max_total_num_tokens", "gauge", (double)st.pool_tokens},
        {"kv_available_tokens", "gauge", (double)st.available_tokens},
        {"kv_evictable_tokens", "gauge", (double)st.evictable_tokens},
        {"kv_used_tokens", "gauge", (double)st.used_tokens},
        {"kv_physical_usage", "gauge",
         share((double)(st.pool_tokens - st.available_tokens), (double)st.pool_tokens)},
        {"num_streaming_sessions", "gauge", st.streaming_sessions},
        {"streaming_session_held_tokens", "gauge", (double)st.held_tokens},
        {"cache_hit_rate", "gauge", share((double)st.cached_tokens, (double)st.prompt_tokens)},
        {"page_size", "gauge", f->o->sim.page_tokens},
        {"num_pages", "gauge", pages},
        {"context_len", "gauge", (double)st.pool_tokens},
        {"num_retracted_requests_total", "counter", (double)st.preempted},
        {"evicted_tokens_total", "counter", (double)st.evicted_tokens},
        {"prompt_tokens_total", "counter", (double)st.prompt_tokens},
        {"cached_tokens_total", "counter", (double)st.cached_tokens},
        {"generation_tokens_total", "counter", (double)st.output_tokens},
        {"num_requests_total", "counter", (double)st.requests},
        {"num_aborted_requests_total", "counter", (double)st.aborted},
    };
    const named vllm[] = {
        {"num_requests_running", "gauge", st.running},
        {"num_requests_waiting", "gauge", st.waiting},
        {"kv_cache_usage_perc", "gauge", usage},
        {"prefix_cache_queries_total", "counter", (double)st.prompt_tokens},
        {"prefix_cache_hits_total", "counter", (double)st.cached_tokens},
        {"num_preemptions_total", "counter", (double)st.preempted},
        {"prompt_tokens_total", "counter", (double)st.prompt_tokens},
        {"prompt_tokens_cached_total", "counter", (double)st.cached_tokens},
        {"generation_tokens_total", "counter", (double)st.output_tokens},
    };
    _Static_assert(sizeof sglang <= FIGURES_MAX * sizeof *out, "room for all of them");
    size_t n = f->vllm ? sizeof vllm / sizeof *vllm : sizeof sglang / sizeof *sglang;
    memcpy(out, f->vllm ? vllm : sglang, n * sizeof *out);
    return n;
}

/* One figure of every rank. */
static int metric(pl_buf *out, const pl_front *f, const char *model, size_t i)
{
    const char *prefix = f->vllm ? "vllm:" : "sglang_", *label = f->vllm ? "engine" : "dp_rank";
    named v[FIGURES_MAX];
    int rc = 0;
    for (int r = 0; r < f->ranks_n && rc == 0; r++) {
        figures(f, r, v);
        if (r == 0)
            rc = pl_buf_addf(out, "# HELP %s%s Simulated engine.\n# TYPE %s%s %s\n", prefix,
                             v[i].name, prefix, v[i].name, v[i].type);
        if (rc == 0)
            rc = pl_buf_addf(out, "%s%s{model_name=%s,%s=\"%d\"} %.17g\n", prefix, v[i].name, model,
                             label, r, v[i].value);
    }
    return rc;
}

static void metrics(pl_front *f, pl_exchange *x)
{
    const char *prefix = f->vllm ? "vllm:" : "sglang_";
    pl_str model = pl_front_quote(&x->arena, f->o->models[0]);
    /* of what is not told apart by rank */
    pl_str labels = pl_arena_printf(&x->arena, "model_name=%.*s%s", PL_FMT(model),
                                    f->ranks_n > 1 ? ""
                                    : f->vllm      ? ",engine=\"0\""
                                                   : ",dp_rank=\"0\"");
    named first[FIGURES_MAX];
    size_t n = figures(f, 0, first);
    pl_sim_stats st;
    pl_front_stats(f, &st);
    pl_buf *out = &f->out;
    out->n = 0;
    int rc = model.p && labels.p ? 0 : PL_ENOMEM;
    for (size_t i = 0; i < n && rc == 0; i++)
        rc = metric(out, f, model.p, i);
    if (rc == 0 && f->vllm)
        rc = pl_buf_addf(out,
                         "# HELP vllm:cache_config_info Simulated engine.\n"
                         "# TYPE vllm:cache_config_info gauge\n"
                         "vllm:cache_config_info{block_size=\"%d\",num_gpu_blocks=\"%.0f\","
                         "engine=\"0\"} 1\n"
                         "# HELP vllm:request_success_total Simulated engine.\n"
                         "# TYPE vllm:request_success_total counter\n"
                         "vllm:request_success_total{%s,finished_reason=\"length\"} %llu\n",
                         f->o->sim.page_tokens, (double)context_len(f) / f->o->sim.page_tokens,
                         labels.p, (unsigned long long)st.finished);
    if (rc == 0)
        rc = histogram(out, prefix, "time_to_first_token_seconds", labels.p, &f->ttft);
    if (rc == 0)
        rc = histogram(out, prefix, "e2e_request_latency_seconds", labels.p, &f->e2e);
    if (rc != 0) {
        pl_front_error(f, x, 500, "%s", pl_strerror(rc));
        return;
    }
    pl_header type = {PL_STR("content-type"), PL_STR("text/plain; version=0.0.4; charset=utf-8")};
    pl_exchange_respond(x, 200, &type, 1, pl_buf_str(out));
}

/* --- tokens --- */

static json_t *load_body(pl_front *f, pl_exchange *x)
{
    json_t *body = json_loadb(x->body.p ? x->body.p : "", x->body.n, 0, NULL);
    if (json_is_object(body))
        return body;
    json_decref(body);
    pl_front_error(f, x, 400, "The body is not a JSON object");
    return NULL;
}

static void tokenize(pl_front *f, pl_exchange *x)
{
    json_t *body = load_body(f, x);
    if (!body)
        return;
    pl_errbuf eb;
    int rc = pl_front_tokenize(f, body, &eb);
    json_decref(body);
    if (rc != 0) {
        pl_front_error(f, x, rc == PL_ENOMEM ? 500 : 400, "%s", eb.text);
        return;
    }
    json_t *tokens = json_array();
    for (int i = 0; i < f->scratch.n; i++)
        json_array_append_new(tokens, json_integer(f->scratch.v[i]));
    pl_front_send(x, 200,
                  json_pack("{s:i,s:I,s:o}", "count", f->scratch.n, "max_model_len",
                            (json_int_t)context_len(f), "tokens", tokens));
}

static void detokenize(pl_front *f, pl_exchange *x)
{
    json_t *body = load_body(f, x);
    if (!body)
        return;
    const json_t *list = json_object_get(body, "tokens");
    int rc = json_is_array(list) ? 0 : PL_EINVALID;
    size_t i;
    json_t *v;
    f->scratch.n = 0;
    json_array_foreach(list, i, v)
    {
        json_int_t id = json_is_integer(v) ? json_integer_value(v) : -1;
        if (rc == 0)
            rc = id < 0 || id > UINT32_MAX ? PL_EINVALID : pl_tokens_add(&f->scratch, (uint32_t)id);
    }
    json_decref(body);
    f->out.n = 0;
    if (rc == 0)
        rc = pl_tokens_to_text(f->scratch.v, f->scratch.n, &f->out);
    if (rc != 0) {
        pl_front_error(f, x, rc == PL_EINVALID ? 400 : 500, "%s",
                       rc == PL_EINVALID ? "tokens must be a list of token ids" : pl_strerror(rc));
        return;
    }
    pl_front_send(
        x, 200,
        json_pack("{s:o}", f->vllm ? "prompt" : "text", pl_front_string(pl_buf_str(&f->out))));
}

/* --- control --- */

static void version(pl_front *f, pl_exchange *x)
{
    pl_front_send(x, 200, json_pack("{s:s}", "version", "0.1.0+sim"));
}

static void load(pl_front *f, pl_exchange *x)
{
    pl_front_send(x, 200, json_pack("{s:i}", "server_load", f->calls_n));
}

static void flush_cache(pl_front *f, pl_exchange *x)
{
    pl_sim_stats st;
    pl_front_stats(f, &st);
    if (!f->vllm && st.running + st.waiting > 0) {
        pl_front_error(f, x, 400, "The cache is not flushed while requests run or wait");
        return;
    }
    for (int r = 0; r < f->ranks_n; r++)
        pl_sim_flush_cache(f->rank[r].sim);
    pl_header type = {PL_STR("content-type"), PL_STR("text/plain; charset=utf-8")};
    pl_exchange_respond(x, 200, &type, 1, PL_STR("Cache flushed.\n"));
}

/* {"rid", "abort_all"}: as SGLang does, a rid stands for all that begin with it. */
static void abort_request(pl_front *f, pl_exchange *x)
{
    json_t *body = load_body(f, x);
    if (!body)
        return;
    const json_t *rid = json_object_get(body, "rid");
    bool all = json_is_true(json_object_get(body, "abort_all"));
    pl_str prefix = {json_string_value(rid), json_string_length(rid)};
    for (pl_front_call *c = f->calls, *next; c; c = next) {
        next = c->next;
        if (all ||
            (prefix.n && (pl_str_starts(c->id, prefix) || pl_str_starts(c->request_id, prefix))))
            pl_front_call_abort(c);
    }
    json_decref(body);
    empty(x);
}

static void requests(pl_front *f, pl_exchange *x)
{
    pl_front_send(x, 200, pl_front_requests(f));
}

enum { SGLANG = 1, VLLM = 2, BOTH = 3, GET = 4, POST = 8 };

static const struct {
    const char *path;
    int flags;
    void (*answer)(pl_front *f, pl_exchange *x);
} table[] = {
    {"/health", BOTH | GET, health},
    {"/ping", BOTH | GET | POST, health},
    {"/v1/models", BOTH | GET, models},
    {"/metrics", BOTH | GET, metrics},
    {"/version", BOTH | GET, version},
    {"/load", VLLM | GET, load},
    {"/server_info", SGLANG | GET, server_info},
    {"/get_server_info", SGLANG | GET, server_info},
    {"/model_info", SGLANG | GET, model_info},
    {"/get_model_info", SGLANG | GET, model_info},
    {"/get_load", SGLANG | GET, get_load},
    {"/v1/loads", SGLANG | GET, loads},
    {"/flush_cache", SGLANG | GET | POST, flush_cache},
    {"/reset_prefix_cache", VLLM | POST, flush_cache},
    {"/abort_request", SGLANG | POST, abort_request},
    {"/open_session", SGLANG | GET | POST, pl_front_open_session},
    {"/close_session", SGLANG | GET | POST, pl_front_close_session},
    {"/sim/sessions", SGLANG | GET, pl_front_sessions},
    {"/tokenize", BOTH | POST, tokenize},
    {"/v1/tokenize", BOTH | POST, tokenize},
    {"/detokenize", BOTH | POST, detokenize},
    {"/v1/detokenize", BOTH | POST, detokenize},
    {"/sim/fault", BOTH | GET | POST, pl_fault_control},
    {"/sim/requests", BOTH | GET, requests},
    {"/sim/kv", BOTH | GET | POST, pl_front_kv_control},
};

bool pl_front_admin(pl_front *f, pl_exchange *x)
{
    pl_method m = x->head.method;
    int how = m == PL_GET || m == PL_HEAD ? GET : m == PL_POST ? POST : 0;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        if (!(table[i].flags & (f->vllm ? VLLM : SGLANG)) ||
            !pl_str_eq(x->head.path, pl_str_c(table[i].path)))
            continue;
        if (table[i].flags & how)
            table[i].answer(f, x);
        else
            pl_front_send(x, 405, json_pack("{s:s}", "detail", "Method Not Allowed"));
        return true;
    }
    return false;
}
