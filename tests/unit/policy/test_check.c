/* `perilune check`: what it accepts, what it says about the compiler, how it reports errors. */
#include "policy_test.h"

#include "base/log.h"
#include "policy/check.h"

static char text[65536];

static int run(const char *name_or_file, bool as_json)
{
    FILE *out = tmpfile();
    assert_non_null(out);
    int rc = pl_check(pl_str_c(name_or_file), NULL, as_json, out);
    rewind(out);
    size_t n = fread(text, 1, sizeof text - 1, out);
    text[n] = 0;
    fclose(out);
    return rc;
}

static void says(const char *part)
{
    if (!strstr(text, part))
        fail_msg("wanted '%s' in:\n%s", part, text);
}

static void test_ready_made_policies_are_compiled(void **state)
{
    const char *const *names = pl_policy_builtin_names();
    assert_non_null(names[0]);
    for (; *names; names++) {
        assert_int_equal(run(*names, true), 0);
        json_t *j = json_loads(text, 0, NULL), *report;
        const char *hook;
        assert_true(json_is_true(json_object_get(j, "ok")));
        json_object_foreach(json_object_get(j, "compiled"), hook, report)
        {
            const char *verdict = json_string_value(json_object_get(report, "compiled"));
            if (strcmp(verdict, "yes") != 0)
                fail_msg("%s, %s: %s", *names, hook, text);
        }
        json_decref(j);
    }
}

static void test_names_the_line_that_stops_the_compiler(void **state)
{
    assert_int_equal(run(put_file("p.lua", "local p = { api = 1 }\n"
                                           "function p.score(req, w)\n"
                                           "  local f = function() return w.inflight end\n"
                                           "  return f()\n"
                                           "end\n"
                                           "return p\n"),
                         false),
                     0);
    says("score   compiled: no");
    says("p.lua:3: NYI: bytecode FNEW (a closure is made here");
    assert_int_equal(
        run(put_file("p.lua", "local p = { api = 1 }\n"
                              "local function less(a, b) return a < b end\n"
                              "function p.route(req, fleet)\n"
                              "  local t = {}\n"
                              "  for i = 0, fleet.n - 1 do t[i + 1] = fleet[i].inflight end\n"
                              "  table.sort(t, less)\n"
                              "  return nil\n"
                              "end\n"
                              "return p\n"),
            false),
        0);
    says("route   compiled: partly");
    says("p.lua:6: ");
    says("table.sort (sorting calls back into Lua");
}

/* Lines that the made-up requests do not come to. */
static void test_notes_slips_that_nothing_runs_into(void **state)
{
    assert_int_equal(run(put_file("p.lua", "local p = { api = 1, params = { model = 'm' } }\n"
                                           "local function rare(req)\n"
                                           "  if req:model() ~= 'rare' then return nil end\n"
                                           "  return pl.SHED, pl.SHED\n"
                                           "end\n"
                                           "function p.admit(req) return rare(req) end\n"
                                           "function p.score(req, w, st)\n"
                                           "  if req.model == 'big' then return w.inflight end\n"
                                           "  if req:tenant() == 'x' then seen = w:name() end\n"
                                           "  return w.name == st.model and 1 or 2\n"
                                           "end\n"
                                           "return p\n"),
                         false),
                     0);
    says("/p.lua:4: unknown global 'pl' (write local pl = require \"perilune\" at the top)\n");
    says("/p.lua:8: req.model is a method, here not called: write req:model()\n");
    says("/p.lua:9: write to global 'seen': declare it with local");
    says("/p.lua:10: w.name is a method, here not called: write w:name()\nok\n");
    int notes = 0;
    for (const char *at = text; (at = strstr(at, "\nnote    ")); at++)
        notes++;
    assert_int_equal(notes, 4);
    for (const char *const *names = pl_policy_builtin_names(); *names; names++) {
        assert_int_equal(run(*names, false), 0);
        assert_null(strstr(text, "note"));
    }
}

static void test_hooks_and_hash(void **state)
{
    assert_int_equal(run(put_file("p.lua", "return { api = 1, name = 'n', tick = function() end,\n"
                                           "score = function(req, w) return w.inflight end }"),
                         false),
                     0);
    says("policy  n (");
    says("hooks   score tick");
    says("score   compiled: yes");
    says("sha256  ");
}

static void refused(const char *policy, const char *stage, int line, const char *part)
{
    assert_int_equal(run(put_file("p.lua", policy), true), PL_EPOLICY);
    json_t *j = json_loads(text, 0, NULL), *e = json_object_get(j, "error");
    assert_non_null(e);
    assert_true(json_is_false(json_object_get(j, "ok")));
    assert_string_equal(json_string_value(json_object_get(e, "stage")), stage);
    assert_int_equal(json_integer_value(json_object_get(e, "line")), line);
    assert_non_null(strstr(json_string_value(json_object_get(e, "file")), "p.lua"));
    says(part);
    json_decref(j);
}

