/* Inside of the simulated engine's HTTP front: what front.c (loop, requests), front_call.c (life of
 * a call), front_parse.c (bodies to prompts), front_api.c (answers), front_session.c (sessions),
 * front_kv.c (KV events), front_admin.c (state, metrics) and front_fault.c (faults) share. Nobody
 * else includes it. One thread. */
#ifndef PL_FRONT_CALL_H
#define PL_FRONT_CALL_H

#include <jansson.h>
#include <uv.h>

#include "base/hist.h"
#include "base/rng.h"
#include "engine/front.h"
#include "engine/token.h"
#include "http/server.h"
#include "policy_abi.h"

typedef struct pl_front pl_front;
typedef struct pl_front_call pl_front_call;

/* What an exchange's user is: the first member of whatever waits for its answer. */
typedef struct pl_front_user {
    void (*gone)(struct pl_front_user *u); /* the client has left */
    void (*drain)(
        struct pl_front_user *u); /* its backlog is low again; NULL: nothing is streamed */
} pl_front_user;

/* One prompt of a call: a choice, an input, a document. */
typedef struct pl_part {
    pl_front_call *call;
    pl_sim_req *req; /* NULL before and after it is in the engine */
    int index;
    int prompt, want, cached; /* tokens */
    uint64_t seed;            /* of its output */
    int ready, sent;          /* output tokens: produced, written to the client */
    bool done, told;          /* nothing more will be ready; its end was written (streams) */
    pl_str before, after;     /* streams: what stands around a token's text in its event */
} pl_part;

typedef enum pl_front_call_end {
    PL_CALL_DONE,
    PL_CALL_GONE,    /* the client left */
    PL_CALL_ABORTED, /* by /abort_request */
    PL_CALL_CUT,     /* by a fault */
    PL_CALL_ENDS
} pl_front_call_end;

/* One inference request, from its head to the end of its answer. In its exchange's arena: gone with
 * it. */
struct pl_front_call {
    pl_front_user user;
    pl_front_call *next, **pprev; /* front->calls */
    pl_front *front;
    pl_exchange *x;
    int api; /* enum pl_api_kind */
    int path;
    int rank; /* whose engine has its parts */
    pl_part *parts;
    int parts_n, parts_done;
    int parts_max;      /* set before the first is submitted: parts must not move */
    pl_str id;          /* what the engine calls it: rid, else x-request-id, else made */
    pl_str request_id;  /* x-request-id of the answer */
    pl_str qid, qmodel; /* for JSON, with quotes: the answer's id and model */
    pl_str model;
    pl_str session;    /* that it names, by session_params or as a tag; empty: none */
    pl_sim_slot *slot; /* a turn's; NULL: no turn */
    bool turn_refused; /* why is told as the end of the request, not as an error of the body */
    int64_t created;   /* seconds since 1970 */
    int64_t arrived_us, first_us; /* engine's clock; first_us -1 before the first token */
    int choices;                  /* n: parts of the same prompt stand next to each other */
    bool batch;                   /* /generate: the prompt was a list, so the answer is one */
    bool stream, include_usage, limited; /* limited: the client set the number of tokens */
    bool aborted;                        /* by /abort_request: the answer says so */
    bool paused;                         /* the client's backlog is high */
    bool delayed;                        /* the slow fault's timer is armed */
    bool released;                       /* it has fired: one chunk may go */
    bool base64;                         /* embeddings */
    int dimensions;                      /* embeddings */
    bool items;                          /* score: {query, items} rather than {text_1, text_2} */
    json_t *documents;                   /* rerank: owned; NULL otherwise */
    pl_timer timer;                      /* the slow fault's */
    int chunks;                          /* events written */
    int sequence;                        /* responses: number of the next event */
    int fault; /* enum pl_fault_way that this call drew, with what was set then */
    int after_chunks;
    uint64_t delay_ms;
};

