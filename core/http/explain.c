/* Explains a decision: see explain.h. The question travels as a message to loop 0 and back. There
 * it becomes a request like any other, up to where one would be sent: read on a loop of straw (a
 * struct with the real loop's view, policy and look into the caches, whose counters nobody reads),
 * then, on the real loop, tokenized where that is needed, and decided on dry. Its exchange is made
 * up: a head and a body without a client, so errors go into the refusal. While it waits for its
 * token ids it is in the loop's list, where the loop's end finds it. */
#include "http/explain.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "http/request.h"
#include "policy/dry.h"
#include "policy/record_json.h"

struct pl_refusal {
    int status; /* 0: not refused */
    char code[48], message[1024];
};

typedef struct question {
    pl_message message;
    pl_router *router;
    pl_request rq;
    pl_exchange x;
    struct pl_refusal refusal;
    bool waits; /* for its token ids */
    int status;
    json_t *answer;
    pl_explain_done done;
    void *ctx;
} question;

static void question_free(question *q)
{
    json_decref(q->answer);
    pl_arena_free(&q->x.arena);
    free(q);
}

static json_t *error_json(const char *code, const char *message)
{
    return json_pack("{s:{s:s, s:s}}", "error", "code", code, "message",
                     pl_str_utf8(pl_str_c(message), NULL) ? message : "not usable");
}

/* --- the answer --- */

static json_t *text(pl_str s)
{
    json_t *j = json_stringn(s.n ? s.p : "", s.n);
    return j ? j : json_string("?"); /* what a client named and is no UTF-8 */
}

static json_t *choice_json(const pl_decision *d)
{
    static const char *const kinds[] = {
        [PL_DECIDED] = "decided",       [PL_ASK_QUEUE] = "queue",
        [PL_ASK_SHED] = "shed",         [PL_NO_WORKER] = "no_worker",
        [PL_PIN_LOST] = "session_lost", [PL_NO_SESSION_WORKER] = "no_session_worker"};
    bool sent = d->kind == PL_DECIDED;
    json_t *shrink = d->shrink_max_tokens > 0 ? pl_number_json(d->shrink_max_tokens) : json_null();
    return json_pack("{s:s, s:s?, s:s, s:b, s:b, s:o, s:o, s:o, s:o}", "kind", kinds[d->kind],
                     "worker", sent ? d->worker->name : NULL, "reason", d->reason, "by_policy",
                     d->by_policy, "spilled", d->spilled, "cached_tokens",
                     sent ? pl_number_json(d->cached_tokens) : json_null(), "wait_seconds",
                     d->kind == PL_ASK_QUEUE ? pl_number_json(d->wait_seconds) : json_null(),
                     "retry_after_seconds",
                     d->kind == PL_ASK_SHED ? pl_number_json(d->retry_after_seconds) : json_null(),
                     "shrink_max_tokens", shrink);
}

static json_t *failure_json(const pl_dry *dry)
{
    return dry->failed
               ? json_pack("{s:s, s:s, s:i, s:s}", "hook", pl_hook_name(dry->hook), "file",
                           dry->error.file, "line", dry->error.line, "message", dry->error.message)
               : json_null();
}

static json_t *prompt_json(const pl_request *rq)
{
    static const char *const kinds[] = {
        [PL_KEYS_NONE] = "none", [PL_KEYS_TOKENS] = "token_blocks", [PL_KEYS_TEXT] = "text_chunks"};
    const pl_prompt *p = rq->prompt;
    if (!p || !p->sizes_n)
        return json_null();
    const pl_keys *k = &p->size[0].keys;
    return json_pack("{s:s, s:I, s:i, s:b}", "keys", kinds[k->kind], "count", (json_int_t)k->n,
                     k->kind == PL_KEYS_TEXT ? "chunk_bytes" : "block_tokens", (int)k->unit,
                     "published_for", p->size[0].space != 0);
}

static json_t *workers_json(const pl_request *rq, const pl_dry *dry)
{
    const pl_model *m = rq->ask.model;
    json_t *list = json_array();
    for (int i = 0; list && i < m->workers_n && i < PL_MAX_WORKERS; i++) {
        struct pl_worker w;
        pl_decide_shown(rq->loop->decider, &rq->ask, i, &w);
        json_t *score = dry->cost && w.eligible ? pl_number_json(dry->cost[i]) : json_null();
        json_t *j = json_pack("{s:s, s:s, s:o}", "name", m->workers[i]->name, "engine",
                              m->workers[i]->engine->name, "score", score);
        json_t *record = pl_worker_json(&w);
        if (j && record)
            json_object_update(j, record);
        json_decref(record);
        json_array_append_new(list, j);
    }
    return list;
}

/* As the hooks saw it: the place of the bound worker is the decider's to find. */
static json_t *session_json(const pl_request *rq)
{
    struct pl_session s = rq->ask.session;
    const pl_model *m = rq->ask.model;
    if (s.event == PL_SESSION_NONE)
        return json_null();
    for (int i = 0; i < m->workers_n; i++)
        if (m->workers[i]->slot == s.bound_slot && m->workers[i]->generation == s.bound_generation)
            s.bound_index = i;
    return pl_session_json(&s);
}

static json_t *explanation(const pl_request *rq, const pl_dry *dry)
{
    pl_decider *d = rq->loop->decider;
    return json_pack(
        "{s:o, s:s, s:s, s:I, s:b, s:o, s:o, s:b, s:o, s:o, s:o, s:o}", "model",
        text(rq->ask.model->id), "path", rq->x->head.path.p, "policy", pl_decider_policy_name(d),
        "policy_generation", (json_int_t)pl_decider_generation(d), "policy_suspended",
        dry->suspended, "policy_error", failure_json(dry), "choice", choice_json(&dry->decision),
        "looks_at_caches", rq->ask.match != NULL, "prompt", prompt_json(rq), "request",
        pl_req_json(&rq->ask.req), "session", session_json(rq), "workers", workers_json(rq, dry));
}

