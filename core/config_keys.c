/* Every key of the configuration file: its place, type, range and meaning; and the readers of those
 * that are lists or may be written in two ways. Called through config.c. */
#include "config_keys.h"

#include <fcntl.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#define PATH_CAP   256
#define SECRET_CAP 4096
#define KIB        1024.0
#define MIB        (1024.0 * KIB)
#define GIB        (1024.0 * MIB)
#define DAY        86400.0

static int no_memory(const pl_reader_ctx *rd)
{
    return pl_fail(rd->eb, PL_ENOMEM, "out of memory");
}

/* The path of item i (from 0) of a list, counted as Lua counts. */
static void item_path(char out[PATH_CAP], const char *path, size_t i)
{
    snprintf(out, PATH_CAP, "%s[%zu]", path, i + 1);
}

/* --- secrets: given, or in a file that holds nothing else --- */

int pl_config_secret_file(const pl_reader_ctx *rd, const json_t *value, const char *path,
                          pl_str *out)
{
    char bytes[SECRET_CAP];
    if (!json_is_string(value))
        return pl_schema_expected(rd, path, value, "a file name");
    int fd = open(json_string_value(value), O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return pl_schema_fail(rd, path, "cannot read %s: %m", json_string_value(value));
    ssize_t n = read(fd, bytes, sizeof bytes);
    close(fd);
    while (n > 0 && (bytes[n - 1] == '\n' || bytes[n - 1] == '\r'))
        n--;
    if (n <= 0 || (size_t)n >= sizeof bytes)
        return pl_schema_fail(rd, path, "%s should hold one secret of 1 to %d bytes",
                              json_string_value(value), SECRET_CAP - 1);
    *out = pl_arena_str(rd->arena, (pl_str){bytes, (size_t)n});
    return out->p ? 0 : no_memory(rd);
}

static int read_admin_token_file(const pl_reader_ctx *rd, const json_t *value, const char *path,
                                 void *base)
{
    return pl_config_secret_file(rd, value, path, &((pl_config *)base)->admin_token);
}

static int read_api_key_file(const pl_reader_ctx *rd, const json_t *value, const char *path,
                             void *base)
{
    return pl_config_secret_file(rd, value, path, &((pl_api_key *)base)->key);
}

static int read_engine_key_file(const pl_reader_ctx *rd, const json_t *value, const char *path,
                                void *base)
{
    return pl_config_secret_file(rd, value, path, &((pl_engine_spec *)base)->api_key);
}

/* --- engines --- */

static const char *const kinds[] = {"auto", "sglang", "vllm", "other", NULL};
static const char *const events_modes[] = {"auto", "off", "ingest", "connect", "bind", NULL};

static int read_models(const pl_reader_ctx *rd, const json_t *value, const char *path, void *base)
{
    pl_engine_spec *e = base;
    size_t n;
    int rc = pl_schema_list(rd, value, path, "model ids", &n);
    if (rc != 0)
        return rc;
    pl_str *ids = pl_arena_alloc(rd->arena, (n + 1) * sizeof *ids);
    for (size_t i = 0; ids && i < n; i++) {
        char at[PATH_CAP];
        const json_t *id = json_array_get(value, i);
        item_path(at, path, i);
        if (!json_is_string(id) || json_string_length(id) == 0)
            return pl_schema_expected(rd, at, id, "a model id");
        ids[i] = pl_schema_string(rd, id);
        if (!ids[i].p)
            return no_memory(rd);
    }
    if (!ids)
        return no_memory(rd);
    e->models = n ? ids : NULL;
    e->models_n = (int)n;
    return 0;
}

#define ENGINE(field) PL_KEY_AT(pl_engine_spec, field)

static const pl_key engine_keys[] = {
    {"url", PL_KEY_STRING, ENGINE(url),
     .help = "http://HOST[:PORT]; a text instead of a table is "
             "the url alone"},
    {"name", PL_KEY_STRING, ENGINE(name), .def = "HOST:PORT",
     .help = "unique name, in logs, "
             "headers and metrics"},
    {"kind", PL_KEY_CHOICE, ENGINE(kind), .choices = kinds, .help = "auto: asked of the engine"},
    {"api_key", PL_KEY_SECRET, ENGINE(api_key),
     .help = "sent to it as a bearer token, in place of the client's; best from env(\"NAME\")"},
    {"api_key_file", PL_KEY_OTHER, ENGINE(api_key), .read = read_engine_key_file,
     .shape = "file name", .help = "a file that holds the key, instead of api_key"},
    {"weight", PL_KEY_NUMBER, ENGINE(weight), 0.001, 1000,
     .help = "its share, for policies that "
             "look at it"},
    {"max_inflight", PL_KEY_WHOLE, ENGINE(max_inflight), 0, 1e6, "requests",
     .help = "at most so many at once, all its ranks together; 0: no cap"},
    {"max_queued_prefill_tokens", PL_KEY_WHOLE, ENGINE(max_queued_prefill_tokens), 0, 1e12,
     "tokens",
     .help = "for each worker: prompt tokens that may wait for their first token, 0: no "
             "cap"},
    {"dp_size", PL_KEY_WHOLE, ENGINE(dp_size), 1, 256,
     .help = "data-parallel ranks; each is a "
             "worker"},
    {"models", PL_KEY_OTHER, ENGINE(models), .read = read_models, .shape = "list of model ids",
     .def = "asked of the engine", .help = "what it serves"},
    {"block_tokens", PL_KEY_WHOLE, ENGINE(block_tokens), 0, 65536, "tokens",
     .help = "of its KV blocks; 0: asked of the engine, or 16"},
    {"kv_events.mode", PL_KEY_CHOICE, ENGINE(events_mode), .choices = events_modes,
     .help = "auto: connect where the engine says that it publishes; ingest: POST /events alone"},
    {"kv_events.endpoint", PL_KEY_STRING, ENGINE(events_endpoint),
     .help = "tcp://HOST:PORT of rank 0's publisher; rank r has port + r"},
    {"kv_events.replay", PL_KEY_STRING, ENGINE(events_replay),
     .help = "the same of its replay socket"},
    {"kv_events.topic", PL_KEY_STRING, ENGINE(events_topic), .help = "what is subscribed to"},
    {"kv_events.one_stream", PL_KEY_BOOL, ENGINE(events_one_stream),
     .help = "one publisher speaks for all ranks"},
    {.path = NULL},
};

int pl_config_engine(pl_arena *arena, const char *origin, const char *path, const json_t *value,
                     pl_engine_spec *out, pl_errbuf *eb)
{
    pl_reader_ctx rd = {arena, origin, eb};
    *out = (pl_engine_spec){.weight = 1, .dp_size = 1};
    int rc = 0;
    if (json_is_string(value)) {
        out->url = pl_schema_string(&rd, value);
        if (!out->url.p)
            return no_memory(&rd);
    } else if (json_is_object(value)) {
        rc = pl_schema_read(&rd, engine_keys, value, path, out);
    } else {
        rc = pl_schema_expected(&rd, path, value, "a url, or a table with a url");
    }
    if (rc != 0)
        return rc;
    if (out->url.n == 0)
        return pl_schema_fail(&rd, path, "has no url");
    /* the engine itself knows what a good url and name are */
    pl_errbuf why = {""};
    pl_engine *made = NULL;
    rc = pl_engine_new(out, &made, &why);
    if (rc != 0) {
        pl_schema_fail(&rd, path, "%s", why.text[0] ? why.text : pl_strerror(rc));
        return rc;
    }
    out->name = pl_arena_str(arena, pl_str_c(made->name));
    pl_engine_unref(made);
    return out->name.p ? 0 : no_memory(&rd);
}

int pl_config_push_engine(pl_config *c, const pl_engine_spec *spec, pl_errbuf *eb)
{
    if ((c->engines_n & (c->engines_n - 1)) == 0) { /* full at 0, 1, 2, 4, ... */
        size_t cap = c->engines_n ? (size_t)c->engines_n * 2 : 1;
        pl_engine_spec *more = pl_arena_alloc(&c->arena, cap * sizeof *more);
        if (!more)
            return pl_fail(eb, PL_ENOMEM, "out of memory");
        if (c->engines_n)
            memcpy(more, c->engines, (size_t)c->engines_n * sizeof *more);
        c->engines = more;
    }
    c->engines[c->engines_n++] = *spec;
    return 0;
}

static int read_engines(const pl_reader_ctx *rd, const json_t *value, const char *path, void *base)
{
    pl_config *c = base;
    size_t n;
    int rc = pl_schema_list(rd, value, path, "engines", &n);
    for (size_t i = 0; i < n && rc == 0; i++) {
        char at[PATH_CAP];
        pl_engine_spec spec;
        item_path(at, path, i);
        rc = pl_config_engine(rd->arena, rd->origin, at, json_array_get(value, i), &spec, rd->eb);
        spec.from_config = true;
        if (rc == 0)
            rc = pl_config_push_engine(c, &spec, rd->eb);
    }
    return rc;
}

/* --- policy --- */

/* A name of a ready-made policy, or a file, whose relative path starts at the config file's folder.
 */
static int set_policy(const pl_reader_ctx *rd, const json_t *value, const char *path, pl_config *c)
{
    if (!json_is_string(value) || json_string_length(value) == 0)
        return pl_schema_expected(rd, path, value, "a policy's name or file");
    pl_str s = {json_string_value(value), json_string_length(value)};
    const char *slash = c->file.n ? memrchr(c->file.p, '/', c->file.n) : NULL;
    bool is_file = memchr(s.p, '/', s.n) || pl_str_ends(s, PL_STR(".lua"));
    if (is_file && slash && s.p[0] != '/')
        c->policy =
            pl_arena_printf(rd->arena, "%.*s/%.*s", (int)(slash - c->file.p), c->file.p, PL_FMT(s));
    else
        c->policy = pl_arena_str(rd->arena, s);
    return c->policy.p ? 0 : no_memory(rd);
}

static int read_policy_name(const pl_reader_ctx *rd, const json_t *value, const char *path,
                            void *base)
{
    return set_policy(rd, value, path, base);
}

static int read_params(const pl_reader_ctx *rd, const json_t *value, const char *path, void *base)
{
    pl_config *c = base;
    const char *name;
    json_t *v;
    if (!json_is_object(value))
        return pl_schema_expected(rd, path, value, "a table of parameters");
    json_object_foreach((json_t *)value, name, v)
    {
        char at[PATH_CAP];
        snprintf(at, sizeof at, "%s.%.64s", path, name);
        if (!json_is_string(v) && !json_is_number(v) && !json_is_boolean(v))
            return pl_schema_expected(rd, at, v, "a number, a text, true or false");
        if (json_object_set(c->policy_params, name, v) != 0)
            return no_memory(rd);
    }
    return 0;
}

#define NO_FIELD 0, 0

static const pl_key policy_keys[] = {
    {"name", PL_KEY_OTHER, NO_FIELD, .read = read_policy_name, .shape = "text",
     .def = "\"prefix_seconds\"", .help = "a ready-made policy; policy = \"NAME\" is the same"},
    {"file", PL_KEY_OTHER, NO_FIELD, .read = read_policy_name, .shape = "text",
     .help = "a Lua file; a relative path starts at the folder of the configuration file"},
    {"params", PL_KEY_OTHER, NO_FIELD, .read = read_params, .shape = "table",
     .help = "values for the policy's own params; --set KEY=VALUE wins"},
    {.path = NULL},
};

static int read_policy(const pl_reader_ctx *rd, const json_t *value, const char *path, void *base)
{
    if (json_is_string(value))
        return set_policy(rd, value, path, base);
    if (!json_is_object(value))
        return pl_schema_expected(rd, path, value, "a policy's name or a table { file, params }");
    if (json_object_get(value, "file") && json_object_get(value, "name"))
        return pl_schema_fail(rd, path, "give either file or name, not both");
    return pl_schema_read(rd, policy_keys, value, path, base);
}

/* --- clients --- */

#define API_KEY(field) PL_KEY_AT(pl_api_key, field)

static const pl_key api_key_keys[] = {
    {"key", PL_KEY_SECRET, API_KEY(key), .help = "the secret, best from env(\"NAME\")"},
    {"key_file", PL_KEY_OTHER, API_KEY(key), .read = read_api_key_file, .shape = "file name",
     .help = "a file that holds the secret, instead of key"},
    {"tenant", PL_KEY_STRING, API_KEY(tenant), .help = "the name that the key stands for"},
    {.path = NULL},
};

static int read_api_keys(const pl_reader_ctx *rd, const json_t *value, const char *path, void *base)
{
    pl_config *c = base;
    size_t n;
    int rc = pl_schema_list(rd, value, path, "{ key, tenant }", &n);
    if (rc != 0 || n == 0)
        return rc;
    c->api_keys = pl_arena_zalloc(rd->arena, n * sizeof *c->api_keys);
    if (!c->api_keys)
        return no_memory(rd);
    for (size_t i = 0; i < n; i++) {
        char at[PATH_CAP];
        pl_api_key *k = &c->api_keys[i];
        item_path(at, path, i);
        rc = pl_schema_read(rd, api_key_keys, json_array_get(value, i), at, k);
        if (rc != 0)
            return rc;
        if (k->key.n == 0)
            return pl_schema_fail(rd, at, "has no key: give key or key_file");
        if (k->tenant.n == 0)
            return pl_schema_fail(rd, at, "has no tenant: the name that the key stands for");
        size_t most = c->max_id_bytes; /* and what a session's name has room for */
        if (most > PL_SESSION_MAX_TENANT_BYTES)
            most = PL_SESSION_MAX_TENANT_BYTES;
        if (k->tenant.n > most)
            return pl_schema_fail(rd, at, "the tenant's name is longer than %zu bytes", most);
    }
    c->api_keys_n = (int)n;
    return 0;
}

static int read_trusted(const pl_reader_ctx *rd, const json_t *value, const char *path, void *base)
{
    pl_config *c = base;
    size_t n;
    int rc = pl_schema_list(rd, value, path, "networks", &n);
    if (rc != 0)
        return rc;
    c->trusted = pl_arena_alloc(rd->arena, (n + 1) * sizeof *c->trusted);
    if (!c->trusted)
        return no_memory(rd);
    for (size_t i = 0; i < n; i++) {
        char at[PATH_CAP];
        const json_t *v = json_array_get(value, i);
        pl_str s = {json_string_value(v), json_string_length(v)};
        item_path(at, path, i);
        if (!s.p || pl_cidr_parse(s, &c->trusted[i]) != 0)
            return pl_schema_expected(rd, at, v, "an address or network such as \"10.0.0.0/8\"");
    }
    c->trusted_n = (int)n;
    return 0;
}

static int read_paths(const pl_reader_ctx *rd, const json_t *value, const char *path, void *base)
{
    pl_config *c = base;
    size_t n;
    int rc = pl_schema_list(rd, value, path, "paths", &n);
    if (rc != 0)
        return rc;
    c->extra_paths = pl_arena_alloc(rd->arena, (n + 1) * sizeof *c->extra_paths);
    for (size_t i = 0; c->extra_paths && i < n; i++) {
        char at[PATH_CAP];
        const json_t *v = json_array_get(value, i);
        const char *s = json_string_value(v);
        item_path(at, path, i);
        if (!s || s[0] != '/' || strpbrk(s, "?# "))
            return pl_schema_expected(rd, at, v, "a path such as \"/v1/special\"");
        c->extra_paths[i] = pl_schema_string(rd, v);
        if (!c->extra_paths[i].p)
            return no_memory(rd);
    }
    if (!c->extra_paths)
        return no_memory(rd);
    c->extra_paths_n = (int)n;
    return 0;
}

/* --- the table --- */

static const char *const usages[] = {"off", "auto", "always", NULL};
static const char *const kv_uses[] = {"auto", "always", "off", NULL};
static const char *const levels[] = {"debug", "info", "warn", "error", NULL};

#define C(field) PL_KEY_AT(pl_config, field)

const pl_key pl_config_keys[] = {
    {"listen", PL_KEY_STRING, C(listen), .help = "HOST:PORT for clients; [ADDRESS]:PORT for IPv6"},
    {"admin.listen", PL_KEY_STRING, C(admin_listen),
     .help = "HOST:PORT of the admin API, or "
             "\"off\""},
    {"admin.token", PL_KEY_SECRET, C(admin_token),
     .help = "bearer token; needed when the admin address is not loopback"},
    {"admin.token_file", PL_KEY_OTHER, C(admin_token), .read = read_admin_token_file,
     .shape = "file name", .help = "a file that holds the token, instead of token"},
    {"threads", PL_KEY_WHOLE, C(threads), 0, 256,
     .help = "event loops; 0: one for each core, at "
             "most 8"},
    {"engines", PL_KEY_OTHER, C(engines), .read = read_engines, .shape = "list",
     .help = "the inference servers: urls, or tables with the keys of engines[]"},
    {"policy", PL_KEY_OTHER, C(policy), .read = read_policy, .shape = "text or table",
     .help = "who decides: a ready-made policy's name, or a table with the keys of policy"},
    {"default_model", PL_KEY_STRING, C(default_model),
     .help = "for requests without a model, when there are several"},
    {"paths", PL_KEY_OTHER, C(extra_paths), .read = read_paths, .shape = "list of paths",
     .help = "further POST paths that are forwarded"},
    {"api_keys", PL_KEY_OTHER, C(api_keys), .read = read_api_keys, .shape = "list",
     .help = "who may ask: tables with the keys of api_keys[]; none: everybody"},
    {"trusted_clients", PL_KEY_OTHER, C(trusted), .read = read_trusted, .shape = "list of networks",
     .help = "clients that may pin workers and ranks; none by default"},

    {"limits.head_bytes", PL_KEY_WHOLE, C(server.limits.head_bytes), KIB, MIB, "bytes",
     .help = "request line and headers"},
    {"limits.headers", PL_KEY_WHOLE, C(server.limits.headers), 8, 1000, .help = "header lines"},
    {"limits.target_bytes", PL_KEY_WHOLE, C(server.limits.target_bytes), 64, 64 * KIB, "bytes",
     .help = "path and query"},
    {"limits.body_bytes", PL_KEY_WHOLE, C(server.limits.body_bytes), KIB, 4 * GIB, "bytes",
     .help = "one request body"},
    {"limits.connections", PL_KEY_WHOLE, C(max_connections), 1, 1e6,
     .help = "client connections; above: 503"},
    {"limits.body_memory_bytes", PL_KEY_WHOLE, C(max_body_memory), KIB, 1024 * GIB, "bytes",
     .help = "all request bodies together; above: 503"},
    {"limits.json_depth", PL_KEY_WHOLE, C(max_json_depth), 4, 1000, .help = "nesting of a body"},
    {"limits.queue", PL_KEY_WHOLE, C(queue_max), 0, 1e6, "requests",
     .help = "that wait while every worker is at its cap"},
    {"limits.id_bytes", PL_KEY_WHOLE, C(max_id_bytes), 16, 1024, "bytes",
     .help = "x-request-id and other ids of clients"},
    {"limits.policy_memory_bytes", PL_KEY_WHOLE, C(vm_memory_bytes), 4 * MIB, GIB, "bytes",
     .help = "of each loop's Lua VM"},

    {"timeouts.head_seconds", PL_KEY_MS, C(server.head_timeout_ms), 0.01, DAY, "seconds",
     .help = "from a head's first byte to its last"},
    {"timeouts.body_seconds", PL_KEY_MS, C(server.body_timeout_ms), 0.01, DAY, "seconds",
     .help = "without a byte of the request's body; after 30 seconds it must also have come at 1 "
             "KiB/s"},
    {"timeouts.keep_alive_seconds", PL_KEY_MS, C(server.keep_alive_timeout_ms), 0.01, DAY,
     "seconds", .help = "a client's connection between two requests"},
    {"timeouts.write_seconds", PL_KEY_MS, C(server.write_timeout_ms), 0.01, DAY, "seconds",
     .help = "a client that takes nothing, or less than 1 KiB/s, while there is something for it"},
    {"timeouts.connect_seconds", PL_KEY_MS, C(pool.connect_timeout_ms), 0.01, 600, "seconds",
     .help = "to an engine, name resolution included"},
    {"timeouts.first_byte_seconds", PL_KEY_MS, C(pool.first_byte_timeout_ms), 0.01, DAY, "seconds",
     .help = "from a request's last byte to the engine's first"},
    {"timeouts.between_bytes_seconds", PL_KEY_MS, C(pool.between_bytes_timeout_ms), 0.01, DAY,
     "seconds", .help = "between two reads of an engine's answer"},
    {"timeouts.pool_idle_seconds", PL_KEY_MS, C(pool.pool_idle_ms), 0.01, 3.9, "seconds",
     .help = "an idle connection to an engine is kept; under 4, since vLLM closes after 5"},
    {"timeouts.queue_seconds", PL_KEY_NUMBER, C(queue_seconds), 0, DAY, "seconds",
     .help = "a request may wait for capacity"},
    {"timeouts.drain_seconds", PL_KEY_MS, C(drain_timeout_ms), 0, DAY, "seconds",
     .help = "for requests under way after SIGTERM"},
    {"timeouts.remove_seconds", PL_KEY_MS, C(remove_timeout_ms), 0, DAY, "seconds",
     .help = "for the requests of an engine that is removed"},

    {"retries.max", PL_KEY_WHOLE, C(retries), 0, 7,
     .help = "further engines that one request may "
             "be sent to"},
    {"retries.budget", PL_KEY_NUMBER, C(retry_budget), 0, 1,
     .help = "retries, as a share of the requests"},

    {"health.interval_seconds", PL_KEY_MS, C(health.interval_ms), 0.05, 3600, "seconds",
     .help = "between two checks of an engine"},
    {"health.timeout_seconds", PL_KEY_MS, C(health.timeout_ms), 0.05, 600, "seconds",
     .help = "of one check"},
    {"health.rise", PL_KEY_WHOLE, C(health.rise), 1, 100, .help = "good checks in a row until up"},
    {"health.fall", PL_KEY_WHOLE, C(health.fall), 1, 100, .help = "bad checks in a row until down"},
    {"health.path", PL_KEY_STRING, C(health.path), .help = "what is asked"},
    {"health.detect_interval_seconds", PL_KEY_MS, C(health.detect_interval_ms), 0.05, DAY,
     "seconds", .help = "between two looks at an engine's kind and models"},

    {"gauges.interval_seconds", PL_KEY_MS, C(gauges.interval_ms), 0, 3600, "seconds",
     .help = "between two looks at an engine's own load (SGLang, vLLM); 0: never"},
    {"gauges.timeout_seconds", PL_KEY_MS, C(gauges.timeout_ms), 0.05, 600, "seconds",
     .help = "of one look"},

    {"breaker.failures", PL_KEY_WHOLE, C(decider.breaker.failures), 1, 1e6,
     .help = "failed requests in a row that stop traffic to an engine"},
    {"breaker.backoff_seconds", PL_KEY_NS, C(decider.breaker.backoff_ns), 0.01, 3600, "seconds",
     .help = "until the first probe; doubles each time"},
    {"breaker.max_backoff_seconds", PL_KEY_NS, C(decider.breaker.max_backoff_ns), 0.01, 3600,
     "seconds", .help = "at most"},
    {"breaker.probes", PL_KEY_WHOLE, C(decider.breaker.half_open_probes), 1, 100,
     .help = "requests at once that try whether it is back"},

    {"usage", PL_KEY_CHOICE, C(usage), .choices = usages,
     .help = "ask engines for usage in streams; auto: when a hook, a session or what is believed "
             "of caches needs it"},
    {"response_headers", PL_KEY_BOOL, C(response_headers), .help = "x-perilune-* in answers"},
    {"metrics.public", PL_KEY_BOOL, C(metrics_public), .help = "GET /metrics for clients"},
    {"metrics.admin", PL_KEY_BOOL, C(metrics_admin), .help = "GET /metrics on the admin API"},
    {"log.level", PL_KEY_CHOICE, C(log_level), .choices = levels,
     .help = "lines below are "
             "dropped"},
    {"log.json", PL_KEY_BOOL, C(log_json), .def = "true unless on a terminal",
     .help = "one JSON object a line"},
    {"seed", PL_KEY_WHOLE, C(seed), 0, 9e15, .help = "of all random choices; 0: from the system"},

    {"sessions", PL_KEY_OTHER, NO_FIELD, .read = pl_config_read_sessions, .shape = "table",
     .help = "sticky and engine-backed sessions: the keys of sessions"},
    {"kv.use", PL_KEY_CHOICE, C(kv_use), .choices = kv_uses,
     .help = "look up who holds a prompt; auto: when the policy's text names cached_tokens"},
    {"kv.index_bytes", PL_KEY_WHOLE, C(holdings.index_bytes), MIB, 1024 * GIB, "bytes",
     .help = "of the index of the engines' events; above: the least recently asked for go"},
    {"kv.routed_bytes", PL_KEY_WHOLE, C(holdings.routed_bytes), MIB, 1024 * GIB, "bytes",
     .help = "of what was routed, which stands in where there are no events"},
    {"kv.routed_ttl_seconds", PL_KEY_MS, C(routed_ttl_ms), 1, DAY, "seconds",
     .help = "what was routed is believed to be cached for so long"},
    {"kv.predicted_ttl_seconds", PL_KEY_MS, C(predicted_ttl_ms), 0, 600, "seconds",
     .help = "the same beside events, until they come; 0: off"},
    {"kv.chunk_bytes", PL_KEY_WHOLE, C(holdings.chunk_bytes), 16, 4096, "bytes",
     .help = "prompts of text are compared in pieces of so much"},
    {"kv.stale_seconds", PL_KEY_NS, C(trust.stale_ns), 1, DAY, "seconds",
     .help = "an engine that is used and publishes nothing for so long is not believed"},
    {"kv.tokenize_seconds", PL_KEY_MS, C(tokenize_ms), 0, 10, "seconds",
     .help = "a request of text waits for an engine's /tokenize, when events need its ids; 0: "
             "never asked"},
    {"kv.tokenize_bytes", PL_KEY_WHOLE, C(tokenize_bytes), MIB, 64 * GIB, "bytes",
     .help = "of token ids kept, so that each is asked for once"},
    {"kv.assume_kv_reuse", PL_KEY_BOOL, C(assume_kv_reuse),
     .help =
         "decode_blocks counts blocks that running requests share once, whatever the policy wants"},
    {.path = NULL},
};

int pl_config_print_reference(FILE *out)
{
    pl_config c;
    pl_engine_spec engine = {.weight = 1, .dp_size = 1};
    pl_api_key key = {{NULL, 0}, {NULL, 0}};
    pl_wish_header header = {.id = {NULL, 0}};
    int rc = pl_config_init(&c);
    if (rc != 0)
        return rc;
    fputs(
        "The configuration is a Lua file that returns a table; env(\"NAME\") reads the "
        "environment.\nA dot is a table in a table: admin.listen is admin = { listen = ... }.\n\n",
        out);
    pl_schema_print(pl_config_keys, "", &c, out);
    fputs("\nEach of engines:\n\n", out);
    pl_schema_print(engine_keys, "engines[].", &engine, out);
    fputs("\nA policy as a table:\n\n", out);
    pl_schema_print(policy_keys, "policy.", &c, out);
    fputs("\nSessions:\n\n", out);
    pl_schema_print(pl_config_session_keys, "sessions.", &c, out);
    pl_schema_print(pl_config_session_header_keys, "sessions.headers[].", &header, out);
    fputs("\nEach of api_keys:\n\n", out);
    pl_schema_print(api_key_keys, "api_keys[].", &key, out);
    pl_config_free(&c);
    return 0;
}
