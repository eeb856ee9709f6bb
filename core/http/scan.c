/* The body scanner: see scan.h. A recursive-descent validator whose depth the caller bounds;
 * strings, which are nearly all of a prompt's bytes, are skipped 16 bytes at a time. Pure
 * functions: any thread, no allocation but unescaping. */
#include "http/scan.h"

#include <math.h>
#include <stdlib.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "base/err.h"

typedef struct cursor {
    const char *begin, *p, *end;
    unsigned depth, max_depth;
    bool utf8;         /* strings are checked for well-formed UTF-8 */
    uint32_t elements; /* of the array that was read last */
    const char *error;
} cursor;

static bool fail(cursor *c, const char *at, const char *error)
{
    if (!c->error) {
        c->error = error;
        c->p = at;
    }
    return false;
}

static void skip_space(cursor *c)
{
    while (c->p < c->end && (*c->p == ' ' || *c->p == '\n' || *c->p == '\r' || *c->p == '\t'))
        c->p++;
}

/* First byte at or after p that is a quote, a backslash, a control character or above 0x7f. */
static const char *skip_plain(const char *p, const char *end)
{
#ifdef __SSE2__
    const __m128i quote = _mm_set1_epi8('"'), slash = _mm_set1_epi8('\\');
    const __m128i space = _mm_set1_epi8(0x20);
    for (; end - p >= 16; p += 16) {
        __m128i v = _mm_loadu_si128((const __m128i *)(const void *)p);
        /* signed compare: bytes above 0x7f are negative, so below the space, too */
        __m128i hit =
            _mm_or_si128(_mm_cmplt_epi8(v, space),
                         _mm_or_si128(_mm_cmpeq_epi8(v, quote), _mm_cmpeq_epi8(v, slash)));
        int mask = _mm_movemask_epi8(hit);
        if (mask)
            return p + __builtin_ctz((unsigned)mask);
    }
#endif
    while (p < end && *p != '"' && *p != '\\' && (signed char)*p >= 0x20)
        p++;
    return p;
}

/* Length of the well-formed UTF-8 sequence at p, 0 when there is none. */
static size_t utf8_sequence(const char *p, const char *end)
{
    unsigned char c = (unsigned char)*p;
    size_t n = c >= 0xc2 && c <= 0xdf ? 2 : (c & 0xf0) == 0xe0 ? 3 : c >= 0xf0 && c <= 0xf4 ? 4 : 0;
    return n && (size_t)(end - p) >= n && pl_str_utf8((pl_str){p, n}, NULL) ? n : 0;
}

static int hex4(const char *p)
{
    int v = 0;
    for (int i = 0; i < 4; i++) {
        char ch = p[i];
        int d = ch >= '0' && ch <= '9'                 ? ch - '0'
                : (ch | 32) >= 'a' && (ch | 32) <= 'f' ? (ch | 32) - 'a' + 10
                                                       : -1;
        if (d < 0)
            return -1;
        v = v << 4 | d;
    }
    return v;
}

/* At a quote; leaves p behind the closing one. *escaped tells whether there was a backslash. */
static bool read_string(cursor *c, bool *escaped)
{
    *escaped = false;
    c->p++;
    for (;;) {
        c->p = skip_plain(c->p, c->end);
        if (c->p == c->end)
            return fail(c, c->end, "a string does not end");
        unsigned char ch = (unsigned char)*c->p;
        if (ch == '"') {
            c->p++;
            return true;
        }
        if (ch >= 0x80) {
            size_t n = c->utf8 ? utf8_sequence(c->p, c->end) : 1;
            if (n == 0)
                return fail(c, c->p, "invalid UTF-8");
            c->p += n;
            continue;
        }
        if (ch != '\\')
            return fail(c, c->p, "a control character in a string");
        *escaped = true;
        if (c->end - c->p < 2)
            return fail(c, c->end, "a string does not end");
        if (c->p[1] == 'u') {
            for (int i = 2; i < 6; i++) {
                if (c->p + i >= c->end)
                    return fail(c, c->end, "a string does not end");
                char d = c->p[i];
                if (!((d >= '0' && d <= '9') || ((d | 32) >= 'a' && (d | 32) <= 'f')))
                    return fail(c, c->p + i, "an invalid \\u escape");
            }
            c->p += 6;
        } else if (strchr("\"\\/bfnrt", c->p[1]) && c->p[1]) {
            c->p += 2;
        } else {
            return fail(c, c->p + 1, "an invalid escape");
        }
    }
}

