-- expect: served done
-- done raises an error. Behaves until a request carries the header x-misbehave; then it
-- misbehaves in that call. That request must be answered by the default all the same, and the
-- error counted for the hook.
local policy = { api = 1, name = "throws_in_done" }
function policy.done(req, outcome)
  if req:header("x-misbehave") then error("thrown in done") end
  return outcome.status
end
return policy
