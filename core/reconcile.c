/* Engines at run time: adding, removing with a deadline, and SIGHUP, which brings the fleet to what
 * the configuration file now says. On the control thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "loop.h"

#define REMOVE_POLL_MS 20

int pl_router_add_engine(pl_router *r, const pl_engine_spec *spec, pl_errbuf *eb)
{
    pl_engine *e = NULL;
    int rc = pl_fleet_add(r->fleet, spec, &e, eb);
    if (rc == 0) {
        pl_log(PL_LOG_INFO, "engine_added", "%s (%s)", e->name, e->url);
        pl_engine_unref(e);
    }
    return rc;
}

/* --- removal: polls the ledger until the engine's last request has ended, or cuts the rest --- */

typedef struct pl_removal {
    pl_router *router;
    struct pl_removal *next;
    pl_engine *engine; /* referenced */
    pl_timer timer;
    uint64_t deadline_ms; /* of the control wheel */
    int loops_waiting;    /* cuts under way; 0: none sent */
    int cut;
    void (*done)(void *ctx, int cut);
    void *ctx;
} pl_removal;

void pl_router_end_removal(pl_removal *rm)
{
    pl_router *r = rm->router;
    for (pl_removal **at = &r->removals; *at; at = &(*at)->next)
        if (*at == rm) {
            *at = rm->next;
            break;
        }
    pl_wheel_cancel(&r->control_wheel, &rm->timer);
    pl_sessions_engine_gone(r->sessions, rm->engine);
    pl_log(PL_LOG_INFO, "engine_removed", "%s (%d requests cut)", rm->engine->name, rm->cut);
    if (rm->done)
        rm->done(rm->ctx, rm->cut);
    pl_engine_unref(rm->engine);
    free(rm);
}

static void on_cut(void *ctx, int cut)
{
    pl_removal *rm = ctx;
    rm->cut += cut;
    if (--rm->loops_waiting == 0)
        pl_router_end_removal(rm);
}

static void poll_removal(pl_timer *t)
{
    pl_removal *rm = (pl_removal *)((char *)t - offsetof(pl_removal, timer));
    pl_router *r = rm->router;
    if (pl_engine_inflight(rm->engine) == 0) {
        pl_router_end_removal(rm);
    } else if (r->control_wheel.now_ms < rm->deadline_ms) {
        pl_wheel_arm(&r->control_wheel, t, REMOVE_POLL_MS, poll_removal);
    } else {
        rm->loops_waiting = r->loops_n;
        for (int i = 0, n = r->loops_n; i < n; i++)
            if (pl_loop_send_cut(&r->loops[i], rm->engine, on_cut, rm) != 0)
                on_cut(rm, 0);
    }
}

int pl_router_remove_engine(pl_router *r, pl_engine *e, uint64_t deadline_ms,
                            void (*done)(void *ctx, int cut), void *ctx)
{
    pl_removal *rm = calloc(1, sizeof *rm);
    if (!rm)
        return PL_ENOMEM;
    int rc = pl_fleet_remove(r->fleet, e);
    if (rc != 0) {
        free(rm);
        return rc;
    }
    rm->router = r;
    rm->engine = pl_engine_ref(e);
    rm->deadline_ms = r->control_wheel.now_ms + deadline_ms;
    rm->done = done;
    rm->ctx = ctx;
    rm->next = r->removals;
    r->removals = rm;
    pl_wheel_arm(&r->control_wheel, &rm->timer, 0, poll_removal);
    return 0;
}

/* --- SIGHUP --- */

static bool same_models(pl_router *r, const pl_engine *e, const pl_engine_spec *spec)
{
    pl_arena a = {0};
    pl_str *ids = NULL;
    int n = pl_fleet_models(r->fleet, e, &a, &ids);
    bool same = true;
    for (int i = 0; i < spec->models_n && same; i++) {
        same = false;
        for (int k = 0; k < n && !same; k++)
            same = pl_str_eq(spec->models[i], ids[k]);
    }
    for (int k = 0; k < n && same; k++) {
        same = false;
        for (int i = 0; i < spec->models_n && !same; i++)
            same = pl_str_eq(spec->models[i], ids[k]);
    }
    pl_arena_free(&a);
    return same;
}

/* An engine is the same when all that the file says of it is; else it is removed and added again.
 */
static bool same_engine(pl_router *r, const pl_engine *e, const pl_engine_spec *spec)
{
    pl_engine *made = NULL;
    if (pl_engine_new(spec, &made, NULL) != 0)
        return false;
    bool same = strcmp(e->name, made->name) == 0 && strcmp(e->url, made->url) == 0 &&
                strcmp(e->api_key, made->api_key) == 0 && e->weight == made->weight &&
                e->max_inflight == made->max_inflight &&
                e->max_queued_prefill_tokens == made->max_queued_prefill_tokens &&
                e->workers_n == made->workers_n && e->events_mode == made->events_mode &&
                strcmp(e->events_endpoint, made->events_endpoint) == 0 &&
                strcmp(e->events_replay, made->events_replay) == 0 &&
                strcmp(e->events_topic, made->events_topic) == 0 &&
                e->events_one_stream == made->events_one_stream &&
                e->block_tokens == made->block_tokens && e->models_given == made->models_given &&
                (spec->kind == PL_KIND_AUTO || atomic_load(&e->kind) == (int)spec->kind) &&
                (!made->models_given || same_models(r, e, spec));
    pl_engine_unref(made);
    return same;
}

