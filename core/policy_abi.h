/* What a policy sees, and what it answers: the structs and enums shared by C and Lua. This file is
 * the single source: C compiles it, and the build cuts the text between the two ABI lines and hands
 * it to LuaJIT's ffi.cdef, so between them stand only declarations (no preprocessor). Lua refuses
 * to start when its sizes differ from C's.
 *
 * Records are filled in place by C before each call, are const for Lua and hold no pointers. Units
 * are in the names; an absent optional number is -1 unless stated. Order: doubles, then int32_t,
 * then bool: no padding surprises. */
#ifndef PL_POLICY_ABI_H
#define PL_POLICY_ABI_H

#include <stdbool.h>
#include <stdint.h>

/* ABI-BEGIN */
enum { PL_ABI_VERSION = 1 };
enum { PL_MAX_WORKERS = 4096, PL_REASON_MAX = 64 };

/* Hooks, in the order in which a request meets them. */
enum pl_hook {
    PL_HOOK_INIT,
    PL_HOOK_ADMIT,
    PL_HOOK_SESSION,
    PL_HOOK_SCORE,
    PL_HOOK_ROUTE,
    PL_HOOK_RETAIN,
    PL_HOOK_DEGRADE,
    PL_HOOK_EXPIRE,
    PL_HOOK_DONE,
    PL_HOOK_TICK,
    PL_HOOK_SAVE,
    PL_HOOK_COUNT
};

/* Which API a request came through (req.api): pl.API_CHAT, ... in Lua. */
enum pl_api_kind {
    PL_API_OTHER,
    PL_API_CHAT,
    PL_API_COMPLETIONS,
    PL_API_RESPONSES,
    PL_API_MESSAGES,
    PL_API_EMBEDDINGS,
    PL_API_RERANK,
    PL_API_SCORE,
    PL_API_CLASSIFY,
    PL_API_GENERATE,
    PL_API_TOKENIZE,
    PL_API_DETOKENIZE,
    PL_API_OPEN_SESSION, /* SGLang's own; what names no generation */
    PL_API_CLOSE_SESSION
};

/* What admit and degrade may answer. */
enum pl_action {
    PL_DEFAULT,
    PL_ADMIT,
    PL_QUEUE,
    PL_SHED,
    PL_SHRINK,
    PL_PROCEED,
    PL_RETRY,
    PL_REJECT,
    PL_REBIND,
    PL_CLOSE,
    PL_EXTEND,
    PL_DROP,
    PL_ROUTER_ONLY,
    PL_ENGINE_BACKED
};

/* Why a worker cannot be picked (w.why); 0 when eligible. */
enum pl_why {
    PL_WHY_ELIGIBLE,
    PL_WHY_UNHEALTHY,
    PL_WHY_BREAKER_OPEN,
    PL_WHY_DRAINING,
    PL_WHY_AT_CAPACITY,
    PL_WHY_TRIED,
    PL_WHY_NO_SESSIONS /* a session is to be opened and the worker cannot hold (one more) */
};

/* fault.kind for degrade. */
enum pl_fault_kind {
    PL_NO_SESSION_ENGINE,
    PL_OPEN_FAILED,
    PL_ENGINE_FAILED,
    PL_BOUND_GONE,
    PL_ALL_BUSY,
    PL_INDEX_STALE
};

/* How a request ended (outcome.end_cause). */
enum pl_end_cause {
    PL_END_OK,
    PL_END_CLIENT_GONE,
    PL_END_ENGINE_FAILED,
    PL_END_TIMEOUT,
    PL_END_SHED,
    PL_END_REJECTED,
    PL_END_CUT
};

/* What is known of a worker's KV cache (w.kv_trust). */
enum pl_kv_trust {
    PL_KV_ROUTED, /* it publishes nothing: what was routed to it is all there is */
    PL_KV_LIVE,   /* its events, complete */
    PL_KV_BEHIND, /* its events, with a gap that is being filled */
    PL_KV_STALE   /* its events have stopped, or are not trusted: as PL_KV_ROUTED */
};

/* Events of a session (s.event). */
enum pl_session_event { /* pl.SESSION_OPEN, ... in Lua; pl.CLOSE is what expire may answer */
                        PL_SESSION_NONE,
                        PL_SESSION_OPEN,
                        PL_SESSION_BIND,
                        PL_SESSION_TURN,
                        PL_SESSION_CLOSE
};

