/* Block hashes: the published vectors, and what must hold for any input: every window is XXH3 of
 * its bytes, prefixes share hashes, a tail has none, nothing is written beyond the count. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/err.h"
#include "base/rng.h"
#include "kv/block_hash.h"
#include "kv/chunk_hash.h"

#define NONE PL_STR("")

static pl_block_space space(uint32_t block_tokens, bool eagle, pl_str lora, pl_str salt)
{
    pl_block_space s;
    assert_int_equal(pl_block_space_init(&s, block_tokens, eagle, lora, salt), 0);
    return s;
}

/* Token ids 1, 2, ... */
static void count_up(uint32_t *tokens, size_t n)
{
    for (size_t i = 0; i < n; i++)
        tokens[i] = (uint32_t)i + 1;
}

/* A heap copy of exactly n tokens, so that a sanitizer sees a read past them. */
static uint32_t *random_tokens(pl_rng *rng, size_t n)
{
    uint32_t *t = malloc(n ? n * sizeof *t : 1);
    assert_non_null(t);
    for (size_t i = 0; i < n; i++)
        t[i] = (uint32_t)pl_rng_next(rng);
    return t;
}

static void published_vectors(void **state)
{
    (void)state;
    static const struct {
        pl_str lora, salt;
        uint64_t seed, local[3], seq[3];
    } v[] = {
        {PL_STR_INIT(""),
         PL_STR_INIT(""),
         0x539,
         {0xea06fc71a5ee6e88, 0x1fbf39bd106be0b5, 0xa8562fe663b7a097},
         {0xea06fc71a5ee6e88, 0xad01835a37dd294c, 0x0d55e56c2bccbd1a}},
        {PL_STR_INIT("my-lora"),
         PL_STR_INIT(""),
         0xb2041cc45cbcfedd,
         {0x3990f1b14309d7e6, 0x27c809c22da91b94, 0xe0ee5d0e535bfbf1},
         {0x3990f1b14309d7e6, 0x6cf1d86294264b7a, 0x8ce387e541fed699}},
        {PL_STR_INIT(""),
         PL_STR_INIT("tenant-a"),
         0x1b095b6229544fb6,
         {0x71742dfed90682a9, 0xb7db648aa3dfb040, 0x27ea5f8baebff2fd},
         {0x71742dfed90682a9, 0x10a55acc122317d5, 0x7ba34a181b94b878}},
        {PL_STR_INIT("my-lora"),
         PL_STR_INIT("tenant-a"),
         0xcd0d78268611495a,
         {0x12ed440cccc38cf3, 0x9db0a52cbd130133, 0xde036775f15cf586},
         {0x12ed440cccc38cf3, 0x5a006d5753bfda88, 0x00bc8e8e43298ff5}},
    };
    uint32_t tokens[48];
    count_up(tokens, 48);
    for (size_t i = 0; i < sizeof v / sizeof *v; i++) {
        pl_block_space s = space(16, false, v[i].lora, v[i].salt);
        assert_true(s.seed == v[i].seed);
        uint64_t local[3], seq[3];
        assert_int_equal(pl_block_hash(&s, tokens, 48, local, seq, 3), 3);
        assert_memory_equal(local, v[i].local, sizeof local);
        assert_memory_equal(seq, v[i].seq, sizeof seq);
        assert_int_equal(pl_block_hash_mm(&s, tokens, 48, NULL, 0, local, seq, 3), 3);
        assert_memory_equal(local, v[i].local, sizeof local);
        assert_memory_equal(seq, v[i].seq, sizeof seq);
    }
}

