/* A controller in one thread and in virtual time: two routers (each a pl_sessions) over one store,
 * the first with two loops, and two fake engines, all in one uv loop. The store is the memory store
 * behind a veil that can answer late, refuse, or do a thing and not say so. Static functions:
 * included by each test that needs it. */
#ifndef SESSIONS_RIG_H
#define SESSIONS_RIG_H

#include "fake_engine.h"

#include "base/log.h"
#include "policy_abi.h"
#include "session/sessions.h"

#define RIG_UNUSED __attribute__((unused))
#define MS_NS      1000000u

/* --- the veil --- */

typedef struct veil {
    pl_store base; /* first */
    pl_store *inner;
    bool late;      /* answers come with veil_deliver */
    int fail;       /* what is answered instead, 0: nothing */
    int fail_op;    /* of this operation alone; -1: of all */
    bool fail_does; /* it is done nonetheless */
    pl_store_call *queue[64];
    int queued;
    int calls[8]; /* by operation */
    uint64_t outages;
} veil;

static int veil_start(pl_store *s, pl_store_call *c)
{
    veil *v = (veil *)s;
    bool fails = v->fail && (v->fail_op < 0 || v->fail_op == (int)c->op);
    v->calls[c->op]++;
    if (!fails || v->fail_does)
        pl_store_start(v->inner, c);
    if (fails)
        c->result = v->fail;
    if (!v->late)
        return c->result;
    assert_true(v->queued < 64);
    v->queue[v->queued++] = c;
    return PL_STORE_PENDING;
}

static void veil_cancel(pl_store *s, pl_store_call *c)
{
    veil *v = (veil *)s;
    for (int i = 0; i < v->queued; i++)
        if (v->queue[i] == c) {
            memmove(&v->queue[i], &v->queue[i + 1], (size_t)(v->queued - i - 1) * sizeof c);
            v->queued--;
            return;
        }
    fail_msg("a call was cancelled that is not pending");
}

/* Answers what is pending, one; false: nothing is. */
static RIG_UNUSED bool veil_deliver(veil *v)
{
    if (v->queued == 0)
        return false;
    pl_store_call *c = v->queue[0];
    memmove(&v->queue[0], &v->queue[1], (size_t)(v->queued - 1) * sizeof c);
    v->queued--;
    c->done(c);
    return true;
}

static void veil_stats(pl_store *s, pl_store_stats *out)
{
    veil *v = (veil *)s;
    pl_store_stats_read(v->inner, out);
    out->outages = v->outages;
}

static const pl_store_ops veil_ops = {
    .name = "veil", .start = veil_start, .cancel = veil_cancel, .stats = veil_stats};

/* --- the rig --- */

typedef struct router {
    struct rig *r;
    pl_sessions *s;
    veil v;
    pl_mailbox control, mailbox[2];
    pl_sessions_loop *l[2];
    pl_rng rng;
    int expiring;
    int undecided; /* of them, at the front of these */
    pl_binding expired[32];
    char expired_id[32][64];
} router;

typedef struct rig {
    uv_loop_t loop;
    pl_wheel wheel;
    uint64_t now_ns;
    pl_store *memory;
    pl_fleet *fleet;
    pl_engine *e[2]; /* references of ours */
    fake f[2];
    pl_pool *pool[2];
    pl_pool_options pool_options;
    pl_sessions_options o;
    bool hook; /* expiring is set */
    router a, b;
    int stopped;
} rig;

static pl_engine *rig_find(void *ctx, int slot, int generation, pl_worker_state **w)
{
    router *x = ctx;
    pl_view *v = pl_fleet_view(x->r->fleet);
    pl_engine *e = NULL;
    for (int i = 0; i < v->workers_n && !e; i++)
        if (v->workers[i]->slot == slot && v->workers[i]->generation == generation) {
            *w = v->workers[i];
            e = pl_engine_ref((*w)->engine);
        }
    pl_view_unref(v);
    return e;
}

