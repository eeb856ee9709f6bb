/* The configuration as its users meet it: what is read, where it goes, and what a mistake is told.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "config.h"

static pl_errbuf eb;

/* Reads JSON text on top of the defaults. */
static int read_json(pl_config *c, const char *text)
{
    json_error_t je;
    json_t *root = json_loads(text, JSON_DECODE_ANY, &je);
    assert_non_null(root);
    assert_int_equal(pl_config_init(c), 0);
    eb.text[0] = 0;
    int rc = pl_config_json(c, root, "router.lua", &eb);
    json_decref(root);
    return rc;
}

static void refused(const char *text, const char *message)
{
    pl_config c;
    assert_true(read_json(&c, text) < 0);
    assert_string_equal(eb.text, message);
    pl_config_free(&c);
}

static void equals(pl_str s, const char *expected)
{
    assert_int_equal(s.n, strlen(expected));
    assert_memory_equal(s.p, expected, s.n);
}

static void test_defaults(void **state)
{
    pl_config c;
    assert_int_equal(pl_config_init(&c), 0);
    assert_int_equal(pl_config_finish(&c, &eb), 0);
    equals(c.listen, "127.0.0.1:8000");
    equals(c.admin_listen, "127.0.0.1:8001");
    equals(c.policy, "prefix_seconds");
    assert_int_equal(c.engines_n, 0);
    assert_int_equal(c.retries, 2);
    assert_int_equal(c.server.limits.body_bytes, 32 << 20);
    assert_int_equal(c.server.head_timeout_ms, 10000);
    assert_true(c.pool.pool_idle_ms < 4000);
    assert_int_equal(c.trusted_n, 0);
    pl_config_free(&c);
}

static void test_every_kind_of_value(void **state)
{
    pl_config c;
    int rc = read_json(
        &c, "{\"listen\":\"0.0.0.0:80\",\"admin\":{\"listen\":\"off\"},\"threads\":3,"
            "\"limits\":{\"head_bytes\":16384,\"queue\":7,\"body_memory_bytes\":1e9},"
            "\"timeouts\":{\"connect_seconds\":0.25,\"queue_seconds\":1.5,\"drain_seconds\":0},"
            "\"breaker\":{\"backoff_seconds\":0.5,\"probes\":2},\"retries\":{\"max\":0},"
            "\"usage\":\"always\",\"response_headers\":false,\"metrics\":{\"public\":false},"
            "\"log\":{\"level\":\"warn\",\"json\":true},\"default_model\":\"m\","
            "\"paths\":[\"/v1/special\"],\"trusted_clients\":[\"10.0.0.0/8\",\"::1\"],"
            "\"api_keys\":[{\"key\":\"k1\",\"tenant\":\"moon\"}],"
            "\"policy\":{\"name\":\"round_robin\",\"params\":{\"a\":1,\"b\":\"x\",\"c\":true}}}");
    assert_int_equal(rc, 0);
    assert_int_equal(pl_config_finish(&c, &eb), 0);
    equals(c.listen, "0.0.0.0:80");
    equals(c.admin_listen, "off");
    assert_int_equal(c.threads, 3);
    assert_int_equal(c.server.limits.head_bytes, 16384);
    assert_int_equal(c.queue_max, 7);
    assert_int_equal(c.max_body_memory, 1000000000);
    assert_int_equal(c.pool.connect_timeout_ms, 250);
    assert_true(c.queue_seconds == 1.5 && c.decider.max_wait_seconds == 1.5);
    assert_int_equal(c.drain_timeout_ms, 0);
    assert_int_equal(c.decider.breaker.backoff_ns, 500000000);
    assert_int_equal(c.decider.breaker.half_open_probes, 2);
    assert_int_equal(c.retries, 0);
    assert_int_equal(c.usage, 2);
    assert_false(c.response_headers);
    assert_false(c.metrics_public);
    assert_true(c.metrics_admin);
    assert_int_equal(c.log_level, PL_LOG_WARN);
    assert_int_equal(c.log_json, 1);
    equals(c.default_model, "m");
    equals(c.extra_paths[0], "/v1/special");
    assert_int_equal(c.trusted_n, 2);
    equals(c.api_keys[0].key, "k1");
    equals(c.api_keys[0].tenant, "moon");
    equals(c.policy, "round_robin");
    assert_int_equal(json_object_size(c.policy_params), 3);
    pl_config_free(&c);
}

