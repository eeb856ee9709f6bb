/* KV events off the wire: the published vectors, every generation of every engine, and that no
 * bytes can cost more than themselves. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>

#include "base/err.h"
#include "base/rng.h"
#include "kv/event.h"
#include "pack.h"

static size_t unhex(const char *hex, uint8_t *out)
{
    size_t n = strlen(hex) / 2;
    for (size_t i = 0; i < n; i++) {
        unsigned byte;
        assert_int_equal(sscanf(hex + 2 * i, "%2x", &byte), 1);
        out[i] = (uint8_t)byte;
    }
    return n;
}

static void assert_str(pl_str s, const char *want)
{
    assert_int_equal(s.n, strlen(want));
    assert_memory_equal(s.p, want, s.n);
}

/* The only event of a batch, checked to be the only one. */
static pl_kv_event only(pl_kv_batch *b)
{
    pl_kv_event e, other;
    assert_int_equal(pl_kv_batch_next(b, &e), 1);
    assert_int_equal(pl_kv_batch_next(b, &other), 0);
    return e;
}

static uint64_t one_hash(const pl_kv_event *e)
{
    pl_kv_list l = e->hashes;
    uint64_t h[2];
    assert_int_equal(pl_kv_hashes(&l, h, 2), 1);
    return h[0];
}

static void assert_tokens(const pl_kv_event *e, size_t n, uint32_t from)
{
    uint32_t t[64];
    pl_kv_list l = e->tokens;
    assert_int_equal(l.n, n);
    assert_int_equal(pl_kv_tokens(&l, t, NULL, 64), n);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(t[i], from + i);
}

static void published_vectors(void **state)
{
    (void)state;
    uint8_t bytes[256];
    pl_kv_batch b;
    pl_kv_event e;

    size_t n = unhex("93cb3ff80000000000009198ab426c6f636b53746f72656491cfdab89baa7b5857c0c0940102"
                     "030404c0a3475055c000",
                     bytes);
    assert_int_equal(pl_kv_batch_open(&b, bytes, n), 0);
    assert_true(b.ts == 1.5 && b.rank == 0);
    e = only(&b);
    assert_int_equal(e.kind, PL_KV_STORED);
    assert_true(one_hash(&e) == 15760518052499183552u);
    assert_false(e.has_parent || e.bigram || e.unnamed_lora || e.has_locals);
    assert_tokens(&e, 4, 1);
    assert_int_equal(e.block_tokens, 4);
    assert_int_equal(e.tier, PL_TIER_DEVICE);
    assert_int_equal(e.group, -1);
    assert_int_equal(e.lora.n + e.salt.n + e.extra.n, 0);

    n = unhex("93cb3ff80000000000009283a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865"
              "739105a66d656469756da347505581a474797065b0416c6c426c6f636b73436c656172656401",
              bytes);
    assert_int_equal(pl_kv_batch_open(&b, bytes, n), 0);
    assert_int_equal(b.rank, 1);
    assert_int_equal(pl_kv_batch_next(&b, &e), 1);
    assert_int_equal(e.kind, PL_KV_REMOVED);
    assert_int_equal(one_hash(&e), 5);
    e = only(&b);
    assert_int_equal(e.kind, PL_KV_CLEARED);

    n = unhex("93cb3ff80000000000009193ac426c6f636b52656d6f76656491c4200101010101010101010101010101"
              "010101010101010101010101010101010101a347505500",
              bytes);
    assert_int_equal(pl_kv_batch_open(&b, bytes, n), 0);
    e = only(&b);
    assert_int_equal(e.kind, PL_KV_REMOVED);
    assert_true(one_hash(&e) == 0x0101010101010101u);
}

