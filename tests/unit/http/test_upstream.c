/* Calls against scripted servers: answers, their ends, timeouts, backpressure, cancelling. */
#include "calls.h"

static void answer_close(peer *p)
{
    if (peer_has_head(p)) {
        peer_send(p, p->world->test);
        peer_close(p);
    }
}

static void test_answer_and_reuse(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    w.answer = answer_text;
    w.test = OK;
    pl_pool *p = pool_of(&w);
    seen first = {0}, second = {0};
    first.then = &second; /* sent from inside on_end: finds the connection that was just freed */
    send_get(p, &first);
    world_wait(&w, second.over);
    assert_int_equal(first.ends, 1);
    assert_int_equal(first.status, 200);
    assert_false(first.reused);
    assert_int_equal(first.phase, PL_CALL_OVER);
    assert_body(&first, "hello");
    assert_int_equal(first.type.n, 6);
    assert_true(second.reused);
    assert_int_equal(second.ends, 1);
    assert_body(&second, "hello");
    assert_int_equal(w.accepted, 1);
    assert_int_equal(pl_pool_idle(p), 1);
    pl_pool_free(p);
    seen_free(&first);
    seen_free(&second);
    world_close(&w);
}

static void test_request_bytes_arrive_as_sent(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    w.answer = answer_text;
    w.test = OK;
    pl_pool *p = pool_of(&w);
    seen s = {0};
    w.answer = answer_once_quietly;
    pl_str v[4] = {
        PL_STR("POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\n"), PL_STR("a"), {"", 0}, PL_STR("bc")};
    send_slices(p, &s, v, 4, false);
    world_wait(&w, w.accepted);
    world_wait(&w, w.peers[0]->got_n >= 41);
    assert_string_equal(w.peers[0]->got, "POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc");
    assert_int_equal(s.call->phase, PL_CALL_AWAITING);
    assert_true(s.call->sent_any);
    peer_send(w.peers[0], OK);
    world_wait(&w, s.over);
    pl_pool_free(p);
    seen_free(&s);
    world_close(&w);
}

#define CHUNKED "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

static void test_chunks_of_one_read_come_together(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    w.answer = answer_text;
    w.test = CHUNKED "1\r\na\r\n1\r\nb\r\n2\r\ncd\r\n0\r\n\r\n";
    pl_pool *p = pool_of(&w);
    seen s = {0};
    send_get(p, &s);
    world_wait(&w, s.over);
    assert_body(&s, "abcd");
    assert_int_equal(s.bodies, 1);
    assert_int_equal(s.slices, 1); /* small ones are moved together */
    assert_int_equal(pl_pool_idle(p), 1);
    pl_pool_free(p);
    seen_free(&s);
    world_close(&w);
}

/* Small and large chunks in every order, in few reads: joined or not, every byte in its place; and
 * a cancel at the first hand-over. */
static void test_many_chunks(void **state)
{
    (void)state;
    pl_buf text = {0};
    assert_int_equal(pl_buf_add(&text, CHUNKED, strlen(CHUNKED)), 0);
    pl_buf want = {0};
    for (int i = 0; i < 200; i++) {
        char chunk[3000];
        size_t n = i % 7 == 3 ? sizeof chunk : i % 5 == 1 ? 2048 : (size_t)i % 3 + 1;
        memset(chunk, 'a' + i % 26, n);
        assert_int_equal(pl_buf_addf(&text, "%zx\r\n%.*s\r\n", n, (int)n, chunk), 0);
        assert_int_equal(pl_buf_add(&want, chunk, n), 0);
    }
    assert_int_equal(pl_buf_add(&text, "0\r\n\r\n", 6), 0);
    for (int cancel = 0; cancel < 2; cancel++) {
        world w;
        world_open(&w);
        w.answer = answer_text;
        w.test = text.p;
        pl_pool *p = pool_of(&w);
        seen s = {.cancel_at_body = cancel};
        send_get(p, &s);
        world_wait(&w, s.over);
        world_settle(&w);
        if (cancel) {
            assert_int_equal(s.bodies, 1);
            assert_int_equal(s.ends + s.fails, 0);
            world_wait(&w, w.gone == 1);
        } else {
            assert_int_equal(s.body.n, want.n);
            assert_memory_equal(s.body.p, want.p, want.n);
            assert_int_equal(s.ends, 1);
        }
        pl_pool_free(p);
        seen_free(&s);
        world_close(&w);
    }
    pl_buf_free(&text);
    pl_buf_free(&want);
}

