/* Arena: what was allocated stays as it was written, is aligned and disjoint, and a reset gives
 * the memory back. Overlaps and overruns are what ASan and the patterns here catch. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/arena.h"
#include "base/rng.h"

static void pieces_keep_their_bytes(void **state)
{
    (void)state;
    enum { N = 2000 };
    static struct {
        unsigned char *p;
        size_t n;
    } piece[N];
    pl_rng rng = {42};
    pl_arena a = PL_ARENA_INIT;
    for (int round = 0; round < 3; round++) {
        size_t asked = 0;
        for (int i = 0; i < N; i++) {
            size_t n = pl_rng_below(&rng, 10) ? pl_rng_below(&rng, 200) : pl_rng_below(&rng, 20000);
            piece[i].n = n;
            piece[i].p = pl_arena_alloc(&a, n);
            assert_non_null(piece[i].p);
            assert_int_equal((uintptr_t)piece[i].p % 16, 0);
            memset(piece[i].p, i & 0xff, n);
            asked += n;
        }
        for (int i = 0; i < N; i++)
            for (size_t k = 0; k < piece[i].n; k++)
                if (piece[i].p[k] != (i & 0xff))
                    fail_msg("piece %d was overwritten at byte %zu", i, k);
        assert_true(a.used_bytes >= asked);
        pl_arena_reset(&a);
        assert_int_equal(a.used_bytes, 0);
    }
    pl_arena_free(&a);
}

static void zeroed_memory_is_zero_after_reuse(void **state)
{
    (void)state;
    pl_arena a = PL_ARENA_INIT;
    memset(pl_arena_alloc(&a, 1000), 0xee, 1000);
    pl_arena_reset(&a);
    const unsigned char *p = pl_arena_zalloc(&a, 1000);
    for (int i = 0; i < 1000; i++)
        assert_int_equal(p[i], 0);
    pl_arena_free(&a);
}

static void the_first_chunk_is_reused(void **state)
{
    (void)state;
    pl_arena a = PL_ARENA_INIT;
    void *first = pl_arena_alloc(&a, 100);
    for (int i = 0; i < 100; i++)
        assert_non_null(pl_arena_alloc(&a, 1000));
    pl_arena_reset(&a);
    assert_ptr_equal(pl_arena_alloc(&a, 100), first);
    pl_arena_free(&a);
}

static void absurd_sizes_are_refused(void **state)
{
    (void)state;
    pl_arena a = PL_ARENA_INIT;
    assert_null(pl_arena_alloc(&a, SIZE_MAX));
    assert_null(pl_arena_alloc(&a, SIZE_MAX - 15));
    assert_null(pl_arena_alloc(&a, SIZE_MAX / 2 + 1));
    assert_non_null(pl_arena_alloc(&a, 0));
    pl_arena_free(&a);
}

static void strings_end_in_nul(void **state)
{
    (void)state;
    pl_arena a = PL_ARENA_INIT;
    pl_str s = pl_arena_str(&a, (pl_str){"abcdef", 3});
    assert_int_equal(s.n, 3);
    assert_string_equal(s.p, "abc");
    s = pl_arena_str(&a, (pl_str){NULL, 0});
    assert_non_null(s.p);
    assert_string_equal(s.p, "");
    s = pl_arena_printf(&a, "%s:%d", "host", 80);
    assert_int_equal(s.n, 7);
    assert_string_equal(s.p, "host:80");
    s = pl_arena_printf(&a, "%05000d", 1); /* longer than a chunk */
    assert_int_equal(s.n, 5000);
    assert_int_equal(s.p[4999], '1');
    pl_arena_free(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_keep_their_bytes),
        cmocka_unit_test(zeroed_memory_is_zero_after_reuse),
        cmocka_unit_test(the_first_chunk_is_reused),
        cmocka_unit_test(absurd_sizes_are_refused),
        cmocka_unit_test(strings_end_in_nul),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
