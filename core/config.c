/* The configuration: defaults, then the file, then flags; and what must hold between its parts.
 * Called by main.c at start, by pl_router_new for programs that embed the router, and on SIGHUP
 * (control thread). The tables of keys are in config_keys.c. Everything belongs to the config's
 * arena, but the policy's parameters, which are a JSON object. */
#include "config.h"

#include <stdlib.h>

#include "config_keys.h"
#include "policy/lua_config.h"

/* Asking more often would cost engines more than it tells. */
#define MIN_GAUGES_INTERVAL_MS 50

int pl_config_init(pl_config *c)
{
    *c = (pl_config){
        .listen = PL_STR("127.0.0.1:8000"),
        .admin_listen = PL_STR("127.0.0.1:8001"),
        .policy = PL_STR("prefix_seconds"),
        .response_headers = true,
        .metrics_public = true,
        .metrics_admin = true,
        .usage = 1,
        .queue_max = 1024,
        .queue_seconds = 30,
        .retries = 2,
        .retry_budget = 0.2,
        .drain_timeout_ms = 30000,
        .remove_timeout_ms = 30000,
        .max_connections = 10000,
        .max_body_memory = (uint64_t)1 << 30,
        .max_json_depth = 64,
        .max_id_bytes = 128,
        .log_level = PL_LOG_INFO,
        .log_json = -1,
        .vm_memory_bytes = (size_t)64 << 20,
        .wish = {.headers = pl_wish_default_headers,
                 .headers_n = pl_wish_default_headers_n,
                 .header_timeout_seconds = PL_WISH_DEFAULT_TIMEOUT_SECONDS,
                 .max_timeout_seconds = 86400},
        .max_sessions = 1000000,
        .redis = {.prefix = PL_STR("perilune:"),
                  .command_ms = 50,
                  .connect_ms = 1000,
                  .staleness_ms = 1000,
                  .known_sessions = 65536},
    };
    pl_sessions_options_default(&c->sessions);
    pl_holdings_options_default(&c->holdings);
    c->routed_ttl_ms = c->holdings.routed_ttl_ms;
    c->predicted_ttl_ms = c->holdings.predicted_ttl_ms;
    c->trust = (pl_trust_options)PL_TRUST_DEFAULTS;
    c->tokenize_ms = PL_TOKCACHE_BUDGET_MS;
    c->tokenize_bytes = (uint64_t)256 << 20;
    pl_server_options_default(&c->server);
    pl_pool_options_default(&c->pool);
    pl_health_options_default(&c->health);
    pl_gauges_options_default(&c->gauges);
    pl_decider_options_default(&c->decider);
    c->policy_params = json_object();
    c->flag_params = json_object();
    if (c->policy_params && c->flag_params)
        return 0;
    pl_config_free(c);
    return PL_ENOMEM;
}

void pl_config_free(pl_config *c)
{
    json_decref(c->policy_params);
    json_decref(c->flag_params);
    json_decref(c->file_params);
    c->policy_params = c->flag_params = c->file_params = NULL;
    pl_arena_free(&c->arena);
}

/* --- the file --- */

int pl_config_json(pl_config *c, const json_t *root, const char *origin, pl_errbuf *eb)
{
    pl_reader_ctx rd = {&c->arena, origin, eb};
    return pl_schema_read(&rd, pl_config_keys, root, "", c);
}

int pl_config_file(pl_config *c, const char *path, pl_errbuf *eb)
{
    json_t *root = NULL;
    c->file = pl_arena_str(&c->arena, pl_str_c(path));
    if (!c->file.p)
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    int rc = pl_lua_config(path, &root, eb);
    if (rc == 0)
        rc = pl_config_json(c, root, path, eb);
    json_decref(root);
    if (rc != 0)
        return rc;
    c->file_policy = c->policy;
    json_decref(c->file_params);
    c->file_params = json_deep_copy(c->policy_params);
    return c->file_params ? 0 : pl_fail(eb, PL_ENOMEM, "out of memory");
}

/* --- flags --- */

int pl_config_add_engine(pl_config *c, pl_str arg, pl_errbuf *eb)
{
    /* NAME=URL; a '=' behind the scheme belongs to the URL */
    const char *equals = arg.n ? memchr(arg.p, '=', arg.n) : NULL;
    const char *scheme = arg.n ? memmem(arg.p, arg.n, "://", 3) : NULL;
    pl_str name = {NULL, 0}, url = arg;
    if (equals && (!scheme || equals < scheme)) {
        name = (pl_str){arg.p, (size_t)(equals - arg.p)};
        url = (pl_str){equals + 1, arg.n - name.n - 1};
        if (name.n == 0)
            return pl_fail(eb, PL_EINVALID, "--engine %.*s: the name before '=' is empty",
                           PL_FMT(arg));
    }
    json_t *v = name.n ? json_pack("{s:s%, s:s%}", "name", name.p, name.n, "url", url.p, url.n)
                       : json_stringn(url.p ? url.p : "", url.n);
    if (!v)
        return pl_fail(eb, PL_EINVALID, "--engine: not valid UTF-8");
    pl_engine_spec spec;
    int rc = pl_config_engine(&c->arena, "--engine", "", v, &spec, eb);
    json_decref(v);
    spec.from_config = false; /* SIGHUP brings in what the file says; flags stay */
    return rc == 0 ? pl_config_push_engine(c, &spec, eb) : rc;
}

