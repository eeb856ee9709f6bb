-- expect: served score
-- score raises an error that is no string. Behaves until a request carries the header
-- x-misbehave; then it misbehaves in that call. That request must be answered by the default
-- all the same, and the error counted for the hook.
local policy = { api = 1, name = "throws_a_table" }
function policy.score(req, w)
  if req:header("x-misbehave") then error({ code = 1 }) end
  return w.inflight
end
return policy
