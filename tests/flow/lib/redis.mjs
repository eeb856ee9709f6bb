// A redis-server of a test's own, on a socket in a scratch directory; it can be stopped, killed and
// started again empty.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync, rmSync } from 'node:fs';
import net from 'node:net';
import { join } from 'node:path';
import { cleanup } from './cleanup.mjs';
import { scratch, until } from './proc.mjs';

class Redis {
  constructor(directory, password) {
    this.directory = directory;
    this.password = password;
    this.path = join(directory, 's');
    this.url = `unix://${this.path}`;
  }

  async start() {
    this.child = spawn('redis-server', ['--port', '0', '--unixsocket', this.path, '--save', '',
      '--appendonly', 'no', '--dir', this.directory,
      ...(this.password ? ['--requirepass', this.password] : [])], { stdio: 'ignore' });
    await until('redis-server answers', () => this.command('PING').then((text) => text === '+PONG\r\n', () => false));
  }

  // One command on a connection of its own: the reply as it comes, up to its first 64 KiB.
  command(...args) {
    const encode = (list) => `*${list.length}\r\n${list.map((a) => `$${Buffer.byteLength(a)}\r\n${a}\r\n`).join('')}`;
    return new Promise((resolve, reject) => {
      const socket = net.connect(this.path);
      socket.on('error', reject);
      let text = '';
      const auth = this.password ? '+OK\r\n' : '';
      socket.on('data', (data) => {
        text += data;
        if (text.length <= auth.length) return;
        socket.destroy();
        resolve(text.slice(auth.length));
      });
      socket.write((auth ? encode(['AUTH', this.password]) : '') + encode(args));
    });
  }

  async freeze() {
    this.child.kill('SIGSTOP');
    await until('it stands still', () => /\) T /.test(readFileSync(`/proc/${this.child.pid}/stat`, 'utf8')));
  }

  thaw() { this.child.kill('SIGCONT'); }

  async kill() {
    if (this.child.exitCode !== null || this.child.signalCode !== null) return;
    const gone = once(this.child, 'exit');
    this.child.kill('SIGKILL');
    await gone;
    rmSync(this.path, { force: true });
  }
}

export async function startRedis(t, { password } = {}) {
  const redis = new Redis(scratch(t), password);
  cleanup(t, () => redis.kill());
  await redis.start();
  return redis;
}
