/* Proving that a request begins with what an engine's session holds, and trimming it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "planned.h"

static void expect_edited(const request *q, const char *want)
{
    expect(q, PL_PLAN_TRIM, NULL);
    json_t *got = edited(q), *w = json_loads(want, 0, NULL);
    assert_non_null(w);
    if (!json_equal(got, w)) {
        char *text = json_dumps(got, 0);
        fail_msg("got %s, not %s", text, want);
    }
    json_decref(got);
    json_decref(w);
}

/* The engine answered with this; h moves on. */
static void answer(pl_history *h, request *q, enum pl_api_kind api, const char *json)
{
    pl_reply *r = pl_reply_new(api);
    assert_non_null(r);
    pl_reply_answer(r, pl_str_c(json));
    pl_history_advance(h, &q->plan, r);
    pl_reply_free(r);
    request_free(q);
}

#define CHAT_REPLY(text)                                                                           \
    "{\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"" text           \
    "\"},\"finish_reason\":\"stop\"}]}"

static void test_chat(void **state)
{
    pl_history h = {0};
    request q;
    plan(&q, &h, PL_API_CHAT, 0,
         "{\"model\":\"m\",\"messages\":[{\"role\":\"system\",\"content\":\"s\"},{\"role\":"
         "\"user\",\"content\":\"a\"}],\"temperature\":1}");
    expect(&q, PL_PLAN_WHOLE, NULL);
    answer(&h, &q, PL_API_CHAT, CHAT_REPLY("b"));
    assert_int_equal(h.form, PL_HISTORY_MESSAGES);
    assert_int_equal(h.units, 3);

    plan(&q, &h, PL_API_CHAT, 0,
         "{\"messages\": [ {\"content\":[{\"text\":\"s\",\"type\":\"text\"}],\"role\":\"system\"} "
         ", {\"role\":\"user\",\"content\":\"\\u0061\"},{\"role\":\"assistant\",\"content\":\"b\","
         "\"tool_calls\":null} , {\"role\":\"user\",\"content\":\"c\"} ],\"model\":\"m\","
         "\"temperature\":0.5,\"stream\":true,\"nvext\":{}}");
    expect_edited(&q, "{\"messages\":[{\"role\":\"user\",\"content\":\"c\"}],\"model\":\"m\","
                      "\"temperature\":0.5,\"stream\":true,\"nvext\":{}}");
    answer(&h, &q, PL_API_CHAT, CHAT_REPLY("d"));
    assert_int_equal(h.units, 5);
}

