// A storm: clients of all kinds over several loops, while engines are added, removed, drained and
// made to fail and policies are swapped. Nobody is told a lie, the ledger returns to zero, the
// program ends well. Run under TSan, too (PERILUNE names the binary), and with --long for
// PL_STORM_SECONDS (ten minutes unless told otherwise), where memory must be flat in the end.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { startRouter, startEngine, until, engineOf, metric, scratch, writeFile, long } from './lib/proc.mjs';
import { fakeEngine, chunk } from './lib/fake.mjs';
import { ledger, ledgerIsEmpty, memory, lean } from './lib/ledger.mjs';
import { get, post, del, send, chat, Raw, rawPost } from './lib/http.mjs';

const path = '/v1/chat/completions';
const slow = /tsan/.test(process.env.PERILUNE ?? '');
const seconds = long ? Number(process.env.PL_STORM_SECONDS ?? 600) : slow ? 25 : 8;
const random = (n) => Math.floor(Math.random() * n);
const pause = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });

// An engine of which nobody can be sure.
async function moody(t) {
  const engine = await fakeEngine(t);
  engine.handler = async (entry, res) => {
    engine.requests.length = 0; // a soak is long
    const { stream } = entry.json;
    const mood = random(12);
    if (mood === 0) res.socket.resetAndDestroy();
    else if (mood === 1) engine.json(res, 503, { error: { message: 'no' } });
    else if (mood === 2) engine.json(res, 429, { error: { message: 'later' } });
    else if (mood === 3 && stream) {
      const write = engine.stream(res);
      await write(chunk('m', 'one'));
      res.write('data: {"cho');
      res.socket.resetAndDestroy();
    } else {
      await pause(random(10));
      if (!res.destroyed) await engine.chat(entry, res);
    }
  };
  return engine;
}

const policies = [
  'return { api = 1, name = "n", score = function(req, w) return w.inflight end }',
  `local pl = require "perilune"
   local hits = pl.counter("hits")
   return { api = 1, name = "n",
     init = function(params, carry) return { n = carry and carry.n or 0 } end,
     route = function(req, fleet, st)
       st.n = st.n + 1
       hits:add(1)
       for i = 0, fleet.n - 1 do if fleet[(i + st.n) % fleet.n].eligible then return (i + st.n) % fleet.n end end
     end,
     done = function(req, outcome, st) st.last = outcome.status end,
     tick = function(now, st) st.now = now end,
     save = function(st) return { n = st.n } end }`,
  'return { api = 1, name = "n", score = function(req, w) return w.nothing end }', // refused
  'return { api = 1,', // refused
];

// One client that does what it feels like until told to stop.
async function client(router, seen, stopped) {
  const kinds = {
    async whole() {
      const answer = await post(router.url + path, chat('m', { max_tokens: 8 }));
      seen.add(answer.status);
      assert.ok(answer.json, answer.text);
    },
    async stream() {
      const res = await send(router.url + path, { method: 'POST', body: chat('m', { stream: true, max_tokens: 12 }) });
      const text = await res.text();
      seen.add(res.statusCode);
      if (res.statusCode === 200) assert.ok(text.endsWith('data: [DONE]\n\n') !== text.includes('"error"'), text.slice(-300));
      else assert.ok(JSON.parse(text).error.message.length > 0, text);
    },
    async leaves() {
      const raw = await Raw.connect(router.url);
      await raw.send(rawPost(path, chat('m', { stream: true, max_tokens: 50 })).slice(0, random(2) ? undefined : -5));
      await pause(random(20));
      if (random(2)) raw.reset();
      else raw.destroy();
      seen.add('left');
    },
    async pipelines() {
      const raw = await Raw.connect(router.url);
      const ask = rawPost(path, chat('m', { max_tokens: 2 }));
      await raw.send(ask + ask + 'GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n');
      assert.ok((await raw.until(null)).endsWith('{"status":"ok"}'), raw.received);
      seen.add('pipelined');
    },
    async dawdles() {
      const raw = await Raw.connect(router.url);
      raw.pause();
      await raw.send(rawPost(path, chat('m', { stream: true, max_tokens: 30 }), 'Connection: close\r\n'));
      await pause(random(60));
      raw.resume();
      assert.match(await raw.until(null), /^HTTP\/1\.1 \d{3} /);
      assert.ok(raw.received.endsWith('0\r\n\r\n') || raw.received.endsWith('}'), raw.some());
      seen.add('dawdled');
    },
    async looks() {
      await get(`${router.admin}/metrics`);
      await get(`${router.admin}/status`);
      await get(`${router.url}/v1/models`);
      await ledger(router);
    },
  };
  const names = Object.keys(kinds);
  while (!stopped()) await kinds[names[random(names.length)]]();
}

