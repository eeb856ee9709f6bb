// The admin API: engines and policies change while requests run.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import {
  startRouter, until, usable, engineOf, metric, scratch, writeFile, run, lua,
} from './lib/proc.mjs';
import { fakeEngine, gate, chunk } from './lib/fake.mjs';
import { get, post, del, send, chat } from './lib/http.mjs';

const path = '/v1/chat/completions';

// An engine whose streams stand still after their first word until the gate opens.
function standing(engine) {
  const g = gate();
  engine.handler = async (entry, res) => {
    const write = engine.stream(res);
    await write(chunk('m', 'one'));
    await g.opened;
    if (res.destroyed) return;
    await write(chunk('m', 'two'));
    await write('[DONE]');
    res.end();
  };
  return g;
}

const stream = (router) => send(router.url + path, { method: 'POST', body: chat('m', { stream: true }) });

test('an engine is added, listed, used, drained, undrained and removed', async (t) => {
  const a = await fakeEngine(t);
  const b = await fakeEngine(t);
  const router = await startRouter(t, { engines: { a: a.url }, policy: 'round_robin', threads: 1 });
  const added = await post(`${router.admin}/engines`, { name: 'b', url: b.url });
  assert.ok(added.status === 200 || added.status === 201, added.text);
  await usable(router, 2);
  const listed = (await get(`${router.admin}/engines`)).json.engines;
  assert.deepEqual(listed.map((engine) => engine.name).sort(), ['a', 'b']);
  const one = await get(`${router.admin}/engines/b`);
  assert.equal(one.status, 200);
  assert.equal(one.json.name, 'b');

  const used = async (n) => {
    const names = new Set();
    for (let i = 0; i < n; i++) {
      const answer = await post(router.url + path, chat('m'));
      assert.equal(answer.status, 200);
      names.add(answer.headers['x-perilune-worker']);
    }
    return [...names].sort().join(' ');
  };
  assert.equal(await used(4), 'a b');
  assert.equal((await post(`${router.admin}/engines/b/drain`)).status, 200);
  await until('only a', async () => await used(4) === 'a');
  assert.equal((await post(`${router.admin}/engines/b/undrain`)).status, 200);
  await until('both', async () => await used(4) === 'a b');
  assert.ok((await del(`${router.admin}/engines/b`)).status < 300);
  assert.equal(await used(4), 'a');
  assert.equal((await get(`${router.admin}/engines/b`)).status, 404);
  assert.equal((await del(`${router.admin}/engines/b`)).status, 404);
});

test('bad engines are refused with a reason', async (t) => {
  const a = await fakeEngine(t);
  const router = await startRouter(t, { engines: { a: a.url } });
  for (const [body, status] of [
    [{ name: 'a', url: a.url }, 409],
    [{ name: 'x', url: 'ftp://nowhere' }, 400],
    [{ name: 'x' }, 400],
    [{ name: 'x', url: a.url, nonsense: 1 }, 400],
    ['{"name":', 400],
    [[], 400],
  ]) {
    const answer = await post(`${router.admin}/engines`, body);
    assert.equal(answer.status, status, JSON.stringify(body));
    assert.ok(answer.json.error.message.length > 0);
    assert.ok(answer.json.error.code.length > 0);
  }
  assert.equal((await get(`${router.admin}/engines`)).json.engines.length, 1);
  assert.equal((await get(`${router.admin}/no/such/thing`)).status, 404);
});

test('removing an engine waits for its streams', async (t) => {
  const a = await fakeEngine(t);
  const b = await fakeEngine(t);
  const router = await startRouter(t, { engines: { a: a.url } });
  const g = standing(a);
  const res = await stream(router);
  await a.request(0);
  await post(`${router.admin}/engines`, { name: 'b', url: b.url });
  await until('b is up', async () => (await engineOf(router, 'b'))?.health === 'up');
  const removed = del(`${router.admin}/engines/a`);
  await until('new requests go to b', async () => {
    const answer = await post(router.url + path, chat('m'));
    return answer.status === 200 && answer.headers['x-perilune-worker'] === 'b';
  });
  g.open();
  assert.match(await res.text(), /two[^]*\[DONE\]/);
  assert.ok((await removed).status < 300);
  await router.log('engine_removed');
});

