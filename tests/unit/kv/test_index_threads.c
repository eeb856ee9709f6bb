/* Readers of the KV index beside its writer, for TSan and for what an answer may never be while the
 * index changes under it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "index_storm.h"

enum { READERS = 3, WORKERS = 40, DEPTH = 300, EVENTS = 12000 };

/* Worker 0 holds the chain throughout. Worker 1 always has its first half and takes and drops the
 * second. Worker 2 comes and goes altogether. Workers from 3 on are a storm in the same space, with
 * hashes of their own, and on the chain's first block. */
typedef struct scene {
    pl_index *ix;
    pl_index_space space;
    uint64_t local[DEPTH], name[DEPTH];
    _Atomic bool stop;
    _Atomic uint64_t asked;
} scene;

typedef struct asker {
    scene *s;
    const char *wrong;
} asker;

static const char *judge(const pl_match *out, int n)
{
    bool seen[WORKERS] = {false};
    for (int i = 0; i < n; i++) {
        const uint32_t *b = out[i].blocks;
        if (out[i].slot < 0 || out[i].slot >= WORKERS || seen[out[i].slot])
            return "a worker that does not exist, or twice";
        seen[out[i].slot] = true;
        if (b[0] > b[1] || b[1] > b[2] || b[2] > b[3] || b[3] == 0 || b[3] > DEPTH)
            return "tiers in the wrong order";
        if (out[i].slot == 0 && b[0] != DEPTH)
            return "a block that was held throughout is missing";
        if (out[i].slot == 1 && b[0] < DEPTH / 2)
            return "a half that was held throughout is missing";
        if (out[i].slot > 2 && b[3] > 1)
            return "blocks that were never held";
    }
    return seen[0] && seen[1] ? NULL : "a worker that was there throughout is missing";
}

static void *ask(void *arg)
{
    asker *a = arg;
    scene *s = a->s;
    pl_index_reader *r = pl_index_reader_new(s->ix);
    pl_match out[WORKERS];
    if (!r)
        a->wrong = "no reader";
    while (!a->wrong && !atomic_load(&s->stop)) {
        a->wrong = judge(out, pl_index_match(r, s->space, s->local, DEPTH, out, WORKERS));
        atomic_fetch_add(&s->asked, 1);
        if (pl_index_space_find(s->ix, PL_STR("m"), 16, false, (pl_str){0}) != s->space)
            a->wrong = "the space is missing";
        pl_index_stats st;
        pl_index_stats_of(s->ix, &st);
        if (st.entries < DEPTH)
            a->wrong = "too few entries";
    }
    pl_index_reader_free(r);
    return NULL;
}

static int store_part(scene *s, int slot, size_t a, size_t b)
{
    return pl_index_store(s->ix, s->space, slot, PL_TIER_DEVICE, a ? &s->name[a - 1] : NULL,
                          s->name + a, s->local + a, b - a);
}

static void write_on(scene *s)
{
    storm *st = calloc(1, sizeof *st);
    storm_op *op = calloc(1, sizeof *op);
    assert_true(st && op);
    *st = (storm){.rng = {.state = 99}, .workers = WORKERS - 3, .wide = 4};
    for (int i = 0; i < EVENTS; i++) {
        storm_next(st, op);
        op->slot += 3;
        for (size_t k = 0; k < op->n && op->kind == STORM_STORE; k++)
            op->local[k] = s->local[0] + op->local[k] * 1000; /* 0: the chain's first block */
        if (op->kind == STORM_STORE && op->n > 1 && op->local[1] == s->local[1])
            fail_msg("the storm is on the chain");
        (void)storm_index(s->ix, s->space, op);
        size_t at = DEPTH / 2 + (size_t)i % (DEPTH / 2);
        if (i % 3 == 0)
            assert_int_equal(store_part(s, 1, DEPTH / 2, DEPTH), 0);
        if (i % 3 == 1) /* a hole first, then the rest */
            assert_int_equal(pl_index_remove(s->ix, 1, PL_TIER_DEVICE, s->name + at, 1), 1);
        if (i % 3 == 2)
            assert_int_equal(
                pl_index_remove(s->ix, 1, PL_TIER_DEVICE, s->name + DEPTH / 2, DEPTH / 2),
                DEPTH / 2 - 1);
        if (i % 20 == 0)
            assert_int_equal(store_part(s, 2, 0, DEPTH), 0);
        if (i % 20 == 10)
            pl_index_clear(s->ix, 2, -1);
        if (i % 5 == 0)
            (void)pl_index_maintain(s->ix);
        if (i % 50 == 0) { /* more spaces, too */
            char text[16];
            int n = snprintf(text, sizeof text, "s%d", i);
            assert_true(
                pl_index_space_open(s->ix, (pl_str){text, (size_t)n}, 16, false, (pl_str){0}) != 0);
        }
    }
    /* on a machine with one busy core the readers may not have had a turn yet */
    while (atomic_load(&s->asked) < 100 * READERS)
        (void)pl_index_maintain(s->ix);
    free(op);
    free(st);
}

static void answers_stay_true_while_the_index_changes(void **state)
{
    scene *s = calloc(1, sizeof *s);
    assert_non_null(s);
    pl_index_options o = {.max_bytes = 0};
    assert_int_equal(pl_index_new(&o, &s->ix), 0);
    s->space = pl_index_space_open(s->ix, PL_STR("m"), 16, false, (pl_str){0});
    for (uint64_t i = 0; i < DEPTH; i++) {
        s->local[i] = 500000 + i;
        s->name[i] = 1ull << 40 | i;
    }
    assert_int_equal(store_part(s, 0, 0, DEPTH), 0);
    assert_int_equal(store_part(s, 1, 0, DEPTH / 2), 0);
    pthread_t thread[READERS];
    asker a[READERS];
    for (int i = 0; i < READERS; i++) {
        a[i] = (asker){.s = s};
        assert_int_equal(pthread_create(&thread[i], NULL, ask, &a[i]), 0);
    }
    write_on(s);
    atomic_store(&s->stop, true);
    for (int i = 0; i < READERS; i++) {
        assert_int_equal(pthread_join(thread[i], NULL), 0);
        if (a[i].wrong)
            fail_msg("reader %d: %s", i, a[i].wrong);
    }
    pl_index_free(s->ix);
    free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_stay_true_while_the_index_changes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
