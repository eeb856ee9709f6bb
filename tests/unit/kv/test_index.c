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
    pl_index_space s = pl_index_space_open(ix, pl_str_c(name), 16, false, (pl_str){0});
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

/* --- by hand: a worker's blocks are named 100 + i, their hashes are 1 + i --- */

enum { BLOCKS = 16 };
typedef struct fixture {
    pl_index *ix;
    pl_index_reader *r;
    pl_index_space space;
    uint64_t local[BLOCKS], name[BLOCKS];
} fixture;

static int set_up(void **state)
{
    fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    f->ix = new_index(0); /* 0: no cap */
    f->r = pl_index_reader_new(f->ix);
    assert_non_null(f->r);
    f->space = open_space(f->ix, "m");
    for (uint64_t i = 0; i < BLOCKS; i++) {
        f->local[i] = 1 + i;
        f->name[i] = 100 + i;
    }
    *state = f;
    return 0;
}

static int tear_down(void **state)
{
    fixture *f = *state;
    pl_index_reader_free(f->r);
    pl_index_free(f->ix);
    free(f);
    return 0;
}

/* Blocks [a, b) behind the one before. */
static int put(fixture *f, int slot, pl_tier tier, size_t a, size_t b)
{
    return pl_index_store(f->ix, f->space, slot, tier, a ? &f->name[a - 1] : NULL, f->name + a,
                          f->local + a, b - a);
}

/* How many blocks the worker holds, to that tier; -1 when it is not in the answer. */
static int held(fixture *f, int slot, pl_tier tier)
{
    pl_match out[8];
    int n = pl_index_match(f->r, f->space, f->local, BLOCKS, out, 8);
    for (int i = 0; i < n; i++)
        if (out[i].slot == slot)
            return (int)out[i].blocks[tier];
    return -1;
}

static void a_hole_ends_a_prefix_until_it_is_filled(void **state)
{
    fixture *f = *state;
    assert_int_equal(put(f, 3, PL_TIER_DEVICE, 0, 16), 0);
    assert_int_equal(held(f, 3, PL_TIER_DEVICE), 16);
    assert_int_equal(pl_index_remove(f->ix, 3, PL_TIER_DEVICE, f->name + 5, 2), 2);
    assert_int_equal(held(f, 3, PL_TIER_DEVICE), 5);
    assert_int_equal(pl_index_entries(f->ix, 3), 14);
    assert_int_equal(put(f, 3, PL_TIER_DEVICE, 5, 7), 0);
    assert_int_equal(held(f, 3, PL_TIER_DEVICE), 16);
    assert_int_equal(pl_index_remove(f->ix, 3, PL_TIER_DEVICE, f->name, 1), 1);
    assert_int_equal(held(f, 3, PL_TIER_DEVICE), -1);
}

static void a_hole_of_one_worker_is_not_anothers(void **state)
{
    fixture *f = *state;
    put(f, 0, PL_TIER_DEVICE, 0, 16);
    put(f, 4095, PL_TIER_DEVICE, 0, 12);
    pl_index_remove(f->ix, 0, PL_TIER_DEVICE, f->name + 2, 1);
    assert_int_equal(held(f, 0, PL_TIER_DEVICE), 2);
    assert_int_equal(held(f, 4095, PL_TIER_DEVICE), 12);
}

static void a_farther_tier_fills_a_nearer_ones_holes(void **state)
{
    fixture *f = *state;
    put(f, 1, PL_TIER_DEVICE, 0, 8);
    put(f, 1, PL_TIER_HOST, 0, 12);  /* copies of 8, then more */
    put(f, 1, PL_TIER_DISK, 12, 16); /* its parent is in another tier */
    assert_int_equal(held(f, 1, PL_TIER_DEVICE), 8);
    assert_int_equal(held(f, 1, PL_TIER_HOST), 12);
    assert_int_equal(held(f, 1, PL_TIER_DISK), 16);
    assert_int_equal(held(f, 1, PL_TIER_EXTERNAL), 16);
    pl_index_remove(f->ix, 1, PL_TIER_DEVICE, f->name + 3, 1); /* off-loaded */
    assert_int_equal(held(f, 1, PL_TIER_DEVICE), 3);
    assert_int_equal(held(f, 1, PL_TIER_HOST), 12);
    pl_index_clear(f->ix, 1, PL_TIER_HOST);
    assert_int_equal(held(f, 1, PL_TIER_EXTERNAL), 3);
}

