local testing = require "perilune.testing"

-- Worked out by hand. Blocks of 16 tokens; the prompt of 160 tokens is 10 blocks.
--   a  20 blocks of prefill queued, 8 cached, 30 under decode, 3 requests
--   b  nothing queued or cached, 25 under decode, 2 requests
--   c  10 blocks queued, 4 cached and 4 more in host memory, 20 under decode, 1 request
describe("kv_aware", function()
  local req = { prompt_tokens = 160 }
  local function workers()
    return {
      { queued_prefill_tokens = 320, cached_tokens = 128, decode_blocks = 30, inflight = 3 },
      { decode_blocks = 25, inflight = 2 },
      { queued_prefill_tokens = 160, cached_tokens = 64, cached_host_tokens = 64, decode_blocks = 20, inflight = 1 },
    }
  end

  local function decide(params, list, random, request)
    local d = testing.load("policies/kv_aware.lua", params):decide { req = request or req,
      workers = list or workers(), random = random or { 0 } }
    assert.same({}, d.errors)
    return d
  end

  local function costs(d)
    local list = {}
    for i = 0, #d.cost do list[#list + 1] = ("%.5g"):format(d.cost[i]) end
    return d.worker .. " of " .. table.concat(list, " ")
  end

  it("adds the prefill that caches leave and the blocks to decode over", function()
    -- a: 20 + 10 - 8 = 22, and 30 + 10.  b: 10, and 25 + 10.  c: 10 + 10 - 4 - 0.75 * 4 = 13, and 20 + 10
    local d = decide()
    assert.equal("c of 62 45 43", costs(d))
    assert.equal("kv_aware", d.reason)
  end)

  it("has Dynamo's presets", function()
    -- no credits. a: 30 + 40, b: 45, c: 20 + 30
    assert.equal("b of 70 45 50", costs(decide { preset = "load_aware" }))
    -- a: 4 * (30 - 16) + 40 + 192.  b: 4 * 10 + 35 + 128.  c: 4 * (20 - 8 - 3) + 30 + 64
    assert.equal("c of 288 203 130", costs(decide { preset = "agentic" }))
    -- host memory did not count: c: 20 - 4 + 30
    assert.equal("b of 62 45 46", costs(decide { preset = "v0" }))
    -- a parameter of one's own on top. c: 20 - 8 - 0 is 12, and 30
    assert.equal("c of 54 45 42", costs(decide { preset = "v0", overlap_score_credit = 2 }))
  end)

  it("has the ledger count shared blocks once where Dynamo does", function()
    local function reuse(params) return testing.load("policies/kv_aware.lua", params).assume_kv_reuse end
    assert.is_true(reuse {})
    assert.is_true(reuse { preset = "agentic" })
    assert.is_false(reuse { preset = "load_aware" })
    assert.is_false(reuse { preset = "v0" })
    assert.is_false(reuse { assume_kv_reuse = 0 })
    assert.is_true(reuse { preset = "v0", assume_kv_reuse = 1 })
  end)

  it("lets credits decay with the prefill that a worker has beyond the least busy", function()
    -- a has 20 blocks more, 2 prompts: a third of 8 blocks: 30 - 2.667 + 40. c has 1 prompt more: half of 4, and 3 of
    -- host memory: 20 - 5 + 30. b and c tie
    assert.equal("b of 67.333 45 45", costs(decide({ credit_decay = 1 }, nil, { 0.49 })))
    assert.equal("c of 67.333 45 45", costs(decide({ credit_decay = 1 }, nil, { 0.5 })))
  end)

  it("never counts prefill below nothing", function()
    -- 2 * 10 blocks of credit against 10
    assert.equal("a of 10 50", costs(decide({ preset = "agentic" }, { { cached_tokens = 160 }, {} })))
  end)

  it("counts broken blocks: whole for decode, in part for prefill", function()
    -- 100 tokens are 6.25 blocks of prefill, and 7 to hold
    assert.equal("a of 13.25", costs(decide({}, { {} }, nil, { prompt_tokens = 100 })))
    -- blocks of 64: 1.5625 and 2
    assert.equal("a of 3.5625", costs(decide({}, { { block_tokens = 64 } }, nil, { prompt_tokens = 100 })))
  end)

  it("draws by the normalised costs when told a temperature", function()
    -- 62, 45, 43 are 1, 2 / 19 and 0 on the scale: exp(-1) = 0.3679, exp(-0.1053) = 0.9001, 1; of their sum, 2.2680,
    -- a has 0.1622, b 0.3969, c 0.4409
    local hot = { temperature = 1 }
    assert.equal("a", decide(hot, nil, { 0.162 }).worker)
    assert.equal("b", decide(hot, nil, { 0.163 }).worker)
    assert.equal("b", decide(hot, nil, { 0.559 }).worker)
    assert.equal("c", decide(hot, nil, { 0.560 }).worker)
    -- all equal: each alike
    assert.equal("a", decide(hot, testing.fleet(3), { 0.33 }).worker)
    assert.equal("b", decide(hot, testing.fleet(3), { 0.34 }).worker)
    assert.equal("c", decide(hot, testing.fleet(3), { 0.67 }).worker)
  end)

  it("breaks ties uniformly", function()
    assert.equal("a", decide({}, testing.fleet(4), { 0.24 }).worker)
    assert.equal("b", decide({}, testing.fleet(4), { 0.25 }).worker)
    assert.equal("d", decide({}, testing.fleet(4), { 0.99 }).worker)
  end)

  it("takes no worker that is ineligible or of weight 0, nor their load as the least", function()
    assert.equal("a", decide({}, { { inflight = 9, decode_blocks = 99 }, { eligible = false }, { weight = 0 } }).worker)
    assert.is_nil(decide({}, { { eligible = false } }).worker)
    -- b, idle but out, is not what excess is measured against: no decay, 30 - 8 + 40
    local list = { workers()[1], { eligible = false } }
    assert.equal(62, decide({ credit_decay = 1 }, list).cost[0])
  end)

  it("refuses presets and values that are none", function()
    for params, words in pairs {
      [{ preset = "best" }] = "default, load_aware, agentic or v0",
      [{ temperature = -2 }] = "temperature must be at least 0",
    } do
      local loaded, stage, message = testing.try_load("policies/kv_aware.lua", params)
      assert.is_nil(loaded)
      assert.equal("init", stage)
      assert.matches(words, message)
    end
  end)
end)
