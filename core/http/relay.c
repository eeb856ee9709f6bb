/* The answer: from the engine's call to the client's exchange, with backpressure, and the router's
 * own error answers. Bytes pass as they come; a stream is split into events only when usage is
 * wanted. Called by forward.c's call events on the loop's thread. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "http/request.h"

#define ANSWER_COPY_MAX (1u << 20) /* a JSON answer above this is not searched for usage */
#define EVENT_MAX       (8u << 20) /* an SSE event above this is passed on unread */
#define OWN_HEADERS     7

void pl_count_status(pl_loop *l, int status)
{
    pl_loop_metrics *m = &l->metrics;
    pl_count(status >= 500   ? &m->responses_5xx
             : status >= 400 ? &m->responses_4xx
             : status >= 300 ? &m->responses_3xx
                             : &m->responses_2xx,
             1);
}

/* --- headers --- */

/* x-request-id and the x-perilune-* headers: at most 5. */
static int own_headers(const pl_request *rq, bool refused, pl_header *h)
{
    int n = 0;
    h[n++] = (pl_header){PL_STR("x-request-id"), rq->id};
    if (!rq->loop->router->config.response_headers)
        return n;
    if (rq->worker) {
        h[n++] = (pl_header){PL_STR("x-perilune-worker"), pl_str_c(rq->worker->name)};
        h[n++] = (pl_header){PL_STR("x-perilune-reason"), pl_str_c(rq->decision.reason)};
    }
    if (pl_session_label(rq) && !refused)
        h[n++] = (pl_header){PL_STR("x-perilune-session"), pl_str_c(pl_session_label(rq))};
    h[n++] = (pl_header){PL_STR("x-perilune-policy"),
                         rq->policy.p ? rq->policy
                                      : pl_str_c(pl_decider_policy_name(rq->loop->decider))};
    return n;
}

static bool passed_header(pl_str name, pl_str connection)
{
    if (pl_header_is_hop(name, connection) || pl_str_ieq(name, PL_STR("x-request-id")))
        return false;
    return name.n < 11 || !pl_str_ieq((pl_str){name.p, 11}, PL_STR("x-perilune-"));
}

/* --- the router's own errors --- */

void pl_answer_error(pl_loop *l, pl_exchange *x, int status, const char *code,
                     double retry_after_seconds, const pl_header *extra, int extra_n,
                     const char *message)
{
    pl_header h[OWN_HEADERS + 8];
    char seconds[24];
    int n = 0;
    h[n++] = (pl_header){PL_STR("content-type"), PL_STR("application/json")};
    if (retry_after_seconds >= 0) {
        snprintf(seconds, sizeof seconds, "%.0f", ceil(retry_after_seconds));
        h[n++] = (pl_header){PL_STR("retry-after"), pl_str_c(seconds)};
    }
    for (int i = 0; i < extra_n && i < OWN_HEADERS; i++)
        h[n++] = extra[i];
    pl_buf body = {0};
    if (pl_api_error(x->head.path, status, code, message, &body) != 0)
        body.n = 0;
    pl_count_status(l, status);
    pl_exchange_respond(x, status, h, n, pl_buf_str(&body));
    pl_buf_free(&body);
}

static enum pl_end_cause cause_of(int status, const char *code)
{
    if (strcmp(code, "cut") == 0)
        return PL_END_CUT;
    if (strcmp(code, "overloaded") == 0 || strcmp(code, "queue_full") == 0)
        return PL_END_SHED;
    if (status == 504 || strcmp(code, "queue_timeout") == 0)
        return PL_END_TIMEOUT;
    return status == 502 ? PL_END_ENGINE_FAILED : PL_END_REJECTED;
}

