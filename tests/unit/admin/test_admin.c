/* The admin API of a real router on a free port, asked over plain sockets and by `perilune reload`.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "admin/reload_cli.h"
#include "router.h"

/* --- a router and a client --- */

typedef struct fixture {
    pl_router *router;
    uv_thread_t thread;
    int exit_code;
    char folder[64];
    const char *host; /* of requests */
} fixture;

static void run(void *arg)
{
    fixture *f = arg;
    f->exit_code = pl_router_run(f->router);
}

static void start(fixture *f, const char *config)
{
    char error[1024] = "";
    f->host = "127.0.0.1:8001";
    strcpy(f->folder, "/tmp/perilune-admin-XXXXXX");
    assert_non_null(mkdtemp(f->folder));
    if (pl_router_new(config, &f->router, error, sizeof error) != 0 ||
        pl_router_start(f->router, error, sizeof error) != 0)
        fail_msg("%s", error);
    assert_int_equal(uv_thread_create(&f->thread, run, f), 0);
}

static void stop(fixture *f)
{
    char command[128];
    pl_router_stop(f->router);
    uv_thread_join(&f->thread);
    pl_router_free(f->router);
    assert_int_equal(f->exit_code, 0);
    snprintf(command, sizeof command, "rm -r %s", f->folder);
    assert_int_equal(system(command), 0);
}

#define PLAIN                                                                                      \
    "{\"listen\":\"127.0.0.1:0\",\"admin\":{\"listen\":\"127.0.0.1:0\"},\"threads\":2,"            \
    "\"log\":{\"level\":\"error\"}}"
#define WITH_TOKEN                                                                                 \
    "{\"listen\":\"127.0.0.1:0\",\"admin\":{\"listen\":\"127.0.0.1:0\",\"token\":\"sesame\"},"     \
    "\"threads\":1,\"metrics\":{\"admin\":false},\"log\":{\"level\":\"error\"}}"

typedef struct answer {
    int status;
    char text[65536]; /* head and body */
    json_t *json;     /* of the body, when it is JSON */
} answer;

/* One request on a connection of its own. */
static void ask(fixture *f, answer *a, const char *method, const char *target, const char *headers,
                const char *body)
{
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)pl_router_admin_port(f->router)),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    char request[4096];
    int n = snprintf(request, sizeof request,
                     "%s %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n%sContent-Length: "
                     "%zu\r\n\r\n%s",
                     method, target, f->host, headers, strlen(body), body);
    assert_true(n > 0 && (size_t)n < sizeof request);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(fd >= 0 && connect(fd, (struct sockaddr *)&to, sizeof to) == 0);
    assert_int_equal(write(fd, request, (size_t)n), n);
    size_t got = 0;
    ssize_t r;
    while ((r = read(fd, a->text + got, sizeof a->text - 1 - got)) > 0)
        got += (size_t)r;
    close(fd);
    a->text[got] = 0;
    const char *end = strstr(a->text, "\r\n\r\n");
    assert_non_null(end);
    assert_int_equal(sscanf(a->text, "HTTP/1.1 %d", &a->status), 1);
    a->json = json_loads(end + 4, JSON_DECODE_ANY, NULL);
}

/* Asks and expects a status; the JSON is the caller's. */
static json_t *expect(fixture *f, int status, const char *method, const char *target,
                      const char *body)
{
    answer a;
    ask(f, &a, method, target, "", body);
    if (a.status != status)
        fail_msg("%s %s: expected %d, got: %s", method, target, status, a.text);
    assert_non_null(a.json);
    return a.json;
}

static const char *text(const json_t *j, const char *key)
{
    const char *s = json_string_value(json_object_get(j, key));
    return s ? s : "(none)";
}

/* An error answer: its code, and a part of its message. */
static void refused(fixture *f, int status, const char *method, const char *target,
                    const char *body, const char *code, const char *part)
{
    json_t *j = expect(f, status, method, target, body);
    const json_t *e = json_object_get(j, "error");
    assert_string_equal(text(e, "code"), code);
    if (!strstr(text(e, "message"), part))
        fail_msg("'%s' is not in: %s", part, text(e, "message"));
    json_decref(j);
}

