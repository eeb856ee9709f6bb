/* Any body: the scanner stays inside its bytes, and a body that it accepts stays acceptable under edits. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "http/scan.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    pl_scan s;
    pl_str body = {(const char *)data, size};
    if (pl_scan_body(body, 32, &s) != 0) {
        if (s.error_at > size || !s.error)
            abort();
        return 0;
    }
    pl_arena a = PL_ARENA_INIT;
    pl_edits e = {.n = 0};
    pl_member_string(&a, &s.members[PL_MEMBER_MODEL]);
    pl_scan_prompt_tokens(&s);
    pl_scan_find(body, &s, PL_STR("free"));
    pl_edits_set(&e, &a, body, &s, PL_MEMBER_RID, PL_STR("\"r\""));
    pl_edits_set(&e, &a, body, &s, PL_MEMBER_MODEL, PL_STR("null"));
    pl_edits_remove(&e, body, &s, PL_MEMBER_USER);
    pl_edits_remove(&e, body, &s, PL_MEMBER_N);
    pl_str slices[PL_EDITS_SLICES];
    size_t total, at = 0;
    int n = pl_edits_slices(&e, body, slices, &total);
    char *out = malloc(total + 1);
    for (int i = 0; i < n; i++) {
        memcpy(out + at, slices[i].p, slices[i].n);
        at += slices[i].n;
    }
    pl_scan again;
    if (at != total || pl_scan_body((pl_str){out, total}, 32, &again) != 0 ||
        again.members[PL_MEMBER_RID].type != PL_JSON_STRING ||
        again.members[PL_MEMBER_USER].type != PL_JSON_ABSENT)
        abort();
    free(out);
    pl_arena_free(&a);
    return 0;
}
