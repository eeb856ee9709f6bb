/* The body scanner and the splicer: exact offsets, verdicts against jansson on mutated bodies,
 * edits against jansson's own idea of the edited object. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>
#include <jansson.h>

#include "base/err.h"
#include "base/rng.h"
#include "http/scan.h"

static pl_str S(const char *s)
{
    return pl_str_c(s);
}

static void accepts_and_finds(void **state)
{
    pl_scan s;
    pl_str body =
        S(" { \"model\" : \"m\\u0031\\n\", \"stream\":true,\"n\":2, \"x\": [1,{\"model\":3}], "
          "\"messages\":[{\"role\":\"user\",\"content\":\"h\xc3\xa9\"}] } \n");
    assert_int_equal(pl_scan_body(body, 64, &s), 0);
    pl_arena a = PL_ARENA_INIT;
    pl_str model = pl_member_string(&a, &s.members[PL_MEMBER_MODEL]);
    assert_true(pl_str_eq(model, S("m1\n")));
    assert_int_equal(s.members[PL_MEMBER_STREAM].type, PL_JSON_TRUE);
    double n;
    assert_int_equal(pl_member_number(&s.members[PL_MEMBER_N], &n), 0);
    assert_true(n == 2);
    assert_int_equal(s.members[PL_MEMBER_MESSAGES].elements, 1);
    assert_int_equal(s.members[PL_MEMBER_PROMPT].type, PL_JSON_ABSENT);
    assert_int_equal(s.members_n, 5);
    assert_true(pl_str_eq(pl_scan_find(body, &s, S("x")).raw, S("[1,{\"model\":3}]")));
    assert_int_equal(pl_scan_find(body, &s, S("y")).type, PL_JSON_ABSENT);
    pl_arena_free(&a);
}

/* body, offset of the first wrong byte */
static const struct {
    const char *body;
    size_t at;
} rejected[] = {
    {"", 0},
    {"   ", 3},
    {"[]", 0},
    {"\"x\"", 0},
    {"{", 1},
    {"{\"a\"", 4},
    {"{\"a\":", 5},
    {"{\"a\":1", 6},
    {"{\"a\":1,}", 7},
    {"{,}", 1},
    {"{\"a\":1}x", 7},
    {"{\"a\":1}{}", 7},
    {"{\"a\":01}", 6},
    {"{\"a\":-}", 6},
    {"{\"a\":1.}", 7},
    {"{\"a\":1e}", 7},
    {"{\"a\":+1}", 5},
    {"{\"a\":.5}", 5},
    {"{\"a\":tru}", 8},
    {"{\"a\":True}", 5},
    {"{\"a\":nul", 8},
    {"{\"a\":\"x}", 8},
    {"{\"a\":\"\\x\"}", 7},
    {"{\"a\":\"\\u12g4\"}", 10},
    {"{\"a\":\"\n\"}", 6},
    {"{\"a\":[1,]}", 8},
    {"{\"a\":[1 2]}", 8},
    {"{\"a\":{\"b\" 1}}", 10},
    {"{a:1}", 1},
    {"{'a':1}", 1},
    {"\xef\xbb\xbf{}", 0},
    {"{\"model\":\"a\",\"model\":\"b\"}", 13},
    {"{\"model\":\"a\",\"mo\\u0064el\":\"b\"}", 13},
    {"{\"messages\":[{\"c\":\"\xff\"}]}", 19},
    {"{\"messages\":[\"\xed\xa0\x80\"]}", 14},
    {"{\"model\":\"\xc0\xaf\"}", 10},
    {"{\"\xc3\":1}", 2},
    {"{\"a\":NaN}", 5},
    {"{\"a\":Infinity}", 5},
    {"{\"a\":1}//c", 7},
};

static void rejects_with_the_offset(void **state)
{
    for (size_t i = 0; i < sizeof rejected / sizeof *rejected; i++) {
        pl_scan s;
        int rc = pl_scan_body(S(rejected[i].body), 64, &s);
        if (rc != PL_ESYNTAX || s.error_at != rejected[i].at || !s.error)
            fail_msg("%s: rc %d at %zu, expected %zu", rejected[i].body, rc, s.error_at,
                     rejected[i].at);
    }
}

static void bounds_the_depth(void **state)
{
    pl_scan s;
    assert_int_equal(pl_scan_body(S("{\"a\":[[[1]]]}"), 4, &s), 0);
    assert_int_equal(pl_scan_body(S("{\"a\":[[[[1]]]]}"), 4, &s), PL_ELIMIT);
    assert_int_equal(s.error_at, 8);
    size_t n = 1 << 20;
    char *deep = malloc(n);
    memset(deep, '[', n);
    memcpy(deep, "{\"a\":", 5);
    assert_int_equal(pl_scan_body((pl_str){deep, n}, 64, &s), PL_ELIMIT);
    free(deep);
}

