/* Small whole-answer requests over a pool (pl_fetch of upstream.h): health checks, detection, the
 * command line. On the pool's loop. A fetch owns its request bytes and what it has collected of
 * the answer, and frees itself when done has run or when it is cancelled. */
#include <stdlib.h>

#include "base/buf.h"
#include "http/upstream_impl.h"

struct pl_fetch {
    pl_pool *pool;
    pl_call *call;
    pl_timer timer; /* the total time */
    pl_buf request;
    pl_buf body; /* of the answer */
    size_t max_body;
    bool again; /* may be sent a second time: a GET that was not */
    bool over;  /* done runs */
    void (*done)(void *user, const pl_fetch_result *r);
    void *user;
};

static void fetch_free(pl_fetch *f)
{
    pl_wheel_cancel(f->pool->wheel, &f->timer);
    pl_buf_free(&f->request);
    pl_buf_free(&f->body);
    free(f);
}

/* The one end: result, then memory. done may give the pool up: its memory stays at least until the
 * loop's next turn. */
static void finish(pl_fetch *f, int err, int status, const char *detail)
{
    pl_fetch_result r = {err, status, pl_buf_str(&f->body), detail};
    pl_wheel_cancel(f->pool->wheel, &f->timer);
    f->over = true;
    f->done(f->user, &r);
    fetch_free(f);
}

/* Ends it from outside the call's own end. */
static void give_up(pl_fetch *f, int err, const char *detail)
{
    int status = f->call->head.status;
    pl_call_cancel(f->call);
    finish(f, err, status, detail);
}

static void on_head(pl_call *c, const pl_head *head)
{
    pl_fetch *f = c->user;
    if (head->content_length != UINT64_MAX && head->content_length > f->max_body)
        give_up(f, PL_ELIMIT, "the answer is too long");
}

static void on_body(pl_call *c, const pl_str *slices, int n)
{
    pl_fetch *f = c->user;
    for (int i = 0; i < n; i++) {
        if (slices[i].n > f->max_body - f->body.n) {
            give_up(f, PL_ELIMIT, "the answer is too long");
            return;
        }
        if (pl_buf_add(&f->body, slices[i].p, slices[i].n) < 0) {
            give_up(f, PL_ENOMEM, "out of memory");
            return;
        }
    }
}

static void on_end(pl_call *c)
{
    pl_fetch *f = c->user;
    finish(f, 0, c->head.status, NULL);
}

static void on_fail(pl_call *c, int err);
static const pl_call_events events = {on_head, on_body, on_end, on_fail};

static pl_call *fetch_send(pl_fetch *f, bool fresh)
{
    pl_str bytes = pl_buf_str(&f->request);
    return pl_call_send(f->pool, &bytes, 1, false, fresh, 0, &events, f);
}

static void on_fail(pl_call *c, int err)
{
    pl_fetch *f = c->user;
    if (err == PL_ERESET && c->reused && !c->got_any && f->again) {
        f->again = false;
        f->call = fetch_send(f, true);
        if (f->call)
            return;
        err = PL_ENOMEM;
    }
    finish(f, err, c->head.status, c->detail);
}

static void on_timer(pl_timer *t)
{
    give_up((pl_fetch *)((char *)t - offsetof(pl_fetch, timer)), PL_ETIMEOUT, "no answer in time");
}

bool pl_fetch_path_ok(pl_str s)
{
    if (s.n == 0 || s.p[0] != '/')
        return false;
    for (size_t i = 0; i < s.n; i++)
        if ((unsigned char)s.p[i] <= 0x20 || s.p[i] == 0x7f)
            return false;
    return true;
}

static int compose(pl_buf *b, const pl_pool *p, pl_method method, pl_str path, pl_str extra,
                   pl_str body)
{
    const pl_resolver *to = &p->resolver;
    bool v6 = strchr(to->host, ':') != NULL;
    int rc =
        pl_buf_addf(b, "%.*s %.*s HTTP/1.1\r\nHost: %s%s%s:%d\r\n", PL_FMT(pl_method_names[method]),
                    PL_FMT(path), v6 ? "[" : "", to->host, v6 ? "]" : "", to->port);
    if (rc == 0)
        rc = pl_buf_addf(b,
                         "User-Agent: perilune/0.1\r\nAccept: */*\r\n"
                         "Connection: keep-alive\r\n%.*s",
                         PL_FMT(extra));
    if (rc == 0 && p->o.api_key)
        rc = pl_buf_addf(b, "Authorization: Bearer %s\r\n", p->o.api_key);
    if (rc == 0 && body.p)
        rc = pl_buf_addf(b, "Content-Length: %zu\r\n", body.n);
    if (rc == 0)
        rc = pl_buf_add(b, "\r\n", 2);
    return rc == 0 ? pl_buf_add(b, body.p, body.n) : rc;
}

pl_fetch *pl_fetch_start(pl_pool *p, pl_method method, pl_str path, pl_str extra, pl_str body,
                         uint64_t timeout_ms, size_t max_body,
                         void (*done)(void *user, const pl_fetch_result *r), void *user)
{
    pl_fetch *f = pl_fetch_path_ok(path) ? calloc(1, sizeof *f) : NULL;
    if (!f)
        return NULL;
    f->pool = p;
    f->max_body = max_body;
    f->again = method == PL_GET;
    f->done = done;
    f->user = user;
    if (compose(&f->request, p, method, path, extra, body) < 0 ||
        !(f->call = fetch_send(f, false))) {
        fetch_free(f);
        return NULL;
    }
    pl_wheel_arm(p->wheel, &f->timer, timeout_ms, on_timer);
    return f;
}

void pl_fetch_cancel(pl_fetch *f)
{
    if (f->over) /* from inside done */
        return;
    pl_call_cancel(f->call);
    fetch_free(f);
}
