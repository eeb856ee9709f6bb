/* A request's part in a session, between the proxy and the lifecycle controller
 * (session/sessions.h): what it wishes, its binding, what the policy says of it, the open on an
 * engine, what is spliced into the body for the engine's session, and the end. Called by proxy.c,
 * intake.c, forward.c and relay.c on the loop's thread; a request without a session comes here only
 * to be found to have none.
 *
 *   pl_session_read   (intake)  the wish, from body and headers
 *   pl_session_begin  (proxy)   the binding; waits for the turn before
 *   pl_session_open   (proxy)   opens it on the chosen worker, when it is to be engine-backed
 *   session_turn.c has what follows
 *
 * pl_rq_session is on the heap: after a client has left, a turn of an engine's session is read to
 * its end without one (PL_RQ_DISCARDING), since the engine takes no other before. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "http/json.h"
#include "http/session_inner.h"

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
    if (native->capacity_of_str_len > 0)
        s->turn.capacity_of_str_len = (uint32_t)fmin(native->capacity_of_str_len, UINT32_MAX);
    s->hash = pl_session_name_hash(&s->turn.name);
    rq->session = s;
    if (w->conflict)
        pl_count(&rq->loop->metrics.session_conflicts, 1);
    struct pl_session *r = &rq->ask.session;
    *r = (struct pl_session){.held_tokens = -1,
                             .id_hash = (double)s->hash,
                             .bound_slot = -1,
                             .bound_index = -1,
                             .has_parent = w->parent.p != NULL,
                             .delta = w->delta,
                             .final = w->final || w->action == PL_WISH_CLOSE};
    if (w->parent.p) {
        const pl_session_name parent = {s->turn.name.tenant, s->wish.parent};
        r->parent_hash = (double)pl_session_name_hash(&parent);
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
    if (!isnan(w->priority) && rq->scan->members[PL_MEMBER_PRIORITY].type == PL_JSON_ABSENT) {
        req->priority = (int32_t)fmax(fmin(w->priority, INT32_MAX), INT32_MIN);
        rq->priority_hint = true;
    }
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
    else if (w->pins_removed)
        pl_pins_blank_nvext(rq);
}

static int read_wish(pl_request *rq)
{
    pl_wish_options o = rq->loop->router->config.wish;
    pl_wish w;
    pl_wish_open native = {.streaming = true};
    pl_wish_error e;
    o.trusted = rq->trusted;
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
    if (w.delta && !pl_session_api(rq->api)) {
        pl_count(&rq->loop->metrics.session_bad, 1);
        pl_relay_error(rq, 400, "invalid_session", -1,
                       "this API has no sessions at the engine, which a request that carries only "
                       "what is new needs: send the whole conversation");
        return PL_EINVALID;
    }
    take_hints(rq, &w);
    return w.source == PL_WISH_NONE ? 0 : session_new(rq, &w, &native);
}

int pl_session_read(pl_request *rq)
{
    rq->retention_seconds = rq->pin_instance = rq->pin_rank = -1;
    rq->ask.req.expected_output_tokens = -1;
    bool native = rq->api == PL_API_OPEN_SESSION || rq->api == PL_API_CLOSE_SESSION;
    return native || pl_wish_any(rq->scan, &rq->x->head, &rq->loop->router->config.wish)
               ? read_wish(rq)
               : 0;
}

/* --- the binding --- */

static void answer_busy(pl_request *rq, int rc)
{
    pl_relay_error(rq, 409, "session_busy", 1, "session '%.*s': %s", PL_FMT(rq->session->wish.id),
                   rc == PL_EBUSY ? "too many of its turns wait already"
                                  : "the turn before has not ended in time");
}

void pl_session_answer_lost(pl_request *rq, const char *what)
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
                                   .attempts = kind == PL_OPEN_FAILED ? s->opens : rq->attempts,
                                   .budget_left = rq->loop->retry_tokens >= 1,
                                   .delta = s->wish.delta};
    pl_loop_metrics *m = &rq->loop->metrics;
    pl_count(kind == PL_BOUND_GONE          ? &m->degraded_bound_gone
             : kind == PL_NO_SESSION_ENGINE ? &m->degraded_no_session_engine
                                            : &m->degraded_open_failed,
             1);
    rq->loop->vm_used = true;
    return pl_decide_fault(rq->loop->decider, &rq->ask, &fault, arg);
}

/* The engine has failed a turn that only its session made sense of. */
void pl_session_answer_failed(pl_request *rq)
{
    pl_session_answer_lost(rq, "was not served by its engine, which has failed");
}

/* Could an engine's session be of use to this request, or is it asked for itself? */
static bool takes_engine_sessions(const pl_request *rq)
{
    return pl_session_api(rq->api) || rq->api == PL_API_OPEN_SESSION;
}

