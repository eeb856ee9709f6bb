/* The VM: the sandbox, the rules of records, the phases of loading, carry, memory. */
#include "policy_test.h"

#include <pthread.h>

#include "policy/shared.h"
#include "policy/vm_priv.h"

static pl_shared *shared;

static int setup(void **state)
{
    shared = pl_shared_new();
    return make_dir(state);
}

static int teardown(void **state)
{
    pl_shared_free(shared);
    return remove_dir(state);
}

/* --- loading --- */

static void refused(const char *text, const char *stage, int line, const char *part)
{
    pl_vm_error err;
    pl_vm *vm = try_vm(text, shared, &err);
    if (vm) {
        int rc = pl_vm_init(vm, NULL, &err);
        pl_vm_free(vm);
        if (rc == 0)
            fail_msg("was accepted: %s", text);
    }
    if (!strstr(err.message, part) || (line && err.line != line) || strcmp(err.stage, stage) != 0)
        fail_msg("wanted %s, line %d, '%s'; got %s, line %d, '%s'", stage, line, part, err.stage,
                 err.line, err.message);
    assert_true(strstr(err.file, "policy.lua") != NULL);
}

static void test_refusals(void **state)
{
    refused("return {\n api = }", "parse", 2, "unexpected symbol");
    refused("\x1bLJ", "parse", 1, "this is bytecode");
    refused("local x = 1\nerror('no moon')", "run", 2, "no moon");
    refused("local x = 1\nerror({})", "run", 2, "no string, but a table");
    refused("return 7", "check", 0, "must return a table");
    refused("local a = 1", "check", 0, "not nothing");
    refused("return {}", "check", 0, "write api = 1");
    refused("return { api = 2 }", "check", 0, "api = 2, but this router speaks api = 1");
    refused("return { api = '1' }", "check", 0, "api must be the number 1, not a string");
    refused("local p = { api = 1 }\nfunction p:score(req, w) return 1 end return p", "check", 2,
            "write policy.score = function(...), not policy:score");
    refused("return { api = 1,\n scores = function() end }", "check", 2, "unknown member 'scores'");
    refused("return { api = 1, scores = 1 }", "check", 0, "score, route");
    refused("return { api = 1, score = 42 }", "check", 0, "score must be a function");
    refused("return { api = 1, name = 'a b' }", "check", 0, "name must be");
    refused("return { api = 1, temperature = -1 }", "check", 0, "temperature");
    refused("return { api = 1, temperature = 0/0 }", "check", 0, "temperature");
    refused("return { api = 1, assume_kv_reuse = 1 }", "check", 0, "must be true or false");
    refused("local p = { api = 1 }\nfunction p.init() p.assume_kv_reuse = 'yes' end return p",
            "init", 0, "must be true or false, not a string");
    refused("return { api = 1, params = { a = {} } }", "check", 0, "params.a");
    refused("return { api = 1,\n init = function() error('dark') end }", "init", 2, "dark");
}

static void test_budget_and_memory_while_loading(void **state)
{
    refused("\nwhile true do end", "run", 2, "ran too long");
    refused("local function f() while true do end end\nwhile true do pcall(f) end", "run", 0,
            "ran too long");
    refused("return { api = 1, init = function() while true do end end }", "init", 1,
            "ran too long");
    refused("local t = {} for i = 1, 1e9 do t[i] = { i } end", "run", 0, "memory cap");
    refused("local function f() return 1 + f() end f()", "run", 0, "stack overflow");
    refused("return { api = 1, name = ('x'):rep(2 ^ 31 - 64) }", "run", 1, "string.rep");
}

static void test_sandbox_refuses(void **state)
{
    refused("\nlocal f = io.open('/etc/passwd')", "run", 2, "unknown global 'io'");
    const char *const names[] = {"os",       "debug",          "load",      "loadstring", "dofile",
                                 "loadfile", "collectgarbage", "newproxy",  "jit",        "ffi",
                                 "setfenv",  "getfenv",        "coroutine", "package",    "_G",
                                 "module",   "xpcall"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char text[64], part[64];
        snprintf(text, sizeof text, "local x = %s return { api = 1 }", names[i]);
        snprintf(part, sizeof part, "unknown global '%s'", names[i]);
        refused(text, "run", 1, part);
    }
    refused("\nlocal x = pl.ADMIT", "run", 2, "write local pl = require \"perilune\"");
    refused("\ncount = 0", "run", 2, "write to global 'count'");
    refused("string.rep = nil", "run", 1, "string is frozen");
    refused("math = nil", "run", 1, "write to global 'math'");
    refused("getmetatable('').__index = nil", "run", 1, "index");
    refused("require 'ffi'", "run", 1, "cannot open");
    refused("require '../x'", "run", 1, "files beside them");
    refused("require 'a..b'", "run", 1, "files beside them");
    refused("require '.a'", "run", 1, "files beside them");
    refused("require '/etc/passwd'", "run", 1, "files beside them");
    refused("require 'perilune.boot'", "run", 1, "no such module");
    refused("local pl = require 'perilune'\npl.QUEUE = 3", "run", 2, "perilune is frozen");
    refused("local pl = require 'perilune'\nlocal x = pl.nothing", "run", 2, "has no 'nothing'");
    refused("string.dump(print)", "run", 1, "call field 'dump'");
}

