// The official clients, against the router in front of simulated engines and of one that the test
// scripts: what their users see.
import { test } from 'node:test';
import assert from 'node:assert/strict';
import { execFile } from 'node:child_process';
import { promisify } from 'node:util';
import OpenAI from 'openai';
import Anthropic from '@anthropic-ai/sdk';
import { startEngine, startRouter } from './lib/proc.mjs';
import { fakeEngine, gate, chunk } from './lib/fake.mjs';
import { chat } from './lib/http.mjs';

const openaiOf = (router) => new OpenAI({
  baseURL: `${router.url}/v1`, apiKey: 'none', maxRetries: 0,
});
const anthropicOf = (router) => new Anthropic({
  baseURL: router.url, apiKey: 'none', maxRetries: 0,
});

async function simulated(t, options = {}) {
  const engine = await startEngine(t, { flags: ['--model', 'sim', '--speed', '100'] });
  return startRouter(t, { engines: { a: engine.url }, ...options });
}

async function scripted(t, options = {}) {
  const engine = await fakeEngine(t);
  const router = await startRouter(t, { engines: { a: engine.url }, ...options });
  return { engine, router };
}

test('openai: chat, whole and streamed, from a simulated engine', async (t) => {
  const client = openaiOf(await simulated(t));
  const whole = await client.chat.completions.create(chat('sim', { max_tokens: 8 }));
  assert.equal(whole.object, 'chat.completion');
  assert.ok(whole.choices[0].message.content.length > 0);
  assert.equal(whole.usage.completion_tokens, 8);

  const stream = await client.chat.completions.create(
    chat('sim', { max_tokens: 8, stream: true, stream_options: { include_usage: true } }),
  );
  let text = '';
  let usage;
  let finish;
  for await (const part of stream) {
    text += part.choices[0]?.delta?.content ?? '';
    finish = part.choices[0]?.finish_reason ?? finish;
    usage = part.usage ?? usage;
  }
  assert.ok(text.length > 0);
  assert.ok(finish);
  assert.equal(usage.completion_tokens, 8);
});

test('openai: the stream of a scripted engine arrives as it was sent', async (t) => {
  const { engine, router } = await scripted(t);
  const stream = await openaiOf(router).chat.completions.create(chat('m', { stream: true }));
  const parts = [];
  for await (const part of stream) parts.push(part.choices[0]?.delta?.content);
  assert.deepEqual(parts.filter(Boolean), engine.words);
  assert.equal(engine.requests.length, 1);
});

test('openai: completions, embeddings, responses, models', async (t) => {
  const client = openaiOf(await simulated(t));
  const completion = await client.completions.create({ model: 'sim', prompt: 'Once', max_tokens: 4 });
  assert.equal(completion.object, 'text_completion');
  const embeddings = await client.embeddings.create({ model: 'sim', input: 'moon', encoding_format: 'float' });
  assert.ok(embeddings.data[0].embedding.length > 0);
  const response = await client.responses.create({ model: 'sim', input: 'Once', max_output_tokens: 4 });
  assert.ok(response.output_text.length > 0);
  const streamed = await client.responses.create({
    model: 'sim', input: 'Once', max_output_tokens: 4, stream: true,
  });
  const types = [];
  for await (const event of streamed) types.push(event.type);
  assert.equal(types[0], 'response.created');
  assert.equal(types.at(-1), 'response.completed');
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert.deepEqual(ids, ['sim']);
});

test('anthropic: messages, whole and streamed', async (t) => {
  const client = anthropicOf(await simulated(t));
  const ask = { model: 'sim', max_tokens: 8, messages: [{ role: 'user', content: 'What is a moon?' }] };
  const whole = await client.messages.create(ask);
  assert.equal(whole.type, 'message');
  assert.ok(whole.content[0].text.length > 0);
  const final = await client.messages.stream(ask).finalMessage();
  assert.ok(final.content[0].text.length > 0);
  assert.equal(final.usage.output_tokens, 8);
});

test('anthropic: the stream of a scripted engine arrives as it was sent', async (t) => {
  const { engine, router } = await scripted(t);
  const final = await anthropicOf(router).messages
    .stream({ model: 'm', max_tokens: 8, messages: [{ role: 'user', content: 'x' }] })
    .finalMessage();
  assert.equal(final.content[0].text, engine.words.join(''));
});

test('openai: an error of the router is an error of the client, in its own shape', async (t) => {
  const { router } = await scripted(t);
  await assert.rejects(openaiOf(router).chat.completions.create(chat('nope')), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.match(error.error.message, /nope/);
    assert.match(error.error.message, /\bm\b/);
    return true;
  });
});

