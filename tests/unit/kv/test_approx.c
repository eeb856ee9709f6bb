/* Approximate mode: random operations beside a naive model that keeps one time for every (worker,
 * prefix); the byte cap and what it takes first; time; threads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "kv/approx.h"

#define MS 1000000ull

static uint64_t now_ns;

static pl_approx *approx(uint32_t ttl_ms, uint32_t slots, uint64_t max_bytes)
{
    pl_approx_options o = {pl_clock_virtual(&now_ns), ttl_ms, slots, max_bytes};
    pl_approx *a;
    assert_int_equal(pl_approx_new(&o, &a), 0);
    return a;
}

/* A cumulative key; any good mix does. */
static uint64_t key_after(uint64_t parent, uint64_t chunk)
{
    pl_rng r = {parent + chunk * 0x632be59bd9b4e019u + 1};
    return pl_rng_next(&r);
}

static void keys_of(uint64_t seed, const uint8_t *chunks, size_t n, uint64_t *keys)
{
    for (size_t i = 0; i < n; i++)
        keys[i] = key_after(i ? keys[i - 1] : seed, chunks[i]);
}

static uint32_t held(pl_approx *a, const uint64_t *keys, size_t n, int slot)
{
    pl_approx_hit out[64];
    int found = pl_approx_match(a, keys, n, out, 64);
    for (int i = 0; i < found; i++)
        if (out[i].slot == slot)
            return out[i].chunks;
    return 0;
}

/* --- the model --- */

enum { DEPTH = 8, ALPHABET = 3, SLOTS = 6, CODES = 1 << (2 * DEPTH + 1), TTL = 400 };

/* A prefix as a number: a leading 1, then two bits a chunk. */
static uint64_t (*model)[CODES]; /* ms of the last insertion, 0: not held */

static uint32_t code_of(const uint8_t *chunks, size_t n)
{
    uint32_t code = 1;
    for (size_t i = 0; i < n; i++)
        code = code << 2 | chunks[i];
    return code;
}

/* Everything from the prefix of n chunks on that is older than `before_ms`. */
static void model_void(int slot, const uint8_t *chunks, size_t n, uint64_t before_ms)
{
    uint32_t from = code_of(chunks, n), to = from;
    for (; n <= DEPTH; n++, from <<= 2, to = to << 2 | 3)
        for (uint32_t c = from; c <= to; c++)
            if (model[slot][c] < before_ms)
                model[slot][c] = 0;
}

static uint32_t model_match(int slot, const uint8_t *chunks, size_t n)
{
    uint64_t now_ms = now_ns / MS;
    uint32_t m = 0;
    for (; m < n; m++) {
        uint64_t at = model[slot][code_of(chunks, m + 1)];
        if (!at || now_ms - at > TTL)
            break;
    }
    return m;
}

static void compare(pl_approx *a, const uint8_t *chunks, const uint64_t *keys, size_t n)
{
    pl_approx_hit out[SLOTS];
    int found = pl_approx_match(a, keys, n, out, SLOTS);
    uint32_t got[SLOTS] = {0};
    for (int i = 0; i < found; i++) {
        assert_in_range(out[i].slot, 0, SLOTS - 1);
        assert_int_equal(got[out[i].slot], 0);
        assert_in_range(out[i].chunks, 1, n);
        got[out[i].slot] = out[i].chunks;
    }
    for (int slot = 0; slot < SLOTS; slot++)
        assert_int_equal(got[slot], model_match(slot, chunks, n));
}

