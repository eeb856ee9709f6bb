// A publisher of KV events that shares no code with the router: another language's ZeroMQ and
// msgpack, written from the engines' wire format. It does what an engine does, and on demand what an
// engine should not: lose batches, send them twice, restart, send garbage.
//
//     const p = await KvPublisher.open(t, { style: 'vllm-maps', replay: true });
//     ... the router connects to p.endpoint and p.replayEndpoint ...
//     await p.subscribed();
//     const hashes = await p.store([1, 2, 3, 4], { blockSize: 2 });   // one batch
//     await p.remove(hashes.slice(1));
//     await p.publish([p.stored(...), p.removed(...)], { lost: true }); // a batch of several
//     p.restart();
//
// It is closed when the test t ends.
import { createHash } from 'node:crypto';
import { encode } from '@msgpack/msgpack';
import * as zmq from 'zeromq';
import { cleanup } from './cleanup.mjs';

const END = Buffer.alloc(8, 0xff);
const seqBytes = (seq) => { const b = Buffer.alloc(8); b.writeBigUInt64BE(BigInt(seq)); return b; };
const pack = (value) => Buffer.from(encode(value, { useBigInt64: true, ignoreUndefined: true }));

// SGLang's page hash: SHA-256 over [length and bytes of the extra key], the parent's whole digest,
// the tokens as 32-bit numbers; the wire carries the first 8 bytes as a signed number.
export function pageDigest(tokens, parent, extraKey) {
  const h = createHash('sha256');
  if (extraKey !== undefined) {
    const key = Buffer.from(extraKey);
    const n = Buffer.alloc(4);
    n.writeUInt32LE(key.length);
    h.update(n).update(key);
  }
  if (parent) h.update(parent);
  for (const token of tokens) {
    const b = Buffer.alloc(4);
    b.writeUInt32LE(token);
    h.update(b);
  }
  return h.digest();
}
export const wireHash = (digest) => digest.readBigInt64BE(0);

export class KvPublisher {
  // style: 'sglang' | 'vllm-arrays' | 'vllm-maps'. replay: false | true (a socket of its own);
  // replayTopic: answers carry the topic, as newer vLLM's do. byteHashes: 32 bytes in place of
  // numbers (vLLM). snapshot: serve SGLang's snapshot-v1. connect: to the router's socket instead
  // of binding one.
  static async open(t, options = {}) {
    const p = new KvPublisher(options);
    cleanup(t, () => p.close());
    await p.start();
    return p;
  }

  constructor({ style = 'vllm-maps', topic = '', rank = 0, replay = false, replayTopic = false,
    snapshot = false, bufferSteps = 10000, byteHashes = false, epoch, connect } = {}) {
    Object.assign(this, { style, topic, rank, replay, replayTopic, snapshot, bufferSteps,
      byteHashes, epoch, connect });
    this.seq = 0;            // of the next batch
    this.buffer = [];        // [seq, payload], the last bufferSteps
    this.digests = new Map();   // wire hash (bigint) -> whole digest
    this.resident = new Map();  // wire hash -> parent's wire hash or null
    this.replays = [];       // start of each replay that was asked for
    this.snapshots = 0;
    this.subscriptions = 0;
    this.waiting = [];
    this.sending = Promise.resolve();
  }

  async start() {
    this.pub = new zmq.XPublisher({ linger: 0, sendHighWaterMark: 100000 });
    if (this.connect) this.pub.connect(this.connect);
    else await this.pub.bind('tcp://127.0.0.1:*');
    this.endpoint = this.pub.lastEndpoint;
    this.watch();
    if (this.replay) {
      this.router = new zmq.Router({ linger: 0, sendHighWaterMark: 100000 });
      await this.router.bind('tcp://127.0.0.1:*');
      this.replayEndpoint = this.router.lastEndpoint;
      this.serveReplays();
    }
    if (this.snapshot) {
      this.snapshotRouter = new zmq.Router({ linger: 0 });
      await this.snapshotRouter.bind('tcp://127.0.0.1:*');
      this.snapshotEndpoint = this.snapshotRouter.lastEndpoint;
      this.serveSnapshots();
    }
  }

