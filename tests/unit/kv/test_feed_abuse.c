/* The feed against engines that misbehave, are silent, or are not there: bounded, counted, cut off,
 * and let in again. */
#include "feed_peer.h"

static void garbage_is_cut_off_and_let_in_again(void **state)
{
    (void)state;
    engine e;
    int slot = 0;
    engine_open(&e);
    pl_feed_options o = PL_FEED_OPTIONS;
    o.trust.quiet_ns = 300 * MS;
    feed_open(&o);
    pl_feed_source s = source(&e, &slot, false);
    add(&s);
    engine_wait(&e);
    engine_store(&e, 1, 0, false);
    WAIT(NULL, double_count(slot) == 1);
    /* one frame; too many; a number that is none; a payload that is none */
    for (int i = 0; i < 3; i++) {
        zmq_send(e.pub, "lonely", 6, 0);
        for (int k = 0; k < 20; k++)
            zmq_send(e.pub, "x", 1, k < 19 ? ZMQ_SNDMORE : 0);
        zmq_send(e.pub, "", 0, ZMQ_SNDMORE);
        zmq_send(e.pub, "1234567", 7, ZMQ_SNDMORE);
        zmq_send(e.pub, "\x92", 1, 0);
    }
    WAIT(NULL, in_state(slot, PL_TRUST_UNTRUSTED));
    assert_int_equal(double_count(slot), 0);
    assert_true(stats(slot).bad == 9);
    engine_wait(&e); /* it subscribes again */
    engine_store(&e, 2, 0, false);
    WAIT(NULL, double_count(slot) == 1);
    WAIT(NULL, in_state(slot, PL_TRUST_LIVE));
    /* one batch that cannot be read: what it said is lost, so what was known may be wrong */
    pack(&e.batch[e.next], "'no batch'");
    engine_send(&e, e.next++);
    WAIT(NULL, stats(slot).resets == 1);
    assert_int_equal(double_count(slot), 0);
    engine_store(&e, 3, 0, false);
    WAIT(NULL, double_count(slot) == 1);
    pl_feed_free(feed);
    engine_close(&e);
}

static void a_flood_is_cut_off(void **state)
{
    (void)state;
    engine flood, calm, wide;
    int slots[] = {0, 1, 2};
    engine_open(&flood);
    engine_open(&wide);
    engine_open(&calm);
    pl_feed_options o = PL_FEED_OPTIONS;
    o.trust.bytes_per_second_max = 1 << 20;
    feed_open(&o);
    pl_feed_source s = source(&flood, &slots[0], false);
    add(&s);
    s = source(&wide, &slots[2], false);
    add(&s);
    s = source(&calm, &slots[1], false);
    add(&s);
    engine_wait(&flood);
    engine_wait(&wide);
    engine_wait(&calm);
    char *big = calloc(1, 2 << 20);
    assert_non_null(big);
    uint8_t number[8] = {0};
    zmq_send(flood.pub, "", 0, ZMQ_SNDMORE);
    zmq_send(flood.pub, number, 8, ZMQ_SNDMORE);
    zmq_send(flood.pub, big, 2 << 20, 0);
    WAIT(NULL, in_state(0, PL_TRUST_UNTRUSTED));
    assert_true(stats(0).floods == 1 && !stats(0).connected);
    /* whichever frame it is that is large */
    zmq_send(wide.pub, big, 2 << 20, ZMQ_SNDMORE);
    zmq_send(wide.pub, number, 8, ZMQ_SNDMORE);
    zmq_send(wide.pub, "\x92\1\x90", 3, 0);
    WAIT(NULL, in_state(2, PL_TRUST_UNTRUSTED));
    free(big);
    engine_store(&calm, 1, 0, false);
    WAIT(NULL, double_count(1) == 1);
    pl_feed_free(feed);
    engine_close(&wide);
    engine_close(&flood);
    engine_close(&calm);
}

