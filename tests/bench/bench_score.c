/* What a decision by a `score` hook costs, C to C, beside the same cost written in C. Run by
 * run.sh, pinned to one core. Per fleet size, the median of interleaved repetitions of:
 *
 *   policy    pl_vm_decide and pl_verdict_judge: entry, loop, pick, checks of the answer
 *   in C      the same cost over the same records, the same eligibility, ties and NaN rules
 *   refresh   filling the records from the fleet's atomics (pl_refresh)
 *   whole     pl_decide: refresh, policy, checks, statistics
 *
 * Before each decision one worker's record changes, so that the winner does and no branch is
 * learnt by heart; both sides pay for that. Prints a markdown table.
 * Usage: bench_score [POLICY.lua] */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "fleet/fleet.h"
#include "policy/decider.h"

#define REPS     9
#define SLICE_NS 40000000u

typedef struct bench {
    pl_fleet *fleet;
    pl_view *view;
    pl_decider *decider;
    pl_shared *shared;
    pl_ask ask;
    pl_records *records;
    pl_rng rng;
    uint64_t sink; /* keeps results from being optimised away */
} bench;

static void die(const char *what)
{
    fprintf(stderr, "bench_score: %s\n", what);
    exit(1);
}

static void drop_view(void *ctx, pl_view *v)
{
    (void)ctx;
    pl_view_unref(v);
}

static void open_fleet(bench *b, int n)
{
    const pl_str model = PL_STR("bench");
    b->fleet = pl_fleet_new(drop_view, NULL);
    for (int i = 0; i < n && b->fleet; i++) {
        char url[64];
        snprintf(url, sizeof url, "http://10.0.%d.%d:8000", i / 250, i % 250 + 1);
        pl_engine_spec s = {.url = pl_str_c(url), .weight = 1, .models = &model, .models_n = 1};
        pl_engine *e;
        if (pl_fleet_add(b->fleet, &s, &e, NULL) != 0)
            die("cannot add an engine");
        e->health = PL_HEALTH_UP;
        e->workers[0].inflight = (int32_t)pl_rng_below(&b->rng, 50);
        e->workers[0].queued_prefill_tokens = pl_rng_below(&b->rng, 100000);
        pl_engine_unref(e);
    }
    b->view = b->fleet ? pl_fleet_view(b->fleet) : NULL;
    if (!b->view)
        die("out of memory");
}

static void open_decider(bench *b, const char *file, pl_policy_stats *stats)
{
    pl_policy_source *src;
    pl_errbuf eb;
    pl_vm_error err;
    pl_vm *vm;
    pl_decider_options o;
    pl_decider_options_default(&o);
    b->shared = pl_shared_new();
    pl_vm_options vo = {.loops = 1,
                        .seed = 1,
                        .memory_bytes = 64u << 20,
                        .shared = b->shared,
                        .clock = pl_clock_real()};
    if (pl_policy_source_load(pl_str_c(file), NULL, &src, &eb) != 0)
        die(eb.text);
    if (pl_vm_new(src, &vo, &vm, &err) != 0 || pl_vm_init(vm, NULL, &err) != 0)
        die(err.message);
    pl_policy_source_unref(src);
    b->decider = pl_decider_new(&o, stats);
    if (!b->decider)
        die("out of memory");
    pl_decider_swap(b->decider, vm, 1);
    b->records = pl_vm_records(vm);
    b->ask.req = (struct pl_req){.prompt_tokens = 1000, .max_tokens = -1, .choices = 1};
    b->ask.strings = (pl_request_view){.model = PL_STR_INIT("bench"),
                                       .path = PL_STR_INIT("/v1/chat/completions"),
                                       .id = PL_STR_INIT("r-1")};
    b->ask.model = pl_view_only_model(b->view);
}

/* A worker's load changes. */
static void stir(bench *b)
{
    uint32_t i = pl_rng_below(&b->rng, (uint32_t)b->records->fleet->n);
    b->records->workers[i].queued_prefill_tokens = pl_rng_below(&b->rng, 100000);
    b->records->workers[i].cached_tokens = pl_rng_below(&b->rng, 1000);
}

