-- prefix_seconds: the worker where this request costs the fewest seconds, caches and queues in one unit.
--
-- Intent     Go where the prompt is cached for as long as that saves more time than it costs. What a
--            cached prefix saves, what queues cost and what running requests cost are all seconds of
--            engine time, so a hot prefix spills to other workers bit by bit, without a threshold.
-- Source     Ours. Seconds as the unit: GORGO (arXiv 2602.11688), least_load of the SGLang gateway; work times
--            batch for the harm done to others: LMetric (arXiv 2603.15202).
-- Rule       seconds = pace * (STEP + queued + own * (1 + neighbours * (inflight + 1)) + displaced + copy
--                              + decode_cost * output * resident + strangers) / weight, lowest wins
--            own        work of prefilling what is missing of this prompt there. Work is counted in tokens
--                       that have nothing before them: attention makes a token behind attention_tokens
--                       others cost two. It also holds up each request in flight and the next to come:
--                       `neighbours` is how much their delay counts;
--            displaced  what is prefilled takes the place of what the cache there had, and the less that has
--                       aged the more of it is still asked for: missing tokens * eviction * (tokens that this
--                       worker was sent to prefill in the last minutes / the fleet's mean of that, times
--                       its pace / the fleet's), so that conversations begin where caches change least,
--                       and a faster worker may have more;
--            copy       on every worker but the holder, when one alone holds the most of the prompt:
--                       (reuse - 1) * the tokens that nobody else holds, at most the work of
--                       copy_requests average requests. A conversation's next turns find it there, and
--                       a second copy of it is no use. What two or more hold spreads freely;
--            queued     work that this router sent there and that has no first token yet;
--            resident   KV tokens of the requests under way: reading one in one step costs decode_cost
--                       of prefilling one, in each of the `output` steps that this request will take;
--            strangers  requests that wait in the engine and are not ours (other routers and clients), each
--                       as large as ours are on average; they count less the older the gauges are;
--            pace       seconds per token of prefill; STEP the fixed cost of a step, in tokens.
--            Equal costs at random. Reason: `hit` (nobody holds more of the prompt), `spill`, `cold`.
-- Pace       The ledger measures a request's own tokens over its time to first token, waiting included:
--            used as it is, a queue would count twice. So the share that a request's own tokens had in
--            all that stood before its first one is averaged beside it, and divides the waiting out.
--            Both averages are shared by all loops. A worker is held to be slower or faster than the
--            fleet only by what exceeds NOISE, within SLOWEST, and the less the longer it has not been
--            measured: equal engines stay equal (ties go to random, not to the luckiest), and one that is
--            new, or had a bad minute, gets requests and is measured again.
-- Herds      queued, inflight and resident are this router's own counts, exact at every instant over all
--            its loops; of what other routers do, it sees only the gauges.
-- Signals    w.cached_tokens, w.cached_host_tokens, w.cached_disk_tokens, w.queued_prefill_tokens,
--            w.decode_blocks, w.block_tokens, w.inflight, w.prefill_tokens_per_second, w.ttft_seconds,
--            w.waiting_requests, w.running_requests, w.gauges_age_seconds, w.weight, w.eligible;
--            req.prompt_tokens, req.expected_output_tokens, req.max_tokens, req.stream.
-- Parameters attention_tokens (32,768; 0: attention costs nothing): the model's parameters / (2 * layers *
--            hidden size), 30,000 for Llama 8B. neighbours (0.15): from 0, this request's own time only.
--            reuse (24): from 1, a copy costs only this request's prefill. copy_requests (10): so many
--            average requests longer a queue is borne to avoid a copy, beside what it saves. eviction (2):
--            in tokens, what a prefilled token costs later where caches change as on average. decode_cost
--            (0.0001): from 0, running requests cost nothing; higher favours even decoding over cached
--            prefixes. output_tokens (300): of a request that does not say; its max_tokens is a bound.
--            gauges_seconds (2): older ones do not count. neighbours, reuse, copy_requests, eviction and
--            decode_cost are tuned on one conversation trace in simulation (tests/bench/results_policies.md).
-- Deferred   KV usage, and what exactly a request would evict (each loop knows what it sent itself); doubts
--            about approximate cache contents; copying a hot prefix ahead of need; how far a prefill under
--            way has come. A bound session stays where it is (affinity is hard).
-- Failure    Nothing known of caches: the fewest estimated seconds of work. No rate measured: one default for
--            all. No gauges: the router's own counts. No eligible worker: not asked. Weight 0: never picked.

