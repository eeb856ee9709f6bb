/* The canonical stream: see canon.h. Called by keys.c and tokens_cache.c on the loops' threads;
 * keeps nothing, allocates nothing.
 *
 * Plain runs of text are hashed where they lie in the request; only what is around the borders of
 * chunks, and what has to be unescaped, is copied. There is no recursion: inside values that need
 * no order of their own a lexer goes from token to token, and what a message or a part of its
 * content consists of is looked up one level at a time. */
#include "kv/canon.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#define ATTACHMENT_MIN 32 /* bytes of a string that can be one */

void pl_kv_canon_init(pl_kv_canon *c, uint64_t seed, uint32_t chunk, uint64_t *keys, size_t cap)
{
    c->chain = seed;
    c->bytes = 0;
    c->keys = keys;
    c->n = 0;
    c->cap = cap;
    c->scan = NULL;
    c->chunk = chunk;
    c->fill = 0;
}

/* Whole chunks. */
static inline void chunks(pl_kv_canon *c, const char *p, size_t n)
{
    size_t room = c->cap - c->n;
    if (c->chunk == PL_CHUNK_BYTES) {
        c->chain = pl_chunk_chain(c->chain, p, n, room ? c->keys + c->n : NULL, room);
        c->n += n < room ? n : room;
        return;
    }
    for (; n; n--, p += c->chunk) {
        c->chain = pl_kv_canon_link(c->chain, XXH3_64bits(p, c->chunk));
        if (c->n < c->cap)
            c->keys[c->n++] = c->chain;
    }
}

void pl_kv_canon_put(pl_kv_canon *c, const char *p, size_t n)
{
    c->bytes += n;
    if (c->fill) {
        size_t more = c->chunk - c->fill;
        if (n < more) {
            memcpy(c->carry + c->fill, p, n);
            c->fill += (uint32_t)n;
            return;
        }
        memcpy(c->carry + c->fill, p, more);
        chunks(c, c->carry, 1);
        p += more;
        n -= more;
        c->fill = 0;
    }
    if (n >= c->chunk) {
        size_t rest = n % c->chunk;
        chunks(c, p, n / c->chunk);
        p += n - rest;
        n = rest;
    }
    if (n) {
        memcpy(c->carry, p, n);
        c->fill = (uint32_t)n;
    }
}

static inline void put_byte(pl_kv_canon *c, char byte)
{
    if (c->fill == 0 || c->fill + 1 == c->chunk) {
        pl_kv_canon_put(c, &byte, 1);
        return;
    }
    c->carry[c->fill++] = byte;
    c->bytes++;
}

void pl_kv_canon_put_tag(pl_kv_canon *c, pl_kv_canon_tag tag)
{
    put_byte(c, (char)tag);
}

uint64_t pl_kv_canon_digest(const pl_kv_canon *c)
{
    return pl_kv_canon_link(c->chain ^ c->bytes, XXH3_64bits(c->carry, c->fill));
}

/* Is the escape \uDx.. with x one of these? */
static bool surrogate(const char *escape, const char *second)
{
    return escape[0] == '\\' && escape[1] == 'u' && (escape[2] | 0x20) == 'd' && escape[3] &&
           strchr(second, escape[3]);
}

/* What the escapes of two bytes stand for, but those for the second byte itself. */
static const char named_escapes[256] = {
    ['b'] = '\b', ['f'] = '\f', ['n'] = '\n', ['r'] = '\r', ['t'] = '\t'};

void pl_kv_canon_string(pl_kv_canon *c, pl_str raw, bool escaped)
{
    if (raw.n < 2)
        return;
    const char *p = raw.p + 1, *end = raw.p + raw.n - 1;
    while (escaped && p < end) {
        const char *stop = memchr(p, '\\', (size_t)(end - p));
        if (!stop || end - stop < 2)
            break;
        pl_kv_canon_put(c, p, (size_t)(stop - p));
        if (stop[1] != 'u') {
            char short_for = named_escapes[(unsigned char)stop[1]];
            put_byte(c, short_for ? short_for : stop[1]);
            p = stop + 2;
            continue;
        }
        size_t n = 6;
        if (end - stop >= 12 && surrogate(stop, "89abAB") && surrogate(stop + 6, "cdefCDEF"))
            n = 12;
        if ((size_t)(end - stop) < n)
            break;
        char out[12];
        pl_kv_canon_put(c, out, pl_json_unescape((pl_str){stop, n}, out));
        p = stop + n;
    }
    if (p < end)
        pl_kv_canon_put(c, p, (size_t)(end - p));
}

/* --- any value --- */

static const char *space(const char *p, const char *end)
{
    while (p < end && (*p == ' ' || *p == '\n' || *p == '\t' || *p == '\r'))
        p++;
    return p;
}