static void test_params_frozen(void **state)
{
    refused("return { api = 1, params = { a = 1 }, init = function(p)\n p.a = 2 end }", "init", 2,
            "params is frozen");
    refused("return { api = 1, params = { a = 1 }, init = function(p)\n return p.b end }", "init",
            2, "params has no 'b'");
}

static void overrides(const char *json, const char *part)
{
    json_t *params = json_loads(json, 0, NULL);
    pl_policy_source *src = source_of(
        "return { api = 1, params = { weight = 1.5, key = 'x', on = true }, init = function(p)\n"
        "assert(p.weight == 3 and p.key == 'x' and p.on == false) end }",
        params);
    json_decref(params);
    pl_vm_options o = {.shared = shared};
    pl_vm_error err;
    pl_vm *vm;
    int rc = pl_vm_new(src, &o, &vm, &err);
    pl_policy_source_unref(src);
    if (part) {
        assert_int_equal(rc, PL_EPOLICY);
        assert_string_equal(err.stage, "check");
        assert_non_null(strstr(err.message, part));
    } else {
        assert_int_equal(rc, 0);
        assert_int_equal(pl_vm_init(vm, NULL, &err), 0);
    }
    pl_vm_free(vm);
}

static void test_param_overrides(void **state)
{
    overrides("{\"weight\": 3, \"on\": false}", NULL);
    overrides("{\"wieght\": 3}", "unknown parameter 'wieght'; this policy has key, on, weight");
    overrides("{\"weight\": \"3\"}",
              "'weight' must be a number, like its default 1.5, not a string");
    overrides("{\"on\": 1}", "'on' must be a boolean");
}

static void test_require_beside(void **state)
{
    put_file("helper.lua", "return { three = function() return 3 end }");
    const char *text = "local h = require 'helper' return { api = 1, name = 'n' .. h.three() }";
    pl_policy_source *src = source_of(text, NULL);
    pl_vm_options o = {.shared = shared};
    pl_vm_error err;
    pl_vm *a, *b;
    assert_int_equal(pl_vm_new(src, &o, &a, &err), 0);
    assert_string_equal(pl_vm_name(a), "n3");
    char sha[65];
    strcpy(sha, pl_policy_source_sha256(src));
    /* the bytes of a generation are fixed: later VMs do not see the disk */
    put_file("helper.lua", "return { three = function() return 4 end }");
    assert_int_equal(pl_vm_new(src, &o, &b, &err), 0);
    assert_string_equal(pl_vm_name(b), "n3");
    assert_string_equal(pl_policy_source_sha256(src), sha);
    pl_vm_free(a);
    pl_vm_free(b);
    pl_policy_source_unref(src);
    /* and the hash covers them */
    src = source_of(text, NULL);
    assert_int_equal(pl_vm_new(src, &o, &a, &err), 0);
    assert_string_not_equal(pl_policy_source_sha256(src), sha);
    pl_vm_free(a);
    pl_policy_source_unref(src);
    put_file("helper.lua", "return {\n oops");
    assert_null(try_vm(text, shared, &err));
    assert_string_equal(err.stage, "parse");
    assert_non_null(strstr(err.file, "helper.lua"));
    assert_int_equal(err.line, 2);
    put_file("helper.lua", "local x\nreturn x.y");
    pl_vm *vm = try_vm(text, shared, &err);
    assert_null(vm);
    assert_non_null(strstr(err.file, "helper.lua"));
    assert_int_equal(err.line, 2);
}

static void test_sha256_of_one_file_is_the_files(void **state)
{
    pl_policy_source *src = source_of("return { api = 1 }\n", NULL);
    pl_vm_options o = {.shared = shared};
    pl_vm_error err;
    pl_vm *vm;
    assert_int_equal(pl_vm_new(src, &o, &vm, &err), 0);
    char command[512], line[128] = "";
    snprintf(command, sizeof command, "sha256sum %s", pl_policy_source_file(src));
    FILE *p = popen(command, "r");
    assert_non_null(fgets(line, sizeof line, p));
    pclose(p);
    assert_memory_equal(line, pl_policy_source_sha256(src), 64);
    assert_string_equal(pl_vm_name(vm), "policy"); /* the file's name */
    pl_vm_free(vm);
    pl_policy_source_unref(src);
}

