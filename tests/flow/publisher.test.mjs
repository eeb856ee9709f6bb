// The publisher itself, against the reference's wire vectors and a subscriber: what the router is
// tested with must be right first.
import test from 'node:test';
import assert from 'node:assert/strict';
import { encode, decode } from '@msgpack/msgpack';
import * as zmq from 'zeromq';
import { cleanup } from './lib/cleanup.mjs';
import { KvPublisher, pageDigest, wireHash } from './lib/publisher.mjs';

async function subscriber(t, p, topic = '') {
  const sub = new zmq.Subscriber({ linger: 0, receiveTimeout: 30000 });
  cleanup(t, () => sub.close());
  sub.connect(p.endpoint);
  sub.subscribe(topic);
  await p.subscribed();
  return sub;
}

const hex = (frame) => Buffer.from(frame).toString('hex');
const next = async (sub) => {
  const [topic, seq, payload] = await sub.receive();
  return { topic: topic.toString(), seq: seq.readBigUInt64BE(), payload,
    batch: decode(payload, { useBigInt64: true }) };
};

test('page hashes are the published ones', () => {
  assert.equal(wireHash(pageDigest([1, 2, 3, 4])), -3488128144981237669n);
  assert.equal(wireHash(pageDigest([1, 2, 3, 4], undefined, '')), -1934027550307904538n);
  const first = pageDigest([1, 2, 3, 4], undefined, 'salt-A');
  assert.equal(wireHash(first), 1848708812856982025n);
  assert.equal(wireHash(pageDigest([5], first, 'salt-A')), -844459331919182630n);
});

test('batches are the published bytes', async (t) => {
  const arrays = await KvPublisher.open(t, { style: 'vllm-arrays' });
  const sub = await subscriber(t, arrays);
  await arrays.publish([arrays.stored({ hashes: [15760518052499183552n], tokens: [1, 2, 3, 4], blockSize: 4 })], { ts: 1.5 });
  assert.equal(hex((await next(sub)).payload),
    '93cb3ff80000000000009198ab426c6f636b53746f72656491cfdab89baa7b5857c0c0940102030404c0a3475055c000');

  const maps = await KvPublisher.open(t, { style: 'vllm-maps', rank: 1 });
  const other = await subscriber(t, maps);
  await maps.publish([maps.removed([5n]), maps.cleared()], { ts: 1.5 });
  assert.deepEqual((await next(other)).batch,
    [1.5, [{ type: 'BlockRemoved', block_hashes: [5n], medium: 'GPU' }, { type: 'AllBlocksCleared' }], 1]);

  const bytes = await KvPublisher.open(t, { style: 'vllm-arrays', byteHashes: true });
  const third = await subscriber(t, bytes);
  await bytes.publish([bytes.removed([7n])]);
  const { batch } = await next(third);
  assert.equal(batch[1][0][1][0].length, 32);
  assert.equal(hex(batch[1][0][1][0].slice(24)), '0000000000000007');
});

test('numbers, topics, losses, duplicates, restarts', async (t) => {
  const p = await KvPublisher.open(t, { style: 'sglang', topic: 'kv-events', epoch: 'a1' });
  const sub = await subscriber(t, p, 'kv-events');
  const [first, second] = await p.store([1, 2, 3, 4, 5], { blockSize: 2, salt: 's' });
  let m = await next(sub);
  assert.equal(m.topic, 'kv-events\0sgl-kv-epoch=a1');
  assert.equal(m.seq, 0n);
  assert.deepEqual(m.batch[1][0],
    ['BlockStored', [first, second], null, [1, 2, 3, 4], 2, null, 'GPU', { cache_salt: 's' }]);
  await p.remove([second], {}, { lost: true });
  await p.clear({ twice: true });
  assert.equal((await next(sub)).seq, 2n);
  m = await next(sub);
  assert.equal(m.seq, 2n);
  assert.deepEqual(m.batch[1], [['AllBlocksCleared']]);
  p.restart({ epoch: 'a2' });
  await p.publish([], { rank: null });
  m = await next(sub);
  assert.equal(m.topic, 'kv-events\0sgl-kv-epoch=a2');
  assert.equal(m.seq, 0n);
  assert.equal(m.batch.length, 2);
});

async function ask(t, endpoint, ...frames) {
  const dealer = new zmq.Dealer({ linger: 0, receiveTimeout: 30000 });
  cleanup(t, () => dealer.close());
  dealer.connect(endpoint);
  await dealer.send(frames);
  return dealer;
}

test('replays', async (t) => {
  for (const replayTopic of [false, true]) {
    const p = await KvPublisher.open(t, { replay: true, replayTopic, bufferSteps: 2, topic: 'x' });
    for (let i = 0; i < 3; i++) await p.clear({ lost: true });
    const start = Buffer.alloc(8);
    const dealer = await ask(t, p.replayEndpoint, '', start);
    const seen = [];
    for (;;) {
      const frames = await dealer.receive();
      assert.equal(frames.length, replayTopic ? 4 : 3);
      assert.equal(frames[0].length, 0);
      const [seq, payload] = frames.slice(-2);
      if (hex(seq) === 'ffffffffffffffff') {
        assert.equal(payload.length, 0);
        break;
      }
      seen.push(seq.readBigUInt64BE());
    }
    assert.deepEqual(seen, [1n, 2n]);
    assert.deepEqual(p.replays, [0]);
  }
});

test('snapshots', async (t) => {
  const p = await KvPublisher.open(t, { style: 'sglang', snapshot: true, epoch: 'e' });
  const sub = await subscriber(t, p);
  const [a, b] = await p.store([1, 2], { blockSize: 1 });
  const dealer = await ask(t, p.snapshotEndpoint, '', 'snapshot-v1');
  const parts = [];
  do parts.push(await dealer.receive()); while (String(parts.at(-1)[1]) !== 'end');
  assert.deepEqual(parts.map((f) => String(f[1])), ['header', 'chunk', 'end']);
  assert.deepEqual(decode(parts[0][2], { useBigInt64: true }), [1, 'e', 0, 2, 1, '1', 2]);
  assert.deepEqual(decode(parts[1][2], { useBigInt64: true }), [[null, [a]], [a, [b]]]);
  assert.equal((await next(sub)).seq, 0n);
  const barrier = await next(sub);
  assert.equal(barrier.topic, '\0sgl-kv-epoch=e\0sgl-kv-snapshot=1');
  assert.equal(barrier.seq, 1n);
  assert.equal(encode(barrier.batch[1]).length, 1);
});
