// The router's ledger against the engines' own counts, under a mix of streams, whole answers, clients
// that leave and engines that fail; caps as the engines see them; the order of the waiting.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { startRouter, until, usable, enginesOf, metric, long } from './lib/proc.mjs';
import { fakeEngine, gate, chunk } from './lib/fake.mjs';
import { ledger, ledgerIs, ledgerIsEmpty } from './lib/ledger.mjs';
import { post, send, chat } from './lib/http.mjs';

const path = '/v1/chat/completions';
const slow = /tsan/.test(process.env.PERILUNE ?? '');

// Choices that a failing run can repeat: PL_SEED.
const seed = Number(process.env.PL_SEED ?? Date.now() % 1e9);
let state = seed;
function random(n) {
  state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
  return Math.floor((state / 2 ** 32) * n);
}

// Everything that moves passes here: while it is shut, nothing begins, goes on or ends.
class Barrier {
  constructor() { this.open(); }

  shut() {
    this.gate = gate();
    this.isOpen = false;
  }

  open() {
    this.isOpen = true;
    this.gate?.open();
  }

  async pass() { while (!this.isOpen) await this.gate.opened; }
}

const turns = (n) => new Promise((resolve) => { setTimeout(resolve, n); });

// How many of these connections (by the client's port) the router holds open to the engine, as the
// kernel knows: that a peer has closed reaches a busy engine a little later than it happens.
function open(engine, ports) {
  const hex = (port) => port.toString(16).toUpperCase().padStart(4, '0');
  const established = new Set(readFileSync('/proc/net/tcp', 'utf8').split('\n')
    .map((line) => line.trim().split(/\s+/))
    .filter(([, local, , state]) => state === '01' && local?.endsWith(`:${hex(engine.port)}`))
    .map(([, , remote]) => remote.split(':')[1]));
  return [...ports].filter((port) => established.has(hex(port))).length;
}

const blockTokens = 4;

// An engine that counts. A request counts from when it is whole until its answer is written or its
// connection ends; its prefill until its first byte. written: the tokens of each of them.
async function counting(t, barrier, cap) {
  const engine = await fakeEngine(t);
  engine.metrics = `vllm:cache_config_info{block_size="${blockTokens}",engine="0",num_gpu_blocks="99"} 1\n`
    + 'vllm:num_requests_running{engine="0"} 0\n';
  Object.assign(engine, { inflight: 0, streams: 0, prefills: 0, most: 0, written: new Map() });
  const ports = new Set();
  engine.handler = async (entry, res) => {
    const { stream } = entry.json;
    if (entry.socket.readableEnded || entry.socket.destroyed) return; // left while it came in
    let counted = true;
    let prefill = true;
    engine.inflight += 1;
    engine.prefills += 1;
    engine.streams += stream ? 1 : 0;
    engine.written.set(entry, 0);
    ports.add(entry.socket.remotePort);
    const now = engine.inflight > cap ? open(engine, ports) : engine.inflight;
    engine.most = Math.max(engine.most, now);
    const begun = () => {
      if (prefill) engine.prefills -= 1;
      prefill = false;
    };
    const over = () => {
      if (!counted) return;
      counted = false;
      begun();
      ports.delete(entry.socket.remotePort);
      engine.inflight -= 1;
      engine.streams -= stream ? 1 : 0;
      engine.written.delete(entry);
      entry.socket.off('end', over);
    };
    entry.socket.once('end', over);
    res.once('close', over);
    const step = async () => {
      await turns(random(12));
      await barrier.pass();
      return counted;
    };
    if (!await step()) return;
    const fate = random(20);
    if (fate === 0) {
      over();
      res.socket.resetAndDestroy();
    } else if (fate === 1) {
      over();
      engine.json(res, 500, { error: { message: 'no' } });
    } else if (!stream) {
      over();
      engine.json(res, 200, {});
    } else {
      begun();
      const write = engine.stream(res);
      for (let k = random(8); k >= 0; k--) {
        if (counted) engine.written.set(entry, engine.written.get(entry) + 1);
        await write(chunk('m', 'word'));
        if (!await step()) return;
        if (fate === 2 && k === 0) {
          over();
          res.socket.resetAndDestroy();
          return;
        }
      }
      over();
      res.write('data: [DONE]\n\n');
      res.end();
    }
  };
  return engine;
}

