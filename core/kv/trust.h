/* How far one stream of KV events can be believed: a state machine per publisher, that is per
 * (worker, rank). It says of each batch whether to apply it, and when to clear, to ask for a replay
 * and to cut the publisher off. Pure: time comes in, actions go out as PL_DO_ bits; the caller
 * (stream.c) does them, in the order of the bits.
 *
 * - new: nothing came yet
 * - live: every batch since the known beginning was applied
 * - gap: batches are missing, or the engine may have restarted; a replay is wanted
 * - replaying: it is asked for; what comes live is held
 * - reset: what was missing could not be had: the rank was cleared and is built up again; live with
 *   the next batch in order
 * - stale: the engine is used but says nothing, or cannot be reached: entries are kept
 * - untrusted: it sends garbage, floods, or restarts without end: cleared and cut off for a quiet
 *   time
 *
 * A number that goes back, or comes again with other contents, is an engine that restarted: so the
 * contents of the last PL_TRUST_PRINTS batches are remembered by a fingerprint. A replay begins at
 * the last batch that is known, not behind it: its fingerprint tells whether the engine that
 * answers is the one that was heard. */
#ifndef PL_TRUST_H
#define PL_TRUST_H

#include <stdbool.h>
#include <stdint.h>

#define PL_TRUST_PRINTS 256

#define PL_TRUST_STATE_MAP(XX)                                                                     \
    XX(NEW, "new")                                                                                 \
    XX(LIVE, "live")                                                                               \
    XX(GAP, "gap")                                                                                 \
    XX(REPLAYING, "replaying")                                                                     \
    XX(RESET, "reset")                                                                             \
    XX(STALE, "stale")                                                                             \
    XX(UNTRUSTED, "untrusted")

typedef enum pl_trust_state {
#define XX(name, text) PL_TRUST_##name,
    PL_TRUST_STATE_MAP(XX)
#undef XX
} pl_trust_state;
const char *pl_trust_state_name(pl_trust_state s);

/* What the caller has to do, in this order. Without APPLY and HOLD the batch is dropped. */
enum {
    PL_DO_CLEAR = 1 << 0,    /* the rank has nothing any more */
    PL_DO_FORGET = 1 << 1,   /* free what is held */
    PL_DO_STOP = 1 << 2,     /* end the replay or snapshot that runs */
    PL_DO_SHUT = 1 << 3,     /* receive nothing from this publisher */
    PL_DO_OPEN = 1 << 4,     /* receive again */
    PL_DO_APPLY = 1 << 5,    /* this batch */
    PL_DO_HOLD = 1 << 6,     /* keep this batch, at the end */
    PL_DO_REPLAY = 1 << 7,   /* ask for batches from ask_from on, then call pl_trust_asked */
    PL_DO_SNAPSHOT = 1 << 8, /* ask for a snapshot, then call pl_trust_asked */
    PL_DO_FLUSH = 1 << 9     /* hand what is held to pl_trust_held, in order */
};

typedef struct pl_trust_options {
    bool replay, snapshot;    /* the engine offers it */
    uint64_t stale_ns;        /* used this long without a word: stale; 0: never */
    uint64_t ask_idle_ns;     /* an answer's next message within */
    uint64_t ask_total_ns;    /* all of an answer within */
    unsigned ask_attempts;    /* in a row without a new batch */
    uint64_t ask_cooldown_ns; /* after that many */
    unsigned bad_max; /* malformed messages, or restarts, in bad_window_ns; above it: untrusted */
    uint64_t bad_window_ns;
    uint64_t bytes_per_second_max; /* above it: a flood; 0: no limit */
    uint64_t batches_per_second_max;
    uint64_t quiet_ns; /* untrusted for; doubles each time up to */
    uint64_t quiet_max_ns;
} pl_trust_options;
#define PL_TRUST_S 1000000000ull /* ns */
#define PL_TRUST_DEFAULTS                                                                          \
    {                                                                                              \
        .stale_ns = 60 * PL_TRUST_S, .ask_idle_ns = 2 * PL_TRUST_S,                                \
        .ask_total_ns = 120 * PL_TRUST_S, .ask_attempts = 3, .ask_cooldown_ns = 30 * PL_TRUST_S,   \
        .bad_max = 8, .bad_window_ns = 10 * PL_TRUST_S, .bytes_per_second_max = 256u << 20,        \
        .batches_per_second_max = 50000, .quiet_ns = 30 * PL_TRUST_S,                              \
        .quiet_max_ns = 600 * PL_TRUST_S                                                           \
    }

