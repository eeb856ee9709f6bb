// KV events of the simulated engine, as an independent subscriber meets them: what it has learned
// equals what the engine's cache holds, in every format; replay, faults, sessions and ranks.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { startEngine, run, until } from './lib/proc.mjs';
import { get, post, send } from './lib/http.mjs';
import { KvIndex, KvSubscriber, batchOf } from './lib/subscriber.mjs';

const anywhere = 'tcp://127.0.0.1:*';
const start = (t, flags = []) => startEngine(t, {
  flags: ['--preset', 'instant', '--kv-events', anywhere, '--kv-events-replay', anywhere, ...flags],
});
const state = async (engine) => (await get(`${engine.url}/sim/kv`)).json;
const rank = async (engine, r = 0) => (await state(engine)).ranks[r];
const act = async (engine, action, more = {}) => {
  const answer = await post(`${engine.url}/sim/kv`, { action, ...more });
  assert.equal(answer.status, 200, answer.text);
  return answer.json.ranks[more.dp_rank ?? 0];
};
const generate = (engine, text, n = 4, more = {}) => post(`${engine.url}/generate`, {
  text, sampling_params: { max_new_tokens: n }, ...more,
});
const text = (seed, words = 60) => Array.from({ length: words }, (_, i) => `w${seed * 7919 + i * 31} `).join('');

// A subscriber of rank r that the engine knows of.
async function listen(t, engine, { r = 0, ...options } = {}) {
  const { endpoint, replay, subscriptions } = await rank(engine, r);
  const s = await KvSubscriber.open(t, { endpoint, replay, ...options });
  await until('the subscription', async () => (await rank(engine, r)).subscriptions > subscriptions);
  return s;
}

// What the subscriber has learned is what the engine holds.
async function agree(engine, s, r = 0) {
  const truth = await rank(engine, r);
  await s.upTo(truth.next_seq - 1);
  assert.deepEqual(s.index.sums(), { blocks: truth.blocks, xor: truth.xor, sum: truth.sum });
  return truth;
}

const formats = {
  sglang: [],
  'vllm-array': ['--kind', 'vllm', '--kv-events-format', 'vllm-array'],
  'vllm-array, bytes': ['--kind', 'vllm', '--kv-events-format', 'vllm-array', '--kv-events-byte-hashes'],
  'vllm-map': ['--kind', 'vllm'],
  'vllm-map, bytes': ['--kind', 'vllm', '--kv-events-byte-hashes'],
};
for (const [name, flags] of Object.entries(formats)) {
  test(`a subscriber knows what the cache holds: ${name}`, async (t) => {
    const engine = await start(t, ['--pool-tokens', '2048', '--kv-events-topic', 'kv@here', ...flags]);
    const s = await listen(t, engine, { topic: 'kv@', sha: name === 'sglang' });
    const vllm = name !== 'sglang';
    const complete = (prompt, n = 8) => post(`${engine.url}/v1/completions`, { model: 'sim', prompt, max_tokens: n });

    const prompt = text(1);
    const { tokens } = (await post(`${engine.url}/tokenize`, { prompt })).json;
    assert.equal((await complete(prompt)).status, 200);
    await agree(engine, s);
    assert.ok(s.index.match(tokens) >= tokens.length - 15);

    const first = batchOf(s.messages[0].payload);
    assert.equal(s.messages[0].topic, 'kv@here');
    assert.ok(Math.abs(first.ts - Date.now() / 1000) < 3600);
    assert.equal(first.rank, 0);
    const [e] = first.raw;
    if (name.startsWith('vllm-map')) {
      assert.deepEqual(Object.keys(e), ['type', 'block_hashes', 'parent_block_hash', 'token_ids', 'block_size',
        'lora_id', 'medium', 'lora_name', 'extra_keys', 'group_idx', 'kv_cache_spec_kind']);
      assert.equal(e.extra_keys.length, e.block_hashes.length);
      assert.equal(e.kv_cache_spec_kind, 'full_attention');
    } else {
      assert.equal(e.length, vllm ? 8 : 7);
      assert.deepEqual(e.slice(4), vllm ? [16, null, 'GPU', null] : [16, null, 'GPU']);
    }
    if (name.endsWith('bytes')) assert.equal(first.events[0].block_hashes[0].length, 32);
    else assert.ok(first.events[0].block_hashes.every((hash) => vllm ? hash >= 0 : true));

    // Shared beginnings, branches, and more than the cache has room for.
    for (let i = 0; i < 24; i++) {
      await complete(text(i % 5, 30) + text(i, 30 + i), 1 + (i % 7) * 9);
      if (i % 6 === 0) await agree(engine, s);
    }
    await Promise.all(Array.from({ length: 12 }, (_, i) => complete(text(50 + (i % 4), 40 + i), 30)));
    const { blocks } = await agree(engine, s);
    assert.ok(blocks > 60);
    assert.ok(s.index.counts.BlockStored > 30);
    assert.ok(s.index.counts.BlockRemoved > 10);
    assert.equal(s.index.counts.AllBlocksCleared, 0);

    assert.equal((await post(`${engine.url}/${vllm ? 'reset_prefix_cache' : 'flush_cache'}`, '')).status, 200);
    assert.equal((await agree(engine, s)).blocks, 0);
    assert.equal(s.index.counts.AllBlocksCleared, 1);

    // One who comes late has it all from the replay.
    const late = new KvIndex();
    const answers = await s.replayed(0);
    answers.forEach((m, i) => {
      assert.equal(m.seq, i);
      assert.equal(m.topic, name.startsWith('vllm-map') ? 'kv@here' : undefined);
      assert.deepEqual(m.payload, s.messages[i].payload);
      late.apply(batchOf(m.payload));
    });
    assert.deepEqual(late.sums(), s.index.sums());
    assert.equal(s.endFrames, name.startsWith('vllm-map') ? 4 : 3);
  });
}

