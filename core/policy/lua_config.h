/* Reads a Lua file that returns a table (the configuration) in a sandbox of its own: no I/O, text
 * chunks only, an instruction budget, env(name) reads the environment. */
#ifndef PL_LUA_CONFIG_H
#define PL_LUA_CONFIG_H

#include <jansson.h>

#include "base/err.h"

/* *out is a new JSON object (tables with keys 1..n become arrays, an empty table an empty object).
 * Errors carry file:line. */
int pl_lua_config(const char *path, json_t **out, pl_errbuf *eb);

#endif
