/* What a request says about its session: see wish.h. Called by the proxy on a loop's thread once
 * for each request, after the scan; owns nothing. Here: SGLang's members and bodies, what all
 * readers share, and the order of the ways in. nvext is in wish_nvext.c, headers in wish_header.c.
 */
#include "session/wish_inner.h"

#include <math.h>
#include <stdio.h>

#include "base/err.h"
#include "http/json.h"

/* --- members --- */

int pl_wish_refuse(const pl_wish_reader *r, const char *path, const char *allowed,
                   const pl_member *m)
{
    enum { SHOWN = 48 }; /* bytes of a value that is quoted back */
    r->e->status = 400;
    r->e->code = r->code;
    switch (m->type) {
    case PL_JSON_ABSENT:
    case PL_JSON_NULL:
        return pl_fail(&r->e->text, PL_EINVALID, "%s must be %s, and is missing", path, allowed);
    case PL_JSON_ARRAY:
        return pl_fail(&r->e->text, PL_EINVALID, "%s must be %s, not a list", path, allowed);
    case PL_JSON_OBJECT:
        return pl_fail(&r->e->text, PL_EINVALID, "%s must be %s, not an object", path, allowed);
    default:
        break;
    }
    if (m->raw.n <= SHOWN)
        return pl_fail(&r->e->text, PL_EINVALID, "%s must be %s, not %.*s", path, allowed,
                       PL_FMT(m->raw));
    return pl_fail(&r->e->text, PL_EINVALID, "%s must be %s, not %.*s... (%zu bytes%s)", path,
                   allowed, PL_FMT(pl_str_clip(m->raw, SHOWN)),
                   m->raw.n - (m->type == PL_JSON_STRING ? 2 : 0), m->escaped ? " as written" : "");
}

int pl_wish_no_memory(const pl_wish_reader *r)
{
    r->e->status = 500;
    r->e->code = "out_of_memory";
    return pl_fail(&r->e->text, PL_ENOMEM, "the router is out of memory");
}

int pl_wish_members(const pl_wish_reader *r, const char *path, const pl_member *object,
                    const pl_str *names, int n, pl_member *out)
{
    pl_json j;
    pl_json_name name;
    pl_member m;
    memset(out, 0, (size_t)n * sizeof *out);
    if (object->type != PL_JSON_OBJECT)
        return pl_wish_refuse(r, path, "an object", object);
    pl_json_init(&j, object->raw, PL_JSON_DEPTH_MAX, false);
    if (pl_json_enter(&j, '{') == 0)
        while (pl_json_key(&j, &name) > 0 && pl_json_value(&j, &m) == 0) {
            int i = 0;
            while (i < n && !pl_json_name_is(&name, names[i]))
                i++;
            if (i == n)
                continue;
            if (out[i].type != PL_JSON_ABSENT) {
                r->e->status = 400;
                r->e->code = r->code;
                return pl_fail(&r->e->text, PL_EINVALID, "%s%s%.*s is given twice", path,
                               *path ? "." : "", PL_FMT(names[i]));
            }
            out[i] = m;
        }
    return 0;
}

int pl_wish_text(const pl_wish_reader *r, const char *path, const pl_member *m, pl_str *out)
{
    if (!pl_wish_there(m))
        return 0;
    if (m->type != PL_JSON_STRING)
        return pl_wish_refuse(r, path, "a string", m);
    pl_str s = pl_member_string(r->a, m);
    if (!s.p)
        return pl_wish_no_memory(r);
    *out = s;
    return 0;
}

int pl_wish_id(const pl_wish_reader *r, const char *path, const pl_member *m, pl_str *out)
{
    if (!pl_wish_there(m))
        return 0;
    if (m->type != PL_JSON_STRING)
        return pl_wish_refuse(r, path, "a string of 1 to 256 bytes", m);
    /* an escape takes 6 bytes at most for one of the result */
    pl_str s = {NULL, 0};
    if (m->raw.n - 2 <= 6 * PL_SESSION_MAX_ID_BYTES) {
        s = pl_member_string(r->a, m);
        if (!s.p)
            return pl_wish_no_memory(r);
    }
    if (s.n == 0 || s.n > PL_SESSION_MAX_ID_BYTES)
        return pl_wish_refuse(r, path, "a string of 1 to 256 bytes", m);
    for (size_t i = 0; i < s.n; i++)
        if ((unsigned char)s.p[i] < 0x20 || s.p[i] == 0x7f)
            return pl_wish_refuse(r, path, "a string without control characters", m);
    *out = s;
    return 0;
}