/* After one turn: what is OUTSIDE, and why. */
static void test_chat_outside(void **state)
{
#define TURN1  "{\"role\":\"user\",\"content\":\"a\"}"
#define REPLY1 ",{\"role\":\"assistant\",\"content\":\"b\"}"
#define NEW    ",{\"role\":\"user\",\"content\":\"c\"}"
    static const struct {
        const char *body, *why; /* why NULL: it is trimmed */
    } cases[] = {
        {"{\"model\":\"m\",\"messages\":[" TURN1 REPLY1 NEW "]}", NULL},
        {"{\"model\":\"m\",\"messages\":[" TURN1 REPLY1 "]}", "nothing in it is new"},
        {"{\"model\":\"m\",\"messages\":[" TURN1 "]}", "shorter than"},
        {"{\"model\":\"m\",\"messages\":[]}", "shorter than"},
        {"{\"model\":\"m\",\"messages\":[" TURN1 NEW REPLY1 "]}", "beginning"},
        {"{\"model\":\"m\",\"messages\":[" TURN1 ",{\"role\":\"assistant\",\"content\":\"b \"}" NEW
         "]}",
         "beginning"},
        {"{\"model\":\"m\",\"messages\":[" TURN1 ",{\"role\":\"assistant\",\"content\":\"b\","
         "\"reasoning_content\":\"hm\"}" NEW "]}",
         "beginning"},
        {"{\"model\":\"m\",\"messages\":[" TURN1 ",{\"role\":\"assistant\",\"content\":\"b\","
         "\"x\":1}" NEW "]}",
         "beginning"},
        {"{\"model\":\"m2\",\"messages\":[" TURN1 REPLY1 NEW "]}", "beginning"},
        {"{\"model\":\"m\",\"chat_template_kwargs\":{\"a\":1},\"messages\":[" TURN1 REPLY1 NEW "]}",
         "settings"},
        {"{\"model\":\"m\",\"system\":\"s\",\"messages\":[" TURN1 REPLY1 NEW "]}", "beginning"},
        {"{\"model\":\"m\",\"tools\":[{\"type\":\"function\"}],\"messages\":[" TURN1 REPLY1 NEW
         "]}",
         "tools"},
        {"{\"model\":\"m\",\"n\":2,\"messages\":[" TURN1 REPLY1 NEW "]}", "more than one choice"},
        {"{\"model\":\"m\",\"continue_final_message\":true,\"messages\":[" TURN1 REPLY1 NEW "]}",
         "changes what the engine holds"},
        {"{\"model\":\"m\",\"add_generation_prompt\":false,\"messages\":[" TURN1 REPLY1 NEW "]}",
         "add_generation_prompt"},
        {"{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"a\",\"content\":"
         "\"a\"}" REPLY1 NEW "]}",
         "twice"},
        {"{\"model\":\"m\",\"x\":1,\"x\":2,\"messages\":[" TURN1 REPLY1 NEW "]}", "twice"},
        {"{\"model\":\"m\",\"messages\":[7" REPLY1 NEW "]}", "cannot be compared"},
        {"{\"model\":\"m\",\"messages\":\"x\"}", "a batch, or is not there"},
        {"{\"model\":\"m\",\"n\":1,\"echo\":false,\"tools\":[],\"messages\":[" TURN1 REPLY1 NEW
         "]}",
         "settings"}, /* an empty list was not there before: to be careful */
        {"{\"model\":\"m\",\"user\":\"u\",\"seed\":5,\"tools\":null,\"messages\":[" TURN1 REPLY1 NEW
         "]}",
         NULL},
    };
    pl_history h = {0};
    request q;
    plan(&q, &h, PL_API_CHAT, 0, "{\"model\":\"m\",\"messages\":[" TURN1 "]}");
    answer(&h, &q, PL_API_CHAT, CHAT_REPLY("b"));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        plan(&q, &h, PL_API_CHAT, 0, cases[i].body);
        expect(&q, cases[i].why ? PL_PLAN_OUTSIDE : PL_PLAN_TRIM, cases[i].why);
        request_free(&q);
    }
    plan(&q, &h, PL_API_COMPLETIONS, 0, "{\"model\":\"m\",\"prompt\":\"a\"}");
    expect(&q, PL_PLAN_OUTSIDE, "another API");
    request_free(&q);
    plan(&q, &h, PL_API_MESSAGES, 0, "{\"model\":\"m\",\"messages\":[" TURN1 REPLY1 NEW "]}");
    expect(&q, PL_PLAN_OUTSIDE, "not followed");
    /* a turn outside leaves the history as it was */
    pl_history before = h;
    answer(&h, &q, PL_API_MESSAGES, "{}");
    assert_memory_equal(&h, &before, sizeof h);
}

static void test_first_turn_not_understood(void **state)
{
    static const char *const bodies[] = {
        "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"n\":2}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"tools\":[1]}",
        "{\"messages\":[1]}",
        "{\"input\":\"x\"}",
    };
    pl_history h = {0};
    request q;
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
        plan(&q, &h, PL_API_CHAT, 0, bodies[i]);
        expect(&q, PL_PLAN_OUTSIDE, NULL);
        request_free(&q);
        plan(&q, &h, PL_API_CHAT, PL_HISTORY_DELTA, bodies[i]);
        expect(&q, PL_PLAN_WHOLE, NULL);
        assert_int_equal(q.plan.next.form, PL_HISTORY_LOST);
        request_free(&q);
    }
    plan(&q, &h, PL_API_RESPONSES, 0, "{\"input\":\"x\"}");
    expect(&q, PL_PLAN_OUTSIDE, "not followed");
    request_free(&q);
}

