/* The engines' own gauges: what is read of their answers, and the polling of scripted engines
 * (peer.h) in virtual time. */
#include "../http/peer.h"

#include <math.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/log.h"
#include "fleet/gauge_read.h"
#include "fleet/gauges.h"
#include "policy_abi.h"

/* --- answers --- */

static pl_gauge_set set;

static pl_engine *engine_of(int ranks)
{
    const pl_engine_spec spec = {.url = PL_STR("http://10.0.0.1"), .weight = 1, .dp_size = ranks};
    pl_engine *e;
    pl_errbuf eb;
    assert_int_equal(pl_engine_new(&spec, &e, &eb), 0);
    return e;
}

static void worker_is(const pl_worker_state *w, double running, double waiting, double usage)
{
    assert_true(atomic_load(&w->running_requests) == running);
    assert_true(atomic_load(&w->waiting_requests) == waiting);
    assert_true(fabs(atomic_load(&w->kv_usage) - usage) < 1e-9);
}

static void sizes_are(const pl_worker_state *w, int32_t block, int64_t kv)
{
    assert_int_equal(atomic_load(&w->block_tokens), block);
    assert_int_equal(atomic_load(&w->kv_tokens), kv);
}

static const char vllm_page[] =
    "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
    "# TYPE vllm:num_requests_running gauge\n"
    "vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 3.0\n"
    "vllm:num_requests_running{engine=\"1\",model_name=\"m\"} 5.0\n"
    "vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 1.0\n"
    "vllm:num_requests_waiting{engine=\"1\",model_name=\"m\"} 0.0\n"
    "vllm:num_requests_waiting_by_reason{engine=\"0\",model_name=\"m\",reason=\"capacity\"} 99.0\n"
    "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.25\n"
    "vllm:kv_cache_usage_perc{engine=\"1\",model_name=\"m\"} 0.75\n"
    "vllm:cache_config_info{block_size=\"32\",cache_dtype=\"auto\",engine=\"0\",num_gpu_blocks="
    "\"1000\",num_cpu_blocks=\"None\"} 1.0\n"
    "vllm:cache_config_info{block_size=\"32\",engine=\"1\",num_gpu_blocks=\"3000\"} 1.0\n"
    "vllm:engine_sleep_state{engine=\"0\",sleep_state=\"awake\"} 1.0\n"
    "vllm:engine_sleep_state{engine=\"0\",sleep_state=\"discard_all\"} 0.0\n"
    "vllm:engine_sleep_state{engine=\"1\",sleep_state=\"awake\"} 0.0\n"
    "vllm:engine_sleep_state{engine=\"1\",sleep_state=\"weights_offloaded\"} 1.0\n"
    "vllm:e2e_request_latency_seconds_bucket{engine=\"0\",le=\"0.3\",model_name=\"m\"} 8.0\n";

static void vllm_tells_by_engine_label(void **state)
{
    pl_engine *e = engine_of(2);
    assert_int_equal(pl_gauges_of_metrics(pl_str_c(vllm_page), &set), 6);
    assert_int_equal(pl_gauges_apply(&set, e, 77), 2);
    worker_is(&e->workers[0], 3, 1, 0.25);
    worker_is(&e->workers[1], 5, 0, 0.75);
    sizes_are(&e->workers[0], 32, 32000);
    sizes_are(&e->workers[1], 32, 96000);
    assert_int_equal(atomic_load(&e->workers[1].gauges_at_ns), 77);
    assert_false(atomic_load(&e->workers[0].asleep));
    assert_true(atomic_load(&e->workers[1].asleep));
    pl_engine_unref(e);
}

