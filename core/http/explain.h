/* What a request would meet: it is read as if it had come to the public port and decided on, by the
 * policy of loop 0 as it is now, and goes nowhere. No counter, prediction, ticket or turn of a
 * session is left behind (policy/dry.h). */
#ifndef PL_EXPLAIN_H
#define PL_EXPLAIN_H

#include <jansson.h>

#include "router.h"

/* On the control thread, once; answer is taken: 200 and the explanation, or another status and an
 * error object {"error":{...}}; NULL: out of memory. */
typedef void (*pl_explain_done)(void *ctx, int status, json_t *answer);

/* On the control thread. The path is one that takes prompts; of the head only the headers count;
 * everything is copied. PL_ENOMEM, PL_ECANCELLED (the router is stopping): done is not called. */
int pl_explain(pl_router *r, pl_str path, const pl_head *head, pl_str body, pl_explain_done done,
               void *ctx) __attribute__((warn_unused_result));

#endif