static void test_errors(void **state)
{
    refused("return {\n api = }", "parse", 2, "unexpected symbol");
    refused("\nerror('no')", "run", 2, "no");
    refused("return { api = 1, init = function()\n error('no') end }", "init", 2, "no");
    refused("return { api = 1, score = function(req, w)\n return w.nope end }", "selftest", 2,
            "score: a worker has no field 'nope'");
    refused("return { api = 1, score = function(req, w)\n while true do end end }", "selftest", 2,
            "ran too long");
    refused("return { api = 1, route = function(req, fleet) return fleet[0] end }", "selftest", 1,
            "route answered a record; it must answer w.index");
    refused("return { api = 1, route = function(req, fleet) return fleet.n end }", "selftest", 1,
            "an index is one of 0 .. n-1");
    refused("return { api = 1, route = function(req, fleet) return fleet.n > 1 and 1 or 0 end }",
            "selftest", 1, "not eligible");
    /* a hook that only the full check reaches */
    refused("return { api = 1, done = function(req, o)\n return o.nope end }", "done", 2,
            "the outcome has no field 'nope'");
    /* a request that nobody served ends, too */
    refused("local t = { [0] = 1 }\nfor i = 1, 600 do t[i] = 1 end\n"
            "return { api = 1, done = function(req, o)\n return t[o.slot] + 1 end }",
            "done", 4, "arithmetic");
    refused("local pl = require 'perilune'\n"
            "return { api = 1, degrade = function(req, fault)\n return pl.QUEUE, 4 end }",
            "degrade", 2,
            "for pl.NO_SESSION_ENGINE it may answer nil, pl.PROCEED, pl.RETRY or pl.REJECT");
    refused("local pl = require 'perilune'\n"
            "return { api = 1, degrade = function(req, fault)\n return pl.RETRY end }",
            "degrade", 2, "for pl.BOUND_GONE it may answer nil, pl.REJECT or pl.REBIND");
    refused("local pl = require 'perilune'\n"
            "return { api = 1, degrade = function(req, fault)\n"
            "  if fault.kind ~= pl.BOUND_GONE then return pl.RETRY end end }",
            "degrade", 2, "for pl.ALL_BUSY it may answer nil, pl.QUEUE, seconds or pl.REJECT");
    refused("return { api = 1, init = function() local t = {} for i = 1, 20000 do t[i] = i end\n"
            "  return t end, save = function(st) return st end }",
            "save", 2, "there is more data than may be kept: 64 KiB");
    assert_int_equal(run("/no/such/policy.lua", false), PL_EPOLICY);
    says("/no/such/policy.lua");
    says("stage   read");
    assert_int_equal(run(put_file("p.lua", "local x\nreturn x.y"), false), PL_EPOLICY);
    says("p.lua:2: ");
    says("stage   run");
}

static void test_notes_what_is_hardly_meant(void **state)
{
    assert_int_equal(run(put_file("p.lua", "local pl = require 'perilune'\n"
                                           "return { api = 1, session = function() return 60 end,\n"
                                           "admit = function() return pl.QUEUE, -4 end }"),
                         false),
                     0);
    says("note    admit: its seconds were out of range");
    assert_int_equal(run(put_file("p.lua", "return { api = 1, route = function(req, fleet)\n"
                                           "  if fleet[0].eligible then return 0, 'a reason!' end "
                                           "end }"),
                         true),
                     0);
    says("route: its reason was replaced");
    assert_int_equal(run(put_file("p.lua", "return { api = 1 }"), false), 0);
    says("hooks   none: the core's defaults decide\n");
}

