/* The state machine of a client's request: decide, wait, try, retry, finish. Start reading at
 * on_request, then decide_and_send. intake.c fills the request, forward.c sends it, relay.c streams
 * the answer back.
 *
 * Runs on one loop's thread. A request holds: a reference to the view it was decided on, and while
 * a try is under way a reference to its engine, a ledger ticket and possibly a breaker probe;
 * pl_proxy_end_try gives those back, exactly once, and pl_proxy_over frees the rest. */
#include "http/proxy.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "http/request.h"
#include "loop.h"

#define SHUTTING_DOWN "the router is shutting down"

static void decide_and_send(pl_request *rq);
static void observe(pl_request *rq, enum pl_end_cause cause);

/* --- life of a request --- */

static pl_request *request_new(pl_loop *l, pl_exchange *x)
{
    pl_request *rq = malloc(sizeof *rq);
    if (!rq)
        return NULL;
    memset(rq, 0, offsetof(pl_request, edits.v));
    rq->loop = l;
    rq->x = x;
    rq->view = pl_view_ref(l->view);
    rq->usage = (pl_usage){-1, -1, -1};
    rq->next = l->requests;
    if (l->requests)
        l->requests->prev = rq;
    l->requests = rq;
    l->requests_n++;
    x->user = rq;
    return rq;
}

static void request_free(pl_request *rq)
{
    pl_loop *l = rq->loop;
    if (rq->prev)
        rq->prev->next = rq->next;
    else
        l->requests = rq->next;
    if (rq->next)
        rq->next->prev = rq->prev;
    l->requests_n--;
    if (rq->events) {
        pl_sse_free(rq->events);
        free(rq->events);
    }
    pl_buf_free(&rq->answer);
    pl_session_free(rq);
    pl_prompt_free(rq);
    if (rq->engine)
        pl_engine_unref(rq->engine);
    for (int i = 0; i < rq->ask.tried_n; i++)
        pl_engine_unref(rq->ask.tried[i]->engine);
    pl_view_unref(rq->view);
    free(rq);
    if (l->draining)
        pl_loop_check_drained(l);
}

static double seconds_since(uint64_t then_ns)
{
    return (double)(pl_now_ns() - then_ns) / 1e9;
}

void pl_proxy_end_try(pl_request *rq, int ok)
{
    pl_loop *l = rq->loop;
    if (rq->call) {
        pl_call_cancel(rq->call);
        rq->call = NULL;
    }
    if (rq->breaker_open_end) {
        rq->breaker_open_end = false;
        if (ok > 0)
            pl_breaker_success(rq->engine, rq->probe);
        else if (ok == 0)
            pl_breaker_failure(rq->engine, &l->router->config.decider.breaker, pl_now_ns(),
                               rq->probe);
        else
            pl_breaker_neutral(rq->engine, rq->probe);
    }
    if (rq->ticket.worker) {
        pl_ticket_end(&rq->ticket);
        pl_queue_freed(l->router->queue, rq->worker, l->view);
    }
}

static void tell_done(pl_request *rq, enum pl_end_cause cause)
{
    pl_loop *l = rq->loop;
    if (!rq->ask.model || !pl_decider_wants_done(l->decider))
        return; /* refused before anything was to be decided */
    const struct pl_outcome outcome = {
        .ttft_seconds =
            rq->first_byte_ns ? (double)(rq->first_byte_ns - rq->x->head_at_ns) / 1e9 : -1,
        .e2e_seconds = seconds_since(rq->x->head_at_ns),
        .prompt_tokens =
            rq->usage.prompt_tokens >= 0 ? rq->usage.prompt_tokens : rq->ask.req.prompt_tokens,
        .cached_tokens = rq->usage.cached_tokens,
        .output_tokens = rq->usage.output_tokens,
        .status = rq->status,
        .slot = rq->worker ? rq->worker->slot : -1,
        .attempts = rq->attempts,
        .clamped = rq->ask.clamped,
        .end_cause = (int32_t)cause,
    };
    l->vm_used = true;
    pl_decide_done(l->decider, &rq->ask, &outcome);
}

/* The exchange is still valid here (done may read headers), but its answer is complete or will be
 * cut by the caller. */
static void account(pl_request *rq, enum pl_end_cause cause)
{
    pl_proxy_end_try(rq, cause == PL_END_OK ? 1 : -1);
    pl_prompt_over(rq);
    if (rq->session)
        pl_session_over(rq); /* after the load was given back */
    observe(rq, cause);
}

