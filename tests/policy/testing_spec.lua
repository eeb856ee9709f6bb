-- The doubles behave like the real records: what would fail in the router fails here, in the same
-- words.
local testing = require "perilune.testing"

local function policy_with(hook, body)
  return testing.load(([[
    local pl = require "perilune"
    local policy = { api = 1 }
    function policy.%s
      %s
    end
    return policy
  ]]):format(hook, body))
end

local function failure(hook, body, given)
  local d = policy_with(hook, body):decide(given or {})
  assert.equal(1, #d.errors)
  return d.errors[1].message, d
end

describe("records", function()
  it("refuse unknown fields, naming the line", function()
    local message = failure("score(req, w)", "return w.in_flight")
    assert.matches("^policy.lua:4: .*in_flight", message)
    assert.matches("no field 'prompt'", failure("score(req, w)", "return req.prompt"))
    assert.matches("no field 'size'", failure("route(req, fleet)", "return fleet.size"))
  end)

  it("refuse writes", function()
    assert.matches("inflight", failure("score(req, w)", "w.inflight = 0 return 1"))
    assert.matches("prompt_tokens", failure("score(req, w)", "req.prompt_tokens = 0 return 1"))
    assert.matches("read%-only", failure("route(req, fleet)", "fleet[0] = nil"))
    assert.matches("read%-only", failure("route(req, fleet)", "fleet.mine = 1"))
  end)

  it("check bounds", function()
    local given = { workers = testing.fleet(2) }
    assert.matches("2.*0 .. 1", failure("route(req, fleet)", "return fleet[2].index", given))
    assert.matches("%-1", failure("route(req, fleet)", "return fleet[-1].index", given))
    assert.matches("0.5", failure("route(req, fleet)", "return fleet[0.5].index", given))
    assert.matches("cost", failure("route(req, fleet)", "fleet.cost[2] = 1", given))
  end)

  it("hold what the test gave, and sensible values for the rest", function()
    local policy = policy_with("score(req, w)", [[
      assert(req.prompt_tokens == 7 and req.max_tokens == -1 and req.choices == 1 and req.api == pl.API_CHAT)
      assert(req.stream and req.has_session and req.arrival_seconds == 5 and pl.now() == 5)
      assert(req:model() == "big" and req:tenant() == "t" and req:path() == "/v1/chat/completions")
      assert(req:session_id() == "s" and req:header("X-A") == "1" and req:header("x-b") == nil)
      assert(req:member("user") == "u" and req:member("seed") == nil)
      assert(w.max_inflight == math.huge and w.weight == 1 and w.generation == 1)
      assert(w:name() == (w.index == 0 and "first" or "b"))
      assert(w.eligible or w.why == pl.WHY_DRAINING)
      return 1
    ]])
    local d = policy:decide {
      now = 5,
      req = { prompt_tokens = 7, stream = true, model = "big", tenant = "t", session_id = "s",
        headers = { ["x-a"] = "1" }, members = { user = "u" } },
      workers = { { name = "first" }, {}, { why = 3 } },
    }
    assert.same({}, d.errors)
  end)

  it("refuse a test that misspells a field", function()
    local policy = policy_with("score(req, w)", "return 1")
    assert.has_error(function() policy:decide { workers = { { in_flight = 1 } } } end,
      "workers[1] has no field 'in_flight'")
    assert.has_error(function() policy:decide { req = { tokens = 1 } } end, "req has no field 'tokens'")
  end)
end)

describe("pl.uncached_tokens", function()
  it("is what a worker would have to prefill, lower tiers in part", function()
    local policy = policy_with("score(req, w)", [[
      assert(pl.uncached_tokens(req, w) == 700 and pl.uncached_tokens(req, w, 0.5) == 600)
      assert(pl.uncached_tokens(req, w, 0.5, 0.25) == 575 and pl.uncached_tokens(req, w, 100) == 0)
      return 1
    ]])
    local d = policy:decide { req = { prompt_tokens = 1000 },
      workers = { { cached_tokens = 300, cached_host_tokens = 200, cached_disk_tokens = 100 } } }
    assert.same({}, d.errors)
  end)
end)

describe("fleet.cost", function()
  it("is shown as route left it", function()
    local policy = policy_with("route(req, fleet)", "fleet.cost[1] = 7 return 1")
    assert.same({ [1] = 7 }, policy:decide({ workers = testing.fleet(3) }).cost)
  end)

  it("is scratch for pl.pick_min", function()
    local policy = policy_with("route(req, fleet)", [[
      for i = 0, fleet.n - 1 do fleet.cost[i] = -fleet[i].inflight end
      return pl.pick_min(), "most_loaded"
    ]])
    local d = policy:decide { workers = { { inflight = 1 }, { inflight = 3 }, { inflight = 2 } } }
    assert.same({}, d.errors)
    assert.equal("b", d.worker)
  end)
end)

describe("decisions", function()
  it("fall from route to score to the default", function()
    local policy = testing.load [[
      local policy = { api = 1 }
      function policy.route(req) if req.priority == 1 then return 2, "mine" end end
      function policy.score(req, w) if req.priority == 3 then return math.huge end return w.index end
      return policy
    ]]
    local function by(priority)
      local d = policy:decide { req = { priority = priority }, workers = { { inflight = 3 }, {}, { inflight = 1 } } }
      return d.worker .. " " .. d.by .. " " .. d.reason
    end
    assert.equal("c route mine", by(1))
    assert.equal("a score score", by(2))
    assert.equal("b default least_loaded", by(3))
  end)

  it("leave out a hook that fails and go on with the next", function()
    local policy = testing.load [[
      local policy = { api = 1 }
      function policy.route() error("no route") end
      function policy.score(req, w) return -w.index end
      return policy
    ]]
    local d = policy:decide { workers = testing.fleet(3) }
    assert.equal("c", d.worker)
    assert.equal("score", d.by)
    assert.equal("route", d.errors[1].hook)
    assert.equal("policy.lua:2: no route", d.errors[1].message)
  end)

  it("refuse answers that are none", function()
    for body, words in pairs {
      ["return 3"] = "3",
      ["return -1"] = "%-1",
      ["return 0.5"] = "0.5",
      ["return 2 ^ 40"] = "0 .. 2",
      ["return 0 / 0"] = "0 .. 2",
      ["return 1"] = "not eligible",
      ["return true"] = "route answered",
    } do
      local d = policy_with("route(req, fleet)", body):decide { workers = { {}, { eligible = false }, {} } }
      assert.is_truthy(d.worker, body)
      assert.matches(words, d.errors[1].message)
    end
    assert.matches("NaN", failure("score(req, w)", "return 0 / 0"))
    assert.matches("score answered nothing", failure("score(req, w)", ""))
    assert.matches("score answered a string", failure("score(req, w)", "return '7'"))
  end)

  it("bend answers to what is allowed, and say so", function()
    local d = policy_with("route(req, fleet)", "return 1, 'a b'"):decide {}
    assert.equal("b route", d.worker .. " " .. d.reason)
    assert.same({ route = 1 }, d.clamped)
    d = policy_with("score(req, w)", "return math.huge"):decide {}
    assert.equal("default", d.by)
    assert.same({ score = 1 }, d.clamped)
  end)

  it("tell what admit said", function()
    local policy = policy_with("admit(req)", [[
      if req.priority == 1 then return pl.QUEUE, 3 end
      if req.priority == 2 then return pl.SHED, 9 end
      if req.priority == 3 then return pl.SHRINK, 16 end
      return pl.ADMIT
    ]])
    local function ask(priority)
      local d = policy:decide { req = { priority = priority } }
      return { d.action or "ADMIT", d.arg or 0, d.worker ~= nil }
    end
    assert.same({ "QUEUE", 3, false }, ask(1))
    assert.same({ "SHED", 9, false }, ask(2))
    assert.same({ "SHRINK", 16, true }, ask(3))
    assert.same({ "ADMIT", 0, true }, ask(4))
  end)

  it("sample by temperature", function()
    local policy = testing.load [[
      return { api = 1, temperature = 1, score = function(req, w) return w.inflight end }
    ]]
    -- costs 0, 5, 10 scale to 0, 1/2, 1: weights 1, 0.607, 0.368 of 1.974
    local workers = { { inflight = 0 }, { inflight = 5 }, { inflight = 10 } }
    assert.equal("a", policy:decide { workers = workers, random = { 0.50 } }.worker)
    assert.equal("b", policy:decide { workers = workers, random = { 0.51 } }.worker)
    assert.equal("b", policy:decide { workers = workers, random = { 0.81 } }.worker)
    assert.equal("c", policy:decide { workers = workers, random = { 0.82 } }.worker)
  end)

  it("are the same again from the same seed", function()
    local function run(seed)
      local policy = testing.load("policies/random.lua", nil, { seed = seed })
      return policy:trace(40, { workers = testing.fleet(5) })
    end
    assert.equal(run(7), run(7))
    assert.not_equal(run(7), run(8))
  end)
end)

describe("the other hooks", function()
  it("carry state over a reload", function()
    local source = [[
      local policy = { api = 1, params = { by = 1 } }
      function policy.init(params, carry) return { n = carry and carry.n or 0, by = params.by } end
      function policy.score(req, w, st) return w.index == st.n % 2 and 0 or 1 end
      function policy.done(req, outcome, st) if outcome.status == 200 then st.n = st.n + st.by end end
      function policy.save(st) return { n = st.n } end
      return policy
    ]]
    local old = testing.load(source)
    assert.equal("a", old:decide { workers = testing.fleet(2) }.worker)
    old:done { outcome = { status = 200 } }
    old:done { outcome = { status = 500 } }
    assert.same({ n = 1 }, old:save())
    local new = testing.load(source, nil, { carry = old:save() })
    assert.equal("b", new:decide { workers = testing.fleet(2) }.worker)
  end)

  it("degrade, tick, log, metric, counter, worker_ewma", function()
    local policy = testing.load [[
      local pl = require "perilune"
      local policy = { api = 1 }
      local seen, speed = pl.counter("seen"), pl.worker_ewma("speed", 10)
      function policy.degrade(req, fault) return fault.kind == pl.ALL_BUSY and pl.QUEUE or pl.REJECT, 4 end
      function policy.tick(now) pl.metric("now", now) print("tick", now) end
      function policy.score(req, w)
        seen:add()
        return speed:get(w, 1)
      end
      function policy.done(req, outcome) speed:update(outcome, outcome.e2e_seconds) end
      return policy
    ]]
    local pl_queue, pl_reject = 2, 7
    assert.same({ pl_queue, 4 }, { policy:degrade { fault = { kind = 4 } } })
    assert.same({ pl_reject, 4 }, { policy:degrade { fault = { kind = 2 } } })
    policy:tick(12)
    assert.same({ "tick\t12" }, policy.log)
    assert.equal(12, policy.metrics.now)
    policy:done { outcome = { slot = 0, generation = 1, e2e_seconds = 3 }, now = 12 }
    assert.equal("b", policy:decide { workers = testing.fleet(2), now = 12 }.worker)
    policy:done { outcome = { slot = 1, generation = 1, e2e_seconds = 5 }, now = 22 }
    -- after one half-life: (3 + 1) / 2
    policy:done { outcome = { slot = 0, generation = 1, e2e_seconds = 1 }, now = 22 }
    local d = policy:decide { workers = testing.fleet(2), now = 22 }
    assert.same({ [0] = 2, 5 }, d.cost)
  end)
end)

describe("sessions", function()
  local C = require("ffi").C

  local function seen(body, given)
    local d = policy_with("route(req, fleet)", body):decide(given)
    assert.same({}, d.errors)
    return d
  end

  it("are nil for a request that names none", function()
    seen("assert(req.session == nil and not req.has_session)", {})
    local policy = policy_with("route(req, fleet)", "assert((req.session == nil) == (req.priority == 1))")
    for k = 1, 100 do
      local named = k % 2 == 0
      assert.same({}, policy:decide { session = named and {} or nil, req = { priority = named and 0 or 1 } }.errors)
    end
  end)

  it("hold what the test gave, and sensible values for the rest", function()
    seen([[
      local s = req.session
      assert(req.has_session and req:session_id() == "sub" and s:id() == "sub" and s:parent_id() == "lead")
      assert(s.has_parent and s.parent_hash > 0 and s.id_hash > 0 and s.turn == 2)
      assert(s.event == pl.SESSION_TURN and s.kind == pl.ROUTER_ONLY and s.ttl_seconds == 300 and s.held_tokens == -1)
      assert(s.bound_index == 1 and s.bound_slot == 7 and s:is_bound_to(fleet[1]) and not s:is_bound_to(fleet[0]))
    ]], { session = { id = "sub", parent = "lead", turn = 2, bound = "b" }, workers = { {}, { slot = 7 } } })
    seen([[
      local s = req.session
      assert(s.bound_index == -1 and s.bound_slot == -1 and not s:is_bound_to(fleet[0]) and s:parent_id() == nil)
    ]], { session = { bound = "gone" } })
  end)

  it("are checked like other records", function()
    assert.matches("the session %(s%) has no field 'idle'", failure("route(req)", "return req.session.idle",
      { session = {} }))
    assert.matches("read%-only", failure("route(req)", "req.session.turn = 1", { session = {} }))
    assert.matches("w is a worker, not a number", failure("route(req)", "return req.session:is_bound_to(3)",
      { session = {} }))
    assert.matches("attempt to index field 'session' %(a nil value%)", failure("route(req)", "return req.session.turn"))
    assert.matches("perilune has no 'TURN' %(an event of a session is pl.SESSION_TURN%)",
      failure("route(req)", "return pl.TURN"))
    assert.has_error(function() seen("", { session = { nope = 1 } }) end, "session has no field 'nope'")
  end)

  it("stay where they are bound, unless affinity is soft", function()
    local full = { why = C.PL_WHY_AT_CAPACITY }
    local function decide(affinity, answer, session, workers)
      local d = testing.load(("return { api = 1, affinity = %q,\nroute = function() return %s end }"):format(
        affinity, answer)):decide { session = session, workers = workers or testing.fleet(3), random = { 0 } }
      return (d.worker or "-") .. ":" .. (d.action or d.reason)
    end
    assert.equal("b:session", decide("hard", "2", { bound = "b" }))
    assert.equal("c:route", decide("soft", "2", { bound = "b" }))
    assert.equal("b:session", decide("soft", "nil", { bound = "b" }))
    assert.equal("b:session", decide("soft", "2", { bound = "b", must = true }))
    assert.equal("c:session_spill", decide("hard", "2", { bound = "b" }, { {}, full, {} }))
    assert.equal("c:mine", decide("hard", "2, 'mine'", { bound = "b" }, { {}, full, {} }))
    assert.equal("a:session_spill", decide("hard", "nil", { bound = "b" }, { {}, full, {} }))
    assert.equal("-:QUEUE", decide("hard", "2", { bound = "b", must = true }, { {}, full, {} }))
    assert.equal("-:PIN_LOST", decide("hard", "2", { must = true }))
    assert.equal("c:route", decide("hard", "2", { bound = "b" }, { {}, { eligible = false }, {} }))
  end)

  it("have hooks of their own", function()
    local policy = testing.load [[
      local pl = require "perilune"
      local policy = { api = 1 }
      function policy.session(req, s) return s.turn > 0 and 60 or nil, s.has_parent and pl.ENGINE_BACKED or nil end
      function policy.retain(req, w)
        assert(w:name() == "big" and w.index == 0)
        return req.session and 30 or nil, req.priority
      end
      function policy.expire(s)
        if s:id() == "keep" then return pl.EXTEND, s.ttl_seconds / 2 end
        if s.held_tokens > 100 then return pl.DROP end
      end
      return policy
    ]]
    local function same(a, b, c, d)
      assert.equal(a, c)
      assert.equal(b, d)
    end
    same(nil, nil, policy:session { session = {} })
    same(60, nil, policy:session { session = { turn = 1 } })
    same(60, C.PL_ENGINE_BACKED, policy:session { session = { turn = 1, parent = "p" } })
    same(nil, C.PL_ENGINE_BACKED, policy:session { session = { parent = "p" } })
    same(30, 4, policy:retain { session = {}, worker = { name = "big" }, req = { priority = 4 } })
    same(nil, 0, policy:retain { worker = { name = "big" } })
    same(C.PL_CLOSE, nil, policy:expire { session = {} })
    same(C.PL_DROP, nil, policy:expire { session = { held_tokens = 101 } })
    same(C.PL_EXTEND, 150, policy:expire { session = { id = "keep" } })
    assert.has_error(function() policy_with("session(req, s)", "return '60'"):session { session = {} } end)
    assert.matches("expire answered nothing; it must answer a number of seconds beside pl.EXTEND", select(2,
      pcall(policy.expire, policy_with("expire(s)", "return pl.EXTEND"), { session = {} })), 1, true)
  end)
end)

describe("loading", function()
  local function stage(source, overrides)
    local policy, at, message = testing.try_load(source .. "\n", overrides)
    assert.is_nil(policy)
    return at, message
  end

  it("fails where the router would", function()
    assert.equal("read", (select(2, testing.try_load "no/such/policy.lua")))
    assert.equal("parse", (stage "return {"))
    assert.equal("run", (stage "local x = nothing return {}"))
    assert.equal("check", (stage "return 7"))
    assert.equal("check", (stage "return { api = 1, affinity = 'sticky' }"))
    assert.equal("check", (stage("return { api = 1, params = { x = 1 } }", { y = 2 })))
    assert.equal("check", (stage("return { api = 1, params = { x = 1 } }", { x = "2" })))
    assert.equal("init", (stage "return { api = 1, init = function() error('x') end }"))
    assert.equal("parse", (stage(string.dump(function() end))))
  end)

  it("leaves the process as it was", function()
    pcall(stage, "string.rep = nil")
    assert.equal(2 ^ 21, #("x"):rep(2 ^ 21)) -- the sandbox's own would refuse
    assert.is_nil(rawget(_G, "policy"))
  end)
end)
