/* The server over real sockets: clients that are slow, too many, or leave; owners that give up;
 * draining and closing in every state. */
#include "server_fixture.h"

static void timeouts(void **state)
{
    fixture f;
    start(&f);
    pl_buf got = {0};
    /* idle: closed without a word */
    int fd = fx_connect(&f);
    fx_ask(&f, fd, GET("/echo"), "200", "\r\n\r\n");
    fx_pass(&f, 59000);
    assert_int_equal(fx_take(&f, fd, &got), FX_OPEN);
    fx_pass(&f, 1100);
    assert_int_equal(fx_take(&f, fd, &got), FX_EOF);
    assert_int_equal(got.n, 0);
    close(fd);
    /* a head must be complete 10 s after its first byte, however it drips */
    fd = fx_connect(&f);
    const char slow[] = "GET / HTTP/1.1\r\nX-Slow: ";
    for (int i = 0; i < 9; i++) {
        fx_send_n(&f, fd, slow + i, 1);
        fx_pass(&f, 1000);
    }
    assert_int_equal(fx_take(&f, fd, &got), FX_OPEN);
    fx_send_n(&f, fd, slow + 9, 5);
    fx_pass(&f, 1100);
    assert_int_equal(fx_read(&f, fd, &got, NULL), FX_EOF);
    expect_text(&got, "HTTP/1.1 408 Request Timeout\r\n");
    close(fd);
    /* a body must not stand still for 30 s */
    got.n = 0;
    fd = fx_connect(&f);
    fx_send(&f, fd, "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n");
    char part[29 * 1024];
    memset(part, 'a', sizeof part);
    for (int i = 0; i < 3; i++) {
        fx_pass(&f, 29000);
        assert_int_equal(fx_take(&f, fd, &got), FX_OPEN);
        fx_send_n(&f, fd, part, sizeof part);
    }
    assert_int_equal(got.n, 0);
    fx_pass(&f, 29900);
    assert_int_equal(fx_take(&f, fd, &got), FX_OPEN);
    fx_pass(&f, 200);
    assert_int_equal(fx_read(&f, fd, &got, NULL), FX_EOF);
    expect_text(&got, "HTTP/1.1 408 Request Timeout\r\n");
    assert_int_equal(f.gone, 1);
    close(fd);
    assert_int_equal(pl_server_stats_of(f.server)->timeouts, 2);
    /* the owner may take as long as it likes */
    fd = fx_connect(&f);
    fx_send(&f, fd, GET("/hold"));
    fx_pass(&f, 10000000);
    answer_held(&f, 200, PL_STR("late"));
    fx_ask(&f, fd, "", "200", "late");
    close(fd);
    /* a client that never closes after the last answer is not waited for */
    got.n = 0;
    fd = fx_connect(&f);
    fx_send(&f, fd, "bad\r\n\r\n");
    assert_int_equal(fx_read(&f, fd, &got, NULL), FX_EOF);
    assert_int_equal(pl_server_stats_of(f.server)->open, 1);
    fx_pass(&f, 1100);
    assert_int_equal(pl_server_stats_of(f.server)->open, 0);
    close(fd);
    pl_buf_free(&got);
    fx_free(&f);
}

/* Each byte comes in time, the body never would. */
static void bodies_that_drip(void **state)
{
    static const char *const heads[] = {
        "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n",
        CHUNKED("/echo"),                 /* small chunks */
        CHUNKED("/echo") "1;x=",          /* a chunk's line that does not end */
        CHUNKED("/echo") "0\r\nX-Slow: ", /* a trailer */
        "POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n", /* being dropped */
    };
    static const char *const drips[] = {"a", "1\r\na\r\n", "y", "z", "b"};
    fixture f;
    start(&f);
    for (int i = 0; i < 5; i++) {
        pl_buf got = {0};
        fx_end end = FX_OPEN;
        int seconds = 0, fd = fx_connect(&f);
        fx_send(&f, fd, heads[i]);
        for (; end == FX_OPEN && seconds < 300; seconds += 10) {
            fx_pass(&f, 10000);
            end = fx_take(&f, fd, &got);
            if (end == FX_OPEN)
                fx_send(&f, fd, drips[i]);
        }
        assert_in_range(seconds, 30, 40);
        expect_text(&got, i < 4 ? "HTTP/1.1 408 Request Timeout\r\n" : "HTTP/1.1 404 ");
        close(fd);
        fx_pass(&f, 1100);
        assert_int_equal(atomic_load(&f.body_memory), 0);
        pl_buf_free(&got);
    }
    fx_free(&f);
}

