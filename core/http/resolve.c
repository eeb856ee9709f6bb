/* Name resolution for an upstream pool: see resolve.h. The pool owns the resolver and waits with
 * freeing it while a question is under way. A name that cannot be resolved again keeps the
 * addresses it had: an engine does not vanish because a name server is restarted. */
#include "http/resolve.h"

#include <stdlib.h>

#include "base/err.h"

#define FRESH_MS 30000 /* how long an answer is used */
#define RETRY_MS                                                                                   \
    1000 /* how soon a failed question may be asked again while old addresses serve                \
          */

static void set_port(pl_address *a, int port)
{
    if (a->any.sa_family == AF_INET6)
        a->v6.sin6_port = htons((uint16_t)port);
    else
        a->v4.sin_port = htons((uint16_t)port);
}

static bool same(const pl_address *a, const pl_address *b)
{
    if (a->any.sa_family != b->any.sa_family)
        return false;
    if (a->any.sa_family == AF_INET6)
        return memcmp(&a->v6.sin6_addr, &b->v6.sin6_addr, sizeof a->v6.sin6_addr) == 0 &&
               a->v6.sin6_scope_id == b->v6.sin6_scope_id;
    return a->v4.sin_addr.s_addr == b->v4.sin_addr.s_addr;
}

int pl_resolver_init(pl_resolver *r, uv_loop_t *loop, pl_str host, int port,
                     void (*done)(pl_resolver *r))
{
    memset(r, 0, sizeof *r);
    r->loop = loop;
    r->port = port;
    r->done = done;
    if (host.n >= 2 && host.p[0] == '[' && host.p[host.n - 1] == ']')
        host = (pl_str){host.p + 1, host.n - 2};
    r->host = pl_str_dup(host);
    if (!r->host)
        return PL_ENOMEM;
    r->literal = uv_ip4_addr(r->host, port, &r->addresses[0].v4) == 0 ||
                 uv_ip6_addr(r->host, port, &r->addresses[0].v6) == 0;
    r->n = r->literal;
    return 0;
}

bool pl_resolver_fresh(const pl_resolver *r, uint64_t now_ms)
{
    return r->n > 0 && (r->literal || now_ms < r->expires_ms);
}

/* Takes the new list over; the address that worked last stays the preferred one if it is still
 * there. */
static void adopt(pl_resolver *r, const struct addrinfo *list)
{
    pl_address old = r->addresses[r->preferred];
    bool had = r->n > 0;
    r->n = r->preferred = 0;
    for (; list && r->n < PL_RESOLVE_MAX; list = list->ai_next) {
        pl_address *a = &r->addresses[r->n];
        if ((list->ai_family != AF_INET && list->ai_family != AF_INET6) ||
            list->ai_addrlen > sizeof *a)
            continue;
        memset(a, 0, sizeof *a);
        memcpy(a, list->ai_addr, list->ai_addrlen);
        set_port(a, r->port);
        bool seen = false;
        for (int i = 0; i < r->n; i++)
            seen |= same(a, &r->addresses[i]);
        if (seen)
            continue;
        if (had && same(a, &old))
            r->preferred = r->n;
        r->n++;
    }
}

static void on_answer(uv_getaddrinfo_t *req, int status, struct addrinfo *list)
{
    pl_resolver *r = req->data;
    r->busy = false;
    if (status == 0 && list) {
        adopt(r, list);
        r->expires_ms = r->asked_ms + FRESH_MS;
    } else {
        r->expires_ms = r->asked_ms + RETRY_MS;
    }
    uv_freeaddrinfo(list);
    r->done(r); /* may free r */
}

int pl_resolver_ask(pl_resolver *r, uint64_t now_ms)
{
    if (r->busy)
        return 0;
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    r->req.data = r;
    int rc = uv_getaddrinfo(r->loop, &r->req, on_answer, r->host, NULL, &hints);
    if (rc != 0)
        return rc == UV_ENOMEM ? PL_ENOMEM : PL_ERESOLVE;
    r->busy = true;
    r->asked_ms = now_ms;
    return 0;
}

void pl_resolver_cancel(pl_resolver *r)
{
    if (r->busy)
        uv_cancel((uv_req_t *)&r->req);
}

void pl_resolver_free(pl_resolver *r)
{
    free(r->host);
    r->host = NULL;
}
