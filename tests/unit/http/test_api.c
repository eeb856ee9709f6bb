/* Which paths are forwarded, and what clients read when something is refused. jansson parses what
 * is written. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <jansson.h>

#include "base/err.h"
#include "http/api.h"
#include "../failing_alloc.h"

static void test_paths(void **state)
{
    static const struct {
        const char *path;
        enum pl_api_kind kind;
    } known[] = {
        {"/v1/chat/completions", PL_API_CHAT},
        {"/v1/completions", PL_API_COMPLETIONS},
        {"/v1/responses", PL_API_RESPONSES},
        {"/v1/messages", PL_API_MESSAGES},
        {"/v1/embeddings", PL_API_EMBEDDINGS},
        {"/v1/rerank", PL_API_RERANK},
        {"/rerank", PL_API_RERANK},
        {"/v1/score", PL_API_SCORE},
        {"/v1/classify", PL_API_CLASSIFY},
        {"/generate", PL_API_GENERATE},
        {"/tokenize", PL_API_TOKENIZE},
        {"/detokenize", PL_API_DETOKENIZE},
        {"/v1/tokenize", PL_API_TOKENIZE},
        {"/v1/detokenize", PL_API_DETOKENIZE},
    };
    bool is_known;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        assert_int_equal(pl_api_of_path(pl_str_c(known[i].path), &is_known), known[i].kind);
        assert_true(is_known);
        assert_null(pl_api_control_hint(pl_str_c(known[i].path)));
    }
    static const char *const others[] = {"",
                                         "/",
                                         "/v1/chat/completions/",
                                         "/v1/chat/Completions",
                                         "/v1/chat",
                                         "/score",
                                         "/classify",
                                         "/v2/rerank",
                                         "/flush_cache",
                                         "//generate"};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        assert_int_equal(pl_api_of_path(pl_str_c(others[i]), &is_known), PL_API_OTHER);
        assert_false(is_known);
    }
}

static void test_control_paths(void **state)
{
    static const char *const control[] = {"/flush_cache",
                                          "/reset_prefix_cache",
                                          "/pause_generation",
                                          "/continue_generation",
                                          "/load_lora_adapter",
                                          "/unload_lora_adapter",
                                          "/v1/load_lora_adapter",
                                          "/v1/unload_lora_adapter",
                                          "/sleep",
                                          "/wake_up",
                                          "/abort_request",
                                          "/update_weights_from_disk",
                                          "/update_weights",
                                          "/server_info",
                                          "/get_load",
                                          "/v1/loads"};
    for (size_t i = 0; i < sizeof control / sizeof control[0]; i++) {
        const char *hint = pl_api_control_hint(pl_str_c(control[i]));
        assert_non_null(hint);
        assert_non_null(strstr(hint, "not forwarded"));
        assert_non_null(strstr(hint, "call the engine directly"));
    }
    bool known = false;
    assert_int_equal(pl_api_of_path(PL_STR("/open_session"), &known), PL_API_OPEN_SESSION);
    assert_true(known);
    assert_int_equal(pl_api_of_path(PL_STR("/close_session"), &known), PL_API_CLOSE_SESSION);
    assert_true(known);
    assert_null(pl_api_control_hint(PL_STR("/flush_cache/")));
    assert_null(pl_api_control_hint(PL_STR("/unheard_of")));
    assert_null(pl_api_control_hint(PL_STR("")));
}

static json_t *error_of(const char *path, int status, const char *code, const char *message)
{
    pl_buf b = {0};
    assert_int_equal(pl_api_error(pl_str_c(path), status, code, message, &b), 0);
    json_t *root = json_loadb(b.p, b.n, 0, NULL);
    if (!root)
        fail_msg("not JSON: %.*s", PL_FMT(b));
    pl_buf_free(&b);
    return root;
}

static const char *text(json_t *root, const char *member)
{
    return json_string_value(json_object_get(json_object_get(root, "error"), member));
}

static void test_openai_errors(void **state)
{
    json_t *root = error_of("/v1/chat/completions", 404, "model_not_found", "no \"x\"\n here");
    assert_string_equal(text(root, "message"), "no \"x\"\n here");
    assert_string_equal(text(root, "type"), "invalid_request_error");
    assert_string_equal(text(root, "code"), "model_not_found");
    json_t *error = json_object_get(root, "error");
    assert_true(json_is_null(json_object_get(error, "param")));
    assert_int_equal(json_object_size(error), 4);
    assert_int_equal(json_object_size(root), 1);
    json_decref(root);

    static const struct {
        int status;
        const char *type;
    } types[] = {{400, "invalid_request_error"}, {401, "invalid_request_error"},
                 {413, "invalid_request_error"}, {429, "rate_limit_error"},
                 {500, "server_error"},          {502, "server_error"},
                 {503, "server_error"}};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        root = error_of("/generate", types[i].status, NULL, "m");
        assert_string_equal(text(root, "type"), types[i].type);
        assert_true(json_is_null(json_object_get(json_object_get(root, "error"), "code")));
        json_decref(root);
    }
}

static void test_anthropic_errors(void **state)
{
    static const struct {
        int status;
        const char *type;
    } types[] = {{400, "invalid_request_error"},
                 {401, "authentication_error"},
                 {403, "permission_error"},
                 {404, "not_found_error"},
                 {405, "invalid_request_error"},
                 {413, "request_too_large"},
                 {429, "rate_limit_error"},
                 {500, "api_error"},
                 {502, "api_error"},
                 {504, "timeout_error"},
                 {529, "overloaded_error"}};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        json_t *root = error_of("/v1/messages", types[i].status, "ignored", "message");
        assert_string_equal(json_string_value(json_object_get(root, "type")), "error");
        assert_string_equal(text(root, "type"), types[i].type);
        assert_string_equal(text(root, "message"), "message");
        assert_int_equal(json_object_size(json_object_get(root, "error")), 2);
        json_decref(root);
    }
    json_t *root = error_of("/v1/messages/count_tokens", 404, NULL, "m");
    assert_non_null(json_object_get(root, "type"));
    json_decref(root);
    root = error_of("/v1/messagesx", 404, NULL, "m");
    assert_null(json_object_get(root, "type"));
    json_decref(root);
    assert_int_equal(pl_api_overload_status(PL_STR("/v1/messages")), 529);
    assert_int_equal(pl_api_overload_status(PL_STR("/v1/chat/completions")), 503);
}

static void event_is(const char *path, const char *wanted)
{
    pl_buf b = {0};
    assert_int_equal(pl_buf_addf(&b, "before "), 0);
    assert_int_equal(pl_api_error_event(pl_str_c(path), 502, NULL, "the engine\nis gone", &b), 0);
    if (!pl_str_eq(pl_buf_str(&b), pl_str_c(wanted)))
        fail_msg("got %.*s", PL_FMT(b));
    pl_buf_free(&b);
}

static void test_error_events(void **state)
{
    event_is(
        "/v1/completions",
        "before data: {\"error\":{\"message\":\"the engine\\nis gone\",\"type\":\"server_error\","
        "\"param\":null,\"code\":null}}\n\n");
    event_is("/v1/messages",
             "before event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\","
             "\"message\":\"the engine\\nis gone\"}}\n\n");
}

static void quoted_as(pl_str s, const char *wanted)
{
    pl_buf b = {0};
    assert_int_equal(pl_json_quote(&b, s), 0);
    if (!pl_str_eq(pl_buf_str(&b), pl_str_c(wanted)))
        fail_msg("got %.*s, wanted %s", PL_FMT(b), wanted);
    pl_buf_free(&b);
}

static void test_quoting(void **state)
{
    quoted_as((pl_str){NULL, 0}, "\"\"");
    quoted_as(PL_STR("plain"), "\"plain\"");
    quoted_as(PL_STR("\"\\/\n\r\t"), "\"\\\"\\\\/\\n\\r\\t\"");
    quoted_as(PL_STR("\b\x01\x1f\0\x7f"), "\"\\u0008\\u0001\\u001f\\u0000\x7f\"");
    quoted_as(PL_STR("é潮🌙"), "\"é潮🌙\"");
    quoted_as(PL_STR("\xff"), "\"\xef\xbf\xbd\"");
    quoted_as(PL_STR("a\xc3\n\xe6\xbd"), "\"a\xef\xbf\xbd\\n\xef\xbf\xbd\xef\xbf\xbd\"");
}

static void test_quoting_into_an_arena(void **state)
{
    pl_arena a = PL_ARENA_INIT;
    pl_str s = pl_json_quoted(&a, PL_STR("a\"b"));
    assert_true(pl_str_eq(s, PL_STR("\"a\\\"b\"")));
    pl_arena_free(&a);
    for (long n = 0; n < 2; n++) { /* the buffer's, the arena's */
        failing_alloc_after(n);
        s = pl_json_quoted(&a, PL_STR("x"));
        failing_alloc_after(-1);
        assert_null(s.p);
        pl_arena_free(&a);
    }
}

static void test_out_of_memory(void **state)
{
    static const char *const paths[] = {"/v1/messages", "/generate"};
    static char message[600];
    memset(message, '"', sizeof message - 1);
    for (int p = 0; p < 2; p++) {
        int rc = PL_ENOMEM, failures = 0;
        for (long n = 0; rc; n++) {
            pl_buf b = {0};
            assert_int_equal(pl_buf_add(&b, "kept", 4), 0);
            failing_alloc_after(n);
            rc = pl_api_error_event(pl_str_c(paths[p]), 500, "code", message, &b);
            failing_alloc_after(-1);
            if (rc) {
                assert_int_equal(rc, PL_ENOMEM);
                assert_true(pl_str_eq(pl_buf_str(&b), PL_STR("kept")));
                failures++;
            }
            pl_buf_free(&b);
        }
        assert_true(failures >= 2);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_paths),
        cmocka_unit_test(test_control_paths),
        cmocka_unit_test(test_openai_errors),
        cmocka_unit_test(test_anthropic_errors),
        cmocka_unit_test(test_error_events),
        cmocka_unit_test(test_quoting),
        cmocka_unit_test(test_quoting_into_an_arena),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
