// Sessions when something goes wrong in a turn: what the engine may have got is never taken for what
// it has not, a delta never goes where nobody knows what came before it, and clients are told so.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { until, metric, scratch, writeFile } from './lib/proc.mjs';
import { gate } from './lib/fake.mjs';
import { CHAT, control, delta, fleet, reply, say, sessions } from './lib/sessions.mjs';
import { del, post, send } from './lib/http.mjs';

const nothingOpen = (engines) => until('nothing is open on the engines', () => engines.every((e) => e.sessions.size === 0));

test('a client that leaves before the answer begins: what its turn brought is not taken for unsaid', async (t) => {
  const { engines: [engine], ask, router } = await fleet(t, { n: 1 });
  await ask({ messages: say('one'), ...control('s', 'open') });
  const held = gate();
  engine.onTurn = () => held.opened;
  const leaving = new AbortController();
  const left = send(`${router.url}${CHAT}`, {
    method: 'POST', body: { model: 'm', messages: say('one', reply, 'two'), ...control('s') }, signal: leaving.signal,
  });
  await engine.request(1);
  leaving.abort();
  await assert.rejects(left);
  await engine.when(() => engine.aborts.length, 'the abort');
  engine.onTurn = null;
  held.open(); // the abort came too late: the engine has the whole turn
  const next = await ask({ messages: say('one', reply, 'other'), ...control('s') });
  assert.equal(next.status, 200);
  assert.equal(next.headers['x-perilune-session'], 'reopened');
  // whole, into a session of its own: the old one holds 'two', which this conversation has not
  assert.deepEqual(engine.requests[2].json.messages, say('one', reply, 'other'));
  assert.equal(engine.requests[2].json.session_params.id, engine.opens[1].session_id);
  await until('the old one was closed', () => engine.closes.includes(engine.opens[0].session_id));
});

test('a client that leaves when it has read everything has had its turn', async (t) => {
  const { engines: [engine], ask, router } = await fleet(t, { n: 1 });
  await ask({ messages: say('one'), ...control('s', 'open') });
  const held = gate();
  engine.onDone = () => held.opened;
  const leaving = new AbortController();
  const res = await send(`${router.url}${CHAT}`, {
    method: 'POST', signal: leaving.signal, body: { model: 'm', messages: say('one', reply, 'two'), stream: true, ...control('s') },
  });
  res.on('error', () => {});
  let text = '';
  await new Promise((resolve) => { res.on('data', (data) => { text += data; if (text.includes('[DONE]')) resolve(); }); });
  leaving.abort();
  await engine.when(() => engine.aborts.length, 'the abort');
  held.open();
  const next = await ask({ messages: say('one', reply, 'two', reply, 'three'), ...control('s') });
  assert.equal(next.headers['x-perilune-session'], 'bound');
  assert.deepEqual(engine.requests[2].json.messages, say('three'));
  assert.equal(engine.opens.length, 1);
});

test('a delta is never answered by an engine that has not what came before it', async (t) => {
  const { engines, ask, router } = await fleet(t, { options: { info: { enable_streaming_session: false } } });
  const first = await ask({ messages: say('one'), ...delta('s', 'open') });
  assert.equal(first.headers['x-perilune-session'], 'router_only'); // no engine holds it
  for (const body of [delta('s'), delta('s', 'close'), { session_params: { id: 's' } }]) {
    const next = await ask({ messages: say('two'), ...body });
    assert.equal(next.status, 409, next.text);
    assert.equal(next.json.error.code, 'session_lost');
  }
  assert.equal(engines.reduce((n, e) => n + e.requests.length, 0), 1);
  assert.equal((await ask({ messages: say('one', reply, 'two'), ...control('s') })).status, 200);
  assert.equal(await metric(router, 'perilune_session_lost_total'), 3);
});

