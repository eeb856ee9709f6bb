// Clients that are slow, stop half way, say too much, ask for permission first, or speak the protocol
// of long ago: each is served or refused by the rules, and none of them is anybody else's problem.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { startRouter, until, metric } from './lib/proc.mjs';
import { fakeEngine, gate, chunk } from './lib/fake.mjs';
import { ledgerIsEmpty, memory, lean } from './lib/ledger.mjs';
import { cleanup } from './lib/cleanup.mjs';
import { get, post, send, chat, events, Raw, rawPost } from './lib/http.mjs';

const path = '/v1/chat/completions';

async function one(t, options = {}) {
  const engine = await fakeEngine(t);
  const router = await startRouter(t, { engines: { a: engine.url }, threads: 1, ...options });
  return { engine, router };
}

async function connect(t, router) {
  const raw = await Raw.connect(router.url);
  cleanup(t, () => raw.destroy());
  return raw;
}

const statuses = (text) => (text.match(/HTTP\/1\.[01] \d{3} /g) ?? []).map((line) => Number(line.slice(9)));

const serves = async (router) => {
  assert.equal((await post(router.url + path, chat('m'))).status, 200);
  await ledgerIsEmpty(router);
};

// --- slow to ask ----------------------------------------------------------------------------------------

test('a request that comes byte by byte reaches the engine as it is', async (t) => {
  const { engine, router } = await one(t);
  const raw = await connect(t, router);
  const body = JSON.stringify(chat('m', { x: 'é 🌒' }));
  for (const byte of Buffer.from(rawPost(path, body))) await raw.send(Buffer.of(byte));
  assert.match(await raw.until('}]'), /^HTTP\/1\.1 200 /);
  assert.equal(engine.requests[0].body, body);
  await serves(router);
});

test('a head that does not end in time is a 408 and a close, however busily it drips', async (t) => {
  const { router } = await one(t, { config: { timeouts: { head_seconds: 0.4 } } });
  const raw = await connect(t, router);
  await raw.send('POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n');
  const dripping = setInterval(() => raw.socket.write('x-a: b\r\n'), 50);
  const text = await raw.until(null).finally(() => clearInterval(dripping));
  assert.match(text, /^HTTP\/1\.1 408 /);
  assert.ok(JSON.parse(text.slice(text.indexOf('\r\n\r\n'))).error.message.length > 0);
  assert.equal(await metric(router, 'perilune_client_timeouts_total'), 1);
  await serves(router);
});

test('a body may take its time as long as it comes', async (t) => {
  const { engine, router } = await one(t, { config: { timeouts: { body_seconds: 0.5 } } });
  const raw = await connect(t, router);
  const text = rawPost(path, chat('m'));
  const at = text.length - 8;
  await raw.send(text.slice(0, at));
  for (const byte of text.slice(at)) { // about twice the limit in all
    await new Promise((resolve) => { setTimeout(resolve, 120); });
    await raw.send(byte);
  }
  assert.match(await raw.until('}]'), /^HTTP\/1\.1 200 /);
  assert.deepEqual(engine.requests[0].json, chat('m'));
});

test('many connections that never finish their heads keep nobody out', async (t) => {
  const { router } = await one(t);
  const many = await Promise.all(Array.from({ length: 200 }, () => connect(t, router)));
  await Promise.all(many.map((raw) => raw.send('POST /v1/chat/completions HTTP/1.1\r\nHo')));
  await serves(router);
});

// --- slow to read ---------------------------------------------------------------------------------------

test('slow readers hold back their own streams and nothing else; memory stays bounded', { timeout: 180000 }, async (t) => {
  const readers = 16;
  const size = 64e6; // far more than the kernel holds for two connections
  const { engine, router } = await one(t, { env: lean });
  engine.handler = async (entry, res) => {
    if (!entry.json.big) {
      await engine.chat(entry, res);
      return;
    }
    entry.written = 0;
    const closed = new Promise((resolve) => { res.once('close', resolve); });
    res.writeHead(200, { 'content-type': 'text/event-stream' });
    const event = `data: ${JSON.stringify(chunk('m', 'y'.repeat(16000)))}\n\n`;
    while (entry.written < size && !res.destroyed) {
      entry.written += event.length;
      const drained = new Promise((resolve) => { res.once('drain', resolve); });
      if (!res.write(event)) await Promise.race([drained, closed]);
    }
    res.end('data: [DONE]\n\n');
  };
  await serves(router);
  const before = memory(router);
  const answers = await Promise.all(Array.from({ length: readers }, () => send(router.url + path, {
    method: 'POST', body: chat('m', { stream: true, big: 1 }),
  })));
  for (const res of answers) res.pause();
  const bigOnes = () => engine.requests.filter((entry) => entry.json.big);
  await until('all are held back', async () => await metric(router, 'perilune_paused_total') >= readers);
  let last = -1;
  await until('nothing moves', async () => {
    const sum = bigOnes().reduce((total, entry) => total + entry.written, 0);
    const still = sum === last;
    last = sum;
    return still;
  }, { every: 200, timeout: 60000 });
  const during = memory(router);
  // 256 KiB are kept for each, and one read more; the rest waits in the kernel and at the engine
  assert.ok(during.rss - before.rss < readers * 1024 + 8192, `${before.rss} kB became ${during.rss} kB`);
  assert.ok(bigOnes().every((entry) => entry.written < size), 'the engine is held back');
  await (await post(router.url + path, chat('m', { stream: true }))).text;
  const texts = await Promise.all(answers.slice(0, 2).map((res) => res.text()));
  for (const text of texts) {
    assert.ok(text.length > size);
    assert.ok(text.endsWith('data: [DONE]\n\n'));
  }
  for (const res of answers.slice(2)) res.destroy();
  await serves(router);
});

