/* A request's part in a session, between the proxy and the lifecycle controller
 * (session/sessions.h): what it wishes, its binding, what the policy says of it, the open on an
 * engine, what is spliced into the body for the engine's session, and the end. Called by proxy.c,
 * intake.c, forward.c and relay.c on the loop's thread; a request without a session comes here only
 * to be found to have none.
 *
 *   pl_session_read   (intake)  the wish, from body and headers
 *   pl_session_begin  (proxy)   the binding; waits for the turn before
 *   pl_session_open   (proxy)   opens it on the chosen worker, when it is to be engine-backed
 *   pl_session_edits  (forward) session_params, trimming
 *   pl_session_sent   (relay)   the engine took the request: binds
 *   pl_session_over   (proxy)   gives everything back, however the request ended
 *
 * pl_rq_session is on the heap: after a client has left, a turn of an engine's session is read to
 * its end without one (PL_RQ_DISCARDING), since the engine takes no other before. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "http/json.h"
#include "http/request.h"

#define DISCARD_MS 10000 /* an engine that was told to abort has this long to end the turn */

typedef enum phase {
    PHASE_READ,      /* the wish is known */
    PHASE_BEGINNING, /* pl_turn_begin will answer */
    PHASE_HELD,      /* the turn is ours until pl_turn_end */
    PHASE_OPENING,   /* as HELD, and pl_turn_open will answer */
    PHASE_OVER
} phase;

struct pl_rq_session {
    pl_turn turn;
    pl_request *rq;
    pl_wish wish; /* its strings are in `names` */
    pl_wish_open native;
    phase phase;
    uint64_t hash;        /* of (tenant, id) */
    double ttl_seconds;   /* 0: no affinity for this turn */
    int kind;             /* PL_ROUTER_ONLY, PL_ENGINE_BACKED: what it is, or is to be */
    bool open;            /* still to be opened on the worker that is chosen */
    bool opened;          /* by this request */
    int opens;            /* tried */
    bool inside;          /* the try under way goes into the engine's session */
    bool answered_ok;     /* its answer's head was a 2xx */
    bool ended;           /* its answer came to its end */
    pl_history_plan plan; /* with inside */
    pl_reply *reply;      /* with inside; NULL when out of memory */
    char *sent;           /* the bytes of the try, which outlive the exchange */
    pl_timer discard_timer;
    const char *label; /* x-perilune-session; static */
    char names[];
};

static pl_rq_session *of_turn(pl_turn *t)
{
    return (pl_rq_session *)((char *)t - offsetof(pl_rq_session, turn));
}

/* --- the wish --- */

static int refuse(pl_request *rq, const pl_wish_error *e)
{
    pl_count(&rq->loop->metrics.session_bad, 1);
    pl_relay_error(rq, e->status, e->code, -1, "%s", e->text.text);
    return PL_EINVALID;
}

static pl_str keep(char **at, pl_str s)
{
    if (!s.p)
        return s;
    memcpy(*at, s.p, s.n);
    pl_str kept = {*at, s.n};
    *at += s.n;
    return kept;
}

static uint64_t name_hash(const pl_session_name *n)
{
    return XXH3_64bits_withSeed(n->id.p, n->id.n, XXH3_64bits(n->tenant.p, n->tenant.n));
}

/* 52 bits, exact in a double, never 0. */
static double hash_number(uint64_t h)
{
    h >>= 12;
    return (double)(h ? h : 1);
}

static int session_new(pl_request *rq, const pl_wish *w, const pl_wish_open *native)
{
    pl_str tenant = rq->ask.strings.tenant;
    pl_rq_session *s = calloc(1, sizeof *s + tenant.n + w->id.n + w->parent.n);
    if (!s) {
        pl_relay_error(rq, 503, "out_of_memory", 1, "the router is out of memory");
        return PL_ENOMEM;
    }
    char *at = s->names;
    s->rq = rq;
    s->wish = *w;
    s->native = *native;
    s->turn.name.tenant = keep(&at, tenant);
    s->turn.name.id = s->wish.id = keep(&at, w->id);
    s->wish.parent = keep(&at, w->parent);
    s->turn.wish = &s->wish;
    s->hash = name_hash(&s->turn.name);
    rq->session = s;
    if (w->conflict)
        pl_count(&rq->loop->metrics.session_conflicts, 1);
    struct pl_session *r = &rq->ask.session;
    *r = (struct pl_session){.held_tokens = -1,
                             .id_hash = hash_number(s->hash),
                             .bound_slot = -1,
                             .bound_index = -1,
                             .has_parent = w->parent.p != NULL,
                             .delta = w->delta,
                             .final = w->final || w->action == PL_WISH_CLOSE};
    if (w->parent.p) {
        const pl_session_name parent = {s->turn.name.tenant, s->wish.parent};
        r->parent_hash = hash_number(name_hash(&parent));
    }
    rq->ask.req.has_session = true;
    rq->ask.strings.session_id = s->wish.id;
    rq->ask.session_parent = s->wish.parent;
    return 0;
}

