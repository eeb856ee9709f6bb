local testing = require "perilune.testing"
local C = require("ffi").C

describe("sticky_sessions", function()
  local policy
  before_each(function() policy = testing.load "policies/sticky_sessions.lua" end)

  local function pick(session, workers)
    local d = policy:decide { session = session, workers = workers, random = { 0, 0 } }
    assert.same({}, d.errors)
    return d.worker, d.reason
  end

  it("sends a new session, and a request without one, to the least loaded", function()
    local workers = { { inflight = 3 }, { inflight = 1 }, { inflight = 2 } }
    local worker, reason = pick({}, workers)
    assert.equal("b", worker)
    assert.equal("score", reason)
    assert.equal("b", (pick(nil, workers)))
    -- (3 + 1) / 4 is 1, less than (1 + 1) / 1
    assert.equal("a", (pick({}, { { inflight = 3, weight = 4 }, { inflight = 1 } })))
  end)

  it("keeps a bound one where it is, however loaded", function()
    local workers = { { inflight = 90 }, {}, {} }
    local worker, reason = pick({ bound = "a" }, workers)
    assert.equal("a", worker)
    assert.equal("session", reason)
  end)

  it("serves a turn elsewhere while its worker is at the cap", function()
    local workers = { { why = C.PL_WHY_AT_CAPACITY }, { inflight = 2 }, { inflight = 1 } }
    local worker, reason = pick({ bound = "a" }, workers)
    assert.equal("c", worker)
    assert.equal("session_spill", reason)
    local d = policy:decide { session = { bound = "a", must = true }, workers = workers }
    assert.equal("QUEUE", d.action)
  end)

  it("binds anew when its worker is gone or ill", function()
    local worker, reason = pick({ bound = "x" }, { { inflight = 1 }, {} })
    assert.equal("b", worker)
    assert.equal("score", reason)
    assert.equal("b", (pick({ bound = "a" }, { { why = C.PL_WHY_UNHEALTHY }, {} })))
    local d = policy:decide { session = { bound = "a", must = true }, workers = { { eligible = false }, {} } }
    assert.equal("PIN_LOST", d.action)
  end)

  it("gives sessions of headers its ttl, and leaves all others alone", function()
    assert.same({ 300 }, { policy:session { session = { event = C.PL_SESSION_TURN } } })
    assert.same({}, { policy:session { session = { event = C.PL_SESSION_OPEN, ttl_seconds = 60 } } })
    assert.same({}, { policy:session { session = { event = C.PL_SESSION_BIND, ttl_seconds = 60 } } })
    assert.same({}, { policy:session { session = { bound_slot = 2, ttl_seconds = 60 } } })
    policy = testing.load("policies/sticky_sessions.lua", { ttl_seconds = 20 })
    assert.same({ 20 }, { policy:session { session = {} } })
  end)

  it("follows a session over its life", function()
    -- Loads as they would be: the session's own turns are over before the next begins.
    local trace, bound = {}, nil
    for turn, workers in ipairs {
      { { inflight = 2 }, { inflight = 1 }, { inflight = 4 } },                  -- new: b
      { { inflight = 0 }, { inflight = 9 }, { inflight = 0 } },                  -- stays
      { { inflight = 3 }, { why = C.PL_WHY_AT_CAPACITY }, { inflight = 2 } },    -- spills to c
      { { inflight = 3 }, { inflight = 9 }, { inflight = 2 } },                  -- back
      { { inflight = 1 }, { why = C.PL_WHY_DRAINING }, { inflight = 2 } },       -- bound anew: a
      { { inflight = 8 }, { inflight = 0 }, { inflight = 0 } },                  -- stays
    } do
      local worker, reason = pick({ turn = turn - 1, bound = bound }, workers)
      if reason ~= "session_spill" then bound = worker end
      trace[turn] = worker .. ":" .. reason
    end
    assert.equal("b:score b:session c:session_spill b:session a:score a:session", table.concat(trace, " "))
  end)
end)
