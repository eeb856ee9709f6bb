/* Reading engines' gauges: see gauge_read.h. Called by gauges.c (and, for sizes, by detect.c) on
 * the control loop; the workers' fields are atomics that all loops read. */
#include "fleet/gauge_read.h"

#include <jansson.h>
#include <math.h>
#include <stddef.h>

#include "base/err.h"
#include "fleet/prom.h"
#include "policy_abi.h"

#define MAX_REQUESTS 1e9

static void set_clear(pl_gauge_set *set)
{
    const pl_gauge_values unknown = {-1, -1, -1, 0, 0, false};
    for (int i = 0; i < PL_GAUGE_RANKS; i++)
        set->ranks[i] = unknown;
    set->unranked = unknown;
    set->ranks_n = 0;
}

/* NULL: a rank beyond all that a worker can have. */
static pl_gauge_values *values_of(pl_gauge_set *set, int64_t rank)
{
    if (rank < 0)
        return &set->unranked;
    if (rank >= PL_GAUGE_RANKS)
        return NULL;
    if (rank >= set->ranks_n)
        set->ranks_n = (int)rank + 1;
    return &set->ranks[rank];
}

static int known(const pl_gauge_values *v)
{
    return (v->running >= 0) + (v->waiting >= 0) + (v->kv_usage >= 0);
}

static int known_of_all(const pl_gauge_set *set)
{
    int n = known(&set->unranked);
    for (int i = 0; i < set->ranks_n; i++)
        n += known(&set->ranks[i]);
    return n;
}

/* --- single values: nonsense stays unknown --- */

static void take_requests(double *to, double v)
{
    if (v >= 0 && v <= MAX_REQUESTS && v > *to)
        *to = v;
}

/* A little above 1 is full. */
static void take_share(double *to, double v)
{
    if (v >= 0 && v <= 1.5)
        *to = fmax(*to, fmin(v, 1));
}

int64_t pl_gauge_size(double v, double max)
{
    return v >= 1 && v <= max && v == floor(v) ? (int64_t)v : 0;
}

static void take_block(pl_gauge_values *to, double v)
{
    int32_t block = (int32_t)pl_gauge_size(v, PL_GAUGE_MAX_BLOCK_TOKENS);
    if (block > to->block_tokens)
        to->block_tokens = block;
}

static void take_capacity(pl_gauge_values *to, double v)
{
    int64_t tokens = pl_gauge_size(v, PL_GAUGE_MAX_KV_TOKENS);
    if (tokens > to->kv_tokens)
        to->kv_tokens = tokens;
}

/* --- /metrics --- */

typedef enum gauge { RUNNING, WAITING, USAGE, CAPACITY, BLOCK, VLLM_CONFIG, VLLM_SLEEP } gauge;

typedef struct known_name {
    pl_str name;
    gauge gauge;
} known_name;

/* whole names: vLLM has others that begin like these */
static const known_name sglang[] = {
    {PL_STR_INIT("num_running_reqs"), RUNNING}, {PL_STR_INIT("num_queue_reqs"), WAITING},
    {PL_STR_INIT("token_usage"), USAGE},        {PL_STR_INIT("max_total_num_tokens"), CAPACITY},
    {PL_STR_INIT("page_size"), BLOCK},
};
static const known_name vllm[] = {
    {PL_STR_INIT("num_requests_running"), RUNNING},
    {PL_STR_INIT("num_requests_waiting"), WAITING},
    {PL_STR_INIT("kv_cache_usage_perc"), USAGE},
    {PL_STR_INIT("gpu_cache_usage_perc"), USAGE}, /* before V1 */
    {PL_STR_INIT("cache_config_info"), VLLM_CONFIG},
    {PL_STR_INIT("engine_sleep_state"), VLLM_SLEEP},
};
static const struct {
    pl_str prefix, rank_label;
    const known_name *names;
    size_t names_n;
} makers[] = {
    {PL_STR_INIT("vllm:"), PL_STR_INIT("engine"), vllm, sizeof vllm / sizeof *vllm},
    {PL_STR_INIT("sglang:"), PL_STR_INIT("dp_rank"), sglang, sizeof sglang / sizeof *sglang},
    {PL_STR_INIT("sglang_"), PL_STR_INIT("dp_rank"), sglang, sizeof sglang / sizeof *sglang},
};

