/* Usage as each API and engine writes it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "http/sse.h"

static pl_usage used(const char *json, bool found)
{
    pl_usage u = PL_USAGE_INIT;
    size_t n = strlen(json);
    char *exact = malloc(n ? n : 1); /* no terminator: a read beyond shows */
    assert_non_null(exact);
    memcpy(exact, json, n);
    bool got = pl_usage_read((pl_str){exact, n}, &u);
    free(exact);
    if (got != found)
        fail_msg("found is %d for %s", got, json);
    return u;
}

static void check(const char *json, double prompt, double cached, double output)
{
    pl_usage u = used(json, true);
    if (u.prompt_tokens != prompt || u.cached_tokens != cached || u.output_tokens != output)
        fail_msg("got %g, %g, %g for %s", u.prompt_tokens, u.cached_tokens, u.output_tokens, json);
}

static void test_openai(void **state)
{
    check(
        "{\"id\":\"c\",\"choices\":[{\"message\":{\"content\":\"hi\"}}],\"usage\":{\"prompt_"
        "tokens\":12,"
        "\"total_tokens\":15,\"completion_tokens\":3,\"prompt_tokens_details\":{\"audio_tokens\":0,"
        "\"cached_tokens\":8},\"completion_tokens_details\":{\"reasoning_tokens\":1}}}",
        12, 8, 3);
    check(
        "{\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":0,\"prompt_tokens_details\":null}}",
        12, -1, 0);
    check(" { \"usage\" : { \"prompt_tokens\" : 5 } } ", 5, -1, -1); /* embeddings */
}

static void test_responses(void **state)
{
    check("{\"object\":\"response\",\"usage\":{\"input_tokens\":7,\"input_tokens_details\":{"
          "\"cached_tokens\":4},\"output_tokens\":2,\"total_tokens\":9}}",
          7, 4, 2);
    check("{\"type\":\"response.completed\",\"response\":{\"id\":\"r\",\"output\":[],\"usage\":{"
          "\"input_tokens\":7,\"output_tokens\":2}}}",
          7, -1, 2);
}

static void test_anthropic(void **state)
{
    check(
        "{\"type\":\"message_start\",\"message\":{\"id\":\"m\",\"usage\":{\"input_tokens\":25,"
        "\"cache_creation_input_tokens\":10,\"cache_read_input_tokens\":100,\"output_tokens\":1}}}",
        135, 100, 1);
    check("{\"type\":\"message\",\"usage\":{\"input_tokens\":25,\"cache_read_input_tokens\":null,"
          "\"output_tokens\":9}}",
          25, -1, 9);
    /* the last event says only what is new */
    pl_usage u = {135, 100, 1};
    assert_true(pl_usage_read(PL_STR("{\"type\":\"message_delta\",\"delta\":{\"stop_reason\":"
                                     "\"end_turn\"},\"usage\":{\"output_tokens\":15}}"),
                              &u));
    assert_true(u.prompt_tokens == 135 && u.cached_tokens == 100 && u.output_tokens == 15);
}

static void test_sglang(void **state)
{
    check("{\"text\":\"hi\",\"meta_info\":{\"id\":\"1\",\"finish_reason\":{\"type\":\"stop\"},"
          "\"prompt_tokens\":6,\"completion_tokens\":2,\"cached_tokens\":4}}",
          6, 4, 2);
    check("[{\"meta_info\":{\"prompt_tokens\":6,\"completion_tokens\":2,\"cached_tokens\":4}},"
          "{\"meta_info\":{\"prompt_tokens\":1,\"completion_tokens\":1}},{\"text\":\"_tokens\"}]",
          7, 4, 3);
}

static void test_none(void **state)
{
    static const char *const none[] = {
        "",
        "[DONE]",
        "{}",
        "null",
        "{\"usage\":null,\"x\":\"_tokens\"}",
        "{\"usage\":{\"prompt_tokens\":null}}",
        "{\"usage\":{\"prompt_tokens\":\"12\"}}",
        "{\"usage\":{\"prompt_tokens\":-1}}",
        "{\"usage\":[{\"prompt_tokens\":1}]}",
        /* a model that talks of usage */
        "{\"choices\":[{\"delta\":{\"content\":\"\\\"usage\\\":{\\\"prompt_tokens\\\":1}\"}}]}",
        "{\"choices\":[{\"usage\":{\"prompt_tokens\":1}}]}",
        "{\"a\":tru,\"usage\":{\"prompt_tokens\":1}}",
        "[1,2,\"_tokens\"]",
        "{\"usage\":{\"prompt_tokens\":1e300,\"cached_tokens\":1e18,\"completion_tokens\":1e13}}",
        "_tokens",
        "0123456789abcde_tokens",
    };
    for (size_t i = 0; i < sizeof none / sizeof none[0]; i++) {
        pl_usage u = used(none[i], false);
        assert_true(u.prompt_tokens == -1 && u.cached_tokens == -1 && u.output_tokens == -1);
    }
}

static bool only(const char *json)
{
    return pl_usage_only_chunk(pl_str_c(json));
}

static void test_usage_only_chunk(void **state)
{
    assert_true(only("{\"id\":\"c\",\"choices\":[],\"usage\":{\"prompt_tokens\":1}}"));
    assert_true(only("{\"usage\":{},\"choices\":[ ]}"));
    assert_false(only("{\"choices\":[],\"usage\":null}"));
    assert_false(only("{\"choices\":[]}"));
    assert_false(only("{\"usage\":{}}"));
    assert_false(only("{\"choices\":[{\"index\":0}],\"usage\":{}}"));
    assert_false(only("{\"choices\":{},\"usage\":{}}"));
    assert_false(only("{\"choices\":[],\"usage\":{}"));
    assert_false(only("[DONE]"));
    assert_false(only(""));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_openai),    cmocka_unit_test(test_responses),
        cmocka_unit_test(test_anthropic), cmocka_unit_test(test_sglang),
        cmocka_unit_test(test_none),      cmocka_unit_test(test_usage_only_chunk),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
