/* One rank's stream of KV events: what its messages mean, and what its trust (trust.h) says is to
 * be done about them. Called by feed.c and feed_socket.c on the indexer's thread. A stream belongs
 * to its origin; it owns its trust, the batches it holds, and the snapshot that is arriving. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/log.h"
#include "kv/feed_impl.h"
#include "kv/msgpack.h"

#define NO_SEQ UINT64_MAX

void pl_feed_stream_init(pl_feed *f, pl_feed_stream *s, pl_feed_origin *o, int rank)
{
    pl_trust_options t = f->trust;
    t.replay = o->replay[0] != 0;
    t.snapshot = o->snapshot[0] != 0;
    *s = (pl_feed_stream){.origin = o, .rank = rank, .lag = -1};
    s->held_tail = &s->held;
    pl_trust_init(&s->trust, &t, pl_feed_now(f));
}

/* --- the log: once per change, never per batch --- */

static void tell(pl_feed_stream *s)
{
    pl_trust_state now = s->trust.state;
    const pl_feed_origin *o = s->origin;
    const pl_trust *t = &s->trust;
    /* every repair goes through gap and replaying: what matters is how it ends */
    bool passing = now == PL_TRUST_GAP || now == PL_TRUST_REPLAYING;
    uint64_t events = t->gaps + t->restarts + t->resets;
    if (!passing && (now != s->told || events != s->told_events) && pl_log_allow(s->log_state, 2)) {
        bool bad = now == PL_TRUST_RESET || now == PL_TRUST_STALE || now == PL_TRUST_UNTRUSTED;
        pl_log(bad || events != s->told_events ? PL_LOG_WARN : PL_LOG_INFO, "kv_stream",
               "KV events of %s/%d: %s (was %s); last batch %lld; so far %llu gaps, %llu restarts, "
               "%llu resets, %llu bad messages",
               o->engine, s->rank, pl_trust_state_name(now), pl_trust_state_name(s->told),
               t->known ? (long long)t->next - 1 : -1, (unsigned long long)t->gaps,
               (unsigned long long)t->restarts, (unsigned long long)t->resets,
               (unsigned long long)t->bad);
        s->told = now;
        s->told_events = events;
    }
    const pl_apply_rank *r = &o->target.ranks[s->rank];
    const pl_apply_counts *c = &r->counts;
    if (r->landed)
        s->told_nothing_indexed = false;
    if (!s->told_nothing_indexed && !r->landed && r->tried >= 8 && pl_log_allow(s->log_state, 2)) {
        s->told_nothing_indexed = true;
        pl_log(PL_LOG_WARN, "kv_nothing_indexed",
               "KV events of %s/%d: %llu came and not one block was indexed (so far by reason: "
               "block size %llu, counts %llu, sparse groups %llu, unknown parents %llu, without "
               "tokens %llu, malformed %llu, unknown types %llu, unknown ranks %llu, other reasons "
               "%llu)",
               o->engine, s->rank, (unsigned long long)r->tried,
               (unsigned long long)c->bad_block_size, (unsigned long long)c->bad_counts,
               (unsigned long long)c->sparse, (unsigned long long)c->unknown_parents,
               (unsigned long long)c->unresolved, (unsigned long long)c->bad_events,
               (unsigned long long)c->unknown_types, (unsigned long long)c->unknown_ranks,
               (unsigned long long)(c->unknown_media + c->unnamed_lora + c->refused + c->bad_names +
                                    c->partial));
    }
}

/* --- what trust asks for --- */

static void forget_one(pl_feed *f, pl_feed_stream *s)
{
    pl_feed_held *h = s->held;
    s->held = h->next;
    if (!s->held)
        s->held_tail = &s->held;
    s->held_n--;
    s->held_bytes -= h->bytes;
    f->held_bytes -= h->bytes;
    zmq_msg_close(&h->payload);
    free(h);
}

/* ZeroMQ reads into pieces of so many bytes; a message in one of them keeps all of it. */
#define SHARED_BYTES 8192

static bool keep(zmq_msg_t *to, zmq_msg_t *payload)
{
    size_t n = zmq_msg_size(payload);
    if (n >= SHARED_BYTES) {
        zmq_msg_init(to);
        return zmq_msg_move(to, payload) == 0;
    }
    if (zmq_msg_init_size(to, n))
        return false;
    if (n)
        memcpy(zmq_msg_data(to), zmq_msg_data(payload), n);
    return true;
}

