/* The feed: its thread, and the calls that other threads make. See feed.h for what it is,
 * feed_stream.c for what messages lead to, feed_socket.c for ZeroMQ.
 *
 * The thread owns the ZeroMQ context, the sockets, the sources and the writing side of the index.
 * Others reach it by mail: a list under the lock and a descriptor that wakes it. It answers by the
 * figures in f->slots, under the same lock, which nobody holds for longer than a copy. */
#include "kv/feed.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/log.h"
#include "kv/event_json.h"
#include "kv/feed_impl.h"

typedef enum mail_kind { MAIL_ADD, MAIL_REMOVE, MAIL_INGEST, MAIL_EMPTIED } mail_kind;

struct pl_feed_mail {
    struct pl_feed_mail *next;
    mail_kind kind;
    pl_feed_origin *origin; /* add: owned */
    uint64_t id;            /* remove, ingest, emptied: the source */
    int slot;               /* ingest, emptied */
    size_t n;
    char *bytes; /* ingest: owned */
};

/* --- sources --- */

static void free_origin(pl_feed_origin *o)
{
    if (!o)
        return;
    free(o->target.ranks);
    free(o->streams);
    free(o);
}

static void free_mail(pl_feed_mail *m)
{
    if (!m)
        return;
    free_origin(m->origin);
    free(m->bytes);
    free(m);
}

static bool copy_text(char *to, size_t cap, pl_str s)
{
    if (s.n >= cap || memchr(s.p ? s.p : "", 0, s.n))
        return false;
    if (s.n)
        memcpy(to, s.p, s.n);
    to[s.n] = 0;
    return true;
}

/* tcp://host:port with room for the ranks' ports, or ipc://path. */
static int check_endpoint(pl_str e, const pl_feed_source *s, const char *what, pl_errbuf *eb)
{
    if (pl_str_starts(e, PL_STR("ipc://")) && e.n > 6) {
        if (s->ranks_n > 1 && !s->one_stream)
            return pl_fail(eb, PL_EINVALID, "%s %.*s: several ranks need ports (tcp://)", what,
                           PL_FMT(e));
        return 0;
    }
    const char *colon = e.n > 6 ? memrchr(e.p, ':', e.n) : NULL;
    if (!pl_str_starts(e, PL_STR("tcp://")) || !colon || colon <= e.p + 6)
        return pl_fail(eb, PL_EINVALID, "%s %.*s: not tcp://host:port or ipc://path", what,
                       PL_FMT(e));
    pl_str port = {colon + 1, (size_t)(e.p + e.n - colon - 1)};
    uint64_t n;
    if (pl_str_eq(port, PL_STR("*")) && s->mode == PL_FEED_BIND)
        return 0;
    if (pl_str_u64(port, 65535, &n) || n == 0)
        return pl_fail(eb, PL_EINVALID, "%s %.*s: the port must be 1 to 65535", what, PL_FMT(e));
    if (!s->one_stream && n + (uint64_t)s->ranks_n - 1 > 65535)
        return pl_fail(eb, PL_EINVALID, "%s %.*s: %d ranks need ports above 65535", what, PL_FMT(e),
                       s->ranks_n);
    return 0;
}

static int check_source(const pl_feed_source *s, pl_errbuf *eb)
{
    if (s->ranks_n < 1 || s->ranks_n > PL_MAX_WORKERS)
        return pl_fail(eb, PL_EINVALID, "an engine has 1 to %d ranks", PL_MAX_WORKERS);
    for (int i = 0; i < s->ranks_n; i++) {
        if (s->slots[i] < 0 || s->slots[i] >= PL_MAX_WORKERS)
            return pl_fail(eb, PL_EINVALID, "slot %d is none", s->slots[i]);
        for (int j = 0; j < i; j++)
            if (s->slots[i] == s->slots[j])
                return pl_fail(eb, PL_EINVALID, "slot %d is given twice", s->slots[i]);
    }
    if (s->block_tokens > 65536)
        return pl_fail(eb, PL_EINVALID, "blocks of %u tokens are too large", s->block_tokens);
    if (s->model.n == 0)
        return pl_fail(eb, PL_EINVALID, "a source of KV events needs a model");
    if (s->mode == PL_FEED_INGEST)
        return 0;
    int rc = check_endpoint(s->endpoint, s, "endpoint", eb);
    if (rc == 0 && s->replay.n)
        rc = check_endpoint(s->replay, s, "replay endpoint", eb);
    if (rc == 0 && s->snapshot.n)
        rc = check_endpoint(s->snapshot, s, "snapshot endpoint", eb);
    return rc;
}

