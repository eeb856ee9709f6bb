// How far an engine's events are believed, and what that does to routing: gaps, replays, restarts,
// duplicates, garbage, silence, engines that die, come back and leave.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { metric, startEngine, until, usable } from './lib/proc.mjs';
import { del, get, post } from './lib/http.mjs';
import {
  act, complete, explain, holders, indexOf, prompt, published, startKvRouter, startPublished, startSim,
  truth, untilHeld, untilState, untilTrust, workerOf,
} from './lib/kv.mjs';
import { KvPublisher } from './lib/publisher.mjs';

// Two engines behind publishers, both live, with a block each that says so.
async function pair(t, options, more = {}) {
  const list = [await published(t, 'a', options), await published(t, 'b', options)];
  const router = await startPublished(t, list, more);
  for (const { pub } of list) await pub.store(prompt(90, 16));
  await untilTrust(router, 'a', 'live');
  await untilTrust(router, 'b', 'live');
  return { router, a: list[0], b: list[1] };
}
const events = async (router, name = 'b') => (await workerOf(router, name)).events;
const goesTo = async (router, ids) => (await complete(router, ids)).worker;

test('a gap is filled by a replay', async (t) => {
  for (const replayTopic of [false, true]) {
    const { router, b } = await pair(t, { replay: true, replayTopic });
    const asked = b.pub.replays.length;
    await b.pub.store(prompt(1), {}, { lost: true });
    await b.pub.store(prompt(2), {}, { lost: true });
    await b.pub.store(prompt(3));
    await untilHeld(router, prompt(1), { b: 160 });
    await untilHeld(router, prompt(3), { b: 160 });
    await untilState(router, 'b', 'live');
    const e = await events(router);
    assert.deepEqual([e.gaps, e.missed, e.resets, e.last_seq, e.complete], [1, 2, 0, 3, true]);
    assert.ok(b.pub.replays.length > asked);
    assert.equal((await events(router, 'a')).gaps, 0);
    for (const seed of [1, 2, 3]) assert.equal(await goesTo(router, prompt(seed)), 'b');
    assert.equal(await metric(router, 'perilune_kv_missed_total', 'worker="b"'), 2);
  }
});

test('a gap that nobody can fill costs that worker what it had, and no other', async (t) => {
  const { router, a, b } = await pair(t, {});
  await a.pub.store(prompt(1, 64));
  await b.pub.store(prompt(2));
  await untilHeld(router, prompt(2), { b: 160 });
  await b.pub.store(prompt(3), {}, { lost: true });
  await b.pub.store(prompt(4));
  await untilHeld(router, prompt(4), { b: 160 });
  assert.deepEqual(await holders(router, prompt(2)), {}); // it may be gone by now
  assert.deepEqual(await holders(router, prompt(1)), { a: 64 });
  let e = await events(router);
  assert.deepEqual([e.state, e.gaps, e.resets, e.complete], ['reset', 1, 1, false]);
  await untilTrust(router, 'b', 'behind');
  assert.equal(await goesTo(router, prompt(4)), 'b');
  await b.pub.store(prompt(5));
  await untilTrust(router, 'b', 'live');
  await b.pub.clear(); // from here on everything is known again
  await until('b is complete', async () => (await events(router)).complete);
  e = await events(router);
  assert.equal((await workerOf(router, 'b')).entries, 0);
});

test('numbers that go back are a restart: that worker begins anew', async (t) => {
  const { router, a, b } = await pair(t, { replay: true });
  await a.pub.store(prompt(1));
  await b.pub.store(prompt(2));
  await untilHeld(router, prompt(1), { a: 160 });
  await untilHeld(router, prompt(2), { b: 160 });
  b.pub.restart();
  await b.pub.store(prompt(3));
  await untilHeld(router, prompt(3), { b: 160 });
  await untilTrust(router, 'b', 'live');
  assert.deepEqual(await holders(router, prompt(2)), {});
  assert.deepEqual(await holders(router, prompt(1)), { a: 160 });
  assert.equal((await events(router)).restarts, 1);
  assert.deepEqual(await Promise.all([3, 1].map((seed) => goesTo(router, prompt(seed)))), ['b', 'a']);
});

test('an engine that restarts with another block size is understood', async (t) => {
  const { router, b } = await pair(t, { replay: true });
  await b.pub.store(prompt(1));
  await untilHeld(router, prompt(1), { b: 160 });
  b.pub.restart();
  await b.pub.store(prompt(2), { blockSize: 32 });
  await untilHeld(router, prompt(2), { b: 160 });
  assert.deepEqual(await holders(router, prompt(1)), {});
  assert.equal(await goesTo(router, prompt(2)), 'b');
});

