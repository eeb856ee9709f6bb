-- prefix_seconds: the worker where this request costs the fewest seconds, caches and queues in one unit.
--
-- Intent     Go where the prompt is cached for as long as that saves more time than it costs. What a
--            cached prefix saves, what a queue costs and what running requests cost are all seconds of
--            the engine, so a hot prefix spills to other workers bit by bit, without a threshold.
-- Source     Ours. One unit as in llm-d's and GORGO's estimates (policies of that name), shared-prefix bursts
--            kept together as Dynamo's predicted blocks do.
-- Rule       seconds = pace * (STEP + queued + reuse * missing + decode_cost * output * resident + waiting)
--            missing   tokens of this prompt to prefill there; `reuse` above 1, because the time that
--                      prefilling takes is taken from later requests, too;
--            queued    uncached tokens that this router sent there and that have no first token yet;
--            resident  KV tokens of the requests under way: reading one for one step costs decode_cost
--                      of prefilling one, for each of the `output` steps that this request will take;
--            waiting   requests that wait in the engine and are not ours (other routers, other clients),
--                      each as large as ours are on average, the less the older the gauges are;
--            pace      seconds per token of prefill, STEP the fixed cost of a step, in tokens.
--            Lowest seconds by weight; equal ones at random. Reasons: `hit` (nobody holds more of the
--            prompt), `spill` (somebody does), `cold` (nobody holds any).
-- Pace       The ledger measures a request's own tokens over its time to first token, waiting included.
--            As queues are counted here, that would count them twice: what the request's own tokens were of
--            all that had to be prefilled first is averaged beside it, and divides it out. A worker is
--            held to be slower or faster than the fleet only by what exceeds NOISE, within 8 times, and
--            the less the longer it has not been measured: so equal engines stay equal, and one that
--            had a bad minute, or is new, gets requests and is measured again.
-- Signals    w.cached_tokens, w.cached_host_tokens, w.cached_disk_tokens, w.queued_prefill_tokens,
--            w.decode_blocks, w.block_tokens, w.prefill_tokens_per_second, w.ttft_seconds, w.inflight,
--            w.waiting_requests, w.running_requests, w.gauges_age_seconds, w.weight, w.eligible;
--            req.prompt_tokens, req.expected_output_tokens, req.max_tokens, req.stream.
-- Parameters reuse (1.25): above; 1 looks at this request's own time only. decode_cost (0.001): above;
--            0: running requests cost nothing. output_tokens (300): steps of a request that does not
--            say; its max_tokens bounds them. gauges_seconds (2): gauges of this age no longer count.
-- Deferred   KV usage and evictions that a request would cause; the price of attention over a long cached
--            prefix; doubts about approximate cache contents. A bound session stays where it is.
-- Failure    Nothing known of caches: the fewest estimated seconds of work. No rate measured: the default
--            rate, for all alike. No gauges: the router's own counts. No eligible worker: not asked.
--            Weight 0: never picked.

local pl = require "perilune"
local max, min, huge = math.max, math.min, math.huge

local policy = {
  api = 1,
  name = "prefix_seconds",
  params = { reuse = 1.25, decode_cost = 0.001, output_tokens = 300, gauges_seconds = 2 },
}

local STEP = 256             -- tokens: compute of so many takes as long as reading the weights, on current hardware
local NOISE = 1.25
local SLOWEST = 8
local FORGET_SECONDS = 60    -- unmeasured for so long, half of a difference is left
local READ_SECONDS = 0.25    -- what was learned is looked at again so often
local RATE_TOKENS = 64       -- the ledger measures no shorter prefill
local HOST, DISK = 0.75, 0.25 -- worth of a cached token that has to be fetched
local TYPICAL = 1 / 64       -- share of a new request in the average size

-- own tokens / all tokens to be prefilled until its first one, of the requests that the ledger measures
local own_share = pl.worker_ewma("prefix_seconds_own_share", 30)

