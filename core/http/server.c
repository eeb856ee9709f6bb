/* The server: listeners, accepting, draining, freeing. Called by whoever runs a loop (router,
 * admin, simulated engine) on that loop's thread. The server owns its listeners and connections;
 * its memory goes when libuv has closed the last handle. conn.c has the connections, exchange.c the
 * answers. */
#include "http/conn.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#define BACKLOG          1024
#define STARVED_RETRY_MS 100

void pl_server_options_default(pl_server_options *o)
{
    *o = (pl_server_options){
        .limits = pl_limits_default,
        .head_timeout_ms = 10000,
        .body_timeout_ms = 30000,
        .keep_alive_timeout_ms = 60000,
        .write_timeout_ms = 60000,
        .high_water_bytes = 256 * 1024,
        .low_water_bytes = 64 * 1024,
    };
}

pl_server *pl_server_new(uv_loop_t *loop, pl_wheel *wheel, const pl_server_options *o,
                         const pl_handlers *h, void *ctx)
{
    pl_server *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->read_buf = malloc(PL_CONN_READ_BYTES);
    if (!s->read_buf || uv_idle_init(loop, &s->idle) != 0) {
        free(s->read_buf);
        free(s);
        return NULL;
    }
    s->loop = loop;
    s->wheel = wheel;
    s->o = *o;
    s->stats = o->stats ? o->stats : &s->own_stats;
    s->h = *h;
    s->ctx = ctx;
    s->idle.data = s;
    s->handles = 1;
    return s;
}

const pl_server_stats *pl_server_stats_of(const pl_server *s)
{
    return s->stats;
}

/* --- accepting --- */

static void retry_starved(pl_timer *t);

static void accept_one(pl_listener *l)
{
    pl_server *s = l->s;
    pl_conn *c = pl_conn_new(s);
    if (!c) {
        /* libuv holds the connection and listens no more until it is taken */
        s->starved = l;
        pl_wheel_arm(s->wheel, &s->starved_timer, STARVED_RETRY_MS, retry_starved);
        return;
    }
    if (uv_accept((uv_stream_t *)&l->tcp, (uv_stream_t *)&c->tcp) != 0)
        pl_conn_close(c, false);
    else
        pl_conn_begin(c);
}

static void retry_starved(pl_timer *t)
{
    pl_server *s = (pl_server *)(void *)((char *)t - offsetof(pl_server, starved_timer));
    pl_listener *l = s->starved;
    s->starved = NULL;
    if (l)
        accept_one(l);
}

static void on_connection(uv_stream_t *stream, int status)
{
    if (status == 0)
        accept_one((pl_listener *)stream);
}

/* A bound socket, or a negative libuv error code. */
static int bound_socket(const struct sockaddr *addr, bool reuse_port)
{
    int fd = socket(addr->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return uv_translate_sys_error(errno);
    int on = 1, off = 0;
    socklen_t len =
        addr->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        (!reuse_port || setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on) == 0) &&
        (addr->sa_family != AF_INET6 ||
         setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0) &&
        bind(fd, addr, len) == 0)
        return fd;
    int rc = uv_translate_sys_error(errno);
    close(fd);
    return rc;
}

static void on_listener_closed(uv_handle_t *handle)
{
    pl_listener *l = (pl_listener *)handle;
    pl_server *s = l->s;
    free(l);
    s->handles--;
    pl_server_conn_closed(s);
}

int pl_server_listen(pl_server *s, const struct sockaddr *addr, bool reuse_port, int *bound_port)
{
    int fd = bound_socket(addr, reuse_port);
    if (fd < 0)
        return fd;
    pl_listener *l = calloc(1, sizeof *l);
    if (!l || uv_tcp_init(s->loop, &l->tcp) != 0) {
        free(l);
        close(fd);
        return UV_ENOMEM;
    }
    l->s = s;
    s->handles++;
    int rc = uv_tcp_open(&l->tcp, fd);
    if (rc != 0)
        close(fd);
    if (rc == 0)
        rc = uv_listen((uv_stream_t *)&l->tcp, BACKLOG, on_connection);
    struct sockaddr_storage name;
    int len = sizeof name;
    if (rc == 0)
        rc = uv_tcp_getsockname(&l->tcp, (struct sockaddr *)&name, &len);
    if (rc != 0) {
        uv_close((uv_handle_t *)&l->tcp, on_listener_closed);
        return rc;
    }
    if (bound_port)
        *bound_port = ntohs(name.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&name)->sin6_port
                                                       : ((struct sockaddr_in *)&name)->sin_port);
    l->next = s->listeners;
    s->listeners = l;
    return 0;
}

