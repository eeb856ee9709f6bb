/* Counters of one loop, and the Prometheus text over all of them. Written by the loop's thread with
 * relaxed stores, read by whoever renders. */
#ifndef PL_METRICS_H
#define PL_METRICS_H

#include <stdatomic.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/hist.h"

/* name, help. Exposed as perilune_NAME_total. */
#define PL_COUNTER_MAP(XX)                                                                         \
    XX(requests, "Requests for an inference path whose head was read")                             \
    XX(responses_2xx, "Answers to clients by class")                                               \
    XX(responses_3xx, "Answers to clients by class")                                               \
    XX(responses_4xx, "Answers to clients by class")                                               \
    XX(responses_5xx, "Answers to clients by class")                                               \
    XX(client_gone, "Requests whose client left before the end")                                   \
    XX(retries, "Requests sent again to another engine")                                           \
    XX(resends, "Requests sent again because a pooled connection was stale")                       \
    XX(retry_budget_exhausted, "Retries not made because the budget was used up")                  \
    XX(upstream_failures, "Tries that failed at the engine: connect, reset, timeout, 5xx")         \
    XX(streams, "Answers streamed")                                                                \
    XX(streams_broken, "Streams that the engine broke off")                                        \
    XX(chunks, "Reads of body bytes passed from engines to clients")                               \
    XX(body_bytes_in, "Request body bytes")                                                        \
    XX(body_bytes_out, "Response body bytes")                                                      \
    XX(queued, "Requests that waited for capacity")                                                \
    XX(queue_timeouts, "Requests whose wait for capacity ran out")                                 \
    XX(queue_full, "Requests refused because the waiting room was full")                           \
    XX(shed, "Requests refused by admit")                                                          \
    XX(shrunk, "Requests whose output limit admit lowered")                                        \
    XX(no_worker, "Requests refused because no engine of their model was usable")                  \
    XX(unknown_model, "Requests for a model that no engine serves")                                \
    XX(bad_body, "Request bodies refused")                                                         \
    XX(unauthorized, "Requests without a valid key")                                               \
    XX(pins_removed, "Routing pins removed from untrusted clients")                                \
    XX(usage_swallowed, "Usage chunks asked for by the router and kept from the client")           \
    XX(paused, "Times an engine was paused because its client was slow")                           \
    XX(decisions, "Decisions made")                                                                \
    XX(engine_cut, "Requests cut because their engine was removed")                                \
    XX(session_bad, "Requests refused for what they say of their session")                         \
    XX(session_conflicts, "Requests whose header and body named different sessions")               \
    XX(session_lost, "Turns refused because their session's engine state is gone")                 \
    XX(session_trimmed, "Turns cut down to what is new in their session")                          \
    XX(session_untrimmed, "Turns that went past their engine's session: nothing could be proved")  \
    XX(session_spills, "Turns sent elsewhere than where their session is bound")                   \
    XX(session_discarded, "Turns whose client left, read to their end")                            \
    XX(degraded_no_session_engine, "Faults given to degrade by kind")                              \
    XX(degraded_open_failed, "Faults given to degrade by kind")                                    \
    XX(degraded_bound_gone, "Faults given to degrade by kind")                                     \
    XX(tokenize_calls, "Calls of an engine's /tokenize")                                           \
    XX(tokenize_failed, "Calls of an engine's /tokenize that gave no token ids")                   \
    XX(tokenize_late, "Requests that went on before /tokenize had answered")                       \
    XX(retention_set, "Requests sent with retention_seconds")                                      \
    XX(retention_skipped, "Requests whose extra_args took no retention_seconds")

typedef struct pl_loop_metrics {
#define XX(name, help) _Atomic uint64_t name;
    PL_COUNTER_MAP(XX)
#undef XX
    pl_hist ttft; /* head complete to first body byte */
    pl_hist e2e;  /* head complete to end */
    pl_hist queue_wait;
    pl_hist decision; /* records, hooks and checks */
} pl_loop_metrics;

/* Owner thread only. */
static inline void pl_count(_Atomic uint64_t *c, uint64_t by)
{
    atomic_store_explicit(c, atomic_load_explicit(c, memory_order_relaxed) + by,
                          memory_order_relaxed);
}

#endif
