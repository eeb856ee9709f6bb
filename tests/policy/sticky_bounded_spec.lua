local testing = require "perilune.testing"
local C = require("ffi").C

-- Workers prefill 8,000 tokens a second here. A prompt of 16,000 tokens costs 2 s to prefill anew, so with a factor of
-- 1.5 a turn moves to an idle worker when more than 3 s, 24,000 tokens, are queued at its own.
describe("sticky_bounded", function()
  local policy
  before_each(function()
    policy = testing.load("policies/sticky_bounded.lua", { inflight_seconds = 0 })
  end)

  local function pick(session, workers, tokens)
    local d = policy:decide { session = session, workers = workers, req = { prompt_tokens = tokens or 16000 },
      random = { 0, 0 } }
    assert.same({}, d.errors)
    return d.worker .. ":" .. d.reason
  end

  local function queued(...)
    local list = {}
    for i = 1, select("#", ...) do list[i] = { queued_prefill_tokens = (select(i, ...)) } end
    return list
  end

  it("sends a new session to where it costs the fewest seconds", function()
    assert.equal("b:score", pick({}, queued(4000, 1000, 2000)))
    assert.equal("b:score", pick(nil, queued(4000, 1000, 2000)))
    -- (4,000 + 16,000) / 20,000 is 1 s, (0 + 16,000) / 8,000 is 2 s
    assert.equal("a:score", pick({}, { { queued_prefill_tokens = 4000, prefill_tokens_per_second = 20000 }, {} }))
    -- 12,000 of 16,000 cached: 4,000 to go, and 8,000 before it
    assert.equal("a:score", pick({}, { { queued_prefill_tokens = 8000, cached_tokens = 12000 }, {} }))
  end)

  it("stays until the queue costs more than starting over", function()
    assert.equal("a:stayed", pick({ bound = "a" }, queued(0, 0, 0)))
    assert.equal("a:stayed", pick({ bound = "a" }, queued(24000, 0, 0)))
    assert.equal("b:moved", pick({ bound = "a" }, queued(24001, 0, 8000)))
    -- the others have queues, too: 1.5 * (8,000 + 16,000) = 36,000
    assert.equal("a:stayed", pick({ bound = "a" }, queued(36000, 8000, 9000)))
    assert.equal("b:moved", pick({ bound = "a" }, queued(36001, 8000, 9000)))
    -- a short prompt is cheap to start over
    assert.equal("b:moved", pick({ bound = "a" }, queued(2000, 0), 1000))
    -- cached elsewhere: 1.5 * 4,000 = 6,000
    assert.equal("b:moved", pick({ bound = "a" },
      { { queued_prefill_tokens = 6001 }, { cached_tokens = 12000 } }))
  end)

  it("counts requests in flight", function()
    policy = testing.load("policies/sticky_bounded.lua", { inflight_seconds = 0.1 })
    -- 31 in flight are 3.1 s; the other: 2 s. At 30 it is no more than 3 s
    assert.equal("b:moved", pick({ bound = "a" }, { { inflight = 31 }, {} }))
    assert.equal("a:stayed", pick({ bound = "a" }, { { inflight = 30 }, {} }))
  end)

  it("stays when there is no other", function()
    assert.equal("a:stayed", pick({ bound = "a" }, queued(1e6)))
    assert.equal("a:stayed", pick({ bound = "a" }, { { queued_prefill_tokens = 1e6 }, { eligible = false },
      { weight = 0 } }))
  end)

  it("never moves what an engine holds", function()
    assert.equal("a:session", pick({ bound = "a", must = true }, queued(1e6, 0)))
  end)

  it("goes to the cheapest other when the holder is at its cap or gone", function()
    local full = { why = C.PL_WHY_AT_CAPACITY }
    assert.equal("c:session_spill", pick({ bound = "a" }, { full, { queued_prefill_tokens = 9 }, {} }))
    assert.equal("b:score", pick({ bound = "x" }, queued(10, 0)))
    assert.equal("b:score", pick({ bound = "a" }, { { why = C.PL_WHY_UNHEALTHY }, {} }))
  end)

  it("does not go back and forth between two busy workers", function()
    local bound, trace = "a", {}
    for turn, workers in ipairs {
      queued(24001, 0),     -- 3 s and a bit against 2 s: moves to b
      queued(8000, 16000),  -- b holds it: 2 s against 1 + 2 s
      queued(0, 24000),     -- 3 s against 2 s: no more than 1.5 times
      queued(0, 24001),     -- moves back
      queued(20000, 0),     -- 2.5 s against 2 s
    } do
      local chosen = pick({ turn = turn, bound = bound }, workers)
      bound, trace[turn] = chosen:sub(1, 1), chosen
    end
    assert.equal("b:moved b:stayed b:stayed a:moved a:stayed", table.concat(trace, " "))
  end)

  it("refuses a factor below 1", function()
    local loaded, stage, message = testing.try_load("policies/sticky_bounded.lua", { factor = 0.9 })
    assert.is_nil(loaded)
    assert.equal("init", stage)
    assert.matches("factor must be at least 1", message)
  end)

  it("gives sessions of headers its ttl", function()
    assert.same({ 300 }, { policy:session { session = {} } })
    assert.same({}, { policy:session { session = { event = C.PL_SESSION_BIND } } })
  end)
end)
