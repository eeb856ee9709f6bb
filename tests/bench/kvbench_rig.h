/* An index and the naive one on the workload of kvbench.h, with what they are compared by: the
 * peer's figures, passes over a section, times. For the thread that measures; bench_index.c says
 * what is measured. */
#ifndef PL_KVBENCH_RIG_H
#define PL_KVBENCH_RIG_H

#include "kv/index.h"
#include "kvbench.h"

enum { KVBENCH_REPS = 9, KVBENCH_ROUNDS = 3, KVBENCH_WARM = 3 };

/* What was measured of the peer, and of the naive index beside it (ns; p99 ns; M/s). */
typedef struct kvbench_peer {
    uint64_t workers;
    double naive[5], query[5], p99_256, p99_1024, stores, removals, reader, reader_p99, events;
} kvbench_peer;
/* NULL: nobody was measured with so many workers. */
const kvbench_peer *kvbench_peer_of(uint64_t workers);

/* The same operations with a store's local hashes in front of its engine hashes, as the index wants
 * them. */
typedef struct kvbench_ops {
    uint64_t *p;
    const uint64_t *end;
    const kvbench_section *from;
} kvbench_ops;

typedef struct kvbench_rig {
    kvbench_stream stream;
    uint32_t each; /* blocks of the index for one of the stream */
    kvbench_ops section[KVBENCH_SECTIONS];
    pl_index *ix;
    pl_index_space space;
    pl_index_reader *reader;
    kvbench_naive *naive;
    pl_match *out;
    kvbench_score *scores;
    double naive_query[5], query[5], p99[5], naive_mixed, mixed, naive_load, load, naive_remove,
        remove;
    double heap_per_entry, own_per_entry;
} kvbench_rig;

/* Exits when there is no memory or the stream is not the one it must be. `each`: blocks of the
 * index for one of the stream; without `naive` the index is alone. */
kvbench_rig *kvbench_rig_new(uint64_t workers, uint64_t entries, uint32_t each, bool naive);
void kvbench_rig_free(kvbench_rig *b);
/* An empty index (and naive index) in the place of the old ones. */
void kvbench_renew(kvbench_rig *b);
void kvbench_renew_naive(kvbench_rig *b);

void kvbench_apply(kvbench_rig *b, const kvbench_op *op);               /* a store or a removal */
uint64_t kvbench_answer_sum(const pl_match *out, int n, uint32_t each); /* a query's checksum */
/* Seconds for all of a section; queries only count with `checked`. */
double kvbench_run(kvbench_rig *b, int which, bool checked);
double kvbench_run_naive(kvbench_rig *b, int which, bool checked);
/* The p99 of a section's queries, each with a look at the clock around it. */
double kvbench_latency(kvbench_rig *b, int which);

void kvbench_die(const char *what);
/* What this thread has had of a processor, in ns: the machine may be shared. */
uint64_t kvbench_cpu_ns(void);
double kvbench_quantile(double *v, size_t n, double q); /* sorts */
/* The median of seconds for a section, in ns an operation. */
double kvbench_each_ns(const kvbench_rig *b, int which, double *seconds, size_t n);

/* kvbench_cold.c */
void kvbench_cold(uint64_t workers, uint64_t entries, bool learnt, const uint32_t *mib, size_t n);
/* kvbench_tokens.c */
void kvbench_tokens(kvbench_rig *b);

#endif