static void like_the_model(void **state)
{
    (void)state;
    model = malloc(SLOTS * sizeof *model);
    assert_non_null(model);
    for (uint64_t seed = 1; seed <= 6; seed++) {
        memset(model, 0, SLOTS * sizeof *model);
        now_ns = 5 * MS;
        pl_approx *a = approx(TTL, SLOTS, 64u << 20);
        pl_rng rng = {seed};
        for (int step = 0; step < 12000; step++) {
            now_ns += (1 + (pl_rng_below(&rng, 40) == 0 ? pl_rng_below(&rng, TTL) : 0)) * MS;
            uint8_t chunks[DEPTH];
            uint64_t keys[DEPTH];
            size_t n = 1 + pl_rng_below(&rng, DEPTH);
            for (size_t i = 0; i < n; i++) /* mostly 0: long runs */
                chunks[i] = (uint8_t)(pl_rng_below(&rng, 3) ? 0 : pl_rng_below(&rng, ALPHABET));
            keys_of(99, chunks, n, keys);
            int slot = (int)pl_rng_below(&rng, SLOTS);
            size_t from = pl_rng_below(&rng, (uint32_t)n + 1);
            uint32_t what = pl_rng_below(&rng, 100);
            if (what < 60) {
                assert_int_equal(pl_approx_insert(a, keys, n, slot), 0);
                for (size_t i = 1; i <= n; i++)
                    model[slot][code_of(chunks, i)] = now_ns / MS;
            } else if (what < 75) {
                uint64_t ago = pl_rng_below(&rng, 30);
                uint64_t routed_ms = now_ns / MS > ago + 5 ? now_ns / MS - ago : 5;
                pl_approx_correct(a, keys, n, slot, from, routed_ms * MS);
                if (from < n)
                    model_void(slot, chunks, from + 1, routed_ms);
            } else if (what < 85) {
                pl_approx_forget(a, keys, n, slot, from);
                if (from < n)
                    model_void(slot, chunks, from + 1, UINT64_MAX);
            } else if (what == 85) {
                pl_approx_worker_gone(a, slot);
                memset(model[slot], 0, sizeof model[slot]);
            } else if (what == 86) {
                uint64_t until_ms = now_ns / MS - 5 > 20 ? now_ns / MS - pl_rng_below(&rng, 20) : 5;
                pl_approx_reconcile(a, slot, until_ms * MS);
                for (uint32_t c = 0; c < CODES; c++)
                    if (model[slot][c] < until_ms)
                        model[slot][c] = 0;
            } else if (what == 87) {
                pl_approx_advance(a);
            }
            compare(a, chunks, keys, n);
        }
        now_ns += (TTL + 1) * MS;
        while (pl_approx_advance(a))
            ;
        pl_approx_stats s;
        pl_approx_stats_of(a, &s);
        assert_int_equal(s.nodes, 0);
        assert_int_equal(s.chunks, 0);
        assert_int_equal(s.entries, 0);
        assert_true(s.expired > 0 && s.corrected > 0 && s.evicted == 0);
        pl_approx_free(a);
    }
    free(model);
}

/* --- one thing each --- */

static void a_conversation(void **state)
{
    (void)state;
    now_ns = 0;
    pl_approx *a = approx(1000, 8, 1 << 20);
    uint64_t keys[100], other[100];
    uint8_t chunks[100] = {0};
    keys_of(1, chunks, 100, keys);
    chunks[40] = 1;
    keys_of(1, chunks, 100, other);
    assert_int_equal(held(a, keys, 100, 3), 0);
    for (size_t turn = 10; turn <= 100; turn += 10) {
        assert_int_equal(held(a, keys, turn, 3), turn - 10);
        assert_int_equal(pl_approx_insert(a, keys, turn, 3), 0);
    }
    pl_approx_stats s;
    pl_approx_stats_of(a, &s);
    assert_int_equal(s.nodes, 1); /* however many turns */
    assert_int_equal(s.chunks, 100);
    assert_int_equal(held(a, other, 100, 3), 40);
    assert_int_equal(pl_approx_insert(a, other, 100, 5), 0);
    assert_int_equal(held(a, keys, 100, 5), 40);
    assert_int_equal(held(a, keys, 100, 3), 100);
    assert_int_equal(held(a, other, 100, 3), 40);
    pl_approx_worker_gone(a, 3);
    assert_int_equal(held(a, keys, 100, 3), 0);
    assert_int_equal(held(a, other, 100, 5), 100);
    now_ns += 1000 * MS;
    assert_int_equal(held(a, other, 100, 5), 100);
    now_ns += MS;
    assert_int_equal(held(a, other, 100, 5), 0);
    pl_approx_free(a);
}

/* What an engine has lost is forgotten for all prompts that go on from there, but not what it has
 * just computed. */