static void one_worker_gets_all_ranks_together(void **state)
{
    pl_engine *e = engine_of(1);
    assert_int_equal(pl_gauges_of_metrics(pl_str_c(vllm_page), &set), 6);
    assert_int_equal(pl_gauges_apply(&set, e, 77), 1);
    worker_is(&e->workers[0], 8, 1, (0.25 * 32000 + 0.75 * 96000) / 128000);
    sizes_are(&e->workers[0], 32, 128000);

    /* an engine started for one rank of many names that rank */
    assert_int_equal(pl_gauges_of_metrics(PL_STR("vllm:num_requests_running{engine=\"6\"} 4\n"
                                                 "vllm:gpu_cache_usage_perc{engine=\"6\"} 0.5\n"),
                                          &set),
                     2);
    assert_int_equal(pl_gauges_apply(&set, e, 78), 1);
    worker_is(&e->workers[0], 4, -1, 0.5);
    sizes_are(&e->workers[0], 32, 128000); /* what was told of sizes stays */

    /* what one rank does not tell is not known of all */
    pl_gauges_of_metrics(PL_STR("vllm:num_requests_running{engine=\"0\"} 4\n"
                                "vllm:num_requests_running{engine=\"1\"} 4\n"
                                "vllm:num_requests_waiting{engine=\"1\"} 4\n"),
                         &set);
    assert_int_equal(pl_gauges_apply(&set, e, 79), 1);
    worker_is(&e->workers[0], 8, -1, -1);
    pl_engine_unref(e);
}

static void sglang_tells_with_both_prefixes(void **state)
{
    static const char *const prefixes[] = {"sglang:", "sglang_"};
    for (int i = 0; i < 2; i++) {
        char page[1024];
        const char *p = prefixes[i];
        snprintf(page, sizeof page,
                 "%snum_running_reqs{tp_rank=\"0\",dp_rank=\"1\"} 6\n"
                 "%snum_running_reqs{tp_rank=\"1\",dp_rank=\"1\"} 6\n" /* the same ones */
                 "%snum_queue_reqs{tp_rank=\"0\",dp_rank=\"1\"} 2\n"
                 "%snum_queue_reqs{tp_rank=\"1\",dp_rank=\"1\"} 0\n"
                 "%stoken_usage{tp_rank=\"0\",dp_rank=\"1\"} 0.125\n"
                 "%sswa_token_usage{tp_rank=\"0\",dp_rank=\"1\"} 0.9\n"
                 "%smax_total_num_tokens{dp_rank=\"1\"} 5e4\n"
                 "%spage_size{dp_rank=\"1\"} 64\n",
                 p, p, p, p, p, p, p, p);
        pl_engine *e = engine_of(2);
        assert_int_equal(pl_gauges_of_metrics(pl_str_c(page), &set), 3);
        assert_int_equal(pl_gauges_apply(&set, e, 5), 1);
        worker_is(&e->workers[1], 6, 2, 0.125);
        sizes_are(&e->workers[1], 64, 50000);
        worker_is(&e->workers[0], -1, -1, -1); /* not told: not known */
        assert_int_equal(atomic_load(&e->workers[0].gauges_at_ns), 0);
        pl_engine_unref(e);
    }
}

static void loads_tell_by_rank(void **state)
{
    pl_engine *e = engine_of(2);
    const char *json =
        "{\"timestamp\":1.5,\"loads\":["
        "{\"dp_rank\":1,\"num_running_reqs\":4,\"num_waiting_reqs\":2,\"token_usage\":0.5,"
        "\"max_total_num_tokens\":1000,\"lora\":null},"
        "{\"dp_rank\":0,\"num_running_reqs\":1,\"num_waiting_reqs\":0,\"token_usage\":0.0},"
        "{\"dp_rank\":-3,\"num_running_reqs\":1},{\"dp_rank\":2000000000,\"num_running_reqs\":1},"
        "\"nonsense\",null,[]]}";
    assert_int_equal(pl_gauges_of_loads(pl_str_c(json), &set), 6);
    assert_int_equal(pl_gauges_apply(&set, e, 9), 2);
    worker_is(&e->workers[0], 1, 0, 0);
    worker_is(&e->workers[1], 4, 2, 0.5);
    sizes_are(&e->workers[1], 0, 1000);
    pl_engine_unref(e);

    static const char *const no_answers[] = {
        "", "{}", "[]", "null", "{\"loads\":{}}", "{\"loads\":", "vllm:num_requests_running 1"};
    for (size_t i = 0; i < sizeof no_answers / sizeof *no_answers; i++)
        assert_int_equal(pl_gauges_of_loads(pl_str_c(no_answers[i]), &set), PL_ESYNTAX);
    assert_int_equal(pl_gauges_of_loads(PL_STR("{\"loads\":[{\"dp_rank\":\"0\"}]}"), &set), 0);
}