function policy.init(params)
  assert(params.reuse >= 1, "reuse must be at least 1")
  assert(params.decode_cost >= 0 and params.output_tokens >= 0, "decode_cost and output_tokens must be at least 0")
  assert(params.gauges_seconds > 0, "gauges_seconds must be above 0")
  return {
    reuse = params.reuse, decode_cost = params.decode_cost, output_tokens = params.output_tokens,
    gauges_seconds = params.gauges_seconds,
    typical = 1024, -- tokens missing, of an average request
    -- by slot
    generation = {}, read_at = {}, rate = {}, measured_at = {}, pace = {},
  }
end

-- Looks at what was learned of w.
local function read(w, st, now)
  local slot, rate = w.slot, w.prefill_tokens_per_second
  if st.generation[slot] ~= w.generation then
    st.generation[slot], st.rate[slot] = w.generation, rate
    st.measured_at[slot] = w.ttft_seconds > 0 and now or -huge
  elseif st.rate[slot] ~= rate then
    st.rate[slot], st.measured_at[slot] = rate, now
  end
  st.read_at[slot] = now
  st.pace[slot] = min(own_share:get(w, 1), 1) / max(rate, 1)
end

-- How much w's own measurements count, 0 to 1.
local function trust(w, st, now)
  return FORGET_SECONDS / (FORGET_SECONDS + now - st.measured_at[w.slot])
end

local function pace_of(w, st, fleet_pace, now)
  local ratio = st.pace[w.slot] / fleet_pace
  if ratio > NOISE then
    ratio = min(ratio / NOISE, SLOWEST)
  elseif ratio < 1 / NOISE then
    ratio = max(ratio * NOISE, 1 / SLOWEST)
  else
    return fleet_pace
  end
  return fleet_pace * (1 + (ratio - 1) * trust(w, st, now))
end

-- Requests waiting in the engine that this router did not send.
local function strangers(w, st)
  local age = w.gauges_age_seconds
  if w.waiting_requests <= 0 or age >= st.gauges_seconds then return 0 end
  local all = w.waiting_requests + max(w.running_requests, 0)
  return min(w.waiting_requests, max(all - w.inflight, 0)) * (1 - age / st.gauges_seconds)
end

local function steps_of(req, st)
  if req.expected_output_tokens >= 0 then return req.expected_output_tokens end
  return req.max_tokens >= 0 and min(req.max_tokens, st.output_tokens) or st.output_tokens
end

local function missing(req, w) return pl.uncached_tokens(req, w, HOST, DISK) end

-- Pace of the fleet: the average of what was measured, by trust; the default rate of all while nothing was.
local function fleet_pace(fleet, st, now)
  local sum, weights, default = 0, 0, 0
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    if w.eligible then
      local slot = w.slot
      if st.generation[slot] ~= w.generation or now - st.read_at[slot] >= READ_SECONDS then read(w, st, now) end
      local t = trust(w, st, now)
      sum, weights, default = sum + t * st.pace[slot], weights + t, st.pace[slot]
    end
  end
  return weights > 0 and sum / weights or default
end

function policy.route(req, fleet, st)
  local now = pl.now()
  local common = fleet_pace(fleet, st, now)
  local decode = st.decode_cost * steps_of(req, st)
  local held = 0
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    local seconds = huge
    if w.eligible and w.weight > 0 then
      local tokens = STEP + w.queued_prefill_tokens + st.reuse * missing(req, w)
        + decode * w.decode_blocks * w.block_tokens + strangers(w, st) * st.typical
      seconds = pace_of(w, st, common, now) * tokens / w.weight
      held = max(held, w.cached_tokens)
    end
    fleet.cost[i] = seconds
  end
  local best = pl.pick_min()
  if not best then return nil end
  local w = fleet[best]
  local own = max(req.prompt_tokens - w.cached_tokens, 0)
  if req.stream and own >= RATE_TOKENS then
    own_share:update(w, own / (STEP + own + w.queued_prefill_tokens))
  end
  st.typical = st.typical + (own - st.typical) * TYPICAL
  return best, held == 0 and "cold" or w.cached_tokens < held and "spill" or "hit"
end

return policy
