// How the router ends: what must not hold it, and what it still says.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { startRouter, until, usable, metric, scratch, writeFile } from './lib/proc.mjs';
import { fakeEngine, gate, chunk } from './lib/fake.mjs';
import { post, send, chat, events } from './lib/http.mjs';

const path = '/v1/chat/completions';

test('an engine that does not answer an abort does not hold a router that stops', async (t) => {
  const engine = await fakeEngine(t);
  const never = gate();
  engine.handler = () => never.opened; // the request and its /abort_request
  const router = await startRouter(t, {
    config: {
      engines: [{ name: 'a', url: engine.url, kind: 'sglang' }],
      timeouts: { drain_seconds: 0.2 },
    },
  });
  await usable(router, 1);
  const answer = post(router.url + path, chat('m')).catch((error) => error);
  await engine.request(0);
  router.kill('SIGTERM');
  await engine.when(() => engine.requests.find((r) => r.path === '/abort_request'), 'the abort');
  const end = await Promise.race([
    router.exited,
    new Promise((resolve) => { setTimeout(resolve, 15000, 'still running').unref(); }),
  ]);
  assert.deepEqual(end, { code: 1, signal: null });
  router.stopped = true;
  await answer;
  never.open();
});

test('a stream cut by the drain deadline is told so, and so is done', async (t) => {
  const engine = await fakeEngine(t);
  const never = gate();
  engine.handler = async (entry, res) => {
    const write = engine.stream(res);
    await write(chunk('m', 'one'));
    await never.opened;
  };
  const policy = writeFile(scratch(t), 'tell.lua', `
    local pl = require "perilune"
    local policy = { api = 1, name = "tell" }
    function policy.done(req, outcome)
      pl.log("cut=" .. tostring(outcome.end_cause == pl.END_CUT))
    end
    return policy`);
  const router = await startRouter(t, {
    engines: { a: engine.url }, policy, config: { timeouts: { drain_seconds: 0.2 } },
  });
  const res = await send(router.url + path, { method: 'POST', body: chat('m', { stream: true }) });
  router.kill('SIGTERM');
  const text = await res.text();
  assert.match(JSON.parse(events(text).at(-1)).error.message, /shutting down/);
  assert.deepEqual(await router.exited, { code: 1, signal: null });
  router.stopped = true;
  assert.match(router.stderr, /cut=true/);
  never.open();
});

test('everybody who waits when the drain runs out is told so, on whichever loop', async (t) => {
  const engine = await fakeEngine(t);
  const never = gate();
  t.after(() => never.open());
  engine.handler = () => never.opened;
  const router = await startRouter(t, {
    threads: 4,
    config: {
      engines: [{ name: 'a', url: engine.url, max_inflight: 20 }], timeouts: { drain_seconds: 0.2 },
    },
  });
  await usable(router, 1);
  // a cut turn grants its room to one that waits, perhaps on another loop, which is cut then, too
  const answers = Array.from({ length: 60 }, () => post(router.url + path, chat('m')).catch((error) => error));
  await engine.request(19);
  await until('the others wait', async () => await metric(router, 'perilune_queue_length') === 40);
  router.kill('SIGTERM');
  for (const answer of await Promise.all(answers)) {
    assert.equal(answer.status, 503, answer.text ?? String(answer));
    assert.match(answer.text, /shutting down/);
  }
  assert.deepEqual(await router.exited, { code: 1, signal: null });
  router.stopped = true;
  assert.equal(engine.requests.filter((r) => r.path === path).length, 20, 'nothing is sent after the cut');
});
