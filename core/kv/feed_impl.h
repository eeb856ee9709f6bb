/* What feed.c (the thread), feed_stream.c (a rank's stream) and feed_socket.c (ZeroMQ) share.
 * Nobody else includes it. Unless marked otherwise everything belongs to the indexer's thread. */
#ifndef PL_FEED_IMPL_H
#define PL_FEED_IMPL_H

#include <pthread.h>
#include <stdatomic.h>
#include <zmq.h>

#include "kv/feed.h"
#include "policy_abi.h"

enum {
    PL_FEED_TICK_MS = 100,
    PL_FEED_SLICE_MESSAGES = 64, /* of one socket before the others have their turn */
    PL_FEED_FRAMES_MAX = 6       /* of a message; more make it malformed */
};
/* ZeroMQ gives a connection up for good when its peer broke the protocol: this long after it ended
 * without a word of another try, a new socket is opened. */
#define PL_FEED_GIVEN_UP_NS (PL_TRUST_S / 2)
#define PL_FEED_RETRY_NS    (5 * PL_TRUST_S) /* to open a socket that could not be opened */

typedef struct pl_feed_stream pl_feed_stream;
typedef struct pl_feed_link pl_feed_link;

/* --- sockets (feed_socket.c) --- */

typedef enum pl_feed_socket_kind {
    PL_FEED_SUB,
    PL_FEED_MONITOR, /* of a SUB: connected, disconnected */
    PL_FEED_ASK      /* replay or snapshot */
} pl_feed_socket_kind;

/* A ZeroMQ socket and its place among what epoll watches. Its descriptor tells of changes only, so
 * a socket that may have more is kept in a list until it is found empty. */
typedef struct pl_feed_socket {
    pl_feed_socket_kind kind;
    void *z;                /* NULL: closed, freed at the end of the turn */
    pl_feed_link *link;     /* SUB, MONITOR */
    pl_feed_stream *stream; /* ASK */
    bool ready;             /* in the list */
    struct pl_feed_socket *next_ready, *next_dead;
} pl_feed_socket;

/* A SUB socket and the streams that it may bring: one, or several by topic when bound. */
struct pl_feed_link {
    bool bind;
    char endpoint[256];
    char actual[256]; /* with the port that was given to it */
    pl_feed_socket *sub, *monitor;
    pl_feed_stream *streams;
    pl_feed_link *next;
    bool connected;
    int peers, failing; /* bind: publishers that are connected; others that came no further */
    uint64_t lost_at;   /* the connection ended then; 0: it did not */
    bool retrying;      /* ZeroMQ says that it connects again */
};

/* A message's frames. */
typedef struct pl_feed_frames {
    zmq_msg_t part[PL_FEED_FRAMES_MAX];
    int n;
    bool too_many;
} pl_feed_frames;

int pl_feed_link_open(pl_feed *f, pl_feed_stream *s); /* PL_EIO: s->error says why */
void pl_feed_link_close(pl_feed *f, pl_feed_stream *s);
int pl_feed_ask_open(pl_feed *f, pl_feed_stream *s);
void pl_feed_ask_close(pl_feed *f, pl_feed_stream *s);
void pl_feed_socket_mark(pl_feed *f, pl_feed_socket *k); /* to be looked at */
void pl_feed_sockets_turn(pl_feed *f);                   /* a slice of each that is marked */
void pl_feed_sockets_bury(pl_feed *f);

/* --- streams (feed_stream.c) --- */

typedef struct pl_feed_held {
    struct pl_feed_held *next;
    zmq_msg_t payload;
    uint64_t seq, print;
    size_t bytes; /* of the payload and of this */
    int rank;     /* that it is about where it names none */
} pl_feed_held;

typedef struct pl_feed_origin { /* a source, as it was added */
    struct pl_feed_origin *next;
    uint64_t id;
    char engine[128];
    uint32_t generation;
    pl_feed_mode mode;
    char endpoint[256], replay[256], snapshot[256];
    bool one_stream;
    pl_apply_target target;
    int streams_n; /* 1, or one per rank */
    pl_feed_stream *streams;
    char model[PL_APPLY_NAME_MAX], topic[PL_APPLY_NAME_MAX];
    size_t topic_n;
} pl_feed_origin;

