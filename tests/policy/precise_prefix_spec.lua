local testing = require "perilune.testing"

-- Worked out by hand: 1,600 tokens are 100 blocks.
--         cached           waiting  usage    prefix  queue  kv    2 : 1 : 1
--   a     800, 50 blocks         4   0.5        0.5    0.6   0.5   2.1
--   b     0                      0   0.1        0      1     0.9   1.9
--   c     1,600                 10   0.8        1      0     0.2   2.2
describe("precise_prefix", function()
  local function workers(change)
    local list = {
      { cached_tokens = 800, waiting_requests = 4, kv_usage = 0.5, gauges_age_seconds = 0, inflight = 2 },
      { cached_tokens = 0, waiting_requests = 0, kv_usage = 0.1, gauges_age_seconds = 0, inflight = 8 },
      { cached_tokens = 1600, waiting_requests = 10, kv_usage = 0.8, gauges_age_seconds = 0, inflight = 4 },
    }
    if change then change(list) end
    return list
  end

  local function decide(params, list, random)
    local d = testing.load("policies/precise_prefix.lua", params):decide { req = { prompt_tokens = 1600 },
      workers = list or workers(), random = random or { 0 } }
    assert.same({}, d.errors)
    return d
  end

  local function sums(d)
    local list = {}
    for i = 0, #d.cost do list[#list + 1] = ("%.4g"):format(-d.cost[i]) end
    return d.worker .. " of " .. table.concat(list, " ")
  end

  it("adds the scores by their weights", function()
    local d = decide()
    assert.equal("c of 2.1 1.9 2.2", sums(d))
    assert.equal("highest", d.reason)
    -- 3 : 2 : 2. a: 1.5 + 1.2 + 1, b: 0 + 2 + 1.8, c: 3 + 0 + 0.4
    assert.equal("b of 3.7 3.8 3.4", sums(decide { prefix_weight = 3, queue_weight = 2, kv_weight = 2 }))
  end)

  it("can value long prefixes for their length", function()
    -- half share, half (cached / 8192) ^ 2: a 0.25 + 0.5 * 0.009537, c 0.5 + 0.5 * 0.03815
    assert.equal("b of 1.61 1.9 1.238", sums(decide { long_share = 0.5 }))
  end)

  it("counts whole blocks of a match", function()
    -- 815 tokens are 50 blocks of 16
    assert.equal("c of 2.1 1.9 2.2", sums(decide(nil, workers(function(list) list[1].cached_tokens = 815 end))))
  end)

  it("can draw in proportion to the sums", function()
    -- 6.2 in all: a up to 0.3387, b up to 0.6452
    local params = { picker = "weighted_random" }
    assert.equal("a", decide(params, nil, { 0.338 }).worker)
    assert.equal("b", decide(params, nil, { 0.339 }).worker)
    assert.equal("b", decide(params, nil, { 0.645 }).worker)
    assert.equal("c", decide(params, nil, { 0.646 }).worker)
    assert.equal("drawn", decide(params).reason)
    assert.equal("b", decide({ picker = "weighted_random", prefix_weight = 0, queue_weight = 0, kv_weight = 0 },
      testing.fleet(2), { 0.5 }).worker)
  end)

  it("falls back to the router's own counts for all when one gauge is unknown or old", function()
    -- requests in flight 2, 8, 4: queues 1, 0, 0.667; usage 1 for all
    -- a: 1 + 1 + 1, b: 0 + 0 + 1, c: 2 + 0.667 + 1
    for _, change in ipairs {
      function(list) list[2].waiting_requests = -1 end,
      function(list) list[2].kv_usage = -1 end,
      function(list) list[2].gauges_age_seconds = 5.1 end,
      function(list) list[2].gauges_age_seconds = math.huge end,
    } do
      assert.equal("c of 3 1 3.667", sums(decide(nil, workers(change))))
    end
    assert.equal("c of 2.1 1.9 2.2", sums(decide(nil, workers(function(list) list[2].gauges_age_seconds = 5 end))))
    -- an unknown one that cannot be picked does not matter
    assert.equal("c of 1.7 -inf 2.2", sums(decide(nil, workers(function(list)
      list[2].eligible, list[2].kv_usage = false, -1
      list[1].waiting_requests, list[3].waiting_requests = 8, 4 -- 0 and 1
      list[1].kv_usage, list[3].cached_tokens = 0.3, 800        -- 1 + 0 + 0.7, 1 + 1 + 0.2
    end))))
  end)

  it("goes by queue and usage when nothing is known of caches", function()
    -- a 1.1, b 1.9, c 0.2
    assert.equal("b of 1.1 1.9 0.2", sums(decide(nil, workers(function(list)
      for i = 1, 3 do list[i].cached_tokens = 0 end
    end))))
    -- nothing known at all, requests in flight 3, 1, 2
    assert.equal("b of 1 2 1.5", sums(decide(nil, { { inflight = 3 }, { inflight = 1 }, { inflight = 2 } })))
  end)

  it("breaks ties at random, and serves with the one that there is", function()
    assert.equal("a", decide(nil, testing.fleet(2), { 0.49 }).worker)
    assert.equal("b", decide(nil, testing.fleet(2), { 0.5 }).worker)
    assert.equal("a", decide(nil, testing.fleet(1)).worker)
    assert.equal("b", decide(nil, { { weight = 0 }, { inflight = 9 }, { eligible = false } }).worker)
    assert.equal("b", decide({ picker = "weighted_random" }, { { weight = 0 }, { inflight = 9 },
      { eligible = false } }).worker)
    assert.is_nil(decide(nil, { { eligible = false } }).worker)
  end)

  it("refuses pickers that it does not have", function()
    local loaded, _, message = testing.try_load("policies/precise_prefix.lua", { picker = "first" })
    assert.is_nil(loaded)
    assert.matches("max or weighted_random", message)
  end)
end)
