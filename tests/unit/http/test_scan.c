/* What the scanner says of a body's members, their values and its prompt. (The grammar itself is in
 * test_json.c.) */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/err.h"
#include "http/json.h"
#include "http/scan.h"
#include "../failing_alloc.h"

static pl_scan scanned(pl_str body)
{
    pl_scan s;
    assert_int_equal(pl_scan_body(body, 64, &s), 0);
    return s;
}

static void assert_str(pl_str got, const char *wanted)
{
    if (!pl_str_eq(got, pl_str_c(wanted))) {
        print_error("got \"%.*s\", wanted \"%s\"\n", PL_FMT(got), wanted);
        fail();
    }
}

static void test_members(void **state)
{
    pl_str body =
        PL_STR(" {\"model\" : \"m\\n1\", \"stream\":true,\"n\":null,\n\"messages\": [ {}, [1,2], "
               "\"x\" ],\"x\":[1],\"stream_options\":{\"a\":[1,2]},\"input_ids\":[] ,"
               "\"priority\":-1.5e1} ");
    pl_scan s = scanned(body);
    assert_int_equal(s.members_n, 8);
    assert_int_equal(s.open_at, 1);
    assert_int_equal(s.close_at, body.n - 2);

    const pl_member *m = &s.members[PL_MEMBER_MODEL];
    assert_int_equal(m->type, PL_JSON_STRING);
    assert_int_equal(m->key_at, 2);
    assert_str(m->raw, "\"m\\n1\"");
    assert_true(m->escaped);
    m = &s.members[PL_MEMBER_STREAM];
    assert_int_equal(m->type, PL_JSON_TRUE);
    assert_false(m->escaped);
    assert_str(m->raw, "true");
    assert_int_equal(s.members[PL_MEMBER_N].type, PL_JSON_NULL);
    m = &s.members[PL_MEMBER_MESSAGES];
    assert_int_equal(m->type, PL_JSON_ARRAY);
    assert_int_equal(m->elements, 3);
    assert_str(m->raw, "[ {}, [1,2], \"x\" ]");
    m = &s.members[PL_MEMBER_STREAM_OPTIONS];
    assert_int_equal(m->type, PL_JSON_OBJECT);
    assert_int_equal(m->elements, 0);
    assert_int_equal(s.members[PL_MEMBER_INPUT_IDS].elements, 0);
    assert_int_equal(s.members[PL_MEMBER_PRIORITY].type, PL_JSON_NUMBER);
    assert_int_equal(s.members[PL_MEMBER_USER].type, PL_JSON_ABSENT);
}

static void test_names_are_compared_unescaped(void **state)
{
    pl_scan s = scanned(PL_STR("{\"mo\\u0064el\":\"a\",\"Stream\":1,\"modelx\":2,\"mode\":3}"));
    assert_str(s.members[PL_MEMBER_MODEL].raw, "\"a\"");
    assert_int_equal(s.members[PL_MEMBER_STREAM].type, PL_JSON_ABSENT);

    pl_scan d;
    assert_int_equal(pl_scan_body(PL_STR("{\"model\":1, \"x\":2,\"mod\\u0065l\":3}"), 8, &d),
                     PL_ESYNTAX);
    assert_int_equal(d.error_at, 18);
    assert_non_null(strstr(d.error, "only once"));
    assert_int_equal(pl_scan_body(PL_STR("{\"model\":null,\"model\":3}"), 8, &d), PL_ESYNTAX);
    assert_int_equal(d.error_at, 14);
    /* the first fault counts, and a member of that name elsewhere is none */
    scanned(PL_STR("{\"model\":1,\"x\":{\"model\":2},\"messages\":[{\"model\":3,\"model\":4}]}"));
}

static void test_every_name_of_the_map(void **state)
{
    for (int id = 0; id < PL_MEMBER_COUNT; id++) {
        char body[128];
        int n =
            snprintf(body, sizeof body, "{\"x\":0,\"%.*s\":%d}", PL_FMT(pl_member_names[id]), id);
        pl_scan s = scanned((pl_str){body, (size_t)n});
        for (int other = 0; other < PL_MEMBER_COUNT; other++)
            assert_int_equal(s.members[other].type, other == id ? PL_JSON_NUMBER : PL_JSON_ABSENT);
    }
}