static pl_pool *rig_pool(void *ctx, pl_engine *e)
{
    router *x = ctx;
    int i = e == x->r->e[1];
    if (!x->r->pool[i])
        x->r->pool[i] =
            pl_pool_new(&x->r->loop, &x->r->wheel, pl_str_c(e->host), e->port, &x->r->pool_options);
    return x->r->pool[i];
}

static void rig_expiring(void *ctx, const pl_session_name *name, const pl_binding *b)
{
    router *x = ctx;
    x->expiring++;
    assert_true(x->undecided < 32);
    x->expired[x->undecided] = *b;
    snprintf(x->expired_id[x->undecided++], sizeof x->expired_id[0], "%.*s", PL_FMT(name->id));
}

/* The verdict about one that has expired; false: there is none. */
static RIG_UNUSED bool rig_decide(router *x, int action, double seconds)
{
    if (x->undecided == 0)
        return false;
    int i = --x->undecided;
    pl_session_name name = {PL_STR("acme"), pl_str_c(x->expired_id[i])};
    pl_sessions_expire(x->s, &name, &x->expired[i], action, seconds);
    return true;
}

static void rig_expired(void *ctx, const pl_session_name *name, const pl_binding *b)
{
    rig *r = ctx;
    pl_sessions_expired(r->a.s, name, b);
}

static void rig_settle(rig *r)
{
    for (int i = 0; i < 20; i++)
        uv_run(&r->loop, UV_RUN_NOWAIT);
}

/* Time passes in steps, as it does for a loop. */
static void rig_pass(rig *r, uint64_t ms)
{
    rig_settle(r);
    while (ms) {
        uint64_t step = ms > 500 ? 500 : ms;
        ms -= step;
        r->now_ns += step * MS_NS;
        pl_wheel_advance(&r->wheel, r->now_ns / MS_NS);
        pl_store_advance(r->memory);
        rig_settle(r);
    }
}

static void rig_late(uv_timer_t *t)
{
    *(bool *)t->data = true;
}

/* Runs the loop, in no time, until it holds; thirty real seconds without that fail the test. */
#define rig_wait(r, condition)                                                                     \
    do {                                                                                           \
        uv_timer_t guard_;                                                                         \
        bool late_ = false;                                                                        \
        uv_timer_init(&(r)->loop, &guard_);                                                        \
        guard_.data = &late_;                                                                      \
        uv_timer_start(&guard_, rig_late, 30000, 0);                                               \
        while (!(condition) && !late_)                                                             \
            uv_run(&(r)->loop, UV_RUN_ONCE);                                                       \
        uv_close((uv_handle_t *)&guard_, NULL);                                                    \
        uv_run(&(r)->loop, UV_RUN_NOWAIT);                                                         \
        if (late_)                                                                                 \
            fail_msg("not within thirty seconds: %s", #condition);                                 \
    } while (0)

/* As rig_wait, and time passes too: at most that many ms of it. */
#define rig_wait_pass(r, ms, condition)                                                            \
    do {                                                                                           \
        for (uint64_t p_ = 0; p_ < (ms) && !(condition); p_ += 20)                                 \
            rig_pass(r, 20);                                                                       \
        assert_true(condition);                                                                    \
    } while (0)

static void router_open(router *x, rig *r)
{
    memset(x, 0, sizeof *x);
    x->r = r;
    x->v.base.ops = &veil_ops;
    x->v.inner = r->memory;
    assert_int_equal(pl_mailbox_init(&x->control, &r->loop, x), 0);
    pl_sessions_config c = {.o = r->o,
                            .clock = pl_clock_virtual(&r->now_ns),
                            .control = &r->loop,
                            .control_wheel = &r->wheel,
                            .control_mailbox = &x->control,
                            .pool = &r->pool_options,
                            .expiring = r->hook ? rig_expiring : NULL,
                            .ctx = x,
                            .find = rig_find};
    assert_int_equal(pl_sessions_new(&c, &x->s), 0);
    pl_sessions_set_store(x->s, &x->v.base);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pl_mailbox_init(&x->mailbox[i], &r->loop, x), 0);
        pl_sessions_loop_config lc = {.store = &x->v.base,
                                      .wheel = &r->wheel,
                                      .mailbox = &x->mailbox[i],
                                      .rng = &x->rng,
                                      .pool = rig_pool,
                                      .ctx = x};
        x->l[i] = pl_sessions_loop_new(x->s, &lc);
        assert_non_null(x->l[i]);
    }
}

