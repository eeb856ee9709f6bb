-- expect: served score
-- Keeps a kilobyte of every request for ever, and swallows the error when there is no more
-- memory. Behaves until a request carries the header x-misbehave; then it misbehaves in that
-- call. That request must be answered by the default all the same, and the error counted for
-- the hook.
local policy = { api = 1, name = "hoards" }
function policy.init() return { kept = {}, n = 0 } end
local function keep(st)
  for i = 1, 1e9 do
    st.n = st.n + 1
    st.kept[st.n] = ("x"):rep(1024) .. i
  end
end
function policy.score(req, w, st)
  if req:header("x-misbehave") then
    pcall(keep, st)
    local t = {}
    for i = 1, 1e9 do t[i] = { i } end
  end
  return w.inflight
end
return policy
