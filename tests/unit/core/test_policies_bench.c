/* The comparison of policies in virtual time (tests/bench): it reads both kinds of traces, equal
 * seeds give equal runs, and on a tiny trace of conversations, knowing who holds what beats not
 * knowing it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/log.h"
#include "policies_bench.h"

#define TALKS 12
#define TURNS 6

static char path[64];
static FILE *file;

static void open_file(void)
{
    snprintf(path, sizeof path, "/tmp/policies_bench_XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    file = fdopen(fd, "w");
    assert_non_null(file);
}

static int scale = 1;

static bool read_file(pb_trace *t, int max_prompt)
{
    pb_trace_options o = PB_TRACE_OPTIONS;
    o.scale = scale;
    if (max_prompt)
        o.max_prompt = max_prompt;
    fclose(file);
    bool ok = pb_trace_read(path, &o, t);
    unlink(path);
    return ok;
}

/* TALKS conversations of TURNS turns, one turn of each after the other; each turn adds two blocks
 * of 512 tokens behind the one block that all share. */
static void conversations(pb_trace *t)
{
    open_file();
    for (int turn = 0; turn < TURNS; turn++)
        for (int talk = 0; talk < TALKS; talk++) {
            int blocks = 1 + 2 * (turn + 1);
            fprintf(file,
                    "{\"timestamp\": %d, \"input_length\": %d, \"output_length\": 20, "
                    "\"hash_ids\": [0",
                    turn * 3000 + talk * 250, blocks * 512 - 100);
            for (int i = 1; i < blocks; i++)
                fprintf(file, ", %d", talk * 100 + i);
            fprintf(file, "]}\n");
        }
    assert_true(read_file(t, 0));
}

static pb_result run(const pb_trace *t, const char *policy, pb_knowledge knowledge, uint64_t seed)
{
    pb_setup s;
    pb_result r;
    const pb_policy p = {policy, NULL};
    pb_setup_default(&s);
    s.engines = 5;
    s.window_s = 60;
    s.knowledge = knowledge;
    assert_true(pb_run(t, &s, &p, seed, &r));
    assert_int_equal(r.faults, 0);
    assert_int_equal(r.refused, 0);
    assert_int_equal(r.requests, t->rows_n);
    return r;
}

static void test_knowledge_beats_blindness(void **state)
{
    (void)state;
    pb_trace t;
    conversations(&t);
    assert_int_equal(t.rows_n, TALKS * TURNS);
    assert_int_equal(t.bucket_us, 250000);
    pb_result blind = run(&t, "round_robin", PB_EVENTS, 1);
    pb_result sees = run(&t, "prefix_seconds", PB_EVENTS, 1);
    pb_result remembers = run(&t, "prefix_seconds", PB_ROUTED, 1);
    pb_result unaware = run(&t, "prefix_seconds", PB_NONE, 1);
    assert_true(sees.metric[PB_CACHED] > blind.metric[PB_CACHED] + 0.2);
    assert_true(sees.metric[PB_CACHED] > unaware.metric[PB_CACHED] + 0.2);
    assert_true(remembers.metric[PB_CACHED] > unaware.metric[PB_CACHED] + 0.2);
    assert_true(sees.metric[PB_TTFT_MEAN] < blind.metric[PB_TTFT_MEAN]);
    /* each turn could find the one before: at most all but what is new */
    assert_true(sees.metric[PB_CACHED] > 0.6 && sees.metric[PB_CACHED] < 0.8);
    pb_trace_free(&t);
}

static void test_equal_seeds_give_equal_runs(void **state)
{
    (void)state;
    pb_trace t;
    conversations(&t);
    pb_result a = run(&t, "prefix_seconds", PB_EVENTS, 7);
    pb_result b = run(&t, "prefix_seconds", PB_EVENTS, 7);
    pb_result c = run(&t, "prefix_seconds", PB_EVENTS, 8);
    assert_memory_equal(&a, &b, sizeof a);
    assert_true(a.digest != c.digest);
    assert_true(a.metric[PB_TTFT_MEAN] != c.metric[PB_TTFT_MEAN]);
    pb_trace_free(&t);
}

/* The same blocks are the same tokens, others are not, and nobody shares what has no id. */
static void test_tokens_follow_the_ids(void **state)
{
    (void)state;
    pb_trace t;
    uint32_t *a = malloc(8192 * sizeof *a), *b = malloc(8192 * sizeof *b);
    assert_true(a && b);
    conversations(&t);
    pb_trace_tokens(&t, 0, a);         /* talk 0, turn 0 */
    pb_trace_tokens(&t, TALKS + 0, b); /* talk 0, turn 1 */
    assert_memory_equal(a, b, (size_t)t.rows[0].input * sizeof *a);
    pb_trace_tokens(&t, 1, b); /* talk 1 */
    assert_memory_equal(a, b, 512 * sizeof *a);
    assert_memory_not_equal(a + 512, b + 512, 16 * sizeof *a);
    pb_trace_free(&t);
    free(a);
    free(b);
}

