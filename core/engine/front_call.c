/* The life of a call of the simulated engine's front (front_call.h): from its head, through the
 * engine's callbacks, to the end of its answer. Called by front.c and front_admin.c on the front's
 * thread. A call is in its exchange's arena; its parts are on the heap until leave_books, which
 * every end passes through.
 *
 * The callbacks only move a part's counters and pump the call: tokens are derived from a seed, so a
 * slow reader costs no memory beyond the server's own backlog. */
#include "engine/front_call.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/err.h"

const pl_str pl_front_paths[PL_FRONT_PATHS] = {
    PL_STR_INIT("/v1/chat/completions"),
    PL_STR_INIT("/v1/completions"),
    PL_STR_INIT("/v1/responses"),
    PL_STR_INIT("/v1/messages"),
    PL_STR_INIT("/v1/embeddings"),
    PL_STR_INIT("/v1/rerank"),
    PL_STR_INIT("/rerank"),
    PL_STR_INIT("/v1/score"),
    PL_STR_INIT("/score"),
    PL_STR_INIT("/v1/classify"),
    PL_STR_INIT("/classify"),
    PL_STR_INIT("/generate"),
    PL_STR_INIT("/health_generate"),
};
const int pl_front_apis[PL_FRONT_PATHS] = {PL_API_CHAT,     PL_API_COMPLETIONS, PL_API_RESPONSES,
                                           PL_API_MESSAGES, PL_API_EMBEDDINGS,  PL_API_RERANK,
                                           PL_API_RERANK,   PL_API_SCORE,       PL_API_SCORE,
                                           PL_API_CLASSIFY, PL_API_CLASSIFY,    PL_API_GENERATE};

/* --- beginnings and ends --- */

static void remember(pl_front *f, pl_front_call *c, pl_front_call_end end)
{
    pl_front_record *r = &f->records[f->records_n++ % PL_FRONT_RECORDS];
    *r = (pl_front_record){.path = c->path, .rank = c->rank, .end = (int)end};
    snprintf(r->id, sizeof r->id, "%.*s", PL_FMT(pl_str_clip(c->request_id, sizeof r->id - 1)));
    snprintf(r->session, sizeof r->session, "%.*s",
             PL_FMT(pl_str_clip(c->session, sizeof r->session - 1)));
    for (int i = 0; i < c->parts_n; i++) {
        r->prompt += c->parts[i].prompt;
        r->cached += c->parts[i].cached;
        r->output += c->parts[i].ready;
    }
}

/* Takes the call out of the engine and the books; the caller answers or has lost the client. */
static void leave_books(pl_front_call *c)
{
    pl_front *f = c->front;
    for (int i = 0; i < c->parts_n; i++)
        if (c->parts[i].req) {
            pl_sim_abort(pl_front_sim(c), pl_front_now_us(f), c->parts[i].req);
            c->parts[i].req = NULL;
        }
    pl_wheel_cancel(&f->wheel, &c->timer);
    *c->pprev = c->next;
    if (c->next)
        c->next->pprev = c->pprev;
    f->calls_n--;
    free(c->parts);
    c->parts = NULL;
    json_decref(c->documents);
    pl_front_arm(f);
}

/* The end of a call whose record matters: all but those refused before they began. */
static void conclude(pl_front_call *c, pl_front_call_end end)
{
    pl_front *f = c->front;
    if (end == PL_CALL_DONE && c->aborted)
        end = PL_CALL_ABORTED;
    remember(f, c, end);
    f->count[c->path].over[end]++;
    if (end == PL_CALL_DONE)
        pl_hist_observe(&f->e2e, (uint64_t)(pl_front_now_us(f) - c->arrived_us) * 1000);
    leave_books(c);
}

static void on_gone(pl_front_user *u)
{
    conclude((pl_front_call *)u, PL_CALL_GONE);
}

static void on_drain(pl_front_user *u)
{
    pl_front_call *c = (pl_front_call *)u;
    c->paused = false;
    pl_front_call_pump(c);
}