static void observe(pl_request *rq, enum pl_end_cause cause)
{
    pl_loop *l = rq->loop;
    if (rq->first_byte_ns)
        pl_hist_observe(&l->metrics.ttft, rq->first_byte_ns - rq->x->head_at_ns);
    pl_hist_observe(&l->metrics.e2e, pl_now_ns() - rq->x->head_at_ns);
    if (rq->wait_until_ns)
        pl_hist_observe(&l->metrics.queue_wait, (uint64_t)(rq->ask.req.waited_seconds * 1e9));
    if (cause == PL_END_CLIENT_GONE)
        pl_count(&l->metrics.client_gone, 1);
    tell_done(rq, cause);
}

void pl_proxy_over(pl_request *rq, enum pl_end_cause cause)
{
    rq->state = PL_RQ_OVER;
    account(rq, cause);
    rq->x->user = NULL;
    rq->x = NULL;
    if (!rq->grant_under_way) /* else on_wake frees it */
        request_free(rq);
}

/* --- the waiting room --- */

static void wait_over(pl_request *rq)
{
    pl_wheel_cancel(&rq->loop->wheel, &rq->wait_timer);
    rq->ask.req.waited_seconds += seconds_since(rq->queued_at_ns);
    rq->state = PL_RQ_DECIDING;
}

/* For good: the request is about to end. */
static void leave_queue(pl_request *rq)
{
    rq->grant_under_way = !pl_queue_remove(rq->loop->router->queue, &rq->waiter);
    wait_over(rq);
}

/* The capacity that was granted to a waiter that no longer wants it goes to the next one. */
static void pass_grant_on(pl_loop *l, const pl_model *m)
{
    for (int i = 0; i < m->workers_n; i++)
        if (!pl_worker_at_capacity(m->workers[i]))
            pl_queue_freed(l->router->queue, m->workers[i], l->view);
}

static void on_wake(pl_waiter *w)
{
    pl_request *rq = (pl_request *)((char *)w - offsetof(pl_request, waiter));
    if (w->cancelled) {
        pass_grant_on(rq->loop, rq->ask.model);
        request_free(rq);
        return;
    }
    wait_over(rq);
    pl_proxy_decide(rq);
}

static void answer_wait_over(pl_request *rq)
{
    pl_count(&rq->loop->metrics.queue_timeouts, 1);
    pl_relay_error(rq, pl_api_overload_status(rq->x->head.path), "queue_timeout", 1,
                   "no engine had capacity for model '%.*s' within %.1f seconds",
                   PL_FMT(rq->ask.model->id), rq->ask.req.waited_seconds);
}

static void on_wait_timeout(pl_timer *t)
{
    pl_request *rq = (pl_request *)((char *)t - offsetof(pl_request, wait_timer));
    if (!pl_queue_remove(rq->loop->router->queue, &rq->waiter)) {
        rq->waiter.cancelled = false; /* a grant is under way: it came just in time */
        return;
    }
    wait_over(rq);
    if (pl_now_ns() < rq->wait_until_ns)
        pl_proxy_decide(rq);
    else
        answer_wait_over(rq);
}

/* Is there room for it: at its session's worker, if it may go nowhere else. */
static bool any_capacity(const pl_request *rq)
{
    uint64_t now = pl_now_ns();
    for (int i = 0; i < rq->ask.model->workers_n; i++) {
        const pl_worker_state *w = rq->ask.model->workers[i];
        if (!pl_worker_at_capacity(w) && (!rq->ask.pin_must || w == rq->ask.pin) &&
            pl_engine_why(w->engine, &rq->loop->router->config.decider.breaker, now) == 0)
            return true;
    }
    return false;
}

#define ASK_AGAIN_MS  100
#define LOOK_AGAIN_MS 1000

/* Puts the request into the waiting room. True: it waits (or was answered); false: decide again at
 * once. all_busy: freed capacity ends the wait; else admit has sent it here, and is asked again
 * every ASK_AGAIN_MS, too. Either kind of wait has its own end, by the seconds it began with (the
 * decider sees to it that all waits together are bounded). Nobody tells when a breaker's backoff is
 * over: every LOOK_AGAIN_MS the waiting look themselves. */
