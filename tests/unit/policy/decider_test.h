/* Shared by the tests of the decider: four engines of one worker each on a virtual clock, with 0,
 * 1, 2, 3 requests in flight of at most 10; a request and a decision. */
#ifndef DECIDER_TEST_H
#define DECIDER_TEST_H

#include "policy_test.h"

#include "base/log.h"
#include "policy/decide.h"

#define WORKERS 4

static pl_shared *shared;
static uint64_t now_ns;
static pl_engine *engines[WORKERS];
static pl_worker_state *workers[WORKERS];
static pl_model model = {.id = PL_STR_INIT("llama"), .workers = workers, .workers_n = WORKERS};
static pl_policy_stats stats;
static pl_decider *d;
static pl_ask ask;
static pl_decision out;

static inline int setup(void **state)
{
    shared = pl_shared_new();
    now_ns = 1000000000000u;
    pl_log_init(PL_LOG_ERROR + 1, 0);
    return make_dir(state);
}

static inline int teardown(void **state)
{
    pl_shared_free(shared);
    return remove_dir(state);
}

static inline void begin(const char *policy)
{
    for (int i = 0; i < WORKERS; i++) {
        char url[64];
        snprintf(url, sizeof url, "http://127.0.0.1:%d", 9000 + i);
        pl_engine_spec spec = {.url = pl_str_c(url), .weight = 1, .dp_size = 1, .max_inflight = 10};
        pl_errbuf eb;
        if (pl_engine_new(&spec, &engines[i], &eb) < 0)
            fail_msg("%s", eb.text);
        atomic_store(&engines[i]->health, PL_HEALTH_UP);
        workers[i] = &engines[i]->workers[0];
        workers[i]->slot = i;
        workers[i]->generation = 3;
        atomic_store(&workers[i]->inflight, i);
    }
    memset(&stats, 0, sizeof stats);
    memset(&ask, 0, sizeof ask);
    ask.model = &model;
    ask.req.max_tokens = -1;
    ask.req.prompt_tokens = 100;
    ask.strings = (pl_request_view){.model = model.id, .seed = 42};
    pl_decider_options o;
    pl_decider_options_default(&o);
    o.clock = pl_clock_virtual(&now_ns);
    d = pl_decider_new(&o, &stats);
    if (policy)
        assert_null(pl_decider_swap(d, ready_vm(policy, shared), 1));
}

static inline void end(void)
{
    pl_decider_free(d);
    for (int i = 0; i < WORKERS; i++)
        pl_engine_unref(engines[i]);
}

static inline int decide(void)
{
    pl_decide(d, &ask, &out);
    return out.worker ? out.worker->slot : -1;
}

static inline uint64_t count(_Atomic uint64_t *c)
{
    return atomic_load(c);
}

#endif
