-- expect: served score
-- score makes its favourite look idle by writing its record. Behaves until a request carries
-- the header x-misbehave; then it misbehaves in that call. That request must be answered by
-- the default all the same, and the error counted for the hook.
local policy = { api = 1, name = "writes_record" }
function policy.score(req, w)
  if req:header("x-misbehave") then w.inflight = 0 end
  return w.inflight
end
return policy
