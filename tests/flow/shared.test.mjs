// Several routers that share their sessions through a Redis: they agree, and go on without it.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { startRouter, until, metric, scratch, writeFile } from './lib/proc.mjs';
import { gate } from './lib/fake.mjs';
import { sglang } from './lib/sglang.mjs';
import { startRedis } from './lib/redis.mjs';
import { get, post, del } from './lib/http.mjs';

const CHAT = '/v1/chat/completions';
const reply = 'The moon is a rock.';
const say = (...texts) => texts.map((content, i) => ({ role: i % 2 ? 'assistant' : 'user', content }));
const control = (id, action, extra = {}) => ({ nvext: { session_control: { session_id: id, ...(action && { action }), ...extra } } });

const ask = (router, body, options) => post(`${router.url}${CHAT}`, { model: 'm', ...body }, options);
const named = (router, id) => ask(router, { messages: say('x') }, { headers: { 'x-session-id': id } });
const workerOf = (answer) => {
  assert.equal(answer.status, 200, answer.text);
  return answer.headers['x-perilune-worker'];
};
const list = async (router) => (await get(`${router.admin}/sessions`)).json.sessions;
const logged = (router, event) => router.logs.filter((line) => line.event === event);
const up = (router) => until('the store serves again', async () => await metric(router, 'perilune_session_store_up') === 1);

async function fleet(t, { n = 2, routers = 2, redis = {}, sessions = {}, timeouts = {}, server, ...rest } = {}) {
  const store = await startRedis(t, server);
  const engines = [];
  for (let i = 0; i < n; i++) engines.push(await sglang(t));
  const all = (what) => engines.flatMap((e) => e[what]);
  const list = [];
  for (let i = 0; i < routers; i++) {
    list.push(await startRouter(t, {
      // not in the same order: a worker's slot means nothing to another router
      engines: Object.fromEntries(engines.map((e, k) => [`e${k}`, e.url]).sort(() => (i % 2 ? -1 : 1))),
      config: {
        timeouts,
        sessions: {
          store: 'redis', open_timeout_seconds: 30,
          redis: { url: store.url, timeout_seconds: 2, connect_seconds: 20, ...redis }, ...sessions,
        },
      },
      ...rest,
    }));
  }
  for (const router of list) {
    await until('capabilities', async () => (await get(`${router.admin}/engines`)).json.engines
      .every((e) => e.capabilities.includes('streaming_sessions')));
  }
  return { store, engines, all, routers: list, a: list[0], b: list[1] };
}

test('two routers that race to open one session end on one worker', async (t) => {
  const { engines, all, a, b } = await fleet(t);
  const both = gate();
  for (const engine of engines) {
    engine.onOpen = async () => {
      if (all('opens').length === 2) both.open();
      await both.opened; // neither is bound before both have been asked for
      return false;
    };
  }
  const answers = await Promise.all([a, b].map((router) => ask(router, { messages: say('one'), ...control('s', 'open') })));
  assert.equal(workerOf(answers[0]), workerOf(answers[1]));
  await until('the loser is closed', () => all('closes').length === 1);
  const left = engines.flatMap((e) => [...e.sessions.keys()]);
  assert.equal(left.length, 1);
  assert.notEqual(left[0], all('closes')[0]);
  assert.equal((await metric(a, 'perilune_session_open_races_total')) + (await metric(b, 'perilune_session_open_races_total')), 1);
  const [listed] = await list(a);
  assert.equal(listed.worker, answers[0].headers['x-perilune-worker']);
  assert.deepEqual((await list(b)).map((s) => [s.id, s.worker, s.kind]), [['s', listed.worker, 'engine_backed']]);
});

test('turns through both routers go to the session, trimmed, one at a time', async (t) => {
  const { engines, a, b } = await fleet(t);
  const worker = workerOf(await ask(a, { messages: say('one'), ...control('s', 'open') }));
  const holder = engines.find((e) => e.opens.length);
  const id = holder.opens[0].session_id;
  const texts = ['one'];
  for (const [router, text] of [[b, 'two'], [a, 'three'], [b, 'four']]) {
    texts.push(reply, text);
    const turn = await ask(router, { messages: say(...texts), ...control('s') });
    assert.equal(workerOf(turn), worker);
    assert.equal(turn.headers['x-perilune-session'], 'bound');
    assert.deepEqual(holder.requests.at(-1).json.messages, say(text));
    assert.deepEqual(holder.requests.at(-1).json.session_params, { id });
  }
  // one turn is held at the engine: the other router's waits
  const hold = gate();
  holder.onTurn = () => hold.opened;
  texts.push(reply, 'five');
  const fifth = ask(a, { messages: say(...texts), ...control('s') });
  await holder.request(4);
  texts.push(reply, 'six');
  const sixth = ask(b, { messages: say(...texts), ...control('s') });
  await until('it waits', async () => await metric(b, 'perilune_session_turns_waited_total') >= 1);
  assert.equal(holder.requests.length, 5);
  hold.open();
  assert.equal(workerOf(await fifth), worker);
  assert.equal(workerOf(await sixth), worker);
  assert.deepEqual(holder.requests.map((r) => r.json.messages), ['one', 'two', 'three', 'four', 'five', 'six'].map((x) => say(x)));
  assert.deepEqual(holder.order, [`open ${id}`, ...Array(6).fill([`turn ${id}`, `end ${id}`]).flat()]);
});

