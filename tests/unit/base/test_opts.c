/* Flags and the nearest word. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/nearest.h"
#include "base/opts.h"

enum { LISTEN, JSON, HELP };
static const pl_opt flags[] = {
    [LISTEN] = {"listen", "HOST:PORT", "where (here)"},
    [JSON] = {"json", NULL, "as JSON"},
    [HELP] = {"help", NULL, "this"},
    {NULL, NULL, NULL},
};

static pl_opts over(char **argv)
{
    int argc = 0;
    while (argv[argc])
        argc++;
    return (pl_opts){.table = flags, .argv = argv, .argc = argc};
}

static void test_forms(void **state)
{
    char *argv[] = {"--listen", "a", "--json", "file",   "--listen=b=c",
                    "-h",       "-", "--",     "--json", NULL};
    pl_opts o = over(argv);
    assert_int_equal(pl_opts_next(&o), LISTEN);
    assert_string_equal(o.value, "a");
    assert_int_equal(pl_opts_next(&o), JSON);
    assert_null(o.value);
    assert_int_equal(pl_opts_next(&o), PL_OPT_POSITIONAL);
    assert_string_equal(o.value, "file");
    assert_int_equal(pl_opts_next(&o), LISTEN);
    assert_string_equal(o.value, "b=c");
    assert_int_equal(pl_opts_next(&o), HELP);
    assert_int_equal(pl_opts_next(&o), PL_OPT_POSITIONAL);
    assert_string_equal(o.value, "-");
    assert_int_equal(pl_opts_next(&o), PL_OPT_POSITIONAL);
    assert_string_equal(o.value, "--json");
    assert_int_equal(pl_opts_next(&o), PL_OPT_END);
    assert_int_equal(pl_opts_next(&o), PL_OPT_END);
}

static void bad(char *arg, const char *message)
{
    char *argv[] = {arg, NULL};
    pl_opts o = over(argv);
    assert_int_equal(pl_opts_next(&o), PL_OPT_BAD);
    assert_string_equal(o.error.text, message);
}

static void test_mistakes(void **state)
{
    bad("--lisen", "unknown flag --lisen, did you mean --listen?");
    bad("--jsno=1", "unknown flag --jsno, did you mean --json?");
    bad("--xyzzy", "unknown flag --xyzzy (--help lists them all)");
    bad("-j", "unknown flag -j (flags are long: --name; --help lists them all)");
    bad("--json=1", "--json takes no value");
    bad("--listen", "--listen needs a value: --listen HOST:PORT");
}

static void test_help_lists_every_flag(void **state)
{
    char *text = NULL;
    size_t n;
    FILE *f = open_memstream(&text, &n);
    pl_opts_print(flags, f);
    fclose(f);
    assert_string_equal(text, "  --listen HOST:PORT        where (here)\n"
                              "  --json                    as JSON\n"
                              "  --help                    this\n");
    free(text);
}

static void test_distance(void **state)
{
    assert_int_equal(pl_edit_distance(PL_STR("url"), PL_STR("url")), 0);
    assert_int_equal(pl_edit_distance(PL_STR("ulr"), PL_STR("url")), 1);
    assert_int_equal(pl_edit_distance(PL_STR(""), PL_STR("abc")), 3);
    assert_int_equal(pl_edit_distance(PL_STR("kitten"), PL_STR("sitting")), 3);
    char big[200];
    memset(big, 'a', sizeof big);
    pl_nearest g = {{big, sizeof big}, {NULL, 0}, 0};
    pl_nearest_try(&g, PL_STR("a"));
    assert_null(g.best.p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forms),
        cmocka_unit_test(test_mistakes),
        cmocka_unit_test(test_help_lists_every_flag),
        cmocka_unit_test(test_distance),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
