/* The connection of a handle of the shared store (redis.c): hiredis's asynchronous context on a
 * libuv loop, with what hiredis 0.14 does not do: it resolves names without blocking, times
 * connecting out, notices a silent server, logs in, reconnects with backoff, and reports a refused
 * or reset connection (libuv tells of these as an error of the poll handle, upon which hiredis's
 * own adapter returns). All on the loop's thread.
 *
 * hiredis owns the context: redisAsyncFree answers what is pending with NULL, calls on_cleanup and
 * frees it, at once or when the reply that it is in has been handled. The pl_redis_conn outlives
 * each context and a name question under way (`pins`). */
#include "session/redis_conn.h"

#include <hiredis/async.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/clock.h"
#include "http/resolve.h"

#define BACKOFF_MIN_MS 100
#define BACKOFF_MAX_MS 2000
#define DEAD_FACTOR    10 /* after so many times silence_ms a silent connection is given up */

typedef enum state { WAITING, RESOLVING, CONNECTING, READY } state;

/* What libuv polls for one context; freed when libuv has closed it. */
typedef struct plug {
    uv_poll_t poll;
    pl_redis_conn *conn;
    redisAsyncContext *ac; /* NULL: freed */
    int events;
} plug;

struct pl_redis_conn {
    pl_redis_conn_options o;
    state state;
    bool silent;  /* READY, but down() was called: the server does not reply */
    bool overdue; /* a timer was due; once more before it counts, so that a loop which was busy
                     reads what has arrived */
    bool broken;  /* hiredis lost count of commands and callbacks: read no reply of this one */
    bool freed;
    int pins;
    int hellos; /* replies of the log-in still to come */
    int next_address;
    redisAsyncContext *ac;
    uint32_t in_flight;
    uint64_t heard_ns; /* the last reply, or the first command after a pause */
    uint64_t backoff_ms;
    pl_timer timer;
    pl_resolver resolver;
    char why[256];
};

static void connect_now(pl_redis_conn *c);
static void on_timer(pl_timer *t);

static void unpin(pl_redis_conn *c)
{
    if (--c->pins > 0 || !c->freed)
        return;
    pl_resolver_free(&c->resolver);
    free(c);
}

static void arm(pl_redis_conn *c, uint64_t ms)
{
    pl_wheel_arm(c->o.wheel, &c->timer, ms, on_timer);
}

/* --- the poll handle --- */

static void on_closed(uv_handle_t *h)
{
    free(h->data);
}

static void on_poll(uv_poll_t *p, int status, int events)
{
    plug *l = p->data;
    if (l->ac && l->conn->broken && l->conn->ac == l->ac) {
        pl_redis_conn_drop(l->conn, "out of memory");
        return;
    }
    if (status < 0) {
        /* hiredis finds out what it is and answers everything; libuv has stopped the handle */
        if (l->ac)
            redisAsyncHandleWrite(l->ac);
        if (l->ac)
            redisAsyncHandleRead(l->ac);
        if (l->ac && l->conn->ac == l->ac)
            pl_redis_conn_drop(l->conn, "the socket reports an error");
        return;
    }
    if (l->ac && (events & (UV_READABLE | UV_DISCONNECT)))
        redisAsyncHandleRead(l->ac);
    if (l->ac && (events & UV_WRITABLE))
        redisAsyncHandleWrite(l->ac);
}

static void poll_for(plug *l, int events)
{
    if (l->events == events)
        return;
    l->events = events;
    if (events)
        uv_poll_start(&l->poll, events, on_poll);
    else
        uv_poll_stop(&l->poll);
}

static void add_read(void *p)
{
    poll_for(p, ((plug *)p)->events | UV_READABLE);
}

static void del_read(void *p)
{
    poll_for(p, ((plug *)p)->events & ~UV_READABLE);
}

static void add_write(void *p)
{
    poll_for(p, ((plug *)p)->events | UV_WRITABLE);
}

static void del_write(void *p)
{
    poll_for(p, ((plug *)p)->events & ~UV_WRITABLE);
}

