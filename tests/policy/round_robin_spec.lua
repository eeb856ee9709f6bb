local testing = require "perilune.testing"

describe("round_robin", function()
  local policy
  before_each(function() policy = testing.load "policies/round_robin.lua" end)

  it("takes turns", function()
    assert.equal("a b c a b c a", policy:trace(7, { workers = testing.fleet(3) }))
  end)

  it("serves one worker alone", function()
    assert.equal("a a a", policy:trace(3, { workers = testing.fleet(1) }))
  end)

  it("is smooth over weights", function()
    -- 5:1:1. Credits before each pick: 5 1 1, 3 2 2, 1 3 3, 6 -3 4, 4 -2 5, 9 -1 -1, 7 0 0
    local workers = { { weight = 5 }, { weight = 1 }, { weight = 1 } }
    assert.equal("a a b a c a a a a b", policy:trace(10, { workers = workers }))
  end)

  it("gives every other turn to half the weight", function()
    -- 2:1:1. Credits: 2 1 1, 0 2 2, 2 -1 3, 4 0 0, then again
    local workers = { { weight = 2 }, { weight = 1 }, { weight = 1 } }
    assert.equal("a b c a a b c a", policy:trace(8, { workers = workers }))
  end)

  it("passes over the ineligible, who come back to their place and not to a flood", function()
    assert.equal("a b c", policy:trace(3, { workers = testing.fleet(3) }))
    local without_b = { {}, { eligible = false }, {} }
    assert.equal("a c a c a c", policy:trace(6, { workers = without_b }))
    assert.equal("a b c a", policy:trace(4, { workers = testing.fleet(3) }))
  end)

  it("never picks weight 0", function()
    assert.equal("b b", policy:trace(2, { workers = { { weight = 0 }, {} } }))
  end)

  it("starts a reused slot afresh", function()
    -- b owes 2 of 3 after its turn; its successor in the slot does not
    assert.equal("a b", policy:trace(2, { workers = testing.fleet(3) }))
    local workers = { {}, { name = "new", generation = 2 }, {} }
    -- credits 0 and 1 for a and new, 3 for c; then 1 2 1 for a, new, c ...
    assert.equal("c new a", policy:trace(3, { workers = workers }))
  end)

  it("keeps to slots, whatever their place in the fleet of the call", function()
    local ab = { { name = "a", slot = 4 }, { name = "b", slot = 9 } }
    local ba = { { name = "b", slot = 9 }, { name = "a", slot = 4 } }
    assert.equal("a b a b", policy:trace(4, function(k) return { workers = k % 2 == 1 and ab or ba } end))
  end)

  it("does not let one model's requests skew another's", function()
    local one = { { name = "a", slot = 0 }, { name = "b", slot = 1 } }
    local other = { { name = "c", slot = 2 }, { name = "d", slot = 3 } }
    assert.equal("a c b d a c b d", policy:trace(8, function(k)
      return { workers = k % 2 == 1 and one or other }
    end))
  end)

  it("answers nothing when nobody is eligible", function()
    local d = policy:decide { workers = { { eligible = false } } }
    assert.is_nil(d.worker)
    assert.same({}, d.errors)
  end)
end)
