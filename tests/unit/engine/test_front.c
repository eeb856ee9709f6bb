/* The simulated engine's HTTP front in a process of its own (this program again, so that its exit
 * shows leaks), spoken to over plain sockets: answers, streams, errors, faults, clients that leave.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <arpa/inet.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <jansson.h>

#include "base/buf.h"
#include "base/log.h"
#include "engine/front.h"

typedef struct engine {
    pid_t pid;
    int port, log;
} engine;

static engine start(const char *kind, const char *timing)
{
    int fds[2];
    assert_int_equal(pipe(fds), 0);
    engine e = {.pid = fork()};
    assert_true(e.pid >= 0);
    if (e.pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* a failed test leaves nothing behind */
        dup2(fds[1], 2);
        close(fds[0]);
        close(fds[1]);
        execl("/proc/self/exe", "engine", kind, timing, (char *)NULL);
        _exit(127);
    }
    close(fds[1]);
    e.log = fds[0];
    char text[4096];
    size_t n = 0;
    for (;;) {
        ssize_t got = read(e.log, text + n, sizeof text - 1 - n);
        assert_true(got > 0);
        text[n += (size_t)got] = 0;
        char *at = strstr(text, "127.0.0.1:");
        if (at && strchr(text, '\n')) {
            e.port = atoi(at + 10);
            return e;
        }
    }
}

static void stop(engine *e)
{
    int status;
    kill(e->pid, SIGTERM);
    assert_int_equal(waitpid(e->pid, &status, 0), e->pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        char text[4096];
        for (ssize_t n; (n = read(e->log, text, sizeof text)) > 0;)
            fwrite(text, 1, (size_t)n, stderr);
    }
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    close(e->log);
}

static int dial(const engine *e)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons((uint16_t)e->port),
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct timeval patience = {.tv_sec = 20};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

/* HTTP/1.0, so that the answer ends with the connection and is not chunked. */
static int send_request(const engine *e, const char *path, const char *body)
{
    int fd = dial(e);
    pl_buf b = {0};
    assert_int_equal(pl_buf_addf(&b,
                                 "%s %s HTTP/1.0\r\nx-request-id: test-%s\r\n"
                                 "content-length: %zu\r\n\r\n%s",
                                 body ? "POST" : "GET", path, path + 1, body ? strlen(body) : 0,
                                 body ? body : ""),
                     0);
    assert_int_equal(send(fd, b.p, b.n, MSG_NOSIGNAL), b.n);
    pl_buf_free(&b);
    return fd;
}

typedef struct answer {
    pl_buf raw;
    int status; /* 0: the connection ended without an answer */
    const char *body;
} answer;

static answer receive(int fd)
{
    answer a = {0};
    for (;;) {
        assert_int_equal(pl_buf_reserve(&a.raw, 65536), 0);
        ssize_t n = recv(fd, a.raw.p + a.raw.n, 65535, 0);
        if (n <= 0)
            break;
        a.raw.n += (size_t)n;
    }
    close(fd);
    a.raw.p[a.raw.n] = 0;
    const char *gap = strstr(a.raw.p, "\r\n\r\n");
    if (gap) {
        a.status = atoi(a.raw.p + 9);
        a.body = gap + 4;
    }
    return a;
}

static answer ask(const engine *e, const char *path, const char *body)
{
    return receive(send_request(e, path, body));
}

static int status_of(const engine *e, const char *path, const char *body)
{
    answer a = ask(e, path, body);
    pl_buf_free(&a.raw);
    return a.status;
}

static json_t *ask_json(const engine *e, const char *path, const char *body)
{
    answer a = ask(e, path, body);
    assert_int_equal(a.status, 200);
    json_t *v = json_loads(a.body, JSON_DECODE_ANY, NULL);
    assert_non_null(v);
    pl_buf_free(&a.raw);
    return v;
}

