/* The shared store (redis.h): the handles of the loops. Here: calls, their
 * timeouts, what is answered when the server is out of reach, and what is written when it is back.
 * Expiry and the list are in redis_sweep.c, the process's part in redis_process.c. A handle is used
 * on its loop's thread only; handles share pl_redis (options, what is known, counters).
 *
 * A pl_redis_op belongs to the connection from pl_redis_op_send until its reply, also when its
 * caller no longer waits (answered by the timeout, cancelled): then op->call is NULL. */
#include "session/redis.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/log.h"
#include "session/redis_impl.h"

#define WRITES_AT_ONCE 64
#define SAID_AGAIN_NS  60000000000u /* between two lines about refused commands */

static void count(_Atomic uint64_t *n)
{
    atomic_fetch_add_explicit(n, 1, memory_order_relaxed);
}

static uint64_t now_ns(const pl_redis_handle *h)
{
    return pl_clock_now_ns(h->r->o.clock);
}

/* --- operations under way --- */

pl_redis_op *pl_redis_op_new(pl_redis_handle *h, pl_redis_op_kind kind, size_t name_bytes)
{
    size_t own = name_bytes ? sizeof(pl_store_call) + name_bytes : 0;
    pl_redis_op *op = malloc(sizeof *op + own);
    if (!op)
        return NULL;
    memset(op, 0, sizeof *op);
    op->h = h;
    op->kind = kind;
    h->ops++;
    return op;
}

static void release_handle(pl_redis_handle *h)
{
    if (--h->ops > 0 || !h->freed)
        return;
    free(h->acks);
    free(h->passes);
    pl_buf_free(&h->out);
    free(h);
}

void pl_redis_op_end(pl_redis_op *op)
{
    pl_redis_handle *h = op->h;
    pl_redis_unwait(op);
    free(op);
    release_handle(h);
}

static void on_timer(pl_timer *t);

void pl_redis_wait(pl_redis_op *op)
{
    pl_redis_handle *h = op->h;
    op->waited = true;
    op->newer = NULL;
    op->older = h->newest;
    *(h->newest ? &h->newest->newer : &h->oldest) = op;
    h->newest = op;
    if (!pl_timer_armed(&h->timer))
        pl_wheel_arm(h->wheel, &h->timer, h->r->o.command_ms, on_timer);
}

void pl_redis_unwait(pl_redis_op *op)
{
    pl_redis_handle *h = op->h;
    if (!op->waited)
        return;
    op->waited = false;
    if (op == h->oldest)
        h->overdue = false; /* the next one gets its own grace */
    *(op->older ? &op->older->newer : &h->oldest) = op->newer;
    *(op->newer ? &op->newer->older : &h->newest) = op->older;
    if (!h->oldest)
        pl_wheel_cancel(h->wheel, &h->timer);
}

static void on_reply(pl_redis_cmd *cmd, const redisReply *r);

int pl_redis_op_send(pl_redis_op *op)
{
    pl_redis_handle *h = op->h;
    int err = pl_redis_encode(op);
    if (err)
        return err;
    op->cmd.replied = on_reply;
    if (!op->sent_ns) /* again after NOSCRIPT: it keeps its place among those that wait */
        op->sent_ns = pl_now_ns();
    return pl_redis_conn_send(h->conn, &op->cmd, pl_buf_str(&h->out));
}

void pl_redis_counts(pl_redis_handle *h, const redisReply *r)
{
    h->held = (uint64_t)pl_redis_int(r->element[2]);
    h->router_only = (uint64_t)pl_redis_int(r->element[3]);
    h->account->expired_router_only += (uint64_t)pl_redis_int(r->element[4]);
    h->account->evicted += (uint64_t)pl_redis_int(r->element[5]);
}

/* --- without the server --- */

