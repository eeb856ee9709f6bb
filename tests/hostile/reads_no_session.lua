-- expect: served route
-- route reads the session of a request that names none. Behaves until a request carries the header
-- x-misbehave; then it misbehaves in that call. That request must be answered by the default all the
-- same, and the error counted for the hook.
local policy = { api = 1, name = "reads_no_session" }
function policy.route(req)
  if req:header("x-misbehave") then return req.session.bound_index end
  local s = req.session
  if s and s.bound_index >= 0 then return nil end
end
return policy
