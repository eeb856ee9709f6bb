/* The answer's side of an exchange: composing heads, framing bodies, sending, backlog. Called by
 * the owners of exchanges (proxy, admin, simulated engine) and by conn.c for the server's own
 * answers, on the server's loop. Bytes go to the kernel at once where it takes them; the rest is
 * copied and written by libuv. Nothing here calls an owner back but on_drain, from libuv's write
 * callback. */
#include "http/conn.h"

#include <linux/sockios.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <time.h>

#include "base/err.h"

/* slices sent with one system call, with room for the framing around them */
#define SLICES_MAX 60
#define JOIN_BYTES 2048 /* below 0x1000: three digits of size */
/* a client that takes its answer slower than this gets into arrears */
#define TAKEN_BYTES_PER_SEC 1024

size_t pl_conn_backlog(const pl_conn *c)
{
    return c->out.n + uv_stream_get_write_queue_size((const uv_stream_t *)&c->tcp);
}

/* --- sending --- */

static void broken(pl_conn *c)
{
    c->broken = true;
    pl_buf_free(&c->out);
    pl_conn_later(c);
}

/* Bytes that the client has not taken: ours and the kernel's. The kernel's are counted because it
 * asks us for more only when a good part of its buffer is free. */
static size_t not_taken(const pl_conn *c)
{
    uv_os_fd_t fd;
    int queued = 0;
    if (uv_fileno((const uv_handle_t *)&c->tcp, &fd) != 0 || ioctl(fd, SIOCOUTQ, &queued) != 0)
        queued = 0;
    return (size_t)queued + uv_stream_get_write_queue_size((const uv_stream_t *)&c->tcp);
}

/* Runs while bytes wait for the client. What it takes pays its arrears off, and no more: a burst is
 * no leave to stand still later. */
static void on_stall_tick(pl_timer *t)
{
    pl_conn *c = (pl_conn *)(void *)((char *)t - offsetof(pl_conn, write_timer));
    uint64_t timeout = c->s->o.write_timeout_ms;
    uint64_t taken = c->written - not_taken(c);
    uint64_t paid = taken > c->taken ? (taken - c->taken) * 1000 / TAKEN_BYTES_PER_SEC : 0;
    c->taken = taken;
    c->arrears_ms += timeout / 4;
    c->arrears_ms -= paid < c->arrears_ms ? paid : c->arrears_ms;
    if (c->arrears_ms < timeout) {
        pl_wheel_arm(c->s->wheel, t, timeout / 4, on_stall_tick);
        return;
    }
    pl_stat_add(&c->s->stats->timeouts, 1);
    pl_conn_close(c, true);
}

static void on_written(uv_write_t *req, int status);

/* Hands `out` to libuv. */
static void take_off(pl_conn *c)
{
    pl_flight *f = malloc(sizeof *f);
    if (!f) {
        broken(c);
        return;
    }
    f->bytes = c->out;
    c->out = (pl_buf){0};
    uv_buf_t buf = uv_buf_init(f->bytes.p, (unsigned)f->bytes.n);
    if (uv_write(&f->req, (uv_stream_t *)&c->tcp, &buf, 1, on_written) != 0) {
        pl_buf_free(&f->bytes);
        free(f);
        broken(c);
        return;
    }
    c->flight = f;
    c->written += f->bytes.n;
    if (!pl_timer_armed(&c->write_timer))
        pl_wheel_arm(c->s->wheel, &c->write_timer, c->s->o.write_timeout_ms / 4, on_stall_tick);
}

static void on_written(uv_write_t *req, int status)
{
    pl_flight *f = (pl_flight *)req;
    pl_conn *c = (pl_conn *)req->handle;
    c->flight = NULL;
    pl_buf_free(&f->bytes);
    free(f);
    if (c->phase == PL_CONN_CLOSING)
        return;
    if (status != 0 || c->broken) {
        pl_conn_close(c, false);
        return;
    }
    if (c->out.n)
        take_off(c);
    if (!c->flight) {
        pl_wheel_cancel(c->s->wheel, &c->write_timer);
        if (!c->broken)
            pl_conn_flushed(c);
    }
    if (c->x && c->paused && pl_conn_backlog(c) < c->s->o.low_water_bytes) {
        c->paused = false;
        if (c->s->h.on_drain)
            c->s->h.on_drain(c->s->ctx, c->x);
    }
}

