-- expect: served score
-- score answers a string, which Lua would convert where it adds. Behaves until a request
-- carries the header x-misbehave; then it misbehaves in that call. That request must be
-- answered by the default all the same, and the error counted for the hook.
local policy = { api = 1, name = "score_string" }
function policy.score(req, w)
  if req:header("x-misbehave") then return "7" end
  return w.inflight
end
return policy
