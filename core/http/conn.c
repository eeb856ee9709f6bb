/* One client connection: its phases, timeouts, beginning and end. Called by libuv and the timing
 * wheel on the server's loop, by input.c, and by exchange.c when an answer is complete. A
 * connection owns its reader, its exchange and the request's body; it is freed by libuv's close
 * callback only, so that `c` stays valid under any callback, while c->x may be gone after each call
 * to the owner. Bytes behind the current request wait in `in`; they are looked at in the loop's
 * next turn, never from inside a call of the owner. */
#include "http/conn.h"

#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/log.h"

/* an early answer keeps the connection when at most this much of the body is left to drop */
#define DISCARD_BYTES (64 * 1024)
/* connections over the limit that are told so at a time; the rest is just closed */
#define REFUSING_MAX 64
/* a body that drips would hold its memory for days: after the grace it must have come at this rate
 * on average */
#define BODY_GRACE_MS      30000
#define BODY_BYTES_PER_SEC 1024

/* --- the exchange --- */

void pl_conn_drop_exchange(pl_conn *c)
{
    pl_exchange *x = c->x;
    if (!x)
        return;
    pl_conn_body_free(c);
    c->x = NULL;
    c->announced = c->started = c->paused = c->continued = c->body_failed = c->unwanted = false;
    pl_arena_free(&x->arena);
    free(x);
}

static void tell_gone(pl_conn *c)
{
    if (c->x && c->announced && c->s->h.on_gone) {
        c->telling = true;
        c->s->h.on_gone(c->s->ctx, c->x);
        c->telling = false;
    }
    pl_conn_drop_exchange(c);
}

static void start_linger(pl_conn *c)
{
    uv_os_fd_t fd;
    if (c->peer_eof || c->broken || uv_fileno((uv_handle_t *)&c->tcp, &fd) != 0 ||
        shutdown(fd, SHUT_WR) != 0) {
        pl_conn_close(c, false);
        return;
    }
    c->phase = PL_CONN_LINGER;
    pl_conn_settle(c);
}

/* After the last answer: closing with unread input would send RST, and that can destroy the answer
 * before the client has read it. */
void pl_conn_end(pl_conn *c)
{
    c->phase = PL_CONN_ENDING;
    pl_buf_free(&c->in);
    pl_conn_flushed(c);
    if (c->phase == PL_CONN_ENDING)
        pl_conn_settle(c);
}

void pl_conn_flushed(pl_conn *c)
{
    if (c->phase == PL_CONN_ENDING && pl_conn_backlog(c) == 0)
        start_linger(c);
    else if (c->phase == PL_CONN_HEAD)
        c->in.n ? pl_conn_later(c) : pl_conn_settle(c);
}

bool pl_conn_can_discard(const pl_conn *c)
{
    const pl_reader *r = &c->reader;
    if (r->state == PL_READER_DONE)
        return true;
    if (r->head.expect_continue && !c->continued)
        return false; /* whether the body still comes is the client's choice */
    return r->state == PL_READER_BODY && !r->head.chunked &&
           pl_reader_body_left(r) <= DISCARD_BYTES;
}

void pl_conn_next_request(pl_conn *c)
{
    pl_reader_next(&c->reader);
    c->phase = PL_CONN_HEAD;
}

void pl_conn_answered(pl_conn *c)
{
    bool keep = c->keep && !c->broken && !c->peer_eof && pl_conn_can_discard(c);
    pl_conn_drop_exchange(c);
    if (c->phase == PL_CONN_CLOSING)
        return;
    if (!keep) {
        pl_conn_end(c);
        return;
    }
    if (c->reader.state == PL_READER_DONE)
        pl_conn_next_request(c);
    else
        c->phase = PL_CONN_DISCARD;
    if (c->busy)
        return;
    if (c->in.n)
        pl_conn_later(c);
    pl_conn_settle(c);
}

static void render_plain(int status, const char *message, pl_buf *body)
{
    int rc = pl_buf_addf(body, "{\"error\":{\"message\":\"");
    for (const char *p = message; *p && rc == 0; p++) {
        char ch = (unsigned char)*p < ' ' || *p == '"' || *p == '\\' ? '\'' : *p;
        rc = pl_buf_add(body, &ch, 1);
    }
    if (rc == 0)
        rc = pl_buf_addf(body, "\",\"code\":%d}}\n", status);
    if (rc != 0)
        body->n = 0;
}

