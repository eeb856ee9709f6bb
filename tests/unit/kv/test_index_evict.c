/* The KV index under its byte cap and out of memory: it knows less then, and nothing false. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdbool.h>
#include <stdlib.h>

/* The index is compiled in here, so that its allocations can be made to fail. */
static long allocations_left = -1;
static size_t largest_allocation;

static bool refuse(void)
{
    if (allocations_left > 0)
        allocations_left--;
    return allocations_left == 0;
}

static void *scarce_malloc(size_t n)
{
    largest_allocation = n > largest_allocation ? n : largest_allocation;
    return refuse() ? NULL : malloc(n);
}

static void *scarce_calloc(size_t n, size_t size)
{
    largest_allocation = n * size > largest_allocation ? n * size : largest_allocation;
    return refuse() ? NULL : calloc(n, size);
}

#define malloc scarce_malloc
#define calloc scarce_calloc
#include "kv/index.c"
#include "kv/index_reclaim.c"
#undef malloc
#undef calloc

#include "index_storm.h"

static pl_index *capped(uint64_t max_bytes, pl_index_reader **r, pl_index_space *space)
{
    pl_index *ix;
    pl_index_options o = {.max_bytes = max_bytes};
    assert_int_equal(pl_index_new(&o, &ix), 0);
    *r = pl_index_reader_new(ix);
    assert_non_null(*r);
    for (uint32_t i = 0; i < STORM_SPACES; i++)
        space[i] = pl_index_space_open(ix, PL_STR("m"), 16 + i, false, (pl_str){0});
    assert_true(space[STORM_SPACES - 1] != 0);
    return ix;
}

static uint64_t bytes_of(const pl_index *ix)
{
    pl_index_stats st;
    pl_index_stats_of(ix, &st);
    return st.bytes;
}

/* A worker's depth of what the index says, at most; the model says how much it may be. */
static void check_within(pl_index_reader *r, model *m, uint32_t space, const storm_op *op,
                         int workers)
{
    pl_match out[64];
    uint32_t may[PL_TIERS];
    int n = pl_index_match(r, space, op->local, op->n, out, 64);
    assert_true(n <= workers);
    for (int i = 0; i < n; i++) {
        assert_true(model_match(m, space, out[i].slot, op->local, op->n, may));
        for (int t = 0; t < PL_TIERS; t++)
            assert_true(out[i].blocks[t] <= may[t]);
    }
}

/* --- the cap --- */

enum { LENGTH = 64, CONVERSATIONS = 4000, CAP = 3 << 20 };

static void conversation(uint64_t number, uint64_t local[LENGTH], uint64_t name[LENGTH])
{
    pl_rng rng = {.state = number * 77777};
    for (int i = 0; i < LENGTH; i++) {
        local[i] = pl_rng_next(&rng);
        name[i] = pl_rng_next(&rng);
    }
}

static uint32_t depth_of(pl_index_reader *r, pl_index_space space, uint64_t number)
{
    uint64_t local[LENGTH], name[LENGTH];
    pl_match out[64];
    conversation(number, local, name);
    return pl_index_match(r, space, local, LENGTH, out, 64) ? out[0].blocks[0] : 0;
}

static void stays_or_goes(uint64_t workers)
{
    pl_index_reader *r;
    pl_index_space space[STORM_SPACES];
    pl_index *ix = capped(CAP, &r, space);
    uint64_t local[LENGTH], name[LENGTH];
    for (uint64_t c = 0; c < CONVERSATIONS; c++) {
        conversation(c, local, name);
        assert_int_equal(pl_index_store(ix, space[0], (int)(c % workers), PL_TIER_DEVICE, NULL,
                                        name, local, LENGTH),
                         0);
        assert_true(bytes_of(ix) <= CAP);
        assert_int_equal(depth_of(r, space[0], c % 20), c < c % 20 ? 0 : LENGTH);
    }
    pl_index_stats st;
    pl_index_stats_of(ix, &st);
    assert_true(st.evicted > 0);
    assert_int_equal(st.entries + st.evicted, (uint64_t)CONVERSATIONS * LENGTH);
    assert_true(st.entries > CAP / 2 / 40); /* at least half of the cap is used */
    for (uint64_t c = 0; c < 20; c++)
        assert_int_equal(depth_of(r, space[0], c), LENGTH);
    for (uint64_t c = CONVERSATIONS - 100; c < CONVERSATIONS; c++)
        assert_int_equal(depth_of(r, space[0], c), LENGTH);
    int left = 0;
    for (uint64_t c = 20; c < CONVERSATIONS / 4; c++)
        left += depth_of(r, space[0], c) > 0;
    assert_int_equal(left, 0);
    /* to the engine's events an evicted block is one that was never there */
    conversation(25, local, name);
    assert_int_equal(pl_index_remove(ix, (int)(25 % workers), PL_TIER_DEVICE, name, LENGTH), 0);
    assert_int_equal(pl_index_store(ix, space[0], (int)(25 % workers), PL_TIER_DEVICE, &name[3],
                                    name + 4, local + 4, 4),
                     PL_ENOTFOUND);
    assert_int_equal(
        pl_index_store(ix, space[0], (int)(25 % workers), PL_TIER_DEVICE, NULL, name, local, 4), 0);
    assert_int_equal(depth_of(r, space[0], 25), 4);
    pl_index_reader_free(r);
    pl_index_free(ix);
}