static void a_worker_without_the_first_block_on_its_device_is_still_there(void **state)
{
    fixture *f = *state;
    put(f, 2, PL_TIER_HOST, 0, 4);
    assert_int_equal(held(f, 2, PL_TIER_DEVICE), 0);
    assert_int_equal(held(f, 2, PL_TIER_HOST), 4);
}

static void a_copy_more_takes_a_removal_more(void **state)
{
    fixture *f = *state;
    put(f, 0, PL_TIER_DEVICE, 0, 4);
    put(f, 0, PL_TIER_DEVICE, 0, 4);
    assert_int_equal(pl_index_entries(f->ix, 0), 4);
    assert_int_equal(pl_index_remove(f->ix, 0, PL_TIER_DEVICE, f->name, 4), 4);
    assert_int_equal(held(f, 0, PL_TIER_DEVICE), 4);
    assert_int_equal(pl_index_remove(f->ix, 0, PL_TIER_DEVICE, f->name, 4), 4);
    assert_int_equal(held(f, 0, PL_TIER_DEVICE), -1);
    assert_int_equal(pl_index_remove(f->ix, 0, PL_TIER_DEVICE, f->name, 4), 0);
    pl_index_stats st;
    pl_index_stats_of(f->ix, &st);
    assert_int_equal(st.duplicates, 4);
    assert_int_equal(st.unknown_removals, 4);
}

static void a_second_name_keeps_a_block(void **state)
{
    fixture *f = *state;
    const uint64_t other = 999;
    put(f, 0, PL_TIER_DEVICE, 0, 2);
    assert_int_equal(pl_index_store(f->ix, f->space, 0, PL_TIER_DEVICE, NULL, &other, f->local, 1),
                     0);
    assert_int_equal(pl_index_entries(f->ix, 0), 2);
    pl_index_remove(f->ix, 0, PL_TIER_DEVICE, f->name, 1);
    assert_int_equal(held(f, 0, PL_TIER_DEVICE), 2);
    pl_index_remove(f->ix, 0, PL_TIER_DEVICE, &other, 1);
    assert_int_equal(held(f, 0, PL_TIER_DEVICE), -1);
}

static void a_name_that_comes_for_another_block_leaves_the_first(void **state)
{
    fixture *f = *state;
    put(f, 0, PL_TIER_DEVICE, 0, 4);
    const uint64_t elsewhere = 77;
    assert_int_equal(
        pl_index_store(f->ix, f->space, 0, PL_TIER_DEVICE, NULL, f->name + 3, &elsewhere, 1), 0);
    assert_int_equal(held(f, 0, PL_TIER_DEVICE), 3);
    assert_int_equal(pl_index_entries(f->ix, 0), 4);
    /* within one event, the first block's name goes to the last: the others keep theirs */
    const uint64_t name[4] = {f->name[1], 500, 501, 502}, local[4] = {1, 2, 3, 4};
    assert_int_equal(pl_index_store(f->ix, f->space, 0, PL_TIER_DEVICE, NULL, name, local, 4), 0);
    assert_int_equal(held(f, 0, PL_TIER_DEVICE), 4);
    assert_int_equal(pl_index_remove(f->ix, 0, PL_TIER_DEVICE, name + 1, 1), 1);
    assert_int_equal(held(f, 0, PL_TIER_DEVICE), 1);
}

static void a_name_tells_its_space(void **state)
{
    fixture *f = *state;
    const uint64_t name = 900, local = 900;
    uint64_t seed;
    pl_index_space other = open_space(f->ix, "other");
    put(f, 0, PL_TIER_DISK, 0, 2);
    assert_int_equal(pl_index_store(f->ix, other, 0, PL_TIER_DEVICE, NULL, &name, &local, 1), 0);
    assert_int_equal(pl_index_space_of(f->ix, 0, f->name[1], &seed), f->space);
    assert_int_equal(pl_index_space_of(f->ix, 0, name, &seed), other);
    assert_int_equal(pl_index_space_of(f->ix, 1, name, &seed), 0); /* another's */
    assert_int_equal(pl_index_space_of(f->ix, 0, f->name[2], &seed), 0);
    pl_index_remove(f->ix, 0, PL_TIER_DISK, f->name + 1, 1);
    assert_int_equal(pl_index_space_of(f->ix, 0, f->name[1], &seed), 0);
    pl_index_clear(f->ix, 0, -1);
    assert_int_equal(pl_index_space_of(f->ix, 0, name, &seed), 0);
    assert_int_equal(pl_index_space_of(f->ix, 4096, name, &seed), 0);
}

