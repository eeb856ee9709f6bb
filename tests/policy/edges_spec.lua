-- Every policy that we ship, at the edges of what the records may hold: one worker, none eligible,
-- nothing known, huge figures. It raises no error, and picks an eligible worker whenever there is one.
local testing = require "perilune.testing"
local huge = math.huge

local function any(list) return list[math.random(#list)] end

local function worker()
  return {
    eligible = math.random(4) > 1, weight = any { 1, 0.001, 1000 }, generation = any { 1, 2 },
    inflight = any { 0, 0, 1, 7, 1e5 }, queued_prefill_tokens = any { 0, 0, 100, 1e9, 1e15 },
    decode_blocks = any { 0, 3, 1e12 }, block_tokens = any { 1, 16, 65536 },
    cached_tokens = any { 0, 0, 16, 100, 4e9 }, cached_host_tokens = any { 0, 5, 1e6 },
    cached_disk_tokens = any { 0, 5 },
    prefill_tokens_per_second = any { 1e-9, 8000, 1e12 }, ttft_seconds = any { 0, 0.1, 1e9 },
    running_requests = any { -1, 0, 5, 1e9 }, waiting_requests = any { -1, 0, 5, 1e9 },
    kv_usage = any { -1, 0, 0.5, 1 }, gauges_age_seconds = any { huge, 0, 1, 100 },
  }
end

for _, name in ipairs {
  "agent_sessions", "cache_aware", "consistent_hash", "kv_aware", "least_loaded", "lmetric", "power_of_two",
  "preble", "precise_prefix", "prefix_seconds", "random", "round_robin", "sticky_bounded", "sticky_sessions",
} do
  it(name .. " holds at the edges", function()
    math.randomseed(7)
    local policy = testing.load("policies/" .. name .. ".lua")
    for k = 1, 1500 do
      local workers, some = testing.fleet(any { 1, 1, 2, 3, 8 }, worker), false
      for _, w in ipairs(workers) do some = some or w.eligible end
      local d = policy:decide { workers = workers, now = k * any { 1, 1, 1000 },
        req = { prompt_tokens = any { 0, 1, 100, 1e6, 1e15 }, max_tokens = any { -1, 0, 1, 1e9 },
          expected_output_tokens = any { -1, 0, 1e9 }, stream = any { true, false }, session_id = "s" .. k },
        session = any { false, { id = "s" .. k, parent = any { false, "p" } or nil,
          bound = any { false, "a", "b" } or nil, parent_hash = any { 0, 1, 2 ^ 52 - 1 } } } or nil }
      assert.same({}, d.errors)
      assert.equal(some, d.index ~= nil)
      assert.is_true(not some or workers[d.index + 1].eligible)
    end
  end)
end
