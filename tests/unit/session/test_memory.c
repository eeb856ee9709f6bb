/* The memory store: the suite of every store, then what is its own: many threads, many sessions,
 * its memory. The clock is virtual, and atomic because threads read it. */
#include "store_suite.h"

#include <pthread.h>
#include <stdatomic.h>

static _Atomic uint64_t clock_ns;

static uint64_t read_clock(void *ctx)
{
    (void)ctx;
    return atomic_load_explicit(&clock_ns, memory_order_relaxed);
}

static void suite_open(suite *s, uint64_t cap)
{
    pl_store_options o = {{read_clock, NULL}, cap, suite_expired, s};
    atomic_store(&clock_ns, 123456789012345);
    s->expired = 0;
    assert_int_equal(pl_store_memory_new(&o, &s->store), 0);
}

static void suite_close(suite *s)
{
    pl_store_free(s->store);
    s->store = NULL;
}

static void suite_pass(suite *s, uint64_t ms)
{
    (void)s;
    atomic_fetch_add(&clock_ns, ms * 1000000);
}

static uint64_t suite_now_ns(suite *s)
{
    (void)s;
    return read_clock(NULL);
}

static void suite_advance(suite *s)
{
    pl_store_advance(s->store);
}

static void suite_reported(suite *s)
{
    (void)s; /* at once */
}

static int suite_list(suite *s, pl_store_list_call *c)
{
    int rc = pl_store_list(s->store, c);
    assert_int_equal(rc, c->result);
    return rc;
}

static void suite_settle(suite *s, pl_store_call *c)
{
    (void)s;
    (void)c;
    fail_msg("the memory store answers at once");
}

/* --- threads --- */

enum { THREADS = 4, SHARED_NAMES = 48, ROUNDS = 20000 };

/* Each engine-backed binding that was put, less each that was handed back, as numbers that tell
 * (name, version) apart. */
typedef struct account {
    _Atomic uint64_t n, sum;
    _Atomic int stop;
    pl_store *store;
    unsigned next_thread;
    pthread_mutex_t lock;
} account;

static void book(account *a, const pl_session_name *name, const pl_binding *b, int sign)
{
    if (b->kind != ENGINE)
        return;
    pl_rng mix = {b->version * 1000003 + (uint64_t)name->id.p[1] * 64 + (uint64_t)name->id.p[0]};
    uint64_t x = pl_rng_next(&mix);
    atomic_fetch_add(&a->n, (uint64_t)(int64_t)sign);
    atomic_fetch_add(&a->sum, sign > 0 ? x : -x);
}

static void account_expired(void *ctx, const pl_session_name *name, const pl_binding *b)
{
    book(ctx, name, b, -1);
}

static void check_listed(pl_store_list_call *c, const pl_session_name *name, const pl_binding *b)
{
    (void)c;
    if (b->slot != name->id.p[0] - '0' + 8 * (name->id.p[1] - 'a') ||
        (b->note.n && memcmp(b->note.bytes, name->id.p, 2) != 0))
        abort(); /* torn */
}

static void *use_store(void *arg)
{
    account *a = arg;
    pthread_mutex_lock(&a->lock);
    pl_rng rng = {a->next_thread++};
    pthread_mutex_unlock(&a->lock);
    for (int i = 0; i < ROUNDS; i++) {
        atomic_fetch_add(&clock_ns, 200000); /* 16 s in all, whatever drive_time gets to */
        uint32_t which = pl_rng_below(&rng, SHARED_NAMES);
        char id[2] = {(char)('0' + which % 8), (char)('a' + which / 8)};
        pl_store_call c = {.op = (pl_store_op)pl_rng_below(&rng, 6),
                           .name = {PL_STR("acme"), {id, 2}},
                           .when = (pl_store_when)pl_rng_below(&rng, 3)};
        c.binding = (pl_binding){.slot = (int32_t)which,
                                 .kind = (pl_session_kind)pl_rng_below(&rng, 2),
                                 .ttl_ms = 1 + pl_rng_below(&rng, 3000)};
        if (c.op >= PL_STORE_LEASE) {
            c.owner = 1 + pl_rng_below(&rng, 2);
            c.lease_ms = 1 + pl_rng_below(&rng, 1500);
            c.binding.note = (pl_note){2, {id[0], id[1]}};
        }
        int rc = pl_store_start(a->store, &c);
        if (i % 64 == 0) {
            pl_store_list_call l = {.limit = 50, .each = check_listed};
            if (pl_store_list(a->store, &l) != 0)
                abort();
        }
        if (rc == 0 && c.op == PL_STORE_PUT)
            book(a, &c.name, &c.binding, 1);
        if (rc == 0 && c.op >= PL_STORE_PUT && c.had_old)
            book(a, &c.name, &c.old, -1);
        if (rc == 0 && c.op != PL_STORE_PUT && c.op != PL_STORE_REMOVE &&
            c.binding.slot != (int32_t)which)
            abort(); /* another session's binding */
    }
    return NULL;
}

