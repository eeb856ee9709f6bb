/* The KV index on the workload of kvbench.h, beside the naive index in the same run:
 *
 *   bench_index [WORKERS ENTRIES]...   default: 8, 64 and 256 workers, 10^6 entries each
 *   bench_index crowded [...]          the same beside a neighbour that empties the shared cache
 *   bench_index growth                 1,024 workers, 10^7 entries, the index alone
 *   bench_index one                    64 workers, blocks of one token: each block becomes 16
 *
 * Every query's checksum is checked, before and after the removals. Times are medians of REPS
 * passes, in ROUNDS rounds in which the two take turns (each after WARM passes of its own), since
 * the machine's speed drifts; they are the thread's time on a processor, since others may use the
 * machine, too. `peer` is the fastest other index that was measured with these streams (SMG's
 * ChainIndex with a flat result), as multiples of the naive one; how far that carries is in
 * results_index.md. */
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/rng.h"
#include "kv/block_hash.h"
#include "kv/index.h"
#include "kvbench.h"

enum { REPS = 9, ROUNDS = 3, WARM = 3, LATENCIES = 1 << 20 };

/* What was measured of the peer, and of the naive index beside it (ns; p99 ns; M/s). */
typedef struct peer {
    uint64_t workers;
    double naive[5], query[5], p99_256, p99_1024, stores, removals, reader, reader_p99, events;
} peer;
static const peer peers[] = {
    {8,
     {15, 1241, 4703, 18814, 75829},
     {41, 159, 161, 225, 668},
     631,
     1392,
     5.3,
     7.9,
     4351,
     961,
     2.8},
    {64,
     {65, 1361, 4331, 17501, 71118},
     {125, 273, 259, 305, 516},
     521,
     1142,
     5.7,
     6.9,
     3131,
     1392,
     2.9},
    {256,
     {153, 1804, 5259, 16749, 67552},
     {366, 758, 770, 543, 608},
     941,
     1242,
     6.8,
     6.8,
     1760,
     1693,
     2.7},
};

static void die(const char *what)
{
    fprintf(stderr, "bench_index: %s\n", what);
    exit(1);
}

/* The same operations with a store's local hashes in front of its engine hashes, as the index wants
 * them. */
typedef struct section {
    uint64_t *p;
    const uint64_t *end;
    const kvbench_section *from;
} section;

typedef struct bench {
    kvbench_stream stream;
    uint32_t each; /* blocks of the index for one of the stream */
    section section[KVBENCH_SECTIONS];
    pl_index *ix;
    pl_index_space space;
    pl_index_reader *reader;
    kvbench_naive *naive;
    pl_match *out;
    kvbench_score *scores;
    double naive_query[5], query[5], p99[5], naive_mixed, mixed, naive_load, load, naive_remove,
        remove;
    double heap_per_entry, own_per_entry;
} bench;

/* The j-th of the blocks that one becomes. */
static uint64_t part(uint64_t hash, uint32_t j, uint32_t each)
{
    return each == 1 ? hash : kvbench_mix(hash + j);
}

static section rearrange(const kvbench_section *from, uint32_t each)
{
    section s = {.p = malloc(from->n * each * sizeof *s.p + 8), .from = from};
    if (!s.p)
        die("out of memory");
    uint64_t *to = s.p;
    for (const uint64_t *p = from->p; p < from->p + from->n;) {
        uint64_t head = *p;
        kvbench_op op = kvbench_next(&p);
        uint32_t n = op.n * each, step = op.type == KVBENCH_STORE ? 2 : 1;
        *to++ = (head & 0xffffffffu) | (uint64_t)n << 32;
        *to++ = op.type == KVBENCH_STORE ? part(op.aux, each - 1, each) : op.aux;
        for (uint32_t k = 0; k < step; k++)
            for (uint32_t i = 0; i < op.n; i++)
                for (uint32_t j = 0; j < each; j++) /* what is removed goes from the end */
                    *to++ = part(op.p[step * i + k], op.type == KVBENCH_REMOVE ? each - 1 - j : j,
                                 each);
    }
    s.end = to;
    return s;
}

