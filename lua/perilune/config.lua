-- Runs a configuration file: answers the table that it returns. `getenv` comes from C.

local chunk, getenv = ...

local error, type, format = error, type, string.format

local function copy(from, names)
  local to = {}
  for name in names:gmatch("%S+") do to[name] = from[name] end
  return to
end

local globals = copy(_G, "assert error ipairs next pairs select tonumber tostring type unpack")
globals.string = copy(string, "byte char find format gmatch gsub len lower match reverse sub upper rep")
globals.table = copy(table, "concat insert maxn remove sort")
globals.math = copy(math, "abs ceil floor huge max min")
debug.getmetatable("").__index = globals.string

-- A variable of the environment; `default` (which may be nil) when it is not set, without one an error: a token that is
-- missing must not open a door. For secrets, which do not belong into files.
function globals.env(name, ...)
  if type(name) ~= "string" then error("env(name) takes a string", 2) end
  local value = getenv(name)
  if value ~= nil then return value end
  if select("#", ...) == 0 then
    error(format("the environment variable %s is not set; env('%s', default) does without it", name, name), 2)
  end
  return (...)
end

setmetatable(globals, {
  __index = function(_, name)
    error(format("unknown global '%s'%s", tostring(name),
      name == "require" and " (a policy is given by --policy FILE; this is read as a configuration)" or ""), 2)
  end,
})
local environment = setmetatable({}, {
  __index = globals,
  __newindex = function(_, name)
    error(format("write to global '%s': a configuration is one table, return { %s = ... }; other names are local",
      tostring(name), tostring(name)), 2)
  end,
})

return (setfenv(chunk, environment)())
