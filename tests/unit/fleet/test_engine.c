/* Engines: what a spec may say and how a refusal reads, references, eligibility; and the ledger,
 * also from several threads at once. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#include "base/rng.h"
#include "fleet/engine.h"
#include "policy_abi.h"

static pl_engine *make(const char *url)
{
    pl_errbuf eb = {""};
    pl_engine *e = NULL;
    pl_engine_spec s = {.url = pl_str_c(url)};
    if (pl_engine_new(&s, &e, &eb) != 0)
        fail_msg("%s: %s", url, eb.text);
    return e;
}

static void urls_are_normalised(void **state)
{
    (void)state;
    static const struct {
        const char *url, *normal, *host, *name;
        int port;
    } cases[] = {
        {"http://127.0.0.1:30000", "http://127.0.0.1:30000", "127.0.0.1", "127.0.0.1:30000", 30000},
        {"http://gpu-1.Example.com/", "http://gpu-1.example.com:80", "gpu-1.example.com",
         "gpu-1.example.com:80", 80},
        {"HTTP://my_engine:8000", "http://my_engine:8000", "my_engine", "my_engine:8000", 8000},
        {"http://[::1]:9", "http://[::1]:9", "::1", "[::1]:9", 9},
        {"http://[FE80::A]/", "http://[fe80::a]:80", "fe80::a", "[fe80::a]:80", 80},
        {"http://h:65535", "http://h:65535", "h", "h:65535", 65535},
        {"http://h:008", "http://h:8", "h", "h:8", 8},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pl_engine *e = make(cases[i].url);
        assert_string_equal(e->url, cases[i].normal);
        assert_string_equal(e->host, cases[i].host);
        assert_string_equal(e->name, cases[i].name);
        assert_int_equal(e->port, cases[i].port);
        assert_string_equal(e->workers[0].name, e->name);
        pl_engine_unref(e);
    }
}

static void refused(pl_engine_spec s, const char *says)
{
    pl_errbuf eb = {""};
    pl_engine *e = (pl_engine *)&eb;
    assert_true(pl_engine_new(&s, &e, &eb) < 0);
    assert_null(e);
    if (!strstr(eb.text, says))
        fail_msg("\"%.*s\": \"%s\" does not say \"%s\"", PL_FMT(s.url), eb.text, says);
    assert_null(strstr(eb.text, "s3cret"));
    assert_true(pl_engine_new(&s, &e, NULL) < 0);
}

static void refusals_say_what_to_do(void **state)
{
    (void)state;
    static const struct {
        const char *url, *says;
    } cases[] = {
        {"", "must begin with http://"},
        {"127.0.0.1:8000", "must begin with http://"},
        {"ftp://h", "must begin with http://"},
        {"https://h:443", "TLS to engines is not supported yet"},
        {"HTTPS://h", "TLS to engines is not supported yet"},
        {"http://", "is not a host name"},
        {"http:///", "is not a host name"},
        {"http://:80", "is not a host name"},
        {"http://h:", "from 1 to 65535"},
        {"http://h:0", "from 1 to 65535"},
        {"http://h:65536", "from 1 to 65535"},
        {"http://h:8x", "from 1 to 65535"},
        {"http://h:-1", "from 1 to 65535"},
        {"http://h:99999999999999999999", "from 1 to 65535"},
        {"http://h/v1", "write http://h "},
        {"http://h:1//", "write http://h:1 "},
        {"http://user:s3cret@h:1", "user name or password"},
        {"http://h/?key=s3cret", "query or fragment"},
        {"http://h?key=s3cret", "query or fragment"},
        {"http://h#s3cret", "query or fragment"},
        {"https://h/?key=s3cret", "TLS"},
        {"h:1/?key=s3cret", "must begin"},
        {"http://::1:80", "in brackets"},
        {"http://[::1", "closing"},
        {"http://[::1]80", "only :PORT"},
        {"http://[::g]", "is not an IPv6 address"},
        {"http://[fe80::1%25eth0]", "zones are not supported"},
        {"http://[127.0.0.1]", "is not an IPv6 address"},
        {"http://[]", "is not an IPv6 address"},
        {"http://1.2.3", "is not an IPv4 address"},
        {"http://300.1.1.1", "is not an IPv4 address"},
        {"http://a b", "offset 8"},
        {"http://h\r\nX: y", "offset 8"},
        {"http://caf\xc3\xa9", "offset 10"},
        {"http://h*", "is not a host name"},
        {"http://h\\x", "is not a host name"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        refused((pl_engine_spec){.url = pl_str_c(cases[i].url)}, cases[i].says);
    refused((pl_engine_spec){.url = {"http://h\0x", 10}}, "offset 8");
    char many[600];
    memset(many, 'a', sizeof many);
    memcpy(many, "http://", 7);
    refused((pl_engine_spec){.url = {many, 7 + 254}}, "is not a host name");
    refused((pl_engine_spec){.url = {many, 600}}, "is not a host name");
    refused((pl_engine_spec){.url = {many, 7 + 253}}, "NAME=URL"); /* good, but too long a name */
    many[7] = '[';
    refused((pl_engine_spec){.url = {many, 600}}, "closing");
}

