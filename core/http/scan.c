/* Request bodies: see scan.h. Called on the loops' threads, once per request and whenever a policy
 * or the proxy asks for a member; no state, no allocation but from the caller's arena. The members
 * found point into the caller's body. */
#include "http/scan.h"

#include "base/err.h"
#include "http/json.h"

const pl_str pl_member_names[PL_MEMBER_COUNT] = {
#define XX(id, name) [PL_MEMBER_##id] = PL_STR_INIT(name),
    PL_MEMBER_MAP(XX)
#undef XX
};

/* The member of the map that has this name, else PL_MEMBER_COUNT. */
static pl_member_id known(const pl_json_name *name)
{
    pl_member_id id = (pl_member_id)0;
    if (name->escaped)
        while (id < PL_MEMBER_COUNT && !pl_json_name_is(name, pl_member_names[id]))
            id++;
    else
        while (id < PL_MEMBER_COUNT &&
               (pl_member_names[id].n != name->raw.n ||
                memcmp(pl_member_names[id].p, name->raw.p, name->raw.n) != 0))
            id++;
    return id;
}

static void scan_members(pl_json *j, const char *start, pl_scan *out)
{
    pl_json_name name;
    pl_member other;
    if (pl_json_enter(j, '{') != 0)
        return;
    out->open_at = (size_t)(j->p - 1 - start);
    while (pl_json_key(j, &name) > 0) {
        pl_member_id id = known(&name);
        pl_member *m = id < PL_MEMBER_COUNT ? &out->members[id] : &other;
        const char *quote = name.raw.p - 1;
        if (m != &other && m->type != PL_JSON_ABSENT) {
            pl_json_fail(j, quote, PL_ESYNTAX, "a member that may be given only once");
            return;
        }
        j->utf8 = m != &other;
        if (pl_json_value(j, m) != 0)
            return;
        m->key_at = (size_t)(quote - start);
        out->members_n++;
    }
    if (j->rc == 0) {
        out->close_at = (size_t)(j->p - 1 - start);
        pl_json_done(j);
    }
}

int pl_scan_body(pl_str body, unsigned max_depth, pl_scan *out)
{
    memset(out, 0, offsetof(pl_scan, longs));
    pl_json j;
    pl_json_init(&j, body, max_depth, true);
    const char *start = j.p;
    out->start = start;
    j.note = body.n < (uint32_t)1 << 31 ? out : NULL;
    scan_members(&j, start, out);
    if (j.rc) {
        out->error_at = (size_t)(j.error_pos - start);
        out->error = body.n == 0 ? "the body is empty" : j.error;
        if (out->error_at == 0 && pl_str_starts(body, PL_STR("\xef\xbb\xbf")))
            out->error = "a byte order mark before the JSON object";
    }
    return j.rc;
}

pl_str pl_member_string(pl_arena *a, const pl_member *m)
{
    if (m->type != PL_JSON_STRING)
        return (pl_str){NULL, 0};
    pl_str inside = {m->raw.p + 1, m->raw.n - 2};
    if (!m->escaped)
        return inside;
    char *p = pl_arena_alloc(a, inside.n);
    return (pl_str){p, p ? pl_json_unescape(inside, p) : 0};
}

pl_member pl_object_find(pl_str object, pl_str wanted)
{
    pl_json j;
    pl_json_name name;
    pl_member m, found = {.type = PL_JSON_ABSENT};
    pl_json_init(&j, object, PL_JSON_DEPTH_MAX, false);
    if (pl_json_enter(&j, '{') == 0)
        while (pl_json_key(&j, &name) > 0) {
            size_t at = (size_t)(name.raw.p - 1 - object.p);
            bool hit = pl_json_name_is(&name, wanted);
            if (pl_json_value(&j, &m) != 0)
                break;
            if (hit) {
                found = m;
                found.key_at = at;
            }
        }
    return found;
}

pl_member pl_scan_find(pl_str body, const pl_scan *s, pl_str name)
{
    for (int id = 0; id < PL_MEMBER_COUNT; id++)
        if (pl_str_eq(pl_member_names[id], name))
            return s->members[id];
    return pl_object_find(body, name);
}

int pl_member_number(const pl_member *m, double *out)
{
    if (m->type == PL_JSON_ABSENT || m->type == PL_JSON_NULL)
        return PL_ENOTFOUND;
    if (m->type != PL_JSON_NUMBER || pl_str_double(m->raw, out) != 0)
        return PL_EINVALID;
    return 0;
}

/* --- prompt size --- */

/* The first byte of an array's first element (of the closing bracket when it has none). */
static char first_element(const pl_member *m)
{
    size_t i = 1;
    while (strchr(" \t\r\n", m->raw.p[i]))
        i++;
    return m->raw.p[i];
}

static bool starts_number(char c)
{
    return c == '-' || (c >= '0' && c <= '9');
}

static double tokens(const pl_member *m)
{
    if (m->type != PL_JSON_STRING && m->type != PL_JSON_ARRAY && m->type != PL_JSON_OBJECT)
        return 0;
    char first = m->type == PL_JSON_ARRAY ? first_element(m) : 0;
    if (starts_number(first))
        return m->elements;
    double text_bytes = (double)(m->raw.n - m->attachment_bytes);
    if (first == '[') { /* a batch of token-id lists; lists of text stay text */
        double ids = 0;
        pl_json j;
        pl_member inner;
        pl_json_init(&j, m->raw, PL_JSON_DEPTH_MAX, false);
        if (pl_json_enter(&j, '[') == 0)
            while (pl_json_item(&j) > 0 && pl_json_value(&j, &inner) == 0)
                if (inner.type == PL_JSON_ARRAY && starts_number(first_element(&inner))) {
                    ids += inner.elements;
                    text_bytes -= (double)inner.raw.n;
                }
        return ids + (ids > 0 ? 0 : text_bytes / 4);
    }
    return text_bytes / 4 + (double)m->attachments * PL_ATTACHMENT_TOKENS;
}

double pl_scan_prompt_tokens(const pl_scan *s)
{
    static const pl_member_id prompt[] = {
        PL_MEMBER_MESSAGES,     PL_MEMBER_SYSTEM,   PL_MEMBER_TOOLS, PL_MEMBER_PROMPT,
        PL_MEMBER_INPUT,        PL_MEMBER_TEXT,     PL_MEMBER_QUERY, PL_MEMBER_DOCUMENTS,
        PL_MEMBER_INSTRUCTIONS, PL_MEMBER_INPUT_IDS};
    double sum = 0;
    for (size_t i = 0; i < sizeof prompt / sizeof prompt[0]; i++)
        sum += tokens(&s->members[prompt[i]]);
    return sum > 1 ? sum : 1;
}
