/* Where an engine publishes, from its own words. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>

#include "kv/discover.h"

#define HOST PL_STR("10.0.0.7")

static pl_errbuf eb;

static void sglang_says_where(void **state)
{
    (void)state;
    pl_discovered d;
    assert_int_equal(
        pl_discover_sglang(PL_STR("{\"version\":\"0.5\","
                                  "\"kv_events\":{\"publisher\":\"zmq\",\"endpoint_host\":\"*\","
                                  "\"endpoint_port_base\":5557,\"topic\":\"kv\",\"block_size\":64,"
                                  "\"dp_size\":2,\"replay_endpoint_host\":\"10.1.1.1\","
                                  "\"replay_endpoint_port_base\":6000}}"),
                           HOST, &d, &eb),
        0);
    assert_int_equal(d.mode, PL_FEED_CONNECT);
    assert_string_equal(d.endpoint, "tcp://10.0.0.7:5557");
    assert_string_equal(d.replay, "tcp://10.1.1.1:6000");
    assert_string_equal(d.snapshot, "");
    assert_string_equal(d.topic, "kv");
    assert_true(d.block_tokens == 64 && d.ranks == 2);
    pl_feed_source s = {.block_tokens = 0};
    pl_discovered_source(&d, &s);
    assert_true(s.mode == PL_FEED_CONNECT && s.block_tokens == 64 && s.snapshot.n == 0);
    assert_true(pl_str_eq(s.endpoint, PL_STR("tcp://10.0.0.7:5557")));
    s.block_tokens = 16; /* the configuration knows better */
    pl_discovered_source(&d, &s);
    assert_int_equal(s.block_tokens, 16);
}

static void the_engines_host_stands_for_any(void **state)
{
    (void)state;
    static const char *const any[] = {"*", "0.0.0.0", "::", "[::]", ""};
    pl_discovered d;
    for (size_t i = 0; i < sizeof any / sizeof *any; i++) {
        char text[200];
        int n =
            snprintf(text, sizeof text,
                     "{\"kv_events\":{\"endpoint_host\":\"%s\",\"endpoint_port_base\":1}}", any[i]);
        assert_int_equal(pl_discover_sglang((pl_str){text, (size_t)n}, PL_STR("fd00::7"), &d, &eb),
                         0);
        assert_string_equal(d.endpoint, "tcp://[fd00::7]:1");
        assert_true(d.ranks == 0 && d.block_tokens == 0);
    }
}

static void an_engine_that_does_not_publish(void **state)
{
    (void)state;
    static const struct {
        pl_str text;
        int want;
    } v[] = {
        {PL_STR_INIT("{}"), PL_ENOTFOUND},
        {PL_STR_INIT("{\"kv_events\":null}"), PL_ENOTFOUND},
        {PL_STR_INIT("{\"kv_events\":{\"publisher\":\"null\"}}"), PL_ENOTFOUND},
        {PL_STR_INIT("{\"kv_events\":{}}"), PL_EPROTOCOL},
        {PL_STR_INIT("{\"kv_events\":{\"endpoint_port_base\":65536}}"), PL_EPROTOCOL},
        {PL_STR_INIT("{\"kv_events\":{\"endpoint_port_base\":\"5557\"}}"), PL_EPROTOCOL},
        {PL_STR_INIT("[]"), PL_EPROTOCOL},
        {PL_STR_INIT("{"), PL_ESYNTAX},
        {PL_STR_INIT(""), PL_ESYNTAX},
    };
    pl_discovered d;
    for (size_t i = 0; i < sizeof v / sizeof *v; i++) {
        assert_int_equal(pl_discover_sglang(v[i].text, HOST, &d, &eb), v[i].want);
        assert_true(eb.text[0]);
        assert_int_equal(d.mode, PL_FEED_INGEST);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sglang_says_where),
        cmocka_unit_test(the_engines_host_stands_for_any),
        cmocka_unit_test(an_engine_that_does_not_publish),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
