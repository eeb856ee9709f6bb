/* Token ids of requests that come as text, from the engines' own POST /tokenize (the chat template
 * is applied there), each prompt asked for once.
 *
 * What engines offer: vLLM tokenizes prompts and chat messages with tools; SGLang's endpoint knows
 * prompts only, so chat requests to it stay with text chunks (PL_TOKCACHE_OFF). So do requests with
 * attachments, by URL or in the request: /tokenize gives placeholders for them that no event names.
 *
 * A conversation's next turn has its last one as its beginning, but templates do not add up in
 * general: some drop earlier reasoning, or move the tools. So additivity is tried, per model: the
 * ids of the new messages are asked for behind a fixed first message (the anchor, whose own ids are
 * taken off), joined to those of the longest known prefix of messages, and compared with the whole
 * prompt's. That is done where what is new begins with the assistant's reply. After
 * PL_TOKCACHE_CHECKS equal ones the new messages alone are asked for, every PL_TOKCACHE_RECHECK-th
 * turn both; the first difference takes the model back to whole prompts for PL_TOKCACHE_DISTRUST
 * turns and forgets what was joined. The generation prompt is left out: the ids are a few short of
 * the engine's, which costs at most the last block. Prompts that are one string are asked for
 * whole: tokenizers merge over any cut.
 *
 * No sockets inside: the caller that gets PL_TOKCACHE_ASK sends the bodies it is given and says
 * what came back. Everybody who wants the same ids meanwhile waits, for as long as their own budget
 * lasts (PL_TOKCACHE_BUDGET_MS): then they leave and go on in approximate mode, while the answer
 * still fills the cache.
 *
 *     switch (pl_tokcache_get(c, &request, &answer)) {
 *     case PL_TOKCACHE_HIT:  ... answer.ids, release them; break;
 *     case PL_TOKCACHE_ASK:  POST answer.calls[i].body to /tokenize, each; then as WAIT
 *     case PL_TOKCACHE_WAIT: start a timer of the budget; ready() comes by the loop's mailbox
 *     case PL_TOKCACHE_OFF:  approximate mode
 *     }
 *     when a call's response is there: pl_tokcache_fill(c, call, its body)
 *     when it failed or was no 200:    pl_tokcache_fail(c, call)
 *     when the timer fires first, or the client is gone: pl_tokcache_leave(answer.ticket)
 *
 * Any thread; one lock that is held for lookups only, not while ids are parsed or compared. */
#ifndef PL_TOKENS_CACHE_H
#define PL_TOKENS_CACHE_H

#include "base/buf.h"
#include "base/clock.h"
#include "base/mailbox.h"
#include "http/scan.h"
#include "kv/tokens.h"

#define PL_TOKCACHE_BUDGET_MS 20
#define PL_TOKCACHE_CHECKS    3
#define PL_TOKCACHE_RECHECK   32
#define PL_TOKCACHE_DISTRUST  256
#define PL_TOKCACHE_FAILURES  8     /* in a row, of a model: it is left alone for a while */
#define PL_TOKCACHE_PAUSE_MS  30000 /* the while */
#define PL_TOKCACHE_MODELS    256

typedef struct pl_tokcache pl_tokcache;
typedef struct pl_tokcache_call pl_tokcache_call;
typedef struct pl_tokcache_ticket pl_tokcache_ticket;

typedef struct pl_tokcache_options {
    pl_clock clock;
    uint64_t max_bytes; /* of ids and entries kept */
    uint32_t max_calls; /* under way at once; above it: PL_TOKCACHE_OFF */
} pl_tokcache_options;

int pl_tokcache_new(const pl_tokcache_options *o, pl_tokcache **out)
    __attribute__((warn_unused_result));
/* Every call was filled or failed, every ticket left or delivered, all ids are released. */
void pl_tokcache_free(pl_tokcache *c);

typedef enum pl_tokcache_api {
    PL_TOKCACHE_PROMPT, /* SGLang */
    PL_TOKCACHE_CHAT    /* vLLM: prompts, too */
} pl_tokcache_api;

typedef struct pl_tokcache_request {
    pl_tokcache_api api;
    pl_str model; /* as the engines call it; LoRA adapters are models of their own */
    pl_str body;
    const pl_scan *scan; /* of the body */
    pl_mailbox *mailbox; /* of the caller's loop */
    /* On that loop, once, unless the ticket was left before: 0 and ids (the callee's to release),
     * or what went wrong and NULL. The ticket is gone then. */
    void (*ready)(void *ctx, int rc, pl_tokens *ids);
    void *ctx;
} pl_tokcache_request;

typedef enum pl_tokcache_result {
    PL_TOKCACHE_OFF, /* nothing can be asked: wrong shape, too busy, an engine that cannot */
    PL_TOKCACHE_HIT,
    PL_TOKCACHE_WAIT,
    PL_TOKCACHE_ASK
} pl_tokcache_result;

typedef struct pl_tokcache_post {
    pl_tokcache_call *call;
    pl_buf body; /* the caller frees it */
} pl_tokcache_post;

typedef struct pl_tokcache_answer {
    pl_tokens *ids;             /* HIT: the caller's to release */
    pl_tokcache_ticket *ticket; /* WAIT and ASK */
    pl_tokcache_post calls[3];  /* ASK */
    int calls_n;
} pl_tokcache_answer;

pl_tokcache_result pl_tokcache_get(pl_tokcache *c, const pl_tokcache_request *r,
                                   pl_tokcache_answer *out);

/* The end of a call, each exactly once: the response's body, or that there is none. Any thread,
 * with or without its request still there. False: the body was no use, as if there were none. */
bool pl_tokcache_fill(pl_tokcache *c, pl_tokcache_call *call, pl_str response);
void pl_tokcache_fail(pl_tokcache *c, pl_tokcache_call *call);

/* Nobody waits for it any more. On the loop of its mailbox, before ready() has run. */
void pl_tokcache_leave(pl_tokcache_ticket *t);

typedef struct pl_tokcache_stats {
    uint64_t entries, bytes;
    uint64_t hits, joined;          /* found; found while under way */
    uint64_t whole, parts, anchors; /* calls made */
    uint64_t failures;
    uint64_t agreed, differed; /* checks of additivity */
    uint64_t evicted;
} pl_tokcache_stats;
void pl_tokcache_stats_of(pl_tokcache *c, pl_tokcache_stats *out);

#endif
