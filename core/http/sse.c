/* Server-sent events: see sse.h. Pure but for the buffer of an unfinished event. */
#include "http/sse.h"

#include <string.h>

#include "base/err.h"
#include "http/scan.h"

/* --- the tail
 * ------------------------------------------------------------------------------------------------------------
 */

void pl_sse_tail_feed(pl_sse_tail *t, pl_str bytes)
{
    if (bytes.n == 0)
        return;
    t->any = true;
    size_t keep = sizeof t->last;
    if (bytes.n >= keep) {
        memcpy(t->last, bytes.p + bytes.n - keep, keep);
        t->n = (int)keep;
        return;
    }
    size_t old = (size_t)t->n < keep - bytes.n ? (size_t)t->n : keep - bytes.n;
    memmove(t->last, t->last + t->n - old, old);
    memcpy(t->last + old, bytes.p, bytes.n);
    t->n = (int)(old + bytes.n);
}

pl_str pl_sse_tail_close(const pl_sse_tail *t)
{
    /* line ends among the last bytes, counted from the back: CRLF is one */
    int ends = 0, i = t->n;
    while (i > 0 && ends < 2) {
        if (t->last[i - 1] == '\n')
            i -= i > 1 && t->last[i - 2] == '\r' ? 2 : 1;
        else if (t->last[i - 1] == '\r')
            i--;
        else
            break;
        ends++;
    }
    if (!t->any || ends >= 2 || (ends == 1 && i == 0))
        return PL_STR("");
    return ends == 1 ? PL_STR("\n") : PL_STR("\n\n");
}

/* --- events
 * --------------------------------------------------------------------------------------------------------------
 */

void pl_sse_init(pl_sse *s, size_t max_event)
{
    memset(s, 0, sizeof *s);
    s->max_event = max_event;
}

void pl_sse_free(pl_sse *s)
{
    pl_buf_free(&s->pending);
}

pl_str pl_sse_rest(const pl_sse *s)
{
    return pl_buf_str(&s->pending);
}

/* Length of the line end at p, 0 when there is none, -1 when the next byte decides (a CR at the
 * end). */
static int line_end(const char *p, const char *end)
{
    if (p == end)
        return 0;
    if (*p == '\n')
        return 1;
    if (*p != '\r')
        return 0;
    return p + 1 == end ? -1 : p[1] == '\n' ? 2 : 1;
}

/* End of the first event in s (behind its blank line), or NULL. *scanned: where to go on when more
 * has come. */
static const char *event_end(pl_str s, size_t *scanned)
{
    const char *end = s.p + s.n, *p = s.p + *scanned;
    while (p < end) {
        const char *lf = memchr(p, '\n', (size_t)(end - p)),
                   *cr = memchr(p, '\r', (size_t)((lf ? lf : end) - p));
        const char *at = cr ? cr : lf;
        if (!at)
            break;
        int first = line_end(at, end);
        int second = first > 0 ? line_end(at + first, end) : -1;
        if (first < 0 || second < 0 || at + first == end) {
            *scanned = (size_t)(at - s.p);
            return NULL;
        }
        if (second > 0)
            return at + first + second;
        if (at == s.p)
            return at + first; /* an empty event: a lone blank line */
        p = at + first;
    }
    *scanned = s.n;
    return NULL;
}

/* The value of a field line, without the one space that may lead it. */
static bool field(pl_str line, pl_str name, pl_str *value)
{
    if (!pl_str_starts(line, name))
        return false;
    pl_str v = {line.p + name.n, line.n - name.n};
    if (v.n && v.p[0] != ':')
        return false;
    if (v.n) {
        v.p++;
        v.n--;
    }
    if (v.n && v.p[0] == ' ') {
        v.p++;
        v.n--;
    }
    *value = v;
    return true;
}

static int deliver(pl_str raw, pl_sse_fn fn, void *ctx)
{
    pl_sse_event ev = {.raw = raw, .data = {NULL, 0}, .name = {NULL, 0}};
    pl_buf joined = {0};
    int rc = 0, lines = 0;
    const char *p = raw.p, *end = raw.p + raw.n;
    while (p < end && rc == 0) {
        const char *eol = p;
        while (eol < end && *eol != '\n' && *eol != '\r')
            eol++;
        pl_str line = {p, (size_t)(eol - p)}, value;
        if (field(line, PL_STR("data"), &value)) {
            if (lines == 1)
                rc = pl_buf_add(&joined, ev.data.p, ev.data.n);
            if (lines >= 1 && rc == 0)
                rc = pl_buf_add(&joined, "\n", 1);
            if (lines >= 1 && rc == 0)
                rc = pl_buf_add(&joined, value.p, value.n);
            if (lines++ == 0)
                ev.data = value;
        } else if (field(line, PL_STR("event"), &value)) {
            ev.name = value;
        }
        p = eol + (eol + 1 < end && eol[0] == '\r' && eol[1] == '\n' ? 2 : 1);
    }
    if (lines > 1)
        ev.data = pl_buf_str(&joined);
    if (rc == 0)
        rc = fn(ctx, &ev);
    pl_buf_free(&joined);
    return rc;
}

