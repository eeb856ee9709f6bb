// Routing by the engines' KV events, end to end: a request goes to the worker that holds its
// beginning, and what the router thinks to be cached is what the engine finds.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { metric, startRouter, until, usable } from './lib/proc.mjs';
import { get, post } from './lib/http.mjs';
import { fakeEngine, gate } from './lib/fake.mjs';
import { KvSubscriber } from './lib/subscriber.mjs';
import {
  blindPolicy, complete, explain, holders, indexOf, policy, prompt, published, quietEngine,
  startKvRouter, startPublished, startSim, truth, untilHeld, untilTrust, workerOf,
} from './lib/kv.mjs';

const formats = {
  sglang: [],
  'vllm-array': ['--kind', 'vllm', '--kv-events-format', 'vllm-array'],
  'vllm-array, bytes': ['--kind', 'vllm', '--kv-events-format', 'vllm-array', '--kv-events-byte-hashes'],
  'vllm-map': ['--kind', 'vllm'],
  'vllm-map, bytes': ['--kind', 'vllm', '--kv-events-byte-hashes'],
};
for (const [name, flags] of Object.entries(formats)) {
  test(`a request goes to the engine that holds its beginning: ${name}`, async (t) => {
    const engines = { a: await startSim(t, flags), b: await startSim(t, flags) };
    // vLLM has no page that says where it publishes: the configuration does
    const router = await startRouter(t, {
      policy: policy(t),
      config: {
        usage: 'always', // else a sample is compared
        engines: await Promise.all(Object.entries(engines).map(async ([id, e]) => {
          const { endpoint, replay } = await truth(e);
          return { name: id, url: e.url, ...(name === 'sglang' ? {} : { kv_events: { mode: 'connect', endpoint, replay } }) };
        })),
      },
    });
    await usable(router, 2);
    await untilTrust(router, 'a', 'live');
    await untilTrust(router, 'b', 'live');

    // what nobody has told the router: it was sent to the engines past it
    await complete(engines.b, prompt(1), { model: 'sim' });
    await complete(engines.a, prompt(2), { model: 'sim' });
    await complete(engines.b, [...prompt(2, 48), ...prompt(3)], { model: 'sim' });
    await untilHeld(router, prompt(1), { b: 160 });
    await untilHeld(router, prompt(2), { a: 160, b: 48 });

    const asked = [...prompt(1), ...prompt(4, 40)];
    const expected = await explain(router, { model: 'sim', prompt: asked });
    assert.deepEqual([expected.choice.worker, expected.choice.cached_tokens], ['b', 160]);
    assert.deepEqual(await complete(router, asked), { worker: 'b', cached: 160 });
    assert.equal((await complete(router, [...prompt(2), 7, 8, 9])).worker, 'a');
    const third = await complete(router, [...prompt(2, 48), ...prompt(3), 1]);
    assert.equal(third.worker, 'b');
    assert.equal((await complete(router, prompt(9))).cached, 0);

    // and the router's figure was the engine's, each time
    await until('all are compared', async () => await metric(router, 'perilune_kv_compared_requests_total') === 4);
    const predicted = await metric(router, 'perilune_kv_predicted_cached_tokens_total');
    assert.equal(predicted, await metric(router, 'perilune_kv_actual_cached_tokens_total'));
    assert.ok(predicted >= 160 + 160 + 192);
    assert.equal(await metric(router, 'perilune_kv_cached_tokens_error_total'), 0);
  });
}

// Deterministic noise.
function dice(seed) {
  let state = seed;
  return (n) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * n);
  };
}

