-- What policies may do with records: read fields, call the string methods, index the fleet. Everything else is an
-- error that says what was wrong. All of it compiles to plain loads.

local ffi, boot, api, declarations = ...

local error, type, format, concat = error, type, string.format, table.concat
local ffi_string = ffi.string
local vm = boot.vm

local M = { is_field = { cost = true } }

local function fields_of(struct)
  local body = declarations:match("struct " .. struct .. " {(.-)\n};"):gsub("/%*.-%*/", "")
  local list = {}
  for name in body:gmatch("([%w_]+);") do
    list[#list + 1] = name
    M.is_field[name] = true
  end
  return concat(list, ", ")
end

local OPERATORS = { "__add", "__sub", "__mul", "__div", "__mod", "__pow", "__unm", "__lt", "__le", "__concat",
  "__len", "__call" }

-- Metamethods that answer misuse of a record; `what` reads like "a worker"; `also` names a field beyond the struct's.
local function strict(struct, what, methods, also)
  local fields = fields_of(struct)
  local names = {}
  for name in pairs(methods) do names[#names + 1] = name .. "()" end
  table.sort(names)
  local known = fields .. (also and ", " .. also or "") .. (names[1] and "; methods " .. concat(names, ", ") or "")
  local mt = {}
  function mt.__index(_, key)
    local method = methods[key]
    if method then return method end
    if type(key) == "string" then
      error(format("%s has no field '%s'; it has %s", what, key, known), 2)
    end
    error(format("%s cannot be indexed by %s", what, tostring(key)), 2)
  end
  function mt.__newindex(_, key)
    error(format("cannot write field '%s' of %s: records are read-only", tostring(key), what), 2)
  end
  function mt.__tostring() return what end
  for _, operator in ipairs(OPERATORS) do
    mt[operator] = function()
      error(format("%s is a record, not a value to use with %s: take one of its fields: %s", what,
        operator:sub(3), fields), 2)
    end
  end
  return mt
end

-- Strings come from C as pointer and length, for the length of the call only: copied into Lua when asked for.
local length = ffi.new("int32_t[1]")

local function reader(read)
  return function()
    local p = read(vm, length)
    if p ~= nil then return ffi_string(p, length[0]) end
  end
end

local function lookup(read, method)
  return function(_, name)
    if type(name) ~= "string" then
      error(format("req:%s(name) takes a string, with a colon before %s", method, method), 2)
    end
    local p = read(vm, name, #name, length)
    if p ~= nil then return ffi_string(p, length[0]) end
  end
end

local req_methods = {
  model = reader(api.req_model),
  tenant = reader(api.req_tenant),
  path = reader(api.req_path),
  id = reader(api.req_id),
  session_id = reader(api.req_session_id),
  header = lookup(api.req_header, "header"),
  member = lookup(api.req_member, "member"),
}
local req_mt = strict("pl_req", "the request (req)", req_methods, "session")
local req_field = req_mt.__index
local session = boot.session[0]
function req_mt.__index(self, key)
  if key == "session" then
    if session.event ~= 0 then return session end -- 0: PL_SESSION_NONE
    return nil
  end
  return (req_field(self, key))
end
ffi.metatype("struct pl_req", req_mt)

local worker_name = api.worker_name
ffi.metatype("struct pl_worker", strict("pl_worker", "a worker", {
  name = function(self)
    local p = worker_name(vm, self.index, length)
    if p ~= nil then return ffi_string(p, length[0]) end
  end,
}))
ffi.metatype("struct pl_fault", strict("pl_fault", "the fault", {}))
ffi.metatype("struct pl_outcome", strict("pl_outcome", "the outcome", {}))
ffi.metatype("struct pl_session", strict("pl_session", "the session (s)", {
  id = reader(api.req_session_id),
  parent_id = reader(api.session_parent_id),
  is_bound_to = function(self, w)
    if type(w) ~= "cdata" then
      error("s:is_bound_to(w): w is a worker, not a " .. type(w), 2)
    end
    return self.bound_slot == w.slot and self.bound_generation == w.generation
  end,
}))

-- fleet[i] and fleet.cost[i]: 0 .. n-1, checked.
local fleet, workers, cost = boot.fleet[0], boot.workers, boot.cost
local refs = {} -- one object per worker, made when first asked for: indexing does not allocate

local function outside(what, key)
  if type(key) ~= "number" then
    error(format("%s is indexed by a number, not by %s", what,
      type(key) == "string" and "'" .. key .. "'" or "a " .. type(key)), 3)
  end
  if fleet.n == 0 then error(format("%s: index %s, but the fleet is empty", what, tostring(key)), 3) end
  error(format("%s: index %s is not in 0 .. n-1 (here 0 .. %d)", what, tostring(key), fleet.n - 1), 3)
end

ffi.cdef "struct pl_cost { };"
local cost_object = ffi.new("struct pl_cost")

local fleet_mt = strict("pl_fleet", "the fleet", {})
local fleet_field = fleet_mt.__index
function fleet_mt.__index(self, key)
  if type(key) == "number" then
    if key >= 0 and key < self.n then
      local w = refs[key]
      if w then return w end
      if key % 1 == 0 then
        w = workers[key]
        refs[key] = w
        return w
      end
    end
    outside("fleet[i]", key)
  end
  if key == "cost" then return cost_object end
  return (fleet_field(self, key))
end
function fleet_mt.__newindex(_, key)
  error(format("cannot write fleet%s: the fleet is read-only; fleet.cost[i] is yours to write",
    type(key) == "number" and "[" .. key .. "]" or "." .. tostring(key)), 2)
end
for _, iterator in ipairs { "__pairs", "__ipairs" } do
  fleet_mt[iterator] = function()
    error("the fleet is walked by a counted loop: for i = 0, fleet.n - 1 do local w = fleet[i] ... end", 2)
  end
end
ffi.metatype("struct pl_fleet", fleet_mt)

local cost_mt = strict("pl_fleet", "fleet.cost", {})
function cost_mt.__index(_, key)
  if type(key) == "number" and key >= 0 and key < fleet.n and key % 1 == 0 then return cost[key] end
  outside("fleet.cost[i]", key)
end
function cost_mt.__newindex(_, key, value)
  if type(value) ~= "number" then
    error(format("fleet.cost[i] takes a number, not a %s", type(value)), 2)
  end
  if type(key) == "number" and key >= 0 and key < fleet.n and key % 1 == 0 then
    cost[key] = value
    return
  end
  outside("fleet.cost[i]", key)
end
ffi.metatype("struct pl_cost", cost_mt)

M.req = boot.req[0]
M.fleet = fleet
M.workers = workers
M.cost = cost
M.fault = boot.fault[0]
M.outcome = boot.outcome[0]
M.session = session

return M
