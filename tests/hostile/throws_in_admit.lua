-- expect: served admit
-- admit raises an error. Behaves until a request carries the header x-misbehave; then it
-- misbehaves in that call. That request must be answered by the default all the same, and the
-- error counted for the hook.
local pl = require "perilune"
local policy = { api = 1, name = "throws_in_admit" }
function policy.admit(req, fleet)
  if req:header("x-misbehave") then error("thrown in admit") end
  return pl.ADMIT
end
return policy
