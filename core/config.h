/* The router's configuration: defaults, then the file, then flags. Plain data; owned by one arena.
 */
#ifndef PL_CONFIG_H
#define PL_CONFIG_H

#include <jansson.h>
#include <stdio.h>

#include "base/arena.h"
#include "base/err.h"
#include "base/log.h"
#include "fleet/engine.h"
#include "fleet/gauges.h"
#include "fleet/health.h"
#include "http/server.h"
#include "http/upstream.h"
#include "kv/holdings.h"
#include "kv/tokens_cache.h"
#include "kv/trust.h"
#include "net.h"
#include "policy/decide.h"
#include "session/redis.h"
#include "session/sessions.h"

typedef struct pl_api_key {
    pl_str key;    /* secret: never logged */
    pl_str tenant; /* name it stands for */
} pl_api_key;

/* Whether an engine of some kind is given a hint. */
typedef enum pl_hint {
    PL_HINT_AUTO, /* when it is known to take it: pl_engine_caps */
    PL_HINT_OFF,
    PL_HINT_ON, /* retention: extra_args.retention_seconds */
    PL_HINT_TOP /* retention: retention_seconds at the top of the body */
} pl_hint;

typedef struct pl_config {
    pl_arena arena;      /* owns every string below */
    pl_str file;         /* the config file, empty without one */
    pl_str listen;       /* host:port */
    pl_str admin_listen; /* host:port, or "off" */
    pl_str admin_token;  /* needed when the admin address is not loopback */
    int threads;         /* event loops; 0: cores, at most 8 */
    pl_engine_spec *engines;
    int engines_n;
    pl_str policy;         /* name or file */
    json_t *policy_params; /* object */
    /* where these came from, for SIGHUP: flags win over the file every time it is read */
    bool policy_by_flag;
    json_t *flag_params; /* object: --set */
    pl_str file_policy;  /* the file's policy (or the default) and its params: a change of these */
    json_t *file_params; /* is taken on SIGHUP; NULL without a file */
    pl_str default_model;
    pl_str *extra_paths; /* further POST paths that are forwarded */
    int extra_paths_n;
    pl_api_key *api_keys; /* none: no key is asked for */
    int api_keys_n;
    pl_cidr *trusted; /* clients that may pin internals */
    int trusted_n;
    bool response_headers; /* x-perilune-* */
    bool metrics_public, metrics_admin;
    int usage; /* ask engines for usage in streams: 0 off, 1 when a hook needs it (auto), 2 always
                */
    unsigned queue_max;   /* 1024 */
    double queue_seconds; /* 30 */
    int retries;          /* 2 */
    double retry_budget;  /* 0.2: tokens a request adds to its loop's bucket (10 at first, at most
                             100); a  retry takes one */
    uint64_t drain_timeout_ms;  /* SIGTERM: 30 s for streams to end */
    uint64_t remove_timeout_ms; /* removing an engine: 30 s by default */
    uint32_t max_connections;   /* 10,000 */
    uint64_t max_body_memory;   /* 1 GiB */
    unsigned max_json_depth;    /* 64 */
    size_t max_id_bytes;        /* x-request-id, 128 */
    pl_server_options server;
    pl_pool_options pool;
    pl_health_options health;
    pl_gauges_options gauges;
    pl_decider_options decider;
    uint64_t seed; /* 0: from the OS */
    pl_log_level log_level;
    int log_json;           /* -1 auto */
    size_t vm_memory_bytes; /* 64 MiB a VM */
    /* sessions */
    pl_wish_options wish;
    pl_sessions_options sessions;
    uint64_t max_sessions;         /* 1,000,000 */
    int session_store;             /* 0: memory, 1: redis */
    pl_redis_options redis;        /* what the file says of it */
    bool forward_nvext;            /* engines get to see it */
    int retention[4], priority[4]; /* by pl_engine_kind: pl_hint */
    /* KV */
    int kv_use; /* 0 auto, 1 always, 2 off */
    pl_holdings_options holdings;
    uint64_t routed_ttl_ms, predicted_ttl_ms; /* of holdings */
    pl_trust_options trust;
    uint64_t tokenize_ms;    /* 20; 0: engines are not asked */
    uint64_t tokenize_bytes; /* 256 MiB of ids kept */
    bool assume_kv_reuse;
} pl_config;

/* All defaults. */
int pl_config_init(pl_config *c);
/* Reads a Lua file on top. Errors name the file and the key path. */
int pl_config_file(pl_config *c, const char *path, pl_errbuf *eb);
/* Reads an object as the file would give it (for the embedding API). `origin` names it in errors.
 */
int pl_config_json(pl_config *c, const json_t *root, const char *origin, pl_errbuf *eb);
/* One --engine argument: [name=]URL. */
int pl_config_add_engine(pl_config *c, pl_str arg, pl_errbuf *eb);
/* One --set argument: key=value; true/false and numbers are typed, the rest is a string. */
int pl_config_set_param(pl_config *c, pl_str arg, pl_errbuf *eb);
/* What belongs together: loopback rules, duplicate names, limits in order. */
int pl_config_finish(pl_config *c, pl_errbuf *eb);
void pl_config_free(pl_config *c);

/* An engine as an item of `engines` would give it (text or object): what POST /engines reads.
 * Strings go into the arena. `path` is where the value stands, "" for a whole body. */
int pl_config_engine(pl_arena *arena, const char *origin, const char *path, const json_t *value,
                     pl_engine_spec *out, pl_errbuf *eb);

/* Prints every key with its type, default and meaning: `perilune serve --help-config`. */
int pl_config_print_reference(FILE *out);

#endif
