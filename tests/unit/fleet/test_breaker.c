/* Breaker: the steps on a clock that the test moves, and from several threads at once: never more
 * probes under way than allowed, and every probe comes back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdlib.h>

#include "base/rng.h"
#include "fleet/engine.h"

static const uint64_t S = 1000000000u;
static const pl_breaker_options *const O =
    &pl_breaker_default; /* 5 failures, 1 s to 30 s, 1 probe */

static pl_engine *make(void)
{
    pl_errbuf eb;
    pl_engine *e = NULL;
    pl_engine_spec s = {.url = PL_STR("http://h")};
    assert_int_equal(pl_engine_new(&s, &e, &eb), 0);
    return e;
}

static void fail_n(pl_engine *e, int n, uint64_t now)
{
    bool probe;
    for (int i = 0; i < n; i++) {
        assert_true(pl_breaker_begin(e, O, now, &probe));
        assert_false(probe);
        pl_breaker_failure(e, O, now, probe);
    }
}

static void opens_after_consecutive_failures(void **state)
{
    (void)state;
    pl_engine *e = make();
    fail_n(e, 4, 0);
    assert_true(pl_breaker_allows(e, O, 0));
    pl_breaker_success(e, false); /* the row is broken */
    fail_n(e, 4, 0);
    assert_true(pl_breaker_allows(e, O, 0));
    fail_n(e, 1, 0);
    bool probe = true;
    assert_false(pl_breaker_allows(e, O, 0));
    assert_false(pl_breaker_begin(e, O, S - 1, &probe));
    assert_false(probe);
    assert_int_equal(e->breaker, PL_BREAKER_OPEN);
    assert_int_equal(e->breaker_opened, 1);
    pl_engine_unref(e);
}

static void neutral_neither_breaks_the_row_nor_counts(void **state)
{
    (void)state;
    pl_engine *e = make();
    for (int i = 0; i < 20; i++)
        pl_breaker_neutral(e, false); /* 4xx after 4xx */
    fail_n(e, 4, 0);
    pl_breaker_neutral(e, false);
    fail_n(e, 1, 0);
    assert_false(pl_breaker_allows(e, O, 0));
    pl_engine_unref(e);
}

static void one_probe_closes_it(void **state)
{
    (void)state;
    pl_engine *e = make();
    bool probe, other;
    fail_n(e, 5, 0);
    assert_true(pl_breaker_allows(e, O, S));
    assert_true(pl_breaker_begin(e, O, S, &probe));
    assert_true(probe);
    assert_int_equal(e->breaker, PL_BREAKER_HALF_OPEN);
    assert_false(pl_breaker_allows(e, O, S)); /* the only probe is under way */
    assert_false(pl_breaker_begin(e, O, S, &other));
    pl_breaker_success(e, probe);
    assert_int_equal(e->breaker, PL_BREAKER_CLOSED);
    fail_n(e, 4, S); /* counts from zero again */
    assert_true(pl_breaker_allows(e, O, S));
    assert_int_equal(e->probes, 0);
    pl_engine_unref(e);
}

static void a_neutral_probe_is_given_back(void **state)
{
    (void)state;
    pl_engine *e = make();
    bool probe;
    fail_n(e, 5, 0);
    assert_true(pl_breaker_begin(e, O, S, &probe));
    pl_breaker_neutral(e, probe);
    assert_int_equal(e->breaker, PL_BREAKER_HALF_OPEN);
    assert_true(pl_breaker_begin(e, O, S, &probe) && probe);
    pl_breaker_success(e, probe);
    assert_int_equal(e->breaker, PL_BREAKER_CLOSED);
    pl_engine_unref(e);
}

static void the_backoff_doubles_up_to_its_cap(void **state)
{
    (void)state;
    pl_engine *e = make();
    uint64_t now = 0;
    bool probe;
    fail_n(e, 5, now);
    static const uint64_t seconds[] = {1, 2, 4, 8, 16, 30, 30, 30};
    for (size_t i = 0; i < sizeof seconds / sizeof *seconds; i++) {
        assert_false(pl_breaker_allows(e, O, now + seconds[i] * S - 1));
        now += seconds[i] * S;
        assert_true(pl_breaker_begin(e, O, now, &probe) && probe);
        pl_breaker_failure(e, O, now, probe);
    }
    assert_int_equal(e->breaker_opened, 9);
    now += 30 * S;
    assert_true(pl_breaker_begin(e, O, now, &probe));
    pl_breaker_success(e, probe);
    fail_n(e, 5, now); /* after a success it begins at the first backoff again */
    assert_false(pl_breaker_allows(e, O, now + S - 1));
    assert_true(pl_breaker_allows(e, O, now + S));
    pl_engine_unref(e);
}

/* Requests that were sent before it opened end later: they say nothing about the engine now. */
static void late_ends_change_nothing(void **state)
{
    (void)state;
    pl_engine *e = make();
    fail_n(e, 5, 0);
    uint64_t until = e->open_until_ns;
    pl_breaker_failure(e, O, S / 2, false);
    pl_breaker_success(e, false);
    assert_int_equal(e->breaker, PL_BREAKER_OPEN);
    assert_true(e->open_until_ns == until);
    bool probe;
    assert_true(pl_breaker_begin(e, O, S, &probe));
    pl_breaker_failure(e, O, S, false);
    pl_breaker_success(e, false);
    assert_int_equal(e->breaker, PL_BREAKER_HALF_OPEN);
    pl_breaker_success(e, probe);
    assert_int_equal(e->breaker, PL_BREAKER_CLOSED);
    pl_engine_unref(e);
}