void pl_conn_send(pl_conn *c, uv_buf_t *bufs, unsigned n)
{
    if (c->broken || c->phase == PL_CONN_CLOSING)
        return;
    size_t sent = 0;
    pl_buf first = c->out;
    if (!c->flight) {
        /* whatever `out` held goes first, in the same system call */
        c->out = (pl_buf){0};
        bufs[0] = uv_buf_init(first.p, (unsigned)first.n);
        unsigned skip = first.n == 0;
        if (n > skip) {
            int rc = uv_try_write((uv_stream_t *)&c->tcp, bufs + skip, n - skip);
            if (rc < 0 && rc != UV_EAGAIN) {
                pl_buf_free(&first);
                broken(c);
                return;
            }
            sent = rc > 0 ? (size_t)rc : 0;
            c->written += sent;
        }
    } else {
        first = (pl_buf){0};
        bufs[0] = uv_buf_init(NULL, 0);
    }
    int rc = 0;
    for (unsigned i = 0; i < n && rc == 0; i++) {
        if (sent >= bufs[i].len) {
            sent -= bufs[i].len;
        } else {
            rc = pl_buf_add(&c->out, bufs[i].base + sent, bufs[i].len - sent);
            sent = 0;
        }
    }
    pl_buf_free(&first);
    if (rc != 0)
        broken(c);
    else if (c->out.n && !c->flight)
        take_off(c);
}

/* --- heads --- */

static char *put(char *to, const char *p, size_t n)
{
    memcpy(to, p, n);
    return to + n;
}

#define PUT(to, literal) put(to, literal, sizeof(literal) - 1)

static char *put_u64(char *to, uint64_t v)
{
    char digits[20];
    size_t n = 0;
    do
        digits[sizeof digits - ++n] = (char)('0' + v % 10);
    while (v /= 10);
    return put(to, digits + sizeof digits - n, n);
}

static char *put_date(char *to, pl_server *s)
{
    uint64_t second = s->wheel->now_ms / 1000 + 1; /* 0: never made */
    if (second != s->date_second) {
        static const char days[7][4] = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
        static const char months[12][4] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                           "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
        time_t now = time(NULL);
        struct tm tm;
        gmtime_r(&now, &tm);
        char *d = PUT(s->date, "Date: ");
        d = put(d, days[tm.tm_wday], 3);
        d = PUT(d, ", ");
        *d++ = (char)('0' + tm.tm_mday / 10);
        *d++ = (char)('0' + tm.tm_mday % 10);
        *d++ = ' ';
        d = put(d, months[tm.tm_mon], 3);
        *d++ = ' ';
        d = put_u64(d, (uint64_t)tm.tm_year + 1900);
        const int clock[3] = {tm.tm_hour, tm.tm_min, tm.tm_sec};
        for (int i = 0; i < 3; i++) {
            *d++ = i ? ':' : ' ';
            *d++ = (char)('0' + clock[i] / 10);
            *d++ = (char)('0' + clock[i] % 10);
        }
        d = PUT(d, " GMT\r\n");
        s->date_n = (size_t)(d - s->date);
        s->date_second = second;
    }
    return put(to, s->date, s->date_n);
}

/* A header that would end its line early is left out: no value may write headers of its own. */
static bool one_line(pl_str s)
{
    return s.n == 0 || (!memchr(s.p, '\n', s.n) && !memchr(s.p, '\r', s.n) && !memchr(s.p, 0, s.n));
}

/* Composes an answer's head into the server's buffer. length: UINT64_MAX for none. False when out
 * of memory. */
static bool compose(pl_conn *c, int status, const pl_header *headers, int n, uint64_t length,
                    bool old_client)
{
    pl_buf *b = &c->s->head;
    size_t need = 320; /* status line, framing, date */
    for (int i = 0; i < n; i++)
        need += headers[i].name.n + headers[i].value.n + 4;
    b->n = 0;
    if (pl_buf_reserve(b, need) != 0)
        return false;
    char *p = PUT(b->p, "HTTP/1.1 ");
    p = put_u64(p, (uint64_t)status);
    *p++ = ' ';
    const char *text = pl_status_text(status);
    p = put(p, text, strlen(text));
    p = PUT(p, "\r\n");
    bool dated = false;
    for (int i = 0; i < n; i++) {
        if (!one_line(headers[i].name) || !one_line(headers[i].value))
            continue;
        dated |= headers[i].name.n == 4 && pl_str_ieq(headers[i].name, PL_STR("date"));
        p = put(p, headers[i].name.p, headers[i].name.n);
        p = PUT(p, ": ");
        if (headers[i].value.n)
            p = put(p, headers[i].value.p, headers[i].value.n);
        p = PUT(p, "\r\n");
    }
    if (!dated)
        p = put_date(p, c->s);
    if (length != UINT64_MAX) {
        p = PUT(p, "Content-Length: ");
        p = put_u64(p, length);
        p = PUT(p, "\r\n");
    } else if (c->framing == PL_FRAMING_CHUNKED) {
        p = PUT(p, "Transfer-Encoding: chunked\r\n");
    }
    if (!c->keep)
        p = PUT(p, "Connection: close\r\n");
    else if (old_client)
        p = PUT(p, "Connection: keep-alive\r\n");
    p = PUT(p, "\r\n");
    b->n = (size_t)(p - b->p);
    return true;
}

