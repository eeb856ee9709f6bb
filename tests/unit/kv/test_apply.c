/* Batches into the index: right worker, tier, space and local hashes, and a count for everything
 * that is not indexed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "kv/block_hash.h"
#include "index_double.h"
#include "pack.h"

#define NONE PL_STR("")

typedef struct fixture {
    pl_apply *a;
    pl_apply_rank ranks[3];
    pl_apply_target t;
    pl_buf p;
    pl_applied what;
} fixture;

static void begin(fixture *x, uint32_t block_tokens, int ranks, bool known)
{
    memset(x, 0, sizeof *x);
    double_reset();
    assert_int_equal(pl_apply_new(NULL, known ? &double_known : NULL, &x->a), 0);
    for (int i = 0; i < 3; i++)
        x->ranks[i] = (pl_apply_rank){.slot = i, .group = -1};
    x->t = (pl_apply_target){
        .model = PL_STR("m"), .block_tokens = block_tokens, .ranks = x->ranks, .ranks_n = ranks};
}

static void end(fixture *x)
{
    pl_apply_free(x->a);
    pl_buf_free(&x->p);
}

/* Sends what was packed as the batch of rank 0's stream. */
static void send(fixture *x)
{
    assert_int_equal(pl_apply_batch(x->a, &x->t, 0, x->p.p, x->p.n, &x->what), 0);
    x->p.n = 0;
}

static uint64_t local_of(uint32_t block_tokens, bool eagle, pl_str lora, pl_str salt,
                         const uint32_t *tokens, size_t n, size_t block)
{
    pl_block_space s;
    uint64_t local[64];
    assert_int_equal(pl_block_space_init(&s, block_tokens, eagle, lora, salt), 0);
    assert_true(pl_block_hash(&s, tokens, n, local, NULL, 64) > (int64_t)block);
    return local[block];
}

static void a_store_is_found_by_the_prompts_hashes(void **state)
{
    (void)state;
    fixture x;
    begin(&x, 4, 1, true);
    pack(&x.p, "[f,[['BlockStored',[11,12],n,#,4,n,'GPU'],['BlockStored',[13],12,#,4]],0]", 5.0, 8,
         1, 4, 9);
    send(&x);
    uint32_t tokens[12];
    for (uint32_t i = 0; i < 12; i++)
        tokens[i] = i + 1;
    for (uint64_t i = 0; i < 3; i++) {
        double_entry e = double_get(0, 11 + i);
        assert_true(e.local == local_of(4, false, NONE, NONE, tokens, 12, i));
        assert_string_equal(double_space(e.space), "m/4/");
        assert_true(e.copies[PL_TIER_DEVICE] == 1);
        assert_int_equal(e.parent, i ? 10 + i : 0);
    }
    assert_int_equal(x.ranks[0].counts.stored, 3);
    assert_int_equal(x.ranks[0].counts.batches, 1);
    assert_true(x.what.ts == 5.0);
    /* copies are the index's to count */
    pack(&x.p, "[f,[['BlockStored',[13],12,#,4],['BlockRemoved',[13,99]]],0]", 5.0, 4, 9);
    send(&x);
    assert_true(double_has(0, PL_TIER_DEVICE, 13));
    assert_int_equal(x.ranks[0].counts.removed, 1);
    assert_int_equal(x.ranks[0].counts.removed_unknown, 1);
    pack(&x.p, "[f,[['AllBlocksCleared']],0]", 5.0);
    send(&x);
    assert_int_equal(double_count(0), 0);
    assert_true(x.what.emptied);
    end(&x);
}

static void the_batch_says_which_rank(void **state)
{
    (void)state;
    fixture x;
    begin(&x, 1, 3, true);
    pack(&x.p, "[0,[['BlockStored',[1],n,[7],1]],2]");
    send(&x);
    assert_int_equal(double_count(0), 0);
    assert_int_equal(double_count(2), 1);
    pack(&x.p, "[0,[['BlockStored',[1],n,[7],1]]]"); /* does not say: the stream's */
    send(&x);
    assert_int_equal(double_count(0), 1);
    pack(&x.p, "[0,[['AllBlocksCleared']],2]");
    send(&x);
    assert_int_equal(double_count(2), 0);
    assert_int_equal(double_count(0), 1);
    assert_false(x.what.emptied);
    pack(&x.p, "[0,[['BlockStored',[1],n,[7],1]],3]");
    send(&x);
    assert_int_equal(x.ranks[0].counts.unknown_ranks, 1);
    /* an engine with one worker is that worker, also as rank 5 of something larger */
    x.t.ranks_n = 1;
    pack(&x.p, "[0,[['BlockStored',[2],n,[8],1]],5]");
    send(&x);
    assert_int_equal(double_count(0), 2);
    end(&x);
}

