/* What a session costs a request: the latency of a turn beside that of the same bytes without a
 * session, through one router and one connection, interleaved, one request at a time. Started by
 * sessions.sh. The engine is a thread of this program that answers like an SGLang with streaming
 * sessions, at once, so that what is measured is the router.
 *
 *   bench_turns serve             prints the engine's port, serves until its input ends
 *   bench_turns run PORT ROUNDS   prints the table; PORT is the router's
 *
 * Each round asks, in this order: plain (2 KB, no session); affinity (the same, x-session-id);
 * delta (the same, into the engine's session); then a conversation that grows by 2 KB a turn, at
 * most TURNS turns: as it is, and as a full turn of a session, which the router trims. Every TURNS
 * rounds the sessions are closed and opened anew, which is counted apart. */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/clock.h"

#define TURNS 16
#define SAID  2048
#define REPLY "The moon is a rock."

static void die(const char *what)
{
    perror(what);
    exit(1);
}

/* --- one message of HTTP, on a blocking socket: enough for two ends that know each other --- */

typedef struct peer {
    int fd;
    pl_buf in; /* what was received and not yet used */
} peer;

/* The length of head and body of the message at the front of `in`; 0: not all of it is there. */
static size_t message_length(const pl_buf *in, size_t *body_at)
{
    const char *end = in->n ? memmem(in->p, in->n, "\r\n\r\n", 4) : NULL;
    if (!end)
        return 0;
    *body_at = (size_t)(end - in->p) + 4;
    size_t length = 0;
    for (const char *p = in->p; p < end; p++)
        if (*p == '\n' && strncasecmp(p + 1, "content-length:", 15) == 0)
            length = strtoul(p + 16, NULL, 10);
    return in->n >= *body_at + length ? *body_at + length : 0;
}

/* Receives until a whole message is at the front. False: the other end has closed. */
static bool receive(peer *c, size_t *body_at, size_t *n)
{
    while (!(*n = message_length(&c->in, body_at))) {
        if (pl_buf_reserve(&c->in, c->in.n + 65536) != 0)
            die("memory");
        ssize_t got = read(c->fd, c->in.p + c->in.n, 65536);
        if (got <= 0)
            return false;
        c->in.n += (size_t)got;
    }
    return true;
}

static void used(peer *c, size_t n)
{
    memmove(c->in.p, c->in.p + n, c->in.n - n);
    c->in.n -= n;
}

static void send_all(int fd, const char *p, size_t n)
{
    for (ssize_t k; n; p += k, n -= (size_t)k)
        if ((k = write(fd, p, n)) <= 0)
            die("write");
}

