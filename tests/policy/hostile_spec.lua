-- tests/hostile through the same prelude without the binary. What needs the VM's own limits (memory,
-- instructions) is left to the flow test.
local testing = require "perilune.testing"
local C = require("ffi").C

local NEEDS_LIMITS = { loops_at_load = true, loops_in_init = true, swallows_its_budget = true,
  allocates_at_load = true, allocates = true, hoards = true }

local function read(path)
  local file = assert(io.open(path))
  local text = file:read "*a"
  file:close()
  return text
end

local files = {}
for path in io.popen("ls tests/hostile/*.lua"):lines() do files[#files + 1] = path end

describe("tests/hostile", function()
  it("has policies", function() assert.is_true(#files > 40) end)

  for _, path in ipairs(files) do
    local text = read(path)
    local verdict, at = text:match("^%-%- expect: (%l+) (%l+)\n")
    if not NEEDS_LIMITS[path:match("([%w_]+)%.lua$")] then
      it(path, function()
        assert.is_truthy(verdict, "the first line says what must happen")
        local policy, stage, message = testing.try_load(path)
        if verdict == "refused" then
          assert.is_nil(policy)
          assert.equal(at, stage)
          local line = 0
          for each in text:gmatch("([^\n]*)\n") do
            line = line + 1
            if each:find("-- here", 1, true) then
              assert.is_truthy(message:find(path .. ":" .. line .. ":", 1, true), message)
            end
          end
          return
        end
        assert.is_true(verdict == "served" or verdict == "clamped")
        assert(policy, message)

        local workers = { {}, { eligible = false }, {} }
        local good = policy:decide { workers = workers }
        assert.same({}, good.errors)
        local headers = { ["x-misbehave"] = "1" }
        if at == "session" or at == "retain" or at == "expire" then
          local given = { session = { id = "misbehave", kind = C.PL_ROUTER_ONLY }, req = { headers = headers } }
          policy[at](policy, { session = { id = "behave" } })
          local ok, raised = pcall(policy[at], policy, given)
          assert.equal(verdict == "clamped", ok, raised) -- the core clamps
          return
        end
        local bad = policy:decide { workers = workers, req = { headers = headers } }
        assert.is_truthy(bad.worker, "answered all the same")
        if at == "done" then
          assert.has_error(function() policy:done { req = { headers = headers } } end)
        elseif at == "tick" then
          assert.has_error(function() policy:tick(1) end)
        elseif verdict == "clamped" then
          assert.same({ [at] = 1 }, bad.clamped)
          assert.same({}, bad.errors)
        else
          assert.is_truthy(bad.errors[1], "counted")
          assert.equal(at, bad.errors[1].hook)
        end
      end)
    end
  end
end)