test('nothing is published unless asked for, and where is told', async (t) => {
  const plain = await startEngine(t, { flags: ['--preset', 'instant'] });
  assert.equal((await get(`${plain.url}/server_info`)).json.kv_events, null);
  assert.deepEqual(await state(plain), { enabled: false });
  const refused = await post(`${plain.url}/sim/kv`, { action: 'clear' });
  assert.equal(refused.status, 400);
  assert.match(refused.json.error.message, /--kv-events/);

  const engine = await start(t, ['--page-tokens', '8', '--kv-events-topic', 'kv', '--kv-events-buffer', '7']);
  const info = (await get(`${engine.url}/server_info`)).json.kv_events;
  const { endpoint, replay } = await rank(engine);
  assert.deepEqual(info, {
    publisher: 'zmq',
    endpoint_host: '127.0.0.1',
    endpoint_port_base: Number(endpoint.split(':')[2]),
    topic: 'kv',
    block_size: 8,
    dp_size: 1,
    replay_endpoint_host: '127.0.0.1',
    replay_endpoint_port_base: Number(replay.split(':')[2]),
    replay_buffer_steps: 7,
  });
  const line = await engine.log('kv_events');
  assert.ok(line.message.startsWith(`${endpoint}, replay ${replay}, sglang`), line.message);

  for (const [body, says] of [
    ['[]', /JSON object/], [{}, /action must be/], [{ action: 'dance' }, /action must be/],
    [{ action: 'lose', count: -1 }, /count must be/], [{ action: 'lose', dp_rank: 1 }, /dp_rank must be/],
    [{ action: 'restart', cache: 'warm' }, /cache must be/], [{ action: 'lose', cache: 'kept' }, /cache must be/],
    [{ action: 'lose', counts: 2 }, /members are action/],
  ]) {
    const answer = await post(`${engine.url}/sim/kv`, body);
    assert.equal(answer.status, 400, JSON.stringify(body));
    assert.match(answer.json.error.message, says);
  }

  for (const [flags, says] of [
    [['--kv-events', 'ipc:///tmp/x'], /not tcp:\/\/HOST:PORT/],
    [['--kv-events', 'tcp://127.0.0.1'], /not tcp:\/\/HOST:PORT/],
    [['--kv-events', endpoint], /Address already in use/],
    [['--kv-events-replay', anywhere], /needs --kv-events/],
    [['--kv-events', anywhere, '--kv-events-connect'], /needs a port/],
    [['--kv-events', anywhere, '--kv-events-byte-hashes'], /SGLang has none/],
  ]) {
    const { code, stderr } = await run(['engine', '--listen', '127.0.0.1:0', ...flags]);
    assert.equal(code, 1, flags.join(' '));
    assert.match(stderr, says);
  }
});