/* A name for a session that its client wants to have named. */
static pl_str made_up_id(pl_request *rq)
{
    return pl_arena_printf(&rq->x->arena, "s-%016llx%016llx",
                           (unsigned long long)pl_rng_next(&rq->loop->rng),
                           (unsigned long long)pl_rng_next(&rq->loop->rng));
}

static void take_hints(pl_request *rq, const pl_wish *w)
{
    struct pl_req *req = &rq->ask.req;
    if (!isnan(w->priority) && rq->scan->members[PL_MEMBER_PRIORITY].type == PL_JSON_ABSENT)
        req->priority = (int32_t)fmax(fmin(w->priority, INT32_MAX), INT32_MIN);
    if (w->strict_priority > 0)
        req->strict_priority = (int32_t)fmin(w->strict_priority, INT32_MAX);
    req->expected_output_tokens = w->output_tokens;
    rq->retention_seconds = w->retention_seconds;
    rq->cache_salt = w->cache_salt;
    rq->pin_instance = w->instance;
    rq->pin_rank = w->rank;
    rq->query_only = w->query_only;
    if (w->pins_removed)
        pl_count(&rq->loop->metrics.pins_removed, (uint64_t)w->pins_removed);
    if (w->nvext && !rq->loop->router->config.forward_nvext)
        pl_edits_remove(&rq->edits, rq->x->body, rq->scan, PL_MEMBER_NVEXT);
}

int pl_session_read(pl_request *rq)
{
    const pl_config *c = &rq->loop->router->config;
    pl_wish_options o = c->wish;
    pl_wish w;
    pl_wish_open native = {.streaming = true};
    pl_wish_error e;
    o.trusted = rq->trusted;
    rq->retention_seconds = rq->pin_instance = rq->pin_rank = -1;
    int rc;
    if (rq->api == PL_API_OPEN_SESSION)
        rc = pl_wish_read_open(&rq->x->arena, rq->x->body, rq->scan, &o, &w, &native, &e);
    else if (rq->api == PL_API_CLOSE_SESSION)
        rc = pl_wish_read_close(&rq->x->arena, rq->x->body, rq->scan, &o, &w, &e);
    else
        rc = pl_wish_read(&rq->x->arena, rq->x->body, rq->scan, &rq->x->head, &o, &w, &e);
    if (rc != 0)
        return refuse(rq, &e);
    if (rq->api == PL_API_OPEN_SESSION && !w.id.p)
        w.id = made_up_id(rq);
    take_hints(rq, &w);
    return w.source == PL_WISH_NONE ? 0 : session_new(rq, &w, &native);
}

/* --- the binding --- */

static void answer_busy(pl_request *rq, int rc)
{
    pl_relay_error(rq, 409, "session_busy", 1, "session '%.*s': %s", PL_FMT(rq->session->wish.id),
                   rc == PL_EBUSY ? "too many of its turns wait already"
                                  : "the turn before has not ended in time");
}

static void answer_lost(pl_request *rq, const char *what)
{
    pl_count(&rq->loop->metrics.session_lost, 1);
    pl_relay_error(rq, 409, "session_lost", -1,
                   "session '%.*s' %s; this request carries only what is new in it: reopen the "
                   "session and send the whole conversation",
                   PL_FMT(rq->session->wish.id), what);
}

static double seconds_between(uint64_t from_ns, uint64_t to_ns)
{
    return to_ns > from_ns ? (double)(to_ns - from_ns) / 1e9 : 0;
}