static void sglang_arrays(void **state)
{
    (void)state;
    pl_kv_batch b;
    pl_kv_event e;
    pl_buf p = {0};
    /* the oldest has no rank; several pages under one event; signed hashes */
    pack(&p, "[f,[['BlockStored',[i,9],-5,[1,2,3,4],2,n,'CPU_PINNED']]]", 2.0,
         (int64_t)-3488128144981237669);
    assert_int_equal(pl_kv_batch_open(&b, p.p, p.n), 0);
    assert_int_equal(b.rank, -1);
    e = only(&b);
    uint64_t h[3];
    pl_kv_list l = e.hashes;
    assert_int_equal(pl_kv_hashes(&l, h, 3), 2);
    assert_true((int64_t)h[0] == -3488128144981237669 && h[1] == 9);
    assert_true(e.has_parent && (int64_t)e.parent == -5);
    assert_int_equal(e.tier, PL_TIER_HOST);

    /* the salt stands in a map at the place where vLLM has the adapter's name; unknown keys pass */
    p.n = 0;
    pack(&p, "[f,[['BlockStored',[7],n,[1,2],2,n,n,{'x':[1,{2:3}],'cache_salt':'tenant-a'}]],3]",
         2.0);
    assert_int_equal(pl_kv_batch_open(&b, p.p, p.n), 0);
    assert_int_equal(b.rank, 3);
    e = only(&b);
    assert_str(e.salt, "tenant-a");
    assert_int_equal(e.lora.n, 0);
    assert_int_equal(e.tier, PL_TIER_DEVICE);

    /* Eagle: pairs */
    p.n = 0;
    pack(&p,
         "[f,[['BlockStored',[7],n,[[10,20],[20,30]],2,n,'GPU'],['BlockRemoved',[7]],"
         "['AllBlocksCleared']],0]",
         2.0);
    assert_int_equal(pl_kv_batch_open(&b, p.p, p.n), 0);
    assert_int_equal(pl_kv_batch_next(&b, &e), 1);
    assert_true(e.bigram);
    uint32_t first[4], second[4];
    l = e.tokens;
    assert_int_equal(pl_kv_tokens(&l, first, second, 4), 2);
    assert_true(first[0] == 10 && second[0] == 20 && first[1] == 20 && second[1] == 30);
    assert_int_equal(pl_kv_batch_next(&b, &e), 1);
    assert_true(e.kind == PL_KV_REMOVED && e.tier == PL_TIER_DEVICE);
    assert_int_equal(only(&b).kind, PL_KV_CLEARED);
    pl_buf_free(&p);
}

static void vllm_generations(void **state)
{
    (void)state;
    static const uint8_t digest[32] = {[24] = 0x12, [31] = 0x34};
    pl_kv_batch b;
    pl_kv_event e;
    pl_buf p = {0};
    /* arrays with everything that was ever appended, and more */
    pack(&p,
         "[f,[['BlockStored',[b],n,[1,2,3,4],4,3,'gpu','my-lora',[['my-lora','salty']],1,"
         "'sliding_window',128,'LOCAL',n,'later',[1]],"
         "['BlockRemoved',[b],'CPU',2,'mla_attention',n,'REMOTE']],0]",
         1.0, digest, 32, digest, 32);
    assert_int_equal(pl_kv_batch_open(&b, p.p, p.n), 0);
    assert_int_equal(pl_kv_batch_next(&b, &e), 1);
    assert_true(one_hash(&e) == 0x1200000000000034u);
    assert_str(e.lora, "my-lora");
    assert_false(e.unnamed_lora);
    assert_int_equal(e.group, 1);
    assert_int_equal(e.spec, PL_KV_SPEC_SPARSE);
    assert_int_equal(e.tier, PL_TIER_DEVICE);
    e = only(&b);
    assert_int_equal(e.group, 2);
    assert_int_equal(e.spec, PL_KV_SPEC_DENSE);
    assert_int_equal(e.tier, PL_TIER_EXTERNAL);

    /* what stands behind the places of group and kind is neither (Dynamo: locality, source) */
    p.n = 0;
    pack(&p,
         "[f,[['BlockRemoved',[1],'GPU',0,n,n,'LOCAL','engine'],['BlockRemoved',[1],'GPU',0,n,n,n,"
         "'engine'],['BlockStored',[1],n,[1],1,n,n,n,n,n,1,'full_attention',n,'REMOTE','engine'],"
         "['BlockStored',[1],n,[1],1,'7f3a','GPU']],0]",
         1.0);
    assert_int_equal(pl_kv_batch_open(&b, p.p, p.n), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pl_kv_batch_next(&b, &e), 1);
        assert_true(e.group == 0 && e.spec == PL_KV_SPEC_UNSAID && e.tier == PL_TIER_DEVICE);
    }
    assert_int_equal(pl_kv_batch_next(&b, &e), 1); /* with Dynamo's older place before them */
    assert_true(e.group == 1 && e.spec == PL_KV_SPEC_DENSE && e.tier == PL_TIER_EXTERNAL);
    assert_false(e.unnamed_lora);
    assert_true(only(&b).unnamed_lora); /* an adapter by an id that is no number */

    /* maps, with keys in any order; a number in place of the adapter's name */
    p.n = 0;
    pack(&p,
         "[f,[{'medium':'STORAGE','zzz':{'a':[1,2]},'block_hashes':[4,5],'token_ids':[],"
         "'parent_block_hash':3,'block_size':16,'lora_id':2,'type':'BlockStored',"
         "'session_id':'s','group_idx':0,'kv_cache_spec_kind':'full_attention'}],1,'more',n]",
         1.0);
    assert_int_equal(pl_kv_batch_open(&b, p.p, p.n), 0);
    e = only(&b);
    assert_int_equal(e.tier, PL_TIER_DISK);
    assert_int_equal(e.tokens.n, 0);
    assert_true(e.has_parent && e.parent == 3 && e.unnamed_lora);
    assert_int_equal(e.spec, PL_KV_SPEC_DENSE);

    /* the batch as a map */
    p.n = 0;
    pack(&p, "{'data_parallel_rank':2,'events':[{'type':'AllBlocksCleared'}],'ts':f,'x':1}", 4.0);
    assert_int_equal(pl_kv_batch_open(&b, p.p, p.n), 0);
    assert_true(b.rank == 2 && b.ts == 4.0);
    assert_int_equal(only(&b).kind, PL_KV_CLEARED);
    pl_buf_free(&p);
}