pl_front_call *pl_front_call_begin(pl_front *f, pl_exchange *x, int path)
{
    pl_front_call *c = pl_arena_zalloc(&x->arena, sizeof *c);
    if (!c)
        return NULL;
    c->user = (pl_front_user){on_gone, on_drain};
    c->front = f;
    c->x = x;
    c->path = path;
    c->api = pl_front_apis[path];
    c->created = (int64_t)pl_wall_seconds();
    c->arrived_us = pl_front_now_us(f);
    c->first_us = -1;
    c->choices = 1;
    c->request_id = pl_front_request_id(f, x);
    if (!c->request_id.p)
        return NULL;
    c->after_chunks = f->fault[PL_FAULT_REQUESTS].after_chunks;
    c->delay_ms = f->fault[PL_FAULT_REQUESTS].delay_ms;
    x->user = c;
    c->next = f->calls;
    c->pprev = &f->calls;
    if (c->next)
        c->next->pprev = &c->next;
    f->calls = c;
    f->calls_n++;
    f->count[path].received++;
    return c;
}

void pl_front_call_forget(pl_front_call *c)
{
    c->front->count[c->path].failed++;
    leave_books(c);
}

void pl_front_call_refuse(pl_front_call *c, int status, const char *message)
{
    pl_front *f = c->front;
    pl_exchange *x = c->x;
    pl_front_call_forget(c);
    pl_front_error(f, x, status, "%s", message);
}

/* --- the engine's callbacks --- */

static void on_tokens(void *user, int64_t now_us, int from, int n)
{
    pl_part *p = user;
    pl_front_call *c = p->call;
    p->ready += n;
    p->cached = pl_sim_cached_tokens(p->req);
    if (c->first_us < 0) {
        c->first_us = now_us;
        pl_hist_observe(&c->front->ttft, (uint64_t)(now_us - c->arrived_us) * 1000);
    }
    if (c->stream)
        pl_front_call_pump(c);
}

static void on_finish(void *user, int64_t now_us, pl_sim_finish why)
{
    pl_part *p = user;
    pl_front_call *c = p->call;
    p->cached = pl_sim_cached_tokens(p->req);
    p->req = NULL;
    p->done = true;
    c->parts_done++;
    c->aborted |= why == PL_SIM_REFUSED;
    pl_front_call_pump(c);
}

static const pl_sim_events events = {on_tokens, on_finish};

int pl_front_call_submit(pl_front_call *c, const pl_sim_ask *like)
{
    pl_front *f = c->front;
    /* Parts are the callbacks' user data, so the array must not move once it is used. */
    if (!c->parts) {
        c->parts = calloc((size_t)c->parts_max, sizeof *c->parts);
        if (!c->parts)
            return PL_ENOMEM;
    }
    if (c->parts_n == c->parts_max)
        return PL_ELIMIT;
    pl_sim_ask ask = *like;
    ask.tokens = f->scratch.v;
    ask.n = f->scratch.n;
    if (c->slot) {
        ask.slot = c->slot;
        ask.name = c->id;
        /* The mark that ends the answer, so that the conversation is what it would be if it were
         * sent again as a whole. */
        ask.tail = pl_mark_id(PL_MARK_END);
        ask.tailed = c->api == PL_API_CHAT;
    }
    pl_part *p = &c->parts[c->parts_n];
    *p = (pl_part){.call = c,
                   .index = c->parts_n,
                   .prompt = ask.n + (c->slot ? pl_sim_slot_tokens(c->slot) : 0),
                   .want = ask.output_tokens,
                   .seed = ask.out_seed};
    int rc = pl_sim_ask_for(pl_front_sim(c), pl_front_now_us(f), &ask, &events, p, &p->req);
    if (rc == 0)
        c->parts_n++;
    return rc;
}

/* --- writing --- */

static void on_delay(pl_timer *t)
{
    pl_front_call *c = (pl_front_call *)(void *)((char *)t - offsetof(pl_front_call, timer));
    c->delayed = false;
    c->released = true;
    pl_front_call_pump(c);
}

/* The slow fault: true when the next chunk has to wait. */
static bool hold_back(pl_front_call *c)
{
    if (c->fault != PL_FAULT_SLOW || c->released)
        return false;
    c->delayed = true;
    pl_wheel_arm(&c->front->wheel, &c->timer, c->delay_ms, on_delay);
    return true;
}

void pl_front_call_cut(pl_front_call *c)
{
    pl_exchange *x = c->x;
    conclude(c, PL_CALL_CUT);
    pl_exchange_abort(x);
}

static void start_stream(pl_front_call *c)
{
    pl_header h[3] = {{PL_STR("content-type"), PL_STR("text/event-stream; charset=utf-8")},
                      {PL_STR("cache-control"), PL_STR("no-cache")},
                      {PL_STR("x-request-id"), c->request_id}};
    pl_exchange_start(c->x, 200, h, 3, UINT64_MAX);
    pl_exchange_release_body(c->x);
}

