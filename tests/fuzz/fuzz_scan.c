/* Any bytes as a request body. The fast and the plain scanner agree; the place of an error is
 * consistent with a cut body; the members of a body that is accepted can be read, and any edits of
 * it give an accepted body again with the members that were asked for. The first two bytes choose
 * the edits. */
#include <stdlib.h>

#include "../unit/http/scalar_scan.h"

#define MUST(x)                                                                                    \
    do {                                                                                           \
        if (!(x))                                                                                  \
            abort();                                                                               \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void edit(pl_str body, const pl_scan *s, unsigned choice)
{
    pl_arena a = PL_ARENA_INIT;
    pl_edits e = {0};
    uint32_t members = s->members_n;
    bool wanted[PL_MEMBER_COUNT];
    for (int id = 0; id < PL_MEMBER_COUNT; id++) {
        bool there = s->members[id].type != PL_JSON_ABSENT;
        wanted[id] = there;
        choice = choice * 1103515245u + 12345u;
        if (e.n == PL_EDITS_MAX || (choice >> 16 & 3) == 0)
            continue;
        if (there && choice >> 18 & 1) {
            MUST(pl_edits_remove(&e, body, s, (pl_member_id)id) == 0);
            wanted[id] = false;
            members--;
        } else {
            MUST(pl_edits_set(&e, &a, body, s, (pl_member_id)id, PL_STR("[7,\"x\"]")) == 0);
            wanted[id] = true;
            members += !there;
        }
    }
    pl_str slices[PL_EDITS_SLICES];
    size_t total, at = 0;
    int n = pl_edits_slices(&e, body, slices, &total);
    char *edited = malloc(total);
    MUST(edited);
    for (int i = 0; i < n; i++) {
        memcpy(edited + at, slices[i].p, slices[i].n);
        at += slices[i].n;
    }
    MUST(at == total);
    pl_scan again;
    MUST(pl_scan_body((pl_str){edited, total}, 100, &again) == 0);
    MUST(again.members_n == members);
    for (int id = 0; id < PL_MEMBER_COUNT; id++)
        MUST((again.members[id].type != PL_JSON_ABSENT) == wanted[id]);
    free(edited);
    pl_arena_free(&a);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    unsigned choice = data[0] | (unsigned)data[1] << 8;
    pl_str body = {(const char *)data + 2, size - 2};
    pl_scan s;
    MUST(scans_agree(body, 100));
    int rc = pl_scan_body(body, 100, &s);
    if (rc) {
        MUST(s.error && s.error_at <= body.n);
        pl_scan cut;
        if (pl_scan_body((pl_str){body.p, s.error_at}, 100, &cut) != 0)
            MUST(cut.error_at == s.error_at);
        return 0;
    }
    MUST(pl_scan_prompt_tokens(&s) >= 1);
    pl_arena a = PL_ARENA_INIT;
    for (int id = 0; id < PL_MEMBER_COUNT; id++) {
        const pl_member *m = &s.members[id];
        double number;
        pl_member_number(m, &number);
        pl_str text = pl_member_string(&a, m);
        if (m->type == PL_JSON_STRING)
            MUST(text.p && text.n <= m->raw.n && pl_str_utf8(text, NULL));
        if (m->type == PL_JSON_OBJECT) {
            pl_member inner = pl_object_find(m->raw, PL_STR("a"));
            if (inner.type != PL_JSON_ABSENT)
                MUST(m->raw.p[inner.key_at] == '"');
        }
        MUST(pl_scan_find(body, &s, pl_member_names[id]).raw.p == m->raw.p);
    }
    pl_scan_find(body, &s, PL_STR("x"));
    pl_arena_free(&a);
    edit(body, &s, choice);
    return 0;
}