static void walk_init(const pl_kv_canon *c, pl_json *j, pl_str text)
{
    pl_json_init(j, text, PL_JSON_DEPTH_MAX, false);
    if (c->scan)
        pl_json_know(j, c->scan);
}

/* The value at p; PL_JSON_ABSENT when there is none. */
static pl_member value_at(const pl_kv_canon *c, const char *p, const char *end)
{
    pl_json j;
    pl_member m;
    walk_init(c, &j, (pl_str){p, (size_t)(end - p)});
    pl_json_value(&j, &m);
    return m;
}

static bool named(pl_str raw, bool escaped, pl_str plain)
{
    pl_json_name name = {{raw.p + 1, raw.n - 2}, escaped};
    return pl_json_name_is(&name, plain);
}

/* Members that say nothing about the prompt. */
static bool ignored(pl_str key, bool escaped)
{
    return named(key, escaped, PL_STR("cache_control"));
}

/* Members whose string is or names something that is not text. */
static bool carries(pl_str key, bool escaped)
{
    return named(key, escaped, PL_STR("url")) || named(key, escaped, PL_STR("image_url")) ||
           named(key, escaped, PL_STR("data")) || named(key, escaped, PL_STR("file_data"));
}

static void attachment(pl_kv_canon *c, pl_str raw)
{
    uint64_t hash = XXH3_64bits(raw.p, raw.n), x = hash;
    pl_kv_canon_put_tag(c, PL_KV_CANON_ATTACHMENT);
    size_t n = raw.n < PL_KV_CANON_ATTACHMENT_MAX ? raw.n : PL_KV_CANON_ATTACHMENT_MAX;
    for (n -= n % sizeof x; n > sizeof x; n -= sizeof x) {
        pl_kv_canon_put(c, (const char *)&x, sizeof x);
        x = pl_kv_canon_link(x, hash);
    }
}

static void string_value(pl_kv_canon *c, const pl_member *m, bool carrier)
{
    if (m->attachments || (carrier && m->raw.n >= ATTACHMENT_MIN)) {
        attachment(c, m->raw);
        return;
    }
    pl_kv_canon_put_tag(c, PL_KV_CANON_STRING);
    pl_kv_canon_string(c, m->raw, m->escaped);
}

void pl_kv_canon_value(pl_kv_canon *c, pl_str raw)
{
    const char *p = raw.p, *end = raw.p + raw.n;
    bool carrier = false; /* of the member whose value is next */
    while (p < end) {
        const char *start = p;
        pl_member m;
        switch (*p) {
        case ' ':
        case '\n':
        case '\t':
        case '\r':
        case ',':
        case ':':
            p++;
            break;
        case '{':
        case '[':
            pl_kv_canon_put_tag(c, PL_KV_CANON_OPEN);
            if (*p++ == '[')
                pl_kv_canon_put(c, "[", 1);
            break;
        case '}':
        case ']':
            pl_kv_canon_put_tag(c, PL_KV_CANON_CLOSE);
            carrier = false;
            p++;
            break;
        case '"':
            m = value_at(c, p, end);
            if (m.type != PL_JSON_STRING)
                return;
            p = space(p + m.raw.n, end);
            if (p == end || *p != ':') {
                string_value(c, &m, carrier);
                carrier = false;
                break;
            }
            p = space(p + 1, end);
            if ((p < end && *p == 'n') || ignored(m.raw, m.escaped)) {
                pl_member skipped = value_at(c, p, end);
                if (skipped.type == PL_JSON_ABSENT)
                    return;
                p += skipped.raw.n;
                break;
            }
            carrier = carries(m.raw, m.escaped);
            pl_kv_canon_put_tag(c, PL_KV_CANON_KEY);
            pl_kv_canon_string(c, m.raw, m.escaped);
            break;
        default:
            while (p < end && !strchr(" \n\t\r,:{}[]\"", *p))
                p++;
            pl_kv_canon_put_tag(c, PL_KV_CANON_SCALAR);
            pl_kv_canon_put(c, start, (size_t)(p - start));
            carrier = false;
            if (p == start) /* a NUL byte, which strchr finds */
                return;
            break;
        }
    }
}

/* --- messages --- */

static void member(pl_kv_canon *c, const pl_json_name *name, const pl_member *m)
{
    pl_str key = {name->raw.p - 1, name->raw.n + 2};
    if (m->type == PL_JSON_NULL || ignored(key, name->escaped))
        return;
    pl_kv_canon_put_tag(c, PL_KV_CANON_KEY);
    pl_kv_canon_string(c, key, name->escaped);
    if (m->type == PL_JSON_STRING)
        string_value(c, m, carries(key, name->escaped));
    else
        pl_kv_canon_value(c, m->raw);
}