/* What finds no room is a gap later, and replayed then. */
static void hold(pl_feed *f, pl_feed_stream *s, int rank, zmq_msg_t *payload, uint64_t seq,
                 uint64_t print)
{
    size_t n = zmq_msg_size(payload) + sizeof(pl_feed_held);
    pl_feed_held *h = f->held_bytes + n > f->limits.held_bytes ? NULL : malloc(sizeof *h);
    if (!h || !keep(&h->payload, payload)) {
        free(h);
        s->held_dropped++;
        return;
    }
    h->next = NULL;
    h->seq = seq;
    h->print = print;
    h->bytes = n;
    h->rank = rank;
    *s->held_tail = h;
    s->held_tail = &h->next;
    s->held_n++;
    s->held_bytes += n;
    f->held_bytes += n;
}

static bool has_fed(const pl_feed_stream *s, int rank)
{
    return s->fed[rank / 64] >> rank % 64 & 1;
}

/* What this stream has brought: its own rank, unless batches of another stream name it, and those
 * that its batches name. */
static void clear_ranks(pl_feed *f, pl_feed_stream *s)
{
    const pl_feed_origin *o = s->origin;
    for (int i = 0; i < o->target.ranks_n; i++) {
        bool clear = o->streams_n == 1 || i == s->rank;
        for (int k = 0; clear && k < o->streams_n; k++)
            clear = &o->streams[k] == s || !has_fed(&o->streams[k], i);
        if (clear || has_fed(s, i))
            pl_apply_clear(f->apply, &o->target.ranks[i]);
    }
    memset(s->fed, 0, sizeof s->fed);
}

static void stop_asking(pl_feed *f, pl_feed_stream *s)
{
    s->wants_ask = false;
    if (s->ask) {
        pl_feed_ask_close(f, s);
        f->asks--;
    }
    free(s->names);
    s->names = NULL;
    s->names_n = s->names_cap = 0;
    s->snapshot_headed = false;
}

static void act(pl_feed *f, pl_feed_stream *s, unsigned what, int rank, zmq_msg_t *payload,
                uint64_t seq, uint64_t print);
static void act_only(pl_feed *f, pl_feed_stream *s, unsigned what);

/* Asks now, or when another has ended: then the tick finds it. */
static void ask(pl_feed *f, pl_feed_stream *s)
{
    stop_asking(f, s);
    if (f->asks >= f->limits.asks) {
        s->wants_ask = true;
        return;
    }
    uint64_t now = pl_feed_now(f);
    if (pl_feed_ask_open(f, s)) {
        if (pl_log_allow(s->log_state, 2))
            pl_log(PL_LOG_WARN, "kv_stream", "no replay can be asked of %s/%d: %s",
                   s->origin->engine, s->rank, zmq_strerror(zmq_errno()));
        pl_trust_asked(&s->trust, now);
        act_only(f, s, pl_trust_ask_failed(&s->trust, now));
        return;
    }
    f->asks++;
    s->answer_bytes = 0;
    pl_trust_asked(&s->trust, now);
}

/* The first batch that is held is looked at until none is left or one has to wait. */
static void flush(pl_feed *f, pl_feed_stream *s)
{
    while (s->held) {
        pl_feed_held *h = s->held;
        unsigned what = pl_trust_held(&s->trust, pl_feed_now(f), h->seq, h->print);
        if (what & PL_DO_HOLD) {
            act_only(f, s, what & ~(unsigned)PL_DO_HOLD);
            return;
        }
        zmq_msg_t payload;
        uint64_t seq = h->seq, print = h->print;
        int rank = h->rank;
        zmq_msg_init(&payload);
        zmq_msg_move(&payload, &h->payload);
        forget_one(f, s);
        act(f, s, what, rank, &payload, seq, print);
        zmq_msg_close(&payload);
    }
}

static void apply(pl_feed *f, pl_feed_stream *s, int rank, const void *p, size_t n, uint64_t seq)
{
    pl_applied done;
    s->origin->target.fed = s->fed;
    int rc = pl_apply_batch(f->apply, &s->origin->target, rank, p, n, &done);
    if (rc) {
        act_only(f, s, pl_trust_bad(&s->trust, pl_feed_now(f), seq != NO_SEQ, seq));
        return;
    }
    if (done.emptied)
        pl_trust_emptied(&s->trust);
    if (done.ts > 0 && s->trust.ask == PL_ASK_NOTHING) { /* what is replayed is as old as it is */
        double lag = pl_wall_seconds() - done.ts;
        s->lag = lag > 0 ? lag : 0;
    }
}

