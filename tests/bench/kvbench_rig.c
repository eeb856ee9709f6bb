/* See kvbench_rig.h. Everything here belongs to the thread that measures. */
#include "kvbench_rig.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"

static const kvbench_peer peers[] = {
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

const kvbench_peer *kvbench_peer_of(uint64_t workers)
{
    for (size_t i = 0; i < sizeof peers / sizeof *peers; i++)
        if (peers[i].workers == workers)
            return &peers[i];
    return NULL;
}

void kvbench_die(const char *what)
{
    fprintf(stderr, "bench_index: %s\n", what);
    exit(1);
}

/* The j-th of the blocks that one becomes. */
static uint64_t part(uint64_t hash, uint32_t j, uint32_t each)
{
    return each == 1 ? hash : kvbench_mix(hash + j);
}

static kvbench_ops rearrange(const kvbench_section *from, uint32_t each)
{
    kvbench_ops s = {.p = malloc(from->n * each * sizeof *s.p + 8), .from = from};
    if (!s.p)
        kvbench_die("out of memory");
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

uint64_t kvbench_answer_sum(const pl_match *out, int n, uint32_t each)
{
    uint64_t sum = 0;
    for (int i = 0; i < n; i++)
        sum += kvbench_mix((uint64_t)out[i].slot << 32 | out[i].blocks[PL_TIER_DEVICE] / each);
    return sum;
}

void kvbench_apply(kvbench_rig *b, const kvbench_op *op)
{
    if (op->type == KVBENCH_STORE) {
        if (pl_index_store(b->ix, b->space, (int)op->worker, PL_TIER_DEVICE,
                           op->has_parent ? &op->aux : NULL, op->p + op->n, op->p, op->n) != 0)
            kvbench_die("a store failed");
    } else if (pl_index_remove(b->ix, (int)op->worker, PL_TIER_DEVICE, op->p, op->n) != op->n) {
        kvbench_die("an unknown removal");
    }
}

uint64_t kvbench_cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

double kvbench_run(kvbench_rig *b, int which, bool checked)
{
    const kvbench_ops *s = &b->section[which];
    uint64_t start = kvbench_cpu_ns();
    for (const uint64_t *p = s->p; p < s->end;) {
        kvbench_op op = kvbench_next(&p);
        if (op.type != KVBENCH_QUERY) {
            kvbench_apply(b, &op);
            continue;
        }
        int n = pl_index_match(b->reader, b->space, op.p, op.n, b->out, 4096);
        if (checked && kvbench_answer_sum(b->out, n, b->each) != op.aux)
            kvbench_die("a wrong answer");
    }
    return (double)(kvbench_cpu_ns() - start) / 1e9;
}

double kvbench_run_naive(kvbench_rig *b, int which, bool checked)
{
    const kvbench_section *s = &b->stream.section[which];
    uint64_t start = kvbench_cpu_ns();
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
                kvbench_die("a wrong answer of the naive index");
        }
    }
    return (double)(kvbench_cpu_ns() - start) / 1e9;
}

static int by_double(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double kvbench_quantile(double *v, size_t n, double q)
{
    qsort(v, n, sizeof *v, by_double);
    size_t i = (size_t)(q * (double)n);
    return v[i < n ? i : n - 1];
}

void kvbench_renew(kvbench_rig *b)
{
    if (b->ix)
        pl_index_free(b->ix);
    malloc_trim(0);
    pl_index_options o = {.max_bytes = UINT64_MAX};
    if (pl_index_new(&o, &b->ix) != 0)
        kvbench_die("no index");
    b->space = pl_index_space_open(b->ix, PL_STR("model"), 16, false, (pl_str){0});
    b->reader = pl_index_reader_new(b->ix);
    if (!b->space || !b->reader)
        kvbench_die("no space or reader");
}

double kvbench_latency(kvbench_rig *b, int which)
{
    const kvbench_ops *s = &b->section[which];
    double *v = malloc(s->from->ops * sizeof *v);
    size_t n = 0;
    if (!v)
        kvbench_die("out of memory");
    for (const uint64_t *p = s->p; p < s->end;) {
        kvbench_op op = kvbench_next(&p);
        uint64_t start = pl_now_ns();
        pl_index_match(b->reader, b->space, op.p, op.n, b->out, 4096);
        v[n++] = (double)(pl_now_ns() - start);
    }
    double q = kvbench_quantile(v, n, 0.99);
    free(v);
    return q;
}

double kvbench_each_ns(const kvbench_rig *b, int which, double *v, size_t n)
{
    return kvbench_quantile(v, n, 0.5) * 1e9 / (double)b->stream.section[which].ops;
}

void kvbench_renew_naive(kvbench_rig *b)
{
    kvbench_naive_free(b->naive);
    b->naive = kvbench_naive_new();
}

kvbench_rig *kvbench_rig_new(uint64_t workers, uint64_t entries, uint32_t each, bool naive)
{
    kvbench_rig *b = calloc(1, sizeof *b);
    char hex[65];
    if (!b || !(b->out = malloc(4096 * sizeof *b->out)) ||
        !(b->scores = malloc(4096 * sizeof *b->scores)))
        kvbench_die("out of memory");
    kvbench_make(&b->stream, workers, entries, 42);
    const char *sum = kvbench_sum(workers, entries, 42);
    if (sum) {
        kvbench_sha256(&b->stream, hex);
        if (strcmp(hex, sum) != 0)
            kvbench_die("the stream is not the one it must be");
    }
    for (int i = 0; i < KVBENCH_SECTIONS; i++)
        b->section[i] = rearrange(&b->stream.section[i], each);
    b->each = each;
    if (naive)
        b->naive = kvbench_naive_new();
    printf("\n## %llu workers, %llu entries%s\n", (unsigned long long)workers,
           (unsigned long long)entries * each, sum ? "" : " (no published sum)");
    return b;
}

void kvbench_rig_free(kvbench_rig *b)
{
    if (b->ix)
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
