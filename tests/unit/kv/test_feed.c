/* The feed against publishers on real sockets: what arrives is in the index, what is lost is
 * repaired, what is wrong is cut off. Waiting is always for a condition, never for a time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>

#include <cmocka.h>
#include <zmq.h>

#include "kv/event_json.h"
#include "kv/feed.h"
#include "policy_abi.h"
#include "index_double.h"
#include "pack.h"

#define MS 1000000ull

enum { BUFFER = 512 };

/* --- an engine --- */

typedef struct engine {
    void *ctx, *pub, *router;
    char endpoint[128], replay[128];
    const char *topic;
    size_t topic_n;
    pl_buf batch[BUFFER]; /* of this lifetime, by number */
    uint64_t next;
    uint64_t first_kept; /* older ones are not replayed */
    bool new_style;      /* replays with the topic before the number */
} engine;

static void *socket_on(engine *e, int type, const char *address, char out[128])
{
    void *z = zmq_socket(e->ctx, type);
    assert_non_null(z);
    int zero = 0, patience = 30000;
    zmq_setsockopt(z, ZMQ_LINGER, &zero, sizeof zero);
    zmq_setsockopt(z, ZMQ_RCVTIMEO, &patience, sizeof patience);
    if (zmq_bind(z, address)) {
        zmq_close(z);
        return NULL;
    }
    size_t n = 128;
    assert_int_equal(zmq_getsockopt(z, ZMQ_LAST_ENDPOINT, out, &n), 0);
    return z;
}

static void engine_open(engine *e)
{
    *e = (engine){.ctx = zmq_ctx_new(), .topic = ""};
    e->pub = socket_on(e, ZMQ_XPUB, "tcp://127.0.0.1:*", e->endpoint);
    e->router = socket_on(e, ZMQ_ROUTER, "tcp://127.0.0.1:*", e->replay);
    assert_true(e->pub && e->router);
}

static void engine_forget(engine *e)
{
    for (int i = 0; i < BUFFER; i++)
        pl_buf_free(&e->batch[i]);
    e->next = e->first_kept = 0;
}

static void engine_close(engine *e)
{
    engine_forget(e);
    zmq_close(e->pub);
    zmq_close(e->router);
    zmq_ctx_term(e->ctx);
}

/* Until a subscriber is there: XPUB shows its subscription. */
static void engine_wait(engine *e)
{
    char frame[64];
    do
        assert_true(zmq_recv(e->pub, frame, sizeof frame, 0) >= 1);
    while (frame[0] != 1);
}

static void be64(uint64_t v, uint8_t out[8])
{
    for (int i = 0; i < 8; i++)
        out[i] = (uint8_t)(v >> 8 * (7 - i));
}

static void engine_send(engine *e, uint64_t seq)
{
    uint8_t number[8];
    be64(seq, number);
    assert_true(zmq_send(e->pub, e->topic, e->topic_n, ZMQ_SNDMORE) >= 0);
    assert_true(zmq_send(e->pub, number, 8, ZMQ_SNDMORE) >= 0);
    assert_true(zmq_send(e->pub, e->batch[seq].p, e->batch[seq].n, 0) >= 0);
}

/* The next batch: block `name` of one token, behind `parent` (0: none). lost: not sent. */
static void engine_store(engine *e, uint64_t name, uint64_t parent, bool lost)
{
    uint64_t seq = e->next++;
    assert_true(seq < BUFFER);
    if (parent)
        pack(&e->batch[seq], "[f,[['BlockStored',[u],u,[u],1,n,'GPU']],0]", 1.0 + (double)seq, name,
             parent, name & 0xffff);
    else
        pack(&e->batch[seq], "[f,[['BlockStored',[u],n,[u],1,n,'GPU']],0]", 1.0 + (double)seq, name,
             name & 0xffff);
    if (!lost)
        engine_send(e, seq);
}

