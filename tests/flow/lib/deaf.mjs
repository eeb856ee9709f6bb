// An engine in a process of its own that can be made deaf: it is stopped and its listener's queue of
// connections is filled, so that whoever connects now waits for an answer to its SYN and gets none.
// Nothing leaves the machine, and what happens is up to the kernel's rules, not to timing.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import net from 'node:net';
import { fileURLToPath } from 'node:url';
import { cleanup } from './cleanup.mjs';
import { FakeEngine } from './fake.mjs';
import { get } from './http.mjs';
import { until } from './proc.mjs';

const BACKLOG = 1; // the kernel completes one connection more than this

class DeafEngine {
  constructor(child, port) {
    this.child = child;
    this.port = port;
    this.url = `http://127.0.0.1:${port}`;
    this.fillers = [];
  }

  async deafen() {
    this.child.kill('SIGSTOP');
    await until('the engine stands still', () => /\) T /.test(readFileSync(`/proc/${this.child.pid}/stat`, 'utf8')));
    for (let i = 0; i < BACKLOG + 1; i++) {
      const filler = net.connect(this.port, '127.0.0.1');
      filler.on('error', () => {});
      this.fillers.push(filler);
      await once(filler, 'connect');
    }
  }

  // How many connections to it wait for the answer to their SYN.
  waiting() {
    const address = `0100007F:${this.port.toString(16).toUpperCase().padStart(4, '0')}`;
    return readFileSync('/proc/net/tcp', 'utf8').split('\n')
      .filter((line) => line.trim().split(/\s+/).slice(2, 4).join(' ') === `${address} 02`).length;
  }

  // Goes on; who waits is let in at the next SYN, in about a second.
  hear() { this.child.kill('SIGCONT'); }

  // The inference requests that have reached it. Only while it hears.
  async seen() { return Number((await get(`${this.url}/seen`)).text); }

  async end() {
    for (const filler of this.fillers) filler.destroy();
    if (this.child.exitCode === null && this.child.signalCode === null) {
      this.child.kill('SIGKILL');
      await once(this.child, 'exit');
    }
  }
}

export async function deafEngine(t) {
  const child = spawn(process.execPath, [fileURLToPath(import.meta.url)], { stdio: ['ignore', 'pipe', 'inherit'] });
  const [port] = await once(child.stdout, 'data');
  const engine = new DeafEngine(child, Number(port));
  cleanup(t, () => engine.end());
  return engine;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const engine = new FakeEngine();
  const serve = engine.serve.bind(engine);
  engine.serve = (req, res) => {
    if (req.url === '/seen') res.end(String(engine.requests.length));
    else serve(req, res);
  };
  engine.server.listen({ port: 0, host: '127.0.0.1', backlog: BACKLOG });
  await once(engine.server, 'listening');
  console.log(engine.server.address().port);
}
