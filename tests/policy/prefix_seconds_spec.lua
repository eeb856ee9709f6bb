local testing = require "perilune.testing"

local FILE = "policies/prefix_seconds.lua"
-- Round numbers for working by hand: 100 tokens of output at 0.001 make a resident token cost a tenth of a token.
local PARAMS = { attention_tokens = 0, neighbours = 0.25, reuse = 1, eviction = 0, decode_cost = 0.001,
  output_tokens = 100 }
-- The request's own tokens and the queue's alone.
local function plain(params)
  local all = { attention_tokens = 0, neighbours = 0, reuse = 1, eviction = 0, decode_cost = 0 }
  for name, value in pairs(params or {}) do all[name] = value end
  return all
end

describe("prefix_seconds", function()
  local policy
  before_each(function() policy = testing.load(FILE, PARAMS) end)

  local function decide(workers, o)
    o = o or {}
    local d = policy:decide { req = o.req or { prompt_tokens = o.tokens or 8000 }, workers = workers,
      random = o.random or { 0 }, now = o.now }
    assert.same({}, d.errors)
    return d
  end

  local function pick(workers, o)
    local d = decide(workers, o)
    return (d.worker or "-") .. ":" .. (d.reason or "-")
  end

  local function costs(expected, d)
    for i = 1, #expected do assert.near(expected[i], d.cost[i - 1], 1e-8) end
  end

  describe("at one rate for all, 8,000 tokens a second", function()
    local function workers(queued)
      return {
        { cached_tokens = 7000, queued_prefill_tokens = queued, inflight = 3, decode_blocks = 1000 },
        {},
        { cached_tokens = 4000, inflight = 1, decode_blocks = 465 },
      }
    end

    it("adds up this request, the queue, the neighbours and decoding: a trace by hand", function()
      -- a: 256 + 1,744 + 1,000 * (1 + 0.25 * 4) + 16,000 / 10 = 5,600 tokens
      -- b: 256 + 8,000 * 1.25 = 10,256 tokens
      -- c: 256 + 4,000 * 1.5 + 7,440 / 10 = 7,000 tokens
      local d = decide(workers(1744))
      costs({ 0.7, 1.282, 0.875 }, d)
      assert.equal("a:hit", d.worker .. ":" .. d.reason)
    end)

    it("spills bit by bit as the queue grows: to who holds less, then to who holds nothing", function()
      assert.equal("a:hit", pick(workers(3143))) -- 6,999 tokens against 7,000
      assert.equal("c:spill", pick(workers(3145)))
      local list = workers(3145)
      list[3].queued_prefill_tokens = 3255       -- 10,255 against 10,256
      list[1].queued_prefill_tokens = 9000
      assert.equal("c:spill", pick(list))
      list[3].queued_prefill_tokens = 3257
      assert.equal("b:spill", pick(list))
    end)

    it("counts attention: a token behind so many others costs two", function()
      policy = testing.load(FILE, plain { attention_tokens = 10000, neighbours = 0.5 })
      -- a: 1,000 tokens behind 7,000: on average 7,500 before them, 1,750; half of it for the next to come
      -- b: all 8,000, on average 4,000 before them: 11,200
      costs({ (256 + 1.5 * 1750) / 8000, (256 + 1.5 * 11200) / 8000 }, decide { { cached_tokens = 7000 }, {} })
      -- it went to a, whose queued tokens are taken to be as deep: 1.75 each; b's as if nothing were before them
      costs({ (256 + 1750 + 1.5 * 1750) / 8000, (256 + 1000 + 1.5 * 11200) / 8000 },
        decide { { cached_tokens = 7000, queued_prefill_tokens = 1000 }, { queued_prefill_tokens = 1000 } })
      -- and went to a again: 1,000 queued at 1.75, 1,000 at 1.75. 6,000 of 8,000 more, at 1.5: 12,500 / 8,000 a token
      decide { { cached_tokens = 2000, queued_prefill_tokens = 2000 }, { eligible = false } }
      costs({ (256 + 8000 * 12500 / 8000 + 1.5 * 11200) / 8000 }, decide { { queued_prefill_tokens = 8000 } })
    end)

    it("counts a copy of what one worker alone holds, against all others", function()
      policy = testing.load(FILE, plain { reuse = 3 })
      -- nobody else has 5,000 of it. a: 256 + 2,000; b: 256 + 7,000 + 2 * 5,000; c: 256 + 8,000 + 2 * 5,000
      costs({ 2256 / 8000, 17256 / 8000, 18256 / 8000 },
        decide { { cached_tokens = 6000 }, { cached_tokens = 1000 }, {} })
      -- two have it: anybody may
      costs({ 2256 / 8000, 2256 / 8000, 8256 / 8000 },
        decide { { cached_tokens = 6000 }, { cached_tokens = 6000 }, {} })
      -- who cannot be picked holds nothing
      costs({ 17256 / 8000, 2256 / 8000 }, decide { { cached_tokens = 1000 }, { cached_tokens = 6000 },
        { cached_tokens = 6000, eligible = false } })
      -- at most two average requests, of 1,024 to begin with
      policy = testing.load(FILE, plain { reuse = 3, copy_requests = 2 })
      costs({ 2256 / 8000, (8256 + 2048) / 8000 }, decide { { cached_tokens = 6000 }, {} })
    end)

    it("counts what a prefill displaces by how much was sent there lately", function()
      policy = testing.load(FILE, plain { eviction = 0.5 })
      costs({ 8256 / 8000, 8256 / 8000 }, decide { {}, {} })
      -- a got all 8,000, twice the mean: half of 8,000 twice more; what is cached displaces nothing
      costs({ (8256 + 8000) / 8000, 8256 / 8000 }, decide { {}, {} })
      -- b got 8,000 more. After 120 s half of them counts, beside 2,000 that c gets then: 4,000, 4,000 and 2,000
      decide({ {}, {}, { cached_tokens = 6000 } }, { now = 120 })
      local third = 10000 / 3
      costs({ 8256 / 8000 + 0.5 * 4000 / third, (2256 + 0.5 * 2000 * 4000 / third) / 8000,
        (256 + 0.5 * 0) / 8000 }, decide({ {}, { cached_tokens = 6000 }, { cached_tokens = 8000 } }, { now = 120 }))
      -- four times the mean at most
      policy = testing.load(FILE, plain { eviction = 0.5 })
      decide(testing.fleet(8))
      costs({ (8256 + 4 * 4000) / 8000, 8256 / 8000 }, decide(testing.fleet(8)))
    end)

    it("pays part of the price for what must be fetched from host memory and disk", function()
      -- 8,000 - 3,000 - 0.75 * 2,000 - 0.25 * 2,000 = 3,000, and a quarter
      costs({ (256 + 3750) / 8000 }, decide { { cached_tokens = 3000, cached_host_tokens = 2000,
        cached_disk_tokens = 2000 } })
    end)

    it("never prefills less than nothing", function()
      costs({ 256 / 8000 }, decide { { cached_tokens = 9000 } })
    end)

    it("expects the output that the client announced or bounded", function()
      local busy = { { cached_tokens = 8000, decode_blocks = 1000 } } -- 16,000 tokens resident
      local function output(fields)
        fields.prompt_tokens = 8000
        return (decide(busy, { req = fields }).cost[0] * 8000 - 256) / 16
      end
      assert.near(100, output {}, 1e-6)
      assert.near(1000, output { expected_output_tokens = 1000 }, 1e-6)
      assert.near(20, output { max_tokens = 20 }, 1e-6)
      assert.near(100, output { max_tokens = 4096 }, 1e-6)
      assert.near(0, output { expected_output_tokens = 0 }, 1e-6)
    end)

    it("keeps siblings together that arrive at once with a prefix nobody has", function()
      -- the first one's 8,000 tokens are on their way to a: the second shares them for 100 more
      local d = decide { { cached_tokens = 7900, queued_prefill_tokens = 8000, inflight = 1, decode_blocks = 500 }, {} }
      -- 256 + 8,000 + 100 * 1.5 + 800 against 256 + 10,000
      costs({ 9206 / 8000, 10256 / 8000 }, d)
      assert.equal("a", d.worker)
    end)
  end)

  describe("gauges", function()
    -- the cost of a worker without anything of ours but what `gauges` say, in tokens; an unseen request counts as 1,024
    local function tokens(gauges)
      policy = testing.load(FILE, PARAMS) -- each decision moves the average size
      gauges.cached_tokens = 8000
      return decide({ gauges }).cost[0] * 8000 - 256
    end

    it("show requests of others that wait there", function()
      local function there(ours)
        return { waiting_requests = 4, running_requests = 2, inflight = ours, gauges_age_seconds = 0 }
      end
      -- 4 wait and 2 run, 1 is ours: all 4 may be others'
      assert.near(4096, tokens(there(1)), 1e-6)
      -- 5 are ours: 1 is not
      assert.near(1024, tokens(there(5)), 1e-6)
      assert.near(0, tokens(there(6)), 1e-6)
    end)

    it("count less the older they are, and not at all when unknown", function()
      local function aged(age)
        return tokens { waiting_requests = 4, running_requests = 0, gauges_age_seconds = age }
      end
      assert.near(4096, aged(0), 1e-6)
      assert.near(3072, aged(0.5), 1e-6)
      assert.near(0, aged(2), 1e-6)
      assert.near(0, aged(math.huge), 1e-6)
      assert.near(0, tokens {}, 1e-6)
      assert.near(0, tokens { waiting_requests = -1, running_requests = 9, gauges_age_seconds = 0 }, 1e-6)
      assert.near(4096, tokens { waiting_requests = 4, running_requests = -1, gauges_age_seconds = 0 }, 1e-6)
    end)
  end)

  describe("the pace of a worker", function()
    -- 744 tokens and the step's 256 are 1,000
    local req = { prompt_tokens = 744 }
    local function at(now, rates)
      local list = {}
      for i, rate in ipairs(rates) do
        list[i] = { prefill_tokens_per_second = rate, ttft_seconds = rate == 8000 and 0 or 1 }
      end
      return decide(list, { req = req, now = now })
    end
    before_each(function() policy = testing.load(FILE, plain()) end)

    it("is one for all until it is measured", function()
      costs({ 0.125, 0.125, 0.125 }, at(0, { 8000, 8000, 8000 }))
    end)

    it("is its own as far as it leaves the noise, and fades when it is not measured again", function()
      at(0, { 8000, 8000 })
      -- 1/2,000 and 1/6,000 s: on average 1/3,000; ratios 1.5 and 0.5, a quarter of them noise: 1.2 and 0.625
      costs({ 0.4, 0.625 / 3 }, at(1, { 2000, 6000 }))
      -- a minute without a measurement: half of it is left
      costs({ 1.1 / 3, 0.8125 / 3 }, at(61, { 2000, 6000 }))
      -- 1/10 and 1/6,000: on average 0.0500833. a's tenth, a quarter of it noise; b is held to be 8 times faster, and
      -- no more
      policy = testing.load(FILE, plain())
      at(0, { 8000, 8000 })
      costs({ 80, 50.083333333 / 8 }, at(1, { 10, 6000 }))
    end)

    it("weighs what was sent to a worker: a slow one's cache is not to be filled as fast", function()
      policy = testing.load(FILE, plain { eviction = 0.5 })
      at(0, { 8000, 8000 }) -- 744 to a: twice the mean, at 1.2 times the pace: 1,000 + 744 * 0.5 * 2.4 = 1,892.8
      costs({ 1.8928 * 0.4, 0.625 / 3 }, at(1, { 2000, 6000 }))
    end)

    it("is the same for all within the noise: ties stay ties", function()
      at(0, { 8000, 8000, 8000 })
      local d = at(1, { 7000, 8500, 7600 })
      assert.equal(d.cost[0], d.cost[1])
      assert.equal(d.cost[0], d.cost[2])
    end)

    it("of a new worker is the fleet's, whatever the default rate", function()
      at(0, { 8000, 8000 })
      -- a and b do 40,000; c has not been measured
      local d = at(1, { 40000, 40000, 8000 })
      assert.equal(d.cost[0], d.cost[2])
      -- the same when a slot is used again
      decide({ { prefill_tokens_per_second = 40000, ttft_seconds = 1 }, { prefill_tokens_per_second = 8000,
        generation = 2 } }, { req = req, now = 2 })
      assert.near(1000 / 40000, decide({ { prefill_tokens_per_second = 40000, ttft_seconds = 1 },
        { prefill_tokens_per_second = 8000, generation = 2 } }, { req = req, now = 2 }).cost[1], 1e-9)
    end)

    it("has the waiting divided out that the ledger's rate contains", function()
      local function one(now, rate, queued)
        return decide({ { prefill_tokens_per_second = rate, ttft_seconds = rate == 8000 and 0 or 1,
          queued_prefill_tokens = queued } }, { req = { prompt_tokens = 4000, stream = true }, now = now })
      end
      -- its own 4,000 of 256 + 4,000 + 3,744: half. It took 1 s: 4,000 a second for it, 8,000 for the engine
      one(0, 8000, 3744)
      costs({ 4256 / 8000 }, one(1, 4000, 0))
    end)
  end)

  it("is the fewest seconds of work when nothing is known of caches", function()
    assert.equal("b:cold", pick { { queued_prefill_tokens = 900 }, { queued_prefill_tokens = 100 },
      { decode_blocks = 999 } })
    assert.equal("c:cold", pick { { inflight = 2 }, { inflight = 1, decode_blocks = 1 }, {} })
  end)

  it("breaks ties at random", function()
    assert.equal("a:cold", pick(testing.fleet(4), { random = { 0.24 } }))
    assert.equal("b:cold", pick(testing.fleet(4), { random = { 0.25 } }))
    assert.equal("d:hit", pick(testing.fleet(4, function(i) return { cached_tokens = i > 1 and 5000 or 0 } end),
      { random = { 0.5 } }))
  end)

  it("serves with the one that there is, and leaves out who cannot", function()
    assert.equal("a:cold", pick { { inflight = 900, queued_prefill_tokens = 1e6 } })
    assert.equal("c:cold", pick { { eligible = false, cached_tokens = 8000 }, { weight = 0, cached_tokens = 8000 },
      { inflight = 90, queued_prefill_tokens = 1e5 } })
    assert.equal("-:-", pick { { eligible = false } })
  end)

  it("counts for its weight", function()
    costs({ 1.282 / 2, 1.282 }, decide { { weight = 2 }, {} })
  end)

  it("leaves a bound session where it is", function()
    local d = policy:decide { session = { bound = "a" }, workers = { { inflight = 9 }, { cached_tokens = 100 } } }
    assert.equal("a:session", d.worker .. ":" .. d.reason)
  end)

  it("refuses parameters that make no sense", function()
    local names = "attention_tokens neighbours reuse copy_requests eviction decode_cost output_tokens gauges_seconds"
    for name in names:gmatch("%S+") do
      local loaded, stage, message = testing.try_load(FILE, { [name] = -1 })
      assert.is_nil(loaded)
      assert.equal("init", stage)
      assert.matches(name, message)
    end
  end)
end)

