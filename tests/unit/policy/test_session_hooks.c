/* Sessions in a decision: the binding as an answer, spilling, workers that can open one; the hooks
 * session, retain and expire with their clamps and errors. */
#include "decider_test.h"

/* The request names a session that is bound to worker i; -1: to none. */
static void name_session(int i)
{
    ask.session = (struct pl_session){.ttl_seconds = 300,
                                      .held_tokens = -1,
                                      .id_hash = 77,
                                      .parent_hash = 78,
                                      .event = PL_SESSION_TURN,
                                      .turn = 4,
                                      .kind = PL_ROUTER_ONLY,
                                      .bound_slot = i,
                                      .bound_generation = i < 0 ? 0 : 3,
                                      .bound_index = -7, /* the decider's to fill */
                                      .has_parent = true};
    ask.session_parent = PL_STR("lead");
    ask.strings.session_id = PL_STR("sub");
    ask.strings.tenant = PL_STR("acme");
    ask.pin = i < 0 ? NULL : workers[i];
}

static void decides(int kind, int worker, const char *reason)
{
    int got = decide();
    if ((int)out.kind != kind || got != worker || (worker >= 0 && strcmp(out.reason, reason) != 0))
        fail_msg("wanted kind %d, worker %d, %s; got %d, %d, %s", kind, worker, reason, out.kind,
                 got, out.reason);
}

static bool nobody_can(void *ctx, const pl_worker_state *w)
{
    return false;
}

static bool from_ctx(void *ctx, const pl_worker_state *w)
{
    return w->slot >= *(int *)ctx;
}

/* --- the binding --- */

static void test_a_bound_session_stays(void **state)
{
    begin("return { api = 1, route = function() error('not asked') end,\n"
          "score = function() error('not asked') end }");
    name_session(3);
    decides(PL_DECIDED, 3, "session");
    assert_false(out.by_policy);
    ask.pin_must = true;
    decides(PL_DECIDED, 3, "session");
    assert_int_equal(count(&stats.errors[PL_HOOK_ROUTE]), 0);
    assert_int_equal(count(&stats.calls[PL_HOOK_ROUTE]), 0);
    end();
    begin(NULL);
    name_session(2);
    decides(PL_DECIDED, 2, "session");
    end();
}

static void test_admit_is_asked_for_bound_sessions(void **state)
{
    begin("local pl = require 'perilune' return { api = 1, admit = function(req, fleet)\n"
          "assert(fleet.n == 4 and req.session.bound_index == 3)\n"
          "if req.priority == 1 then return pl.SHED, 9 end\n"
          "if req.priority == 2 then return pl.QUEUE, 5 end\n"
          "if req.priority == 3 then error('no') end\n"
          "return pl.SHRINK, 64 end, route = function() return 0 end }");
    name_session(3);
    decides(PL_DECIDED, 3, "session");
    assert_true(out.shrink_max_tokens == 64);
    ask.req.priority = 1;
    decide();
    assert_true(out.kind == PL_ASK_SHED && out.retry_after_seconds == 9);
    ask.req.priority = 2;
    decide();
    assert_true(out.kind == PL_ASK_QUEUE && out.wait_seconds == 5 && !out.all_busy);
    ask.req.priority = 3;
    decides(PL_DECIDED, 3, "session");
    assert_int_equal(count(&stats.errors[PL_HOOK_ADMIT]), 1);
    assert_int_equal(count(&stats.calls[PL_HOOK_ROUTE]), 0);
    end();
}

static void test_soft_affinity_leaves_it_to_the_policy(void **state)
{
    begin("return { api = 1, affinity = 'soft', route = function(req, fleet)\n"
          "local s = req.session\n"
          "if req.priority == 1 then return 1, 'moved' end\n"
          "if req.priority == 2 then error('no') end\n"
          "if req.priority == 3 then return nil end\n"
          "return s.bound_index, 'kept' end }");
    name_session(3);
    decides(PL_DECIDED, 3, "kept");
    ask.req.priority = 1;
    decides(PL_DECIDED, 1, "moved");
    ask.req.priority = 2; /* an error: where it is bound */
    decides(PL_DECIDED, 3, "session");
    ask.req.priority = 3; /* no opinion: the same */
    decides(PL_DECIDED, 3, "session");
    ask.req.priority = 1;
    ask.pin_must = true; /* an engine's session is never elsewhere */
    decides(PL_DECIDED, 3, "session");
    end();
}

