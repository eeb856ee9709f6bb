// admit's SHRINK: the output limit as each API spells it, never raised, and the body stays JSON
// through retries.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { startRouter, scratch, writeFile } from './lib/proc.mjs';
import { fakeEngine } from './lib/fake.mjs';
import { post } from './lib/http.mjs';

async function shrinking(t, failing = false) {
  const a = await fakeEngine(t);
  const b = await fakeEngine(t);
  if (failing) a.handler = (entry, res) => { res.socket.resetAndDestroy(); };
  const policy = writeFile(scratch(t), 'shrink.lua', `
    local pl = require "perilune"
    local policy = { api = 1, name = "shrink" }
    function policy.admit(req) return pl.SHRINK, tonumber(req:header("x-limit")) end
    function policy.score(req, w) return w.slot end
    return policy`);
  const router = await startRouter(t, { engines: { a: a.url, b: b.url }, policy });
  const serving = failing ? b : a;
  serving.handler = (entry, res) => serving.json(res, 200, {});
  const ask = async (path, limit, body) => {
    const n = serving.requests.length;
    const answer = await post(router.url + path, body, { headers: { 'x-limit': String(limit) } });
    assert.equal(answer.status, 200, answer.text);
    assert.ok(serving.requests[n].json, `valid JSON: ${serving.requests[n].body}`);
    return serving.requests[n].json;
  };
  return { a, b, ask };
}

const messages = [{ role: 'user', content: 'hi' }];

test('SHRINK lowers whatever limit the API has', async (t) => {
  const { ask } = await shrinking(t);
  const chat = (extra) => ask('/v1/chat/completions', 5, { model: 'm', messages, ...extra });
  assert.deepEqual(await chat({ max_completion_tokens: 9 }), { model: 'm', messages, max_completion_tokens: 5 });
  // whichever of the two the engine reads
  assert.deepEqual(await chat({ max_tokens: 9, max_completion_tokens: 9 }),
    { model: 'm', messages, max_tokens: 5, max_completion_tokens: 5 });
  assert.deepEqual(await chat({ max_tokens: 3, max_completion_tokens: 9 }),
    { model: 'm', messages, max_tokens: 3, max_completion_tokens: 5 });
  assert.equal((await chat({ max_tokens: null })).max_tokens, 5);
  assert.equal((await ask('/v1/messages', 5, { model: 'm', messages, max_tokens: 9 })).max_tokens, 5);
  assert.equal((await ask('/v1/responses', 5, { model: 'm', input: 'x' })).max_output_tokens, 5);
  assert.equal((await ask('/v1/completions', 5, { model: 'm', prompt: 'x' })).max_tokens, 5);
  const generate = (sampling, limit = 5) => ask('/generate', limit, {
    text: 'x', ...(sampling === undefined ? {} : { sampling_params: sampling }),
  });
  assert.deepEqual((await generate()).sampling_params, { max_new_tokens: 5 });
  assert.deepEqual((await generate({})).sampling_params, { max_new_tokens: 5 });
  assert.deepEqual((await generate({ top_p: 1 })).sampling_params, { max_new_tokens: 5, top_p: 1 });
  assert.deepEqual((await generate({ max_new_tokens: 9, top_p: 1 })).sampling_params,
    { max_new_tokens: 5, top_p: 1 });
});

test('a limit that is given twice is lowered where the engine reads it', async (t) => {
  const { ask } = await shrinking(t);
  const got = await ask('/generate', 5,
    '{"text":"x","sampling_params":{"max_new_tokens":3,"max_new_tokens":9,"max_new\\u005ftokens":800}}');
  assert.equal(got.sampling_params.max_new_tokens, 5);
});

test('SHRINK never raises what an engine would do without a limit', async (t) => {
  const { ask } = await shrinking(t);
  assert.deepEqual(await ask('/v1/completions', 1000, { model: 'm', prompt: 'x' }),
    { model: 'm', prompt: 'x' });
  assert.deepEqual(await ask('/generate', 1000, { text: 'x', sampling_params: {} }),
    { text: 'x', sampling_params: {} });
});

test('SHRINK leaves the parameters of a batch alone', async (t) => {
  const { ask } = await shrinking(t);
  const body = { text: ['x', 'y'], sampling_params: [{ top_p: 1 }, { top_k: 1 }] };
  assert.deepEqual(await ask('/generate', 5, body), body);
});

test('SHRINK happens once for each try', async (t) => {
  const { a, ask } = await shrinking(t, true);
  assert.deepEqual(await ask('/generate', 5, { text: 'x', sampling_params: {} }),
    { text: 'x', sampling_params: { max_new_tokens: 5 } });
  assert.equal(a.requests.length, 1);
  assert.deepEqual((await ask('/generate', 5, { text: 'x', sampling_params: { top_p: 1 } }))
    .sampling_params, { max_new_tokens: 5, top_p: 1 });
});
