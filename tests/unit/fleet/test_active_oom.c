/* The set of active blocks when memory runs out at any point: what it then does not count, the
 * ticket counts itself, and everything is taken back. active_blocks.c is compiled into this test
 * with its allocations replaced. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "fleet/engine.h"

static long allocations_left = -1; /* negative: no end */

static int fails(void)
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

#define malloc failing_malloc
#define calloc failing_calloc
#include "fleet/active_blocks.c"
#undef malloc
#undef calloc

#define BLOCK    PL_LEDGER_BLOCK_TOKENS
#define REQUESTS 12

/* Requests of up to 16 blocks that leave a common path at any block. */
static int64_t request_hashes(pl_rng *rng, uint64_t *hashes)
{
    uint32_t n = 1 + pl_rng_below(rng, 16), shared = pl_rng_below(rng, 17);
    uint64_t own = pl_rng_next(rng);
    for (uint32_t i = 0; i < n; i++)
        hashes[i] = i < shared ? i + 1 : own + i;
    return n;
}

static void storm(uint64_t seed, long after)
{
    const pl_engine_spec spec = {.url = PL_STR("http://10.0.0.1"), .weight = 1};
    pl_engine *e;
    pl_errbuf eb;
    assert_int_equal(pl_engine_new(&spec, &e, &eb), 0);
    pl_worker_state *w = &e->workers[0];
    pl_active *a = pl_active_new(1000);
    assert_non_null(a);
    pl_ticket t[REQUESTS] = {{0}};
    pl_rng rng = {seed};
    allocations_left = -1;
    for (int k = 0; k < 60; k++) {
        pl_ticket *one = &t[pl_rng_below(&rng, REQUESTS)];
        if (k == 20)
            allocations_left = after;
        if (k == 40)
            allocations_left = -1;
        if (one->worker) {
            pl_ticket_end(one);
        } else {
            uint64_t hashes[16];
            int64_t n = request_hashes(&rng, hashes);
            int64_t before = atomic_load(&w->decode_blocks);
            pl_ticket_begin(one, w,
                            &(pl_load){.prompt_tokens = (double)n * BLOCK,
                                       .active = a,
                                       .keys = {hashes, (int32_t)n, BLOCK}});
            int64_t more = atomic_load(&w->decode_blocks) - before;
            assert_true(more >= 0 && more <= n);
        }
        int64_t private = 0;
        for (int i = 0; i < REQUESTS; i++)
        private += t[i].worker ? t[i].blocks : 0;
        assert_int_equal(atomic_load(&w->decode_blocks), (int64_t)pl_active_size(a) + private);
    }
    for (int i = 0; i < REQUESTS; i++)
        pl_ticket_end(&t[i]);
    assert_int_equal(atomic_load(&w->decode_blocks), 0);
    assert_int_equal(pl_active_size(a) + pl_active_nodes(a), 0);
    pl_active_free(a);
    pl_engine_unref(e);
}

static void memory_may_end_anywhere(void **state)
{
    for (uint64_t seed = 1; seed <= 20; seed++)
        for (long after = 1; after < 25; after++)
            storm(seed, after);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(memory_may_end_anywhere)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