/* What a fault strikes; each has one in force. */
enum pl_fault_target { PL_FAULT_REQUESTS, PL_FAULT_OPENS, PL_FAULT_CLOSES, PL_FAULT_TARGETS };

enum pl_fault_way {
    PL_FAULT_NONE,
    PL_FAULT_REFUSE, /* of requests */
    PL_FAULT_RESET,
    PL_FAULT_HANG,
    PL_FAULT_500,
    PL_FAULT_SLOW,
    PL_FAULT_OPEN_FAIL, /* of opens */
    PL_FAULT_OPEN_SLOW,
    PL_FAULT_OPEN_LOST,
    PL_FAULT_CLOSE_LOST, /* of closes */
    PL_FAULT_CLOSE_CUT,
    PL_FAULT_COUNT
};

typedef struct pl_front_fault {
    int way;
    int after_chunks;
    double probability;
    int64_t left;      /* requests still to be hit; -1: no bound */
    uint64_t delay_ms; /* real milliseconds */
    bool health;       /* /health is hit, too */
    pl_rng rng;
} pl_front_fault;

/* What has become of a call that is over. */
typedef struct pl_front_record {
    char id[64], session[64];
    int path, rank, prompt, cached, output, end;
} pl_front_record;

enum { PL_FRONT_RECORDS = 1024, PL_FRONT_PATHS = 13 };

/* A data-parallel rank: an engine with a cache of its own. */
typedef struct pl_front_rank {
    pl_sim *sim;
    pl_publisher *publisher; /* NULL: it publishes nothing */
} pl_front_rank;

struct pl_front {
    const pl_front_options *o;
    bool vllm;
    uv_loop_t loop;
    pl_wheel wheel;
    uv_timer_t tick;
    uv_poll_t alarm; /* of alarm_fd, a timer of the kernel: libuv's are too coarse for steps */
    int alarm_fd;
    uv_signal_t signals[2];
    pl_server *server;
    pl_front_rank rank[PL_FRONT_RANKS_MAX];
    int ranks_n;
    unsigned next_rank;    /* for requests that name none: in turn */
    pl_publish_options kv; /* as asked for, with the format chosen */
    void *zmq;             /* NULL: nothing is published */
    uv_prepare_t before_poll;
    bool stepping; /* pl_sim_step is on the stack */
    uint64_t start_ns;
    uint64_t next_id;
    pl_front_call *calls;
    int calls_n;
    pl_tokens scratch;
    pl_buf out; /* answers are composed here */
    pl_front_fault fault[PL_FAULT_TARGETS];
    uint64_t hit[PL_FAULT_COUNT]; /* how often each kind of fault has struck */
    uint64_t turns_refused;
    struct { /* received = failed + over + those under way */
        uint64_t received, failed, over[PL_CALL_ENDS];
    } count[PL_FRONT_PATHS];
    pl_front_record *records;
    uint64_t records_n;
    pl_hist ttft, e2e;
};

/* --- front_call.c --- */
extern const pl_str pl_front_paths[PL_FRONT_PATHS]; /* all that put work into the engine */
extern const int pl_front_apis[PL_FRONT_PATHS];
/* A call for x, which must have none yet; NULL when out of memory. */
pl_front_call *pl_front_call_begin(pl_front *f, pl_exchange *x, int path);
/* Answers a call with an error and forgets it. */
void pl_front_call_refuse(pl_front_call *c, int status, const char *message);
/* The same, but the caller answers; the call itself lives as long as its exchange. */
void pl_front_call_forget(pl_front_call *c);
/* Closes the connection in the middle of the answer. */
void pl_front_call_cut(pl_front_call *c);
/* Puts one prompt of the call (front->scratch) into the engine as its next part, with what ask says
 * of it beside the prompt and the session. */
int pl_front_call_submit(pl_front_call *c, const pl_sim_ask *ask);
/* /abort_request: what is under way of the call ends here and is answered as aborted. */
void pl_front_call_abort(pl_front_call *c);
/* Writes what can be written; may end the call. */
void pl_front_call_pump(pl_front_call *c);