static void test_engines(void **state)
{
    pl_config c;
    assert_int_equal(
        read_json(&c, "{\"engines\":[\"http://10.0.0.1:30000\",{\"url\":\"http://h:1\",\"name\":"
                      "\"big\",\"kind\":\"vllm\",\"weight\":2.5,\"max_inflight\":64,"
                      "\"max_queued_prefill_tokens\":100000,\"dp_size\":4,\"models\":[\"a\",\"b\"]}"
                      ",\"http://h:2\"]}"),
        0);
    assert_int_equal(pl_config_add_engine(&c, PL_STR("mine=http://h:3"), &eb), 0);
    assert_int_equal(pl_config_add_engine(&c, PL_STR("http://h:4"), &eb), 0);
    assert_int_equal(pl_config_finish(&c, &eb), 0);
    assert_int_equal(c.engines_n, 5);
    equals(c.engines[0].name, "10.0.0.1:30000");
    equals(c.engines[1].name, "big");
    assert_int_equal(c.engines[1].kind, PL_KIND_VLLM);
    assert_true(c.engines[1].weight == 2.5);
    assert_int_equal(c.engines[1].max_inflight, 64);
    assert_int_equal(c.engines[1].max_queued_prefill_tokens, 100000);
    assert_int_equal(c.engines[1].dp_size, 4);
    assert_int_equal(c.engines[1].models_n, 2);
    equals(c.engines[1].models[1], "b");
    assert_true(c.engines[1].from_config);
    equals(c.engines[3].name, "mine");
    equals(c.engines[3].url, "http://h:3");
    assert_false(c.engines[3].from_config);
    equals(c.engines[4].name, "h:4");
    pl_config_free(&c);
}

static void test_unknown_keys(void **state)
{
    refused("{\"engines\":[\"http://h:1\",{\"ulr\":\"http://h\"}]}",
            "router.lua: engines[2].ulr: unknown key, did you mean 'url'?");
    refused("{\"listn\":\"x\"}", "router.lua: listn: unknown key, did you mean 'listen'?");
    refused("{\"timeouts\":{\"connect\":1}}",
            "router.lua: timeouts.connect: unknown key, did you mean 'connect_seconds'?");
    refused("{\"timeout\":{}}", "router.lua: timeout: unknown key, did you mean 'timeouts'?");
    refused("{\"metrics\":{\"zzzzzz\":1}}",
            "router.lua: metrics.zzzzzz: unknown key; known here: public, admin");
    /* a section's path is not a key of its own */
    refused("{\"admin.listen\":\"off\"}",
            "router.lua: admin.listen: unknown key; what has a dot here is a table in a table");
}

