/* The KV index on the workload of kvbench.h, beside the naive index in the same run:
 *
 *   bench_index [WORKERS ENTRIES]...   default: 8, 64 and 256 workers, 10^6 entries each
 *   bench_index crowded [MIB,...] [...] both in turns beside a neighbour that streams through MIB
 *   bench_index cold [MIB,...] [...]   the same with other queries in between, so nothing is learnt
 *   bench_index tokens [WORKERS]       only from tokens to answer, 10^6 entries
 *   bench_index growth                 1,024 workers, 10^7 entries, the index alone
 *   bench_index one                    64 workers, blocks of one token: each block becomes 16
 *
 * Every query's checksum is checked, before and after the removals. Times are medians of
 * KVBENCH_REPS passes, in KVBENCH_ROUNDS rounds in which the two take turns (each after
 * KVBENCH_WARM passes of its own), since the machine's speed drifts; they are the thread's time on
 * a processor, since others may use the machine, too. `peer` is the fastest other index that was
 * measured with these streams (SMG's ChainIndex with a flat result), as multiples of the naive one;
 * how far that carries is in results_index.md. */
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "kvbench_rig.h"

enum { LATENCIES = 1 << 20 };

static size_t heap(void)
{
    struct mallinfo2 m = mallinfo2();
    return m.uordblks + m.hblkhd;
}

/* --- a reader beside a writer, both at full rate --- */

typedef struct pair {
    kvbench_rig *b;
    _Atomic bool stop;
    double *latency;
    size_t queries, timed;
    uint64_t took_ns; /* of a processor, by the reader */
} pair;

static void *read_on(void *arg)
{
    pair *t = arg;
    kvbench_rig *b = t->b;
    pl_index_reader *r = pl_index_reader_new(b->ix);
    pl_match *out = malloc(4096 * sizeof *out);
    const kvbench_ops *s = &b->section[KVBENCH_MIXED];
    if (!r || !out)
        kvbench_die("no reader");
    uint64_t begun = kvbench_cpu_ns();
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
    t->took_ns = kvbench_cpu_ns() - begun;
    free(out);
    pl_index_reader_free(r);
    return NULL;
}

static void both(kvbench_rig *b, double *reader, double *p99, double *events)
{
    pair t = {.b = b, .latency = malloc(LATENCIES * sizeof *t.latency)};
    const kvbench_ops *s = &b->section[KVBENCH_MIXED];
    pthread_t thread;
    uint64_t n = 0, start, took;
    if (!t.latency || pthread_create(&thread, NULL, read_on, &t) != 0)
        kvbench_die("no thread");
    start = kvbench_cpu_ns();
    do {
        for (const uint64_t *p = s->p; p < s->end;) {
            kvbench_op op = kvbench_next(&p);
            if (op.type == KVBENCH_QUERY)
                continue;
            kvbench_apply(b, &op);
            n++;
        }
    } while ((took = kvbench_cpu_ns() - start) < 700000000u);
    atomic_store(&t.stop, true);
    pthread_join(thread, NULL);
    *events = (double)n / (double)took * 1e3;
    *reader = (double)t.queries / (double)t.took_ns * 1e6;
    *p99 = kvbench_quantile(t.latency, t.timed < LATENCIES ? t.timed : LATENCIES, 0.99);
    free(t.latency);
}

/* --- tables --- */