void pl_relay_error(pl_request *rq, int status, const char *code, double retry_after_seconds,
                    const char *fmt, ...)
{
    char message[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(message, sizeof message, fmt, ap);
    va_end(ap);
    if (rq->refusal) {
        pl_explain_refused(rq->refusal, status, code, message);
        return;
    }
    pl_loop *l = rq->loop;
    pl_exchange *x = rq->x;
    pl_header own[OWN_HEADERS];
    /* the names must outlive the request: the engine may go with it */
    int n = own_headers(rq, true, own);
    for (int i = 0; i < n; i++)
        own[i].value = pl_arena_str(&x->arena, own[i].value);
    rq->status = status;
    pl_proxy_end_try(rq, -1);
    pl_proxy_over(rq, cause_of(status, code));
    pl_answer_error(l, x, status, code, retry_after_seconds, own, n, message);
}

void pl_relay_broken(pl_request *rq, enum pl_end_cause cause, const char *message)
{
    pl_loop *l = rq->loop;
    pl_exchange *x = rq->x;
    pl_count(&l->metrics.streams_broken, 1);
    bool sse = rq->sse;
    pl_str close = pl_sse_tail_close(&rq->tail);
    pl_proxy_over(rq, cause);
    bool cut = cause == PL_END_CUT;
    pl_buf event = {0};
    if (!sse || pl_buf_add(&event, close.p, close.n) != 0 ||
        pl_api_error_event(x->head.path, cut ? 503 : 502, cut ? "cut" : "engine_failed", message,
                           &event) != 0) {
        /* a body of another kind cannot say that it is incomplete: the missing end says it */
        pl_buf_free(&event);
        pl_exchange_abort(x);
        return;
    }
    pl_str slice = pl_buf_str(&event);
    pl_exchange_write(x, &slice, 1);
    pl_exchange_end_close(x);
    pl_buf_free(&event);
}

/* The choice alone, for a client that only asks for it (annotations: query_instance_id). */
void pl_relay_choice(pl_request *rq)
{
    pl_loop *l = rq->loop;
    pl_exchange *x = rq->x;
    pl_header h[OWN_HEADERS + 1] = {{PL_STR("content-type"), PL_STR("application/json")}};
    const pl_worker_state *w = rq->decision.worker;
    rq->worker = rq->decision.worker; /* for the headers */
    int n = 1 + own_headers(rq, false, h + 1);
    for (int i = 1; i < n; i++)
        h[i].value = pl_arena_str(&x->arena, h[i].value);
    pl_buf b = {0};
    int rc = pl_buf_addf(&b, "{\"object\":\"perilune.choice\",\"worker\":");
    if (rc == 0)
        rc = pl_json_quote(&b, pl_str_c(w->name));
    if (rc == 0)
        rc = pl_buf_addf(&b,
                         ",\"reason\":\"%s\",\"nvext\":{\"worker_id\":{\"decode_worker_id\":%d,"
                         "\"decode_dp_rank\":%d}}}",
                         rq->decision.reason, w->engine->workers[0].slot, w->rank);
    rq->status = rc == 0 ? 200 : 503;
    pl_count_status(l, rq->status);
    pl_proxy_over(rq, PL_END_OK);
    pl_exchange_respond(x, rc == 0 ? 200 : 503, h, n, pl_buf_str(&b));
    pl_buf_free(&b);
}

/* --- the engine's answer --- */

/* What an engine does not implement is no failure of its: a client could ask for it on purpose. */
bool pl_relay_is_failure(int status)
{
    return status >= 500 && status != 501 && status != 505;
}

/* The breaker learns from the head of a failure, and of a probe: a long stream must not hold it
 * back. But engines begin a stream before they have computed anything, so it takes a whole answer
 * to end a row of failures: pl_proxy_end_try tells of that. */
static void judge(pl_request *rq, int status)
{
    if (pl_relay_is_failure(status)) {
        pl_count(&rq->loop->metrics.upstream_failures, 1);
        atomic_fetch_add_explicit(&rq->engine->failed, 1, memory_order_relaxed);
        pl_breaker_failure(rq->engine, &rq->loop->router->config.decider.breaker, pl_now_ns(),
                           rq->probe);
    } else if (status >= 400) {
        atomic_fetch_add_explicit(&rq->engine->client_errors, 1, memory_order_relaxed);
        pl_breaker_neutral(rq->engine, rq->probe);
    } else if (rq->probe) {
        pl_breaker_success(rq->engine, true);
        /* the engine is back for those that wait */
        pl_queue_freed(rq->loop->router->queue, rq->worker, rq->loop->view);
    } else {
        return;
    }
    rq->breaker_open_end = false;
}

static bool starts_media_type(pl_str value, pl_str type)
{
    return value.p && value.n >= type.n && pl_str_ieq((pl_str){value.p, type.n}, type);
}

static void prepare_usage(pl_request *rq, const pl_head *head)
{
    if (!rq->want_usage && !rq->swallow_usage && !pl_session_reply(rq))
        return;
    if (!rq->sse || head->status != 200 || pl_head_find(head, PL_STR("content-encoding")).p) {
        rq->swallow_usage = false; /* not a stream after all, or unreadable */
        return;
    }
    rq->events = malloc(sizeof *rq->events);
    if (rq->events)
        pl_sse_init(rq->events, EVENT_MAX);
    else
        rq->swallow_usage = false; /* out of memory: the client sees one chunk more */
}

/* To the client. False: out of memory, it is over. */
static bool pass_head(pl_request *rq, const pl_head *head)
{
    pl_loop *l = rq->loop;
    pl_exchange *x = rq->x;
    judge(rq, head->status);
    if (rq->session)
        pl_session_sent(rq, head->status);
    rq->state = PL_RQ_STREAMING;
    rq->status = head->status;
    rq->sse =
        starts_media_type(pl_head_find(head, PL_STR("content-type")), PL_STR("text/event-stream"));
    if (rq->sse)
        pl_count(&l->metrics.streams, 1);
    pl_count_status(l, head->status);
    prepare_usage(rq, head);

    pl_str connection = pl_forward_hops(&x->arena, head);
    pl_header *h = pl_arena_alloc(&x->arena, ((size_t)head->headers_n + OWN_HEADERS) * sizeof *h);
    if (!h) {
        pl_proxy_over(rq, PL_END_CUT);
        pl_exchange_abort(x);
        return false;
    }
    int n = own_headers(rq, false, h);
    for (int i = 0; i < head->headers_n; i++)
        if (passed_header(head->headers[i].name, connection))
            h[n++] = head->headers[i];
    /* a stream of announced length would have no room for the event that tells its break */
    uint64_t length = rq->sse || head->chunked ? UINT64_MAX : head->content_length;
    pl_exchange_start(x, head->status, h, n, length);
    if (!pl_decider_wants_done(l->decider))
        pl_exchange_release_body(x); /* a policy's done may still ask for members of it */
    return true;
}

static void copy_answer(pl_request *rq, const pl_str *slices, int n)
{
    for (int i = 0; i < n; i++)
        if (rq->answer.n + slices[i].n > ANSWER_COPY_MAX ||
            pl_buf_add(&rq->answer, slices[i].p, slices[i].n) != 0)
            rq->answer_too_big = true;
}

/* --- a refusal of a turn inside an engine's session: is it the session that is refused? Its body
 * says so, and is read before anything is passed on --- */

static bool hold_refusal(pl_request *rq, const pl_head *head)
{
    pl_arena *a = &rq->x->arena;
    if (head->status < 400 || head->status > 499 || !pl_session_inside(rq) ||
        pl_head_find(head, PL_STR("content-encoding")).p)
        return false;
    pl_head *copy = pl_arena_alloc(a, sizeof *copy);
    pl_header *h = pl_arena_alloc(a, ((size_t)head->headers_n + 1) * sizeof *h);
    if (!copy || !h)
        return false;
    *copy = *head;
    copy->headers = h;
    for (int i = 0; i < head->headers_n; i++) {
        h[i] = (pl_header){pl_arena_str(a, head->headers[i].name),
                           pl_arena_str(a, head->headers[i].value)};
        if (!h[i].name.p || (head->headers[i].value.n && !h[i].value.p))
            return false;
    }
    rq->held = copy;
    return true;
}

static bool keep_refusal(pl_request *rq, const pl_str *slices, int n, size_t bytes)
{
    if (rq->answer.n + bytes > ANSWER_COPY_MAX || pl_buf_reserve(&rq->answer, bytes) != 0)
        return false;
    copy_answer(rq, slices, n);
    return true;
}

/* It is an answer like any other. False: as pass_head. */
static bool pass_refusal(pl_request *rq)
{
    const pl_head *head = rq->held;
    rq->held = NULL;
    if (!pass_head(rq, head))
        return false;
    pl_str kept = pl_buf_str(&rq->answer);
    pl_count(&rq->loop->metrics.body_bytes_out, kept.n);
    if (kept.n)
        pl_exchange_write(rq->x, &kept, 1);
    return true;
}

void pl_relay_head(pl_request *rq, const pl_head *head)
{
    pl_loop *l = rq->loop;
    bool doubtful = rq->session && pl_session_doubtful(head->status);
    if (pl_relay_is_failure(head->status) && pl_proxy_may_retry(rq, head->status)) {
        pl_count(&l->metrics.upstream_failures, 1);
        atomic_fetch_add_explicit(&rq->engine->failed, 1, memory_order_relaxed);
        pl_proxy_end_try(rq, 0);
        pl_prompt_try_failed(rq);
        if (doubtful)
            pl_session_try_failed(rq, PL_EPROTOCOL);
        pl_proxy_retry(rq);
        return;
    }
    if (doubtful && pl_session_is_delta(rq)) {
        judge(rq, head->status);
        pl_proxy_end_try(rq, -1);
        pl_session_try_failed(rq, PL_EPROTOCOL);
        pl_session_answer_failed(rq);
        return;
    }
    if (!hold_refusal(rq, head))
        pass_head(rq, head);
}

static void first_byte(pl_request *rq)
{
    rq->first_byte_ns = pl_now_ns();
    /* only a stream's first byte is a first token; a whole answer's first byte says when the last
     * one was made */
    bool token = rq->sse && rq->status == 200, prefill = rq->ticket.prefill_tokens > 0;
    pl_ticket_first_token(&rq->ticket,
                          token ? (double)(rq->first_byte_ns - rq->x->head_at_ns) / 1e9 : -1);
    if (prefill && rq->engine->max_queued_prefill_tokens > 0)
        pl_queue_freed(rq->loop->router->queue, rq->worker, rq->loop->view);
}

static void pause_when(pl_request *rq, bool backlog)
{
    if (backlog && rq->call && !rq->source_paused) {
        rq->source_paused = true;
        pl_count(&rq->loop->metrics.paused, 1);
        pl_call_pause(rq->call);
    }
}

static int on_event(void *ctx, const pl_sse_event *ev)
{
    pl_request *rq = ctx;
    /* most events have neither; looking for the words is cheaper than for the members */
    bool may = memmem(ev->data.p, ev->data.n, "usage", 5) ||
               memmem(ev->data.p, ev->data.n, "meta_info", 9);
    bool told = may && pl_usage_read(ev->data, &rq->usage);
    if (pl_session_reply(rq) && ev->data.p)
        pl_reply_event(pl_session_reply(rq), ev->data);
    if (!rq->swallow_usage)
        return 0;
    if (told && pl_usage_only_chunk(ev->data)) {
        pl_count(&rq->loop->metrics.usage_swallowed, 1);
        return 0;
    }
    return pl_buf_add(&rq->answer, ev->raw.p, ev->raw.n);
}

/* Reads events for usage; with swallow_usage, what is to be passed on gathers in rq->answer. An
 * event that is too big to be held ends the reading, not the stream: from then on bytes pass
 * unread. PL_ENOMEM loses bytes. */
static int read_events(pl_request *rq, const pl_str *slices, int n)
{
    int rc = 0, i = 0;
    for (; i < n && rc == 0; i++)
        rc = pl_sse_feed(rq->events, slices[i], on_event, rq);
    if (rc != PL_ELIMIT)
        return rc;
    rc = 0;
    if (rq->swallow_usage) {
        pl_str rest = pl_sse_rest(rq->events);
        rc = pl_buf_add(&rq->answer, rest.p, rest.n);
        for (; i < n && rc == 0; i++)
            rc = pl_buf_add(&rq->answer, slices[i].p, slices[i].n);
    }
    rq->events_unreadable = true;
    return rc;
}

/* Events that ended in these bytes: about one for each generated token. */
static int64_t events_in(const pl_sse_tail *before, const pl_str *slices, int n)
{
    int64_t events =
        before->n && before->last[before->n - 1] == '\n' && slices[0].n && slices[0].p[0] == '\n';
    for (int i = 0; i < n; i++) {
        const char *p = slices[i].p, *end = p + slices[i].n;
        while (p < end && (p = memchr(p, '\n', (size_t)(end - p))) != NULL)
            events += ++p < end && *p == '\n';
    }
    return events;
}

/* Only the last bytes of a read say where the stream stands. */
static void feed_tail(pl_request *rq, const pl_str *slices, int n)
{
    int from = n;
    for (size_t bytes = 0; from > 0 && bytes < sizeof rq->tail.last; from--)
        bytes += slices[from - 1].n;
    for (; from < n; from++)
        pl_sse_tail_feed(&rq->tail, slices[from]);
}

void pl_relay_body(pl_request *rq, const pl_str *slices, int n)
{
    pl_loop *l = rq->loop;
    size_t bytes = 0;
    for (int i = 0; i < n; i++)
        bytes += slices[i].n;
    if (rq->held && keep_refusal(rq, slices, n, bytes))
        return;
    if (rq->held) { /* so long that it is none of the session */
        rq->answer_too_big = true;
        if (!pass_refusal(rq))
            return;
    }
    if (!rq->first_byte_ns && bytes)
        first_byte(rq);
    pl_count(&l->metrics.chunks, 1);
    pl_count(&l->metrics.body_bytes_out, bytes);

    if (rq->sse)
        pl_ticket_output(&rq->ticket, events_in(&rq->tail, slices, n));
    pl_str gathered;
    if (rq->events && !rq->events_unreadable) {
        if (read_events(rq, slices, n) != 0) {
            pl_proxy_failed(rq, PL_ENOMEM, 0, "the router is out of memory");
            return;
        }
        if (rq->swallow_usage) {
            gathered = pl_buf_str(&rq->answer);
            rq->answer.n = 0;
            slices = &gathered;
            n = 1;
            if (rq->events_unreadable)
                rq->swallow_usage = false;
            if (gathered.n == 0)
                return;
        }
    } else if ((rq->want_usage || pl_session_reply(rq)) && !rq->sse && !rq->answer_too_big) {
        copy_answer(rq, slices, n);
    }
    if (rq->sse)
        feed_tail(rq, slices, n);
    pause_when(rq, pl_exchange_write(rq->x, slices, n));
}

void pl_relay_end(pl_request *rq)
{
    pl_exchange *x = rq->x;
    if (rq->held && (pl_session_refused(rq, pl_buf_str(&rq->answer)) || !pass_refusal(rq)))
        return;
    if (rq->swallow_usage) {
        pl_str rest = pl_sse_rest(rq->events);
        if (rest.n)
            pl_exchange_write(x, &rest, 1);
    } else if (!rq->sse && rq->answer.n && !rq->answer_too_big) {
        pl_usage_read(pl_buf_str(&rq->answer), &rq->usage);
        if (pl_session_reply(rq))
            pl_reply_answer(pl_session_reply(rq), pl_buf_str(&rq->answer));
    }
    if (rq->session)
        pl_session_answer_ended(rq);
    if (!rq->first_byte_ns)
        first_byte(rq);
    pl_proxy_over(rq, pl_relay_is_failure(rq->status) ? PL_END_ENGINE_FAILED : PL_END_OK);
    pl_exchange_end(x);
}
