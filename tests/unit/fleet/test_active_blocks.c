/* The blocks of the requests under way, counted once: by hand, and against a naive model under
 * random interleavings, on one thread and on several. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "fleet/engine.h"

#define BLOCK PL_LEDGER_BLOCK_TOKENS

static pl_engine *engine_of(int ranks)
{
    const pl_engine_spec spec = {.url = PL_STR("http://10.0.0.1"), .weight = 1, .dp_size = ranks};
    pl_engine *e;
    pl_errbuf eb;
    assert_int_equal(pl_engine_new(&spec, &e, &eb), 0);
    for (int i = 0; i < ranks; i++)
        e->workers[i].slot = i;
    return e;
}

static int64_t decode_blocks(const pl_worker_state *w)
{
    return atomic_load(&w->decode_blocks);
}

/* Cumulative: equal hashes mean equal text up to there. One letter is one block. */
static int32_t hash_text(const char *text, uint64_t *out)
{
    uint64_t h = 14695981039346656037u;
    int32_t n = 0;
    for (; text[n]; n++) {
        h = (h ^ (unsigned char)text[n]) * 1099511628211u;
        out[n] = h;
    }
    return n;
}

static void begin(pl_ticket *t, pl_active *a, pl_worker_state *w, const char *text, int more_tokens)
{
    uint64_t hashes[64];
    int32_t n = hash_text(text, hashes);
    pl_ticket_begin(t, w,
                    &(pl_load){.prompt_tokens = n * BLOCK + more_tokens,
                               .active = a,
                               .keys = {hashes, n, BLOCK}});
}

static void shared_blocks_count_once(void **state)
{
    pl_engine *e = engine_of(2);
    pl_worker_state *w = &e->workers[0], *other = &e->workers[1];
    pl_active *a = pl_active_new(1000);
    pl_ticket t[5] = {{0}};
    begin(&t[0], a, w, "system+one", 3);
    assert_int_equal(decode_blocks(w), 11);
    begin(&t[1], a, w, "system+two", 0);
    assert_int_equal(decode_blocks(w), 14); /* "system+" is there */
    begin(&t[2], a, other, "system+one", 0);
    assert_int_equal(decode_blocks(other), 10); /* on another worker, nothing is shared */
    begin(&t[3], a, w, "system", 0);
    begin(&t[4], a, w, "system+one", 20);
    assert_int_equal(decode_blocks(w), 16); /* two of its own */
    assert_int_equal(pl_active_size(a), 23);

    pl_ticket_end(&t[0]); /* the one that brought "system+one" leaves first */
    assert_int_equal(decode_blocks(w), 15);
    pl_ticket_output(&t[4], 12);
    assert_int_equal(decode_blocks(w), 15); /* fits its last block */
    pl_ticket_output(&t[4], 1);
    assert_int_equal(decode_blocks(w), 16);
    pl_ticket_end(&t[4]);
    pl_ticket_end(&t[4]);
    assert_int_equal(decode_blocks(w), 10);
    pl_ticket_end(&t[1]);
    assert_int_equal(decode_blocks(w), 6);
    pl_ticket_end(&t[3]);
    assert_int_equal(decode_blocks(w), 0);
    assert_int_equal(decode_blocks(other), 10);
    pl_ticket_end(&t[2]);
    assert_int_equal(decode_blocks(other), 0);
    assert_int_equal(pl_active_size(a) + pl_active_nodes(a), 0);
    pl_active_free(a);
    pl_engine_unref(e);
}

static void off_each_counts_its_own(void **state)
{
    pl_engine *e = engine_of(1);
    pl_ticket t[2] = {{0}};
    begin(&t[0], NULL, &e->workers[0], "system+one", 3);
    begin(&t[1], NULL, &e->workers[0], "system+one", 0);
    assert_int_equal(decode_blocks(&e->workers[0]), 21);
    pl_ticket_end(&t[0]);
    assert_int_equal(decode_blocks(&e->workers[0]), 10);
    pl_ticket_end(&t[1]);
    assert_int_equal(decode_blocks(&e->workers[0]), 0);
    pl_engine_unref(e);
}