static void published_multimodal_vector(void **state)
{
    (void)state;
    uint32_t tokens[48];
    count_up(tokens, 48);
    pl_block_space s = space(16, false, NONE, NONE);
    const pl_block_mm mm = {.block = 0, .hash = 0x1122334455667788};
    uint64_t local[3], seq[3];
    assert_int_equal(pl_block_hash_mm(&s, tokens, 48, &mm, 1, local, seq, 3), 3);
    assert_true(local[0] == 0xfced5a525b15dae4);
    assert_true(seq[0] == local[0]);
    /* Blocks without an object keep their local hash; their prefix is another one. */
    assert_true(local[1] == 0x1fbf39bd106be0b5 && local[2] == 0xa8562fe663b7a097);
    assert_true(seq[1] != 0xad01835a37dd294c && seq[2] != 0x0d55e56c2bccbd1a);
}

static void published_eagle_vector(void **state)
{
    (void)state;
    uint32_t tokens[48];
    count_up(tokens, 48);
    pl_block_space s = space(16, true, NONE, NONE);
    uint64_t local[3];
    assert_int_equal(pl_block_hash(&s, tokens, 17, local, NULL, 3), 1);
    assert_true(local[0] == 0x5db5a9903451d2d0);
    assert_int_equal(pl_block_hash(&s, tokens, 48, local, NULL, 3), 2);
    assert_true(local[0] == 0x5db5a9903451d2d0);
}

static void tails_have_no_hash(void **state)
{
    (void)state;
    uint32_t tokens[64];
    count_up(tokens, 64);
    for (int eagle = 0; eagle < 2; eagle++)
        for (size_t n = 0; n <= 64; n++) {
            pl_block_space s = space(16, eagle, NONE, NONE);
            size_t want = eagle ? (n ? (n - 1) / 16 : 0) : n / 16;
            assert_int_equal(pl_block_count(&s, n), want);
            uint64_t local[5] = {7, 7, 7, 7, 7}, seq[5] = {7, 7, 7, 7, 7};
            assert_int_equal(pl_block_hash(&s, tokens, n, local, seq, 5), want);
            for (size_t i = 0; i < 5; i++)
                assert_true((local[i] == 7) == (i >= want) && (seq[i] == 7) == (i >= want));
        }
}

static void sizes_are_bounded(void **state)
{
    (void)state;
    pl_block_space s;
    assert_int_equal(pl_block_space_init(&s, 0, false, NONE, NONE), PL_EINVALID);
    assert_int_equal(pl_block_space_init(&s, PL_BLOCK_TOKENS_MAX + 1, false, NONE, NONE),
                     PL_ELIMIT);
    assert_int_equal(pl_block_space_init(&s, UINT32_MAX, true, NONE, NONE), PL_ELIMIT);
    s = space(16, false, NONE, NONE);
    uint32_t tokens[48];
    count_up(tokens, 48);
    uint64_t local[3] = {7, 7, 7}, seq[3] = {7, 7, 7};
    assert_int_equal(pl_block_hash(&s, tokens, 48, local, seq, 2), PL_ELIMIT);
    assert_int_equal(pl_block_hash_mm(&s, tokens, 48, NULL, 0, local, seq, 2), PL_ELIMIT);
    for (int i = 0; i < 3; i++)
        assert_true(local[i] == 7 && seq[i] == 7);
    assert_int_equal(pl_block_hash(&s, tokens, 48, NULL, NULL, 3), 3);
    assert_int_equal(pl_block_hash(&s, NULL, 0, local, seq, 0), 0);
    s = space(PL_BLOCK_TOKENS_MAX, true, NONE, NONE);
    assert_int_equal(pl_block_count(&s, PL_BLOCK_TOKENS_MAX), 0);
    assert_int_equal(pl_block_count(&s, PL_BLOCK_TOKENS_MAX + 1), 1);
    assert_int_equal(pl_block_count(&s, SIZE_MAX), SIZE_MAX / PL_BLOCK_TOKENS_MAX);
}

