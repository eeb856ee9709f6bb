/* The admin API's policy: what runs, how its hooks do, and the reload. On the control loop. */
#include "admin/admin_api.h"

#include <stdlib.h>
#include <string.h>

static json_t *hook_names(uint32_t hooks)
{
    json_t *list = json_array();
    for (int i = 0; list && i < PL_HOOK_COUNT; i++)
        if (hooks & (1u << i))
            json_array_append_new(list, json_string(pl_hook_name(i)));
    return list;
}

static json_t *error_json(const pl_vm_error *e)
{
    json_t *j = json_pack("{s:s, s:o, s:s}", "code", "policy_refused", "message",
                          pl_admin_text(e->message), "stage", e->stage);
    if (j && e->file[0])
        json_object_set_new(j, "file", pl_admin_text(e->file));
    if (j && e->line)
        json_object_set_new(j, "line", json_integer(e->line));
    return j;
}

/* --- GET /policy --- */

static json_t *hook_stats(const pl_router *r, int hook)
{
    pl_hist h = {0};
    uint64_t calls = 0, errors = 0, clamped = 0;
    for (int i = 0; i < r->loops_n; i++) {
        const pl_policy_stats *s = &r->loops[i].policy_stats;
        pl_hist_merge(&h, &s->latency[hook]);
        calls += atomic_load_explicit(&s->calls[hook], memory_order_relaxed);
        errors += atomic_load_explicit(&s->errors[hook], memory_order_relaxed);
        clamped += atomic_load_explicit(&s->clamped[hook], memory_order_relaxed);
    }
    return json_pack("{s:I, s:I, s:I, s:f, s:f}", "calls", (json_int_t)calls, "errors",
                     (json_int_t)errors, "clamped", (json_int_t)clamped, "p50_seconds",
                     (double)pl_hist_quantile_ns(&h, 0.5) / 1e9, "p99_seconds",
                     (double)pl_hist_quantile_ns(&h, 0.99) / 1e9);
}

void pl_admin_policy_get(pl_admin *a, pl_exchange *x, pl_str name)
{
    const pl_router *r = a->router;
    const pl_policy_info *p = &r->policy;
    json_t *stats = json_object();
    int suspended = 0;
    for (int i = 0; stats && i < PL_HOOK_COUNT; i++)
        if (p->hooks & (1u << i))
            json_object_set_new(stats, pl_hook_name(i), hook_stats(r, i));
    for (int i = 0; i < r->loops_n; i++)
        suspended += atomic_load(&r->loops[i].policy_stats.suspended) != 0;
    pl_admin_json(x, 200,
                  json_pack("{s:o, s:o, s:s, s:I, s:o, s:O, s:f, s:b, s:i, s:I, s:I, s:o, s:o}",
                            "name", pl_admin_text(p->name), "file", pl_admin_text(p->file),
                            "sha256", p->sha256, "generation", (json_int_t)r->generation, "hooks",
                            hook_names(p->hooks), "params", r->config.policy_params, "loaded_at",
                            p->loaded_at, "suspended", suspended > 0, "suspended_loops", suspended,
                            "reloads", (json_int_t)p->reloads, "reload_failures",
                            (json_int_t)p->reload_failures, "stats", stats, "last_error",
                            p->last_error.message[0] ? error_json(&p->last_error) : json_null()));
}

/* --- POST /policy/reload --- */

static void on_reloaded(void *ctx, const pl_reload_result *res)
{
    pl_exchange *x = pl_admin_wait_end(ctx);
    if (!x)
        return;
    if (res->ok)
        pl_admin_json(x, 200,
                      json_pack("{s:I, s:s, s:o, s:o}", "generation", (json_int_t)res->generation,
                                "sha256", res->sha256, "hooks", hook_names(res->hooks), "name",
                                pl_admin_text(res->name)));
    else
        pl_admin_json(x, 422, json_pack("{s:o}", "error", error_json(&res->error)));
}

/* Another policy without params of its own starts with its defaults: those that run belong to the
 * one that runs. */
static bool is_running(const pl_router *r, pl_str policy)
{
    pl_str file = pl_str_c(r->policy.file), builtin = PL_STR("builtin:");
    if (pl_str_starts(file, builtin))
        file = (pl_str){file.p + builtin.n, file.n - builtin.n};
    if (policy.n == 0 || pl_str_eq(policy, file))
        return true;
    char *given = realpath(policy.p, NULL), *running = realpath(file.p, NULL);
    bool same = given && running && strcmp(given, running) == 0;
    free(given);
    free(running);
    return same;
}

void pl_admin_policy_reload(pl_admin *a, pl_exchange *x, pl_str name)
{
    pl_router *r = a->router;
    json_t *body = pl_admin_body(x);
    const char *key;
    json_t *value, *policy = NULL, *params = NULL;
    if (!body)
        return;
    json_object_foreach(body, key, value)
    {
        if (strcmp(key, "policy") == 0 && json_is_string(value)) {
            policy = value;
        } else if (strcmp(key, "params") == 0 && json_is_object(value)) {
            params = value;
        } else {
            pl_admin_error(x, 400, "invalid_body",
                           "'%.64s': the body may have policy (text) and params (object)", key);
            json_decref(body);
            return;
        }
    }
    pl_str wanted = {json_string_value(policy), json_string_length(policy)};
    json_t *defaults = !params && !is_running(r, wanted) ? json_object() : NULL;
    pl_admin_wait *w = pl_admin_wait_begin(x, NULL);
    int rc =
        w ? pl_router_reload(r, wanted, params ? params : defaults, on_reloaded, w) : PL_ENOMEM;
    if (rc != 0) {
        if (w)
            pl_admin_wait_end(w);
        if (rc == PL_EBUSY)
            pl_admin_error(x, 409, "busy", "a reload is under way");
        else
            pl_admin_error(x, 503, "unavailable", "%s", pl_strerror(rc));
    }
    json_decref(defaults);
    json_decref(body);
}
