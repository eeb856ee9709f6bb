/* `perilune check` and the self-test of starts and reloads: see check.h. Runs on the control thread
 * (at the start: on the caller's) over VMs that serve nobody yet. Made-up fleets go through the
 * same entry and the same judgement as live decisions; then each hot hook runs in a loop while
 * LuaJIT's own trace events tell what was compiled (lua/perilune/jitreport.lua), and the bytecode
 * of lines that nothing came to is read (lua/perilune/slips.lua). */
#include "policy/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "policy/made_up.h"
#include "policy/verdict.h"
#include "policy/vm_priv.h"

#define SELFTEST_INSTRUCTIONS 20000000
#define CHECK_INSTRUCTIONS    400000000
#define ROUNDS                200
#define SIZES                 6
#define MAX_STOPS             32
#define MAX_NOTES             32

static const int sizes[SIZES] = {1, 2, 3, 8, 64, 512};
static const pl_limits limits = {30, 3600};

static int decide_once(pl_vm *vm, pl_judged *judged, pl_vm_error *err)
{
    int rc = pl_vm_decide(vm, 0, err);
    return rc < 0 ? rc : pl_verdict_judge(vm, &limits, judged, err);
}

/* Interpreted and with a budget, so that a hook that never comes back is found here. */
static int guarded(pl_vm *vm, long instructions, int (*body)(pl_vm *vm, pl_vm_error *err),
                   pl_vm_error *err)
{
    luaJIT_setmode(vm->L, 0, LUAJIT_MODE_ENGINE | LUAJIT_MODE_OFF);
    pl_vm_set_dry(vm, true);
    pl_vm_budget_begin(vm, instructions);
    int rc = body(vm, err);
    pl_vm_budget_end(vm);
    pl_vm_set_dry(vm, false);
    luaJIT_setmode(vm->L, 0, LUAJIT_MODE_ENGINE | LUAJIT_MODE_ON);
    return rc;
}

/* What the hooks around sessions gave that would be mended. */
static _Thread_local bool clamped_ttl, clamped_retention;

/* A hook that sees no fleet. */
static int alone(pl_vm *vm, int (*hook)(pl_vm *vm, pl_vm_error *err), pl_vm_error *err)
{
    pl_records *r = pl_vm_records(vm);
    struct pl_fleet fleet = *r->fleet;
    int bound_index = r->session->bound_index;
    r->fleet->n = r->fleet->eligible = 0;
    r->session->bound_index = -1;
    int rc = hook(vm, err);
    *r->fleet = fleet;
    r->session->bound_index = bound_index;
    return rc;
}

/* The turns of made-up sessions: session, the decision, retain; and the end of those bound. */
static int some_sessions(pl_vm *vm, pl_vm_error *err)
{
    pl_records *r = pl_vm_records(vm);
    int rc = 0;
    for (unsigned k = 0; k < PL_MADE_UP_SESSIONS && rc == 0; k++) {
        pl_judged judged;
        pl_make_up(vm, sizes[(k + k / 4) % 4], (pl_made_up_kind)(k / 4 % PL_ALL_OUT), 2 * k + 1);
        rc = alone(vm, pl_vm_session, err);
        clamped_ttl |= r->verdict->given & 1 && r->verdict->arg < 0;
        if (rc == 0)
            rc = decide_once(vm, &judged, err);
        if (rc == 0)
            rc = pl_vm_retain(vm, err);
        clamped_retention |= r->verdict->given & 1 && r->verdict->arg < 0;
        if (rc == 0 && r->session->bound_slot >= 0)
            rc = alone(vm, pl_vm_expire, err);
    }
    return rc;
}

static int a_few_decisions(pl_vm *vm, pl_vm_error *err)
{
    uint64_t seed = 1;
    for (int kind = 0; kind < PL_MADE_UP_KINDS; kind++) {
        for (int i = 0; i < 4; i++) {
            pl_judged judged;
            pl_make_up(vm, sizes[i], (pl_made_up_kind)kind, seed++);
            int rc = decide_once(vm, &judged, err);
            if (rc < 0)
                return rc;
        }
    }
    return some_sessions(vm, err);
}

