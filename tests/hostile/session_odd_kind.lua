-- expect: served session
-- session answers an event where a kind belongs. Behaves until a request carries the header
-- x-misbehave; then it misbehaves in that call. That request must be answered all the same,
-- with what the session was given, and the error counted for the hook.
local pl = require "perilune"
local policy = { api = 1, name = "session_odd_kind" }
function policy.session(req, s)
  if req:header("x-misbehave") then return 60, pl.SESSION_CLOSE end
  return s.ttl_seconds, s.kind
end
return policy