static void test_strings(void **state)
{
    static const struct {
        const char *body, *wanted;
    } cases[] = {
        {"{\"model\":\"plain\"}", "plain"},
        {"{\"model\":\"\"}", ""},
        {"{\"model\":\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"}", "\"\\/\b\f\n\r\t"},
        {"{\"model\":\"\\u0041\\u00e9\\u6F6e\"}", "Aé潮"},
        {"{\"model\":\"\\ud83c\\udf19!\"}", "🌙!"},
        {"{\"model\":\"\\ud83c\"}", "\xef\xbf\xbd"},
        {"{\"model\":\"\\ud83cx\\udf19\"}", "\xef\xbf\xbdx\xef\xbf\xbd"},
        {"{\"model\":\"\\ud83c\\ud83c\\udf19\"}", "\xef\xbf\xbd🌙"},
        {"{\"model\":\"\\ud83c\\u0041\"}", "\xef\xbf\xbd"
                                           "A"},
        {"{\"model\":\"é\\n潮\"}", "é\n潮"},
    };
    pl_arena a = PL_ARENA_INIT;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        pl_scan s = scanned(pl_str_c(cases[i].body));
        pl_str v = pl_member_string(&a, &s.members[PL_MEMBER_MODEL]);
        assert_non_null(v.p);
        assert_str(v, cases[i].wanted);
    }
    pl_scan s = scanned(PL_STR("{\"model\":7,\"user\":\"\\u0000z\"}"));
    assert_null(pl_member_string(&a, &s.members[PL_MEMBER_MODEL]).p);
    assert_null(pl_member_string(&a, &s.members[PL_MEMBER_N]).p);
    pl_str zero = pl_member_string(&a, &s.members[PL_MEMBER_USER]);
    assert_true(pl_str_eq(zero, PL_STR("\0z")));
    pl_arena_free(&a);
}

static void test_numbers(void **state)
{
    pl_scan s = scanned(PL_STR("{\"n\":3,\"priority\":-2.5e1,\"max_tokens\":null,\"model\":\"3\","
                               "\"rid\":1e999,\"user\":true}"));
    double v = 0;
    assert_int_equal(pl_member_number(&s.members[PL_MEMBER_N], &v), 0);
    assert_true(v == 3);
    assert_int_equal(pl_member_number(&s.members[PL_MEMBER_PRIORITY], &v), 0);
    assert_true(v == -25);
    assert_int_equal(pl_member_number(&s.members[PL_MEMBER_MAX_TOKENS], &v), PL_ENOTFOUND);
    assert_int_equal(pl_member_number(&s.members[PL_MEMBER_PROMPT], &v), PL_ENOTFOUND);
    assert_int_equal(pl_member_number(&s.members[PL_MEMBER_MODEL], &v), PL_EINVALID);
    assert_int_equal(pl_member_number(&s.members[PL_MEMBER_RID], &v), PL_EINVALID);
    assert_int_equal(pl_member_number(&s.members[PL_MEMBER_USER], &v), PL_EINVALID);
    assert_true(v == -25);
}

static void test_find(void **state)
{
    pl_str body = PL_STR("{\"x\":{\"y\":1},\"model\":\"m\",\"t\\u00e9\":2,\"x\":3,"
                         "\"nvext\":{\"a\":{\"b\":0}, \"b\": [7] ,\"b\":8}}");
    pl_scan s = scanned(body);
    assert_str(pl_scan_find(body, &s, PL_STR("x")).raw, "3"); /* as for the engine: the last one */
    assert_str(pl_scan_find(body, &s, PL_STR("model")).raw, "\"m\"");
    assert_str(pl_scan_find(body, &s, PL_STR("té")).raw, "2");
    assert_int_equal(pl_scan_find(body, &s, PL_STR("y")).type, PL_JSON_ABSENT);
    assert_int_equal(pl_scan_find(body, &s, PL_STR("user")).type, PL_JSON_ABSENT);
    assert_int_equal(pl_scan_find(body, &s, PL_STR("")).type, PL_JSON_ABSENT);

    pl_str nvext = s.members[PL_MEMBER_NVEXT].raw;
    pl_member b = pl_object_find(nvext, PL_STR("b"));
    assert_str(b.raw, "8");
    assert_memory_equal(nvext.p + b.key_at, "\"b\":8", 5);
    assert_str(pl_object_find(PL_STR("{\"b\":[7] ,\"b\":tr"), PL_STR("b")).raw, "[7]");
    assert_int_equal(pl_object_find(PL_STR("[1]"), PL_STR("b")).type, PL_JSON_ABSENT);
    assert_int_equal(pl_object_find(PL_STR("{\"b\":tr"), PL_STR("b")).type, PL_JSON_ABSENT);
    assert_int_equal(pl_object_find((pl_str){NULL, 0}, PL_STR("b")).type, PL_JSON_ABSENT);
}