static void lora_is_a_space_and_salt_is_in_the_hashes(void **state)
{
    (void)state;
    static const uint32_t tokens[] = {1, 2, 3, 4};
    fixture x;
    begin(&x, 2, 1, true);
    /* SGLang says the salt with each event */
    pack(&x.p, "[0,[['BlockStored',[1],n,[1,2],2,n,'GPU',{'cache_salt':'s'}]],0]");
    send(&x);
    assert_string_equal(double_space(double_get(0, 1).space), "m/2/");
    assert_true(double_get(0, 1).local == local_of(2, false, NONE, PL_STR("s"), tokens, 4, 0));
    /* vLLM with a prompt's first block; what comes behind it is in the same space */
    pack(&x.p, "[0,[{'type':'BlockStored','block_hashes':[21],'token_ids':[1,2],'block_size':2,"
               "'lora_name':'l','extra_keys':[['l','salty']]},"
               "{'type':'BlockStored','block_hashes':[22],'parent_block_hash':21,'token_ids':[3,4],"
               "'block_size':2,'lora_name':'l','extra_keys':[['l']]}],0]");
    send(&x);
    assert_string_equal(double_space(double_get(0, 21).space), "m/2/l");
    assert_string_equal(double_space(double_get(0, 22).space), "m/2/l");
    assert_true(double_get(0, 22).local ==
                local_of(2, false, PL_STR("l"), PL_STR("salty"), tokens, 4, 1));
    /* an adapter that is only numbered cannot be matched by its name, and must not be by none */
    pack(&x.p, "[0,[['BlockStored',[31],n,[1,2],2,4,'GPU']],0]");
    send(&x);
    assert_int_equal(double_get(0, 31).engine, 0);
    assert_int_equal(x.ranks[0].counts.unnamed_lora, 1);
    /* a name without bounds */
    char name[PL_APPLY_NAME_MAX + 2];
    memset(name, 'x', sizeof name);
    name[sizeof name - 1] = 0;
    pack(&x.p, "[0,[['BlockStored',[32],n,[1,2],2,n,'GPU',s]],0]", name);
    send(&x);
    assert_int_equal(x.ranks[0].counts.bad_names, 1);
    end(&x);
}

static void images_set_a_block_apart(void **state)
{
    (void)state;
    static const uint32_t tokens[] = {1, 2, 3, 4};
    fixture x;
    begin(&x, 2, 1, true);
    pack(&x.p, "[0,[{'type':'BlockStored','block_hashes':[1,2],'token_ids':[1,2,3,4],"
               "'block_size':2,'extra_keys':[n,[['cat',1],['dog',0]]]}],0]");
    send(&x);
    uint64_t cat, dog, local[2];
    assert_int_equal(pl_mm_hash(PL_STR("cat"), &cat), 0);
    assert_int_equal(pl_mm_hash(PL_STR("dog"), &dog), 0);
    pl_block_mm mm[] = {{1, cat}, {1, dog}};
    pl_block_space s;
    assert_int_equal(pl_block_space_init(&s, 2, false, NONE, NONE), 0);
    pl_block_mm_sort(mm, 2);
    assert_int_equal(pl_block_hash_mm(&s, tokens, 4, mm, 2, local, NULL, 2), 2);
    assert_true(double_get(0, 1).local == local[0] && double_get(0, 2).local == local[1]);
    /* anything else that the engine hashed in does the same: no hit is better than a false one */
    pack(&x.p,
         "[0,[{'type':'BlockStored','block_hashes':[3],'token_ids':[1,2],'block_size':2,"
         "'extra_keys':[[b]]}],0]",
         "\x01\x02\x03", 3);
    send(&x);
    assert_true(double_get(0, 3).engine && double_get(0, 3).local != local[0]);
    end(&x);
}