test('a policy cannot take a delta out of its session', async (t) => {
  const policy = writeFile(scratch(t), 'p.lua', `
    local pl = require "perilune"
    return { api = 1, name = "p", session = function(req, s)
      if s.event == pl.SESSION_TURN then return 5, pl.ROUTER_ONLY end return 5 end }`);
  const { engines: [engine], ask } = await fleet(t, { n: 1, policy });
  await ask({ messages: say('one'), ...delta('s', 'open') });
  assert.equal((await ask({ messages: say('two'), ...delta('s') })).status, 200);
  assert.equal(engine.requests[1].json.session_params.id, engine.opens[0].session_id);
});

test('an API without sessions at the engine refuses deltas', async (t) => {
  const { engines: [engine], ask, router } = await fleet(t, { n: 1 });
  await ask({ messages: say('one'), ...delta('s', 'open') });
  for (const path of ['/v1/messages', '/v1/responses', '/v1/embeddings']) {
    const answer = await post(`${router.url}${path}`, { model: 'm', max_tokens: 5, input: 'two', messages: say('two'), ...delta('s') });
    assert.equal(answer.status, 400, path);
    assert.match(answer.json.error.message, /whole conversation/);
  }
  assert.equal(engine.requests.length, 1);
});

test('an open through such an API is affinity alone: nothing is opened that it could not use', async (t) => {
  const { engines, router, ask } = await fleet(t, { policy: 'random' });
  const message = (action) => post(`${router.url}/v1/messages`, { model: 'm', max_tokens: 5, messages: say('one'), ...control('s', action) });
  const first = await message('open');
  assert.equal(first.status, 200, first.text);
  assert.equal(first.headers['x-perilune-session'], 'router_only');
  for (let i = 0; i < 8; i++) {
    const turn = await message();
    assert.equal(turn.headers['x-perilune-worker'], first.headers['x-perilune-worker']);
    assert.equal(turn.headers['x-perilune-session'], 'bound');
  }
  assert.equal(engines[0].opens.length + engines[1].opens.length, 0);
  assert.equal(await metric(router, 'perilune_session_untrimmed_total'), 0);
  // a chat may still have it opened
  const chat = await ask({ messages: say('one'), ...control('s', 'open') });
  assert.equal(chat.headers['x-perilune-session'], 'open');
  assert.equal(chat.headers['x-perilune-worker'], first.headers['x-perilune-worker']);
});

test('a session whose engine has left, and which no other can hold, stays with the next', async (t) => {
  const { engines, router, ask } = await fleet(t, { n: 3, policy: 'random' });
  const opened = await ask({ messages: say('one'), ...control('s', 'open') });
  const gone = opened.headers['x-perilune-worker'];
  for (const engine of engines) engine.onOpen = (body, res) => { engine.json(res, 404, {}); return true; };
  await del(`${router.admin}/engines/${gone}`);
  const next = await ask({ messages: say('one', reply, 'two'), ...control('s') });
  assert.equal(next.headers['x-perilune-session'], 'router_only');
  assert.notEqual(next.headers['x-perilune-worker'], gone);
  for (let i = 0; i < 10; i++) {
    const turn = await ask({ messages: say('one', reply, 'two'), ...control('s') });
    assert.equal(turn.headers['x-perilune-worker'], next.headers['x-perilune-worker']);
    assert.equal(turn.headers['x-perilune-session'], 'bound');
  }
  const [{ kind, worker }] = await sessions(router);
  assert.deepEqual([kind, worker], ['router_only', next.headers['x-perilune-worker']]);
  assert.equal((await ask({ messages: say('x'), ...delta('s') })).status, 409);
});

