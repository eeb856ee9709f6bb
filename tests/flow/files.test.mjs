// Too few file descriptors: clients are refused, engines are not blamed.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { startRouter, startEngine, engineOf } from './lib/proc.mjs';
import { post, chat } from './lib/http.mjs';

test('a small ulimit -n refuses clients and leaves engines alone', async (t) => {
  const engine = await startEngine(t, { flags: ['--preset', 'instant'] });
  const slow = { kind: 'slow', delay_ms: 300 };
  assert.equal((await post(`${engine.url}/sim/fault`, slow)).status, 200);
  const router = await startRouter(t, { engines: { a: engine.url }, threads: 1, files: 80 });
  const { message } = await router.log('few_files');
  assert.match(message, /^80 open files are allowed: at most 12 client connections instead of 10000/);

  const answers = await Promise.all(Array.from({ length: 60 }, () => post(
    `${router.url}/v1/chat/completions`, chat('sim', { max_tokens: 1 }))));
  const count = (status) => answers.filter((answer) => answer.status === status).length;
  assert.equal(count(200) + count(503), 60, JSON.stringify(answers.map((a) => a.text)));
  assert.ok(count(200) > 0, `${count(200)} were served`);
  assert.ok(count(503) > 0, 'all were served: the test opens too few connections');
  assert.equal(router.logs.find((line) => line.event === 'engine_failed'), undefined);
  const { health, breaker } = await engineOf(router, 'a');
  assert.deepEqual({ health, breaker }, { health: 'up', breaker: 'closed' });
});
