-- precise_prefix: llm-d's weighted sum of scores for prefix, queue and KV usage.
--
-- Intent     What the llm-d router's precise-prefix-cache profile decides, for fleets that are tuned
--            for its weights.
-- Source     llm-d-router at ebab687 (prefix-cache, queue, kv-cache-utilization scorers; max-score and
--            weighted-random pickers), weights of its epp-precise-prefix-cache-config. Scores, 0 to 1:
--              prefix  (1 - long_share) * cached / prompt + long_share * min(1, cached / 8192) ^ 2
--              queue   (longest - waiting) / (longest - shortest); 1 when all are equal
--              kv      1 - kv_usage
-- Signals    w.cached_tokens; w.waiting_requests, w.kv_usage, w.gauges_age_seconds; w.inflight;
--            w.block_tokens, w.eligible; req.prompt_tokens.
-- Parameters prefix_weight (2), queue_weight (1), kv_weight (1): of the scores. long_share (0): of a
--            prefix's length against its share. picker ("max"): the highest sum, ties at random;
--            "weighted_random": drawn in proportion to the sums. gauges_max_age_seconds (5).
-- Deferred   Its other scorers (LoRA, sessions, latency, no-hit LRU, token load), the prefix-affinity
--            filter, flow control, prefill and decode profiles. Its estimator of tokens.
-- Failure    Gauges of one eligible worker unknown or older than gauges_max_age_seconds: numbers of
--            different ages are not compared, so queues are the router's own counts of requests in
--            flight, and KV usage scores 1 for all. Nothing known of caches: queue and KV usage decide.
--            All sums 0: any. Weight 0: never picked; others do not count.

local pl = require "perilune"
local ceil, floor, max, min, huge = math.ceil, math.floor, math.max, math.min, math.huge

local policy = {
  api = 1,
  name = "precise_prefix",
  params = { prefix_weight = 2, queue_weight = 1, kv_weight = 1, long_share = 0, picker = "max",
    gauges_max_age_seconds = 5 },
}

local LONG_TOKENS = 8192

function policy.init(params)
  assert(params.picker == "max" or params.picker == "weighted_random", "picker must be max or weighted_random")
  assert(params.prefix_weight >= 0 and params.queue_weight >= 0 and params.kv_weight >= 0, "weights are from 0")
  assert(params.long_share >= 0 and params.long_share <= 1, "long_share is a share: 0 to 1")
  return params
end

local function picked_from(w) return w.eligible and w.weight > 0 end

-- In whole blocks, as it counts matches.
local function prefix_score(req, w, long_share)
  local block = max(w.block_tokens, 1)
  local total = max(ceil(req.prompt_tokens / block), 1)
  local ratio = min(floor(w.cached_tokens / block) / total, 1)
  return (1 - long_share) * ratio + long_share * min(1, w.cached_tokens / LONG_TOKENS) ^ 2
end

-- fleet.cost holds the sums with a minus sign.
local function draw(fleet)
  local total = 0
  for i = 0, fleet.n - 1 do
    if picked_from(fleet[i]) then total = total - fleet.cost[i] end
  end
  if total <= 0 then return pl.pick_min() end
  local left, last = pl.random() * total, nil
  for i = 0, fleet.n - 1 do
    if picked_from(fleet[i]) and fleet.cost[i] < 0 then
      last, left = i, left + fleet.cost[i]
      if left < 0 then break end
    end
  end
  return last
end

function policy.route(req, fleet, st)
  local known = true
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    if picked_from(w) and (w.waiting_requests < 0 or w.kv_usage < 0
      or w.gauges_age_seconds > st.gauges_max_age_seconds) then known = false end
  end
  local longest, shortest = 0, huge
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    if picked_from(w) then
      local queue = known and w.waiting_requests or w.inflight
      longest, shortest = max(longest, queue), min(shortest, queue)
    end
  end
  local span = longest - shortest
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    local c = huge
    if picked_from(w) then
      local queue = known and w.waiting_requests or w.inflight
      c = -(st.prefix_weight * prefix_score(req, w, st.long_share)
        + st.queue_weight * (span > 0 and (longest - queue) / span or 1)
        + st.kv_weight * (known and 1 - w.kv_usage or 1))
    end
    fleet.cost[i] = c
  end
  if st.picker == "max" then return pl.pick_min(), "highest" end
  return draw(fleet), "drawn"
end

return policy
