// A soak of sessions: many clients open, use, abandon, break off and close sessions while engines fail in
// every way the simulated engine knows, are removed, drained and added, and policies are reloaded. It ends with
// nothing held: not by the router, its store, nor any engine; and whatever has been answered was computed on
// exactly the conversation that its client had (the engine's count of the prompt says so).
//
// PL_LONG=1: 100,000 sessions. PL_SESSIONS and PL_SEED choose others.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import http from 'node:http';
import { startEngine, startRouter, until, usable, metric, scratch, writeFile, long } from './lib/proc.mjs';
import { lean, ledgerIsEmpty, memory } from './lib/ledger.mjs';
import { CHAT } from './lib/sessions.mjs';
import { del, get, post } from './lib/http.mjs';

const SESSIONS = Number(process.env.PL_SESSIONS ?? (long ? 100000 : 800));
const SEED = Number(process.env.PL_SEED ?? 20240607);
const CLIENTS = 48;
const ENGINES = 4; // the last one cannot hold sessions

// xorshift; one stream for each use, so that runs of one seed ask for the same
function random(seed) {
  let s = (seed * 2654435761 + 1) >>> 0 || 1;
  const next = () => {
    s ^= s << 13; s >>>= 0; s ^= s >>> 17; s ^= s << 5; s >>>= 0;
    return s / 4294967296;
  };
  return { next, below: (n) => Math.floor(next() * n), chance: (p) => next() < p, of: (list) => list[Math.floor(next() * list.length)] };
}

const POLICY = (n) => `
  local pl = require "perilune"
  local p = { api = 1, name = "soak${n}" }
  function p.score(req, w) return w.inflight + (req.session and req.session.bound_slot == w.slot and -0.5 or 0) end
  function p.session(req, s) if ${n} % 2 == 0 and s.event == pl.SESSION_OPEN then return s.ttl_seconds, pl.ENGINE_BACKED end end
  function p.retain(req, w) if ${n} % 3 == 0 then return 1, 1 end end
  function p.degrade(req, fault)
    if fault.kind == pl.OPEN_FAILED and ${n} % 4 == 1 then return pl.RETRY end
    if fault.kind == pl.BOUND_GONE and not fault.delta and ${n} % 5 == 4 then return pl.REJECT end
  end
  function p.expire(s) if ${n} % 2 == 1 then return pl.EXTEND, 0.5 end end
  function p.done(req, outcome) end
  return p`;

const agent = new http.Agent({ keepAlive: true, maxSockets: CLIENTS * 3, maxFreeSockets: CLIENTS * 3 });

// One request. `leave`: after so many ms, or 'head', or 'byte', the client is gone.
function request(url, path, key, body, { leave, headers = {} } = {}) {
  return new Promise((resolve) => {
    const data = JSON.stringify(body);
    let timer;
    const req = http.request(`${url}${path}`, {
      method: 'POST', agent,
      headers: { 'content-type': 'application/json', 'content-length': Buffer.byteLength(data), authorization: `Bearer ${key}`, ...headers },
    });
    const over = (answer) => { clearTimeout(timer); resolve(answer); };
    const go = () => { over({ left: true }); req.destroy(); };
    req.on('error', (error) => over({ broken: error.code ?? error.message }));
    req.on('response', (res) => {
      const parts = [];
      if (leave === 'head') { go(); return; }
      res.on('data', (part) => { parts.push(part); if (leave === 'byte') go(); });
      res.on('error', (error) => over({ broken: error.code }));
      res.on('close', () => {
        if (!res.complete) { over({ broken: 'cut' }); return; }
        over({ status: res.statusCode, session: res.headers['x-perilune-session'], worker: res.headers['x-perilune-worker'], text: Buffer.concat(parts).toString() });
      });
    });
    if (typeof leave === 'number') timer = setTimeout(go, leave);
    req.end(data);
  });
}