static void test_tools(void **state)
{
#define TOOLS "\"system\":\"be\",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]"
    pl_history h = {0};
    request q;
    plan(&q, &h, PL_API_CHAT, PL_HISTORY_CUT_TOOLS, "{\"messages\":[" TURN1 "]," TOOLS "}");
    expect(&q, PL_PLAN_WHOLE, NULL);
    answer(&h, &q, PL_API_CHAT, CHAT_REPLY("b"));
    plan(&q, &h, PL_API_CHAT, PL_HISTORY_CUT_TOOLS,
         "{" TOOLS ",\"messages\":[" TURN1 REPLY1 NEW "]}");
    expect_edited(&q, "{\"messages\":[{\"role\":\"user\",\"content\":\"c\"}]}");
    request_free(&q);
    plan(&q, &h, PL_API_CHAT, 0, "{" TOOLS ",\"messages\":[" TURN1 REPLY1 NEW "]}");
    expect(&q, PL_PLAN_OUTSIDE, "tool calls");
    request_free(&q);
    plan(&q, &h, PL_API_CHAT, PL_HISTORY_CUT_TOOLS, "{\"messages\":[" TURN1 REPLY1 NEW "]}");
    expect(&q, PL_PLAN_OUTSIDE, "its tools");
    request_free(&q);
}

/* The edits may be full, or the member edited already: whole or not at all. */
static void test_edits_full(void **state)
{
    static const char body[] = "{" TOOLS ",\"messages\":[" TURN1 REPLY1 NEW "]}";
    pl_history h = {0};
    request q;
    plan(&q, &h, PL_API_CHAT, PL_HISTORY_CUT_TOOLS, "{\"messages\":[" TURN1 "]," TOOLS "}");
    answer(&h, &q, PL_API_CHAT, CHAT_REPLY("b"));
    pl_scan s;
    assert_int_equal(pl_scan_body(PL_STR(body), 100, &s), 0);
    for (int room = 0; room <= 4; room++) {
        pl_edits e = {0};
        pl_history_plan p;
        while (e.n < PL_EDITS_MAX - room)
            assert_int_equal(pl_edits_add(&e, 0, 0, PL_STR(" ")), 0);
        assert_int_equal(
            pl_history_plan_turn(&h, PL_API_CHAT, PL_STR(body), &s, PL_HISTORY_CUT_TOOLS, &e, &p),
            0);
        assert_int_equal(p.how, room < 3 ? PL_PLAN_OUTSIDE : PL_PLAN_TRIM);
        assert_int_equal(e.n, PL_EDITS_MAX - room + (room < 3 ? 0 : 3));
    }
}