test('the index is what the engines hold, after a random load with evictions and clears', async (t) => {
  const flags = ['--pool-tokens', '1024'];
  const engines = { a: await startSim(t, flags), b: await startSim(t, flags) };
  const subscribers = {};
  for (const [name, engine] of Object.entries(engines)) {
    const { endpoint, replay, subscriptions } = await truth(engine);
    subscribers[name] = await KvSubscriber.open(t, { endpoint, replay, sha: true });
    await until('the subscription', async () => (await truth(engine)).subscriptions > subscriptions);
  }
  const router = await startKvRouter(t, engines);
  await untilTrust(router, 'a', 'live');
  await untilTrust(router, 'b', 'live');
  const roll = dice(7);
  const some = () => {
    const shared = roll(6);
    return [...prompt(20 + shared, 32 + 16 * roll(6)), ...prompt(100 + roll(8), 1 + roll(90))];
  };
  const agree = async (asked) => {
    for (const [name, engine] of Object.entries(engines)) {
      const { blocks, xor, sum, next_seq: next } = await truth(engine);
      const mirror = subscribers[name];
      if (next > 0) await mirror.upTo(next - 1);
      assert.deepEqual(mirror.index.sums(), { blocks, xor, sum });
      await until(`${name}: ${blocks} blocks`, async () => {
        const w = await workerOf(router, name);
        return (next === 0 || w.events.last_seq === next - 1) && w.entries === blocks;
      });
    }
    for (const ids of asked) {
      const want = Object.fromEntries(Object.entries(subscribers)
        .map(([name, s]) => [name, s.index.match(ids)]).filter(([, n]) => n > 0));
      assert.deepEqual(await holders(router, ids), want);
    }
  };
  for (let round = 0; round < 5; round++) {
    const asked = Array.from({ length: 24 }, some);
    for (let i = 0; i < asked.length; i += 4) {
      await Promise.all(asked.slice(i, i + 4).map((ids) => complete( // not all of it through the router
        [engines.a, engines.b, router, router][roll(4)], ids, { model: 'sim', max_tokens: 1 + roll(40) },
      )));
    }
    if (round === 2) assert.equal((await post(`${engines.a.url}/flush_cache`, '')).status, 200);
    await agree(asked);
  }
  const { workers, index } = await indexOf(router);
  for (const w of workers) {
    assert.ok(w.events.counts.removed > 0, 'nothing was evicted');
    for (const kind of ['gaps', 'resets', 'bad', 'duplicates']) assert.equal(w.events[kind], 0, kind);
    assert.equal(w.events.counts.unknown_parents, 0);
  }
  assert.ok(workers[0].events.counts.clears > 0);
  assert.equal(index.entries, workers[0].entries + workers[1].entries);
});

test('an independent publisher is understood, in every style', async (t) => {
  const styles = [{ style: 'sglang' }, { style: 'vllm-arrays' }, { style: 'vllm-maps' },
    { style: 'vllm-maps', byteHashes: true, topic: 'kv-events' }];
  const list = [];
  for (const [i, options] of styles.entries()) list.push(await published(t, `e${i}`, options));
  const router = await startPublished(t, list);
  for (const [i, { pub }] of list.entries()) {
    const hashes = await pub.store(prompt(i, 64));
    await untilHeld(router, prompt(i), { [`e${i}`]: 64 });
    await untilTrust(router, `e${i}`, 'live');
    assert.equal((await complete(router, prompt(i))).worker, `e${i}`);
    await pub.remove(hashes.slice(2));
    await untilHeld(router, prompt(i), { [`e${i}`]: 32 });
    await pub.store(prompt(i, 64).slice(32), { parent: hashes[1] });
    await untilHeld(router, prompt(i), { [`e${i}`]: 64 });
    await pub.clear();
    await untilHeld(router, prompt(i), {});
  }
});

test('engines of one model may have blocks of different sizes', async (t) => {
  const sizes = [1, 4, 8, 16, 32];
  const list = [];
  for (const size of sizes) list.push(await published(t, `e${size}`, {}));
  const router = await startPublished(t, list);
  for (const [i, size] of sizes.entries()) await list[i].pub.store(prompt(1, 70), { blockSize: size });
  for (const size of sizes) await untilTrust(router, `e${size}`, 'live');
  const { workers } = await explain(router, { prompt: prompt(1, 70) });
  assert.deepEqual(workers.map((w) => [w.name, w.block_tokens, w.cached_tokens]),
    [['e1', 1, 70], ['e4', 4, 68], ['e8', 8, 64], ['e16', 16, 64], ['e32', 32, 64]]);
});

