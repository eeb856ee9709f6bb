/* The simulated engine: cached tokens, timing of chunked prefill, queueing, preemption, aborts in
 * every state, and that equal input gives an equal log of events. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/rng.h"
#include "engine/sim.h"

typedef struct watch {
    pl_sim *sim;
    pl_sim_req *req;
    int id, tokens, finished, cached;
    int64_t first_us, last_us, end_us;
    pl_buf *log;
    int abort_at; /* aborts itself at this token; 0: never */
    struct watch *abort_other;
} watch;

static void note(watch *w, const char *what, int64_t now_us, int value)
{
    if (w->log)
        assert_int_equal(
            pl_buf_addf(w->log, "%lld %d %s %d\n", (long long)now_us, w->id, what, value), 0);
}

static void on_tokens(void *user, int64_t now_us, int from, int n)
{
    watch *w = user;
    assert_int_equal(from, w->tokens);
    assert_false(w->finished);
    if (!w->tokens)
        w->first_us = now_us;
    assert_true(now_us > w->last_us);
    w->last_us = now_us;
    w->tokens += n;
    note(w, "token", now_us, from);
    if (w->abort_at && w->tokens >= w->abort_at) {
        pl_sim_req *r = w->req;
        w->req = NULL;
        pl_sim_abort(w->sim, now_us, r);
    }
    if (w->abort_other && w->abort_other->req) {
        pl_sim_abort(w->sim, now_us, w->abort_other->req);
        w->abort_other->req = NULL;
    }
}

static void on_finish(void *user, int64_t now_us, pl_sim_finish why)
{
    watch *w = user;
    assert_non_null(w->req);
    assert_int_equal(why, PL_SIM_DONE);
    w->cached = pl_sim_cached_tokens(w->req);
    w->req = NULL;
    w->finished++;
    w->end_us = now_us;
    note(w, "end", now_us, w->cached);
}

static const pl_sim_events events = {on_tokens, on_finish};

/* A made-up timing whose terms can be told apart in sums. */
static pl_sim_options options(void)
{
    pl_sim_options o;
    pl_sim_options_default(&o);
    o.timing = (pl_timing){"test", 1000, 10, 0, 100, 0, 0};
    o.page_tokens = 4;
    o.pool_tokens = 400;
    o.max_running = 8;
    o.max_batch_tokens = 64;
    return o;
}

static pl_sim *engine(const pl_sim_options *o)
{
    pl_sim *s;
    pl_errbuf eb;
    assert_int_equal(pl_sim_new(o, &s, &eb), 0);
    return s;
}

static void fill(uint32_t *t, int from, int n, uint32_t salt)
{
    for (int i = from; i < n; i++)
        t[i] = salt * 1000003u + (uint32_t)i;
}

static int submit(watch *w, int64_t at, const uint32_t *t, int n, int out, int priority)
{
    return pl_sim_submit(w->sim, at, t, n, out, priority, 7, &events, w, &w->req);
}

/* Runs until idle and returns the time. */
static int64_t drain(pl_sim *s)
{
    int64_t now = 0, next;
    while ((next = pl_sim_next_us(s)) != INT64_MAX) {
        assert_true(next >= now);
        now = next;
        pl_sim_step(s, now);
        pl_sim_check(s);
    }
    return now;
}

static int run(pl_sim *s, int64_t at, const uint32_t *t, int n, int out)
{
    watch w = {.sim = s, .last_us = -1};
    assert_int_equal(submit(&w, at, t, n, out, 0), 0);
    drain(s);
    assert_int_equal(w.finished, 1);
    assert_int_equal(w.tokens, out);
    return w.cached;
}

static void test_cached_tokens(void **state)
{
    pl_sim_options o = options();
    pl_sim *s = engine(&o);
    uint32_t t[200];
    fill(t, 0, 200, 1);
    assert_int_equal(run(s, 0, t, 40, 5), 0);
    /* The same again: all but the last token, in whole pages. */
    assert_int_equal(run(s, 0, t, 40, 5), 36);
    assert_int_equal(run(s, 0, t, 41, 5), 40);
    /* 39 tokens: 38 may hit, 36 in whole pages. */
    assert_int_equal(run(s, 0, t, 39, 1), 36);
    /* The next turn: the prompt, the answer, new text. The answer's last token was never computed:
     * 40 + 4 tokens are cached, 44 in whole pages. */
    for (int i = 0; i < 5; i++)
        t[40 + i] = pl_sim_output_token(7, i);
    assert_int_equal(run(s, 0, t, 60, 2), 44);
    /* Another continuation shares only what it shares. */
    t[30] = 1;
    assert_int_equal(run(s, 0, t, 60, 2), 28);
    pl_sim_stats st;
    pl_sim_stats_of(s, &st);
    assert_int_equal(st.cached_tokens, 36 + 40 + 36 + 44 + 28);
    assert_int_equal(st.prompt_tokens, 40 + 40 + 41 + 39 + 60 + 60);
    assert_int_equal(st.used_tokens, 0);
    assert_int_equal(st.evictable_tokens + st.available_tokens, 400);
    pl_sim_flush_cache(s);
    assert_int_equal(run(s, 0, t, 40, 1), 0);
    pl_sim_free(s);
    o.prefix_cache = false;
    s = engine(&o);
    run(s, 0, t, 40, 5);
    assert_int_equal(run(s, 0, t, 40, 5), 0);
    pl_sim_stats_of(s, &st);
    assert_int_equal(st.available_tokens, 400);
    pl_sim_free(s);
}