test('a client that reads nothing at all is cut after its time', async (t) => {
  const { engine, router } = await one(t, { config: { timeouts: { write_seconds: 0.4 } } });
  engine.handler = async (entry, res) => {
    res.writeHead(200, { 'content-type': 'application/json' });
    const closed = new Promise((resolve) => { res.once('close', resolve); });
    for (let k = 0; k < 4000 && !res.destroyed; k++) {
      const drained = new Promise((resolve) => { res.once('drain', resolve); });
      if (!res.write('z'.repeat(16000))) await Promise.race([drained, closed]);
    }
    res.end();
  };
  const raw = await connect(t, router);
  raw.pause();
  await raw.send(rawPost(path, chat('m')));
  const entry = await engine.request(0);
  await entry.closed;
  assert.ok(entry.aborted);
  engine.handler = null;
  await serves(router);
});

// --- half way ---------------------------------------------------------------------------------------------

test('half a request and then the end of the connection: nothing is forwarded', async (t) => {
  const { engine, router } = await one(t);
  const text = rawPost(path, chat('m'));
  for (const part of [text.slice(0, 20), text.slice(0, text.indexOf('\r\n\r\n') + 4), text.slice(0, -1)]) {
    const raw = await connect(t, router);
    await raw.send(part);
    raw.finish();
    await raw.closed;
    assert.ok(!raw.received.includes(' 200 '), raw.received);
  }
  assert.equal(engine.requests.length, 0);
  await serves(router);
});

for (const [how, leave] of [['ends its side', (raw) => raw.finish()], ['resets', (raw) => raw.reset()]]) {
  test(`a client that ${how} of the connection has gone: its engine is let go of`, async (t) => {
    const { engine, router } = await one(t);
    const held = gate();
    engine.handler = () => held.opened;
    const raw = await connect(t, router);
    await raw.send(rawPost(path, chat('m', { stream: true })));
    const entry = await engine.request(0);
    leave(raw);
    await entry.closed;
    assert.ok(entry.aborted);
    held.open();
    engine.handler = null;
    assert.equal(await metric(router, 'perilune_client_gone_total'), 1);
    await serves(router);
  });
}

test('a client that leaves with further requests in the pipe: none of them is forwarded', async (t) => {
  const { engine, router } = await one(t);
  const held = gate();
  engine.handler = () => held.opened;
  const raw = await connect(t, router);
  await raw.send(rawPost(path, chat('m', { who: 1 })) + rawPost(path, chat('m', { who: 2 })));
  const entry = await engine.request(0);
  raw.reset();
  await entry.closed;
  held.open();
  engine.handler = null;
  await serves(router);
  assert.ok(!engine.requests.some(({ json }) => json.who === 2));
});

// --- pipelining -------------------------------------------------------------------------------------------

test('pipelined requests of all kinds are answered in order, one at a time', async (t) => {
  const { engine, router } = await one(t);
  let now = 0;
  engine.handler = async (entry, res) => {
    now += 1;
    assert.equal(now, 1);
    await engine.chat(entry, res);
    now -= 1;
  };
  const raw = await connect(t, router);
  await raw.send([
    rawPost(path, chat('m', { stream: true })),
    'GET /health HTTP/1.1\r\nHost: x\r\n\r\n',
    rawPost(path, '{"model":'),
    'HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\n',
    rawPost(path, chat('m')),
    'OPTIONS /v1/models HTTP/1.1\r\nHost: x\r\n\r\n',
    'GET /no/such HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n',
    rawPost(path, chat('m')), // after the last word
  ].join(''));
  const text = await raw.until(null);
  assert.deepEqual(statuses(text), [200, 200, 400, 200, 200, 204, 404]);
  assert.equal(engine.requests.length, 2);
  await serves(router);
});