static void a_seed_goes_with_all_that_is_behind(void **state)
{
    fixture *f = *state;
    const uint64_t name[] = {900, 901}, local[] = {900, 901};
    uint64_t seed;
    put(f, 0, PL_TIER_DEVICE, 0, 2);
    assert_false(pl_index_seed_known(f->ix, 77));
    pl_index_seed(f->ix, 0, f->name[0], 77);
    assert_true(pl_index_seed_known(f->ix, 77) && !pl_index_seed_known(f->ix, 77ull << 32 | 77));
    put(f, 0, PL_TIER_DEVICE, 2, 16); /* the same run, with another body */
    assert_int_equal(pl_index_space_of(f->ix, 0, f->name[15], &seed), f->space);
    assert_int_equal(seed, 77);
    /* a prompt that branches off, and another worker's names for all of it */
    assert_int_equal(
        pl_index_store(f->ix, f->space, 0, PL_TIER_DEVICE, &f->name[5], name, local, 2), 0);
    assert_int_equal(pl_index_space_of(f->ix, 0, name[1], &seed), f->space);
    assert_int_equal(seed, 77);
    put(f, 1, PL_TIER_HOST, 0, 2);
    assert_int_equal(pl_index_space_of(f->ix, 1, f->name[1], &seed), f->space);
    assert_int_equal(seed, 77);
    /* a prompt of its own, and one that takes a place that got free */
    assert_int_equal(pl_index_store(f->ix, f->space, 2, PL_TIER_DEVICE, NULL, name, local, 2), 0);
    assert_int_equal(pl_index_space_of(f->ix, 2, name[1], &seed), f->space);
    assert_int_equal(seed, 0);
    pl_index_remove(f->ix, 0, PL_TIER_DEVICE, name, 2);
    pl_index_remove(f->ix, 0, PL_TIER_DEVICE, f->name, 16);
    pl_index_remove(f->ix, 1, PL_TIER_HOST, f->name, 2);
    while (pl_index_maintain(f->ix))
        ;
    put(f, 0, PL_TIER_DEVICE, 0, 2);
    assert_int_equal(pl_index_space_of(f->ix, 0, f->name[1], &seed), f->space);
    assert_int_equal(seed, 0);
    pl_index_seed(f->ix, 0, 12345, 1); /* no such block, no such worker */
    pl_index_seed(f->ix, 4096, f->name[0], 1);
    assert_int_equal(pl_index_space_of(f->ix, 0, 12345, &seed), 0);
    assert_int_equal(seed, 0);
}

static void known_blocks_are_in_a_further_tier_too(void **state)
{
    fixture *f = *state;
    put(f, 0, PL_TIER_DEVICE, 0, 8);
    assert_int_equal(pl_index_also(f->ix, 0, PL_TIER_HOST, f->name + 2, 8), 6); /* 2 .. 7 */
    assert_int_equal(pl_index_also(f->ix, 1, PL_TIER_HOST, f->name, 8), 0);
    assert_int_equal(pl_index_entries(f->ix, 0), 14);
    pl_index_clear(f->ix, 0, PL_TIER_DEVICE);
    assert_int_equal(held(f, 0, PL_TIER_EXTERNAL), -1);
    put(f, 0, PL_TIER_DEVICE, 0, 2);
    assert_int_equal(held(f, 0, PL_TIER_HOST), 8);
    /* said again it is one more copy, as with a store */
    assert_int_equal(pl_index_also(f->ix, 0, PL_TIER_HOST, f->name + 7, 1), 1);
    pl_index_remove(f->ix, 0, PL_TIER_HOST, f->name + 7, 1);
    assert_int_equal(held(f, 0, PL_TIER_HOST), 8);
    pl_index_remove(f->ix, 0, PL_TIER_HOST, f->name + 7, 1);
    assert_int_equal(held(f, 0, PL_TIER_HOST), 7);
    assert_int_equal(pl_index_also(f->ix, 0, (pl_tier)4, f->name, 8), 0);
    assert_int_equal(pl_index_also(f->ix, 4096, PL_TIER_HOST, f->name, 8), 0);
}

