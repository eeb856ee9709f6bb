-- expect: served retain
-- retain raises an error. Behaves until a request carries the header x-misbehave; then it
-- misbehaves in that call. That request must be answered all the same, with its body left
-- alone, and the error counted for the hook.
local policy = { api = 1, name = "throws_in_retain" }
function policy.retain(req, w)
  if req:header("x-misbehave") then error("thrown in retain") end
  return w.inflight + 1
end
return policy
