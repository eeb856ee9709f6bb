/* Any stream, split by its first byte: the same events as unsplit, and every byte is accounted for. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "http/sse.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct seen {
    size_t events, raw, data;
} seen;

static int on_event(void *ctx, const pl_sse_event *ev)
{
    seen *s = ctx;
    s->events++;
    s->raw += ev->raw.n;
    s->data += ev->data.n;
    pl_usage u = {-1, -1, -1};
    pl_usage_read(ev->data, &u);
    pl_usage_only_chunk(ev->data);
    return 0;
}

static seen read_in_steps(pl_str all, size_t step)
{
    seen got = {0, 0, 0};
    pl_sse s;
    pl_sse_init(&s, 1 << 20);
    for (size_t at = 0; at < all.n; at += step)
        if (pl_sse_feed(&s, (pl_str){all.p + at, all.n - at < step ? all.n - at : step}, on_event,
                        &got) != 0)
            abort();
    if (got.raw + pl_sse_rest(&s).n != all.n)
        abort();
    pl_sse_free(&s);
    return got;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    pl_str all = {(const char *)data + 1, size - 1};
    seen whole = read_in_steps(all, all.n), split = read_in_steps(all, data[0] % 17 + 1u);
    if (whole.events != split.events || whole.data != split.data)
        abort();
    return 0;
}
