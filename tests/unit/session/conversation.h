/* Random conversations and the many ways in which clients write one and the same JSON. For tests of
 * the history. */
#ifndef PL_TEST_CONVERSATION_H
#define PL_TEST_CONVERSATION_H

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/rng.h"

static inline void put(pl_buf *b, const char *text, size_t n)
{
    if (pl_buf_add(b, text, n) != 0)
        abort();
}

static inline void put_space(pl_rng *r, pl_buf *b)
{
    static const char *const spaces[] = {"", "", "", " ", "\n  ", "\t"};
    const char *s = spaces[pl_rng_below(r, 6)];
    put(b, s, strlen(s));
}

/* Length of the UTF-8 character at s and its number. */
static inline size_t character(const char *s, unsigned *c)
{
    unsigned char lead = (unsigned char)s[0];
    size_t n = lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    *c = n == 1 ? lead : lead & (0xffu >> (n + 1));
    for (size_t i = 1; i < n; i++)
        *c = *c << 6 | ((unsigned char)s[i] & 0x3f);
    return n;
}

/* Between quotes; each character plain or as an escape. */
static inline void put_escaped(pl_rng *r, pl_buf *b, const char *s, size_t n)
{
    char tmp[16];
    for (size_t i = 0; i < n;) {
        unsigned c;
        size_t k = character(s + i, &c);
        if (c >= 0x10000 && pl_rng_below(r, 2)) {
            put(b, tmp,
                (size_t)sprintf(tmp, "\\u%04x\\u%04X", 0xd800 + ((c - 0x10000) >> 10),
                                0xdc00 + ((c - 0x10000) & 0x3ff)));
        } else if (c == '\n' && pl_rng_below(r, 2)) {
            put(b, "\\n", 2);
        } else if ((c == '"' || c == '\\' || c == '/') && pl_rng_below(r, 2)) {
            put(b, "\\", 1);
            put(b, s + i, 1);
        } else if (c < 0x20 || c == '"' || c == '\\' || (c < 0x10000 && !pl_rng_below(r, 6))) {
            put(b, tmp, (size_t)sprintf(tmp, pl_rng_below(r, 2) ? "\\u%04x" : "\\u%04X", c));
        } else {
            put(b, s + i, k);
        }
        i += k;
    }
}

static inline void put_string(pl_rng *r, pl_buf *b, const char *s, size_t n)
{
    put(b, "\"", 1);
    put_escaped(r, b, s, n);
    put(b, "\"", 1);
}

/* v as some client might write it: random spaces, escapes and order of members. */
static inline void put_json(pl_rng *r, pl_buf *b, json_t *v)
{
    put_space(r, b);
    if (json_is_string(v)) {
        put_string(r, b, json_string_value(v), json_string_length(v));
    } else if (json_is_array(v)) {
        size_t i;
        json_t *e;
        put(b, "[", 1);
        json_array_foreach(v, i, e)
        {
            if (i)
                put(b, ",", 1);
            put_json(r, b, e);
        }
        put_space(r, b);
        put(b, "]", 1);
    } else if (json_is_object(v)) {
        const char *names[64];
        size_t n = 0;
        const char *name;
        json_t *e;
        json_object_foreach(v, name, e) names[n++] = name;
        put(b, "{", 1);
        for (size_t left = n; left; left--) {
            size_t pick = pl_rng_below(r, (uint32_t)left);
            const char *chosen = names[pick];
            names[pick] = names[left - 1];
            if (left < n)
                put(b, ",", 1);
            put_space(r, b);
            put_string(r, b, chosen, strlen(chosen));
            put_space(r, b);
            put(b, ":", 1);
            put_json(r, b, json_object_get(v, chosen));
        }
        put_space(r, b);
        put(b, "}", 1);
    } else {
        char *text = json_dumps(v, JSON_ENCODE_ANY);
        put(b, text, strlen(text));
        free(text);
    }
    put_space(r, b);
}

static inline json_t *random_text(pl_rng *r)
{
    static const char *const pieces[] = {"tide ", "\n",   "\"q\"", "\\",          "a/b", "\xc3\xa9",
                                         "潮",    "🌙",    "{[",    "0123",        " ",   "\x01",
                                         "moon ", "\x7f", "ไทย",   "\xe2\x80\xa8"};
    pl_buf b = {0};
    unsigned n = 1 + pl_rng_below(r, 12);
    if (pl_rng_below(r, 12) == 0)
        n += pl_rng_below(r, 400);
    while (n--) {
        const char *s = pieces[pl_rng_below(r, sizeof pieces / sizeof *pieces)];
        put(&b, s, strlen(s));
    }
    char number[16]; /* so that hardly any two are the same */
    put(&b, number, (size_t)sprintf(number, "%u", pl_rng_below(r, 1000000)));
    json_t *v = json_stringn(b.p, b.n);
    pl_buf_free(&b);
    return v;
}

static inline json_t *random_message(pl_rng *r, const char *role)
{
    json_t *m = json_pack("{s:s,s:o}", "role", role, "content", random_text(r));
    if (pl_rng_below(r, 5) == 0)
        json_object_set_new(m, "name", random_text(r));
    if (pl_rng_below(r, 5) == 0)
        json_object_set_new(m, "content",
                            json_pack("[{s:s,s:o},{s:s,s:{s:s}}]", "type", "text", "text",
                                      random_text(r), "type", "image_url", "image_url", "url",
                                      "http://x/y.png"));
    if (strcmp(role, "tool") == 0)
        json_object_set_new(m, "tool_call_id", random_text(r));
    return m;
}

/* An assistant's message as an engine makes it. */
static inline json_t *random_reply(pl_rng *r)
{
    unsigned calls = pl_rng_below(r, 3) ? 0 : 1 + pl_rng_below(r, 3);
    json_t *m = json_pack("{s:s}", "role", "assistant");
    if (!calls || pl_rng_below(r, 2))
        json_object_set_new(m, "content", random_text(r));
    if (pl_rng_below(r, 4) == 0)
        json_object_set_new(m, "reasoning_content", random_text(r));
    if (!calls)
        return m;
    json_t *list = json_array();
    for (unsigned i = 0; i < calls; i++)
        json_array_append_new(list, json_pack("{s:o,s:s,s:{s:o,s:o}}", "id", random_text(r), "type",
                                              "function", "function", "name", random_text(r),
                                              "arguments", random_text(r)));
    json_object_set_new(m, "tool_calls", list);
    return m;
}

/* The same message in another shape that a client may give it. A new reference. */
static inline json_t *reshaped(pl_rng *r, json_t *message)
{
    json_t *m = json_deep_copy(message), *content = json_object_get(m, "content");
    if (json_is_string(content) && pl_rng_below(r, 3) == 0)
        json_object_set_new(m, "content",
                            json_pack("[{s:s,s:O}]", "type", "text", "text", content));
    if (!content && pl_rng_below(r, 2))
        json_object_set_new(m, "content", pl_rng_below(r, 2) ? json_null() : json_string(""));
    if (pl_rng_below(r, 4) == 0)
        json_object_set_new(m, "refusal", json_null());
    if (pl_rng_below(r, 4) == 0)
        json_object_set_new(m, "annotations", json_array());
    json_t *calls = json_object_get(m, "tool_calls"), *c;
    size_t i;
    if (!calls && pl_rng_below(r, 4) == 0)
        json_object_set_new(m, "tool_calls", pl_rng_below(r, 2) ? json_null() : json_array());
    json_array_foreach(calls, i, c) if (pl_rng_below(r, 2))
        json_object_set_new(c, "index", json_integer((json_int_t)i));
    return m;
}

#endif