static void test_chunked_prefill_times(void **state)
{
    pl_sim_options o = options();
    o.timing.api_us = 500;
    pl_sim *s = engine(&o);
    uint32_t t[200];
    fill(t, 0, 200, 2);
    watch w = {.sim = s, .last_us = -1};
    assert_int_equal(submit(&w, 1000, t, 150, 3, 0), 0);
    assert_int_equal(pl_sim_next_us(s), 1500);
    drain(s);
    /* 150 tokens at 64 a step: 64, 64, 22; each step 1000 + 10 a token; then two decodes. */
    assert_int_equal(w.first_us, 1500 + 3 * 1000 + 150 * 10);
    assert_int_equal(w.end_us, w.first_us + 2 * 1100);
    /* A decoding request keeps its token a step while another prompt is chunked beside it. */
    watch a = {.sim = s, .last_us = -1}, b = {.sim = s, .last_us = -1};
    fill(t, 0, 200, 3);
    submit(&a, 100000, t, 4, 20, 0);
    pl_sim_step(s, 101541); /* 500 + 1040: its first token is out */
    assert_int_equal(a.tokens, 1);
    fill(t, 0, 200, 4);
    submit(&b, 101541, t, 126, 1, 0);
    drain(s);
    /* b is ready at 102041, inside the step that ends at 102640; then 63 tokens a step beside a's
     * one: 2 steps of 1000 + 630 + 100. */
    assert_int_equal(b.first_us, 102640 + 2 * 1730);
    assert_int_equal(a.tokens, 20);
    pl_sim_free(s);
}

static void test_prefill_only(void **state)
{
    pl_sim_options o = options();
    pl_sim *s = engine(&o);
    uint32_t t[30];
    fill(t, 0, 30, 5);
    assert_int_equal(run(s, 0, t, 30, 0), 0);
    assert_int_equal(run(s, 0, t, 30, 0), 28);
    pl_sim_free(s);
}

static void test_queue_when_full(void **state)
{
    pl_sim_options o = options();
    pl_sim *s = engine(&o);
    uint32_t t[400];
    watch w[4];
    for (int i = 0; i < 4; i++) {
        fill(t, 0, 400, 10 + (uint32_t)i);
        w[i] = (watch){.sim = s, .last_us = -1, .id = i};
        assert_int_equal(submit(&w[i], 0, t, 180, 4, i == 3 ? 1 : 0), 0);
    }
    pl_sim_stats st;
    pl_sim_step(s, 10);
    pl_sim_stats_of(s, &st);
    /* 184 tokens each in a pool of 400: two fit. One prefills at a time, so one is admitted. */
    assert_int_equal(st.waiting, 3);
    assert_int_equal(st.waiting_tokens, 3 * 180);
    assert_true(pl_sim_is_running(w[3].req)); /* the higher priority */
    assert_false(pl_sim_is_running(w[0].req));
    drain(s);
    for (int i = 0; i < 4; i++)
        assert_int_equal(w[i].finished, 1);
    assert_true(w[3].first_us < w[0].first_us && w[0].first_us < w[1].first_us &&
                w[1].first_us < w[2].first_us);
    pl_sim_stats_of(s, &st);
    assert_int_equal(st.waiting_tokens, 0);
    assert_true(st.evicted_tokens >= 4 * 180 - 400);
    pl_sim_free(s);
}