int pl_selftest(pl_vm *vm, pl_vm_error *err)
{
    int rc = guarded(vm, SELFTEST_INSTRUCTIONS, a_few_decisions, err);
    if (rc < 0) {
        char what[sizeof err->message];
        snprintf(what, sizeof what, "%s: %.900s", err->stage, err->message);
        strcpy(err->message, what);
        strcpy(err->stage, "selftest");
    }
    return rc;
}

int pl_try_out(pl_policy_source *src, const pl_vm_options *options, pl_vm_error *err)
{
    pl_vm_options o = *options;
    pl_vm *vm = NULL;
    o.shared = pl_shared_new(); /* what is live shows no trace of it */
    int rc = o.shared ? pl_vm_new(src, &o, &vm, err) : PL_ENOMEM;
    if (rc == 0)
        rc = pl_vm_init(vm, NULL, err);
    if (rc == 0)
        rc = pl_selftest(vm, err);
    if (vm)
        pl_vm_free(vm);
    pl_shared_free(o.shared);
    return rc;
}

/* --- every hook over every made-up fleet --- */

/* What the last every_hook saw mended. */
static _Thread_local bool clamped_admit, clamped_reason, mends_delta;

/* A wrong answer to a fault is refused; to one of a delta, which few authors think of, noted. */
static int every_fault(pl_vm *vm, pl_vm_error *err)
{
    struct pl_fault *fault = pl_vm_records(vm)->fault;
    int rc = 0;
    for (int kind = PL_NO_SESSION_ENGINE; kind <= PL_INDEX_STALE && rc == 0; kind++) {
        *fault = (struct pl_fault){.kind = kind, .budget_left = true, .attempts = 1};
        rc = alone(vm, pl_vm_degrade, err);
        if (rc == 0)
            rc = pl_verdict_judge_fault(vm, err);
        if (rc < 0 || (kind != PL_ENGINE_FAILED && kind != PL_BOUND_GONE))
            continue;
        pl_vm_error delta;
        fault->delta = true;
        rc = alone(vm, pl_vm_degrade, err);
        if (rc == 0)
            mends_delta |= pl_verdict_judge_fault(vm, &delta) < 0;
    }
    return rc;
}

/* Answers that are mended rather than refused. A limit above what was asked, and a score that
 * refuses everyone, are no mistakes. */
static void note_clamps(const pl_judged *j)
{
    clamped_admit |= j->clamped[PL_HOOK_ADMIT] && j->action != PL_ADMIT;
    clamped_reason |= j->clamped[PL_HOOK_ROUTE] != 0;
}

/* done, for a request that was served where it was sent, or by nobody. */
static int end_of(pl_vm *vm, const pl_judged *j, pl_vm_error *err)
{
    pl_records *r = pl_vm_records(vm);
    int slot = j->index >= 0 ? j->index : 0;
    if (j->action != PL_ADMIT || !r->workers[slot].eligible)
        *r->outcome = (struct pl_outcome){.ttft_seconds = -1,
                                          .e2e_seconds = 0.01,
                                          .prompt_tokens = r->req->prompt_tokens,
                                          .cached_tokens = -1,
                                          .output_tokens = -1,
                                          .status = 503,
                                          .slot = -1,
                                          .generation = -1,
                                          .end_cause = PL_END_SHED};
    else
        r->outcome->slot = slot;
    return pl_vm_done(vm, err);
}

static int every_hook(pl_vm *vm, pl_vm_error *err)
{
    uint64_t seed = 100;
    int rc = 0;
    clamped_admit = clamped_reason = mends_delta = clamped_ttl = clamped_retention = false;
    for (int kind = 0; kind < PL_MADE_UP_KINDS && rc == 0; kind++) {
        for (int i = 0; i < SIZES && rc == 0; i++) {
            pl_judged judged = {.index = -1};
            pl_make_up(vm, sizes[i], (pl_made_up_kind)kind, seed++);
            rc = decide_once(vm, &judged, err);
            note_clamps(&judged);
            if (rc == 0)
                rc = end_of(vm, &judged, err);
            if (rc == 0 && pl_vm_hooks(vm) & 1u << PL_HOOK_DEGRADE)
                rc = every_fault(vm, err);
        }
    }
    if (rc == 0)
        rc = some_sessions(vm, err);
    if (rc == 0)
        rc = pl_vm_tick(vm, 1, err);
    json_t *carry = NULL;
    if (rc == 0)
        rc = pl_vm_save(vm, &carry, err);
    json_decref(carry);
    return rc;
}

