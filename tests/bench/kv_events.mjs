// What KV events cost the proxy: the same router and policy twice, with kv.use = "off" and with four
// engines whose publishers tell of blocks all the time. Both are pinned to core 0 with all their
// threads (the one that reads events, too), load, backend and publishers to core 1; repetitions are
// interleaved and medians are given.
//
// Usage: node tests/bench/kv_events.mjs [--build DIR] [--reps N] [--seconds S] [--batches PER_SECOND]
//
// The load: chats of 1 KB and of 100 KB as in proxy.sh, and completions of 512 token ids (64 prompts, in turn) whose
// first 384 are in the index. A batch has one BlockStored of 16 blocks, and one BlockRemoved of the
// batch 64 before it.
import { spawn, spawnSync } from 'node:child_process';
import { mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { KvPublisher } from '../flow/lib/publisher.mjs';

const { values: o } = parseArgs({ options: {
  build: { type: 'string', default: 'build' }, reps: { type: 'string', default: '7' },
  seconds: { type: 'string', default: '2' }, batches: { type: 'string', default: '100' },
} });
const here = dirname(fileURLToPath(import.meta.url));
const build = join(here, '..', '..', o.build);
const tmp = mkdtempSync(join(tmpdir(), 'perilune-bench-'));
const children = [];
const publishers = [];
const start = (core, program, args) => {
  const child = spawn('taskset', ['-c', String(core), program, ...args], { stdio: ['ignore', 'pipe', 'pipe'] });
  children.push(child);
  return child;
};
const line = (stream, pattern) => new Promise((resolve, reject) => {
  let text = '';
  stream.on('data', (data) => {
    text += data;
    const found = pattern.exec(text);
    if (found) resolve(found);
  });
  stream.on('end', () => reject(new Error(`ended without ${pattern}: ${text}`)));
});
const median = (list) => {
  const s = [...list].sort((a, b) => a - b);
  return (s[s.length >> 1] + s[(s.length - 1) >> 1]) / 2;
};
const cpuNs = (pid) => readdirSync(`/proc/${pid}/task`)
  .reduce((sum, task) => sum + Number(readFileSync(`/proc/${pid}/task/${task}/schedstat`, 'utf8').split(' ')[0]), 0);
const range = (n, from = 0) => Array.from({ length: n }, (_, i) => from + i);

const prompts = range(64).map((seed) => range(512, seed * 1000));
const chat = (bytes) => `local body = '{"model":"bench","messages":[{"role":"user","content":"' .. string.rep("x", ${bytes - 65}) .. '"}]}'
    local one
    function init() one = wrk.format("POST", "/v1/chat/completions", { ["content-type"] = "application/json" }, body) end
    function request() return one end`;
const SCRIPTS = {
  'chat, 1 KB': chat(1024),
  'chat, 100 KB': chat(102400),
  '512 token ids': `local all, at = {}, 0
    function init() for seed = 0, 63 do
      local ids = {}
      for i = 0, 511 do ids[i + 1] = seed * 1000 + i end
      all[seed] = wrk.format("POST", "/v1/completions", { ["content-type"] = "application/json" },
        '{"model":"bench","max_tokens":4,"prompt":[' .. table.concat(ids, ",") .. ']}')
    end end
    function request() at = (at + 1) % 64 return all[at] end`,
};
// wrk hands an answer's status to this; the sum is printed at the end
const TAIL = `
function done(s) io.write(string.format("requests %d errors %d\\n", s.requests,
  s.errors.status + s.errors.connect + s.errors.read + s.errors.write + s.errors.timeout)) end
`;

async function router(name, config) {
  const file = join(tmp, `${name}.lua`);
  writeFileSync(file, config);
  const child = start(0, join(build, 'perilune'), ['serve', file, '--listen', '127.0.0.1:0', '--admin', '127.0.0.1:0',
    '--threads', '1', '--policy', 'prefix_seconds']);
  let log = '';
  child.stderr.on('data', (data) => { log += data; });
  const port = async (event) => {
    for (;;) {
      const found = new RegExp(`"event":"${event}".*?127.0.0.1:(\\d+)`).exec(log);
      if (found) return found[1];
      if (child.exitCode !== null) throw new Error(log);
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  };
  const r = { name, pid: child.pid, port: await port('listening'), admin: await port('admin_listening') };
  for (;;) {
    const answer = await fetch(`http://127.0.0.1:${r.port}/readyz`).catch(() => null);
    if (answer?.status === 200) return r;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

async function wrk(r, script, seconds) {
  const before = [cpuNs(r.pid), process.hrtime.bigint()];
  const child = start(1, 'wrk', ['-t1', '-c32', `-d${seconds}s`, '-s', script, `http://127.0.0.1:${r.port}`]);
  const [, requests, errors] = await line(child.stdout, /requests (\d+) errors (\d+)/);
  const cpu = cpuNs(r.pid) - before[0];
  const wall = Number(process.hrtime.bigint() - before[1]);
  if (Number(errors)) throw new Error(`${r.name}: ${errors} of ${requests} requests failed`);
  return { perSecond: requests / (wall / 1e9), cpuUs: cpu / 1000 / requests, busy: cpu / wall };
}

async function publish() {
  for (let i = 0; i < 4; i++) {
    const p = new KvPublisher({ replay: true });
    await p.start();
    publishers.push(p);
    p.chain = [];
  }
}

// The prompts' beginnings, a quarter each; then batches at the rate that is wanted, until the end.
let sent = 0;
async function keepPublishing() {
  for (const [seed, ids] of prompts.entries()) await publishers[seed % 4].store(ids.slice(0, 384));
  const from = performance.now();
  let due = 0;
  return setInterval(() => {
    const until = Math.floor(((performance.now() - from) / 1000) * Number(o.batches));
    for (; due < until; due++) {
      const p = publishers[due % 4];
      p.store(range(256, 1000000 + due * 256)).then((hashes) => {
        p.chain.push(hashes);
        if (p.chain.length > 64) p.remove(p.chain.shift());
      });
      sent++;
    }
  }, 5);
}

async function main() {
  spawnSync('taskset', ['-a', '-cp', '1', String(process.pid)]); // this process, which publishes
  const backend = start(1, join(build, 'bench_backend'), ['4']);
  const [, ports] = await line(backend.stdout, /^([\d ]+)\n/);
  await publish();
  const engines = (more) => ports.trim().split(' ')
    .map((port, i) => `{ name = "e${i}", url = "http://127.0.0.1:${port}"${more(i)} }`).join(', ');
  const off = await router('off', `return { kv = { use = "off" }, log = { json = true }, engines = { ${engines(() => '')} } }`);
  const on = await router('events', `return { log = { json = true }, engines = { ${engines((i) => `, kv_events = { mode = "connect",
    endpoint = "${publishers[i].endpoint}", replay = "${publishers[i].replayEndpoint}" }`)} } }`);
  for (const p of publishers) await p.subscribed();
  const timer = await keepPublishing();
  const known = async () => (await (await fetch(`http://127.0.0.1:${on.admin}/index`)).json());
  while ((await known()).workers.some((w) => w.trust !== 'live')) await new Promise((r) => setTimeout(r, 100));

  console.log('| load | kv | CPU us / request | requests/s | busy % |\n|---|---|---|---|---|');
  const ratios = [];
  for (const [name, text] of Object.entries(SCRIPTS)) {
    const script = join(tmp, 'load.lua');
    writeFileSync(script, text + TAIL);
    const seen = { off: [], events: [] };
    for (const r of [off, on]) await wrk(r, script, 1); // warm
    for (let i = 0; i < Number(o.reps); i++) {
      for (const r of i % 2 ? [on, off] : [off, on]) seen[r.name].push(await wrk(r, script, Number(o.seconds)));
    }
    const mid = (kind, what) => median(seen[kind].map((x) => x[what]));
    for (const kind of ['off', 'events']) {
      console.log(`| ${name} | ${kind} | ${mid(kind, 'cpuUs').toFixed(1)} | ${mid(kind, 'perSecond').toFixed(0)} `
        + `| ${(mid(kind, 'busy') * 100).toFixed(0)} |`);
    }
    const pairs = seen.off.map((x, i) => seen.events[i].perSecond / x.perSecond);
    ratios.push(`${name}: throughput with events / without, medians: ${(mid('events', 'perSecond') / mid('off', 'perSecond')).toFixed(3)}, `
      + `of pairs ${Math.min(...pairs).toFixed(3)} to ${Math.max(...pairs).toFixed(3)}`);
  }
  clearInterval(timer);
  console.log(`\n${ratios.join('\n')}`);
  const page = await known();
  console.log(`${sent} batches of 16 blocks were published while it ran; the index had ${page.index.blocks} blocks, `
    + `${page.workers.map((w) => `${w.name} ${w.trust}, ${w.events.gaps} gaps`).join('; ')}; `
    + `${page.accuracy.requests} requests compared`);
}

try {
  await main();
} finally {
  for (const child of children) child.kill();
  for (const p of publishers) p.close();
  rmSync(tmp, { recursive: true, force: true });
}