static void test_limits(void **state)
{
    pl_sim_options o = options();
    o.max_waiting = 2;
    pl_sim *s = engine(&o);
    uint32_t t[401];
    fill(t, 0, 401, 1);
    watch w = {.sim = s, .last_us = -1};
    assert_int_equal(submit(&w, 0, t, 401, 0, 0), PL_ELIMIT);
    assert_int_equal(submit(&w, 0, t, 399, 2, 0), PL_ELIMIT);
    assert_int_equal(submit(&w, 0, t, 0, 2, 0), PL_EINVALID);
    assert_int_equal(submit(&w, 0, t, 1, -1, 0), PL_EINVALID);
    assert_true(pl_sim_fits(s, 398, 2));
    assert_false(pl_sim_fits(s, 1, INT32_MAX));
    watch a = w, b = w;
    assert_int_equal(submit(&a, 0, t, 10, 1, 0), 0);
    assert_int_equal(submit(&b, 0, t, 10, 1, 0), 0);
    assert_int_equal(submit(&w, 0, t, 10, 1, 0), PL_EBUSY);
    drain(s);
    assert_int_equal(a.finished + b.finished, 2);
    /* The whole pool for one request. */
    assert_int_equal(run(s, 0, t, 200, 200), 8);
    pl_sim_free(s);
    pl_errbuf eb;
    o.page_tokens = 0;
    assert_int_equal(pl_sim_new(&o, &s, &eb), PL_EINVALID);
    assert_null(s);
    o = options();
    o.timing.base_us = -1;
    assert_int_equal(pl_sim_new(&o, &s, &eb), PL_EINVALID);
}

/* Outputs outgrow the pool: the one of the lowest priority that came last gives way, and each still
 * gets every token exactly once, in order. */
static void test_preemption(void **state)
{
    pl_sim_options o = options();
    pl_sim *s = engine(&o);
    uint32_t t[20];
    watch w[3];
    for (int i = 0; i < 3; i++) {
        fill(t, 0, 20, 20 + (uint32_t)i);
        w[i] = (watch){.sim = s, .last_us = -1, .id = i};
        assert_int_equal(submit(&w[i], 0, t, 20, 200, i == 2 ? 5 : 0), 0);
    }
    drain(s);
    pl_sim_stats st;
    pl_sim_stats_of(s, &st);
    assert_true(st.preempted > 0);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(w[i].finished, 1);
        assert_int_equal(w[i].tokens, 200);
    }
    assert_true(w[2].end_us < w[0].end_us && w[0].end_us < w[1].end_us);
    assert_int_equal(st.output_tokens, 600);
    pl_sim_free(s);
}

static void test_abort(void **state)
{
    pl_sim_options o = options();
    o.timing.api_us = 100;
    o.max_running = 2;
    pl_sim *s = engine(&o);
    uint32_t t[200];
    watch w[5];
    for (int i = 0; i < 5; i++) {
        fill(t, 0, 200, 30 + (uint32_t)i);
        w[i] = (watch){.sim = s, .last_us = -1, .id = i};
        assert_int_equal(submit(&w[i], 0, t, 100, 10, 0), 0);
    }
    pl_sim_abort(s, 50, w[4].req); /* arriving */
    pl_sim_check(s);
    pl_sim_step(s, 100);
    pl_sim_abort(s, 200, w[3].req); /* waiting */
    pl_sim_check(s);
    pl_sim_step(s, 1740);            /* 64 of 100 tokens are computed */
    pl_sim_abort(s, 1800, w[0].req); /* in its prefill */
    pl_sim_check(s);
    while (w[1].tokens < 3)
        pl_sim_step(s, pl_sim_next_us(s));
    pl_sim_abort(s, pl_sim_next_us(s) - 1, w[1].req); /* while it decodes */
    pl_sim_check(s);
    drain(s);
    assert_int_equal(w[2].finished, 1);
    for (int i = 0; i < 5; i++)
        assert_int_equal(w[i].finished, i == 2);
    pl_sim_stats st;
    pl_sim_stats_of(s, &st);
    assert_int_equal(st.aborted, 4);
    assert_int_equal(st.finished, 1);
    assert_int_equal(st.running + st.waiting, 0);
    assert_int_equal(st.used_tokens, 0);
    /* What was computed stays: 64 of 100 tokens of the one that was in its prefill. */
    fill(t, 0, 200, 30);
    assert_int_equal(run(s, 0, t, 100, 1), 64);
    pl_sim_free(s);
}

static void test_abort_from_callbacks(void **state)
{
    pl_sim_options o = options();
    pl_sim *s = engine(&o);
    uint32_t t[20];
    for (int at = 1; at <= 5; at += 4) { /* at its first and at its very last token */
        watch a = {.sim = s, .last_us = -1, .abort_at = at}, b = {.sim = s, .last_us = -1},
              c = {.sim = s, .last_us = -1, .abort_other = &b};
        fill(t, 0, 20, 40);
        submit(&a, 0, t, 20, 5, 0);
        fill(t, 0, 20, 41);
        submit(&c, 0, t, 20, 5, 0);
        fill(t, 0, 20, 42);
        submit(&b, 0, t, 20, 5, 0); /* next in the running list when c's callback aborts it */
        drain(s);
        assert_int_equal(a.finished, 0);
        assert_int_equal(a.tokens, at);
        assert_int_equal(b.finished, 0);
        assert_int_equal(b.tokens, 0);
        assert_int_equal(c.finished, 1);
    }
    pl_sim_free(s);
}