static void a_list_keeps_what_it_names_in_every_tier(void **state)
{
    fixture *f = *state;
    const uint64_t alias = 555;
    put(f, 0, PL_TIER_DEVICE, 0, 16);
    put(f, 0, PL_TIER_HOST, 0, 6);
    put(f, 1, PL_TIER_DEVICE, 0, 16);
    /* block 5 has a second name, which alone stays */
    pl_index_store(f->ix, f->space, 0, PL_TIER_DEVICE, f->name + 4, &alias, f->local + 5, 1);
    const uint64_t list[] = {4242,       f->name[9], f->name[0], f->name[1], f->name[2],
                             f->name[3], f->name[4], alias,      f->name[0]};
    /* 6, 7, 8 and 10 .. 15 of the device, 5 of the host, whose name was another */
    assert_int_equal(pl_index_keep(f->ix, 0, list, 9), 10);
    assert_int_equal(held(f, 0, PL_TIER_DEVICE), 6);
    assert_int_equal(held(f, 1, PL_TIER_DEVICE), 16);
    assert_int_equal(pl_index_entries(f->ix, 0), 12);
    assert_int_equal(pl_index_remove(f->ix, 0, PL_TIER_DEVICE, f->name + 5, 1), 0);
    assert_int_equal(put(f, 0, PL_TIER_DEVICE, 10, 11), 0); /* 9 is still a parent */
    pl_index_remove(f->ix, 0, PL_TIER_DEVICE, &alias, 1);
    assert_int_equal(held(f, 0, PL_TIER_EXTERNAL), 5);
    assert_int_equal(pl_index_keep(f->ix, 0, NULL, 0), 12); /* 5 and 9, 10; 5 of the host */
    assert_int_equal(held(f, 0, PL_TIER_EXTERNAL), -1);
    assert_int_equal(pl_index_keep(f->ix, 0, list, 9), 0);
    assert_int_equal(pl_index_keep(f->ix, 4096, list, 9), 0);
}

static void a_long_list(void **state)
{
    enum { CHAINS = 300, DEPTH = 200 };
    fixture *f = *state;
    uint64_t local[DEPTH], name[DEPTH], *list = malloc(CHAINS * DEPTH * sizeof *list);
    size_t n = 0;
    assert_non_null(list);
    for (uint64_t c = 0; c < CHAINS; c++)
        for (int w = 0; w < 2; w++) {
            for (uint64_t i = 0; i < DEPTH; i++) {
                local[i] = c * DEPTH + i + 1;
                name[i] = local[i] * 0x9e3779b97f4a7c15u;
                if (w == 0 && i < c)
                    list[n++] = name[i];
            }
            assert_int_equal(
                pl_index_store(f->ix, f->space, w, PL_TIER_DEVICE, NULL, name, local, DEPTH), 0);
        }
    assert_int_equal(pl_index_keep(f->ix, 0, list, n), CHAINS * DEPTH - n);
    assert_int_equal(pl_index_entries(f->ix, 0), n);
    for (uint64_t c = 0; c < CHAINS; c++) {
        pl_match out[2];
        for (uint64_t i = 0; i < DEPTH; i++)
            local[i] = c * DEPTH + i + 1;
        int found = pl_index_match(f->r, f->space, local, DEPTH, out, 2);
        assert_int_equal(found, 1 + (c > 0));
        for (int i = 0; i < found; i++)
            assert_int_equal(out[i].blocks[0], out[i].slot == 1 || c > DEPTH ? DEPTH : c);
    }
    assert_int_equal(pl_index_remove(f->ix, 0, PL_TIER_DEVICE, list, n), n);
    assert_int_equal(pl_index_entries(f->ix, 0), 0);
    assert_int_equal(pl_index_entries(f->ix, 1), CHAINS * DEPTH);
    free(list);
}

