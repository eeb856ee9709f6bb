/* The decision: choices, fallbacks, clamps, capacity, faults, strikes, rebuilding. */
#include "decider_test.h"

static void test_without_a_policy(void **state)
{
    begin(NULL);
    assert_int_equal(decide(), 0);
    assert_int_equal(out.kind, PL_DECIDED);
    assert_false(out.by_policy);
    assert_string_equal(out.reason, "least_loaded");
    assert_string_equal(pl_decider_policy_name(d), "least_loaded (built in)");
    ask.tried[ask.tried_n++] = workers[0];
    assert_int_equal(decide(), 1);
    atomic_store(&engines[1]->admin, PL_ENGINE_DRAINING);
    assert_int_equal(decide(), 2);
    end();
}

static void test_nobody(void **state)
{
    begin("return { api = 1, score = function() return 1 end }");
    for (int i = 0; i < WORKERS; i++)
        atomic_store(&engines[i]->health, PL_HEALTH_DOWN);
    assert_int_equal(decide(), -1);
    assert_int_equal(out.kind, PL_NO_WORKER);
    ask.model = NULL;
    decide();
    assert_int_equal(out.kind, PL_NO_WORKER);
    end();
}

static void test_score_and_route(void **state)
{
    begin("return { api = 1, name = 'most', score = function(req, w) return -w.inflight end }");
    assert_int_equal(decide(), 3);
    assert_true(out.by_policy);
    assert_string_equal(out.reason, "score");
    assert_string_equal(pl_decider_policy_name(d), "most");
    assert_int_equal(pl_decider_generation(d), 1);
    atomic_store(&workers[3]->inflight, 10); /* at its cap */
    assert_int_equal(decide(), 2);
    assert_int_equal(count(&stats.calls[PL_HOOK_SCORE]), 2);
    assert_int_equal(count(&stats.latency[PL_HOOK_SCORE].total), 2);
    end();
    begin("return { api = 1, route = function(req, fleet)\n"
          "if req.priority > 0 then return fleet[req.priority].index, 'prio.1' end end }");
    assert_int_equal(decide(), 0); /* route fell through, nothing to score */
    assert_false(out.by_policy);
    assert_int_equal(count(&stats.fallbacks), 0);
    ask.req.priority = 2;
    assert_int_equal(decide(), 2);
    assert_string_equal(out.reason, "prio.1");
    end();
}

static void test_ties_are_uniform_and_seeded(void **state)
{
    begin("return { api = 1, score = function() return 5 end }");
    int seen[WORKERS] = {0};
    for (int i = 0; i < 4000; i++) {
        pl_rng r = {(uint64_t)i};
        ask.strings.seed = pl_rng_next(&r);
        int first = decide();
        assert_int_equal(decide(), first);
        seen[first]++;
    }
    for (int i = 0; i < WORKERS; i++)
        assert_in_range(seen[i], 850, 1150);
    end();
}

static void test_temperature(void **state)
{
    begin("return { api = 1, temperature = 0.5, score = function(req, w) return w.inflight end }");
    int seen[WORKERS] = {0};
    for (int i = 0; i < 20000; i++) {
        pl_rng r = {(uint64_t)i};
        ask.strings.seed = pl_rng_next(&r);
        seen[decide()]++;
    }
    double sum = 0, p[WORKERS];
    for (int i = 0; i < WORKERS; i++)
        sum += p[i] = exp(-(i / 3.0) / 0.5);
    for (int i = 0; i < WORKERS; i++)
        assert_true(fabs(seen[i] / 20000.0 - p[i] / sum) < 0.015);
    end();
}

static void test_refusing_everyone_still_serves(void **state)
{
    begin("return { api = 1, score = function() return math.huge end }");
    assert_int_equal(decide(), 0);
    assert_false(out.by_policy);
    assert_int_equal(count(&stats.clamped[PL_HOOK_SCORE]), 1);
    assert_int_equal(ask.clamped, 1);
    end();
}

/* --- errors: the next in the chain decides --- */

static void falls_back(const char *policy, int hook, int worker, const char *reason)
{
    begin(policy);
    assert_int_equal(decide(), worker);
    assert_int_equal(out.kind, PL_DECIDED);
    if (strcmp(out.reason, reason) != 0 || count(&stats.errors[hook]) != 1)
        fail_msg("%s: reason %s, errors %lu", policy, out.reason,
                 (unsigned long)count(&stats.errors[hook]));
    end();
}

