/* Replays the turns of coding-agent sessions through the cache of token ids and counts what engines
 * are asked: calls per turn and the share of the prompts' tokens that is tokenized anew. The trace
 * is kv-cache-tester's (a line a session; per request the 64-token blocks kept of the request
 * before, and those added). A session becomes messages: what is kept stays whole messages, what is
 * added is an assistant's reply and a user's message, a half each, the first request's a system and
 * a user's message. A sub-agent (`sub`) is a conversation of its own. The engine is made up here,
 * its template adds up, and a block is one id, so that ids times 64 are tokens. Checks every
 * answer. Prints markdown.
 *
 * Usage: bench_tokenize TRACE.jsonl [cap in MiB of real tokens, 256] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/buf.h"
#include "kv/tokens_cache.h"

enum { BLOCK = 64, FRAME = 2 /* ids around a message */ };

static void must(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "bench_tokenize: %s\n", what);
        exit(1);
    }
}

/* A message is a run of the session's blocks. */
typedef struct talk {
    uint32_t *blocks;
    size_t n, cap;
    struct {
        size_t end; /* in blocks */
        char role;  /* 's', 'u', 'a' */
    } * messages;
    size_t messages_n, messages_cap;
} talk;

typedef struct sums {
    uint64_t turns, first, hits, calls, tokens, asked, sent_bytes, body_bytes, worst_calls;
} sums;

static pl_tokcache *cache;
static pl_mailbox mailbox;
static uv_loop_t loop;
static sums s;
static pl_tokens *got;
static bool ready;

static void push_block(talk *t, uint32_t id)
{
    if (t->n == t->cap) {
        t->cap = t->cap ? t->cap * 2 : 1024;
        t->blocks = realloc(t->blocks, t->cap * sizeof *t->blocks);
        must(t->blocks, "out of memory");
    }
    t->blocks[t->n++] = id;
}

static void push_message(talk *t, size_t end, char role)
{
    if (t->messages_n == t->messages_cap) {
        t->messages_cap = t->messages_cap ? t->messages_cap * 2 : 64;
        t->messages = realloc(t->messages, t->messages_cap * sizeof *t->messages);
        must(t->messages, "out of memory");
    }
    t->messages[t->messages_n].end = end;
    t->messages[t->messages_n++].role = role;
}

/* The blocks of a message as its content: what the engine here reads them from. */
static void add_message(pl_buf *b, const talk *t, size_t i, uint64_t session)
{
    size_t from = i ? t->messages[i - 1].end : 0;
    char role = t->messages[i].role;
    int rc = pl_buf_addf(b, "%s{\"role\":\"%s\",\"content\":\"%llu:", i ? "," : "",
                         role == 's'   ? "system"
                         : role == 'a' ? "assistant"
                                       : "user",
                         (unsigned long long)session);
    for (size_t k = from; k < t->messages[i].end; k++)
        rc |= pl_buf_addf(b, " %u", t->blocks[k]);
    must((rc | pl_buf_addf(b, "\"}")) == 0, "out of memory");
}

/* The made-up engine: each message is its role, its session, its blocks. */
static void tokenize(pl_str body, pl_buf *out)
{
    json_t *in = json_loadb(body.p, body.n, 0, NULL), *m;
    size_t i;
    must(in && pl_buf_addf(out, "{\"tokens\":[7") == 0, "a body");
    json_array_foreach(json_object_get(in, "messages"), i, m)
    {
        const char *p = json_string_value(json_object_get(m, "content"));
        char *end;
        int rc = pl_buf_addf(out, ",%d", json_string_value(json_object_get(m, "role"))[0]);
        unsigned long session = strtoul(p, &end, 10);
        rc |= pl_buf_addf(out, ",%lu", *p == '.' ? 0 : session);
        for (p = *end == ':' ? end + 1 : end; *p == ' '; p = end)
            rc |= pl_buf_addf(out, ",%lu", strtoul(p, &end, 10));
        must(rc == 0, "out of memory");
    }
    must(pl_buf_addf(out, "]}") == 0, "out of memory");
    json_decref(in);
}

static void on_ready(void *ctx, int rc, pl_tokens *ids)
{
    (void)ctx;
    must(rc == 0, "no ids");
    got = ids;
    ready = true;
}

static void check(const talk *t, pl_tokens *ids)
{
    size_t n = pl_tokens_count(ids), want = 1 + FRAME * t->messages_n + t->n, at = 1;
    must(n == want, "a wrong number of ids");
    uint32_t *all = malloc(n * sizeof *all);
    must(all, "out of memory");
    pl_tokens_copy(ids, all);
    for (size_t i = 0, k = 0; i < t->messages_n; i++)
        for (at += FRAME; k < t->messages[i].end; k++)
            must(all[at++] == t->blocks[k], "wrong ids");
    free(all);
    pl_tokens_release(ids);
}

