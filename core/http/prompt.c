/* A request's prompt and the workers' KV caches: its keys at intake, the match for the decision,
 * what is remembered of where it went, and what the engine said of it in the end. Called by
 * proxy.c on the loop's thread; requests of policies that do not look at caches never come further
 * than pl_prompt_of. */
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "http/request.h"
#include "kv/feed.h"
#include "kv/tokens_cache.h"

pl_active *pl_prompt_reuse(const pl_loop *l)
{
    return l->router->config.assume_kv_reuse || pl_decider_assumes_reuse(l->decider)
               ? l->router->active
               : NULL;
}

/* Who holds what is asked for only when somebody looks at it. */
static bool is_wanted(const pl_loop *l)
{
    if (!l->holdings)
        return false;
    return l->router->config.kv_use == 1 || pl_prompt_reuse(l) ||
           pl_decider_wants_cache(l->decider);
}

/* Paths that put a prompt into an engine's KV cache. */
static bool has_prompt(enum pl_api_kind api)
{
    return api == PL_API_CHAT || api == PL_API_COMPLETIONS || api == PL_API_RESPONSES ||
           api == PL_API_MESSAGES || api == PL_API_GENERATE || api == PL_API_EMBEDDINGS;
}

static const pl_kv_hit *match(void *ctx, uint32_t *stamp)
{
    pl_request *rq = ctx;
    return pl_prompt_match(rq->loop->holdings, rq->prompt, rq->ask.model, stamp);
}

static bool serves_sglang(const pl_model *m)
{
    for (int i = 0; i < m->workers_n; i++)
        if (atomic_load_explicit(&m->workers[i]->engine->kind, memory_order_relaxed) ==
            PL_KIND_SGLANG)
            return true;
    return false;
}

/* The salt; SGLang appends extra_key to it, and keeps a request's adapter apart, which its events
 * do not name. */
static pl_str salt_of(pl_request *rq)
{
    static const pl_str mark = PL_STR_INIT("\x01lora_path=");
    const pl_member *m = rq->scan->members;
    if ((m[PL_MEMBER_EXTRA_KEY].type != PL_JSON_STRING &&
         m[PL_MEMBER_LORA_PATH].type != PL_JSON_STRING) ||
        !serves_sglang(rq->ask.model))
        return rq->cache_salt;
    pl_arena *a = &rq->x->arena;
    pl_str part[4] = {rq->cache_salt,
                      pl_member_string(a, &m[PL_MEMBER_EXTRA_KEY]),
                      {NULL, 0},
                      pl_member_string(a, &m[PL_MEMBER_LORA_PATH])};
    if (part[3].n)
        part[2] = mark;
    pl_str all = {NULL, 0};
    for (int i = 0; i < 4; i++)
        all.n += part[i].n;
    char *to = all.n ? pl_arena_alloc(a, all.n) : NULL;
    if (!to)
        return rq->cache_salt;
    all.p = to;
    for (int i = 0; i < 4; to += part[i++].n)
        if (part[i].n)
            memcpy(to, part[i].p, part[i].n);
    return all;
}

void pl_prompt_of(pl_request *rq)
{
    if (!is_wanted(rq->loop) || !rq->ask.model || !has_prompt(rq->api))
        return;
    pl_prompt *p = pl_arena_alloc(&rq->x->arena, sizeof *p);
    bool exact = false;
    if (!p)
        return;
    rq->kv_salt = salt_of(rq);
    bool any = pl_prompt_read(rq->loop->holdings, rq->ask.model, rq->scan, &rq->x->arena,
                              rq->kv_salt, rq->ask.req.prompt_tokens, p, &exact);
    if (exact) {
        rq->ask.req.prompt_tokens = p->tokens;
        rq->ask.req.exact_tokens = true;
    }
    if (!any)
        return;
    rq->prompt = p;
    rq->ask.match = match;
    rq->ask.match_ctx = rq;
}

/* Whoever publishes is no longer believed. */
static bool is_stale(const pl_request *rq)
{
    bool stale = false;
    for (int i = 0; rq->prompt && i < rq->ask.model->workers_n; i++) {
        int trust =
            atomic_load_explicit(&rq->ask.model->workers[i]->kv_trust, memory_order_relaxed);
        if (trust == PL_KV_LIVE || trust == PL_KV_BEHIND)
            return false;
        stale = stale || trust == PL_KV_STALE;
    }
    return stale;
}

bool pl_prompt_refused(pl_request *rq)
{
    pl_loop *l = rq->loop;
    const struct pl_fault fault = {.kind = PL_INDEX_STALE};
    double seconds;
    if (!pl_decider_wants_degrade(l->decider) || rq->attempts > 0 || !is_stale(rq))
        return false;
    l->vm_used = true;
    if (pl_decide_fault(l->decider, &rq->ask, &fault, &seconds) != PL_REJECT)
        return false;
    pl_relay_error(rq, 503, "index_stale", seconds, "the KV events of model '%.*s' have stopped",
                   PL_FMT(rq->ask.model->id));
    return true;
}

