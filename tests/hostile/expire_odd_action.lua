-- expect: served expire
-- expire answers an event where an action belongs. Behaves until a session named "misbehave"
-- expires; then it misbehaves in that call. That session must be closed and the error counted
-- for the hook.
local pl = require "perilune"
local policy = { api = 1, name = "expire_odd_action" }
function policy.expire(s)
  if s:id() == "misbehave" then return pl.SESSION_CLOSE end
  return pl.CLOSE
end
return policy