static void text(pl_kv_canon *c, const pl_member *m)
{
    pl_kv_canon_put_tag(c, PL_KV_CANON_TEXT);
    pl_kv_canon_string(c, m->raw, m->escaped);
}

static bool is_text_type(const pl_member *m)
{
    return m->type == PL_JSON_STRING && (named(m->raw, m->escaped, PL_STR("text")) ||
                                         named(m->raw, m->escaped, PL_STR("input_text")) ||
                                         named(m->raw, m->escaped, PL_STR("output_text")));
}

/* A text part is its text, then what else it says; other parts are values. */
static void part(pl_kv_canon *c, const pl_member *m)
{
    if (m->type == PL_JSON_STRING) {
        text(c, m);
        return;
    }
    pl_member type = {0}, said = {0}, v;
    pl_json j;
    pl_json_name name;
    walk_init(c, &j, m->raw);
    bool object = m->type == PL_JSON_OBJECT && pl_json_enter(&j, '{') == 0;
    while (object && pl_json_key(&j, &name) > 0 && pl_json_value(&j, &v) == 0) {
        if (pl_json_name_is(&name, PL_STR("type")))
            type = v;
        else if (pl_json_name_is(&name, PL_STR("text")))
            said = v;
    }
    if (said.type != PL_JSON_STRING || !is_text_type(&type)) {
        pl_kv_canon_value(c, m->raw);
        return;
    }
    text(c, &said);
    walk_init(c, &j, m->raw);
    if (pl_json_enter(&j, '{') == 0)
        while (pl_json_key(&j, &name) > 0 && pl_json_value(&j, &v) == 0)
            if (!pl_json_name_is(&name, PL_STR("type")) && !pl_json_name_is(&name, PL_STR("text")))
                member(c, &name, &v);
}

/* What a message says. */
static void content_value(pl_kv_canon *c, const pl_member *m)
{
    pl_member item;
    pl_json j;
    switch (m->type) {
    case PL_JSON_ABSENT:
    case PL_JSON_NULL:
        break;
    case PL_JSON_STRING:
        text(c, m);
        break;
    case PL_JSON_ARRAY:
        walk_init(c, &j, m->raw);
        if (pl_json_enter(&j, '[') == 0)
            while (pl_json_item(&j) > 0 && pl_json_value(&j, &item) == 0)
                part(c, &item);
        break;
    default:
        pl_kv_canon_value(c, m->raw);
    }
}

void pl_kv_canon_message(pl_kv_canon *c, pl_json *j)
{
    enum { OTHERS = 16 }; /* that are kept until the first three are put; more come before them */
    struct {
        pl_json_name name;
        pl_member m;
    } others[OTHERS];
    pl_member role = {0}, called = {0}, content = {0}, m;
    pl_json_name name, called_name = {{NULL, 0}, false};
    size_t n = 0;
    pl_kv_canon_put_tag(c, PL_KV_CANON_MESSAGE);
    j->p = space(j->p, j->end);
    if (j->p == j->end || *j->p != '{') {
        if (pl_json_value(j, &m) == 0)
            content_value(c, &m);
        return;
    }
    if (pl_json_enter(j, '{') != 0)
        return;
    while (pl_json_key(j, &name) > 0 && pl_json_value(j, &m) == 0) {
        if (pl_json_name_is(&name, PL_STR("role"))) {
            role = m;
        } else if (pl_json_name_is(&name, PL_STR("name"))) {
            called = m;
            called_name = name;
        } else if (pl_json_name_is(&name, PL_STR("content"))) {
            content = m;
        } else if (n < OTHERS) {
            others[n].name = name;
            others[n++].m = m;
        } else {
            member(c, &name, &m);
        }
    }
    if (role.type == PL_JSON_STRING)
        pl_kv_canon_string(c, role.raw, role.escaped);
    else if (role.type != PL_JSON_ABSENT)
        pl_kv_canon_value(c, role.raw);
    if (called.type != PL_JSON_ABSENT)
        member(c, &called_name, &called);
    content_value(c, &content);
    for (size_t i = 0; i < n; i++) {
        bool plain_item = others[i].m.type == PL_JSON_STRING &&
                          pl_json_name_is(&others[i].name, PL_STR("type")) &&
                          named(others[i].m.raw, others[i].m.escaped, PL_STR("message"));
        if (!plain_item) /* what the Responses API calls a message is one without that, too */
            member(c, &others[i].name, &others[i].m);
    }
}

void pl_kv_canon_said(pl_kv_canon *c, pl_str role, const pl_member *content)
{
    pl_kv_canon_put_tag(c, PL_KV_CANON_MESSAGE);
    pl_kv_canon_put(c, role.p, role.n);
    content_value(c, content);
}