/* Against the library's own entry, at every branch that it takes by length, seeds included. */
static void every_window_is_xxh3_of_its_bytes(void **state)
{
    (void)state;
    static const uint32_t sizes[] = {1,  2,  3,  4,  5,  8,  15, 16,  17,  31,   32,
                                     33, 59, 60, 61, 63, 64, 65, 128, 512, 1024, 3000};
    pl_rng rng = {.state = 1};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
        for (int kind = 0; kind < 4; kind++) {
            bool eagle = kind & 1;
            pl_block_space s = space(sizes[k], eagle, kind & 2 ? PL_STR("a-lora") : NONE, NONE);
            size_t n = sizes[k] * 3 + pl_rng_below(&rng, sizes[k]);
            uint32_t *t = random_tokens(&rng, n);
            size_t count = pl_block_count(&s, n);
            uint64_t local[4], seq[4], only_seq[4], mm_local[4], chained = 0;
            assert_in_range(count, eagle ? 2 : 3, 3);
            assert_int_equal(pl_block_hash(&s, t, n, local, seq, 4), count);
            assert_int_equal(pl_block_hash(&s, t, n, NULL, only_seq, 4), count);
            assert_int_equal(pl_block_hash_mm(&s, t, n, NULL, 0, mm_local, NULL, 4), count);
            for (size_t i = 0; i < count; i++) {
                uint64_t want = XXH3_64bits_withSeed(t + i * sizes[k],
                                                     (sizes[k] + (eagle ? 1 : 0)) * 4, s.seed);
                assert_true(local[i] == want && mm_local[i] == want);
                uint64_t pair[2] = {chained, want};
                chained = i ? XXH3_64bits_withSeed(pair, 16, 1337) : want;
                assert_true(seq[i] == chained && only_seq[i] == chained);
            }
            free(t);
        }
}

/* A conversation's next turn has the hashes of the last one, then others. */
static void common_prefixes_share_hashes(void **state)
{
    (void)state;
    pl_rng rng = {.state = 2};
    for (int round = 0; round < 500; round++) {
        bool eagle = round & 1;
        uint32_t block = 1 + pl_rng_below(&rng, 40);
        pl_block_space s = space(block, eagle, NONE, NONE);
        size_t n = block * 8 + (eagle ? 1 : 0), at = pl_rng_below(&rng, (uint32_t)n);
        uint32_t *t = random_tokens(&rng, n);
        uint64_t a_local[8], a[8], b_local[8], b[8];
        assert_int_equal(pl_block_hash(&s, t, n, a_local, a, 8), 8);
        t[at] ^= 1u << pl_rng_below(&rng, 32);
        assert_int_equal(pl_block_hash(&s, t, n, b_local, b, 8), 8);
        for (size_t i = 0; i < 8; i++) {
            size_t from = i * block, to = from + block + (eagle ? 1 : 0);
            assert_true((a_local[i] == b_local[i]) == (at < from || at >= to));
            assert_true((a[i] == b[i]) == (at >= to));
        }
        free(t);
    }
}

static void a_chain_continues_from_any_parent(void **state)
{
    (void)state;
    pl_rng rng = {.state = 3};
    pl_block_space s = space(16, false, NONE, PL_STR("salt"));
    uint32_t *t = random_tokens(&rng, 160);
    uint64_t local[10], seq[10], again[10];
    assert_int_equal(pl_block_hash(&s, t, 160, local, seq, 10), 10);
    for (size_t cut = 0; cut <= 10; cut++) {
        memset(again, 0, sizeof again);
        pl_block_chain(NULL, local, cut, again);
        pl_block_chain(cut ? &again[cut - 1] : NULL, local + cut, 10 - cut, again + cut);
        assert_memory_equal(again, seq, sizeof seq);
    }
    memcpy(again, local, sizeof again);
    pl_block_chain(NULL, again, 10, again);
    assert_memory_equal(again, seq, sizeof seq);
    free(t);
}

