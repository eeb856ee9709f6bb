/* Everything at once, by chance: opens, turns, closes, expiries, cancels, engines and a store that
 * fail in every way; first in virtual time with two routers, then with loops in threads of their
 * own. In the end nothing may be left: no lease, no count, and on the engines nothing that was not
 * given up. */
#include "sessions_rig.h"

#include <pthread.h>

enum { IDS = 10 };

static const pl_turn_end_kind hows[] = {PL_TURN_DONE,    PL_TURN_DONE,   PL_TURN_DONE,
                                        PL_TURN_ABORTED, PL_TURN_FAILED, PL_TURN_POISONED};

/* Someone who makes turns, one after the other. */
typedef struct actor {
    turn t;
    char id[16];
    enum { AWAY, WAITING, IN_TURN, SENT } at;
    bool opening;
    int turns;
} actor;

static void actor_begin(actor *a, pl_sessions_loop *l, pl_rng *rng)
{
    static const pl_wish_action actions[] = {PL_WISH_TURN, PL_WISH_TURN, PL_WISH_OPEN,
                                             PL_WISH_OPEN, PL_WISH_BIND, PL_WISH_CLOSE};
    snprintf(a->id, sizeof a->id, "s%u", pl_rng_below(rng, IDS));
    int rc = turn_begin(&a->t, l, a->id, actions[pl_rng_below(rng, 6)]);
    a->opening = false;
    a->at = rc == PL_STORE_PENDING ? WAITING : rc == 0 ? IN_TURN : AWAY;
}

/* What was waited for has come. */
static void actor_ready(actor *a)
{
    if (!a->t.ready)
        return;
    a->t.ready = 0;
    a->at = a->t.rc == 0 || a->opening ? IN_TURN : AWAY;
    assert_int_equal(a->at == AWAY, a->t.t.in == NULL);
    if (a->opening && (a->t.rc == 0 || (a->t.rc == PL_EEXISTS && a->t.t.bound)))
        assert_true(a->t.t.leased);
}

static void actor_step(actor *a, pl_sessions_loop *l, pl_worker_state *w, pl_rng *rng,
                       uint64_t ttl_ms)
{
    uint32_t dice = pl_rng_below(rng, 100);
    switch (a->at) {
    case AWAY:
        if (dice < 50)
            actor_begin(a, l, rng);
        return;
    case WAITING:
        actor_ready(a);
        if (a->at == WAITING && dice < 5) {
            pl_turn_cancel(&a->t.t);
            a->at = AWAY;
        }
        return;
    default:
        break;
    }
    a->turns++;
    if (a->at == IN_TURN && dice < 30 && a->t.wish.action == PL_WISH_OPEN &&
        (!a->t.t.bound || dice < 3)) {
        a->opening = true;
        int rc = turn_open(&a->t, w, ttl_ms);
        if (rc == PL_STORE_PENDING)
            a->at = WAITING;
    } else if (a->at == IN_TURN && dice < 60) {
        pl_turn_sent(&a->t.t, w, ttl_ms);
        a->at = SENT;
    } else if (dice >= 80) {
        pl_turn_end(&a->t.t, hows[pl_rng_below(rng, 6)], &some_history, dice);
        a->at = AWAY;
    }
}

static void actor_stop(actor *a)
{
    if (a->at == WAITING)
        pl_turn_cancel(&a->t.t);
    else if (a->at != AWAY)
        pl_turn_end(&a->t.t, PL_TURN_DONE, NULL, -1);
    a->at = AWAY;
}

/* --- in virtual time --- */

enum { ACTORS = 24, STEPS = 2500 };

/* One turn at a time holds a session's lease. */
static void check_leases(const actor *a)
{
    for (int i = 0; i < ACTORS; i++)
        for (int k = 0; k < i; k++)
            if (a[i].at >= IN_TURN && a[k].at >= IN_TURN && a[i].t.t.leased && a[k].t.t.leased)
                assert_true(strcmp(a[i].id, a[k].id) != 0 ||
                            a[i].t.t.binding.version != a[k].t.t.binding.version);
}

