/* Expiry on the shared store, and the list of its sessions. A handle that sweeps asks when it is
 * advanced and once a second (one question at a time) for what is due: the script claims it for
 * this handle and hands it over, together with claims of an earlier answer that never arrived.
 * Acknowledgements go with the next question. All on the handle's loop. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "session/redis_impl.h"

#define SWEEP_MS      1000
#define CARRIED_MAX   256 /* acknowledgements of one sweep */
#define REMEMBER_MAX  65536
#define HEAD_ELEMENTS 9

static void count(_Atomic uint64_t *n, uint64_t by)
{
    atomic_fetch_add_explicit(n, by, memory_order_relaxed);
}

/* Remembers a version to be sent. When there is no room or memory it is not: the claim is dropped
 * by its age. */
static void remember(uint64_t **list, uint32_t *n, uint32_t *cap, uint64_t version)
{
    if (*n == *cap) {
        uint32_t more = *cap ? *cap * 2 : 64;
        uint64_t *grown = more <= REMEMBER_MAX ? realloc(*list, more * sizeof **list) : NULL;
        if (!grown)
            return;
        *list = grown;
        *cap = more;
    }
    (*list)[(*n)++] = version;
}

static void forget_first(uint64_t *list, uint32_t *n, uint32_t gone)
{
    if (gone == 0)
        return;
    *n -= gone;
    memmove(list, list + gone, *n * sizeof *list);
}

static void on_timer(pl_timer *t)
{
    pl_redis_handle *h = (pl_redis_handle *)((char *)t - offsetof(pl_redis_handle, sweep_timer));
    pl_wheel_arm(h->wheel, t, SWEEP_MS, on_timer);
    if (h->sweeps)
        pl_redis_sweep_now(h);
    pl_redis_write_more(h); /* what memory was short for before */
}

void pl_redis_timer_start(pl_redis_handle *h)
{
    pl_wheel_arm(h->wheel, &h->sweep_timer, SWEEP_MS, on_timer);
}

void pl_redis_timer_stop(pl_redis_handle *h)
{
    pl_wheel_cancel(h->wheel, &h->sweep_timer);
    h->sweeps = false;
}

void pl_redis_sweep_now(pl_redis_handle *h)
{
    if (h->sweeping) {
        h->again = true;
        return;
    }
    if (h->freed || !pl_redis_conn_up(h->conn))
        return;
    pl_redis_op *op = pl_redis_op_new(h, PL_REDIS_SWEEP, 0);
    if (!op)
        return;
    op->acks_n = h->acks_n < CARRIED_MAX ? h->acks_n : CARRIED_MAX;
    op->passes_n = h->passes_n < CARRIED_MAX ? h->passes_n : CARRIED_MAX;
    if (pl_redis_op_send(op) != 0) {
        pl_redis_op_end(op);
        return;
    }
    h->sweeping = true;
    h->again = false;
}

static void hand_over(pl_redis_handle *h, const redisReply *claim, int64_t now_us, uint64_t now_ns)
{
    pl_redis *r = h->r;
    pl_binding b;
    pl_session_name name;
    if (claim->type != REDIS_REPLY_ARRAY || claim->elements < 13)
        return;
    uint64_t stamp = (uint64_t)pl_redis_int(claim->element[11]);
    if (stamp > h->seen)
        h->seen = stamp;
    int err = pl_redis_binding(r, claim, now_us, now_ns, &b);
    if (err == PL_EPROTOCOL || pl_redis_name(claim->element[12], &name) != 0)
        return;
    if (err) {
        count(&r->stats.given, 1);
        remember(&h->passes, &h->passes_n, &h->passes_cap, b.version);
        return;
    }
    h->account->expired_engine_backed++;
    count(&r->stats.claims, 1);
    pl_binding known;
    if (pl_known_stale(r->known, &name, false, now_ns, &known) && known.version == b.version)
        pl_known_forget(r->known, &name);
    r->o.expired(r->o.expired_ctx, &h->base, &name, &b);
}

void pl_redis_swept(pl_redis_op *op, const redisReply *r)
{
    pl_redis_handle *h = op->h;
    bool more = false;
    if (r && r->elements >= HEAD_ELEMENTS) {
        uint64_t now_ns = pl_clock_now_ns(h->r->o.clock);
        int64_t now_us = pl_redis_int(r->element[1]);
        const redisReply *claims = pl_redis_part(r, 8);
        pl_redis_counts(h, r);
        count(&h->r->stats.acks, op->acks_n);
        count(&h->r->stats.takeovers, (uint64_t)pl_redis_int(r->element[7]));
        forget_first(h->acks, &h->acks_n, op->acks_n);
        forget_first(h->passes, &h->passes_n, op->passes_n);
        for (size_t i = 0; claims && i < claims->elements && !h->freed; i++)
            hand_over(h, claims->element[i], now_us, now_ns);
        more = pl_redis_int(r->element[6]) || h->acks_n > CARRIED_MAX;
    }
    h->sweeping = false;
    if (!h->freed && r && (more || h->again))
        pl_redis_sweep_now(h);
    pl_redis_op_end(op);
}

void pl_store_redis_ack(pl_store *s, uint64_t version)
{
    pl_redis_handle *h = (pl_redis_handle *)s;
    remember(&h->acks, &h->acks_n, &h->acks_cap, version);
}

/* --- the list --- */

int pl_redis_list(pl_store *s, pl_store_list_call *c)
{
    pl_redis_handle *h = (pl_redis_handle *)s;
    c->pending = NULL;
    if (c->limit == 0 || c->limit > PL_STORE_LIST_MAX)
        return c->result = PL_EINVALID;
    pl_redis_op *op = pl_redis_op_new(h, PL_REDIS_LIST, 0);
    if (!op)
        return c->result = PL_ENOMEM;
    op->list = c;
    int err = pl_redis_op_send(op);
    if (err) {
        op->list = NULL;
        pl_redis_op_end(op);
        return c->result = err;
    }
    c->pending = op;
    pl_redis_wait(op);
    return c->result = PL_STORE_PENDING;
}

void pl_redis_cancel_list(pl_store *s, pl_store_list_call *c)
{
    pl_redis_op *op = c->pending;
    (void)s;
    if (!op)
        return;
    pl_redis_unwait(op);
    op->list = NULL;
    c->pending = NULL;
}

void pl_redis_listed(pl_redis_op *op, const redisReply *r)
{
    pl_redis_handle *h = op->h;
    pl_store_list_call *c = op->list;
    pl_redis_unwait(op);
    op->list = NULL;
    c->pending = NULL;
    pl_redis_counts(h, r);
    const redisReply *list = pl_redis_part(r, 7);
    uint64_t now_ns = pl_clock_now_ns(h->r->o.clock);
    for (size_t i = 0; list && i < list->elements; i++) {
        const redisReply *e = list->element[i];
        pl_binding b;
        pl_session_name name;
        if (pl_redis_binding(h->r, e, pl_redis_int(r->element[1]), now_ns, &b) != PL_EPROTOCOL &&
            e->elements > 11 && pl_redis_name(e->element[11], &name) == 0)
            c->each(c, &name, &b);
    }
    c->cursor = r->elements > 6 && r->element[6]->type == REDIS_REPLY_STRING
                    ? strtoull(r->element[6]->str, NULL, 10)
                    : 0;
    c->result = list ? 0 : PL_EUNAVAILABLE;
    if (c->done)
        c->done(c);
}
