/* The records of policy_abi.h as JSON: every field by its name, what is a constant in Lua by that
 * constant's word ("live" for pl.KV_LIVE), infinity as null. NULL: out of memory. */
#ifndef PL_RECORD_JSON_H
#define PL_RECORD_JSON_H

#include <jansson.h>

#include "policy_abi.h"

json_t *pl_number_json(double v);
json_t *pl_req_json(const struct pl_req *r);
json_t *pl_worker_json(const struct pl_worker *w);
json_t *pl_session_json(const struct pl_session *s);

#endif
