local testing = require "perilune.testing"

-- Workers prefill 8,000 tokens a second; a request in flight is 200 * 0.02 = 4 s of decoding.
describe("preble", function()
  local policy
  before_each(function() policy = testing.load "policies/preble.lua" end)

  local function pick(tokens, workers, now, random)
    local d = policy:decide { req = { prompt_tokens = tokens }, workers = workers, now = now or 0,
      random = random or { 0 } }
    assert.same({}, d.errors)
    return d.worker .. ":" .. d.reason, d.cost
  end

  local function costs(expected, got)
    for i = 1, #expected do assert.near(expected[i], got[i - 1], 1e-9) end
  end

  it("exploits what is cached, explores by the window's work: a trace by hand", function()
    -- two idle workers, 1 s of prefill: a tie. a has 1 s booked
    local chosen, cost = pick(8000, { {}, {} })
    assert.equal("a:explore", chosen)
    costs({ 1, 1 }, cost)
    -- all of it is cached on a. Its load, 1, is above 1.5 * 0, but the difference is no more than prefilling it again
    assert.equal("a:exploit", (pick(8000, { { cached_tokens = 8000 }, {} })))
    -- a: 1 + 0.5, b: 0.5. b has 0.5 booked
    chosen, cost = pick(4000, { {}, {} })
    assert.equal("b:explore", chosen)
    costs({ 1.5, 0.5 }, cost)
    -- a: 1 + 0.5, b: 0.5 + 0.5. b has 1
    assert.equal("b:explore", (pick(4000, { {}, {} })))
    -- 3,000 of 8,000 are cached on b, 5,000 are missing: explore. a: 1 + 1, b: 1 + 0.625. b has 1.625
    chosen, cost = pick(8000, { {}, { cached_tokens = 3000 } })
    assert.equal("b:explore", chosen)
    costs({ 2, 1.625 }, cost)
    -- cached on a, but two run there: 1 + 8 against 1.625, and 7.4 s is more than 1 s of prefill
    chosen, cost = pick(8000, { { cached_tokens = 8000, inflight = 2 }, {} })
    assert.equal("b:rebalance", chosen)
    costs({ 9, 1.625 }, cost)
    -- ... which b has booked, too
    chosen, cost = pick(4000, { {}, {} })
    assert.equal("a:explore", chosen)
    costs({ 1.5, 3.125 }, cost)
  end)

  it("takes the least loaded of those that hold the most", function()
    assert.equal("b:exploit", (pick(8000, { { cached_tokens = 6000, inflight = 2 },
      { cached_tokens = 6000, inflight = 1 }, { cached_tokens = 5900 } })))
    policy = testing.load("policies/preble.lua", { balance = 0 })
    assert.equal("a:exploit", (pick(8000, { { cached_tokens = 6000, inflight = 90 }, {} })))
  end)

  it("exploits only when less is missing than is cached", function()
    assert.equal("a:exploit", (pick(8000, { { cached_tokens = 4001, inflight = 0 }, {} })))
    assert.equal("b:explore", (pick(8000, { { cached_tokens = 4000, inflight = 1 }, {} })))
  end)

  it("forgets work as the window slides over its two halves", function()
    assert.equal("a:explore", (pick(8000, { {}, {} }, 10))) -- 1 s in the half of 0 to 90
    for now, load in pairs { [89] = 1, [90] = 1, [135] = 0.5, [180] = 0, [500] = 0 } do
      policy = testing.load "policies/preble.lua"
      pick(8000, { {}, {} }, 10)
      local _, cost = pick(800, { {}, {} }, now, { 0.99 })
      costs({ load + 0.1, 0.1 }, cost)
    end
  end)

  it("forgets the work of a worker whose slot is used again", function()
    pick(8000, { { slot = 5 }, { slot = 6 } })
    local _, cost = pick(800, { { slot = 5, generation = 2 }, { slot = 6 } })
    costs({ 0.1, 0.1 }, cost)
  end)

  it("takes the other loops to do as much", function()
    policy = testing.load("policies/preble.lua", {}, { loops = 4 })
    pick(8000, { {}, {} })
    local _, cost = pick(800, { {}, {} })
    costs({ 4.1, 0.1 }, cost)
  end)

  it("takes a client's word for the length of its answer", function()
    local d = policy:decide { req = { prompt_tokens = 800, expected_output_tokens = 50 },
      workers = { { inflight = 3 }, { inflight = 1 } } }
    assert.equal("b", d.worker)
    costs({ 3.1, 1.1 }, d.cost)
  end)

  it("explores when nothing is known of caches, leaves out who cannot serve, counts weights", function()
    assert.equal("b:explore", (pick(800, { { inflight = 2 }, { inflight = 1 } })))
    assert.equal("b:explore", (pick(800, testing.fleet(2), 1000, { 0.5 })))
    assert.equal("a:explore", (pick(800, { { inflight = 9 } })))
    assert.equal("c:explore", (pick(800, { { eligible = false, cached_tokens = 800 },
      { weight = 0, cached_tokens = 800 }, { inflight = 9 } })))
    policy = testing.load "policies/preble.lua"
    local _, cost = pick(800, { { inflight = 1, weight = 2 }, { inflight = 1 } })
    costs({ 2.05, 4.1 }, cost)
    assert.is_nil(policy:decide { workers = { { eligible = false } } }.worker)
  end)
end)