static bool wait_for_capacity(pl_request *rq, double seconds, bool all_busy)
{
    pl_loop *l = rq->loop;
    uint64_t now = pl_now_ns();
    if (!rq->wait_until_ns)
        pl_count(&l->metrics.queued, 1);
    if (!rq->wait_until_ns || rq->waits_for_capacity != all_busy) {
        double most = l->router->config.queue_seconds - rq->ask.req.waited_seconds;
        rq->wait_until_ns = now + (uint64_t)(fmax(fmin(seconds, most), 0) * 1e9);
        rq->waits_for_capacity = all_busy;
    }
    if (now >= rq->wait_until_ns) {
        answer_wait_over(rq);
        return true;
    }
    rq->waiter.loop = &l->mailbox;
    rq->waiter.model = rq->ask.model->id;
    rq->waiter.priority = ((int64_t)rq->ask.req.strict_priority << 32) + rq->ask.req.priority;
    rq->waiter.wake = on_wake;
    rq->waiter.cancelled = false;
    if (pl_queue_put(l->router->queue, &rq->waiter) != 0) {
        pl_count(&l->metrics.queue_full, 1);
        pl_relay_error(rq, pl_api_overload_status(rq->x->head.path), "queue_full", 1,
                       "every engine is at its limit and %u requests wait already",
                       l->router->config.queue_max);
        return true;
    }
    rq->state = PL_RQ_QUEUED;
    rq->queued_at_ns = now;
    uint64_t left_ms = (rq->wait_until_ns - now) / 1000000 + 1;
    uint64_t again_ms = all_busy ? LOOK_AGAIN_MS : ASK_AGAIN_MS;
    if (left_ms > again_ms)
        left_ms = again_ms;
    pl_wheel_arm(&l->wheel, &rq->wait_timer, left_ms, on_wait_timeout);
    if (!all_busy || !any_capacity(rq))
        return true;
    /* capacity that was freed between the decision and the put has woken nobody: look again */
    if (pl_queue_remove(l->router->queue, &rq->waiter)) {
        wait_over(rq);
        return false;
    }
    rq->waiter.cancelled = false; /* a grant is under way already */
    return true;
}

/* --- decide, send, retry --- */

/* Claims the worker for this try. False: it was taken by others meanwhile. */
static bool begin_try(pl_request *rq, pl_worker_state *w)
{
    pl_loop *l = rq->loop;
    if (!pl_breaker_begin(w->engine, &l->router->config.decider.breaker, pl_now_ns(), &rq->probe))
        return false;
    if (rq->engine)
        pl_engine_unref(rq->engine);
    rq->engine = pl_engine_ref(w->engine);
    rq->worker = w;
    rq->breaker_open_end = true;
    pl_load load = {.prompt_tokens = rq->ask.req.prompt_tokens,
                    .cached_tokens = rq->decision.cached_tokens,
                    .stream = rq->ask.req.stream};
    load.active = rq->prompt ? pl_prompt_reuse(l) : NULL;
    if (load.active)
        load.keys = pl_prompt_blocks(rq->prompt, w);
    pl_ticket_begin(&rq->ticket, w, &load);
    if (w->engine->max_inflight > 0 && pl_engine_inflight(w->engine) > w->engine->max_inflight) {
        /* another loop was faster: a cap is never exceeded, not even for a moment by two */
        pl_proxy_end_try(rq, -1);
        return false;
    }
    return true;
}