static uint64_t answer_sum(const pl_match *out, int n, uint32_t each)
{
    uint64_t sum = 0;
    for (int i = 0; i < n; i++)
        sum += kvbench_mix((uint64_t)out[i].slot << 32 | out[i].blocks[PL_TIER_DEVICE] / each);
    return sum;
}

static void apply(bench *b, const kvbench_op *op)
{
    if (op->type == KVBENCH_STORE) {
        if (pl_index_store(b->ix, b->space, (int)op->worker, PL_TIER_DEVICE,
                           op->has_parent ? &op->aux : NULL, op->p + op->n, op->p, op->n) != 0)
            die("a store failed");
    } else if (pl_index_remove(b->ix, (int)op->worker, PL_TIER_DEVICE, op->p, op->n) != op->n) {
        die("an unknown removal");
    }
}

/* What this thread has had of a processor, in ns: the machine may be shared. */
static uint64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Seconds for all of a section; queries only count with `checked`. */
static double run(bench *b, int which, bool checked)
{
    const section *s = &b->section[which];
    uint64_t start = cpu_ns();
    for (const uint64_t *p = s->p; p < s->end;) {
        kvbench_op op = kvbench_next(&p);
        if (op.type != KVBENCH_QUERY) {
            apply(b, &op);
            continue;
        }
        int n = pl_index_match(b->reader, b->space, op.p, op.n, b->out, 4096);
        if (checked && answer_sum(b->out, n, b->each) != op.aux)
            die("a wrong answer");
    }
    return (double)(cpu_ns() - start) / 1e9;
}

static double run_naive(bench *b, int which, bool checked)
{
    const kvbench_section *s = &b->stream.section[which];
    uint64_t start = cpu_ns();
    for (const uint64_t *p = s->p; p < s->p + s->n;) {
        kvbench_op op = kvbench_next(&p);
        if (op.type == KVBENCH_STORE) {
            kvbench_naive_store(b->naive, &op);
        } else if (op.type == KVBENCH_REMOVE) {
            kvbench_naive_remove(b->naive, &op);
        } else {
            uint32_t n = kvbench_naive_query(b->naive, &op, b->scores);
            uint64_t sum = 0;
            for (uint32_t i = 0; checked && i < n; i++)
                sum += kvbench_mix((uint64_t)b->scores[i].worker << 32 | b->scores[i].depth);
            if (checked && sum != op.aux)
                die("a wrong answer of the naive index");
        }
    }
    return (double)(cpu_ns() - start) / 1e9;
}

