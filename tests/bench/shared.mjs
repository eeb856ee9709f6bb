// Two routers and a round-robin client in front: which share of the turns lands on their session's
// worker, with memory stores (each router its own affinity), with a Redis between them, and when the
// Redis dies in between. And what a turn waits for the store.
//
//   PERILUNE=build/perilune node tests/bench/shared.mjs [sessions] [turns]
//
// Sessions are router-only (a header), opened by least_loaded, on four simulated engines; a third
// into each phase an engine is added, and two thirds into it another is drained, on both routers.
// A turn is at home when it goes where the session's last turn went. When that worker was drained
// the session has to move: that turn is "moved", it counts as neither, and the next ones are at
// home where it went. Everything is started here and ended here.
import { once } from 'node:events';
import http from 'node:http';
import net from 'node:net';

process.env.PERILUNE ??= 'build/perilune';
const { startEngine, startRouter, until, usable } = await import('../flow/lib/proc.mjs');
const { startRedis } = await import('../flow/lib/redis.mjs');
const { get, post } = await import('../flow/lib/http.mjs');

const SESSIONS = Number(process.argv[2] ?? 400);
const TURNS = Number(process.argv[3] ?? 12);
const AT_ONCE = 16;

// What the tests' helpers start ends when its scope does.
async function scope(work) {
  const ends = [];
  try {
    return await work({ after: (end) => ends.push(end) });
  } finally {
    for (const end of ends.reverse()) await end();
  }
}

const agent = new http.Agent({ keepAlive: true, maxSockets: 64 });

function request(router, body, headers = {}) {
  return new Promise((resolve, reject) => {
    const data = JSON.stringify({ model: 'sim', ...body });
    const req = http.request(`${router.url}/v1/chat/completions`, {
      method: 'POST', agent,
      headers: { 'content-type': 'application/json', 'content-length': Buffer.byteLength(data), ...headers },
    }, (res) => {
      let text = '';
      res.on('data', (data) => { text += data; });
      res.on('end', () => (res.statusCode === 200 ? resolve(res.headers) : reject(new Error(`${res.statusCode} ${text}`))));
    });
    req.on('error', reject);
    req.end(data);
  });
}

// Deterministic: the same order of turns in every run.
function random(seed) {
  let s = seed;
  return () => {
    s = (s * 1103515245 + 12345) % 2147483648;
    return s / 2147483648;
  };
}

const speed = ['--speed', '20', '--output-tokens', '32'];
const config = (redis) => (redis
  ? { sessions: { store: 'redis', redis: { url: redis.url, timeout_seconds: 0.25 } } } : {});

async function setUp(t, redis) {
  const engines = {};
  for (let i = 0; i < 5; i++) engines[`e${i}`] = (await startEngine(t, { flags: speed })).url;
  const { e4: spare, ...first } = engines;
  const routers = [];
  for (let i = 0; i < 2; i++) routers.push(await startRouter(t, { engines: first, policy: 'least_loaded', config: config(redis) }));
  return { routers, spare, drained: new Set(), sessions: [], turn: 0, failed: 0 };
}

const open = (fleet, prefix, n) => Array.from({ length: n }, (_, i) => {
  const session = { id: `${prefix}-${i}`, prefix, turns: 0, routers: new Set() };
  fleet.sessions.push(session);
  return session;
});

async function turn(fleet, session, account) {
  const which = fleet.turn++ % 2; // round robin
  const messages = [{ role: 'user', content: `${session.id} ${'and then '.repeat(8 * (1 + session.turns))}` }];
  const gone = fleet.drained.has(session.worker); // as it is when the turn begins
  let headers;
  try {
    headers = await request(fleet.routers[which], { messages }, { 'x-session-id': session.id });
  } catch {
    fleet.failed++;
    return;
  }
  const worker = headers['x-perilune-worker'];
  session.turns++;
  if (session.worker !== undefined) {
    const kind = session.worker === worker ? 'home' : gone || fleet.drained.has(session.worker) ? 'moved' : 'away';
    account[kind]++;
    if (kind === 'away' && [worker, session.worker].includes('e4')) account.added++;
  }
  session.worker = worker;
  session.routers.add(which);
}