test('an engine that sleeps has nothing cached, before it says so', async (t) => {
  const list = [await published(t, 'a', {}, { kind: 'vllm' }), await published(t, 'b', {}, { kind: 'vllm' })];
  const state = (awake) => `vllm:num_requests_running{engine="0"} 0
vllm:engine_sleep_state{engine="0",sleep_state="awake"} ${awake}
vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} ${1 - awake}
`;
  for (const { fake } of list) fake.metrics = state(1);
  const router = await startPublished(t, list, { config: { gauges: { interval_seconds: 0.1 } } });
  for (const { pub } of list) await pub.store(prompt(1));
  await untilHeld(router, prompt(1), { a: 160, b: 160 });
  list[1].fake.metrics = state(0);
  await untilHeld(router, prompt(1), { a: 160 });
  assert.match((await router.log('engine_asleep')).message, /^b /);
  // awake again, it fills anew; what it had stays away
  list[1].fake.metrics = state(1);
  await list[1].pub.store(prompt(2));
  await untilHeld(router, prompt(2), { b: 160 });
  assert.deepEqual(await holders(router, prompt(1)), { a: 160 });
});

test('what comes twice counts once', async (t) => {
  const { router, b } = await pair(t, {});
  const hashes = await b.pub.store(prompt(1), {}, { twice: true });
  await b.pub.store(prompt(2));
  await untilHeld(router, prompt(2), { b: 160 });
  await b.pub.remove(hashes.slice(1));
  await untilHeld(router, prompt(1), { b: 16 });
  const e = await events(router);
  assert.deepEqual([e.state, e.duplicates, e.gaps, e.resets], ['live', 1, 0, 0]);
});

test('garbage is counted, costs that worker its trust, and routing goes on', async (t) => {
  const { router, a, b } = await pair(t, {});
  await a.pub.store(prompt(1, 32));
  await b.pub.store(prompt(1));
  await untilHeld(router, prompt(1), { a: 32, b: 160 });
  assert.equal(await goesTo(router, prompt(1)), 'b');
  for (let i = 0; i < 20; i++) await b.pub.send([Buffer.from('x'), Buffer.alloc(3), Buffer.from('no batch at all')]);
  await untilTrust(router, 'b', 'stale');
  const e = await events(router);
  assert.equal(e.state, 'untrusted');
  assert.ok(e.bad > 8, `${e.bad}`);
  assert.equal(await metric(router, 'perilune_kv_state', 'worker="b",state="untrusted"'), 1);
  assert.deepEqual(await holders(router, prompt(1)), { a: 32 });
  assert.equal((await workerOf(router, 'b')).entries, 0);
  assert.equal((await workerOf(router, 'a')).trust, 'live');
  const { workers } = await explain(router, { prompt: prompt(2) });
  assert.deepEqual(workers.map((w) => w.kv_trust), ['live', 'stale']);
  assert.equal(await goesTo(router, prompt(2)), 'a');
});

test('what a batch holds that cannot be indexed is counted by its reason', async (t) => {
  const { router, b } = await pair(t, {});
  await b.pub.publish([b.pub.stored({ hashes: [1n], tokens: [1, 2, 3], blockSize: 16 })]);
  await b.pub.publish([b.pub.stored({ hashes: [2n], tokens: prompt(1, 16), blockSize: 16, parent: 77n })]);
  await b.pub.publish([b.pub.removed([55n])]);
  await b.pub.publish([b.pub.stored({ hashes: [3n], tokens: prompt(2, 16), medium: 'PAPYRUS' })]);
  await b.pub.publish([{ type: 'BlockPainted', color: 'green' }]);
  await b.pub.store(prompt(3));
  await untilHeld(router, prompt(3), { b: 160 });
  const refused = (reason) => metric(router, 'perilune_kv_refused_total', `worker="b",reason="${reason}"`);
  for (const reason of ['bad_counts', 'unknown_parents', 'removed_unknown', 'unknown_media', 'unknown_types']) {
    assert.equal(await refused(reason), 1, reason);
  }
  assert.equal(await metric(router, 'perilune_kv_nothing_indexed', 'worker="b"'), 0);
  assert.equal((await workerOf(router, 'b')).trust, 'live');
});