static void measure(kvbench_rig *b)
{
    double naive[KVBENCH_REPS], own[KVBENCH_REPS];
    bool small = b->naive != NULL;
    for (int rep = 0; rep < KVBENCH_REPS; rep++) { /* loads: a new index each time */
        if (small) {
            kvbench_renew_naive(b);
            naive[rep] = kvbench_run_naive(b, KVBENCH_LOAD, false);
        }
        if (b->ix)
            pl_index_free(b->ix);
        b->ix = NULL;
        malloc_trim(0);
        size_t before = heap();
        kvbench_renew(b);
        own[rep] = kvbench_run(b, KVBENCH_LOAD, false);
        while (pl_index_maintain(b->ix))
            ;
        pl_index_stats st;
        pl_index_stats_of(b->ix, &st);
        b->heap_per_entry = (double)(heap() - before) / (double)st.entries;
        b->own_per_entry = (double)st.bytes / (double)st.entries;
        if (st.entries != b->stream.entries * b->each)
            kvbench_die("a wrong number of entries");
    }
    b->load = (double)b->stream.entries * b->each / kvbench_quantile(own, KVBENCH_REPS, 0.5) / 1e6;
    if (small)
        b->naive_load =
            (double)b->stream.entries / kvbench_quantile(naive, KVBENCH_REPS, 0.5) / 1e6;
    for (int q = 0; q < 5; q++) {
        int which = KVBENCH_Q1 + q;
        double p99[KVBENCH_ROUNDS], naive_pass[KVBENCH_REPS], pass[KVBENCH_REPS];
        for (int i = 0; i < KVBENCH_REPS;
             i++) { /* each on what its own last pass left in the caches */
            if (i % (KVBENCH_REPS / KVBENCH_ROUNDS) == 0) {
                for (int w = 0; small && w < KVBENCH_WARM; w++)
                    kvbench_run_naive(b, which, i + w == 0);
                for (int r = i; small && r < i + KVBENCH_REPS / KVBENCH_ROUNDS; r++)
                    naive_pass[r] = kvbench_run_naive(b, which, false);
                for (int w = 0; w < KVBENCH_WARM; w++)
                    kvbench_run(b, which, i + w == 0);
            }
            pass[i] = kvbench_run(b, which, false);
            if (i % (KVBENCH_REPS / KVBENCH_ROUNDS) == KVBENCH_REPS / KVBENCH_ROUNDS - 1)
                p99[i * KVBENCH_ROUNDS / KVBENCH_REPS] = kvbench_latency(b, which);
        }
        b->naive_query[q] = small ? kvbench_each_ns(b, which, naive_pass, KVBENCH_REPS) : 0;
        b->query[q] = kvbench_each_ns(b, which, pass, KVBENCH_REPS);
        b->p99[q] = kvbench_quantile(p99, KVBENCH_ROUNDS, 0.5);
    }
    kvbench_run(b, KVBENCH_MIXED, true);
    if (small)
        kvbench_run_naive(b, KVBENCH_MIXED, true);
    for (int rep = 0; rep < KVBENCH_REPS; rep++) {
        naive[rep] = small ? kvbench_run_naive(b, KVBENCH_MIXED, false) : 1;
        own[rep] = kvbench_run(b, KVBENCH_MIXED, false);
    }
    b->naive_mixed = kvbench_each_ns(b, KVBENCH_MIXED, naive, KVBENCH_REPS);
    b->mixed = kvbench_each_ns(b, KVBENCH_MIXED, own, KVBENCH_REPS);
}

static void measure_removal(kvbench_rig *b)
{
    double naive[KVBENCH_REPS], own[KVBENCH_REPS];
    double n = (double)b->stream.section[KVBENCH_REMOVE_SECTION].blocks;
    for (int rep = 0; rep < KVBENCH_REPS; rep++) {
        if (rep) {
            kvbench_renew(b);
            kvbench_run(b, KVBENCH_LOAD, false);
        }
        own[rep] = kvbench_run(b, KVBENCH_REMOVE_SECTION, false);
        if (b->naive) {
            kvbench_renew_naive(b);
            kvbench_run_naive(b, KVBENCH_LOAD, false);
            naive[rep] = kvbench_run_naive(b, KVBENCH_REMOVE_SECTION, false);
        }
    }
    b->remove = n * b->each / kvbench_quantile(own, KVBENCH_REPS, 0.5) / 1e6;
    if (b->naive)
        b->naive_remove = n / kvbench_quantile(naive, KVBENCH_REPS, 0.5) / 1e6;
    kvbench_run(b, KVBENCH_AFTER, true);
}

