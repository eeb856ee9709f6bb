/* How Lua text gets into a VM: the compiled-in prelude, the policy's own files, and the instruction
 * budget that stops a chunk which never comes back. Runs inside protected calls while a VM is
 * built, on the thread that builds it. Only text is loaded, never bytecode. */
#include "policy/vm_priv.h"

#include <stdio.h>
#include <string.h>

#include "policy/embedded.h"

#define BUDGET_STEP 1000

pl_vm *pl_vm_of(lua_State *L)
{
    void *arena;
    lua_getallocf(L, &arena);
    return pl_vm_arena_owner(arena);
}

static void on_count(lua_State *L, lua_Debug *ar)
{
    pl_vm *vm = pl_vm_of(L);
    vm->budget -= BUDGET_STEP;
    if (vm->budget > 0)
        return;
    /* from now on at every instruction, so that a pcall around the culprit cannot swallow it */
    lua_sethook(L, on_count, LUA_MASKCOUNT, 1);
    lua_getinfo(L, "Sl", ar);
    if (ar->currentline > 0)
        lua_pushfstring(L, "%s:%d: ", ar->short_src, ar->currentline);
    else
        lua_pushliteral(L, "");
    lua_pushliteral(L, "stopped: it ran too long (its budget of instructions is used up)");
    lua_concat(L, 2);
    lua_error(L);
}

void pl_vm_budget_begin(pl_vm *vm, long instructions)
{
    vm->budget = instructions;
    lua_sethook(vm->L, on_count, LUA_MASKCOUNT, BUDGET_STEP);
}

void pl_vm_budget_end(pl_vm *vm)
{
    lua_sethook(vm->L, NULL, 0, 0);
}

void pl_vm_load_text(lua_State *L, const char *bytes, size_t n, const char *chunk)
{
    if (n && bytes[0] == LUA_SIGNATURE[0])
        luaL_error(L, "%s:1: this is bytecode; only Lua text is loaded", chunk + 1);
    if (luaL_loadbufferx(L, bytes, n, chunk, "t") != 0)
        lua_error(L);
}

int pl_vm_load_internal(lua_State *L)
{
    // stack: name
    char path[128], chunk[128];
    const char *name = luaL_checkstring(L, 1);
    snprintf(path, sizeof path, "lua/perilune/%s.lua", name);
    snprintf(chunk, sizeof chunk, "=perilune.%s", name);
    const pl_embedded *e = pl_embedded_find(path);
    if (!e)
        return luaL_error(L, "%s is not compiled in", path);
    pl_vm_load_text(L, e->bytes, e->n, chunk);
    return 1;
}

/* Modules of the prelude that are no business of policies. */
static bool is_internal(const char *name)
{
    static const char *const names[] = {"boot",    "records",   "helpers", "sandbox", "contract",
                                        "harness", "jitreport", "config",  NULL};
    for (const char *const *n = names; *n; n++)
        if (strcmp(*n, name) == 0)
            return true;
    return false;
}

static int refuse(lua_State *L, const char *message)
{
    lua_pushnil(L);
    lua_pushstring(L, message);
    return 2;
}

int pl_vm_load_beside(lua_State *L)
{
    // stack: module
    pl_vm *vm = pl_vm_of(L);
    const char *module = luaL_checkstring(L, 1);
    if (strlen(module) != lua_objlen(L, 1))
        return refuse(L, "require takes a name without NUL");
    const char *bytes, *chunk;
    size_t n;
    char text[300];
    if (strncmp(module, "perilune.", 9) == 0) {
        char path[128];
        snprintf(path, sizeof path, "lua/perilune/%s.lua", module + 9);
        const pl_embedded *e =
            is_internal(module + 9) || strchr(module, '/') ? NULL : pl_embedded_find(path);
        if (!e) {
            snprintf(text, sizeof text, "require '%.100s': there is no such module", module);
            return refuse(L, text);
        }
        lua_pushfstring(L, "@%s", path);
        bytes = e->bytes;
        n = e->n;
        chunk = lua_tostring(L, -1);
    } else {
        const pl_source_file *file;
        pl_errbuf eb;
        if (pl_source_module(vm->src, module, &file, &eb) < 0) {
            lua_pushnil(L);
            lua_pushstring(L, eb.text);
            return 2;
        }
        bytes = file->bytes;
        n = file->n;
        chunk = file->chunk;
    }
    const char *stage = vm->stage;
    vm->stage = "parse";
    pl_vm_load_text(L, bytes, n, chunk);
    vm->stage = stage;
    return 1;
}