static void add(pl_buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void add(pl_buf *b, const char *fmt, ...)
{
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (n < 0 || (size_t)n >= sizeof text || pl_buf_add(b, text, (size_t)n) != 0)
        die("memory");
}

/* --- the engine --- */

static const char answer[] =
    "{\"id\":\"c\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"m\",\"choices\":[{"
    "\"index\":0,\"finish_reason\":\"stop\",\"message\":{\"role\":\"assistant\",\"content\":"
    "\"" REPLY "\"}}],\"usage\":{\"prompt_tokens\":500,\"completion_tokens\":6,"
    "\"total_tokens\":506}}";

static void *serve_connection(void *arg)
{
    peer c = {.fd = (int)(intptr_t)arg};
    size_t body_at, n;
    pl_buf out = {0};
    char opened[400];
    while (receive(&c, &body_at, &n)) {
        const char *path = memchr(c.in.p, ' ', n), *body = answer;
        path = path ? path + 1 : "";
        if (strncmp(path, "/open_session", 13) == 0) {
            const char *id = memmem(c.in.p + body_at, n - body_at, "\"session_id\":\"", 14);
            const char *end = id ? strchr(id + 14, '"') : NULL;
            if (!end)
                die("an open without an id");
            snprintf(opened, sizeof opened, "\"%.*s\"", (int)(end - id - 14), id + 14);
            body = opened;
        } else if (strncmp(path, "/server_info", 12) == 0 ||
                   strncmp(path, "/get_server_info", 16) == 0) {
            body = "{\"enable_streaming_session\":true}";
        } else if (strncmp(path, "/v1/models", 10) == 0) {
            body = "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\","
                   "\"owned_by\":\"sglang\"}]}";
        } else if (strncmp(path, "/v1/chat", 8) != 0) {
            body = "";
        }
        out.n = 0;
        add(&out,
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n",
            strlen(body));
        add(&out, "%s", body);
        send_all(c.fd, out.p, out.n);
        used(&c, n);
    }
    close(c.fd);
    pl_buf_free(&out);
    pl_buf_free(&c.in);
    return NULL;
}

static void *accept_all(void *arg)
{
    int fd = (int)(intptr_t)arg, one = 1;
    for (;;) {
        pthread_t t;
        int c = accept(fd, NULL, NULL);
        if (c < 0)
            die("accept");
        setsockopt(c, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (pthread_create(&t, NULL, serve_connection, (void *)(intptr_t)c) != 0)
            die("thread");
        pthread_detach(t);
    }
    return NULL;
}

static int serve(void)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t n = sizeof a;
    pthread_t t;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, n) != 0 || listen(fd, 64) != 0 ||
        getsockname(fd, (struct sockaddr *)&a, &n) != 0)
        die("listen");
    if (pthread_create(&t, NULL, accept_all, (void *)(intptr_t)fd) != 0)
        die("thread");
    printf("%d\n", ntohs(a.sin_port));
    fflush(stdout);
    while (getchar() != EOF)
        ;
    return 0;
}

/* --- the client --- */

enum { PLAIN, AFFINITY, DELTA, WHOLE, TRIMMED, OPEN, CLOSE, KINDS };
static const char *const names[KINDS] = {"plain, 2 KB",
                                         "affinity by x-session-id",
                                         "delta into the engine's session",
                                         "a conversation of 2 to 32 KB, plain",
                                         "the same as a session's turn, trimmed by the router",
                                         "first turn, with the open on the engine",
                                         "last turn, with the close"};
static const int beside[KINDS] = {PLAIN, PLAIN, PLAIN, WHOLE, WHOLE, PLAIN, PLAIN};

static uint64_t *times[KINDS];
static size_t times_n[KINDS];
static peer router;

static void ask(int kind, const char *headers, const pl_buf *messages, const char *rest,
                const char *session)
{
    static pl_buf body, out;
    size_t body_at, n;
    body.n = out.n = 0;
    add(&body, "{\"model\":\"m\",\"messages\":[");
    if (pl_buf_add(&body, messages->p, messages->n) != 0)
        die("memory");
    add(&body, "]%s}", rest);
    add(&out, "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\n%scontent-length: %zu\r\n\r\n",
        headers, body.n);
    if (pl_buf_add(&out, body.p, body.n) != 0)
        die("memory");
    uint64_t from = pl_now_ns();
    send_all(router.fd, out.p, out.n);
    if (!receive(&router, &body_at, &n))
        die("the router has closed");
    uint64_t took = pl_now_ns() - from;
    const char *label = memmem(router.in.p, body_at, "x-perilune-session: ", 20);
    if (strncmp(router.in.p, "HTTP/1.1 200", 12) != 0 ||
        (session && (!label || strncmp(label + 20, session, strlen(session)) != 0))) {
        fprintf(stderr, "%s: %.*s\n", names[kind], (int)(n < 1500 ? n : 1500), router.in.p);
        exit(1);
    }
    used(&router, n);
    times[kind][times_n[kind]++] = took;
}

