/* Any bytes as an engine's answer about its load: whatever is understood of it is a number that
 * makes sense, for a rank that there is, and the workers get nothing else. The first byte chooses
 * the format and the number of workers. */
#include <stdlib.h>

#include "fleet/gauge_read.h"

#define MUST(x)                                                                                    \
    do {                                                                                           \
        if (!(x))                                                                                  \
            abort();                                                                               \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const pl_gauge_values *v)
{
    MUST(v->running == -1 || (v->running >= 0 && v->running <= 1e9));
    MUST(v->waiting == -1 || (v->waiting >= 0 && v->waiting <= 1e9));
    MUST(v->kv_usage == -1 || (v->kv_usage >= 0 && v->kv_usage <= 1));
    MUST(v->block_tokens >= 0 && v->block_tokens <= PL_GAUGE_MAX_BLOCK_TOKENS);
    MUST(v->kv_tokens >= 0 && (double)v->kv_tokens <= PL_GAUGE_MAX_KV_TOKENS);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static pl_gauge_set set;
    static const int workers[] = {1, 2, 256};
    if (size < 1)
        return 0;
    pl_str bytes = {(const char *)data + 1, size - 1};
    int n = data[0] & 1 ? pl_gauges_of_loads(bytes, &set) : pl_gauges_of_metrics(bytes, &set);
    MUST(n == PL_ESYNTAX || (n >= 0 && n <= 3 * (PL_GAUGE_RANKS + 1)));
    MUST(set.ranks_n >= 0 && set.ranks_n <= PL_GAUGE_RANKS);
    check(&set.unranked);
    for (int i = 0; i < PL_GAUGE_RANKS; i++)
        check(&set.ranks[i]);

    const pl_engine_spec spec = {
        .url = PL_STR("http://engine"), .weight = 1, .dp_size = workers[data[0] / 2 % 3]};
    pl_engine *e;
    pl_errbuf eb;
    MUST(pl_engine_new(&spec, &e, &eb) == 0);
    int written = pl_gauges_apply(&set, e, 7);
    MUST(written >= 0 && written <= e->workers_n && (n > 0 || written == 0));
    for (int i = 0; i < e->workers_n; i++) {
        const pl_worker_state *w = &e->workers[i];
        MUST(w->gauges_at_ns == 0 || w->gauges_at_ns == 7);
        MUST(w->gauges_at_ns || (w->running_requests == -1 && w->kv_usage == -1));
        MUST(w->kv_usage == -1 || (w->kv_usage >= 0 && w->kv_usage <= 1));
    }
    pl_engine_unref(e);
    return 0;
}
