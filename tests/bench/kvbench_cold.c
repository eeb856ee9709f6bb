/* The index and the naive one in turns, beside a neighbour that streams through memory on another
 * core. Called by bench_index.c on its only thread; the neighbour is a thread of its own.
 *
 * The bars of the index are multiples of the naive index, whose time is cache misses and
 * mispredictions. So a multiple means something only where the naive index is as cold as it was
 * beside the peer. Two things make it so. The neighbour takes as much of the shared cache and of
 * the memory's bandwidth as its buffer is large. And the passes over a section come in pairs, of
 * which the second is timed, with all other sections in between: a section that is repeated a dozen
 * times is known to the branch predictor by heart (the program that measured the naive index beside
 * the peer makes three passes). With `learnt` they come four in a row, again and again. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvbench_rig.h"

enum { LOADS = 5 };

typedef struct neighbour {
    pthread_t thread;
    size_t bytes; /* 0: there is none */
    int cpu;
    _Atomic bool leave, there;
} neighbour;

static void stay_on(int cpu)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    if (sched_setaffinity(0, sizeof one, &one) != 0)
        kvbench_die("no such processor");
}

/* Another processor for the neighbour than for the measuring thread, which gets the last. */
static void two_cpus(int *own, int *other)
{
    cpu_set_t all;
    *own = *other = -1;
    if (sched_getaffinity(0, sizeof all, &all) != 0)
        kvbench_die("no processors");
    for (int i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &all)) {
            *other = *own;
            *own = i;
        }
    if (*other < 0)
        kvbench_die("the neighbour needs a second processor");
}

static void *stream(void *arg)
{
    neighbour *n = arg;
    stay_on(n->cpu);
    char *p = malloc(n->bytes);
    if (!p)
        kvbench_die("out of memory");
    for (unsigned i = 0; !atomic_load_explicit(&n->leave, memory_order_relaxed); i++) {
        memset(p, (int)i, n->bytes);
        atomic_store_explicit(&n->there, true, memory_order_relaxed);
    }
    free(p);
    return NULL;
}

static void arrive(neighbour *n, int cpu, uint32_t mib)
{
    n->bytes = (size_t)mib << 20;
    n->cpu = cpu;
    atomic_init(&n->leave, false);
    atomic_init(&n->there, mib == 0);
    if (mib && pthread_create(&n->thread, NULL, stream, n) != 0)
        kvbench_die("no thread");
    while (!atomic_load(&n->there))
        sched_yield();
}

static void leave(neighbour *n)
{
    atomic_store(&n->leave, true);
    if (n->bytes)
        pthread_join(n->thread, NULL);
}

/* Of one level of cold, medians: ns a query; M blocks/s. */
typedef struct level {
    double naive[5], query[5], naive_load, load, naive_remove, remove;
} level;

static void loads(kvbench_rig *b, level *l)
{
    double v[4][LOADS], blocks = (double)b->stream.section[KVBENCH_REMOVE_SECTION].blocks;
    for (int rep = 0; rep < LOADS; rep++) {
        kvbench_renew_naive(b);
        v[0][rep] = kvbench_run_naive(b, KVBENCH_LOAD, false);
        v[1][rep] = kvbench_run_naive(b, KVBENCH_REMOVE_SECTION, false);
        kvbench_renew(b);
        v[2][rep] = kvbench_run(b, KVBENCH_LOAD, false);
        v[3][rep] = kvbench_run(b, KVBENCH_REMOVE_SECTION, false);
    }
    l->naive_load = (double)b->stream.entries / kvbench_quantile(v[0], LOADS, 0.5) / 1e6;
    l->naive_remove = blocks / kvbench_quantile(v[1], LOADS, 0.5) / 1e6;
    l->load = (double)b->stream.entries / kvbench_quantile(v[2], LOADS, 0.5) / 1e6;
    l->remove = blocks / kvbench_quantile(v[3], LOADS, 0.5) / 1e6;
}

/* The last of some passes in a row. */
static double last_of(kvbench_rig *b, int which, bool naive, int passes, bool checked)
{
    double s = 0;
    for (int i = 0; i < passes; i++)
        s = naive ? kvbench_run_naive(b, which, checked && i == 0)
                  : kvbench_run(b, which, checked && i == 0);
    return s;
}