static bool put_without(pl_redis_handle *h, pl_store_call *c)
{
    if (c->binding.kind != PL_SESSION_ROUTER_ONLY)
        return false;
    pl_redis *r = h->r;
    c->had_old = pl_known_stale(r->known, &c->name, false, now_ns(h), &c->old);
    if (c->when == PL_STORE_IF_VERSION && !(c->had_old && c->old.version == c->version)) {
        c->had_old = false; /* what the server has is not known */
        return false;
    }
    if (c->had_old && c->when == PL_STORE_IF_ABSENT) {
        c->result = PL_EEXISTS;
        return true;
    }
    if (c->had_old && c->old.kind == PL_SESSION_ENGINE_BACKED) {
        c->had_old = false; /* the server would still have it */
        return false;
    }
    if (!pl_known_bind(r->known, &c->name, &c->binding, now_ns(h)))
        return false;
    count(&r->stats.journalled);
    c->result = 0;
    return true;
}

static bool remove_without(pl_redis_handle *h, pl_store_call *c)
{
    bool known = pl_known_stale(h->r->known, &c->name, false, now_ns(h), &c->old);
    if (c->when == PL_STORE_IF_VERSION && !(known && c->old.version == c->version))
        return false; /* what the server has is not known */
    pl_known_forget(h->r->known, &c->name);
    if (!known || !(c->old.version & PL_KNOWN_LOCAL))
        return false;
    c->had_old = true;
    c->result = 0;
    return true;
}

/* What this process can answer by itself; err is the answer otherwise. */
static int answer_without(pl_redis_handle *h, pl_store_call *c, int err)
{
    pl_redis *r = h->r;
    bool ok = false;
    count(err == PL_ETIMEOUT ? &r->stats.timeouts : &r->stats.unavailable);
    if (c->op == PL_STORE_GET || c->op == PL_STORE_PEEK) {
        ok = pl_known_stale(r->known, &c->name, c->op == PL_STORE_GET, now_ns(h), &c->binding);
        c->result = 0;
    } else if (c->op == PL_STORE_PUT) {
        ok = put_without(h, c);
    } else if (c->op == PL_STORE_REMOVE) {
        ok = remove_without(h, c);
    }
    c->stale = ok;
    if (ok)
        count(&r->stats.stale);
    else
        c->result = err;
    return c->result;
}

/* Answers whoever waits for op without the server. op stays for its reply. */
static void give_up(pl_redis_op *op, int err)
{
    pl_redis_unwait(op);
    if (op->list) {
        pl_store_list_call *l = op->list;
        op->list = NULL;
        l->pending = NULL;
        l->result = err;
        if (l->done)
            l->done(l);
    } else if (op->kind == PL_REDIS_CALL && op->call) {
        pl_store_call *c = op->call;
        op->call = NULL;
        c->pending = NULL;
        answer_without(op->h, c, err);
        if (c->done)
            c->done(c);
    }
}

/* When the oldest call has waited for long enough. */
static uint64_t late_ns(const pl_redis_handle *h)
{
    return h->oldest->sent_ns + h->r->o.command_ms * 1000000;
}

static void on_timer(pl_timer *t)
{
    pl_redis_handle *h = (pl_redis_handle *)((char *)t - offsetof(pl_redis_handle, timer));
    uint64_t at_ns = pl_now_ns();
    h->ops++; /* a done() may free the handle */
    if (h->oldest && late_ns(h) <= at_ns && !h->overdue) {
        /* once around the loop: it may have been busy while the reply came */
        h->overdue = true;
        pl_wheel_arm(h->wheel, t, PL_WHEEL_TICK_MS, on_timer);
        release_handle(h);
        return;
    }
    h->overdue = false;
    while (h->oldest && late_ns(h) <= at_ns) /* not what done() has sent meanwhile */
        give_up(h->oldest, PL_ETIMEOUT);
    if (h->oldest) /* armed already by what done() has sent, but that has longer */
        pl_wheel_arm(h->wheel, t, (late_ns(h) - at_ns) / 1000000, on_timer);
    release_handle(h);
}

/* --- back again: what was bound meanwhile --- */

