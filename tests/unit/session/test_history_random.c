/* Random conversations, texts and ids: whoever resends all of it is trimmed to what is new, who has
 * changed anything is not, who sends only what is new passes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "planned.h"

/* The body of a chat: messages from `from` on, in some client's spelling. */
static void put_chat(pl_rng *r, pl_buf *b, json_t *messages, size_t from, json_t *settings)
{
    json_t *body = json_deep_copy(settings), *list = json_array(), *m;
    size_t i;
    json_array_foreach(messages, i, m) if (i >= from) json_array_append_new(list, reshaped(r, m));
    json_object_set_new(body, "messages", list);
    json_object_set_new(body, "temperature", json_integer((json_int_t)pl_rng_below(r, 2)));
    if (pl_rng_below(r, 2))
        json_object_set_new(body, "stream", json_true());
    b->n = 0;
    put_json(r, b, body);
    json_decref(body);
}

/* The reply as events, cut anywhere between characters, or as one answer. */
static void send_reply(pl_rng *r, pl_reply *to, json_t *message)
{
    pl_buf b = {0};
    if (pl_rng_below(r, 3) == 0) {
        json_t *m = reshaped(r, message);
        json_t *v = json_pack("{s:s,s:[{s:i,s:o,s:s}]}", "object", "chat.completion", "choices",
                              "index", 0, "message", m, "finish_reason", "stop");
        put_json(r, &b, v);
        json_decref(v);
        pl_reply_answer(to, pl_buf_str(&b));
        pl_buf_free(&b);
        return;
    }
    static const char *const names[] = {"reasoning_content", "content"};
    pl_reply_event(to, PL_STR("{\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\","
                              "\"content\":\"\"},\"finish_reason\":null}]}"));
    for (int k = 0; k < 2; k++) {
        json_t *text = json_object_get(message, names[k]);
        size_t n = json_string_length(text), at = 0;
        const char *s = json_string_value(text);
        while (at < n) {
            unsigned c;
            size_t end = at;
            do
                end += character(s + end, &c);
            while (end < n && pl_rng_below(r, 4));
            b.n = 0;
            json_t *v = json_pack("{s:[{s:i,s:{s:s%},s:n}]}", "choices", "index", 0, "delta",
                                  names[k], s + at, end - at, "finish_reason");
            put_json(r, &b, v);
            json_decref(v);
            pl_reply_event(to, pl_buf_str(&b));
            at = end;
        }
    }
    size_t i;
    json_t *call;
    json_array_foreach(json_object_get(message, "tool_calls"), i, call)
    {
        json_t *f = json_object_get(call, "function"), *arguments = json_object_get(f, "arguments");
        size_t n = json_string_length(arguments), half = n / 2;
        const char *s = json_string_value(arguments);
        while (half && ((unsigned char)s[half] & 0xc0) == 0x80)
            half--;
        json_t *v[2];
        v[0] = json_pack("{s:i,s:O,s:s,s:{s:O,s:s%}}", "index", (int)i, "id",
                         json_object_get(call, "id"), "type", "function", "function", "name",
                         json_object_get(f, "name"), "arguments", s, half);
        v[1] = json_pack("{s:i,s:{s:s%}}", "index", (int)i, "function", "arguments", s + half,
                         n - half);
        for (int k = 0; k < 2; k++) {
            b.n = 0;
            json_t *event = json_pack("{s:[{s:i,s:{s:[o]}}]}", "choices", "index", 0, "delta",
                                      "tool_calls", v[k]);
            put_json(r, &b, event);
            json_decref(event);
            pl_reply_event(to, pl_buf_str(&b));
        }
    }
    pl_reply_event(to, PL_STR("{\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":"
                              "\"stop\"}]}"));
    pl_reply_event(to, PL_STR("{\"choices\":[],\"usage\":{\"prompt_tokens\":9}}"));
    pl_reply_event(to, PL_STR("[DONE]"));
    pl_buf_free(&b);
}

/* Changes what the engine holds, in messages [0, held) or in the settings. */
static void tamper(pl_rng *r, json_t *messages, size_t held, json_t *settings)
{
    size_t at = pl_rng_below(r, (uint32_t)held);
    json_t *m = json_array_get(messages, at), *other;
    switch (pl_rng_below(r, 7)) {
    case 0:
        json_object_set_new(m, "content", random_text(r));
        break;
    case 1:
        json_array_remove(messages, at);
        break;
    case 2:
        json_array_insert_new(messages, at, random_message(r, "user"));
        break;
    case 3:
        other = json_array_get(messages, (at + 1) % held);
        if (held > 1 && !json_equal(m, other)) {
            json_incref(m);
            json_incref(other);
            json_array_set_new(messages, (at + 1) % held, m);
            json_array_set_new(messages, at, other);
            break;
        } /* fall through */
    case 4:
        json_object_set_new(m, "role", json_string("else"));
        break;
    case 5:
        json_object_set_new(settings, "tools", json_pack("[{s:o}]", "name", random_text(r)));
        break;
    case 6:
        json_object_set_new(m, "extra", random_text(r));
        break;
    }
}

