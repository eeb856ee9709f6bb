// Sessions of the simulated engine over HTTP, as a client or a router meets them: opening and
// closing, turns by every API, refusals, aborts, timeouts, what is held, retention, and faults.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import OpenAI from 'openai';
import { startEngine, until, metric } from './lib/proc.mjs';
import { events, get, post, send } from './lib/http.mjs';

const disabled = 'Streaming sessions are disabled. Please relaunch with --enable-streaming-session.';
const taken = 'Failed to open the session. Check if a session with the same id is still open.';

const start = (t, flags = []) => startEngine(t, {
  flags: ['--preset', 'instant', '--enable-streaming-session', ...flags],
});
// An engine in real time, slow enough to be met at work: 7 ms a token.
const startSlow = (t, flags = []) => startEngine(t, {
  flags: ['--preset', 'llama-8b-h100-tp1', '--enable-streaming-session', ...flags],
});

const open = (engine, id, more = {}) => post(`${engine.url}/open_session`, {
  capacity_of_str_len: 65536, session_id: id, streaming: true, ...more,
});
const close = (engine, id) => post(`${engine.url}/close_session`, { session_id: id });
const sessions = async (engine) => (await get(`${engine.url}/sim/sessions`)).json;
const session = async (engine, id) => (await sessions(engine)).sessions.find((s) => s.id === id);

const generate = (engine, id, text, more = {}) => post(`${engine.url}/generate`, {
  text, sampling_params: { max_new_tokens: 4 }, session_params: { id }, ...more,
});
const chat = (engine, messages, more = {}) => post(`${engine.url}/v1/chat/completions`, {
  model: 'sim', max_tokens: 5, messages, ...more,
});
const tokens = async (engine, messages, generation, more = {}) => (await post(`${engine.url}/tokenize`, {
  messages, add_generation_prompt: generation, ...more,
})).json.count;

// A streamed turn that has begun and will not end by itself soon.
async function busy(engine, id, text = 'a long story, please ') {
  const controller = new AbortController();
  const res = await send(`${engine.url}/generate`, {
    method: 'POST',
    signal: controller.signal,
    body: {
      text, stream: true, rid: `busy-${id}`, session_params: { id }, sampling_params: { max_new_tokens: 100000 },
    },
  });
  assert.equal(res.statusCode, 200);
  await new Promise((resolve) => { res.once('data', resolve); });
  res.on('error', () => {});
  return { res, leave: () => controller.abort() };
}

test('without its flag an engine refuses streaming sessions and says so', async (t) => {
  const engine = await startEngine(t, { flags: ['--preset', 'instant'] });
  const info = (await get(`${engine.url}/server_info`)).json;
  assert.equal(info.enable_streaming_session, false);
  assert.equal(info.enable_session_radix_cache, false);
  const answer = await open(engine, 'a');
  assert.equal(answer.status, 400);
  assert.deepEqual(answer.json, { error: { message: disabled } });
  // A session that is not a streaming one can be opened, as with SGLang; it takes no turns here.
  assert.equal((await open(engine, 'a', { streaming: false })).text, '"a"');
  const turn = await generate(engine, 'a', 'hello');
  assert.equal(turn.status, 200);
  assert.equal(turn.json.meta_info.finish_reason.type, 'abort');
  assert.equal(turn.json.meta_info.finish_reason.message, disabled);
  const refused = await chat(engine, [{ role: 'user', content: 'hi' }], { session_params: { id: 'a' } });
  assert.equal(refused.status, 400);
  assert.equal(refused.json.error.message, disabled);
  // Requests without a session never notice, nor do those with an empty one.
  assert.equal((await chat(engine, [{ role: 'user', content: 'hi' }], { session_params: null })).status, 200);
  assert.equal((await generate(engine, null, 'hello')).json.meta_info.finish_reason.type, 'length');
});

