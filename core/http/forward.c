/* One try: the request as the engine gets it. The head is composed anew (framing and hop-by-hop
 * headers are ours), the body is the client's bytes with edits spliced in. Called by proxy.c on the
 * loop's thread. What is sent lives in the exchange's arena and body, so it stays until the
 * answer's head is there. */
#include <stdlib.h>

#include "http/request.h"

/* --- pools --- */

/* One pool for each engine that this loop has talked to, found by the slot of its first worker. */
struct pl_pool_map {
    struct {
        uint64_t engine_id;
        pl_pool *pool; /* NULL: none yet */
    } v[PL_MAX_WORKERS];
};

pl_pool *pl_loop_pool(pl_loop *l, const pl_engine *e)
{
    if (!l->pools && !(l->pools = calloc(1, sizeof *l->pools)))
        return NULL;
    int at = e->workers[0].slot;
    if (l->pools->v[at].pool && l->pools->v[at].engine_id != e->id) {
        pl_pool_free(l->pools->v[at].pool); /* the slot has a new owner */
        l->pools->v[at].pool = NULL;
    }
    if (!l->pools->v[at].pool) {
        pl_pool_options o = l->router->config.pool;
        o.api_key = e->api_key;
        l->pools->v[at].pool = pl_pool_new(&l->uv, &l->wheel, pl_str_c(e->host), e->port, &o);
        l->pools->v[at].engine_id = e->id;
    }
    return l->pools->v[at].pool;
}

void pl_proxy_view_changed(pl_loop *l)
{
    for (int at = 0; l->pools && at < PL_MAX_WORKERS; at++) {
        if (!l->pools->v[at].pool)
            continue;
        bool used = false;
        for (int i = 0; i < l->view->engines_n && !used; i++)
            used = l->view->engines[i]->id == l->pools->v[at].engine_id;
        if (!used) {
            pl_pool_free(l->pools->v[at].pool);
            l->pools->v[at].pool = NULL;
        }
    }
}

void pl_proxy_free_pools(pl_loop *l)
{
    for (int at = 0; l->pools && at < PL_MAX_WORKERS; at++)
        if (l->pools->v[at].pool)
            pl_pool_free(l->pools->v[at].pool);
    free(l->pools);
    l->pools = NULL;
}

/* --- the head --- */

pl_str pl_forward_hops(pl_arena *a, const pl_head *h)
{
    pl_str all = {NULL, 0};
    for (int i = 0; i < h->headers_n; i++)
        if (h->headers[i].name.n == 10 && pl_str_ieq(h->headers[i].name, PL_STR("connection")))
            all = all.n ? pl_arena_printf(a, "%.*s,%.*s", PL_FMT(all), PL_FMT(h->headers[i].value))
                        : h->headers[i].value;
    return all;
}

static bool hides_keys(const pl_request *rq)
{
    return rq->loop->router->config.api_keys_n || rq->engine->api_key[0];
}

/* A client that may choose the rank itself does, but not for what one rank's session holds. */
static bool may_name_rank(const pl_request *rq)
{
    return pl_pins_may_tell_rank(rq) && !pl_session_inside(rq);
}

static bool forwarded_header(const pl_request *rq, pl_str name, pl_str connection)
{
    if (pl_header_is_hop(name, connection))
        return false;
    pl_pin pin = pl_pin_of(name);
    if (pin != PL_PIN_NONE)
        return pin == PL_PIN_ENGINES && may_name_rank(rq);
    switch (name.n) {
    case 4:
        return !pl_str_ieq(name, PL_STR("host"));
    case 6:
        return !pl_str_ieq(name, PL_STR("expect"));
    case 9: /* the router's own key is not the engine's business */
        return !(hides_keys(rq) && pl_str_ieq(name, PL_STR("x-api-key")));
    case 12:
        return !pl_str_ieq(name, PL_STR("x-request-id"));
    case 13:
        return !(hides_keys(rq) && pl_str_ieq(name, PL_STR("authorization")));
    case 15: /* the usage chunk could not be found in it */
        return !(rq->swallow_usage && pl_str_ieq(name, PL_STR("accept-encoding")));
    default:
        return true;
    }
}

static char *put(char *to, pl_str s)
{
    memcpy(to, s.p, s.n);
    return to + s.n;
}

static char *put_number(char *to, uint64_t v)
{
    char digits[20];
    int n = 0;
    do
        digits[n++] = (char)('0' + v % 10);
    while (v /= 10);
    while (n)
        *to++ = digits[--n];
    return to;
}

/* Engines with several ranks are told which one was chosen, unless a client that may has said so.
 */
static bool tells_rank(const pl_request *rq)
{
    return rq->engine->workers_n > 1 &&
           !(may_name_rank(rq) && pl_head_find(&rq->x->head, PL_STR("x-data-parallel-rank")).p);
}

