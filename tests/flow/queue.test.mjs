// Caps of engines, the waiting room, and what admit and degrade may say.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { startRouter, until, usable, engineOf, metric, scratch, writeFile } from './lib/proc.mjs';
import { fakeEngine, gate } from './lib/fake.mjs';
import { post, chat, Raw, rawPost } from './lib/http.mjs';

const path = '/v1/chat/completions';

// An engine that may serve `cap` requests at once and holds each until the test lets it go.
async function capped(t, { cap = 1, config = {}, ...rest } = {}) {
  const engine = await fakeEngine(t);
  const gates = [];
  let now = 0;
  engine.most = 0;
  engine.handler = async (entry, res) => {
    now += 1;
    engine.most = Math.max(engine.most, now);
    const g = gate();
    gates.push(g);
    engine.changed();
    await g.opened;
    now -= 1;
    engine.json(res, 200, { who: entry.json.who });
  };
  engine.letGo = async (n) => {
    await engine.when(() => gates[n], `request ${n} being served`);
    gates[n].open();
  };
  const router = await startRouter(t, {
    config: { engines: [{ name: 'a', url: engine.url, max_inflight: cap }], ...config }, ...rest,
  });
  await usable(router, 1);
  return { engine, router };
}

const ask = (router, who, extra = {}) => post(router.url + path, chat('m', { who, ...extra }));
const waiting = (router, n) => until(`${n} waiting`, async () => await metric(router, 'perilune_queued_total') === n);

test('max_inflight is never exceeded; those above it wait and are served', async (t) => {
  const { engine, router } = await capped(t, { cap: 3, threads: 3 });
  const answers = Array.from({ length: 12 }, (_, i) => ask(router, i));
  await engine.request(2);
  await waiting(router, 9);
  for (let i = 0; i < 12; i++) await engine.letGo(i);
  for (const answer of await Promise.all(answers)) assert.equal(answer.status, 200);
  assert.equal(engine.most, 3);
  await until('ledger back to zero', async () => (await engineOf(router, 'a')).inflight === 0);
});

test('the waiting are served by priority, then by arrival', async (t) => {
  const { engine, router } = await capped(t);
  const answers = [ask(router, 'first')];
  await engine.request(0);
  let n = 0;
  for (const [who, priority] of [['p0', 0], ['p5', 5], ['p0-later', 0], ['p5-later', 5], ['p9', 9]]) {
    answers.push(ask(router, who, { priority }));
    n += 1;
    await waiting(router, n);
  }
  for (let i = 0; i < 6; i++) await engine.letGo(i);
  await Promise.all(answers);
  assert.deepEqual(engine.requests.map((entry) => entry.json.who),
    ['first', 'p9', 'p5', 'p5-later', 'p0', 'p0-later']);
});

test('a full waiting room is a 503 with Retry-After, on /v1/messages a 529', async (t) => {
  const { engine, router } = await capped(t, { config: { limits: { queue: 1 } } });
  const answers = [ask(router, 1)];
  await engine.request(0);
  answers.push(ask(router, 2));
  await waiting(router, 1);
  const refused = await ask(router, 3);
  assert.equal(refused.status, 503);
  assert.match(refused.headers['retry-after'], /^\d+$/);
  assert.ok(refused.json.error.message.length > 0);
  const messages = await post(`${router.url}/v1/messages`, chat('m', { max_tokens: 1 }));
  assert.equal(messages.status, 529);
  assert.equal(messages.json.error.type, 'overloaded_error');
  await engine.letGo(0);
  await engine.letGo(1);
  for (const answer of await Promise.all(answers)) assert.equal(answer.status, 200);
});

test('who waits too long gets a 503 and leaves nothing behind', async (t) => {
  const { engine, router } = await capped(t, { config: { timeouts: { queue_seconds: 0.3 } } });
  const first = ask(router, 1);
  await engine.request(0);
  const late = await ask(router, 2);
  assert.equal(late.status, 503);
  assert.match(late.headers['retry-after'], /^\d+$/);
  await engine.letGo(0);
  assert.equal((await first).status, 200);
  assert.equal(engine.requests.length, 1);
  const next = ask(router, 3);
  await engine.letGo(1);
  assert.equal((await next).status, 200);
});

test('a client that leaves while it waits frees its place', async (t) => {
  const { engine, router } = await capped(t, { config: { limits: { queue: 1 } } });
  const first = ask(router, 1);
  await engine.request(0);
  const raw = await Raw.connect(router.url);
  await raw.send(rawPost(path, chat('m', { who: 'left' })));
  await waiting(router, 1);
  raw.reset();
  await until('gone', async () => await metric(router, 'perilune_client_gone_total') === 1);
  const third = ask(router, 3);
  await waiting(router, 2);
  await engine.letGo(0);
  await engine.letGo(1);
  assert.equal((await first).status, 200);
  assert.equal((await third).json.who, 3);
  assert.ok(!engine.requests.some((entry) => entry.json.who === 'left'));
});

test('admit may shed, shrink and let wait', async (t) => {
  const engine = await fakeEngine(t);
  const policy = writeFile(scratch(t), 'gate.lua', `
    local pl = require "perilune"
    local policy = { api = 1, name = "gate" }
    function policy.admit(req)
      local say = req:header("x-say")
      if say == "shed" then return pl.SHED, 17 end
      if say == "shrink" then return pl.SHRINK, 5 end
      if say == "queue" and req.waited_seconds < 0.15 then return pl.QUEUE, 5 end
      return pl.ADMIT
    end
    return policy`);
  const router = await startRouter(t, { engines: { a: engine.url }, policy });
  const say = (word, body = {}) => post(router.url + path, chat('m', body), { headers: { 'x-say': word } });

  const shed = await say('shed');
  assert.equal(shed.status, 503);
  assert.equal(shed.headers['retry-after'], '17');
  assert.equal(engine.requests.length, 0);

  assert.equal((await say('shrink', { max_tokens: 100 })).status, 200);
  assert.equal(engine.requests[0].json.max_tokens, 5);
  assert.equal((await say('shrink', { max_tokens: 3 })).status, 200);
  assert.equal(engine.requests[1].json.max_tokens, 3, 'never raised');
  assert.equal((await say('shrink')).status, 200);
  assert.equal(engine.requests[2].json.max_tokens ?? engine.requests[2].json.max_completion_tokens, 5);

  const from = Date.now();
  assert.equal((await say('queue')).status, 200);
  assert.ok(Date.now() - from >= 150);
});

test('degrade may refuse the retry', async (t) => {
  const a = await fakeEngine(t);
  const b = await fakeEngine(t);
  a.handler = (entry, res) => { res.socket.resetAndDestroy(); };
  const policy = writeFile(scratch(t), 'strict.lua', `
    local pl = require "perilune"
    local policy = { api = 1, name = "strict" }
    function policy.score(req, w) return w.index end
    function policy.degrade(req, fault)
      if fault.kind == pl.ENGINE_FAILED and req:header("x-once") then return pl.REJECT end
    end
    return policy`);
  const router = await startRouter(t, { engines: { a: a.url, b: b.url }, policy });
  const once = await post(router.url + path, chat('m'), { headers: { 'x-once': '1' } });
  assert.equal(once.status, 502);
  assert.equal(b.requests.length, 0);
  assert.equal((await post(router.url + path, chat('m'))).status, 200);
});
