/* A shard with hashes made by hand: names that collide in all of their hash, and runs of the table
 * that wrap around its end, which the store's seeded hash cannot be brought to do. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "base/rng.h"
#include "session/shard.h"

static pl_shard_key key(const char *tenant, const char *id, uint64_t hash)
{
    pl_shard_key k = {.hash = hash};
    k.tenant_n = (uint32_t)strlen(tenant);
    k.n = k.tenant_n + (uint32_t)strlen(id);
    memcpy(k.bytes, tenant, k.tenant_n);
    memcpy(k.bytes + k.tenant_n, id, k.n - k.tenant_n);
    return k;
}

static pl_shard_ref insert(pl_shard *s, const pl_shard_key *k, int32_t slot)
{
    pl_shard_ref ref = pl_shard_insert(s, k);
    assert_int_not_equal(ref, 0);
    pl_binding b = {.slot = slot, .kind = PL_SESSION_ROUTER_ONLY, .ttl_ms = 1000};
    pl_shard_bind(s, ref, &b, 1000000000, 0, 0);
    return ref;
}

static void equal_hashes_do_not_make_equal_names(void **state)
{
    (void)state;
    static const char *const names[][2] = {
        {"acme", "session-1"}, {"acme", "session-2"},  {"acm", "esession-1"}, {"", "acmesession-1"},
        {"acme", "session-"},  {"acme", "session-12"}, {"acmes", "ession-1"}};
    enum { N = sizeof names / sizeof names[0] };
    pl_shard s;
    pl_shard_init(&s, 1000000000);
    for (int i = 0; i < N; i++) {
        pl_shard_key k = key(names[i][0], names[i][1], 77);
        assert_int_equal(pl_shard_find(&s, &k), 0);
        insert(&s, &k, i);
    }
    for (int gone = 0; gone < N; gone++) {
        for (int i = 0; i < N; i++) {
            pl_shard_key k = key(names[i][0], names[i][1], 77);
            pl_shard_ref ref = pl_shard_find(&s, &k);
            assert_int_equal(ref != 0, i >= gone);
            if (ref) {
                pl_binding b;
                pl_shard_read(&s, ref, &b);
                assert_int_equal(b.slot, i);
            }
        }
        pl_shard_key k = key(names[gone][0], names[gone][1], 77);
        pl_shard_delete(&s, pl_shard_find(&s, &k), &k);
    }
    assert_int_equal(s.count, 0);
    pl_shard_destroy(&s);
}

static void deleting_leaves_no_hole_in_a_run(void **state)
{
    (void)state;
    enum { N = 11 };
    pl_rng rng = {5};
    for (int round = 0; round < 3000; round++) {
        pl_shard s;
        pl_shard_init(&s, 1000000000);
        pl_shard_key k[N];
        bool there[N];
        for (int i = 0; i < N; i++) {
            char id[16];
            snprintf(id, sizeof id, "%d", i);
            k[i] = key("", id, 12 + pl_rng_below(&rng, 7)); /* a table of 16: runs wrap */
            insert(&s, &k[i], i);
            there[i] = true;
        }
        for (int step = 0; step < 12; step++) {
            unsigned i = pl_rng_below(&rng, N);
            if (there[i])
                pl_shard_delete(&s, pl_shard_find(&s, &k[i]), &k[i]);
            else
                insert(&s, &k[i], (int32_t)i);
            there[i] = !there[i];
            for (int j = 0; j < N; j++)
                assert_int_equal(pl_shard_find(&s, &k[j]) != 0, there[j]);
        }
        pl_shard_destroy(&s);
    }
}

/* The work of a sweep follows what is due, not what is held. */
static void a_sweep_looks_at_what_is_due(void **state)
{
    (void)state;
    enum { N = 20000, DUE = 100 };
    pl_shard s;
    uint64_t now_ns = 5000000000;
    pl_shard_init(&s, now_ns);
    for (int i = 0; i < N; i++) {
        char id[16];
        snprintf(id, sizeof id, "%d", i);
        pl_shard_key k = key("acme", id, (uint64_t)i * 0x9e3779b97f4a7c15u);
        pl_shard_ref ref = pl_shard_insert(&s, &k);
        assert_true(pl_shard_extra_ready(&s));
        pl_binding b = {.kind = PL_SESSION_ENGINE_BACKED,
                        .ttl_ms = i < DUE ? 20000 : 3600000 + (uint32_t)i * 50};
        pl_shard_bind(&s, ref, &b, now_ns, 0, 0);
    }
    int looked = 0, found = 0;
    for (int step = 0; step < 240; step++) { /* two minutes */
        now_ns += 500000000;
        int budget = N;
        pl_shard_ref ref;
        while ((ref = pl_shard_due(&s, now_ns, &budget))) {
            pl_shard_key k;
            pl_shard_name(&s, ref, &k);
            found++;
            pl_shard_ref again = 0;
            for (unsigned j = 0; j < DUE && !again; j++) {
                k.hash = j * 0x9e3779b97f4a7c15u;
                again = pl_shard_find(&s, &k);
            }
            assert_int_equal(again, ref); /* one of those that were due */
            pl_shard_delete(&s, ref, &k);
        }
        looked += N - budget;
    }
    assert_int_equal(found, DUE);
    assert_true(looked <= DUE * 5);
    assert_int_equal(s.count, N - DUE);
    pl_shard_destroy(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_hashes_do_not_make_equal_names),
        cmocka_unit_test(deleting_leaves_no_hole_in_a_run),
        cmocka_unit_test(a_sweep_looks_at_what_is_due),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