static void queries(kvbench_rig *b, bool learnt, level *l)
{
    double naive[5][KVBENCH_REPS], own[5][KVBENCH_REPS];
    for (int i = 0; i < 5 * KVBENCH_REPS; i++) {
        int q = learnt ? i / KVBENCH_REPS : i % 5, rep = learnt ? i % KVBENCH_REPS : i / 5;
        int passes = learnt ? KVBENCH_WARM + 1 : 2;
        naive[q][rep] = last_of(b, KVBENCH_Q1 + q, true, passes, rep == 0);
        own[q][rep] = last_of(b, KVBENCH_Q1 + q, false, passes, rep == 0);
    }
    for (int q = 0; q < 5; q++) {
        l->naive[q] = kvbench_each_ns(b, KVBENCH_Q1 + q, naive[q], KVBENCH_REPS);
        l->query[q] = kvbench_each_ns(b, KVBENCH_Q1 + q, own[q], KVBENCH_REPS);
    }
}

static void print_depth(const level *l, const uint32_t *mib, size_t n, int q, const kvbench_peer *p)
{
    static const int depth[] = {1, 16, 64, 256, 1024};
    double best = 1e9;
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        double ratio = l[i].naive[q] / p->naive[q], off = ratio > 1 ? ratio : 1 / ratio;
        if (off < best) {
            best = off;
            at = i;
        }
    }
    for (size_t i = 0; i < n; i++) {
        double times = l[i].naive[q] / l[i].query[q], peers = p->naive[q] / p->query[q];
        printf("| %d | %u | %.0f | %.2f | %.0f | %.2f | %.2f | %.2f | %.2f |%s\n", depth[q], mib[i],
               l[i].naive[q], l[i].naive[q] / p->naive[q], l[i].query[q], times, peers,
               times / peers, p->query[q] / l[i].query[q],
               i == at ? " as beside the peer |" : " |");
    }
}

void kvbench_cold(uint64_t workers, uint64_t entries, bool learnt, const uint32_t *mib, size_t n)
{
    const kvbench_peer *p = kvbench_peer_of(workers);
    int own, other;
    level *l = calloc(n, sizeof *l);
    if (!p || !l)
        kvbench_die("no peer was measured with so many workers");
    two_cpus(&own, &other);
    stay_on(own);
    kvbench_rig *b = kvbench_rig_new(workers, entries, 1, true);
    for (size_t i = 0; i < n; i++) {
        neighbour nb;
        arrive(&nb, other, mib[i]);
        loads(b, &l[i]);
        kvbench_renew(b);
        kvbench_run(b, KVBENCH_LOAD, false);
        kvbench_renew_naive(b);
        kvbench_run_naive(b, KVBENCH_LOAD, false);
        queries(b, learnt, &l[i]);
        leave(&nb);
    }
    printf("\nneighbour: MiB through which another core streams; of peer's: the naive index's time "
           "as a "
           "part of what it was beside the peer; plain: the peer's time as it was measured / the "
           "index's.\n\n| blocks | neighbour | naive ns | of peer's | index ns | times naive | "
           "peer's | "
           "quotient | plain | |\n|---|---|---|---|---|---|---|---|---|---|\n");
    for (int q = 0; q < 5; q++)
        print_depth(l, mib, n, q, p);
    printf(
        "\n| neighbour | naive stores, M blocks/s | index | times | peer's stores | plain | naive "
        "removals | index | times | peer's removals | plain |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|\n");
    for (size_t i = 0; i < n; i++)
        printf("| %u | %.2f | %.2f | %.2f | %.1f | %.2f | %.2f | %.2f | %.2f | %.1f | %.2f |\n",
               mib[i], l[i].naive_load, l[i].load, l[i].load / l[i].naive_load, p->stores,
               l[i].load / p->stores, l[i].naive_remove, l[i].remove,
               l[i].remove / l[i].naive_remove, p->removals, l[i].remove / p->removals);
    fflush(stdout);
    kvbench_rig_free(b);
    free(l);
    cpu_set_t both;
    CPU_ZERO(&both);
    CPU_SET(own, &both);
    CPU_SET(other, &both);
    sched_setaffinity(0, sizeof both, &both);
}
