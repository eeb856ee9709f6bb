/* A whole router that runs out of memory in the middle of requests: the requests are answered so,
 * and no engine is blamed. The two sources whose allocations fail are included, so that they go
 * through here; the engine is a thread for each of its connections. */
#include <arpa/inet.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/buf.h"
#include "base/err.h"
#include "http/sse.h"
#include "http/upstream.h"
#include "perilune.h"

static atomic_bool no_connections, no_events;

static void *shaky_calloc(size_t n, size_t size)
{
    return atomic_load(&no_connections) ? NULL : calloc(n, size);
}

static int shaky_add(pl_buf *b, const void *p, size_t n)
{
    return atomic_load(&no_events) ? PL_ENOMEM : pl_buf_add(b, p, n);
}

#define calloc(n, size)     shaky_calloc(n, size)
#define pl_buf_add(b, p, n) shaky_add(b, p, n)
#include "../../../core/http/pool.c"
#include "../../../core/http/sse.c"
#undef calloc
#undef pl_buf_add

/* --- the engine --- */

#define ANSWER  "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
#define STREAM  "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
#define PARTIAL "data: {\"choices\":"

static void *serve(void *arg)
{
    int fd = (int)(intptr_t)arg;
    char got[4096] = "";
    size_t n = 0;
    while (n + 1 < sizeof got &&
           !(strstr(got, "\r\n\r\n") && (got[0] == 'G' || got[n - 1] == '}'))) {
        ssize_t k = recv(fd, got + n, sizeof got - 1 - n, 0);
        if (k <= 0)
            break;
        n += (size_t)k;
        got[n] = 0;
    }
    bool stream = strstr(got, "\"stream\":true");
    const char *answer = stream ? STREAM PARTIAL : ANSWER;
    bool sent = send(fd, answer, strlen(answer), MSG_NOSIGNAL) > 0;
    while (sent && stream && recv(fd, got, sizeof got, 0) > 0)
        ; /* the stream stands until the router leaves */
    close(fd);
    return NULL;
}

static void *listen_on(void *arg)
{
    for (;;) {
        int fd = accept((int)(intptr_t)arg, NULL, NULL);
        pthread_t thread;
        if (fd < 0)
            return NULL;
        assert_int_equal(pthread_create(&thread, NULL, serve, (void *)(intptr_t)fd), 0);
        pthread_detach(thread);
    }
}

static int bound(int *port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(fd, 64), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &len), 0);
    *port = ntohs(a.sin_port);
    return fd;
}

/* --- the client --- */

/* Everything that is answered on a fresh connection. */
static void ask(int port, const char *request, char *answer, size_t cap)
{
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons((uint16_t)port),
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    size_t n = 0;
    ssize_t k;
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_true(send(fd, request, strlen(request), MSG_NOSIGNAL) > 0);
    while (n < cap - 1 && (k = recv(fd, answer + n, cap - 1 - n, 0)) > 0)
        n += (size_t)k;
    answer[n] = 0;
    close(fd);
}

static void expect(int port, bool stream, const char *begin, const char *text)
{
    char body[80], request[300], answer[4096];
    snprintf(body, sizeof body, "{\"model\":\"m\",\"prompt\":\"x\"%s}",
             stream ? ",\"stream\":true" : "");
    snprintf(request, sizeof request,
             "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: "
             "%zu\r\n\r\n%s",
             strlen(body), body);
    ask(port, request, answer, sizeof answer);
    if (strncmp(answer, begin, strlen(begin)) != 0 || !strstr(answer, text))
        fail_msg("wanted %s ... %s, got: %s", begin, text, answer);
}

static void *run(void *router)
{
    return (void *)(intptr_t)pl_router_run(router);
}

static void no_engine_is_blamed(void **state)
{
    char config[512], error[256] = "", page[65536];
    int engine_port, engine = bound(&engine_port);
    pthread_t engine_thread, thread;
    assert_int_equal(pthread_create(&engine_thread, NULL, listen_on, (void *)(intptr_t)engine), 0);
    snprintf(
        config, sizeof config,
        "{\"listen\":\"127.0.0.1:0\",\"admin\":{\"listen\":\"127.0.0.1:0\"},\"threads\":1,"
        "\"usage\":\"always\",\"health\":{\"interval_seconds\":3600},\"engines\":[{\"name\":\"a\","
        "\"url\":\"http://127.0.0.1:%d\",\"kind\":\"other\",\"models\":[\"m\"]}]}",
        engine_port);
    pl_router *r = NULL;
    if (pl_router_new(config, &r, error, sizeof error) != 0 ||
        pl_router_start(r, error, sizeof error) != 0)
        fail_msg("%s", error);
    assert_int_equal(pthread_create(&thread, NULL, run, r), 0);
    int port = pl_router_port(r);
    do
        ask(port, "GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", page,
            sizeof page);
    while (strncmp(page, "HTTP/1.1 200", 12) != 0);

    expect(port, false, "HTTP/1.1 200 ", "{}"); /* its pool is there now */
    for (int i = 0; i < 8; i++) {               /* more than the breaker would stand */
        atomic_store(&no_connections, true);
        expect(port, false, "HTTP/1.1 503 ", "\"out_of_memory\"");
        atomic_store(&no_connections, false);
    }
    expect(port, false, "HTTP/1.1 200 ", "{}");
    for (int i = 0; i < 8; i++) {
        atomic_store(&no_events, true);
        expect(port, true, "HTTP/1.1 200 ", "out of memory");
        atomic_store(&no_events, false);
    }
    expect(port, false, "HTTP/1.1 200 ", "{}");
    ask(pl_router_admin_port(r),
        "GET /engines HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", page, sizeof page);
    assert_non_null(strstr(page, "\"failed\": 0,"));
    assert_non_null(strstr(page, "\"inflight\": 0,"));

    pl_router_stop(r);
    pthread_join(thread, NULL);
    pl_router_free(r);
    shutdown(engine, SHUT_RDWR);
    pthread_join(engine_thread, NULL);
    close(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_engine_is_blamed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