/* Who hands events in is told that they are not taken, instead of losing them. */
static void events_over_http_are_refused_while_cut_off(void **state)
{
    (void)state;
    int slot = 0;
    pl_feed_options o = PL_FEED_OPTIONS;
    o.trust.quiet_ns = 2000 * MS;
    feed_open(&o);
    pl_feed_source s = {.engine = PL_STR("e"),
                        .slots = &slot,
                        .ranks_n = 1,
                        .model = PL_STR("m"),
                        .block_tokens = 1};
    add(&s);
    pl_errbuf eb;
    const pl_str good = PL_STR(
        "{\"type\":\"BlockStored\",\"block_hashes\":[1],\"token_ids\":[2],\"block_size\":1}");
    assert_int_equal(pl_feed_ingest(feed, slot, good, true, &eb), 0);
    for (int i = 0; i < 9; i++)
        assert_int_equal(pl_feed_ingest(feed, slot, PL_STR("\xc1"), false, &eb), 0);
    WAIT(NULL, in_state(slot, PL_TRUST_UNTRUSTED));
    assert_int_equal(double_count(slot), 0);
    assert_int_equal(pl_feed_ingest(feed, slot, good, true, &eb), PL_EBUSY);
    assert_non_null(strstr(eb.text, "garbage"));
    WAIT(NULL, pl_feed_ingest(feed, slot, good, true, &eb) == 0);
    WAIT(NULL, double_count(slot) == 1);
    pl_feed_free(feed);
}

