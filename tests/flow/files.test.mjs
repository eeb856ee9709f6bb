// Want of file descriptors is the router's trouble: no engine is blamed for it.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { startRouter, engineOf, until } from './lib/proc.mjs';
import { fakeEngine } from './lib/fake.mjs';
import { get, chat, Raw, rawPost } from './lib/http.mjs';

test('a router without files to open says so and leaves the engine alone', async (t) => {
  const engine = await fakeEngine(t);
  const health = { interval_seconds: 3600, timeout_seconds: 1 }; // no check takes a file meanwhile
  const router = await startRouter(t, { engines: { a: engine.url }, threads: 1, files: 64, config: { health } });
  const open = async () => (await get(`${router.admin}/status`)).json.connections;
  const asking = await Raw.connect(router.url);
  const held = [asking];
  t.after(() => held.forEach((raw) => raw.destroy()));
  await until('it is accepted', async () => await open() === 1);

  // clients until there is no file left; the next ones are closed unheard
  for (let i = 0; i < 80; i++) held.push(await Raw.connect(router.url));
  await asking.send(rawPost('/v1/chat/completions', chat('m')));
  const answer = await asking.until('router_overloaded');
  assert.match(answer, /^HTTP\/1\.1 503 /);
  assert.match(answer, /\r\nretry-after: 1\r\n/i);
  assert.match((await router.log('no_connection')).message, /too many open files/);
  assert.equal(router.logs.find((line) => line.event === 'engine_failed'), undefined);

  held.splice(0).forEach((raw) => raw.destroy());
  await until('there is room', async () => {
    try { return await open() === 0; } catch { return false; }
  });
  const { health: up, breaker, counters } = await engineOf(router, 'a');
  assert.deepEqual([up, breaker, counters.failed, counters.breaker_opened], ['up', 'closed', 0, 0]);
});