static void eagle_pairs_are_windows(void **state)
{
    (void)state;
    static const uint32_t tokens[] = {10, 20, 30, 40, 50};
    fixture x;
    begin(&x, 2, 1, true);
    pack(&x.p, "[0,[['BlockStored',[1,2],n,[[10,20],[20,30],[30,40],[40,50]],2]],0]");
    send(&x);
    assert_string_equal(double_space(double_get(0, 2).space), "m/2/eagle/");
    assert_true(double_get(0, 1).local == local_of(2, true, NONE, NONE, tokens, 5, 0));
    assert_true(double_get(0, 2).local == local_of(2, true, NONE, NONE, tokens, 5, 1));
    pack(&x.p, "[0,[['BlockStored',[5],n,[[10,20],[21,30]],2]],0]");
    send(&x);
    assert_int_equal(x.ranks[0].counts.bad_events, 1);
    assert_int_equal(double_get(0, 5).engine, 0);
    end(&x);
}

/* More blocks than the scratch holds: given on in pieces, each behind the one before. */
static void long_events_are_one_chain(void **state)
{
    (void)state;
    enum { BLOCKS = 2500 };
    for (int eagle = 0; eagle < 2; eagle++) {
        fixture x;
        begin(&x, 3, 1, true);
        uint32_t *tokens = malloc((BLOCKS * 3 + 1) * sizeof *tokens);
        assert_non_null(tokens);
        /* written by hand: pairs are not in the notation */
        assert_int_equal(pl_mp_put_array(&x.p, 2), 0);
        assert_int_equal(pl_mp_put_uint(&x.p, 0), 0);
        assert_int_equal(pl_mp_put_array(&x.p, 1), 0);
        assert_int_equal(pl_mp_put_array(&x.p, 5), 0);
        pack(&x.p, "'BlockStored' # n", BLOCKS, 1000);
        assert_int_equal(pl_mp_put_array(&x.p, BLOCKS * 3), 0);
        for (uint32_t i = 0; i <= BLOCKS * 3; i++)
            tokens[i] = i * 7;
        for (uint32_t i = 0; i < BLOCKS * 3; i++) {
            if (eagle)
                assert_int_equal(pl_mp_put_array(&x.p, 2), 0);
            assert_int_equal(pl_mp_put_uint(&x.p, tokens[i]), 0);
            if (eagle)
                assert_int_equal(pl_mp_put_uint(&x.p, tokens[i + 1]), 0);
        }
        assert_int_equal(pl_mp_put_uint(&x.p, 3), 0);
        send(&x);
        assert_int_equal(x.ranks[0].counts.stored, BLOCKS);
        assert_true(index_double.stores > 1 && index_double.largest_store <= 1024);
        pl_block_space s;
        static uint64_t local[BLOCKS];
        assert_int_equal(pl_block_space_init(&s, 3, eagle, NONE, NONE), 0);
        assert_int_equal(
            pl_block_hash(&s, tokens, BLOCKS * 3 + (eagle ? 1 : 0), local, NULL, BLOCKS), BLOCKS);
        for (uint64_t i = 0; i < BLOCKS; i++) {
            double_entry e = double_get(0, 1000 + i);
            assert_true(e.local == local[i] && e.parent == (i ? 999 + i : 0));
        }
        pack(&x.p, "[0,[['BlockRemoved',#]],0]", BLOCKS, 1000);
        send(&x);
        assert_int_equal(x.ranks[0].counts.removed, BLOCKS);
        assert_int_equal(double_count(0), 0);
        free(tokens);
        end(&x);
    }
}

static void names_without_tokens_are_known_or_counted(void **state)
{
    (void)state;
    fixture x;
    begin(&x, 2, 1, true);
    pack(&x.p, "[0,[['BlockStored',[1,2],n,[1,2,3,4],2],"
               "{'type':'BlockStored','block_hashes':[2,9],'token_ids':[],'block_size':2,"
               "'medium':'CPU'},['BlockRemoved',[2],'GPU']],0]");
    send(&x);
    assert_true(double_has(0, PL_TIER_HOST, 2) && !double_has(0, PL_TIER_DEVICE, 2));
    assert_int_equal(x.ranks[0].counts.copied, 1);
    assert_int_equal(x.ranks[0].counts.unresolved, 1);
    end(&x);
    /* an index that cannot say: counted, not guessed */
    begin(&x, 2, 1, false);
    pack(&x.p, "[0,[['BlockStored',[1],n,[1,2],2],['BlockStored',[1],n,[],2,n,'CPU']],0]");
    send(&x);
    assert_int_equal(x.ranks[0].counts.unresolved, 1);
    end(&x);
}

