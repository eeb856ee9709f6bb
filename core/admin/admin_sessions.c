/* The admin API's sessions: list, look at, close. On the control loop, over its handle of the
 * store, which may answer later. */
#include "admin/admin_api.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "session/sessions.h"

#define LIST_DEFAULT 100
#define LIST_MAX     1000

/* Text for JSON of bytes that a client chose. */
static json_t *text(pl_str s)
{
    json_t *j = json_stringn(s.n ? s.p : "", s.n);
    if (j)
        return j;
    pl_str copy = {s.p, s.n};
    char *p = pl_str_dup(copy);
    j = p ? pl_admin_text(p) : NULL;
    free(p);
    return j;
}

static double seconds_since(uint64_t then_ns, uint64_t now_ns)
{
    return then_ns && now_ns > then_ns ? (double)(now_ns - then_ns) / 1e9 : 0;
}

static json_t *session_json(pl_router *r, const pl_session_name *name, const pl_binding *b)
{
    pl_view *v = pl_fleet_view(r->fleet);
    const char *worker = NULL;
    for (int i = 0; v && i < v->workers_n; i++)
        if (v->workers[i]->slot == b->slot && v->workers[i]->generation == b->generation)
            worker = v->workers[i]->name;
    uint64_t now = pl_now_ns();
    double held = pl_binding_held_tokens(b);
    json_t *j = json_pack("{s:o, s:o, s:s, s:s?, s:f, s:f, s:f, s:f, s:I, s:o}", "tenant",
                          text(name->tenant), "id", text(name->id), "kind",
                          b->kind == PL_SESSION_ENGINE_BACKED ? "engine_backed" : "router_only",
                          "worker", worker, "ttl_seconds", b->ttl_ms / 1e3, "expires_in_seconds",
                          b->deadline_ns > now ? (double)(b->deadline_ns - now) / 1e9 : 0.0,
                          "age_seconds", seconds_since(b->opened_at_ns, now), "idle_seconds",
                          seconds_since(b->used_at_ns, now), "turns", (json_int_t)b->turns,
                          "held_tokens", held >= 0 ? json_integer((json_int_t)held) : json_null());
    pl_view_unref(v);
    return j;
}

static pl_session_name name_of(pl_exchange *x, pl_str id)
{
    pl_str tenant = pl_admin_parameter(x, PL_STR("tenant"));
    return (pl_session_name){tenant.p ? tenant : PL_STR("default"), id};
}

static void failed(pl_exchange *x, int rc, const pl_session_name *name)
{
    if (rc == PL_ENOTFOUND)
        pl_admin_error(x, 404, "not_found",
                       "tenant '%.*s' has no session '%.*s' (?tenant=NAME names another)",
                       PL_FMT(name->tenant), PL_FMT(name->id));
    else if (rc == PL_EINVALID)
        pl_admin_error(x, 400, "bad_name",
                       "a session's id has 1 to %d bytes, a tenant's name at most %d",
                       PL_SESSION_MAX_ID_BYTES, PL_SESSION_MAX_TENANT_BYTES);
    else
        pl_admin_error(x, 503, "store_unavailable", "the session store: %s", pl_strerror(rc));
}

/* --- list --- */

typedef struct listing {
    pl_store_list_call call;
    pl_router *router;
    pl_admin_wait *wait;
    json_t *sessions;
} listing;

static void listed(pl_store_list_call *c, const pl_session_name *name, const pl_binding *b)
{
    listing *l = (listing *)c;
    json_array_append_new(l->sessions, session_json(l->router, name, b));
}

static void list_done(pl_store_list_call *c)
{
    listing *l = (listing *)c;
    pl_exchange *x = pl_admin_wait_end(l->wait);
    if (x && c->result == 0) {
        char cursor[24];
        snprintf(cursor, sizeof cursor, "%llu", (unsigned long long)c->cursor);
        pl_admin_json(x, 200,
                      json_pack("{s:O, s:o}", "sessions", l->sessions, "next_cursor",
                                c->cursor ? json_string(cursor) : json_null()));
    } else if (x) {
        failed(x, c->result, NULL);
    }
    json_decref(l->sessions);
    free(l);
}