static void test_wrong_values(void **state)
{
    refused("{\"limits\":{\"body_bytes\":\"1m\"}}",
            "router.lua: limits.body_bytes: found the text \"1m\", expected whole number 1024 to "
            "4294967296 bytes");
    refused("{\"timeouts\":{\"pool_idle_seconds\":5}}",
            "router.lua: timeouts.pool_idle_seconds: found 5, expected number 0.01 to 3.9 seconds");
    refused("{\"limits\":{\"headers\":10.5}}",
            "router.lua: limits.headers: found 10.5, expected whole number 8 to 1000");
    refused("{\"threads\":-1}", "router.lua: threads: found -1, expected whole number 0 to 256");
    refused("{\"usage\":true}",
            "router.lua: usage: found true, expected \"off\" or \"auto\" or \"always\"");
    refused("{\"response_headers\":\"no\"}",
            "router.lua: response_headers: found the text \"no\", expected true or false");
    refused("{\"admin\":8001}", "router.lua: admin: found 8001, expected a table with names");
    refused("{\"listen\":\"\"}", "router.lua: listen: is empty");
    refused("{\"engines\":{\"a\":1}}",
            "router.lua: engines: found a table with names, expected a list of engines");
    refused("{\"engines\":[{\"name\":\"a\"}]}", "router.lua: engines[1]: has no url");
    refused("{\"engines\":[7]}",
            "router.lua: engines[1]: found 7, expected a url, or a table with a url");
    refused("{\"trusted_clients\":[\"10.0.0.0/33\"]}",
            "router.lua: trusted_clients[1]: found the text \"10.0.0.0/33\", expected an address "
            "or network such as \"10.0.0.0/8\"");
    refused("{\"paths\":[\"v1\"]}", "router.lua: paths[1]: found the text \"v1\", expected a path "
                                    "such as \"/v1/special\"");
    refused("{\"policy\":{\"params\":{\"x\":[1]}}}",
            "router.lua: policy.params.x: found a list, expected a number, a text, true or false");
    refused("[1]", "router.lua: found a list, expected a table with names");
    refused("{\"sessions\":{\"max\":0}}",
            "router.lua: sessions.max: found 0, expected whole number 1 to 1000000000 sessions");
    refused("{\"sessions\":{\"headers\":[\"a b\"]}}",
            "router.lua: sessions.headers[1]: found the text \"a b\", expected a header's name");
    refused("{\"sessions\":{\"headers\":[{\"parent\":\"x\"}]}}",
            "router.lua: sessions.headers[1]: 'id' is missing");
    refused("{\"kv\":{\"use\":\"x\"}}",
            "router.lua: kv.use: found the text \"x\", expected \"auto\" or \"always\" or \"off\"");
    refused(
        "{\"engines\":[{\"url\":\"http://a\",\"kv_events\":{\"endpoint\":\"a:1\"}}]}",
        "router.lua: engines[1]: engine http://a: kv_events.endpoint must be tcp://HOST:PORT or "
        "ipc://PATH");
    refused("{\"engines\":[{\"url\":\"http://a\",\"kv_events\":{\"mode\":\"connect\"}}]}",
            "router.lua: engines[1]: engine http://a: kv_events.endpoint is missing");
}

static void redis_url(const char *url, const char *host, int port, const char *path,
                      const char *user, int db)
{
    char text[256];
    pl_config c;
    snprintf(text, sizeof text, "{\"sessions\":{\"store\":\"redis\",\"redis\":{\"url\":\"%s\"}}}",
             url);
    assert_int_equal(read_json(&c, text), 0);
    assert_int_equal(pl_config_finish(&c, &eb), 0);
    assert_int_equal(c.session_store, 1);
    equals(c.redis.host, host);
    equals(c.redis.unix_path, path);
    equals(c.redis.user, user);
    assert_int_equal(c.redis.port, port);
    assert_int_equal(c.redis.db, db);
    pl_config_free(&c);
}

