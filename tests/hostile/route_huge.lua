-- expect: served route
-- route answers an index far beyond the fleet. Behaves until a request carries the header
-- x-misbehave; then it misbehaves in that call. That request must be answered by the default
-- all the same, and the error counted for the hook.
local policy = { api = 1, name = "route_huge" }
function policy.route(req, fleet)
  if req:header("x-misbehave") then return 2 ^ 40 end
  return fleet[0].index
end
return policy
