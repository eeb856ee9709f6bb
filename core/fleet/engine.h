/* An engine (an inference server) and its workers (its data-parallel ranks): identity, health,
 * breaker, ledger. Shared by all threads: identity is fixed for life, what changes is atomic.
 * Reference-counted: the fleet holds one reference while the engine is configured, each request and
 * snapshot holds its own. */
#ifndef PL_ENGINE_H
#define PL_ENGINE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/str.h"

typedef struct pl_engine pl_engine;

typedef enum pl_engine_kind {
    PL_KIND_AUTO,
    PL_KIND_SGLANG,
    PL_KIND_VLLM,
    PL_KIND_OTHER
} pl_engine_kind;
const char *pl_engine_kind_name(pl_engine_kind k); /* auto sglang vllm other */

/* What the health checks say. UNKNOWN until the first one has ended: not eligible. */
typedef enum pl_health { PL_HEALTH_UNKNOWN, PL_HEALTH_UP, PL_HEALTH_DOWN } pl_health;
/* What the operator said. */
typedef enum pl_admin_state {
    PL_ENGINE_ACTIVE,
    PL_ENGINE_DRAINING,
    PL_ENGINE_REMOVED
} pl_admin_state;
typedef enum pl_breaker_state {
    PL_BREAKER_CLOSED,
    PL_BREAKER_OPEN,
    PL_BREAKER_HALF_OPEN
} pl_breaker_state;

/* One data-parallel rank. The ledger counts what the router itself has sent there. */
typedef struct pl_worker_state {
    pl_engine *engine; /* owner */
    int rank;
    int slot; /* small integer for life; reused after removal with a new generation */
    int generation;
    char name[160]; /* "engine" or "engine/rank" */
    _Atomic int32_t inflight;
    _Atomic int32_t streams;
    _Atomic int64_t queued_prefill_tokens;
    _Atomic uint64_t requests;                /* sent, ever */
    _Atomic double prefill_tokens_per_second; /* moving average; 0 until measured */
    _Atomic double ttft_seconds;              /* moving average; 0 until measured */
} pl_worker_state;

typedef struct pl_engine_spec {
    pl_str name; /* empty: host:port */
    pl_str url;  /* http://host[:port] */
    pl_engine_kind kind;
    double weight;                     /* 1 */
    int32_t max_inflight;              /* 0: no cap */
    int64_t max_queued_prefill_tokens; /* 0: no cap */
    int dp_size;                       /* 1 */
    const pl_str *models;              /* NULL: ask the engine */
    int models_n;
    bool from_config; /* SIGHUP may remove it */
} pl_engine_spec;

struct pl_engine {
    _Atomic int refs;
    char name[128]; /* [A-Za-z0-9._:-] and [ ] of IPv6 */
    char url[512];  /* normalised: http://host:port, no path */
    char host[256];
    int port;
    double weight;
    int32_t max_inflight;
    int64_t max_queued_prefill_tokens;
    bool from_config;
    bool models_given; /* models come from the configuration: not asked for */
    uint64_t id;       /* unique for the process */
    _Atomic int kind;  /* pl_engine_kind, detected unless given */
    _Atomic int health, admin;
    /* breaker: see breaker.h */
    _Atomic int breaker, probes;
    _Atomic uint32_t failures; /* consecutive */
    _Atomic uint32_t trips;    /* times opened in a row, for the backoff */
    _Atomic uint64_t open_until_ns;
    /* counters for /metrics and /engines */
    _Atomic uint64_t requests, failed, client_errors, retries, health_checks, health_failures,
        breaker_opened;
    _Atomic uint64_t connects, reuses;
    int workers_n;
    pl_worker_state workers[]; /* dp_size */
};

/* Parses and checks a spec. 0, or a negative pl_err with a message. */
int pl_engine_new(const pl_engine_spec *spec, pl_engine **out, pl_errbuf *eb);
pl_engine *pl_engine_ref(pl_engine *e);
void pl_engine_unref(pl_engine *e);

/* All ranks together. */
int32_t pl_engine_inflight(const pl_engine *e);

/* --- ledger: what a request has put on a worker, taken back exactly once however it ends --- */
typedef struct pl_ticket {
    pl_worker_state *worker; /* NULL: not begun or ended */
    int64_t prefill_tokens;  /* 0 after the first token */
    bool stream;
} pl_ticket;

void pl_ticket_begin(pl_ticket *t, pl_worker_state *w, double prompt_tokens, bool stream);
/* The first token was seen: prefill is done. ttft and tokens feed the worker's averages.
 * Idempotent. */
void pl_ticket_first_token(pl_ticket *t, double ttft_seconds);
void pl_ticket_end(pl_ticket *t); /* idempotent */

/* --- breaker: consecutive failures open it; after a backoff a few probes may pass; one success
 * closes it --- */
typedef struct pl_breaker_options {
    uint32_t failures;        /* consecutive failures that open it, 5 */
    uint64_t backoff_ns;      /* first, 1 s; doubles up to */
    uint64_t max_backoff_ns;  /* 30 s */
    int32_t half_open_probes; /* requests let through at once while half open, 1 */
} pl_breaker_options;
extern const pl_breaker_options pl_breaker_default;

/* May a request go there now? Does not claim anything. */
bool pl_breaker_allows(const pl_engine *e, const pl_breaker_options *o, uint64_t now_ns);
/* A request is being sent: claims a probe when half open. False: somebody else took the last one.
 * Sets *probe, which the caller hands back to exactly one of the three below. */
bool pl_breaker_begin(pl_engine *e, const pl_breaker_options *o, uint64_t now_ns, bool *probe);
void pl_breaker_success(pl_engine *e, bool probe);
void pl_breaker_failure(pl_engine *e, const pl_breaker_options *o, uint64_t now_ns, bool probe);
void pl_breaker_neutral(pl_engine *e,
                        bool probe); /* neither: the client left, or a 4xx of its own */
/* An active health check succeeded: an open breaker goes half open at once. */
void pl_breaker_health_ok(pl_engine *e, uint64_t now_ns);

/* Why e cannot take a request now (enum pl_why of policy_abi.h, without AT_CAPACITY and TRIED); 0
 * when it can. */
int pl_engine_why(const pl_engine *e, const pl_breaker_options *o, uint64_t now_ns);
/* True when the worker is at a cap of its engine. */
bool pl_worker_at_capacity(const pl_worker_state *w);

#endif
