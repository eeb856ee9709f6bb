// Policies are swapped under streams, again and again, good and bad ones in turn: no stream notices,
// every loop is on the same generation, memory stays flat, and a bad one says where it is bad.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { startRouter, until, scratch, writeFile, long } from './lib/proc.mjs';
import { fakeEngine, chunk } from './lib/fake.mjs';
import { ledger, ledgerIsEmpty, memory, lean } from './lib/ledger.mjs';
import { get, post, send, chat } from './lib/http.mjs';

const path = '/v1/chat/completions';
const slow = /tsan/.test(process.env.PERILUNE ?? '');
const LOOPS = 4;
const STREAMS = slow ? 50 : 200;
const RELOADS = slow ? 100 : long ? 20000 : 1000;

// Every hook that a reload touches, and a reason that tells the loop.
const good = (n) => `
local policy = { api = 1, name = "g${n}", params = { weight = 1.5 } }
function policy.init(params, carry, ctx)
  return { loop = ctx.loop, n = carry and carry.n or 0, notes = {} }
end
function policy.route(req, fleet, st)
  st.n = st.n + 1
  local best
  for i = 0, fleet.n - 1 do
    local w = fleet[i]
    if w.eligible and (not best or w.inflight < best.inflight) then best = w end
  end
  if best then return best.index, "loop-" .. st.loop end
end
function policy.done(req, outcome, st) st.notes[#st.notes % 64 + 1] = outcome.status end
function policy.tick(now, st) st.now = now end
function policy.save(st) return { n = st.n } end
return policy
`;

const bad = [
  ['parse', 2, 'local policy = { api = 1 }\nfunction policy.route( return 0 end\nreturn policy'],
  ['run', 2, 'local x = 1\nerror("no")'],
  ['check', 1, 'return { api = 1, rout = function() end }'],
  ['init', 2, 'return { api = 1,\n init = function() error("no") end }'],
  ['selftest', 2, 'return { api = 1,\n score = function(req, w) return w.nothing end }'],
];

// An engine whose streams go on until they are told to end, and which remembers their bytes.
async function talker(t, until) {
  const engine = await fakeEngine(t);
  engine.sent = new Map();
  engine.handler = async (entry, res) => {
    const { who } = entry.json;
    if (who === undefined) {
      await engine.chat(entry, res);
      return;
    }
    const events = [];
    res.writeHead(200, { 'content-type': 'text/event-stream' });
    const put = (data) => {
      events.push(`data: ${data}\n\n`);
      return new Promise((resolve) => { res.write(events.at(-1), resolve); });
    };
    for (let k = 0; !res.destroyed && (k < 20 || !until.stop); k++) {
      await put(JSON.stringify(chunk('m', `${who}:${k} ${'x'.repeat((who * 7 + k * 13) % 90)}`)));
      await new Promise((resolve) => { setTimeout(resolve, 200); });
    }
    await put('[DONE]');
    engine.sent.set(who, events.join(''));
    res.end();
  };
  return engine;
}

// The policies that the loops decide with, by fresh connections until each loop has been met.
async function policies(router) {
  const met = new Map();
  await until('every loop has decided', async () => {
    const answer = await post(router.url + path, chat('m'));
    assert.equal(answer.status, 200);
    const loop = answer.headers['x-perilune-reason'];
    const name = answer.headers['x-perilune-policy'];
    assert.match(loop, /^loop-\d$/);
    assert.equal(met.get(loop) ?? name, name);
    met.set(loop, name);
    return met.size === LOOPS;
  }, { every: 0 });
  return [...new Set(met.values())];
}

test('streams under a storm of good and bad reloads', { timeout: long ? 7200000 : 400000 }, async (t) => {
  const end = { stop: false };
  const engines = [await talker(t, end), await talker(t, end), await talker(t, end)];
  const directory = scratch(t);
  const file = writeFile(directory, 'p.lua', good(0));
  const router = await startRouter(t, {
    engines: Object.fromEntries(engines.map((engine, i) => [`e${i}`, engine.url])),
    policy: file, threads: LOOPS, env: lean,
  });

  const got = [];
  const streams = Array.from({ length: STREAMS }, async (_, who) => {
    const res = await send(router.url + path, { method: 'POST', body: chat('m', { stream: true, who }) });
    assert.equal(res.statusCode, 200);
    got[who] = await res.text();
  });
  await until('all streams run', async () => Object.values(await ledger(router))
    .reduce((sum, engine) => sum + engine.streams, 0) === STREAMS);

  let generation = (await get(`${router.admin}/policy`)).json.generation;
  let name = 'g0';
  let warm;
  for (let n = 1; n <= RELOADS; n++) {
    const [stage, line, text] = n % 2 ? ['', 0, good(n)] : bad[(n / 2) % bad.length];
    writeFile(directory, 'p.lua', text);
    const answer = await post(`${router.admin}/policy/reload`);
    if (stage) {
      assert.equal(answer.status, 422, answer.text);
      const { error } = answer.json;
      assert.equal(error.stage, stage);
      assert.ok(error.message.length > 0 && error.code.length > 0);
      assert.match(error.file, /p\.lua$/);
      assert.equal(error.line, line, answer.text);
    } else {
      assert.equal(answer.status, 200, answer.text);
      name = `g${n}`;
      assert.equal(answer.json.name, name);
      assert.equal(answer.json.generation, generation + 1);
      generation = answer.json.generation;
    }
    if (n % 100 === 0 || n === 1 || n === 2) {
      assert.deepEqual(await policies(router), [name], 'at once, on every loop');
      const told = (await get(`${router.admin}/policy`)).json;
      assert.equal(told.generation, generation);
      assert.equal(told.name, name);
    }
    if (n === Math.floor(RELOADS / 5)) warm = memory(router);
  }
  const cold = memory(router);
  // TSan's own notes grow with what it has seen
  assert.ok(slow || cold.rss < warm.rss * 1.1 + 8000, `${warm.rss} kB became ${cold.rss} kB`);
  assert.ok(slow || cold.mappings < warm.mappings * 1.1 + 40, `${warm.mappings} mappings became ${cold.mappings}`);

  end.stop = true;
  await Promise.all(streams);
  for (let who = 0; who < STREAMS; who++) {
    const sent = engines.map((engine) => engine.sent.get(who)).find((text) => text);
    assert.ok(sent.length > 1000);
    assert.ok(got[who] === sent, `stream ${who} is not what its engine sent`);
  }
  await ledgerIsEmpty(router);
});
