// Approximate mode: what the router has routed stands in for events, for prompts of text and for
// engines that publish nothing; what engines say of their cached tokens corrects it.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { engineOf, metric, startRouter, until } from './lib/proc.mjs';
import { gate } from './lib/fake.mjs';
import { post } from './lib/http.mjs';
import { complete, explain, indexOf, policy, prompt, quietEngine } from './lib/kv.mjs';

// Nearest first, then the one that has been asked least (requests are known by what they did).
const spread = `return { api = 1, name = "spread",
  init = function() return { asked = {} } end,
  score = function(req, w, st) return (st.asked[w.slot] or 0) - 1000 * w.cached_tokens end,
  done = function(req, outcome, st) st.asked[outcome.slot] = (st.asked[outcome.slot] or 0) + 1 end }`;

async function three(t, { cached, text = spread, config } = {}) {
  const engines = {};
  for (const name of ['a', 'b', 'c']) engines[name] = await quietEngine(t, { cached });
  const router = await startRouter(t, {
    engines: Object.fromEntries(Object.entries(engines).map(([name, e]) => [name, e.url])),
    policy: policy(t, text), threads: 1, config,
  });
  return { router, engines };
}

const words = (seed, n = 150) => Array.from({ length: n }, (_, i) => `w${seed}-${i}`).join(' ');
const chat = async (router, messages, more = {}) => {
  const answer = await post(`${router.url}/v1/chat/completions`, { model: 'm', messages, ...more });
  assert.equal(answer.status, 200, answer.text);
  return answer.headers['x-perilune-worker'];
};

test('a conversation stays where it was, others go elsewhere', async (t) => {
  const { router } = await three(t);
  const talks = [0, 1, 2, 3, 4, 5].map((seed) => [
    { role: 'system', content: `You are number ${seed}. ${words(seed)}` },
    { role: 'user', content: words(seed + 10) },
  ]);
  const first = [];
  for (const talk of talks) first.push(await chat(router, talk));
  assert.deepEqual([...new Set(first)].sort(), ['a', 'b', 'c']); // they share nothing
  for (let turn = 0; turn < 3; turn++) {
    for (const [i, talk] of talks.entries()) {
      talk.push({ role: 'assistant', content: words(100 + i + turn) }, { role: 'user', content: words(200 + i + turn) });
      assert.equal(await chat(router, talk), first[i], `talk ${i}, turn ${turn}`);
    }
  }
  const { workers, prompt: p } = await explain(router, { model: 'm', messages: talks[0] }, '/v1/chat/completions');
  assert.equal(p.keys, 'text_chunks');
  assert.deepEqual(workers.filter((w) => w.cached_tokens > 0).map((w) => w.name), [first[0]]);
  assert.equal(workers[0].kv_trust, 'routed');
});

test('what makes a prompt another one counts: roles, tools, names, salts, models', async (t) => {
  const { router, engines } = await three(t);
  for (const e of Object.values(engines)) assert.deepEqual(e.models, ['m']);
  const messages = [{ role: 'user', content: words(1, 300) }];
  const base = { model: 'm', messages };
  const worker = await chat(router, messages);
  const known = async (body, path = '/v1/chat/completions') => (await explain(router, body, path)).workers
    .filter((w) => w.cached_tokens > 0).map((w) => w.name);
  assert.deepEqual(await known(base), [worker]);
  // neither the order of members nor what does not reach the model matters
  assert.deepEqual(await known({ max_tokens: 7, temperature: 0, messages, model: 'm' }), [worker]);
  assert.deepEqual(await known({ ...base, messages: [{ content: words(1, 300), role: 'user' }] }), [worker]);
  for (const [what, other] of Object.entries({
    role: { ...base, messages: [{ ...messages[0], role: 'system' }] },
    name: { ...base, messages: [{ ...messages[0], name: 'eve' }] },
    tools: { ...base, tools: [{ type: 'function', function: { name: 'f', parameters: {} } }] },
    salt: { ...base, cache_salt: 's' },
    'an earlier message': { ...base, messages: [{ role: 'system', content: 'x' }, ...messages] },
  })) assert.deepEqual(await known(other), [], what);
});

test('token ids are compared as blocks where nothing is published, too', async (t) => {
  const { router } = await three(t);
  const workers = [];
  for (let seed = 0; seed < 3; seed++) workers.push((await complete(router, prompt(seed))).worker);
  assert.equal(new Set(workers).size, 3);
  for (let seed = 0; seed < 3; seed++) {
    const ids = [...prompt(seed), ...prompt(50, 40)];
    const { choice, prompt: p } = await explain(router, { prompt: ids });
    assert.deepEqual([p.keys, choice.worker, choice.cached_tokens], ['token_blocks', workers[seed], 160]);
    assert.equal((await complete(router, ids)).worker, workers[seed]);
  }
});

