/* The life of a VM and the entries into it: see vm.h. Everything runs on the thread that owns the
 * VM at that moment. While it is built the JIT is off and an instruction budget runs; afterwards
 * the stack holds the functions that C calls (vm_priv.h), an entry pushes one of them and allocates
 * nothing, and garbage is collected only between requests. Every call into Lua that may raise is
 * protected, so nothing unwinds across the border of this file. */
#include "policy/vm_priv.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "policy/embedded.h"

#define LOAD_INSTRUCTIONS 20000000 /* some 30 ms interpreted */
#define CARRY_BYTES       65536
#define IDLE_SLICE_NS     50000
#define GC_START_BYTES    (256u << 10) /* growth since the last cycle that starts the next one */
#define GC_FORCE_BYTES    (2u << 20)   /* growth that no longer waits for idleness */
#define FORCED_SLICE_NS   500000
#define DEFAULT_MEMORY    (64u << 20)

/* --- errors --- */

/* "path:12: text" to file, line and text; text as it is when no file of the policy is named. */
static void split_place(pl_vm *vm, const char *text, pl_vm_error *err)
{
    for (const char *colon = strchr(text, ':'); colon; colon = strchr(colon + 1, ':')) {
        char *end;
        long line = strtol(colon + 1, &end, 10);
        if (end == colon + 1 || end[0] != ':' || end[1] != ' ' || line <= 0)
            continue;
        const pl_source_file *f = pl_source_shown(vm->src, (pl_str){text, (size_t)(colon - text)});
        if (!f)
            break;
        snprintf(err->file, sizeof err->file, "%s", f->chunk + 1);
        err->line = (int)line;
        text = end + 2;
        break;
    }
    snprintf(err->message, sizeof err->message, "%s", text);
}

int pl_vm_failed(pl_vm *vm, int lua_status, const char *stage, pl_vm_error *err)
{
    lua_State *L = vm->L;
    const char *text = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : "unknown error";
    memset(err, 0, sizeof *err);
    snprintf(err->stage, sizeof err->stage, "%s", stage);
    snprintf(err->file, sizeof err->file, "%s", pl_source_main(vm->src)->chunk + 1);
    if (lua_status == LUA_ERRMEM) {
        vm->broken = true;
        snprintf(err->message, sizeof err->message, "the memory cap of %.4g MiB was reached",
                 (double)vm->options.memory_bytes / (1 << 20));
    } else {
        split_place(vm, text, err);
    }
    lua_pop(L, 1);
    return PL_EPOLICY;
}

int pl_vm_hook_error(pl_vm *vm, int hook, pl_vm_error *err, const char *fmt, ...)
{
    memset(err, 0, sizeof *err);
    snprintf(err->stage, sizeof err->stage, "%s", pl_hook_name(hook));
    snprintf(err->file, sizeof err->file, "%s", pl_source_main(vm->src)->chunk + 1);
    err->line = vm->hook_lines[hook];
    vm->records.verdict->hook = hook;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err->message, sizeof err->message, fmt, ap);
    va_end(ap);
    return PL_EPOLICY;
}

static int failed_early(pl_vm_error *err, const char *stage, const char *message)
{
    memset(err, 0, sizeof *err);
    snprintf(err->stage, sizeof err->stage, "%s", stage);
    snprintf(err->message, sizeof err->message, "%s", message);
    return PL_EPOLICY;
}

static int on_panic(lua_State *L)
{
    pl_log(PL_LOG_ERROR, "lua_panic", "a Lua error outside a protected call: this is a bug");
    abort();
}

/* --- building --- */

static int run_body(lua_State *L)
{
    return pl_vm_of(L)->body(L);
}

int pl_vm_protected(pl_vm *vm, lua_CFunction body, void *argument, int nresults, const char *stage,
                    pl_vm_error *err)
{
    vm->body = body;
    vm->body_argument = argument;
    vm->stage = stage;
    lua_pushvalue(vm->L, PL_SLOT_RUN);
    int status = lua_pcall(vm->L, 0, nresults, PL_SLOT_EXPLAIN);
    return status == 0 ? 0 : pl_vm_failed(vm, status, vm->stage, err);
}

