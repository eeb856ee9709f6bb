-- expect: served score
-- score reads a field that no worker has. Behaves until a request carries the header
-- x-misbehave; then it misbehaves in that call. That request must be answered by the default
-- all the same, and the error counted for the hook.
local policy = { api = 1, name = "unknown_field" }
function policy.score(req, w)
  if req:header("x-misbehave") then return w.in_flight end
  return w.inflight
end
return policy
