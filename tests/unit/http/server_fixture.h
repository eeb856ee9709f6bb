/* A server on a loopback socket and clients in the same thread: the test runs the loop by hand and
 * moves the timing wheel's clock itself, so nothing here waits for real time to pass. What a
 * request gets is named by its path: /echo    200 with the request's body /early   404 from inside
 * on_head          /early-abort  cut from inside on_head /abort   cut from inside on_request /big
 * 200 with BIG_BYTES of a pattern /hold    nothing: the test answers `held` /start        200
 * chunked begun, then as /hold /inject  200 with a header value that tries to be two */
#ifndef SERVER_FIXTURE_H
#define SERVER_FIXTURE_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "http/server.h"

#define BIG_BYTES   (5 * 1024 * 1024)
#define DEADLINE_NS 20000000000u

typedef struct fixture {
    uv_loop_t loop;
    pl_wheel wheel;
    uint64_t now_ms;
    pl_server *server;
    pl_server_options options;
    pl_handlers handlers;
    int port;
    pl_exchange *held;
    int heads, requests, gone, drained, empty, rendered;
    bool inside; /* an exchange call is on the stack: no event may come */
    pl_buf rendered_path, last_body;
    char *big;
    _Atomic uint32_t connections;
    _Atomic uint64_t body_memory;
} fixture;

static inline bool path_is(const pl_exchange *x, const char *path)
{
    return pl_str_eq(x->head.path, pl_str_c(path));
}

static inline bool fx_on_head(void *ctx, pl_exchange *x)
{
    fixture *f = ctx;
    assert_false(f->inside);
    f->heads++;
    x->user = f;
    if (path_is(x, "/early")) {
        pl_exchange_respond(x, 404, NULL, 0, PL_STR("no such thing"));
        return false;
    }
    if (path_is(x, "/early-start")) {
        pl_exchange_start(x, 403, NULL, 0, UINT64_MAX);
        f->held = x;
        return false;
    }
    if (path_is(x, "/early-abort")) {
        pl_exchange_abort(x);
        return false;
    }
    return true;
}

static inline void fx_on_request(void *ctx, pl_exchange *x)
{
    fixture *f = ctx;
    assert_false(f->inside);
    f->requests++;
    f->last_body.n = 0;
    assert_int_equal(pl_buf_add(&f->last_body, x->body.p, x->body.n), 0);
    const pl_header type = {PL_STR("Content-Type"), PL_STR("text/plain")};
    if (path_is(x, "/abort")) {
        pl_exchange_abort(x);
    } else if (path_is(x, "/big")) {
        pl_exchange_respond(x, 200, &type, 1, (pl_str){f->big, BIG_BYTES});
    } else if (path_is(x, "/inject")) {
        const pl_header bad[2] = {{PL_STR("X-A"), PL_STR("1\r\nX-B: 2")}, type};
        pl_exchange_respond(x, 200, bad, 2, PL_STR("ok"));
    } else if (path_is(x, "/hold") || path_is(x, "/start")) {
        assert_null(f->held);
        f->held = x;
        if (path_is(x, "/start"))
            pl_exchange_start(x, 200, &type, 1, UINT64_MAX);
    } else {
        pl_exchange_respond(x, 200, &type, 1, x->body);
    }
}

static inline void fx_on_gone(void *ctx, pl_exchange *x)
{
    fixture *f = ctx;
    assert_false(f->inside);
    assert_ptr_equal(x->user, f); /* the owner has seen it in on_head */
    if (x == f->held)
        f->held = NULL;
    f->gone++;
}

static inline void fx_on_drain(void *ctx, pl_exchange *x)
{
    fixture *f = ctx;
    assert_false(f->inside);
    assert_ptr_equal(x, f->held);
    f->drained++;
}

static inline void fx_render(void *ctx, pl_str path, int status, const char *message, pl_buf *body)
{
    fixture *f = ctx;
    f->rendered = status;
    f->rendered_path.n = 0;
    if (path.p)
        assert_int_equal(pl_buf_add(&f->rendered_path, path.p, path.n), 0);
    assert_int_equal(pl_buf_addf(body, "ERR %d %s", status, message), 0);
}

static inline void fx_on_empty(void *ctx)
{
    fixture *f = ctx;
    assert_false(f->inside);
    f->empty++;
}

static inline void fx_listen(fixture *f)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    f->server = pl_server_new(&f->loop, &f->wheel, &f->options, &f->handlers, f);
    assert_non_null(f->server);
    assert_int_equal(pl_server_listen(f->server, (struct sockaddr *)&a, false, &f->port), 0);
    assert_true(f->port > 0);
}

/* Options may be changed between fx_init and fx_listen. */
static inline void fx_init(fixture *f)
{
    *f = (fixture){.now_ms = 1000};
    assert_int_equal(uv_loop_init(&f->loop), 0);
    pl_wheel_init(&f->wheel, f->now_ms);
    pl_server_options_default(&f->options);
    f->options.connections = &f->connections;
    f->options.max_connections = 100;
    f->options.body_memory = &f->body_memory;
    f->options.max_body_memory = 64u << 20;
    f->handlers = (pl_handlers){fx_on_head, fx_on_request, fx_on_gone, fx_on_drain, fx_render};
    f->big = malloc(BIG_BYTES);
    assert_non_null(f->big);
    for (size_t i = 0; i < BIG_BYTES; i++)
        f->big[i] = (char)('a' + (i * 7 + i / 4096) % 26);
}

static inline void fx_pump(fixture *f)
{
    for (int i = 0; i < 6; i++)
        uv_run(&f->loop, UV_RUN_NOWAIT);
}

