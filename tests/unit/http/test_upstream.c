/* Upstream pools and calls against scripted servers (peer.h). */
#include "peer.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/err.h"
#include "http/upstream.h"

/* What a call was told. */
typedef struct seen {
    pl_call *call;
    pl_pool *pool;
    int status, heads, bodies, slices, ends, fails, over;
    int err;
    pl_call_phase phase;
    bool reused, got_any, sent_any;
    const char *detail;
    pl_buf body;
    pl_buf type;        /* Content-Type, read in on_end: the head must still be there */
    int pause_at;       /* pauses at this on_body */
    int cancel_at_head; /* cancels there */
    int cancel_at_body; /* cancels at this on_body */
    void *free_at_head; /* the request's bytes */
    struct seen *then;  /* sent from on_end or on_fail, NULL: none */
    bool inside_send;
} seen;

static void send_get(pl_pool *p, seen *s);

static void on_head(pl_call *c, const pl_head *h)
{
    seen *s = c->user;
    assert_false(s->inside_send);
    assert_ptr_equal(c, s->call);
    assert_int_equal(c->phase, PL_CALL_STREAMING);
    s->heads++;
    s->status = h->status;
    free(s->free_at_head);
    s->free_at_head = NULL;
    if (s->cancel_at_head) {
        s->over++;
        pl_call_cancel(c);
    }
}

static void on_body(pl_call *c, const pl_str *v, int n)
{
    seen *s = c->user;
    s->bodies++;
    s->slices += n;
    for (int i = 0; i < n; i++)
        assert_int_equal(pl_buf_add(&s->body, v[i].p, v[i].n), 0);
    if (s->pause_at == s->bodies)
        pl_call_pause(c);
    if (s->cancel_at_body == s->bodies) {
        s->over++;
        pl_call_cancel(c);
    }
}

static void over(pl_call *c, seen *s)
{
    assert_false(s->inside_send);
    s->over++;
    s->reused = c->reused;
    s->got_any = c->got_any;
    s->sent_any = c->sent_any;
    s->phase = c->phase;
    s->detail = c->detail;
    if (s->then)
        send_get(s->pool, s->then);
    pl_call_cancel(c); /* allowed, and nothing */
}

static void on_end(pl_call *c)
{
    seen *s = c->user;
    s->ends++;
    over(c, s);
    pl_str type = pl_head_find(&c->head, PL_STR("content-type"));
    assert_int_equal(pl_buf_add(&s->type, type.p, type.n), 0);
}

static void on_fail(pl_call *c, int err)
{
    seen *s = c->user;
    s->fails++;
    s->err = err;
    over(c, s);
}

static const pl_call_events events = {on_head, on_body, on_end, on_fail};

static void send_slices(pl_pool *p, seen *s, const pl_str *v, int n, bool head)
{
    s->pool = p;
    s->inside_send = true;
    s->call = pl_call_send(p, v, n, head, false, 0, &events, s);
    s->inside_send = false;
    assert_non_null(s->call);
}

static void send_get(pl_pool *p, seen *s)
{
    pl_str v[2] = {PL_STR("GET /x HTTP/1.1\r\n"), PL_STR("Host: e\r\n\r\n")};
    send_slices(p, s, v, 2, false);
}

static void seen_free(seen *s)
{
    pl_buf_free(&s->body);
    pl_buf_free(&s->type);
}

static void assert_body(const seen *s, const char *want)
{
    assert_int_equal(s->body.n, strlen(want));
    if (s->body.n)
        assert_memory_equal(s->body.p, want, s->body.n);
}

static pl_pool *pool_to(world *w, const char *host, int port)
{
    pl_pool_options o;
    pl_pool_options_default(&o);
    pl_pool *p = pl_pool_new(&w->loop, &w->wheel, pl_str_c(host), port, &o);
    assert_non_null(p);
    return p;
}

static pl_pool *pool_of(world *w)
{
    return pool_to(w, "127.0.0.1", w->port);
}

