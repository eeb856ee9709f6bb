// Sessions: the ways in, affinity, engine-backed sessions and what engines are told.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { until, metric, scratch, writeFile } from './lib/proc.mjs';
import { gate } from './lib/fake.mjs';
import { control, fleet, reply, say, sessions } from './lib/sessions.mjs';
import { get, post, del, send } from './lib/http.mjs';

const CHAT = '/v1/chat/completions';

test('open, turns, close: the engine holds the session from before the first turn to after the last', async (t) => {
  const { engines, router, ask, all } = await fleet(t);
  const first = await ask({ messages: say('one'), ...control('sub-1', 'open', { timeout: 60 }) });
  assert.equal(first.status, 200, first.text);
  assert.equal(first.headers['x-perilune-session'], 'open');
  const holder = engines.find((e) => e.opens.length);
  const other = engines.find((e) => e !== holder);
  assert.equal(all('opens').length, 1);
  const { session_id: name, ...opened } = holder.opens[0];
  assert.deepEqual(opened, { streaming: true, timeout: 90, capacity_of_str_len: 65536 });
  assert.match(name, /^sub-1~[0-9a-f]{16}$/);
  assert.deepEqual(holder.requests[0].json.session_params, { id: name });
  assert.equal(holder.requests[0].json.nvext, undefined);
  const [listed] = await sessions(router);
  assert.equal(listed.id, 'sub-1');
  assert.equal(listed.kind, 'engine_backed');
  assert.equal(listed.worker, first.headers['x-perilune-worker']);
  assert.equal(listed.ttl_seconds, 60);

  // the whole conversation is sent again: only what is new reaches the engine
  const second = await ask({ messages: say('one', reply, 'two'), ...control('sub-1') });
  assert.equal(second.headers['x-perilune-worker'], first.headers['x-perilune-worker']);
  assert.equal(second.headers['x-perilune-reason'], 'session');
  assert.deepEqual(holder.requests[1].json.messages, say('two'));
  assert.deepEqual(holder.requests[1].json.session_params, { id: name });
  const third = await ask({ messages: say('one', reply, 'two', reply, 'three'), stream: true, ...control('sub-1', 'close') });
  assert.equal(third.status, 200);
  assert.deepEqual(holder.requests[2].json.messages, say('three'));
  await holder.when(() => holder.closes.length, 'the close');
  assert.deepEqual(holder.order, [`open ${name}`, ...[1, 2, 3].flatMap(() => [`turn ${name}`, `end ${name}`]), `close ${name}`]);
  assert.equal(other.requests.length, 0);
  await until('nothing held', async () => (await sessions(router)).length === 0
    && await metric(router, 'perilune_worker_sessions') === 0);
  assert.equal(await metric(router, 'perilune_session_trimmed_total'), 2);
  assert.equal(await metric(router, 'perilune_session_closes_total', 'cause="client"'), 1);
});

test('a conversation that was rewritten goes to its worker, but not into the engine session', async (t) => {
  const { engines, router, ask } = await fleet(t);
  const first = await ask({ messages: say('one'), ...control('s', 'open') });
  const second = await ask({ messages: say('ONE', reply, 'two'), ...control('s') });
  assert.equal(second.headers['x-perilune-worker'], first.headers['x-perilune-worker']);
  assert.equal(second.headers['x-perilune-session'], 'outside');
  const holder = engines.find((e) => e.opens.length);
  assert.deepEqual(holder.requests[1].json.messages, say('ONE', reply, 'two'));
  assert.equal(holder.requests[1].json.session_params, undefined);
  await router.log('session_untrimmed');
  assert.equal(await metric(router, 'perilune_session_untrimmed_total'), 1);
});

test('deltas go as they are; one for a session that is not open is refused', async (t) => {
  const { engines, ask } = await fleet(t);
  await ask({ messages: say('one'), ...control('s', 'open', { history: 'delta' }) });
  await ask({ messages: say('two'), ...control('s', undefined, { history: 'delta' }) });
  const holder = engines.find((e) => e.opens.length);
  assert.deepEqual(holder.requests.map((r) => r.json.messages), [say('one'), say('two')]);
  assert.ok(holder.requests.every((r) => r.json.session_params.id === holder.opens[0].session_id));
  const unknown = await ask({ messages: say('two'), ...control('other', undefined, { history: 'delta' }) });
  assert.equal(unknown.status, 409);
  assert.equal(unknown.json.error.code, 'session_lost');
  assert.match(unknown.json.error.message, /reopen/);
});

