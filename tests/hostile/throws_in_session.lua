-- expect: served session
-- session raises an error. Behaves until a request carries the header x-misbehave; then it
-- misbehaves in that call. That request must be answered all the same, with what the session
-- was given, and the error counted for the hook.
local policy = { api = 1, name = "throws_in_session" }
function policy.session(req, s)
  if req:header("x-misbehave") then error("thrown in session") end
  return s.ttl_seconds
end
return policy
