local testing = require "perilune.testing"

describe("power_of_two", function()
  local policy
  before_each(function() policy = testing.load "policies/power_of_two.lua" end)

  -- Draws r1, r2 over n eligible workers: the first is floor(r1 * n), the second floor(r2 * (n - 1)),
  -- one further when that is not below the first.
  local function pick(r1, r2, workers)
    local d = policy:decide { random = { r1, r2 }, workers = workers }
    assert.same({}, d.errors)
    return d.worker, d.reason
  end

  it("takes the less loaded of two", function()
    local workers = { { inflight = 5 }, { inflight = 4 }, { inflight = 3 }, { inflight = 0 } }
    assert.equal("b", pick(0, 0, workers))       -- a, b
    assert.equal("c", pick(0, 0.34, workers))    -- a, c
    assert.equal("d", pick(0.99, 0.99, workers)) -- d, c
    assert.equal("c", pick(0.5, 0.4, workers))   -- c, b
    assert.equal("d", pick(0.5, 0.67, workers))  -- c, d
  end)

  it("does not look at the others", function()
    assert.equal("b", pick(0, 0, { { inflight = 9 }, { inflight = 8 }, { inflight = 0 } }))
  end)

  it("keeps the first drawn of equals", function()
    assert.equal("c", pick(0.99, 0, testing.fleet(3)))
    assert.equal("a", pick(0, 0.99, testing.fleet(3)))
  end)

  it("compares loads by weight", function()
    assert.equal("b", pick(0, 0, { { inflight = 2 }, { inflight = 3, weight = 2 } })) -- 3 against 2
    assert.equal("a", pick(0, 0, { { inflight = 7 }, { weight = 0 } }))
  end)

  it("draws among the eligible only", function()
    local workers = { { eligible = false }, { inflight = 2 }, { eligible = false }, { inflight = 1 }, { inflight = 3 } }
    assert.equal("d", pick(0, 0, workers))   -- b, d
    assert.equal("b", pick(0.9, 0, workers)) -- e, b
  end)

  it("takes the only one", function()
    local worker, reason = pick(0.7, nil, { { eligible = false }, { inflight = 50 } })
    assert.equal("b", worker)
    assert.equal("only", reason)
  end)

  it("answers nothing when nobody is eligible", function()
    assert.is_nil((pick(0, 0, { { eligible = false } })))
  end)
end)
