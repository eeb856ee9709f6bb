/* The calls' half of upstream.h: sending a request, reading its answer, timeouts, the end. Called
 * by the pool's owner and by libuv's callbacks, on the loop's thread. A call is freed when it is
 * over; its connection belongs to the pool (pool.c, upstream_impl.h).
 *
 * A call's phases, and what moves it:
 *
 *   CONNECTING --connection ready--> SENDING --last byte written--> AWAITING --head--> STREAMING
 *        |  (an idle connection: at once)  |                            |                  |
 *        |                                 +--------- head (early) -----+----------------->|
 *        +--failure-----> on_fail <--------+---reset, timeout, garbage--+------------------+
 *                                                                    complete: on_end <----+
 *
 * Two rules keep the caller's memory simple. libuv never holds a pointer into the caller's slices
 * after a function here has returned: what the socket does not take at once goes on as a copied
 * piece, and the rest is written from the slices when that piece is gone. And every callback may
 * cancel the call: after each one the code looks at conn->call, never at the call. */
#include <stdlib.h>

#include "http/upstream_impl.h"

#define READ_BYTES  65536 /* one read */
#define PIECE_BYTES 16384 /* copied when the socket is full */
#define MAX_SLICES  32    /* body slices handed over at once */
#define JOIN_BYTES  2048  /* slices up to this size are moved together */
#define INTERIM_MAX 100   /* 1xx before an answer: 102s while a long prompt is read, no more */

/* libuv asks for a buffer, reads into it and calls back before it does anything else, so one
 * buffer serves all connections of a thread. The slices collected during that callback are there,
 * too. */
static _Thread_local struct {
    char bytes[READ_BYTES];
    pl_str slices[MAX_SLICES];
    int slices_n;
} in;

/* --- the end of a call --- */

static void call_detach(pl_upcall *c)
{
    pl_upcall_list_remove(c);
    pl_wheel_cancel(c->pool->wheel, &c->timer);
    c->over = true;
}

static void call_gone(pl_upcall *c)
{
    pl_pool *p = c->pool;
    free(c);
    p->calls_n--;
    pl_pool_settle(p);
}

void pl_upcall_fail(pl_upcall *c, int err, const char *detail)
{
    call_detach(c);
    if (c->conn)
        pl_upconn_close(c->conn);
    c->pub.detail = detail;
    c->ev->on_fail(&c->pub, err);
    call_gone(c);
}

/* The answer is complete. The connection is given back first, so that a request that on_end sends
 * can use it; the head stays readable, since the reader is not moved on before the next read. */
static void call_end(pl_upcall *c, bool more_bytes)
{
    const pl_head *h = &c->conn->reader.head;
    bool reusable = h->keep_alive && !h->until_close && c->sent_all && !more_bytes;
    call_detach(c);
    pl_upconn_release(c->conn, reusable);
    c->pub.phase = PL_CALL_OVER;
    c->ev->on_end(&c->pub);
    call_gone(c);
}

void pl_call_cancel(pl_call *call)
{
    pl_upcall *c = (pl_upcall *)call;
    if (c->over) /* from inside its own on_end or on_fail */
        return;
    call_detach(c);
    if (c->conn)
        pl_upconn_close(c->conn);
    call_gone(c);
}

/* The peer has closed or reset the connection. */
static void call_lost(pl_upcall *c, int uv_err)
{
    bool eof = uv_err == UV_EOF;
    if (!c->pub.got_any) {
        pl_upcall_fail(c, PL_ERESET, eof ? "closed before the answer" : "reset before the answer");
    } else if (!c->head_seen) {
        pl_upcall_fail(c, PL_EEOF, "closed inside the head of the answer");
    } else if (eof && pl_reader_eof(&c->conn->reader) == PL_READER_DONE) {
        call_end(c, false);
    } else {
        pl_upcall_fail(c, eof ? PL_EEOF : PL_ERESET,
                       eof ? "closed inside the answer" : "reset inside the answer");
    }
}

/* --- timeouts --- */

static void on_timer(pl_timer *t);