static void test_spill_when_the_bound_worker_is_full(void **state)
{
    begin("return { api = 1, route = function(req, fleet)\n"
          "if req.priority == 1 then return 1, 'mine' end\n"
          "if req.priority == 2 then return 1 end end,\n"
          "score = function(req, w) if req.priority == 3 then error('no') end return -w.inflight "
          "end }");
    name_session(3);
    atomic_store(&workers[3]->inflight, 10);
    decides(PL_DECIDED, 2, "session_spill"); /* by score */
    assert_true(out.spilled);
    ask.req.priority = 1;
    decides(PL_DECIDED, 1, "mine");
    assert_true(out.spilled);
    ask.req.priority = 2;
    decides(PL_DECIDED, 1, "session_spill");
    ask.req.priority = 3; /* least loaded */
    decides(PL_DECIDED, 0, "session_spill");
    assert_true(out.spilled);
    ask.req.priority = 0;
    atomic_store(&workers[3]->inflight, 9);
    decides(PL_DECIDED, 3, "session");
    assert_false(out.spilled);
    atomic_store(&workers[3]->inflight, 10);
    ask.pin_must = true;
    decide();
    assert_true(out.kind == PL_ASK_QUEUE && out.all_busy && out.wait_seconds == 30);
    for (int i = 0; i < WORKERS; i++)
        atomic_store(&workers[i]->inflight, 10);
    ask.pin_must = false;
    decide();
    assert_true(out.kind == PL_ASK_QUEUE && out.all_busy && !out.spilled);
    end();
}

static void test_what_waits_for_its_worker_asks_degrade(void **state)
{
    begin("local pl = require 'perilune' return { api = 1, degrade = function(req, fault)\n"
          "assert(fault.kind == pl.ALL_BUSY and fault.delta and req.session.delta)\n"
          "return pl.REJECT, 4 end }");
    name_session(3);
    ask.session.delta = true;
    ask.pin_must = true;
    atomic_store(&workers[3]->inflight, 10);
    decide();
    assert_true(out.kind == PL_ASK_SHED && out.retry_after_seconds == 4);
    end();
}

static void test_a_binding_that_is_lost(void **state)
{
    begin("return { api = 1, score = function(req, w) return w.inflight end }");
    name_session(3);
    atomic_store(&engines[3]->admin, PL_ENGINE_DRAINING);
    decides(PL_DECIDED, 0, "score"); /* as if it were not bound */
    ask.pin_must = true;
    decides(PL_PIN_LOST, -1, "");
    atomic_store(&engines[3]->admin, PL_ENGINE_ACTIVE);
    decides(PL_DECIDED, 3, "session");
    ask.tried[ask.tried_n++] = workers[3];
    decides(PL_PIN_LOST, -1, "");
    ask.tried_n = 0;
    ask.pin = NULL; /* its engine left */
    decides(PL_PIN_LOST, -1, "");
    ask.pin_must = false;
    decides(PL_DECIDED, 0, "score");
    /* it does not serve this model */
    pl_model two = {.id = PL_STR_INIT("other"), .workers = workers, .workers_n = 2};
    ask.model = &two;
    ask.pin = workers[3];
    decides(PL_DECIDED, 0, "score");
    ask.pin_must = true;
    decides(PL_PIN_LOST, -1, "");
    ask.model = NULL;
    decides(PL_PIN_LOST, -1, "");
    end();
}

/* --- wants_open --- */