static bool digit(const cursor *c)
{
    return c->p < c->end && *c->p >= '0' && *c->p <= '9';
}

static bool read_number(cursor *c)
{
    if (*c->p == '-')
        c->p++;
    if (!digit(c))
        return fail(c, c->p, "an invalid number");
    if (*c->p == '0')
        c->p++;
    else
        while (digit(c))
            c->p++;
    if (c->p < c->end && *c->p == '.') {
        c->p++;
        if (!digit(c))
            return fail(c, c->p, "an invalid number");
        while (digit(c))
            c->p++;
    }
    if (c->p < c->end && (*c->p | 32) == 'e') {
        c->p++;
        if (c->p < c->end && (*c->p == '+' || *c->p == '-'))
            c->p++;
        if (!digit(c))
            return fail(c, c->p, "an invalid number");
        while (digit(c))
            c->p++;
    }
    return true;
}

static bool read_literal(cursor *c, pl_str word)
{
    for (size_t i = 0; i < word.n; i++)
        if (c->p + i >= c->end || c->p[i] != word.p[i])
            return fail(c, c->p + i < c->end ? c->p + i : c->end, "an invalid value");
    c->p += word.n;
    return true;
}

static bool read_value(cursor *c, pl_member *m);

static bool enter(cursor *c)
{
    if (++c->depth > c->max_depth)
        return fail(c, c->p, "nested too deeply");
    c->p++;
    skip_space(c);
    return true;
}

static bool read_array(cursor *c)
{
    uint32_t n = 0;
    if (!enter(c))
        return false;
    if (c->p < c->end && *c->p == ']') {
        c->p++;
    } else {
        for (;;) {
            pl_member ignored;
            if (!read_value(c, &ignored))
                return false;
            n++;
            skip_space(c);
            if (c->p == c->end)
                return fail(c, c->end, "an array does not end");
            if (*c->p == ']') {
                c->p++;
                break;
            }
            if (*c->p != ',')
                return fail(c, c->p, "expected ',' or ']'");
            c->p++;
            skip_space(c);
        }
    }
    c->depth--;
    c->elements = n;
    return true;
}

/* A key and its colon. */
static bool read_key(cursor *c, pl_member *key)
{
    if (c->p == c->end)
        return fail(c, c->end, "an object does not end");
    if (*c->p != '"')
        return fail(c, c->p, "expected a key");
    const char *at = c->p;
    bool utf8 = c->utf8;
    c->utf8 = true;
    bool ok = read_string(c, &key->escaped);
    c->utf8 = utf8;
    if (!ok)
        return false;
    key->type = PL_JSON_STRING;
    key->raw = (pl_str){at, (size_t)(c->p - at)};
    skip_space(c);
    if (c->p == c->end || *c->p != ':')
        return fail(c, c->p, "expected ':'");
    c->p++;
    skip_space(c);
    return true;
}

/* 1: another member follows; 0: the object ended; -1: failed. */
static int after_member(cursor *c)
{
    skip_space(c);
    if (c->p == c->end) {
        fail(c, c->end, "an object does not end");
        return -1;
    }
    char ch = *c->p;
    if (ch != '}' && ch != ',') {
        fail(c, c->p, "expected ',' or '}'");
        return -1;
    }
    c->p++;
    skip_space(c);
    return ch == ',';
}

static bool read_object(cursor *c)
{
    if (!enter(c))
        return false;
    if (c->p < c->end && *c->p == '}') {
        c->p++;
    } else {
        int more = 1;
        while (more > 0) {
            pl_member key, value;
            if (!read_key(c, &key) || !read_value(c, &value))
                return false;
            const char *end = c->p;
            more = after_member(c);
            if (more == 0)
                while (c->p > end && c->p[-1] != '}')
                    c->p--; /* the space after the brace is not the object's */
        }
        if (more < 0)
            return false;
    }
    c->depth--;
    return true;
}

static bool read_value(cursor *c, pl_member *m)
{
    if (c->p == c->end)
        return fail(c, c->end, "a value is missing");
    const char *at = c->p;
    bool ok;
    m->elements = 0;
    m->escaped = false;
    switch (*at) {
    case '"':
        m->type = PL_JSON_STRING;
        ok = read_string(c, &m->escaped);
        break;
    case '{':
        m->type = PL_JSON_OBJECT;
        ok = read_object(c);
        break;
    case '[':
        m->type = PL_JSON_ARRAY;
        ok = read_array(c);
        m->elements = c->elements;
        break;
    case 't':
        m->type = PL_JSON_TRUE;
        ok = read_literal(c, PL_STR("true"));
        break;
    case 'f':
        m->type = PL_JSON_FALSE;
        ok = read_literal(c, PL_STR("false"));
        break;
    case 'n':
        m->type = PL_JSON_NULL;
        ok = read_literal(c, PL_STR("null"));
        break;
    default:
        if (*at != '-' && (*at < '0' || *at > '9'))
            return fail(c, at, "an invalid value");
        m->type = PL_JSON_NUMBER;
        ok = read_number(c);
    }
    m->raw = (pl_str){at, (size_t)(c->p - at)};
    return ok;
}

