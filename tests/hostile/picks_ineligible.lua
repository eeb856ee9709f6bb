-- expect: served route
-- route answers an ineligible worker where there is one, else an index beyond the fleet.
-- Behaves until a request carries the header x-misbehave; then it misbehaves in that call.
-- That request must be answered by the default all the same, and the error counted for the
-- hook.
local policy = { api = 1, name = "picks_ineligible" }
function policy.route(req, fleet)
  if req:header("x-misbehave") then
    for i = 0, fleet.n - 1 do
      if not fleet[i].eligible then return i end
    end
    return fleet.n
  end
  return fleet[0].index
end
return policy
