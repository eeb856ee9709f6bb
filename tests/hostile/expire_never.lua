-- expect: clamped expire
-- expire extends a session without end. Behaves until a session named "misbehave" expires;
-- then it misbehaves in that call. That session must live on within the bounds and the clamp
-- counted for the hook.
local pl = require "perilune"
local policy = { api = 1, name = "expire_never" }
function policy.expire(s)
  if s:id() == "misbehave" then return pl.EXTEND, math.huge end
  return pl.EXTEND, s.ttl_seconds
end
return policy
