-- round_robin: eligible workers take turns; a worker of weight 2 gets two turns of every round.
--
-- Intent     Equal counts of requests without looking at load: right for equal engines and requests
--            of about equal size, and the easiest policy to predict.
-- Source     Smooth weighted round robin as web servers use it: everyone earns its weight, the
--            richest is served and pays what all of them earned.
-- Signals    w.eligible, w.weight, w.slot, w.generation.
-- Parameters None.
-- Failure    No eligible worker: answers nil, and the router's own rule applies. A worker that is
--            ineligible neither earns nor pays, so it comes back to its place, not to a flood; one
--            that joins starts at zero. Each event loop keeps its own round. A reload starts a new
--            one.

local policy = { api = 1, name = "round_robin" }

function policy.init()
  return { credit = {}, generation = {} } -- both by slot: an index is valid in one call only
end

function policy.route(_, fleet, st)
  local credit, generation = st.credit, st.generation
  local best, richest, earned = nil, -math.huge, 0
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    if w.eligible and w.weight > 0 then
      local slot = w.slot
      if generation[slot] ~= w.generation then
        generation[slot], credit[slot] = w.generation, 0
      end
      local c = credit[slot] + w.weight
      credit[slot] = c
      earned = earned + w.weight
      if c > richest then best, richest = i, c end
    end
  end
  if best then
    local slot = fleet[best].slot
    credit[slot] = credit[slot] - earned
  end
  return best
end

return policy