static void act(pl_feed *f, pl_feed_stream *s, unsigned what, int rank, zmq_msg_t *payload,
                uint64_t seq, uint64_t print)
{
    if (what & PL_DO_CLEAR)
        clear_ranks(f, s);
    if (what & PL_DO_FORGET)
        while (s->held)
            forget_one(f, s);
    if (what & PL_DO_STOP)
        stop_asking(f, s);
    if (what & PL_DO_SHUT) {
        s->shut = true;
        pl_feed_link_close(f, s);
    }
    if (what & PL_DO_OPEN) {
        s->shut = false;
        s->retry_at = 0;
        if (s->origin->mode != PL_FEED_INGEST && pl_feed_link_open(f, s))
            s->retry_at = pl_feed_now(f) + PL_FEED_RETRY_NS;
    }
    if ((what & PL_DO_APPLY) && payload)
        apply(f, s, rank, zmq_msg_data(payload), zmq_msg_size(payload), seq);
    if ((what & PL_DO_HOLD) && payload)
        hold(f, s, rank, payload, seq, print);
    if (what & (PL_DO_REPLAY | PL_DO_SNAPSHOT))
        ask(f, s);
    if (what & PL_DO_FLUSH)
        flush(f, s);
}

static void act_only(pl_feed *f, pl_feed_stream *s, unsigned what)
{
    act(f, s, what, s->rank, NULL, NO_SEQ, 0);
}

/* Something was heard of the stream. */
static void heard(pl_feed *f, pl_feed_stream *s)
{
    const pl_feed_origin *o = s->origin;
    s->last_event_ns = pl_feed_now(f);
    int first = o->streams_n == 1 ? 0 : s->rank;
    int end = o->streams_n == 1 ? o->target.ranks_n : s->rank + 1;
    for (int i = first; i < end; i++)
        atomic_store_explicit(&f->used_ns[o->target.ranks[i].slot], 0, memory_order_relaxed);
}

/* --- life --- */

void pl_feed_stream_open(pl_feed *f, pl_feed_stream *s)
{
    heard(f, s); /* forget how long a former owner of the slots was used */
    s->last_event_ns = 0;
    if (s->origin->mode == PL_FEED_INGEST)
        return;
    if (pl_feed_link_open(f, s)) {
        s->retry_at = pl_feed_now(f) + PL_FEED_RETRY_NS;
        pl_log(PL_LOG_ERROR, "kv_stream", "KV events of %s/%d cannot be received: %s",
               s->origin->engine, s->rank, s->error);
    }
    act_only(f, s, pl_trust_start(&s->trust, pl_feed_now(f)));
    pl_feed_stream_publish(f, s);
}

void pl_feed_stream_close(pl_feed *f, pl_feed_stream *s)
{
    act_only(f, s, PL_DO_CLEAR | PL_DO_FORGET | PL_DO_STOP | PL_DO_SHUT);
}

void pl_feed_stream_abandon(pl_feed *f, pl_feed_stream *s)
{
    act_only(f, s, PL_DO_FORGET | PL_DO_STOP | PL_DO_SHUT);
}

/* --- messages --- */

static pl_str frame(pl_feed_frames *fr, int i)
{
    return (pl_str){zmq_msg_data(&fr->part[i]), zmq_msg_size(&fr->part[i])};
}

/* 8 bytes, big-endian. */
static bool read_seq(pl_str s, uint64_t *seq)
{
    if (s.n != 8)
        return false;
    *seq = 0;
    for (int i = 0; i < 8; i++)
        *seq = *seq << 8 | (uint8_t)s.p[i];
    return true;
}

static void malformed(pl_feed *f, pl_feed_stream *s)
{
    act_only(f, s, pl_trust_bad(&s->trust, pl_feed_now(f), false, 0));
    tell(s);
}

/* SGLang puts the publisher's lifetime behind the topic: \0sgl-kv-epoch=TEXT, and in a snapshot's
 * barrier \0sgl-kv-snapshot=ID behind that. 0: it is not told. */
static uint64_t epoch_of(pl_str topic, pl_str *bare)
{
    static const char mark[] = "\0sgl-kv-epoch=";
    const size_t mark_n = sizeof mark - 1;
    *bare = topic;
    const char *at = topic.n ? memmem(topic.p, topic.n, mark, mark_n) : NULL;
    if (!at)
        return 0;
    *bare = (pl_str){topic.p, (size_t)(at - topic.p)};
    pl_str text = {at + mark_n, topic.n - bare->n - mark_n}, epoch;
    if (text.n == 0)
        return 0;
    pl_str_cut(&text, '\0', &epoch);
    uint64_t h = XXH3_64bits(epoch.p, epoch.n);
    return h ? h : 1;
}

