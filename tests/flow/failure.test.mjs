// Engines that fail: what is retried, what is not, and what the client is told.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { startRouter, until, engineOf, metric } from './lib/proc.mjs';
import { fakeEngine, gate, chunk, deadUrl } from './lib/fake.mjs';
import { get, post, send, chat, events, Raw, rawPost } from './lib/http.mjs';

const path = '/v1/chat/completions';

// Always tries the first worker first: the test knows who is asked.
async function firstFirst(t, engines, options = {}) {
  const { scratch, writeFile } = await import('./lib/proc.mjs');
  const policy = writeFile(scratch(t), 'first_first.lua', `
    return { api = 1, name = "first_first", score = function(req, w) return w.slot end }`);
  return startRouter(t, { engines, policy, ...options });
}

async function two(t, options) {
  const a = await fakeEngine(t);
  const b = await fakeEngine(t);
  return { a, b, router: await firstFirst(t, { a: a.url, b: b.url }, options) };
}

const reset = (entry, res) => { res.socket.resetAndDestroy(); };

test('a reset before the first byte is retried at another engine, unseen by the client', async (t) => {
  const { a, b, router } = await two(t);
  a.handler = reset;
  const answer = await post(router.url + path, chat('m'));
  assert.equal(answer.status, 200);
  assert.equal(answer.headers['x-perilune-worker'], 'b');
  assert.equal(a.requests.length, 1);
  assert.equal(b.requests.length, 1);
  assert.equal(a.requests[0].body, b.requests[0].body);
  assert.equal(await metric(router, 'perilune_retries_total'), 1);
});

for (const status of [500, 502, 503]) {
  test(`a ${status} before the first byte is retried at another engine`, async (t) => {
    const { a, b, router } = await two(t);
    a.handler = (entry, res) => a.json(res, status, { error: { message: 'no' } });
    const answer = await post(router.url + path, chat('m'));
    assert.equal(answer.status, 200);
    assert.equal(b.requests.length, 1);
  });
}

for (const status of [400, 404, 422, 429]) {
  test(`a ${status} is the client's: passed through, tried once, never held against the engine`, async (t) => {
    const { a, b, router } = await two(t);
    const body = { error: { message: 'because', type: 'x', code: null } };
    a.handler = (entry, res) => a.json(res, status, body, { 'retry-after': '7' });
    for (let i = 0; i < 8; i++) {
      const answer = await post(router.url + path, chat('m'));
      assert.equal(answer.status, status);
      assert.deepEqual(answer.json, body);
      assert.equal(answer.headers['retry-after'], '7');
    }
    assert.equal(a.requests.length, 8);
    assert.equal(b.requests.length, 0);
    assert.equal((await engineOf(router, 'a')).breaker, 'closed');
  });
}

test('never more than two retries, never twice the same engine', async (t) => {
  const engines = [];
  for (let i = 0; i < 4; i++) {
    const engine = await fakeEngine(t);
    engine.handler = reset;
    engines.push(engine);
  }
  const router = await firstFirst(t, Object.fromEntries(engines.map((e, i) => [`e${i}`, e.url])));
  const answer = await post(router.url + path, chat('m'));
  assert.equal(answer.status, 502);
  assert.ok(answer.json.error.message.length > 0);
  assert.deepEqual(engines.map((e) => e.requests.length).sort(), [0, 1, 1, 1]);
});

test('retries stay within their budget when everything fails', async (t) => {
  const engines = [];
  for (let i = 0; i < 3; i++) {
    const engine = await fakeEngine(t);
    engine.handler = (entry, res) => engine.json(res, 500, { error: { message: 'no' } });
    engines.push(engine);
  }
  const router = await firstFirst(t, Object.fromEntries(engines.map((e, i) => [`e${i}`, e.url])), {
    threads: 1, config: { breaker: { failures: 1000000 } },
  });
  const n = 100;
  for (let i = 0; i < n; i++) {
    const answer = await post(router.url + path, chat('m'));
    assert.equal(answer.status, 500);
  }
  const tries = engines.reduce((sum, engine) => sum + engine.requests.length, 0);
  assert.ok(tries > n, 'some are retried');
  assert.ok(tries <= n * 1.2 + 10, `${tries} tries for ${n} requests`);
});

