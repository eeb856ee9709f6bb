/* The inside of a run (policies_bench.h): what policies_run.c, the loop and its requests, and
 * policies_rig.c, which sets up what it runs on, share. Nobody else includes it. */
#ifndef POLICIES_INNER_H
#define POLICIES_INNER_H

#include "kv/holdings.h"
#include "policies_bench.h"
#include "policy/decide.h"

#define EPOCH_US ((int64_t)1000000000) /* clocks that begin at 0 look like "never" */

/* A change of a cache on its way to the index. */
typedef struct told {
    struct told *next;
    int64_t due_us;
    int slot;
    bool removed, has_parent;
    uint64_t parent;
    size_t n;
    uint64_t hashes[]; /* n of the engine's, then n local ones when stored */
} told;

typedef struct run run;

typedef struct machine {
    run *run;
    pl_sim *sim;
    pl_worker_state *w;
    int64_t busy_us, since_us;
    bool published; /* since the last look */
} machine;

typedef struct arrival {
    int64_t at_us;
    uint64_t tie;
    int row;
} arrival;

struct run {
    const pb_trace *trace;
    const pb_setup *setup;
    pb_result *out;
    int64_t now_us;
    uint64_t now_ns;
    pl_fleet *fleet;
    pl_view *view;
    const pl_model *model;
    pl_shared *shared;
    pl_policy_stats stats;
    pl_decider *decider;
    pl_holdings *holdings;
    pl_holdings_loop *loop;
    pl_block_space space;
    pl_index_space index_space;
    machine *machines;
    told *told_head, **told_tail;
    arrival *heap; /* by at_us, then tie */
    int heap_n;
    int64_t tick_us, look_us, gauges_us;
    pl_rng rng;
    uint32_t *tokens; /* of the prompt at hand */
    double *ttft;
    int64_t cached, prompted, predicted_error;
    double e2e_sum;
    int under_way;
    uint64_t failed;
};

/* Engines, knowledge and policy, all on the run's clock. False with a message on stderr; what was
 * opened is closed by pb_rig_close in any case. */
bool pb_rig_open(run *r, const pb_policy *p, uint64_t seed);
void pb_rig_close(run *r);
/* What was told first reaches the index. */
void pb_rig_hear(run *r);
/* As knowledge.c does twice a second. */
void pb_rig_look(run *r);
void pb_rig_read_gauges(run *r);
bool pb_fail(const char *what, const char *detail); /* says so; false */

#endif
