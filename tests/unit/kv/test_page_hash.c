/* SGLang's page hashes: its goldens, the definition spelt out beside them for any input, bounds,
 * what hashing allocates, and memory running out. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "kv/page_hash.h"

/* What libcrypto allocates in this program: counted, and refused on demand. */
static long allocations, live, left = -1;

static bool refuse(void)
{
    if (left > 0)
        left--;
    else if (left == 0)
        return true;
    return false;
}

static void *counting_malloc(size_t n, const char *file, int line)
{
    (void)file;
    (void)line;
    if (refuse())
        return NULL;
    allocations++;
    live++;
    return malloc(n);
}

static void *counting_realloc(void *p, size_t n, const char *file, int line)
{
    (void)file;
    (void)line;
    if (refuse())
        return NULL;
    allocations++;
    live += p == NULL;
    return realloc(p, n);
}

static void counting_free(void *p, const char *file, int line)
{
    (void)file;
    (void)line;
    live -= p != NULL;
    free(p);
}

static pl_page_hasher *hasher;

static int open_hasher(void **state)
{
    (void)state;
    hasher = pl_page_hasher_new();
    return hasher ? 0 : -1;
}

static int close_hasher(void **state)
{
    (void)state;
    pl_page_hasher_free(hasher);
    return 0;
}

static void goldens(void **state)
{
    (void)state;
    static const struct {
        uint32_t tokens[5];
        size_t n;
        uint32_t page;
        const char *key;
        bool bigram;
        size_t pages;
        int64_t want[2];
    } v[] = {
        {{1, 2, 3, 4}, 4, 4, NULL, false, 1, {-3488128144981237669}},
        {{1, 2, 3, 4}, 4, 4, "", false, 1, {-1934027550307904538}},
        {{1, 2, 3, 4}, 4, 4, "salt-B", false, 1, {-3770730224180675262}},
        {{1, 2, 3, 4, 5}, 5, 4, "salt-A", false, 2, {1848708812856982025, -844459331919182630}},
        {{10, 20, 30, 40}, 4, 4, NULL, true, 1, {-2735951481331064195}},
        {{10, 20, 30, 40, 50}, 5, 2, NULL, true, 2, {-8847804484166691499, 4989791362144317498}},
        {{10, 20, 30, 40, 50},
         5,
         2,
         "salt-A",
         true,
         2,
         {-3307084293699386976, -4477231418096748271}},
    };
    for (size_t i = 0; i < sizeof v / sizeof *v; i++) {
        pl_str key = pl_str_c(v[i].key);
        pl_page_space s = {
            .page_tokens = v[i].page, .bigram = v[i].bigram, .extra_key = v[i].key ? &key : NULL};
        int64_t out[2];
        assert_int_equal(pl_page_count(&s, v[i].n), v[i].pages);
        assert_int_equal(pl_page_hash(hasher, &s, NULL, v[i].tokens, v[i].n, out, 2, NULL),
                         v[i].pages);
        for (size_t k = 0; k < v[i].pages; k++)
            assert_true(out[k] == v[i].want[k]);
    }
}

/* One page by the definition, byte for byte, through libcrypto's one-shot entry. */
static void naive_page(const pl_page_space *s, const uint8_t *parent, const uint32_t *tokens,
                       size_t units, uint8_t digest[PL_PAGE_DIGEST])
{
    size_t room = 4 + (s->extra_key ? s->extra_key->n : 0) + PL_PAGE_DIGEST + units * 8, n = 0;
    uint8_t *bytes = malloc(room);
    assert_non_null(bytes);
    if (s->extra_key) {
        for (int shift = 0; shift < 32; shift += 8)
            bytes[n++] = (uint8_t)(s->extra_key->n >> shift);
        if (s->extra_key->n)
            memcpy(bytes + n, s->extra_key->p, s->extra_key->n);
        n += s->extra_key->n;
    }
    if (parent) {
        memcpy(bytes + n, parent, PL_PAGE_DIGEST);
        n += PL_PAGE_DIGEST;
    }
    for (size_t i = 0; i < units; i++)
        for (size_t k = 0; k < (s->bigram ? 2 : 1); k++)
            for (int shift = 0; shift < 32; shift += 8)
                bytes[n++] = (uint8_t)(tokens[i + k] >> shift);
    assert_int_equal(EVP_Digest(bytes, n, digest, NULL, EVP_sha256(), NULL), 1);
    free(bytes);
}

