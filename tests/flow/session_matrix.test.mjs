// Every state that a turn of an engine-backed session can be in, times everything that can happen to it then:
// what the client is told, and that afterwards nothing is held, not by the router and not by the engine.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { until, metric, scratch, writeFile } from './lib/proc.mjs';
import { gate } from './lib/fake.mjs';
import { ledgerIsEmpty } from './lib/ledger.mjs';
import { CHAT, control, fleet, reply, say, sessions } from './lib/sessions.mjs';
import { del, post, send } from './lib/http.mjs';

const POLICY = 'return { api = 1, name = "p", score = function(req, w) return w.inflight end }';
const WHOLE = say('one', reply, 'two');
const timeout = 3; // seconds: what nobody can close any more ends by itself

async function setup(t, { cap, drain = 30 } = {}) {
  const directory = scratch(t);
  const f = await fleet(t, {
    n: 1, cap, policy: writeFile(directory, 'p.lua', POLICY),
    config: { sessions: { engine_extra_seconds: 1 }, timeouts: { remove_seconds: 0.2, drain_seconds: drain } },
  });
  const s = { ...f, directory, engine: f.engines[0], held: gate() };
  t.after(() => s.held.open());
  s.goOn = () => s.held.open();
  // The turn that is looked at: {status, text}, or {broken} when there is no whole answer.
  s.begin = (body) => {
    const client = new AbortController();
    s.leave = () => client.abort();
    s.answer = send(f.router.url + CHAT, { method: 'POST', body: { model: 'm', ...body }, signal: client.signal })
      .then(async (res) => {
        s.head = true;
        return { status: res.statusCode, session: res.headers['x-perilune-session'], text: await res.text() };
      })
      .catch((error) => ({ broken: error.code ?? error.name }));
  };
  s.open = async (id = 's') => {
    const first = await f.ask({ messages: say('one'), ...control(id, 'open', { timeout }) });
    assert.equal(first.headers['x-perilune-session'], 'open', first.text);
  };
  return s;
}

const states = {
  async 'waiting for its turn'(t, options) {
    const s = await setup(t, options);
    await s.open();
    s.engine.onTurn = () => s.held.opened;
    s.other = s.ask({ messages: WHOLE, ...control('s') });
    await s.engine.request(1);
    const before = await metric(s.router, 'perilune_session_turns_waited_total');
    s.begin({ messages: say('one', reply, 'other'), ...control('s') });
    await until('it waits', async () => await metric(s.router, 'perilune_session_turns_waited_total') > before);
    return s;
  },

  async opening(t, options) {
    const s = await setup(t, options);
    s.engine.onOpen = async () => { await s.held.opened; };
    s.begin({ messages: say('one'), ...control('s', 'open', { timeout }) });
    await s.engine.when(() => s.engine.opens.length === 1, 'the open');
    return s;
  },

  async 'waiting for room'(t, options) {
    const s = await setup(t, { ...options, cap: 1 });
    await s.open();
    s.engine.onTurn = () => s.held.opened;
    s.other = s.ask({ messages: say('plain') });
    await s.engine.request(1);
    s.begin({ messages: WHOLE, ...control('s') });
    await until('it waits', async () => await metric(s.router, 'perilune_queue_length') === 1);
    return s;
  },

  async calling(t, options) {
    const s = await setup(t, options);
    await s.open();
    s.engine.onTurn = () => s.held.opened;
    s.begin({ messages: WHOLE, ...control('s') });
    await s.engine.request(1);
    return s;
  },

  async streaming(t, options) {
    const s = await setup(t, options);
    await s.open();
    let words = 0;
    s.engine.pace = async () => { if (words++ === 1) await s.held.opened; };
    s.begin({ messages: WHOLE, stream: true, ...control('s') });
    await until('the answer has begun', () => s.head);
    return s;
  },

  async discarding(t, options) {
    const s = await states.calling(t, options);
    s.leave();
    await s.engine.when(() => s.engine.aborts.length === 1, 'the abort');
    s.left = true;
    return s;
  },
};

// Nothing is held; what may be is closed first.
async function nothingHeld(s, { engineGone = false } = {}) {
  s.goOn();
  s.engine.onTurn = s.engine.onOpen = null;
  await s.answer;
  await s.other;
  await until('the turn to end', async () => {
    for (const { id } of await sessions(s.router)) await del(`${s.router.admin}/sessions/${id}`);
    return await metric(s.router, 'perilune_queue_length') === 0
      && (await sessions(s.router)).length === 0
      && (engineGone || (await metric(s.router, 'perilune_worker_sessions') === 0
        && await metric(s.router, 'perilune_worker_session_tokens') === 0));
  });
  await ledgerIsEmpty(s.router);
  await until('the engine holds nothing', () => s.engine.sessions.size === 0);
  if (engineGone) return;
  const next = await s.ask({ messages: say('one'), ...control('s', 'open', { timeout }) });
  assert.equal(next.headers['x-perilune-session'], 'open', next.text);
}