static void router_events_bring_their_local_hashes(void **state)
{
    (void)state;
    fixture x;
    begin(&x, 16, 2, true);
    pack(&x.p, "[0,[{'storage_tier':'disk','event':{'dp_rank':1,'data':{'stored':{'parent_hash':n,"
               "'blocks':[{'block_hash':5,'tokens_hash':77}]}}}}]]");
    send(&x);
    assert_true(double_get(1, 5).local == 77 && double_has(1, PL_TIER_DISK, 5));
    assert_string_equal(double_space(double_get(1, 5).space), "m/16/");
    end(&x);
    begin(&x, 0, 1, true); /* without a block size their space is not known */
    pack(&x.p,
         "[0,[{'event':{'data':{'stored':{'blocks':[{'block_hash':5,'tokens_hash':77}]}}}}]]");
    send(&x);
    assert_int_equal(x.ranks[0].counts.bad_block_size, 1);
    assert_int_equal(double_count(0), 0);
    end(&x);
}

static void one_dense_group_speaks_for_a_hybrid_model(void **state)
{
    (void)state;
    fixture x;
    begin(&x, 1, 1, true);
    pack(&x.p, "[0,[['BlockStored',[1],n,[1],1,n,'GPU',n,n,0,'sliding_window',128],"
               "['BlockStored',[1],n,[1],1,n,'GPU',n,n,1,'full_attention',n],"
               "['BlockStored',[1],n,[1],1,n,'GPU',n,n,2,'full_attention',n],"
               "['BlockRemoved',[1],'GPU',0],['BlockRemoved',[1],'GPU',2]],0]");
    send(&x);
    assert_int_equal(double_get(0, 1).copies[PL_TIER_DEVICE], 1);
    assert_int_equal(x.ranks[0].counts.sparse, 4);
    pack(&x.p, "[0,[['BlockRemoved',[1],'GPU',1]],0]");
    send(&x);
    assert_int_equal(double_count(0), 0);
    end(&x);
}

static void what_does_not_fit_is_refused_and_counted(void **state)
{
    (void)state;
    fixture x;
    begin(&x, 4, 1, true);
    pl_apply_counts *c = &x.ranks[0].counts;
    pack(&x.p, "[0,[['BlockStored',[1],n,[1,2],2,n,'GPU']," /* a page that is not full */
               "['BlockStored',[2],n,[1,2,3],4],"           /* tokens that do not fill it */
               "['BlockStored',[3],n,[1,2,3,4],0],"
               "['BlockStored',[4],n,[1,2,3,4],-4],"
               "['BlockStored',[5],n,[1,2,3,4],1000000000000],"
               "['BlockStored',[6,7],n,[1,2,3,4],2]," /* another block size */
               "['BlockStored',[8],99,[1,2,3,4],4],"  /* behind nothing */
               "['BlockStored',[9],n,[1,2,3,4],4,n,'TAPE'],"
               "['BlockRemoved',[9],'TAPE'],"
               "['Novelty',1],"
               "['BlockStored',[9],n,['x'],4],"
               "['BlockStored',[],n,[],4],"
               "['BlockStored',[10],n,[1,2,3,4],4]],0]");
    send(&x);
    assert_int_equal(double_count(0), 1);
    assert_int_equal(double_get(0, 10).engine, 10);
    assert_int_equal(c->events, 13);
    assert_int_equal(c->partial, 1);
    assert_int_equal(c->bad_counts, 1);
    assert_int_equal(c->bad_block_size, 4);
    assert_int_equal(c->unknown_parents, 1);
    assert_int_equal(c->unknown_media, 2);
    assert_int_equal(c->unknown_types, 1);
    assert_int_equal(c->bad_events, 1);
    assert_int_equal(c->stored, 1);
    index_double.refuse = PL_ELIMIT;
    pack(&x.p, "[0,[['BlockStored',[20,21],n,#,4]],0]", 8, 1);
    send(&x);
    assert_int_equal(c->refused, 2);
    end(&x);
}