static void test_source_errors(void **state)
{
    pl_errbuf eb;
    pl_policy_source *src;
    assert_int_equal(pl_policy_source_load(PL_STR("no_such"), NULL, &src, &eb), PL_ENOTFOUND);
    assert_non_null(strstr(eb.text, "ready-made"));
    assert_int_equal(pl_policy_source_load(PL_STR("/no/such.lua"), NULL, &src, &eb), PL_ENOTFOUND);
    assert_non_null(strstr(eb.text, "/no/such.lua"));
    assert_int_equal(pl_policy_source_load(PL_STR("/tmp/"), NULL, &src, &eb), PL_EIO);
    assert_null(src);
}

/* --- records: each misuse is an error that names field, file and line --- */

static void misuse(const char *hook, const char *line2, const char *part)
{
    char text[512];
    snprintf(text, sizeof text,
             "local pl, last = require 'perilune' return { api = 1, %s = function(req, w, st) "
             "local fleet = w\n%s\nend }",
             hook, line2);
    pl_vm *vm = ready_vm(text, shared);
    /* also once the hook was compiled by many good calls of other kinds */
    for (int round = 0; round < 3; round++) {
        fill(vm, 3, 1);
        pl_vm_error err;
        if (pl_vm_decide(vm, 0, &err) == 0)
            fail_msg("no error: %s", line2);
        if (!strstr(err.message, part) || err.line != 2 || strcmp(err.stage, hook) != 0)
            fail_msg("%s\nwanted '%s' at line 2, got %s line %d '%s'", line2, part, err.stage,
                     err.line, err.message);
        assert_non_null(strstr(err.file, "policy.lua"));
    }
    pl_vm_free(vm);
}

static void test_tail_call_names_the_hook(void **state)
{
    pl_vm *vm = ready_vm("return { api = 1,\n score = function(req, w)\n return w() end }", shared);
    pl_vm_error err;
    fill(vm, 1, 1);
    assert_int_equal(pl_vm_decide(vm, 0, &err), PL_EPOLICY);
    assert_int_equal(err.line, 2);
    pl_vm_free(vm);
}

static void test_record_rules(void **state)
{
    misuse("score", "return w.in_flight", "a worker has no field 'in_flight'; it has inflight,");
    misuse("score", "return req.tokens", "the request (req) has no field 'tokens'");
    misuse("score", "w.inflight = 0 return 1", "field 'inflight'");
    misuse("score", "w.nothing = 0 return 1", "cannot write field 'nothing'");
    misuse("score", "req.priority = 0 return 1", "field 'priority'");
    misuse("score", "w.index = 1 return 1", "read-only");
    misuse("score", "return w + 1", "a worker is a record");
    misuse("score", "return 2 * req", "the request (req) is a record");
    misuse("score", "return -w", "a worker is a record");
    misuse("score", "return w < 3", "a worker is a record");
    misuse("score", "return 'a' .. w", "a worker is a record");
    misuse("score", "return #w", "a worker is a record");
    misuse("score", "local x = w() return x", "a worker is a record");
    misuse("score", "return w[1].inflight", "cannot be indexed by 1");
    misuse("score", "return req[0]", "cannot be indexed by 0");
    misuse("score", "for k in pairs(w) do end", "pairs takes a table, not a record");
    misuse("score", "local x = req:header() return x", "takes a string");
    misuse("score", "local x = req.header('x-key') return x", "takes a string");
    misuse("score", "setmetatable(w, {})", "table expected");
    misuse("score", "total = 1 return 1", "write to global 'total'");
    misuse("score", "return totl", "unknown global 'totl'");
    misuse("score", "return pl.counter('a-b'):get()", "63 bytes, not \"a-b\"");
    misuse("score", "require 'late' return 1", "while the policy loads");
    misuse("score", "local x = ('x'):rep(1e9) return x", "string.rep");
    misuse("score", "local x = ('x'):rep('1e9') return x", "string.rep"); /* a header's, say */
    misuse("score", "local x = ('x'):rep(3, ('y'):rep(1e6)) return x", "string.rep");
    misuse("score", "local x = (''):rep('0x7fffffff', 1) return x", "string.rep");
    misuse("score", "local e = pl.worker_ewma('a', 1) e:update(w.slot, 1)",
           "w is a worker or the outcome, not a number");
    misuse("score", "local e = pl.worker_ewma('a', 1) local x = e.get(w, 1) return x",
           "not a number");
    misuse("route", "for i, w in ipairs(fleet) do return i end", "for i = 0, fleet.n - 1 do");
    misuse("score", "local x = pl.worker_ewma('a b', 1) return x", "takes a name");
    misuse("route", "return fleet[3].index", "index 3 is not in 0 .. n-1 (here 0 .. 2)");
    misuse("route", "return fleet[-1].index", "index -1 is not in 0 .. n-1");
    misuse("route", "return fleet[0.5].index", "index 0.5 is not in 0 .. n-1");
    misuse("route", "return fleet[0/0].index", "is not in 0 .. n-1");
    misuse("route", "return fleet[2 ^ 53].index", "is not in 0 .. n-1");
    misuse("route", "return fleet['0'].index", "the fleet has no field '0'");
    misuse("route", "return fleet[nil]", "cannot be indexed by nil");
    misuse("route", "return fleet.cost[3]", "fleet.cost[i]: index 3 is not in 0 .. n-1");
    misuse("route", "fleet.cost[3] = 1", "fleet.cost[i]: index 3 is not in 0 .. n-1");
    misuse("route", "fleet.cost[-1] = 1", "fleet.cost[i]: index -1 is not in 0 .. n-1");
    misuse("route", "fleet.cost[0] = 'x'", "takes a number");
    misuse("route", "fleet.cost.x = 1", "indexed by a number");
    misuse("route", "fleet[0] = fleet[1]", "read-only");
    misuse("route", "fleet.n = 9", "field 'n'");
    misuse("route", "fleet.cost = {}", "cannot write field 'cost'");
    misuse("route", "return #fleet", "the fleet is a record");
    misuse("route", "fleet[0].inflight = 0", "field 'inflight'");
    misuse("route", "fleet.cost[1] = 0/0 local x = pl.pick_min() return x", "NaN");
    misuse("route", "error({})", "no string, but a table");
    misuse("route", "error()", "no string, but a nil");
    misuse("admit", "return nil + 1", "arithmetic");
}

