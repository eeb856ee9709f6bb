/* Histogram: every value lies in its bucket, quantiles against sorting, merge, a live reader. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdlib.h>

#include "base/hist.h"
#include "base/rng.h"

static int only_bucket(const pl_hist *h)
{
    int at = -1;
    for (int i = 0; i < PL_HIST_BUCKETS; i++)
        if (atomic_load(&h->count[i])) {
            assert_int_equal(at, -1);
            at = i;
        }
    return at;
}

static void lands_between_its_bounds(uint64_t ns)
{
    pl_hist *h = calloc(1, sizeof *h);
    pl_hist_observe(h, ns);
    int i = only_bucket(h);
    assert_true(i >= 0 && ns <= pl_hist_bound_ns(i));
    assert_true(i == 0 || ns > pl_hist_bound_ns(i - 1));
    assert_true(atomic_load(&h->sum_ns) == ns);
    free(h);
}

static void every_value_has_its_bucket(void **state)
{
    (void)state;
    for (uint64_t ns = 0; ns < 1000; ns++)
        lands_between_its_bounds(ns);
    for (int shift = 10; shift < 64; shift++)
        for (int64_t d = -2; d <= 2; d++) {
            lands_between_its_bounds(((uint64_t)1 << shift) + (uint64_t)d);
            lands_between_its_bounds(((uint64_t)3 << (shift - 1)) + (uint64_t)d);
        }
    lands_between_its_bounds(UINT64_MAX);
}

static void bounds_rise(void **state)
{
    (void)state;
    assert_int_equal(pl_hist_bound_ns(0), 64);
    for (int i = 1; i < PL_HIST_BUCKETS; i++)
        assert_true(pl_hist_bound_ns(i) > pl_hist_bound_ns(i - 1));
    assert_true(pl_hist_bound_ns(PL_HIST_BUCKETS - 1) == UINT64_MAX);
    assert_true(pl_hist_bound_ns(PL_HIST_BUCKETS - 2) == (uint64_t)1 << 39);
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void quantiles_against_sorting(void **state)
{
    (void)state;
    enum { N = 1000 };
    static uint64_t v[N];
    pl_rng rng = {3};
    for (int n = 1; n <= N; n = n < 12 ? n + 1 : n * 3) {
        pl_hist *h = calloc(1, sizeof *h);
        for (int i = 0; i < n; i++) {
            v[i] = pl_rng_next(&rng) >> (26 + pl_rng_below(&rng, 30));
            pl_hist_observe(h, v[i]);
        }
        qsort(v, (size_t)n, sizeof *v, by_value);
        static const double shares[] = {0, 0.1, 0.25, 0.5, 0.7, 0.9, 0.99, 1};
        for (size_t k = 0; k < sizeof shares / sizeof *shares; k++) {
            uint64_t got = pl_hist_quantile_ns(h, shares[k]);
            int rank = 0; /* the least number of values that is at least the share */
            while (rank < n && (double)rank < shares[k] * n - 1e-6)
                rank++;
            uint64_t exact = v[rank > 0 ? rank - 1 : 0];
            /* the bound of the value's own bucket: at least the value, less than twice it */
            assert_true(got >= exact && (got == 64 || got <= exact * 3 / 2 + 2));
        }
        free(h);
    }
    pl_hist empty = {0};
    assert_int_equal(pl_hist_quantile_ns(&empty, 0.5), 0);
}

static void merges(void **state)
{
    (void)state;
    pl_hist a = {0}, b = {0};
    pl_hist_observe(&a, 100);
    pl_hist_observe(&b, 100);
    pl_hist_observe(&b, 1000000);
    pl_hist_merge(&a, &b);
    assert_int_equal(atomic_load(&a.total), 3);
    assert_int_equal(atomic_load(&a.sum_ns), 1000200);
    assert_int_equal(pl_hist_quantile_ns(&a, 0.5), 128);
    assert_int_equal(atomic_load(&b.total), 2);
}

enum { LIVE = 200000 };

static void *observe(void *arg)
{
    for (uint64_t i = 0; i < LIVE; i++)
        pl_hist_observe(arg, i);
    return NULL;
}

static void a_reader_beside_the_writer(void **state)
{
    (void)state;
    static pl_hist h;
    pthread_t t;
    pthread_create(&t, NULL, observe, &h);
    uint64_t seen = 0;
    while (seen < LIVE) {
        pl_hist copy = {0};
        pl_hist_merge(&copy, &h);
        uint64_t now = atomic_load(&copy.total);
        assert_true(now >= seen && now <= LIVE);
        seen = now;
    }
    pthread_join(t, NULL);
    assert_int_equal(atomic_load(&h.total), LIVE);
    assert_true(atomic_load(&h.sum_ns) == (uint64_t)LIVE * (LIVE - 1) / 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_value_has_its_bucket), cmocka_unit_test(bounds_rise),
        cmocka_unit_test(quantiles_against_sorting),  cmocka_unit_test(merges),
        cmocka_unit_test(a_reader_beside_the_writer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