static void test_fallback_chain(void **state)
{
    falls_back("return { api = 1, score = function(req, w) return w.x end }", PL_HOOK_SCORE, 0,
               "least_loaded");
    falls_back("return { api = 1, score = function(req, w) return 0/0 end }", PL_HOOK_SCORE, 0,
               "least_loaded");
    falls_back("return { api = 1, score = function(req, w) return '1' end }", PL_HOOK_SCORE, 0,
               "least_loaded");
    const char *const bad[] = {"-1",        "4",   "0.5", "2 ^ 40",    "0/0",
                               "math.huge", "'w'", "{}",  "error('x')"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char text[256];
        snprintf(text, sizeof text,
                 "return { api = 1, route = function() return %s end,\n"
                 "score = function(req, w) return -w.inflight end }",
                 bad[i]);
        falls_back(text, PL_HOOK_ROUTE, 3, "score");
    }
    falls_back("return { api = 1, admit = function() return 99 end,\n"
               "route = function(req, fleet) return 2 end }",
               PL_HOOK_ADMIT, 2, "route");
}

static void test_ineligible_route(void **state)
{
    begin("return { api = 1, route = function() return 2 end }");
    atomic_store(&workers[2]->inflight, 10);
    assert_int_equal(decide(), 0);
    assert_int_equal(count(&stats.errors[PL_HOOK_ROUTE]), 1);
    assert_int_equal(count(&stats.fallbacks), 1);
    end();
}

/* --- admit --- */

static void admits(const char *answer, int kind, double arg, int clamped)
{
    char text[256];
    snprintf(text, sizeof text,
             "local pl = require 'perilune' return { api = 1, admit = function() return %s end }",
             answer);
    begin(text);
    decide();
    double got = kind == PL_ASK_QUEUE  ? out.wait_seconds
                 : kind == PL_ASK_SHED ? out.retry_after_seconds
                                       : out.shrink_max_tokens;
    if ((int)out.kind != kind || got != arg || ask.clamped != clamped)
        fail_msg("%s: kind %d, %g, clamped %d", answer, out.kind, got, ask.clamped);
    assert_int_equal(count(&stats.clamped[PL_HOOK_ADMIT]), clamped);
    assert_int_equal(count(&stats.calls[PL_HOOK_ADMIT]), 1);
    end();
}

static void test_admit(void **state)
{
    admits("pl.ADMIT", PL_DECIDED, -1, 0);
    admits("nil", PL_DECIDED, -1, 0);
    admits("pl.QUEUE, 5", PL_ASK_QUEUE, 5, 0);
    admits("pl.QUEUE", PL_ASK_QUEUE, 30, 0);
    admits("pl.QUEUE, 1e9", PL_ASK_QUEUE, 30, 1);
    admits("pl.SHED, 7", PL_ASK_SHED, 7, 0);
    admits("pl.SHED", PL_ASK_SHED, 1, 0);
    admits("pl.SHED, -7", PL_ASK_SHED, 0, 1);
    admits("pl.SHED, 1e9", PL_ASK_SHED, 3600, 1);
    admits("pl.SHRINK, 100.5", PL_DECIDED, 100, 0);
    admits("pl.SHRINK, 0", PL_DECIDED, 1, 1);
}

static void test_shrink_never_raises_and_survives_errors(void **state)
{
    begin("local pl = require 'perilune' return { api = 1,\n"
          "admit = function() return pl.SHRINK, 100 end,\n"
          "route = function(req) if req.priority == 1 then error('x') end end }");
    ask.req.max_tokens = 50;
    decide();
    assert_true(out.shrink_max_tokens == 50);
    assert_int_equal(ask.clamped, 1);
    ask.req.max_tokens = 500;
    ask.req.priority = 1;
    decide();
    assert_true(out.shrink_max_tokens == 100);
    assert_int_equal(out.kind, PL_DECIDED);
    end();
}

static void test_queue_ends(void **state)
{
    begin("local pl = require 'perilune' return { api = 1, admit = function() return pl.QUEUE, 20 "
          "end }");
    ask.req.waited_seconds = 25;
    decide();
    assert_true(out.kind == PL_ASK_QUEUE && out.wait_seconds == 5);
    ask.req.waited_seconds = 30;
    decide();
    assert_int_equal(out.kind, PL_ASK_SHED);
    end();
}