/* A hook that answers nonsense: the error names the hook's first line. */
static void bad_answer(const char *hook, const char *answer, const char *part)
{
    char text[256];
    snprintf(text, sizeof text,
             "local pl = require 'perilune' return { api = 1,\n %s = function() return %s end }",
             hook, answer);
    pl_vm *vm = ready_vm(text, shared);
    pl_vm_error err;
    fill(vm, 3, 1);
    if (pl_vm_decide(vm, 0, &err) == 0)
        fail_msg("no error: %s", text);
    if (!strstr(err.message, part) || err.line != 2)
        fail_msg("wanted '%s', got line %d '%s'", part, err.line, err.message);
    pl_vm_free(vm);
}

static void test_bad_answers(void **state)
{
    bad_answer("score", "nil", "score answered nothing");
    bad_answer("score", "'7'", "score answered a string");
    bad_answer("score", "{}", "score answered a table");
    bad_answer("route", "'w1'", "route answered a string");
    bad_answer("admit", "99", "admit answered 99");
    bad_answer("admit", "pl.RETRY", "pl.ADMIT, pl.QUEUE");
    bad_answer("admit", "pl.QUEUE, 'long'", "a number beside its action");
    bad_answer("admit", "pl.QUEUE, 0/0", "a number beside its action");
    bad_answer("admit", "pl.SHRINK", "a number beside its action");
}

