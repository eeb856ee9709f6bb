-- Runs a policy in plain LuaJIT, without the router: `local testing = require "perilune.testing"`.
--
--   local policy = testing.load("policies/least_loaded.lua", { prefill_weight = 0.1 })
--   local d = policy:decide { workers = { { name = "a", inflight = 2 }, { name = "b" } } }
--   assert(d.worker == "b" and d.reason == "score")
--
-- The repository's specs run by `busted`; one elsewhere by
--   LUA_PATH="$PERILUNE/lua/?.lua;;" busted --lua=luajit mine_spec.lua
-- where $PERILUNE is the repository, in which this file looks for the records' header.
--
-- Everything above C is the real thing: the prelude (boot.lua and what it loads) runs unchanged on
-- the records of core/policy_abi.h, so an unknown field, a write or an index out of range is the
-- error that the router would give. Stood in for is only what C does: `pl_api` (below), and the loop
-- around the hooks with its checks (policy:decide). There is no memory cap and no time limit.
--
-- Hand-computable stand-ins: pl.random draws from the list given as `random`, else from a generator
-- seeded by `seed` (1). pl.ring and pl.rendezvous start at worker (sum of the key's bytes mod n) and
-- walk upwards. pl.hash is that sum. A tie between k workers is broken by one draw r: the
-- floor(r * k)-th of them, from 0.

local ffi = require "ffi"

local M = {}

local here = debug.getinfo(1, "S").source:match("^@(.*)lua/perilune/testing%.lua$")
assert(here, "perilune.testing runs from the repository")

local function read(path)
  local file, message = io.open(path, "rb")
  if not file then error(message, 0) end
  local text = file:read("*a")
  file:close()
  return text
end

local MAX = 4096

-- One LuaJIT process can declare the records once. A test runner may load this module again: what
-- lives as long as the process is kept where only that process can see it.
local shared = debug.getregistry()["perilune.testing"]
if not shared then
  local header = read(here .. "core/policy_abi.h")
  local declarations = header:match("/%* ABI%-BEGIN %*/(.-)/%* ABI%-END %*/")
  ffi.cdef(declarations)
  shared = {
    declarations = declarations,
    declared = { [declarations] = true },
    metatypes = {},
    req = ffi.new("struct pl_req[1]"),
    fleet = ffi.new("struct pl_fleet[1]"),
    workers = ffi.new("struct pl_worker[?]", MAX),
    cost = ffi.new("double[?]", MAX),
    fault = ffi.new("struct pl_fault[1]"),
    outcome = ffi.new("struct pl_outcome[1]"),
    session = ffi.new("struct pl_session[1]"),
    verdict = ffi.new("struct pl_verdict[1]"),
    call = {}, -- what pl_api answers from: the call that is being made
  }
  debug.getregistry()["perilune.testing"] = shared
end

local req, fleet, workers, cost = shared.req[0], shared.fleet[0], shared.workers, shared.cost
local session, verdict, call = shared.session[0], shared.verdict[0], shared.call
local C = ffi.C

-- --- what C does ----------------------------------------------------------------------------------

local function draw()
  if call.random then
    call.drawn = call.drawn + 1
    local r = call.random[call.drawn]
    if not r then error("the policy drew more random numbers than the test gave", 0) end
    return r
  end
  call.seed = call.seed * 16807 % 2147483647 -- Park and Miller's generator
  return call.seed / 2147483647
end

local function tie(list)
  if #list > 1 then return list[math.floor(draw() * #list) + 1] end
  return list[1]
end

-- Answers -1 for none, -2 for NaN, as C does.
local function lowest()
  local best, list = math.huge, {}
  for i = 0, fleet.n - 1 do
    if workers[i].eligible then
      local c = cost[i]
      if c ~= c then return -2 end
      if c < best then
        best, list = c, { i }
      elseif c == best and c < math.huge then
        list[#list + 1] = i
      end
    end
  end
  return tie(list) or -1
end

local function softmax(temperature)
  if temperature == 0 then return lowest() end
  local low, high = math.huge, -math.huge
  for i = 0, fleet.n - 1 do
    local c = cost[i]
    if workers[i].eligible then
      if c ~= c then return -2 end
      if c < math.huge then low, high = math.min(low, c), math.max(high, c) end
    end
  end
  local scale = high > low and high - low or 1
  local share, sum = {}, 0
  for i = 0, fleet.n - 1 do
    local taking_part = workers[i].eligible and cost[i] < math.huge
    share[i] = taking_part and math.exp(-(cost[i] - low) / scale / temperature) or 0
    sum = sum + share[i]
  end
  if sum == 0 then return -1 end
  local left, last = draw() * sum, -1
  for i = 0, fleet.n - 1 do
    if share[i] > 0 then
      last, left = i, left - share[i]
      if left < 0 then break end
    end
  end
  return last
end

local function byte_sum(s)
  local sum = 0
  for i = 1, #s do sum = sum + s:byte(i) end
  return sum
end

local function walk(key, accept)
  for step = 0, fleet.n - 1 do
    local i = (byte_sum(key) + step) % fleet.n
    if workers[i].eligible and accept(workers[i]) then return i end
  end
  return -1
end

-- A string as C answers it. It stays anchored until the next call.
local function answer(s, length)
  if s == nil then return nil end
  call.strings[#call.strings + 1] = s
  length[0] = #s
  return ffi.cast("const char *", s)
end

local function text(p, n) return type(p) == "string" and p or ffi.string(p, n) end

local function lookup(t, name, insensitive)
  if not t then return nil end
  if not insensitive then return t[name] end
  for key, value in pairs(t) do
    if key:lower() == name:lower() then return value end
  end
end

local NAME = "^[%w_]+$"

local function open(kind, name)
  if not name:match(NAME) or #name > 63 then return -1 end
  call.policy.names[kind] = call.policy.names[kind] or {}
  local names = call.policy.names[kind]
  if not names[name] then
    names[#names + 1] = { name = name, sum = 0, slots = {} }
    names[name] = #names
  end
  return names[name]
end

local api = {
  version = C.PL_ABI_VERSION,
  now_seconds = function() return call.now end,
  now_ns = function() return call.now * 1e9 end,
  random = draw,
  req_model = function(_, n) return answer(call.strings.model, n) end,
  req_tenant = function(_, n) return answer(call.strings.tenant, n) end,
  req_path = function(_, n) return answer(call.strings.path, n) end,
  req_id = function(_, n) return answer(call.strings.id, n) end,
  req_session_id = function(_, n) return answer(call.strings.session_id, n) end,
  session_parent_id = function(_, n) return answer(call.strings.parent, n) end,
  req_header = function(_, p, len, n)
    return answer(lookup(call.strings.headers, text(p, len), true), n)
  end,
  req_member = function(_, p, len, n)
    return answer(lookup(call.strings.members, text(p, len)), n)
  end,
  worker_name = function(_, index, n) return answer(call.names[index], n) end,
  hash = function(_, p, n) return byte_sum(text(p, n)) end,
  rendezvous = function(_, p, n)
    return walk(text(p, n), function() return true end)
  end,
  ring = function(_, p, n, load_factor)
    local load, shares = 1, 0 -- with this request
    for i = 0, fleet.n - 1 do
      if workers[i].eligible then
        load, shares = load + workers[i].inflight, shares + workers[i].weight
      end
    end
    local key = text(p, n)
    local i = walk(key, function(w)
      return w.inflight + 1 <= math.ceil(load_factor * load * w.weight / shares)
    end)
    return i >= 0 and i or walk(key, function() return true end)
  end,
  pick_min = lowest,
  pick_softmax = function(_, temperature) return softmax(temperature) end,
  counter_open = function(_, p, n) return open("counter", text(p, n)) end,
  counter_add = function(_, handle, by)
    local counter = call.policy.names.counter[handle]
    counter.sum = counter.sum + by
    return counter.sum
  end,
  ewma_open = function(_, p, n, half_life)
    local handle = open("ewma", text(p, n))
    if handle > 0 then call.policy.names.ewma[handle].half_life = half_life end
    return handle
  end,
  ewma_update = function(_, handle, slot, generation, value)
    local ewma = call.policy.names.ewma[handle]
    local old = ewma.slots[slot]
    if old and old.generation == generation then
      local keep = 2 ^ (-(call.now - old.at) / ewma.half_life)
      value = keep * old.value + (1 - keep) * value
    end
    ewma.slots[slot] = { generation = generation, value = value, at = call.now }
    return value
  end,
  ewma_get = function(_, handle, slot, generation)
    local known = call.policy.names.ewma[handle].slots[slot]
    return known and known.generation == generation and known.value or 0 / 0
  end,
  metric = function(_, p, n, value)
    local name = text(p, n)
    if not name:match(NAME) or #name > 63 then return -1 end
    call.policy.metrics[name] = value
    return 0
  end,
  log = function(_, p, n)
    local log = call.policy.log
    log[#log + 1] = text(p, n)
    return 0
  end,
}
for _, name in ipairs { "req", "worker", "fleet", "fault", "outcome", "session", "verdict" } do
  api["size_" .. name] = ffi.sizeof("struct pl_" .. name)
end

-- --- loading --------------------------------------------------------------------------------------

-- Records are const for policies, here as there.
local function const(name) return ffi.cast("const struct pl_" .. name .. " *", shared[name]) end

local boot = {
  api = { [0] = api }, vm = nil, cost = cost, verdict = shared.verdict,
  req = const "req", fleet = const "fleet", fault = const "fault", outcome = const "outcome",
  session = const "session", workers = ffi.cast("const struct pl_worker *", workers),
}

-- ffi as boot.lua sees it: what may be done once in a process is done once, and the pointer to what
-- C offers is the table above.
local once = setmetatable({
  cdef = function(declarations)
    if not shared.declared[declarations] then ffi.cdef(declarations) end
    shared.declared[declarations] = true
  end,
  metatype = function(name, metatable)
    if not shared.metatypes[name] then ffi.metatype(name, metatable) end
    shared.metatypes[name] = true
  end,
  cast = function(ctype, value)
    if ctype == "struct pl_boot *" then return { [0] = value } end
    return ffi.cast(ctype, value)
  end,
}, { __index = ffi })

local function internal(name)
  local chunk = assert(loadstring(read(here .. "lua/perilune/" .. name .. ".lua"),
    "=perilune." .. name))
  local environment = { require = function(module)
    return module == "ffi" and once or require(module)
  end }
  return setfenv(chunk, setmetatable(environment, { __index = _G }))
end

-- The sandbox gives strings its own methods; they are in force while a policy runs.
local function with_methods(methods, fn, ...)
  local meta = debug.getmetatable("")
  local outer = meta.__index
  meta.__index = methods or outer
  local function back(...)
    meta.__index = outer
    return ...
  end
  return back(fn(...))
end

local function begin(policy, given)
  for key in pairs(call) do call[key] = nil end
  call.policy, call.now = policy, given.now or policy.now
  policy.now = call.now
  call.random, call.drawn = given.random, 0
  call.seed = given.seed or policy.seed
  call.names, call.strings = {}, {}
end

-- Calls into the policy; nil, message when it failed. Draws go on where the last call left off.
local function enter(policy, fn, ...)
  local ok, result = with_methods(policy.methods, xpcall, fn, policy.boot.explain, ...)
  if not call.random then policy.seed = call.seed end
  if ok then return true, result end
  return nil, result
end

local Policy = {}
Policy.__index = Policy

-- Loads a policy as the router would: parse, run, check, init. `file` is a path, or Lua source that
-- has a newline in it. `overrides` are parameters, as from --set. `o` may hold carry, loop, loops,
-- seed, now. On failure: nil, stage, message.
function M.try_load(file, overrides, o)
  o = o or {}
  local policy = setmetatable({ names = {}, metrics = {}, log = {}, now = o.now or 0,
    seed = o.seed or 1 }, Policy)
  local source, name
  if file:find("\n", 1, true) then
    source, name = file, "policy.lua"
  else
    local ok, bytes = pcall(read, file)
    if not ok then return nil, "read", bytes end
    source, name = bytes, file
  end
  local folder, label = name:match("^(.-)([^/]+)%.lua$")

  local function beside(module)
    if not module:match("^[%w_.]+$") then
      return nil, ("require '%s': only perilune and files beside the policy"):format(module)
    end
    local path = folder .. module:gsub("%.", "/") .. ".lua"
    local ok, bytes = pcall(read, path)
    if not ok then return nil, ("require '%s': %s"):format(module, bytes) end
    return loadstring(bytes, "@" .. path)
  end

  if source:byte() == 27 then return nil, "parse", name .. ": bytecode is not loaded" end
  local chunk, message = loadstring(source, "@" .. name)
  if not chunk then return nil, "parse", message end

  begin(policy, {})
  local outer = debug.getmetatable("").__index
  policy.boot = internal("boot")(boot, shared.declarations, internal, beside, label)
  policy.methods = debug.getmetatable("").__index
  debug.getmetatable("").__index = outer

  local ok, returned = enter(policy, policy.boot.run, chunk)
  if not ok then return nil, "run", returned end
  ok, message = enter(policy, function()
    local _
    policy.name, policy.hooks, policy.temperature, _, policy.soft =
      policy.boot.check(returned, overrides)
  end)
  if not ok then return nil, "check", message end
  ok, message = enter(policy, function()
    policy.decide_fn, policy.degrade_fn, policy.done_fn, policy.tick_fn, policy.session_fn,
      policy.retain_fn, policy.expire_fn, policy.save_fn, policy.assume_kv_reuse =
      policy.boot.init(o.carry, o.loop or 0, o.loops or 1, o.seed or 1)
  end)
  if not ok then return nil, "init", message end
  return policy
end

-- The same, raising what went wrong.
function M.load(file, overrides, o)
  local policy, stage, message = M.try_load(file, overrides, o)
  if not policy then error(stage .. ": " .. message, 2) end
  return policy
end

-- --- records --------------------------------------------------------------------------------------

local REQ = { prompt_tokens = 100, max_tokens = -1, body_bytes = 400, api = C.PL_API_CHAT,
  choices = 1, expected_output_tokens = -1 }
local REQ_STRINGS = { model = "m", tenant = "default", path = "/v1/chat/completions", id = "req-1",
  session_id = false, headers = false, members = false }
local SESSION = { event = C.PL_SESSION_TURN, kind = C.PL_ROUTER_ONLY, ttl_seconds = 300,
  held_tokens = -1, bound_slot = -1, bound_index = -1 }
local SESSION_ALSO = { id = "", parent = "", bound = "", must = true }
local WORKER = { max_inflight = math.huge, max_queued_prefill_tokens = math.huge,
  prefill_tokens_per_second = 8000, weight = 1, generation = 1, eligible = true, block_tokens = 16,
  running_requests = -1, waiting_requests = -1, kv_usage = -1, gauges_age_seconds = math.huge }

local known = {}
local function fields_of(struct)
  if not known[struct] then
    known[struct] = {}
    local body = shared.declarations:match("struct " .. struct .. " {(.-)\n};")
    for name in body:gsub("/%*.-%*/", ""):gmatch("([%w_]+);") do known[struct][name] = true end
  end
  return known[struct]
end

local function fill(record, struct, defaults, given, what, also)
  ffi.fill(record, ffi.sizeof("struct " .. struct))
  for name, value in pairs(defaults) do record[name] = value end
  for name, value in pairs(given) do
    if fields_of(struct)[name] then
      record[name] = value
    elseif not (also and also[name] ~= nil) then
      error(("%s has no field '%s'"):format(what, name), 4)
    end
  end
end

local function fill_req(given)
  fill(req, "pl_req", REQ, given, "req", REQ_STRINGS)
  if given.arrival_seconds == nil then req.arrival_seconds = call.now end
  if given.session_id ~= nil then req.has_session = true end
  for name, default in pairs(REQ_STRINGS) do
    local value = given[name]
    if value == nil and default then value = default end
    call.strings[name] = value
  end
end

local function fill_fleet(list)
  assert(#list <= MAX, "too many workers")
  fleet.n, fleet.eligible = #list, 0
  for i, given in ipairs(list) do
    local w = workers[i - 1]
    fill(w, "pl_worker", WORKER, given, "workers[" .. i .. "]", { name = "" })
    w.index = i - 1
    if given.slot == nil then w.slot = i - 1 end
    if given.eligible == nil and given.why then w.eligible = given.why == C.PL_WHY_ELIGIBLE end
    if not w.eligible and given.why == nil then w.why = C.PL_WHY_UNHEALTHY end
    if w.eligible then fleet.eligible = fleet.eligible + 1 end
    call.names[i - 1] = given.name or string.char(96 + (i - 1) % 26 + 1)
  end
end

-- After the fleet, in which a worker named `bound` is looked for.
local function fill_session(given)
  if not given then
    session.event = C.PL_SESSION_NONE -- req.session is nil
    return
  end
  fill(session, "pl_session", SESSION, given, "session", SESSION_ALSO)
  local id, parent = given.id or "session", given.parent
  req.has_session = true
  call.strings.session_id, call.strings.parent = id, parent
  if given.id_hash == nil then session.id_hash = byte_sum(id) end
  if parent then
    session.has_parent = true
    if given.parent_hash == nil then session.parent_hash = byte_sum(parent) end
  end
  for i = 0, fleet.n - 1 do
    if given.bound and call.names[i] == given.bound then
      session.bound_index, session.bound_slot = i, workers[i].slot
      session.bound_generation = workers[i].generation
    end
  end
end

-- n workers named a, b, c ...; each(i) may answer the fields of the i-th, from 0.
function M.fleet(n, each)
  local list = {}
  for i = 1, n do list[i] = each and each(i - 1) or {} end
  return list
end

-- --- the core's loop around the hooks -------------------------------------------------------------

local ACTIONS = { [C.PL_QUEUE] = "QUEUE", [C.PL_SHED] = "SHED", [C.PL_SHRINK] = "SHRINK" }
local HOOKS = {}
for name in shared.declarations:match("enum pl_hook {(.-)};"):gmatch("PL_HOOK_([%w_]+)") do
  if name ~= "COUNT" then
    HOOKS[#HOOKS + 1] = name:lower()
    HOOKS[name:lower()] = #HOOKS - 1
  end
end

local function least_loaded()
  local best, list = nil, {}
  for i = 0, fleet.n - 1 do
    local w = workers[i]
    if w.eligible then
      local load = w.weight > 0 and w.inflight / w.weight or math.huge
      if not best or load < best then
        best, list = load, { i }
      elseif load == best then
        list[#list + 1] = i
      end
    end
  end
  return tie(list)
end

local function clamp(d, hook) d.clamped[hook] = (d.clamped[hook] or 0) + 1 end

-- Reads the verdict into d. Answers the hook to blame and why, when its answer is none.
local function judge(policy, d)
  d.action, d.arg = ACTIONS[verdict.action], verdict.action ~= 0 and verdict.arg or nil
  if d.action == "QUEUE" or d.action == "SHED" then return nil end
  if verdict.routed == 1 then
    local i, n = verdict.index, verdict.reason_len
    if i % 1 ~= 0 or not (i >= 0 and i < fleet.n) then
      return "route", ("route answered %s, but an index is one of 0 .. n-1 (here 0 .. %d): "
        .. "return w.index"):format(i, fleet.n - 1)
    end
    if not workers[i].eligible then
      return "route", ("route answered worker %d, which is not eligible (w.eligible is false, "
        .. "w.why says why)"):format(i)
    end
    d.index, d.by, d.reason = i, "route", "route"
    local reason = n > 0 and n <= 64 and ffi.string(verdict.reason, n)
    if reason and reason:match("^[%w_.-]+$") then
      d.reason, d.own_reason = reason, true
    elseif n ~= 0 then
      clamp(d, "route")
    end
  elseif verdict.scored == 1 then
    local i = softmax(policy.temperature)
    if i == -2 then return "score", "score answered NaN (0/0?) for a worker" end
    if i >= 0 then
      d.index, d.by, d.reason = i, "score", "score"
    else
      clamp(d, "score") -- it refused everyone
    end
  end
end

-- Where the session's binding leaves the decision, as core/policy/decide.h has it: nil: free.
local function pin_of(policy, given)
  local s = given.session
  if not s or not (s.bound or s.must) then return nil end
  local w = session.bound_index >= 0 and workers[session.bound_index]
  if w and w.eligible then return policy.soft and not s.must and "soft" or "held" end
  if w and w.why == C.PL_WHY_AT_CAPACITY then return s.must and "wait" or "full" end
  return s.must and "lost" or nil
end

-- One decision. given: { req = {fields, and model, tenant, path, id, session_id, headers = {},
-- members = {}}, session = {fields, and id, parent, bound = a worker's name, must = true: an engine
-- holds it}, workers = { {fields, and name}, ... }, random = {draws}, seed, now }.
-- Answers { index, worker = its name, slot, reason, by = "route" | "score" | "session" | "default",
-- cost = {} by index (of score, or what route left in fleet.cost), action = "QUEUE" | "SHED" |
-- "SHRINK" | "PIN_LOST" | nil, arg, errors = { {hook, message}, ... }, clamped = { hook = count } }.
-- A hook that fails is left out and the next one decides, as in the
-- router; worker is nil when none is eligible.
function Policy:decide(given)
  begin(self, given)
  fill_req(given.req or {})
  fill_fleet(given.workers or M.fleet(3))
  fill_session(given.session)
  local d = { errors = {}, clamped = {}, cost = {}, by = "default", reason = "least_loaded" }
  local pin = pin_of(self, given)
  if pin == "lost" then return { errors = {}, clamped = {}, cost = {}, action = "PIN_LOST" } end

  local bound = pin == "held" or pin == "wait"
  verdict.skip = bound and 2 ^ HOOKS.route + 2 ^ HOOKS.score or 0
  for k = 0, fleet.n - 1 do cost[k] = 0 / 0 end
  for _ = 1, 4 do -- at most admit, route and score fail
    if not self.decide_fn then break end
    local ok, message = enter(self, self.decide_fn)
    local hook
    if ok then
      hook, message = judge(self, d)
    else
      hook = HOOKS[verdict.hook + 1]
    end
    if not hook then break end
    d.errors[#d.errors + 1] = { hook = hook, message = message }
    verdict.skip = bit.bor(verdict.skip, bit.lshift(1, HOOKS[hook]))
  end

  for k = 0, fleet.n - 1 do
    if cost[k] == cost[k] then d.cost[k] = cost[k] end
  end
  if d.action ~= "QUEUE" and d.action ~= "SHED" then
    if pin == "wait" then
      d.action = "QUEUE"
    elseif not d.index and (pin == "held" or pin == "soft") then
      d.index, d.by, d.reason = session.bound_index, "session", "session"
    elseif not d.index then
      d.index = least_loaded()
    end
    if pin == "full" and not d.own_reason then d.reason = "session_spill" end
    if d.index then d.worker, d.slot = call.names[d.index], workers[d.index].slot end
  end
  if not d.index then d.by, d.reason = nil, nil end
  if not call.random then self.seed = call.seed end
  return d
end

-- The names of the workers of n decisions in a row, joined by blanks: easy to compare by eye.
-- given may be a function of the decision's number, from 1.
function Policy:trace(n, given)
  local names = {}
  for k = 1, n do
    local d = self:decide(type(given) == "function" and given(k) or given)
    if d.errors[1] then error(d.errors[1].message, 2) end
    names[k] = d.worker or "-"
  end
  return table.concat(names, " ")
end

local function plain(self, fn, given, ...)
  if not fn then return nil end
  begin(self, given)
  fill_req(given.req or {})
  fill_fleet(given.worker and { given.worker } or {})
  fill_session(given.session)
  local ok, message = enter(self, fn, ...)
  if not ok then error(message, 3) end
  return true
end

-- What a hook gave beside what it left out.
local function both()
  local given = verdict.given
  return given % 2 == 1 and verdict.arg or nil, given >= 2 and verdict.action or nil
end

-- session: { session = {as for decide}, req = {}, now }; answers ttl_seconds, kind as the hook did.
function Policy:session(given)
  verdict.given = 0
  plain(self, self.session_fn, given)
  return both()
end

-- retain: { worker = {fields, and name}, session, req, now }; answers seconds and priority.
function Policy:retain(given)
  verdict.given = 0
  given.worker = given.worker or {}
  plain(self, self.retain_fn, given)
  return both()
end

-- expire: { session, now }; answers the action's number (pl.CLOSE when there is no hook) and EXTEND's seconds.
function Policy:expire(given)
  verdict.action, verdict.arg = C.PL_CLOSE, -1
  plain(self, self.expire_fn, given)
  return verdict.action, verdict.action == C.PL_EXTEND and verdict.arg or nil
end

-- done: { outcome = {fields}, req = {}, session, now }
function Policy:done(given)
  fill(shared.outcome[0], "pl_outcome", { ttft_seconds = -1, cached_tokens = -1,
    output_tokens = -1, status = 200, slot = -1, attempts = 1 }, given.outcome or {}, "outcome")
  return plain(self, self.done_fn, given)
end

-- degrade: { fault = {fields}, req = {}, session, now }; answers the action's number and its argument.
function Policy:degrade(given)
  fill(shared.fault[0], "pl_fault", { budget_left = true }, given.fault or {}, "fault")
  verdict.action, verdict.arg = 0, -1
  plain(self, self.degrade_fn, given)
  return verdict.action, verdict.arg
end

function Policy:tick(now_seconds)
  verdict.arg = now_seconds
  return plain(self, self.tick_fn, { now = now_seconds })
end

-- What the successor's init would get: load it with { carry = policy:save() }.
function Policy:save()
  if not self.save_fn then return nil end
  begin(self, {})
  local ok, result = enter(self, self.save_fn)
  if not ok then error(result, 2) end
  return result
end

-- --- the compiler ---------------------------------------------------------------------------------

-- Runs fn and answers what kept LuaJIT from compiling lines of `file`: { "file:line: reason", ... }.
function M.not_compiled(file, fn)
  local vmdef = require "jit.vmdef"
  local util = require "jit.util"
  local found = {}
  local function on_trace(what, _, func, pc, code, detail)
    if what ~= "abort" then return end
    local reason = vmdef.traceerr[code]
    if not reason or not (reason:find("^NYI") or reason:find("blacklisted")) then return end
    local info = util.funcinfo(func, pc)
    if info.source and info.source:find(file, 1, true) then
      if type(detail) == "number" and reason:find("bytecode") then
        detail = vmdef.bcnames:sub(detail * 6 + 1, detail * 6 + 6):gsub(" ", "")
      end
      found[#found + 1] = ("%s: %s"):format(info.loc, (reason:gsub("%%[ds]", tostring(detail))))
    end
  end
  jit.flush()
  jit.attach(on_trace, "trace")
  local ok, message = pcall(fn)
  jit.attach(on_trace)
  if not ok then error(message, 0) end
  return found
end

return M
