// Every state that a request can be in, times everything that can happen to it then: what the client
// is told, that the engine sees it, that nothing stays in the ledger and that the router goes on.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { startRouter, until, usable, metric, scratch, writeFile } from './lib/proc.mjs';
import { fakeEngine, gate, chunk } from './lib/fake.mjs';
import { deafEngine } from './lib/deaf.mjs';
import { ledgerIs, ledgerIsEmpty } from './lib/ledger.mjs';
import { cleanup } from './lib/cleanup.mjs';
import { post, del, chat, events as eventsOf, Raw, rawPost } from './lib/http.mjs';

const path = '/v1/chat/completions';
const POLICY = 'return { api = 1, name = "p", score = function(req, w) return w.inflight end }';
const idle = { inflight: 0, streams: 0, queued_prefill_tokens: 0 };

// --- states: each brings one request of a raw client into it --------------------------------------------
//
// What a state gives: router, client, engine; reached: the request is at the engine; headSent: the
// client has an answer's head; entry(): the request as the engine saw it; goOn(): what it waits for
// happens; status: of the answer when its time runs out. `short` is the timeout that runs out then.

async function setup(t, short, { engine, cap, interval = 0.1 } = {}) {
  const s = { engine: engine ?? await fakeEngine(t), directory: scratch(t) };
  s.router = await startRouter(t, {
    policy: writeFile(s.directory, 'p.lua', POLICY),
    config: {
      engines: [{ name: 'a', url: s.engine.url, max_inflight: cap ?? 0 }],
      timeouts: { connect_seconds: 30, remove_seconds: 0.2, drain_seconds: 30, ...short },
      health: { interval_seconds: interval, timeout_seconds: 10, detect_interval_seconds: interval },
    },
  });
  await usable(s.router, 1);
  s.client = await Raw.connect(s.router.url);
  cleanup(t, () => s.client.destroy());
  s.entry = () => s.engine.requests.find((entry) => !entry.json.other);
  s.ask = () => s.client.send(rawPost(path, chat('m', { stream: true })));
  return s;
}

const states = {
  async 'reading body'(t, short) {
    const s = await setup(t, short && { body_seconds: 0.2 });
    const text = rawPost(path, chat('m', { stream: true }));
    await s.client.send(text.slice(0, -10));
    s.goOn = () => s.client.send(text.slice(-10));
    s.status = 408;
    await ledgerIs(s.router, 'a', idle);
    return s;
  },

  async queued(t, short) {
    const s = await setup(t, short && { queue_seconds: 0.2 }, { cap: 1 });
    const held = gate();
    s.engine.handler = async (entry, res) => {
      if (entry.json.other) await held.opened;
      if (!res.destroyed) await s.engine.chat(entry, res);
    };
    s.other = post(s.router.url + path, chat('m', { other: 1 }));
    await s.engine.request(0);
    await s.ask();
    await until('it waits', async () => await metric(s.router, 'perilune_queue_length') === 1);
    await ledgerIs(s.router, 'a', { inflight: 1, streams: 0 });
    s.goOn = () => held.open();
    s.status = 503;
    return s;
  },

  async connecting(t, short) {
    const engine = await deafEngine(t);
    // after the first look at it, nobody but the request talks to the engine
    const s = await setup(t, short && { connect_seconds: 0.2 }, { engine, interval: 3600 });
    await engine.deafen();
    await s.ask();
    await ledgerIs(s.router, 'a', { inflight: 1, streams: 1 });
    if (!short) assert.equal(engine.waiting(), 1);
    s.entry = undefined;
    s.goOn = () => engine.hear();
    s.status = 504;
    return s;
  },

  async 'awaiting the first byte'(t, short) {
    const s = await setup(t, short && { first_byte_seconds: 0.2 });
    const held = gate();
    s.engine.handler = async (entry, res) => {
      await held.opened;
      if (!res.destroyed) await s.engine.chat(entry, res);
    };
    await s.ask();
    await s.engine.request(0);
    if (!short) await ledgerIs(s.router, 'a', { inflight: 1, streams: 1 });
    s.goOn = () => held.open();
    s.reached = true;
    s.status = 504;
    return s;
  },

  async streaming(t, short) {
    const s = await setup(t, short && { between_bytes_seconds: 0.2 });
    const held = gate();
    s.engine.handler = async (entry, res) => {
      const write = s.engine.stream(res);
      await write(chunk('m', 'one'));
      await held.opened;
      if (res.destroyed) return;
      await write(chunk('m', 'two'));
      await write('[DONE]');
      res.end();
    };
    await s.ask();
    await s.client.until('"one"');
    if (!short) await ledgerIs(s.router, 'a', { inflight: 1, streams: 1, queued_prefill_tokens: 0 });
    s.goOn = () => held.open();
    s.reached = s.headSent = true;
    return s;
  },

  async 'back-pressured'(t, short) {
    const s = await setup(t, short && { write_seconds: 0.2 });
    s.written = 0;
    s.engine.handler = async (entry, res) => {
      if (entry.json.other) { // this client has to read in time, too
        await s.engine.chat(entry, res);
        return;
      }
      const write = s.engine.stream(res);
      const closed = new Promise((resolve) => { res.on('close', resolve); });
      for (let k = 0; k < 8000 && !res.destroyed; k++) { // 64 MB: more than the kernel takes
        const data = JSON.stringify(chunk('m', `${k}`.padEnd(8000, 'z')));
        s.written += data.length + 'data: \n\n'.length;
        await Promise.race([write(data), closed]);
      }
      if (res.destroyed) return;
      await write('[DONE]');
      res.end();
    };
    await s.ask();
    await s.client.until('data: ');
    s.client.pause();
    await until('it is held back', async () => await metric(s.router, 'perilune_paused_total') >= 1);
    if (!short) await ledgerIs(s.router, 'a', { inflight: 1, streams: 1, queued_prefill_tokens: 0 });
    s.goOn = () => s.client.resume();
    s.reached = s.headSent = s.large = true;
    return s;
  },
};

