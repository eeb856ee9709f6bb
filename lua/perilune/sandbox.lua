-- The environment of policies: an allow-list, frozen from the start. Not a security boundary: it catches the mistakes
-- of trusted authors.

local pl, load_beside = ...

local error, type, format, tonumber, tostring = error, type, string.format, tonumber, tostring
local setfenv, pairs, setmetatable, getmetatable = setfenv, pairs, setmetatable, getmetatable

local MAX_REP_BYTES = 1048576

local M = {}

local originals = setmetatable({}, { __mode = "k" }) -- frozen view -> the table behind it

-- A view of t that cannot be written. unknown(key), when given, raises for keys that t has not.
local function frozen(t, label, unknown)
  if unknown then setmetatable(t, { __index = function(_, key) return unknown(key) end }) end
  local view = setmetatable({}, {
    __index = t,
    __newindex = function(_, key)
      error(format("cannot write '%s': %s is frozen", tostring(key), label), 2)
    end,
    __metatable = false,
  })
  originals[view] = t
  return view
end
M.frozen = frozen

local function copy(from, names)
  local to = {}
  for name in names:gmatch("%S+") do to[name] = from[name] end
  return to
end

local str = copy(string, "byte char find format gmatch gsub len lower match reverse sub upper")
local rep = string.rep
-- What is no number or text is left to Lua's own messages; a header's "1e9" counts as the number it is taken for.
local function length(s) return (type(s) == "string" or type(s) == "number") and #tostring(s) or 0 end
function str.rep(s, n, sep)
  local times = (type(n) == "number" or type(n) == "string") and tonumber(n) or 0
  local bytes = times > 0 and (length(s) + length(sep)) * times or 0
  if bytes > MAX_REP_BYTES then
    error(format("string.rep: more than %d bytes", MAX_REP_BYTES), 2)
  end
  return rep(s, n, sep)
end

local math_ = copy(math, "abs acos asin atan atan2 ceil cos cosh deg exp floor fmod frexp huge ldexp log log10 max min "
  .. "modf pi pow rad sin sinh sqrt tan tanh")
local random, floor = pl.random, math.floor
-- As Lua's, but drawn from the request's seed: a replay draws the same.
function math_.random(m, n)
  if m == nil then return random() end
  if n == nil then m, n = 1, m end
  if type(m) ~= "number" or type(n) ~= "number" or not (m <= n) then
    error("math.random: interval is empty", 2)
  end
  return floor(random() * (n - m + 1)) + m
end

local globals = copy(_G, "assert error ipairs next pcall rawequal rawget rawset select setmetatable tonumber tostring "
  .. "type unpack")
globals.string = frozen(str, "string")
globals.table = frozen(copy(table, "concat insert maxn move remove sort"), "table")
globals.math = frozen(math_, "math")
globals.bit = frozen(copy(bit, "arshift band bnot bor bswap bxor lshift rol ror rshift tobit tohex"), "bit")
globals.print = pl.log

-- Methods of strings reach the same functions, the capped rep included.
debug.getmetatable("").__index = globals.string

function globals.pairs(t)
  if type(t) ~= "table" then error("pairs takes a table, not a " .. (type(t) == "cdata" and "record" or type(t)), 2) end
  return pairs(originals[t] or t)
end

function globals.getmetatable(t)
  if type(t) ~= "table" then return nil end
  return getmetatable(t)
end

local view_of_pl = frozen(pl, "perilune", function(key)
  local event = "SESSION_" .. tostring(key) -- pl.OPEN for pl.SESSION_OPEN
  error(format("perilune has no '%s'%s", tostring(key),
    rawget(pl, event) and format(" (an event of a session is pl.%s)", event) or ""), 3)
end)

-- require: "perilune", "perilune.NAME" and files beside the policy, only while the policy loads.
local loaded = { perilune = view_of_pl }
local loading = {}
local sealed = false
local environment

function globals.require(name)
  if type(name) ~= "string" then error("require takes a name", 2) end
  local module = loaded[name]
  if module ~= nil then return module end
  if sealed then error(format("require '%s' must run while the policy loads, not in a hook", name), 2) end
  if loading[name] then error(format("require '%s': the files require each other", name), 2) end
  local chunk, message = load_beside(name)
  if not chunk then error(message, 2) end
  loading[name] = true
  module = setfenv(chunk, environment)(name)
  loading[name] = nil
  if module == nil then module = true end
  loaded[name] = module
  return module
end

local INSTEAD = {
  pl = [[write local pl = require "perilune" at the top]],
  os = "policies do no I/O; pl.now() is the time",
  io = "policies do no I/O; pl.log(text) writes a line",
}
local function no_global(name)
  local instead = INSTEAD[name]
  return format("unknown global '%s'%s", tostring(name), instead and " (" .. instead .. ")" or "")
end
local function no_write(name)
  return format("write to global '%s': declare it with local; a hook is a member of the table that the file returns",
    tostring(name))
end
setmetatable(globals, { __index = function(_, name) error(no_global(name), 2) end })
environment = setmetatable({}, {
  __index = globals,
  __newindex = function(_, name) error(no_write(name), 2) end,
  __metatable = false,
})

-- What is wrong with a line that reads the global, or writes it; nil: nothing.
function M.global_slip(name, written)
  if written then return no_write(name) end
  if rawget(globals, name) == nil then return no_global(name) end
end

function M.run(chunk) return (setfenv(chunk, environment)()) end

function M.seal() sealed = true end

return M