local pl = require "perilune"
local max, min, huge = math.max, math.min, math.huge

local policy = {
  api = 1,
  name = "prefix_seconds",
  params = { attention_tokens = 32768, neighbours = 0.15, reuse = 24, copy_requests = 10, eviction = 2,
    decode_cost = 0.0001, output_tokens = 300, gauges_seconds = 2 },
}

local STEP = 256              -- tokens: computing so many takes as long as reading the weights, on today's hardware
local NOISE = 1.25
local SLOWEST = 8
local FORGET_SECONDS = 60     -- not measured for so long: half of a difference is left
local READ_SECONDS = 0.25     -- averages are read again so often
local MEASURED_TOKENS = 64    -- the ledger takes no rate from shorter prefills
local HOST, DISK = 0.75, 0.25 -- worth of a cached token that has to be fetched
local TYPICAL_SHARE = 1 / 64  -- of a new request in the average work
local AGE_SECONDS = 120       -- of what was sent to a worker so long ago, half counts as displacing
local UNEVEN = 4              -- times the mean: displacing counts no more

local own_share = pl.worker_ewma("prefix_seconds_own_share", 30)
local learned = pl.worker_ewma("prefix_seconds_pace", 60)

function policy.init(params)
  assert(params.neighbours >= 0, "neighbours must be at least 0")
  assert(params.reuse >= 1 and params.copy_requests >= 0, "reuse must be at least 1, copy_requests at least 0")
  assert(params.attention_tokens >= 0, "attention_tokens must be at least 0")
  assert(params.eviction >= 0, "eviction must be at least 0")
  assert(params.decode_cost >= 0 and params.output_tokens >= 0, "decode_cost and output_tokens must be at least 0")
  assert(params.gauges_seconds > 0, "gauges_seconds must be above 0")
  return {
    attention = params.attention_tokens > 0 and 1 / params.attention_tokens or 0,
    neighbours = params.neighbours, copies = params.reuse - 1, copy_requests = params.copy_requests,
    eviction = params.eviction, decode_cost = params.decode_cost, output_tokens = params.output_tokens,
    gauges_seconds = params.gauges_seconds,
    typical = 1024, -- work of an average request
    generation = {}, read_at = {}, rate = {}, measured_at = {}, pace = {}, -- by slot
    sent = {}, -- tokens to prefill, fading
    depth = {}, -- work of a queued token
  }
end

local function missing(req, w) return pl.uncached_tokens(req, w, HOST, DISK) end

-- Of prefilling the last `tokens` of so long a prompt.
local function work(tokens, prompt, st) return tokens * (1 + (prompt - tokens / 2) * st.attention) end

-- Reads what was learned of w. A rate that has changed since tells that it was measured meanwhile.
local function read(w, st, now)
  local slot, rate = w.slot, max(w.prefill_tokens_per_second, 1)
  if st.generation[slot] ~= w.generation then
    st.generation[slot], st.rate[slot] = w.generation, rate
    st.measured_at[slot] = w.ttft_seconds > 0 and now or -huge
    st.sent[slot], st.depth[slot] = 0, 1
  else
    st.sent[slot] = st.sent[slot] * 0.5 ^ ((now - st.read_at[slot]) / AGE_SECONDS)
  end
  if st.rate[slot] ~= rate then
    st.rate[slot], st.measured_at[slot] = rate, now
    learned:update(w, own_share:get(w, 1) / rate)
  end
  st.read_at[slot] = now
  st.pace[slot] = learned:get(w, 1 / rate)
end