test('a replay goes as far back as the buffer, and nonsense is not answered', async (t) => {
  const engine = await start(t, ['--kv-events-buffer', '4']);
  const s = await listen(t, engine);
  for (let i = 0; i < 9; i++) {
    await generate(engine, text(i));
    await agree(engine, s);
  }
  const { next_seq: next, kept_from: kept } = await rank(engine);
  assert.equal(next - kept, 4);
  assert.deepEqual((await s.replayed(0)).map((m) => m.seq), [next - 4, next - 3, next - 2, next - 1]);
  assert.deepEqual((await s.replayed(next - 1)).map((m) => m.seq), [next - 1]);
  assert.deepEqual(await s.replayed(next), []);
  assert.deepEqual(await s.replayed(2n ** 63n), []);
  for (const frames of [[''], ['', 'short'], ['x', Buffer.alloc(8)], ['', Buffer.alloc(8), 'more'], [Buffer.alloc(3000)]]) {
    await s.dealer.send(frames);
  }
  assert.deepEqual((await s.replayed(next - 2)).map((m) => m.seq), [next - 2, next - 1]);
  assert.equal((await rank(engine)).replays, 5);
});

test('batches are lost, sent twice and spoilt on demand; a replay has them', async (t) => {
  const engine = await start(t);
  const s = await listen(t, engine);
  // One request, one batch: it has one prompt and its answer adds no block.
  const one = async (seed) => { await generate(engine, text(seed), 1); };
  await one(0);
  const { next_seq: n } = await agree(engine, s);
  assert.equal(n, 1);

  await act(engine, 'lose', { count: 2 });
  for (let i = 1; i <= 3; i++) await one(i);
  let truth = await rank(engine);
  assert.equal(truth.next_seq, n + 3);
  assert.deepEqual(truth.faults.lose, { left: 0, struck: 2 });
  await s.some(n + 1);
  assert.equal(s.messages.at(-1).seq, n + 2); // a gap of two
  const found = await s.replayed(n);
  assert.deepEqual(found.map((m) => m.seq), [n, n + 1, n + 2]);
  found.forEach((m) => s.index.apply(batchOf(m.payload)));
  assert.deepEqual(s.index.sums(), { blocks: truth.blocks, xor: truth.xor, sum: truth.sum });

  await act(engine, 'duplicate');
  await one(4);
  await one(5);
  await s.some(n + 4);
  assert.deepEqual(s.messages.slice(-3).map((m) => m.seq), [n + 3, n + 3, n + 4]);
  assert.deepEqual(s.messages.at(-2).payload, s.messages.at(-3).payload);

  await act(engine, 'garbage');
  await one(6);
  await one(7);
  await s.some(n + 6);
  assert.deepEqual(s.messages.slice(-2).map((m) => m.seq), [n + 5, n + 6]);
  assert.throws(() => batchOf(s.messages.at(-2).payload));
  (await s.replayed(n + 3)).forEach((m) => s.index.apply(batchOf(m.payload)));
  truth = await rank(engine);
  assert.deepEqual(s.index.sums(), { blocks: truth.blocks, xor: truth.xor, sum: truth.sum });

  await act(engine, 'lose', { count: 5 });
  await act(engine, 'lose', { count: 0 }); // taken back
  await one(8);
  await s.some(n + 7);
  assert.equal(s.messages.at(-1).seq, n + 7);
});

