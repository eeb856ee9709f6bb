-- expect: served score
-- score answers NaN. Behaves until a request carries the header x-misbehave; then it
-- misbehaves in that call. That request must be answered by the default all the same, and the
-- error counted for the hook.
local policy = { api = 1, name = "score_nan" }
function policy.score(req, w)
  if req:header("x-misbehave") then return 0 / 0 end
  return w.inflight
end
return policy