/* --- the whole body
 * --------------------------------------------------------------------------------------------------
 */

static const pl_str member_names[PL_MEMBER_COUNT] = {
#define XX(id, name) PL_STR_INIT(name),
    PL_MEMBER_MAP(XX)
#undef XX
};

static size_t unescape(const char *p, const char *end, char *out);

/* The key without its quotes, unescaped into `room` when it must be (a key longer than that is none
 * of ours). */
static pl_str key_text(const pl_member *key, char *room, size_t cap)
{
    pl_str s = {key->raw.p + 1, key->raw.n - 2};
    if (!key->escaped)
        return s;
    if (s.n > cap)
        return (pl_str){NULL, 0};
    return (pl_str){room, unescape(s.p, s.p + s.n, room)};
}

static int member_id(pl_str name)
{
    for (int i = 0; i < PL_MEMBER_COUNT; i++)
        if (member_names[i].n == name.n && member_names[i].p[0] == name.p[0] &&
            memcmp(member_names[i].p, name.p, name.n) == 0)
            return i;
    return -1;
}

static bool scan_member(cursor *c, pl_scan *out)
{
    const char *at = c->p;
    pl_member key, value;
    if (!read_key(c, &key))
        return false;
    char room[128];
    pl_str name = key_text(&key, room, sizeof room);
    int id = name.n ? member_id(name) : -1;
    if (id >= 0 && out->members[id].type != PL_JSON_ABSENT)
        return fail(c, at, "a member is there twice");
    c->utf8 = id >= 0;
    bool ok = read_value(c, &value);
    c->utf8 = false;
    if (!ok)
        return false;
    out->members_n++;
    if (id >= 0) {
        value.key_at = (size_t)(at - c->begin);
        out->members[id] = value;
    }
    return true;
}

static bool scan_object(cursor *c, pl_scan *out)
{
    skip_space(c);
    if (c->p == c->end)
        return fail(c, c->end, "it has no JSON");
    if (*c->p != '{')
        return fail(c, c->p, "expected a JSON object");
    out->open_at = (size_t)(c->p - c->begin);
    if (!enter(c))
        return false;
    if (c->p < c->end && *c->p == '}') {
        out->close_at = (size_t)(c->p++ - c->begin);
        skip_space(c);
    } else {
        int more = 1;
        while (more > 0) {
            if (!scan_member(c, out))
                return false;
            skip_space(c);
            out->close_at = (size_t)(c->p - c->begin);
            more = after_member(c);
        }
        if (more < 0)
            return false;
    }
    return c->p == c->end || fail(c, c->p, "bytes after the object");
}

int pl_scan_body(pl_str body, unsigned max_depth, pl_scan *out)
{
    memset(out, 0, sizeof *out);
    cursor c = {.begin = body.p, .p = body.p, .end = body.p + body.n, .max_depth = max_depth};
    if (scan_object(&c, out))
        return 0;
    out->error = c.error;
    out->error_at = (size_t)(c.p - c.begin);
    return strcmp(c.error, "nested too deeply") == 0 ? PL_ELIMIT : PL_ESYNTAX;
}

/* --- values
 * ------------------------------------------------------------------------------------------------------------
 */

static size_t put_utf8(char *out, unsigned cp)
{
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (char)(0xc0 | cp >> 6);
        out[1] = (char)(0x80 | (cp & 0x3f));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (char)(0xe0 | cp >> 12);
        out[1] = (char)(0x80 | (cp >> 6 & 0x3f));
        out[2] = (char)(0x80 | (cp & 0x3f));
        return 3;
    }
    out[0] = (char)(0xf0 | cp >> 18);
    out[1] = (char)(0x80 | (cp >> 12 & 0x3f));
    out[2] = (char)(0x80 | (cp >> 6 & 0x3f));
    out[3] = (char)(0x80 | (cp & 0x3f));
    return 4;
}

