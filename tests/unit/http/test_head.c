/* The reader and the head checks, fed whole, byte by byte and cut in two at every place. The
 * must-reject and must-accept cases are data: tests/http. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdlib.h>

#include "base/buf.h"
#include "http/head.h"

/* What a stream of messages came to: one line each, then the error if there was one. */
typedef struct run {
    pl_buf log, body;
    pl_reader r;
    int messages;
} run;

static void take_body(void *ctx, const char *p, size_t n)
{
    run *t = ctx;
    assert_int_equal(pl_buf_add(&t->body, p, n), 0);
}

static void log_message(run *t)
{
    const pl_head *h = &t->r.head;
    if (h->request)
        assert_int_equal(pl_buf_addf(&t->log, "%.*s [%.*s][%.*s] 1.%d",
                                     PL_FMT(pl_method_names[h->method]), PL_FMT(h->path),
                                     (int)h->query.n, h->query.n ? h->query.p : "", h->minor),
                         0);
    else
        assert_int_equal(pl_buf_addf(&t->log, "%d [%.*s] 1.%d", h->status, (int)h->reason.n,
                                     h->reason.n ? h->reason.p : "", h->minor),
                         0);
    for (int i = 0; i < h->headers_n; i++)
        assert_int_equal(pl_buf_addf(&t->log, " %.*s=%.*s", PL_FMT(h->headers[i].name),
                                     PL_FMT(h->headers[i].value)),
                         0);
    assert_int_equal(pl_buf_addf(&t->log, "%s%s%s%s <%.*s>\n", h->keep_alive ? " keep" : " close",
                                 h->chunked ? " chunked" : "", h->until_close ? " eof" : "",
                                 h->expect_continue ? " expect" : "", (int)t->body.n,
                                 t->body.n ? t->body.p : ""),
                     0);
    t->body.n = 0;
    t->messages++;
}

/* Each piece is fed from an exact heap copy, so that a read past it or a span left in it shows. */
static void feed_piece(run *t, const char *p, size_t n)
{
    char *copy = malloc(n ? n : 1);
    assert_non_null(copy);
    memcpy(copy, p, n);
    size_t used = 0;
    while (used < n && t->r.state != PL_READER_ERROR) {
        size_t k = pl_reader_feed(&t->r, copy + used, n - used);
        assert_true(k <= n - used);
        used += k;
        if (t->r.state == PL_READER_DONE) {
            log_message(t);
            pl_reader_next(&t->r);
        } else if (t->r.state != PL_READER_ERROR) {
            assert_true(k > 0);
        }
    }
    free(copy);
}

static void run_pieces(run *t, bool request, const pl_limits *l, bool head_req, pl_str in,
                       size_t cut, bool bytes)
{
    *t = (run){0};
    pl_reader_init(&t->r, request, l, NULL, take_body, t);
    t->r.no_body = head_req;
    if (bytes) {
        for (size_t i = 0; i < in.n; i++)
            feed_piece(t, in.p + i, 1);
    } else {
        feed_piece(t, in.p, cut);
        feed_piece(t, in.p + cut, in.n - cut);
    }
    if (t->r.state != PL_READER_ERROR && pl_reader_eof(&t->r) == PL_READER_DONE)
        log_message(t);
    if (t->r.state == PL_READER_ERROR) {
        assert_non_null(t->r.error);
        assert_int_equal(pl_buf_addf(&t->log, "error %d", t->r.status), 0);
    }
    assert_int_equal(pl_buf_add(&t->log, "", 1), 0);
    pl_reader_free(&t->r);
    pl_buf_free(&t->body);
}

static void expect_full(bool request, const pl_limits *l, bool head_req, pl_str in,
                        const char *want)
{
    run t;
    for (size_t cut = 0; cut <= in.n; cut = cut < 300 ? cut + 1 : cut + 997) {
        run_pieces(&t, request, l, head_req, in, cut, false);
        assert_string_equal(t.log.p, want);
        pl_buf_free(&t.log);
    }
    run_pieces(&t, request, l, head_req, in, 0, true);
    assert_string_equal(t.log.p, want);
    pl_buf_free(&t.log);
}

static void expect_req(const char *in, const char *want)
{
    expect_full(true, &pl_limits_default, false, pl_str_c(in), want);
}

static void expect_resp(const char *in, const char *want)
{
    expect_full(false, &pl_limits_default, false, pl_str_c(in), want);
}

