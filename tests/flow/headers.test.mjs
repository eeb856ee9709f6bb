// Headers both ways, request ids, keys, and what a client may not decide.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { gunzipSync, gzipSync } from 'node:zlib';
import { startRouter, run, scratch, writeFile, metric, until, usable, engineOf } from './lib/proc.mjs';
import { fakeEngine, gate, chunk, usage } from './lib/fake.mjs';
import { get, post, send, chat, Raw, rawPost } from './lib/http.mjs';

const path = '/v1/chat/completions';

async function one(t, options) {
  const engine = await fakeEngine(t);
  return { engine, router: await startRouter(t, { engines: { a: engine.url }, ...options }) };
}

test('answers say which worker, which policy and why', async (t) => {
  const { router } = await one(t, { policy: 'least_loaded' });
  const { headers } = await post(router.url + path, chat('m'));
  assert.equal(headers['x-perilune-worker'], 'a');
  assert.equal(headers['x-perilune-policy'], 'least_loaded');
  assert.match(headers['x-perilune-reason'], /^[A-Za-z0-9_.-]{1,64}$/);
});

test('they can be switched off; the request id stays', async (t) => {
  const { router } = await one(t, { config: { response_headers: false } });
  const { headers } = await post(router.url + path, chat('m'));
  assert.deepEqual(Object.keys(headers).filter((name) => name.startsWith('x-perilune')), []);
  assert.ok(headers['x-request-id']);
});

test('a request id is kept if sent, else made, and the engine sees the same', async (t) => {
  const { engine, router } = await one(t);
  const kept = await post(router.url + path, chat('m'), { headers: { 'x-request-id': 'mine-1' } });
  assert.equal(kept.headers['x-request-id'], 'mine-1');
  assert.equal(engine.requests[0].headers['x-request-id'], 'mine-1');
  const made = await post(router.url + path, chat('m'));
  assert.match(made.headers['x-request-id'], /^[0-9a-f]{32}$/);
  assert.equal(engine.requests[1].headers['x-request-id'], made.headers['x-request-id']);
});

test('request ids never repeat, whichever loop makes them', async (t) => {
  const { engine, router } = await one(t, { threads: 4 });
  // requests that bring their own id take fewer random numbers: loops get out of step in all ways
  await Promise.all(Array.from({ length: 24 }, async (_, who) => {
    const raw = await Raw.connect(router.url);
    for (let k = 0; k < 16; k++) {
      raw.forget();
      await raw.send(rawPost(path, chat('m'), k < who % 4 ? `X-Request-Id: own-${who}-${k}\r\n` : ''));
      await raw.until('"choices"');
    }
    raw.destroy();
  }));
  const ids = engine.requests.map((entry) => entry.headers['x-request-id']);
  assert.equal(ids.length, 24 * 16);
  assert.equal(new Set(ids).size, ids.length);
});

test('traceparent and unknown headers pass; hop-by-hop and framing are ours', async (t) => {
  const { engine, router } = await one(t);
  const trace = '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01';
  const body = JSON.stringify(chat('m'));
  const raw = await Raw.connect(router.url);
  await raw.send(`POST ${path} HTTP/1.1\r\nHost: client-host\r\nContent-Type: application/json\r\n`
    + `traceparent: ${trace}\r\nX-Custom: kept\r\nConnection: X-Hop, keep-alive\r\nX-Hop: gone\r\n`
    + 'Connection: X-Second\r\nX-Second: gone\r\n'
    + 'Keep-Alive: timeout=9\r\nTE: trailers\r\nProxy-Authorization: gone\r\n'
    + `Content-Length: ${body.length}\r\n\r\n${body}`);
  await raw.until('"choices"');
  raw.destroy();
  const { headers } = engine.requests[0];
  assert.equal(headers.traceparent, trace);
  assert.equal(headers['x-custom'], 'kept');
  for (const hop of ['x-hop', 'x-second', 'keep-alive', 'te', 'proxy-authorization']) {
    assert.equal(headers[hop], undefined, hop);
  }
  assert.equal(headers['content-length'], String(body.length));
  assert.equal(headers.host, engine.url.slice('http://'.length));
});

