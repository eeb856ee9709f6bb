/* What block and page hashing cost, in tokens per second on one core, beside raw XXH3 over the same
 * bytes. Each figure is the best of interleaved repetitions: what the code can do when the machine
 * lets it. Prints a markdown table per prompt length.
 *
 *   raw XXH3, one run     one hash over the whole prompt: how fast the bytes can be read and mixed
 *   raw XXH3, per block   one call into libxxhash per 64 bytes, sum of results: a naive caller
 *   local, chain, ...     pl_block_hash and pl_page_hash as the router would call them
 *
 * Usage: taskset -c 0 bench_hash [TOKENS ...] */
#include <stdio.h>
#include <stdlib.h>
#include <xxhash.h>

#include "base/clock.h"
#include "base/rng.h"
#include "kv/block_hash.h"
#include "kv/page_hash.h"

#define REPS     40
#define SLICE_NS 2000000u
#define ROW_NS   400000000u /* a row gets no more repetitions after this */

typedef struct bench {
    uint32_t *tokens;
    size_t n;
    uint64_t *local, *seq;
    int64_t *pages;
    pl_page_hasher *hasher;
    uint64_t sink; /* keeps results from being optimised away */
} bench;

typedef struct row {
    const char *name;
    void (*run)(bench *b, const struct row *r);
    uint32_t block_tokens;
    bool eagle, chain;
    uint64_t spent_ns;
    double best; /* tokens per second */
} row;

static void die(const char *what)
{
    fprintf(stderr, "bench_hash: %s\n", what);
    exit(1);
}

static void raw_whole(bench *b, const row *r)
{
    b->sink += XXH3_64bits_withSeed(b->tokens, b->n * sizeof *b->tokens, PL_BLOCK_SEED);
}

static void raw_blocks(bench *b, const row *r)
{
    for (size_t i = 0; i + r->block_tokens <= b->n; i += r->block_tokens)
        b->sink +=
            XXH3_64bits_withSeed(b->tokens + i, r->block_tokens * sizeof *b->tokens, PL_BLOCK_SEED);
}

static void blocks(bench *b, const row *r)
{
    pl_block_space s;
    if (pl_block_space_init(&s, r->block_tokens, r->eagle, PL_STR(""), PL_STR("")) != 0 ||
        pl_block_hash(&s, b->tokens, b->n, b->local, r->chain ? b->seq : NULL, b->n) < 0)
        die("block hashing failed");
    b->sink += b->local[0];
}

static void pages(bench *b, const row *r)
{
    pl_page_space s = {.page_tokens = r->block_tokens, .bigram = r->eagle};
    if (pl_page_hash(b->hasher, &s, NULL, b->tokens, b->n, b->pages, b->n, NULL) < 0)
        die("page hashing failed");
    b->sink += (uint64_t)b->pages[0];
}

static row rows[] = {
    {.name = "raw XXH3, one run", .run = raw_whole, .block_tokens = 0},
    {.name = "raw XXH3, per block of 16", .run = raw_blocks, .block_tokens = 16},
    {.name = "local, 16", .run = blocks, .block_tokens = 16},
    {.name = "local + chain, 16", .run = blocks, .block_tokens = 16, .chain = true},
    {.name = "local, 16, Eagle", .run = blocks, .block_tokens = 16, .eagle = true},
    {.name = "local + chain, 16, Eagle",
     .run = blocks,
     .block_tokens = 16,
     .eagle = true,
     .chain = true},
    {.name = "local + chain, 1", .run = blocks, .block_tokens = 1, .chain = true},
    {.name = "local + chain, 32", .run = blocks, .block_tokens = 32, .chain = true},
    {.name = "local + chain, 64", .run = blocks, .block_tokens = 64, .chain = true},
    {.name = "local + chain, 512", .run = blocks, .block_tokens = 512, .chain = true},
    {.name = "SHA-256 pages, 1", .run = pages, .block_tokens = 1},
    {.name = "SHA-256 pages, 16", .run = pages, .block_tokens = 16},
    {.name = "SHA-256 pages, 64", .run = pages, .block_tokens = 64},
    {.name = "SHA-256 pages, 64, bigram", .run = pages, .block_tokens = 64, .eagle = true},
};
#define ROWS (sizeof rows / sizeof *rows)

static void measure(bench *b, row *r)
{
    uint64_t start = pl_now_ns(), took;
    double runs = 0;
    do {
        r->run(b, r);
        runs++;
    } while ((took = pl_now_ns() - start) < SLICE_NS);
    r->spent_ns += took;
    double rate = runs * (double)b->n / (double)took * 1e9;
    if (rate > r->best)
        r->best = rate;
}

static void prompt(size_t n)
{
    bench b = {.n = n, .hasher = pl_page_hasher_new()};
    b.tokens = malloc(n * sizeof *b.tokens);
    b.local = malloc(n * sizeof *b.local);
    b.seq = malloc(n * sizeof *b.seq);
    b.pages = malloc(n * sizeof *b.pages);
    if (!b.hasher || !b.tokens || !b.local || !b.seq || !b.pages)
        die("out of memory");
    pl_rng rng = {.state = 42};
    for (size_t i = 0; i < n; i++)
        b.tokens[i] = (uint32_t)pl_rng_below(&rng, 150000);
    for (size_t i = 0; i < ROWS; i++)
        rows[i].best = 0, rows[i].spent_ns = 0;
    for (int rep = 0; rep < REPS; rep++)
        for (size_t i = 0; i < ROWS; i++)
            if (rows[i].spent_ns < ROW_NS)
                measure(&b, &rows[i]);
    printf("\n%zu tokens, %zu KiB:\n\n| what, tokens in a block | G tokens/s | GB/s | of raw |\n"
           "|---|---|---|---|\n",
           n, n * sizeof *b.tokens / 1024);
    for (size_t i = 0; i < ROWS; i++)
        printf("| %s | %.3f | %.2f | %.2f |\n", rows[i].name, rows[i].best / 1e9,
               rows[i].best * sizeof *b.tokens / 1e9, rows[i].best / rows[0].best);
    if (b.sink == 1)
        puts("");
    pl_page_hasher_free(b.hasher);
    free(b.pages);
    free(b.seq);
    free(b.local);
    free(b.tokens);
}

int main(int argc, char **argv)
{
    if (argc < 2)
        prompt(16384);
    for (int i = 1; i < argc; i++) {
        uint64_t n;
        if (pl_str_u64(pl_str_c(argv[i]), 1u << 26, &n) != 0 || n < 1024)
            die("TOKENS are 1024 to 67108864");
        prompt((size_t)n);
    }
    return 0;
}