void pl_conn_error(pl_conn *c, int status, const char *message)
{
    pl_server *s = c->s;
    if (c->phase >= PL_CONN_DISCARD || c->started) {
        /* it has an answer already, or half of one */
        if (c->started)
            pl_conn_close(c, false);
        else if (c->phase == PL_CONN_DISCARD)
            pl_conn_end(c);
        return;
    }
    pl_buf body = {0};
    const pl_head *h = &c->reader.head;
    bool head_only = c->x && h->method == PL_HEAD;
    if (s->h.render_error)
        s->h.render_error(s->ctx, h->path, status, message, &body);
    else
        render_plain(status, message, &body);
    tell_gone(c);
    if (c->phase != PL_CONN_CLOSING) {
        c->keep = false;
        pl_conn_send_error(c, status, pl_buf_str(&body), head_only);
        pl_conn_end(c);
    }
    pl_buf_free(&body);
}

/* --- timers --- */

static void on_alarm(pl_timer *t)
{
    pl_conn *c = (pl_conn *)(void *)((char *)t - offsetof(pl_conn, read_timer));
    uint8_t alarm = c->alarm;
    c->alarm = PL_ALARM_NONE;
    if (alarm == PL_ALARM_IDLE || alarm == PL_ALARM_LINGER || c->phase == PL_CONN_DISCARD) {
        pl_conn_close(c, false);
        return;
    }
    pl_stat_add(&c->s->stats->timeouts, 1);
    pl_conn_error(c, 408,
                  alarm == PL_ALARM_HEAD ? "the request's head did not arrive in time"
                                         : "the request's body did not arrive in time");
}

static void set_alarm(pl_conn *c, pl_conn_alarm alarm, uint64_t after_ms)
{
    c->alarm = (uint8_t)alarm;
    if (alarm == PL_ALARM_NONE)
        pl_wheel_cancel(c->s->wheel, &c->read_timer);
    else
        pl_wheel_arm(c->s->wheel, &c->read_timer, after_ms, on_alarm);
}

void pl_conn_quiet(pl_conn *c)
{
    set_alarm(c, PL_ALARM_NONE, 0);
}

/* How long the next byte of the body may take. */
static uint64_t body_patience_ms(const pl_conn *c)
{
    uint64_t now = c->s->wheel->now_ms, patience = c->s->o.body_timeout_ms;
    uint64_t due = c->body_at_ms + BODY_GRACE_MS;
    if (due < c->body_at_ms + patience)
        due = c->body_at_ms + patience;
    due += c->reader.body_seen / BODY_BYTES_PER_SEC * 1000;
    if (due <= now)
        return 1;
    return due - now < patience ? due - now : patience;
}

void pl_conn_settle(pl_conn *c)
{
    const pl_server_options *o = &c->s->o;
    switch (c->phase) {
    case PL_CONN_HEAD:
        if (pl_reader_begun(&c->reader)) {
            if (c->alarm != PL_ALARM_HEAD) /* absolute: not again with each byte */
                set_alarm(c, PL_ALARM_HEAD, o->head_timeout_ms);
        } else if (c->in.n || pl_conn_backlog(c)) {
            set_alarm(c, PL_ALARM_NONE, 0);
        } else if (c->alarm != PL_ALARM_IDLE) {
            set_alarm(c, PL_ALARM_IDLE,
                      c->s->draining ? PL_CONN_LINGER_MS : o->keep_alive_timeout_ms);
        }
        break;
    case PL_CONN_BODY:
    case PL_CONN_DISCARD:
        set_alarm(c, PL_ALARM_BODY, body_patience_ms(c));
        break;
    case PL_CONN_LINGER:
        if (c->alarm != PL_ALARM_LINGER)
            set_alarm(c, PL_ALARM_LINGER, PL_CONN_LINGER_MS);
        break;
    case PL_CONN_CLOSING:
        return;
    default:
        set_alarm(c, PL_ALARM_NONE, 0);
        break;
    }
    bool want = !c->peer_eof && !c->broken && c->in.n < o->limits.head_bytes;
    if (want == c->reading)
        return;
    c->reading = want;
    if (!want)
        uv_read_stop((uv_stream_t *)&c->tcp);
    else if (pl_conn_read_start(c) != 0)
        pl_conn_close(c, false);
}

/* --- the loop's next turn --- */

static void on_idle(uv_idle_t *h);

void pl_conn_later(pl_conn *c)
{
    pl_server *s = c->s;
    if (c->pprev_late || c->phase == PL_CONN_CLOSING)
        return;
    c->next_late = s->late;
    c->pprev_late = &s->late;
    if (s->late)
        s->late->pprev_late = &c->next_late;
    s->late = c;
    if (!s->idle_active) {
        s->idle_active = true;
        uv_idle_start(&s->idle, on_idle);
    }
}