static void router_events(void **state)
{
    (void)state;
    pl_kv_batch b;
    pl_kv_event e;
    pl_buf p = {0};
    pack(&p,
         "[0,[{'worker_id':1,'storage_tier':'host_pinned','event':{'event_id':9,'dp_rank':1,"
         "'data':{'stored':{'parent_hash':n,'start_position':0,'blocks':["
         "{'block_hash':u,'tokens_hash':22,'mm_extra_info':n},"
         "{'tokens_hash':'18446744073709551615','block_hash':'-2'}]}}}},"
         "{'event':{'data':{'removed':{'block_hashes':['0xff']}}}},"
         "{'event':{'event_id':10,'data':'cleared'}}]]",
         UINT64_MAX);
    assert_int_equal(pl_kv_batch_open(&b, p.p, p.n), 0);
    assert_int_equal(pl_kv_batch_next(&b, &e), 1);
    assert_true(e.kind == PL_KV_STORED && e.has_locals && e.rank == 1 && !e.has_parent);
    assert_int_equal(e.tier, PL_TIER_HOST);
    uint64_t h[2], local[2];
    pl_kv_list l = e.hashes;
    assert_int_equal(pl_kv_hashes(&l, h, 2), 2);
    l = e.hashes;
    assert_int_equal(pl_kv_locals(&l, local, 2), 2);
    assert_true(h[0] == UINT64_MAX && h[1] == (uint64_t)-2);
    assert_true(local[0] == 22 && local[1] == UINT64_MAX);
    assert_int_equal(pl_kv_batch_next(&b, &e), 1);
    assert_true(e.kind == PL_KV_REMOVED && one_hash(&e) == 0xff);
    assert_int_equal(only(&b).kind, PL_KV_CLEARED);
    pl_buf_free(&p);
}

static void extra_keys_are_read_by_block(void **state)
{
    (void)state;
    pl_kv_batch b;
    pl_kv_extra x;
    pl_buf p = {0};
    pack(&p,
         "[0,[{'type':'BlockStored','block_hashes':[1,2,3],'token_ids':[1,2,3],'block_size':1,"
         "'extra_keys':[['lora',['img',3],'salt'],n,[7,[],{},n,b]]}]]",
         "\x01\x02", 2);
    assert_int_equal(pl_kv_batch_open(&b, p.p, p.n), 0);
    pl_kv_event e = only(&b);
    pl_kv_extra_iter it = pl_kv_extra_begin(&e);
    assert_true(pl_kv_extra_next(&it, &x));
    assert_true(x.block == 0 && !x.object && !x.binary);
    assert_str(x.s, "lora");
    assert_true(pl_kv_extra_next(&it, &x));
    assert_true(x.block == 0 && x.object);
    assert_str(x.s, "img");
    assert_true(pl_kv_extra_next(&it, &x));
    assert_str(x.s, "salt");
    assert_true(pl_kv_extra_next(&it, &x));
    assert_true(x.block == 2 && x.binary && !x.object);
    assert_str(x.s, "\x01\x02");
    assert_false(pl_kv_extra_next(&it, &x));
    pl_buf_free(&p);
}