/* A policy file in the fixture's folder. */
static void policy_file(const fixture *f, const char *lua, char path[128])
{
    snprintf(path, 128, "%s/policy.lua", f->folder);
    FILE *out = fopen(path, "w");
    assert_non_null(out);
    fputs(lua, out);
    fclose(out);
}

static const char good[] = "return { api = 1, name = 'mine', params = { k = 1 },\n"
                           "  score = function(req, w, st) return w.inflight * st.k end }\n";
static const char bad[] = "local p = { api = 1, name = 'mine' }\n"
                          "error('no good')\n"
                          "return p\n";

/* --- engines --- */

static void test_engines(void **state)
{
    fixture f;
    start(&f, PLAIN);
    json_t *j = expect(&f, 200, "GET", "/engines", "");
    assert_int_equal(json_array_size(json_object_get(j, "engines")), 0);
    json_decref(j);

    j = expect(&f, 201, "POST", "/engines",
               "{\"name\":\"ada\",\"url\":\"http://127.0.0.1:1\",\"weight\":2,\"dp_size\":2,"
               "\"max_inflight\":8,\"models\":[\"m\"]}");
    assert_string_equal(text(j, "name"), "ada");
    assert_string_equal(text(j, "url"), "http://127.0.0.1:1");
    assert_string_equal(text(j, "state"), "active");
    assert_string_equal(text(j, "breaker"), "closed");
    assert_int_equal(json_integer_value(json_object_get(j, "max_inflight")), 8);
    assert_true(json_is_null(json_object_get(j, "max_queued_prefill_tokens")));
    assert_string_equal(json_string_value(json_array_get(json_object_get(j, "models"), 0)), "m");
    const json_t *workers = json_object_get(j, "workers");
    assert_int_equal(json_array_size(workers), 2);
    assert_string_equal(text(json_array_get(workers, 1), "name"), "ada/1");
    json_decref(j);

    j = expect(&f, 201, "POST", "/engines", "{\"url\":\"http://[::1]:1\"}");
    assert_string_equal(text(j, "name"), "[::1]:1");
    json_decref(j);
    j = expect(&f, 200, "GET", "/engines/%5B::1%5d%3a1", "");
    assert_string_equal(text(j, "name"), "[::1]:1");
    json_decref(j);

    refused(&f, 409, "POST", "/engines", "{\"name\":\"ada\",\"url\":\"http://127.0.0.1:2\"}",
            "exists", "ada");
    j = expect(&f, 200, "POST", "/engines/ada/drain", "");
    assert_string_equal(text(j, "state"), "draining");
    json_decref(j);
    j = expect(&f, 200, "POST", "/engines/ada/undrain", "");
    assert_string_equal(text(j, "state"), "active");
    json_decref(j);

    j = expect(&f, 200, "DELETE", "/engines/ada?deadline_seconds=0.5", "");
    assert_string_equal(text(j, "removed"), "ada");
    assert_int_equal(json_integer_value(json_object_get(j, "cut")), 0);
    json_decref(j);
    refused(&f, 404, "GET", "/engines/ada", "", "not_found", "no engine is named 'ada'");
    refused(&f, 404, "DELETE", "/engines/ada", "", "not_found", "GET /engines");
    stop(&f);
}

static void test_engines_refused(void **state)
{
    fixture f;
    start(&f, PLAIN);
    refused(&f, 400, "POST", "/engines", "{\"ulr\":\"http://h:1\"}", "invalid_engine",
            "ulr: unknown key, did you mean 'url'?");
    refused(&f, 400, "POST", "/engines", "{\"url\":\"ftp://h:1\"}", "invalid_engine", "body: ");
    refused(&f, 400, "POST", "/engines", "{\"url\":\"http://h:1\",\"weight\":-1}", "invalid_engine",
            "weight: found -1");
    refused(&f, 400, "POST", "/engines", "", "invalid_engine", "has no url");
    refused(&f, 400, "POST", "/engines", "{\"url\":", "invalid_json", "line 1");
    refused(&f, 400, "POST", "/engines", "{\"url\":\"a\",\"url\":\"b\"}", "invalid_json", "");
    refused(&f, 400, "POST", "/engines", "[1]", "invalid_body", "object");
    refused(&f, 400, "GET", "/engines/%zz", "", "bad_name", "");
    refused(&f, 400, "GET", "/engines/%00", "", "bad_name", "");
    refused(&f, 400, "GET", "/engines/a%2", "", "bad_name", "");
    refused(&f, 400, "GET", "/engines/a%2fb", "", "bad_name", "");
    refused(&f, 400, "DELETE", "/engines/a?deadline_seconds=-1", "", "bad_query",
            "deadline_seconds=N");
    refused(&f, 400, "DELETE", "/engines/a?deadline=1", "", "bad_query", "deadline_seconds=N");
    json_t *j = expect(&f, 200, "GET", "/engines", "");
    assert_int_equal(json_array_size(json_object_get(j, "engines")), 0);
    json_decref(j);
    stop(&f);
}

