/* The embedding API: several routers in one process, and what of the process they leave alone. */
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <arpa/inet.h>
#include <cmocka.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "perilune.h"
#include "router.h"

#define CONFIG "{\"listen\":\"127.0.0.1:0\",\"admin\":{\"listen\":\"127.0.0.1:0\"},\"threads\":2}"

static pl_router *started(void)
{
    char error[256] = "";
    pl_router *r = NULL;
    if (pl_router_new(CONFIG, &r, error, sizeof error) != 0 ||
        pl_router_start(r, error, sizeof error) != 0)
        fail_msg("%s", error);
    return r;
}

static void *run(void *router)
{
    return (void *)(intptr_t)pl_router_run(router);
}

/* The status of GET /health there, 0 when nobody answers. */
static int health(int port)
{
    static const char request[] = "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons((uint16_t)port),
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    char answer[64] = "";
    int status = 0, fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&a, sizeof a) == 0 &&
        send(fd, request, sizeof request - 1, MSG_NOSIGNAL) == (ssize_t)sizeof request - 1 &&
        recv(fd, answer, sizeof answer - 1, MSG_WAITALL) > 0)
        sscanf(answer, "HTTP/1.1 %d", &status);
    close(fd);
    return status;
}

static void several_run_beside_each_other(void **state)
{
    pl_router *r[2] = {started(), started()};
    pthread_t thread[2];
    assert_int_not_equal(pl_router_port(r[0]), pl_router_port(r[1]));
    for (int i = 0; i < 2; i++)
        pthread_create(&thread[i], NULL, run, r[i]);
    for (int i = 0; i < 2; i++)
        assert_int_equal(health(pl_router_port(r[i])), 200);
    for (int i = 0; i < 2; i++) {
        void *code;
        pl_router_stop(r[i]);
        pthread_join(thread[i], &code);
        assert_int_equal((intptr_t)code, 0);
        pl_router_free(r[i]);
        if (i == 0)
            assert_int_equal(health(pl_router_port(r[1])), 200);
    }
}

static void signals_stay_the_programs(void **state)
{
    static const int numbers[] = {SIGTERM, SIGINT, SIGHUP, SIGPIPE};
    pl_router *r = started();
    pthread_t thread;
    pthread_create(&thread, NULL, run, r);
    assert_int_equal(health(pl_router_port(r)), 200);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        struct sigaction now;
        sigaction(numbers[i], NULL, &now);
        assert_true(now.sa_handler == SIG_DFL);
    }
    pl_router_stop(r);
    pthread_join(thread, NULL);
    pl_router_free(r);
}

static void signals_are_taken_when_asked_and_given_back(void **state)
{
    char error[256] = "";
    pl_router *r = NULL;
    assert_int_equal(pl_router_new(CONFIG, &r, error, sizeof error), 0);
    assert_int_equal(pl_router_take_signals(r), 0);
    assert_int_equal(pl_router_start(r, error, sizeof error), 0);
    raise(SIGTERM); /* before it runs: not missed */
    assert_int_equal(pl_router_run(r), 0);
    pl_router_free(r);
    struct sigaction now;
    sigaction(SIGTERM, NULL, &now);
    assert_true(now.sa_handler == SIG_DFL);
}

static void freed_without_having_run(void **state)
{
    pl_router_free(started());
    pl_router *r = started();
    pl_router_stop(r); /* asked for, never heard */
    pl_router_free(r);
}

/* As in tests/tsan.supp: TSan does not see libuv close its descriptors. */
const char *__tsan_default_suppressions(void);
const char *__tsan_default_suppressions(void)
{
    return "race:^open_files$\n";
}

typedef struct scraper {
    int port;
    atomic_int answers;
    pthread_t thread;
} scraper;

/* Asks for /metrics over one connection after another until nobody listens any more. */
static void *scrape(void *ctx)
{
    static const char request[] = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
    scraper *s = ctx;
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons((uint16_t)s->port),
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    for (bool there = true; there;) {
        char answer[65536];
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        there = connect(fd, (struct sockaddr *)&a, sizeof a) == 0;
        for (int i = 0; there && i < 50; i++) {
            if (send(fd, request, sizeof request - 1, MSG_NOSIGNAL) < 0 ||
                recv(fd, answer, sizeof answer, 0) <= 0)
                break;
            atomic_fetch_add(&s->answers, 1);
        }
        close(fd);
    }
    return NULL;
}

/* Without a drain: one loop renders the counters of another that is on its way out. */
static void freed_while_its_metrics_are_read(void **state)
{
    for (int round = 0; round < 5; round++) {
        pl_router *r = started();
        scraper s[4];
        for (int i = 0; i < 4; i++) {
            s[i].port = pl_router_port(r);
            atomic_init(&s[i].answers, 0);
            pthread_create(&s[i].thread, NULL, scrape, &s[i]);
        }
        for (int i = 0; i < 4; i++)
            while (atomic_load(&s[i].answers) < 3)
                sched_yield();
        pl_router_free(r);
        for (int i = 0; i < 4; i++)
            pthread_join(s[i].thread, NULL);
    }
}