static void clients_that_do_not_read(void **state)
{
    fixture f;
    start(&f);
    pl_buf got = {0};
    int stuck = fx_connect_buf(&f, 4096);
    int slow = fx_connect_buf(&f, 4096);
    fx_send(&f, stuck, GET("/big"));
    fx_send(&f, slow, GET("/big"));
    for (int i = 0; i < 20; i++) {
        fx_pass(&f, 15000);
        char some[20000];
        size_t had = 0;
        while (had < sizeof some) {
            ssize_t k = recv(slow, some, sizeof some - had, 0);
            assert_true(k > 0);
            had += (size_t)k;
            fx_pump(&f);
        }
    }
    assert_int_equal(pl_server_stats_of(f.server)->open, 1);
    assert_int_equal(pl_server_stats_of(f.server)->timeouts, 1);
    assert_int_equal(fx_read(&f, stuck, &got, NULL), FX_RESET);
    for (int i = 0; i < 6; i++)
        fx_pass(&f, 15000);
    assert_int_equal(pl_server_stats_of(f.server)->open, 0);
    close(stuck);
    close(slow);
    pl_buf_free(&got);
    fx_free(&f);
}

/* Takes this much, and drops it. */
static void swallow(fixture *f, int fd, size_t n)
{
    uint64_t until = pl_now_ns() + DEADLINE_NS;
    char some[4096];
    while (n) {
        ssize_t k = recv(fd, some, n < sizeof some ? n : sizeof some, MSG_DONTWAIT);
        assert_true(k > 0 || (k < 0 && errno == EAGAIN));
        assert_true(pl_now_ns() < until);
        n -= k > 0 ? (size_t)k : 0;
        fx_pump(f);
    }
}

/* A little now and then is not enough, however much came at once in the beginning. */
static void answers_taken_in_drips(void **state)
{
    fixture f;
    start(&f);
    int fd = fx_connect_buf(&f, 4096);
    fx_send(&f, fd, GET("/big"));
    swallow(&f, fd, 1 << 20);
    int seconds = 0;
    for (; pl_server_stats_of(f.server)->open && seconds < 600; seconds += 15) {
        swallow(&f, fd, 3000);
        fx_pass(&f, 15000);
    }
    assert_in_range(seconds, 60, 150);
    assert_int_equal(pl_server_stats_of(f.server)->timeouts, 1);
    close(fd);
    fx_free(&f);
}

static bool fill(fixture *f)
{
    pl_str s = {f->big, 60000};
    bool pause = false;
    for (int i = 0; i < 1000 && !pause; i++)
        CALL(f, pause = pl_exchange_write(f->held, &s, 1));
    return pause;
}

static void backpressure(void **state)
{
    fixture f;
    start(&f);
    pl_buf got = {0};
    int fd = fx_connect_buf(&f, 4096);
    fx_send(&f, fd, GET("/start"));
    for (int round = 1; round <= 3; round++) {
        assert_true(fill(&f));
        fx_pump(&f);
        assert_int_equal(f.drained, round - 1);
        while (f.drained < round) {
            got.n = 0;
            assert_int_equal(fx_take(&f, fd, &got), FX_OPEN);
        }
        fx_pump(&f);
        assert_int_equal(f.drained, round);
    }
    /* gone while it is backed up */
    assert_true(fill(&f));
    close(fd);
    fx_pump(&f);
    assert_int_equal(f.gone, 1);
    pl_buf_free(&got);
    fx_free(&f);
}

