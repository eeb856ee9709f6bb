-- sticky_bounded: a session stays on its worker while waiting there is cheaper than starting over.
--
-- Intent     Affinity is worth what it saves: the prefill of the prompt. When the worker that holds a
--            session has a queue that costs more seconds than that, the turn goes elsewhere.
-- Source     Migrate only when the queueing delay saved exceeds the cost of prefilling again;
--            soft affinity as in NVIDIA Dynamo (PR 13907).
-- Signals    s.bound_index; req.prompt_tokens; w.queued_prefill_tokens, w.prefill_tokens_per_second,
--            w.cached_tokens, w.inflight, w.eligible, w.weight.
-- Rule       Staying costs the seconds of prefill queued at the holder; moving costs those queued at
--            the other, and the prompt's tokens that are not in its cache. Both count inflight_seconds
--            for each request in flight. The turn moves (reason `moved`) when staying costs more than
--            `factor` times the cheapest move; else it stays (reason `stayed`). A new session goes
--            where it costs least.
-- Rebinding  At once: the binding follows the turn, for that worker now has the newest KV. `factor`
--            keeps a session from going back and forth: to return, it must gain as much again.
-- Parameters factor (1.5): from 1. ttl_seconds (300): as in sticky_sessions.
--            inflight_seconds (0.005): what a request in flight costs its neighbours.
-- Failure    The holder at its cap: the cheapest other worker serves this turn, whatever the factor, and
--            the binding stays (reason `session_spill`). The holder gone: as a new session. A session
--            that an engine holds never moves. No eligible worker: the router's own rule applies.
--            Weight 0: never picked.

local pl = require "perilune"

local policy = {
  api = 1,
  name = "sticky_bounded",
  affinity = "soft",
  params = { factor = 1.5, ttl_seconds = 300, inflight_seconds = 0.005 },
}

function policy.init(params)
  assert(params.factor >= 1, "factor must be at least 1")
  return params
end

function policy.session(_, s, st)
  if s.event == pl.SESSION_TURN and s.bound_slot < 0 then return st.ttl_seconds end
end

-- Seconds until w would have prefilled so many tokens more.
local function seconds(w, tokens, st)
  return pl.prefill_seconds(w, w.queued_prefill_tokens + tokens) + st.inflight_seconds * w.inflight
end

local function seconds_anew(req, w, st)
  return seconds(w, math.max(req.prompt_tokens - w.cached_tokens, 0), st)
end

function policy.route(req, fleet, st)
  local s = req.session
  if not s or s.bound_index < 0 then return nil end
  local holder = fleet[s.bound_index]
  if not holder.eligible then return nil end
  local best, least = nil, math.huge
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    if w.eligible and w.weight > 0 and i ~= s.bound_index then
      local cost = seconds_anew(req, w, st)
      if cost < least then best, least = i, cost end
    end
  end
  if best and seconds(holder, 0, st) > st.factor * least then return best, "moved" end
  return s.bound_index, "stayed"
end

function policy.score(req, w, st)
  return w.weight > 0 and seconds_anew(req, w, st) / w.weight or math.huge
end

return policy
