/* A scripted HTTP server inside the test process, for the tests of what speaks to engines: it
 * listens on a free port in the test's own loop, collects what each connection sends, and a
 * function of the test answers with raw bytes. Time for the code under test is the wheel's, moved
 * by hand: no test waits for a clock. Static functions: included by each test that needs it. */
#ifndef PEER_H
#define PEER_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <uv.h>

#include "base/wheel.h"

#define PEER_UNUSED __attribute__((unused))

typedef struct peer {
    uv_tcp_t tcp; /* first */
    struct world *world;
    char *got; /* NUL-terminated */
    int got_n;
    size_t got_cap;
    int number; /* 0 for the first connection */
    bool gone;  /* the client closed or reset it */
    bool closing;
} peer;

typedef struct world {
    uv_loop_t loop;
    pl_wheel wheel;
    uint64_t now_ms;
    uv_tcp_t listener;
    int port;
    int accepted, gone;
    peer *peers[32];
    void (*answer)(peer *p); /* called whenever p has got bytes */
    void *test;
} world;

static void peer_on_closed(uv_handle_t *h)
{
    (void)h; /* kept in world.peers until the end */
}

/* FIN. */
PEER_UNUSED static void peer_close(peer *p)
{
    if (!p->closing) {
        p->closing = true;
        uv_close((uv_handle_t *)&p->tcp, peer_on_closed);
    }
}

/* RST. */
PEER_UNUSED static void peer_reset(peer *p)
{
    if (!p->closing) {
        p->closing = true;
        assert_int_equal(uv_tcp_close_reset(&p->tcp, peer_on_closed), 0);
    }
}

static void peer_on_written(uv_write_t *req, int status)
{
    (void)status; /* the client may have left */
    free(req->data);
    free(req);
}

PEER_UNUSED static void peer_send_n(peer *p, const char *bytes, size_t n)
{
    uv_buf_t b = uv_buf_init((char *)(uintptr_t)bytes, (unsigned)n);
    int rc = uv_try_write((uv_stream_t *)&p->tcp, &b, 1);
    if (rc == (int)n)
        return;
    assert_true(rc >= 0 || rc == UV_EAGAIN);
    n -= rc > 0 ? (size_t)rc : 0;
    uv_write_t *req = malloc(sizeof *req);
    b = uv_buf_init(malloc(n), (unsigned)n);
    assert_true(req && b.base);
    memcpy(b.base, bytes + (rc > 0 ? rc : 0), n);
    req->data = b.base;
    assert_int_equal(uv_write(req, (uv_stream_t *)&p->tcp, &b, 1, peer_on_written), 0);
}

PEER_UNUSED static void peer_send(peer *p, const char *text)
{
    peer_send_n(p, text, strlen(text));
}

/* Forgets what was got: the next request starts clean. */
PEER_UNUSED static void peer_clear(peer *p)
{
    p->got_n = 0;
    p->got[0] = 0;
}

/* A whole request without a body is there. */
PEER_UNUSED static bool peer_has_head(const peer *p)
{
    return p->got && strstr(p->got, "\r\n\r\n");
}

static void peer_on_alloc(uv_handle_t *h, size_t suggested, uv_buf_t *buf)
{
    (void)h;
    (void)suggested;
    static char bytes[65536];
    *buf = uv_buf_init(bytes, sizeof bytes);
}

static void peer_on_read(uv_stream_t *s, ssize_t n, const uv_buf_t *buf)
{
    peer *p = (peer *)s;
    if (n < 0) {
        p->gone = true;
        p->world->gone++;
        peer_close(p);
        return;
    }
    size_t need = (size_t)p->got_n + (size_t)n + 1;
    if (need > p->got_cap) {
        p->got_cap = 2 * need; /* doubling: a body of many MiB comes in small reads */
        p->got = realloc(p->got, p->got_cap);
        assert_non_null(p->got);
    }
    memcpy(p->got + p->got_n, buf->base, (size_t)n);
    p->got_n += (int)n;
    p->got[p->got_n] = 0;
    if (p->world->answer)
        p->world->answer(p);
}

