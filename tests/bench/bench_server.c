/* What the server side of HTTP costs by itself: one loop on its own thread answers 1 KB POSTs with
 * 256 bytes over keep-alive connections; the client is this thread. Prints the loop thread's CPU
 * time, read and write calls per request, and memory per waiting request.
 * Usage: bench_server [requests [connections]] */
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "http/server.h"

#define WAITING 2000

typedef struct usage {
    double user_s, sys_s;
    unsigned long long reads, writes;
} usage;

static pl_wheel wheel;
static atomic_int port;
static usage last;
static char answer[256];

static usage usage_now(void)
{
    usage u = {0};
    struct rusage r;
    getrusage(RUSAGE_THREAD, &r);
    u.user_s = (double)r.ru_utime.tv_sec + (double)r.ru_utime.tv_usec / 1e6;
    u.sys_s = (double)r.ru_stime.tv_sec + (double)r.ru_stime.tv_usec / 1e6;
    char path[64], line[80];
    snprintf(path, sizeof path, "/proc/self/task/%ld/io", (long)syscall(SYS_gettid));
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f)) {
        sscanf(line, "syscr: %llu", &u.reads);
        sscanf(line, "syscw: %llu", &u.writes);
    }
    if (f)
        fclose(f);
    return u;
}

static void on_request(void *ctx, pl_exchange *x)
{
    if (pl_str_eq(x->head.path, PL_STR("/wait")))
        return;
    if (pl_str_eq(x->head.path, PL_STR("/measure")))
        last = usage_now();
    const pl_header h = {PL_STR("Content-Type"), PL_STR("application/json")};
    pl_exchange_respond(x, 200, &h, 1, (pl_str){answer, sizeof answer});
}

static void on_tick(uv_timer_t *t)
{
    pl_wheel_advance(&wheel, pl_now_ns() / 1000000);
}

static void *serve(void *arg)
{
    uv_loop_t loop;
    uv_timer_t timer;
    uv_loop_init(&loop);
    uv_timer_init(&loop, &timer);
    pl_wheel_init(&wheel, pl_now_ns() / 1000000);
    uv_timer_start(&timer, on_tick, PL_WHEEL_TICK_MS, PL_WHEEL_TICK_MS);
    pl_server_options o;
    pl_server_options_default(&o);
    const pl_handlers h = {.on_request = on_request};
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    pl_server *s = pl_server_new(&loop, &wheel, &o, &h, NULL);
    int bound = 0;
    if (!s || pl_server_listen(s, (struct sockaddr *)&a, false, &bound) != 0)
        exit(1);
    atomic_store(&port, bound);
    uv_run(&loop, UV_RUN_DEFAULT);
    return NULL;
}

static int connect_to(void)
{
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                            .sin_port = htons((uint16_t)atomic_load(&port))};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&a, sizeof a) != 0) {
        perror("connect");
        exit(1);
    }
    return fd;
}

static size_t answer_bytes;

static void take_answer(int fd)
{
    char buf[4096];
    size_t had = 0;
    do {
        ssize_t k = recv(fd, buf + had, sizeof buf - had, 0);
        if (k <= 0) {
            fprintf(stderr, "the server closed\n");
            exit(1);
        }
        had += (size_t)k;
        char *end = answer_bytes ? NULL : memmem(buf, had, "\r\n\r\n", 4);
        if (end)
            answer_bytes = (size_t)(end - buf) + 4 + sizeof answer;
    } while (had < answer_bytes || !answer_bytes);
}

static usage measure(int fd)
{
    static const char text[] = "GET /measure HTTP/1.1\r\nHost: x\r\n\r\n";
    if (send(fd, text, sizeof text - 1, 0) < 0)
        exit(1);
    take_answer(fd);
    return last;
}

static long resident_bytes(void)
{
    long size = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%ld %ld", &size, &resident) != 2)
        exit(1);
    fclose(f);
    return resident * sysconf(_SC_PAGESIZE);
}

int main(int argc, char **argv)
{
    int requests = argc > 1 ? atoi(argv[1]) : 300000;
    int n = argc > 2 ? atoi(argv[2]) : 16;
    memset(answer, 'a', sizeof answer);
    pthread_t thread;
    if (n < 1 || n > 1000 || pthread_create(&thread, NULL, serve, NULL) != 0)
        return 2;
    while (!atomic_load(&port))
        sched_yield();

    char body[1024], request[1400];
    memset(body, 'b', sizeof body);
    int len = snprintf(request, sizeof request,
                       "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n"
                       "User-Agent: bench\r\nAccept: */*\r\nContent-Type: application/json\r\n"
                       "Authorization: Bearer sk-0123456789abcdef\r\nContent-Length: 1024\r\n\r\n"
                       "%.1024s",
                       body);
    int fds[1000];
    for (int i = 0; i < n; i++)
        fds[i] = connect_to();
    int control = connect_to();
    measure(control);
    usage before = measure(control);
    uint64_t start = pl_now_ns();
    for (int done = 0; done < requests; done += n) {
        for (int i = 0; i < n; i++)
            if (send(fds[i], request, (size_t)len, 0) != len)
                return 1;
        for (int i = 0; i < n; i++)
            take_answer(fds[i]);
    }
    double seconds = (double)(pl_now_ns() - start) / 1e9;
    usage after = measure(control);
    int done = (requests + n - 1) / n * n;
    printf("%d requests, %d connections, %.0f requests/s\n", done, n, done / seconds);
    printf("cpu per request: %.2f us user, %.2f us system\n",
           (after.user_s - before.user_s) * 1e6 / done, (after.sys_s - before.sys_s) * 1e6 / done);
    printf("calls per request: %.3f reads, %.3f writes\n",
           (double)(after.reads - before.reads) / done,
           (double)(after.writes - before.writes) / done);

    static const char wait_text[] = "GET /wait HTTP/1.1\r\nHost: x\r\n\r\n";
    long rss = resident_bytes();
    for (int i = 0; i < WAITING; i++) {
        int fd = connect_to();
        if (send(fd, wait_text, sizeof wait_text - 1, 0) < 0)
            return 1;
    }
    measure(control);
    measure(control);
    printf("memory per waiting request: %ld bytes\n", (resident_bytes() - rss) / WAITING);
    return 0;
}
