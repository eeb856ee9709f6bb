/* One policy generation in one LuaJIT VM: loading, and calling its hooks. A VM belongs to one
 * thread at a time (it is built on the control thread and then given to a loop). All of its memory
 * comes from its own capped arena, which is dropped whole. This folder is the only one that knows
 * Lua; nothing here raises Lua errors across its borders. */
#ifndef PL_VM_H
#define PL_VM_H

#include <jansson.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/hist.h"
#include "base/rng.h"
#include "base/str.h"
#include "policy_abi.h"

typedef struct pl_vm pl_vm;
typedef struct pl_policy_source pl_policy_source;
typedef struct pl_shared pl_shared;

/* --- source: the bytes of a policy and of the files beside it, read once, hashed, shared by all
 * VMs; refcounted --- */

/* name_or_file: a ready-made policy's name ("least_loaded") or a path (contains '/' or ends in
 * .lua). params_json: overrides from config and --set (an object; borrowed; may be NULL). */
int pl_policy_source_load(pl_str name_or_file, const json_t *params, pl_policy_source **out,
                          pl_errbuf *eb);
pl_policy_source *pl_policy_source_ref(pl_policy_source *s);
void pl_policy_source_unref(pl_policy_source *s);
const char *pl_policy_source_file(const pl_policy_source *s); /* the path, or "builtin:NAME" */
const char *pl_policy_source_sha256(
    const pl_policy_source *s); /* hex, over all files; known after the first VM was built */

/* Names of the embedded policies, NULL-terminated. */
const char *const *pl_policy_builtin_names(void);

/* --- what the VMs of all loops share: counters, worker EWMAs, metrics of scripts --- */
pl_shared *pl_shared_new(void);
void pl_shared_free(pl_shared *s);
typedef void (*pl_shared_metric_fn)(void *ctx, pl_str name, double value);
void pl_shared_each_metric(pl_shared *s, pl_shared_metric_fn fn, void *ctx);

/* --- a VM --- */
typedef struct pl_vm_error {
    char stage[16]; /* read parse run check init selftest | hook name */
    char file[512]; /* "" when unknown */
    int line;       /* 0 when unknown */
    char message[1024];
} pl_vm_error;

typedef struct pl_vm_options {
    int loop, loops;     /* ctx.loop, ctx.loops */
    uint64_t seed;       /* ctx.seed */
    size_t memory_bytes; /* arena cap, 64 MiB */
    pl_shared *shared;
    pl_clock clock; /* pl.now */
} pl_vm_options;

/* Builds the sandbox, runs the chunk and checks the table, hooks and params; init is not called
 * yet. While loading, the JIT is off and an instruction budget stops runaway chunks. */
int pl_vm_new(pl_policy_source *src, const pl_vm_options *o, pl_vm **out, pl_vm_error *err);
/* Calls init with the carry (plain data made by pl_vm_save, or NULL), then compiles the harness and
 * turns the JIT on. */
int pl_vm_init(pl_vm *vm, const json_t *carry, pl_vm_error *err);
/* Calls save: *out is a new reference, or NULL when there is no such hook. At most 64 KiB
 * serialised. */
int pl_vm_save(pl_vm *vm, json_t **out, pl_vm_error *err);
void pl_vm_free(pl_vm *vm);

const char *pl_vm_name(const pl_vm *vm); /* policy.name, else the file's */
uint32_t pl_vm_hooks(const pl_vm *vm);   /* bit 1 << enum pl_hook */
double pl_vm_temperature(const pl_vm *vm);
bool pl_vm_soft(const pl_vm *vm);          /* affinity = "soft" */
bool pl_vm_assumes_reuse(const pl_vm *vm); /* assume_kv_reuse = true, or init has set it */
size_t pl_vm_memory_used(const pl_vm *vm);
pl_policy_source *pl_vm_source(const pl_vm *vm); /* borrowed */
const pl_vm_options *pl_vm_options_of(const pl_vm *vm);
const char *pl_hook_name(int hook); /* "admit" */
/* The VM met an error that leaves it unusable (memory cap): the owner rebuilds it from the source.
 */
bool pl_vm_broken(const pl_vm *vm);

/* Idle work: a slice of garbage collection. Call between requests. */
void pl_vm_idle(pl_vm *vm);

/* --- calling hooks: C fills the records, then calls. The record memory belongs to the VM --- */
struct pl_request_view; /* what string methods may reach, below */

typedef struct pl_records {
    struct pl_req *req;
    struct pl_fleet *fleet;
    struct pl_worker *workers; /* PL_MAX_WORKERS */
    double *cost;              /* PL_MAX_WORKERS */
    struct pl_fault *fault;
    struct pl_outcome *outcome;
    struct pl_session *session;
    struct pl_verdict *verdict;
} pl_records;

pl_records *pl_vm_records(pl_vm *vm);

/* Strings of the request of the call that is about to be made; all borrowed for the call.
 * find_header and find_member may be NULL. */
typedef struct pl_request_view {
    pl_str model, tenant, path, id, session_id;
    pl_str session_parent; /* in a pl_ask: filled by the decider */
    pl_str (*find_header)(void *ctx, pl_str name);
    pl_str (*find_member)(void *ctx, pl_str name);
    void *ctx; /* of find_header and find_member */
    pl_str (*worker_name)(void *worker_ctx, int index);
    void *worker_ctx;
    uint64_t seed; /* of pl.random and ties */
} pl_request_view;

void pl_vm_bind(pl_vm *vm, const pl_request_view *view); /* copied */

/* Made-up decisions (self-test, check): counters, averages, metrics and the log stay untouched. */
void pl_vm_set_dry(pl_vm *vm, bool dry);

/* admit, then route, then score over the whole fleet, in one entry. skip: bits of hooks not to run
 * (after an error). The answer is in records->verdict, not validated. 0 or PL_EPOLICY
 * (verdict->hook names the hook; err says why). */
int pl_vm_decide(pl_vm *vm, uint32_t skip, pl_vm_error *err);
int pl_vm_degrade(pl_vm *vm, pl_vm_error *err); /* records->fault in, verdict out */
int pl_vm_session(pl_vm *vm, pl_vm_error *err); /* records->session in, verdict out */
int pl_vm_retain(pl_vm *vm, pl_vm_error *err);  /* records->workers[0] is w */
int pl_vm_expire(pl_vm *vm, pl_vm_error *err);  /* records->session in, verdict out */
int pl_vm_done(pl_vm *vm, pl_vm_error *err);    /* records->req and outcome */
int pl_vm_tick(pl_vm *vm, double now_seconds, pl_vm_error *err);

#endif