static void test_byte_by_byte_with_interim_answers(void **state)
{
    (void)state;
    static const char text[] =
        "HTTP/1.1 100 Continue\r\n\r\n"
        "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" CHUNKED "3\r\nabc\r\n0\r\n\r\n";
    world w;
    world_open(&w);
    w.answer = answer_once_quietly;
    pl_pool *p = pool_of(&w);
    seen s = {0};
    send_get(p, &s);
    world_wait_head(&w, 0);
    for (size_t i = 0; i + 1 < sizeof text; i++) {
        assert_int_equal(s.over, 0);
        peer_send_n(w.peers[0], text + i, 1);
        uv_run(&w.loop, UV_RUN_NOWAIT);
    }
    world_wait(&w, s.over);
    assert_int_equal(s.heads, 1);
    assert_int_equal(s.status, 200);
    assert_body(&s, "abc");
    pl_pool_free(p);
    seen_free(&s);
    world_close(&w);
}

/* Answers that end a connection, each with how the call ends. */
static void test_ends_of_answers(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        bool reset; /* else FIN */
        int err;    /* 0: on_end */
        pl_call_phase phase;
        bool got_any;
        const char *body;
    } rows[] = {
        {"HTTP/1.1 200 OK\r\n\r\nto the end", false, 0, PL_CALL_OVER, true, "to the end"},
        {"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", false, 0, PL_CALL_OVER, true, "hi"},
        {"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi", false, 0,
         PL_CALL_OVER, true, "hi"},
        {"HTTP/1.1 200 OK\r\n\r\ncut off", true, PL_ERESET, PL_CALL_STREAMING, true, "cut off"},
        {"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", false, PL_EEOF, PL_CALL_STREAMING,
         true, "half"},
        {CHUNKED "4\r\nhalf\r\n", false, PL_EEOF, PL_CALL_STREAMING, true, "half"},
        {CHUNKED "4\r\nhalf\r\n0\r\n", true, PL_ERESET, PL_CALL_STREAMING, true, "half"},
        {"HTTP/1.1 20", false, PL_EEOF, PL_CALL_AWAITING, true, ""},
        {"HTTP/1.1 20", true, PL_EEOF, PL_CALL_AWAITING, true, ""},
        {"", false, PL_ERESET, PL_CALL_AWAITING, false, ""},
        {"", true, PL_ERESET, PL_CALL_AWAITING, false, ""},
        {"HTTP/1.1 100 Continue\r\n\r\n", false, PL_EEOF, PL_CALL_AWAITING, true, ""},
        {"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n", false, PL_EPROTOCOL, PL_CALL_AWAITING,
         true, ""},
        {"SSH-2.0-OpenSSH\r\n", false, PL_EPROTOCOL, PL_CALL_AWAITING, true, ""},
        {"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx", false, PL_EPROTOCOL,
         PL_CALL_AWAITING, true, ""},
        {CHUNKED "1\r\na\r\nzz\r\n", false, PL_EPROTOCOL, PL_CALL_STREAMING, true, "a"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        world w;
        world_open(&w);
        w.answer = answer_once_quietly;
        pl_pool *p = pool_of(&w);
        seen s = {0};
        send_get(p, &s);
        world_wait_head(&w, 0);
        peer_send(w.peers[0], rows[i].text);
        world_settle(&w); /* a reset would overtake what was not read yet */
        if (rows[i].reset)
            peer_reset(w.peers[0]);
        else
            peer_close(w.peers[0]);
        world_wait(&w, s.over);
        if (s.err != rows[i].err || s.phase != rows[i].phase)
            fail_msg("row %zu: err %d phase %d (%s)", i, s.err, s.phase, s.detail);
        assert_int_equal(s.ends, rows[i].err == 0);
        assert_int_equal(s.fails, rows[i].err != 0);
        assert_int_equal(s.got_any, rows[i].got_any);
        assert_true(rows[i].err == 0 || s.detail);
        assert_body(&s, rows[i].body);
        assert_int_equal(pl_pool_idle(p), 0);
        pl_pool_free(p);
        seen_free(&s);
        world_close(&w);
    }
}

