/* One request on its way through a loop: the struct that intake.c fills, proxy.c drives, forward.c
 * sends and relay.c answers. Internal to those four. Lives on the heap; owned by its loop's list
 * until request_free.
 *
 *   exchange --intake--> pl_request --decide--> worker --forward--> call --relay--> exchange
 *                            ^  |
 *                            |  +--> queue (all at their caps)
 *                            +------ retry (an engine failed before its first byte)
 */
#ifndef PL_REQUEST_H
#define PL_REQUEST_H

#include "fleet/queue.h"
#include "http/api.h"
#include "http/proxy.h"
#include "http/scan.h"
#include "http/sse.h"
#include "session/sessions.h"

typedef struct pl_rq_session pl_rq_session; /* session.c */
typedef struct pl_rq_tokens pl_rq_tokens;   /* prompt.c */

typedef enum pl_request_state {
    PL_RQ_DECIDING,
    PL_RQ_LOOKING,    /* for its session: the store, or the turn before */
    PL_RQ_TOKENIZING, /* by an engine, for a short while */
    PL_RQ_QUEUED,     /* in the waiting room, or a grant is under way */
    PL_RQ_OPENING,    /* its session, on the worker that was chosen */
    PL_RQ_CALLING,    /* connecting, sending, awaiting the first byte */
    PL_RQ_STREAMING,  /* the answer's head has gone to the client */
    PL_RQ_DISCARDING, /* the client is gone; the engine's answer is read to its end: session.c */
    PL_RQ_OVER
} pl_request_state;

struct pl_request {
    pl_loop *loop;
    pl_request *prev, *next;
    pl_exchange *x; /* NULL once the client is gone */
    pl_request_state state;
    pl_view *view; /* referenced: keeps the model and its workers */
    enum pl_api_kind api;
    pl_str id;     /* x-request-id */
    bool trusted;  /* the client may pin internals */
    pl_scan *scan; /* in the exchange's arena */
    pl_ask ask;
    pl_decision decision;
    pl_str policy; /* who made it, in the exchange's arena: a reload may replace it meanwhile */

    /* the session; NULL for requests that name none */
    pl_rq_session *session;
    double retention_seconds;      /* a wish of the client's, -1: none */
    bool priority_hint;            /* ask.req.priority is agent_hints', not the body's own */
    pl_str cache_salt;             /* nvext's, or the body's own; {NULL,0}: none */
    pl_str kv_salt;                /* what sets its blocks apart beside the model: prompt.c */
    double pin_instance, pin_rank; /* a trusted client's worker, by slot and rank; -1: none */
    struct {
        const char *at; /* in the body */
        pl_str text;
    } unescaped[4]; /* members that the policy has asked for; it may ask again and again */
    unsigned unescaped_n;
    pl_rq_tokens *tokens;       /* the engine's /tokenize is asked, or has answered: prompt.c */
    pl_prompt *prompt;          /* its keys, for the workers' caches; NULL: nobody looks */
    bool stale_asked;           /* degrade was, about events that have stopped: once */
    bool query_only;            /* tell the choice, send nothing */
    struct pl_refusal *refusal; /* explain.c alone: there is no client, errors are told to it */

    /* waiting */
    pl_waiter waiter;
    pl_timer wait_timer;
    uint64_t queued_at_ns;
    uint64_t wait_until_ns;  /* 0 until it waits for the first time */
    bool grant_under_way;    /* it has ended meanwhile: on_wake frees it */
    bool waits_for_capacity; /* that wait is for capacity, else admit has asked for it */

    /* the try under way */
    pl_worker_state *worker; /* of the last try */
    pl_engine *engine;       /* referenced while `worker` is set */
    pl_call *call;
    pl_ticket ticket;
    bool probe;            /* holds a half-open probe of the breaker */
    bool breaker_open_end; /* pl_breaker_begin was called and no result was given yet */
    int attempts;          /* engines tried */
    uint64_t sent_at_ms;   /* of the loop's wheel: when the call began */
    pl_str rid;            /* the id an SGLang engine knows it by; {NULL,0}: none */

    /* the answer */
    int status; /* sent to the client; 0 before */
    bool sse;
    bool source_paused;
    uint64_t first_byte_ns; /* 0 before */
    pl_sse_tail tail;
    bool want_usage;        /* a hook will ask for it */
    bool swallow_usage;     /* the router asked for the usage chunk, the client did not */
    pl_sse *events;         /* heap; only when want_usage or swallow_usage on a stream */
    bool answer_too_big;    /* to be searched for usage */
    bool events_unreadable; /* an event was too big: the rest passes unread */
    pl_buf answer;          /* copy of a whole JSON answer, for usage; bounded */
    const pl_head *held;    /* of an engine's answer that is not passed on yet; NULL: none */
    pl_usage usage;

    pl_edits edits; /* of the body, for every try; what a try adds is on top of a copy. Last: not
                     * zeroed */
};