static void say(pl_buf *messages, const char *role, long turn)
{
    static char text[SAID + 1];
    memset(text, 'w', SAID);
    for (int i = 5; i < SAID; i += 6)
        text[i] = ' ';
    add(messages, "%s{\"role\":\"%s\",\"content\":\"", messages->n ? "," : "", role);
    if (role[0] == 'u') {
        add(messages, "turn %ld ", turn);
        if (pl_buf_add(messages, text, SAID) != 0)
            die("memory");
    } else {
        add(messages, REPLY);
    }
    add(messages, "\"}");
}

/* Who comes first changes from turn to turn: what is asked after something long finds cold caches.
 */
static void turns_of_session(long number)
{
    pl_buf one = {0}, all = {0};
    char deltas[200], whole[200], headers[100];
    int pid = (int)getpid();
    say(&one, "user", 0);
    snprintf(headers, sizeof headers, "x-session-id: a%d-%ld\r\n", pid, number);
    for (long turn = 0; turn <= TURNS; turn++) {
        bool first = turn == 0, last = turn == TURNS;
        const char *action = first ? ",\"action\":\"open\"" : last ? ",\"action\":\"close\"" : "";
        const char *label = first ? "open" : "bound";
        int inside = first ? OPEN : CLOSE;
        snprintf(deltas, sizeof deltas,
                 ",\"nvext\":{\"session_control\":{\"session_id\":\"d%d-%ld\","
                 "\"history\":\"delta\"%s}}",
                 pid, number, action);
        snprintf(whole, sizeof whole,
                 ",\"nvext\":{\"session_control\":{\"session_id\":\"f%d-%ld\"%s}}", pid, number,
                 action);
        say(&all, "user", turn);
        for (long i = 0; i < 5; i++)
            switch ((i + turn + number) % 5) {
            case 0:
                ask(PLAIN, "", &one, "", NULL);
                break;
            case 1:
                ask(AFFINITY, headers, &one, "", first ? "new" : "bound");
                break;
            case 2:
                ask(first || last ? inside : DELTA, "", &one, deltas, label);
                break;
            case 3:
                ask(WHOLE, "", &all, "", NULL);
                break;
            default:
                ask(first || last ? inside : TRIMMED, "", &all, whole, label);
            }
        say(&all, "assistant", turn);
    }
    pl_buf_free(&one);
    pl_buf_free(&all);
}

static int by_size(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static double at(int kind, double q)
{
    return (double)times[kind][(size_t)((double)(times_n[kind] - 1) * q)] / 1e3;
}

static int run(int port, long rounds)
{
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons((uint16_t)port),
                            .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int one = 1;
    router.fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(router.fd, (struct sockaddr *)&a, sizeof a) != 0)
        die("connect");
    setsockopt(router.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    long sessions = rounds / TURNS, warm = sessions / 10 + 1;
    for (int k = 0; k < KINDS; k++)
        if (!(times[k] = malloc((size_t)(sessions + warm) * 2 * (TURNS + 1) * sizeof **times)))
            die("memory");
    for (long s = 0; s < sessions + warm; s++) {
        if (s == warm)
            memset(times_n, 0, sizeof times_n);
        turns_of_session(s);
    }
    printf("| request | count | p50 us | p99 us | added p50 | added p99 "
           "|\n|---|---|---|---|---|---|\n");
    for (int k = 0; k < KINDS; k++)
        qsort(times[k], times_n[k], sizeof **times, by_size);
    for (int k = 0; k < KINDS; k++) {
        printf("| %s | %zu | %.1f | %.1f |", names[k], times_n[k], at(k, 0.5), at(k, 0.99));
        if (beside[k] == k)
            printf(" - | - |\n");
        else
            printf(" %+.1f | %+.1f |\n", at(k, 0.5) - at(beside[k], 0.5),
                   at(k, 0.99) - at(beside[k], 0.99));
    }
    for (int k = 0; k < KINDS; k++)
        free(times[k]);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "serve") == 0)
        return serve();
    if (argc == 4 && strcmp(argv[1], "run") == 0)
        return run(atoi(argv[2]), atol(argv[3]));
    fprintf(stderr, "usage: bench_turns serve | run PORT ROUNDS\n");
    return 2;
}