/* --- what the compiler says --- */

typedef struct stop {
    char file[256];
    int line;
    char reason[256];
} stop;

typedef struct hook_report {
    int hook;
    char compiled[8]; /* yes, partly, no */
    int traces;
    stop stops[MAX_STOPS];
    int stops_n;
} hook_report;

/* LuaJIT's own names of bytecodes and abort reasons live in a module of its distribution, which
 * policies must not reach: a state of its own reads it and writes it out as text. */
static char *read_vmdef(void)
{
    static const char script[] =
        "local ok, v = pcall(require, 'jit.vmdef') if not ok then return nil end\n"
        "local out = { ('return { bcnames = %q, traceerr = {'):format(v.bcnames) }\n"
        "for i, text in pairs(v.traceerr) do out[#out + 1] = ('[%d] = %q,'):format(i, text) end\n"
        "out[#out + 1] = '}, ffnames = {'\n"
        "for i, text in pairs(v.ffnames) do out[#out + 1] = ('[%d] = %q,'):format(i, text) end\n"
        "return table.concat(out) .. '} }'";
    lua_State *L = luaL_newstate();
    if (!L)
        return NULL;
    luaL_openlibs(L);
    char *text = NULL;
    if (luaL_dostring(L, script) == 0 && lua_type(L, -1) == LUA_TSTRING)
        text = pl_str_dup(pl_str_c(lua_tostring(L, -1)));
    lua_close(L);
    return text;
}

typedef struct report {
    pl_policy_source *src; /* NULL: it could not be read */
    pl_vm *vm;             /* NULL: it did not load */
    hook_report hooks[6];
    int hooks_n;
    char notes[MAX_NOTES][320]; /* what is allowed, but hardly meant */
    int notes_n;
    pl_vm_error err; /* message "" when all is well */
} report;

typedef struct report_call {
    report *r;
    const char *vmdef;
} report_call;

static void copy_field(lua_State *L, const char *name, char *out, size_t cap)
{
    lua_getfield(L, -1, name);
    snprintf(out, cap, "%s", lua_isstring(L, -1) ? lua_tostring(L, -1) : "");
    lua_pop(L, 1);
}

static void listen_to(lua_State *L, int reporter, pl_vm *vm, hook_report *h)
{
    /* the session hook is not asked for requests without one */
    uint64_t seed = 1001, next = h->hook == PL_HOOK_SESSION ? 2 : 1;
    lua_getfield(L, reporter, "begin");
    lua_pushstring(L, pl_hook_name(h->hook));
    lua_call(L, 1, 0);
    for (int i = 0; i < SIZES; i++) {
        for (int kind = 0; kind < PL_ALL_OUT; kind++, seed += next) {
            pl_make_up(vm, sizes[i], (pl_made_up_kind)kind, seed);
            vm->records.verdict->hook = h->hook;
            lua_getfield(L, reporter, "run");
            lua_pushnumber(L, ROUNDS);
            lua_call(L, 1, 0);
        }
    }
    lua_getfield(L, reporter, "finish");
    lua_call(L, 0, 3);
    // stack: .., verdict, traces, list
    snprintf(h->compiled, sizeof h->compiled, "%s", lua_tostring(L, -3));
    h->traces = (int)lua_tonumber(L, -2);
    h->stops_n = (int)lua_objlen(L, -1);
    if (h->stops_n > MAX_STOPS)
        h->stops_n = MAX_STOPS;
    for (int i = 0; i < h->stops_n; i++) {
        stop *s = &h->stops[i];
        lua_rawgeti(L, -1, i + 1);
        copy_field(L, "file", s->file, sizeof s->file);
        copy_field(L, "reason", s->reason, sizeof s->reason);
        lua_getfield(L, -1, "line");
        s->line = (int)lua_tonumber(L, -1);
        lua_pop(L, 2);
    }
    lua_pop(L, 3);
}

static int run_report(lua_State *L)
{
    report_call *c = pl_vm_of(L)->body_argument;
    lua_rawgeti(L, LUA_REGISTRYINDEX, PL_REGISTRY_BOOT);
    lua_getfield(L, 1, "jit_report");
    if (c->vmdef) {
        pl_vm_load_text(L, c->vmdef, strlen(c->vmdef), "=perilune.vmdef");
        lua_call(L, 0, 1);
    } else {
        lua_pushnil(L);
    }
    lua_call(L, 1, 1);
    for (int i = 0; i < c->r->hooks_n; i++)
        listen_to(L, 2, c->r->vm, &c->r->hooks[i]);
    return 0;
}