static void rig_publish(void *ctx, pl_view *v)
{
    (void)ctx;
    pl_view_unref(v);
}

static pl_engine *rig_engine(rig *r, const char *name, int port)
{
    char url[64];
    pl_errbuf eb;
    pl_engine *e;
    pl_str model = PL_STR("m");
    snprintf(url, sizeof url, "http://127.0.0.1:%d", port);
    pl_engine_spec spec = {.name = pl_str_c(name),
                           .url = pl_str_c(url),
                           .kind = PL_KIND_SGLANG,
                           .models = &model,
                           .models_n = 1};
    assert_int_equal(pl_fleet_add(r->fleet, &spec, &e, &eb), 0);
    e->caps = PL_CAP_SESSIONS | PL_CAP_STREAMING_SESSIONS;
    return e;
}

/* o and hook may be set before: *r is zeroed otherwise. */
static void rig_open(rig *r, const pl_sessions_options *o, bool hook)
{
    memset(r, 0, sizeof *r);
    pl_log_init(PL_LOG_ERROR, 0);
    pl_sessions_options_default(&r->o);
    if (o)
        r->o = *o;
    r->hook = hook;
    r->now_ns = 1000000ull * MS_NS;
    assert_int_equal(uv_loop_init(&r->loop), 0);
    pl_wheel_init(&r->wheel, r->now_ns / MS_NS);
    pl_pool_options_default(&r->pool_options);
    r->fleet = pl_fleet_new(rig_publish, r);
    assert_non_null(r->fleet);
    pl_store_options so = {pl_clock_virtual(&r->now_ns), 1000, rig_expired, r};
    assert_int_equal(pl_store_memory_new(&so, &r->memory), 0);
    for (int i = 0; i < 2; i++) {
        fake_start(&r->f[i], &r->loop, true);
        r->e[i] = rig_engine(r, i ? "e1" : "e0", r->f[i].port);
    }
    router_open(&r->a, r);
    router_open(&r->b, r);
}

static pl_worker_state *rig_worker(rig *r, int i)
{
    return &r->e[i]->workers[0];
}

static void rig_on_stopped(void *ctx)
{
    ((rig *)ctx)->stopped++;
}

static void router_close(router *x)
{
    for (int i = 0; i < 2; i++)
        pl_sessions_loop_free(x->l[i]);
    pl_sessions_stop(x->s, true, 0, rig_on_stopped, x->r);
    int before = x->r->stopped;
    rig_wait_pass(x->r, 100, x->r->stopped > before);
    for (int i = 0; i < 2; i++)
        pl_mailbox_close(&x->mailbox[i]);
    pl_mailbox_close(&x->control);
    pl_sessions_free(x->s);
    assert_int_equal(x->v.queued, 0);
}

/* When the loop has run once more. */
static void router_destroy(router *x)
{
    pl_mailbox_destroy(&x->control);
    for (int i = 0; i < 2; i++)
        pl_mailbox_destroy(&x->mailbox[i]);
}

/* Ends it; nothing may be left in memory, on the wheel or in the loop, nor counted anywhere. */
static void rig_close(rig *r)
{
    router_close(&r->a);
    router_close(&r->b);
    for (int i = 0; i < 2; i++) {
        pl_pool_free(r->pool[i]);
        fake_stop(&r->f[i]);
        assert_int_equal(rig_worker(r, i)->sessions, 0);
        assert_int_equal(rig_worker(r, i)->session_tokens, 0);
    }
    uv_run(&r->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&r->loop), 0);
    assert_int_equal(r->wheel.armed, 0);
    for (int i = 0; i < 2; i++) {
        fake_free(&r->f[i]);
        assert_int_equal(r->e[i]->refs, 3); /* the fleet's, its view's and ours */
        pl_engine_unref(r->e[i]);
    }
    router_destroy(&r->a);
    router_destroy(&r->b);
    pl_store_free(r->memory);
    pl_fleet_free(r->fleet);
}

