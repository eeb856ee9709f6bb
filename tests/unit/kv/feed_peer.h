/* Engines on real sockets and a feed that listens to them, for tests of the feed. Include it in the
 * test's only source file: it brings the index's double with it. Waiting is always for a condition,
 * never for a time. */
#ifndef PL_TEST_FEED_PEER_H
#define PL_TEST_FEED_PEER_H

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

#ifdef __SANITIZE_THREAD__
/* As in tests/tsan.supp: libzmq is not instrumented, its queues show no order. */
const char *__tsan_default_suppressions(void);
const char *__tsan_default_suppressions(void)
{
    return "called_from_lib:libzmq.so\nrace:libzmq.so\n";
}
#endif

#define MS 1000000ull

enum { BUFFER = 512 };

/* --- an engine --- */

typedef struct engine {
    void *ctx, *pub, *router;
    char endpoint[256], replay[256];
    const char *topic;
    size_t topic_n;
    pl_buf batch[BUFFER]; /* of this lifetime, by number */
    uint64_t next;
    uint64_t first_kept; /* older ones are not replayed */
    bool new_style;      /* replays with the topic before the number */
} engine;

static inline void *socket_on(engine *e, int type, const char *address, char out[256])
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
    size_t n = 256;
    assert_int_equal(zmq_getsockopt(z, ZMQ_LAST_ENDPOINT, out, &n), 0);
    return z;
}

static inline void engine_open(engine *e)
{
    *e = (engine){.ctx = zmq_ctx_new(), .topic = ""};
    e->pub = socket_on(e, ZMQ_XPUB, "tcp://127.0.0.1:*", e->endpoint);
    e->router = socket_on(e, ZMQ_ROUTER, "tcp://127.0.0.1:*", e->replay);
    assert_true(e->pub && e->router);
}

static inline void engine_forget(engine *e)
{
    for (int i = 0; i < BUFFER; i++)
        pl_buf_free(&e->batch[i]);
    e->next = e->first_kept = 0;
}

static inline void engine_close(engine *e)
{
    engine_forget(e);
    zmq_close(e->pub);
    zmq_close(e->router);
    zmq_ctx_term(e->ctx);
}

/* Until a subscriber is there: XPUB shows its subscription. */
static inline void engine_wait(engine *e)
{
    char frame[64];
    do
        assert_true(zmq_recv(e->pub, frame, sizeof frame, 0) >= 1);
    while (frame[0] != 1);
}

static inline void be64(uint64_t v, uint8_t out[8])
{
    for (int i = 0; i < 8; i++)
        out[i] = (uint8_t)(v >> 8 * (7 - i));
}

static inline void engine_send(engine *e, uint64_t seq)
{
    uint8_t number[8];
    be64(seq, number);
    assert_true(zmq_send(e->pub, e->topic, e->topic_n, ZMQ_SNDMORE) >= 0);
    assert_true(zmq_send(e->pub, number, 8, ZMQ_SNDMORE) >= 0);
    assert_true(zmq_send(e->pub, e->batch[seq].p, e->batch[seq].n, 0) >= 0);
}

/* The next batch: block `name` of one token, behind `parent` (0: none). lost: not sent. */
static inline void engine_store(engine *e, uint64_t name, uint64_t parent, bool lost)
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
static inline bool engine_answer(engine *e)
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

static inline void feed_open(const pl_feed_options *o)
{
    double_reset();
    pl_feed_options defaults = PL_FEED_OPTIONS;
    defaults.known = &double_known;
    assert_int_equal(pl_feed_new(o ? o : &defaults, &feed), 0);
    assert_int_equal(pl_feed_start(feed, NULL), 0);
}

static inline pl_feed_source source(const engine *e, const int *slot, bool replay)
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

static inline void add(const pl_feed_source *s)
{
    pl_errbuf eb;
    if (pl_feed_source_add(feed, s, &eb))
        fail_msg("%s", eb.text);
}

static inline pl_feed_stats stats(int slot)
{
    pl_feed_stats st;
    assert_int_equal(pl_feed_stats_of(feed, slot, &st), 0);
    return st;
}

static inline double seconds(void)
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

static inline bool in_state(int slot, pl_trust_state s)
{
    return stats(slot).state == s;
}

#endif