static void test_only_those_who_can_open(void **state)
{
    int from = 2;
    begin("local pl = require 'perilune' return { api = 1, score = function(req, w)\n"
          "assert(w.slot >= 2) return w.inflight end,\n"
          "admit = function(req, fleet) assert(fleet.eligible == 2)\n"
          "assert(fleet[0].why == pl.WHY_NO_SESSIONS and not fleet[0].eligible) end }");
    name_session(-1);
    ask.session.event = PL_SESSION_OPEN;
    ask.wants_open = true;
    ask.can_open = from_ctx;
    ask.can_open_ctx = &from;
    decides(PL_DECIDED, 2, "score");
    assert_int_equal(count(&stats.errors[PL_HOOK_ADMIT]), 0);
    from = 3; /* the only one that can is full: it is waited for */
    atomic_store(&workers[3]->inflight, 10);
    decide();
    assert_true(out.kind == PL_ASK_QUEUE && out.all_busy);
    ask.can_open = nobody_can;
    decides(PL_NO_SESSION_WORKER, -1, "");
    for (int i = 0; i < WORKERS; i++)
        atomic_store(&engines[i]->health, PL_HEALTH_DOWN);
    decides(PL_NO_WORKER, -1, "");
    end();
    begin(NULL);
    name_session(-1);
    ask.wants_open = true;
    ask.can_open = nobody_can;
    decides(PL_NO_SESSION_WORKER, -1, "");
    ask.can_open = from_ctx;
    ask.can_open_ctx = &from;
    decides(PL_DECIDED, 3, "least_loaded");
    ask.wants_open = false; /* not asked then */
    decides(PL_DECIDED, 0, "least_loaded");
    /* what is on its worker already needs no room there */
    name_session(1);
    ask.pin_must = ask.wants_open = true;
    decides(PL_DECIDED, 1, "session");
    end();
}

/* --- req.session --- */

static void test_what_hooks_see_of_the_session(void **state)
{
    begin("local pl = require 'perilune' local p = { api = 1, affinity = 'soft' }\n"
          "local function look(req, index)\n"
          "  local s = req.session\n"
          "  if req.priority == 1 then assert(s == nil) return end\n"
          "  assert(s.event == pl.SESSION_TURN and s.kind == pl.ROUTER_ONLY and s.turn == 4)\n"
          "  assert(s:id() == 'sub' and s:parent_id() == 'lead' and req:session_id() == 'sub')\n"
          "  assert(s.bound_index == index and s.bound_slot == 2 and s.has_parent)\n"
          "end\n"
          "function p.admit(req, fleet) look(req, 2)\n"
          "  local s = req.session\n"
          "  if s then assert(s:is_bound_to(fleet[2]) and not s:is_bound_to(fleet[1])) end end\n"
          "function p.session(req, s) look(req, -1) assert(s:id() == 'sub') end\n"
          "function p.route(req) look(req, 2) end\n"
          "function p.score(req, w) look(req, 2) return w.inflight end\n"
          "function p.retain(req, w) look(req, w.slot == 2 and 0 or -1)\n"
          "  assert(w.index == 0 and (w:name() == '127.0.0.1:9002') == (w.slot == 2)) end\n"
          "function p.degrade(req) look(req, -1) end\n"
          "function p.done(req) look(req, -1) end return p");
    struct pl_outcome outcome = {.status = 200, .slot = 2};
    struct pl_fault fault = {.kind = PL_ENGINE_FAILED};
    pl_session_choice choice = {.ttl_seconds = 300, .kind = PL_ROUTER_ONLY};
    pl_retain_choice keep = {.retention_seconds = -1};
    double arg;
    for (int round = 0; round < 200; round++) { /* compiled at last */
        ask.req.priority = round % 2;
        name_session(2);
        if (round % 2)
            ask.session.event = PL_SESSION_NONE;
        pl_decide_session(d, &ask, 600, &choice);
        ask.pin = round % 2 ? NULL : workers[2];
        decide();
        pl_decide_retain(d, &ask, workers[2], &keep);
        pl_decide_retain(d, &ask, workers[1], &keep);
        pl_decide_fault(d, &ask, &fault, &arg);
        pl_decide_done(d, &ask, &outcome);
        for (int hook = 0; hook < PL_HOOK_COUNT; hook++)
            if (count(&stats.errors[hook]))
                fail_msg("hook %s failed", pl_hook_name(hook));
    }
    assert_int_equal(count(&stats.calls[PL_HOOK_SESSION]), 100); /* not for requests without one */
    assert_int_equal(count(&stats.calls[PL_HOOK_RETAIN]), 400);
    /* the slot was reused: bound to nobody here */
    name_session(2);
    ask.session.bound_generation = 2;
    ask.pin = NULL;
    decide();
    assert_int_equal(pl_vm_records(pl_decider_vm(d))->session->bound_index, -1);
    end();
}

