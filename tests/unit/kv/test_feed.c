/* The feed against publishers on real sockets: what arrives is in the index, what is lost is
 * repaired. */
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "feed_peer.h"

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
        assert_true(stats(slot).lag_seconds < 0); /* they are as old as they are */
        engine_wait(&e);
        engine_store(&e, 3, 2, false);
        WAIT(&e, stats(slot).counts.stored == 3);
        assert_true(stats(slot).lag_seconds > 1e6);
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
    char endpoint[256], replay[256];
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

/* Somebody knocks at the port that engines connect to, as a probe does, and goes away again. */
static void a_stranger_at_the_port_changes_nothing(void **state)
{
    (void)state;
    engine e = {.topic = ""};
    int slot = 0;
    feed_open(NULL);
    pl_feed_source s = {.engine = PL_STR("e"),
                        .slots = &slot,
                        .ranks_n = 1,
                        .model = PL_STR("m"),
                        .block_tokens = 1,
                        .mode = PL_FEED_BIND,
                        .endpoint = PL_STR("tcp://127.0.0.1:*")};
    add(&s);
    WAIT(NULL, stats(slot).endpoint[0]);
    pl_feed_stats st = stats(slot);
    e.ctx = zmq_ctx_new();
    e.router = zmq_socket(e.ctx, ZMQ_ROUTER);
    for (int life = 0; life < 2; life++) {
        e.pub = zmq_socket(e.ctx, ZMQ_XPUB);
        int patience = 30000, zero = 0;
        zmq_setsockopt(e.pub, ZMQ_RCVTIMEO, &patience, sizeof patience);
        zmq_setsockopt(e.pub, ZMQ_LINGER, &zero, sizeof zero);
        assert_int_equal(zmq_connect(e.pub, st.endpoint), 0);
        engine_wait(&e);
        WAIT(NULL, stats(slot).connected);
        for (int i = 0; i < 3; i++) {
            struct sockaddr_in to = {.sin_family = AF_INET,
                                     .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                     .sin_port =
                                         htons((uint16_t)atoi(strrchr(st.endpoint, ':') + 1))};
            int fd = socket(AF_INET, SOCK_STREAM, 0);
            assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
            /* nothing; what ZeroMQ says first, and no more; something else */
            static const char *const words[] = {"", "\xff\1\1\1\1\1\1\1\1\x7f\3", "GET / HTTP"};
            ssize_t n = (ssize_t)strlen(words[i]);
            assert_true(write(fd, words[i], (size_t)n) == n);
            close(fd);
        }
        for (int i = 0; i < 20; i++) {
            uint64_t n = e.next;
            engine_store(&e, n + 1, n, false);
            WAIT(NULL, stats(slot).has_seq && stats(slot).last_seq == n);
            assert_true(stats(slot).connected);
        }
        assert_int_equal(stats(slot).disconnects, life);
        zmq_close(e.pub);
        WAIT(NULL, !stats(slot).connected);
    }
    assert_int_equal(stats(slot).disconnects, 2);
    pl_feed_free(feed);
    engine_forget(&e);
    zmq_close(e.router);
    zmq_ctx_term(e.ctx);
}

