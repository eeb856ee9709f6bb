-- Generates, for one policy, the functions that C calls. They are made from text so that each policy has bytecode of
-- its own and the compiler specialises it to that policy's hooks. What they read and write lies in C; they allocate
-- nothing.

local ffi, boot, api, records = ...

local format = string.format
local C = ffi.C

local HOOK = { admit = C.PL_HOOK_ADMIT, route = C.PL_HOOK_ROUTE, score = C.PL_HOOK_SCORE,
  degrade = C.PL_HOOK_DEGRADE, done = C.PL_HOOK_DONE, tick = C.PL_HOOK_TICK, session = C.PL_HOOK_SESSION,
  retain = C.PL_HOOK_RETAIN, expire = C.PL_HOOK_EXPIRE }

-- A hook answered something that it may not answer: an error at the hook's first line.
local function bad(hook, fn, value, expected)
  local info = debug.getinfo(fn, "S")
  local shown = type(value) == "number" and tostring(value) or value == nil and "nothing"
    or type(value) == "cdata" and "a record" or "a " .. type(value)
  error(format("%s:%d: %s answered %s; it must answer %s", info.short_src, info.linedefined, hook, shown, expected), 0)
end

local HEAD = [[
local P, st, verdict, req, fleet, workers, cost, fault, outcome, s, bad, copy, band, now_ns, vm = ...
local type = type
local admit, route, score, degrade, done, tick = P.admit, P.route, P.score, P.degrade, P.done, P.tick
local session, retain, expire = P.session, P.retain, P.expire
]]

local DECIDE = [[
return function()
  local skip = verdict.skip
  verdict.action, verdict.routed, verdict.scored, verdict.reason_len = 0, 0, 0, 0
]]

local ADMIT = [[
  if band(skip, $ADMIT_BIT) == 0 then
    verdict.hook = $ADMIT
    local action, arg = admit(req, fleet, st)
    if action ~= nil and action ~= $PL_ADMIT then
      if action ~= $PL_QUEUE and action ~= $PL_SHED and action ~= $PL_SHRINK then
        bad("admit", admit, action,
          "pl.ADMIT, pl.QUEUE with seconds, pl.SHED with seconds or pl.SHRINK with max_tokens")
      end
      if arg == nil and action ~= $PL_SHRINK then arg = -1 end
      if type(arg) ~= "number" or arg ~= arg then
        bad("admit", admit, arg, "a number beside its action")
      end
      verdict.action, verdict.arg = action, arg
      if action ~= $PL_SHRINK then
        verdict.admit_ns = now_ns(vm)
        return
      end
    end
    verdict.admit_ns = now_ns(vm)
  end
]]

local ELIGIBLE = [[
  if fleet.eligible == 0 then return end
]]

local ROUTE = [[
  if band(skip, $ROUTE_BIT) == 0 then
    verdict.hook = $ROUTE
    local index, reason = route(req, fleet, st)
    if index ~= nil then
      if type(index) ~= "number" then
        bad("route", route, index, "w.index [, reason], or nil")
      end
      verdict.index, verdict.routed = index, 1
      if reason ~= nil then
        if type(reason) == "string" then
          local n = #reason
          verdict.reason_len = n
          if n <= 64 then copy(verdict.reason, reason, n) end
        else
          verdict.reason_len = -1
        end
      end
      return
    end
  end
]]

local SCORE = [[
  if band(skip, $SCORE_BIT) == 0 then
    verdict.hook = $SCORE
    for i = 0, fleet.n - 1 do
      local w = workers[i]
      local c = 1 / 0
      if w.eligible then
        c = score(req, w, st)
        if type(c) ~= "number" then
          bad("score", score, c, "a number: the cost, lower wins, or math.huge")
        end
      end
      cost[i] = c
    end
    verdict.scored = 1
  end
]]

local DEGRADE = [[
return function()
  verdict.hook = $DEGRADE
  local action, arg = degrade(req, fault, st)
  if action == nil then action = 0 end
  if arg == nil then arg = -1 end
  if type(action) ~= "number" then bad("degrade", degrade, action, "nil or an action [, a number]") end
  if type(arg) ~= "number" or arg ~= arg then bad("degrade", degrade, arg, "a number beside its action") end
  verdict.action, verdict.arg = action, arg
end
]]