static int64_t on_the_wire(const uint8_t *digest)
{
    uint64_t h = 0;
    for (int i = 0; i < 8; i++)
        h = h << 8 | digest[i];
    return (int64_t)h;
}

static void pages_follow_the_definition(void **state)
{
    (void)state;
    pl_rng rng = {.state = 1};
    static char key_bytes[3000];
    memset(key_bytes, 'k', sizeof key_bytes);
    for (int round = 0; round < 600; round++) {
        pl_str key = {key_bytes, pl_rng_below(&rng, 2) ? pl_rng_below(&rng, 3000) : 0};
        pl_page_space s = {.page_tokens = 1 + pl_rng_below(&rng, round % 3 ? 20 : 600),
                           .bigram = pl_rng_below(&rng, 2),
                           .extra_key = pl_rng_below(&rng, 2) ? &key : NULL};
        size_t n = pl_rng_below(&rng, s.page_tokens * 6);
        uint32_t *t = malloc(n ? n * sizeof *t : 1);
        assert_non_null(t);
        for (size_t i = 0; i < n; i++)
            t[i] = (uint32_t)pl_rng_next(&rng);
        int64_t out[8];
        uint8_t last[PL_PAGE_DIGEST], digest[PL_PAGE_DIGEST];
        int64_t count = pl_page_hash(hasher, &s, NULL, t, n, out, 8, last);
        assert_int_equal(count, pl_page_count(&s, n));
        size_t units = s.bigram && n ? n - 1 : n, done = 0;
        for (int64_t i = 0; i < count; i++) {
            size_t take = units - done < s.page_tokens ? units - done : s.page_tokens;
            naive_page(&s, i ? digest : NULL, t + done, take, digest);
            assert_true(out[i] == on_the_wire(digest));
            done += take;
        }
        assert_int_equal(done, units);
        if (count)
            assert_memory_equal(last, digest, sizeof last);
        free(t);
    }
}

/* Hashing a prompt in two calls is hashing it in one; bigrams need the token after the cut. */
static void hashing_continues_from_a_full_page(void **state)
{
    (void)state;
    uint32_t tokens[100];
    for (uint32_t i = 0; i < 100; i++)
        tokens[i] = i * 7919;
    pl_str key = PL_STR("tenant");
    for (int bigram = 0; bigram < 2; bigram++)
        for (size_t cut = 1; cut < 12; cut++) {
            pl_page_space s = {.page_tokens = 8, .bigram = bigram, .extra_key = &key};
            int64_t whole[13], parts[13];
            uint8_t digest[PL_PAGE_DIGEST], at_end[PL_PAGE_DIGEST];
            int64_t n = pl_page_hash(hasher, &s, NULL, tokens, 100, whole, 13, at_end);
            assert_int_equal(n, 13);
            size_t first = cut * 8 + (size_t)bigram;
            assert_int_equal(pl_page_hash(hasher, &s, NULL, tokens, first, parts, 13, digest), cut);
            assert_int_equal(pl_page_hash(hasher, &s, digest, tokens + cut * 8, 100 - cut * 8,
                                          parts + cut, 13 - cut, digest),
                             13 - cut);
            assert_memory_equal(parts, whole, sizeof whole);
            assert_memory_equal(digest, at_end, sizeof digest);
        }
}

static void nothing_to_hash(void **state)
{
    (void)state;
    const uint32_t token = 5;
    int64_t out = 7;
    uint8_t last[PL_PAGE_DIGEST] = {9};
    for (int bigram = 0; bigram < 2; bigram++) {
        pl_page_space s = {.page_tokens = 4, .bigram = bigram};
        assert_int_equal(pl_page_hash(hasher, &s, NULL, NULL, 0, &out, 0, last), 0);
        assert_int_equal(pl_page_count(&s, 1), bigram ? 0 : 1);
    }
    pl_page_space s = {.page_tokens = 4, .bigram = true};
    assert_int_equal(pl_page_hash(hasher, &s, NULL, &token, 1, &out, 1, last), 0);
    assert_true(out == 7 && last[0] == 9);
}