/* --- who may ask, and for what --- */

static void test_paths_and_methods(void **state)
{
    fixture f;
    answer a;
    start(&f, PLAIN);
    refused(&f, 404, "GET", "/nothing", "", "not_found", "POST /policy/reload");
    refused(&f, 404, "GET", "/", "", "not_found", "");
    refused(&f, 404, "GET", "/engines/", "", "not_found", "");
    refused(&f, 404, "GET", "/engines/a/b/c", "", "not_found", "");
    ask(&f, &a, "DELETE", "/engines", "", "");
    assert_int_equal(a.status, 405);
    assert_non_null(strcasestr(a.text, "\r\nallow: GET, POST\r\n"));
    json_decref(a.json);
    ask(&f, &a, "GET", "/policy/reload", "", "");
    assert_int_equal(a.status, 405);
    assert_non_null(strcasestr(a.text, "\r\nallow: POST\r\n"));
    json_decref(a.json);

    /* a page in the operator's browser must not reach it */
    ask(&f, &a, "POST", "/policy/reload", "Origin: http://evil.example\r\n", "");
    assert_int_equal(a.status, 403);
    json_decref(a.json);
    json_t *j = expect(&f, 200, "GET", "/policy", "");
    assert_int_equal(json_integer_value(json_object_get(j, "reloads")), 0);
    json_decref(j);
    /* nor read it under a name that was made to point here, which needs no Origin */
    static const char *const ours[] = {"localhost", "LocalHost:8001", "a.localhost", "10.0.0.1:1",
                                       "[::1]:8001"};
    static const char *const theirs[] = {"evil.example", "evil.example:8001", "xlocalhost",
                                         "localhost.evil.example", "127.0.0.1.evil.example"};
    for (int i = 0; i < 5; i++) {
        f.host = ours[i];
        json_decref(expect(&f, 200, "GET", "/engines", ""));
        f.host = theirs[i];
        refused(&f, 403, "GET", "/engines", "", "forbidden", "localhost");
    }
    stop(&f);
}

static void test_token(void **state)
{
    static const char *const wrong[] = {"",
                                        "Authorization: Bearer\r\n",
                                        "Authorization: Bearer sesam\r\n",
                                        "Authorization: Bearer sesame2\r\n",
                                        "Authorization: Basic sesame\r\n",
                                        "X-Token: sesame\r\n"};
    fixture f;
    answer a;
    start(&f, WITH_TOKEN);
    f.host = "router.example"; /* no page knows the token */
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ask(&f, &a, "GET", "/engines", wrong[i], "");
        assert_int_equal(a.status, 401);
        assert_non_null(strcasestr(a.text, "\r\nwww-authenticate: Bearer\r\n"));
        assert_null(strstr(a.text, "sesame"));
        json_decref(a.json);
    }
    ask(&f, &a, "GET", "/engines", "Authorization: bearer sesame\r\n", "");
    assert_int_equal(a.status, 200);
    json_decref(a.json);
    /* metrics.admin is off here */
    ask(&f, &a, "GET", "/metrics", "Authorization: Bearer sesame\r\n", "");
    assert_int_equal(a.status, 404);
    json_decref(a.json);
    stop(&f);
}

