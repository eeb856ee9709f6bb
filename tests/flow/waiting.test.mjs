// What ends a wait besides a request that ends: first tokens, new engines, engines that recover.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { startRouter, until, usable, engineOf, metric, scratch, writeFile } from './lib/proc.mjs';
import { fakeEngine, gate, chunk } from './lib/fake.mjs';
import { post, send, chat } from './lib/http.mjs';

const path = '/v1/chat/completions';
const waiting = (router, n) => until(`${n} waiting`, async () => await metric(router, 'perilune_queued_total') === n);
const byRank = (t) => writeFile(scratch(t), 'in_order.lua',
  'return { api = 1, name = "in_order", score = function(req, w) return w.slot end }');

test("a first token frees its engine's prefill for those that wait", async (t) => {
  const engine = await fakeEngine(t);
  const first = gate();
  const last = gate();
  engine.handler = async (entry, res) => {
    if (!entry.json.stream) {
      engine.json(res, 200, {});
      return;
    }
    const write = engine.stream(res);
    await first.opened;
    await write(chunk('m', 'one'));
    await last.opened;
    await write('[DONE]');
    res.end();
  };
  const router = await startRouter(t, {
    config: { engines: [{ name: 'a', url: engine.url, max_queued_prefill_tokens: 10 }] },
  });
  await usable(router, 1);
  const long = { messages: [{ role: 'user', content: 'x'.repeat(400) }] };
  const stream = send(router.url + path, { method: 'POST', body: chat('m', { ...long, stream: true }) });
  await engine.request(0);
  const second = post(router.url + path, chat('m', long));
  await waiting(router, 1);
  first.open();
  const from = Date.now();
  assert.equal((await second).status, 200);
  assert.ok(Date.now() - from < 700, 'at once, not at some later look');
  last.open();
  await (await stream).text();
});

test('an engine that is added serves those that wait already', async (t) => {
  const a = await fakeEngine(t);
  const b = await fakeEngine(t);
  const hold = gate();
  a.handler = async (entry, res) => {
    await hold.opened;
    a.json(res, 200, {});
  };
  const router = await startRouter(t, {
    config: { engines: [{ name: 'a', url: a.url, max_inflight: 1 }] },
  });
  await usable(router, 1);
  const first = post(router.url + path, chat('m'));
  await a.request(0);
  const second = post(router.url + path, chat('m'));
  await waiting(router, 1);
  assert.equal((await post(`${router.admin}/engines`, { name: 'b', url: b.url })).status, 201);
  const answer = await second;
  assert.equal(answer.status, 200);
  assert.equal(answer.headers['x-perilune-worker'], 'b');
  hold.open();
  assert.equal((await first).status, 200);
});

test('an engine whose breaker lets it try again serves those that wait', async (t) => {
  const a = await fakeEngine(t);
  const b = await fakeEngine(t);
  const hold = gate();
  a.handler = async (entry, res) => {
    await hold.opened;
    a.json(res, 200, {});
  };
  b.handler = (entry, res) => b.json(res, 500, { error: { message: 'no' } });
  const router = await startRouter(t, {
    policy: byRank(t),
    config: {
      engines: [{ name: 'a', url: a.url, max_inflight: 1 }, { name: 'b', url: b.url }],
      breaker: { failures: 1, backoff_seconds: 0.5 },
      health: { interval_seconds: 30, detect_interval_seconds: 0.1 }, // so that no check closes it
      retries: { max: 0 },
    },
  });
  await usable(router, 2);
  const first = post(router.url + path, chat('m'));
  await a.request(0);
  assert.equal((await post(router.url + path, chat('m'))).status, 500);
  assert.equal((await engineOf(router, 'b')).breaker, 'open');
  b.handler = null;
  const second = await post(router.url + path, chat('m'));
  assert.equal(second.status, 200);
  assert.equal(second.headers['x-perilune-worker'], 'b');
  assert.equal(a.requests.length, 1);
  hold.open();
  assert.equal((await first).status, 200);
});

test("admit's own wait does not shorten the wait for capacity", async (t) => {
  const engine = await fakeEngine(t);
  const hold = gate();
  engine.handler = async (entry, res) => {
    await hold.opened;
    engine.json(res, 200, {});
  };
  const policy = writeFile(scratch(t), 'hesitate.lua', `
    local pl = require "perilune"
    local policy = { api = 1, name = "hesitate" }
    function policy.admit(req)
      if req:header("x-wait") and req.waited_seconds < 0.15 then return pl.QUEUE, 0.4 end
      return pl.ADMIT
    end
    return policy`);
  const router = await startRouter(t, {
    policy, config: { engines: [{ name: 'a', url: engine.url, max_inflight: 1 }] },
  });
  await usable(router, 1);
  const first = post(router.url + path, chat('m'));
  await engine.request(0);
  const second = post(router.url + path, chat('m'), { headers: { 'x-wait': '1' } });
  setTimeout(() => hold.open(), 1000); // after the 0.4 s that admit gave
  assert.equal((await second).status, 200);
  assert.equal((await first).status, 200);
});