PEER_UNUSED static void peer_read(peer *p)
{
    assert_int_equal(uv_read_start((uv_stream_t *)&p->tcp, peer_on_alloc, peer_on_read), 0);
}

PEER_UNUSED static void peer_stop_reading(peer *p)
{
    uv_read_stop((uv_stream_t *)&p->tcp);
}

static void peer_on_connection(uv_stream_t *s, int status)
{
    world *w = s->data;
    assert_int_equal(status, 0);
    assert_true(w->accepted < 32);
    peer *p = calloc(1, sizeof *p);
    assert_non_null(p);
    p->world = w;
    p->number = w->accepted;
    w->peers[w->accepted++] = p;
    uv_tcp_init(&w->loop, &p->tcp);
    assert_int_equal(uv_accept(s, (uv_stream_t *)&p->tcp), 0);
    uv_tcp_nodelay(&p->tcp, 1);
    peer_read(p);
}

/* Has a port of 127.0.0.1 on which it does not listen yet: connects are refused. */
PEER_UNUSED static void world_open_closed(world *w)
{
    memset(w, 0, sizeof *w);
    assert_int_equal(uv_loop_init(&w->loop), 0);
    w->now_ms = 1000000;
    pl_wheel_init(&w->wheel, w->now_ms);
    struct sockaddr_in a;
    uv_ip4_addr("127.0.0.1", 0, &a);
    uv_tcp_init(&w->loop, &w->listener);
    w->listener.data = w;
    assert_int_equal(uv_tcp_bind(&w->listener, (struct sockaddr *)&a, 0), 0);
    int n = sizeof a;
    assert_int_equal(uv_tcp_getsockname(&w->listener, (struct sockaddr *)&a, &n), 0);
    w->port = ntohs(a.sin_port);
}

PEER_UNUSED static void world_listen(world *w)
{
    assert_int_equal(uv_listen((uv_stream_t *)&w->listener, 16, peer_on_connection), 0);
}

PEER_UNUSED static void world_open(world *w)
{
    world_open_closed(w);
    world_listen(w);
}

static void world_guard(uv_timer_t *t)
{
    *(bool *)t->data = true;
}

/* Runs the loop until the condition holds; ten seconds without that fail the test. */
#define world_wait(w, condition)                                                                   \
    do {                                                                                           \
        uv_timer_t guard_;                                                                         \
        bool late_ = false;                                                                        \
        uv_timer_init(&(w)->loop, &guard_);                                                        \
        guard_.data = &late_;                                                                      \
        uv_timer_start(&guard_, world_guard, 10000, 0);                                            \
        while (!(condition) && !late_)                                                             \
            uv_run(&(w)->loop, UV_RUN_ONCE);                                                       \
        uv_close((uv_handle_t *)&guard_, NULL);                                                    \
        uv_run(&(w)->loop, UV_RUN_NOWAIT);                                                         \
        if (late_)                                                                                 \
            fail_msg("not within ten seconds: %s", #condition);                                    \
    } while (0)

/* Until connection `i` is there and has sent a whole head. */
#define world_wait_head(w, i) world_wait(w, (w)->accepted > (i) && peer_has_head((w)->peers[i]))

/* A few turns of the loop, before something is asserted not to have happened. */
PEER_UNUSED static void world_settle(world *w)
{
    for (int i = 0; i < 20; i++)
        uv_run(&w->loop, UV_RUN_NOWAIT);
}

PEER_UNUSED static void world_advance(world *w, uint64_t ms)
{
    w->now_ms += ms;
    pl_wheel_advance(&w->wheel, w->now_ms);
    world_settle(w);
}

/* Ends it and asserts that nothing is left in the loop. */
PEER_UNUSED static void world_close(world *w)
{
    for (int i = 0; i < w->accepted; i++)
        peer_close(w->peers[i]);
    uv_close((uv_handle_t *)&w->listener, NULL);
    uv_run(&w->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&w->loop), 0);
    assert_int_equal(w->wheel.armed, 0);
    for (int i = 0; i < w->accepted; i++) {
        free(w->peers[i]->got);
        free(w->peers[i]);
    }
}

#endif