test('bind and headers: affinity without the engine', async (t) => {
  const { router, ask, all } = await fleet(t, { n: 3, policy: 'round_robin' });
  const cases = [
    ['nvext bind', () => ask({ messages: say('x'), ...control('b1', 'bind') }), () => ask({ messages: say('x'), ...control('b1') })],
    ...['x-dynamo-session-id', 'x-claude-code-session-id', 'session-id', 'x-session-id', 'x-smg-routing-key']
      .map((name) => [name, ...Array(2).fill(() => ask({ messages: say('x') }, { headers: { [name]: `id of ${name}` } }))]),
    ['session_id', ...Array(2).fill(() => ask({ messages: say('x'), session_id: 'tag' }))],
  ];
  for (const [name, first, then] of cases) {
    const { headers: { 'x-perilune-worker': worker } } = await first();
    for (let i = 0; i < 4; i++) {
      const turn = await then();
      assert.equal(turn.status, 200, turn.text);
      assert.equal(turn.headers['x-perilune-worker'], worker, name);
    }
  }
  assert.equal(all('opens').length, 0);
  const list = await sessions(router);
  assert.equal(list.length, cases.length);
  assert.ok(list.every((s) => s.kind === 'router_only' && s.turns >= 4));
});

test('the headers that name a session are the configuration\'s to choose', async (t) => {
  const policy = writeFile(scratch(t), 'p.lua', `
    return { api = 1, name = "p", route = function(req)
      local s = req.session
      return 0, s and (s:id() .. "." .. (s:parent_id() or "none") .. (s.final and ".final" or "")) or "unnamed" end }`);
  const { ask } = await fleet(t, { n: 1, policy, config: { sessions: { headers: [
    'X-Correlation-ID', { id: 'x-run', parent: 'x-parent-run', final: 'x-last', child: 'x-step' }] } } });
  const reason = async (headers) => (await ask({ messages: say('x') }, { headers })).headers['x-perilune-reason'];
  assert.equal(await reason({ 'x-correlation-id': 'c', 'x-last': '1' }), 'c.none');
  assert.equal(await reason({ 'x-run': 'r', 'x-parent-run': 'q', 'x-last': 'true' }), 'r.q.final');
  assert.equal(await reason({ 'x-run': 'r2', 'x-step': 's' }), 's.r2');
  assert.equal(await reason({ 'x-correlation-id': 'd', 'x-run': 'r3' }), 'd.none'); // in their order
  assert.equal(await reason({ 'x-session-id': 'z' }), 'unnamed'); // not in the list any more
});

test('a session ends with its final turn', async (t) => {
  const { router, ask } = await fleet(t);
  const headers = { 'x-dynamo-session-id': 'h', 'x-dynamo-parent-session-id': 'p' };
  await ask({ messages: say('x') }, { headers });
  assert.equal((await sessions(router)).length, 1);
  await ask({ messages: say('x') }, { headers: { ...headers, 'x-dynamo-session-final': 'true' } });
  await until('it is gone', async () => (await sessions(router)).length === 0);
});

test('the body wins over a header, and it is counted', async (t) => {
  const { router, ask } = await fleet(t);
  await ask({ messages: say('x'), ...control('body', 'bind') }, { headers: { 'x-session-id': 'header' } });
  assert.deepEqual((await sessions(router)).map((s) => s.id), ['body']);
  assert.equal(await metric(router, 'perilune_session_conflicts_total'), 1);
});