static void *drive_time(void *arg)
{
    account *a = arg;
    while (!atomic_load(&a->stop)) {
        atomic_fetch_add(&clock_ns, 20000000);
        pl_store_advance(a->store);
    }
    return NULL;
}

static void every_engine_session_is_handed_back_exactly_once(void **state)
{
    (void)state;
    for (uint64_t cap = SHARED_NAMES / 3; cap <= SHARED_NAMES; cap += SHARED_NAMES * 2 / 3) {
        account a = {.lock = PTHREAD_MUTEX_INITIALIZER};
        pl_store_options o = {{read_clock, NULL}, cap, account_expired, &a};
        assert_int_equal(pl_store_memory_new(&o, &a.store), 0);
        pthread_t t[THREADS], time[2];
        for (int i = 0; i < 2; i++)
            assert_int_equal(pthread_create(&time[i], NULL, drive_time, &a), 0);
        for (int i = 0; i < THREADS; i++)
            assert_int_equal(pthread_create(&t[i], NULL, use_store, &a), 0);
        for (int i = 0; i < THREADS; i++)
            pthread_join(t[i], NULL);
        atomic_store(&a.stop, 1);
        for (int i = 0; i < 2; i++)
            pthread_join(time[i], NULL);
        pl_store_stats st;
        pl_store_stats_read(a.store, &st);
        assert_int_equal(st.engine_backed, atomic_load(&a.n));
        assert_true(st.engine_backed + st.router_only <= cap);
        assert_true(st.expired_engine_backed > 0);
        if (cap < SHARED_NAMES)
            assert_true(st.evicted > 0);
        suite_pass(NULL, 5000);
        pl_store_advance(a.store);
        assert_int_equal(atomic_load(&a.n), 0);
        assert_int_equal(atomic_load(&a.sum), 0);
        pl_store_stats_read(a.store, &st);
        assert_int_equal(st.router_only + st.engine_backed, 0);
        /* and all of the room has come back */
        suite again = {.store = a.store};
        for (uint64_t i = 0; i < cap; i++) {
            char id[16];
            snprintf(id, sizeof id, "z%d", (int)i);
            bound(&again, id, 1, ROUTER, 1000);
        }
        uint64_t evicted = st.evicted;
        pl_store_stats_read(a.store, &st);
        assert_int_equal(st.evicted, evicted);
        assert_int_equal(st.router_only, cap);
        pl_store_free(a.store);
    }
}

typedef struct opener {
    pl_store *store;
    pthread_barrier_t *gate;
    int32_t slot;
    int won;
} opener;

static void *open_all(void *arg)
{
    opener *o = arg;
    pthread_barrier_wait(o->gate);
    for (int i = 0; i < 2000; i++) {
        char id[16];
        int n = snprintf(id, sizeof id, "%d", i);
        pl_store_call c = {.op = PL_STORE_PUT,
                           .when = PL_STORE_IF_ABSENT,
                           .name = {PL_STR("acme"), {id, (size_t)n}}};
        c.binding = (pl_binding){.slot = o->slot, .kind = ENGINE, .ttl_ms = 60000};
        int rc = pl_store_start(o->store, &c);
        if (rc == 0)
            o->won++;
        else if (rc != PL_EEXISTS || c.old.slot == o->slot)
            abort();
    }
    return NULL;
}

static void two_that_open_one_session_end_on_one_worker(void **state)
{
    suite *s = *state;
    suite_open(s, 5000);
    pthread_barrier_t gate;
    pthread_barrier_init(&gate, NULL, 2);
    opener o[2] = {{s->store, &gate, 1, 0}, {s->store, &gate, 2, 0}};
    pthread_t t[2];
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&t[i], NULL, open_all, &o[i]), 0);
    for (int i = 0; i < 2; i++)
        pthread_join(t[i], NULL);
    pthread_barrier_destroy(&gate);
    assert_int_equal(o[0].won + o[1].won, 2000);
    assert_int_equal(held(s), 2000);
    suite_close(s);
}

