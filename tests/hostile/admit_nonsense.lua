-- expect: served admit
-- admit answers an action that admit does not know. Behaves until a request carries the header
-- x-misbehave; then it misbehaves in that call. That request must be answered by the default
-- all the same, and the error counted for the hook.
local pl = require "perilune"
local policy = { api = 1, name = "admit_nonsense" }
function policy.admit(req)
  if req:header("x-misbehave") then return 12345 end
  return pl.ADMIT
end
return policy