test('an engine that says that it had nothing is believed', async (t) => {
  let had = 160;
  const { router } = await three(t, { cached: (entry) => ({ prompt: entry.json.prompt.length, cached: had }) });
  const ids = prompt(1);
  const { worker } = await complete(router, ids);
  const twin = [...ids, ...prompt(2, 32)];
  const holds = async () => (await explain(router, { prompt: twin })).workers.find((w) => w.name === worker).cached_tokens;
  assert.equal(await holds(), 160);
  assert.equal((await complete(router, [...ids, 1])).worker, worker); // told: all was there
  assert.equal(await holds(), 160);

  had = 32; // the rest was thrown out meanwhile
  const aside = [...prompt(1, 80), ...prompt(3, 64)];
  assert.equal((await explain(router, { prompt: aside })).choice.cached_tokens, 80);
  assert.equal((await complete(router, aside)).worker, worker);
  await until('it is corrected', async () => await holds() === 80); // as far as it was just computed
  assert.equal(await metric(router, 'perilune_kv_corrections_total'), 1);
  const { accuracy } = await indexOf(router);
  assert.equal(accuracy.requests, 3);
  assert.deepEqual([accuracy.predicted_tokens, accuracy.actual_tokens], [160 + 80, 160 + 160 + 32]);
});

test('an engine that leaves out a count of 0, as vLLM does, is understood once it has told one', async (t) => {
  let had; // undefined: its usage has no details
  const { router } = await three(t, { cached: (entry) => ({ prompt: entry.json.prompt.length, cached: had }) });
  const ids = prompt(1);
  const { worker } = await complete(router, ids); // it may be one that never tells
  const holds = async (asked) => (await explain(router, { prompt: asked })).workers
    .find((w) => w.name === worker).cached_tokens;
  const aside = (seed) => [...prompt(1, 80), ...prompt(seed, 64)];
  await complete(router, aside(3));
  assert.equal(await holds([...ids, 1]), 160);
  had = 80;
  await complete(router, aside(4));
  assert.equal(await holds([...ids, 1]), 160);
  had = undefined;
  await complete(router, aside(5));
  await until('it is corrected', async () => await holds([...ids, 1]) === 80);
});

test('predictions that are far off are told of, and when they are right again', async (t) => {
  let had = 0;
  const { router } = await three(t, { cached: (entry) => ({ prompt: entry.json.prompt.length, cached: had }) });
  const { worker } = await complete(router, prompt(1));
  for (let i = 0; i < 40; i++) await complete(router, prompt(1));
  const told = await router.log('kv_accuracy');
  assert.equal(told.level, 'warn');
  assert.match(told.message, new RegExp(`^${worker}: \\d+ cached tokens were predicted and 0 counted`));
  had = 160;
  await until('it is right again', async () => {
    await complete(router, prompt(1));
    return router.logs.some((l) => l.event === 'kv_accuracy' && l.level === 'info');
  });
});

test('what failed before it was computed is not expected to be there', async (t) => {
  const { router, engines } = await three(t);
  const ids = prompt(1);
  for (const e of Object.values(engines)) e.handler = (entry, res) => e.json(res, 500, { error: { message: 'no' } });
  assert.equal((await post(`${router.url}/v1/completions`, { prompt: ids, max_tokens: 1 })).status, 500);
  const { workers } = await explain(router, { prompt: ids });
  assert.deepEqual(workers.map((w) => w.cached_tokens), [0, 0, 0]);
});

test('what was routed is forgotten after its time', async (t) => {
  const { router } = await three(t, { config: { kv: { routed_ttl_seconds: 5 } } });
  await complete(router, prompt(1));
  assert.ok((await explain(router, { prompt: prompt(1) })).workers.some((w) => w.cached_tokens > 0));
  await until('it is forgotten', async () => (await explain(router, { prompt: prompt(1) })).workers
    .every((w) => w.cached_tokens === 0));
  await until('its memory is free', async () => (await indexOf(router)).routed.entries === 0);
});

test('where a session or a pin decides, what the worker has cached is expected and accounted for, too', async (t) => {
  const config = { trusted_clients: ['127.0.0.0/8'] };
  const { router, engines } = await three(t, { cached: () => ({ prompt: 160, cached: 144 }), config });
  const ask = (more) => complete(router, prompt(1), more);
  const session = { nvext: { session_control: { session_id: 's', action: 'bind' } } };
  const { worker } = await ask(session); // holds nothing yet: 144 wrong
  const pin = { nvext: { backend_instance_id: (await engineOf(router, worker)).workers[0].slot } };
  const error = () => metric(router, 'perilune_kv_cached_tokens_error_total');
  await until('the first is counted', async () => await error() === 144);
  const predicted = () => metric(router, 'perilune_kv_predicted_cached_tokens_total');
  const inTheLedger = async (more) => {
    const held = gate();
    const { handler, requests } = engines[worker];
    engines[worker].handler = async (entry, res) => { await held.opened; handler(entry, res); };
    const asked = ask(more);
    await engines[worker].request(requests.length);
    const tokens = (await engineOf(router, worker)).workers[0].queued_prefill_tokens;
    held.open();
    engines[worker].handler = handler;
    assert.equal((await asked).worker, worker);
    return tokens;
  };
  assert.ok(await inTheLedger(session) <= 32);
  assert.ok(await inTheLedger(pin) <= 32);
  await until('both are counted', async () => await predicted() >= 2 * 128);
  assert.ok(await error() <= 144 + 2 * 16, `${await error()}`);
});