static void test_pages(void **state)
{
    fixture f;
    answer a;
    start(&f, PLAIN);
    json_t *j = expect(&f, 200, "GET", "/health", "");
    assert_string_equal(text(j, "status"), "ok");
    json_decref(j);
    j = expect(&f, 503, "GET", "/readyz", "");
    assert_true(json_is_false(json_object_get(j, "ready")));
    json_decref(j);
    j = expect(&f, 200, "GET", "/status", "");
    assert_string_equal(text(j, "version"), PERILUNE_VERSION);
    assert_int_equal(json_integer_value(json_object_get(j, "loops")), 2);
    assert_int_equal(json_integer_value(json_object_get(j, "queue")), 0);
    assert_true(json_integer_value(
                    json_object_get(json_object_get(j, "memory"), "resident_bytes")) > 100000);
    json_decref(j);
    ask(&f, &a, "GET", "/metrics", "", "");
    assert_int_equal(a.status, 200);
    assert_non_null(strstr(a.text, "\nperilune_connections_accepted_total 0\n"));
    ask(&f, &a, "HEAD", "/metrics", "", "");
    assert_int_equal(a.status, 200);
    assert_null(strstr(a.text, "perilune_"));
    stop(&f);
}

/* --- policy --- */

static void test_reload(void **state)
{
    fixture f;
    char path[128], body[256];
    start(&f, PLAIN);
    json_t *j = expect(&f, 200, "GET", "/policy", "");
    assert_string_equal(text(j, "name"), "prefix_seconds");
    assert_int_equal(json_integer_value(json_object_get(j, "generation")), 1);
    assert_true(json_is_null(json_object_get(j, "last_error")));
    json_decref(j);

    policy_file(&f, good, path);
    snprintf(body, sizeof body, "{\"policy\":\"%s\",\"params\":{\"k\":3}}", path);
    j = expect(&f, 200, "POST", "/policy/reload", body);
    assert_int_equal(json_integer_value(json_object_get(j, "generation")), 2);
    assert_string_equal(text(j, "name"), "mine");
    assert_int_equal(strlen(text(j, "sha256")), 64);
    const json_t *hooks = json_object_get(j, "hooks");
    assert_int_equal(json_array_size(hooks), 1);
    assert_string_equal(json_string_value(json_array_get(hooks, 0)), "score");
    json_decref(j);

    /* the same again keeps its parameters */
    j = expect(&f, 200, "POST", "/policy/reload", "");
    json_decref(j);
    j = expect(&f, 200, "GET", "/policy", "");
    assert_int_equal(json_integer_value(json_object_get(j, "generation")), 3);
    assert_string_equal(text(j, "file"), path);
    assert_true(json_number_value(json_object_get(json_object_get(j, "params"), "k")) == 3);
    assert_non_null(json_object_get(json_object_get(j, "stats"), "score"));
    json_decref(j);

    /* a bad one changes nothing */
    policy_file(&f, bad, path);
    j = expect(&f, 422, "POST", "/policy/reload", "");
    const json_t *e = json_object_get(j, "error");
    assert_string_equal(text(e, "code"), "policy_refused");
    assert_string_equal(text(e, "stage"), "run");
    assert_non_null(strstr(text(e, "file"), "policy.lua"));
    assert_int_equal(json_integer_value(json_object_get(e, "line")), 2);
    assert_non_null(strstr(text(e, "message"), "no good"));
    json_decref(j);
    j = expect(&f, 200, "GET", "/policy", "");
    assert_int_equal(json_integer_value(json_object_get(j, "generation")), 3);
    assert_int_equal(json_integer_value(json_object_get(j, "reload_failures")), 1);
    assert_non_null(strstr(text(json_object_get(j, "last_error"), "message"), "no good"));
    json_decref(j);

    /* parameters belong to a policy: another one starts with its own */
    j = expect(&f, 200, "POST", "/policy/reload", "{\"policy\":\"random\"}");
    json_decref(j);
    j = expect(&f, 422, "POST", "/policy/reload", "{\"params\":{\"unheard_of\":1}}");
    json_decref(j);
    refused(&f, 400, "POST", "/policy/reload", "{\"polcy\":\"random\"}", "invalid_body", "polcy");
    refused(&f, 400, "POST", "/policy/reload", "{\"policy\":7}", "invalid_body", "policy");
    stop(&f);
}

/* --- perilune reload --- */

typedef struct said {
    char *out, *err;
    int rc;
    pl_errbuf eb;
} said;