static void test_reads_and_helpers(void **state)
{
    pl_vm *vm = ready_vm(
        "local pl = require 'perilune'\n"
        "local c, e = pl.counter('c'), pl.worker_ewma('e', 10)\n"
        "local p = { api = 1 }\n"
        "function p.route(req, fleet)\n"
        "  assert(req:model() == 'llama' and req:tenant() == 'acme' and req:id() == 'r-1')\n"
        "  assert(req:path() == '/v1/chat/completions' and req:session_id() == nil)\n"
        "  assert(req:header('X-Key') == 'moon' and req:header('other') == nil)\n"
        "  assert(req:member('user') == 'selene' and req:member('n') == nil)\n"
        "  assert(fleet.n == 3 and fleet[2]:name() == 'w2' and fleet[1].inflight == 1)\n"
        "  assert(req.stream == false and fleet[0].eligible == true)\n"
        "  assert(fleet[1] == fleet[1] and fleet[1] ~= fleet[2] and fleet[1] ~= nil)\n"
        "  for i = 0, fleet.n - 1 do fleet.cost[i] = 10 - i end\n"
        "  assert(fleet.cost[1] == 9 and pl.pick_min() == 2 and pl.pick_softmax(0) == 2)\n"
        "  fleet.cost[2] = 20 assert(pl.pick_softmax(1e-310) == 1) fleet.cost[2] = 8\n"
        "  local i = pl.pick_softmax(1) assert(i >= 0 and i < 3)\n"
        "  assert(pl.prefill_seconds(fleet[0], 16000) == 2)\n"
        "  local r = pl.random() assert(r >= 0 and r < 1 and pl.random(1) == 0)\n"
        "  r = math.random(3, 5) assert(r >= 3 and r <= 5)\n"
        "  assert(pl.rendezvous('k') == pl.rendezvous('k') and pl.ring('k') == pl.ring('k'))\n"
        "  assert(pl.hash('a') == pl.hash('a') and pl.hash('a') < 2 ^ 52)\n"
        "  assert(c:get() == 0 and c:add() == 1 and c:add(2) == 3 and c:get() == 3)\n"
        "  assert(c:add(0 / 0) ~= 3 and c:get() == 3 and c:add(-1 / 0) ~= 3 and c:get() == 3)\n"
        "  assert(e:get(fleet[1]) == 0 and e:get(fleet[1], 5) == 5)\n"
        "  e:update(fleet[1], 4) e:update(fleet[1], 6)\n"
        "  assert(math.abs(e:get(fleet[1]) - 5) < 0.01 and e:get(fleet[0], -1) == -1)\n"
        "  assert(pl.metric('shiny', 2) == true and pl.now() > 0)\n"
        "  assert(pl.QUEUE == 2 and pl.WHY_DRAINING == 3 and pl.API_CHAT == 1 and pl.ALL_BUSY == "
        "4)\n"
        "  assert(type(fleet) == 'cdata' and getmetatable(fleet[0]) == nil and tostring(fleet[0]) "
        "== 'a worker')\n"
        "  assert(('x'):rep('3') == 'xxx' and string.rep(5, 2, 0) == '505')\n"
        "  assert(('x'):rep(3) == 'xxx' and bit.band(6, 3) == 2 and not pcall(error, 'x'))\n"
        "  return fleet[1].index, 'why_not'\n"
        "end\nreturn p",
        shared);
    pl_records *r = fill(vm, 3, 1);
    pl_vm_error err;
    if (pl_vm_decide(vm, 0, &err) < 0)
        fail_msg("%d: %s", err.line, err.message);
    assert_true(r->verdict->routed && r->verdict->index == 1);
    assert_int_equal(r->verdict->reason_len, 7);
    assert_memory_equal(r->verdict->reason, "why_not", 7);
    pl_vm_free(vm);
}

/* The strings of a request are borrowed for one call: a hook without a request has none. */
static void test_strings_end_with_the_call(void **state)
{
    pl_vm *vm = ready_vm(
        "local kept return { api = 1, route = function(req, fleet)\n"
        "kept = { req, fleet[0] } assert(kept[1]:model() == 'llama') return 0 end,\n"
        "tick = function() assert(kept[1]:model() == nil and kept[1]:header('x-key') == nil)\n"
        " assert(kept[2]:name() == nil) end }",
        shared);
    pl_vm_error err;
    fill(vm, 1, 1);
    assert_int_equal(pl_vm_decide(vm, 0, &err), 0);
    if (pl_vm_tick(vm, 1, &err) < 0)
        fail_msg("%s", err.message);
    pl_vm_free(vm);
}

/* --- the harness --- */

static void test_order_and_skip(void **state)
{
    pl_vm *vm =
        ready_vm("local pl = require 'perilune' return { api = 1,\n"
                 "admit = function(req) if req.priority == 9 then return pl.SHED, 5 end\n"
                 "  if req.priority == 8 then return pl.SHRINK, 10 end end,\n"
                 "route = function(req, fleet) if req.priority == 7 then return 1 end end,\n"
                 "score = function(req, w) return -w.inflight end }",
                 shared);
    pl_vm_error err;
    pl_records *r = fill(vm, 3, 1);
    r->workers[2].eligible = false;
    assert_int_equal(pl_vm_decide(vm, 0, &err), 0);
    assert_int_equal(r->verdict->scored, 1);
    assert_true(r->cost[1] == -1 && isinf(r->cost[2]));
    assert_true(r->verdict->admit_ns > 0);
    r->req->priority = 9;
    assert_int_equal(pl_vm_decide(vm, 0, &err), 0);
    assert_true(r->verdict->action == PL_SHED && r->verdict->arg == 5 && !r->verdict->scored);
    assert_int_equal(pl_vm_decide(vm, 1u << PL_HOOK_ADMIT, &err), 0);
    assert_true(r->verdict->action == 0 && r->verdict->scored);
    r->req->priority = 8;
    assert_int_equal(pl_vm_decide(vm, 0, &err), 0);
    assert_true(r->verdict->action == PL_SHRINK && r->verdict->arg == 10 && r->verdict->scored);
    r->req->priority = 7;
    assert_int_equal(pl_vm_decide(vm, 0, &err), 0);
    assert_true(r->verdict->index == 1 && !r->verdict->scored && r->verdict->reason_len == 0);
    pl_vm_free(vm);
}