test('publishing pauses and goes on', async (t) => {
  const engine = await start(t);
  const s = await listen(t, engine);
  await generate(engine, text(0));
  const { next_seq: n } = await agree(engine, s);
  assert.equal((await act(engine, 'pause')).paused, true);
  for (let i = 1; i < 4; i++) await generate(engine, text(i), 1);
  const paused = await rank(engine);
  assert.equal(paused.next_seq, n + 3);
  assert.equal(paused.unsent, 3);
  assert.deepEqual(await s.replayed(n), []); // an answer that follows whatever was sent before it
  assert.equal(s.messages.length, n);
  assert.equal((await act(engine, 'resume')).unsent, 0);
  await agree(engine, s);
});

test('an engine restarts with and without its cache', async (t) => {
  const engine = await start(t);
  const s = await listen(t, engine);
  await generate(engine, text(0));
  await generate(engine, text(1));
  const before = await agree(engine, s);

  const kept = await act(engine, 'restart', { cache: 'kept' });
  assert.deepEqual([kept.next_seq, kept.blocks, kept.restarts], [0, before.blocks, 1]);
  assert.deepEqual(await s.replayed(0), []);
  const seen = s.messages.length;
  assert.ok((await generate(engine, text(0))).json.meta_info.cached_tokens > 0);
  await generate(engine, text(2));
  await s.some(seen + 1);
  assert.equal(s.messages[seen].seq, 0); // it goes back

  // With the cache goes all that was under way.
  const slow = await startEngine(t, {
    flags: ['--kv-events', anywhere, '--kv-events-replay', anywhere, '--enable-streaming-session'],
  });
  await post(`${slow.url}/open_session`, { capacity_of_str_len: 1000, session_id: 'a', streaming: true });
  await generate(slow, text(0));
  const res = await send(`${slow.url}/generate`, {
    method: 'POST', body: { text: text(1), stream: true, sampling_params: { max_new_tokens: 100000 } },
  });
  const cut = new Promise((resolve) => { res.once('error', resolve); res.once('aborted', resolve); });
  res.on('error', () => {});
  await new Promise((resolve) => { res.once('data', resolve); });
  res.resume();
  assert.ok((await rank(slow)).blocks > 0);
  const empty = await act(slow, 'restart');
  assert.deepEqual([empty.next_seq, empty.blocks, empty.restarts], [0, 0, 1]);
  await cut;
  assert.equal((await get(`${slow.url}/sim/sessions`)).json.open, 0);
  const requests = (await get(`${slow.url}/sim/requests`)).json;
  assert.deepEqual([requests.inflight, requests.running, requests.counts.cut], [0, 0, 1]);
  assert.equal((await generate(slow, text(0))).json.meta_info.cached_tokens, 0);
  const again = await KvSubscriber.open(t, await rank(slow)); // came late: has it from the replay
  const index = new KvIndex();
  (await again.replayed(0)).forEach((m) => index.apply(batchOf(m.payload)));
  const truth = await rank(slow);
  assert.deepEqual(index.sums(), { blocks: truth.blocks, xor: truth.xor, sum: truth.sum });
});

test('a cache is cleared while a request runs: what it holds stays', async (t) => {
  const engine = await startEngine(t, { flags: ['--kv-events', anywhere] });
  const s = await listen(t, engine);
  await generate(engine, text(0), 1);
  const controller = new AbortController();
  const res = await send(`${engine.url}/generate`, {
    method: 'POST', signal: controller.signal,
    body: { text: text(1), stream: true, sampling_params: { max_new_tokens: 100000 } },
  });
  res.on('error', () => {});
  await new Promise((resolve) => { res.once('data', resolve); });
  const before = await agree(engine, s);
  const cleared = await act(engine, 'clear');
  assert.ok(cleared.blocks > 0 && cleared.blocks < before.blocks);
  await agree(engine, s);
  assert.equal(s.index.counts.AllBlocksCleared, 0);
  controller.abort();
  await until('the request is over', async () => (await get(`${engine.url}/sim/requests`)).json.running === 0);
  assert.equal((await act(engine, 'clear')).blocks, 0);
  await agree(engine, s);
  assert.equal(s.index.counts.AllBlocksCleared, 1);
});