test('salts and adapters set prompts apart', async (t) => {
  const one = await published(t, 'a', { style: 'vllm-maps' });
  const two = await published(t, 'b', { style: 'vllm-maps' });
  for (const { fake } of [one, two]) fake.models = ['m', 'tuned'];
  const router = await startPublished(t, [one, two]);
  const ids = prompt(1, 64);
  const ask = (more) => complete(router, ids, { model: 'm', ...more });
  await one.pub.store(ids, { salt: 'mine' });
  await two.pub.store(ids, { lora: 'tuned' });
  await untilHeld(router, ids, { a: 64 }, { model_name: 'm', cache_salt: 'mine' });
  await untilHeld(router, ids, { b: 64 }, { model_name: 'm', lora_name: 'tuned' });
  await untilHeld(router, ids, { b: 64 }, { model_name: 'tuned' });
  await untilTrust(router, 'a', 'live');
  await untilTrust(router, 'b', 'live');
  assert.deepEqual(await holders(router, ids, { model_name: 'm' }), {});
  assert.deepEqual(await holders(router, ids, { model_name: 'm', cache_salt: 'yours' }), {});
  assert.equal((await ask({ model: 'tuned' })).worker, 'b');
  assert.equal((await ask({ cache_salt: 'mine' })).worker, 'a');
  const plain = await explain(router, { model: 'm', prompt: ids });
  assert.deepEqual(plain.workers.map((w) => w.cached_tokens), [0, 0]);
});

test("an adapter that no event has named is not taken for the base model", async (t) => {
  const one = await published(t, 'a', { style: 'vllm-maps' });
  const two = await published(t, 'b', { style: 'vllm-maps' });
  for (const { fake } of [one, two]) fake.models = ['m', { id: 'tuned', parent: 'm' }, { id: 'other', parent: 'm' }];
  const router = await startPublished(t, [one, two]);
  const ids = prompt(1, 64);
  const cached = async (model) => Object.fromEntries((await explain(router, { model, prompt: ids })).workers
    .map((w) => [w.name, w.cached_tokens]));
  await one.pub.store(ids);
  await two.pub.store(prompt(9, 64));
  await untilTrust(router, 'a', 'live');
  await untilTrust(router, 'b', 'live');
  assert.deepEqual(await cached('m'), { a: 64, b: 0 });
  assert.deepEqual(await cached('tuned'), { a: 0, b: 0 });
  assert.deepEqual(await holders(router, ids, { model_name: 'tuned' }), {});
  // what was sent there stands in, as where nothing is published; by the adapter's own name
  await complete(router, ids, { model: 'tuned' });
  assert.deepEqual(await cached('tuned'), { a: 64, b: 0 });
  assert.deepEqual(await cached('other'), { a: 0, b: 0 });
  // then its events have the say
  await two.pub.store(ids, { lora: 'tuned' });
  await untilHeld(router, ids, { b: 64 }, { model_name: 'tuned' });
  assert.deepEqual(await cached('tuned'), { a: 0, b: 64 });
  assert.deepEqual(await cached('m'), { a: 64, b: 0 });
  assert.deepEqual(await cached('other'), { a: 0, b: 0 });
});

test("SGLang's extra_key and adapters set prompts apart, too", async (t) => {
  const one = await published(t, 'a', { style: 'sglang' }, { kind: 'sglang' });
  const two = await published(t, 'b', { style: 'sglang' }, { kind: 'sglang' });
  const router = await startPublished(t, [one, two]);
  const ids = prompt(1, 64);
  await one.pub.store(ids);
  await two.pub.store(ids, { salt: 'mine' });
  await untilTrust(router, 'a', 'live');
  await untilTrust(router, 'b', 'live');
  await untilHeld(router, ids, { b: 64 }, { cache_salt: 'mine' });
  const cached = async (more) => (await explain(router, { prompt: ids, ...more })).workers.map((w) => w.cached_tokens);
  assert.deepEqual(await cached({}), [64, 0]);
  assert.deepEqual(await cached({ extra_key: '', lora_path: null }), [64, 0]);
  assert.deepEqual(await cached({ extra_key: 'mine' }), [0, 64]);
  assert.deepEqual(await cached({ cache_salt: 'mi', extra_key: 'ne' }), [0, 64]); // as the engine joins them
  assert.deepEqual(await cached({ extra_key: 'yours' }), [0, 0]);
  assert.deepEqual(await cached({ lora_path: 'tuned' }), [0, 0]);
  // its events name no adapter: what was sent stands in
  await complete(router, ids, { lora_path: 'tuned' });
  assert.deepEqual(await cached({ lora_path: 'tuned' }), [64, 0]);
  assert.deepEqual(await cached({ lora_path: 'other' }), [0, 0]);
});

