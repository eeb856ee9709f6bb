/* The server over real sockets: what clients get. Timeouts, clients that leave, limits and the end
 * of the server are in test_server_ends.c. */
#include "server_fixture.h"

static void keep_alive_and_echo(void **state)
{
    fixture f;
    start(&f);
    int fd = fx_connect(&f);
    pl_buf got = {0};
    fx_send(&f, fd, POST("/echo", 5, "hello"));
    fx_read(&f, fd, &got, "hello");
    assert_memory_equal(got.p, "HTTP/1.1 200 OK\r\n", 17);
    expect_text(&got, "\r\nContent-Type: text/plain\r\n");
    expect_text(&got, "\r\nContent-Length: 5\r\n");
    expect_text(&got, "\r\nDate: ");
    expect_text(&got, " GMT\r\n");
    expect_no_text(&got, "Connection:");
    fx_ask(&f, fd, POST("/echo", 3, "abc"), "200", "\r\n\r\nabc");
    fx_ask(&f, fd, CHUNKED("/echo") "2\r\nch\r\n4\r\nunks\r\n0\r\nT: 1\r\n\r\n", "200",
           "\r\n\r\nchunks");
    fx_ask(&f, fd, GET("/echo"), "200", "Content-Length: 0\r\n\r\n");
    const pl_server_stats *s = pl_server_stats_of(f.server);
    assert_int_equal(s->accepted, 1);
    assert_int_equal(s->requests, 4);
    assert_int_equal(s->open, 1);
    assert_int_equal(s->trailers_dropped, 1);
    assert_int_equal(s->bad_requests, 0);
    close(fd);
    fx_pump(&f);
    assert_int_equal(s->open, 0);
    assert_int_equal(f.gone, 0);
    pl_buf_free(&got);
    fx_free(&f);
}

