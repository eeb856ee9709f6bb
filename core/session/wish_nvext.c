/* nvext, the extension object that Dynamo's clients send, as far as it concerns routing, and
 * cache_control: see wish.h. Called by wish.c on a loop's thread; owns nothing. Members that are
 * not known here are passed over, as Dynamo does; known ones of a wrong type are refused, as Dynamo
 * does. */
#include "session/wish_inner.h"

#include <stdio.h>

#include "base/err.h"
#include "http/json.h"

/* Whole numbers up to here are exact in a double. */
#define EXACT 9007199254740991.0

enum { SESSION_ID, ACTION, TIMEOUT, HISTORY, PARENT, CONTROL_N };

static int read_action(const pl_wish_reader *r, const pl_member *m, pl_wish *w)
{
    static const struct {
        pl_str name;
        pl_wish_action action;
    } known[] = {{PL_STR_INIT("open"), PL_WISH_OPEN},
                 {PL_STR_INIT("bind"), PL_WISH_BIND},
                 {PL_STR_INIT("close"), PL_WISH_CLOSE}};
    if (!pl_wish_there(m))
        return 0;
    pl_json_name given = {{m->raw.p + 1, m->raw.n - 2}, m->escaped};
    for (size_t i = 0; m->type == PL_JSON_STRING && i < sizeof known / sizeof *known; i++)
        if (pl_json_name_is(&given, known[i].name)) {
            w->action = known[i].action;
            return 0;
        }
    return pl_wish_refuse(r, "nvext.session_control.action",
                          "\"open\", \"bind\" or \"close\" (absent: a turn)", m);
}

static int read_history(const pl_wish_reader *r, const pl_member *m, pl_wish *w)
{
    if (!pl_wish_there(m))
        return 0;
    pl_json_name given = {{m->raw.p + 1, m->raw.n - 2}, m->escaped};
    w->delta = m->type == PL_JSON_STRING && pl_json_name_is(&given, PL_STR("delta"));
    if (w->delta || (m->type == PL_JSON_STRING && pl_json_name_is(&given, PL_STR("full"))))
        return 0;
    return pl_wish_refuse(r, "nvext.session_control.history", "\"full\" or \"delta\"", m);
}

static int read_control(pl_wish_reader *r, const pl_member *control, pl_wish *w)
{
    static const pl_str names[CONTROL_N] = {[SESSION_ID] = PL_STR_INIT("session_id"),
                                            [ACTION] = PL_STR_INIT("action"),
                                            [TIMEOUT] = PL_STR_INIT("timeout"),
                                            [HISTORY] = PL_STR_INIT("history"),
                                            [PARENT] = PL_STR_INIT("parent_session_id")};
    pl_member m[CONTROL_N];
    r->code = "invalid_session";
    int rc = pl_wish_members(r, "nvext.session_control", control, names, CONTROL_N, m);
    if (rc == 0)
        rc = pl_wish_id(r, "nvext.session_control.session_id", &m[SESSION_ID], &w->id);
    if (rc == 0)
        rc = pl_wish_needs_id(r, "nvext.session_control.session_id", w->id);
    if (rc == 0)
        rc = read_action(r, &m[ACTION], w);
    if (rc == 0 && (w->action == PL_WISH_OPEN || w->action == PL_WISH_BIND)) {
        rc = pl_wish_timeout(r, "nvext.session_control.timeout", &m[TIMEOUT], &w->timeout_seconds);
        w->timeout_given = pl_wish_there(&m[TIMEOUT]);
    } else if (rc == 0 && pl_wish_there(&m[TIMEOUT]) && m[TIMEOUT].type != PL_JSON_NUMBER) {
        rc = pl_wish_refuse(r, "nvext.session_control.timeout", "a number of seconds", &m[TIMEOUT]);
    }
    if (rc == 0)
        rc = read_history(r, &m[HISTORY], w);
    if (rc == 0)
        rc = pl_wish_id(r, "nvext.session_control.parent_session_id", &m[PARENT], &w->parent);
    if (rc == 0)
        w->source = PL_WISH_CONTROL;
    return rc;
}

static int read_hints(const pl_wish_reader *r, const pl_member *hints, pl_wish *w)
{
    static const pl_str names[] = {PL_STR_INIT("priority"), PL_STR_INIT("strict_priority"),
                                   PL_STR_INIT("osl")};
    pl_member m[3];
    int rc = pl_wish_members(r, "nvext.agent_hints", hints, names, 3, m);
    if (rc == 0)
        rc = pl_wish_whole(r, "nvext.agent_hints.priority", &m[0], INT32_MIN, INT32_MAX,
                           &w->priority);
    if (rc == 0)
        rc = pl_wish_whole(r, "nvext.agent_hints.strict_priority", &m[1], 0, UINT32_MAX,
                           &w->strict_priority);
    if (rc == 0)
        rc = pl_wish_whole(r, "nvext.agent_hints.osl", &m[2], 0, UINT32_MAX, &w->output_tokens);
    return rc;
}

static int read_annotations(const pl_wish_reader *r, const pl_member *list, pl_wish *w)
{
    static const pl_str query = PL_STR_INIT("query_instance_id:");
    pl_json j;
    pl_member m;
    unsigned i = 0;
    if (list->type != PL_JSON_ARRAY)
        return pl_wish_refuse(r, "nvext.annotations", "a list of strings", list);
    pl_json_init(&j, list->raw, PL_JSON_DEPTH_MAX, false);
    if (pl_json_enter(&j, '[') == 0)
        while (pl_json_item(&j) > 0 && pl_json_value(&j, &m) == 0) {
            pl_str s = {NULL, 0};
            char at[48];
            snprintf(at, sizeof at, "nvext.annotations[%u]", i++);
            if (m.type != PL_JSON_STRING)
                return pl_wish_refuse(r, at, "a string", &m);
            int rc = pl_wish_text(r, at, &m, &s);
            if (rc != 0)
                return rc;
            w->query_only |= pl_str_starts(s, query);
        }
    return 0;
}