static void test_delta_turns(void **state)
{
    pl_history h = {0};
    request q;
    plan(&q, &h, PL_API_CHAT, PL_HISTORY_DELTA, "{\"messages\":[" TURN1 "]}");
    expect(&q, PL_PLAN_WHOLE, NULL);
    answer(&h, &q, PL_API_CHAT, CHAT_REPLY("b"));
    plan(&q, &h, PL_API_CHAT, PL_HISTORY_DELTA,
         "{\"messages\":[{\"role\":\"user\",\"content\":\"c\"}]}");
    expect(&q, PL_PLAN_DELTA, NULL);
    answer(&h, &q, PL_API_CHAT, CHAT_REPLY("d"));
    assert_int_equal(h.units, 4);
    /* the same client resends all of it for once */
    plan(&q, &h, PL_API_CHAT, 0,
         "{\"messages\":[" TURN1 REPLY1 NEW ",{\"role\":\"assistant\",\"content\":\"d\"},{\"role\":"
         "\"user\",\"content\":\"e\"}]}");
    expect_edited(&q, "{\"messages\":[{\"role\":\"user\",\"content\":\"e\"}]}");
    request_free(&q);
    /* a delta of another form goes in all the same, but is the end of proofs */
    plan(&q, &h, PL_API_GENERATE, PL_HISTORY_DELTA, "{\"text\":\"x\"}");
    expect(&q, PL_PLAN_DELTA, NULL);
    answer(&h, &q, PL_API_GENERATE,
           "{\"text\":\"y\",\"meta_info\":{\"finish_reason\":{\"type\":"
           "\"stop\"}}}");
    assert_int_equal(h.form, PL_HISTORY_LOST);
    plan(&q, &h, PL_API_CHAT, 0, "{\"messages\":[" TURN1 REPLY1 NEW "]}");
    expect(&q, PL_PLAN_OUTSIDE, "not seen whole");
    request_free(&q);
    plan(&q, &h, PL_API_CHAT, PL_HISTORY_DELTA, "{\"messages\":[" TURN1 "]}");
    expect(&q, PL_PLAN_DELTA, NULL);
    answer(&h, &q, PL_API_CHAT, CHAT_REPLY("b"));
    assert_int_equal(h.form, PL_HISTORY_LOST);
}

static void test_reply_not_whole(void **state)
{
    pl_history h = {0};
    request q;
    plan(&q, &h, PL_API_CHAT, 0, "{\"messages\":[" TURN1 "]}");
    answer(&h, &q, PL_API_CHAT, "{\"choices\":[{\"index\":0,\"message\":{\"role\":");
    assert_int_equal(h.form, PL_HISTORY_LOST);
}

static void test_text(void **state)
{
    pl_history h = {0};
    request q;
    plan(&q, &h, PL_API_COMPLETIONS, 0, "{\"prompt\":\"ab\\u00e9\"}");
    expect(&q, PL_PLAN_WHOLE, NULL);
    answer(&h, &q, PL_API_COMPLETIONS,
           "{\"choices\":[{\"index\":0,\"text\":\" cd\\n\",\"finish_reason\":\"length\"}]}");
    assert_int_equal(h.form, PL_HISTORY_TEXT);
    assert_int_equal(h.units, 8);
    static const char *const outside[] = {
        "ab\\u00e9 cd\\n", "ab\\u00e9 cd", "ab\\u00e8 cd\\nx", "abe\\u0301 cd\\nx", "", "ab"};
    for (size_t i = 0; i < sizeof outside / sizeof *outside; i++) {
        char body[128];
        snprintf(body, sizeof body, "{\"prompt\":\"%s\"}", outside[i]);
        plan(&q, &h, PL_API_COMPLETIONS, 0, body);
        expect(&q, PL_PLAN_OUTSIDE, NULL);
        request_free(&q);
    }
    plan(&q, &h, PL_API_COMPLETIONS, 0,
         "{\"max_tokens\":4,\"prompt\":\"ab\xc3\xa9 c\\u0064\\n"
         "\\ud83c\\udf19!\"}");
    expect_edited(&q, "{\"max_tokens\":4,\"prompt\":\"\\ud83c\\udf19!\"}");
    request_free(&q);
    plan(&q, &h, PL_API_COMPLETIONS, 0, "{\"prompt\":[\"a\",\"b\"]}");
    expect(&q, PL_PLAN_OUTSIDE, "batch");
    request_free(&q);
}