-- How much w's own measurements count: 0 to 1.
local function trust(w, st, now)
  return FORGET_SECONDS / (FORGET_SECONDS + now - st.measured_at[w.slot])
end

-- Of the fleet: the average of what was measured, by trust; while nothing was, the default rate's.
local function common_pace(fleet, st, now)
  local sum, weights, default = 0, 0, 1
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    if w.eligible then
      local slot = w.slot
      if st.generation[slot] ~= w.generation or now - st.read_at[slot] >= READ_SECONDS then read(w, st, now) end
      local t = trust(w, st, now)
      sum, weights, default = sum + t * st.pace[slot], weights + t, 1 / st.rate[slot]
    end
  end
  return weights > 0 and sum / weights or default
end

local function pace_of(w, st, common, now)
  local ratio = st.pace[w.slot] / common
  if ratio > NOISE then
    ratio = min(ratio / NOISE, SLOWEST)
  elseif ratio < 1 / NOISE then
    ratio = max(ratio * NOISE, 1 / SLOWEST)
  else
    return common
  end
  return common * (1 + (ratio - 1) * trust(w, st, now))
end

-- Requests that wait in the engine and that this router did not send.
local function strangers(w, st)
  local age = w.gauges_age_seconds
  if w.waiting_requests <= 0 or age >= st.gauges_seconds then return 0 end
  local there = w.waiting_requests + max(w.running_requests, 0)
  return min(w.waiting_requests, max(there - w.inflight, 0)) * (1 - age / st.gauges_seconds)
end

local function steps_of(req, st)
  if req.expected_output_tokens >= 0 then return req.expected_output_tokens end
  return req.max_tokens >= 0 and min(req.max_tokens, st.output_tokens) or st.output_tokens
end

-- The most that anybody holds of the prompt; the most that another one holds (equal when two hold the most); the
-- tokens sent to a worker on average.
local function crowd(fleet, sent_to)
  local held, second, sent, n = 0, 0, 0, 0
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    if w.eligible and w.weight > 0 then
      local cached = w.cached_tokens
      second = max(second, min(cached, held))
      held, sent, n = max(held, cached), sent + sent_to[w.slot], n + 1
    end
  end
  return held, second, sent / max(n, 1)
end

function policy.route(req, fleet, st)
  local now, prompt = pl.now(), req.prompt_tokens
  local common = common_pace(fleet, st, now)
  local decode = st.decode_cost * steps_of(req, st)
  local held, second, sent = crowd(fleet, st.sent)
  local sent_to, depth, neighbours, eviction, typical = st.sent, st.depth, st.neighbours, st.eviction, st.typical
  local copy = min(st.copies * (held - second), st.copy_requests * typical)
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    local seconds = huge
    if w.eligible and w.weight > 0 then
      local slot, tokens, pace = w.slot, missing(req, w), pace_of(w, st, common, now)
      local uneven = sent > 0 and min(sent_to[slot] / sent * (pace / common), UNEVEN) or 0
      local cost = STEP + w.queued_prefill_tokens * depth[slot]
        + work(tokens, prompt, st) * (1 + neighbours * (w.inflight + 1))
        + tokens * eviction * uneven + (w.cached_tokens < held and copy or 0)
        + decode * w.decode_blocks * w.block_tokens + strangers(w, st) * typical
      seconds = pace * cost / w.weight
    end
    fleet.cost[i] = seconds
  end
  local best = pl.pick_min()
  if not best then return nil end
  local w = fleet[best]
  local slot, queued, own = w.slot, w.queued_prefill_tokens, max(prompt - w.cached_tokens, 0)
  if req.stream and own >= MEASURED_TOKENS then own_share:update(w, own / (STEP + own + queued)) end
  local units = work(own, prompt, st)
  if own > 0 then st.depth[slot] = (st.depth[slot] * queued + units) / (queued + own) end
  st.sent[slot] = st.sent[slot] + own
  st.typical = st.typical + (units - st.typical) * TYPICAL_SHARE
  return best, held == 0 and "cold" or w.cached_tokens < held and "spill" or "hit"
end

return policy