/* Frees the server in whatever state it is in; every counter must come back to zero. */
static inline void fx_free(fixture *f)
{
    pl_server_free(f->server);
    while (uv_run(&f->loop, UV_RUN_DEFAULT))
        ;
    assert_int_equal(uv_loop_close(&f->loop), 0);
    assert_null(f->held);
    assert_int_equal(f->wheel.armed, 0);
    assert_int_equal(atomic_load(&f->connections), 0);
    assert_int_equal(atomic_load(&f->body_memory), 0);
    pl_buf_free(&f->rendered_path);
    pl_buf_free(&f->last_body);
    free(f->big);
}

/* Lets `ms` pass on the server's clock. */
static inline void fx_pass(fixture *f, uint64_t ms)
{
    fx_pump(f);
    f->now_ms += ms;
    pl_wheel_advance(&f->wheel, f->now_ms);
    fx_pump(f);
}

/* --- clients ------------------------------------------------------------------------------ */

static inline int fx_connect_buf(fixture *f, int rcvbuf)
{
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                            .sin_port = htons((uint16_t)f->port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(fd >= 0);
    if (rcvbuf)
        setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &rcvbuf, sizeof rcvbuf);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

static inline int fx_connect(fixture *f)
{
    int fd = fx_connect_buf(f, 0);
    fx_pump(f);
    return fd;
}

/* Sends all of it, running the server meanwhile; false when the server has closed. */
static inline bool fx_send_n(fixture *f, int fd, const char *p, size_t n)
{
    uint64_t until = pl_now_ns() + DEADLINE_NS;
    while (n) {
        ssize_t k = send(fd, p, n, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (k > 0) {
            p += k;
            n -= (size_t)k;
        } else if (errno != EAGAIN) {
            return false;
        }
        assert_true(pl_now_ns() < until);
        fx_pump(f);
    }
    return true;
}

static inline bool fx_send(fixture *f, int fd, const char *text)
{
    return fx_send_n(f, fd, text, strlen(text));
}

typedef enum fx_end { FX_OPEN, FX_EOF, FX_RESET } fx_end;

/* Reads what is there now. */
static inline fx_end fx_take(fixture *f, int fd, pl_buf *got)
{
    for (;;) {
        fx_pump(f);
        assert_int_equal(pl_buf_reserve(got, 65536), 0);
        ssize_t k = recv(fd, got->p + got->n, 65535, MSG_DONTWAIT);
        if (k > 0) {
            got->n += (size_t)k;
            got->p[got->n] = 0;
            continue;
        }
        got->p[got->n] = 0;
        if (k == 0)
            return FX_EOF;
        return errno == EAGAIN ? FX_OPEN : FX_RESET;
    }
}

/* Reads until the connection ends or, with `text`, until that has come. */
static inline fx_end fx_read(fixture *f, int fd, pl_buf *got, const char *text)
{
    uint64_t until = pl_now_ns() + DEADLINE_NS;
    for (;;) {
        fx_end end = fx_take(f, fd, got);
        if (end != FX_OPEN || (text && strstr(got->p, text)))
            return end;
        if (pl_now_ns() > until)
            fail_msg("nothing more came after: %.300s", got->p);
        struct pollfd p = {.fd = fd, .events = POLLIN};
        poll(&p, 1, 1);
    }
}

/* Sends, expects the answer to end with `tail`, and gives status and text. */
static inline void fx_ask(fixture *f, int fd, const char *request, const char *status,
                          const char *tail)
{
    pl_buf got = {0};
    assert_true(fx_send(f, fd, request));
    fx_read(f, fd, &got, tail);
    if (strncmp(got.p + 9, status, 3) != 0 || !pl_str_ends(pl_buf_str(&got), pl_str_c(tail)))
        fail_msg("wanted %s ... %s, got: %s", status, tail, got.p);
    pl_buf_free(&got);
}

#define GET(path) "GET " path " HTTP/1.1\r\nHost: x\r\n\r\n"
#define POST(path, length, body)                                                                   \
    "POST " path " HTTP/1.1\r\nHost: x\r\nContent-Length: " #length "\r\n\r\n" body

#define CHUNKED(path) "POST " path " HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"

/* --- the owner ----------------------------------------------------------------------------- */

/* The owner's calls, during which no event may come. */
#define CALL(f, call)                                                                              \
    do {                                                                                           \
        (f)->inside = true;                                                                        \
        call;                                                                                      \
        (f)->inside = false;                                                                       \
    } while (0)

static inline void start(fixture *f)
{
    fx_init(f);
    fx_listen(f);
}

static inline void answer_held(fixture *f, int status, pl_str body)
{
    pl_exchange *x = f->held;
    assert_non_null(x);
    f->held = NULL;
    CALL(f, pl_exchange_respond(x, status, NULL, 0, body));
}

static inline void write_held(fixture *f, const char *text)
{
    pl_str s = pl_str_c(text);
    CALL(f, pl_exchange_write(f->held, &s, 1));
}

static inline void end_held(fixture *f)
{
    pl_exchange *x = f->held;
    f->held = NULL;
    CALL(f, pl_exchange_end(x));
}

static inline void expect_text(pl_buf *got, const char *text)
{
    if (!strstr(got->p, text))
        fail_msg("no \"%s\" in: %.2000s", text, got->p);
}

static inline void expect_no_text(pl_buf *got, const char *text)
{
    if (strstr(got->p, text))
        fail_msg("\"%s\" in: %.2000s", text, got->p);
}

static inline int count_text(const pl_buf *got, const char *text)
{
    int n = 0;
    for (const char *p = got->p; (p = strstr(p, text)); p++)
        n++;
    return n;
}

#endif
