/* The pool's half of upstream.h: connections to one engine on one loop. Called by upstream.c and by
 * the pool's owner, on the loop's thread. The pool owns the connections (see upstream_impl.h).
 *
 * Idle connections form a list by age. The newest is taken first, so that a quiet pool lets the
 * oldest run into their timeout; one wheel timer watches the oldest. */
#include <stdlib.h>

#include "http/upstream_impl.h"

void pl_pool_options_default(pl_pool_options *o)
{
    *o = (pl_pool_options){.connect_timeout_ms = 2000,
                           .first_byte_timeout_ms = 600000,
                           .between_bytes_timeout_ms = 60000,
                           .write_timeout_ms = 30000,
                           .pool_idle_ms = 3500,
                           .max_idle = 64,
                           .max_head_bytes = 65536};
}

/* --- lists of calls --- */

void pl_upcall_list_add(pl_upcall_list *l, pl_upcall *c)
{
    c->next = l->first;
    c->link = &l->first;
    if (c->next)
        c->next->link = &c->next;
    l->first = c;
}

void pl_upcall_list_remove(pl_upcall *c)
{
    if (!c->link)
        return;
    *c->link = c->next;
    if (c->next)
        c->next->link = c->link;
    c->next = NULL;
    c->link = NULL;
}

static void on_soon(uv_timer_t *t)
{
    pl_pool *p = t->data;
    /* on_fail may send new calls that fail again: those wait for the next turn of the loop */
    pl_upcall_list now = {NULL};
    while (p->failed.first) {
        pl_upcall *c = p->failed.first;
        pl_upcall_list_remove(c);
        pl_upcall_list_add(&now, c);
    }
    while (now.first) {
        pl_upcall *c = now.first;
        pl_upcall_list_remove(c);
        pl_upcall_fail(c, c->err, c->pub.detail);
    }
}

void pl_upcall_fail_soon(pl_upcall *c, int err, const char *detail)
{
    pl_pool *p = c->pool;
    c->err = err;
    c->pub.detail = detail;
    pl_upcall_deadline(c, 0);
    pl_upcall_list_remove(c);
    pl_upcall_list_add(&p->failed, c);
    uv_timer_start(&p->soon, on_soon, 0, 0);
}

/* --- idle connections --- */

static void idle_unlink(pl_upconn *c)
{
    pl_pool *p = c->pool;
    *(c->newer ? &c->newer->older : &p->newest) = c->older;
    *(c->older ? &c->older->newer : &p->oldest) = c->newer;
    c->newer = c->older = NULL;
    p->idle_n--;
}

static bool idle_expired(const pl_upconn *c)
{
    return c->pool->wheel->now_ms - c->idle_at_ms >= c->pool->o.pool_idle_ms;
}

static void on_idle_timer(pl_timer *t)
{
    pl_pool *p = (pl_pool *)((char *)t - offsetof(pl_pool, idle_timer));
    while (p->oldest && idle_expired(p->oldest))
        pl_upconn_close(p->oldest);
    if (p->oldest)
        pl_wheel_arm(p->wheel, t, p->oldest->idle_at_ms + p->o.pool_idle_ms - p->wheel->now_ms,
                     on_idle_timer);
}

pl_upconn *pl_upconn_take(pl_pool *p)
{
    pl_upconn *c = p->newest;
    if (!c || idle_expired(c)) /* the timer, late, closes it */
        return NULL;
    idle_unlink(c);
    c->state = PL_UPCONN_BUSY;
    return c;
}

