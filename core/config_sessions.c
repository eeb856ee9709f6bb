/* The keys of the configuration's `sessions`: their place, type, range and meaning. Read through
 * config_keys.c's table, which has them as one key. */
#include "config_keys.h"

#include <string.h>

#define MILLION 1e6
#define DAY     86400.0

static int no_memory(const pl_reader_ctx *rd)
{
    return pl_fail(rd->eb, PL_ENOMEM, "out of memory");
}

/* --- headers: a name, or a table {id, parent, final, child} --- */

static bool header_name(pl_str s)
{
    if (s.n == 0 || s.n > 128)
        return false;
    for (size_t i = 0; i < s.n; i++)
        if (!strchr("abcdefghijklmnopqrstuvwxyz0123456789-_", s.p[i]))
            return false;
    return true;
}

static int read_name(const pl_reader_ctx *rd, const json_t *v, const char *path, pl_str *out)
{
    pl_str s = json_is_string(v) ? pl_schema_string(rd, v) : (pl_str){NULL, 0};
    if (json_is_string(v) && !s.p)
        return no_memory(rd);
    for (size_t i = 0; s.p && i < s.n; i++) /* the copy is ours */
        if (s.p[i] >= 'A' && s.p[i] <= 'Z')
            ((char *)(uintptr_t)s.p)[i] = (char)(s.p[i] | 0x20);
    if (!s.p || !header_name(s))
        return pl_schema_expected(rd, path, v, "a header's name");
    *out = s;
    return 0;
}

#define HEADER(field) PL_KEY_AT(pl_wish_header, field)

#define NAME_READER(field)                                                                         \
    static int read_##field(const pl_reader_ctx *rd, const json_t *v, const char *path,            \
                            void *base)                                                            \
    {                                                                                              \
        return read_name(rd, v, path, &((pl_wish_header *)base)->field);                           \
    }
NAME_READER(id)
NAME_READER(parent)
NAME_READER(final)
NAME_READER(child)

const pl_key pl_config_session_header_keys[] = {
    {"id", PL_KEY_OTHER, HEADER(id), .read = read_id, .shape = "header name",
     .help = "names the session; a text instead of a table is this alone"},
    {"parent", PL_KEY_OTHER, HEADER(parent), .read = read_parent, .shape = "header name",
     .help = "names the parent session"},
    {"final", PL_KEY_OTHER, HEADER(final), .read = read_final, .shape = "header name",
     .help = "\"true\" or \"1\": the session ends with this turn"},
    {"child", PL_KEY_OTHER, HEADER(child), .read = read_child, .shape = "header name",
     .help = "when it is there it names the session, and id names the parent"},
    {.path = NULL},
};

static int read_headers(const pl_reader_ctx *rd, const json_t *value, const char *path, void *base)
{
    pl_config *c = base;
    size_t n;
    int rc = pl_schema_list(rd, value, path, "headers", &n);
    if (rc != 0)
        return rc;
    if (n > PL_WISH_MAX_HEADERS)
        return pl_schema_fail(rd, path, "at most %d headers", PL_WISH_MAX_HEADERS);
    pl_wish_header *h = pl_arena_alloc(rd->arena, (n + 1) * sizeof *h);
    if (!h)
        return no_memory(rd);
    for (size_t i = 0; i < n; i++) {
        char at[256];
        const json_t *v = json_array_get(value, i);
        h[i] = (pl_wish_header){.id = {NULL, 0}};
        snprintf(at, sizeof at, "%s[%zu]", path, i + 1);
        rc = json_is_string(v) ? read_name(rd, v, at, &h[i].id)
                               : pl_schema_read(rd, pl_config_session_header_keys, v, at, &h[i]);
        if (rc == 0 && !h[i].id.p)
            rc = pl_schema_fail(rd, at, "'id' is missing");
        if (rc != 0)
            return rc;
    }
    c->wish.headers = h;
    c->wish.headers_n = (int)n;
    return 0;
}

/* --- the shared store --- */

/* redis://[user@]host[:port][/db], unix:///path. It may hold a password by mistake, so messages do
 * not show it. */
