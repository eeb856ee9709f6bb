/* Approximate mode without memory: the tree is compiled into this program with an allocator that
 * fails on demand. An insertion that fails says so, what was there before stays right, and nothing
 * is lost or left behind. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdbool.h>

#include "base/rng.h"
#include "kv/approx_mem.h"

static long left = -1; /* allocations that work; negative: all */
static long failed;

static void *failing_get(pl_approx_mem *m, size_t n)
{
    if (left == 0) {
        failed++;
        return NULL;
    }
    left -= left > 0;
    return pl_approx_mem_get(m, n);
}

#define pl_approx_mem_get failing_get
#include "kv/approx_tree.c"
#undef pl_approx_mem_get

enum { SLOTS = 12, CHUNKS = 40 };

static uint64_t now_ns;

static uint32_t held(pl_approx *a, const uint64_t *keys, size_t n, int slot)
{
    pl_approx_hit out[SLOTS];
    int found = pl_approx_match(a, keys, n, out, SLOTS);
    for (int i = 0; i < found; i++)
        if (out[i].slot == slot)
            return out[i].chunks;
    return 0;
}

static void insertions(void **state)
{
    (void)state;
    int refused = 0;
    for (long works = 0; works < 60; works++) {
        pl_rng rng = {(uint64_t)works};
        pl_approx_options o = {pl_clock_virtual(&now_ns), 1000, SLOTS, 1 << 20};
        pl_approx *a;
        now_ns = 1000000;
        assert_int_equal(pl_approx_new(&o, &a), 0);
        left = works;
        for (int i = 0; i < 200; i++) {
            uint64_t keys[CHUNKS], key = 7;
            size_t n = 1 + pl_rng_below(&rng, CHUNKS);
            for (size_t k = 0; k < n; k++)
                keys[k] = key = key * 31 + (pl_rng_below(&rng, 6) == 0);
            int slot = (int)pl_rng_below(&rng, SLOTS);
            now_ns += 1000000;
            if (i == 150)
                left = -1; /* there is memory again */
            uint32_t before = held(a, keys, n, slot);
            int rc = pl_approx_insert(a, keys, n, slot);
            assert_true(rc == 0 || rc == PL_ENOMEM);
            uint32_t after = held(a, keys, n, slot);
            assert_true(rc == 0 ? after == n : after >= before && after <= n);
            assert_true(i < 150 || rc == 0);
            refused += rc != 0;
            if (i % 7 == 0)
                pl_approx_forget(a, keys, n, slot, n / 2);
            if (i % 7 == 3)
                pl_approx_correct(a, keys, n, slot, n / 2, now_ns);
        }
        now_ns += 2000000000ull;
        while (pl_approx_advance(a))
            ;
        pl_approx_stats s;
        pl_approx_stats_of(a, &s);
        assert_int_equal(s.nodes, 0);
        assert_int_equal(s.chunks, 0);
        assert_int_equal(s.entries, 0);
        pl_approx_free(a);
    }
    assert_true(refused > 100 && failed > 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(insertions)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