void pl_upconn_release(pl_upconn *c, bool reusable)
{
    pl_pool *p = c->pool;
    bool paused = c->call && c->call->paused;
    if (!reusable || p->given_up || p->o.max_idle == 0 ||
        (paused && uv_read_start((uv_stream_t *)&c->tcp, pl_upcall_on_alloc, pl_upcall_on_read))) {
        pl_upconn_close(c);
        return;
    }
    if (c->call)
        c->call->conn = NULL;
    c->call = NULL;
    c->state = PL_UPCONN_IDLE;
    c->next_message = true;
    c->idle_at_ms = p->wheel->now_ms;
    c->older = p->newest;
    c->newer = NULL;
    *(p->newest ? &p->newest->newer : &p->oldest) = c;
    p->newest = c;
    p->idle_n++;
    if (p->idle_n > p->o.max_idle)
        pl_upconn_close(p->oldest);
    if (!pl_timer_armed(&p->idle_timer))
        pl_wheel_arm(p->wheel, &p->idle_timer, p->o.pool_idle_ms, on_idle_timer);
}

unsigned pl_pool_idle(const pl_pool *p)
{
    return p->idle_n;
}

/* --- one connection --- */

static void on_conn_closed(uv_handle_t *h)
{
    pl_upconn *c = h->data;
    pl_pool *p = c->pool;
    pl_reader_free(&c->reader);
    free(c);
    p->conns_n--;
    pl_pool_settle(p);
}

void pl_upconn_close(pl_upconn *c)
{
    if (c->state == PL_UPCONN_CLOSING)
        return;
    if (c->state == PL_UPCONN_IDLE)
        idle_unlink(c);
    if (c->call)
        c->call->conn = NULL;
    c->call = NULL;
    c->state = PL_UPCONN_CLOSING;
    uv_close((uv_handle_t *)&c->tcp, on_conn_closed);
}

/* CONNECTING -> BUSY, or on to the next address. */
static void on_connect(uv_connect_t *req, int status)
{
    pl_upconn *c = req->handle->data;
    free(req);
    if (c->state == PL_UPCONN_CLOSING) /* given up meanwhile */
        return;
    pl_upcall *call = c->call;
    if (status == 0)
        status = uv_read_start((uv_stream_t *)&c->tcp, pl_upcall_on_alloc, pl_upcall_on_read);
    if (status < 0) {
        pl_upconn_close(c);
        pl_upcall_connect_next(call, status);
        return;
    }
    pl_resolver *r = &c->pool->resolver;
    if (call->tried < r->n)
        r->preferred = (r->preferred + call->tried) % r->n;
    c->state = PL_UPCONN_BUSY;
    pl_upcall_connected(call);
}

/* One attempt at one address. 0 or a negative uv error. */
static int conn_open(pl_upcall *call, const pl_address *a)
{
    pl_pool *p = call->pool;
    pl_upconn *c = calloc(1, sizeof *c);
    uv_connect_t *req = malloc(sizeof *req);
    if (!c || !req || uv_tcp_init(p->loop, &c->tcp) != 0) {
        free(c);
        free(req);
        return UV_ENOMEM;
    }
    c->tcp.data = c;
    c->pool = p;
    p->conns_n++;
    pl_reader_init(&c->reader, false, &p->limits, NULL, pl_upcall_on_slice, c);
    uv_tcp_nodelay(&c->tcp, 1);
    int rc = uv_tcp_connect(req, &c->tcp, &a->any, on_connect);
    if (rc < 0) {
        free(req);
        pl_upconn_close(c);
        return rc;
    }
    c->call = call;
    call->conn = c;
    return 0;
}

/* Whose fault it is that there is no connection: PL_EUNAVAILABLE and PL_ENOMEM are the router's
 * own, and say nothing about the engine. */
static int connect_error(int uv_err)
{
    switch (uv_err) {
    case UV_ETIMEDOUT:
        return PL_ETIMEOUT;
    case UV_ENOMEM:
        return PL_ENOMEM;
    case UV_EMFILE:
    case UV_ENFILE:
    case UV_ENOBUFS:
        return PL_EUNAVAILABLE;
    default:
        return PL_ECONNECT;
    }
}

/* Tries the addresses not yet tried, beginning with the one that worked last; each gets an equal
 * share of the time that is left. */
