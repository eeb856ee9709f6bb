/* Time of one pl_scan_body over bodies like those that clients send. Prints a line per body: its
 * size, the median time of 21 rounds, and GB/s. One thread, no arguments. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/buf.h"
#include "http/scan.h"
#include "http/sse.h"

enum text_kind { PROSE, CODE, HAN, EMOJI, PLAIN };

static const char *const texts[] = {
    /* lines of about 80 characters, with the escapes that prose and code have */
    [PROSE] = "The tide tables say that low water is at four, and the path along the shore is\\n"
              "open until six; after that the only way back is over the ridge, which is long.\\n"
              "She said: \\\"We leave at three.\\\" Nobody answered, so we packed that evening.\\n",
    [CODE] =
        "    for (int i = 0; i < n; i++) {\\n        printf(\\\"%d\\\\n\\\", values[i]);\\n    }\\n"
        "    if (error)\\n        return fail(\\\"cannot read %s\\\", path);\\n\\n",
    [HAN] = "我们在黎明之前出发，沿着河岸向北走，直到看见远处的灯光。风很冷，但是没有人抱怨。",
    [EMOJI] =
        "caf\xc3\xa9 \xf0\x9f\x8c\x8a tide \xf0\x9f\x8c\x99 na\xc3\xafve, plain words between, ",
    [PLAIN] = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789 ",
};

static void must(int rc)
{
    if (rc) {
        fprintf(stderr, "bench_scan: error %d\n", rc);
        exit(1);
    }
}

/* A chat of messages of about message_bytes each. */
static pl_buf chat(size_t bytes, size_t message_bytes, enum text_kind kind)
{
    pl_buf b = {0};
    must(pl_buf_addf(&b, "{\"model\":\"org/model-70b\",\"messages\":["));
    for (int i = 0; b.n + 200 < bytes; i++) {
        must(pl_buf_addf(&b, "%s{\"role\":\"%s\",\"content\":\"", i ? "," : "",
                         i % 2 ? "assistant" : "user"));
        size_t start = b.n;
        while (b.n - start < message_bytes && b.n + 200 < bytes)
            must(pl_buf_addf(&b, "%s", texts[kind]));
        must(pl_buf_addf(&b, "\"}"));
    }
    must(pl_buf_addf(&b, "],\"temperature\":0.7,\"max_tokens\":512,\"stream\":true,"
                         "\"stream_options\":{\"include_usage\":true},\"user\":\"u-1842\"}"));
    return b;
}

static pl_buf ids(size_t bytes, const char *separator)
{
    pl_buf b = {0};
    uint32_t x = 1;
    must(pl_buf_addf(&b, "{\"input_ids\":["));
    while (b.n + 100 < bytes) {
        x = x * 1664525u + 1013904223u;
        must(pl_buf_addf(&b, "%u%s", (x >> 8) % 150000, separator));
    }
    must(pl_buf_addf(&b, "1],\"sampling_params\":{\"max_new_tokens\":64},\"stream\":true}"));
    return b;
}

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int scan(pl_str body)
{
    static pl_scan s;
    return pl_scan_body(body, 128, &s);
}

static int usage(pl_str body)
{
    static pl_usage u = PL_USAGE_INIT;
    return pl_usage_read(body, &u) ? 0 : 0;
}

static void bench(const char *name, pl_buf b, int (*what)(pl_str))
{
    enum { ROUNDS = 21 };
    double took[ROUNDS];
    int loops = (int)(4000000 / (b.n + 200)) + 1;
    for (int r = 0; r < ROUNDS; r++) {
        double start = now_ns();
        for (int i = 0; i < loops; i++)
            must(what(pl_buf_str(&b)));
        took[r] = (now_ns() - start) / loops;
    }
    qsort(took, ROUNDS, sizeof took[0], by_value);
    double ns = took[ROUNDS / 2];
    printf("%-28s %9zu B %12.0f ns %7.2f GB/s\n", name, b.n, ns, (double)b.n / ns);
    pl_buf_free(&b);
}

int main(void)
{
    bench("chat, prose", chat(1024, 400, PROSE), scan);
    bench("chat, prose", chat(100 * 1024, 2000, PROSE), scan);
    bench("chat, prose", chat(4 << 20, 2000, PROSE), scan);
    bench("chat, one long plain string", chat(100 * 1024, 1 << 20, PLAIN), scan);
    bench("chat, one long plain string", chat(4 << 20, 8 << 20, PLAIN), scan);
    bench("chat, code", chat(100 * 1024, 2000, CODE), scan);
    bench("chat, Chinese", chat(100 * 1024, 2000, HAN), scan);
    bench("chat, accents and emoji", chat(100 * 1024, 2000, EMOJI), scan);
    bench("chat, messages of 100 B", chat(100 * 1024, 100, PROSE), scan);
    bench("token ids", ids(100 * 1024, ","), scan);
    bench("token ids, blanks", ids(100 * 1024, ", "), scan);

    pl_buf chunk = {0};
    must(pl_buf_addf(&chunk, "{\"id\":\"chatcmpl-2f6c\",\"object\":\"chat.completion.chunk\","
                             "\"created\":1755000000,\"model\":\"org/model-70b\",\"choices\":[{"
                             "\"index\":0,\"delta\":{\"content\":\" tide\"},\"logprobs\":null,"
                             "\"finish_reason\":null}],\"usage\":null}"));
    bench("usage of a chunk without", chunk, usage);
    pl_buf last = {0};
    must(pl_buf_addf(&last, "{\"id\":\"chatcmpl-2f6c\",\"object\":\"chat.completion.chunk\","
                            "\"created\":1755000000,\"model\":\"org/model-70b\",\"choices\":[],"
                            "\"usage\":{\"prompt_tokens\":812,\"completion_tokens\":64,"
                            "\"total_tokens\":876,\"prompt_tokens_details\":{\"cached_tokens\":"
                            "768}}}"));
    bench("usage of the last chunk", last, usage);
    return 0;
}
