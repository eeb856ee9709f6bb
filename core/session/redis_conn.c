/* The connection of a handle of the shared store (redis.c): hiredis's non-blocking context and
 * reader on a libuv loop. Its asynchronous layer is not used: release 0.14 takes commands that it
 * has no memory for without saying so, aborts the process when a server sends more replies than it
 * was asked for, and its libuv adapter never tells of a refused connection (libuv reports that as
 * an error of the poll handle). What is here instead: a list of commands in the order of sending,
 * names resolved without blocking, timeouts, log-in, and connecting again with backoff. All on the
 * loop's thread.
 *
 * The pl_redis_conn owns the hiredis context; it outlives it, each uv_poll_t that is being closed,
 * and a name question under way (`pins`). */
#include "session/redis_conn.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/rng.h"
#include "http/resolve.h"

#define BACKOFF_MIN_MS 100
#define BACKOFF_MAX_MS 2000
#define AT_ONCE        4  /* up to so many under way each is written at once, more in batches */
#define DEAD_FACTOR    10 /* after so many times silence_ms a silent connection is given up */

typedef enum state { WAITING, RESOLVING, CONNECTING, READY } state;

/* What libuv polls for one context; freed when libuv has closed it. */
typedef struct plug {
    uv_poll_t poll;
    pl_redis_conn *conn; /* NULL: given up */
    int events;
} plug;

typedef struct hello {
    pl_redis_cmd cmd; /* first */
    pl_redis_conn *conn;
} hello;