static void by_policy(bench *b)
{
    pl_vm_error err;
    pl_judged j;
    stir(b);
    if (pl_vm_decide(b->decider->vm, 0, &err) != 0 ||
        pl_verdict_judge(b->decider->vm, &b->decider->limits, &j, &err) != 0 || j.index < 0)
        die("the policy failed");
    b->sink += (uint64_t)j.index;
}

/* What the default of a `score` hook does, for this one cost. */
__attribute__((noinline)) static int pick(const pl_records *r, double cache_weight, pl_rng *rng)
{
    int best = -1;
    double least = INFINITY;
    uint32_t ties = 0;
    for (int i = 0; i < r->fleet->n; i++) {
        const struct pl_worker *w = &r->workers[i];
        if (!w->eligible)
            continue;
        double cost =
            w->queued_prefill_tokens + r->req->prompt_tokens - cache_weight * w->cached_tokens;
        if (cost != cost)
            return -1;
        if (cost < least) {
            least = cost;
            best = i;
            ties = 1;
        } else if (cost == least && pl_rng_below(rng, ++ties) == 0) {
            best = i;
        }
    }
    return best;
}

static void in_c(bench *b)
{
    stir(b);
    b->sink += (uint64_t)pick(b->records, 1.0, &b->rng);
}

static void refresh(bench *b)
{
    b->sink += (uint64_t)pl_refresh(b->decider, &b->ask, 1).eligible;
}

static void whole(bench *b)
{
    pl_decision d;
    uint32_t i = pl_rng_below(&b->rng, (uint32_t)b->ask.model->workers_n);
    b->ask.model->workers[i]->queued_prefill_tokens = pl_rng_below(&b->rng, 100000);
    b->ask.strings.seed = pl_rng_next(&b->rng);
    pl_decide(b->decider, &b->ask, &d);
    if (!d.by_policy)
        die("the policy did not decide");
    b->sink += (uint64_t)d.worker->slot;
}

/* Nanoseconds of one call, over a slice of time. */
static double slice(bench *b, void (*step)(bench *b))
{
    uint64_t from = pl_now_ns(), now, n = 0;
    do {
        for (int i = 0; i < 256; i++)
            step(b);
        n += 256;
        now = pl_now_ns();
    } while (now - from < SLICE_NS);
    return (double)(now - from) / (double)n;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v)
{
    qsort(v, REPS, sizeof *v, by_value);
    return v[REPS / 2];
}

static void run(const char *file, int n)
{
    static void (*const steps[4])(bench * b) = {by_policy, in_c, refresh, whole};
    static pl_policy_stats stats;
    double ns[4][REPS];
    bench b = {.rng = {(uint64_t)n}};
    open_fleet(&b, n);
    open_decider(&b, file, &stats);
    for (int k = 3; k >= 0; k--) /* whole first: it fills the records; warms the compiler */
        slice(&b, steps[k]);
    for (int rep = 0; rep < REPS; rep++)
        for (int k = 0; k < 4; k++)
            ns[k][rep] = slice(&b, steps[k]);
    double policy = median(ns[0]), c = median(ns[1]);
    printf("| %d | %.0f | %.0f | %.2f | %.0f | %.0f |\n", n, policy, c, policy / c, median(ns[2]),
           median(ns[3]));
    fflush(stdout);
    if (b.sink == 1)
        putchar('\n');
    pl_decider_free(b.decider);
    pl_shared_free(b.shared);
    pl_view_unref(b.view);
    pl_fleet_free(b.fleet);
}

int main(int argc, char **argv)
{
    const char *file = argc > 1 ? argv[1] : "tests/bench/score.lua";
    printf("| workers | policy ns | in C ns | ratio | refresh ns | whole pl_decide ns |\n"
           "|---|---|---|---|---|---|\n");
    static const int sizes[] = {8, 64, 512};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        run(file, sizes[i]);
    return 0;
}