void pl_redis_write_more(pl_redis_handle *h)
{
    pl_redis *r = h->r;
    char buf[PL_SESSION_MAX_TENANT_BYTES + PL_SESSION_MAX_ID_BYTES];
    pl_session_name name;
    pl_binding b;
    while (h->writing < WRITES_AT_ONCE && pl_redis_conn_up(h->conn) &&
           pl_known_take(r->known, now_ns(h), &name, buf, &b)) {
        size_t n = name.tenant.n + name.id.n;
        pl_redis_op *op = pl_redis_op_new(h, PL_REDIS_WRITE, n);
        if (!op) {
            pl_known_unwritten(r->known, &name);
            return;
        }
        char *bytes = (char *)&op->own[1];
        memcpy(bytes, buf, n);
        op->call = &op->own[0];
        *op->call =
            (pl_store_call){.op = PL_STORE_PUT,
                            .when = PL_STORE_IF_ABSENT,
                            .name = {{bytes, name.tenant.n}, {bytes + name.tenant.n, name.id.n}},
                            .binding = b};
        int err = pl_redis_op_send(op);
        if (err) {
            if (err == PL_EINVALID) { /* the worker has gone */
                pl_known_forget(r->known, &name);
                count(&r->stats.forgotten);
            } else {
                pl_known_unwritten(r->known, &name);
            }
            pl_redis_op_end(op);
            if (err != PL_EINVALID)
                return;
            continue;
        }
        h->writing++;
    }
}

static void written(pl_redis_op *op, const redisReply *r)
{
    pl_redis_handle *h = op->h;
    pl_store_call *c = op->call;
    pl_known *known = h->r->known;
    int code = r ? pl_redis_code(r) : PL_EUNAVAILABLE;
    h->writing--;
    if (code == 0 || code == PL_EEXISTS) {
        uint64_t at_ns = now_ns(h);
        pl_binding b;
        pl_redis_counts(h, r);
        count(code ? &h->r->stats.conflicts : &h->r->stats.written);
        if (pl_redis_binding(h->r, pl_redis_part(r, 6), pl_redis_int(r->element[1]), at_ns, &b) ==
            0)
            pl_known_heard(known, &c->name, &b, at_ns);
        else
            pl_known_forget(known, &c->name);
    } else if (code == PL_ELIMIT) {
        pl_known_forget(known, &c->name);
        count(&h->r->stats.forgotten);
    } else {
        pl_known_unwritten(known, &c->name);
    }
    if (r && code != PL_EPROTOCOL)
        pl_redis_write_more(h);
    pl_redis_op_end(op);
}

/* --- replies --- */

/* A lease was taken on a session whose worker this process does not know: nobody will use it. */
static void unlease(pl_redis_handle *h, const pl_store_call *c)
{
    size_t n = c->name.tenant.n + c->name.id.n;
    pl_redis_op *op = pl_redis_op_new(h, PL_REDIS_UNLEASE, n);
    if (!op)
        return; /* it ends by itself */
    char *bytes = (char *)&op->own[1];
    if (c->name.tenant.n)
        memcpy(bytes, c->name.tenant.p, c->name.tenant.n);
    memcpy(bytes + c->name.tenant.n, c->name.id.p, c->name.id.n);
    op->call = &op->own[0];
    *op->call = (pl_store_call){
        .op = PL_STORE_RELEASE,
        .name = {{bytes, c->name.tenant.n}, {bytes + c->name.tenant.n, c->name.id.n}},
        .owner = c->owner};
    if (pl_redis_op_send(op) != 0)
        pl_redis_op_end(op);
}

/* `used`: this very call was a use. */
static void learn(pl_redis_handle *h, const pl_store_call *c, const pl_binding *b, bool used)
{
    uint64_t at_ns = now_ns(h);
    pl_binding known = *b;
    if (used)
        known.used_at_ns = at_ns;
    pl_known_heard(h->r->known, &c->name, &known, at_ns);
}