#define OK "HTTP/1.1 200 OK\r\nContent-Type: text/x\r\nContent-Length: 5\r\n\r\nhello"

/* Answers each complete GET with the text in world.test. */
static void answer_text(peer *p)
{
    if (peer_has_head(p)) {
        peer_clear(p);
        peer_send(p, p->world->test);
    }
}

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
    world_until(&w, &second.over, 1);
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

static void answer_once_quietly(peer *p)
{
    (void)p;
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
    while (w.accepted == 0 || w.peers[0]->got_n < 42)
        uv_run(&w.loop, UV_RUN_ONCE);
    assert_string_equal(w.peers[0]->got, "POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc");
    assert_int_equal(s.call->phase, PL_CALL_AWAITING);
    assert_true(s.call->sent_any);
    peer_send(w.peers[0], OK);
    world_until(&w, &s.over, 1);
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
    world_until(&w, &s.over, 1);
    assert_body(&s, "abcd");
    assert_int_equal(s.bodies, 1);
    assert_int_equal(s.slices, 3);
    assert_int_equal(pl_pool_idle(p), 1);
    pl_pool_free(p);
    seen_free(&s);
    world_close(&w);
}

/* More slices in one read than are handed over at once; and a cancel at the first hand-over. */
static void test_many_chunks(void **state)
{
    (void)state;
    pl_buf text = {0};
    assert_int_equal(pl_buf_add(&text, CHUNKED, strlen(CHUNKED)), 0);
    for (int i = 0; i < 200; i++)
        assert_int_equal(pl_buf_add(&text, "1\r\nx\r\n", 6), 0);
    assert_int_equal(pl_buf_add(&text, "0\r\n\r\n", 6), 0);
    for (int cancel = 0; cancel < 2; cancel++) {
        world w;
        world_open(&w);
        w.answer = answer_text;
        w.test = text.p;
        pl_pool *p = pool_of(&w);
        seen s = {.cancel_at_body = cancel};
        send_get(p, &s);
        world_until(&w, &s.over, 1);
        world_settle(&w);
        if (cancel) {
            assert_int_equal(s.bodies, 1);
            assert_int_equal(s.ends + s.fails, 0);
            assert_int_equal(w.gone, 1);
        } else {
            assert_int_equal(s.body.n, 200);
            assert_int_equal(s.ends, 1);
        }
        pl_pool_free(p);
        seen_free(&s);
        world_close(&w);
    }
    pl_buf_free(&text);
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
    while (w.accepted == 0 || !peer_has_head(w.peers[0]))
        uv_run(&w.loop, UV_RUN_ONCE);
    for (size_t i = 0; i + 1 < sizeof text; i++) {
        assert_int_equal(s.over, 0);
        peer_send_n(w.peers[0], text + i, 1);
        uv_run(&w.loop, UV_RUN_NOWAIT);
    }
    world_until(&w, &s.over, 1);
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
        while (w.accepted == 0 || !peer_has_head(w.peers[0]))
            uv_run(&w.loop, UV_RUN_ONCE);
        peer_send(w.peers[0], rows[i].text);
        world_settle(&w); /* a reset would overtake what was not read yet */
        if (rows[i].reset)
            peer_reset(w.peers[0]);
        else
            peer_close(w.peers[0]);
        world_until(&w, &s.over, 1);
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
    world_until(&w, &head.over, 1);
    assert_int_equal(head.ends, 1);
    w.test = OK; /* the same connection: a GET has its body again */
    send_get(p, &get);
    world_until(&w, &get.over, 1);
    assert_true(get.reused);
    assert_body(&get, "hello");
    w.test = "HTTP/1.1 204 No Content\r\n\r\n";
    send_get(p, &none);
    world_until(&w, &none.over, 1);
    assert_int_equal(none.status, 204);
    assert_int_equal(pl_pool_idle(p), 1);
    pl_pool_free(p);
    seen_free(&head);
    seen_free(&get);
    seen_free(&none);
    world_close(&w);
}

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
        world_until(&w, &s.over, 1);
        assert_int_equal(pl_pool_idle(p), 1);
        if (how == 0)
            peer_close(w.peers[0]);
        else if (how == 1)
            peer_reset(w.peers[0]);
        else
            peer_send(w.peers[0], "HTTP/1.1 408 Request Timeout\r\n\r\n");
        world_settle(&w);
        assert_int_equal(pl_pool_idle(p), 0);
        send_get(p, &t);
        world_until(&w, &t.over, 1);
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
    world_until(&w, &s.over, 1);
    t.then = &u; /* sent again from inside on_fail */
    send_get(p, &t);
    world_until(&w, &u.over, 1);
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
    world_until(&w, &s.over, 1);
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
        world_until(&w, &w.accepted, i + 1);
    }
    world_settle(&w);
    for (int i = 0; i < 3; i++) {
        peer_clear(w.peers[i]);
        peer_send(w.peers[i], OK);
        world_until(&w, &s[i].over, 1);
        if (i < 2)
            world_advance(&w, 1000);
    }
    /* ages 2 s (closed: one too many), 1 s, 0 s */
    world_settle(&w);
    assert_int_equal(pl_pool_idle(p), 2);
    assert_true(w.peers[0]->gone);
    world_advance(&w, 2400); /* 3.4 s and 2.4 s */
    assert_int_equal(pl_pool_idle(p), 2);
    world_advance(&w, 200); /* 3.6 s and 2.6 s */
    assert_int_equal(pl_pool_idle(p), 1);
    assert_true(w.peers[1]->gone);
    assert_false(w.peers[2]->gone);
    send_get(p, &s[3]);
    world_settle(&w);
    assert_true(peer_has_head(w.peers[2]));
    peer_send(w.peers[2], OK);
    world_until(&w, &s[3].over, 1);
    assert_true(s[3].reused);
    world_advance(&w, 4000);
    assert_int_equal(pl_pool_idle(p), 0);
    assert_true(w.peers[2]->gone);
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
    world_until(&w, &w.accepted, 2);
    pl_pool_free(p);
    world_settle(&w);
    assert_int_equal(s.over + t.over, 0);
    peer_send(w.peers[0], OK);
    peer_send(w.peers[1], OK);
    world_until(&w, &s.over, 1);
    world_until(&w, &t.over, 1);
    assert_int_equal(s.ends + t.ends, 2);
    world_until(&w, &w.gone, 2); /* not kept: the pool is gone */
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
    if (end && (size_t)(p->got + p->got_n - end - 4) == BIG) {
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
    world_until(&w, &s.over, 1);
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
    world_until(&w, &w.accepted, 1);
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
        world_until(&w, &w.accepted, 1);
        world_settle(&w);
        peer *e = w.peers[0];
        assert_int_equal(s.call->phase, PL_CALL_SENDING);
        peer_send(e, how == 2 ? "HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nn" : TOO_LARGE);
        if (how == 1)
            peer_close(e); /* with unread bytes: the kernel sends a reset behind the answer */
        if (how == 2) {
            world_settle(&w);
            assert_int_equal(s.heads, 1);
            w.answer = answer_once_quietly; /* takes the rest now, and finishes its answer */
            peer_read(e);
            world_settle(&w);
            peer_send(e, "o");
        }
        world_until(&w, &s.over, 1);
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
    world_until(&w, &w.accepted, 1);
    world_settle(&w);
    peer_reset(w.peers[0]);
    world_until(&w, &s.over, 1);
    assert_int_equal(s.err, PL_ERESET);
    assert_int_equal(s.phase, PL_CALL_SENDING);
    assert_false(s.reused);
    free(body);
    pl_pool_free(p);
    seen_free(&s);
    world_close(&w);
}