/* The value at a path such as "choices.0.message". */
static json_t *at(json_t *v, const char *path)
{
    char key[64];
    while (*path) {
        size_t n = strcspn(path, ".");
        snprintf(key, sizeof key, "%.*s", (int)n, path);
        v = json_is_array(v) ? json_array_get(v, (size_t)atoi(key)) : json_object_get(v, key);
        path += n + (path[n] == '.');
    }
    return v;
}

static const char *text_at(json_t *v, const char *path)
{
    const char *s = json_string_value(at(v, path));
    assert_non_null(s);
    return s;
}

static int int_at(json_t *v, const char *path)
{
    assert_true(json_is_integer(at(v, path)));
    return (int)json_integer_value(at(v, path));
}

/* The strings at `path` of a stream's events, joined; *events counts all data lines. */
static pl_buf stream_text(const char *body, const char *path, int *events)
{
    pl_buf out = {0};
    *events = 0;
    for (const char *p = body; (p = strstr(p, "data: ")); p++) {
        ++*events;
        if (strncmp(p + 6, "[DONE]", 6) == 0)
            continue;
        json_t *v = json_loads(p + 6, JSON_DISABLE_EOF_CHECK, NULL);
        assert_non_null(v);
        const char *s = json_string_value(at(v, path));
        assert_int_equal(pl_buf_add(&out, s ? s : "", s ? strlen(s) : 0), 0);
        json_decref(v);
    }
    assert_int_equal(pl_buf_add(&out, "", 1), 0);
    return out;
}

static void fault(const engine *e, const char *body)
{
    assert_int_equal(status_of(e, "/sim/fault", body), 200);
}

/* Polls the engine's own view until nothing is under way. */
static json_t *idle(const engine *e)
{
    time_t end = time(NULL) + 20;
    for (;;) {
        json_t *v = ask_json(e, "/sim/requests", NULL);
        if (int_at(v, "inflight") == 0)
            return v;
        json_decref(v);
        assert_true(time(NULL) < end);
    }
}

#define CHAT                                                                                       \
    "\"model\":\"sim\",\"messages\":[{\"role\":\"system\",\"content\":"                            \
    "\"You are a patient assistant who answers every question of everybody in few words.\"},"      \
    "{\"role\":\"user\",\"content\":\"What is the nearest point of an orbit around the Moon?\"}],"

static void test_whole_and_streamed(void **state)
{
    engine e = start("sglang", "instant");
    json_t *one = ask_json(&e, "/v1/chat/completions", "{" CHAT "\"max_tokens\":12}");
    assert_int_equal(int_at(one, "usage.completion_tokens"), 12);
    assert_int_equal(int_at(one, "usage.prompt_tokens_details.cached_tokens"), 0);
    assert_string_equal(text_at(one, "choices.0.finish_reason"), "length");
    const char *text = text_at(one, "choices.0.message.content");
    assert_int_equal(strlen(text), 48);
    /* Again: the same text; of the prompt, all whole pages but the last token are cached. */
    json_t *two = ask_json(&e, "/v1/chat/completions", "{" CHAT "\"max_tokens\":12}");
    assert_string_equal(text_at(two, "choices.0.message.content"), text);
    int prompt = int_at(two, "usage.prompt_tokens");
    assert_int_equal(int_at(two, "usage.prompt_tokens_details.cached_tokens"),
                     (prompt - 1) / 16 * 16);
    int events;
    answer a = ask(&e, "/v1/chat/completions",
                   "{" CHAT "\"max_tokens\":12,\"stream\":true,\"stream_options\":"
                   "{\"include_usage\":true}}");
    assert_non_null(strstr(a.raw.p, "text/event-stream"));
    assert_non_null(strstr(a.raw.p, "x-request-id: test-v1/chat/completions\r\n"));
    pl_buf got = stream_text(a.body, "choices.0.delta.content", &events);
    assert_string_equal(got.p, text);
    assert_int_equal(events, 1 + 12 + 1 + 1 + 1); /* role, tokens, end, usage, [DONE] */
    assert_non_null(strstr(a.body, "\"usage\":{\"prompt_tokens\":"));
    pl_buf_free(&got);
    pl_buf_free(&a.raw);
    /* Without a limit: the default number of tokens and a natural end. */
    json_t *free_run = ask_json(&e, "/v1/completions", "{\"prompt\":[\"a\",\"b\"]}");
    assert_int_equal(int_at(free_run, "usage.completion_tokens"), 128);
    assert_string_equal(text_at(free_run, "choices.1.finish_reason"), "stop");
    json_decref(one);
    json_decref(two);
    json_decref(free_run);
    stop(&e);
}