static void what_is_matched_stays_and_what_is_not_goes(void **state)
{
    stays_or_goes(8);
    stays_or_goes(1); /* one map has most of the bytes */
    stays_or_goes(500);
}

static void a_cap_too_small_for_anything_is_an_error(void **state)
{
    pl_index *ix;
    pl_index_options o = {.max_bytes = 1000};
    assert_int_equal(pl_index_new(&o, &ix), 0);
    assert_int_equal(pl_index_space_open(ix, PL_STR("m"), 16, false, (pl_str){0}), 0);
    pl_index_free(ix);
    pl_index_reader *r;
    pl_index_space space[STORM_SPACES];
    ix = capped(400000, &r, space);
    uint64_t v[8192];
    for (uint64_t i = 0; i < 8192; i++)
        v[i] = i + 1;
    assert_int_equal(pl_index_store(ix, space[0], 0, PL_TIER_DEVICE, NULL, v, v, 8192), PL_ELIMIT);
    assert_int_equal(pl_index_store(ix, space[0], 0, PL_TIER_DEVICE, NULL, v, v, 100), 0);
    pl_index_reader_free(r);
    pl_index_free(ix);
}

static void under_the_cap_nothing_false_is_said(void **state)
{
    enum { STORM_WORKERS = 12, SMALL = 600000 };
    pl_index_reader *r;
    pl_index_space space[STORM_SPACES];
    pl_index *ix = capped(SMALL, &r, space);
    model *m = calloc(1, sizeof *m);
    storm *s = calloc(1, sizeof *s);
    storm_op *op = calloc(1, sizeof *op);
    assert_true(m && s && op);
    *s = (storm){.rng = {.state = 5}, .workers = STORM_WORKERS, .honest = true, .wide = 1u << 30};
    for (int i = 0; i < 60000; i++) {
        storm_next(s, op);
        uint32_t sp = space[op->space_number];
        int64_t did = storm_index(ix, sp, op), ideal = storm_model(m, sp, op);
        if (op->kind == STORM_STORE)
            assert_true(did == 0 ? ideal == 0 : did == PL_ENOTFOUND);
        else if (op->kind == STORM_QUERY)
            check_within(r, m, sp, op, STORM_WORKERS);
        else
            assert_true(did <= ideal);
        assert_true(bytes_of(ix) <= SMALL);
        if (i % 50 == 0)
            pl_index_maintain(ix);
    }
    pl_index_stats st;
    pl_index_stats_of(ix, &st);
    assert_true(st.evicted > 0);
    for (int w = 0; w < STORM_WORKERS; w++) /* evicted names are no obstacle to leaving */
        pl_index_clear(ix, w, -1);
    while (pl_index_maintain(ix))
        ;
    pl_index_stats_of(ix, &st);
    assert_int_equal(st.entries, 0);
    assert_int_equal(st.blocks, 0);
    free(op);
    free(s);
    model_free(m);
    pl_index_reader_free(r);
    pl_index_free(ix);
}

/* --- out of memory --- */