for (const [what, misbehave] of [
  ['resets', (entry, res) => res.socket.resetAndDestroy()],
  ['answers 500', (entry, res, engine) => engine.json(res, 500, { error: { message: 'no' } })],
]) {
  test(`an engine that ${what}: a delta is told to reopen, a whole conversation moves, and nothing stays open`, async (t) => {
    const { engines, ask, router } = await fleet(t, { config: { breaker: { failures: 100 } } });
    const holderOf = (answer) => engines[Number(answer.headers['x-perilune-worker'].slice(1))];
    const opened = await ask({ messages: say('one'), ...delta('d', 'open') });
    const holder = holderOf(opened);
    const normal = holder.handler;
    holder.handler = (entry, res) => misbehave(entry, res, holder);
    const turns = () => engines.reduce((n, e) => n + e.requests.length, 0);
    const before = turns();
    const refused = await ask({ messages: say('two'), ...delta('d') });
    assert.equal(refused.status, 409, refused.text);
    assert.equal(refused.json.error.code, 'session_lost');
    assert.equal(turns(), before + 1, 'sent once');
    holder.handler = normal;
    assert.equal((await ask({ messages: say('two'), ...delta('d') })).status, 409, 'it is closed');

    let full;
    let id = 0;
    do { // one on the same engine
      full = `full${id++}`;
    } while (holderOf(await ask({ messages: say('one'), ...control(full, 'open') })) !== holder);
    holder.handler = (entry, res) => misbehave(entry, res, holder);
    const moved = await ask({ messages: say('one', reply, 'two'), ...control(full) });
    assert.equal(moved.status, 200, moved.text);
    assert.equal(moved.headers['x-perilune-session'], 'rebound');
    const other = holderOf(moved);
    assert.notEqual(other, holder);
    assert.deepEqual(other.requests.at(-1).json.messages, say('one', reply, 'two'));
    assert.equal(other.requests.at(-1).json.session_params.id, other.opens.at(-1).session_id);
    holder.handler = normal;
    for (const { id: each } of await sessions(router)) await del(`${router.admin}/sessions/${each}`);
    await nothingOpen(engines);
  });
}

test('an engine that has lost its sessions: whole conversations go on in new ones, deltas are told to reopen', async (t) => {
  const { engines: [engine], ask, router } = await fleet(t, { n: 1 });
  const ids = ['full', 'streamed', 'opened', 'closed', 'delta'];
  for (const id of ids) await ask({ messages: say('one'), ...control(id, 'open') });
  engine.sessions.clear(); // as after a restart that nobody has noticed
  const whole = say('one', reply, 'two');
  const full = await ask({ messages: whole, ...control('full') });
  assert.equal(full.status, 200, full.text);
  assert.equal(full.headers['x-perilune-session'], 'reopened');
  const sent = engine.requests.at(-1).json;
  assert.deepEqual(sent.messages, whole);
  assert.equal(sent.session_params.id, engine.opens.at(-1).session_id);
  await ask({ messages: [...whole, ...say('', reply).slice(1), ...say('three')], ...control('full') });
  assert.deepEqual(engine.requests.at(-1).json.messages, say('three')); // trimmed again
  const streamed = await ask({ messages: whole, stream: true, ...control('streamed') });
  assert.equal(streamed.status, 200);
  assert.match(streamed.text, /\[DONE\]/);
  assert.doesNotMatch(streamed.text, /Invalid/);
  assert.equal((await ask({ messages: whole, ...control('opened', 'open') })).headers['x-perilune-session'], 'reopened');
  assert.equal((await ask({ messages: whole, ...control('closed', 'close') })).status, 200);
  const lost = await ask({ messages: say('two'), ...delta('delta') });
  assert.equal(lost.status, 409, lost.text);
  assert.equal(lost.json.error.code, 'session_lost');
  assert.deepEqual((await sessions(router)).map(({ id }) => id).sort(), ['full', 'opened', 'streamed']);
  await until('the others are closed', () => engine.sessions.size === 3);
  assert.equal(await metric(router, 'perilune_session_poisoned_total'), ids.length);
  assert.equal(await metric(router, 'perilune_session_closes_total', 'cause="poisoned"'), ids.length);
  await router.log('session_poisoned');
});