/* --- turns --- */

typedef struct turn {
    pl_turn t; /* first */
    pl_wish wish;
    int ready, rc;
    bool inside;
    int order; /* of its ready among all */
} turn;

static _Atomic int turns_ready;

static void turn_on_ready(pl_turn *t, int rc)
{
    turn *x = (turn *)t;
    assert_false(x->inside);
    x->ready++;
    x->rc = rc;
    x->order = ++turns_ready;
}

static int turn_begin(turn *x, pl_sessions_loop *l, const char *id, pl_wish_action action)
{
    memset(x, 0, sizeof *x);
    x->wish = (pl_wish){.source = PL_WISH_CONTROL, .action = action, .id = pl_str_c(id)};
    x->t.name = (pl_session_name){PL_STR("acme"), pl_str_c(id)};
    x->t.wish = &x->wish;
    x->t.ready = turn_on_ready;
    x->inside = true;
    int rc = pl_turn_begin(l, &x->t);
    x->inside = false;
    return rc;
}

static int turn_open(turn *x, pl_worker_state *w, uint64_t ttl_ms)
{
    x->inside = true;
    int rc = pl_turn_open(&x->t, w, ttl_ms, true);
    x->inside = false;
    x->ready = 0;
    return rc;
}

/* Begins and opens on engine i; the turn goes on. */
static RIG_UNUSED void rig_opened(rig *r, router *x, turn *t, const char *id, int i,
                                  uint64_t ttl_ms)
{
    assert_int_equal(turn_begin(t, x->l[0], id, PL_WISH_OPEN), 0);
    assert_int_equal(turn_open(t, rig_worker(r, i), ttl_ms), PL_STORE_PENDING);
    rig_wait(r, t->ready);
    assert_int_equal(t->rc, 0);
    assert_true(t->t.bound && t->t.leased);
}

static RIG_UNUSED const pl_history some_history = {{7, 8}, 3, PL_HISTORY_MESSAGES, PL_API_CHAT};

/* A session that is open on engine i and at rest. */
static RIG_UNUSED void rig_session(rig *r, const char *id, int i, uint64_t ttl_ms)
{
    turn t;
    rig_opened(r, &r->a, &t, id, i, ttl_ms);
    pl_turn_sent(&t.t, rig_worker(r, i), ttl_ms);
    pl_turn_end(&t.t, PL_TURN_DONE, &some_history, 100);
}

/* What the store says of the session; true: it is there. */
static RIG_UNUSED bool rig_peek(rig *r, const char *id, pl_binding *b)
{
    pl_store_call c = {.op = PL_STORE_PEEK, .name = {PL_STR("acme"), pl_str_c(id)}};
    int rc = pl_store_start(r->memory, &c);
    *b = c.binding;
    return rc == 0;
}

/* Nobody holds its lease. */
static RIG_UNUSED bool rig_free_lease(rig *r, const char *id)
{
    pl_store_call c = {
        .op = PL_STORE_LEASE, .name = {PL_STR("acme"), pl_str_c(id)}, .owner = 99, .lease_ms = 10};
    int rc = pl_store_start(r->memory, &c);
    if (rc == 0) {
        c.op = PL_STORE_RELEASE;
        c.binding.note.n = 0;
        assert_int_equal(pl_store_start(r->memory, &c), 0);
    }
    return rc != PL_EBUSY;
}

static RIG_UNUSED uint64_t count(const _Atomic uint64_t *c)
{
    return atomic_load(c);
}

static RIG_UNUSED const pl_sessions_stats *stats(const router *x)
{
    return pl_sessions_stats_of(x->s);
}

#endif
