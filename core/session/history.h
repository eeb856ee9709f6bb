/* What an engine's streaming session holds, as the client would say it again: a digest of the
 * conversation so far. It lets the router prove that a request which resends the whole conversation
 * begins with what the engine has, and send only the rest. Pure functions; no thread of their own.
 */
#ifndef PL_HISTORY_H
#define PL_HISTORY_H

#include "base/arena.h"
#include "base/buf.h"
#include "http/scan.h"
#include "policy_abi.h"

typedef enum pl_history_form {
    PL_HISTORY_NONE,     /* nothing was sent yet: the first turn goes whole */
    PL_HISTORY_MESSAGES, /* chat: units are messages */
    PL_HISTORY_TEXT,     /* a prompt as text: units are bytes */
    PL_HISTORY_TOKENS,   /* a prompt as token ids: units are ids */
    PL_HISTORY_LOST      /* a reply was not seen whole: nothing can be proved any more */
} pl_history_form;

/* 24 bytes, kept in the session's note. */
typedef struct pl_history {
    uint64_t digest[2]; /* chained over the units */
    uint32_t units;     /* messages, bytes or ids, the replies included */
    uint8_t form;       /* pl_history_form */
    uint8_t api;        /* enum pl_api_kind it came through */
} pl_history;

/* How a turn goes to the engine's session. */
typedef struct pl_history_plan {
    enum {
        PL_PLAN_WHOLE,  /* nothing was there yet: as it is, into the session */
        PL_PLAN_TRIM,   /* edits were added that leave only what is new */
        PL_PLAN_DELTA,  /* the client sent only what is new: as it is, into the session */
        PL_PLAN_OUTSIDE /* the prefix could not be proved: as it is, without the session */
    } how;
    pl_history next; /* the history when this turn's prompt is in, without its reply */
    const char *why; /* OUTSIDE: static text for people ("message 3 differs from what was sent") */
} pl_history_plan;

/* Compares the request with h. delta: the client says that it sends only what is new. TRIM adds the
 * edits to `edits`. System messages, tools and other members that render into the prompt (tools,
 * system, instructions) count as part of the first unit: when they changed, nothing is proved. 0 or
 * PL_ENOMEM, PL_ELIMIT (edits full: then the plan is OUTSIDE). */
int pl_history_plan_turn(const pl_history *h, enum pl_api_kind api, pl_arena *a, pl_str body,
                         const pl_scan *s, bool delta, pl_edits *edits, pl_history_plan *plan);

/* Follows the reply as it passes: the assistant's message (text, tool calls), the text or the ids.
 */
typedef struct pl_reply pl_reply;
pl_reply *pl_reply_new(enum pl_api_kind api);   /* NULL: out of memory */
void pl_reply_free(pl_reply *r);                /* NULL is fine */
void pl_reply_event(pl_reply *r, pl_str json);  /* one SSE event's data */
void pl_reply_answer(pl_reply *r, pl_str json); /* a whole answer */

/* What the reply says about the session besides its content. */
typedef struct pl_reply_state {
    bool complete; /* its end was seen, one choice, nothing unreadable */
    bool aborted;  /* the engine finished it with an abort */
    bool poisoned; /* the engine refused the turn for the state of the session: see
                      engines-sglang.md: "already has an active request", "Invalid request session
                      id", usage of one prompt token for a longer one */
} pl_reply_state;
/* prompt_tokens: as usage said, -1 unknown; expected_min: tokens the prompt surely has. */
pl_reply_state pl_reply_judge(const pl_reply *r, double prompt_tokens, double expected_min);

/* h becomes plan->next with the reply behind it; LOST when the reply is not complete. */
void pl_history_advance(pl_history *h, const pl_history_plan *plan, const pl_reply *r);

#endif
