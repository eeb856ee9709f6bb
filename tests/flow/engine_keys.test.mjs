// Engines that want a key of their own (SGLang's and vLLM's --api-key): every request to them brings
// it, in place of whatever the client sent, and nobody is shown it.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { writeFileSync } from 'node:fs';
import { startRouter, until, usable, scratch, writeFile } from './lib/proc.mjs';
import { CHAT, control, say } from './lib/sessions.mjs';
import { sglang } from './lib/sglang.mjs';
import { get, post, chat } from './lib/http.mjs';

const KEY = 'engine-secret-7f';

// Like SGLang: without the key everything but /health is 401.
async function locked(t, key) {
  const engine = await sglang(t, {});
  engine.keys = [];   // of each request but health checks: [path, authorization]
  const [serve] = engine.server.listeners('request');
  engine.server.removeAllListeners('request');
  engine.server.on('request', (req, res) => {
    if (req.url !== '/health') engine.keys.push([req.url, req.headers.authorization, req.headers['x-api-key']]);
    if (req.url !== '/health' && req.headers.authorization !== `Bearer ${key}`) {
      req.resume();
      engine.json(res, 401, { error: 'Unauthorized' });
    } else {
      serve(req, res);
    }
  });
  return engine;
}

const client = { headers: { authorization: 'Bearer client-key', 'x-api-key': 'client-key' } };

test('requests, opens, closes, checks and gauges bring the engine its key, not the client\'s', async (t) => {
  const engine = await locked(t, KEY);
  const file = writeFile(scratch(t), 'key', `${KEY}\n`);
  const router = await startRouter(t, {
    config: {
      engines: [{ name: 'a', url: engine.url, api_key_file: file }], gauges: { interval_seconds: 0.05 },
      health: { interval_seconds: 0.1, detect_interval_seconds: 0.1 },
    },
  });
  await usable(router, 1);
  const list = async () => (await get(`${router.admin}/engines`)).json.engines;
  await until('capabilities', async () => (await list())[0].capabilities.includes('streaming_sessions'));
  const opened = await post(router.url + CHAT, { model: 'm', messages: say('one'), ...control('s', 'open') }, client);
  assert.equal(opened.headers['x-perilune-session'], 'open', opened.text);
  const closed = await post(`${router.url}/close_session`, { session_id: 's' }, client);
  assert.equal(closed.status, 200, closed.text);
  await engine.when(() => engine.closes.length === 1, 'the close');
  await engine.when(() => engine.keys.some(([path]) => path === '/v1/loads' || path === '/metrics'), 'a look at the gauges');
  for (const path of ['/open_session', '/close_session', CHAT, '/server_info'])
    assert.ok(engine.keys.some(([p]) => p === path), path);
  for (const [path, authorization, other] of engine.keys) {
    assert.equal(authorization, `Bearer ${KEY}`, path);
    assert.equal(other, undefined, path);
  }
  assert.ok(!JSON.stringify(await list()).includes(KEY));
  assert.ok(!(await get(`${router.admin}/status`)).text.includes(KEY));
  assert.ok(!router.stderr.includes(KEY));
});

test('a key that the file names anew is used; the API takes keys, never files, and shows neither', async (t) => {
  const engine = await locked(t, KEY);
  const config = (key) => ({
    engines: [{ name: 'a', url: engine.url, kind: 'sglang', api_key: key }],
    health: { interval_seconds: 0.1, detect_interval_seconds: 0.1 },
  });
  const router = await startRouter(t, { config: config('wrong-key') });
  await until('a refusal', () => engine.keys.some(([, given]) => given === 'Bearer wrong-key'));
  const { lua } = await import('./lib/proc.mjs');
  writeFileSync(router.config, `return ${lua(config(KEY))}\n`);
  router.kill('SIGHUP');
  await usable(router, 1);
  await until('the model', async () => (await post(router.url + CHAT, chat('m'), client)).status === 200);

  const other = await locked(t, 'other-secret');
  const add = (body) => post(`${router.admin}/engines`, { name: 'b', url: other.url, ...body });
  for (const bad of ['two words', 'line\nbreak', 'x'.repeat(5000), 7, '']) {
    const refused = await add({ api_key: bad });
    assert.equal(refused.status, 400, refused.text);
    assert.ok(!refused.text.includes('two words') && !refused.text.includes('break') && !refused.text.includes('xxx'));
  }
  const file = await add({ api_key_file: '/etc/hostname' });
  assert.equal(file.status, 400);
  assert.match(file.text, /api_key_file is for the configuration file/);
  const added = await add({ api_key: 'other-secret' });
  assert.equal(added.status, 201, added.text);
  assert.ok(!added.text.includes('other-secret'));
  await usable(router, 2);
  assert.ok(!router.stderr.includes(KEY) && !router.stderr.includes('other-secret'));
});

test('without a key of the engine\'s the client\'s passes, unless the router asks for keys itself', async (t) => {
  for (const [api_keys, given] of [[undefined, 'Bearer client-key'], [[{ key: 'client-key', tenant: 'x' }], undefined]]) {
    const engine = await sglang(t, {});
    const router = await startRouter(t, { config: { engines: [{ name: 'a', url: engine.url }], ...(api_keys && { api_keys }) } });
    await usable(router, 1);
    await until('the model', async () => (await post(router.url + CHAT, chat('m'), client)).status === 200);
    assert.equal(engine.requests.filter((r) => r.path === CHAT).at(-1).headers.authorization, given);
  }
});