static void test_answers_without_body(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    w.answer = answer_text;
    w.test = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n";
    pl_pool *p = pool_of(&w);
    seen head = {0}, get = {0}, none = {0};
    pl_str v = PL_STR("HEAD / HTTP/1.1\r\nHost: e\r\n\r\n");
    send_slices(p, &head, &v, 1, true);
    world_wait(&w, head.over);
    assert_int_equal(head.ends, 1);
    w.test = OK; /* the same connection: a GET has its body again */
    send_get(p, &get);
    world_wait(&w, get.over);
    assert_true(get.reused);
    assert_body(&get, "hello");
    w.test = "HTTP/1.1 204 No Content\r\n\r\n";
    send_get(p, &none);
    world_wait(&w, none.over);
    assert_int_equal(none.status, 204);
    assert_int_equal(pl_pool_idle(p), 1);
    pl_pool_free(p);
    seen_free(&head);
    seen_free(&get);
    seen_free(&none);
    world_close(&w);
}

/* --- timeouts of the answer, backpressure --- */

static void test_answer_timeouts(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    w.answer = answer_once_quietly;
    pl_pool *p = pool_of(&w);
    seen s = {0}, t = {0}, u = {0};
    pl_str v = PL_STR("GET / HTTP/1.1\r\nHost: e\r\n\r\n");
    send_get(p, &s);
    world_wait(&w, w.accepted);
    send_get(p, &t);
    world_wait(&w, w.accepted >= 2);
    u.call = pl_call_send(p, &v, 1, false, true, 5000, &events, &u);
    world_wait(&w, w.accepted >= 3);
    world_settle(&w);
    world_advance(&w, 4900);
    assert_int_equal(u.over, 0);
    peer_send(w.peers[2], "HTTP/1.1 100 Continue\r\n\r\n"); /* no answer yet */
    world_advance(&w, 200);
    assert_int_equal(u.err, PL_ETIMEOUT);
    assert_int_equal(u.phase, PL_CALL_AWAITING);
    world_advance(&w, 590000);
    assert_int_equal(s.over, 0);
    peer_send(w.peers[1], CHUNKED "1\r\na\r\n");
    world_wait(&w, t.heads);
    world_advance(&w, 10000);
    assert_int_equal(s.err, PL_ETIMEOUT);
    assert_int_equal(s.phase, PL_CALL_AWAITING);
    for (int i = 0; i < 3; i++) { /* each byte gives it 60 s more */
        world_advance(&w, 45000);
        assert_int_equal(t.over, 0);
        peer_send(w.peers[1], "1\r\na\r\n");
        world_wait(&w, t.body.n == (size_t)i + 2);
    }
    world_advance(&w, 59000);
    assert_int_equal(t.over, 0);
    world_advance(&w, 1100);
    assert_int_equal(t.err, PL_ETIMEOUT);
    assert_int_equal(t.phase, PL_CALL_STREAMING);
    assert_body(&t, "aaaa");
    pl_pool_free(p);
    seen_free(&t);
    world_close(&w);
}