static void test_redis_urls(void **state)
{
    redis_url("redis://h", "h", 0, "", "", 0);
    redis_url("redis://h/", "h", 0, "", "", 0);
    redis_url("redis://me@10.0.0.5:7000/3", "10.0.0.5", 7000, "", "me", 3);
    redis_url("redis://[::1]", "::1", 0, "", "", 0);
    redis_url("redis://[::1]:99/1", "::1", 99, "", "", 1);
    redis_url("unix:///run/redis.sock", "", 0, "/run/redis.sock", "", 0);
    static const char *const bad[][2] = {
        {"h:6379", "expected redis://"},
        {"redis://", "expected redis://"},
        {"redis://@h", "expected redis://"},
        {"redis://[::1", "expected redis://"},
        {"redis://[::1]9", "the port is"},
        {"redis://h:0", "the port is"},
        {"redis://h:65536", "the port is"},
        {"redis://h:", "the port is"},
        {"redis://h/x", "the database is"},
        {"redis://h/-1", "the database is"},
        {"unix://", "expected redis://"},
        {"unix:///", "expected redis://"},
        {"rediss://h", "not available"},
        {"redis://me:hunter2@h", "a password belongs in redis.password"},
        {"redis://:hunter2@h:x", "a password belongs in redis.password"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char text[256];
        pl_config c;
        snprintf(text, sizeof text, "{\"sessions\":{\"redis\":{\"url\":\"%s\"}}}", bad[i][0]);
        assert_true(read_json(&c, text) < 0);
        if (!strstr(eb.text, bad[i][1]) || strstr(eb.text, "hunter2"))
            fail_msg("%s: %s", bad[i][0], eb.text);
        pl_config_free(&c);
    }
    refused("{\"sessions\":{\"redis\":{\"password\":4711}}}",
            "router.lua: sessions.redis.password: expected text");
}

static void test_secrets_are_not_shown(void **state)
{
    refused("{\"admin\":{\"token\":4711}}", "router.lua: admin.token: expected text");
    refused("{\"api_keys\":[{\"key\":4711}]}", "router.lua: api_keys[1].key: expected text");
    char text[400], tenant[257];
    memset(tenant, 't', 256);
    tenant[256] = 0;
    snprintf(text, sizeof text,
             "{\"limits\":{\"id_bytes\":1024},\"api_keys\":[{\"key\":\"k\",\"tenant\":\"%s\"}]}",
             tenant);
    refused(text, "router.lua: api_keys[1]: the tenant's name is longer than 255 bytes");
    refused("{\"api_keys\":[{\"tenant\":\"t\"}]}",
            "router.lua: api_keys[1]: has no key: give key or key_file");
}

static void test_secret_files(void **state)
{
    char path[] = "/tmp/perilune-secret-XXXXXX", text[256];
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, "top secret\n", 11), 11);
    close(fd);
    pl_config c;
    snprintf(text, sizeof text,
             "{\"admin\":{\"token_file\":\"%s\"},"
             "\"api_keys\":[{\"key_file\":\"%s\",\"tenant\":\"t\"}]}",
             path, path);
    assert_int_equal(read_json(&c, text), 0);
    equals(c.admin_token, "top secret");
    equals(c.api_keys[0].key, "top secret");
    pl_config_free(&c);
    assert_int_equal(truncate(path, 0), 0);
    assert_true(read_json(&c, text) < 0);
    assert_non_null(strstr(eb.text, "should hold one secret"));
    pl_config_free(&c);
    unlink(path);
    assert_true(read_json(&c, text) < 0);
    assert_non_null(strstr(eb.text, "cannot read"));
    pl_config_free(&c);
}

static void finish_refuses(const char *text, const char *part)
{
    pl_config c;
    assert_int_equal(read_json(&c, text), 0);
    assert_true(pl_config_finish(&c, &eb) < 0);
    if (!strstr(eb.text, part))
        fail_msg("'%s' is not in: %s", part, eb.text);
    pl_config_free(&c);
}