static void corrections(void **state)
{
    (void)state;
    now_ns = 0;
    pl_approx *a = approx(100000, 8, 1 << 20);
    uint64_t one[30], two[30];
    uint8_t chunks[30] = {0};
    keys_of(1, chunks, 30, one);
    chunks[20] = 1;
    keys_of(1, chunks, 30, two);
    assert_int_equal(pl_approx_insert(a, one, 30, 1), 0);
    assert_int_equal(pl_approx_insert(a, two, 30, 1), 0);
    assert_int_equal(pl_approx_insert(a, two, 30, 2), 0);
    now_ns = 50 * MS;
    assert_int_equal(pl_approx_insert(a, one, 25, 1), 0); /* routed by this */
    now_ns = 90 * MS;
    pl_approx_correct(a, one, 25, 1, 25, 50 * MS); /* nothing against it */
    assert_int_equal(held(a, one, 30, 1), 30);
    pl_approx_correct(a, one, 25, 1, 7, 50 * MS);
    assert_int_equal(held(a, one, 30, 1), 25);
    assert_int_equal(held(a, two, 30, 1), 20);
    assert_int_equal(held(a, two, 30, 2), 30);
    now_ns = 100 * MS;
    assert_int_equal(pl_approx_insert(a, two, 22, 1), 0);
    assert_int_equal(held(a, two, 30, 1), 22); /* not what was lost behind it */
    pl_approx_forget(a, two, 22, 1, 21);
    assert_int_equal(held(a, two, 30, 1), 21);
    pl_approx_forget(a, two, 22, 1, 0);
    assert_int_equal(held(a, one, 30, 1), 0);
    pl_approx_free(a);
}

static void refused(void **state)
{
    (void)state;
    now_ns = 0;
    pl_approx *a;
    pl_approx_options o = {pl_clock_virtual(&now_ns), 0, 1, 1 << 20};
    assert_int_equal(pl_approx_new(&o, &a), PL_EINVALID);
    o = (pl_approx_options){pl_clock_virtual(&now_ns), 1, 65536, 1 << 20};
    assert_int_equal(pl_approx_new(&o, &a), PL_EINVALID);
    o = (pl_approx_options){pl_clock_virtual(&now_ns), 1, 1, 1 << 19};
    assert_int_equal(pl_approx_new(&o, &a), PL_EINVALID);
    assert_null(a);
    a = approx(10, 2, 1 << 20);
    uint64_t key = 5;
    pl_approx_hit hit;
    assert_int_equal(pl_approx_insert(a, &key, 1, 2), PL_EINVALID);
    assert_int_equal(pl_approx_insert(a, &key, 1, -1), PL_EINVALID);
    assert_int_equal(pl_approx_insert(a, &key, 0, 1), 0);
    assert_int_equal(pl_approx_match(a, &key, 0, &hit, 1), 0);
    assert_int_equal(pl_approx_insert(a, &key, 1, 1), 0);
    assert_int_equal(pl_approx_match(a, &key, 1, &hit, 0), 0);
    pl_approx_correct(a, &key, 1, 7, 0, 0);
    pl_approx_forget(a, &key, 1, -1, 0);
    pl_approx_worker_gone(a, 2);
    pl_approx_reconcile(a, -1, 0);
    assert_int_equal(held(a, &key, 1, 1), 1);
    pl_approx_free(NULL);
    pl_approx_free(a);
}

/* However much is routed, the cap holds, what came last is there, and what goes is the oldest. */
static void the_cap(void **state)
{
    (void)state;
    enum { PROMPTS = 4000, CHUNKS = 64, CAP = 1 << 20 };
    now_ns = 0;
    pl_approx *a = approx(PL_APPROX_TTL_MS, 64, CAP);
    uint64_t keys[CHUNKS];
    pl_approx_stats s;
    for (uint64_t i = 0; i < PROMPTS; i++) {
        uint8_t chunks[CHUNKS] = {0};
        keys_of(i, chunks, CHUNKS, keys);
        now_ns += MS;
        assert_int_equal(pl_approx_insert(a, keys, CHUNKS, (int)(i % 64)), 0);
        pl_approx_stats_of(a, &s);
        assert_true(s.bytes <= CAP);
        assert_int_equal(held(a, keys, CHUNKS, (int)(i % 64)), CHUNKS);
    }
    bool seen = false;
    int kept = 0;
    for (uint64_t i = 0; i < PROMPTS; i++) {
        uint8_t chunks[CHUNKS] = {0};
        keys_of(i, chunks, CHUNKS, keys);
        uint32_t n = held(a, keys, CHUNKS, (int)(i % 64));
        assert_true(n == 0 || n == CHUNKS);
        assert_true(n || !seen); /* none older than a kept one is kept */
        seen = seen || n;
        kept += n != 0;
    }
    assert_in_range(kept, 1000, PROMPTS - 1);
    assert_int_equal(s.evicted, PROMPTS - kept);
    pl_approx_free(a);
}