// --- what is looked at ------------------------------------------------------------------------------------

// The parts of the client's only answer; the body without its chunked framing.
function parse(text) {
  const at = text.indexOf('\r\n\r\n');
  const [line, ...lines] = text.slice(0, at).split('\r\n');
  const headers = Object.fromEntries(lines.map((header) => {
    const colon = header.indexOf(':');
    return [header.slice(0, colon).toLowerCase(), header.slice(colon + 1).trim()];
  }));
  let rest = text.slice(at + 4);
  if (headers['transfer-encoding'] !== 'chunked') return { status: Number(line.split(' ')[1]), headers, body: rest, whole: true };
  const parts = [];
  let whole = false;
  for (;;) {
    const end = rest.indexOf('\r\n');
    if (end < 0) break;
    const size = parseInt(rest.slice(0, end), 16);
    whole = size === 0;
    if (whole || rest.length < end + 2 + size) break;
    parts.push(rest.slice(end + 2, end + 2 + size));
    rest = rest.slice(end + 4 + size);
  }
  return { status: Number(line.split(' ')[1]), headers, body: parts.join(''), whole };
}

// A whole, good stream. The connection may stay open.
async function served(s) {
  const answer = parse(await s.client.until('0\r\n\r\n', 60000));
  assert.equal(answer.status, 200, answer.body);
  assert.ok(answer.whole);
  assert.equal(eventsOf(answer.body).at(-1), '[DONE]');
  assert.ok(!answer.body.includes('"error"'));
  if (s.large) {
    assert.equal(answer.body.length, s.written + 'data: [DONE]\n\n'.length);
    eventsOf(answer.body).slice(0, -1).forEach((event, k) => {
      assert.ok(JSON.parse(event).choices[0].delta.content.startsWith(`${k}z`));
    });
  }
  return answer;
}

// An error of the router's own, before any other byte.
async function refused(s, ...statuses) {
  await s.client.until('"message"');
  const answer = parse(s.client.received);
  assert.ok(statuses.includes(answer.status), s.client.received);
  const { error } = JSON.parse(answer.body);
  assert.ok(error.message.length > 0);
  assert.ok(error.type.length > 0);
  if (answer.status === 503) assert.match(answer.headers['retry-after'], /^\d+$/);
  assert.match(answer.headers['x-request-id'] ?? '', answer.status === 408 ? /^/ : /./);
  return answer;
}

// A stream that cannot be completed: what had come, then the API's error event, no [DONE], the body's
// proper end, and the connection closed.
async function brokenOff(s) {
  if (s.large) s.client.resume();
  const answer = parse(await s.client.until(null));
  assert.equal(answer.status, 200);
  assert.ok(answer.whole, 'the chunked body has its end');
  const events = eventsOf(answer.body);
  assert.ok(!answer.body.includes('[DONE]'));
  assert.ok(JSON.parse(events.at(-1)).error.message.length > 0, events.at(-1));
  // whole events before that, but for the one in which it broke off
  events.slice(0, -2).forEach((event) => assert.ok(JSON.parse(event).choices));
}