void pl_upcall_deadline(pl_upcall *c, uint64_t after_ms)
{
    pl_wheel *w = c->pool->wheel;
    c->deadline_ms = after_ms ? w->now_ms + after_ms : 0;
    if (!c->deadline_ms)
        return; /* an armed timer fires once for nothing */
    if (!pl_timer_armed(&c->timer) || c->timer.due_ms > c->deadline_ms)
        pl_wheel_arm(w, &c->timer, after_ms, on_timer);
}

static void on_timer(pl_timer *t)
{
    pl_upcall *c = (pl_upcall *)((char *)t - offsetof(pl_upcall, timer));
    pl_wheel *w = c->pool->wheel;
    if (!c->deadline_ms)
        return;
    if (c->deadline_ms > w->now_ms) { /* was extended meanwhile */
        pl_wheel_arm(w, t, c->deadline_ms - w->now_ms, on_timer);
        return;
    }
    switch (c->pub.phase) {
    case PL_CALL_CONNECTING:
        if (c->conn) {
            pl_upconn_close(c->conn);
            pl_upcall_connect_next(c, UV_ETIMEDOUT);
        } else {
            pl_upcall_fail(c, PL_ETIMEOUT, "name resolution timed out");
        }
        return;
    case PL_CALL_SENDING:
        pl_upcall_fail(c, PL_ETIMEOUT, "the request was not taken in time");
        return;
    case PL_CALL_AWAITING:
        pl_upcall_fail(c, PL_ETIMEOUT,
                       c->in_head ? "the head of the answer was not complete in time"
                                  : "no answer in time");
        return;
    default:
        pl_upcall_fail(c, PL_ETIMEOUT, "the answer stopped");
    }
}

/* --- sending --- */

/* Bytes that the socket did not take at once, on their way. */
typedef struct piece {
    uv_write_t req;
    pl_upconn *conn; /* alive: its close callback comes after the write's */
    char bytes[];
} piece;

static void call_write(pl_upcall *c);

/* The n first bytes of what is left are taken. */
static void advance(pl_upcall *c, size_t n)
{
    while (n > 0) {
        uv_buf_t *b = &c->bufs[c->at];
        size_t part = n < b->len ? n : b->len;
        b->base += part;
        b->len -= part;
        n -= part;
        if (b->len == 0)
            c->at++;
    }
    while (c->at < c->bufs_n && c->bufs[c->at].len == 0)
        c->at++;
}

/* The peer takes no more. It may have answered before it closed: that is read first; the read's end
 * tells the rest. */
static void send_failed(pl_upcall *c)
{
    c->at = c->bufs_n;
    c->send_failed = true;
    pl_upcall_deadline(c, c->pool->o.write_timeout_ms);
}

static void on_piece(uv_write_t *req, int status)
{
    piece *w = (piece *)req;
    pl_upcall *c = w->conn->call;
    free(w);
    /* a connection is not given to another call before its request was sent: c is the sender */
    if (!c)
        return;
    if (status < 0)
        send_failed(c);
    else if (!c->head_seen)
        call_write(c);
}

static void write_piece(pl_upcall *c)
{
    piece *w = malloc(sizeof *w + PIECE_BYTES);
    if (!w) {
        pl_upcall_fail_soon(c, PL_ENOMEM, "out of memory");
        return;
    }
    size_t n = 0;
    for (int i = c->at; i < c->bufs_n && n < PIECE_BYTES; i++) {
        size_t part = c->bufs[i].len < PIECE_BYTES - n ? c->bufs[i].len : PIECE_BYTES - n;
        memcpy(w->bytes + n, c->bufs[i].base, part);
        n += part;
    }
    w->conn = c->conn;
    uv_buf_t buf = uv_buf_init(w->bytes, (unsigned)n);
    if (uv_write(&w->req, (uv_stream_t *)&c->conn->tcp, &buf, 1, on_piece) != 0) {
        free(w);
        send_failed(c);
        return;
    }
    advance(c, n);
    c->pub.sent_any = true;
    pl_upcall_deadline(c, c->pool->o.write_timeout_ms);
}

