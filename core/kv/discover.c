/* Discovery of KV event streams: see discover.h. Called on the control thread when an engine was
 * asked about itself, and when a configuration names it. Owns nothing. */
#include "kv/discover.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "kv/block_hash.h"

static json_t *load(pl_str text, pl_errbuf *eb, int *rc)
{
    json_error_t error;
    json_t *root = json_loadb(text.p ? text.p : "", text.n, 0, &error);
    *rc = 0;
    if (!root)
        *rc = pl_fail(eb, PL_ESYNTAX, "line %d: %s", error.line, error.text);
    else if (!json_is_object(root))
        *rc = pl_fail(eb, PL_EPROTOCOL, "not an object");
    if (*rc) {
        json_decref(root);
        return NULL;
    }
    return root;
}

static pl_str text_of(const json_t *object, const char *key)
{
    const json_t *v = json_object_get(object, key);
    return json_is_string(v) ? (pl_str){json_string_value(v), json_string_length(v)} : PL_STR("");
}

/* 0 unless it is a whole number up to max. */
static int64_t number_of(const json_t *object, const char *key, int64_t max)
{
    const json_t *v = json_object_get(object, key);
    json_int_t n = json_is_integer(v) ? json_integer_value(v) : 0;
    return n > 0 && n <= max ? n : 0;
}

static bool is_any(pl_str host)
{
    return host.n == 0 || pl_str_eq(host, PL_STR("*")) || pl_str_eq(host, PL_STR("0.0.0.0")) ||
           pl_str_eq(host, PL_STR("::")) || pl_str_eq(host, PL_STR("[::]"));
}

/* tcp://host:port, with the engine's own host where `of` means any address. */
static bool address(char out[256], pl_str of, pl_str engine_host, int port)
{
    pl_str h = is_any(of) ? engine_host : of;
    if (h.n == 0 || h.n > 200 || memchr(h.p, 0, h.n))
        return false;
    bool bracket = memchr(h.p, ':', h.n) && h.p[0] != '[';
    snprintf(out, 256, "tcp://%s%.*s%s:%d", bracket ? "[" : "", PL_FMT(h), bracket ? "]" : "",
             port);
    return true;
}

static bool topic(char out[256], pl_str t)
{
    if (t.n >= 256 || (t.n && memchr(t.p, 0, t.n)))
        return false;
    if (t.n)
        memcpy(out, t.p, t.n);
    out[t.n] = 0;
    return true;
}

static int from_server_info(const json_t *root, pl_str host, pl_discovered *out, pl_errbuf *eb)
{
    const json_t *kv = json_object_get(root, "kv_events");
    if (!json_is_object(kv) || pl_str_eq(text_of(kv, "publisher"), PL_STR("null")))
        return pl_fail(eb, PL_ENOTFOUND, "the engine publishes no KV events (--kv-events-config)");
    int port = (int)number_of(kv, "endpoint_port_base", 65535);
    if (!port || !address(out->endpoint, text_of(kv, "endpoint_host"), host, port))
        return pl_fail(eb, PL_EPROTOCOL, "kv_events has no endpoint_port_base");
    port = (int)number_of(kv, "replay_endpoint_port_base", 65535);
    if (port)
        address(out->replay, text_of(kv, "replay_endpoint_host"), host, port);
    port = (int)number_of(kv, "snapshot_endpoint_port_base", 65535);
    if (port)
        address(out->snapshot, text_of(kv, "snapshot_endpoint_host"), host, port);
    if (!topic(out->topic, text_of(kv, "topic")))
        return pl_fail(eb, PL_EPROTOCOL, "the topic of kv_events is too long");
    out->mode = PL_FEED_CONNECT;
    out->block_tokens = (uint32_t)number_of(kv, "block_size", PL_BLOCK_TOKENS_MAX);
    out->ranks = (int)number_of(kv, "dp_size", 4096);
    pl_str spec = text_of(root, "speculative_algorithm");
    out->eagle = pl_str_ieq(spec, PL_STR("EAGLE")) || pl_str_ieq(spec, PL_STR("EAGLE3")) ||
                 pl_str_ieq(spec, PL_STR("FROZEN_KV_MTP"));
    return 0;
}

int pl_discover_sglang(pl_str server_info, pl_str host, pl_discovered *out, pl_errbuf *eb)
{
    int rc;
    *out = (pl_discovered){.mode = PL_FEED_INGEST};
    json_t *root = load(server_info, eb, &rc);
    if (!root)
        return rc;
    rc = from_server_info(root, host, out, eb);
    json_decref(root);
    return rc;
}

