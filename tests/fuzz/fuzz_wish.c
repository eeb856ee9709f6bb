/* Any bytes as a request body and as a reply. What a request says about its session is in its
 * bounds or refused with words; a conversation that is sent again is proved to begin with itself;
 * what is trimmed is a body again; replies never break anything. The first byte chooses the API,
 * the second what else; a byte 0xff in the rest ends the body and begins a reply. */
#include <stdlib.h>

#include "base/err.h"
#include "session/history.h"
#include "session/wish.h"

#define MUST(x)                                                                                    \
    do {                                                                                           \
        if (!(x))                                                                                  \
            abort();                                                                               \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void fuzz_wish(pl_str body, const pl_scan *s, unsigned choice)
{
    pl_arena a = PL_ARENA_INIT;
    pl_header headers[2] = {{PL_STR("X-Dynamo-Session-ID"), {body.p, body.n < 300 ? body.n : 300}},
                            {PL_STR("x-claude-code-agent-id"), PL_STR("kid")}};
    pl_head head = {.request = true, .headers = headers, .headers_n = choice & 2 ? 2 : 0};
    pl_wish_options o = {.headers = pl_wish_default_headers,
                         .headers_n = pl_wish_default_headers_n,
                         .header_timeout_seconds = 300,
                         .max_timeout_seconds = 86400,
                         .trusted = choice & 1};
    pl_wish w;
    pl_wish_open open;
    pl_wish_error e = {0};
    int rc = pl_wish_read(&a, body, s, &head, &o, &w, &e);
    MUST(rc == 0 || (rc == PL_EINVALID && e.status == 400 && e.code && e.text.text[0]));
    if (rc == 0) {
        MUST((w.source != PL_WISH_NONE) == (w.id.p != NULL));
        MUST(!w.id.p || (w.id.n >= 1 && w.id.n <= PL_SESSION_MAX_ID_BYTES));
        MUST(w.parent.n <= PL_SESSION_MAX_ID_BYTES);
        MUST(w.timeout_seconds >= 1 && w.timeout_seconds <= 86400);
        MUST(w.retention_seconds == -1 ||
             (w.retention_seconds >= 1 && w.retention_seconds <= 86400));
        MUST(!w.params_id_raw.p || (w.params_id_raw.p >= body.p && w.params_id_raw.n >= 2));
    }
    rc = pl_wish_read_open(&a, body, s, &o, &w, &open, &e);
    MUST(rc == 0 || rc == PL_EINVALID);
    rc = pl_wish_read_close(&a, body, s, &o, &w, &e);
    MUST(rc == PL_EINVALID || w.id.n >= 1);
    pl_arena_free(&a);
}

static void fuzz_history(pl_str body, const pl_scan *s, enum pl_api_kind api, unsigned flags,
                         pl_str reply)
{
    pl_history h = {0};
    pl_edits edits = {0};
    pl_history_plan first, again;
    MUST(pl_history_plan_turn(&h, api, body, s, flags, &edits, &first) == 0 && edits.n == 0);
    pl_reply *r = pl_reply_new(api), *whole = pl_reply_new(api);
    MUST(r && whole);
    pl_reply_event(r, reply);
    pl_reply_event(r, reply);
    pl_reply_answer(whole, reply);
    pl_history after = h;
    pl_history_advance(&after, &first, r);
    after = h;
    pl_history_advance(&after, &first, whole);
    pl_reply_free(r);
    pl_reply_free(whole);
    /* as if the engine held a part of it and nothing had been answered */
    h = first.next;
    MUST(pl_history_plan_turn(&h, api, body, s, 0, &edits, &again) == 0);
    if (h.form != PL_HISTORY_NONE)
        MUST(again.how == PL_PLAN_OUTSIDE); /* nothing is new */
    MUST(pl_history_plan_turn(&after, api, body, s, 0, &edits, &again) == 0);
    if (again.how != PL_PLAN_TRIM) {
        MUST(edits.n == 0);
        return;
    }
    pl_str slices[PL_EDITS_SLICES];
    size_t total, at = 0;
    int n = pl_edits_slices(&edits, body, slices, &total);
    char *edited = malloc(total);
    MUST(edited);
    for (int i = 0; i < n; i++) {
        memcpy(edited + at, slices[i].p, slices[i].n);
        at += slices[i].n;
    }
    pl_scan trimmed;
    MUST(pl_scan_body((pl_str){edited, total}, 100, &trimmed) == 0);
    free(edited);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const enum pl_api_kind apis[] = {PL_API_CHAT, PL_API_COMPLETIONS, PL_API_GENERATE,
                                            PL_API_MESSAGES};
    if (size < 2)
        return 0;
    pl_str body = {(const char *)data + 2, size - 2}, reply = {NULL, 0};
    const char *end = memchr(body.p, 0xff, body.n);
    if (end) {
        reply = (pl_str){end + 1, body.n - (size_t)(end - body.p) - 1};
        body.n = (size_t)(end - body.p);
    }
    enum pl_api_kind api = apis[data[0] & 3];
    pl_scan s;
    if (pl_scan_body(body, 100, &s) == 0) {
        fuzz_wish(body, &s, data[1]);
        fuzz_history(body, &s, api, data[1] >> 2 & 3, reply);
    }
    pl_reply *r = pl_reply_new(api);
    MUST(r);
    pl_reply_event(r, body);
    pl_reply_event(r, reply);
    pl_reply_judge(r, data[0], data[1]);
    pl_reply_free(r);
    return 0;
}
