-- A first policy: where is the least prompt work waiting, and does a long request go to a quiet worker?
--
-- score is asked once for each worker; the lowest cost wins, ties are broken by the request's own random number.
-- Try it:  perilune check examples/first_policy.lua
--          perilune serve --policy examples/first_policy.lua --engine http://127.0.0.1:30000 --engine ...
-- Change it while the router runs, then:  perilune reload

local policy = { api = 1, name = "first_policy" }

-- Typed by example; `--set inflight_tokens=500` or the configuration overrides them.
policy.params = {
    inflight_tokens = 200, -- what a request in flight weighs, in tokens of prompt work
}

function policy.score(req, w, st)
    return w.queued_prefill_tokens + req.prompt_tokens + st.inflight_tokens * w.inflight
end

return policy