test('a chunked request reaches the engine with its exact bytes', async (t) => {
  const { engine, router } = await one(t);
  const body = JSON.stringify(chat('m', { odd: [1, 2.50, 'ü\u2028'], z: null }), null, 3);
  const bytes = Buffer.from(body);
  const raw = await Raw.connect(router.url);
  await raw.send(`POST ${path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n`);
  for (let at = 0; at < bytes.length; at += 7) {
    const part = bytes.subarray(at, at + 7);
    await raw.send(Buffer.concat([
      Buffer.from(`${part.length.toString(16)}\r\n`), part, Buffer.from('\r\n'),
    ]));
  }
  await raw.send('0\r\n\r\n');
  await raw.until('"choices"');
  raw.destroy();
  assert.equal(engine.requests[0].body, body);
});

test('pipelined requests are answered in order', async (t) => {
  const { engine, router } = await one(t);
  engine.handler = (entry, res) => engine.json(res, 200, { echo: entry.json.messages[0].content });
  const ask = (i) => rawPost(path, { model: 'm', messages: [{ role: 'user', content: `q${i}` }] });
  const raw = await Raw.connect(router.url);
  await raw.send(ask(1) + ask(2) + ask(3));
  const text = await raw.until('"q3"');
  raw.destroy();
  assert.deepEqual(text.match(/"echo":"q\d"/g), ['"echo":"q1"', '"echo":"q2"', '"echo":"q3"']);
});

test('clients may not pin a worker or a rank, in headers or body', async (t) => {
  const a = await fakeEngine(t);
  const b = await fakeEngine(t);
  const policy = writeFile(scratch(t), 'to_a.lua',
    'return { api = 1, name = "to_a", route = function() return 0, "a" end }');
  const router = await startRouter(t, { engines: { a: a.url, b: b.url }, policy });
  const pins = {
    data_parallel_rank: 3, routed_dp_rank: 1, disagg_prefill_dp_rank: 2, bootstrap_host: 'h',
    bootstrap_port: 1, bootstrap_room: 7, kv_transfer_params: { remote_host: 'h' },
  };
  const headers = {
    'x-perilune-worker': 'b', 'x-data-parallel-rank': '3', 'X-Dynamo-Worker-Instance-Id': '1',
    'x-worker-instance-id': '1', 'x-dynamo-dp-rank': '7', 'x-dp-rank': '7',
    'x-dynamo-prefill-instance-id': '1', 'x-prefill-instance-id': '1', 'x-dynamo-prefill-dp-rank': '0',
    'x-prefill-dp-rank': 'zero',
  };
  const answer = await post(router.url + path, chat('m', pins), { headers });
  assert.equal(answer.headers['x-perilune-worker'], 'a');
  const [entry] = a.requests;
  for (const name of Object.keys(headers)) assert.equal(entry.headers[name.toLowerCase()], undefined, name);
  for (const pin of Object.keys(pins)) assert.equal(entry.json[pin], undefined, pin);
  assert.equal(entry.json.messages[0].content, 'What is a moon?');
  assert.equal(await metric(router, 'perilune_pins_removed_total'), 17);
});

test('nvext that goes on to the engine has no pins of those who may not', async (t) => {
  for (const trusted_clients of [[], ['127.0.0.0/8']]) {
    const { engine, router } = await one(t, { config: { sessions: { forward_nvext: true }, trusted_clients } });
    await usable(router, 1);
    const { slot } = (await engineOf(router, 'a')).workers[0];
    const pins = {
      backend_instance_id: slot, dp_rank: 0, prefill_worker_id: 1, decode_worker_id: slot, prefill_dp_rank: 2,
    };
    const nvext = { greed_sampling: true, ...pins, agent_hints: { osl: 3 } };
    assert.equal((await post(router.url + path, chat('m', { nvext }))).status, 200);
    const none = Object.fromEntries(Object.keys(pins).map((name) => [name, null]));
    assert.deepEqual(engine.requests[0].json.nvext, trusted_clients.length ? nvext : { ...nvext, ...none });
  }
});