static void storm(uint64_t seed)
{
    rig r;
    pl_sessions_options o;
    pl_sessions_options_default(&o);
    o.max_open_per_worker = 6;
    o.max_waiting_turns = 3;
    rig_open(&r, &o, seed % 2);
    pl_rng rng = {seed};
    actor a[ACTORS];
    memset(a, 0, sizeof a);
    r.f[0].chaos = r.f[1].chaos = &rng;
    r.a.v.late = true;
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < 2; i++) {
            veil *v = i ? &r.b.v : &r.a.v;
            static const int fails[] = {PL_ETIMEOUT, PL_EUNAVAILABLE};
            v->fail = pl_rng_below(&rng, 20) ? 0 : fails[pl_rng_below(&rng, 2)];
            v->fail_does = v->fail == PL_ETIMEOUT && pl_rng_below(&rng, 2);
            v->fail_op = -1;
        }
        for (int i = 0; i < ACTORS; i++) {
            router *x = i % 3 ? &r.a : &r.b;
            actor_step(&a[i], x->l[i % 2], rig_worker(&r, (int)pl_rng_below(&rng, 2)), &rng,
                       1000 + pl_rng_below(&rng, 20000));
        }
        while (pl_rng_below(&rng, 3) && veil_deliver(&r.a.v))
            ;
        if (step % 3 == 0)
            rig_pass(&r, 20 + pl_rng_below(&rng, 200));
        check_leases(a);
        if (step % 50 == 0) {
            fake_release(&r.f[0]);
            fake_release(&r.f[1]);
            for (int i = 0; i < 2; i++) /* as detection does */
                atomic_store(&r.e[i]->caps, PL_CAP_SESSIONS | PL_CAP_STREAMING_SESSIONS);
        }
        static const int verdicts[] = {PL_CLOSE, PL_EXTEND, PL_DEFAULT};
        while (rig_decide(&r.a, verdicts[pl_rng_below(&rng, 3)], 3))
            ;
    }
    int turns = 0;
    for (int i = 0; i < ACTORS; i++) {
        turns += a[i].turns;
        actor_stop(&a[i]);
    }
    r.a.v.fail = r.b.v.fail = 0;
    r.f[0].chaos = r.f[1].chaos = NULL;
    while (veil_deliver(&r.a.v))
        ;
    r.a.v.late = false;
    for (int i = 0; i < 400; i++) {
        while (rig_decide(&r.a, PL_DEFAULT, 0))
            ;
        fake_release(&r.f[0]);
        fake_release(&r.f[1]);
        rig_pass(&r, 500);
    }
    assert_true(turns > STEPS);
    assert_true(count(&stats(&r.a)->opens) > 10 && count(&stats(&r.b)->opens) > 10);
    assert_true(count(&stats(&r.a)->turns_waited) > 50);
    assert_int_equal(rig_worker(&r, 0)->sessions, 0);
    assert_int_equal(rig_worker(&r, 1)->sessions, 0);
    for (int i = 0; i < IDS; i++) {
        char id[16];
        snprintf(id, sizeof id, "s%d", i);
        assert_true(rig_free_lease(&r, id));
    }
    pl_store_stats st;
    pl_store_stats_read(r.memory, &st);
    assert_int_equal(st.engine_backed, 0);
    uint64_t given_up = count(&stats(&r.a)->close_given_up) + count(&stats(&r.b)->close_given_up);
    if ((uint64_t)(r.f[0].open_n + r.f[1].open_n) > given_up)
        fail_msg("seed %llu: %d and %d are left, %llu were given up", (unsigned long long)seed,
                 r.f[0].open_n, r.f[1].open_n, (unsigned long long)given_up);
    rig_close(&r);
}

static void in_virtual_time(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 4; seed++)
        storm(seed);
}

/* --- in threads --- */

enum { LOOPS = 3, LOOP_ACTORS = 8, LOOP_STEPS = 400 };

typedef struct thread_loop {
    struct threads *all;
    uv_thread_t thread;
    uv_loop_t loop;
    pl_wheel wheel;
    uv_timer_t timer;
    pl_mailbox mailbox;
    pl_sessions_loop *l;
    pl_pool *pool[2];
    pl_rng rng;
    actor a[LOOP_ACTORS];
    int steps;
} thread_loop;

typedef struct threads {
    uv_loop_t control;
    pl_wheel wheel;
    uv_timer_t timer;
    pl_mailbox mailbox;
    pl_store *store;
    pl_fleet *fleet;
    pl_engine *e[2];
    fake f[2];
    pl_rng chaos;
    pl_sessions *s;
    pl_pool_options pool_options;
    thread_loop loops[LOOPS];
    _Atomic int running, expired;
    bool removed, stopped;
} threads;

