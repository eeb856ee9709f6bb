local testing = require "perilune.testing"

describe("least_loaded", function()
  local policy
  before_each(function() policy = testing.load "policies/least_loaded.lua" end)

  local function pick(workers, random)
    local d = policy:decide { workers = workers, random = random }
    assert.same({}, d.errors)
    return d.worker, d
  end

  it("takes the fewest in flight", function()
    local worker, d = pick { { inflight = 3 }, { inflight = 1 }, { inflight = 2 } }
    assert.equal("b", worker)
    assert.equal("score", d.reason)
    assert.same({ [0] = 4, 2, 3 }, d.cost)
  end)

  it("counts for its weight: what the load would be after this request", function()
    -- 4/2 = 2 against 3/1
    assert.equal("a", pick { { inflight = 3, weight = 2 }, { inflight = 2 } })
    -- idle both: 1/2 against 1/1
    assert.equal("a", pick { { weight = 2 }, {} })
    assert.equal("b", pick { { weight = 0 }, { inflight = 1000 } })
  end)

  it("breaks ties by the request's random number", function()
    local workers = { { inflight = 1 }, {}, { inflight = 1 }, {}, {} } -- b, d, e tie
    assert.equal("b", pick(workers, { 0 }))
    assert.equal("b", pick(workers, { 0.33 }))
    assert.equal("d", pick(workers, { 0.34 }))
    assert.equal("e", pick(workers, { 0.99 }))
  end)

  it("never takes the ineligible", function()
    assert.equal("b", pick { { eligible = false }, { inflight = 9 } })
    assert.is_nil((pick { { eligible = false }, { eligible = false } }))
  end)

  it("looks at prompts that wait for their prefill only when told to", function()
    local workers = { { inflight = 1, queued_prefill_tokens = 8000 }, { inflight = 5 } }
    assert.equal("a", pick(workers))
    policy = testing.load("policies/least_loaded.lua", { prefill_weight = 0.001 })
    local worker, d = pick(workers)
    assert.equal("b", worker)
    assert.same({ [0] = 10, 6 }, d.cost)
  end)
end)
