// A fake SGLang server with streaming sessions: what it is told, and answers that the test chooses.
// Written from SGLang's documented behaviour, not from the router's or the simulated engine's code.
import { FakeEngine, usage } from './fake.mjs';
import { cleanup } from './cleanup.mjs';

export class SglangFake extends FakeEngine {
  constructor(options = {}) {
    super(options);
    this.info = { enable_streaming_session: true, ...options.info };
    this.sessions = new Map(); // open ones: id -> {turns: [json], active}
    this.opens = [];           // every /open_session's body
    this.closes = [];          // every /close_session's id
    this.aborts = [];          // every /abort_request's rid
    this.order = [];           // 'open ID', 'turn ID', 'end ID', 'close ID'
    this.onOpen = null;        // (body, res) => true when it has answered itself
    this.onClose = null;
    this.onTurn = null;        // (entry, session) => promise: before the reply
    this.onDone = null;        // () => promise: between a stream's [DONE] and its end
    this.handler = (entry, res) => this.infer(entry, res);
  }

  async serve(req, res) {
    const path = req.url.split('?')[0];
    if (path === '/server_info' || path === '/get_server_info') {
      this.json(res, 200, this.info);
      return;
    }
    if (path === '/v1/models') {
      this.json(res, 200, {
        object: 'list', data: this.models.map((id) => ({ id, object: 'model', created: 1, owned_by: 'sglang' })),
      });
      return;
    }
    if (!['/open_session', '/close_session', '/abort_request'].includes(path)) {
      await super.serve(req, res);
      return;
    }
    res.on('error', () => {});
    const parts = [];
    for await (const part of req) parts.push(part);
    const body = JSON.parse(Buffer.concat(parts).toString());
    if (path === '/abort_request') {
      this.aborts.push(body.rid);
      res.writeHead(200).end();
    } else if (path === '/open_session') {
      this.opens.push(body);
      this.changed();
      if (this.onOpen && await this.onOpen(body, res)) return;
      this.open(body, res);
    } else {
      this.closes.push(body.session_id);
      this.changed();
      if (this.onClose && await this.onClose(body, res)) return;
      this.order.push(`close ${body.session_id}`);
      this.sessions.delete(body.session_id);
      res.writeHead(200).end();
    }
    this.changed();
  }

  open(body, res) {
    if (this.sessions.has(body.session_id) || (body.streaming && !this.info.enable_streaming_session)) {
      this.json(res, 400, { error: { message: 'Failed to open the session.' } });
      return;
    }
    this.order.push(`open ${body.session_id}`);
    this.sessions.set(body.session_id, { ...body, turns: [], active: false });
    this.json(res, 200, body.session_id);
  }

  async infer(entry, res) {
    const id = entry.json?.session_params?.id;
    const session = id === undefined ? undefined : this.sessions.get(id);
    if (id !== undefined && (!session || session.active)) {
      this.json(res, 400, { error: { message: session
        ? 'Streaming session already has an active request.' : 'Invalid request session id' } });
      return;
    }
    if (session) {
      session.active = true;
      session.turns.push(entry.json);
      this.order.push(`turn ${id}`);
    }
    if (this.onTurn) await this.onTurn(entry, session);
    const end = () => {
      if (!session) return;
      session.active = false;
      this.order.push(`end ${id}`);
      this.changed();
    };
    res.on('close', end);
    const n = 10 * (session ? session.turns.length : 1);
    if (!entry.json?.stream) {
      this.json(res, 200, {
        id: 'c', object: 'chat.completion', created: 1, model: 'm',
        choices: [{ index: 0, finish_reason: 'stop', message: { role: 'assistant', content: this.words.join('') } }],
        usage: usage(n, this.words.length),
      });
      return;
    }
    const write = this.stream(res);
    for (const word of this.words) {
      await this.pace();
      if (res.destroyed) return;
      await write({ id: 'c', object: 'chat.completion.chunk', created: 1, model: 'm',
        choices: [{ index: 0, delta: { content: word }, finish_reason: null }] });
    }
    await write({ id: 'c', object: 'chat.completion.chunk', created: 1, model: 'm',
      choices: [{ index: 0, delta: {}, finish_reason: 'stop' }] });
    if (entry.json.stream_options?.include_usage) {
      await write({ id: 'c', object: 'chat.completion.chunk', created: 1, model: 'm', choices: [],
        usage: usage(n, this.words.length) });
    }
    await write('[DONE]');
    if (this.onDone) await this.onDone();
    res.end();
  }
}

export async function sglang(t, options) {
  const engine = await new SglangFake(options).listen();
  cleanup(t, async () => {
    for (const socket of engine.sockets) socket.destroy();
    if (engine.server.listening) await new Promise((resolve) => { engine.server.close(resolve); });
  });
  return engine;
}
