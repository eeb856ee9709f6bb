/* The KV index without memory: its allocations are compiled into this program and fail on demand.
 * What it then knows may be less than it was told, never more; nothing is lost or left behind. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>

#include "index_storm.h"

static pl_rng rng;
static uint32_t one_in; /* so many allocations fails; 0: none */
static int failed;

static void *failing(void *(*get)(size_t n, size_t size), size_t n, size_t size)
{
    if (one_in && pl_rng_below(&rng, one_in) == 0) {
        failed++;
        return NULL;
    }
    return get(n, size);
}

static void *plain(size_t n, size_t size)
{
    return malloc(n * size);
}

#define malloc(n)       failing(plain, 1, n)
#define calloc(n, size) failing(calloc, n, size)
#include "kv/index_reclaim.c"
#undef malloc
#undef calloc

enum { WORKERS = 6, EVENTS = 40000 };

/* No worker holds more of it than the model says. */
static void no_more_than(pl_index_reader *r, model *m, uint32_t space, const storm_op *op)
{
    pl_match out[WORKERS];
    uint32_t most[PL_TIERS];
    int n = pl_index_match(r, space, op->local, op->n, out, WORKERS);
    for (int i = 0; i < n; i++) {
        assert_true(model_match(m, space, out[i].slot, op->local, op->n, most));
        for (int t = 0; t < PL_TIERS; t++)
            assert_in_range(out[i].blocks[t], 0, most[t]);
    }
}

static void a_storm_with_failures(uint64_t seed, uint64_t max_bytes)
{
    pl_index *ix;
    pl_index_space space[STORM_SPACES];
    pl_index_options o = {.max_bytes = max_bytes};
    model *m = calloc(1, sizeof *m);
    storm *s = calloc(1, sizeof *s);
    storm_op *op = calloc(1, sizeof *op);
    assert_true(m && s && op);
    assert_int_equal(pl_index_new(&o, &ix), 0);
    pl_index_reader *r = pl_index_reader_new(ix);
    for (int i = 0; i < STORM_SPACES; i++)
        space[i] = pl_index_space_open(ix, PL_STR("m"), 16u + (uint32_t)i, false, (pl_str){0});
    *s = (storm){.rng = {.state = seed}, .workers = WORKERS, .honest = true, .wide = 4};
    rng.state = seed;
    failed = 0;
    for (int i = 0; i < EVENTS; i++) {
        one_in = i / 1000 % 4 ? (uint32_t)(4 << i / 1000 % 4) : 0;
        storm_next(s, op);
        (void)storm_index(ix, space[op->space_number], op);
        (void)storm_model(m, space[op->space_number], op);
        if (op->kind == STORM_QUERY)
            no_more_than(r, m, space[op->space_number], op);
        if (i % 7 == 0)
            (void)pl_index_maintain(ix);
    }
    pl_index_stats st;
    pl_index_stats_of(ix, &st);
    assert_true(failed > 100 && (!max_bytes || st.evicted > 100));
    one_in = 0;
    for (int w = 0; w < WORKERS; w++)
        pl_index_clear(ix, w, -1);
    while (pl_index_maintain(ix))
        ;
    pl_index_stats_of(ix, &st);
    assert_int_equal(st.entries, 0);
    assert_int_equal(st.blocks, 0);
    /* and it works as ever */
    uint64_t local[50], name[50];
    for (uint64_t i = 0; i < 50; i++)
        name[i] = 1 + (local[i] = i);
    assert_int_equal(pl_index_store(ix, space[0], 2, PL_TIER_DEVICE, NULL, name, local, 50), 0);
    pl_match out[WORKERS];
    assert_int_equal(pl_index_match(r, space[0], local, 50, out, WORKERS), 1);
    assert_int_equal(out[0].blocks[0], 50);
    pl_index_reader_free(r);
    pl_index_free(ix);
    model_free(m);
    free(s);
    free(op);
}

static void without_a_cap(void **state)
{
    for (uint64_t seed = 1; seed <= 3; seed++)
        a_storm_with_failures(seed, 0);
}

static void near_its_cap(void **state)
{
    for (uint64_t seed = 1; seed <= 3; seed++)
        a_storm_with_failures(seed, sizeof(pl_index) + 200000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(without_a_cap),
                                       cmocka_unit_test(near_its_cap)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