  close() {
    this.pub?.close();
    this.router?.close();
    this.snapshotRouter?.close();
    this.pub = this.router = this.snapshotRouter = undefined;
    for (const w of this.waiting) w.reject(new Error('the publisher was closed'));
    this.waiting = [];
  }

  // XPUB hands over subscriptions: so nobody has to sleep before the first batch.
  async watch() {
    try {
      for await (const [frame] of this.pub) {
        if (frame[0] !== 1) continue;
        this.subscriptions++;
        this.waiting = this.waiting.filter((w) => {
          if (this.subscriptions < w.n) return true;
          w.resolve();
          return false;
        });
      }
    } catch (e) {
      if (this.pub) throw e;
    }
  }

  // When the n-th subscription since the start has come.
  subscribed(n = 1) {
    if (this.subscriptions >= n) return Promise.resolve();
    return new Promise((resolve, reject) => this.waiting.push({ n, resolve, reject }));
  }

  topicBytes(extra = '') {
    return Buffer.from(this.topic + (this.epoch === undefined ? '' : `\0sgl-kv-epoch=${this.epoch}`) + extra);
  }

  // --- events in the engine's shape

  name(hash) {
    if (!this.byteHashes) return this.style === 'sglang' ? hash : BigInt.asUintN(64, hash);
    const b = Buffer.alloc(32, 0xab); // the last 8 bytes count
    b.writeBigInt64BE(BigInt.asIntN(64, hash), 24);
    return b;
  }

  stored({ hashes, parent = null, tokens = [], blockSize = 16, medium = 'GPU', lora = null, salt,
    extraKeys = null, group, spec, bigram = false }) {
    const names = hashes.map((h) => this.name(h));
    const up = parent === null ? null : this.name(parent);
    const ids = bigram ? tokens.slice(0, -1).map((t, i) => [t, tokens[i + 1]]) : tokens;
    if (this.style === 'sglang') {
      const event = ['BlockStored', names, up, ids, blockSize, null, medium];
      return salt === undefined ? event : [...event, { cache_salt: salt }];
    }
    // vLLM tells the salt, like everything that was hashed beside tokens, in the first block's keys
    const keys = extraKeys ?? (salt !== undefined || lora !== null
      ? hashes.map((_, i) => [...(lora !== null ? [lora] : []),
        ...(salt !== undefined && parent === null && i === 0 ? [salt] : [])]).map((k) => (k.length ? k : null))
      : null);
    if (this.style === 'vllm-arrays') {
      const event = ['BlockStored', names, up, ids, blockSize, lora === null ? null : 1, medium, lora];
      if (keys || group !== undefined) event.push(keys);
      if (group !== undefined) event.push(group, spec ?? null);
      return event;
    }
    return { type: 'BlockStored', block_hashes: names, parent_block_hash: up, token_ids: ids,
      block_size: blockSize, lora_id: lora === null ? null : 1, medium, lora_name: lora,
      extra_keys: keys ?? undefined, group_idx: group, kv_cache_spec_kind: spec,
      session_id: 'ignored' };
  }

  removed(hashes, { medium = 'GPU', group } = {}) {
    const names = hashes.map((h) => this.name(h));
    if (this.style === 'vllm-maps') return { type: 'BlockRemoved', block_hashes: names, medium, group_idx: group };
    const event = ['BlockRemoved', names, medium];
    return group === undefined ? event : [...event, group];
  }

  cleared() {
    return this.style === 'vllm-maps' ? { type: 'AllBlocksCleared' } : ['AllBlocksCleared'];
  }

  // --- batches

  // lost: kept for replay, not sent. twice: sent two times. rank: another one than the publisher's;
  // null: the batch does not say (older SGLang).
  async publish(events, { lost = false, twice = false, rank = this.rank, ts = Date.now() / 1000 } = {}) {
    const payload = pack(rank === null ? [ts, events] : [ts, events, rank]);
    const seq = this.seq++;
    this.buffer.push([seq, payload]);
    if (this.buffer.length > this.bufferSteps) this.buffer.shift();
    if (!lost) for (let i = twice ? 2 : 1; i > 0; i--) await this.send([this.topicBytes(), seqBytes(seq), payload]);
    return seq;
  }

