/* What an engine's streaming session holds, as the client would say it again: a digest of the
 * conversation so far. It lets the router prove that a request which resends the whole conversation
 * begins with what the engine has, and send only the rest. Pure functions; no thread of their own.
 *
 * Proved is: the same messages (see canon.h for what counts as the same), bytes or token ids in the
 * same order, the replies included, and the same of every other member of the body that is not
 * known to be without effect on the prompt (sampling, streaming, accounting and the router's own
 * members are; whatever is not known counts). Whatever cannot be proved goes outside the session,
 * whole, where it is answered right. Examples: a reply with reasoning that is resent without it
 * (the engine holds the reasoning); a reply that was ended by a stop string, or a text that was
 * ended by the end-of-sequence token (the engine holds what the client did not see); batches, n > 1
 * and echo; images of /generate.
 *
 * What is trimmed: the messages (text, ids) that the engine has, and `system`, which would be put
 * into the prompt once more. So would `tools`, but an engine that reads tool calls out of the
 * output (stock SGLang) only does so for a request that has `tools`. Hence: with tools a chat is
 * OUTSIDE, unless PL_HISTORY_CUT_TOOLS says that this engine answers alike without them.
 *
 * What the proof does not cover is the chat template of the engine's model: the new messages alone
 * must render to what they render to behind the others (true of the simulated engine; not of a
 * template that begins every prompt with a system text of its own, which streaming sessions of
 * chats cannot serve at all). */
#ifndef PL_HISTORY_H
#define PL_HISTORY_H

#include "base/arena.h"
#include "base/buf.h"
#include "http/scan.h"
#include "policy_abi.h"
#include "session/canon.h"

typedef enum pl_history_form {
    PL_HISTORY_NONE,     /* nothing was sent yet: the first turn goes whole */
    PL_HISTORY_MESSAGES, /* /v1/chat/completions: units are messages */
    PL_HISTORY_TEXT,     /* a prompt as text (completions, /generate): units are bytes */
    PL_HISTORY_TOKENS,   /* a prompt as token ids (/generate): units are ids */
    PL_HISTORY_LOST      /* a reply was not seen whole: nothing can be proved any more */
} pl_history_form;

/* 24 bytes, kept in the session's note. Zeroed: NONE. */
typedef struct pl_history {
    uint64_t digest[2]; /* pl_chain.v over the units, behind the other members' digest */
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
    const char *why; /* OUTSIDE: static text for people ("the beginning differs from ...") */
} pl_history_plan;

enum {
    PL_HISTORY_DELTA = 1,    /* the client says that it sends only what is new */
    PL_HISTORY_CUT_TOOLS = 2 /* the engine answers alike when `tools` is cut out, see above */
};

/* Compares the request with h. TRIM adds the edits to `edits`, at most 3; the members it edits must
 * not have been edited before (then the plan is OUTSIDE, as it is when edits are full). Members
 * that the router added or removed by edits do not count: the client's body is compared. A first
 * turn of an API that is not understood (only /v1/chat/completions, /v1/completions and /generate
 * are) is OUTSIDE, too, or, as a DELTA, WHOLE with a LOST history. Never fails: 0. */
int pl_history_plan_turn(const pl_history *h, enum pl_api_kind api, pl_str body, const pl_scan *s,
                         unsigned flags, pl_edits *edits, pl_history_plan *plan);

/* Follows the reply as it passes: the assistant's message (text, tool calls), the text or the ids.
 * Keeps digests, not the text: a few hundred bytes, and as much for each tool call (at most 64). A
 * reply is a stream of events or one answer. The bytes may be anything. */
typedef struct pl_reply pl_reply;
pl_reply *pl_reply_new(enum pl_api_kind api);   /* NULL: out of memory */
void pl_reply_free(pl_reply *r);                /* NULL is fine */
void pl_reply_event(pl_reply *r, pl_str json);  /* one SSE event's data */
void pl_reply_answer(pl_reply *r, pl_str json); /* a whole answer; of any status */

/* What the reply says about the session besides its content. */
typedef struct pl_reply_state {
    bool complete; /* its end was seen, one choice, nothing unreadable */
    bool aborted;  /* the engine finished it with an abort */
    bool poisoned; /* the engine refused the turn for the state of the session, in SGLang's words
                      ("already has an active request", "Invalid request session id", a session
                      that "does not exist"), or usage says one prompt token for a longer one
                      and it has not said why */
} pl_reply_state;
/* prompt_tokens: as usage said, -1 unknown; expected_min: tokens the prompt surely has. */
pl_reply_state pl_reply_judge(const pl_reply *r, double prompt_tokens, double expected_min);

/* Puts the reply behind c, whose units are of that form. False: it was not seen whole, or part of
 * what the engine holds does not show in it. For pl_history_advance. */
bool pl_reply_append(const pl_reply *r, pl_history_form form, pl_chain *c);

/* h becomes plan->next with the reply behind it; LOST when the reply is not complete. After OUTSIDE
 * h stays as it was: the session was not touched. */
void pl_history_advance(pl_history *h, const pl_history_plan *plan, const pl_reply *r);

#endif
