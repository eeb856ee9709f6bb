/* JSON to Lua and back, for params, carry and the configuration. Used inside protected calls on the
 * thread that owns the state.
 *
 * Keys that are integers and no sequence 1..n (a table by slot, say) become strings "#7"; a string
 * key that begins with '#' gets a second one. pl_json_push undoes both. */
#include "policy/vm_priv.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 32

static void push_key(lua_State *L, const char *key)
{
    if (key[0] == '#' && key[1] == '#') {
        lua_pushstring(L, key + 1);
    } else if (key[0] == '#' && key[1]) {
        char *end;
        double n = strtod(key + 1, &end);
        if (*end)
            lua_pushstring(L, key);
        else
            lua_pushnumber(L, n);
    } else {
        lua_pushstring(L, key);
    }
}

static void push(lua_State *L, const json_t *v, int depth)
{
    luaL_checkstack(L, 4, "JSON");
    if (depth > MAX_DEPTH)
        luaL_error(L, "JSON is nested more than %d deep", MAX_DEPTH);
    switch (v ? json_typeof(v) : JSON_NULL) {
    case JSON_OBJECT: {
        const char *key;
        json_t *value;
        lua_newtable(L);
        json_object_foreach((json_t *)v, key, value)
        {
            push_key(L, key);
            push(L, value, depth + 1);
            lua_rawset(L, -3);
        }
        break;
    }
    case JSON_ARRAY:
        lua_newtable(L);
        for (size_t i = 0; i < json_array_size(v); i++) {
            push(L, json_array_get(v, i), depth + 1);
            lua_rawseti(L, -2, (int)i + 1);
        }
        break;
    case JSON_STRING:
        lua_pushlstring(L, json_string_value(v), json_string_length(v));
        break;
    case JSON_INTEGER:
        lua_pushnumber(L, (double)json_integer_value(v));
        break;
    case JSON_REAL:
        lua_pushnumber(L, json_real_value(v));
        break;
    case JSON_TRUE:
    case JSON_FALSE:
        lua_pushboolean(L, json_is_true(v));
        break;
    default:
        lua_pushnil(L);
    }
}

void pl_json_push(lua_State *L, const json_t *v)
{
    push(L, v, 0);
}

/* The way to the value being read, for messages: on the C stack, from the root. */
typedef struct step {
    const struct step *up;
    const char *name; /* NULL: number */
    double number;
    const void *table; /* to find cycles */
} step;

typedef struct reader {
    lua_State *L;
    const char *what;
    size_t most, left; /* bytes in all, and those that may still come; counted roughly */
} reader;

static size_t path(const reader *r, const step *s, char *out, size_t cap)
{
    if (!s->up)
        return (size_t)snprintf(out, cap, "%s", r->what);
    size_t n = path(r, s->up, out, cap);
    if (n >= cap)
        return n;
    return n + (size_t)(s->name ? snprintf(out + n, cap - n, "%s%s", n ? "." : "", s->name)
                                : snprintf(out + n, cap - n, "[%.14g]", s->number));
}

static void refuse(const reader *r, const step *s, const char *why)
{
    char where[400];
    path(r, s, where, sizeof where);
    lua_pushfstring(r->L, "%s%s%s", where, where[0] ? ": " : "", why);
    lua_error(r->L);
}

static void spend(reader *r, const step *s, size_t n)
{
    if (n > r->left) {
        char why[64];
        snprintf(why, sizeof why, "there is more data than may be kept: %zu KiB", r->most / 1024);
        refuse(r, s, why);
    }
    r->left -= n;
}

static void keep(reader *r, const step *s, json_t **at, json_t *v)
{
    if (!v)
        refuse(r, s, "out of memory, or a string that is not UTF-8");
    *at = v;
}

static void read_value(reader *r, int index, const step *s, int depth, json_t *parent,
                       const char *key, json_t **root);

/* Puts v under its parent at once, so that an error later on releases it with the root. */
static json_t *place(reader *r, const step *s, json_t *parent, const char *key, json_t **root,
                     json_t *v)
{
    json_t *kept;
    keep(r, s, &kept, v);
    if (!parent)
        *root = v;
    else if (key ? json_object_set_new(parent, key, v) : json_array_append_new(parent, v))
        refuse(r, s, "out of memory, or a key that is not UTF-8");
    return v;
}

