/* From requests to keys: where ids come from, which conversations share and which do not, that an
 * extended one shares all whole chunks, that odd shapes only cost keys; ids, strings and chunks
 * beside naive versions. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/buf.h"
#include "base/err.h"
#include "base/rng.h"
#include "http/json.h"
#include "kv/keys.h"
#include "../http/random_json.h"

static pl_arena arena;

static pl_keys_space space_of(pl_str model, pl_str lora, pl_str salt)
{
    pl_keys_space s;
    assert_int_equal(pl_keys_space_init(&s, model, 4, false, lora, salt, PL_KV_CANON_CHUNK_MIN), 0);
    return s;
}

static pl_keys keys_in(const pl_keys_space *s, pl_str body)
{
    pl_scan scan;
    pl_keys k;
    if (pl_scan_body(body, 100, &scan) != 0)
        fail_msg("not a request: %.*s: %s", PL_FMT(body), scan.error);
    assert_int_equal(pl_keys_of_request(s, &scan, &arena, &k), 0);
    return k;
}

static pl_keys keys(const char *body)
{
    pl_keys_space s = space_of(PL_STR("m"), PL_STR(""), PL_STR(""));
    return keys_in(&s, pl_str_c(body));
}

/* Of everything that the stream says, chunk or not. */
static uint64_t digest(const char *body)
{
    pl_scan scan;
    if (pl_scan_body(pl_str_c(body), 100, &scan) != 0)
        fail_msg("not a request: %s: %s", body, scan.error);
    pl_kv_canon c;
    pl_kv_canon_init(&c, 1, PL_KV_CANON_CHUNK, NULL, 0);
    pl_keys_canonical(&scan, SIZE_MAX, &c);
    return pl_kv_canon_digest(&c);
}

static size_t shared(pl_keys a, pl_keys b)
{
    size_t n = 0;
    while (n < a.n && n < b.n && a.key[n] == b.key[n])
        n++;
    for (size_t i = n; i < a.n && i < b.n; i++)
        assert_true(a.key[i] != b.key[i]);
    return n;
}

/* --- token ids --- */

