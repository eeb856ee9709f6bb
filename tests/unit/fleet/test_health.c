/* Health checks and detection against scripted engines (peer.h), in virtual time. */
#include "../http/peer.h"

#include "../failing_alloc.h"
#include "base/log.h"
#include "fleet/health.h"

/* What the engine answers; a NULL status is silence, a NULL body a 404. */
typedef struct script {
    const char *health;                         /* status */
    const char *models, *server_info, *version; /* JSON */
    const char *old_info;                       /* of /get_server_info */
    const char *kind_status;                    /* of server_info and version; NULL: 200 */
    bool starve; /* the answer to /health has a body, and there is no memory for it */
    int asked_health, asked_models, asked_info, asked_old, asked_version;
} script;

typedef struct test {
    world w;
    script s;
    pl_fleet *fleet;
    pl_health_monitor *monitor;
    pl_health_options o;
    pl_engine *engine; /* the first; a reference of ours */
    int changes;
    int models_when_up; /* models in the fleet when `changed` said UP */
    bool stop_in_changed, remove_in_changed;
} test;

static void respond(peer *p, const char *status, const char *body)
{
    char head[128];
    if (!status)
        return;
    snprintf(head, sizeof head, "HTTP/1.1 %s X\r\nContent-Length: %zu\r\n\r\n", status,
             body ? strlen(body) : 0);
    peer_send(p, head);
    if (body)
        peer_send(p, body);
}

static void answer(peer *p)
{
    script *s = p->world->test;
    if (!peer_has_head(p))
        return;
    char path[32] = "";
    sscanf(p->got, "GET %31s HTTP/1.1", path);
    peer_clear(p);
    const char *kind_status = s->kind_status ? s->kind_status : "200";
    if (strcmp(path, "/health") == 0) {
        s->asked_health++;
        respond(p, s->health, s->starve ? "fine" : NULL);
        if (s->starve)
            failing_alloc_after(0);
    } else if (strcmp(path, "/v1/models") == 0) {
        s->asked_models++;
        respond(p, s->models ? "200" : "404", s->models);
    } else if (strcmp(path, "/server_info") == 0) {
        s->asked_info++;
        respond(p, s->server_info ? kind_status : "404", s->server_info);
    } else if (strcmp(path, "/get_server_info") == 0) {
        s->asked_old++;
        respond(p, s->old_info ? kind_status : "404", s->old_info);
    } else if (strcmp(path, "/version") == 0) {
        s->asked_version++;
        respond(p, s->version ? kind_status : "404", s->version);
    } else {
        fail_msg("asked for %s", path);
    }
}

static void publish(void *ctx, pl_view *v)
{
    test *t = ctx;
    pl_view_unref(v);
    if (t->monitor)
        pl_health_sync(t->monitor);
}

static int models_n(test *t)
{
    pl_arena a = PL_ARENA_INIT;
    pl_str *ids;
    int n = pl_fleet_models(t->fleet, t->engine, &a, &ids);
    pl_arena_free(&a);
    return n;
}

static bool has_model(test *t, const char *id)
{
    pl_view *v = pl_fleet_view(t->fleet);
    bool yes = pl_view_model(v, pl_str_c(id)) != NULL;
    pl_view_unref(v);
    return yes;
}

static void changed(void *ctx, pl_engine *e)
{
    test *t = ctx;
    t->changes++;
    if (atomic_load(&e->health) == PL_HEALTH_UP)
        t->models_when_up = models_n(t);
    if (t->remove_in_changed)
        pl_fleet_remove(t->fleet, e);
    if (t->stop_in_changed) {
        pl_health_stop(t->monitor);
        t->monitor = NULL;
    }
}

static pl_engine *add_engine(test *t, int port, pl_engine_spec spec)
{
    char url[64];
    pl_errbuf eb;
    pl_engine *e;
    snprintf(url, sizeof url, "http://127.0.0.1:%d", port);
    spec.url = pl_str_c(url);
    spec.weight = 1;
    spec.dp_size = 1;
    assert_int_equal(pl_fleet_add(t->fleet, &spec, &e, &eb), 0);
    return e;
}

