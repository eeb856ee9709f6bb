-- expect: clamped route
-- route gives a reason that would split the response header. Behaves until a request carries the
-- header x-misbehave. The choice counts, the reason becomes the hook's name, and the clamp is
-- counted for the hook.
local policy = { api = 1, name = "route_bad_reason" }
function policy.route(req, fleet)
  if req:header("x-misbehave") then return 0, "a\r\nset-cookie: b" end
  return fleet[0].index, "fine"
end
return policy
