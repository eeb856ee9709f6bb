/* The ledger: what the router itself has put on each worker, and what it has learned of it. Written
 * by all loops (atomics), read by all; a request holds a ticket and gives it back exactly once,
 * however it ends. */
#ifndef PL_LEDGER_H
#define PL_LEDGER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "fleet/active_blocks.h"

struct pl_engine;

/* One data-parallel rank. */
typedef struct pl_worker_state {
    struct pl_engine *engine; /* owner */
    int rank;
    int slot;       /* small integer for life, given by the fleet; -1 before */
    int generation; /* changes when a slot is used again */
    char name[160]; /* "engine" or "engine/rank" */
    _Atomic int32_t inflight;
    _Atomic int32_t streams;
    _Atomic int64_t queued_prefill_tokens; /* uncached ones of requests without a first token */
    _Atomic int64_t decode_blocks; /* KV blocks of requests under way: prompt and generated */
    _Atomic int32_t block_tokens;  /* of its KV blocks; 0: not known, PL_LEDGER_BLOCK_TOKENS */
    _Atomic int kv_windows;        /* as its events have them; 0: not known, 1: plain, 2: Eagle's */
    _Atomic int kv_trust;          /* enum pl_kv_trust of policy_abi.h; set by the KV feed */
    /* the engine's own gauges, see gauges.h; -1 until they were read */
    _Atomic double running_requests, waiting_requests, kv_usage;
    _Atomic uint64_t gauges_at_ns;            /* machine clock; 0: never */
    _Atomic bool asleep;                      /* as it says itself: its KV cache was dropped */
    _Atomic int64_t kv_tokens;                /* capacity of its KV cache; 0: not known */
    _Atomic uint64_t requests;                /* sent, ever */
    _Atomic int32_t sessions;                 /* engine-backed ones that this router opened on it */
    _Atomic int64_t session_tokens;           /* they hold, as last reported */
    _Atomic double prefill_tokens_per_second; /* moving average; 0 until measured */
    _Atomic double ttft_seconds;              /* moving average; 0 until measured */
} pl_worker_state;

/* Each new sample moves an average by this share of the difference: the last ten or so samples
 * count. The first sample is taken whole. */
#define PL_LEDGER_EWMA_SHARE 0.125
/* The block size that engines of unknown size are taken to have. */
#define PL_LEDGER_BLOCK_TOKENS 16
/* Shorter prompts say more about latency than about the prefill rate. */
#define PL_LEDGER_MIN_RATE_TOKENS 64

typedef struct pl_ticket {
    pl_worker_state *worker; /* NULL: not begun or ended */
    int64_t prefill_tokens;  /* uncached prompt tokens; 0 after the first token */
    int64_t tokens;          /* prompt and generated so far */
    int64_t blocks;          /* counted in decode_blocks by this ticket */
    int64_t base_blocks;     /* further ones, counted there by active_blocks.h */
    pl_active_hold active;
    int32_t block_tokens;
    bool stream;
    bool first_token; /* was seen */
} pl_ticket;

/* What a request puts on a worker. Nonsense (negative, NaN) counts as 0. */
typedef struct pl_load {
    double prompt_tokens; /* an estimate, or exact */
    double cached_tokens; /* of them believed to be in the worker's KV cache: no prefill */
    bool stream;
    /* assume_kv_reuse: its prompt's blocks are counted once with those of the others that run
       there; NULL: it counts all of them */
    pl_active *active;
    pl_active_keys keys; /* of the prompt */
} pl_load;

/* The caller holds a reference to the engine until the ticket has ended. */
void pl_ticket_begin(pl_ticket *t, pl_worker_state *w, const pl_load *load);

/* n more tokens were generated: takes another block whenever they fill one. */
void pl_ticket_output(pl_ticket *t, int64_t n);

/* The first token was seen: prefill is done. ttft and tokens feed the worker's averages; the rate
 * contains what the request waited in the engine, so it says what a request gets, not what the
 * hardware can do. ttft_seconds <= 0: not known, the averages stay. Idempotent. */
void pl_ticket_first_token(pl_ticket *t, double ttft_seconds);

void pl_ticket_end(pl_ticket *t); /* idempotent */

/* True when the worker's engine is at one of its caps (they are sums over its ranks). A hint for
 * decisions: two loops may see the last free place at once; who begins a ticket looks again. */
bool pl_worker_at_capacity(const pl_worker_state *w);

/* All ranks together. */
int32_t pl_engine_inflight(const struct pl_engine *e);
int64_t pl_engine_queued_prefill_tokens(const struct pl_engine *e);

#endif