static void an_unknown_parent_changes_nothing(void **state)
{
    fixture *f = *state;
    assert_int_equal(put(f, 0, PL_TIER_DEVICE, 4, 8), PL_ENOTFOUND);
    put(f, 1, PL_TIER_DEVICE, 0, 4); /* another's name is no parent */
    assert_int_equal(put(f, 0, PL_TIER_DEVICE, 4, 8), PL_ENOTFOUND);
    pl_index_space other = open_space(f->ix, "other");
    assert_int_equal(
        pl_index_store(f->ix, other, 1, PL_TIER_DEVICE, &f->name[3], f->name + 4, f->local + 4, 4),
        PL_ENOTFOUND); /* nor one of another space */
    pl_index_stats st;
    pl_index_stats_of(f->ix, &st);
    assert_int_equal(st.unknown_parents, 3);
    assert_int_equal(st.entries, 4);
}

static void spaces_do_not_meet(void **state)
{
    fixture *f = *state;
    pl_str none = {0};
    pl_index_space s[4] = {
        f->space,
        pl_index_space_open(f->ix, PL_STR("m"), 32, false, none),
        pl_index_space_open(f->ix, PL_STR("m"), 16, true, none),
        pl_index_space_open(f->ix, PL_STR("m"), 16, false, PL_STR("x")),
    };
    put(f, 0, PL_TIER_DEVICE, 0, 4);
    pl_match out[2];
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < i; j++)
            assert_int_not_equal(s[i], s[j]);
        assert_int_equal(pl_index_match(f->r, s[i], f->local, 4, out, 2), i == 0);
    }
    assert_int_equal(pl_index_space_open(f->ix, PL_STR("m"), 16, false, PL_STR("x")), s[3]);
    assert_int_equal(pl_index_space_find(f->ix, PL_STR("m"), 16, false, PL_STR("x")), s[3]);
    assert_int_equal(pl_index_space_find(f->ix, PL_STR("mx"), 16, false, none), 0);
    char *text = malloc(PL_INDEX_SPACE_NAME_MAX + 1);
    assert_non_null(text);
    memset(text, 'x', PL_INDEX_SPACE_NAME_MAX + 1);
    assert_int_equal(
        pl_index_space_open(f->ix, (pl_str){text, PL_INDEX_SPACE_NAME_MAX + 1}, 16, false, none),
        0);
    free(text);
}

static void a_cleared_worker_is_gone_at_once_and_may_come_back_before_it_is_swept(void **state)
{
    fixture *f = *state;
    put(f, 0, PL_TIER_DEVICE, 0, 16);
    put(f, 1, PL_TIER_DEVICE, 0, 8);
    pl_index_clear(f->ix, 0, -1);
    assert_int_equal(held(f, 0, PL_TIER_EXTERNAL), -1);
    assert_int_equal(held(f, 1, PL_TIER_DEVICE), 8);
    assert_int_equal(pl_index_entries(f->ix, 0), 0);
    assert_int_equal(put(f, 0, PL_TIER_DEVICE, 8, 16), PL_ENOTFOUND);
    put(f, 0, PL_TIER_DEVICE, 0, 3);
    assert_int_equal(held(f, 0, PL_TIER_DEVICE), 3);
    while (pl_index_maintain(f->ix))
        ;
    assert_int_equal(held(f, 0, PL_TIER_DEVICE), 3);
    assert_int_equal(pl_index_entries(f->ix, 0), 3);
    for (int i = 0; i < 70000; i++) { /* more often than lives have numbers */
        pl_index_clear(f->ix, 0, PL_TIER_DEVICE);
        put(f, 0, PL_TIER_DEVICE, 0, 1);
    }
    assert_int_equal(held(f, 0, PL_TIER_DEVICE), 1);
    assert_int_equal(held(f, 1, PL_TIER_DEVICE), 8);
}

