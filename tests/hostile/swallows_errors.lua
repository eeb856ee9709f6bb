-- expect: served score
-- Wraps everything in pcall and answers whatever comes, an error object included. With the
-- header x-misbehave score answers a string: counted as an error of score, answered by the
-- default.
local policy = { api = 1, name = "swallows_errors" }
local function cost(req, w)
  if req:header("x-misbehave") then return w.no_such_field end
  return w.inflight
end
function policy.score(req, w)
  local _, answer = pcall(cost, req, w)
  return answer
end
return policy
