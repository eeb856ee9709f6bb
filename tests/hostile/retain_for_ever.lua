-- expect: clamped retain
-- retain asks to keep KV without end. Behaves until a request carries the header x-misbehave;
-- then it misbehaves in that call. That request must be answered all the same, with an answer
-- within the bounds, and the clamp counted for the hook.
local policy = { api = 1, name = "retain_for_ever" }
function policy.retain(req)
  if req:header("x-misbehave") then return math.huge end
  return 60
end
return policy