static void turn(const talk *t, uint64_t session, bool first)
{
    pl_buf body = {0};
    must(pl_buf_addf(&body, "{\"model\":\"m\",\"messages\":[") == 0, "out of memory");
    for (size_t i = 0; i < t->messages_n; i++)
        add_message(&body, t, i, session);
    must(pl_buf_addf(&body, "]}") == 0, "out of memory");
    pl_scan scan;
    pl_tokcache_answer a;
    must(pl_scan_body(pl_buf_str(&body), 100, &scan) == 0, "a body");
    pl_tokcache_request r = {PL_TOKCACHE_CHAT, PL_STR("m"), pl_buf_str(&body), &scan, &mailbox,
                             on_ready,         NULL};
    ready = false;
    pl_tokcache_result result = pl_tokcache_get(cache, &r, &a);
    s.turns++;
    s.first += first;
    s.tokens += t->n * BLOCK;
    s.body_bytes += body.n;
    s.hits += result == PL_TOKCACHE_HIT;
    must(result == PL_TOKCACHE_HIT || result == PL_TOKCACHE_ASK, "not asked");
    uint64_t calls = (uint64_t)a.calls_n;
    s.calls += calls;
    s.worst_calls = calls > s.worst_calls ? calls : s.worst_calls;
    for (int i = 0; i < a.calls_n; i++) {
        pl_buf out = {0};
        tokenize(pl_buf_str(&a.calls[i].body), &out);
        for (size_t k = 0; k < out.n; k++) /* frames are counted as if they were blocks */
            s.asked += out.p[k] == ',' ? BLOCK : 0;
        s.sent_bytes += a.calls[i].body.n;
        pl_tokcache_fill(cache, a.calls[i].call, pl_buf_str(&out));
        pl_buf_free(&out);
        pl_buf_free(&a.calls[i].body);
    }
    while (result == PL_TOKCACHE_ASK && !ready)
        uv_run(&loop, UV_RUN_NOWAIT);
    check(t, result == PL_TOKCACHE_HIT ? a.ids : got);
    pl_buf_free(&body);
}

static uint64_t sessions;

static void replay(const json_t *rows)
{
    talk t = {0};
    uint64_t session = ++sessions;
    const json_t *row;
    size_t i;
    bool first = true;
    json_array_foreach(rows, i, row)
    {
        if (json_object_get(row, "rows")) {
            replay(json_object_get(row, "rows"));
            continue;
        }
        size_t keep = (size_t)json_integer_value(json_object_get(row, "keep"));
        keep = keep < t.n ? keep : t.n;
        while (t.messages_n && t.messages[t.messages_n - 1].end > keep)
            t.messages_n--; /* a message that changed is a new one */
        t.n = keep;
        const json_t *add = json_object_get(row, "add"), *range;
        size_t k;
        json_array_foreach(add, k, range)
        {
            json_int_t from = json_integer_value(json_array_get(range, 0));
            for (json_int_t n = json_integer_value(json_array_get(range, 1)); n > 0; n--)
                push_block(&t, (uint32_t)from++);
        }
        size_t known = t.messages_n ? t.messages[t.messages_n - 1].end : 0;
        if (t.n > known) { /* after a user's message comes a reply */
            push_message(&t, known + (t.n - known) / 2, t.messages_n ? 'a' : 's');
            push_message(&t, t.n, 'u');
        }
        if (!t.messages_n)
            continue;
        turn(&t, session, first);
        first = false;
    }
    free(t.blocks);
    free(t.messages);
}

int main(int argc, char **argv)
{
    must(argc > 1, "usage: bench_tokenize TRACE.jsonl [cap in MiB of real tokens, 256]");
    uint64_t mib = argc > 2 ? strtoull(argv[2], NULL, 10) : 256;
    pl_tokcache_options o = {pl_clock_real(), (mib << 20) / BLOCK, 10};
    must(pl_tokcache_new(&o, &cache) == 0 && uv_loop_init(&loop) == 0 &&
             pl_mailbox_init(&mailbox, &loop, NULL) == 0,
         "out of memory");
    uv_ref((uv_handle_t *)&mailbox.async);
    FILE *f = fopen(argv[1], "r");
    must(f, "cannot read the trace");
    for (json_t *line; (line = json_loadf(f, JSON_DISABLE_EOF_CHECK, NULL)); json_decref(line))
        replay(json_object_get(line, "rows"));
    fclose(f);
    pl_tokcache_stats st;
    pl_tokcache_stats_of(cache, &st);
    printf("| cap, MiB | sessions | turns | first turns | hits | whole | parts | anchors | calls / "
           "turn | tokens of prompts, M | tokenized anew | bytes sent / bytes of prompts | evicted "
           "|\n|---|---|---|---|---|---|---|---|---|---|---|---|---|\n"
           "| %llu | %llu | %llu | %llu | %llu | %llu | %llu | %llu | %.3f | %.1f | %.2f %% | %.2f "
           "%% | %llu |\n",
           (unsigned long long)mib, (unsigned long long)sessions, (unsigned long long)s.turns,
           (unsigned long long)s.first, (unsigned long long)s.hits, (unsigned long long)st.whole,
           (unsigned long long)st.parts, (unsigned long long)st.anchors,
           (double)s.calls / (double)s.turns, (double)s.tokens / 1e6,
           100.0 * (double)s.asked / (double)s.tokens,
           100.0 * (double)s.sent_bytes / (double)s.body_bytes, (unsigned long long)st.evicted);
    pl_mailbox_close(&mailbox);
    uv_run(&loop, UV_RUN_DEFAULT);
    pl_mailbox_destroy(&mailbox);
    uv_loop_close(&loop);
    pl_tokcache_free(cache);
    return 0;
}