static inline pl_sim *pl_front_sim(const pl_front_call *c)
{
    return c->front->rank[c->rank].sim;
}

/* --- front.c --- */
int64_t pl_front_now_us(const pl_front *f);                /* the engine's clock */
void pl_front_stats(const pl_front *f, pl_sim_stats *out); /* of all ranks together */
/* Arms the alarm for what the engine does next. */
void pl_front_arm(pl_front *f);
void pl_front_json(pl_exchange *x, int status, pl_str request_id, pl_str body);
/* Takes over value; NULL means out of memory. */
void pl_front_send(pl_exchange *x, int status, json_t *value);
/* An error in the shape of the path's API. */
void pl_front_error(pl_front *f, pl_exchange *x, int status, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* Has the object members of these names only? `known` ends with NULL. */
bool pl_front_only(const json_t *object, const char *const *known);
pl_str pl_front_request_id(pl_front *f, pl_exchange *x);
json_t *pl_front_string(pl_str s);
/* s as JSON, with quotes, in the arena; .p NULL when out of memory. */
pl_str pl_front_quote(pl_arena *a, pl_str s);

/* --- front_parse.c --- */
/* The body of an inference request: fills the call and submits its parts. 0, or a negative pl_err
 * with a message and the HTTP status it deserves. */
int pl_front_call_parse(pl_front_call *c, json_t *body, int *status, pl_errbuf *eb);
/* Tokens of a /tokenize body into front->scratch. */
int pl_front_tokenize(pl_front *f, json_t *body, pl_errbuf *eb);

/* --- front_session.c --- */
/* session_params and session_id of an inference request's body: sets session, slot and
 * turn_refused of the call. 0, or negative with a message. */
int pl_front_call_session(pl_front_call *c, const json_t *body, pl_errbuf *eb);
/* Answers a turn that the engine does not take. */
void pl_front_call_refuse_turn(pl_front_call *c, const char *message);
/* /open_session, /close_session, GET /sim/sessions. */
void pl_front_open_session(pl_front *f, pl_exchange *x);
void pl_front_close_session(pl_front *f, pl_exchange *x);
void pl_front_sessions(pl_front *f, pl_exchange *x);

/* --- front_api.c --- */
/* A whole answer into front->out. */
int pl_front_call_answer(pl_front_call *c);
/* The events of a stream: before the first token, around each token, for each part's end, after
 * all. */
int pl_front_call_stream_begin(pl_front_call *c, pl_buf *out);
int pl_front_call_stream_part_end(pl_part *p, pl_buf *out);
int pl_front_call_stream_end(pl_front_call *c, pl_buf *out);
/* The event of token i of a part, for the APIs whose events have more than its text. */
int pl_front_call_stream_token(pl_part *p, int i, pl_buf *out);
void pl_front_render_error(pl_front *f, pl_str path, int status, const char *message, pl_buf *out);

/* --- front_kv.c --- */
/* Opens the publishers, if any are asked for; closes them; lets go of ZeroMQ after the loop. */
int pl_front_kv_open(pl_front *f, pl_errbuf *eb);
void pl_front_kv_close(pl_front *f);
void pl_front_kv_end(pl_front *f);
json_t *pl_front_kv_info(const pl_front *f); /* kv_events of /server_info */
/* GET and POST /sim/kv. */
void pl_front_kv_control(pl_front *f, pl_exchange *x);

/* --- front_admin.c: everything that is not inference; false when the path is unknown --- */
bool pl_front_admin(pl_front *f, pl_exchange *x);

/* --- front_fault.c --- */
/* What is to happen to the next of a target: enum pl_fault_way. Counts it. */
int pl_fault_draw(pl_front *f, int target);
/* POST and GET /sim/fault. */
void pl_fault_control(pl_front *f, pl_exchange *x);
json_t *pl_fault_state(const pl_front *f);
/* GET /sim/requests. */
json_t *pl_front_requests(const pl_front *f);

#endif
