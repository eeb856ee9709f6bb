local testing = require "perilune.testing"

-- On the test's ring a key starts at worker (sum of its bytes mod n): "a" is 97, so of three workers
-- the second; "b" the third; "c" the first.
describe("consistent_hash", function()
  local policy
  before_each(function() policy = testing.load "policies/consistent_hash.lua" end)

  local function pick(req, workers)
    local d = policy:decide { req = req, workers = workers or testing.fleet(3), random = { 0, 0 } }
    assert.same({}, d.errors)
    return d.worker, d.reason
  end

  it("takes the key from the header, else the member, else the session id", function()
    local all = { headers = { ["X-Perilune-Key"] = "a" }, members = { prompt_cache_key = "b" }, session_id = "c" }
    local worker, reason = pick(all)
    assert.equal("b", worker)
    assert.equal("ring", reason)
    assert.equal("c", (pick { members = all.members, session_id = "c" }))
    assert.equal("a", (pick { session_id = "c" }))
  end)

  it("passes over keys that are empty", function()
    assert.equal("c", (pick { headers = { ["x-perilune-key"] = "" }, members = { prompt_cache_key = "b" } }))
    assert.equal("a", (pick { members = { prompt_cache_key = "" }, session_id = "c" }))
  end)

  it("goes to the least loaded without a key", function()
    local worker, reason = pick({}, { { inflight = 2 }, { inflight = 1 }, { inflight = 3 } })
    assert.equal("b", worker)
    assert.equal("score", reason)
    assert.equal("a", (pick({ session_id = "" }, { {}, { inflight = 1 } })))
  end)

  it("reads the header and the member that it is told to", function()
    policy = testing.load("policies/consistent_hash.lua", { header = "x-user", member = "user" })
    assert.equal("b", (pick { headers = { ["x-user"] = "a", ["x-perilune-key"] = "c" } }))
    assert.equal("c", (pick { members = { user = "b", prompt_cache_key = "c" } }))
    policy = testing.load("policies/consistent_hash.lua", { header = "", member = "" })
    local worker, reason = pick({ headers = { ["x-perilune-key"] = "a" }, members = { prompt_cache_key = "a" } },
      { { inflight = 1 }, { inflight = 1 }, {} })
    assert.equal("c", worker)
    assert.equal("score", reason)
  end)

  it("sends the same key to the same worker", function()
    assert.equal("b b b b", policy:trace(4, { req = { session_id = "a" }, workers = testing.fleet(3) }))
  end)

  it("walks on from a worker that has its share", function()
    -- key c starts at a. In flight 4 with this one 5 over 3 workers: cap ceil(1.25 * 5 / 3) = 3
    assert.equal("b", (pick({ session_id = "c" }, { { inflight = 4 }, {}, {} })))
    -- 6 in flight and this one: ceil(1.25 * 7 / 3) = 3
    assert.equal("c", (pick({ session_id = "c" }, { { inflight = 3 }, { inflight = 3 }, {} })))
    assert.equal("b", (pick({ session_id = "c" }, { { inflight = 3 }, { inflight = 2 }, { inflight = 1 } })))
    -- a load factor of 4 lets it stay: cap ceil(4 * 5 / 3) = 7
    policy = testing.load("policies/consistent_hash.lua", { load_factor = 4 })
    assert.equal("a", (pick({ session_id = "c" }, { { inflight = 4 }, {}, {} })))
  end)

  it("walks on from the ineligible", function()
    assert.equal("b", (pick({ session_id = "c" }, { { eligible = false }, {}, {} })))
    assert.is_nil((pick({ session_id = "c" }, { { eligible = false }, { eligible = false } })))
  end)

  it("refuses a load factor below 1", function()
    local loaded, stage, message = testing.try_load("policies/consistent_hash.lua", { load_factor = 0.5 })
    assert.is_nil(loaded)
    assert.equal("init", stage)
    assert.matches("load_factor must be at least 1", message)
  end)
end)