/* Answers one request if there is one. */
static bool engine_answer(engine *e)
{
    zmq_pollitem_t poll = {.socket = e->router, .events = ZMQ_POLLIN};
    if (zmq_poll(&poll, 1, 5) <= 0)
        return false;
    uint8_t id[64], from[8], number[8];
    int id_n = zmq_recv(e->router, id, sizeof id, 0);
    assert_int_equal(zmq_recv(e->router, number, 8, 0), 0);
    assert_int_equal(zmq_recv(e->router, from, 8, 0), 8);
    int more;
    size_t more_n = sizeof more;
    assert_int_equal(zmq_getsockopt(e->router, ZMQ_RCVMORE, &more, &more_n), 0);
    assert_false(more);
    uint64_t seq = 0;
    for (int i = 0; i < 8; i++)
        seq = seq << 8 | from[i];
    if (seq < e->first_kept)
        seq = e->first_kept;
    for (;; seq++) {
        bool end = seq >= e->next;
        be64(end ? UINT64_MAX : seq, number);
        zmq_send(e->router, id, (size_t)id_n, ZMQ_SNDMORE);
        zmq_send(e->router, "", 0, ZMQ_SNDMORE);
        if (e->new_style)
            zmq_send(e->router, "topic", 5, ZMQ_SNDMORE);
        zmq_send(e->router, number, 8, ZMQ_SNDMORE);
        zmq_send(e->router, end ? "" : e->batch[seq].p, end ? 0 : e->batch[seq].n, 0);
        if (end)
            return true;
    }
}

/* --- the feed --- */

static pl_feed *feed;

static void feed_open(const pl_feed_options *o)
{
    double_reset();
    pl_feed_options defaults = PL_FEED_OPTIONS;
    defaults.known = &double_known;
    assert_int_equal(pl_feed_new(o ? o : &defaults, &feed), 0);
    assert_int_equal(pl_feed_start(feed, NULL), 0);
}

static pl_feed_source source(const engine *e, const int *slot, bool replay)
{
    return (pl_feed_source){.engine = PL_STR("e"),
                            .slots = slot,
                            .ranks_n = 1,
                            .model = PL_STR("m"),
                            .block_tokens = 1,
                            .mode = PL_FEED_CONNECT,
                            .endpoint = pl_str_c(e->endpoint),
                            .replay = pl_str_c(replay ? e->replay : "")};
}

static void add(const pl_feed_source *s)
{
    pl_errbuf eb;
    if (pl_feed_source_add(feed, s, &eb))
        fail_msg("%s", eb.text);
}

