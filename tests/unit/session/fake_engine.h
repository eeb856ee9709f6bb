/* An engine as far as sessions go, inside the test process: /open_session and /close_session on a
 * loopback socket in a loop of the test, with answers that the test sets. Used on its loop's thread
 * only. Static functions: included by each test that needs it. */
#ifndef FAKE_ENGINE_H
#define FAKE_ENGINE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <uv.h>

#include "base/rng.h"

typedef enum fake_answer {
    FAKE_OK,
    FAKE_400,
    FAKE_404,
    FAKE_500,
    FAKE_HOLD,    /* does it, and answers, when the test says fake_release */
    FAKE_SWALLOW, /* does it, never answers */
    FAKE_DEAF,    /* does nothing, never answers */
    FAKE_RESET,   /* does it and resets the connection */
    FAKE_WRONG,   /* open: does it and answers with another id */
    FAKE_ANSWERS
} fake_answer;

typedef struct fake_session {
    char name[300];
    bool streaming;
    double timeout;
} fake_session;

typedef struct fake_conn {
    uv_tcp_t tcp; /* first */
    struct fake *f;
    struct fake_conn *next;
    char got[4096];
    size_t n;
    bool closing;
    bool held; /* got has a whole request that waits */
} fake_conn;

typedef struct fake {
    uv_loop_t *loop;
    uv_tcp_t listener;
    int port;
    fake_conn *conns;
    fake_answer on_open, on_close;
    pl_rng *chaos; /* answers by chance, instead */
    fake_session *open;
    int open_n, open_cap;
    int opens, closes;                      /* requests */
    char last_open[1024], last_close[1024]; /* their bodies */
} fake;

static int fake_find(const fake *f, const char *name)
{
    for (int i = 0; i < f->open_n; i++)
        if (strcmp(f->open[i].name, name) == 0)
            return i;
    return -1;
}

static void fake_on_closed(uv_handle_t *h)
{
    fake_conn *c = (fake_conn *)h, **at = &c->f->conns;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    free(c);
}

static void fake_hang_up(fake_conn *c, bool reset)
{
    if (c->closing)
        return;
    c->closing = true;
    if (reset)
        uv_tcp_close_reset(&c->tcp, fake_on_closed);
    else
        uv_close((uv_handle_t *)&c->tcp, fake_on_closed);
}

static void fake_respond(fake_conn *c, int status, const char *body)
{
    char bytes[1024];
    int n = snprintf(bytes, sizeof bytes, "HTTP/1.1 %d X\r\nContent-Length: %zu\r\n\r\n%s", status,
                     strlen(body), body);
    uv_buf_t b = uv_buf_init(bytes, (unsigned)n);
    if (!c->closing)
        uv_try_write((uv_stream_t *)&c->tcp, &b, 1); /* small: it fits, or the peer has left */
}

static void fake_member(const char *body, const char *key, char *to, size_t cap)
{
    const char *at = strstr(body, key);
    assert_non_null(at);
    at += strlen(key);
    size_t n = strcspn(at, "\",}");
    assert_true(n < cap);
    memcpy(to, at, n);
    to[n] = 0;
}

static void fake_do_open(fake *f, const char *body, char *name)
{
    char text[64];
    fake_member(body, "\"session_id\":\"", name, 300);
    assert_int_equal(fake_find(f, name), -1); /* a name is never used twice */
    if (f->open_n == f->open_cap) {
        f->open_cap = f->open_cap ? 2 * f->open_cap : 16;
        f->open = realloc(f->open, (size_t)f->open_cap * sizeof *f->open);
        assert_non_null(f->open);
    }
    fake_session *s = &f->open[f->open_n++];
    snprintf(s->name, sizeof s->name, "%s", name);
    fake_member(body, "\"streaming\":", text, sizeof text);
    s->streaming = strcmp(text, "true") == 0;
    fake_member(body, "\"timeout\":", text, sizeof text);
    s->timeout = atof(text);
}

static void fake_do_close(fake *f, const char *body)
{
    char name[300];
    fake_member(body, "\"session_id\":\"", name, sizeof name);
    int i = fake_find(f, name);
    if (i >= 0)
        f->open[i] = f->open[--f->open_n];
}

static void fake_serve(fake_conn *c, const char *body, bool open, fake_answer how)
{
    fake *f = c->f;
    char name[300] = "", text[310];
    if (how == FAKE_400 || how == FAKE_404 || how == FAKE_500) {
        fake_respond(c,
                     how == FAKE_400   ? 400
                     : how == FAKE_404 ? 404
                                       : 500,
                     "{\"error\":{\"message\":\"no\"}}");
        return;
    }
    if (how == FAKE_DEAF)
        return;
    if (open)
        fake_do_open(f, body, name);
    else
        fake_do_close(f, body);
    if (how == FAKE_RESET)
        fake_hang_up(c, true);
    else if (how == FAKE_WRONG && open)
        fake_respond(c, 200, "\"other\"");
    else if (how != FAKE_SWALLOW) {
        snprintf(text, sizeof text, "\"%s\"", name);
        fake_respond(c, 200, open ? text : "");
    }
}

