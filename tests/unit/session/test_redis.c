/* The shared store on a real redis-server: the suite of every store, then what several handles owe
 * each other: races, leases, claims of expired sessions, memory. Outages are in test_redis_down.c.
 * The suite's time is virtual (clock_is_the_server); one test runs by the server's. */
#define SUITE_MODEL_SEEDS 2
#define SUITE_MODEL_STEPS 2000
#include "store_suite.h"

#include <pthread.h>

#include "redis_server.h"

static server srv;
static uint64_t clock_ns;
static int prefixes;

typedef struct env {
    driver d;
    pl_redis *r;
} env;

static void env_expired(void *ctx, pl_store *store, const pl_session_name *name,
                        const pl_binding *b)
{
    suite_expired(ctx, name, b);
    pl_store_redis_ack(store, b->version);
}

static pl_redis_options options(suite *s)
{
    static char prefix[32];
    snprintf(prefix, sizeof prefix, "t%d:", prefixes);
    return (pl_redis_options){.unix_path = pl_str_c(srv.path),
                              .prefix = pl_str_c(prefix),
                              .command_ms = 20000,
                              .connect_ms = 20000,
                              .no_stale = true,
                              .clock = pl_clock_virtual(&clock_ns),
                              .clock_is_the_server = true,
                              .worker_name = test_worker_name,
                              .find_worker = test_find_worker,
                              .expired = env_expired,
                              .expired_ctx = s};
}

static pl_redis_handle *handle(pl_store *s)
{
    return (pl_redis_handle *)s;
}

static pl_store *open_handle(driver *d, pl_redis *r, bool sweeps)
{
    pl_store *s;
    assert_int_equal(pl_store_redis_new(r, &d->loop, &d->wheel, sweeps, &s), 0);
    DRIVE_UNTIL(d, pl_store_redis_up(s) && !handle(s)->sweeping);
    return s;
}

static void sweep(driver *d, pl_store *s)
{
    DRIVE_UNTIL(d, !handle(s)->sweeping);
    pl_store_advance(s);
    DRIVE_UNTIL(d, !handle(s)->sweeping);
}

static void suite_open(suite *s, uint64_t cap)
{
    env *e = calloc(1, sizeof *e);
    clock_ns = 123456789012000;
    prefixes++;
    s->own = e;
    s->expired = 0;
    driver_open(&e->d);
    pl_redis_options o = options(s);
    o.cap = cap;
    assert_int_equal(pl_redis_new(&o, &e->r, NULL), 0);
    s->store = open_handle(&e->d, e->r, true);
}

static void suite_close(suite *s)
{
    env *e = s->own;
    pl_store_free(s->store);
    driver_close(&e->d);
    pl_redis_free(e->r);
    free(e);
    s->store = NULL;
}

static void suite_pass(suite *s, uint64_t ms)
{
    (void)s;
    clock_ns += ms * 1000000;
}

static uint64_t suite_now_ns(suite *s)
{
    (void)s;
    return clock_ns;
}

static void suite_advance(suite *s)
{
    sweep(&((env *)s->own)->d, s->store);
}

static void suite_reported(suite *s)
{
    suite_advance(s);
}

static void suite_settle(suite *s, pl_store_call *c)
{
    DRIVE_UNTIL(&((env *)s->own)->d, !c->pending);
}

static int suite_list(suite *s, pl_store_list_call *c)
{
    if (pl_store_list(s->store, c) == PL_STORE_PENDING)
        DRIVE_UNTIL(&((env *)s->own)->d, !c->pending);
    return c->result;
}

/* --- several routers --- */

/* A router of its own: another process's pl_redis, on a loop of its own. */
typedef struct router {
    suite s;
    env e;
} router;

static router *router_open(const char *workers)
{
    router *r = calloc(1, sizeof *r);
    r->s.own = &r->e;
    driver_open(&r->e.d);
    pl_redis_options o = options(&r->s);
    o.worker_ctx = (void *)workers;
    assert_int_equal(pl_redis_new(&o, &r->e.r, NULL), 0);
    r->s.store = open_handle(&r->e.d, r->e.r, true);
    return r;
}

static void router_close(router *r)
{
    if (r->s.store)
        pl_store_free(r->s.store);
    driver_close(&r->e.d);
    pl_redis_free(r->e.r);
    free(r);
}

static void fresh(void)
{
    prefixes++;
    clock_ns = 123456789012000;
}

