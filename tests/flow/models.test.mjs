// Models: which engine serves what, and what a client is told about it.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { startRouter, until } from './lib/proc.mjs';
import { fakeEngine } from './lib/fake.mjs';
import { get, post, chat } from './lib/http.mjs';

const path = '/v1/chat/completions';

test('GET /v1/models merges what the engines serve', async (t) => {
  const a = await fakeEngine(t, { models: ['big', 'small'] });
  const b = await fakeEngine(t, { models: ['small', 'lora-1'] });
  const router = await startRouter(t, { engines: { a: a.url, b: b.url } });
  const { json } = await get(`${router.url}/v1/models`);
  assert.equal(json.object, 'list');
  assert.deepEqual(json.data.map((model) => model.id).sort(), ['big', 'lora-1', 'small']);
  assert.ok(json.data.every((model) => model.object === 'model'));
  assert.equal((await get(`${router.url}/v1/models/big`)).json.id, 'big');
  assert.equal((await get(`${router.url}/v1/models/none`)).status, 404);
});

test('a request goes only to engines that serve its model', async (t) => {
  const a = await fakeEngine(t, { models: ['one', 'both'] });
  const b = await fakeEngine(t, { models: ['two', 'both'] });
  const router = await startRouter(t, { engines: { a: a.url, b: b.url }, policy: 'round_robin', threads: 1 });
  for (let i = 0; i < 4; i++) {
    assert.equal((await post(router.url + path, chat('one'))).headers['x-perilune-worker'], 'a');
    assert.equal((await post(router.url + path, chat('two'))).headers['x-perilune-worker'], 'b');
  }
  const both = new Set();
  for (let i = 0; i < 4; i++) {
    both.add((await post(router.url + path, chat('both'))).headers['x-perilune-worker']);
  }
  assert.deepEqual([...both].sort(), ['a', 'b']);
});

test('an unknown model is a 404 that names the known ones', async (t) => {
  const a = await fakeEngine(t, { models: ['big', 'small'] });
  const router = await startRouter(t, { engines: { a: a.url } });
  const answer = await post(router.url + path, chat('huge'));
  assert.equal(answer.status, 404);
  assert.match(answer.json.error.message, /huge/);
  assert.match(answer.json.error.message, /big/);
  assert.match(answer.json.error.message, /small/);
  assert.equal(answer.json.error.code, 'model_not_found');
  const messages = await post(`${router.url}/v1/messages`, { ...chat('huge'), max_tokens: 1 });
  assert.equal(messages.status, 404);
  assert.equal(messages.json.type, 'error');
  assert.equal(messages.json.error.type, 'not_found_error');
  assert.equal(a.requests.length, 0);
});

test('no model: the only one, else the default, else a 400', async (t) => {
  const one = await fakeEngine(t, { models: ['only'] });
  const two = await fakeEngine(t, { models: ['only', 'other'] });
  const without = { messages: [{ role: 'user', content: 'x' }] };

  const single = await startRouter(t, { engines: { a: one.url } });
  assert.equal((await post(single.url + path, without)).status, 200);

  const several = await startRouter(t, { engines: { a: two.url } });
  const refused = await post(several.url + path, without);
  assert.equal(refused.status, 400);
  assert.match(refused.json.error.message, /model/);

  const given = await startRouter(t, { engines: { a: two.url }, config: { default_model: 'other' } });
  assert.equal((await post(given.url + path, without)).status, 200);
  assert.equal(two.requests.at(-1).json.model, 'other', 'the engine is told which one');

  const nobodys = await startRouter(t, { engines: { a: two.url }, config: { default_model: 'gone' } });
  const missed = await post(nobodys.url + path, without);
  assert.equal(missed.status, 404);
  assert.match(missed.json.error.message, /'gone'.*'only', 'other'/);
});

test('a model whose engines are all down is a 503 with Retry-After, not unknown', async (t) => {
  const a = await fakeEngine(t, { models: ['m'] });
  const b = await fakeEngine(t, { models: ['other'] });
  const router = await startRouter(t, { engines: { a: a.url, b: b.url } });
  await a.refuse();
  const answer = await until('503 for m', async () => {
    const got = await post(router.url + path, chat('m'));
    return got.status === 503 && got;
  });
  assert.match(answer.headers['retry-after'], /^\d+$/);
  assert.match(answer.json.error.message, /\bm\b/);
  const ids = (await get(`${router.url}/v1/models`)).json.data.map((model) => model.id).sort();
  assert.deepEqual(ids, ['m', 'other'], 'what is down is still known');
  assert.equal((await post(router.url + path, chat('other'))).status, 200);
});

test('/health is the process, /readyz is at least one usable engine', async (t) => {
  const a = await fakeEngine(t);
  const router = await startRouter(t, { engines: { a: a.url } });
  assert.equal((await get(`${router.url}/readyz`)).status, 200);
  a.healthy = false;
  await until('not ready', async () => (await get(`${router.url}/readyz`)).status === 503);
  assert.equal((await get(`${router.url}/health`)).status, 200);
  a.healthy = true;
  await until('ready again', async () => (await get(`${router.url}/readyz`)).status === 200);
});

test('control paths of engines are not forwarded', async (t) => {
  const a = await fakeEngine(t);
  const router = await startRouter(t, { engines: { a: a.url } });
  for (const control of ['/flush_cache', '/pause_generation', '/v1/load_lora_adapter', '/nothing']) {
    const answer = await post(router.url + control, { model: 'm' });
    assert.equal(answer.status, 404, control);
    assert.ok(answer.json.error.message.length > 10, control);
  }
  assert.equal((await get(router.url + path)).status, 405);
  assert.equal(a.requests.length, 0);
});

test('a path that the config adds is forwarded', async (t) => {
  const a = await fakeEngine(t);
  const router = await startRouter(t, { engines: { a: a.url }, config: { paths: ['/v1/special'] } });
  assert.equal((await post(`${router.url}/v1/special`, { model: 'm' })).status, 200);
  assert.equal(a.requests[0].path, '/v1/special');
});

test('a model is found by its id with slashes, escaped or not', async (t) => {
  const engine = await fakeEngine(t, { models: ['org/model-7b'] });
  const router = await startRouter(t, { engines: { a: engine.url } });
  for (const id of ['org/model-7b', 'org%2Fmodel-7b', 'org%2fmodel%2D7b']) {
    const answer = await get(`${router.url}/v1/models/${id}`);
    assert.equal(answer.status, 200, id);
    assert.equal(answer.json.id, 'org/model-7b');
  }
  for (const id of ['org%2', 'org%zzmodel-7b', '%00']) {
    assert.equal((await get(`${router.url}/v1/models/${id}`)).status, 404, id);
  }
});