static void not_later(pl_conn *c)
{
    if (!c->pprev_late)
        return;
    *c->pprev_late = c->next_late;
    if (c->next_late)
        c->next_late->pprev_late = c->pprev_late;
    c->pprev_late = NULL;
}

static void run_one(pl_conn *c)
{
    if (c->broken) {
        pl_conn_close(c, false);
        return;
    }
    if (c->out.n && !c->flight) {
        uv_buf_t none[1];
        pl_conn_send(c, none, 1);
    }
    if (c->in.n && c->phase < PL_CONN_ENDING && !pl_conn_blocked(c)) {
        pl_buf in = c->in;
        c->in = (pl_buf){0};
        pl_conn_input(c, in.p, in.n);
        pl_buf_free(&in);
    }
}

static void on_idle(uv_idle_t *h)
{
    pl_server *s = h->data;
    uv_idle_stop(&s->idle);
    s->idle_active = false;
    /* what is noted meanwhile waits for the turn after this one */
    pl_conn *todo = s->late;
    s->late = NULL;
    if (todo)
        todo->pprev_late = &todo;
    while (todo) {
        pl_conn *c = todo;
        not_later(c);
        run_one(c);
    }
}

/* --- begin and end --- */

pl_conn *pl_conn_new(pl_server *s)
{
    pl_conn *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    if (uv_tcp_init(s->loop, &c->tcp) != 0) {
        free(c);
        return NULL;
    }
    c->s = s;
    pl_reader_init(&c->reader, true, &s->o.limits, NULL, pl_conn_take_body, c);
    c->next = s->conns;
    c->pprev = &s->conns;
    if (s->conns)
        s->conns->pprev = &c->next;
    s->conns = c;
    s->handles++;
    s->open++;
    pl_stat_add(&s->stats->open, 1);
    return c;
}

void pl_conn_begin(pl_conn *c)
{
    pl_server *s = c->s;
    int len = sizeof c->peer;
    uv_tcp_getpeername(&c->tcp, &c->peer.any, &len);
    uv_tcp_nodelay(&c->tcp, 1);
    pl_stat_add(&s->stats->accepted, 1);
    if (s->o.connections) {
        c->counted = true;
        if (atomic_fetch_add_explicit(s->o.connections, 1, memory_order_relaxed) >=
            s->o.max_connections)
            c->refused = true;
    }
    if (!c->refused) {
        pl_conn_settle(c);
        return;
    }
    pl_stat_add(&s->stats->refused, 1);
    static unsigned long told[2];
    if (pl_log_allow(told, 1))
        pl_log(PL_LOG_WARN, "connection_refused", "%u client connections are open already",
               s->o.max_connections);
    s->refusing++;
    c->counted = false;
    atomic_fetch_sub_explicit(s->o.connections, 1, memory_order_relaxed);
    if (s->refusing > REFUSING_MAX)
        pl_conn_close(c, false);
    else
        pl_conn_error(c, 503, "too many connections");
}

static void on_closed(uv_handle_t *handle)
{
    pl_conn *c = (pl_conn *)handle;
    pl_server *s = c->s;
    if (c->counted)
        atomic_fetch_sub_explicit(s->o.connections, 1, memory_order_relaxed);
    if (c->refused)
        s->refusing--;
    pl_reader_free(&c->reader);
    pl_buf_free(&c->in);
    pl_buf_free(&c->out);
    free(c);
    s->handles--;
    s->open--;
    pl_stat_add(&s->stats->open, -1);
    pl_server_conn_closed(s);
}

void pl_conn_close(pl_conn *c, bool reset)
{
    if (c->phase == PL_CONN_CLOSING)
        return;
    c->phase = PL_CONN_CLOSING;
    set_alarm(c, PL_ALARM_NONE, 0);
    pl_wheel_cancel(c->s->wheel, &c->write_timer);
    not_later(c);
    *c->pprev = c->next;
    if (c->next)
        c->next->pprev = c->pprev;
    tell_gone(c);
    uv_os_fd_t fd;
    if (reset && uv_fileno((uv_handle_t *)&c->tcp, &fd) == 0) {
        struct linger now = {.l_onoff = 1, .l_linger = 0};
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof now);
    }
    uv_close((uv_handle_t *)&c->tcp, on_closed);
}

bool pl_conn_idle(const pl_conn *c)
{
    return c->phase == PL_CONN_HEAD && !pl_reader_begun(&c->reader) && !c->in.n &&
           !pl_conn_backlog(c);
}
