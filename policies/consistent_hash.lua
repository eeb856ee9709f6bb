-- consistent_hash: requests with the same key go to the same worker, unless it is overloaded.
--
-- Intent     Cache affinity without looking at prompts: give each conversation (user, document) a
--            key, and its prefix stays warm on one worker. When workers come or go, only the keys
--            of their part of the ring move.
-- Source     Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2018): walk
--            the ring from the key to the first worker with less than c times the mean load.
-- Signals    A header, a body member or the session id as the key; w.eligible, w.inflight, w.weight
--            (in the ring: the share of the ring and of the load).
-- Parameters header ("x-perilune-key"): the request header that holds the key; "" for none.
--            member ("prompt_cache_key"): the body member that does; "" for none.
--            load_factor (1.25): c above. Nearer to 1 balances better and keeps caches worse.
-- Failure    No header, then no member, then no session id: such a request goes to the least loaded
--            worker (reason `score`). No eligible worker: answers nil, and the router's own rule
--            applies.

local pl = require "perilune"

local policy = {
  api = 1,
  name = "consistent_hash",
  params = { header = "x-perilune-key", member = "prompt_cache_key", load_factor = 1.25 },
}

function policy.init(params)
  assert(params.load_factor >= 1, "load_factor must be at least 1")
  return params
end

local function key_of(req, st)
  local key = st.header ~= "" and req:header(st.header)
  if not key or key == "" then key = st.member ~= "" and req:member(st.member) end
  if not key or key == "" then key = req:session_id() end
  return key ~= "" and key
end

function policy.route(req, _, st)
  local key = key_of(req, st)
  if key then return pl.ring(key, st.load_factor), "ring" end
end

function policy.score(_, w)
  return (w.inflight + 1) / w.weight
end

return policy