test('opening and closing answer as SGLang does', async (t) => {
  const engine = await start(t);
  const info = (await get(`${engine.url}/server_info`)).json;
  assert.equal(info.enable_streaming_session, true);
  assert.equal(info.enable_priority_scheduling, true);
  assert.deepEqual(info.perilune_engine, { retention: true });

  let answer = await open(engine, 'a "quoted" name', { timeout: 300 });
  assert.equal(answer.status, 200);
  assert.equal(answer.text, '"a \\"quoted\\" name"');
  answer = await open(engine, 'a "quoted" name');
  assert.equal(answer.status, 400);
  assert.deepEqual(answer.json, { error: { message: taken } });
  answer = await post(`${engine.url}/open_session`, { capacity_of_str_len: 0, streaming: true });
  assert.match(answer.json, /^[0-9a-f]{32}$/);
  assert.deepEqual((await sessions(engine)).sessions.map((s) => s.id), ['a "quoted" name', answer.json]);
  assert.equal((await session(engine, 'a "quoted" name')).timeout, 300);
  assert.equal((await session(engine, answer.json)).timeout, null);

  for (const [body, says] of [
    [{ session_id: 'b' }, /capacity_of_str_len: Field required/],
    [{ capacity_of_str_len: 'x' }, /capacity_of_str_len must be/],
    [{ capacity_of_str_len: 1, session_id: '' }, /session_id must be/],
    [{ capacity_of_str_len: 1, session_id: 'x'.repeat(1025) }, /session_id must be/],
    [{ capacity_of_str_len: 1, timeout: -1 }, /timeout must be/],
    [{ capacity_of_str_len: 1, streaming: 'yes' }, /streaming must be/],
    ['[]', /not a JSON object/],
  ]) {
    answer = await post(`${engine.url}/open_session`, body);
    assert.equal(answer.status, 400, JSON.stringify(body));
    assert.match(answer.json.error.message, says);
  }

  answer = await (await send(`${engine.url}/open_session`, {
    method: 'GET', body: { capacity_of_str_len: 1, session_id: 'got' },
  })).text();
  assert.equal(answer, '"got"');
  assert.equal((await session(engine, 'got')).streaming, false);
  for (let i = 0; i < 2; i++) { // the second time it is unknown, which is no error
    answer = await close(engine, 'a "quoted" name');
    assert.equal(answer.status, 200);
    assert.equal(answer.text, '');
  }
  assert.equal((await post(`${engine.url}/close_session`, {})).status, 400);
  const { counts, open: left } = await sessions(engine);
  assert.deepEqual([counts.opened, counts.closed, left], [3, 1, 2]);
});

test('a chat in deltas is the same conversation, token for token, as when it is resent', async (t) => {
  const engine = await start(t);
  await open(engine, 'a');
  const tools = [{ type: 'function', function: { name: 'look', parameters: { type: 'object' } } }];
  const deltas = [
    [{ role: 'system', content: 'You know the moon.' }, { role: 'user', content: 'What is it made of?' }],
    [{ role: 'user', content: 'And who says so? Ünïcödé 🌕 too.' }],
    [{ role: 'user', content: [{ type: 'text', text: 'Two' }, { type: 'text', text: 'parts' }], name: 'ada' },
      { role: 'user', content: 'at once' }],
    [{ role: 'tool', content: 'a result', tool_call_id: 'x' }],
  ];
  const all = [];
  let held = 0;
  for (const [k, delta] of deltas.entries()) {
    all.push(...delta);
    const prompt = await tokens(engine, all, true, { tools });
    const answer = await chat(engine, delta, { session_params: { id: 'a' }, tools });
    assert.equal(answer.status, 200, answer.text);
    const { usage, choices: [{ message }] } = answer.json;
    assert.equal(usage.prompt_tokens, prompt, `turn ${k}`);
    assert.equal(usage.prompt_tokens_details.cached_tokens, held, `turn ${k}`);
    all.push({ role: 'assistant', content: message.content });
    const now = await session(engine, 'a');
    assert.equal(now.tokens, await tokens(engine, all, false, { tools }), `turn ${k}`);
    assert.equal(now.kv_tokens, now.tokens - 2); // the answer's last word and the end mark come next
    assert.equal(now.held_tokens + now.prefix_tokens, Math.ceil(now.kv_tokens / 16) * 16);
    assert.equal(now.turns, k + 1);
    held = now.kv_tokens;
  }
  // The cache knows the first prompt only. When the slot is lost the next turn leaves its whole
  // prompt there: resent without the session it is found, every block of it.
  assert.equal((await post(`${engine.url}/flush_cache`)).status, 200);
  assert.equal((await session(engine, 'a')).held_tokens, 0);
  const last = [{ role: 'user', content: 'once more' }];
  const again = await chat(engine, last, { session_params: { id: 'a' } });
  assert.equal(again.json.usage.prompt_tokens_details.cached_tokens, 0);
  const resent = await chat(engine, [...all, ...last], { tools });
  const { usage } = resent.json;
  assert.equal(usage.prompt_tokens, again.json.usage.prompt_tokens);
  assert.equal(usage.prompt_tokens_details.cached_tokens, Math.floor((usage.prompt_tokens - 1) / 16) * 16);
});

