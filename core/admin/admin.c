/* The admin API: a server on the control loop, so every handler may change the fleet and start a
 * reload directly. Started and stopped by router.c on the control thread. This file has the life
 * of the server, who may ask, the routes, and the small pages; the other
 * admin_*.c have the rest. */
#include "admin/admin_api.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "admin/metrics_text.h"
#include "base/clock.h"

#define CONNECTIONS_MAX 256
#define BODY_MAX        ((size_t)8 << 20) /* prompts to explain, events that are handed in */
#define BODY_MEMORY_MAX ((uint64_t)64 << 20)

/* --- answers --- */

void pl_admin_json(pl_exchange *x, int status, json_t *body)
{
    static const pl_header type = {PL_STR_INIT("content-type"), PL_STR_INIT("application/json")};
    char *text = body ? json_dumps(body, JSON_INDENT(2) | JSON_PRESERVE_ORDER) : NULL;
    json_decref(body);
    if (text) {
        size_t n = strlen(text);
        text[n] = '\n'; /* in place of the NUL: terminals want a line's end */
        pl_exchange_respond(x, status, &type, 1, (pl_str){text, n + 1});
    } else {
        pl_exchange_respond(x, 503, &type, 1,
                            PL_STR("{\"error\":{\"code\":\"no_memory\","
                                   "\"message\":\"out of memory\"}}"));
    }
    free(text);
}

void pl_admin_error(pl_exchange *x, int status, const char *code, const char *fmt, ...)
{
    char text[1536];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    pl_admin_json(
        x, status,
        json_pack("{s:{s:s, s:o}}", "error", "code", code, "message", pl_admin_text(text)));
}

json_t *pl_admin_text(const char *s)
{
    size_t bad;
    if (pl_str_utf8(pl_str_c(s), NULL))
        return json_string(s);
    char *copy = strdup(s);
    for (char *p = copy; p && !pl_str_utf8(pl_str_c(p), &bad); p += bad + 1)
        p[bad] = '?';
    json_t *j = copy ? json_string(copy) : NULL;
    free(copy);
    return j;
}

pl_admin_wait *pl_admin_wait_begin(pl_exchange *x, void *data)
{
    pl_admin_wait *w = malloc(sizeof *w);
    if (!w)
        return NULL;
    *w = (pl_admin_wait){x, data};
    x->user = w;
    return w;
}

pl_exchange *pl_admin_wait_end(pl_admin_wait *w)
{
    pl_exchange *x = w->x;
    if (x)
        x->user = NULL;
    free(w);
    return x;
}

json_t *pl_admin_body(pl_exchange *x)
{
    json_error_t je;
    if (x->body.n == 0)
        return json_object();
    json_t *body = json_loadb(x->body.p, x->body.n, JSON_REJECT_DUPLICATES, &je);
    if (body && json_is_object(body))
        return body;
    if (body)
        pl_admin_error(x, 400, "invalid_body", "the body should be a JSON object");
    else
        pl_admin_error(x, 400, "invalid_json", "the body is not JSON: %s (line %d, column %d)",
                       je.text, je.line, je.column);
    json_decref(body);
    return NULL;
}

/* --- small pages --- */

static void get_health(pl_admin *a, pl_exchange *x, pl_str name)
{
    pl_admin_json(x, 200, json_pack("{s:s}", "status", "ok"));
}

static int usable_engines(const pl_router *r)
{
    pl_view *v = pl_fleet_view(r->fleet);
    uint64_t now = pl_now_ns();
    int n = 0;
    for (int i = 0; v && i < v->engines_n; i++)
        n += pl_engine_why(v->engines[i], &r->config.decider.breaker, now) == 0;
    pl_view_unref(v);
    return n;
}

static void get_readyz(pl_admin *a, pl_exchange *x, pl_str name)
{
    int usable = usable_engines(a->router);
    bool draining = atomic_load(&a->router->draining);
    bool ready = usable > 0 && !draining;
    pl_admin_json(x, ready ? 200 : 503,
                  json_pack("{s:b, s:i, s:b}", "ready", ready, "usable_engines", usable, "draining",
                            draining));
}