static int read_slips(lua_State *L)
{
    report *r = pl_vm_of(L)->body_argument;
    lua_rawgeti(L, LUA_REGISTRYINDEX, PL_REGISTRY_BOOT);
    lua_getfield(L, 1, "slips");
    lua_call(L, 0, 1);
    for (int i = 1; r->notes_n < MAX_NOTES && i <= (int)lua_objlen(L, -1); i++) {
        lua_rawgeti(L, -1, i);
        snprintf(r->notes[r->notes_n++], sizeof r->notes[0], "%s", lua_tostring(L, -1));
        lua_pop(L, 1);
    }
    return 0;
}

static int lua_report(report *r)
{
    char *vmdef = read_vmdef();
    report_call c = {r, vmdef};
    pl_vm_set_dry(r->vm, true);
    int rc = pl_vm_protected(r->vm, run_report, &c, 0, "selftest", &r->err);
    pl_vm_set_dry(r->vm, false);
    if (rc == 0)
        rc = pl_vm_protected(r->vm, read_slips, r, 0, "selftest", &r->err);
    free(vmdef);
    return rc;
}

/* --- printing --- */

static void note(report *r, int hook, const char *text)
{
    snprintf(r->notes[r->notes_n++], sizeof r->notes[0], "%s: %s", pl_hook_name(hook), text);
}

static void write_notes(report *r)
{
    if (clamped_admit)
        note(r, PL_HOOK_ADMIT,
             "its seconds were out of range and clamped (negative, or above the limit)");
    if (clamped_reason)
        note(r, PL_HOOK_ROUTE,
             "its reason was replaced by \"route\": a reason is 1 to 64 of A-Z a-z 0-9 _ . -");
    if (clamped_ttl)
        note(r, PL_HOOK_SESSION,
             "its ttl_seconds were below 0 and clamped to 1 ms; 0: no affinity");
    if (clamped_retention)
        note(r, PL_HOOK_RETAIN,
             "its retention_seconds were below 0 and clamped to 0; nil: not asked for");
    if (mends_delta)
        note(r, PL_HOOK_DEGRADE,
             "with fault.delta it may answer nil or pl.REJECT; what it answers is an error");
}

static const char *affinity_of(const report *r)
{
    return pl_vm_soft(r->vm) ? "soft" : "hard";
}

static void print_text(const report *r, FILE *out)
{
    if (r->err.message[0]) {
        if (r->err.file[0] && r->err.line)
            fprintf(out, "%s:%d: ", r->err.file, r->err.line);
        else if (r->err.file[0])
            fprintf(out, "%s: ", r->err.file);
        fprintf(out, "%s\nstage   %s\n", r->err.message, r->err.stage);
        return;
    }
    fprintf(out, "policy  %s (%s)\nsha256  %s\nhooks  ", pl_vm_name(r->vm),
            pl_policy_source_file(r->src), pl_policy_source_sha256(r->src));
    for (int i = 0; i < PL_HOOK_COUNT; i++)
        if (pl_vm_hooks(r->vm) & 1u << i)
            fprintf(out, " %s", pl_hook_name(i));
    fputs(pl_vm_hooks(r->vm) ? "\n" : " none: the core's defaults decide\n", out);
    fprintf(out, "affinity %s\n", affinity_of(r));
    for (int i = 0; i < r->hooks_n; i++) {
        const hook_report *h = &r->hooks[i];
        fprintf(out, "%-7s compiled: %s (%d traces)\n", pl_hook_name(h->hook), h->compiled,
                h->traces);
        for (int k = 0; k < h->stops_n; k++) {
            fputs("        ", out);
            if (h->stops[k].line)
                fprintf(out, "%s:%d: ", h->stops[k].file, h->stops[k].line);
            fprintf(out, "%s\n", h->stops[k].reason);
        }
    }
    for (int i = 0; i < r->notes_n; i++)
        fprintf(out, "note    %s\n", r->notes[i]);
    fprintf(out, "ok\n");
}