static void reload_at(int port, said *s, const char *policy, const char *token, bool json)
{
    size_t n, m;
    char admin[32];
    snprintf(admin, sizeof admin, "127.0.0.1:%d", port);
    pl_reload_options o = {.admin = pl_str_c(admin),
                           .policy = pl_str_c(policy),
                           .token = pl_str_c(token),
                           .timeout_ms = 20000,
                           .json = json,
                           .out = open_memstream(&s->out, &n),
                           .err = open_memstream(&s->err, &m)};
    s->eb.text[0] = 0;
    s->rc = pl_reload_cli(&o, &s->eb);
    fclose(o.out);
    fclose(o.err);
}

static void reload(fixture *f, said *s, const char *policy, const char *token, bool json)
{
    reload_at(pl_router_admin_port(f->router), s, policy, token, json);
}

static void said_free(said *s)
{
    free(s->out);
    free(s->err);
}

static void test_command(void **state)
{
    fixture f;
    said s;
    char path[128], expected[256];
    start(&f, PLAIN);
    policy_file(&f, good, path);
    reload(&f, &s, path, "", false);
    assert_int_equal(s.rc, 0);
    assert_true(strncmp(s.out, "policy mine, generation 2, sha256 ", 34) == 0);
    assert_non_null(strstr(s.out, "hooks: score\n"));
    said_free(&s);

    policy_file(&f, bad, path);
    reload(&f, &s, "", "", false);
    assert_int_equal(s.rc, PL_EPOLICY);
    assert_string_equal(s.out, "");
    snprintf(expected, sizeof expected, "refused at stage run: %s:2: ", path);
    if (strncmp(s.err, expected, strlen(expected)) != 0)
        fail_msg("%s", s.err);
    assert_non_null(strstr(s.err, "no good\nthe running policy stays\n"));
    said_free(&s);

    reload(&f, &s, "", "", true);
    assert_int_equal(s.rc, PL_EPOLICY);
    json_t *j = json_loads(s.out, 0, NULL);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(j, "error"), "line")), 2);
    json_decref(j);
    said_free(&s);

    /* the wrong one of the two ports */
    reload_at(pl_router_port(f.router), &s, "", "", false);
    assert_true(s.rc < 0 && s.rc != PL_EPOLICY);
    assert_non_null(strstr(s.eb.text, "is no router's admin API"));
    said_free(&s);
    stop(&f);

    /* nobody there any more */
    fixture gone = {.router = NULL};
    start(&gone, WITH_TOKEN);
    reload(&gone, &s, "", "", false);
    assert_true(s.rc < 0 && s.rc != PL_EPOLICY);
    assert_non_null(strstr(s.eb.text, "--token-env"));
    said_free(&s);
    reload(&gone, &s, "", "sesame", false);
    assert_int_equal(s.rc, 0);
    said_free(&s);
    reload(&gone, &s, "", "a\r\nb", false);
    assert_true(s.rc < 0);
    assert_non_null(strstr(s.eb.text, "token"));
    said_free(&s);
    stop(&gone);
}

static void test_command_without_router(void **state)
{
    /* a port that was free a moment ago, and that nobody listens on */
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    char admin[32];
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, n), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &n), 0);
    snprintf(admin, sizeof admin, "127.0.0.1:%d", ntohs(a.sin_port));
    pl_errbuf eb = {""};
    pl_reload_options o = {
        .admin = pl_str_c(admin), .timeout_ms = 20000, .out = stdout, .err = stderr};
    assert_true(pl_reload_cli(&o, &eb) < 0);
    assert_non_null(strstr(eb.text, admin));
    assert_non_null(strstr(eb.text, "is the router running there?"));
    close(fd);
    o.admin = PL_STR("nonsense");
    assert_true(pl_reload_cli(&o, &eb) < 0);
    assert_non_null(strstr(eb.text, "HOST:PORT"));
}

int main(void)
{
    pl_log_init(PL_LOG_ERROR, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_engines),
        cmocka_unit_test(test_engines_refused),
        cmocka_unit_test(test_paths_and_methods),
        cmocka_unit_test(test_token),
        cmocka_unit_test(test_pages),
        cmocka_unit_test(test_reload),
        cmocka_unit_test(test_command),
        cmocka_unit_test(test_command_without_router),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