/* --- intake.c: everything that is known before a decision --- */

/* on_head: path, method, key. True: go on with the body; false: answered. */
bool pl_intake_head(pl_loop *l, pl_exchange *x);
/* Scans the body and fills the request; 0, or the request was answered (and must be freed). */
int pl_intake_body(pl_request *rq);
/* Has the engine asked for usage, when somebody wants to know it. */
void pl_intake_usage(pl_request *rq);
/* Adds to a try's edits what lowers the output limit (SHRINK); 0 when it is lowered. */
int pl_intake_shrink(pl_request *rq, pl_edits *edits, double max_tokens);
/* The string value of a member for use after the body was given back; {NULL,0} when there is none.
 */
pl_str pl_intake_kept_string(pl_request *rq, pl_member_id id);
pl_str pl_intake_find_header(void *ctx, pl_str name);
pl_str pl_intake_find_member(void *ctx, pl_str name);

/* --- pins.c: where a request says it is to go --- */

/* Headers by which a trusted client says where its request is to go: the router's own, Dynamo's,
 * and the one that engines read themselves. Only the last one goes on, and only from those who may.
 */
typedef enum pl_pin {
    PL_PIN_NONE,
    PL_PIN_WORKER,   /* x-perilune-worker: a name */
    PL_PIN_INSTANCE, /* as nvext.backend_instance_id */
    PL_PIN_RANK,     /* as nvext.dp_rank */
    PL_PIN_PREFILL,  /* of split prefill and decode: not looked at */
    PL_PIN_ENGINES   /* x-data-parallel-rank */
} pl_pin;
pl_pin pl_pin_of(pl_str header_name);
/* What those who may not pin have put into the body (headers: forward.c leaves them out). */
void pl_pins_remove(pl_request *rq);
/* nvext is to go on to the engine, without the pins that are in it. */
void pl_pins_blank_nvext(pl_request *rq);
/* The numbers in the headers of those who may; after nvext's. 0, or it was answered. */
int pl_pins_read(pl_request *rq);
/* Is there a pin that names workers? Then no other one is tried. */
bool pl_pins_any(const pl_request *rq);
/* True: it is pinned, and *d is the choice (PL_NO_WORKER when it cannot be had). */
bool pl_pinned(pl_request *rq, pl_decision *d);
/* May the client tell the engine a rank itself? Not where one of several holds its session. */
bool pl_pins_may_tell_rank(const pl_request *rq);
/* Moves a choice to the rank that a client that may has told the engine itself. One that there is
 * not is the engine's to refuse. */
void pl_pins_told_rank(pl_request *rq, pl_decision *d);

/* --- pages.c: what the router answers by itself on the public port --- */
/* GET /health, /readyz, /metrics, /v1/models[/ID]. False: not one of them. */
bool pl_pages(pl_loop *l, pl_exchange *x);

/* --- forward.c: one try --- */

/* Composes the head and body for rq->worker and sends them. PL_ENOMEM. */
int pl_forward(pl_request *rq, bool fresh);
/* The headers that belong to this hop: all Connection headers as one list. */
pl_str pl_forward_hops(pl_arena *a, const pl_head *h);
/* Tells an SGLang engine to drop the request (closing the connection alone does so elsewhere). */
void pl_forward_abort(pl_request *rq);
pl_pool *pl_loop_pool(pl_loop *l, const pl_engine *e);

/* --- session.c: the request's session; all but the first two only when rq->session is set --- */

/* Reads the wish and the other hints. 0, or it was answered. */
int pl_session_read(pl_request *rq);
const char *pl_session_label(const pl_request *rq); /* for x-perilune-session; NULL: none */
/* Finds the binding. True: decide now; false: answered, or pl_proxy_decide is called later. */
bool pl_session_begin(pl_request *rq);
bool pl_session_wants_open(const pl_request *rq);
bool pl_session_backed(const pl_request *rq); /* it is, or is to be, in an engine's session */
/* Opens it on rq->worker: 1 done, 0 decide again, -1 answered, PL_SESSION_PENDING: goes on later.
 */
#define PL_SESSION_PENDING 2
int pl_session_open(pl_request *rq);
/* The decision found nobody who could hold it, or its worker gone. True: decide again; false:
 * answered. */
bool pl_session_no_engine(pl_request *rq);
bool pl_session_rebind(pl_request *rq);
void pl_session_answer_open(pl_request *rq);
void pl_session_answer_close(pl_request *rq);
/* What a try adds to the body. PL_ENOMEM. */
int pl_session_edits(pl_request *rq, pl_edits *edits);
/* Moves a try's bytes to where they outlive the exchange, if it may have to. PL_ENOMEM. */
int pl_session_keep_bytes(pl_request *rq, pl_str *slices, int *n);
pl_reply *pl_session_reply(const pl_request *rq); /* who wants to see the answer; NULL: nobody */
void pl_session_sent(pl_request *rq, int status); /* the answer's head is there */
void pl_session_answer_ended(pl_request *rq);
void pl_session_try_failed(pl_request *rq, int err);
bool pl_session_doubtful(int status); /* an engine that answers so may have begun the turn */
void pl_session_answer_failed(pl_request *rq);
/* The engine has refused the turn with this answer. True: it is the session that it does not take,
 * and the request goes on in a new one, or was answered; false: pass the answer on. */
