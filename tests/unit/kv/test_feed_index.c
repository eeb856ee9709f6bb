/* Events into the real index: what a worker published is what a prompt's hashes find, under its
 * model, adapter and salt, until it is removed or a snapshot does not name it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "kv/apply.h"
#include "kv/block_hash.h"
#include "kv/index.h"
#include "kv/known.h"
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
    const pl_known known = pl_known_of(x->ix);
    assert_int_equal(pl_apply_new(x->ix, &known, &x->a), 0);
    for (int i = 0; i < 2; i++)
        x->ranks[i] = (pl_apply_rank){.slot = 10 + i, .group = -1};
    x->t =
        (pl_apply_target){.model = PL_STR("m"), .block_tokens = 4, .ranks = x->ranks, .ranks_n = 2};
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
    pl_index_space id = pl_index_space_find(x->ix, PL_STR("m"), 4, eagle, lora);
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
    end(&x);
}

static void a_salted_chain_of_vllm_goes_on_with_its_salt(void **state)
{
    (void)state;
    const pl_str salt = PL_STR("s"), lora = PL_STR("l");
    fixture x;
    begin(&x);
    /* the salt comes with a prompt's first block only, here behind an adapter's name */
    pack(&x.p,
         "[0,[{'type':'BlockStored','block_hashes':[1],'token_ids':#,'block_size':4,"
         "'lora_name':'l','extra_keys':[['l','s']]},"
         "{'type':'BlockStored','block_hashes':[2,3],'parent_block_hash':1,'token_ids':#,"
         "'block_size':4,'lora_name':'l','extra_keys':[['l'],['l']]}],0]",
         4, 1, 8, 5);
    send(&x);
    pack(&x.p,
         "[0,[{'type':'BlockStored','block_hashes':[4],'parent_block_hash':3,'token_ids':#,"
         "'block_size':4,'lora_name':'l','extra_keys':[['l']]}],0]",
         4, 13);
    send(&x);
    assert_int_equal(matched(&x, 10, PL_TIER_DEVICE, 16, false, lora, salt), 4);
    assert_int_equal(matched(&x, 10, PL_TIER_DEVICE, 16, false, lora, NONE), 0);
    assert_int_equal(x.ranks[0].counts.unknown_parents, 0);
    assert_int_equal(x.ranks[0].counts.stored, 4);
    /* behind a block that is not there any more nothing can be placed */
    pack(&x.p,
         "[0,[['BlockRemoved',[4]],"
         "{'type':'BlockStored','block_hashes':[5],'parent_block_hash':4,'token_ids':#,"
         "'block_size':4,'lora_name':'l'}],0]",
         4, 17);
    send(&x);
    assert_int_equal(x.ranks[0].counts.unknown_parents, 1);
    assert_int_equal(matched(&x, 10, PL_TIER_DEVICE, 20, false, lora, salt), 3);
    end(&x);
}

static const char *salt_of(int i)
{
    static char text[32];
    snprintf(text, sizeof text, "request-%d", i);
    return text;
}

/* vLLM's two stores of a prompt of 8 tokens, which all salts share. Names: base, base + 1. */
static void publish_salted(fixture *x, const char *salt, int64_t base)
{
    pack(&x->p,
         "[0,[{'type':'BlockStored','block_hashes':[i],'token_ids':#,'block_size':4,"
         "'extra_keys':[[s]]},{'type':'BlockStored','block_hashes':[i],'parent_block_hash':i,"
         "'token_ids':#,'block_size':4}],0]",
         base, 4, 1, salt, base + 1, base, 4, 5);
    send(x);
}

static uint32_t salted(fixture *x, const char *salt)
{
    return matched(x, 10, PL_TIER_DEVICE, 8, false, NONE, pl_str_c(salt));
}

/* Clients choose the salts: one for each request costs what its blocks do, for as long as the
 * engine has them. */
