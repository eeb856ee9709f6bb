-- cache_aware: the SGLang gateway's rule: the best match if it is good enough and loads are even.
--
-- Intent     What `--policy cache_aware` of that gateway does, on perilune's index (there: HTTP
--            workers only get an approximate tree of the text).
-- Source     sgl-model-gateway (SMG), policies/cache_aware.rs at f8daa88. When
--              highest - lowest load > balance_abs and highest > balance_rel * lowest,
--            or KV usage is too uneven or too high, the shortest queue (reason `balance`). Else the
--            worker that holds the most of the prompt, if that is more than cache_threshold of it
--            (`cache`); among several such, the one with the shortest queue. Else the shortest queue
--            (`least`).
-- Signals    w.cached_tokens, w.inflight (the load), w.kv_usage when known, w.eligible; req.prompt_tokens.
-- Parameters cache_threshold (0.5), balance_abs (32), balance_rel (1.1): the defaults of its library;
--            its command line has 0.3, 64 and 1.5. kv_usage_spread (1), kv_usage_most (1): imbalanced
--            when the usages of KV caches differ by more, or one is above; 1: off.
-- Deferred   The smallest tree (its answer to a poor match in other versions): policies do not see how
--            much of the index is a worker's, so it is the shortest queue, as in its event-driven form.
--            Its newer overlap decay and temperature.
-- Failure    Nothing known of caches: the shortest queue. Above the thresholds all affinity is lost at
--            once: that cliff is the rule's (prefix_seconds has none). Ties at random, where the gateway
--            takes the first. Unknown KV usage does not count. Weight 0: never picked; others do not count.

local pl = require "perilune"
local max, min, huge = math.max, math.min, math.huge

local policy = {
  api = 1,
  name = "cache_aware",
  params = { cache_threshold = 0.5, balance_abs = 32, balance_rel = 1.1, kv_usage_spread = 1, kv_usage_most = 1 },
}

function policy.init(params)
  assert(params.cache_threshold >= 0 and params.cache_threshold <= 1, "cache_threshold is a share: 0 to 1")
  return params
end

-- The shortest queue among those that hold at least so many tokens.
local function shortest(fleet, tokens)
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    local c = huge
    if w.eligible and w.weight > 0 and w.cached_tokens >= tokens then c = w.inflight end
    fleet.cost[i] = c
  end
  return pl.pick_min()
end

function policy.route(req, fleet, st)
  local high, low, cached = 0, huge, 0
  local usage_high, usage_low = 0, 1
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    if w.eligible and w.weight > 0 then
      high, low, cached = max(high, w.inflight), min(low, w.inflight), max(cached, w.cached_tokens)
      if w.kv_usage >= 0 then
        usage_high, usage_low = max(usage_high, w.kv_usage), min(usage_low, w.kv_usage)
      end
    end
  end
  if (high - low > st.balance_abs and high > st.balance_rel * low)
    or usage_high - usage_low > st.kv_usage_spread or usage_high > st.kv_usage_most then
    return shortest(fleet, 0), "balance"
  end
  if cached > st.cache_threshold * req.prompt_tokens then return shortest(fleet, cached), "cache" end
  return shortest(fleet, 0), "least"
end

return policy
