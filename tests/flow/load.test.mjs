// Many streams over several loops while everything changes around them: every stream arrives byte
// for byte, the ledger returns to zero, memory stays flat. Also run under TSan by tests/run.sh.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { startRouter, startEngine, until, engineOf, enginesOf, metric, scratch, writeFile, long } from './lib/proc.mjs';
import { fakeEngine, chunk } from './lib/fake.mjs';
import { get, post, del, send, chat } from './lib/http.mjs';

const path = '/v1/chat/completions';
const slow = /tsan/.test(process.env.PERILUNE ?? '');
const rss = (pid) => Number(/VmRSS:\s+(\d+) kB/.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))[1]);


test('streams under good and bad reloads are byte-equal', { timeout: 600000 }, async (t) => {
  const streams = slow ? 60 : 200;
  const reloads = slow ? 100 : long ? 10000 : 1000;
  let stop = false;
  const expected = new Map();
  const engines = {};
  for (const name of ['a', 'b', 'c']) {
    const engine = await fakeEngine(t);
    engines[name] = engine.url;
    engine.handler = async (entry, res) => {
      const { who } = entry.json;
      let text = '';
      res.writeHead(200, { 'content-type': 'text/event-stream' });
      const put = (data) => {
        const event = `data: ${JSON.stringify(data)}\n\n`;
        text += event;
        return new Promise((resolve) => { res.write(event, resolve); });
      };
      // as long as the reloads go on, and at least twenty words
      for (let k = 0; k < 20 || !stop; k++) {
        if (res.destroyed) return;
        await put(chunk('m', `${who}:${k} ${'x'.repeat((who * 7 + k * 13) % 90)}`));
        await new Promise((resolve) => { setTimeout(resolve, 20); });
      }
      text += 'data: [DONE]\n\n';
      expected.set(who, text);
      res.end('data: [DONE]\n\n');
    };
  }
  const directory = scratch(t);
  const good = (n) => `
    local policy = { api = 1, name = "g${n}" }
    function policy.init(params, carry) return { n = carry and carry.n or 0 } end
    function policy.score(req, w, st) st.n = st.n + 1 return w.inflight end
    function policy.done(req, outcome, st) st.last = outcome.status end
    function policy.tick(now, st) st.now = now end
    function policy.save(st) return { n = st.n } end
    return policy`;
  const file = writeFile(directory, 'p.lua', good(0));
  const router = await startRouter(t, { engines, policy: file, threads: 4 });

  const got = [];
  const running = Array.from({ length: streams }, async (_, who) => {
    const res = await send(router.url + path, { method: 'POST', body: chat('m', { stream: true, who }) });
    assert.equal(res.statusCode, 200);
    got[who] = await res.text();
  });
  await until('all streams run', async () => {
    return (await enginesOf(router)).reduce((sum, engine) => sum + engine.inflight, 0) === streams;
  });

  let generation = 0;
  let warm;
  for (let n = 1; n <= reloads; n++) {
    const bad = n % 2 === 0;
    writeFile(directory, 'p.lua', bad ? 'return { api = 1, score = 7 }' : good(n));
    const answer = await post(`${router.admin}/policy/reload`);
    assert.equal(answer.status, bad ? 422 : 200, answer.text);
    if (!bad) {
      assert.ok(answer.json.generation > generation);
      generation = answer.json.generation;
    }
    if (n === Math.floor(reloads / 4)) warm = rss(router.child.pid);
  }
  const end = rss(router.child.pid);
  assert.ok(end < warm * 1.3 + 20000, `memory grew from ${warm} to ${end} kB`);
  const last = reloads % 2 === 0 ? reloads - 1 : reloads;
  for (let i = 0; i < 32; i++) { // over all loops
    stop = true;
    const answer = await post(router.url + path, chat('m', { stream: true, who: 100000 + i }));
    assert.equal(answer.headers['x-perilune-policy'], `g${last}`);
  }
  await Promise.all(running);
  for (let who = 0; who < streams; who++) {
    assert.ok(got[who] === expected.get(who), `stream ${who} differs`);
  }
  for (const name of Object.keys(engines)) {
    await until('ledger back to zero', async () => (await engineOf(router, name)).inflight === 0);
  }
});

