-- bench_score: the cost that bench_score.c has in C, too. Fewest prompt tokens to prefill before the
-- request's first token, with what the worker has cached counted off.

local policy = { api = 1, name = "bench_score", params = { cache_weight = 1.0 } }

function policy.score(req, w, st)
  return w.queued_prefill_tokens + req.prompt_tokens - st.cache_weight * w.cached_tokens
end

return policy
