/* The rest of a request's session: what is spliced into the body for the engine's session, what its
 * answer says, and the end, however the request ended. Called by forward.c, relay.c and proxy.c on
 * the loop's thread; session.c comes before.
 *
 *   pl_session_edits  (forward) session_params, trimming
 *   pl_session_sent   (relay)   the engine took the request: binds
 *   pl_session_over   (proxy)   gives everything back
 *   pl_session_discard (proxy)  the client has left: the turn is read to its end without it */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "http/json.h"
#include "http/session_inner.h"

#define DISCARD_MS 10000 /* an engine that was told to abort has this long to end the turn */

/* --- what goes to the engine --- */

static int set_session_params(pl_request *rq, pl_edits *edits)
{
    pl_rq_session *s = rq->session;
    pl_arena *a = &rq->x->arena;
    char id[PL_ENGINE_SESSION_MAX];
    size_t n = pl_turn_engine_id(&s->turn, id);
    pl_str q = pl_json_quoted(a, (pl_str){id, n});
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
    if (!pl_session_api(rq->api)) {
        s->plan = (pl_history_plan){.how = PL_PLAN_OUTSIDE,
                                    .why = "this API has no sessions at the engine"};
    } else {
        /* the simulated engine answers alike without `tools`; SGLang reads calls only with them */
        bool simulated =
            atomic_load_explicit(&rq->engine->caps, memory_order_relaxed) & PL_CAP_RETENTION;
        unsigned flags =
            (s->wish.delta ? PL_HISTORY_DELTA : 0u) | (simulated ? PL_HISTORY_CUT_TOOLS : 0u);
        pl_history_plan_turn(&s->turn.history, rq->api, rq->x->body, rq->scan, flags, edits,
                             &s->plan);
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
    free(s->sent); /* the engine has what it wanted of it */
    s->sent = NULL;
    bool spilled = rq->ask.pin && rq->ask.pin != rq->worker && s->turn.bound && !s->turn.fallback;
    if (spilled)
        pl_count(&rq->loop->metrics.session_spills, 1);
    if (!s->answered_ok)
        return;
    if (s->ttl_seconds <= 0 || s->wish.final) {
        pl_turn_sent(&s->turn, rq->worker, 0);
        return;
    }
    /* a turn that went elsewhere only because its worker was at its cap leaves the binding */
    bool stays = spilled && rq->decision.spilled;
    s->turn.instead = s->kind == PL_ROUTER_ONLY;
    pl_turn_sent(&s->turn, rq->worker, stays ? 0 : (uint64_t)ceil(s->ttl_seconds * 1e3));
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

static void say_poisoned(const pl_request *rq, const char *what_now)
{
    static unsigned long seen[2];
    if (pl_log_allow(seen, 5))
        pl_log(PL_LOG_WARN, "session_poisoned",
               "session '%.*s' on %s: the engine's session does not take turns any more; %s",
               PL_FMT(rq->session->wish.id), rq->worker->name, what_now);
}

bool pl_session_refused(pl_request *rq, pl_str answer)
{
    pl_rq_session *s = rq->session;
    pl_reply *r = s->refused ? NULL : pl_reply_new(rq->api);
    if (!r)
        return false;
    pl_reply_answer(r, answer);
    bool poisoned = pl_reply_judge(r, -1, 0).poisoned;
    pl_reply_free(r);
    if (!poisoned)
        return false;
    s->refused = s->broken = true;
    s->inside = false;
    pl_turn_poisoned(&s->turn);
    pl_proxy_end_try(rq, -1);
    pl_prompt_try_failed(rq);
    if (s->wish.delta) {
        say_poisoned(rq, "it is closed");
        pl_session_answer_lost(rq, "takes no more turns on its engine");
        return true;
    }
    s->turn.history.form = PL_HISTORY_LOST;
    s->open = s->ttl_seconds > 0 && !s->wish.final;
    s->label = s->open ? "reopened" : "outside";
    say_poisoned(rq, s->open ? "it is opened anew" : "it is closed");
    rq->state = PL_RQ_DECIDING;
    pl_proxy_decide(rq);
    return true;
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
        say_poisoned(rq, "it is closed");
        end(s, PL_TURN_POISONED, NULL, -1);
        return;
    }
    if (!s->answered_ok) { /* refused before it touched the session; or it failed, who knows where
                            */
        const pl_history lost = {.form = PL_HISTORY_LOST};
        end(s, PL_TURN_FAILED, pl_session_doubtful(rq->status) ? &lost : NULL, -1);
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
        if (s->broken)
            end(s, PL_TURN_POISONED, NULL, -1);
        else if (s->inside && s->ended)
            end_inside(rq);
        else if (s->inside)
            end(s, PL_TURN_POISONED, NULL, -1); /* it broke off: the engine may be at it still */
        else if (s->answered_ok || (rq->status == 200 && !rq->call && rq->attempts == 0))
            end(s, PL_TURN_DONE, NULL, -1); /* or it was the session itself that was asked for */
        else
            end(s, PL_TURN_FAILED, NULL, -1);
        break;
    case PHASE_READ:
    case PHASE_OVER:
        break;
    }
}

/* The engine may have begun the turn: then its session is not to be trusted with another. */
void pl_session_try_failed(pl_request *rq, int err)
{
    pl_rq_session *s = rq->session;
    bool never_sent = err == PL_EUNAVAILABLE || err == PL_ECONNECT || err == PL_ERESOLVE;
    if (!s->inside || s->phase != PHASE_HELD)
        return;
    s->inside = false;
    /* who is told to reopen a session must not meet the old one */
    s->broken = !never_sent || (s->wish.delta && err != PL_EUNAVAILABLE);
}

bool pl_session_doubtful(int status)
{
    return status >= 500 && status != 501 && status != 503;
}

bool pl_session_inside(const pl_request *rq)
{
    return rq->session && rq->session->inside;
}

bool pl_session_is_delta(const pl_request *rq)
{
    return rq->session && rq->session->wish.delta;
}

bool pl_session_is_held_elsewhere(const pl_request *rq, const pl_worker_state *w)
{
    return pl_session_is_delta(rq) && rq->ask.pin_must && rq->ask.pin && rq->ask.pin != w;
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
    pl_rq_session *s = rq->session;
    pl_count(&rq->loop->metrics.session_discarded, 1);
    /* a client may leave as soon as it has read [DONE] */
    bool complete = engine_ended && s->answered_ok && s->reply &&
                    pl_reply_judge(s->reply, rq->usage.prompt_tokens, 0).complete;
    if (complete)
        end_inside(rq);
    else
        end(s, engine_ended ? PL_TURN_ABORTED : PL_TURN_POISONED, &lost, -1);
    pl_proxy_discard_over(rq);
}

static void on_discard_timeout(pl_timer *t)
{
    pl_rq_session *s = (pl_rq_session *)((char *)t - offsetof(pl_rq_session, discard_timer));
    static unsigned long seen[2];
    if (pl_log_allow(seen, 5))
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