static int make_origin(pl_feed *f, const pl_feed_source *s, pl_feed_origin **out, pl_errbuf *eb)
{
    pl_feed_origin *o = calloc(1, sizeof *o);
    if (!o)
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    bool wire = s->mode != PL_FEED_INGEST;
    if (!copy_text(o->engine, sizeof o->engine, s->engine) ||
        !copy_text(o->model, sizeof o->model, s->model) ||
        !copy_text(o->topic, sizeof o->topic, s->topic) ||
        !copy_text(o->endpoint, sizeof o->endpoint, wire ? s->endpoint : PL_STR("")) ||
        !copy_text(o->replay, sizeof o->replay, wire ? s->replay : PL_STR("")) ||
        !copy_text(o->snapshot, sizeof o->snapshot, wire ? s->snapshot : PL_STR(""))) {
        free_origin(o);
        return pl_fail(eb, PL_EINVALID,
                       "a name, topic or endpoint of a KV event source is too long");
    }
    o->topic_n = s->topic.n;
    o->generation = s->generation;
    o->mode = s->mode;
    o->one_stream = s->one_stream;
    o->target = (pl_apply_target){
        .model = {o->model, s->model.n}, .block_tokens = s->block_tokens, .ranks_n = s->ranks_n};
    o->target.ranks = calloc((size_t)s->ranks_n, sizeof *o->target.ranks);
    o->streams_n = s->one_stream ? 1 : s->ranks_n;
    o->streams = calloc((size_t)o->streams_n, sizeof *o->streams);
    if (!o->target.ranks || !o->streams) {
        free_origin(o);
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    }
    for (int i = 0; i < s->ranks_n; i++)
        o->target.ranks[i] = (pl_apply_rank){.slot = s->slots[i], .group = -1};
    for (int i = 0; i < o->streams_n; i++)
        pl_feed_stream_init(f, &o->streams[i], o, i);
    *out = o;
    return 0;
}

/* --- mail --- */