static uint64_t real_ms(void)
{
    return pl_now_ns() / MS_NS;
}

static pl_engine *threads_find(void *ctx, int slot, int generation, pl_worker_state **w)
{
    router x;
    rig r;
    r.fleet = ((threads *)ctx)->fleet;
    x.r = &r;
    return rig_find(&x, slot, generation, w);
}

static pl_pool *threads_pool(void *ctx, pl_engine *e)
{
    thread_loop *l = ctx;
    int i = e == l->all->e[1];
    if (!l->pool[i])
        l->pool[i] =
            pl_pool_new(&l->loop, &l->wheel, pl_str_c(e->host), e->port, &l->all->pool_options);
    return l->pool[i];
}

static void threads_expiring(void *ctx, const pl_session_name *name, const pl_binding *b)
{
    threads *t = ctx;
    bool extend = atomic_fetch_add(&t->expired, 1) % 3 == 0;
    pl_sessions_expire(t->s, name, b, extend ? PL_EXTEND : PL_CLOSE, 0.1);
}

static void threads_expired(void *ctx, const pl_session_name *name, const pl_binding *b)
{
    pl_sessions_expired(((threads *)ctx)->s, name, b);
}

static void loop_tick(uv_timer_t *timer)
{
    thread_loop *l = timer->data;
    threads *t = l->all;
    pl_wheel_advance(&l->wheel, real_ms());
    if (l->steps++ < LOOP_STEPS) {
        for (int i = 0; i < LOOP_ACTORS; i++)
            actor_step(&l->a[i], l->l, &t->e[pl_rng_below(&l->rng, 2)]->workers[0], &l->rng,
                       100 + pl_rng_below(&l->rng, 400));
        return;
    }
    for (int i = 0; i < LOOP_ACTORS; i++)
        actor_stop(&l->a[i]);
    pl_sessions_loop_free(l->l);
    for (int i = 0; i < 2; i++)
        pl_pool_free(l->pool[i]);
    pl_mailbox_close(&l->mailbox);
    uv_close((uv_handle_t *)timer, NULL);
    atomic_fetch_sub(&t->running, 1);
}

static void loop_main(void *arg)
{
    uv_run(&((thread_loop *)arg)->loop, UV_RUN_DEFAULT);
}

static void control_tick(uv_timer_t *timer)
{
    threads *t = timer->data;
    pl_wheel_advance(&t->wheel, real_ms());
    pl_store_advance(t->store);
    if (!t->removed)
        for (int i = 0; i < 2; i++)
            atomic_store(&t->e[i]->caps, PL_CAP_SESSIONS | PL_CAP_STREAMING_SESSIONS);
    if (pl_rng_below(&t->chaos, 10) == 0)
        for (int i = 0; i < 2; i++)
            fake_release(&t->f[i]);
}

static void threads_on_stopped(void *ctx)
{
    ((threads *)ctx)->stopped = true;
}

static void loop_open(thread_loop *l, threads *t, int i)
{
    l->all = t;
    l->rng.state = (uint64_t)i * 77 + 5;
    assert_int_equal(uv_loop_init(&l->loop), 0);
    pl_wheel_init(&l->wheel, real_ms());
    uv_timer_init(&l->loop, &l->timer);
    l->timer.data = l;
    uv_timer_start(&l->timer, loop_tick, 2, 2);
    assert_int_equal(pl_mailbox_init(&l->mailbox, &l->loop, l), 0);
    pl_sessions_loop_config c = {.store = t->store,
                                 .wheel = &l->wheel,
                                 .mailbox = &l->mailbox,
                                 .rng = &l->rng,
                                 .pool = threads_pool,
                                 .ctx = l};
    l->l = pl_sessions_loop_new(t->s, &c);
    assert_non_null(l->l);
}