/* One request. */
struct pl_req {
    double arrival_seconds; /* router clock (pl.now) when the head was complete */
    double prompt_tokens;  /* estimate until a tokenizer is known: prompt bytes / 4, or the count of
                              token ids */
    double max_tokens;     /* asked output limit; -1 when the client set none */
    double body_bytes;     /* as sent by the client */
    double waited_seconds; /* spent in the router's queue so far */
    double expected_output_tokens; /* nvext.agent_hints.osl; -1 when absent */
    int32_t priority;              /* the body's, or else nvext.agent_hints.priority; 0 */
    int32_t api;                   /* enum pl_api_kind */
    int32_t attempt;               /* 0 for the first try, 1.. for retries */
    int32_t choices;               /* the body's `n`, 1 when absent */
    int32_t strict_priority;       /* nvext.agent_hints.strict_priority: a tier above priority; 0 */
    bool stream;                   /* the client asked for a stream */
    bool has_session;              /* a session id was given */
    bool exact_tokens;             /* prompt_tokens counts token ids; else it is an estimate */
};

/* One worker as this request sees it. */
struct pl_worker {
    double inflight; /* requests sent to it and not ended, over all loops */
    double
        queued_prefill_tokens; /* prompt tokens sent to it that have not shown a first token yet */
    double streams;            /* of inflight, those that stream */
    double cached_tokens; /* prompt tokens of this request believed to be in its KV cache: by its
                             events, by what was routed to it, else 0 */
    double cached_host_tokens; /* further ones that it holds in host memory */
    double cached_disk_tokens; /* further ones on disk, or further away */
    double decode_blocks;    /* KV blocks of the requests sent to it and not ended: prompt and what
                                they generated so far */
    double session_tokens;   /* held by sessions that this router opened on it */
    double running_requests; /* the engine's own gauges; -1: not known */
    double waiting_requests;
    double kv_usage;                  /* 0 .. 1 */
    double gauges_age_seconds;        /* math.huge: they were never read */
    double max_inflight;              /* cap of its engine; math.huge when none */
    double max_queued_prefill_tokens; /* cap of its engine; math.huge when none */
    double prefill_tokens_per_second; /* measured by the router over recent requests; a default
                                         until then */
    double ttft_seconds;  /* moving average of recent first tokens; 0 until one was seen */
    double weight;        /* configured share, 1 unless set */
    int32_t index;        /* its place in this call's fleet, 0 .. fleet.n - 1 */
    int32_t slot;         /* small integer for the worker's life */
    int32_t generation;   /* changes when a slot is reused */
    int32_t rank;         /* data-parallel rank in its engine */
    int32_t why;          /* enum pl_why */
    int32_t block_tokens; /* of its KV blocks */
    int32_t kv_trust;     /* enum pl_kv_trust: what cached_tokens rests on */
    int32_t sessions;     /* engine-backed ones that this router opened on it */
    bool eligible;        /* may be picked */
};

/* The workers that serve the request's model. fleet[i] and fleet.cost[i] are checked in Lua. */
struct pl_fleet {
    int32_t n;        /* workers in this call */
    int32_t eligible; /* of them, how many may be picked */
};

/* What went wrong, for degrade. */
struct pl_fault {
    double waited_seconds; /* spent in the router's queue so far */
    int32_t kind;          /* enum pl_fault_kind */
    int32_t status;        /* HTTP status the engine answered, 0 when none */
    int32_t attempts;      /* tries made so far */
    bool budget_left;      /* the retry budget allows one more */
    bool delta;            /* the turn carries only what is new in its session */
};

/* How a request went, for done. */
struct pl_outcome {
    double ttft_seconds;  /* head complete to first body byte to the client; -1 when none */
    double e2e_seconds;   /* head complete to the end */
    double prompt_tokens; /* as the engine counted (usage), else the estimate */
    double cached_tokens; /* as the engine counted; -1 when it did not say */
    double output_tokens; /* as the engine counted; -1 when it did not say */
    int32_t status;       /* HTTP status sent to the client; 0 when it left before one */
    int32_t slot;         /* worker that served it, -1 when none */
    int32_t generation;   /* of that slot; filled in by the decider */
    int32_t attempts;     /* engines tried */
    int32_t clamped;      /* results of hooks that C had to clamp for this request */
    int32_t end_cause;    /* enum pl_end_cause */
};

/* A session: req.session in the hooks of a request that names one, and what expire is given. */
struct pl_session {
    double age_seconds;  /* since it was first bound; 0 when it is not */
    double idle_seconds; /* since its last turn began or ended; 0 when it is not bound */
    double ttl_seconds;  /* its time to live: asked for, or as bound */
    double held_tokens;  /* an engine-backed session's, as last reported; -1 unknown */
    double id_hash;      /* of (tenant, id): 52 bits, exact in a double; never 0 */
    double parent_hash;  /* of the parent's; 0: none named */
    int32_t event;       /* enum pl_session_event */
    int32_t turn;        /* 0 for the first */
    int32_t kind;        /* PL_ROUTER_ONLY or PL_ENGINE_BACKED: as bound, else as asked for */
    int32_t bound_slot;  /* worker; -1 when unbound */
    int32_t bound_generation;
    int32_t bound_index; /* its index in this call's fleet; -1: unbound, or no longer there */
    bool has_parent;     /* it names the session of the agent that started it */
    bool delta;          /* this turn carries only what is new in the session */
    bool final;          /* it is to be closed after this turn */
};

