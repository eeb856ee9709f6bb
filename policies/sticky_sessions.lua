-- sticky_sessions: a session stays on its worker; a new one goes to the least loaded.
--
-- Intent     The turns of a conversation find their KV cache where the last turn left it, without
--            looking at prompts. Sessions are told apart by the names that clients give: headers
--            of the known agents, nvext.session_control, SGLang's session_params.
-- Source     Sticky sessions as web balancers have them; sliding lifetime and hard affinity as in
--            NVIDIA Dynamo's session affinity (PR 7665).
-- Signals    s.event, s.bound_slot; w.inflight, w.weight for those that are not bound.
-- Parameters ttl_seconds (300): how long a session that was named by a header alone lives after its
--            last turn. One that asked for a time of its own (open, bind) gets what it asked for.
-- Failure    Its worker at the cap: another one serves this turn (reason `session_spill`) and the
--            binding stays, unless an engine holds the session, whose turn waits. Its worker gone:
--            bound anew to the least loaded. No eligible worker: the router's own rule applies.
--            Weight 0: never picked.

local pl = require "perilune"

local policy = {
  api = 1,
  name = "sticky_sessions",
  affinity = "hard",
  params = { ttl_seconds = 300 },
}

function policy.session(_, s, st)
  if s.event == pl.SESSION_TURN and s.bound_slot < 0 then return st.ttl_seconds end
end

function policy.score(_, w)
  return (w.inflight + 1) / w.weight
end

return policy