test('each rank is a worker: what it holds decides, and the engine is told', async (t) => {
  const engine = await startSim(t, ['--dp-size', '2']);
  const router = await startRouter(t, {
    policy: policy(t), config: { engines: [{ name: 'a', url: engine.url, dp_size: 2 }] },
  });
  await usable(router, 1);
  const [first, second] = (await indexOf(router)).workers.map((w) => w.name);
  await untilTrust(router, first, 'live');
  await untilTrust(router, second, 'live');
  const direct = (ids, rank) => complete(engine, ids, { model: 'sim', routed_dp_rank: rank });
  await direct(prompt(1), 1);
  await direct(prompt(2), 0);
  await until('both are known', async () => {
    const { json } = await post(`${router.admin}/query`, { model_name: 'sim', token_ids: prompt(1) });
    const other = await post(`${router.admin}/query`, { model_name: 'sim', token_ids: prompt(2) });
    return json.scores['0']?.['1'] === 160 && other.json.scores['0']?.['0'] === 160;
  });
  const seen = async () => (await get(`${engine.url}/sim/requests`)).json.over.map((r) => r.dp_rank);
  assert.deepEqual(await seen(), [1, 0]);
  assert.deepEqual(await complete(router, [...prompt(1), 5]), { worker: second, cached: 160 });
  assert.deepEqual(await complete(router, [...prompt(2), 5]), { worker: first, cached: 160 });
  assert.deepEqual(await seen(), [1, 0, 1, 0]);
});

test('what was sent is expected there before the engine has said so', async (t) => {
  const list = [await published(t, 'a'), await published(t, 'b')];
  const router = await startPublished(t, list, { config: { kv: { predicted_ttl_seconds: 600 } } });
  const ids = prompt(1);
  await list[0].pub.store(prompt(90, 16));
  await list[1].pub.store(ids.slice(0, 16)); // so that it goes there: ties go to the first
  await untilTrust(router, 'a', 'live');
  await untilTrust(router, 'b', 'live');
  await untilHeld(router, ids, { b: 16 });
  assert.equal((await complete(router, ids)).worker, 'b');
  const { workers } = await explain(router, { prompt: ids });
  assert.deepEqual(workers.map((w) => [w.kv_trust, w.cached_tokens]), [['live', 0], ['live', 160]]);
  assert.deepEqual(await holders(router, ids), { b: 16 }); // the index itself holds what was told
  assert.equal((await indexOf(router)).predicted.inserted, 1);
});

test("engines with Eagle's windows beside others: each is asked by its own", async (t) => {
  const list = [await published(t, 'a'), await published(t, 'b')];
  const router = await startPublished(t, list);
  const ids = prompt(1, 161);
  await list[0].pub.store(prompt(90, 16));
  await untilTrust(router, 'a', 'live');
  const hashes = Array.from({ length: 10 }, (_, i) => BigInt(i + 1));
  await list[1].pub.publish([list[1].pub.stored({ hashes, tokens: ids, bigram: true })]);
  await untilHeld(router, ids, { b: 160 });
  const cached = async (body) => (await explain(router, body)).workers.map((w) => w.cached_tokens);
  await until('both are asked', async () => (await cached({ prompt: ids }))[1] === 160);
  assert.deepEqual(await cached({ prompt: ids }), [0, 160]);
  assert.equal((await complete(router, ids)).worker, 'b');
  await list[0].pub.store(ids);
  await until('a has it, too', async () => (await cached({ prompt: ids }))[0] === 160);
});