/* A random load with aborts; returns its log. */
static pl_buf load(uint64_t seed)
{
    enum { N = 400 };
    pl_buf log = {0};
    pl_sim_options o = options();
    o.timing.api_us = 300;
    pl_sim *s = engine(&o);
    pl_rng rng = {seed};
    watch *w = calloc(N, sizeof *w);
    uint32_t t[200];
    int64_t now = 0;
    for (int i = 0; i < N; i++) {
        now += pl_rng_below(&rng, 4000);
        pl_sim_step(s, now);
        int keep = (int)pl_rng_below(&rng, 100), n = keep + 1 + (int)pl_rng_below(&rng, 60);
        fill(t, 0, keep, 50 + pl_rng_below(&rng, 4));
        fill(t, keep, n, 100 + (uint32_t)i);
        w[i] = (watch){.sim = s, .last_us = -1, .id = i, .log = &log};
        assert_int_equal(
            submit(&w[i], now, t, n, (int)pl_rng_below(&rng, 90), (int)pl_rng_below(&rng, 3)), 0);
        watch *victim = &w[pl_rng_below(&rng, (uint32_t)i + 1)];
        if (victim->req && pl_rng_below(&rng, 3) == 0) {
            pl_sim_abort(s, now, victim->req);
            victim->req = NULL;
        }
        if (pl_rng_below(&rng, 100) == 0)
            pl_sim_flush_cache(s);
        pl_sim_check(s);
    }
    drain(s);
    pl_sim_stats st;
    pl_sim_stats_of(s, &st);
    assert_int_equal(st.finished + st.aborted, N);
    assert_int_equal(st.used_tokens, 0);
    assert_true(st.cached_tokens > 0 && st.preempted > 0 && st.evicted_tokens > 0);
    pl_sim_free(s);
    free(w);
    return log;
}

static void test_deterministic(void **state)
{
    for (uint64_t seed = 1; seed <= 5; seed++) {
        pl_buf a = load(seed), b = load(seed);
        assert_true(a.n > 1000);
        assert_true(pl_str_eq(pl_buf_str(&a), pl_buf_str(&b)));
        pl_buf_free(&a);
        pl_buf_free(&b);
    }
}

/* A caller that moves its clock in large strides gets the same events as one that follows each. */
static void test_strides(void **state)
{
    pl_sim_options o = options();
    pl_buf log[2] = {{0}};
    for (int stride = 0; stride < 2; stride++) {
        pl_sim *s = engine(&o);
        watch w[3];
        uint32_t t[100];
        for (int i = 0; i < 3; i++) {
            fill(t, 0, 100, 60 + (uint32_t)i);
            w[i] = (watch){.sim = s, .last_us = -1, .id = i, .log = &log[stride]};
            submit(&w[i], 10, t, 100, 20, 0);
        }
        if (stride)
            pl_sim_step(s, 10000000);
        else
            drain(s);
        assert_int_equal(pl_sim_next_us(s), INT64_MAX);
        pl_sim_free(s);
    }
    assert_true(pl_str_eq(pl_buf_str(&log[0]), pl_buf_str(&log[1])));
    pl_buf_free(&log[0]);
    pl_buf_free(&log[1]);
}

/* An engine with requests in every state is freed without a leak. */
static void test_free_midway(void **state)
{
    pl_sim_options o = options();
    o.max_running = 1;
    o.timing.api_us = 10;
    pl_sim *s = engine(&o);
    uint32_t t[50];
    watch w[3];
    for (int i = 0; i < 3; i++) {
        fill(t, 0, 50, 70);
        w[i] = (watch){.sim = s, .last_us = -1};
        submit(&w[i], i * 12, t, 50, 20, 0);
        pl_sim_step(s, i * 12);
    }
    pl_sim_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cached_tokens), cmocka_unit_test(test_chunked_prefill_times),
        cmocka_unit_test(test_prefill_only),  cmocka_unit_test(test_queue_when_full),
        cmocka_unit_test(test_limits),        cmocka_unit_test(test_preemption),
        cmocka_unit_test(test_abort),         cmocka_unit_test(test_abort_from_callbacks),
        cmocka_unit_test(test_deterministic), cmocka_unit_test(test_strides),
        cmocka_unit_test(test_free_midway),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
