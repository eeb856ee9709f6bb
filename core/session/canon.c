/* Digests of JSON values and chat messages: see canon.h. Called by history.c and reply.c on a
 * loop's thread; pure, owns nothing, allocates nothing. Each value is walked once.
 *
 * An object is the sum of its members' digests, so that their order does not matter; beyond
 * ORDERED members the order counts, because only so many names are remembered to see one that is
 * there twice (engines take the last one: two texts that differ in the order of such a pair differ
 * in meaning). */
#include "session/canon.h"

#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "digests need a little-endian host");

enum { ORDERED = 32 };

static pl_digest hash(const void *p, size_t n)
{
    XXH128_hash_t h = XXH3_128bits(p, n);
    return (pl_digest){h.low64, h.high64};
}

static pl_digest mix(uint64_t tag, pl_digest a, pl_digest b)
{
    uint64_t v[5] = {tag, a.lo, a.hi, b.lo, b.hi};
    return hash(v, sizeof v);
}

static bool surrogate(const char *p, const char *second_digits)
{
    return p[0] == '\\' && p[1] == 'u' && (p[2] | 0x20) == 'd' &&
           strchr(second_digits, p[3] | 0x20);
}

size_t pl_canon_escape(const char *p, size_t n)
{
    if (p[1] != 'u')
        return 2;
    return n >= 12 && surrogate(p, "89ab") && surrogate(p + 6, "cdef") ? 12 : 6;
}

/* Of the inside of a valid string, unescaped. Its buffers stay out of the frames of the recursion.
 */
static __attribute__((noinline)) pl_digest hash_string(pl_str inside, bool escaped)
{
    if (!escaped)
        return hash(inside.p, inside.n);
    char out[2048];
    size_t n = 0;
    bool streamed = false;
    XXH3_state_t state;
    while (inside.n) {
        size_t take;
        if (sizeof out - n < 12) {
            if (!streamed)
                XXH3_128bits_reset(&state);
            streamed = true;
            XXH3_128bits_update(&state, out, n);
            n = 0;
        }
        if (*inside.p == '\\') {
            take = pl_canon_escape(inside.p, inside.n);
            n += pl_json_unescape((pl_str){inside.p, take}, out + n);
        } else {
            const char *back = memchr(inside.p, '\\', inside.n);
            take = back ? (size_t)(back - inside.p) : inside.n;
            if (take > sizeof out - n)
                take = sizeof out - n;
            memcpy(out + n, inside.p, take);
            n += take;
        }
        inside.p += take;
        inside.n -= take;
    }
    if (!streamed)
        return hash(out, n);
    XXH3_128bits_update(&state, out, n);
    XXH128_hash_t h = XXH3_128bits_digest(&state);
    return (pl_digest){h.low64, h.high64};
}

pl_digest pl_canon_hashed(pl_digest xxh3_128)
{
    return mix('s', xxh3_128, (pl_digest){0, 0});
}

pl_digest pl_canon_string(pl_str plain)
{
    return pl_canon_hashed(hash(plain.p, plain.n));
}

/* --- objects and lists --- */

static void add_member(pl_canon_object *o, pl_digest name, pl_digest value)
{
    pl_digest d = mix('m', name, value);
    if (o->n++ >= ORDERED)
        o->sum = mix('x', o->sum, d);
    else
        o->sum = (pl_digest){o->sum.lo + d.lo, o->sum.hi + d.hi};
}

void pl_canon_object_add(pl_canon_object *o, pl_str name, pl_digest value)
{
    add_member(o, hash(name.p, name.n), value);
}

pl_digest pl_canon_object_end(const pl_canon_object *o)
{
    return mix('o', o->sum, (pl_digest){o->n, 0});
}

void pl_canon_list_add(pl_canon_list *l, pl_digest value)
{
    l->chain = mix('a', l->chain, value);
    l->n++;
}

pl_digest pl_canon_list_end(const pl_canon_list *l)
{
    return mix('l', l->chain, (pl_digest){l->n, 0});
}

/* An object while it is read. */
typedef struct reading {
    pl_canon_object sum;
    uint64_t seen[ORDERED]; /* names, to find one that is there twice */
    unsigned seen_n;
    pl_json_name name; /* of the member at hand */
    pl_digest name_hash;
} reading;