static void nonsense_is_not_known(void **state)
{
    pl_engine *e = engine_of(1);
    assert_int_equal(pl_gauges_of_metrics(PL_STR("vllm:num_requests_running -1\n"
                                                 "vllm:num_requests_waiting NaN\n"
                                                 "vllm:kv_cache_usage_perc 25\n"
                                                 "sglang:page_size 0.5\n"
                                                 "sglang:max_total_num_tokens +Inf\n"
                                                 "vllm:cache_config_info{block_size=\"None\","
                                                 "num_gpu_blocks=\"7\"} 1\n"),
                                          &set),
                     0);
    assert_int_equal(pl_gauges_apply(&set, e, 9), 0);
    worker_is(&e->workers[0], -1, -1, -1);
    sizes_are(&e->workers[0], 0, 0);
    assert_int_equal(pl_gauges_of_metrics(PL_STR("vllm:num_requests_running{engine=\"x\"} 1\n"
                                                 "vllm:num_requests_running{engine=\"256\"} 1\n"
                                                 "vllm:num_requests_running{engine=\"0\" 1\n"),
                                          &set),
                     0);
    assert_int_equal(pl_gauges_of_metrics(PL_STR("<html>\n"), &set), PL_ESYNTAX);
    assert_int_equal(pl_gauges_of_metrics(PL_STR(""), &set), PL_ESYNTAX);
    /* a share may be read a little high */
    assert_int_equal(pl_gauges_of_metrics(PL_STR("sglang:token_usage 1.01\n"), &set), 1);
    assert_int_equal(pl_gauges_apply(&set, e, 9), 1);
    worker_is(&e->workers[0], -1, -1, 1);
    pl_engine_unref(e);

    /* several workers, but no rank told: the load is nobody's, the block size everybody's */
    e = engine_of(2);
    assert_int_equal(pl_gauges_of_metrics(PL_STR("sglang:num_running_reqs 9\nsglang:page_size 16\n"
                                                 "sglang:max_total_num_tokens 100\n"),
                                          &set),
                     1);
    assert_int_equal(pl_gauges_apply(&set, e, 9), 0);
    worker_is(&e->workers[1], -1, -1, -1);
    sizes_are(&e->workers[1], 16, 0);
    pl_engine_unref(e);
}

static void better_sources_of_the_block_size_win(void **state)
{
    pl_engine *e = engine_of(2);
    atomic_store(&e->workers[0].block_tokens, 64); /* by its events */
    atomic_store(&e->workers[0].kv_trust, PL_KV_LIVE);
    pl_gauges_of_metrics(pl_str_c(vllm_page), &set);
    assert_int_equal(pl_gauges_apply(&set, e, 77), 2);
    sizes_are(&e->workers[0], 64, 32000);
    sizes_are(&e->workers[1], 32, 96000);
    pl_engine_unref(e);

    const pl_engine_spec spec = {
        .url = PL_STR("http://10.0.0.1"), .weight = 1, .dp_size = 1, .block_tokens = 128};
    pl_errbuf eb;
    assert_int_equal(pl_engine_new(&spec, &e, &eb), 0);
    assert_int_equal(pl_gauges_apply(&set, e, 77), 1);
    sizes_are(&e->workers[0], 128, 128000);
    pl_engine_unref(e);
}

/* --- polling --- */

