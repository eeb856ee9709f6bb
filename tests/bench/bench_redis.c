/* What the shared store adds to a request: GET, and LEASE with RELEASE, one at a time (latency) and
 * many at a time (operations per second), from one loop to a redis-server of its own on a Unix
 * socket, beside a bare PING on the same kind of connection (what the socket and the server's loop
 * cost without the script). Prints markdown.
 *
 * Usage: bench_redis [sessions, 100000] */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/rng.h"
#include "session/redis_impl.h"

enum { ONE_BY_ONE = 20000, AT_A_TIME = 64, MANY = 200000 };

static uv_loop_t loop;
static pl_wheel wheel;
static pl_store *store;
static pl_redis *redis;
static uint64_t sessions = 100000;

static void must(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "bench_redis: %s\n", what);
        exit(1);
    }
}

static void tick(uv_timer_t *t)
{
    (void)t;
    pl_wheel_advance(&wheel, pl_now_ns() / 1000000);
}

static size_t worker_name(void *ctx, int32_t slot, int32_t generation,
                          char buf[PL_REDIS_WORKER_MAX])
{
    (void)ctx;
    (void)generation;
    return (size_t)snprintf(buf, PL_REDIS_WORKER_MAX, "engine-%d", slot);
}

static int find_worker(void *ctx, pl_str name, int32_t rank, int32_t *slot, int32_t *generation)
{
    (void)ctx;
    (void)rank;
    *slot = (int32_t)strtol(name.p + 7, NULL, 10);
    *generation = 1;
    return 0;
}

static void expired(void *ctx, pl_store *s, const pl_session_name *name, const pl_binding *b)
{
    (void)ctx;
    (void)s;
    (void)name;
    (void)b;
}

static pid_t start_server(const char *dir, const char *path)
{
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (!freopen("/dev/null", "w", stdout))
            _exit(1);
        execlp("redis-server", "redis-server", "--port", "0", "--unixsocket", path, "--save", "",
               "--dir", dir, (char *)NULL);
        _exit(127);
    }
    must(pid > 0, "no process");
    return pid;
}

/* --- sessions --- */

typedef struct slot {
    pl_store_call c; /* first */
    char id[40];
} slot;

static uint64_t left, under_way;
static pl_rng rng = {1};
static pl_store_op op;

static void name_it(slot *s, uint64_t i, pl_store_op what)
{
    int n =
        snprintf(s->id, sizeof s->id, "%08llx-7c3e-4b1f-9d52-0123456789ab", (unsigned long long)i);
    s->c = (pl_store_call){.op = what, .name = {PL_STR("acme"), {s->id, (size_t)n}}};
    s->c.owner = what == PL_STORE_PUT ? 0 : i + 1;
    s->c.lease_ms = 30000;
}

static void go(slot *s);

static void done(pl_store_call *c)
{
    slot *s = (slot *)c;
    must(c->result == 0, pl_strerror(c->result));
    if (c->op == PL_STORE_LEASE) {
        c->op = PL_STORE_RELEASE;
        must(pl_store_start(store, c) == PL_STORE_PENDING, "not sent");
        return;
    }
    under_way--;
    go(s);
}

static void go(slot *s)
{
    if (!left)
        return;
    left--;
    under_way++;
    /* a lease is of one turn: two at a time must not be on one session */
    uint64_t i = op == PL_STORE_PUT || op == PL_STORE_LEASE
                     ? left % sessions
                     : pl_rng_below(&rng, (uint32_t)sessions);
    name_it(s, i, op);
    s->c.done = done;
    s->c.binding =
        (pl_binding){.slot = (int32_t)(i & 63), .generation = 1, .kind = PL_SESSION_ENGINE_BACKED};
    s->c.binding.ttl_ms = 3600000;
    int rc = pl_store_start(store, &s->c);
    must(rc == PL_STORE_PENDING, "not sent");
}

static double cpu_s(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)u.ru_utime.tv_sec + (double)u.ru_utime.tv_usec / 1e6 +
           (double)u.ru_stime.tv_sec + (double)u.ru_stime.tv_usec / 1e6;
}