test('turns by all APIs that take them, streamed and not, with the official client', async (t) => {
  const engine = await start(t);
  await open(engine, 'a');
  const client = new OpenAI({ apiKey: 'none', baseURL: `${engine.url}/v1`, maxRetries: 0 });
  const first = await client.chat.completions.create({
    model: 'sim', max_tokens: 6, messages: [{ role: 'user', content: 'hello' }], session_params: { id: 'a' },
  });
  let { tokens: said, kv_tokens: kv } = await session(engine, 'a');
  assert.equal(said, first.usage.total_tokens + 1);

  const stream = await client.chat.completions.create({
    model: 'sim', max_tokens: 3, messages: [{ role: 'user', content: 'again' }], session_params: { id: 'a' },
    stream: true, stream_options: { include_usage: true },
  });
  let usage;
  for await (const chunk of stream) usage = chunk.usage ?? usage;
  assert.equal(usage.prompt_tokens_details.cached_tokens, kv);
  ({ tokens: said, kv_tokens: kv } = await session(engine, 'a'));
  assert.equal(said, usage.total_tokens + 1);

  const completion = await client.completions.create({
    model: 'sim', max_tokens: 2, prompt: 'more', session_params: { id: 'a' },
  });
  assert.equal(completion.usage.prompt_tokens, said + 1);
  assert.equal(completion.usage.prompt_tokens_details.cached_tokens, kv);
  ({ tokens: said, kv_tokens: kv } = await session(engine, 'a'));
  assert.equal(said, completion.usage.total_tokens);
  assert.equal(kv, said - 1);

  const ids = await post(`${engine.url}/generate`, {
    input_ids: [1, 2, 3], rid: 'turn-4', sampling_params: { max_new_tokens: 1 }, session_params: { id: 'a' },
  });
  assert.equal(ids.json.meta_info.prompt_tokens, said + 3);
  assert.equal(ids.json.meta_info.cached_tokens, kv);
  // The turn that it follows may be named; any other is no part of an append-only session.
  const after = await generate(engine, 'a', 'next', { session_params: { id: 'a', rid: 'turn-4' } });
  assert.equal(after.json.meta_info.finish_reason.type, 'length');
  assert.equal((await session(engine, 'a')).turns, 5);
  const { over } = (await get(`${engine.url}/sim/requests`)).json;
  assert.deepEqual(over.map((r) => r.session), Array(5).fill('a'));
});

