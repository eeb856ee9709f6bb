/* Upstream pools against scripted servers: idle connections, connecting, sending. */
#include "calls.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

/* --- the pool --- */

static void test_idle_connection_that_the_server_ends_is_dropped(void **state)
{
    (void)state;
    for (int how = 0; how < 3; how++) {
        world w;
        world_open(&w);
        w.answer = answer_text;
        w.test = OK;
        pl_pool *p = pool_of(&w);
        seen s = {0}, t = {0};
        send_get(p, &s);
        world_wait(&w, s.over);
        assert_int_equal(pl_pool_idle(p), 1);
        if (how == 0)
            peer_close(w.peers[0]);
        else if (how == 1)
            peer_reset(w.peers[0]);
        else
            peer_send(w.peers[0], "HTTP/1.1 408 Request Timeout\r\n\r\n");
        world_wait(&w, pl_pool_idle(p) == 0);
        send_get(p, &t);
        world_wait(&w, t.over);
        assert_int_equal(t.ends, 1);
        assert_false(t.reused);
        pl_pool_free(p);
        seen_free(&s);
        seen_free(&t);
        world_close(&w);
    }
}

static void answer_first_then_reset(peer *p)
{
    if (!peer_has_head(p))
        return;
    peer_clear(p);
    if (p->world->accepted == 1 && p->world->test == p) {
        peer_reset(p);
        return;
    }
    p->world->test = p;
    peer_send(p, OK);
}

static void test_stale_connection_is_told_apart(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    w.answer = answer_first_then_reset;
    pl_pool *p = pool_of(&w);
    seen s = {0}, t = {0}, u = {0};
    send_get(p, &s);
    world_wait(&w, s.over);
    t.then = &u; /* sent again from inside on_fail */
    send_get(p, &t);
    world_wait(&w, u.over);
    assert_int_equal(t.err, PL_ERESET);
    assert_true(t.reused);
    assert_false(t.got_any);
    assert_int_equal(t.phase, PL_CALL_AWAITING);
    assert_int_equal(u.ends, 1);
    assert_false(u.reused);
    pl_pool_free(p);
    seen_free(&s);
    seen_free(&t);
    seen_free(&u);
    world_close(&w);
}

static void test_bytes_after_the_answer_end_the_connection(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    w.answer = answer_text;
    w.test = OK "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nother";
    pl_pool *p = pool_of(&w);
    seen s = {0};
    send_get(p, &s);
    world_wait(&w, s.over);
    assert_int_equal(s.ends, 1);
    assert_body(&s, "hello");
    assert_int_equal(pl_pool_idle(p), 0);
    pl_pool_free(p);
    seen_free(&s);
    world_close(&w);
}

/* Three calls at once; then the newest connection is used first, the oldest expires first. */
static void test_idle_list(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    w.answer = answer_once_quietly;
    pl_pool_options o;
    pl_pool_options_default(&o);
    o.max_idle = 2;
    pl_pool *p = pl_pool_new(&w.loop, &w.wheel, PL_STR("127.0.0.1"), w.port, &o);
    assert_non_null(p);
    seen s[4] = {{0}};
    for (int i = 0; i < 3; i++) {
        send_get(p, &s[i]);
        world_wait(&w, w.accepted >= i + 1);
    }
    world_settle(&w);
    for (int i = 0; i < 3; i++) {
        peer_clear(w.peers[i]);
        peer_send(w.peers[i], OK);
        world_wait(&w, s[i].over);
        if (i < 2)
            world_advance(&w, 1000);
    }
    /* ages 2 s (closed: one too many), 1 s, 0 s */
    world_wait(&w, w.peers[0]->gone);
    assert_int_equal(pl_pool_idle(p), 2);
    world_advance(&w, 2400); /* 3.4 s and 2.4 s */
    assert_int_equal(pl_pool_idle(p), 2);
    world_advance(&w, 200); /* 3.6 s and 2.6 s */
    assert_int_equal(pl_pool_idle(p), 1);
    world_wait(&w, w.peers[1]->gone);
    assert_false(w.peers[2]->gone);
    send_get(p, &s[3]);
    world_wait_head(&w, 2);
    peer_send(w.peers[2], OK);
    world_wait(&w, s[3].over);
    assert_true(s[3].reused);
    world_advance(&w, 4000);
    assert_int_equal(pl_pool_idle(p), 0);
    world_wait(&w, w.peers[2]->gone);
    pl_pool_free(p);
    for (int i = 0; i < 4; i++)
        seen_free(&s[i]);
    world_close(&w);
}

