/* An engine (an inference server) and its workers (its data-parallel ranks): identity, health,
 * breaker (breaker.h), ledger (ledger.h). Shared by all threads: identity is fixed for life, what
 * changes is atomic. Reference-counted: the fleet holds one reference while the engine is
 * configured, each request and snapshot holds its own. */
#ifndef PL_ENGINE_H
#define PL_ENGINE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/str.h"
#include "fleet/breaker.h"
#include "fleet/ledger.h"

typedef struct pl_engine pl_engine;

typedef enum pl_engine_kind {
    PL_KIND_AUTO,
    PL_KIND_SGLANG,
    PL_KIND_VLLM,
    PL_KIND_OTHER
} pl_engine_kind;
const char *pl_engine_kind_name(pl_engine_kind k); /* auto sglang vllm other */

/* What the health checks say. UNKNOWN until the first one has ended: not eligible. */
typedef enum pl_health { PL_HEALTH_UNKNOWN, PL_HEALTH_UP, PL_HEALTH_DOWN } pl_health;
const char *pl_health_name(pl_health h); /* unknown up down */
/* What the operator said. */
typedef enum pl_admin_state {
    PL_ENGINE_ACTIVE,
    PL_ENGINE_DRAINING,
    PL_ENGINE_REMOVED
} pl_admin_state;
const char *pl_admin_state_name(pl_admin_state s); /* active draining removed */

/* What an engine can do beyond serving, as its own endpoints tell (detect.c), asked again every
 * detect interval. */
typedef enum pl_engine_caps {
    PL_CAP_SESSIONS = 1,           /* it has /open_session at all (SGLang) */
    PL_CAP_STREAMING_SESSIONS = 2, /* started with --enable-streaming-session */
    PL_CAP_SESSION_TAG = 4, /* started with --enable-session-radix-cache: session_id counts */
    PL_CAP_RETENTION = 8,   /* takes extra_args.retention_seconds */
    PL_CAP_PRIORITY = 16    /* takes `priority` (a request with it is not refused) */
} pl_engine_caps;

/* How its KV events reach the router. */
typedef enum pl_events_mode {
    PL_EVENTS_AUTO, /* connect, if it says where; an endpoint that is given is connected to */
    PL_EVENTS_OFF,
    PL_EVENTS_INGEST, /* by POST /events alone */
    PL_EVENTS_CONNECT,
    PL_EVENTS_BIND /* the engine connects to us */
} pl_events_mode;

enum { PL_ENGINE_KEY_MAX = 4095 }; /* bytes */

typedef struct pl_engine_spec {
    pl_str name;    /* empty: host:port */
    pl_str url;     /* http://host[:port][/] */
    pl_str api_key; /* what the engine wants as a bearer token; empty: nothing */
    pl_engine_kind kind;
    double weight;                     /* > 0; 0: not given, 1 */
    int32_t max_inflight;              /* 0: no cap */
    int64_t max_queued_prefill_tokens; /* 0: no cap */
    int dp_size;                       /* 1; 0: not given, 1 */
    const pl_str *models;              /* NULL: ask the engine */
    int models_n;
    bool from_config;                                    /* SIGHUP may remove it */
    int events_mode;                                     /* pl_events_mode */
    pl_str events_endpoint, events_replay, events_topic; /* ZeroMQ's form, of rank 0 */
    bool events_one_stream;                              /* one publisher speaks for all ranks */
    uint32_t block_tokens;                               /* of its KV blocks; 0: asked for */
} pl_engine_spec;

struct pl_engine {
    _Atomic int refs;
    char name[128]; /* [A-Za-z0-9._:-] and [ ] of IPv6 */
    char url[512];  /* normalised: http://host:port, no path; an IPv6 address in [ ] */
    char host[256]; /* to connect to; an IPv6 address without [ ] */
    int port;
    char api_key[PL_ENGINE_KEY_MAX + 1]; /* never shown; "": the client's own passes */
    double weight;
    int32_t max_inflight;
    int64_t max_queued_prefill_tokens;
    bool from_config;
    bool models_given; /* models come from the configuration: not asked for */
    uint64_t id;       /* unique for the process */
    int events_mode;   /* pl_events_mode; never changed, as the next ones */
    char events_endpoint[256], events_replay[256], events_topic[128];
    bool events_one_stream;
    uint32_t block_tokens; /* as configured, 0: not given */
    _Atomic int kind;      /* pl_engine_kind, detected unless given */
    _Atomic int health, admin;
    _Atomic uint32_t caps;         /* bits of pl_engine_caps */
    _Atomic uint32_t opens_failed; /* of sessions, in a row */
    _Atomic uint64_t no_opens_until_ns;
    /* breaker: see breaker.h */
    _Atomic int breaker;       /* pl_breaker_state */
    _Atomic int probes;        /* half-open probes not handed back yet */
    _Atomic uint32_t failures; /* consecutive, while closed */
    _Atomic uint32_t trips;    /* times opened in a row, for the backoff */
    _Atomic uint64_t open_until_ns;
    /* counters for /metrics and /engines */
    _Atomic uint64_t requests, failed, client_errors, retries, health_checks, health_failures,
        breaker_opened, gauge_polls, gauge_failures;
    _Atomic uint64_t connects, reuses;
    int workers_n;
    pl_worker_state workers[]; /* dp_size */
};

/* Parses and checks a spec. 0 and a new reference, or a negative pl_err with a message (which never
 * repeats credentials or a query from the URL). Slots are the fleet's to give. */
int pl_engine_new(const pl_engine_spec *spec, pl_engine **out, pl_errbuf *eb);
pl_engine *pl_engine_ref(pl_engine *e);
void pl_engine_unref(pl_engine *e); /* NULL is fine */

/* Why e cannot take a request now (enum pl_why of policy_abi.h, without AT_CAPACITY and TRIED); 0
 * when it can. Draining or removed, then unhealthy (unknown is), then the breaker. */
int pl_engine_why(const pl_engine *e, const pl_breaker_options *o, uint64_t now_ns);

#endif
