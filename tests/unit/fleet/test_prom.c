/* The reader of the Prometheus text format: what engines send, and what nobody should. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/rng.h"
#include "fleet/prom.h"

static bool first(const char *text, pl_prom_line *line)
{
    pl_str rest = pl_str_c(text);
    return pl_prom_next(&rest, line);
}

/* -12345: malformed */
static double value_of(const char *text)
{
    pl_prom_line line;
    double v;
    return first(text, &line) && pl_prom_value(&line, &v) ? v : -12345;
}

static void label_is(const char *text, const char *name, const char *expected)
{
    pl_prom_line line;
    char out[PL_PROM_LABEL_MAX];
    size_t n = 0;
    assert_true(first(text, &line));
    bool there = pl_prom_label(&line, pl_str_c(name), out, &n);
    assert_int_equal(there, expected != NULL);
    if (expected) {
        assert_int_equal(n, strlen(expected));
        assert_memory_equal(out, expected, n);
    }
}

static void samples_are_found_among_comments(void **state)
{
    pl_str page = PL_STR("# HELP a_b Text with { and \"\n# TYPE a_b gauge\n\n  a_b 1\r\n"
                         "{no_name=\"x\"} 3\n9digit 4\nc:d{x=\"1\"} 2.5 1700000000000\n-\nlast 7");
    static const struct {
        const char *name;
        double value;
    } expected[] = {{"a_b", 1}, {"c:d", 2.5}, {"last", 7}};
    pl_prom_line line;
    double v;
    for (size_t i = 0; i < 3; i++) {
        assert_true(pl_prom_next(&page, &line));
        assert_true(pl_str_eq(line.name, pl_str_c(expected[i].name)));
        assert_true(pl_prom_value(&line, &v));
        assert_true(v == expected[i].value);
    }
    assert_false(pl_prom_next(&page, &line));
    assert_int_equal(page.n, 0);
}

static void values(void **state)
{
    assert_true(value_of("m 0") == 0);
    assert_true(value_of("m\t-1.5e+03  ") == -1500);
    assert_true(value_of("m{} 4") == 4);
    assert_true(value_of("m { a = \"b\" , } 5") == 5);
    assert_true(value_of("m{a=\"b\"}6") == 6);
    assert_true(isnan(value_of("m NaN")));
    assert_true(value_of("m +Inf") == INFINITY);
    assert_true(value_of("m -inf") == -INFINITY);
    static const char *const bad[] = {"m",
                                      "m ",
                                      "m{} ",
                                      "m x",
                                      "m 0x10",
                                      "m 1e999",
                                      "m 1,5",
                                      "m{a=\"b\" 6",
                                      "m{a=b} 6",
                                      "m{a} 6",
                                      "m{=\"b\"} 6",
                                      "m{a=\"b} 6",
                                      "m{a=\"b\\",
                                      "m{a=\"b\\\"} 6",
                                      "m{a=\"b\"c=\"d\"} 6",
                                      "m{",
                                      "m}1",
                                      "m=1"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (value_of(bad[i]) != -12345)
            fail_msg("'%s' has a value", bad[i]);
}

static void labels(void **state)
{
    const char *line = "m{model_name=\"a}b,engine=\\\"7\\\"\\\\\\n\",engine=\"3\",e=\"\"} 1";
    label_is(line, "engine", "3");
    label_is(line, "model_name", "a}b,engine=\"7\"\\\n");
    label_is(line, "e", "");
    label_is(line, "model", NULL);
    label_is("m 1", "engine", NULL);
    label_is("m{engine=\"3\"", "engine", NULL); /* never closed */
    label_is("m{engine=3} 1", "engine", NULL);

    char text[200], as[PL_PROM_LABEL_MAX + 2];
    memset(as, 'a', sizeof as);
    as[PL_PROM_LABEL_MAX] = 0;
    snprintf(text, sizeof text, "m{a=\"%s\"} 1", as);
    label_is(text, "a", as);
    as[PL_PROM_LABEL_MAX] = 'a';
    as[PL_PROM_LABEL_MAX + 1] = 0;
    snprintf(text, sizeof text, "m{a=\"%s\"} 1", as);
    label_is(text, "a", NULL);
}

static void whole_labels(void **state)
{
    static const struct {
        const char *text;
        int64_t value;
    } cases[] = {{"m{r=\"12\"} 1", 12},  {"m{r=\"100\"} 1", 100},
                 {"m{r=\"101\"} 1", -1}, {"m{r=\"-1\"} 1", -1},
                 {"m{r=\"1.0\"} 1", -1}, {"m{r=\"None\"} 1", -1},
                 {"m{r=\"\"} 1", -1},    {"m{r=\"99999999999999999999999\"} 1", -1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pl_prom_line line;
        assert_true(first(cases[i].text, &line));
        assert_int_equal(pl_prom_label_whole(&line, PL_STR("r"), 100), cases[i].value);
    }
}

/* Pieces of the grammar in any order, in memory that ends with the text: no read beyond it, and the
 * end is always reached. */
static void any_bytes(void **state)
{
    static const char *const pieces[] = {"m", "{",  "}",  "\"",     "\\",    "=",
                                         ",", " ",  "\n", "engine", "\"3\"", "1",
                                         "#", "\r", "e5", "-",      "+Inf",  "NaN"};
    pl_rng rng = {20240607};
    for (int k = 0; k < 20000; k++) {
        char text[128];
        size_t n = 0;
        for (uint32_t left = pl_rng_below(&rng, 16); left; left--) {
            const char *p = pieces[pl_rng_below(&rng, sizeof pieces / sizeof *pieces)];
            memcpy(text + n, p, strlen(p));
            n += strlen(p);
        }
        char *exact = malloc(n ? n : 1);
        assert_non_null(exact);
        memcpy(exact, text, n);
        pl_str rest = {exact, n};
        pl_prom_line line;
        size_t lines = 0, before = n;
        while (pl_prom_next(&rest, &line)) {
            char out[PL_PROM_LABEL_MAX];
            size_t out_n;
            double v;
            lines++;
            assert_true(line.name.n > 0 && line.tail.p + line.tail.n <= exact + n);
            assert_true(rest.n < before);
            before = rest.n;
            pl_prom_value(&line, &v);
            pl_prom_label(&line, PL_STR("engine"), out, &out_n);
        }
        assert_true(rest.n == 0 && lines <= n);
        free(exact);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(samples_are_found_among_comments),
        cmocka_unit_test(values),
        cmocka_unit_test(labels),
        cmocka_unit_test(whole_labels),
        cmocka_unit_test(any_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