typedef struct opener {
    pthread_barrier_t *gate;
    pl_redis_options o;
    int32_t slot;
    int won, lost;
} opener;

static void *open_all(void *arg)
{
    opener *o = arg;
    enum { AT_ONCE = 50 };
    driver d;
    driver_open(&d);
    pl_redis *r;
    pl_store *s;
    if (pl_redis_new(&o->o, &r, NULL) || pl_store_redis_new(r, &d.loop, &d.wheel, false, &s))
        abort();
    while (!pl_store_redis_up(s))
        uv_run(&d.loop, UV_RUN_ONCE);
    pthread_barrier_wait(o->gate);
    for (int i = 0; i < 1000; i += AT_ONCE) {
        pl_store_call c[AT_ONCE];
        char id[AT_ONCE][16];
        for (int k = 0; k < AT_ONCE; k++) {
            snprintf(id[k], sizeof id[k], "%d", i + k);
            c[k] = put_call(id[k], o->slot, ENGINE, 60000);
            c[k].when = PL_STORE_IF_ABSENT;
            if (pl_store_start(s, &c[k]) != PL_STORE_PENDING)
                abort();
        }
        for (int k = 0; k < AT_ONCE; k++) {
            while (c[k].pending)
                uv_run(&d.loop, UV_RUN_ONCE);
            o->won += c[k].result == 0;
            o->lost += c[k].result == PL_EEXISTS && c[k].had_old && c[k].old.slot != o->slot;
        }
    }
    pl_store_free(s);
    uv_close((uv_handle_t *)&d.tick, NULL);
    uv_run(&d.loop, UV_RUN_DEFAULT);
    if (uv_loop_close(&d.loop) != 0)
        abort();
    pl_redis_free(r);
    return NULL;
}

static void two_routers_that_open_one_session_end_on_one_worker(void **state)
{
    suite *s = *state;
    fresh();
    pthread_barrier_t gate;
    pthread_barrier_init(&gate, NULL, 2);
    opener o[2] = {{&gate, options(s), 1, 0, 0}, {&gate, options(s), 2, 0, 0}};
    pthread_t t[2];
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&t[i], NULL, open_all, &o[i]), 0);
    for (int i = 0; i < 2; i++)
        pthread_join(t[i], NULL);
    pthread_barrier_destroy(&gate);
    assert_int_equal(o[0].won + o[1].won, 1000);
    assert_int_equal(o[0].lost + o[1].lost, 1000);
}

static void a_turn_on_one_router_holds_off_the_other(void **state)
{
    (void)state;
    fresh();
    router *a = router_open(NULL), *b = router_open(NULL);
    bound(&a->s, "s", 3, ENGINE, 60000);
    assert_int_equal(leased(&a->s, "s", 71, 5000), 0);
    assert_int_equal(leased(&b->s, "s", 72, 5000), PL_EBUSY);
    assert_int_equal(released(&a->s, "s", 71, "held: 40 messages"), 0);
    pl_store_call c = turn_call(PL_STORE_LEASE, "s", 72, 5000);
    assert_int_equal(run(&b->s, &c), 0);
    assert_int_equal(c.binding.slot, 3);
    assert_note(&c.binding, "held: 40 messages");
    clock_ns += 5000000000; /* b dies: its lease ends by itself */
    assert_int_equal(leased(&a->s, "s", 73, 5000), 0);
    router_close(a);
    router_close(b);
}

static void an_expired_session_is_closed_by_one_router(void **state)
{
    (void)state;
    fresh();
    router *a = router_open(NULL), *b = router_open(NULL);
    char id[16];
    for (int i = 0; i < 300; i++) { /* more than one answer carries */
        snprintf(id, sizeof id, "%d", i);
        bound(&a->s, id, i, ENGINE, 1000 + (uint32_t)i);
    }
    for (int i = 0; i < 5; i++) {
        clock_ns += 500000000;
        pl_store_advance(a->s.store);
        pl_store_advance(b->s.store);
        sweep(&a->e.d, a->s.store);
        sweep(&b->e.d, b->s.store);
    }
    assert_int_equal(a->s.expired + b->s.expired, 300);
    /* acknowledged: nothing of them is left, also when one router dies */
    pl_store_free(a->s.store);
    a->s.store = NULL;
    clock_ns += 10000000000;
    sweep(&b->e.d, b->s.store);
    sweep(&b->e.d, b->s.store);
    assert_int_equal(a->s.expired + b->s.expired, 300);
    redisContext *c = server_talk(&srv);
    redisReply *keys = redisCommand(c, "KEYS t%d:*", prefixes);
    /* v, sweepers, and claims of a if its last acknowledgements never went */
    assert_true(keys->elements <= 3);
    freeReplyObject(keys);
    redisFree(c);
    router_close(a);
    router_close(b);
}