static void test_conversation_hits(void **state)
{
    engine e = start("vllm", "instant");
    json_t *one = ask_json(&e, "/v1/chat/completions",
                           "{\"messages\":[{\"role\":\"user\",\"content\":\"Tell me more.\"}],"
                           "\"max_tokens\":100}");
    int first = int_at(one, "usage.prompt_tokens");
    json_t *body = json_pack("{s:[{s:s,s:s},{s:s,s:s},{s:s,s:s}],s:i}", "messages", "role", "user",
                             "content", "Tell me more.", "role", "assistant", "content",
                             text_at(one, "choices.0.message.content"), "role", "user", "content",
                             "And then?", "max_tokens", 1);
    char *text = json_dumps(body, 0);
    json_t *two = ask_json(&e, "/v1/chat/completions", text);
    /* The prompt and the answer but for its last token, in whole pages. */
    assert_int_equal(int_at(two, "usage.prompt_tokens_details.cached_tokens"),
                     (first + 99) / 16 * 16);
    free(text);
    json_decref(body);
    json_decref(one);
    json_decref(two);
    stop(&e);
}

static void test_other_streams(void **state)
{
    engine e = start("sglang", "instant");
    int events;
    json_t *whole = ask_json(&e, "/v1/messages", "{" CHAT "\"max_tokens\":5}");
    answer a = ask(&e, "/v1/messages", "{" CHAT "\"max_tokens\":5,\"stream\":true}");
    pl_buf got = stream_text(a.body, "delta.text", &events);
    assert_string_equal(got.p, text_at(whole, "content.0.text"));
    static const char *const order[] = {"event: message_start",       "event: content_block_start",
                                        "event: content_block_delta", "event: content_block_stop",
                                        "event: message_delta",       "event: message_stop"};
    const char *p = a.body;
    for (size_t i = 0; i < sizeof order / sizeof *order; i++)
        assert_non_null(p = strstr(p, order[i]));
    assert_int_equal(events, 5 + 5);
    pl_buf_free(&got);
    pl_buf_free(&a.raw);
    json_decref(whole);

    whole = ask_json(&e, "/v1/responses", "{\"input\":\"hello\",\"max_output_tokens\":5}");
    a = ask(&e, "/v1/responses", "{\"input\":\"hello\",\"max_output_tokens\":5,\"stream\":true}");
    got = stream_text(a.body, "delta", &events);
    assert_string_equal(got.p, text_at(whole, "output.0.content.0.text"));
    assert_non_null(strstr(a.body, "event: response.created"));
    assert_non_null(strstr(a.body, "event: response.completed"));
    assert_int_equal(events, 4 + 5 + 4);
    for (int i = 0; i < events; i++) {
        char number[40];
        snprintf(number, sizeof number, "\"sequence_number\":%d", i);
        assert_non_null(strstr(a.body, number));
    }
    pl_buf_free(&got);
    pl_buf_free(&a.raw);
    json_decref(whole);

    whole = ask_json(&e, "/generate",
                     "{\"text\":\"hello\",\"sampling_params\":{\"max_new_tokens\":3}}");
    a = ask(&e, "/generate",
            "{\"text\":\"hello\",\"stream\":true,\"sampling_params\":{\"max_new_tokens\":3}}");
    assert_string_equal(text_at(whole, "meta_info.finish_reason.type"), "length");
    /* Each event has the text so far; the third is the last and has the reason. */
    got = stream_text(a.body, "text", &events);
    assert_int_equal(events, 4);
    assert_int_equal(got.n - 1, 4 + 8 + 12);
    assert_string_equal(got.p + got.n - 1 - 12, text_at(whole, "text"));
    assert_non_null(strstr(a.body, "\"type\":\"length\""));
    pl_buf_free(&got);
    pl_buf_free(&a.raw);
    json_decref(whole);
    stop(&e);
}