/* vLLM tells its cache's shape in labels. */
static void take_vllm_config(pl_gauge_values *to, const pl_prom_line *line)
{
    int64_t block =
        pl_prom_label_whole(line, PL_STR("block_size"), (uint64_t)PL_GAUGE_MAX_BLOCK_TOKENS);
    int64_t blocks =
        pl_prom_label_whole(line, PL_STR("num_gpu_blocks"), (uint64_t)PL_GAUGE_MAX_KV_TOKENS);
    if (block <= 0)
        return;
    take_block(to, (double)block);
    if (blocks > 0)
        take_capacity(to, (double)block * (double)blocks);
}

/* A sample for each state, of which one is 1. */
static void take_vllm_sleep(pl_gauge_values *to, const pl_prom_line *line, double v)
{
    char state[PL_PROM_LABEL_MAX];
    size_t n;
    if (pl_prom_label(line, PL_STR("sleep_state"), state, &n))
        to->asleep |= pl_str_eq((pl_str){state, n}, PL_STR("awake")) ? v == 0 : v == 1;
}

static void take_line(pl_gauge_set *set, const pl_prom_line *line, gauge g, pl_str rank_label)
{
    double v;
    if (!pl_prom_value(line, &v))
        return;
    char text[PL_PROM_LABEL_MAX];
    size_t n;
    int64_t rank = pl_prom_label_whole(line, rank_label, INT32_MAX);
    if (rank < 0 && pl_prom_label(line, rank_label, text, &n) && n > 0)
        return; /* a rank that is no number */
    pl_gauge_values *to = values_of(set, rank);
    if (!to)
        return;
    switch (g) {
    case RUNNING:
        take_requests(&to->running, v);
        break;
    case WAITING:
        take_requests(&to->waiting, v);
        break;
    case USAGE:
        take_share(&to->kv_usage, v);
        break;
    case CAPACITY:
        take_capacity(to, v);
        break;
    case BLOCK:
        take_block(to, v);
        break;
    case VLLM_CONFIG:
        take_vllm_config(to, line);
        break;
    case VLLM_SLEEP:
        take_vllm_sleep(to, line, v);
        break;
    }
}

int pl_gauges_of_metrics(pl_str page, pl_gauge_set *set)
{
    pl_prom_line line;
    bool any = false;
    set_clear(set);
    while (pl_prom_next(&page, &line)) {
        any = true;
        for (size_t m = 0; m < sizeof makers / sizeof *makers; m++) {
            if (!pl_str_starts(line.name, makers[m].prefix))
                continue;
            pl_str name = {line.name.p + makers[m].prefix.n, line.name.n - makers[m].prefix.n};
            for (size_t i = 0; i < makers[m].names_n; i++)
                if (pl_str_eq(name, makers[m].names[i].name))
                    take_line(set, &line, makers[m].names[i].gauge, makers[m].rank_label);
        }
    }
    return any ? known_of_all(set) : PL_ESYNTAX;
}

/* --- /v1/loads --- */

/* NaN, which nothing takes, when it is no number. */
static double number(const json_t *object, const char *key)
{
    const json_t *v = json_object_get(object, key);
    return json_is_number(v) ? json_number_value(v) : NAN;
}

int pl_gauges_of_loads(pl_str json, pl_gauge_set *set)
{
    set_clear(set);
    json_t *root = json_loadb(json.p ? json.p : "", json.n, 0, NULL);
    const json_t *loads = json_object_get(root, "loads");
    if (!json_is_array(loads)) {
        json_decref(root);
        return PL_ESYNTAX;
    }
    size_t i;
    json_t *load;
    json_array_foreach(loads, i, load)
    {
        const json_t *rank = json_object_get(load, "dp_rank");
        json_int_t r = json_is_integer(rank) ? json_integer_value(rank) : -1;
        if (!json_is_object(load) || (json_is_integer(rank) && r < 0))
            continue;
        pl_gauge_values *to = values_of(set, r);
        if (!to)
            continue;
        take_requests(&to->running, number(load, "num_running_reqs"));
        take_requests(&to->waiting, number(load, "num_waiting_reqs"));
        take_share(&to->kv_usage, number(load, "token_usage"));
        take_capacity(to, number(load, "max_total_num_tokens"));
    }
    json_decref(root);
    return known_of_all(set);
}

