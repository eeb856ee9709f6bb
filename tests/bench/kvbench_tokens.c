/* From tokens to answer: a prompt's blocks are hashed and matched. Called by bench_index.c. */
#include <stdio.h>
#include <stdlib.h>

#include "base/rng.h"
#include "kv/block_hash.h"
#include "kvbench_rig.h"

void kvbench_tokens(kvbench_rig *b)
{
    pl_block_space hashing;
    uint32_t *tokens = malloc(1024 * 16 * sizeof *tokens);
    uint64_t *local = malloc(1024 * sizeof *local);
    pl_rng rng = {.state = 7};
    const kvbench_peer *p = kvbench_peer_of(b->stream.workers);
    if (!tokens || !local ||
        pl_block_space_init(&hashing, 16, false, (pl_str){0}, (pl_str){0}) != 0)
        kvbench_die("out of memory");
    for (int i = 0; i < 1024 * 16; i++)
        tokens[i] = (uint32_t)pl_rng_below(&rng, 150000);
    printf("\n| blocks of 16 tokens | hash ns | hash, then match ns | of it the match | peer's "
           "match / 1.5 |\n|---|---|---|---|---|\n");
    static const uint32_t depth[] = {1, 16, 64, 256, 1024};
    for (int q = 1; q < 5; q++) {
        double h[KVBENCH_REPS], all[KVBENCH_REPS];
        const kvbench_ops *s = &b->section[KVBENCH_Q1 + q];
        for (int rep = 0; rep < KVBENCH_REPS; rep++) {
            uint64_t start = kvbench_cpu_ns(), sink = 0;
            for (uint64_t i = 0; i < s->from->ops; i++) {
                if (pl_block_hash(&hashing, tokens, depth[q] * 16, local, NULL, 1024) < 0)
                    kvbench_die("hash");
                sink ^= local[i % depth[q]];
                tokens[0]++;
            }
            h[rep] = (double)(kvbench_cpu_ns() - start) / (double)s->from->ops;
            start = kvbench_cpu_ns();
            for (const uint64_t *at = s->p; at < s->end;) {
                kvbench_op op = kvbench_next(&at);
                if (pl_block_hash(&hashing, tokens, op.n * 16, local, NULL, 1024) < 0)
                    kvbench_die("hash");
                sink ^= local[0];
                tokens[0]++;
                sink ^= (uint64_t)pl_index_match(b->reader, b->space, op.p, op.n, b->out, 4096);
            }
            all[rep] = (double)(kvbench_cpu_ns() - start) / (double)s->from->ops;
            if (sink == 1)
                puts("");
        }
        double hash = kvbench_quantile(h, KVBENCH_REPS, 0.5),
               total = kvbench_quantile(all, KVBENCH_REPS, 0.5), bar = 0;
        if (p)
            bar = b->naive_query[q] * p->query[q] / p->naive[q] / 1.5;
        printf("| %u | %.0f | %.0f | %.0f | %.0f |\n", depth[q], hash, total, total - hash, bar);
    }
    free(tokens);
    free(local);
}
