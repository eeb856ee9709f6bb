// The admin API of cache-aware routing: explain leaves no trace, queries in the shape of Dynamo's
// indexer, events that are handed in over HTTP.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { encode } from '@msgpack/msgpack';
import { engineOf, metric, root, startRouter, until, usable } from './lib/proc.mjs';
import { get, post, send } from './lib/http.mjs';
import {
  complete, explain, holders, indexOf, policy, prompt, published, quietEngine, startPublished, untilHeld, untilTrust,
  workerOf,
} from './lib/kv.mjs';

// Engines whose events are handed in; ranks by name.
async function ingesting(t, names = { a: 1, b: 1 }, { text, config = {}, engine = {}, ...options } = {}) {
  const engines = {};
  const list = [];
  for (const [name, ranks] of Object.entries(names)) {
    engines[name] = await quietEngine(t);
    list.push({ name, url: engines[name].url, dp_size: ranks, kv_events: { mode: 'ingest' }, ...engine });
  }
  const router = await startRouter(t, { policy: policy(t, text), config: { engines: list, ...config }, ...options });
  await usable(router, list.length);
  return { router, engines };
}
const raw = async (url, body, type) => {
  const res = await send(url, {
    method: 'POST', body, headers: { 'content-type': type, 'content-length': body.length },
  });
  return { status: res.statusCode, json: JSON.parse(await res.text()) };
};
const stored = (ids, from = 1, more = {}) => ({
  type: 'BlockStored', block_hashes: Array.from({ length: ids.length / 16 }, (_, i) => from + i),
  parent_block_hash: null, token_ids: ids, block_size: 16, medium: 'GPU', ...more,
});