static void clients_that_leave(void **state)
{
    fixture f;
    start(&f);
    static const char *const states[] = {
        "",
        "GE",
        GET("/hold"),
        GET("/start"),
        POST("/hold", 100000, "abc"),
        CHUNKED("/hold") "5\r\na",
        "GET /early HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n",
    };
    static const int told[] = {0, 0, 1, 1, 1, 1, 0};
    for (int how = 0; how < 3; how++) {
        for (size_t i = 0; i < sizeof states / sizeof *states; i++) {
            f.gone = 0;
            int fd = fx_connect(&f);
            fx_send(&f, fd, states[i]);
            struct linger reset = {1, 0};
            if (how == 1)
                setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
            if (how == 2)
                shutdown(fd, SHUT_WR);
            else
                close(fd);
            fx_pump(&f);
            assert_int_equal(f.gone, told[i]);
            assert_null(f.held);
            if (how == 2)
                close(fd);
            fx_pump(&f);
            assert_int_equal(pl_server_stats_of(f.server)->open, 0);
        }
    }
    /* found out while writing: told later, not from inside, and only once */
    f.gone = 0;
    int fd = fx_connect(&f);
    fx_send(&f, fd, GET("/start"));
    struct linger reset = {1, 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    close(fd);
    for (int i = 0; i < 5; i++)
        write_held(&f, "more");
    assert_int_equal(f.gone, 0);
    fx_pump(&f);
    assert_int_equal(f.gone, 1);
    /* ended at that moment by the owner: nobody is told */
    fd = fx_connect(&f);
    fx_send(&f, fd, GET("/start"));
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    close(fd);
    write_held(&f, "more");
    end_held(&f);
    fx_pump(&f);
    assert_int_equal(f.gone, 1);
    fx_free(&f);
}

static void aborts(void **state)
{
    fixture f;
    start(&f);
    pl_buf got = {0};
    static const char *const cut[] = {GET("/early-abort"), GET("/abort"),
                                      POST("/early-abort", 9, "a")};
    for (size_t i = 0; i < 3; i++) {
        int fd = fx_connect(&f);
        fx_send(&f, fd, cut[i]);
        fx_read(&f, fd, &got, NULL);
        assert_int_equal(got.n, 0);
        close(fd);
    }
    int fd = fx_connect(&f);
    fx_send(&f, fd, GET("/start"));
    write_held(&f, "half");
    fx_read(&f, fd, &got, "half");
    pl_exchange *x = f.held;
    f.held = NULL;
    CALL(&f, pl_exchange_abort(x));
    assert_int_equal(fx_read(&f, fd, &got, NULL), FX_EOF);
    assert_true(pl_str_ends(pl_buf_str(&got), PL_STR("half\r\n"))); /* no last chunk */
    assert_int_equal(f.gone, 0);
    close(fd);
    pl_buf_free(&got);
    fx_free(&f);
}

static void too_many_connections(void **state)
{
    fixture f;
    fx_init(&f);
    f.options.max_connections = 2;
    fx_listen(&f);
    pl_buf got = {0};
    int a = fx_connect(&f), b = fx_connect(&f), c = fx_connect(&f);
    fx_ask(&f, a, GET("/echo"), "200", "\r\n\r\n");
    fx_send(&f, c, GET("/echo"));
    assert_int_equal(fx_read(&f, c, &got, NULL), FX_EOF);
    expect_text(&got, "HTTP/1.1 503 Service Unavailable\r\n");
    expect_text(&got, "\r\nRetry-After: 1\r\n");
    assert_int_equal(pl_server_stats_of(f.server)->refused, 1);
    close(b);
    close(c);
    fx_pump(&f);
    c = fx_connect(&f);
    fx_ask(&f, c, GET("/echo"), "200", "\r\n\r\n");
    close(a);
    close(c);
    pl_buf_free(&got);
    fx_free(&f);
}

static void body_memory_is_bounded(void **state)
{
    fixture f;
    fx_init(&f);
    f.options.max_body_memory = 300000;
    fx_listen(&f);
    pl_buf got = {0};
    int a = fx_connect(&f), b = fx_connect(&f);
    fx_send(&f, a, POST("/echo", 250000, "x"));
    fx_send(&f, b, POST("/echo", 250000, "x"));
    fx_send_n(&f, b, f.big, 200000); /* this one grows first: there is no room for both */
    fx_send_n(&f, a, f.big, 200000);
    assert_true(atomic_load(&f.body_memory) <= 300000);
    assert_int_equal(fx_read(&f, b, &got, NULL), FX_EOF);
    expect_text(&got, "HTTP/1.1 503 ");
    assert_int_equal(f.gone, 1);
    got.n = 0;
    fx_send_n(&f, a, f.big, 49999);
    fx_read(&f, a, &got, "Content-Length: 250000\r\n");
    close(b);
    /* chunked bodies count, too */
    b = fx_connect(&f);
    got.n = 0;
    fx_send(&f, b, CHUNKED("/echo") "60000\r\n");
    fx_send_n(&f, b, f.big, 393216);
    assert_int_equal(fx_read(&f, b, &got, NULL), FX_EOF);
    expect_text(&got, "HTTP/1.1 503 ");
    close(a);
    close(b);
    pl_buf_free(&got);
    fx_free(&f);
}

static void draining(void **state)
{
    fixture f;
    start(&f);
    pl_buf got = {0};
    int idle = fx_connect(&f), held = fx_connect(&f), part = fx_connect(&f), fresh = fx_connect(&f);
    fx_ask(&f, idle, GET("/echo"), "200", "\r\n\r\n");
    fx_send(&f, held, GET("/hold"));
    fx_send(&f, part, "GET /echo HTTP/1.1\r\n");
    /* connected and asked, yet not accepted when the drain begins */
    int queued = fx_connect_buf(&f, 0);
    assert_int_equal(send(queued, GET("/echo"), sizeof GET("/echo") - 1, 0),
                     sizeof GET("/echo") - 1);
    CALL(&f, pl_server_drain(f.server, fx_on_empty));
    assert_int_equal(fx_read(&f, idle, &got, NULL), FX_EOF);
    assert_int_equal(got.n, 0);
    assert_int_equal(fx_read(&f, queued, &got, NULL), FX_EOF);
    expect_text(&got, "HTTP/1.1 200 ");
    expect_text(&got, "\r\nConnection: close\r\n");
    got.n = 0;
    fx_send(&f, part, "Host: x\r\n\r\n");
    assert_int_equal(fx_read(&f, part, &got, NULL), FX_EOF);
    expect_text(&got, "\r\nConnection: close\r\n");
    assert_int_equal(f.empty, 0);
    close(idle);
    close(queued);
    close(part);
    fx_pass(&f, 1100); /* the fresh one had its time */
    got.n = 0;
    assert_int_equal(fx_read(&f, fresh, &got, NULL), FX_EOF);
    close(fresh);
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                            .sin_port = htons((uint16_t)f.port)};
    int late = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(late, (struct sockaddr *)&a, sizeof a), -1);
    close(late);
    answer_held(&f, 200, PL_STR("done"));
    assert_int_equal(fx_read(&f, held, &got, NULL), FX_EOF);
    expect_text(&got, "Connection: close\r\n\r\ndone");
    assert_int_equal(f.empty, 0);
    close(held);
    fx_pump(&f);
    assert_int_equal(f.empty, 1);
    fx_free(&f);
    assert_int_equal(f.empty, 1);
    /* without any connection it is empty soon, not at once */
    start(&f);
    CALL(&f, pl_server_drain(f.server, fx_on_empty));
    fx_pump(&f);
    assert_int_equal(f.empty, 1);
    pl_buf_free(&got);
    fx_free(&f);
}

