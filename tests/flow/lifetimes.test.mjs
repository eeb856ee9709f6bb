// What outlives what: strings of a request after its body was given back, loops beside each other.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { startRouter, until, usable, scratch, writeFile } from './lib/proc.mjs';
import { fakeEngine, gate, chunk } from './lib/fake.mjs';
import { post, send, chat } from './lib/http.mjs';

const path = '/v1/chat/completions';

// A stream that stands after its first chunk until the gate opens.
function standing(engine) {
  const go = gate();
  engine.handler = async (entry, res) => {
    if (entry.path === '/abort_request') {
      engine.json(res, 200, {});
      return;
    }
    const write = engine.stream(res);
    await write(chunk('m', 'one'));
    await go.opened;
    await write('[DONE]');
    res.end();
  };
  return go;
}

test("an abort names the client's own rid, also when the answer streams already", async (t) => {
  const engine = await fakeEngine(t);
  standing(engine);
  const router = await startRouter(t, {
    config: { engines: [{ name: 'a', url: engine.url, kind: 'sglang' }] },
  });
  await usable(router, 1);
  const rid = 'the-clients-own-request-id-0123456789';
  const res = await send(router.url + path, { method: 'POST', body: chat('m', { stream: true, rid }) });
  await new Promise((resolve) => { res.once('data', resolve); });
  res.on('error', () => {});
  res.destroy();
  const abort = await engine.when(
    () => engine.requests.find((r) => r.path === '/abort_request'), 'the abort',
  );
  assert.equal(abort.json.rid, rid);
});

test("a client's short rid, which others may begin with, is never named in an abort", async (t) => {
  const engine = await fakeEngine(t);
  standing(engine);
  const router = await startRouter(t, {
    threads: 1, config: { engines: [{ name: 'a', url: engine.url, kind: 'sglang' }] },
  });
  await usable(router, 1);
  const leave = async (rid) => {
    const n = engine.requests.length;
    const res = await send(router.url + path, { method: 'POST', body: chat('m', { stream: true, rid }) });
    await new Promise((resolve) => { res.once('data', resolve); });
    res.on('error', () => {});
    res.destroy();
    await engine.requests[n].closed;
  };
  for (const rid of ['', 'a', 'chatcmpl-']) await leave(rid);
  await leave(undefined); // the router's own
  const aborts = () => engine.requests.filter((r) => r.path === '/abort_request');
  await engine.when(() => aborts().length > 0, 'the abort');
  const [sent] = engine.requests.filter((r) => r.json.rid?.length === 32);
  assert.deepEqual(aborts().map((r) => r.json.rid), [sent.json.rid]);
});

test('an SGLang engine whose answer stops is told to abort the request', async (t) => {
  const engine = await fakeEngine(t);
  standing(engine);
  const router = await startRouter(t, {
    config: {
      engines: [{ name: 'a', url: engine.url, kind: 'sglang' }],
      timeouts: { between_bytes_seconds: 0.3 },
    },
  });
  await usable(router, 1);
  const answer = await post(router.url + path, chat('m', { stream: true, rid: 'stops-in-the-middle-0123456789abcdef' }));
  assert.match(answer.text, /engine_failed/);
  assert.doesNotMatch(answer.text, /DONE/);
  const abort = await engine.when(
    () => engine.requests.find((r) => r.path === '/abort_request'), 'the abort',
  );
  assert.equal(abort.json.rid, 'stops-in-the-middle-0123456789abcdef');
});

test('done of a policy loaded while an answer streams reads the session id', async (t) => {
  const engine = await fakeEngine(t);
  const go = standing(engine);
  const teller = writeFile(scratch(t), 'teller.lua', `
    local pl = require "perilune"
    local policy = { api = 1, name = "teller" }
    function policy.done(req) pl.log("session=" .. tostring(req:session_id())) end
    return policy`);
  const router = await startRouter(t, { engines: { a: engine.url } });
  const session = 'a-session-id-that-is-long-enough-to-be-seen';
  const res = await send(router.url + path, {
    method: 'POST', body: chat('m', { stream: true, session_id: session }),
  });
  await new Promise((resolve) => { res.once('data', resolve); });
  const reload = await post(`${router.admin}/policy/reload`, { policy: teller });
  assert.equal(reload.status, 200, reload.text);
  go.open();
  await res.text();
  await until('done has run', () => router.stderr.includes(`session=${session}`));
});

test('a policy is not shown credentials, however it spells their names', async (t) => {
  const engine = await fakeEngine(t);
  const policy = writeFile(scratch(t), 'nosy.lua', `
    local policy = { api = 1, name = "nosy" }
    function policy.route(req, fleet)
      for _, name in ipairs { "authorization", "Authorization", "X-API-Key", "Cookie" } do
        if req:header(name) then return 0, "seen" end
      end
      return 0, "unseen"
    end
    return policy`);
  const router = await startRouter(t, { engines: { a: engine.url }, policy });
  const answer = await post(router.url + path, chat('m'), {
    headers: { authorization: 'Bearer secret', 'x-api-key': 'secret', cookie: 'secret' },
  });
  assert.equal(answer.status, 200);
  assert.equal(answer.headers['x-perilune-reason'], 'unseen');
});
