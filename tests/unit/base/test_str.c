/* (ptr,len) strings: parsing at the edges, bytes that C strings would end at, UTF-8. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>

#include "base/err.h"
#include "base/str.h"

static void compares(void **state)
{
    (void)state;
    const pl_str none = {NULL, 0};
    assert_true(pl_str_eq(none, PL_STR("")));
    assert_false(pl_str_eq(PL_STR("a"), PL_STR("b")));
    assert_true(pl_str_ieq(PL_STR("Content-TYPE"), PL_STR("content-type")));
    assert_false(pl_str_ieq(PL_STR("[x"), PL_STR("{x"))); /* 32 apart, but not letters */
    assert_true(pl_str_starts(PL_STR("http://x"), PL_STR("http://")));
    assert_false(pl_str_starts(PL_STR("http"), PL_STR("http://")));
    assert_true(pl_str_starts(none, none));
    assert_true(pl_str_ends(none, none));
    assert_true(pl_str_ends(PL_STR("a.lua"), PL_STR(".lua")));
    assert_false(pl_str_ends(PL_STR("lua"), PL_STR(".lua")));
    assert_true(pl_str_eq_secret(PL_STR("k3y"), PL_STR("k3y")));
    assert_false(pl_str_eq_secret(PL_STR("k3y"), PL_STR("k3z")));
    assert_false(pl_str_eq_secret(PL_STR("k3y"), PL_STR("k3")));
    assert_true(pl_str_eq_secret(none, none));
}

static void trims_spaces_and_tabs_only(void **state)
{
    (void)state;
    assert_true(pl_str_eq(pl_str_trim(PL_STR(" \t a b \t")), PL_STR("a b")));
    assert_true(pl_str_eq(pl_str_trim(PL_STR("\ra\n")), PL_STR("\ra\n")));
    assert_int_equal(pl_str_trim(PL_STR(" \t ")).n, 0);
}

