/* See record_json.h. Called by http/explain.c; pure. The lists below must name every field in the
 * order of policy_abi.h: the offsets are compared, so a field that is added there stops the build
 * here. */
#include "policy/record_json.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>

/* D double, I int32_t, B bool; W a word of the list, by number */
#define REQ_FIELDS(D, I, B, W)                                                                     \
    D(arrival_seconds)                                                                             \
    D(prompt_tokens)                                                                               \
    D(max_tokens)                                                                                  \
    D(body_bytes) D(waited_seconds) D(expected_output_tokens) I(priority) W(api, apis) I(attempt)  \
        I(choices) I(strict_priority) B(stream) B(has_session) B(exact_tokens)

#define WORKER_FIELDS(D, I, B, W)                                                                  \
    D(inflight)                                                                                    \
    D(queued_prefill_tokens)                                                                       \
    D(streams)                                                                                     \
    D(cached_tokens) D(cached_host_tokens) D(cached_disk_tokens) D(decode_blocks)                  \
        D(session_tokens) D(running_requests) D(waiting_requests) D(kv_usage)                      \
            D(gauges_age_seconds) D(max_inflight) D(max_queued_prefill_tokens)                     \
                D(prefill_tokens_per_second) D(ttft_seconds) D(weight) I(index) I(slot)            \
                    I(generation) I(rank) W(why, whys) I(block_tokens) W(kv_trust, trusts)         \
                        I(sessions) B(eligible)

#define SESSION_FIELDS(D, I, B, W)                                                                 \
    D(age_seconds)                                                                                 \
    D(idle_seconds)                                                                                \
    D(ttl_seconds)                                                                                 \
    D(held_tokens) D(id_hash) D(parent_hash) W(event, events) I(turn) W(kind, kinds) I(bound_slot) \
        I(bound_generation) I(bound_index) B(has_parent) B(delta) B(final)

/* The same fields one after the other: as large as the record, or one of them is missing. */
#define AS_D(name)        double name;
#define AS_I(name)        int32_t name;
#define AS_B(name)        bool name;
#define AS_W(name, words) int32_t name;
#define CHECK(record, FIELDS)                                                                      \
    struct listed_##record {                                                                       \
        FIELDS(AS_D, AS_I, AS_B, AS_W)                                                             \
    };                                                                                             \
    _Static_assert(sizeof(struct listed_##record) == sizeof(struct record), "a field is missing")
CHECK(pl_req, REQ_FIELDS);
CHECK(pl_worker, WORKER_FIELDS);
CHECK(pl_session, SESSION_FIELDS);

static const char *const apis[] = {"other",        "chat",          "completions", "responses",
                                   "messages",     "embeddings",    "rerank",      "score",
                                   "classify",     "generate",      "tokenize",    "detokenize",
                                   "open_session", "close_session", NULL};
static const char *const whys[] = {"eligible",    "unhealthy", "breaker_open", "draining",
                                   "at_capacity", "tried",     "no_sessions",  NULL};
static const char *const trusts[] = {"routed", "live", "behind", "stale", NULL};
static const char *const events[] = {"none", "open", "bind", "turn", "close", NULL};
static const char *const kinds[] = {[PL_DEFAULT] = "default",
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

#define SET_D(name)        bad |= json_object_set_new(j, #name, pl_number_json(r->name));
#define SET_I(name)        bad |= json_object_set_new(j, #name, json_integer(r->name));
#define SET_B(name)        bad |= json_object_set_new(j, #name, json_boolean(r->name));
#define SET_W(name, words) bad |= json_object_set_new(j, #name, word(words, r->name));
#define FILL(FIELDS)                                                                               \
    json_t *j = json_object();                                                                     \
    int bad = 0;                                                                                   \
    FIELDS(SET_D, SET_I, SET_B, SET_W)                                                             \
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
