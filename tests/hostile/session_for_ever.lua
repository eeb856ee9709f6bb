-- expect: clamped session
-- session answers a life without end. Behaves until a request carries the header x-misbehave;
-- then it misbehaves in that call. That request must be answered all the same, with an answer
-- within the bounds, and the clamp counted for the hook.
local policy = { api = 1, name = "session_for_ever" }
function policy.session(req, s)
  if req:header("x-misbehave") then return math.huge end
  return s.ttl_seconds
end
return policy
