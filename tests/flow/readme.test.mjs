// README.md says what is so: its configuration reference, files, flags and first policy are compared
// with the program and the tree.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { createHash } from 'node:crypto';
import { spawnSync } from 'node:child_process';
import { existsSync, readFileSync, readdirSync } from 'node:fs';
import { createServer } from 'node:net';
import { join } from 'node:path';
import { cleanup } from './lib/cleanup.mjs';
import { post } from './lib/http.mjs';
import { Program, root, run, scratch, startEngine, writeFile } from './lib/proc.mjs';

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
      const program = [...before.matchAll(/\bperilune (serve|engine|check|reload)\b|\bsh (\S+\.sh)|\b(cmake|pkg-config|busted|curl|vllm serve|sglang\.launch_server)\b/g)].pop();
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

test('an engine without flags does what --help says', async (t) => {
  const help = await printed('engine', '--help');
  const [, host, port] = /--listen HOST:PORT .*\((.*):(\d+)\)/.exec(help);
  const [, seed] = /--seed N .*\((\d+)\)/.exec(help);
  // taken, by this test or by somebody else: so it ends, and says where it wanted to be
  const taken = createServer();
  await new Promise((resolve) => { taken.once('error', resolve).listen(Number(port), host, resolve); });
  t.after(() => taken.close());
  const engine = new Program(['engine']);
  cleanup(t, () => engine.kill('SIGKILL'));
  await assert.rejects(engine.log('listening'), new RegExp(`${host}:${port}`));
  assert.equal((await engine.exited).code, 1);

  const said = async (...flags) => {
    const engine = await startEngine(t, { flags: ['--preset', 'instant', ...flags] });
    const { json } = await post(`${engine.url}/v1/completions`, { prompt: 'hello', max_tokens: 16 });
    return json.choices[0].text;
  };
  const plain = await said();
  assert.equal(await said('--seed', seed), plain);
  assert.notEqual(await said('--seed', `${Number(seed) + 1}`), plain);
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