static void test_an_unknown_field_of_the_session_is_an_error(void **state)
{
    begin("return { api = 1, score = function(req, w) return req.session.idle end }");
    name_session(-1);
    decides(PL_DECIDED, 0, "least_loaded");
    assert_int_equal(count(&stats.errors[PL_HOOK_SCORE]), 1);
    end();
}

/* --- the session hook --- */

/* answer: Lua; what the hook is given: 300 s and the kind. */
static pl_session_choice chooses(const char *answer, int bound, int kind, int clamped, int errors)
{
    char text[256];
    snprintf(text, sizeof text,
             "local pl = require 'perilune' return { api = 1, session = function(req, s)\n"
             "return %s end }",
             answer);
    begin(text);
    name_session(bound);
    ask.session.kind = kind;
    pl_session_choice choice = {.ttl_seconds = 300, .kind = kind, .by_policy = true};
    pl_decide_session(d, &ask, 600, &choice);
    assert_int_equal(count(&stats.calls[PL_HOOK_SESSION]), 1);
    assert_int_equal(count(&stats.latency[PL_HOOK_SESSION].total), 1);
    if ((int)count(&stats.errors[PL_HOOK_SESSION]) != errors || ask.clamped != clamped ||
        (int)count(&stats.clamped[PL_HOOK_SESSION]) != clamped)
        fail_msg("%s: %d clamped, %lu errors", answer, ask.clamped,
                 (unsigned long)count(&stats.errors[PL_HOOK_SESSION]));
    end();
    return choice;
}

static void lives(const char *answer, double ttl, int clamped)
{
    pl_session_choice c = chooses(answer, -1, PL_ROUTER_ONLY, clamped, 0);
    if (c.ttl_seconds != ttl || !c.by_policy || c.kind != PL_ROUTER_ONLY)
        fail_msg("%s: %g s", answer, c.ttl_seconds);
}

static void test_session_ttl(void **state)
{
    lives("60", 60, 0);
    lives("s.ttl_seconds + 1", 301, 0);
    lives("0", 0, 0);
    lives("0.25", 0.25, 0);
    lives("1e-9", 0.001, 1);
    lives("-5", 0.001, 1);
    lives("math.huge", 600, 1);
    pl_session_choice c = chooses("nil", -1, PL_ROUTER_ONLY, 0, 0);
    assert_true(c.ttl_seconds == 300 && !c.by_policy);
    const char *const wrong[] = {"0/0",     "'60'", "true", "{}",         "60, 1",
                                 "60, 'x'", "s",    "s.x",  "error('x')", "nil, pl.CLOSE"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        c = chooses(wrong[i], -1, PL_ENGINE_BACKED, 0, 1);
        assert_true(c.ttl_seconds == 300 && !c.by_policy && c.kind == PL_ENGINE_BACKED);
    }
}

static void test_session_kind(void **state)
{
    pl_session_choice c = chooses("60, pl.ENGINE_BACKED", -1, PL_ROUTER_ONLY, 0, 0);
    assert_int_equal(c.kind, PL_ENGINE_BACKED);
    c = chooses("nil, pl.ROUTER_ONLY", -1, PL_ENGINE_BACKED, 0, 0);
    assert_true(c.kind == PL_ROUTER_ONLY && c.ttl_seconds == 300 && c.by_policy);
    c = chooses("60, pl.ENGINE_BACKED", 1, PL_ROUTER_ONLY, 1, 0); /* it is bound: no */
    assert_true(c.kind == PL_ROUTER_ONLY && c.ttl_seconds == 60);
    c = chooses("60, pl.ROUTER_ONLY", 1, PL_ENGINE_BACKED, 1, 0);
    assert_int_equal(c.kind, PL_ENGINE_BACKED);
    c = chooses("60, s.kind", 1, PL_ENGINE_BACKED, 0, 0);
    assert_int_equal(c.kind, PL_ENGINE_BACKED);
}

static void test_without_the_session_hook(void **state)
{
    const char *const policies[] = {NULL, "return { api = 1, score = function() return 1 end }"};
    for (int i = 0; i < 2; i++) {
        begin(policies[i]);
        name_session(-1);
        pl_session_choice c = {.ttl_seconds = 300, .kind = PL_ENGINE_BACKED};
        pl_decide_session(d, &ask, 600, &c);
        assert_true(c.ttl_seconds == 300 && c.kind == PL_ENGINE_BACKED && !c.by_policy);
        pl_decide_session(d, &ask, 200, &c);
        assert_true(c.ttl_seconds == 200);
        c.ttl_seconds = 0; /* none by default */
        pl_decide_session(d, &ask, 200, &c);
        assert_true(c.ttl_seconds == 0);
        assert_int_equal(ask.clamped, 0);
        assert_int_equal(count(&stats.calls[PL_HOOK_SESSION]), 0);
        end();
    }
}