static void connection_close_is_said_and_done(void **state)
{
    fixture f;
    start(&f);
    int fd = fx_connect(&f);
    pl_buf got = {0};
    fx_send(&f, fd, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" GET("/echo"));
    assert_int_equal(fx_read(&f, fd, &got, NULL), FX_EOF);
    expect_text(&got, "\r\nConnection: close\r\n");
    assert_int_equal(count_text(&got, "HTTP/1.1"), 1);
    assert_int_equal(f.requests, 1);
    close(fd);
    pl_buf_free(&got);
    fx_free(&f);
}

static void http_1_0_clients(void **state)
{
    fixture f;
    start(&f);
    pl_buf got = {0};
    int fd = fx_connect(&f);
    fx_ask(&f, fd, "POST /echo HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\na",
           "200", "Connection: keep-alive\r\n\r\na");
    fx_send(&f, fd, "GET /start HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
    write_held(&f, "until ");
    write_held(&f, "close");
    end_held(&f);
    assert_int_equal(fx_read(&f, fd, &got, NULL), FX_EOF);
    expect_text(&got, "Connection: close\r\n\r\nuntil close");
    expect_no_text(&got, "Transfer-Encoding");
    close(fd);

    /* a body that ends with the connection must not end well when it is cut */
    got.n = 0;
    fd = fx_connect(&f);
    fx_send(&f, fd, "GET /start HTTP/1.0\r\n\r\n");
    write_held(&f, "half");
    fx_read(&f, fd, &got, "half");
    pl_exchange *x = f.held;
    f.held = NULL;
    CALL(&f, pl_exchange_abort(x));
    assert_int_equal(fx_read(&f, fd, &got, NULL), FX_RESET);
    close(fd);
    pl_buf_free(&got);
    fx_free(&f);
}

static void head_has_headers_only(void **state)
{
    fixture f;
    start(&f);
    int fd = fx_connect(&f);
    fx_ask(&f, fd, "HEAD /big HTTP/1.1\r\nHost: x\r\n\r\n", "200",
           "Content-Length: 5242880\r\n\r\n");
    pl_buf got = {0};
    fx_send(&f, fd, "HEAD /start HTTP/1.1\r\nHost: x\r\n\r\n");
    write_held(&f, "never seen");
    end_held(&f);
    fx_read(&f, fd, &got, "\r\n\r\n");
    expect_text(&got, "Transfer-Encoding: chunked\r\n\r\n");
    assert_true(pl_str_ends(pl_buf_str(&got), PL_STR("\r\n\r\n")));
    fx_ask(&f, fd, POST("/echo", 2, "ok"), "200", "\r\n\r\nok");
    /* no content: neither length nor body */
    got.n = 0;
    fx_send(&f, fd, GET("/hold"));
    answer_held(&f, 204, (pl_str){NULL, 0});
    fx_read(&f, fd, &got, "\r\n\r\n");
    expect_text(&got, "HTTP/1.1 204 No Content\r\n");
    expect_no_text(&got, "Content-Length");
    expect_no_text(&got, "Transfer-Encoding");
    close(fd);
    pl_buf_free(&got);
    fx_free(&f);
}

static void streams_are_chunked(void **state)
{
    fixture f;
    start(&f);
    int fd = fx_connect(&f);
    pl_buf got = {0};
    fx_send(&f, fd, GET("/start"));
    assert_non_null(f.held);
    assert_true(pl_exchange_started(f.held));
    fx_read(&f, fd, &got, "\r\n\r\n"); /* the head comes although no body has followed */
    expect_text(&got, "\r\nTransfer-Encoding: chunked\r\n");
    got.n = 0;
    pl_str slices[70];
    for (int i = 0; i < 70; i++)
        slices[i] = i % 2 ? PL_STR("") : PL_STR("ab");
    CALL(&f, pl_exchange_write(f.held, slices, 3));
    write_held(&f, "");
    write_held(&f, "0123456789abcdef0");
    CALL(&f, pl_exchange_write(f.held, slices, 70));
    end_held(&f);
    fx_read(&f, fd, &got, "\r\n0\r\n\r\n");
    assert_int_equal(strncmp(got.p, "4\r\nabab\r\n11\r\n0123456789abcdef0\r\n3c\r\nabab", 40), 0);
    assert_int_equal(count_text(&got, "ab"), 2 + 1 + 35);
    fx_ask(&f, fd, POST("/echo", 2, "ok"), "200", "\r\n\r\nok");
    /* ended with a close on the way */
    got.n = 0;
    fx_send(&f, fd, GET("/start"));
    write_held(&f, "x");
    pl_exchange *x = f.held;
    f.held = NULL;
    CALL(&f, pl_exchange_end_close(x));
    assert_int_equal(fx_read(&f, fd, &got, NULL), FX_EOF);
    expect_text(&got, "1\r\nx\r\n0\r\n\r\n");
    close(fd);
    pl_buf_free(&got);
    fx_free(&f);
}

static void a_length_that_is_not_kept(void **state)
{
    fixture f;
    start(&f);
    int fd = fx_connect(&f);
    pl_buf got = {0};
    fx_send(&f, fd, GET("/hold"));
    CALL(&f, pl_exchange_start(f.held, 200, NULL, 0, 4));
    write_held(&f, "ab");
    write_held(&f, "cdef");
    end_held(&f);
    fx_read(&f, fd, &got, "cd");
    assert_true(pl_str_ends(pl_buf_str(&got), PL_STR("\r\n\r\nabcd")));
    fx_ask(&f, fd, POST("/echo", 2, "ok"), "200", "\r\n\r\nok");
    got.n = 0;
    fx_send(&f, fd, GET("/hold"));
    CALL(&f, pl_exchange_start(f.held, 200, NULL, 0, 4));
    write_held(&f, "ab");
    end_held(&f);
    assert_int_equal(fx_read(&f, fd, &got, NULL), FX_EOF);
    expect_text(&got, "Content-Length: 4\r\n");
    close(fd);
    pl_buf_free(&got);
    fx_free(&f);
}

static void pipelined_requests_wait_their_turn(void **state)
{
    fixture f;
    start(&f);
    int fd = fx_connect(&f);
    pl_buf got = {0};
    fx_send(&f, fd,
            POST("/echo", 1, "1") GET("/hold") POST("/echo", 1, "3")
                CHUNKED("/echo") "1\r\n4\r\n0");
    fx_send(&f, fd, "\r\n\r\n" POST("/echo", 1, "5"));
    fx_read(&f, fd, &got, "\r\n\r\n1");
    assert_int_equal(fx_take(&f, fd, &got), FX_OPEN);
    assert_int_equal(count_text(&got, "HTTP/1.1 200"), 1);
    answer_held(&f, 200, PL_STR("2"));
    assert_int_equal(f.requests, 2); /* the third is not begun inside the owner's call */
    fx_read(&f, fd, &got, "\r\n\r\n5");
    const char *p = got.p;
    for (int i = 1; i <= 5; i++) {
        const char mark[] = {'\r', '\n', '\r', '\n', (char)('0' + i), 0};
        p = strstr(p, mark);
        assert_non_null(p);
    }
    close(fd);
    pl_buf_free(&got);
    fx_free(&f);
}

static void pipelining_is_bounded(void **state)
{
    fixture f;
    start(&f);
    int fd = fx_connect(&f);
    int small = 4096;
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    fx_send(&f, fd, GET("/hold"));
    /* the server stops reading: at last the sockets are full */
    const char one[] = GET("/echo");
    const size_t size = sizeof one - 1;
    size_t sent = 0, stuck = 0;
    while (stuck < 50) {
        ssize_t k = send(fd, one + sent % size, size - sent % size, MSG_DONTWAIT);
        if (k > 0) {
            sent += (size_t)k;
            stuck = 0;
        } else {
            stuck++;
        }
        fx_pump(&f);
        assert_true(sent < 64u << 20);
    }
    assert_int_equal(f.requests, 1);
    answer_held(&f, 200, PL_STR("x"));
    /* complete the request that was cut, then all are answered */
    if (sent % size)
        fx_send_n(&f, fd, one + sent % size, size - sent % size);
    size_t want = 1 + (sent + size - 1) / size;
    pl_buf got = {0};
    uint64_t until = pl_now_ns() + DEADLINE_NS;
    while ((size_t)f.requests < want && pl_now_ns() < until)
        assert_int_equal(fx_take(&f, fd, &got), FX_OPEN);
    assert_int_equal(fx_take(&f, fd, &got), FX_OPEN);
    assert_int_equal(count_text(&got, "HTTP/1.1 200"), want);
    assert_int_equal(f.requests, want);
    close(fd);
    pl_buf_free(&got);
    fx_free(&f);
}

static void answers_not_taken_stop_pipelined_requests(void **state)
{
    fixture f;
    start(&f);
    int fd = fx_connect_buf(&f, 4096);
    for (int i = 0; i < 20; i++)
        fx_send(&f, fd, GET("/big"));
    fx_pump(&f);
    assert_true(f.requests <= 2); /* each leaves 5 MiB behind */
    pl_buf got = {0};
    uint64_t bytes = 0;
    while (bytes < 20ull * BIG_BYTES) {
        got.n = 0;
        assert_int_equal(fx_take(&f, fd, &got), FX_OPEN);
        bytes += got.n;
    }
    assert_int_equal(f.requests, 20);
    close(fd);
    pl_buf_free(&got);
    fx_free(&f);
}

static void big_bodies_both_ways(void **state)
{
    fixture f;
    start(&f);
    int fd = fx_connect(&f);
    pl_buf got = {0};
    /* a request right behind the body, whose first byte falls into the same read */
    fx_send(&f, fd, POST("/hold", 5242880, ""));
    fx_send_n(&f, fd, f.big, BIG_BYTES - 3);
    assert_null(f.held);
    char tail[64];
    memcpy(tail, f.big + BIG_BYTES - 3, 3);
    memcpy(tail + 3, GET("/echo"), sizeof GET("/echo"));
    fx_send(&f, fd, tail);
    assert_non_null(f.held);
    assert_int_equal(f.last_body.n, BIG_BYTES);
    assert_memory_equal(f.last_body.p, f.big, BIG_BYTES);
    assert_int_equal(f.held->body.n, BIG_BYTES);
    assert_true(atomic_load(&f.body_memory) >= BIG_BYTES);
    CALL(&f, pl_exchange_release_body(f.held));
    assert_int_equal(atomic_load(&f.body_memory), 0);
    assert_int_equal(f.held->body.n, 0);
    answer_held(&f, 200, (pl_str){f.big, BIG_BYTES});
    fx_read(&f, fd, &got, "Content-Length: 0\r\n\r\n");
    char *body = strstr(got.p, "\r\n\r\n");
    assert_memory_equal(body + 4, f.big, BIG_BYTES);
    assert_int_equal(f.requests, 2);
    close(fd);
    pl_buf_free(&got);
    fx_free(&f);
}

static void expectations(void **state)
{
    fixture f;
    start(&f);
    int fd = fx_connect(&f);
    pl_buf got = {0};
#define EXPECT(path, length)                                                                       \
    "POST " path " HTTP/1.1\r\nHost: x\r\nContent-Length: " #length                                \
    "\r\nExpect: 100-continue\r\n\r\n"
    fx_send(&f, fd, EXPECT("/echo", 2));
    fx_read(&f, fd, &got, "\r\n\r\n");
    assert_string_equal(got.p, "HTTP/1.1 100 Continue\r\n\r\n");
    fx_ask(&f, fd, "ok", "200", "\r\n\r\nok");
    /* a client that did not wait gets no 100 */
    fx_ask(&f, fd, EXPECT("/echo", 2) "ok", "200", "\r\n\r\nok");
    /* answered before: no 100, and nobody knows whether the body will come: closed */
    got.n = 0;
    fx_send(&f, fd, EXPECT("/early", 2));
    assert_int_equal(fx_read(&f, fd, &got, NULL), FX_EOF);
    expect_no_text(&got, "100 Continue");
    expect_text(&got, "HTTP/1.1 404 Not Found\r\n");
    expect_text(&got, "\r\nConnection: close\r\n");
    close(fd);
    pl_buf_free(&got);
    fx_free(&f);
}

static void early_answers(void **state)
{
    fixture f;
    start(&f);
    int fd = fx_connect(&f);
    pl_buf got = {0};
    /* a small body is dropped and the connection stays */
    fx_ask(&f, fd, POST("/early", 9, "part "), "404", "no such thing");
    fx_ask(&f, fd, "rest" POST("/echo", 2, "ok"), "200", "\r\n\r\nok");
    fx_ask(&f, fd, GET("/early"), "404", "no such thing");
    /* a big one is not waited for, yet the client that sends it can read the answer */
    char *all = malloc(600000);
    assert_non_null(all);
    memset(all, 'b', 600000);
    memcpy(all, POST("/early", 700000, ""), sizeof POST("/early", 700000, "") - 1);
    ssize_t sent = send(fd, all, 600000, MSG_DONTWAIT); /* most of it is unread when answered */
    assert_true(sent > 100000);
    free(all);
    assert_int_equal(fx_read(&f, fd, &got, NULL), FX_EOF);
    expect_text(&got, "Connection: close\r\n\r\nno such thing");
    close(fd);
    got.n = 0;
    fd = fx_connect(&f);
    fx_send(&f, fd, CHUNKED("/early") "5\r\nhello\r\n");
    assert_int_equal(fx_read(&f, fd, &got, NULL), FX_EOF);
    expect_text(&got, "Connection: close\r\n\r\nno such thing");
    close(fd);
    assert_int_equal(f.gone, 0);
    assert_int_equal(f.requests, 1);
    /* begun early, ended after the body has come: on_request is not for it */
    got.n = 0;
    fd = fx_connect(&f);
    fx_send(&f, fd, POST("/early-start", 5, "abc"));
    write_held(&f, "no");
    fx_send(&f, fd, "de" POST("/echo", 2, "ok"));
    end_held(&f);
    fx_read(&f, fd, &got, "\r\n\r\nok");
    expect_text(&got, "HTTP/1.1 403 Forbidden\r\n");
    expect_text(&got, "2\r\nno\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n");
    assert_int_equal(f.requests, 2);
    close(fd);
    pl_buf_free(&got);
    fx_free(&f);
}

static void errors_are_rendered_by_the_owner(void **state)
{
    fixture f;
    fx_init(&f);
    f.options.limits.body_bytes = 1000;
    fx_listen(&f);
    pl_buf got = {0};
    static const struct {
        const char *text, *status, *path;
        int gone;
    } cases[] = {
        {"nonsense\r\n\r\n", "400", "", 0},
        {"GET /p?q HTTP/1.1\r\n\r\n", "400", "/p", 0},
        {POST("/p", 1001, ""), "413", "/p", 0},
        {CHUNKED("/p") "3e9\r\n", "413", "/p", 1}, /* the owner has seen its head */
        {CHUNKED("/p") "x", "400", "/p", 1},
        {"TRACE / HTTP/1.1\r\nHost: x\r\n\r\n", "501", "", 0},
        {"GET / HTTP/1.1\r\nHost: x\r\nExpect: gold\r\n\r\n", "417", "/", 0},
    };
    int gone = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int fd = fx_connect(&f);
        /* a good request first, so that nothing of it may show in the error */
        fx_ask(&f, fd, POST("/good", 1, "a"), "200", "\r\n\r\na");
        got.n = 0;
        fx_send(&f, fd, cases[i].text);
        fx_send_n(&f, fd, f.big, 100000);
        assert_int_equal(fx_read(&f, fd, &got, NULL), FX_EOF);
        assert_memory_equal(got.p + 9, cases[i].status, 3);
        expect_text(&got, "\r\nConnection: close\r\n");
        char body[16];
        snprintf(body, sizeof body, "\r\n\r\nERR %s ", cases[i].status);
        expect_text(&got, body);
        assert_int_equal(f.rendered, atoi(cases[i].status));
        assert_true(pl_str_eq(pl_buf_str(&f.rendered_path), pl_str_c(cases[i].path)));
        gone += cases[i].gone;
        assert_int_equal(f.gone, gone);
        close(fd);
    }
    assert_int_equal(pl_server_stats_of(f.server)->bad_requests, 7);
    fx_free(&f);

    fx_init(&f);
    f.handlers = (pl_handlers){.on_request = fx_on_request};
    fx_listen(&f);
    got.n = 0;
    int fd = fx_connect(&f);
    fx_send(&f, fd, "GET / HTTP/3.0\r\n\r\n");
    assert_int_equal(fx_read(&f, fd, &got, NULL), FX_EOF);
    expect_text(
        &got,
        "{\"error\":{\"message\":\"only HTTP/1.0 and HTTP/1.1 are supported\",\"code\":505}}");
    close(fd);
    pl_buf_free(&got);
    fx_free(&f);
}

static void header_values_cannot_make_headers(void **state)
{
    fixture f;
    start(&f);
    int fd = fx_connect(&f);
    pl_buf got = {0};
    fx_send(&f, fd, GET("/inject"));
    fx_read(&f, fd, &got, "\r\n\r\nok");
    expect_no_text(&got, "X-B");
    expect_text(&got, "Content-Type: text/plain");
    close(fd);
    pl_buf_free(&got);
    fx_free(&f);
}

static void addresses(void **state)
{
    fixture f;
    start(&f);
    struct sockaddr_in taken = {.sin_family = AF_INET,
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                .sin_port = htons((uint16_t)f.port)};
    assert_int_equal(pl_server_listen(f.server, (struct sockaddr *)&taken, false, NULL),
                     UV_EADDRINUSE);
    /* several loops on one port */
    struct sockaddr_in shared = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int port = 0;
    assert_int_equal(pl_server_listen(f.server, (struct sockaddr *)&shared, true, &port), 0);
    shared.sin_port = htons((uint16_t)port);
    assert_int_equal(pl_server_listen(f.server, (struct sockaddr *)&shared, true, NULL), 0);
    /* who is asking is known */
    int fd = fx_connect(&f);
    fx_send(&f, fd, GET("/hold"));
    const struct sockaddr_in *peer = (const struct sockaddr_in *)&f.held->peer;
    struct sockaddr_in own;
    socklen_t len = sizeof own;
    getsockname(fd, (struct sockaddr *)&own, &len);
    assert_int_equal(peer->sin_family, AF_INET);
    assert_int_equal(peer->sin_port, own.sin_port);
    assert_int_equal(ntohl(peer->sin_addr.s_addr), INADDR_LOOPBACK);
    assert_ptr_equal(pl_exchange_server(f.held), f.server);
    answer_held(&f, 200, PL_STR("x"));
    close(fd);
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int rc = pl_server_listen(f.server, (struct sockaddr *)&v6, false, &port);
    if (rc == 0) {
        v6.sin6_port = htons((uint16_t)port);
        fd = socket(AF_INET6, SOCK_STREAM, 0);
        assert_int_equal(connect(fd, (struct sockaddr *)&v6, sizeof v6), 0);
        fx_ask(&f, fd, POST("/echo", 1, "6"), "200", "\r\n\r\n6");
        close(fd);
    } else {
        assert_true(rc == UV_EADDRNOTAVAIL || rc == UV_EAFNOSUPPORT); /* a machine without IPv6 */
    }
    fx_free(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keep_alive_and_echo),
        cmocka_unit_test(connection_close_is_said_and_done),
        cmocka_unit_test(http_1_0_clients),
        cmocka_unit_test(head_has_headers_only),
        cmocka_unit_test(streams_are_chunked),
        cmocka_unit_test(a_length_that_is_not_kept),
        cmocka_unit_test(pipelined_requests_wait_their_turn),
        cmocka_unit_test(pipelining_is_bounded),
        cmocka_unit_test(answers_not_taken_stop_pipelined_requests),
        cmocka_unit_test(big_bodies_both_ways),
        cmocka_unit_test(expectations),
        cmocka_unit_test(early_answers),
        cmocka_unit_test(errors_are_rendered_by_the_owner),
        cmocka_unit_test(header_values_cannot_make_headers),
        cmocka_unit_test(addresses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