/* Many workers on one prefix: all found, memory for them bounded, dead ones make room. */
static void many_workers(void **state)
{
    (void)state;
    now_ns = 0;
    enum { MANY = 1000 };
    pl_approx *a = approx(100, MANY, 1 << 20);
    uint64_t keys[10];
    uint8_t chunks[10] = {0};
    keys_of(4, chunks, 10, keys);
    for (int i = MANY - 1; i >= 0; i--)
        assert_int_equal(pl_approx_insert(a, keys, 5 + (size_t)i % 6, i), 0);
    static pl_approx_hit out[MANY];
    assert_int_equal(pl_approx_match(a, keys, 10, out, MANY), MANY);
    for (int i = 0; i < MANY; i++)
        assert_int_equal(out[i].chunks, 5 + out[i].slot % 6);
    assert_int_equal(pl_approx_match(a, keys, 10, out, 10), 10);
    now_ns += 50 * MS;
    assert_int_equal(pl_approx_insert(a, keys, 10, 7), 0);
    now_ns += 60 * MS;
    assert_int_equal(pl_approx_match(a, keys, 10, out, MANY), 1);
    assert_int_equal(out[0].slot, 7);
    pl_approx_free(a);
}

/* --- threads --- */

enum { THREADS = 4, ROUNDS = 3000 };
static pl_approx *shared;
static _Atomic int failures;

static void *worker(void *arg)
{
    int self = (int)(intptr_t)arg;
    pl_rng rng = {(uint64_t)self + 1};
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t keys[40];
        uint8_t chunks[40];
        pl_approx_hit out[THREADS + 1];
        size_t n = 1 + pl_rng_below(&rng, 40);
        for (size_t k = 0; k < n; k++)
            chunks[k] = (uint8_t)(pl_rng_below(&rng, 8) == 0);
        keys_of(pl_rng_below(&rng, 3), chunks, n, keys);
        if (pl_approx_insert(shared, keys, n, self) != 0)
            failures++;
        int found = pl_approx_match(shared, keys, n, out, THREADS + 1);
        bool mine = false;
        for (int k = 0; k < found; k++)
            mine |= out[k].slot == self && out[k].chunks == n;
        if (!mine) /* nobody else takes from this slot */
            failures++;
        int victim = THREADS; /* this one everybody uses */
        switch (pl_rng_below(&rng, 8)) {
        case 0:
            pl_approx_insert(shared, keys, n, victim);
            break;
        case 1:
            pl_approx_correct(shared, keys, n, victim, n / 2, pl_now_ns());
            break;
        case 2:
            pl_approx_forget(shared, keys, n, victim, n / 3);
            break;
        case 3:
            pl_approx_worker_gone(shared, victim);
            break;
        case 4:
            pl_approx_advance(shared);
            break;
        default:
            break;
        }
    }
    return NULL;
}

static void threads(void **state)
{
    (void)state;
    pl_approx_options o = {pl_clock_real(), PL_APPROX_TTL_MS, THREADS + 1, 64u << 20};
    assert_int_equal(pl_approx_new(&o, &shared), 0);
    pthread_t t[THREADS];
    for (intptr_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&t[i], NULL, worker, (void *)i), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(t[i], NULL);
    assert_int_equal(failures, 0);
    pl_approx_stats s;
    pl_approx_stats_of(shared, &s);
    assert_true(s.inserted >= THREADS * ROUNDS);
    pl_approx_free(shared);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(like_the_model), cmocka_unit_test(a_conversation),
        cmocka_unit_test(corrections),    cmocka_unit_test(refused),
        cmocka_unit_test(the_cap),        cmocka_unit_test(many_workers),
        cmocka_unit_test(threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
