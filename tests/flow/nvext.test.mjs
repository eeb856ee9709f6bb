// What nvext asks for beside sessions: a worker and a rank, for clients that may choose them, and
// hints. What only one worker's session makes sense of goes to no other, whoever asks for it.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { metric, scratch, startEngine, startRouter, until, usable, writeFile } from './lib/proc.mjs';
import { CHAT, control, delta, fleet, say } from './lib/sessions.mjs';
import { sglang } from './lib/sglang.mjs';
import { get, post } from './lib/http.mjs';
import { fakeEngine } from './lib/fake.mjs';

const trusted = { trusted_clients: ['127.0.0.0/8'] };

test("nvext's worker and rank are a trusted client's to choose, and removed from others", async (t) => {
  const { engines, ask, router } = await fleet(t, { config: trusted });
  const slot = async (name) => (await get(`${router.admin}/engines/${name}`)).json.workers[0].slot;
  for (const [i, name] of ['e0', 'e1'].entries()) {
    const pin = { nvext: { backend_instance_id: await slot(name), dp_rank: 0 } };
    for (let n = 0; n < 3; n++) {
      const answer = await ask({ messages: say('one'), ...pin });
      assert.equal(answer.headers['x-perilune-worker'], name);
      assert.equal(answer.headers['x-perilune-reason'], 'pinned');
    }
    assert.equal(engines[i].requests.at(-1).json.nvext, undefined);
    assert.equal((await ask({ messages: say('one'), nvext: { ...pin.nvext, dp_rank: 7 } })).status, 503);
  }
  const others = await fleet(t, {});
  const answer = await others.ask({ messages: say('one'), nvext: { backend_instance_id: 99, dp_rank: 7 } });
  assert.equal(answer.status, 200);
  assert.notEqual(answer.headers['x-perilune-reason'], 'pinned');
  assert.equal(await metric(others.router, 'perilune_pins_removed_total'), 2);
});

test('a request that is pinned by number is not sent to its engine again after that has failed', async (t) => {
  const { engines, ask } = await fleet(t, { config: trusted });
  for (const engine of engines) engine.handler = (entry, res) => engine.json(res, 500, { error: { message: 'no' } });
  assert.equal((await ask({ messages: say('one'), nvext: { dp_rank: 0 } })).status, 500);
  assert.equal(engines[0].requests.length + engines[1].requests.length, 1);
});

test('a delta that is pinned elsewhere is refused, and its session goes on', async (t) => {
  const { engines, ask, router } = await fleet(t, { config: trusted });
  const opened = await ask({ messages: say('one'), ...control('s', 'open') });
  const holder = opened.headers['x-perilune-worker'], other = holder === 'e0' ? 'e1' : 'e0';
  const { slot } = (await get(`${router.admin}/engines/${other}`)).json.workers[0];
  const pins = [[{ backend_instance_id: slot }, {}], [{}, { headers: { 'x-perilune-worker': other } }]];
  for (const [pin, options] of pins) {
    const { nvext } = delta('s');
    const answer = await ask({ messages: say('two'), nvext: { ...nvext, ...pin } }, options);
    assert.equal(answer.status, 400, answer.text);
    assert.equal(answer.json.error.code, 'invalid_session');
    assert.match(answer.json.error.message, new RegExp(`${holder} holds.* pinned to ${other}`));
  }
  assert.equal(engines[Number(other[1])].requests.length, 0);
  assert.equal((await ask({ messages: say('two'), ...delta('s') }, { headers: { 'x-perilune-worker': holder } })).status, 200);
  const [{ id }] = engines[Number(holder[1])].requests.map((r) => r.json.session_params);
  assert.deepEqual(engines[Number(holder[1])].requests.map((r) => r.json.session_params.id), [id, id]);
});

test("a turn of an engine's session runs on the rank that holds it", async (t) => {
  const engine = await sglang(t);
  const router = await startRouter(t, { config: { engines: [{ name: 'e', url: engine.url, dp_size: 2 }], ...trusted } });
  await usable(router, 1);
  await until('capabilities', async () =>
    (await get(`${router.admin}/engines/e`)).json.capabilities.includes('streaming_sessions'));
  const { slot } = (await get(`${router.admin}/engines/e`)).json.workers[0];
  const { nvext } = control('s', 'open');
  const opened = await post(`${router.url}${CHAT}`,
    { model: 'm', messages: say('one'), nvext: { ...nvext, backend_instance_id: slot, dp_rank: 1 } });
  assert.equal(opened.headers['x-perilune-worker'], 'e/1');
  await post(`${router.url}${CHAT}`, { model: 'm', messages: say('two'), ...delta('s') },
    { headers: { 'x-data-parallel-rank': '0' } });
  await post(`${router.url}/generate`, { text: 'three', session_params: { id: 's' }, routed_dp_rank: 0 });
  const [, chat, generate] = engine.requests;
  assert.equal(chat.headers['x-data-parallel-rank'], '1');
  assert.equal(generate.json.routed_dp_rank, 1, generate.body);
  assert.equal(generate.json.session_params.id, chat.json.session_params.id);
});