static int lua_heap(pl_vm *vm)
{
    return lua_gc(vm->L, LUA_GCCOUNT, 0) * 1024 + lua_gc(vm->L, LUA_GCCOUNTB, 0);
}

/* Once compiled, a decision leaves no garbage. */
static void no_garbage(const char *text)
{
    pl_vm *vm = ready_vm(text, shared);
    pl_vm_error err;
    for (int i = 0; i < 2000; i++) {
        fill(vm, 16, (uint64_t)i);
        if (pl_vm_decide(vm, 0, &err) < 0)
            fail_msg("%d: %s", err.line, err.message);
    }
    int before = lua_heap(vm);
    for (int i = 0; i < 10000; i++) {
        fill(vm, 16, (uint64_t)i);
        assert_int_equal(pl_vm_decide(vm, 0, &err), 0);
    }
    assert_int_equal(lua_heap(vm), before);
    pl_vm_free(vm);
}

/* A cycle over much that is kept is not run again and again for little garbage. */
static void test_much_that_is_kept(void **state)
{
    pl_shared *sums = pl_shared_new();
    pl_vm *vm = ready_vm(
        "local pl = require 'perilune'\n"
        "local kept, weak, cycles = {}, setmetatable({}, { __mode = 'k' }), pl.counter('cycles')\n"
        "for i = 1, 40 do kept[i] = ('x'):rep(2 ^ 18 + i) end\n" /* 10 of 16 MiB */
        "weak[{}] = true\n"
        "return { api = 1, score = function(req, w)\n"
        "  if next(weak) == nil then weak[{}] = true cycles:add() end\n"
        "  return #kept end }",
        sums);
    pl_vm_error err;
    fill(vm, 1, 1);
    for (int i = 0; i < 6400; i++)
        assert_int_equal(pl_vm_decide(vm, 0, &err), 0);
    int handle = pl_shared_counter(sums, PL_STR("cycles"));
    assert_in_range(pl_shared_counter_add(sums, handle, 0), 0, 3);
    pl_vm_free(vm);
    pl_shared_free(sums);
}

static void test_no_garbage(void **state)
{
    no_garbage(
        "return { api = 1, params = { weight = 1 },\n"
        "score = function(req, w, st) return w.inflight + st.weight * req.prompt_tokens end }");
    no_garbage("local pl = require 'perilune' return { api = 1,\n"
               "admit = function(req, fleet) return pl.ADMIT end,\n"
               "route = function(req, fleet) local best, least = nil, math.huge\n"
               "for i = 0, fleet.n - 1 do local w = fleet[i]\n"
               "  if w.eligible and w.inflight < least then best, least = w, w.inflight end end\n"
               "return best.index, 'least' end }");
    no_garbage("local pl = require 'perilune' return { api = 1, route = function(req, fleet)\n"
               "for i = 0, fleet.n - 1 do fleet.cost[i] = fleet[i].inflight end return "
               "pl.pick_min() end }");
}

/* --- memory --- */

static void test_memory_cap_breaks_the_vm(void **state)
{
    for (int round = 0; round < 20; round++) {
        pl_vm *vm = ready_vm(
            "return { api = 1, score = function(req, w)\n"
            "if req.priority == 1 then local t = {} for i = 1, 1e9 do t[i] = { i } end end\n"
            "return w.inflight end }",
            shared);
        pl_vm_error err;
        pl_records *r = pl_vm_records(vm);
        r->req->priority = 0;
        for (int i = 0; i < 300; i++) {
            fill(vm, 4, 1);
            assert_int_equal(pl_vm_decide(vm, 0, &err), 0);
        }
        fill(vm, 4, 1);
        r->req->priority = 1;
        assert_int_equal(pl_vm_decide(vm, 0, &err), PL_EPOLICY);
        assert_true(pl_vm_broken(vm));
        assert_non_null(strstr(err.message, "memory cap of 16 MiB"));
        assert_string_equal(err.stage, "score");
        assert_int_equal(pl_vm_decide(vm, 0, &err), PL_EPOLICY);
        pl_vm_free(vm);
    }
}