test('an engine that refuses a turn for other reasons, or every session, is passed on as it is', async (t) => {
  const { engines: [engine], ask } = await fleet(t, { n: 1 });
  await ask({ messages: say('one'), ...control('s', 'open') });
  const infer = engine.handler;
  for (const [status, text] of [[400, 'max_tokens is too large'], [422, 'x'.repeat(3 << 20)], [404, '']]) {
    engine.handler = (entry, res) => res.writeHead(status, { 'content-type': 'text/plain', 'x-of-the-engine': 'yes' }).end(text);
    const refused = await ask({ messages: say('one', reply, 'two'), ...control('s') });
    assert.equal(refused.status, status);
    assert.equal(refused.text, text);
    assert.equal(refused.headers['x-of-the-engine'], 'yes');
    assert.equal(refused.headers['x-perilune-session'], 'bound');
  }
  engine.handler = infer;
  const next = await ask({ messages: say('one', reply, 'two'), ...control('s') });
  assert.equal(next.headers['x-perilune-session'], 'bound'); // nothing had touched it
  assert.deepEqual(engine.requests.at(-1).json.messages, say('two'));
  engine.handler = (entry, res) => engine.json(res, 400, { error: { message: 'Invalid request session id' } });
  const before = engine.requests.length;
  const never = await ask({ messages: say('one', reply, 'two', reply, 'three'), ...control('s') });
  assert.equal(never.status, 400);
  assert.equal(engine.requests.length, before + 2); // once more, and not for ever
  await nothingOpen([engine]);
});

for (const [what, end] of [
  ['its client leaves', async ({ leaving, answer, res }) => { leaving.abort(); await assert.rejects(answer); res.end('}'); }],
  ['the engine breaks off', async ({ answer, res }) => { res.socket.resetAndDestroy(); assert.equal((await answer).statusCode, 200); (await answer).resume(); }],
]) {
  test(`a refusal of a session's turn is being read, and ${what}`, async (t) => {
    const { engines, ask, router } = await fleet(t);
    const opened = await ask({ messages: say('one'), ...control('s', 'open') });
    const engine = engines[Number(opened.headers['x-perilune-worker'][1])];
    const infer = engine.handler;
    const begun = gate();
    engine.handler = (entry, res) => {
      engine.handler = infer;
      res.writeHead(400, { 'content-type': 'application/json' });
      res.write('{"error":', () => begun.open(res));
    };
    const leaving = new AbortController();
    const answer = send(`${router.url}${CHAT}`, {
      method: 'POST', body: { model: 'm', messages: say('one', reply, 'two'), ...control('s') }, signal: leaving.signal,
    });
    await end({ leaving, answer, res: await begun.opened });
    const next = await ask({ messages: say('one', reply, 'two', reply, 'three'), ...control('s') });
    assert.equal(next.status, 200, next.text);
    await ask({ messages: say('x'), ...control('s', 'close') });
    await nothingOpen(engines);
  });
}

test('a turn that broke off and went on elsewhere without a session closes what it left', async (t) => {
  const { engines, ask } = await fleet(t, { config: { breaker: { failures: 100 } } });
  const first = await ask({ messages: say('one'), ...control('s', 'open') });
  const holder = engines[Number(first.headers['x-perilune-worker'].slice(1))];
  const other = engines.find((e) => e !== holder);
  other.onOpen = (body, res) => { other.json(res, 500, { error: { message: 'no' } }); return true; };
  holder.handler = (entry, res) => res.socket.resetAndDestroy();
  const next = await ask({ messages: say('one', reply, 'two'), ...control('s') });
  assert.equal(next.status, 200, next.text);
  assert.equal(next.headers['x-perilune-session'], 'router_only');
  // not to the engine that has failed this very request
  assert.equal(holder.requests.length, 2);
  assert.deepEqual(other.requests.at(-1).json.messages, say('one', reply, 'two'));
  await until('what nobody knows the state of was closed', () => holder.sessions.size === 0);
});

