/* The memory store out of memory: each allocation of a shard fails once. The call says so, what was
 * there stays, nothing leaks, and the next call works. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static long allocations_left = -1; /* negative: all work */

static bool fails(void)
{
    if (allocations_left > 0)
        allocations_left--;
    return allocations_left == 0;
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

#define malloc  failing_malloc
#define calloc  failing_calloc
#define realloc failing_realloc
#include "session/shard.c"
#undef malloc
#undef calloc
#undef realloc

static int op(pl_store *st, pl_store_op what, int i, int *slot)
{
    char id[128];
    int n = snprintf(id, sizeof id, "%0*d", i % 3 ? 20 : 100, i); /* every third is a long name */
    pl_store_call c = {.op = what, .name = {PL_STR("acme"), {id, (size_t)n}}};
    c.binding = (pl_binding){.slot = i, .kind = PL_SESSION_ENGINE_BACKED, .ttl_ms = 60000};
    int rc = pl_store_start(st, &c);
    *slot = c.binding.slot;
    return rc;
}

static void each_allocation_fails_once(void **state)
{
    (void)state;
    enum { SESSIONS = 6000 };
    uint64_t now_ns = 1000000000;
    pl_store_options o = {pl_clock_virtual(&now_ns), SESSIONS, NULL, NULL};
    pl_store *st;
    assert_int_equal(pl_store_memory_new(&o, &st), 0);
    int failed = 0, slot;
    for (int i = 0; i < SESSIONS; i++) {
        allocations_left = 1;
        int rc = op(st, PL_STORE_PUT, i, &slot);
        while (rc == PL_ENOMEM) { /* one more works each time */
            failed++;
            allocations_left = -1;
            assert_int_equal(op(st, PL_STORE_GET, i, &slot), PL_ENOTFOUND);
            allocations_left = 1 + failed % 4;
            rc = op(st, PL_STORE_PUT, i, &slot);
        }
        assert_int_equal(rc, 0);
    }
    assert_true(failed > SESSIONS / 3);
    allocations_left = -1;
    pl_store_stats s;
    pl_store_stats_read(st, &s);
    assert_int_equal(s.engine_backed, SESSIONS);
    for (int i = 0; i < SESSIONS; i++) {
        assert_int_equal(op(st, PL_STORE_GET, i, &slot), 0);
        assert_int_equal(slot, i);
    }
    allocations_left = 0; /* leaving needs no memory */
    for (int i = 0; i < SESSIONS; i += 2)
        assert_int_equal(op(st, PL_STORE_REMOVE, i, &slot), 0);
    now_ns += 61000000000;
    pl_store_advance(st);
    pl_store_stats_read(st, &s);
    assert_int_equal(s.expired_engine_backed, SESSIONS / 2);
    assert_int_equal(s.engine_backed, 0);
    pl_store_free(st);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(each_allocation_fails_once)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
