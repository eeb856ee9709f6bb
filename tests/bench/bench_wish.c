/* What sessions cost in pure functions: reading the wish of a request without a session (16 and 100
 * headers) and with one; planning a turn that resends a long chat, text or list of ids; following
 * one event of a reply. A line each, the median of 21 rounds. One thread, no arguments. */
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "session/history.h"
#include "session/wish.h"

static void must(bool fine, const char *what)
{
    if (!fine) {
        fprintf(stderr, "bench_wish: %s\n", what);
        exit(1);
    }
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_ns(void (*run)(void *ctx), void *ctx, int times)
{
    double v[21];
    for (int i = 0; i < 21; i++) {
        uint64_t t0 = pl_now_ns();
        for (int k = 0; k < times; k++)
            run(ctx);
        v[i] = (double)(pl_now_ns() - t0) / times;
    }
    qsort(v, 21, sizeof *v, compare);
    return v[10];
}

/* --- wishes --- */

typedef struct wish_case {
    pl_head head;
    pl_str body;
    pl_scan scan;
    pl_wish_options o;
    pl_wish w;
    pl_wish_error e;
    pl_arena a;
} wish_case;

static void read_wish(void *ctx)
{
    wish_case *c = ctx;
    must(pl_wish_read(&c->a, c->body, &c->scan, &c->head, &c->o, &c->w, &c->e) == 0, "wish");
}

static void wish(const char *what, int headers, bool session_header, const char *body)
{
    static const char *const usual[] = {
        "host",           "user-agent",       "accept",           "accept-encoding",
        "content-type",   "authorization",    "content-length",   "connection",
        "x-request-id",   "traceparent",      "x-forwarded-for",  "x-forwarded-proto",
        "x-stainless-os", "x-stainless-lang", "x-stainless-arch", "x-stainless-retry-count"};
    pl_header h[101];
    wish_case c = {.head = {.headers = h, .headers_n = headers},
                   .body = pl_str_c(body),
                   .o = {.headers = pl_wish_default_headers,
                         .headers_n = pl_wish_default_headers_n,
                         .header_timeout_seconds = 300,
                         .max_timeout_seconds = 86400}};
    c.o.filter = pl_wish_filter(c.o.headers, c.o.headers_n);
    for (int i = 0; i < headers; i++)
        h[i] = (pl_header){pl_str_c(usual[i % 16]), PL_STR("value")};
    if (session_header)
        h[headers - 1] = (pl_header){PL_STR("X-Session-ID"), PL_STR("ses_0123456789abcdef")};
    must(pl_scan_body(c.body, 100, &c.scan) == 0, "scan");
    printf("%-44s %10.0f ns\n", what, median_ns(read_wish, &c, 20000));
    pl_arena_free(&c.a);
}

/* --- histories --- */

typedef struct turn_case {
    pl_history h;
    enum pl_api_kind api;
    pl_str body;
    pl_scan scan;
} turn_case;

static void plan_turn(void *ctx)
{
    turn_case *c = ctx;
    pl_edits e = {0};
    pl_history_plan p;
    pl_history_plan_turn(&c->h, c->api, c->body, &c->scan, 0, &e, &p);
    must(p.how == PL_PLAN_TRIM, p.why ? p.why : "not trimmed");
}

/* `once` is the body with all units but those in `more`. */
static void turn(const char *what, enum pl_api_kind api, const pl_buf *once, const pl_buf *more)
{
    turn_case c = {.api = api, .body = pl_buf_str(once)};
    pl_edits e = {0};
    pl_history_plan p;
    must(pl_scan_body(c.body, 100, &c.scan) == 0, "scan");
    pl_history_plan_turn(&c.h, api, c.body, &c.scan, 0, &e, &p);
    must(p.how == PL_PLAN_WHOLE, "not whole");
    c.h = p.next;
    c.body = pl_buf_str(more);
    must(pl_scan_body(c.body, 100, &c.scan) == 0, "scan");
    double ns = median_ns(plan_turn, &c, 20);
    printf("%-44s %10.0f ns  %6.2f GB/s\n", what, ns, (double)more->n / ns);
}

static pl_buf prompt(int kind, int n)
{
    static const char *const open[] = {"{\"messages\":[", "{\"text\":\"", "{\"input_ids\":["};
    pl_buf b = {0};
    must(pl_buf_addf(&b, "%s", open[kind]) == 0, "memory");
    for (int i = 0; i < n; i++) {
        if (kind == 2)
            must(pl_buf_addf(&b, "%s%d", i ? "," : "", i * 37 % 150000) == 0, "memory");
        else if (kind == 0)
            must(pl_buf_addf(&b, "%s{\"role\":\"%s\",\"content\":\"", i ? "," : "",
                             i % 2 ? "assistant" : "user") == 0,
                 "memory");
        for (int k = 0; k < 30 && kind != 2; k++)
            must(pl_buf_addf(&b, "The tide tables say that low water is at %d, and then\\n", i) ==
                     0,
                 "memory");
        if (kind == 0)
            must(pl_buf_addf(&b, "\"}") == 0, "memory");
    }
    must(pl_buf_addf(&b, "%s", kind == 1 ? "\"}" : "]}") == 0, "memory");
    return b;
}

/* --- replies --- */

static void follow(void *ctx)
{
    pl_reply_event(ctx, PL_STR("{\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion."
                               "chunk\",\"created\":1750000000,\"model\":\"org/model-70b\","
                               "\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},"
                               "\"logprobs\":null,\"finish_reason\":null}]}"));
}

int main(void)
{
    wish("wish, no session, 16 headers", 16, false, "{\"model\":\"m\",\"messages\":[]}");
    wish("wish, no session, 100 headers", 100, false, "{\"model\":\"m\",\"messages\":[]}");
    wish("wish, X-Session-ID, 16 headers", 16, true, "{\"model\":\"m\",\"messages\":[]}");
    wish("wish, session_control, 16 headers", 16, false,
         "{\"model\":\"m\",\"messages\":[],\"nvext\":{\"session_control\":{\"session_id\":"
         "\"sub-7\",\"action\":\"open\",\"timeout\":60},\"agent_hints\":{\"osl\":300}}}");
    static const char *const names[] = {"turn, chat of 300 messages, 500 KB",
                                        "turn, text of 500 KB", "turn, 100,000 ids"};
    static const enum pl_api_kind apis[] = {PL_API_CHAT, PL_API_GENERATE, PL_API_GENERATE};
    for (int kind = 0; kind < 3; kind++) {
        int n = kind == 2 ? 100000 : 300;
        pl_buf once = prompt(kind, n - 1), more = prompt(kind, n);
        turn(names[kind], apis[kind], &once, &more);
        pl_buf_free(&once);
        pl_buf_free(&more);
    }
    pl_reply *r = pl_reply_new(PL_API_CHAT);
    must(r != NULL, "memory");
    printf("%-44s %10.0f ns\n", "reply, one chat event", median_ns(follow, r, 20000));
    pl_reply_free(r);
    return 0;
}
