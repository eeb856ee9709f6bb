/* The /metrics page: it is what Prometheus can read, and its numbers are the ones that were
 * counted.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <stdlib.h>

#include <cmocka.h>

#include "admin/metrics_text.h"
#include "policy/shared.h"
#include "router.h"

/* --- a reader of the exposition format that forgives nothing --- */

typedef struct page {
    char families[256][96];
    int families_n;
    char type[16];
    double last_bucket, last_le;
    bool in_hist, saw_inf;
    int samples;
} page;

static size_t name_length(const char *s)
{
    return strspn(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_:");
}

static bool ends(const char *s, const char *suffix)
{
    return pl_str_ends(pl_str_c(s), pl_str_c(suffix));
}

static void begin_family(page *p, char *help, char *type_line)
{
    char name[96], type_name[96];
    assert_int_equal(sscanf(help, "# HELP %95s", name), 1);
    assert_true(strlen(help) > strlen("# HELP ") + strlen(name) + 1);
    if (!type_line || sscanf(type_line, "# TYPE %95s %15s", type_name, p->type) != 2)
        fail_msg("no TYPE after: %s", help);
    assert_string_equal(name, type_name);
    for (int i = 0; i < p->families_n; i++)
        if (strcmp(p->families[i], name) == 0)
            fail_msg("family twice: %s", name);
    assert_true(p->families_n < 256);
    strcpy(p->families[p->families_n++], name);
    bool counter = strcmp(p->type, "counter") == 0;
    assert_true(counter || strcmp(p->type, "gauge") == 0 || strcmp(p->type, "histogram") == 0);
    if (counter != ends(name, "_total"))
        fail_msg("a counter ends in _total, and nothing else does: %s", name);
}

/* One label; returns what follows it. */
static char *label(char *s, char *le)
{
    size_t n = name_length(s);
    assert_true(n > 0 && s[n] == '=' && s[n + 1] == '"');
    bool is_le = n == 2 && strncmp(s, "le", 2) == 0;
    char *v = s + n + 2, *start = v;
    for (; *v != '"'; v++) {
        assert_true(*v != 0);
        if (*v == '\\') {
            v++;
            assert_true(*v == '\\' || *v == '"' || *v == 'n');
        }
    }
    if (is_le)
        snprintf(le, 32, "%.*s", (int)(v - start), start);
    return v + 1;
}

static void sample(page *p, char *line)
{
    char name[96], le[32] = "";
    size_t n = name_length(line);
    snprintf(name, sizeof name, "%.*s", (int)n, line);
    char *s = line + n;
    if (*s == '{') {
        do
            s = label(s + 1, le);
        while (*s == ',');
        assert_int_equal(*s, '}');
        s++;
    }
    assert_int_equal(*s, ' ');
    char *end;
    double value = strtod(s + 1, &end);
    assert_int_equal(*end, 0);
    p->samples++;

    const char *family = p->families[p->families_n - 1];
    if (strcmp(p->type, "histogram") != 0) {
        assert_string_equal(name, family);
        return;
    }
    assert_true(strncmp(name, family, strlen(family)) == 0);
    const char *part = name + strlen(family);
    if (strcmp(part, "_bucket") == 0) {
        double bound = strcmp(le, "+Inf") == 0 ? INFINITY : strtod(le, NULL);
        if (p->in_hist)
            assert_true(value >= p->last_bucket && bound > p->last_le);
        p->in_hist = true;
        p->last_bucket = value;
        p->last_le = bound;
    } else if (strcmp(part, "_count") == 0) {
        assert_true(p->in_hist && isinf(p->last_le) && value == p->last_bucket);
        p->in_hist = false;
    } else {
        assert_string_equal(part, "_sum");
    }
}

static void check_page(const pl_buf *b, page *p)
{
    memset(p, 0, sizeof *p);
    assert_true(b->n > 0 && b->p[b->n - 1] == '\n');
    char *copy = pl_str_dup(pl_buf_str(b));
    char *save = NULL;
    for (char *line = strtok_r(copy, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        if (strncmp(line, "# HELP ", 7) == 0)
            begin_family(p, line, strtok_r(NULL, "\n", &save));
        else
            sample(p, line);
    }
    free(copy);
}

static void has(const pl_buf *b, const char *line)
{
    char with[256];
    snprintf(with, sizeof with, "\n%s\n", line);
    if (!memmem(b->p, b->n, with, strlen(with)))
        fail_msg("'%s' is not in:\n%.*s", line, PL_FMT(pl_buf_str(b)));
}

/* --- a router of which only the numbers are real --- */

static void publish(void *ctx, pl_view *v)
{
    pl_view_unref(v);
}

static pl_router *router_new(void)
{
    pl_router *r = calloc(1, sizeof *r);
    assert_non_null(r);
    r->loops_n = 2;
    r->loops = calloc(2, sizeof *r->loops);
    r->queue = pl_queue_new(4);
    r->shared = pl_shared_new();
    r->fleet = pl_fleet_new(publish, NULL);
    assert_true(r->loops && r->queue && r->shared && r->fleet);
    return r;
}

static void router_free(pl_router *r)
{
    pl_fleet_free(r->fleet);
    pl_shared_free(r->shared);
    pl_queue_free(r->queue);
    free(r->loops);
    free(r);
}

static void test_empty_page(void **state)
{
    pl_router *r = router_new();
    pl_buf b = {0};
    page p;
    pl_router_render_metrics(r, &b);
    check_page(&b, &p);
    assert_true(p.families_n > 40);
    has(&b, "perilune_requests_total 0");
    has(&b, "perilune_build_info{version=\"" PERILUNE_VERSION "\"} 1");
    has(&b, "perilune_engines 0");
    pl_buf_free(&b);
    router_free(r);
}

static void test_numbers(void **state)
{
    pl_router *r = router_new();
    pl_errbuf eb;
    pl_engine *e = NULL;
    const pl_engine_spec spec = {
        .name = PL_STR("moon"), .url = PL_STR("http://10.0.0.1:30000"), .weight = 1, .dp_size = 2};
    assert_int_equal(pl_fleet_add(r->fleet, &spec, &e, &eb), 0);

    pl_count(&r->loops[0].metrics.requests, 3);
    pl_count(&r->loops[1].metrics.requests, 4);
    pl_count(&r->loops[0].metrics.responses_2xx, 5);
    pl_count(&r->loops[1].metrics.responses_5xx, 1);
    pl_hist_observe(&r->loops[0].metrics.ttft, 3000000);        /* 3 ms */
    pl_hist_observe(&r->loops[1].metrics.ttft, 2000000000);     /* 2 s */
    pl_hist_observe(&r->loops[1].metrics.ttft, UINT64_MAX / 4); /* beyond every bucket */
    pl_hist_observe(&r->loops[0].policy_stats.latency[PL_HOOK_SCORE], 700);
    pl_count(&r->loops[1].policy_stats.errors[PL_HOOK_ROUTE], 2);
    atomic_store(&r->loops[1].policy_stats.suspended, 1);
    atomic_store(&e->health, PL_HEALTH_UP);
    atomic_store(&e->breaker, PL_BREAKER_OPEN);
    atomic_store(&e->workers[1].inflight, 9);
    pl_count(&e->requests, 11);
    r->generation = 6;
    r->policy.reloads = 5;
    assert_int_equal(pl_shared_metric(r->shared, PL_STR("my_gauge"), 1.5), 0);

    pl_buf b = {0};
    page p;
    pl_router_render_metrics(r, &b);
    check_page(&b, &p);
    has(&b, "perilune_requests_total 7");
    has(&b, "perilune_responses_total{class=\"2xx\"} 5");
    has(&b, "perilune_responses_total{class=\"5xx\"} 1");
    has(&b, "perilune_ttft_seconds_bucket{le=\"0.002097152\"} 0");
    has(&b, "perilune_ttft_seconds_bucket{le=\"0.004194304\"} 1");
    has(&b, "perilune_ttft_seconds_bucket{le=\"2.147483648\"} 2");
    has(&b, "perilune_ttft_seconds_bucket{le=\"+Inf\"} 3");
    has(&b, "perilune_ttft_seconds_count 3");
    has(&b, "perilune_hook_seconds_bucket{hook=\"score\",le=\"1.024e-06\"} 1");
    has(&b, "perilune_hook_seconds_count{hook=\"score\"} 1");
    has(&b, "perilune_policy_errors_total{hook=\"route\"} 2");
    has(&b, "perilune_policy_suspended_loops 1");
    has(&b, "perilune_policy_generation 6");
    has(&b, "perilune_policy_reloads_total 5");
    has(&b, "perilune_script_metric{name=\"my_gauge\"} 1.5");
    has(&b, "perilune_engine_up{engine=\"moon\"} 1");
    has(&b, "perilune_engine_breaker{engine=\"moon\",state=\"open\"} 1");
    has(&b, "perilune_engine_breaker{engine=\"moon\",state=\"closed\"} 0");
    has(&b, "perilune_engine_requests_total{engine=\"moon\"} 11");
    has(&b, "perilune_worker_inflight{worker=\"moon/0\"} 0");
    has(&b, "perilune_worker_inflight{worker=\"moon/1\"} 9");
    pl_buf_free(&b);
    pl_engine_unref(e);
    router_free(r);
}

static void test_process(void **state)
{
    pl_buf b = {0};
    pl_text t = {.out = &b};
    double start = 0;
    pl_text_process(&t);
    assert_int_equal(pl_buf_add(&b, "", 1), 0);
    const char *at = strstr(b.p, "\nprocess_start_time_seconds ");
    assert_non_null(at);
    start = strtod(at + strlen("\nprocess_start_time_seconds "), NULL);
    assert_true(fabs(start - (double)time(NULL)) < 600);
    assert_true(pl_process_resident_bytes() > 100000);
    at = strstr(b.p, "\nprocess_open_fds ");
    assert_non_null(at);
    assert_true(strtod(at + strlen("\nprocess_open_fds "), NULL) >= 3);
    pl_buf_free(&b);
}

static void test_labels_and_numbers(void **state)
{
    pl_buf b = {0};
    pl_text t = {.out = &b};
    pl_text_family(&t, "x", "gauge", "help");
    pl_text_value(&t, 0.1, 1, "a", "quote\" back\\ line\n\xc3\xa9");
    pl_text_value(&t, NAN, 0);
    pl_text_value(&t, -INFINITY, 0);
    pl_text_value(&t, 9007199254740991, 0);
    assert_int_equal(t.err, 0);
    assert_int_equal(pl_buf_add(&b, "", 1), 0);
    assert_string_equal(b.p, "# HELP x help\n# TYPE x gauge\n"
                             "x{a=\"quote\\\" back\\\\ line\\n\xc3\xa9\"} 0.1\n"
                             "x NaN\nx -Inf\nx 9007199254740991\n");
    pl_buf_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_empty_page),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_process),
        cmocka_unit_test(test_labels_and_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
