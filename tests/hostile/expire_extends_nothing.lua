-- expect: served expire
-- expire extends a session and does not say for how long. Behaves until a session named
-- "misbehave" expires; then it misbehaves in that call. That session must be closed and the
-- error counted for the hook.
local pl = require "perilune"
local policy = { api = 1, name = "expire_extends_nothing" }
function policy.expire(s)
  if s:id() == "misbehave" then return pl.EXTEND end
  return pl.DROP
end
return policy
