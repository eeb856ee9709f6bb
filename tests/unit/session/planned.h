/* A request planned against a history, for tests of the history. Include after cmocka.h. */
#ifndef PL_TEST_PLANNED_H
#define PL_TEST_PLANNED_H

#include <stdio.h>

#include "conversation.h"
#include "session/history.h"

/* A body without a terminator behind it, scanned, and what was planned for it. */
typedef struct request {
    char *p;
    size_t n;
    pl_scan s;
    pl_edits edits;
    pl_history_plan plan;
} request;

static inline void request_free(request *q)
{
    free(q->p);
    q->p = NULL;
}

static inline void plan_bytes(request *q, const pl_history *h, enum pl_api_kind api, unsigned flags,
                              const char *p, size_t n)
{
    memset(q, 0, sizeof *q);
    q->n = n;
    q->p = malloc(n);
    assert_non_null(q->p);
    memcpy(q->p, p, n);
    if (pl_scan_body((pl_str){q->p, n}, 100, &q->s) != 0)
        fail_msg("not a body: %.*s", (int)n, p);
    assert_int_equal(
        pl_history_plan_turn(h, api, (pl_str){q->p, n}, &q->s, flags, &q->edits, &q->plan), 0);
    if (q->plan.how != PL_PLAN_TRIM)
        assert_int_equal(q->edits.n, 0);
    assert_int_equal(q->plan.why != NULL, q->plan.how == PL_PLAN_OUTSIDE);
    if (q->plan.how == PL_PLAN_OUTSIDE)
        assert_memory_equal(&q->plan.next, h, sizeof *h);
}

static inline void plan(request *q, const pl_history *h, enum pl_api_kind api, unsigned flags,
                        const char *body)
{
    plan_bytes(q, h, api, flags, body, strlen(body));
}

/* The edited body. */
static inline json_t *edited(const request *q)
{
    pl_str slices[PL_EDITS_SLICES];
    size_t total;
    pl_buf b = {0};
    int n = pl_edits_slices(&q->edits, (pl_str){q->p, q->n}, slices, &total);
    for (int i = 0; i < n; i++)
        put(&b, slices[i].p, slices[i].n);
    json_error_t e;
    json_t *v = json_loadb(b.p, b.n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &e);
    if (!v)
        fail_msg("%s: %.*s", e.text, (int)b.n, b.p);
    pl_buf_free(&b);
    return v;
}

static inline void expect(const request *q, int how, const char *why)
{
    if ((int)q->plan.how != how || (why && !strstr(q->plan.why, why)))
        fail_msg("plan %d (%s) for %.*s", q->plan.how, q->plan.why ? q->plan.why : "", (int)q->n,
                 q->p);
}

#endif
