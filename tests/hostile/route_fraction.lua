-- expect: served route
-- route answers half a worker. Behaves until a request carries the header x-misbehave; then it
-- misbehaves in that call. That request must be answered by the default all the same, and the
-- error counted for the hook.
local policy = { api = 1, name = "route_fraction" }
function policy.route(req, fleet)
  if req:header("x-misbehave") then return 0.5 end
  return fleet[0].index
end
return policy