/* The head in the arena; {NULL,0} when out of memory. */
static pl_str compose_head(pl_request *rq, size_t content_length)
{
    const pl_head *h = &rq->x->head;
    pl_str connection = pl_forward_hops(&rq->x->arena, h);
    pl_str authority = pl_str_c(rq->engine->url + strlen("http://"));
    pl_str key = pl_str_c(rq->engine->api_key);
    size_t most = 320 + h->path.n + h->query.n + authority.n + rq->id.n + key.n;
    for (int i = 0; i < h->headers_n; i++)
        most += h->headers[i].name.n + h->headers[i].value.n + 4;
    char *start = pl_arena_alloc(&rq->x->arena, most), *p = start;
    if (!p)
        return (pl_str){NULL, 0};
    p = put(p, pl_method_names[h->method]);
    *p++ = ' ';
    p = put(p, h->path);
    if (h->query.p) {
        *p++ = '?';
        p = put(p, h->query);
    }
    p = put(p, PL_STR(" HTTP/1.1\r\nhost: "));
    p = put(p, authority);
    for (int i = 0; i < h->headers_n; i++) {
        if (!forwarded_header(rq, h->headers[i].name, connection))
            continue;
        p = put(p, PL_STR("\r\n"));
        p = put(p, h->headers[i].name);
        p = put(p, PL_STR(": "));
        p = put(p, h->headers[i].value);
    }
    if (key.n) {
        p = put(p, PL_STR("\r\nauthorization: Bearer "));
        p = put(p, key);
    }
    if (tells_rank(rq)) {
        p = put(p, PL_STR("\r\nx-data-parallel-rank: "));
        p = put_number(p, (uint64_t)rq->worker->rank);
    }
    p = put(p, PL_STR("\r\nx-request-id: "));
    p = put(p, rq->id);
    p = put(p, PL_STR("\r\ncontent-length: "));
    p = put_number(p, content_length);
    p = put(p, PL_STR("\r\n\r\n"));
    return (pl_str){start, (size_t)(p - start)};
}

/* --- SGLang's request id: what /abort_request needs --- */

/* A batch or several choices become several requests in the engine, for which one id does not do.
 */
static bool one_generation(const pl_request *rq)
{
    const pl_member *m = rq->scan->members;
    if (rq->ask.req.choices != 1)
        return false;
    if (rq->api == PL_API_CHAT)
        return true;
    if (rq->api == PL_API_COMPLETIONS)
        return m[PL_MEMBER_PROMPT].type == PL_JSON_STRING;
    return rq->api == PL_API_GENERATE && m[PL_MEMBER_TEXT].type == PL_JSON_STRING;
}

/* An abort ends every request whose id begins with the one it names: by a short one of its own
 * making a client could end those of others. So only an id that is as long as the router's is
 * named. */
#define RID_BYTES 32

static void set_rid(pl_request *rq, pl_edits *edits)
{
    const pl_member *given = &rq->scan->members[PL_MEMBER_RID];
    rq->rid = (pl_str){NULL, 0};
    if (atomic_load_explicit(&rq->engine->kind, memory_order_relaxed) != PL_KIND_SGLANG ||
        !one_generation(rq))
        return;
    if (given->type == PL_JSON_STRING) {
        rq->rid = pl_intake_kept_string(rq, PL_MEMBER_RID); /* an abort comes after the body */
        if (rq->rid.n < RID_BYTES)
            rq->rid = (pl_str){NULL, 0};
        return;
    }
    if (given->type != PL_JSON_ABSENT)
        return;
    pl_str quoted = pl_arena_printf(&rq->x->arena, "\"%016llx%016llx\"",
                                    (unsigned long long)pl_rng_next(&rq->loop->rng),
                                    (unsigned long long)pl_rng_next(&rq->loop->rng));
    if (quoted.p &&
        pl_edits_set(edits, &rq->x->arena, rq->x->body, rq->scan, PL_MEMBER_RID, quoted) == 0)
        rq->rid = (pl_str){quoted.p + 1, RID_BYTES};
}

/* SGLang's native API takes the rank from the body only. */
static void set_rank(pl_request *rq, pl_edits *edits)
{
    if (rq->api != PL_API_GENERATE || !tells_rank(rq) ||
        atomic_load_explicit(&rq->engine->kind, memory_order_relaxed) != PL_KIND_SGLANG)
        return;
    pl_scan without;
    memcpy(&without, rq->scan, pl_scan_bytes(rq->scan));
    pl_member *given = &without.members[PL_MEMBER_ROUTED_DP_RANK];
    if (given->type != PL_JSON_ABSENT && may_name_rank(rq))
        return;
    if (!rq->trusted)
        given->type = PL_JSON_ABSENT; /* it has been removed */
    pl_str rank = pl_arena_printf(&rq->x->arena, "%d", rq->worker->rank);
    if (rank.p)
        pl_edits_set(edits, &rq->x->arena, rq->x->body, &without, PL_MEMBER_ROUTED_DP_RANK, rank);
}

