// SIGHUP: the file is read again; what flags said stays, what the file says anew is taken.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { writeFileSync } from 'node:fs';
import { startRouter, until, usable, enginesOf, lua, writeFile } from './lib/proc.mjs';
import { fakeEngine } from './lib/fake.mjs';
import { get, post, chat } from './lib/http.mjs';

const path = '/v1/chat/completions';
const health = { interval_seconds: 0.1, timeout_seconds: 1, detect_interval_seconds: 0.1 };

async function hangUp(router, config, event = 'policy_reloaded') {
  const from = router.logs.length;
  writeFileSync(router.config, `return ${lua({ health, ...config })}\n`);
  router.kill('SIGHUP');
  return router.log(event, { from });
}
const running = async (router) => (await get(`${router.admin}/policy`)).json;

test('a policy that the file names anew is taken, with its params', async (t) => {
  const a = await fakeEngine(t);
  const router = await startRouter(t, { engines: { a: a.url } });
  assert.equal((await running(router)).name, 'prefix_seconds');
  await hangUp(router, { policy: 'round_robin' });
  assert.equal((await running(router)).name, 'round_robin');
  await hangUp(router, { policy: { name: 'consistent_hash', params: { header: 'x-user' } } });
  let policy = await running(router);
  assert.equal(policy.name, 'consistent_hash');
  assert.equal(policy.params.header, 'x-user');
  await hangUp(router, { policy: { name: 'consistent_hash', params: { header: 'x-other' } } });
  policy = await running(router);
  assert.equal(policy.params.header, 'x-other');
  assert.equal((await post(router.url + path, chat('m'))).status, 200);
});

test('a policy that the file names anew and that is refused leaves the old one, and is tried again', async (t) => {
  const router = await startRouter(t, {});
  const wrong = { policy: { name: 'round_robin', params: { nonsense: 1 } } };
  await hangUp(router, wrong, 'policy_refused');
  assert.equal((await running(router)).name, 'prefix_seconds');
  await hangUp(router, wrong, 'policy_refused');
  await hangUp(router, { policy: 'round_robin' });
  assert.equal((await running(router)).name, 'round_robin');
});

test('the log says in which line a policy was refused', async (t) => {
  const router = await startRouter(t, {});
  const file = writeFile(router.directory, 'wrong.lua', 'local p = { api = 1 }\nreturn p +\n');
  const { message } = await hangUp(router, { policy: { file } }, 'policy_refused');
  assert.ok(message.includes(`stage parse: ${file}:3: `), message);
});

test('--policy and --set win over the file on SIGHUP, too', async (t) => {
  const given = await startRouter(t, { policy: 'random' });
  await hangUp(given, { policy: 'round_robin' });
  assert.equal((await running(given)).name, 'random');

  const set = await startRouter(t, {
    config: { policy: 'consistent_hash' }, flags: ['--set', 'header=x-flag'],
  });
  await hangUp(set, { policy: { name: 'consistent_hash', params: { header: 'x-file' } } });
  assert.equal((await running(set)).params.header, 'x-flag');
});

test('a policy loaded through the admin API stays while the file says what it said', async (t) => {
  const router = await startRouter(t, { config: { policy: 'random' } });
  assert.equal((await post(`${router.admin}/policy/reload`, { policy: 'round_robin' })).status, 200);
  await hangUp(router, { policy: 'random' });
  assert.equal((await running(router)).name, 'round_robin');
});

test('engines given by flags stay; one whose models the file changes is made anew', async (t) => {
  const a = await fakeEngine(t);
  const b = await fakeEngine(t);
  const router = await startRouter(t, {
    engines: { a: a.url }, config: { engines: [{ name: 'b', url: b.url, models: ['x'] }] },
    ready: false,
  });
  await usable(router, 2);
  await hangUp(router, { engines: [{ name: 'b', url: b.url, models: ['y'] }] });
  await until('b serves y', async () => {
    const engines = await enginesOf(router);
    assert.ok(engines.find((e) => e.name === 'a'));
    return engines.find((e) => e.name === 'b')?.models.join() === 'y';
  });
  await usable(router, 2);
  assert.equal((await post(router.url + path, chat('y'))).status, 200);
  assert.equal((await post(router.url + path, chat('x'))).status, 404);
  await hangUp(router, {});
  assert.deepEqual((await enginesOf(router)).map((e) => e.name), ['a']);
});
