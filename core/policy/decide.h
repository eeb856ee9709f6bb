/* The main decision: which worker serves a request. Builds the records, asks the policy, validates,
 * falls back. One decider per loop (or simulator); not thread-safe. Knows no sockets. */
#ifndef PL_DECIDE_H
#define PL_DECIDE_H

#include "fleet/fleet.h"
#include "policy/vm.h"

/* Hook latencies, errors and clamps; written by the decider's thread, read relaxed by /metrics. */
typedef struct pl_policy_stats {
    pl_hist latency[PL_HOOK_COUNT];
    _Atomic uint64_t calls[PL_HOOK_COUNT], errors[PL_HOOK_COUNT], clamped[PL_HOOK_COUNT];
    _Atomic uint64_t fallbacks;   /* decisions the policy did not make because of an error */
    _Atomic uint64_t suspensions; /* times the policy was suspended */
    _Atomic int suspended;        /* now */
    _Atomic uint64_t vm_rebuilds;
    _Atomic uint64_t refresh_ns; /* of the last 1-in-64 sample: filling the records */
} pl_policy_stats;

typedef struct pl_decider pl_decider;

typedef struct pl_decider_options {
    pl_breaker_options breaker;
    double max_wait_seconds;                  /* clamp for QUEUE, 30 */
    double max_retry_after_seconds;           /* clamp for SHED, 3600 */
    double max_retention_seconds;             /* clamp for retain, 86,400 */
    double default_prefill_tokens_per_second; /* records, until measured: 8,000 */
    /* five errors in ten seconds suspend the policy for 1, 2, 4 .. 60 s; then one request probes it
     */
    unsigned strikes;
    double strike_window_seconds;
    pl_clock clock;
} pl_decider_options;

void pl_decider_options_default(pl_decider_options *o);

pl_decider *pl_decider_new(const pl_decider_options *o, pl_policy_stats *stats);
void pl_decider_free(pl_decider *d); /* frees its VM */

/* Swaps the VM in (takes it) and returns the old one (give it to pl_vm_free). */
pl_vm *pl_decider_swap(pl_decider *d, pl_vm *vm, uint64_t generation);
pl_vm *pl_decider_vm(pl_decider *d);
uint64_t pl_decider_generation(const pl_decider *d);
const char *pl_decider_policy_name(
    const pl_decider *d); /* "least_loaded (built in)" while there is none or it is suspended */

/* What one worker holds of a request's prompt, in tokens. */
typedef struct pl_kv_hit {
    uint32_t stamp; /* of the match that it belongs to; another: it holds nothing */
    uint32_t device, host,
        disk; /* host: further ones behind those on the device; disk: behind those */
} pl_kv_hit;

/* One request across its decisions. The owner fills the upper part once. */
typedef struct pl_ask {
    struct pl_req req;
    pl_request_view strings;   /* worker_name is filled by the decider */
    const pl_model *model;     /* its workers are the candidates */
    pl_worker_state *tried[8]; /* engines that failed it: all their workers are out */
    int tried_n;
    int clamped; /* out: adds up over the request */
    /* the session it names; event PL_SESSION_NONE: none. bound_index is the decider's to fill */
    struct pl_session session;
    pl_str session_parent; /* {NULL,0}: none */
    pl_worker_state *pin;  /* where its session is bound; NULL: nowhere, or that is gone */
    bool pin_must; /* an engine's session: nowhere else (else a policy may spill, see below) */
    /* Who holds what of the prompt: an array by slot, with the stamp of this match. Asked once in
     * each decision: before the records are filled, or, where a session or a pin decides and no
     * policy is asked, for the ledger. Good until the decision is over. NULL: nobody knows. */
    const pl_kv_hit *(*match)(void *ctx, uint32_t *stamp);
    void *match_ctx;
    const pl_kv_hit *hits; /* the decider's: the last match */
    uint32_t hits_stamp;
    bool wants_open; /* only workers that can hold one more session are eligible */
    bool (*can_open)(void *ctx, const pl_worker_state *w); /* asked then */
    void *can_open_ctx;
} pl_ask;

typedef enum pl_outcome_kind {
    PL_DECIDED,   /* worker is set */
    PL_ASK_QUEUE, /* all busy, or admit said so: wait at most wait_seconds */
    PL_ASK_SHED,  /* 503 with retry_after_seconds */
    PL_NO_WORKER, /* nobody is healthy */
    PL_PIN_LOST,  /* pin_must, and the pin cannot be picked for another reason than capacity */
    PL_NO_SESSION_WORKER /* wants_open, and nobody could hold a session (others could serve) */
} pl_outcome_kind;

