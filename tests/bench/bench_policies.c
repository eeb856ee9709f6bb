/* Compares routing policies end to end in virtual time: a trace over simulated engines, each policy
 * over the same arrivals, several seeds. A table on standard output, the numbers as JSON in a file.
 * What a run is: policies_run.c; what it cannot show: results_policies.md.
 *
 *     bench_policies --trace FILE [options] --policy NAME[:key=value,...] ...
 *
 * The first policy is the one that is judged: beside each other one, seed by seed. --jobs N runs in
 * N processes; results do not depend on it. Equal arguments give equal bytes. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "policies_bench.h"

#define POLICIES_MAX 32
#define SEEDS_MAX    64

typedef struct column {
    const char *name, *title;
    double scale; /* in the table */
    int places;
    bool more_is_better;
} column;

static const column columns[PB_METRICS] = {
    [PB_CACHED] = {"cached_share", "cached %", 100, 2, true},
    [PB_TTFT_P50] = {"ttft_p50_s", "TTFT p50 ms", 1000, 0, false},
    [PB_TTFT_P99] = {"ttft_p99_s", "TTFT p99 ms", 1000, 0, false},
    [PB_TTFT_MEAN] = {"ttft_mean_s", "TTFT mean ms", 1000, 0, false},
    [PB_E2E_MEAN] = {"e2e_mean_s", "e2e mean ms", 1000, 0, false},
};

typedef struct entry {
    const char *spec; /* as given */
    char name[256];
    json_t *params;
} entry;

typedef struct bench {
    const char *trace_path, *json_path, *timing;
    pb_trace_options trace_options;
    pb_trace trace;
    pb_setup setup;
    entry policies[POLICIES_MAX];
    int policies_n, seeds, jobs;
    uint64_t seed0;
    struct {
        pb_result result;
        bool ok;
    } * cells; /* policy * seeds + seed; shared between processes */
} bench;

static void usage(const char *what)
{
    fprintf(stderr,
            "bench_policies: %s\n"
            "usage: bench_policies --trace FILE [--engines N] [--timing PRESET] [--pool TOKENS]\n"
            "  [--rate X] [--window SECONDS] [--knowledge events|routed|none] [--events-delay MS]\n"
            "  [--gauges SECONDS] [--rows N] [--max-prompt TOKENS] [--scale N] [--warm SHARE]\n"
            "  [--think SECONDS] [--seeds N] [--seed0 N] [--jobs N] [--json FILE] --policy "
            "NAME[:key=value,...] ...\n",
            what);
    exit(2);
}

/* --- arguments --- */

static json_t *value_of(const char *text)
{
    char *end;
    double n = strtod(text, &end);
    if (*text && !*end)
        return json_real(n);
    if (!strcmp(text, "true") || !strcmp(text, "false"))
        return json_boolean(*text == 't');
    return json_string(text);
}

static void add_policy(bench *b, const char *spec)
{
    if (b->policies_n == POLICIES_MAX)
        usage("too many policies");
    entry *e = &b->policies[b->policies_n++];
    const char *colon = strchr(spec, ':');
    e->spec = spec;
    snprintf(e->name, sizeof e->name, "%.*s", (int)(colon ? colon - spec : 255), spec);
    if (!colon)
        return;
    char rest[512], *save = NULL;
    snprintf(rest, sizeof rest, "%s", colon + 1);
    e->params = json_object();
    for (char *p = strtok_r(rest, ",", &save); p; p = strtok_r(NULL, ",", &save)) {
        char *eq = strchr(p, '=');
        if (!eq)
            usage("a parameter is key=value");
        *eq = 0;
        json_object_set_new(e->params, p, value_of(eq + 1));
    }
}

static double number(const char *name, const char *text, double lo, double hi)
{
    char *end;
    double n = strtod(text, &end);
    if (!*text || *end || !(n >= lo && n <= hi))
        usage(name);
    return n;
}

static pb_knowledge knowledge(const char *v)
{
    if (!strcmp(v, "events"))
        return PB_EVENTS;
    if (!strcmp(v, "routed"))
        return PB_ROUTED;
    if (strcmp(v, "none") != 0)
        usage("--knowledge is events, routed or none");
    return PB_NONE;
}