static void numbers_are_checked(void **state)
{
    (void)state;
    const pl_str url = PL_STR("http://h");
    refused((pl_engine_spec){.url = url, .weight = -1}, "weight");
    refused((pl_engine_spec){.url = url, .weight = NAN}, "weight");
    refused((pl_engine_spec){.url = url, .weight = INFINITY}, "weight");
    refused((pl_engine_spec){.url = url, .dp_size = -1}, "dp_size");
    refused((pl_engine_spec){.url = url, .dp_size = PL_MAX_WORKERS + 1}, "dp_size");
    refused((pl_engine_spec){.url = url, .max_inflight = -1}, "max_inflight");
    refused((pl_engine_spec){.url = url, .max_queued_prefill_tokens = -1}, "max_queued");
}

static void names(void **state)
{
    (void)state;
    pl_errbuf eb;
    pl_engine *e;
    char longest[128];
    memset(longest, 'n', sizeof longest);
    pl_engine_spec s = {.url = PL_STR("http://h"), .name = {longest, 127}, .dp_size = 2};
    assert_int_equal(pl_engine_new(&s, &e, &eb), 0);
    assert_int_equal(strlen(e->name), 127);
    assert_int_equal(strlen(e->workers[1].name), 129);
    pl_engine_unref(e);
    s.name.n = 128;
    refused(s, "longer than 127");
    static const char *const bad[] = {"a/b", "a b", "a=b", "caf\xc3\xa9", "x\n", "\""};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        refused((pl_engine_spec){.url = PL_STR("http://h"), .name = pl_str_c(bad[i])},
                "engine name has the byte");
    refused((pl_engine_spec){.url = PL_STR("http://h"), .name = {"a\0b", 3}}, "byte 0x00");
    s.name = PL_STR("Az09._:[]-");
    assert_int_equal(pl_engine_new(&s, &e, &eb), 0);
    assert_string_equal(e->workers[0].name, "Az09._:[]-/0");
    assert_string_equal(e->workers[1].name, "Az09._:[]-/1");
    pl_engine_unref(e);
}

static void a_spec_becomes_an_engine(void **state)
{
    (void)state;
    pl_errbuf eb;
    pl_engine *a, *b;
    const pl_str models[] = {PL_STR("m")};
    pl_engine_spec s = {.url = PL_STR("http://h:1"),
                        .kind = PL_KIND_VLLM,
                        .weight = 2.5,
                        .max_inflight = 3,
                        .max_queued_prefill_tokens = 5000000000,
                        .dp_size = 4,
                        .models = models,
                        .models_n = 1,
                        .from_config = true};
    assert_int_equal(pl_engine_new(&s, &a, &eb), 0);
    assert_string_equal(pl_engine_kind_name((pl_engine_kind)a->kind), "vllm");
    assert_true(a->weight == 2.5 && a->max_inflight == 3 && a->from_config && a->models_given);
    assert_true(a->max_queued_prefill_tokens == 5000000000);
    assert_int_equal(a->workers_n, 4);
    for (int i = 0; i < 4; i++) {
        assert_ptr_equal(a->workers[i].engine, a);
        assert_int_equal(a->workers[i].rank, i);
    }
    b = make("http://h:1");
    assert_true(b->weight == 1 && b->workers_n == 1 && !b->models_given);
    assert_int_equal(b->health, PL_HEALTH_UNKNOWN);
    assert_true(a->id != b->id);
    pl_engine_unref(a);
    pl_engine_unref(b);
}