/* --- retain --- */

static pl_retain_choice retains(const char *answer, int clamped, int errors)
{
    char text[256];
    snprintf(text, sizeof text,
             "local pl = require 'perilune' return { api = 1, retain = function(req, w)\n"
             "return %s end }",
             answer);
    begin(text);
    pl_retain_choice choice = {.retention_seconds = 5};
    assert_true(pl_decider_wants_retain(d));
    pl_decide_retain(d, &ask, workers[1], &choice);
    if (ask.clamped != clamped || (int)count(&stats.errors[PL_HOOK_RETAIN]) != errors)
        fail_msg("%s: %d clamped", answer, ask.clamped);
    assert_int_equal(count(&stats.calls[PL_HOOK_RETAIN]), 1);
    end();
    return choice;
}

static void test_retain(void **state)
{
    pl_retain_choice c = retains("120", 0, 0);
    assert_true(c.retention_seconds == 120 && !c.has_priority);
    c = retains("w.inflight + 0.5, -3", 0, 0);
    assert_true(c.retention_seconds == 1.5 && c.has_priority && c.priority == -3);
    c = retains("nil, 7", 0, 0);
    assert_true(c.retention_seconds == 5 && c.has_priority && c.priority == 7);
    c = retains("nil", 0, 0);
    assert_true(c.retention_seconds == 5 && !c.has_priority);
    c = retains("0", 0, 0);
    assert_true(c.retention_seconds == 0);
    c = retains("-1", 1, 0);
    assert_true(c.retention_seconds == 0);
    c = retains("math.huge, 1.5", 2, 0);
    assert_true(c.retention_seconds == 86400 && c.priority == 1);
    c = retains("1, 2 ^ 40", 1, 0);
    assert_int_equal(c.priority, INT32_MAX);
    const char *const wrong[] = {"0/0", "'1'", "1, 0/0", "1, 'x'", "w.nope", "error('x')"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        c = retains(wrong[i], 0, 1);
        assert_true(c.retention_seconds == 5 && !c.has_priority);
    }
    begin("return { api = 1, score = function() return 1 end }");
    assert_false(pl_decider_wants_retain(d));
    pl_decide_retain(d, &ask, workers[1], &c);
    assert_int_equal(count(&stats.calls[PL_HOOK_RETAIN]), 0);
    end();
}

/* --- expire --- */

static int expires(const char *answer, double *seconds, int clamped, int errors)
{
    char text[256];
    snprintf(text, sizeof text,
             "local pl = require 'perilune' return { api = 1, expire = function(s)\n"
             "assert(s:id() == 'sub' and s:parent_id() == 'lead' and s.bound_index == -1)\n"
             "return %s end }",
             answer);
    begin(text);
    name_session(2);
    pl_request_view names = {.tenant = PL_STR_INIT("acme"),
                             .session_id = PL_STR_INIT("sub"),
                             .session_parent = PL_STR_INIT("lead")};
    int action = pl_decide_expire(d, &ask.session, &names, 600, seconds);
    if ((int)count(&stats.clamped[PL_HOOK_EXPIRE]) != clamped ||
        (int)count(&stats.errors[PL_HOOK_EXPIRE]) != errors)
        fail_msg("%s: %lu clamped", answer, (unsigned long)count(&stats.clamped[PL_HOOK_EXPIRE]));
    assert_int_equal(count(&stats.calls[PL_HOOK_EXPIRE]), 1);
    end();
    return action;
}

