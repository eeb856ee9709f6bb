/* The inside of a VM, shared by the files vm*.c, loader.c and check.c of this folder. */
#ifndef PL_VM_PRIV_H
#define PL_VM_PRIV_H

#include <lauxlib.h>
#include <lua.h>
#include <luajit.h>
#include <lualib.h>

#include "policy/source.h"
#include "policy/vm.h"
#include "policy/vm_arena.h"

/* What stays on the Lua stack for the VM's life, so that an entry pushes one value and allocates
 * nothing. Slot 1 is the message handler of every protected call. */
enum {
    PL_SLOT_EXPLAIN = 1,
    PL_SLOT_RUN, /* calls vm->body: see pl_vm_protected */
    PL_SLOT_DECIDE,
    PL_SLOT_DEGRADE,
    PL_SLOT_DONE,
    PL_SLOT_TICK,
    PL_SLOT_SESSION,
    PL_SLOT_RETAIN,
    PL_SLOT_EXPIRE,
    PL_SLOTS_END,
};

/* Integer keys of the registry. */
enum {
    PL_REGISTRY_BOOT = 1001, /* the table that boot.lua answered */
    PL_REGISTRY_EXPLAIN,
    PL_REGISTRY_RUN,
    PL_REGISTRY_SAVE /* the save hook, nil without one */
};

/* Slots in which name hashes are remembered; workers beyond are hashed each time. */
#define PL_VM_SLOTS PL_MAX_WORKERS

typedef struct pl_ring pl_ring;

struct pl_vm {
    lua_State *L;
    pl_vm_arena *arena;
    pl_policy_source *src;
    pl_vm_options options;
    pl_records records;
    struct pl_boot boot;
    void *record_memory; /* what records points into */
    pl_request_view view;
    pl_rng rng;     /* of the call under way: the request's, or own_rng's */
    pl_rng own_rng; /* for calls without a request */
    uint32_t hooks;
    double temperature;
    bool soft;  /* affinity = "soft" */
    bool reuse; /* assume_kv_reuse, after init */
    char name[65];
    int hook_lines[PL_HOOK_COUNT]; /* first lines of the hooks */
    const char *stage;             /* names the phase in errors while loading */
    long budget;                   /* instructions left while loading */
    bool broken;
    bool dry;        /* made-up decisions: counters, averages, metrics and log stay untouched */
    bool gc_running; /* a collection cycle is under way */
    size_t gc_base;  /* bytes in use after the last full cycle */
    uint32_t calls;
    unsigned long log_state[2];
    lua_CFunction body; /* of the protected call under way, with its argument */
    void *body_argument;
    pl_ring *ring; /* caches of pl.ring and pl.rendezvous; made at first use */
};

/* Fills err from the error message on top of the stack and pops it; marks the VM broken on memory
 * errors. Returns PL_EPOLICY. */
int pl_vm_failed(pl_vm *vm, int lua_status, const char *stage, pl_vm_error *err);

/* An error that C found in what a hook answered: at the hook's first line. Returns PL_EPOLICY. */
int pl_vm_hook_error(pl_vm *vm, int hook, pl_vm_error *err, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* Calls body with an empty stack; it finds the VM with pl_vm_of and its argument in
 * vm->body_argument. On success its nresults values are on the stack; else err is filled. Pushes
 * nothing that needs memory outside the protected call, where running out would be a panic. */
int pl_vm_protected(pl_vm *vm, lua_CFunction body, void *argument, int nresults, const char *stage,
                    pl_vm_error *err);

/* The VM that L belongs to. */
pl_vm *pl_vm_of(lua_State *L);

/* --- loader.c --- */
/* Instruction budget of the phase that begins; ends with pl_vm_budget_end. */
void pl_vm_budget_begin(pl_vm *vm, long instructions);
void pl_vm_budget_end(pl_vm *vm);
/* Pushes the function of a text chunk; raises on a syntax error and on bytecode. */
void pl_vm_load_text(lua_State *L, const char *bytes, size_t n, const char *chunk);
/* Lua functions: load_internal(name) and load_beside(module). */
int pl_vm_load_internal(lua_State *L);
int pl_vm_load_beside(lua_State *L);

/* --- vm_api.c --- */
extern const struct pl_api pl_vm_api;

/* Index of the lowest cost over the eligible workers, sampled by softmax when temperature > 0. With
 * `ready` the costs of ineligible workers are +inf already. -1: none below +inf; -2: one is NaN. */
int pl_vm_pick(pl_vm *vm, double temperature, bool ready);

/* --- vm_ring.c --- */
int pl_vm_ring(pl_vm *vm, const char *key, size_t n, double load_factor);
int pl_vm_rendezvous(pl_vm *vm, const char *key, size_t n);
void pl_vm_ring_free(pl_ring *r);

/* --- vm_json.c: both raise Lua errors; call them inside a protected call --- */
void pl_json_push(lua_State *L, const json_t *v);
/* The value at index as JSON into *out, which is set before anything can raise, so that the caller
 * can release it. what: names the root in messages. */
void pl_json_read(lua_State *L, int index, const char *what, size_t max_bytes, json_t **out);

#endif
