/* Following a reply: what it adds to a history, and what it says about the session. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "session/history.h"

#define EVENTS(...) ((const char *const[]){__VA_ARGS__, NULL})

/* Each without a terminator behind it. */
static void feed(pl_reply *r, const char *json, bool whole)
{
    size_t n = strlen(json);
    char *exact = malloc(n ? n : 1);
    assert_non_null(exact);
    memcpy(exact, json, n);
    if (whole)
        pl_reply_answer(r, (pl_str){exact, n});
    else
        pl_reply_event(r, (pl_str){exact, n});
    free(exact);
}

static pl_reply *stream(enum pl_api_kind api, const char *const *events)
{
    pl_reply *r = pl_reply_new(api);
    assert_non_null(r);
    for (; *events; events++)
        feed(r, *events, false);
    return r;
}

static pl_reply *answer(enum pl_api_kind api, const char *json)
{
    pl_reply *r = pl_reply_new(api);
    assert_non_null(r);
    feed(r, json, true);
    return r;
}

/* Is what a chat's reply adds the message that the client sends back? Frees r. */
static bool is_message(pl_reply *r, const char *message)
{
    pl_chain got = {{0, 0}, 0}, want = got;
    pl_json j;
    pl_digest d;
    pl_json_init(&j, pl_str_c(message), PL_CANON_DEPTH, true);
    assert_true(pl_canon_message(&j, &d));
    pl_chain_add(&want, d);
    bool same =
        pl_reply_append(r, PL_HISTORY_MESSAGES, &got) && memcmp(&got, &want, sizeof got) == 0;
    pl_reply_free(r);
    return same;
}

static bool is_text(pl_reply *r, const char *text)
{
    pl_chain got = {{0, 0}, 0}, want = got;
    pl_chain_bytes(&want, pl_str_c(text));
    bool same = pl_reply_append(r, PL_HISTORY_TEXT, &got) && memcmp(&got, &want, sizeof got) == 0;
    pl_reply_free(r);
    return same;
}

static bool is_ids(pl_reply *r, const uint32_t *ids, int n)
{
    pl_chain got = {{0, 0}, 0}, want = got;
    for (int i = 0; i < n; i++)
        pl_chain_id(&want, ids[i]);
    bool same = pl_reply_append(r, PL_HISTORY_TOKENS, &got) && memcmp(&got, &want, sizeof got) == 0;
    pl_reply_free(r);
    return same;
}

#define DELTA(x) "{\"choices\":[{\"index\":0,\"delta\":{" x "},\"finish_reason\":null}]}"
#define END(x)   "{\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"" x "\"}]}"

static void test_chat_stream(void **state)
{
    assert_true(is_message(
        stream(PL_API_CHAT,
               EVENTS(DELTA("\"role\":\"assistant\",\"content\":\"\",\"reasoning_content\":null,"
                            "\"tool_calls\":null"),
                      DELTA("\"content\":\"Hel\""), DELTA("\"content\":\"lo \\ud83c\\udf19\""),
                      END("stop"), "{\"choices\":[],\"usage\":{}}", "[DONE]")),
        "{\"role\":\"assistant\",\"content\":\"Hello \\ud83c\\udf19\"}"));
    /* thinking is part of what the engine holds: resent without it, it is another message */
    const char *const *thinking =
        EVENTS(DELTA("\"role\":\"assistant\""), DELTA("\"reasoning_content\":\"hm\""),
               DELTA("\"content\":\"yes\""), END("stop"));
    assert_true(
        is_message(stream(PL_API_CHAT, thinking),
                   "{\"content\":\"yes\",\"reasoning_content\":\"hm\",\"role\":\"assistant\"}"));
    assert_false(
        is_message(stream(PL_API_CHAT, thinking), "{\"role\":\"assistant\",\"content\":\"yes\"}"));
    assert_true(is_message(stream(PL_API_CHAT, EVENTS(DELTA("\"refusal\":\"no\""), END("stop"))),
                           "{\"role\":\"assistant\",\"content\":null,\"refusal\":\"no\"}"));
    assert_true(is_message(stream(PL_API_CHAT, EVENTS(END("length"))),
                           "{\"role\":\"assistant\",\"content\":\"\"}"));
}

