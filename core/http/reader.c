/* The reader: takes messages off a byte stream. Owned by a connection (server's or upstream's) and
 * used on that connection's loop only. It owns the head's bytes; body slices are pointers into what
 * was fed. Content-Length bodies are counted here; chunked ones go through llhttp, with the line
 * checks of the head repeated for the trailer, which is then dropped. */
#include "http/head.h"

#include <stdlib.h>

#define MAX_LEADING_CRLF 2
/* "OPTIONS" and the version around the target, spaces and CRLF included */
#define START_LINE_REST 19
/* a head buffer up to this size is kept between messages */
#define KEEP_HEAD_BYTES 2048
#define MIN_HEAD_BYTES  1024

bool pl_reader_fail(pl_reader *r, int status, const char *error)
{
    r->state = PL_READER_ERROR;
    r->status = r->request || status == 500 ? status : 502;
    r->error = error && *error ? error : "the message is malformed";
    return false;
}

/* --- llhttp callbacks --- */

static int on_field(llhttp_t *p, const char *at, size_t n)
{
    pl_reader *r = p->data;
    if (r->resumed) /* a trailer */
        return 0;
    pl_head *h = &r->head;
    if ((unsigned)h->headers_n + 1 >= r->lines)
        return HPE_USER;
    h->headers[h->headers_n++] = (pl_header){{at, n}, {at + n, 0}};
    return 0;
}

static int on_value(llhttp_t *p, const char *at, size_t n)
{
    pl_reader *r = p->data;
    if (r->resumed)
        return 0;
    pl_str *v = &r->head.headers[r->head.headers_n - 1].value;
    if (v->n == 0)
        v->p = at;
    v->n = (size_t)(at + n - v->p);
    return 0;
}

static int on_headers_complete(llhttp_t *p)
{
    p->upgrade = 0; /* CONNECT is refused and Upgrade ignored: always an ordinary message */
    return HPE_PAUSED;
}

/* Counts framing up to `at`. A body may be cut into small chunks, yet not into nothing but chunk
 * lines: a request's is judged as a whole; an answer may come token by token for hours, so there it
 * is the framing between two bytes of the body. */
static bool count_overhead(pl_reader *r, const char *at)
{
    r->overhead += (uint64_t)(at - r->mark);
    r->mark = at;
    uint64_t paid = r->request ? r->body_seen : 0;
    if (r->overhead > paid && r->overhead - paid > r->limits->chunk_overhead_bytes)
        return pl_reader_fail(r, 400, "too much chunk framing for the body");
    return true;
}

static int on_chunk_header(llhttp_t *p)
{
    pl_reader *r = p->data;
    if (p->content_length == 0) {
        r->in_trailer = true;
        return HPE_PAUSED;
    }
    if (r->request && (p->content_length > r->limits->body_bytes ||
                       r->body_seen > r->limits->body_bytes - p->content_length)) {
        pl_reader_fail(r, 413, "the body is too large");
        return HPE_USER;
    }
    return 0;
}

static int on_body(llhttp_t *p, const char *at, size_t n)
{
    pl_reader *r = p->data;
    if (!count_overhead(r, at))
        return HPE_USER;
    r->mark = at + n;
    r->body_seen += n;
    if (!r->request)
        r->overhead = 0;
    r->on_body(r->ctx, at, n);
    return 0;
}

static int on_message_complete(llhttp_t *p)
{
    pl_reader *r = p->data;
    r->state = PL_READER_DONE;
    return HPE_PAUSED;
}

static const llhttp_settings_t settings = {
    .on_header_field = on_field,
    .on_header_value = on_value,
    .on_headers_complete = on_headers_complete,
    .on_chunk_header = on_chunk_header,
    .on_body = on_body,
    .on_message_complete = on_message_complete,
};

/* --- the head --- */

static bool reserve_head(pl_reader *r, size_t need, bool exact)
{
    if (need <= r->head_cap)
        return true;
    size_t cap = need;
    if (!exact) {
        cap = r->head_cap * 2 > MIN_HEAD_BYTES ? r->head_cap * 2 : MIN_HEAD_BYTES;
        cap = cap > need ? cap : need;
    }
    char *p = realloc(r->head_buf, cap);
    if (!p)
        return pl_reader_fail(r, 500, "out of memory");
    r->head_buf = p;
    r->head_cap = cap;
    return true;
}

/* `n` bytes of head are there or needed: within the limits? */
static bool size_ok(pl_reader *r, size_t n)
{
    if (r->request && r->lines == 0 && n > r->limits->target_bytes + START_LINE_REST)
        return pl_reader_fail(r, 414, "the request target is too long");
    if (n > r->limits->head_bytes)
        return pl_reader_fail(r, 431, "the head is too large");
    return true;
}

