-- tenant_quota: each tenant may use so many tokens a minute; who is over it is asked to come back later.
--
-- A tenant is the name beside a key in `api_keys`. The quota is a bucket that leaks: `done` pours in what a
-- request has cost (prompt and output, as the engine counted), `tick` lets it run out again, and `admit` sheds
-- while more than a minute's worth is in it. Requests that are under way are not in it yet, so a burst may go over.
--
-- Why like this: `admit` may be asked more than once for a request (while it waits, and again for each retry), so
-- it only looks; `done` is told once, for shed requests, too. The counters are shared by all loops and survive a
-- reload. There may be 256 of them, so each tenant of the list has one, and all others share `others`. Their names
-- are letters, digits and _, so other bytes of a tenant's name are spelt out.
--
--   perilune serve config.lua --policy examples/policies/tenant_quota.lua \
--     --set tokens_per_minute="team-a=90000 others=5000"

local pl = require "perilune"

local policy = {
  api = 1,
  name = "tenant_quota",
  params = { tokens_per_minute = "others=20000" }, -- NAME=TOKENS, with blanks between; a parameter is no table
}

local function counter_of(tenant)
  return pl.counter("tenant_quota_" .. tenant:gsub("[^%w]", function(c) return ("_%02x"):format(c:byte()) end))
end

function policy.init(params, _, ctx)
  local st = { quotas = {}, leaks = ctx.loop == 0, last_seconds = pl.now() }
  for name, tokens in params.tokens_per_minute:gmatch("([^%s=]+)=(%d+)") do
    local quota = { tokens = tonumber(tokens), used = counter_of(name) }
    st.quotas[name] = quota
    st.quotas[#st.quotas + 1] = quota
  end
  assert(st.quotas.others, "tokens_per_minute must have others=TOKENS, for tenants that it does not name")
  return st
end

function policy.admit(req, _, st)
  local quota = st.quotas[req:tenant()] or st.quotas.others
  local over = quota.used:get() - quota.tokens
  if over >= 0 then return pl.SHED, 1 + over * 60 / math.max(quota.tokens, 1) end -- when it has run out so far
end

function policy.score(_, w)
  return (w.inflight + 1) / w.weight
end

function policy.done(req, outcome, st)
  if outcome.slot < 0 then return end -- no engine has seen it
  local quota = st.quotas[req:tenant()] or st.quotas.others
  quota.used:add(outcome.prompt_tokens + math.max(outcome.output_tokens, 0))
end

function policy.tick(now_seconds, st)
  local seconds = now_seconds - st.last_seconds
  st.last_seconds = now_seconds
  if not st.leaks then return end -- one loop does it for all
  for i = 1, #st.quotas do
    local quota = st.quotas[i]
    quota.used:add(-math.min(quota.used:get(), quota.tokens / 60 * seconds))
  end
end

return policy
