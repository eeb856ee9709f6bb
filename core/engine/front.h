/* `perilune engine`: the simulated engine behind HTTP, good enough to stand in for SGLang and vLLM.
 */
#ifndef PL_FRONT_H
#define PL_FRONT_H

#include "engine/publish.h"
#include "engine/sim.h"

enum { PL_FRONT_RANKS_MAX = 256 };

typedef struct pl_front_options {
    pl_str listen;  /* host:port, 127.0.0.1:0 picks a port */
    pl_str kind;    /* sglang | vllm */
    pl_str *models; /* default: one, "sim" */
    int models_n;
    double speed;              /* times real time; 1 */
    int default_output_tokens; /* when a request sets no limit: 64 */
    bool streaming_sessions;   /* SGLang's --enable-streaming-session */
    pl_sim_options sim;        /* of each rank */
    int ranks_n;               /* data-parallel ranks: 1 */
    /* Rank r publishes on the port of kv.endpoint and r, with replay on that of kv.replay and r;
     * rank is not read, a format of BY_KIND is chosen. An empty endpoint: nothing is published. */
    pl_publish_options kv;
    uint64_t seed;
} pl_front_options;

void pl_front_options_default(pl_front_options *o);

/* Runs until SIGTERM or SIGINT. Logs event "listening" with the address. 0, or a negative pl_err
 * with a message. */
int pl_front_run(const pl_front_options *o, pl_errbuf *eb);

#endif