static void what_is_shared_is_told(void **state)
{
    pl_engine *e = engine_of(1);
    pl_worker_state *w = &e->workers[0];
    pl_active *a = pl_active_new(1000);
    pl_active_hold h[3] = {{0}};
    uint64_t x[8], y[8];
    int32_t n = hash_text("abcdef", x), m = hash_text("abcxyz", y);
    int64_t shared = -1;
    assert_int_equal(pl_active_begin(a, w, &(pl_active_keys){x, n, BLOCK}, &h[0], &shared), 6);
    assert_int_equal(shared, 0);
    assert_int_equal(pl_active_begin(a, w, &(pl_active_keys){y, m, BLOCK}, &h[1], &shared), 6);
    assert_int_equal(shared, 3);
    assert_int_equal(pl_active_begin(a, w, &(pl_active_keys){x, 2, BLOCK}, &h[2], &shared), 2);
    assert_int_equal(shared, 2);
    assert_int_equal(decode_blocks(w), 9);
    for (int i = 0; i < 3; i++)
        pl_active_end(&h[i]);
    assert_int_equal(pl_active_begin(a, w, &(pl_active_keys){x, 0, BLOCK}, &h[0], &shared), 0);
    assert_int_equal(shared, 0);
    pl_active_end(&h[0]);
    assert_int_equal(decode_blocks(w), 0);
    pl_active_free(a);
    pl_engine_unref(e);
}

/* Hashes of 64 tokens, and workers of other block sizes. */
static void block_sizes_that_differ(void **state)
{
    static const struct {
        int32_t block, counted;
    } cases[] = {{64, 6}, {1, 384}, {16, 24}, {128, 3}, {256, 1}, {512, 0}, {48, 0}, {0, 24}};
    pl_engine *e = engine_of(1);
    pl_worker_state *w = &e->workers[0];
    pl_active *a = pl_active_new(1000);
    uint64_t x[8];
    int32_t n = hash_text("abcdef", x);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pl_ticket t = {0}, u = {0};
        const pl_load load = {.prompt_tokens = 6 * 64 + 10, .active = a, .keys = {x, n, 64}};
        int32_t block = cases[i].block ? cases[i].block : BLOCK;
        int64_t all = (6 * 64 + 10 + block - 1) / block;
        atomic_store(&w->block_tokens, cases[i].block);
        pl_ticket_begin(&t, w, &load);
        assert_int_equal(decode_blocks(w), all);
        pl_ticket_begin(&u, w, &load);
        assert_int_equal(decode_blocks(w), 2 * all - cases[i].counted);
        /* its size becomes known while they run: what was counted is what is taken back */
        atomic_store(&w->block_tokens, 32);
        pl_ticket_end(&t);
        assert_int_equal(decode_blocks(w), all);
        pl_ticket_end(&u);
        assert_int_equal(decode_blocks(w), 0);
    }
    assert_int_equal(pl_active_size(a), 0);
    pl_active_free(a);
    pl_engine_unref(e);
}