static void get_metrics(pl_admin *a, pl_exchange *x, pl_str name)
{
    static const pl_header type = {PL_STR_INIT("content-type"),
                                   PL_STR_INIT("text/plain; version=0.0.4; charset=utf-8")};
    pl_buf b = {0};
    if (!a->router->config.metrics_admin) {
        pl_admin_error(x, 404, "not_found", "metrics.admin is off in the configuration");
        return;
    }
    pl_router_render_metrics(a->router, &b);
    pl_exchange_respond(x, b.n ? 200 : 503, &type, 1, pl_buf_str(&b));
    pl_buf_free(&b);
}

static void get_status(pl_admin *a, pl_exchange *x, pl_str name)
{
    pl_router *r = a->router;
    pl_view *v = pl_fleet_view(r->fleet);
    int inflight = 0, engines = v ? v->engines_n : 0;
    for (int i = 0; i < engines; i++)
        inflight += pl_engine_inflight(v->engines[i]);
    pl_view_unref(v);
    pl_admin_json(
        x, 200,
        json_pack("{s:s, s:f, s:b, s:i, s:I, s:i, s:I, s:i, s:i, s:o, s:I, s:{s:I, s:I}}",
                  "version", PERILUNE_VERSION, "uptime_seconds",
                  (double)pl_now_ns() / 1e9 - a->started_at, "draining", atomic_load(&r->draining),
                  "loops", r->loops_n, "connections", (json_int_t)atomic_load(&r->connections),
                  "requests_at_engines", inflight, "queue", (json_int_t)pl_queue_waiting(r->queue),
                  "engines", engines, "usable_engines", usable_engines(r), "policy",
                  pl_admin_text(r->policy.name), "policy_generation", (json_int_t)r->generation,
                  "memory", "resident_bytes", (json_int_t)pl_process_resident_bytes(),
                  "request_bodies_bytes", (json_int_t)atomic_load(&r->body_memory)));
}

/* --- routes --- */

typedef struct route {
    pl_method method;
    const char *path; /* NAME stands for one segment */
    void (*handle)(pl_admin *a, pl_exchange *x, pl_str name);
} route;

static const route routes[] = {
    {PL_GET, "/engines", pl_admin_engines_list},
    {PL_POST, "/engines", pl_admin_engines_add},
    {PL_GET, "/engines/NAME", pl_admin_engine_get},
    {PL_DELETE, "/engines/NAME", pl_admin_engine_remove},
    {PL_POST, "/engines/NAME/drain", pl_admin_engine_drain},
    {PL_POST, "/engines/NAME/undrain", pl_admin_engine_undrain},
    {PL_GET, "/sessions", pl_admin_sessions_list},
    {PL_GET, "/sessions/NAME", pl_admin_session_get},
    {PL_DELETE, "/sessions/NAME", pl_admin_session_close},
    {PL_GET, "/policy", pl_admin_policy_get},
    {PL_POST, "/policy/reload", pl_admin_policy_reload},
    {PL_POST, "/explain", pl_admin_explain},
    {PL_GET, "/index", pl_admin_index},
    {PL_POST, "/query", pl_admin_query},
    {PL_POST, "/query_by_hash", pl_admin_query_by_hash},
    {PL_POST, "/events", pl_admin_events},
    {PL_GET, "/status", get_status},
    {PL_GET, "/metrics", get_metrics},
    {PL_GET, "/health", get_health},
    {PL_GET, "/readyz", get_readyz},
};
#define ROUTES ((int)(sizeof routes / sizeof *routes))

/* Segment by segment; *name is what stands in place of NAME. */
static bool matches(const char *pattern, pl_str path, pl_str *name)
{
    pl_str want = pl_str_c(pattern), a, b;
    for (;;) {
        bool more_want = pl_str_cut(&want, '/', &a), more = pl_str_cut(&path, '/', &b);
        if (more_want != more)
            return false;
        if (!more)
            return true;
        if (pl_str_eq(a, PL_STR("NAME")) && b.n)
            *name = b;
        else if (!pl_str_eq(a, b))
            return false;
    }
}