test('what a streaming session does not do is refused in the words of SGLang', async (t) => {
  const engine = await start(t);
  await open(engine, 'a');
  await open(engine, 'r', { streaming: false });
  await generate(engine, 'a', 'a first turn of some length');
  const before = await session(engine, 'a');
  for (const [params, says] of [
    [{ id: 'none' }, 'Invalid request: session id none does not exist'],
    [{ replace: true, drop_previous_output: true, offset: 1, rid: 'x' }, 'Streaming sessions do not support replace.'],
    [{ drop_previous_output: true, offset: 1 }, 'Streaming sessions do not support drop_previous_output.'],
    [{ offset: 7 }, 'Streaming sessions do not support offset.'],
    [{ rid: 'x' }, 'Invalid request session id'],
    [{ id: 'r' }, 'Session r is not a streaming session; the simulated engine takes turns of streaming sessions only'],
  ]) {
    const session_params = { id: 'a', ...params };
    const native = await generate(engine, null, 'more', { session_params });
    assert.equal(native.status, 200);
    const info = native.json.meta_info;
    assert.equal(info.finish_reason.type, 'abort');
    assert.equal(info.finish_reason.message, says);
    assert.deepEqual([info.prompt_tokens, info.completion_tokens, info.cached_tokens], [1, 0, 0]);
    const streamed = await generate(engine, null, 'more', { session_params, stream: true });
    const parts = events(streamed.text);
    assert.equal(parts.length, 2);
    assert.equal(JSON.parse(parts[0]).meta_info.finish_reason.message, says);
    assert.equal(parts[1], '[DONE]');
    for (const stream of [false, true]) {
      const openai = await chat(engine, [{ role: 'user', content: 'more' }], { session_params, stream });
      assert.equal(openai.status, 400);
      assert.equal(openai.json.error.message, says);
    }
  }
  for (const [body, says] of [
    [{ session_params: 'a' }, /session_params must be an object/],
    [{ session_params: { id: 7 } }, /session_params must be an object/],
    [{ session_params: { id: 'a', offset: 'x' } }, /offset must be an integer/],
    [{ session_params: { id: 'a' }, session_id: 'b' }, /^session_id and session_params cannot both be set\.$/],
    [{ session_params: undefined, session_id: 7 }, /session_id must be a text/],
    [{ text: ['one', 'two'] }, /one prompt and one choice/],
  ]) {
    const answer = await generate(engine, 'a', 'more', body);
    assert.equal(answer.status, 400, JSON.stringify(body));
    assert.match(answer.json.error.message, says);
  }
  const two = await chat(engine, [{ role: 'user', content: 'x' }], { session_params: { id: 'a' }, n: 2 });
  assert.equal(two.status, 400);
  const long = await generate(engine, 'a', 'x', { sampling_params: { max_new_tokens: 180224 } });
  assert.equal(long.status, 400);
  assert.match(long.json.error.message, /maximum context length/);
  const now = await session(engine, 'a');
  assert.deepEqual({ ...now, idle_seconds: 0 }, { ...before, idle_seconds: 0 }, 'no refusal changed anything');
  assert.equal((await generate(engine, 'a', 'more')).json.meta_info.cached_tokens, before.kv_tokens);
});

test('one turn at a time; a client that leaves takes what was computed with it', async (t) => {
  const engine = await startSlow(t);
  await open(engine, 'a');
  await generate(engine, 'a', 'a first turn of some length');
  const { tokens: said } = await session(engine, 'a');
  const turn = await busy(engine, 'a');
  assert.equal((await session(engine, 'a')).inflight, true);
  const second = await generate(engine, 'a', 'me, too');
  assert.equal(second.json.meta_info.finish_reason.message, 'Streaming session already has an active request.');
  turn.leave();
  const now = await until('the turn to end', async () => {
    const s = await session(engine, 'a');
    return !s.inflight && s;
  });
  assert.equal(now.tokens, said); // of the turns that ended well
  assert.deepEqual([now.kv_tokens, now.held_tokens, now.prefix_tokens], [0, 0, 0]);
  const next = (await generate(engine, 'a', 'once more')).json.meta_info;
  assert.equal(next.prompt_tokens, said + 3);
  assert.ok(next.cached_tokens < said, 'prefilled again, but for what the cache has of the first prompt');

  // /abort_request: the answer ends as aborted, the session stays usable.
  const other = await busy(engine, 'a');
  await post(`${engine.url}/abort_request`, { rid: 'busy-a' });
  await until('the stream to end', () => other.res.complete);
  assert.equal((await session(engine, 'a')).kv_tokens, 0);
  assert.equal((await generate(engine, 'a', 'still here')).json.meta_info.finish_reason.type, 'length');
});

test('a close while a turn is under way waits for its end', async (t) => {
  const engine = await startSlow(t);
  await open(engine, 'a');
  const turn = await busy(engine, 'a');
  assert.equal((await close(engine, 'a')).status, 200);
  assert.equal((await session(engine, 'a')).closing, true);
  assert.equal((await open(engine, 'a')).json.error.message, taken);
  const refused = await generate(engine, 'a', 'more');
  assert.equal(refused.json.meta_info.finish_reason.message, 'Invalid request: close was requested for session a');
  turn.leave();
  await until('the session to end', async () => (await sessions(engine)).open === 0);
  assert.equal((await open(engine, 'a')).status, 200);
});