static void test_errors(void **state)
{
    engine e = start("vllm", "instant");
    static const struct {
        const char *path, *body;
        int status;
        const char *says;
    } cases[] = {
        {"/v1/chat/completions", "{\"model\":\"other\",\"messages\":[]}", 404, "does not exist"},
        {"/v1/messages", "{\"model\":\"other\",\"messages\":[]}", 404, "not_found_error"},
        {"/v1/chat/completions", "{\"messages\":[]}", 400, "non-empty"},
        {"/v1/chat/completions", "{\"messages\":[{\"content\":\"x\"}]}", 400, "no role"},
        {"/v1/chat/completions", "{" CHAT "\"max_tokens\":0}", 400, "max_tokens"},
        {"/v1/chat/completions", "{" CHAT "\"max_tokens\":\"9\"}", 400, "max_tokens"},
        {"/v1/chat/completions", "{" CHAT "\"n\":1000}", 400, "n must be"},
        {"/v1/chat/completions", "{" CHAT "\"max_tokens\":180224}", 400, "maximum context length"},
        {"/v1/chat/completions", "{\"messages\":", 400, "JSON"},
        {"/v1/chat/completions", "[]", 400, "JSON"},
        {"/v1/chat/completions", "", 400, "JSON"},
        {"/v1/messages", "{" CHAT "\"stream\":true}", 400, "max_tokens"},
        {"/v1/completions", "{\"prompt\":\"\"}", 400, "empty"},
        {"/v1/completions", "{\"prompt\":[]}", 400, "prompt"},
        {"/v1/completions", "{\"prompt\":[\"good\",7]}", 400, "prompt[1]"},
        {"/v1/completions", "{\"prompt\":[1,-2]}", 400, "token ids"},
        {"/v1/responses", "{\"input\":\"x\",\"previous_response_id\":\"r\"}", 400, "previous"},
        {"/v1/rerank", "{\"query\":\"x\"}", 400, "documents"},
        {"/v1/embeddings", "{\"input\":\"x\",\"dimensions\":0}", 400, "dimensions"},
        {"/detokenize", "{\"tokens\":[\"x\"]}", 400, "token ids"},
        {"/sim/fault", "{\"kind\":\"flood\"}", 400, "kind must be"},
        {"/sim/fault", "{\"kind\":\"slow\",\"delay_ms\":-1}", 400, "integers"},
        {"/sim/fault", "{\"kind\":\"refuse\",\"counts\":3}", 400, "members are kind"},
        {"/sim/fault", "{\"kind\":\"refuse\",\"health\":\"yes\"}", 400, "true or false"},
        {"/v1/chat/completions", NULL, 405, "Method Not Allowed"},
        {"/v1/models", "{}", 405, "Method Not Allowed"},
        {"/get_load", NULL, 404, "Not Found"}, /* SGLang's */
        {"/nothing", NULL, 404, "Not Found"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        answer a = ask(&e, cases[i].path, cases[i].body);
        if (a.status != cases[i].status || !strstr(a.body, cases[i].says))
            fail_msg("case %zu: %d %s", i, a.status, a.raw.p);
        json_t *v = json_loads(a.body, 0, NULL);
        assert_non_null(v);
        json_decref(v);
        pl_buf_free(&a.raw);
    }
    json_t *v = idle(&e);
    assert_int_equal(int_at(v, "counts.received"), int_at(v, "counts.failed"));
    json_decref(v);
    stop(&e);
}

/* What is shown of a long name ends with a whole character: else the answer would be no JSON. */
static void test_long_names(void **state)
{
    engine e = start("sglang", "instant");
    pl_buf name = {0}, body = {0};
    assert_int_equal(pl_buf_add(&name, "x", 1), 0);
    for (int i = 0; i < 150; i++)
        assert_int_equal(pl_buf_add(&name, "\xc3\xa9", 2), 0);
    assert_int_equal(pl_buf_add(&name, "", 1), 0);
    assert_int_equal(
        pl_buf_addf(&body, "{\"model\":\"%s\",\"messages\":[{\"role\":\"user\"}]}", name.p), 0);
    answer a = ask(&e, "/v1/chat/completions", body.p);
    assert_int_equal(a.status, 404);
    json_t *v = json_loads(a.body, 0, NULL);
    assert_non_null(strstr(text_at(v, "error.message"), "\xc3\xa9` does not exist."));
    json_decref(v);
    pl_buf_free(&a.raw);
    body.n = 0;
    assert_int_equal(pl_buf_addf(&body, "{\"session_id\":\"%s\"," CHAT "\"max_tokens\":1}", name.p),
                     0);
    json_decref(ask_json(&e, "/v1/chat/completions", body.p));
    v = ask_json(&e, "/sim/requests", NULL);
    assert_int_equal(strlen(text_at(v, "over.0.session")), 63);
    json_decref(v);
    pl_buf_free(&name);
    pl_buf_free(&body);
    stop(&e);
}

/* One document may stand without a list around it. */
static void test_rerank_one(void **state)
{
    engine e = start("sglang", "instant");
    json_t *v = ask_json(&e, "/v1/rerank", "{\"query\":\"q\",\"documents\":\"the only one\"}");
    assert_int_equal(json_array_size(v), 1);
    assert_string_equal(text_at(v, "0.document"), "the only one");
    json_decref(v);
    stop(&e);
}

static void test_tokenize(void **state)
{
    engine e = start("sglang", "instant");
    json_t *t = ask_json(&e, "/tokenize", "{\"prompt\":\"gr\\u00fc\\u00df euch, \\ud83d\\ude00\"}");
    assert_int_equal(int_at(t, "count"), json_array_size(at(t, "tokens")));
    json_t *body = json_pack("{s:O}", "tokens", at(t, "tokens"));
    char *text = json_dumps(body, 0);
    json_t *back = ask_json(&e, "/v1/detokenize", text);
    assert_string_equal(text_at(back, "text"), "gr\xc3\xbc\xc3\x9f euch, \xf0\x9f\x98\x80");
    free(text);
    json_decref(body);
    json_decref(back);
    json_decref(t);
    stop(&e);
}

static void test_client_leaves(void **state)
{
    engine e = start("sglang", "llama-8b-h100-tp1");
    static const char *const bodies[] = {"{" CHAT "\"max_tokens\":90000,\"stream\":true}",
                                         "{" CHAT "\"max_tokens\":90000}"};
    for (int i = 0; i < 2; i++) {
        int fd = send_request(&e, "/v1/chat/completions", bodies[i]);
        char some[64];
        if (i == 0)
            assert_true(recv(fd, some, sizeof some, 0) > 0);
        for (bool seen = false; !seen;) {
            json_t *v = ask_json(&e, "/sim/requests", NULL);
            seen = int_at(v, "inflight") == 1 && int_at(v, "running") == 1;
            json_decref(v);
        }
        close(fd);
        json_t *v = idle(&e);
        assert_int_equal(int_at(v, "running") + int_at(v, "waiting"), 0);
        assert_int_equal(int_at(v, "counts.gone"), i + 1);
        json_t *over = at(v, "over");
        json_t *last = json_array_get(over, json_array_size(over) - 1);
        assert_string_equal(text_at(last, "end"), "gone");
        assert_string_equal(text_at(last, "id"), "test-v1/chat/completions");
        json_decref(v);
    }
    stop(&e);
}

static void test_abort_request(void **state)
{
    engine e = start("sglang", "llama-8b-h100-tp1");
    int fd = send_request(&e, "/generate",
                          "{\"rid\":\"abc123\",\"text\":\"x\",\"sampling_params\":"
                          "{\"max_new_tokens\":90000}}");
    for (int running = 0; running == 0;) {
        json_t *v = ask_json(&e, "/sim/requests", NULL);
        running = int_at(v, "running");
        json_decref(v);
    }
    assert_int_equal(status_of(&e, "/abort_request", "{\"rid\":\"other\"}"), 200);
    assert_int_equal(status_of(&e, "/abort_request", "{\"rid\":\"abc\"}"), 200);
    answer a = receive(fd);
    assert_int_equal(a.status, 200);
    assert_non_null(strstr(a.body, "\"type\":\"abort\""));
    pl_buf_free(&a.raw);
    json_t *v = idle(&e);
    assert_int_equal(int_at(v, "counts.aborted"), 1);
    json_decref(v);
    stop(&e);
}

static void test_faults(void **state)
{
    engine e = start("sglang", "instant");
    const char *stream = "{" CHAT "\"max_tokens\":9,\"stream\":true}";
    const char *whole = "{" CHAT "\"max_tokens\":9}";
    const char *path = "/v1/chat/completions";
    int events;

    fault(&e, "{\"kind\":\"refuse\",\"count\":2}");
    assert_int_equal(status_of(&e, path, stream), 0);
    assert_int_equal(status_of(&e, path, whole), 0);
    assert_int_equal(status_of(&e, path, whole), 200); /* count is used up */

    fault(&e, "{\"kind\":\"error_500\"}");
    assert_int_equal(status_of(&e, path, stream), 500);
    assert_int_equal(status_of(&e, path, whole), 500);
    assert_int_equal(status_of(&e, "/health", NULL), 200);
    fault(&e, "{\"kind\":\"error_500\",\"health\":true}");
    assert_int_equal(status_of(&e, "/health", NULL), 500);

    fault(&e, "{\"kind\":\"reset_mid_stream\",\"after_chunks\":4}");
    answer a = ask(&e, path, stream);
    assert_int_equal(a.status, 200);
    pl_buf got = stream_text(a.body, "choices.0.delta.content", &events);
    assert_int_equal(got.n - 1, 4 * 4);
    assert_null(strstr(a.body, "[DONE]"));
    pl_buf_free(&got);
    pl_buf_free(&a.raw);
    a = ask(&e, path, whole);
    assert_int_equal(a.status, 200);
    assert_null(json_loads(a.body, 0, NULL)); /* broken off */
    pl_buf_free(&a.raw);

    fault(&e, "{\"kind\":\"slow\",\"delay_ms\":40,\"count\":1}");
    struct timespec t0, t1;
    clock_gettime(CLOCK_MONOTONIC, &t0);
    a = ask(&e, path, stream);
    clock_gettime(CLOCK_MONOTONIC, &t1);
    got = stream_text(a.body, "choices.0.delta.content", &events);
    assert_int_equal(got.n - 1, 9 * 4);
    assert_true((t1.tv_sec - t0.tv_sec) * 1000 + (t1.tv_nsec - t0.tv_nsec) / 1000000 >= 9 * 40);
    pl_buf_free(&got);
    pl_buf_free(&a.raw);

    fault(&e, "{\"kind\":\"hang\",\"count\":2,\"health\":true}");
    int hung = send_request(&e, path, stream), sick = send_request(&e, "/health", NULL);
    fault(&e, "{\"kind\":\"none\"}");
    assert_int_equal(status_of(&e, path, whole), 200);
    char byte;
    assert_true(recv(hung, &byte, 1, MSG_DONTWAIT) < 0);
    assert_true(recv(sick, &byte, 1, MSG_DONTWAIT) < 0);
    close(sick);
    close(hung);
    json_t *v = idle(&e);
    assert_int_equal(int_at(v, "counts.gone"), 1);
    assert_int_equal(int_at(v, "counts.cut"), 4);
    assert_int_equal(int_at(v, "counts.failed"), 2);
    assert_int_equal(int_at(v, "counts.received"), 1 + 4 + 2 + 3);
    assert_int_equal(int_at(v, "fault.hits.refuse"), 2);
    json_decref(v);
    stop(&e);
}

/* A client that reads nothing for a while stops the stream, not the engine, and misses nothing. */
static void test_slow_reader(void **state)
{
    engine e = start("sglang", "instant");
    int fd = send_request(&e, "/v1/completions",
                          "{\"prompt\":\"x\",\"max_tokens\":60000,\"stream\":true}");
    for (int running = 1, received = 0; running || !received;) {
        json_t *v = ask_json(&e, "/sim/requests", NULL);
        running = int_at(v, "running") + int_at(v, "waiting");
        received = int_at(v, "counts.received");
        json_decref(v);
    }
    answer a = receive(fd);
    size_t events = 0;
    for (size_t i = 1; i < a.raw.n; i++)
        events += a.raw.p[i] == '\n' && a.raw.p[i - 1] == '\n';
    assert_int_equal(events, 60000 + 2); /* the tokens, the end, [DONE] */
    assert_true(pl_str_ends(pl_buf_str(&a.raw), PL_STR("data: [DONE]\n\n")));
    pl_buf_free(&a.raw);
    json_decref(idle(&e));
    stop(&e);
}

/* SIGTERM with requests in every state: the connections end, and nothing is leaked (stop checks).
 */
static void test_end_midway(void **state)
{
    engine e = start("sglang", "llama-8b-h100-tp1");
    int streaming =
        send_request(&e, "/v1/chat/completions", "{" CHAT "\"max_tokens\":90000,\"stream\":true}");
    char some[64];
    assert_true(recv(streaming, some, sizeof some, 0) > 0);
    int waiting = send_request(&e, "/v1/rerank", "{\"query\":\"q\",\"documents\":[\"a\",\"b\"]}");
    int half = dial(&e);
    assert_true(send(half, "POST /v1/chat", 13, MSG_NOSIGNAL) == 13);
    stop(&e);
    answer a = receive(streaming);
    pl_buf_free(&a.raw);
    close(waiting);
    close(half);
}

static void test_bad_options(void **state)
{
    pl_front_options o;
    pl_errbuf eb;
    pl_front_options_default(&o);
    o.kind = PL_STR("tgi");
    assert_int_equal(pl_front_run(&o, &eb), PL_EINVALID);
    pl_front_options_default(&o);
    o.speed = 0;
    assert_int_equal(pl_front_run(&o, &eb), PL_EINVALID);
    pl_front_options_default(&o);
    o.listen = PL_STR("127.0.0.1");
    assert_int_equal(pl_front_run(&o, &eb), PL_EINVALID);
    assert_non_null(strstr(eb.text, "127.0.0.1"));
    pl_front_options_default(&o);
    o.sim.page_tokens = -1;
    assert_int_equal(pl_front_run(&o, &eb), PL_EINVALID);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[0], "engine") == 0) {
        pl_front_options o;
        pl_errbuf eb;
        pl_front_options_default(&o);
        o.kind = pl_str_c(argv[1]);
        o.sim.timing = *pl_timing_find(pl_str_c(argv[2]));
        return pl_front_run(&o, &eb) == 0 ? 0 : 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole_and_streamed), cmocka_unit_test(test_conversation_hits),
        cmocka_unit_test(test_other_streams),      cmocka_unit_test(test_errors),
        cmocka_unit_test(test_tokenize),           cmocka_unit_test(test_client_leaves),
        cmocka_unit_test(test_abort_request),      cmocka_unit_test(test_faults),
        cmocka_unit_test(test_slow_reader),        cmocka_unit_test(test_end_midway),
        cmocka_unit_test(test_bad_options),        cmocka_unit_test(test_long_names),
        cmocka_unit_test(test_rerank_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