static void not_acknowledged(void *ctx, pl_store *store, const pl_session_name *name,
                             const pl_binding *b)
{
    (void)store;
    suite_expired(ctx, name, b);
}

static void a_router_that_dies_before_it_closed_is_replaced(void **state)
{
    (void)state;
    fresh();
    router *a = router_open(NULL), *b = router_open(NULL);
    ((pl_redis *)a->e.r)->o.expired = not_acknowledged;
    pl_store_call p = put_call("s", 5, ENGINE, 1000);
    p.binding.note = (pl_note){3, {'a', 'b', 'c'}};
    assert_int_equal(run(&a->s, &p), 0);
    clock_ns += 1000000000;
    sweep(&a->e.d, a->s.store);
    assert_int_equal(a->s.expired, 1);
    /* while a asks regularly, it is its to close */
    for (int i = 0; i < 10; i++) {
        clock_ns += 1000000000;
        sweep(&a->e.d, a->s.store);
        sweep(&b->e.d, b->s.store);
    }
    assert_int_equal(a->s.expired, 1);
    assert_int_equal(b->s.expired, 0);
    pl_store_free(a->s.store);
    a->s.store = NULL;
    for (int i = 0; i < 4; i++) { /* 4 s: two polls behind the 3 */
        clock_ns += 1000000000;
        sweep(&b->e.d, b->s.store);
    }
    assert_int_equal(b->s.expired, 1);
    assert_string_equal(b->s.last_id, "s");
    assert_int_equal(b->s.last.slot, 5);
    assert_int_equal(b->s.last.version, p.binding.version);
    assert_note(&b->s.last, "abc");
    assert_int_equal(pl_redis_stats_of(b->e.r)->takeovers, 1);
    router_close(a);
    router_close(b);
}

/* The server took a's question, and a's connection broke before the answer. */
static void a_lost_answer_loses_no_session(void **state)
{
    (void)state;
    fresh();
    router *a = router_open(NULL);
    bound(&a->s, "s", 5, ENGINE, 1000);
    clock_ns += 1000000000;
    redisContext *c = server_talk(&srv);
    redisReply *r =
        redisCommand(c, "EVALSHA %s 1 t%d: sweep %llu %s %llu 128 0", a->e.r->sha, prefixes,
                     (unsigned long long)(clock_ns / 1000), handle(a->s.store)->id,
                     (unsigned long long)handle(a->s.store)->seen);
    assert_int_equal(pl_redis_code(r), 0);
    assert_int_equal(r->element[8]->elements, 1);
    freeReplyObject(r);
    redisFree(c);
    sweep(&a->e.d, a->s.store);
    assert_int_equal(a->s.expired, 1);
    sweep(&a->e.d, a->s.store);
    assert_int_equal(a->s.expired, 1);
    router_close(a);
}

static void a_session_of_an_engine_that_is_not_known_here(void **state)
{
    (void)state;
    fresh();
    router *a = router_open("a"), *b = router_open("b");
    bound(&a->s, "s", 5, ENGINE, 1000);
    assert_int_equal(got(&a->s, "s"), 5);
    assert_int_equal(got(&b->s, "s"), -1);
    assert_int_equal(leased(&b->s, "s", 9, 5000), PL_ENOTFOUND);
    DRIVE_UNTIL(&b->e.d, handle(b->s.store)->ops == 0);
    assert_int_equal(leased(&a->s, "s", 8, 100), 0); /* b has not kept the lease */
    assert_int_equal(released(&a->s, "s", 8, ""), 0);
    pl_store_call c = put_call("s", 6, ENGINE, 1000);
    c.when = PL_STORE_IF_ABSENT;
    assert_int_equal(run(&b->s, &c), PL_EEXISTS);
    assert_true(c.had_old);
    assert_int_equal(c.old.slot, -1);
    c = put_call("s", 6, ENGINE, 1000);
    c.binding.generation = 99; /* a worker that has gone */
    assert_int_equal(run(&b->s, &c), PL_EINVALID);
    /* expired: b cannot close it, a does */
    clock_ns += 1000000000;
    sweep(&b->e.d, b->s.store);
    sweep(&b->e.d, b->s.store);
    clock_ns += 500000000;
    sweep(&a->e.d, a->s.store);
    assert_int_equal(b->s.expired, 0);
    assert_int_equal(a->s.expired, 1);
    sweep(&a->e.d, a->s.store); /* carries the acknowledgement */
    /* nobody can: it is not asked about for ever */
    bound(&a->s, "s2", 5, ENGINE, 1000);
    clock_ns += 1000000000;
    for (int i = 0; i < 30; i++) {
        sweep(&b->e.d, b->s.store);
        clock_ns += 500000000;
    }
    assert_in_range(pl_redis_stats_of(b->e.r)->given, 2, 11);
    router_close(a);
    router_close(b);
}