static void test_tool_calls(void **state)
{
    const char *const *events = EVENTS(
        DELTA("\"role\":\"assistant\",\"content\":null"),
        DELTA("\"tool_calls\":[{\"index\":0,\"id\":\"c1\",\"type\":\"function\",\"function\":"
              "{\"name\":\"f\",\"arguments\":\"\"}}]"),
        DELTA("\"tool_calls\":[{\"index\":0,\"id\":null,\"function\":{\"name\":null,"
              "\"arguments\":\"{\\\"a\\\":\"}}]"),
        DELTA("\"tool_calls\":[{\"index\":1,\"id\":\"c2\",\"type\":\"function\",\"function\":"
              "{\"name\":\"g\",\"arguments\":\"{}\"}},{\"index\":0,\"id\":\"\",\"function\":"
              "{\"arguments\":\"1}\"}}]"),
        END("tool_calls"));
    assert_true(is_message(
        stream(PL_API_CHAT, events),
        "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"c1\",\"type\":"
        "\"function\",\"function\":{\"name\":\"f\",\"arguments\":\"{\\\"a\\\":1}\"}},{\"index\":1,"
        "\"function\":{\"arguments\":\"{}\",\"name\":\"g\"},\"id\":\"c2\"}]}"));
    /* other arguments, the other order, one call less */
    assert_false(is_message(
        stream(PL_API_CHAT, events),
        "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"c1\",\"function\":"
        "{\"name\":\"f\",\"arguments\":\"{\\\"a\\\": 1}\"}},{\"id\":\"c2\",\"function\":"
        "{\"name\":\"g\",\"arguments\":\"{}\"}}]}"));
    assert_false(is_message(
        stream(PL_API_CHAT, events),
        "{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"c2\",\"function\":{\"name\":\"g\","
        "\"arguments\":\"{}\"}},{\"id\":\"c1\",\"function\":{\"name\":\"f\",\"arguments\":"
        "\"{\\\"a\\\":1}\"}}]}"));
    assert_false(is_message(
        stream(PL_API_CHAT, events),
        "{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"c1\",\"function\":{\"name\":\"f\","
        "\"arguments\":\"{\\\"a\\\":1}\"}}]}"));
}

static bool complete(pl_reply *r)
{
    bool yes = pl_reply_judge(r, 100, 50).complete;
    pl_chain c = {{0, 0}, 0};
    yes = yes && pl_reply_append(r, PL_HISTORY_MESSAGES, &c);
    pl_reply_free(r);
    return yes;
}

static void test_chat_not_whole(void **state)
{
    static const char *const bad[] = {
        "{\"choices\":[{\"index\":1,\"delta\":{\"content\":\"x\"}}]}",
        "{\"choices\":[{\"index\":0,\"delta\":{}},{\"index\":1,\"delta\":{}}]}",
        "{\"choices\":[{\"index\":0,\"delta\":{\"content\":7}}]}",
        "{\"choices\":[{\"index\":0,\"delta\":{\"role\":\"user\"}}]}",
        "{\"choices\":[{\"index\":0,\"delta\":{\"audio\":{\"id\":\"a\"}}}]}",
        "{\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"id\":\"a\"}]}}]}",
        "{\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":64,\"id\":\"a\"}]}}]}",
        "{\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":-1,\"id\":\"a\"}]}}]}",
        "{\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":1,\"id\":\"a\"}]}}]}",
        "{\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0,\"type\":\"custom\"}]}}"
        "]}",
        "{\"choices\":[{\"index\":0,\"finish_reason\":\"content_filter\"}]}",
        "{\"choices\":[{\"index\":0,\"matched_stop\":\"END\"}]}",
        "{\"error\":{\"message\":\"out of memory\"}}",
        "{\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x",
        "{} x",
        "[]",
        "garbage",
    };
    assert_true(complete(stream(PL_API_CHAT, EVENTS(DELTA("\"content\":\"a\""), END("stop")))));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (complete(stream(PL_API_CHAT, EVENTS(DELTA("\"content\":\"a\""), bad[i], END("stop")))))
            fail_msg("complete with %s", bad[i]);
    assert_false(complete(stream(PL_API_CHAT, EVENTS(DELTA("\"content\":\"a\""), "[DONE]"))));
    /* an end token closes a message as its template does */
    assert_true(complete(
        stream(PL_API_CHAT, EVENTS(DELTA("\"content\":\"a\""),
                                   "{\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":"
                                   "\"stop\",\"matched_stop\":128009}]}"))));
}

static void test_chat_answer(void **state)
{
    static const char one[] =
        "{\"id\":\"x\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":"
        "\"hi\",\"tool_calls\":null,\"refusal\":null},\"finish_reason\":\"stop\"}],\"usage\":{}}";
    assert_true(is_message(answer(PL_API_CHAT, one),
                           "{\"role\":\"assistant\",\"content\":[{\"type\":\"text\",\"text\":"
                           "\"hi\"}]}"));
    assert_false(is_message(answer(PL_API_CHAT, one), "{\"role\":\"user\",\"content\":\"hi\"}"));
    assert_false(complete(answer(PL_API_CHAT,
                                 "{\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\"},"
                                 "\"finish_reason\":\"stop\"},{\"index\":1}]}")));
    assert_false(complete(answer(PL_API_CHAT, "{\"choices\":[]}")));
    assert_false(complete(answer(PL_API_CHAT, "")));
    /* of other APIs nothing is followed */
    assert_false(complete(answer(PL_API_MESSAGES, one)));
}