test('two tenants with one id never meet', async (t) => {
  const { engines, router } = await fleet(t, {
    config: { api_keys: [{ key: 'ka', tenant: 'a' }, { key: 'kb', tenant: 'b' }] },
  });
  const ask = (key, body) => post(`${router.url}${CHAT}`, { model: 'm', messages: say('x'), ...body }, { headers: { authorization: `Bearer ${key}` } });
  assert.equal((await ask('ka', control('same', 'open'))).status, 200);
  const other = await ask('kb', control('same', undefined, { history: 'delta' }));
  assert.equal(other.status, 409);
  assert.equal((await ask('kb', control('same', 'open'))).status, 200);
  const names = engines.flatMap((e) => e.opens.map((o) => o.session_id));
  assert.equal(new Set(names).size, 2);
  assert.equal((await ask('kb', control('same', 'close'))).status, 200);
  await until('b closed', async () => engines.flatMap((e) => e.closes).length === 1);
  assert.deepEqual((await sessions(router)).map((s) => s.tenant), ['a']);
});

test('a session that is closed while it is being opened does not stay open', async (t) => {
  const { engines: [engine], ask, router } = await fleet(t, { n: 1 });
  const closes = {
    native: () => post(`${router.url}/close_session`, { session_id: 'native' }),
    turn: () => ask({ messages: say('bye'), ...control('turn', 'close') }),
  };
  for (const [id, close] of Object.entries(closes)) {
    const held = gate();
    engine.onOpen = () => held.opened;
    const opens = engine.opens.length;
    const opening = ask({ messages: say('one'), ...control(id, 'open') });
    await engine.when(() => engine.opens.length > opens, 'the open');
    const closing = close();
    await until('the close waits', async () => await metric(router, 'perilune_session_turns_waited_total') === opens + 1);
    held.open();
    assert.equal((await opening).headers['x-perilune-session'], 'open');
    assert.equal((await closing).status, 200);
    await until('it is closed', () => engine.sessions.size === 0);
    assert.deepEqual(await sessions(router), []);
  }
});

test('/close_session waits for no turn; the engine is told when the one under way has ended', async (t) => {
  const { engines: [engine], ask, router } = await fleet(t, { n: 1, config: { sessions: { waiting_turns: 1 } } });
  await ask({ messages: say('one'), ...control('s', 'open') });
  const held = gate();
  engine.onTurn = () => held.opened;
  const running = ask({ messages: say('two'), ...control('s', undefined, { history: 'delta' }) });
  await engine.request(1);
  const waiting = ask({ messages: say('three'), ...control('s', undefined, { history: 'delta' }) });
  await until('one waits', async () => await metric(router, 'perilune_session_turns_waited_total') === 1);
  const closed = await post(`${router.url}/close_session`, { session_id: 's' });
  assert.equal(closed.status, 200, closed.text);
  assert.equal(closed.text, '');
  assert.deepEqual(await sessions(router), []);
  assert.equal(engine.closes.length, 0);
  held.open();
  assert.equal((await running).status, 200);
  assert.equal((await waiting).json.error.code, 'session_lost');
  await engine.when(() => engine.sessions.size === 0, 'the close');
  const id = engine.opens[0].session_id;
  assert.deepEqual(engine.order, [`open ${id}`, `turn ${id}`, `end ${id}`, `turn ${id}`, `end ${id}`, `close ${id}`]);
  assert.equal(await metric(router, 'perilune_session_closes_total', 'cause="client"'), 1);
});

test("SGLang's own calls: opened, used and closed through the router", async (t) => {
  const { engines, router, ask } = await fleet(t);
  const opened = await post(`${router.url}/open_session`, { capacity_of_str_len: 1000, session_id: 'n', streaming: true, timeout: 50 });
  assert.equal(opened.status, 200, opened.text);
  assert.equal(opened.json, 'n');
  const holder = engines.find((e) => e.opens.length);
  assert.equal(holder.opens[0].timeout, 80);
  const again = await post(`${router.url}/open_session`, { capacity_of_str_len: 1000, session_id: 'n', streaming: true });
  assert.equal(again.status, 400);
  for (const text of ['one', 'two']) {
    const turn = await ask({ messages: say(text), session_params: { id: 'n', rid: null } });
    assert.equal(turn.status, 200, turn.text);
  }
  assert.deepEqual(holder.requests.map((r) => r.json.session_params),
    Array(2).fill({ id: holder.opens[0].session_id, rid: null }));
  const closed = await post(`${router.url}/close_session`, { session_id: 'n' });
  assert.equal(closed.status, 200);
  assert.equal(closed.text, '');
  await holder.when(() => holder.closes.length === 1, 'the close');
  assert.equal((await post(`${router.url}/close_session`, { session_id: 'n' })).status, 200, 'idempotent');
  assert.equal((await ask({ messages: say('three'), session_params: { id: 'n' } })).status, 409);
  const made = await post(`${router.url}/open_session`, { capacity_of_str_len: 1000, streaming: true });
  assert.equal(typeof made.json, 'string');
  assert.equal((await post(`${router.url}/close_session`, { session_id: made.json })).status, 200);
});