static void salts_without_end_leave_nothing_behind(void **state)
{
    (void)state;
    fixture x;
    pl_index_stats st;
    uint64_t bytes = 0;
    enum { SALTS = 200000 };
    begin(&x);
    publish_salted(&x, "mine", 1);
    for (int i = 0; i < SALTS; i++) {
        publish_salted(&x, salt_of(i), 100 + 2 * (int64_t)i);
        if (i % 10000 == 9999) { /* this one, the last one that is gone, that of somebody else */
            assert_int_equal(salted(&x, salt_of(i)), 2);
            assert_int_equal(salted(&x, salt_of(i - 200)), 0);
            assert_int_equal(salted(&x, "mine"), 2);
            assert_int_equal(salted(&x, ""), 0);
        }
        if (i >= 100) { /* the engine evicts */
            pack(&x.p, "[0,[['BlockRemoved',[i,i]]],0]", 100 + 2 * (int64_t)(i - 100),
                 101 + 2 * (int64_t)(i - 100));
            send(&x);
        }
        while (i % 1000 == 999 && pl_index_maintain(x.ix))
            ;
        pl_index_stats_of(x.ix, &st);
        if (i == 9999)
            bytes = st.bytes;
    }
    assert_int_equal(x.ranks[0].counts.refused, 0);
    assert_int_equal(x.ranks[0].counts.unknown_parents, 0);
    assert_int_equal(x.ranks[0].counts.stored, 2 * (SALTS + 1));
    assert_int_equal(st.spaces, 1);
    assert_true(st.bytes <= bytes + 4096);
    /* none of them has taken the place of an adapter that comes later */
    pack(&x.p, "[0,[['BlockStored',[7],n,#,4,3,'GPU','late']],1]", 4, 1);
    send(&x);
    assert_int_equal(matched(&x, 11, PL_TIER_DEVICE, 8, false, PL_STR("late"), NONE), 1);
    end(&x);
}

/* The engine never drops them: the index's cap holds, and who is asked for stays. */
static void salts_above_the_cap_push_out_nobody_who_is_asked_for(void **state)
{
    (void)state;
    const pl_index_options o = {.max_bytes = 4 << 20};
    fixture x;
    pl_index_stats st;
    begin(&x);
    pl_apply_free(x.a);
    pl_index_reader_free(x.reader);
    pl_index_free(x.ix);
    assert_int_equal(pl_index_new(&o, &x.ix), 0);
    x.reader = pl_index_reader_new(x.ix);
    const pl_known known = pl_known_of(x.ix);
    assert_int_equal(pl_apply_new(x.ix, &known, &x.a), 0);
    publish_salted(&x, "mine", 1);
    for (int i = 0; i < 200000; i++) {
        publish_salted(&x, salt_of(i), 100 + 2 * (int64_t)i);
        if (i % 100 == 0)
            assert_int_equal(salted(&x, "mine"), 2);
    }
    pl_index_stats_of(x.ix, &st);
    assert_true(st.evicted > 0 && st.bytes <= o.max_bytes);
    assert_int_equal(salted(&x, salt_of(199999)), 2);
    end(&x);
}

static void a_store_without_tokens_puts_known_blocks_into_its_tier(void **state)
{
    (void)state;
    fixture x;
    begin(&x);
    /* off-loaded: the copy is announced without tokens, then the first block leaves the device */
    pack(&x.p,
         "[0,[['BlockStored',[11,12,13],n,#,4,n,'GPU'],"
         "{'type':'BlockStored','block_hashes':[11,12,99],'token_ids':[],'block_size':0,"
         "'medium':'CPU'},['BlockRemoved',[11,12],'GPU']],0]",
         12, 1);
    send(&x);
    assert_int_equal(x.ranks[0].counts.copied, 2);
    assert_int_equal(x.ranks[0].counts.unresolved, 1);
    assert_int_equal(matched(&x, 10, PL_TIER_DEVICE, 16, false, NONE, NONE), 0);
    assert_int_equal(matched(&x, 10, PL_TIER_HOST, 16, false, NONE, NONE), 3);
    /* loaded again: its tokens are known from the host's copy */
    pack(&x.p, "[0,[{'type':'BlockStored','block_hashes':[11],'token_ids':[],'block_size':0,"
               "'medium':'GPU'},['BlockRemoved',[11],'CPU'],['BlockRemoved',[12],'CPU']],0]");
    send(&x);
    assert_int_equal(matched(&x, 10, PL_TIER_DEVICE, 16, false, NONE, NONE), 1);
    assert_int_equal(matched(&x, 10, PL_TIER_HOST, 16, false, NONE, NONE), 1);
    assert_int_equal(x.ranks[0].counts.removed_unknown, 0);
    end(&x);
}