/* Checks one complete line [line, lf]; the empty one is fine, too. */
static bool line_ok(pl_reader *r, const char *line, const char *lf)
{
    size_t n = (size_t)(lf - line);
    if (n == 0 || lf[-1] != '\r')
        return pl_reader_fail(r, 400, "a line ends without CR");
    if (memchr(line, '\r', n - 1))
        return pl_reader_fail(r, 400, "CR without LF");
    if (r->lines > 0 && (line[0] == ' ' || line[0] == '\t'))
        return pl_reader_fail(r, 400, "a folded header line");
    if (r->lines > 0 && line[0] == ':')
        return pl_reader_fail(r, 400, "a header without a name");
    return true;
}

/* Looks at the lines of base[0..n) that have not been looked at. Returns the head's size when it is
 * complete, else 0. Errors come out in the order of the bytes, however they were cut up. */
static size_t scan_lines(pl_reader *r, const char *base, size_t n)
{
    for (;;) {
        const char *lf = memchr(base + r->checked, '\n', n - r->checked);
        if (!lf) {
            r->checked = n;
            size_ok(r, n);
            return 0;
        }
        const char *line = base + r->line_at;
        size_t next = (size_t)(lf - base) + 1;
        if (!size_ok(r, next) || !line_ok(r, line, lf))
            return 0;
        if (lf - line == 1)
            return next;
        if (r->lines > r->limits->headers) {
            pl_reader_fail(r, 431, "too many headers");
            return 0;
        }
        r->lines++;
        r->line_at = r->checked = next;
    }
}

/* Skips what may stand before a head; returns how many bytes. */
static size_t skip_leading(pl_reader *r, const char *p, size_t n)
{
    size_t i = 0;
    for (; i < n && ((r->lead & 1) || p[i] == '\r'); i++) {
        if ((r->lead & 1) ? p[i] != '\n' : !r->request || r->lead >= 2 * MAX_LEADING_CRLF) {
            pl_reader_fail(r, 400, "no message where one should start");
            return i;
        }
        r->lead++;
    }
    /* a TLS hello or other noise is told at once, not when its first LF comes */
    if (i < n && (r->request ? p[i] < 'A' || p[i] > 'Z' : p[i] != 'H'))
        pl_reader_fail(r, 400, "no message where one should start");
    return i;
}

static void after_head(pl_reader *r)
{
    const pl_head *h = &r->head;
    r->state = PL_READER_BODY;
    if (!h->request && (r->no_body || h->status < 200 || h->status == 204 || h->status == 304))
        r->state = PL_READER_DONE;
    else if (h->chunked)
        return;
    else if (h->content_length == 0)
        r->state = PL_READER_DONE;
    else if (h->content_length == UINT64_MAX) {
        if (h->request) {
            r->state = PL_READER_DONE;
        } else {
            r->head.until_close = true;
            r->head.keep_alive = false;
        }
    }
}

static size_t feed_head(pl_reader *r, const char *p, size_t n)
{
    size_t used = 0;
    size_t before = r->head_n;
    size_t end;
    if (before == 0) {
        used = skip_leading(r, p, n);
        if (used == n || r->state == PL_READER_ERROR)
            return used;
        p += used;
        n -= used;
        end = scan_lines(r, p, n);
        /* room for the header table is taken along, see pl_head_parse */
        size_t need = end ? end + 15 + (r->arena ? 0 : r->lines * sizeof(pl_header)) : n;
        if (r->state == PL_READER_ERROR || !reserve_head(r, need, end != 0))
            return used;
        memcpy(r->head_buf, p, end ? end : n);
    } else {
        /* one byte more than allowed is enough to see that it is too much */
        size_t room = r->limits->head_bytes + 1 - before;
        n = n < room ? n : room;
        if (!reserve_head(r, before + n, false))
            return used;
        memcpy(r->head_buf + before, p, n);
        end = scan_lines(r, r->head_buf, before + n);
        if (r->state == PL_READER_ERROR)
            return used;
    }
    if (!end) {
        r->head_n = before + n;
        return used + n;
    }
    r->head_n = end;
    if (pl_head_parse(r))
        after_head(r);
    return used + (end - before);
}

/* --- the body --- */