/* Protected: opens the libraries, runs boot.lua, leaves its answers in the registry. */
static int build(lua_State *L)
{
    pl_vm *vm = pl_vm_of(L);
    lua_settop(L, 0);
    luaL_openlibs(L);
    const pl_embedded *abi = pl_embedded_find("policy_abi");
    if (!abi)
        return luaL_error(L, "policy_abi is not compiled in");
    lua_pushcfunction(L, run_body);
    lua_rawseti(L, LUA_REGISTRYINDEX, PL_REGISTRY_RUN);
    lua_pushcfunction(L, pl_vm_load_internal);
    lua_pushliteral(L, "boot");
    lua_call(L, 1, 1);
    lua_pushlightuserdata(L, &vm->boot);
    lua_pushlstring(L, abi->bytes, abi->n);
    lua_pushcfunction(L, pl_vm_load_internal);
    lua_pushcfunction(L, pl_vm_load_beside);
    lua_pushstring(L, pl_source_label(vm->src));
    lua_call(L, 5, 1);
    // stack: boot
    lua_getfield(L, 1, "explain");
    lua_rawseti(L, LUA_REGISTRYINDEX, PL_REGISTRY_EXPLAIN);
    lua_rawseti(L, LUA_REGISTRYINDEX, PL_REGISTRY_BOOT);
    return 0;
}

/* Protected: the main chunk, and what it returned. */
static int load_policy(lua_State *L)
{
    pl_vm *vm = pl_vm_of(L);
    const pl_source_file *main_file = pl_source_main(vm->src);
    lua_rawgeti(L, LUA_REGISTRYINDEX, PL_REGISTRY_BOOT);
    lua_getfield(L, 1, "run");
    vm->stage = "parse";
    pl_vm_load_text(L, main_file->bytes, main_file->n, main_file->chunk);
    vm->stage = "run";
    lua_call(L, 1, 1);
    vm->stage = "check";
    lua_getfield(L, 1, "check");
    lua_insert(L, -2);
    pl_json_push(L, pl_source_params(vm->src));
    lua_call(L, 2, 5);
    // stack: boot, name, hooks, temperature, lines, soft
    snprintf(vm->name, sizeof vm->name, "%s", lua_tostring(L, 2));
    vm->hooks = (uint32_t)lua_tonumber(L, 3);
    vm->temperature = lua_tonumber(L, 4);
    vm->soft = lua_toboolean(L, 6);
    for (int i = 0; i < PL_HOOK_COUNT; i++) {
        lua_rawgeti(L, 5, i);
        vm->hook_lines[i] = (int)lua_tonumber(L, -1);
        lua_pop(L, 1);
    }
    return 0;
}

static bool make_records(pl_vm *vm)
{
    struct memory {
        struct pl_req req;
        struct pl_fleet fleet;
        struct pl_fault fault;
        struct pl_outcome outcome;
        struct pl_session session;
        struct pl_verdict verdict;
        double cost[PL_MAX_WORKERS];
        struct pl_worker workers[PL_MAX_WORKERS];
    } *m = calloc(1, sizeof *m);
    if (!m)
        return false;
    vm->record_memory = m;
    vm->records = (pl_records){&m->req,   &m->fleet,   m->workers,  m->cost,
                               &m->fault, &m->outcome, &m->session, &m->verdict};
    vm->boot = (struct pl_boot){&pl_vm_api, vm,        &m->req,     &m->fleet,   m->workers,
                                m->cost,    &m->fault, &m->outcome, &m->session, &m->verdict};
    return true;
}

static int start_state(pl_vm *vm, pl_vm_error *err)
{
    vm->arena = pl_vm_arena_new(vm->options.memory_bytes, vm);
    if (!vm->arena || !make_records(vm))
        return failed_early(err, "read", "out of memory");
    lua_State *L = vm->L = lua_newstate(pl_vm_arena_alloc, vm->arena);
    if (!L)
        return failed_early(err, "read", "cannot make a Lua state: out of memory");
    lua_atpanic(L, on_panic);
    int status = lua_cpcall(L, build, NULL);
    if (status != 0)
        return pl_vm_failed(vm, status, "read", err);
    lua_rawgeti(L, LUA_REGISTRYINDEX, PL_REGISTRY_EXPLAIN);
    lua_rawgeti(L, LUA_REGISTRYINDEX, PL_REGISTRY_RUN);
    luaJIT_setmode(L, 0, LUAJIT_MODE_ENGINE | LUAJIT_MODE_OFF);
    return 0;
}

