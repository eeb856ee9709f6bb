/* KV events in: one indexer thread that receives what engines publish (ZeroMQ) or what is handed to
 * it (HTTP), judges how far it can be believed (trust.h) and writes it into the index, of which it
 * is the only writer. Every function here may be called from any thread unless it says otherwise;
 * none waits for the thread but pl_feed_stop.
 *
 * A source is an engine with the slots of its ranks. Each rank publishes a stream of its own, on
 * its own port; the rank that a batch names wins over the port it came from.
 *
 * Over HTTP (pl_feed_ingest) come, as JSON or as the msgpack payload of the wire:
 *
 *     {"events": [event, ...], "ts": 1.5, "data_parallel_rank": 0, "seq": 7}
 *     [event, ...]
 *     event
 *
 * where everything but "events" may be absent and an event is either one of vLLM's
 *
 *     {"type": "BlockStored", "block_hashes": [1, "18446744073709551615"], "parent_block_hash":
 * null, "token_ids": [1, 2, ...], "block_size": 16, "medium": "GPU", "lora_name": null,
 *      "cache_salt": null, "extra_keys": null, "group_idx": null, "kv_cache_spec_kind": null}
 *     {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
 *     {"type": "AllBlocksCleared"}
 *
 * or a RouterEvent of Dynamo's, whose local hashes stand in place of tokens
 *
 *     {"worker_id": 1, "storage_tier": "device", "event": {"event_id": 1, "dp_rank": 0, "data":
 *       {"stored": {"parent_hash": null, "blocks": [{"block_hash": 1, "tokens_hash": 2}]}}}}
 *     ... "data": {"removed": {"block_hashes": [1]}} ...      ... "data": "cleared" ...
 *
 * A hash is a number of 64 bits, or that as a string (decimal, or hexadecimal after 0x). With "seq"
 * the batches of a slot must be numbered like a publisher's; without, they are taken as they come.
 */
#ifndef PL_FEED_H
#define PL_FEED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/str.h"
#include "kv/apply.h"
#include "kv/index.h"
#include "kv/trust.h"

typedef struct pl_feed pl_feed;

typedef struct pl_feed_limits {
    size_t message_bytes;   /* of one frame; a larger one ends the connection */
    int receive_messages;   /* that ZeroMQ reads ahead for us, per connection */
    int answer_messages;    /* the same of a replay: what an engine cannot pass on it drops */
    size_t answer_bytes;    /* of one replay or snapshot; more is a flood */
    size_t held_bytes;      /* kept while replays run, of all streams together */
    int asks;               /* replays and snapshots that run at once */
    size_t snapshot_blocks; /* in one snapshot */
    size_t ingest_bytes;    /* waiting from pl_feed_ingest */
} pl_feed_limits;
#define PL_FEED_LIMITS                                                                             \
    {                                                                                              \
        .message_bytes = 16u << 20, .receive_messages = 128, .answer_messages = 2000,              \
        .answer_bytes = (size_t)2 << 30, .held_bytes = 64u << 20, .asks = 8,                       \
        .snapshot_blocks = 4u << 20, .ingest_bytes = 64u << 20                                     \
    }

typedef struct pl_feed_options {
    pl_index *index;       /* outlives the feed */
    const pl_known *known; /* copied; NULL: none */
    pl_clock clock;        /* monotonic; the zero clock: the machine's */
    pl_feed_limits limits;
    pl_trust_options trust; /* replay and snapshot are set per source */
} pl_feed_options;
#define PL_FEED_OPTIONS                                                                            \
    {                                                                                              \
        .limits = PL_FEED_LIMITS, .trust = PL_TRUST_DEFAULTS                                       \
    }

int pl_feed_new(const pl_feed_options *o, pl_feed **out) __attribute__((warn_unused_result));
/* Starts the thread; once. What was added before is received from now on. */
int pl_feed_start(pl_feed *f, pl_errbuf *eb) __attribute__((warn_unused_result));
/* Ends the thread and waits for it; the index is left as it is. Not while another thread is in a
 * call. */
