-- preble: E2: exploit a prefix where it is cached while that saves more than it costs, else explore.
--
-- Intent     Long shared prefixes stay together, the rest goes where the recent work was least.
-- Source     Preble (ICLR'25, arXiv 2407.00023), global_scheduler_with_time.py. When less of the prompt is
--            missing than is cached: exploit, the least loaded of the workers that hold the most of it.
--            Else explore, the lowest of load + prefill of what is missing there. Load, in seconds: the
--            prefill of what was missing in the window's requests, and the decoding of those in flight.
--            An exploited worker that has the highest load, and more than `balance` times the lowest, is
--            left for the lowest (reason `rebalance`); here only if the difference exceeds the seconds of
--            prefilling the cached prefix again, or a fleet with little to do would never exploit.
-- Signals    w.cached_tokens, w.inflight, w.prefill_tokens_per_second, w.slot, w.generation, w.eligible,
--            w.weight; req.prompt_tokens, req.expected_output_tokens.
-- Parameters window_seconds (180), balance (1.5; 0: never), output_tokens (200) and step_seconds (0.02):
--            decoding of a request in flight takes their product; a client's expected output counts
--            instead of the former.
-- Deferred   The eviction term (what the request would push out of a cache), moving and splitting hot
--            nodes of the tree (here only requests move), its priority groups. Load is booked per worker,
--            not per node shared by several. Its medians of output lengths are parameters. The window
--            slides over two halves.
-- Failure    Each loop books what it routed and multiplies by the number of loops; a reload starts the
--            window anew. Nothing known of caches: everything explores. Costs are divided by weight;
--            weight 0: never picked. No eligible worker: not asked.

local pl = require "perilune"
local floor, max, huge = math.floor, math.max, math.huge

local policy = {
  api = 1,
  name = "preble",
  params = { window_seconds = 180, balance = 1.5, output_tokens = 200, step_seconds = 0.02 },
}

function policy.init(params, _, ctx)
  assert(params.window_seconds > 0, "window_seconds must be above 0")
  assert(params.balance == 0 or params.balance >= 1, "balance is a ratio from 1, or 0: never")
  -- by slot: seconds of prefill booked in this half of the window and the one before
  return { half_seconds = params.window_seconds / 2, balance = params.balance, loops = ctx.loops,
    output_tokens = params.output_tokens, step_seconds = params.step_seconds,
    generation = {}, half = {}, now = {}, before = {} }
end

-- Prefill seconds that this loop booked on the worker in the window before `halves`, a time in halves of windows.
local function booked(w, st, halves)
  local slot, half = w.slot, floor(halves)
  if st.generation[slot] ~= w.generation then
    st.generation[slot], st.half[slot], st.now[slot], st.before[slot] = w.generation, half, 0, 0
  elseif st.half[slot] ~= half then
    st.before[slot] = st.half[slot] == half - 1 and st.now[slot] or 0
    st.half[slot], st.now[slot] = half, 0
  end
  return st.now[slot] + st.before[slot] * (1 - (halves - half))
end

local function missing_seconds(req, w)
  return pl.prefill_seconds(w, pl.uncached_tokens(req, w))
end

local function load_of(w, st, halves, decode)
  if not w.eligible or w.weight <= 0 then return huge end
  return (booked(w, st, halves) * st.loops + w.inflight * decode) / w.weight
end

local function least(fleet, st, halves, decode)
  for i = 0, fleet.n - 1 do fleet.cost[i] = load_of(fleet[i], st, halves, decode) end
  return pl.pick_min()
end

function policy.route(req, fleet, st)
  local halves = pl.now() / st.half_seconds
  local decode = st.step_seconds * (req.expected_output_tokens >= 0 and req.expected_output_tokens or st.output_tokens)
  local cached, low, high = 0, huge, 0
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    local load = load_of(w, st, halves, decode)
    if load < huge then
      cached, low, high = max(cached, w.cached_tokens), math.min(low, load), max(high, load)
    end
    fleet.cost[i] = load
  end
  local exploit = req.prompt_tokens - cached < cached
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    local load = fleet.cost[i]
    if load < huge then
      if not exploit then
        fleet.cost[i] = load + missing_seconds(req, w) / w.weight
      elseif w.cached_tokens < cached then
        fleet.cost[i] = huge
      end
    end
  end
  local best, reason = pl.pick_min(), exploit and "exploit" or "explore"
  if not best then return nil end
  if exploit and st.balance > 0 and fleet.cost[best] == high and high > st.balance * low
    and high - low > pl.prefill_seconds(fleet[best], cached) then
    best, reason = least(fleet, st, halves, decode), "rebalance"
  end
  local w = fleet[best]
  st.now[w.slot] = st.now[w.slot] + missing_seconds(req, w)
  return best, reason
end

return policy