local DONE = [[
return function()
  verdict.hook = $DONE
  done(req, outcome, st)
end
]]

local SESSION = [[
return function()
  verdict.hook = $SESSION
  local ttl, kind = session(req, s, st)
  local given = 0
  if ttl ~= nil then
    if type(ttl) ~= "number" or ttl ~= ttl then
      bad("session", session, ttl, "ttl_seconds or nil [, pl.ROUTER_ONLY or pl.ENGINE_BACKED]")
    end
    verdict.arg, given = ttl, 1
  end
  if kind ~= nil then
    if kind ~= $PL_ROUTER_ONLY and kind ~= $PL_ENGINE_BACKED then
      bad("session", session, kind, "pl.ROUTER_ONLY, pl.ENGINE_BACKED or nil beside ttl_seconds")
    end
    verdict.action, given = kind, given + 2
  end
  verdict.given = given
end
]]

local RETAIN = [[
local w = workers[0]
return function()
  verdict.hook = $RETAIN
  local seconds, priority = retain(req, w, st)
  local given = 0
  if seconds ~= nil then
    if type(seconds) ~= "number" or seconds ~= seconds then
      bad("retain", retain, seconds, "retention_seconds or nil [, priority]")
    end
    verdict.arg, given = seconds, 1
  end
  if priority ~= nil then
    if type(priority) ~= "number" or priority ~= priority then
      bad("retain", retain, priority, "a number or nil as priority, beside retention_seconds")
    end
    verdict.action, given = priority, given + 2
  end
  verdict.given = given
end
]]

local EXPIRE = [[
return function()
  verdict.hook = $EXPIRE
  local action, seconds = expire(s, st)
  if action == nil then action = $PL_CLOSE end
  if action ~= $PL_CLOSE and action ~= $PL_EXTEND and action ~= $PL_DROP then
    bad("expire", expire, action, "pl.CLOSE, pl.EXTEND with seconds, pl.DROP or nil")
  end
  if action == $PL_EXTEND then
    if type(seconds) ~= "number" or seconds ~= seconds then
      bad("expire", expire, seconds, "a number of seconds beside pl.EXTEND")
    end
    verdict.arg = seconds
  end
  verdict.action = action
end
]]

local TICK = [[
return function()
  verdict.hook = $TICK
  tick(verdict.arg, st)
end
]]

local substitutes = {}
for name, value in pairs(HOOK) do
  substitutes[name:upper()] = value
  substitutes[name:upper() .. "_BIT"] = 2 ^ value
end
for _, name in ipairs { "PL_ADMIT", "PL_QUEUE", "PL_SHED", "PL_SHRINK", "PL_CLOSE", "PL_EXTEND", "PL_DROP",
  "PL_ROUTER_ONLY", "PL_ENGINE_BACKED" } do substitutes[name] = C[name] end

return function(policy, st)
  local function make(...)
    local text = (HEAD .. table.concat({ ... })):gsub("%$([A-Z_]+)", substitutes)
    return assert(loadstring(text, "=perilune.harness"))(policy, st, boot.verdict[0], records.req, records.fleet,
      records.workers, records.cost, records.fault, records.outcome, records.session, bad, ffi.copy, bit.band,
      api.now_ns, boot.vm)
  end
  local harness = {}
  if policy.admit or policy.route or policy.score then
    harness.decide = make(DECIDE, policy.admit and ADMIT or "", ELIGIBLE, policy.route and ROUTE or "",
      policy.score and SCORE or "", "end\n")
  end
  if policy.degrade then harness.degrade = make(DEGRADE) end
  if policy.done then harness.done = make(DONE) end
  if policy.tick then harness.tick = make(TICK) end
  if policy.session then harness.session = make(SESSION) end
  if policy.retain then harness.retain = make(RETAIN) end
  if policy.expire then harness.expire = make(EXPIRE) end
  if policy.save then
    local save = policy.save
    function harness.save() return (save(st)) end
  end
  return harness
end