/* Writes what is left: SENDING -> AWAITING when it all went. */
static void call_write(pl_upcall *c)
{
    if (c->at < c->bufs_n) {
        int rc = uv_try_write((uv_stream_t *)&c->conn->tcp, c->bufs + c->at,
                              (unsigned)(c->bufs_n - c->at));
        if (rc < 0 && rc != UV_EAGAIN) {
            send_failed(c);
            return;
        }
        if (rc > 0) {
            c->pub.sent_any = true;
            advance(c, (size_t)rc);
        }
        if (c->at < c->bufs_n) {
            write_piece(c);
            return;
        }
    }
    if (c->send_failed)
        return;
    c->sent_all = true;
    c->pub.phase = PL_CALL_AWAITING;
    c->first_byte_by_ms =
        c->first_byte_timeout_ms ? c->pool->wheel->now_ms + c->first_byte_timeout_ms : 0;
    if (!c->in_head)
        pl_upcall_deadline(c, c->first_byte_timeout_ms);
}

void pl_upcall_connected(pl_upcall *c)
{
    c->pub.phase = PL_CALL_SENDING;
    if (c->paused)
        uv_read_stop((uv_stream_t *)&c->conn->tcp);
    call_write(c);
}

pl_call *pl_call_send(pl_pool *p, const pl_str *slices, int n, bool head_request, bool fresh,
                      uint64_t first_byte_timeout_ms, const pl_call_events *ev, void *user)
{
    pl_upcall *c = calloc(1, sizeof *c + (size_t)n * sizeof(uv_buf_t));
    if (!c)
        return NULL;
    c->pub.user = user;
    c->pool = p;
    c->ev = ev;
    c->head_request = head_request;
    c->first_byte_timeout_ms =
        first_byte_timeout_ms ? first_byte_timeout_ms : p->o.first_byte_timeout_ms;
    for (int i = 0; i < n; i++) {
        c->bufs[i].base = (char *)slices[i].p; /* only read: libuv's type is not const */
        c->bufs[i].len = slices[i].n;
    }
    c->bufs_n = n;
    advance(c, 0);
    p->calls_n++;
    pl_upconn *conn = fresh ? NULL : pl_upconn_take(p);
    if (!conn) {
        pl_upcall_connect(c);
        return &c->pub;
    }
    conn->call = c;
    c->conn = conn;
    c->pub.reused = true;
    pl_upcall_connected(c);
    return &c->pub;
}

/* --- receiving --- */

void pl_upcall_on_alloc(uv_handle_t *h, size_t suggested, uv_buf_t *buf)
{
    (void)h;
    (void)suggested;
    *buf = uv_buf_init(in.bytes, READ_BYTES);
}

/* Hands over the slices collected so far. May end the call. */
static void flush(pl_upconn *conn)
{
    int n = in.slices_n;
    in.slices_n = 0;
    if (n > 0 && conn->call)
        conn->call->ev->on_body(&conn->call->pub, in.slices, n);
}

void pl_upcall_on_slice(void *ctx, const char *p, size_t n)
{
    pl_upconn *conn = ctx;
    if (!conn->call || n == 0)
        return;
    /* Small chunks are moved up to the one before, over the framing between them, which has been
     * parsed: a burst of events costs the client's side one slice, not one each. */
    pl_str *last = in.slices_n ? &in.slices[in.slices_n - 1] : NULL;
    if (last && n <= JOIN_BYTES) {
        char *to = in.bytes + (last->p - in.bytes) + last->n;
        memmove(to, p, n);
        last->n += n;
        return;
    }
    if (in.slices_n == MAX_SLICES)
        flush(conn);
    in.slices[in.slices_n++] = (pl_str){p, n};
}

/* A head is complete. 1xx are swallowed and the reader goes on to the next head; else the call is
 * STREAMING. May end the call. */
