-- kv_aware: NVIDIA Dynamo's KV-aware cost: prefill left to do plus KV blocks to decode over.
--
-- Intent     Route as Dynamo's KV router does, with its parameters and presets, so that a fleet tuned
--            for it behaves the same here.
-- Source     NVIDIA Dynamo, lib/kv-router scheduling/selector/default.rs (up to v1.6.1): in blocks,
--              excess = (active prefill - lowest active prefill of the fleet) / blocks of the prompt
--              decay  = 1 / (1 + credit_decay * excess)
--              credit = overlap_score_credit * decay * device + host_weight * host + disk_weight * disk
--              cost   = prefill_load_scale * max(0, active prefill + prompt - credit)
--                       + decode + active_request_weight * active requests
--            decode: active blocks and those that this prompt adds. Lowest cost, ties uniformly at
--            random; with temperature T drawn by exp(-(c - lowest) / ((highest - lowest) * T)).
-- Signals    w.queued_prefill_tokens, w.cached_tokens, w.cached_host_tokens, w.cached_disk_tokens,
--            w.decode_blocks, w.inflight, w.block_tokens, w.eligible; req.prompt_tokens.
-- Parameters preset: "default"; "load_aware" (caches do not count); "agentic" (credit 2, scale 4, 64
--            blocks per active request, for 16-token blocks); "v0" (the first formula: device credit,
--            prefill and decode only). Every other parameter at -1 is as the preset has it:
--            overlap_score_credit (1), credit_decay (0), host_weight (0.75), disk_weight (0.25),
--            prefill_load_scale (1), active_request_weight (0), temperature (0), assume_kv_reuse (1; 0 in
--            load_aware and v0): 1 has decode_blocks count what running requests share once, in the ledger.
--            A prefill_load_scale of W is the deprecated overlap_score_weight of W.
-- Deferred   Taints (required and preferred); a cache shared by workers; the decode stage of
--            disaggregated serving; per-request overrides. What the prompt adds to decode is counted
--            whole: blocks of it that are active on a worker are not visible here, even when the
--            ledger counts those of running requests once.
-- Failure    Nothing known of caches: credits are 0, and it balances prefill and decode. No eligible
--            worker: not asked. Weight 0: never picked; other weights do not count, as in Dynamo.

local pl = require "perilune"
local ceil, max = math.ceil, math.max

local policy = {
  api = 1,
  name = "kv_aware",
  params = {
    preset = "default",
    overlap_score_credit = -1,
    credit_decay = -1,
    host_weight = -1,
    disk_weight = -1,
    prefill_load_scale = -1,
    active_request_weight = -1,
    temperature = -1,
    assume_kv_reuse = -1,
  },
}

local DEFAULT = {
  overlap_score_credit = 1,
  credit_decay = 0,
  host_weight = 0.75,
  disk_weight = 0.25,
  prefill_load_scale = 1,
  active_request_weight = 0,
  temperature = 0,
  assume_kv_reuse = 1,
}
local PRESETS = {
  default = {},
  load_aware = { overlap_score_credit = 0, host_weight = 0, disk_weight = 0, assume_kv_reuse = 0 },
  agentic = { overlap_score_credit = 2, prefill_load_scale = 4, active_request_weight = 64 },
  v0 = { host_weight = 0, disk_weight = 0, assume_kv_reuse = 0 },
}

function policy.init(params)
  local preset = PRESETS[params.preset]
  assert(preset, "preset must be default, load_aware, agentic or v0")
  local st = {}
  for name, value in pairs(DEFAULT) do
    local given = params[name]
    assert(given == -1 or given >= 0, name .. " must be at least 0, or -1: as the preset has it")
    if given == -1 then given = preset[name] or value end
    st[name] = given
  end
  policy.assume_kv_reuse = st.assume_kv_reuse > 0
  return st
end

local function block_of(w) return max(w.block_tokens, 1) end

local function cost(req, w, st, lowest)
  local block = block_of(w)
  local prompt = max(ceil(req.prompt_tokens / block), 1)
  local excess = (w.queued_prefill_tokens - lowest) / block / prompt
  local credit = st.overlap_score_credit / (1 + st.credit_decay * excess) * w.cached_tokens
    + st.host_weight * w.cached_host_tokens + st.disk_weight * w.cached_disk_tokens
  local prefill = max(w.queued_prefill_tokens + req.prompt_tokens - credit, 0) / block
  return st.prefill_load_scale * prefill + w.decode_blocks + prompt + st.active_request_weight * w.inflight
end

function policy.route(req, fleet, st)
  local lowest = math.huge
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    if w.eligible and w.queued_prefill_tokens < lowest then lowest = w.queued_prefill_tokens end
  end
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    local c = math.huge
    if w.eligible and w.weight > 0 then c = cost(req, w, st, lowest) end
    fleet.cost[i] = c
  end
  return pl.pick_softmax(st.temperature), "kv_aware"
end

return policy
