// What the tests of cache-aware routing share: engines that publish, a policy that looks at caches,
// and what the router says that it knows.
import assert from 'node:assert/strict';
import { scratch, startEngine, startRouter, until, usable, writeFile } from './proc.mjs';
import { fakeEngine, usage } from './fake.mjs';
import { get, post } from './http.mjs';
import { KvPublisher } from './publisher.mjs';

export const anywhere = 'tcp://127.0.0.1:*';

// Least of what is still to be computed; ties go to the first.
const nearest = `return { api = 1, name = "nearest",
  score = function(req, w) return req.prompt_tokens - w.cached_tokens + w.index / 1000 end }`;
const blind = 'return { api = 1, name = "blind", score = function(req, w) return w.index end }';

export function policy(t, text = nearest) {
  return writeFile(scratch(t), 'policy.lua', text);
}
export const blindPolicy = (t) => policy(t, blind);

// Token ids that share nothing with those of another seed.
export const prompt = (seed, n = 160) => Array.from({ length: n }, (_, i) => seed * 10000 + i);

export const startSim = (t, flags = []) => startEngine(t, {
  flags: ['--preset', 'instant', '--kv-events', anywhere, '--kv-events-replay', anywhere, ...flags],
});
export const truth = async (engine, r = 0) => (await get(`${engine.url}/sim/kv`)).json.ranks[r];
export const act = async (engine, action, more = {}) => {
  const answer = await post(`${engine.url}/sim/kv`, { action, ...more });
  assert.equal(answer.status, 200, answer.text);
};

// The router in front of simulated engines: {name: program}.
export const startKvRouter = async (t, engines, { text, ...options } = {}) => startRouter(t, {
  engines: Object.fromEntries(Object.entries(engines).map(([name, e]) => [name, e.url])),
  policy: policy(t, text),
  ...options,
});

export const indexOf = async (router) => (await get(`${router.admin}/index`)).json;
export const workerOf = async (router, name) => (await indexOf(router)).workers.find((w) => w.name === name);
export const untilTrust = (router, name, trust) => until(`${name} is ${trust}`,
  async () => (await workerOf(router, name))?.trust === trust);
export const untilState = (router, name, state) => until(`events of ${name}: ${state}`,
  async () => (await workerOf(router, name))?.events?.state === state);

// Tokens of a prompt that each engine holds on its device, by name and rank: { 'a': 32, 'b/1': 16 }.
export async function holders(router, ids, more = {}) {
  const answer = await post(`${router.admin}/query`, { token_ids: ids, ...more });
  assert.equal(answer.status, 200, answer.text);
  const found = {};
  for (const instance of Object.values(answer.json.instances)) {
    for (const [rank, tokens] of Object.entries(instance.dp)) {
      if (tokens > 0) found[Number(rank) ? `${instance.engine}/${rank}` : instance.engine] = tokens;
    }
  }
  return found;
}
export const untilHeld = (router, ids, want, more) => until(`held: ${JSON.stringify(want)}`, async () => {
  const found = await holders(router, ids, more);
  return JSON.stringify(Object.entries(found).sort()) === JSON.stringify(Object.entries(want).sort());
});

export async function explain(router, body, path = '/v1/completions') {
  const answer = await post(`${router.admin}/explain?path=${path}`, body);
  assert.equal(answer.status, 200, answer.text);
  return answer.json;
}

export async function complete(at, ids, more = {}) {
  const answer = await post(`${at.url}/v1/completions`, { prompt: ids, max_tokens: 1, ...more });
  assert.equal(answer.status, 200, answer.text);
  return {
    worker: answer.headers['x-perilune-worker'],
    cached: answer.json.usage?.prompt_tokens_details?.cached_tokens,
  };
}

// A fake engine; cached(entry) says what its usage tells: { prompt, cached } (undefined: nothing).
export async function quietEngine(t, { cached = () => undefined, ...options } = {}) {
  const fake = await fakeEngine(t, options);
  fake.cached = cached;
  fake.handler = (entry, res) => {
    const n = fake.cached(entry);
    const text = { choices: [{ index: 0, text: 'x', message: { role: 'assistant', content: 'x' } }] };
    const told = n && { ...usage(n.prompt, 1, n.cached), ...(n.cached === undefined && { prompt_tokens_details: null }) };
    fake.json(res, 200, { ...text, ...(told && { usage: told }) });
  };
  return fake;
}

// A fake engine with an independent publisher in front of it; its entry for the config's engines.
export async function published(t, name, options = {}, more = {}) {
  const fake = await quietEngine(t);
  const pub = await KvPublisher.open(t, options);
  const entry = {
    name,
    url: fake.url,
    kv_events: {
      mode: 'connect',
      endpoint: pub.endpoint,
      ...(options.replay ? { replay: pub.replayEndpoint } : {}),
      ...(options.topic ? { topic: options.topic } : {}),
    },
    ...more,
  };
  return { fake, pub, entry };
}

export async function startPublished(t, list, { config = {}, text, ...options } = {}) {
  const router = await startRouter(t, {
    policy: policy(t, text), config: { engines: list.map((e) => e.entry), ...config }, ...options,
  });
  await usable(router, list.length);
  await Promise.all(list.map((e) => e.pub.subscribed()));
  return router;
}