/* The head of x's answer into the server's buffer; decides framing and whether to keep the
 * connection. */
static bool begin_answer(pl_exchange *x, int status, const pl_header *headers, int n,
                         uint64_t length)
{
    pl_conn *c = x->conn;
    c->started = true;
    c->keep = x->head.keep_alive && !c->s->draining && pl_conn_can_discard(c);
    c->length_left = 0;
    bool no_content = status == 204 || status == 304 || status < 200;
    if (no_content)
        length = UINT64_MAX;
    if (no_content)
        c->framing = PL_FRAMING_NONE;
    else if (length != UINT64_MAX)
        c->framing = PL_FRAMING_LENGTH;
    else if (x->head.minor == 1)
        c->framing = PL_FRAMING_CHUNKED;
    else
        c->framing = PL_FRAMING_CLOSE;
    if (c->framing == PL_FRAMING_CLOSE && x->head.method != PL_HEAD)
        c->keep = false;
    bool ok = compose(c, status, headers, n, length, x->head.minor == 0);
    if (x->head.method == PL_HEAD)
        c->framing = PL_FRAMING_NONE;
    else if (c->framing == PL_FRAMING_LENGTH)
        c->length_left = length;
    if (!ok)
        broken(c);
    return ok;
}

void pl_conn_send_error(pl_conn *c, int status, pl_str body, bool head_only)
{
    const pl_header headers[2] = {{PL_STR("Content-Type"), PL_STR("application/json")},
                                  {PL_STR("Retry-After"), PL_STR("1")}};
    c->keep = false;
    c->framing = PL_FRAMING_LENGTH;
    if (!compose(c, status, headers, status == 503 ? 2 : 1, body.n, false)) {
        broken(c);
        return;
    }
    uv_buf_t bufs[3] = {uv_buf_init(NULL, 0), uv_buf_init(c->s->head.p, (unsigned)c->s->head.n),
                        uv_buf_init((char *)body.p, head_only ? 0 : (unsigned)body.n)};
    pl_conn_send(c, bufs, 3);
}

/* --- the owner's calls --- */

/* Inside on_gone nothing can be answered any more. */
static bool dead(const pl_exchange *x)
{
    return x->conn->telling || x->conn->phase == PL_CONN_CLOSING;
}

void pl_exchange_respond(pl_exchange *x, int status, const pl_header *headers, int n, pl_str body)
{
    pl_conn *c = x->conn;
    if (dead(x))
        return;
    if (begin_answer(x, status, headers, n, body.n)) {
        uv_buf_t bufs[3] = {
            uv_buf_init(NULL, 0), uv_buf_init(c->s->head.p, (unsigned)c->s->head.n),
            uv_buf_init((char *)body.p, c->framing == PL_FRAMING_LENGTH ? (unsigned)body.n : 0)};
        pl_conn_send(c, bufs, bufs[2].len ? 3 : 2);
    }
    pl_conn_answered(c);
}

void pl_exchange_start(pl_exchange *x, int status, const pl_header *headers, int n,
                       uint64_t content_length)
{
    pl_conn *c = x->conn;
    if (dead(x) || c->started)
        return;
    if (!begin_answer(x, status, headers, n, content_length))
        return;
    if (pl_buf_add(&c->out, c->s->head.p, c->s->head.n) != 0)
        broken(c);
    else
        pl_conn_later(c);
}