/* A head that trickles in is bounded as a whole. */
static void test_slow_head(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    w.answer = answer_once_quietly;
    pl_pool *p = pool_of(&w);
    seen s = {0};
    send_get(p, &s);
    world_wait(&w, w.accepted);
    world_settle(&w);
    peer_send(w.peers[0], "HTTP/1.1 200 OK\r\n");
    for (int i = 0; i < 5; i++) {
        world_settle(&w);
        assert_int_equal(s.over, 0);
        world_advance(&w, 11000);
        peer_send(w.peers[0], "A: b\r\n");
    }
    world_advance(&w, 6000);
    assert_int_equal(s.err, PL_ETIMEOUT);
    assert_int_equal(s.phase, PL_CALL_AWAITING);
    pl_pool_free(p);
    world_close(&w);
}

/* Bytes that are not the answer's keep no call alive. */
static void test_endless_framing(void **state)
{
    (void)state;
    static const struct {
        const char *begin, *more;
    } rows[] = {{CHUNKED "1\r\na\r\n1;x", "y"}, {CHUNKED "1\r\na\r\n0\r\nT: ", "v"}};
    for (size_t row = 0; row < 2; row++) {
        world w;
        world_open(&w);
        w.answer = answer_once_quietly;
        pl_pool *p = pool_of(&w);
        seen s = {0};
        send_get(p, &s);
        world_wait(&w, w.accepted);
        world_settle(&w);
        peer_send(w.peers[0], rows[row].begin);
        world_wait(&w, s.bodies);
        for (int i = 0; i < 5; i++) {
            assert_int_equal(s.over, 0);
            world_advance(&w, 11000);
            peer_send(w.peers[0], rows[row].more);
            world_settle(&w);
        }
        world_advance(&w, 6000);
        assert_int_equal(s.err, PL_ETIMEOUT);
        pl_pool_free(p);
        seen_free(&s);
        world_close(&w);
    }
}

/* What comes as fast as it can ends by its amount. Two engines: one goes on with interim answers,
 * one with a chunk's extension. */
static void test_floods_without_an_answer(void **state)
{
    (void)state;
    for (int extension = 0; extension < 2; extension++) {
        world w;
        world_open(&w);
        pl_buf text = {0};
        if (extension)
            assert_int_equal(pl_buf_addf(&text, CHUNKED "1;x="), 0);
        for (int i = 0; i < (extension ? 70000 : 101); i++)
            assert_int_equal(pl_buf_addf(&text, extension ? "y" : "HTTP/1.1 102 Wait\r\n\r\n"), 0);
        assert_int_equal(pl_buf_addf(&text, extension ? "\r\na\r\n0\r\n\r\n" : OK), 0);
        w.answer = answer_text;
        w.test = text.p;
        pl_pool *p = pool_of(&w);
        seen s = {0};
        send_get(p, &s);
        world_wait(&w, s.over);
        assert_int_equal(s.err, PL_EPROTOCOL);
        assert_int_equal(s.heads, extension);
        pl_pool_free(p);
        seen_free(&s);
        world_close(&w);
        pl_buf_free(&text);
    }
}

/* Far more framing than body, and right all the same. */
static void test_many_small_chunks(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    pl_buf text = {0};
    assert_int_equal(pl_buf_addf(&text, CHUNKED), 0);
    for (int i = 0; i < 20000; i++)
        assert_int_equal(pl_buf_addf(&text, "1\r\na\r\n"), 0);
    assert_int_equal(pl_buf_addf(&text, "0\r\n\r\n"), 0);
    w.answer = answer_text;
    w.test = text.p;
    pl_pool *p = pool_of(&w);
    seen s = {0};
    send_get(p, &s);
    world_wait(&w, s.over);
    assert_int_equal(s.ends, 1);
    assert_int_equal(s.body.n, 20000);
    pl_pool_free(p);
    seen_free(&s);
    world_close(&w);
    pl_buf_free(&text);
}

