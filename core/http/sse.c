/* Server-sent events: see sse.h. Called by the proxy on a loop's thread for each read of a stream;
 * a pl_sse belongs to one stream and owns its two buffers. An event that lies whole in one read is
 * reported from there without a copy. */
#include "http/sse.h"

#include "base/err.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* A stream may be idle for long after one large event. */
#define KEEP_BYTES ((size_t)16 * 1024)

/* --- where a stream stands --- */

void pl_sse_tail_feed(pl_sse_tail *t, pl_str bytes)
{
    if (!bytes.n)
        return;
    t->any = true;
    size_t take = bytes.n < sizeof t->last ? bytes.n : sizeof t->last;
    size_t keep = sizeof t->last - take;
    if (keep > (size_t)t->n)
        keep = (size_t)t->n;
    memmove(t->last, t->last + t->n - keep, keep);
    memcpy(t->last + keep, bytes.p + bytes.n - take, take);
    t->n = (int)(keep + take);
}

pl_str pl_sse_tail_close(const pl_sse_tail *t)
{
    int n = t->n;
    if (n == 0)
        return PL_STR("");
    bool cr = t->last[n - 1] == '\r';
    if (!cr && t->last[n - 1] != '\n')
        return PL_STR("\n\n");
    n--;
    if (!cr && n && t->last[n - 1] == '\r')
        n--;
    /* n is 0 only when the stream began with this line end */
    if (n == 0 || t->last[n - 1] == '\n' || t->last[n - 1] == '\r')
        return PL_STR("");
    return cr ? PL_STR("\n\n") : PL_STR("\n");
}

/* --- splitting --- */

void pl_sse_init(pl_sse *s, size_t max_event)
{
    *s = (pl_sse){.max_event = max_event};
}

void pl_sse_free(pl_sse *s)
{
    pl_buf_free(&s->pending);
    pl_buf_free(&s->joined);
}

pl_str pl_sse_rest(const pl_sse *s)
{
    return pl_buf_str(&s->pending);
}

/* Offset of the first CR or LF, n when there is none. */
static size_t line_end(const char *p, size_t n)
{
    size_t i = 0;
#ifdef __SSE2__
    for (; n - i >= 16; i += 16) {
        __m128i v = _mm_loadu_si128((const __m128i *)(const void *)(p + i));
        __m128i hit = _mm_or_si128(_mm_cmpeq_epi8(v, _mm_set1_epi8('\n')),
                                   _mm_cmpeq_epi8(v, _mm_set1_epi8('\r')));
        int mask = _mm_movemask_epi8(hit);
        if (mask)
            return i + (size_t)__builtin_ctz((unsigned)mask);
    }
#endif
    while (i < n && p[i] != '\n' && p[i] != '\r')
        i++;
    return i;
}

/* How many of these bytes it takes to complete the event, its blank line included; 0 when they do
 * not. */
static size_t event_end(pl_sse *s, pl_str b)
{
    size_t i = 0;
    while (i < b.n) {
        if (s->after_cr) {
            s->after_cr = false;
            if (b.p[i] == '\n') {
                i++;
                if (s->pending.n == 0) /* that CR ended an event, which was reported */
                    return i;
                continue;
            }
        }
        size_t len = line_end(b.p + i, b.n - i);
        s->in_line = s->in_line || len;
        i += len;
        if (i == b.n)
            return 0;
        if (b.p[i++] == '\r') {
            if (i == b.n)
                s->after_cr = true;
            else if (b.p[i] == '\n')
                i++;
        }
        if (!s->in_line)
            return i;
        s->in_line = false;
    }
    return 0;
}

/* The value of a field's line when it is field `name`: after the colon and one blank. */
static bool field(pl_str line, pl_str name, pl_str *value)
{
    if (!pl_str_starts(line, name))
        return false;
    size_t at = name.n;
    if (at < line.n && line.p[at] != ':')
        return false;
    if (at < line.n)
        at++;
    if (at < line.n && line.p[at] == ' ')
        at++;
    *value = (pl_str){line.p + at, line.n - at};
    return true;
}

/* Fills name and data from raw. */
static int parse(pl_sse *s, pl_sse_event *ev)
{
    pl_str rest = ev->raw, value;
    if (!s->started && pl_str_starts(rest, PL_STR("\xef\xbb\xbf"))) {
        rest.p += 3;
        rest.n -= 3;
    }
    s->started = true;
    s->joined.n = 0;
    int lines = 0;
    while (rest.n) {
        size_t len = line_end(rest.p, rest.n);
        pl_str line = {rest.p, len};
        len += len < rest.n;
        rest.p += len;
        rest.n -= len;
        if (field(line, PL_STR("event"), &value)) {
            ev->name = value;
        } else if (field(line, PL_STR("data"), &value)) {
            int rc = 0;
            if (lines == 1)
                rc = pl_buf_add(&s->joined, ev->data.p, ev->data.n);
            if (lines && rc == 0)
                rc = pl_buf_add(&s->joined, "\n", 1);
            if (lines && rc == 0)
                rc = pl_buf_add(&s->joined, value.p, value.n);
            if (rc)
                return rc;
            ev->data = lines ? pl_buf_str(&s->joined) : value;
            lines++;
        }
    }
    return 0;
}

static void shrink(pl_buf *b)
{
    b->n = 0;
    if (b->cap > KEEP_BYTES)
        pl_buf_free(b);
}

int pl_sse_feed(pl_sse *s, pl_str bytes, pl_sse_fn fn, void *ctx)
{
    int rc = 0;
    while (bytes.n && rc == 0) {
        size_t end = event_end(s, bytes);
        pl_str part = {bytes.p, end ? end : bytes.n};
        if (part.n > s->max_event || s->pending.n > s->max_event - part.n) {
            rc = PL_ELIMIT;
            break;
        }
        if (!end || s->pending.n) {
            int added = pl_buf_add(&s->pending, part.p, part.n);
            if (added)
                return added;
        }
        bytes.p += part.n;
        bytes.n -= part.n;
        if (!end)
            return 0;
        pl_sse_event ev = {.raw = s->pending.n ? pl_buf_str(&s->pending) : part};
        rc = parse(s, &ev);
        if (rc)
            return rc;
        rc = fn(ctx, &ev);
        shrink(&s->pending);
        shrink(&s->joined);
    }
    if (rc && bytes.n && pl_buf_add(&s->pending, bytes.p, bytes.n) != 0)
        return PL_ENOMEM;
    return rc;
}
