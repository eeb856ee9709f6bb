/* Splicing edits into a scanned body: see scan.h. Called by the proxy on a loop's thread before a
 * request goes upstream. Edits are byte ranges of the original; nothing is copied but the text of
 * appended members (into the request's arena), the result is a list of slices for writev.
 *
 * Removing a member takes one comma with it, and which one depends on what else is removed; an
 * appended member needs one in front unless nothing is left before it. So both are only noted when
 * they are added, and the commas are settled on the way out. */
#include "http/scan.h"

#include "base/err.h"

static int add(pl_edits *e, pl_edit edit)
{
    if (e->n == PL_EDITS_MAX)
        return PL_ELIMIT;
    int i = e->n;
    while (i > 0 && e->v[i - 1].at > edit.at)
        i--;
    /* an insert that stands where a removal begins goes before it */
    while (i > 0 && edit.remove == 0 && e->v[i - 1].at == edit.at && e->v[i - 1].remove)
        i--;
    if (i > 0 && e->v[i - 1].at + e->v[i - 1].remove > edit.at)
        return PL_EINVALID;
    if (i < e->n && edit.at + edit.remove > e->v[i].at)
        return PL_EINVALID;
    memmove(&e->v[i + 1], &e->v[i], (size_t)(e->n - i) * sizeof e->v[0]);
    e->v[i] = edit;
    e->n++;
    return 0;
}

int pl_edits_add(pl_edits *e, size_t at, size_t remove, pl_str insert)
{
    return add(e, (pl_edit){.at = at, .remove = remove, .insert = insert, .kind = PL_EDIT_BYTES});
}

int pl_edits_set(pl_edits *e, pl_arena *a, pl_str body, const pl_scan *s, pl_member_id id,
                 pl_str raw_json)
{
    const pl_member *m = &s->members[id];
    if (m->type != PL_JSON_ABSENT)
        return pl_edits_add(e, (size_t)(m->raw.p - body.p), m->raw.n, raw_json);
    for (int i = 0; i < e->n; i++)
        if (e->v[i].kind == PL_EDIT_APPEND && e->v[i].id == id)
            return PL_EINVALID;
    pl_str name = pl_member_names[id];
    size_t n = name.n + raw_json.n + 4;
    char *p = pl_arena_alloc(a, n);
    if (!p)
        return PL_ENOMEM;
    memcpy(p, ",\"", 2);
    memcpy(p + 2, name.p, name.n);
    memcpy(p + 2 + name.n, "\":", 2);
    memcpy(p + 4 + name.n, raw_json.p, raw_json.n);
    return add(e, (pl_edit){.at = s->close_at, .insert = {p, n}, .kind = PL_EDIT_APPEND, .id = id});
}

int pl_edits_remove(pl_edits *e, pl_str body, const pl_scan *s, pl_member_id id)
{
    const pl_member *m = &s->members[id];
    if (m->type == PL_JSON_ABSENT)
        return PL_ENOTFOUND;
    size_t value_end = (size_t)(m->raw.p - body.p) + m->raw.n;
    return add(
        e, (pl_edit){
               .at = m->key_at, .remove = value_end - m->key_at, .kind = PL_EDIT_REMOVE, .id = id});
}

static bool blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

/* Offset of the last byte before `at`, or the first from `at` on, that is no whitespace. The body
 * was scanned: there is one. */
static size_t before(pl_str body, size_t at)
{
    while (blank(body.p[--at]))
        ;
    return at;
}

static size_t from(pl_str body, size_t at)
{
    while (blank(body.p[at]))
        at++;
    return at;
}

/* The bytes to take out for the run of neighbouring removed members that begins with e->v[i]: with
 * the comma before it, else with the one after it. Returns how many edits the run has. */
static int removal(const pl_edits *e, int i, pl_str body, size_t *start, size_t *stop)
{
    int n = 1;
    size_t first = before(body, e->v[i].at);
    size_t last = from(body, e->v[i].at + e->v[i].remove);
    while (i + n < e->n && e->v[i + n].kind == PL_EDIT_REMOVE && body.p[last] == ',' &&
           from(body, last + 1) == e->v[i + n].at) {
        last = from(body, e->v[i + n].at + e->v[i + n].remove);
        n++;
    }
    const pl_edit *end = &e->v[i + n - 1];
    *start = e->v[i].at;
    *stop = end->at + end->remove;
    if (body.p[first] == ',')
        *start = first;
    else if (body.p[last] == ',')
        *stop = from(body, last + 1);
    return n;
}

int pl_edits_slices(const pl_edits *e, pl_str body, pl_str slices[PL_EDITS_SLICES], size_t *total)
{
    int n = 0;
    size_t done = 0;       /* bytes of the body dealt with */
    bool emptied = false;  /* the last edit removed all members before it */
    bool appended = false; /* a member was appended already */
    *total = 0;
    for (int i = 0; i <= e->n;) {
        size_t start = body.n, stop = body.n;
        pl_str insert = {NULL, 0};
        if (i < e->n) {
            const pl_edit *edit = &e->v[i];
            start = edit->at;
            stop = start + edit->remove;
            insert = edit->insert;
            if (edit->kind == PL_EDIT_REMOVE) {
                i += removal(e, i, body, &start, &stop);
                emptied = body.p[before(body, start)] == '{';
            } else if (edit->kind == PL_EDIT_APPEND) {
                i++;
                size_t last = before(body, start);
                bool empty = !appended && (last < done ? emptied : body.p[last] == '{');
                insert.p += empty;
                insert.n -= empty;
                appended = true;
            } else {
                i++;
                emptied = false;
            }
        } else {
            i++;
        }
        if (start > done) {
            slices[n++] = (pl_str){body.p + done, start - done};
            *total += start - done;
        }
        if (insert.n) {
            slices[n++] = insert;
            *total += insert.n;
        }
        if (stop > done)
            done = stop;
    }
    return n;
}