static void requests_are_read(void **state)
{
    expect_req("GET /a/b?c=d&e HTTP/1.1\r\nHost: x\r\nX-Empty:\r\nX-Pad: \t v w \t\r\n\r\n",
               "GET [/a/b][c=d&e] 1.1 Host=x X-Empty= X-Pad=v w keep <>\n");
    expect_req(
        "POST /x HTTP/1.1\r\nHost: x:80\r\nContent-Length: 5\r\nExpect: 100-Continue\r\n\r\n"
        "helloGET / HTTP/1.0\r\n\r\n",
        "POST [/x][] 1.1 Host=x:80 Content-Length=5 Expect=100-Continue keep expect <hello>\n"
        "GET [/][] 1.0 close <>\n");
    expect_req("GET http://A.b:1?q HTTP/1.1\r\nHost: a.B:1\r\nConnection: x, CLOSE\r\n\r\n",
               "GET [/][q] 1.1 Host=a.B:1 Connection=x, CLOSE close <>\n");
    expect_req("OPTIONS * HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
               "OPTIONS [*][] 1.0 Connection=keep-alive keep <>\n");
    expect_req("\r\n\r\nDELETE / HTTP/1.1\r\nHost: [::1]:9\r\n\r\n",
               "DELETE [/][] 1.1 Host=[::1]:9 keep <>\n");
    expect_req("GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
               "GET /2 HTTP/1.1\r\nHost: x\r\n\r\n",
               "GET [/][] 1.1 Host=x Connection=Upgrade Upgrade=h2c keep <>\n"
               "GET [/2][] 1.1 Host=x keep <>\n");
}

static void chunked_requests_are_read(void **state)
{
    expect_req("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
               "3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nX-T: 1\r\nContent-Length: 9\r\n\r\n"
               "GET /n HTTP/1.1\r\nHost: x\r\n\r\n",
               "POST [/][] 1.1 Host=x Transfer-Encoding=chunked keep chunked <abc0123456789>\n"
               "GET [/n][] 1.1 Host=x keep <>\n");
    expect_req("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
               "POST [/][] 1.1 Host=x Transfer-Encoding=chunked keep chunked <>\n");
}

static void cut_off_requests_are_errors(void **state)
{
    expect_req("GET / HTTP/1.1\r\nHost: x\r\n", "error 400");
    expect_req("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nab", "error 400");
    expect_req("", "");
}

static void responses_are_read(void **state)
{
    expect_resp("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
                "HTTP/1.1 204 No Content\r\nContent-Length: 7\r\n\r\nHTTP/1.1 304\r\n\r\n"
                "HTTP/1.0 200 \r\n\r\nuntil the end",
                "100 [Continue] 1.1 keep <>\n200 [OK] 1.1 Content-Length=2 keep <hi>\n"
                "204 [No Content] 1.1 Content-Length=7 keep <>\n304 [] 1.1 keep <>\n"
                "200 [] 1.0 close eof <until the end>\n");
    expect_resp("HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
                "200 [OK] 1.1 Transfer-Encoding=Chunked keep chunked <a>\n");
    expect_full(false, &pl_limits_default, true,
                PL_STR("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n"),
                "200 [OK] 1.1 Content-Length=10 keep <>\n");
}

