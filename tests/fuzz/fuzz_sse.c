/* Any bytes as an engine's stream: read at once and in small pieces it gives the same events, every
 * byte comes out once and in order, and what pl_sse_tail wants to add leads to an event boundary.
 * Usage is read from every event. The first byte chooses the pieces. */
#include <stdlib.h>

#include "base/err.h"
#include "http/sse.h"

#define MUST(x)                                                                                    \
    do {                                                                                           \
        if (!(x))                                                                                  \
            abort();                                                                               \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct seen {
    pl_buf raw, events;
} seen;

static int on_event(void *ctx, const pl_sse_event *ev)
{
    seen *s = ctx;
    pl_usage u = PL_USAGE_INIT;
    MUST(ev->raw.n > 0);
    MUST(pl_buf_add(&s->raw, ev->raw.p, ev->raw.n) == 0);
    if (ev->data.p || ev->name.p) {
        MUST(pl_buf_addf(&s->events, "<%zu:", ev->name.n) == 0);
        MUST(pl_buf_add(&s->events, ev->name.p, ev->name.n) == 0);
        MUST(pl_buf_addf(&s->events, "|%zu:", ev->data.n) == 0);
        MUST(pl_buf_add(&s->events, ev->data.p, ev->data.n) == 0);
    }
    if (ev->data.p) {
        bool any = pl_usage_read(ev->data, &u);
        MUST(any == (u.prompt_tokens >= 0 || u.cached_tokens >= 0 || u.output_tokens >= 0));
        pl_usage_only_chunk(ev->data);
    }
    return 0;
}

static int run(pl_str bytes, size_t step, size_t limit, seen *out, pl_sse_tail *tail)
{
    pl_sse s;
    int rc = 0;
    *out = (seen){0};
    *tail = (pl_sse_tail){0};
    pl_sse_init(&s, limit);
    size_t at = 0;
    while (at < bytes.n && rc == 0) {
        pl_str part = {bytes.p + at, bytes.n - at < step ? bytes.n - at : step};
        pl_sse_tail_feed(tail, part);
        rc = pl_sse_feed(&s, part, on_event, out);
        at += part.n;
    }
    pl_str rest = pl_sse_rest(&s);
    MUST(out->raw.n + rest.n == at);
    MUST(out->raw.n == 0 || memcmp(out->raw.p, bytes.p, out->raw.n) == 0);
    MUST(rest.n == 0 || memcmp(rest.p, bytes.p + out->raw.n, rest.n) == 0);
    if (rc == 0) {
        pl_str closing = pl_sse_tail_close(tail);
        int last = pl_sse_feed(&s, closing, on_event, out);
        MUST(last == 0 || (last == PL_ELIMIT && rest.n + closing.n > limit));
        MUST(last || pl_sse_rest(&s).n == 0);
    }
    pl_sse_free(&s);
    return rc;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1)
        return 0;
    pl_str bytes = {(const char *)data + 1, size - 1};
    seen whole, pieces;
    pl_sse_tail a, b;
    MUST(run(bytes, size, size + 4, &whole, &a) == 0);
    MUST(run(bytes, 1 + data[0] % 32, size + 4, &pieces, &b) == 0);
    MUST(pl_str_eq(pl_buf_str(&whole.events), pl_buf_str(&pieces.events)));
    MUST(pl_str_eq(pl_sse_tail_close(&a), pl_sse_tail_close(&b)));
    pl_buf_free(&pieces.raw);
    pl_buf_free(&pieces.events);
    int rc = run(bytes, 1 + data[0] % 32, 40, &pieces, &b);
    MUST(rc == 0 || rc == PL_ELIMIT);
    pl_buf_free(&pieces.raw);
    pl_buf_free(&pieces.events);
    pl_buf_free(&whole.raw);
    pl_buf_free(&whole.events);
    return 0;
}
