/* The shared store's commands and replies: the arguments of the script (redis_scripts.h) and what
 * it answers. Called by redis.c and redis_sweep.c on the handle's loop. Allocates only the output
 * buffer, which the handle keeps. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "session/redis_impl.h"
#include "session/redis_scripts.h"

static const char *const op_names[] = {"get", "peek", "put", "remove", "lease", "release"};

/* --- commands --- */

typedef struct args {
    pl_buf *b;
    int err;
} args;

static void add(args *a, const void *p, size_t n)
{
    char head[32];
    int h = snprintf(head, sizeof head, "$%zu\r\n", n);
    if (a->err || (a->err = pl_buf_reserve(a->b, (size_t)h + n + 2)))
        return;
    char *to = a->b->p + a->b->n;
    memcpy(to, head, (size_t)h);
    if (n)
        memcpy(to + h, p, n);
    memcpy(to + h + n, "\r\n", 2);
    a->b->n += (size_t)h + n + 2;
}

static void add_text(args *a, const char *s)
{
    add(a, s, strlen(s));
}

static void add_u64(args *a, uint64_t v)
{
    char text[24];
    add(a, text, (size_t)snprintf(text, sizeof text, "%llu", (unsigned long long)v));
}

static void add_name(args *a, const pl_session_name *name)
{
    char whole[8 + PL_SESSION_MAX_TENANT_BYTES + PL_SESSION_MAX_ID_BYTES];
    size_t n = (size_t)snprintf(whole, sizeof whole, "%zu:", name->tenant.n);
    if (name->tenant.n)
        memcpy(whole + n, name->tenant.p, name->tenant.n);
    n += name->tenant.n;
    memcpy(whole + n, name->id.p, name->id.n);
    add(a, whole, n + name->id.n);
}

/* EVALSHA or EVAL with the prefix as key, the operation and the time; `more` arguments follow. */
static args begin(pl_redis *r, pl_buf *b, bool in_full, const char *op, unsigned more)
{
    args a = {b, 0};
    b->n = 0;
    a.err = pl_buf_addf(b, "*%u\r\n", 6 + more);
    add_text(&a, in_full ? "EVAL" : "EVALSHA");
    if (in_full)
        add(&a, pl_redis_script, sizeof pl_redis_script - 1);
    else
        add(&a, r->sha, 40);
    add_text(&a, "1");
    add_text(&a, r->prefix);
    add_text(&a, op);
    if (r->o.clock_is_the_server)
        add_u64(&a, pl_clock_now_ns(r->o.clock) / 1000);
    else
        add_text(&a, "");
    return a;
}

static int encode_call(pl_redis_op *op)
{
    static const unsigned more[] = {2, 1, 13, 3, 3, 3};
    pl_redis_handle *h = op->h;
    const pl_store_call *c = op->call;
    const pl_binding *b = &c->binding;
    char worker[PL_REDIS_WORKER_MAX];
    size_t worker_n = 0;
    if (c->op == PL_STORE_PUT) {
        const pl_redis_options *o = &h->r->o;
        worker_n = o->worker_name(o->worker_ctx, b->slot, b->generation, worker);
        if (!worker_n)
            return PL_EINVALID;
    }
    args a = begin(h->r, &h->out, op->in_full, op_names[c->op], more[c->op]);
    add_name(&a, &c->name);
    switch (c->op) {
    case PL_STORE_GET:
        add_u64(&a, op->turns);
        break;
    case PL_STORE_PEEK:
        break;
    case PL_STORE_LEASE:
        add_u64(&a, c->owner);
        add_u64(&a, c->lease_ms);
        break;
    case PL_STORE_RELEASE:
        add_u64(&a, c->owner);
        add(&a, b->note.bytes, b->note.n);
        break;
    case PL_STORE_REMOVE:
        add_u64(&a, c->when);
        add_u64(&a, c->version);
        break;
    case PL_STORE_PUT:
        add_u64(&a, c->when);
        add_u64(&a, c->version);
        add_u64(&a, c->owner);
        add_u64(&a, c->lease_ms);
        add_u64(&a, h->r->o.cap);
        add_u64(&a, b->ttl_ms);
        add(&a, worker, worker_n);
        add_u64(&a, (uint64_t)b->rank);
        add_u64(&a, b->kind == PL_SESSION_ENGINE_BACKED);
        add_u64(&a, b->turns);
        add_u64(&a, b->parent_hash);
        add(&a, b->note.bytes, b->kind == PL_SESSION_ENGINE_BACKED ? b->note.n : 0);
        break;
    }
    return a.err;
}

static int encode_sweep(pl_redis_op *op)
{
    pl_redis_handle *h = op->h;
    args a = begin(h->r, &h->out, op->in_full, "sweep", 4 + op->acks_n + op->passes_n);
    add_text(&a, h->id);
    add_u64(&a, h->seen);
    add_text(&a, "128");
    add_u64(&a, op->acks_n);
    for (uint32_t i = 0; i < op->acks_n; i++)
        add_u64(&a, h->acks[i]);
    for (uint32_t i = 0; i < op->passes_n; i++)
        add_u64(&a, h->passes[i]);
    return a.err;
}

