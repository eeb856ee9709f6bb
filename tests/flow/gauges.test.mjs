// The engines' own gauges: what operators and policies get to see of them, and how old it is.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import {
  startRouter, startEngine, until, usable, engineOf, metric, scratch, writeFile, run,
} from './lib/proc.mjs';
import { fakeEngine } from './lib/fake.mjs';
import { post, chat } from './lib/http.mjs';

const path = '/v1/chat/completions';
const gauges = { interval_seconds: 0.05, timeout_seconds: 10 };

const worker = async (router, name, i = 0) => (await engineOf(router, name)).workers[i];

// Waits until the worker's gauges are what is expected.
async function gaugesAre(router, name, expected, i = 0) {
  let last;
  await until(`${name}: ${JSON.stringify(expected)}`, async () => {
    last = await worker(router, name, i);
    return Object.entries(expected).every(([key, value]) => last[key] === value);
  }).catch((error) => assert.fail(`${error.message}; it is ${JSON.stringify(last)}`));
}

const page = (running, waiting, usage, rank = 0) => [
  `vllm:num_requests_running{engine="${rank}",model_name="m"} ${running}`,
  `vllm:num_requests_waiting{engine="${rank}",model_name="m"} ${waiting}`,
  `vllm:num_requests_waiting_by_reason{engine="${rank}",reason="capacity"} 77`,
  `vllm:kv_cache_usage_perc{engine="${rank}",model_name="m"} ${usage}`,
  `vllm:cache_config_info{block_size="32",engine="${rank}",num_gpu_blocks="100"} 1`,
  '',
].join('\n');

test('simulated engines of both kinds tell their load and their sizes', { timeout: 60000 }, async (t) => {
  const common = ['--pool-tokens', '64000', '--page-tokens', '32', '--model', 'm'];
  const a = await startEngine(t, { flags: ['--kind', 'sglang', ...common] });
  const b = await startEngine(t, { flags: ['--kind', 'vllm', ...common] });
  const router = await startRouter(t, { engines: { a: a.url, b: b.url }, config: { gauges } });
  for (const name of ['a', 'b']) {
    await gaugesAre(router, name, {
      running_requests: 0, waiting_requests: 0, kv_usage: 0, block_tokens: 32, kv_tokens: 64000,
    });
    const { workers: [w], counters } = await engineOf(router, name);
    assert.ok(w.gauges_age_seconds >= 0 && w.gauges_age_seconds < 60);
    assert.ok(counters.gauge_polls > 0);
    assert.equal(counters.gauge_failures, 0);
    assert.equal(await metric(router, 'perilune_worker_kv_tokens', `worker="${name}"`), 64000);
    assert.equal(await metric(router, 'perilune_worker_running_requests', `worker="${name}"`), 0);
    assert.ok(await metric(router, 'perilune_worker_gauges_age_seconds', `worker="${name}"`) < 60);
  }
});

test('policies see what the engines say, rank by rank, and its age', { timeout: 60000 }, async (t) => {
  const engine = await fakeEngine(t);
  engine.metrics = page(3, 9, 0.5, 0) + page(4, 1, 0.25, 1);
  const policy = writeFile(scratch(t), 'see.lua', `
    return {
      api = 1, name = "see",
      score = function(req, w, st) return w.waiting_requests end, -- the engine's own queue
      route = function(req, fleet, st)
        for i = 0, fleet.n - 1 do
          local w = fleet[i]
          if w.gauges_age_seconds > 60 or w.kv_usage < 0 or w.block_tokens ~= 32 then
            return fleet[0].index, "unknown"
          end
        end
      end,
    }`);
  const router = await startRouter(t, {
    policy,
    config: { gauges, engines: [{ name: 'e', url: engine.url, kind: 'vllm', dp_size: 2 }] },
  });
  await usable(router, 1);
  await gaugesAre(router, 'e', { running_requests: 3, waiting_requests: 9, kv_usage: 0.5 }, 0);
  await gaugesAre(router, 'e', { running_requests: 4, waiting_requests: 1, kv_usage: 0.25 }, 1);
  const answer = await post(router.url + path, chat('m'));
  assert.equal(answer.headers['x-perilune-worker'], 'e/1');
  assert.notEqual(answer.headers['x-perilune-reason'], 'unknown');

  engine.metrics = page(3, 0, 0.5, 0) + page(4, 1, 0.25, 1);
  await gaugesAre(router, 'e', { waiting_requests: 0 }, 0);
  assert.equal((await post(router.url + path, chat('m'))).headers['x-perilune-worker'], 'e/0');
});

test('what an engine no longer tells grows old; what it never told is null', { timeout: 60000 }, async (t) => {
  const [told, mute] = [await fakeEngine(t), await fakeEngine(t)];
  told.metrics = page(5, 6, 0.75);
  const router = await startRouter(t, {
    config: {
      gauges,
      engines: [{ name: 'told', url: told.url, kind: 'vllm' }, { name: 'mute', url: mute.url, kind: 'vllm' }],
    },
  });
  await usable(router, 2);
  await gaugesAre(router, 'told', { running_requests: 5 });
  told.metrics = 'process_cpu_seconds_total 1\n';
  await until('failures', async () => (await engineOf(router, 'told')).counters.gauge_failures > 1);
  const before = await worker(router, 'told');
  await until('more of them', async () => (await worker(router, 'told')).gauges_age_seconds
    > before.gauges_age_seconds + 0.2);
  await gaugesAre(router, 'told', { running_requests: 5, waiting_requests: 6, kv_usage: 0.75 });

  await until('a failure', async () => (await engineOf(router, 'mute')).counters.gauge_failures === 1);
  await gaugesAre(router, 'mute', {
    running_requests: null, waiting_requests: null, kv_usage: null, gauges_age_seconds: null,
    block_tokens: null, kv_tokens: null,
  });
  for (const name of ['running_requests', 'waiting_requests', 'kv_usage', 'gauges_age_seconds', 'kv_tokens']) {
    assert.equal(await metric(router, `perilune_worker_${name}`, 'worker="mute"'), undefined, name);
  }
  assert.equal((await post(router.url + path, chat('m'))).status, 200);
});

test('gauges can be turned off, but not asked for too often', { timeout: 60000 }, async (t) => {
  const engine = await fakeEngine(t);
  engine.metrics = page(5, 6, 0.75);
  const router = await startRouter(t, {
    config: { gauges: { interval_seconds: 0 }, engines: [{ name: 'e', url: engine.url, kind: 'vllm' }] },
  });
  await usable(router, 1);
  const checks = async () => (await engineOf(router, 'e')).counters.health_checks;
  const before = await checks();
  await until('further health checks', async () => await checks() > before + 3);
  assert.equal((await engineOf(router, 'e')).counters.gauge_polls, 0);
  await gaugesAre(router, 'e', { running_requests: null, gauges_age_seconds: null });

  const file = writeFile(scratch(t), 'perilune.lua', 'return { gauges = { interval_seconds = 0.01 } }\n');
  const { code, stderr } = await run(['serve', file]);
  assert.equal(code, 1);
  assert.match(stderr, /gauges\.interval_seconds: expected 0 \(off\) or at least 0\.05/);
});
