// A scriptable engine: what an inference server would do, and everything it should not do, at
// moments that the test chooses.
import http from 'node:http';
import { once } from 'node:events';
import { cleanup } from './cleanup.mjs';

// A promise with its handles: tests open gates instead of sleeping.
export function gate() {
  const g = {};
  g.opened = new Promise((resolve) => { g.open = resolve; });
  return g;
}

const words = ['The', ' moon', ' is', ' a', ' rock', '.'];

export function chunk(model, text, extra = {}) {
  return {
    id: 'chatcmpl-1', object: 'chat.completion.chunk', created: 1, model,
    choices: [{ index: 0, delta: { content: text }, finish_reason: null }], ...extra,
  };
}

export const usage = (prompt, output, cached = 0) => ({
  prompt_tokens: prompt, completion_tokens: output, total_tokens: prompt + output,
  prompt_tokens_details: { cached_tokens: cached },
});

export class FakeEngine {
  constructor({ models = ['m'] } = {}) {
    this.models = models;
    this.healthy = true;
    this.requests = [];   // every inference request: {method, path, headers, body, json, aborted}
    this.metrics = null;  // the text of /metrics; null: there is none
    this.info = null;     // what /server_info answers; null: there is none
    this.infos = 0;       // how often it did
    this.looks = new Set();
    this.words = words;
    this.delayMs = 0;
    this.handler = null;  // (entry, res) => ..., takes over inference requests
    this.server = http.createServer((req, res) => this.serve(req, res));
    this.server.keepAliveTimeout = 60000;
    this.sockets = new Set();
    this.server.on('connection', (socket) => {
      this.sockets.add(socket);
      socket.on('error', () => {});
      socket.on('close', () => this.sockets.delete(socket));
    });
  }

  async listen(port = 0) {
    this.server.listen(port, '127.0.0.1');
    await once(this.server, 'listening');
    this.port = this.server.address().port;
    this.url = `http://127.0.0.1:${this.port}`;
    return this;
  }

  // Refuses connections from now on; what is open is reset.
  async refuse() {
    const closed = new Promise((resolve) => { this.server.close(resolve); });
    for (const socket of this.sockets) socket.resetAndDestroy();
    await closed;
  }

  // The n-th inference request, when it has arrived whole.
  request(n = 0) {
    return this.when(() => this.requests[n], `request ${n} at the engine`);
  }

  when(probe, what, timeout = 20000) {
    return new Promise((resolve, reject) => {
      const look = () => {
        const value = probe();
        if (!value) return;
        clearTimeout(timer);
        this.looks.delete(look);
        resolve(value);
      };
      const timer = setTimeout(() => {
        this.looks.delete(look);
        reject(new Error(`waited in vain for ${what}`));
      }, timeout);
      this.looks.add(look);
      look();
    });
  }

  changed() { for (const look of [...this.looks]) look(); }

  async serve(req, res) {
    const path = req.url;
    res.on('error', () => {});
    if (path === '/health') {
      res.writeHead(this.healthy ? 200 : 503).end();
      return;
    }
    if (path === '/v1/models') {
      this.json(res, 200, {
        object: 'list',
        data: this.models.map((m) => ({ object: 'model', created: 1, owned_by: 'fake',
          ...(typeof m === 'string' ? { id: m } : m) })),
      });
      return;
    }
    if (path === '/metrics' && this.metrics !== null) {
      res.writeHead(200, { 'content-type': 'text/plain; version=0.0.4' }).end(this.metrics);
      return;
    }
    if (path === '/server_info' && this.info !== null) {
      this.infos++;
      this.changed();
      this.json(res, 200, this.info);
      return;
    }
    if (req.method === 'GET') {
      req.resume();
      this.json(res, 404, { error: { message: 'not found' } });
      return;
    }
    const entry = {
      method: req.method, path, headers: req.headers, rawHeaders: req.rawHeaders, aborted: false,
    };
    // the connection closing before our answer was complete is what an engine sees of an abort
    entry.closed = new Promise((resolve) => {
      res.on('close', () => {
        entry.aborted = !res.writableFinished;
        resolve(entry);
        this.changed();
      });
    });
    const parts = [];
    try {
      for await (const part of req) parts.push(part);
    } catch {
      return;
    }
    entry.body = Buffer.concat(parts).toString();
    try {
      entry.json = JSON.parse(entry.body);
    } catch { /* the test sees the bytes */ }
    entry.socket = req.socket;
    this.requests.push(entry);
    this.changed();
    if (this.handler) await this.handler(entry, res);
    else if (path === '/v1/messages') await this.messages(entry, res);
    else await this.chat(entry, res);
  }

