/* Tokens: text there and back, prefixes that stay, answers that are found as history. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "engine/sim.h"
#include "engine/token.h"

static void round_trip(const char *text, int tokens)
{
    pl_tokens t = {0};
    pl_buf out = {0};
    assert_int_equal(pl_tokens_text(&t, pl_str_c(text)), 0);
    assert_int_equal(t.n, tokens);
    assert_int_equal(pl_tokens_to_text(t.v, t.n, &out), 0);
    assert_true(pl_str_eq(pl_buf_str(&out), pl_str_c(text)));
    pl_buf_free(&out);
    free(t.v);
}

static void test_round_trip(void **state)
{
    round_trip("", 0);
    round_trip("a", 1);
    round_trip("abcd", 1);
    round_trip("abcde", 2);
    round_trip("abc\xc3\xa9", 2);                       /* the last would be cut in two */
    round_trip("\xe2\x82\xac\xe2\x82\xac", 2);          /* 3 bytes each */
    round_trip("\xf0\x9f\x98\x80\xf0\x9f\x98\x80!", 3); /* 4 bytes each */
    round_trip("ab\xf0\x9f\x98\x80"
               "cd",
               3);
    round_trip("<|user|>", 2);
}

static void test_prefix(void **state)
{
    const char *text = "The quick brown fox \xc3\xa9\xc3\xa9\xc3\xa9 jumps over the lazy dog.";
    pl_tokens whole = {0};
    assert_int_equal(pl_tokens_text(&whole, pl_str_c(text)), 0);
    for (size_t n = 0; n <= strlen(text); n++) {
        pl_tokens part = {0};
        if (!pl_str_utf8((pl_str){text, n}, NULL))
            continue;
        assert_int_equal(pl_tokens_text(&part, (pl_str){text, n}), 0);
        if (part.n > 1)
            assert_memory_equal(part.v, whole.v, (size_t)(part.n - 1) * 4);
        free(part.v);
    }
    free(whole.v);
}

static void test_bad_bytes(void **state)
{
    uint32_t ids[] = {0xff, 0x80, 0x61, 0, 0xffffffff, 0x2ff};
    pl_buf out = {0};
    assert_int_equal(pl_tokens_to_text(ids, 6, &out), 0);
    assert_true(pl_str_utf8(pl_buf_str(&out), NULL));
    assert_true(pl_str_ends(pl_buf_str(&out), PL_STR("<|user|>")));
    pl_buf_free(&out);
}

/* What the engine produces is cut again into the very same tokens. */
static void test_output_is_stable(void **state)
{
    uint32_t ids[200];
    for (int i = 0; i < 200; i++)
        ids[i] = pl_sim_output_token(99, i);
    pl_buf text = {0};
    pl_tokens t = {0};
    assert_int_equal(pl_tokens_to_text(ids, 200, &text), 0);
    assert_int_equal(pl_tokens_text(&t, pl_buf_str(&text)), 0);
    assert_int_equal(t.n, 200);
    assert_memory_equal(t.v, ids, sizeof ids);
    assert_true(pl_sim_output_token(98, 0) != ids[0] || pl_sim_output_token(98, 1) != ids[1] ||
                pl_sim_output_token(98, 2) != ids[2]);
    pl_buf_free(&text);
    free(t.v);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_prefix),
        cmocka_unit_test(test_bad_bytes),
        cmocka_unit_test(test_output_is_stable),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