test('removing an engine cuts what is left at the deadline, honestly', async (t) => {
  const a = await fakeEngine(t);
  const router = await startRouter(t, { engines: { a: a.url }, config: { timeouts: { remove_seconds: 0.2 } } });
  const g = standing(a);
  const res = await stream(router);
  await a.request(0);
  await del(`${router.admin}/engines/a`);
  const text = await res.text();
  assert.match(text, /"error"/);
  assert.ok(!text.includes('[DONE]'));
  const entry = await a.request(0);
  await entry.closed;
  assert.ok(entry.aborted);
  g.open();
});

const good = (n) => `
local policy = { api = 1, name = "v${n}" }
function policy.route(req, fleet) return 0, "v${n}" end
return policy
`;

test('a good reload takes effect on every loop; a bad one changes nothing and says where', async (t) => {
  const a = await fakeEngine(t);
  const directory = scratch(t);
  const file = writeFile(directory, 'p.lua', good(1));
  const router = await startRouter(t, { engines: { a: a.url }, policy: file, threads: 3 });
  const reasons = async () => {
    const seen = new Set();
    for (let i = 0; i < 24; i++) {
      seen.add((await post(router.url + path, chat('m'))).headers['x-perilune-reason']);
    }
    return [...seen].join(' ');
  };
  assert.equal(await reasons(), 'v1');
  const before = (await get(`${router.admin}/policy`)).json;

  writeFile(directory, 'p.lua', good(2));
  const reloaded = await post(`${router.admin}/policy/reload`);
  assert.equal(reloaded.status, 200, reloaded.text);
  assert.ok(reloaded.json.generation > before.generation);
  assert.match(reloaded.json.sha256, /^[0-9a-f]{64}$/);
  assert.deepEqual(reloaded.json.hooks, ['route']);
  assert.equal(await reasons(), 'v2');

  for (const [text, stage, line] of [
    ['local policy = { api = 1 }\nfunction policy.route( return 0 end\nreturn policy', 'parse', 2],
    ['local x = 1\nerror("no")', 'run', 2],
    ['return { api = 1, rout = function() end }', 'check'],
    ['return { api = 1,\n init = function() error("no") end }', 'init', 2],
    ['return { api = 1,\n score = function(req, w) return w.nothing end }', 'selftest', 2],
  ]) {
    writeFile(directory, 'p.lua', text);
    const refused = await post(`${router.admin}/policy/reload`);
    assert.equal(refused.status, 422, refused.text);
    assert.equal(refused.json.error.stage, stage);
    assert.ok(refused.json.error.message.length > 0);
    assert.match(refused.json.error.file ?? file, /p\.lua$/);
    if (line) assert.equal(refused.json.error.line, line, refused.text);
    assert.equal(await reasons(), 'v2');
  }
  const after = (await get(`${router.admin}/policy`)).json;
  assert.equal(after.generation, reloaded.json.generation);

  writeFile(directory, 'p.lua', good(3));
  router.kill('SIGHUP');
  await until('v3', async () => await reasons() === 'v3');
});

test('perilune reload does the same from the command line', async (t) => {
  const a = await fakeEngine(t);
  const directory = scratch(t);
  const file = writeFile(directory, 'p.lua', good(1));
  const router = await startRouter(t, { engines: { a: a.url }, policy: file });
  const admin = router.admin.slice('http://'.length);
  writeFile(directory, 'p.lua', good(2));
  const done = await run(['reload', '--admin', admin]);
  assert.equal(done.code, 0, done.stderr);
  assert.equal((await post(router.url + path, chat('m'))).headers['x-perilune-policy'], 'v2');
  writeFile(directory, 'p.lua', 'return {');
  const refused = await run(['reload', '--admin', admin]);
  assert.equal(refused.code, 1);
  assert.match(refused.stdout + refused.stderr, /parse/);
  assert.match(refused.stdout + refused.stderr, /p\.lua:1/);
});