static void test_completions(void **state)
{
    assert_true(is_text(
        stream(PL_API_COMPLETIONS,
               EVENTS("{\"choices\":[{\"index\":0,\"text\":\"ab\",\"finish_reason\":null}]}",
                      "{\"choices\":[{\"index\":0,\"text\":\"\\u00e9\",\"finish_reason\":"
                      "\"length\"}]}",
                      "[DONE]")),
        "ab\xc3\xa9"));
    assert_true(is_text(answer(PL_API_COMPLETIONS, "{\"choices\":[{\"index\":0,\"text\":\"ab\","
                                                   "\"finish_reason\":\"length\"}]}"),
                        "ab"));
    /* the engine holds an end token, or a stop text, behind it */
    assert_false(
        is_text(answer(PL_API_COMPLETIONS, "{\"choices\":[{\"index\":0,\"text\":\"ab\",\"finish_"
                                           "reason\":\"stop\",\"matched_stop\":2}]}"),
                "ab"));
    assert_false(
        is_text(answer(PL_API_COMPLETIONS, "{\"choices\":[{\"index\":0,\"text\":\"ab\",\"finish_"
                                           "reason\":\"stop\",\"stop_reason\":\"\\n\"}]}"),
                "ab"));
}

#define PART(text, ids, n)                                                                         \
    "{\"text\":\"" text "\",\"output_ids\":[" ids "],\"meta_info\":{\"completion_tokens\":" #n     \
    ",\"finish_reason\":null}}"
#define LAST(text, ids, n, matched)                                                                \
    "{\"text\":\"" text "\",\"output_ids\":[" ids "],\"meta_info\":{\"completion_tokens\":" #n     \
    ",\"finish_reason\":{\"type\":\"stop\"" matched "}}}"

static void test_generate(void **state)
{
    static const uint32_t ids[] = {5, 6, 7};
    const char *const *cumulative = EVENTS(PART("", "", 0), PART("a", "5", 1), PART("ab", "5,6", 2),
                                           LAST("abc", "5,6,7", 3, ""), "[DONE]");
    assert_true(is_text(stream(PL_API_GENERATE, cumulative), "abc"));
    assert_true(is_ids(stream(PL_API_GENERATE, cumulative), ids, 3));
    /* increments (an option of the engine) are not a whole reply */
    const char *const *increments =
        EVENTS(PART("a", "5", 1), PART("b", "6", 2), LAST("c", "7", 3, ""));
    assert_false(is_text(stream(PL_API_GENERATE, increments), "c"));
    assert_false(is_ids(stream(PL_API_GENERATE, increments), ids + 2, 1));
    /* ... even when they look alike */
    const char *const *alike = EVENTS(PART("a", "5", 1), PART("a", "5", 2), LAST("a", "5", 3, ""));
    assert_false(is_text(stream(PL_API_GENERATE, alike), "a"));
    /* ids show the end token, the text does not */
    static const char *ended = LAST("ab", "5,6,7", 3, ",\"matched\":7");
    assert_true(is_ids(answer(PL_API_GENERATE, ended), ids, 3));
    assert_false(is_text(answer(PL_API_GENERATE, ended), "ab"));
    assert_true(is_text(answer(PL_API_GENERATE,
                               "{\"text\":\"ab\",\"meta_info\":{\"finish_reason\":{\"type\":"
                               "\"length\",\"length\":2}}}"),
                        "ab"));
    assert_true(is_ids(answer(PL_API_GENERATE, "{\"output_ids\":[5,6,7],\"meta_info\":{\"finish_"
                                               "reason\":\"length\"}}"),
                       ids, 3));
    assert_false(is_text(stream(PL_API_GENERATE, EVENTS(PART("a", "5", 1))), "a"));
    assert_false(is_text(answer(PL_API_GENERATE, "[" LAST("a", "5", 1, "") "]"), "a"));
    assert_false(is_text(
        stream(PL_API_GENERATE, EVENTS(LAST("a", "5", 1, ""), LAST("a", "5", 1, ""))), "a"));
}

