local testing = require "perilune.testing"
local C = require("ffi").C

-- In tests a hash is the sum of the bytes. Parent "a" is 97: counter 97 % 64 = 33, first place 97 / 64 = 1. Parent
-- "b" is 98: counter 34, place 1. Parent "ap" is 209: counter 17, place 3.
describe("agent_sessions", function()
  local policy
  before_each(function() policy = testing.load "policies/agent_sessions.lua" end)

  local function pick(session, workers)
    local d = policy:decide { session = session, workers = workers or testing.fleet(4), random = { 0, 0 } }
    assert.same({}, d.errors)
    return d.worker, d.reason
  end

  local function siblings(parent, n, workers)
    local list = {}
    for i = 1, n do list[i] = pick({ id = "sub-" .. i, parent = parent }, workers) end
    return table.concat(list, " ")
  end

  it("balances leads: no affinity, the least loaded each turn", function()
    local worker, reason = pick({ id = "lead" }, { { inflight = 2 }, { inflight = 1 }, { inflight = 3 } })
    assert.equal("b", worker)
    assert.equal("score", reason)
    assert.same({ 0 }, { policy:session { session = { id = "lead" } } })
    assert.equal("a", (pick(nil, { {}, { inflight = 1 } })))
  end)

  it("spreads siblings over the workers, in turns", function()
    assert.equal("b c d a b", siblings("a", 5))
    local _, reason = pick { parent = "a" }
    assert.equal("sibling", reason)
  end)

  it("starts another family at its own place, with a count of its own", function()
    assert.equal("b c", siblings("a", 2))
    assert.equal("d a b", siblings("ap", 3))
    assert.equal("d a", siblings("a", 2))
  end)

  it("passes over the ineligible and workers of weight 0", function()
    -- of the eligible a, c, d the place 1 is c
    assert.equal("c d a c", siblings("a", 4, { {}, { eligible = false }, {}, {} }))
    policy = testing.load "policies/agent_sessions.lua"
    assert.equal("c d a c", siblings("a", 4, { {}, { weight = 0 }, {}, {} }))
    assert.is_nil((pick({ parent = "a" }, { { eligible = false } })))
  end)

  it("passes over a worker above its share", function()
    -- 8 in flight on 4 workers: 1.5 * 2 + 2 = 5 are too few for b's 6
    assert.equal("c", siblings("a", 1, { { inflight = 1 }, { inflight = 6 }, { inflight = 1 }, {} }))
    -- the second starts at c, and 5 are no more than 5
    assert.equal("c", siblings("a", 1, { { inflight = 2 }, {}, { inflight = 5 }, { inflight = 1 } }))
  end)

  it("keeps sub-agents where they are, and lets a full worker's go by load", function()
    local worker, reason = pick({ parent = "a", bound = "d" }, { {}, {}, {}, { inflight = 50 } })
    assert.equal("d", worker)
    assert.equal("session", reason)
    worker, reason = pick({ parent = "a", bound = "d" }, { { inflight = 1 }, { inflight = 1 }, {},
      { why = C.PL_WHY_AT_CAPACITY } })
    assert.equal("c", worker)
    assert.equal("session_spill", reason)
    -- neither counted as a new sibling
    assert.equal("b", siblings("a", 1))
  end)

  it("opens on an engine for those who ask for it", function()
    local open, bind = C.PL_SESSION_OPEN, C.PL_SESSION_BIND
    local engine, router = C.PL_ENGINE_BACKED, C.PL_ROUTER_ONLY
    local ttl, kind = policy:session { session = { event = open, parent = "a", kind = engine } }
    assert.is_nil(ttl)
    assert.equal(engine, kind)
    ttl, kind = policy:session { session = { event = bind, parent = "a" } }
    assert.is_nil(ttl)
    assert.equal(router, kind)
    assert.same({ 300, router }, { policy:session { session = { parent = "a" } } })
    assert.same({}, { policy:session { session = { parent = "a", bound_slot = 1 } } })
  end)

  it("asks for retention by role, and for none on the last turn", function()
    assert.equal(600, policy:retain { session = { id = "lead" } })
    assert.equal(60, policy:retain { session = { parent = "a" } })
    assert.equal(60, policy:retain { session = { kind = C.PL_ENGINE_BACKED } })
    assert.is_nil(policy:retain { session = { parent = "a", final = true } })
    assert.is_nil(policy:retain { session = { event = C.PL_SESSION_CLOSE } })
    assert.is_nil(policy:retain {})
    policy = testing.load("policies/agent_sessions.lua", { lead_retention_seconds = 0 })
    assert.is_nil(policy:retain { session = {} })
  end)

  it("tries to open once more, elsewhere", function()
    assert.equal(C.PL_RETRY, (policy:degrade { fault = { kind = C.PL_OPEN_FAILED, attempts = 1 } }))
    assert.equal(C.PL_DEFAULT, (policy:degrade { fault = { kind = C.PL_OPEN_FAILED, attempts = 2 } }))
    assert.equal(C.PL_DEFAULT, (policy:degrade { fault = { kind = C.PL_OPEN_FAILED, budget_left = false } }))
    assert.equal(C.PL_DEFAULT, (policy:degrade { fault = { kind = C.PL_NO_SESSION_ENGINE } }))
  end)
end)