static test *test_open_closed(pl_engine_spec spec)
{
    test *t = calloc(1, sizeof *t);
    assert_non_null(t);
    pl_log_init(PL_LOG_ERROR, 0);
    world_open_closed(&t->w);
    t->w.answer = answer;
    t->w.test = &t->s;
    t->s.health = "200";
    t->s.models = "{\"data\":[{\"id\":\"m\",\"owned_by\":\"vllm\"}]}";
    t->fleet = pl_fleet_new(publish, t);
    assert_non_null(t->fleet);
    pl_health_options_default(&t->o);
    t->engine = add_engine(t, t->w.port, spec);
    return t;
}

static test *test_open(pl_engine_spec spec)
{
    test *t = test_open_closed(spec);
    world_listen(&t->w);
    return t;
}

static void test_start(test *t)
{
    t->monitor = pl_health_start(&t->w.loop, &t->w.wheel, t->fleet, &t->o, changed, t);
    assert_non_null(t->monitor);
}

static void test_close(test *t)
{
    pl_health_stop(t->monitor);
    pl_engine_unref(t->engine);
    world_close(&t->w);
    pl_fleet_free(t->fleet);
    free(t);
}

static int health(const test *t)
{
    return atomic_load(&t->engine->health);
}

static uint64_t checks(const test *t)
{
    return atomic_load(&t->engine->health_checks);
}

/* Waits for the interval and the next check's end. */
static void next_check(test *t)
{
    uint64_t before = checks(t);
    world_advance(&t->w, 2300);
    world_wait(&t->w, checks(t) > before);
    world_settle(&t->w);
}

static void test_comes_up_with_its_models(void **state)
{
    (void)state;
    test *t = test_open((pl_engine_spec){0});
    t->s.models =
        "{\"object\":\"list\",\"data\":[{\"id\":\"base\",\"owned_by\":\"vllm\"},"
        "{\"id\":\"lora-a\",\"parent\":\"base\",\"owned_by\":\"vllm\"},{\"id\":\"base\"}]}";
    assert_int_equal(health(t), PL_HEALTH_UNKNOWN);
    test_start(t);
    assert_int_equal(t->changes, 0); /* never from inside */
    world_wait(&t->w, t->changes == 1);
    assert_int_equal(health(t), PL_HEALTH_UP);
    assert_int_equal(t->models_when_up, 2);
    pl_view *v = pl_fleet_view(t->fleet);
    assert_true(pl_view_model(v, PL_STR("lora-a"))->adapter);
    assert_false(pl_view_model(v, PL_STR("base"))->adapter);
    pl_view_unref(v);
    assert_true(has_model(t, "base"));
    assert_true(has_model(t, "lora-a"));
    assert_int_equal(atomic_load(&t->engine->kind), PL_KIND_VLLM);
    assert_int_equal(checks(t), 1);
    assert_int_equal(atomic_load(&t->engine->health_failures), 0);
    assert_int_equal(t->s.asked_info + t->s.asked_version, 0);
    test_close(t);
}

