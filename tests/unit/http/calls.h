/* What the tests of calls share: a record of everything that a call was told, and senders. Static
 * functions: included by each test that needs it. */
#ifndef CALLS_H
#define CALLS_H

#include "peer.h"

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

PEER_UNUSED static void send_slices(pl_pool *p, seen *s, const pl_str *v, int n, bool head)
{
    s->pool = p;
    s->inside_send = true;
    s->call = pl_call_send(p, v, n, head, false, 0, &events, s);
    s->inside_send = false;
    assert_non_null(s->call);
}

PEER_UNUSED static void send_get(pl_pool *p, seen *s)
{
    pl_str v[2] = {PL_STR("GET /x HTTP/1.1\r\n"), PL_STR("Host: e\r\n\r\n")};
    send_slices(p, s, v, 2, false);
}

static void seen_free(seen *s)
{
    pl_buf_free(&s->body);
    pl_buf_free(&s->type);
}

PEER_UNUSED static void assert_body(const seen *s, const char *want)
{
    assert_int_equal(s->body.n, strlen(want));
    if (s->body.n)
        assert_memory_equal(s->body.p, want, s->body.n);
}

PEER_UNUSED static pl_pool *pool_to(world *w, const char *host, int port)
{
    pl_pool_options o;
    pl_pool_options_default(&o);
    pl_pool *p = pl_pool_new(&w->loop, &w->wheel, pl_str_c(host), port, &o);
    assert_non_null(p);
    return p;
}

PEER_UNUSED static pl_pool *pool_of(world *w)
{
    return pool_to(w, "127.0.0.1", w->port);
}

#define OK "HTTP/1.1 200 OK\r\nContent-Type: text/x\r\nContent-Length: 5\r\n\r\nhello"

/* Answers each complete GET with the text in world.test. */
PEER_UNUSED static void answer_text(peer *p)
{
    if (peer_has_head(p)) {
        peer_clear(p);
        peer_send(p, p->world->test);
    }
}

PEER_UNUSED static void answer_once_quietly(peer *p)
{
    (void)p;
}

#endif