static void closing_in_every_state(void **state)
{
    static const char *const states[] = {
        "",
        "GE",
        GET("/hold"),
        GET("/start"),
        POST("/hold", 100000, "abc"),
        CHUNKED("/hold") "5\r\na",
        "bad\r\n\r\n",
        GET("/big"),
        GET("/hold") GET("/echo"),
        POST("/early", 9, "a"),
    };
    static const int told[] = {0, 0, 1, 1, 1, 1, 0, 0, 1, 0};
    for (int how = 0; how < 3; how++) {
        for (size_t i = 0; i < sizeof states / sizeof *states; i++) {
            fixture f;
            start(&f);
            int fd = fx_connect_buf(&f, 4096);
            fx_send(&f, fd, states[i]);
            fx_pump(&f);
            if (how == 1)
                pl_server_close_all(f.server);
            if (how == 2)
                pl_server_drain(f.server, fx_on_empty);
            fx_free(&f);
            assert_int_equal(f.gone, told[i]);
            assert_int_equal(f.empty, 0);
            close(fd);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(timeouts),
        cmocka_unit_test(bodies_that_drip),
        cmocka_unit_test(clients_that_do_not_read),
        cmocka_unit_test(answers_taken_in_drips),
        cmocka_unit_test(backpressure),
        cmocka_unit_test(clients_that_leave),
        cmocka_unit_test(aborts),
        cmocka_unit_test(too_many_connections),
        cmocka_unit_test(body_memory_is_bounded),
        cmocka_unit_test(draining),
        cmocka_unit_test(closing_in_every_state),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
