/* Engines: what a spec may say, identity, references, and why one cannot be picked. Specs are
 * parsed on the thread that adds (start-up, admin API, SIGHUP); references and pl_engine_why are
 * for all threads. An engine owns its workers; nothing else is owned here. */
#include "fleet/engine.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "policy_abi.h"

const char *pl_engine_kind_name(pl_engine_kind k)
{
    switch (k) {
    case PL_KIND_AUTO:
        return "auto";
    case PL_KIND_SGLANG:
        return "sglang";
    case PL_KIND_VLLM:
        return "vllm";
    default:
        return "other";
    }
}

const char *pl_health_name(pl_health h)
{
    return h == PL_HEALTH_UP ? "up" : h == PL_HEALTH_DOWN ? "down" : "unknown";
}

const char *pl_admin_state_name(pl_admin_state s)
{
    return s == PL_ENGINE_ACTIVE ? "active" : s == PL_ENGINE_DRAINING ? "draining" : "removed";
}

/* --- the URL --- */

/* A URL may carry secrets in its userinfo and query, so messages quote only this much of it. */
static pl_str quotable(pl_str url)
{
    for (size_t i = 0; i < url.n; i++)
        if (url.p[i] == '@' || url.p[i] == '?' || url.p[i] == '#')
            return PL_STR("...");
    return url.n > 200 ? (pl_str){url.p, 200} : url;
}

static bool has(pl_str s, char c)
{
    return s.n && memchr(s.p, c, s.n) != NULL;
}

/* Everything but host and port is refused with what to write instead. *authority is what is left.
 */
static int strip_url(pl_str url, pl_str *authority, pl_errbuf *eb)
{
    for (size_t i = 0; i < url.n; i++)
        if ((unsigned char)url.p[i] <= ' ' || (unsigned char)url.p[i] >= 0x7f)
            return pl_fail(eb, PL_EINVALID,
                           "engine URL has a space, a control character or a byte outside ASCII at "
                           "offset %zu: write http://HOST:PORT",
                           i);
    pl_str quoted = quotable(url), rest = url;
    if (url.n >= 8 && pl_str_ieq((pl_str){url.p, 8}, PL_STR("https://")))
        return pl_fail(eb, PL_EINVALID,
                       "engine URL \"%.*s\": TLS to engines is not supported yet; use "
                       "http://HOST:PORT, or put a TLS proxy in between",
                       PL_FMT(quoted));
    if (url.n < 7 || !pl_str_ieq((pl_str){url.p, 7}, PL_STR("http://")))
        return pl_fail(eb, PL_EINVALID,
                       "engine URL \"%.*s\" must begin with http://, for example "
                       "http://127.0.0.1:30000",
                       PL_FMT(quoted));
    rest = (pl_str){url.p + 7, url.n - 7};
    if (has(rest, '@'))
        return pl_fail(eb, PL_EINVALID,
                       "engine URL has a user name or password before '@': remove it (engines are "
                       "addressed by http://HOST:PORT only)");
    if (has(rest, '?') || has(rest, '#'))
        return pl_fail(eb, PL_EINVALID,
                       "engine URL has a query or fragment: remove it (engines "
                       "are addressed by http://HOST:PORT only)");
    pl_str path = {NULL, 0};
    const char *slash = rest.n ? memchr(rest.p, '/', rest.n) : NULL;
    if (slash) {
        path = (pl_str){slash, (size_t)(rest.p + rest.n - slash)};
        rest.n = (size_t)(slash - rest.p);
    }
    if (path.n > 1)
        return pl_fail(eb, PL_EINVALID,
                       "engine URL \"%.*s\" has a path: write http://%.*s (the router adds the "
                       "API's paths itself)",
                       PL_FMT(quoted), PL_FMT(rest));
    *authority = rest;
    return 0;
}

static int parse_port(pl_str s, pl_str quoted, int *port, pl_errbuf *eb)
{
    uint64_t n;
    if (pl_str_u64(s, 65535, &n) != 0 || n == 0)
        return pl_fail(eb, PL_EINVALID,
                       "engine URL \"%.*s\": the port must be a number from 1 to 65535",
                       PL_FMT(quoted));
    *port = (int)n;
    return 0;
}

static bool is_host_name(pl_str s)
{
    if (s.n == 0 || s.n > 253)
        return false;
    for (size_t i = 0; i < s.n; i++)
        if (!isalnum((unsigned char)s.p[i]) && !strchr("-._", s.p[i]))
            return false;
    return true;
}

static bool looks_like_ipv4(pl_str s)
{
    for (size_t i = 0; i < s.n; i++)
        if (s.p[i] != '.' && (s.p[i] < '0' || s.p[i] > '9'))
            return false;
    return true;
}

