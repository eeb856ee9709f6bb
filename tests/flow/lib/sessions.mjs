// A router in front of fake SGLang servers that hold sessions, and requests of sessions.
import { startRouter, until, usable } from './proc.mjs';
import { sglang } from './sglang.mjs';
import { get, post } from './http.mjs';

export const CHAT = '/v1/chat/completions';
export const reply = 'The moon is a rock.'; // what the fakes say
export const say = (...texts) => texts.map((content, i) => ({ role: i % 2 ? 'assistant' : 'user', content }));
export const control = (id, action, extra = {}) => ({
  nvext: { session_control: { session_id: id, ...(action && { action }), ...extra } },
});
export const delta = (id, action, extra = {}) => control(id, action, { history: 'delta', ...extra });

// cap: how many requests an engine takes at once.
export async function fleet(t, { n = 2, options = {}, cap = 0, config = {}, ...rest } = {}) {
  const engines = [];
  for (let i = 0; i < n; i++) engines.push(await sglang(t, options));
  const router = await startRouter(t, {
    config: { engines: engines.map(({ url }, i) => ({ name: `e${i}`, url, max_inflight: cap })), ...config }, ...rest,
  });
  await usable(router, n);
  await until('capabilities', async () => {
    const list = (await get(`${router.admin}/engines`)).json.engines;
    return list.every((e) => e.kind === 'sglang' && (e.capabilities.includes('streaming_sessions')
      === (options.info?.enable_streaming_session ?? true)));
  });
  const ask = (body, opt) => post(`${router.url}${CHAT}`, { model: 'm', ...body }, opt);
  const all = (what) => engines.flatMap((e) => e[what]);
  return { engines, router, ask, all };
}

export const sessions = async (router) => (await get(`${router.admin}/sessions`)).json.sessions;
