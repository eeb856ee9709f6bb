/* Fuzz target: the message reader. The first byte chooses direction, limits and how the rest is cut
 * up. Beyond what the sanitizers see, the result must not depend on the cuts: the same bytes are
 * fed in pieces and whole, and both runs must have found the same messages. Run:
 * build-fuzz/fuzz_head -max_len=4096 SCRATCH tests/fuzz/corpus/head */
#include <stdlib.h>

#include "http/head.h"

static const pl_limits small = {.head_bytes = 300,
                                .headers = 5,
                                .target_bytes = 40,
                                .body_bytes = 100,
                                .chunk_overhead_bytes = 60,
                                .trailer_bytes = 30};

typedef struct run {
    uint64_t hash; /* of everything that was found, in order */
    int status;
} run;

static void mix(run *t, const void *p, size_t n)
{
    const unsigned char *b = p;
    for (size_t i = 0; i < n; i++)
        t->hash = (t->hash ^ b[i]) * 0x100000001b3u;
}

static void on_body(void *ctx, const char *p, size_t n)
{
    mix(ctx, p, n);
}

/* Every span must be readable and lie in order. */
static void mix_head(run *t, const pl_head *h)
{
    for (int i = 0; i < h->headers_n; i++) {
        mix(t, h->headers[i].name.p, h->headers[i].name.n);
        mix(t, ":", 1);
        mix(t, h->headers[i].value.p, h->headers[i].value.n);
        if (memchr(h->headers[i].value.p, '\n', h->headers[i].value.n) ||
            memchr(h->headers[i].value.p, '\r', h->headers[i].value.n) || h->headers[i].name.n == 0)
            abort();
    }
    mix(t, h->path.p, h->path.n);
    mix(t, h->query.p, h->query.n);
    mix(t, h->reason.p, h->reason.n);
    mix(t, &h->content_length, sizeof h->content_length);
    const int facts[] = {h->request ? (int)h->method : h->status,
                         h->minor,
                         h->keep_alive,
                         h->chunked,
                         h->expect_continue,
                         h->until_close};
    mix(t, facts, sizeof facts);
    if (h->chunked && h->content_length != UINT64_MAX)
        abort();
}

static run run_over(const unsigned char *p, size_t n, unsigned mode, size_t piece)
{
    run t = {14695981039346656037u, 0};
    pl_arena arena = PL_ARENA_INIT;
    pl_reader r;
    pl_reader_init(&r, mode & 1, mode & 2 ? &small : &pl_limits_default, mode & 4 ? &arena : NULL,
                   on_body, &t);
    r.no_body = mode & 8;
    bool in_head = true;
    size_t at = 0;
    while (at < n && r.state != PL_READER_ERROR) {
        size_t want = piece && piece < n - at ? piece : n - at;
        char *exact = malloc(want);
        if (!exact)
            abort();
        memcpy(exact, p + at, want);
        size_t used = pl_reader_feed(&r, exact, want);
        free(exact);
        if (used > want)
            abort();
        at += used;
        if (r.state == PL_READER_ERROR)
            break;
        if (in_head && r.state != PL_READER_HEAD) {
            in_head = false;
            mix_head(&t, &r.head);
        }
        if (r.state == PL_READER_DONE) {
            mix(&t, "|", 1);
            pl_reader_next(&r);
            in_head = true;
        } else if (used == 0) {
            abort(); /* no progress */
        }
    }
    if (r.state != PL_READER_ERROR)
        pl_reader_eof(&r);
    if (r.state == PL_READER_ERROR && (!r.error || r.status < 400))
        abort();
    t.status = r.status;
    pl_reader_free(&r);
    pl_arena_free(&arena);
    return t;
}

int LLVMFuzzerTestOneInput(const unsigned char *p, size_t n);
int LLVMFuzzerTestOneInput(const unsigned char *p, size_t n)
{
    if (n == 0)
        return 0;
    unsigned mode = p[0] & 15;
    size_t piece = 1 + (p[0] >> 4) * 3;
    run whole = run_over(p + 1, n - 1, mode, 0);
    run cut = run_over(p + 1, n - 1, mode, piece);
    /* an error may come before a piece of its chunk's data, or after it; and a chunk that is too
     * large behind too much framing is either */
    bool same = whole.status == cut.status || (whole.status == 413 && cut.status == 400);
    if (!same || (whole.status == 0 && whole.hash != cut.hash))
        abort();
    return 0;
}
