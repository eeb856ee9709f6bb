// README.md says what is so: its configuration reference, files, flags and first policy are compared
// with the program and the tree.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { createHash } from 'node:crypto';
import { spawnSync } from 'node:child_process';
import { existsSync, readFileSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { root, run, scratch, writeFile } from './lib/proc.mjs';

const read = (...path) => readFileSync(join(root, ...path), 'utf8');
const readme = read('README.md');

async function printed(...args) {
  const { code, stdout, stderr } = await run(args);
  assert.equal(code, 0, stderr);
  return stdout;
}

test('the configuration reference is what --help-config prints', async () => {
  const help = await printed('serve', '--help-config');
  const keys = new Map();
  for (const [, key, value, meaning] of help.matchAll(/^([a-z]\S*) {2,}(.+)\n {4}(.+)$/gm)) {
    keys.set(key, { value, meaning });
  }
  assert.ok(keys.size > 30, help);

  const reference = readme.slice(readme.indexOf('### Configuration'), readme.indexOf('## How it compares'));
  const rows = new Map();
  for (const [, key, value, meaning] of reference.matchAll(/^\| `([^`]+)` \| (.*) \| (.*) \|$/gm)) {
    assert.ok(!rows.has(key), `${key} is there twice`);
    rows.set(key, { value, meaning });
  }
  assert.deepEqual(Object.fromEntries(rows), Object.fromEntries(keys));
});

test('every file it names exists', () => {
  const named = new Set();
  for (const [path] of readme.matchAll(/(?<![\w/.-])(?:core|examples|lua|policies|tests)\/[\w./-]*/g)) {
    named.add(path.replace(/\.$/, ''));
  }
  for (const [, target] of readme.matchAll(/\]\(((?!https?:)[^)#]+)/g)) named.add(target);
  assert.ok(named.size > 5);
  for (const path of named) assert.ok(existsSync(join(root, path)), `${path} does not exist`);
});

test('every flag it names exists', async () => {
  const help = new Map();
  for (const command of ['serve', 'engine', 'check', 'reload']) {
    help.set(command, await printed(command, '--help'));
  }
  const scriptHelp = (script) => {
    const { status, stdout, stderr } = spawnSync('sh', [join(root, script), '--help'], { encoding: 'utf8' });
    assert.equal(status, 0, stderr);
    return stdout;
  };
  let seen = 0;
  for (const line of readme.split('\n')) {
    for (const { 0: flag, index } of line.matchAll(/(?<![\w-])--[a-z][a-z-]*/g)) {
      // the program that the flag is given to is the last one named before it on the line
      const before = line.slice(0, index);
      const program = [...before.matchAll(/\bperilune (serve|engine|check|reload)\b|\bsh (\S+\.sh)|\b(cmake|curl|vllm serve|sglang\.launch_server)\b/g)].pop();
      if (program?.[3]) continue;
      seen += 1;
      let text = [...help.values()].join('');
      if (program?.[1]) text = help.get(program[1]);
      if (program?.[2]) text = scriptHelp(program[2]);
      assert.match(text, new RegExp(`${flag}(?![\\w-])`), `${flag} in: ${line}`);
    }
  }
  assert.ok(seen > 5);
});

test('every helper and ready-made policy it names exists', () => {
  const annotations = read('lua', 'perilune', 'meta.lua');
  const helpers = new Set([...readme.matchAll(/`pl\.(\w+)/g)].map(([, name]) => name));
  assert.ok(helpers.size > 10);
  for (const name of helpers) assert.match(annotations, new RegExp(`\\b${name}\\b`), `pl.${name}`);

  const section = readme.slice(readme.indexOf('### Ready-made policies'), readme.indexOf('### Sessions in a policy'));
  const listed = [...section.matchAll(/^\| (`.+?) \|/gm)].flatMap(([, cell]) => cell.match(/`(\w+)`/g))
    .map((name) => name.slice(1, -1));
  const files = readdirSync(join(root, 'policies')).filter((name) => name.endsWith('.lua'));
  assert.deepEqual(listed.sort(), files.map((name) => name.slice(0, -4)).sort());
});

// Lua without comments and layout.
const code = (text) => text.split('\n').map((line) => line.replace(/--.*$/, ''))
  .join(' ').replace(/\s+/g, ' ').replace(/,? \}/g, ' }').trim();

test('the first policy is examples/first_policy.lua and does what is shown', async (t) => {
  const path = 'examples/first_policy.lua';
  const section = readme.slice(readme.indexOf('## Your first policy'));
  const quoted = /```lua\n([\s\S]*?)```/.exec(section)[1];
  const file = read(path);
  assert.equal(code(quoted), code(file));

  const directory = scratch(t);
  const copy = writeFile(directory, 'quoted.lua', quoted);
  assert.match(await printed('check', copy), /^ok$/m);

  // the transcript; how many traces were compiled is LuaJIT's affair
  const shown = /\$ build\/perilune check [^\n]*\n([\s\S]*?\nok\n)/.exec(section)[1];
  const plain = (text) => text.replaceAll(join(root, path), path).replace(/\(\d+ traces\)/g, '(N traces)');
  assert.equal(plain(await printed('check', join(root, path))), plain(shown));
  const sha256 = createHash('sha256').update(file).digest('hex');
  assert.match(section, new RegExp(`generation 2, sha256 ${sha256.slice(0, 12)},`));

  // the mistake that it proposes, found at the line that it shows
  const [, line, message] = /refused at stage \w+: examples\/first_policy\.lua:(\d+): (.*)/.exec(section);
  const broken = writeFile(directory, 'broken.lua', file.replace('st.inflight_tokens', 'st.inflight_token'));
  const { code: exit, stdout, stderr } = await run(['check', broken]);
  assert.equal(exit, 1);
  assert.ok(`${stdout}${stderr}`.includes(`broken.lua:${line}: ${message}`), `${stdout}${stderr}`);
});