typedef struct flooder {
    pl_store *store;
    int who;
} flooder;

static void *flood(void *arg)
{
    flooder *f = arg;
    for (int i = 0; i < 5000; i++) {
        char id[32];
        int n = snprintf(id, sizeof id, "%d-%d", f->who, i);
        pl_store_call c = {.op = PL_STORE_PUT, .name = {PL_STR("acme"), {id, (size_t)n}}};
        c.binding = (pl_binding){.slot = 1, .kind = ROUTER, .ttl_ms = 60000};
        if (pl_store_start(f->store, &c) != 0)
            abort(); /* there is always one to evict */
    }
    return NULL;
}

static void a_flood_ends_exactly_at_the_cap(void **state)
{
    suite *s = *state;
    suite_open(s, 300);
    flooder f[THREADS];
    pthread_t t[THREADS];
    for (int i = 0; i < THREADS; i++) {
        f[i] = (flooder){s->store, i};
        assert_int_equal(pthread_create(&t[i], NULL, flood, &f[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(t[i], NULL);
    pl_store_stats st;
    pl_store_stats_read(s->store, &st);
    assert_int_equal(st.router_only, 300);
    assert_int_equal(st.evicted, THREADS * 5000 - 300);
    suite_close(s);
}

/* --- memory --- */

static void memory_is_compact_and_goes_back(void **state)
{
    suite *s = *state;
    enum { MANY = 200000 };
    for (int kind = ROUTER; kind <= ENGINE; kind++) {
        suite_open(s, MANY);
        pl_store_stats st;
        pl_store_stats_read(s->store, &st);
        uint64_t empty = st.bytes;
        assert_true(empty < 1 << 20);
        char id[64];
        for (int i = 0; i < MANY; i++) {
            snprintf(id, sizeof id, "5f1c%08x-7c3e-4b1f-9d52-0123456789", i); /* a UUID's length */
            bound(s, id, i % 50, (pl_session_kind)kind, 1000 + (uint32_t)i % 5000);
        }
        pl_store_stats_read(s->store, &st);
        assert_int_equal(st.router_only + st.engine_backed, MANY);
        uint64_t each = (st.bytes - empty) / MANY;
        assert_in_range(each, 112, kind == ENGINE ? 290 : 180);
        for (int i = 0; i < MANY; i += 997) {
            snprintf(id, sizeof id, "5f1c%08x-7c3e-4b1f-9d52-0123456789", i);
            assert_int_equal(peeked(s, id), i % 50);
        }
        for (int i = 0; i < 15; i++) {
            suite_pass(s, 500);
            suite_advance(s);
        }
        pl_store_stats_read(s->store, &st);
        assert_int_equal(st.router_only + st.engine_backed, 0);
        assert_int_equal(s->expired, kind == ENGINE ? MANY : 0);
        assert_true(st.bytes < empty + (20u << 20)); /* the first chunk of each shard stays */
        suite_close(s);
    }
}

static void options_are_checked(void **state)
{
    (void)state;
    pl_store *st;
    pl_store_options o = {{read_clock, NULL}, 0, NULL, NULL};
    assert_int_equal(pl_store_memory_new(&o, &st), PL_EINVALID);
    o.cap = (uint64_t)UINT32_MAX + 1;
    assert_int_equal(pl_store_memory_new(&o, &st), PL_EINVALID);
    o.cap = UINT32_MAX;
    assert_int_equal(pl_store_memory_new(&o, &st), 0);
    pl_store_free(st);
    o.clock.now_ns = NULL;
    assert_int_equal(pl_store_memory_new(&o, &st), PL_EINVALID);
    assert_null(st);
    pl_store_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        STORE_SUITE,
        cmocka_unit_test(every_engine_session_is_handed_back_exactly_once),
        cmocka_unit_test_setup(two_that_open_one_session_end_on_one_worker, fresh_suite),
        cmocka_unit_test_setup(a_flood_ends_exactly_at_the_cap, fresh_suite),
        cmocka_unit_test_setup(memory_is_compact_and_goes_back, fresh_suite),
        cmocka_unit_test(options_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