test('turns of one engine session run one after the other; too many are refused', async (t) => {
  const { engines, ask, router } = await fleet(t, { n: 1, config: { sessions: { waiting_turns: 2 } } });
  const [engine] = engines;
  await ask({ messages: say('one'), ...control('s', 'open', { history: 'delta' }) });
  const held = gate();
  engine.onTurn = () => held.opened;
  const delta = control('s', undefined, { history: 'delta' });
  const turns = [ask({ messages: say('a'), ...delta })];
  await engine.request(1);
  const before = await metric(router, 'perilune_session_turns_waited_total');
  turns.push(ask({ messages: say('b'), ...delta }), ask({ messages: say('c'), ...delta }));
  await until('two wait', async () => await metric(router, 'perilune_session_turns_waited_total') === before + 2);
  const refused = await ask({ messages: say('d'), ...delta });
  assert.equal(refused.status, 409);
  assert.equal(refused.json.error.code, 'session_busy');
  assert.equal(engine.requests.length, 2);
  held.open();
  for (const turn of await Promise.all(turns)) assert.equal(turn.status, 200, turn.text);
  assert.equal(engine.requests.length, 4);
});

test('a client that leaves in the middle of a turn: aborted, and the next turn waits for its end', async (t) => {
  const { engines, ask, router } = await fleet(t, { n: 1 });
  const [engine] = engines;
  await ask({ messages: say('one'), ...control('s', 'open', { history: 'delta' }) });
  const held = gate();
  engine.onTurn = () => held.opened;
  const delta = { model: 'm', ...control('s', undefined, { history: 'delta' }) };
  const leaving = new AbortController();
  const left = send(`${router.url}${CHAT}`, { method: 'POST', body: { ...delta, messages: say('two') }, signal: leaving.signal });
  await engine.request(1);
  leaving.abort();
  await assert.rejects(left);
  await engine.when(() => engine.aborts.length, 'the abort');
  const before = await metric(router, 'perilune_session_turns_waited_total');
  const next = ask({ ...delta, messages: say('three') });
  await until('it waits', async () => await metric(router, 'perilune_session_turns_waited_total') === before + 1);
  assert.equal(engine.requests.length, 2);
  held.open();
  assert.equal((await next).status, 200);
  assert.equal(engine.requests.length, 3);
});

test('no engine can hold a session: it is said once, and requests go on with affinity', async (t) => {
  const { router, ask, all } = await fleet(t, { n: 3, options: { info: { enable_streaming_session: false } } });
  const first = await ask({ messages: say('one'), ...control('s', 'open') });
  assert.equal(first.status, 200);
  assert.equal(first.headers['x-perilune-session'], 'router_only');
  for (let i = 0; i < 5; i++) {
    const turn = await ask({ messages: say('one', reply, 'two'), ...control('s') });
    assert.equal(turn.headers['x-perilune-worker'], first.headers['x-perilune-worker']);
  }
  assert.equal(all('opens').length, 0);
  await router.log('no_session_engine');
  assert.equal(await metric(router, 'perilune_degraded_no_session_engine_total'), 1);
  let more = 0;
  for (const end = Date.now() + 2200; Date.now() < end; more++)
    assert.equal((await ask({ messages: say('one'), ...control(`t${more}`, 'open') })).status, 200);
  assert.equal(await metric(router, 'perilune_degraded_no_session_engine_total'), 1 + more);
  assert.equal(router.logs.filter(({ event }) => event === 'no_session_engine').length, 1, 'for as long as it is so');
  const native = await post(`${router.url}/open_session`, { capacity_of_str_len: 1, streaming: true });
  assert.equal(native.status, 503);
});

