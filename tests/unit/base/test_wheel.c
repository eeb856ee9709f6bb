/* Timing wheel against a naive model: a table of due times that is searched. Timers are armed,
 * re-armed and cancelled at random, also from callbacks, and time moves in small steps and in long
 * pauses. What must hold: no timer early, none later than a tick, none lost, none twice. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>

#include "base/rng.h"
#include "base/wheel.h"

enum { TIMERS = 300 };

typedef struct model {
    pl_wheel wheel;
    pl_rng rng;
    uint64_t now_ms;
    uint64_t fired, in_callback;
    struct entry {
        pl_timer timer; /* first */
        struct model *model;
        bool armed;
        uint64_t due_ms;
    } e[TIMERS];
} model;

static void fire(pl_timer *t);

static void arm(model *m, struct entry *e)
{
    static const uint64_t spans[] = {1, 25, 1000, 60000, 2000000};
    uint64_t after = pl_rng_below(&m->rng, (uint32_t)spans[pl_rng_below(&m->rng, 5)]);
    pl_wheel_arm(&m->wheel, &e->timer, after, fire);
    e->armed = true;
    e->due_ms = m->now_ms + after;
}

static void cancel(model *m, struct entry *e)
{
    pl_wheel_cancel(&m->wheel, &e->timer);
    e->armed = false;
}

static void fire(pl_timer *t)
{
    struct entry *e = (struct entry *)t;
    model *m = e->model;
    assert_true(e->armed);
    assert_false(pl_timer_armed(t));
    assert_true(e->due_ms <= m->now_ms);
    e->armed = false;
    m->fired++;
    for (unsigned n = pl_rng_below(&m->rng, 4); n > 0; n--) {
        struct entry *other = &m->e[pl_rng_below(&m->rng, TIMERS)];
        if (pl_rng_below(&m->rng, 2))
            arm(m, other);
        else
            cancel(m, other);
        m->in_callback++;
    }
}

static void check(model *m)
{
    uint64_t armed = 0;
    for (int i = 0; i < TIMERS; i++) {
        struct entry *e = &m->e[i];
        assert_int_equal(pl_timer_armed(&e->timer), e->armed);
        armed += e->armed;
        if (e->armed && e->due_ms + PL_WHEEL_TICK_MS <= m->now_ms)
            fail_msg("timer %d, due at %lu, has not fired at %lu", i, e->due_ms, m->now_ms);
    }
    assert_int_equal(m->wheel.armed, armed);
}

static void random_timers(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 6; seed++) {
        model *m = calloc(1, sizeof *m);
        m->rng.state = seed;
        m->now_ms = pl_rng_below(&m->rng, 1000000);
        pl_wheel_init(&m->wheel, m->now_ms);
        for (int i = 0; i < TIMERS; i++) {
            m->e[i].model = m;
            arm(m, &m->e[i]);
        }
        for (int step = 0; step < 6000; step++) {
            unsigned kind = pl_rng_below(&m->rng, 1000);
            /* mostly small; sometimes more than a revolution (20 s), rarely half an hour */
            m->now_ms += kind < 900   ? pl_rng_below(&m->rng, 60)
                         : kind < 995 ? pl_rng_below(&m->rng, 30000)
                                      : pl_rng_below(&m->rng, 1800000);
            pl_wheel_advance(&m->wheel, m->now_ms);
            check(m);
            arm(m, &m->e[pl_rng_below(&m->rng, TIMERS)]);
            if (kind % 3 == 0)
                cancel(m, &m->e[pl_rng_below(&m->rng, TIMERS)]);
        }
        assert_true(m->fired > 5000 && m->in_callback > 5000);
        free(m);
    }
}

typedef struct chain {
    pl_timer timer; /* first */
    pl_wheel *wheel;
    pl_timer *victim;
    int fired;
} chain;

static void rearm_at_once(pl_timer *t)
{
    chain *c = (chain *)t;
    c->fired++;
    pl_wheel_arm(c->wheel, t, 0, rearm_at_once);
}

static void a_timer_that_rearms_itself_does_not_spin(void **state)
{
    (void)state;
    pl_wheel w;
    pl_wheel_init(&w, 1000);
    chain c = {.wheel = &w};
    pl_wheel_arm(&w, &c.timer, 0, rearm_at_once);
    for (uint64_t now = 1000; now <= 3000; now += PL_WHEEL_TICK_MS)
        pl_wheel_advance(&w, now);
    assert_true(c.fired > 50 && c.fired <= 101); /* at most once a tick */
    pl_wheel_advance(&w, 10000000);              /* nor over a long pause */
    assert_true(c.fired <= 110);
    pl_wheel_cancel(&w, &c.timer);
    assert_int_equal(w.armed, 0);
}

static void free_victim(pl_timer *t)
{
    chain *c = (chain *)t;
    c->fired++;
    pl_wheel_cancel(c->wheel, c->victim);
    free(c->victim);
}

static void never(pl_timer *t)
{
    (void)t;
    fail_msg("a cancelled timer fired");
}

/* The next timer of the same slot is what the sweep stands before. */
static void a_callback_may_free_the_next_timer(void **state)
{
    (void)state;
    pl_wheel w;
    pl_wheel_init(&w, 0);
    chain c = {.wheel = &w, .victim = calloc(1, sizeof(pl_timer))};
    pl_wheel_arm(&w, &c.timer, 100, free_victim);
    pl_wheel_arm(&w, c.victim, 100, never);
    pl_wheel_advance(&w, 200);
    assert_int_equal(c.fired, 1);
    assert_int_equal(w.armed, 0);
}

static int plain_fired;

static void count(pl_timer *t)
{
    (void)t;
    plain_fired++;
}

/* the sum used to wrap, and the timer fired at once */
static void for_ever_is_not_now(void **state)
{
    (void)state;
    static const uint64_t long_times[] = {UINT64_MAX, UINT64_MAX - 1, UINT64_MAX - 1000,
                                          UINT64_MAX / 2};
    for (size_t i = 0; i < sizeof long_times / sizeof *long_times; i++) {
        pl_wheel w;
        pl_timer t = {0};
        pl_wheel_init(&w, 1000);
        plain_fired = 0;
        pl_wheel_arm(&w, &t, long_times[i], count);
        pl_wheel_advance(&w, 1020);
        pl_wheel_advance(&w, 10000000000u);
        assert_int_equal(plain_fired, 0);
        pl_wheel_cancel(&w, &t);
    }
}

static void time_does_not_go_back(void **state)
{
    (void)state;
    pl_wheel w;
    pl_timer t = {0};
    pl_wheel_init(&w, 5000);
    plain_fired = 0;
    pl_wheel_arm(&w, &t, 100, count);
    pl_wheel_advance(&w, 100);
    assert_int_equal(plain_fired, 0);
    assert_int_equal(w.now_ms, 5000);
    pl_wheel_advance(&w, 5099);
    assert_int_equal(plain_fired, 0);
    pl_wheel_advance(&w, 5120);
    assert_int_equal(plain_fired, 1);
    pl_wheel_cancel(&w, &t); /* harmless */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_timers),
        cmocka_unit_test(a_timer_that_rearms_itself_does_not_spin),
        cmocka_unit_test(a_callback_may_free_the_next_timer),
        cmocka_unit_test(for_ever_is_not_now),
        cmocka_unit_test(time_does_not_go_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
