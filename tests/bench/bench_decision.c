/* What a whole decision costs when the prompt's token ids are there already: hash them, match the
 * index, fill the records, ask the policy, judge its answer. Beside it its parts: the hashing
 * alone, the match alone, the decision without either. One thread, real clock.
 *
 * 64 workers (or WORKERS), each of which holds some prefixes of many prompts, as published events
 * would have put them into the index; loads change before each decision. Prompts of 16,384 tokens
 * (or TOKENS), of which half are held by somebody. Prints a markdown table.
 * Usage: bench_decision [POLICY [WORKERS [TOKENS]]] */
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/log.h"
#include "kv/holdings.h"

#define PAGE    16
#define PROMPTS 64
#define ROUNDS  20000
#define WARM_UP 2000

typedef struct bench {
    int workers, tokens;
    pl_fleet *fleet;
    pl_view *view;
    const pl_model *model;
    pl_shared *shared;
    pl_policy_stats stats;
    pl_decider *decider;
    pl_holdings *holdings;
    pl_holdings_loop *loop;
    pl_block_space space;
    uint32_t *ids; /* PROMPTS * tokens */
    uint64_t *local;
    pl_arena arena;
    pl_prompt prompt;
    pl_ask ask;
    pl_rng rng;
    uint64_t sink; /* keeps results from being optimised away */
} bench;

static void die(const char *what)
{
    fprintf(stderr, "bench_decision: %s\n", what);
    exit(1);
}

static void drop_view(void *ctx, pl_view *v)
{
    (void)ctx;
    pl_view_unref(v);
}

static void open_fleet(bench *b)
{
    const pl_str model = PL_STR("bench");
    b->fleet = pl_fleet_new(drop_view, NULL);
    for (int i = 0; i < b->workers && b->fleet; i++) {
        char url[64];
        pl_engine *e;
        snprintf(url, sizeof url, "http://10.0.%d.%d:8000", i / 250, i % 250 + 1);
        const pl_engine_spec s = {
            .url = pl_str_c(url), .models = &model, .models_n = 1, .block_tokens = PAGE};
        if (pl_fleet_add(b->fleet, &s, &e, NULL) != 0)
            die("cannot add an engine");
        atomic_store(&e->health, PL_HEALTH_UP);
        atomic_store(&e->workers[0].block_tokens, PAGE);
        atomic_store(&e->workers[0].kv_trust, PL_KV_LIVE);
        pl_engine_unref(e);
    }
    b->view = b->fleet ? pl_fleet_view(b->fleet) : NULL;
    b->model = b->view ? pl_view_only_model(b->view) : NULL;
    if (!b->model)
        die("out of memory");
}

static void open_decider(bench *b, const char *policy)
{
    pl_policy_source *src;
    pl_errbuf eb;
    pl_vm_error err;
    pl_vm *vm;
    pl_decider_options o;
    pl_decider_options_default(&o);
    b->shared = pl_shared_new();
    const pl_vm_options vo = {.loops = 1,
                              .seed = 1,
                              .memory_bytes = 64u << 20,
                              .shared = b->shared,
                              .clock = pl_clock_real()};
    if (pl_policy_source_load(pl_str_c(policy), NULL, &src, &eb) != 0)
        die(eb.text);
    if (pl_vm_new(src, &vo, &vm, &err) != 0 || pl_vm_init(vm, NULL, &err) != 0)
        die(err.message);
    pl_policy_source_unref(src);
    b->decider = pl_decider_new(&o, &b->stats);
    if (!b->decider)
        die("out of memory");
    pl_decider_swap(b->decider, vm, 1);
}

/* Half of the prompts are held, each by one to four workers, by as much as it comes. */
static void fill_index(bench *b)
{
    const pl_str none = {NULL, 0};
    size_t blocks = (size_t)b->tokens / PAGE;
    uint64_t name = 1, *names = malloc(blocks * sizeof *names);
    pl_index *ix = pl_holdings_index(b->holdings);
    pl_index_space space = pl_index_space_open(ix, PL_STR("*"), PAGE, false, none);
    b->ids = malloc((size_t)PROMPTS * (size_t)b->tokens * sizeof *b->ids);
    b->local = malloc(blocks * sizeof *b->local);
    if (!space || !names || !b->ids || !b->local)
        die("out of memory");
    for (size_t i = 0; i < (size_t)PROMPTS * (size_t)b->tokens; i++)
        b->ids[i] = (uint32_t)pl_rng_below(&b->rng, 128000);
    for (int p = 0; p < PROMPTS; p += 2) {
        const uint32_t *ids = b->ids + (size_t)p * (size_t)b->tokens;
        if (pl_block_hash(&b->space, ids, (size_t)b->tokens, b->local, NULL, blocks) < 0)
            die("hashing failed");
        for (uint32_t k = pl_rng_below(&b->rng, 4) + 1; k > 0; k--) {
            int slot = (int)pl_rng_below(&b->rng, (uint32_t)b->workers);
            size_t n = pl_rng_below(&b->rng, (uint32_t)blocks) + 1;
            for (size_t i = 0; i < n; i++)
                names[i] = name++;
            if (pl_index_store(ix, space, slot, PL_TIER_DEVICE, NULL, names, b->local, n) != 0)
                die("storing failed");
        }
    }
    while (pl_index_maintain(ix))
        ;
    free(names);
}

static const uint32_t *any_prompt(bench *b)
{
    return b->ids + (size_t)pl_rng_below(&b->rng, PROMPTS) * (size_t)b->tokens;
}