test('a storm of clients, engines and policies', { timeout: (seconds + 120) * 1000 }, async (t) => {
  const sims = [];
  for (let i = 0; i < 3; i++) sims.push(await startEngine(t, { flags: ['--model', 'm', '--speed', '50'] }));
  const moods = await moody(t);
  const directory = scratch(t);
  const file = writeFile(directory, 'p.lua', policies[0]);
  const router = await startRouter(t, {
    policy: file, threads: 4, env: lean,
    config: {
      engines: [
        { name: 'e0', url: sims[0].url, max_inflight: 6 },
        { name: 'e1', url: sims[1].url },
        { name: 'moody', url: moods.url, max_inflight: 4 },
      ],
      breaker: { failures: 3, backoff_seconds: 0.05, max_backoff_seconds: 0.1 },
      timeouts: { remove_seconds: 0.1 },
    },
    ready: false,
  });
  await until('e0 and e1 are up', async () => (await engineOf(router, 'e0'))?.health === 'up'
    && (await engineOf(router, 'e1'))?.health === 'up');

  const from = Date.now();
  const elapsed = () => (Date.now() - from) / 1000;
  const counts = new Map();
  const seen = { add: (what) => counts.set(what, (counts.get(what) ?? 0) + 1) };
  let failed;
  const stopped = () => failed || elapsed() > seconds;
  const clients = Array.from({ length: 24 }, () => client(router, seen, stopped).catch((error) => { failed ??= error; }));

  const changes = [
    async () => {
      assert.ok((await post(`${router.admin}/engines`, { name: 'e2', url: sims[2].url })).status < 300);
      await pause(random(150));
      assert.ok((await del(`${router.admin}/engines/e2`)).status < 300);
      await until('e2 is out', async () => (await get(`${router.admin}/engines/e2`)).status === 404);
    },
    async () => {
      await post(`${router.admin}/engines/e1/drain`);
      await pause(random(50));
      await post(`${router.admin}/engines/e1/undrain`);
    },
    async () => {
      const at = random(policies.length);
      writeFile(directory, 'p.lua', policies[at]);
      let answer;
      do answer = await post(`${router.admin}/policy/reload`);
      while (answer.status === 409); // SIGHUP has started one
      assert.equal(answer.status, at < 2 ? 200 : 422, answer.text);
    },
    async () => {
      for (const socket of moods.sockets) socket.resetAndDestroy();
    },
    async () => router.kill('SIGHUP'),
  ];
  let warm;
  for (let k = 0; !stopped(); k++) {
    await changes[random(changes.length)]();
    await pause(random(30));
    if (!warm && elapsed() > seconds / 5) warm = memory(router);
  }
  await Promise.all(clients);
  if (failed) throw failed;
  await ledgerIsEmpty(router);
  await until('nobody waits', async () => await metric(router, 'perilune_queue_length') === 0);
  await until('all have gone', async () => await metric(router, 'perilune_connections') === 0);
  const cold = memory(router);
  // TSan's own notes grow with what it has seen
  assert.ok(slow || cold.rss < warm.rss * 1.1 + 24000, `${warm.rss} kB became ${cold.rss} kB`);
  assert.ok(slow || cold.mappings < warm.mappings * 1.2 + 60, `${warm.mappings} mappings became ${cold.mappings}`);
  for (const what of [200, 'left', 'pipelined', 'dawdled']) {
    assert.ok(counts.get(what) > (slow ? 10 : 50), `${counts.get(what)} ${what}`);
  }
  t.diagnostic(`${[...counts].map(([what, n]) => `${n} ${what}`).join(', ')}; ${warm.rss} kB, then ${cold.rss} kB`);
});