static int by_double(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile(double *v, size_t n, double q)
{
    qsort(v, n, sizeof *v, by_double);
    size_t i = (size_t)(q * (double)n);
    return v[i < n ? i : n - 1];
}

static size_t heap(void)
{
    struct mallinfo2 m = mallinfo2();
    return m.uordblks + m.hblkhd;
}

static void make_index(bench *b)
{
    pl_index_options o = {.max_bytes = UINT64_MAX};
    if (pl_index_new(&o, &b->ix) != 0)
        die("no index");
    b->space = pl_index_space_open(b->ix, PL_STR("model"), 16, false, (pl_str){0}, (pl_str){0});
    b->reader = pl_index_reader_new(b->ix);
    if (!b->space || !b->reader)
        die("no space or reader");
}

/* The p99 of a section's queries, each with a look at the clock around it. */
static double latency(bench *b, int which)
{
    const section *s = &b->section[which];
    double *v = malloc(s->from->ops * sizeof *v);
    size_t n = 0;
    if (!v)
        die("out of memory");
    for (const uint64_t *p = s->p; p < s->end;) {
        kvbench_op op = kvbench_next(&p);
        uint64_t start = pl_now_ns();
        pl_index_match(b->reader, b->space, op.p, op.n, b->out, 4096);
        v[n++] = (double)(pl_now_ns() - start);
    }
    double q = quantile(v, n, 0.99);
    free(v);
    return q;
}

static double seconds_ns(const bench *b, int which, double *v, size_t n)
{
    return quantile(v, n, 0.5) * 1e9 / (double)b->stream.section[which].ops;
}

/* --- a reader beside a writer, both at full rate --- */

typedef struct pair {
    bench *b;
    _Atomic bool stop;
    double *latency;
    size_t queries, timed;
    uint64_t took_ns; /* of a processor, by the reader */
} pair;

static void *read_on(void *arg)
{
    pair *t = arg;
    bench *b = t->b;
    pl_index_reader *r = pl_index_reader_new(b->ix);
    pl_match *out = malloc(4096 * sizeof *out);
    const section *s = &b->section[KVBENCH_MIXED];
    if (!r || !out)
        die("no reader");
    uint64_t begun = cpu_ns();
    while (!atomic_load_explicit(&t->stop, memory_order_relaxed))
        for (const uint64_t *p = s->p; p < s->end;) {
            kvbench_op op = kvbench_next(&p);
            if (op.type != KVBENCH_QUERY)
                continue;
            bool timed = t->queries++ % 8 == 0; /* a look at the clock is not for nothing */
            uint64_t start = timed ? pl_now_ns() : 0;
            pl_index_match(r, b->space, op.p, op.n, out, 4096);
            if (timed)
                t->latency[t->timed++ % LATENCIES] = (double)(pl_now_ns() - start);
        }
    t->took_ns = cpu_ns() - begun;
    free(out);
    pl_index_reader_free(r);
    return NULL;
}

static void both(bench *b, double *reader, double *p99, double *events)
{
    pair t = {.b = b, .latency = malloc(LATENCIES * sizeof *t.latency)};
    const section *s = &b->section[KVBENCH_MIXED];
    pthread_t thread;
    uint64_t n = 0, start, took;
    if (!t.latency || pthread_create(&thread, NULL, read_on, &t) != 0)
        die("no thread");
    start = cpu_ns();
    do {
        for (const uint64_t *p = s->p; p < s->end;) {
            kvbench_op op = kvbench_next(&p);
            if (op.type == KVBENCH_QUERY)
                continue;
            apply(b, &op);
            n++;
        }
    } while ((took = cpu_ns() - start) < 700000000u);
    atomic_store(&t.stop, true);
    pthread_join(thread, NULL);
    *events = (double)n / (double)took * 1e3;
    *reader = (double)t.queries / (double)t.took_ns * 1e6;
    *p99 = quantile(t.latency, t.timed < LATENCIES ? t.timed : LATENCIES, 0.99);
    free(t.latency);
}

/* --- from tokens to answer --- */

static void from_tokens(bench *b)
{
    pl_block_space hashing;
    uint32_t *tokens = malloc(1024 * 16 * sizeof *tokens);
    uint64_t *local = malloc(1024 * sizeof *local);
    pl_rng rng = {.state = 7};
    if (!tokens || !local ||
        pl_block_space_init(&hashing, 16, false, (pl_str){0}, (pl_str){0}) != 0)
        die("out of memory");
    for (int i = 0; i < 1024 * 16; i++)
        tokens[i] = (uint32_t)pl_rng_below(&rng, 150000);
    printf("\n| blocks of 16 tokens | hash ns | hash, then match ns | of it the match | peer's "
           "match / 1.5 |\n|---|---|---|---|---|\n");
    static const uint32_t depth[] = {1, 16, 64, 256, 1024};
    for (int q = 1; q < 5; q++) {
        double h[REPS], all[REPS];
        const section *s = &b->section[KVBENCH_Q1 + q];
        for (int rep = 0; rep < REPS; rep++) {
            uint64_t start = cpu_ns(), sink = 0;
            for (uint64_t i = 0; i < s->from->ops; i++) {
                if (pl_block_hash(&hashing, tokens, depth[q] * 16, local, NULL, 1024) < 0)
                    die("hash");
                sink ^= local[i % depth[q]];
                tokens[0]++;
            }
            h[rep] = (double)(cpu_ns() - start) / (double)s->from->ops;
            start = cpu_ns();
            for (const uint64_t *p = s->p; p < s->end;) {
                kvbench_op op = kvbench_next(&p);
                if (pl_block_hash(&hashing, tokens, op.n * 16, local, NULL, 1024) < 0)
                    die("hash");
                sink ^= local[0];
                tokens[0]++;
                sink ^= (uint64_t)pl_index_match(b->reader, b->space, op.p, op.n, b->out, 4096);
            }
            all[rep] = (double)(cpu_ns() - start) / (double)s->from->ops;
            if (sink == 1)
                puts("");
        }
        double hash = quantile(h, REPS, 0.5), total = quantile(all, REPS, 0.5), bar = 0;
        for (size_t i = 0; i < sizeof peers / sizeof *peers; i++)
            if (peers[i].workers == b->stream.workers)
                bar = b->naive_query[q] * peers[i].query[q] / peers[i].naive[q] / 1.5;
        printf("| %u | %.0f | %.0f | %.0f | %.0f |\n", depth[q], hash, total, total - hash, bar);
    }
    free(tokens);
    free(local);
}

/* --- a neighbour that takes the shared cache and the memory's bandwidth --- */

static _Atomic bool leave;

static void *crowd(void *arg)
{
    enum { BYTES = 256 << 20 };
    char *p = malloc(BYTES);
    if (!p)
        die("out of memory");
    for (unsigned i = 0; !atomic_load_explicit(&leave, memory_order_relaxed); i++)
        memset(p, (int)i, BYTES);
    free(p);
    return arg;
}

/* --- tables --- */

static void measure(bench *b)
{
    double naive[REPS], own[REPS];
    bool small = b->naive != NULL;
    for (int rep = 0; rep < REPS; rep++) { /* loads: a new index each time */
        if (small) {
            kvbench_naive_free(b->naive);
            b->naive = kvbench_naive_new();
            naive[rep] = run_naive(b, KVBENCH_LOAD, false);
        }
        if (b->ix)
            pl_index_free(b->ix);
        malloc_trim(0);
        size_t before = heap();
        make_index(b);
        own[rep] = run(b, KVBENCH_LOAD, false);
        while (pl_index_maintain(b->ix))
            ;
        pl_index_stats st;
        pl_index_stats_of(b->ix, &st);
        b->heap_per_entry = (double)(heap() - before) / (double)st.entries;
        b->own_per_entry = (double)st.bytes / (double)st.entries;
        if (st.entries != b->stream.entries * b->each)
            die("a wrong number of entries");
    }
    b->load = (double)b->stream.entries * b->each / quantile(own, REPS, 0.5) / 1e6;
    if (small)
        b->naive_load = (double)b->stream.entries / quantile(naive, REPS, 0.5) / 1e6;
    for (int q = 0; q < 5; q++) {
        int which = KVBENCH_Q1 + q;
        double p99[ROUNDS], naive_pass[REPS], pass[REPS];
        for (int i = 0; i < REPS; i++) { /* each on what its own last pass left in the caches */
            if (i % (REPS / ROUNDS) == 0) {
                for (int w = 0; small && w < WARM; w++)
                    run_naive(b, which, i + w == 0);
                for (int r = i; small && r < i + REPS / ROUNDS; r++)
                    naive_pass[r] = run_naive(b, which, false);
                for (int w = 0; w < WARM; w++)
                    run(b, which, i + w == 0);
            }
            pass[i] = run(b, which, false);
            if (i % (REPS / ROUNDS) == REPS / ROUNDS - 1)
                p99[i * ROUNDS / REPS] = latency(b, which);
        }
        b->naive_query[q] = small ? seconds_ns(b, which, naive_pass, REPS) : 0;
        b->query[q] = seconds_ns(b, which, pass, REPS);
        b->p99[q] = quantile(p99, ROUNDS, 0.5);
    }
    run(b, KVBENCH_MIXED, true);
    if (small)
        run_naive(b, KVBENCH_MIXED, true);
    for (int rep = 0; rep < REPS; rep++) {
        naive[rep] = small ? run_naive(b, KVBENCH_MIXED, false) : 1;
        own[rep] = run(b, KVBENCH_MIXED, false);
    }
    b->naive_mixed = seconds_ns(b, KVBENCH_MIXED, naive, REPS);
    b->mixed = seconds_ns(b, KVBENCH_MIXED, own, REPS);
}

static void measure_removal(bench *b)
{
    double naive[REPS], own[REPS];
    double n = (double)b->stream.section[KVBENCH_REMOVE_SECTION].blocks;
    for (int rep = 0; rep < REPS; rep++) {
        if (rep) {
            pl_index_free(b->ix);
            make_index(b);
            run(b, KVBENCH_LOAD, false);
        }
        own[rep] = run(b, KVBENCH_REMOVE_SECTION, false);
        if (b->naive) {
            kvbench_naive_free(b->naive);
            b->naive = kvbench_naive_new();
            run_naive(b, KVBENCH_LOAD, false);
            naive[rep] = run_naive(b, KVBENCH_REMOVE_SECTION, false);
        }
    }
    b->remove = n * b->each / quantile(own, REPS, 0.5) / 1e6;
    if (b->naive)
        b->naive_remove = n / quantile(naive, REPS, 0.5) / 1e6;
    run(b, KVBENCH_AFTER, true);
}

static void report(bench *b)
{
    static const char *const depth[] = {"1", "16", "64", "256", "1024"};
    static const peer none;
    const peer *p = NULL;
    for (size_t i = 0; i < sizeof peers / sizeof *peers; i++)
        if (peers[i].workers == b->stream.workers)
            p = &peers[i];
    printf("\n| query, blocks | naive ns | index ns | p99 ns | times naive | peer's | index / peer "
           "|\n|---|---|---|---|---|---|---|\n");
    double drift = 0; /* how much slower than then the naive index is here */
    for (int q = 0; q < 5; q++) {
        double times = b->naive_query[q] / b->query[q];
        printf("| %s | %.0f | %.0f | %.0f | %.2f |", depth[q], b->naive_query[q], b->query[q],
               b->p99[q], times);
        if (p)
            printf(" %.2f | %.2f |\n", p->naive[q] / p->query[q],
                   times / (p->naive[q] / p->query[q]));
        else
            puts(" | |");
        if (p && q)
            drift += b->naive_query[q] / p->naive[q] / 4;
    }
    double reader, p99, events;
    both(b, &reader, &p99, &events);
    from_tokens(b);
    measure_removal(b);
    if (!p) {
        p = &none;
        drift = 1;
    }
    printf("\nThe naive index takes %.2f of the time that it took beside the peer; `peer` below is "
           "corrected by it.\n\n| | naive | index | times naive | peer | index / peer "
           "|\n|---|---|---|---|---|---|\n",
           drift);
    printf("| stores, M blocks/s | %.2f | %.2f | %.2f | %.2f | %.2f |\n", b->naive_load, b->load,
           b->load / b->naive_load, p->stores / drift, b->load / (p->stores / drift));
    printf("| removals, M blocks/s | %.2f | %.2f | %.2f | %.2f | %.2f |\n", b->naive_remove,
           b->remove, b->remove / b->naive_remove, p->removals / drift,
           b->remove / (p->removals / drift));
    printf("| mixed, one thread, ns/operation | %.0f | %.0f | %.2f | | |\n", b->naive_mixed,
           b->mixed, b->naive_mixed / b->mixed);
    printf("| beside a writer: k queries/s | | %.0f | | %.0f | %.2f |\n", reader, p->reader / drift,
           reader / (p->reader / drift));
    printf("| and their p99, ns | | %.0f | | %.0f | %.2f |\n", p99, p->reader_p99 * drift,
           p->reader_p99 * drift / p99);
    printf("| that writer, M events/s | | %.2f | | %.2f | %.2f |\n", events, p->events / drift,
           events / (p->events / drift));
    printf("| p99, 256 blocks, ns | | %.0f | | %.0f | %.2f |\n", b->p99[3], p->p99_256 * drift,
           p->p99_256 * drift / b->p99[3]);
    printf("| p99, 1024 blocks, ns | | %.0f | | %.0f | %.2f |\n", b->p99[4], p->p99_1024 * drift,
           p->p99_1024 * drift / b->p99[4]);
}

/* Without a naive index, and how long it takes to lose the worker with the most. */
static void report_alone(bench *b)
{
    static const uint32_t depth[] = {1, 16, 64, 256, 1024};
    printf("\n| query, blocks | ns | p99 ns |\n|---|---|---|\n");
    for (int q = 0; q < 5; q++)
        printf("| %u | %.0f | %.0f |\n", depth[q] * b->each, b->query[q], b->p99[q]);
    measure_removal(b);
    int most = 0;
    for (int w = 0; w < (int)b->stream.workers; w++)
        if (pl_index_entries(b->ix, w) > pl_index_entries(b->ix, most))
            most = w;
    uint64_t n = pl_index_entries(b->ix, most), start = cpu_ns(), longest = 0, slices = 0;
    pl_index_clear(b->ix, most, -1);
    uint64_t call = cpu_ns() - start, all = 0;
    for (bool more = true; more; slices++) {
        start = cpu_ns();
        more = pl_index_maintain(b->ix);
        uint64_t took = cpu_ns() - start;
        all += took;
        longest = took > longest ? took : longest;
    }
    printf("\nStores %.2f M blocks/s, removals %.2f M blocks/s. A worker with %llu entries left in "
           "%.1f us; sweeping took %.2f ms in %llu slices, the longest %.0f us.\n",
           b->load, b->remove, (unsigned long long)n, (double)call / 1e3, (double)all / 1e6,
           (unsigned long long)slices, (double)longest / 1e3);
}

static void one_size(uint64_t workers, uint64_t entries, uint32_t each)
{
    bench *b = calloc(1, sizeof *b);
    char hex[65];
    if (!b || !(b->out = malloc(4096 * sizeof *b->out)) ||
        !(b->scores = malloc(4096 * sizeof *b->scores)))
        die("out of memory");
    kvbench_make(&b->stream, workers, entries, 42);
    const char *sum = kvbench_sum(workers, entries, 42);
    if (sum) {
        kvbench_sha256(&b->stream, hex);
        if (strcmp(hex, sum) != 0)
            die("the stream is not the one it must be");
    }
    for (int i = 0; i < KVBENCH_SECTIONS; i++)
        b->section[i] = rearrange(&b->stream.section[i], each);
    b->each = each;
    if (workers <= 256 && each == 1)
        b->naive = kvbench_naive_new();
    printf("\n## %llu workers, %llu entries%s\n", (unsigned long long)workers,
           (unsigned long long)entries * each, sum ? "" : " (no published sum)");
    measure(b);
    if (b->naive)
        report(b);
    else
        report_alone(b);
    printf("\nHeap growth %.1f bytes an entry; the index counts %.1f.\n", b->heap_per_entry,
           b->own_per_entry);
    fflush(stdout);
    pl_index_free(b->ix);
    if (b->naive)
        kvbench_naive_free(b->naive);
    for (int i = 0; i < KVBENCH_SECTIONS; i++)
        free(b->section[i].p);
    kvbench_free(&b->stream);
    free(b->out);
    free(b->scores);
    free(b);
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "growth") == 0) {
        one_size(1024, 10000000, 1);
        return 0;
    }
    if (argc == 2 && strcmp(argv[1], "one") == 0) {
        one_size(64, 100000, 16);
        return 0;
    }
    pthread_t neighbour;
    bool crowded = argc > 1 && strcmp(argv[1], "crowded") == 0;
    if (crowded) {
        if (pthread_create(&neighbour, NULL, crowd, NULL) != 0)
            die("no thread");
        argc--;
        argv++;
        puts("With a neighbour that writes 256 MiB over and over.");
    }
    for (int i = 1; i + 1 < argc; i += 2)
        one_size(strtoull(argv[i], NULL, 10), strtoull(argv[i + 1], NULL, 10), 1);
    if (argc == 1)
        for (size_t i = 0; i < sizeof peers / sizeof *peers; i++)
            one_size(peers[i].workers, 1000000, 1);
    atomic_store(&leave, true);
    if (crowded)
        pthread_join(neighbour, NULL);
    return 0;
}