test('degrade is told how often an open was tried, and its retry costs of the budget', async (t) => {
  const policy = writeFile(scratch(t), 'p.lua', `
    local pl = require "perilune"
    local p = { api = 1, name = "p" }
    function p.degrade(req, fault)
      if fault.kind == pl.OPEN_FAILED then
        pl.log(("open failed, attempts %d, budget %s"):format(fault.attempts, tostring(fault.budget_left)))
        return pl.RETRY
      end
    end
    return p`);
  const { engines, ask, router } = await fleet(t, { n: 4, policy, threads: 1, config: { breaker: { failures: 100 } } });
  for (const e of engines) e.onOpen = (body, res) => { e.json(res, 500, { error: { message: 'no' } }); return true; };
  // the budget grows by a share of each request
  for (let i = 0; i < 10; i++) await ask({ messages: say('plain') });
  const answer = await ask({ messages: say('x'), ...control('s', 'open') });
  assert.equal(answer.status, 200, answer.text);
  assert.equal(answer.headers['x-perilune-session'], 'router_only');
  assert.match(router.stderr, /open failed, attempts 2, budget true/);
  assert.match(router.stderr, /open failed, attempts 3, budget true/);
});

// Plain requests that fill every engine of a fleet with cap 1, until their gates open.
async function fill({ engines, ask }) {
  const gates = engines.map(() => gate());
  engines.forEach((e, i) => { e.onTurn = () => gates[i].opened; });
  const before = engines.map((e) => e.requests.length);
  const plain = engines.map(() => ask({ messages: say('plain') }));
  await until('every engine is busy', () => engines.every((e, i) => e.requests.length > before[i]));
  engines.forEach((e) => { e.onTurn = null; });
  return { gates, plain };
}

test('a turn waits for its own worker, and costs nothing while another has room', async (t) => {
  const f = await fleet(t, { cap: 1, threads: 1 });
  const { engines, ask, router } = f;
  const worker = (await ask({ messages: say('one'), ...delta('s', 'open') })).headers['x-perilune-worker'];
  const at = Number(worker.slice(1));
  const { gates, plain } = await fill(f);
  const turn = ask({ messages: say('two'), ...delta('s') });
  await until('it waits', async () => await metric(router, 'perilune_queue_length') === 1);
  gates[1 - at].open();
  const decisions = () => metric(router, 'perilune_decisions_total');
  const [before, from] = [await decisions(), Date.now()];
  for (let i = 0; i < 20; i++) { // each frees room where the turn may not go
    assert.notEqual((await ask({ messages: say(`plain ${i}`) })).headers['x-perilune-worker'], worker);
  }
  const seconds = Math.ceil((Date.now() - from) / 1000);
  const spent = await decisions() - before - 20;
  assert.ok(spent <= 3 * 20 + 3 * seconds, `${spent} decisions in vain within ${seconds} s`);
  gates[at].open();
  assert.equal((await turn).headers['x-perilune-worker'], worker);
  assert.ok((await Promise.all(plain)).every((answer) => answer.status === 200));
});

test('a turn that waits for room while its engine is removed goes elsewhere', async (t) => {
  const f = await fleet(t, { cap: 1, config: { timeouts: { remove_seconds: 0.2 } } });
  const { ask, router } = f;
  const headers = { 'x-session-id': 'h' };
  const worker = (await ask({ messages: say('one') }, { headers })).headers['x-perilune-worker'];
  const { gates, plain } = await fill(f);
  const turn = ask({ messages: say('two') }, { headers });
  await until('it waits', async () => await metric(router, 'perilune_queue_length') === 1);
  assert.equal((await del(`${router.admin}/engines/${worker}`)).status, 200);
  await router.log('engine_removed');
  for (const each of gates) each.open();
  const answer = await turn;
  assert.equal(answer.status, 200, answer.text);
  assert.notEqual(answer.headers['x-perilune-worker'], worker);
  assert.deepEqual((await Promise.all(plain)).map((each) => each.status).sort(), [200, 503]);
  assert.equal(await metric(router, 'perilune_session_spills_total'), 0);
});

test('one engine alone that cannot open a session still serves', async (t) => {
  const { engines: [engine], ask } = await fleet(t, { n: 1 });
  engine.onOpen = (body, res) => { engine.json(res, 500, { error: { message: 'no' } }); return true; };
  const answer = await ask({ messages: say('one'), ...control('s', 'open') });
  assert.equal(answer.status, 200, answer.text);
  assert.equal(answer.headers['x-perilune-session'], 'router_only');
});