static void out_of_memory_nothing_false_is_said(void **state)
{
    enum { STORM_WORKERS = 4 };
    allocations_left = 1;
    pl_index *none;
    assert_int_equal(pl_index_new(NULL, &none), PL_ENOMEM);
    allocations_left = 2;
    assert_int_equal(pl_index_new(NULL, &none), PL_ENOMEM);
    allocations_left = -1;
    for (uint64_t seed = 1; seed <= 6; seed++) {
        pl_index_reader *r;
        pl_index_space space[STORM_SPACES];
        pl_index *ix = capped(0, &r, space);
        model *m = calloc(1, sizeof *m);
        storm *s = calloc(1, sizeof *s);
        storm_op *op = calloc(1, sizeof *op);
        assert_true(m && s && op);
        int refused = 0;
        *s = (storm){.rng = {.state = seed},
                     .workers = STORM_WORKERS,
                     .honest = true,
                     .wide = seed % 2 ? 3 : 1u << 30};
        for (int i = 0; i < 6000; i++) {
            storm_next(s, op);
            uint32_t sp = space[op->space_number];
            bool scarce = i > 500 && i < 5500 && op->kind != STORM_QUERY;
            storm_model(m, sp, op);
            /* the n-th allocation of a call and all that follow fail */
            allocations_left = scarce ? 1 + (long)pl_rng_below(&s->rng, 6) : -1;
            int64_t did = storm_index(ix, sp, op);
            if (op->kind == STORM_STORE) {
                refused += did == PL_ENOMEM;
                assert_true(did == 0 || did == PL_ENOMEM || did == PL_ENOTFOUND);
            }
            allocations_left = -1;
            if (op->kind == STORM_QUERY)
                check_within(r, m, sp, op, STORM_WORKERS);
            if (i % 50 == 0)
                pl_index_maintain(ix);
        }
        assert_true(refused > 100);
        for (int w = 0; w < STORM_WORKERS; w++)
            pl_index_clear(ix, w, -1);
        while (pl_index_maintain(ix))
            ;
        pl_index_stats st;
        pl_index_stats_of(ix, &st);
        assert_int_equal(st.blocks, 0);
        free(op);
        free(s);
        model_free(m);
        pl_index_reader_free(r);
        pl_index_free(ix);
    }
}

static int put(pl_index *ix, pl_index_space space, int slot, const uint64_t *parent,
               const uint64_t *v, size_t n)
{
    return pl_index_store(ix, space, slot, PL_TIER_DEVICE, parent, v, v, n);
}

/* Names outlive what is known of their blocks; they must not come to mean others. */
static void a_name_means_its_block_even_after_memory_ran_out(void **state)
{
    pl_index_reader *r;
    pl_index_space space[STORM_SPACES];
    pl_index *ix = capped(0, &r, space);
    uint64_t chain[8] = {1, 2, 3, 4, 5, 6, 7, 8}, fork[8] = {1, 2, 3, 104, 105, 106, 7, 8};
    pl_match out[8];
    assert_int_equal(put(ix, space[0], 0, NULL, chain, 6), 0);
    assert_int_equal(put(ix, space[0], 1, NULL, chain, 6), 0);
    allocations_left = 1;
    assert_int_equal(pl_index_remove(ix, 0, PL_TIER_DEVICE, chain + 4, 2), 2);
    allocations_left = -1;
    assert_int_equal(pl_index_match(r, space[0], chain, 6, out, 8), 0); /* all of it forgotten */
    assert_int_equal(put(ix, space[0], 2, NULL, fork, 6), 0);
    assert_int_equal(put(ix, space[0], 1, &chain[5], chain + 6, 2), 0);
    int n = pl_index_match(r, space[0], fork, 8, out, 8);
    assert_int_equal(n, 1);
    assert_int_equal(out[0].slot, 2);
    assert_int_equal(out[0].blocks[0], 6);
    assert_int_equal(put(ix, space[0], 1, NULL, chain, 3), 0); /* it is heard of again */
    n = pl_index_match(r, space[0], chain, 8, out, 8);
    assert_int_equal(n, 2);
    for (int i = 0; i < n; i++)
        assert_int_equal(out[i].blocks[0], 3);
    assert_int_equal(put(ix, space[0], 1, NULL, fork, 6), 0);
    n = pl_index_match(r, space[0], fork, 8, out, 8);
    assert_int_equal(n, 2);
    for (int i = 0; i < n; i++) /* 7 and 8 were behind the other 6 */
        assert_int_equal(out[i].blocks[0], 6);
    assert_int_equal(put(ix, space[0], 1, NULL, chain, 8), 0);
    n = pl_index_match(r, space[0], chain, 8, out, 8);
    assert_int_equal(n, 2);
    for (int i = 0; i < n; i++)
        assert_int_equal(out[i].blocks[0], out[i].slot == 1 ? 8 : 3);
    pl_index_reader_free(r);
    pl_index_free(ix);
}