static int parse_url(pl_engine *e, pl_str url, pl_errbuf *eb)
{
    pl_str rest = {NULL, 0}, quoted = quotable(url), host;
    int rc = strip_url(url, &rest, eb);
    if (rc != 0)
        return rc;
    e->port = 80;
    bool v6 = rest.n && rest.p[0] == '[';
    if (v6) {
        const char *end = memchr(rest.p, ']', rest.n);
        if (!end)
            return pl_fail(eb, PL_EINVALID,
                           "engine URL \"%.*s\": the IPv6 address has no closing "
                           "']'",
                           PL_FMT(quoted));
        host = (pl_str){rest.p + 1, (size_t)(end - rest.p - 1)};
        rest = (pl_str){end + 1, (size_t)(rest.p + rest.n - end - 1)};
    } else {
        const char *colon = rest.n ? memchr(rest.p, ':', rest.n) : NULL;
        host = (pl_str){rest.p, colon ? (size_t)(colon - rest.p) : rest.n};
        rest = colon ? (pl_str){colon, rest.n - host.n} : (pl_str){NULL, 0};
        if (rest.n > 1 && has((pl_str){rest.p + 1, rest.n - 1}, ':'))
            return pl_fail(eb, PL_EINVALID,
                           "engine URL \"%.*s\": write an IPv6 address in brackets, for example "
                           "http://[::1]:30000",
                           PL_FMT(quoted));
    }
    if (rest.n && rest.p[0] != ':')
        return pl_fail(eb, PL_EINVALID, "engine URL \"%.*s\": only :PORT may follow the address",
                       PL_FMT(quoted));
    if (rest.n && (rc = parse_port((pl_str){rest.p + 1, rest.n - 1}, quoted, &e->port, eb)) != 0)
        return rc;
    if (host.n >= sizeof e->host || (!v6 && !is_host_name(host)))
        return pl_fail(eb, PL_EINVALID,
                       "engine URL \"%.*s\": \"%.*s\" is not a host name or address (letters, "
                       "digits, '-', '.', '_')",
                       PL_FMT(quoted), (int)(host.n > 100 ? 100 : host.n), host.p);
    for (size_t i = 0; i < host.n; i++)
        e->host[i] = (char)tolower((unsigned char)host.p[i]);
    unsigned char address[16];
    if (v6 && inet_pton(AF_INET6, e->host, address) != 1)
        return pl_fail(eb, PL_EINVALID,
                       "engine URL \"%.*s\": \"%s\" is not an IPv6 address (zones are not "
                       "supported)",
                       PL_FMT(quoted), e->host);
    if (!v6 && looks_like_ipv4(host) && inet_pton(AF_INET, e->host, address) != 1)
        return pl_fail(eb, PL_EINVALID, "engine URL \"%.*s\": \"%s\" is not an IPv4 address",
                       PL_FMT(quoted), e->host);
    snprintf(e->url, sizeof e->url, v6 ? "http://[%s]:%d" : "http://%s:%d", e->host, e->port);
    return 0;
}

/* --- the rest of the spec --- */

static int set_name(pl_engine *e, pl_str given, pl_errbuf *eb)
{
    pl_str name = given.n ? given : pl_str_c(e->url + strlen("http://"));
    if (name.n >= sizeof e->name)
        return given.n ? pl_fail(eb, PL_EINVALID,
                                 "engine name \"%.*s...\" is longer than 127 bytes", 40, name.p)
                       : pl_fail(eb, PL_EINVALID,
                                 "engine %s: its address is too long to be its name: give it one "
                                 "(NAME=URL)",
                                 e->url);
    for (size_t i = 0; i < name.n; i++)
        if (!isalnum((unsigned char)name.p[i]) && (!name.p[i] || !strchr("._:[]-", name.p[i])))
            return pl_fail(eb, PL_EINVALID,
                           "engine name has the byte 0x%02x at offset %zu: use letters, digits and "
                           "the characters . _ : - [ ]",
                           (unsigned char)name.p[i], i);
    memcpy(e->name, name.p, name.n);
    return 0;
}

static int check_numbers(const pl_engine_spec *s, pl_errbuf *eb)
{
    if (!(s->weight >= 0) || !isfinite(s->weight))
        return pl_fail(eb, PL_EINVALID, "engine %.*s: weight must be a number above 0",
                       PL_FMT(quotable(s->url)));
    if (s->dp_size < 0 || s->dp_size > PL_MAX_WORKERS)
        return pl_fail(eb, PL_EINVALID, "engine %.*s: dp_size must be from 1 to %d",
                       PL_FMT(quotable(s->url)), PL_MAX_WORKERS);
    if (s->max_inflight < 0 || s->max_queued_prefill_tokens < 0)
        return pl_fail(eb, PL_EINVALID,
                       "engine %.*s: max_inflight and max_queued_prefill_tokens must not be "
                       "negative (0: no cap)",
                       PL_FMT(quotable(s->url)));
    return 0;
}

/* It goes into a header line as it is. The message never shows it. */
static int set_key(pl_engine *e, pl_str key, pl_errbuf *eb)
{
    if (key.n >= sizeof e->api_key)
        return pl_fail(eb, PL_EINVALID, "engine %s: api_key is longer than %d bytes", e->name,
                       PL_ENGINE_KEY_MAX);
    for (size_t i = 0; i < key.n; i++)
        if ((unsigned char)key.p[i] <= 0x20 || (unsigned char)key.p[i] >= 0x7f)
            return pl_fail(eb, PL_EINVALID,
                           "engine %s: api_key has a space, a control character or a byte above "
                           "126 at offset %zu",
                           e->name, i);
    if (key.n)
        memcpy(e->api_key, key.p, key.n);
    return 0;
}

