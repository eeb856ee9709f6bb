-- expect: served score
-- score writes a global. Behaves until a request carries the header x-misbehave; then it
-- misbehaves in that call. That request must be answered by the default all the same, and the
-- error counted for the hook.
local policy = { api = 1, name = "writes_global_late" }
function policy.score(req, w)
  if req:header("x-misbehave") then total = (total or 0) + 1 end
  return w.inflight
end
return policy