test('trusted clients may', async (t) => {
  const a = await fakeEngine(t);
  const b = await fakeEngine(t);
  const policy = writeFile(scratch(t), 'to_a.lua',
    'return { api = 1, name = "to_a", route = function() return 0, "a" end }');
  const router = await startRouter(t, {
    engines: { a: a.url, b: b.url }, policy, config: { trusted_clients: ['127.0.0.0/8'] },
  });
  const answer = await post(router.url + path, chat('m'), { headers: { 'x-perilune-worker': 'b' } });
  assert.equal(answer.headers['x-perilune-worker'], 'b');
});

test("so may Dynamo's clients, by numbers", async (t) => {
  const a = await fakeEngine(t);
  const b = await fakeEngine(t);
  const policy = writeFile(scratch(t), 'to_a.lua',
    'return { api = 1, name = "to_a", route = function() return 0, "a" end }');
  const router = await startRouter(t, {
    policy,
    config: {
      engines: [{ name: 'a', url: a.url }, { name: 'b', url: b.url, dp_size: 3 }],
      trusted_clients: ['127.0.0.0/8'],
    },
  });
  await usable(router, 2);
  const id = (await engineOf(router, 'b')).workers[0].slot;
  const served = async (headers, extra = {}) => {
    const answer = await post(router.url + path, chat('m', extra), { headers });
    return answer.status === 200 ? answer.headers['x-perilune-worker'] : answer.json.error.code;
  };
  assert.equal(await served({ 'X-Dynamo-Worker-Instance-ID': id, 'x-dynamo-dp-rank': 1 }), 'b/1');
  assert.equal(b.requests[0].headers['x-data-parallel-rank'], '1');
  assert.equal(b.requests[0].headers['x-dynamo-worker-instance-id'], undefined, "the router's own numbers");
  assert.equal(b.requests[0].headers['x-dynamo-dp-rank'], undefined);
  assert.equal(await served({ 'x-worker-instance-id': id, 'x-dp-rank': 2 }), 'b/2');
  assert.equal(await served({ 'x-dynamo-dp-rank': 2 }, { nvext: { backend_instance_id: id, dp_rank: 0 } }), 'b/2');
  assert.equal(await served({ 'x-dynamo-prefill-instance-id': 'any', 'x-dynamo-dp-rank': '' }), 'a');
  assert.equal(await served({ 'x-dynamo-dp-rank': 3 }), 'no_worker');
  assert.equal(await served({ 'x-dynamo-dp-rank': 'one' }), 'invalid_value');
  assert.equal(await served({ 'x-dynamo-dp-rank': 1, 'x-dp-rank': 2 }), 'invalid_value');
});

test('a pinned request is tried once; by its rank alone it goes to the least busy', async (t) => {
  const a = await fakeEngine(t);
  const b = await fakeEngine(t);
  const router = await startRouter(t, {
    engines: { a: a.url, b: b.url }, threads: 1, config: { trusted_clients: ['127.0.0.0/8'] },
  });
  await usable(router, 2);
  a.handler = (entry) => entry.socket.destroy();
  const id = (await engineOf(router, 'a')).workers[0].slot;
  const failed = await post(router.url + path, chat('m', { nvext: { backend_instance_id: id } }));
  assert.equal(failed.status, 502);
  assert.deepEqual([a.requests.length, b.requests.length], [1, 0]);

  const go = gate();
  for (const engine of [a, b]) {
    engine.handler = async (entry, res) => { await go.opened; engine.json(res, 200, {}); };
  }
  const asked = [1, 2, 3, 4].map(() => post(router.url + path, chat('m', { nvext: { dp_rank: 0 } })));
  await Promise.all([a.request(2), b.request(1)]);
  go.open();
  for (const answer of await Promise.all(asked)) assert.equal(answer.status, 200);
});