/* SGLang's refusals, in each place where they come. */
static void test_signs(void **state)
{
    static const struct {
        enum pl_api_kind api;
        const char *json;
        bool poisoned, aborted;
    } cases[] = {
        {PL_API_GENERATE,
         "{\"text\":\"\",\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"message\":"
         "\"Streaming session already has an active request.\"}}}",
         true, true},
        {PL_API_GENERATE,
         "{\"text\":\"\",\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"message\":"
         "\"Invalid request: session id s~1 does not exist\"}}}",
         true, true},
        {PL_API_GENERATE,
         "{\"text\":\"a\",\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"message\":"
         "\"Aborted\"}}}",
         false, true},
        {PL_API_GENERATE,
         "{\"text\":\"a\",\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"message\":"
         "\"Streaming sessions do not support replace.\"}}}",
         false, true},
        {PL_API_CHAT, "{\"error\":{\"message\":\"Invalid request session id\",\"code\":400}}", true,
         false},
        {PL_API_CHAT,
         "{\"object\":\"error\",\"message\":\"Session request is appending to a request that "
         "hasn't finished.\",\"code\":400}",
         true, false},
        {PL_API_MESSAGES,
         "{\"type\":\"error\",\"error\":{\"message\":\"Streaming session already has an active "
         "request.\"}}",
         true, false},
        {PL_API_CHAT,
         "{\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"\"},"
         "\"finish_reason\":\"abort\"}]}",
         false, true},
        /* what a model says is no sign */
        {PL_API_CHAT,
         "{\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"it already "
         "has an active request\"},\"finish_reason\":\"stop\"}]}",
         false, false},
        {PL_API_GENERATE,
         "{\"text\":\"Invalid request session id\",\"meta_info\":{\"finish_reason\":{\"type\":"
         "\"stop\"}}}",
         false, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int whole = 0; whole < 2; whole++) {
            pl_reply *r = whole ? answer(cases[i].api, cases[i].json)
                                : stream(cases[i].api, EVENTS(cases[i].json));
            pl_reply_state s = pl_reply_judge(r, 100, 50);
            if (s.poisoned != cases[i].poisoned || s.aborted != cases[i].aborted ||
                (s.complete && (s.poisoned || s.aborted)))
                fail_msg("poisoned %d, aborted %d, complete %d: %s", s.poisoned, s.aborted,
                         s.complete, cases[i].json);
            pl_reply_free(r);
        }
}

static void test_usage_of_one_token(void **state)
{
    pl_reply *r = stream(PL_API_CHAT, EVENTS(DELTA("\"content\":\"a\""), END("stop")));
    assert_true(pl_reply_judge(r, 1, 30).poisoned);
    assert_false(pl_reply_judge(r, 1, 30).complete);
    assert_false(pl_reply_judge(r, 1, 1).poisoned);
    assert_false(pl_reply_judge(r, -1, 30).poisoned);
    assert_false(pl_reply_judge(r, 30, 30).poisoned);
    assert_true(pl_reply_judge(r, -1, 30).complete);
    pl_reply_free(r);
    /* a refusal for what the request says has one token, too: the session is as it was */
    r = answer(PL_API_GENERATE,
               "{\"text\":\"\",\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"message\":"
               "\"Streaming sessions do not support replace.\"},\"prompt_tokens\":1}}");
    assert_false(pl_reply_judge(r, 1, 30).poisoned);
    pl_reply_free(r);
    pl_reply_free(NULL);
}

/* Long texts in many pieces, escaped and not, are what they are in one. */
static void test_long(void **state)
{
    enum { PIECES = 500 };
    static char message[PIECES * 160];
    char *p = message + sprintf(message, "{\"role\":\"assistant\",\"content\":\"");
    pl_reply *r = pl_reply_new(PL_API_CHAT);
    assert_non_null(r);
    for (int i = 0; i < PIECES; i++) {
        char event[1024], text[160];
        sprintf(text, i % 2 ? "\\n%d \\ud83c\\udf19\\u6f6e %0*d" : "\\t%d %0*d", i, i % 100, i);
        sprintf(event, DELTA("\"content\":\"%s\""), text);
        feed(r, event, false);
        p += sprintf(p, "%s", text);
    }
    strcpy(p, "\"}");
    feed(r, END("stop"), false);
    assert_true(is_message(r, message));
}

static void test_chain(void **state)
{
    static const char text[] = "the tide comes in, the tide goes out, and the moon looks on";
    for (size_t cut = 0; cut < sizeof text; cut++) {
        pl_digest d = {0x123456789abcdefu, 42};
        pl_chain whole, parts, tail = {{0, 0}, 0};
        pl_chain_begin(&whole, d);
        pl_chain_bytes(&whole, PL_STR(text));
        pl_chain_begin(&parts, d);
        pl_chain_bytes(&parts, (pl_str){text, cut});
        pl_chain_bytes(&tail, (pl_str){text + cut, sizeof text - 1 - cut});
        pl_chain_join(&parts, &tail);
        assert_memory_equal(&parts, &whole, sizeof whole);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chat_stream),    cmocka_unit_test(test_tool_calls),
        cmocka_unit_test(test_chat_not_whole), cmocka_unit_test(test_chat_answer),
        cmocka_unit_test(test_completions),    cmocka_unit_test(test_generate),
        cmocka_unit_test(test_signs),          cmocka_unit_test(test_usage_of_one_token),
        cmocka_unit_test(test_long),           cmocka_unit_test(test_chain),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