static void test_reason(void **state)
{
    const char *const cases[][2] = {{"'ok.a-b_1'", "ok.a-b_1"},
                                    {"''", "route"},
                                    {"'a b'", "route"},
                                    {"'a\\r\\nb'", "route"},
                                    {"7", "route"},
                                    {"('x'):rep(65)", "route"},
                                    {"nil", "route"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[256];
        snprintf(text, sizeof text, "return { api = 1, route = function() return 1, %s end }",
                 cases[i][0]);
        begin(text);
        assert_int_equal(decide(), 1);
        assert_string_equal(out.reason, cases[i][1]);
        bool fine = i == 0 || i == 1 || i == 6; /* an empty one is none */
        assert_int_equal(ask.clamped, fine ? 0 : 1);
        end();
    }
}

/* --- all busy --- */

static void fill_up(void)
{
    for (int i = 0; i < WORKERS; i++)
        atomic_store(&workers[i]->inflight, 10);
}

static void test_all_busy(void **state)
{
    begin("return { api = 1, score = function() return 1 end }");
    fill_up();
    decide();
    assert_true(out.kind == PL_ASK_QUEUE && out.wait_seconds == 30);
    assert_true(out.all_busy); /* who waits is woken in order, and does not ask by itself */
    ask.req.waited_seconds = 30;
    decide();
    assert_int_equal(out.kind, PL_ASK_SHED);
    assert_false(out.all_busy);
    end();
    begin("local pl = require 'perilune' return { api = 1, degrade = function(req, fault)\n"
          "if fault.kind == pl.ALL_BUSY and req.priority > 0 then return pl.QUEUE, 12 end\n"
          "return pl.REJECT, 4 end }");
    fill_up();
    decide();
    assert_true(out.kind == PL_ASK_SHED && out.retry_after_seconds == 4);
    ask.req.priority = 1;
    decide();
    assert_true(out.kind == PL_ASK_QUEUE && out.wait_seconds == 12 && out.all_busy);
    end();
    begin(NULL);
    fill_up();
    decide();
    assert_int_equal(out.kind, PL_ASK_QUEUE);
    end();
}

/* --- faults --- */

static int fault(int kind, bool budget, bool delta)
{
    double arg;
    struct pl_fault f = {.kind = kind, .budget_left = budget, .delta = delta};
    return pl_decide_fault(d, &ask, &f, &arg);
}

static void test_fault_defaults(void **state)
{
    begin(NULL);
    assert_int_equal(fault(PL_NO_SESSION_ENGINE, 1, 0), PL_PROCEED);
    assert_int_equal(fault(PL_OPEN_FAILED, 1, 0), PL_PROCEED);
    assert_int_equal(fault(PL_ENGINE_FAILED, 1, 0), PL_RETRY);
    assert_int_equal(fault(PL_ENGINE_FAILED, 0, 0), PL_REJECT);
    assert_int_equal(fault(PL_ENGINE_FAILED, 1, 1), PL_REJECT);
    assert_int_equal(fault(PL_BOUND_GONE, 1, 0), PL_REBIND);
    assert_int_equal(fault(PL_BOUND_GONE, 1, 1), PL_REJECT);
    assert_int_equal(fault(PL_ALL_BUSY, 1, 0), PL_QUEUE);
    assert_int_equal(fault(PL_INDEX_STALE, 1, 0), PL_PROCEED);
    end();
}

static void test_fault_answers(void **state)
{
    begin("local pl = require 'perilune' return { api = 1, degrade = function(req)\n"
          "if req.priority == 0 then return pl.REJECT elseif req.priority == 1 then return "
          "pl.RETRY end\n"
          "if req.priority == 2 then return 'x' end end }");
    assert_int_equal(fault(PL_ENGINE_FAILED, 1, 0), PL_REJECT);
    assert_int_equal(fault(PL_INDEX_STALE, 1, 0), PL_REJECT);
    ask.req.priority = 1;
    assert_int_equal(fault(PL_ENGINE_FAILED, 1, 0), PL_RETRY);
    assert_int_equal(count(&stats.errors[PL_HOOK_DEGRADE]), 0);
    assert_int_equal(fault(PL_ENGINE_FAILED, 0, 0), PL_REJECT); /* no budget: clamped */
    assert_int_equal(count(&stats.clamped[PL_HOOK_DEGRADE]), 1);
    assert_int_equal(fault(PL_ENGINE_FAILED, 1, 1), PL_REJECT); /* not allowed: an error */
    assert_int_equal(fault(PL_BOUND_GONE, 1, 0), PL_REBIND);
    assert_int_equal(count(&stats.errors[PL_HOOK_DEGRADE]), 2);
    ask.req.priority = 2;
    assert_int_equal(fault(PL_OPEN_FAILED, 1, 0), PL_PROCEED);
    assert_int_equal(count(&stats.errors[PL_HOOK_DEGRADE]), 3);
    end();
}

/* --- done, tick --- */

static void test_done_and_tick(void **state)
{
    begin("local pl = require 'perilune' local p = { api = 1 }\n"
          "local e = pl.worker_ewma('ttft', 10)\n"
          "function p.done(req, o, st) assert(o.status == 200 and o.generation == 3 and o.clamped "
          "== 2)\n"
          " assert(req:model() == 'llama') e:update(o, o.ttft_seconds) end\n"
          "function p.tick(now, st) assert(now == 12.5) pl.metric('ticked', now) end\n"
          "function p.score(req, w) return e:get(w, 9) end return p");
    assert_true(pl_decider_wants_done(d));
    ask.clamped = 2;
    struct pl_outcome o = {.status = 200, .slot = 2, .ttft_seconds = 0.5};
    pl_decide_done(d, &ask, &o);
    assert_int_equal(count(&stats.errors[PL_HOOK_DONE]), 0);
    pl_decider_tick(d, 12.5);
    assert_int_equal(count(&stats.errors[PL_HOOK_TICK]), 0);
    assert_int_equal(count(&stats.calls[PL_HOOK_TICK]), 1);
    assert_int_equal(decide(), 2);
    end();
}

/* --- strikes --- */

static void test_suspension_and_probe(void **state)
{
    begin("return { api = 1, name = 'shaky', score = function(req, w)\n"
          "if req.priority == 1 then error('no') end return -w.inflight end }");
    ask.req.priority = 1;
    for (int i = 0; i < 5; i++) {
        assert_int_equal(atomic_load(&stats.suspended), 0);
        assert_int_equal(decide(), 0);
        now_ns += 1000000000u;
    }
    assert_int_equal(atomic_load(&stats.suspended), 1);
    assert_string_equal(pl_decider_policy_name(d), "least_loaded (built in)");
    ask.req.priority = 0;
    now_ns -= 1000000000u;
    assert_int_equal(decide(), 0); /* the built-in choice, the policy is not asked */
    now_ns += 1000000000u;
    ask.req.priority = 1;
    assert_int_equal(decide(), 0); /* the probe fails: 2 s now */
    assert_int_equal(count(&stats.suspensions), 2);
    now_ns += 1500000000u;
    ask.req.priority = 0;
    assert_int_equal(decide(), 0);
    now_ns += 1000000000u;
    assert_int_equal(decide(), 3); /* the probe succeeds */
    assert_int_equal(atomic_load(&stats.suspended), 0);
    assert_string_equal(pl_decider_policy_name(d), "shaky");
    assert_int_equal(decide(), 3);
    assert_int_equal(count(&stats.errors[PL_HOOK_SCORE]), 6);
    end();
}

static void test_rare_errors_do_not_suspend(void **state)
{
    begin("return { api = 1, score = function() error('no') end }");
    for (int i = 0; i < 20; i++) {
        decide();
        now_ns += 3000000000u;
    }
    assert_int_equal(atomic_load(&stats.suspended), 0);
    assert_int_equal(count(&stats.fallbacks), 20);
    end();
}

static void test_broken_vm_is_rebuilt_from_its_carry(void **state)
{
    begin("return { api = 1, init = function(p, carry) return carry or { n = 0 } end,\n"
          "save = function(st) return st end,\n"
          "route = function(req, fleet, st)\n"
          "if req.priority == 1 then local t = {} for i = 1, 1e9 do t[i] = { i } end end\n"
          "st.n = st.n + 1 return math.min(st.n, 3) end }");
    assert_int_equal(decide(), 1);
    assert_int_equal(decide(), 2);
    now_ns += 11000000000u;
    pl_decider_tick(d, 1); /* saves n = 2 */
    ask.req.priority = 1;
    assert_int_equal(decide(), 0); /* the memory cap: least loaded serves */
    assert_true(pl_vm_broken(pl_decider_vm(d)));
    ask.req.priority = 0;
    assert_int_equal(decide(), 0);
    pl_decider_tick(d, 2);
    assert_int_equal(count(&stats.vm_rebuilds), 1);
    assert_int_equal(decide(), 3);
    end();
}

static void test_swap(void **state)
{
    begin("return { api = 1, score = function(req, w) return -w.inflight end }");
    assert_int_equal(decide(), 3);
    pl_vm *old = pl_decider_swap(
        d, ready_vm("return { api = 1, route = function() return 1 end }", shared), 2);
    assert_non_null(old);
    pl_vm_free(old);
    assert_int_equal(decide(), 1);
    assert_int_equal(pl_decider_generation(d), 2);
    end();
}

/* --- consistent choices --- */

static void test_ring(void **state)
{
    begin("local pl = require 'perilune' return { api = 1, route = function(req)\n"
          "return pl.ring(req:session_id()) end }");
    int at[200], seen[WORKERS] = {0}, moved = 0;
    for (int i = 0; i < WORKERS; i++)
        atomic_store(&workers[i]->inflight, 0);
    char key[16];
    for (int i = 0; i < 200; i++) {
        snprintf(key, sizeof key, "k%d", i);
        ask.strings.session_id = pl_str_c(key);
        seen[at[i] = decide()]++;
        assert_int_equal(decide(), at[i]);
    }
    for (int i = 0; i < WORKERS; i++)
        assert_in_range(seen[i], 25, 80);
    /* one worker out: only its keys move, and they come back with it */
    atomic_store(&engines[1]->health, PL_HEALTH_DOWN);
    for (int i = 0; i < 200; i++) {
        snprintf(key, sizeof key, "k%d", i);
        ask.strings.session_id = pl_str_c(key);
        int now = decide();
        assert_int_not_equal(now, 1);
        moved += now != at[i] && at[i] != 1;
    }
    assert_int_equal(moved, 0);
    atomic_store(&engines[1]->health, PL_HEALTH_UP);
    assert_int_equal(decide(), at[199]);
    /* bounded load: an overloaded worker passes its keys on */
    atomic_store(&workers[at[199]]->inflight, 9);
    assert_int_not_equal(decide(), at[199]);
    end();
}

static void test_rendezvous(void **state)
{
    begin("local pl = require 'perilune' return { api = 1, route = function(req)\n"
          "return pl.rendezvous(req:session_id()) end }");
    int at[200], seen[WORKERS] = {0};
    char key[16];
    for (int i = 0; i < 200; i++) {
        snprintf(key, sizeof key, "k%d", i);
        ask.strings.session_id = pl_str_c(key);
        seen[at[i] = decide()]++;
    }
    for (int i = 0; i < WORKERS; i++)
        assert_in_range(seen[i], 30, 75);
    atomic_store(&engines[2]->health, PL_HEALTH_DOWN);
    for (int i = 0; i < 200; i++) {
        snprintf(key, sizeof key, "k%d", i);
        ask.strings.session_id = pl_str_c(key);
        int now = decide();
        assert_true(at[i] == 2 ? now != 2 : now == at[i]);
    }
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_without_a_policy),
        cmocka_unit_test(test_nobody),
        cmocka_unit_test(test_score_and_route),
        cmocka_unit_test(test_ties_are_uniform_and_seeded),
        cmocka_unit_test(test_temperature),
        cmocka_unit_test(test_refusing_everyone_still_serves),
        cmocka_unit_test(test_fallback_chain),
        cmocka_unit_test(test_ineligible_route),
        cmocka_unit_test(test_admit),
        cmocka_unit_test(test_shrink_never_raises_and_survives_errors),
        cmocka_unit_test(test_queue_ends),
        cmocka_unit_test(test_reason),
        cmocka_unit_test(test_all_busy),
        cmocka_unit_test(test_fault_defaults),
        cmocka_unit_test(test_fault_answers),
        cmocka_unit_test(test_done_and_tick),
        cmocka_unit_test(test_suspension_and_probe),
        cmocka_unit_test(test_rare_errors_do_not_suspend),
        cmocka_unit_test(test_broken_vm_is_rebuilt_from_its_carry),
        cmocka_unit_test(test_swap),
        cmocka_unit_test(test_ring),
        cmocka_unit_test(test_rendezvous),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