test('an engine that dies mid-stream: the event is closed, an error event follows, no [DONE]', async (t) => {
  const { a, b, router } = await two(t);
  a.handler = async (entry, res) => {
    const write = a.stream(res);
    await write(chunk('m', 'one'));
    // half an event, then death
    await new Promise((resolve) => { res.write('data: {"choices":[{"delta":', resolve); });
    res.socket.resetAndDestroy();
  };
  const res = await send(router.url + path, { method: 'POST', body: chat('m', { stream: true }) });
  assert.equal(res.statusCode, 200);
  const text = await res.text(); // the body ends properly: chunked encoding is complete
  const list = events(text);
  assert.match(list[0], /"one"/);
  assert.ok(!text.includes('[DONE]'));
  const last = JSON.parse(list.at(-1));
  assert.ok(last.error.message.length > 0);
  assert.equal(b.requests.length, 0, 'not retried: bytes were sent');
  await until('ledger back to zero', async () => (await engineOf(router, 'a')).inflight === 0);
});

test('an engine that dies mid-stream on /v1/messages: the event is of type error', async (t) => {
  const { a, router } = await two(t);
  a.handler = async (entry, res) => {
    const write = a.stream(res);
    await write({ type: 'ping' }, 'ping');
    res.socket.resetAndDestroy();
  };
  const res = await send(`${router.url}/v1/messages`, {
    method: 'POST', body: chat('m', { stream: true, max_tokens: 3 }),
  });
  const text = await res.text();
  assert.match(text, /event: error\ndata: \{"type":"error"/);
  assert.ok(!text.includes('message_stop'));
});

test('a stream that ends without its terminator is broken, not complete', async (t) => {
  const { a, router } = await two(t);
  a.handler = async (entry, res) => {
    const write = a.stream(res, { 'content-length': '100000' });
    await write(chunk('m', 'one'));
    res.socket.end();
  };
  const res = await send(router.url + path, { method: 'POST', body: chat('m', { stream: true }) });
  const text = await res.text().catch((error) => `aborted: ${error.code}`);
  assert.ok(!text.includes('[DONE]'));
  assert.match(text, /"error"|aborted/);
});

test('a broken stream whose length was announced has room for the error event', async (t) => {
  const engine = await fakeEngine(t);
  engine.handler = (entry, res) => {
    const event = `data: ${JSON.stringify(chunk('m', 'one'))}\n\n`;
    res.writeHead(200, { 'content-type': 'text/event-stream', 'content-length': event.length + 20 });
    res.write(event, () => res.socket.destroySoon());
  };
  const router = await startRouter(t, { engines: { a: engine.url } });
  const { text } = await post(router.url + path, chat('m', { stream: true }));
  const told = events(text);
  assert.equal(JSON.parse(told[0]).choices[0].delta.content, 'one');
  assert.equal(JSON.parse(told[1]).error.code, 'engine_failed');
});

test('a whole answer that is cut is never passed off as complete', async (t) => {
  const { a, router } = await two(t);
  a.handler = async (entry, res) => {
    res.writeHead(200, { 'content-type': 'application/json', 'content-length': '1000' });
    await new Promise((resolve) => { res.write('{"choices":', resolve); });
    res.socket.resetAndDestroy();
  };
  const raw = await Raw.connect(router.url);
  await raw.send(rawPost(path, chat('m')));
  const text = await raw.until(null);
  assert.match(text, /^HTTP\/1\.1 200 /);
  const body = text.slice(text.indexOf('\r\n\r\n') + 4);
  assert.ok(body.length < 1000);
});

test('an engine that never answers is given up after the first-byte timeout, and retried', async (t) => {
  const { a, b, router } = await two(t, { config: { timeouts: { first_byte_seconds: 0.3 } } });
  const never = gate();
  a.handler = () => never.opened;
  const answer = await post(router.url + path, chat('m'));
  assert.equal(answer.status, 200);
  assert.equal(b.requests.length, 1);
  const entry = await a.request(0);
  await entry.closed;
  assert.ok(entry.aborted, 'the hanging engine sees its connection close');
  never.open();
});

test('a stream that falls silent is ended with an error event', async (t) => {
  const { a, router } = await two(t, { config: { timeouts: { between_bytes_seconds: 0.3 } } });
  const never = gate();
  a.handler = async (entry, res) => {
    const write = a.stream(res);
    await write(chunk('m', 'one'));
    await never.opened;
  };
  const res = await send(router.url + path, { method: 'POST', body: chat('m', { stream: true }) });
  const text = await res.text();
  assert.match(text, /"one"/);
  assert.match(text, /"error"/);
  assert.ok(!text.includes('[DONE]'));
  never.open();
});

test('an engine that refuses connections is tried once, then left alone, and comes back', async (t) => {
  const a = await fakeEngine(t);
  const b = await fakeEngine(t);
  const router = await firstFirst(t, { a: a.url, b: b.url });
  const { port } = a;
  await a.refuse();
  const first = await post(router.url + path, chat('m'));
  assert.equal(first.status, 200);
  assert.equal(first.headers['x-perilune-worker'], 'b');
  await until('a is down', async () => (await engineOf(router, 'a')).health === 'down');
  await a.listen(port);
  await until('a is used again', async () => {
    const answer = await post(router.url + path, chat('m'));
    assert.equal(answer.status, 200);
    return answer.headers['x-perilune-worker'] === 'a';
  });
});

test('an engine that was never there does not keep the router from starting', async (t) => {
  const a = await fakeEngine(t);
  const router = await startRouter(t, { engines: { a: a.url, gone: await deadUrl() }, ready: false });
  await until('answers', async () => (await post(router.url + path, chat('m'))).status === 200);
  assert.equal((await get(`${router.url}/readyz`)).status, 200);
  assert.notEqual((await engineOf(router, 'gone')).health, 'up');
});

test('a pooled connection that the engine has closed costs no request', async (t) => {
  const { a, router } = await two(t);
  for (let i = 0; i < 10; i++) {
    assert.equal((await post(router.url + path, chat('m'))).status, 200);
    for (const socket of a.sockets) socket.resetAndDestroy();
  }
});

test('a pooled connection that breaks while the engine works is its failure: not sent there again', async (t) => {
  const { a, b, router } = await two(t, { threads: 1 });
  assert.equal((await post(router.url + path, chat('m'))).status, 200);
  a.handler = async (entry, res) => {
    await new Promise((resolve) => { setTimeout(resolve, 1500); }); // it works, then it dies
    res.socket.resetAndDestroy();
  };
  const answer = await post(router.url + path, chat('m'));
  assert.equal(answer.status, 200);
  assert.equal(a.requests.length, 2, 'the first, and this one once');
  assert.equal(b.requests.length, 1);
  assert.equal((await engineOf(router, 'a')).counters.failed, 1);
});

test('an error whose body breaks off is one failure, not two', async (t) => {
  const engine = await fakeEngine(t);
  engine.handler = (entry, res) => {
    res.writeHead(500, { 'content-type': 'application/json', 'content-length': 100 });
    res.write('{"error":', () => res.socket.resetAndDestroy());
  };
  const router = await startRouter(t, { engines: { a: engine.url }, config: { breaker: { failures: 4 } } });
  for (let i = 1; i <= 3; i++) {
    await assert.rejects(post(router.url + path, chat('m')));
    const { counters, breaker } = await engineOf(router, 'a');
    assert.deepEqual([counters.failed, breaker], [i, 'closed']);
  }
});

test('every 5xx is a failure, but for what an engine does not implement', async (t) => {
  const { a, b, router } = await two(t, { config: { breaker: { failures: 2 } } });
  a.handler = (entry, res) => a.json(res, 501, { error: { message: 'no' } });
  for (let i = 0; i < 3; i++) assert.equal((await post(router.url + path, chat('m'))).status, 501);
  assert.equal(b.requests.length, 0);
  assert.equal((await engineOf(router, 'a')).breaker, 'closed');
  a.handler = (entry, res) => a.json(res, 507, { error: { message: 'no' } });
  for (let i = 0; i < 2; i++) assert.equal((await post(router.url + path, chat('m'))).status, 200);
  assert.equal(b.requests.length, 2);
  assert.equal((await engineOf(router, 'a')).breaker, 'open');
});

test('the breaker opens after failures in a row and lets a probe through later', async (t) => {
  const { a, router } = await two(t, {
    config: { breaker: { failures: 3, backoff_seconds: 0.3 } },
  });
  a.handler = (entry, res) => a.json(res, 500, { error: { message: 'no' } });
  await until('open', async () => {
    await post(router.url + path, chat('m'));
    return (await engineOf(router, 'a')).breaker === 'open';
  });
  a.handler = null;
  await until('closed again', async () => {
    assert.equal((await post(router.url + path, chat('m'))).status, 200);
    return (await engineOf(router, 'a')).breaker === 'closed';
  });
});

test('an engine whose every stream breaks has its breaker opened, though each begins with a 200', async (t) => {
  const { a, b, router } = await two(t, { config: { breaker: { failures: 3, backoff_seconds: 30 } } });
  a.handler = async (entry, res) => {
    const write = a.stream(res);
    await write(chunk('m', 'one'));
    res.socket.resetAndDestroy();
  };
  for (let i = 0; i < 3; i++) {
    assert.equal((await engineOf(router, 'a')).breaker, 'closed');
    const res = await send(router.url + path, { method: 'POST', body: chat('m', { stream: true }) });
    assert.ok(!(await res.text()).includes('[DONE]'));
  }
  await until('open', async () => (await engineOf(router, 'a')).breaker === 'open');
  assert.equal(b.requests.length, 0);
  assert.equal((await post(router.url + path, chat('m'))).headers['x-perilune-worker'], 'b');
});

test('answers that end well in between keep the breaker closed', async (t) => {
  const { a, router } = await two(t, { config: { breaker: { failures: 2, backoff_seconds: 30 } } });
  const good = a.handler;
  for (let i = 0; i < 3; i++) {
    a.handler = async (entry, res) => {
      const write = a.stream(res);
      await write(chunk('m', 'one'));
      res.socket.resetAndDestroy();
    };
    await (await send(router.url + path, { method: 'POST', body: chat('m', { stream: true }) })).text();
    a.handler = good;
    assert.equal((await post(router.url + path, chat('m'))).status, 200);
  }
  assert.equal((await engineOf(router, 'a')).breaker, 'closed');
  assert.equal(a.requests.length, 6);
});

test('SIGTERM: a stream under way is finished, new connections are refused', async (t) => {
  const { a, router } = await two(t);
  const go = gate();
  a.handler = async (entry, res) => {
    const write = a.stream(res);
    await write(chunk('m', 'one'));
    await go.opened;
    await write(chunk('m', 'two'));
    await write('[DONE]');
    res.end();
  };
  const res = await send(router.url + path, { method: 'POST', body: chat('m', { stream: true }) });
  router.kill('SIGTERM');
  await until('new connections are refused', async () => {
    try {
      const raw = await Raw.connect(router.url);
      raw.destroy();
      return false;
    } catch {
      return true;
    }
  });
  go.open();
  const text = await res.text();
  assert.match(text, /two/);
  assert.match(text, /\[DONE\]/);
  assert.equal((await router.exited).code, 0);
});