/* A reply that ends in the middle of a character (no engine should) is not cut there. */
static void test_text_cut_in_character(void **state)
{
    pl_history h = {0};
    request q;
    plan(&q, &h, PL_API_COMPLETIONS, 0, "{\"prompt\":\"a\"}");
    answer(&h, &q, PL_API_COMPLETIONS,
           "{\"choices\":[{\"index\":0,\"text\":\"b\xc3\",\"finish_reason\":\"length\"}]}");
    assert_int_equal(h.units, 3);
    plan(&q, &h, PL_API_COMPLETIONS, 0, "{\"prompt\":\"ab\xc3\xa9 x\"}");
    expect(&q, PL_PLAN_OUTSIDE, "beginning");
    request_free(&q);
}

static void test_tokens(void **state)
{
    pl_history h = {0};
    request q;
    plan(&q, &h, PL_API_GENERATE, 0, "{\"input_ids\":[1, 2,4294967295]}");
    expect(&q, PL_PLAN_WHOLE, NULL);
    answer(&h, &q, PL_API_GENERATE,
           "{\"text\":\"x\",\"output_ids\":[0,9],\"meta_info\":{\"completion_tokens\":2,\"finish_"
           "reason\":{\"type\":\"stop\",\"matched\":9}}}");
    assert_int_equal(h.form, PL_HISTORY_TOKENS);
    assert_int_equal(h.units, 5);
    plan(&q, &h, PL_API_GENERATE, 0, "{\"input_ids\":[1,2, 4294967295,0 , 9 , 7, 8]}");
    expect_edited(&q, "{\"input_ids\":[7,8]}");
    request_free(&q);
    static const char *const outside[] = {"1,2,4294967295,0,9",       "1,2,4294967295,0",
                                          "1,2,4294967295,0,8,7",     "1,2,4294967295,9,0,7",
                                          "1,2,4294967296,0,9,7",     "1,2,4294967295,0,9,7.5",
                                          "1,2,4294967295,0,-9,7",    "2,1,4294967295,0,9,7",
                                          "1,2,4294967295,0,9,\"x\"", "[1,2]"};
    for (size_t i = 0; i < sizeof outside / sizeof *outside; i++) {
        char body[128];
        snprintf(body, sizeof body, "{\"input_ids\":[%s]}", outside[i]);
        plan(&q, &h, PL_API_GENERATE, 0, body);
        expect(&q, PL_PLAN_OUTSIDE, NULL);
        request_free(&q);
    }
    plan(&q, &h, PL_API_GENERATE, PL_HISTORY_DELTA, "{\"input_ids\":[5]}");
    expect(&q, PL_PLAN_DELTA, NULL);
    assert_int_equal(q.plan.next.units, 6);
    request_free(&q);
}

/* --- canonical digests --- */

static bool digest(const char *json, bool message, pl_digest *d)
{
    pl_json j;
    pl_json_init(&j, pl_str_c(json), PL_CANON_DEPTH, false);
    return message ? pl_canon_message(&j, d) : pl_canon_value(&j, false, d);
}