int pl_vm_new(pl_policy_source *src, const pl_vm_options *o, pl_vm **out, pl_vm_error *err)
{
    *out = NULL;
    pl_vm *vm = calloc(1, sizeof *vm);
    if (!vm)
        return failed_early(err, "read", "out of memory");
    vm->options = *o;
    if (!vm->options.memory_bytes)
        vm->options.memory_bytes = DEFAULT_MEMORY;
    if (!vm->options.clock.now_ns)
        vm->options.clock = pl_clock_real();
    vm->own_rng.state = o->seed;
    vm->rng = vm->own_rng;
    vm->src = pl_policy_source_ref(src);
    int rc = start_state(vm, err);
    if (rc == 0) {
        pl_vm_budget_begin(vm, LOAD_INSTRUCTIONS);
        rc = pl_vm_protected(vm, load_policy, NULL, 0, "run", err);
        pl_vm_budget_end(vm);
    }
    if (rc < 0) {
        pl_vm_free(vm);
        return rc;
    }
    pl_source_seal(src);
    *out = vm;
    return 0;
}

#define ENTRIES (PL_SLOTS_END - PL_SLOT_DECIDE) /* functions that C calls often */

/* Protected: init, then the harness; answers the functions of the slots from DECIDE on. */
static int run_init(lua_State *L)
{
    pl_vm *vm = pl_vm_of(L);
    lua_rawgeti(L, LUA_REGISTRYINDEX, PL_REGISTRY_BOOT);
    lua_getfield(L, 1, "init");
    pl_json_push(L, vm->body_argument);
    lua_pushnumber(L, vm->options.loop);
    lua_pushnumber(L, vm->options.loops);
    /* as much of the seed as a number holds exactly */
    lua_pushnumber(L, (double)(vm->options.seed >> 11));
    lua_call(L, 4, ENTRIES + 2);
    // stack: boot, decide, degrade, done, tick, session, retain, expire, save, reuse
    vm->reuse = lua_toboolean(L, -1);
    lua_pop(L, 1);
    lua_rawseti(L, LUA_REGISTRYINDEX, PL_REGISTRY_SAVE);
    lua_gc(L, LUA_GCCOLLECT, 0);
    lua_gc(L, LUA_GCSTOP, 0);
    return ENTRIES;
}

int pl_vm_init(pl_vm *vm, const json_t *carry, pl_vm_error *err)
{
    lua_settop(vm->L, PL_SLOT_RUN);
    vm->rng = vm->own_rng;
    pl_vm_budget_begin(vm, LOAD_INSTRUCTIONS);
    int rc = pl_vm_protected(vm, run_init, (void *)(uintptr_t)carry, ENTRIES, "init", err);
    pl_vm_budget_end(vm);
    vm->own_rng = vm->rng;
    if (rc < 0)
        return rc;
    luaJIT_setmode(vm->L, 0, LUAJIT_MODE_ENGINE | LUAJIT_MODE_ON);
    vm->gc_base = pl_vm_arena_used(vm->arena);
    return 0;
}

void pl_vm_free(pl_vm *vm)
{
    if (!vm)
        return;
    /* A VM that met its cap is closed as well: Lua's heap is consistent after LUA_ERRMEM, and only
     * lua_close unmaps the machine code, which lies outside the arena. */
    if (vm->L)
        lua_close(vm->L);
    pl_vm_arena_free(vm->arena);
    pl_vm_ring_free(vm->ring);
    pl_policy_source_unref(vm->src);
    free(vm->record_memory);
    free(vm);
}

/* --- what the owner asks --- */

const char *pl_vm_name(const pl_vm *vm)
{
    return vm->name;
}

uint32_t pl_vm_hooks(const pl_vm *vm)
{
    return vm->hooks;
}

double pl_vm_temperature(const pl_vm *vm)
{
    return vm->temperature;
}