static void sizes_are_bounded(void **state)
{
    (void)state;
    const uint32_t tokens[9] = {0};
    int64_t out[3] = {7, 7, 7};
    pl_page_space s = {.page_tokens = 0};
    assert_int_equal(pl_page_count(&s, 9), 0);
    assert_int_equal(pl_page_hash(hasher, &s, NULL, tokens, 9, out, 3, NULL), PL_EINVALID);
    s.page_tokens = PL_PAGE_TOKENS_MAX + 1;
    assert_int_equal(pl_page_hash(hasher, &s, NULL, tokens, 9, out, 3, NULL), PL_ELIMIT);
    s.page_tokens = 4;
    assert_int_equal(pl_page_hash(hasher, &s, NULL, tokens, 9, out, 2, NULL), PL_ELIMIT);
    pl_str key = {"", PL_PAGE_KEY_MAX + 1};
    s.extra_key = &key;
    assert_int_equal(pl_page_hash(hasher, &s, NULL, tokens, 9, out, 3, NULL), PL_ELIMIT);
    assert_true(out[0] == 7 && out[1] == 7 && out[2] == 7);
    s.extra_key = NULL;
    assert_int_equal(pl_page_hash(hasher, &s, NULL, tokens, 9, out, 3, NULL), 3);
    assert_int_equal(pl_page_count(&s, SIZE_MAX), SIZE_MAX / 4 + 1);
}

/* OpenSSL 3.0 renews its state once a page; more than that would be ours. */
static void hashing_allocates_no_more_than_libcrypto_must(void **state)
{
    (void)state;
    static uint32_t tokens[4096];
    static int64_t out[4096];
    assert_true(allocations > 0); /* libcrypto did take the counting functions */
    pl_page_space s = {.page_tokens = 1};
    assert_int_equal(pl_page_hash(hasher, &s, NULL, tokens, 1, out, 4096, NULL), 1);
    long settled = live;
    static const uint32_t sizes[] = {1, 16, 64, 4096};
    for (int i = 0; i < 4; i++) {
        s = (pl_page_space){.page_tokens = sizes[i], .bigram = i & 1};
        long before = allocations;
        int64_t count = pl_page_hash(hasher, &s, NULL, tokens, 4096, out, 4096, NULL);
        assert_true(count > 0);
        assert_true(allocations - before <= count);
        assert_int_equal(live, settled);
    }
}

static void memory_running_out_is_an_error_and_no_more(void **state)
{
    (void)state;
    const uint32_t tokens[4] = {1, 2, 3, 4};
    const pl_page_space s = {.page_tokens = 4};
    int64_t out = 0;
    int failures = 0;
    for (long n = 0; n < 100; n++) {
        left = n;
        pl_page_hasher *h = pl_page_hasher_new();
        int64_t count = h ? pl_page_hash(h, &s, NULL, tokens, 4, &out, 1, NULL) : PL_ENOMEM;
        left = -1;
        if (count != 1) {
            failures++;
            assert_int_equal(count, PL_ENOMEM);
            if (h)
                assert_int_equal(pl_page_hash(h, &s, NULL, tokens, 4, &out, 1, NULL), 1);
        }
        if (h)
            assert_true(out == -3488128144981237669);
        pl_page_hasher_free(h);
        if (count == 1)
            break;
    }
    assert_in_range(failures, 1, 99);
    pl_page_hasher_free(NULL);
}

int main(void)
{
    /* Only before libcrypto has allocated anything. */
    if (CRYPTO_set_mem_functions(counting_malloc, counting_realloc, counting_free) != 1)
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(goldens),
        cmocka_unit_test(pages_follow_the_definition),
        cmocka_unit_test(hashing_continues_from_a_full_page),
        cmocka_unit_test(nothing_to_hash),
        cmocka_unit_test(sizes_are_bounded),
        cmocka_unit_test(hashing_allocates_no_more_than_libcrypto_must),
        cmocka_unit_test(memory_running_out_is_an_error_and_no_more),
    };
    return cmocka_run_group_tests(tests, open_hasher, close_hasher);
}
