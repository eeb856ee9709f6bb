/* Configuration files: what they may say, and what their errors say. */
#include "policy_test.h"

#include "policy/lua_config.h"

static json_t *good(const char *text)
{
    pl_errbuf eb;
    json_t *out;
    if (pl_lua_config(put_file("conf.lua", text), &out, &eb) < 0)
        fail_msg("%s", eb.text);
    return out;
}

static void bad(const char *text, const char *part)
{
    pl_errbuf eb;
    json_t *out;
    const char *path = put_file("conf.lua", text);
    if (pl_lua_config(path, &out, &eb) == 0)
        fail_msg("was accepted: %s", text);
    assert_null(out);
    if (!strstr(eb.text, part) || !strstr(eb.text, path))
        fail_msg("wanted '%s', got '%s'", part, eb.text);
}

static void test_values(void **state)
{
    setenv("PL_TEST_SECRET", "moonlight", 1);
    json_t *j =
        good("local port = 8000\n"
             "return { listen = '127.0.0.1:' .. port, threads = 2, ratio = 0.5, on = true,\n"
             "  engines = { { url = 'http://a' }, { url = 'http://b' } }, limits = {},\n"
             "  token = env('PL_TEST_SECRET'), other = env('PL_TEST_UNSET', 'none'),\n"
             "  none = env('PL_TEST_UNSET', nil) }");
    assert_string_equal(json_string_value(json_object_get(j, "listen")), "127.0.0.1:8000");
    assert_true(json_is_integer(json_object_get(j, "threads")));
    assert_true(json_real_value(json_object_get(j, "ratio")) == 0.5);
    assert_true(json_is_true(json_object_get(j, "on")));
    assert_int_equal(json_array_size(json_object_get(j, "engines")), 2);
    assert_true(json_is_object(json_object_get(j, "limits")));
    assert_string_equal(json_string_value(json_object_get(j, "token")), "moonlight");
    assert_string_equal(json_string_value(json_object_get(j, "other")), "none");
    assert_null(json_object_get(j, "none"));
    json_decref(j);
}

static void test_errors(void **state)
{
    bad("return {\n x = = 1 }", "conf.lua:2: unexpected symbol");
    bad("\nreturn { a = b }", "conf.lua:2: unknown global 'b'");
    bad("\nlisten = 'x'", "conf.lua:2: write to global 'listen'");
    bad("engines = {}", "return { engines = ... }");
    bad("\nlocal x = os.getenv('HOME')", "conf.lua:2: unknown global 'os'");
    bad("local x = io", "unknown global 'io'");
    bad("local pl = require 'perilune'", "a policy is given by --policy FILE");
    unsetenv("PL_TEST_UNSET");
    bad("\nreturn { token = env('PL_TEST_UNSET') }",
        "conf.lua:2: the environment variable PL_TEST_UNSET is not set");
    bad("return 7", "returns a table");
    bad("local x = 1", "returns a table");
    bad("\nwhile true do end", "conf.lua:2: stopped: it ran too long");
    bad("local t = {} for i = 1, 1e9 do t[i] = {} end", "not enough memory");
    bad("return { engines = { { url = 'a' }, { url = error } } }",
        "engines[2].url: plain data only, not a function");
    bad("return { a = { b = 0/0 } }", "a.b: a number that is not finite");
    bad("local t = {} t.t = t return t", "t: a table that contains itself");
    bad("\x1bLJ\x02", "bytecode");
    bad("error({})", "an error");
}

static void test_long_path_is_named_in_full(void **state)
{
    char sub[200], name[280];
    memset(sub, 'd', 100);
    sub[100] = 0;
    snprintf(name, sizeof name, "mkdir %s/%s", test_dir, sub);
    assert_int_equal(system(name), 0);
    snprintf(name, sizeof name, "%s/c.lua", sub);
    pl_errbuf eb;
    json_t *out;
    const char *path = put_file(name, "return nope");
    assert_int_equal(pl_lua_config(path, &out, &eb), PL_EPOLICY);
    assert_true(strncmp(eb.text, path, strlen(path)) == 0);
    assert_non_null(strstr(eb.text, ":1: unknown global"));
}

static void test_missing_file(void **state)
{
    pl_errbuf eb;
    json_t *out;
    assert_int_equal(pl_lua_config("/no/such/conf.lua", &out, &eb), PL_ENOTFOUND);
    assert_non_null(strstr(eb.text, "/no/such/conf.lua"));
    assert_int_equal(pl_lua_config("/tmp", &out, &eb), PL_EIO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_long_path_is_named_in_full),
        cmocka_unit_test(test_missing_file),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