static void fake_request(fake_conn *c, fake_answer forced, bool release)
{
    fake *f = c->f;
    char *head_end = strstr(c->got, "\r\n\r\n");
    if (!head_end)
        return;
    const char *length = strstr(c->got, "Content-Length: ");
    assert_true(length && length < head_end);
    size_t head = (size_t)(head_end - c->got) + 4, body_n = (size_t)atoi(length + 16);
    if (c->n < head + body_n)
        return;
    assert_int_equal(c->n, head + body_n); /* one at a time */
    bool open = strncmp(c->got, "POST /open_session HTTP/1.1\r\n", 29) == 0;
    assert_true(open || strncmp(c->got, "POST /close_session HTTP/1.1\r\n", 30) == 0);
    char body[1024];
    snprintf(body, sizeof body, "%.*s", (int)body_n, c->got + head);
    fake_answer how = release ? forced : open ? f->on_open : f->on_close;
    if (!release) {
        open ? f->opens++ : f->closes++;
        snprintf(open ? f->last_open : f->last_close, sizeof f->last_open, "%s", body);
        if (f->chaos && pl_rng_below(f->chaos, 4) == 0)
            how = (fake_answer)pl_rng_below(f->chaos, FAKE_ANSWERS);
        if (f->chaos && !open && how == FAKE_404)
            how = FAKE_500; /* to a close it would say that there are no sessions here */
    }
    if (how == FAKE_HOLD) {
        c->held = true;
        return;
    }
    c->held = false;
    c->n = 0;
    c->got[0] = 0;
    fake_serve(c, body, open, how);
}

/* What is held is done and answered, also when who asked has left. */
static __attribute__((unused)) void fake_release(fake *f)
{
    for (fake_conn *c = f->conns, *next; c; c = next) {
        next = c->next;
        if (c->held)
            fake_request(c, FAKE_OK, true);
    }
}

static __attribute__((unused)) int fake_held(const fake *f)
{
    int n = 0;
    for (fake_conn *c = f->conns; c; c = c->next)
        n += c->held;
    return n;
}

static void fake_on_alloc(uv_handle_t *h, size_t suggested, uv_buf_t *buf)
{
    fake_conn *c = (fake_conn *)h;
    (void)suggested;
    *buf = uv_buf_init(c->got + c->n, (unsigned)(sizeof c->got - 1 - c->n));
}

static void fake_on_read(uv_stream_t *s, ssize_t n, const uv_buf_t *buf)
{
    fake_conn *c = (fake_conn *)s;
    (void)buf;
    if (n < 0) {
        if (!c->held) /* a held request lands nonetheless */
            fake_hang_up(c, false);
        else
            uv_read_stop(s);
        return;
    }
    c->n += (size_t)n;
    c->got[c->n] = 0;
    fake_request(c, FAKE_OK, false);
}

static void fake_on_connection(uv_stream_t *s, int status)
{
    fake *f = s->data;
    fake_conn *c = calloc(1, sizeof *c);
    assert_true(status == 0 && c);
    c->f = f;
    c->next = f->conns;
    f->conns = c;
    uv_tcp_init(f->loop, &c->tcp);
    assert_int_equal(uv_accept(s, (uv_stream_t *)&c->tcp), 0);
    uv_tcp_nodelay(&c->tcp, 1);
    assert_int_equal(uv_read_start((uv_stream_t *)&c->tcp, fake_on_alloc, fake_on_read), 0);
}

/* listening: false: connects are refused. */
static void fake_start(fake *f, uv_loop_t *loop, bool listening)
{
    struct sockaddr_in a;
    int n = sizeof a;
    memset(f, 0, sizeof *f);
    f->loop = loop;
    uv_ip4_addr("127.0.0.1", 0, &a);
    uv_tcp_init(loop, &f->listener);
    f->listener.data = f;
    assert_int_equal(uv_tcp_bind(&f->listener, (struct sockaddr *)&a, 0), 0);
    assert_int_equal(uv_tcp_getsockname(&f->listener, (struct sockaddr *)&a, &n), 0);
    f->port = ntohs(a.sin_port);
    if (listening)
        assert_int_equal(uv_listen((uv_stream_t *)&f->listener, 64, fake_on_connection), 0);
}

/* The memory is good after the loop's next turns; then fake_free. */
static void fake_stop(fake *f)
{
    uv_close((uv_handle_t *)&f->listener, NULL);
    for (fake_conn *c = f->conns; c; c = c->next)
        fake_hang_up(c, false);
}

static void fake_free(fake *f)
{
    free(f->open);
}

#endif
