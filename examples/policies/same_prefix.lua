-- same_prefix: chats that begin alike go to the same worker, because its cache already holds the
-- beginning; a worker that is much busier than the others is passed over.
--
-- This is the policy of examples/quickstart.sh. Change a number, then run
--   build/perilune reload
-- and the next request is routed by the new file; running streams never notice.

local pl = require "perilune"

local policy = {
  api = 1,
  name = "same_prefix",
  params = {
    prefix_bytes = 400, -- how much of the conversation makes two chats alike
    max_lead = 4,       -- requests in flight that the favourite may have above the mean
  },
}

function policy.route(req, fleet, st)
  local messages = req:member("messages") -- the JSON as the client sent it
  if not messages then return nil end     -- not a chat: score decides
  local favourite = pl.rendezvous(messages:sub(1, st.prefix_bytes))
  if not favourite then return nil end    -- nobody is eligible

  local inflight = 0
  for i = 0, fleet.n - 1 do
    inflight = inflight + fleet[i].inflight
  end
  if fleet[favourite].inflight <= inflight / fleet.n + st.max_lead then
    return favourite, "same_prefix"
  end
  return nil
end

-- Lower wins. Asked for every worker when route had no answer; the reason is then `score`.
function policy.score(_, w)
  return w.inflight
end

return policy
