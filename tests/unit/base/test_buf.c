/* Growable buffer: contents against a plain copy, formatting at every distance from the end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/rng.h"

static void add_and_shift_against_a_copy(void **state)
{
    (void)state;
    static char want[1 << 20];
    size_t n = 0;
    pl_rng rng = {7};
    pl_buf b = {0};
    for (int i = 0; i < 5000; i++) {
        char piece[300];
        size_t len = pl_rng_below(&rng, sizeof piece);
        for (size_t k = 0; k < len; k++)
            piece[k] = (char)pl_rng_next(&rng);
        assert_int_equal(pl_buf_add(&b, piece, len), 0);
        memcpy(want + n, piece, len);
        n += len;
        if (pl_rng_below(&rng, 3) == 0) {
            size_t cut = pl_rng_below(&rng, (uint32_t)n + 50); /* sometimes more than there is */
            pl_buf_shift(&b, cut);
            cut = cut < n ? cut : n;
            memmove(want, want + cut, n - cut);
            n -= cut;
        }
        assert_int_equal(b.n, n);
        assert_true(n == 0 || memcmp(b.p, want, n) == 0);
    }
    pl_buf_free(&b);
    assert_null(b.p);
}

static void formats_at_every_fill(void **state)
{
    (void)state;
    for (size_t fill = 240; fill < 260; fill++) { /* the first block has 256 bytes */
        pl_buf b = {0};
        char *x = malloc(fill);
        memset(x, 'x', fill);
        assert_int_equal(pl_buf_add(&b, x, fill), 0);
        assert_int_equal(pl_buf_addf(&b, "%s-%d", "abc", 42), 0);
        assert_int_equal(b.n, fill + 6);
        assert_memory_equal(b.p, x, fill);
        assert_memory_equal(b.p + fill, "abc-42", 6);
        free(x);
        pl_buf_free(&b);
    }
    pl_buf b = {0};
    assert_int_equal(pl_buf_addf(&b, "%s", ""), 0);
    assert_int_equal(b.n, 0);
    pl_buf_free(&b);
}

static void absurd_sizes_leave_it_as_it_was(void **state)
{
    (void)state;
    pl_buf b = {0};
    assert_int_equal(pl_buf_add(&b, "abc", 3), 0);
    assert_int_equal(pl_buf_reserve(&b, SIZE_MAX), PL_ENOMEM);
    assert_int_equal(pl_buf_reserve(&b, SIZE_MAX / 2), PL_ENOMEM);
    assert_int_equal(b.n, 3);
    assert_memory_equal(b.p, "abc", 3);
    pl_buf_free(&b);
}

static void nothing_added_is_nothing(void **state)
{
    (void)state;
    pl_buf b = {0};
    assert_int_equal(pl_buf_add(&b, NULL, 0), 0);
    pl_buf_shift(&b, 0);
    assert_int_equal(pl_buf_str(&b).n, 0);
    pl_buf_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(add_and_shift_against_a_copy),
        cmocka_unit_test(formats_at_every_fill),
        cmocka_unit_test(absurd_sizes_leave_it_as_it_was),
        cmocka_unit_test(nothing_added_is_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
