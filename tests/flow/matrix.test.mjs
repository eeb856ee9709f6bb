// Every state that a request can be in, times everything that can happen to it. Afterwards the
// engine has seen what it must see, the client was told the truth, and the ledger is back at zero.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { once } from 'node:events';
import { startRouter, until, usable, engineOf, metric, scratch, writeFile } from './lib/proc.mjs';
import { fakeEngine, gate, chunk } from './lib/fake.mjs';
import { cleanup } from './lib/cleanup.mjs';
import { post, del, chat, Raw, rawPost } from './lib/http.mjs';

const path = '/v1/chat/completions';
const POLICY = 'return { api = 1, name = "p", score = function(req, w) return w.inflight end }';

// Brings a router and one request of a raw client into the state. Answers what the events need:
// finish() lets the engine go on, entry() is the request as the engine saw it (when it has).
async function setup(t, config = {}, cap = 0) {
  const engine = await fakeEngine(t);
  const policy = writeFile(scratch(t), 'p.lua', POLICY);
  const router = await startRouter(t, {
    policy,
    config: {
      engines: [{ name: 'a', url: engine.url, max_inflight: cap }],
      timeouts: { remove_seconds: 0.3, drain_seconds: 5, ...config.timeouts },
      ...config.rest,
    },
  });
  await usable(router, 1);
  const client = await Raw.connect(router.url);
  cleanup(t, () => client.destroy());
  return { engine, router, client, policy, go: gate() };
}

const states = {
  async 'reading body'(t, timeouts) {
    const s = await setup(t, { timeouts: { ...timeouts, ...(timeouts ? { body_seconds: 0.3 } : {}) } });
    const text = rawPost(path, chat('m', { stream: true }));
    s.body = text.slice(-10);
    await s.client.send(text.slice(0, -10));
    s.finish = async () => { await s.client.send(s.body); };
    s.status = 408;
    return s;
  },

  async queued(t, timeouts) {
    const s = await setup(t, { timeouts: { ...timeouts, ...(timeouts ? { queue_seconds: 0.3 } : {}) } }, 1);
    const first = gate();
    s.engine.handler = async (entry, res) => {
      if (entry.json.first) {
        await first.opened;
        s.engine.json(res, 200, {});
      } else {
        await s.engine.chat(entry, res);
      }
    };
    s.other = post(s.router.url + path, chat('m', { first: 1 })).catch(() => {});
    await s.engine.request(0);
    await s.client.send(rawPost(path, chat('m', { stream: true })));
    await until('queued', async () => await metric(s.router, 'perilune_queued_total') === 1);
    s.finish = async () => first.open();
    s.settle = () => first.open();
    s.seenByEngine = 1;
    s.status = 503;
    return s;
  },

  async 'awaiting the first byte'(t, timeouts) {
    const s = await setup(t, { timeouts: { ...timeouts, ...(timeouts ? { first_byte_seconds: 0.3 } : {}) } });
    s.engine.handler = async (entry, res) => {
      await s.go.opened;
      if (!res.destroyed) await s.engine.chat(entry, res);
    };
    await s.client.send(rawPost(path, chat('m', { stream: true })));
    await s.engine.request(0);
    s.finish = async () => s.go.open();
    s.settle = () => s.go.open();
    s.seenByEngine = 0;
    s.status = 504;
    return s;
  },

  async streaming(t, timeouts) {
    const s = await setup(t, { timeouts: { ...timeouts, ...(timeouts ? { between_bytes_seconds: 0.3 } : {}) } });
    s.engine.handler = async (entry, res) => {
      const write = s.engine.stream(res);
      await write(chunk('m', 'one'));
      await s.go.opened;
      if (res.destroyed) return;
      await write('[DONE]');
      res.end();
    };
    await s.client.send(rawPost(path, chat('m', { stream: true })));
    await s.client.until('one');
    s.finish = async () => s.go.open();
    s.settle = () => s.go.open();
    s.seenByEngine = 0;
    s.headSent = true;
    return s;
  },

  async 'back-pressured'(t, timeouts) {
    const s = await setup(t, { timeouts: { ...timeouts, ...(timeouts ? { write_seconds: 0.5 } : {}) } });
    s.written = 0;
    s.engine.handler = async (entry, res) => {
      const write = s.engine.stream(res);
      for (let k = 0; k < 4000 && !res.destroyed; k++) {
        await Promise.race([write(chunk('m', 'z'.repeat(8000))), once(res, 'close')]);
        s.written += 1;
      }
      if (res.destroyed) return;
      await write('[DONE]');
      res.end();
    };
    await s.client.send(rawPost(path, chat('m', { stream: true })));
    await s.client.until('data: ');
    s.client.pause();
    await until('paused', async () => await metric(s.router, 'perilune_paused_total') >= 1);
    s.finish = async () => s.client.resume();
    s.settle = () => s.client.resume();
    s.seenByEngine = 0;
    s.headSent = true;
    s.mustReadOn = true;
    return s;
  },
};