static void ranks_have_ports_of_their_own(void **state)
{
    (void)state;
    engine e[2];
    int slots[] = {4, 5};
    for (int tries = 0;; tries++) { /* two ports in a row that are free */
        assert_true(tries < 100);
        engine_open(&e[0]);
        char next[300];
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

/* One publisher for both ranks: its batches name them, and when it restarts both are cleared. */
static void one_stream_for_all_ranks(void **state)
{
    (void)state;
    engine e;
    int slots[] = {2, 3};
    engine_open(&e);
    feed_open(NULL);
    pl_feed_source s = source(&e, slots, false);
    s.ranks_n = 2;
    s.one_stream = true;
    add(&s);
    engine_wait(&e);
    for (int rank = 0; rank < 2; rank++) {
        pack(&e.batch[rank], "[f,[['BlockStored',[7],n,[2],1]],u]", 1.0, (uint64_t)rank);
        e.next++;
        engine_send(&e, (uint64_t)rank);
    }
    WAIT(NULL, stats(3).counts.stored == 1);
    assert_true(double_count(2) == 1 && double_count(3) == 1);
    assert_true(stats(2).last_seq == 1 && stats(3).last_seq == 1 && stats(3).rank == 1);
    engine_forget(&e);
    engine_store(&e, 9, 0, false);
    WAIT(NULL, stats(2).restarts == 1);
    assert_true(double_count(2) == 1 && double_count(3) == 0);
    /* a sum over the ranks is what there was; what was applied is each rank's */
    assert_true(stats(2).messages == 3 && stats(2).bytes > 0);
    assert_true(stats(3).messages == 0 && stats(3).bytes == 0 && stats(3).restarts == 0);
    assert_true(stats(2).counts.stored == 2 && stats(3).counts.stored == 1);
    pl_feed_free(feed);
    engine_close(&e);
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

/* One publisher for both ranks: what says nothing of its rank is that of the rank it is posted to.
 */
static void one_stream_over_http(void **state)
{
    (void)state;
    int slots[] = {4, 5};
    pl_errbuf eb;
    feed_open(NULL);
    pl_feed_source s = {.engine = PL_STR("e"),
                        .slots = slots,
                        .ranks_n = 2,
                        .model = PL_STR("m"),
                        .block_tokens = 1,
                        .one_stream = true};
    add(&s);
    assert_int_equal(POST(5, "{\"type\":\"BlockStored\",\"block_hashes\":[1],\"token_ids\":[1],"
                             "\"block_size\":1}"),
                     0);
    assert_int_equal(POST(5,
                          "{\"seq\":0,\"events\":[{\"type\":\"BlockStored\",\"block_hashes\":[2],"
                          "\"token_ids\":[2],\"block_size\":1}]}"),
                     0);
    assert_int_equal(POST(5, "{\"data_parallel_rank\":0,\"events\":[{\"type\":\"BlockStored\","
                             "\"block_hashes\":[3],\"token_ids\":[3],\"block_size\":1}]}"),
                     0);
    WAIT(NULL, double_count(4) == 1);
    assert_true(double_has(5, PL_TIER_DEVICE, 1) && double_has(5, PL_TIER_DEVICE, 2) &&
                double_has(4, PL_TIER_DEVICE, 3));
    /* the numbers are the publisher's, whichever rank it speaks for */
    assert_int_equal(POST(4, "{\"seq\":5,\"events\":[]}"), 0);
    WAIT(NULL, stats(4).gaps == 1);
    assert_true(double_count(4) == 0 && double_count(5) == 0);
    pl_feed_free(feed);
}

/* Ports that are not in the order of the ranks: what is lost with a stream is what it told of. */
static void a_gap_takes_what_its_stream_has_brought(void **state)
{
    (void)state;
    int slots[] = {6, 7, 8};
    pl_errbuf eb;
    feed_open(NULL);
    pl_feed_source s = {.engine = PL_STR("e"),
                        .slots = slots,
                        .ranks_n = 3,
                        .model = PL_STR("m"),
                        .block_tokens = 1};
    add(&s);
    assert_int_equal(POST(6, "{\"seq\":0,\"data_parallel_rank\":1,\"events\":[{\"type\":"
                             "\"BlockStored\",\"block_hashes\":[1],\"token_ids\":[1],"
                             "\"block_size\":1}]}"),
                     0);
    assert_int_equal(POST(7, "{\"seq\":0,\"data_parallel_rank\":0,\"events\":[{\"type\":"
                             "\"BlockStored\",\"block_hashes\":[2],\"token_ids\":[2],"
                             "\"block_size\":1}]}"),
                     0);
    assert_int_equal(POST(8, "{\"seq\":0,\"events\":[{\"type\":\"BlockStored\",\"block_hashes\":"
                             "[3],\"token_ids\":[3],\"block_size\":1}]}"),
                     0);
    WAIT(NULL, double_count(8) == 1);
    assert_true(double_has(7, PL_TIER_DEVICE, 1) && double_has(6, PL_TIER_DEVICE, 2));
    assert_int_equal(POST(6, "{\"seq\":5,\"events\":[]}"), 0);
    WAIT(NULL, stats(6).gaps == 1);
    assert_int_equal(double_count(7), 0);
    assert_true(double_count(6) == 1 && double_count(8) == 1);
    assert_int_equal(POST(8, "{\"seq\":5,\"events\":[]}"), 0);
    WAIT(NULL, stats(8).gaps == 1);
    assert_true(double_count(6) == 1 && double_count(8) == 0);
    assert_int_equal(pl_feed_source_remove(feed, 6), 0); /* all of them */
    WAIT(NULL, double_count(6) == 0);
    pl_feed_free(feed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(events_arrive),
        cmocka_unit_test(a_late_join_and_a_gap_are_replayed),
        cmocka_unit_test(a_gap_beyond_the_buffer_begins_anew),
        cmocka_unit_test(a_restart_clears_that_rank_only),
        cmocka_unit_test(a_reconnect_finds_a_restarted_engine),
        cmocka_unit_test(engines_connect_to_us),
        cmocka_unit_test(a_stranger_at_the_port_changes_nothing),
        cmocka_unit_test(ranks_have_ports_of_their_own),
        cmocka_unit_test(one_stream_for_all_ranks),
        cmocka_unit_test(one_stream_over_http),
        cmocka_unit_test(a_gap_takes_what_its_stream_has_brought),
        cmocka_unit_test(a_snapshot_confirms_or_drops),
        cmocka_unit_test(events_over_http),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
