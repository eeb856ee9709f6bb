-- expect: served route
-- route counts workers from 1 and meets fleet[n]. Behaves until a request carries the header
-- x-misbehave; then it misbehaves in that call. That request must be answered by the default
-- all the same, and the error counted for the hook.
local policy = { api = 1, name = "index_out_of_range" }
function policy.route(req, fleet)
  if req:header("x-misbehave") then
    local best = fleet[1]
    for i = 1, fleet.n do
      if fleet[i].inflight < best.inflight then best = fleet[i] end
    end
    return best.index
  end
  return fleet[0].index
end
return policy
