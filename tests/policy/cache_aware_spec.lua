local testing = require "perilune.testing"

describe("cache_aware", function()
  local function pick(workers, params, random)
    local d = testing.load("policies/cache_aware.lua", params):decide { req = { prompt_tokens = 1000 },
      workers = workers, random = random or { 0 } }
    assert.same({}, d.errors)
    return (d.worker or "-") .. ":" .. (d.reason or "-"), d
  end

  it("goes to the best match when it is more than the threshold", function()
    -- a and b hold 600 of 1,000; loads 5, 3, 0 are even enough: b has the shorter queue of the two
    local chosen, d = pick { { cached_tokens = 600, inflight = 5 }, { cached_tokens = 600, inflight = 3 }, {} }
    assert.equal("b:cache", chosen)
    assert.same({ [0] = 5, 3, math.huge }, d.cost)
    -- not the second best, however idle
    assert.equal("a:cache", (pick { { cached_tokens = 601, inflight = 5 }, { cached_tokens = 600 }, {} }))
    -- 500 of 1,000 is not more than half: the shortest queue
    assert.equal("c:least", (pick { { cached_tokens = 500, inflight = 1 }, { inflight = 2 }, {} }))
    assert.equal("a:cache", (pick({ { cached_tokens = 500, inflight = 1 }, {} }, { cache_threshold = 0.3 })))
  end)

  it("forgets caches when loads are too uneven", function()
    -- 40 - 7 = 33 > 32, 40 > 1.1 * 7
    assert.equal("c:balance", (pick { { cached_tokens = 1000, inflight = 40 }, { inflight = 20 }, { inflight = 7 } }))
    assert.equal("a:cache", (pick { { cached_tokens = 1000, inflight = 39 }, { inflight = 20 }, { inflight = 7 } }))
    -- 400 - 367 = 33, but 400 < 1.1 * 367 = 403.7; 404 is above
    assert.equal("a:cache", (pick { { cached_tokens = 1000, inflight = 400 }, { inflight = 367 } }))
    assert.equal("b:balance", (pick { { cached_tokens = 1000, inflight = 404 }, { inflight = 367 } }))
    -- the gateway's command line: 64 and 1.5
    assert.equal("a:cache", (pick({ { cached_tokens = 1000, inflight = 64 }, {} },
      { balance_abs = 64, balance_rel = 1.5 })))
  end)

  it("looks at KV usage when told to, as far as it is known", function()
    local function used(first, second)
      return { { cached_tokens = 1000, inflight = 1, kv_usage = first }, { kv_usage = second } }
    end
    assert.equal("a:cache", (pick(used(0.9, 0.5))))
    assert.equal("b:balance", (pick(used(0.9, 0.5), { kv_usage_spread = 0.3 })))
    assert.equal("a:cache", (pick(used(0.9, 0.7), { kv_usage_spread = 0.3 })))
    assert.equal("a:cache", (pick(used(0.9, -1), { kv_usage_spread = 0.3 })))
    assert.equal("a:cache", (pick(used(-1, -1), { kv_usage_spread = 0.3, kv_usage_most = 0.8 })))
    assert.equal("b:balance", (pick(used(0.9, -1), { kv_usage_most = 0.8 })))
  end)

  it("takes the shortest queue when nothing is known of caches", function()
    assert.equal("b:least", (pick { { inflight = 3 }, { inflight = 1 }, { inflight = 2 } }))
    assert.equal("a:least", (pick(testing.fleet(3), {}, { 0.33 })))
    assert.equal("c:least", (pick(testing.fleet(3), {}, { 0.99 })))
    assert.equal("a:least", (pick { { inflight = 99 } }))
  end)

  it("leaves out who is ineligible or of weight 0, from the loads, too", function()
    -- idle b would make 40 too uneven
    assert.equal("a:cache", (pick { { cached_tokens = 1000, inflight = 40 }, { eligible = false }, { inflight = 30 } }))
    assert.equal("c:least", (pick { { eligible = false, cached_tokens = 1000 }, { weight = 0, cached_tokens = 900 },
      { inflight = 9 } }))
    assert.equal("-:-", (pick { { eligible = false } }))
  end)

  it("refuses a threshold that is no share", function()
    local loaded, _, message = testing.try_load("policies/cache_aware.lua", { cache_threshold = 50 })
    assert.is_nil(loaded)
    assert.matches("0 to 1", message)
  end)
end)