static int read_redis_url(const pl_reader_ctx *rd, const json_t *value, const char *path,
                          void *base)
{
    pl_redis_options *o = &((pl_config *)base)->redis;
    pl_str url = json_is_string(value) ? pl_schema_string(rd, value) : (pl_str){NULL, 0};
    const char *shape = "expected redis://[USER@]HOST[:PORT][/DB] or unix:///PATH";
    if (json_is_string(value) && !url.p)
        return no_memory(rd);
    o->host = o->unix_path = o->user = (pl_str){NULL, 0};
    o->port = o->db = 0;
    if (pl_str_starts(url, PL_STR("unix:///"))) {
        o->unix_path = (pl_str){url.p + 7, url.n - 7};
        return o->unix_path.n > 1 ? 0 : pl_schema_fail(rd, path, "%s", shape);
    }
    if (pl_str_starts(url, PL_STR("rediss://")))
        return pl_schema_fail(rd, path, "rediss:// (TLS) is not available; %s", shape);
    if (!pl_str_starts(url, PL_STR("redis://")))
        return pl_schema_fail(rd, path, "%s", shape);
    pl_str rest = {url.p + 8, url.n - 8}, authority;
    pl_str_cut(&rest, '/', &authority);
    double n;
    if (rest.n) {
        if (pl_str_double(rest, &n) != 0 || n < 0 || n > 65535 || n != (int)n)
            return pl_schema_fail(rd, path, "the database is a whole number from 0 to 65535; %s",
                                  shape);
        o->db = (int)n;
    }
    const char *at = authority.n ? memrchr(authority.p, '@', authority.n) : NULL;
    if (at) {
        o->user = (pl_str){authority.p, (size_t)(at - authority.p)};
        authority = (pl_str){at + 1, authority.n - o->user.n - 1};
        if (o->user.n && memchr(o->user.p, ':', o->user.n))
            return pl_schema_fail(rd, path,
                                  "a password belongs in redis.password or redis.password_file");
        if (!o->user.n)
            return pl_schema_fail(rd, path, "%s", shape);
    }
    bool bracket = authority.n && authority.p[0] == '[';
    const char *end = bracket ? memchr(authority.p, ']', authority.n) : NULL;
    if (bracket && !end)
        return pl_schema_fail(rd, path, "%s", shape);
    size_t host_n = end ? (size_t)(end - authority.p) + 1 : 0;
    const char *colon = end           ? (authority.n > host_n ? end + 1 : NULL)
                        : authority.n ? memchr(authority.p, ':', authority.n)
                                      : NULL;
    if (!end)
        host_n = colon ? (size_t)(colon - authority.p) : authority.n;
    o->host = end ? (pl_str){authority.p + 1, host_n - 2} : (pl_str){authority.p, host_n};
    if (colon) {
        pl_str port = {colon + 1, authority.n - host_n - 1};
        if (*colon != ':' || pl_str_double(port, &n) != 0 || n < 1 || n > 65535 || n != (int)n)
            return pl_schema_fail(rd, path, "the port is a whole number from 1 to 65535; %s",
                                  shape);
        o->port = (int)n;
    }
    return o->host.n ? 0 : pl_schema_fail(rd, path, "%s", shape);
}

static int read_redis_password_file(const pl_reader_ctx *rd, const json_t *value, const char *path,
                                    void *base)
{
    return pl_config_secret_file(rd, value, path, &((pl_config *)base)->redis.password);
}

/* --- the table --- */

static const char *const stores[] = {"memory", "redis", NULL};

static const char *const retentions[] = {"auto", "off", "extra_args", "top_level", NULL};
static const char *const priorities[] = {"auto", "off", "on", NULL};

#define C(field) PL_KEY_AT(pl_config, field)