static bool must_open(const pl_request *rq)
{
    const pl_rq_session *s = rq->session;
    return s->kind == PL_ENGINE_BACKED && s->ttl_seconds > 0 && takes_engine_sessions(rq);
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
            pl_session_answer_lost(rq, "is bound to a worker that is gone or unusable");
        else
            pl_relay_error(rq, 409, "session_lost", -1,
                           "the worker that holds session '%.*s' is gone or unusable",
                           PL_FMT(s->wish.id));
        return false;
    }
    s->open = rq->ask.wants_open = must_open(rq);
    if (!s->open)
        s->kind = PL_ROUTER_ONLY;
    s->label = "rebound";
    return true;
}

static bool can_open(void *ctx, const pl_worker_state *w)
{
    const pl_request *rq = ctx;
    const pl_sessions *all = rq->loop->router->sessions;
    return rq->session->native.streaming ? pl_sessions_can_open(all, w) == 0
                                         : pl_sessions_can_open_regular(all, w) == 0;
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
    if (s->turn.fallback && (s->wish.delta || native)) {
        /* what its engine's session holds is for one turn at a time, and nobody can say whose */
        pl_relay_error(rq, 503, "session_store_unavailable", 1,
                       "the store that knows session '%.*s' is out of reach, and %s",
                       PL_FMT(s->wish.id),
                       native ? "none can be opened without it"
                              : "this request carries only what is new in it");
        return false;
    }
    if (s->wish.delta && s->wish.action != PL_WISH_OPEN && !s->turn.leased) {
        pl_session_answer_lost(rq, !s->turn.bound
                                       ? "is not open here"
                                       : "is bound to a worker, but not held by its engine");
        return false;
    }
    if (bound_backed && s->wish.action == PL_WISH_BIND) {
        pl_relay_error(rq, 409, "session_exists", -1,
                       "session '%.*s' is open on an engine: close it first to bind it without",
                       PL_FMT(s->wish.id));
        return false;
    }
    bool opens = s->wish.action == PL_WISH_OPEN && takes_engine_sessions(rq);
    s->kind = bound_backed || opens ? PL_ENGINE_BACKED : PL_ROUTER_ONLY;
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
    if (!bound_backed && !takes_engine_sessions(rq))
        s->kind = rq->ask.session.kind = PL_ROUTER_ONLY;
    s->open = !(same && bound_backed) && must_open(rq);
    return true;
}

/* The shared store is out of reach: the worker that this router last knew, else the one that every
 * router comes to. Affinity is all there is then. */
static bool without_store(pl_request *rq)
{
    pl_rq_session *s = rq->session;
    s->open = rq->ask.wants_open = rq->ask.pin_must = false;
    s->kind = PL_ROUTER_ONLY;
    s->label = "fallback";
    rq->ask.pin = s->turn.bound ? pl_turn_worker(&s->turn, rq->ask.model) : NULL;
    if (!rq->ask.pin || pl_engine_why(rq->ask.pin->engine,
                                      &rq->loop->router->config.decider.breaker, pl_now_ns()) != 0)
        rq->ask.pin = rendezvous(rq);
    return true;
}

