/* What the router itself has routed: which workers have been sent which prompt prefixes, and so
 * probably hold their KV. It stands in for the index where an engine publishes no events
 * (approximate mode, TTL 120 s), and beside the index it bridges the time until the events of a
 * routed prompt arrive (predict-on-route, an instance of its own with a TTL of 5 s).
 *
 * A prompt is a list of keys (keys.h): key i is a cumulative hash of its chunks 0 .. i, of the
 * model and of whatever else sets a space apart, so that equal keys mean equal prefixes and spaces
 * never meet. A worker holds the first m chunks of a prompt when
 *  - they were routed to it at most ttl ago (an insertion renews all of its prefix),
 *  - and it has not been dropped since (worker_gone, reconcile, forget),
 *  - and no correction speaks against it: see pl_approx_correct,
 *  - and the byte cap has not pushed them out, the least recently used first.
 *
 * All functions but new and free may be called from any thread; each takes short locks of its own.
 */
#ifndef PL_APPROX_H
#define PL_APPROX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/err.h"

#define PL_APPROX_TTL_MS       120000u /* approximate mode */
#define PL_APPROX_PREDICTED_MS 5000u   /* predict-on-route */
#define PL_APPROX_MIN_BYTES    (1u << 20)
#define PL_APPROX_CHUNKS_MAX   16384u /* of a prompt; what is behind them is ignored */
#define PL_APPROX_TTL_MAX_MS   (24u * 3600 * 1000)

typedef struct pl_approx pl_approx;

typedef struct pl_approx_options {
    pl_clock clock;     /* monotonic; called from every thread */
    uint32_t ttl_ms;    /* 1 .. PL_APPROX_TTL_MAX_MS */
    uint32_t slots;     /* workers have slots 0 .. slots - 1; at most 65535 */
    uint64_t max_bytes; /* for all of it, PL_APPROX_MIN_BYTES or more; beside them up to 64 KiB for
                           each of 31 sizes of memory are held in reserve */
} pl_approx_options;

/* PL_EINVALID, PL_ENOMEM. */
int pl_approx_new(const pl_approx_options *o, pl_approx **out) __attribute__((warn_unused_result));
void pl_approx_free(pl_approx *a); /* no call is under way; NULL is fine */

typedef struct pl_approx_hit {
    int slot;
    uint32_t chunks; /* of the prompt's start that it holds: 1 or more */
    uint32_t since;  /* the function's own */
} pl_approx_hit;

/* Who holds how much of a prompt: fills out[] (room for cap) with those that hold at least the
 * first chunk, in no order, each once, and returns their number. Does not count as use. */
int pl_approx_match(pl_approx *a, const uint64_t *keys, size_t n, pl_approx_hit *out, int cap);

/* The prompt goes to that worker now. PL_EINVALID for a slot out of range; PL_ENOMEM: then it holds
 * a part of the prompt or nothing new. */
int pl_approx_insert(pl_approx *a, const uint64_t *keys, size_t n, int slot);

/* The engine says (cached_tokens) that of this prompt, routed to it at routed_ns, it had only the
 * first `cached` chunks. So whatever it was sent before that time behind those chunks, in this
 * prompt or in others that go on from there, it has lost. What it has been sent since then stays,
 * this prompt too: the engine has just computed it. `cached` of n or more says nothing against
 * anything. */
void pl_approx_correct(pl_approx *a, const uint64_t *keys, size_t n, int slot, size_t cached,
                       uint64_t routed_ns);

/* The worker does not hold this prompt's chunks from `from` on (it failed before it had computed
 * them; or, in event mode, the real index has them by now), nor what goes on from there. */
void pl_approx_forget(pl_approx *a, const uint64_t *keys, size_t n, int slot, size_t from);

/* Everything that was routed to the worker before until_ns is forgotten, in constant time; memory
 * follows with the TTL. For predictions: the worker has published an event, and until_ns is when
 * the oldest request was routed to it that has no first token yet (else now): what came before that
 * is in the index by now, or is not true. Times that go back change nothing. */
void pl_approx_reconcile(pl_approx *a, int slot, uint64_t until_ns);
/* The same for all that it was sent: the worker is gone, or has restarted. What is routed to the
 * slot in the same millisecond is forgotten, too. */
void pl_approx_worker_gone(pl_approx *a, int slot);

/* Frees what has expired: a slice of at most 256 entries. True when there may be more. Insertions
 * do the same by the way; an idle router should call it a few times a second. */
bool pl_approx_advance(pl_approx *a);

typedef struct pl_approx_stats {
    uint64_t nodes;            /* runs of chunks that are held by the same workers */
    uint64_t chunks;           /* keys kept */
    uint64_t entries;          /* (run, worker), expired ones too until they are found */
    uint64_t bytes;            /* in use for all of it */
    uint64_t inserted;         /* prompts */
    uint64_t expired, evicted; /* nodes */
    uint64_t corrected;        /* corrections that took something back */
} pl_approx_stats;
void pl_approx_stats_of(pl_approx *a, pl_approx_stats *out);

#endif