static void why_in_order(void **state)
{
    (void)state;
    pl_engine *e = make("http://h");
    const pl_breaker_options *o = &pl_breaker_default;
    e->admin = PL_ENGINE_DRAINING;
    e->breaker = PL_BREAKER_OPEN;
    e->open_until_ns = 100;
    assert_int_equal(pl_engine_why(e, o, 0), PL_WHY_DRAINING);
    e->admin = PL_ENGINE_REMOVED;
    assert_int_equal(pl_engine_why(e, o, 0), PL_WHY_DRAINING);
    e->admin = PL_ENGINE_ACTIVE;
    assert_int_equal(pl_engine_why(e, o, 0), PL_WHY_UNHEALTHY);
    e->health = PL_HEALTH_DOWN;
    assert_int_equal(pl_engine_why(e, o, 0), PL_WHY_UNHEALTHY);
    e->health = PL_HEALTH_UP;
    assert_int_equal(pl_engine_why(e, o, 0), PL_WHY_BREAKER_OPEN);
    assert_int_equal(pl_engine_why(e, o, 100), PL_WHY_ELIGIBLE);
    e->breaker = PL_BREAKER_CLOSED;
    assert_int_equal(pl_engine_why(e, o, 0), PL_WHY_ELIGIBLE);
    pl_engine_unref(e);
}

/* --- ledger --- */

static void ledger_is_empty(const pl_worker_state *w)
{
    assert_int_equal(atomic_load(&w->inflight), 0);
    assert_int_equal(atomic_load(&w->streams), 0);
    assert_int_equal(atomic_load(&w->queued_prefill_tokens), 0);
}

static void a_ticket_is_taken_back_once(void **state)
{
    (void)state;
    pl_engine *e = make("http://h");
    pl_worker_state *w = &e->workers[0];
    pl_ticket t = {0}, u = {0};
    pl_ticket_end(&t); /* never begun */
    pl_ticket_first_token(&t, 1);
    pl_ticket_begin(&t, w, &(pl_load){.prompt_tokens = 100.7, .stream = true});
    pl_ticket_begin(&u, w, &(pl_load){.prompt_tokens = 50, .stream = false});
    assert_int_equal(pl_engine_inflight(e), 2);
    assert_int_equal(atomic_load(&w->streams), 1);
    assert_int_equal(atomic_load(&w->queued_prefill_tokens), 150);
    assert_int_equal(atomic_load(&w->requests), 2);
    pl_ticket_first_token(&t, 0.5);
    pl_ticket_first_token(&t, 0.5);
    assert_int_equal(atomic_load(&w->queued_prefill_tokens), 50);
    assert_int_equal(t.prefill_tokens, 0);
    pl_ticket_end(&t);
    pl_ticket_end(&t);
    assert_int_equal(pl_engine_inflight(e), 1);
    pl_ticket_end(&u); /* ended before its first token */
    ledger_is_empty(w);
    pl_ticket_first_token(&u, 0.5);
    assert_int_equal(atomic_load(&w->queued_prefill_tokens), 0);
    assert_int_equal(atomic_load(&w->requests), 2);
    pl_engine_unref(e);
}

static void absurd_prompts_leave_the_ledger_sane(void **state)
{
    (void)state;
    pl_engine *e = make("http://h");
    static const double odd[] = {NAN, INFINITY, -INFINITY, -5, 0, 0.5, 1e300};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        pl_ticket t = {0};
        pl_ticket_begin(&t, &e->workers[0], &(pl_load){.prompt_tokens = odd[i], .stream = false});
        assert_true(atomic_load(&e->workers[0].queued_prefill_tokens) >= 0);
        pl_ticket_end(&t);
        ledger_is_empty(&e->workers[0]);
    }
    pl_engine_unref(e);
}