test('an engine is drained: sessions move once, though both routers remember where they were', async (t) => {
  const { a, b } = await fleet(t, { n: 4, policy: 'round_robin', redis: { cache_seconds: 30 } });
  const ids = Array.from({ length: 12 }, (_, i) => `s${i}`);
  const where = {};
  for (const id of ids) {
    where[id] = workerOf(await named(a, id));
    assert.equal(workerOf(await named(b, id)), where[id]);
  }
  const gone = where.s0;
  for (const router of [a, b]) assert.equal((await post(`${router.admin}/engines/${gone}/drain`)).status, 200);
  for (const id of ids) {
    const moved = workerOf(await named(a, id));
    assert.equal(workerOf(await named(b, id)), moved, id);
    assert.equal(moved === where[id], where[id] !== gone, id);
  }
});

test('an expired session is closed once, whoever opened it', async (t) => {
  const { store, engines, all, a, b } = await fleet(t);
  for (let i = 0; i < 6; i++) {
    workerOf(await ask(i % 2 ? a : b, { messages: say('one'), ...control(`s${i}`, 'open', { timeout: 1 }) }));
  }
  const opened = all('opens').map((o) => o.session_id).sort();
  await until('all are closed', () => all('closes').length >= 6);
  // who opened one without closing it looks for it some seconds after its end
  await until('nobody counts them any more', async () => await metric(a, 'perilune_worker_sessions') === 0
    && await metric(b, 'perilune_worker_sessions') === 0);
  await until('all are acknowledged', async () => await store.command('KEYS', 'perilune:g:*') === '*0\r\n');
  assert.deepEqual(all('closes').sort(), opened);
  assert.equal(engines.reduce((sum, e) => sum + e.sessions.size, 0), 0);
  const closes = 'perilune_session_closes_total';
  assert.equal(await metric(a, closes, 'cause="expired"') + await metric(b, closes, 'cause="expired"'), 6);
});

test('the expire hook may keep a session, or let it go', async (t) => {
  const directory = scratch(t);
  const policy = writeFile(directory, 'keep.lua', `
local pl = require "perilune"
local policy = { api = 1, name = "keep" }
function policy.expire(s, st)
  if s.ttl_seconds >= 2 then return pl.DROP end
  if s.turn < 2 then return pl.EXTEND, 20 end
  return pl.CLOSE
end
return policy`);
  const { store, all, a, b } = await fleet(t, { policy });
  workerOf(await ask(a, { messages: say('one'), ...control('kept', 'open', { timeout: 1 }) }));
  workerOf(await ask(a, { messages: say('one'), ...control('dropped', 'open', { timeout: 2 }) }));
  await until('one is kept, one is dropped', async () => {
    const count = async (name) => await metric(a, name) + await metric(b, name);
    return await count('perilune_session_extended_total') === 1 && await count('perilune_session_dropped_total') === 1;
  });
  await until('both are settled', async () => await store.command('KEYS', 'perilune:g:*') === '*0\r\n');
  assert.deepEqual((await list(b)).map((s) => s.id), ['kept']);
  const turn = await ask(b, { messages: say('one', reply, 'two'), ...control('kept') });
  assert.equal(turn.headers['x-perilune-session'], 'bound');
  assert.deepEqual(all('closes'), []);
});