/* Scaled, a prompt is longer and shares as much of itself as before. */
static void test_prompts_are_scaled(void **state)
{
    (void)state;
    pb_trace t;
    uint32_t *a = malloc(32768 * sizeof *a), *b = malloc(32768 * sizeof *b);
    assert_true(a && b);
    conversations(&t);
    int input = t.rows[0].input;
    pb_trace_free(&t);
    scale = 3;
    conversations(&t);
    scale = 1;
    assert_int_equal(t.rows[0].input, 3 * input);
    pb_trace_tokens(&t, 0, a);
    pb_trace_tokens(&t, TALKS + 0, b);
    assert_memory_equal(a, b, (size_t)t.rows[0].input * sizeof *a);
    pb_trace_tokens(&t, 1, b);
    assert_memory_equal(a, b, (size_t)3 * 512 * sizeof *a);
    assert_memory_not_equal(a + 3 * 512, b + 3 * 512, 16 * sizeof *a);
    pb_trace_free(&t);
    free(a);
    free(b);
}

static const char *const sessions =
    "{\"id\":\"a\",\"block_size\":64,\"tool_tokens\":256,\"system_tokens\":256,\"rows\":["
    "{\"t\":0.0,\"in\":1290,\"out\":5,\"keep\":0,\"add\":[[1,20]],\"think\":0.0},"
    "{\"t\":9.0,\"in\":1400,\"out\":5,\"keep\":18,\"add\":[[30,3]],\"think\":2.5},"
    "{\"sub\":{},\"rows\":[{\"t\":1,\"in\":640,\"out\":5,\"keep\":0,\"add\":[[900,10]]}]},"
    "{\"t\":9.0,\"in\":1500,\"out\":5,\"keep\":21,\"add\":[[40,2]],\"think\":500}]}\n"
    "{\"id\":\"b\",\"block_size\":64,\"tool_tokens\":256,\"system_tokens\":256,\"rows\":["
    "{\"t\":0.0,\"in\":1280,\"out\":5,\"keep\":0,\"add\":[[1,20]],\"think\":0.0}]}\n";

static void test_sessions_in_delta_form(void **state)
{
    (void)state;
    pb_trace t;
    uint32_t a[1500], b[1500];
    open_file();
    fputs(sessions, file);
    assert_true(read_file(&t, 0));
    assert_true(t.closed);
    assert_int_equal(t.rows_n, 5);
    assert_int_equal(t.sessions_n, 2);
    assert_int_equal(t.sessions[0].rows, 4);
    assert_int_equal(t.rows[1].blocks, 21); /* 18 kept, 3 new */
    assert_int_equal(t.rows[1].think_us, 2500000);
    assert_int_equal(t.rows[3].blocks, 23);         /* a sub-agent between them changes nothing */
    assert_int_equal(t.rows[3].think_us, 60000000); /* cut */
    pb_trace_tokens(&t, 0, a);
    pb_trace_tokens(&t, 1, b);
    assert_memory_equal(a, b, 18 * 64 * sizeof *a);
    assert_memory_not_equal(a + 18 * 64, b + 18 * 64, 16 * sizeof *a);
    /* of another session: half of tools and system prompt are everybody's, the rest is its own */
    pb_trace_tokens(&t, 4, b);
    assert_memory_equal(a, b, 4 * 64 * sizeof *a);
    assert_memory_not_equal(a + 4 * 64, b + 4 * 64, 16 * sizeof *a);
    pb_result r = run(&t, "prefix_seconds", PB_EVENTS, 1);
    assert_true(r.metric[PB_CACHED] > 0.3);
    assert_true(r.virtual_s > 62.5); /* it waits for its pauses */
    pb_trace_free(&t);
}

static void test_long_prompts_are_left_out(void **state)
{
    (void)state;
    pb_trace t;
    open_file();
    fputs(sessions, file);
    assert_true(read_file(&t, 1300));
    assert_int_equal(t.left_out, 2);
    assert_int_equal(t.rows_n, 3);
    pb_trace_free(&t);
}

static void test_what_is_no_trace_is_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "",
        "{",
        "[]\n",
        "{\"timestamp\": 0}\n",
        "{\"timestamp\": 0, \"input_length\": 513, \"output_length\": 1, \"hash_ids\": [1]}\n",
        "{\"block_size\":64,\"rows\":[{\"in\":64,\"out\":1,\"keep\":1,\"add\":[[1,1]]}]}\n",
        "{\"rows\":[]}\n"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        pb_trace t;
        open_file();
        fputs(bad[i], file);
        assert_false(read_file(&t, 0));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_knowledge_beats_blindness),
        cmocka_unit_test(test_equal_seeds_give_equal_runs),
        cmocka_unit_test(test_tokens_follow_the_ids),
        cmocka_unit_test(test_prompts_are_scaled),
        cmocka_unit_test(test_sessions_in_delta_form),
        cmocka_unit_test(test_long_prompts_are_left_out),
        cmocka_unit_test(test_what_is_no_trace_is_refused),
    };
    pl_log_init(PL_LOG_ERROR, 0);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