test('events take back what was expected and did not come, of each rank of one stream', async (t) => {
  const one = await published(t, 'a', {}, { dp_size: 2 });
  one.entry.kv_events.one_stream = true;
  const router = await startPublished(t, [one], { config: { kv: { predicted_ttl_seconds: 600 } } });
  for (const rank of [0, 1]) {
    const ids = prompt(1 + rank), at = `a/${rank}`;
    await one.pub.store(ids.slice(0, 16), {}, { rank });
    await untilHeld(router, ids, { [rank ? 'a/1' : 'a']: 16 });
    assert.equal((await complete(router, ids)).worker, at);
    const cached = async () => (await explain(router, { prompt: ids })).workers[rank].cached_tokens;
    assert.equal(await cached(), 160);
    await until(`the prediction for ${at} is over`, async () => { // events of something else
      await one.pub.store(prompt(100 + one.pub.seq, 16), {}, { rank });
      return await cached() === 16;
    });
  }
});

test('a policy that does not name cached tokens costs no look-up; "always" looks, "off" never', async (t) => {
  const engine = await quietEngine(t, { cached: () => ({ prompt: 160, cached: 0 }) });
  const ids = prompt(1);
  const start = (use, path) => startRouter(t, {
    policy: path, engines: { a: engine.url }, config: { kv: { use } },
  });
  const asked = async (router) => {
    await complete(router, ids);
    return (await explain(router, { prompt: ids })).looks_at_caches;
  };
  const blind = await start('auto', blindPolicy(t));
  assert.equal(await asked(blind), false);
  const { routed, predicted, accuracy } = await indexOf(blind);
  assert.deepEqual([routed.inserted, predicted.inserted, accuracy.requests], [0, 0, 0]);

  const always = await start('always', blindPolicy(t));
  assert.equal(await asked(always), true);
  assert.equal((await indexOf(always)).routed.inserted, 1);
  await until('it is compared', async () => (await indexOf(always)).accuracy.requests === 1);

  const off = await start('off', policy(t));
  assert.equal(await asked(off), false);
  assert.deepEqual(await indexOf(off), { use: 'off' });
  assert.equal(await metric(off, 'perilune_kv_index_blocks'), undefined);
  for (const path of ['/query', '/query_by_hash', '/events?engine=a']) {
    const answer = await post(`${off.admin}${path}`, { token_ids: [] });
    assert.deepEqual([answer.status, answer.json.error.code], [409, 'kv_off'], path);
  }
});

test('a chat is found by the token ids that the engine makes of it; explain asks for them, too', async (t) => {
  const flags = ['--kind', 'vllm'];
  const engines = { a: await startSim(t, flags), b: await startSim(t, flags) };
  const router = await startRouter(t, {
    policy: policy(t),
    config: {
      kv: { tokenize_seconds: 10, chunk_bytes: 4096 }, // as text it would be less than a chunk
      engines: await Promise.all(Object.entries(engines).map(async ([name, e]) => {
        const { endpoint, replay } = await truth(e);
        return { name, url: e.url, kv_events: { mode: 'connect', endpoint, replay } };
      })),
    },
  });
  await usable(router, 2);
  await untilTrust(router, 'a', 'live');
  await untilTrust(router, 'b', 'live');
  const messages = [
    { role: 'system', content: Array.from({ length: 90 }, (_, i) => `rule${i}`).join(' ') },
    { role: 'user', content: 'What is a moon?' },
  ];
  const chat = async (at) => post(`${at.url}/v1/chat/completions`, { model: 'sim', messages, max_tokens: 4 });
  const before = await explain(router, { model: 'sim', messages }, '/v1/chat/completions');
  assert.deepEqual([before.prompt.keys, before.request.exact_tokens], ['token_blocks', true]);
  assert.equal(before.choice.cached_tokens, 0);
  await chat(engines.b); // past the router
  await until('b has it', async () => (await workerOf(router, 'b')).entries > 2);
  const expected = await explain(router, { model: 'sim', messages }, '/v1/chat/completions');
  assert.equal(expected.choice.worker, 'b');
  assert.ok(expected.choice.cached_tokens > 32);
  const answer = await chat(router);
  assert.equal(answer.headers['x-perilune-worker'], 'b');
  const { cached_tokens: cached } = answer.json.usage.prompt_tokens_details;
  assert.ok(Math.abs(cached - expected.choice.cached_tokens) <= 16, `${cached}`);
});

