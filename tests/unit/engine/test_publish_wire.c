/* KV events of the simulated engine as bytes: the vectors of the engines' wire, and each shape's
 * members. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "engine/publish_wire.h"

/* A name whose first and last 8 bytes are these numbers. */
static pl_sim_kv_name name_of(uint64_t first, uint64_t last)
{
    pl_sim_kv_name n = {{0}};
    for (int i = 0; i < 8; i++) {
        n.b[i] = (uint8_t)(first >> (56 - 8 * i));
        n.b[24 + i] = (uint8_t)(last >> (56 - 8 * i));
    }
    return n;
}

static void assert_hex(const pl_buf *b, const char *want)
{
    char got[2048];
    assert_true(b->n * 2 < sizeof got);
    for (size_t i = 0; i < b->n; i++)
        snprintf(got + 2 * i, 3, "%02x", (unsigned char)b->p[i]);
    assert_string_equal(got, want);
}

static const uint32_t tokens[] = {1, 2, 3, 4, 70000, 4294967295u, 7, 8};

static void test_vllm_arrays(void **state)
{
    pl_wire w = {.format = PL_WIRE_VLLM_ARRAY};
    pl_sim_kv_name n = name_of(1, 15760518052499183552u);
    pl_sim_kv_run run = {.names = &n, .n = 1, .block_tokens = 4, .tokens = tokens};
    pl_buf b = {0};
    assert_int_equal(pl_wire_head(&b, 1.5, 1), 0);
    assert_int_equal(pl_wire_stored(&b, &w, &run), 0);
    assert_int_equal(pl_wire_tail(&b, 0), 0);
    assert_hex(
        &b, "93cb3ff80000000000009198ab426c6f636b53746f72656491cfdab89baa7b5857c0c0940102030404c0"
            "a3475055c000");
    assert_int_equal(pl_wire_number(&w, &n), 15760518052499183552u);
    /* the name as bytes */
    w.byte_hashes = true;
    memset(n.b, 1, sizeof n.b);
    b.n = 0;
    assert_int_equal(pl_wire_head(&b, 1.5, 1), 0);
    assert_int_equal(pl_wire_removed(&b, &w, &run), 0);
    assert_int_equal(pl_wire_tail(&b, 0), 0);
    assert_hex(
        &b, "93cb3ff80000000000009193ac426c6f636b52656d6f76656491c4200101010101010101010101010101"
            "010101010101010101010101010101010101a347505500");
    pl_buf_free(&b);
}

static void test_vllm_maps(void **state)
{
    pl_wire w = {.format = PL_WIRE_VLLM_MAP};
    pl_sim_kv_name n = name_of(0, 5);
    pl_sim_kv_run run = {.names = &n, .n = 1, .block_tokens = 4, .tokens = tokens};
    pl_buf b = {0};
    assert_int_equal(pl_wire_head(&b, 1.5, 2), 0);
    assert_int_equal(pl_wire_removed(&b, &w, &run), 0);
    assert_int_equal(pl_wire_cleared(&b, &w), 0);
    assert_int_equal(pl_wire_tail(&b, 1), 0);
    assert_hex(
        &b, "93cb3ff80000000000009283a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865"
            "739105a66d656469756da347505581a474797065b0416c6c426c6f636b73436c656172656401");
    /* {"type":"BlockStored","block_hashes":[5,6],"parent_block_hash":7,
     * "token_ids":[1,2,3,4,70000,4294967295,7,8],"block_size":4,"lora_id":nil,"medium":"GPU",
     * "lora_name":nil,"extra_keys":[nil,nil],"group_idx":0,"kv_cache_spec_kind":"full_attention"}
     */
    pl_sim_kv_name two[] = {n, name_of(0, 6)}, parent = name_of(0, 7);
    run.names = two;
    run.n = 2;
    run.parent = &parent;
    b.n = 0;
    assert_int_equal(pl_wire_stored(&b, &w, &run), 0);
    assert_hex(
        &b, "8ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920506b1706172656e745f"
            "626c6f636b5f6861736807a9746f6b656e5f6964739801020304ce00011170ceffffffff0708aa626c6f"
            "636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa6578"
            "7472615f6b65797392c0c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae"
            "66756c6c5f617474656e74696f6e");
    pl_buf_free(&b);
}

/* ["BlockStored",[-3488128144981237669],-1,[1,2,3,4],4,nil,"GPU"] and the like */
static void test_sglang(void **state)
{
    pl_wire w = {.format = PL_WIRE_SGLANG, .byte_hashes = true /* it has none */};
    pl_sim_kv_name n = name_of((uint64_t)-3488128144981237669, 5), parent = name_of(UINT64_MAX, 5);
    pl_sim_kv_run run = {
        .parent = &parent, .names = &n, .n = 1, .block_tokens = 4, .tokens = tokens};
    pl_buf b = {0};
    assert_int_equal(pl_wire_stored(&b, &w, &run), 0);
    assert_hex(&b, "97ab426c6f636b53746f72656491d3cf97adeedb59e05bff940102030404c0a3475055");
    assert_int_equal((int64_t)pl_wire_number(&w, &n), -3488128144981237669);
    b.n = 0;
    assert_int_equal(pl_wire_removed(&b, &w, &run), 0);
    assert_hex(&b, "93ac426c6f636b52656d6f76656491d3cf97adeedb59e05ba3475055");
    b.n = 0;
    assert_int_equal(pl_wire_cleared(&b, &w), 0);
    assert_hex(&b, "91b0416c6c426c6f636b73436c6561726564");
    pl_buf_free(&b);
}

static void test_formats_by_name(void **state)
{
    for (int i = 0; i < PL_WIRE_BY_KIND; i++) {
        pl_wire_format f = PL_WIRE_BY_KIND;
        assert_true(pl_wire_parse(pl_wire_name((pl_wire_format)i), &f));
        assert_int_equal(f, i);
    }
    pl_wire_format f = PL_WIRE_BY_KIND;
    assert_false(pl_wire_parse("vllm", &f));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_vllm_arrays),
        cmocka_unit_test(test_vllm_maps),
        cmocka_unit_test(test_sglang),
        cmocka_unit_test(test_formats_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