static void where_ids_are(void **state)
{
    (void)state;
    static const char *const bodies[] = {
        "{\"prompt\":[1,2,3,4,5,6,7,8,9]}",
        "{\"prompt\":[[1,2,3,4,5,6,7,8,9]]}",
        "{\"prompt\":[[1,2,3,4,5,6,7,8,9],[7]]}",
        "{\"input_ids\":[ 1 , 2,3,4,\n5,6,7,8,9 ],\"text\":\"other\"}",
        "{\"input_ids\":[[1,2,3,4,5,6,7,8,9]]}",
        "{\"input\":[1,2,3,4,5,6,7,8,9]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"nvext\":{\"token_data\":"
        "[1,2,3,4,5,6,7,8,9]}}",
        "{\"prompt\":[5,5,5,5,5,5],\"nvext\":{\"a\":1,\"token_data\":[1,2,3,4,5,6,7,8,9]}}",
    };
    static const uint32_t ids[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    pl_keys_space s = space_of(PL_STR("m"), PL_STR(""), PL_STR(""));
    uint64_t local[2];
    assert_int_equal(pl_block_hash(&s.block, ids, 9, local, NULL, 2), 2);
    pl_keys first = keys(bodies[0]);
    for (size_t i = 0; i < sizeof bodies / sizeof bodies[0]; i++) {
        pl_keys k = keys(bodies[i]);
        assert_int_equal(k.kind, PL_KEYS_TOKENS);
        assert_int_equal(k.n, 2);
        assert_int_equal(k.tokens_n, 9);
        assert_memory_equal(k.tokens, ids, sizeof ids);
        assert_memory_equal(k.local, local, sizeof local);
        assert_int_equal(shared(k, first), 2);
        assert_int_equal(k.batch, i == 2 ? 2 : 1);
        assert_true(pl_keys_tokens(&k, 2, 9) == 8);
    }
    pl_keys_space other = space_of(PL_STR("m"), PL_STR(""), PL_STR("tenant"));
    assert_int_equal(shared(first, keys_in(&other, pl_str_c(bodies[0]))), 0);
    other = space_of(PL_STR("n"), PL_STR(""), PL_STR(""));
    assert_int_equal(shared(first, keys_in(&other, pl_str_c(bodies[0]))), 0);
}

static void ids_up_to_the_first_bad_one(void **state)
{
    (void)state;
    static const struct {
        const char *array;
        size_t n;
    } cases[] = {
        {"[]", 0},
        {"[ ]", 0},
        {"[1]", 1},
        {"[1,-2,3]", 1},
        {"[1,2.0]", 1},
        {"[1,2e1]", 1},
        {"[4294967295]", 1},
        {"[4294967296]", 0},
        {"[1,99999999999999999999]", 1},
        {"[1,\"2\"]", 1},
        {"[1,null]", 1},
        {"[1,[2]]", 1},
        {"[0,0,0]", 3},
        {"{\"a\":1}", 0},
        {"7", 0},
        {"[12345678,1234567890,123456789,1]", 4},
        {"[1 ,\t2\n]", 2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint32_t out[8];
        assert_int_equal(pl_keys_parse_ids(pl_str_c(cases[i].array), out, 8), cases[i].n);
    }
    uint32_t out[2];
    assert_int_equal(pl_keys_parse_ids(PL_STR("[1,2,3]"), out, 2), 2);
}

static void ids_like_strtoul(void **state)
{
    (void)state;
    pl_rng rng = {3};
    for (int round = 0; round < 300; round++) {
        enum { N = 200 };
        uint32_t want[N], got[N];
        char *text = malloc(N * 16);
        assert_non_null(text);
        size_t at = 0, n = 1 + pl_rng_below(&rng, N);
        text[at++] = '[';
        for (size_t i = 0; i < n; i++) {
            want[i] = (uint32_t)(pl_rng_next(&rng) >> (32 + pl_rng_below(&rng, 32)));
            at += (size_t)sprintf(text + at, "%s%u%s",
                                  !i          ? ""
                                  : round % 2 ? ", "
                                              : ",",
                                  want[i], pl_rng_below(&rng, 9) ? "" : " ");
        }
        text[at++] = ']';
        char *exact = malloc(at); /* so that a sanitizer sees a read past it */
        assert_non_null(exact);
        memcpy(exact, text, at);
        assert_int_equal(pl_keys_parse_ids((pl_str){exact, at}, got, N), n);
        assert_memory_equal(got, want, n * sizeof *got);
        for (size_t cut = 0; cut < at; cut += 7) { /* never past the end, whatever it is */
            char *part = malloc(cut ? cut : 1);
            assert_non_null(part);
            memcpy(part, exact, cut);
            assert_true(pl_keys_parse_ids((pl_str){part, cut}, got, N) <= n);
            free(part);
        }
        free(text);
        free(exact);
    }
}

/* --- text: what is equal and what is not --- */

#define MESSAGES(m) "{\"messages\":[" m "]}"
#define USER(c)     "{\"role\":\"user\",\"content\":" c "}"

static void equal_conversations(void **state)
{
    (void)state;
    static const char *const pairs[][2] = {
        {MESSAGES(USER("\"hello\"")), "{ \"messages\" : [ { \"role\" : \"user\" ,\n\"content\" : "
                                      "\"hello\" } ] , \"model\":\"m\", \"temperature\":1 }"},
        {MESSAGES(USER("\"a\\u00e9\\n\\/\\\"\\ud83d\\ude00\"")),
         MESSAGES(USER("\"a\xc3\xa9\\u000a/\\u0022\xf0\x9f\x98\x80\""))},
        {MESSAGES(USER("\"x\"")), MESSAGES("{\"content\":\"x\",\"role\":\"user\"}")},
        {MESSAGES(USER("\"x\"")), MESSAGES(USER("[{\"type\":\"text\",\"text\":\"x\"}]"))},
        {MESSAGES(USER("[{\"type\":\"text\",\"text\":\"x\"}]")),
         MESSAGES(USER("[{\"text\":\"x\",\"type\":\"text\",\"cache_control\":{\"type\":"
                       "\"ephemeral\"}}]"))},
        {MESSAGES(USER("[{\"type\":\"tool_result\",\"tool_use_id\":\"1\",\"content\":\"y\"}]")),
         MESSAGES(USER("[{\"type\":\"tool_result\",\"tool_use_id\":\"1\",\"content\":\"y\","
                       "\"cache_control\":{\"a\":[1,{}]}}]"))},
        {MESSAGES("{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"1\"}]}"),
         MESSAGES("{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"1\",\"x\":null}],"
                  "\"refusal\":null}")},
        {"{\"tools\":[],\"messages\":[" USER("1") "]}", MESSAGES(USER("1"))},
        {"{\"prompt\":\"once\"}", "{\"text\":\"once\",\"sampling_params\":{}}"},
        {"{\"prompt\":\"once\"}", "{\"prompt\":[\"once\",\"twice\"]}"},
        {"{\"input\":\"hi\"}", "{\"input\":[" USER("\"hi\"") "]}"},
        {"{\"input\":[" USER("\"hi\"") "]}",
         "{\"input\":[{\"type\":\"message\",\"role\":\"user\",\"content\":[{\"type\":"
         "\"input_text\",\"text\":\"hi\"}]}]}"},
        {"{\"system\":\"be\",\"messages\":[" USER("\"x\"") "]}",
         "{\"messages\":[{\"role\":\"system\",\"content\":\"be\"}," USER("\"x\"") "]}"},
        {"{\"system\":[{\"type\":\"text\",\"text\":\"be\"}],\"messages\":[]}",
         "{\"instructions\":\"be\",\"input\":[]}"},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
        if (digest(pairs[i][0]) != digest(pairs[i][1]))
            fail_msg("not equal: %s and %s", pairs[i][0], pairs[i][1]);
}

static void different_conversations(void **state)
{
    (void)state;
    static const char *const all[] = {
        "{}",
        MESSAGES(USER("\"x\"")),
        MESSAGES(USER("\"xy\"")),
        MESSAGES(USER("\"\"")),
        MESSAGES("{\"role\":\"assistant\",\"content\":\"x\"}"),
        MESSAGES("{\"role\":\"userx\",\"content\":\"\"}"),
        MESSAGES("{\"role\":\"user\",\"name\":\"x\"}"),
        MESSAGES("{\"role\":\"user\",\"name\":\"bob\",\"content\":\"x\"}"),
        MESSAGES(USER("\"x\"") "," USER("\"y\"")),
        MESSAGES(USER("\"y\"") "," USER("\"x\"")),
        MESSAGES(USER("[{\"type\":\"text\",\"text\":\"x\"},{\"type\":\"text\",\"text\":\"y\"}]")),
        MESSAGES(USER("{\"type\":\"text\",\"text\":\"x\"}")),
        MESSAGES(USER("[{\"type\":\"image_url\",\"image_url\":{\"url\":"
                      "\"https://example.org/a-picture-of-a-cat.png\"}}]")),
        MESSAGES(USER("[{\"type\":\"image_url\",\"image_url\":{\"url\":"
                      "\"https://example.org/a-picture-of-a-dog.png\"}}]")),
        MESSAGES("{\"role\":\"tool\",\"tool_call_id\":\"1\",\"content\":\"x\"}"),
        MESSAGES("{\"role\":\"tool\",\"tool_call_id\":\"2\",\"content\":\"x\"}"),
        MESSAGES("{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\","
                 "\"arguments\":\"{}\"}}]}"),
        MESSAGES("{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"g\","
                 "\"arguments\":\"{}\"}}]}"),
        MESSAGES("{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\","
                 "\"arguments\":\"{1}\"}}]}"),
        "{\"tools\":[{\"name\":\"f\"}],\"messages\":[" USER("\"x\"") "]}",
        "{\"tools\":[{\"name\":\"f\",\"a\":1}],\"messages\":[" USER("\"x\"") "]}",
        "{\"tools\":[{\"name\":\"f\",\"a\":[1]}],\"messages\":[" USER("\"x\"") "]}",
        "{\"tools\":[{\"name\":\"f\",\"a\":{}}],\"messages\":[" USER("\"x\"") "]}",
        "{\"tools\":[{\"name\":\"f\",\"a\":\"1\"}],\"messages\":[" USER("\"x\"") "]}",
        "{\"tools\":[{\"name\":\"f\",\"a\":true}],\"messages\":[" USER("\"x\"") "]}",
        "{\"tools\":[{\"name\":\"f\"},{\"name\":\"g\"}],\"messages\":[" USER("\"x\"") "]}",
        "{\"system\":\"be\",\"messages\":[" USER("\"x\"") "]}",
        "{\"documents\":[\"be\"],\"messages\":[" USER("\"x\"") "]}",
        "{\"prompt\":\"x\"}",
        "{\"prompt\":\"y\"}",
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        for (size_t k = 0; k < i; k++)
            if (digest(all[i]) == digest(all[k]))
                fail_msg("equal: %s and %s", all[i], all[k]);
}

/* --- conversations that go on --- */

static void words(pl_rng *rng, char *out, size_t n)
{
    static const char some[] = "etaoin shrdlu\xc3\xa9";
    for (size_t i = 0; i < n; i++) {
        uint32_t c = pl_rng_below(rng, 14);
        if (c == 13 && i + 1 < n) {
            memcpy(out + i++, some + 13, 2);
            continue;
        }
        out[i] = some[c < 13 ? c : 0];
    }
}

static void a_conversation_goes_on(void **state)
{
    (void)state;
    pl_keys_space s = space_of(PL_STR("m"), PL_STR(""), PL_STR(""));
    pl_rng rng = {11};
    for (int round = 0; round < 30; round++) {
        char body[20000], all[16000] = "";
        pl_keys before = {.kind = PL_KEYS_NONE};
        uint64_t bytes_before = 0;
        for (int turn = 0; turn < 12; turn++) {
            char text[1000];
            size_t n = pl_rng_below(&rng, 900);
            words(&rng, text, n);
            snprintf(all + strlen(all), sizeof all - strlen(all),
                     "%s{\"role\":\"%s\",\"content\":\"%.*s\"}", turn ? "," : "",
                     turn % 2 ? "assistant" : "user", (int)n, text);
            int length = snprintf(body, sizeof body,
                                  "{\"tools\":[{\"name\":\"f\"}],%s\"messages\":"
                                  "[%s],\"max_tokens\":%d}",
                                  turn % 3 ? " " : "", all, turn);
            pl_keys k = keys_in(&s, (pl_str){body, (size_t)length});
            assert_int_equal(k.kind, PL_KEYS_TEXT);
            assert_int_equal(k.n, k.bytes / s.chunk_bytes);
            assert_int_equal(shared(before, k), before.n); /* every whole chunk */
            assert_true(k.bytes > bytes_before + n);
            assert_true(k.bytes < bytes_before + n + 40);
            before = k;
            bytes_before = k.bytes;
        }
        pl_arena_reset(&arena);
    }
}

/* A change shows from its chunk on and nowhere before it. */
static void a_change_in_the_middle(void **state)
{
    (void)state;
    char one[3000], two[3000], text[2000];
    memset(text, 'a', sizeof text);
    for (size_t at = 0; at < sizeof text; at += 97) {
        snprintf(one, sizeof one, "{\"prompt\":\"%.*s\"}", (int)sizeof text, text);
        text[at] = 'b';
        snprintf(two, sizeof two, "{\"prompt\":\"%.*s\"}", (int)sizeof text, text);
        text[at] = 'a';
        pl_keys a = keys(one), b = keys(two);
        assert_int_equal(a.n, 2001 / PL_KV_CANON_CHUNK_MIN);
        size_t chunk = (at + 1) / PL_KV_CANON_CHUNK_MIN; /* one tag is before the text */
        assert_int_equal(shared(a, b), chunk < a.n ? chunk : a.n);
    }
}

/* An image is its hash, and about as long as the text of as many tokens. */
static void images(void **state)
{
    (void)state;
    enum { BYTES = 100000 };
    char *body = malloc(2 * BYTES), *data = malloc(BYTES + 1);
    assert_non_null(body);
    assert_non_null(data);
    memset(data, 'A', BYTES);
    data[BYTES] = 0;
    static const char *const forms[] = {
        "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"image_url\":"
        "{\"url\":\"data:image/png;base64,%s\"}}]}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image\",\"source\":{\"type\":"
        "\"base64\",\"data\":\"%s\"}}]}]}",
    };
    for (int i = 0; i < 2; i++) {
        sprintf(body, forms[i], data);
        pl_keys a = keys(body);
        assert_in_range(a.bytes, PL_KV_CANON_ATTACHMENT_MAX, PL_KV_CANON_ATTACHMENT_MAX + 100);
        data[BYTES / 2] = 'B';
        sprintf(body, forms[i], data);
        assert_in_range(shared(a, keys(body)), 0, 1);
        data[BYTES / 2] = 'A';
        sprintf(body, forms[i], data);
        assert_int_equal(shared(a, keys(body)), a.n);
    }
    free(body);
    free(data);
}

/* --- beside naive versions --- */

static void chunks_like_one_by_one(void **state)
{
    (void)state;
    pl_rng rng = {5};
    for (int round = 0; round < 300; round++) {
        uint32_t chunk = round % 3 == 0 ? PL_KV_CANON_CHUNK : 64 + pl_rng_below(&rng, 300);
        size_t n = pl_rng_below(&rng, 3000), cap = pl_rng_below(&rng, 2) ? 100 : 5,
               want = n / chunk;
        char *text = malloc(n ? n : 1);
        uint64_t got[100], chain = 77;
        assert_non_null(text);
        for (size_t i = 0; i < n; i++)
            text[i] = (char)pl_rng_next(&rng);
        pl_kv_canon c, whole;
        pl_kv_canon_init(&c, 77, chunk, got, cap);
        for (size_t at = 0, step; at < n; at += step) {
            step = 1 + pl_rng_below(&rng, pl_rng_below(&rng, 2) ? 10 : 700);
            step = step < n - at ? step : n - at;
            pl_kv_canon_put(&c, text + at, step);
        }
        assert_int_equal(c.bytes, n);
        assert_int_equal(c.n, want < cap ? want : cap);
        for (size_t i = 0; i < want; i++) {
            uint64_t alone = XXH3_64bits(text + i * chunk, chunk);
            if (chunk == PL_CHUNK_BYTES)
                alone = pl_chunk_chain(0, text + i * chunk, 1, NULL, 0);
            chain = pl_kv_canon_link(chain, alone);
            if (i < c.n)
                assert_true(got[i] == chain);
        }
        pl_kv_canon_init(&whole, 77, chunk, NULL, 0);
        pl_kv_canon_put(&whole, text, n);
        assert_true(pl_kv_canon_digest(&whole) == pl_kv_canon_digest(&c));
        free(text);
    }
}

/* Texts that differ in a bit, or in the order of their 16 bytes, or are moved along, have other
 * hashes, and about half of a hash's bits are others. */
static void chunks_differ(void **state)
{
    (void)state;
    enum { BITS = PL_CHUNK_BYTES * 8 };
    static const char *const texts[] = {"", "the same word and ", "0"};
    for (size_t t = 0; t < sizeof texts / sizeof texts[0]; t++) {
        char text[PL_CHUNK_BYTES] = {0};
        size_t n = strlen(texts[t]);
        for (size_t i = 0; n && i < sizeof text; i++)
            text[i] = texts[t][i % n];
        uint64_t seen[BITS + 1];
        size_t flips = 0;
        seen[BITS] = pl_chunk_chain(0, text, 1, NULL, 0);
        for (size_t i = 0; i < BITS; i++) {
            text[i / 8] ^= (char)(1 << i % 8);
            seen[i] = pl_chunk_chain(0, text, 1, NULL, 0);
            text[i / 8] ^= (char)(1 << i % 8);
            flips += (size_t)__builtin_popcountll(seen[i] ^ seen[BITS]);
            assert_true(seen[i] != seen[BITS]);
            for (size_t k = 0; k < i; k++)
                assert_true(seen[i] != seen[k]);
        }
        assert_true(flips > BITS * 31 && flips < BITS * 33);
    }
    char text[PL_CHUNK_BYTES], other[PL_CHUNK_BYTES];
    for (size_t i = 0; i < sizeof text; i++)
        text[i] = (char)('0' + i / 16);
    uint64_t own = pl_chunk_chain(0, text, 1, NULL, 0);
    for (size_t i = 0; i < 8; i++)
        for (size_t k = 0; k < i; k++) {
            memcpy(other, text, sizeof other);
            memcpy(other + 16 * i, text + 16 * k, 16);
            memcpy(other + 16 * k, text + 16 * i, 16);
            assert_true(pl_chunk_chain(0, other, 1, NULL, 0) != own);
        }
    uint64_t keys[1];
    char twice[2 * PL_CHUNK_BYTES];
    memcpy(twice, text, sizeof text);
    memcpy(twice + sizeof text, text, sizeof text);
    uint64_t last = pl_chunk_chain(5, twice, 2, keys, 1);
    assert_true(keys[0] == pl_chunk_chain(5, text, 1, NULL, 0));
    assert_true(last == pl_chunk_chain(keys[0], text, 1, NULL, 0));
}

/* Long strings are stepped over by what the scan has seen of them, which must change nothing: the
 * stream beside one without a scan's help, with more long strings than are noted. */
static void known_strings_change_nothing(void **state)
{
    (void)state;
    pl_rng rng = {8};
    for (int round = 0; round < 40; round++) {
        pl_buf b = {0};
        assert_int_equal(pl_buf_addf(&b, "{\"messages\":["), 0);
        uint32_t messages = 1 + pl_rng_below(&rng, round % 4 ? 12 : 200);
        for (uint32_t i = 0; i < messages; i++) {
            static const char *const shapes[] = {
                "\"content\":\"%s\"", "\"content\":[{\"type\":\"text\",\"text\":\"%s\"}]",
                "\"content\":[{\"type\":\"tool_use\",\"input\":{\"k\":[\"%s\",\"\"]}},\"x\"]",
                "\"a\":[\"short\"],\"tool_calls\":[{\"function\":{\"arguments\":\"%s\"}}]",
                "\"content\":[{\"image_url\":{\"url\":\"data:%s\"}},\"%s\"]"};
            char text[900];
            size_t n = 200 + pl_rng_below(&rng, 600);
            for (size_t k = 0; k < n; k++)
                text[k] = (char)('a' + pl_rng_below(&rng, 26));
            if (pl_rng_below(&rng, 2))
                memcpy(text + pl_rng_below(&rng, (uint32_t)n - 2), "\\\"", 2);
            text[n] = 0;
            const char *shape = shapes[pl_rng_below(&rng, 5)];
            const char *at = strstr(shape, "%s"), *second = strstr(at + 2, "%s");
            assert_int_equal(pl_buf_addf(&b, "%s{\"role\":\"user\",%.*s%s", i ? "," : "",
                                         (int)(at - shape), shape, text),
                             0);
            if (second)
                assert_int_equal(pl_buf_addf(&b, "%.*s%s", (int)(second - at - 2), at + 2, text),
                                 0);
            assert_int_equal(pl_buf_addf(&b, "%s}", second ? second + 2 : at + 2), 0);
        }
        assert_int_equal(pl_buf_addf(&b, "]}"), 0);
        pl_scan scan;
        assert_int_equal(pl_scan_body(pl_buf_str(&b), 100, &scan), 0);
        pl_kv_canon with, without;
        pl_kv_canon_init(&with, 1, PL_KV_CANON_CHUNK, NULL, 0);
        pl_kv_canon_init(&without, 1, PL_KV_CANON_CHUNK, NULL, 0);
        pl_keys_canonical(&scan, SIZE_MAX, &with);
        assert_true(with.scan == &scan && scan.longs_n > 0);
        scan.longs_n = 0;
        pl_keys_canonical(&scan, SIZE_MAX, &without);
        assert_int_equal(with.bytes, without.bytes);
        assert_true(pl_kv_canon_digest(&with) == pl_kv_canon_digest(&without));
        pl_buf_free(&b);
    }
}

static void strings_like_unescaped(void **state)
{
    (void)state;
    static const char *const pieces[] = {
        "a",       "plain text", "\\n",     "\\\"",     "\\\\", "\\u0041",       "\\ud83d\\ude00",
        "\\ud83d", "\\udc00",    "\\u00e9", "\xc3\xa9", "\\/",  "\\uD83D\\uDE00"};
    pl_rng rng = {6};
    for (int round = 0; round < 5000; round++) {
        char raw[400] = "\"", *plain = NULL;
        for (uint32_t n = pl_rng_below(&rng, 20); n > 0; n--)
            strcat(raw, pieces[pl_rng_below(&rng, sizeof pieces / sizeof pieces[0])]);
        strcat(raw, "\"");
        pl_str all = pl_str_c(raw);
        plain = malloc(all.n);
        assert_non_null(plain);
        size_t n = pl_json_unescape((pl_str){raw + 1, all.n - 2}, plain);
        pl_kv_canon a, b;
        pl_kv_canon_init(&a, 0, 64, NULL, 0);
        pl_kv_canon_init(&b, 0, 64, NULL, 0);
        pl_kv_canon_put(&a, plain, n);
        pl_kv_canon_string(&b, all, strchr(raw, '\\') != NULL);
        if (pl_kv_canon_digest(&a) != pl_kv_canon_digest(&b))
            fail_msg("not as unescaped: %s", raw);
        free(plain);
    }
}

/* --- odd shapes --- */

static void odd_shapes(void **state)
{
    (void)state;
    static const char *const bodies[] = {
        "{\"messages\":1}",
        "{\"messages\":{}}",
        "{\"messages\":\"hello\"}",
        "{\"messages\":[1,null,\"x\",[],{},[[[]]]]}",
        "{\"messages\":[{\"role\":{},\"content\":{\"a\":[1,2,{\"b\":null}]}}]}",
        "{\"messages\":[{\"role\":null,\"name\":[],\"content\":[null,1,[2],{\"type\":\"text\"}]}]}",
        "{\"messages\":[{\"content\":[{\"type\":\"text\",\"text\":1},{\"text\":\"x\"}]}]}",
        "{\"prompt\":null}",
        "{\"prompt\":{}}",
        "{\"prompt\":[]}",
        "{\"prompt\":[[]]}",
        "{\"prompt\":[[[1]]]}",
        "{\"prompt\":[\"a\",1]}",
        "{\"prompt\":[1,\"a\"]}",
        "{\"prompt\":[-1,2]}",
        "{\"input\":{}}",
        "{\"input_ids\":\"1,2,3\"}",
        "{\"nvext\":{\"token_data\":{}}}",
        "{\"nvext\":[],\"tools\":1,\"system\":[[]],\"prompt\":3}",
        "{\"tools\":[{\"cache_control\":null},{\"a\":{\"cache_control\":[{}]},\"b\":\"}\"}]}",
        "{\"documents\":[\"x\"],\"query\":\"y\"}",
    };
    for (size_t i = 0; i < sizeof bodies / sizeof bodies[0]; i++) {
        pl_keys k = keys(bodies[i]);
        assert_true(k.n == 0); /* too short for any, and no failure */
    }
    pl_keys many = keys("{\"messages\":[{\"a\":1,\"b\":1,\"c\":1,\"d\":1,\"e\":1,\"f\":1,\"g\":1,"
                        "\"h\":1,\"i\":1,\"j\":1,\"k\":1,\"l\":1,\"m\":1,\"n\":1,\"o\":1,\"p\":1,"
                        "\"q\":1,\"r\":1,\"s\":1,\"t\":1}]}");
    assert_int_equal(many.bytes, 1 + 20 * 4);
}

/* Any JSON in any of the members: within bounds, the same twice, and never a failure. */
static void random_shapes(void **state)
{
    (void)state;
    static const char *const members[] = {"messages", "tools", "system",    "prompt",   "input",
                                          "text",     "nvext", "input_ids", "documents"};
    pl_keys_space s = space_of(PL_STR("m"), PL_STR(""), PL_STR(""));
    pl_rng rng = {9};
    for (int round = 0; round < 3000; round++) {
        pl_buf b = {0};
        assert_int_equal(pl_buf_add(&b, "{", 1), 0);
        for (int k = 0, any = 0; k < 9; k++)
            if (pl_rng_below(&rng, 3) == 0) {
                assert_int_equal(pl_buf_addf(&b, "%s\"%s\":", any++ ? "," : "", members[k]), 0);
                random_value(&rng, &b, 4);
            }
        assert_int_equal(pl_buf_add(&b, "}", 1), 0);
        char *exact = malloc(b.n);
        assert_non_null(exact);
        memcpy(exact, b.p, b.n);
        pl_scan scan;
        if (pl_scan_body((pl_str){exact, b.n}, 100, &scan) == 0) {
            pl_keys one, two;
            assert_int_equal(pl_keys_of_request(&s, &scan, &arena, &one), 0);
            assert_int_equal(pl_keys_of_request(&s, &scan, &arena, &two), 0);
            assert_int_equal(one.n, two.n);
            assert_int_equal(shared(one, two), one.n);
        }
        free(exact);
        pl_buf_free(&b);
        pl_arena_reset(&arena);
    }
}

/* --- tokens and units --- */

static void tokens_of_units(void **state)
{
    (void)state;
    pl_keys k = {.kind = PL_KEYS_TEXT, .n = 78, .bytes = 10000, .unit = 128};
    assert_true(pl_keys_tokens(&k, 0, 2000) == 0);
    assert_true(pl_keys_tokens(&k, 78, 2500) == 78 * 128 / 4.0);
    assert_int_equal(pl_keys_held(&k, 78, 2480, 2500), 78); /* as predicted */
    assert_int_equal(pl_keys_held(&k, 78, 2200, 2500), 78); /* within what bytes can say */
    assert_int_equal(pl_keys_held(&k, 78, 1600, 2500), 50);
    assert_int_equal(pl_keys_held(&k, 78, 0, 2500), 0);
    assert_int_equal(pl_keys_held(&k, 10, 2500, 2500), 78); /* more than predicted */
    assert_int_equal(pl_keys_held(&k, 0, 0, 2500), 78);
    assert_int_equal(pl_keys_held(&k, 78, 0, 0), 78); /* nothing is known */
    k = (pl_keys){.kind = PL_KEYS_TOKENS, .n = 100, .unit = 16};
    assert_true(pl_keys_tokens(&k, 50, 1605) == 800);
    assert_int_equal(pl_keys_held(&k, 50, 784, 1605), 100);
    assert_int_equal(pl_keys_held(&k, 50, 783, 1605), 48);
    k = (pl_keys){.kind = PL_KEYS_NONE};
    assert_true(pl_keys_tokens(&k, 0, 10) == 0);
    assert_int_equal(pl_keys_held(&k, 0, 5, 10), 0);
}

/* Pages of one token: the index is asked token by token, what was routed by groups of 16, of which
 * the last one counts only when it is full. */
static void pages_of_one_token(void **state)
{
    (void)state;
    enum { MOST = 100 };
    pl_rng rng = {.state = 3};
    for (int round = 0; round < 2000; round++) {
        const bool eagle = round % 2;
        pl_keys_space s;
        assert_int_equal(pl_keys_space_init(&s, PL_STR("m"), 1, eagle, PL_STR(""), PL_STR(""), 0),
                         0);
        uint32_t t[2][MOST];
        size_t n[2] = {1 + pl_rng_below(&rng, MOST), 1 + pl_rng_below(&rng, MOST)};
        size_t same = pl_rng_below(&rng, (uint32_t)(n[0] < n[1] ? n[0] : n[1]) + 1);
        for (uint32_t i = 0; i < MOST; i++) {
            t[0][i] = pl_rng_below(&rng, 4);
            t[1][i] = i < same ? t[0][i] : i == same ? 9 : pl_rng_below(&rng, 4);
        }
        pl_keys k[2];
        for (int i = 0; i < 2; i++) {
            assert_int_equal(pl_keys_of_tokens(&s, t[i], n[i], &arena, &k[i]), 0);
            assert_int_equal(k[i].local_n, n[i] - eagle);
            assert_int_equal(k[i].n, (n[i] - eagle) / PL_KEYS_GROUP);
            assert_true(pl_keys_tokens(&k[i], k[i].n, (double)n[i]) == 16.0 * (double)k[i].n);
        }
        /* a window of two tokens ends where its second one differs */
        size_t blocks = same > eagle ? same - eagle : 0, equal = 0;
        while (equal < k[0].local_n && equal < k[1].local_n &&
               k[0].local[equal] == k[1].local[equal])
            equal++;
        assert_int_equal(equal, blocks);
        assert_int_equal(shared(k[0], k[1]), blocks / PL_KEYS_GROUP);
        pl_arena_reset(&arena);
    }
    /* longer than can be looked at */
    pl_keys_space s;
    pl_keys k;
    const size_t many = PL_KEYS_ONES + 5;
    uint32_t *t = calloc(many, sizeof *t);
    assert_non_null(t);
    assert_int_equal(pl_keys_space_init(&s, PL_STR("m"), 1, true, PL_STR(""), PL_STR(""), 0), 0);
    assert_int_equal(pl_keys_of_tokens(&s, t, many, &arena, &k), 0);
    assert_int_equal(k.local_n, PL_KEYS_ONES);
    assert_int_equal(k.n, PL_KEYS_ONES / PL_KEYS_GROUP);
    assert_int_equal(k.tokens_n, many);
    free(t);
}

static void spaces_out_of_bounds(void **state)
{
    (void)state;
    pl_keys_space s;
    pl_str no = PL_STR("");
    assert_int_equal(pl_keys_space_init(&s, no, 0, false, no, no, 0), PL_EINVALID);
    assert_int_equal(pl_keys_space_init(&s, no, 16, false, no, no, 63), PL_ELIMIT);
    assert_int_equal(pl_keys_space_init(&s, no, 16, false, no, no, 4097), PL_ELIMIT);
    assert_int_equal(pl_keys_space_init(&s, no, 16, false, no, no, 0), 0);
    assert_int_equal(s.chunk_bytes, PL_KV_CANON_CHUNK);
}

static int tear_down(void **state)
{
    (void)state;
    pl_arena_free(&arena);
    arena = (pl_arena)PL_ARENA_INIT;
    return 0;
}

#define TEST(f) cmocka_unit_test_teardown(f, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(where_ids_are),
        TEST(ids_up_to_the_first_bad_one),
        TEST(ids_like_strtoul),
        TEST(equal_conversations),
        TEST(different_conversations),
        TEST(a_conversation_goes_on),
        TEST(a_change_in_the_middle),
        TEST(images),
        TEST(chunks_like_one_by_one),
        TEST(chunks_differ),
        TEST(known_strings_change_nothing),
        TEST(strings_like_unescaped),
        TEST(odd_shapes),
        TEST(random_shapes),
        TEST(tokens_of_units),
        TEST(pages_of_one_token),
        TEST(spaces_out_of_bounds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