int pl_wish_needs_id(const pl_wish_reader *r, const char *path, pl_str id)
{
    static const pl_member missing = {.type = PL_JSON_ABSENT};
    return id.p ? 0 : pl_wish_refuse(r, path, "a string of 1 to 256 bytes", &missing);
}

int pl_wish_whole(const pl_wish_reader *r, const char *path, const pl_member *m, double low,
                  double high, double *out)
{
    double v;
    if (!pl_wish_there(m))
        return 0;
    if (pl_member_number(m, &v) != 0 || v < low || v > high || v != floor(v)) {
        char allowed[96];
        snprintf(allowed, sizeof allowed, "a whole number from %.0f to %.0f", low, high);
        return pl_wish_refuse(r, path, allowed, m);
    }
    *out = v;
    return 0;
}

int pl_wish_timeout(const pl_wish_reader *r, const char *path, const pl_member *m, double *out)
{
    double v;
    if (!pl_wish_there(m))
        return 0;
    if (pl_member_number(m, &v) != 0 || v < 1 || v > r->o->max_timeout_seconds) {
        char allowed[96];
        snprintf(allowed, sizeof allowed, "a number of seconds from 1 to %.0f",
                 r->o->max_timeout_seconds);
        return pl_wish_refuse(r, path, allowed, m);
    }
    *out = v;
    return 0;
}

/* --- SGLang's members --- */

static int read_params(const pl_wish_reader *r, const pl_member *m, pl_wish *w)
{
    static const pl_str names[] = {PL_STR_INIT("id")};
    pl_member id;
    pl_str given = {NULL, 0};
    int rc = pl_wish_members(r, "session_params", m, names, 1, &id);
    if (rc == 0)
        rc = pl_wish_id(r, "session_params.id", &id, &given);
    if (rc == 0)
        rc = pl_wish_needs_id(r, "session_params.id", given);
    if (rc != 0)
        return rc;
    if (w->source == PL_WISH_CONTROL && !pl_str_eq(w->id, given)) {
        r->e->status = 400;
        r->e->code = r->code;
        return pl_fail(&r->e->text, PL_EINVALID,
                       "nvext.session_control.session_id and session_params.id name two different "
                       "sessions");
    }
    if (w->source == PL_WISH_NONE)
        w->source = PL_WISH_PARAMS;
    w->id = given;
    w->params_id_raw = id.raw;
    w->delta = true; /* the engine appends what it gets: who writes this sends what is new */
    return 0;
}

static int read_tag(const pl_wish_reader *r, const pl_member *m, pl_wish *w)
{
    pl_str given = {NULL, 0};
    int rc = pl_wish_id(r, "session_id", m, &given);
    if (rc != 0)
        return rc;
    if (w->source != PL_WISH_NONE) {
        w->conflict |= !pl_str_eq(w->id, given);
        return 0;
    }
    w->source = PL_WISH_TAG;
    w->id = given;
    w->timeout_seconds = r->o->header_timeout_seconds;
    return 0;
}

static int read_body(pl_wish_reader *r, const pl_scan *s, pl_wish *w)
{
    const pl_member *nvext = &s->members[PL_MEMBER_NVEXT];
    const pl_member *params = &s->members[PL_MEMBER_SESSION_PARAMS];
    const pl_member *tag = &s->members[PL_MEMBER_SESSION_ID];
    const pl_member *cache = &s->members[PL_MEMBER_CACHE_CONTROL];
    int rc = 0;
    w->nvext = nvext->type != PL_JSON_ABSENT;
    if (pl_wish_there(nvext))
        rc = pl_wish_nvext(r, nvext, w);
    r->code = "invalid_session";
    if (rc == 0 && pl_wish_there(params) && pl_wish_there(tag)) {
        r->e->status = 400;
        r->e->code = r->code;
        return pl_fail(&r->e->text, PL_EINVALID,
                       "session_id and session_params cannot both be given");
    }
    if (rc == 0 && pl_wish_there(params))
        rc = read_params(r, params, w);
    if (rc == 0 && pl_wish_there(tag))
        rc = read_tag(r, tag, w);
    if (rc == 0 && w->retention_seconds < 0 && pl_wish_there(cache))
        rc = pl_wish_retention(r, "cache_control", cache, false, w);
    if (rc == 0 && !w->cache_salt.p && s->members[PL_MEMBER_CACHE_SALT].type == PL_JSON_STRING)
        rc = pl_wish_text(r, "cache_salt", &s->members[PL_MEMBER_CACHE_SALT], &w->cache_salt);
    if (w->cache_salt.n == 0)
        w->cache_salt.p = NULL;
    return rc;
}