// All turns of these sessions in a random order, AT_ONCE at a time, never two of one session;
// events: [share of the turns done, what to do then].
async function play(fleet, sessions, turns, events, seed) {
  const account = new Map(sessions.map((s) => [s.prefix, { home: 0, moved: 0, away: 0, added: 0 }]));
  const left = sessions.map((session) => ({ session, turns }));
  const next = random(seed);
  const total = sessions.length * turns;
  let done = 0;
  const due = [...events];
  const worker = async () => {
    while (left.length) {
      while (due.length && done >= due[0][0] * total) await due.shift()[1]();
      if (!left.length) return;
      const i = Math.floor(next() * left.length);
      const [entry] = left.splice(i, 1);
      await turn(fleet, entry.session, account.get(entry.session.prefix));
      done++;
      if (--entry.turns > 0) left.push(entry);
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
  return account;
}

const addOne = (fleet) => async () => {
  for (const router of fleet.routers) {
    const { status, text } = await post(`${router.admin}/engines`, { name: 'e4', url: fleet.spare });
    if (status >= 300) throw new Error(text);
  }
  for (const router of fleet.routers) await usable(router, 5);
};

const drainOne = (fleet, name) => async () => {
  fleet.drained.add(name);
  for (const router of fleet.routers) await post(`${router.admin}/engines/${name}/drain`);
};

function row(what, { home, moved, away, added }) {
  const share = home / (home + away);
  console.log(`| ${what} | ${home + away} | ${moved} | ${away} | ${added} | ${share.toFixed(4)} |`);
  return share;
}

const heading = () => console.log('| sessions | turns after the first | moved, drained | away | of these to or from the added engine | share at home |\n|---|---|---|---|---|---|');

async function landing() {
  heading();
  const shares = {};
  await scope(async (t) => {
    const fleet = await setUp(t);
    const account = await play(fleet, open(fleet, 'm', SESSIONS), TURNS, [[1 / 3, addOne(fleet)], [2 / 3, drainOne(fleet, 'e1')]], 1);
    shares.memory = row('memory stores: each router its own', account.get('m'));
    if (fleet.failed) console.log(`\n${fleet.failed} requests failed\n`);
  });
  await scope(async (t) => {
    const redis = await startRedis(t);
    const fleet = await setUp(t, redis);
    const account = await play(fleet, open(fleet, 'r', SESSIONS), TURNS, [[1 / 3, addOne(fleet)], [2 / 3, drainOne(fleet, 'e1')]], 1);
    shares.up = row('Redis, up', account.get('r'));
    if (fleet.failed) console.log(`\n${fleet.failed} requests failed\n`);
  });
  await scope(async (t) => {
    const redis = await startRedis(t);
    const fleet = await setUp(t, redis);
    const both = open(fleet, 'both', SESSIONS / 2);
    const one = open(fleet, 'one', SESSIONS / 2);
    await play(fleet, both, TURNS / 2, [], 2);
    for (const session of both) while (session.routers.size < 2) await turn(fleet, session, { home: 0, moved: 0, away: 0 });
    await play(fleet, one, 1, [], 3);
    await redis.kill();
    await Promise.all(fleet.routers.map((router) => router.log('store_down')));
    const during = open(fleet, 'during', SESSIONS / 2);
    const account = await play(fleet, [...both, ...one, ...during], TURNS, [[1 / 3, addOne(fleet)], [2 / 3, drainOne(fleet, 'e1')]], 4);
    row('Redis dead; opened before, both routers had served it', account.get('both'));
    row('Redis dead; opened before, one router had served it', account.get('one'));
    shares.during = row('Redis dead; opened meanwhile', account.get('during'));
    await redis.start();
    await Promise.all(fleet.routers.map((router) => router.log('store_up')));
    for (const router of fleet.routers) {
      await until('up', async () => / 1$/m.test((await get(`${router.admin}/metrics`)).text.match(/^perilune_session_store_up .*/m)[0]));
    }
    const after = await play(fleet, [...both, ...one, ...during], TURNS, [], 5);
    row('Redis back, empty; those that both had served', after.get('both'));
    row('Redis back, empty; those that one had served', after.get('one'));
    row('Redis back, empty; those opened meanwhile', after.get('during'));
    if (fleet.failed) console.log(`\n${fleet.failed} requests failed\n`);
  });
  return shares;
}

// --- latency ---

const quantile = (list, q) => list[Math.min(list.length - 1, Math.floor(q * list.length))];

async function latency(n) {
  await scope(async (t) => {
    const redis = await startRedis(t);
    const engine = await startEngine(t, { flags: ['--speed', '10000', '--output-tokens', '1', '--enable-streaming-session'] });
    const routers = {};
    for (const [name, sessions] of [['memory', {}],
      ['Redis', { store: 'redis', redis: { url: redis.url } }],
      ['Redis, asked at every turn', { store: 'redis', redis: { url: redis.url, cache_seconds: 0, prefix: 'b:' } }]]) {
      routers[name] = await startRouter(t, { engines: { e: engine.url }, threads: 1, config: { sessions } });
      await until('capabilities', async () => (await get(`${routers[name].admin}/engines`)).json.engines[0].capabilities.includes('streaming_sessions'));
    }
    const messages = [{ role: 'user', content: 'What is a moon, and why is it there?' }];
    const control = (id, action) => ({ nvext: { session_control: { session_id: id, timeout: 86000, history: 'delta', ...(action && { action }) } } });
    const cases = [];
    const socket = net.connect(redis.path);
    t.after(() => socket.destroy());
    await once(socket, 'connect');
    cases.push({ store: 'Redis', what: 'PING of this client', run: () => {
      socket.write('PING\r\n');
      return once(socket, 'data');
    } });
    for (const [name, router] of Object.entries(routers)) {
      if (name === 'memory') cases.push({ store: '', what: 'plain request', run: () => request(router, { messages }) });
      cases.push({ store: name, what: 'router-only session', run: () => request(router, { messages }, { 'x-session-id': name }) });
      if (name === 'Redis') continue; // engine-backed turns are never answered from memory
      const id = `backed ${name}`;
      let i = 0;
      cases.push({ store: name === 'memory' ? name : 'Redis', what: 'engine-backed session', prepare: async () => {
        if (i++ % 200 === 0) await request(router, { messages, ...control(`${id} ${Math.floor(i / 200)}`, 'open') });
      }, run: () => request(router, { messages, ...control(`${id} ${Math.floor((i - 1) / 200)}`) }) });
    }
    for (const c of cases) c.us = [];
    const next = random(7);
    for (let i = -100; i < n; i++) { // interleaved and in any order, so that the machine is the same for all
      for (const c of cases.map((one) => [next(), one]).sort((x, y) => x[0] - y[0]).map(([, one]) => one)) {
        await c.prepare?.();
        const from = process.hrtime.bigint();
        await c.run();
        if (i >= 0) c.us.push(Number(process.hrtime.bigint() - from) / 1e3);
      }
    }
    for (const c of cases) c.us.sort((x, y) => x - y);
    console.log('| turn | store | p50 us | p90 us | p99 us | p50 over memory | p99 over memory |\n|---|---|---|---|---|---|---|');
    for (const c of cases) {
      const [p50, p90, p99] = [0.5, 0.9, 0.99].map((q) => quantile(c.us, q));
      const base = cases.find((other) => other.what === c.what && other.store === 'memory')?.us;
      const over = (value, q) => (base && base !== c.us ? (value - quantile(base, q)).toFixed(0) : '');
      console.log(`| ${c.what} | ${c.store} | ${p50.toFixed(0)} | ${p90.toFixed(0)} | ${p99.toFixed(0)} | ${over(p50, 0.5)} | ${over(p99, 0.99)} |`);
    }
  });
}

const shares = await landing();
console.log('');
await latency(5000);
agent.destroy();
const short = [shares.up < 0.99 && 'up', shares.during < 0.95 && 'during'].filter(Boolean);
if (short.length) {
  console.error(`below the bar: ${short.join(', ')}`);
  process.exitCode = 1;
}