bool pl_vm_soft(const pl_vm *vm)
{
    return vm->soft;
}

bool pl_vm_assumes_reuse(const pl_vm *vm)
{
    return vm->reuse;
}

size_t pl_vm_memory_used(const pl_vm *vm)
{
    return pl_vm_arena_used(vm->arena);
}

bool pl_vm_broken(const pl_vm *vm)
{
    return vm->broken;
}

pl_policy_source *pl_vm_source(const pl_vm *vm)
{
    return vm->src;
}

const pl_vm_options *pl_vm_options_of(const pl_vm *vm)
{
    return &vm->options;
}

pl_records *pl_vm_records(pl_vm *vm)
{
    return &vm->records;
}

void pl_vm_bind(pl_vm *vm, const pl_request_view *view)
{
    vm->view = *view;
    vm->rng.state = view->seed;
}

void pl_vm_set_dry(pl_vm *vm, bool dry)
{
    vm->dry = dry;
}

/* --- garbage --- */

static int gc_slice(lua_State *L)
{
    pl_vm *vm = pl_vm_of(L);
    uint64_t most_ns = *(const uint64_t *)vm->body_argument, from = pl_now_ns();
    do {
        if (lua_gc(L, LUA_GCSTEP, 0)) {
            vm->gc_running = false;
            vm->gc_base = pl_vm_arena_used(vm->arena);
            break;
        }
    } while (pl_now_ns() - from < most_ns);
    lua_gc(L, LUA_GCSTOP, 0); /* a step starts the collector again */
    return 0;
}

/* At most about most_ns; UINT64_MAX: to the end of the cycle. Protected, in case a collection needs
 * memory at the cap. */
static void collect_some(pl_vm *vm, uint64_t most_ns)
{
    pl_vm_error err;
    vm->gc_running = true;
    if (pl_vm_protected(vm, gc_slice, &most_ns, 0, "gc", &err) < 0)
        vm->broken = true;
}

/* There was no idle moment for long: garbage has grown while requests came in. Above half of the
 * cap whole cycles, yet not for nothing: what a policy keeps may be that much, and a cycle over it
 * takes tens of milliseconds. */
static void collect_forced(pl_vm *vm)
{
    size_t used = pl_vm_arena_used(vm->arena), cap = vm->options.memory_bytes;
    size_t grown = used > vm->gc_base ? used - vm->gc_base : 0;
    size_t room = cap > vm->gc_base ? cap - vm->gc_base : 0;
    if (used > cap / 2 && (grown > GC_FORCE_BYTES || grown > room / 4))
        collect_some(vm, UINT64_MAX);
    else if (grown > GC_FORCE_BYTES)
        collect_some(vm, FORCED_SLICE_NS);
}

void pl_vm_idle(pl_vm *vm)
{
    if (vm->broken)
        return;
    if (vm->gc_running || pl_vm_arena_used(vm->arena) > vm->gc_base + GC_START_BYTES)
        collect_some(vm, IDLE_SLICE_NS);
}

/* --- entries --- */

/* No request is under way: its strings are gone, and random numbers are the VM's own. */
static void unbind(pl_vm *vm)
{
    memset(&vm->view, 0, sizeof vm->view);
    vm->records.fleet->n = 0;
    vm->records.fleet->eligible = 0;
    vm->rng = vm->own_rng;
}

const char *pl_hook_name(int hook)
{
    static const char *const names[PL_HOOK_COUNT] = {"init",  "admit",  "session", "score",
                                                     "route", "retain", "degrade", "expire",
                                                     "done",  "tick",   "save"};
    return hook >= 0 && hook < PL_HOOK_COUNT ? names[hook] : "?";
}

static int enter(pl_vm *vm, int slot, int hook, pl_vm_error *err)
{
    lua_State *L = vm->L;
    if (vm->broken)
        return failed_early(err, pl_hook_name(hook), "this VM is to be rebuilt");
    if (!(++vm->calls & 63))
        collect_forced(vm);
    vm->records.verdict->hook = hook;
    lua_pushvalue(L, slot);
    int status = lua_pcall(L, 0, 0, PL_SLOT_EXPLAIN);
    if (__builtin_expect(status == 0, 1))
        return 0;
    return pl_vm_failed(vm, status, pl_hook_name(vm->records.verdict->hook), err);
}

