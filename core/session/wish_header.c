/* Session headers: see wish.h. Called by wish.c on a loop's thread for each request; owns nothing.
 *
 * A head has up to 100 headers and most requests have no session, so there is one pass over them
 * that looks at a name's length and first letter only; names that pass this are compared with the
 * list. */
#include "session/wish_inner.h"

#include "base/err.h"

const pl_wish_header pl_wish_default_headers[] = {
    {.id = PL_STR_INIT("x-dynamo-session-id"),
     .parent = PL_STR_INIT("x-dynamo-parent-session-id"),
     .final = PL_STR_INIT("x-dynamo-session-final")},
    {.id = PL_STR_INIT("x-claude-code-session-id"),
     .parent = PL_STR_INIT("x-claude-code-parent-agent-id"),
     .child = PL_STR_INIT("x-claude-code-agent-id")},
    {.id = PL_STR_INIT("session-id")},
    {.id = PL_STR_INIT("session_id")}, /* Codex again, another spelling */
    {.id = PL_STR_INIT("x-session-id"), .parent = PL_STR_INIT("x-parent-session-id")},
    {.id = PL_STR_INIT("x-smg-routing-key")},
};
const int pl_wish_default_headers_n =
    sizeof pl_wish_default_headers / sizeof *pl_wish_default_headers;

enum { ID, PARENT, FINAL, CHILD, FIELDS };

static pl_str field(const pl_wish_header *h, int i)
{
    return i == ID ? h->id : i == PARENT ? h->parent : i == FINAL ? h->final : h->child;
}

/* One of 64 bits for a name. */
static inline uint64_t bit(pl_str name)
{
    return (uint64_t)1 << ((name.n * 5 + ((unsigned char)name.p[0] | 0x20)) & 63);
}

uint64_t pl_wish_filter(const pl_wish_header *headers, int n)
{
    uint64_t filter = 0;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < FIELDS; k++)
            if (field(&headers[i], k).n)
                filter |= bit(field(&headers[i], k));
    return filter;
}

static int refuse(const pl_wish_reader *r, pl_str name, const char *what)
{
    r->e->status = 400;
    r->e->code = r->code;
    return pl_fail(&r->e->text, PL_EINVALID, "header %.*s %s", PL_FMT(name), what);
}

/* Values by row and field; returns how many were found, or a negative pl_err. */
static int collect(const pl_wish_reader *r, const pl_head *head, uint64_t filter,
                   pl_str found[PL_WISH_MAX_HEADERS][FIELDS])
{
    const pl_wish_options *o = r->o;
    int n = 0;
    for (int i = 0; i < head->headers_n; i++) {
        pl_str name = head->headers[i].name, value = head->headers[i].value;
        if (name.n == 0 || !(filter & bit(name)))
            continue;
        for (int k = 0; k < o->headers_n * FIELDS; k++) {
            pl_str want = field(&o->headers[k / FIELDS], k % FIELDS);
            if (want.n != name.n || !pl_str_ieq(want, name) || value.n == 0)
                continue;
            if (n == 0)
                memset(found, 0, (size_t)o->headers_n * sizeof found[0]);
            pl_str *to = &found[k / FIELDS][k % FIELDS];
            if (to->p && !pl_str_eq(*to, value))
                return refuse(r, want, "is given twice with different values");
            *to = value;
            n++;
        }
    }
    return n;
}

static int check_id(const pl_wish_reader *r, pl_str name, pl_str id)
{
    if (id.n > PL_SESSION_MAX_ID_BYTES)
        return refuse(r, name, "must have 1 to 256 bytes");
    for (size_t i = 0; i < id.n; i++)
        if ((unsigned char)id.p[i] < 0x20 || (unsigned char)id.p[i] > 0x7e)
            return refuse(r, name, "must be printable ASCII");
    return 0;
}

static int read_final(const pl_wish_reader *r, pl_str name, pl_str value, pl_wish *w)
{
    bool yes = pl_str_ieq(value, PL_STR("true")) || pl_str_eq(value, PL_STR("1"));
    bool no = value.n == 0 || pl_str_ieq(value, PL_STR("false")) || pl_str_eq(value, PL_STR("0"));
    w->final |= yes;
    return yes || no ? 0 : refuse(r, name, "must be true, 1, false or 0");
}

/* Parent and final of a row whose session is w's. */
static int take_row(const pl_wish_reader *r, const pl_wish_header *h, const pl_str *found,
                    pl_wish *w)
{
    bool child = found[CHILD].p != NULL;
    int from = found[PARENT].p ? PARENT : child ? ID : FIELDS;
    int rc = 0;
    if (!w->parent.p && from != FIELDS && found[from].p) {
        rc = check_id(r, field(h, from), found[from]);
        w->parent = found[from];
    }
    return rc ? rc : read_final(r, h->final, found[FINAL], w);
}

bool pl_wish_any_header(const pl_head *head, const pl_wish_options *o)
{
    uint64_t filter = o->filter ? o->filter : pl_wish_filter(o->headers, o->headers_n);
    for (int i = 0; i < head->headers_n; i++)
        if (head->headers[i].name.n && filter & bit(head->headers[i].name))
            return true;
    return false;
}

int pl_wish_headers(const pl_wish_reader *r, const pl_head *head, pl_wish *w)
{
    const pl_wish_options *o = r->o;
    pl_str found[PL_WISH_MAX_HEADERS][FIELDS];
    uint64_t filter = o->filter ? o->filter : pl_wish_filter(o->headers, o->headers_n);
    int rc = collect(r, head, filter, found);
    if (rc <= 0)
        return rc;
    bool body = w->source != PL_WISH_NONE;
    for (int i = 0; i < o->headers_n; i++) {
        const pl_wish_header *h = &o->headers[i];
        int which = found[i][CHILD].p ? CHILD : ID;
        pl_str id = found[i][which];
        if (w->source == PL_WISH_NONE && id.p) {
            rc = check_id(r, field(h, which), id);
            w->source = PL_WISH_HEADER;
            w->id = id;
            w->timeout_seconds = o->header_timeout_seconds;
            return rc ? rc : take_row(r, h, found[i], w);
        }
        if (!body)
            continue;
        if (id.p && !pl_str_eq(id, w->id)) {
            w->conflict = true;
            continue;
        }
        rc = take_row(r, h, found[i], w);
        if (rc != 0)
            return rc;
    }
    return 0;
}
