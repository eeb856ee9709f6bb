/* Reads a configuration file: see lua_config.h. Called at start-up and on SIGHUP, on the control
 * thread. A Lua state of its own, in a capped arena, closed before it returns; the JIT stays off
 * and an instruction budget runs. */
#include "policy/lua_config.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "policy/embedded.h"
#include "policy/vm_priv.h"

#define MAX_FILE_BYTES (4u << 20)
#define MAX_DATA_BYTES (16u << 20)
#define MEMORY_BYTES   (128u << 20)
#define INSTRUCTIONS   20000000
#define BUDGET_STEP    1000

typedef struct config_run {
    const char *path;
    char *text;
    size_t n;
    long budget;
    json_t *made;
} config_run;

static int read_file(const char *path, char **out, size_t *n, pl_errbuf *eb)
{
    struct stat st;
    FILE *f = fopen(path, "rbe");
    if (!f)
        return pl_fail(eb, errno == ENOENT ? PL_ENOTFOUND : PL_EIO, "cannot open %s: %s", path,
                       strerror(errno));
    int rc = 0;
    *out = NULL;
    if (fstat(fileno(f), &st) != 0 || S_ISDIR(st.st_mode))
        rc = pl_fail(eb, PL_EIO, "%s is not a file", path);
    else if (!(*out = malloc(MAX_FILE_BYTES + 1)))
        rc = pl_fail(eb, PL_ENOMEM, "out of memory");
    else if ((*n = fread(*out, 1, MAX_FILE_BYTES + 1, f)) > MAX_FILE_BYTES)
        rc = pl_fail(eb, PL_ELIMIT, "%s is larger than %u bytes", path, MAX_FILE_BYTES);
    else if (ferror(f))
        rc = pl_fail(eb, PL_EIO, "cannot read %s: %s", path, strerror(errno));
    fclose(f);
    if (rc < 0)
        free(*out);
    return rc;
}

static config_run *run_of(lua_State *L)
{
    void *arena;
    lua_getallocf(L, &arena);
    return pl_vm_arena_owner(arena);
}

static void on_count(lua_State *L, lua_Debug *ar)
{
    config_run *r = run_of(L);
    r->budget -= BUDGET_STEP;
    if (r->budget > 0)
        return;
    lua_sethook(L, on_count, LUA_MASKCOUNT, 1);
    lua_getinfo(L, "Sl", ar);
    lua_pushfstring(L, "%s:%d: stopped: it ran too long", ar->short_src, ar->currentline);
    lua_error(L);
}

static int lua_getenv(lua_State *L)
{
    // stack: name
    lua_pushstring(L, getenv(luaL_checkstring(L, 1)));
    return 1;
}

static int run(lua_State *L)
{
    // stack: run
    config_run *r = lua_touserdata(L, 1);
    luaL_openlibs(L);
    luaJIT_setmode(L, 0, LUAJIT_MODE_ENGINE | LUAJIT_MODE_OFF);
    const pl_embedded *e = pl_embedded_find("lua/perilune/config.lua");
    if (!e)
        return luaL_error(L, "lua/perilune/config.lua is not compiled in");
    pl_vm_load_text(L, e->bytes, e->n, "=perilune.config");
    lua_pushfstring(L, "@%s", r->path);
    pl_vm_load_text(L, r->text, r->n, lua_tostring(L, -1));
    lua_remove(L, -2);
    lua_pushcfunction(L, lua_getenv);
    lua_sethook(L, on_count, LUA_MASKCOUNT, BUDGET_STEP);
    lua_call(L, 2, 1);
    lua_sethook(L, NULL, 0, 0);
    // stack: run, answer
    if (!lua_istable(L, 2)) {
        lua_pushfstring(L, "%s:1: a configuration file returns a table: return { ... }", r->path);
        return lua_error(L);
    }
    pl_json_read(L, 2, "", MAX_DATA_BYTES, &r->made);
    return 0;
}

/* Lua shortens long chunk names to "...end/of/path": people get the path. */
static int failed(const config_run *r, const char *text, pl_errbuf *eb)
{
    if (strncmp(text, "...", 3) == 0) {
        const char *colon = strchr(text, ':');
        if (colon)
            return pl_fail(eb, PL_EPOLICY, "%s%s", r->path, colon);
    }
    if (strncmp(text, r->path, strlen(r->path)) == 0)
        return pl_fail(eb, PL_EPOLICY, "%s", text);
    return pl_fail(eb, PL_EPOLICY, "%s: %s", r->path, text);
}

static int run_protected(config_run *r, json_t **out, pl_errbuf *eb)
{
    pl_vm_arena *arena = pl_vm_arena_new(MEMORY_BYTES, r);
    lua_State *L = arena ? lua_newstate(pl_vm_arena_alloc, arena) : NULL;
    if (!L) {
        pl_vm_arena_free(arena);
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    }
    int status = lua_cpcall(L, run, r), rc = 0;
    if (status == 0) {
        *out = r->made;
    } else {
        json_decref(r->made);
        rc = failed(r, lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : "an error", eb);
    }
    lua_close(L);
    pl_vm_arena_free(arena);
    return rc;
}

int pl_lua_config(const char *path, json_t **out, pl_errbuf *eb)
{
    config_run r = {.path = path, .budget = INSTRUCTIONS};
    *out = NULL;
    int rc = read_file(path, &r.text, &r.n, eb);
    if (rc < 0)
        return rc;
    rc = run_protected(&r, out, eb);
    free(r.text);
    return rc;
}