static void connect_some(pl_upcall *c, int uv_err)
{
    pl_pool *p = c->pool;
    pl_resolver *r = &p->resolver;
    uint64_t now = p->wheel->now_ms, left = c->connect_by_ms > now ? c->connect_by_ms - now : 0;
    bool timed = p->o.connect_timeout_ms > 0;
    if (timed && left == 0)
        uv_err = UV_ETIMEDOUT;
    for (; c->tried < r->n && (left || !timed); c->tried++) {
        uv_err = conn_open(c, &r->addresses[(r->preferred + c->tried) % r->n]);
        if (uv_err == 0) {
            uint64_t share = left / (uint64_t)(r->n - c->tried);
            pl_upcall_deadline(c, timed && share == 0 ? 1 : share);
            return;
        }
    }
    pl_upcall_fail_soon(c, connect_error(uv_err),
                        uv_err == UV_ETIMEDOUT ? "connect timed out" : uv_strerror(uv_err));
}

void pl_upcall_connect_next(pl_upcall *c, int uv_err)
{
    c->tried++;
    connect_some(c, uv_err);
}

void pl_upcall_connect(pl_upcall *c)
{
    pl_pool *p = c->pool;
    c->connect_by_ms = p->wheel->now_ms + p->o.connect_timeout_ms;
    if (pl_resolver_fresh(&p->resolver, p->wheel->now_ms)) {
        connect_some(c, UV_ECONNREFUSED);
        return;
    }
    int rc = pl_resolver_ask(&p->resolver, p->wheel->now_ms);
    if (rc < 0) {
        pl_upcall_fail_soon(c, rc, "name resolution cannot be started");
        return;
    }
    pl_upcall_list_add(&p->resolving, c);
    pl_upcall_deadline(c, p->o.connect_timeout_ms);
}

static void on_resolved(pl_resolver *r)
{
    pl_pool *p = (pl_pool *)((char *)r - offsetof(pl_pool, resolver));
    while (p->resolving.first) { /* fires no event: nothing is added meanwhile */
        pl_upcall *c = p->resolving.first;
        pl_upcall_list_remove(c);
        if (r->n == 0)
            pl_upcall_fail_soon(c, PL_ERESOLVE, "the name has no address");
        else
            connect_some(c, UV_ECONNREFUSED);
    }
    pl_pool_settle(p);
}

/* --- the pool itself --- */

pl_pool *pl_pool_new(uv_loop_t *loop, pl_wheel *wheel, pl_str host, int port,
                     const pl_pool_options *o)
{
    pl_pool *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->loop = loop;
    p->wheel = wheel;
    p->o = *o;
    p->limits = pl_limits_default;
    p->limits.head_bytes = o->max_head_bytes;
    p->o.api_key = NULL;
    if (o->api_key && o->api_key[0] && !(p->o.api_key = strdup(o->api_key))) {
        free(p);
        return NULL;
    }
    if (pl_resolver_init(&p->resolver, loop, host, port, on_resolved) < 0 ||
        uv_timer_init(loop, &p->soon) != 0) {
        pl_resolver_free(&p->resolver);
        free((char *)p->o.api_key);
        free(p);
        return NULL;
    }
    p->soon.data = p;
    return p;
}

static void on_soon_gone(uv_handle_t *h)
{
    pl_pool *p = h->data;
    p->soon_gone = true;
    pl_pool_settle(p);
}

/* The steps of going away: calls, then handles and the name question, then the memory, which
 * therefore never goes from inside a call's event. */
void pl_pool_settle(pl_pool *p)
{
    if (!p->given_up || p->calls_n > 0)
        return;
    if (!p->soon_closing) {
        p->soon_closing = true;
        uv_close((uv_handle_t *)&p->soon, on_soon_gone);
        pl_resolver_cancel(&p->resolver);
    }
    if (!p->soon_gone || p->conns_n > 0 || p->resolver.busy)
        return;
    pl_resolver_free(&p->resolver);
    free((char *)p->o.api_key);
    free(p);
}

void pl_pool_free(pl_pool *p)
{
    if (!p || p->given_up)
        return;
    p->given_up = true;
    pl_wheel_cancel(p->wheel, &p->idle_timer);
    while (p->newest)
        pl_upconn_close(p->newest);
    pl_pool_settle(p);
}
