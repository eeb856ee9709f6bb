/* The comparison of policies in virtual time: a trace of requests, one run of it over simulated
 * engines under one policy, and what came out. bench_policies.c reads the command line and writes
 * the report; a test uses the rest. Everything belongs to the thread (or process) that uses it. */
#ifndef POLICIES_BENCH_H
#define POLICIES_BENCH_H

#include <stdbool.h>
#include <stdint.h>

#include <jansson.h>

#include "engine/sim.h"

/* --- policies_trace.c --- */

/* One request. Its prompt: `blocks` ids at trace->ids[first], of block_tokens tokens each, cut at
 * `input` tokens (the last one may be partial); tokens behind the last id are nobody else's. */
typedef struct pb_row {
    int64_t at_us;    /* open loop: when it arrives, by the trace */
    int64_t think_us; /* closed loop: after the end of the session's row before it */
    int64_t first;
    int32_t blocks;
    int32_t input, output; /* tokens */
    int32_t session;       /* what consistent_hash is given as the session id */
} pb_row;

/* Rows of one session follow each other; closed loop: each waits for the one before it. */
typedef struct pb_session {
    int32_t first_row, rows;
    uint32_t warm_from, warm_to; /* ids that all sessions share, by their distance from warm_from */
} pb_session;

typedef struct pb_trace {
    bool
        closed; /* claude_code: closed loop, ids local to the session; else open loop, ids global */
    int block_tokens;
    int64_t bucket_us; /* open loop: the trace's times are multiples of about this */
    pb_row *rows;
    int rows_n;
    pb_session *sessions; /* closed only */
    int sessions_n;
    uint32_t *ids;
    int64_t ids_n;
    int64_t
        left_out; /* rows whose prompt is above max_prompt, with what follows in their session */
    uint64_t bytes_hash; /* XXH3 of the file */
} pb_trace;

typedef struct pb_trace_options {
    int max_rows;        /* 0: all; of sessions: whole ones, until there are so many rows */
    int max_prompt;      /* tokens; longer ones are left out */
    double warm_share;   /* claude_code: of a session's tools and system prompt, shared by all */
    double think_most_s; /* claude_code: longer pauses are cut */
    int scale;           /* open loop: prompts are so many times as long */
} pb_trace_options;

#define PB_TRACE_OPTIONS ((pb_trace_options){0, 200000, 0.5, 60, 1})

/* The format is told by the first line. False with a message on stderr. */
bool pb_trace_read(const char *path, const pb_trace_options *o, pb_trace *out);
void pb_trace_free(pb_trace *t);
/* The row's prompt, equal in every run. */
void pb_trace_tokens(const pb_trace *t, int row, uint32_t *out);

/* --- policies_run.c --- */

typedef enum pb_knowledge { PB_EVENTS, PB_ROUTED, PB_NONE } pb_knowledge;

typedef struct pb_setup {
    int engines;
    pl_sim_options sim;
    double rate;             /* times the trace's own */
    double window_s;         /* closed loop: sessions start within so long, at rate 1 */
    pb_knowledge knowledge;  /* what the router knows of caches: events, what it routed, nothing */
    int64_t events_delay_us; /* from an engine's cache to the index */
    int64_t gauges_us;       /* between two looks at the engines' gauges; 0: never */
} pb_setup;

void pb_setup_default(pb_setup *s);

typedef struct pb_policy {
    const char *name;     /* ready-made, or a file */
    const json_t *params; /* or NULL */
} pb_policy;

typedef enum pb_metric {
    PB_CACHED,   /* cached prompt tokens / prompt tokens */
    PB_TTFT_P50, /* seconds */
    PB_TTFT_P99,
    PB_TTFT_MEAN,
    PB_E2E_MEAN,
    PB_METRICS
} pb_metric;

typedef struct pb_result {
    double metric[PB_METRICS];
    double busy;      /* share of the engines' time with a request in flight */
    double known;     /* |predicted - actual| cached tokens / prompt tokens; -1: nobody predicted */
    int64_t requests; /* that ended */
    int64_t refused;  /* did not fit into an engine */
    int64_t faults;   /* decisions the policy did not make, events the index did not take: 0 */
    int64_t preempted;
    uint64_t digest; /* of every choice in its order */
    double virtual_s;
} pb_result;

/* False with a message on stderr. Equal arguments give equal results, bit for bit. */
bool pb_run(const pb_trace *t, const pb_setup *s, const pb_policy *p, uint64_t seed,
            pb_result *out);

#endif
