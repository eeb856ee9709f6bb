/* What the workers hold of a request's prompt, from all that the router knows: the index of their
 * events, what was routed to them (approximate mode, for workers without live events), and
 * predictions (what was routed to a worker with events, until they arrive). One pl_holdings for the
 * router, one pl_holdings_loop for each loop, one pl_prompt for each request.
 *
 *     pl_prompt_read    the keys of the prompt: token blocks where it has token ids, else text
 * chunks pl_prompt_tokens  the same with ids from the engine's /tokenize, when they came in time
 *     pl_prompt_match   who holds how much; for each decision
 *     pl_prompt_routed  it is sent to a worker
 *     pl_prompt_usage   the engine has said how much it had: corrects, and keeps the score
 *     pl_prompt_failed  it was not computed there */
#ifndef PL_HOLDINGS_H
#define PL_HOLDINGS_H

#include "fleet/fleet.h"
#include "kv/approx.h"
#include "kv/index.h"
#include "kv/keys.h"
#include "policy/decide.h"

typedef struct pl_holdings pl_holdings;
typedef struct pl_holdings_loop pl_holdings_loop;

typedef struct pl_holdings_options {
    pl_clock clock;
    uint64_t index_bytes;      /* cap of the index: 1 GiB */
    uint64_t routed_bytes;     /* cap of what was routed: 256 MiB */
    uint32_t routed_ttl_ms;    /* 120,000 */
    uint32_t predicted_ttl_ms; /* 5,000; 0: no predictions */
    uint32_t chunk_bytes;      /* of text, 128 */
} pl_holdings_options;
void pl_holdings_options_default(pl_holdings_options *o);

int pl_holdings_new(const pl_holdings_options *o, pl_holdings **out);
void pl_holdings_free(pl_holdings *h); /* after its loops; NULL is fine */
pl_index *pl_holdings_index(pl_holdings *h);
/* Frees what has expired; a few times a second. Any thread. */
void pl_holdings_advance(pl_holdings *h);
/* The worker is gone: what was routed to it is forgotten (the index's part is the feed's). */
void pl_holdings_worker_gone(pl_holdings *h, int slot);
/* The worker has published events: what was predicted of it before until_ns is in the index, or is
 * not true. */
void pl_holdings_published(pl_holdings *h, int slot, uint64_t until_ns);

/* How good the predictions are, summed up over requests whose engine has said its cached tokens. */
typedef struct pl_accuracy {
    uint64_t requests;         /* compared */
    uint64_t predicted_tokens; /* cached, as matched for the worker that was chosen */
    uint64_t actual_tokens;    /* cached, as the engine counted */
    uint64_t error_tokens;     /* |predicted - actual| */
} pl_accuracy;
/* Of the worker that has the slot, and of those that had it. */
void pl_holdings_accuracy(pl_holdings *h, int slot, pl_accuracy *out);

typedef struct pl_holdings_stats {
    pl_approx_stats routed, predicted;
    pl_accuracy accuracy; /* of all workers */
} pl_holdings_stats;
void pl_holdings_stats_of(pl_holdings *h, pl_holdings_stats *out);

pl_holdings_loop *pl_holdings_loop_new(pl_holdings *h); /* NULL: out of memory */
void pl_holdings_loop_free(pl_holdings_loop *l);

#define PL_PROMPT_SIZES 8 /* different block sizes among the workers of one model */

typedef struct pl_prompt {
    struct {
        uint32_t block_tokens;
        int windows; /* pl_worker_state.kv_windows */
        pl_keys keys;
        pl_index_space space; /* of the index; 0: nobody publishes there */
        bool unnamed; /* no event of late names its adapter or salt: what was routed counts */
    } size[PL_PROMPT_SIZES];
    int sizes_n;
    double tokens; /* of the prompt, as far as it is known */
    /* of the try under way */
    int slot;  /* -1: none */
    int at;    /* of size[] */
    bool live; /* the worker publishes: predictions */
    uint64_t routed_ns;
    double expected_tokens; /* cached there, as matched */
    size_t expected_units;
} pl_prompt;

/* Reads the keys for the block sizes of the model's workers; they live in the arena. True when
 * there are any, or token ids could give some. *exact: the tokens are ids, prompt->tokens counts
 * them. */
bool pl_prompt_read(pl_holdings_loop *l, const pl_model *m, const pl_scan *s, pl_arena *a,
                    pl_str cache_salt, double estimated_tokens, pl_prompt *out, bool *exact);
/* The ids that the engine's tokenizer gave; they must live as long as the prompt. */
bool pl_prompt_tokens(pl_holdings_loop *l, const pl_model *m, const uint32_t *ids, size_t n,
                      pl_arena *a, pl_str cache_salt, pl_prompt *out);

/* For pl_ask.match: an array by slot, valid until the loop's next match. */
const pl_kv_hit *pl_prompt_match(pl_holdings_loop *l, const pl_prompt *p, const pl_model *m,
                                 uint32_t *stamp);

/* The prompt's cumulative block hashes in the worker's block size; n 0: it has none. */
pl_active_keys pl_prompt_blocks(const pl_prompt *p, const pl_worker_state *w);

void pl_prompt_routed(pl_holdings_loop *l, pl_prompt *p, const pl_worker_state *w,
                      double expected_tokens);
/* cached_tokens -1: it did not say. That means none where it has said some before in an answer of
 * the same shape (enum pl_api_kind): engines leave a 0 out. */
void pl_prompt_usage(pl_holdings_loop *l, pl_prompt *p, double cached_tokens, double prompt_tokens,
                     unsigned shape);
void pl_prompt_failed(pl_holdings_loop *l, pl_prompt *p);

#endif