const hints = { agent_hints: { priority: 7, strict_priority: 2, osl: 40 } };

test('a policy sees the hints; nvext itself is taken out of the body, unless the engine wants it', async (t) => {
  const policy = writeFile(scratch(t), 'p.lua', `
    return { api = 1, name = "p", route = function(req, fleet)
      return 0, ("p%d.s%d.o%d"):format(req.priority, req.strict_priority, req.expected_output_tokens) end }`);
  const { engines: [engine], ask } = await fleet(t, { n: 1, policy });
  const reason = async (body) => (await ask({ messages: say('x'), ...body })).headers['x-perilune-reason'];
  assert.equal(await reason({ nvext: hints }), 'p7.s2.o40');
  assert.equal(await reason({ nvext: hints, priority: 3 }), 'p3.s2.o40'); // the body's own wins
  assert.equal(await reason({ nvext: { agent_hints: { priority: -7 } } }), 'p-7.s0.o-1');
  assert.ok(engine.requests.every(({ json }) => json.nvext === undefined));
  const wanting = await fleet(t, { n: 1, config: { sessions: { forward_nvext: true } } });
  await wanting.ask({ messages: say('x'), nvext: hints });
  assert.deepEqual(wanting.engines[0].requests[0].json.nvext, hints);
});

test('the priority of agent_hints goes to engines that schedule by it, and higher is dearer for all of them', async (t) => {
  const one = async (options) => {
    const { engines: [engine], ask } = await fleet(t, { n: 1, options });
    await ask({ messages: say('x'), nvext: hints });
    await ask({ messages: say('x'), nvext: hints, priority: 3 });
    return engine.requests.map(({ json }) => json.priority);
  };
  assert.deepEqual(await one({ info: { enable_priority_scheduling: true } }), [7, 3]);
  assert.deepEqual(await one({}), [undefined, 3]); // it might refuse a request that has one
  const vllm = await fakeEngine(t);
  vllm.handler = (entry, res) => vllm.json(res, 200, {});
  const router = await startRouter(t, {
    config: { engines: [{ name: 'v', url: vllm.url, kind: 'vllm' }], sessions: { priority: { vllm: 'on' } } },
  });
  await usable(router, 1);
  await post(`${router.url}${CHAT}`, { model: 'm', messages: say('x'), nvext: hints });
  assert.equal(vllm.requests[0].json.priority, -7); // vLLM serves lower numbers first
});

test('the simulated engine takes every priority that a policy or a client may give', async (t) => {
  for (const kind of ['sglang', 'vllm']) {
    const engine = await startEngine(t, { flags: ['--preset', 'instant', '--kind', kind] });
    for (const priority of [-(2 ** 31), 2 ** 31 - 1])
      assert.equal((await post(`${engine.url}${CHAT}`, { model: 'sim', max_tokens: 1, messages: say('x'), priority })).status, 200);
  }
});

test("a client's cache_control is a wish for retention, where the engine takes one", async (t) => {
  const wish = (ttl) => ({ cache_control: { type: 'ephemeral', ...(ttl && { ttl }) } });
  const { engines: [engine], ask } = await fleet(t, { n: 1, options: { info: { perilune_engine: { retention: true } } } });
  for (const body of [wish('5m'), wish(), { nvext: wish('1h') }, { ...wish('5m'), nvext: wish(90) }])
    assert.equal((await ask({ messages: say('x'), ...body })).status, 200);
  assert.deepEqual(engine.requests.map(({ json }) => json.extra_args?.retention_seconds), [300, 300, 3600, 90]);
  const stock = await fleet(t, { n: 1 });
  await stock.ask({ messages: say('x'), ...wish('5m') });
  assert.equal(stock.engines[0].requests[0].json.extra_args, undefined);
  assert.deepEqual(stock.engines[0].requests[0].json.cache_control, wish('5m').cache_control); // it is the engine's
  for (const ttl of [-1, 0.5, '5 minutes', 1e308]) {
    const answer = await ask({ messages: say('x'), nvext: wish(ttl) });
    assert.equal(answer.status, 400, `${ttl}`);
    assert.equal(answer.json.error.code, 'invalid_cache_control');
  }
});
