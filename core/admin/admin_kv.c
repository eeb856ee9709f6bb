/* The admin API's view of KV caches: what a decision would be and why (POST /explain, decided on
 * loop 0, http/explain.c), what is known (GET /index), and events that are handed in (POST
 * /events). Questions to the index are in admin_query.c. On the control loop. */
#include <string.h>

#include "admin/admin_api.h"
#include "http/api.h"
#include "http/explain.h"
#include "kv/feed.h"

/* --- explain --- */

static void explained(void *ctx, int status, json_t *answer)
{
    pl_exchange *x = pl_admin_wait_end(ctx);
    if (x)
        pl_admin_json(x, status, answer);
    else
        json_decref(answer);
}

static bool takes_prompts(pl_str path)
{
    bool known;
    enum pl_api_kind api = pl_api_of_path(path, &known);
    return known && api != PL_API_OTHER && api != PL_API_OPEN_SESSION &&
           api != PL_API_CLOSE_SESSION;
}

void pl_admin_explain(pl_admin *a, pl_exchange *x, pl_str name)
{
    pl_str path = pl_admin_parameter(x, PL_STR("path"));
    if (!path.p)
        path = PL_STR("/v1/chat/completions");
    if (!takes_prompts(path)) {
        pl_admin_error(x, 400, "bad_parameter",
                       "path is that of an inference API, like /v1/completions or /generate");
        return;
    }
    pl_admin_wait *w = pl_admin_wait_begin(x, NULL);
    if (!w) {
        pl_admin_json(x, 503, NULL);
        return;
    }
    int rc = pl_explain(a->router, path, &x->head, x->body, explained, w);
    if (rc != 0) {
        pl_admin_wait_end(w);
        pl_admin_error(x, 503, rc == PL_ENOMEM ? "no_memory" : "stopping",
                       "cannot be explained: %s", pl_strerror(rc));
    }
}

/* --- index --- */

static json_t *approx_json(const pl_approx_stats *s)
{
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "nodes", (json_int_t)s->nodes,
                     "keys", (json_int_t)s->chunks, "entries", (json_int_t)s->entries, "bytes",
                     (json_int_t)s->bytes, "inserted", (json_int_t)s->inserted, "expired",
                     (json_int_t)s->expired, "evicted", (json_int_t)s->evicted, "corrected",
                     (json_int_t)s->corrected);
}

static json_t *index_json(const pl_router *r)
{
    pl_index_stats s;
    pl_index_stats_of(pl_holdings_index(r->holdings), &s);
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "spaces",
                     (json_int_t)s.spaces, "blocks", (json_int_t)s.blocks, "entries",
                     (json_int_t)s.entries, "bytes", (json_int_t)s.bytes, "max_bytes",
                     (json_int_t)r->config.holdings.index_bytes, "stored", (json_int_t)s.stored,
                     "removed", (json_int_t)s.removed, "duplicates", (json_int_t)s.duplicates,
                     "unknown_parents", (json_int_t)s.unknown_parents, "unknown_removals",
                     (json_int_t)s.unknown_removals, "evicted", (json_int_t)s.evicted);
}