test('stores of which nothing can be indexed are told, by a gauge and a line', async (t) => {
  const one = await published(t, 'a', {});
  const router = await startPublished(t, [one]);
  for (let i = 0; i < 9; i++) {
    await one.pub.publish([one.pub.stored({ hashes: [BigInt(i + 1)], tokens: [1, 2, 3], blockSize: 16 })]);
  }
  const line = await router.log('kv_nothing_indexed');
  assert.match(line.message, /\ba\b/);
  await until('the gauge', async () => await metric(router, 'perilune_kv_nothing_indexed', 'worker="a"') === 1);
  await one.pub.store(prompt(1));
  await until('it is over', async () => await metric(router, 'perilune_kv_nothing_indexed', 'worker="a"') === 0);
});

test('an engine that is used and says nothing goes stale, and comes back', async (t) => {
  const { router, b } = await pair(t, {}, { config: { kv: { stale_seconds: 1 } } });
  await b.pub.store(prompt(1));
  await untilHeld(router, prompt(1), { b: 160 });
  await until('b is stale', async () => {
    await complete(router, [...prompt(1), ...prompt(2)]); // it goes to b as long as b is believed
    return (await workerOf(router, 'b')).trust === 'stale';
  }, { every: 100 });
  assert.ok(b.fake.requests.length > 0);
  assert.equal((await events(router)).state, 'stale');
  assert.equal((await workerOf(router, 'b')).entries, 11); // kept, but not believed
  const { workers } = await explain(router, { prompt: prompt(90, 16) });
  assert.equal(workers[1].cached_tokens, 0);
  await b.pub.store(prompt(3));
  await untilTrust(router, 'b', 'live');
  assert.equal((await explain(router, { prompt: prompt(90, 16) })).workers[1].cached_tokens, 16);
});

test('a policy may refuse what it would have to route without events', async (t) => {
  const text = `local pl = require "perilune"
    return { api = 1, name = "strict", score = function(req, w) return -w.cached_tokens end,
      degrade = function(req, fault)
        if fault.kind == pl.INDEX_STALE and req:member("user") ~= "patient" then return pl.REJECT, 7 end
      end }`;
  const one = await published(t, 'a', {});
  const router = await startPublished(t, [one], { text, config: { kv: { stale_seconds: 1 } } });
  const ask = (more) => post(`${router.url}/v1/completions`, { prompt: prompt(1), ...more });
  assert.equal((await ask()).status, 200); // nothing was published yet: that is no fault
  await one.pub.store(prompt(2));
  await untilTrust(router, 'a', 'live');
  let answer;
  await until('it is stale', async () => {
    answer = await ask();
    return answer.status !== 200;
  }, { every: 100 });
  assert.deepEqual([answer.status, answer.json.error.code, answer.headers['retry-after']], [503, 'index_stale', '7']);
  assert.equal((await ask({ user: 'patient' })).status, 200);
  await one.pub.store(prompt(1));
  await untilTrust(router, 'a', 'live');
  assert.equal((await ask()).status, 200);
});

test('an engine that publishes late is caught up by its replay', async (t) => {
  const engines = { a: await startSim(t), b: await startSim(t) };
  await complete(engines.b, prompt(1), { model: 'sim' }); // before there is a router
  const router = await startKvRouter(t, engines);
  await untilHeld(router, prompt(1), { b: 160 });
  await untilTrust(router, 'b', 'live');
  assert.deepEqual(await complete(router, prompt(1)), { worker: 'b', cached: 144 });

  await act(engines.b, 'lose', { count: 1 });
  await complete(engines.b, prompt(2), { model: 'sim' });
  await complete(engines.b, prompt(3), { model: 'sim' });
  await untilHeld(router, prompt(2), { b: 160 });

  await act(engines.b, 'restart'); // with its cache
  await complete(engines.b, prompt(4), { model: 'sim' });
  await untilHeld(router, prompt(4), { b: 160 });
  assert.deepEqual(await holders(router, prompt(1)), {});
  await untilTrust(router, 'b', 'live');
  assert.ok((await events(router)).restarts >= 1);
  assert.equal(await goesTo(router, prompt(4)), 'b');
});

test('an engine is killed and started again: it is empty, and trusted again', async (t) => {
  const engines = { a: await startSim(t), b: await startSim(t) };
  const router = await startKvRouter(t, engines);
  await untilTrust(router, 'a', 'live');
  await untilTrust(router, 'b', 'live');
  for (let i = 0; i < 3; i++) await complete(engines.b, prompt(1 + i), { model: 'sim' });
  await untilHeld(router, prompt(3), { b: 160 });
  const { endpoint, replay } = await truth(engines.b);
  await engines.b.stop('SIGKILL');
  await until('b is down', async () => (await get(`${router.admin}/engines/b`)).json.health === 'down');
  assert.equal(await goesTo(router, prompt(3)), 'a');

  const again = await startEngine(t, {
    flags: ['--preset', 'instant', '--kv-events', endpoint, '--kv-events-replay', replay, '--listen', new URL(engines.b.url).host],
  });
  await usable(router, 2);
  await complete(again, prompt(5), { model: 'sim' });
  await untilHeld(router, prompt(5), { b: 160 });
  await untilTrust(router, 'b', 'live');
  assert.deepEqual(await holders(router, prompt(1)), {});
  assert.equal((await workerOf(router, 'b')).entries, 10);
  assert.equal(await goesTo(router, prompt(5)), 'b');
});

