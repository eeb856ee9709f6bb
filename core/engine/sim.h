/* The simulated engine as a library: block pool, radix prefix cache, scheduler and timing, on a
 * clock that the caller owns. No sockets, no threads, no real time: the live front (front.h) and,
 * later, a simulator drive it the same way. Equal calls give equal events, byte for byte.
 *
 * Time is int64 microseconds and never goes back. The caller asks when something happens next
 * (pl_sim_next_us), moves its clock there, and calls pl_sim_step, which emits tokens through
 * callbacks.
 *
 * How it schedules. A request first pays api_us, then waits: higher priority first, then in order
 * of arrival. Each step gives one token to every decoding request, then spends what is left of
 * max_batch_tokens on prefill: first on prompts that have begun, in order of admission, then on
 * waiting ones. A request is admitted while fewer than max_running run and the pool has room for
 * its uncached prompt (and 1 % to spare when others run), evicting unlocked cache if need be; it
 * then holds the pages of its whole prompt and takes one more whenever its output fills one. When
 * none is left, the request of the lowest priority that was admitted last is preempted: its pages
 * fall back into the cache, it waits again at its old place, and later prefills what it had (so
 * nothing is emitted twice). What a request computed is cached when its prefill ends and when it
 * ends; the last output token is never computed, so it is never cached. The last prompt token is
 * always computed: a hit is at most n - 1 tokens, in whole pages. */
#ifndef PL_SIM_H
#define PL_SIM_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/str.h"

/* step_us = base + prefill_token * new + prefill_attn * sum n_i (p_i + n_i / 2) + decode_req *
 * decoding + kv_token * context */
typedef struct pl_timing {
    const char *name;
    double base_us, prefill_token_us, prefill_attn_us, decode_req_us, kv_token_us;
    double api_us; /* once a request */
} pl_timing;

/* Presets of reference tables: llama-8b-h100-tp1, llama-70b-h100-tp4, llama-8b-l40s-tp1,
 * glm47flash-l40s-tp2, and "instant". */
const pl_timing *pl_timing_find(pl_str name);
const char *pl_timing_names(void); /* for messages */

/* What one step computes. */
typedef struct pl_step_work {
    int64_t prefill_tokens; /* new prompt tokens */
    double prefill_attn;    /* sum over prefills of new * (before + new / 2), in tokens squared */
    int decoding;           /* requests that decode */
    int64_t context_tokens; /* sum of their contexts, the new token included */
} pl_step_work;

/* The formula above, rounded; at least 1, so that time always moves. */
int64_t pl_timing_step_us(const pl_timing *t, const pl_step_work *w);

typedef struct pl_sim_options {
    pl_timing timing;
    int page_tokens;      /* block size: 16 */
    int64_t pool_tokens;  /* KV capacity: 180,224 */
    int max_running;      /* 256 */
    int max_batch_tokens; /* chunked prefill budget a step: 8,192 */
    int max_waiting;      /* 0: no bound */
    bool prefix_cache;    /* true */
} pl_sim_options;

void pl_sim_options_default(pl_sim_options *o);

typedef struct pl_sim pl_sim;
typedef struct pl_sim_req pl_sim_req;

typedef enum pl_sim_finish {
    PL_SIM_DONE,   /* all output tokens are out (whether that is "length" or "stop" is the caller's)
                    */
    PL_SIM_REFUSED /* out of memory */
} pl_sim_finish;

typedef struct pl_sim_events {
    /* `n` output tokens are ready at now_us (the first call is the first token). */
    void (*on_tokens)(void *user, int64_t now_us, int from, int n);
    /* Over; the request is freed after this returns. Both may submit and abort any request. */
    void (*on_finish)(void *user, int64_t now_us, pl_sim_finish why);
} pl_sim_events;

int pl_sim_new(const pl_sim_options *o, pl_sim **out, pl_errbuf *eb);
void pl_sim_free(pl_sim *s);

/* True when the pool could hold such a request with nothing beside it. */
bool pl_sim_fits(const pl_sim *s, int n, int output_tokens);

/* Adds a request at now_us: token ids are copied. output_tokens is how many it will produce (0:
 * prefill only, on_finish comes alone); output token i is out_seed-derived (pl_sim_output_token)
 * and enters the cache, too. PL_ELIMIT: it can never fit. PL_EBUSY: the queue is full. */
int pl_sim_submit(pl_sim *s, int64_t now_us, const uint32_t *tokens, int n, int output_tokens,
                  int priority, uint64_t out_seed, const pl_sim_events *ev, void *user,
                  pl_sim_req **out);
/* No further event; its KV stays cached as far as computed. */
void pl_sim_abort(pl_sim *s, int64_t now_us, pl_sim_req *r);
/* Prompt tokens answered from the cache; known once it runs, else 0. */
int pl_sim_cached_tokens(const pl_sim_req *r);
bool pl_sim_is_running(const pl_sim_req *r); /* false while it waits (again) */

/* Four bytes of text packed into a number, lowest byte first: a short word and a space. */
uint32_t pl_sim_output_token(uint64_t out_seed, int i);

/* When the step under way ends, or the next request is ready; INT64_MAX when idle. */
int64_t pl_sim_next_us(const pl_sim *s);
/* Ends the steps that are due at now_us and starts the next ones. */
void pl_sim_step(pl_sim *s, int64_t now_us);

/* Drops what no running request holds. */
void pl_sim_flush_cache(pl_sim *s);

typedef struct pl_sim_stats {
    int running, waiting;
    int64_t waiting_tokens; /* uncached prompt tokens of waiting requests, estimate: their prompt
                               lengths */
    int64_t pool_tokens;    /* = used + evictable + available */
    int64_t used_tokens;    /* held by running requests, shared prefixes once */
    int64_t evictable_tokens, available_tokens;
    uint64_t requests, finished, aborted, preempted;
    uint64_t prompt_tokens, cached_tokens; /* of requests that were admitted */
    uint64_t output_tokens, evicted_tokens;
    uint64_t steps;
} pl_sim_stats;

void pl_sim_stats_of(const pl_sim *s, pl_sim_stats *out);
/* Checks every invariant (pool conservation, reference counts, tree shape); aborts with a message
 * when one is broken. For tests. */
void pl_sim_check(const pl_sim *s);

#endif
