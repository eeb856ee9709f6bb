/* A request's prompt and the workers' KV caches: its keys at intake, the match for the decision,
 * what is remembered of where it went, and what the engine said of it in the end. Called by
 * proxy.c on the loop's thread; requests of policies that do not look at caches never come further
 * than pl_prompt_of. */
#include "http/request.h"
#include "kv/feed.h"

/* Who holds what is asked for only when somebody looks at it. */
static bool is_wanted(const pl_loop *l)
{
    if (!l->holdings)
        return false;
    return l->router->config.kv_use == 1 || pl_decider_wants_cache(l->decider);
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

void pl_prompt_of(pl_request *rq)
{
    if (!is_wanted(rq->loop) || !rq->ask.model || !has_prompt(rq->api))
        return;
    pl_prompt *p = pl_arena_alloc(&rq->x->arena, sizeof *p);
    bool exact = false;
    if (!p)
        return;
    bool any = pl_prompt_read(rq->loop->holdings, rq->ask.model, rq->scan, &rq->x->arena,
                              rq->cache_salt, rq->ask.req.prompt_tokens, p, &exact);
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
                        rq->usage.prompt_tokens);
    else if (!rq->first_byte_ns || rq->status >= 400)
        pl_prompt_failed(rq->loop->holdings, rq->prompt);
}