static json_t *counts_json(const pl_apply_counts *c)
{
    json_t *j = json_object();
#define XX(name, help)                                                                             \
    if (j)                                                                                         \
        json_object_set_new(j, #name, json_integer((json_int_t)c->name));
    PL_APPLY_COUNT_MAP(XX)
#undef XX
    return j;
}

static json_t *age(double seconds)
{
    return seconds < 0 ? json_null() : json_real(seconds);
}

static json_t *feed_json(const pl_feed_stats *s)
{
    json_t *j = json_pack("{s:s, s:f, s:s, s:b, s:b, s:b, s:o, s:i, s:o, s:o, s:o}", "state",
                          pl_trust_state_name(s->state), "since_seconds", s->since_seconds,
                          "endpoint", s->endpoint, "connected", s->connected, "complete",
                          s->complete, "nothing_indexed", s->nothing_indexed, "last_seq",
                          s->has_seq ? json_integer((json_int_t)s->last_seq) : json_null(),
                          "block_tokens", (int)s->block_tokens, "lag_seconds", age(s->lag_seconds),
                          "last_event_seconds", age(s->last_event_seconds), "error",
                          s->error[0] ? pl_admin_text(s->error) : json_null());
    const struct {
        const char *name;
        uint64_t value;
    } list[] = {
        {"messages", s->messages},
        {"bytes", s->bytes},
        {"gaps", s->gaps},
        {"missed", s->missed},
        {"duplicates", s->duplicates},
        {"restarts", s->restarts},
        {"resets", s->resets},
        {"replays", s->replays},
        {"replays_failed", s->replays_failed},
        {"snapshots", s->snapshots},
        {"bad", s->bad},
        {"floods", s->floods},
        {"disconnects", s->disconnects},
        {"held_batches", s->held_batches},
        {"held_bytes", s->held_bytes},
        {"held_dropped", s->held_dropped},
    };
    for (size_t i = 0; j && i < sizeof list / sizeof *list; i++)
        json_object_set_new(j, list[i].name, json_integer((json_int_t)list[i].value));
    if (j)
        json_object_set_new(j, "counts", counts_json(&s->counts));
    return j;
}

static json_t *worker_json(const pl_router *r, const pl_worker_state *w)
{
    static const char *const trusts[] = {"routed", "live", "behind", "stale"};
    pl_feed_stats s;
    bool fed = r->feed && pl_feed_stats_of(r->feed, w->slot, &s) == 0;
    uint64_t entries = pl_index_entries(pl_holdings_index(r->holdings), w->slot);
    return json_pack("{s:s, s:i, s:s, s:i, s:I, s:o}", "name", w->name, "rank", w->rank, "trust",
                     trusts[atomic_load(&w->kv_trust) & 3], "block_tokens",
                     (int)atomic_load(&w->block_tokens), "entries", (json_int_t)entries, "events",
                     fed ? feed_json(&s) : json_null());
}

void pl_admin_index(pl_admin *a, pl_exchange *x, pl_str name)
{
    static const char *const uses[] = {"auto", "always", "off"};
    pl_router *r = a->router;
    if (!r->holdings) {
        pl_admin_json(x, 200, json_pack("{s:s}", "use", "off"));
        return;
    }
    pl_holdings_stats s;
    pl_holdings_stats_of(r->holdings, &s);
    json_t *workers = json_array();
    pl_view *v = pl_fleet_view(r->fleet);
    for (int i = 0; workers && v && i < v->workers_n; i++)
        json_array_append_new(workers, worker_json(r, v->workers[i]));
    pl_view_unref(v);
    pl_admin_json(x, 200,
                  json_pack("{s:s, s:o, s:o, s:o, s:{s:I, s:I, s:I, s:I}, s:o}", "use",
                            uses[r->config.kv_use], "index", index_json(r), "routed",
                            approx_json(&s.routed), "predicted", approx_json(&s.predicted),
                            "accuracy", "requests", (json_int_t)s.accuracy.requests,
                            "predicted_tokens", (json_int_t)s.accuracy.predicted_tokens,
                            "actual_tokens", (json_int_t)s.accuracy.actual_tokens, "error_tokens",
                            (json_int_t)s.accuracy.error_tokens, "workers", workers));
}

/* --- events --- */

/* JSON when true, msgpack when false; anything else has been answered. */
static bool content_type(pl_exchange *x, bool *json)
{
    static const pl_str packs[] = {PL_STR_INIT("application/msgpack"),
                                   PL_STR_INIT("application/x-msgpack"),
                                   PL_STR_INIT("application/vnd.msgpack")};
    pl_str given = pl_head_find(&x->head, PL_STR("content-type")), type = {NULL, 0};
    if (given.p)
        pl_str_cut(&given, ';', &type);
    type = pl_str_trim(type);
    *json = !type.p || pl_str_ieq(type, PL_STR("application/json"));
    bool pack = false;
    for (size_t i = 0; i < sizeof packs / sizeof *packs; i++)
        pack = pack || pl_str_ieq(type, packs[i]);
    if (*json || pack)
        return true;
    pl_admin_error(x, 415, "unsupported_media_type",
                   "events come as application/json or application/msgpack");
    return false;
}

static bool rank_of(pl_exchange *x, const pl_engine *e, int *rank)
{
    uint64_t n = 0;
    pl_str given = pl_admin_parameter(x, PL_STR("rank"));
    if (given.p && pl_str_u64(given, (uint64_t)e->workers_n - 1, &n) != 0) {
        pl_admin_error(x, 400, "bad_parameter", "rank is 0 to %d for engine '%s'", e->workers_n - 1,
                       e->name);
        return false;
    }
    *rank = (int)n;
    return true;
}

static void take_events(pl_admin *a, pl_exchange *x, const pl_engine *e)
{
    bool json;
    int rank;
    pl_errbuf eb = {""};
    if (!rank_of(x, e, &rank) || !content_type(x, &json))
        return;
    if (x->body.n == 0) {
        pl_admin_error(x, 400, "invalid_body", "the body is empty; it should hold events");
        return;
    }
    int rc = pl_feed_ingest(a->router->feed, e->workers[rank].slot, x->body, json, &eb);
    const char *why = eb.text[0] ? eb.text : pl_strerror(rc);
    if (rc == 0)
        pl_admin_json(x, 202,
                      json_pack("{s:b, s:s}", "accepted", 1, "worker", e->workers[rank].name));
    else if (rc == PL_ENOTFOUND)
        pl_admin_error(x, 409, "no_events_here",
                       "engine '%s' takes no events: set engines[].kv_events.mode to \"ingest\"",
                       e->name);
    else if (rc == PL_EBUSY || rc == PL_ENOMEM)
        pl_admin_error(x, 503, "busy", "%s", why);
    else
        pl_admin_error(x, 400, "invalid_events", "%s", why);
}

void pl_admin_events(pl_admin *a, pl_exchange *x, pl_str name)
{
    if (!a->router->feed) {
        pl_admin_error(x, 409, "kv_off", "kv.use is \"off\" in the configuration");
        return;
    }
    pl_str engine = pl_admin_parameter(x, PL_STR("engine"));
    pl_engine *e = engine.p ? pl_fleet_find(a->router->fleet, engine) : NULL;
    if (e)
        take_events(a, x, e);
    else if (engine.p)
        pl_admin_error(x, 404, "not_found", "no engine is named '%.*s'; GET /engines lists them",
                       PL_FMT(engine));
    else
        pl_admin_error(x, 400, "bad_parameter", "whose events? ?engine=NAME[&rank=N]");
    pl_engine_unref(e);
}