test('of a session only the first turn is told', async (t) => {
  const engine = await start(t, ['--enable-streaming-session']);
  const s = await listen(t, engine, { sha: true });
  await post(`${engine.url}/open_session`, { capacity_of_str_len: 65536, session_id: 'a', streaming: true });
  const turn = (seed) => generate(engine, text(seed), 40, { session_params: { id: 'a' } });
  await turn(0);
  const first = await agree(engine, s);
  assert.ok(first.blocks > 0);
  for (let i = 1; i < 4; i++) assert.ok((await turn(i)).json.meta_info.cached_tokens > 0);
  await post(`${engine.url}/close_session`, { session_id: 'a' });
  assert.deepEqual(await agree(engine, s), first);
});

test('each rank has its cache and its port; a request may name its rank', async (t) => {
  const engine = await start(t, ['--dp-size', '3']);
  assert.equal((await get(`${engine.url}/server_info`)).json.dp_size, 3);
  const ports = (await state(engine)).ranks.map((r) => Number(r.endpoint.split(':')[2]));
  assert.deepEqual(ports, [ports[0], ports[0] + 1, ports[0] + 2]);
  const all = [];
  for (let r = 0; r < 3; r++) all.push(await listen(t, engine, { r }));

  assert.equal((await generate(engine, text(0), 4, { routed_dp_rank: 1 })).status, 200);
  assert.equal((await generate(engine, text(1), 4, { data_parallel_rank: 1 })).status, 200);
  const chat = (headers, more = {}) => post(`${engine.url}/v1/chat/completions`, {
    model: 'sim', max_tokens: 4, messages: [{ role: 'user', content: text(2) }], ...more,
  }, { headers });
  assert.equal((await chat({ 'X-Data-Parallel-Rank': '2' }, { routed_dp_rank: 0 })).status, 200);
  const ranks = async () => (await get(`${engine.url}/sim/requests`)).json.over.map((r) => r.dp_rank);
  assert.deepEqual(await ranks(), [1, 1, 2]);
  for (let r = 0; r < 3; r++) {
    const truth = await agree(engine, all[r], r);
    assert.equal(truth.blocks > 0, r > 0);
    for (const m of all[r].messages) assert.equal(batchOf(m.payload).rank, r);
  }
  // What one rank has is not found by another.
  const cached = async (r) => (await generate(engine, text(0), 4, { routed_dp_rank: r })).json.meta_info.cached_tokens;
  assert.equal(await cached(0), 0);
  assert.ok(await cached(1) > 0);

  assert.equal((await chat({ 'X-Data-Parallel-Rank': 'two' })).status, 400);
  assert.equal((await chat({ 'X-Data-Parallel-Rank': '3' })).status, 400);
  const refused = await generate(engine, text(0), 4, { routed_dp_rank: 3 });
  assert.match(refused.json.error.message, /out of range \[0, 3\)/);
  const at = (await ranks()).length;
  for (let i = 0; i < 6; i++) await generate(engine, text(9)); // none named: in turn
  assert.deepEqual((await ranks()).slice(at), [0, 1, 2, 0, 1, 2]);

  const { loads } = (await get(`${engine.url}/v1/loads`)).json;
  assert.deepEqual(loads.map((l) => l.dp_rank), [0, 1, 2]);
  assert.match((await get(`${engine.url}/metrics`)).text, /sglang_num_requests_total\{model_name="sim",dp_rank="2"\} \d/);
  await post(`${engine.url}/flush_cache`, '');
  await act(engine, 'restart', { dp_rank: 1 });
  const after = (await state(engine)).ranks;
  assert.deepEqual(after.map((r) => [r.blocks, r.restarts]), [[0, 0], [0, 1], [0, 0]]);
  assert.ok(after[0].next_seq > 0 && after[1].next_seq === 0);
});

test('an engine connects to a subscriber that listens', async (t) => {
  const s = await KvSubscriber.open(t, { sha: true });
  const engine = await startEngine(t, {
    flags: ['--preset', 'instant', '--kv-events', s.endpoint, '--kv-events-connect'],
  });
  await until('the subscription', async () => (await rank(engine)).subscriptions === 1);
  assert.equal((await get(`${engine.url}/server_info`)).json.kv_events, null); // nothing to connect to
  await generate(engine, text(0));
  await agree(engine, s);
});