static void wake(pl_feed *f)
{
    uint64_t one = 1;
    while (write(f->event, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* Under the lock. */
static void post_locked(pl_feed *f, pl_feed_mail *m)
{
    m->next = NULL;
    *f->mail_tail = m;
    f->mail_tail = &m->next;
    f->mail_bytes += m->n;
    wake(f);
}

/* Under the lock: all slots are there and free. */
static int claim_locked(pl_feed *f, const pl_feed_origin *o, pl_errbuf *eb)
{
    for (int i = 0; i < o->target.ranks_n; i++) {
        pl_feed_slot **slot = &f->slots[o->target.ranks[i].slot];
        if (!*slot && !(*slot = calloc(1, sizeof **slot)))
            return pl_fail(eb, PL_ENOMEM, "out of memory");
        if ((*slot)->owner)
            return pl_fail(eb, PL_EEXISTS, "slot %d has a source of KV events already",
                           o->target.ranks[i].slot);
    }
    for (int i = 0; i < o->target.ranks_n; i++) {
        pl_feed_slot *slot = f->slots[o->target.ranks[i].slot];
        *slot = (pl_feed_slot){.owner = o->id, .since_ns = pl_feed_now(f)};
        slot->stats.rank = i;
        slot->stats.generation = o->generation;
        slot->stats.lag_seconds = -1;
        memcpy(slot->stats.engine, o->engine, sizeof slot->stats.engine);
    }
    return 0;
}

int pl_feed_source_add(pl_feed *f, const pl_feed_source *s, pl_errbuf *eb)
{
    int rc = check_source(s, eb);
    if (rc)
        return rc;
    pl_feed_mail *m = calloc(1, sizeof *m);
    if (!m)
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    m->kind = MAIL_ADD;
    rc = make_origin(f, s, &m->origin, eb);
    if (rc == 0) {
        pthread_mutex_lock(&f->lock);
        m->origin->id = f->next_id++;
        rc = claim_locked(f, m->origin, eb);
        if (rc == 0)
            post_locked(f, m);
        pthread_mutex_unlock(&f->lock);
    }
    if (rc)
        free_mail(m);
    return rc;
}

int pl_feed_source_remove(pl_feed *f, int slot)
{
    if (slot < 0 || slot >= PL_MAX_WORKERS)
        return PL_ENOTFOUND;
    pl_feed_mail *m = calloc(1, sizeof *m);
    if (!m)
        return PL_ENOMEM;
    int rc = PL_ENOTFOUND;
    pthread_mutex_lock(&f->lock);
    if (f->slots[slot] && f->slots[slot]->owner) {
        *m = (pl_feed_mail){.kind = MAIL_REMOVE, .id = f->slots[slot]->owner};
        for (int i = 0; i < PL_MAX_WORKERS; i++)
            if (f->slots[i] && f->slots[i]->owner == m->id)
                f->slots[i]->owner = 0;
        post_locked(f, m);
        rc = 0;
    }
    pthread_mutex_unlock(&f->lock);
    if (rc)
        free(m);
    return rc;
}

int pl_feed_ingest(pl_feed *f, int slot, pl_str bytes, bool json, pl_errbuf *eb)
{
    if (slot < 0 || slot >= PL_MAX_WORKERS)
        return pl_fail(eb, PL_ENOTFOUND, "slot %d is none", slot);
    pl_buf b = {0};
    int rc = json ? pl_event_from_json(bytes, &b, eb) : 0;
    if (rc == 0 && !json && bytes.n && (rc = pl_buf_add(&b, bytes.p, bytes.n)))
        pl_fail(eb, rc, "out of memory");
    pl_feed_mail *m = rc ? NULL : calloc(1, sizeof *m);
    if (!m) {
        pl_buf_free(&b);
        return rc ? rc : pl_fail(eb, PL_ENOMEM, "out of memory");
    }
    *m = (pl_feed_mail){.kind = MAIL_INGEST, .slot = slot, .bytes = b.p, .n = b.n};
    pthread_mutex_lock(&f->lock);
    if (!f->slots[slot] || !f->slots[slot]->owner)
        rc = pl_fail(eb, PL_ENOTFOUND, "no source of KV events for that worker");
    else if (f->slots[slot]->stats.state == PL_TRUST_UNTRUSTED)
        rc = pl_fail(eb, PL_EBUSY,
                     "nothing is taken from that worker for a while: it sent garbage, too much, or "
                     "numbers that begin anew each time");
    else if (f->mail_bytes + m->n > f->limits.ingest_bytes)
        rc = pl_fail(eb, PL_EBUSY, "too many events are waiting; try again");
    if (rc == 0) {
        m->id = f->slots[slot]->owner;
        post_locked(f, m);
    }
    pthread_mutex_unlock(&f->lock);
    if (rc)
        free_mail(m);
    return rc;
}

int pl_feed_emptied(pl_feed *f, int slot)
{
    pl_feed_mail *m = calloc(1, sizeof *m);
    if (!m)
        return PL_ENOMEM;
    int rc = PL_ENOTFOUND;
    pthread_mutex_lock(&f->lock);
    if (slot >= 0 && slot < PL_MAX_WORKERS && f->slots[slot] && f->slots[slot]->owner) {
        *m = (pl_feed_mail){.kind = MAIL_EMPTIED, .slot = slot, .id = f->slots[slot]->owner};
        post_locked(f, m);
        rc = 0;
    }
    pthread_mutex_unlock(&f->lock);
    if (rc)
        free(m);
    return rc;
}

/* --- figures --- */

void pl_feed_touch(pl_feed *f, int slot)
{
    if (slot < 0 || slot >= PL_MAX_WORKERS)
        return;
    if (atomic_load_explicit(&f->used_ns[slot], memory_order_relaxed) == 0)
        atomic_store_explicit(&f->used_ns[slot], pl_feed_now(f), memory_order_relaxed);
}

static double age(uint64_t now_ns, uint64_t then_ns)
{
    return now_ns > then_ns ? (double)(now_ns - then_ns) / 1e9 : 0;
}

int pl_feed_stats_of(pl_feed *f, int slot, pl_feed_stats *out)
{
    if (slot < 0 || slot >= PL_MAX_WORKERS)
        return PL_ENOTFOUND;
    int rc = PL_ENOTFOUND;
    uint64_t now = pl_feed_now(f);
    pthread_mutex_lock(&f->lock);
    const pl_feed_slot *s = f->slots[slot];
    if (s && s->owner) {
        *out = s->stats;
        out->since_seconds = age(now, s->since_ns);
        out->last_event_seconds = s->last_event_ns ? age(now, s->last_event_ns) : -1;
        rc = 0;
    }
    pthread_mutex_unlock(&f->lock);
    return rc;
}

/* --- the thread --- */

static void drop_origin(pl_feed *f, pl_feed_origin **at)
{
    pl_feed_origin *o = *at;
    *at = o->next;
    for (int i = 0; i < o->streams_n; i++)
        pl_feed_stream_close(f, &o->streams[i]);
    free_origin(o);
}

static pl_feed_origin **find_origin(pl_feed *f, uint64_t id)
{
    pl_feed_origin **at = &f->origins;
    while (*at && (*at)->id != id)
        at = &(*at)->next;
    return at;
}

static void ingest(pl_feed *f, pl_feed_origin *o, const pl_feed_mail *m)
{
    int rank = 0;
    for (int i = 0; i < o->target.ranks_n; i++)
        if (o->target.ranks[i].slot == m->slot)
            rank = i;
    pl_feed_stream_ingest(f, &o->streams[o->streams_n == 1 ? 0 : rank], rank, m->bytes, m->n);
    for (int i = 0; i < o->streams_n; i++) /* events may name another rank */
        pl_feed_stream_publish(f, &o->streams[i]);
}

static void take_mail(pl_feed *f, pl_feed_mail *m)
{
    pl_feed_origin **at = find_origin(f, m->id);
    switch (m->kind) {
    case MAIL_ADD:
        m->origin->next = f->origins;
        f->origins = m->origin;
        for (int i = 0; i < m->origin->streams_n; i++)
            pl_feed_stream_open(f, &m->origin->streams[i]);
        m->origin = NULL;
        break;
    case MAIL_REMOVE:
        if (*at)
            drop_origin(f, at);
        break;
    case MAIL_INGEST:
        if (*at)
            ingest(f, *at, m);
        break;
    case MAIL_EMPTIED:
        for (int i = 0; *at && i < (*at)->target.ranks_n; i++)
            if ((*at)->target.ranks[i].slot == m->slot)
                pl_apply_clear(f->apply, &(*at)->target.ranks[i]);
    }
}

/* False: the thread is to end. */
static bool read_mail(pl_feed *f)
{
    pthread_mutex_lock(&f->lock);
    pl_feed_mail *m = f->mail;
    f->mail = NULL;
    f->mail_tail = &f->mail;
    f->mail_bytes = 0;
    bool go_on = !f->stop;
    pthread_mutex_unlock(&f->lock);
    while (m) {
        pl_feed_mail *next = m->next;
        take_mail(f, m);
        free_mail(m);
        m = next;
    }
    return go_on;
}

/* Returns whether there was mail. */
static bool wait_for_work(pl_feed *f, int timeout_ms)
{
    struct epoll_event events[64];
    bool mail = false;
    int n = epoll_wait(f->epoll, events, 64, timeout_ms);
    for (int i = 0; i < n; i++) {
        if (events[i].data.ptr) {
            pl_feed_socket_mark(f, events[i].data.ptr);
        } else {
            uint64_t count;
            mail = read(f->event, &count, sizeof count) > 0 || mail;
        }
    }
    return mail;
}

static void tick(pl_feed *f)
{
    for (pl_feed_origin *o = f->origins; o; o = o->next)
        for (int i = 0; i < o->streams_n; i++)
            pl_feed_stream_tick(f, &o->streams[i]);
}

static void *run(void *arg)
{
    pl_feed *f = arg;
    uint64_t tick_at = 0;
    bool busy = false, go_on = true;
    pthread_setname_np(pthread_self(), "indexer");
    while (go_on) {
        /* the real clock: f->clock may be one that a test moves */
        uint64_t now = pl_now_ns();
        uint64_t left = now < tick_at ? (tick_at - now) / 1000000 + 1 : 0;
        if (wait_for_work(f, busy || f->ready ? 0 : (int)left))
            go_on = read_mail(f);
        pl_feed_sockets_turn(f);
        if (pl_now_ns() >= tick_at) {
            tick(f);
            tick_at = pl_now_ns() + PL_FEED_TICK_MS * 1000000ull;
        }
        busy = pl_index_maintain(f->index);
        pl_feed_sockets_bury(f);
    }
    /* what is in the index stays; all else goes */
    while (f->origins) {
        pl_feed_origin *o = f->origins;
        f->origins = o->next;
        for (int i = 0; i < o->streams_n; i++)
            pl_feed_stream_abandon(f, &o->streams[i]);
        free_origin(o);
    }
    pl_feed_sockets_bury(f);
    return NULL;
}

int pl_feed_new(const pl_feed_options *o, pl_feed **out)
{
    pl_feed *f = calloc(1, sizeof *f);
    if (!f)
        return PL_ENOMEM;
    f->index = o->index;
    f->clock = o->clock.now_ns ? o->clock : pl_clock_real();
    f->limits = o->limits;
    f->trust = o->trust;
    f->mail_tail = &f->mail;
    f->ready_tail = &f->ready;
    f->next_id = 1;
    f->event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    f->epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event ev = {.events = EPOLLIN};
    if (f->event < 0 || f->epoll < 0 || epoll_ctl(f->epoll, EPOLL_CTL_ADD, f->event, &ev) ||
        pthread_mutex_init(&f->lock, NULL)) {
        if (f->event >= 0)
            close(f->event);
        if (f->epoll >= 0)
            close(f->epoll);
        free(f);
        return PL_EIO;
    }
    f->zmq = zmq_ctx_new();
    int rc = f->zmq ? pl_apply_new(o->index, o->known, &f->apply) : PL_ENOMEM;
    /* per stream: its socket, the two ends of its monitor, one that asks */
    if (rc == 0 && zmq_ctx_set(f->zmq, ZMQ_MAX_SOCKETS, 4 * PL_MAX_WORKERS))
        rc = PL_EIO;
    if (rc) {
        pl_feed_free(f);
        return rc;
    }
    *out = f;
    return 0;
}

int pl_feed_start(pl_feed *f, pl_errbuf *eb)
{
    if (f->started)
        return pl_fail(eb, PL_EEXISTS, "the indexer runs already");
    int rc = pthread_create(&f->thread, NULL, run, f);
    if (rc)
        return pl_fail(eb, PL_EIO, "the indexer's thread: %s", strerror(rc));
    f->started = true;
    return 0;
}

void pl_feed_stop(pl_feed *f)
{
    if (!f->started)
        return;
    pthread_mutex_lock(&f->lock);
    f->stop = true;
    wake(f);
    pthread_mutex_unlock(&f->lock);
    pthread_join(f->thread, NULL);
    f->started = false;
}

void pl_feed_free(pl_feed *f)
{
    if (!f)
        return;
    pl_feed_stop(f);
    while (f->mail) {
        pl_feed_mail *m = f->mail;
        f->mail = m->next;
        free_mail(m);
    }
    if (f->zmq)
        zmq_ctx_term(f->zmq);
    pl_apply_free(f->apply);
    for (int i = 0; i < PL_MAX_WORKERS; i++)
        free(f->slots[i]);
    pthread_mutex_destroy(&f->lock);
    close(f->event);
    close(f->epoll);
    free(f);
}