static int read_reply(pl_redis_handle *h, pl_store_call *c, const redisReply *r, int code)
{
    const redisReply *now = pl_redis_part(r, 6), *before = pl_redis_part(r, 7);
    int64_t now_us = pl_redis_int(r->element[1]);
    uint64_t at_ns = now_ns(h);
    int err;
    switch (c->op) {
    case PL_STORE_PUT:
        if (code == 0) {
            pl_binding b;
            err = pl_redis_binding(h->r, now, now_us, at_ns, &b);
            if (err == PL_EPROTOCOL)
                return err;
            c->binding.deadline_ns = b.deadline_ns;
            c->binding.version = b.version;
            c->binding.opened_at_ns = b.opened_at_ns;
            c->binding.used_at_ns = b.used_at_ns;
            c->binding.note.n = b.note.n;
            c->had_old =
                before && pl_redis_binding(h->r, before, now_us, at_ns, &c->old) != PL_EPROTOCOL;
            learn(h, c, &c->binding, true);
            return 0;
        }
        h->account->refused += code == PL_ELIMIT;
        break;
    case PL_STORE_REMOVE:
        if (code == 0 || code == PL_ENOTFOUND)
            pl_known_forget(h->r->known, &c->name);
        break;
    default:
        if (code == 0 || code == PL_EBUSY) {
            err = pl_redis_binding(h->r, now, now_us, at_ns, &c->binding);
            if (err == PL_ENOTFOUND && c->op == PL_STORE_LEASE && code == 0)
                unlease(h, c);
            if (err) {
                pl_known_forget(h->r->known, &c->name);
                return err;
            }
            c->lapsed = c->op == PL_STORE_LEASE && code == 0 && r->elements > 7 &&
                        pl_redis_int(r->element[7]) == 1;
            learn(h, c, &c->binding, c->op == PL_STORE_GET || c->op == PL_STORE_RELEASE);
        } else if (code == PL_ENOTFOUND && (c->op == PL_STORE_GET || c->op == PL_STORE_PEEK)) {
            /* the server came back empty, and this one's turn to be written has not come yet */
            c->stale =
                pl_known_owed(h->r->known, &c->name, c->op == PL_STORE_GET, at_ns, &c->binding);
            if (c->stale)
                return 0;
            pl_known_forget(h->r->known, &c->name);
        }
        return code;
    }
    if (now && (code == 0 || code == PL_EEXISTS)) {
        err = pl_redis_binding(h->r, now, now_us, at_ns, &c->old);
        c->had_old = err != PL_EPROTOCOL;
        if (!err && code == PL_EEXISTS)
            learn(h, c, &c->old, false);
    }
    return code;
}

static void refused(pl_redis_handle *h, const redisReply *r)
{
    static const char *const hopeless[] = {"READONLY", "LOADING", "MASTERDOWN",
                                           "NOAUTH",   "NOPERM",  "CLUSTERDOWN",
                                           "OOM",      "MISCONF", "NOREPLICAS"};
    static _Atomic uint64_t said_ns;
    char text[160] = "an answer that is not its script's";
    if (r->type == REDIS_REPLY_ERROR)
        snprintf(text, sizeof text, "%.*s", (int)(r->len < 150 ? r->len : 150), r->str);
    char *where = strstr(text, " script: "); /* which line of ours it was is nobody's business */
    if (where)
        where[where > text && where[-1] == '.' ? -1 : 0] = 0;
    count(&h->r->stats.refused);
    for (size_t i = 0; i < sizeof hopeless / sizeof hopeless[0]; i++) {
        if (strncmp(text, hopeless[i], strlen(hopeless[i])) == 0) {
            pl_redis_conn_drop(h->conn, text);
            return;
        }
    }
    uint64_t at_ns = pl_now_ns(), last_ns = atomic_load(&said_ns);
    if ((!last_ns || at_ns - last_ns >= SAID_AGAIN_NS) &&
        atomic_compare_exchange_strong(&said_ns, &last_ns, at_ns))
        pl_log(PL_LOG_WARN, "store_refused", "the shared store at %s refused a command: %s",
               h->r->where, text);
}