static void option(bench *b, const char *k, const char *v)
{
    if (!strcmp(k, "--trace"))
        b->trace_path = v;
    else if (!strcmp(k, "--json"))
        b->json_path = v;
    else if (!strcmp(k, "--policy"))
        add_policy(b, v);
    else if (!strcmp(k, "--timing"))
        b->timing = v;
    else if (!strcmp(k, "--knowledge"))
        b->setup.knowledge = knowledge(v);
    else if (!strcmp(k, "--engines"))
        b->setup.engines = (int)number(k, v, 1, 1024);
    else if (!strcmp(k, "--pool"))
        b->setup.sim.pool_tokens = (int64_t)number(k, v, 1024, 1e9);
    else if (!strcmp(k, "--rate"))
        b->setup.rate = number(k, v, 1e-3, 1e3);
    else if (!strcmp(k, "--window"))
        b->setup.window_s = number(k, v, 0, 1e6);
    else if (!strcmp(k, "--events-delay"))
        b->setup.events_delay_us = (int64_t)(number(k, v, 0, 1e6) * 1000);
    else if (!strcmp(k, "--gauges"))
        b->setup.gauges_us = (int64_t)(number(k, v, 0, 1e6) * 1e6);
    else if (!strcmp(k, "--rows"))
        b->trace_options.max_rows = (int)number(k, v, 1, 1e8);
    else if (!strcmp(k, "--max-prompt"))
        b->trace_options.max_prompt = (int)number(k, v, 1, 1e8);
    else if (!strcmp(k, "--scale"))
        b->trace_options.scale = (int)number(k, v, 1, 64);
    else if (!strcmp(k, "--warm"))
        b->trace_options.warm_share = number(k, v, 0, 1);
    else if (!strcmp(k, "--think"))
        b->trace_options.think_most_s = number(k, v, 0, 1e6);
    else if (!strcmp(k, "--seeds"))
        b->seeds = (int)number(k, v, 1, SEEDS_MAX);
    else if (!strcmp(k, "--seed0"))
        b->seed0 = (uint64_t)number(k, v, 0, 1e15);
    else if (!strcmp(k, "--jobs"))
        b->jobs = (int)number(k, v, 1, 64);
    else
        usage(k);
}

/* --- running --- */

static void work(bench *b, int job)
{
    for (int i = job; i < b->policies_n * b->seeds; i += b->jobs) {
        entry *e = &b->policies[i / b->seeds];
        const pb_policy p = {e->name, e->params};
        b->cells[i].ok = pb_run(&b->trace, &b->setup, &p, b->seed0 + (uint64_t)(i % b->seeds),
                                &b->cells[i].result);
    }
}