  json(res, status, body, headers = {}) {
    const text = JSON.stringify(body);
    res.writeHead(status, {
      'content-type': 'application/json', 'content-length': Buffer.byteLength(text), ...headers,
    }).end(text);
  }

  stream(res, headers = {}) {
    res.writeHead(200, { 'content-type': 'text/event-stream', ...headers });
    res.flushHeaders();
    return (data, event) => new Promise((resolve) => {
      const text = typeof data === 'string' ? data : JSON.stringify(data);
      res.write(`${event ? `event: ${event}\n` : ''}data: ${text}\n\n`, () => resolve());
    });
  }

  pace() {
    return this.delayMs ? new Promise((resolve) => setTimeout(resolve, this.delayMs)) : undefined;
  }

  async chat(entry, res) {
    const { model, stream, stream_options: options } = entry.json ?? {};
    if (!stream) {
      this.json(res, 200, {
        id: 'chatcmpl-1', object: 'chat.completion', created: 1, model,
        choices: [{
          index: 0, finish_reason: 'stop', message: { role: 'assistant', content: this.words.join('') },
        }],
        usage: usage(7, this.words.length),
      });
      return;
    }
    const write = this.stream(res);
    for (const word of this.words) {
      await this.pace();
      if (res.destroyed) return;
      await write(chunk(model, word));
    }
    await write(chunk(model, '', { choices: [{ index: 0, delta: {}, finish_reason: 'stop' }] }));
    if (options?.include_usage) {
      await write(chunk(model, '', { choices: [], usage: usage(7, this.words.length, 3) }));
    }
    await write('[DONE]');
    res.end();
  }

  async messages(entry, res) {
    const { model, stream } = entry.json ?? {};
    const message = {
      id: 'msg_1', type: 'message', role: 'assistant', model, content: [],
      stop_reason: null, stop_sequence: null, usage: { input_tokens: 7, output_tokens: 0 },
    };
    const text = this.words.join('');
    if (!stream) {
      this.json(res, 200, {
        ...message, content: [{ type: 'text', text }], stop_reason: 'end_turn',
        usage: { input_tokens: 7, output_tokens: this.words.length },
      });
      return;
    }
    const write = this.stream(res);
    const event = (type, rest) => write({ type, ...rest }, type);
    await event('message_start', { message });
    await event('content_block_start', { index: 0, content_block: { type: 'text', text: '' } });
    for (const word of this.words) {
      await this.pace();
      if (res.destroyed) return;
      await event('content_block_delta', { index: 0, delta: { type: 'text_delta', text: word } });
    }
    await event('content_block_stop', { index: 0 });
    await event('message_delta', {
      delta: { stop_reason: 'end_turn', stop_sequence: null },
      usage: { output_tokens: this.words.length },
    });
    await event('message_stop', {});
    res.end();
  }
}

export async function fakeEngine(t, options) {
  const engine = await new FakeEngine(options).listen();
  cleanup(t, async () => {
    for (const socket of engine.sockets) socket.destroy();
    if (engine.server.listening) await new Promise((resolve) => { engine.server.close(resolve); });
  });
  return engine;
}

// A port that refuses connections: bound once and let go of.
export async function deadUrl() {
  const server = http.createServer();
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address();
  await new Promise((resolve) => { server.close(resolve); });
  return `http://127.0.0.1:${port}`;
}
