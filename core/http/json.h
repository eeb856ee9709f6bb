/* A validating walk over JSON bytes (RFC 8259) that builds nothing: it steps through one object or
 * array member by member and skips each value, checking every byte on the way. Under scan.h
 * (request bodies) and sse.h (usage in answers). Pure, no allocation, constant stack.
 *
 *     pl_json j;
 *     pl_json_init(&j, text, PL_JSON_DEPTH_MAX, true);
 *     if (pl_json_enter(&j, '{') == 0)
 *         while (pl_json_key(&j, &key) > 0 && pl_json_value(&j, &value) == 0) ...
 *
 * After a failure j.rc is the error and every call returns it again. The place of an error is the
 * first byte that no valid text could have there: the end of the text when it is only cut short. */
#ifndef PL_JSON_H
#define PL_JSON_H

#include "http/scan.h"

/* Containers open at once; a larger max_depth is lowered to it. */
#define PL_JSON_DEPTH_MAX 1024

typedef struct pl_json {
    const char *p;         /* next byte to read */
    const char *end;       /* one past the text */
    unsigned depth;        /* containers entered */
    unsigned max_depth;    /* containers that may be open */
    bool first;            /* nothing of the entered container was read yet */
    bool utf8;             /* check UTF-8 in values (keys always are) */
    int rc;                /* 0 or the failure */
    const char *error;     /* when failed: static text */
    const char *error_pos; /* when failed: in the text, or its end */
    pl_scan *note;         /* where long strings are noted, or NULL */
    const pl_scan *known;  /* whose noted strings are stepped over, or NULL */
    uint32_t next_long;    /* of known: the first that is not behind */
} pl_json;

typedef struct pl_json_name {
    pl_str raw;   /* between the quotes */
    bool escaped; /* contains a backslash */
} pl_json_name;

void pl_json_init(pl_json *j, pl_str text, unsigned max_depth, bool utf8);

/* The text is part of a body that s has accepted: its long strings are not looked into again. Text
 * from elsewhere is walked over as ever. s outlives the walk. */
void pl_json_know(pl_json *j, const pl_scan *s);

/* Skips whitespace and steps into the container that begins with `open`: '{' or '['. */
int pl_json_enter(pl_json *j, char open);

/* Objects: 1 with the next member's name (its value is next), 0 at the object's end (j->p is past
 * the brace), or an error. */
int pl_json_key(pl_json *j, pl_json_name *name);

/* Arrays: 1 when a value is next, 0 at the end, or an error. */
int pl_json_item(pl_json *j);

/* Validates and skips the next value; *m (its key_at is left 0) says what it was. 0 or an error. */
int pl_json_value(pl_json *j, pl_member *m);

/* PL_ESYNTAX unless only whitespace follows. */
int pl_json_done(pl_json *j);

/* Marks the walk as failed; for errors that only the caller can see. Returns rc. */
int pl_json_fail(pl_json *j, const char *pos, int rc, const char *text);

/* Compares after unescaping. */
bool pl_json_name_is(const pl_json_name *name, pl_str plain);

/* Unescapes the inside of a valid JSON string into `out` (room for raw.n bytes: the result is never
 * longer) and returns its length. Lone surrogates become U+FFFD. */
size_t pl_json_unescape(pl_str raw, char *out);

#endif
