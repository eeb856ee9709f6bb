/* The configuration's schema: a table of keys says where each value goes, its type, range and one
 * line for people. The same table reads an object, checks it, names the nearest known key, and
 * prints the reference. config.c has the tables. */
#ifndef PL_CONFIG_SCHEMA_H
#define PL_CONFIG_SCHEMA_H

#include <jansson.h>
#include <stdio.h>

#include "base/arena.h"
#include "base/err.h"

typedef enum pl_key_type {
    PL_KEY_STRING, /* pl_str, copied into the arena */
    PL_KEY_SECRET, /* the same; never shown */
    PL_KEY_BOOL,   /* bool or int */
    PL_KEY_WHOLE,  /* any integer of 4 or 8 bytes */
    PL_KEY_NUMBER, /* double */
    PL_KEY_MS,     /* seconds in the file, uint64_t milliseconds here */
    PL_KEY_NS,     /* seconds in the file, uint64_t nanoseconds here */
    PL_KEY_CHOICE, /* one of `choices`; int, its place */
    PL_KEY_OTHER,  /* `read` does it */
    PL_KEY_LATER   /* known, refused: not available in this version */
} pl_key_type;

typedef struct pl_reader_ctx {
    pl_arena *arena;
    const char *origin; /* file name, "config" or "body": begins every message */
    pl_errbuf *eb;
} pl_reader_ctx;

typedef struct pl_key {
    const char *path; /* with dots for sections: timeouts.head_seconds */
    pl_key_type type;
    size_t at, width; /* PL_KEY_AT */
    double min, max;  /* numbers; min < max means "checked" */
    const char *unit; /* of a number: "bytes"; NULL when it has none */
    const char *const *choices;
    /* value is non-NULL; base is the struct that the table describes */
    int (*read)(const pl_reader_ctx *rd, const json_t *value, const char *path, void *base);
    const char *shape; /* PL_KEY_OTHER: its type, in words */
    const char *def;   /* the default in words, where the struct's own value does not say it */
    const char *help;  /* one line */
} pl_key;

#define PL_KEY_AT(type, field) offsetof(type, field), sizeof(((type *)0)->field)

/* Reads `object` into base by the table (ended by path NULL). `at` is the path of the object itself
 * ("" for the root). Unknown keys, types and ranges are errors that name the path. */
int pl_schema_read(const pl_reader_ctx *rd, const pl_key *table, const json_t *object,
                   const char *at, void *base);

/* "ORIGIN: PATH: found FOUND, expected EXPECTED" */
int pl_schema_expected(const pl_reader_ctx *rd, const char *path, const json_t *found,
                       const char *expected);
/* "ORIGIN: PATH: TEXT"; returns PL_EINVALID. */
int pl_schema_fail(const pl_reader_ctx *rd, const char *path, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* A copy of a JSON string; {NULL,0} when out of memory. */
pl_str pl_schema_string(const pl_reader_ctx *rd, const json_t *value);

/* A list: an array, or the empty object that an empty Lua table becomes. *n items. */
int pl_schema_list(const pl_reader_ctx *rd, const json_t *value, const char *path, const char *of,
                   size_t *n);

/* The reference: key, type, default and one line each. `prefix` goes before every path; base has
 * the defaults. */
void pl_schema_print(const pl_key *table, const char *prefix, const void *base, FILE *out);

#endif