/* One round: 1 done with (sent, waiting or answered), 0 decide again. */
static int decide_once(pl_request *rq)
{
    pl_loop *l = rq->loop;
    pl_decision *d = &rq->decision;
    if (!pl_pinned(rq, d)) {
        uint64_t from = pl_now_ns();
        l->vm_used = true;
        pl_decide(l->decider, &rq->ask, d);
        pl_hist_observe(&l->metrics.decision, pl_now_ns() - from);
        pl_count(&l->metrics.decisions, 1);
    }
    if (l->router->config.response_headers)
        rq->policy = pl_arena_str(&rq->x->arena, pl_str_c(pl_decider_policy_name(l->decider)));
    switch (d->kind) {
    case PL_ASK_SHED:
        pl_count(&l->metrics.shed, 1);
        pl_relay_error(rq, pl_api_overload_status(rq->x->head.path), "overloaded",
                       d->retry_after_seconds, "the router sheds load (%s)", d->reason);
        return 1;
    case PL_ASK_QUEUE:
        return wait_for_capacity(rq, d->wait_seconds, d->all_busy);
    case PL_PIN_LOST:
        return !pl_session_rebind(rq);
    case PL_NO_SESSION_WORKER:
        return !pl_session_no_engine(rq);
    case PL_NO_WORKER:
        pl_count(&l->metrics.no_worker, 1);
        pl_relay_error(rq, 503, "no_worker", 2, "no engine that serves model '%.*s' is usable%s",
                       PL_FMT(rq->ask.model->id),
                       rq->ask.tried_n ? " any more (others failed this request)" : " now");
        return 1;
    case PL_DECIDED:
        break;
    }
    pl_pins_told_rank(rq, d);
    if (pl_session_is_held_elsewhere(rq, d->worker)) {
        pl_relay_error(rq, 400, "invalid_session", -1,
                       "this request carries only what is new in its session, which %s holds: it "
                       "cannot be pinned to %s",
                       rq->ask.pin->name, d->worker->name);
        return 1;
    }
    if (rq->query_only) {
        pl_relay_choice(rq);
        return 1;
    }
    if (!begin_try(rq, d->worker))
        return 0;
    rq->state = PL_RQ_CALLING;
    if (pl_session_wants_open(rq)) {
        int rc = pl_session_open(rq);
        if (rc != 1)
            return rc != 0; /* goes on later, or was answered; 0: decide again */
    }
    pl_proxy_send(rq);
    return 1;
}

void pl_proxy_send(pl_request *rq)
{
    rq->state = PL_RQ_CALLING;
    if (rq->api == PL_API_OPEN_SESSION) {
        pl_session_answer_open(rq);
        return;
    }
    rq->attempts++;
    if (pl_forward(rq, false) == 0)
        pl_prompt_sent(rq);
    else
        pl_relay_error(rq, 503, "out_of_memory", 1, "the router is out of memory");
}

static void decide_and_send(pl_request *rq)
{
    if (rq->refusal) {
        pl_explain_decide(rq);
        return;
    }
    if (atomic_load_explicit(&rq->loop->router->cutting, memory_order_relaxed)) {
        pl_relay_error(rq, 503, "cut", 1, SHUTTING_DOWN);
        return;
    }
    if (pl_prompt_refused(rq))
        return;
    for (int round = 0; round < 8; round++)
        if (decide_once(rq))
            return;
    /* eight times the chosen worker was taken by others: wait like everybody */
    if (!wait_for_capacity(rq, rq->loop->router->config.queue_seconds, false))
        pl_relay_error(rq, 503, "no_worker", 1, "every engine is busy");
}

void pl_proxy_begin(pl_request *rq)
{
    if (pl_prompt_begin(rq))
        decide_and_send(rq);
}

/* After a wait, a look-up or a failure: on the fleet as it is now, with the engines that were added
 * since. */
void pl_proxy_decide(pl_request *rq)
{
    pl_loop *l = rq->loop;
    const pl_model *m = rq->view == l->view ? NULL : pl_view_model(l->view, rq->ask.model->id);
    if (m) { /* else nobody serves it any more, which the old view's engines say, too */
        pl_view *old = rq->view; /* keeps the pin until here */
        if (rq->ask.pin && !pl_model_has(m, rq->ask.pin))
            rq->ask.pin = NULL;
        rq->view = pl_view_ref(l->view);
        rq->ask.model = m;
        rq->ask.strings.model = m->id;
        pl_view_unref(old);
    }
    decide_and_send(rq);
}

bool pl_proxy_another_worker(const pl_request *rq)
{
    uint64_t now = pl_now_ns();
    for (int i = 0; i < rq->ask.model->workers_n; i++) {
        const pl_worker_state *w = rq->ask.model->workers[i];
        bool tried = w->engine == rq->engine;
        for (int k = 0; k < rq->ask.tried_n && !tried; k++)
            tried = rq->ask.tried[k]->engine == w->engine;
        if (!tried && pl_engine_why(w->engine, &rq->loop->router->config.decider.breaker, now) == 0)
            return true;
    }
    return false;
}