  // Any frames at all. One after the other: a socket sends one message at a time.
  send(frames) {
    this.sending = this.sending.then(() => this.pub.send(frames));
    return this.sending;
  }

  // Sends a batch that was published before once more.
  resend(seq) {
    const [, payload] = this.buffer.find(([s]) => s === seq);
    return this.send([this.topicBytes(), seqBytes(seq), payload]);
  }

  // The blocks of a prompt as one BlockStored, chained from the start or from behind `parent`.
  // Returns their names for remove().
  async store(tokens, { blockSize = 16, parent = null, salt, ...rest } = {}, how = {}) {
    const hashes = [];
    let digest = parent === null ? undefined : this.digests.get(parent);
    for (let i = 0; i + blockSize <= tokens.length; i += blockSize) {
      digest = pageDigest(tokens.slice(i, i + blockSize), digest, salt);
      const hash = wireHash(digest);
      this.digests.set(hash, digest);
      this.resident.set(hash, hashes.at(-1) ?? parent);
      hashes.push(hash);
    }
    await this.publish([this.stored({ hashes, parent, blockSize, salt,
      tokens: tokens.slice(0, hashes.length * blockSize), ...rest })], how);
    return hashes;
  }

  async remove(hashes, options = {}, how = {}) {
    for (const h of hashes) this.resident.delete(h);
    return this.publish([this.removed(hashes, options)], how);
  }

  async clear(how = {}) {
    this.resident.clear();
    return this.publish([this.cleared()], how);
  }

  // A new lifetime: numbers from 0, nothing cached, nothing to replay.
  restart({ epoch = this.epoch } = {}) {
    this.seq = 0;
    this.buffer = [];
    this.resident.clear();
    this.digests.clear();
    this.epoch = epoch;
  }

  // --- answers

  async serveReplays() {
    try {
      for await (const request of this.router) {
        const [id, empty, start] = request;
        if (request.length !== 3 || empty.length !== 0 || start.length !== 8) continue; // as engines do
        const from = Number(start.readBigUInt64BE());
        this.replays.push(from);
        const topic = this.replayTopic ? [this.topicBytes()] : [];
        for (const [seq, payload] of this.buffer.filter(([s]) => s >= from))
          await this.router.send([id, '', ...topic, seqBytes(seq), payload]);
        await this.router.send([id, '', ...topic, END, '']);
      }
    } catch (e) {
      if (this.router) throw e;
    }
  }

  async serveSnapshots() {
    try {
      for await (const [id, empty, request] of this.snapshotRouter) {
        if (empty?.length !== 0 || String(request) !== 'snapshot-v1') {
          await this.snapshotRouter.send([id, '', 'error', 'invalid snapshot-v1 request']);
          continue;
        }
        this.snapshots++;
        const records = [...this.resident].map(([hash, parent]) => [parent, [hash]]);
        // the barrier: an empty batch that says where the snapshot stands among the live ones
        const barrier = this.seq++;
        const payload = pack([Date.now() / 1000, [], this.rank]);
        this.buffer.push([barrier, payload]);
        await this.snapshotRouter.send([id, '', 'header',
          pack([1, this.epoch ?? 'e', this.rank, barrier + 1, barrier, String(this.snapshots), records.length])]);
        for (let i = 0; i < records.length; i += 4096)
          await this.snapshotRouter.send([id, '', 'chunk', pack(records.slice(i, i + 4096))]);
        await this.snapshotRouter.send([id, '', 'end', '']);
        await this.send([this.topicBytes(`\0sgl-kv-snapshot=${this.snapshots}`), seqBytes(barrier), payload]);
      }
    } catch (e) {
      if (this.snapshotRouter) throw e;
    }
  }
}
