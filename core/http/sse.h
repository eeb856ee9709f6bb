/* Server-sent events, as engines send them. Two readers of the same bytes:
 *  pl_sse_tail  - 1 ns a chunk: does the stream stand at an event boundary? (needed to end a broken
 * stream well) pl_sse       - splits into events: to read usage and to swallow a chunk that the
 * client did not ask for. Line ends LF, CR and CRLF (WHATWG HTML, 9.2.6); CRLF may be split between
 * reads. */
#ifndef PL_SSE_H
#define PL_SSE_H

#include <stdbool.h>

#include "base/buf.h"
#include "base/str.h"

/* What is open at the end of the bytes seen so far. */
typedef struct pl_sse_tail {
    bool any; /* any byte was seen */
    unsigned char last[4];
    int n;
} pl_sse_tail;

void pl_sse_tail_feed(pl_sse_tail *t, pl_str bytes);

/* Bytes to send so that a new event may follow: "" at a boundary, "\n" after a line end, else
 * "\n\n". */
pl_str pl_sse_tail_close(const pl_sse_tail *t);

typedef struct pl_sse_event {
    pl_str raw;  /* the event's bytes with its terminating blank line, as received */
    pl_str data; /* data lines joined by LF (no copy when there is one line) */
    pl_str name; /* the event field, {NULL,0} when absent */
} pl_sse_event;

/* Called for each complete event; raw and data are valid until it returns. Non-zero stops the feed
 * with that code. */
typedef int (*pl_sse_fn)(void *ctx, const pl_sse_event *ev);

typedef struct pl_sse {
    pl_buf pending;   /* an incomplete event */
    size_t max_event; /* bytes; PL_ELIMIT above */
    size_t scanned;   /* bytes of pending already searched for its end */
} pl_sse;

void pl_sse_init(pl_sse *s, size_t max_event);
int pl_sse_feed(pl_sse *s, pl_str bytes, pl_sse_fn fn, void *ctx);
/* What is pending (an unfinished event), to be forwarded when the stream ends without a boundary.
 */
pl_str pl_sse_rest(const pl_sse *s);
void pl_sse_free(pl_sse *s);

/* usage as OpenAI chat, completions, responses, Anthropic messages and SGLang meta_info spell it.
 * Missing fields stay as they were; returns true when any was found. `json` is one event's data or
 * a whole answer. */
typedef struct pl_usage {
    double prompt_tokens, cached_tokens, output_tokens; /* -1: not said */
} pl_usage;

bool pl_usage_read(pl_str json, pl_usage *u);

/* True for an OpenAI chunk that carries only usage: `choices` is an empty array and `usage` an
 * object. */
bool pl_usage_only_chunk(pl_str json);

#endif