typedef struct pl_decision {
    pl_outcome_kind kind;
    pl_worker_state *worker;
    double wait_seconds, retry_after_seconds;
    bool all_busy;            /* with PL_ASK_QUEUE: for want of capacity, not by admit */
    bool spilled;             /* another worker for this turn only: the pin was at its cap */
    double cached_tokens;     /* of the worker, as matched; 0: none, or nobody asked */
    double shrink_max_tokens; /* -1, or the output limit to put into the body */
    char reason[PL_REASON_MAX + 1];
    bool by_policy; /* false: the binding or a fallback decided */
} pl_decision;

/* With a pin: admit is asked as always; then, when the pin is eligible, it is the answer (reason
 * "session") without route or score, unless the policy has declared affinity = "soft" and pin_must
 * is false: then the policy's own choice counts (and the pin when it chose nobody or failed). A pin
 * that is at its cap: pin_must waits (PL_ASK_QUEUE, all_busy); else the policy chooses another for
 * this turn (reason "session_spill", unless route gave one; spilled: the binding is to stay). A pin
 * that cannot be picked otherwise (pin_must without a pin is one): PL_PIN_LOST with pin_must,
 * before anybody is asked, else as if there were none. A pin with pin_must needs no can_open. */
void pl_decide(pl_decider *d, pl_ask *ask, pl_decision *out);
/* What the chosen worker has of the prompt, for a choice that was made or moved elsewhere. */
void pl_decide_cached(pl_ask *ask, pl_decision *out);

/* The session hook: how long the session lives and of which kind it is to be. Without the hook, or
 * after its failure: the given ttl and kind. Results are clamped to 1 ms .. max_ttl_seconds; a
 * policy cannot make a session engine-backed that is bound router-only, or change a bound one's
 * kind at all. ttl_seconds 0 from the hook (or nil's default 0): no affinity for this turn. */
typedef struct pl_session_choice {
    double ttl_seconds;
    int kind; /* PL_ROUTER_ONLY, PL_ENGINE_BACKED */
    bool by_policy;
} pl_session_choice;
void pl_decide_session(pl_decider *d, pl_ask *ask, double max_ttl_seconds,
                       pl_session_choice *inout);

/* The retain hook, after the choice of w: what it left out stays as given. Seconds are clamped to 0
 * .. max_retention_seconds. */
typedef struct pl_retain_choice {
    double retention_seconds; /* -1: the body is left alone */
    bool has_priority;
    int32_t priority;
} pl_retain_choice;
bool pl_decider_wants_retain(const pl_decider *d);
void pl_decide_retain(pl_decider *d, pl_ask *ask, pl_worker_state *w, pl_retain_choice *inout);

/* The expire hook: PL_CLOSE (the default), PL_EXTEND with *seconds (1 ms .. max_ttl_seconds),
 * PL_DROP. `names` gives the strings (tenant, session_id, session_parent; model empty). s->event
 * NONE is shown as CLOSE. */
int pl_decide_expire(pl_decider *d, const struct pl_session *s, const pl_request_view *names,
                     double max_ttl_seconds, double *seconds);

/* A fault: what to do (enum pl_action, validated against the table of the design), with its
 * argument. */
int pl_decide_fault(pl_decider *d, pl_ask *ask, const struct pl_fault *fault, double *arg);

void pl_decide_done(pl_decider *d, pl_ask *ask, const struct pl_outcome *outcome);
bool pl_decider_wants_done(const pl_decider *d);
/* Does the policy look at what workers hold of a prompt? Told by its text: a mention is enough. */
bool pl_decider_wants_cache(const pl_decider *d);
bool pl_decider_wants_degrade(const pl_decider *d);
/* Its policy asks for blocks that running requests share to be counted once. */
bool pl_decider_assumes_reuse(const pl_decider *d);
void pl_decider_tick(pl_decider *d, double now_seconds);

/* The built-in choice: fewest in-flight requests per weight, ties by the request's random. NULL
 * when none is eligible. */
pl_worker_state *pl_decide_least_loaded(const pl_ask *ask, const pl_decider_options *o,
                                        uint64_t now_ns);

#endif
