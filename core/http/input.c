/* What comes in on a client connection: reading, request bodies, and what a head or a complete
 * request leads to. Called by libuv on the server's loop, and by conn.c with bytes that had to
 * wait. Reads go into one buffer that all connections of a server share (libuv reads
 * synchronously), but for Content-Length bodies, which are read straight into the body's own
 * memory. */
#include "http/conn.h"

#include <stdlib.h>

#include "base/clock.h"

/* a body is trusted this far at once; larger ones grow as they come */
#define BODY_FIRST_BYTES (128 * 1024)

/* --- the request's body --- */

static bool body_memory_take(pl_server *s, size_t n)
{
    if (!s->o.body_memory)
        return true;
    uint64_t before = atomic_fetch_add_explicit(s->o.body_memory, n, memory_order_relaxed);
    if (before + n <= s->o.max_body_memory)
        return true;
    atomic_fetch_sub_explicit(s->o.body_memory, n, memory_order_relaxed);
    return false;
}

static void body_memory_give(pl_server *s, size_t n)
{
    if (s->o.body_memory && n)
        atomic_fetch_sub_explicit(s->o.body_memory, n, memory_order_relaxed);
}

static bool body_resize(pl_conn *c, size_t cap)
{
    size_t more = cap - c->body_cap;
    if (!body_memory_take(c->s, more))
        return false;
    char *p = realloc(c->body, cap);
    if (!p) {
        body_memory_give(c->s, more);
        return false;
    }
    c->body = p;
    c->body_cap = cap;
    return true;
}

/* One byte more than the length: a read that gets all of the body is then a short one, after which
 * libuv does not ask the kernel a second time. */
static size_t body_full_cap(const pl_conn *c)
{
    return (size_t)c->reader.head.content_length + 1;
}

/* Room for n more bytes. */
static bool body_reserve(pl_conn *c, size_t n)
{
    size_t need = c->body_n + n;
    if (need <= c->body_cap)
        return true;
    size_t cap = c->body_cap ? c->body_cap * 2 : c->reader.head.chunked ? 4096 : BODY_FIRST_BYTES;
    cap = cap > need ? cap : need;
    if (!c->reader.head.chunked && cap > body_full_cap(c))
        cap = body_full_cap(c);
    return body_resize(c, cap);
}

void pl_conn_body_free(pl_conn *c)
{
    body_memory_give(c->s, c->body_cap);
    free(c->body);
    c->body = NULL;
    c->body_n = c->body_cap = 0;
    if (c->x)
        c->x->body = (pl_str){NULL, 0};
}

/* The reader's slices. */
void pl_conn_take_body(void *ctx, const char *p, size_t n)
{
    pl_conn *c = ctx;
    if (c->phase != PL_CONN_BODY || c->body_failed || c->unwanted)
        return;
    if (p != c->body + c->body_n) { /* else read in place */
        if (!body_reserve(c, n)) {
            c->body_failed = true;
            return;
        }
        memcpy(c->body + c->body_n, p, n);
    }
    c->body_n += n;
}

/* --- input --- */

static pl_exchange *exchange_new(pl_conn *c)
{
    pl_exchange *x = calloc(1, sizeof *x);
    if (!x)
        return NULL;
    x->head = c->reader.head;
    x->conn = c;
    x->head_at_ns = pl_now_ns();
    memcpy(&x->peer, &c->peer, sizeof c->peer);
    return x;
}

/* The head is there. `more`: bytes of the body are, too. */
static void head_complete(pl_conn *c, bool more)
{
    pl_server *s = c->s;
    pl_stat_add(&s->stats->requests, 1);
    c->served = true;
    c->body_at_ms = s->wheel->now_ms;
    c->phase = PL_CONN_BODY;
    c->x = exchange_new(c);
    if (!c->x) {
        pl_conn_close(c, false);
        return;
    }
    if (s->h.on_head) {
        c->announced = true;
        bool wanted = s->h.on_head(s->ctx, c->x);
        if (!c->x || c->phase != PL_CONN_BODY)
            return; /* answered or cut */
        c->unwanted = !wanted;
    }
    if (c->reader.state != PL_READER_BODY || c->unwanted)
        return;
    if (!c->reader.head.chunked && !body_reserve(c, 1)) {
        pl_conn_error(c, 503, "too much memory is taken by request bodies");
        return;
    }
    if (c->reader.head.expect_continue && !more && !c->started) {
        static char text[] = "HTTP/1.1 100 Continue\r\n\r\n";
        uv_buf_t bufs[2] = {uv_buf_init(NULL, 0), uv_buf_init(text, sizeof text - 1)};
        pl_conn_send(c, bufs, 2);
    }
    c->continued = true;
}

