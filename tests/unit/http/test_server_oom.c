/* Allocation failures: one scenario over the server, run again and again with the n-th allocation
 * of the HTTP code failing, until none fails. Whatever happens to the connections concerned, the
 * server must answer the next one, tell owners what they must know, and leak nothing. The sources
 * are included so that their allocations go through here; fx_free checks the counters. */
#include "server_fixture.h"

static long countdown = -1; /* allocations until the one that fails; negative: none */

static bool fails_now(void)
{
    return countdown >= 0 && countdown-- == 0;
}

static void *shaky_malloc(size_t n)
{
    return fails_now() ? NULL : malloc(n);
}

static void *shaky_calloc(size_t n, size_t size)
{
    return fails_now() ? NULL : calloc(n, size);
}

static void *shaky_realloc(void *p, size_t n)
{
    return fails_now() ? NULL : realloc(p, n);
}

#define malloc(n)       shaky_malloc(n)
#define calloc(n, size) shaky_calloc(n, size)
#define realloc(p, n)   shaky_realloc(p, n)
#include "../../../core/base/buf.c"
#include "../../../core/http/reader.c"
#include "../../../core/http/head.c"
#include "../../../core/http/input.c"
#include "../../../core/http/conn.c"
#include "../../../core/http/exchange.c"
#include "../../../core/http/server.c"
#undef malloc
#undef calloc
#undef realloc

static bool plain_head(void *ctx, pl_exchange *x)
{
    fixture *f = ctx;
    x->user = f;
    return true;
}

static void plain_request(void *ctx, pl_exchange *x)
{
    fixture *f = ctx;
    if (path_is(x, "/stream")) {
        pl_exchange_start(x, 200, NULL, 0, UINT64_MAX);
        pl_str s = {f->big, BIG_BYTES};
        pl_exchange_write(x, &s, 1);
        f->held = x;
    } else {
        pl_exchange_respond(x, 200, NULL, 0, x->body);
    }
}

static void plain_gone(void *ctx, pl_exchange *x)
{
    fixture *f = ctx;
    f->gone++;
    if (f->held == x)
        f->held = NULL;
}

/* Sends in two pieces and takes what comes; anything may fail. */
static void client(fixture *f, const char *text, size_t cut)
{
    int fd = fx_connect_buf(f, 4096);
    size_t n = strlen(text);
    fx_pump(f);
    if (send(fd, text, cut, MSG_NOSIGNAL) > 0) {
        fx_pump(f);
        ssize_t k = send(fd, text + cut, n - cut, MSG_NOSIGNAL | MSG_DONTWAIT);
        (void)k;
    }
    fx_pass(f, 200);
    char some[4096];
    for (int i = 0; i < 10 && recv(fd, some, sizeof some, MSG_DONTWAIT) > 0; i++)
        fx_pump(f);
    if (f->held) {
        pl_str s = {f->big, 1000};
        pl_exchange_write(f->held, &s, 1);
    }
    fx_pump(f);
    if (f->held) {
        pl_exchange_end(f->held);
        f->held = NULL;
    }
    fx_pump(f);
    close(fd);
    fx_pump(f);
}

static void every_allocation_may_fail(void **state)
{
    long n = 0;
    bool failed = true;
    for (; failed; n++) {
        fixture f;
        fx_init(&f);
        f.handlers = (pl_handlers){plain_head, plain_request, plain_gone, NULL, NULL};
        fx_listen(&f);
        countdown = n;
        client(&f, GET("/a") POST("/b", 3, "abc") GET("/c"), 10);
        client(&f,
               "POST /d HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
               "5\r\nabcde\r\n0\r\n\r\n",
               60);
        client(&f, POST("/e", 300000, "abc"), 20);
        client(&f, "nonsense\r\n\r\n", 3);
        client(&f, GET("/stream") GET("/behind"), 12);
        failed = countdown < 0;
        countdown = -1;
        fx_pass(&f, 200);
        int fd = fx_connect(&f);
        fx_ask(&f, fd, POST("/echo", 2, "ok"), "200", "\r\n\r\nok");
        close(fd);
        fx_free(&f);
    }
    assert_true(n > 20); /* the scenario does allocate */
}

static void a_server_may_fail_to_start(void **state)
{
    for (long n = 0; n < 2; n++) {
        uv_loop_t loop;
        pl_wheel wheel;
        pl_server_options o;
        const pl_handlers h = {.on_request = plain_request};
        assert_int_equal(uv_loop_init(&loop), 0);
        pl_wheel_init(&wheel, 0);
        pl_server_options_default(&o);
        countdown = n;
        assert_null(pl_server_new(&loop, &wheel, &o, &h, NULL));
        countdown = -1;
        assert_int_equal(uv_loop_close(&loop), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_allocation_may_fail),
        cmocka_unit_test(a_server_may_fail_to_start),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