/* One bad event costs itself only: above all never a removal. */
static void bad_events_are_stepped_over(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "n",                                    /* not an event */
        "[]",                                   /* no type */
        "{}",                                   /* no type */
        "[7,[1]]",                              /* a type that is no text */
        "{'type':n,'block_hashes':[1]}",        /* the same */
        "['BlockRemoved']",                     /* no hashes */
        "['BlockRemoved',5]",                   /* hashes that are no list */
        "['BlockRemoved',[n]]",                 /* no hash */
        "['BlockRemoved',['']]",                /* the same */
        "['BlockRemoved',['12x']]",             /* the same */
        "['BlockRemoved',[[1]]]",               /* the same */
        "['BlockStored',[1],[],[1],1]",         /* a parent that is no hash */
        "['BlockStored',[1],n,['a'],1]",        /* no token */
        "['BlockStored',[1],n,[-1],1]",         /* the same */
        "['BlockStored',[1],n,[4294967296],1]", /* the same */
        "['BlockStored',[1],n,[[1,2],3],1]",    /* pairs and not */
        "['BlockStored',[1],n,[[1,2,3]],1]",    /* not a pair */
        "['BlockStored',[1],n,'text',1]",       /* tokens that are no list */
        "{'event':{'data':{'stored':{'blocks':[{'block_hash':1}]}}}}", /* no local hash */
        "{'event':{'data':{'stored':{}}}}",
    };
    pl_buf p = {0};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char text[512];
        snprintf(text, sizeof text, "[0,[%s,['BlockRemoved',[77]],['FutureEvent',1,{}]]]", bad[i]);
        p.n = 0;
        pack(&p, text);
        pl_kv_batch b;
        pl_kv_event e;
        assert_int_equal(pl_kv_batch_open(&b, p.p, p.n), 0);
        assert_int_equal(pl_kv_batch_next(&b, &e), PL_EPROTOCOL);
        assert_int_equal(pl_kv_batch_next(&b, &e), 1);
        assert_int_equal(one_hash(&e), 77);
        assert_int_equal(only(&b).kind, PL_KV_OTHER);
    }
    pl_buf_free(&p);
}

static void what_is_no_batch_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        size_t n;
        int want;
    } v[] = {
        {"", 0, PL_ESYNTAX},
        {"\xc1", 1, PL_ESYNTAX},
        {"\x05", 1, PL_EPROTOCOL},
        {"\xc0", 1, PL_EPROTOCOL},
        {"\x90", 1, PL_EPROTOCOL},
        {"\x80", 1, PL_EPROTOCOL},
        {"\x92\x01\x02", 3, PL_EPROTOCOL},               /* events that are no list */
        {"\x92\x01\x90\x00", 4, PL_ESYNTAX},             /* bytes behind the batch */
        {"\x92\x01\xdd\xff\xff\xff\xff", 7, PL_ESYNTAX}, /* four milliard events, none there */
        {"\x92\x01\xdf\x7f\xff\xff\xff", 7, PL_ESYNTAX},
        {"\x92\x01\xdb\xff\xff\xff\xff", 7, PL_ESYNTAX},
        {"\x92\x01\xc9\xff\xff\xff\xff", 7, PL_ESYNTAX},
    };
    pl_kv_batch b;
    for (size_t i = 0; i < sizeof v / sizeof *v; i++)
        assert_int_equal(pl_kv_batch_open(&b, v[i].bytes, v[i].n), v[i].want);
}

/* A million open arrays, which a reader that recurses would not survive. */
static void depth_is_no_danger(void **state)
{
    (void)state;
    size_t n = 1u << 20;
    uint8_t *deep = malloc(n + 4);
    assert_non_null(deep);
    memset(deep, 0x91, n + 4);
    pl_kv_batch b;
    pl_kv_event e;
    assert_int_equal(pl_kv_batch_open(&b, deep, n + 4), PL_ESYNTAX);
    deep[n + 3] = 0xc0;
    assert_int_equal(pl_kv_batch_open(&b, deep, n + 4), PL_EPROTOCOL);
    deep[0] = 0x92; /* [1, [[[[...]]]]] */
    deep[1] = 0x01;
    assert_int_equal(pl_kv_batch_open(&b, deep, n + 4), 0);
    assert_int_equal(pl_kv_batch_next(&b, &e), PL_EPROTOCOL);
    assert_int_equal(pl_kv_batch_next(&b, &e), 0);
    free(deep);
}