/* Memory may run out at any point of the life of a VM: an error, never a crash. */
static void test_any_memory_cap(void **state)
{
    const char *text =
        "local pl = require 'perilune' local c = pl.counter('c')\n"
        "return { api = 1, params = { a = 1 }, init = function() return { list = {} } end,\n"
        "route = function(req, fleet, st) st.list[#st.list + 1] = req:model() .. #st.list\n"
        "  return fleet[0].index, 'r' end, save = function(st) return st end }";
    int made = 0;
    for (size_t cap = 16u << 10; cap < 700u << 10; cap += 8u << 10) {
        pl_policy_source *src = source_of(text, NULL);
        pl_vm_options o = {.loops = 1, .memory_bytes = cap, .shared = shared};
        pl_vm_error err;
        pl_vm *vm;
        int rc = pl_vm_new(src, &o, &vm, &err);
        pl_policy_source_unref(src);
        if (rc == 0)
            rc = pl_vm_init(vm, NULL, &err);
        for (int i = 0; i < 20000 && rc == 0; i++) {
            fill(vm, 2, 1);
            rc = pl_vm_decide(vm, 0, &err);
            if (rc == 0)
                pl_vm_idle(vm);
            made += rc == 0;
        }
        json_t *carry = NULL;
        if (vm && rc == 0)
            pl_vm_save(vm, &carry, &err);
        json_decref(carry);
        pl_vm_free(vm);
    }
    assert_true(made > 1000);
}

/* Loops build and use their own VMs of one source at once; counters and averages are shared. */
typedef struct loop_thread {
    pthread_t thread;
    pl_policy_source *src;
    bool ok;
} loop_thread;

static void *run_loop(void *arg)
{
    loop_thread *t = arg;
    pl_vm_options o = {.loops = 4, .seed = 1, .memory_bytes = 16u << 20, .shared = shared};
    pl_vm_error err;
    pl_vm *vm;
    t->ok = pl_vm_new(t->src, &o, &vm, &err) == 0 && pl_vm_init(vm, NULL, &err) == 0;
    for (int i = 0; i < 5000 && t->ok; i++) {
        fill(vm, 4, (uint64_t)i);
        t->ok = pl_vm_decide(vm, 0, &err) == 0;
    }
    if (vm)
        pl_vm_free(vm);
    return NULL;
}

static void test_loops_share(void **state)
{
    put_file("beside.lua", "return 4");
    pl_policy_source *src =
        source_of("local pl = require 'perilune' local n = require 'beside'\n"
                  "local c, e = pl.counter('threads'), pl.worker_ewma('threads', 5)\n"
                  "return { api = 1, route = function(req, fleet) c:add(1)\n"
                  "e:update(fleet[n - 1], 7) pl.metric('threads', c:get())\n"
                  "return pl.ring(req:id()) end }",
                  NULL);
    loop_thread t[4];
    for (int i = 0; i < 4; i++) {
        t[i].src = src;
        pthread_create(&t[i].thread, NULL, run_loop, &t[i]);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(t[i].thread, NULL);
        assert_true(t[i].ok);
    }
    pl_policy_source_unref(src);
    int handle = pl_shared_counter(shared, PL_STR("threads"));
    assert_true(pl_shared_counter_add(shared, handle, 0) == 20000);
    handle = pl_shared_ewma(shared, PL_STR("threads"), 5);
    assert_true(fabs(pl_shared_ewma_get(shared, handle, 3, 1) - 7) < 1e-9);
    assert_true(isnan(pl_shared_ewma_get(shared, handle, 3, 2))); /* another generation */
}

static void test_garbage_is_collected_when_idle(void **state)
{
    pl_vm *vm = ready_vm("return { api = 1, route = function(req) local t = {}\n"
                         "for i = 1, 100 do t[i] = { i } end return 0 end }",
                         shared);
    pl_vm_error err;
    for (int i = 0; i < 20000; i++) { /* 100 MB in all, under a cap of 16 */
        fill(vm, 2, 1);
        if (pl_vm_decide(vm, 0, &err) < 0)
            fail_msg("%d: %d: %s", i, err.line, err.message);
        pl_vm_idle(vm);
    }
    assert_true(pl_vm_memory_used(vm) < 4u << 20);
    /* and without idleness too */
    for (int i = 0; i < 20000; i++) {
        fill(vm, 2, 1);
        assert_int_equal(pl_vm_decide(vm, 0, &err), 0);
    }
    assert_true(pl_vm_memory_used(vm) < 14u << 20);
    pl_vm_free(vm);
}

/* --- carry --- */