struct pl_redis_conn {
    pl_redis_conn_options o;
    state state;
    bool silent;  /* READY, but down() was called: the server does not reply */
    bool overdue; /* a timer was due; once more before it counts, so that a loop which was busy
                     reads what has arrived */
    bool reading; /* replies are being handed out: `doomed` is freed after that */
    bool freed;
    int pins;
    int next_address;
    redisContext *ctx, *doomed;
    plug *plug;                 /* of ctx */
    pl_redis_cmd *first, *last; /* sent and not replied to */
    hello hello[3];             /* AUTH, SELECT, the caller's */
    uint32_t in_flight;         /* their number, without hellos */
    uint64_t heard_ns;          /* the last reply, or the first command after a pause */
    uint64_t backoff_ms;
    pl_rng rng;
    uint64_t ready_ns; /* READY since */
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

/* --- the context and its poll handle --- */

static void on_plug_closed(uv_handle_t *h)
{
    free(h->data);
}

static void close_context(pl_redis_conn *c)
{
    if (c->plug) {
        c->plug->conn = NULL;
        uv_poll_stop(&c->plug->poll);
        uv_close((uv_handle_t *)&c->plug->poll, on_plug_closed);
        c->plug = NULL;
    }
    if (c->ctx && c->reading)
        c->doomed = c->ctx;
    else if (c->ctx)
        redisFree(c->ctx);
    c->ctx = NULL;
}

static void reply_with_nothing(pl_redis_conn *c)
{
    pl_redis_cmd *cmd = c->first;
    c->first = c->last = NULL;
    c->in_flight = 0;
    for (pl_redis_cmd *next; cmd; cmd = next) {
        next = cmd->next;
        cmd->replied(cmd, NULL);
    }
}

void pl_redis_conn_drop(pl_redis_conn *c, const char *why)
{
    if (c->state == WAITING || c->freed)
        return;
    snprintf(c->why, sizeof c->why, "%s", why && *why ? why : "it closed the connection");
    for (char *p = c->why; *p; p++) /* it may be the server's text */
        if ((unsigned char)*p < ' ' || *p == 0x7f)
            *p = ' ';
    if (c->state == READY && pl_now_ns() - c->ready_ns > BACKOFF_MAX_MS * 1000000ull)
        c->backoff_ms = BACKOFF_MIN_MS; /* else it comes and goes */
    c->state = WAITING;
    c->silent = c->overdue = false;
    close_context(c);
    /* those that lost it at the same time do not come back at the same time */
    arm(c, c->backoff_ms - pl_rng_below(&c->rng, (uint32_t)c->backoff_ms / 2));
    c->backoff_ms = c->backoff_ms * 2 > BACKOFF_MAX_MS ? BACKOFF_MAX_MS : c->backoff_ms * 2;
    c->pins++; /* what is called may free */
    c->o.down(c->o.ctx, c->why);
    reply_with_nothing(c);
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

/* --- reading and writing --- */

static void on_poll(uv_poll_t *p, int status, int events);

static void poll_for(plug *l, int events)
{
    if (l->events == events)
        return;
    l->events = events;
    uv_poll_start(&l->poll, events, on_poll);
}

/* Hands out what has arrived. */
static void read_replies(pl_redis_conn *c)
{
    redisContext *ctx = c->ctx;
    c->pins++;
    c->reading = true;
    if (redisBufferRead(ctx) != REDIS_OK)
        pl_redis_conn_drop(c, ctx->errstr);
    while (c->ctx == ctx) {
        void *reply = NULL;
        if (redisReaderGetReply(ctx->reader, &reply) != REDIS_OK) {
            pl_redis_conn_drop(c, ctx->reader->errstr);
            break;
        }
        if (!reply)
            break;
        pl_redis_cmd *cmd = c->first;
        if (!cmd) {
            pl_redis_conn_drop(c, "it answers what it was not asked");
        } else {
            c->first = cmd->next;
            if (!c->first)
                c->last = NULL;
            if (c->state == READY) {
                c->in_flight--;
                heard(c);
            }
            cmd->replied(cmd, reply);
        }
        freeReplyObject(reply);
    }
    c->reading = false;
    if (c->doomed)
        redisFree(c->doomed);
    c->doomed = NULL;
    unpin(c);
}

static void write_commands(pl_redis_conn *c)
{
    int done = 0;
    if (redisBufferWrite(c->ctx, &done) != REDIS_OK)
        pl_redis_conn_drop(c, c->ctx->errstr);
    else if (done)
        poll_for(c->plug, UV_READABLE);
}

static void on_poll(uv_poll_t *p, int status, int events)
{
    plug *l = p->data;
    pl_redis_conn *c = l->conn;
    if (!c)
        return;
    if (status < 0 || c->state == CONNECTING) {
        int err = 0;
        socklen_t n = sizeof err;
        getsockopt(c->ctx->fd, SOL_SOCKET, SO_ERROR, &err, &n);
        if (err || status < 0) {
            if (c->resolver.n)
                c->next_address = (c->next_address + 1) % c->resolver.n;
            pl_redis_conn_drop(c, err ? strerror(err) : uv_strerror(status));
            return;
        }
    }
    c->pins++;
    if (events & UV_READABLE)
        read_replies(c);
    if (l->conn && (events & UV_WRITABLE))
        write_commands(c);
    unpin(c);
}

/* The command is hiredis's now and will be replied to; or nothing has happened. */
static bool take(pl_redis_conn *c, pl_redis_cmd *cmd, pl_str command)
{
    if (redisAppendFormattedCommand(c->ctx, command.p, command.n) != REDIS_OK)
        return false;
    cmd->next = NULL;
    *(c->last ? &c->last->next : &c->first) = cmd;
    c->last = cmd;
    int done = 0;
    if (c->state == READY && c->in_flight < AT_ONCE && c->plug->events == UV_READABLE &&
        redisBufferWrite(c->ctx, &done) == REDIS_OK && done)
        return true;
    poll_for(c->plug, UV_READABLE | UV_WRITABLE); /* an error is found from there */
    return true;
}

/* --- connecting --- */

static void on_hello(pl_redis_cmd *cmd, const redisReply *r)
{
    pl_redis_conn *c = ((hello *)cmd)->conn;
    if (!r)
        return;
    if (r->type == REDIS_REPLY_ERROR) {
        char why[200];
        snprintf(why, sizeof why, "it refuses: %.*s", (int)(r->len < 150 ? r->len : 150), r->str);
        pl_redis_conn_drop(c, why);
        return;
    }
    if (cmd != &c->hello[2].cmd)
        return; /* the last one says that all is well */
    if (r->type != REDIS_REPLY_ARRAY || r->elements < 6) {
        pl_redis_conn_drop(c, "it answers as no Redis does");
        return;
    }
    c->state = READY;
    c->ready_ns = pl_now_ns();
    c->overdue = false;
    pl_wheel_cancel(c->o.wheel, &c->timer);
    c->o.up(c->o.ctx);
}

static bool greet(pl_redis_conn *c, int i, pl_str command)
{
    c->hello[i] = (hello){.cmd = {.replied = on_hello}, .conn = c};
    return take(c, &c->hello[i].cmd, command);
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
        if (!err && !greet(c, 0, pl_buf_str(&b)))
            err = PL_ENOMEM;
        if (b.p)
            explicit_bzero(b.p, b.cap);
        b.n = 0;
    }
    if (!err && c->o.db) {
        snprintf(db, sizeof db, "%d", c->o.db);
        err = pl_buf_addf(&b, "*2\r\n$6\r\nSELECT\r\n");
        if (!err)
            err = add_word(&b, db);
        if (!err && !greet(c, 1, pl_buf_str(&b)))
            err = PL_ENOMEM;
    }
    if (!err && !greet(c, 2, c->o.hello))
        err = PL_ENOMEM;
    pl_buf_free(&b);
    return err;
}

static int plug_in(pl_redis_conn *c)
{
    plug *l = calloc(1, sizeof *l);
    if (!l || uv_poll_init(c->o.loop, &l->poll, c->ctx->fd) != 0) {
        free(l);
        return PL_ENOMEM;
    }
    l->poll.data = l;
    l->conn = c;
    c->plug = l;
    return 0;
}

static void open_socket(pl_redis_conn *c)
{
    c->state = CONNECTING;
    if (c->o.unix_path) {
        c->ctx = redisConnectUnixNonBlock(c->o.unix_path);
    } else {
        char text[64];
        const pl_address *a = &c->resolver.addresses[c->next_address % c->resolver.n];
        uv_ip_name(&a->any, text, sizeof text);
        c->ctx = redisConnectNonBlock(text, c->o.port);
    }
    if (c->ctx && c->ctx->err) {
        if (c->resolver.n)
            c->next_address = (c->next_address + 1) % c->resolver.n;
        pl_redis_conn_drop(c, c->ctx->errstr);
        return;
    }
    if (!c->ctx || plug_in(c) != 0 || log_in(c) != 0) {
        pl_redis_conn_drop(c, "out of memory");
        return;
    }
    if (!c->o.unix_path) {
        int on = 1;
        setsockopt(c->ctx->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    }
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
    c->rng.state = o->seed;
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
    if (!pl_redis_conn_up(c) || c->in_flight >= PL_REDIS_IN_FLIGHT_MAX || !take(c, cmd, command))
        return PL_EUNAVAILABLE;
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
    int done; /* what the last calls gave up (a lease) should still arrive: as much as goes at once
               */
    if (c->state == READY && c->ctx)
        redisBufferWrite(c->ctx, &done);
    close_context(c);
    reply_with_nothing(c);
    unpin(c);
}
