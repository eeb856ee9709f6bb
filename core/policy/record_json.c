/* See record_json.h. Called by http/explain.c; pure. The lists below must name every field in the
 * order of policy_abi.h: sizes are compared here, names by tests/flow/kv_admin.test.mjs. */
#include "policy/record_json.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>

/* D double, I int32_t, B bool, W a number that has a word in the list words_NAME */
#define REQ_FIELDS(XX)                                                                             \
    XX(D, arrival_seconds)                                                                         \
    XX(D, prompt_tokens)                                                                           \
    XX(D, max_tokens)                                                                              \
    XX(D, body_bytes)                                                                              \
    XX(D, waited_seconds)                                                                          \
    XX(D, expected_output_tokens)                                                                  \
    XX(I, priority)                                                                                \
    XX(W, api)                                                                                     \
    XX(I, attempt)                                                                                 \
    XX(I, choices)                                                                                 \
    XX(I, strict_priority)                                                                         \
    XX(B, stream)                                                                                  \
    XX(B, has_session)                                                                             \
    XX(B, exact_tokens)

#define WORKER_FIELDS(XX)                                                                          \
    XX(D, inflight)                                                                                \
    XX(D, queued_prefill_tokens)                                                                   \
    XX(D, streams)                                                                                 \
    XX(D, cached_tokens)                                                                           \
    XX(D, cached_host_tokens)                                                                      \
    XX(D, cached_disk_tokens)                                                                      \
    XX(D, decode_blocks)                                                                           \
    XX(D, session_tokens)                                                                          \
    XX(D, running_requests)                                                                        \
    XX(D, waiting_requests)                                                                        \
    XX(D, kv_usage)                                                                                \
    XX(D, gauges_age_seconds)                                                                      \
    XX(D, max_inflight)                                                                            \
    XX(D, max_queued_prefill_tokens)                                                               \
    XX(D, prefill_tokens_per_second)                                                               \
    XX(D, ttft_seconds)                                                                            \
    XX(D, weight)                                                                                  \
    XX(I, index)                                                                                   \
    XX(I, slot)                                                                                    \
    XX(I, generation)                                                                              \
    XX(I, rank)                                                                                    \
    XX(W, why)                                                                                     \
    XX(I, block_tokens)                                                                            \
    XX(W, kv_trust)                                                                                \
    XX(I, sessions)                                                                                \
    XX(B, eligible)

#define SESSION_FIELDS(XX)                                                                         \
    XX(D, age_seconds)                                                                             \
    XX(D, idle_seconds)                                                                            \
    XX(D, ttl_seconds)                                                                             \
    XX(D, held_tokens)                                                                             \
    XX(D, id_hash)                                                                                 \
    XX(D, parent_hash)                                                                             \
    XX(W, event)                                                                                   \
    XX(I, turn)                                                                                    \
    XX(W, kind)                                                                                    \
    XX(I, bound_slot)                                                                              \
    XX(I, bound_generation)                                                                        \
    XX(I, bound_index)                                                                             \
    XX(B, has_parent)                                                                              \
    XX(B, delta)                                                                                   \
    XX(B, final)

/* The same fields one after the other: as large as the record, or one of them is missing. */
#define TYPE_D         double
#define TYPE_I         int32_t
#define TYPE_B         bool
#define TYPE_W         int32_t
#define AS(kind, name) TYPE_##kind name;
#define CHECK(record, FIELDS)                                                                      \
    struct listed_##record {                                                                       \
        FIELDS(AS)                                                                                 \
    };                                                                                             \
    _Static_assert(sizeof(struct listed_##record) == sizeof(struct record), "a field is missing")
CHECK(pl_req, REQ_FIELDS);
CHECK(pl_worker, WORKER_FIELDS);
CHECK(pl_session, SESSION_FIELDS);

static const char *const words_api[] = {
    "other",      "chat",       "completions",  "responses",     "messages",
    "embeddings", "rerank",     "score",        "classify",      "generate",
    "tokenize",   "detokenize", "open_session", "close_session", NULL};
static const char *const words_why[] = {"eligible",    "unhealthy", "breaker_open", "draining",
                                        "at_capacity", "tried",     "no_sessions",  NULL};
static const char *const words_kv_trust[] = {"routed", "live", "behind", "stale", NULL};
static const char *const words_event[] = {"none", "open", "bind", "turn", "close", NULL};
static const char *const words_kind[] = {[PL_DEFAULT] = "default",
                                         [PL_ADMIT] = "admit",
                                         [PL_QUEUE] = "queue",
                                         [PL_SHED] = "shed",
                                         [PL_SHRINK] = "shrink",
                                         [PL_PROCEED] = "proceed",
                                         [PL_RETRY] = "retry",
                                         [PL_REJECT] = "reject",
                                         [PL_REBIND] = "rebind",
                                         [PL_CLOSE] = "close",
                                         [PL_EXTEND] = "extend",
                                         [PL_DROP] = "drop",
                                         [PL_ROUTER_ONLY] = "router_only",
                                         [PL_ENGINE_BACKED] = "engine_backed",
                                         NULL};

#define ALL_NAMED(words, last)                                                                     \
    _Static_assert(sizeof words / sizeof *words == (last) + 2, "a word is missing")
ALL_NAMED(words_api, PL_API_CLOSE_SESSION);
ALL_NAMED(words_why, PL_WHY_NO_SESSIONS);
ALL_NAMED(words_kv_trust, PL_KV_STALE);
ALL_NAMED(words_event, PL_SESSION_CLOSE);
ALL_NAMED(words_kind, PL_ENGINE_BACKED);

/* Whole numbers without a fraction: they are counts, mostly. */
json_t *pl_number_json(double v)
{
    if (v == floor(v) && fabs(v) < 9e15)
        return json_integer((json_int_t)v);
    return isfinite(v) ? json_real(v) : json_null();
}

static json_t *word(const char *const *words, int32_t v)
{
    for (int32_t i = 0; v >= 0 && words[i]; i++)
        if (i == v)
            return json_string(words[i]);
    return json_integer(v);
}

#define VALUE_D(name)   pl_number_json(r->name)
#define VALUE_I(name)   json_integer(r->name)
#define VALUE_B(name)   json_boolean(r->name)
#define VALUE_W(name)   word(words_##name, r->name)
#define SET(kind, name) bad |= json_object_set_new(j, #name, VALUE_##kind(name));
#define FILL(FIELDS)                                                                               \
    json_t *j = json_object();                                                                     \
    int bad = 0;                                                                                   \
    FIELDS(SET)                                                                                    \
    if (bad) {                                                                                     \
        json_decref(j);                                                                            \
        return NULL;                                                                               \
    }                                                                                              \
    return j

json_t *pl_req_json(const struct pl_req *r)
{
    FILL(REQ_FIELDS);
}

json_t *pl_worker_json(const struct pl_worker *r)
{
    FILL(WORKER_FIELDS);
}

json_t *pl_session_json(const struct pl_session *r)
{
    FILL(SESSION_FIELDS);
}
