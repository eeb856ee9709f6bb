-- random: any eligible worker, with a chance in proportion to its weight.
--
-- Intent     The baseline that every other policy must beat. It needs no state and no load signals,
--            so nothing can make it stale; with many workers its load is uneven.
-- Source     Folklore; weighted sampling by one draw over the running sum of weights.
-- Signals    w.eligible, w.weight.
-- Parameters None.
-- Failure    No eligible worker, or all weights 0: answers nil, and the router's own rule applies
--            (queue when all are busy, else 503). Ineligible workers never get a share.

local pl = require "perilune"

local policy = { api = 1, name = "random" }

function policy.route(_, fleet)
  local total = 0
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    if w.eligible then total = total + w.weight end
  end

  local left = pl.random() * total
  local last
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    if w.eligible and w.weight > 0 then
      last = i
      left = left - w.weight
      if left < 0 then break end
    end
  end
  return last -- also when rounding left a crumb of the sum: then the last one
end

return policy