static void stir(bench *b)
{
    pl_worker_state *w = b->model->workers[pl_rng_below(&b->rng, (uint32_t)b->workers)];
    atomic_store(&w->inflight, (int32_t)pl_rng_below(&b->rng, 50));
    atomic_store(&w->queued_prefill_tokens, pl_rng_below(&b->rng, 50000));
    atomic_store(&w->decode_blocks, pl_rng_below(&b->rng, 20000));
}

/* --- what is measured --- */

static const pl_kv_hit *match(void *ctx, uint32_t *stamp)
{
    bench *b = ctx;
    return pl_prompt_match(b->loop, &b->prompt, b->model, stamp);
}

static void keys(bench *b, const uint32_t *ids)
{
    pl_prompt_tokens(b->loop, b->model, ids, (size_t)b->tokens, &b->arena, (pl_str){NULL, 0},
                     &b->prompt);
    b->sink += b->prompt.size[0].keys.n;
}

static void decide(bench *b)
{
    pl_decision d;
    b->ask.strings.seed = pl_rng_next(&b->rng);
    pl_decide(b->decider, &b->ask, &d);
    if (d.kind != PL_DECIDED || !d.by_policy)
        die("the policy failed");
    b->sink += (uint64_t)d.worker->slot;
}

enum { WHOLE, KEYS, HASH, MATCH, BLIND, PARTS };
static const char *const titles[PARTS] = {
    "whole decision", "of it: the prompt's keys (local hashes and chain)", "the local hashes alone",
    "the match alone", "the decision alone (no keys, no match)"};

static uint64_t measure(bench *b, int part)
{
    const uint32_t *ids = any_prompt(b);
    uint32_t stamp;
    stir(b);
    pl_arena_reset(&b->arena);
    if (part == MATCH)
        keys(b, ids);
    b->ask.match = part == BLIND ? NULL : match;
    uint64_t from = pl_now_ns();
    if (part == WHOLE || part == KEYS)
        keys(b, ids);
    if (part == HASH)
        b->sink += (uint64_t)pl_block_hash(&b->space, ids, (size_t)b->tokens, b->local, NULL,
                                           (size_t)b->tokens / PAGE);
    if (part == MATCH)
        b->sink += match(b, &stamp)[0].device;
    if (part == WHOLE || part == BLIND)
        decide(b);
    return pl_now_ns() - from;
}

static int ascending(const void *x, const void *y)
{
    uint64_t a = *(const uint64_t *)x, b = *(const uint64_t *)y;
    return (a > b) - (a < b);
}

/* Interleaved, so that all parts see the same machine. */
static void report(bench *b)
{
    static uint64_t ns[PARTS][ROUNDS];
    for (int i = -WARM_UP; i < ROUNDS; i++)
        for (int p = 0; p < PARTS; p++) {
            uint64_t t = measure(b, p);
            if (i >= 0)
                ns[p][i] = t;
        }
    printf("%s, %d workers, %d token ids, us:\n\n| | p50 | p99 |\n|---|---|---|\n",
           pl_decider_policy_name(b->decider), b->workers, b->tokens);
    for (int p = 0; p < PARTS; p++) {
        qsort(ns[p], ROUNDS, sizeof ns[p][0], ascending);
        printf("| %s | %.1f | %.1f |\n", titles[p], (double)ns[p][ROUNDS / 2] / 1e3,
               (double)ns[p][ROUNDS * 99 / 100] / 1e3);
    }
    fprintf(stderr, "(%llx)\n", (unsigned long long)b->sink);
}

int main(int argc, char **argv)
{
    static bench b;
    const pl_str none = {NULL, 0};
    pl_holdings_options o;
    pl_log_init(PL_LOG_WARN, 0);
    b.workers = argc > 2 ? atoi(argv[2]) : 64;
    b.tokens = argc > 3 ? atoi(argv[3]) : 16384;
    if (b.workers < 1 || b.workers > PL_MAX_WORKERS || b.tokens < PAGE || b.tokens > 1 << 20)
        die("usage: bench_decision [POLICY [WORKERS [TOKENS]]]");
    b.rng.state = 1;
    pl_holdings_options_default(&o);
    if (pl_holdings_new(&o, &b.holdings) != 0 || !(b.loop = pl_holdings_loop_new(b.holdings)) ||
        pl_block_space_init(&b.space, PAGE, false, none, none) != 0)
        die("out of memory");
    open_fleet(&b);
    open_decider(&b, argc > 1 ? argv[1] : "prefix_seconds");
    fill_index(&b);
    b.ask.model = b.model;
    b.ask.match_ctx = &b;
    b.ask.req = (struct pl_req){.prompt_tokens = b.tokens,
                                .max_tokens = -1,
                                .expected_output_tokens = -1,
                                .choices = 1,
                                .stream = true,
                                .exact_tokens = true};
    b.ask.strings = (pl_request_view){
        .model = b.model->id, .path = PL_STR_INIT("/v1/completions"), .id = PL_STR_INIT("r-1")};
    report(&b);
    pl_arena_free(&b.arena);
    pl_decider_free(b.decider);
    pl_shared_free(b.shared);
    pl_holdings_loop_free(b.loop);
    pl_holdings_free(b.holdings);
    pl_view_unref(b.view);
    pl_fleet_free(b.fleet);
    free(b.ids);
    free(b.local);
    return 0;
}
