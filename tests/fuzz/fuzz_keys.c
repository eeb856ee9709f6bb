/* Any request body to keys, and any bytes as the answer of an engine's /tokenize. What must hold:
 * no failure, keys only for what is there, the same keys whatever the size of the arena's
 * leftovers, and that ids, when an answer is taken for some, are all of its "tokens". */
#include <stdlib.h>

#include "kv/keys.h"
#include "kv/tokens_cache.h"

#define MUST(x) ((x) ? (void)0 : abort())

static void no_answer(void *ctx, int rc, pl_tokens *ids)
{
    (void)ctx;
    (void)rc;
    pl_tokens_release(ids);
}

/* The second half of the input answers what the first half asks for. */
static void tokenize(pl_str body, const pl_scan *scan, pl_str response)
{
    static uint64_t now_ns;
    pl_tokcache_options o = {pl_clock_virtual(&now_ns), 1 << 20, 4};
    pl_tokcache *c;
    uv_loop_t loop;
    pl_mailbox mailbox;
    pl_tokcache_answer a;
    MUST(pl_tokcache_new(&o, &c) == 0 && uv_loop_init(&loop) == 0);
    MUST(pl_mailbox_init(&mailbox, &loop, NULL) == 0);
    pl_tokcache_request r = {PL_TOKCACHE_CHAT, PL_STR("m"), body, scan, &mailbox, no_answer, NULL};
    if (pl_tokcache_get(c, &r, &a) == PL_TOKCACHE_ASK) {
        for (int i = 0; i < a.calls_n; i++) {
            pl_scan sent; /* what goes to an engine is JSON, whatever the client sent */
            MUST(pl_scan_body(pl_buf_str(&a.calls[i].body), 110, &sent) == 0);
            pl_tokcache_fill(c, a.calls[i].call, response);
            pl_buf_free(&a.calls[i].body);
        }
        if (pl_tokcache_get(c, &r, &a) == PL_TOKCACHE_HIT) {
            pl_member tokens = pl_object_find(response, PL_STR("tokens"));
            MUST(pl_tokens_count(a.ids) == tokens.elements);
            pl_tokens_release(a.ids);
        } else {
            for (int i = 0; i < a.calls_n; i++) {
                pl_tokcache_fail(c, a.calls[i].call);
                pl_buf_free(&a.calls[i].body);
            }
        }
    }
    pl_mailbox_close(&mailbox);
    uv_run(&loop, UV_RUN_DEFAULT);
    pl_mailbox_destroy(&mailbox);
    MUST(uv_loop_close(&loop) == 0);
    pl_tokcache_free(c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    pl_str all = {(const char *)data, size}, body = all, response = all;
    const char *cut = size ? memchr(data, '\n', size) : NULL;
    if (cut) {
        body.n = (size_t)(cut - all.p);
        response = (pl_str){cut + 1, size - body.n - 1};
    }
    pl_scan scan;
    if (pl_scan_body(body, 100, &scan) != 0)
        return 0;
    pl_keys_space s;
    pl_keys one, two;
    pl_arena a = PL_ARENA_INIT;
    MUST(pl_keys_space_init(&s, PL_STR("m"), 4, size % 2, PL_STR(""), PL_STR(""), 64) == 0);
    MUST(pl_keys_of_request(&s, &scan, &a, &one) == 0);
    pl_scan fewer = scan; /* what is known of long strings must make no difference */
    fewer.longs_n = 0;
    MUST(pl_keys_of_request(&s, &fewer, &a, &two) == 0);
    MUST(one.n == two.n && one.kind == two.kind && one.n <= PL_KEYS_MAX);
    for (size_t i = 0; i < one.n; i++)
        MUST(one.key[i] == two.key[i]);
    if (one.kind == PL_KEYS_TOKENS)
        MUST(one.n == pl_block_count(&s.block, one.tokens_n));
    if (one.kind == PL_KEYS_TEXT)
        MUST(one.n <= one.bytes / one.unit);
    pl_arena_free(&a);
    tokenize(body, &scan, response);
    return 0;
}