bool pl_proxy_may_retry(pl_request *rq, int status)
{
    pl_loop *l = rq->loop;
    const pl_config *c = &l->router->config;
    if (rq->attempts > c->retries || rq->ask.tried_n >= 8 || !pl_proxy_another_worker(rq) ||
        pl_pins_any(rq))
        return false;
    bool budget = l->retry_tokens >= 1;
    const struct pl_fault fault = {
        .waited_seconds = rq->ask.req.waited_seconds,
        .kind = PL_ENGINE_FAILED,
        .status = status,
        .attempts = rq->attempts,
        .budget_left = budget,
        .delta = pl_session_is_delta(rq),
    };
    double arg;
    l->vm_used = true;
    if (pl_decide_fault(l->decider, &rq->ask, &fault, &arg) != PL_RETRY)
        return false;
    if (!budget)
        pl_count(&l->metrics.retry_budget_exhausted, 1);
    return budget;
}

void pl_proxy_retry(pl_request *rq)
{
    pl_loop *l = rq->loop;
    l->retry_tokens -= 1;
    pl_count(&l->metrics.retries, 1);
    atomic_fetch_add_explicit(&rq->engine->retries, 1, memory_order_relaxed);
    pl_engine_ref(rq->engine); /* the next view may not have it any more */
    rq->ask.tried[rq->ask.tried_n++] = rq->worker;
    rq->ask.req.attempt++;
    pl_proxy_decide(rq);
}

/* The router itself lacks memory, or a connection to give: no engine is to blame, nor would another
 * one help. */
static void own_failure(pl_request *rq, int err, const char *detail)
{
    bool memory = err == PL_ENOMEM;
    static unsigned long seen[2][2];
    if (pl_log_allow(seen[memory], 10))
        pl_log(PL_LOG_ERROR, memory ? "out_of_memory" : "no_connection", "%s (request %.*s)%s",
               detail, PL_FMT(rq->id), memory ? "" : "; is ulimit -n too low?");
    if (rq->state == PL_RQ_STREAMING)
        pl_forward_abort(rq);
    pl_proxy_end_try(rq, -1);
    if (rq->state == PL_RQ_STREAMING) {
        pl_relay_broken(rq, PL_END_CUT, "the router is out of memory");
        return;
    }
    if (rq->session)
        pl_session_try_failed(rq, err);
    if (memory)
        pl_relay_error(rq, 503, "out_of_memory", 1, "the router is out of memory");
    else
        pl_relay_error(rq, 503, "router_overloaded", 1, "the router cannot open a connection: %s",
                       detail);
}

void pl_proxy_failed(pl_request *rq, int err, int status, const char *detail)
{
    pl_loop *l = rq->loop;
    if (err == PL_EUNAVAILABLE || err == PL_ENOMEM) {
        own_failure(rq, err, detail ? detail : pl_strerror(err));
        return;
    }
    /* a head that told of a failure was counted when it came: once for each try */
    bool counted = rq->state == PL_RQ_STREAMING && pl_relay_is_failure(rq->status);
    if (!counted) {
        pl_count(&l->metrics.upstream_failures, 1);
        atomic_fetch_add_explicit(&rq->engine->failed, 1, memory_order_relaxed);
    }
    static unsigned long seen[2];
    if (pl_log_allow(seen, 10))
        pl_log(PL_LOG_WARN, "engine_failed", "%s: %s%s%s (request %.*s)", rq->engine->name,
               pl_strerror(err), detail ? ": " : "", detail ? detail : "", PL_FMT(rq->id));
    if (err == PL_ETIMEOUT)
        pl_forward_abort(rq); /* it may still be at work for nobody */
    bool judged = !rq->breaker_open_end;
    pl_proxy_end_try(rq, 0);
    if (rq->state == PL_RQ_STREAMING) {
        if (judged && !counted) /* by its head, which was a success; its end is not */
            pl_breaker_failure(rq->engine, &l->router->config.decider.breaker, pl_now_ns(), false);
        pl_relay_broken(rq, PL_END_ENGINE_FAILED,
                        "the engine ended the stream before it was complete");
        return;
    }
    if (rq->session)
        pl_session_try_failed(rq, err);
    pl_prompt_try_failed(rq);
    if (pl_proxy_may_retry(rq, status)) {
        pl_proxy_retry(rq);
        return;
    }
    if (pl_session_is_delta(rq)) {
        pl_session_answer_failed(rq);
        return;
    }
    bool timeout = err == PL_ETIMEOUT;
    pl_relay_error(rq, timeout ? 504 : 502, timeout ? "engine_timeout" : "engine_failed", -1,
                   "engine %s: %s", rq->engine->name, detail ? detail : pl_strerror(err));
}

/* --- the server's events --- */

