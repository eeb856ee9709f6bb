-- expect: clamped score
-- score wants no worker at all. Behaves until a request carries the header x-misbehave. That request
-- must be answered by the default all the same, and the clamp counted for the hook.
local policy = { api = 1, name = "score_refuses_all" }
function policy.score(req, w)
  if req:header("x-misbehave") then return math.huge end
  return w.inflight
end
return policy