/* Every byte position around the 16-byte steps of the string skipper. */
static void finds_special_bytes_at_every_offset(void **state)
{
    for (int length = 0; length < 70; length++)
        for (int at = 0; at < length; at++) {
            char body[128], special[] = {'\n', '\x01', '\x1f'};
            for (int k = 0; k < 3; k++) {
                int n = snprintf(
                    body, sizeof body, "{\"a\":\"%.*s\"}", length,
                    "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx");
                body[6 + at] = special[k];
                pl_scan s;
                assert_int_equal(pl_scan_body((pl_str){body, (size_t)n}, 8, &s), PL_ESYNTAX);
                assert_int_equal(s.error_at, 6 + at);
            }
        }
}

static const char *const seeds[] = {
    "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"hello \\\"x\\\" "
    "\\u00e9\"}],\"stream\":true}",
    "{\"a\":[1,-2.5e3,0,true,false,null,{\"b\":{}}],\"n\":1,\"prompt\":[1,2,3]}",
    "{ \"x\" : [ ] , \"tools\" : [ { \"f\" : \"\xe2\x82\xac\" } ] , \"max_tokens\" : 12 }",
};

/* jansson is the oracle; it also refuses what it cannot hold (NUL in strings, numbers out of range)
 * and invalid UTF-8 everywhere, where we look only into members that matter: those verdicts are not
 * compared. */
static void agrees_with_jansson_on_mutations(void **state)
{
    pl_rng r = {1};
    int accepted = 0, refused = 0;
    for (int round = 0; round < 60000; round++) {
        char body[256];
        const char *seed = seeds[pl_rng_below(&r, 3)];
        size_t n = strlen(seed);
        memcpy(body, seed, n);
        for (uint32_t k = pl_rng_below(&r, 3) + 1; k > 0 && n > 0; k--) {
            size_t at = pl_rng_below(&r, (uint32_t)n);
            switch (pl_rng_below(&r, 4)) {
            case 0:
                body[at] = "{}[],:\"\\0123e.-tfn x"[pl_rng_below(&r, 20)];
                break;
            case 1:
                memmove(body + at, body + at + 1, n - at - 1);
                n--;
                break;
            case 2:
                memmove(body + at + 1, body + at, n - at);
                body[at] = "{}[],:\"\\0123e.-tfn x"[pl_rng_below(&r, 20)];
                n++;
                break;
            default:
                n = at + 1;
            }
        }
        pl_scan s;
        int rc = pl_scan_body((pl_str){body, n}, 64, &s);
        json_error_t je;
        json_t *oracle = json_loadb(body, n, 0, &je);
        bool is_object = json_is_object(oracle);
        json_decref(oracle);
        if (strstr(je.text, "out of range") || strstr(je.text, "overflow") ||
            strstr(je.text, "too big") || strstr(je.text, "\\u0000") ||
            strstr(je.text, "surrogate") || strstr(je.text, "UTF-8") ||
            strstr(je.text, "decode byte") || (s.error && strstr(s.error, "twice")))
            continue;
        accepted += rc == 0;
        refused += rc != 0;
        if ((rc == 0) != is_object)
            fail_msg("we say %d, jansson %d (%s): %.*s", rc, is_object, je.text, (int)n, body);
    }
    assert_true(accepted > 1000);
    assert_true(refused > 1000);
}

static const char *const names[] = {"model", "stream", "n",      "priority", "rid",
                                    "user",  "free",   "prompt", "text"};