static void test_expire(void **state)
{
    double seconds;
    assert_int_equal(expires("pl.CLOSE", &seconds, 0, 0), PL_CLOSE);
    assert_int_equal(expires("nil", &seconds, 0, 0), PL_CLOSE);
    assert_int_equal(expires("pl.DROP", &seconds, 0, 0), PL_DROP);
    assert_int_equal(expires("pl.EXTEND, s.ttl_seconds", &seconds, 0, 0), PL_EXTEND);
    assert_true(seconds == 300);
    assert_int_equal(expires("pl.EXTEND, 1e9", &seconds, 1, 0), PL_EXTEND);
    assert_true(seconds == 600);
    assert_int_equal(expires("pl.EXTEND, 0", &seconds, 1, 0), PL_EXTEND);
    assert_true(seconds > 0);
    const char *const wrong[] = {
        "pl.EXTEND",  "pl.EXTEND, 'x'", "pl.EXTEND, 0/0",    "77",  "pl.SESSION_CLOSE", "'close'",
        "error('x')", "s.nope",         "pl.ROUTER_ONLY, 1", "true"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_int_equal(expires(wrong[i], &seconds, 0, 1), PL_CLOSE);
    begin(NULL);
    name_session(1);
    assert_int_equal(pl_decide_expire(d, &ask.session, &ask.strings, 600, &seconds), PL_CLOSE);
    end();
}

/* --- a ready-made policy on several loops --- */

static pl_decider *loop_with(const char *builtin, int loop)
{
    pl_policy_source *src;
    pl_errbuf eb;
    pl_vm_error err;
    pl_vm *vm;
    pl_decider_options o;
    pl_vm_options vo = {.loop = loop, .loops = 2, .seed = 7, .shared = shared};
    pl_decider_options_default(&o);
    o.clock = pl_clock_virtual(&now_ns);
    assert_int_equal(pl_policy_source_load(pl_str_c(builtin), NULL, &src, &eb), 0);
    assert_int_equal(pl_vm_new(src, &vo, &vm, &err), 0);
    assert_int_equal(pl_vm_init(vm, NULL, &err), 0);
    pl_policy_source_unref(src);
    pl_decider *made = pl_decider_new(&o, &stats);
    assert_null(pl_decider_swap(made, vm, 1));
    return made;
}

static void test_siblings_are_spread_over_all_loops(void **state)
{
    begin(NULL);
    pl_decider *loops[2] = {loop_with("agent_sessions", 0), loop_with("agent_sessions", 1)};
    for (int family = 0; family < 50; family++) {
        int seen[WORKERS] = {0};
        for (int sibling = 0; sibling < 2 * WORKERS; sibling++) {
            name_session(-1);
            ask.session.parent_hash = 1000003.0 * (family + 1);
            ask.session.id_hash = sibling + 1;
            pl_rng r = {(uint64_t)(family * 100 + sibling)};
            ask.strings.seed = pl_rng_next(&r);
            pl_decide(loops[pl_rng_below(&r, 2)], &ask, &out); /* in whichever loop they arrive */
            assert_string_equal(out.reason, "sibling");
            seen[out.worker->slot]++;
        }
        for (int i = 0; i < WORKERS; i++)
            assert_int_equal(seen[i], 2);
    }
    pl_decider_free(loops[0]);
    pl_decider_free(loops[1]);
    end();
}

/* --- strikes --- */

static void test_failing_session_hooks_suspend_the_policy(void **state)
{
    begin("return { api = 1, name = 'shaky', session = function() error('no') end,\n"
          "score = function(req, w) return -w.inflight end }");
    name_session(-1);
    assert_int_equal(decide(), 3);
    pl_session_choice c = {.ttl_seconds = 300, .kind = PL_ROUTER_ONLY};
    for (int i = 0; i < 7; i++)
        pl_decide_session(d, &ask, 600, &c);
    assert_int_equal(count(&stats.errors[PL_HOOK_SESSION]), 5); /* then it is not asked */
    assert_int_equal(atomic_load(&stats.suspended), 1);
    assert_int_equal(decide(), 0);
    assert_true(c.ttl_seconds == 300);
    /* bound turns end the suspension, too, when its time is over */
    name_session(2);
    now_ns += 1500000000u;
    pl_decide_session(d, &ask, 600, &c);
    assert_int_equal(count(&stats.errors[PL_HOOK_SESSION]), 5);
    decides(PL_DECIDED, 2, "session");
    pl_decide_session(d, &ask, 600, &c); /* the probe; it fails */
    pl_decide_session(d, &ask, 600, &c);
    assert_int_equal(count(&stats.errors[PL_HOOK_SESSION]), 6);
    assert_int_equal(count(&stats.suspensions), 2);
    end();
}

/* --- affinity in the policy's table --- */

static void test_affinity_is_hard_or_soft(void **state)
{
    const char *const wrong[] = {"'Soft'", "true", "1", "{}"};
    pl_vm_error err;
    char text[128];
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        snprintf(text, sizeof text, "return { api = 1, affinity = %s }", wrong[i]);
        assert_null(try_vm(text, shared, &err));
        assert_string_equal(err.stage, "check");
        assert_non_null(strstr(err.message, "affinity must be \"hard\""));
    }
    pl_vm *vm = ready_vm("return { api = 1, affinity = 'hard' }", shared);
    assert_false(pl_vm_soft(vm));
    pl_vm_free(vm);
}

