/* JSON events into msgpack: see event_json.h. Called by pl_feed_ingest on its caller's thread. The
 * walk of http/json.h checks every byte; numbers of 64 bits keep all their bits. */
#include "kv/event_json.h"

#include <stdlib.h>

#include "http/json.h"
#include "kv/msgpack.h"

enum { DEPTH_MAX = 32 };

static int convert(pl_json *j, pl_buf *out, unsigned depth);

static int convert_string(pl_str quoted, bool escaped, pl_buf *out)
{
    pl_str raw = {quoted.p + 1, quoted.n - 2};
    if (!escaped)
        return pl_mp_put_str(out, raw);
    char *text = malloc(raw.n);
    if (!text)
        return PL_ENOMEM;
    int rc = pl_mp_put_str(out, (pl_str){text, pl_json_unescape(raw, text)});
    free(text);
    return rc;
}

static int convert_number(pl_str s, pl_buf *out)
{
    uint64_t u;
    double d;
    if (s.n && s.p[0] == '-') {
        pl_str digits = {s.p + 1, s.n - 1};
        if (pl_str_u64(digits, (uint64_t)INT64_MAX + 1, &u) == 0)
            return pl_mp_put_int(out, (int64_t)-u);
    } else if (pl_str_u64(s, UINT64_MAX, &u) == 0) {
        return pl_mp_put_uint(out, u);
    }
    /* what is no number of 64 bits is no hash and no token either */
    return pl_mp_put_real(out, pl_str_double(s, &d) ? 0 : d);
}

static int convert_scalar(pl_json *j, pl_buf *out)
{
    pl_member m;
    int rc = pl_json_value(j, &m);
    if (rc)
        return rc;
    switch (m.type) {
    case PL_JSON_STRING:
        return convert_string(m.raw, m.escaped, out);
    case PL_JSON_NUMBER:
        return convert_number(m.raw, out);
    case PL_JSON_TRUE:
    case PL_JSON_FALSE:
        return pl_mp_put_bool(out, m.type == PL_JSON_TRUE);
    default:
        return pl_mp_put_nil(out);
    }
}

static char next_byte(const pl_json *j)
{
    const char *p = j->p;
    while (p < j->end && (*p == ' ' || *p == '\t' || *p == '\n' || *p == '\r'))
        p++;
    return (char)(p < j->end ? *p : 0);
}

static int convert_key(const pl_json_name *key, pl_buf *out)
{
    if (!key->escaped)
        return pl_mp_put_str(out, key->raw);
    return convert_string((pl_str){key->raw.p - 1, key->raw.n + 2}, true, out);
}

static int convert_object(pl_json *j, pl_buf *out, unsigned depth)
{
    size_t at;
    uint32_t n = 0;
    pl_json_name key;
    int rc = pl_mp_put_open(out, true, &at);
    rc = rc ? rc : pl_json_enter(j, '{');
    while (rc == 0 && (rc = pl_json_key(j, &key)) > 0) {
        rc = convert_key(&key, out);
        rc = rc ? rc : convert(j, out, depth + 1);
        n++;
    }
    if (rc == 0)
        pl_mp_patch(out, at, n);
    return rc;
}

static int convert_array(pl_json *j, pl_buf *out, unsigned depth)
{
    size_t at;
    uint32_t n = 0;
    int rc = pl_mp_put_open(out, false, &at);
    rc = rc ? rc : pl_json_enter(j, '[');
    while (rc == 0 && (rc = pl_json_item(j)) > 0) {
        rc = convert(j, out, depth + 1);
        n++;
    }
    if (rc == 0)
        pl_mp_patch(out, at, n);
    return rc;
}

static int convert(pl_json *j, pl_buf *out, unsigned depth)
{
    char c = next_byte(j);
    if (c != '{' && c != '[')
        return convert_scalar(j, out);
    if (depth >= DEPTH_MAX)
        return pl_json_fail(j, j->p, PL_ELIMIT, "nested too deep");
    return c == '{' ? convert_object(j, out, depth) : convert_array(j, out, depth);
}

/* Whether the object at the text's start has that member. */
static bool has_member(pl_str json, pl_str name)
{
    pl_json j;
    pl_json_name key;
    pl_member value;
    pl_json_init(&j, json, PL_JSON_DEPTH_MAX, false);
    if (pl_json_enter(&j, '{'))
        return false;
    while (pl_json_key(&j, &key) > 0) {
        if (pl_json_name_is(&key, name))
            return true;
        if (pl_json_value(&j, &value))
            return false;
    }
    return false;
}

int pl_event_from_json(pl_str json, pl_buf *out, pl_errbuf *eb)
{
    pl_json j;
    pl_json_init(&j, json, PL_JSON_DEPTH_MAX, true);
    char c = next_byte(&j);
    int rc = 0;
    if (c == '[' || (c == '{' && !has_member(json, PL_STR("events")))) {
        /* events without a batch around them */
        rc = pl_mp_put_map(out, 1);
        rc = rc ? rc : pl_mp_put_str(out, PL_STR("events"));
        if (c == '{')
            rc = rc ? rc : pl_mp_put_array(out, 1);
    }
    rc = rc ? rc : convert(&j, out, 0);
    rc = rc ? rc : pl_json_done(&j);
    if (rc && j.rc)
        return pl_fail(eb, rc, "byte %zu of the events: %s", (size_t)(j.error_pos - json.p),
                       j.error);
    if (rc)
        return pl_fail(eb, rc, "events: %s", pl_strerror(rc));
    if (c != '[' && c != '{')
        return pl_fail(eb, PL_EPROTOCOL, "events are an object or an array");
    return 0;
}