test('a router that dies in the midst of a turn: the session goes on at the other', async (t) => {
  const { engines, all, a, b } = await fleet(t, { sessions: { lease_seconds: 2 } });
  workerOf(await ask(a, { messages: say('one'), ...control('s', 'open') }));
  workerOf(await ask(a, { messages: say('one'), ...control('idle', 'open', { timeout: 4 }) }));
  const opened = Date.now();
  const closedAt = new Map();
  for (const engine of engines) engine.onClose = ({ session_id: id }) => { closedAt.set(id, Date.now()); return false; };
  const [first, idle] = ['s', 'idle'].map((id) => all('opens').find((o) => o.session_id.startsWith(`${id}~`)).session_id);
  const holder = engines.find((e) => e.sessions.has(first));
  const hold = gate();
  holder.onTurn = () => hold.opened;
  const n = holder.requests.length;
  const cut = ask(a, { messages: say('one', reply, 'two'), ...control('s') }).catch(() => 'cut');
  const turn = await holder.request(n);
  await a.stop('SIGKILL');
  assert.equal(await cut, 'cut');
  await turn.closed; // the engine has seen its client go
  hold.open();
  holder.onTurn = null;
  // what the engine has got of the cut turn is not known: the whole conversation opens it anew
  const next = await ask(b, { messages: say('one', reply, 'two'), ...control('s') });
  assert.equal(next.status, 200, next.text);
  assert.equal(next.headers['x-perilune-session'], 'reopened');
  await until('the old one is closed', () => all('closes').includes(first));
  const after = await ask(b, { messages: say('one', reply, 'two', reply, 'three'), ...control('s') });
  assert.equal(workerOf(after), workerOf(next));
  assert.equal(after.headers['x-perilune-session'], 'bound');
  // and what the dead one left to expire is closed by the other: within 5 s of its end
  await until('the idle one is closed', () => all('closes').includes(idle));
  assert.ok(closedAt.get(idle) - opened < (4 + 5 + 5) * 1000, 'late (with 5 s for a slow machine)');
  assert.equal(all('closes').filter((id) => id === idle).length, 1);
});

test('a router that stops leaves its sessions to the others', async (t) => {
  const { engines, all, a, b } = await fleet(t);
  const worker = workerOf(await ask(a, { messages: say('one'), ...control('s', 'open') }));
  await a.stop();
  assert.deepEqual(all('closes'), []);
  const turn = await ask(b, { messages: say('one', reply, 'two'), ...control('s') });
  assert.equal(workerOf(turn), worker);
  assert.deepEqual(engines.find((e) => e.opens.length).requests.at(-1).json.messages, say('two'));
  // the admin API of a router that did not open it closes it
  assert.equal((await del(`${b.admin}/sessions/s`)).status, 200);
  await until('it is closed', () => all('closes').length === 1);
  assert.deepEqual(await list(b), []);
});

test('a router that is stopped in the midst of a turn leaves no lease behind', async (t) => {
  const { engines, all, a, b } = await fleet(t, { timeouts: { drain_seconds: 0.5 }, sessions: { lease_seconds: 3600 } });
  workerOf(await ask(a, { messages: say('one'), ...control('s', 'open') }));
  const holder = engines.find((e) => e.opens.length);
  const [{ session_id: first }] = holder.opens;
  const hold = gate();
  holder.onTurn = () => hold.opened;
  const cut = ask(a, { messages: say('one', reply, 'two'), ...control('s') }).catch(() => 'cut');
  await holder.request(1);
  a.stopped = true; // it is not to end well
  a.kill('SIGTERM');
  await a.exited;
  await cut;
  hold.open();
  holder.onTurn = null;
  // the engine's session was cut in a turn: it is closed, and the next turn does not wait
  await until('it is closed', () => all('closes').includes(first));
  const next = await ask(b, { messages: say('one', reply, 'two'), ...control('s', 'open') });
  assert.equal(next.status, 200, next.text);
  assert.equal(next.headers['x-perilune-session'], 'open');
});

test('the store stands still: requests go on, routers agree without talking, then it is as before', async (t) => {
  const { store, engines, all, a, b } = await fleet(t, { n: 3, policy: 'round_robin', redis: { cache_seconds: 0 } });
  const before = workerOf(await named(a, 'before'));
  assert.equal(workerOf(await named(b, 'before')), before);
  const backed = workerOf(await ask(a, { messages: say('one'), ...control('backed', 'open') }));
  await store.freeze();
  // who knew a session before sends it where it was
  for (const router of [a, b]) {
    const answer = await named(router, 'before');
    assert.equal(workerOf(answer), before);
    assert.equal(answer.headers['x-perilune-session'], 'fallback');
  }
  for (let i = 0; i < 20; i++) {
    const [x, y] = [await named(a, `new ${i}`), await named(b, `new ${i}`)];
    assert.equal(workerOf(x), workerOf(y));
    assert.equal(x.headers['x-perilune-session'], 'fallback');
    assert.equal(workerOf(await named(a, `new ${i}`)), workerOf(x));
  }
  for (const e of engines) assert.ok(e.requests.some((r) => /^new/.test(r.headers['x-session-id'])), 'they are spread');
  // the whole conversation of an engine's session goes to its worker, but not into the session
  const whole = await ask(a, { messages: say('one', reply, 'two'), ...control('backed') });
  assert.equal(workerOf(whole), backed);
  assert.equal(engines.flatMap((e) => e.requests).filter((r) => r.json.session_params).length, 1);
  // what would need the store is refused for the moment, or goes on without
  const delta = await ask(a, { messages: say('two'), ...control('backed', undefined, { history: 'delta' }) });
  assert.equal(delta.status, 503);
  assert.equal(delta.json.error.code, 'session_store_unavailable');
  assert.ok(Number(delta.headers['retry-after']) >= 1);
  const opening = await ask(b, { messages: say('one'), ...control('late', 'open') });
  assert.equal(opening.headers['x-perilune-session'], 'fallback');
  assert.equal(workerOf(await ask(a, { messages: say('one'), ...control('late', 'open') })), workerOf(opening));
  assert.equal(all('opens').length, 1);
  assert.equal(await metric(a, 'perilune_session_store_up'), 0);
  assert.equal(await metric(a, 'perilune_session_store_journalled_total') >= 20, true);
  assert.equal((await get(`${a.admin}/sessions`)).status, 503);

  store.thaw();
  await Promise.all([a, b].map(up));
  for (const router of [a, b]) assert.equal(logged(router, 'store_down').length, 1, router.stderr);
  await until('what was bound meanwhile is written', async () => (await list(a)).length === 23);
  for (let i = 0; i < 20; i++) {
    const [x, y] = [await named(a, `new ${i}`), await named(b, `new ${i}`)];
    assert.equal(workerOf(x), workerOf(y));
    assert.equal(y.headers['x-perilune-session'], 'bound');
  }
  // each was bound by both: one wrote it, the other found it
  const [written, conflicts] = ['written', 'conflicts'].map((name) => async () => await metric(a, `perilune_session_store_${name}_total`)
    + await metric(b, `perilune_session_store_${name}_total`));
  await until('all is written or found', async () => await written() >= 21 && await conflicts() >= 21);
  const back = await ask(b, { messages: say('one', reply, 'two', reply, 'three'), ...control('backed') });
  assert.equal(workerOf(back), backed);
});