static void long_prompts_and_a_full_set(void **state)
{
    pl_engine *e = engine_of(1);
    pl_worker_state *w = &e->workers[0];
    enum { N = PL_ACTIVE_MAX_REQUEST_BLOCKS + 100 };
    uint64_t *x = malloc(N * sizeof *x);
    assert_non_null(x);
    pl_rng rng = {1};
    for (int i = 0; i < N; i++)
        x[i] = pl_rng_next(&rng);
    const pl_active_keys whole = {x, N, BLOCK};
    pl_active *a = pl_active_new(PL_ACTIVE_MAX_REQUEST_BLOCKS + 10);
    pl_ticket t = {0}, u = {0}, v = {0};
    pl_ticket_begin(&t, w, &(pl_load){.prompt_tokens = N * BLOCK, .active = a, .keys = whole});
    assert_int_equal(decode_blocks(w), N);
    assert_int_equal(pl_active_size(a), PL_ACTIVE_MAX_REQUEST_BLOCKS);
    pl_ticket_begin(&u, w, &(pl_load){.prompt_tokens = N * BLOCK, .active = a, .keys = whole});
    assert_int_equal(decode_blocks(w), N + 100);
    /* 5 known blocks and 20 new ones, for which there is no room: those are its own */
    uint64_t y[25];
    memcpy(y, x, 5 * sizeof *y);
    for (int i = 5; i < 25; i++)
        y[i] = pl_rng_next(&rng);
    const pl_load late = {.prompt_tokens = 25 * BLOCK, .active = a, .keys = {y, 25, BLOCK}};
    pl_ticket_begin(&v, w, &late);
    assert_int_equal(decode_blocks(w), N + 100 + 20);
    assert_int_equal(pl_active_size(a), PL_ACTIVE_MAX_REQUEST_BLOCKS);
    pl_ticket_end(&t);
    assert_int_equal(decode_blocks(w), N + 20);
    pl_ticket_end(&u);
    assert_int_equal(decode_blocks(w), 25);
    assert_int_equal(pl_active_size(a), 5);
    pl_ticket_end(&v);
    assert_int_equal(decode_blocks(w), 0);
    assert_int_equal(pl_active_nodes(a), 0);
    pl_active_free(a);
    free(x);
    pl_engine_unref(e);
}

/* --- random --- */

/* A request of the model. Its text is over two letters, so that any two share a prefix often. */
typedef struct request {
    pl_ticket t;
    char text[24];
    int tokens, output;
    pl_worker_state *w;
} request;

static void random_text(pl_rng *rng, char text[24])
{
    uint32_t n = pl_rng_below(rng, 20), letters = 1 + pl_rng_below(rng, 2);
    for (uint32_t i = 0; i < n; i++)
        text[i] = (char)('a' + pl_rng_below(rng, letters + 1) / 2);
    text[n] = 0;
}

/* The truth, the slow way: a prefix is counted where no earlier request has it. */
static int64_t model_blocks(const request *all, int n, const pl_worker_state *w)
{
    int64_t sum = 0;
    for (int i = 0; i < n; i++) {
        if (all[i].w != w)
            continue;
        int whole = (int)strlen(all[i].text);
        sum += (all[i].tokens + all[i].output + BLOCK - 1) / BLOCK - whole;
        for (int k = 1; k <= whole; k++) {
            bool seen = false;
            for (int j = 0; j < i && !seen; j++)
                seen = all[j].w == w && strncmp(all[j].text, all[i].text, (size_t)k) == 0;
            sum += !seen;
        }
    }
    return sum;
}

static void random_step(pl_rng *rng, request *r, pl_active *a, pl_worker_state *w)
{
    if (!r->w) {
        random_text(rng, r->text);
        r->tokens = (int)strlen(r->text) * BLOCK + (int)pl_rng_below(rng, BLOCK);
        r->output = 0;
        r->w = w;
        begin(&r->t, a, w, r->text, r->tokens - (int)strlen(r->text) * BLOCK);
    } else if (pl_rng_below(rng, 3) == 0) {
        int more = (int)pl_rng_below(rng, 40);
        r->output += more;
        pl_ticket_output(&r->t, more);
    } else {
        pl_ticket_end(&r->t);
        r->w = NULL;
    }
}