test('clients come and go, engines come and go', { timeout: 300000 }, async (t) => {
  const rounds = slow ? 6 : 15;
  const urls = [];
  for (let i = 0; i < 3; i++) {
    const engine = await startEngine(t, { flags: ['--model', 'm', '--speed', '50'] });
    urls.push(engine.url);
  }
  const router = await startRouter(t, {
    engines: { e0: urls[0], e1: urls[1] }, policy: 'power_of_two', threads: 4,
  });
  let served = 0;
  let stop = false;
  const clients = Array.from({ length: 24 }, async (_, who) => {
    for (let k = 0; !stop || k < 5; k++) {
      const leave = (who + k) % 4 === 0;
      const controller = new AbortController();
      try {
        const res = await send(router.url + path, {
          method: 'POST',
          body: chat('m', { stream: k % 2 === 0, max_tokens: 20, user: `u${who}` }),
          signal: controller.signal,
        });
        assert.ok([200, 502, 503].includes(res.statusCode), `status ${res.statusCode}`);
        if (leave) controller.abort();
        const text = await res.text();
        if (res.statusCode === 200 && k % 2 === 0) {
          assert.ok(/data: \[DONE\]\n\n$/.test(text) || text.includes('"error"'), text.slice(-200));
        }
        served += 1;
      } catch (error) {
        if (!leave) throw error;
      }
    }
  });
  for (let round = 0; round < rounds; round++) {
    const added = await post(`${router.admin}/engines`, { name: 'e2', url: urls[2] });
    assert.ok(added.status < 300, added.text);
    await until('e2 is up', async () => (await engineOf(router, 'e2'))?.health === 'up');
    await post(`${router.admin}/engines/e1/drain`);
    await get(`${router.url}/v1/models`);
    await get(`${router.admin}/metrics`);
    await post(`${router.admin}/policy/reload`);
    await post(`${router.admin}/engines/e1/undrain`);
    assert.ok((await del(`${router.admin}/engines/e2`)).status < 300);
    await until('e2 is out', async () => (await get(`${router.admin}/engines/e2`)).status === 404);
  }
  stop = true;
  await Promise.all(clients);
  assert.ok(served > 100, `${served} served`);
  for (const name of ['e0', 'e1']) {
    await until(`ledger of ${name} back to zero`, async () => {
      const engine = await engineOf(router, name);
      return engine.inflight === 0 && engine.queued_prefill_tokens === 0 && engine.streams === 0;
    });
  }
  assert.equal(await metric(router, 'perilune_policy_errors_total') ?? 0, 0);
});

test('a slow reader holds back its own stream and nothing else', { timeout: 120000 }, async (t) => {
  const engine = await fakeEngine(t);
  let written = 0;
  engine.handler = async (entry, res) => {
    if (!entry.json.big) {
      await engine.chat(entry, res);
      return;
    }
    res.writeHead(200, { 'content-type': 'text/event-stream' });
    const event = `data: ${JSON.stringify(chunk('m', 'y'.repeat(8000)))}\n\n`;
    for (let k = 0; k < 8000 && !res.destroyed; k++) { // 64 MB
      written += event.length;
      if (!res.write(event)) await new Promise((resolve) => { res.once('drain', resolve); res.once('close', resolve); });
    }
    res.end('data: [DONE]\n\n');
  };
  const router = await startRouter(t, { engines: { a: engine.url }, threads: 1 });
  const res = await send(router.url + path, { method: 'POST', body: chat('m', { stream: true, big: 1 }) });
  res.pause();
  let before = -1;
  await until('the engine is held back', async () => {
    const stuck = written > 0 && written === before;
    before = written;
    return stuck;
  }, { every: 300 });
  assert.ok(written < 48e6, `${written} bytes were taken from the engine`);
  for (let i = 0; i < 10; i++) assert.equal((await post(router.url + path, chat('m'))).status, 200);
  const text = await res.text();
  assert.equal(text.length, written + 'data: [DONE]\n\n'.length);
});