void pl_admin_sessions_list(pl_admin *a, pl_exchange *x, pl_str name)
{
    pl_str cursor = pl_admin_parameter(x, PL_STR("cursor")),
           limit = pl_admin_parameter(x, PL_STR("limit"));
    double from = 0, most = LIST_DEFAULT;
    if ((cursor.p && (pl_str_double(cursor, &from) != 0 || from < 0)) ||
        (limit.p && (pl_str_double(limit, &most) != 0 || most < 1 || most > LIST_MAX))) {
        pl_admin_error(x, 400, "bad_parameter",
                       "cursor is what the page before gave as next_cursor; limit is 1 to %d",
                       LIST_MAX);
        return;
    }
    listing *l = calloc(1, sizeof *l);
    if (l)
        *l = (listing){.call = {.cursor = cursor.p ? strtoull(cursor.p, NULL, 10) : 0,
                                .limit = (uint32_t)most,
                                .each = listed,
                                .done = list_done},
                       .router = a->router,
                       .sessions = json_array(),
                       .wait = pl_admin_wait_begin(x, NULL)};
    if (!l || !l->sessions || !l->wait) {
        if (l && l->wait)
            pl_admin_wait_end(l->wait);
        if (l)
            json_decref(l->sessions);
        free(l);
        pl_admin_json(x, 503, NULL);
        return;
    }
    int rc = pl_store_list(a->router->store, &l->call);
    if (rc != PL_STORE_PENDING) {
        l->call.result = rc;
        list_done(&l->call);
    }
}

/* --- look at one --- */

typedef struct peeking {
    pl_store_call call;
    pl_router *router;
    pl_admin_wait *wait;
    size_t tenant_n, id_n;
    char names[];
} peeking;

static void peek_done(pl_store_call *c)
{
    peeking *p = (peeking *)c;
    pl_exchange *x = pl_admin_wait_end(p->wait);
    if (x && c->result == 0)
        pl_admin_json(x, 200, session_json(p->router, &c->name, &c->binding));
    else if (x)
        failed(x, c->result, &c->name);
    free(p);
}

void pl_admin_session_get(pl_admin *a, pl_exchange *x, pl_str id)
{
    pl_session_name name = name_of(x, id);
    peeking *p = calloc(1, sizeof *p + name.tenant.n + name.id.n);
    pl_admin_wait *w = p ? pl_admin_wait_begin(x, NULL) : NULL;
    if (!w) {
        free(p);
        pl_admin_json(x, 503, NULL);
        return;
    }
    memcpy(p->names, name.tenant.p, name.tenant.n);
    memcpy(p->names + name.tenant.n, name.id.p, name.id.n);
    p->call =
        (pl_store_call){.op = PL_STORE_PEEK,
                        .name = {{p->names, name.tenant.n}, {p->names + name.tenant.n, name.id.n}},
                        .done = peek_done};
    p->router = a->router;
    p->wait = w;
    int rc = pl_store_start(a->router->store, &p->call);
    if (rc != PL_STORE_PENDING) {
        p->call.result = rc;
        peek_done(&p->call);
    }
}

/* --- close one --- */

typedef struct closing {
    pl_admin_wait *wait;
    pl_str tenant, id; /* the exchange's, while it is there */
} closing;

static void close_done(void *ctx, int rc)
{
    closing *c = ctx;
    pl_exchange *x = pl_admin_wait_end(c->wait);
    const pl_session_name name = {c->tenant, c->id};
    if (x && rc == 0)
        pl_admin_json(x, 200, json_pack("{s:o, s:b}", "id", text(c->id), "closed", true));
    else if (x)
        failed(x, rc, &name);
    free(c);
}

void pl_admin_session_close(pl_admin *a, pl_exchange *x, pl_str id)
{
    const pl_session_name name = name_of(x, id);
    closing *c = malloc(sizeof *c);
    pl_admin_wait *w = c ? pl_admin_wait_begin(x, NULL) : NULL;
    if (!w) {
        free(c);
        pl_admin_json(x, 503, NULL);
        return;
    }
    *c = (closing){w, name.tenant, name.id};
    pl_sessions_close(a->router->sessions, a->router->store, &name, close_done, c);
}
