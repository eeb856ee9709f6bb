/* The circuit breaker of an engine: consecutive failures open it; after a backoff a few probes may
 * pass; one success closes it, one failure opens it again for twice as long. Never told of a 4xx:
 * that is the client's. Any thread, without locks. */
#ifndef PL_BREAKER_H
#define PL_BREAKER_H

#include <stdbool.h>
#include <stdint.h>

struct pl_engine;

typedef enum pl_breaker_state {
    PL_BREAKER_CLOSED,
    PL_BREAKER_OPEN,
    PL_BREAKER_HALF_OPEN
} pl_breaker_state;
const char *pl_breaker_state_name(pl_breaker_state s); /* closed open half_open */

typedef struct pl_breaker_options {
    uint32_t failures;        /* consecutive failures that open it, 5 */
    uint64_t backoff_ns;      /* first, 1 s; doubles up to */
    uint64_t max_backoff_ns;  /* 30 s */
    int32_t half_open_probes; /* requests let through at once while half open, 1 */
} pl_breaker_options;
extern const pl_breaker_options pl_breaker_default;

/* May a request go there now? Does not claim anything. */
bool pl_breaker_allows(const struct pl_engine *e, const pl_breaker_options *o, uint64_t now_ns);
/* A request is being sent: claims a probe when half open. False: somebody else took the last one,
 * or it is open. Sets *probe, which the caller hands back to exactly one of the three below. */
bool pl_breaker_begin(struct pl_engine *e, const pl_breaker_options *o, uint64_t now_ns,
                      bool *probe);
/* A success closes a half-open breaker when it was a probe's. A request that was sent before the
 * breaker opened neither closes nor opens it: it says nothing about the engine now. */
void pl_breaker_success(struct pl_engine *e, bool probe);
void pl_breaker_failure(struct pl_engine *e, const pl_breaker_options *o, uint64_t now_ns,
                        bool probe);
/* Neither: the client left, or a 4xx of its own. */
void pl_breaker_neutral(struct pl_engine *e, bool probe);
/* An active health check succeeded: an open breaker goes half open at once. */
void pl_breaker_health_ok(struct pl_engine *e, uint64_t now_ns);

#endif