void pl_session_explain(pl_request *rq, const pl_binding *b)
{
    pl_rq_session *s = rq->session;
    bool backed = b && b->kind == PL_SESSION_ENGINE_BACKED;
    s->turn.bound = b != NULL;
    if (b)
        s->turn.binding = *b;
    s->turn.held_tokens = -1; /* the turn's to know */
    s->kind = backed || s->wish.action == PL_WISH_OPEN ? PL_ENGINE_BACKED : PL_ROUTER_ONLY;
    s->ttl_seconds = b ? b->ttl_ms / 1e3 : s->wish.timeout_seconds;
    fill_record(s);
    rq->ask.can_open = can_open;
    rq->ask.can_open_ctx = rq;
    rq->ask.wants_open = !backed && s->kind == PL_ENGINE_BACKED;
    rq->ask.pin = pl_turn_worker(&s->turn, rq->ask.model);
    rq->ask.pin_must = backed;
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
    rq->ask.can_open_ctx = rq;
    rq->ask.wants_open = s->open;
    s->label = s->open ? "open" : s->turn.bound ? "bound" : s->ttl_seconds > 0 ? "new" : "unbound";
    if (s->wish.action == PL_WISH_OPEN && !s->turn.bound && !takes_engine_sessions(rq))
        s->label = "router_only";
    if (s->turn.fallback)
        return without_store(rq);
    if (!s->turn.bound)
        return true;
    rq->ask.pin = pl_turn_worker(&s->turn, rq->ask.model);
    rq->ask.pin_must =
        s->turn.binding.kind == PL_SESSION_ENGINE_BACKED && s->kind == PL_ENGINE_BACKED;
    if (!rq->ask.pin)
        return pl_session_rebind(rq);
    /* what the engine's session holds is not known any more, but the whole conversation is here:
     * opened anew it is exact again */
    if (rq->ask.pin_must && s->turn.history.form == PL_HISTORY_LOST && !s->wish.delta &&
        must_open(rq)) {
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
        pl_proxy_begin(rq);
}

bool pl_session_begin(pl_request *rq)
{
    pl_rq_session *s = rq->session;
    s->turn.ready = on_begun;
    s->turn.only_closes = rq->api == PL_API_CLOSE_SESSION;
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

/* The engines that only failed to open it may still serve. */
static void try_them_again(pl_request *rq)
{
    int kept = 0;
    for (int i = 0; i < rq->ask.tried_n; i++)
        if (rq->session->not_opened & 1u << i)
            pl_engine_unref(rq->ask.tried[i]->engine);
        else
            rq->ask.tried[kept++] = rq->ask.tried[i];
    rq->ask.tried_n = kept;
    rq->session->not_opened = 0;
}

/* Nobody can hold the session, or opening failed for good: without isolation, but bound. */
static void go_on_without(pl_request *rq)
{
    pl_rq_session *s = rq->session;
    try_them_again(rq);
    s->open = rq->ask.wants_open = false;
    s->kind = PL_ROUTER_ONLY;
    s->label = "router_only";
}

#define SAID_AGAIN_NS                                                                              \
    60000000000u /* where sessions fill the engines, and leave them, all the time */

static uint64_t model_bit(const pl_request *rq)
{
    return (uint64_t)1 << (XXH3_64bits(rq->ask.model->id.p, rq->ask.model->id.n) & 63);
}

/* Once, until a session of the model is opened. */
static void say_no_engine(pl_request *rq)
{
    pl_router *r = rq->loop->router;
    uint64_t now = pl_now_ns(), last = atomic_load(&r->no_session_engine_ns);
    if (atomic_load(&r->no_session_engine) & model_bit(rq) ||
        (last && now - last < SAID_AGAIN_NS) ||
        !atomic_compare_exchange_strong(&r->no_session_engine_ns, &last, now))
        return;
    atomic_fetch_or(&r->no_session_engine, model_bit(rq));
    pl_log(
        PL_LOG_WARN, "no_session_engine",
        "no engine of model %.*s can hold a session now: unless degrade says otherwise, requests "
        "go on with affinity only",
        PL_FMT(rq->ask.model->id));
}

static void say_opened(pl_request *rq)
{
    pl_router *r = rq->loop->router;
    if (atomic_load_explicit(&r->no_session_engine, memory_order_relaxed) & model_bit(rq))
        atomic_fetch_and(&r->no_session_engine, ~model_bit(rq));
}

bool pl_session_no_engine(pl_request *rq)
{
    double arg;
    say_no_engine(rq);
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
    /* who can be reached, and only fails at opens, may serve well */
    bool engines_fault = rc == PL_ECONNECT || rc == PL_ERESOLVE;
    if (s->turn.fallback) { /* the store is out of reach: nothing can be bound now */
        pl_proxy_end_try(rq, -1);
        if (rq->api == PL_API_OPEN_SESSION)
            pl_relay_error(rq, 503, "session_store_unavailable", 1,
                           "the store that knows sessions is out of reach");
        return rq->api != PL_API_OPEN_SESSION && without_store(rq);
    }
    if (rq->ask.tried_n < 8) {
        pl_engine_ref(rq->engine);
        s->not_opened |= (uint8_t)(1u << rq->ask.tried_n);
        rq->ask.tried[rq->ask.tried_n++] = rq->worker;
    }
    pl_proxy_end_try(rq, engines_fault ? 0 : -1);
    if (rc == PL_ELIMIT && pl_sessions_can_open(rq->loop->router->sessions, rq->worker) == 0) {
        pl_relay_error(rq, 503, "session_limit", 5, "the router holds as many sessions as it may");
        return false;
    }
    bool other = pl_proxy_another_worker(rq);
    if (s->opens < 2 && other)
        return true; /* once more, there */
    double arg;
    int action = session_fault(rq, PL_OPEN_FAILED, &arg);
    if (action == PL_RETRY && other && s->opens < 4 && rq->loop->retry_tokens >= 1) {
        rq->loop->retry_tokens -= 1;
        return true;
    }
    if (action == PL_REJECT || rq->api == PL_API_OPEN_SESSION) {
        pl_relay_error(rq, 503, "session_open_failed", arg > 0 ? arg : 1,
                       "session '%.*s' could not be opened on an engine: %s", PL_FMT(s->wish.id),
                       pl_strerror(rc));
        return false;
    }
    go_on_without(rq);
    return true;
}

/* 1: it is open, send; 0: decide again; -1: answered. */
static int opened(pl_request *rq, int rc)
{
    pl_rq_session *s = rq->session;
    s->phase = PHASE_HELD;
    s->broken &= rc != 0 && rc != PL_EEXISTS; /* another session is bound in its place */
    if (rc == 0) {
        s->open = rq->ask.wants_open = false;
        s->opened = true;
        say_opened(rq);
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
    int rc = pl_turn_open(&s->turn, rq->worker, (uint64_t)ceil(s->ttl_seconds * 1e3),
                          s->native.streaming);
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
