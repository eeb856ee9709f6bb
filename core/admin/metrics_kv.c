/* What is known of KV caches, on the Prometheus page: see metrics.c. */
#include <stdlib.h>

#include "admin/metrics_text.h"
#include "kv/feed.h"
#include "router.h"

/* The feed's figures of one worker, read once for the whole page. */
typedef struct fed {
    const char *worker;
    pl_feed_stats s;
} fed;

static const struct {
    const char *name, *type, *help;
    size_t at;
} counters[] = {
#define COUNTER(field, help)                                                                       \
    {                                                                                              \
        "perilune_kv_" #field "_total", "counter", help, offsetof(pl_feed_stats, field)            \
    }
    COUNTER(messages, "Messages with KV events received"),
    COUNTER(bytes, "Bytes of them"),
    COUNTER(gaps, "Times that batches of events were missing"),
    COUNTER(missed, "Batches that were missing"),
    COUNTER(duplicates, "Batches that came again"),
    COUNTER(restarts, "Restarts of the engine told by its numbers"),
    COUNTER(resets, "Times that all of a worker was dropped, to begin anew"),
    COUNTER(replays, "Replays asked for"),
    COUNTER(replays_failed, "Replays that failed"),
    COUNTER(snapshots, "Snapshots asked for"),
    COUNTER(bad, "Messages that are no batch of events"),
    COUNTER(floods, "Times that the worker sent too much"),
    COUNTER(disconnects, "Connections to the publisher lost"),
    COUNTER(held_dropped, "Batches dropped for want of room during a replay"),
#undef COUNTER
};

/* What kept events out of the index, by the name of its count; the others have metrics. */
static const struct {
    const char *reason;
    size_t at;
} refusals[] = {
#define REASON(name)                                                                               \
    {                                                                                              \
#name, offsetof(pl_apply_counts, name)                                                     \
    }
    REASON(removed_unknown), REASON(bad_events),    REASON(bad_block_size), REASON(bad_counts),
    REASON(bad_names),       REASON(partial),       REASON(sparse),         REASON(unknown_parents),
    REASON(unresolved),      REASON(unknown_ranks), REASON(unknown_media),  REASON(unknown_types),
    REASON(unnamed_lora),    REASON(refused),
#undef REASON
};

static const struct {
    const char *name, *help;
    size_t at;
} applied[] = {
#define APPLIED(name, metric, help)                                                                \
    {                                                                                              \
        "perilune_kv_" metric "_total", help, offsetof(pl_apply_counts, name)                      \
    }
    APPLIED(batches, "batches", "Batches of events applied"),
    APPLIED(events, "events", "Events in them"),
    APPLIED(stores, "stores", "BlockStored events"),
    APPLIED(stored, "blocks_stored", "Blocks put into the index"),
    APPLIED(copied, "blocks_copied", "Blocks put into a further tier"),
    APPLIED(removals, "removals", "BlockRemoved events"),
    APPLIED(removed, "blocks_removed", "Entries taken out of the index"),
    APPLIED(clears, "clears", "AllBlocksCleared events"),
#undef APPLIED
};

#define LENGTH(list) (sizeof(list) / sizeof *(list))

static uint64_t at(const void *s, size_t offset)
{
    return *(const uint64_t *)(const void *)((const char *)s + offset);
}

static void states(pl_text *t, const fed *f, int n)
{
    static const pl_trust_state list[] = {
#define XX(name, text) PL_TRUST_##name,
        PL_TRUST_STATE_MAP(XX)
#undef XX
    };
    pl_text_family(t, "perilune_kv_state", "gauge",
                   "1 for the state that the worker's stream of events is in");
    for (int i = 0; i < n; i++)
        for (size_t k = 0; k < LENGTH(list); k++)
            pl_text_value(t, f[i].s.state == list[k], 2, "worker", f[i].worker, "state",
                          pl_trust_state_name(list[k]));
}

static void gauges(pl_text *t, const fed *f, int n)
{
    pl_text_family(t, "perilune_kv_connected", "gauge",
                   "1 while connected to the worker's publisher");
    for (int i = 0; i < n; i++)
        pl_text_value(t, f[i].s.connected, 1, "worker", f[i].worker);
    pl_text_family(t, "perilune_kv_complete", "gauge",
                   "1 while the index has all that the worker published");
    for (int i = 0; i < n; i++)
        pl_text_value(t, f[i].s.complete, 1, "worker", f[i].worker);
    pl_text_family(t, "perilune_kv_nothing_indexed", "gauge",
                   "1 while events come and no block of them could be indexed");
    for (int i = 0; i < n; i++)
        pl_text_value(t, f[i].s.nothing_indexed, 1, "worker", f[i].worker);
    pl_text_family(t, "perilune_kv_last_sequence", "gauge", "Number of the batch applied last");
    for (int i = 0; i < n; i++)
        if (f[i].s.has_seq)
            pl_text_value(t, (double)f[i].s.last_seq, 1, "worker", f[i].worker);
    pl_text_family(t, "perilune_kv_last_event_age_seconds", "gauge",
                   "Since the last batch; absent before the first");
    for (int i = 0; i < n; i++)
        if (f[i].s.last_event_seconds >= 0)
            pl_text_value(t, f[i].s.last_event_seconds, 1, "worker", f[i].worker);
    pl_text_family(t, "perilune_kv_lag_seconds", "gauge",
                   "Between the engine's clock and ours, last batch; absent where not told");
    for (int i = 0; i < n; i++)
        if (f[i].s.lag_seconds >= 0)
            pl_text_value(t, f[i].s.lag_seconds, 1, "worker", f[i].worker);
    pl_text_family(t, "perilune_kv_held_bytes", "gauge", "Events held while a replay runs");
    for (int i = 0; i < n; i++)
        pl_text_value(t, (double)f[i].s.held_bytes, 1, "worker", f[i].worker);
}