/* A hook that fails for one kind of session only is found, whichever kind that is. */
static void test_sessions_of_all_sorts_are_made_up(void **state)
{
    static const char *const sorts[] = {
        "s.event == pl.SESSION_OPEN",
        "s.event == pl.SESSION_BIND",
        "s.event == pl.SESSION_CLOSE and s.final",
        "s.event == pl.SESSION_TURN and s.bound_slot < 0 and s.has_parent",
        "s.event == pl.SESSION_TURN and s.bound_slot < 0 and not s.has_parent",
        "s.event == pl.SESSION_TURN and s.bound_slot >= 0 and s.has_parent",
        "s.event == pl.SESSION_TURN and s.bound_slot >= 0 and not s.has_parent",
        "s.event == pl.SESSION_TURN and s.delta and s.held_tokens > 0",
        "s.kind == pl.ENGINE_BACKED and s:id() == 'made-up-session'",
        "s:parent_id() == 'made-up-parent' and s.parent_hash > 0"};
    static const char *const hooks[][2] = {{"session", "(req, s)"},
                                           {"route", "(req, fleet) local s = req.session or {}"},
                                           {"score", "(req, w) local s = req.session or {}"},
                                           {"retain", "(req, w) local s = req.session or {}"}};
    char policy[512], stage[64];
    for (size_t i = 0; i < sizeof sorts / sizeof *sorts; i++) {
        for (size_t k = 0; k < sizeof hooks / sizeof *hooks; k++) {
            snprintf(policy, sizeof policy,
                     "local pl = require 'perilune'\n"
                     "return { api = 1, %s = function%s\n"
                     "if s.event and %s then error('met') end\n%s end }",
                     hooks[k][0], hooks[k][1], sorts[i], k == 2 ? "return 1" : "return nil");
            snprintf(stage, sizeof stage, "%s: met", hooks[k][0]);
            refused(policy, "selftest", 3, stage);
        }
    }
    refused("return { api = 1, expire = function(s)\n return s.nope end }", "selftest", 2,
            "expire: the session (s) has no field 'nope'");
    refused("return { api = 1, expire = function(s)\n return s.event end }", "selftest", 1,
            "expire answered 4; it must answer pl.CLOSE, pl.EXTEND with seconds, pl.DROP or nil");
    refused("local pl = require 'perilune'\n"
            "return { api = 1, session = function(req, s) return pl.OPEN end }",
            "selftest", 2, "perilune has no 'OPEN' (an event of a session is pl.SESSION_OPEN)");
}

static void test_says_what_it_is_with_sessions(void **state)
{
    assert_int_equal(
        run(put_file("p.lua", "local pl = require 'perilune'\n"
                              "return { api = 1, affinity = 'soft',\n"
                              "session = function(req, s) return -1 end,\n"
                              "retain = function(req, w) return -w.inflight - 1 end,\n"
                              "expire = function(s) return pl.EXTEND, s.ttl_seconds end,\n"
                              "degrade = function(req, fault)\n"
                              "  if fault.kind == pl.ENGINE_FAILED then return pl.RETRY end end }"),
            false),
        0);
    says("hooks   session retain degrade expire\naffinity soft\n");
    says("session compiled: yes");
    says("retain  compiled: yes");
    says("note    session: its ttl_seconds were below 0");
    says("note    retain: its retention_seconds were below 0");
    says("note    degrade: with fault.delta it may answer nil or pl.REJECT");
    assert_int_equal(run("sticky_sessions", true), 0);
    says("\"affinity\": \"hard\"");
    assert_null(strstr(text, "below 0"));
}

static void test_an_early_answer_is_compiled(void **state)
{
    assert_int_equal(run(put_file("p.lua", "local pl = require 'perilune'\n"
                                           "return { api = 1, admit = function(req, fleet)\n"
                                           "  if req.max_tokens < 0 then return pl.SHED, 3 end\n"
                                           "  return pl.ADMIT end }"),
                         false),
                     0);
    says("admit   compiled: yes");
    assert_null(strstr(text, "NYI"));
}

static void note_metric(void *ctx, pl_str name, double value)
{
    *(double *)ctx = value;
}

static void test_selftest_leaves_the_shared_numbers_alone(void **state)
{
    pl_shared *shared = pl_shared_new();
    pl_vm *vm = ready_vm("local pl = require 'perilune' local c = pl.counter('n')\n"
                         "return { api = 1, route = function(req, fleet)\n"
                         "  c:add(1) pl.metric('m', 1) pl.log('x')\n"
                         "  if fleet[0].eligible then return 0 end end,\n"
                         "done = function() pl.metric('m', c:get()) end }",
                         shared);
    pl_vm_error err;
    if (pl_selftest(vm, &err) < 0)
        fail_msg("%s", err.message);
    fill(vm, 1, 1);
    assert_int_equal(pl_vm_done(vm, &err), 0);
    double seen = -1;
    pl_shared_each_metric(shared, note_metric, &seen);
    assert_true(seen == 0); /* what done read from the counter */
    pl_vm_free(vm);
    pl_shared_free(shared);
}

int main(void)
{
    pl_log_init(PL_LOG_ERROR + 1, 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ready_made_policies_are_compiled),
        cmocka_unit_test(test_names_the_line_that_stops_the_compiler),
        cmocka_unit_test(test_hooks_and_hash),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_notes_what_is_hardly_meant),
        cmocka_unit_test(test_notes_slips_that_nothing_runs_into),
        cmocka_unit_test(test_sessions_of_all_sorts_are_made_up),
        cmocka_unit_test(test_says_what_it_is_with_sessions),
        cmocka_unit_test(test_an_early_answer_is_compiled),
        cmocka_unit_test(test_selftest_leaves_the_shared_numbers_alone),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
