/* The SSE readers: boundaries whatever the line ends and however the bytes are split; usage in
 * every API's spelling. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/err.h"
#include "http/sse.h"

static void tail_knows_the_boundary(void **state)
{
    static const struct {
        const char *bytes, *close;
    } cases[] = {
        {"", ""},
        {"data: x\n\n", ""},
        {"data: x\r\n\r\n", ""},
        {"data: x\r\r", ""},
        {"data: x\n", "\n"},
        {"data: x\r\n", "\n"},
        {"data: x", "\n\n"},
        {"data: x\n\ndata: y", "\n\n"},
        {"data: x\n\ndata: y\n", "\n"},
        {"d", "\n\n"},
        {"\n", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (size_t step = 1; step < 12; step++) {
            pl_sse_tail t = {0};
            pl_str s = pl_str_c(cases[i].bytes);
            for (size_t at = 0; at < s.n; at += step)
                pl_sse_tail_feed(&t, (pl_str){s.p + at, s.n - at < step ? s.n - at : step});
            if (!pl_str_eq(pl_sse_tail_close(&t), pl_str_c(cases[i].close)))
                fail_msg("case %zu in steps of %zu", i, step);
        }
}

static int collect(void *ctx, const pl_sse_event *ev)
{
    pl_buf *b = ctx;
    return pl_buf_addf(b, "[%.*s|%.*s]", PL_FMT(ev->name), PL_FMT(ev->data));
}

static void splits_into_events_however_they_arrive(void **state)
{
    static const char *const streams[] = {
        "event: a\ndata: 1\n\ndata:2\n\n: comment\n\ndata: x\ndata: y\n\ndata\n\nid: 3\n\n",
        "event: a\r\ndata: 1\r\n\r\ndata:2\r\n\r\n: comment\r\n\r\ndata: x\r\ndata: "
        "y\r\n\r\ndata\r\n\r\nid: 3\r\n\r\n",
    };
    for (int i = 0; i < 2; i++)
        for (size_t step = 1; step < 40; step++) {
            pl_sse s;
            pl_sse_init(&s, 1000);
            pl_buf got = {0};
            pl_str all = pl_str_c(streams[i]);
            for (size_t at = 0; at < all.n; at += step)
                assert_int_equal(
                    pl_sse_feed(&s, (pl_str){all.p + at, all.n - at < step ? all.n - at : step},
                                collect, &got),
                    0);
            if (!pl_str_eq(pl_buf_str(&got), PL_STR("[a|1][|2][|][|x\ny][|][|]")))
                fail_msg("stream %d in steps of %zu: %.*s", i, step, PL_FMT(pl_buf_str(&got)));
            assert_int_equal(pl_sse_rest(&s).n, 0);
            pl_buf_free(&got);
            pl_sse_free(&s);
        }
}

static void keeps_the_unfinished_event_and_bounds_it(void **state)
{
    pl_sse s;
    pl_buf got = {0};
    pl_sse_init(&s, 20);
    assert_int_equal(pl_sse_feed(&s, PL_STR("data: 1\n\ndata: rest"), collect, &got), 0);
    assert_true(pl_str_eq(pl_sse_rest(&s), PL_STR("data: rest")));
    assert_int_equal(pl_sse_feed(&s, PL_STR("0123456789012345"), collect, &got), PL_ELIMIT);
    pl_buf_free(&got);
    pl_sse_free(&s);
}

static void reads_usage_in_every_spelling(void **state)
{
    static const struct {
        const char *json;
        double prompt, cached, output;
    } cases[] = {
        {"{\"choices\":[],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":3,"
         "\"prompt_tokens_details\":{\"cached_tokens\":8}}}",
         10, 8, 3},
        {"{\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":3,\"prompt_tokens_details\":null}"
         "}",
         10, -1, 3},
        {"{\"type\":\"response.completed\",\"response\":{\"usage\":{\"input_tokens\":7,"
         "\"output_tokens\":2,\"input_tokens_details\":{\"cached_tokens\":4}}}}",
         7, 4, 2},
        {"{\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":5,"
         "\"cache_read_input_tokens\":16,\"output_tokens\":1}}}",
         21, 16, 1},
        {"{\"type\":\"message_delta\",\"usage\":{\"output_tokens\":9}}", -1, -1, 9},
        {"{\"text\":\"x\",\"meta_info\":{\"prompt_tokens\":4,\"completion_tokens\":6,"
         "\"cached_tokens\":2}}",
         4, 2, 6},
        {"{\"choices\":[],\"usage\":null}", -1, -1, -1},
        {"[DONE]", -1, -1, -1},
        {"{\"usage\":{\"prompt_tokens\":", -1, -1, -1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pl_usage u = {-1, -1, -1};
        pl_usage_read(pl_str_c(cases[i].json), &u);
        if (u.prompt_tokens != cases[i].prompt || u.cached_tokens != cases[i].cached ||
            u.output_tokens != cases[i].output)
            fail_msg("%s: %g %g %g", cases[i].json, u.prompt_tokens, u.cached_tokens,
                     u.output_tokens);
    }
    assert_true(pl_usage_only_chunk(PL_STR("{\"choices\":[],\"usage\":{\"prompt_tokens\":1}}")));
    assert_false(pl_usage_only_chunk(PL_STR("{\"choices\":[{}],\"usage\":{}}")));
    assert_false(pl_usage_only_chunk(PL_STR("{\"choices\":[],\"usage\":null}")));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tail_knows_the_boundary),
        cmocka_unit_test(splits_into_events_however_they_arrive),
        cmocka_unit_test(keeps_the_unfinished_event_and_bounds_it),
        cmocka_unit_test(reads_usage_in_every_spelling),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