/* --- what the policy would like to have kept --- */

/* Into extra_args, where Dynamo-style handlers look for it. PL_EINVALID: that is no object. */
static int set_extra_arg(pl_request *rq, pl_edits *edits, pl_str raw)
{
    pl_arena *a = &rq->x->arena;
    const pl_member *m = &rq->scan->members[PL_MEMBER_EXTRA_ARGS];
    if (m->type == PL_JSON_ABSENT || m->type == PL_JSON_NULL) {
        pl_str object = pl_arena_printf(a, "{\"retention_seconds\":%.*s}", PL_FMT(raw));
        return object.p
                   ? pl_edits_set(edits, a, rq->x->body, rq->scan, PL_MEMBER_EXTRA_ARGS, object)
                   : PL_ENOMEM;
    }
    if (m->type != PL_JSON_OBJECT)
        return PL_EINVALID;
    pl_member given = pl_object_find(m->raw, PL_STR("retention_seconds"));
    if (given.type != PL_JSON_ABSENT)
        return pl_edits_add(edits, (size_t)(given.raw.p - rq->x->body.p), given.raw.n, raw);
    bool empty = pl_object_is_empty(m->raw);
    pl_str member =
        pl_arena_printf(a, "\"retention_seconds\":%.*s%s", PL_FMT(raw), empty ? "" : ",");
    return member.p ? pl_edits_add(edits, (size_t)(m->raw.p - rq->x->body.p) + 1, 0, member)
                    : PL_ENOMEM;
}

/* nvext's salt is vLLM's to honour, under its own name; SGLang does not know it. */
static void set_cache_salt(pl_request *rq, pl_edits *edits)
{
    if (!rq->cache_salt.p ||
        atomic_load_explicit(&rq->engine->kind, memory_order_relaxed) != PL_KIND_VLLM ||
        rq->scan->members[PL_MEMBER_CACHE_SALT].type != PL_JSON_ABSENT)
        return;
    pl_str raw = pl_json_quoted(&rq->x->arena, rq->cache_salt);
    if (raw.p)
        pl_edits_set(edits, &rq->x->arena, rq->x->body, rq->scan, PL_MEMBER_CACHE_SALT, raw);
}

/* The hints of the retain hook, or of the client's cache_control and agent_hints, for engines that
 * take them. */
static void set_retention(pl_request *rq, pl_edits *edits)
{
    pl_loop *l = rq->loop;
    if (rq->retention_seconds < 0 && !rq->priority_hint && !pl_decider_wants_retain(l->decider))
        return;
    uint32_t caps = atomic_load_explicit(&rq->engine->caps, memory_order_relaxed);
    int kind = atomic_load_explicit(&rq->engine->kind, memory_order_relaxed);
    int64_t hinted = rq->ask.req.priority;
    if (kind == PL_KIND_VLLM) /* a client's higher is dearer, and vLLM's is not */
        hinted = -hinted < INT32_MAX ? -hinted : INT32_MAX;
    pl_retain_choice choice = {.retention_seconds = rq->retention_seconds,
                               .has_priority = rq->priority_hint,
                               .priority = (int32_t)hinted};
    l->vm_used = true;
    pl_decide_retain(l->decider, &rq->ask, rq->worker, &choice);
    const pl_config *c = &l->router->config;
    int hint = c->retention[kind];
    bool takes = hint != PL_HINT_OFF && (hint != PL_HINT_AUTO || caps & PL_CAP_RETENTION);
    if (choice.retention_seconds >= 0 && takes) {
        pl_str raw = pl_arena_printf(&rq->x->arena, "%.3f", choice.retention_seconds);
        int rc = PL_ENOMEM;
        if (raw.p)
            rc = hint == PL_HINT_TOP ? pl_edits_set(edits, &rq->x->arena, rq->x->body, rq->scan,
                                                    PL_MEMBER_RETENTION_SECONDS, raw)
                                     : set_extra_arg(rq, edits, raw);
        pl_count(rc == 0 ? &l->metrics.retention_set : &l->metrics.retention_skipped, 1);
        static unsigned long seen[2];
        if (rc == PL_EINVALID && pl_log_allow(seen, 1))
            pl_log(PL_LOG_WARN, "retention_skipped",
                   "'extra_args' is no object: retention_seconds is not put into it (request %.*s)",
                   PL_FMT(rq->id));
    }
    takes = c->priority[kind] == PL_HINT_ON ||
            (c->priority[kind] == PL_HINT_AUTO && caps & PL_CAP_PRIORITY);
    if (choice.has_priority && takes) {
        pl_str raw = pl_arena_printf(&rq->x->arena, "%d", choice.priority);
        if (raw.p)
            pl_edits_set(edits, &rq->x->arena, rq->x->body, rq->scan, PL_MEMBER_PRIORITY, raw);
    }
}