/* --- the end --- */

/* After a handle has been closed: is that the end of a drain, or of everything? */
void pl_server_conn_closed(pl_server *s)
{
    if (s->freeing) {
        if (s->handles == 0) {
            pl_buf_free(&s->head);
            free(s->read_buf);
            free(s);
        }
        return;
    }
    /* what is left is the idle handle */
    if (s->draining && s->handles == 1 && s->on_empty) {
        void (*on_empty)(void *ctx) = s->on_empty;
        s->on_empty = NULL;
        on_empty(s->ctx);
    }
}

/* Connections that the kernel has completed would be reset with the listener. */
static void accept_queued(pl_listener *l)
{
    pl_server *s = l->s;
    uv_os_fd_t fd;
    if (uv_fileno((uv_handle_t *)&l->tcp, &fd) != 0)
        return;
    if (s->starved == l) {
        s->starved = NULL;
        accept_one(l);
    }
    for (;;) {
        int client = accept4(fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (client < 0 && (errno == EINTR || errno == ECONNABORTED))
            continue;
        if (client < 0)
            return;
        pl_conn *c = pl_conn_new(s);
        if (c && uv_tcp_open(&c->tcp, client) == 0) {
            pl_conn_begin(c);
            continue;
        }
        close(client);
        if (c)
            pl_conn_close(c, false);
    }
}

static void close_listeners(pl_server *s, bool take_queued)
{
    while (s->listeners) {
        pl_listener *l = s->listeners;
        s->listeners = l->next;
        if (take_queued)
            accept_queued(l);
        uv_close((uv_handle_t *)&l->tcp, on_listener_closed);
    }
    s->starved = NULL;
    pl_wheel_cancel(s->wheel, &s->starved_timer);
}

/* A request may be on its way in: in the kernel's buffer, or the connection is so new that it had
 * no time to send one. */
static bool may_have_request(const pl_conn *c)
{
    uv_os_fd_t fd;
    char byte;
    return !c->served || (uv_fileno((const uv_handle_t *)&c->tcp, &fd) == 0 &&
                          recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0);
}

void pl_server_drain(pl_server *s, void (*on_empty)(void *ctx))
{
    if (s->draining)
        return;
    s->draining = true;
    s->on_empty = on_empty;
    close_listeners(s, true);
    for (pl_conn *c = s->conns, *next; c; c = next) {
        next = c->next;
        if (!pl_conn_idle(c))
            continue;
        if (may_have_request(c)) {
            c->alarm = PL_ALARM_NONE; /* settle then gives it a short while */
            pl_conn_settle(c);
        } else {
            pl_conn_close(c, false);
        }
    }
    if (s->handles > 1)
        return;
    /* nothing is left whose closing would tell: a handle just for that */
    pl_listener *l = calloc(1, sizeof *l);
    if (l && uv_tcp_init(s->loop, &l->tcp) == 0) {
        l->s = s;
        s->handles++;
        uv_close((uv_handle_t *)&l->tcp, on_listener_closed);
    } else {
        free(l);
        pl_server_conn_closed(s);
    }
}

void pl_server_close_all(pl_server *s)
{
    while (s->conns)
        pl_conn_close(s->conns, false);
}

static void on_idle_closed(uv_handle_t *handle)
{
    pl_server *s = handle->data;
    s->handles--;
    pl_server_conn_closed(s);
}

void pl_server_free(pl_server *s)
{
    if (!s || s->freeing)
        return;
    s->freeing = true;
    close_listeners(s, false);
    pl_server_close_all(s);
    uv_close((uv_handle_t *)&s->idle, on_idle_closed);
}