bool pl_session_refused(pl_request *rq, pl_str answer);
bool pl_session_inside(const pl_request *rq); /* the try goes into an engine's session */
bool pl_session_is_delta(const pl_request *rq);
/* It is a delta of what another worker than w holds: only a pin sends it here. */
bool pl_session_is_held_elsewhere(const pl_request *rq, const pl_worker_state *w);
void pl_session_over(pl_request *rq);
void pl_session_free(pl_request *rq);
/* The client has left in the middle of a turn that the engine's session must see ended. */
bool pl_session_must_discard(const pl_request *rq);
void pl_session_discard(pl_request *rq);
void pl_session_discarded(pl_request *rq, bool engine_ended);

/* --- prompt.c: the workers' KV caches --- */
void pl_prompt_of(pl_request *rq); /* its keys; rq->prompt stays NULL when nobody looks at them */
/* Asks for token ids where events need them. True: decide now; false: pl_proxy_decide is called
 * later. */
bool pl_prompt_begin(pl_request *rq);
/* Is it worth reading how much of the prompt the engine had in its cache? */
bool pl_prompt_wants_usage(pl_request *rq);
/* True: whoever publishes is no longer believed, the policy (degrade) will not have the request
 * routed without, and it was answered. */
bool pl_prompt_refused(pl_request *rq);
/* Where blocks that running requests share are counted once; NULL: they are not. */
pl_active *pl_prompt_reuse(const pl_loop *l);
void pl_prompt_sent(pl_request *rq);
void pl_prompt_try_failed(pl_request *rq);
void pl_prompt_over(pl_request *rq);
void pl_prompt_free(pl_request *rq);

/* --- relay.c: the answer --- */

void pl_relay_head(pl_request *rq, const pl_head *head);
void pl_relay_body(pl_request *rq, const pl_str *slices, int n);
void pl_relay_end(pl_request *rq);
void pl_relay_choice(pl_request *rq);
bool pl_relay_is_failure(int status); /* the engine's, not the client's */
/* The answer breaks off after the head had gone out (PL_END_ENGINE_FAILED or PL_END_CUT): ends the
 * client's answer as honestly as its shape allows. */
void pl_relay_broken(pl_request *rq, enum pl_end_cause cause, const char *message);
/* An error answer of the router's own, in the API's shape. retry_after_seconds < 0: no header. */
void pl_relay_error(pl_request *rq, int status, const char *code, double retry_after_seconds,
                    const char *fmt, ...) __attribute__((format(printf, 5, 6)));
/* The same before there is a request. Ends the exchange. */
void pl_answer_error(pl_loop *l, pl_exchange *x, int status, const char *code,
                     double retry_after_seconds, const pl_header *extra, int extra_n,
                     const char *message);
void pl_count_status(pl_loop *l, int status);

/* --- explain.c: a request that is only looked at --- */
void pl_explain_refused(struct pl_refusal *r, int status, const char *code, const char *message);
void pl_explain_decide(pl_request *rq); /* in place of deciding and sending */
/* session.c: the record and the pin of a session as it is bound; NULL: it is not. No turn begins.
 */
void pl_session_explain(pl_request *rq, const pl_binding *b);

/* --- proxy.c: the state machine --- */

void pl_proxy_begin(pl_request *rq);  /* all is known but the prompt's tokens */
void pl_proxy_decide(pl_request *rq); /* on the fleet as it is now, and goes on from there */
void pl_proxy_send(pl_request *rq);   /* the try that was begun: its session is open now */
void pl_proxy_discard_over(pl_request *rq);

/* The engine failed this try; error is for people, status what it answered (0: nothing). PL_ENOMEM
 * and PL_EUNAVAILABLE: the router itself has. */
void pl_proxy_failed(pl_request *rq, int err, int status, const char *detail);
/* Everything was sent to the client, or nothing more will be. Accounts, runs done, frees. */
void pl_proxy_over(pl_request *rq, enum pl_end_cause cause);
/* Gives back what the try holds: ledger, breaker, call. ok: 1 success, 0 failure, -1 neither. */
void pl_proxy_end_try(pl_request *rq, int ok);
/* May an engine's failure be answered by another try? Asks the policy and the budget. */
bool pl_proxy_may_retry(pl_request *rq, int status);
void pl_proxy_retry(pl_request *rq);
/* Is an engine usable that this request has not tried yet? */
bool pl_proxy_another_worker(const pl_request *rq);

#endif