test('thousands of pipelined requests from one who does not read: bounded, then all answered', { timeout: 120000 }, async (t) => {
  const { router } = await one(t, { env: lean });
  await serves(router);
  const before = memory(router);
  const raw = await connect(t, router);
  raw.pause();
  const n = 20000;
  const ask = 'GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n';
  const sent = raw.send(ask.repeat(n));
  await serves(router);
  const during = memory(router);
  assert.ok(during.rss - before.rss < 16384, `${before.rss} kB became ${during.rss} kB`);
  raw.resume();
  await sent;
  await until('all answers', () => statuses(raw.received).length === n, { every: 100 });
});

// --- Expect ---------------------------------------------------------------------------------------------

const expecting = (length, extra = '') => `POST ${path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n${extra}`
  + `Expect: 100-continue\r\nContent-Length: ${length}\r\n\r\n`;

test('Expect: 100-continue is granted once, and not passed on', async (t) => {
  const { engine, router } = await one(t);
  const raw = await connect(t, router);
  const body = JSON.stringify(chat('m'));
  await raw.send(expecting(body.length));
  assert.equal(await raw.until('\r\n\r\n'), 'HTTP/1.1 100 Continue\r\n\r\n');
  await raw.send(body);
  const text = await raw.until('}]');
  assert.match(text, /100 Continue\r\n\r\nHTTP\/1\.1 200 OK\r\n/);
  assert.equal(text.match(/100 Continue/g).length, 1);
  assert.equal(engine.requests[0].headers.expect, undefined);
});

test('who asks before sending is refused before sending', async (t) => {
  const { engine, router } = await one(t, {
    config: { limits: { body_bytes: 5000 }, api_keys: [{ key: 'sesame', tenant: 't' }] }, ready: false,
  });
  for (const [head, status] of [
    [expecting(6000, 'Authorization: Bearer sesame\r\n'), 413],
    [expecting(10), 401],
    [expecting(10, 'Authorization: Bearer sesame\r\n').replace(path, '/flush_cache'), 404],
    [expecting(10, 'Authorization: Bearer sesame\r\n').replace('100-continue', 'miracles'), 417],
  ]) {
    const raw = await connect(t, router);
    await raw.send(head);
    const text = await raw.until('"message"');
    assert.match(text, new RegExp(`^HTTP/1\\.1 ${status} `), head);
    raw.destroy();
  }
  assert.equal(engine.requests.length, 0);
});

// --- too much -------------------------------------------------------------------------------------------

test('too much of anything is refused by name, and no more of it is taken', async (t) => {
  const { engine, router } = await one(t, {
    config: { limits: { body_bytes: 20000, head_bytes: 8192, headers: 20, target_bytes: 1000 } },
  });
  const chunked = `POST ${path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n`;
  for (const [bytes, status] of [
    [`POST ${path} HTTP/1.1\r\nHost: x\r\nContent-Length: 20001\r\n\r\n`, 413],
    [`POST ${path} HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n`, '4(00|13)'],
    [`${chunked}4e21\r\n`, 413],
    [chunked + '3e8\r\n'.concat('x'.repeat(1000), '\r\n').repeat(21), 413],
    [`GET /health HTTP/1.1\r\nHost: x\r\nx-long: ${'y'.repeat(9000)}`, 431],
    [`GET /health HTTP/1.1\r\nHost: x\r\n${'a: b\r\n'.repeat(20)}\r\n`, 431],
    [`GET /${'z'.repeat(1100)} HTTP/1.1\r\nHost: x\r\n\r\n`, 414],
  ]) {
    const raw = await connect(t, router);
    await raw.send(bytes);
    const text = await raw.until(null);
    assert.match(text, new RegExp(`^HTTP/1\\.1 ${status} `), bytes.slice(0, 100));
    assert.match(text, /\r\nconnection: close\r\n/i);
    assert.ok(JSON.parse(text.slice(text.indexOf('\r\n\r\n'))).error.message.length > 0);
  }
  assert.equal(engine.requests.length, 0);
  await serves(router);
});

test('one connection too many is told when to come back; one that leaves makes room', async (t) => {
  const { router } = await one(t, { config: { limits: { connections: 5 } } });
  const held = [];
  for (let i = 0; i < 5; i++) {
    const raw = await connect(t, router);
    await raw.send('GET /health HTTP/1.1\r\nHost: x\r\n\r\n');
    await raw.until('"ok"');
    held.push(raw);
  }
  for (let i = 0; i < 3; i++) {
    const raw = await connect(t, router);
    const text = await raw.until(null);
    assert.match(text, /^HTTP\/1\.1 503 /);
    assert.match(text, /\r\nretry-after: \d+\r\n/i);
    assert.ok(JSON.parse(text.slice(text.indexOf('\r\n\r\n'))).error.message.length > 0);
  }
  assert.equal(await metric(router, 'perilune_connections_refused_total'), 3);
  assert.match((await router.log('connection_refused')).message, /^5 client connections are open already/);
  held[0].destroy();
  await until('room', async () => {
    try {
      return (await get(`${router.url}/health`)).status === 200;
    } catch (error) {
      assert.match(error.code, /ECONNRESET|EPIPE/);
      return false;
    }
  });
  await held[1].send('GET /health HTTP/1.1\r\nHost: x\r\n\r\n'); // and the others have not noticed
  await held[1].until('"ok"}HTTP/1.1 200');
});