static pl_feed_stats stats(int slot)
{
    pl_feed_stats st;
    assert_int_equal(pl_feed_stats_of(feed, slot, &st), 0);
    return st;
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Until cond holds; answers the engine's replay requests meanwhile (e may be NULL). */
#define WAIT(e, cond)                                                                              \
    do {                                                                                           \
        double until_ = seconds() + 60;                                                            \
        engine *engine_ = (e);                                                                     \
        while (!(cond)) {                                                                          \
            if (seconds() > until_)                                                                \
                fail_msg("never: %s", #cond);                                                      \
            if (engine_)                                                                           \
                engine_answer(engine_);                                                            \
            else                                                                                   \
                nanosleep(&(struct timespec){0, 2000000}, NULL);                                   \
        }                                                                                          \
    } while (0)

static bool in_state(int slot, pl_trust_state s)
{
    return stats(slot).state == s;
}

static void events_arrive(void **state)
{
    (void)state;
    engine e;
    int slot = 3;
    engine_open(&e);
    feed_open(NULL);
    pl_feed_source s = source(&e, &slot, false);
    s.generation = 7;
    add(&s);
    engine_wait(&e);
    engine_store(&e, 1, 0, false);
    engine_store(&e, 2, 1, false);
    WAIT(NULL, stats(slot).counts.stored == 2);
    pl_feed_stats st = stats(slot);
    assert_true(st.state == PL_TRUST_LIVE && st.complete && st.has_seq && st.last_seq == 1);
    assert_true(st.lag_seconds > 1e6); /* its clock began at one second */
    assert_true(st.last_event_seconds >= 0 && st.messages == 2 && st.connected);
    assert_true(st.generation == 7 && !st.nothing_indexed);
    assert_string_equal(st.engine, "e");
    assert_string_equal(st.error, "");
    assert_true(double_has(slot, PL_TIER_DEVICE, 2));
    assert_int_equal(pl_feed_stats_of(feed, 4, &st), PL_ENOTFOUND);
    pl_feed_free(feed);
    engine_close(&e);
}

static void a_late_join_and_a_gap_are_replayed(void **state)
{
    (void)state;
    for (int new_style = 0; new_style < 2; new_style++) {
        engine e;
        int slot = 0;
        engine_open(&e);
        e.new_style = new_style;
        feed_open(NULL);
        engine_store(&e, 1, 0, true); /* before anyone listened */
        engine_store(&e, 2, 1, true);
        pl_feed_source s = source(&e, &slot, true);
        add(&s);
        WAIT(&e, stats(slot).counts.stored == 2);
        WAIT(&e, in_state(slot, PL_TRUST_LIVE));
        assert_true(stats(slot).complete);
        engine_wait(&e);
        engine_store(&e, 3, 2, false);
        WAIT(&e, stats(slot).counts.stored == 3);
        engine_store(&e, 4, 3, true);
        engine_store(&e, 5, 4, true);
        engine_store(&e, 6, 5, false);
        WAIT(&e, stats(slot).last_seq == 5 && in_state(slot, PL_TRUST_LIVE));
        pl_feed_stats st = stats(slot);
        assert_int_equal(st.counts.stored, 6);
        assert_true(st.gaps == 1 && st.missed == 2 && st.replays == 2 && st.resets == 0);
        assert_true(st.complete && st.counts.unknown_parents == 0 && st.held_batches == 0);
        assert_true(double_has(slot, PL_TIER_DEVICE, 6));
        pl_feed_free(feed);
        engine_close(&e);
    }
}

static void a_gap_beyond_the_buffer_begins_anew(void **state)
{
    (void)state;
    engine e;
    int slot = 0;
    engine_open(&e);
    feed_open(NULL);
    pl_feed_source s = source(&e, &slot, true);
    add(&s);
    WAIT(&e, in_state(slot, PL_TRUST_LIVE));
    engine_wait(&e);
    engine_store(&e, 1, 0, false);
    WAIT(&e, double_count(slot) == 1);
    engine_store(&e, 2, 1, true);
    engine_store(&e, 3, 0, true);
    engine_store(&e, 4, 3, false);
    e.first_kept = 2;
    WAIT(&e, stats(slot).last_seq == 3 && in_state(slot, PL_TRUST_LIVE));
    assert_int_equal(double_count(slot), 2);
    assert_true(double_has(slot, PL_TIER_DEVICE, 3) && double_has(slot, PL_TIER_DEVICE, 4));
    assert_false(stats(slot).complete);
    pl_feed_free(feed);
    engine_close(&e);
}

static void a_restart_clears_that_rank_only(void **state)
{
    (void)state;
    engine a, b;
    int slots[] = {0, 1};
    engine_open(&a);
    engine_open(&b);
    feed_open(NULL);
    pl_feed_source s = source(&a, &slots[0], false);
    add(&s);
    s = source(&b, &slots[1], false);
    add(&s);
    engine_wait(&a);
    engine_wait(&b);
    for (uint64_t i = 1; i < 4; i++) {
        engine_store(&a, i, 0, false);
        engine_store(&b, i, 0, false);
    }
    WAIT(NULL, double_count(0) == 3 && double_count(1) == 3);
    engine_forget(&a);
    engine_store(&a, 100, 0, false);
    WAIT(NULL, double_has(0, PL_TIER_DEVICE, 100));
    assert_int_equal(double_count(0), 1);
    assert_int_equal(double_count(1), 3);
    WAIT(NULL, stats(0).restarts == 1);
    assert_true(stats(0).complete && stats(1).restarts == 0);
    /* the same batch twice is no restart */
    engine_send(&a, 0);
    WAIT(NULL, stats(0).duplicates == 1);
    assert_int_equal(double_count(0), 1);
    pl_feed_free(feed);
    engine_close(&a);
    engine_close(&b);
}

/* The engine dies and comes back on the same port with nothing cached and nothing to say. */
static void a_reconnect_finds_a_restarted_engine(void **state)
{
    (void)state;
    engine e;
    int slot = 0;
    engine_open(&e);
    feed_open(NULL);
    pl_feed_source s = source(&e, &slot, true);
    add(&s);
    WAIT(&e, in_state(slot, PL_TRUST_LIVE));
    engine_wait(&e);
    engine_store(&e, 1, 0, false);
    WAIT(&e, double_count(slot) == 1);
    char endpoint[128], replay[128];
    strcpy(endpoint, e.endpoint);
    strcpy(replay, e.replay);
    zmq_close(e.pub);
    zmq_close(e.router);
    zmq_ctx_term(e.ctx); /* waits until the sockets are really gone */
    WAIT(NULL, stats(slot).disconnects > 0);
    engine_forget(&e);
    e.ctx = zmq_ctx_new();
    e.pub = e.router = NULL;
    WAIT(NULL, e.router || (e.router = socket_on(&e, ZMQ_ROUTER, replay, e.replay)));
    WAIT(NULL, e.pub || (e.pub = socket_on(&e, ZMQ_XPUB, endpoint, e.endpoint)));
    WAIT(&e, stats(slot).restarts == 1 && in_state(slot, PL_TRUST_LIVE));
    assert_int_equal(double_count(slot), 0);
    assert_true(stats(slot).complete);
    engine_wait(&e);
    engine_store(&e, 9, 0, false);
    WAIT(&e, double_count(slot) == 1);
    pl_feed_free(feed);
    engine_close(&e);
}

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
    engine flood, calm;
    int slots[] = {0, 1};
    engine_open(&flood);
    engine_open(&calm);
    pl_feed_options o = PL_FEED_OPTIONS;
    o.trust.bytes_per_second_max = 1 << 20;
    feed_open(&o);
    pl_feed_source s = source(&flood, &slots[0], false);
    add(&s);
    s = source(&calm, &slots[1], false);
    add(&s);
    engine_wait(&flood);
    engine_wait(&calm);
    char *big = calloc(1, 2 << 20);
    assert_non_null(big);
    uint8_t number[8] = {0};
    zmq_send(flood.pub, "", 0, ZMQ_SNDMORE);
    zmq_send(flood.pub, number, 8, ZMQ_SNDMORE);
    zmq_send(flood.pub, big, 2 << 20, 0);
    free(big);
    WAIT(NULL, in_state(0, PL_TRUST_UNTRUSTED));
    assert_true(stats(0).floods == 1 && !stats(0).connected);
    engine_store(&calm, 1, 0, false);
    WAIT(NULL, double_count(1) == 1);
    pl_feed_free(feed);
    engine_close(&flood);
    engine_close(&calm);
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

static void engines_connect_to_us(void **state)
{
    (void)state;
    engine e[2] = {{.topic = "kv@a", .topic_n = 4},
                   {.topic = "kv@b\0sgl-kv-epoch=1", .topic_n = 19}};
    int slots[] = {0, 1, 2};
    feed_open(NULL);
    pl_feed_source s = {.engine = PL_STR("e"),
                        .slots = slots,
                        .ranks_n = 1,
                        .model = PL_STR("m"),
                        .block_tokens = 1,
                        .mode = PL_FEED_BIND,
                        .endpoint = PL_STR("tcp://127.0.0.1:*"),
                        .topic = PL_STR("kv@a")};
    add(&s);
    WAIT(NULL, stats(0).endpoint[0]);
    s.slots = &slots[1];
    s.topic = PL_STR("kv@b");
    add(&s);
    s.slots = &slots[2];
    add(&s); /* the same topic: whose events would they be? */
    WAIT(NULL, stats(2).error[0]);
    assert_non_null(strstr(stats(2).error, "topic"));
    pl_feed_stats st = stats(0);
    for (int i = 0; i < 2; i++) {
        e[i].ctx = zmq_ctx_new();
        e[i].pub = zmq_socket(e[i].ctx, ZMQ_XPUB);
        e[i].router = zmq_socket(e[i].ctx, ZMQ_ROUTER);
        int patience = 30000, zero = 0;
        zmq_setsockopt(e[i].pub, ZMQ_RCVTIMEO, &patience, sizeof patience);
        zmq_setsockopt(e[i].pub, ZMQ_LINGER, &zero, sizeof zero);
        assert_int_equal(zmq_connect(e[i].pub, st.endpoint), 0);
        engine_wait(&e[i]);
        engine_wait(&e[i]); /* both topics */
        engine_store(&e[i], 10 + (uint64_t)i, 0, false);
    }
    WAIT(NULL, double_count(0) == 1 && double_count(1) == 1);
    assert_true(double_has(0, PL_TIER_DEVICE, 10) && double_has(1, PL_TIER_DEVICE, 11));
    /* another lifetime, by SGLang's epoch */
    e[1].topic = "kv@b\0sgl-kv-epoch=2\0sgl-kv-snapshot=7";
    e[1].topic_n = 37;
    engine_store(&e[1], 12, 0, false);
    WAIT(NULL, stats(1).restarts == 1);
    WAIT(NULL, double_has(1, PL_TIER_DEVICE, 12));
    assert_int_equal(double_count(1), 1);
    assert_int_equal(double_count(0), 1);
    /* one of them leaves; the other goes on */
    assert_int_equal(pl_feed_source_remove(feed, 1), 0);
    WAIT(NULL, double_count(1) == 0);
    engine_store(&e[0], 20, 0, false);
    WAIT(NULL, double_count(0) == 2);
    pl_feed_free(feed);
    engine_close(&e[0]);
    engine_close(&e[1]);
}

static void ranks_have_ports_of_their_own(void **state)
{
    (void)state;
    engine e[2];
    int slots[] = {4, 5};
    for (int tries = 0;; tries++) { /* two ports in a row that are free */
        assert_true(tries < 100);
        engine_open(&e[0]);
        char next[128];
        const char *colon = strrchr(e[0].endpoint, ':');
        snprintf(next, sizeof next, "%.*s:%d", (int)(colon - e[0].endpoint), e[0].endpoint,
                 atoi(colon + 1) + 1);
        e[1] = (engine){.ctx = zmq_ctx_new(), .topic = ""};
        e[1].pub = socket_on(&e[1], ZMQ_XPUB, next, e[1].endpoint);
        e[1].router = zmq_socket(e[1].ctx, ZMQ_ROUTER);
        if (e[1].pub)
            break;
        zmq_close(e[1].router);
        zmq_ctx_term(e[1].ctx);
        engine_close(&e[0]);
    }
    feed_open(NULL);
    pl_feed_source s = source(&e[0], slots, false);
    s.ranks_n = 2;
    add(&s);
    engine_wait(&e[0]);
    engine_wait(&e[1]);
    engine_store(&e[0], 1, 0, false);
    pack(&e[1].batch[0], "[f,[['BlockStored',[2],n,[2],1]],1]", 1.0);
    e[1].next = 1;
    engine_send(&e[1], 0);
    WAIT(NULL, double_has(4, PL_TIER_DEVICE, 1) && double_has(5, PL_TIER_DEVICE, 2));
    WAIT(NULL, stats(5).counts.stored == 1);
    assert_int_equal(stats(5).rank, 1);
    assert_int_equal(pl_feed_source_remove(feed, 5), 0); /* both: it is one engine */
    WAIT(NULL, double_count(4) + double_count(5) == 0);
    pl_feed_stats st;
    assert_int_equal(pl_feed_stats_of(feed, 4, &st), PL_ENOTFOUND);
    assert_int_equal(pl_feed_source_remove(feed, 4), PL_ENOTFOUND);
    /* the slots can be had again */
    s.generation = 2;
    add(&s);
    engine_wait(&e[0]);
    pl_feed_free(feed);
    engine_close(&e[0]);
    engine_close(&e[1]);
}

static void a_snapshot_confirms_or_drops(void **state)
{
    (void)state;
    engine e;
    int slot = 0;
    engine_open(&e);
    feed_open(NULL);
    pl_feed_source s = source(&e, &slot, false);
    s.snapshot = pl_str_c(e.replay); /* the same kind of socket */
    add(&s);
    engine_wait(&e);
    engine_store(&e, 1, 0, false);
    engine_store(&e, 2, 1, false);
    WAIT(NULL, double_count(slot) == 2);
    engine_store(&e, 3, 2, true); /* lost; and 2 was removed */
    engine_store(&e, 4, 1, false);
    engine_store(&e, 5, 1, false);
    for (int round = 0; round < 2; round++) {
        uint8_t id[64];
        char request[32];
        int id_n = zmq_recv(e.router, id, sizeof id, 0);
        assert_true(id_n > 0);
        assert_int_equal(zmq_recv(e.router, request, sizeof request, 0), 0);
        assert_int_equal(zmq_recv(e.router, request, sizeof request, 0), 11);
        assert_memory_equal(request, "snapshot-v1", 11);
        if (round == 0)
            WAIT(NULL, stats(slot).messages == 4); /* both of the live ones are held */
        static const char *const kind[] = {"header", "chunk", "chunk", "end"};
        for (int i = 0; i < 4; i++) {
            pl_buf data = {0};
            if (i == 0)
                pack(&data, "[1,'epoch',0,4,3,'id',2]"); /* 4 of 0..4: batch 4 is still to come */
            else if (i < 3)
                pack(&data, round ? "[[n,[u]]]" : "[[1,[u]]]", (uint64_t)(i == 1 ? 77 : 1));
            zmq_send(e.router, id, (size_t)id_n, ZMQ_SNDMORE);
            zmq_send(e.router, "", 0, ZMQ_SNDMORE);
            zmq_send(e.router, round == 1 && i == 1 ? "error" : kind[i],
                     strlen(round == 1 && i == 1 ? "error" : kind[i]), ZMQ_SNDMORE);
            zmq_send(e.router, data.p ? data.p : "", data.n, 0);
            pl_buf_free(&data);
        }
        if (round == 0) {
            /* 1 confirmed, 2 dropped, 77 not known; batch 3 is in the snapshot, 4 comes behind it
             */
            WAIT(NULL, stats(slot).snapshots == 1 && stats(slot).last_seq == 4);
            assert_true(double_count(slot) == 2 && double_has(slot, PL_TIER_DEVICE, 5));
            assert_true(!stats(slot).complete && in_state(slot, PL_TRUST_LIVE));
            engine_store(&e, 6, 1, true);
            engine_store(&e, 7, 1, false);
        }
    }
    /* the second time it says that it cannot: reset */
    WAIT(NULL, stats(slot).resets == 1);
    pl_feed_free(feed);
    engine_close(&e);
}

static void events_over_http(void **state)
{
    (void)state;
    int slots[] = {0, 1};
    pl_feed_options o = PL_FEED_OPTIONS;
    o.limits.ingest_bytes = 4096;
    feed_open(&o);
    pl_feed_source s = {.engine = PL_STR("e"),
                        .slots = slots,
                        .ranks_n = 2,
                        .model = PL_STR("m"),
                        .block_tokens = 2};
    add(&s);
    pl_errbuf eb;
#define POST(slot, text) pl_feed_ingest(feed, slot, PL_STR(text), true, &eb)
    assert_int_equal(
        POST(0, "{\"ts\":1.5,\"events\":[{\"type\":\"BlockStored\",\"block_hashes\":["
                "18446744073709551615,-2,\"3\"],\"token_ids\":[1,2,3,4,5,6],\"block_size\":2}]}"),
        0);
    assert_int_equal(POST(1, " [{\"worker_id\":7,\"event\":{\"event_id\":0,\"data\":{\"stored\":{"
                             "\"blocks\":[{\"block_hash\":9,\"tokens_hash\":10}]}}}}]"),
                     0);
    assert_int_equal(POST(1, "{\"\\u0074ype\":\"BlockRemoved\",\"block_hashes\":[1]}"), 0);
    WAIT(NULL, stats(1).counts.removals == 1);
    assert_true(double_has(0, PL_TIER_DEVICE, UINT64_MAX) &&
                double_has(0, PL_TIER_DEVICE, (uint64_t)-2) && double_has(0, PL_TIER_DEVICE, 3));
    assert_true(double_get(1, 9).local == 10);
    assert_int_equal(stats(0).state, PL_TRUST_LIVE);
    /* numbered: a gap is seen */
    assert_int_equal(POST(0, "{\"seq\":0,\"events\":[]}"), 0);
    assert_int_equal(POST(0, "{\"seq\":5,\"events\":[]}"), 0);
    WAIT(NULL, stats(0).gaps == 1);
    WAIT(NULL, double_count(0) == 0);
    /* the wire's own format, and what is none: counted */
    pl_buf p = {0};
    pack(&p, "[0,[['BlockStored',[5],n,[1,2],2]],1]");
    assert_int_equal(pl_feed_ingest(feed, 0, pl_buf_str(&p), false, &eb), 0);
    WAIT(NULL, double_has(1, PL_TIER_DEVICE, 5)); /* the rank that the batch names */
    assert_int_equal(pl_feed_ingest(feed, 0, PL_STR("\xc1"), false, &eb), 0);
    WAIT(NULL, stats(0).bad == 1);
    pl_buf_free(&p);
    /* refused at once */
    assert_int_equal(POST(0, "{\"events\":[}"), PL_ESYNTAX);
    assert_non_null(strstr(eb.text, "byte 11"));
    assert_int_equal(POST(0, "7"), PL_EPROTOCOL);
    assert_int_equal(POST(0, "[] []"), PL_ESYNTAX);
    assert_int_equal(POST(9, "[]"), PL_ENOTFOUND);
    assert_int_equal(POST(-1, "[]"), PL_ENOTFOUND);
    char big[5000];
    memset(big, ' ', sizeof big);
    assert_int_equal(pl_feed_ingest(feed, 0, (pl_str){big, sizeof big}, false, &eb), PL_EBUSY);
    char deep[200];
    memset(deep, '[', 100);
    memset(deep + 100, ']', 100);
    assert_int_equal(pl_feed_ingest(feed, 0, (pl_str){deep, 200}, true, &eb), PL_ELIMIT);
    pl_feed_free(feed);
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
        cmocka_unit_test(events_arrive),
        cmocka_unit_test(a_late_join_and_a_gap_are_replayed),
        cmocka_unit_test(a_gap_beyond_the_buffer_begins_anew),
        cmocka_unit_test(a_restart_clears_that_rank_only),
        cmocka_unit_test(a_reconnect_finds_a_restarted_engine),
        cmocka_unit_test(garbage_is_cut_off_and_let_in_again),
        cmocka_unit_test(a_flood_is_cut_off),
        cmocka_unit_test(what_is_held_is_bounded),
        cmocka_unit_test(engines_connect_to_us),
        cmocka_unit_test(ranks_have_ports_of_their_own),
        cmocka_unit_test(a_snapshot_confirms_or_drops),
        cmocka_unit_test(events_over_http),
        cmocka_unit_test(stores_that_lead_nowhere_show),
        cmocka_unit_test(used_but_silent_is_stale),
        cmocka_unit_test(sources_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
