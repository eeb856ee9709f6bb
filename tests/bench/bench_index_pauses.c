/* How long single calls of the KV index's writer take where one does much at once: a map that
 * grows, a store at the byte cap, a list of all that a worker has. Times are the thread's time on a
 * processor; `bench_index_pauses [NAMES]`, 10^6 by default. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/rng.h"
#include "kv/index.h"

enum { EACH = 64, TOP = 5 }; /* blocks of a store; longest calls that are shown */

static double cpu_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

typedef struct longest {
    double ms[TOP], sum;
    size_t n;
} longest;

static void note(longest *l, double ms)
{
    l->sum += ms;
    l->n++;
    for (int i = 0; i < TOP; i++)
        if (ms > l->ms[i]) {
            double less = l->ms[i];
            l->ms[i] = ms;
            ms = less;
        }
}

static void show(const char *what, const longest *l)
{
    printf("%-44s mean %8.4f ms, longest", what, l->sum / (double)l->n);
    for (int i = 0; i < TOP; i++)
        printf(" %.3f", l->ms[i]);
    printf(" ms\n");
}

static pl_index *make(uint64_t cap, pl_index_space *space)
{
    const pl_index_options o = {.max_bytes = cap};
    pl_index *ix;
    if (pl_index_new(&o, &ix) != 0)
        abort();
    *space = pl_index_space_open(ix, PL_STR("m"), 16, false, PL_STR(""));
    return ix;
}

/* Conversations of 1 to 64 stores; a store's names and hashes follow from its number. */
typedef struct source {
    pl_rng rng;
    uint64_t name[EACH], local[EACH], last;
    uint32_t left;
} source;

static double store_next(pl_index *ix, pl_index_space space, int slot, source *s)
{
    const uint64_t *parent = s->left ? &s->last : NULL;
    uint64_t before = s->last;
    if (s->left == 0)
        s->left = 1 + pl_rng_below(&s->rng, 64);
    s->left--;
    for (int i = 0; i < EACH; i++) {
        s->name[i] = pl_rng_next(&s->rng);
        s->local[i] = pl_rng_next(&s->rng);
    }
    double t = cpu_ms();
    int err = pl_index_store(ix, space, slot, PL_TIER_DEVICE, parent ? &before : NULL, s->name,
                             s->local, EACH);
    t = cpu_ms() - t;
    s->last = s->name[EACH - 1];
    if (err) /* its parent was evicted */
        s->left = 0;
    return t;
}

static void growing(size_t names, int workers)
{
    pl_index_space space;
    pl_index *ix = make(0, &space);
    source *s = calloc((size_t)workers, sizeof *s);
    longest l = {0};
    for (int w = 0; w < workers; w++)
        s[w].rng.state = (uint64_t)w + 1;
    for (size_t i = 0; i < names / EACH; i++)
        note(&l, store_next(ix, space, (int)(i % (size_t)workers), &s[i % (size_t)workers]));
    char what[64];
    snprintf(what, sizeof what, "%zu names, %d workers: a store", names, workers);
    show(what, &l);
    free(s);
    pl_index_free(ix);
}

/* rest: whether the writer has time between its stores, as the indexer has. */
static void capped(size_t names, int workers, bool rest)
{
    pl_index_space space;
    pl_index *ix = make(names * 30, &space);
    source *s = calloc((size_t)workers, sizeof *s);
    longest l = {0};
    for (int w = 0; w < workers; w++)
        s[w].rng.state = (uint64_t)w + 1;
    for (size_t i = 0; i < 3 * names / EACH; i++) {
        note(&l, store_next(ix, space, (int)(i % (size_t)workers), &s[i % (size_t)workers]));
        if (rest)
            pl_index_maintain(ix);
    }
    char what[64];
    snprintf(what, sizeof what, "capped near %zu names, %d workers%s: a store", names, workers,
             rest ? ", at rest" : "");
    show(what, &l);
    free(s);
    pl_index_free(ix);
}

/* Of the conversations of some workers, all of one's, or all but each `out`th store. */
static void listed(size_t names, uint32_t out)
{
    enum { WORKERS = 4 };
    pl_index_space space;
    pl_index *ix = make(0, &space);
    uint64_t *list = malloc(names * sizeof *list);
    size_t n = 0, dropped = 0;
    for (int w = 0; w < WORKERS; w++) { /* the second half of the workers' are the same */
        source s = {.rng.state = 7 + (uint64_t)w % 2};
        for (size_t i = 0; i < names / EACH; i++) {
            store_next(ix, space, w, &s);
            for (int k = 0; w == 0 && k < EACH && (out == 0 || i % out != 0); k++)
                list[n++] = s.name[k];
        }
    }
    for (size_t i = n; i > 1; i--) { /* a snapshot comes in no order */
        size_t j = pl_rng_below(&(pl_rng){.state = i}, (uint32_t)i);
        uint64_t x = list[i - 1];
        list[i - 1] = list[j];
        list[j] = x;
    }
    double t = cpu_ms();
    dropped = pl_index_keep(ix, 0, list, n);
    t = cpu_ms() - t;
    printf("a list of %zu names, %zu entries dropped: %.2f ms\n", n, dropped, t);
    free(list);
    pl_index_free(ix);
}

int main(int argc, char **argv)
{
    size_t names = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000000;
    growing(names, 1);
    growing(names, 64);
    capped(names, 1, false);
    capped(names, 64, false);
    capped(names, 1, true);
    capped(names, 64, true);
    listed(names, 0);
    listed(names, 2);
    listed(names, 10);
    listed(names / 10, 2);
    return 0;
}
