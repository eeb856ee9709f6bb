-- For `perilune check`: mistakes in lines that no made-up request comes to, read from the bytecode of the hooks and of
-- the functions that they use. A global that is not there, and a method of a record that is not called:
-- `req.model == "x"` compares a function. Answers "file:line: what" for each, in the order of the lines.

local hooks, unknown_global = ...

local util = require "jit.util"
local band, rshift, format = bit.band, bit.rshift, string.format
local funcbc, funck, funcinfo = util.funcbc, util.funck, util.funcinfo

-- Opcodes, found by looking: their numbers differ between versions of LuaJIT.
local function opcode(f, pc) return band(funcbc(f, pc), 0xff) end
local GET = opcode(loadstring "return x", 1)
local SET = opcode(loadstring "x = ...", 2)
local COPY = opcode(loadstring "local t = ... t:x()", 2) -- of the object, before its method is read
local FIELD = opcode(loadstring "local t = ... t:x()", 3)

local REQ = { model = true, tenant = true, path = true, id = true, session_id = true, header = true, member = true }
local SESSION = { id = true, parent_id = true, is_bound_to = true }
local WORKER = { name = true }
-- The records among a hook's parameters, by their register.
local PARAMETERS = { expire = { [0] = { "s", SESSION } } }
for _, name in ipairs { "admit", "session", "score", "route", "retain", "degrade", "done" } do
  PARAMETERS[name] = { [0] = { "req", REQ } }
end
PARAMETERS.score[1], PARAMETERS.retain[1] = { "w", WORKER }, { "w", WORKER }
PARAMETERS.session[1] = { "s", SESSION }

local found, seen = {}, {}

local function note(f, pc, ...)
  local info = funcinfo(f, pc)
  local text = format("%s:%d: %s", info.source:sub(2), info.currentline, format(...))
  if not found[text] then
    found[text] = info.currentline
    found[#found + 1] = text
  end
end

local function look(f, parameters)
  if seen[f] or (funcinfo(f).source or ""):sub(1, 1) ~= "@" then return end
  seen[f] = true
  local before = 0
  for pc = 1, 1e6 do
    local ins = funcbc(f, pc)
    if not ins then break end
    local op = band(ins, 0xff)
    if op == GET or op == SET then
      local message = unknown_global(funck(f, -rshift(ins, 16) - 1), op == SET)
      if message then note(f, pc, "%s", message) end
    elseif op == FIELD then
      local object, name = rshift(ins, 24), funck(f, -band(rshift(ins, 16), 0xff) - 1)
      local record = parameters and parameters[object]
      if record and record[2][name] and not (band(before, 0xff) == COPY and rshift(before, 16) == object) then
        note(f, pc, "%s.%s is a method, here not called: write %s:%s()", record[1], name, record[1], name)
      end
    end
    before = ins
  end
  for k = -1, -1e6, -1 do -- functions that are made in it
    local constant = funck(f, k)
    if constant == nil then break end
    if type(constant) == "proto" then look(constant) end
  end
  for i = 1, type(f) == "function" and 250 or 0 do -- functions of the file that it names
    local name, value = debug.getupvalue(f, i)
    if not name then break end
    if type(value) == "function" then look(value) end
  end
end

-- The report must not be compiled: what the compiler does is reported, too.
jit.off(true, true)

for name, hook in pairs(hooks) do look(hook, PARAMETERS[name]) end
table.sort(found, function(x, y)
  if found[x] ~= found[y] then return found[x] < found[y] end
  return x < y
end)
return found