typedef enum pl_trust_ask { PL_ASK_NOTHING, PL_ASK_REPLAY, PL_ASK_SNAPSHOT } pl_trust_ask;

typedef struct pl_trust {
    pl_trust_options o;
    pl_trust_state state;
    uint64_t since_ns; /* in this state */
    /* sequence: valid when known */
    bool known;
    bool complete; /* everything since the engine's first batch, or since it was empty */
    uint64_t next; /* the batch that is to be applied next */
    bool has_last; /* last_print is that of batch next - 1 */
    uint64_t last_print;
    bool heard;         /* something came live */
    uint64_t last_live; /* its number */
    uint64_t epoch;     /* of the publisher's lifetime, where it tells; 0: it does not */
    /* what is asked for */
    pl_trust_ask ask;
    bool asked;        /* sent, not only wanted */
    bool check;        /* nothing is known to be missing */
    bool brought;      /* the answer had a batch that was not known */
    bool verify;       /* the first answer must be the batch ask_from, as it is known */
    uint64_t ask_from; /* a sequence number */
    uint64_t ask_idle_at, ask_total_at, ask_not_before;
    unsigned attempts; /* without a new batch */
    /* abuse */
    uint64_t bad_window_at, restart_window_at, rate_window_at, rate_bytes, rate_batches,
        quiet_for_ns, quiet_until, trusted_at;
    unsigned bad_in_window, restarts_in_window;
    uint64_t unreachable_at; /* the connection is lost and nothing came since then; 0: it is not */
    bool lost;               /* the connection is; what still comes may have been on its way */
    bool unsure; /* it was, and nothing was asked since it is back: it may be another engine */
    /* counters */
    uint64_t gaps, missed, duplicates, restarts, resets, replays, replays_failed, bad, floods,
        snapshots;
    struct {
        uint64_t seq, print;
        bool valid;
    } prints[PL_TRUST_PRINTS]; /* by seq modulo */
} pl_trust;

void pl_trust_init(pl_trust *t, const pl_trust_options *o, uint64_t now_ns);

/* The publisher is being received. */
unsigned pl_trust_start(pl_trust *t, uint64_t now_ns);

/* A batch came live. print: a hash of its payload; bytes: its size; epoch: 0 when it is not told.
 */
unsigned pl_trust_live(pl_trust *t, uint64_t now_ns, uint64_t seq, uint64_t print, uint64_t epoch,
                       uint64_t bytes);
/* A batch that was held is looked at again. HOLD: keep it and all behind it. */
unsigned pl_trust_held(pl_trust *t, uint64_t now_ns, uint64_t seq, uint64_t print);
/* A batch without a number came (over HTTP). */
unsigned pl_trust_unnumbered(pl_trust *t, uint64_t now_ns, uint64_t bytes);
/* The batch that was to be applied is no batch (numbered), or a message is none at all. */
unsigned pl_trust_bad(pl_trust *t, uint64_t now_ns, bool numbered, uint64_t seq);
/* What it answers has no end. */
unsigned pl_trust_flood(pl_trust *t, uint64_t now_ns);
/* The engine says that it has nothing any more; the batch was applied. */
void pl_trust_emptied(pl_trust *t);

/* The replay or snapshot was sent for. */
void pl_trust_asked(pl_trust *t, uint64_t now_ns);
unsigned pl_trust_replayed(pl_trust *t, uint64_t now_ns, uint64_t seq, uint64_t print);
unsigned pl_trust_replay_end(pl_trust *t, uint64_t now_ns);
/* A snapshot was applied; live batches go on with resume_seq. */
unsigned pl_trust_snapshot_end(pl_trust *t, uint64_t now_ns, uint64_t resume_seq);
/* Another message of a snapshot came. */
void pl_trust_snapshot_goes_on(pl_trust *t, uint64_t now_ns);
/* What was asked for cannot be had. */
unsigned pl_trust_ask_failed(pl_trust *t, uint64_t now_ns);

/* The connection was lost; is there (again). */
void pl_trust_lost(pl_trust *t, uint64_t now_ns);
unsigned pl_trust_connected(pl_trust *t, uint64_t now_ns);

/* From time to time (a few times a second). used_since_ns: when the router first sent the worker
 * something after the last event; 0: it did not. */
unsigned pl_trust_tick(pl_trust *t, uint64_t now_ns, uint64_t used_since_ns);

#endif
