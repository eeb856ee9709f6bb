/* The VM's allocator: contents survive, memory is reused, the cap holds. */
#include "policy_test.h"

#include "policy/vm_arena.h"

#define N 2000

static void test_random_use_keeps_contents(void **state)
{
    pl_vm_arena *a = pl_vm_arena_new(32u << 20, NULL);
    pl_rng rng = {1};
    unsigned char *p[N] = {0};
    size_t n[N] = {0};
    for (int step = 0; step < 200000; step++) {
        unsigned i = pl_rng_below(&rng, N);
        for (size_t k = 0; k < n[i]; k += 1 + n[i] / 7)
            assert_int_equal(p[i][k], i & 0xff);
        size_t want = pl_rng_below(&rng, 4) ? pl_rng_below(&rng, 600) : pl_rng_below(&rng, 9000);
        unsigned char *q = pl_vm_arena_alloc(a, p[i], n[i], want);
        assert_true(want == 0 ? q == NULL : q != NULL && ((uintptr_t)q & 15) == 0);
        for (size_t k = 0; k < (n[i] < want ? n[i] : want); k += 1 + n[i] / 7)
            assert_int_equal(q[k], i & 0xff);
        if (q)
            memset(q, (int)(i & 0xff), want);
        p[i] = q;
        n[i] = want;
    }
    for (int i = 0; i < N; i++)
        pl_vm_arena_alloc(a, p[i], n[i], 0);
    assert_int_equal(pl_vm_arena_used(a), 0);
    pl_vm_arena_free(a);
}

static void test_cap(void **state)
{
    pl_vm_arena *a = pl_vm_arena_new(1u << 20, NULL);
    assert_null(pl_vm_arena_alloc(a, NULL, 0, 2u << 20));
    assert_null(pl_vm_arena_alloc(a, NULL, 0, SIZE_MAX / 2));
    void *all[2048];
    int n = 0;
    while (n < 2048 && (all[n] = pl_vm_arena_alloc(a, NULL, 0, 1000)))
        n++;
    assert_in_range(n, 1000, 1048);
    /* a shrink never fails, even now */
    assert_non_null(pl_vm_arena_alloc(a, all[0], 1000, 100));
    pl_vm_arena_alloc(a, all[0], 100, 0);
    /* what is free in a large class serves small ones */
    pl_vm_arena_alloc(a, all[1], 1000, 0);
    for (int i = 0; i < 10; i++)
        assert_non_null(pl_vm_arena_alloc(a, NULL, 0, 60));
    for (int i = 2; i < n; i++)
        pl_vm_arena_alloc(a, all[i], 1000, 0);
    assert_non_null(pl_vm_arena_alloc(a, NULL, 0, 1000));
    pl_vm_arena_free(a);
}

static void test_a_growing_block_stays_in_place(void **state)
{
    pl_vm_arena *a = pl_vm_arena_new(1u << 20, NULL);
    char *p = pl_vm_arena_alloc(a, NULL, 0, 100);
    for (size_t n = 100; n < 1000000; n *= 2) {
        char *q = pl_vm_arena_alloc(a, p, n, n * 2 < 1000000 ? n * 2 : 1000000);
        assert_ptr_equal(q, p);
    }
    pl_vm_arena_free(a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_use_keeps_contents),
        cmocka_unit_test(test_cap),
        cmocka_unit_test(test_a_growing_block_stays_in_place),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
