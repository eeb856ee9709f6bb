// The KV-pressure example as its reader runs it: with sessions the cache is freed again and again,
// without it fills up.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { once } from 'node:events';
import { root, binary, scratch } from './lib/proc.mjs';

const read = (file) => readFileSync(file, 'utf8').trim().split('\n').slice(1).map((line) => {
  const [seconds, usage, held, event] = line.split(',');
  return { seconds: Number(seconds), usage: Number(usage), held: Number(held), event };
});

test('a sawtooth with sessions, a staircase without', async (t) => {
  const out = scratch(t);
  const child = spawn('sh', [join(root, 'examples', 'kv_pressure', 'run.sh'), '--speed', '60', '--out', out],
    { env: { ...process.env, PERILUNE: binary }, stdio: ['ignore', 'pipe', 'pipe'] });
  let text = '';
  child.stdout.on('data', (data) => { text += data; });
  child.stderr.on('data', (data) => { text += data; });
  const [code] = await once(child, 'close');
  assert.equal(code, 0, text);
  assert.match(text, /sessions: share of the KV cache[\s\S]*plain: share of the KV cache/);

  const sessions = read(join(out, 'sessions.csv'));
  const plain = read(join(out, 'plain.csv'));
  const opened = sessions.flatMap((s, i) => (s.event.startsWith('open') ? [i] : []));
  assert.equal(opened.length, 5);
  const peaks = opened.map((from, k) => Math.max(...sessions.slice(from, opened[k + 1]).map((s) => s.usage)));
  // the fractions of the cache that the five conversations take: .42 .31 .28 .41 .38
  peaks.forEach((peak, k) => assert.ok(Math.abs(peak - [0.42, 0.31, 0.28, 0.41, 0.38][k]) < 0.06, `peaks ${peaks}`));
  assert.ok(sessions.at(-1).usage < 0.2, `in the end ${sessions.at(-1).usage}`);
  assert.equal(sessions.at(-1).held, 0);
  assert.ok(plain.at(-1).usage > 0.95, `in the end ${plain.at(-1).usage}`);
});
