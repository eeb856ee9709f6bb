/* The load that wrk cannot make: SSE streams, with the latency of each event, and idle streams.
 * One thread, epoll, llhttp. Started by proxy.sh, which reads the one line that it prints.
 *
 *   bench_client sse PORT STREAMS CHUNKS PACE_US SECONDS
 *       keeps STREAMS connections busy, each asking for one stream after the other until the time
 *       is over; prints "chunks N p50_us X p99_us Y errors E"
 *   bench_client idle PORT STREAMS
 *       opens the streams, prints "ready N" when each has its first event, and holds them until
 *       its standard input ends
 *   bench_client post PORT COUNT BODY_BYTES
 *       COUNT requests one after the other over one connection; prints "done N"
 *   bench_client ports N
 *       prints N ports that were free a moment ago */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <llhttp.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/clock.h"

typedef struct stream {
    int fd;
    llhttp_t parser;
    char event[1024]; /* the event being received */
    size_t event_n;
    bool got_first;
} stream;

static int epoll_fd, port;
static uint64_t deadline_ns;
static pl_buf request;
static uint64_t *latency; /* ns of each event */
static size_t latency_n, latency_cap;
static long chunks, errors, first_events, finished, wanted;
static long under_way; /* asked for and not complete */
static llhttp_settings_t settings;

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static void note(uint64_t ns)
{
    if (latency_n == latency_cap) {
        latency_cap = latency_cap ? latency_cap * 2 : 1 << 16;
        latency = realloc(latency, latency_cap * sizeof *latency);
        if (!latency)
            die("realloc");
    }
    latency[latency_n++] = ns;
}

static void on_event(stream *s)
{
    s->event[s->event_n] = 0;
    const char *t = strstr(s->event, "\"t\":");
    if (!t)
        return; /* [DONE] */
    uint64_t sent = strtoull(t + 4, NULL, 10);
    note(pl_now_ns() - sent);
    chunks++;
    first_events += !s->got_first;
    s->got_first = true;
}

static int on_body(llhttp_t *p, const char *at, size_t n)
{
    stream *s = p->data;
    for (size_t i = 0; i < n; i++) {
        if (s->event_n < sizeof s->event - 1)
            s->event[s->event_n++] = at[i];
        if (at[i] == '\n' && s->event_n > 1 && s->event[s->event_n - 2] == '\n') {
            on_event(s);
            s->event_n = 0;
        }
    }
    return 0;
}

static void ask(stream *s)
{
    under_way++;
    const char *p = request.p;
    size_t left = request.n;
    while (left > 0) { /* large bodies only: the socket drains while we wait */
        ssize_t n = send(s->fd, p, left, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN)
            die("send");
        if (n > 0) {
            p += n;
            left -= (size_t)n;
        }
    }
}

static int on_complete(llhttp_t *p)
{
    stream *s = p->data;
    if (p->status_code != 200)
        errors++;
    finished++;
    under_way--;
    if (wanted ? finished < wanted : pl_now_ns() < deadline_ns)
        ask(s);
    return 0;
}

static void connect_stream(stream *s)
{
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons((uint16_t)port),
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int one = 1;
    s->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (s->fd < 0 || connect(s->fd, (struct sockaddr *)&a, sizeof a) != 0)
        die("connect");
    setsockopt(s->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(s->fd, F_SETFL, fcntl(s->fd, F_GETFL) | O_NONBLOCK);
    llhttp_init(&s->parser, HTTP_RESPONSE, &settings);
    s->parser.data = s;
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = s};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, s->fd, &ev) != 0)
        die("epoll_ctl");
    ask(s);
}

static void on_readable(stream *s)
{
    static char buf[128 * 1024];
    ssize_t n = recv(s->fd, buf, sizeof buf, 0);
    if (n < 0 && errno == EAGAIN)
        return;
    if (n > 0 && llhttp_execute(&s->parser, buf, (size_t)n) == HPE_OK)
        return;
    errors++;
    finished++; /* this one gives no more */
    under_way--;
    close(s->fd);
    s->fd = -1;
}

static void poll_once(int timeout_ms)
{
    struct epoll_event got[256];
    int n = epoll_wait(epoll_fd, got, 256, timeout_ms);
    for (int i = 0; i < n; i++)
        on_readable(got[i].data.ptr);
}