/* Line checks for a trailer. Returns how many of the bytes belong to it. */
static size_t check_trailer(pl_reader *r, const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        char c = p[i];
        bool after_cr = r->trailer_prev == '\r';
        if (++r->trailer > r->limits->trailer_bytes) {
            pl_reader_fail(r, 431, "the trailer is too large");
            return i;
        }
        if (after_cr != (c == '\n')) {
            pl_reader_fail(r, 400, "a line of the trailer ends without CRLF");
            return i;
        }
        if (r->trailer_col == 0 && (c == ' ' || c == '\t' || c == ':')) {
            pl_reader_fail(r, 400, "a folded or nameless line in the trailer");
            return i;
        }
        r->trailer_prev = c;
        r->trailer_col++;
        if (c == '\n') {
            if (r->trailer_col == 2)
                return i + 1;
            r->trailer_col = 0;
        }
    }
    return n;
}

static size_t feed_chunked(pl_reader *r, const char *p, size_t n)
{
    size_t used = 0;
    if (!r->resumed) {
        r->resumed = true;
        llhttp_resume(&r->parser);
    }
    while (used < n && r->state == PL_READER_BODY) {
        bool trailer = r->in_trailer;
        size_t want = n - used;
        if (trailer)
            want = check_trailer(r, p + used, want);
        /* with a bad trailer line llhttp still sees what is before it: the first error counts */
        bool bad_line = r->state == PL_READER_ERROR;
        r->mark = p + used;
        llhttp_errno_t err = llhttp_execute(&r->parser, p + used, want);
        if (r->state == PL_READER_ERROR && (!bad_line || err == HPE_OK))
            break;
        if (err != HPE_OK && err != HPE_PAUSED) {
            pl_reader_fail(r, 400, llhttp_get_error_reason(&r->parser));
            break;
        }
        const char *at = err == HPE_OK ? p + used + want : llhttp_get_error_pos(&r->parser);
        if (!trailer && !count_overhead(r, at))
            break;
        used = (size_t)(at - p);
        if (err == HPE_PAUSED)
            llhttp_resume(&r->parser);
    }
    r->mark = NULL;
    return used;
}

static size_t feed_body(pl_reader *r, const char *p, size_t n)
{
    if (r->head.chunked)
        return feed_chunked(r, p, n);
    if (!r->head.until_close) {
        uint64_t left = r->head.content_length - r->body_seen;
        n = n < left ? n : (size_t)left;
    }
    r->body_seen += n;
    if (r->body_seen == r->head.content_length)
        r->state = PL_READER_DONE;
    r->on_body(r->ctx, p, n);
    return n;
}

/* --- the interface --- */

static void start_message(pl_reader *r)
{
    llhttp_init(&r->parser, r->request ? HTTP_REQUEST : HTTP_RESPONSE, &settings);
    r->parser.data = r;
    r->state = PL_READER_HEAD;
    r->no_body = r->resumed = r->in_trailer = false;
    r->trailer_prev = 0;
    r->lead = 0;
    r->head_n = r->line_at = r->checked = 0;
    r->lines = 0;
    memset(&r->head, 0, sizeof r->head);
    r->head.request = r->request;
    r->overhead = r->body_seen = 0;
    r->trailer = r->trailer_col = 0;
    r->status = 0;
    r->error = NULL;
}

void pl_reader_init(pl_reader *r, bool request, const pl_limits *limits, pl_arena *arena,
                    void (*on_body_fn)(void *ctx, const char *p, size_t n), void *ctx)
{
    memset(r, 0, sizeof *r);
    r->request = request;
    r->limits = limits;
    r->arena = arena;
    r->on_body = on_body_fn;
    r->ctx = ctx;
    start_message(r);
}

size_t pl_reader_feed(pl_reader *r, const char *p, size_t n)
{
    if (n == 0)
        return 0;
    if (r->state == PL_READER_HEAD)
        return feed_head(r, p, n);
    if (r->state == PL_READER_BODY)
        return feed_body(r, p, n);
    return 0;
}

pl_reader_state pl_reader_eof(pl_reader *r)
{
    if (r->state == PL_READER_BODY && r->head.until_close)
        r->state = PL_READER_DONE;
    else if (r->state == PL_READER_BODY || pl_reader_begun(r))
        pl_reader_fail(r, 400, "the connection was closed inside a message");
    return r->state;
}

void pl_reader_next(pl_reader *r)
{
    if (r->head_cap > KEEP_HEAD_BYTES) {
        free(r->head_buf);
        r->head_buf = NULL;
        r->head_cap = 0;
    }
    start_message(r);
}

void pl_reader_free(pl_reader *r)
{
    free(r->head_buf);
    r->head_buf = NULL;
    r->head_n = r->head_cap = 0;
}

uint64_t pl_reader_body_left(const pl_reader *r)
{
    if (r->state != PL_READER_BODY || r->head.chunked || r->head.until_close)
        return 0;
    return r->head.content_length - r->body_seen;
}