test('an engine that only fails at opens goes on serving, and is left out of sessions', async (t) => {
  const { engines, ask, router } = await fleet(t);
  engines[0].onOpen = (body, res) => { engines[0].json(res, 500, { error: { message: 'no' } }); return true; };
  for (let i = 0; i < 12; i++) {
    const answer = await ask({ messages: say('one'), ...control(`s${i}`, 'open') });
    assert.equal(answer.headers['x-perilune-session'], 'open', answer.text);
    assert.equal(answer.headers['x-perilune-worker'], 'e1');
  }
  assert.ok(engines[0].opens.length < 9, `${engines[0].opens.length}: three, and one more now and then`);
  // long: an error page, say
  engines[1].onOpen = (body, res) => { res.end('x'.repeat(100000)); return true; };
  const answers = await Promise.all(Array.from({ length: 24 }, (_, i) => ask({ messages: say('one'), ...control(`t${i}`, 'open') })));
  for (const { status, headers, text } of answers) {
    assert.equal(status, 200, text);
    assert.equal(headers['x-perilune-session'], 'router_only');
  }
  assert.equal(await metric(router, 'perilune_engine_breaker_opened_total'), 0);
  await router.log('session_open_failed');
  for (const engine of engines) engine.onOpen = null; // left alone for a while, not for ever
  let n = 0;
  await until('both are used again', async () => {
    await ask({ messages: say('one'), ...control(`u${n++}`, 'open') });
    return engines.every((engine) => engine.sessions.size > 12);
  }, { timeout: 60000 });
});

test('a session that was closed when its engine left is not missed when it expires', async (t) => {
  const { engines, ask, router } = await fleet(t, { config: { timeouts: { remove_seconds: 0.2 } } });
  const { headers } = await ask({ messages: say('one'), ...control('s', 'open', { timeout: 2 }) });
  const worker = headers['x-perilune-worker'];
  await del(`${router.admin}/engines/${worker}`);
  await until('it was closed', () => engines[Number(worker.slice(1))].sessions.size === 0);
  await until('it has expired', async () => (await sessions(router)).length === 0);
  await until('that was noticed', async () => await metric(router, 'perilune_session_closes_total', 'cause="expired"') === 1);
  assert.equal(await metric(router, 'perilune_session_close_given_up_total'), 0);
});

test('every member that is edited at once', async (t) => {
  const { engines: [engine], ask } = await fleet(t, {
    n: 1, options: { models: ['m'], info: { perilune_engine: { retention: true }, enable_priority_scheduling: true } },
    policy: writeFile(scratch(t), 'p.lua', `return { api = 1, name = "p", retain = function() return 9, 2 end,
      admit = function() return require("perilune").SHRINK, 3 end }`),
  });
  const pins = {
    routed_dp_rank: 0, data_parallel_rank: 0, disagg_prefill_dp_rank: 0, bootstrap_host: 'h', bootstrap_port: 1,
    bootstrap_room: 1, kv_transfer_params: {},
  };
  const rest = { max_tokens: 10, max_completion_tokens: 10, stream: true, tools: [], system: 'x', priority: 1, extra_args: {} };
  await ask({ ...pins, ...rest, messages: say('one'), ...control('s', 'open') });
  const answer = await ask({ ...pins, ...rest, messages: say('one', reply, 'two'), ...control('s') });
  assert.equal(answer.status, 200, answer.text);
  const got = engine.requests[1].json;
  assert.equal(got.session_params.id, engine.opens[0].session_id);
  assert.deepEqual(got.messages, say('two'));
  assert.deepEqual(got.extra_args, { retention_seconds: 9 });
  assert.deepEqual([got.priority, got.max_tokens, got.max_completion_tokens], [2, 3, 3]);
  assert.ok(got.stream_options.include_usage);
  for (const name of [...Object.keys(pins), 'nvext']) assert.equal(got[name], undefined, name);
});