pl_feed_stream *pl_feed_stream_by_topic(pl_feed_link *l, pl_str topic)
{
    pl_str bare;
    epoch_of(topic, &bare);
    pl_feed_stream *best = NULL;
    for (pl_feed_stream *s = l->streams; s; s = s->next_in_link) {
        pl_str own = {s->origin->topic, s->origin->topic_n};
        if (pl_str_starts(bare, own) && (!best || own.n > best->origin->topic_n))
            best = s;
    }
    return best;
}

void pl_feed_stream_live(pl_feed *f, pl_feed_stream *s, pl_feed_frames *fr)
{
    uint64_t seq;
    if (s->shut)
        return;
    uint64_t bytes = 0;
    s->messages++;
    for (int i = 0; i < fr->n; i++)
        bytes += zmq_msg_size(&fr->part[i]);
    s->bytes += bytes;
    if (fr->n != 3 || fr->too_many || !read_seq(frame(fr, 1), &seq) || seq == NO_SEQ) {
        malformed(f, s);
        return;
    }
    pl_str payload = frame(fr, 2), bare;
    uint64_t epoch = epoch_of(frame(fr, 0), &bare);
    uint64_t print = XXH3_64bits(payload.p, payload.n);
    heard(f, s);
    act(f, s, pl_trust_live(&s->trust, pl_feed_now(f), seq, print, epoch, bytes), s->rank,
        &fr->part[2], seq, print);
    tell(s);
}

void pl_feed_stream_ingest(pl_feed *f, pl_feed_stream *s, int rank, const void *p, size_t n)
{
    s->messages++;
    s->bytes += n;
    if (s->shut)
        return;
    heard(f, s);
    /* a batch from JSON is a map that may have a number */
    uint64_t seq = NO_SEQ;
    pl_mp c = pl_mp_of(p, n);
    pl_mp_item head, key, v;
    if (pl_mp_read(&c, &head) == 0 && head.type == PL_MP_MAP)
        for (uint32_t i = 0; i < head.n; i++) {
            if (pl_mp_read(&c, &key) || pl_mp_skip_inside(&c, &key) || pl_mp_read(&c, &v) ||
                pl_mp_skip_inside(&c, &v))
                break;
            if (key.type == PL_MP_STR && pl_str_eq(key.s, PL_STR("seq")) && v.type == PL_MP_UINT &&
                v.u < NO_SEQ)
                seq = v.u;
        }
    uint64_t now = pl_feed_now(f);
    if (seq == NO_SEQ) {
        unsigned what = pl_trust_unnumbered(&s->trust, now, n);
        act_only(f, s, what & ~(unsigned)PL_DO_APPLY);
        if (what & PL_DO_APPLY)
            apply(f, s, rank, p, n, NO_SEQ);
    } else {
        zmq_msg_t m; /* a copy: it may have to be held */
        if (zmq_msg_init_size(&m, n) == 0) {
            uint64_t print = XXH3_64bits(p, n);
            memcpy(zmq_msg_data(&m), p, n);
            act(f, s, pl_trust_live(&s->trust, now, seq, print, 0, n), rank, &m, seq, print);
            zmq_msg_close(&m);
        } else {
            s->held_dropped++; /* the next number shows the gap */
        }
    }
    tell(s);
}

/* --- answers --- */

static bool add_name(pl_feed *f, pl_feed_stream *s, uint64_t name)
{
    if (s->names_n == s->names_cap) {
        size_t cap = s->names_cap ? s->names_cap * 2 : 1024;
        uint64_t *names =
            s->names_n < f->limits.snapshot_blocks ? realloc(s->names, cap * sizeof *names) : NULL;
        if (!names)
            return false;
        s->names = names;
        s->names_cap = cap;
    }
    s->names[s->names_n++] = name;
    return true;
}

static bool name_of(const pl_mp_item *v, uint64_t *name)
{
    *name = v->type == PL_MP_UINT ? v->u : (uint64_t)v->i;
    return v->type == PL_MP_UINT || v->type == PL_MP_INT;
}