test(`the ledger equals the engines' counts at random instants (PL_SEED=${seed})`, { timeout: long ? 3600000 : 300000 }, async (t) => {
  const barriers = long ? 2000 : slow ? 15 : 60;
  const caps = [3, 5, 8];
  const barrier = new Barrier();
  const engines = [];
  for (const cap of caps) engines.push(await counting(t, barrier, cap));
  const router = await startRouter(t, {
    threads: 3,
    policy: 'random',
    config: {
      engines: engines.map((engine, i) => ({
        name: `e${i}`, url: engine.url, max_inflight: caps[i], kind: 'vllm',
      })),
      gauges: { interval_seconds: 0.05, timeout_seconds: 10 },
      breaker: { failures: 1000000 },
      health: { interval_seconds: 0.1, timeout_seconds: 10, fall: 100 },
    },
  });
  await usable(router, caps.length);
  await until('the block sizes', async () => (await enginesOf(router))
    .every(({ workers }) => workers[0].block_tokens === blockTokens));

  // what the router reckons one prompt to be: all are the same here
  barrier.shut();
  const first = send(router.url + path, { method: 'POST', body: chat('m') });
  let prompt = 0;
  await until('one prompt', async () => {
    prompt = Object.values(await ledger(router)).reduce((sum, e) => sum + e.queued_prefill_tokens, 0);
    return prompt > 0;
  });
  barrier.open();
  await (await first).text();
  await ledgerIsEmpty(router);

  let stop = false;
  const seen = { served: 0, left: 0, broken: 0 };
  const clients = Array.from({ length: 24 }, async () => {
    while (!stop) {
      await barrier.pass();
      const controller = new AbortController();
      const leaves = random(4) === 0;
      try {
        const asked = send(router.url + path, {
          method: 'POST', body: chat('m', { stream: random(2) === 0 }), signal: controller.signal,
        });
        asked.catch(() => {});
        if (leaves) {
          await turns(random(15));
          await barrier.pass();
          controller.abort();
        }
        const res = await asked;
        const text = await res.text();
        assert.ok([200, 500, 502].includes(res.statusCode), `${res.statusCode} ${text}`);
        seen[res.statusCode !== 200 || text.includes('"error"') ? 'broken' : 'served'] += 1;
      } catch (error) {
        if (!leaves) throw error;
        seen.left += 1;
      }
    }
  });

  let busy = 0;
  let generated = 0;
  const blocks = (tokens) => Math.ceil(tokens / blockTokens);
  for (let k = 0; k < barriers; k++) {
    await turns(random(60));
    barrier.shut();
    // what was on its way arrives; then both sides stand still and must agree
    let told;
    let own;
    await until('the ledger and the engines agree', async () => {
      told = await ledger(router);
      own = Object.fromEntries(engines.map((engine, i) => [`e${i}`, {
        inflight: engine.inflight,
        streams: engine.streams,
        queued_prefill_tokens: engine.prefills * prompt,
        decode_blocks: [...engine.written.values()].reduce((sum, n) => sum + blocks(prompt + n), 0),
      }]));
      for (const [i, cap] of caps.entries()) assert.ok(told[`e${i}`].inflight <= cap);
      return JSON.stringify(told) === JSON.stringify(own);
    }).catch((error) => assert.fail(`${error.message}: ${JSON.stringify({ told, own })}`));
    for (const engine of engines) {
      for (const n of engine.written.values()) generated += blocks(prompt + n) > blocks(prompt) ? 1 : 0;
    }
    busy += Object.values(own).reduce((sum, e) => sum + e.inflight, 0);
    barrier.open();
  }
  // a slow machine has seen fewer requests by now
  await until('every kind of end', async () => Object.values(seen).every((n) => n > 3)
    && await metric(router, 'perilune_retries_total') > 3, { timeout: 60000 });
  stop = true;
  await Promise.all(clients);
  await ledgerIsEmpty(router);
  engines.forEach((engine, i) => {
    assert.equal(engine.inflight, 0);
    assert.ok(engine.most <= caps[i], `${engine.most} at once at an engine that takes ${caps[i]}`);
  });
  assert.ok(engines.some((engine, i) => engine.most === caps[i]), 'the caps were reached');
  assert.ok(busy > barriers * 4, `${busy} requests under way at ${barriers} instants`);
  assert.ok(generated > 0, 'some had filled a further block');
  assert.equal(await metric(router, 'perilune_queue_length'), 0);
});

test(`the waiting are served by priority, then by arrival, over several loops (PL_SEED=${seed})`, { timeout: 120000 }, async (t) => {
  const engine = await fakeEngine(t);
  const gates = [];
  engine.handler = async (entry, res) => {
    const g = gate();
    gates.push(g);
    engine.changed();
    await g.opened;
    engine.json(res, 200, {});
  };
  const router = await startRouter(t, {
    threads: 4, config: { engines: [{ name: 'a', url: engine.url, max_inflight: 1 }] },
  });
  await usable(router, 1);
  const answers = [post(router.url + path, chat('m', { who: -1 }))];
  await engine.request(0);
  const waiting = [];
  for (let who = 0; who < 60; who++) {
    const priority = random(5) - 2;
    waiting.push({ who, priority });
    answers.push(post(router.url + path, chat('m', { who, priority })));
    await until(`${who + 1} wait`, async () => await metric(router, 'perilune_queue_length') === who + 1, { every: 1 });
  }
  await ledgerIs(router, 'a', { inflight: 1 });
  for (let k = 0; k < answers.length; k++) {
    await engine.when(() => gates[k], `request ${k} being served`);
    gates[k].open();
  }
  for (const answer of await Promise.all(answers)) assert.equal(answer.status, 200);
  const expected = waiting.sort((a, b) => b.priority - a.priority || a.who - b.who).map(({ who }) => who);
  assert.deepEqual(engine.requests.slice(1).map((entry) => entry.json.who), expected);
});
