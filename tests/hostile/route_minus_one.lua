-- expect: served route
-- route answers -1, as if it meant "none". Behaves until a request carries the header x-misbehave; then it misbehaves
-- in that call. That request must be answered by the default all the same, and the error
-- counted for the hook.
local policy = { api = 1, name = "route_minus_one" }
function policy.route(req, fleet)
  if req:header("x-misbehave") then return -1 end
  return fleet[0].index
end
return policy
