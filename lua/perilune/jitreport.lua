-- For `perilune check`: runs a hook in a loop and listens to the compiler. Answers { begin, run, finish }; C fills the
-- records between the runs.

local policy, st, records, vmdef = ...

local jit, util = require "jit", require "jit.util"
local format, getinfo = string.format, debug.getinfo

local M = {}

-- Loops of their own, made anew for each hook, so that each is compiled (or not) by itself.
local HEAD = "local hook, st, req, fleet, outcome, session, worker = ...\nlocal sink\n"
local BODY = {
  score = [[
return function(rounds, eligible)
  for _ = 1, rounds do
    for i = 1, #eligible do sink = hook(req, eligible[i], st) end
  end
  return sink
end]],
  route = [[
return function(rounds)
  for _ = 1, rounds do sink = hook(req, fleet, st) end
  return sink
end]],
  done = [[
return function(rounds)
  for _ = 1, rounds do sink = hook(req, outcome, st) end
  return sink
end]],
  session = [[
return function(rounds)
  for _ = 1, rounds do sink = hook(req, session, st) end
  return sink
end]],
  retain = [[
return function(rounds)
  for _ = 1, rounds do sink = hook(req, worker, st) end
  return sink
end]],
}
BODY.admit = BODY.route

-- Part of how the compiler works: it tries again from another place, or has come to the end of the report's own loop
-- (which a hook may be compiled without).
local BENIGN = { "leaving loop", "inner loop", "loop unroll", "retry", "down%-recursion", "persistent type",
  "return to lower frame" }

local HINTS = {
  FNEW = "a closure is made here: make it once, outside the hook",
  UCLO = "a variable captured by a closure goes out of scope here",
  TSETM = "a table is filled from several results here",
  VARG = "varying arguments: name them",
  ITERN = "pairs: use a counted loop",
  ITERC = "a generic for: use a counted loop",
  ISNEXT = "pairs: use a counted loop",
  next = "pairs: use a counted loop",
  ["table.sort"] = "sorting calls back into Lua: keep the best in a loop, or use pl.pick_min",
}

local function hint(text)
  for word, advice in pairs(HINTS) do
    if text:find(word, 1, true) then return format("%s (%s)", text, advice) end
  end
  return text
end

local function function_name(f)
  local info = util.funcinfo(f)
  if info.ffid and vmdef and vmdef.ffnames[info.ffid] then return vmdef.ffnames[info.ffid] end
  if info.loc then return info.loc end
  return "a C function"
end

local function reason_of(code, argument)
  if type(code) ~= "number" then return tostring(code) end
  local text = vmdef and vmdef.traceerr[code]
  if not text then return "reason " .. code end
  if type(argument) == "function" then
    argument = function_name(argument)
  elseif type(argument) == "number" and text:find("bytecode", 1, true) then
    argument = vmdef.bcnames:sub(argument * 6 + 1, argument * 6 + 6):gsub(" ", "")
  end
  local ok, formatted = pcall(format, (text:gsub("%%d", "%%s")), argument)
  return hint(ok and formatted or text)
end

-- Where in the policy the compiler is: the innermost frame of a policy's file.
local function place()
  for level = 3, 60 do
    local info = getinfo(level, "Sl")
    if not info then break end
    if info.source:sub(1, 1) == "@" and info.currentline > 0 then return info.source:sub(2), info.currentline end
  end
  return "", 0
end

local run, starts, problems, solved, traces, looping

local function key_of(func, pc, parent, exit)
  if parent then return format("%s/%s", parent, exit) end
  return format("%p/%d", func, pc)
end

local function note(start, reason)
  local file, line = place()
  if line == 0 then file, line = start.file, start.line end
  problems[start.key] = { file = file, line = line, reason = reason }
end

local function listen(what, tr, func, pc, a, b)
  if what == "start" then
    local info = util.funcinfo(func, pc)
    local ours = info.source and info.source:sub(1, 1) == "@"
    starts[tr] = { key = key_of(func, pc, a, b), file = ours and info.source:sub(2) or "",
      line = ours and info.currentline or 0 }
  elseif what == "stop" then
    local link = util.traceinfo(tr).linktype
    local start = starts[tr]
    if link == "stitch" then
      note(start, hint("leaves compiled code for " .. function_name(func)))
    elseif link ~= "interpreter" then
      traces = traces + 1
      looping = looping or (link ~= "return" and link ~= "none")
      solved[start.key] = true
    end
  elseif what == "abort" then
    local reason = reason_of(a, b)
    for _, pattern in ipairs(BENIGN) do
      if reason:find(pattern) then return end
    end
    if starts[tr] then note(starts[tr], reason) end
  end
end

function M.begin(name)
  starts, problems, solved, traces, looping = {}, {}, {}, 0, false
  jit.flush()
  run = assert(loadstring(HEAD .. BODY[name], "=perilune.check"))(policy[name], st, records.req, records.fleet,
    records.outcome, records.session, records.workers[0])
end

function M.run(rounds)
  -- only workers that score would see: a loop over others would be compiled without the hook
  local eligible = {}
  for i = 0, records.fleet.n - 1 do
    local w = records.workers[i]
    if w.eligible then eligible[#eligible + 1] = w end
  end
  jit.attach(listen, "trace")
  local ok, message = pcall(run, rounds, eligible)
  jit.attach(listen)
  if not ok then error(message, 0) end
end

-- Answers "yes" | "partly" | "no", the number of traces, and a list of file, line, reason triples.
function M.finish()
  local list, seen = {}, {}
  for key, problem in pairs(problems) do
    local id = problem.file .. ":" .. problem.line .. problem.reason
    if not solved[key] and not seen[id] then
      seen[id] = true
      list[#list + 1] = problem
    end
  end
  table.sort(list, function(x, y)
    if x.line ~= y.line then return x.line < y.line end
    return x.reason < y.reason
  end)
  local verdict = not looping and "no" or list[1] and "partly" or "yes"
  return verdict, traces, list
end

-- The listener itself must not be compiled, nor seen.
jit.off(true, true)

return M
