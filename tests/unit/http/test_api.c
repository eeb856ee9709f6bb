/* Paths and error shapes. jansson reads what is written, so hostile text cannot break out. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <jansson.h>

#include "http/api.h"

static void knows_the_forwarded_paths(void **state)
{
    bool known;
    assert_int_equal(pl_api_of_path(PL_STR("/v1/chat/completions"), &known), PL_API_CHAT);
    assert_true(known);
    assert_int_equal(pl_api_of_path(PL_STR("/v1/detokenize"), &known), PL_API_DETOKENIZE);
    static const char *const others[] = {"/v1/chat/completions/", "/v1/chat",    "/", "",
                                         "/V1/chat/completions",  "/flush_cache"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        pl_api_of_path(pl_str_c(others[i]), &known);
        assert_false(known);
    }
    assert_non_null(pl_api_control_hint(PL_STR("/flush_cache")));
    assert_non_null(pl_api_control_hint(PL_STR("/update_weights_from_disk")));
    assert_non_null(pl_api_control_hint(PL_STR("/open_session")));
    assert_null(pl_api_control_hint(PL_STR("/nothing")));
}

static json_t *error_of(const char *path, int status, const char *message)
{
    pl_buf b = {0};
    assert_int_equal(pl_api_error(pl_str_c(path), status, "some_code", message, &b), 0);
    json_t *o = json_loadb(b.p, b.n, 0, NULL);
    assert_non_null(o);
    pl_buf_free(&b);
    return o;
}

static void errors_have_the_shape_of_their_api(void **state)
{
    const char *hostile = "a\"b\\c\n\x01\xff\xc3\xa9";
    json_t *o = error_of("/v1/chat/completions", 404, hostile);
    json_t *e = json_object_get(o, "error");
    assert_string_equal(json_string_value(json_object_get(e, "message")),
                        "a\"b\\c\n\x01\xef\xbf\xbd\xc3\xa9");
    assert_string_equal(json_string_value(json_object_get(e, "type")), "invalid_request_error");
    assert_string_equal(json_string_value(json_object_get(e, "code")), "some_code");
    assert_true(json_is_null(json_object_get(e, "param")));
    json_decref(o);
    o = error_of("/v1/messages", 529, "busy");
    assert_string_equal(json_string_value(json_object_get(o, "type")), "error");
    e = json_object_get(o, "error");
    assert_string_equal(json_string_value(json_object_get(e, "type")), "overloaded_error");
    json_decref(o);
    assert_int_equal(pl_api_overload_status(PL_STR("/v1/messages")), 529);
    assert_int_equal(pl_api_overload_status(PL_STR("/generate")), 503);
}

static void error_events_end_with_a_blank_line(void **state)
{
    pl_buf b = {0};
    assert_int_equal(pl_api_error_event(PL_STR("/v1/messages"), 502, NULL, "x", &b), 0);
    assert_true(pl_str_starts(pl_buf_str(&b), PL_STR("event: error\ndata: {")));
    assert_true(pl_str_ends(pl_buf_str(&b), PL_STR("}\n\n")));
    b.n = 0;
    assert_int_equal(pl_api_error_event(PL_STR("/v1/completions"), 502, NULL, "x", &b), 0);
    assert_true(pl_str_starts(pl_buf_str(&b), PL_STR("data: {\"error\"")));
    pl_buf_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(knows_the_forwarded_paths),
        cmocka_unit_test(errors_have_the_shape_of_their_api),
        cmocka_unit_test(error_events_end_with_a_blank_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
