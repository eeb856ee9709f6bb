local testing = require "perilune.testing"

-- The policy of examples/quickstart.sh.
describe("examples/policies/same_prefix", function()
  local policy
  before_each(function() policy = testing.load("examples/policies/same_prefix.lua", { prefix_bytes = 3 }) end)

  local function pick(messages, workers)
    local d = policy:decide { req = { members = { messages = messages } }, workers = workers, random = { 0 } }
    assert.same({}, d.errors)
    return d.worker, d.reason
  end

  it("keeps alike beginnings together", function()
    -- "aaa" is 291, of three workers the first; "aab" the second
    assert.equal("a", pick("aaa and more", testing.fleet(3)))
    assert.equal("a", pick("aaa and different", testing.fleet(3)))
    local worker, reason = pick("aab", testing.fleet(3))
    assert.equal("b", worker)
    assert.equal("same_prefix", reason)
  end)

  it("passes over a favourite that leads by more than max_lead", function()
    -- mean (6 + 0 + 0) / 3 = 2; the favourite may have 2 + 4
    assert.equal("a", pick("aaa", { { inflight = 6 }, {}, {} }))
    -- mean 3; the favourite may have 7
    local worker, reason = pick("aaa", { { inflight = 9 }, {}, {} })
    assert.equal("b", worker)
    assert.equal("score", reason)
  end)

  it("scores what is no chat, and answers nothing when nobody is eligible", function()
    assert.equal("b", pick(nil, { { inflight = 1 }, {} }))
    assert.is_nil((pick("aaa", { { eligible = false } })))
  end)
end)
