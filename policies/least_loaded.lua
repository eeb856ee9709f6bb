-- least_loaded: the worker with the fewest requests in flight for its weight. The default.
--
-- Intent     Join the shortest queue, counted by the router itself over all of its loops, so that
--            the count is never stale. A good choice whenever caches do not matter.
-- Source     Join-shortest-queue, also known as least connections.
-- Signals    w.inflight, w.weight, w.queued_prefill_tokens when its weight is not 0.
-- Parameters prefill_weight (0): requests in flight that one queued prompt token counts as. With
--            0.001 a prompt of 8,000 tokens that waits for its prefill counts as 8 requests more,
--            until its first token.
-- Failure    No eligible worker: nothing is scored, and the router's own rule applies (queue when
--            all are busy, else 503). Ties are broken at random. Weight 0: never picked.

local policy = { api = 1, name = "least_loaded", params = { prefill_weight = 0 } }

function policy.score(_, w, st)
  return (w.inflight + 1 + st.prefill_weight * w.queued_prefill_tokens) / w.weight
end

return policy