static void linked_keys_are_links_of_local_hashes(void **state)
{
    (void)state;
    static const uint32_t sizes[] = {2, 16, 32, 64};
    pl_rng rng = {.state = 9};
    for (size_t i = 0; i < 2 * sizeof sizes / sizeof *sizes; i++)
        for (size_t blocks = 0; blocks < 40; blocks += 13) {
            pl_block_space s = space(sizes[i / 2], i % 2, NONE, PL_STR("salt"));
            size_t n = blocks * s.block_tokens + i % 2;
            uint32_t *t = random_tokens(&rng, n);
            uint64_t local[40], linked[40], key[40], chain = pl_rng_next(&rng), first = chain;
            assert_int_equal(pl_block_hash(&s, t, n, local, NULL, 40), (int64_t)blocks);
            pl_block_hash_linked(&s, t, blocks, linked, first, key);
            for (size_t k = 0; k < blocks; k++) {
                chain = pl_kv_canon_link(chain, local[k]);
                assert_int_equal(linked[k], local[k]);
                assert_int_equal(key[k], chain);
            }
            free(t);
        }
}

static void namespaces_do_not_meet(void **state)
{
    (void)state;
    uint32_t tokens[16];
    count_up(tokens, 16);
    const pl_block_space s[] = {
        space(16, false, NONE, NONE),        space(16, false, PL_STR("x"), NONE),
        space(16, false, NONE, PL_STR("x")), space(16, false, PL_STR("x"), PL_STR("x")),
        space(16, false, PL_STR("y"), NONE), space(15, true, NONE, PL_STR("y")),
    };
    uint64_t h[6];
    for (int i = 0; i < 6; i++) {
        assert_int_equal(pl_block_hash(&s[i], tokens, 16, &h[i], NULL, 1), 1);
        for (int k = 0; k < i; k++)
            assert_true(h[k] != h[i]);
    }
}

/* The definition, spelt out: the window's bytes, then the sorted hashes of its objects. */
static uint64_t naive_mm(const pl_block_space *s, const uint32_t *window, const pl_block_mm *mm,
                         size_t n, uint64_t block)
{
    uint8_t bytes[4096];
    size_t at = s->window_tokens * sizeof *window;
    memcpy(bytes, window, at);
    uint64_t floor = 0;
    for (bool more = true; more;) {
        uint64_t least = UINT64_MAX;
        size_t times = 0;
        for (size_t i = 0; i < n; i++)
            if (mm[i].block == block && mm[i].hash >= floor && mm[i].hash <= least) {
                times = mm[i].hash < least ? 1 : times + 1;
                least = mm[i].hash;
            }
        for (size_t i = 0; i < times; i++, at += sizeof least)
            memcpy(bytes + at, &least, sizeof least);
        more = times > 0 && least != UINT64_MAX;
        floor = least + 1;
    }
    return XXH3_64bits_withSeed(bytes, at, s->seed);
}

static void objects_are_mixed_in_sorted(void **state)
{
    (void)state;
    pl_rng rng = {.state = 4};
    for (int round = 0; round < 1000; round++) {
        uint32_t block = 1 + pl_rng_below(&rng, 80);
        pl_block_space s = space(block, round & 1, NONE, round & 2 ? PL_STR("tenant") : NONE);
        uint32_t *t = random_tokens(&rng, block * 5);
        size_t count = pl_block_count(&s, block * 5), mm_n = pl_rng_below(&rng, 30);
        pl_block_mm mm[30];
        for (size_t i = 0; i < mm_n; i++) {
            mm[i].block = pl_rng_below(&rng, 7); /* some behind the last block */
            mm[i].hash = pl_rng_below(&rng, 4) ? pl_rng_next(&rng) : 5; /* some equal */
        }
        pl_block_mm_sort(mm, mm_n);
        uint64_t local[5], seq[5], chained[5];
        assert_int_equal(pl_block_hash_mm(&s, t, block * 5, mm, mm_n, local, seq, 5), count);
        for (size_t i = 0; i < count; i++)
            assert_true(local[i] == naive_mm(&s, t + i * block, mm, mm_n, i));
        pl_block_chain(NULL, local, count, chained);
        assert_memory_equal(seq, chained, count * sizeof *seq);
        free(t);
    }
}