/* [[parent or nil, [hash, ...]], ...] */
static bool take_chunk(pl_feed *f, pl_feed_stream *s, pl_str chunk)
{
    pl_mp c = pl_mp_of(chunk.p, chunk.n);
    pl_mp_item list, record, parent, names, v;
    uint64_t name;
    if (pl_mp_read(&c, &list) || list.type != PL_MP_ARRAY)
        return false;
    for (uint32_t i = 0; i < list.n; i++) {
        if (pl_mp_read(&c, &record) || record.type != PL_MP_ARRAY || record.n < 2 ||
            pl_mp_read(&c, &parent) || pl_mp_skip_inside(&c, &parent) || pl_mp_read(&c, &names) ||
            names.type != PL_MP_ARRAY)
            return false;
        for (uint32_t j = 0; j < names.n; j++)
            if (pl_mp_read(&c, &v) || !name_of(&v, &name) || !add_name(f, s, name))
                return false;
        if (pl_mp_skip(&c, record.n - 2))
            return false;
        s->snapshot_count--;
    }
    return true;
}

/* [version 1, epoch, rank, resume_seq, barrier_seq, barrier_id, record_count] */
static bool take_header(pl_feed_stream *s, pl_str header)
{
    pl_mp c = pl_mp_of(header.p, header.n);
    pl_mp_item head, v[7];
    if (s->snapshot_headed || pl_mp_read(&c, &head) || head.type != PL_MP_ARRAY || head.n < 7)
        return false;
    for (int i = 0; i < 7; i++)
        if (pl_mp_read(&c, &v[i]) || pl_mp_skip_inside(&c, &v[i]))
            return false;
    if (v[0].type != PL_MP_UINT || v[0].u != 1 || v[3].type != PL_MP_UINT ||
        v[6].type != PL_MP_UINT)
        return false;
    s->snapshot_headed = true;
    s->snapshot_resume = v[3].u;
    s->snapshot_count = v[6].u;
    return true;
}

/* 1: all of it was taken; 0: there is more; negative: it cannot be used. */
static int take_snapshot(pl_feed *f, pl_feed_stream *s, pl_str kind, pl_str data)
{
    if (pl_str_eq(kind, PL_STR("header")))
        return take_header(s, data) ? 0 : PL_EPROTOCOL;
    if (!s->snapshot_headed)
        return PL_EPROTOCOL;
    if (pl_str_eq(kind, PL_STR("chunk")))
        return take_chunk(f, s, data) ? 0 : PL_EPROTOCOL;
    if (!pl_str_eq(kind, PL_STR("end")) || s->snapshot_count != 0)
        return PL_EPROTOCOL;
    size_t dropped;
    int rc =
        pl_apply_keep(f->apply, &s->origin->target.ranks[s->rank], s->names, s->names_n, &dropped);
    return rc ? rc : 1;
}

void pl_feed_stream_answer(pl_feed *f, pl_feed_stream *s, pl_feed_frames *fr)
{
    uint64_t now = pl_feed_now(f), seq;
    int first = fr->n > 0 && frame(fr, 0).n == 0 ? 1 : 0, n = fr->n - first;
    for (int i = 0; i < fr->n; i++)
        s->answer_bytes += zmq_msg_size(&fr->part[i]);
    if (s->answer_bytes > f->limits.answer_bytes) {
        act_only(f, s, pl_trust_flood(&s->trust, now));
    } else if (s->trust.ask == PL_ASK_SNAPSHOT) {
        int rc = fr->too_many || n != 2
                     ? PL_EPROTOCOL
                     : take_snapshot(f, s, frame(fr, first), frame(fr, first + 1));
        pl_trust_snapshot_goes_on(&s->trust, now);
        if (rc)
            act_only(f, s,
                     rc > 0 ? pl_trust_snapshot_end(&s->trust, now, s->snapshot_resume)
                            : pl_trust_ask_failed(&s->trust, now));
    } else if (fr->too_many || n < 2 || n > 3 || !read_seq(frame(fr, fr->n - 2), &seq)) {
        malformed(f, s);
    } else {
        /* [seq, payload]; newer vLLM: [topic, seq, payload] */
        pl_str payload = frame(fr, fr->n - 1);
        if (seq == NO_SEQ) {
            act_only(f, s, pl_trust_replay_end(&s->trust, now));
            if (s->trust.state == PL_TRUST_LIVE)
                heard(f, s); /* it is there, even when it has nothing new to say */
        } else {
            uint64_t print = XXH3_64bits(payload.p, payload.n);
            act(f, s, pl_trust_replayed(&s->trust, now, seq, print), s->rank, &fr->part[fr->n - 1],
                seq, print);
        }
    }
    tell(s);
    pl_feed_stream_publish(f, s);
}