static bool begin(pl_json *j, reading *o)
{
    o->sum = (pl_canon_object){{0, 0}, 0};
    o->seen_n = 0;
    return pl_json_enter(j, '{') == 0;
}

/* 1: a member's value is next; 0: the end; -1: not valid, or a name that was there before. */
static int member(pl_json *j, reading *o)
{
    int rc = pl_json_key(j, &o->name);
    if (rc <= 0)
        return rc < 0 ? -1 : 0;
    o->name_hash = hash_string(o->name.raw, o->name.escaped);
    for (unsigned i = 0; i < o->seen_n; i++)
        if (o->seen[i] == o->name_hash.lo)
            return -1;
    if (o->seen_n < ORDERED)
        o->seen[o->seen_n++] = o->name_hash.lo;
    return j->p < j->end ? 1 : -1;
}

/* What a scalar is, besides its digest. */
typedef struct scalar {
    pl_json_type type;
    bool empty; /* "" */
} scalar;

static bool read_scalar(pl_json *j, scalar *what, pl_digest *out)
{
    static const pl_digest none = {0, 0};
    pl_member m;
    if (pl_json_value(j, &m) != 0)
        return false;
    *what = (scalar){m.type, m.type == PL_JSON_STRING && m.raw.n == 2};
    if (m.type == PL_JSON_STRING)
        *out = pl_canon_hashed(hash_string((pl_str){m.raw.p + 1, m.raw.n - 2}, m.escaped));
    else
        *out = m.type == PL_JSON_NUMBER ? mix('n', hash(m.raw.p, m.raw.n), none)
                                        : mix((uint64_t)m.type, none, none);
    return true;
}

static bool any_value(pl_json *j, bool loose, scalar *what, pl_digest *out);

static bool read_list(pl_json *j, bool loose, scalar *what, pl_digest *out)
{
    pl_canon_list l = {{0, 0}, 0};
    pl_digest d;
    scalar inner;
    int rc;
    if (pl_json_enter(j, '[') != 0)
        return false;
    while ((rc = pl_json_item(j)) > 0) {
        if (j->p == j->end || !any_value(j, loose, &inner, &d))
            return false;
        pl_canon_list_add(&l, d);
    }
    *what = (scalar){PL_JSON_ARRAY, l.n == 0};
    *out = pl_canon_list_end(&l);
    return rc == 0;
}

static bool read_object(pl_json *j, bool loose, pl_digest *out)
{
    reading o;
    pl_digest d;
    scalar what;
    int rc;
    if (!begin(j, &o))
        return false;
    while ((rc = member(j, &o)) > 0) {
        if (!any_value(j, loose, &what, &d))
            return false;
        if (!loose || what.type != PL_JSON_NULL)
            add_member(&o.sum, o.name_hash, d);
    }
    *out = pl_canon_object_end(&o.sum);
    return rc == 0;
}

static bool any_value(pl_json *j, bool loose, scalar *what, pl_digest *out)
{
    if (*j->p == '[')
        return read_list(j, loose, what, out);
    if (*j->p != '{')
        return read_scalar(j, what, out);
    *what = (scalar){PL_JSON_OBJECT, false};
    return read_object(j, loose, out);
}

bool pl_canon_value(pl_json *j, bool loose, pl_digest *out)
{
    scalar what;
    return j->p < j->end && any_value(j, loose, &what, out);
}

/* --- messages --- */

/* A part of a content; *text: it is plain text and nothing else, whose digest is *of_text. */
static bool read_part(pl_json *j, pl_digest *out, bool *text, pl_digest *of_text)
{
    static const pl_str type = PL_STR_INIT("type"), text_name = PL_STR_INIT("text");
    reading o;
    scalar what;
    int rc;
    unsigned typed = 0, texts = 0;
    pl_digest d, text_type = pl_canon_string(text_name);
    *text = false;
    if (*j->p != '{')
        return any_value(j, true, &what, out);
    if (!begin(j, &o))
        return false;
    while ((rc = member(j, &o)) > 0) {
        if (!any_value(j, true, &what, &d))
            return false;
        if (what.type == PL_JSON_NULL)
            continue;
        add_member(&o.sum, o.name_hash, d);
        if (pl_json_name_is(&o.name, type)) {
            typed += memcmp(&d, &text_type, sizeof d) == 0;
        } else if (pl_json_name_is(&o.name, text_name) && what.type == PL_JSON_STRING) {
            texts++;
            *of_text = d;
        }
    }
    *text = typed == 1 && texts == 1 && o.sum.n == 2;
    *out = pl_canon_object_end(&o.sum);
    return rc == 0;
}

