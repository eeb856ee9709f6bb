/* Step times: golden values worked out by hand from the formula, and what every preset must obey.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/sim.h"

static int64_t step(const char *preset, int64_t prefill, double attn, int decoding, int64_t context)
{
    pl_step_work w = {prefill, attn, decoding, context};
    return pl_timing_step_us(pl_timing_find(pl_str_c(preset)), &w);
}

static void test_golden(void **state)
{
    /* One decode with 2,000 tokens of context: 6900 + 5 + 0.039 * 2000 = 6983. */
    assert_int_equal(step("llama-8b-h100-tp1", 0, 0, 1, 2000), 6983);
    /* 2,000 new tokens: 6900 + 36 * 2000 + 0.0012 * 2000 * 1000 = 81300. */
    assert_int_equal(step("llama-8b-h100-tp1", 2000, 2000.0 * 1000, 0, 0), 81300);
    /* 512 new after 1,488 cached: 6900 + 18432 + 0.0012 * 512 * (1488 + 256) = 26403.5136. */
    assert_int_equal(step("llama-8b-h100-tp1", 512, 512.0 * 1744, 0, 0), 26404);
    /* 32 decode with 65,536 in all: 16600 + 160 + 0.024 * 65536 = 18332.864. */
    assert_int_equal(step("llama-70b-h100-tp4", 0, 0, 32, 65536), 18333);
    /* Both at once: 23700 + 138 * 100 + 0.0045 * 100 * 50 + 5 * 4 + 0.152 * 8000 = 38758.5. */
    assert_int_equal(step("llama-8b-l40s-tp1", 100, 5000, 4, 8000), 38759);
    /* The mixture of experts: about 8 ms for one, about 33 ms for sixteen. */
    assert_int_equal(step("glm47flash-l40s-tp2", 0, 0, 1, 0), 8010);
    assert_int_equal(step("glm47flash-l40s-tp2", 0, 0, 16, 0), 33165);
}

static void test_time_always_moves(void **state)
{
    assert_int_equal(step("instant", 8192, 1e9, 256, 1000000), 1);
    assert_int_equal(step("instant", 0, 0, 1, 1), 1);
}

static void test_time_stays_in_range(void **state)
{
    static const double much[] = {1e16, 1e300, INFINITY};
    for (size_t i = 0; i < sizeof much / sizeof *much; i++) {
        pl_timing t = {"much", much[i], 0, 0, 0, 0, 0};
        assert_int_equal(pl_timing_step_us(&t, &(pl_step_work){.decoding = 1}), 1000000000000000);
    }
}

static void test_names(void **state)
{
    assert_null(pl_timing_find(PL_STR("llama-8b")));
    assert_null(pl_timing_find(PL_STR("")));
    char names[512];
    snprintf(names, sizeof names, "%s", pl_timing_names());
    int found = 0;
    for (char *save, *name = strtok_r(names, ", ", &save); name;
         name = strtok_r(NULL, ", ", &save)) {
        const pl_timing *t = pl_timing_find(pl_str_c(name));
        assert_non_null(t);
        assert_string_equal(t->name, name);
        found++;
    }
    assert_int_equal(found, 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),
        cmocka_unit_test(test_time_always_moves),
        cmocka_unit_test(test_time_stays_in_range),
        cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
