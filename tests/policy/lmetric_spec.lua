local testing = require "perilune.testing"

describe("lmetric", function()
  local function decide(workers, params, random)
    local d = testing.load("policies/lmetric.lua", params):decide { req = { prompt_tokens = 1000 },
      workers = workers, random = random or { 0 } }
    assert.same({}, d.errors)
    return d
  end

  local workers = {
    { queued_prefill_tokens = 1000, cached_tokens = 900, inflight = 3, decode_blocks = 63 },
    { inflight = 4, decode_blocks = 9 },
    { queued_prefill_tokens = 500, cached_tokens = 400, inflight = 4, decode_blocks = 19 },
  }

  it("multiplies the prefill that is left by the batch", function()
    -- a: (1,000 + 100) * 4, b: 1,000 * 5, c: (500 + 600) * 5
    local d = decide(workers)
    assert.equal("a", d.worker)
    assert.same({ [0] = 4400, 5000, 5500 }, d.cost)
  end)

  it("can take blocks under decode as the batch, as Dynamo does", function()
    -- a: 1,100 * 64, b: 1,000 * 10, c: 1,100 * 20
    local d = decide(workers, { batch = "blocks" })
    assert.equal("b", d.worker)
    assert.same({ [0] = 70400, 10000, 22000 }, d.cost)
  end)

  it("counts load also for a prompt that is cached whole", function()
    local d = decide { { cached_tokens = 1000, inflight = 2 }, { cached_tokens = 1200, inflight = 1 } }
    assert.equal("b", d.worker)
    assert.same({ [0] = 3, 2 }, d.cost)
  end)

  it("balances when nothing is known of caches", function()
    assert.equal("c", decide { { inflight = 3 }, { inflight = 1, queued_prefill_tokens = 2000 },
      { inflight = 2 } }.worker)
    assert.equal("a", decide(testing.fleet(2), {}, { 0.49 }).worker)
    assert.equal("b", decide(testing.fleet(2), {}, { 0.5 }).worker)
  end)

  it("counts for its weight, and never takes weight 0 or the ineligible", function()
    -- 1,000 * 3 / 2 against 1,000 * 2
    assert.same({ [0] = 1500, 2000 }, decide({ { inflight = 2, weight = 2 }, { inflight = 1 } }).cost)
    assert.equal("b", decide { { weight = 0 }, { inflight = 50 }, { eligible = false } }.worker)
    assert.equal("a", decide(testing.fleet(1)).worker)
    assert.is_nil(decide { { eligible = false } }.worker)
  end)

  it("refuses another batch", function()
    assert.is_nil((testing.try_load("policies/lmetric.lua", { batch = "tokens" })))
  end)
end)