/* *what: as if the one text of a list were the content. */
static bool read_content(pl_json *j, scalar *what, pl_digest *out)
{
    static const pl_str nothing = {"", 0};
    if (*j->p != '[')
        return any_value(j, true, what, out);
    pl_canon_list l = {{0, 0}, 0};
    pl_digest d, of_text = {0, 0};
    bool text = false;
    int rc;
    if (pl_json_enter(j, '[') != 0)
        return false;
    while ((rc = pl_json_item(j)) > 0) {
        if (j->p == j->end || !read_part(j, &d, &text, &of_text))
            return false;
        pl_canon_list_add(&l, d);
    }
    if (l.n == 1 && text) {
        pl_digest empty = pl_canon_string(nothing);
        *what = (scalar){PL_JSON_STRING, memcmp(&of_text, &empty, sizeof empty) == 0};
        *out = of_text;
    } else {
        *what = (scalar){PL_JSON_ARRAY, l.n == 0};
        *out = pl_canon_list_end(&l);
    }
    return rc == 0;
}

static bool read_call(pl_json *j, pl_digest *out)
{
    reading o;
    scalar what;
    int rc;
    pl_digest d, function = pl_canon_string(PL_STR("function"));
    if (*j->p != '{')
        return any_value(j, true, &what, out);
    if (!begin(j, &o))
        return false;
    while ((rc = member(j, &o)) > 0) {
        if (!any_value(j, true, &what, &d))
            return false;
        bool implied =
            pl_json_name_is(&o.name, PL_STR("type")) && memcmp(&d, &function, sizeof d) == 0;
        if (what.type != PL_JSON_NULL && !implied && !pl_json_name_is(&o.name, PL_STR("index")))
            add_member(&o.sum, o.name_hash, d);
    }
    *out = pl_canon_object_end(&o.sum);
    return rc == 0;
}

static bool read_calls(pl_json *j, scalar *what, pl_digest *out)
{
    if (*j->p != '[')
        return any_value(j, true, what, out);
    pl_canon_list l = {{0, 0}, 0};
    pl_digest d;
    int rc;
    if (pl_json_enter(j, '[') != 0)
        return false;
    while ((rc = pl_json_item(j)) > 0) {
        if (j->p == j->end || !read_call(j, &d))
            return false;
        pl_canon_list_add(&l, d);
    }
    *what = (scalar){PL_JSON_ARRAY, l.n == 0};
    *out = pl_canon_list_end(&l);
    return rc == 0;
}

bool pl_canon_message(pl_json *j, pl_digest *out)
{
    static const pl_str texts[] = {PL_STR_INIT("content"), PL_STR_INIT("refusal"),
                                   PL_STR_INIT("reasoning_content"), PL_STR_INIT("reasoning")};
    reading o;
    scalar what;
    pl_digest d;
    int rc;
    if (!begin(j, &o))
        return false;
    while ((rc = member(j, &o)) > 0) {
        size_t i = 0;
        while (i < 4 && !pl_json_name_is(&o.name, texts[i]))
            i++;
        bool read = i == 0 ? read_content(j, &what, &d)
                    : pl_json_name_is(&o.name, PL_STR("tool_calls"))
                        ? read_calls(j, &what, &d)
                        : any_value(j, true, &what, &d);
        if (!read)
            return false;
        bool absent = what.type == PL_JSON_NULL || (what.type == PL_JSON_ARRAY && what.empty) ||
                      (i < 4 && what.empty);
        if (!absent)
            add_member(&o.sum, o.name_hash, d);
    }
    *out = pl_canon_object_end(&o.sum);
    return rc == 0;
}