static bool on_head(void *ctx, pl_exchange *x)
{
    return pl_intake_head(ctx, x);
}

static void on_request(void *ctx, pl_exchange *x)
{
    pl_loop *l = ctx;
    if (x->head.method != PL_POST && pl_pages(l, x))
        return;
    pl_count(&l->metrics.requests, 1);
    pl_count(&l->metrics.body_bytes_in, x->body.n);
    l->retry_tokens = fmin(100, l->retry_tokens + l->router->config.retry_budget);
    pl_request *rq = request_new(l, x);
    if (!rq) {
        pl_answer_error(l, x, 503, "out_of_memory", 1, NULL, 0, "the router is out of memory");
        return;
    }
    if (pl_intake_body(rq) == 0 && (!rq->session || pl_session_begin(rq)))
        pl_proxy_begin(rq);
}

/* The client has left a turn of an engine's session: the engine is told, and its answer is read to
 * the end, since it takes no other turn before. */
static void discard(pl_request *rq)
{
    pl_forward_abort(rq);
    observe(rq, PL_END_CLIENT_GONE);
    rq->x->user = NULL;
    rq->x = NULL;
    rq->state = PL_RQ_DISCARDING;
    pl_session_discard(rq);
}

void pl_proxy_discard_over(pl_request *rq)
{
    pl_proxy_end_try(rq, -1);
    request_free(rq);
}

static void on_gone(void *ctx, pl_exchange *x)
{
    pl_request *rq = x->user;
    if (!rq)
        return;
    if (pl_session_must_discard(rq)) {
        discard(rq);
        return;
    }
    if (rq->state == PL_RQ_QUEUED)
        leave_queue(rq);
    if (rq->state == PL_RQ_CALLING || rq->state == PL_RQ_STREAMING)
        pl_forward_abort(rq);
    pl_proxy_over(rq, PL_END_CLIENT_GONE);
}

static void on_drain(void *ctx, pl_exchange *x)
{
    pl_request *rq = x->user;
    if (rq && rq->call && rq->source_paused) {
        rq->source_paused = false;
        pl_call_resume(rq->call);
    }
}

static void render_error(void *ctx, pl_str path, int status, const char *message, pl_buf *body)
{
    pl_loop *l = ctx;
    pl_count_status(l, status);
    if (pl_api_error(path, status, NULL, message, body) != 0)
        body->n = 0; /* out of memory: an empty body is still an answer */
}

const pl_handlers pl_proxy_handlers = {
    .on_head = on_head,
    .on_request = on_request,
    .on_gone = on_gone,
    .on_drain = on_drain,
    .render_error = render_error,
};

/* --- the loop's messages --- */

static void cut(pl_request *rq, const char *why)
{
    pl_loop *l = rq->loop;
    if (rq->state == PL_RQ_QUEUED)
        leave_queue(rq);
    if (rq->state == PL_RQ_CALLING || rq->state == PL_RQ_STREAMING)
        pl_forward_abort(rq);
    pl_count(&l->metrics.engine_cut, 1);
    pl_proxy_end_try(rq, -1);
    if (rq->state == PL_RQ_STREAMING)
        pl_relay_broken(rq, PL_END_CUT, why);
    else
        pl_relay_error(rq, 503, "cut", 1, "%s", why);
}

int pl_proxy_cut_engine(pl_loop *l, const pl_engine *e)
{
    int n = 0;
    for (pl_request *rq = l->requests, *next; rq; rq = next) {
        next = rq->next;
        if (rq->state == PL_RQ_DISCARDING) {
            if (rq->engine == e)
                pl_session_discarded(rq, false);
        } else if (rq->engine == e && rq->ticket.worker) {
            cut(rq, "the engine was removed before the answer was complete");
            n++;
        }
    }
    return n;
}

void pl_proxy_cut_all(pl_loop *l)
{
    for (pl_request *rq = l->requests, *next; rq; rq = next) {
        next = rq->next;
        if (rq->state == PL_RQ_DISCARDING)
            pl_session_discarded(rq, false);
        else if (rq->x)
            cut(rq, SHUTTING_DOWN);
    }
}

int pl_proxy_engine_requests(const pl_loop *l, const pl_engine *e)
{
    int n = 0;
    for (const pl_request *rq = l->requests; rq; rq = rq->next)
        n += rq->engine == e && rq->ticket.worker;
    return n;
}