static bool run_all(bench *b)
{
    size_t n = (size_t)b->policies_n * (size_t)b->seeds;
    b->cells =
        mmap(NULL, n * sizeof *b->cells, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (b->cells == MAP_FAILED)
        return false;
    for (int j = 1; j < b->jobs; j++) {
        pid_t pid = fork();
        if (pid == 0) {
            work(b, j);
            _exit(0);
        }
        if (pid < 0)
            return false;
    }
    work(b, 0);
    while (wait(NULL) > 0)
        ;
    for (size_t i = 0; i < n; i++)
        if (!b->cells[i].ok)
            return false;
    return true;
}

/* --- statistics --- */

/* Student's t for a two-sided 95 % interval. */
static double t95(int df)
{
    static const double t[] = {12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306,
                               2.262,  2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
                               2.110,  2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064,
                               2.060,  2.056, 2.052, 2.048, 2.045, 2.042};
    return df < 1 ? NAN : df <= 30 ? t[df - 1] : 1.96 + 2.4 / df;
}

typedef struct interval {
    double mean, half;
} interval;

static interval interval_of(const double *v, int n)
{
    double sum = 0, square = 0;
    for (int i = 0; i < n; i++)
        sum += v[i];
    for (int i = 0; i < n; i++)
        square += (v[i] - sum / n) * (v[i] - sum / n);
    return (interval){sum / n, n > 1 ? t95(n - 1) * sqrt(square / (n - 1) / n) : 0};
}

static const pb_result *cell(const bench *b, int policy, int seed)
{
    return &b->cells[policy * b->seeds + seed].result;
}

static interval of(const bench *b, int policy, int metric)
{
    double v[SEEDS_MAX];
    for (int s = 0; s < b->seeds; s++)
        v[s] = cell(b, policy, s)->metric[metric];
    return interval_of(v, b->seeds);
}

/* The first policy's value less the other's, seed by seed. */
static interval paired(const bench *b, int other, int metric)
{
    double v[SEEDS_MAX];
    for (int s = 0; s < b->seeds; s++)
        v[s] = cell(b, 0, s)->metric[metric] - cell(b, other, s)->metric[metric];
    return interval_of(v, b->seeds);
}

/* Of all but the first. */
static int best_other(const bench *b, int metric)
{
    int best = 1;
    for (int p = 2; p < b->policies_n; p++) {
        double diff = of(b, p, metric).mean - of(b, best, metric).mean;
        if (columns[metric].more_is_better ? diff > 0 : diff < 0)
            best = p;
    }
    return best;
}

static const char *judge(interval d, bool more_is_better)
{
    double gain = more_is_better ? d.mean : -d.mean;
    return gain > d.half ? "better" : gain < -d.half ? "worse" : "equal within the interval";
}

/* --- report --- */

static void print_header(const bench *b)
{
    static const char *const knows[] = {"events", "routed", "none"};
    const char *name = strrchr(b->trace_path, '/');
    printf("%s: %d requests%s, %d engines %s, pool %lld tokens, rate %g, knowledge %s, %d seeds "
           "from %llu\n\n",
           name ? name + 1 : b->trace_path, b->trace.rows_n,
           b->trace.closed ? " (closed loop)" : "", b->setup.engines, b->timing,
           (long long)b->setup.sim.pool_tokens, b->setup.rate, knows[b->setup.knowledge], b->seeds,
           (unsigned long long)b->seed0);
}

static void print_table(const bench *b)
{
    printf("| policy |");
    for (int m = 0; m < PB_METRICS; m++)
        printf(" %s |", columns[m].title);
    printf(" busy %% |\n|---|");
    for (int m = 0; m < PB_METRICS; m++)
        printf("---|");
    printf("---|\n");
    for (int p = 0; p < b->policies_n; p++) {
        double busy = 0;
        printf("| %s |", b->policies[p].spec);
        for (int m = 0; m < PB_METRICS; m++) {
            interval i = of(b, p, m);
            const column *c = &columns[m];
            printf(" %.*f ± %.*f |", c->places, i.mean * c->scale, c->places, i.half * c->scale);
        }
        for (int s = 0; s < b->seeds; s++)
            busy += cell(b, p, s)->busy / b->seeds;
        printf(" %.0f |\n", busy * 100);
    }
}

static void print_verdict(const bench *b)
{
    if (b->policies_n < 2)
        return;
    printf("\n%s beside the best other, seed by seed:\n\n", b->policies[0].spec);
    for (int m = 0; m < PB_METRICS; m++) {
        int p = best_other(b, m);
        interval d = paired(b, p, m);
        const column *c = &columns[m];
        printf("- %s: %+.*f ± %.*f against %s: %s\n", c->title, c->places, d.mean * c->scale,
               c->places, d.half * c->scale, b->policies[p].spec, judge(d, c->more_is_better));
    }
    printf("\n");
}

static bool any_faults(const bench *b)
{
    bool any = false;
    for (int i = 0; i < b->policies_n * b->seeds; i++) {
        const pb_result *r = &b->cells[i].result;
        if (r->faults == 0)
            continue;
        fprintf(stderr, "bench_policies: %s: %lld decisions or events failed\n",
                b->policies[i / b->seeds].spec, (long long)r->faults);
        any = true;
    }
    return any;
}

static json_t *json_interval(interval i)
{
    return json_pack("{s:f, s:f}", "mean", i.mean, "half95", i.half);
}

static json_t *json_run(const bench *b, int p, int s)
{
    const pb_result *r = cell(b, p, s);
    char digest[32];
    snprintf(digest, sizeof digest, "%016llx", (unsigned long long)r->digest);
    json_t *o = json_pack("{s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:s}", "seed",
                          (json_int_t)(b->seed0 + (uint64_t)s), "requests", (json_int_t)r->requests,
                          "refused", (json_int_t)r->refused, "preempted", (json_int_t)r->preempted,
                          "busy", r->busy, "cached_error_share", r->known, "virtual_s",
                          r->virtual_s, "choices", digest);
    for (int m = 0; m < PB_METRICS; m++)
        json_object_set_new(o, columns[m].name, json_real(r->metric[m]));
    return o;
}

static json_t *json_policy(const bench *b, int p)
{
    json_t *runs = json_array();
    json_t *o = json_object();
    json_object_set_new(o, "policy", json_string(b->policies[p].spec));
    for (int m = 0; m < PB_METRICS; m++) {
        json_t *x = json_interval(of(b, p, m));
        if (p > 0)
            json_object_set_new(x, "first_less_this", json_interval(paired(b, p, m)));
        json_object_set_new(o, columns[m].name, x);
    }
    for (int s = 0; s < b->seeds; s++)
        json_array_append_new(runs, json_run(b, p, s));
    json_object_set_new(o, "runs", runs);
    return o;
}

static bool write_json(const bench *b)
{
    const pb_setup *s = &b->setup;
    char hash[32];
    if (!b->json_path)
        return true;
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)b->trace.bytes_hash);
    json_t *all = json_array();
    for (int p = 0; p < b->policies_n; p++)
        json_array_append_new(all, json_policy(b, p));
    json_t *o = json_pack(
        "{s:s, s:i, s:I, s:i, s:s, s:I, s:f, s:f, s:i, s:I, s:I, s:f, s:f, s:i, s:i, s:i, s:o}",
        "trace_xxh3", hash, "rows", b->trace.rows_n, "rows_left_out", (json_int_t)b->trace.left_out,
        "engines", s->engines, "timing", b->timing, "pool_tokens", (json_int_t)s->sim.pool_tokens,
        "rate", s->rate, "window_s", s->window_s, "knowledge", (int)s->knowledge, "events_delay_us",
        (json_int_t)s->events_delay_us, "gauges_us", (json_int_t)s->gauges_us, "warm_share",
        b->trace_options.warm_share, "think_most_s", b->trace_options.think_most_s, "max_prompt",
        b->trace_options.max_prompt, "scale", b->trace_options.scale, "seeds", b->seeds, "policies",
        all);
    bool ok = o && json_dump_file(o, b->json_path, JSON_INDENT(1) | JSON_REAL_PRECISION(9)) == 0;
    json_decref(o);
    if (!ok)
        fprintf(stderr, "bench_policies: cannot write %s\n", b->json_path);
    return ok;
}

int main(int argc, char **argv)
{
    static bench b;
    b.seeds = 10;
    b.seed0 = 1;
    b.jobs = 1;
    b.timing = "llama-8b-h100-tp1";
    b.trace_options = PB_TRACE_OPTIONS;
    pb_setup_default(&b.setup);
    pl_log_init(PL_LOG_WARN, 0);
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc)
            usage("an option has no value");
        option(&b, argv[i], argv[i + 1]);
    }
    const pl_timing *timing = pl_timing_find(pl_str_c(b.timing));
    if (!timing)
        usage(pl_timing_names());
    b.setup.sim.timing = *timing;
    if (!b.trace_path || !b.policies_n)
        usage("--trace and --policy are needed");
    if (!pb_trace_read(b.trace_path, &b.trace_options, &b.trace) || !run_all(&b))
        return 1;
    print_header(&b);
    print_table(&b);
    print_verdict(&b);
    bool ok = write_json(&b) && !any_faults(&b);
    for (int i = 0; i < b.policies_n; i++)
        json_decref(b.policies[i].params);
    munmap(b.cells, (size_t)b.policies_n * (size_t)b.seeds * sizeof *b.cells);
    pb_trace_free(&b.trace);
    return ok ? 0 : 1;
}
