/* The KV index beside a naive model under random events, and by hand what a user of it relies on:
 * holes, tiers, duplicates, names, spaces, clears, the cap. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>

#include "index_storm.h"

static pl_index *new_index(uint64_t max_bytes)
{
    pl_index *ix;
    pl_index_options o = {.max_bytes = max_bytes};
    assert_int_equal(pl_index_new(&o, &ix), 0);
    return ix;
}

static pl_index_space open_space(pl_index *ix, const char *name)
{
    pl_index_space s = pl_index_space_open(ix, pl_str_c(name), 16, false, (pl_str){0}, (pl_str){0});
    assert_true(s != 0);
    return s;
}

/* --- differential --- */

static void run_storm(uint64_t seed, int workers, bool honest, uint32_t wide, long ops)
{
    pl_index *ix = new_index(UINT64_MAX);
    pl_index_reader *r = pl_index_reader_new(ix);
    assert_non_null(r);
    model *m = calloc(1, sizeof *m);
    storm *s = calloc(1, sizeof *s);
    storm_op *op = calloc(1, sizeof *op);
    assert_true(m && s && op);
    pl_index_space space[STORM_SPACES] = {open_space(ix, "a"), open_space(ix, "b"),
                                          open_space(ix, "c")};
    *s = (storm){.rng = {.state = seed}, .workers = workers, .honest = honest, .wide = wide};
    for (long i = 0; i < ops; i++) {
        storm_next(s, op);
        const char *wrong = storm_apply(ix, r, m, space, op, workers);
        if (wrong)
            fail_msg("seed %llu, operation %ld: %s", (unsigned long long)seed, i, wrong);
        if (i % 64 == 0)
            pl_index_maintain(ix);
    }
    /* and when all workers have left, nothing is left */
    for (int w = 0; w < workers; w++)
        pl_index_clear(ix, w, -1);
    while (pl_index_maintain(ix))
        ;
    pl_index_stats st;
    pl_index_stats_of(ix, &st);
    assert_int_equal(st.blocks, 0);
    assert_int_equal(st.entries, 0);
    free(op);
    free(s);
    model_free(m);
    pl_index_reader_free(r);
    pl_index_free(ix);
}

static void agrees_with_the_model(void **state)
{
    run_storm(1, 6, true, 1u << 30, 40000);
    run_storm(2, 3, true, 3, 40000); /* every path meets another */
    run_storm(3, 6, false, 1u << 30, 40000);
    run_storm(4, 3, false, 3, 40000);
    run_storm(5, 150, true, 8, 20000);
    run_storm(6, 1, false, 2, 40000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(agrees_with_the_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
