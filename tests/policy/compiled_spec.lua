-- The hot hooks of every policy that we ship are compiled, whatever the fleet looks like.
local testing = require "perilune.testing"

local fleets = {
  { "one", testing.fleet(1) },
  { "64", testing.fleet(64, function(i) return { inflight = i * 7 % 5, slot = i } end) },
  { "64, a third ineligible", testing.fleet(64, function(i)
    return { inflight = i * 7 % 5, slot = i, eligible = i % 3 ~= 0, weight = 1 + i % 2 }
  end) },
  { "512", testing.fleet(512, function(i) return { inflight = i * 7 % 5, slot = i } end) },
  { "64 with caches and gauges", testing.fleet(64, function(i)
    return { inflight = i * 7 % 5, slot = i, cached_tokens = i % 4 * 30, queued_prefill_tokens = i * 11 % 300,
      decode_blocks = i * 13 % 50, prefill_tokens_per_second = 5000 + i * 100, ttft_seconds = i % 2,
      waiting_requests = i % 3, running_requests = i % 5, kv_usage = i % 10 / 10, gauges_age_seconds = i % 4 / 2 }
  end) },
}

for _, file in ipairs {
  "policies/random.lua", "policies/round_robin.lua", "policies/least_loaded.lua", "policies/power_of_two.lua",
  "policies/consistent_hash.lua", "policies/sticky_sessions.lua", "policies/agent_sessions.lua",
  "policies/sticky_bounded.lua", "policies/kv_aware.lua", "policies/cache_aware.lua", "policies/precise_prefix.lua",
  "policies/lmetric.lua", "policies/preble.lua", "policies/prefix_seconds.lua", "examples/policies/same_prefix.lua",
} do
  describe(file, function()
    for _, fleet in ipairs(fleets) do
      it("is compiled for a fleet of " .. fleet[1], function()
        local policy = testing.load(file)
        local found = testing.not_compiled(file, function()
          for k = 1, 200 do
            policy:decide { workers = fleet[2], now = k / 8,
              req = { stream = true, session_id = "s" .. k, members = { messages = "[" .. k } },
              session = k % 2 == 0 and { id = "s" .. k, parent = k % 4 == 0 and "p" or nil, bound = "b" } or nil }
            policy:session { session = { id = "s" .. k } }
            policy:retain { session = { id = "s" .. k } }
          end
        end)
        assert.same({}, found)
      end)
    end
  end)
end

describe("the check itself", function()
  it("sees what is not compiled", function()
    local policy = testing.load [[
      local policy = { api = 1 }
      function policy.score(req, w)
        local f = function() return w.inflight end
        return f()
      end
      return policy
    ]]
    local found = testing.not_compiled("policy.lua", function()
      for _ = 1, 200 do policy:decide { workers = testing.fleet(64) } end
    end)
    assert.is_true(#found > 0)
    assert.matches("policy.lua:3", found[1])
  end)
end)
