-- expect: served tick
-- tick raises an error, each time. Behaves until a request carries the header x-misbehave;
-- then it misbehaves in that call. That request must be answered by the default all the same,
-- and the error counted for the hook.
local policy = { api = 1, name = "throws_in_tick" }
function policy.init() return { bad = false } end
function policy.score(req, w, st)
  if req:header("x-misbehave") then st.bad = true end
  return w.inflight
end
function policy.tick(_, st)
  if st.bad then error("thrown in tick") end
end
return policy