static void fill_record(pl_rq_session *s)
{
    static const int events[] = {[PL_WISH_TURN] = PL_SESSION_TURN,
                                 [PL_WISH_OPEN] = PL_SESSION_OPEN,
                                 [PL_WISH_BIND] = PL_SESSION_BIND,
                                 [PL_WISH_CLOSE] = PL_SESSION_CLOSE};
    struct pl_session *r = &s->rq->ask.session;
    const pl_binding *b = &s->turn.binding;
    r->event = events[s->wish.action];
    r->ttl_seconds = s->ttl_seconds;
    r->kind = s->kind;
    r->bound_slot = -1;
    if (!s->turn.bound)
        return;
    uint64_t now = pl_now_ns();
    r->age_seconds = seconds_between(b->opened_at_ns, now);
    r->idle_seconds = seconds_between(b->used_at_ns, now);
    r->turn = (int32_t)b->turns;
    r->bound_slot = b->slot;
    r->bound_generation = b->generation;
    r->held_tokens = s->turn.held_tokens;
}

/* Highest random weight over the workers that may be picked: every router comes to the same. */
static pl_worker_state *rendezvous(const pl_request *rq)
{
    pl_worker_state *best = NULL;
    uint64_t most = 0, now = pl_now_ns();
    for (int i = 0; i < rq->ask.model->workers_n; i++) {
        pl_worker_state *w = rq->ask.model->workers[i];
        if (pl_engine_why(w->engine, &rq->loop->router->config.decider.breaker, now) != 0)
            continue;
        uint64_t weight = XXH3_64bits_withSeed(w->name, strlen(w->name), rq->session->hash);
        if (!best || weight > most) {
            best = w;
            most = weight;
        }
    }
    return best;
}

static int session_fault(pl_request *rq, int kind, double *arg)
{
    const pl_rq_session *s = rq->session;
    const struct pl_fault fault = {.waited_seconds = rq->ask.req.waited_seconds,
                                   .kind = kind,
                                   .attempts = rq->attempts,
                                   .delta = s->wish.delta};
    pl_loop_metrics *m = &rq->loop->metrics;
    pl_count(kind == PL_BOUND_GONE          ? &m->degraded_bound_gone
             : kind == PL_NO_SESSION_ENGINE ? &m->degraded_no_session_engine
                                            : &m->degraded_open_failed,
             1);
    rq->loop->vm_used = true;
    return pl_decide_fault(rq->loop->decider, &rq->ask, &fault, arg);
}

/* Its worker cannot be had. True: go on, it is to be bound anew; false: answered. */
bool pl_session_rebind(pl_request *rq)
{
    pl_rq_session *s = rq->session;
    double arg;
    rq->ask.pin = NULL;
    rq->ask.pin_must = false;
    if (session_fault(rq, PL_BOUND_GONE, &arg) != PL_REBIND) {
        if (s->wish.delta)
            answer_lost(rq, "is bound to a worker that is gone or unusable");
        else
            pl_relay_error(rq, 409, "session_lost", -1,
                           "the worker that holds session '%.*s' is gone or unusable",
                           PL_FMT(s->wish.id));
        return false;
    }
    s->open = rq->ask.wants_open = s->kind == PL_ENGINE_BACKED;
    s->label = "rebound";
    return true;
}

static bool can_open(void *ctx, const pl_worker_state *w)
{
    return pl_sessions_can_open(ctx, w) == 0;
}