static void compose(const char *members, size_t body_bytes)
{
    char head[512];
    int n = snprintf(head, sizeof head,
                     "{\"model\":\"bench\",\"stream\":%s%s,\"messages\":[{"
                     "\"role\":\"user\",\"content\":\"",
                     members[0] ? "true" : "false", members);
    static const char tail[] = "\"}]}";
    size_t pad =
        body_bytes > (size_t)n + sizeof tail ? body_bytes - (size_t)n - sizeof tail + 1 : 0;
    int rc = pl_buf_addf(&request,
                         "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
                         "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                         port, (size_t)n + pad + sizeof tail - 1, head);
    for (size_t i = 0; i < pad && rc == 0; i++)
        rc = pl_buf_add(&request, "x", 1);
    if (rc != 0 || pl_buf_add(&request, tail, sizeof tail - 1) != 0)
        die("memory");
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static double quantile_us(double q)
{
    return latency_n ? (double)latency[(size_t)(q * (double)(latency_n - 1))] / 1000 : 0;
}

static int sse(int streams, int per_stream, int pace_us, double seconds)
{
    char members[80];
    snprintf(members, sizeof members, ",\"chunks\":%d,\"pace_us\":%d", per_stream, pace_us);
    compose(members, 1024);
    stream *s = calloc((size_t)streams, sizeof *s);
    if (!s)
        die("calloc");
    deadline_ns = pl_now_ns() + (uint64_t)(seconds * 1e9);
    for (int i = 0; i < streams; i++) {
        connect_stream(&s[i]);
        /* spread over the pace, so that events do not come in step */
        for (uint64_t until = pl_now_ns() + (uint64_t)pace_us * 1000 / (uint64_t)streams;
             pl_now_ns() < until;)
            poll_once(0);
    }
    /* the streams under way at the deadline are read to their end; a hanging proxy ends the run */
    uint64_t give_up = deadline_ns + 20000000000u + (uint64_t)per_stream * (uint64_t)pace_us * 1000;
    while (under_way > 0 && pl_now_ns() < give_up)
        poll_once(100);
    errors += under_way;
    qsort(latency, latency_n, sizeof *latency, by_value);
    printf("chunks %ld p50_us %.1f p99_us %.1f errors %ld\n", chunks, quantile_us(0.5),
           quantile_us(0.99), errors);
    return errors != 0;
}

static int idle(int streams)
{
    compose(",\"chunks\":1,\"hold\":true", 1024);
    deadline_ns = 0;
    stream *s = calloc((size_t)streams, sizeof *s);
    if (!s)
        die("calloc");
    for (int i = 0; i < streams; i++) {
        connect_stream(&s[i]);
        while (i + 1 - first_events - errors > 100)
            poll_once(100);
    }
    uint64_t give_up = pl_now_ns() + 30000000000u;
    while (first_events + errors < streams && pl_now_ns() < give_up)
        poll_once(100);
    printf("ready %ld\n", first_events);
    fflush(stdout);
    char c;
    while (read(0, &c, 1) > 0)
        ;
    return errors != 0 || first_events != streams;
}

static int post(long count, size_t body_bytes)
{
    compose("", body_bytes);
    stream s = {0};
    wanted = count;
    connect_stream(&s);
    while (finished < count && errors == 0)
        poll_once(1000);
    printf("done %ld\n", finished);
    return errors != 0;
}

static int ports(int n)
{
    for (int i = 0; i < n; i++) { /* kept open, so that none comes twice */
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        socklen_t len = sizeof a;
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        if (fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof a) != 0 ||
            getsockname(fd, (struct sockaddr *)&a, &len) != 0)
            die("bind");
        printf("%d ", ntohs(a.sin_port));
    }
    printf("\n");
    return 0;
}

int main(int argc, char **argv)
{
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    llhttp_settings_init(&settings);
    settings.on_body = on_body;
    settings.on_message_complete = on_complete;
    const char *what = argc > 2 ? argv[1] : "";
    port = argc > 2 ? atoi(argv[2]) : 0;
    if (strcmp(what, "sse") == 0 && argc == 7)
        return sse(atoi(argv[3]), atoi(argv[4]), atoi(argv[5]), atof(argv[6]));
    if (strcmp(what, "idle") == 0 && argc == 4)
        return idle(atoi(argv[3]));
    if (strcmp(what, "post") == 0 && argc == 5)
        return post(atol(argv[3]), (size_t)atol(argv[4]));
    if (strcmp(what, "ports") == 0)
        return ports(port);
    fprintf(stderr, "usage: bench_client sse PORT STREAMS CHUNKS PACE_US SECONDS\n"
                    "       bench_client idle PORT STREAMS\n"
                    "       bench_client post PORT COUNT BODY_BYTES\n"
                    "       bench_client ports N\n");
    return 2;
}