/* An engine binds an address that means any, and connects to one that names a host. */
static bool engine_binds(pl_str endpoint)
{
    return memchr(endpoint.p, '*', endpoint.n) || memmem(endpoint.p, endpoint.n, "::", 2) ||
           memmem(endpoint.p, endpoint.n, "0.0.0.0", 7) ||
           pl_str_starts(endpoint, PL_STR("ipc://"));
}

/* The address under which what the engine bound can be reached. */
static bool reach(char out[256], pl_str endpoint, pl_str host)
{
    if (pl_str_starts(endpoint, PL_STR("ipc://")))
        return endpoint.n > 6 && topic(out, endpoint);
    if (!pl_str_starts(endpoint, PL_STR("tcp://")))
        return false;
    pl_str rest = {endpoint.p + 6, endpoint.n - 6};
    const char *colon = memrchr(rest.p, ':', rest.n);
    uint64_t port;
    if (!colon ||
        pl_str_u64((pl_str){colon + 1, (size_t)(rest.p + rest.n - colon - 1)}, 65535, &port) ||
        port == 0)
        return false;
    return address(out, (pl_str){rest.p, (size_t)(colon - rest.p)}, host, (int)port);
}

/* Our address that an engine means which connects to this one: ZeroMQ binds numbers, not names. */
static bool bind_to(char out[256], pl_str endpoint)
{
    if (!reach(out, endpoint, PL_STR("*")))
        return false;
    char *host = out + strlen("tcp://"), *colon = strrchr(out, ':');
    size_t n = (size_t)(colon - host);
    if (host[0] == '[' || strspn(host, "0123456789.") == n)
        return true;
    char port[16];
    snprintf(port, sizeof port, "%s", colon);
    bool local = pl_str_eq((pl_str){host, n}, PL_STR("localhost"));
    snprintf(out, 256, "tcp://%s%s", local ? "127.0.0.1" : "*", port);
    return true;
}

static int from_config(const json_t *root, pl_str host, pl_discovered *out, pl_errbuf *eb)
{
    pl_str publisher = text_of(root, "publisher");
    bool off = json_is_false(json_object_get(root, "enable_kv_cache_events"));
    if (off || pl_str_eq(publisher, PL_STR("null")))
        return pl_fail(eb, PL_ENOTFOUND, "this configuration publishes no KV events");
    if (publisher.n && !pl_str_eq(publisher, PL_STR("zmq")))
        return pl_fail(eb, PL_EPROTOCOL, "publisher %.*s is not zmq", PL_FMT(publisher));
    pl_str endpoint = text_of(root, "endpoint");
    if (endpoint.n == 0)
        endpoint = PL_STR("tcp://*:5557"); /* both engines' default */
    out->mode = engine_binds(endpoint) ? PL_FEED_CONNECT : PL_FEED_BIND;
    if (out->mode == PL_FEED_BIND ? !bind_to(out->endpoint, endpoint)
                                  : !reach(out->endpoint, endpoint, host))
        return pl_fail(eb, PL_EPROTOCOL, "endpoint %.*s is not tcp://host:port or ipc://path",
                       PL_FMT(endpoint));
    pl_str replay = text_of(root, "replay_endpoint"), snapshot = text_of(root, "snapshot_endpoint");
    if ((replay.n && !reach(out->replay, replay, host)) ||
        (snapshot.n && !reach(out->snapshot, snapshot, host)))
        return pl_fail(eb, PL_EPROTOCOL,
                       "a replay or snapshot endpoint is not tcp://host:port or ipc://path");
    if (!topic(out->topic, text_of(root, "topic")))
        return pl_fail(eb, PL_EPROTOCOL, "the topic is too long");
    return 0;
}

int pl_discover_config(pl_str kv_events_config, pl_str host, pl_discovered *out, pl_errbuf *eb)
{
    int rc;
    *out = (pl_discovered){.mode = PL_FEED_INGEST};
    json_t *root = load(kv_events_config, eb, &rc);
    if (!root)
        return rc;
    rc = from_config(root, host, out, eb);
    json_decref(root);
    return rc;
}

void pl_discovered_source(const pl_discovered *d, pl_feed_source *s)
{
    s->mode = d->mode;
    s->endpoint = pl_str_c(d->endpoint);
    s->replay = pl_str_c(d->replay);
    s->snapshot = pl_str_c(d->snapshot);
    s->topic = pl_str_c(d->topic);
    if (s->block_tokens == 0)
        s->block_tokens = d->block_tokens;
}
