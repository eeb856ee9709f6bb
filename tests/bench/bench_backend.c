/* The engine that benchmarks put behind a proxy: one thread, epoll, four ports, as little work per
 * request as an honest HTTP/1.1 server can do. Started by proxy.sh and instructions.sh; prints its
 * ports in one line and runs until it is killed.
 *
 *   GET /health, GET /v1/models     what a router asks an engine for
 *   POST anything                   256 bytes of JSON
 *   ... with "chunks":N in it       an SSE stream of N events of 200 bytes, each with the time it
 *                                   was sent at ("t", monotonic ns), and [DONE]; "pace_us":P apart
 *   ... and "hold":true             N events, then nothing more until the client goes
 *
 * Usage: bench_backend [PORTS] */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/clock.h"

#define EVENT_BYTES 200
#define HEAD_MAX    8192 /* request head plus the part of the body that is looked at */
#define PORTS_MAX   16

typedef struct conn {
    int fd;
    bool listener, watching_out;
    char in[HEAD_MAX];
    size_t in_n;
    size_t head_n; /* 0 while the head is incomplete */
    uint64_t body_left;
    pl_buf out; /* what the socket did not take */
    /* a stream */
    int chunks_left, number;
    uint64_t pace_ns, next_ns;
    bool hold;
    int active_at; /* place in `active`, -1 when no event is due */
} conn;

static int epoll_fd, timer_fd;
static conn **active;
static int active_n, active_cap;
static char answer[512];
static size_t answer_n;

static void die(const char *what)
{
    perror(what);
    exit(1);
}

/* --- streams with a next event --- */

static void deactivate(conn *c)
{
    if (c->active_at < 0)
        return;
    conn *last = active[--active_n];
    active[c->active_at] = last;
    last->active_at = c->active_at;
    c->active_at = -1;
}

static void activate(conn *c)
{
    if (active_n == active_cap) {
        active_cap = active_cap ? active_cap * 2 : 64;
        active = realloc(active, (size_t)active_cap * sizeof *active);
        if (!active)
            die("realloc");
    }
    c->active_at = active_n;
    active[active_n++] = c;
}

static void arm_timer(void)
{
    uint64_t first = UINT64_MAX;
    for (int i = 0; i < active_n; i++)
        if (active[i]->next_ns < first)
            first = active[i]->next_ns;
    struct itimerspec when = {{0, 0}, {0, 0}};
    if (first != UINT64_MAX) {
        when.it_value.tv_sec = (time_t)(first / 1000000000u);
        when.it_value.tv_nsec = (long)(first % 1000000000u);
    }
    timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &when, NULL);
}

/* --- connections --- */

static void conn_close(conn *c)
{
    deactivate(c);
    close(c->fd);
    pl_buf_free(&c->out);
    free(c);
}

static void watch(conn *c, bool out)
{
    if (c->watching_out == out)
        return;
    c->watching_out = out;
    struct epoll_event ev = {.events = EPOLLIN | (out ? EPOLLOUT : 0u), .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &ev);
}

/* False: the connection is broken. */
static bool put(conn *c, const char *p, size_t n)
{
    ssize_t sent = c->out.n ? 0 : send(c->fd, p, n, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN)
        return false;
    size_t done = sent > 0 ? (size_t)sent : 0;
    if (done < n && pl_buf_add(&c->out, p + done, n - done) != 0)
        return false;
    watch(c, c->out.n > 0);
    return true;
}

static bool flush(conn *c)
{
    ssize_t sent = send(c->fd, c->out.p, c->out.n, MSG_NOSIGNAL);
    if (sent < 0)
        return errno == EAGAIN;
    pl_buf_shift(&c->out, (size_t)sent);
    watch(c, c->out.n > 0);
    return true;
}

static bool put_event(conn *c)
{
    char ev[EVENT_BYTES + 64];
    int head = snprintf(ev, sizeof ev, "%x\r\n", EVENT_BYTES);
    int n = snprintf(ev + head, EVENT_BYTES,
                     "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"t\":%llu,"
                     "\"model\":\"bench\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"w%d ",
                     (unsigned long long)pl_now_ns(), c->number++);
    static const char tail[] = "\"}}]}\n\n";
    memset(ev + head + n, 'x', EVENT_BYTES - (size_t)n);
    memcpy(ev + head + EVENT_BYTES - (sizeof tail - 1), tail, sizeof tail - 1);
    memcpy(ev + head + EVENT_BYTES, "\r\n", 2);
    return put(c, ev, (size_t)head + EVENT_BYTES + 2);
}