void pl_feed_stop(pl_feed *f);
void pl_feed_free(pl_feed *f); /* stops it; NULL is fine */

typedef enum pl_feed_mode {
    PL_FEED_INGEST,  /* pl_feed_ingest only */
    PL_FEED_CONNECT, /* to the engine's socket */
    PL_FEED_BIND     /* engines connect to ours; several may share an endpoint by their topics */
} pl_feed_mode;

/* Endpoints are ZeroMQ's: tcp://host:port (bind: an address of this machine or *, port * for any)
 * or ipc://path.
 */
typedef struct pl_feed_source {
    pl_str engine;    /* its name, for logs */
    const int *slots; /* one per rank */
    int ranks_n;
    uint32_t generation; /* of the slots */
    pl_str model;
    uint32_t block_tokens; /* 0: the first store says it */
    pl_feed_mode mode;
    pl_str endpoint; /* of rank 0; rank r has port + r */
    pl_str replay;   /* the same for the replay socket; empty: none */
    pl_str snapshot; /* for SGLang's snapshot-v1; empty: none */
    bool one_stream; /* one publisher speaks for all ranks: ports are not counted up */
    pl_str topic;    /* prefix of what is subscribed to */
} pl_feed_source;

/* PL_EINVALID with a message; PL_EEXISTS when a slot has a source; PL_ELIMIT, PL_ENOMEM. All
 * strings are copied. That an address cannot be used shows in the stats. */
int pl_feed_source_add(pl_feed *f, const pl_feed_source *s, pl_errbuf *eb)
    __attribute__((warn_unused_result));
/* Removes the source to which the slot belongs and all that the index has of its slots.
 * PL_ENOTFOUND. */
int pl_feed_source_remove(pl_feed *f, int slot);

/* Takes events for the slot's engine: a copy is handed to the thread. PL_ENOTFOUND; PL_ESYNTAX
 * with a message (JSON only: what is wrong inside a batch shows in the stats); PL_EBUSY: too much
 * is waiting, or the worker is not trusted for now: try again. */
int pl_feed_ingest(pl_feed *f, int slot, pl_str bytes, bool json, pl_errbuf *eb)
    __attribute__((warn_unused_result));

/* The worker has lost all that it had, and may not be able to say so (it sleeps). PL_ENOTFOUND. */
int pl_feed_emptied(pl_feed *f, int slot);

/* The router sends the worker a request now. Cheap: an atomic load most of the time. */
void pl_feed_touch(pl_feed *f, int slot);

typedef struct pl_feed_stats {
    char engine[128];
    int rank;
    uint32_t generation;
    pl_trust_state state;
    double since_seconds;      /* in this state */
    bool connected;            /* to the publisher's socket, as far as ZeroMQ tells */
    bool complete;             /* the index knows all that the engine published */
    bool nothing_indexed;      /* events came since it was empty, and not one block of them was */
    bool has_seq;              /* last_seq means something */
    uint64_t last_seq;         /* applied last */
    uint32_t block_tokens;     /* of its blocks; 0: not known yet */
    bool plain, eagle;         /* their windows, as pl_apply_rank has it */
    double lag_seconds;        /* between the engine's clock and ours, last batch; -1: not known */
    double last_event_seconds; /* since the last batch; -1: none came */
    /* The stream's own figures, up to floods and disconnects: where it speaks for all ranks they
     * are rank 0's, so that sums are right. */
    uint64_t held_batches, held_bytes, held_dropped; /* while a replay runs; for want of room */
    uint64_t messages, bytes;                        /* received live */
    uint64_t gaps, missed, duplicates, restarts, resets, replays, replays_failed, snapshots;
    uint64_t bad; /* messages that are no batch */
    uint64_t floods, disconnects;
    pl_apply_counts counts;
    char error[128];    /* why nothing is received; empty: nothing is wrong */
    char endpoint[256]; /* as bound or connected; empty: not yet, or over HTTP only */
} pl_feed_stats;

/* PL_ENOTFOUND when the slot has no source. Never waits for the thread's work. */
int pl_feed_stats_of(pl_feed *f, int slot, pl_feed_stats *out);

#endif