test('the store is full: router-only sessions go, the least recently used first; engines\' own stay, and no more are opened', async (t) => {
  const { ask, router, engines: [engine] } = await fleet(t, { n: 1, config: { sessions: { max: 3 }, threads: 1 } });
  const named = (id) => ask({ messages: say('x') }, { headers: { 'x-session-id': id } });
  for (const id of ['a', 'b', 'c', 'a', 'd']) assert.equal((await named(id)).status, 200);
  const ids = async () => (await sessions(router)).map(({ id }) => id).sort();
  assert.deepEqual(await ids(), ['a', 'c', 'd']);
  assert.equal(await metric(router, 'perilune_sessions_evicted_total'), 1);
  for (const id of ['e', 'f', 'g']) assert.equal((await ask({ messages: say('x'), ...control(id, 'open') })).status, 200);
  const refused = await ask({ messages: say('x'), ...control('h', 'open') });
  assert.equal(refused.status, 503, refused.text);
  assert.equal(refused.json.error.code, 'session_limit');
  assert.equal(refused.headers['retry-after'], '5');
  assert.equal(refused.headers['x-perilune-session'], undefined);
  await until('what was opened for it is closed', () => engine.sessions.size === 3);
  assert.deepEqual(await ids(), ['e', 'f', 'g']);
  assert.equal((await named('i')).status, 200); // without affinity
  assert.deepEqual(await ids(), ['e', 'f', 'g']);
});

test('an engine that learns sessions later is used for them', async (t) => {
  const { engines, ask } = await fleet(t, { n: 1, options: { info: { enable_streaming_session: false } } });
  assert.equal((await ask({ messages: say('x'), ...control('a', 'open') })).headers['x-perilune-session'], 'router_only');
  engines[0].info.enable_streaming_session = true;
  let n = 0;
  await until('it is used', async () => (await ask({ messages: say('x'), ...control(`b${n++}`, 'open') })).headers['x-perilune-session'] === 'open');
});

test('an open that fails is tried once more elsewhere; after that the policy decides', async (t) => {
  const { engines, ask, all, router } = await fleet(t, { config: { sessions: { open_timeout_seconds: 0.3 } } });
  const held = gate();
  t.after(() => held.open());
  engines[0].onOpen = async () => { await held.opened; };
  for (let i = 0; i < 4; i++) {
    const answer = await ask({ messages: say('x'), ...control(`s${i}`, 'open') });
    assert.equal(answer.status, 200, answer.text);
    assert.equal(answer.headers['x-perilune-session'], 'open');
    assert.equal(answer.headers['x-perilune-worker'], 'e1');
  }
  // what may have been opened all the same is closed
  await engines[0].when(() => engines[0].closes.length >= engines[0].opens.length, 'closes of what timed out');
  engines[1].onOpen = (body, res) => { engines[1].json(res, 500, { error: { message: 'no' } }); return true; };
  const both = await ask({ messages: say('x'), ...control('last', 'open') });
  assert.equal(both.status, 200, both.text);
  assert.equal(both.headers['x-perilune-session'], 'router_only');
  // the first may have failed so often by now that it is not asked any more
  assert.equal(await metric(router, 'perilune_degraded_open_failed_total')
    + await metric(router, 'perilune_degraded_no_session_engine_total'), 1);
  assert.ok(all('opens').length >= 6);
});

test('the worker of a session goes: whole conversations move, deltas are refused', async (t) => {
  const { engines, router, ask } = await fleet(t);
  const first = await ask({ messages: say('one'), ...control('full', 'open') });
  const worker = first.headers['x-perilune-worker'];
  const holder = engines[Number(worker.slice(1))];
  const other = engines.find((e) => e !== holder);
  let id = 0;
  let delta;
  do { // one more on the same engine, for a client that sends deltas
    delta = `delta${id++}`;
  } while ((await ask({ messages: say('one'), ...control(delta, 'open', { history: 'delta' }) })).headers['x-perilune-worker'] !== worker);
  const before = other.opens.length;
  assert.equal((await del(`${router.admin}/engines/${worker}`)).status, 200);
  const refused = await ask({ messages: say('two'), ...control(delta, undefined, { history: 'delta' }) });
  assert.equal(refused.status, 409, refused.text);
  const moved = await ask({ messages: say('one', reply, 'two'), ...control('full') });
  assert.equal(moved.status, 200, moved.text);
  assert.notEqual(moved.headers['x-perilune-worker'], worker);
  assert.equal(other.opens.length, before + 1);
  assert.deepEqual(other.requests.at(-1).json.messages, say('one', reply, 'two'));
  assert.deepEqual(other.requests.at(-1).json.session_params, { id: other.opens.at(-1).session_id });
  await until('what it held was closed', async () => holder.sessions.size === 0);
});