static void serve_once(pl_worker_state *w, double tokens, double ttft)
{
    pl_ticket t = {0};
    pl_ticket_begin(&t, w, &(pl_load){.prompt_tokens = tokens, .stream = true});
    pl_ticket_first_token(&t, ttft);
    pl_ticket_end(&t);
}

static void averages_follow_what_is_measured(void **state)
{
    (void)state;
    pl_engine *e = make("http://h");
    pl_worker_state *w = &e->workers[0];
    serve_once(w, 1000, 0.5);
    assert_true(w->ttft_seconds == 0.5); /* the first sample counts whole */
    assert_true(w->prefill_tokens_per_second == 2000);
    serve_once(w, 63, 0.5); /* too short for a rate */
    assert_true(w->prefill_tokens_per_second == 2000);
    serve_once(w, 1000, 1.3);
    assert_true(fabs(w->ttft_seconds - (0.5 + 0.8 / 8)) < 1e-12);
    const double before = w->ttft_seconds;
    serve_once(w, 1000, -1);
    serve_once(w, 1000, 0);
    serve_once(w, 1000, NAN);
    serve_once(w, 1000, INFINITY);
    assert_true(w->ttft_seconds == before);
    for (int i = 0; i < 100; i++)
        serve_once(w, 300, 0.1);
    assert_true(fabs(w->ttft_seconds - 0.1) < 1e-4);
    assert_true(fabs(w->prefill_tokens_per_second - 3000) < 1);
    pl_engine_unref(e);
}

static void caps_count_over_ranks(void **state)
{
    (void)state;
    pl_errbuf eb;
    pl_engine *e;
    pl_engine_spec s = {.url = PL_STR("http://h"),
                        .dp_size = 2,
                        .max_inflight = 2,
                        .max_queued_prefill_tokens = 100};
    assert_int_equal(pl_engine_new(&s, &e, &eb), 0);
    pl_worker_state *a = &e->workers[0], *b = &e->workers[1];
    pl_ticket t = {0}, u = {0};
    assert_false(pl_worker_at_capacity(a));
    pl_ticket_begin(&t, a, &(pl_load){.prompt_tokens = 10, .stream = false});
    assert_false(pl_worker_at_capacity(b));
    pl_ticket_begin(&u, b, &(pl_load){.prompt_tokens = 10, .stream = false});
    assert_true(pl_worker_at_capacity(a) && pl_worker_at_capacity(b));
    pl_ticket_end(&t);
    assert_false(pl_worker_at_capacity(b));
    pl_ticket_end(&u);
    pl_ticket_begin(&t, a, &(pl_load){.prompt_tokens = 100, .stream = false});
    assert_true(pl_worker_at_capacity(b));
    pl_ticket_first_token(&t, 1); /* prefill is done, the request is not */
    assert_false(pl_worker_at_capacity(b));
    pl_ticket_end(&t);
    pl_engine_unref(e);
    e = make("http://h"); /* no caps */
    for (int i = 0; i < 100; i++) {
        pl_ticket_begin(&t, &e->workers[0], &(pl_load){.prompt_tokens = 1e9, .stream = false});
        assert_false(pl_worker_at_capacity(&e->workers[0]));
    }
    pl_engine_unref(e);
}

enum { THREADS = 4, REQUESTS = 20000 };

static void *traffic(void *arg)
{
    pl_engine *e = arg;
    pl_rng rng = {(uint64_t)(uintptr_t)&rng};
    pl_ticket open[8] = {{0}};
    for (int i = 0; i < REQUESTS; i++) {
        pl_ticket *t = &open[pl_rng_below(&rng, 8)];
        if (t->worker && pl_rng_below(&rng, 2)) {
            pl_ticket_first_token(t, 0.25);
        } else if (t->worker) {
            pl_worker_state *w = t->worker;
            pl_ticket_end(t);
            pl_engine_unref(w->engine);
        } else {
            pl_engine_ref(e);
            pl_ticket_begin(t, &e->workers[pl_rng_below(&rng, 2)],
                            &(pl_load){.prompt_tokens = pl_rng_below(&rng, 1000),
                                       .stream = pl_rng_below(&rng, 2)});
        }
    }
    for (int i = 0; i < 8; i++)
        if (open[i].worker) {
            pl_ticket_end(&open[i]);
            pl_engine_unref(e);
        }
    return NULL;
}