static void abort_sent(void *user, const pl_fetch_result *r)
{
    (void)user;
    (void)r; /* the connection was closed, too: a lost abort costs nothing more */
}

void pl_forward_abort(pl_request *rq)
{
    pl_pool *pool = rq->rid.p ? pl_loop_pool(rq->loop, rq->engine) : NULL;
    if (!pool)
        return;
    pl_buf b = {0};
    if (pl_buf_addf(&b, "{\"rid\":") == 0 && pl_json_quote(&b, rq->rid) == 0 &&
        pl_buf_addf(&b, "}") == 0)
        pl_fetch_start(pool, PL_POST, PL_STR("/abort_request"),
                       PL_STR("content-type: application/json\r\n"), pl_buf_str(&b), 2000, 4096,
                       abort_sent, NULL);
    pl_buf_free(&b);
}

/* --- sending --- */

static void on_call_head(pl_call *c, const pl_head *head)
{
    pl_request *rq = c->user;
    if (!rq->x)
        return; /* its client has left: only the end counts */
    atomic_fetch_add_explicit(c->reused ? &rq->engine->reuses : &rq->engine->connects, 1,
                              memory_order_relaxed);
    pl_relay_head(rq, head);
}

static void on_call_body(pl_call *c, const pl_str *slices, int n)
{
    pl_request *rq = c->user;
    if (rq->x)
        pl_relay_body(rq, slices, n);
}

static void on_call_end(pl_call *c)
{
    pl_request *rq = c->user;
    rq->call = NULL;
    if (rq->x)
        pl_relay_end(rq);
    else
        pl_session_discarded(rq, true);
}

/* A pooled connection that had been closed shows within a round trip; one that breaks later was
 * alive, and the engine has failed the request. */
#define STALE_MS 1000

static void on_call_fail(pl_call *c, int err)
{
    pl_request *rq = c->user;
    rq->call = NULL;
    if (!rq->x) {
        pl_session_discarded(rq, false);
        return;
    }
    if (err == PL_ERESET && c->reused && rq->state == PL_RQ_CALLING &&
        rq->loop->wheel.now_ms - rq->sent_at_ms < STALE_MS && !pl_session_inside(rq)) {
        /* the engine had closed the pooled connection: not its fault, and most likely nobody has
         * seen the request (a session that may have got a turn twice would be worse than none) */
        pl_count(&rq->loop->metrics.resends, 1);
        int rc = pl_forward(rq, true);
        if (rc == 0)
            return;
        pl_proxy_failed(rq, rc, 0, NULL);
        return;
    }
    pl_proxy_failed(rq, err, 0, c->detail);
}

static const pl_call_events call_events = {on_call_head, on_call_body, on_call_end, on_call_fail};

int pl_forward(pl_request *rq, bool fresh)
{
    pl_loop *l = rq->loop;
    pl_arena *a = &rq->x->arena;
    pl_pool *pool = pl_loop_pool(l, rq->engine);
    pl_edits edits; /* a copy of what is in use */
    rq->held = NULL;
    rq->answer.n = 0;
    edits.n = rq->edits.n;
    memcpy(edits.v, rq->edits.v, (size_t)edits.n * sizeof edits.v[0]);
    if (rq->decision.shrink_max_tokens >= 0 &&
        pl_intake_shrink(rq, &edits, rq->decision.shrink_max_tokens) == 0 && !fresh)
        pl_count(&l->metrics.shrunk, 1);
    set_rid(rq, &edits);
    set_cache_salt(rq, &edits);
    set_retention(rq, &edits);
    if (rq->session && pl_session_edits(rq, &edits) != 0)
        return PL_ENOMEM;
    set_rank(rq, &edits);
    pl_str *slices = pl_arena_alloc(a, (PL_EDITS_SLICES + 1) * sizeof *slices);
    if (!pool || !slices)
        return PL_ENOMEM;
    size_t length;
    int n = pl_edits_slices(&edits, rq->x->body, slices + 1, &length);
    slices[0] = compose_head(rq, length);
    if (!slices[0].p)
        return PL_ENOMEM;
    rq->sent_at_ms = l->wheel.now_ms;
    n++;
    if (rq->session && pl_session_keep_bytes(rq, slices, &n) != 0)
        return PL_ENOMEM;
    rq->call = pl_call_send(pool, slices, n, false, fresh, 0, &call_events, rq);
    if (!rq->call)
        return PL_ENOMEM;
    atomic_fetch_add_explicit(&rq->engine->requests, 1, memory_order_relaxed);
    return 0;
}