static void a_health_check_shortens_the_wait(void **state)
{
    (void)state;
    pl_engine *e = make();
    pl_breaker_health_ok(e, 0); /* nothing to do */
    assert_int_equal(e->breaker, PL_BREAKER_CLOSED);
    fail_n(e, 5, 0);
    pl_breaker_health_ok(e, 1);
    assert_int_equal(e->breaker, PL_BREAKER_HALF_OPEN);
    bool probe;
    assert_true(pl_breaker_begin(e, O, 1, &probe) && probe);
    pl_breaker_failure(e, O, 1, probe);
    assert_false(pl_breaker_allows(e, O, 2 * S));
    assert_true(pl_breaker_allows(e, O, 2 * S + 1)); /* doubled all the same */
    pl_engine_unref(e);
}

static void several_probes(void **state)
{
    (void)state;
    pl_breaker_options three = *O;
    three.half_open_probes = 3;
    pl_engine *e = make();
    bool p[4];
    fail_n(e, 5, 0);
    for (int i = 0; i < 3; i++)
        assert_true(pl_breaker_begin(e, &three, S, &p[i]) && p[i]);
    assert_false(pl_breaker_begin(e, &three, S, &p[3]));
    pl_breaker_failure(e, &three, S, p[0]);
    assert_int_equal(e->breaker, PL_BREAKER_OPEN);
    pl_breaker_success(e, p[1]); /* one of the same round failed: it stays open */
    assert_int_equal(e->breaker, PL_BREAKER_OPEN);
    pl_breaker_failure(e, &three, S, p[2]); /* nor does it count twice */
    assert_int_equal(e->breaker_opened, 2);
    assert_true(e->open_until_ns == 3 * S);
    assert_int_equal(e->probes, 0);
    /* a probe of an old round still counts against the new one's limit */
    assert_true(pl_breaker_begin(e, &three, 3 * S, &p[0]));
    pl_breaker_failure(e, &three, 3 * S, p[0]);
    assert_true(pl_breaker_begin(e, &three, 100 * S, &p[0]) && p[0]);
    pl_breaker_health_ok(e, 100 * S);
    assert_true(pl_breaker_begin(e, &three, 100 * S, &p[1]) && p[1]);
    pl_breaker_neutral(e, p[0]);
    pl_breaker_success(e, p[1]);
    assert_int_equal(e->probes, 0);
    pl_engine_unref(e);
}

enum { THREADS = 4, ROUNDS = 30000, PROBES = 2 };

typedef struct storm {
    pl_engine *e;
    pl_breaker_options o;
    _Atomic uint64_t now;
    _Atomic int probing, most_probing, passed;
} storm;

static void *hammer(void *arg)
{
    storm *s = arg;
    pl_rng rng = {(uint64_t)(uintptr_t)&rng};
    for (int i = 0; i < ROUNDS; i++) {
        bool probe = false;
        uint64_t now = atomic_fetch_add(&s->now, S / 100);
        pl_breaker_allows(s->e, &s->o, now);
        if (pl_rng_below(&rng, 50) == 0)
            pl_breaker_health_ok(s->e, now);
        if (!pl_breaker_begin(s->e, &s->o, now, &probe))
            continue;
        atomic_fetch_add(&s->passed, 1);
        if (probe) {
            int n = atomic_fetch_add(&s->probing, 1) + 1, most = atomic_load(&s->most_probing);
            while (n > most && !atomic_compare_exchange_weak(&s->most_probing, &most, n))
                ;
        }
        unsigned end = pl_rng_below(&rng, 10);
        if (probe)
            atomic_fetch_sub(&s->probing, 1);
        if (end < 6)
            pl_breaker_failure(s->e, &s->o, now, probe);
        else if (end < 9)
            pl_breaker_success(s->e, probe);
        else
            pl_breaker_neutral(s->e, probe);
    }
    return NULL;
}

static void never_more_probes_than_allowed(void **state)
{
    (void)state;
    storm s = {.e = make(), .o = *O};
    s.o.half_open_probes = PROBES;
    s.o.failures = 3;
    s.o.max_backoff_ns = 2 * S;
    pthread_t t[THREADS];
    for (int i = 0; i < THREADS; i++)
        pthread_create(&t[i], NULL, hammer, &s);
    for (int i = 0; i < THREADS; i++)
        pthread_join(t[i], NULL);
    assert_int_equal(s.e->probes, 0);
    assert_true(s.most_probing >= 1 && s.most_probing <= PROBES);
    assert_true(s.e->breaker_opened > 10);
    assert_true(s.passed > 100);
    bool probe; /* whatever state it is in, it recovers */
    uint64_t later = s.now + 100 * S;
    assert_true(pl_breaker_begin(s.e, &s.o, later, &probe));
    pl_breaker_success(s.e, probe);
    assert_int_equal(s.e->breaker, PL_BREAKER_CLOSED);
    pl_engine_unref(s.e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(opens_after_consecutive_failures),
        cmocka_unit_test(neutral_neither_breaks_the_row_nor_counts),
        cmocka_unit_test(one_probe_closes_it),
        cmocka_unit_test(a_neutral_probe_is_given_back),
        cmocka_unit_test(the_backoff_doubles_up_to_its_cap),
        cmocka_unit_test(late_ends_change_nothing),
        cmocka_unit_test(a_health_check_shortens_the_wait),
        cmocka_unit_test(several_probes),
        cmocka_unit_test(never_more_probes_than_allowed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