struct pl_feed_stream {
    pl_feed_origin *origin;
    int rank;
    uint64_t fed[PL_MAX_WORKERS / 64]; /* ranks, by bit: those that its batches have named */
    pl_trust trust;
    pl_feed_link *link;
    pl_feed_stream *next_in_link;
    bool shut; /* nothing is received: it is cut off */
    bool wants_ask;
    pl_feed_socket *ask;
    uint64_t answer_bytes; /* of what was asked for, so far */
    uint64_t *names;       /* of a snapshot that arrives */
    size_t names_n, names_cap;
    uint64_t snapshot_resume, snapshot_count;
    bool snapshot_headed;
    pl_feed_held *held, **held_tail;
    uint64_t held_n, held_bytes, held_dropped;
    uint64_t messages, bytes, disconnects;
    uint64_t retry_at; /* to open the link */
    double lag;
    uint64_t last_event_ns;
    pl_trust_state told; /* in the log */
    uint64_t told_events;
    bool told_nothing_indexed;
    unsigned long log_state[2];
    char error[128];
};

void pl_feed_stream_init(pl_feed *f, pl_feed_stream *s, pl_feed_origin *o, int rank);
void pl_feed_stream_open(pl_feed *f, pl_feed_stream *s);
void pl_feed_stream_close(pl_feed *f, pl_feed_stream *s);   /* clears its ranks */
void pl_feed_stream_abandon(pl_feed *f, pl_feed_stream *s); /* leaves the index as it is */
/* A message of the SUB socket, and of the ASK socket. Frames may be moved out of fr. */
void pl_feed_stream_live(pl_feed *f, pl_feed_stream *s, pl_feed_frames *fr);
void pl_feed_stream_answer(pl_feed *f, pl_feed_stream *s, pl_feed_frames *fr);
/* A batch from pl_feed_ingest, of that rank unless it names another. */
void pl_feed_stream_ingest(pl_feed *f, pl_feed_stream *s, int rank, const void *p, size_t n);
void pl_feed_stream_connected(pl_feed *f, pl_feed_stream *s, bool connected);
void pl_feed_stream_tick(pl_feed *f, pl_feed_stream *s);
/* Copies its figures to where pl_feed_stats_of finds them. */
void pl_feed_stream_publish(pl_feed *f, pl_feed_stream *s);
/* Which stream of a link a topic is for; NULL: none. */
pl_feed_stream *pl_feed_stream_by_topic(pl_feed_link *l, pl_str topic);

/* --- the feed (feed.c) --- */

typedef struct pl_feed_slot {
    uint64_t owner; /* pl_feed_origin.id; 0: none. Under the lock, like all here. */
    bool has_stats;
    uint64_t since_ns, last_event_ns; /* 0: never; the readers make ages of them */
    pl_feed_stats stats;
} pl_feed_slot;

typedef struct pl_feed_mail pl_feed_mail;

struct pl_feed {
    pl_index *index;
    pl_clock clock;
    pl_feed_limits limits;
    pl_trust_options trust;
    pl_apply *apply;
    void *zmq;
    int epoll, event; /* event: descriptor that wakes the thread */
    pthread_t thread;
    bool started; /* by the thread that starts and stops */
    /* under the lock */
    pthread_mutex_t lock;
    pl_feed_mail *mail, **mail_tail;
    size_t mail_bytes;
    uint64_t next_id;
    bool stop;
    pl_feed_slot *slots[PL_MAX_WORKERS]; /* allocated at first use, kept */
    /* any thread */
    _Atomic uint64_t used_ns[PL_MAX_WORKERS]; /* first touch since the last event; 0: none */
    /* the thread */
    pl_feed_origin *origins;
    pl_feed_link *links;
    pl_feed_socket *ready, **ready_tail, *dead;
    int asks;
    uint64_t held_bytes;
    uint64_t monitors; /* opened so far: names their addresses */
};

static inline uint64_t pl_feed_now(const pl_feed *f)
{
    return pl_clock_now_ns(f->clock);
}

#endif