static bool write_out(pl_front_call *c, pl_buf *out)
{
    pl_str s = pl_buf_str(out);
    return s.n && pl_exchange_write(c->x, &s, 1);
}

/* One token's event. */
static int write_token(pl_part *p)
{
    pl_front_call *c = p->call;
    pl_buf *out = &c->front->out;
    int i = p->sent++;
    c->chunks++;
    if (!p->before.p) {
        out->n = 0;
        int rc = pl_front_call_stream_token(p, i, out);
        c->paused = write_out(c, out);
        return rc;
    }
    uint32_t id = pl_sim_output_token(p->seed, i);
    char word[4] = {(char)id, (char)(id >> 8), (char)(id >> 16), (char)(id >> 24)};
    pl_str slices[3] = {p->before, {word, 4}, p->after};
    c->paused = pl_exchange_write(c->x, slices, 3);
    return 0;
}

/* Writes a part's tokens as far as it may; 1 when it has to stop, negative when it failed. */
static int pump_part(pl_part *p)
{
    pl_front_call *c = p->call;
    /* /generate tells the last token and the end in one event. */
    bool joined = c->api == PL_API_GENERATE;
    while (p->sent < p->ready && !(joined && p->sent + 1 == p->want && !p->done)) {
        if (c->paused)
            return 1;
        if (c->fault == PL_FAULT_RESET && c->chunks >= c->after_chunks)
            return PL_ERESET;
        if (hold_back(c))
            return 1;
        c->released = false;
        int rc = write_token(p);
        if (rc != 0)
            return rc;
    }
    if (p->done && !p->told && p->sent == p->ready) {
        pl_buf *out = &c->front->out;
        out->n = 0;
        p->told = true;
        int rc = pl_front_call_stream_part_end(p, out);
        c->paused |= write_out(c, out);
        if (rc != 0)
            return rc;
    }
    return 0;
}

static void pump_stream(pl_front_call *c)
{
    pl_buf *out = &c->front->out;
    int rc = 0;
    if (c->delayed || c->paused)
        return;
    if (!pl_exchange_started(c->x)) {
        start_stream(c);
        out->n = 0;
        rc = pl_front_call_stream_begin(c, out);
        c->paused = write_out(c, out);
    }
    int told = 0;
    for (int i = 0; i < c->parts_n && rc == 0; i++) {
        rc = pump_part(&c->parts[i]);
        told += c->parts[i].told;
    }
    if (rc < 0) {
        pl_front_call_cut(c);
        return;
    }
    if (rc > 0 || told < c->parts_n)
        return;
    out->n = 0;
    if (pl_front_call_stream_end(c, out) != 0) {
        pl_front_call_cut(c);
        return;
    }
    pl_exchange *x = c->x;
    write_out(c, out);
    conclude(c, PL_CALL_DONE);
    pl_exchange_end(x);
}

void pl_front_call_pump(pl_front_call *c)
{
    if (c->stream) {
        pump_stream(c);
        return;
    }
    if (c->parts_done < c->parts_n || c->delayed || hold_back(c))
        return;
    pl_front *f = c->front;
    pl_exchange *x = c->x;
    int rc = 0;
    f->out.n = 0;
    if (c->api != PL_API_OTHER)
        rc = pl_front_call_answer(c);
    if (c->fault == PL_FAULT_RESET && rc == 0) { /* in the middle of the body */
        pl_header type = {PL_STR("content-type"), PL_STR("application/json")};
        pl_str half = {f->out.p, f->out.n / 2};
        pl_exchange_start(x, 200, &type, 1, f->out.n);
        pl_exchange_write(x, &half, 1);
        pl_front_call_cut(c);
        return;
    }
    pl_str id = c->request_id; /* in the exchange's arena, as the call is */
    conclude(c, PL_CALL_DONE);
    if (rc != 0)
        pl_front_error(f, x, 500, "%s", pl_strerror(rc));
    else
        pl_front_json(x, 200, id, pl_buf_str(&f->out));
}

void pl_front_call_abort(pl_front_call *c)
{
    pl_front *f = c->front;
    for (int i = 0; i < c->parts_n; i++) {
        pl_part *p = &c->parts[i];
        if (!p->req)
            continue;
        pl_sim_abort(pl_front_sim(c), pl_front_now_us(f), p->req);
        p->req = NULL;
        p->done = true;
        c->parts_done++;
    }
    c->aborted = true;
    if (c->parts_n) /* a hanging call stays as it is */
        pl_front_call_pump(c);
}