test('the store dies and comes back empty', async (t) => {
  const { store, engines, all, a, b } = await fleet(t, { redis: { cache_seconds: 0 } });
  const worker = workerOf(await named(a, 's'));
  workerOf(await ask(a, { messages: say('one'), ...control('backed', 'open', { timeout: 2 }) }));
  await store.kill();
  const during = await named(a, 's');
  assert.equal(workerOf(during), worker);
  assert.equal(during.headers['x-perilune-session'], 'fallback');
  await Promise.all([a, b].map((router) => router.log('store_down')));
  await store.start();
  await Promise.all([a, b].map((router) => router.log('store_up')));
  await Promise.all([a, b].map(up));
  // what was used meanwhile is there again, for all
  await until('it is written', async () => (await list(b)).some((s) => s.id === 's'));
  const after = await named(b, 's');
  assert.equal(workerOf(after), worker);
  assert.equal(after.headers['x-perilune-session'], 'bound');
  // the engine's session has no binding any more: who opened it closes it when its time is over
  await until('it is closed', () => all('closes').length > 0);
  assert.equal(engines.reduce((sum, e) => sum + e.sessions.size, 0), 0);
  for (const router of [a, b]) assert.equal(logged(router, 'store_down').length, 1, router.stderr);
});

test('a wrong password is said once, and not which; the right one may be in a file', async (t) => {
  const directory = scratch(t);
  const file = writeFile(directory, 'secret', 'right horse\n');
  const store = await startRedis(t, { password: 'right horse' });
  const engine = await sglang(t);
  const start = (redis) => startRouter(t, {
    engines: { e: engine.url },
    config: { sessions: { store: 'redis', redis: { url: store.url, connect_seconds: 20, timeout_seconds: 2, ...redis } } },
  });
  const wrong = await start({ password: 'battery staple' });
  const { message } = await wrong.log('store_down');
  assert.match(message, /refuses: (WRONGPASS|ERR invalid password)/);
  assert.equal((await named(wrong, 's')).headers['x-perilune-session'], 'fallback');
  const right = await start({ password_file: file });
  assert.equal((await named(right, 's')).headers['x-perilune-session'], 'new');
  assert.equal(await metric(right, 'perilune_session_store_up'), 1);
  // it has been tried several times by now
  await until('tried again', async () => /cmdstat_auth:.*failed_calls=(\d+)/.exec(await store.command('INFO', 'commandstats'))?.[1] > 8);
  assert.equal(logged(wrong, 'store_down').length, 1);
  assert.ok(!wrong.stderr.includes('battery') && !right.stderr.includes('horse'));
});

test('a store that is not there at the start is a warning', async (t) => {
  const directory = scratch(t);
  const engine = await sglang(t);
  const router = await startRouter(t, {
    engines: { e: engine.url },
    config: { sessions: { store: 'redis', redis: { url: `unix://${directory}/nobody` } } },
  });
  assert.equal((await router.log('store_down')).level, 'warn');
  assert.equal((await named(router, 's')).headers['x-perilune-session'], 'fallback');
  assert.equal((await get(`${router.url}/readyz`)).status, 200);
});