static void test_carry(void **state)
{
    const char *text =
        "local seen return { api = 1, init = function(p, carry, ctx)\n"
        "assert(ctx.loop == 0 and ctx.loops == 1 and ctx.seed)\n"
        "if carry then assert(carry.n == 1 and carry.s == 'a\\0b' and carry.list[3] == 30)\n"
        "  assert(carry.slots[0] == 'zero' and carry.slots[7] == true and carry['#x'].y == 1.5)\n"
        "  assert(next(carry.empty) == nil) end\n"
        "return carry or { n = 1, s = 'a\\0b', list = { 10, 20, 30 }, slots = { [0] = 'zero', [7] "
        "= true },\n"
        "  ['#x'] = { y = 1.5 }, empty = {} } end,\n"
        "save = function(st) return st end }";
    pl_vm_error err;
    pl_vm *a = ready_vm(text, shared);
    json_t *carry = NULL, *again = NULL;
    assert_int_equal(pl_vm_save(a, &carry, &err), 0);
    assert_non_null(carry);
    pl_vm *b = try_vm(text, shared, &err);
    if (pl_vm_init(b, carry, &err) < 0)
        fail_msg("%s", err.message);
    assert_int_equal(pl_vm_save(b, &again, &err), 0);
    assert_true(json_equal(carry, again));
    json_decref(carry);
    json_decref(again);
    pl_vm_free(a);
    pl_vm_free(b);
}

static void unsaveable(const char *made, const char *part)
{
    char text[256];
    snprintf(text, sizeof text, "return { api = 1, save = function() %s end }", made);
    pl_vm *vm = ready_vm(text, shared);
    pl_vm_error err;
    json_t *out;
    assert_int_equal(pl_vm_save(vm, &out, &err), PL_EPOLICY);
    assert_null(out);
    if (!strstr(err.message, part))
        fail_msg("wanted '%s', got '%s'", part, err.message);
    pl_vm_free(vm);
}

static void test_unsaveable(void **state)
{
    unsaveable("return 1", "must return a table");
    unsaveable("return { a = { b = print } }", "save.a.b: plain data only, not a function");
    unsaveable("return { 1, { x = 0/0 } }", "save[2].x: a number that is not finite");
    unsaveable("local t = {} t.a = { t } return t", "save.a[1]: a table that contains itself");
    unsaveable("return { [true] = 1 }", "a key is a string or an integer");
    unsaveable("return { a = ('x'):rep(70000) }", "save.a: there is more data");
    unsaveable("local t = {} for i = 1, 20000 do t[i] = { i } end return t", "more data");
    unsaveable("return { '\\255' }", "not UTF-8");
    unsaveable("local t = {} local u = t for i = 1, 40 do u.x = {} u = u.x end return t", "deep");
}

/* --- shared --- */

static void collect_metric(void *ctx, pl_str name, double value)
{
    if (pl_str_eq(name, PL_STR("depth")))
        *(double *)ctx = value;
}

static void test_shared_between_vms(void **state)
{
    const char *text =
        "local pl = require 'perilune' local c = pl.counter('both')\n"
        "return { api = 1, route = function() pl.metric('depth', c:add(1)) return 0 end }";
    pl_vm *a = ready_vm(text, shared), *b = ready_vm(text, shared);
    pl_vm_error err;
    fill(a, 1, 1);
    fill(b, 1, 1);
    assert_int_equal(pl_vm_decide(a, 0, &err), 0);
    assert_int_equal(pl_vm_decide(b, 0, &err), 0);
    double seen = 0;
    pl_shared_each_metric(shared, collect_metric, &seen);
    assert_true(seen == 2);
    pl_vm_set_dry(a, true);
    assert_int_equal(pl_vm_decide(a, 0, &err), 0);
    pl_shared_each_metric(shared, collect_metric, &seen);
    assert_true(seen == 2);
    pl_vm_free(a);
    pl_vm_free(b);
}

static void test_too_many_names(void **state)
{
    refused("local pl = require 'perilune'\nfor i = 1, 300 do pl.counter('n' .. i) end return { "
            "api = 1 }",
            "run", 2, "too many different names");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_budget_and_memory_while_loading),
        cmocka_unit_test(test_sandbox_refuses),
        cmocka_unit_test(test_params_frozen),
        cmocka_unit_test(test_param_overrides),
        cmocka_unit_test(test_require_beside),
        cmocka_unit_test(test_sha256_of_one_file_is_the_files),
        cmocka_unit_test(test_source_errors),
        cmocka_unit_test(test_record_rules),
        cmocka_unit_test(test_tail_call_names_the_hook),
        cmocka_unit_test(test_bad_answers),
        cmocka_unit_test(test_reads_and_helpers),
        cmocka_unit_test(test_strings_end_with_the_call),
        cmocka_unit_test(test_order_and_skip),
        cmocka_unit_test(test_no_garbage),
        cmocka_unit_test(test_much_that_is_kept),
        cmocka_unit_test(test_memory_cap_breaks_the_vm),
        cmocka_unit_test(test_any_memory_cap),
        cmocka_unit_test(test_loops_share),
        cmocka_unit_test(test_garbage_is_collected_when_idle),
        cmocka_unit_test(test_carry),
        cmocka_unit_test(test_unsaveable),
        cmocka_unit_test(test_shared_between_vms),
        cmocka_unit_test(test_too_many_names),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