test('API keys: without one 401, with one served, and the engine never sees it', async (t) => {
  const { engine, router } = await one(t, {
    config: { api_keys: [{ key: 'k-secret-1', tenant: 'moon' }, { key: 'k-secret-2', tenant: 'sun' }] },
  });
  const none = await post(router.url + path, chat('m'));
  assert.equal(none.status, 401);
  assert.ok(none.json.error.message.length > 0);
  const wrong = await post(router.url + path, chat('m'), { headers: { authorization: 'Bearer k-secret-3' } });
  assert.equal(wrong.status, 401);
  assert.equal((await get(`${router.url}/v1/models`)).status, 401);
  assert.equal(engine.requests.length, 0);

  const bearer = await post(router.url + path, chat('m'), { headers: { authorization: 'Bearer k-secret-1' } });
  assert.equal(bearer.status, 200);
  const header = await post(`${router.url}/v1/messages`, { ...chat('m'), max_tokens: 2 }, {
    headers: { 'x-api-key': 'k-secret-2' },
  });
  assert.equal(header.status, 200);
  for (const entry of engine.requests) {
    assert.equal(entry.headers.authorization, undefined);
    assert.equal(entry.headers['x-api-key'], undefined);
  }
  assert.equal((await get(`${router.url}/health`)).status, 200, 'health needs no key');
  assert.ok(!router.stderr.includes('k-secret'), 'keys are never logged');
});

test('bad bodies are refused with the place, and the connection lives on', async (t) => {
  const { engine, router } = await one(t);
  const raw = await Raw.connect(router.url);
  const bad = [
    ['{"model":"m",', /offset|byte|position/i],
    ['[1,2]', /object/i],
    ['{"model":"m","model":"n"}', /only once at byte 13/],
    ['', /body|JSON|empty/i],
  ];
  for (const [body, words] of bad) {
    raw.forget();
    await raw.send(rawPost(path, body));
    const text = await raw.until('"message"');
    assert.match(text, /^HTTP\/1\.1 400 /, body);
    assert.match(await raw.until('}'), words);
  }
  raw.forget();
  await raw.send(rawPost(path, chat('m')));
  await raw.until('"choices"');
  raw.destroy();
  assert.equal(engine.requests.length, 1);
});

test('a compressed body is refused before it is sent', async (t) => {
  const { engine, router } = await one(t);
  const raw = await Raw.connect(router.url);
  await raw.send(`POST ${path} HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 99\r\n`
    + 'Expect: 100-continue\r\n\r\n');
  const text = await raw.until('Content-Encoding"');
  assert.match(text, /^HTTP\/1\.1 415 [^]*\r\naccept-encoding: identity\r\n[^]*"unsupported_encoding"/);
  raw.destroy();
  const plain = await post(router.url + path, chat('m'), { headers: { 'content-encoding': 'identity' } });
  assert.equal(plain.status, 200);
  assert.equal(engine.requests.length, 1);
});

