-- expect: served admit
-- admit asks for a wait of NaN seconds. Behaves until a request carries the header
-- x-misbehave; then it misbehaves in that call. That request must be answered by the default
-- all the same, and the error counted for the hook.
local pl = require "perilune"
local policy = { api = 1, name = "admit_queues_for_ever" }
function policy.admit(req)
  if req:header("x-misbehave") then return pl.QUEUE, 0 / 0 end
  return pl.ADMIT
end
return policy
