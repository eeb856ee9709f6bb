// Replays scenario.jsonl against a router: a lead agent starts five sub-agents one after the other,
// each of which talks for 9 to 15 turns and is done. Every turn resends its whole conversation, as
// OpenAI clients do. Called by run.sh; needs Node 18 or newer and no packages.
//
//   node replay.mjs ROUTER_URL ENGINE_URL MODE SPEED CSV
//
// MODE `sessions` opens a session for each sub-agent and closes it with its last turn; `plain` sends
// the same requests without. Writes seconds,kv_usage,held_tokens,event to CSV and prints the share
// of the KV cache in use as a chart, with the share of prompt tokens that were found in the cache.
import http from 'node:http';
import { readFileSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

const [router, engine, mode, speedText, csv] = process.argv.slice(2);
const speed = Number(speedText);
const scenario = readFileSync(join(dirname(fileURLToPath(import.meta.url)), 'scenario.jsonl'), 'utf8')
  .trim().split('\n').map((line) => JSON.parse(line));

const agent = new http.Agent({ keepAlive: true });
function request(url, body) {
  return new Promise((resolve, reject) => {
    const req = http.request(url, { method: body ? 'POST' : 'GET', agent }, (res) => {
      let text = '';
      res.setEncoding('utf8');
      res.on('data', (part) => { text += part; });
      res.on('end', () => resolve({ status: res.statusCode, text }));
      res.on('error', reject);
    });
    req.on('error', reject);
    req.end(body && JSON.stringify(body));
  });
}

// Text of about n tokens that is the same for the same name: a token of the simulated engine is four bytes.
function text(name, n) {
  const word = `${name.replace(/\W/g, '')} `;
  return word.repeat(Math.ceil((n * 4) / word.length)).slice(0, n * 4 - 1);
}

const start = Date.now();
const seconds = () => ((Date.now() - start) / 1000) * speed;
const samples = [];
let event = '';
async function sample() {
  const { text: page } = await request(`${engine}/metrics`);
  const value = (name) => Number(new RegExp(`^sglang[:_]${name}\\b.* (\\S+)$`, 'm').exec(page)?.[1] ?? NaN);
  samples.push({ at: seconds(), usage: value('kv_physical_usage'), held: value('streaming_session_held_tokens'), event });
  event = '';
}

let prompt = 0;
let cached = 0;
const replies = new Map(); // "sub0.o3" -> what the engine answered
async function turn(step) {
  const messages = step.segs.map(([name, tokens]) => (replies.has(name)
    ? { role: 'assistant', content: replies.get(name) }
    : { role: name.endsWith('.sys') ? 'system' : 'user', content: text(name, tokens) }));
  const body = { model: 'sim', messages, max_tokens: step.out, ignore_eos: true, priority: step.priority };
  if (mode === 'sessions' && step.session !== 'main') {
    body.nvext = { session_control: { session_id: step.session, ...(step.action && { action: step.action }), timeout: 600 } };
  }
  const { status, text: answer } = await request(`${router}/v1/chat/completions`, body);
  if (status !== 200) throw new Error(`${step.id}: ${status} ${answer.slice(0, 300)}`);
  const { choices: [{ message }], usage } = JSON.parse(answer);
  replies.set(`${step.session}.o${step.turn}`, message.content);
  prompt += usage.prompt_tokens;
  cached += usage.prompt_tokens_details?.cached_tokens ?? 0;
}

let running = true;
const sampling = (async () => {
  while (running) {
    await sample();
    await new Promise((resolve) => { setTimeout(resolve, Math.max(20, 1000 / speed)); });
  }
})();
for (const step of scenario) { // each waits for the one before: the scenario is one chain
  await new Promise((resolve) => { setTimeout(resolve, step.delay_ms / speed); });
  if (step.action) event = `${step.action} ${step.session}`;
  await turn(step);
}
await new Promise((resolve) => { setTimeout(resolve, 3000 / speed + 200); });
running = false;
await sampling;
await sample();

writeFileSync(csv, `seconds,kv_usage,held_tokens,event\n${samples
  .map((s) => `${s.at.toFixed(2)},${s.usage.toFixed(4)},${s.held},${s.event}`).join('\n')}\n`);

const columns = 76;
const rows = 10;
const last = samples.at(-1).at;
const highest = Array(columns).fill(0);
for (const s of samples) {
  const column = Math.min(columns - 1, Math.floor((s.at / last) * columns));
  highest[column] = Math.max(highest[column], s.usage);
}
for (let i = 1; i < columns; i++) if (highest[i] === 0) highest[i] = highest[i - 1];
console.log(`\n${mode}: share of the KV cache in use over ${last.toFixed(0)} s (simulated)`);
for (let row = rows; row > 0; row--) {
  const label = `${String(row * 10).padStart(3)}%`;
  console.log(`${label} |${highest.map((u) => (u * rows >= row - 0.5 ? '#' : ' ')).join('')}`);
}
console.log(`  0% +${'-'.repeat(columns)}`);
const peak = Math.max(...samples.map((s) => s.usage));
console.log(`highest ${(peak * 100).toFixed(1)} %, at the end ${(samples.at(-1).usage * 100).toFixed(1)} %, `
  + `prompt tokens found in the cache ${((cached / prompt) * 100).toFixed(1)} %; ${csv}`);
agent.destroy();