test('an idle session times out, counted from the start of its last turn', async (t) => {
  const engine = await startSlow(t);
  await open(engine, 'never');
  await open(engine, 'idle', { timeout: 0.2 });
  await open(engine, 'busy', { timeout: 0.2 });
  const turn = await busy(engine, 'busy');
  await until('both to time out', async () => !(await session(engine, 'idle'))
    && (await session(engine, 'busy')).closing);
  assert.equal((await session(engine, 'busy')).inflight, true);
  turn.leave();
  await until('the end of the turn', async () => !(await session(engine, 'busy')));
  const { counts, open: left } = await sessions(engine);
  assert.deepEqual([counts.timed_out, left], [2, 1]);
});

test('metrics tell what sessions hold, and closing gives it back at once', async (t) => {
  const engine = await start(t, ['--pool-tokens', '3200']);
  engine.admin = engine.url;
  const story = 'word'.repeat(400);
  await open(engine, 'a');
  await open(engine, 'b');
  await open(engine, 'r', { streaming: false });
  await generate(engine, 'a', story);
  await generate(engine, 'a', story);
  assert.equal(await metric(engine, 'sglang_num_streaming_sessions'), 2);
  const { held_tokens: held, prefix_tokens: prefix, kv_tokens: kv } = await session(engine, 'a');
  assert.equal(prefix, 400);
  assert.equal(held, Math.ceil(kv / 16) * 16 - 400);
  assert.equal(await metric(engine, 'sglang_streaming_session_held_tokens'), held);
  assert.equal(await metric(engine, 'sglang_kv_physical_usage'), (held + 400) / 3200);
  assert.equal(await metric(engine, 'sglang_kv_evictable_tokens'), 0);
  // Not evicted by others, however much they need.
  for (const salt of ['one ', 'two ', 'six ', 'ten ']) {
    await post(`${engine.url}/generate`, { text: salt.repeat(2000), sampling_params: { max_new_tokens: 1 } });
  }
  assert.equal((await session(engine, 'a')).kv_tokens, kv);
  assert.equal((await generate(engine, 'a', 'more')).json.meta_info.cached_tokens, kv);
  await close(engine, 'a');
  assert.equal(await metric(engine, 'sglang_streaming_session_held_tokens'), 0);
  assert.equal(await metric(engine, 'sglang_kv_used_tokens'), 0);
  assert.equal(await metric(engine, 'sglang_num_streaming_sessions'), 1);
});

test('a retained prefix outlives the others, and by priority the dear ones', async (t) => {
  const story = (word) => word.repeat(400);
  const ask = async (engine, word, more = {}) => (await post(`${engine.url}/generate`, {
    text: story(word), sampling_params: { max_new_tokens: 1 }, ...more,
  })).json.meta_info.cached_tokens;
  const wishes = [[{ retention_seconds: 600 }, 384], [{ retention_seconds: 0 }, 0], [{ retention_seconds: -1 }, 0],
    [{ retention_seconds: '600' }, 0], ['x', 0], [{ retention_seconds: 0.000001 }, 0]];
  for (const [extra_args, found] of wishes) {
    const engine = await start(t, ['--pool-tokens', '1280']);
    await ask(engine, 'aaaa', { extra_args });
    await ask(engine, 'bbbb');
    await ask(engine, 'cccc');
    await ask(engine, 'dddd'); // there is room for three
    assert.equal(await ask(engine, 'aaaa'), found, JSON.stringify(extra_args));
    await engine.stop();
  }
  for (const [policy, found] of [['lru', 0], ['priority', 384]]) {
    const engine = await start(t, ['--pool-tokens', '1280', '--radix-eviction-policy', policy]);
    assert.equal((await get(`${engine.url}/server_info`)).json.radix_eviction_policy, policy);
    await ask(engine, 'aaaa', { priority: 5 });
    await ask(engine, 'bbbb');
    await ask(engine, 'cccc', { priority: 1 });
    await ask(engine, 'dddd', { priority: 1 });
    assert.equal(await ask(engine, 'aaaa'), found, policy);
    await engine.stop();
  }
});