static void parses_unsigned(void **state)
{
    (void)state;
    uint64_t v = 7;
    assert_int_equal(pl_str_u64(PL_STR("0"), 10, &v), 0);
    assert_int_equal(v, 0);
    assert_int_equal(pl_str_u64(PL_STR("18446744073709551615"), UINT64_MAX, &v), 0);
    assert_true(v == UINT64_MAX);
    assert_int_equal(pl_str_u64(PL_STR("18446744073709551616"), UINT64_MAX, &v), PL_ELIMIT);
    assert_int_equal(pl_str_u64(PL_STR("11"), 10, &v), PL_ELIMIT);
    assert_int_equal(pl_str_u64(PL_STR("99999999999999999999999x"), 10, &v), PL_ESYNTAX);
    static const char *const bad[] = {"", "+1", "-1", " 1", "1 ", "0x1", "1.0", "1e3"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(pl_str_u64(pl_str_c(bad[i]), 1000, &v), PL_ESYNTAX);
    assert_int_equal(pl_str_u64((pl_str){"1\0", 2}, 1000, &v), PL_ESYNTAX);
    assert_true(v == UINT64_MAX); /* a failure leaves it alone */
}

static void parses_doubles(void **state)
{
    (void)state;
    double d = 5;
    assert_int_equal(pl_str_double(PL_STR("-1.5e3"), &d), 0);
    assert_true(d == -1500);
    assert_int_equal(pl_str_double((pl_str){"0.25xyz", 4}, &d), 0);
    assert_true(d == 0.25);
    static const char *const bad[] = {"",     ".",     "-",   "e",  "1e", "nan",  "inf",
                                      "0x10", "1e999", "1,5", " 1", "1 ", "1.2.3"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(pl_str_double(pl_str_c(bad[i]), &d), PL_ESYNTAX);
    assert_true(d == 0.25);
}

/* was taken for a number: strchr finds the terminator of its first argument */
static void a_double_with_a_nul_behind_it_is_none(void **state)
{
    (void)state;
    double d;
    assert_int_equal(pl_str_double((pl_str){"1\0", 2}, &d), PL_ESYNTAX);
    assert_int_equal(pl_str_double((pl_str){"1\0junk", 6}, &d), PL_ESYNTAX);
}

static void cuts_at_separators(void **state)
{
    (void)state;
    pl_str rest = PL_STR("a,,bc"), head;
    static const char *const want[] = {"a", "", "bc"};
    for (int i = 0; i < 3; i++) {
        assert_true(pl_str_cut(&rest, ',', &head));
        assert_true(pl_str_eq(head, pl_str_c(want[i])));
    }
    assert_false(pl_str_cut(&rest, ',', &head));
    rest = PL_STR("a,");
    assert_true(pl_str_cut(&rest, ',', &head) && pl_str_cut(&rest, ',', &head));
    assert_int_equal(head.n, 0);
    assert_false(pl_str_cut(&rest, ',', &head));
}

static void duplicates_with_a_nul(void **state)
{
    (void)state;
    char *p = pl_str_dup((pl_str){"abc", 2});
    assert_string_equal(p, "ab");
    free(p);
    p = pl_str_dup((pl_str){NULL, 0});
    assert_string_equal(p, "");
    free(p);
}

/* Every code point is accepted exactly when it is a scalar value; what an encoder would make of a
 * surrogate or of a value beyond is refused at its first byte. */
static void utf8_all_code_points(void **state)
{
    (void)state;
    for (uint32_t c = 0; c < 0x120000; c++) {
        char b[4];
        size_t n = 0, bad = 99;
        if (c < 0x80) {
            b[n++] = (char)c;
        } else if (c < 0x800) {
            b[n++] = (char)(0xc0 | c >> 6);
        } else if (c < 0x10000) {
            b[n++] = (char)(0xe0 | c >> 12);
            b[n++] = (char)(0x80 | (c >> 6 & 0x3f));
        } else {
            b[n++] = (char)(0xf0 | c >> 18);
            b[n++] = (char)(0x80 | (c >> 12 & 0x3f));
            b[n++] = (char)(0x80 | (c >> 6 & 0x3f));
        }
        if (c >= 0x80)
            b[n++] = (char)(0x80 | (c & 0x3f));
        bool scalar = c < 0xd800 || (c > 0xdfff && c < 0x110000);
        if (pl_str_utf8((pl_str){b, n}, &bad) != scalar)
            fail_msg("U+%04X", c);
        if (!scalar)
            assert_int_equal(bad, 0);
        for (size_t cut = 1; cut < n; cut++) /* a torn sequence is none */
            assert_false(pl_str_utf8((pl_str){b, cut}, NULL));
    }
}

static void utf8_names_the_first_bad_byte(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        size_t bad;
    } cases[] = {{"ab\xff", 2},           {"\xc0\xaf", 0},     {"x\xe0\x80\x80", 1},
                 {"\xf0\x80\x80\x80", 0}, {"\xc3\xa9\x80", 2}, {"\xf5\x80\x80\x80", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t bad = 99;
        assert_false(pl_str_utf8(pl_str_c(cases[i].text), &bad));
        assert_int_equal(bad, cases[i].bad);
    }
    assert_true(pl_str_utf8((pl_str){NULL, 0}, NULL));
}

static void clips_between_characters(void **state)
{
    (void)state;
    pl_str s = PL_STR("a\xc3\xa9\xe2\x82\xac\xf0\x9f\x8c\x99"); /* 1, 2, 3 and 4 bytes */
    static const size_t whole[] = {0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10, 10};
    for (size_t most = 0; most < sizeof whole / sizeof *whole; most++) {
        assert_int_equal(pl_str_clip(s, most).n, whole[most]);
        assert_true(pl_str_utf8(pl_str_clip(s, most), NULL));
    }
    assert_int_equal(pl_str_clip((pl_str){NULL, 0}, 0).n, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(compares),
        cmocka_unit_test(trims_spaces_and_tabs_only),
        cmocka_unit_test(parses_unsigned),
        cmocka_unit_test(parses_doubles),
        cmocka_unit_test(a_double_with_a_nul_behind_it_is_none),
        cmocka_unit_test(cuts_at_separators),
        cmocka_unit_test(duplicates_with_a_nul),
        cmocka_unit_test(utf8_all_code_points),
        cmocka_unit_test(utf8_names_the_first_bad_byte),
        cmocka_unit_test(clips_between_characters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