/* ZeroMQ itself judges an address when it is used; here only what could never be one. */
static int set_events(pl_engine *e, const pl_engine_spec *s, pl_errbuf *eb)
{
    const struct {
        const char *name;
        pl_str from;
        char *to;
        size_t cap;
        bool address;
    } list[] = {
        {"endpoint", s->events_endpoint, e->events_endpoint, sizeof e->events_endpoint, true},
        {"replay", s->events_replay, e->events_replay, sizeof e->events_replay, true},
        {"topic", s->events_topic, e->events_topic, sizeof e->events_topic, false}};
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        if (list[i].from.n >= list[i].cap)
            return pl_fail(eb, PL_EINVALID, "engine %.*s: kv_events.%s is too long",
                           PL_FMT(quotable(s->url)), list[i].name);
        if (list[i].address && list[i].from.n && !pl_str_starts(list[i].from, PL_STR("tcp://")) &&
            !pl_str_starts(list[i].from, PL_STR("ipc://")))
            return pl_fail(eb, PL_EINVALID,
                           "engine %.*s: kv_events.%s must be tcp://HOST:PORT or ipc://PATH",
                           PL_FMT(quotable(s->url)), list[i].name);
        if (list[i].from.n)
            memcpy(list[i].to, list[i].from.p, list[i].from.n);
    }
    e->events_mode = s->events_mode;
    if (e->events_mode == PL_EVENTS_AUTO && e->events_endpoint[0])
        e->events_mode = PL_EVENTS_CONNECT;
    if ((e->events_mode == PL_EVENTS_CONNECT || e->events_mode == PL_EVENTS_BIND) &&
        !e->events_endpoint[0])
        return pl_fail(eb, PL_EINVALID, "engine %.*s: kv_events.endpoint is missing",
                       PL_FMT(quotable(s->url)));
    e->events_one_stream = s->events_one_stream;
    e->block_tokens = s->block_tokens;
    return 0;
}

static void init_workers(pl_engine *e)
{
    for (int i = 0; i < e->workers_n; i++) {
        pl_worker_state *w = &e->workers[i];
        w->engine = e;
        w->rank = i;
        w->slot = -1;
        w->running_requests = w->waiting_requests = w->kv_usage = -1;
        w->block_tokens = (int32_t)e->block_tokens;
        if (e->workers_n == 1)
            snprintf(w->name, sizeof w->name, "%s", e->name);
        else
            snprintf(w->name, sizeof w->name, "%s/%d", e->name, i);
    }
}

int pl_engine_new(const pl_engine_spec *spec, pl_engine **out, pl_errbuf *eb)
{
    static _Atomic uint64_t next_id = 1;
    *out = NULL;
    int rc = check_numbers(spec, eb);
    if (rc != 0)
        return rc;
    int n = spec->dp_size ? spec->dp_size : 1;
    pl_engine *e = calloc(1, sizeof *e + (size_t)n * sizeof e->workers[0]);
    if (!e)
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    rc = parse_url(e, spec->url, eb);
    if (rc == 0)
        rc = set_name(e, spec->name, eb);
    if (rc == 0)
        rc = set_events(e, spec, eb);
    if (rc == 0)
        rc = set_key(e, spec->api_key, eb);
    if (rc != 0) {
        free(e);
        return rc;
    }
    e->refs = 1;
    e->weight = spec->weight > 0 ? spec->weight : 1;
    e->max_inflight = spec->max_inflight;
    e->max_queued_prefill_tokens = spec->max_queued_prefill_tokens;
    e->from_config = spec->from_config;
    e->models_given = spec->models && spec->models_n > 0;
    e->id = atomic_fetch_add(&next_id, 1);
    e->kind = spec->kind;
    e->workers_n = n;
    init_workers(e);
    *out = e;
    return 0;
}

pl_engine *pl_engine_ref(pl_engine *e)
{
    atomic_fetch_add_explicit(&e->refs, 1, memory_order_relaxed);
    return e;
}

void pl_engine_unref(pl_engine *e)
{
    if (e && atomic_fetch_sub_explicit(&e->refs, 1, memory_order_acq_rel) == 1)
        free(e);
}

int pl_engine_why(const pl_engine *e, const pl_breaker_options *o, uint64_t now_ns)
{
    if (atomic_load_explicit(&e->admin, memory_order_relaxed) != PL_ENGINE_ACTIVE)
        return PL_WHY_DRAINING;
    if (atomic_load_explicit(&e->health, memory_order_relaxed) != PL_HEALTH_UP)
        return PL_WHY_UNHEALTHY;
    return pl_breaker_allows(e, o, now_ns) ? PL_WHY_ELIGIBLE : PL_WHY_BREAKER_OPEN;
}