static void the_first_store_says_the_block_size_where_nobody_did(void **state)
{
    (void)state;
    fixture x;
    begin(&x, 0, 1, true);
    pack(&x.p, "[0,[['BlockStored',[1,2],n,#,4],['BlockStored',[3],n,#,8]],0]", 8, 1, 8, 1);
    send(&x);
    assert_int_equal(pl_apply_block_tokens(&x.t), 4);
    assert_int_equal(x.ranks[0].counts.bad_block_size, 1);
    /* a restart may have another one */
    pl_apply_clear(x.a, &x.ranks[0]);
    pack(&x.p, "[0,[['BlockStored',[3],n,#,8],['BlockStored',[4],3,#,8]],0]", 8, 1, 8, 9);
    send(&x);
    assert_int_equal(pl_apply_block_tokens(&x.t), 8);
    assert_int_equal(x.ranks[0].counts.stored, 4);
    end(&x);

    /* one block alone may be a short last page; what is said twice stands */
    begin(&x, 0, 1, true);
    pack(&x.p, "[0,[['BlockStored',[1],99,[1,2],2],['BlockStored',[2],n,#,4]],0]", 4, 1);
    send(&x);
    assert_int_equal(pl_apply_block_tokens(&x.t), 4);
    assert_int_equal(x.ranks[0].counts.stored, 1);
    pack(&x.p, "[0,[['BlockStored',[3],2,#,4],['BlockStored',[4],n,#,8]],0]", 4, 5, 8, 1);
    send(&x);
    assert_int_equal(pl_apply_block_tokens(&x.t), 4);
    assert_int_equal(x.ranks[0].counts.stored, 2);
    assert_int_equal(x.ranks[0].counts.bad_block_size, 1);
    end(&x);
}

/* An adapter for each request: the list of spaces is bounded, and what was open stays usable. */
static void spaces_without_end_are_refused(void **state)
{
    (void)state;
    fixture x;
    begin(&x, 1, 1, true);
    for (int i = 0; i < 200; i++) {
        char lora[16];
        snprintf(lora, sizeof lora, "l%d", i);
        pack(&x.p, "[0,[['BlockStored',[i],n,[1],1,3,'GPU',s]],0]", (int64_t)i + 1, lora);
        send(&x);
    }
    assert_int_equal(x.ranks[0].counts.stored, DOUBLE_SPACES);
    assert_int_equal(x.ranks[0].counts.refused, 200 - DOUBLE_SPACES);
    pack(&x.p, "[0,[['BlockStored',[999],n,[1],1,3,'GPU','l5']],0]");
    send(&x);
    assert_string_equal(double_space(double_get(0, 999).space), "m/1/l5");
    end(&x);
}

/* SGLang says the salt with each event: one that is not the parent's has no place. */
static void a_chain_keeps_its_salt(void **state)
{
    (void)state;
    static const uint32_t tokens[] = {1, 2, 3, 4, 5, 6};
    fixture x;
    begin(&x, 2, 1, true);
    pack(&x.p, "[0,[['BlockStored',[1],n,[1,2],2,n,'GPU',{'cache_salt':'s'}],"
               "['BlockStored',[2],1,[3,4],2,n,'GPU',{'cache_salt':'s'}],"
               "['BlockStored',[3],2,[5,6],2,n,'GPU',{'cache_salt':'t'}]],0]");
    send(&x);
    assert_true(double_get(0, 2).local == local_of(2, false, NONE, PL_STR("s"), tokens, 4, 1));
    assert_int_equal(double_get(0, 3).engine, 0);
    assert_int_equal(x.ranks[0].counts.unknown_parents, 1);
    /* the same behind a parent without one */
    pack(&x.p, "[0,[['BlockStored',[11],n,[1,2],2,n,'GPU'],"
               "['BlockStored',[12],11,[3,4],2,n,'GPU',{'cache_salt':'s'}],"
               "['BlockStored',[13],11,[3,4],2,n,'GPU']],0]");
    send(&x);
    assert_int_equal(double_get(0, 12).engine, 0);
    assert_true(double_get(0, 13).local == local_of(2, false, NONE, NONE, tokens, 4, 1));
    assert_int_equal(x.ranks[0].counts.unknown_parents, 2);
    end(&x);
}

