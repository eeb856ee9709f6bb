// Starts `perilune serve` and `perilune engine` on free ports, reads their JSON log, and stops them
// when the test ends. A program that exits badly, or that a sanitizer complains about, fails the
// test it was started in.
import { spawn } from 'node:child_process';
import { mkdtempSync, writeFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import assert from 'node:assert/strict';
import { cleanup } from './cleanup.mjs';
import { get } from './http.mjs';

export const root = join(dirname(fileURLToPath(import.meta.url)), '..', '..', '..');
export const binary = process.env.PERILUNE ?? join(root, 'build-asan', 'perilune');
export const long = process.env.PL_LONG === '1';

// Reports are only what is wrong with this program.
const tsan = [process.env.TSAN_OPTIONS, `suppressions="${join(root, 'tests', 'tsan.supp')}"`]
  .filter(Boolean).join(':');

const complaints = /ERROR: (Address|Leak|Thread)Sanitizer|WARNING: ThreadSanitizer|runtime error:/;

// Waits until `probe` gives something true; asks again after every turn of the event loop and a
// little time. Only for what the tested program does not announce.
export async function until(what, probe, { timeout = 20000, every = 10 } = {}) {
  const end = Date.now() + timeout;
  for (;;) {
    const value = await probe();
    if (value) return value;
    if (Date.now() > end) assert.fail(`waited ${timeout} ms in vain: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, every));
  }
}

// A scratch directory that the test removes.
export function scratch(t) {
  const directory = mkdtempSync(join(tmpdir(), 'perilune-test-'));
  cleanup(t, () => rmSync(directory, { recursive: true, force: true }));
  return directory;
}

export function writeFile(directory, name, text) {
  const path = join(directory, name);
  writeFileSync(path, text);
  return path;
}

export class Program {
  // files: how many it may have open (ulimit -n); default: as many as this process
  constructor(args, { env = {}, files } = {}) {
    this.args = args;
    this.stderr = '';
    this.stdout = '';
    this.logs = [];
    this.waiting = new Set();
    const limited = ['-c', `ulimit -n ${files} && exec "$0" "$@"`, binary, ...args];
    this.child = spawn(files ? 'sh' : binary, files ? limited : args, {
      env: { ...process.env, TSAN_OPTIONS: tsan, ...env },
      stdio: ['ignore', 'pipe', 'pipe'],
    });
    let rest = '';
    this.child.stdout.on('data', (data) => { this.stdout += data; });
    this.child.stderr.on('data', (data) => {
      this.stderr += data;
      const lines = (rest + data).split('\n');
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith('{')) continue;
        try {
          this.logs.push(JSON.parse(line));
        } catch {
          this.logs.push({ event: 'unparsable', message: line });
        }
      }
      for (const look of this.waiting) look();
    });
    this.exited = new Promise((resolve) => {
      this.child.on('error', (error) => resolve({ error }));
      this.child.on('close', (code, signal) => {
        this.gone = { code, signal };
        for (const look of this.waiting) look();
        resolve(this.gone);
      });
    });
  }

  // The first log line (from the `from`-th on) of that event; rejects when the program ends first.
  log(event, { from = 0, timeout = 30000 } = {}) {
    return new Promise((resolve, reject) => {
      const done = (settle, value) => {
        clearTimeout(timer);
        this.waiting.delete(look);
        settle(value);
      };
      const look = () => {
        const entry = this.logs.slice(from).find((line) => line.event === event);
        if (entry) done(resolve, entry);
        else if (this.gone) done(reject, new Error(`${this.args.join(' ')} ended:\n${this.stderr}`));
      };
      const timer = setTimeout(
        () => done(reject, new Error(`no "${event}" in the log of ${this.args[0]}:\n${this.stderr}`)),
        timeout,
      );
      this.waiting.add(look);
      look();
    });
  }

  kill(signal) {
    if (!this.gone) this.child.kill(signal);
  }

  // Ends it as an operator would and checks that it went well.
  async stop(signal = 'SIGTERM') {
    if (this.stopped) return this.exited;
    this.stopped = true;
    this.kill(signal);
    const timer = setTimeout(() => this.kill('SIGKILL'), 45000);
    const end = await this.exited;
    clearTimeout(timer);
    const complaint = this.stderr.search(complaints); // the rest of the log may be long
    const log = complaint < 0 ? this.stderr.slice(-6000) : this.stderr.slice(complaint, complaint + 6000);
    const what = `${this.args.join(' ')}\n${log}`;
    assert.ok(!end.error, `cannot run ${binary}: ${end.error}`);
    assert.ok(complaint < 0, `a sanitizer complains: ${what}`);
    if (signal === 'SIGTERM') assert.deepEqual(end, { code: 0, signal: null }, `bad exit: ${what}`);
    return end;
  }
}

// Runs a command to its end: {code, stdout, stderr}.
export async function run(args, options) {
  const program = new Program(args, options);
  const end = await program.exited;
  assert.ok(!end.error, `cannot run ${binary}: ${end.error}`);
  assert.ok(!complaints.test(program.stderr), program.stderr);
  return { ...end, stdout: program.stdout, stderr: program.stderr };
}

function urlOf(entry) {
  const found = /http:\/\/[^\s"]+/.exec(entry.message);
  assert.ok(found, `no address in: ${entry.message}`);
  return found[0].replace(/\/$/, '');
}

// One simulated engine; flags as on the command line.
export async function startEngine(t, { flags = [] } = {}) {
  const program = new Program(['engine', '--listen', '127.0.0.1:0', ...flags]);
  cleanup(t, () => program.stop());
  program.url = urlOf(await program.log('listening'));
  return program;
}

// The router in front of `engines`: {name: url}. `config` is the text of a Lua table that becomes
// the config file. Health checks run ten times a second unless told otherwise. Waits until every
// engine is up, unless `ready` is false.
export async function startRouter(t, {
  engines = {}, flags = [], config = {}, threads = 2, policy, ready = true, env, files,
} = {}) {
  const directory = scratch(t);
  const full = { health: { interval_seconds: 0.1, timeout_seconds: 1, detect_interval_seconds: 0.1 }, ...config };
  const file = writeFile(directory, 'perilune.lua', `return ${lua(full)}\n`);
  const args = ['serve', file, '--listen', '127.0.0.1:0', '--admin', '127.0.0.1:0',
    '--threads', String(threads)];
  for (const [name, url] of Object.entries(engines)) args.push('--engine', `${name}=${url}`);
  if (policy) args.push('--policy', policy);
  const program = new Program([...args, ...flags], { env, files });
  cleanup(t, () => program.stop());
  program.config = file;
  program.directory = directory;
  program.url = urlOf(await program.log('listening'));
  program.admin = urlOf(await program.log('admin_listening'));
  if (ready && Object.keys(engines).length > 0) await usable(program, Object.keys(engines).length);
  return program;
}

// Waits until the admin API calls `n` engines up.
export function usable(router, n) {
  return until(`${n} engines up`, async () => {
    const { engines } = (await get(`${router.admin}/engines`)).json;
    return engines.filter((engine) => engine.health === 'up' && engine.models.length).length === n;
  });
}

// All engines as the admin API tells them, with the sums over their workers' ledgers.
export async function enginesOf(router) {
  const { engines } = (await get(`${router.admin}/engines`)).json;
  for (const engine of engines) {
    for (const key of ['inflight', 'streams', 'queued_prefill_tokens']) {
      engine[key] = engine.workers.reduce((sum, worker) => sum + worker[key], 0);
    }
  }
  return engines;
}

export const engineOf = async (router, name) => (await enginesOf(router))
  .find((engine) => engine.name === name);

// One number of /metrics: the sum over all its label sets that contain `labels`.
export async function metric(router, name, labels = '') {
  const { text } = await get(`${router.admin}/metrics`);
  let sum = 0;
  let seen = false;
  for (const line of text.split('\n')) {
    const found = /^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)$/.exec(line);
    if (found && found[1] === name && (found[2] ?? '').includes(labels)) {
      sum += Number(found[3]);
      seen = true;
    }
  }
  return seen ? sum : undefined;
}

// A JavaScript value as Lua source.
export function lua(value) {
  if (Array.isArray(value)) return `{ ${value.map(lua).join(', ')} }`;
  if (value && typeof value === 'object') {
    const members = Object.entries(value).map(([key, member]) => `[${lua(key)}] = ${lua(member)}`);
    return `{ ${members.join(', ')} }`;
  }
  return JSON.stringify(value); // Lua reads the same escapes for the ASCII that tests use
}