/* A small chunk with its framing in one piece: three pieces cost the kernel more than this copy. */
static void send_joined(pl_conn *c, const uv_buf_t *slices, unsigned n, size_t total)
{
    char joined[JOIN_BYTES + 16];
    size_t at = 0;
    for (int shift = total > 0xff ? 8 : total > 0xf ? 4 : 0; shift >= 0; shift -= 4)
        joined[at++] = "0123456789abcdef"[total >> shift & 15];
    at += (size_t)(PUT(joined + at, "\r\n") - (joined + at));
    for (unsigned i = 0; i < n; i++) {
        memcpy(joined + at, slices[i].base, slices[i].len);
        at += slices[i].len;
    }
    at += (size_t)(PUT(joined + at, "\r\n") - (joined + at));
    uv_buf_t bufs[2] = {uv_buf_init(NULL, 0), uv_buf_init(joined, (unsigned)at)};
    pl_conn_send(c, bufs, 2);
}

/* One system call's worth of slices, as one chunk when chunked. */
static void write_some(pl_conn *c, const pl_str *slices, int n)
{
    uv_buf_t bufs[SLICES_MAX + 3];
    char size_line[20];
    unsigned k = 2;
    uint64_t total = 0;
    for (int i = 0; i < n; i++) {
        size_t len = slices[i].n;
        if (c->framing == PL_FRAMING_LENGTH && len > c->length_left - total)
            len = (size_t)(c->length_left - total);
        if (len) {
            bufs[k++] = uv_buf_init((char *)slices[i].p, (unsigned)len);
            total += len;
        }
    }
    if (total == 0)
        return;
    if (c->framing == PL_FRAMING_CHUNKED && total <= JOIN_BYTES) {
        send_joined(c, bufs + 2, k - 2, (size_t)total);
    } else if (c->framing == PL_FRAMING_CHUNKED) {
        size_t at = sizeof size_line;
        size_line[--at] = '\n';
        size_line[--at] = '\r';
        for (uint64_t v = total; v; v >>= 4)
            size_line[--at] = "0123456789abcdef"[v & 15];
        bufs[1] = uv_buf_init(size_line + at, (unsigned)(sizeof size_line - at));
        bufs[k++] = uv_buf_init((char *)"\r\n", 2);
        pl_conn_send(c, bufs, k);
    } else {
        if (c->framing == PL_FRAMING_LENGTH)
            c->length_left -= total;
        pl_conn_send(c, bufs + 1, k - 1);
    }
}

bool pl_exchange_write(pl_exchange *x, const pl_str *slices, int n)
{
    pl_conn *c = x->conn;
    if (dead(x) || !c->started || c->broken || c->framing == PL_FRAMING_NONE)
        return false;
    for (; n > 0; slices += SLICES_MAX, n -= SLICES_MAX)
        write_some(c, slices, n < SLICES_MAX ? n : SLICES_MAX);
    bool above = pl_conn_backlog(c) > c->s->o.high_water_bytes;
    c->paused |= above;
    return above;
}

static void end_answer(pl_exchange *x)
{
    pl_conn *c = x->conn;
    if (!c->started || c->length_left) {
        pl_exchange_abort(x);
        return;
    }
    static char last[] = "0\r\n\r\n";
    uv_buf_t bufs[2] = {uv_buf_init(NULL, 0), uv_buf_init(last, sizeof last - 1)};
    if (c->framing == PL_FRAMING_CHUNKED)
        pl_conn_send(c, bufs, 2);
    else if (c->out.n && !c->flight)
        pl_conn_send(c, bufs, 1);
    pl_conn_answered(c);
}

void pl_exchange_end(pl_exchange *x)
{
    if (!dead(x))
        end_answer(x);
}

void pl_exchange_end_close(pl_exchange *x)
{
    if (dead(x))
        return;
    x->conn->keep = false;
    end_answer(x);
}

void pl_exchange_abort(pl_exchange *x)
{
    pl_conn *c = x->conn;
    if (dead(x))
        return;
    /* where the connection's end is the body's end, only a reset says that it is not complete */
    bool reset = c->started && c->framing == PL_FRAMING_CLOSE;
    pl_conn_drop_exchange(c);
    pl_conn_close(c, reset);
}

void pl_exchange_release_body(pl_exchange *x)
{
    if (!dead(x) && x->conn->phase == PL_CONN_WAIT)
        pl_conn_body_free(x->conn);
}

bool pl_exchange_started(const pl_exchange *x)
{
    return x->conn->started;
}

pl_server *pl_exchange_server(const pl_exchange *x)
{
    return x->conn->s;
}
