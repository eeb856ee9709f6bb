local testing = require "perilune.testing"

describe("examples/policies/tenant_quota", function()
  local file = "examples/policies/tenant_quota.lua"
  local policy
  before_each(function() policy = testing.load(file, { tokens_per_minute = "team-a=600 others=60" }) end)

  local function ask(tenant)
    local d = policy:decide { req = { tenant = tenant }, workers = testing.fleet(2) }
    assert.same({}, d.errors)
    return d.action, d.arg
  end
  local function costs(tenant, prompt, output, slot)
    policy:done { req = { tenant = tenant },
      outcome = { prompt_tokens = prompt, output_tokens = output, slot = slot or 0 } }
  end

  it("sheds a tenant that is over its quota, until enough has run out", function()
    assert.is_nil((ask("team-a")))
    costs("team-a", 500, 99)
    assert.is_nil((ask("team-a")))
    costs("team-a", 30, -1) -- 629 of 600: 29 too many at 10 a second
    local action, seconds = ask("team-a")
    assert.equal("SHED", action)
    assert.near(1 + 2.9, seconds, 1e-9)
    policy:tick(2)
    assert.equal("SHED", (ask("team-a")))
    policy:tick(3)
    assert.is_nil((ask("team-a")))
  end)

  it("lets those that it does not name share one quota, and leaves the others alone", function()
    costs("x", 60, 0)
    assert.equal("SHED", (ask("x")))
    assert.equal("SHED", (ask("y")))
    assert.is_nil((ask("team-a")))
  end)

  it("counts what engines have served, and no less than nothing", function()
    for _ = 1, 9 do costs("team-a", 1000, -1, -1) end -- shed: not served
    assert.is_nil((ask("team-a")))
    policy:tick(1000)
    costs("team-a", 599, 0)
    assert.is_nil((ask("team-a")))
  end)

  it("wants a quota for the tenants that it does not name", function()
    local loaded, stage, message = testing.try_load(file, { tokens_per_minute = "a=1" })
    assert.is_nil(loaded)
    assert.equal("init", stage)
    assert.matches("others=TOKENS", message)
  end)
end)
