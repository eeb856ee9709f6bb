/* The KV index workload: a deterministic stream of stores, removals and queries with the answer
 * that each query must get, and a naive index (a node for each block) that replays it, so that any
 * index can be put beside it as a multiple. The streams are byte for byte those that other indexes
 * were measured on: kvbench_sum has the sums of some. For one thread.
 *
 * A stream is 8-byte words, little endian. Word 0 of an operation: type (8 bits), has a parent (8),
 * worker (16), n (32), low to high. Word 1: a store's parent, or a query's checksum. Then
 *   store   n times {local hash, engine hash}
 *   remove  n engine hashes
 *   query   n local hashes
 * An engine hash is the sequence hash of Dynamo's router: XXH3, seed 1337, of the one before and
 * the local hash. The checksum of an answer is the sum of kvbench_mix(worker << 32 | depth). */
#ifndef PL_KVBENCH_H
#define PL_KVBENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { KVBENCH_STORE = 1, KVBENCH_REMOVE = 2, KVBENCH_QUERY = 3 };
enum {
    KVBENCH_LOAD,
    KVBENCH_Q1, /* queries of exactly 1, 16, 64, 256, 1024 blocks */
    KVBENCH_Q16,
    KVBENCH_Q64,
    KVBENCH_Q256,
    KVBENCH_Q1024,
    KVBENCH_MIXED, /* a query and stores a turn, then all that is removed: it can be repeated */
    KVBENCH_REMOVE_SECTION,
    KVBENCH_AFTER, /* queries after the removals */
    KVBENCH_SECTIONS
};

typedef struct kvbench_section {
    char name[16];
    uint64_t *p;
    size_t n, cap; /* words */
    uint64_t ops, blocks;
} kvbench_section;

typedef struct kvbench_stream {
    uint64_t workers, target, seed;
    uint64_t entries; /* (block, worker) pairs after the load */
    kvbench_section section[KVBENCH_SECTIONS];
} kvbench_stream;

typedef struct kvbench_op {
    int type;
    bool has_parent;
    uint32_t worker, n;
    uint64_t aux; /* parent, or checksum */
    const uint64_t *p;
} kvbench_op;

/* Makes the stream; exits when there is no memory. kvbench_free it. */
void kvbench_make(kvbench_stream *s, uint64_t workers, uint64_t target, uint64_t seed);
void kvbench_free(kvbench_stream *s);
/* The SHA-256 of the stream in its file format, in hexadecimal, and what it must be (NULL: not
 * known). */
void kvbench_sha256(const kvbench_stream *s, char hex[65]);
const char *kvbench_sum(uint64_t workers, uint64_t target, uint64_t seed);

static inline uint64_t kvbench_mix(uint64_t z) /* splitmix64's finaliser */
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* The operation at *p, which moves on to the next. */
static inline kvbench_op kvbench_next(const uint64_t **p)
{
    const uint64_t *w = *p;
    kvbench_op op = {.type = (int)(w[0] & 0xff),
                     .has_parent = w[0] >> 8 & 1,
                     .worker = w[0] >> 16 & 0xffff,
                     .n = (uint32_t)(w[0] >> 32),
                     .aux = w[1],
                     .p = w + 2};
    *p = op.p + (size_t)op.n * (op.type == KVBENCH_STORE ? 2 : 1);
    return op;
}

/* --- the naive index, for up to 256 workers --- */

typedef struct kvbench_naive kvbench_naive;
typedef struct kvbench_score {
    uint32_t worker, depth;
} kvbench_score;
kvbench_naive *kvbench_naive_new(void);
void kvbench_naive_free(kvbench_naive *x);
void kvbench_naive_store(kvbench_naive *x, const kvbench_op *op);
void kvbench_naive_remove(kvbench_naive *x, const kvbench_op *op);
uint32_t kvbench_naive_query(const kvbench_naive *x, const kvbench_op *op, kvbench_score *out);

#endif
