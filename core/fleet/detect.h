/* Reads from an engine's own endpoints what it is and which models it serves. A detection is a
 * chain of up to four fetches, started by the health monitor on the control loop. */
#ifndef PL_DETECT_H
#define PL_DETECT_H

#include "fleet/fleet.h"
#include "http/upstream.h"

/* What a detection found; ids are valid while done runs. */
typedef struct pl_detected {
    int err;              /* 0; else nothing below is valid and what was known stays */
    const char *detail;   /* when err: static text for people */
    int status;           /* when err: of the answer that was no use, 0 when there was none */
    pl_engine_kind kind;  /* auto: it could not be told */
    bool no_models;       /* it has no /v1/models */
    bool caps_known;      /* else what was known of them stays */
    uint32_t caps;        /* bits of pl_engine_caps */
    int32_t block_tokens; /* of its KV blocks; 0: not told */
    int64_t kv_tokens;    /* capacity of one rank's KV cache; 0: not told */
    pl_str info;          /* SGLang's /server_info as it came; {NULL,0}: none */
    const pl_str *ids;    /* in the engine's order */
    int ids_n;
    const pl_str *adapters; /* those of the ids that name a parent: LoRA adapters */
    int adapters_n;
    int dropped; /* ids that are too long, not printable or too many */
} pl_detected;

typedef struct pl_detect pl_detect;

/* given: the configured kind, auto: find out. done runs once, never from inside. NULL when out of
 * memory. The pool outlives the detection. */
pl_detect *pl_detect_start(pl_pool *p, pl_engine_kind given, uint64_t timeout_ms,
                           void (*done)(void *user, const pl_detected *found), void *user);
/* No done any more; from inside done it does nothing. */
void pl_detect_cancel(pl_detect *d);

#endif