static const pl_engine_spec *spec_of(pl_router *r, const pl_config *c, const pl_engine *e)
{
    for (int i = 0; i < c->engines_n; i++)
        if (same_engine(r, e, &c->engines[i]))
            return &c->engines[i];
    return NULL;
}

static void reconcile_engines(pl_router *r, const pl_config *fresh)
{
    pl_errbuf eb;
    pl_view *v = pl_fleet_view(r->fleet);
    for (int i = 0; i < v->engines_n; i++)
        if (v->engines[i]->from_config && !spec_of(r, fresh, v->engines[i]))
            pl_router_remove_engine(r, v->engines[i], r->config.remove_timeout_ms, NULL, NULL);
    pl_view_unref(v);
    for (int i = 0; i < fresh->engines_n; i++) {
        v = pl_fleet_view(r->fleet);
        bool there = false;
        for (int k = 0; k < v->engines_n && !there; k++)
            there = same_engine(r, v->engines[k], &fresh->engines[i]);
        pl_view_unref(v);
        if (!there && pl_router_add_engine(r, &fresh->engines[i], &eb) != 0)
            pl_log(PL_LOG_ERROR, "engine_refused", "%s", eb.text);
    }
}

/* A policy that the file names anew, on its way in: once it runs, it is what the next SIGHUP
 * compares with. One that is refused is tried again then. */
typedef struct pl_arrival {
    pl_router *router;
    json_t *params;
    size_t name_n;
    char name[];
} pl_arrival;

static void on_arrived(void *ctx, const pl_reload_result *res)
{
    pl_arrival *a = ctx;
    pl_config *c = &a->router->config;
    pl_str name = res->ok ? pl_arena_str(&c->arena, (pl_str){a->name, a->name_n}) : PL_STR("");
    if (res->ok && name.p) {
        c->file_policy = name;
        json_decref(c->file_params);
        c->file_params = json_incref(a->params);
    }
    json_decref(a->params);
    free(a);
}

/* The file's policy, with the command line's parameters over it. */
static int take_policy(pl_router *r, const pl_config *fresh)
{
    pl_str name = fresh->file_policy;
    json_t *params = json_deep_copy(fresh->file_params);
    pl_arrival *a = malloc(sizeof *a + name.n);
    int rc = params && a && json_object_update(params, r->config.flag_params) == 0 ? 0 : PL_ENOMEM;
    if (rc == 0) {
        *a = (pl_arrival){r, json_incref(fresh->file_params), name.n};
        memcpy(a->name, name.p, name.n);
        rc = pl_router_reload(r, name, params, on_arrived, a);
        if (rc != 0)
            json_decref(a->params);
    }
    if (rc != 0)
        free(a);
    json_decref(params);
    return rc;
}

/* Does the file say something new that no flag overrules? */
static bool policy_changed(const pl_config *c, const pl_config *fresh)
{
    if (c->policy_by_flag && !pl_str_eq(c->policy, fresh->file_policy))
        return false;
    return !pl_str_eq(c->file_policy, fresh->file_policy) ||
           !json_equal(c->file_params, fresh->file_params);
}

static int read_file(const pl_router *r, pl_config *fresh, pl_errbuf *eb)
{
    char *path = pl_str_dup(r->config.file);
    int rc = path ? pl_config_init(fresh) : PL_ENOMEM;
    if (rc == 0) {
        rc = pl_config_file(fresh, path, eb);
        if (rc == 0)
            rc = pl_config_finish(fresh, eb);
        if (rc != 0)
            pl_config_free(fresh);
    }
    free(path);
    return rc;
}

void pl_router_reconcile(pl_router *r)
{
    pl_config fresh;
    pl_errbuf eb = {""};
    bool from_file = r->config.file.n > 0, changed = false;
    if (from_file) {
        int rc = read_file(r, &fresh, &eb);
        if (rc != 0) {
            pl_log(PL_LOG_ERROR, "config_refused", "%s (everything stays as it was)",
                   eb.text[0] ? eb.text : pl_strerror(rc));
            return;
        }
        reconcile_engines(r, &fresh);
        pl_log(PL_LOG_INFO, "config_reconciled", "%d engines in the file", fresh.engines_n);
        changed = policy_changed(&r->config, &fresh);
    }
    /* what the file names anew, else the policy as it runs now: the same file, read again */
    int rc =
        changed ? take_policy(r, &fresh) : pl_router_reload(r, (pl_str){NULL, 0}, NULL, NULL, NULL);
    r->reconcile_again = rc == PL_EBUSY;
    if (rc == PL_EBUSY)
        pl_log(PL_LOG_INFO, "reload_busy", "a reload is under way: the policy's turn is after it");
    else if (rc != 0)
        pl_log(PL_LOG_ERROR, "reload_failed", "%s", pl_strerror(rc));
    if (from_file)
        pl_config_free(&fresh);
}
