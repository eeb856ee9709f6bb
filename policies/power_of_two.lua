-- power_of_two: draw two different eligible workers at random, take the less loaded of them.
--
-- Intent     Nearly the balance of least_loaded, while several routers in front of the same engines
--            do not all run to the same worker at once.
-- Source     Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001).
-- Signals    w.eligible, w.inflight, w.weight; fleet.eligible.
-- Parameters None.
-- Failure    One eligible worker: that one. None: answers nil, and the router's own rule applies.
--            Equal loads: the one drawn first, so the choice stays random. Weights count in the
--            comparison, not in the draw.

local pl = require "perilune"

local policy = { api = 1, name = "power_of_two" }

-- The k-th eligible worker, from 0.
local function eligible(fleet, k)
  if fleet.eligible == fleet.n then return fleet[k] end
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    if w.eligible then
      if k == 0 then return w end
      k = k - 1
    end
  end
end

function policy.route(_, fleet)
  local n = fleet.eligible
  if n == 0 then return nil end
  local first = pl.random(n)
  local a = eligible(fleet, first)
  if n == 1 then return a.index, "only" end
  local second = pl.random(n - 1)
  if second >= first then second = second + 1 end
  local b = eligible(fleet, second)
  if (b.inflight + 1) / b.weight < (a.inflight + 1) / a.weight then a = b end
  return a.index, "of_two"
end

return policy