#define USAGE_SAMPLE 16

bool pl_prompt_wants_usage(pl_request *rq)
{
    if (!rq->prompt)
        return false;
    for (int i = 0; i < rq->ask.model->workers_n; i++) {
        int trust =
            atomic_load_explicit(&rq->ask.model->workers[i]->kv_trust, memory_order_relaxed);
        if (trust != PL_KV_LIVE || rq->prompt->size[0].unnamed)
            return true; /* it corrects what is believed of a worker that publishes nothing */
    }
    /* events need no correction: a sample says how good they are */
    return pl_rng_next(&rq->loop->rng) % USAGE_SAMPLE == 0;
}

/* --- token ids from the engines --- */

struct pl_rq_tokens {
    pl_request *rq;
    pl_tokcache_ticket *ticket; /* NULL: nothing is waited for */
    pl_timer timer;             /* the budget */
};

/* A POST /tokenize under way; outlives the request. */
typedef struct tokenizing {
    pl_loop *loop;
    pl_engine *engine; /* referenced */
    pl_tokcache_call *call;
} tokenizing;

static void on_tokenized(void *user, const pl_fetch_result *r)
{
    tokenizing *t = user;
    pl_router *router = t->loop->router;
    bool ok = r->err == 0 && r->status == 200;
    if (ok)
        ok = pl_tokcache_fill(router->tokcache, t->call, r->body);
    else
        pl_tokcache_fail(router->tokcache, t->call);
    pl_count(&t->loop->metrics.tokenize_failed, !ok);
    /* one prompt may be the client's fault, so many are not */
    uint32_t before = ok ? atomic_exchange(&router->tokenize_failures, 0)
                         : atomic_fetch_add(&router->tokenize_failures, 1);
    if (ok && before >= PL_TOKCACHE_FAILURES)
        pl_log(PL_LOG_INFO, "tokenizes", "%s: /tokenize gives token ids", t->engine->name);
    else if (!ok && before + 1 == PL_TOKCACHE_FAILURES)
        pl_log(PL_LOG_WARN, "tokenizes_not",
               "%s: /tokenize gives no token ids (status %d): text goes on in approximate mode",
               t->engine->name, r->status);
    pl_engine_unref(t->engine);
    free(t);
}

/* The model's least busy engine that is up; NULL: none. */
static pl_engine *tokenizer(const pl_request *rq)
{
    pl_engine *best = NULL;
    int32_t least = INT32_MAX;
    uint64_t now = pl_now_ns();
    for (int i = 0; i < rq->ask.model->workers_n; i++) {
        pl_engine *e = rq->ask.model->workers[i]->engine;
        int32_t n = pl_engine_inflight(e);
        if (n < least && pl_engine_why(e, &rq->loop->router->config.decider.breaker, now) == 0) {
            best = e;
            least = n;
        }
    }
    return best;
}

#define TOKENIZE_TIMEOUT_MS 5000 /* the answer may come late: it is for the next ones, then */
#define TOKENIZE_MAX_BYTES  (64u << 20)

static void ask_engine(pl_request *rq, pl_engine *e, pl_tokcache_post *post)
{
    pl_tokcache *cache = rq->loop->router->tokcache;
    pl_pool *pool = pl_loop_pool(rq->loop, e);
    tokenizing *t = pool ? malloc(sizeof *t) : NULL;
    if (t)
        *t = (tokenizing){rq->loop, pl_engine_ref(e), post->call};
    if (!t || !pl_fetch_start(pool, PL_POST, PL_STR("/tokenize"),
                              PL_STR("content-type: application/json\r\n"), pl_buf_str(&post->body),
                              TOKENIZE_TIMEOUT_MS, TOKENIZE_MAX_BYTES, on_tokenized, t)) {
        if (t)
            pl_engine_unref(t->engine);
        free(t);
        pl_tokcache_fail(cache, post->call);
    }
    pl_buf_free(&post->body);
}

/* The ids become the prompt's keys. */
static void take_ids(pl_request *rq, pl_tokens *ids)
{
    size_t n = pl_tokens_count(ids);
    uint32_t *copy = pl_arena_alloc(&rq->x->arena, (n + 1) * sizeof *copy);
    pl_prompt fresh;
    if (copy) {
        pl_tokens_copy(ids, copy);
        if (pl_prompt_tokens(rq->loop->holdings, rq->ask.model, copy, n, &rq->x->arena, rq->kv_salt,
                             &fresh)) {
            *rq->prompt = fresh;
            rq->ask.req.prompt_tokens = fresh.tokens;
            rq->ask.req.exact_tokens = true;
        }
    }
    pl_tokens_release(ids);
}