test('limits: 413 for a body, 431 for a head, 503 with Retry-After for connections', async (t) => {
  const { engine, router } = await one(t, {
    config: { limits: { body_bytes: 20000, head_bytes: 8192, connections: 3 } },
  });
  const large = await post(router.url + path, chat('m', { pad: 'x'.repeat(30000) }));
  assert.equal(large.status, 413);
  const head = await post(router.url + path, chat('m'), { headers: { 'x-long': 'y'.repeat(9000) } });
  assert.equal(head.status, 431);
  assert.equal(engine.requests.length, 0);

  // refused connections linger for a moment, and count
  await until('they are closed', async () => (
    await get(`${router.admin}/status`)).json.connections === 0);
  const held = [];
  for (let i = 0; i < 3; i++) {
    const raw = await Raw.connect(router.url);
    await raw.send('GET /health HTTP/1.1\r\nHost: x\r\n\r\n');
    await raw.until('"ok"');
    held.push(raw);
  }
  const more = await Raw.connect(router.url);
  const text = await more.until(null);
  assert.match(text, /^HTTP\/1\.1 503 /);
  assert.match(text, /\r\nretry-after: \d+\r\n/i);
  for (const raw of held) raw.destroy();
});

test('usage that only the router wanted is not shown to the client', async (t) => {
  const policy = writeFile(scratch(t), 'curious.lua', `
    local policy = { api = 1, name = "curious" }
    function policy.score(req, w) return w.inflight end
    function policy.done(req, outcome) assert(outcome.cached_tokens == 3) end
    return policy`);
  const { engine, router } = await one(t, { policy });
  const text = (await post(router.url + path, chat('m', { stream: true }))).text;
  assert.equal(engine.requests[0].json.stream_options.include_usage, true);
  assert.ok(!text.includes('"usage"'));
  assert.match(text, /\[DONE\]/);
  const asked = await post(router.url + path, chat('m', {
    stream: true, stream_options: { include_usage: true },
  }));
  assert.match(asked.text, /"usage"/);
  assert.equal(await metric(router, 'perilune_policy_errors_total', 'hook="done"') ?? 0, 0,
    'done has seen what the engine counted');
});

test('a stream in which the router has to find the usage chunk is not asked for compressed', async (t) => {
  const { engine, router } = await one(t, { config: { usage: 'always' } });
  engine.handler = (entry, res) => {
    const gzip = entry.headers['accept-encoding'] === 'gzip';
    const text = `data: ${JSON.stringify(chunk('m', 'one'))}\n\n${
      entry.json.stream_options ? `data: ${JSON.stringify({ choices: [], usage: usage(7, 1) })}\n\n` : ''}data: [DONE]\n\n`;
    res.writeHead(200, { 'content-type': 'text/event-stream', ...(gzip ? { 'content-encoding': 'gzip' } : {}) })
      .end(gzip ? gzipSync(text) : text);
  };
  const ask = async (extra) => {
    const answer = await send(router.url + path, {
      method: 'POST', body: chat('m', { stream: true, ...extra }), headers: { 'accept-encoding': 'gzip' },
    });
    const parts = [];
    for await (const part of answer) parts.push(part);
    const bytes = Buffer.concat(parts);
    return (answer.headers['content-encoding'] ? gunzipSync(bytes) : bytes).toString();
  };
  const unasked = await ask({});
  assert.doesNotMatch(unasked, /"usage"/);
  assert.match(unasked, /"one"[^]*DONE/);
  assert.match(await ask({ stream_options: { include_usage: true } }), /"usage"/);
  assert.deepEqual(engine.requests.map((entry) => entry.headers['accept-encoding']), [undefined, 'gzip']);
});

test('a config error names the file and the key', async (t) => {
  const directory = scratch(t);
  const file = writeFile(directory, 'bad.lua', 'return { engines = { { url = "http://127.0.0.1:1" }, { url = 7 } } }');
  const end = await run(['serve', file, '--listen', '127.0.0.1:0']);
  assert.notEqual(end.code, 0);
  assert.match(end.stderr, /bad\.lua/);
  assert.match(end.stderr, /engines\[2\]\.url/);
  const broken = writeFile(directory, 'broken.lua', 'return {\n  listen = \n}');
  const second = await run(['serve', broken]);
  assert.notEqual(second.code, 0);
  assert.match(second.stderr, /broken\.lua:[23]/);
  assert.equal((await run(['serve', '--no-such-flag'])).code, 2);
});