static void check_trimmed(const request *q, size_t held)
{
    json_t *got = edited(q), *m;
    json_t *want = json_loadb(q->p, q->n, JSON_ALLOW_NUL, NULL);
    json_t *list = json_object_get(want, "messages");
    for (size_t i = 0; i < held; i++)
        json_array_remove(list, 0);
    json_object_del(want, "tools");
    json_object_del(want, "system");
    m = json_object_get(got, "messages");
    assert_true(json_array_size(m) > 0);
    if (!json_equal(got, want))
        fail_msg("not what is new: %s", json_dumps(got, 0));
    json_decref(got);
    json_decref(want);
}

static void one_conversation(uint64_t seed)
{
    pl_rng r = {seed};
    pl_history h = {0};
    pl_buf b = {0};
    request q;
    json_t *messages = json_array(), *settings = json_pack("{s:s}", "model", "m");
    size_t held = 0;
    bool delta_client = pl_rng_below(&r, 3) == 0;
    if (pl_rng_below(&r, 2))
        json_object_set_new(settings, "tools",
                            json_pack("[{s:s,s:{s:o,s:[n]}}]", "type", "function", "function",
                                      "name", random_text(&r), "enum"));
    if (pl_rng_below(&r, 3) == 0)
        json_object_set_new(settings, "system", random_text(&r));
    json_array_append_new(messages, random_message(&r, "system"));
    unsigned turns = 2 + pl_rng_below(&r, 5);
    for (unsigned t = 0; t < turns; t++) {
        for (unsigned n = 1 + pl_rng_below(&r, 3); n; n--)
            json_array_append_new(messages,
                                  random_message(&r, pl_rng_below(&r, 3) ? "user" : "tool"));
        if (t > 0) {
            json_t *false_messages = json_deep_copy(messages);
            json_t *false_settings = json_deep_copy(settings);
            tamper(&r, false_messages, held, false_settings);
            put_chat(&r, &b, false_messages, 0, false_settings);
            plan_bytes(&q, &h, PL_API_CHAT, PL_HISTORY_CUT_TOOLS, b.p, b.n);
            if (q.plan.how != PL_PLAN_OUTSIDE)
                fail_msg("seed %llu: tampered with, and trimmed", (unsigned long long)seed);
            request_free(&q);
            json_decref(false_messages);
            json_decref(false_settings);
        }
        bool delta = delta_client && pl_rng_below(&r, 4);
        put_chat(&r, &b, messages, delta ? held : 0, settings);
        plan_bytes(&q, &h, PL_API_CHAT, PL_HISTORY_CUT_TOOLS | (delta ? PL_HISTORY_DELTA : 0u), b.p,
                   b.n);
        int want = t == 0 ? PL_PLAN_WHOLE : delta ? PL_PLAN_DELTA : PL_PLAN_TRIM;
        if ((int)q.plan.how != want)
            fail_msg("seed %llu, turn %u: %d, %s", (unsigned long long)seed, t, q.plan.how,
                     q.plan.why ? q.plan.why : "");
        if (want == PL_PLAN_TRIM)
            check_trimmed(&q, held);
        pl_reply *reply = pl_reply_new(PL_API_CHAT);
        json_t *message = random_reply(&r);
        send_reply(&r, reply, message);
        assert_true(pl_reply_judge(reply, 9, 2).complete);
        pl_history_advance(&h, &q.plan, reply);
        pl_reply_free(reply);
        request_free(&q);
        json_array_append_new(messages, message);
        held = json_array_size(messages);
        assert_int_equal(h.units, held);
    }
    json_decref(messages);
    json_decref(settings);
    pl_buf_free(&b);
}

static void test_random_conversations(void **state)
{
    for (uint64_t seed = 1; seed <= 300; seed++)
        one_conversation(seed);
}