typedef struct test {
    world w;
    pl_fleet *fleet;
    pl_gauges *gauges;
    pl_engine *engine; /* the first; a reference of ours */
    pl_gauges_options o;
    const char *loads, *metrics; /* bodies; NULL: 404 */
    const char *status;          /* of what there is; NULL: silence */
    int asked_loads, asked_metrics;
} test;

static void respond(peer *p, const char *status, const char *body)
{
    char head[128];
    snprintf(head, sizeof head, "HTTP/1.1 %s X\r\nContent-Length: %zu\r\n\r\n", status,
             strlen(body));
    peer_send(p, head);
    peer_send(p, body);
}

static void answer(peer *p)
{
    test *t = p->world->test;
    if (!peer_has_head(p))
        return;
    char path[64] = "";
    sscanf(p->got, "GET %63s HTTP/1.1", path);
    peer_clear(p);
    bool loads = strncmp(path, "/v1/loads", 9) == 0;
    if (!loads)
        assert_string_equal(path, "/metrics");
    const char *body = loads ? t->loads : t->metrics;
    *(loads ? &t->asked_loads : &t->asked_metrics) += 1;
    if (!body)
        respond(p, "404", "");
    else if (t->status)
        respond(p, t->status, body);
}

static void publish(void *ctx, pl_view *v)
{
    test *t = ctx;
    pl_view_unref(v);
    pl_gauges_sync(t->gauges);
}

static pl_engine *add_engine(test *t, const char *name, pl_engine_kind kind)
{
    char url[64];
    pl_errbuf eb;
    pl_engine *e;
    snprintf(url, sizeof url, "http://127.0.0.1:%d", t->w.port);
    const pl_engine_spec spec = {
        .name = pl_str_c(name), .url = pl_str_c(url), .kind = kind, .weight = 1, .dp_size = 1};
    assert_int_equal(pl_fleet_add(t->fleet, &spec, &e, &eb), 0);
    return e;
}

static test *test_open(pl_engine_kind kind)
{
    test *t = calloc(1, sizeof *t);
    assert_non_null(t);
    pl_log_init(PL_LOG_ERROR, 0);
    world_open(&t->w);
    t->w.answer = answer;
    t->w.test = t;
    t->status = "200";
    t->fleet = pl_fleet_new(publish, t);
    assert_non_null(t->fleet);
    t->engine = add_engine(t, "a", kind);
    atomic_store(&t->engine->health, PL_HEALTH_UP);
    pl_gauges_options_default(&t->o);
    return t;
}

static void test_start(test *t)
{
    t->gauges = pl_gauges_start(&t->w.loop, &t->w.wheel, t->fleet, &t->o);
    assert_non_null(t->gauges);
}

static void test_close(test *t)
{
    pl_gauges_stop(t->gauges);
    pl_engine_unref(t->engine);
    world_close(&t->w);
    pl_fleet_free(t->fleet);
    free(t);
}

static const pl_worker_state *worker(const test *t)
{
    return &t->engine->workers[0];
}

static bool read_since(const test *t, uint64_t ns)
{
    return atomic_load(&worker(t)->gauges_at_ns) >= ns;
}

static void an_sglang_is_asked_for_its_loads(void **state)
{
    test *t = test_open(PL_KIND_SGLANG);
    t->loads = "{\"loads\":[{\"dp_rank\":0,\"num_running_reqs\":2,\"num_waiting_reqs\":1,"
               "\"token_usage\":0.5}]}";
    test_start(t);
    world_wait(&t->w, read_since(t, 1));
    worker_is(worker(t), 2, 1, 0.5);
    assert_int_equal(t->asked_metrics, 0);

    t->loads = "{\"loads\":[{\"dp_rank\":0,\"num_running_reqs\":7}]}";
    uint64_t now = pl_now_ns();
    world_advance(&t->w, 800); /* not yet, whatever the jitter */
    assert_int_equal(t->asked_loads, 1);
    world_advance(&t->w, 400);
    world_wait(&t->w, read_since(t, now));
    worker_is(worker(t), 7, -1, -1); /* no longer told: no longer known */
    assert_int_equal(t->asked_loads, 2);
    assert_int_equal(t->w.accepted, 1); /* on one connection */
    assert_int_equal(atomic_load(&t->engine->gauge_polls), 2);
    assert_int_equal(atomic_load(&t->engine->gauge_failures), 0);
    test_close(t);
}

