/* A shared store whose server is of no use: what the tests of that have in common. */
#ifndef REDIS_DOWN_H
#define REDIS_DOWN_H

#include "redis_server.h"

#include <sys/socket.h>
#include <sys/un.h>

#include "base/log.h"

#define COMMAND_MS 300

typedef struct fixture {
    server srv;
    driver d;
    pl_redis *r;
    pl_store *s;
    int log; /* a file that stderr goes to */
    int stderr_was;
    int expired;
} fixture;

static void on_expired(void *ctx, pl_store *s, const pl_session_name *name, const pl_binding *b)
{
    (void)name;
    ((fixture *)ctx)->expired++;
    pl_store_redis_ack(s, b->version);
}

static pl_redis_options options(fixture *f)
{
    return (pl_redis_options){.unix_path = pl_str_c(f->srv.path),
                              .command_ms = COMMAND_MS,
                              .connect_ms = 1000,
                              .no_stale = true,
                              .clock = pl_clock_real(),
                              .worker_name = test_worker_name,
                              .find_worker = test_find_worker,
                              .expired = on_expired,
                              .expired_ctx = f};
}

static void open_with(fixture *f, const pl_redis_options *o)
{
    assert_int_equal(pl_redis_new(o, &f->r, NULL), 0);
    assert_int_equal(pl_store_redis_new(f->r, &f->d.loop, &f->d.wheel, true, &f->s), 0);
}

static void close_store(fixture *f)
{
    if (f->s)
        pl_store_free(f->s);
    f->s = NULL;
    driver_close(&f->d);
    pl_redis_free(f->r);
    f->r = NULL;
    driver_open(&f->d);
}

static void up(fixture *f)
{
    DRIVE_UNTIL(&f->d, pl_store_redis_up(f->s));
}

static void down(fixture *f)
{
    DRIVE_UNTIL(&f->d, atomic_load(&pl_redis_stats_of(f->r)->handles_down) == 1);
}

static pl_store_call call(pl_store_op op, const char *id)
{
    return (pl_store_call){.op = op, .name = {PL_STR("acme"), pl_str_c(id)}};
}

static pl_store_call put(const char *id, int32_t slot, pl_session_kind kind)
{
    pl_store_call c = call(PL_STORE_PUT, id);
    c.binding = (pl_binding){.slot = slot, .generation = slot + 7, .kind = kind, .ttl_ms = 600000};
    return c;
}

static int ask(fixture *f, pl_store_call *c)
{
    if (pl_store_start(f->s, c) == PL_STORE_PENDING)
        DRIVE_UNTIL(&f->d, !c->pending);
    return c->result;
}

/* The text logged so far. */
static char *logged(fixture *f)
{
    static char text[65536];
    fflush(stderr);
    ssize_t n = pread(f->log, text, sizeof text - 1, 0);
    text[n > 0 ? n : 0] = 0;
    return text;
}

static int times(const char *text, const char *what)
{
    int n = 0;
    for (const char *p = text; (p = strstr(p, what)); p += strlen(what))
        n++;
    return n;
}

static int begin(void **state)
{
    fixture *f = calloc(1, sizeof *f);
    server_make(&f->srv);
    driver_open(&f->d);
    char name[96];
    snprintf(name, sizeof name, "%s/log", f->srv.dir);
    f->log = open(name, O_RDWR | O_CREAT | O_TRUNC | O_APPEND, 0600);
    unlink(name);
    f->stderr_was = dup(2);
    dup2(f->log, 2);
    pl_log_init(PL_LOG_INFO, 1);
    *state = f;
    return f->log < 0;
}

static int end(void **state)
{
    fixture *f = *state;
    close_store(f);
    driver_close(&f->d);
    if (f->srv.pid > 0)
        kill(f->srv.pid, SIGCONT);
    server_remove(&f->srv);
    dup2(f->stderr_was, 2);
    close(f->stderr_was);
    close(f->log);
    free(f);
    return 0;
}

/* At once: without a turn of the loop. */
static void assert_unavailable(fixture *f)
{
    static const pl_store_op ops[] = {PL_STORE_GET, PL_STORE_PEEK, PL_STORE_REMOVE, PL_STORE_LEASE,
                                      PL_STORE_RELEASE};
    for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++) {
        pl_store_call c = call(ops[i], "nobody knows it");
        c.owner = 1;
        c.lease_ms = 1000;
        assert_int_equal(pl_store_start(f->s, &c), PL_EUNAVAILABLE);
        assert_false(c.stale);
    }
    pl_store_call c = put("e", 1, PL_SESSION_ENGINE_BACKED);
    assert_int_equal(pl_store_start(f->s, &c), PL_EUNAVAILABLE);
    pl_store_list_call l = {.limit = 10};
    assert_int_equal(pl_store_list(f->s, &l), PL_EUNAVAILABLE);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, begin, end)

#endif
