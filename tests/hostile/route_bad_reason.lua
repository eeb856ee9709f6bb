-- expect: served route
-- route gives a reason that would split the response header. Behaves until a request carries
-- the header x-misbehave; then it misbehaves in that call. That request must be answered by
-- the default all the same, and the error counted for the hook.
local policy = { api = 1, name = "route_bad_reason" }
function policy.route(req, fleet)
  if req:header("x-misbehave") then return 0, "a\r\nset-cookie: b" end
  return fleet[0].index, "fine"
end
return policy