static void equals_a_naive_model(void **state)
{
    enum { REQUESTS = 24, WORKERS = 3, STEPS = 4000 };
    pl_engine *e = engine_of(WORKERS);
    for (uint64_t seed = 1; seed <= 6; seed++) {
        pl_rng rng = {seed};
        pl_active *a = pl_active_new(10000);
        request all[REQUESTS] = {{.w = NULL}};
        size_t most_nodes = 0;
        for (int k = 0; k < STEPS; k++) {
            request *r = &all[pl_rng_below(&rng, REQUESTS)];
            random_step(&rng, r, a, &e->workers[pl_rng_below(&rng, WORKERS)]);
            int active = 0;
            for (int i = 0; i < REQUESTS; i++)
                active += all[i].w != NULL;
            for (int i = 0; i < WORKERS; i++)
                if (decode_blocks(&e->workers[i]) != model_blocks(all, REQUESTS, &e->workers[i]))
                    fail_msg("seed %d, step %d: %d blocks, of which %d are true", (int)seed, k,
                             (int)decode_blocks(&e->workers[i]),
                             (int)model_blocks(all, REQUESTS, &e->workers[i]));
            assert_true(pl_active_nodes(a) <= 2 * (size_t)active);
            if (pl_active_nodes(a) > most_nodes)
                most_nodes = pl_active_nodes(a);
        }
        assert_true(most_nodes > REQUESTS); /* runs were split */
        for (int i = 0; i < REQUESTS; i++)
            pl_ticket_end(&all[i].t);
        for (int i = 0; i < WORKERS; i++)
            assert_int_equal(decode_blocks(&e->workers[i]), 0);
        assert_int_equal(pl_active_size(a) + pl_active_nodes(a), 0);
        pl_active_free(a);
    }
    pl_engine_unref(e);
}

enum { THREADS = 4, OF_EACH = 12, ROUNDS = 20 };

typedef struct thread {
    pthread_t id;
    pl_rng rng;
    pl_active *active;
    pl_engine *engine;
    request *requests; /* OF_EACH */
} thread;

static void *run_thread(void *arg)
{
    thread *t = arg;
    for (int k = 0; k < 600; k++)
        random_step(&t->rng, &t->requests[pl_rng_below(&t->rng, OF_EACH)], t->active,
                    &t->engine->workers[pl_rng_below(&t->rng, 2)]);
    return NULL;
}

/* Four threads on two workers (and their two locks); whenever all stand still, the counts are
 * exact. */
static void equals_it_on_several_threads(void **state)
{
    pl_engine *e = engine_of(2);
    pl_active *a = pl_active_new(100000);
    static request all[THREADS * OF_EACH];
    thread threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        threads[i] = (thread){
            .rng = {(uint64_t)i + 7}, .active = a, .engine = e, .requests = &all[i * OF_EACH]};
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < THREADS; i++)
            assert_int_equal(pthread_create(&threads[i].id, NULL, run_thread, &threads[i]), 0);
        for (int i = 0; i < THREADS; i++)
            pthread_join(threads[i].id, NULL);
        for (int i = 0; i < 2; i++)
            assert_int_equal(decode_blocks(&e->workers[i]),
                             model_blocks(all, THREADS * OF_EACH, &e->workers[i]));
    }
    for (int i = 0; i < THREADS * OF_EACH; i++)
        pl_ticket_end(&all[i].t);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(decode_blocks(&e->workers[i]), 0);
        assert_int_equal(atomic_load(&e->workers[i].queued_prefill_tokens), 0);
        assert_int_equal(atomic_load(&e->workers[i].inflight), 0);
    }
    assert_int_equal(pl_active_size(a) + pl_active_nodes(a), 0);
    pl_active_free(a);
    pl_engine_unref(e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shared_blocks_count_once),     cmocka_unit_test(off_each_counts_its_own),
        cmocka_unit_test(what_is_shared_is_told),       cmocka_unit_test(block_sizes_that_differ),
        cmocka_unit_test(long_prompts_and_a_full_set),  cmocka_unit_test(equals_a_naive_model),
        cmocka_unit_test(equals_it_on_several_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
