/* Whole-answer fetches against scripted servers. */
#include "peer.h"

#include "base/buf.h"
#include "base/err.h"
#include "http/upstream.h"

typedef struct seen {
    pl_fetch *fetch;
    int done, err, status;
    char body[4096];
    bool inside_start;
} seen;

static void on_done(void *user, const pl_fetch_result *r)
{
    seen *s = user;
    assert_false(s->inside_start);
    s->done++;
    s->err = r->err;
    s->status = r->status;
    assert_true(r->err == 0 || r->detail);
    assert_true(r->body.n < sizeof s->body);
    if (r->body.n)
        memcpy(s->body, r->body.p, r->body.n);
    s->body[r->body.n] = 0;
    pl_fetch_cancel(s->fetch); /* allowed, and nothing */
}

static void start(pl_pool *p, seen *s, pl_method method, const char *path, pl_str body)
{
    s->inside_start = true;
    s->fetch = pl_fetch_start(p, method, pl_str_c(path), PL_STR("X-Test: 1\r\n"), body, 2000, 100,
                              on_done, s);
    s->inside_start = false;
    assert_non_null(s->fetch);
}

static pl_pool *pool_at(world *w, int port)
{
    pl_pool_options o;
    pl_pool_options_default(&o);
    pl_pool *p = pl_pool_new(&w->loop, &w->wheel, PL_STR("127.0.0.1"), port, &o);
    assert_non_null(p);
    return p;
}

#define OK   "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
#define NONE ((pl_str){NULL, 0})

static void answer_text(peer *p)
{
    if (peer_has_head(p))
        peer_send(p, p->world->test);
}

static void test_get(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    w.answer = answer_text;
    w.test = OK;
    pl_pool *p = pool_at(&w, w.port);
    seen s = {0};
    start(p, &s, PL_GET, "/health?x=1", NONE);
    world_wait(&w, s.done);
    assert_int_equal(s.err, 0);
    assert_int_equal(s.status, 200);
    assert_string_equal(s.body, "hello");
    char want[256];
    snprintf(want, sizeof want,
             "GET /health?x=1 HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: perilune/0.1\r\n"
             "Accept: */*\r\nConnection: keep-alive\r\nX-Test: 1\r\n\r\n",
             w.port);
    assert_string_equal(w.peers[0]->got, want);
    pl_pool_free(p);
    world_close(&w);
}

static void test_post(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    w.test = "HTTP/1.1 422 No\r\nContent-Length: 4\r\n\r\nwhy?";
    pl_pool *p = pool_at(&w, w.port);
    seen s = {0};
    start(p, &s, PL_POST, "/do", PL_STR("{\"a\":1}"));
    world_wait_head(&w, 0);
    world_wait(&w, strstr(w.peers[0]->got, "\r\n\r\n{\"a\":1}"));
    assert_non_null(strstr(w.peers[0]->got, "\r\nContent-Length: 7\r\n"));
    peer_send(w.peers[0], w.test);
    world_wait(&w, s.done);
    assert_int_equal(s.err, 0); /* an answer is an answer */
    assert_int_equal(s.status, 422);
    assert_string_equal(s.body, "why?");
    pl_pool_free(p);
    world_close(&w);
}

/* A hundred bytes are allowed. */
static void test_limit(void **state)
{
    (void)state;
    static const char *const heads[] = {
        "HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n",
    };
    for (int i = 0; i < 3; i++) {
        world w;
        world_open(&w);
        pl_pool *p = pool_at(&w, w.port);
        seen s = {0};
        start(p, &s, PL_GET, "/", NONE);
        world_wait_head(&w, 0);
        peer_send(w.peers[0], heads[i]);
        char body[101];
        memset(body, 'b', sizeof body);
        if (i == 1) {
            peer_send(w.peers[0], "32\r\n");
            peer_send_n(w.peers[0], body, 50);
            peer_send(w.peers[0], "\r\n33\r\n");
            peer_send_n(w.peers[0], body, 51);
        } else if (i == 2) {
            peer_send_n(w.peers[0], body, 100);
        }
        world_wait(&w, s.done);
        assert_int_equal(s.err, i == 2 ? 0 : PL_ELIMIT);
        assert_int_equal(s.status, 200);
        if (i < 2)
            world_wait(&w, w.gone);
        pl_pool_free(p);
        world_close(&w);
    }
}

static void test_total_time(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    pl_pool *p = pool_at(&w, w.port);
    seen s = {0};
    start(p, &s, PL_GET, "/", NONE);
    world_wait_head(&w, 0);
    world_advance(&w, 1500);
    peer_send(w.peers[0], "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf");
    world_settle(&w);
    assert_int_equal(s.done, 0);
    world_advance(&w, 600);
    assert_int_equal(s.done, 1);
    assert_int_equal(s.err, PL_ETIMEOUT);
    world_wait(&w, w.gone);
    pl_pool_free(p);
    world_close(&w);
}

static void test_refused_and_cancelled(void **state)
{
    (void)state;
    world w;
    world_open_closed(&w);
    pl_pool *p = pool_at(&w, w.port);
    seen s = {0}, t = {0};
    start(p, &s, PL_GET, "/", NONE);
    start(p, &t, PL_GET, "/", NONE);
    pl_fetch_cancel(t.fetch);
    world_wait(&w, s.done);
    assert_int_equal(s.err, PL_ECONNECT);
    assert_int_equal(t.done, 0);
    pl_pool_free(p);
    world_close(&w);
}

/* Answers once, and resets when asked again on the same connection. */
static void answer_then_reset(peer *p)
{
    if (!peer_has_head(p))
        return;
    peer_clear(p);
    if (p == p->world->test) {
        peer_reset(p);
    } else {
        p->world->test = p;
        peer_send(p, OK);
    }
}

static void test_dead_pooled_connection(void **state)
{
    (void)state;
    for (int post = 0; post < 2; post++) {
        world w;
        world_open(&w);
        w.answer = answer_then_reset;
        pl_pool *p = pool_at(&w, w.port);
        seen s = {0}, t = {0};
        start(p, &s, PL_GET, "/", NONE);
        world_wait(&w, s.done);
        start(p, &t, post ? PL_POST : PL_GET, "/", post ? PL_STR("x") : NONE);
        world_wait(&w, t.done);
        /* a POST may have been done already: it is not sent twice */
        assert_int_equal(t.err, post ? PL_ERESET : 0);
        assert_int_equal(w.accepted, post ? 1 : 2);
        pl_pool_free(p);
        world_close(&w);
    }
}

static void test_what_is_no_path(void **state)
{
    (void)state;
    static const char *const bad[] = {"", "x", "/a b", "/a\r\nX: y", "/\x7f"};
    world w;
    world_open(&w);
    pl_pool *p = pool_at(&w, w.port);
    seen s = {0};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_null(
            pl_fetch_start(p, PL_GET, pl_str_c(bad[i]), NONE, NONE, 2000, 100, on_done, &s));
    pl_pool_free(p);
    world_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_get),
        cmocka_unit_test(test_post),
        cmocka_unit_test(test_limit),
        cmocka_unit_test(test_total_time),
        cmocka_unit_test(test_refused_and_cancelled),
        cmocka_unit_test(test_dead_pooled_connection),
        cmocka_unit_test(test_what_is_no_path),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
