/* A redis-server of a test's own, and a loop to use it from. The server listens on a socket in a
 * new directory; it dies with the test. */
#ifndef PL_TEST_REDIS_SERVER_H
#define PL_TEST_REDIS_SERVER_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <stdatomic.h>

#include "base/clock.h"
#include "session/redis_impl.h"

#define PATIENCE_S 60 /* of the tests: longer than the slowest machine needs */

typedef struct server {
    char dir[64], path[96], password[32];
    int port; /* 0: the socket only */
    pid_t pid;
} server;

static void server_make(server *s)
{
    memset(s, 0, sizeof *s);
    snprintf(s->dir, sizeof s->dir, "/tmp/pl_redis_XXXXXX");
    assert_non_null(mkdtemp(s->dir));
    snprintf(s->path, sizeof s->path, "%s/s", s->dir);
}

/* A connection that waits, for what only a test does; NULL when nobody answers. */
static redisContext *server_talk(const server *s)
{
    struct timeval wait = {PATIENCE_S, 0};
    redisContext *c = redisConnectUnixWithTimeout(s->path, wait);
    if (c && !c->err)
        redisSetTimeout(c, wait);
    redisReply *r = NULL;
    if (c && !c->err && s->password[0]) {
        r = redisCommand(c, "AUTH %s", s->password);
        freeReplyObject(r);
    }
    r = c && !c->err ? redisCommand(c, "PING") : NULL;
    bool ok = r && r->type == REDIS_REPLY_STATUS;
    if (r)
        freeReplyObject(r);
    if (ok)
        return c;
    if (c)
        redisFree(c);
    return NULL;
}

/* False: it ended, because its port is taken for example. */
static bool server_try(server *s)
{
    char port[16];
    snprintf(port, sizeof port, "%d", s->port);
    unlink(s->path);
    s->pid = fork();
    assert_true(s->pid >= 0);
    if (s->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int null = open("/dev/null", O_RDWR);
        dup2(null, 0);
        dup2(null, 1);
        dup2(null, 2);
        execlp("redis-server", "redis-server", "--port", port, "--bind", "127.0.0.1",
               "--unixsocket", s->path, "--save", "", "--appendonly", "no", "--dir", s->dir,
               s->password[0] ? "--requirepass" : NULL, s->password, (char *)NULL);
        _exit(127);
    }
    uint64_t until_ns = pl_now_ns() + PATIENCE_S * 1000000000ull;
    for (;;) {
        redisContext *c = server_talk(s);
        if (c) {
            redisFree(c);
            return true;
        }
        if (waitpid(s->pid, NULL, WNOHANG) == s->pid) {
            s->pid = 0;
            return false;
        }
        assert_true(pl_now_ns() < until_ns);
        struct timespec tick = {0, 5000000};
        nanosleep(&tick, NULL); /* between two questions whether it is there */
    }
}

static void server_start(server *s)
{
    if (!server_try(s))
        fail_msg("redis-server ended: is it installed?");
}

static void server_kill(server *s)
{
    if (s->pid <= 0)
        return;
    kill(s->pid, SIGKILL);
    waitpid(s->pid, NULL, 0);
    s->pid = 0;
}

static void server_remove(server *s)
{
    server_kill(s);
    unlink(s->path);
    rmdir(s->dir);
}

static inline void server_tell(const server *s, const char *command)
{
    redisContext *c = server_talk(s);
    assert_non_null(c);
    redisReply *r = redisCommand(c, command);
    assert_non_null(r);
    assert_int_not_equal(r->type, REDIS_REPLY_ERROR);
    freeReplyObject(r);
    redisFree(c);
}

/* --- a loop with its wheel --- */

typedef struct driver {
    uv_loop_t loop;
    uv_timer_t tick;
    pl_wheel wheel;
} driver;

static void driver_tick(uv_timer_t *t)
{
    driver *d = t->data;
    pl_wheel_advance(&d->wheel, pl_now_ns() / 1000000);
}

static void driver_open(driver *d)
{
    assert_int_equal(uv_loop_init(&d->loop), 0);
    pl_wheel_init(&d->wheel, pl_now_ns() / 1000000);
    uv_timer_init(&d->loop, &d->tick);
    d->tick.data = d;
    uv_timer_start(&d->tick, driver_tick, 1, PL_WHEEL_TICK_MS);
}

/* Nothing may be left in the wheel and, but for what is being closed, in the loop. */
static void driver_close(driver *d)
{
    assert_int_equal(d->wheel.armed, 0);
    uv_close((uv_handle_t *)&d->tick, NULL);
    uv_run(&d->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&d->loop), 0);
}

#define DRIVE_UNTIL(d, condition)                                                                  \
    do {                                                                                           \
        uint64_t until_ = pl_now_ns() + PATIENCE_S * 1000000000ull;                                \
        while (!(condition)) {                                                                     \
            uv_run(&(d)->loop, UV_RUN_ONCE);                                                       \
            if (pl_now_ns() > until_)                                                              \
                fail_msg("waited in vain for %s", #condition);                                     \
        }                                                                                          \
    } while (0)

/* --- workers: w<slot>, of generation slot + 7; x... is not known here --- */

static size_t test_worker_name(void *ctx, int32_t slot, int32_t generation,
                               char buf[PL_REDIS_WORKER_MAX])
{
    if (generation != slot + 7)
        return 0;
    return (size_t)snprintf(buf, PL_REDIS_WORKER_MAX, "%s%d", ctx ? (const char *)ctx : "w", slot);
}

static int test_find_worker(void *ctx, pl_str name, int32_t rank, int32_t *slot,
                            int32_t *generation)
{
    (void)rank;
    if (name.p[0] != (ctx ? *(const char *)ctx : 'w'))
        return PL_ENOTFOUND;
    *slot = 0;
    for (size_t i = 1; i < name.n; i++)
        *slot = *slot * 10 + name.p[i] - '0';
    *generation = *slot + 7;
    return 0;
}

#endif