static void throughput(const char *what, pl_store_op o, uint64_t n, bool print)
{
    static slot slots[AT_A_TIME];
    op = o;
    left = n;
    double cpu = cpu_s();
    uint64_t start_ns = pl_now_ns();
    for (int i = 0; i < AT_A_TIME; i++)
        go(&slots[i]);
    while (under_way)
        uv_run(&loop, UV_RUN_ONCE);
    double s = (double)(pl_now_ns() - start_ns) / 1e9;
    if (print)
        printf("| %s | %.0f | %.2f |\n", what, (double)n / s, (cpu_s() - cpu) / (double)n * 1e6);
}

static int by_size(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void print_latency(const char *what, uint64_t *ns, int n)
{
    qsort(ns, (size_t)n, sizeof *ns, by_size);
    printf("| %s | %.1f | %.1f | %.1f |\n", what, (double)ns[n / 2] / 1e3,
           (double)ns[n - n / 100] / 1e3, (double)ns[n - n / 1000] / 1e3);
    fflush(stdout);
}

static void latency(const char *what, pl_store_op o)
{
    static uint64_t ns[ONE_BY_ONE];
    static slot s;
    op = o;
    for (int i = 0; i < ONE_BY_ONE; i++) {
        left = 1;
        uint64_t start_ns = pl_now_ns();
        go(&s);
        while (under_way)
            uv_run(&loop, UV_RUN_ONCE);
        ns[i] = pl_now_ns() - start_ns;
    }
    print_latency(what, ns, ONE_BY_ONE);
}

static void ping_latency(const char *path)
{
    static uint64_t ns[ONE_BY_ONE];
    redisContext *c = redisConnectUnix(path);
    must(c && !c->err, "no connection");
    for (int i = 0; i < ONE_BY_ONE; i++) {
        uint64_t start_ns = pl_now_ns();
        redisReply *r = redisCommand(c, "PING");
        ns[i] = pl_now_ns() - start_ns;
        must(r != NULL, "no answer");
        freeReplyObject(r);
    }
    redisFree(c);
    print_latency("PING, a blocking client", ns, ONE_BY_ONE);
}

int main(int argc, char **argv)
{
    if (argc > 1)
        sessions = strtoull(argv[1], NULL, 10);
    must(sessions > 0 && sessions < 10000000, "sessions: 1 to 9999999");
    char dir[] = "/tmp/bench_redis_XXXXXX", path[64];
    must(mkdtemp(dir) != NULL, "no directory");
    snprintf(path, sizeof path, "%s/s", dir);
    pid_t server = start_server(dir, path);
    uv_loop_init(&loop);
    pl_wheel_init(&wheel, pl_now_ns() / 1000000);
    uv_timer_t timer;
    uv_timer_init(&loop, &timer);
    uv_timer_start(&timer, tick, PL_WHEEL_TICK_MS, PL_WHEEL_TICK_MS);
    pl_redis_options o = {.unix_path = pl_str_c(path),
                          .command_ms = 5000,
                          .no_stale = true,
                          .cap = 20000000,
                          .clock = pl_clock_real(),
                          .worker_name = worker_name,
                          .find_worker = find_worker,
                          .expired = expired};
    pl_errbuf eb;
    must(pl_redis_new(&o, &redis, &eb) == 0, eb.text);
    must(pl_store_redis_new(redis, &loop, &wheel, true, &store) == 0, "no store");
    while (!pl_store_redis_up(store))
        uv_run(&loop, UV_RUN_ONCE);

    throughput("", PL_STORE_PUT, sessions, false);
    printf("%llu sessions on one redis-server, Unix socket, one loop\n\n",
           (unsigned long long)sessions);
    printf("| one at a time | p50 us | p99 us | p99.9 us |\n|---|---|---|---|\n");
    ping_latency(path);
    latency("GET", PL_STORE_GET);
    latency("LEASE and RELEASE", PL_STORE_LEASE);
    printf("\n| %d at a time | /s | CPU us of the router |\n|---|---|---|\n", AT_A_TIME);
    throughput("GET", PL_STORE_GET, MANY, true);
    throughput("PEEK", PL_STORE_PEEK, MANY, true);
    throughput("PUT, again", PL_STORE_PUT, sessions, true);
    throughput("LEASE and RELEASE", PL_STORE_LEASE, MANY / 2, true);
    pl_store_free(store);
    uv_close((uv_handle_t *)&timer, NULL);
    uv_run(&loop, UV_RUN_DEFAULT);
    uv_loop_close(&loop);
    pl_redis_free(redis);
    kill(server, SIGTERM);
    waitpid(server, NULL, 0);
    unlink(path);
    rmdir(dir);
    return 0;
}