/* hiredis is freeing ac, and not because we said so. */
static void lost(pl_redis_conn *c, const redisAsyncContext *ac)
{
    if (c->ac != ac)
        return;
    c->ac = NULL;
    pl_redis_conn_drop(c, ac->errstr && *ac->errstr ? ac->errstr : "it closed the connection");
}

/* The context goes. */
static void on_cleanup(void *p)
{
    plug *l = p;
    pl_redis_conn *c = l->conn;
    redisAsyncContext *ac = l->ac;
    l->ac = NULL;
    lost(c, ac);
    uv_poll_stop(&l->poll);
    uv_close((uv_handle_t *)&l->poll, on_closed);
    unpin(c);
}

static int attach(pl_redis_conn *c, redisAsyncContext *ac)
{
    plug *l = calloc(1, sizeof *l);
    if (!l)
        return PL_ENOMEM;
    if (uv_poll_init(c->o.loop, &l->poll, ac->c.fd) != 0) {
        free(l);
        return PL_EIO;
    }
    l->poll.data = l;
    l->conn = c;
    l->ac = ac;
    ac->data = c;
    ac->ev.data = l;
    ac->ev.addRead = add_read;
    ac->ev.delRead = del_read;
    ac->ev.addWrite = add_write;
    ac->ev.delWrite = del_write;
    ac->ev.cleanup = on_cleanup;
    c->pins++;
    return 0;
}

/* --- up and down --- */

void pl_redis_conn_drop(pl_redis_conn *c, const char *why)
{
    if (c->state == WAITING || c->freed)
        return;
    snprintf(c->why, sizeof c->why, "%s", why);
    for (char *p = c->why; *p; p++) /* it may be the server's text */
        if ((unsigned char)*p < ' ' || *p == 0x7f)
            *p = ' ';
    c->state = WAITING;
    c->silent = c->overdue = c->broken = false;
    c->hellos = 0;
    redisAsyncContext *ac = c->ac;
    c->ac = NULL;
    arm(c, c->backoff_ms);
    c->backoff_ms = c->backoff_ms * 2 > BACKOFF_MAX_MS ? BACKOFF_MAX_MS : c->backoff_ms * 2;
    c->pins++; /* down() may free */
    c->o.down(c->o.ctx, c->why);
    if (ac)
        redisAsyncFree(ac);
    unpin(c);
}

static void on_timer(pl_timer *t)
{
    pl_redis_conn *c = (pl_redis_conn *)((char *)t - offsetof(pl_redis_conn, timer));
    if (c->state == WAITING) {
        connect_now(c);
        return;
    }
    if (c->state == READY) {
        if (!c->in_flight)
            return; /* armed again by the next command */
        uint64_t ms = (pl_now_ns() - c->heard_ns) / 1000000;
        uint64_t limit_ms = c->silent ? DEAD_FACTOR * c->o.silence_ms : c->o.silence_ms;
        if (ms < limit_ms) {
            c->overdue = false;
            arm(c, limit_ms - ms);
            return;
        }
    }
    if (!c->overdue) {
        c->overdue = true;
        arm(c, PL_WHEEL_TICK_MS);
        return;
    }
    c->overdue = false;
    if (c->state != READY) {
        pl_redis_conn_drop(c, c->state == RESOLVING ? "resolving its name timed out"
                                                    : "connecting timed out");
    } else if (c->silent) {
        pl_redis_conn_drop(c, "it does not answer");
    } else {
        c->silent = true;
        arm(c, (DEAD_FACTOR - 1) * c->o.silence_ms);
        c->o.down(c->o.ctx, "it does not answer");
    }
}

static void heard(pl_redis_conn *c)
{
    c->heard_ns = pl_now_ns();
    c->overdue = false;
    if (c->silent) {
        c->silent = false;
        c->o.up(c->o.ctx);
    }
}

static void on_reply(redisAsyncContext *ac, void *reply, void *priv)
{
    pl_redis_cmd *cmd = priv;
    pl_redis_conn *c = cmd->conn;
    c->pins++;
    c->in_flight--;
    if (!reply)
        lost(c, ac);
    else if (c->ac == ac)
        heard(c);
    cmd->replied(cmd, reply);
    unpin(c);
}