static int fault(int kind, bool delta)
{
    double arg;
    struct pl_fault f = {.kind = kind, .budget_left = true, .delta = delta};
    return pl_decide_fault(d, &ask, &f, &arg);
}

/* The table of the design, cell by cell: what may be answered, and what holds otherwise. */
static void test_faults_of_sessions(void **state)
{
    static const int actions[] = {PL_PROCEED, PL_RETRY, PL_REJECT, PL_REBIND, PL_QUEUE, PL_CLOSE};
    static const struct {
        int kind;
        bool delta;
        int allowed[4], otherwise;
    } table[] = {
        {PL_NO_SESSION_ENGINE, false, {PL_PROCEED, PL_RETRY, PL_REJECT}, PL_PROCEED},
        {PL_OPEN_FAILED, false, {PL_PROCEED, PL_RETRY, PL_REJECT}, PL_PROCEED},
        {PL_ENGINE_FAILED, false, {PL_RETRY, PL_REJECT}, PL_RETRY},
        {PL_ENGINE_FAILED, true, {PL_REJECT}, PL_REJECT},
        {PL_BOUND_GONE, true, {PL_REJECT}, PL_REJECT},
        {PL_BOUND_GONE, false, {PL_REBIND, PL_REJECT}, PL_REBIND},
        {PL_ALL_BUSY, false, {PL_QUEUE, PL_REJECT}, PL_QUEUE},
        {PL_INDEX_STALE, false, {PL_PROCEED, PL_REJECT}, PL_PROCEED},
    };
    for (size_t row = 0; row < sizeof table / sizeof *table; row++) {
        for (size_t i = 0; i < sizeof actions / sizeof *actions; i++) {
            bool allowed = false;
            for (int k = 0; k < 4; k++)
                allowed |= table[row].allowed[k] == actions[i];
            char text[128];
            snprintf(text, sizeof text, "return { api = 1, degrade = function() return %d end }",
                     actions[i]);
            begin(text);
            int got = fault(table[row].kind, table[row].delta);
            int errors = (int)count(&stats.errors[PL_HOOK_DEGRADE]);
            if (got != (allowed ? actions[i] : table[row].otherwise) || errors != !allowed)
                fail_msg("fault %d, delta %d, action %d: %d, %d errors", table[row].kind,
                         table[row].delta, actions[i], got, errors);
            end();
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_bound_session_stays),
        cmocka_unit_test(test_admit_is_asked_for_bound_sessions),
        cmocka_unit_test(test_soft_affinity_leaves_it_to_the_policy),
        cmocka_unit_test(test_spill_when_the_bound_worker_is_full),
        cmocka_unit_test(test_what_waits_for_its_worker_asks_degrade),
        cmocka_unit_test(test_a_binding_that_is_lost),
        cmocka_unit_test(test_only_those_who_can_open),
        cmocka_unit_test(test_what_hooks_see_of_the_session),
        cmocka_unit_test(test_an_unknown_field_of_the_session_is_an_error),
        cmocka_unit_test(test_session_ttl),
        cmocka_unit_test(test_session_kind),
        cmocka_unit_test(test_without_the_session_hook),
        cmocka_unit_test(test_retain),
        cmocka_unit_test(test_expire),
        cmocka_unit_test(test_siblings_are_spread_over_all_loops),
        cmocka_unit_test(test_failing_session_hooks_suspend_the_policy),
        cmocka_unit_test(test_affinity_is_hard_or_soft),
        cmocka_unit_test(test_faults_of_sessions),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