-- Engines that prefill in order of arrival, and decode everything at once; half of the requests share one of 12
-- prefixes. Answers the mean time to first token.
local function simulate(file, o)
  local policy = testing.load(file, o.params)
  local state = 12345
  local function unit()
    state = state * 16807 % 2147483647
    return state / 2147483647
  end
  local engines, ends, now, sum = {}, {}, 0, 0
  for i = 1, #o.rates do
    engines[i] = { free_at = 0, has = {}, inflight = 0, queued = 0, blocks = 0, rate = 8000, ttft = 0 }
  end
  for _ = 1, o.requests do
    now = now - math.log(unit()) * o.gap_seconds
    for k = #ends, 1, -1 do
      local e = ends[k]
      if e.first <= now and e.tokens > 0 then
        e.engine.queued, e.tokens, e.engine.ttft = e.engine.queued - e.tokens, 0, 1
        e.engine.rate = e.engine.rate + (e.rate - e.engine.rate) / 8
      end
      if e.last <= now then
        e.engine.inflight, e.engine.blocks = e.engine.inflight - 1, e.engine.blocks - e.blocks
        table.remove(ends, k)
      end
    end
    local prompt = math.floor(200 - math.log(unit()) * 3000)
    local prefix = unit() < 0.5 and math.floor(unit() * 12) or nil
    if prefix then prompt = prompt + 8000 end
    local workers = {}
    for i, e in ipairs(engines) do
      workers[i] = { inflight = e.inflight, queued_prefill_tokens = e.queued, decode_blocks = e.blocks,
        cached_tokens = o.caches and e.has[prefix] and 8000 or 0, prefill_tokens_per_second = e.rate,
        ttft_seconds = e.ttft }
    end
    local d = policy:decide { req = { prompt_tokens = prompt, stream = true }, workers = workers, now = now }
    local e = engines[d.index + 1]
    local tokens = prompt - workers[d.index + 1].cached_tokens
    e.free_at = math.max(e.free_at, now) + tokens / o.rates[d.index + 1]
    if prefix then e.has[prefix] = true end
    local blocks = math.ceil(prompt / 16)
    e.inflight, e.queued, e.blocks = e.inflight + 1, e.queued + tokens, e.blocks + blocks
    ends[#ends + 1] = { engine = e, first = e.free_at, last = e.free_at - math.log(unit()) * 5, tokens = tokens,
      blocks = blocks, rate = tokens / (e.free_at - now) }
    sum = sum + e.free_at - now
  end
  return sum / o.requests
end

describe("prefix_seconds beside least_loaded", function()
  local function both(o)
    o.requests = 1500
    return simulate(FILE, o), simulate("policies/least_loaded.lua", o)
  end

  it("is no worse without cache information", function()
    local ours, theirs = both { rates = { 8000, 8000, 8000, 8000 }, gap_seconds = 0.3 }
    assert.is_true(ours <= theirs, ("%.3f s against %.3f s"):format(ours, theirs))
  end)

  it("is better with it", function()
    local ours, theirs = both { rates = { 8000, 8000, 8000, 8000 }, gap_seconds = 0.3, caches = true }
    assert.is_true(ours < 0.9 * theirs, ("%.3f s against %.3f s"):format(ours, theirs))
  end)

  it("learns that engines differ", function()
    local ours, theirs = both { rates = { 16000, 16000, 4000, 4000 }, gap_seconds = 0.3 }
    assert.is_true(ours < 0.8 * theirs, ("%.3f s against %.3f s"):format(ours, theirs))
  end)
end)
