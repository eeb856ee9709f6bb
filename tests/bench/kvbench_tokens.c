/* From tokens to answer: a prompt's blocks are hashed and matched; also as the router does it, with
 * the keys of what was routed (keys.h). Called by bench_index.c.
 *
 * The blocks of the stream become blocks of 16 tokens here, which an index of its own has by their
 * hashes. A prompt's tokens are written just before they are hashed, as by the parser of a request;
 * what that takes is measured alone and subtracted. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kv/keys.h"
#include "kvbench_rig.h"

enum { TOKENS = 16, BLOCKS = 1024 };
typedef enum way { WRITE, HASH, HASH_MATCH, KEYS, KEYS_MATCH, WAYS } way;

typedef struct prompts {
    kvbench_rig *b;
    pl_keys_space space;
    uint32_t tokens[BLOCKS * TOKENS];
    uint64_t local[BLOCKS], sink;
    pl_arena arena;
} prompts;

static void write_tokens(uint32_t *to, uint64_t block)
{
    uint32_t low = (uint32_t)block, high = (uint32_t)(block >> 32);
    for (uint32_t i = 0; i < TOKENS; i++)
        to[i] = ((low ^ i * 0x9e3779b9u) * 0x85ebca6bu ^ high) >> 8;
}

static uint64_t local_of(prompts *p, uint64_t block)
{
    uint64_t local;
    write_tokens(p->tokens, block);
    if (pl_block_hash(&p->space.block, p->tokens, TOKENS, &local, NULL, 1) != 1)
        kvbench_die("a block without a hash");
    return local;
}

static void load(prompts *p)
{
    const kvbench_ops *s = &p->b->section[KVBENCH_LOAD];
    uint64_t local[BLOCKS];
    kvbench_renew(p->b);
    for (const uint64_t *at = s->p; at < s->end;) {
        kvbench_op op = kvbench_next(&at);
        for (uint32_t i = 0; i < op.n; i++)
            local[i] = local_of(p, op.p[i]);
        if (pl_index_store(p->b->ix, p->b->space, (int)op.worker, PL_TIER_DEVICE,
                           op.has_parent ? &op.aux : NULL, op.p + op.n, local, op.n) != 0)
            kvbench_die("a store failed");
    }
}

static int answer(prompts *p, const kvbench_op *op, way how)
{
    kvbench_rig *b = p->b;
    pl_keys k = {0};
    if (how == HASH || how == HASH_MATCH) {
        if (pl_block_hash(&p->space.block, p->tokens, op->n * TOKENS, p->local, NULL, BLOCKS) < 0)
            kvbench_die("hash");
        p->sink ^= p->local[op->n - 1];
        return how == HASH ? 0 : pl_index_match(b->reader, b->space, p->local, op->n, b->out, 4096);
    }
    pl_arena_reset(&p->arena);
    if (pl_keys_of_tokens(&p->space, p->tokens, op->n * TOKENS, &p->arena, &k) != 0)
        kvbench_die("out of memory");
    p->sink ^= k.key[k.n - 1];
    return how == KEYS ? 0 : pl_index_match(b->reader, b->space, k.local, k.local_n, b->out, 4096);
}

/* ns a query. */
static double pass(prompts *p, int which, way how, bool checked)
{
    const kvbench_ops *s = &p->b->section[which];
    uint64_t start = kvbench_cpu_ns();
    for (const uint64_t *at = s->p; at < s->end;) {
        kvbench_op op = kvbench_next(&at);
        for (uint32_t i = 0; i < op.n; i++)
            write_tokens(p->tokens + i * TOKENS, op.p[i]);
        p->sink ^= p->tokens[op.n];
        if (how == WRITE)
            continue;
        int n = answer(p, &op, how);
        if (checked && (how == HASH_MATCH || how == KEYS_MATCH) &&
            kvbench_answer_sum(p->b->out, n, 1) != op.aux)
            kvbench_die("a wrong answer");
    }
    return (double)(kvbench_cpu_ns() - start) / (double)s->from->ops;
}

void kvbench_tokens(kvbench_rig *b)
{
    static const uint32_t depth[] = {1, 16, 64, 256, 1024};
    const kvbench_peer *peer = kvbench_peer_of(b->stream.workers);
    const pl_str none = {0};
    prompts *p = calloc(1, sizeof *p);
    if (!p || pl_keys_space_init(&p->space, none, TOKENS, false, none, none, 0) != 0)
        kvbench_die("out of memory");
    p->b = b;
    load(p);
    printf("\n| blocks of 16 tokens | hash ns | then match | keys ns | then match | "
           "bar, multiples | bar, plain |\n|---|---|---|---|---|---|---|\n");
    for (int q = 1; q < 5; q++) {
        double v[WAYS][KVBENCH_REPS], ns[WAYS], multiples = 0, plain = 0;
        for (int rep = 0; rep < KVBENCH_REPS; rep++)
            for (way w = 0; w < WAYS; w++) {
                pass(p, KVBENCH_Q1 + q, w, rep == 0);
                v[w][rep] = pass(p, KVBENCH_Q1 + q, w, false);
            }
        for (way w = 0; w < WAYS; w++)
            ns[w] = kvbench_quantile(v[w], KVBENCH_REPS, 0.5) - (w == WRITE ? 0 : ns[WRITE]);
        if (peer) { /* the naive index needs no memory for one block: it says how fast this is */
            multiples = ns[HASH] + b->naive_query[q] * peer->query[q] / peer->naive[q] / 1.5;
            plain = ns[HASH] + peer->query[q] * b->naive_query[0] / peer->naive[0] / 1.5;
        }
        printf("| %u | %.0f | %.0f | %.0f | %.0f | %.0f | %.0f |\n", depth[q], ns[HASH],
               ns[HASH_MATCH], ns[KEYS], ns[KEYS_MATCH], multiples, plain);
    }
    if (p->sink == 1)
        puts("");
    pl_arena_free(&p->arena);
    free(p);
    kvbench_renew(b);
    kvbench_run(b, KVBENCH_LOAD, false);
}
