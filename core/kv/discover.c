/* Discovery of KV event streams: see discover.h. Called on the control thread when an engine was
 * asked about itself. Owns nothing. */
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