/* A prompt of /generate as text or ids, from the model's text or ids so far. */
static void put_prompt(pl_rng *r, pl_buf *b, const pl_buf *text, size_t from, bool ids)
{
    b->n = 0;
    put(b, "{", 1);
    put_space(r, b);
    put_string(r, b, ids ? "input_ids" : "text", ids ? 9 : 4);
    put_space(r, b);
    put(b, ":", 1);
    put_space(r, b);
    put(b, ids ? "[" : "\"", 1);
    if (!ids)
        put_escaped(r, b, text->p + from, text->n - from);
    for (size_t i = from; ids && i < text->n; i++) {
        char tmp[16];
        put_space(r, b);
        put(b, tmp, (size_t)sprintf(tmp, "%d", (unsigned char)text->p[i] * 1000));
        put_space(r, b);
        if (i + 1 < text->n)
            put(b, ",", 1);
    }
    put(b, ids ? "]" : "\"", 1);
    put(b, "}", 1);
}

static void add_random(pl_rng *r, pl_buf *text)
{
    json_t *v = random_text(r);
    put(text, json_string_value(v), json_string_length(v));
    json_decref(v);
}

/* Cumulative events, as SGLang sends them. */
static void send_generated(pl_rng *r, pl_reply *to, const char *s, size_t n)
{
    pl_buf b = {0};
    size_t at = 0;
    while (at < n) {
        unsigned c;
        do
            at += character(s + at, &c);
        while (at < n && pl_rng_below(r, 8));
        json_t *ids = json_array();
        for (size_t i = 0; i < at; i++)
            json_array_append_new(ids, json_integer((unsigned char)s[i] * 1000));
        json_t *v = json_pack("{s:s%,s:o,s:{s:i,s:o}}", "text", s, at, "output_ids", ids,
                              "meta_info", "completion_tokens", (int)at, "finish_reason",
                              at < n ? json_null() : json_pack("{s:s}", "type", "length"));
        b.n = 0;
        put_json(r, &b, v);
        json_decref(v);
        pl_reply_event(to, pl_buf_str(&b));
    }
    pl_reply_event(to, PL_STR("[DONE]"));
    pl_buf_free(&b);
}

static void one_text(uint64_t seed)
{
    pl_rng r = {seed};
    pl_history h = {0};
    pl_buf text = {0}, b = {0};
    request q;
    size_t held = 0;
    bool ids = pl_rng_below(&r, 2);
    for (unsigned t = 0; t < 4; t++) {
        add_random(&r, &text);
        if (t > 0) {
            size_t at = pl_rng_below(&r, (uint32_t)held);
            char was = text.p[at];
            if (was > 0x20 && was < 0x7f && was != '"' && was != '\\') { /* stays valid text */
                text.p[at] = was == 'x' ? 'y' : 'x';
                put_prompt(&r, &b, &text, 0, ids);
                plan_bytes(&q, &h, PL_API_GENERATE, 0, b.p, b.n);
                expect(&q, PL_PLAN_OUTSIDE, "beginning");
                request_free(&q);
                text.p[at] = was;
            }
        }
        bool delta = pl_rng_below(&r, 4) == 0;
        put_prompt(&r, &b, &text, delta ? held : 0, ids);
        plan_bytes(&q, &h, PL_API_GENERATE, delta ? PL_HISTORY_DELTA : 0, b.p, b.n);
        expect(&q, t == 0 ? PL_PLAN_WHOLE : delta ? PL_PLAN_DELTA : PL_PLAN_TRIM, NULL);
        if (q.plan.how == PL_PLAN_TRIM) {
            json_t *got = edited(&q), *v = json_object_get(got, ids ? "input_ids" : "text");
            if (ids) {
                assert_int_equal(json_array_size(v), text.n - held);
                for (size_t i = held; i < text.n; i++)
                    assert_int_equal(json_integer_value(json_array_get(v, i - held)),
                                     (unsigned char)text.p[i] * 1000);
            } else {
                assert_int_equal(json_string_length(v), text.n - held);
                assert_memory_equal(json_string_value(v), text.p + held, text.n - held);
            }
            json_decref(got);
        }
        size_t from = text.n;
        add_random(&r, &text);
        pl_reply *reply = pl_reply_new(PL_API_GENERATE);
        send_generated(&r, reply, text.p + from, text.n - from);
        pl_history_advance(&h, &q.plan, reply);
        pl_reply_free(reply);
        request_free(&q);
        held = text.n;
        assert_int_equal(h.units, held);
        assert_int_equal(h.form, ids ? PL_HISTORY_TOKENS : PL_HISTORY_TEXT);
    }
    pl_buf_free(&text);
    pl_buf_free(&b);
}

static void test_random_texts(void **state)
{
    for (uint64_t seed = 1; seed <= 200; seed++)
        one_text(seed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_conversations),
        cmocka_unit_test(test_random_texts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