static void a_snapshot_confirms_what_it_names_and_drops_the_rest(void **state)
{
    (void)state;
    fixture x;
    size_t dropped;
    begin(&x);
    pack(&x.p,
         "[0,[['BlockStored',[11,12,13],n,#,4,n,'GPU'],['BlockStored',[11,12],n,#,4,n,'GPU'],"
         "['BlockStored',[13],12,#,4,n,'CPU_PINNED'],['BlockStored',[14],13,#,4,n,'GPU']],0]",
         12, 1, 8, 1, 4, 9, 4, 13);
    send(&x);
    pack(&x.p, "[0,[['BlockStored',[11],n,#,4,n,'GPU']],1]", 4, 1); /* another rank's */
    send(&x);
    uint64_t all[] = {14, 13, 77, 12, 11}; /* 77: stored in a batch that was missed */
    assert_int_equal(pl_apply_keep(x.a, &x.ranks[0], all, 5, &dropped), 0);
    assert_int_equal(dropped, 0);
    assert_int_equal(matched(&x, 10, PL_TIER_DEVICE, 16, false, NONE, NONE), 4);
    uint64_t some[] = {14, 12, 11};
    assert_int_equal(pl_apply_keep(x.a, &x.ranks[0], some, 3, &dropped), 0);
    assert_int_equal(dropped, 2); /* 13 was in two tiers */
    assert_int_equal(matched(&x, 10, PL_TIER_EXTERNAL, 16, false, NONE, NONE), 2);
    /* what is stored again fills the hole, and the block behind it was confirmed */
    pack(&x.p, "[0,[['BlockStored',[13],12,#,4,n,'GPU']],0]", 4, 9);
    send(&x);
    assert_int_equal(matched(&x, 10, PL_TIER_DEVICE, 16, false, NONE, NONE), 4);
    /* of two copies a missed removal may have taken one: a snapshot leaves one */
    pack(&x.p, "[0,[['BlockRemoved',[12]]],0]");
    send(&x);
    assert_int_equal(matched(&x, 10, PL_TIER_DEVICE, 16, false, NONE, NONE), 1);
    assert_int_equal(pl_apply_keep(x.a, &x.ranks[0], NULL, 0, &dropped), 0);
    assert_int_equal(dropped, 3);
    assert_int_equal(matched(&x, 10, PL_TIER_DEVICE, 16, false, NONE, NONE), 0);
    assert_int_equal(matched(&x, 11, PL_TIER_DEVICE, 16, false, NONE, NONE), 1);
    end(&x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_prompt_finds_what_was_published),
        cmocka_unit_test(names_and_eagle_are_spaces_of_their_own),
        cmocka_unit_test(a_salted_chain_of_vllm_goes_on_with_its_salt),
        cmocka_unit_test(salts_without_end_leave_nothing_behind),
        cmocka_unit_test(salts_above_the_cap_push_out_nobody_who_is_asked_for),
        cmocka_unit_test(a_store_without_tokens_puts_known_blocks_into_its_tier),
        cmocka_unit_test(a_snapshot_confirms_what_it_names_and_drops_the_rest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
