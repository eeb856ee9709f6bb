/* Random JSON text and random damage to it, from a seed. For tests of the scanner. */
#ifndef PL_TEST_RANDOM_JSON_H
#define PL_TEST_RANDOM_JSON_H

#include <stdlib.h>

#include "base/buf.h"
#include "base/rng.h"

static inline void random_add(pl_buf *b, const char *text)
{
    if (pl_buf_add(b, text, strlen(text)) != 0)
        abort();
}

static inline void random_space(pl_rng *r, pl_buf *b)
{
    static const char *const spaces[] = {"", "", "", "", "", " ", " ", "\n", "\t  ", "\r\n    "};
    random_add(b, spaces[pl_rng_below(r, 10)]);
}

static inline void random_string(pl_rng *r, pl_buf *b)
{
    static const char *const pieces[] = {"a",
                                         "tide",
                                         "{[,:]}",
                                         "\\n",
                                         "\\\"",
                                         "\\\\",
                                         "\\u00e9",
                                         "\\/",
                                         "\xc3\xa9",
                                         "潮",
                                         "한국",
                                         "🌙",
                                         "ไทย",
                                         "0123456789abcdef",
                                         " words",
                                         "\\u6f6e",
                                         "\x7f",
                                         "data:a/b",
                                         "\\ud83c\\udf19",
                                         "\\b\\f\\r\\t",
                                         "देव"};
    unsigned n = pl_rng_below(r, 8);
    if (pl_rng_below(r, 10) == 0)
        n += pl_rng_below(r, 90);
    random_add(b, "\"");
    while (n--)
        random_add(b, pieces[pl_rng_below(r, sizeof pieces / sizeof pieces[0])]);
    random_add(b, "\"");
}

static inline void random_number(pl_rng *r, pl_buf *b)
{
    static const char *const odd[] = {"0",    "-0",     "0.5", "-1.25", "1e3",
                                      "2E-7", "12e+01", "0e0", "-7",    "9007199254740993"};
    if (pl_rng_below(r, 3) == 0)
        random_add(b, odd[pl_rng_below(r, sizeof odd / sizeof odd[0])]);
    else if (pl_buf_addf(b, "%u", pl_rng_below(r, 160000)) != 0)
        abort();
}

static inline void random_ids(pl_rng *r, pl_buf *b)
{
    static const char *const separators[] = {",", ", ", ",\n", " ,"};
    const char *separator = separators[pl_rng_below(r, 4)];
    unsigned n = pl_rng_below(r, 60);
    random_add(b, "[");
    for (unsigned i = 0; i < n; i++) {
        if (i)
            random_add(b, separator);
        random_number(r, b);
    }
    random_add(b, "]");
}

static inline void random_value(pl_rng *r, pl_buf *b, int depth)
{
    unsigned n = pl_rng_below(r, 5);
    switch (pl_rng_below(r, depth > 0 ? 9 : 6)) {
    case 0:
        random_add(b, n & 1 ? "true" : "false");
        break;
    case 1:
        random_add(b, "null");
        break;
    case 2:
        random_number(r, b);
        break;
    case 3:
        random_ids(r, b);
        break;
    case 4:
    case 5:
        random_string(r, b);
        break;
    case 6:
    case 7:
        random_add(b, "[");
        for (unsigned i = 0; i < n; i++) {
            random_add(b, i ? "," : "");
            random_space(r, b);
            random_value(r, b, depth - 1);
            random_space(r, b);
        }
        random_add(b, "]");
        break;
    default:
        random_add(b, "{");
        for (unsigned i = 0; i < n; i++) {
            random_add(b, i ? "," : "");
            random_space(r, b);
            random_string(r, b);
            random_space(r, b);
            random_add(b, ":");
            random_space(r, b);
            random_value(r, b, depth - 1);
            random_space(r, b);
        }
        random_add(b, "}");
    }
}

/* Replaces, removes or inserts one byte, or cuts the text. */
static inline void random_damage(pl_rng *r, pl_buf *b)
{
    static const char bytes[] =
        "\"\\{}[],:0123456789-+.eE utfn\n\x01\x7f\x80\xa0\xc3\xe0\xed\xf0\xf4";
    size_t at = pl_rng_below(r, (uint32_t)b->n);
    char c = bytes[pl_rng_below(r, sizeof bytes)]; /* the NUL included */
    switch (pl_rng_below(r, 8)) {
    case 0:
        b->n = at;
        break;
    case 1:
    case 2:
        memmove(b->p + at, b->p + at + 1, b->n - at - 1);
        b->n--;
        break;
    case 3:
    case 4:
        if (pl_buf_add(b, " ", 1) != 0)
            abort();
        memmove(b->p + at + 1, b->p + at, b->n - at - 1);
        b->p[at] = c;
        break;
    default:
        b->p[at] = c;
    }
}

#endif
