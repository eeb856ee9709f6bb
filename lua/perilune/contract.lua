-- Checks what a policy file returned and merges the overrides of its parameters.

local declarations, sandbox = ...

local API = 1

local hooks, hook_names, by_number = {}, {}, {}
do
  local value = 0
  for name in declarations:match("enum pl_hook {(.-)};"):gmatch("PL_HOOK_([%w_]+)") do
    if name ~= "COUNT" then
      hooks[name:lower()] = value
      hook_names[#hook_names + 1] = name:lower()
      by_number[value] = name:lower()
    end
    value = value + 1
  end
end
local members = { api = true, name = true, temperature = true, affinity = true, assume_kv_reuse = true, params = true }
local KNOWN = "api, name, temperature, affinity, assume_kv_reuse, params, " .. table.concat(hook_names, ", ")

local function place_of(value)
  if type(value) ~= "function" then return "" end
  local info = debug.getinfo(value, "S")
  return info.source:sub(1, 1) == "@" and ("%s:%d: "):format(info.short_src, info.linedefined) or ""
end

local function refuse(...) error(string.format(...), 0) end

local PARAM = { number = true, string = true, boolean = true }

local function sorted(t)
  local keys = {}
  for key in pairs(t) do keys[#keys + 1] = tostring(key) end
  table.sort(keys)
  return keys[1] and table.concat(keys, ", ") or "none"
end

local function merge(given, overrides)
  if given == nil then given = {} end
  if type(given) ~= "table" then refuse("params must be a table of defaults, not a %s", type(given)) end
  local params = {}
  for key, value in pairs(given) do
    if type(key) ~= "string" then refuse("params: keys are names, not %s", tostring(key)) end
    if not PARAM[type(value)] then
      refuse("params.%s: a parameter is a number, a string or a boolean, not a %s", key, type(value))
    end
    params[key] = value
  end
  for key, value in pairs(overrides) do
    local default = given[key]
    if default == nil then refuse("unknown parameter '%s'; this policy has %s", tostring(key), sorted(given)) end
    if type(value) ~= type(default) then
      refuse("parameter '%s' must be a %s, like its default %s, not a %s", key, type(default), tostring(default),
        type(value))
    end
    params[key] = value
  end
  return sandbox.frozen(params, "params", function(key)
    error(string.format("params has no '%s'; this policy has %s", tostring(key), sorted(given)), 3)
  end)
end

return function(policy, overrides, file_label)
  if type(policy) ~= "table" then
    refuse("the file must return a table such as { api = 1, score = function(req, w, st) ... end }, not %s",
      policy == nil and "nothing" or "a " .. type(policy))
  end
  if policy.api == nil then refuse("api is missing: write api = %d, the contract this router speaks", API) end
  if policy.api ~= API then
    if type(policy.api) ~= "number" then refuse("api must be the number %d, not a %s", API, type(policy.api)) end
    refuse("api = %s, but this router speaks api = %d: adapt the policy or use a router that speaks it",
      tostring(policy.api), API)
  end
  local bits, lines = 0, {}
  for key, value in pairs(policy) do
    local hook = hooks[key]
    if hook then
      if type(value) ~= "function" then refuse("%s must be a function, not a %s", key, type(value)) end
      if debug.getlocal(value, 1) == "self" then
        refuse("%shooks are called without self: write policy.%s = function(...), not policy:%s", place_of(value), key,
          key)
      end
      bits = bits + 2 ^ hook
      lines[hook] = debug.getinfo(value, "S").linedefined
    elseif not members[key] then
      refuse("%sunknown member '%s'; known are %s", place_of(value), tostring(key), KNOWN)
    end
  end
  local name = policy.name
  if name == nil then name = file_label end
  if type(name) ~= "string" or not name:match("^[%w_.-]+$") or #name > 64 then
    refuse("name must be 1 to 64 of A-Z a-z 0-9 _ . -")
  end
  local temperature = policy.temperature
  if temperature == nil then temperature = 0 end
  if type(temperature) ~= "number" or not (temperature >= 0 and temperature < math.huge) then
    refuse("temperature must be a number from 0, not %s", tostring(temperature))
  end
  local affinity = policy.affinity
  if affinity == nil then affinity = "hard" end
  if affinity ~= "hard" and affinity ~= "soft" then
    refuse('affinity must be "hard" (a bound session stays where it is) or "soft" (route and score choose), not %s',
      type(affinity) == "string" and ("%q"):format(affinity) or "a " .. type(affinity))
  end
  -- init may set it, by its params
  local function reuse()
    local value = policy.assume_kv_reuse
    if value ~= nil and type(value) ~= "boolean" then
      refuse("assume_kv_reuse must be true or false, not a %s", type(value))
    end
    return value == true
  end
  reuse()
  local own = {} -- what runs from now on, whatever the file still does to its table
  for _, hook in ipairs(hook_names) do own[hook] = rawget(policy, hook) end
  return {
    policy = own,
    names = by_number, -- hook by its number
    name = name,
    hooks = bits,
    lines = lines,
    temperature = temperature,
    soft = affinity == "soft",
    reuse = reuse,
    params = merge(policy.params, overrides or {}),
  }
end