static void on_reply(pl_redis_cmd *cmd, const redisReply *r)
{
    pl_redis_op *op = (pl_redis_op *)cmd;
    pl_redis_handle *h = op->h;
    if (r && r->type == REDIS_REPLY_ERROR && strncmp(r->str, "NOSCRIPT", 8) == 0 && !op->in_full &&
        (op->call || op->list || op->kind == PL_REDIS_SWEEP)) {
        op->in_full = true; /* somebody has emptied the server's scripts */
        if (pl_redis_op_send(op) == 0)
            return;
        r = NULL;
    }
    if (r && pl_redis_code(r) == PL_EPROTOCOL) {
        h->ops++;
        refused(h, r);
        r = NULL;
        release_handle(h); /* op keeps it */
    }
    switch (op->kind) {
    case PL_REDIS_SWEEP:
        pl_redis_swept(op, r);
        return;
    case PL_REDIS_LIST:
        if (!r || !op->list)
            give_up(op, PL_EUNAVAILABLE);
        else
            pl_redis_listed(op, r);
        break;
    case PL_REDIS_WRITE:
        written(op, r);
        return;
    case PL_REDIS_UNLEASE:
        break;
    case PL_REDIS_CALL:
        if (r)
            pl_redis_counts(h, r);
        if (!op->call) {
            if (r)
                count(&h->r->stats.late);
        } else if (!r) {
            give_up(op, PL_EUNAVAILABLE);
        } else {
            pl_store_call *c = op->call;
            pl_redis_unwait(op);
            op->call = NULL;
            c->pending = NULL;
            c->result = read_reply(h, c, r, pl_redis_code(r));
            if (c->result == PL_EPROTOCOL)
                c->result = PL_EUNAVAILABLE;
            count(&h->r->stats.answered);
            pl_hist_observe(&h->account->latency, pl_now_ns() - op->sent_ns);
            if (c->done)
                c->done(c);
        }
    }
    pl_redis_op_end(op);
}

/* --- up and down --- */

static void on_up(void *ctx)
{
    pl_redis_handle *h = ctx;
    pl_redis *r = h->r;
    bool was_down = h->state == PL_REDIS_DOWN;
    h->state = PL_REDIS_UP;
    count(&r->stats.connects);
    if (was_down && atomic_fetch_sub(&r->stats.handles_down, 1) == 1)
        pl_log(PL_LOG_INFO, "store_up",
               "the shared store at %s serves again after %.1f s (this loop's); %llu calls were "
               "answered without it so far",
               r->where, (double)(pl_now_ns() - h->down_ns) / 1e9,
               (unsigned long long)(atomic_load(&r->stats.timeouts) +
                                    atomic_load(&r->stats.unavailable)));
    pl_redis_write_more(h);
    if (h->sweeps)
        pl_redis_sweep_now(h);
}

static void on_down(void *ctx, const char *why)
{
    pl_redis_handle *h = ctx;
    pl_redis *r = h->r;
    if (h->state != PL_REDIS_DOWN) {
        h->state = PL_REDIS_DOWN;
        h->down_ns = pl_now_ns();
        count(&r->stats.outages);
        if (atomic_fetch_add(&r->stats.handles_down, 1) == 0)
            pl_log(PL_LOG_WARN, "store_down",
                   "the shared store at %s is out of reach: %s. Sessions go by what this router "
                   "knows of them, else by a choice that needs no store",
                   r->where, why);
    }
    h->ops++;
    while (h->oldest)
        give_up(h->oldest, PL_EUNAVAILABLE);
    release_handle(h);
}

/* --- the store --- */

static int redis_start(pl_store *s, pl_store_call *c)
{
    pl_redis_handle *h = (pl_redis_handle *)s;
    pl_redis *r = h->r;
    c->had_old = c->stale = c->lapsed = false;
    c->pending = NULL;
    c->result = pl_store_check(c);
    if (c->result)
        return c->result;
    bool get = c->op == PL_STORE_GET;
    if ((get || c->op == PL_STORE_PEEK) && r->fresh_ns &&
        pl_known_fresh(r->known, &c->name, get, r->fresh_ns, now_ns(h), &c->binding)) {
        count(&r->stats.cached);
        return 0;
    }
    if (!pl_redis_conn_up(h->conn))
        return answer_without(h, c, PL_EUNAVAILABLE);
    pl_redis_op *op = pl_redis_op_new(h, PL_REDIS_CALL, 0);
    if (!op)
        return c->result = PL_ENOMEM;
    op->call = c;
    op->turns = get ? 1 + (r->fresh_ns ? pl_known_turns(r->known, &c->name) : 0) : 0;
    int err = pl_redis_op_send(op);
    if (err) {
        pl_redis_op_end(op);
        return err == PL_EUNAVAILABLE ? answer_without(h, c, err) : (c->result = err);
    }
    count(&r->stats.calls);
    c->pending = op;
    pl_redis_wait(op);
    return c->result = PL_STORE_PENDING;
}