static void call_head(pl_upcall *c)
{
    pl_upconn *conn = c->conn;
    if (conn->reader.head.status < 200) {
        if (++c->interim > INTERIM_MAX) {
            pl_upcall_fail(c, PL_EPROTOCOL, "interim answers without end");
            return;
        }
        pl_reader_next(&conn->reader);
        conn->reader.no_body = c->head_request;
        c->in_head = false;
        if (c->sent_all) { /* still the same wait for the answer */
            uint64_t now = conn->pool->wheel->now_ms;
            uint64_t by = c->first_byte_by_ms;
            pl_upcall_deadline(c, by == 0 ? 0 : by > now ? by - now : 1);
        }
        return;
    }
    c->pub.head = conn->reader.head;
    c->head_seen = true; /* from here on nothing more is sent: the slices may go */
    c->pub.phase = PL_CALL_STREAMING;
    c->ev->on_head(&c->pub, &c->pub.head);
}

/* What a read brought. */
static void conn_bytes(pl_upconn *conn, const char *p, size_t n)
{
    pl_upcall *c = conn->call;
    pl_reader *r = &conn->reader;
    if (conn->next_message) {
        conn->next_message = false;
        pl_reader_next(r);
    }
    if (!c->pub.got_any)
        r->no_body = c->head_request;
    c->pub.got_any = true;
    if (!c->head_seen && !c->in_head) {
        c->in_head = true;
        if (c->sent_all) /* all of the head within this; while sending, sending has its own */
            pl_upcall_deadline(c, conn->pool->o.between_bytes_timeout_ms);
    }
    in.slices_n = 0;
    bool answering = c->head_seen;
    uint64_t body_before = r->body_seen;
    do {
        size_t used = pl_reader_feed(r, p, n);
        p += used;
        n -= used;
        if (r->state == PL_READER_ERROR) {
            flush(conn);
            if (conn->call)
                pl_upcall_fail(conn->call, r->status == 500 ? PL_ENOMEM : PL_EPROTOCOL, r->error);
            return;
        }
        if (r->state != PL_READER_HEAD && conn->call && !conn->call->head_seen)
            call_head(conn->call);
        if (conn->call && conn->call->head_seen && r->state == PL_READER_DONE) {
            flush(conn);
            if (conn->call)
                call_end(conn->call, n > 0);
            return;
        }
        if (conn->call && r->state == PL_READER_HEAD && n > 0)
            conn->call->in_head = true; /* after a 1xx */
    } while (n > 0 && conn->call);
    flush(conn);
    c = conn->call;
    /* before the head its own time goes on; framing and trailers alone are no progress */
    if (c && c->head_seen && !c->paused && (!answering || r->body_seen != body_before))
        pl_upcall_deadline(c, conn->pool->o.between_bytes_timeout_ms);
}

void pl_upcall_on_read(uv_stream_t *s, ssize_t n, const uv_buf_t *buf)
{
    pl_upconn *conn = s->data;
    if (n == 0)
        return;
    if (!conn->call) /* idle: the peer closes it, or talks out of turn; both end it */
        pl_upconn_close(conn);
    else if (n < 0)
        call_lost(conn->call, (int)n);
    else
        conn_bytes(conn, buf->base, (size_t)n);
}

void pl_call_pause(pl_call *call)
{
    pl_upcall *c = (pl_upcall *)call;
    if (c->over || c->paused)
        return;
    c->paused = true;
    if (c->conn && c->conn->state == PL_UPCONN_BUSY)
        uv_read_stop((uv_stream_t *)&c->conn->tcp);
    if (c->head_seen)
        pl_upcall_deadline(c, 0);
}

void pl_call_resume(pl_call *call)
{
    pl_upcall *c = (pl_upcall *)call;
    if (c->over || !c->paused)
        return;
    c->paused = false;
    if (c->conn && c->conn->state == PL_UPCONN_BUSY)
        uv_read_start((uv_stream_t *)&c->conn->tcp, pl_upcall_on_alloc, pl_upcall_on_read);
    if (c->head_seen)
        pl_upcall_deadline(c, c->pool->o.between_bytes_timeout_ms);
}