static void several_threads_end_at_zero(void **state)
{
    (void)state;
    pl_errbuf eb;
    pl_engine *e;
    pl_engine_spec s = {.url = PL_STR("http://h"), .dp_size = 2, .max_inflight = 5};
    assert_int_equal(pl_engine_new(&s, &e, &eb), 0);
    pthread_t t[THREADS];
    for (int i = 0; i < THREADS; i++)
        pthread_create(&t[i], NULL, traffic, e);
    for (int i = 0; i < 1000; i++) {
        int32_t n = pl_engine_inflight(e);
        assert_true(n >= 0 && n <= THREADS * 8);
        pl_worker_at_capacity(&e->workers[0]);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(t[i], NULL);
    for (int i = 0; i < 2; i++) {
        ledger_is_empty(&e->workers[i]);
        assert_true(fabs(e->workers[i].ttft_seconds - 0.25) < 1e-9);
    }
    assert_int_equal(atomic_load(&e->refs), 1);
    pl_engine_unref(e);
}

/* Prompt and generated tokens take whole blocks; cached ones are no prefill; all of it goes back.
 */
static void blocks_follow_the_tokens(void **state)
{
    pl_engine *e = NULL;
    const pl_engine_spec spec = {.url = PL_STR("http://h")};
    assert_int_equal(pl_engine_new(&spec, &e, NULL), 0);
    pl_worker_state *w = &e->workers[0];
    pl_ticket t = {0}, u = {0};
    pl_ticket_begin(&t, w, &(pl_load){.prompt_tokens = 33, .cached_tokens = 32});
    assert_int_equal(atomic_load(&w->queued_prefill_tokens), 1);
    assert_int_equal(atomic_load(&w->decode_blocks), 3); /* of 16 tokens */
    pl_ticket_output(&t, 15);
    assert_int_equal(atomic_load(&w->decode_blocks), 3);
    pl_ticket_output(&t, 1);
    assert_int_equal(atomic_load(&w->decode_blocks), 4);
    atomic_store(&w->block_tokens, 64);
    pl_ticket_begin(&u, w, &(pl_load){.prompt_tokens = 200, .cached_tokens = 300});
    assert_int_equal(atomic_load(&w->queued_prefill_tokens), 1);
    assert_int_equal(atomic_load(&w->decode_blocks), 8);
    pl_ticket_output(&u, 56);
    assert_int_equal(atomic_load(&w->decode_blocks), 8);
    pl_ticket_output(&u, 1);
    assert_int_equal(atomic_load(&w->decode_blocks), 9);
    pl_ticket_end(&u);
    pl_ticket_end(&u);
    pl_ticket_output(&u, 1000);
    assert_int_equal(atomic_load(&w->decode_blocks), 4);
    pl_ticket_end(&t);
    assert_int_equal(atomic_load(&w->decode_blocks), 0);
    assert_int_equal(atomic_load(&w->queued_prefill_tokens), 0);
    pl_engine_unref(e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(urls_are_normalised),
        cmocka_unit_test(refusals_say_what_to_do),
        cmocka_unit_test(numbers_are_checked),
        cmocka_unit_test(names),
        cmocka_unit_test(a_spec_becomes_an_engine),
        cmocka_unit_test(why_in_order),
        cmocka_unit_test(a_ticket_is_taken_back_once),
        cmocka_unit_test(absurd_prompts_leave_the_ledger_sane),
        cmocka_unit_test(averages_follow_what_is_measured),
        cmocka_unit_test(caps_count_over_ranks),
        cmocka_unit_test(blocks_follow_the_tokens),
        cmocka_unit_test(several_threads_end_at_zero),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