static void a_fresh_binding_is_answered_from_memory(void **state)
{
    suite *s = *state;
    fresh();
    driver d;
    driver_open(&d);
    pl_redis_options o = options(s);
    o.no_stale = false;
    pl_redis *r;
    assert_int_equal(pl_redis_new(&o, &r, NULL), 0);
    suite mine = {.store = open_handle(&d, r, false)}; /* driven by ASK */
    router *other = router_open(NULL);
#define ASK(c)                                                                                     \
    do {                                                                                           \
        if (pl_store_start(mine.store, &(c)) == PL_STORE_PENDING)                                  \
            DRIVE_UNTIL(&d, !(c).pending);                                                         \
    } while (0)
    pl_store_call p = put_call("r", 1, ROUTER, 60000), q = put_call("e", 2, ENGINE, 60000),
                  g = call_of(PL_STORE_GET, "r");
    ASK(p);
    ASK(q);
    const pl_redis_stats *st = pl_redis_stats_of(r);
    for (int i = 0; i < 5; i++) {
        g = call_of(PL_STORE_GET, "r");
        assert_int_equal(pl_store_start(mine.store, &g), 0); /* at once */
        assert_int_equal(g.binding.slot, 1);
        assert_int_equal(g.binding.turns, i + 1);
    }
    assert_int_equal(st->cached, 5);
    g = call_of(PL_STORE_GET, "e"); /* never an engine-backed one */
    ASK(g);
    assert_int_equal(st->cached, 5);
    /* the other router moves it: seen here within the staleness, the turns were not lost */
    clock_ns += 1000000000;
    assert_int_equal(seen(&other->s, PL_STORE_PEEK, "r").turns, 0);
    g = call_of(PL_STORE_GET, "r");
    ASK(g);
    assert_int_equal(g.binding.turns, 6);
    bound(&other->s, "r", 3, ROUTER, 60000);
    g = call_of(PL_STORE_GET, "r");
    ASK(g);
    assert_int_equal(g.binding.slot, 1); /* up to a second old */
    clock_ns += 1000000000;
    g = call_of(PL_STORE_GET, "r");
    ASK(g);
    assert_int_equal(g.binding.slot, 3);
    /* what this process itself changes is seen at once; short sessions are never answered so */
    g = call_of(PL_STORE_REMOVE, "r");
    ASK(g);
    g = call_of(PL_STORE_GET, "r");
    ASK(g);
    assert_int_equal(g.result, PL_ENOTFOUND);
    p = put_call("short", 1, ROUTER, 9999);
    ASK(p);
    uint64_t cached = st->cached;
    g = call_of(PL_STORE_GET, "short");
    ASK(g);
    assert_int_equal(st->cached, cached);
    pl_store_free(mine.store);
    router_close(other);
    driver_close(&d);
    pl_redis_free(r);
#undef ASK
}