static void test_pause_and_resume(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    w.answer = answer_text;
    w.test = CHUNKED "1\r\na\r\n";
    pl_pool *p = pool_of(&w);
    seen s = {.pause_at = 1}, t = {0};
    send_get(p, &s);
    world_wait(&w, s.bodies);
    peer_send(w.peers[0], "1\r\nb\r\n");
    world_advance(&w, 300000); /* paused: neither bytes nor timeouts */
    assert_body(&s, "a");
    assert_int_equal(s.over, 0);
    pl_call_resume(s.call);
    world_wait(&w, s.bodies >= 2);
    assert_body(&s, "ab");
    s.pause_at = 3; /* in the read that completes the answer */
    peer_send(w.peers[0], "1\r\nc\r\n0\r\n\r\n");
    world_wait(&w, s.over);
    assert_body(&s, "abc");
    assert_int_equal(s.ends, 1);
    assert_int_equal(pl_pool_idle(p), 1);
    w.test = OK; /* the connection reads again */
    send_get(p, &t);
    world_wait(&w, t.over);
    assert_true(t.reused);
    assert_body(&t, "hello");
    pl_pool_free(p);
    seen_free(&s);
    seen_free(&t);
    world_close(&w);
}

static void test_resumed_call_times_out_again(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    w.answer = answer_text;
    w.test = CHUNKED "1\r\na\r\n";
    pl_pool *p = pool_of(&w);
    seen s = {.pause_at = 1};
    send_get(p, &s);
    world_wait(&w, s.bodies);
    world_advance(&w, 100000);
    pl_call_resume(s.call);
    world_advance(&w, 59000);
    assert_int_equal(s.over, 0);
    world_advance(&w, 1100);
    assert_int_equal(s.err, PL_ETIMEOUT);
    pl_pool_free(p);
    seen_free(&s);
    world_close(&w);
}

static void test_cancel_in_events(void **state)
{
    (void)state;
    for (int in_body = 0; in_body < 2; in_body++) {
        world w;
        world_open(&w);
        w.answer = answer_text;
        w.test = OK;
        pl_pool *p = pool_of(&w);
        seen s = {.cancel_at_head = !in_body, .cancel_at_body = in_body};
        send_get(p, &s);
        world_wait(&w, s.over);
        world_wait(&w, w.gone); /* the engine sees it */
        assert_int_equal(s.ends + s.fails, 0);
        assert_int_equal(s.over, 1);
        assert_int_equal(pl_pool_idle(p), 0);
        pl_pool_free(p);
        seen_free(&s);
        world_close(&w);
    }
}

static void test_head_too_large(void **state)
{
    (void)state;
    world w;
    world_open(&w);
    pl_buf text = {0};
    assert_int_equal(pl_buf_addf(&text, "HTTP/1.1 200 OK\r\nX: "), 0);
    for (int i = 0; i < 66000; i++)
        assert_int_equal(pl_buf_add(&text, "x", 1), 0);
    assert_int_equal(pl_buf_add(&text, "\r\n\r\n", 5), 0);
    w.answer = answer_close;
    w.test = text.p;
    pl_pool *p = pool_of(&w);
    seen s = {0};
    send_get(p, &s);
    world_wait(&w, s.over);
    assert_int_equal(s.err, PL_EPROTOCOL);
    assert_int_equal(s.heads, 0);
    pl_pool_free(p);
    pl_buf_free(&text);
    world_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_answer_and_reuse),
        cmocka_unit_test(test_request_bytes_arrive_as_sent),
        cmocka_unit_test(test_chunks_of_one_read_come_together),
        cmocka_unit_test(test_many_chunks),
        cmocka_unit_test(test_byte_by_byte_with_interim_answers),
        cmocka_unit_test(test_ends_of_answers),
        cmocka_unit_test(test_answers_without_body),
        cmocka_unit_test(test_answer_timeouts),
        cmocka_unit_test(test_slow_head),
        cmocka_unit_test(test_endless_framing),
        cmocka_unit_test(test_floods_without_an_answer),
        cmocka_unit_test(test_many_small_chunks),
        cmocka_unit_test(test_pause_and_resume),
        cmocka_unit_test(test_resumed_call_times_out_again),
        cmocka_unit_test(test_cancel_in_events),
        cmocka_unit_test(test_head_too_large),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