static int hex(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c = (char)(c | 0x20);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool pl_admin_decode(pl_exchange *x, pl_str in, bool any, pl_str *out)
{
    char *p = pl_arena_alloc(&x->arena, in.n + 1);
    size_t n = 0;
    for (size_t i = 0; p && i < in.n; i++) {
        int c = (unsigned char)in.p[i];
        if (c == '%') {
            int high = i + 2 < in.n ? hex(in.p[i + 1]) : -1;
            int low = i + 2 < in.n ? hex(in.p[i + 2]) : -1;
            if (high < 0 || low < 0)
                return false;
            c = high * 16 + low;
            i += 2;
        }
        if (!any && (c <= 0x20 || c >= 0x7f || c == '/'))
            return false;
        p[n++] = (char)c;
    }
    if (!p)
        return false;
    p[n] = 0;
    *out = (pl_str){p, n};
    return true;
}

pl_str pl_admin_parameter(pl_exchange *x, pl_str name)
{
    pl_str query = x->head.query, part, key;
    while (pl_str_cut(&query, '&', &part)) {
        pl_str value = part;
        if (!pl_str_cut(&value, '=', &key) || !pl_str_eq(key, name))
            continue;
        pl_str out;
        return pl_admin_decode(x, value, true, &out) ? out : (pl_str){NULL, 0};
    }
    return (pl_str){NULL, 0};
}

static void not_found(pl_exchange *x)
{
    char list[1024];
    size_t n = 0;
    list[0] = 0;
    for (int i = 0; i < ROUTES && n < sizeof list; i++)
        n += (size_t)snprintf(list + n, sizeof list - n, "%s%.*s %s", i ? ", " : "",
                              PL_FMT(pl_method_names[routes[i].method]), routes[i].path);
    pl_admin_error(x, 404, "not_found", "no such path; there are: %s", list);
}

static void method_not_allowed(pl_exchange *x, const char *allow)
{
    char body[192];
    const pl_header headers[] = {
        {PL_STR("content-type"), PL_STR("application/json")},
        {PL_STR("allow"), pl_str_c(allow)},
    };
    snprintf(body, sizeof body,
             "{\"error\":{\"code\":\"method_not_allowed\",\"message\":\"this path takes %s\"}}",
             allow);
    pl_exchange_respond(x, 405, headers, 2, pl_str_c(body));
}

static void on_request(void *ctx, pl_exchange *x)
{
    pl_admin *a = ctx;
    pl_method method = x->head.method == PL_HEAD ? PL_GET : x->head.method;
    /* clients name their sessions as they like */
    bool sessions = pl_str_starts(x->head.path, PL_STR("/sessions/"));
    char allow[64];
    size_t n = 0;
    for (int i = 0; i < ROUTES; i++) {
        pl_str raw = {NULL, 0}, name = {NULL, 0};
        if (!matches(routes[i].path, x->head.path, &raw))
            continue;
        if (routes[i].method == method) {
            if (raw.n && !pl_admin_decode(x, raw, sessions, &name))
                pl_admin_error(x, 400, "bad_name", "that cannot be a name");
            else
                routes[i].handle(a, x, name);
            return;
        }
        n += (size_t)snprintf(allow + n, sizeof allow - n, "%s%.*s", n ? ", " : "",
                              PL_FMT(pl_method_names[routes[i].method]));
    }
    if (n)
        method_not_allowed(x, allow);
    else
        not_found(x);
}

/* --- who may ask --- */

static void unauthorized(pl_exchange *x)
{
    static const pl_header headers[] = {
        {PL_STR_INIT("content-type"), PL_STR_INIT("application/json")},
        {PL_STR_INIT("www-authenticate"), PL_STR_INIT("Bearer")},
    };
    pl_exchange_respond(x, 401, headers, 2,
                        PL_STR("{\"error\":{\"code\":\"unauthorized\",\"message\":\"this needs the "
                               "admin token: Authorization: Bearer TOKEN\"}}"));
}

/* An address or localhost. Any other name can be made to point here by whoever owns it, and a page
 * that was loaded under it then reads answers as its own (no Origin is sent with such a GET). */
static bool is_this_machine(pl_str host)
{
    static const pl_str suffix = PL_STR_INIT(".localhost");
    pl_str name = {NULL, 0};
    if (host.n == 0 || host.p[0] == '[')
        return true;
    pl_str_cut(&host, ':', &name);
    bool digits = true;
    for (size_t i = 0; i < name.n && digits; i++)
        digits = name.p[i] == '.' || (name.p[i] >= '0' && name.p[i] <= '9');
    if (digits || pl_str_ieq(name, PL_STR("localhost")))
        return true;
    return name.n > suffix.n && pl_str_ieq((pl_str){name.p + name.n - suffix.n, suffix.n}, suffix);
}

static bool on_head(void *ctx, pl_exchange *x)
{
    const pl_admin *a = ctx;
    /* browsers name the page's origin whenever it could matter; tools never do */
    if (pl_head_find(&x->head, PL_STR("origin")).p) {
        pl_admin_error(x, 403, "forbidden", "the admin API takes no requests from web pages");
        return false;
    }
    pl_str token = a->router->config.admin_token;
    if (token.n == 0 && !is_this_machine(pl_head_find(&x->head, PL_STR("host")))) {
        pl_admin_error(x, 403, "forbidden",
                       "without a token the admin API is asked by its address or as localhost");
        return false;
    }
    if (token.n == 0)
        return true;
    pl_str given = pl_head_find(&x->head, PL_STR("authorization")), scheme = {NULL, 0};
    if (given.p)
        pl_str_cut(&given, ' ', &scheme);
    if (pl_str_ieq(scheme, PL_STR("bearer")) && pl_str_eq_secret(pl_str_trim(given), token))
        return true;
    unauthorized(x);
    return false;
}

static void on_gone(void *ctx, pl_exchange *x)
{
    pl_admin_wait *w = x->user;
    if (w)
        w->x = NULL;
}

static void render_error(void *ctx, pl_str path, int status, const char *message, pl_buf *body)
{
    json_t *j = json_pack("{s:{s:s, s:s}}", "error", "code",
                          status >= 500 ? "unavailable" : "bad_request", "message", message);
    char *text = j ? json_dumps(j, 0) : NULL;
    if (text && pl_buf_add(body, text, strlen(text)) != 0)
        body->n = 0;
    free(text);
    json_decref(j);
}

/* --- start and stop --- */

static const pl_handlers handlers = {on_head, on_request, on_gone, NULL, render_error};

static void on_freed(uv_handle_t *h)
{
    free(h->data);
}

/* The connections' own close callbacks, which still count down in here, run in the same turn as
 * this one: one turn later nothing is left that could. */
static void on_last_closed(uv_handle_t *h)
{
    pl_admin *a = h->data;
    uv_timer_init(h->loop, &a->last);
    a->last.data = a;
    uv_close((uv_handle_t *)&a->last, on_freed);
}

void pl_admin_stop(pl_admin *a)
{
    if (a->server) {
        pl_server_close_all(a->server);
        pl_server_free(a->server);
    }
    uv_close((uv_handle_t *)&a->last, on_last_closed);
}

int pl_admin_start(pl_router *r, pl_admin **out, pl_errbuf *eb)
{
    struct sockaddr_storage addr;
    char text[80];
    *out = NULL;
    int rc = pl_parse_listen(r->config.admin_listen, &addr, eb);
    if (rc != 0)
        return rc;
    pl_admin *a = calloc(1, sizeof *a);
    if (!a)
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    a->router = r;
    a->started_at = (double)pl_now_ns() / 1e9;
    uv_timer_init(&r->control, &a->last);
    a->last.data = a;

    pl_server_options o;
    pl_server_options_default(&o);
    o.limits.body_bytes = BODY_MAX;
    o.connections = &a->connections;
    o.max_connections = CONNECTIONS_MAX;
    o.body_memory = &a->body_memory;
    o.max_body_memory = BODY_MEMORY_MAX;
    a->server = pl_server_new(&r->control, &r->control_wheel, &o, &handlers, a);
    if (!a->server) {
        pl_admin_stop(a);
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    }
    rc = pl_server_listen(a->server, (const struct sockaddr *)&addr, false, &r->admin_port);
    if (rc != 0) {
        pl_admin_stop(a);
        pl_addr_text((const struct sockaddr *)&addr, text, sizeof text);
        return pl_fail(eb, PL_EIO, "cannot listen on %s for the admin API: %s%s", text,
                       uv_strerror(rc),
                       rc == UV_EADDRINUSE ? " (use --admin HOST:PORT or --admin off)" : "");
    }
    if (addr.ss_family == AF_INET6)
        ((struct sockaddr_in6 *)&addr)->sin6_port = htons((uint16_t)r->admin_port);
    else
        ((struct sockaddr_in *)&addr)->sin_port = htons((uint16_t)r->admin_port);
    pl_addr_text((const struct sockaddr *)&addr, text, sizeof text);
    pl_log(PL_LOG_INFO, "admin_listening", "http://%s%s", text,
           r->config.admin_token.n ? " (token needed)" : "");
    *out = a;
    return 0;
}