static void test_what_belongs_together(void **state)
{
    finish_refuses("{\"admin\":{\"listen\":\"0.0.0.0:1\"}}", "a token is needed");
    finish_refuses("{\"sessions\":{\"redis\":{\"url\":\"redis://h\"}}}", "sessions.store is not");
    finish_refuses("{\"admin\":{\"listen\":\"[::]:1\"}}", "a token is needed");
    finish_refuses("{\"admin\":{\"listen\":\"nonsense\"}}", "admin.listen: 'nonsense' has no port");
    finish_refuses("{\"listen\":\"127.0.0.1:99999\"}", "0 to 65535");
    finish_refuses("{\"engines\":[\"http://h:1\",\"http://h:1/\"]}", "two engines are named 'h:1'");
    finish_refuses("{\"limits\":{\"head_bytes\":2048,\"target_bytes\":4096}}",
                   "limits.target_bytes (4096) is above limits.head_bytes (2048)");
    finish_refuses("{\"limits\":{\"body_memory_bytes\":1024}}", "limits.body_bytes");
    finish_refuses("{\"breaker\":{\"backoff_seconds\":9,\"max_backoff_seconds\":3}}", "breaker");
    finish_refuses("{\"api_keys\":[{\"key\":\"k\",\"tenant\":\"a\"},"
                   "{\"key\":\"k\",\"tenant\":\"b\"}]}",
                   "api_keys[1] and api_keys[2] are the same key");
    finish_refuses("{\"health\":{\"path\":\"health\"}}", "does not begin with '/'");

    pl_config c;
    assert_int_equal(read_json(&c, "{\"admin\":{\"listen\":\"0.0.0.0:1\",\"token\":\"t\"}}"), 0);
    assert_int_equal(pl_config_finish(&c, &eb), 0);
    pl_config_free(&c);
}

static void test_flags(void **state)
{
    pl_config c;
    assert_int_equal(pl_config_init(&c), 0);
    assert_int_equal(pl_config_set_param(&c, PL_STR("a=1.5"), &eb), 0);
    assert_int_equal(pl_config_set_param(&c, PL_STR("b=true"), &eb), 0);
    assert_int_equal(pl_config_set_param(&c, PL_STR("c=x=y"), &eb), 0);
    assert_int_equal(pl_config_set_param(&c, PL_STR("d="), &eb), 0);
    assert_int_equal(pl_config_set_param(&c, PL_STR("a=2"), &eb), 0);
    assert_true(json_number_value(json_object_get(c.policy_params, "a")) == 2);
    assert_true(json_is_true(json_object_get(c.policy_params, "b")));
    assert_string_equal(json_string_value(json_object_get(c.policy_params, "c")), "x=y");
    assert_string_equal(json_string_value(json_object_get(c.policy_params, "d")), "");
    assert_true(pl_config_set_param(&c, PL_STR("novalue"), &eb) < 0);
    assert_true(pl_config_set_param(&c, PL_STR("=1"), &eb) < 0);
    assert_true(pl_config_set_param(&c, PL_STR("k=\xff"), &eb) < 0);

    assert_true(pl_config_add_engine(&c, PL_STR("=http://h:1"), &eb) < 0);
    assert_true(pl_config_add_engine(&c, PL_STR(""), &eb) < 0);
    assert_true(pl_config_add_engine(&c, PL_STR("a=ftp://h:1"), &eb) < 0);
    assert_non_null(strstr(eb.text, "--engine: "));
    assert_int_equal(c.engines_n, 0);
    pl_config_free(&c);
}

static void test_file(void **state)
{
    char folder[] = "/tmp/perilune-config-XXXXXX", path[64];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/router.lua", folder);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs("local port = 8000 + 80\n"
          "return { listen = '127.0.0.1:' .. port, engines = {}, policy = { file = 'mine.lua' },\n"
          "  admin = { token = env('PERILUNE_TEST_TOKEN') } }\n",
          f);
    fclose(f);
    setenv("PERILUNE_TEST_TOKEN", "from the environment", 1);
    pl_config c;
    assert_int_equal(pl_config_init(&c), 0);
    if (pl_config_file(&c, path, &eb) != 0)
        fail_msg("%s", eb.text);
    equals(c.listen, "127.0.0.1:8080");
    equals(c.admin_token, "from the environment");
    equals(c.file, path);
    assert_int_equal(c.policy.n, strlen(folder) + 9);
    assert_memory_equal(c.policy.p + strlen(folder), "/mine.lua", 9);
    pl_config_free(&c);

    f = fopen(path, "w");
    fputs("return {\n  listen = 'x',\n  oops oops\n}\n", f);
    fclose(f);
    assert_int_equal(pl_config_init(&c), 0);
    assert_true(pl_config_file(&c, path, &eb) < 0);
    assert_non_null(strstr(eb.text, "router.lua:3:"));
    pl_config_free(&c);
    unlink(path);
    assert_int_equal(pl_config_init(&c), 0);
    assert_true(pl_config_file(&c, path, &eb) < 0);
    assert_non_null(strstr(eb.text, "router.lua"));
    pl_config_free(&c);
    rmdir(folder);
}