/* --- to the workers --- */

/* Unknown as soon as one part is. */
static double sum(double so_far, double v)
{
    return so_far >= 0 && v >= 0 ? so_far + v : -1;
}

/* All ranks as one: of an engine that is one worker here. Usages are weighed by the ranks'
 * capacities when all are known, else they count the same. */
static pl_gauge_values together(const pl_gauge_set *set)
{
    pl_gauge_values all = {0, 0, -1, 0, 0, false};
    double usage = 0, weighed = 0, capacity = 0;
    int ranks = 0;
    bool sized = true;
    for (int i = 0; i < set->ranks_n; i++) {
        const pl_gauge_values *v = &set->ranks[i];
        if (v->block_tokens > all.block_tokens)
            all.block_tokens = v->block_tokens;
        all.kv_tokens += v->kv_tokens;
        all.asleep |= v->asleep;
        if (!known(v))
            continue;
        ranks++;
        all.running = sum(all.running, v->running);
        all.waiting = sum(all.waiting, v->waiting);
        usage = sum(usage, v->kv_usage);
        sized = sized && v->kv_tokens > 0;
        capacity += (double)v->kv_tokens;
        weighed += v->kv_usage * (double)v->kv_tokens;
    }
    if (ranks == 0)
        all.running = all.waiting = -1;
    else if (usage >= 0)
        all.kv_usage = sized ? weighed / capacity : usage / ranks;
    return all;
}

void pl_gauges_sizes(pl_worker_state *w, int32_t block_tokens, int64_t kv_tokens)
{
    bool by_events = atomic_load_explicit(&w->kv_trust, memory_order_relaxed) != PL_KV_ROUTED;
    if (block_tokens && !w->engine->block_tokens && !by_events)
        atomic_store_explicit(&w->block_tokens, block_tokens, memory_order_relaxed);
    if (kv_tokens)
        atomic_store_explicit(&w->kv_tokens, kv_tokens, memory_order_relaxed);
}

static void write_sizes(pl_worker_state *w, const pl_gauge_values *v)
{
    pl_gauges_sizes(w, v->block_tokens, v->kv_tokens);
}

static bool write_load(pl_worker_state *w, const pl_gauge_values *v, uint64_t at_ns)
{
    if (!known(v))
        return false;
    atomic_store_explicit(&w->running_requests, v->running, memory_order_relaxed);
    atomic_store_explicit(&w->waiting_requests, v->waiting, memory_order_relaxed);
    atomic_store_explicit(&w->kv_usage, v->kv_usage, memory_order_relaxed);
    atomic_store_explicit(&w->asleep, v->asleep, memory_order_relaxed);
    atomic_store_explicit(&w->gauges_at_ns, at_ns, memory_order_release);
    return true;
}

int pl_gauges_apply(const pl_gauge_set *set, pl_engine *e, uint64_t at_ns)
{
    if (e->workers_n == 1) {
        pl_gauge_values all = together(set);
        const pl_gauge_values *v = known(&all) ? &all : &set->unranked;
        write_sizes(&e->workers[0], &set->unranked);
        write_sizes(&e->workers[0], &all);
        return write_load(&e->workers[0], v, at_ns);
    }
    int written = 0;
    for (int i = 0; i < e->workers_n; i++) {
        pl_worker_state *w = &e->workers[i];
        /* all ranks have the same block size; a capacity may be their sum */
        pl_gauges_sizes(w, set->unranked.block_tokens, 0);
        if (i >= set->ranks_n)
            continue;
        write_sizes(w, &set->ranks[i]);
        written += write_load(w, &set->ranks[i], at_ns);
    }
    return written;
}
