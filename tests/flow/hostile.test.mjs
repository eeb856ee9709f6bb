// tests/hostile against the real program: what must be refused is, with file and line; what
// misbehaves at run time costs no client anything.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { readdirSync, readFileSync, copyFileSync } from 'node:fs';
import { join } from 'node:path';
import { startRouter, root, run, scratch, writeFile, metric, until } from './lib/proc.mjs';
import { fakeEngine } from './lib/fake.mjs';
import { get, post, chat } from './lib/http.mjs';

const path = '/v1/chat/completions';
const folder = join(root, 'tests', 'hostile');
const policies = readdirSync(folder).filter((name) => name.endsWith('.lua')).sort().map((name) => {
  const file = join(folder, name);
  const text = readFileSync(file, 'utf8');
  const [, verdict, at] = /^-- expect: ([a-z]+) ([a-z]+)\n/.exec(text);
  const line = text.split('\n').findIndex((each) => each.includes('-- here')) + 1;
  return { name, file, verdict, at, line };
});

test('there are policies that misbehave', () => assert.ok(policies.length > 40));

for (const policy of policies.filter((each) => each.verdict === 'refused')) {
  test(`refused: ${policy.name}`, { timeout: 60000 }, async () => {
    const place = policy.line ? `${policy.name}:${policy.line}:` : policy.name;
    for (const args of [['check', policy.file], ['serve', '--listen', '127.0.0.1:0', '--admin', 'off', '--policy', policy.file]]) {
      const end = await run(args);
      assert.equal(end.code, 1, `${args[0]}: ${end.stderr}`);
      const said = end.stdout + end.stderr;
      assert.ok(said.includes(place), `${args[0]} names ${place}: ${said}`);
      assert.ok(said.includes(policy.at), `${args[0]} names the stage ${policy.at}: ${said}`);
    }
  });
}

test('a reload with any of them is refused and the old policy stays', { timeout: 120000 }, async (t) => {
  const engine = await fakeEngine(t);
  const directory = scratch(t);
  const file = writeFile(directory, 'p.lua', 'return { api = 1, name = "good", score = function() return 0 end }');
  const router = await startRouter(t, { engines: { a: engine.url }, policy: file });
  for (const policy of policies.filter((each) => each.verdict === 'refused')) {
    copyFileSync(policy.file, file);
    const answer = await post(`${router.admin}/policy/reload`);
    assert.equal(answer.status, 422, `${policy.name}: ${answer.text}`);
    assert.equal(answer.json.error.stage, policy.at, policy.name);
    if (policy.line) assert.equal(answer.json.error.line, policy.line, policy.name);
    assert.equal((await post(router.url + path, chat('m'))).headers['x-perilune-policy'], 'good');
  }
});

test('who starts a policy that a reload would refuse is told', async (t) => {
  const engine = await fakeEngine(t);
  const faulty = writeFile(scratch(t), 'p.lua', 'return { api = 1, score = function(req, w)\n return w.inflght end }');
  const said = [];
  for (const policy of [faulty, 'least_loaded']) {
    const router = await startRouter(t, { engines: { a: engine.url }, policy });
    assert.equal((await post(router.url + path, chat('m'))).status, 200);
    said.push(router.stderr);
  }
  assert.match(said[0], /"policy_faulty","message":"[^"]*p\.lua:2: score: a worker has no field 'inflght'.*stage selftest/);
  assert.doesNotMatch(said[1], /policy_faulty/);
});

// Called for requests of sessions only.
const aroundSessions = ['session', 'retain', 'expire'];
// It runs when an engine-backed session has expired, which these have not: that it is booked is shown in
// tests/unit/policy/test_hostile.c; here, that nobody suffers.
const later = ['expire'];

for (const policy of policies.filter((each) => each.verdict !== 'refused')) {
  test(`${policy.verdict}: ${policy.name}`, { timeout: 60000 }, async (t) => {
    const engine = await fakeEngine(t);
    const router = await startRouter(t, { engines: { a: engine.url }, policy: policy.file, threads: 1 });
    const before = await post(router.url + path, chat('m'));
    assert.equal(before.status, 200);
    const name = policy.verdict === 'clamped' ? 'perilune_policy_clamped_total' : 'perilune_policy_errors_total';
    const counted = () => metric(router, name, `hook="${policy.at}"`);
    assert.equal(await counted(), 0, 'behaves at first');

    const headers = { 'x-misbehave': '1' };
    if (aroundSessions.includes(policy.at)) headers['x-session-id'] = 'misbehave';
    const bad = await post(router.url + path, chat('m'), { headers });
    assert.equal(bad.status, 200, bad.text);
    assert.equal(bad.json.choices.length, 1);
    if (!later.includes(policy.at)) await until('it is counted', async () => await counted() >= 1);

    const after = await post(router.url + path, chat('m'));
    assert.equal(after.status, 200);
    assert.equal((await get(`${router.url}/health`)).status, 200);
    const rss = /VmRSS:\s+(\d+) kB/.exec(readFileSync(`/proc/${router.child.pid}/status`, 'utf8'))[1];
    assert.ok(Number(rss) < 1500000, `${rss} kB`);
  });
}

test('a policy that fails every time is suspended, loudly, and requests go on', async (t) => {
  const engine = await fakeEngine(t);
  const policy = writeFile(scratch(t), 'broken.lua', `
    local policy = { api = 1, name = "broken" }
    function policy.score() error("always") end
    return policy`);
  const router = await startRouter(t, { engines: { a: engine.url }, policy, threads: 1 });
  for (let i = 0; i < 30; i++) assert.equal((await post(router.url + path, chat('m'))).status, 200);
  assert.ok(await metric(router, 'perilune_policy_errors_total', 'hook="score"') < 30, 'not asked any more');
  assert.match(router.stderr, /suspended/);
  assert.match((await post(router.url + path, chat('m'))).headers['x-perilune-policy'], /least_loaded/);
});
