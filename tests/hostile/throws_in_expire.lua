-- expect: served expire
-- expire raises an error. Behaves until a session named "misbehave" expires; then it
-- misbehaves in that call. That session must be closed and the error counted for the hook.
local pl = require "perilune"
local policy = { api = 1, name = "throws_in_expire" }
function policy.expire(s)
  if s:id() == "misbehave" then error("thrown in expire") end
  return pl.CLOSE
end
return policy