/* How the session stands with what this turn asks; false: answered. */
static bool reconcile(pl_request *rq)
{
    pl_rq_session *s = rq->session;
    const pl_binding *b = &s->turn.binding;
    bool native = rq->api == PL_API_OPEN_SESSION;
    bool bound_backed = s->turn.bound && b->kind == PL_SESSION_ENGINE_BACKED;
    if (native && s->turn.bound) {
        pl_relay_error(rq, 400, "session_exists", -1,
                       "Failed to open the session. Check if a session with the same id is still "
                       "open.");
        return false;
    }
    if (!s->turn.bound && s->wish.delta && s->wish.action != PL_WISH_OPEN) {
        answer_lost(rq, "is not open here");
        return false;
    }
    if (bound_backed && s->wish.action == PL_WISH_BIND) {
        pl_relay_error(rq, 409, "session_exists", -1,
                       "session '%.*s' is open on an engine: close it first to bind it without",
                       PL_FMT(s->wish.id));
        return false;
    }
    s->kind = bound_backed || s->wish.action == PL_WISH_OPEN ? PL_ENGINE_BACKED : PL_ROUTER_ONLY;
    bool names_ttl = s->wish.action == PL_WISH_OPEN || s->wish.action == PL_WISH_BIND ||
                     s->wish.source == PL_WISH_HEADER || s->wish.source == PL_WISH_TAG;
    bool same = s->turn.bound && (s->kind == PL_ENGINE_BACKED) == bound_backed;
    s->ttl_seconds = same ? b->ttl_ms / 1e3 : names_ttl ? s->wish.timeout_seconds : 0;
    fill_record(s);
    pl_session_choice choice = {.ttl_seconds = s->ttl_seconds, .kind = s->kind};
    double asked = s->wish.timeout_given ? s->wish.timeout_seconds : s->ttl_seconds;
    if (same && names_ttl)
        choice.ttl_seconds = rq->ask.session.ttl_seconds = asked;
    rq->loop->vm_used = true;
    pl_decide_session(rq->loop->decider, &rq->ask,
                      rq->loop->router->config.wish.max_timeout_seconds, &choice);
    if (same && bound_backed && s->wish.action == PL_WISH_OPEN &&
        fabs(choice.ttl_seconds - b->ttl_ms / 1e3) > 0.001) {
        pl_relay_error(rq, 409, "session_exists", -1,
                       "session '%.*s' is open already, with a timeout of %g s: close it first to "
                       "open it with another",
                       PL_FMT(s->wish.id), b->ttl_ms / 1e3);
        return false;
    }
    s->ttl_seconds = rq->ask.session.ttl_seconds = choice.ttl_seconds;
    s->kind = rq->ask.session.kind = choice.kind;
    s->open = !(same && bound_backed) && s->kind == PL_ENGINE_BACKED && s->ttl_seconds > 0;
    return true;
}

/* The turn has begun: what is known of the session is known now. True: decide; false: answered. */
static bool begun(pl_request *rq, int rc)
{
    pl_rq_session *s = rq->session;
    if (rc != 0) {
        s->phase = PHASE_OVER;
        if (rc == PL_ENOMEM)
            pl_relay_error(rq, 503, "out_of_memory", 1, "the router is out of memory");
        else
            answer_busy(rq, rc);
        return false;
    }
    s->phase = PHASE_HELD;
    if (rq->api == PL_API_CLOSE_SESSION) {
        pl_session_answer_close(rq);
        return false;
    }
    pl_intake_usage(rq);
    if (!reconcile(rq))
        return false;
    rq->ask.can_open = can_open;
    rq->ask.can_open_ctx = rq->loop->router->sessions;
    rq->ask.wants_open = s->open;
    s->label = s->open ? "open" : s->turn.bound ? "bound" : s->ttl_seconds > 0 ? "new" : "unbound";
    if (s->turn.fallback) {
        rq->ask.pin = rendezvous(rq);
        s->label = "fallback";
        return true;
    }
    if (!s->turn.bound)
        return true;
    rq->ask.pin = pl_turn_worker(&s->turn, rq->ask.model);
    rq->ask.pin_must =
        s->turn.binding.kind == PL_SESSION_ENGINE_BACKED && s->kind == PL_ENGINE_BACKED;
    if (!rq->ask.pin)
        return pl_session_rebind(rq);
    /* what the engine's session holds is not known any more, but the whole conversation is here:
     * opened anew it is exact again */
    if (rq->ask.pin_must && s->turn.history.form == PL_HISTORY_LOST && !s->wish.delta) {
        s->open = true;
        s->label = "reopened";
    }
    return true;
}

static void on_begun(pl_turn *t, int rc)
{
    pl_request *rq = of_turn(t)->rq;
    rq->state = PL_RQ_DECIDING;
    if (begun(rq, rc))
        pl_proxy_decide(rq);
}

bool pl_session_begin(pl_request *rq)
{
    pl_rq_session *s = rq->session;
    s->turn.ready = on_begun;
    s->phase = PHASE_BEGINNING;
    int rc = pl_turn_begin(rq->loop->sessions, &s->turn);
    if (rc == PL_STORE_PENDING) {
        rq->state = PL_RQ_LOOKING;
        return false;
    }
    return begun(rq, rc);
}

