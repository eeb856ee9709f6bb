// Engines with several data-parallel ranks: what was decided is what the engine is told.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { engineOf, startRouter, until, usable, scratch, writeFile } from './lib/proc.mjs';
import { fakeEngine, gate } from './lib/fake.mjs';
import { post, chat } from './lib/http.mjs';
import { control, say } from './lib/sessions.mjs';
import { sglang } from './lib/sglang.mjs';

const last = 'return { api = 1, name = "last", score = function(req, w) return -w.rank end }';

async function ranked(t, engine, config = {}, text = last) {
  const fake = await fakeEngine(t);
  fake.handler = (entry, res) => fake.json(res, 200, {});
  const policy = writeFile(scratch(t), 'last.lua', text);
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

test('a rank that a trusted client chooses, against its session, has the load that its own cache leaves', async (t) => {
  const { fake, router } = await ranked(t, { dp_size: 3 }, { trusted_clients: ['127.0.0.0/8'] },
    'return { api = 1, name = "last", score = function(req, w) return -w.rank + 0 * w.cached_tokens end }');
  const ask = (content, headers) => post(`${router.url}/v1/chat/completions`, chat('m', { messages: say(content) }), { headers });
  const long = 'all of this is in its cache '.repeat(400);
  assert.equal((await ask(long, { 'x-data-parallel-rank': '1' })).headers['x-perilune-worker'], 'a/1');
  assert.equal((await ask('short', { 'x-session-id': 's' })).headers['x-perilune-worker'], 'a/2');
  const held = gate();
  fake.handler = async (entry, res) => { await held.opened; fake.json(res, 200, {}); };
  const asked = ask(long, { 'x-session-id': 's', 'x-data-parallel-rank': '1' });
  await fake.request(2);
  const { workers } = await engineOf(router, 'a');
  assert.deepEqual(workers.map((w) => w.inflight), [0, 1, 0]);
  assert.ok(workers[1].queued_prefill_tokens < 1000, `${workers[1].queued_prefill_tokens} of some 2800`);
  held.open();
  assert.equal((await asked).headers['x-perilune-worker'], 'a/1');
});

async function holder(t, dp_size) {
  const engine = await sglang(t);
  const router = await startRouter(t, {
    config: { engines: [{ name: 'a', url: engine.url, dp_size }], trusted_clients: ['127.0.0.0/8'] },
  });
  await usable(router, 1);
  await until('it can hold sessions', async () => (await engineOf(router, 'a')).capabilities.includes('streaming_sessions'));
  return { engine, router };
}

test("what goes with an engine's session goes to its rank, also from a trusted client", async (t) => {
  const { engine, router } = await holder(t, 2);
  const opened = await post(`${router.url}/v1/chat/completions`, { model: 'm', messages: say('one'), ...control('s', 'open') });
  assert.equal(opened.headers['x-perilune-session'], 'open');
  const rank = opened.headers['x-perilune-worker'].slice(2);
  const outside = await post(`${router.url}/v1/embeddings`, { model: 'm', input: 'x', ...control('s') }, {
    headers: { 'x-data-parallel-rank': String(1 - rank) }, // to what the session's worker is not
  });
  assert.equal(outside.headers['x-perilune-worker'], `a/${rank}`);
  assert.equal(engine.requests.at(-1).headers['x-data-parallel-rank'], rank, 'as it is accounted for');
});

test('an engine of one worker gets the rank that a trusted client tells it, beside its session too', async (t) => {
  const { engine, router } = await holder(t, 1);
  await post(`${router.url}/v1/chat/completions`, { model: 'm', messages: say('one'), ...control('s', 'open') });
  await post(`${router.url}/v1/embeddings`, { model: 'm', input: 'x', ...control('s') }, { headers: { 'x-data-parallel-rank': '3' } });
  assert.equal(engine.requests.at(-1).headers['x-data-parallel-rank'], '3');
});