static void by_the_servers_time(void **state)
{
    suite *s = *state;
    fresh();
    driver d;
    driver_open(&d);
    pl_redis_options o = options(s);
    o.clock = pl_clock_real();
    o.clock_is_the_server = false;
    pl_redis *r;
    assert_int_equal(pl_redis_new(&o, &r, NULL), 0);
    pl_store *st = open_handle(&d, r, true);
    uint64_t before_ns = pl_now_ns();
    pl_store_call c = put_call("s", 1, ENGINE, 300);
    assert_int_equal(pl_store_start(st, &c), PL_STORE_PENDING);
    DRIVE_UNTIL(&d, !c.pending);
    assert_int_equal(c.result, 0);
    /* told in this process's clock: between question and answer */
    assert_in_range(c.binding.opened_at_ns, before_ns, pl_now_ns());
    assert_in_range(c.binding.deadline_ns, before_ns + 300000000, pl_now_ns() + 300000000);
    s->expired = 0;
    DRIVE_UNTIL(&d, s->expired);
    assert_true(pl_now_ns() - before_ns >= 300000000);
    assert_string_equal(s->last_id, "s");
    pl_store_free(st);
    driver_close(&d);
    pl_redis_free(r);
}

/* A TCP port that nobody has right now; somebody may take it before it is used. */
static int free_port(void)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &n), 0);
    close(fd);
    return ntohs(a.sin_port);
}

static void by_name_over_tcp(void **state)
{
    suite *s = *state;
    fresh();
    server tcp;
    server_make(&tcp);
    snprintf(tcp.password, sizeof tcp.password, "%s", "pass word");
    for (int tries = 0; !tcp.pid; tries++) {
        assert_true(tries < 20);
        tcp.port = free_port();
        server_try(&tcp);
    }
    driver d;
    driver_open(&d);
    pl_redis_options o = options(s);
    o.unix_path = (pl_str){NULL, 0};
    o.host = PL_STR("localhost"); /* ::1 first on many machines, where the server is not */
    o.port = tcp.port;
    o.user = PL_STR("default");
    o.password = pl_str_c(tcp.password);
    o.db = 3;
    pl_redis *r;
    assert_int_equal(pl_redis_new(&o, &r, NULL), 0);
    pl_store *st = open_handle(&d, r, true);
    pl_store_call c = put_call("s", 1, ENGINE, 3000);
    pl_store_start(st, &c);
    DRIVE_UNTIL(&d, !c.pending);
    assert_int_equal(c.result, 0);
    pl_store_free(st);
    driver_close(&d);
    pl_redis_free(r);
    server_remove(&tcp);
}

static void somebody_empties_the_servers_scripts(void **state)
{
    suite *s = *state;
    suite_open(s, 100);
    bound(s, "a", 1, ENGINE, 1000);
    server_tell(&srv, "SCRIPT FLUSH");
    assert_int_equal(got(s, "a"), 1);
    server_tell(&srv, "SCRIPT FLUSH");
    suite_pass(s, 1000);
    suite_advance(s);
    assert_int_equal(s->expired, 1);
    suite_close(s);
}

static void memory_is_back(suite *s)
{
    server_tell(&srv, "CONFIG SET maxmemory 0");
    DRIVE_UNTIL(&((env *)s->own)->d, pl_store_redis_up(s->store));
}

static void a_server_without_memory_does_things_whole_or_not_at_all(void **state)
{
    suite *s = *state;
    suite_open(s, 100);
    bound(s, "expired", 1, ENGINE, 1000);
    bound(s, "turn", 1, ENGINE, 60000);
    assert_int_equal(leased(s, "turn", 71, 5000), 0);
    server_tell(&srv, "CONFIG SET maxmemory 1");
    pl_store_call c = turn_call(PL_STORE_RELEASE, "turn", 71, 0);
    c.binding.note = (pl_note){3, {'n', 'e', 'w'}};
    assert_int_equal(run(s, &c), PL_EUNAVAILABLE);
    assert_false(pl_store_redis_up(s->store));
    memory_is_back(s);
    assert_int_equal(run(s, &c), 0); /* the lease is still there, with what its turn brought */
    assert_note(&c.binding, "new");
    suite_pass(s, 1000);
    server_tell(&srv, "CONFIG SET maxmemory 1");
    c = call_of(PL_STORE_GET, "expired");
    assert_int_equal(run(s, &c), PL_EUNAVAILABLE);
    memory_is_back(s);
    suite_advance(s);
    assert_string_equal(s->last_id, "expired");
    suite_close(s);
}

