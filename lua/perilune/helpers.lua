-- The module that `require "perilune"` answers: constants of the ABI and helpers. All are leaf calls into C or plain
-- Lua; none blocks.

local _, boot, api, declarations = ...

local error, type, floor, max = error, type, math.floor, math.max
local vm = boot.vm

local pl = {}

-- Constants: PL_QUEUE becomes pl.QUEUE, PL_WHY_DRAINING pl.WHY_DRAINING, and so on.
for body in declarations:gmatch("enum pl_[%w_]+ {(.-)};") do
  local value = 0
  for name in body:gsub("/%*.-%*/", ""):gmatch("PL_([%w_]+)") do
    if not name:find("^HOOK_") then pl[name] = value end
    value = value + 1
  end
end

local now_seconds, random, pick_min, pick_softmax = api.now_seconds, api.random, api.pick_min, api.pick_softmax
local ring, rendezvous, hash = api.ring, api.rendezvous, api.hash

-- Seconds on the router's clock; virtual in simulations and tests.
function pl.now() return now_seconds(vm) end

-- Uniform in [0, 1) from the request's seed; with n, an integer 0 .. n-1.
function pl.random(n)
  if n == nil then return random(vm) end
  if type(n) ~= "number" or not (n >= 1) then error("pl.random(n) takes a number from 1", 2) end
  return floor(random(vm) * floor(n))
end

local function chosen(index, what)
  if index >= 0 then return index end
  if index == -2 then error(what .. ": a fleet.cost is NaN", 3) end
  return nil
end

-- The eligible worker with the lowest fleet.cost (its index), ties at random; nil when all are math.huge.
function pl.pick_min() return (chosen(pick_min(vm), "pl.pick_min")) end

-- An eligible worker drawn with probability proportional to exp(-x / temperature), x being its fleet.cost scaled so
-- that the lowest is 0 and the highest finite one 1.
function pl.pick_softmax(temperature)
  if type(temperature) ~= "number" or not (temperature >= 0) then
    error("pl.pick_softmax(temperature) takes a number from 0", 2)
  end
  return (chosen(pick_softmax(vm, temperature), "pl.pick_softmax"))
end

local function key_check(key, what)
  if type(key) ~= "string" then error(what .. " takes a string, not a " .. type(key), 3) end
end

-- Consistent hashing with bounded loads over the eligible workers: the first on the ring from the key whose load
-- would stay within load_factor (default 1.25) times the mean. An index, or nil when none is eligible.
function pl.ring(key, load_factor)
  key_check(key, "pl.ring(key, load_factor)")
  if load_factor == nil then load_factor = 1.25 end
  if type(load_factor) ~= "number" or not (load_factor >= 1) then
    error("pl.ring: load_factor is a number from 1", 2)
  end
  return (chosen(ring(vm, key, #key, load_factor), "pl.ring"))
end

-- Highest random weight: the same key goes to the same worker while that one is eligible.
function pl.rendezvous(key)
  key_check(key, "pl.rendezvous(key)")
  return (chosen(rendezvous(vm, key, #key), "pl.rendezvous"))
end

-- 52 bits of XXH3 as a number.
function pl.hash(s)
  key_check(s, "pl.hash(s)")
  return hash(vm, s, #s)
end

-- Seconds that the worker needs to prefill so many tokens, at the rate that the router measured.
function pl.prefill_seconds(w, tokens) return tokens / w.prefill_tokens_per_second end

-- Prompt tokens of the request that the worker would have to prefill. Of those in its host memory and on its disk the
-- given shares (0 by default) count as cached, for fetching them takes time, too.
function pl.uncached_tokens(req, w, host_share, disk_share)
  local cached = w.cached_tokens + (host_share or 0) * w.cached_host_tokens + (disk_share or 0) * w.cached_disk_tokens
  return max(req.prompt_tokens - cached, 0)
end

-- A line in the router's log, rate-limited. print is the same.
function pl.log(...)
  local parts = {}
  for i = 1, select("#", ...) do parts[i] = tostring((select(i, ...))) end
  local line = table.concat(parts, "\t")
  api.log(vm, line, #line)
end

local BAD_NAME = " takes a name of letters, digits and _, at most 63 bytes"

local function opened(answer, what, name)
  if answer == -1 then error(("%s%s, not %q"):format(what, BAD_NAME, name:sub(1, 80)), 3) end
  if answer == -2 then error(("%s: too many different names in this router for %q"):format(what, name), 3) end
  return answer
end

-- A gauge on /metrics. False when there are too many.
function pl.metric(name, value)
  if type(name) ~= "string" or type(value) ~= "number" then
    error("pl.metric(name, value)" .. BAD_NAME .. ", and a number", 2)
  end
  local answer = api.metric(vm, name, #name, value)
  if answer == -1 then error(("pl.metric(name, value)%s, not %q"):format(BAD_NAME, name:sub(1, 80)), 2) end
  return answer >= 0
end

local counter_add = api.counter_add
local Counter = {}
Counter.__index = Counter
Counter.__metatable = false

-- Adds (1 by default); answers the new sum over all loops.
function Counter:add(by)
  if by == nil then by = 1 end
  if type(by) ~= "number" then error("counter:add(by) takes a number", 2) end
  return counter_add(vm, self.handle, by)
end

function Counter:get() return counter_add(vm, self.handle, 0) end

-- A sum that all loops share, and that outlives a reload.
function pl.counter(name)
  key_check(name, "pl.counter(name)")
  local handle = opened(api.counter_open(vm, name, #name), "pl.counter(name)", name)
  return setmetatable({ handle = handle }, Counter)
end

local ewma_update, ewma_get = api.ewma_update, api.ewma_get
local Ewma = {}
Ewma.__index = Ewma
Ewma.__metatable = false

local function holder_check(w, what)
  if type(w) ~= "cdata" then error(what .. ": w is a worker or the outcome, not a " .. type(w), 3) end
end

-- w is a worker or an outcome: whatever has slot and generation. Answers the new average.
function Ewma:update(w, value)
  holder_check(w, "ewma:update(w, value)")
  if type(value) ~= "number" then error("ewma:update(w, value) takes a number", 2) end
  return ewma_update(vm, self.handle, w.slot, w.generation, value)
end

-- The average, or `default` (0) until there was an update for this worker.
function Ewma:get(w, default)
  holder_check(w, "ewma:get(w, default)")
  local v = ewma_get(vm, self.handle, w.slot, w.generation)
  if v ~= v then return default or 0 end
  return v
end

-- A moving average per worker that all loops share: an observation weighs half after half_life_seconds.
function pl.worker_ewma(name, half_life_seconds)
  key_check(name, "pl.worker_ewma(name, half_life_seconds)")
  if type(half_life_seconds) ~= "number" or not (half_life_seconds > 0) then
    error("pl.worker_ewma: half_life_seconds is a number above 0", 2)
  end
  local handle = opened(api.ewma_open(vm, name, #name, half_life_seconds), "pl.worker_ewma(name, half_life_seconds)",
    name)
  return setmetatable({ handle = handle }, Ewma)
end

return pl