test('an engine that gives no token ids is told of, and text goes on without', async (t) => {
  const one = await published(t, 'a', {}, { kind: 'vllm' });
  const router = await startPublished(t, [one], { config: { kv: { tokenize_seconds: 10 } } });
  await one.pub.store(prompt(1));
  await untilTrust(router, 'a', 'live');
  const text = (i) => ({ model: 'm', messages: [{ role: 'user', content: `${i} and on it goes `.repeat(50) }] });
  for (let i = 0; i < 8; i++) { // eight in a row: then it is left alone for a while
    assert.equal((await post(`${router.url}/v1/chat/completions`, text(i))).status, 200);
    const { request: { exact_tokens: exact }, workers: [w] } = await explain(router, text(i), '/v1/chat/completions');
    assert.equal(exact, false);
    assert.ok(w.cached_tokens > 100, 'what was routed stands in');
  }
  assert.match((await router.log('tokenizes_not')).message, /^a: .*approximate mode/);
  assert.ok(await metric(router, 'perilune_tokenize_failed_total') >= 8);
});

test('a router ends while explanations wait for their token ids', async (t) => {
  const one = await published(t, 'a', {}, { kind: 'vllm' });
  const router = await startPublished(t, [one], { config: { kv: { tokenize_seconds: 10 } } });
  await one.pub.store(prompt(1));
  await untilTrust(router, 'a', 'live');
  one.fake.handler = () => {}; // /tokenize is never answered
  const body = { model: 'm', messages: [{ role: 'user', content: 'x'.repeat(3000) }] };
  const asked = [1, 2, 3].map(() => post(`${router.admin}/explain`, body).catch((error) => error));
  await one.fake.request(0);
  await router.stop();
  for (const answer of await Promise.all(asked)) assert.ok(answer instanceof Error || answer.status === 503);
});

// Blocks under decode while three requests run that begin alike: 20 blocks in common, 2 of each one's own.
test('blocks that running requests share count once, where the policy or the configuration wants it', async (t) => {
  const ids = (i) => [...prompt(1, 320), ...prompt(20 + i, 32)];
  async function blocks(name, { flags = [], config = {} } = {}) {
    const fake = await fakeEngine(t);
    const open = gate();
    fake.handler = async (entry, res) => {
      await open.opened;
      fake.json(res, 200, { choices: [] });
    };
    const router = await startRouter(t, { engines: { a: fake.url }, policy: name, flags, config });
    await usable(router, 1);
    const sent = [0, 1, 2].map((i) => post(`${router.url}/v1/completions`, { prompt: ids(i) }));
    await fake.request(2);
    const count = async () => (await get(`${router.admin}/engines/a`)).json.workers[0].decode_blocks;
    const during = await count();
    open.open();
    for (const answer of await Promise.all(sent)) assert.equal(answer.status, 200);
    await until('all is given back', async () => await count() === 0);
    await router.stop();
    return during;
  }
  const apart = 3 * 22, shared = 20 + 3 * 2;
  assert.equal(await blocks('prefix_seconds'), apart);
  assert.equal(await blocks('least_loaded', { config: { kv: { assume_kv_reuse: true } } }), shared);
  assert.equal(await blocks('kv_aware'), shared);
  assert.equal(await blocks('kv_aware', { flags: ['--set', 'preset=v0'] }), apart);
  const asks = policy(t, `local p = { api = 1, name = "asks", params = { reuse = true } }
    function p.init(params) p.assume_kv_reuse = params.reuse end
    function p.score(req, w) return w.decode_blocks end return p`);
  assert.equal(await blocks(asks), shared);
  assert.equal(await blocks(asks, { flags: ['--set', 'reuse=false'] }), apart);
});
