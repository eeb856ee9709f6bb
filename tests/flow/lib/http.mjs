// HTTP clients for tests: one that speaks plain requests on fresh connections and shows everything,
// and a raw one that sends exactly the bytes it is given.
import http from 'node:http';
import net from 'node:net';

// Sends one request; resolves when the head of the answer is there. `res.text()` reads the rest.
export function send(url, { method = 'GET', headers = {}, body, agent = false, signal } = {}) {
  return new Promise((resolve, reject) => {
    const data = body === undefined || typeof body === 'string' || Buffer.isBuffer(body)
      ? body
      : JSON.stringify(body);
    const req = http.request(url, {
      method,
      agent,
      signal,
      headers: {
        ...(data === undefined ? {} : {
          'content-type': 'application/json', 'content-length': Buffer.byteLength(data),
        }),
        ...headers,
      },
    }, (res) => {
      res.request = req;
      res.text = async () => {
        const parts = [];
        for await (const part of res) parts.push(part);
        return Buffer.concat(parts).toString();
      };
      resolve(res);
    });
    req.on('error', reject);
    req.end(data);
  });
}

async function whole(res) {
  const text = await res.text();
  let json;
  try {
    json = JSON.parse(text);
  } catch { /* not every answer is JSON */ }
  return { status: res.statusCode, headers: res.headers, text, json };
}

export const get = async (url, options) => whole(await send(url, options));
export const post = async (url, body, options) => whole(
  await send(url, { method: 'POST', body, ...options }),
);
export const del = async (url) => whole(await send(url, { method: 'DELETE' }));

export const chat = (model, extra = {}) => ({
  model, messages: [{ role: 'user', content: 'What is a moon?' }], ...extra,
});

// The data of the events of an SSE text, in order.
export const events = (text) => text.split('\n\n').filter(Boolean).map((event) => event
  .split('\n').filter((line) => line.startsWith('data:')).map((line) => line.slice(5).trim())
  .join('\n'));

// A TCP connection under the test's control.
export class Raw {
  static connect(url) {
    const { hostname, port } = new URL(url);
    return new Promise((resolve, reject) => {
      const socket = net.connect({ host: hostname, port: Number(port), noDelay: true });
      socket.once('error', reject);
      socket.once('connect', () => {
        socket.removeListener('error', reject);
        resolve(new Raw(socket));
      });
    });
  }

  constructor(socket) {
    this.socket = socket;
    this.parts = [];
    this.looks = new Set();
    const look = (text) => { for (const each of this.looks) each(text); };
    socket.on('data', (data) => {
      const text = data.toString('latin1');
      this.parts.push(text);
      look(text);
    });
    socket.on('error', (error) => { this.error = error; });
    this.closed = new Promise((resolve) => {
      socket.on('end', () => { this.ended = true; look(''); });
      socket.on('close', () => { this.ended = true; look(''); resolve(); });
    });
  }

  // Everything that came, as latin1.
  get received() {
    if (this.parts.length > 1) this.parts = [this.parts.join('')];
    return this.parts[0] ?? '';
  }

  // What came until now does not count any more.
  forget() { this.parts = []; }

  send(bytes) {
    return new Promise((resolve) => { this.socket.write(bytes, resolve); });
  }

  // Resolves with everything received once it contains `mark` (or the peer has closed, for null).
  until(mark, timeout = 20000) {
    return new Promise((resolve, reject) => {
      const done = (settle, value) => {
        clearTimeout(timer);
        this.looks.delete(look);
        settle(value);
      };
      // a mark may come in parts: what is looked at is the new text and a little before it
      let tail = '';
      const look = (text) => {
        tail += text;
        if (mark !== null && tail.includes(mark)) done(resolve, this.received);
        else if (this.ended && mark === null) done(resolve, this.received);
        else if (this.ended) {
          done(reject, new Error(`closed before ${JSON.stringify(mark)}: ${this.some()}`));
        }
        tail = mark === null || mark.length < 2 ? '' : tail.slice(1 - mark.length);
      };
      const timer = setTimeout(
        () => done(reject, new Error(`no ${JSON.stringify(mark)} in: ${this.some()}`)),
        timeout,
      );
      this.looks.add(look);
      look(this.received);
    });
  }

  // What came, short enough to be printed.
  some() {
    const text = this.received;
    return text.length <= 2000 ? text : `${text.slice(0, 1000)} [...] ${text.slice(-1000)}`;
  }

  pause() { this.socket.pause(); }
  resume() { this.socket.resume(); }
  finish() { this.socket.end(); }
  reset() { this.socket.resetAndDestroy(); }
  destroy() { this.socket.destroy(); }
}

export const rawPost = (path, body, headers = '') => {
  const text = typeof body === 'string' ? body : JSON.stringify(body);
  return `POST ${path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n${headers}`
    + `Content-Length: ${Buffer.byteLength(text)}\r\n\r\n${text}`;
};