/* --- opening --- */

bool pl_session_backed(const pl_request *rq)
{
    const pl_rq_session *s = rq->session;
    return s && (s->turn.leased || s->wish.action == PL_WISH_OPEN);
}

bool pl_session_wants_open(const pl_request *rq)
{
    return rq->session && rq->session->open;
}

/* Nobody can hold the session, or opening failed for good: without isolation, but bound. */
static void go_on_without(pl_request *rq)
{
    pl_rq_session *s = rq->session;
    s->open = rq->ask.wants_open = false;
    s->kind = PL_ROUTER_ONLY;
    s->label = "router_only";
}

bool pl_session_no_engine(pl_request *rq)
{
    static unsigned long seen[2];
    double arg;
    if (pl_log_allow(seen, 1))
        pl_log(PL_LOG_WARN, "no_session_engine",
               "no engine of model %.*s can hold a session now; requests go on with affinity only",
               PL_FMT(rq->ask.model->id));
    int action = session_fault(rq, PL_NO_SESSION_ENGINE, &arg);
    if (action == PL_REJECT || rq->api == PL_API_OPEN_SESSION ||
        rq->session->wish.source == PL_WISH_PARAMS) {
        pl_relay_error(rq, 503, "no_session_engine", arg > 0 ? arg : 5,
                       "no engine of model '%.*s' can hold a session now (SGLang needs "
                       "--enable-streaming-session; each worker has a cap)",
                       PL_FMT(rq->ask.model->id));
        return false;
    }
    go_on_without(rq);
    return true;
}

/* Opening failed on this worker. True: decide again; false: answered. */
static bool open_failed(pl_request *rq, int rc)
{
    pl_rq_session *s = rq->session;
    bool engines_fault = rc == PL_ETIMEOUT || rc == PL_ECONNECT || rc == PL_ERESET ||
                         rc == PL_ERESOLVE || rc == PL_EPROTOCOL || rc == PL_EIO;
    pl_engine_ref(rq->engine);
    if (rq->ask.tried_n < 8)
        rq->ask.tried[rq->ask.tried_n++] = rq->worker;
    else
        pl_engine_unref(rq->engine);
    pl_proxy_end_try(rq, engines_fault ? 0 : -1);
    if (rc == PL_ELIMIT) {
        pl_relay_error(rq, 503, "session_limit", 5, "the router holds as many sessions as it may");
        return false;
    }
    if (s->opens < 2)
        return true; /* once more, on another worker */
    double arg;
    int action = session_fault(rq, PL_OPEN_FAILED, &arg);
    if (action == PL_RETRY && s->opens < 4)
        return true;
    if (action == PL_REJECT || rq->api == PL_API_OPEN_SESSION) {
        pl_relay_error(rq, 503, "session_open_failed", arg > 0 ? arg : 1,
                       "session '%.*s' could not be opened on an engine: %s", PL_FMT(s->wish.id),
                       pl_strerror(rc));
        return false;
    }
    /* the engines that failed to open may still serve */
    for (; rq->ask.tried_n > 0; rq->ask.tried_n--)
        pl_engine_unref(rq->ask.tried[rq->ask.tried_n - 1]->engine);
    go_on_without(rq);
    return true;
}

/* 1: it is open, send; 0: decide again; -1: answered. */
static int opened(pl_request *rq, int rc)
{
    pl_rq_session *s = rq->session;
    s->phase = PHASE_HELD;
    if (rc == 0) {
        s->open = rq->ask.wants_open = false;
        s->opened = true;
        return 1;
    }
    if (rc == PL_EEXISTS) { /* another router was first: its worker is the session's */
        pl_proxy_end_try(rq, -1);
        s->open = rq->ask.wants_open = false;
        fill_record(s);
        s->label = "bound";
        rq->ask.pin = pl_turn_worker(&s->turn, rq->ask.model);
        rq->ask.pin_must = s->turn.binding.kind == PL_SESSION_ENGINE_BACKED;
        if (rq->api == PL_API_OPEN_SESSION)
            return reconcile(rq) ? 0 : -1;
        return rq->ask.pin || pl_session_rebind(rq) ? 0 : -1;
    }
    if (rc == PL_EBUSY) {
        answer_busy(rq, PL_ETIMEOUT);
        return -1;
    }
    return open_failed(rq, rc) ? 0 : -1;
}