/* n when the keys are exactly 1..n, n > 0; else 0 */
static size_t sequence(lua_State *L, int index)
{
    size_t n = lua_objlen(L, index), seen = 0;
    lua_pushnil(L);
    while (lua_next(L, index)) {
        lua_pop(L, 1);
        double k = lua_type(L, -1) == LUA_TNUMBER ? lua_tonumber(L, -1) : 0;
        if (!(k >= 1 && k <= (double)n && k == floor(k))) {
            lua_pop(L, 1);
            return 0;
        }
        seen++;
    }
    return seen == n ? n : 0;
}

static void read_table(reader *r, int index, const step *s, int depth, json_t *parent,
                       const char *key, json_t **root)
{
    lua_State *L = r->L;
    for (const step *up = s->up; up; up = up->up)
        if (up->table == s->table)
            refuse(r, s, "a table that contains itself");
    if (depth > MAX_DEPTH)
        refuse(r, s, "tables are nested too deep");
    size_t n = sequence(L, index);
    if (n) {
        json_t *array = place(r, s, parent, key, root, json_array());
        for (size_t i = 1; i <= n; i++) {
            step next = {s, NULL, (double)i, NULL};
            lua_rawgeti(L, index, (int)i);
            read_value(r, lua_gettop(L), &next, depth + 1, array, NULL, root);
            lua_pop(L, 1);
        }
        return;
    }
    json_t *object = place(r, s, parent, key, root, json_object());
    lua_pushnil(L);
    while (lua_next(L, index)) {
        char name[1024];
        step next = {s, name, 0, NULL};
        int type = lua_type(L, -2);
        if (type == LUA_TNUMBER) {
            double k = lua_tonumber(L, -2);
            next = (step){s, NULL, k, NULL};
            if (k != floor(k) || fabs(k) > 0x1.0p53)
                refuse(r, &next, "a key is a string or an integer");
            snprintf(name, sizeof name, "#%.0f", k);
        } else if (type == LUA_TSTRING) {
            size_t len;
            const char *text = lua_tolstring(L, -2, &len);
            if (len + 2 > sizeof name || memchr(text, 0, len))
                refuse(r, s, "a key is too long or has a NUL");
            snprintf(name, sizeof name, "%s%s", text[0] == '#' ? "#" : "", text);
        } else {
            refuse(r, s, "a key is a string or an integer");
        }
        spend(r, &next, strlen(name) + 4);
        read_value(r, lua_gettop(L), &next, depth + 1, object, name, root);
        lua_pop(L, 1);
    }
}

static void read_value(reader *r, int index, const step *s, int depth, json_t *parent,
                       const char *key, json_t **root)
{
    lua_State *L = r->L;
    luaL_checkstack(L, 8, "JSON");
    char why[64];
    switch (lua_type(L, index)) {
    case LUA_TTABLE: {
        step here = *s;
        here.table = lua_topointer(L, index);
        spend(r, s, 2);
        read_table(r, index, &here, depth, parent, key, root);
        return;
    }
    case LUA_TSTRING: {
        size_t n;
        const char *text = lua_tolstring(L, index, &n);
        spend(r, s, n + 3);
        place(r, s, parent, key, root, json_stringn(text, n));
        return;
    }
    case LUA_TNUMBER: {
        double d = lua_tonumber(L, index);
        spend(r, s, 8);
        if (!isfinite(d))
            refuse(r, s, "a number that is not finite");
        place(r, s, parent, key, root,
              d == floor(d) && fabs(d) <= 0x1.0p53 ? json_integer((json_int_t)d) : json_real(d));
        return;
    }
    case LUA_TBOOLEAN:
        spend(r, s, 5);
        place(r, s, parent, key, root, json_boolean(lua_toboolean(L, index)));
        return;
    default:
        snprintf(why, sizeof why, "plain data only, not a %s", luaL_typename(L, index));
        refuse(r, s, why);
    }
}

void pl_json_read(lua_State *L, int index, const char *what, size_t max_bytes, json_t **out)
{
    reader r = {L, what, max_bytes, max_bytes};
    step root = {NULL, NULL, 0, NULL};
    *out = NULL;
    read_value(&r, index, &root, 0, NULL, NULL, out);
}