/* --- connecting --- */

static void on_hello(redisAsyncContext *ac, void *reply, void *priv)
{
    pl_redis_conn *c = priv;
    const redisReply *r = reply;
    if (!r || c->ac != ac || c->state != CONNECTING)
        return;
    if (r->type == REDIS_REPLY_ERROR) {
        char why[200];
        snprintf(why, sizeof why, "it refuses: %.*s", (int)(r->len < 150 ? r->len : 150), r->str);
        pl_redis_conn_drop(c, why);
        return;
    }
    if (--c->hellos)
        return;
    c->state = READY;
    c->overdue = false;
    c->backoff_ms = BACKOFF_MIN_MS;
    pl_wheel_cancel(c->o.wheel, &c->timer);
    c->o.up(c->o.ctx);
}

/* Did hiredis take the command? When memory is short it keeps the callback without the command or
 * the other way round, and every later reply would go to the wrong one. */
static bool take(redisAsyncContext *ac, redisCallbackFn *fn, void *priv, pl_str command)
{
    const redisCallback *last = ac->replies.tail;
    return redisAsyncFormattedCommand(ac, fn, priv, command.p, command.n) == REDIS_OK &&
           ac->c.err == 0 && ac->replies.tail && ac->replies.tail != last &&
           ac->replies.tail->privdata == priv;
}