static void redis_cancel(pl_store *s, pl_store_call *c)
{
    pl_redis_op *op = c->pending;
    (void)s;
    if (!op)
        return;
    pl_redis_unwait(op);
    op->call = NULL;
    c->pending = NULL;
}

static void redis_advance(pl_store *s)
{
    pl_redis_handle *h = (pl_redis_handle *)s;
    if (h->sweeps)
        pl_redis_sweep_now(h);
}

static void redis_stats(pl_store *s, pl_store_stats *out)
{
    const pl_redis_handle *h = (pl_redis_handle *)s;
    uint64_t held = h->held, router_only = h->router_only;
    *out = (pl_store_stats){.router_only = router_only,
                            .engine_backed = held > router_only ? held - router_only : 0,
                            .outages = h->r->stats.outages};
    for (const pl_redis_account *p = atomic_load(&h->r->accounts); p; p = p->next) {
        out->expired_router_only += p->expired_router_only;
        out->expired_engine_backed += p->expired_engine_backed;
        out->evicted += p->evicted;
        out->refused += p->refused;
    }
}

static void redis_free(pl_store *s)
{
    pl_redis_handle *h = (pl_redis_handle *)s;
    pl_wheel_cancel(h->wheel, &h->timer);
    if (h->sweeps && h->acks_n) /* else another router closes them once more */
        pl_redis_sweep_now(h);
    pl_redis_timer_stop(h);
    if (h->state == PL_REDIS_DOWN)
        atomic_fetch_sub(&h->r->stats.handles_down, 1);
    h->state = PL_REDIS_STARTING;
    h->ops++;
    h->freed = true;
    pl_redis_conn_free(h->conn);
    release_handle(h);
}

static const pl_store_ops redis_ops = {
    .name = "redis",
    .start = redis_start,
    .cancel = redis_cancel,
    .list = pl_redis_list,
    .cancel_list = pl_redis_cancel_list,
    .advance = redis_advance,
    .stats = redis_stats,
    .free = redis_free,
};

int pl_store_redis_new(pl_redis *r, uv_loop_t *loop, pl_wheel *wheel, bool sweeps, pl_store **out)
{
    *out = NULL;
    pl_redis_handle *h = calloc(1, sizeof *h);
    if (!h)
        return PL_ENOMEM;
    h->account = calloc(1, sizeof *h->account);
    if (!h->account) {
        free(h);
        return PL_ENOMEM;
    }
    h->base.ops = &redis_ops;
    h->r = r;
    h->loop = loop;
    h->wheel = wheel;
    h->sweeps = sweeps;
    uint64_t id;
    if (getrandom(&id, sizeof id, 0) != sizeof id)
        id = pl_now_ns() ^ (uint64_t)(uintptr_t)h;
    snprintf(h->id, sizeof h->id, "%016llx", (unsigned long long)id);
    pl_redis_conn_options o = {
        .loop = loop,
        .wheel = wheel,
        .host = r->host,
        .unix_path = r->unix_path,
        .user = r->user,
        .password = r->password,
        .port = r->o.port,
        .db = r->o.db,
        .connect_ms = r->o.connect_ms,
        .silence_ms = r->o.command_ms,
        .seed = id,
        .hello = pl_buf_str(&r->hello),
        .up = on_up,
        .down = on_down,
        .ctx = h,
    };
    int err = pl_redis_conn_new(&o, &h->conn);
    if (err) {
        free(h->account);
        free(h);
        return err;
    }
    h->account->next = atomic_load(&r->accounts);
    while (!atomic_compare_exchange_weak(&r->accounts, &h->account->next, h->account))
        ;
    pl_redis_timer_start(h);
    *out = &h->base;
    return 0;
}

void pl_redis_latency(const pl_redis *r, pl_hist *into)
{
    for (const pl_redis_account *p = atomic_load(&r->accounts); p; p = p->next)
        pl_hist_merge(into, &p->latency);
}

bool pl_store_redis_up(const pl_store *s)
{
    return ((const pl_redis_handle *)s)->state == PL_REDIS_UP;
}