// What was said and on how many tokens, of a whole answer; null when it is not one.
function said(text, stream) {
  if (!stream) {
    const { choices, usage } = JSON.parse(text);
    return { content: choices[0].message.content, prompt: usage.prompt_tokens };
  }
  let content = '';
  let prompt;
  let done = false;
  for (const event of text.split('\n\n')) {
    if (!event.startsWith('data: ')) continue;
    if (event === 'data: [DONE]') { done = true; continue; }
    const part = JSON.parse(event.slice(6));
    if (part.error) return null;
    content += part.choices[0]?.delta?.content ?? '';
    prompt = part.usage?.prompt_tokens ?? prompt;
  }
  return done ? { content, prompt } : null;
}

test(`${SESSIONS} sessions, seed ${SEED}: nothing stays held`, { timeout: long ? 7200000 : 240000 }, async (t) => {
  const flags = (i) => ['--preset', 'instant', '--max-running', '64', ...(i < ENGINES - 1 ? ['--enable-streaming-session'] : [])];
  const engines = [];
  for (let i = 0; i < ENGINES; i++) engines.push({ ...{ name: `e${i}` }, program: await startEngine(t, { flags: flags(i) }) });
  const directory = scratch(t);
  const policy = writeFile(directory, 'soak.lua', POLICY(0));
  const keys = ['ka', 'kb', 'kc'];
  const router = await startRouter(t, {
    policy,
    env: lean,
    config: {
      engines: engines.map(({ name, program }) => ({ name, url: program.url, max_inflight: 24 })),
      api_keys: keys.map((key) => ({ key, tenant: `tenant ${key}` })),
      sessions: { ttl_seconds: 2, open_timeout_seconds: 0.3, close_timeout_seconds: 0.3, engine_extra_seconds: 3, waiting_turns: 3, turn_wait_seconds: 5 },
      timeouts: { first_byte_seconds: 1, between_bytes_seconds: 1, remove_seconds: 0.2, queue_seconds: 2 },
      breaker: { failures: 5 },
    },
  });
  await usable(router, ENGINES);
  await until('capabilities', async () => (await get(`${router.admin}/engines`)).json.engines
    .every((e) => e.kind === 'sglang' && e.capabilities.includes('streaming_sessions') === (e.name !== `e${ENGINES - 1}`)));

  const seen = {};
  const count = (what) => { seen[what] = (seen[what] ?? 0) + 1; };
  const odd = [];
  let begun = 0;
  let checked = 0;

  // --- clients ---

  const tokens = async (messages) => (await post(`${engines[0].program.url}/tokenize`, { messages, add_generation_prompt: true })).json.count;

  async function session(number) {
    const r = random(SEED + number * 7919);
    const key = r.of(keys);
    const id = r.chance(0.02) ? `shared-${r.below(5)}` : `s${number}`; // some meet on one name
    const shared = id.startsWith('shared');
    const kind = r.of(['full', 'full', 'full', 'delta', 'delta', 'native', 'header', 'bind']);
    const timeout = r.of([1, 1, 2, 3]);
    const headers = kind === 'header' ? { 'x-session-id': id } : {};
    let opened = kind === 'header' || kind === 'bind';
    let lost = false; // what the engine holds is not known to this client
    let messages = []; // of the conversation, as its client has it
    if (kind === 'native') {
      const answer = await request(router.url, '/open_session', key, { capacity_of_str_len: 1000, session_id: id, streaming: true, timeout },
        r.chance(0.1) ? { leave: r.below(20) } : {});
      count(`open ${answer.status ?? answer.broken ?? 'left'}`);
      if (answer.status !== 200) {
        if (answer.status && ![400, 409, 503].includes(answer.status)) odd.push(['open', answer]);
        if (!answer.left) return;
        lost = true;
      }
      opened = true;
    }
    const turns = r.below(5) + (kind === 'native' ? 0 : 1);
    for (let turn = 0; turn < turns; turn++) {
      const last = turn === turns - 1;
      const close = last && r.chance(0.5);
      const asked = { role: 'user', content: `${id} asks ${turn}: ${'word '.repeat(r.below(20))}` };
      const rewrite = kind === 'full' && r.chance(0.03);
      const whole = rewrite ? [asked] : [...messages, asked];
      const stream = r.chance(0.5);
      const deltas = kind === 'delta' || kind === 'native';
      const body = { model: 'sim', messages: deltas ? [asked] : whole, max_tokens: 1 + r.below(8), stream, ...(stream && { stream_options: { include_usage: true } }) };
      const action = close ? 'close' : opened ? undefined : 'open';
      if (kind === 'native') body.session_params = { id };
      else if (kind !== 'header') {
        body.nvext = { session_control: { session_id: id, timeout, ...(kind === 'delta' && { history: 'delta' }),
          ...(kind === 'bind' && !close ? { action: 'bind' } : action && { action }) } };
      } else if (close) headers['x-dynamo-session-final'] = 'true';
      const leave = r.chance(0.12) ? r.of(['head', 'byte', r.below(10), r.below(50), r.below(400)]) : undefined;
      const twin = r.chance(0.03) ? request(router.url, CHAT, key, body, { headers }) : null;
      const answer = await request(router.url, CHAT, key, body, { leave, headers });
      if (twin) { await twin; lost = true; }
      count(`${kind} ${answer.status ?? answer.broken ?? 'left'}${answer.session ? ` ${answer.session}` : ''}`);
      if (answer.left || answer.broken) {
        if (deltas) lost = true;
        if (turn === 0 && !opened) opened = r.chance(0.5);
        continue;
      }
      if (answer.status !== 200) {
        if (![400, 409, 500, 502, 503, 504].includes(answer.status)) odd.push([kind, answer]);
        if (deltas) return;
        continue;
      }
      const got = said(answer.text, stream);
      if (!got) { // broke off in the middle
        if (deltas) lost = true;
        continue;
      }
      opened = true;
      messages = [...whole, { role: 'assistant', content: got.content }];
      if (!lost && !shared && !(deltas && rewrite) && r.chance(0.3)) {
        const expected = await tokens(whole);
        checked++;
        if (got.prompt !== expected) odd.push([`${kind}: computed on ${got.prompt} tokens, the conversation has ${expected}`, number, turn, answer.session, whole.map((m) => m.content)]);
      }
    }
    if (kind === 'native' && r.chance(0.5)) {
      const answer = await request(router.url, '/close_session', key, { session_id: id }, r.chance(0.1) ? { leave: r.below(5) } : {});
      count(`close ${answer.status ?? answer.broken ?? 'left'}`);
      if (answer.status && ![200, 409].includes(answer.status)) odd.push(['close', answer]);
    } else if (r.chance(0.05)) {
      const answer = await del(`${router.admin}/sessions/${id}?tenant=${encodeURIComponent(`tenant ${key}`)}`);
      count(`admin close ${answer.status}`);
      if (![200, 404].includes(answer.status)) odd.push(['admin close', answer.status, answer.text]);
    }
  }

  // --- what goes wrong meanwhile ---

  let over = false;
  async function chaos() {
    const r = random(SEED);
    const faults = [
      { kind: 'refuse' }, { kind: 'reset_mid_stream', after_chunks: 1 }, { kind: 'reset_mid_stream', after_chunks: 0 }, { kind: 'hang' },
      { kind: 'error_500' }, { kind: 'slow', delay_ms: 20 }, { kind: 'slow', delay_ms: 1500 }, { kind: 'open_fail' },
      { kind: 'open_slow', delay_ms: 100 }, { kind: 'open_slow', delay_ms: 1000 }, { kind: 'open_lost' }, { kind: 'close_lost' }, { kind: 'close_cut' },
    ];
    for (let round = 1; !over; round++) {
      const engine = r.of(engines);
      const what = r.below(40);
      if (what < 32) {
        const fault = r.of(faults);
        count(`fault ${fault.kind}`);
        await post(`${engine.program.url}/sim/fault`, { ...fault, probability: 0.3, count: 1 + r.below(6) });
      } else if (what < 34) {
        writeFile(directory, 'soak.lua', POLICY(r.below(20)));
        const answer = await post(`${router.admin}/policy/reload`);
        count(`reload ${answer.status}`);
        if (answer.status !== 200) odd.push(['reload', answer.text]);
      } else if (what < 36) {
        count('drain');
        await post(`${router.admin}/engines/${engine.name}/drain`);
        await new Promise((resolve) => { setTimeout(resolve, r.below(200)); });
        await post(`${router.admin}/engines/${engine.name}/undrain`);
      } else if (what < 38) {
        count('remove and add');
        await del(`${router.admin}/engines/${engine.name}`);
        await new Promise((resolve) => { setTimeout(resolve, r.below(600)); });
        await until('it is added again', async () => (await post(`${router.admin}/engines`, { name: engine.name, url: engine.program.url, max_inflight: 24 })).status < 300, { timeout: 60000, every: 50 });
      } else {
        await post(`${engine.program.url}/sim/fault`, { kind: 'none' });
      }
      await new Promise((resolve) => { setTimeout(resolve, 5 + r.below(long ? 40 : 15)); });
    }
  }

  const started = Date.now();
  const sizes = [];
  async function client() {
    while (begun < SESSIONS) {
      const number = begun++;
      if (number % Math.ceil(SESSIONS / 10) === 0) {
        sizes.push(memory(router).rss);
        if (long) console.error(`${number} sessions after ${Math.round((Date.now() - started) / 1000)} s, ${sizes.at(-1)} kB`);
      }
      await session(number);
    }
  }
  const trouble = chaos();
  await Promise.all(Array.from({ length: CLIENTS }, client));
  over = true;
  await trouble;
  agent.destroy();
  const took = (Date.now() - started) / 1000;

  // --- nothing is held ---

  for (const { program } of engines) await post(`${program.url}/sim/fault`, { kind: 'none' });
  assert.deepEqual(odd.slice(0, 5), [], `${odd.length} answers that should not be`);
  await ledgerIsEmpty(router);
  const held = async () => ({
    listed: (await get(`${router.admin}/sessions?limit=1000`)).json.sessions.length,
    worker_sessions: await metric(router, 'perilune_worker_sessions'),
    worker_tokens: await metric(router, 'perilune_worker_session_tokens'),
    stored: await metric(router, 'perilune_sessions'),
    queued: await metric(router, 'perilune_queue_length'),
    engines: (await Promise.all(engines.map(async ({ program }) => (await get(`${program.url}/sim/sessions`)).json.open))).reduce((a, b) => a + b),
    requests: (await Promise.all(engines.map(async ({ program }) => (await get(`${program.url}/sim/requests`)).json.inflight))).reduce((a, b) => a + b),
  });
  let last;
  await until('nothing is held', async () => {
    last = await held();
    return Object.values(last).every((n) => n === 0);
  }, { timeout: 90000, every: 100 }).catch((error) => assert.fail(`${error.message}; held: ${JSON.stringify(last)}`));

  for (const key of ['full 200 open', 'full 200 bound', 'delta 200 bound', 'native 200 bound', 'header 200 bound', 'open 200', 'delta 409']) {
    assert.ok(Object.keys(seen).some((each) => each.startsWith(key)), `never seen: ${key}: ${JSON.stringify(seen)}`);
  }
  assert.ok(checked > SESSIONS / 10, `${checked} answers were checked`);
  const { text } = await get(`${router.admin}/metrics`);
  const totals = text.split('\n').filter((line) => /^perilune_(session|sessions|degraded|retries)\w*(_total|\{)/.test(line) && !line.endsWith(' 0') && !line.includes('bucket'));
  t.diagnostic(`${SESSIONS} sessions in ${took.toFixed(1)} s, ${checked} answers checked, rss ${sizes.join(' ')} then ${memory(router).rss} kB`);
  t.diagnostic(JSON.stringify(seen));
  t.diagnostic(totals.join('; '));
  // what one needs at its busiest it may keep; it must not grow with the number of sessions that are over
  const early = Math.max(...sizes.slice(0, 4));
  if (long) assert.ok(sizes.at(-1) < early * 1.25 + 16384, `grows: ${sizes.join(' ')} kB`);
});