/* Every key of the reference can be read, and its printed default is accepted. */
static void test_reference(void **state)
{
    char *text = NULL;
    size_t n;
    FILE *f = open_memstream(&text, &n);
    assert_int_equal(pl_config_print_reference(f), 0);
    fclose(f);
    static const char *const some[] = {"\nlisten ",
                                       "\nadmin.token ",
                                       "\ntimeouts.pool_idle_seconds ",
                                       "\nengines[].url ",
                                       "\nengines[].max_queued_prefill_tokens ",
                                       "\npolicy.params ",
                                       "\napi_keys[].tenant ",
                                       "number 0.01 to 3.9 seconds, default 3.5",
                                       "default \"127.0.0.1:8000\"",
                                       "default \"auto\""};
    for (size_t i = 0; i < sizeof some / sizeof *some; i++)
        if (!strstr(text, some[i]))
            fail_msg("'%s' is not in the reference:\n%s", some[i], text);
    free(text);
}

/* Whatever is given, it is read or refused with a message, and nothing leaks. */
static void test_hostile_values(void **state)
{
    static const char *const keys[] = {"listen",          "engines", "policy",  "api_keys",
                                       "trusted_clients", "paths",   "limits",  "timeouts",
                                       "threads",         "usage",   "log",     "seed",
                                       "admin",           "health",  "retries", "metrics",
                                       "breaker"};
    static const char *const values[] = {"null",
                                         "true",
                                         "0",
                                         "-1",
                                         "1e308",
                                         "\"\"",
                                         "\"x\"",
                                         "[]",
                                         "{}",
                                         "[[]]",
                                         "[{}]",
                                         "[null]",
                                         "{\"\":1}",
                                         "{\"listen\":{}}",
                                         "{\"level\":[]}",
                                         "{\"head_bytes\":1e300}",
                                         "[\"\\u00e9\"]",
                                         "[{\"key\":\"a\",\"key_file\":7}]",
                                         "{\"file\":1}",
                                         "{\"file\":\"a\",\"name\":\"b\"}",
                                         "{\"params\":{\"\":{}}}"};
    for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)
        for (size_t v = 0; v < sizeof values / sizeof *values; v++) {
            char text[256];
            pl_config c;
            snprintf(text, sizeof text, "{\"%s\":%s}", keys[k], values[v]);
            int rc = read_json(&c, text);
            assert_true(rc == 0 || strncmp(eb.text, "router.lua: ", 12) == 0);
            pl_config_free(&c);
        }
    pl_config c;
    char longkey[700];
    memset(longkey, 'a', sizeof longkey);
    snprintf(longkey, 3, "{\"");
    longkey[2] = 'a';
    memcpy(longkey + sizeof longkey - 5, "\":1}", 5);
    assert_true(read_json(&c, longkey) < 0);
    pl_config_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_every_kind_of_value),
        cmocka_unit_test(test_engines),
        cmocka_unit_test(test_unknown_keys),
        cmocka_unit_test(test_wrong_values),
        cmocka_unit_test(test_redis_urls),
        cmocka_unit_test(test_secrets_are_not_shown),
        cmocka_unit_test(test_secret_files),
        cmocka_unit_test(test_what_belongs_together),
        cmocka_unit_test(test_flags),
        cmocka_unit_test(test_file),
        cmocka_unit_test(test_reference),
        cmocka_unit_test(test_hostile_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
