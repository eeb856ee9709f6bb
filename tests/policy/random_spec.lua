local testing = require "perilune.testing"

describe("random", function()
  local policy
  before_each(function() policy = testing.load "policies/random.lua" end)

  -- one draw r, times the sum of weights, walked along the weights of the eligible
  local function pick(r, workers)
    local d = policy:decide { random = { r }, workers = workers }
    assert.same({}, d.errors)
    return d.worker
  end

  it("cuts [0, 1) into equal parts", function()
    assert.equal("a", pick(0, testing.fleet(4)))
    assert.equal("a", pick(0.2499, testing.fleet(4)))
    assert.equal("b", pick(0.25, testing.fleet(4)))
    assert.equal("c", pick(0.5, testing.fleet(4)))
    assert.equal("d", pick(0.75, testing.fleet(4)))
    assert.equal("d", pick(1 - 2 ^ -53, testing.fleet(4)))
  end)

  it("gives parts by weight", function()
    local workers = { { weight = 1 }, { weight = 2.5 }, { weight = 0.5 } } -- sum 4
    assert.equal("a", pick(0.24, workers))
    assert.equal("b", pick(0.25, workers))
    assert.equal("b", pick(0.874, workers))
    assert.equal("c", pick(0.875, workers))
  end)

  it("gives no part to the ineligible and to weight 0", function()
    local workers = { {}, { eligible = false }, { weight = 0 }, {} } -- a and d share
    assert.equal("a", pick(0.49, workers))
    assert.equal("d", pick(0.5, workers))
    assert.equal("d", pick(1 - 2 ^ -53, { {}, {}, {}, {}, { eligible = false } }))
  end)

  it("answers nothing when nobody is eligible", function()
    assert.is_nil(policy:decide { workers = testing.fleet(3, function() return { eligible = false } end) }.worker)
  end)

  it("leaves it to the router when all weights are 0", function()
    local d = policy:decide { workers = testing.fleet(2, function() return { weight = 0 } end) }
    assert.equal("default", d.by)
    assert.same({}, d.errors)
  end)

  it("spreads evenly in the long run", function()
    local count = {}
    for _ = 1, 8000 do
      local w = policy:decide { workers = testing.fleet(4) }.worker
      count[w] = (count[w] or 0) + 1
    end
    for _, name in ipairs { "a", "b", "c", "d" } do
      -- 2000 expected, standard deviation 39
      assert.is_true(math.abs(count[name] - 2000) < 200, name .. ": " .. count[name])
    end
  end)
end)