test('opens and closes break on demand, beside what strikes requests', async (t) => {
  const engine = await start(t);
  const fault = (body) => post(`${engine.url}/sim/fault`, body);
  await fault({ kind: 'open_fail', count: 1 });
  await fault({ kind: 'error_500', count: 1 });
  const state = (await get(`${engine.url}/sim/fault`)).json;
  assert.deepEqual([state.kind, state.open.kind, state.close.kind], ['error_500', 'open_fail', 'none']);
  assert.deepEqual((await open(engine, 'a')).json, { error: { message: taken } });
  assert.equal((await sessions(engine)).open, 0);
  assert.equal((await open(engine, 'a')).status, 200);
  assert.equal((await generate(engine, 'a', 'x')).status, 500);
  assert.equal((await generate(engine, 'a', 'x')).status, 200);

  // Opened at once, told later: whoever does not wait leaves a session behind.
  await fault({ kind: 'open_slow', count: 1, delay_ms: 100 });
  assert.equal((await open(engine, 'slow')).text, '"slow"');
  await fault({ kind: 'open_slow', count: 1, delay_ms: 600000 });
  const impatient = new AbortController();
  const unheard = send(`${engine.url}/open_session`, {
    method: 'POST', signal: impatient.signal, body: { capacity_of_str_len: 1, session_id: 'orphan', streaming: true },
  });
  await until('the session to be there', () => session(engine, 'orphan'));
  impatient.abort();
  await assert.rejects(unheard);
  assert.ok(await session(engine, 'orphan'));

  await fault({ kind: 'open_lost', count: 1 });
  const lost = new AbortController();
  const never = send(`${engine.url}/open_session`, {
    method: 'POST', signal: lost.signal, body: { capacity_of_str_len: 1, session_id: 'lost', streaming: true },
  });
  const struck = (kind) => until(kind, async () => (await get(`${engine.url}/sim/fault`)).json.hits[kind] === 1);
  await struck('open_lost');
  lost.abort();
  await assert.rejects(never);
  assert.equal(await session(engine, 'lost'), undefined);

  await fault({ kind: 'close_cut', count: 1 });
  await assert.rejects(close(engine, 'a'));
  assert.ok(await session(engine, 'a'));
  await fault({ kind: 'close_lost', count: 1 });
  const unclosed = new AbortController();
  const silent = send(`${engine.url}/close_session`, {
    method: 'POST', signal: unclosed.signal, body: { session_id: 'a' },
  });
  await struck('close_lost');
  unclosed.abort();
  await assert.rejects(silent);
  assert.ok(await session(engine, 'a'));
  assert.equal((await close(engine, 'a')).status, 200);
  assert.equal(await session(engine, 'a'), undefined);

  await fault({ kind: 'open_fail', probability: 0.5 });
  let failures = 0;
  for (let i = 0; i < 60; i++) failures += (await open(engine, `p${i}`)).status === 400;
  assert.ok(failures > 5 && failures < 55, `${failures} of 60 failed`);
  await fault({ kind: 'none' });
  assert.equal((await get(`${engine.url}/sim/fault`)).json.open.kind, 'none');
  assert.equal((await open(engine, 'last')).status, 200);
  assert.equal((await fault({ kind: 'open_sesame' })).status, 400);
});

test('the tag of a session changes nothing but what is told of the request', async (t) => {
  const engine = await start(t);
  const plain = await chat(engine, [{ role: 'user', content: 'hi' }]);
  const tagged = await chat(engine, [{ role: 'user', content: 'hi' }], { session_id: 'soft' });
  assert.equal(tagged.json.choices[0].message.content, plain.json.choices[0].message.content);
  const { over } = (await get(`${engine.url}/sim/requests`)).json;
  assert.deepEqual(over.map((r) => r.session), ['', 'soft']);
  assert.equal((await sessions(engine)).open, 0);
});

test('vLLM has no sessions', async (t) => {
  const engine = await startEngine(t, { flags: ['--preset', 'instant', '--kind', 'vllm'] });
  assert.equal((await open(engine, 'a')).status, 404);
  const answer = await chat(engine, [{ role: 'user', content: 'hi' }], { session_params: { id: 'a' } });
  assert.equal(answer.status, 200);
});