static void all_memory_comes_back(void **state)
{
    fixture *f = *state;
    pl_index_stats before, after;
    pl_index_stats_of(f->ix, &before);
    enum { MANY = 20000 };
    uint64_t *v = malloc(MANY * sizeof *v);
    assert_non_null(v);
    for (uint64_t i = 0; i < MANY; i++)
        v[i] = i * 7919 + 13;
    for (int w = 0; w < 20; w++)
        assert_int_equal(
            pl_index_store(f->ix, f->space, w, PL_TIER_DEVICE, NULL, v, v + w % 3, MANY - 3), 0);
    pl_index_stats_of(f->ix, &after);
    assert_int_equal(after.entries, 20 * (MANY - 3));
    assert_true(after.blocks <= 3 * MANY); /* three chains, whoever holds them */
    for (int w = 0; w < 20; w++)
        assert_int_equal(pl_index_remove(f->ix, w, PL_TIER_DEVICE, v, MANY - 3), MANY - 3);
    while (pl_index_maintain(f->ix))
        ;
    pl_index_stats_of(f->ix, &after);
    assert_int_equal(after.entries, 0);
    assert_int_equal(after.blocks, 0);
    assert_true(after.bytes < before.bytes + 64 * 1024);
    free(v);
}

static void an_answer_has_room_for_as_many_as_the_caller_says(void **state)
{
    fixture *f = *state;
    for (int w = 0; w < 100; w++)
        put(f, w, w % 2 ? PL_TIER_DEVICE : PL_TIER_HOST, 0, 1 + (size_t)w % 4);
    pl_match out[11];
    memset(out, 0x55, sizeof out);
    assert_int_equal(pl_index_match(f->r, f->space, f->local, BLOCKS, out, 10), 10);
    assert_int_equal(out[10].slot, 0x55555555);
    for (int i = 0; i < 10; i++)
        assert_int_equal(out[i].blocks[PL_TIER_EXTERNAL], 1 + out[i].slot % 4);
    assert_int_equal(pl_index_match(f->r, f->space, f->local, BLOCKS, out, 0), 0);
    assert_int_equal(pl_index_match(f->r, f->space, f->local, 0, out, 10), 0);
    assert_int_equal(pl_index_match(f->r, 0, f->local, BLOCKS, out, 10), 0);
    assert_int_equal(pl_index_match(f->r, 17, f->local, BLOCKS, out, 10), 0);
}

static void bad_arguments_are_refused(void **state)
{
    fixture *f = *state;
    assert_int_equal(put(f, -1, PL_TIER_DEVICE, 0, 1), PL_EINVALID);
    assert_int_equal(put(f, 4096, PL_TIER_DEVICE, 0, 1), PL_EINVALID);
    assert_int_equal(put(f, 0, (pl_tier)4, 0, 1), PL_EINVALID);
    assert_int_equal(pl_index_store(f->ix, 2, 0, PL_TIER_DEVICE, NULL, f->name, f->local, 1),
                     PL_EINVALID); /* no such space */
    assert_int_equal(pl_index_store(f->ix, 0, 0, PL_TIER_DEVICE, NULL, f->name, f->local, 1),
                     PL_EINVALID);
    assert_int_equal(pl_index_remove(f->ix, 4096, PL_TIER_DEVICE, f->name, 1), 0);
    pl_index_clear(f->ix, 4096, -1);
    pl_index_clear(f->ix, 0, 4);
    assert_int_equal(pl_index_entries(f->ix, 4096), 0);
}

#define BY_HAND(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(agrees_with_the_model),
        BY_HAND(a_hole_ends_a_prefix_until_it_is_filled),
        BY_HAND(a_hole_of_one_worker_is_not_anothers),
        BY_HAND(a_farther_tier_fills_a_nearer_ones_holes),
        BY_HAND(a_worker_without_the_first_block_on_its_device_is_still_there),
        BY_HAND(a_copy_more_takes_a_removal_more),
        BY_HAND(a_second_name_keeps_a_block),
        BY_HAND(a_name_that_comes_for_another_block_leaves_the_first),
        BY_HAND(a_name_tells_its_space),
        BY_HAND(a_seed_goes_with_all_that_is_behind),
        BY_HAND(known_blocks_are_in_a_further_tier_too),
        BY_HAND(a_list_keeps_what_it_names_in_every_tier),
        BY_HAND(a_long_list),
        BY_HAND(an_unknown_parent_changes_nothing),
        BY_HAND(spaces_do_not_meet),
        BY_HAND(a_cleared_worker_is_gone_at_once_and_may_come_back_before_it_is_swept),
        BY_HAND(all_memory_comes_back),
        BY_HAND(an_answer_has_room_for_as_many_as_the_caller_says),
        BY_HAND(bad_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
