/* The shared store out of memory: each allocation of its calls, its memory of sessions and its
 * connection fails once, with a server and without one. Calls say so or are answered without the
 * memory, nothing leaks, and the next call works. */
#include "redis_server.h"

static long allocations_left = -1; /* negative: all work */
static long failures;

static bool fails(void)
{
    if (allocations_left <= 0 || --allocations_left > 0)
        return false;
    allocations_left = -1; /* once */
    failures++;
    return true;
}

static void *failing_malloc(size_t n)
{
    return fails() ? NULL : malloc(n);
}

static void *failing_calloc(size_t n, size_t size)
{
    return fails() ? NULL : calloc(n, size);
}

static void *failing_realloc(void *p, size_t n)
{
    return fails() ? NULL : realloc(p, n);
}

static int failing_append(redisContext *c, const char *command, size_t n)
{
    return fails() ? REDIS_ERR : redisAppendFormattedCommand(c, command, n);
}

#define malloc                      failing_malloc
#define calloc                      failing_calloc
#define realloc                     failing_realloc
#define redisAppendFormattedCommand failing_append
#define count                       count_of_sweeps /* each file has its own */
#define on_timer                    on_sweep_timer
#include "session/redis_sweep.c"
#undef count
#undef on_timer
#define on_timer on_conn_timer
#include "session/redis_conn.c"
#undef on_timer
#define drop known_drop
#include "session/redis_known.c"
#undef drop
#include "session/redis.c"
#undef malloc
#undef calloc
#undef realloc

static int expired_n;

static void on_expired(void *ctx, pl_store *s, const pl_session_name *name, const pl_binding *b)
{
    (void)ctx;
    (void)name;
    expired_n++;
    pl_store_redis_ack(s, b->version);
}

static int ask(driver *d, pl_store *s, pl_store_op what, const char *id, pl_session_kind kind,
               uint32_t ttl_ms)
{
    pl_store_call c = {.op = what, .name = {PL_STR("acme"), pl_str_c(id)}};
    c.binding = (pl_binding){.slot = 1, .generation = 8, .kind = kind, .ttl_ms = ttl_ms};
    if (pl_store_start(s, &c) == PL_STORE_PENDING)
        DRIVE_UNTIL(d, !c.pending);
    return c.result;
}

static void each_allocation_fails_once(void **unused)
{
    (void)unused;
    server srv;
    server_make(&srv);
    server_start(&srv);
    driver d;
    driver_open(&d);
    pl_redis_options o = {.unix_path = pl_str_c(srv.path),
                          .command_ms = 20000,
                          .connect_ms = 20000,
                          .no_stale = true,
                          .known_sessions = 64,
                          .clock = pl_clock_real(),
                          .worker_name = test_worker_name,
                          .find_worker = test_find_worker,
                          .expired = on_expired};
    pl_redis *r;
    pl_store *s;
    assert_int_equal(pl_redis_new(&o, &r, NULL), 0);
    for (long at = 1;; at++) { /* opening, too */
        failures = 0;
        allocations_left = at;
        int err = pl_store_redis_new(r, &d.loop, &d.wheel, true, &s);
        if (!err)
            DRIVE_UNTIL(&d, pl_store_redis_up(s)); /* what failed in connecting is tried again */
        allocations_left = -1;
        if (!failures) {
            pl_store_free(s);
            break;
        }
        if (err)
            assert_int_equal(err, PL_ENOMEM);
        else
            pl_store_free(s);
        assert_true(at < 100);
    }
    assert_int_equal(pl_store_redis_new(r, &d.loop, &d.wheel, true, &s), 0);
    DRIVE_UNTIL(&d, pl_store_redis_up(s));
    static const pl_store_op ops[] = {PL_STORE_PUT, PL_STORE_GET, PL_STORE_PEEK, PL_STORE_REMOVE};
    int failed = 0;
    for (int i = 0; i < 200; i++) {
        char id[16];
        snprintf(id, sizeof id, "%d", i / 8);
        pl_store_op what = ops[i % 4];
        allocations_left = 1 + i % 3;
        failures = 0;
        int rc = ask(&d, s, what, id, PL_SESSION_ROUTER_ONLY, 600000);
        allocations_left = -1;
        if (failures) {
            failed++;
            assert_true(rc == PL_ENOMEM || rc == PL_EUNAVAILABLE || rc == 0 || rc == PL_ENOTFOUND);
            DRIVE_UNTIL(&d, pl_store_redis_up(s));
            rc = ask(&d, s, what, id, PL_SESSION_ROUTER_ONLY, 600000);
        }
        assert_true(rc == 0 || (rc == PL_ENOTFOUND && what != PL_STORE_PUT));
    }
    assert_true(failed > 50);
    /* a sweep that had no memory to ask or to remember what it has to acknowledge */
    for (int i = 0; i < 4; i++) {
        assert_int_equal(ask(&d, s, PL_STORE_PUT, "short", PL_SESSION_ENGINE_BACKED, 1), 0);
        allocations_left = 1 + i;
        pl_store_advance(s);
        DRIVE_UNTIL(&d, expired_n > i);
        allocations_left = -1;
    }
    /* without a server */
    server_kill(&srv);
    DRIVE_UNTIL(&d, !pl_store_redis_up(s));
    const pl_redis_stats *st = pl_redis_stats_of(r);
    uint64_t done = st->written + st->forgotten;
    for (int i = 0; i < 300; i++) {
        char id[16];
        snprintf(id, sizeof id, "n%d", i);
        allocations_left = i % 2 ? 1 : -1;
        int rc = ask(&d, s, PL_STORE_PUT, id, PL_SESSION_ROUTER_ONLY, 600000);
        allocations_left = -1;
        assert_int_equal(rc, i % 2 ? PL_EUNAVAILABLE : 0);
        assert_int_equal(ask(&d, s, PL_STORE_GET, id, PL_SESSION_ROUTER_ONLY, 0), rc);
    }
    assert_true(st->forgotten >= 150 - 80); /* only so many are remembered, the newest */
    assert_int_equal(ask(&d, s, PL_STORE_GET, "n298", PL_SESSION_ROUTER_ONLY, 0), 0);
    /* and back: what could be remembered is written, memory or not */
    server_start(&srv);
    allocations_left = 20;
    DRIVE_UNTIL(&d, st->written + st->forgotten == done + 150);
    allocations_left = -1;
    assert_int_equal(ask(&d, s, PL_STORE_PEEK, "n298", PL_SESSION_ROUTER_ONLY, 0), 0);
    pl_store_free(s);
    driver_close(&d);
    pl_redis_free(r);
    server_remove(&srv);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {cmocka_unit_test(each_allocation_fails_once)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
