/* The router as a whole: one control loop (admin API, health, reloads, signals) and N event loops
 * that carry traffic. Threading: the control loop owns fleet changes and the policy source; each
 * loop owns its server, pools, decider and requests. They talk by messages (base/mailbox.h) and
 * share the view (by hand-over), the ledger (atomics), the queue (its own lock) and the metrics
 * (one writer each, relaxed readers). */
#ifndef PL_ROUTER_H
#define PL_ROUTER_H

#include "admin/metrics.h"
#include "base/mailbox.h"
#include "config.h"
#include "fleet/fleet.h"
#include "fleet/queue.h"
#include "perilune.h"

/* The running policy, as /policy tells it. */
typedef struct pl_policy_info {
    char name[64], file[512], sha256[65];
    uint32_t hooks;
    double loaded_at;                          /* wall-clock seconds */
    _Atomic uint64_t reloads, reload_failures; /* read by /metrics on any loop */
    pl_vm_error last_error;                    /* of the last failed reload; message "" when none */
} pl_policy_info;

typedef struct pl_loop pl_loop;
typedef struct pl_request pl_request; /* http/proxy.h */

struct pl_loop {
    pl_router *router;
    int index;
    uv_loop_t uv;
    uv_thread_t thread;
    pl_wheel wheel;
    uv_timer_t wheel_timer; /* every PL_WHEEL_TICK_MS */
    uv_timer_t tick_timer;  /* policy tick, 4 Hz */
    pl_mailbox mailbox;
    pl_server *server;
    pl_server_stats server_stats; /* of the server, which others may not look at */
    pl_decider *decider;
    struct pl_store *store; /* this loop's handle; the router's when they share one */
    struct pl_sessions_loop *sessions;
    pl_holdings_loop *holdings; /* NULL: kv.use is off */
    pl_view *view;
    struct pl_pool_map *pools; /* engine id -> pl_pool (http/proxy.c) */
    pl_vm *candidate;          /* a reload's VM, initialised and waiting for commit */
    pl_request *requests;      /* list of those under way */
    uint32_t requests_n;
    double retry_tokens; /* the retry budget's bucket: see config.h */
    bool vm_used;        /* a hook ran since the last idle slice of the VM */
    uv_prepare_t idle;
    pl_rng rng; /* seeds of requests, request ids */
    pl_loop_metrics metrics;
    pl_policy_stats policy_stats;
    bool draining;
    bool server_empty;                     /* draining: the last connection has gone */
    bool uv_ready, mailbox_ready, started; /* how far it was prepared */
    void (*drained)(struct pl_router *r);  /* runs on the control thread */
};

struct pl_router {
    pl_config config;
    pl_fleet *fleet;
    pl_queue *queue;
    pl_shared *shared;
    struct pl_store *store; /* the control thread's handle */
    struct pl_redis *redis; /* NULL with a memory store */
    struct pl_sessions *sessions;
    pl_timer store_timer;           /* expiry in memory */
    struct pl_knowledge *knowledge; /* knowledge.c; NULL: kv.use is off */
    pl_holdings *holdings;          /* NULL: the same */
    struct pl_feed *feed;
    pl_active *active;                  /* NULL: kv.use is off */
    pl_tokcache *tokcache;              /* NULL: engines are not asked to tokenize */
    _Atomic uint32_t tokenize_failures; /* in a row */
    pl_loop *loops;
    int loops_n;
    uv_loop_t control;
    pl_wheel control_wheel;
    uv_timer_t control_wheel_timer;
    pl_mailbox control_mailbox;
    pl_health_monitor *health;
    pl_gauges *gauges;
    struct pl_admin *admin;
    struct pl_reload *reload; /* the reload under way, NULL when none */
    bool reconcile_again;     /* SIGHUP came during it: once more when it is over */
    pl_policy_source *source; /* of the running generation */
    pl_policy_info policy;    /* what /policy answers; control thread */
    _Atomic uint64_t generation;
    _Atomic uint32_t connections; /* open on the public port, all loops */
    _Atomic uint64_t body_memory;
    _Atomic int draining;
    _Atomic int cutting;        /* the drain has run out: nothing is sent any more */
    _Atomic int usable_engines; /* for /readyz */
    /* models (by 64 hashes) of which it was said that no engine can hold a session; the last time
     */
    _Atomic uint64_t no_session_engine, no_session_engine_ns;
    int port, admin_port; /* real ones */
    int exit_code;
    bool control_ready;
    int loops_inited, running; /* loops prepared; threads started */
    int loops_drained, loops_cut;
    bool finishing, stopping;
    uv_signal_t signals[3];
    int signals_n;
    pl_timer drain_timer;
    struct pl_removal *removals; /* engines on their way out */
};

/* Builds a router and takes the (finished) configuration; nothing runs yet. */
int pl_router_create(pl_config *config, pl_router **out, pl_errbuf *eb);

/* --- runs on the control thread --- */

typedef struct pl_reload_result {
    bool ok;
    uint64_t generation;
    char sha256[65];
    char name[64];
    uint32_t hooks;
    pl_vm_error error;
} pl_reload_result;

/* Starts a reload of `name_or_file` ({NULL,0}: the same again) with params (borrowed; NULL: those
 * of the config). done runs on the control thread, once, when every loop has swapped or none has.
 * PL_EBUSY while one is under way. */
int pl_router_reload(pl_router *r, pl_str name_or_file, const json_t *params,
                     void (*done)(void *ctx, const pl_reload_result *res), void *ctx);

/* Adds an engine now. */
int pl_router_add_engine(pl_router *r, const pl_engine_spec *spec, pl_errbuf *eb);
/* Takes an engine out: no new requests; when its last request has ended or the deadline has come
 * (then the rest is cut) done runs with the number of requests that were cut. */
int pl_router_remove_engine(pl_router *r, pl_engine *e, uint64_t deadline_ms,
                            void (*done)(void *ctx, int cut), void *ctx);
/* SIGHUP: reads the config file again; engines that came from it are added and removed, the policy
 * is reloaded. */
void pl_router_reconcile(pl_router *r);
/* Forgets a removal and tells its owner; for shutdown. */
void pl_router_end_removal(struct pl_removal *rm);

/* --- any thread --- */
void pl_router_render_metrics(pl_router *r, pl_buf *out);

#endif