test('bodies beyond the memory for all of them are a 503, and it comes back', async (t) => {
  const { router } = await one(t, { config: { limits: { body_bytes: 100000, body_memory_bytes: 100000 } } });
  const held = await connect(t, router);
  const text = rawPost(path, chat('m', { pad: 'x'.repeat(80000) }));
  await held.send(text.slice(0, -10));
  await until('it counts', async () => await metric(router, 'perilune_body_memory_bytes') > 70000);
  const refused = await post(router.url + path, chat('m', { pad: 'x'.repeat(80000) }));
  assert.equal(refused.status, 503);
  assert.match(refused.headers['retry-after'], /^\d+$/);
  await held.send(text.slice(-10));
  assert.match(await held.until('}]'), /^HTTP\/1\.1 200 /);
  await until('given back', async () => await metric(router, 'perilune_body_memory_bytes') === 0);
  assert.equal((await post(router.url + path, chat('m', { pad: 'x'.repeat(80000) }))).status, 200);
});

// --- other methods, other versions ----------------------------------------------------------------------

test('HEAD tells what GET would and has no body; OPTIONS tells what is allowed', async (t) => {
  const { router } = await one(t);
  for (const page of ['/health', '/readyz', '/v1/models', '/metrics']) {
    const full = await get(router.url + page);
    const head = await get(router.url + page, { method: 'HEAD' });
    assert.equal(head.status, full.status);
    assert.equal(head.text, '');
    assert.equal(head.headers['content-type'], full.headers['content-type']);
    if (page !== '/metrics') assert.equal(head.headers['content-length'], String(full.text.length));
    const options = await get(router.url + page, { method: 'OPTIONS' });
    assert.equal(options.status, 204);
    assert.match(options.headers.allow, /GET, HEAD/);
  }
  const options = await get(router.url + path, { method: 'OPTIONS' });
  assert.equal(options.status, 204);
  assert.match(options.headers.allow, /POST/);
  for (const method of ['GET', 'HEAD', 'PUT', 'DELETE']) {
    const wrong = await get(router.url + path, { method });
    assert.equal(wrong.status, 405);
    assert.match(wrong.headers.allow, /POST/);
    if (method === 'HEAD') assert.equal(wrong.text, '');
    else assert.ok(wrong.json.error.message.length > 0);
  }
  // a HEAD leaves nothing on the connection that could be taken for the next answer
  const raw = await connect(t, router);
  await raw.send('HEAD /nowhere HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n');
  const text = await raw.until('"ok"');
  assert.match(text, /^HTTP\/1\.1 404 [^]*?\r\n\r\nHTTP\/1\.1 200 /);
});

test('HTTP/1.0: no chunks, the end of the connection is the end of the answer', async (t) => {
  const { engine, router } = await one(t);
  const old = (body, extra = '') => rawPost(path, body, extra).replace('HTTP/1.1', 'HTTP/1.0').replace('Host: test\r\n', '');

  const stream = await connect(t, router);
  await stream.send(old(chat('m', { stream: true })));
  const text = await stream.until(null);
  assert.match(text, /^HTTP\/1\.[01] 200 /);
  assert.ok(!/transfer-encoding/i.test(text));
  assert.equal(events(text.slice(text.indexOf('\r\n\r\n') + 4)).at(-1), '[DONE]');

  const kept = await connect(t, router);
  await kept.send(old(chat('m'), 'Connection: keep-alive\r\n'));
  const first = await kept.until('}]');
  assert.match(first, /\r\nconnection: keep-alive\r\n/i);
  assert.match(first, /\r\ncontent-length: \d+\r\n/i);
  await kept.send(old(chat('m')));
  const both = await kept.until(null); // this time it was not asked for
  assert.deepEqual(statuses(both), [200, 200]);

  // and a stream that breaks off is no end
  engine.handler = async (entry, res) => {
    await engine.stream(res)(chunk('m', 'one'));
    res.socket.resetAndDestroy();
  };
  const broken = await connect(t, router);
  await broken.send(old(chat('m', { stream: true })));
  await broken.closed;
  assert.ok(broken.error || broken.received.includes('"error"'), broken.received);
  assert.ok(!broken.received.includes('[DONE]'));
});
