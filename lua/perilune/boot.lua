-- The first Lua that runs in a VM. C calls it once with what only C can give; it declares the records, checks that
-- C was compiled with the same ones, builds the sandbox and answers the functions that C keeps.

local boot_pointer, declarations, load_internal, load_beside, file_label = ...

local ffi = require "ffi"
local util = require "jit.util"
local getinfo = debug.getinfo

ffi.cdef(declarations)
local boot = ffi.cast("struct pl_boot *", boot_pointer)[0]
local api = boot.api[0]

assert(api.version == ffi.C.PL_ABI_VERSION, "the prelude was built for another ABI version")
for _, name in ipairs { "req", "worker", "fleet", "fault", "outcome", "session", "verdict" } do
  assert(api["size_" .. name] == ffi.sizeof("struct pl_" .. name),
    "C and Lua disagree about the size of struct pl_" .. name)
end

local records = load_internal("records")(ffi, boot, api, declarations)
local pl = load_internal("helpers")(ffi, boot, api, declarations)
local sandbox = load_internal("sandbox")(pl, load_beside)
local contract = load_internal("contract")(declarations, sandbox)
local generate = load_internal("harness")(ffi, boot, api, records)

-- Opcode of `t.name = v`, found by looking: numbers differ between versions of LuaJIT.
local function sample(t, v) t.x = v end
local STORE = bit.band(util.funcbc(sample, 1), 0xff)

-- Names of the fields that the source line assigns: LuaJIT's own message for a const field names none.
local function assigned_fields(func, line)
  local names, others = {}, {}
  for pc = 1, 1e5 do
    local ins = util.funcbc(func, pc)
    if not ins then break end
    if bit.band(ins, 0xff) == STORE and util.funcinfo(func, pc).currentline == line then
      local name = util.funck(func, -bit.band(bit.rshift(ins, 16), 0xff) - 1)
      local list = records.is_field[name] and names or others
      list[#list + 1] = "'" .. name .. "'"
    end
  end
  return table.concat(names[1] and names or others, " or ")
end

local function policy_frame()
  for level = 3, 200 do
    local info = getinfo(level, "fSl")
    if not info then return nil end
    if info.source:sub(1, 1) == "@" and info.currentline > 0 then return info end
  end
end

local B = {}
local checked -- what contract answered

-- The first line of the hook that is running: the last resort when its own frame is gone (a tail call).
local function hook_place()
  local hook = checked and checked.policy[checked.names[boot.verdict.hook]]
  if not hook then return "" end
  local info = getinfo(hook, "S")
  return ("%s:%d: "):format(info.short_src, info.linedefined)
end

-- Message handler of every entry: whatever was raised becomes one string that starts with the policy's file and
-- line.
function B.explain(message)
  if type(message) == "number" then
    message = tostring(message)
  elseif type(message) ~= "string" then
    message = "an error was raised that is no string, but a " .. type(message)
  end
  local info = policy_frame()
  local place, text = message:match("^([^\n]-:%d+: )(.*)$")
  if place and place:sub(1, 9) ~= "perilune." then
    message = text
  else
    place = info and ("%s:%d: "):format(info.short_src, info.currentline) or hook_place()
    message = text or message
  end
  if info and message == "attempt to write to constant location" then
    local field = assigned_fields(info.func, info.currentline)
    message = ("cannot write %s: records are read-only"):format(
      field ~= "" and "field " .. field or "to a record")
  end
  return place .. message
end

-- Runs the policy's main chunk; answers what it returned.
B.run = sandbox.run

-- Answers name, bits of hooks, temperature, first lines of the hooks by their number, and whether affinity is soft.
function B.check(answer, overrides)
  checked = contract(answer, overrides, file_label)
  sandbox.seal()
  return checked.name, checked.hooks, checked.temperature, checked.lines, checked.soft
end

-- Calls init, generates the harness; answers decide, degrade, done, tick, session, retain, expire and save, each nil
-- without its hook, and whether it assumes KV reuse. C keeps the first ones in this order on its stack.
function B.init(carry, loop, loops, seed)
  local st = checked.params
  if checked.policy.init then
    local made = checked.policy.init(checked.params, carry, { loop = loop, loops = loops, seed = seed })
    if made ~= nil then st = made end
  end
  local harness = generate(checked.policy, st)
  B.st = st
  local h = harness
  return h.decide, h.degrade, h.done, h.tick, h.session, h.retain, h.expire, h.save, checked.reuse()
end

-- For `perilune check`: the compiler's report. vmdef holds LuaJIT's own names of bytecodes and reasons.
function B.jit_report(vmdef)
  return load_internal("jitreport")(checked.policy, B.st, records, vmdef)
end

-- For `perilune check`: mistakes that no request has to meet to be seen.
function B.slips() return load_internal("slips")(checked.policy, sandbox.global_slip) end

return B
