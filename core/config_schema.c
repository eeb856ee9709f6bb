/* The schema engine: see config_schema.h. Called by config.c, and through it by the admin API for
 * engines that are added at run time. Any thread; what it reads into belongs to the caller. */
#include "config_schema.h"

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include "base/nearest.h"

#define PATH_CAP 256

/* --- messages --- */

int pl_schema_fail(const pl_reader_ctx *rd, const char *path, const char *fmt, ...)
{
    char text[768];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return pl_fail(rd->eb, PL_EINVALID, "%s: %s%s%s", rd->origin, path, *path ? ": " : "", text);
}

static const char *found_text(const json_t *v, char *out, size_t cap)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return "a table with names";
    case JSON_ARRAY:
        return "a list";
    case JSON_STRING:
        snprintf(out, cap, "the text \"%.40s\"", json_string_value(v));
        return out;
    case JSON_INTEGER:
    case JSON_REAL:
        snprintf(out, cap, "%.12g", json_number_value(v));
        return out;
    case JSON_TRUE:
        return "true";
    case JSON_FALSE:
        return "false";
    default:
        return "null";
    }
}

int pl_schema_expected(const pl_reader_ctx *rd, const char *path, const json_t *found,
                       const char *expected)
{
    char text[64];
    return pl_schema_fail(rd, path, "found %s, expected %s", found_text(found, text, sizeof text),
                          expected);
}

/* What a key takes, in words; for messages and the reference. */
static const char *type_text(const pl_key *k, char *out, size_t cap)
{
    const char *kind = "text";
    switch (k->type) {
    case PL_KEY_BOOL:
        return "true or false";
    case PL_KEY_OTHER:
        return k->shape;
    case PL_KEY_LATER:
        return "not available yet";
    case PL_KEY_CHOICE: {
        size_t n = 0;
        for (int i = 0; k->choices[i] && n < cap; i++)
            n += (size_t)snprintf(out + n, cap - n, "%s\"%s\"", i ? " or " : "", k->choices[i]);
        return out;
    }
    case PL_KEY_WHOLE:
        kind = "whole number";
        break;
    case PL_KEY_NUMBER:
    case PL_KEY_MS:
    case PL_KEY_NS:
        kind = "number";
        break;
    default:
        return "text";
    }
    if (k->min < k->max)
        snprintf(out, cap, "%s %.15g to %.15g%s%s", kind, k->min, k->max, k->unit ? " " : "",
                 k->unit ? k->unit : "");
    else
        snprintf(out, cap, "%s%s%s", kind, k->unit ? ", " : "", k->unit ? k->unit : "");
    return out;
}

/* --- values --- */

pl_str pl_schema_string(const pl_reader_ctx *rd, const json_t *value)
{
    return pl_arena_str(rd->arena, (pl_str){json_string_value(value), json_string_length(value)});
}

int pl_schema_list(const pl_reader_ctx *rd, const json_t *value, const char *path, const char *of,
                   size_t *n)
{
    char expected[96];
    *n = json_array_size(value);
    if (json_is_array(value) || (json_is_object(value) && json_object_size(value) == 0))
        return 0;
    snprintf(expected, sizeof expected, "a list of %s", of);
    return pl_schema_expected(rd, path, value, expected);
}

static void store_whole(void *to, size_t width, uint64_t v)
{
    uint32_t small = (uint32_t)v;
    if (width == sizeof v)
        memcpy(to, &v, sizeof v);
    else
        memcpy(to, &small, sizeof small);
}

static int read_number(const pl_reader_ctx *rd, const pl_key *k, const json_t *v, const char *path,
                       char *to)
{
    char expected[128];
    double d = json_number_value(v);
    bool whole = k->type != PL_KEY_WHOLE || d == floor(d);
    if (!json_is_number(v) || !isfinite(d) || !whole || d < k->min || d > k->max)
        return pl_schema_expected(rd, path, v, type_text(k, expected, sizeof expected));
    if (k->type == PL_KEY_NUMBER)
        memcpy(to, &d, sizeof d);
    else if (k->type == PL_KEY_WHOLE)
        store_whole(to, k->width, (uint64_t)d);
    else
        store_whole(to, k->width, (uint64_t)llround(d * (k->type == PL_KEY_MS ? 1e3 : 1e9)));
    return 0;
}

static int read_choice(const pl_reader_ctx *rd, const pl_key *k, const json_t *v, const char *path,
                       char *to)
{
    char expected[128];
    for (int i = 0; json_is_string(v) && k->choices[i]; i++)
        if (strcmp(json_string_value(v), k->choices[i]) == 0) {
            store_whole(to, sizeof(int), (uint64_t)i);
            return 0;
        }
    return pl_schema_expected(rd, path, v, type_text(k, expected, sizeof expected));
}

static int read_value(const pl_reader_ctx *rd, const pl_key *k, const json_t *v, const char *path,
                      void *base)
{
    char *to = (char *)base + k->at;
    switch (k->type) {
    case PL_KEY_STRING:
    case PL_KEY_SECRET: {
        if (!json_is_string(v) && k->type == PL_KEY_SECRET) /* not even a wrong one is shown */
            return pl_schema_fail(rd, path, "expected text");
        if (!json_is_string(v))
            return pl_schema_expected(rd, path, v, "text");
        pl_str s = pl_schema_string(rd, v);
        if (!s.p)
            return pl_fail(rd->eb, PL_ENOMEM, "out of memory");
        if (s.n == 0)
            return pl_schema_fail(rd, path, "is empty");
        memcpy(to, &s, sizeof s);
        return 0;
    }
    case PL_KEY_BOOL: {
        if (!json_is_boolean(v))
            return pl_schema_expected(rd, path, v, "true or false");
        int as_int = json_is_true(v);
        bool as_bool = as_int;
        memcpy(to, k->width == sizeof as_bool ? (void *)&as_bool : &as_int, k->width);
        return 0;
    }
    case PL_KEY_CHOICE:
        return read_choice(rd, k, v, path, to);
    case PL_KEY_OTHER:
        return k->read(rd, v, path, base);
    case PL_KEY_LATER:
        return pl_schema_fail(rd, path, "not available yet in this version (%s)", k->help);
    default:
        return read_number(rd, k, v, path, to);
    }
}