/* "5m", "1h", "90s", "90", as seconds; -1 when it is none of these. */
static double ttl_seconds(const pl_member *m)
{
    double v = -1, unit = 1;
    if (m->type == PL_JSON_NUMBER)
        return pl_member_number(m, &v) == 0 ? v : -1;
    if (m->type != PL_JSON_STRING || m->raw.n < 3)
        return -1;
    pl_str s = {m->raw.p + 1, m->raw.n - 2};
    char last = s.p[s.n - 1];
    if (last == 's' || last == 'm' || last == 'h') {
        unit = last == 's' ? 1 : last == 'm' ? 60 : 3600;
        s.n--;
    }
    return pl_str_double(s, &v) == 0 ? v * unit : -1;
}

int pl_wish_retention(const pl_wish_reader *r, const char *path, const pl_member *cache,
                      bool strict, pl_wish *w)
{
    static const pl_str names[] = {PL_STR_INIT("type"), PL_STR_INIT("ttl")};
    pl_member m[2];
    char at[64];
    if (!strict && cache->type != PL_JSON_OBJECT)
        return 0;
    int rc = pl_wish_members(r, path, cache, names, 2, m);
    if (rc != 0)
        return strict ? rc : 0;
    pl_json_name type = {{m[0].raw.p ? m[0].raw.p + 1 : "", m[0].raw.n < 2 ? 0 : m[0].raw.n - 2},
                         m[0].escaped};
    if (m[0].type != PL_JSON_STRING || !pl_json_name_is(&type, PL_STR("ephemeral"))) {
        snprintf(at, sizeof at, "%s.type", path);
        return strict ? pl_wish_refuse(r, at, "\"ephemeral\"", &m[0]) : 0;
    }
    double v = pl_wish_there(&m[1]) ? ttl_seconds(&m[1]) : 300;
    if (!(v >= 1 && v <= r->o->max_timeout_seconds)) {
        char allowed[96];
        snprintf(at, sizeof at, "%s.ttl", path);
        snprintf(allowed, sizeof allowed,
                 "seconds from 1 to %.0f, or text like \"5m\" or \"1h\" within them",
                 r->o->max_timeout_seconds);
        return strict ? pl_wish_refuse(r, at, allowed, &m[1]) : 0;
    }
    w->retention_seconds = v;
    return 0;
}

enum {
    CONTROL,
    HINTS,
    ANNOTATIONS,
    CACHE_CONTROL,
    CACHE_SALT,
    INSTANCE,
    RANK,
    PREFILL_INSTANCE,
    DECODE_INSTANCE,
    PREFILL_RANK,
    NVEXT_N
};

int pl_wish_nvext(const pl_wish_reader *reader, const pl_member *nvext, pl_wish *w)
{
    static const pl_str names[NVEXT_N] = {[CONTROL] = PL_STR_INIT("session_control"),
                                          [HINTS] = PL_STR_INIT("agent_hints"),
                                          [ANNOTATIONS] = PL_STR_INIT("annotations"),
                                          [CACHE_CONTROL] = PL_STR_INIT("cache_control"),
                                          [CACHE_SALT] = PL_STR_INIT("cache_salt"),
                                          [INSTANCE] = PL_STR_INIT("backend_instance_id"),
                                          [RANK] = PL_STR_INIT("dp_rank"),
                                          [PREFILL_INSTANCE] = PL_STR_INIT("prefill_worker_id"),
                                          [DECODE_INSTANCE] = PL_STR_INIT("decode_worker_id"),
                                          [PREFILL_RANK] = PL_STR_INIT("prefill_dp_rank")};
    pl_wish_reader r = *reader;
    pl_member m[NVEXT_N];
    r.code = "invalid_nvext";
    int rc = pl_wish_members(&r, "nvext", nvext, names, NVEXT_N, m);
    if (rc == 0 && pl_wish_there(&m[HINTS]))
        rc = read_hints(&r, &m[HINTS], w);
    if (rc == 0 && pl_wish_there(&m[ANNOTATIONS]))
        rc = read_annotations(&r, &m[ANNOTATIONS], w);
    if (rc == 0)
        rc = pl_wish_text(&r, "nvext.cache_salt", &m[CACHE_SALT], &w->cache_salt);
    if (w->cache_salt.n == 0)
        w->cache_salt.p = NULL; /* the top level's is looked at */
    for (int i = INSTANCE; i < NVEXT_N && !r.o->trusted; i++)
        w->pins_removed += pl_wish_there(&m[i]);
    if (rc == 0 && r.o->trusted)
        rc = pl_wish_whole(&r, "nvext.backend_instance_id", &m[INSTANCE], 0, EXACT, &w->instance);
    if (rc == 0 && r.o->trusted)
        rc = pl_wish_whole(&r, "nvext.dp_rank", &m[RANK], 0, UINT32_MAX, &w->rank);
    r.code = "invalid_cache_control";
    if (rc == 0 && pl_wish_there(&m[CACHE_CONTROL]))
        rc = pl_wish_retention(&r, "nvext.cache_control", &m[CACHE_CONTROL], true, w);
    if (rc == 0 && pl_wish_there(&m[CONTROL]))
        rc = read_control(&r, &m[CONTROL], w);
    return rc;
}