static void without_loads_its_metrics(void **state)
{
    test *t = test_open(PL_KIND_SGLANG);
    t->metrics = "sglang:num_running_reqs 3\n";
    test_start(t);
    world_wait(&t->w, read_since(t, 1));
    worker_is(worker(t), 3, -1, -1);
    for (int i = 2; i < 5; i++) {
        world_advance(&t->w, 1200);
        world_wait(&t->w, t->asked_metrics == i);
        world_settle(&t->w);
    }
    assert_int_equal(t->asked_loads, 1); /* not each time */
    world_advance(&t->w, PL_GAUGES_AGAIN_MS);
    world_wait(&t->w, t->asked_loads == 2); /* but again after a while */
    test_close(t);
}

static void a_vllm_is_asked_for_its_metrics(void **state)
{
    test *t = test_open(PL_KIND_VLLM);
    t->loads = "{}";
    t->metrics = vllm_page;
    test_start(t);
    world_wait(&t->w, read_since(t, 1));
    assert_true(atomic_load(&worker(t)->running_requests) == 8);
    assert_int_equal(t->asked_loads, 0);
    test_close(t);
}

static void others_are_left_alone(void **state)
{
    test *t = test_open(PL_KIND_OTHER);
    t->metrics = vllm_page;
    test_start(t);
    for (int i = 0; i < 5; i++)
        world_advance(&t->w, 1200);
    assert_int_equal(t->w.accepted, 0);
    atomic_store(&t->engine->kind, PL_KIND_VLLM); /* as detection finds out */
    world_advance(&t->w, 1200);
    world_wait(&t->w, read_since(t, 1));
    test_close(t);
}

static void only_engines_that_are_up(void **state)
{
    test *t = test_open(PL_KIND_VLLM);
    t->metrics = vllm_page;
    atomic_store(&t->engine->health, PL_HEALTH_DOWN);
    test_start(t);
    world_advance(&t->w, 1200);
    assert_int_equal(t->w.accepted, 0);
    atomic_store(&t->engine->health, PL_HEALTH_UP);
    pl_gauges_wake(t->gauges, t->engine);
    world_wait(&t->w, read_since(t, 1));
    pl_gauges_wake(t->gauges, t->engine); /* twice is one question */
    pl_gauges_wake(t->gauges, t->engine);
    world_wait(&t->w, t->asked_metrics == 2);
    world_settle(&t->w);
    assert_int_equal(t->asked_metrics, 2);
    test_close(t);
}

/* What was told stays, and its time says how old it is. */
static void silence_makes_it_old_not_zero(void **state)
{
    test *t = test_open(PL_KIND_VLLM);
    t->metrics = vllm_page;
    test_start(t);
    world_wait(&t->w, read_since(t, 1));
    uint64_t at = atomic_load(&worker(t)->gauges_at_ns);
    static const char *const statuses[] = {NULL, "500", "200", "404"};
    for (int i = 0; i < 4; i++) {
        t->status = statuses[i];
        t->metrics = i == 2 ? "nothing:of_this 1\n" : vllm_page;
        int asked = t->asked_metrics;
        world_advance(&t->w, 1200);
        world_wait(&t->w, t->asked_metrics == asked + 1);
        world_settle(&t->w);
        world_advance(&t->w, i == 0 ? 1100 : 0); /* silence: until it is given up */
        world_settle(&t->w);
        if (i == 0)
            assert_int_equal(atomic_load(&t->engine->gauge_failures), 1);
        worker_is(worker(t), 8, 1, 0.625);
        assert_int_equal(atomic_load(&worker(t)->gauges_at_ns), at);
    }
    assert_int_equal(atomic_load(&t->engine->gauge_failures), 4);
    t->status = "200";
    t->metrics = vllm_page;
    world_advance(&t->w, 1200);
    world_settle(&t->w);
    assert_int_equal(atomic_load(&worker(t)->gauges_at_ns), at); /* it had none: asked rarely */
    world_advance(&t->w, PL_GAUGES_AGAIN_MS + PL_GAUGES_AGAIN_MS / 10);
    world_wait(&t->w, read_since(t, at + 1));
    test_close(t);
}

