// The router's own count of what its engines do, and of what it takes of the system.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { get } from './http.mjs';
import { until } from './proc.mjs';

const counts = ['inflight', 'streams', 'queued_prefill_tokens', 'decode_blocks'];

// {engine: {inflight, streams, queued_prefill_tokens, decode_blocks}}, the workers of an engine together.
export async function ledger(router) {
  const { engines } = (await get(`${router.admin}/engines`)).json;
  return Object.fromEntries(engines.map(({ name, workers }) => [name, Object.fromEntries(
    counts.map((key) => [key, workers.reduce((sum, worker) => sum + worker[key], 0)]),
  )]));
}

// Waits until the ledger says this of the engine.
export async function ledgerIs(router, name, expected) {
  let last;
  await until(`${name}: ${JSON.stringify(expected)}`, async () => {
    last = (await ledger(router))[name];
    return Object.entries(expected).every(([key, value]) => last?.[key] === value);
  }).catch((error) => assert.fail(`${error.message}; it is ${JSON.stringify(last)}`));
}

// Waits until nothing is under way at any engine.
export async function ledgerIsEmpty(router) {
  let last;
  await until('the ledger back at zero', async () => {
    last = await ledger(router);
    return Object.values(last).every((engine) => counts.every((key) => engine[key] === 0));
  }).catch((error) => assert.fail(`${error.message}; it is ${JSON.stringify(last)}`));
}

// Resident memory in kB and the number of mappings of a process.
export function memory({ child }) {
  const status = readFileSync(`/proc/${child.pid}/status`, 'utf8');
  return {
    rss: Number(/VmRSS:\s+(\d+) kB/.exec(status)[1]),
    mappings: readFileSync(`/proc/${child.pid}/maps`, 'utf8').split('\n').length,
  };
}

// The sanitizer keeps freed memory for a while to find who still uses it; where a test looks at the
// process's size, it keeps little.
export const lean = {
  ASAN_OPTIONS: [process.env.ASAN_OPTIONS, 'quarantine_size_mb=8:thread_local_quarantine_size_kb=64']
    .filter(Boolean).join(':'),
};