test('SIGHUP brings the fleet to what the config file says; what the API added stays', async (t) => {
  const a = await fakeEngine(t);
  const b = await fakeEngine(t);
  const c = await fakeEngine(t);
  const router = await startRouter(t, { config: { engines: [{ name: 'a', url: a.url }] } });
  await usable(router, 1);
  await post(`${router.admin}/engines`, { name: 'c', url: c.url });
  await usable(router, 2);
  writeFile(router.directory, 'perilune.lua',
    `return ${lua({ health: { interval_seconds: 0.1 }, engines: [{ name: 'b', url: b.url }] })}`);
  router.kill('SIGHUP');
  await until('b and c', async () => {
    const { engines } = (await get(`${router.admin}/engines`)).json;
    return engines.map((engine) => engine.name).sort().join(' ') === 'b c';
  });
});

test('the admin API asks for its token when it has one', async (t) => {
  const a = await fakeEngine(t);
  const router = await startRouter(t, {
    engines: { a: a.url }, ready: false, config: { admin: { token: 'sesame-123' } },
  });
  assert.equal((await get(`${router.admin}/engines`)).status, 401);
  const wrong = await get(`${router.admin}/engines`, { headers: { authorization: 'Bearer sesame-124' } });
  assert.equal(wrong.status, 401);
  const right = await get(`${router.admin}/engines`, { headers: { authorization: 'Bearer sesame-123' } });
  assert.equal(right.status, 200);
});

test('an admin API beyond loopback without a token is refused at start', async () => {
  const end = await run(['serve', '--listen', '127.0.0.1:0', '--admin', '0.0.0.0:0']);
  assert.notEqual(end.code, 0);
  assert.match(end.stderr, /token/);
});

test('a port that is taken is refused at start', async (t) => {
  const a = await fakeEngine(t);
  const router = await startRouter(t, { engines: { a: a.url } });
  const end = await run(['serve', '--listen', router.url.slice('http://'.length), '--admin', '127.0.0.1:0']);
  assert.equal(end.code, 1);
  assert.match(end.stderr, /--listen/);
});

test('/metrics is Prometheus text on both ports and counts what happened', async (t) => {
  const a = await fakeEngine(t);
  const router = await startRouter(t, { engines: { a: a.url } });
  for (let i = 0; i < 5; i++) await post(router.url + path, chat('m'));
  await post(router.url + path, chat('nope'));
  assert.equal(await metric(router, 'perilune_requests_total'), 6);
  assert.equal(await metric(router, 'perilune_unknown_model_total'), 1);
  assert.equal(await metric(router, 'perilune_decisions_total'), 5);
  const open = await get(`${router.url}/metrics`);
  assert.match(open.headers['content-type'], /^text\/plain/);
  const types = new Map();
  for (const line of open.text.split('\n')) {
    if (!line) continue;
    const type = /^# TYPE (\S+) (counter|gauge|histogram)$/.exec(line);
    if (type) {
      assert.ok(!types.has(type[1]), `${type[1]} twice`);
      types.set(type[1], type[2]);
    } else if (!line.startsWith('#')) {
      const sample = /^([a-zA-Z_:][\w:]*)(\{.*\})? (-?[\d.e+-]+|NaN|\+Inf)$/.exec(line);
      assert.ok(sample, line);
      const base = sample[1].replace(/_(bucket|sum|count)$/, '');
      assert.ok(types.has(sample[1]) || types.has(base), `no TYPE before ${line}`);
    }
  }
});

test('metrics can be kept off the public port', async (t) => {
  const a = await fakeEngine(t);
  const router = await startRouter(t, { engines: { a: a.url }, config: { metrics: { public: false } } });
  assert.equal((await get(`${router.url}/metrics`)).status, 404);
  assert.equal((await get(`${router.admin}/metrics`)).status, 200);
});

test('/status tells the version, the policy and the load', async (t) => {
  const a = await fakeEngine(t);
  const router = await startRouter(t, { engines: { a: a.url } });
  const { status, json } = await get(`${router.admin}/status`);
  assert.equal(status, 200);
  assert.match(JSON.stringify(json), /prefix_seconds/);
});