const whole = (answer) => { assert.equal(answer.status, 200, JSON.stringify(answer)); assert.ok(!answer.text.includes('"error"'), answer.text); };

const happens = {
  async 'the client leaves'(s, state) {
    s.leave();
    assert.ok((await s.answer).broken);
    if (state === 'waiting for its turn' || state === 'waiting for room') {
      s.goOn();
      assert.equal((await s.other).status, 200);
      assert.equal(s.engine.requests.length, 2, 'it never got there');
    }
    await nothingHeld(s);
  },

  async 'the engine starts anew'(s, state) {
    s.engine.sessions.clear();
    for (const socket of s.engine.sockets) socket.resetAndDestroy();
    s.goOn();
    const answer = await s.answer;
    if (state === 'streaming') assert.ok(answer.text.includes('"error"') && !answer.text.includes('[DONE]'), answer.text);
    else if (!s.left) assert.ok([200, 400, 502, 503].includes(answer.status), JSON.stringify(answer));
    await nothingHeld(s);
  },

  async 'the engine is removed'(s, state) {
    assert.equal((await del(`${s.router.admin}/engines/e0`)).status, 200);
    const answer = await (state === 'waiting for its turn' || state === 'waiting for room' || !s.left ? s.answer : null);
    if (state === 'streaming') assert.ok(answer.text.includes('"error"') && !answer.text.includes('[DONE]'), answer.text);
    else if (!s.left) assert.ok([404, 503].includes(answer.status), JSON.stringify(answer));
    s.goOn();
    await nothingHeld(s, { engineGone: true });
  },

  async 'the session is closed by the admin API'(s, state) {
    const closed = await del(`${s.router.admin}/sessions/s`);
    assert.equal(closed.status, state === 'opening' ? 404 : 200);
    if (state !== 'opening' && state !== 'waiting for room') assert.equal(s.engine.closes.length, 0, 'not under a turn');
    s.goOn();
    if (!s.left) whole(await s.answer);
    await nothingHeld(s);
  },

  async 'the router drains'(s) {
    s.router.kill('SIGTERM');
    await s.router.log('draining');
    s.goOn();
    if (!s.left) whole(await s.answer);
    assert.deepEqual(await s.router.exited, { code: 0, signal: null });
    assert.equal(s.engine.sessions.size, 0, s.engine.order.join('; '));
  },

  async 'the drain runs out'(s, state) {
    s.router.kill('SIGTERM');
    assert.deepEqual(await s.router.exited, { code: 1, signal: null }, 'requests were cut');
    s.router.stopped = true;
    assert.doesNotMatch(s.router.stderr, /Sanitizer|runtime error:/);
    if (!s.left) {
      const answer = await s.answer;
      if (state === 'streaming') assert.ok(!answer.text?.includes('[DONE]'), JSON.stringify(answer));
      else assert.equal(answer.status, 503, JSON.stringify(answer));
    }
    // what it had opened, or might have, it has closed before it ended
    assert.deepEqual(new Set(s.engine.closes), new Set(s.engine.opens.map((open) => open.session_id)), s.engine.order.join('; '));
    s.goOn();
    await s.other;
  },

  async 'the policy is reloaded'(s) {
    writeFile(s.directory, 'p.lua', POLICY.replace('"p"', '"q"'));
    assert.equal((await post(`${s.router.admin}/policy/reload`)).status, 200);
    s.goOn();
    if (!s.left) whole(await s.answer);
    await nothingHeld(s);
  },
};

for (const [state, enter] of Object.entries(states)) {
  for (const [event, happen] of Object.entries(happens)) {
    if (state === 'discarding' && event === 'the client leaves') continue;
    test(`${state}: ${event}`, { timeout: 90000 }, async (t) => {
      await happen(await enter(t, event === 'the drain runs out' ? { drain: 0.3 } : {}), state);
    });
  }
}

test('a router that drains waits for a turn that is read to its end without its client', { timeout: 90000 }, async (t) => {
  const s = await states.discarding(t, {});
  s.router.kill('SIGTERM');
  await s.router.log('draining');
  const early = new Promise((resolve) => { setTimeout(resolve, 3000, 'waits'); });
  assert.equal(await Promise.race([early, s.router.exited]), 'waits');
  s.goOn();
  assert.deepEqual(await s.router.exited, { code: 0, signal: null });
  assert.equal(s.engine.sessions.size, 0, s.engine.order.join('; '));
});