test('sessions that nobody uses are closed on their engine', async (t) => {
  const { engines, ask, router } = await fleet(t, { n: 1 });
  await ask({ messages: say('x'), ...control('s', 'open', { timeout: 1 }) });
  await engines[0].when(() => engines[0].closes.length === 1, 'the close after a second', 30000);
  assert.equal(engines[0].closes[0], engines[0].opens[0].session_id);
  assert.equal((await sessions(router)).length, 0);
  assert.equal(await metric(router, 'perilune_session_closes_total', 'cause="expired"'), 1);
});

test('a router that ends closes what it opened', async (t) => {
  const { engines, ask, router } = await fleet(t, { n: 1 });
  await ask({ messages: say('x'), ...control('s', 'open') });
  await router.stop();
  assert.deepEqual(engines[0].closes, [engines[0].opens[0].session_id]);
});

test('the admin API lists, shows and closes sessions', async (t) => {
  const { engines, ask, router } = await fleet(t, { n: 1 });
  await ask({ messages: say('x'), ...control('a/b c', 'open') });
  await ask({ messages: say('x'), ...control('plain', 'bind') });
  const page = (await get(`${router.admin}/sessions?limit=1000`)).json;
  assert.deepEqual(page.sessions.map((s) => s.id).sort(), ['a/b c', 'plain']);
  assert.equal(page.next_cursor, null);
  const one = await get(`${router.admin}/sessions/a%2Fb%20c`);
  assert.equal(one.json.worker, 'e0');
  assert.equal(one.json.held_tokens, 16); // 10 of the prompt, 6 of the answer
  assert.equal((await get(`${router.admin}/sessions/plain`)).json.held_tokens, null);
  assert.equal((await get(`${router.admin}/sessions/none`)).status, 404);
  assert.equal((await del(`${router.admin}/sessions/a%2Fb%20c`)).status, 200);
  assert.equal((await del(`${router.admin}/sessions/a%2Fb%20c`)).status, 404);
  await engines[0].when(() => engines[0].closes.length === 1, 'the close');
  assert.equal((await get(`${router.admin}/sessions?limit=x`)).status, 400);
  for (const method of [get, del]) { // names that no session can have
    assert.equal((await method(`${router.admin}/sessions/${'x'.repeat(257)}`)).status, 400);
    assert.equal((await method(`${router.admin}/sessions/${'x'.repeat(7000)}`)).status, 400);
    assert.equal((await method(`${router.admin}/sessions/x?tenant=${'y'.repeat(7000)}`)).status, 400);
  }
});

test('bad input: each has its answer, and nothing is held', async (t) => {
  const { router, ask, all } = await fleet(t, { n: 1 });
  const bad = [
    [control('s', 'destroy'), /action/],
    [{ nvext: { session_control: { action: 'open' } } }, /session_id/],
    [control('', 'open'), /session_id/],
    [control('x'.repeat(257), 'open'), /256/],
    [control('s', 'open', { timeout: 0 }), /timeout/],
    [control('s', 'open', { timeout: -1 }), /timeout/],
    [control('s', 'open', { timeout: 1e9 }), /timeout/],
    [control('s', 'open', { timeout: 'x' }), /timeout/],
    [{ nvext: 5 }, /nvext/],
    [{ session_id: 'a', session_params: { id: 'b' } }, /session_params/],
    [{ session_params: { id: '' } }, /id/],
  ];
  for (const [extra, message] of bad) {
    const answer = await ask({ messages: say('x'), ...extra });
    assert.equal(answer.status, 400, JSON.stringify(extra).slice(0, 80));
    assert.match(answer.json.error.message, message);
  }
  assert.equal(all('requests').length, 0);
  assert.equal((await sessions(router)).length, 0);
  assert.equal((await ask({ messages: say('x'), ...control('never', 'close') })).status, 200);
  assert.equal((await ask({ messages: say('x'), ...control('twice', 'open') })).status, 200);
  assert.equal((await ask({ messages: say('x', reply, 'y'), ...control('twice', 'open') })).status, 200);
  const other = await ask({ messages: say('x'), ...control('twice', 'open', { timeout: 17 }) });
  assert.equal(other.status, 409);
  assert.equal(other.json.error.code, 'session_exists');
  assert.equal(all('opens').length, 1);
  const messages = await post(`${router.url}/v1/messages`, { model: 'm', max_tokens: 1, messages: say('x'), ...control('s', 'destroy') });
  assert.equal(messages.status, 400);
  assert.equal(messages.json.type, 'error');
});