int pl_redis_encode(pl_redis_op *op)
{
    if (op->kind == PL_REDIS_SWEEP)
        return encode_sweep(op);
    if (op->kind != PL_REDIS_LIST)
        return encode_call(op);
    args a = begin(op->h->r, &op->h->out, op->in_full, "list", 2);
    add_u64(&a, op->list->cursor);
    add_u64(&a, op->list->limit < 200 ? op->list->limit : 200); /* the server does nothing else */
    return a.err;
}

int pl_redis_encode_hello(pl_redis *r)
{
    return begin(r, &r->hello, true, "hello", 0).err;
}

/* --- replies --- */

int64_t pl_redis_int(const redisReply *r)
{
    if (!r)
        return 0;
    if (r->type == REDIS_REPLY_INTEGER)
        return r->integer;
    return r->type == REDIS_REPLY_STRING ? strtoll(r->str, NULL, 10) : 0;
}

static uint64_t unsigned_of(const redisReply *r)
{
    return r->type == REDIS_REPLY_STRING ? strtoull(r->str, NULL, 10) : (uint64_t)pl_redis_int(r);
}

int pl_redis_code(const redisReply *r)
{
    if (r->type != REDIS_REPLY_ARRAY || r->elements < 6 ||
        r->element[0]->type != REDIS_REPLY_INTEGER)
        return PL_EPROTOCOL;
    long long code = r->element[0]->integer;
    return code <= 0 && code > -100 ? (int)code : PL_EPROTOCOL;
}

const redisReply *pl_redis_part(const redisReply *r, size_t i)
{
    return i < r->elements && r->element[i]->type == REDIS_REPLY_ARRAY ? r->element[i] : NULL;
}

/* A time of the server's in the process's clock, which may have started later. */
static uint64_t here_ns(int64_t t_us, int64_t now_us, uint64_t now_ns)
{
    if (t_us >= now_us)
        return now_ns + (uint64_t)(t_us - now_us) * 1000;
    uint64_t ago_ns = (uint64_t)(now_us - t_us) * 1000;
    return ago_ns < now_ns ? now_ns - ago_ns : 0;
}

int pl_redis_binding(pl_redis *r, const redisReply *packed, int64_t now_us, uint64_t now_ns,
                     pl_binding *b)
{
    if (!packed || packed->type != REDIS_REPLY_ARRAY || packed->elements < 11 ||
        packed->element[0]->type != REDIS_REPLY_STRING)
        return PL_EPROTOCOL;
    redisReply **e = packed->element;
    b->rank = (int32_t)(pl_redis_int(e[1]) & PL_SESSION_MAX_RANK);
    b->kind = pl_redis_int(e[2]) ? PL_SESSION_ENGINE_BACKED : PL_SESSION_ROUTER_ONLY;
    b->turns = (uint32_t)pl_redis_int(e[3]);
    b->parent_hash = unsigned_of(e[4]);
    b->opened_at_ns = here_ns(pl_redis_int(e[5]), now_us, now_ns);
    b->used_at_ns = here_ns(pl_redis_int(e[6]), now_us, now_ns);
    b->ttl_ms = (uint32_t)pl_redis_int(e[7]);
    b->deadline_ns = here_ns(pl_redis_int(e[8]), now_us, now_ns);
    b->version = unsigned_of(e[9]);
    b->note.n = 0;
    if (e[10]->type == REDIS_REPLY_STRING && (size_t)e[10]->len <= sizeof b->note.bytes) {
        b->note.n = (uint8_t)e[10]->len;
        memcpy(b->note.bytes, e[10]->str, b->note.n);
    }
    pl_str worker = {e[0]->str, (size_t)e[0]->len};
    if (r->o.find_worker(r->o.worker_ctx, worker, b->rank, &b->slot, &b->generation) == 0)
        return 0;
    b->slot = -1;
    b->generation = 0;
    return PL_ENOTFOUND;
}

int pl_redis_name(const redisReply *r, pl_session_name *name)
{
    if (r->type != REDIS_REPLY_STRING)
        return PL_EPROTOCOL;
    pl_str rest = {r->str, (size_t)r->len}, digits;
    uint64_t tenant_n;
    if (!pl_str_cut(&rest, ':', &digits) ||
        pl_str_u64(digits, PL_SESSION_MAX_TENANT_BYTES, &tenant_n) != 0 || tenant_n >= rest.n ||
        rest.n - tenant_n > PL_SESSION_MAX_ID_BYTES)
        return PL_EPROTOCOL;
    name->tenant = (pl_str){rest.p, tenant_n};
    name->id = (pl_str){rest.p + tenant_n, rest.n - tenant_n};
    return 0;
}
