local gen_meta = require "tools.gen_meta"

describe("lua/perilune/meta.lua", function()
  local header = gen_meta.read "core/policy_abi.h"

  it("is what the generator makes of core/policy_abi.h now", function()
    assert.is_true(gen_meta.generate(header) == gen_meta.read "lua/perilune/meta.lua",
      "stale: luajit lua/tools/gen_meta.lua > lua/perilune/meta.lua")
  end)

  it("takes no word of a comment for a constant", function()
    local constants = gen_meta.constants "enum pl_x { PL_A, /* as PL_B */ PL_C }; enum pl_y { PL_B };"
    assert.same({ { name = "A", value = 0 }, { name = "C", value = 1 }, { name = "B", value = 0 } }, constants)
  end)

  it("is Lua", function()
    assert.is_function(loadstring(gen_meta.generate(header)))
  end)

  it("knows every field of every record that a hook sees", function()
    require "perilune.testing" -- declares the records
    local ffi = require "ffi"
    for _, struct in ipairs { "pl_req", "pl_worker", "pl_fleet", "pl_fault", "pl_outcome", "pl_session" } do
      local fields, bytes = gen_meta.fields(gen_meta.abi(header), struct), 0
      local sizes = { number = 8, integer = 4, boolean = 1 }
      for _, field in ipairs(fields) do
        assert.is_number(ffi.offsetof("struct " .. struct, field.name), struct .. "." .. field.name)
        bytes = bytes + sizes[field.type]
      end
      local size = ffi.sizeof("struct " .. struct)
      assert.is_true(bytes <= size and size - bytes < 8, struct .. " has fields that were not read")
    end
  end)

  it("knows the constants and helpers of the module", function()
    local testing = require "perilune.testing"
    local policy = testing.load [[
      local pl = require "perilune"
      local policy = { api = 1 }
      function policy.save()
        local t = {}
        for name, value in pairs(pl) do t[name] = value end
        return t
      end
      return policy
    ]]
    local meta = gen_meta.generate(header)
    for name, value in pairs(policy:save()) do
      if type(value) == "number" then
        assert.is_truthy(meta:find(("\n  %s = %d,\n"):format(name, value), 1, true), "pl." .. name)
      else
        assert.is_truthy(meta:find("\nfunction pl." .. name .. "(", 1, true), "pl." .. name .. "()")
      end
    end
  end)
end)