/* The validated inside of a string; never grows (\uXXXX gives at most 3 bytes, a pair 4). */
static size_t unescape(const char *p, const char *end, char *out)
{
    char *o = out;
    while (p < end) {
        if (*p != '\\') {
            *o++ = *p++;
            continue;
        }
        char e = p[1];
        p += 2;
        if (e != 'u') {
            *o++ = e == 'b'   ? '\b'
                   : e == 'f' ? '\f'
                   : e == 'n' ? '\n'
                   : e == 'r' ? '\r'
                   : e == 't' ? '\t'
                              : e;
            continue;
        }
        unsigned cp = (unsigned)hex4(p);
        p += 4;
        if (cp >= 0xd800 && cp < 0xdc00 && end - p >= 6 && p[0] == '\\' && p[1] == 'u') {
            int low = hex4(p + 2);
            if (low >= 0xdc00 && low < 0xe000) {
                cp = 0x10000 + ((cp - 0xd800) << 10) + ((unsigned)low - 0xdc00);
                p += 6;
            }
        }
        if (cp >= 0xd800 && cp < 0xe000)
            cp = 0xfffd; /* a surrogate without its partner */
        o += put_utf8(o, cp);
    }
    return (size_t)(o - out);
}

pl_str pl_member_string(pl_arena *a, const pl_member *m)
{
    if (m->type != PL_JSON_STRING)
        return (pl_str){NULL, 0};
    pl_str s = {m->raw.p + 1, m->raw.n - 2};
    if (!m->escaped)
        return s;
    char *out = pl_arena_alloc(a, s.n);
    return out ? (pl_str){out, unescape(s.p, s.p + s.n, out)} : (pl_str){NULL, 0};
}

/* Over bytes that should be valid; an engine's answer was not checked, so the depth is bounded
 * here, too. */
static pl_member find(const char *from, const char *end, const char *begin, pl_str name)
{
    cursor c = {.begin = begin, .p = from + 1, .end = end, .max_depth = 256};
    skip_space(&c);
    int more = c.p < end && *c.p == '"';
    while (more > 0) {
        const char *at = c.p;
        pl_member key, value;
        char room[512];
        if (!read_key(&c, &key) || !read_value(&c, &value))
            break;
        if (pl_str_eq(key_text(&key, room, sizeof room), name)) {
            value.key_at = (size_t)(at - begin);
            return value;
        }
        more = after_member(&c);
    }
    return (pl_member){0};
}

pl_member pl_scan_find(pl_str body, const pl_scan *s, pl_str name)
{
    int id = name.n ? member_id(name) : -1;
    if (id >= 0)
        return s->members[id];
    return find(body.p + s->open_at, body.p + s->close_at + 1, body.p, name);
}

pl_member pl_object_find(pl_str object, pl_str name)
{
    if (object.n < 2 || object.p[0] != '{')
        return (pl_member){0};
    return find(object.p, object.p + object.n, object.p, name);
}

int pl_member_number(const pl_member *m, double *out)
{
    if (m->type == PL_JSON_ABSENT || m->type == PL_JSON_NULL)
        return PL_ENOTFOUND;
    if (m->type != PL_JSON_NUMBER || pl_str_double(m->raw, out) != 0)
        return PL_EINVALID;
    return 0;
}

/* Token ids (an array of numbers, or of such arrays) are counted, everything else is text. */
static double tokens_of(const pl_member *m)
{
    if (m->type == PL_JSON_ABSENT || m->type == PL_JSON_NULL)
        return 0;
    if (m->type == PL_JSON_ARRAY) {
        const char *p = m->raw.p, *end = p + m->raw.n;
        while (p < end && strchr("[ \t\r\n", *p))
            p++;
        if (p < end && *p != '"' && *p != '{' && *p != ']') {
            double n = 1;
            for (p = m->raw.p; p < end; p++)
                n += *p == ',';
            return n;
        }
    }
    return (double)m->raw.n / 4;
}

double pl_scan_prompt_tokens(const pl_scan *s)
{
    static const pl_member_id prompt[] = {
        PL_MEMBER_MESSAGES, PL_MEMBER_SYSTEM,    PL_MEMBER_TOOLS,        PL_MEMBER_PROMPT,
        PL_MEMBER_INPUT,    PL_MEMBER_INPUT_IDS, PL_MEMBER_INSTRUCTIONS, PL_MEMBER_TEXT,
        PL_MEMBER_QUERY,    PL_MEMBER_DOCUMENTS};
    double n = 0;
    for (size_t i = 0; i < sizeof prompt / sizeof *prompt; i++)
        n += tokens_of(&s->members[prompt[i]]);
    return n < 1 ? 1 : floor(n);
}