int pl_vm_decide(pl_vm *vm, uint32_t skip, pl_vm_error *err)
{
    struct pl_verdict *v = vm->records.verdict;
    v->skip = (int32_t)skip;
    v->admit_ns = 0;
    if (!(vm->hooks & ~skip & (1u << PL_HOOK_ADMIT | 1u << PL_HOOK_ROUTE | 1u << PL_HOOK_SCORE))) {
        v->action = 0;
        v->routed = v->scored = v->reason_len = 0;
        return 0;
    }
    return enter(vm, PL_SLOT_DECIDE, PL_HOOK_SCORE, err);
}

/* One of the hooks that answer into arg and action. */
static int enter_asked(pl_vm *vm, int slot, int hook, pl_vm_error *err)
{
    struct pl_verdict *v = vm->records.verdict;
    v->action = PL_DEFAULT;
    v->arg = -1;
    v->given = 0;
    if (!(vm->hooks & 1u << hook))
        return 0;
    return enter(vm, slot, hook, err);
}

int pl_vm_degrade(pl_vm *vm, pl_vm_error *err)
{
    return enter_asked(vm, PL_SLOT_DEGRADE, PL_HOOK_DEGRADE, err);
}

int pl_vm_session(pl_vm *vm, pl_vm_error *err)
{
    return enter_asked(vm, PL_SLOT_SESSION, PL_HOOK_SESSION, err);
}

int pl_vm_retain(pl_vm *vm, pl_vm_error *err)
{
    return enter_asked(vm, PL_SLOT_RETAIN, PL_HOOK_RETAIN, err);
}

int pl_vm_expire(pl_vm *vm, pl_vm_error *err)
{
    return enter_asked(vm, PL_SLOT_EXPIRE, PL_HOOK_EXPIRE, err);
}

int pl_vm_done(pl_vm *vm, pl_vm_error *err)
{
    if (!(vm->hooks & 1u << PL_HOOK_DONE))
        return 0;
    return enter(vm, PL_SLOT_DONE, PL_HOOK_DONE, err);
}

int pl_vm_tick(pl_vm *vm, double now_seconds, pl_vm_error *err)
{
    if (!(vm->hooks & 1u << PL_HOOK_TICK))
        return 0;
    unbind(vm);
    vm->records.verdict->arg = now_seconds;
    int rc = enter(vm, PL_SLOT_TICK, PL_HOOK_TICK, err);
    vm->own_rng = vm->rng;
    return rc;
}

/* Protected: calls save and reads what it returned into the json_t that the argument points to. */
static int run_save(lua_State *L)
{
    json_t **made = pl_vm_of(L)->body_argument;
    lua_rawgeti(L, LUA_REGISTRYINDEX, PL_REGISTRY_SAVE);
    lua_call(L, 0, 1);
    if (lua_isnil(L, 1))
        return 0;
    if (!lua_istable(L, 1))
        return luaL_error(L, "save must return a table of plain data, not a %s",
                          luaL_typename(L, 1));
    pl_json_read(L, 1, "save", CARRY_BYTES, made);
    return 0;
}

int pl_vm_save(pl_vm *vm, json_t **out, pl_vm_error *err)
{
    json_t *made = NULL;
    *out = NULL;
    if (!(vm->hooks & 1u << PL_HOOK_SAVE))
        return 0;
    if (vm->broken)
        return failed_early(err, "save", "this VM is to be rebuilt");
    unbind(vm);
    vm->records.verdict->hook = PL_HOOK_SAVE;
    int rc = pl_vm_protected(vm, run_save, &made, 0, "save", err);
    vm->own_rng = vm->rng;
    char *text = rc == 0 && made ? json_dumps(made, JSON_COMPACT) : NULL;
    if (text && strlen(text) > CARRY_BYTES)
        rc = pl_vm_hook_error(vm, PL_HOOK_SAVE, err, "save returned more than 64 KiB");
    free(text);
    if (rc < 0) {
        json_decref(made);
        return rc;
    }
    *out = made;
    return 0;
}