test('an engine that is removed leaves nothing behind; one that is added is heard', async (t) => {
  const engines = { a: await startSim(t), b: await startSim(t) };
  const router = await startKvRouter(t, engines);
  await untilTrust(router, 'b', 'live');
  await complete(engines.b, prompt(1), { model: 'sim' });
  await untilHeld(router, prompt(1), { b: 160 });
  assert.equal((await del(`${router.admin}/engines/b`)).status, 200);
  await until('the index is empty', async () => (await indexOf(router)).index.entries === 0);
  assert.equal(await workerOf(router, 'b'), undefined);
  assert.deepEqual(await holders(router, prompt(1)), {});
  assert.equal(await goesTo(router, prompt(1)), 'a');
  const { status } = await post(`${router.admin}/engines`, { name: 'c', url: engines.b.url });
  assert.equal(status, 201);
  await untilHeld(router, prompt(1), { a: 160, c: 160 });
  assert.equal(await metric(router, 'perilune_kv_state', 'worker="b"'), undefined);
});

test('an engine that tells where it publishes, but not its replay socket, is configured with that', async (t) => {
  const { fake, pub, entry } = await published(t, 'a', { style: 'sglang', replay: true });
  fake.info = { version: '0.5.2', kv_events: {
    publisher: 'zmq', endpoint_host: '*', endpoint_port_base: Number(pub.endpoint.split(':')[2]), topic: '',
    block_size: 16, dp_size: 1,
  } };
  await pub.store(prompt(1)); // before anybody listens
  const router = await startPublished(t, [{
    fake, pub, entry: { ...entry, kind: 'sglang', kv_events: { replay: pub.replayEndpoint } },
  }]);
  await untilHeld(router, prompt(1), { a: 160 });
  const { endpoint, complete: whole } = await events(router, 'a');
  assert.deepEqual([endpoint, whole], [pub.endpoint, true]);
});

test('an engine that comes back elsewhere, cut otherwise, is listened to there', async (t) => {
  const { fake, pub } = await published(t, 'a');
  const tell = (endpoint, more = {}) => {
    const [host, port] = endpoint.slice('tcp://'.length).split(':');
    fake.info = { model_path: 'm', tp_size: 1, version: '0.6', kv_events: {
      publisher: 'zmq', endpoint_host: host, endpoint_port_base: Number(port), topic: '', block_size: 16, dp_size: 1, ...more,
    } };
  };
  tell(pub.endpoint);
  const router = await startPublished(t, [{ fake, pub, entry: { name: 'a', url: fake.url, kind: 'sglang' } }],
    { config: { health: { detect_interval_seconds: 0.1, interval_seconds: 0.1 } } });
  await pub.store(prompt(1));
  await untilHeld(router, prompt(1), { a: 160 });
  // the same program, told again and again: nothing is begun anew
  const before = fake.infos;
  await fake.when(() => fake.infos > before + 2, 'more questions');
  assert.equal(pub.subscriptions, 1);
  assert.deepEqual(await holders(router, prompt(1)), { a: 160 });
  // another one: another port, another topic, other pages, and more ranks than are configured
  const later = await KvPublisher.open(t, { topic: 'kv' });
  tell(later.endpoint, { topic: 'kv', block_size: 32, dp_size: 2 });
  await later.subscribed();
  await untilHeld(router, prompt(1), {}); // whatever was known is of the former
  await later.store(prompt(2, 64), { blockSize: 32 });
  await untilHeld(router, prompt(2, 64), { a: 64 });
  assert.equal(await goesTo(router, prompt(2, 64)), 'a');
  assert.match((await router.log('kv_ranks')).message, /2 data-parallel ranks.*dp_size/);
  // and one that publishes nothing any more
  fake.info = { ...fake.info, kv_events: null };
  await untilTrust(router, 'a', 'routed');
  await untilHeld(router, prompt(2, 64), {});
  assert.equal((await workerOf(router, 'a')).events, null);
});
