/* Server-sent events, as engines send them, and the usage in answers. Two readers of the same
 * bytes: pl_sse_tail  a few ns a chunk: does the stream stand at an event boundary? (to end a
 * broken one) pl_sse       splits into events: to read usage, and to swallow a chunk the client did
 * not ask for Line ends LF, CR and CRLF (WHATWG HTML, 9.2.6); CRLF may be split between reads. */
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
 * "\n\n" (also after a lone CR, which an LF would only make a CRLF). */
pl_str pl_sse_tail_close(const pl_sse_tail *t);

typedef struct pl_sse_event {
    pl_str raw;  /* the event's bytes with its terminating blank line, as received */
    pl_str data; /* data lines joined by LF (no copy when there is one line); {NULL,0} without any:
                    comments, a blank line on its own */
    pl_str name; /* the event field, {NULL,0} when absent */
} pl_sse_event;

/* Called for each complete event; raw and data are valid until it returns. Non-zero stops the feed
 * with that code. */
typedef int (*pl_sse_fn)(void *ctx, const pl_sse_event *ev);

typedef struct pl_sse {
    pl_buf pending;   /* an incomplete event */
    pl_buf joined;    /* data of an event with several data lines */
    size_t max_event; /* bytes; PL_ELIMIT above */
    bool in_line;     /* the current line has bytes */
    bool after_cr;    /* an LF now belongs to the CR before it */
    bool started;     /* an event was seen: a byte order mark is one no more */
} pl_sse;

void pl_sse_init(pl_sse *s, size_t max_event);

/* Every byte fed is in the raw of exactly one event, in order, or in pl_sse_rest. An event is
 * reported with the byte that completes it; when that is a CR, an LF in a later read is reported on
 * its own, without data. After PL_ELIMIT or a stop by fn all that was not reported is in
 * pl_sse_rest, to be passed on as it is, and nothing more may be fed. After PL_ENOMEM bytes are
 * lost: end the stream. */
int pl_sse_feed(pl_sse *s, pl_str bytes, pl_sse_fn fn, void *ctx);

/* What is pending (an unfinished event), to be forwarded when the stream ends without a boundary.
 */
pl_str pl_sse_rest(const pl_sse *s);
void pl_sse_free(pl_sse *s);

/* Usage as OpenAI chat, completions and responses, Anthropic messages and SGLang's meta_info spell
 * it, at the top level or in `response` or `message`. Missing and null fields stay as they were;
 * returns true when any was found. `json` is one event's data or a whole answer; of an answer that
 * is an array (SGLang's batches) the elements are added up. prompt_tokens is always the whole
 * prompt, so for Anthropic it is input_tokens + cache_read_input_tokens +
 * cache_creation_input_tokens. */
typedef struct pl_usage {
    double prompt_tokens, cached_tokens, output_tokens; /* -1: not said */
} pl_usage;

#define PL_USAGE_INIT                                                                              \
    {                                                                                              \
        -1, -1, -1                                                                                 \
    }

bool pl_usage_read(pl_str json, pl_usage *u);

/* True for an OpenAI chunk that carries only usage: `choices` is an empty array and `usage` an
 * object. */
bool pl_usage_only_chunk(pl_str json);

#endif
