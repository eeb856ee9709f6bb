/* Edits of a scanned body, spliced into the original bytes, which are never written again as a
 * whole. Edits speak of members; where commas must go is found when the slices are made, so any mix
 * of edits gives valid JSON. Pure. */
#include <string.h>

#include "base/err.h"
#include "http/scan.h"

static const pl_str member_names[PL_MEMBER_COUNT] = {
#define XX(id, name) PL_STR_INIT(name),
    PL_MEMBER_MAP(XX)
#undef XX
};

static int add(pl_edits *e, pl_edit edit)
{
    if (e->n == PL_EDITS_MAX)
        return PL_ELIMIT;
    int i = e->n;
    while (i > 0 && e->v[i - 1].at > edit.at)
        i--; /* equal places keep the order in which they came */
    if (i > 0 && e->v[i - 1].at + e->v[i - 1].remove > edit.at)
        return PL_EINVALID;
    if (i < e->n && edit.at + edit.remove > e->v[i].at)
        return PL_EINVALID;
    for (int k = e->n; k > i; k--)
        e->v[k] = e->v[k - 1];
    e->v[i] = edit;
    e->n++;
    return 0;
}

int pl_edits_add(pl_edits *e, size_t at, size_t remove, pl_str insert)
{
    return add(e, (pl_edit){PL_EDIT_REPLACE, at, remove, insert});
}

int pl_edits_set(pl_edits *e, pl_arena *a, pl_str body, const pl_scan *s, pl_member_id id,
                 pl_str raw_json)
{
    const pl_member *m = &s->members[id];
    if (!raw_json.p)
        return PL_ENOMEM;
    size_t at = m->type == PL_JSON_ABSENT ? s->close_at : (size_t)(m->raw.p - body.p);
    if (m->type != PL_JSON_ABSENT) {
        for (int i = 0; i < e->n; i++)
            if (e->v[i].kind == PL_EDIT_REPLACE && e->v[i].at == at) {
                e->v[i].insert = raw_json; /* set again: the last one counts */
                return 0;
            }
        return add(e, (pl_edit){PL_EDIT_REPLACE, at, m->raw.n, raw_json});
    }
    pl_str name = member_names[id];
    char *p = pl_arena_alloc(a, name.n + raw_json.n + 3);
    if (!p)
        return PL_ENOMEM;
    pl_str member = {p, name.n + raw_json.n + 3};
    *p++ = '"';
    memcpy(p, name.p, name.n);
    p += name.n;
    *p++ = '"';
    *p++ = ':';
    memcpy(p, raw_json.p, raw_json.n);
    for (int i = 0; i < e->n; i++)
        if (e->v[i].kind == PL_EDIT_APPEND && e->v[i].insert.n > name.n + 2 &&
            memcmp(e->v[i].insert.p, member.p, name.n + 3) == 0) {
            e->v[i].insert = member;
            return 0;
        }
    return add(e, (pl_edit){PL_EDIT_APPEND, at, 0, member});
}

int pl_edits_remove(pl_edits *e, pl_str body, const pl_scan *s, pl_member_id id)
{
    const pl_member *m = &s->members[id];
    if (m->type == PL_JSON_ABSENT)
        return PL_ENOTFOUND;
    size_t end = (size_t)(m->raw.p - body.p) + m->raw.n;
    return add(e, (pl_edit){PL_EDIT_REMOVE, m->key_at, end - m->key_at, {NULL, 0}});
}

/* --- slices
 * ------------------------------------------------------------------------------------------------------------
 */

static bool space(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static size_t next_solid(pl_str body, size_t at)
{
    while (at < body.n && space(body.p[at]))
        at++;
    return at;
}

/* The last byte before `at` that is no space; there is one: the object's brace. */
static size_t last_solid(pl_str body, size_t at)
{
    do
        at--;
    while (space(body.p[at]));
    return at;
}

typedef struct writer {
    pl_str *slices;
    int n;
    size_t total;
    pl_str body;
    size_t at; /* bytes of the body before this are done with */
} writer;

static void emit(writer *w, pl_str s)
{
    if (s.n == 0)
        return;
    w->slices[w->n++] = s;
    w->total += s.n;
}

static void copy_until(writer *w, size_t at)
{
    emit(w, (pl_str){w->body.p + w->at, at - w->at});
    w->at = at;
}

/* Removes v[i] and the removed members that follow it directly, with one comma. Returns the last
 * edit that it took; *emptied: the object has no member left. */
static int remove_run(writer *w, const pl_edits *e, int i, bool *emptied)
{
    size_t start = e->v[i].at, end = start + e->v[i].remove;
    size_t after = next_solid(w->body, end);
    while (i + 1 < e->n && e->v[i + 1].kind == PL_EDIT_REMOVE && w->body.p[after] == ',' &&
           next_solid(w->body, after + 1) == e->v[i + 1].at) {
        i++;
        end = e->v[i].at + e->v[i].remove;
        after = next_solid(w->body, end);
    }
    size_t before = last_solid(w->body, start);
    if (w->body.p[after] == ',')
        end = after + 1;
    else if (w->body.p[before] == ',')
        start = before;
    else
        *emptied = true;
    copy_until(w, start);
    w->at = end;
    return i;
}

int pl_edits_slices(const pl_edits *e, pl_str body, pl_str slices[PL_EDITS_SLICES], size_t *total)
{
    writer w = {.slices = slices, .body = body};
    bool emptied = false;
    for (int i = 0; i < e->n; i++) {
        const pl_edit *v = &e->v[i];
        switch (v->kind) {
        case PL_EDIT_REMOVE:
            i = remove_run(&w, e, i, &emptied);
            break;
        case PL_EDIT_REPLACE:
            copy_until(&w, v->at);
            emit(&w, v->insert);
            w.at = v->at + v->remove;
            break;
        case PL_EDIT_APPEND:
            copy_until(&w, v->at);
            if (!emptied && body.p[last_solid(body, v->at)] != '{')
                emit(&w, PL_STR(","));
            else if (i > 0 && e->v[i - 1].kind == PL_EDIT_APPEND)
                emit(&w, PL_STR(","));
            emit(&w, v->insert);
            break;
        }
    }
    copy_until(&w, body.n);
    *total = w.total;
    return w.n;
}
