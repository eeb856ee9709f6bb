/* Listen addresses, loopback, networks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "net.h"

static pl_errbuf eb;

static void listens(const char *text, const char *address, bool loopback)
{
    struct sockaddr_storage a;
    char out[80];
    if (pl_parse_listen(pl_str_c(text), &a, &eb) != 0)
        fail_msg("%s: %s", text, eb.text);
    pl_addr_text((const struct sockaddr *)&a, out, sizeof out);
    assert_string_equal(out, address);
    assert_int_equal(pl_addr_is_loopback((const struct sockaddr *)&a), loopback);
}

static void test_listen(void **state)
{
    listens("127.0.0.1:8000", "127.0.0.1:8000", true);
    listens("127.9.8.7:1", "127.9.8.7:1", true);
    listens(":8000", "127.0.0.1:8000", true);
    listens("localhost:0", "127.0.0.1:0", true);
    listens("0.0.0.0:80", "0.0.0.0:80", false);
    listens("[::1]:8000", "[::1]:8000", true);
    listens("[::]:8000", "[::]:8000", false);
    listens("[::ffff:127.0.0.1]:1", "[::ffff:127.0.0.1]:1", true);
    listens("[::ffff:10.0.0.1]:1", "[::ffff:10.0.0.1]:1", false);
    listens("128.0.0.1:1", "128.0.0.1:1", false);
}

static void test_listen_refused(void **state)
{
    static const char *const bad[] = {"",
                                      "8000",
                                      "127.0.0.1",
                                      "127.0.0.1:",
                                      "a:b",
                                      "::1:8000",
                                      "h:65536",
                                      "h:-1",
                                      "[::1]",
                                      "h:1 ",
                                      "[]:x",
                                      "h:+1",
                                      "256.256.256.256.256:1",
                                      "no host:80"};
    struct sockaddr_storage a;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        eb.text[0] = 0;
        if (pl_parse_listen(pl_str_c(bad[i]), &a, &eb) == 0)
            fail_msg("'%s' was taken", bad[i]);
        assert_int_not_equal(eb.text[0], 0);
    }
}

static bool inside(const char *network, const char *address)
{
    struct sockaddr_storage a;
    pl_cidr c;
    assert_int_equal(pl_cidr_parse(pl_str_c(network), &c), 0);
    assert_int_equal(pl_parse_listen(pl_str_c(address), &a, &eb), 0);
    return pl_cidr_match(&c, 1, (const struct sockaddr *)&a);
}

static void test_networks(void **state)
{
    assert_true(inside("10.0.0.0/8", "10.255.0.1:1"));
    assert_false(inside("10.0.0.0/8", "11.0.0.1:1"));
    assert_true(inside("10.1.2.3/8", "10.9.9.9:1")); /* bits behind the prefix do not count */
    assert_true(inside("192.168.4.0/22", "192.168.7.255:1"));
    assert_false(inside("192.168.4.0/22", "192.168.8.0:1"));
    assert_true(inside("1.2.3.4", "1.2.3.4:9"));
    assert_false(inside("1.2.3.4", "1.2.3.5:9"));
    assert_true(inside("0.0.0.0/0", "9.9.9.9:1"));
    assert_false(inside("0.0.0.0/0", "[fd00::1]:1"));
    assert_true(inside("fd00::/8", "[fdff::1]:1"));
    assert_false(inside("fd00::/8", "[fe00::1]:1"));
    assert_true(inside("::1", "[::1]:1"));
    assert_true(inside("10.0.0.0/8", "[::ffff:10.0.0.1]:1")); /* IPv4 on an IPv6 socket */
}

static void test_networks_refused(void **state)
{
    static const char *const bad[] = {
        "",     "10.0.0.0/33", "10.0.0/8", "10.0.0.0/",    "::1/129",
        "host", "10.0.0.0/-1", "/8",       "10.0.0.0/8/8", "10.0.0.0 /8"};
    pl_cidr c;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (pl_cidr_parse(pl_str_c(bad[i]), &c) == 0)
            fail_msg("'%s' was taken", bad[i]);
}

static void test_no_networks_match_nobody(void **state)
{
    struct sockaddr_storage a;
    assert_int_equal(pl_parse_listen(PL_STR("127.0.0.1:1"), &a, &eb), 0);
    assert_false(pl_cidr_match(NULL, 0, (const struct sockaddr *)&a));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_listen),
        cmocka_unit_test(test_listen_refused),
        cmocka_unit_test(test_networks),
        cmocka_unit_test(test_networks_refused),
        cmocka_unit_test(test_no_networks_match_nobody),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