static void threads_open(threads *t)
{
    memset(t, 0, sizeof *t);
    pl_log_init(PL_LOG_ERROR, 0);
    t->chaos.state = 4711;
    assert_int_equal(uv_loop_init(&t->control), 0);
    pl_wheel_init(&t->wheel, real_ms());
    uv_timer_init(&t->control, &t->timer);
    t->timer.data = t;
    uv_timer_start(&t->timer, control_tick, 5, 5);
    assert_int_equal(pl_mailbox_init(&t->mailbox, &t->control, t), 0);
    pl_pool_options_default(&t->pool_options);
    rig r;
    r.fleet = t->fleet = pl_fleet_new(rig_publish, t);
    for (int i = 0; i < 2; i++) {
        fake_start(&t->f[i], &t->control, true);
        t->f[i].chaos = &t->chaos;
        t->e[i] = rig_engine(&r, i ? "e1" : "e0", t->f[i].port);
    }
    pl_store_options so = {pl_clock_real(), 1000, threads_expired, t};
    assert_int_equal(pl_store_memory_new(&so, &t->store), 0);
    pl_sessions_config c = {.clock = pl_clock_real(),
                            .control = &t->control,
                            .control_wheel = &t->wheel,
                            .control_mailbox = &t->mailbox,
                            .pool = &t->pool_options,
                            .expiring = threads_expiring,
                            .ctx = t,
                            .find = threads_find};
    pl_sessions_options_default(&c.o);
    c.o.open_timeout_ms = c.o.close_timeout_ms = 150;
    c.o.turn_wait_ms = 300;
    c.o.lease_ms = 200;
    c.o.engine_extra_seconds = 60;
    c.o.max_open_per_worker = 6;
    assert_int_equal(pl_sessions_new(&c, &t->s), 0);
    pl_sessions_set_store(t->s, t->store);
    atomic_store(&t->running, LOOPS);
    for (int i = 0; i < LOOPS; i++)
        loop_open(&t->loops[i], t, i);
    for (int i = 0; i < LOOPS; i++)
        assert_int_equal(uv_thread_create(&t->loops[i].thread, loop_main, &t->loops[i]), 0);
}

static void in_threads(void **state)
{
    (void)state;
    static threads t;
    threads_open(&t);
    while (atomic_load(&t.running)) {
        uv_run(&t.control, UV_RUN_ONCE);
        if (!t.removed && count(&pl_sessions_stats_of(t.s)->opens) > 20) {
            t.removed = true; /* while turns run on it */
            assert_int_equal(pl_fleet_remove(t.fleet, t.e[1]), 0);
            pl_sessions_engine_gone(t.s, t.e[1]);
        }
    }
    for (int i = 0; i < LOOPS; i++) {
        thread_loop *l = &t.loops[i];
        assert_int_equal(uv_thread_join(&l->thread), 0);
        assert_int_equal(uv_loop_close(&l->loop), 0);
        assert_int_equal(l->wheel.armed, 0);
        pl_mailbox_destroy(&l->mailbox);
    }
    const pl_sessions_stats *st = pl_sessions_stats_of(t.s);
    assert_true(t.removed);
    assert_true(count(&st->turns_waited) > 0 && count(&st->hits) > 0 && count(&st->binds) > 0);
    t.f[0].chaos = t.f[1].chaos = NULL;
    for (int i = 0; i < 50; i++) { /* what has reached the engines lands before the last closes */
        uv_run(&t.control, UV_RUN_NOWAIT);
        fake_release(&t.f[0]);
        fake_release(&t.f[1]);
    }
    pl_sessions_stop(t.s, true, 120000, threads_on_stopped, &t);
    while (!t.stopped)
        uv_run(&t.control, UV_RUN_ONCE);
    assert_int_equal(t.e[0]->workers[0].sessions, 0);
    assert_int_equal(t.e[1]->workers[0].sessions, 0);
    assert_int_equal(t.e[0]->workers[0].session_tokens, 0);
    assert_true((uint64_t)(t.f[0].open_n + t.f[1].open_n) <= count(&st->close_given_up));
    pl_mailbox_close(&t.mailbox);
    pl_sessions_free(t.s);
    uv_close((uv_handle_t *)&t.timer, NULL);
    for (int i = 0; i < 2; i++)
        fake_stop(&t.f[i]);
    uv_run(&t.control, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&t.control), 0);
    assert_int_equal(t.wheel.armed, 0);
    pl_mailbox_destroy(&t.mailbox);
    pl_store_free(t.store);
    for (int i = 0; i < 2; i++) {
        fake_free(&t.f[i]);
        pl_engine_unref(t.e[i]);
    }
    pl_fleet_free(t.fleet);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(in_virtual_time),
        cmocka_unit_test(in_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