/* --- on loop 0 --- */

/* A store that has to ask a server is not waited for: the session is shown as not bound. */
static void look_up_session(pl_loop *l, pl_request *rq)
{
    pl_store_call c = {.op = PL_STORE_PEEK,
                       .name = {rq->ask.strings.tenant, rq->ask.strings.session_id}};
    int rc = l->store ? pl_store_start(l->store, &c) : PL_ENOTFOUND;
    if (rc == PL_STORE_PENDING)
        pl_store_cancel(l->store, &c);
    pl_session_explain(rq, rc == 0 ? &c.binding : NULL);
}

/* --- there and back --- */

static void answer(pl_message *m, void *ctx)
{
    (void)ctx;
    question *q = (question *)m;
    json_t *j = q->answer;
    q->answer = NULL;
    q->done(q->ctx, j ? q->status : 503, j);
    question_free(q);
}

/* Back to the control thread, with what there is. */
static void over(question *q)
{
    pl_request *rq = &q->rq;
    if (q->waits) {
        if (rq->prev)
            rq->prev->next = rq->next;
        else
            rq->loop->requests = rq->next;
        if (rq->next)
            rq->next->prev = rq->prev;
    }
    if (q->refusal.status) {
        q->status = q->refusal.status;
        q->answer = error_json(q->refusal.code, q->refusal.message);
    }
    pl_prompt_free(rq);
    pl_session_free(rq);
    pl_view_unref(rq->view);
    q->message.run = answer;
    if (pl_mailbox_post(&q->router->control_mailbox, &q->message) != 0)
        answer(&q->message, q->router); /* the control loop has ended: the threads are joined */
}

static question *question_of(pl_request *rq)
{
    return (question *)((char *)rq - offsetof(question, rq));
}

void pl_explain_refused(struct pl_refusal *r, int status, const char *code, const char *message)
{
    question *q = (question *)((char *)r - offsetof(question, refusal));
    r->status = status;
    snprintf(r->code, sizeof r->code, "%s", code ? code : "refused");
    snprintf(r->message, sizeof r->message, "%s", message);
    if (q->waits)
        over(q); /* the loop ends */
}

void pl_explain_decide(pl_request *rq)
{
    question *q = question_of(rq);
    pl_loop *l = rq->loop;
    pl_dry dry;
    if (rq->session)
        look_up_session(l, rq);
    if (pl_decide_dry(l->decider, &rq->ask, &dry) == 0) {
        l->vm_used = true;
        q->answer = explanation(rq, &dry);
        q->status = 200;
    }
    over(q);
}

/* Reads the request; false: it was refused, or there is no memory. */
static bool read_request(pl_loop *l, question *q)
{
    pl_loop *straw = calloc(1, sizeof *straw);
    if (!straw)
        return false;
    straw->router = l->router;
    straw->view = l->view;
    straw->decider = l->decider;
    straw->holdings = l->holdings;
    straw->rng = l->rng;
    q->rq.loop = straw;
    int rc = pl_intake_body(&q->rq);
    q->rq.loop = l;
    free(straw);
    return rc == 0;
}

static void on_loop(pl_message *m, void *ctx)
{
    question *q = (question *)m;
    pl_loop *l = ctx;
    pl_request *rq = &q->rq;
    q->x.head_at_ns = pl_now_ns();
    rq->x = &q->x;
    rq->view = pl_view_ref(l->view);
    rq->usage = (pl_usage){-1, -1, -1};
    rq->refusal = &q->refusal;
    if (!read_request(l, q)) {
        over(q);
        return;
    }
    rq->next = l->requests;
    if (rq->next)
        rq->next->prev = rq;
    l->requests = rq;
    q->waits = true;
    pl_proxy_begin(rq);
}

static bool copy(question *q, pl_str path, const pl_head *head, pl_str body)
{
    pl_arena *a = &q->x.arena;
    pl_header *headers = pl_arena_alloc(a, ((size_t)head->headers_n + 1) * sizeof *headers);
    pl_str at = pl_arena_str(a, path);
    q->x.body = pl_arena_str(a, body);
    if (!headers || !at.p || !q->x.body.p)
        return false;
    for (int i = 0; i < head->headers_n; i++) {
        headers[i] = (pl_header){pl_arena_str(a, head->headers[i].name),
                                 pl_arena_str(a, head->headers[i].value)};
        if (!headers[i].name.p || !headers[i].value.p)
            return false;
    }
    q->x.head = (pl_head){.request = true,
                          .method = PL_POST,
                          .target = at,
                          .path = at,
                          .content_length = body.n,
                          .headers = headers,
                          .headers_n = head->headers_n};
    return true;
}

int pl_explain(pl_router *r, pl_str path, const pl_head *head, pl_str body, pl_explain_done done,
               void *ctx)
{
    question *q = calloc(1, sizeof *q);
    if (!q || !copy(q, path, head, body)) {
        if (q)
            question_free(q);
        return PL_ENOMEM;
    }
    q->message.run = on_loop;
    q->router = r;
    q->done = done;
    q->ctx = ctx;
    int rc = pl_mailbox_post(&r->loops[0].mailbox, &q->message);
    if (rc != 0)
        question_free(q);
    return rc;
}