static void on_connect(const redisAsyncContext *ac, int status)
{
    pl_redis_conn *c = ac->data;
    if (c->ac != ac)
        return;
    if (status != REDIS_OK) {
        c->ac = NULL; /* hiredis frees it when this returns */
        if (c->o.host && c->resolver.n)
            c->next_address = (c->next_address + 1) % c->resolver.n;
        pl_redis_conn_drop(c, ac->errstr && *ac->errstr ? ac->errstr : "connecting failed");
        return;
    }
    if (!c->o.unix_path) {
        int on = 1;
        setsockopt(ac->c.fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    }
}

static int add_word(pl_buf *b, const char *s)
{
    return pl_buf_addf(b, "$%zu\r\n%s\r\n", strlen(s), s);
}

static int log_in(pl_redis_conn *c)
{
    pl_buf b = {0};
    int err = 0;
    char db[16];
    if (c->o.password) {
        err = c->o.user ? pl_buf_addf(&b, "*3\r\n$4\r\nAUTH\r\n")
                        : pl_buf_addf(&b, "*2\r\n$4\r\nAUTH\r\n");
        if (!err && c->o.user)
            err = add_word(&b, c->o.user);
        if (!err)
            err = add_word(&b, c->o.password);
        if (!err && !take(c->ac, on_hello, c, pl_buf_str(&b)))
            err = PL_ENOMEM;
        c->hellos++;
        if (b.p)
            explicit_bzero(b.p, b.cap);
        b.n = 0;
    }
    if (!err && c->o.db) {
        snprintf(db, sizeof db, "%d", c->o.db);
        err = pl_buf_addf(&b, "*2\r\n$6\r\nSELECT\r\n");
        if (!err)
            err = add_word(&b, db);
        if (!err && !take(c->ac, on_hello, c, pl_buf_str(&b)))
            err = PL_ENOMEM;
        c->hellos++;
    }
    if (!err && !take(c->ac, on_hello, c, c->o.hello))
        err = PL_ENOMEM;
    c->hellos++;
    pl_buf_free(&b);
    return err;
}

static void open_socket(pl_redis_conn *c)
{
    redisAsyncContext *ac;
    if (c->o.unix_path) {
        ac = redisAsyncConnectUnix(c->o.unix_path);
    } else {
        char text[64];
        const pl_address *a = &c->resolver.addresses[c->next_address % c->resolver.n];
        uv_ip_name(&a->any, text, sizeof text);
        ac = redisAsyncConnect(text, c->o.port);
    }
    c->state = CONNECTING;
    if (!ac) {
        pl_redis_conn_drop(c, "out of memory");
        return;
    }
    if (ac->err) {
        char why[160];
        snprintf(why, sizeof why, "%s", ac->errstr);
        redisAsyncFree(ac);
        pl_redis_conn_drop(c, why);
        return;
    }
    if (attach(c, ac) != 0) {
        redisAsyncFree(ac);
        pl_redis_conn_drop(c, "out of memory");
        return;
    }
    c->ac = ac;
    redisAsyncSetConnectCallback(ac, on_connect);
    if (log_in(c) != 0)
        pl_redis_conn_drop(c, "out of memory");
}

static void on_resolved(pl_resolver *r)
{
    pl_redis_conn *c = (pl_redis_conn *)((char *)r - offsetof(pl_redis_conn, resolver));
    if (!c->freed && c->state == RESOLVING) {
        if (r->n)
            open_socket(c);
        else
            pl_redis_conn_drop(c, "its name cannot be resolved");
    }
    unpin(c);
}

static void connect_now(pl_redis_conn *c)
{
    uint64_t now_ms = pl_now_ns() / 1000000;
    c->state = RESOLVING;
    c->overdue = false;
    arm(c, c->o.connect_ms);
    if (c->o.unix_path || pl_resolver_fresh(&c->resolver, now_ms)) {
        open_socket(c);
        return;
    }
    if (c->resolver.busy)
        return; /* asked before; its answer goes on from here */
    c->pins++;
    if (pl_resolver_ask(&c->resolver, now_ms) != 0) {
        pl_redis_conn_drop(c, "its name cannot be resolved");
        unpin(c);
    }
}

static void on_start(pl_timer *t)
{
    connect_now((pl_redis_conn *)((char *)t - offsetof(pl_redis_conn, timer)));
}

/* --- what redis.c calls --- */

int pl_redis_conn_new(const pl_redis_conn_options *o, pl_redis_conn **out)
{
    pl_redis_conn *c = calloc(1, sizeof *c);
    *out = c;
    if (!c)
        return PL_ENOMEM;
    c->o = *o;
    c->pins = 1;
    c->backoff_ms = BACKOFF_MIN_MS;
    if (!o->unix_path &&
        pl_resolver_init(&c->resolver, o->loop, pl_str_c(o->host), o->port, on_resolved) != 0) {
        free(c);
        *out = NULL;
        return PL_ENOMEM;
    }
    /* a tick later: the caller has its handle before up() or down() */
    pl_wheel_arm(o->wheel, &c->timer, 0, on_start);
    return 0;
}

bool pl_redis_conn_up(const pl_redis_conn *c)
{
    return c->state == READY && !c->silent;
}

int pl_redis_conn_send(pl_redis_conn *c, pl_redis_cmd *cmd, pl_str command)
{
    if (!pl_redis_conn_up(c) || c->broken || c->in_flight >= PL_REDIS_IN_FLIGHT_MAX ||
        c->ac->c.err || (c->ac->c.flags & (REDIS_FREEING | REDIS_DISCONNECTING)))
        return PL_EUNAVAILABLE;
    cmd->conn = c;
    if (!take(c->ac, on_reply, cmd, command)) {
        redisCallback *last = c->ac->replies.tail;
        if (last && last->privdata == cmd)
            last->fn = NULL;
        c->broken = true;
        add_write(c->ac->ev.data); /* dropped from there, not from inside a send */
        return PL_EUNAVAILABLE;
    }
    if (c->in_flight++ == 0) {
        c->heard_ns = pl_now_ns();
        if (!pl_timer_armed(&c->timer))
            arm(c, c->o.silence_ms);
    }
    return 0;
}

void pl_redis_conn_free(pl_redis_conn *c)
{
    if (!c)
        return;
    pl_wheel_cancel(c->o.wheel, &c->timer);
    pl_resolver_cancel(&c->resolver);
    c->freed = true;
    redisAsyncContext *ac = c->ac;
    c->ac = NULL;
    if (ac)
        redisAsyncFree(ac);
    unpin(c);
}