int pl_sse_feed(pl_sse *s, pl_str bytes, pl_sse_fn fn, void *ctx)
{
    int rc = 0;
    pl_str in = bytes;
    bool buffered = s->pending.n > 0;
    if (buffered) {
        rc = pl_buf_add(&s->pending, bytes.p, bytes.n);
        in = pl_buf_str(&s->pending);
    }
    size_t done = 0;
    while (rc == 0) {
        pl_str left = {in.p + done, in.n - done};
        const char *end = event_end(left, &s->scanned);
        if (!end)
            break;
        size_t n = (size_t)(end - left.p);
        s->scanned = 0;
        rc = deliver((pl_str){left.p, n}, fn, ctx);
        done += n;
    }
    if (rc == 0 && in.n - done > s->max_event)
        rc = PL_ELIMIT;
    if (buffered)
        pl_buf_shift(&s->pending, done);
    else if (rc == 0 && in.n > done)
        rc = pl_buf_add(&s->pending, in.p + done, in.n - done);
    return rc;
}

/* --- usage
 * ---------------------------------------------------------------------------------------------------------------
 */

static bool take(pl_str object, pl_str name, double *out)
{
    pl_member m = pl_object_find(object, name);
    double v;
    if (pl_member_number(&m, &v) != 0)
        return false;
    *out = v;
    return true;
}

static bool read_usage_object(pl_str usage, pl_usage *u)
{
    bool any = take(usage, PL_STR("prompt_tokens"), &u->prompt_tokens);
    double cached;
    any |= take(usage, PL_STR("completion_tokens"), &u->output_tokens);
    any |= take(usage, PL_STR("output_tokens"), &u->output_tokens);
    any |= take(usage, PL_STR("cached_tokens"), &u->cached_tokens); /* SGLang's meta_info */
    if (take(usage, PL_STR("input_tokens"), &u->prompt_tokens)) {
        any = true;
        /* Anthropic counts what was read from the cache beside the input, not in it */
        if (take(usage, PL_STR("cache_read_input_tokens"), &cached)) {
            u->prompt_tokens += cached;
            u->cached_tokens = cached;
        }
    }
    static const pl_str details[] = {PL_STR_INIT("prompt_tokens_details"),
                                     PL_STR_INIT("input_tokens_details")};
    for (int i = 0; i < 2; i++) {
        pl_member d = pl_object_find(usage, details[i]);
        if (d.type == PL_JSON_OBJECT)
            any |= take(d.raw, PL_STR("cached_tokens"), &u->cached_tokens);
    }
    return any;
}

static pl_str object_of(pl_str json)
{
    json = pl_str_trim(json);
    while (json.n && (json.p[0] == '\n' || json.p[0] == '\r'))
        json = pl_str_trim((pl_str){json.p + 1, json.n - 1});
    return json.n && json.p[0] == '{' ? json : (pl_str){NULL, 0};
}

bool pl_usage_read(pl_str json, pl_usage *u)
{
    static const pl_str wrappers[] = {PL_STR_INIT("response"), PL_STR_INIT("message")};
    pl_str o = object_of(json);
    if (!o.p)
        return false;
    pl_member usage = pl_object_find(o, PL_STR("usage"));
    if (usage.type != PL_JSON_OBJECT)
        usage = pl_object_find(o, PL_STR("meta_info"));
    for (int i = 0; i < 2 && usage.type != PL_JSON_OBJECT; i++) {
        pl_member w = pl_object_find(o, wrappers[i]);
        if (w.type == PL_JSON_OBJECT)
            usage = pl_object_find(w.raw, PL_STR("usage"));
    }
    return usage.type == PL_JSON_OBJECT && read_usage_object(usage.raw, u);
}

bool pl_usage_only_chunk(pl_str json)
{
    pl_str o = object_of(json);
    if (!o.p)
        return false;
    pl_member choices = pl_object_find(o, PL_STR("choices")),
              usage = pl_object_find(o, PL_STR("usage"));
    return choices.type == PL_JSON_ARRAY && choices.elements == 0 && usage.type == PL_JSON_OBJECT;
}
