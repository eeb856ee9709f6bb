/* What intake finds for a policy. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "http/request.h"

static void asking_again_takes_no_memory(void **state)
{
    pl_exchange x = {
        .body = PL_STR("{\"user\":\"\\u0061b\",\"x\":\"c\\n\",\"plain\":\"d\",\"n\":[1]}")};
    pl_scan scan;
    pl_request rq = {.x = &x, .scan = &scan};
    assert_int_equal(pl_scan_body(x.body, 8, &scan), 0);
    size_t used = 0;
    for (int i = 0; i < 1000; i++) {
        assert_true(pl_str_eq(pl_intake_find_member(&rq, PL_STR("user")), PL_STR("ab")));
        assert_true(pl_str_eq(pl_intake_find_member(&rq, PL_STR("x")), PL_STR("c\n")));
        assert_true(pl_str_eq(pl_intake_find_member(&rq, PL_STR("plain")), PL_STR("d")));
        assert_true(pl_str_eq(pl_intake_find_member(&rq, PL_STR("n")), PL_STR("[1]")));
        assert_null(pl_intake_find_member(&rq, PL_STR("none")).p);
        used = used ? used : x.arena.used_bytes;
    }
    assert_int_equal(x.arena.used_bytes, used);
    pl_arena_free(&x.arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(asking_again_takes_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