static int compare_mm(const void *a, const void *b)
{
    const pl_block_mm *x = a, *y = b;
    if (x->block != y->block)
        return x->block < y->block ? -1 : 1;
    return x->hash < y->hash ? -1 : x->hash > y->hash;
}

static void sorting_sorts(void **state)
{
    (void)state;
    pl_rng rng = {.state = 5};
    for (size_t n = 0; n < 200; n++) {
        pl_block_mm a[200], b[200];
        for (size_t i = 0; i < n; i++)
            a[i] = b[i] = (pl_block_mm){.block = pl_rng_below(&rng, 9), .hash = pl_rng_next(&rng)};
        pl_block_mm_sort(a, n);
        qsort(b, n, sizeof *b, compare_mm);
        assert_memory_equal(a, b, n * sizeof *a);
    }
}

static void unsorted_objects_are_refused(void **state)
{
    (void)state;
    uint32_t tokens[32];
    count_up(tokens, 32);
    pl_block_space s = space(16, false, NONE, NONE);
    uint64_t local[2] = {7, 7}, seq[2] = {7, 7};
    const pl_block_mm by_block[] = {{1, 1}, {0, 2}}, by_hash[] = {{1, 2}, {1, 1}};
    assert_int_equal(pl_block_hash_mm(&s, tokens, 32, by_block, 2, local, seq, 2), PL_EINVALID);
    assert_int_equal(pl_block_hash_mm(&s, tokens, 32, by_hash, 2, local, seq, 2), PL_EINVALID);
    assert_true(local[0] == 7 && local[1] == 7 && seq[0] == 7 && seq[1] == 7);
}

static void object_ids(void **state)
{
    (void)state;
    uint64_t h;
    assert_int_equal(
        pl_mm_hash(PL_STR("0123456789abcdef00112233445566778899aabbccddeefffedcba9876543210"), &h),
        0);
    assert_true(h == 0x0123456789abcdef);
    assert_int_equal(
        pl_mm_hash(PL_STR("ABCDEF0123456789000000000000000000000000000000000000000000000000"), &h),
        0);
    assert_true(h == 0xabcdef0123456789);
    static const char *const others[] = {
        "image.png", "0123456789abcdef",
        "0123456789abcdef00112233445566778899aabbccddeefffedcba987654321",
        "0123456789abcdef00112233445566778899aabbccddeefffedcba987654321g",
        "0123456789abcdef00112233445566778899aabbccddeefffedcba98765432100"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        assert_int_equal(pl_mm_hash(pl_str_c(others[i]), &h), 0);
        assert_true(h == XXH3_64bits(others[i], strlen(others[i])));
    }
    assert_int_equal(pl_mm_hash(NONE, &h), PL_EINVALID);
    assert_int_equal(pl_mm_pad_token(0), 1000000);
    assert_int_equal(pl_mm_pad_token(0xffffffffc0000005), 1000005);
    assert_int_equal(pl_mm_pad_token(UINT64_MAX), 1000000 + (1 << 30) - 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_vectors),
        cmocka_unit_test(published_multimodal_vector),
        cmocka_unit_test(published_eagle_vector),
        cmocka_unit_test(tails_have_no_hash),
        cmocka_unit_test(sizes_are_bounded),
        cmocka_unit_test(every_window_is_xxh3_of_its_bytes),
        cmocka_unit_test(common_prefixes_share_hashes),
        cmocka_unit_test(a_chain_continues_from_any_parent),
        cmocka_unit_test(linked_keys_are_links_of_local_hashes),
        cmocka_unit_test(namespaces_do_not_meet),
        cmocka_unit_test(objects_are_mixed_in_sorted),
        cmocka_unit_test(sorting_sorts),
        cmocka_unit_test(unsorted_objects_are_refused),
        cmocka_unit_test(object_ids),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
