// Clients that may choose worker and rank themselves, and sessions: what only one worker's session
// makes sense of goes to no other, whoever asks for it.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { startRouter, usable, until } from './lib/proc.mjs';
import { CHAT, control, delta, fleet, say } from './lib/sessions.mjs';
import { sglang } from './lib/sglang.mjs';
import { get, post } from './lib/http.mjs';

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
  assert.match((await get(`${others.router.admin}/metrics`)).text, /^perilune_pins_removed_total 2$/m);
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
