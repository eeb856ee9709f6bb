// examples/embed_c, built as a stranger would: against what is installed, by pkg-config.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { spawn, spawnSync } from 'node:child_process';
import { dirname, join } from 'node:path';
import { binary, root, scratch, startEngine, until } from './lib/proc.mjs';
import { cleanup } from './lib/cleanup.mjs';
import { post, chat } from './lib/http.mjs';

function command(name, args, options = {}) {
  const { status, stdout, stderr } = spawnSync(name, args, { encoding: 'utf8', ...options });
  assert.equal(status, 0, `${name} ${args.join(' ')}\n${stdout}${stderr}`);
  return stdout;
}

test('two routers in one program', async (t) => {
  const prefix = scratch(t);
  const build = dirname(binary);
  command('cmake', ['--install', build, '--prefix', prefix]);
  const flags = command('pkg-config', ['--cflags', '--libs', 'perilune'], {
    env: { ...process.env, PKG_CONFIG_PATH: join(prefix, 'lib', 'pkgconfig') },
  }).trim().split(/\s+/);
  const sanitize = /asan/.test(build) ? ['-fsanitize=address,undefined']
    : /tsan/.test(build) ? ['-fsanitize=thread'] : [];
  const program = join(prefix, 'two_routers');
  command('cc', ['-Wall', '-Wextra', '-Werror', ...sanitize,
    join(root, 'examples', 'embed_c', 'two_routers.c'), ...flags, '-o', program]);

  const refused = spawnSync(program, ['http://127.0.0.1:9', 'nonsense'], { encoding: 'utf8', input: '' });
  assert.equal(refused.status, 1);
  assert.match(refused.stderr, /^nonsense: .*engines\[1\].* must begin with http:.*\(invalid argument\)$/m);

  const engines = [await startEngine(t), await startEngine(t)];
  const child = spawn(program, engines.map((engine) => engine.url));
  cleanup(t, () => child.kill('SIGKILL'));
  let out = '';
  let err = '';
  child.stdout.on('data', (data) => { out += data; });
  child.stderr.on('data', (data) => { err += data; });
  const closed = new Promise((resolve) => { child.on('close', resolve); });
  await until('two lines', () => out.split('\n').length > 2);

  const lines = [...out.matchAll(/^(\S+) sends to (\S+) by (\S+)$/gm)];
  assert.deepEqual(lines.map((line) => line[3]), ['least_loaded', 'round_robin']);
  for (const [index, [, url, engine, policy]] of lines.entries()) {
    assert.equal(engine, engines[index].url);
    const answer = await until('an answer', async () => {
      const got = await post(`${url}/v1/chat/completions`, chat('sim', { max_tokens: 2 }));
      return got.status === 200 && got;
    });
    assert.equal(answer.headers['x-perilune-policy'], policy);
    assert.equal(`http://${answer.headers['x-perilune-worker']}`, engine);
  }
  child.stdin.end();
  assert.equal(await closed, 0, err);
  assert.equal(err, ''); // its configuration logs warnings only
});
