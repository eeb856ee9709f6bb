// A subscriber of KV events that shares no code with the simulated engine: another language's ZeroMQ
// and msgpack, written from the engines' wire format. It keeps the blocks that events name in a plain
// map, and complains about events that no engine may send: a parent that is not there, a block that
// is stored twice or removed without being there, tokens that do not fit.
//
//     const s = await KvSubscriber.open(t, { endpoint, replay, topic });
//     await s.upTo(7);                       // the batch with that number has come
//     s.sums();                              // { blocks, xor, sum }, as GET /sim/kv tells them
//     for (const { seq, payload } of await s.replayed(3)) ...
//
// It is closed when the test t ends.
import { createHash } from 'node:crypto';
import { decode } from '@msgpack/msgpack';
import * as zmq from 'zeromq';
import assert from 'node:assert/strict';
import { cleanup } from './cleanup.mjs';

const words = (tokens) => {
  const b = Buffer.alloc(tokens.length * 4);
  tokens.forEach((token, i) => b.writeUInt32LE(token, i * 4));
  return b;
};
// SGLang's page hash, from its description alone.
export const digestOf = (parent, tokens) => createHash('sha256')
  .update(parent ?? Buffer.alloc(0)).update(words(tokens)).digest();

const number = (hash) => (hash instanceof Uint8Array
  ? Buffer.from(hash).readBigUInt64BE(hash.length - 8)
  : BigInt.asUintN(64, BigInt(hash)));

// An event as one of these, whichever way it was written:
// {type, block_hashes, parent_block_hash, token_ids, block_size, medium, ...}
const members = {
  BlockStored: ['block_hashes', 'parent_block_hash', 'token_ids', 'block_size', 'lora_id', 'medium', 'lora_name'],
  BlockRemoved: ['block_hashes', 'medium'],
  AllBlocksCleared: [],
};
const event = (value) => {
  if (!Array.isArray(value)) return value;
  const out = { type: value[0] };
  members[value[0]].forEach((name, i) => { out[name] = value[i + 1]; });
  return out;
};

export function batchOf(payload) {
  const [ts, events, rank] = decode(payload, { useBigInt64: true });
  return { ts, events: events.map(event), raw: events, rank };
}

export class KvIndex {
  constructor({ sha = false } = {}) {
    this.sha = sha;          // hashes must be SGLang's
    this.blocks = new Map(); // number -> { parent, tokens, digest }
    this.counts = { BlockStored: 0, BlockRemoved: 0, AllBlocksCleared: 0 };
  }

  apply({ events }) {
    for (const e of events) {
      this.counts[e.type]++;
      if (e.type === 'AllBlocksCleared') this.blocks.clear();
      else if (e.type === 'BlockRemoved') this.remove(e);
      else this.store(e);
    }
  }

  store(e) {
    let parent = e.parent_block_hash === null ? null : number(e.parent_block_hash);
    assert.equal(e.token_ids.length, e.block_hashes.length * e.block_size);
    e.block_hashes.forEach((hash, i) => {
      const name = number(hash);
      assert.ok(parent === null || this.blocks.has(parent), 'a block is stored below one that is not there');
      assert.ok(!this.blocks.has(name), 'a block is stored that is there');
      const tokens = e.token_ids.slice(i * e.block_size, (i + 1) * e.block_size);
      const digest = digestOf(parent === null ? null : this.blocks.get(parent).digest, tokens);
      if (this.sha) assert.equal(digest.readBigUInt64BE(0), name);
      this.blocks.set(name, { parent, tokens, digest });
      parent = name;
    });
  }

  remove(e) {
    for (const hash of e.block_hashes) assert.ok(this.blocks.delete(number(hash)), 'a block is removed that is not there');
  }

  // Tokens of the longest prefix that is there.
  match(tokens) {
    let parent = null;
    let n = 0;
    for (;;) {
      const next = [...this.blocks].find(([, b]) => b.parent === parent
        && b.tokens.every((token, i) => token === tokens[n + i]));
      if (!next) return n;
      [parent] = next;
      n += next[1].tokens.length;
    }
  }

  sums() {
    let xor = 0n;
    let sum = 0n;
    for (const name of this.blocks.keys()) {
      xor ^= name;
      sum = BigInt.asUintN(64, sum + name);
    }
    const hex = (v) => v.toString(16).padStart(16, '0');
    return { blocks: this.blocks.size, xor: hex(xor), sum: hex(sum) };
  }
}

export class KvSubscriber {
  // endpoint: where an engine listens; without it, this one listens at its own `endpoint`.
  static async open(t, { endpoint, replay, topic = '', sha } = {}) {
    const s = new KvSubscriber();
    cleanup(t, () => s.close());
    Object.assign(s, { replay, index: new KvIndex({ sha }), messages: [], waiting: [] });
    s.socket = new zmq.Subscriber({ linger: 0, receiveHighWaterMark: 0 });
    s.socket.subscribe(topic);
    if (endpoint) s.socket.connect(endpoint);
    else await s.socket.bind('tcp://127.0.0.1:*');
    s.endpoint = endpoint ?? s.socket.lastEndpoint;
    s.listen();
    return s;
  }

  close() {
    this.socket.close();
    this.dealer?.close();
  }

  // Messages in the order of their coming: {topic, seq, payload}.
  async listen() {
    for await (const frames of this.socket) {
      assert.equal(frames.length, 3);
      assert.equal(frames[1].length, 8);
      this.messages.push({ topic: frames[0].toString(), seq: Number(frames[1].readBigUInt64BE()), payload: frames[2] });
      this.waiting = this.waiting.filter((look) => !look());
    }
  }

  // Waits for n messages in all.
  some(n) {
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => reject(new Error(`${this.messages.length} of ${n} messages came`)), 30000);
      const look = () => {
        if (this.messages.length < n) return false;
        clearTimeout(timer);
        resolve(this.messages);
        return true;
      };
      if (!look()) this.waiting.push(look);
    });
  }

  // Applies what came and was not applied yet, from batches without gaps, up to number `seq`.
  async upTo(seq) {
    this.applied ??= 0;
    await this.some(this.applied + (seq - (this.last ?? -1)));
    for (; (this.last ?? -1) < seq; this.applied++) {
      const m = this.messages[this.applied];
      assert.equal(m.seq, (this.last ?? -1) + 1);
      this.index.apply(batchOf(m.payload));
      this.last = m.seq;
    }
  }

  // All answers to a request for what is kept from `seq` on: [{topic, seq, payload}].
  async replayed(seq) {
    this.dealer ??= this.dealTo();
    const from = Buffer.alloc(8);
    from.writeBigUInt64BE(BigInt(seq));
    await this.dealer.send(['', from]);
    const out = [];
    for (;;) {
      const frames = await this.dealer.receive();
      assert.equal(frames[0].length, 0);
      const [number_, payload] = frames.slice(-2);
      const topic = frames.length === 4 ? frames[1].toString() : undefined;
      if (number_.equals(Buffer.alloc(8, 0xff))) {
        assert.equal(payload.length, 0);
        this.endFrames = frames.length;
        return out;
      }
      out.push({ topic, seq: Number(number_.readBigUInt64BE()), payload });
    }
  }

  dealTo() {
    const dealer = new zmq.Dealer({ linger: 0, receiveHighWaterMark: 0, receiveTimeout: 30000 });
    dealer.connect(this.replay);
    return dealer;
  }
}
