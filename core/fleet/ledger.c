/* The ledger: see ledger.h. Called by the loops for each request, on any thread. Counts are taken
 * back with sequentially consistent operations: the waiting room (queue.c) relies on "count goes
 * down, then look whether somebody waits" against "stand in line, then look at the counts". */
#include "fleet/ledger.h"

#include <math.h>

#include "fleet/engine.h"

/* Beyond any prompt; keeps sums far from overflow. */
#define MAX_PROMPT_TOKENS 1e12

static int64_t whole(double tokens)
{
    return tokens >= 1 ? (int64_t)fmin(tokens, MAX_PROMPT_TOKENS) : 0;
}

static int64_t blocks_of(const pl_ticket *t)
{
    return (t->tokens + t->block_tokens - 1) / t->block_tokens;
}

void pl_ticket_begin(pl_ticket *t, pl_worker_state *w, const pl_load *load)
{
    int32_t block = atomic_load_explicit(&w->block_tokens, memory_order_relaxed);
    bool stream = load->stream;
    t->worker = w;
    t->tokens = whole(load->prompt_tokens);
    t->prefill_tokens = t->tokens - whole(load->cached_tokens);
    if (t->prefill_tokens < 0)
        t->prefill_tokens = 0;
    t->block_tokens = block > 0 ? block : PL_LEDGER_BLOCK_TOKENS;
    t->base_blocks = blocks_of(t);
    t->active = (pl_active_hold){NULL, NULL, NULL};
    int64_t set =
        load->active ? pl_active_begin(load->active, w, &load->keys, &t->active, NULL) : 0;
    t->blocks = set < t->base_blocks ? t->base_blocks - set : 0;
    t->base_blocks -= t->blocks; /* from now on: those that the set counts */
    t->stream = stream;
    t->first_token = false;
    atomic_fetch_add(&w->inflight, 1);
    if (stream)
        atomic_fetch_add_explicit(&w->streams, 1, memory_order_relaxed);
    if (t->prefill_tokens)
        atomic_fetch_add(&w->queued_prefill_tokens, t->prefill_tokens);
    atomic_fetch_add_explicit(&w->decode_blocks, t->blocks, memory_order_relaxed);
    atomic_fetch_add_explicit(&w->requests, 1, memory_order_relaxed);
}

static void average(_Atomic double *a, double sample)
{
    double old = atomic_load_explicit(a, memory_order_relaxed), fresh;
    do
        fresh = old > 0 ? old + (sample - old) * PL_LEDGER_EWMA_SHARE : sample;
    while (!atomic_compare_exchange_weak_explicit(a, &old, fresh, memory_order_relaxed,
                                                  memory_order_relaxed));
}

static void prefill_done(pl_ticket *t)
{
    if (t->prefill_tokens)
        atomic_fetch_sub(&t->worker->queued_prefill_tokens, t->prefill_tokens);
    t->prefill_tokens = 0;
}

void pl_ticket_first_token(pl_ticket *t, double ttft_seconds)
{
    if (!t->worker || t->first_token)
        return;
    int64_t tokens = t->prefill_tokens;
    prefill_done(t);
    t->first_token = true;
    if (!(ttft_seconds > 0) || !isfinite(ttft_seconds))
        return;
    average(&t->worker->ttft_seconds, ttft_seconds);
    if (tokens >= PL_LEDGER_MIN_RATE_TOKENS)
        average(&t->worker->prefill_tokens_per_second, (double)tokens / ttft_seconds);
}

void pl_ticket_output(pl_ticket *t, int64_t n)
{
    if (!t->worker || n <= 0)
        return;
    t->tokens += n;
    int64_t more = blocks_of(t) - t->base_blocks - t->blocks;
    if (more <= 0)
        return;
    t->blocks += more;
    atomic_fetch_add_explicit(&t->worker->decode_blocks, more, memory_order_relaxed);
}

void pl_ticket_end(pl_ticket *t)
{
    pl_worker_state *w = t->worker;
    if (!w)
        return;
    prefill_done(t);
    atomic_fetch_sub_explicit(&w->decode_blocks, t->blocks, memory_order_relaxed);
    t->blocks = 0;
    pl_active_end(&t->active);
    if (t->stream)
        atomic_fetch_sub_explicit(&w->streams, 1, memory_order_relaxed);
    atomic_fetch_sub(&w->inflight, 1);
    t->worker = NULL;
}

int32_t pl_engine_inflight(const pl_engine *e)
{
    int32_t sum = 0;
    for (int i = 0; i < e->workers_n; i++)
        sum += atomic_load(&e->workers[i].inflight);
    return sum;
}

int64_t pl_engine_queued_prefill_tokens(const pl_engine *e)
{
    int64_t sum = 0;
    for (int i = 0; i < e->workers_n; i++)
        sum += atomic_load(&e->workers[i].queued_prefill_tokens);
    return sum;
}

bool pl_worker_at_capacity(const pl_worker_state *w)
{
    const pl_engine *e = w->engine;
    if (e->max_inflight > 0 && pl_engine_inflight(e) >= e->max_inflight)
        return true;
    return e->max_queued_prefill_tokens > 0 &&
           pl_engine_queued_prefill_tokens(e) >= e->max_queued_prefill_tokens;
}