static void a_slow_engine_delays_nobody(void **state)
{
    test *t = test_open(PL_KIND_SGLANG); /* never answers its loads */
    pl_engine *fast = add_engine(t, "b", PL_KIND_VLLM);
    atomic_store(&fast->health, PL_HEALTH_UP);
    t->loads = "";
    t->metrics = vllm_page;
    t->status = NULL;
    test_start(t);
    world_wait(&t->w, t->asked_loads == 1 && t->asked_metrics == 1);
    t->status = "200";
    world_advance(&t->w, 1050); /* both are given up */
    world_settle(&t->w);
    for (int i = 2; i < 4; i++) {
        world_advance(&t->w, 1200);
        world_wait(&t->w, t->asked_metrics == i);
        t->status = "200";
        world_settle(&t->w);
    }
    assert_true(atomic_load(&fast->workers[0].running_requests) == 8);
    pl_engine_unref(fast);
    test_close(t);
}

static void engines_come_and_go(void **state)
{
    test *t = test_open(PL_KIND_VLLM);
    t->metrics = vllm_page;
    test_start(t);
    pl_engine *late = add_engine(t, "b", PL_KIND_VLLM);
    atomic_store(&late->health, PL_HEALTH_UP);
    world_wait(&t->w, read_since(t, 1));
    world_advance(&t->w, 1200);
    world_wait(&t->w, atomic_load(&late->workers[0].gauges_at_ns) && t->asked_metrics == 3);
    world_settle(&t->w);
    t->status = NULL; /* removed while it is being asked */
    int asked = t->asked_metrics;
    world_advance(&t->w, 1200);
    world_wait(&t->w, t->asked_metrics == asked + 2);
    assert_int_equal(pl_fleet_remove(t->fleet, late), 0);
    pl_engine_unref(late);
    world_advance(&t->w, 3600);
    world_settle(&t->w);
    assert_true(t->asked_metrics <= asked + 3); /* the other one */
    test_close(t);                              /* stops with a question under way */
}

static void an_interval_of_zero_is_off(void **state)
{
    test *t = test_open(PL_KIND_VLLM);
    t->metrics = vllm_page;
    t->o.interval_ms = 0;
    test_start(t);
    pl_gauges_sync(t->gauges);
    pl_gauges_wake(t->gauges, t->engine);
    world_advance(&t->w, 100000);
    assert_int_equal(t->w.accepted, 0);
    test_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(vllm_tells_by_engine_label),
        cmocka_unit_test(one_worker_gets_all_ranks_together),
        cmocka_unit_test(sglang_tells_with_both_prefixes),
        cmocka_unit_test(loads_tell_by_rank),
        cmocka_unit_test(nonsense_is_not_known),
        cmocka_unit_test(better_sources_of_the_block_size_win),
        cmocka_unit_test(an_sglang_is_asked_for_its_loads),
        cmocka_unit_test(without_loads_its_metrics),
        cmocka_unit_test(a_vllm_is_asked_for_its_metrics),
        cmocka_unit_test(others_are_left_alone),
        cmocka_unit_test(only_engines_that_are_up),
        cmocka_unit_test(silence_makes_it_old_not_zero),
        cmocka_unit_test(a_slow_engine_delays_nobody),
        cmocka_unit_test(engines_come_and_go),
        cmocka_unit_test(an_interval_of_zero_is_off),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