static void on_opened(pl_turn *t, int rc)
{
    pl_request *rq = of_turn(t)->rq;
    rq->state = PL_RQ_CALLING;
    switch (opened(rq, rc)) {
    case 1:
        pl_proxy_send(rq);
        break;
    case 0:
        rq->state = PL_RQ_DECIDING;
        pl_proxy_decide(rq);
        break;
    default:
        break;
    }
}

int pl_session_open(pl_request *rq)
{
    pl_rq_session *s = rq->session;
    s->turn.ready = on_opened;
    s->phase = PHASE_OPENING;
    s->opens++;
    int rc =
        pl_turn_open(&s->turn, rq->worker, (uint64_t)(s->ttl_seconds * 1e3), s->native.streaming);
    if (rc == PL_STORE_PENDING) {
        rq->state = PL_RQ_OPENING;
        return PL_SESSION_PENDING;
    }
    return opened(rq, rc);
}

/* --- SGLang's own /open_session and /close_session --- */

void pl_session_answer_open(pl_request *rq)
{
    pl_loop *l = rq->loop;
    pl_exchange *x = rq->x;
    static const pl_header type = {PL_STR_INIT("content-type"), PL_STR_INIT("application/json")};
    pl_buf b = {0};
    int rc = pl_json_quote(&b, rq->session->wish.id);
    rq->status = rc == 0 ? 200 : 503;
    pl_count_status(l, rq->status);
    pl_proxy_end_try(rq, 1);
    pl_proxy_over(rq, PL_END_OK);
    pl_exchange_respond(x, rc == 0 ? 200 : 503, &type, 1, pl_buf_str(&b));
    pl_buf_free(&b);
}

void pl_session_answer_close(pl_request *rq)
{
    pl_exchange *x = rq->x;
    rq->status = 200;
    pl_count_status(rq->loop, 200);
    pl_proxy_over(rq, PL_END_OK);
    pl_exchange_respond(x, 200, NULL, 0, (pl_str){NULL, 0});
}

/* --- what goes to the engine --- */

static bool takes_session_params(enum pl_api_kind api)
{
    return api == PL_API_CHAT || api == PL_API_COMPLETIONS || api == PL_API_GENERATE;
}

static int set_session_params(pl_request *rq, pl_edits *edits)
{
    pl_rq_session *s = rq->session;
    pl_arena *a = &rq->x->arena;
    char id[PL_ENGINE_SESSION_MAX];
    size_t n = pl_turn_engine_id(&s->turn, id);
    pl_buf quoted = {0};
    int rc = pl_json_quote(&quoted, (pl_str){id, n});
    pl_str q = rc == 0 ? pl_arena_str(a, pl_buf_str(&quoted)) : (pl_str){NULL, 0};
    pl_buf_free(&quoted);
    if (!q.p)
        return PL_ENOMEM;
    if (s->wish.params_id_raw.p)
        return pl_edits_add(edits, (size_t)(s->wish.params_id_raw.p - rq->x->body.p),
                            s->wish.params_id_raw.n, q);
    if (rq->scan->members[PL_MEMBER_SESSION_ID].type != PL_JSON_ABSENT)
        pl_edits_remove(edits, rq->x->body, rq->scan, PL_MEMBER_SESSION_ID);
    pl_str raw = pl_arena_printf(a, "{\"id\":%.*s}", PL_FMT(q));
    return raw.p ? pl_edits_set(edits, a, rq->x->body, rq->scan, PL_MEMBER_SESSION_PARAMS, raw)
                 : PL_ENOMEM;
}

/* The engine may at least know which requests belong together. */
static void set_tag(pl_request *rq, pl_edits *edits)
{
    if (!(atomic_load_explicit(&rq->engine->caps, memory_order_relaxed) & PL_CAP_SESSION_TAG) ||
        rq->scan->members[PL_MEMBER_SESSION_ID].type != PL_JSON_ABSENT)
        return;
    pl_str tag =
        pl_arena_printf(&rq->x->arena, "\"%016llx\"", (unsigned long long)rq->session->hash);
    if (tag.p)
        pl_edits_set(edits, &rq->x->arena, rq->x->body, rq->scan, PL_MEMBER_SESSION_ID, tag);
}