int pl_config_set_param(pl_config *c, pl_str arg, pl_errbuf *eb)
{
    pl_str key, value = arg;
    bool has_value = arg.n && memchr(arg.p, '=', arg.n);
    if (!has_value || !pl_str_cut(&value, '=', &key) || key.n == 0)
        return pl_fail(eb, PL_EINVALID, "--set %.*s: expected KEY=VALUE", PL_FMT(arg));
    double d;
    json_t *v;
    if (pl_str_eq(value, PL_STR("true")) || pl_str_eq(value, PL_STR("false")))
        v = json_boolean(value.p[0] == 't');
    else if (pl_str_double(value, &d) == 0)
        v = json_real(d);
    else
        v = json_stringn(value.n ? value.p : "", value.n);
    char *name = pl_str_dup(key);
    int rc = v && name && json_object_set(c->policy_params, name, v) == 0 &&
                     json_object_set(c->flag_params, name, v) == 0
                 ? 0
                 : PL_EINVALID;
    free(name);
    json_decref(v);
    return rc == 0 ? 0 : pl_fail(eb, rc, "--set %.*s: not valid UTF-8", PL_FMT(arg));
}

/* --- what belongs together --- */

static int check_addresses(const pl_config *c, pl_errbuf *eb)
{
    struct sockaddr_storage addr;
    pl_errbuf why;
    int rc = pl_parse_listen(c->listen, &addr, &why);
    if (rc != 0)
        return pl_fail(eb, rc, "listen: %s", why.text);
    if (pl_str_eq(c->admin_listen, PL_STR("off")))
        return 0;
    rc = pl_parse_listen(c->admin_listen, &addr, &why);
    if (rc != 0)
        return pl_fail(eb, rc, "admin.listen: %s", why.text);
    if (!pl_addr_is_loopback((const struct sockaddr *)&addr) && c->admin_token.n == 0)
        return pl_fail(eb, PL_EINVALID,
                       "admin.listen: %.*s can be reached from other machines, so a token is "
                       "needed: admin = { token = env(\"NAME\") } in the configuration, or "
                       "--admin-token-env NAME",
                       PL_FMT(c->admin_listen));
    return 0;
}

int pl_config_finish(pl_config *c, pl_errbuf *eb)
{
    int rc = check_addresses(c, eb);
    if (rc != 0)
        return rc;
    c->holdings.routed_ttl_ms = (uint32_t)c->routed_ttl_ms;
    c->holdings.predicted_ttl_ms = (uint32_t)c->predicted_ttl_ms;
    c->wish.filter = pl_wish_filter(c->wish.headers, c->wish.headers_n);
    for (int i = 0; i < c->engines_n; i++)
        for (int k = 0; k < i; k++)
            if (pl_str_eq(c->engines[i].name, c->engines[k].name))
                return pl_fail(eb, PL_EEXISTS,
                               "two engines are named '%.*s': give one of them a name of its own "
                               "({ name = ..., url = ... } or --engine NAME=URL)",
                               PL_FMT(c->engines[i].name));
    for (int i = 0; i < c->api_keys_n; i++)
        for (int k = 0; k < i; k++)
            if (pl_str_eq(c->api_keys[i].key, c->api_keys[k].key))
                return pl_fail(eb, PL_EEXISTS, "api_keys[%d] and api_keys[%d] are the same key",
                               k + 1, i + 1);
    if (c->server.limits.target_bytes > c->server.limits.head_bytes)
        return pl_fail(eb, PL_EINVALID,
                       "limits.target_bytes (%zu) is above limits.head_bytes (%zu), of which it "
                       "is a part",
                       c->server.limits.target_bytes, c->server.limits.head_bytes);
    if (c->server.limits.body_bytes > c->max_body_memory)
        return pl_fail(eb, PL_EINVALID,
                       "limits.body_bytes (%zu) is above limits.body_memory_bytes (%llu), of "
                       "which it is a part",
                       c->server.limits.body_bytes, (unsigned long long)c->max_body_memory);
    if (c->decider.breaker.backoff_ns > c->decider.breaker.max_backoff_ns)
        return pl_fail(eb, PL_EINVALID,
                       "breaker.backoff_seconds is above breaker.max_backoff_seconds");
    if (c->session_store == 0 && (c->redis.host.n || c->redis.unix_path.n))
        return pl_fail(eb, PL_EINVALID,
                       "sessions.redis.url is given, but sessions.store is not \"redis\"");
    if (c->health.path.n == 0 || c->health.path.p[0] != '/')
        return pl_fail(eb, PL_EINVALID, "health.path: '%.*s' does not begin with '/'",
                       PL_FMT(c->health.path));
    if (c->gauges.interval_ms > 0 && c->gauges.interval_ms < MIN_GAUGES_INTERVAL_MS)
        return pl_fail(eb, PL_EINVALID,
                       "gauges.interval_seconds: expected 0 (off) or at least %.2f",
                       MIN_GAUGES_INTERVAL_MS / 1e3);
    c->decider.max_wait_seconds = c->queue_seconds;
    return 0;
}