test('a poisoned session is closed and said', async (t) => {
  const { engines, ask, router } = await fleet(t, { n: 1 });
  await ask({ messages: say('one'), ...control('s', 'open', { history: 'delta' }) });
  engines[0].sessions.get(engines[0].opens[0].session_id).active = true; // it lost track of a turn
  const answer = await ask({ messages: say('two'), ...control('s', undefined, { history: 'delta' }) });
  assert.equal(answer.status, 409);
  assert.equal(answer.json.error.code, 'session_lost');
  await engines[0].when(() => engines[0].closes.length === 1, 'the close');
  await router.log('session_poisoned');
  assert.equal(await metric(router, 'perilune_session_closes_total', 'cause="poisoned"'), 1);
});

test('a policy decides over sessions: kind, time to live, retention, what expires', async (t) => {
  const policy = writeFile(scratch(t), 'p.lua', `
    local pl = require "perilune"
    local p = { api = 1, name = "p" }
    function p.session(req, s) if req:session_id() == "big" then return 7, pl.ENGINE_BACKED end return 9 end
    function p.score(req, w) return (req.session and req.session.bound_slot == w.slot) and 0 or 1 end
    function p.retain(req, w) return 12.5, 3 end
    return p`);
  const { engines, ask, router } = await fleet(t, {
    n: 1, policy, options: { info: { perilune_engine: { retention: true }, enable_priority_scheduling: true } },
  });
  await ask({ messages: say('x') }, { headers: { 'x-session-id': 'big' } });
  assert.equal(engines[0].opens[0].timeout, 37);
  assert.deepEqual(engines[0].requests[0].json.extra_args, { retention_seconds: 12.5 });
  assert.equal(engines[0].requests[0].json.priority, 3);
  await ask({ messages: say('x'), extra_args: { a: 1 } }, { headers: { 'x-session-id': 'small' } });
  assert.deepEqual(engines[0].requests[1].json.extra_args, { retention_seconds: 12.5, a: 1 });
  await ask({ messages: say('x'), extra_args: [1] });
  assert.deepEqual(engines[0].requests[2].json.extra_args, [1]);
  assert.equal(await metric(router, 'perilune_retention_skipped_total'), 1);
  assert.deepEqual((await sessions(router)).map((s) => [s.id, s.ttl_seconds, s.kind]).sort(),
    [['big', 7, 'engine_backed'], ['small', 9, 'router_only']]);
});

test('the official client keeps a session over its turns', async (t) => {
  const { ask, router, engines } = await fleet(t);
  const client = new OpenAI({ apiKey: 'x', baseURL: `${router.url}/v1`, maxRetries: 0 });
  const messages = say('one');
  for (let turn = 0; turn < 4; turn++) {
    const action = turn === 0 ? 'open' : turn === 3 ? 'close' : undefined;
    const stream = await client.chat.completions.create({ model: 'm', messages, stream: true, ...control('oa', action) });
    let text = '';
    for await (const part of stream) text += part.choices[0]?.delta?.content ?? '';
    messages.push({ role: 'assistant', content: text }, { role: 'user', content: `next ${turn}` });
  }
  const holder = engines.find((e) => e.opens.length);
  assert.deepEqual(holder.requests.map((r) => r.json.messages.length), [1, 1, 1, 1]);
  await holder.when(() => holder.closes.length === 1, 'the close');
  assert.equal((await ask({ messages: say('x') })).status, 200);
});