static void bad_responses_are_502(void **state)
{
    static const char *const bad[] = {
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nhi",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551615\r\n\r\n",
        "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/2.0 200 OK\r\n\r\n",
        "HTTP/1.1 20 OK\r\n\r\n",
        "HTTP/1.1 099 OK\r\n\r\n",
        "HTTP/1.1 999 OK\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\n\r\n",
        "HTTP/1.1  200 OK\r\n\r\n",
        "HTTP/1.1 200 OK\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n",
        "\r\nHTTP/1.1 200 OK\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: b\r\n\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab",
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        expect_resp(bad[i], "error 502");
}

static pl_buf repeat(const char *head, const char *unit, size_t times, const char *tail)
{
    pl_buf b = {0};
    assert_int_equal(pl_buf_add(&b, head, strlen(head)), 0);
    for (size_t i = 0; i < times; i++)
        assert_int_equal(pl_buf_add(&b, unit, strlen(unit)), 0);
    assert_int_equal(pl_buf_add(&b, tail, strlen(tail)), 0);
    return b;
}

static void expect_repeat(const pl_limits *l, const char *head, const char *unit, size_t times,
                          const char *tail, int status)
{
    pl_buf b = repeat(head, unit, times, tail);
    run t;
    const size_t cuts[] = {0, b.n / 2, b.n - 1, b.n};
    for (int i = 0; i < 5; i++) {
        run_pieces(&t, true, l, false, pl_buf_str(&b), i < 4 ? cuts[i] : 0, i == 4);
        assert_int_equal(t.r.status, status);
        assert_int_equal(t.messages, status ? 0 : 1);
        pl_buf_free(&t.log);
    }
    pl_buf_free(&b);
}

static void limits_hold(void **state)
{
    pl_limits l = {.head_bytes = 2000,
                   .headers = 10,
                   .target_bytes = 100,
                   .body_bytes = 50,
                   .chunk_overhead_bytes = 100,
                   .trailer_bytes = 60};
    expect_repeat(&l, "GET /", "a", 99, " HTTP/1.1\r\nHost: x\r\n\r\n", 0);
    expect_repeat(&l, "GET /", "a", 100, " HTTP/1.1\r\nHost: x\r\n\r\n", 414);
    expect_repeat(&l, "GET /", "a", 5000, "", 414);
    expect_repeat(&l, "GET / HTTP/1.1\r\nHost: x\r\n", "A: b\r\n", 9, "\r\n", 0);
    expect_repeat(&l, "GET / HTTP/1.1\r\nHost: x\r\n", "A: b\r\n", 10, "\r\n", 431);
    /* 30 bytes around the value */
    expect_repeat(&l, "GET / HTTP/1.1\r\nHost: x\r\nA:", "v", 2000 - 31, "\r\n\r\n", 0);
    expect_repeat(&l, "GET / HTTP/1.1\r\nHost: x\r\nA:", "v", 2001 - 31, "\r\n\r\n", 431);
    expect_repeat(&l, "GET / HTTP/1.1\r\nHost: x\r\nA:", "v", 5000, "", 431);
    expect_repeat(&l, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n", "v", 50, "", 0);
    expect_repeat(&l, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 51\r\n\r\n", "v", 51, "", 413);
#define CHUNKED "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    expect_repeat(&l, CHUNKED, "5\r\nabcde\r\n", 10, "0\r\n\r\n", 0);
    expect_repeat(&l, CHUNKED, "5\r\nabcde\r\n", 10, "1\r\na\r\n0\r\n\r\n", 413);
    expect_repeat(&l, CHUNKED "33\r\n", "v", 51, "\r\n0\r\n\r\n", 413);
    expect_repeat(&l, CHUNKED "fffffffffffffff0\r\n", "v", 3, "", 413);
    expect_repeat(&l, CHUNKED "1;x=", "yyyy", 20, "\r\na\r\n0\r\n\r\n", 0);
    expect_repeat(&l, CHUNKED "1;x=", "yyyy", 30, "\r\na\r\n0\r\n\r\n", 400);
    expect_repeat(&l, CHUNKED, "1\r\na\r\n", 40, "0\r\n\r\n", 400);
    expect_repeat(&l, CHUNKED "0\r\n", "T: v\r\n", 9, "\r\n", 0);
    expect_repeat(&l, CHUNKED "0\r\n", "T: v\r\n", 10, "\r\n", 431);
    /* below the first line's limit an endless first line cannot hide */
    expect_repeat(&pl_limits_default, "G", "E", 70000, "", 414);
    expect_repeat(&pl_limits_default, "GET / HTTP/1.1\r\nHost: x\r\nA: ", "v", 70000, "\r\n\r\n",
                  431);
}

static void head_stays_valid_while_the_body_comes(void **state)
{
    run t = {0};
    pl_reader_init(&t.r, true, &pl_limits_default, NULL, take_body, &t);
    char in[] = "POST /path HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody";
    size_t n = pl_reader_feed(&t.r, in, sizeof in - 1);
    assert_int_equal(n, sizeof in - 1 - 4);
    assert_int_equal(t.r.state, PL_READER_BODY);
    assert_int_equal(pl_reader_body_left(&t.r), 4);
    memset(in, '!', n);
    assert_memory_equal(t.r.head.path.p, "/path", 5);
    assert_memory_equal(pl_head_find(&t.r.head, PL_STR("host")).p, "x", 1);
    assert_null(pl_head_find(&t.r.head, PL_STR("absent")).p);
    assert_int_equal(pl_reader_feed(&t.r, in + n, 4), 4);
    assert_int_equal(t.r.state, PL_READER_DONE);
    assert_memory_equal(t.body.p, "body", 4);
    pl_reader_free(&t.r);
    pl_buf_free(&t.body);
}

static void headers_may_live_in_the_owners_arena(void **state)
{
    pl_arena a = PL_ARENA_INIT;
    run t = {0};
    pl_reader_init(&t.r, false, &pl_limits_default, &a, take_body, &t);
    pl_str in = PL_STR("HTTP/1.1 204 No Content\r\nA: b\r\n\r\n");
    assert_int_equal(pl_reader_feed(&t.r, in.p, in.n), in.n);
    assert_int_equal(t.r.state, PL_READER_DONE);
    assert_true(a.used_bytes > 0);
    assert_memory_equal(pl_head_find(&t.r.head, PL_STR("a")).p, "b", 1);
    pl_reader_free(&t.r);
    pl_arena_free(&a);
}

static void hop_by_hop_headers_are_known(void **state)
{
    const pl_str none = {NULL, 0};
    assert_true(pl_header_is_hop(PL_STR("Transfer-Encoding"), none));
    assert_true(pl_header_is_hop(PL_STR("CONTENT-LENGTH"), none));
    assert_true(pl_header_is_hop(PL_STR("keep-alive"), none));
    assert_false(pl_header_is_hop(PL_STR("content-type"), none));
    assert_false(pl_header_is_hop(PL_STR("x-a"), PL_STR("close")));
    assert_true(pl_header_is_hop(PL_STR("X-A"), PL_STR("close , x-a")));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(requests_are_read),
        cmocka_unit_test(chunked_requests_are_read),
        cmocka_unit_test(cut_off_requests_are_errors),
        cmocka_unit_test(responses_are_read),
        cmocka_unit_test(bad_responses_are_502),
        cmocka_unit_test(limits_hold),
        cmocka_unit_test(head_stays_valid_while_the_body_comes),
        cmocka_unit_test(headers_may_live_in_the_owners_arena),
        cmocka_unit_test(hop_by_hop_headers_are_known),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