static void on_ready(void *ctx, int rc, pl_tokens *ids)
{
    pl_rq_tokens *t = ctx;
    pl_request *rq = t->rq;
    t->ticket = NULL;
    pl_wheel_cancel(&rq->loop->wheel, &t->timer);
    if (rc == 0)
        take_ids(rq, ids);
    rq->state = PL_RQ_DECIDING;
    pl_proxy_decide(rq);
}

static void on_budget(pl_timer *timer)
{
    pl_rq_tokens *t = (pl_rq_tokens *)((char *)timer - offsetof(pl_rq_tokens, timer));
    pl_request *rq = t->rq;
    pl_tokcache_leave(t->ticket);
    t->ticket = NULL;
    pl_count(&rq->loop->metrics.tokenize_late, 1);
    rq->state = PL_RQ_DECIDING;
    pl_proxy_decide(rq);
}

/* Do events of a worker of this model need the prompt's ids, and which way can be asked? */
static bool needs_ids(const pl_request *rq, pl_tokcache_api *api)
{
    if (!rq->prompt || !rq->loop->router->tokcache || rq->prompt->sizes_n == 0 ||
        rq->prompt->size[0].keys.kind != PL_KEYS_TEXT)
        return false;
    *api = PL_TOKCACHE_CHAT;
    bool live = false;
    for (int i = 0; i < rq->ask.model->workers_n; i++) {
        const pl_worker_state *w = rq->ask.model->workers[i];
        int trust = atomic_load_explicit(&w->kv_trust, memory_order_relaxed);
        live = live || trust == PL_KV_LIVE || trust == PL_KV_BEHIND;
        /* SGLang tokenizes prompts alone; the simulated engine chats, too */
        if (atomic_load_explicit(&w->engine->kind, memory_order_relaxed) != PL_KIND_VLLM &&
            !(atomic_load_explicit(&w->engine->caps, memory_order_relaxed) & PL_CAP_RETENTION))
            *api = PL_TOKCACHE_PROMPT;
    }
    return live;
}

bool pl_prompt_begin(pl_request *rq)
{
    pl_loop *l = rq->loop;
    pl_tokcache_api api;
    pl_engine *e = needs_ids(rq, &api) ? tokenizer(rq) : NULL;
    pl_rq_tokens *t = e ? calloc(1, sizeof *t) : NULL;
    if (!t)
        return true;
    rq->tokens = t;
    t->rq = rq;
    const pl_tokcache_request r = {.api = api,
                                   .model = rq->ask.model->id,
                                   .body = rq->x->body,
                                   .scan = rq->scan,
                                   .mailbox = &l->mailbox,
                                   .ready = on_ready,
                                   .ctx = t};
    pl_tokcache_answer answer = {0};
    switch (pl_tokcache_get(l->router->tokcache, &r, &answer)) {
    case PL_TOKCACHE_HIT:
        take_ids(rq, answer.ids);
        return true;
    case PL_TOKCACHE_OFF:
        return true;
    case PL_TOKCACHE_ASK:
        pl_count(&l->metrics.tokenize_calls, (uint64_t)answer.calls_n);
        break;
    case PL_TOKCACHE_WAIT:
        break;
    }
    t->ticket = answer.ticket;
    rq->state = PL_RQ_TOKENIZING;
    pl_wheel_arm(&l->wheel, &t->timer, l->router->config.tokenize_ms, on_budget);
    for (int i = 0; i < answer.calls_n; i++)
        ask_engine(rq, e, &answer.calls[i]);
    return false;
}

void pl_prompt_free(pl_request *rq)
{
    pl_rq_tokens *t = rq->tokens;
    if (t && t->ticket) {
        pl_wheel_cancel(&rq->loop->wheel, &t->timer);
        pl_tokcache_leave(t->ticket);
    }
    free(t);
    rq->tokens = NULL;
}

/* --- where it went, and what became of it --- */

void pl_prompt_sent(pl_request *rq)
{
    if (rq->loop->router->feed)
        pl_feed_touch(rq->loop->router->feed, rq->worker->slot);
    if (rq->prompt)
        pl_prompt_routed(rq->loop->holdings, rq->prompt, rq->worker, rq->decision.cached_tokens);
}

void pl_prompt_try_failed(pl_request *rq)
{
    if (rq->prompt)
        pl_prompt_failed(rq->loop->holdings, rq->prompt);
}

void pl_prompt_over(pl_request *rq)
{
    if (!rq->prompt)
        return;
    if (rq->usage.prompt_tokens > 0)
        pl_prompt_usage(rq->loop->holdings, rq->prompt, rq->usage.cached_tokens,
                        rq->usage.prompt_tokens, rq->api);
    else if (!rq->first_byte_ns || rq->status >= 400)
        pl_prompt_failed(rq->loop->holdings, rq->prompt);
}
