/* Memory for approximate mode: pieces are aligned, as large as asked for, never overlap and keep
 * what is in them, in any order of use; what is freed is used again; threads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "kv/approx_mem.h"

static pl_approx_mem mem;

static void every_size(void **state)
{
    (void)state;
    pl_approx_mem_init(&mem);
    size_t classes = 0, before = 0;
    for (size_t n = 1; n <= 20000; n++) {
        char *p = pl_approx_mem_get(&mem, n);
        assert_non_null(p);
        size_t size = pl_approx_mem_size(p);
        assert_true(size >= n && (n < 64 || size <= n + n / 4 + 1));
        assert_int_equal((uintptr_t)p % 16, 0);
        memset(p, 1, size);
        if (n <= 8192) {
            classes += size != before;
            before = size;
        }
        pl_approx_mem_put(&mem, p);
    }
    assert_int_equal(classes, PL_APPROX_MEM_CLASSES);
    pl_approx_mem_put(&mem, NULL);
    pl_approx_mem_destroy(&mem);
}

/* Fills pieces with their own number and looks whether it is still there. */
static void churn(uint64_t seed, int rounds, _Atomic int *bad)
{
    enum { PIECES = 3000 };
    struct {
        unsigned char *p;
        size_t n;
    } *all = calloc(PIECES, sizeof *all);
    pl_rng rng = {seed};
    if (!all)
        abort();
    for (int i = 0; i < rounds; i++) {
        uint32_t k = pl_rng_below(&rng, PIECES);
        if (all[k].p) {
            *bad += all[k].p[0] != (k & 255) || all[k].p[all[k].n - 1] != (k & 255);
            pl_approx_mem_put(&mem, all[k].p);
            all[k].p = NULL;
            continue;
        }
        all[k].n =
            16 + (pl_rng_below(&rng, 20) ? pl_rng_below(&rng, 600) : pl_rng_below(&rng, 100000));
        all[k].p = pl_approx_mem_get(&mem, all[k].n);
        if (!all[k].p)
            abort();
        memset(all[k].p, (int)(k & 255), all[k].n);
    }
    for (int k = 0; k < PIECES; k++)
        pl_approx_mem_put(&mem, all[k].p);
    free(all);
}

static _Atomic int bad;

static void kept(void **state)
{
    (void)state;
    pl_approx_mem_init(&mem);
    churn(1, 40000, &bad);
    assert_int_equal(bad, 0);
    pl_approx_mem_destroy(&mem);
}

static void used_again(void **state)
{
    (void)state;
    pl_approx_mem_init(&mem);
    void *p = pl_approx_mem_get(&mem, 100), *other = pl_approx_mem_get(&mem, 100);
    assert_ptr_not_equal(p, other);
    pl_approx_mem_put(&mem, p);
    assert_ptr_equal(pl_approx_mem_get(&mem, 100), p);
    pl_approx_mem_put(&mem, other);
    pl_approx_mem_put(&mem, p);
    pl_approx_mem_destroy(&mem);
}

static void *run(void *arg)
{
    churn((uint64_t)(uintptr_t)arg, 20000, &bad);
    return NULL;
}

static void threads(void **state)
{
    (void)state;
    pthread_t t[3];
    pl_approx_mem_init(&mem);
    for (uintptr_t i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&t[i], NULL, run, (void *)(i + 5)), 0);
    for (int i = 0; i < 3; i++)
        pthread_join(t[i], NULL);
    assert_int_equal(bad, 0);
    pl_approx_mem_destroy(&mem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_size),
        cmocka_unit_test(kept),
        cmocka_unit_test(used_again),
        cmocka_unit_test(threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
