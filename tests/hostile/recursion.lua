-- expect: served score
-- score calls itself without end. Behaves until a request carries the header x-misbehave; then
-- it misbehaves in that call. That request must be answered by the default all the same, and
-- the error counted for the hook.
local policy = { api = 1, name = "recursion" }
function policy.score(req, w, st)
  if req:header("x-misbehave") then return 1 + policy.score(req, w, st) end
  return w.inflight
end
return policy
