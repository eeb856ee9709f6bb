/* The publisher of one rank of a simulated engine: what its prefix cache tells (blocks.h) goes out
 * as numbered batches on a ZeroMQ socket, as SGLang's and vLLM's publishers do it, and the last of
 * them can be asked for again.
 *
 *     live     [topic, seq, payload]      seq: 8 bytes, highest first, from 0
 *     replay   asked ["", seq] by a DEALER, answered with ["", seq, payload] for each batch from
 *              there on that is still kept, then ["", ff * 8, ""]; newer vLLM (PL_WIRE_VLLM_MAP)
 * has the topic before seq
 *
 * Everything happens on the loop's thread, but for ZeroMQ's own one; no call waits. Memory: the
 * batches kept, and what ZeroMQ holds for slow readers (100,000 messages each, then it drops, as
 * engines do). */
#ifndef PL_PUBLISH_H
#define PL_PUBLISH_H

#include <uv.h>

#include "base/err.h"
#include "base/str.h"
#include "engine/publish_wire.h"

typedef struct pl_publish_options {
    pl_str endpoint; /* tcp://HOST:PORT; port * or 0: any */
    pl_str replay;   /* the same; empty: no replay */
    pl_str topic;
    bool connect; /* to a subscriber that listens there, rather than listen */
    pl_wire wire;
    int buffer; /* batches kept for replay, at least 1; and at most 256 MiB of them, but for one */
    int rank;
} pl_publish_options;

typedef struct pl_publisher pl_publisher;

/* zmq: a ZeroMQ context, which outlives it. The options' strings are copied. */
int pl_publish_new(uv_loop_t *loop, void *zmq, const pl_publish_options *o, pl_publisher **out,
                   pl_errbuf *eb);
/* Closes at once; the memory goes when libuv has let go of it: run the loop afterwards. NULL is
 * fine. */
void pl_publish_free(pl_publisher *p);

/* For pl_sim_watch_kv, with the publisher as user: collects. */
extern const pl_sim_kv_events pl_publish_events;
/* What was collected becomes a batch. Call it after the engine has moved. */
void pl_publish_flush(pl_publisher *p);

/* --- faults --- */

typedef enum pl_publish_fault {
    PL_PUBLISH_LOSE,      /* not sent live; a replay has it */
    PL_PUBLISH_DUPLICATE, /* sent twice */
    PL_PUBLISH_GARBAGE,   /* sent as half of its payload and a byte that msgpack does not use; a
                             replay has it whole */
    PL_PUBLISH_FAULTS
} pl_publish_fault;

/* Strikes the next n batches that are sent, 0: none. One that is to be lost and something else is
 * lost only. */
void pl_publish_break(pl_publisher *p, pl_publish_fault fault, uint64_t n);
/* While paused, batches are numbered and kept but neither sent nor replayed; afterwards those that
 * are still kept are sent. */
void pl_publish_pause(pl_publisher *p, bool paused);
/* As a process that starts anew: numbers from 0, nothing kept, what was collected is forgotten, no
 * fault in force. Connections stay. */
void pl_publish_restart(pl_publisher *p);

typedef struct pl_publish_stats {
    const char *endpoint, *replay; /* as bound; "" without */
    uint64_t next;                 /* number of the next batch */
    uint64_t unsent;               /* batches that wait for the end of a pause */
    uint64_t kept_from;            /* number of the oldest one that is kept */
    uint64_t kept_bytes;
    bool paused;
    int64_t subscriptions;
    uint64_t sent, replays, restarts;
    uint64_t left[PL_PUBLISH_FAULTS], struck[PL_PUBLISH_FAULTS];
} pl_publish_stats;
void pl_publish_stats_of(const pl_publisher *p, pl_publish_stats *out);

#endif
