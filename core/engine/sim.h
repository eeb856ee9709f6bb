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
 * always computed: a hit is at most n - 1 tokens, in whole pages.
 *
 * Sessions (pl_sim_open) hold what was computed of them in a slot beside the cache; see there. Held
 * tokens cannot be evicted, so that requests may wait until a session ends; when nothing runs and
 * nothing can, the engine is stalled (pl_sim_stats). */
#ifndef PL_SIM_H
#define PL_SIM_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/str.h"
#include "engine/blocks.h"
#include "engine/radix.h"

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

/* The formula above, rounded; at least 1, so that time always moves, and at most 31 years. */
int64_t pl_timing_step_us(const pl_timing *t, const pl_step_work *w);

typedef struct pl_sim_options {
    pl_timing timing;
    int page_tokens;      /* block size: 16 */
    int64_t pool_tokens;  /* KV capacity: 180,224 */
    int max_running;      /* 256 */
    int max_batch_tokens; /* chunked prefill budget a step: 8,192 */
    int max_waiting;      /* 0: no bound */
    bool prefix_cache;    /* true */
    pl_radix_policy eviction;
} pl_sim_options;

void pl_sim_options_default(pl_sim_options *o);

typedef struct pl_sim pl_sim;
typedef struct pl_sim_req pl_sim_req;
typedef struct pl_slot pl_sim_slot;

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

/* What a request asks for. Zero-initialise. */
typedef struct pl_sim_ask {
    const uint32_t *tokens; /* copied */
    int n, output_tokens;   /* output_tokens 0: prefill only, on_finish comes alone */
    int priority;           /* higher first */
    uint64_t out_seed; /* output token i is pl_sim_output_token(out_seed, i); it is cached, too */
    int64_t retain_us; /* its prefix is retained for so long after it was computed; 0: not */
    pl_sim_slot *slot; /* from pl_sim_turn_slot: a turn of that session. The prompt is what the
                          session said so far and then tokens[0..n). */
    pl_str name;       /* of the turn: what the next one may call it by */
    uint32_t tail; /* a turn that ends well is followed by this token, which it does not compute */
    bool tailed;
} pl_sim_ask;

/* Adds a request at now_us. PL_ELIMIT: it can never fit. PL_EBUSY: the queue is full. */
int pl_sim_ask_for(pl_sim *s, int64_t now_us, const pl_sim_ask *ask, const pl_sim_events *ev,
                   void *user, pl_sim_req **out);
/* The same without a session and retention. */
int pl_sim_submit(pl_sim *s, int64_t now_us, const uint32_t *tokens, int n, int output_tokens,
                  int priority, uint64_t out_seed, const pl_sim_events *ev, void *user,
                  pl_sim_req **out);
/* No further event; its KV stays cached as far as computed. A turn of a session that has run takes
 * all that the session holds with it; what the session said stays. */
void pl_sim_abort(pl_sim *s, int64_t now_us, pl_sim_req *r);
/* Prompt tokens answered from the cache; known once it runs, else 0. */
int pl_sim_cached_tokens(const pl_sim_req *r);
bool pl_sim_is_running(const pl_sim_req *r); /* false while it waits (again) */

/* Four bytes of text packed into a number, lowest byte first: a short word and a space. */
uint32_t pl_sim_output_token(uint64_t out_seed, int i);

/* When the step under way ends, the next request is ready or the next idle session times out;
 * INT64_MAX when idle. */
int64_t pl_sim_next_us(const pl_sim *s);
/* Ends the steps that are due at now_us and starts the next ones. */
void pl_sim_step(pl_sim *s, int64_t now_us);

/* Drops what no running request holds; of idle sessions, what they said stays. */
void pl_sim_flush_cache(pl_sim *s);

/* --- what the cache has --- */

/* From now on every change of the prefix cache is told (blocks.h). Once, before the first request:
 * else PL_EINVALID. PL_ENOMEM. */
int pl_sim_watch_kv(pl_sim *s, const pl_sim_kv_events *ev, void *user, pl_sim_kv_names names);
/* All blocks that the cache holds now, as runs in no order: what an index that was told everything
 * must have. Nothing unless it is watched. */
void pl_sim_each_kv(const pl_sim *s, void (*each)(void *user, const pl_sim_kv_run *run),
                    void *user);

/* --- sessions ---
 *
 * A session is a conversation whose turns only say what is new. Its first turn finds and leaves its
 * prompt in the cache as any request does, and the session keeps that part locked; all else that it
 * and later turns compute is held in the session's slot, outside the cache. So a later turn finds
 * all that was computed, whatever happened to the cache, and nothing more of it is found by others.
 * One turn at a time. The slot is given up when the session is closed or was idle for timeout_us
 * since its last turn began (at once, or when the turn under way ends), when a turn is aborted, and
 * when the cache is flushed; after the last two the next turn starts over, as a first one. A turn
 * that is preempted falls back to what the slot held before it. */
typedef struct pl_sim_session {
    pl_str id;          /* at most 1,024 bytes */
    bool streaming;     /* as above; else it takes no turns, and is only there */
    int64_t timeout_us; /* -1: none */
    int64_t capacity;   /* kept for those who ask */
} pl_sim_session;

/* PL_EEXISTS, PL_ELIMIT (too many, id too long), PL_ENOMEM. */
int pl_sim_open(pl_sim *s, int64_t now_us, const pl_sim_session *o);
/* False: there is none of that name. */
bool pl_sim_close(pl_sim *s, int64_t now_us, pl_str id);

typedef struct pl_sim_turn {
    pl_str id;
    pl_str after; /* name of the turn that this one follows; empty: the last one */
    bool replace, drop_previous_output;
    int64_t offset; /* 0: none */
} pl_sim_turn;

/* The slot for a turn that is asked for next; NULL when it is refused, and why in the words of
 * SGLang. */
pl_sim_slot *pl_sim_turn_slot(pl_sim *s, int64_t now_us, const pl_sim_turn *turn, pl_errbuf *why);
int pl_sim_slot_tokens(const pl_sim_slot *slot); /* what was said so far */

typedef struct pl_sim_slot_info {
    pl_sim_session session;
    bool inflight, closing;
    int turns;             /* that ended well */
    int tokens;            /* of the conversation; without a turn under way */
    int kv_tokens;         /* of them, computed and held: what the next turn finds */
    int64_t held_tokens;   /* of the pool, beside the cache, with a turn under way */
    int64_t prefix_tokens; /* of the cache, locked for the session */
    int64_t active_us;     /* when its last turn began */
} pl_sim_slot_info;
/* In the order of opening. */
void pl_sim_each_slot(const pl_sim *s, void (*each)(void *user, const pl_sim_slot_info *info),
                      void *user);

typedef struct pl_sim_stats {
    int running, waiting;
    int64_t waiting_tokens; /* uncached prompt tokens of waiting requests, estimate: their prompt
                               lengths, without what their sessions hold */
    int64_t pool_tokens;    /* = used + evictable + available */
    int64_t used_tokens;    /* held by running requests, shared prefixes once */
    int64_t evictable_tokens, available_tokens;
    int64_t retained_tokens; /* of the cache */
    int64_t held_tokens;     /* by sessions that are idle, beside the cache; part of used */
    int sessions, streaming_sessions;   /* open */
    bool stalled;                       /* requests wait, and only the end of a session can help */
    uint64_t opened, closed, timed_out; /* sessions */
    uint64_t turns;                     /* admitted */
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
