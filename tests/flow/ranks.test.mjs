// Engines with several data-parallel ranks: what was decided is what the engine is told.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { startRouter, usable, scratch, writeFile } from './lib/proc.mjs';
import { fakeEngine } from './lib/fake.mjs';
import { post, chat } from './lib/http.mjs';

async function ranked(t, engine, config = {}) {
  const fake = await fakeEngine(t);
  fake.handler = (entry, res) => fake.json(res, 200, {});
  const policy = writeFile(scratch(t), 'last.lua',
    'return { api = 1, name = "last", score = function(req, w) return -w.rank end }');
  const router = await startRouter(t, {
    policy, config: { engines: [{ name: 'a', url: fake.url, ...engine }], ...config },
  });
  await usable(router, 1);
  return { fake, router };
}

test('the engine is told the rank that was chosen', async (t) => {
  const { fake, router } = await ranked(t, { dp_size: 3 });
  const answer = await post(`${router.url}/v1/chat/completions`, chat('m'), {
    headers: { 'x-data-parallel-rank': '0' }, // from one who may not
  });
  assert.equal(answer.headers['x-perilune-worker'], 'a/2');
  assert.equal(fake.requests[0].headers['x-data-parallel-rank'], '2');
});

test('an engine with one rank is told none', async (t) => {
  const { fake, router } = await ranked(t, {});
  await post(`${router.url}/v1/chat/completions`, chat('m'));
  assert.equal(fake.requests[0].headers['x-data-parallel-rank'], undefined);
});

test("SGLang's native API is told in the body", async (t) => {
  const { fake, router } = await ranked(t, { dp_size: 3, kind: 'sglang' });
  for (const body of [{ text: 'x' }, { routed_dp_rank: 0, text: 'x' }, { text: 'x', routed_dp_rank: 0 }]) {
    assert.equal((await post(`${router.url}/generate`, body)).status, 200);
    assert.equal(fake.requests.at(-1).json.routed_dp_rank, 2, fake.requests.at(-1).body);
  }
});

test('a trusted client may choose the rank itself', async (t) => {
  const { fake, router } = await ranked(t, { dp_size: 3, kind: 'sglang' }, { trusted_clients: ['127.0.0.0/8'] });
  const worker = async (path, body, headers) => (
    await post(router.url + path, body, { headers })).headers['x-perilune-worker'];
  const chats = '/v1/chat/completions';
  assert.equal(await worker(chats, chat('m'), { 'x-data-parallel-rank': '1' }), 'a/1');
  assert.equal(fake.requests[0].headers['x-data-parallel-rank'], '1');
  assert.equal(await worker('/generate', { text: 'x', routed_dp_rank: 1 }), 'a/1');
  assert.equal(fake.requests[1].json.routed_dp_rank, 1);
  assert.equal(await worker(chats, chat('m', { data_parallel_rank: 0 })), 'a/0');
  assert.equal(fake.requests[2].headers['x-data-parallel-rank'], '0', 'a header is stronger than the body');
  assert.equal(await worker(chats, chat('m'), { 'x-data-parallel-rank': '7' }), 'a/2', "the engine's to refuse");
  assert.equal(fake.requests[3].headers['x-data-parallel-rank'], '7');
});
