-- expect: served retain
-- retain answers a table as priority. Behaves until a request carries the header x-misbehave;
-- then it misbehaves in that call. That request must be answered all the same, with its body
-- left alone, and the error counted for the hook.
local policy = { api = 1, name = "retain_odd_priority" }
function policy.retain(req)
  if req:header("x-misbehave") then return 5, {} end
  return 5, 1
end
return policy