static void test_pool_freed_with_calls_under_way(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    w.answer = answer_once_quietly;
    pl_pool *p = pool_of(&w);
    seen s = {0}, t = {0};
    send_get(p, &s);
    send_get(p, &t);
    world_wait(&w, w.accepted >= 2);
    pl_pool_free(p);
    world_settle(&w);
    assert_int_equal(s.over + t.over, 0);
    peer_send(w.peers[0], OK);
    peer_send(w.peers[1], OK);
    world_wait(&w, s.over);
    world_wait(&w, t.over);
    assert_int_equal(s.ends + t.ends, 2);
    world_wait(&w, w.gone >= 2); /* not kept: the pool is gone */
    seen_free(&s);
    seen_free(&t);
    world_close(&w);
}

/* --- sending --- */

#define BIG (24u << 20)

static char *big_body(void)
{
    char *b = malloc(BIG);
    assert_non_null(b);
    for (size_t i = 0; i < BIG; i++)
        b[i] = (char)(i * 2654435761u >> 13);
    return b;
}

static void send_big(pl_pool *p, seen *s, const char *body)
{
    char head[80];
    snprintf(head, sizeof head, "POST / HTTP/1.1\r\nHost: e\r\nContent-Length: %u\r\n\r\n", BIG);
    static char kept[80];
    strcpy(kept, head);
    pl_str v[4] = {pl_str_c(kept), {body, 1000}, {body + 1000, BIG / 2}, {NULL, 0}};
    v[3] = (pl_str){body + 1000 + BIG / 2, BIG - 1000 - BIG / 2};
    send_slices(p, s, v, 4, false);
}

static void answer_big(peer *p)
{
    const char *end = p->got_n > 200 ? memmem(p->got, 200, "\r\n\r\n", 4) : NULL;
    if (end && p->got + p->got_n - end - 4 == BIG) {
        p->world->test = (void *)(end + 4);
        peer_send(p, OK);
    }
}

static void test_big_request_arrives_whole(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    w.answer = answer_big;
    pl_pool *p = pool_of(&w);
    char *body = big_body();
    seen s = {0};
    send_big(p, &s, body);
    world_wait(&w, s.over);
    assert_int_equal(s.ends, 1);
    assert_memory_equal(w.test, body, BIG);
    assert_int_equal(pl_pool_idle(p), 1);
    free(body);
    pl_pool_free(p);
    seen_free(&s);
    world_close(&w);
}

static void answer_stop(peer *p)
{
    peer_stop_reading(p);
}

static void test_request_that_is_not_taken_times_out(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    w.answer = answer_stop;
    pl_pool *p = pool_of(&w);
    char *body = big_body();
    seen s = {0};
    send_big(p, &s, body);
    world_wait(&w, w.accepted);
    world_settle(&w);
    assert_int_equal(s.call->phase, PL_CALL_SENDING);
    world_advance(&w, 29000);
    assert_int_equal(s.over, 0);
    world_advance(&w, 1100);
    assert_int_equal(s.err, PL_ETIMEOUT);
    assert_int_equal(s.phase, PL_CALL_SENDING);
    assert_true(s.sent_any);
    free(body);
    pl_pool_free(p);
    seen_free(&s);
    world_close(&w);
}

#define TOO_LARGE "HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno"

/* The answer comes while the request is still being sent: it is delivered, and from on_head on the
 * request's bytes are not touched (they are freed there). */
static void test_early_answer(void **state)
{
    (void)state;
    for (int how = 0; how < 3; how++) {
        world w;
        world_open(&w);
        w.answer = answer_stop;
        pl_pool *p = pool_of(&w);
        char *body = big_body();
        seen s = {.free_at_head = body};
        send_big(p, &s, body);
        world_wait(&w, w.accepted);
        world_settle(&w);
        peer *e = w.peers[0];
        assert_int_equal(s.call->phase, PL_CALL_SENDING);
        peer_send(e, how == 2 ? "HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nn" : TOO_LARGE);
        if (how == 1)
            peer_close(e); /* with unread bytes: the kernel sends a reset behind the answer */
        if (how == 2) {
            world_wait(&w, s.heads);
            w.answer = answer_once_quietly; /* takes the rest now, and finishes its answer */
            peer_read(e);
            world_settle(&w);
            peer_send(e, "o");
        }
        world_wait(&w, s.over);
        assert_int_equal(s.status, 413);
        assert_int_equal(s.ends, 1);
        assert_body(&s, "no");
        assert_int_equal(pl_pool_idle(p), 0);
        pl_pool_free(p);
        seen_free(&s);
        world_close(&w);
    }
}

/* The engine dies while it is sent to. */
static void test_reset_while_sending(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    w.answer = answer_stop;
    pl_pool *p = pool_of(&w);
    char *body = big_body();
    seen s = {0};
    send_big(p, &s, body);
    world_wait(&w, w.accepted);
    world_settle(&w);
    peer_reset(w.peers[0]);
    world_wait(&w, s.over);
    assert_int_equal(s.err, PL_ERESET);
    assert_int_equal(s.phase, PL_CALL_SENDING);
    assert_false(s.reused);
    free(body);
    pl_pool_free(p);
    seen_free(&s);
    world_close(&w);
}