static void request_complete(pl_conn *c)
{
    if (c->reader.trailer > 2)
        pl_stat_add(&c->s->stats->trailers_dropped, 1);
    if (c->phase == PL_CONN_DISCARD) {
        pl_conn_next_request(c);
        return;
    }
    if (c->phase != PL_CONN_BODY)
        return;
    c->phase = PL_CONN_WAIT;
    if (c->unwanted)
        return;
    c->x->body = (pl_str){c->body, c->body_n};
    c->announced = true;
    c->s->h.on_request(c->s->ctx, c->x);
}

/* What the bytes just fed have led to. */
static void step(pl_conn *c, bool more)
{
    pl_reader *r = &c->reader;
    if (r->state == PL_READER_ERROR) {
        pl_stat_add(&c->s->stats->bad_requests, 1);
        pl_conn_error(c, r->status, r->error);
        return;
    }
    if (r->state == PL_READER_HEAD)
        return;
    if (c->phase == PL_CONN_HEAD) {
        pl_conn_quiet(c);
        head_complete(c, more);
    }
    if (c->phase == PL_CONN_BODY && c->body_failed) {
        pl_conn_error(c, 503, "too much memory is taken by request bodies");
        return;
    }
    if (r->state == PL_READER_DONE && c->phase != PL_CONN_HEAD && c->phase < PL_CONN_ENDING)
        request_complete(c);
}

bool pl_conn_blocked(const pl_conn *c)
{
    return c->phase == PL_CONN_WAIT ||
           (c->phase == PL_CONN_HEAD && pl_conn_backlog(c) > c->s->o.high_water_bytes);
}

static void keep_input(pl_conn *c, const char *p, size_t n)
{
    if (pl_buf_add(&c->in, p, n) != 0)
        pl_conn_close(c, false);
}

void pl_conn_input(pl_conn *c, const char *p, size_t n)
{
    c->busy = true;
    while (n && c->phase < PL_CONN_ENDING && !pl_conn_blocked(c)) {
        size_t used = pl_reader_feed(&c->reader, p, n);
        p += used;
        n -= used;
        step(c, n > 0);
    }
    c->busy = false;
    if (n && c->phase < PL_CONN_ENDING)
        keep_input(c, p, n);
    if (c->in.n && c->phase < PL_CONN_ENDING && !pl_conn_blocked(c))
        pl_conn_later(c);
    pl_conn_settle(c);
}

static void alloc_read(uv_handle_t *handle, size_t hint, uv_buf_t *buf)
{
    pl_conn *c = (pl_conn *)handle;
    size_t n = PL_CONN_READ_BYTES;
    if (c->in.n || pl_conn_blocked(c)) {
        size_t room = c->s->o.limits.head_bytes - c->in.n;
        n = room < n ? room : n;
    } else if (c->phase == PL_CONN_BODY && !c->reader.head.chunked && c->body) {
        size_t full = body_full_cap(c);
        if (c->body_cap < full && c->body_cap - c->body_n < PL_CONN_READ_BYTES / 2) {
            size_t cap = c->body_cap * 2 < full ? c->body_cap * 2 : full;
            if (!body_resize(c, cap))
                c->body_failed = true;
        }
        if (c->body_cap > c->body_n) {
            *buf = uv_buf_init(c->body + c->body_n, (unsigned)(c->body_cap - c->body_n));
            return;
        }
    }
    *buf = uv_buf_init(c->s->read_buf, (unsigned)n);
}

static void on_eof(pl_conn *c)
{
    c->peer_eof = true;
    c->reading = false; /* libuv has stopped */
    if (!c->x && pl_conn_backlog(c) && c->phase < PL_CONN_LINGER)
        pl_conn_end(c); /* it may have shut down only its side */
    else
        pl_conn_close(c, false);
}

static void on_read(uv_stream_t *stream, ssize_t got, const uv_buf_t *buf)
{
    pl_conn *c = (pl_conn *)stream;
    if (got == 0 || c->phase == PL_CONN_CLOSING)
        return;
    if (got < 0) {
        if (got == UV_EOF)
            on_eof(c);
        else
            pl_conn_close(c, false);
        return;
    }
    size_t n = (size_t)got;
    if (c->phase >= PL_CONN_ENDING) {
        c->linger_bytes += n;
        if (c->linger_bytes > PL_CONN_LINGER_BYTES && c->phase == PL_CONN_LINGER)
            pl_conn_close(c, false);
    } else if (c->in.n || pl_conn_blocked(c)) {
        keep_input(c, buf->base, n);
        pl_conn_settle(c);
    } else if (buf->base != c->s->read_buf) {
        /* in place: a byte behind the body must not go with the body's memory */
        uint64_t left = pl_reader_body_left(&c->reader);
        if (n > left) {
            keep_input(c, buf->base + left, n - (size_t)left);
            n = (size_t)left;
        }
        if (c->phase != PL_CONN_CLOSING)
            pl_conn_input(c, buf->base, n);
    } else {
        pl_conn_input(c, buf->base, n);
    }
}

int pl_conn_read_start(pl_conn *c)
{
    return uv_read_start((uv_stream_t *)&c->tcp, alloc_read, on_read);
}