static json_t *hooks_json(const report *r)
{
    json_t *list = json_array();
    for (int i = 0; i < PL_HOOK_COUNT; i++)
        if (pl_vm_hooks(r->vm) & 1u << i)
            json_array_append_new(list, json_string(pl_hook_name(i)));
    return list;
}

static json_t *notes_json(const report *r)
{
    json_t *list = json_array();
    for (int i = 0; i < r->notes_n; i++)
        json_array_append_new(list, json_string(r->notes[i]));
    return list;
}

static json_t *compiled_json(const report *r)
{
    json_t *all = json_object();
    for (int i = 0; i < r->hooks_n; i++) {
        const hook_report *h = &r->hooks[i];
        json_t *stops = json_array();
        for (int k = 0; k < h->stops_n; k++)
            json_array_append_new(stops,
                                  json_pack("{s:s, s:i, s:s}", "file", h->stops[k].file, "line",
                                            h->stops[k].line, "reason", h->stops[k].reason));
        json_object_set_new(all, pl_hook_name(h->hook),
                            json_pack("{s:s, s:i, s:o}", "compiled", h->compiled, "traces",
                                      h->traces, "stopped_at", stops));
    }
    return all;
}

static void print_json(const report *r, FILE *out)
{
    json_t *j;
    if (r->err.message[0])
        j = json_pack("{s:b, s:{s:s, s:s, s:s, s:i}}", "ok", 0, "error", "message", r->err.message,
                      "stage", r->err.stage, "file", r->err.file, "line", r->err.line);
    else
        j = json_pack("{s:b, s:s, s:s, s:s, s:s, s:o, s:o, s:o}", "ok", 1, "policy",
                      pl_vm_name(r->vm), "file", pl_policy_source_file(r->src), "sha256",
                      pl_policy_source_sha256(r->src), "affinity", affinity_of(r), "hooks",
                      hooks_json(r), "compiled", compiled_json(r), "notes", notes_json(r));
    if (j)
        json_dumpf(j, out, JSON_INDENT(2));
    else
        fputs("{\"ok\": false}", out); /* the message is not UTF-8, or memory is out */
    fputc('\n', out);
    json_decref(j);
}

static int examine(report *r, pl_str name_or_file, const json_t *params, pl_shared *shared)
{
    pl_errbuf eb;
    pl_vm_options o = {.loops = 1, .seed = 1, .shared = shared};
    if (pl_policy_source_load(name_or_file, params, &r->src, &eb) < 0) {
        strcpy(r->err.stage, "read");
        snprintf(r->err.message, sizeof r->err.message, "%s", eb.text);
        return PL_EPOLICY;
    }
    int rc = pl_vm_new(r->src, &o, &r->vm, &r->err);
    if (rc == 0)
        rc = pl_vm_init(r->vm, NULL, &r->err);
    if (rc == 0)
        rc = pl_selftest(r->vm, &r->err);
    if (rc == 0)
        rc = guarded(r->vm, CHECK_INSTRUCTIONS, every_hook, &r->err);
    if (rc == 0)
        write_notes(r);
    static const int hot[] = {PL_HOOK_ADMIT, PL_HOOK_SESSION, PL_HOOK_ROUTE,
                              PL_HOOK_SCORE, PL_HOOK_RETAIN,  PL_HOOK_DONE};
    for (size_t i = 0; rc == 0 && i < sizeof hot / sizeof *hot; i++)
        if (pl_vm_hooks(r->vm) & 1u << hot[i])
            r->hooks[r->hooks_n++].hook = hot[i];
    if (rc == 0)
        rc = lua_report(r);
    return rc;
}

int pl_check(pl_str name_or_file, const json_t *params, bool json, FILE *out)
{
    report *r = calloc(1, sizeof *r);
    pl_shared *shared = pl_shared_new();
    if (!r || !shared) {
        free(r);
        pl_shared_free(shared);
        return PL_ENOMEM;
    }
    int rc = examine(r, name_or_file, params, shared);
    if (rc == 0)
        memset(&r->err, 0, sizeof r->err);
    if (json)
        print_json(r, out);
    else
        print_text(r, out);
    pl_vm_free(r->vm);
    pl_policy_source_unref(r->src);
    pl_shared_free(shared);
    free(r);
    return rc < 0 ? PL_EPOLICY : 0;
}