static double prompt_tokens(const char *body)
{
    pl_scan s = scanned(pl_str_c(body));
    return pl_scan_prompt_tokens(&s);
}

static void test_prompt_tokens(void **state)
{
    assert_true(prompt_tokens("{}") == 1);
    assert_true(prompt_tokens("{\"model\":\"a long name of a model does not count\"}") == 1);
    assert_true(prompt_tokens("{\"input_ids\":[1, 2,3]}") == 3);
    assert_true(prompt_tokens("{\"prompt\":[ 1,2,3,4]}") == 4);
    assert_true(prompt_tokens("{\"prompt\":[[1,2,3],[],[4,5]]}") == 5);
    assert_true(prompt_tokens("{\"prompt\":\"01234567890123456789012345678901234567\"}") == 10);
    assert_true(prompt_tokens("{\"input\":[\"sixteen bytes..\",\"sixteen bytes..\"]}") == 37 / 4.0);
    assert_true(prompt_tokens("{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],"
                              "\"system\":\"0123456789\",\"tools\":null}") == 32 / 4.0 + 3);
    assert_true(
        prompt_tokens("{\"query\":\"012345\",\"documents\":[\"01234567\"],\"text\":\"\"}") ==
        8 / 4.0 + 12 / 4.0 + 2 / 4.0);
    assert_true(prompt_tokens("{\"prompt\":[],\"input_ids\":[[]]}") <= 1.5);
}

/* An image is not as many tokens as its base64 has characters. */
static void test_attachments(void **state)
{
    pl_buf b = {0};
    assert_int_equal(pl_buf_addf(&b, "{\"messages\":[{\"content\":[{\"image_url\":{\"url\":"
                                     "\"data:image/png;base64,"),
                     0);
    for (int i = 0; i < 10000; i++)
        assert_int_equal(pl_buf_addf(&b, "iVBORw0KGgo"), 0);
    assert_int_equal(pl_buf_addf(&b, "\"}},{\"url\":\"data:,short\"}]}]}"), 0);
    pl_scan s = scanned(pl_buf_str(&b));
    const pl_member *m = &s.members[PL_MEMBER_MESSAGES];
    assert_int_equal(m->attachments, 1);
    assert_int_equal(m->attachment_bytes, 2 + 22 + 10000 * 11);
    double tokens = pl_scan_prompt_tokens(&s);
    assert_true(tokens > PL_ATTACHMENT_TOKENS && tokens < PL_ATTACHMENT_TOKENS + 40);
    pl_buf_free(&b);
}

static void test_out_of_memory(void **state)
{
    pl_scan s = scanned(PL_STR("{\"model\":\"a\\n\",\"user\":\"u\"}"));
    pl_arena a = PL_ARENA_INIT;
    failing_alloc_after(0);
    assert_null(pl_member_string(&a, &s.members[PL_MEMBER_MODEL]).p);
    assert_str(pl_member_string(&a, &s.members[PL_MEMBER_USER]), "u"); /* needs none */
    failing_alloc_after(-1);
    assert_str(pl_member_string(&a, &s.members[PL_MEMBER_MODEL]), "a\n");
    pl_arena_free(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_members),
        cmocka_unit_test(test_names_are_compared_unescaped),
        cmocka_unit_test(test_every_name_of_the_map),
        cmocka_unit_test(test_strings),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_find),
        cmocka_unit_test(test_prompt_tokens),
        cmocka_unit_test(test_attachments),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