const zero = (s) => until('ledger back to zero', async () => {
  const engine = await engineOf(s.router, 'a');
  return !engine || (engine.inflight === 0 && engine.streams === 0 && engine.queued_prefill_tokens === 0);
});

// What the client must have been told after something broke: an error before the head, an error
// event or a visibly cut answer after it, never [DONE].
async function toldTheTruth(s, status) {
  if (s.mustReadOn) s.client.resume();
  const text = s.headSent ? await s.client.until(null) : await s.client.until('"message"');
  if (!s.headSent) assert.match(text, new RegExp(`^HTTP/1\\.1 (${status}) `));
  assert.ok(!text.includes('[DONE]'), text.slice(-300));
  if (s.headSent && !s.mustReadOn) assert.match(text, /"error"/);
}

const events = {
  async 'the client leaves'(s, state) {
    s.client.reset();
    if (s.seenByEngine !== undefined && s.engine.requests[s.seenByEngine]) {
      const entry = s.engine.requests[s.seenByEngine];
      await entry.closed;
      assert.ok(entry.aborted, 'the engine sees it at once');
    }
    s.settle?.();
    await s.other;
    await zero(s);
    const reached = state !== 'reading body' && state !== 'queued';
    assert.equal(s.engine.requests.filter((entry) => !entry.json.first).length, reached ? 1 : 0);
  },

  async 'the engine resets'(s, state) {
    if (state === 'reading body') return; // there is no connection to an engine yet
    for (const socket of s.engine.sockets) socket.resetAndDestroy();
    if (state === 'queued') {
      // the one that it waited for has failed: its turn has come
      s.settle();
      await s.client.until('[DONE]');
    } else {
      await toldTheTruth(s, '502');
    }
    s.settle?.();
    await zero(s);
  },

  async 'its time runs out'(s) {
    if (s.mustReadOn) {
      const entry = await s.engine.request(0);
      await entry.closed;
      assert.ok(entry.aborted, 'the engine is let go of');
    }
    await toldTheTruth(s, s.status);
    s.settle?.();
    await s.other;
    await zero(s);
  },

  async 'the router drains'(s, state) {
    s.router.kill('SIGTERM');
    await s.router.log('draining').catch(() => {});
    await s.finish();
    const text = await s.client.until(null);
    if (state !== 'reading body') assert.match(text, /\[DONE\]/, 'a request under way is finished');
    assert.equal((await s.router.exited).code, 0);
  },

  async 'its engine is removed'(s, state) {
    const removed = await del(`${s.router.admin}/engines/a`);
    assert.ok(removed.status < 300, removed.text);
    if (state === 'reading body') {
      await s.finish();
      const text = await s.client.until('"message"');
      assert.match(text, /^HTTP\/1\.1 (404|503) /);
    } else {
      await toldTheTruth(s, '50[0-9]|404');
    }
    s.settle?.();
    await s.other;
  },

  async 'the policy is reloaded'(s) {
    writeFile(s.policy.replace(/\/p\.lua$/, ''), 'p.lua', POLICY.replace('"p"', '"q"'));
    assert.equal((await post(`${s.router.admin}/policy/reload`)).status, 200);
    await s.finish();
    await s.client.until('[DONE]');
    await s.other;
    await zero(s);
    assert.equal((await post(s.router.url + path, chat('m', { stream: false }))).headers['x-perilune-policy'], 'q');
  },
};

for (const [state, enter] of Object.entries(states)) {
  for (const [name, event] of Object.entries(events)) {
    if (state === 'reading body' && name === 'the engine resets') continue;
    test(`${state}: ${name}`, { timeout: 60000 }, async (t) => {
      const s = await enter(t, name === 'its time runs out' ? {} : undefined);
      await event(s, state);
    });
  }
}

// Connecting: an address where nobody answers.
test('connecting: the connect timeout is an error of the engine, and the client may leave before', { timeout: 60000 }, async (t) => {
  const good = await fakeEngine(t);
  const router = await startRouter(t, {
    policy: writeFile(scratch(t), 'p.lua', 'return { api = 1, name = "p", score = function(req, w) return -w.slot end }'),
    config: {
      engines: [
        { name: 'good', url: good.url, models: ['m'] },
        // TEST-NET-1: nobody answers there, or the system says at once that there is no way
        { name: 'far', url: 'http://192.0.2.1:9', models: ['m'] },
      ],
      timeouts: { connect_seconds: 0.4 },
    },
  });
  await until('good is up', async () => (await engineOf(router, 'good'))?.health === 'up');
  const answer = await post(router.url + path, chat('m'));
  assert.equal(answer.status, 200);
  assert.equal(answer.headers['x-perilune-worker'], 'good');
});
