/* Decisions that are only looked at: they choose as real ones do, show the costs, and nothing of
 * them is left: no count, no strike, no probe used up. */
#include "decider_test.h"

#include "policy/dry.h"

static pl_dry dry;

static int look(void)
{
    assert_int_equal(pl_decide_dry(d, &ask, &dry), 0);
    return dry.decision.worker ? dry.decision.worker->slot : -1;
}

static void untouched(void)
{
    static pl_policy_stats none;
    assert_memory_equal(&stats, &none, sizeof none);
}

static void test_as_a_real_one(void **state)
{
    begin("return { api = 1, name = 'most', score = function(req, w) return -w.inflight end }");
    assert_int_equal(look(), 3);
    assert_string_equal(dry.decision.reason, "score");
    for (int i = 0; i < WORKERS; i++)
        assert_true(dry.cost[i] == -i);
    struct pl_worker w;
    pl_decide_shown(d, &ask, 2, &w);
    assert_int_equal(w.slot, 2);
    assert_true(w.inflight == 2 && w.eligible && w.index == 2);
    untouched();
    assert_int_equal(decide(), 3);
    assert_int_equal(count(&stats.calls[PL_HOOK_SCORE]), 1);
    end();
}

static void test_costs_of_route(void **state)
{
    begin("return { api = 1, route = function(req, fleet)\n"
          "for i = 0, 2 do fleet.cost[i] = 10 - i end return 1 end }");
    assert_int_equal(look(), 1);
    assert_true(dry.cost[0] == 10 && dry.cost[2] == 8);
    assert_true(isnan(dry.cost[3])); /* nobody has said */
    end();
    begin("return { api = 1, route = function(req, fleet) return 1 end,\n"
          "score = function(req, w) return w.inflight * 2 end }");
    assert_int_equal(look(), 1);
    assert_string_equal(dry.decision.reason, "route");
    assert_true(dry.cost[3] == 6); /* what it would have been without route */
    untouched();
    end();
}

static void test_errors_do_not_count(void **state)
{
    begin("return { api = 1, name = 'shaky', score = function(req, w)\n"
          "if req.priority == 1 then error('no') end return -w.inflight end }");
    ask.req.priority = 1;
    for (int i = 0; i < 20; i++) {
        assert_int_equal(look(), 0); /* least loaded */
        assert_true(dry.failed);
        assert_int_equal(dry.hook, PL_HOOK_SCORE);
        assert_non_null(strstr(dry.error.message, "no"));
        assert_null(dry.cost);
    }
    untouched();
    assert_string_equal(pl_decider_policy_name(d), "shaky");
    ask.req.priority = 0;
    assert_int_equal(look(), 3);
    assert_false(dry.failed);
    assert_int_equal(decide(), 3);
    end();
}

static void test_a_suspended_policy_is_not_probed(void **state)
{
    begin("return { api = 1, name = 'shaky', score = function(req, w)\n"
          "if req.priority == 1 then error('no') end return -w.inflight end }");
    ask.req.priority = 1;
    for (int i = 0; i < 5; i++)
        decide();
    assert_int_equal(atomic_load(&stats.suspended), 1);
    assert_int_equal(look(), 0);
    assert_true(dry.suspended);
    assert_null(dry.cost);
    now_ns += 1500000000u; /* it is to be probed now, and still is after that was looked at */
    assert_int_equal(look(), 0);
    assert_false(dry.suspended);
    assert_true(dry.failed);
    assert_int_equal(count(&stats.suspensions), 1);
    ask.req.priority = 0;
    assert_int_equal(look(), 3);
    assert_int_equal(atomic_load(&stats.suspended), 1);
    assert_int_equal(decide(), 3);
    assert_int_equal(atomic_load(&stats.suspended), 0);
    end();
}

static void test_nothing_is_shared(void **state)
{
    begin("local pl = require 'perilune'\n"
          "local n = pl.counter('asked')\n"
          "return { api = 1, score = function(req, w) n:add(1) return n:get() end }");
    for (int i = 0; i < 3; i++) {
        look();
        for (int k = 0; k < WORKERS; k++)
            assert_true(dry.cost[k] == 0);
    }
    decide();
    look();
    assert_true(dry.cost[0] == WORKERS);
    end();
}

static void test_without_a_policy_and_without_workers(void **state)
{
    begin(NULL);
    assert_int_equal(look(), 0);
    assert_true(dry.suspended);
    end();
    begin("return { api = 1, score = function(req, w) return 1 end }");
    for (int i = 0; i < WORKERS; i++)
        atomic_store(&engines[i]->health, PL_HEALTH_DOWN);
    assert_int_equal(look(), -1);
    assert_int_equal(dry.decision.kind, PL_NO_WORKER);
    assert_null(dry.cost);
    struct pl_worker w;
    pl_decide_shown(d, &ask, 0, &w);
    assert_int_equal(w.why, PL_WHY_UNHEALTHY);
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_as_a_real_one, setup, teardown),
        cmocka_unit_test_setup_teardown(test_costs_of_route, setup, teardown),
        cmocka_unit_test_setup_teardown(test_errors_do_not_count, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_suspended_policy_is_not_probed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_nothing_is_shared, setup, teardown),
        cmocka_unit_test_setup_teardown(test_without_a_policy_and_without_workers, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
