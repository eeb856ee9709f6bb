-- lmetric: prefill work that the cache leaves, times the requests that it would join.
--
-- Intent     A balance of cache hits and load without a weight to tune: a product is the same in every
--            unit, so neither factor can outgrow the other.
-- Source     LMetric (OSDI'26, arXiv 2603.15202): cost = (prefill tokens queued + those of this prompt
--            that are not cached) * (batch size + 1). NVIDIA Dynamo's variant (PR 11028) has KV blocks
--            under decode in place of the batch.
-- Signals    w.queued_prefill_tokens, w.cached_tokens, w.inflight or w.decode_blocks, w.eligible, w.weight;
--            req.prompt_tokens.
-- Parameters batch ("requests"): the second factor: requests in flight, or "blocks" under decode.
-- Deferred   The paper's batch is the engine's own running batch; here it is what this router has in
--            flight there, which is never stale but knows of no other router. Cache tiers below the
--            device count as misses.
-- Failure    A prompt that is cached whole still has one token to compute, so load always counts.
--            Nothing known of caches: prefill queues times requests. Divided by the worker's weight;
--            weight 0: never picked. No eligible worker: not asked.

local pl = require "perilune"

local policy = { api = 1, name = "lmetric", params = { batch = "requests" } }

function policy.init(params)
  assert(params.batch == "requests" or params.batch == "blocks", "batch must be requests or blocks")
  return params
end

function policy.score(req, w, st)
  if w.weight <= 0 then return math.huge end
  local batch = st.batch == "requests" and w.inflight or w.decode_blocks
  return (w.queued_prefill_tokens + math.max(pl.uncached_tokens(req, w), 1)) * (batch + 1) / w.weight
end

return policy
