-- agent_sessions: lead agents are balanced, sub-agents stick, siblings are spread over the workers.
--
-- Intent     An orchestrator's lead agent goes wherever there is room; each sub-agent it starts gets
--            a worker of its own for its short life, beside its siblings rather than behind them, and
--            its KV is let go when it ends. A sub-agent is a session that names a parent, or one
--            that asks to be opened on an engine; every other session is a lead.
-- Source     Sub-agent sessions of NVIDIA Dynamo's PR 7665 (open, sticky turns, close). The walk
--            with a bounded load follows Mirrokni, Thorup, Zadimoghaddam (2018).
-- Signals    s.event, s.has_parent, s.parent_hash, s.kind, s.bound_slot, s.final; w.inflight,
--            w.weight, w.eligible; counters that all loops share.
-- Parameters sub_ttl_seconds (300): life of a sub-agent's session that asked for no time itself.
--            lead_retention_seconds (600), sub_retention_seconds (60): for how long engines are asked
--            to keep the KV of a turn; 0: not asked. Never for a last turn (final, close).
--            load_factor (1.5), slack (2): a sibling passes over a worker that has more than so many
--            times its share of the requests in flight, and so many requests besides.
-- Guarantee  Siblings take turns in the fleet: the k-th new one starts k places behind a place that
--            the parent's hash chose. The count is shared by all loops of a router, so up to as many
--            siblings as there are eligible workers land on different ones, in whichever loops they
--            arrive, while the set of eligible workers stands still, none is passed over, and no
--            other parent with the same of 64 counters starts agents in between (then it is round
--            robin over both families). Several routers each count for themselves.
-- Failure    Engine cannot open (or not in time): once more elsewhere, then router-only affinity. Its
--            worker at the cap or gone: as in sticky_sessions. No eligible worker: the router's own
--            rule applies. Weight 0: never picked.

local pl = require "perilune"

local policy = {
  api = 1,
  name = "agent_sessions",
  affinity = "hard",
  params = {
    sub_ttl_seconds = 300,
    lead_retention_seconds = 600,
    sub_retention_seconds = 60,
    load_factor = 1.5,
    slack = 2,
  },
}

local FAMILIES = 64
local started = {} -- siblings started, by a part of the parent's hash
for i = 0, FAMILIES - 1 do started[i] = pl.counter("agent_sessions_" .. i) end

function policy.init(params)
  assert(params.load_factor >= 1 and params.slack >= 0, "load_factor must be at least 1, slack at least 0")
  return params
end

local function is_sub_agent(s)
  return s.has_parent or s.event == pl.SESSION_OPEN or s.kind == pl.ENGINE_BACKED
end

function policy.session(_, s, st)
  if s.bound_slot >= 0 then return nil end -- as it was bound
  if s.event == pl.SESSION_OPEN then return nil, pl.ENGINE_BACKED end
  if s.event == pl.SESSION_BIND then return nil, pl.ROUTER_ONLY end
  if s.has_parent then return st.sub_ttl_seconds, pl.ROUTER_ONLY end
  return 0 -- a lead: balanced turn by turn
end

-- The first worker, from the start-th eligible one on, that is not overloaded. Who has no more than its share never
-- is, and there is always one.
local function walk(fleet, start, st)
  local load, shares, seen = 0, 0, 0
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    if w.eligible and w.weight > 0 then
      load, shares, seen = load + w.inflight, shares + w.weight, seen + 1
    end
  end
  if seen == 0 then return nil end
  start = start % seen
  local bound = st.load_factor * load / shares
  local best, nearest, place = nil, math.huge, 0
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    if w.eligible and w.weight > 0 then
      local behind = (place - start) % seen
      if behind < nearest and w.inflight <= bound * w.weight + st.slack then
        best, nearest = i, behind
      end
      place = place + 1
    end
  end
  return best
end

function policy.route(req, fleet, st)
  local s = req.session
  if s and s.has_parent and s.bound_index < 0 and fleet.eligible > 0 then
    local before = started[s.parent_hash % FAMILIES]:add(1) - 1
    return walk(fleet, math.floor(s.parent_hash / FAMILIES) + before, st), "sibling"
  end
end

function policy.score(_, w)
  return (w.inflight + 1) / w.weight
end

function policy.retain(req, _, st)
  local s = req.session
  if not s or s.final or s.event == pl.SESSION_CLOSE then return nil end
  local seconds = is_sub_agent(s) and st.sub_retention_seconds or st.lead_retention_seconds
  if seconds > 0 then return seconds end
end

function policy.degrade(_, fault)
  if fault.kind == pl.OPEN_FAILED and fault.attempts < 2 and fault.budget_left then return pl.RETRY end
end

return policy