/* Written by the harness around the hooks, read and validated by C. Policies never see it. Numbers
 * that a hook answered stay doubles, so that C sees fractions and huge values as they came. */
struct pl_verdict {
    double arg; /* QUEUE: max wait seconds; SHED, REJECT: retry-after seconds; SHRINK: max tokens;
                   -1: none given. session: ttl; retain: retention; EXTEND: seconds. For tick:
                   now_seconds, written by C */
    double admit_ns;    /* clock when admit had returned; 0 without the hook */
    double action;      /* enum pl_action from admit, degrade or expire; session: the kind; retain:
                           the priority */
    double index;       /* route's choice */
    int32_t hook;       /* the hook that is running: names the culprit when the call fails */
    int32_t skip;       /* written by C: bits (1 << enum pl_hook) of hooks not to run */
    int32_t routed;     /* 1: route answered index */
    int32_t scored;     /* 1: fleet.cost was filled by score, C picks */
    int32_t reason_len; /* bytes of reason, which is only filled up to 64; -1: not a string */
    int32_t given;      /* session, retain: 1: arg was answered, 2: action was; 3: both */
    char reason[64];
};

/* The C functions that the Lua side calls: leaf calls only, none re-enters the VM or raises. `vm`
 * is the opaque handle that the prelude was given. Strings come back through *n and stay valid
 * until the call returns to C. */
struct pl_api {
    int32_t version; /* PL_ABI_VERSION */
    int32_t size_req, size_worker, size_fleet, size_fault, size_outcome, size_session, size_verdict;
    double (*now_seconds)(void *vm);
    double (*now_ns)(void *vm);
    double (*random)(void *vm); /* uniform in [0,1) from the request's seed */
    const char *(*req_model)(void *vm, int32_t *n);
    const char *(*req_tenant)(void *vm, int32_t *n);
    const char *(*req_path)(void *vm, int32_t *n);
    const char *(*req_id)(void *vm, int32_t *n);
    const char *(*req_session_id)(void *vm, int32_t *n);    /* NULL: none */
    const char *(*session_parent_id)(void *vm, int32_t *n); /* NULL: none */
    const char *(*req_header)(void *vm, const char *name, int32_t name_len,
                              int32_t *n); /* NULL: absent */
    const char *(*req_member)(void *vm, const char *name, int32_t name_len,
                              int32_t *n); /* NULL: absent; strings unescaped, else raw JSON */
    const char *(*worker_name)(void *vm, int32_t index, int32_t *n); /* NULL: no such worker */
    double (*hash)(void *vm, const char *p,
                   int32_t n); /* XXH3 of p, folded to 52 bits: exact in a double */
    int32_t (*rendezvous)(void *vm, const char *p,
                          int32_t n); /* highest random weight over eligible workers; -1: none */
    int32_t (*ring)(void *vm, const char *p, int32_t n,
                    double load_factor); /* bounded-load ring; -1: none */
    int32_t (*pick_min)(void *vm); /* over fleet.cost and eligibility; ties by random; -1: none,
                                      -2: a cost is NaN */
    int32_t (*pick_softmax)(void *vm, double temperature); /* the same, sampled */
    int32_t (*counter_open)(void *vm, const char *name,
                            int32_t n); /* a handle; -1: bad name, -2: table full */
    double (*counter_add)(void *vm, int32_t handle, double by); /* the new sum, over all loops */
    int32_t (*ewma_open)(void *vm, const char *name, int32_t n,
                         double half_life_seconds); /* as counter_open */
    double (*ewma_update)(void *vm, int32_t handle, int32_t slot, int32_t generation,
                          double value); /* the new average; NaN: no such slot */
    double (*ewma_get)(void *vm, int32_t handle, int32_t slot,
                       int32_t generation); /* NaN: nothing learned */
    int32_t (*metric)(void *vm, const char *name, int32_t n,
                      double value); /* gauge on /metrics; -1: bad name, -2: table full */
    int32_t (*log)(void *vm, const char *p, int32_t n); /* rate-limited line */
};

/* What C hands to the prelude at start: the functions and where the records are. */
struct pl_boot {
    const struct pl_api *api;
    void *vm;
    const struct pl_req *req;
    const struct pl_fleet *fleet;
    const struct pl_worker *workers; /* PL_MAX_WORKERS */
    double *cost;                    /* PL_MAX_WORKERS */
    const struct pl_fault *fault;
    const struct pl_outcome *outcome;
    const struct pl_session *session;
    struct pl_verdict *verdict;
};
/* ABI-END */

#endif