// The engine sees that nobody waits any more.
async function engineLetGo(s) {
  if (!s.reached) return;
  await s.entry().closed;
  assert.ok(s.entry().aborted);
}

// The router is as before: nothing is counted, and the next request is served.
async function asBefore(s) {
  s.goOn();
  await s.other;
  await s.engine.seen?.(); // the queue of one that was deaf has room again
  await ledgerIsEmpty(s.router);
  const next = await post(s.router.url + path, chat('m', { other: 2 }));
  assert.equal(next.status, 200);
  await ledgerIsEmpty(s.router);
}

// --- events ------------------------------------------------------------------------------------------------

const happens = {
  async 'the client leaves'(s, state) {
    s.client.reset();
    await engineLetGo(s);
    if (state === 'queued') {
      await until('its place is free', async () => await metric(s.router, 'perilune_queue_length') === 0);
    }
    if (state === 'connecting') {
      await until('nobody connects', () => s.engine.waiting() === 0);
      await ledgerIsEmpty(s.router);
    }
    await asBefore(s);
    if (state === 'connecting') assert.equal(await s.engine.seen(), 1, 'only the next one has reached it');
    else assert.equal(s.engine.requests.filter((entry) => !entry.json.other).length, s.reached ? 1 : 0);
    const noticed = state === 'reading body' ? 0 : 1;
    assert.equal(await metric(s.router, 'perilune_client_gone_total'), noticed);
  },

  async 'the engine resets'(s, state) {
    if (state === 'connecting') await s.engine.end(); // the next SYN is refused
    else for (const socket of s.engine.sockets) socket.resetAndDestroy();
    if (state === 'reading body') {
      s.goOn(); // it has no connection yet
      await served(s);
    } else if (state === 'queued') {
      assert.equal((await s.other).status, 502);
      s.goOn();
      await served(s); // its turn has come
    } else if (s.headSent) {
      await brokenOff(s);
    } else {
      await refused(s, 502);
    }
    if (state !== 'connecting') await asBefore(s);
    else await ledgerIsEmpty(s.router);
  },

  async 'its time runs out'(s, state) {
    if (state === 'back-pressured') {
      // nothing can be said to who does not read: cut, and visibly so
      await engineLetGo(s);
      s.client.resume();
      const answer = parse(await s.client.until(null));
      assert.ok(!answer.whole);
      assert.ok(!answer.body.includes('[DONE]'));
    } else if (s.headSent) {
      await brokenOff(s);
    } else {
      await refused(s, s.status);
    }
    await engineLetGo(s);
    if (state === 'connecting') assert.equal(s.engine.waiting(), 0);
    await asBefore(s);
  },

  async 'the router drains'(s) {
    s.router.kill('SIGTERM');
    await s.router.log('draining');
    s.goOn();
    await served(s);
    await s.client.until(null); // and closed
    assert.equal((await s.other)?.status ?? 200, 200);
    assert.deepEqual(await s.router.exited, { code: 0, signal: null });
  },

  async 'its engine is removed'(s, state) {
    const removed = await del(`${s.router.admin}/engines/a`);
    assert.ok(removed.status < 300, removed.text);
    if (state === 'reading body') {
      s.goOn();
      await refused(s, 404, 503);
    } else if (s.headSent) {
      await brokenOff(s);
    } else {
      await refused(s, 503);
    }
    await engineLetGo(s);
    if (state === 'connecting') await until('nobody connects', () => s.engine.waiting() === 0);
    s.goOn();
    await s.other;
    await s.router.log('engine_removed');
    assert.equal(await metric(s.router, 'perilune_queue_length'), 0);
  },

  async 'the policy is reloaded'(s, state) {
    writeFile(s.directory, 'p.lua', POLICY.replace('"p"', '"q"'));
    assert.equal((await post(`${s.router.admin}/policy/reload`)).status, 200);
    s.goOn();
    const answer = await served(s);
    // the answer names who decided
    const decided = state === 'reading body' || state === 'queued' ? 'q' : 'p';
    assert.equal(answer.headers['x-perilune-policy'], decided);
    await asBefore(s);
    const next = await post(s.router.url + path, chat('m', { other: 3 }));
    assert.equal(next.headers['x-perilune-policy'], 'q');
  },
};

for (const [state, enter] of Object.entries(states)) {
  for (const [event, happen] of Object.entries(happens)) {
    test(`${state}: ${event}`, { timeout: 90000 }, async (t) => {
      await happen(await enter(t, event === 'its time runs out'), state);
    });
  }
}