/* Cut at any byte a batch gives no event at all: never half of what an engine said. */
static void truncated_batches_give_nothing(void **state)
{
    (void)state;
    pl_buf p = {0};
    pack(&p,
         "[f,[['BlockStored',[i,2],n,[1,2,3,70000],2,n,'GPU','lora',[['lora'],n],0,"
         "'full_attention'],{'type':'BlockRemoved','block_hashes':[b]}],0]",
         9.0, (int64_t)-9, "\1\2\3\4\5\6\7\x08\x09", 9);
    pl_kv_batch b;
    assert_int_equal(pl_kv_batch_open(&b, p.p, p.n), 0);
    for (size_t n = 0; n < p.n; n++) {
        char *exact = malloc(n ? n : 1);
        assert_non_null(exact);
        memcpy(exact, p.p, n);
        assert_int_equal(pl_kv_batch_open(&b, exact, n), PL_ESYNTAX);
        free(exact);
    }
    pl_buf_free(&p);
}

static void numbers_in_all_widths(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        size_t n;
        pl_mp_type type;
        int64_t i;
    } v[] = {
        {"\x7f", 1, PL_MP_UINT, 127},
        {"\xe0", 1, PL_MP_INT, -32},
        {"\xcc\xff", 2, PL_MP_UINT, 255},
        {"\xcd\xff\xfe", 3, PL_MP_UINT, 65534},
        {"\xce\x80\x00\x00\x00", 5, PL_MP_UINT, 2147483648},
        {"\xd0\x80", 2, PL_MP_INT, -128},
        {"\xd0\x05", 2, PL_MP_UINT, 5},
        {"\xd1\xff\xff", 3, PL_MP_INT, -1},
        {"\xd2\x80\x00\x00\x00", 5, PL_MP_INT, INT32_MIN},
        {"\xd3\xff\xff\xff\xff\xff\xff\xff\xfe", 9, PL_MP_INT, -2},
        {"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", 9, PL_MP_UINT, -1},
    };
    for (size_t i = 0; i < sizeof v / sizeof *v; i++) {
        pl_mp c = pl_mp_of(v[i].bytes, v[i].n);
        pl_mp_item it;
        assert_int_equal(pl_mp_read(&c, &it), 0);
        assert_int_equal(it.type, v[i].type);
        assert_true(it.i == v[i].i && c.p == c.end);
    }
    pl_mp c = pl_mp_of("\xca\x3f\xc0\x00\x00", 5);
    pl_mp_item it;
    assert_int_equal(pl_mp_read(&c, &it), 0);
    assert_true(it.type == PL_MP_REAL && it.f == 1.5);
}

static void media_are_tiers(void **state)
{
    (void)state;
    assert_int_equal(pl_kv_tier_of(PL_STR("Gpu")), PL_TIER_DEVICE);
    assert_int_equal(pl_kv_tier_of(PL_STR("CPU_TIER1")), PL_TIER_HOST);
    assert_int_equal(pl_kv_tier_of(PL_STR("cpu_tier2")), PL_TIER_DISK);
    assert_int_equal(pl_kv_tier_of(PL_STR("DISK")), PL_TIER_DISK);
    assert_int_equal(pl_kv_tier_of(PL_STR("EXTERNAL")), PL_TIER_EXTERNAL);
    assert_int_equal(pl_kv_tier_of(PL_STR("tape")), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_vectors),
        cmocka_unit_test(sglang_arrays),
        cmocka_unit_test(vllm_generations),
        cmocka_unit_test(router_events),
        cmocka_unit_test(extra_keys_are_read_by_block),
        cmocka_unit_test(bad_events_are_stepped_over),
        cmocka_unit_test(what_is_no_batch_is_refused),
        cmocka_unit_test(depth_is_no_danger),
        cmocka_unit_test(truncated_batches_give_nothing),
        cmocka_unit_test(numbers_in_all_widths),
        cmocka_unit_test(media_are_tiers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