static void wish_init(pl_wish *w)
{
    *w = (pl_wish){
        .timeout_seconds = PL_WISH_DEFAULT_TIMEOUT_SECONDS,
        .retention_seconds = -1,
        .output_tokens = -1,
        .priority = NAN,
        .strict_priority = -1,
        .instance = -1,
        .rank = -1,
    };
}

static bool any_member(const pl_scan *s)
{
    static const pl_member_id ours[] = {PL_MEMBER_NVEXT, PL_MEMBER_SESSION_PARAMS,
                                        PL_MEMBER_SESSION_ID, PL_MEMBER_CACHE_CONTROL,
                                        PL_MEMBER_CACHE_SALT};
    bool any = false;
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
        any |= s->members[ours[i]].type != PL_JSON_ABSENT;
    return any;
}

bool pl_wish_any(const pl_scan *s, const pl_head *head, const pl_wish_options *o)
{
    return any_member(s) || pl_wish_any_header(head, o);
}

int pl_wish_read(pl_arena *a, pl_str body, const pl_scan *s, const pl_head *head,
                 const pl_wish_options *o, pl_wish *out, pl_wish_error *e)
{
    pl_wish_reader r = {a, o, e, "invalid_session"};
    wish_init(out);
    int rc = any_member(s) ? read_body(&r, s, out) : 0;
    r.code = "invalid_session";
    if (rc == 0)
        rc = pl_wish_headers(&r, head, out);
    if (rc == 0 && out->parent.p && pl_str_eq(out->parent, out->id))
        out->parent = (pl_str){NULL, 0};
    out->final |= out->action == PL_WISH_CLOSE;
    return rc;
}

/* --- SGLang's own /open_session and /close_session --- */

static int body_members(const pl_wish_reader *r, pl_str body, const pl_str *names, int n,
                        pl_member *out)
{
    pl_member whole = {.type = PL_JSON_OBJECT, .raw = body};
    return pl_wish_members(r, "", &whole, names, n, out);
}

int pl_wish_read_open(pl_arena *a, pl_str body, const pl_scan *s, const pl_wish_options *o,
                      pl_wish *out, pl_wish_open *open, pl_wish_error *e)
{
    static const pl_str names[] = {PL_STR_INIT("streaming"), PL_STR_INIT("timeout"),
                                   PL_STR_INIT("capacity_of_str_len")};
    pl_wish_reader r = {a, o, e, "invalid_session"};
    pl_member m[3];
    wish_init(out);
    *open = (pl_wish_open){.capacity_of_str_len = -1};
    out->source = PL_WISH_PARAMS;
    out->action = PL_WISH_OPEN;
    int rc = body_members(&r, body, names, 3, m);
    if (rc == 0)
        rc = pl_wish_id(&r, "session_id", &s->members[PL_MEMBER_SESSION_ID], &out->id);
    if (rc == 0 && pl_wish_there(&m[0]) && m[0].type != PL_JSON_TRUE && m[0].type != PL_JSON_FALSE)
        rc = pl_wish_refuse(&r, "streaming", "true or false", &m[0]);
    open->streaming = m[0].type == PL_JSON_TRUE;
    if (rc == 0)
        rc = pl_wish_timeout(&r, "timeout", &m[1], &out->timeout_seconds);
    out->timeout_given = pl_wish_there(&m[1]);
    if (rc == 0)
        rc = pl_wish_whole(&r, "capacity_of_str_len", &m[2], 0, INT32_MAX,
                           &open->capacity_of_str_len);
    return rc;
}

int pl_wish_read_close(pl_arena *a, pl_str body, const pl_scan *s, const pl_wish_options *o,
                       pl_wish *out, pl_wish_error *e)
{
    pl_wish_reader r = {a, o, e, "invalid_session"};
    wish_init(out);
    out->source = PL_WISH_PARAMS;
    out->action = PL_WISH_CLOSE;
    out->final = true;
    int rc = pl_wish_id(&r, "session_id", &s->members[PL_MEMBER_SESSION_ID], &out->id);
    return rc ? rc : pl_wish_needs_id(&r, "session_id", out->id);
}