/* Downwards: a loop that libuv cannot make costs it a file for good. */
static void too_few_files_are_an_error(void **state)
{
    struct rlimit before;
    int good = 0, bad = 0;
    getrlimit(RLIMIT_NOFILE, &before);
    for (rlim_t n = 64; n >= 4; n--) {
        char error[256] = "";
        pl_router *r = NULL;
        setrlimit(RLIMIT_NOFILE, &(struct rlimit){n, before.rlim_max});
        int rc = pl_router_new(CONFIG, &r, error, sizeof error);
        if (rc == 0)
            rc = pl_router_take_signals(r);
        if (rc == 0)
            rc = pl_router_start(r, error, sizeof error);
        assert_true(rc <= 0);
        good += rc == 0;
        bad += rc < 0;
        pl_router_free(r);
    }
    setrlimit(RLIMIT_NOFILE, &before);
    assert_true(good > 0 && bad > 10);
}

/* The lines that starting and stopping with this configuration writes. */
static void what_it_logs(const char *config, char *out, size_t cap)
{
    char error[256] = "";
    pl_router *r = NULL;
    FILE *log = tmpfile();
    int own = dup(2);
    fflush(stderr);
    dup2(fileno(log), 2);
    int rc = pl_router_new(config, &r, error, sizeof error);
    if (rc == 0)
        rc = pl_router_start(r, error, sizeof error);
    pl_router_free(r);
    dup2(own, 2);
    close(own);
    rewind(log);
    out[fread(out, 1, cap - 1, log)] = 0;
    fclose(log);
    assert_int_equal(rc, 0);
}

static void the_log_key_counts(void **state)
{
    static const char form[] = "{\"listen\":\"127.0.0.1:0\",\"admin\":{\"listen\":\"off\"},"
                               "\"threads\":1,\"log\":{\"level\":\"%s\",\"json\":false}}";
    char config[256], text[4096];
    snprintf(config, sizeof config, form, "error");
    what_it_logs(config, text, sizeof text);
    assert_string_equal(text, "");
    snprintf(config, sizeof config, form, "info");
    what_it_logs(config, text, sizeof text);
    assert_non_null(strstr(text, "info  listening: http://127.0.0.1:"));
}

static void put_config(const char *path, const char *policy)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fprintf(f, "return { listen = '127.0.0.1:0', admin = { listen = 'off' }, policy = '%s' }\n",
            policy);
    assert_int_equal(fclose(f), 0);
}

/* What a SIGHUP was sent for is not lost because another reload is under way. */
static void sighup_during_a_reload_counts(void **state)
{
    char path[] = "/tmp/pl_router_XXXXXX", error[256] = "";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    put_config(path, "least_loaded");
    pl_config c;
    pl_errbuf eb = {""};
    pl_router *r = NULL;
    assert_int_equal(pl_config_init(&c), 0);
    if (pl_config_file(&c, path, &eb) != 0 || pl_config_finish(&c, &eb) != 0 ||
        pl_router_create(&c, &r, &eb) != 0 || pl_router_start(r, error, sizeof error) != 0)
        fail_msg("%s%s", eb.text, error);
    /* nobody runs the control loop, so this one cannot end before the signal comes */
    assert_int_equal(pl_router_reload(r, PL_STR("round_robin"), NULL, NULL, NULL), 0);
    assert_non_null(r->reload);
    put_config(path, "random");
    pl_router_reconcile(r);
    while (r->reload || r->reconcile_again)
        uv_run(&r->control, UV_RUN_ONCE);
    assert_string_equal(r->policy.name, "random");
    assert_int_equal(atomic_load(&r->policy.reloads), 2);
    pl_router_free(r);
    unlink(path);
}

static void a_bad_configuration_says_why(void **state)
{
    char error[256] = "";
    pl_router *r = (pl_router *)(intptr_t)1;
    assert_true(pl_router_new("{\"listen\":\"nowhere\"}", &r, error, sizeof error) < 0);
    assert_null(r);
    assert_non_null(strstr(error, "listen"));
    assert_true(pl_router_new("{", &r, error, sizeof error) < 0);
    assert_true(pl_router_new("{", &r, NULL, 0) < 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(several_run_beside_each_other),
        cmocka_unit_test(signals_stay_the_programs),
        cmocka_unit_test(signals_are_taken_when_asked_and_given_back),
        cmocka_unit_test(freed_without_having_run),
        cmocka_unit_test(freed_while_its_metrics_are_read),
        cmocka_unit_test(too_few_files_are_an_error),
        cmocka_unit_test(sighup_during_a_reload_counts),
        cmocka_unit_test(a_bad_configuration_says_why),
        cmocka_unit_test(the_log_key_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