test('anthropic: an error of the router is an error of the client, in its own shape', async (t) => {
  const { router } = await scripted(t);
  const ask = { model: 'nope', max_tokens: 8, messages: [{ role: 'user', content: 'x' }] };
  await assert.rejects(anthropicOf(router).messages.create(ask), (error) => {
    assert.ok(error instanceof Anthropic.NotFoundError);
    assert.equal(error.error.type, 'error');
    assert.match(error.error.error.message, /nope/);
    return true;
  });
});

test('openai: an error of the engine passes through untouched', async (t) => {
  const { engine, router } = await scripted(t);
  engine.handler = (entry, res) => engine.json(res, 422, {
    error: { message: 'temperature is too hot', type: 'invalid_request_error', code: 'hot' },
  });
  await assert.rejects(openaiOf(router).chat.completions.create(chat('m')), (error) => {
    assert.equal(error.status, 422);
    assert.equal(error.code, 'hot');
    return true;
  });
  assert.equal(engine.requests.length, 1);
});

test('openai: a stream that the client leaves ends at the engine at once', async (t) => {
  const { engine, router } = await scripted(t);
  const never = gate();
  engine.handler = async (entry, res) => {
    const write = engine.stream(res);
    await write(chunk('m', 'first'));
    await never.opened;
  };
  const stream = await openaiOf(router).chat.completions.create(chat('m', { stream: true }));
  for await (const part of stream) {
    assert.equal(part.choices[0].delta.content, 'first');
    break; // leaving the loop aborts
  }
  const entry = await engine.request(0);
  await entry.closed;
  assert.ok(entry.aborted);
  never.open();
});

test('openai: a request that is aborted before its first byte ends at the engine at once', async (t) => {
  const { engine, router } = await scripted(t);
  const never = gate();
  engine.handler = () => never.opened;
  const controller = new AbortController();
  const pending = openaiOf(router).chat.completions.create(chat('m'), { signal: controller.signal });
  const entry = await engine.request(0);
  controller.abort();
  await assert.rejects(pending);
  await entry.closed;
  assert.ok(entry.aborted);
  never.open();
});

test('openai: a stream that the engine breaks off is an error, never a short answer', async (t) => {
  const { engine, router } = await scripted(t);
  engine.handler = async (entry, res) => {
    const write = engine.stream(res);
    await write(chunk('m', 'first'));
    res.socket.resetAndDestroy();
  };
  const stream = await openaiOf(router).chat.completions.create(chat('m', { stream: true }));
  const parts = [];
  await assert.rejects(async () => {
    for await (const part of stream) parts.push(part.choices[0].delta.content);
  });
  assert.deepEqual(parts, ['first']);
});

test('anthropic: a stream that the engine breaks off is an error, never a short answer', async (t) => {
  const { engine, router } = await scripted(t);
  engine.handler = async (entry, res) => {
    const write = engine.stream(res);
    await write({ type: 'message_start', message: { id: 'msg_1', type: 'message', role: 'assistant',
      model: 'm', content: [], stop_reason: null, usage: { input_tokens: 1, output_tokens: 0 } } },
    'message_start');
    res.socket.resetAndDestroy();
  };
  const stream = anthropicOf(router).messages.stream({
    model: 'm', max_tokens: 8, messages: [{ role: 'user', content: 'x' }],
  });
  await assert.rejects(stream.finalMessage());
});

test('curl: a streamed chat ends with [DONE] and names its worker', async (t) => {
  const router = await simulated(t);
  const { stdout } = await promisify(execFile)('curl', ['-sSN', '-i', '-m', '20',
    '-H', 'content-type: application/json',
    '-d', JSON.stringify(chat('sim', { stream: true, max_tokens: 4 })),
    `${router.url}/v1/chat/completions`]);
  assert.match(stdout, /^HTTP\/1\.1 200 /);
  assert.match(stdout, /\r\nx-perilune-worker: a\r\n/i);
  assert.match(stdout, /data: \[DONE\]\n\n$/);
});

test('curl: a body above a megabyte is sent with Expect: 100-continue and arrives', async (t) => {
  const { engine, router } = await scripted(t);
  const body = JSON.stringify(chat('m', { padding: 'x'.repeat(1 << 21) }));
  const child = execFile('curl', ['-sS', '-m', '20', '-H', 'Expect: 100-continue',
    '-H', 'content-type: application/json', '--data-binary', '@-',
    '-o', '/dev/null', '-w', '%{http_code}', `${router.url}/v1/chat/completions`]);
  child.stdin.end(body);
  let code = '';
  for await (const part of child.stdout) code += part;
  assert.equal(code, '200');
  assert.equal((await engine.request(0)).body, body);
});