const pl_key pl_config_session_keys[] = {
    {"max", PL_KEY_WHOLE, C(max_sessions), 1, 1e9, "sessions",
     .help = "held at once; above: the least recently used ones that no engine holds go"},
    {"ttl_seconds", PL_KEY_NUMBER, C(wish.header_timeout_seconds), 1, 30 * DAY, "seconds",
     .help = "of a session that only a header names, after its last turn"},
    {"max_ttl_seconds", PL_KEY_NUMBER, C(wish.max_timeout_seconds), 1, 30 * DAY, "seconds",
     .help = "the longest timeout that a client may ask for, or a policy give"},
    {"headers", PL_KEY_OTHER, C(wish.headers), .read = read_headers, .shape = "list",
     .def = "the known agents' headers",
     .help = "that name a session, in order: names, or tables with the keys of headers[]"},
    {"waiting_turns", PL_KEY_WHOLE, C(sessions.max_waiting_turns), 0, 1000, "requests",
     .help = "that may wait for a turn of the same engine session; above: 409"},
    {"turn_wait_seconds", PL_KEY_MS, C(sessions.turn_wait_ms), 0.01, DAY, "seconds",
     .help = "a turn waits for the one before; then 409"},
    {"lease_seconds", PL_KEY_MS, C(sessions.lease_ms), 1, 3600, "seconds",
     .help = "a turn's claim to its engine session outlives its router by so much"},
    {"open_timeout_seconds", PL_KEY_MS, C(sessions.open_timeout_ms), 0.01, 600, "seconds",
     .help = "of an engine's /open_session"},
    {"close_timeout_seconds", PL_KEY_MS, C(sessions.close_timeout_ms), 0.01, 600, "seconds",
     .help = "of an engine's /close_session; it is tried again"},
    {"engine_extra_seconds", PL_KEY_WHOLE, C(sessions.engine_extra_seconds), 0, 3600, "seconds",
     .help = "an engine's own timeout is the session's plus this"},
    {"capacity_of_str_len", PL_KEY_WHOLE, C(sessions.capacity_of_str_len), 1, 2e9,
     .help = "sent with /open_session"},
    {"per_worker", PL_KEY_WHOLE, C(sessions.max_open_per_worker), 0, MILLION, "sessions",
     .help = "open on one worker at most; 0: no cap"},
    {"held_tokens_per_worker", PL_KEY_WHOLE, C(sessions.max_held_tokens_per_worker), 0, 1e12,
     "tokens", .help = "no further session is opened on a worker above this; 0: no cap"},
    {"forward_nvext", PL_KEY_BOOL, C(forward_nvext),
     .help = "leave nvext in the body: the engine wants it"},
    {"retention.sglang", PL_KEY_CHOICE, C(retention[PL_KIND_SGLANG]), .choices = retentions,
     .help = "where retention_seconds goes; auto: extra_args of engines known to take it"},
    {"retention.vllm", PL_KEY_CHOICE, C(retention[PL_KIND_VLLM]), .choices = retentions,
     .help = "the same for vLLM"},
    {"retention.other", PL_KEY_CHOICE, C(retention[PL_KIND_OTHER]), .choices = retentions,
     .help = "the same for other engines"},
    {"priority.sglang", PL_KEY_CHOICE, C(priority[PL_KIND_SGLANG]), .choices = priorities,
     .help = "a policy's or agent_hints' priority is sent; auto: to engines known to take it"},
    {"priority.vllm", PL_KEY_CHOICE, C(priority[PL_KIND_VLLM]), .choices = priorities,
     .help = "the same for vLLM"},
    {"priority.other", PL_KEY_CHOICE, C(priority[PL_KIND_OTHER]), .choices = priorities,
     .help = "the same for other engines"},
    {"store", PL_KEY_CHOICE, C(session_store), .choices = stores,
     .help = "who knows the bindings: this router, or a Redis that several routers share"},
    {"redis.url", PL_KEY_OTHER, C(redis.host), .read = read_redis_url, .shape = "text",
     .def = "\"redis://127.0.0.1:6379\"",
     .help = "redis://[USER@]HOST[:PORT][/DB] or unix:///PATH"},
    {"redis.password", PL_KEY_SECRET, C(redis.password),
     .help = "env(\"NAME\") keeps it out of the file"},
    {"redis.password_file", PL_KEY_OTHER, C(redis.password), .read = read_redis_password_file,
     .shape = "file name", .help = "a file that holds it and nothing else"},
    {"redis.prefix", PL_KEY_STRING, C(redis.prefix),
     .help = "of every key; routers with the same one share their sessions"},
    {"redis.timeout_seconds", PL_KEY_MS, C(redis.command_ms), 0.001, 60, "seconds",
     .help = "of one command; then the store counts as out of reach until it answers"},
    {"redis.connect_seconds", PL_KEY_MS, C(redis.connect_ms), 0.01, 60, "seconds",
     .help = "to connect and log in"},
    {"redis.cache_seconds", PL_KEY_MS, C(redis.staleness_ms), 0, 60, "seconds",
     .help = "a router-only binding is believed for so long; 0: every turn asks"},
    {"redis.cache_sessions", PL_KEY_WHOLE, C(redis.known_sessions), 1, 1e8, "sessions",
     .help = "remembered, so that they keep their worker while the store is out of reach"},
    {.path = NULL},
};

int pl_config_read_sessions(const pl_reader_ctx *rd, const json_t *value, const char *path,
                            void *base)
{
    return pl_schema_read(rd, pl_config_session_keys, value, path, base);
}