// Fields of a record that a policy can name and that are not in what explain shows of it.
const abi = readFileSync(join(root, 'core', 'policy_abi.h'), 'utf8');
const missing = (record, shown) => new RegExp(`\\bstruct ${record} \\{([\\s\\S]*?)\\n\\};`).exec(abi)[1]
  .replace(/\/\*[\s\S]*?\*\//g, '').match(/\w+(?=;)/g).filter((name) => !(name in shown));

test('explain tells every input, the scores, and the choice', async (t) => {
  const { router } = await ingesting(t, { a: 1, b: 1 }, {
    text: `return { api = 1, name = "priced", params = { weight = 2 },
      score = function(req, w, st) return req.prompt_tokens - st.weight * w.cached_tokens end }`,
  });
  await post(`${router.admin}/events?engine=b`, [stored(prompt(1, 32))]);
  await untilTrust(router, 'b', 'live');
  const body = { prompt: prompt(1, 64), max_tokens: 9, stream: true };
  const answer = await explain(router, body);
  assert.deepEqual([answer.model, answer.path, answer.policy], ['m', '/v1/completions', 'priced']);
  assert.deepEqual([answer.policy_generation, answer.policy_error, answer.policy_suspended], [1, null, false]);
  assert.deepEqual(answer.choice, {
    kind: 'decided', worker: 'b', reason: 'score', by_policy: true, spilled: false, cached_tokens: 32,
    wait_seconds: null, retry_after_seconds: null, shrink_max_tokens: null,
  });
  assert.deepEqual(answer.workers.map((w) => [w.name, w.score, w.cached_tokens, w.kv_trust, w.why]),
    [['a', 64, 0, 'routed', 'eligible'], ['b', 0, 32, 'live', 'eligible']]);
  const { request } = answer;
  assert.deepEqual([request.prompt_tokens, request.exact_tokens, request.max_tokens, request.stream, request.api],
    [64, true, 9, true, 'completions']);
  assert.deepEqual([answer.prompt.keys, answer.prompt.count, answer.session], ['token_blocks', 4, null]);
  assert.deepEqual(missing('pl_worker', answer.workers[0]), []);
  assert.deepEqual(missing('pl_req', request), []);
});

test('explain leaves no trace', async (t) => {
  const { router, engines } = await ingesting(t, { a: 1 }, {
    text: `local pl = require "perilune"
      local n = pl.counter("explained")
      return { api = 1, name = "counting",
        admit = function(req) n:add(1) pl.metric("asked", n:get()) pl.log("asked") return pl.ADMIT end,
        score = function(req, w) return w.cached_tokens end }`,
  });
  const page = async () => (await get(`${router.admin}/metrics`)).text.split('\n')
    .filter((line) => !/^(#|process_)|_age_|health_checks|engine_(connects|reuses)|gauge_reads/.test(line));
  const before = await page();
  for (let i = 0; i < 40; i++) {
    await explain(router, { prompt: prompt(1) });
    await explain(router, { model: 'm', messages: [{ role: 'user', content: 'x'.repeat(5000) }] }, '/v1/chat/completions');
    assert.equal((await post(`${router.admin}/explain`, { model: 'nobody' })).status, 404);
    assert.equal((await post(`${router.admin}/explain`, 'no json')).status, 400);
  }
  assert.deepEqual(await page(), before);
  assert.equal(engines.a.requests.length, 0);
  const { routed, predicted } = await indexOf(router);
  assert.deepEqual([routed.inserted, predicted.inserted], [0, 0]);
  assert.equal((await engineOf(router, 'a')).inflight, 0);
  assert.ok(!router.logs.some((line) => /asked/.test(line.message)));
  await complete(router, prompt(1)); // a real one does
  await until('it counts', async () => await metric(router, 'perilune_script_metric', 'asked') === 1);
});

test('explain says why a worker cannot be had, what a hook answered, and how it failed', async (t) => {
  const { router, engines } = await ingesting(t, { a: 1, b: 1 }, {
    text: `local pl = require "perilune"
      return { api = 1, name = "moody",
        admit = function(req)
          if req.max_tokens == 1 then return pl.SHED, 7 end
          if req.max_tokens == 2 then return pl.QUEUE, 3 end
          if req.max_tokens == 30 then return pl.SHRINK, 20 end
          return pl.ADMIT
        end,
        route = function(req, fleet)
          if req.max_tokens == 4 then return fleet[0].index, "by-hand" end
          if req.max_tokens == 5 then error("out of humour") end
        end,
        score = function(req, w) return -w.index + w.cached_tokens * 0 end }`,
  });
  const ask = async (n) => explain(router, { prompt: prompt(1), max_tokens: n });
  let answer = await ask(1);
  assert.deepEqual([answer.choice.kind, answer.choice.retry_after_seconds, answer.choice.worker], ['shed', 7, null]);
  answer = await ask(2);
  assert.deepEqual([answer.choice.kind, answer.choice.wait_seconds], ['queue', 3]);
  answer = await ask(30);
  assert.deepEqual([answer.choice.worker, answer.choice.shrink_max_tokens], ['b', 20]);
  answer = await ask(4);
  assert.deepEqual([answer.choice.worker, answer.choice.reason], ['a', 'by-hand']);
  assert.deepEqual(answer.workers.map((w) => w.score), [0, -1]); // as score would have it

  const errors = await metric(router, 'perilune_policy_errors_total');
  for (let i = 0; i < 12; i++) answer = await ask(5); // would suspend it, were they real
  assert.equal(answer.policy_error.hook, 'route');
  assert.match(answer.policy_error.message, /out of humour/);
  assert.ok(answer.policy_error.line > 1);
  assert.deepEqual([answer.choice.worker, answer.policy_suspended], ['b', false]);
  assert.equal(await metric(router, 'perilune_policy_errors_total'), errors);
  assert.equal(await metric(router, 'perilune_policy_suspended_loops'), 0);
  assert.ok(!router.logs.some((line) => line.event === 'policy_error'));

  await post(`${router.admin}/engines/b/drain`);
  await until('b drains', async () => (await ask(9)).workers[1].why === 'draining');
  answer = await ask(9);
  assert.deepEqual([answer.choice.worker, answer.workers[1].eligible, answer.workers[1].score], ['a', false, null]);
  await engines.a.refuse();
  await until('a is down', async () => (await ask(9)).workers[0].why === 'unhealthy');
  assert.equal((await ask(9)).choice.kind, 'no_worker');
});

test('explain shows the costs that a ready-made policy compares', async (t) => {
  for (const name of ['prefix_seconds', 'kv_aware', 'lmetric']) {
    const { router } = await ingesting(t, { a: 1, b: 1 }, { policy: name });
    await post(`${router.admin}/events?engine=b`, [stored(prompt(1, 160))]);
    await untilTrust(router, 'b', 'live');
    const { choice, workers } = await explain(router, { prompt: prompt(1, 161) });
    assert.equal(choice.worker, 'b', name);
    assert.ok(workers.every((w) => typeof w.score === 'number'), JSON.stringify(workers));
    assert.ok(workers[1].score < workers[0].score, `${name}: ${workers.map((w) => w.score)}`);
  }
});

test('explain shows where a session is bound', async (t) => {
  const { router } = await ingesting(t, { a: 1, b: 1 }, {
    text: 'return { api = 1, name = "last", score = function(req, w) return -w.index end }',
  });
  const body = { prompt: prompt(1), nvext: { session_control: { session_id: 's1', action: 'bind' } } };
  let answer = await explain(router, body);
  assert.deepEqual([answer.session.event, answer.session.bound_slot, answer.session.kind], ['bind', -1, 'router_only']);
  assert.equal((await get(`${router.admin}/sessions/s1`)).status, 404);
  const { worker } = await complete(router, prompt(1), { nvext: body.nvext });
  assert.equal(worker, 'b');
  answer = await explain(router, { prompt: prompt(1), nvext: { session_control: { session_id: 's1' } } });
  assert.deepEqual([answer.session.event, answer.session.bound_index, answer.choice.reason], ['turn', 1, 'session']);
  assert.deepEqual(missing('pl_session', answer.session), []);
  assert.equal((await get(`${router.admin}/sessions/s1`)).json.turns, 1);
});

test('explain refuses as the router would, and what it cannot explain', async (t) => {
  const { router } = await ingesting(t, { a: 1 }, { config: { limits: { json_depth: 8 } } });
  const refused = async (query, body, status, code) => {
    const answer = await post(`${router.admin}/explain${query}`, body);
    assert.deepEqual([answer.status, answer.json.error.code], [status, code], answer.text);
    assert.ok(answer.json.error.message.length > 10);
  };
  await refused('', '', 400, 'invalid_json');
  await refused('', '[1', 400, 'invalid_json');
  await refused('', { model: 'm', stream: 'yes' }, 400, 'invalid_value');
  await refused('', { model: 7 }, 400, 'invalid_value');
  await refused('', { model: 'other' }, 404, 'model_not_found');
  await refused('?path=/flush_cache', {}, 400, 'bad_parameter');
  await refused('?path=/open_session', {}, 400, 'bad_parameter');
  await refused('?path=', {}, 400, 'bad_parameter');
  assert.equal((await get(`${router.admin}/explain`)).status, 405);
  // clients that leave, and the router's end, in the middle of it
  for (let i = 0; i < 20; i++) {
    const controller = new AbortController();
    const sent = send(`${router.admin}/explain`, {
      method: 'POST', body: { model: 'm', messages: [{ role: 'user', content: 'x'.repeat(100000) }] }, signal: controller.signal,
    });
    setImmediate(() => controller.abort());
    await sent.then((res) => res.resume(), () => {});
  }
  await explain(router, { prompt: prompt(1) });
});

test("queries have the shape of Dynamo's indexer", async (t) => {
  const { router } = await ingesting(t, { a: 1, b: 2 });
  await post(`${router.admin}/events?engine=a`, [stored(prompt(1, 48))]);
  await post(`${router.admin}/events?engine=b&rank=1`, { events: [stored(prompt(1, 32)), stored(prompt(1, 48), 1, { medium: 'CPU' })] });
  await untilHeld(router, prompt(1), { a: 48, 'b/1': 32 });
  const query = { model_name: 'm', token_ids: prompt(1), routing_group: 'default' };
  const answer = (await post(`${router.admin}/query`, query)).json;
  const [a, b] = ['a', 'b'].map((name) => Object.keys(answer.instances).find((id) => answer.instances[id].engine === name));
  assert.deepEqual(answer, {
    scores: { [a]: { 0: 48 }, [b]: { 1: 32 } },
    frequencies: [],
    instances: {
      [a]: { longest_matched: 48, gpu: 48, cpu: 48, disk: 48, dp: { 0: 48 }, engine: 'a' },
      [b]: { longest_matched: 48, gpu: 32, cpu: 48, disk: 48, dp: { 1: 32 }, engine: 'b' },
    },
  });
  // an instance is what nvext calls a worker
  const choice = await post(`${router.url}/v1/completions`, { prompt: prompt(1), nvext: { annotations: ['query_instance_id:'] } });
  assert.equal(String(choice.json.nvext.worker_id.decode_worker_id), a);

  for (const [body, status, message] of [
    ['{', 400, /not usable/], ['[]', 400, /not usable/], [{ model_name: 'm' }, 400, /token_ids should be an array/],
    [{ ...query, token_ids: [1, -2] }, 400, /token_ids\[1\]/], [{ ...query, token_ids: [1, 2 ** 32] }, 400, /token_ids\[1\]/],
    [{ ...query, token_ids: [1.5] }, 400, /token_ids\[0\]/], [{ ...query, token_ids: [[1]] }, 400, /token_ids\[0\]/],
    [{ ...query, token_ids: 'no' }, 400, /array/], [{ ...query, model_name: 'x' }, 404, /no engine serves/],
    [{ ...query, lora_name: 5 }, 400, /lora_name should be a string/],
  ]) {
    const refused = await post(`${router.admin}/query`, body);
    assert.equal(refused.status, status, JSON.stringify(body));
    assert.match(refused.json.error.message, message);
  }
  const none = { scores: {}, frequencies: [], instances: {} };
  assert.deepEqual((await post(`${router.admin}/query`, { ...query, token_ids: [] })).json, none);
  assert.deepEqual((await post(`${router.admin}/query`, { ...query, token_ids: prompt(9) })).json, none);
});

test('queries by hash take local hashes, however they are written', async (t) => {
  const { router } = await ingesting(t, { a: 1 }, { engine: { block_tokens: 16 } });
  // Dynamo's published local hash of its first block
  const vector = Array.from({ length: 16 }, (_, i) => i + 1);
  const hash = 0xea06fc71a5ee6e88n;
  const local = 1234567890123456789n; // one that an event brings in place of tokens
  await post(`${router.admin}/events?engine=a`, [
    { type: 'BlockStored', block_hashes: [1], parent_block_hash: null, token_ids: vector, block_size: 16 },
    { worker_id: 1, event: { event_id: 1, dp_rank: 0, data: { stored: { parent_hash: null, blocks: [
      { block_hash: 11, tokens_hash: String(local) }] } } } },
  ]);
  const ask = async (written, more = '') => {
    const res = await post(`${router.admin}/query_by_hash`, `{"model_name": "m", "block_hashes": [${written}]${more}}`);
    return res.status === 200 ? res.json.scores['0']?.['0'] ?? 0 : res.json.error.message;
  };
  await until('it is known', async () => await ask(`${hash}`) === 16);
  assert.equal(await ask(`${BigInt.asIntN(64, hash)}`), 16);
  assert.equal(await ask(`"${hash}"`), 16);
  assert.equal(await ask(`"0x${hash.toString(16)}"`), 16);
  assert.equal(await ask(`"0x${hash.toString(16).toUpperCase()}", 5`), 16);
  assert.equal(await ask('5'), 0);
  await until('the other, too', async () => await ask(`${local}`) === 16);
  // salt and adapter are in the hash: whoever has it need not say them
  await post(`${router.admin}/events?engine=a`, { type: 'BlockStored', block_hashes: [21], parent_block_hash: null,
    token_ids: vector, block_size: 16, cache_salt: 'tenant-a', lora_name: 'my-lora' });
  await until('the salted one', async () => await ask(`"0x12ed440cccc38cf3"`) === 16); // Dynamo's, too
  for (const bad of ['18446744073709551616', '-9223372036854775809', '"0x"', '"12x"', 'null', '1e3', '"']) {
    assert.match(await ask(bad), /block_hashes\[0\]|not usable/, bad);
  }
  assert.match(await ask('5', ', "cache_salt": "s"'), /have their cache_salt in them/);
});

test("Dynamo's published hashes are found without naming the adapter or salt that is in them", async (t) => {
  const { router } = await ingesting(t, { a: 1 }, { engine: { block_tokens: 16 } });
  const stored = (first, more) => ({ type: 'BlockStored', block_hashes: [first, first + 1, first + 2], parent_block_hash: null,
    token_ids: Array.from({ length: 48 }, (_, i) => i + 1), block_size: 16, ...more });
  await post(`${router.admin}/events?engine=a`, [
    stored(10), stored(20, { lora_name: 'my-lora' }), stored(30, { cache_salt: 'tenant-a' }),
    stored(40, { lora_name: 'my-lora', cache_salt: 'tenant-a' }),
  ]);
  const vectors = {
    none: ['ea06fc71a5ee6e88', '1fbf39bd106be0b5', 'a8562fe663b7a097'],
    lora: ['3990f1b14309d7e6', '27c809c22da91b94', 'e0ee5d0e535bfbf1'],
    salt: ['71742dfed90682a9', 'b7db648aa3dfb040', '27ea5f8baebff2fd'],
    both: ['12ed440cccc38cf3', '9db0a52cbd130133', 'de036775f15cf586'],
  };
  const ask = async (name, more) => (await post(`${router.admin}/query_by_hash`,
    { model_name: 'm', block_hashes: vectors[name].map((h) => `0x${h}`), ...more })).json.scores['0']?.['0'];
  await until('all is known', async () => await ask('both') === 48);
  for (const name of Object.keys(vectors)) assert.equal(await ask(name), 48, name);
  assert.equal(await ask('both', { lora_name: 'my-lora' }), 48);
  assert.equal(await ask('none', { lora_name: 'my-lora' }), undefined);
});

test('events are handed in as JSON and as msgpack', async (t) => {
  const { router } = await ingesting(t, { a: 1, b: 1 });
  const url = `${router.admin}/events?engine=a`;
  assert.deepEqual((await post(url, stored(prompt(1, 32)))).json, { accepted: true, worker: 'a' });
  await untilHeld(router, prompt(1), { a: 32 });
  const batch = Buffer.from(encode([1.5, [['BlockRemoved', [2], 'GPU']], 0]));
  assert.equal((await raw(url, batch, 'application/msgpack')).status, 202);
  await untilHeld(router, prompt(1), { a: 16 });
  await untilTrust(router, 'a', 'live');
  assert.equal((await complete(router, prompt(1))).worker, 'a');
  await post(url, { type: 'AllBlocksCleared' });
  await untilHeld(router, prompt(1), {});
  assert.equal((await workerOf(router, 'b')).trust, 'routed');

  // garbage inside a batch is counted; what is none at all is refused
  assert.equal((await raw(url, Buffer.from('garbage'), 'application/x-msgpack')).status, 202);
  await until('it is counted', async () => await metric(router, 'perilune_kv_bad_total', 'worker="a"') === 1);
  const { fake, pub, entry } = await published(t, 'c');
  await post(`${router.admin}/engines`, { name: 'off', url: fake.url, kv_events: { mode: 'off' } });
  assert.ok(pub && entry);
  for (const [query, body, type, status, code] of [
    ['?engine=a', '5', 'application/json', 400, 'invalid_events'],
    ['?engine=a', '[', 'application/json', 400, 'invalid_events'],
    ['?engine=a', '', 'application/json', 400, 'invalid_body'],
    ['?engine=a', '[]', 'text/plain', 415, 'unsupported_media_type'],
    ['?engine=a&rank=1', '[]', 'application/json', 400, 'bad_parameter'],
    ['?engine=a&rank=x', '[]', 'application/json', 400, 'bad_parameter'],
    ['', '[]', 'application/json', 400, 'bad_parameter'],
    ['?engine=nobody', '[]', 'application/json', 404, 'not_found'],
    ['?engine=off', '[]', 'application/json', 409, 'no_events_here'],
  ]) {
    const answer = await raw(`${router.admin}/events${query}`, Buffer.from(body), type);
    assert.deepEqual([answer.status, answer.json.error?.code], [status, code], `${query} ${body}`);
  }
  const large = await raw(url, Buffer.alloc((8 << 20) + 1), 'application/msgpack').catch(() => ({ status: 413 }));
  assert.equal(large.status, 413);
  assert.deepEqual(await holders(router, prompt(1)), {});
});

test('the index page has sizes, trust and lag', async (t) => {
  const one = await published(t, 'a', { style: 'sglang' });
  const router = await startPublished(t, [one]);
  await one.pub.store(prompt(1));
  await untilHeld(router, prompt(1), { a: 160 });
  await untilTrust(router, 'a', 'live');
  const page = await indexOf(router);
  assert.deepEqual([page.use, page.index.spaces, page.index.blocks, page.index.entries], ['auto', 1, 10, 10]);
  assert.ok(page.index.bytes > 0 && page.index.bytes < page.index.max_bytes);
  const [w] = page.workers;
  assert.deepEqual([w.name, w.trust, w.entries, w.block_tokens], ['a', 'live', 10, 16]);
  assert.deepEqual([w.events.state, w.events.connected, w.events.endpoint], ['live', true, one.pub.endpoint]);
  assert.ok(w.events.lag_seconds !== null && Math.abs(w.events.lag_seconds) < 60);
  assert.equal(w.events.counts.stored, 10);
  for (const [name, value] of Object.entries({
    perilune_kv_index_blocks: 10, perilune_kv_index_entries: 10, perilune_kv_connected: 1, perilune_kv_complete: 1,
    perilune_kv_last_sequence: 0, perilune_kv_messages_total: 1, perilune_kv_blocks_stored_total: 10,
  })) assert.equal(await metric(router, name), value, name);
  assert.equal(await metric(router, 'perilune_kv_state', 'state="live"'), 1);
});