static void report(kvbench_rig *b)
{
    static const char *const depth[] = {"1", "16", "64", "256", "1024"};
    static const kvbench_peer none;
    const kvbench_peer *p = kvbench_peer_of(b->stream.workers);
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
    kvbench_tokens(b);
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
static void report_alone(kvbench_rig *b)
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
    uint64_t n = pl_index_entries(b->ix, most), start = kvbench_cpu_ns(), longest = 0, slices = 0;
    pl_index_clear(b->ix, most, -1);
    uint64_t call = kvbench_cpu_ns() - start, all = 0;
    for (bool more = true; more; slices++) {
        start = kvbench_cpu_ns();
        more = pl_index_maintain(b->ix);
        uint64_t took = kvbench_cpu_ns() - start;
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
    kvbench_rig *b = kvbench_rig_new(workers, entries, each, workers <= 256 && each == 1);
    measure(b);
    if (b->naive)
        report(b);
    else
        report_alone(b);
    printf("\nHeap growth %.1f bytes an entry; the index counts %.1f.\n", b->heap_per_entry,
           b->own_per_entry);
    fflush(stdout);
    kvbench_rig_free(b);
}

/* From argv[2]: MIB[,MIB]... for the neighbour, then sizes. */
static void cold(int argc, char **argv)
{
    bool learnt = strcmp(argv[1], "crowded") == 0;
    static const uint32_t usual[] = {0, 16, 64};
    uint32_t mib[16];
    size_t n = 0;
    int at = 2;
    if (argc % 2 == 1) {
        char *p = argv[at++];
        do
            mib[n++] = (uint32_t)strtoul(p, &p, 10);
        while (*p++ == ',' && n < 16);
    }
    const uint32_t *levels = n ? mib : usual;
    n = n ? n : sizeof usual / sizeof *usual;
    for (int i = at; i + 1 < argc; i += 2)
        kvbench_cold(strtoull(argv[i], NULL, 10), strtoull(argv[i + 1], NULL, 10), learnt, levels,
                     n);
    for (uint64_t w = 8; at == argc && w <= 256; w = w == 8 ? 64 : w * 4)
        kvbench_cold(w, 1000000, learnt, levels, n);
}

/* Of the naive index only what the bars need. */
static void tokens(uint64_t workers)
{
    kvbench_rig *b = kvbench_rig_new(workers, 1000000, 1, true);
    double v[KVBENCH_REPS];
    kvbench_run_naive(b, KVBENCH_LOAD, false);
    for (int q = 0; q < 5; q++) {
        for (int i = 0; i < KVBENCH_REPS; i++)
            v[i] = kvbench_run_naive(b, KVBENCH_Q1 + q, i == 0);
        b->naive_query[q] = kvbench_each_ns(b, KVBENCH_Q1 + q, v, KVBENCH_REPS);
    }
    kvbench_tokens(b);
    kvbench_rig_free(b);
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "";
    if (strcmp(mode, "growth") == 0)
        one_size(1024, 10000000, 1);
    else if (strcmp(mode, "one") == 0)
        one_size(64, 100000, 16);
    else if (strcmp(mode, "tokens") == 0)
        tokens(argc > 2 ? strtoull(argv[2], NULL, 10) : 64);
    else if (strcmp(mode, "cold") == 0 || strcmp(mode, "crowded") == 0)
        cold(argc, argv);
    for (int i = 1; i + 1 < argc && strtoull(argv[i], NULL, 10); i += 2)
        one_size(strtoull(argv[i], NULL, 10), strtoull(argv[i + 1], NULL, 10), 1);
    for (uint64_t w = 8; argc == 1 && w <= 256; w = w == 8 ? 64 : w * 4)
        one_size(w, 1000000, 1);
    return 0;
}