static void test_same_and_different(void **state)
{
    static const struct {
        const char *a, *b;
        bool message, same;
    } pairs[] = {
        {"{\"a\":1,\"b\":[1,2]}", "{ \"b\" : [ 1,2 ] ,\"\\u0061\":1}", false, true},
        {"\"\\ud83c\\udf19\\/\"", "\"\xf0\x9f\x8c\x99/\"", false, true},
        {"[1,2]", "[2,1]", false, false},
        {"[1,[2]]", "[[1],2]", false, false},
        {"[]", "{}", false, false},
        {"[]", "[[]]", false, false},
        {"\"1\"", "1", false, false},
        {"1", "1.0", false, false}, /* as written: to be careful */
        {"{\"a\":null}", "{}", false, false},
        {"{\"a\":\"b\"}", "{\"b\":\"a\"}", false, false},
        {"{\"a\":{\"b\":1},\"c\":2}", "{\"a\":{\"b\":2},\"c\":1}", false, false},
        {"{\"a\":null,\"content\":\"x\"}", "{\"content\":\"x\"}", true, true},
        {"{\"content\":[{\"type\":\"text\",\"text\":\"x\",\"y\":null}]}", "{\"content\":\"x\"}",
         true, true},
        {"{\"content\":[{\"type\":\"text\",\"text\":\"x\",\"y\":1}]}", "{\"content\":\"x\"}", true,
         false},
        {"{\"content\":[{\"type\":\"text\",\"text\":\"x\"},{\"type\":\"text\",\"text\":\"\"}]}",
         "{\"content\":\"x\"}", true, false},
        {"{\"content\":[{\"type\":\"texts\",\"text\":\"x\"}]}", "{\"content\":\"x\"}", true, false},
        {"{\"content\":[]}", "{\"content\":\"\"}", true, true},
        {"{\"content\":[{\"type\":\"text\",\"text\":\"\"}]}", "{}", true, true},
        {"{\"name\":\"\"}", "{}", true, false},
        {"{\"tool_calls\":[{\"id\":\"a\",\"index\":3,\"type\":\"function\"}]}",
         "{\"tool_calls\":[{\"id\":\"a\"}]}", true, true},
        {"{\"tool_calls\":[{\"id\":\"a\",\"type\":\"custom\"}]}",
         "{\"tool_calls\":[{\"id\":\"a\"}]}", true, false},
        {"{\"content\":\"x\"}", "{\"refusal\":\"x\"}", true, false},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        pl_digest a, b;
        assert_true(digest(pairs[i].a, pairs[i].message, &a));
        assert_true(digest(pairs[i].b, pairs[i].message, &b));
        if ((memcmp(&a, &b, sizeof a) == 0) != pairs[i].same)
            fail_msg("%s and %s", pairs[i].a, pairs[i].b);
    }
}

static void test_nothing_to_conclude(void **state)
{
    pl_digest d;
    assert_false(digest("{\"a\":1,\"\\u0061\":1}", false, &d));
    assert_false(digest("[{\"x\":{\"a\":1,\"a\":2}}]", false, &d));
    assert_false(digest("{\"content\":\"a\",\"content\":null}", true, &d));
    assert_false(digest("\"x\"", true, &d));
    assert_false(digest("[1,", false, &d));
    assert_false(digest("{\"a\":", false, &d));
    assert_false(digest("", false, &d));
    char deep[200];
    for (int n = PL_CANON_DEPTH; n <= PL_CANON_DEPTH + 1; n++) {
        memset(deep, '[', (size_t)n);
        memset(deep + n, ']', (size_t)n);
        deep[2 * n] = 0;
        assert_int_equal(digest(deep, false, &d), n == PL_CANON_DEPTH);
    }
}

/* Of very many members the order counts, and none can be hidden behind another of its name. */
static void test_many_members(void **state)
{
    char a[4096] = "{", b[4096] = "{";
    pl_digest da, db;
    for (int i = 0; i < 60; i++) {
        sprintf(a + strlen(a), "%s\"m%d\":%d", i ? "," : "", i, i);
        sprintf(b + strlen(b), "%s\"m%d\":%d", i ? "," : "", i ^ 1, i ^ 1);
    }
    strcpy(a + strlen(a), ",\"m50\":1,\"m50\":2}");
    strcpy(b + strlen(b), ",\"m50\":2,\"m50\":1}");
    assert_true(digest(a, false, &da) && digest(b, false, &db));
    assert_memory_not_equal(&da, &db, sizeof da);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chat),
        cmocka_unit_test(test_chat_outside),
        cmocka_unit_test(test_first_turn_not_understood),
        cmocka_unit_test(test_tools),
        cmocka_unit_test(test_edits_full),
        cmocka_unit_test(test_delta_turns),
        cmocka_unit_test(test_reply_not_whole),
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_text_cut_in_character),
        cmocka_unit_test(test_tokens),
        cmocka_unit_test(test_same_and_different),
        cmocka_unit_test(test_nothing_to_conclude),
        cmocka_unit_test(test_many_members),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