/* --- objects --- */

/* The name that follows `prefix` in a path of the table: a key's or a section's. */
static bool sibling(const pl_key *k, pl_str prefix, pl_str *name)
{
    pl_str path = pl_str_c(k->path);
    if (!pl_str_starts(path, prefix))
        return false;
    path = (pl_str){path.p + prefix.n, path.n - prefix.n};
    return pl_str_cut(&path, '.', name);
}

static int unknown(const pl_reader_ctx *rd, const pl_key *table, pl_str prefix, const char *name,
                   const char *path)
{
    pl_nearest guess = {pl_str_c(name), {NULL, 0}, 0};
    pl_str known, last = {NULL, 0};
    char list[512];
    size_t n = 0;
    list[0] = 0;
    for (const pl_key *k = table; k->path; k++) {
        if (!sibling(k, prefix, &known) || pl_str_eq(known, last))
            continue;
        last = known;
        pl_nearest_try(&guess, known);
        if (n < sizeof list)
            n +=
                (size_t)snprintf(list + n, sizeof list - n, "%s%.*s", n ? ", " : "", PL_FMT(known));
    }
    if (guess.best.p)
        return pl_schema_fail(rd, path, "unknown key, did you mean '%.*s'?", PL_FMT(guess.best));
    return pl_schema_fail(rd, path, "unknown key; known here: %s", list);
}

static int read_section(const pl_reader_ctx *rd, const pl_key *table, const json_t *object,
                        const char *at, pl_str prefix, void *base)
{
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)object, name, value)
    {
        char path[PATH_CAP], inner[PATH_CAP];
        snprintf(path, sizeof path, "%s%s%.64s", at, *at ? "." : "", name);
        snprintf(inner, sizeof inner, "%.*s%.64s", PL_FMT(prefix), name);
        const pl_key *key = NULL;
        bool section = false;
        for (const pl_key *k = table; k->path && !key; k++) {
            size_t n = strlen(inner);
            if (strcmp(k->path, inner) == 0)
                key = k;
            else if (strncmp(k->path, inner, n) == 0 && k->path[n] == '.')
                section = true;
        }
        int rc;
        if (strchr(name, '.')) {
            rc = pl_schema_fail(rd, path, "unknown key; what has a dot here is a table in a table");
        } else if (key) {
            rc = read_value(rd, key, value, path, base);
        } else if (!section) {
            rc = unknown(rd, table, prefix, name, path);
        } else if (!json_is_object(value)) {
            rc = pl_schema_expected(rd, path, value, "a table with names");
        } else {
            size_t n = strlen(inner);
            inner[n++] = '.';
            rc = read_section(rd, table, value, path, (pl_str){inner, n}, base);
        }
        if (rc != 0)
            return rc;
    }
    return 0;
}

int pl_schema_read(const pl_reader_ctx *rd, const pl_key *table, const json_t *object,
                   const char *at, void *base)
{
    if (!json_is_object(object))
        return pl_schema_expected(rd, at, object, "a table with names");
    return read_section(rd, table, object, at, PL_STR(""), base);
}

/* --- the reference --- */

static uint64_t load_whole(const char *from, size_t width)
{
    uint64_t v = 0;
    uint32_t small;
    if (width == sizeof v) {
        memcpy(&v, from, sizeof v);
    } else {
        memcpy(&small, from, sizeof small);
        v = small;
    }
    return v;
}

static void default_text(const pl_key *k, const void *base, char *out, size_t cap)
{
    const char *from = (const char *)base + k->at;
    double d;
    pl_str s;
    out[0] = 0;
    if (k->def) {
        snprintf(out, cap, "%s", k->def);
        return;
    }
    switch (k->type) {
    case PL_KEY_STRING:
        memcpy(&s, from, sizeof s);
        if (s.n)
            snprintf(out, cap, "\"%.*s\"", PL_FMT(s));
        break;
    case PL_KEY_BOOL:
        snprintf(out, cap, "%s", *from ? "true" : "false");
        break;
    case PL_KEY_CHOICE:
        snprintf(out, cap, "\"%s\"", k->choices[load_whole(from, sizeof(int))]);
        break;
    case PL_KEY_WHOLE:
        snprintf(out, cap, "%llu", (unsigned long long)load_whole(from, k->width));
        break;
    case PL_KEY_MS:
    case PL_KEY_NS:
        snprintf(out, cap, "%.9g",
                 (double)load_whole(from, k->width) / (k->type == PL_KEY_MS ? 1e3 : 1e9));
        break;
    case PL_KEY_NUMBER:
        memcpy(&d, from, sizeof d);
        snprintf(out, cap, "%.9g", d);
        break;
    default:
        break;
    }
}

void pl_schema_print(const pl_key *table, const char *prefix, const void *base, FILE *out)
{
    for (const pl_key *k = table; k->path; k++) {
        char type[128], def[128], path[PATH_CAP];
        snprintf(path, sizeof path, "%s%s", prefix, k->path);
        default_text(k, base, def, sizeof def);
        fprintf(out, "%-36s %s%s%s\n    %s\n", path, type_text(k, type, sizeof type),
                def[0] ? ", default " : "", def, k->help);
    }
}