static void a_server_full_of_expired_sessions_recovers(void **state)
{
    (void)state;
    enum { SESSIONS = 2000 };
    char id[200], command[64];
    fresh();
    router *a = router_open(NULL);
    for (int i = 0; i < SESSIONS; i++) {
        snprintf(id, sizeof id, "%0150d", i);
        bound(&a->s, id, 1, ROUTER, 1000);
    }
    redisContext *c = server_talk(&srv);
    redisReply *r = redisCommand(c, "INFO memory");
    unsigned long long used = strtoull(strstr(r->str, "used_memory:") + 12, NULL, 10);
    freeReplyObject(r);
    snprintf(command, sizeof command, "CONFIG SET maxmemory %llu", used - 300000);
    server_tell(&srv, command);
    clock_ns += 1000000000;
    router *b = router_open(NULL); /* up at last */
    sweep(&b->e.d, b->s.store);
    server_tell(&srv, "CONFIG SET maxmemory 0");
    r = redisCommand(c, "ZCARD t%d:lru", prefixes);
    assert_true(r->integer < SESSIONS);
    freeReplyObject(r);
    redisFree(c);
    router_close(a);
    router_close(b);
}

static void last_listed(pl_store_list_call *c, const pl_session_name *name, const pl_binding *b)
{
    (void)b;
    snprintf(c->ctx, 16, "%.*s", PL_FMT(name->id));
}

static void a_foreign_value_among_its_keys_stops_nothing_else(void **state)
{
    suite *s = *state;
    suite_open(s, 100);
    bound(s, "theirs", 1, ENGINE, 1000);
    bound(s, "ours", 1, ENGINE, 1000);
    char text[64];
    snprintf(text, sizeof text, "SET t%d:s:4:acmetheirs x", prefixes);
    server_tell(&srv, text);
    pl_store_list_call l = {.limit = 10, .each = last_listed, .ctx = text};
    assert_int_equal(suite_list(s, &l), 0);
    assert_string_equal(text, "ours");
    suite_pass(s, 1000);
    suite_advance(s);
    assert_string_equal(s->last_id, "ours");
    suite_close(s);
}

static void options_are_checked(void **state)
{
    suite *s = *state;
    pl_redis *r;
    pl_errbuf eb;
    for (int i = 0; i < 8; i++) {
        pl_redis_options o = options(s);
        switch (i) {
        case 0:
            o.host = PL_STR("both");
            break;
        case 1:
            o.port = 70000;
            break;
        case 2:
            o.user = PL_STR("u");
            break;
        case 3:
            o.db = -1;
            break;
        case 4:
            o.find_worker = NULL;
            break;
        case 5:
            o.password = PL_STR("a\0b");
            break;
        case 6:
            o.clock.now_ns = NULL;
            break;
        case 7:
            o.unix_path = (pl_str){"/01234567890123456789012345678901234567890123456789012345678901"
                                   "23456789012345678901"
                                   "2345678901234567890123456789",
                                   110};
            break;
        }
        assert_int_equal(pl_redis_new(&o, &r, &eb), PL_EINVALID);
        assert_null(r);
        assert_true(strlen(eb.text) > 5);
    }
    pl_redis_free(NULL);
}

static int start_server(void **state)
{
    (void)state;
    server_make(&srv);
    server_start(&srv);
    return 0;
}

static int stop_server(void **state)
{
    (void)state;
    server_remove(&srv);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        STORE_SUITE,
        cmocka_unit_test_setup(two_routers_that_open_one_session_end_on_one_worker, fresh_suite),
        cmocka_unit_test(a_turn_on_one_router_holds_off_the_other),
        cmocka_unit_test(an_expired_session_is_closed_by_one_router),
        cmocka_unit_test(a_router_that_dies_before_it_closed_is_replaced),
        cmocka_unit_test(a_lost_answer_loses_no_session),
        cmocka_unit_test(a_session_of_an_engine_that_is_not_known_here),
        cmocka_unit_test_setup(a_fresh_binding_is_answered_from_memory, fresh_suite),
        cmocka_unit_test_setup(by_the_servers_time, fresh_suite),
        cmocka_unit_test_setup(by_name_over_tcp, fresh_suite),
        cmocka_unit_test_setup(somebody_empties_the_servers_scripts, fresh_suite),
        cmocka_unit_test_setup(a_server_without_memory_does_things_whole_or_not_at_all,
                               fresh_suite),
        cmocka_unit_test(a_server_full_of_expired_sessions_recovers),
        cmocka_unit_test_setup(a_foreign_value_among_its_keys_stops_nothing_else, fresh_suite),
        cmocka_unit_test_setup(options_are_checked, fresh_suite),
    };
    return cmocka_run_group_tests(tests, start_server, stop_server);
}