/* --- connecting --- */

/* A port on which nobody listens and nobody else can. */
static int closed_port(int *fd)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    *fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(*fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(getsockname(*fd, (struct sockaddr *)&a, &n), 0);
    return ntohs(a.sin_port);
}

static void test_refused(void **state)
{
    (void)state;
    world w;
    int fd;
    world_open(&w);
    pl_pool *p = pool_to(&w, "127.0.0.1", closed_port(&fd));
    seen s = {0}, t = {0};
    s.then = &t;
    send_get(p, &s);
    world_until(&w, &t.over, 1);
    assert_int_equal(s.err, PL_ECONNECT);
    assert_int_equal(s.phase, PL_CALL_CONNECTING);
    assert_false(s.sent_any);
    assert_non_null(s.detail);
    assert_int_equal(t.err, PL_ECONNECT);
    pl_pool_free(p);
    close(fd);
    world_close(&w);
}

static void test_connect_timeout(void **state)
{
    (void)state;
    world w;
    int fd, fill[4];
    world_open(&w);
    int port = closed_port(&fd);
    assert_int_equal(listen(fd, 0), 0); /* nobody accepts: once full, the kernel drops SYNs */
    struct sockaddr_in a;
    uv_ip4_addr("127.0.0.1", port, &a);
    for (int i = 0; i < 4; i++) {
        fill[i] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        (void)connect(fill[i], (struct sockaddr *)&a, sizeof a);
    }
    pl_pool *p = pool_to(&w, "127.0.0.1", port);
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
    world_until(&w, &s.over, 1);
    world_until(&w, &t.over, 1);
    assert_int_equal(s.ends + t.ends, 2);
    pl_pool_free(p);
    /* a label of more than 63 bytes: no name, so no name server is asked */
    char bad[100];
    memset(bad, 'a', sizeof bad);
    strcpy(bad + 90, ".invalid");
    p = pool_to(&w, bad, 80);
    send_get(p, &u);
    world_until(&w, &u.over, 1);
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
    world_until(&w, &s.over, 1);
    assert_body(&s, "hello");
    close(c);
    close(fd);
    pl_pool_free(p);
    seen_free(&s);
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
    world_until(&w, &w.accepted, 1);
    send_get(p, &t);
    world_until(&w, &w.accepted, 2);
    u.call = pl_call_send(p, &v, 1, false, true, 5000, &events, &u);
    world_until(&w, &w.accepted, 3);
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
    world_settle(&w);
    assert_int_equal(t.heads, 1);
    world_advance(&w, 10000);
    assert_int_equal(s.err, PL_ETIMEOUT);
    assert_int_equal(s.phase, PL_CALL_AWAITING);
    for (int i = 0; i < 3; i++) { /* each byte gives it 60 s more */
        world_advance(&w, 45000);
        assert_int_equal(t.over, 0);
        peer_send(w.peers[1], "1\r\na\r\n");
        world_settle(&w);
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
    world_until(&w, &w.accepted, 1);
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
    world_until(&w, &s.bodies, 1);
    peer_send(w.peers[0], "1\r\nb\r\n");
    world_advance(&w, 300000); /* paused: neither bytes nor timeouts */
    assert_body(&s, "a");
    assert_int_equal(s.over, 0);
    pl_call_resume(s.call);
    world_until(&w, &s.bodies, 2);
    assert_body(&s, "ab");
    s.pause_at = 3; /* in the read that completes the answer */
    peer_send(w.peers[0], "1\r\nc\r\n0\r\n\r\n");
    world_until(&w, &s.over, 1);
    assert_body(&s, "abc");
    assert_int_equal(s.ends, 1);
    assert_int_equal(pl_pool_idle(p), 1);
    w.test = OK; /* the connection reads again */
    send_get(p, &t);
    world_until(&w, &t.over, 1);
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
    world_until(&w, &s.bodies, 1);
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
        world_until(&w, &s.over, 1);
        world_until(&w, &w.gone, 1); /* the engine sees it */
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
    world_until(&w, &s.over, 1);
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
        cmocka_unit_test(test_answer_timeouts),
        cmocka_unit_test(test_slow_head),
        cmocka_unit_test(test_pause_and_resume),
        cmocka_unit_test(test_resumed_call_times_out_again),
        cmocka_unit_test(test_cancel_in_events),
        cmocka_unit_test(test_head_too_large),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