static void test_kinds(void **state)
{
    (void)state;
    static const char plain[] = "{\"data\":[{\"id\":\"m\",\"owned_by\":\"me\"}]}";
    static const struct {
        pl_engine_kind given;
        const char *models, *server_info, *version, *status;
        pl_engine_kind want;
        int models_n;
    } rows[] = {
        {PL_KIND_AUTO, "{\"data\":[{\"id\":\"m\",\"owned_by\":\"sglang\"}]}", NULL, NULL, NULL,
         PL_KIND_SGLANG, 1},
        {PL_KIND_AUTO, plain, "{\"model_path\":\"/m\",\"tp_size\":1}", "{\"version\":\"1\"}", NULL,
         PL_KIND_SGLANG, 1},
        {PL_KIND_AUTO, plain, "{\"vllm_config\":{}}", "{\"version\":\"0.9\"}", NULL, PL_KIND_VLLM,
         1},
        {PL_KIND_AUTO, plain, NULL, "{\"version\":\"0.9\"}", NULL, PL_KIND_VLLM, 1},
        {PL_KIND_AUTO, plain, NULL, "[\"version\"]", NULL, PL_KIND_OTHER, 1},
        {PL_KIND_AUTO, plain, "{\"model_path\":7,\"tp_size\":1}", "no JSON", NULL, PL_KIND_OTHER,
         1},
        {PL_KIND_AUTO, plain, NULL, NULL, NULL, PL_KIND_OTHER, 1},
        {PL_KIND_AUTO, plain, "busy", "busy", "503", PL_KIND_AUTO, 1}, /* not told: open */
        {PL_KIND_AUTO, NULL, NULL, "{\"version\":\"1\"}", NULL, PL_KIND_OTHER, 0},
        {PL_KIND_AUTO, "{\"data\":[]}", NULL, NULL, NULL, PL_KIND_OTHER, 0},
        {PL_KIND_VLLM, "{\"data\":[{\"id\":\"m\",\"owned_by\":\"sglang\"}]}", NULL, NULL, NULL,
         PL_KIND_VLLM, 1},
        {PL_KIND_SGLANG, NULL, NULL, NULL, NULL, PL_KIND_SGLANG, 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        test *t = test_open((pl_engine_spec){.kind = rows[i].given});
        t->s.models = rows[i].models;
        t->s.server_info = rows[i].server_info;
        t->s.version = rows[i].version;
        t->s.kind_status = rows[i].status;
        test_start(t);
        world_wait(&t->w, t->changes == 1);
        if (atomic_load(&t->engine->kind) != (int)rows[i].want || models_n(t) != rows[i].models_n)
            fail_msg("row %zu: kind %d, %d models", i, atomic_load(&t->engine->kind), models_n(t));
        assert_int_equal(health(t), PL_HEALTH_UP);
        test_close(t);
    }
}

#define SGLANG "{\"data\":[{\"id\":\"m\",\"owned_by\":\"sglang\"}]}"
#define INFO   "{\"model_path\":\"/m\",\"tp_size\":1"

static uint32_t caps(const test *t)
{
    return atomic_load(&t->engine->caps);
}

static void test_what_an_engine_can_do(void **state)
{
    (void)state;
    static const char plain[] = "{\"data\":[{\"id\":\"m\",\"owned_by\":\"me\"}]}";
    static const struct {
        pl_engine_kind given;
        const char *models, *info, *old_info, *version;
        uint32_t want;
    } rows[] = {
        {PL_KIND_AUTO, SGLANG, INFO "}", NULL, NULL, PL_CAP_SESSIONS},
        {PL_KIND_AUTO, plain, INFO ",\"enable_streaming_session\":true}", NULL, NULL,
         PL_CAP_SESSIONS | PL_CAP_STREAMING_SESSIONS},
        {PL_KIND_SGLANG, plain, INFO ",\"enable_session_radix_cache\":true}", NULL, NULL,
         PL_CAP_SESSIONS | PL_CAP_SESSION_TAG},
        {PL_KIND_SGLANG, NULL, INFO ",\"enable_priority_scheduling\":true}", NULL, NULL,
         PL_CAP_SESSIONS | PL_CAP_PRIORITY},
        {PL_KIND_AUTO, SGLANG,
         INFO ",\"enable_streaming_session\":false,\"perilune_engine\":{\"retention\":true}}", NULL,
         NULL, PL_CAP_SESSIONS | PL_CAP_RETENTION},
        /* what is not plainly true is not there */
        {PL_KIND_AUTO, SGLANG,
         INFO ",\"enable_streaming_session\":\"true\",\"perilune_engine\":{\"retention\":1}}", NULL,
         NULL, PL_CAP_SESSIONS},
        {PL_KIND_AUTO, SGLANG, NULL, INFO ",\"enable_streaming_session\":true}", NULL,
         PL_CAP_SESSIONS | PL_CAP_STREAMING_SESSIONS},
        {PL_KIND_AUTO, SGLANG, NULL, NULL, NULL, PL_CAP_SESSIONS},
        {PL_KIND_AUTO, SGLANG, "[]", NULL, NULL, PL_CAP_SESSIONS},
        {PL_KIND_VLLM, SGLANG, INFO ",\"enable_streaming_session\":true}", NULL, NULL, 0},
        {PL_KIND_AUTO, plain, NULL, NULL, "{\"version\":\"0.9\"}", 0},
        {PL_KIND_AUTO, plain, NULL, NULL, NULL, 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        test *t = test_open((pl_engine_spec){.kind = rows[i].given});
        t->s.models = rows[i].models;
        t->s.server_info = rows[i].info;
        t->s.old_info = rows[i].old_info;
        t->s.version = rows[i].version;
        test_start(t);
        world_wait(&t->w, t->changes == 1);
        if (caps(t) != rows[i].want)
            fail_msg("row %zu: %u", i, caps(t));
        test_close(t);
    }
}

/* Two detect intervals at most. */
#define checks_until(t, condition)                                                                 \
    do {                                                                                           \
        for (int i_ = 0; i_ < 28 && !(condition); i_++)                                            \
            next_check(t);                                                                         \
        assert_true(condition);                                                                    \
    } while (0)

/* An engine that was started anew with the flag, or without it, is noticed. */
static void test_what_it_can_do_is_asked_for_again(void **state)
{
    (void)state;
    test *t = test_open((pl_engine_spec){0});
    t->s.models = SGLANG;
    t->s.server_info = INFO "}";
    test_start(t);
    world_wait(&t->w, health(t) == PL_HEALTH_UP);
    assert_int_equal(caps(t), PL_CAP_SESSIONS);
    t->s.server_info = INFO ",\"enable_streaming_session\":true}";
    checks_until(t, caps(t) == (PL_CAP_SESSIONS | PL_CAP_STREAMING_SESSIONS));
    /* an open was refused: only until the next answer */
    atomic_fetch_and(&t->engine->caps, ~(uint32_t)PL_CAP_STREAMING_SESSIONS);
    checks_until(t, caps(t) & PL_CAP_STREAMING_SESSIONS);
    /* no answer: what was known stays */
    int asked = t->s.asked_info;
    t->s.server_info = "busy";
    t->s.kind_status = "503";
    checks_until(t, t->s.asked_info > asked);
    next_check(t);
    assert_int_equal(caps(t), PL_CAP_SESSIONS | PL_CAP_STREAMING_SESSIONS);
    assert_int_equal(health(t), PL_HEALTH_UP);
    test_close(t);
}

static void test_rise_and_fall(void **state)
{
    (void)state;
    test *t = test_open((pl_engine_spec){0});
    t->o.rise = 2;
    t->o.fall = 3;
    test_start(t);
    world_wait(&t->w, checks(t) == 1);
    world_settle(&t->w);
    assert_int_equal(health(t), PL_HEALTH_UNKNOWN);
    next_check(t);
    world_wait(&t->w, health(t) == PL_HEALTH_UP);
    t->s.health = "503";
    next_check(t);
    next_check(t);
    assert_int_equal(health(t), PL_HEALTH_UP);
    t->s.health = "204";
    next_check(t); /* any good answer starts the count again */
    t->s.health = "503";
    next_check(t);
    next_check(t);
    assert_int_equal(health(t), PL_HEALTH_UP);
    next_check(t);
    assert_int_equal(health(t), PL_HEALTH_DOWN);
    assert_int_equal(t->changes, 2);
    assert_int_equal(atomic_load(&t->engine->health_failures), 5);
    assert_true(has_model(t, "m")); /* the last known ones are kept */
    t->s.health = "200";
    next_check(t);
    assert_int_equal(health(t), PL_HEALTH_DOWN);
    next_check(t);
    world_wait(&t->w, health(t) == PL_HEALTH_UP);
    assert_int_equal(t->changes, 3);
    assert_int_equal(t->w.accepted, 1); /* all over one connection */
    test_close(t);
}

static void test_the_routers_own_lack_is_no_failure(void **state)
{
    (void)state;
    test *t = test_open((pl_engine_spec){0});
    test_start(t);
    world_wait(&t->w, health(t) == PL_HEALTH_UP);
    t->s.starve = true;
    for (int i = 0; i < 4; i++) {
        next_check(t);
        failing_alloc_after(-1);
    }
    assert_int_equal(checks(t), 5);
    assert_int_equal(health(t), PL_HEALTH_UP);
    assert_int_equal(atomic_load(&t->engine->health_failures), 0);
    t->s.starve = false;
    t->s.health = "503";
    next_check(t);
    next_check(t);
    assert_int_equal(health(t), PL_HEALTH_DOWN);
    test_close(t);
}

static void test_first_failure_is_down(void **state)
{
    (void)state;
    test *t = test_open((pl_engine_spec){0});
    t->s.health = NULL; /* silence */
    test_start(t);
    world_wait(&t->w, t->s.asked_health == 1);
    world_advance(&t->w, 1900);
    assert_int_equal(health(t), PL_HEALTH_UNKNOWN);
    world_advance(&t->w, 200); /* a timeout is a failure */
    assert_int_equal(health(t), PL_HEALTH_DOWN);
    assert_int_equal(t->changes, 1);
    test_close(t);
}

static void test_engine_that_refuses_and_comes(void **state)
{
    (void)state;
    test *t = test_open_closed((pl_engine_spec){0});
    test_start(t);
    world_wait(&t->w, health(t) == PL_HEALTH_DOWN);
    world_listen(&t->w);
    next_check(t);
    world_wait(&t->w, health(t) == PL_HEALTH_UP);
    test_close(t);
}

static void test_recovery_half_opens_the_breaker(void **state)
{
    (void)state;
    test *t = test_open((pl_engine_spec){0});
    test_start(t);
    world_wait(&t->w, health(t) == PL_HEALTH_UP);
    for (uint32_t i = 0; i < pl_breaker_default.failures; i++)
        pl_breaker_failure(t->engine, &pl_breaker_default, 1, false);
    assert_int_equal(atomic_load(&t->engine->breaker), PL_BREAKER_OPEN);
    t->s.health = "500";
    next_check(t);
    assert_int_equal(atomic_load(&t->engine->breaker), PL_BREAKER_OPEN);
    t->s.health = "200";
    next_check(t);
    assert_int_equal(atomic_load(&t->engine->breaker), PL_BREAKER_HALF_OPEN);
    test_close(t);
}

static void test_models_are_asked_for_again(void **state)
{
    (void)state;
    test *t = test_open((pl_engine_spec){0});
    test_start(t);
    world_wait(&t->w, health(t) == PL_HEALTH_UP);
    t->s.models = "{\"data\":[{\"id\":\"n\",\"owned_by\":\"vllm\"}]}";
    for (int i = 0; i < 12; i++)
        next_check(t);
    assert_true(has_model(t, "m")); /* 27.6 s */
    assert_int_equal(t->s.asked_models, 1);
    next_check(t);
    next_check(t);
    world_wait(&t->w, has_model(t, "n"));
    assert_false(has_model(t, "m"));
    assert_int_equal(t->changes, 1);
    test_close(t);
}

static void test_configured_models_stay(void **state)
{
    (void)state;
    static const pl_str mine[] = {PL_STR_INIT("mine")};
    test *t = test_open((pl_engine_spec){.models = mine, .models_n = 1});
    test_start(t);
    world_wait(&t->w, health(t) == PL_HEALTH_UP);
    assert_true(has_model(t, "mine"));
    assert_false(has_model(t, "m"));
    test_close(t);
}

/* What an engine may not do to us; it is up all the same, and is asked again. */
static void test_useless_answers(void **state)
{
    (void)state;
    pl_buf big = {0}, deep = {0};
    assert_int_equal(pl_buf_addf(&big, "{\"data\":["), 0);
    for (int i = 0; i < 30000; i++)
        assert_int_equal(pl_buf_addf(&big, "{\"id\":\"a-model-with-a-long-name-%d\"},", i), 0);
    assert_int_equal(pl_buf_addf(&big, "{}]}"), 0);
    assert_true(big.n > 1 << 20);
    for (int i = 0; i < 100000; i++)
        assert_int_equal(pl_buf_add(&deep, "[", 2 - (i < 99999)), 0);
    const char *const bad[] = {"",     "{",   "[]",   "{\"data\":{}}",
                               "null", big.p, deep.p, "{\"data\":[{\"id\":\"\\ud800\"}]}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        test *t = test_open((pl_engine_spec){0});
        t->s.models = bad[i];
        test_start(t);
        world_wait(&t->w, health(t) == PL_HEALTH_UP);
        assert_int_equal(models_n(t), 0);
        assert_int_equal(atomic_load(&t->engine->kind), PL_KIND_AUTO);
        t->s.models = "{\"data\":[{\"id\":\"m\",\"owned_by\":\"sglang\"}]}";
        next_check(t);
        world_wait(&t->w, has_model(t, "m"));
        assert_int_equal(atomic_load(&t->engine->kind), PL_KIND_SGLANG);
        assert_int_equal(t->changes, 1);
        test_close(t);
    }
    pl_buf_free(&big);
    pl_buf_free(&deep);
}

static void test_ids_are_bounded(void **state)
{
    (void)state;
    pl_buf b = {0};
    assert_int_equal(pl_buf_addf(&b,
                                 "{\"data\":[{\"id\":\"\"},{\"id\":7},3,{\"id\":\"a\\nb\"},"
                                 "{\"id\":\"%0256d\"},{\"id\":\"%0257d\"}",
                                 0, 0),
                     0);
    for (int i = 0; i < 1100; i++)
        assert_int_equal(pl_buf_addf(&b, ",{\"id\":\"m%d\",\"owned_by\":\"vllm\"}", i), 0);
    assert_int_equal(pl_buf_add(&b, "]}", 3), 0);
    test *t = test_open((pl_engine_spec){0});
    t->s.models = b.p;
    test_start(t);
    world_wait(&t->w, health(t) == PL_HEALTH_UP);
    assert_int_equal(models_n(t), 1024);
    assert_true(has_model(t, "m1022"));
    assert_false(has_model(t, "m1023"));
    assert_false(has_model(t, "a\nb"));
    test_close(t);
    pl_buf_free(&b);
}

static void test_engines_come_and_go(void **state)
{
    (void)state;
    test *t = test_open((pl_engine_spec){0});
    test_start(t);
    world_wait(&t->w, health(t) == PL_HEALTH_UP);
    pl_engine *second = add_engine(t, t->w.port, (pl_engine_spec){.name = PL_STR("second")});
    world_wait(&t->w, atomic_load(&second->health) == PL_HEALTH_UP); /* checked at once */
    assert_int_equal(pl_fleet_remove(t->fleet, second), 0);
    world_wait(&t->w, t->w.gone == 1); /* its connection is closed */
    uint64_t asked = atomic_load(&second->health_checks);
    next_check(t);
    next_check(t);
    assert_int_equal(atomic_load(&second->health_checks), asked);
    pl_engine_unref(second);
    /* gone while a check is under way */
    t->s.health = NULL;
    pl_engine *third = add_engine(t, t->w.port, (pl_engine_spec){.name = PL_STR("third")});
    assert_int_equal(pl_fleet_remove(t->fleet, third), 0);
    pl_engine_unref(third);
    world_settle(&t->w);
    test_close(t);
}

static void test_changed_may_remove_and_stop(void **state)
{
    (void)state;
    for (int i = 0; i < 6; i++) {
        test *t = test_open((pl_engine_spec){0});
        t->stop_in_changed = i % 3 != 0;
        t->remove_in_changed = i % 3 != 1;
        if (i >= 3)
            t->s.health = "500";
        test_start(t);
        world_wait(&t->w, t->changes == 1);
        world_advance(&t->w, 5000);
        assert_int_equal(checks(t), 1);
        test_close(t);
    }
}

/* The next check comes within 10 % of the interval, and not always at the same time. */
static void test_interval_is_spread(void **state)
{
    (void)state;
    test *t = test_open((pl_engine_spec){0});
    test_start(t);
    world_wait(&t->w, health(t) == PL_HEALTH_UP);
    uint64_t least = UINT64_MAX, most = 0;
    for (int i = 0; i < 40; i++) {
        uint64_t from = t->w.now_ms;
        int asked = t->s.asked_health;
        while (t->s.asked_health == asked) {
            assert_true(t->w.now_ms - from <= 2240); /* a tick's rounding included */
            world_advance(&t->w, 20);
        }
        uint64_t took = t->w.now_ms - from;
        world_settle(&t->w);
        least = took < least ? took : least;
        most = took > most ? took : most;
    }
    assert_true(least >= 1800);
    assert_true(most - least >= 60);
    test_close(t);
}

static void test_path_is_checked(void **state)
{
    (void)state;
    test *t = test_open((pl_engine_spec){0});
    t->o.path = PL_STR("health");
    assert_null(pl_health_start(&t->w.loop, &t->w.wheel, t->fleet, &t->o, changed, t));
    test_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_comes_up_with_its_models),
        cmocka_unit_test(test_kinds),
        cmocka_unit_test(test_what_an_engine_can_do),
        cmocka_unit_test(test_what_it_can_do_is_asked_for_again),
        cmocka_unit_test(test_rise_and_fall),
        cmocka_unit_test(test_the_routers_own_lack_is_no_failure),
        cmocka_unit_test(test_first_failure_is_down),
        cmocka_unit_test(test_engine_that_refuses_and_comes),
        cmocka_unit_test(test_recovery_half_opens_the_breaker),
        cmocka_unit_test(test_models_are_asked_for_again),
        cmocka_unit_test(test_configured_models_stay),
        cmocka_unit_test(test_useless_answers),
        cmocka_unit_test(test_ids_are_bounded),
        cmocka_unit_test(test_engines_come_and_go),
        cmocka_unit_test(test_changed_may_remove_and_stop),
        cmocka_unit_test(test_interval_is_spread),
        cmocka_unit_test(test_path_is_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