static void feeds(pl_text *t, const fed *f, int n)
{
    states(t, f, n);
    gauges(t, f, n);
    for (size_t k = 0; k < LENGTH(counters); k++) {
        pl_text_family(t, counters[k].name, counters[k].type, counters[k].help);
        for (int i = 0; i < n; i++)
            pl_text_value(t, (double)at(&f[i].s, counters[k].at), 1, "worker", f[i].worker);
    }
    for (size_t k = 0; k < LENGTH(applied); k++) {
        pl_text_family(t, applied[k].name, "counter", applied[k].help);
        for (int i = 0; i < n; i++)
            pl_text_value(t, (double)at(&f[i].s.counts, applied[k].at), 1, "worker", f[i].worker);
    }
    pl_text_family(t, "perilune_kv_refused_total", "counter",
                   "What could not be indexed, or was not there to be removed, by reason");
    for (int i = 0; i < n; i++)
        for (size_t k = 0; k < LENGTH(refusals); k++)
            pl_text_value(t, (double)at(&f[i].s.counts, refusals[k].at), 2, "worker", f[i].worker,
                          "reason", refusals[k].reason);
}

static void holdings(pl_text *t, pl_holdings *h)
{
    pl_index_stats x;
    pl_holdings_stats s;
    pl_index_stats_of(pl_holdings_index(h), &x);
    pl_holdings_stats_of(h, &s);
    pl_text_one(t, "perilune_kv_index_spaces", "gauge", "Namespaces of the index: block size, LoRA",
                (double)x.spaces);
    pl_text_one(t, "perilune_kv_index_blocks", "gauge", "Blocks in the index", (double)x.blocks);
    pl_text_one(t, "perilune_kv_index_entries", "gauge", "Blocks, workers and tiers that have them",
                (double)x.entries);
    pl_text_one(t, "perilune_kv_index_bytes", "gauge", "Memory of the index", (double)x.bytes);
    pl_text_one(t, "perilune_kv_index_evicted_total", "counter",
                "Blocks that the index gave up at its cap", (double)x.evicted);
    const struct {
        const char *kind;
        const pl_approx_stats *s;
    } list[] = {{"routed", &s.routed}, {"predicted", &s.predicted}};
    pl_text_family(t, "perilune_kv_approximate_bytes", "gauge",
                   "Memory of what was routed (without events) and predicted (until events come)");
    for (int i = 0; i < 2; i++)
        pl_text_value(t, (double)list[i].s->bytes, 1, "kind", list[i].kind);
    pl_text_family(t, "perilune_kv_approximate_entries", "gauge", "Runs of keys and their workers");
    for (int i = 0; i < 2; i++)
        pl_text_value(t, (double)list[i].s->entries, 1, "kind", list[i].kind);
    pl_text_family(t, "perilune_kv_approximate_evicted_total", "counter", "Given up at the cap");
    for (int i = 0; i < 2; i++)
        pl_text_value(t, (double)list[i].s->evicted, 1, "kind", list[i].kind);
    pl_text_one(t, "perilune_kv_corrections_total", "counter",
                "Times that an engine's cached_tokens took back what was thought to be there",
                (double)s.routed.corrected);
    pl_text_one(t, "perilune_kv_compared_requests_total", "counter",
                "Requests whose cached tokens were predicted and told by the engine",
                (double)s.accuracy.requests);
    pl_text_one(t, "perilune_kv_predicted_cached_tokens_total", "counter",
                "Cached tokens predicted for them", (double)s.accuracy.predicted_tokens);
    pl_text_one(t, "perilune_kv_actual_cached_tokens_total", "counter",
                "Cached tokens as the engines counted", (double)s.accuracy.actual_tokens);
    pl_text_one(t, "perilune_kv_cached_tokens_error_total", "counter",
                "Sum of the differences, either way", (double)s.accuracy.error_tokens);
}

void pl_metrics_kv(pl_text *t, pl_router *r, const pl_view *v)
{
    if (!r->holdings)
        return;
    holdings(t, r->holdings);
    fed *f = r->feed && v->workers_n ? calloc((size_t)v->workers_n, sizeof *f) : NULL;
    int n = 0;
    for (int i = 0; f && i < v->workers_n; i++)
        if (pl_feed_stats_of(r->feed, v->workers[i]->slot, &f[n].s) == 0)
            f[n++].worker = v->workers[i]->name;
    if (n)
        feeds(t, f, n);
    free(f);
}