/* --- connections, time, figures --- */

void pl_feed_stream_connected(pl_feed *f, pl_feed_stream *s, bool connected)
{
    uint64_t now = pl_feed_now(f);
    if (connected) {
        s->error[0] = 0;
        act_only(f, s, pl_trust_connected(&s->trust, now));
    } else {
        s->disconnects++;
        pl_trust_lost(&s->trust, now);
    }
    tell(s);
}

void pl_feed_stream_tick(pl_feed *f, pl_feed_stream *s)
{
    uint64_t now = pl_feed_now(f), used = 0;
    const pl_feed_origin *o = s->origin;
    const pl_feed_link *l = s->link;
    if (l && !l->bind && l->lost_at && !l->retrying && now - l->lost_at >= PL_FEED_GIVEN_UP_NS) {
        pl_feed_link_close(f, s);
        snprintf(s->error, sizeof s->error,
                 "the connection was given up: a frame too large, or no ZeroMQ publisher there");
        pl_log(PL_LOG_WARN, "kv_stream", "KV events of %s/%d: %s", o->engine, s->rank, s->error);
        s->retry_at = now + PL_TRUST_S;
        malformed(f, s);
    }
    if (!s->link && !s->shut && o->mode != PL_FEED_INGEST && now >= s->retry_at) {
        if (pl_feed_link_open(f, s))
            s->retry_at = now + PL_FEED_RETRY_NS;
    }
    if (s->wants_ask && s->trust.ask != PL_ASK_NOTHING)
        ask(f, s);
    int first = o->streams_n == 1 ? 0 : s->rank;
    int end = o->streams_n == 1 ? o->target.ranks_n : s->rank + 1;
    for (int i = first; i < end; i++) {
        uint64_t u =
            atomic_load_explicit(&f->used_ns[o->target.ranks[i].slot], memory_order_relaxed);
        used = u && (!used || u < used) ? u : used;
    }
    act_only(f, s, pl_trust_tick(&s->trust, now, used));
    tell(s);
    pl_feed_stream_publish(f, s);
}

static void fill(const pl_feed_stream *s, int rank, pl_feed_stats *st)
{
    const pl_feed_origin *o = s->origin;
    const pl_trust *t = &s->trust;
    const pl_apply_rank *r = &o->target.ranks[rank];
    *st = (pl_feed_stats){
        .rank = rank,
        .generation = o->generation,
        .state = t->state,
        .connected = s->link && s->link->connected,
        .complete = t->complete,
        .nothing_indexed = r->tried > 0 && r->landed == 0,
        .has_seq = t->known && t->next > 0,
        .last_seq = t->known && t->next > 0 ? t->next - 1 : 0,
        .block_tokens = pl_apply_block_tokens(&o->target),
        .plain = r->plain,
        .eagle = r->eagle,
        .lag_seconds = s->lag,
        .counts = r->counts,
    };
    if (rank == s->rank) {
        st->held_batches = s->held_n;
        st->held_bytes = s->held_bytes;
        st->held_dropped = s->held_dropped;
        st->messages = s->messages;
        st->bytes = s->bytes;
        st->gaps = t->gaps;
        st->missed = t->missed;
        st->duplicates = t->duplicates;
        st->restarts = t->restarts;
        st->resets = t->resets;
        st->replays = t->replays;
        st->replays_failed = t->replays_failed;
        st->snapshots = t->snapshots;
        st->bad = t->bad;
        st->floods = t->floods;
        st->disconnects = s->disconnects;
    }
    memcpy(st->engine, o->engine, sizeof st->engine);
    memcpy(st->error, s->error, sizeof st->error);
    if (s->link)
        memcpy(st->endpoint, s->link->actual, sizeof st->endpoint);
}

void pl_feed_stream_publish(pl_feed *f, pl_feed_stream *s)
{
    const pl_feed_origin *o = s->origin;
    int first = o->streams_n == 1 ? 0 : s->rank;
    int end = o->streams_n == 1 ? o->target.ranks_n : s->rank + 1;
    for (int i = first; i < end; i++) {
        pl_feed_stats st;
        fill(s, i, &st);
        pthread_mutex_lock(&f->lock);
        pl_feed_slot *slot = f->slots[o->target.ranks[i].slot];
        if (slot && slot->owner == o->id) {
            slot->stats = st;
            slot->has_stats = true;
            slot->since_ns = s->trust.since_ns;
            slot->last_event_ns = s->last_event_ns;
        }
        pthread_mutex_unlock(&f->lock);
    }
}
