// The one run command, as a newcomer types it.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { join } from 'node:path';
import { root, until } from './lib/proc.mjs';

const ROW = /^ {3}(gardener|sailor|cook) +"([^"]+)" +(\S+) +(\S+) +(\d+) of +(\d+) prompt tokens cached$/;

test('sh examples/quickstart.sh', { timeout: 600000 }, async () => {
  // a process group of its own: whatever is left running in it shows
  const child = spawn('sh', [join(root, 'examples', 'quickstart.sh')], { detached: true });
  let out = '';
  let err = '';
  child.stdout.on('data', (data) => { out += data; });
  child.stderr.on('data', (data) => { err += data; });
  const code = await new Promise((resolve) => { child.on('close', resolve); });
  assert.equal(code, 0, err);
  assert.doesNotMatch(err, /No such file/);

  const rows = out.split('\n').map((line) => ROW.exec(line)).filter(Boolean);
  assert.equal(rows.length, 9, out);
  const home = new Map();
  for (const [, who, , worker, reason, cached, prompt] of rows) {
    assert.equal(reason, 'same_prefix');
    if (home.has(who)) {
      assert.equal(worker, home.get(who), `${who} stays with its worker`);
      assert.ok(Number(cached) > 0.9 * Number(prompt), `${who} finds its instructions cached`);
    } else {
      home.set(who, worker);
      assert.equal(Number(cached), 0);
    }
  }
  assert.equal(new Set(home.values()).size, 3, 'all three workers have something to do');
  assert.match(out, /Where to go next/);
  await until('nothing is left running', () => {
    try {
      process.kill(-child.pid, 0);
      return false;
    } catch (error) {
      return error.code === 'ESRCH';
    }
  });
});
