-- expect: served score
-- score allocates without end. The memory cap must stop it; the VM is rebuilt. Behaves until a
-- request carries the header x-misbehave; then it misbehaves in that call. That request must
-- be answered by the default all the same, and the error counted for the hook.
local policy = { api = 1, name = "allocates" }
function policy.score(req, w)
  if req:header("x-misbehave") then
    local t = {}
    for i = 1, math.huge do t[i] = { i, tostring(i) } end
  end
  return w.inflight
end
return policy
