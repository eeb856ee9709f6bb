/* Events into the real index: what a worker published is what a prompt's hashes find, in the space
 * of its model, adapter and salt, until it is removed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kv/apply.h"
#include "kv/block_hash.h"
#include "kv/index.h"
#include "pack.h"

#define NONE PL_STR("")

typedef struct fixture {
    pl_index *ix;
    pl_index_reader *reader;
    pl_apply *a;
    pl_apply_rank ranks[2];
    pl_apply_target t;
    pl_buf p;
} fixture;

static void begin(fixture *x)
{
    const pl_index_options o = {.max_bytes = 64 << 20};
    memset(x, 0, sizeof *x);
    assert_int_equal(pl_index_new(&o, &x->ix), 0);
    x->reader = pl_index_reader_new(x->ix);
    assert_non_null(x->reader);
    assert_int_equal(pl_apply_new(x->ix, NULL, &x->a), 0);
    for (int i = 0; i < 2; i++)
        x->ranks[i] = (pl_apply_rank){.slot = 10 + i, .group = -1};
    x->t = (pl_apply_target){PL_STR("m"), 4, x->ranks, 2};
}

static void end(fixture *x)
{
    pl_apply_free(x->a);
    pl_index_reader_free(x->reader);
    pl_index_free(x->ix);
    pl_buf_free(&x->p);
}

static void send(fixture *x)
{
    pl_applied what;
    assert_int_equal(pl_apply_batch(x->a, &x->t, 0, x->p.p, x->p.n, &what), 0);
    x->p.n = 0;
}

/* How many blocks of the prompt 1, 2, ..., n the slot has in `tier` or nearer. */
static uint32_t matched(fixture *x, int slot, pl_tier tier, size_t n, bool eagle, pl_str lora,
                        pl_str salt)
{
    uint32_t tokens[64];
    uint64_t local[16];
    pl_match m[4];
    pl_block_space s;
    for (size_t i = 0; i < n; i++)
        tokens[i] = (uint32_t)i + 1;
    pl_index_space id = pl_index_space_find(x->ix, PL_STR("m"), 4, eagle, lora, salt);
    assert_int_equal(pl_block_space_init(&s, 4, eagle, lora, salt), 0);
    int64_t blocks = pl_block_hash(&s, tokens, n, local, NULL, 16);
    if (id == 0)
        return 0;
    int found = pl_index_match(x->reader, id, local, (size_t)blocks, m, 4);
    for (int i = 0; i < found; i++)
        if (m[i].slot == slot)
            return m[i].blocks[tier];
    return 0;
}

static void a_prompt_finds_what_was_published(void **state)
{
    (void)state;
    fixture x;
    begin(&x);
    pack(&x.p,
         "[0,[['BlockStored',[11,12],n,#,4,n,'GPU'],['BlockStored',[13],12,#,4,n,'CPU_PINNED']],1]",
         8, 1, 4, 9);
    /* behind a block that lies in another tier: it is the worker's prefix all the same */
    send(&x);
    assert_int_equal(matched(&x, 11, PL_TIER_DEVICE, 16, false, NONE, NONE), 2);
    assert_int_equal(matched(&x, 11, PL_TIER_HOST, 16, false, NONE, NONE), 3);
    assert_int_equal(matched(&x, 10, PL_TIER_HOST, 16, false, NONE, NONE), 0);
    assert_int_equal(matched(&x, 11, PL_TIER_HOST, 16, false, PL_STR("l"), NONE), 0);
    assert_int_equal(matched(&x, 11, PL_TIER_HOST, 16, false, NONE, PL_STR("s")), 0);
    assert_int_equal(x.ranks[1].counts.stored, 3);
    pack(&x.p, "[0,[['BlockRemoved',[12]]],1]");
    send(&x);
    assert_int_equal(matched(&x, 11, PL_TIER_DEVICE, 16, false, NONE, NONE), 1);
    pack(&x.p, "[0,[['AllBlocksCleared']],1]");
    send(&x);
    assert_int_equal(matched(&x, 11, PL_TIER_EXTERNAL, 16, false, NONE, NONE), 0);
    end(&x);
}

static void names_and_eagle_are_spaces_of_their_own(void **state)
{
    (void)state;
    fixture x;
    begin(&x);
    pack(&x.p,
         "[0,[['BlockStored',[1],n,#,4,n,'GPU',{'cache_salt':'s'}],"
         "['BlockStored',[2],n,#,4,3,'GPU','l'],"
         "['BlockStored',[3],n,[[1,2],[2,3],[3,4],[4,5]],4]],0]",
         4, 1, 4, 1);
    send(&x);
    assert_int_equal(matched(&x, 10, PL_TIER_DEVICE, 8, false, NONE, PL_STR("s")), 1);
    assert_int_equal(matched(&x, 10, PL_TIER_DEVICE, 8, false, PL_STR("l"), NONE), 1);
    assert_int_equal(matched(&x, 10, PL_TIER_DEVICE, 8, true, NONE, NONE), 1);
    assert_int_equal(matched(&x, 10, PL_TIER_DEVICE, 8, false, NONE, NONE), 0);
    /* vLLM names the salt with the first block only; the index alone does not tell where its
     * parent is, so the block behind it is refused rather than put where no salt would find it */
    pack(&x.p, "[0,[['BlockStored',[4],1,#,4]],0]", 4, 5);
    send(&x);
    assert_int_equal(x.ranks[0].counts.unknown_parents, 1);
    assert_int_equal(matched(&x, 10, PL_TIER_DEVICE, 8, false, NONE, PL_STR("s")), 1);
    end(&x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_prompt_finds_what_was_published),
        cmocka_unit_test(names_and_eagle_are_spaces_of_their_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