static bool end_stream(conn *c)
{
    static const char end[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
    return put(c, end, sizeof end - 1);
}

/* Sends what is due of a stream. */
static bool step_stream(conn *c, uint64_t now)
{
    while (c->chunks_left > 0 && c->next_ns <= now) {
        if (!put_event(c))
            return false;
        c->chunks_left--;
        c->next_ns += c->pace_ns;
    }
    if (c->chunks_left > 0) {
        if (c->active_at < 0)
            activate(c);
        return true;
    }
    deactivate(c);
    return c->hold || end_stream(c);
}

static long number_after(const char *text, const char *key)
{
    const char *at = strstr(text, key);
    return at ? strtol(at + strlen(key), NULL, 10) : -1;
}

static bool start_stream(conn *c, const char *text, long chunks)
{
    static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                               "Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n";
    long pace_us = number_after(text, "\"pace_us\":");
    c->chunks_left = (int)chunks;
    c->number = 0;
    c->pace_ns = pace_us > 0 ? (uint64_t)pace_us * 1000 : 0;
    c->next_ns = pl_now_ns();
    c->hold = strstr(text, "\"hold\":true") != NULL;
    return put(c, head, sizeof head - 1) && step_stream(c, c->next_ns);
}

static bool respond(conn *c)
{
    static const char models[] =
        "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":\"model\"}]}";
    char text[256];
    c->in[c->in_n] = 0;
    if (strncmp(c->in, "POST ", 5) == 0) {
        const char *body = c->in + c->head_n;
        long chunks = number_after(body, "\"chunks\":");
        return chunks >= 0 ? start_stream(c, body, chunks) : put(c, answer, answer_n);
    }
    bool health = strncmp(c->in, "GET /health ", 12) == 0;
    bool list = strncmp(c->in, "GET /v1/models ", 15) == 0;
    int n =
        snprintf(text, sizeof text,
                 "HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                 health || list ? "200 OK" : "404 Not Found", list ? sizeof models - 1 : 2,
                 list ? models : "{}");
    return put(c, text, (size_t)n);
}

/* Takes n bytes of requests; requests may follow each other. False: broken or not understood. */
static bool take(conn *c, const char *p, size_t n)
{
    while (n > 0) {
        if (c->head_n == 0) {
            size_t before = c->in_n, room = sizeof c->in - 1 - c->in_n;
            size_t add = n < room ? n : room;
            memcpy(c->in + c->in_n, p, add);
            c->in_n += add;
            c->in[c->in_n] = 0;
            char *end = strstr(c->in + (before > 3 ? before - 3 : 0), "\r\n\r\n");
            if (!end && add == room)
                return false;
            if (!end)
                return true;
            c->head_n = (size_t)(end + 4 - c->in);
            size_t used = c->head_n - before;
            c->in_n = c->head_n;
            p += used;
            n -= used;
            char *length = strcasestr(c->in, "\r\nContent-Length:");
            c->body_left = length && length < end ? strtoull(length + 17, NULL, 10) : 0;
        }
        size_t part = n < c->body_left ? n : (size_t)c->body_left;
        size_t room = sizeof c->in - 1 - c->in_n, keep = part < room ? part : room;
        memcpy(c->in + c->in_n, p, keep);
        c->in_n += keep;
        c->body_left -= part;
        p += part;
        n -= part;
        if (c->body_left > 0)
            return true;
        if (!respond(c))
            return false;
        c->in_n = c->head_n = 0;
    }
    return true;
}

static bool on_readable(conn *c)
{
    static char buf[256 * 1024];
    ssize_t n = recv(c->fd, buf, sizeof buf, 0);
    if (n < 0)
        return errno == EAGAIN;
    return n > 0 && take(c, buf, (size_t)n);
}

static void add(int fd, bool listener)
{
    conn *c = calloc(1, sizeof *c);
    if (!c)
        die("calloc");
    c->fd = fd;
    c->listener = listener;
    c->active_at = -1;
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = c};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &ev) != 0)
        die("epoll_ctl");
}

static void accept_all(conn *l)
{
    int fd, one = 1;
    while ((fd = accept4(l->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        add(fd, false);
    }
}

static void listen_on_free_port(void)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof a) != 0 || listen(fd, 4096) != 0 ||
        getsockname(fd, (struct sockaddr *)&a, &len) != 0)
        die("listen");
    printf("%d ", ntohs(a.sin_port));
    add(fd, true);
}

static void on_timer(void)
{
    uint64_t ticks, now = pl_now_ns();
    ssize_t ignored = read(timer_fd, &ticks, sizeof ticks);
    (void)ignored;
    for (int i = active_n - 1; i >= 0; i--) { /* a step may take the last one to place i */
        conn *c = active[i];
        if (c->next_ns <= now && !step_stream(c, now))
            conn_close(c);
    }
}

static void compose_answer(void)
{
    char body[257];
    int n =
        snprintf(body, sizeof body,
                 "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"model\":\"bench\","
                 "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"");
    memset(body + n, 'x', 256 - (size_t)n);
    static const char tail[] = "\"},\"finish_reason\":\"stop\"}]}";
    memcpy(body + 256 - (sizeof tail - 1), tail, sizeof tail);
    answer_n = (size_t)snprintf(answer, sizeof answer,
                                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                                "Content-Length: 256\r\n\r\n%s",
                                body);
}

int main(int argc, char **argv)
{
    int ports = argc > 1 ? atoi(argv[1]) : 4;
    if (ports < 1 || ports > PORTS_MAX) {
        fprintf(stderr, "usage: bench_backend [PORTS, 1 to %d]\n", PORTS_MAX);
        return 2;
    }
    compose_answer();
    signal(SIGPIPE, SIG_IGN);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = NULL}; /* NULL: the timer */
    if (epoll_fd < 0 || timer_fd < 0 || epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer_fd, &ev) != 0)
        die("epoll");
    for (int i = 0; i < ports; i++)
        listen_on_free_port();
    printf("\n");
    fflush(stdout);
    for (;;) {
        struct epoll_event got[256];
        int n = epoll_wait(epoll_fd, got, 256, -1);
        for (int i = 0; i < n; i++) {
            conn *c = got[i].data.ptr;
            if (!c)
                on_timer();
            else if (c->listener)
                accept_all(c);
            else if (!((got[i].events & EPOLLOUT && !flush(c))) &&
                     (!(got[i].events & ~(unsigned)EPOLLOUT) || on_readable(c)))
                ;
            else
                conn_close(c);
        }
        arm_timer();
    }
}