/* What does not fit while a replay runs is dropped, and repaired by another replay. */
static void what_is_held_is_bounded(void **state)
{
    (void)state;
    engine e;
    int slot = 0;
    engine_open(&e);
    pl_feed_options o = PL_FEED_OPTIONS;
    o.limits.held_bytes = 2000;
    o.trust.ask_idle_ns = 60000 * MS;
    feed_open(&o);
    pl_feed_source s = source(&e, &slot, true);
    add(&s);
    engine_wait(&e); /* subscribed, the first replay not answered yet */
    for (uint64_t i = 1; i <= 100; i++)
        engine_store(&e, i, i - 1, false);
    WAIT(NULL, stats(slot).messages == 100);
    assert_true(stats(slot).held_dropped > 0 && stats(slot).held_bytes <= 2000);
    assert_int_equal(double_count(slot), 0);
    WAIT(&e, double_count(slot) == 100);
    WAIT(&e, in_state(slot, PL_TRUST_LIVE));
    assert_true(stats(slot).held_batches == 0 && stats(slot).complete);
    pl_feed_free(feed);
    engine_close(&e);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
size_t __sanitizer_get_current_allocated_bytes(void);
#define HEAP() __sanitizer_get_current_allocated_bytes()
#else
#include <malloc.h>
#define HEAP() ((size_t)mallinfo2().uordblks)
#endif

/* Short batches behind long topics: what is held must be what is counted. */
static void what_is_held_is_all_that_is_kept(void **state)
{
    (void)state;
    engine e;
    int slot = 0;
    engine_open(&e);
    pl_feed_options o = PL_FEED_OPTIONS;
    o.trust.ask_idle_ns = 60000 * MS;
    feed_open(&o);
    pl_feed_source s = source(&e, &slot, true);
    add(&s);
    engine_wait(&e);
    char topic[7000];
    memset(topic, 't', sizeof topic);
    e.topic = topic;
    e.topic_n = sizeof topic;
    size_t before = 0;
    for (uint64_t i = 0; i < 500; i++) {
        engine_store(&e, i + 1, i, false);
        WAIT(NULL, stats(slot).messages == i + 1);
        if (i == 9)
            before = HEAP();
    }
    assert_true(stats(slot).held_batches == 500);
    assert_true(HEAP() - before < 1000000);
    pl_feed_free(feed);
    engine_close(&e);
}

/* Replays take their turns; whoever waits for one is not lost. */
static void replays_wait_for_each_other(void **state)
{
    (void)state;
    engine a, b;
    int slots[] = {0, 1};
    engine_open(&a);
    engine_open(&b);
    pl_feed_options o = PL_FEED_OPTIONS;
    o.limits.asks = 1;
    o.trust.ask_idle_ns = 60000 * MS;
    feed_open(&o);
    engine_store(&a, 1, 0, true);
    engine_store(&b, 2, 0, true);
    pl_feed_source s = source(&a, &slots[0], true);
    add(&s);
    WAIT(NULL, in_state(0, PL_TRUST_REPLAYING));
    s = source(&b, &slots[1], true);
    add(&s);
    WAIT(NULL, in_state(1, PL_TRUST_GAP));
    WAIT(&a, in_state(0, PL_TRUST_LIVE));
    WAIT(&b, in_state(1, PL_TRUST_LIVE));
    assert_true(double_count(0) == 1 && double_count(1) == 1);
    pl_feed_free(feed);
    engine_close(&a);
    engine_close(&b);
}

/* ZeroMQ ends the connection over it, for good: so a new one is made. */
static void a_frame_that_is_too_large_is_never_taken(void **state)
{
    (void)state;
    engine e;
    int slot = 0;
    engine_open(&e);
    pl_feed_options o = PL_FEED_OPTIONS;
    o.limits.message_bytes = 1000;
    feed_open(&o);
    pl_feed_source s = source(&e, &slot, false);
    add(&s);
    engine_wait(&e);
    engine_store(&e, 1, 0, false);
    WAIT(NULL, double_count(slot) == 1);
    pack(&e.batch[1], "[0,[['BlockRemoved',#]],0]", 5000, 1);
    e.next = 2;
    engine_send(&e, 1);
    WAIT(NULL, stats(slot).disconnects == 1);
    engine_wait(&e);
    engine_store(&e, 3, 0, false);
    WAIT(NULL, stats(slot).gaps == 1); /* what was in it is missing, and that shows */
    assert_true(double_count(slot) == 1 && double_has(slot, PL_TIER_DEVICE, 3));
    assert_string_equal(stats(slot).error, "");
    pl_feed_free(feed);
    engine_close(&e);
}

/* The replay's address in place of the events': ZeroMQ, but no publisher. */
static void an_address_that_is_no_publisher(void **state)
{
    (void)state;
    engine e;
    int slot = 0;
    engine_open(&e);
    feed_open(NULL);
    pl_feed_source s = source(&e, &slot, false);
    s.endpoint = pl_str_c(e.replay);
    add(&s);
    WAIT(NULL, stats(slot).error[0]);
    assert_true(!stats(slot).connected && in_state(slot, PL_TRUST_NEW));
    /* it becomes one */
    char endpoint[256];
    strcpy(endpoint, e.replay);
    zmq_close(e.router);
    zmq_close(e.pub);
    e.pub = NULL;
    e.router = zmq_socket(e.ctx, ZMQ_ROUTER);
    WAIT(NULL, e.pub || (e.pub = socket_on(&e, ZMQ_XPUB, endpoint, e.endpoint)));
    engine_wait(&e);
    engine_store(&e, 1, 0, false);
    WAIT(NULL, double_count(slot) == 1);
    WAIT(NULL, !stats(slot).error[0] && stats(slot).connected);
    pl_feed_free(feed);
    engine_close(&e);
}

/* A replay without end is a flood like any other. */
static void an_answer_without_end_is_cut_off(void **state)
{
    (void)state;
    engine e;
    int slot = 0;
    engine_open(&e);
    pl_feed_options o = PL_FEED_OPTIONS;
    o.limits.answer_bytes = 1000;
    feed_open(&o);
    for (uint64_t i = 1; i <= 100; i++)
        engine_store(&e, i, i - 1, true);
    pl_feed_source s = source(&e, &slot, true);
    add(&s);
    WAIT(&e, in_state(slot, PL_TRUST_UNTRUSTED));
    assert_int_equal(stats(slot).floods, 1);
    assert_int_equal(double_count(slot), 0);
    pl_feed_free(feed);
    engine_close(&e);
}

static void stores_that_lead_nowhere_show(void **state)
{
    (void)state;
    engine e;
    int slot = 0;
    engine_open(&e);
    feed_open(NULL);
    pl_feed_source s = source(&e, &slot, false);
    s.block_tokens = 16;
    add(&s);
    engine_wait(&e);
    for (uint64_t i = 1; i <= 10; i++)
        engine_store(&e, i, 7, false); /* blocks of one token, behind nothing */
    WAIT(NULL, stats(slot).counts.stores == 10);
    assert_true(stats(slot).nothing_indexed);
    assert_int_equal(stats(slot).counts.partial, 10);
    /* and over; and again, behind a restart after which it says what nobody understands */
    pack(&e.batch[e.next], "[f,[['BlockStored',[50],n,#,16]],0]", 1.0, 16, 1);
    engine_send(&e, e.next++);
    WAIT(NULL, stats(slot).counts.stored == 1);
    assert_false(stats(slot).nothing_indexed);
    engine_forget(&e);
    pack(&e.batch[0], "[f,[['BlockStoredV9',[50],n,#,16]],0]", 1.0, 16, 1);
    engine_send(&e, 0);
    WAIT(NULL, stats(slot).counts.unknown_types == 1);
    assert_true(stats(slot).nothing_indexed);
    pl_feed_free(feed);
    engine_close(&e);
}

static void used_but_silent_is_stale(void **state)
{
    (void)state;
    engine e;
    int slot = 0;
    engine_open(&e);
    pl_feed_options o = PL_FEED_OPTIONS;
    o.trust.stale_ns = 50 * MS;
    feed_open(&o);
    pl_feed_source s = source(&e, &slot, false);
    add(&s);
    engine_wait(&e);
    engine_store(&e, 1, 0, false);
    WAIT(NULL, double_count(slot) == 1);
    WAIT(NULL, in_state(slot, PL_TRUST_LIVE));
    pl_feed_touch(feed, slot);
    WAIT(NULL, in_state(slot, PL_TRUST_STALE));
    assert_int_equal(double_count(slot), 1);
    engine_store(&e, 2, 0, false);
    WAIT(NULL, in_state(slot, PL_TRUST_LIVE));
    pl_feed_touch(feed, -1);
    pl_feed_touch(feed, PL_MAX_WORKERS);
    pl_feed_free(feed);
    engine_close(&e);
}

static void sources_are_checked(void **state)
{
    (void)state;
    feed_open(NULL);
    pl_errbuf eb;
    static const int slots[] = {1, 2}, twice[] = {3, 3}, wrong[] = {PL_MAX_WORKERS};
    const pl_feed_source good = {.engine = PL_STR("e"),
                                 .slots = slots,
                                 .ranks_n = 2,
                                 .model = PL_STR("m"),
                                 .mode = PL_FEED_CONNECT,
                                 .endpoint = PL_STR("tcp://127.0.0.1:5")};
    static const char *const endpoints[] = {
        "",           "tcp://",        "tcp://h",       "tcp://:1",
        "tcp://h:0",  "tcp://h:65536", "tcp://h:65535", "tcp://h:*",
        "http://h:1", "inproc://x",    "ipc://x"};
    pl_feed_source s;
    for (size_t i = 0; i < sizeof endpoints / sizeof *endpoints; i++) {
        s = good;
        s.endpoint = pl_str_c(endpoints[i]);
        assert_int_equal(pl_feed_source_add(feed, &s, &eb), PL_EINVALID);
        s = good;
        s.replay = pl_str_c(i ? endpoints[i] : "x");
        assert_int_equal(pl_feed_source_add(feed, &s, &eb), PL_EINVALID);
    }
    s = good, s.model = PL_STR("");
    assert_int_equal(pl_feed_source_add(feed, &s, &eb), PL_EINVALID);
    s = good, s.slots = twice;
    assert_int_equal(pl_feed_source_add(feed, &s, &eb), PL_EINVALID);
    s = good, s.slots = wrong, s.ranks_n = 1;
    assert_int_equal(pl_feed_source_add(feed, &s, &eb), PL_EINVALID);
    s = good, s.ranks_n = 0;
    assert_int_equal(pl_feed_source_add(feed, &s, &eb), PL_EINVALID);
    s = good, s.block_tokens = 65537;
    assert_int_equal(pl_feed_source_add(feed, &s, &eb), PL_EINVALID);
    char name[2000];
    memset(name, 'x', sizeof name);
    s = good, s.engine = (pl_str){name, sizeof name};
    assert_int_equal(pl_feed_source_add(feed, &s, &eb), PL_EINVALID);
    s = good;
    assert_int_equal(pl_feed_source_add(feed, &s, &eb), 0);
    assert_int_equal(pl_feed_source_add(feed, &s, &eb), PL_EEXISTS);
    assert_int_equal(pl_feed_source_remove(feed, 9), PL_ENOTFOUND);
    assert_int_equal(pl_feed_start(feed, &eb), PL_EEXISTS);
    /* an address that is taken shows in the figures */
    engine e;
    int slot = 7;
    engine_open(&e);
    s = source(&e, &slot, false);
    s.mode = PL_FEED_BIND;
    add(&s);
    WAIT(NULL, stats(7).error[0]);
    pl_feed_free(feed); /* with mail, sources and an unanswered replay under way */
    engine_close(&e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(garbage_is_cut_off_and_let_in_again),
        cmocka_unit_test(a_flood_is_cut_off),
        cmocka_unit_test(events_over_http_are_refused_while_cut_off),
        cmocka_unit_test(what_is_held_is_bounded),
        cmocka_unit_test(what_is_held_is_all_that_is_kept),
        cmocka_unit_test(replays_wait_for_each_other),
        cmocka_unit_test(a_frame_that_is_too_large_is_never_taken),
        cmocka_unit_test(an_address_that_is_no_publisher),
        cmocka_unit_test(an_answer_without_end_is_cut_off),
        cmocka_unit_test(stores_that_lead_nowhere_show),
        cmocka_unit_test(used_but_silent_is_stale),
        cmocka_unit_test(sources_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