static void warn_outside(pl_request *rq)
{
    static unsigned long seen[2];
    const pl_rq_session *s = rq->session;
    pl_count(&rq->loop->metrics.session_untrimmed, 1);
    if (pl_log_allow(seen, 1))
        pl_log(PL_LOG_WARN, "session_untrimmed",
               "session '%.*s': the request resends its conversation and %s; it goes to the "
               "session's worker, but not into the engine's session",
               PL_FMT(s->wish.id), s->plan.why ? s->plan.why : "nothing could be proved");
}

int pl_session_edits(pl_request *rq, pl_edits *edits)
{
    pl_rq_session *s = rq->session;
    pl_reply_free(s->reply);
    s->reply = NULL;
    s->inside = s->answered_ok = s->ended = false;
    if (s->turn.fallback || !s->turn.bound || s->kind != PL_ENGINE_BACKED ||
        s->turn.binding.kind != PL_SESSION_ENGINE_BACKED ||
        s->turn.binding.slot != rq->worker->slot ||
        s->turn.binding.generation != rq->worker->generation) {
        set_tag(rq, edits);
        return 0;
    }
    if (!takes_session_params(rq->api)) {
        s->plan = (pl_history_plan){.how = PL_PLAN_OUTSIDE,
                                    .why = "this API has no sessions at the engine"};
    } else {
        int rc = pl_history_plan_turn(&s->turn.history, rq->api, &rq->x->arena, rq->x->body,
                                      rq->scan, s->wish.delta, edits, &s->plan);
        if (rc == PL_ENOMEM)
            return rc;
    }
    if (s->plan.how == PL_PLAN_OUTSIDE) {
        warn_outside(rq);
        s->label = "outside";
        set_tag(rq, edits);
        return 0;
    }
    int rc = set_session_params(rq, edits);
    if (rc != 0)
        return rc;
    if (s->plan.how == PL_PLAN_TRIM)
        pl_count(&rq->loop->metrics.session_trimmed, 1);
    s->inside = true;
    s->reply = pl_reply_new(rq->api);
    return 0;
}

int pl_session_keep_bytes(pl_request *rq, pl_str *slices, int *n)
{
    pl_rq_session *s = rq->session;
    size_t total = 0;
    if (!s->inside)
        return 0;
    for (int i = 0; i < *n; i++)
        total += slices[i].n;
    char *p = malloc(total), *at = p;
    if (!p)
        return PL_ENOMEM;
    for (int i = 0; i < *n; i++) {
        memcpy(at, slices[i].p, slices[i].n);
        at += slices[i].n;
    }
    free(s->sent); /* the try before is over */
    s->sent = p;
    slices[0] = (pl_str){p, total};
    *n = 1;
    return 0;
}

/* --- the answer --- */

pl_reply *pl_session_reply(const pl_request *rq)
{
    return rq->session ? rq->session->reply : NULL;
}

const char *pl_session_label(const pl_request *rq)
{
    return rq->session ? rq->session->label : NULL;
}

void pl_session_sent(pl_request *rq, int status)
{
    pl_rq_session *s = rq->session;
    s->answered_ok = status >= 200 && status < 300;
    bool spilled = rq->ask.pin && rq->ask.pin != rq->worker && rq->ask.pin->engine != NULL &&
                   s->turn.bound && !s->turn.fallback;
    if (spilled)
        pl_count(&rq->loop->metrics.session_spills, 1);
    if (!s->answered_ok || s->ttl_seconds <= 0 || s->kind != PL_ROUTER_ONLY || s->wish.final ||
        s->wish.action == PL_WISH_CLOSE)
        return;
    /* a turn that went elsewhere only because its worker was at its cap leaves the binding */
    if (spilled && rq->decision.spilled)
        return;
    pl_turn_sent(&s->turn, rq->worker, (uint64_t)(s->ttl_seconds * 1e3));
}

/* --- the end --- */

static void end(pl_rq_session *s, pl_turn_end_kind how, const pl_history *h, double held_tokens)
{
    s->phase = PHASE_OVER;
    s->turn.wish = &s->wish;
    pl_turn_end(&s->turn, how, h, held_tokens);
}