static void a_worker_can_leave_in_the_middle_of_an_eviction(void **state)
{
    enum { RUNS = 2000 };
    pl_index_reader *r;
    pl_index_space space[STORM_SPACES];
    pl_index *ix = capped(CAP, &r, space);
    uint64_t local[LENGTH], name[LENGTH];
    pl_index_stats st;
    for (uint64_t c = 0; ix->evict.phase == PL_IX_IDLE && c < RUNS; c++) {
        conversation(c, local, name);
        assert_int_equal(
            pl_index_store(ix, space[0], (int)(c % 16), PL_TIER_DEVICE, NULL, name, local, LENGTH),
            0);
    }
    while (ix->evict.phase == PL_IX_CONDEMN)
        pl_ix_evict_step(ix, 64);
    assert_int_equal(ix->evict.phase, PL_IX_SWEEP);
    pl_ix_evict_step(ix, 500);
    assert_true(ix->holder[0][PL_TIER_DEVICE]->cursor > 0);
    for (int w = 0; w < 16; w++)
        pl_index_clear(ix, w, -1);
    while (pl_index_maintain(ix))
        ;
    pl_index_stats_of(ix, &st);
    assert_int_equal(st.entries, 0);
    assert_int_equal(st.blocks, 0);
    pl_index_reader_free(r);
    pl_index_free(ix);
}

/* What is copied while the writer's events wait is bounded, however many names a worker has. */
static void many_names_are_never_copied_at_once(void **state)
{
    enum { CHAINS = 3000 };
    pl_index_reader *r;
    pl_index_space space[STORM_SPACES];
    pl_index *ix = capped(0, &r, space);
    uint64_t local[LENGTH], name[LENGTH], *list = malloc(CHAINS * LENGTH * sizeof *list);
    pl_match out[4];
    size_t n = 0;
    assert_non_null(list);
    largest_allocation = 0;
    for (uint64_t c = 0; c < CHAINS; c++) {
        conversation(c, local, name);
        assert_int_equal(put(ix, space[0], 0, NULL, local, LENGTH), 0);
        assert_int_equal(pl_index_store(ix, space[0], 1, PL_TIER_DEVICE, NULL, name, local, LENGTH),
                         0);
        for (int i = 0; i < LENGTH && c % 3 == 0; i++)
            list[n++] = name[i];
    }
    assert_in_range(largest_allocation, 1, 1 << 20); /* all the names are several MiB */
    assert_int_equal(pl_index_entries(ix, 1), CHAINS * LENGTH);
    for (uint64_t c = 1; c < CHAINS; c += 3) {
        conversation(c, local, name);
        assert_int_equal(pl_index_remove(ix, 1, PL_TIER_DEVICE, name, LENGTH), LENGTH);
    }
    assert_int_equal(pl_index_keep(ix, 1, list, n), CHAINS * LENGTH / 3);
    for (uint64_t c = 0; c < CHAINS; c++) {
        conversation(c, local, name);
        int k = pl_index_match(r, space[0], local, LENGTH, out, 4);
        assert_int_equal(k, c % 3 == 0 ? 2 : 1);
        for (int i = 0; i < k; i++)
            assert_int_equal(out[i].blocks[0], LENGTH);
    }
    int refused = 0;
    for (uint64_t c = CHAINS; c < 2 * CHAINS; c++) { /* tables that cannot grow or be split */
        conversation(c, local, name);
        allocations_left = 1 + (long)(c % 8);
        refused += put(ix, space[0], 0, NULL, local, LENGTH) == PL_ENOMEM;
        allocations_left = -1;
        int k = pl_index_match(r, space[0], local, LENGTH, out, 4);
        assert_in_range(k, 0, 1);
        assert_true(k == 0 || out[0].slot == 0);
    }
    assert_in_range(refused, 100, CHAINS - 100);
    pl_index_clear(ix, 0, -1);
    assert_int_equal(pl_index_remove(ix, 1, PL_TIER_DEVICE, list, n), n);
    while (pl_index_maintain(ix))
        ;
    pl_index_stats st;
    pl_index_stats_of(ix, &st);
    assert_int_equal(st.entries, 0);
    assert_int_equal(st.blocks, 0);
    free(list);
    pl_index_reader_free(r);
    pl_index_free(ix);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_matched_stays_and_what_is_not_goes),
        cmocka_unit_test(a_cap_too_small_for_anything_is_an_error),
        cmocka_unit_test(under_the_cap_nothing_false_is_said),
        cmocka_unit_test(a_name_means_its_block_even_after_memory_ran_out),
        cmocka_unit_test(a_worker_can_leave_in_the_middle_of_an_eviction),
        cmocka_unit_test(many_names_are_never_copied_at_once),
        cmocka_unit_test(out_of_memory_nothing_false_is_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
