/* What engines say of their own load, read from their answers: SGLang's /v1/loads (JSON), SGLang's
 * and vLLM's /metrics (Prometheus text); then written to the workers. Nothing is made up: what is
 * not told, or is not a number that makes sense, is unknown. */
#ifndef PL_GAUGE_READ_H
#define PL_GAUGE_READ_H

#include "base/str.h"
#include "fleet/engine.h"

#define PL_GAUGE_RANKS 256

/* Of one data-parallel rank. */
typedef struct pl_gauge_values {
    double running, waiting, kv_usage; /* -1: unknown */
    int64_t kv_tokens;                 /* capacity; 0: unknown */
    int32_t block_tokens;              /* 0: unknown */
    bool asleep;                       /* vLLM's sleep mode, of any level */
} pl_gauge_values;

typedef struct pl_gauge_set {
    pl_gauge_values ranks[PL_GAUGE_RANKS];
    pl_gauge_values unranked; /* what names no rank */
    int ranks_n;              /* the highest rank named, and 1 */
} pl_gauge_set;

/* Both begin with an empty set and return how many of running, waiting and kv_usage were told (of
 * all ranks together). Several samples of one rank (tensor-parallel ranks each tell the same) count
 * once: the highest. PL_ESYNTAX: not an answer of this kind at all. */
int pl_gauges_of_metrics(pl_str page, pl_gauge_set *set);
int pl_gauges_of_loads(pl_str json, pl_gauge_set *set);

/* Writes them to e's workers: each its rank's; an engine of one worker, all ranks together (sums;
 * usage by capacity). Workers of whose load nothing was told keep what they have, with its age.
 * at_ns (machine clock) is when the engine was asked. The number of workers written. */
int pl_gauges_apply(const pl_gauge_set *set, pl_engine *e, uint64_t at_ns);

/* What an engine says of its sizes (0: nothing). A configured block size wins, then that of its KV
 * events: what is counted and what is indexed must be the same blocks. */
void pl_gauges_sizes(pl_worker_state *w, int32_t block_tokens, int64_t kv_tokens);

/* Bounds of what is believed of block sizes and capacities. */
#define PL_GAUGE_MAX_BLOCK_TOKENS 65536
#define PL_GAUGE_MAX_KV_TOKENS    1e12
/* The number when it is whole and from 1 to max, else 0. */
int64_t pl_gauge_size(double v, double max);

#endif
