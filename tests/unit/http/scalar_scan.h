/* The scanner once more, compiled without its fast paths and under other names, so that a test can
 * compare both on the same input. Include in one source file, after everything else. */
#ifndef PL_TEST_SCALAR_SCAN_H
#define PL_TEST_SCALAR_SCAN_H

#include "http/scan.h"

#define PL_JSON_SCALAR
#define pl_json_classes       scalar_json_classes
#define pl_json_done          scalar_json_done
#define pl_json_enter         scalar_json_enter
#define pl_json_fail          scalar_json_fail
#define pl_json_init          scalar_json_init
#define pl_json_item          scalar_json_item
#define pl_json_key           scalar_json_key
#define pl_json_know          scalar_json_know
#define pl_json_name_is       scalar_json_name_is
#define pl_json_stop          scalar_json_stop
#define pl_json_string_end    scalar_json_string_end
#define pl_json_unescape      scalar_json_unescape
#define pl_json_value         scalar_json_value
#define pl_member_names       scalar_member_names
#define pl_member_number      scalar_member_number
#define pl_member_string      scalar_member_string
#define pl_object_find        scalar_object_find
#define pl_scan_body          scalar_scan_body
#define pl_scan_find          scalar_scan_find
#define pl_scan_prompt_tokens scalar_scan_prompt_tokens

extern const pl_str pl_member_names[PL_MEMBER_COUNT];
int pl_member_number(const pl_member *m, double *out);
pl_str pl_member_string(pl_arena *a, const pl_member *m);
pl_member pl_object_find(pl_str object, pl_str name);
int pl_scan_body(pl_str body, unsigned max_depth, pl_scan *out);
pl_member pl_scan_find(pl_str body, const pl_scan *s, pl_str name);
double pl_scan_prompt_tokens(const pl_scan *s);

#include "http/json_string.c"
#include "http/json.c"
#include "http/scan.c"

#undef pl_member_names
#undef pl_member_number
#undef pl_member_string
#undef pl_object_find
#undef pl_scan_body
#undef pl_scan_find
#undef pl_scan_prompt_tokens

/* Do both scanners say the same of the body? */
static inline bool scans_agree(pl_str body, unsigned max_depth)
{
    pl_scan a, b;
    int rc = pl_scan_body(body, max_depth, &a);
    if (rc != scalar_scan_body(body, max_depth, &b) || a.error_at != b.error_at ||
        (rc && strcmp(a.error, b.error) != 0) || a.members_n != b.members_n ||
        a.open_at != b.open_at || a.close_at != b.close_at)
        return false;
    for (int i = 0; i < PL_MEMBER_COUNT && rc == 0; i++) {
        const pl_member *m = &a.members[i], *n = &b.members[i];
        if (m->type != n->type || m->key_at != n->key_at || m->raw.p != n->raw.p ||
            m->raw.n != n->raw.n || m->elements != n->elements || m->escaped != n->escaped ||
            m->attachments != n->attachments || m->attachment_bytes != n->attachment_bytes)
            return false;
    }
    return rc || pl_scan_prompt_tokens(&a) == scalar_scan_prompt_tokens(&b);
}

#endif