static double held_tokens(const pl_request *rq)
{
    const pl_usage *u = &rq->usage;
    return u->prompt_tokens >= 0 && u->output_tokens >= 0 ? u->prompt_tokens + u->output_tokens
                                                          : -1;
}

/* The answer of a turn inside the engine's session is complete: what does it say of the session? */
static void end_inside(pl_request *rq)
{
    pl_rq_session *s = rq->session;
    if (!s->reply) {
        const pl_history lost = {.form = PL_HISTORY_LOST};
        end(s, PL_TURN_DONE, &lost, held_tokens(rq));
        return;
    }
    double least = rq->ask.req.prompt_tokens >= 8 ? 2 : 0;
    pl_reply_state st = pl_reply_judge(s->reply, rq->usage.prompt_tokens, least);
    if (st.poisoned) {
        pl_log(PL_LOG_WARN, "session_poisoned",
               "session '%.*s' on %s: the engine's session does not take turns any more; it is "
               "closed",
               PL_FMT(s->wish.id), rq->worker->name);
        end(s, PL_TURN_POISONED, NULL, -1);
        return;
    }
    if (!s->answered_ok) { /* refused before it touched the session */
        end(s, PL_TURN_FAILED, NULL, -1);
        return;
    }
    pl_history h = s->turn.history;
    if (st.complete)
        pl_history_advance(&h, &s->plan, s->reply);
    else
        h.form = PL_HISTORY_LOST;
    end(s, PL_TURN_DONE, &h, held_tokens(rq));
}

void pl_session_answer_ended(pl_request *rq)
{
    rq->session->ended = true;
}

void pl_session_over(pl_request *rq)
{
    pl_rq_session *s = rq->session;
    switch (s->phase) {
    case PHASE_BEGINNING:
    case PHASE_OPENING:
        s->phase = PHASE_OVER;
        pl_turn_cancel(&s->turn);
        break;
    case PHASE_HELD:
        if (s->inside && s->ended)
            end_inside(rq);
        else if (s->inside)
            end(s, PL_TURN_POISONED, NULL, -1); /* it broke off: the engine may be at it still */
        else
            end(s, PL_TURN_DONE, NULL, -1);
        break;
    case PHASE_READ:
    case PHASE_OVER:
        break;
    }
}

void pl_session_try_failed(pl_request *rq)
{
    /* the engine may have begun the turn: its session is not to be trusted with another */
    pl_rq_session *s = rq->session;
    if (s->inside && !s->ended && s->phase == PHASE_HELD)
        s->turn.history.form = PL_HISTORY_LOST;
}

bool pl_session_is_delta(const pl_request *rq)
{
    return rq->session && rq->session->wish.delta;
}

void pl_session_free(pl_request *rq)
{
    pl_rq_session *s = rq->session;
    if (!s)
        return;
    pl_wheel_cancel(&rq->loop->wheel, &s->discard_timer);
    pl_reply_free(s->reply);
    free(s->sent);
    free(s);
    rq->session = NULL;
}

/* --- the client has left --- */

bool pl_session_must_discard(const pl_request *rq)
{
    const pl_rq_session *s = rq->session;
    return s && s->phase == PHASE_HELD && s->inside && rq->call;
}

void pl_session_discarded(pl_request *rq, bool engine_ended)
{
    const pl_history lost = {.form = PL_HISTORY_LOST};
    pl_count(&rq->loop->metrics.session_discarded, 1);
    end(rq->session, engine_ended ? PL_TURN_ABORTED : PL_TURN_POISONED, &lost, -1);
    pl_proxy_discard_over(rq);
}

static void on_discard_timeout(pl_timer *t)
{
    pl_rq_session *s = (pl_rq_session *)((char *)t - offsetof(pl_rq_session, discard_timer));
    pl_log(PL_LOG_WARN, "session_poisoned",
           "session '%.*s': the engine has not ended a turn that was aborted; it is closed",
           PL_FMT(s->wish.id));
    pl_session_discarded(s->rq, false);
}

void pl_session_discard(pl_request *rq)
{
    pl_wheel_arm(&rq->loop->wheel, &rq->session->discard_timer, DISCARD_MS, on_discard_timeout);
    if (rq->source_paused) {
        rq->source_paused = false;
        pl_call_resume(rq->call);
    }
}