/* --- connecting --- */

static void test_refused(void **state)
{
    (void)state;
    world w;
    world_open_closed(&w);
    pl_pool *p = pool_of(&w);
    seen s = {0}, t = {0};
    s.then = &t;
    send_get(p, &s);
    world_wait(&w, t.over);
    assert_int_equal(s.err, PL_ECONNECT);
    assert_int_equal(s.phase, PL_CALL_CONNECTING);
    assert_false(s.sent_any);
    assert_non_null(s.detail);
    assert_int_equal(t.err, PL_ECONNECT);
    pl_pool_free(p);
    world_close(&w);
}

static void test_connect_timeout(void **state)
{
    (void)state;
    world w;
    int fd, fill[4];
    world_open(&w);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &n), 0);
    assert_int_equal(listen(fd, 0), 0); /* nobody accepts: once full, the kernel drops SYNs */
    for (int i = 0; i < 4; i++) {
        fill[i] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        (void)connect(fill[i], (struct sockaddr *)&a, sizeof a);
    }
    pl_pool *p = pool_to(&w, "127.0.0.1", ntohs(a.sin_port));
    seen s = {0}, t = {0};
    send_get(p, &s);
    send_get(p, &t);
    world_advance(&w, 1900);
    assert_int_equal(s.over, 0);
    pl_call_cancel(t.call);
    world_advance(&w, 200);
    assert_int_equal(s.err, PL_ETIMEOUT);
    assert_int_equal(s.phase, PL_CALL_CONNECTING);
    assert_int_equal(t.over, 0);
    pl_pool_free(p);
    for (int i = 0; i < 4; i++)
        close(fill[i]);
    close(fd);
    world_close(&w);
}

static void test_names(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    w.answer = answer_text;
    w.test = OK;
    /* localhost may be ::1 first, where nobody listens: then the other address is tried */
    pl_pool *p = pool_to(&w, "localhost", w.port);
    seen s = {0}, t = {0}, u = {0};
    send_get(p, &s);
    send_get(p, &t);
    world_wait(&w, s.over);
    world_wait(&w, t.over);
    assert_int_equal(s.ends + t.ends, 2);
    pl_pool_free(p);
    /* a label of more than 63 bytes: no name, so no name server is asked */
    char bad[100];
    memset(bad, 'a', sizeof bad);
    strcpy(bad + 90, ".invalid");
    p = pool_to(&w, bad, 80);
    send_get(p, &u);
    world_wait(&w, u.over);
    assert_int_equal(u.err, PL_ERESOLVE);
    assert_int_equal(u.phase, PL_CALL_CONNECTING);
    pl_pool_free(p);
    seen_free(&s);
    seen_free(&t);
    world_close(&w);
}

/* Cancelled while the name is asked for, and after a failure that was not told yet. */
static void test_cancel_before_connected(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    pl_pool *p = pool_to(&w, "localhost", w.port);
    seen s = {0}, t = {0};
    send_get(p, &s);
    pl_call_cancel(s.call);
    pl_pool_free(p);                       /* with the question under way */
    p = pool_to(&w, "255.255.255.255", 1); /* refused by the kernel at once */
    send_get(p, &t);
    pl_call_cancel(t.call);
    pl_pool_free(p);
    world_settle(&w);
    assert_int_equal(s.over + t.over, 0);
    world_close(&w);
}

static void test_ipv6_literal(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    int fd = socket(AF_INET6, SOCK_STREAM, 0);
    struct sockaddr_in6 a = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof a) != 0) {
        world_close(&w);
        skip();
    }
    socklen_t n = sizeof a;
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &n), 0);
    assert_int_equal(listen(fd, 4), 0);
    pl_pool *p = pool_to(&w, "[::1]", ntohs(a.sin6_port));
    seen s = {0};
    send_get(p, &s);
    int c = accept(fd, NULL, NULL);
    assert_true(c >= 0);
    assert_int_equal(write(c, OK, strlen(OK)), (ssize_t)strlen(OK));
    world_wait(&w, s.over);
    assert_body(&s, "hello");
    close(c);
    close(fd);
    pl_pool_free(p);
    seen_free(&s);
    world_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_idle_connection_that_the_server_ends_is_dropped),
        cmocka_unit_test(test_stale_connection_is_told_apart),
        cmocka_unit_test(test_bytes_after_the_answer_end_the_connection),
        cmocka_unit_test(test_idle_list),
        cmocka_unit_test(test_pool_freed_with_calls_under_way),
        cmocka_unit_test(test_big_request_arrives_whole),
        cmocka_unit_test(test_request_that_is_not_taken_times_out),
        cmocka_unit_test(test_early_answer),
        cmocka_unit_test(test_reset_while_sending),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_connect_timeout),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_cancel_before_connected),
        cmocka_unit_test(test_ipv6_literal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