static void edits_agree_with_jansson(void **state)
{
    pl_rng r = {7};
    for (int round = 0; round < 30000; round++) {
        char body[1024];
        int n = snprintf(body, sizeof body, "%s{", round % 3 ? "" : " \n");
        bool used[9] = {false};
        int members = (int)pl_rng_below(&r, 6);
        for (int i = 0; i < members; i++) {
            uint32_t k = pl_rng_below(&r, 9);
            if (used[k])
                continue;
            bool first = body[n - 1] == '{';
            used[k] = true;
            n += snprintf(body + n, sizeof body - (size_t)n, "%s%s\"%s\"%s:%s%s", first ? "" : ",",
                          round % 2 ? " " : "", names[k], round % 5 ? "" : " ",
                          k % 2 ? "\"v\"" : "[1, 2]", round % 7 ? "" : "\n");
        }
        n += snprintf(body + n, sizeof body - (size_t)n, "%s}%s", round % 4 ? "" : " ",
                      round % 6 ? "" : "  ");
        pl_scan s;
        assert_int_equal(pl_scan_body((pl_str){body, (size_t)n}, 8, &s), 0);
        json_t *want = json_loadb(body, (size_t)n, 0, NULL);
        pl_edits e = {.n = 0};
        pl_arena a = PL_ARENA_INIT;
        static const struct {
            pl_member_id id;
            const char *name;
        } targets[] = {{PL_MEMBER_MODEL, "model"},  {PL_MEMBER_STREAM, "stream"},
                       {PL_MEMBER_N, "n"},          {PL_MEMBER_PRIORITY, "priority"},
                       {PL_MEMBER_RID, "rid"},      {PL_MEMBER_USER, "user"},
                       {PL_MEMBER_PROMPT, "prompt"}};
        bool touched[7] = {false};
        for (uint32_t k = pl_rng_below(&r, 6); k > 0; k--) {
            uint32_t t = pl_rng_below(&r, 7);
            if (touched[t])
                continue;
            touched[t] = true;
            if (pl_rng_below(&r, 2)) {
                bool there = json_object_get(want, targets[t].name) != NULL;
                int rc = pl_edits_remove(&e, (pl_str){body, (size_t)n}, &s, targets[t].id);
                assert_int_equal(rc, there ? 0 : PL_ENOTFOUND);
                json_object_del(want, targets[t].name);
            } else {
                assert_int_equal(pl_edits_set(&e, &a, (pl_str){body, (size_t)n}, &s, targets[t].id,
                                              S("{\"set\":[0]}")),
                                 0);
                json_object_set_new(want, targets[t].name, json_pack("{s:[i]}", "set", 0));
            }
        }
        pl_str slices[PL_EDITS_SLICES];
        size_t total, sum = 0;
        int count = pl_edits_slices(&e, (pl_str){body, (size_t)n}, slices, &total);
        char out[2048];
        for (int i = 0; i < count; i++) {
            memcpy(out + sum, slices[i].p, slices[i].n);
            sum += slices[i].n;
        }
        assert_int_equal(sum, total);
        json_error_t je;
        json_t *got = json_loadb(out, sum, JSON_REJECT_DUPLICATES, &je);
        if (!json_equal(got, want))
            fail_msg("%.*s\nbecame %.*s (%s)", n, body, (int)sum, out, je.text);
        json_decref(got);
        json_decref(want);
        pl_arena_free(&a);
    }
}

static void edits_are_bounded_and_do_not_overlap(void **state)
{
    pl_edits e = {.n = 0};
    assert_int_equal(pl_edits_add(&e, 10, 5, S("x")), 0);
    assert_int_equal(pl_edits_add(&e, 12, 1, S("x")), PL_EINVALID);
    assert_int_equal(pl_edits_add(&e, 8, 3, S("x")), PL_EINVALID);
    assert_int_equal(pl_edits_add(&e, 8, 2, S("x")), 0);
    for (int i = 2; i < PL_EDITS_MAX; i++)
        assert_int_equal(pl_edits_add(&e, 20 + (size_t)i, 0, S("x")), 0);
    assert_int_equal(pl_edits_add(&e, 90, 0, S("x")), PL_ELIMIT);
}

static void unescapes(void **state)
{
    static const struct {
        const char *json, *want;
    } cases[] = {
        {"{\"model\":\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"}", "\"\\/\b\f\n\r\t"},
        {"{\"model\":\"\\u00e9\\u20ac\"}", "\xc3\xa9\xe2\x82\xac"},
        {"{\"model\":\"\\ud83d\\ude00\"}", "\xf0\x9f\x98\x80"},
        {"{\"model\":\"\\ud83dx\"}", "\xef\xbf\xbdx"},
        {"{\"model\":\"\\ude00\"}", "\xef\xbf\xbd"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pl_scan s;
        pl_arena a = PL_ARENA_INIT;
        assert_int_equal(pl_scan_body(S(cases[i].json), 8, &s), 0);
        pl_str got = pl_member_string(&a, &s.members[PL_MEMBER_MODEL]);
        assert_true(pl_str_eq(got, S(cases[i].want)));
        pl_arena_free(&a);
    }
}

static void estimates_prompt_tokens(void **state)
{
    static const struct {
        const char *json;
        double want;
    } cases[] = {
        {"{}", 1},
        {"{\"prompt\":[1,2,3,4,5]}", 5},
        {"{\"input_ids\":[[1,2,3],[4,5]]}", 5},
        {"{\"prompt\":\"0123456789012345678901\"}", 6},
        {"{\"prompt\":[]}", 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pl_scan s;
        assert_int_equal(pl_scan_body(S(cases[i].json), 8, &s), 0);
        if (pl_scan_prompt_tokens(&s) != cases[i].want)
            fail_msg("%s: %g", cases[i].json, pl_scan_prompt_tokens(&s));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(accepts_and_finds),
        cmocka_unit_test(rejects_with_the_offset),
        cmocka_unit_test(bounds_the_depth),
        cmocka_unit_test(finds_special_bytes_at_every_offset),
        cmocka_unit_test(agrees_with_jansson_on_mutations),
        cmocka_unit_test(edits_agree_with_jansson),
        cmocka_unit_test(edits_are_bounded_and_do_not_overlap),
        cmocka_unit_test(unescapes),
        cmocka_unit_test(estimates_prompt_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