/* An engine that restarts may come back with blocks of another size. */
static void a_size_that_was_learned_is_learned_again(void **state)
{
    (void)state;
    fixture x;
    begin(&x, 0, 1, true);
    pack(&x.p, "[0,[['BlockStored',[1],n,[1,2,3,4],4],['BlockStored',[2],n,[1,2],2]],0]");
    send(&x);
    assert_int_equal(pl_apply_block_tokens(&x.t), 4);
    assert_true(double_count(0) == 1 && x.ranks[0].counts.partial == 1);
    pl_apply_clear(x.a, &x.ranks[0]);
    /* a short last page is none of its blocks */
    pack(&x.p, "[0,[['BlockStored',[1],n,[1,2,3],3]],0]");
    send(&x);
    assert_true(double_count(0) == 0 && x.ranks[0].counts.partial == 2);
    pack(&x.p, "[0,[['BlockStored',[1],n,[1,2],2],['BlockStored',[2],1,[3,4],2]],0]");
    send(&x);
    assert_int_equal(pl_apply_block_tokens(&x.t), 2);
    assert_int_equal(double_count(0), 2);
    pl_apply_clear(x.a, &x.ranks[0]);
    pack(&x.p, "[0,[['BlockStored',[1],n,#,8]],0]", 8, 1);
    send(&x);
    assert_int_equal(pl_apply_block_tokens(&x.t), 8);
    end(&x);
    begin(&x, 4, 1, true); /* one that was given stays */
    pack(&x.p, "[0,[['BlockStored',[1],n,#,8]],0]", 8, 1);
    send(&x);
    assert_true(pl_apply_block_tokens(&x.t) == 4 && x.ranks[0].counts.bad_block_size == 1);
    end(&x);
}

/* Whatever the reason: that nothing of what comes is of use must show, also after better times. */
static void what_brings_nothing_is_noticed(void **state)
{
    (void)state;
    static const char *const useless[] = {
        "[0,[['BlockStored',[1],n,[1,2],2]],7]",           /* of a rank that is not there */
        "[0,[['BlockStored',[[]],n,[1,2],2]],0]",          /* hashes that are none */
        "[0,[['BlockStoredV2',[1],n,[1,2],2]],0]",         /* a type of the future */
        "[0,[['BlockStored',[1],n,[1,2,3],3]],0]",         /* blocks of another size */
        "[0,[['BlockStored',[1],9,[1,2],2]],0]",           /* behind what is not known */
        "[0,[['BlockStored',[1],n,[1,2],2,n,'tape']],0]"}; /* nobody knows where */
    for (size_t i = 0; i < sizeof useless / sizeof *useless; i++) {
        fixture x;
        begin(&x, 2, 2, true);
        assert_int_equal(x.ranks[0].tried, 0);
        pack(&x.p, useless[i]);
        send(&x);
        assert_true(x.ranks[0].tried == 1 && x.ranks[0].landed == 0);
        pack(&x.p, "[0,[['BlockStored',[1],n,[1,2],2]],0]");
        send(&x);
        assert_int_equal(x.ranks[0].landed, 1);
        pl_apply_clear(x.a, &x.ranks[0]);
        assert_true(x.ranks[0].tried == 0 && x.ranks[0].landed == 0);
        end(&x);
    }
}

static void keep_drops_what_is_not_named(void **state)
{
    (void)state;
    fixture x;
    begin(&x, 1, 1, true);
    pack(&x.p, "[0,[['BlockStored',[5,3,9],n,[1,2,3],1]],0]");
    send(&x);
    uint64_t names[] = {9, 77, 5};
    size_t dropped = 0;
    assert_int_equal(pl_apply_keep(x.a, &x.ranks[0], names, 3, &dropped), 0);
    assert_int_equal(dropped, 1);
    assert_true(double_has(0, PL_TIER_DEVICE, 5) && double_has(0, PL_TIER_DEVICE, 9));
    end(&x);
    begin(&x, 1, 1, false);
    assert_int_equal(pl_apply_keep(x.a, &x.ranks[0], names, 3, &dropped), PL_EUNAVAILABLE);
    end(&x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_store_is_found_by_the_prompts_hashes),
        cmocka_unit_test(the_batch_says_which_rank),
        cmocka_unit_test(lora_is_a_space_and_salt_is_in_the_hashes),
        cmocka_unit_test(images_set_a_block_apart),
        cmocka_unit_test(eagle_pairs_are_windows),
        cmocka_unit_test(long_events_are_one_chain),
        cmocka_unit_test(names_without_tokens_are_known_or_counted),
        cmocka_unit_test(router_events_bring_their_local_hashes),
        cmocka_unit_test(one_dense_group_speaks_for_a_hybrid_model),
        cmocka_unit_test(what_does_not_fit_is_refused_and_counted),
        cmocka_unit_test(the_first_store_says_the_block_size_where_nobody_did),
        cmocka_unit_test(spaces_without_end_are_refused),
        cmocka_unit_test(a_chain_keeps_its_salt),
        cmocka_unit_test(a_size_that_was_learned_is_learned_again),
        cmocka_unit_test(what_brings_nothing_is_noticed),
        cmocka_unit_test(keep_drops_what_is_not_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
