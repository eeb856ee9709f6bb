// The ready-made policies in the real program.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { readdirSync } from 'node:fs';
import { join } from 'node:path';
import { startRouter, root, run, scratch, writeFile } from './lib/proc.mjs';
import { fakeEngine, gate } from './lib/fake.mjs';
import { post, chat } from './lib/http.mjs';

const path = '/v1/chat/completions';
const names = readdirSync(join(root, 'policies')).map((name) => name.replace(/\.lua$/, ''));

for (const name of names) {
  test(`perilune check ${name}: fit to be used, hot hooks compiled`, { timeout: 60000 }, async () => {
    const end = await run(['check', name, '--json']);
    assert.equal(end.code, 0, end.stdout + end.stderr);
    const report = JSON.parse(end.stdout);
    assert.ok(JSON.stringify(report).includes('compiled'));
    const text = await run(['check', name]);
    assert.ok(!/not compiled/.test(text.stdout), text.stdout);
  });

  test(`${name} serves`, async (t) => {
    const engines = {};
    for (const each of ['a', 'b', 'c']) engines[each] = (await fakeEngine(t)).url;
    const router = await startRouter(t, { engines, policy: name });
    for (let i = 0; i < 20; i++) {
      const answer = await post(router.url + path, chat('m', { prompt_cache_key: `k${i}` }));
      assert.equal(answer.status, 200);
      assert.equal(answer.headers['x-perilune-policy'], name);
    }
  });
}

async function three(t, options) {
  const engines = {};
  const all = {};
  for (const name of ['a', 'b', 'c']) {
    all[name] = await fakeEngine(t);
    engines[name] = all[name].url;
  }
  return { all, router: await startRouter(t, { engines, threads: 1, ...options }) };
}

const workers = async (router, n, body = () => chat('m'), headers = () => ({})) => {
  const list = [];
  for (let i = 0; i < n; i++) {
    const answer = await post(router.url + path, body(i), { headers: headers(i) });
    assert.equal(answer.status, 200);
    list.push(answer.headers['x-perilune-worker']);
  }
  return list;
};

test('round_robin takes turns', async (t) => {
  const { router } = await three(t, { policy: 'round_robin' });
  assert.deepEqual(await workers(router, 6), ['a', 'b', 'c', 'a', 'b', 'c']);
});

test('least_loaded avoids the busy', async (t) => {
  const { all, router } = await three(t, { policy: 'least_loaded' });
  const g = gate();
  for (const engine of Object.values(all)) {
    engine.handler = async (entry, res) => { await g.opened; engine.json(res, 200, {}); };
  }
  const answers = [];
  for (let i = 0; i < 6; i++) {
    answers.push(post(router.url + path, chat('m')));
    await all.a.when(() => true, '');
    await new Promise((resolve) => { setImmediate(resolve); });
  }
  for (const engine of Object.values(all)) await engine.request(1);
  g.open();
  await Promise.all(answers);
  for (const engine of Object.values(all)) assert.equal(engine.requests.length, 2);
});

test('consistent_hash keeps a key with its worker, and --set changes which header holds it', async (t) => {
  const { router } = await three(t, { policy: 'consistent_hash', flags: ['--set', 'header=x-user'] });
  const homes = new Map();
  for (let round = 0; round < 3; round++) {
    const list = await workers(router, 20, () => chat('m'), (i) => ({ 'x-user': `user-${i}` }));
    list.forEach((worker, i) => {
      homes.set(i, homes.get(i) ?? worker);
      assert.equal(worker, homes.get(i), `user-${i}`);
    });
  }
  assert.equal(new Set(homes.values()).size, 3, 'keys are spread');
});

test('a parameter that does not exist refuses the start and names those that do', async () => {
  const end = await run(['serve', '--listen', '127.0.0.1:0', '--admin', 'off', '--policy', 'consistent_hash',
    '--set', 'haeder=x']);
  assert.equal(end.code, 1);
  assert.match(end.stderr, /haeder/);
  assert.match(end.stderr, /load_factor/);
});

test('check names the line that stops the compiler', { timeout: 60000 }, async (t) => {
  const file = writeFile(scratch(t), 'slow.lua', `local policy = { api = 1, name = "slow" }
function policy.score(req, w)
  local cost = function() return w.inflight end
  return cost()
end
return policy
`);
  const end = await run(['check', file]);
  assert.equal(end.code, 0, 'slow is not forbidden');
  assert.match(end.stdout, /slow\.lua:3/);
});

test('files beside a policy are required, and a change in them is a new hash', async (t) => {
  const engine = await fakeEngine(t);
  const directory = scratch(t);
  writeFile(directory, 'names.lua', 'return { reason = "one" }');
  const file = writeFile(directory, 'p.lua', `
    local names = require "names"
    return { api = 1, name = "p", route = function() return 0, names.reason end }`);
  const router = await startRouter(t, { engines: { a: engine.url }, policy: file });
  const reason = async () => (await post(router.url + path, chat('m'))).headers['x-perilune-reason'];
  assert.equal(await reason(), 'one');
  const first = await post(`${router.admin}/policy/reload`);
  writeFile(directory, 'names.lua', 'return { reason = "two" }');
  const second = await post(`${router.admin}/policy/reload`);
  assert.notEqual(first.json.sha256, second.json.sha256);
  assert.equal(await reason(), 'two');
});

test('state is carried over a reload', async (t) => {
  const engine = await fakeEngine(t);
  const file = writeFile(scratch(t), 'p.lua', `
    local policy = { api = 1, name = "counts" }
    function policy.init(params, carry) return { n = carry and carry.n or 0 } end
    function policy.route(req, fleet, st)
      st.n = st.n + 1
      return 0, "n" .. st.n
    end
    function policy.save(st) return { n = st.n } end
    return policy`);
  const router = await startRouter(t, { engines: { a: engine.url }, policy: file, threads: 1 });
  const reason = async () => (await post(router.url + path, chat('m'))).headers['x-perilune-reason'];
  assert.equal(await reason(), 'n1');
  assert.equal(await reason(), 'n2');
  assert.equal((await post(`${router.admin}/policy/reload`)).status, 200);
  assert.equal(await reason(), 'n3');
});
