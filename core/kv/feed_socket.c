/* The feed's ZeroMQ sockets: SUB sockets with their monitors, and the DEALERs that ask for replays
 * and snapshots. Called by feed.c and feed_stream.c on the indexer's thread, which owns them all.
 *
 * epoll watches each socket's descriptor, which is edge-like: it says that something changed, not
 * that something is there. So a socket is marked when its descriptor speaks, when it is new and
 * after it was written to, and is read until it is empty, a slice at a time so that a flood on one
 * holds up no other. A socket closed in the middle of a turn is freed at the turn's end: until then
 * epoll's list may still name it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

#include "base/log.h"
#include "kv/feed_impl.h"

/* --- watching --- */

void pl_feed_socket_mark(pl_feed *f, pl_feed_socket *k)
{
    if (k->ready)
        return;
    k->ready = true;
    k->next_ready = NULL;
    *f->ready_tail = k;
    f->ready_tail = &k->next_ready;
}

static int set(void *z, int option, int value)
{
    return zmq_setsockopt(z, option, &value, sizeof value);
}

/* A socket of that type with our limits, watched. NULL: errno says why. */
static pl_feed_socket *open_socket(pl_feed *f, pl_feed_socket_kind kind, int type)
{
    pl_feed_socket *k = calloc(1, sizeof *k);
    if (!k)
        return NULL;
    k->kind = kind;
    k->z = zmq_socket(f->zmq, type);
    if (!k->z) {
        free(k);
        return NULL;
    }
    int64_t max = (int64_t)f->limits.message_bytes;
    int fd;
    size_t fd_n = sizeof fd;
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = k};
    /* heartbeats end connections whose peer vanished without a word */
    if (set(k->z, ZMQ_LINGER, 0) || set(k->z, ZMQ_RCVHWM, f->limits.receive_messages) ||
        zmq_setsockopt(k->z, ZMQ_MAXMSGSIZE, &max, sizeof max) || set(k->z, ZMQ_IPV6, 1) ||
        set(k->z, ZMQ_RECONNECT_IVL, 100) || set(k->z, ZMQ_RECONNECT_IVL_MAX, 5000) ||
        set(k->z, ZMQ_HEARTBEAT_IVL, 10000) || set(k->z, ZMQ_HEARTBEAT_TIMEOUT, 30000) ||
        zmq_getsockopt(k->z, ZMQ_FD, &fd, &fd_n) || epoll_ctl(f->epoll, EPOLL_CTL_ADD, fd, &ev)) {
        int why = errno;
        zmq_close(k->z);
        free(k);
        errno = why;
        return NULL;
    }
    pl_feed_socket_mark(f, k);
    return k;
}

static void close_socket(pl_feed *f, pl_feed_socket *k)
{
    if (!k)
        return;
    int fd;
    size_t fd_n = sizeof fd;
    if (zmq_getsockopt(k->z, ZMQ_FD, &fd, &fd_n) == 0)
        epoll_ctl(f->epoll, EPOLL_CTL_DEL, fd, NULL);
    zmq_close(k->z);
    k->z = NULL;
    k->next_dead = f->dead;
    f->dead = k;
}

void pl_feed_sockets_bury(pl_feed *f)
{
    pl_feed_socket **at = &f->ready;
    while (*at)
        if ((*at)->z)
            at = &(*at)->next_ready;
        else
            *at = (*at)->next_ready;
    f->ready_tail = at;
    while (f->dead) {
        pl_feed_socket *k = f->dead;
        f->dead = k->next_dead;
        free(k);
    }
}

/* --- links --- */

static pl_feed_link *find_link(pl_feed *f, const char *endpoint)
{
    for (pl_feed_link *l = f->links; l; l = l->next)
        if (l->bind && strcmp(l->endpoint, endpoint) == 0)
            return l;
    return NULL;
}

static void free_link(pl_feed *f, pl_feed_link *l)
{
    close_socket(f, l->monitor);
    close_socket(f, l->sub);
    pl_feed_link **at = &f->links;
    while (*at && *at != l)
        at = &(*at)->next;
    if (*at)
        *at = l->next;
    free(l);
}

/* Without a monitor a lost connection shows only in what does not come. */
static pl_feed_socket *open_monitor(pl_feed *f, pl_feed_link *l)
{
    char address[64];
    snprintf(address, sizeof address, "inproc://monitor-%llu", (unsigned long long)f->monitors++);
    if (zmq_socket_monitor(l->sub->z, address,
                           ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED |
                               ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL |
                               ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |
                               ZMQ_EVENT_HANDSHAKE_FAILED_AUTH | ZMQ_EVENT_CONNECT_RETRIED))
        return NULL;
    pl_feed_socket *k = open_socket(f, PL_FEED_MONITOR, ZMQ_PAIR);
    if (!k)
        return NULL;
    k->link = l;
    if (zmq_connect(k->z, address)) {
        close_socket(f, k);
        return NULL;
    }
    return k;
}

/* The stream's endpoint: ports are counted up by rank. */
static bool endpoint_of(const pl_feed_stream *s, const char *base, char out[256])
{
    const char *colon = strrchr(base, ':');
    if (s->rank == 0 || s->origin->one_stream || strncmp(base, "tcp://", 6) != 0 || !colon ||
        colon[1] == '*') {
        snprintf(out, 256, "%s", base);
        return true;
    }
    int n = snprintf(out, 256, "%.*s:%d", (int)(colon - base), base, atoi(colon + 1) + s->rank);
    return n > 0 && n < 256;
}

static pl_feed_link *make_link(pl_feed *f, pl_feed_stream *s, const char *endpoint)
{
    pl_feed_link *l = calloc(1, sizeof *l);
    if (!l) {
        errno = ENOMEM;
        return NULL;
    }
    l->bind = s->origin->mode == PL_FEED_BIND;
    snprintf(l->endpoint, sizeof l->endpoint, "%s", endpoint);
    l->sub = open_socket(f, PL_FEED_SUB, ZMQ_SUB);
    if (!l->sub) {
        free(l);
        return NULL;
    }
    l->sub->link = l;
    l->monitor = open_monitor(f, l);
    size_t n = sizeof l->actual;
    if (!l->monitor ||
        (l->bind ? zmq_bind(l->sub->z, endpoint) : zmq_connect(l->sub->z, endpoint)) ||
        zmq_getsockopt(l->sub->z, ZMQ_LAST_ENDPOINT, l->actual, &n)) {
        int why = errno;
        free_link(f, l); /* not in the list yet */
        errno = why;
        return NULL;
    }
    l->next = f->links;
    f->links = l;
    return l;
}

int pl_feed_link_open(pl_feed *f, pl_feed_stream *s)
{
    const pl_feed_origin *o = s->origin;
    char endpoint[256];
    if (!endpoint_of(s, o->endpoint, endpoint)) {
        snprintf(s->error, sizeof s->error, "the endpoint is too long");
        return PL_EIO;
    }
    pl_feed_link *l = o->mode == PL_FEED_BIND ? find_link(f, endpoint) : NULL;
    for (pl_feed_stream *other = l ? l->streams : NULL; other; other = other->next_in_link)
        if (pl_str_eq((pl_str){other->origin->topic, other->origin->topic_n},
                      (pl_str){o->topic, o->topic_n})) {
            snprintf(s->error, sizeof s->error,
                     "engine %.40s has the same endpoint and topic: give each a topic",
                     other->origin->engine);
            return PL_EIO;
        }
    if (!l)
        l = make_link(f, s, endpoint);
    if (!l || zmq_setsockopt(l->sub->z, ZMQ_SUBSCRIBE, o->topic, o->topic_n)) {
        snprintf(s->error, sizeof s->error, "%s %.60s: %s",
                 o->mode == PL_FEED_BIND ? "bind" : "connect", endpoint, zmq_strerror(errno));
        if (l && !l->streams)
            free_link(f, l);
        return PL_EIO;
    }
    if (l->bind) /* a connection shows only later whether it is one */
        s->error[0] = 0;
    s->link = l;
    s->next_in_link = l->streams;
    l->streams = s;
    pl_feed_socket_mark(f, l->sub);
    return 0;
}

void pl_feed_link_close(pl_feed *f, pl_feed_stream *s)
{
    pl_feed_link *l = s->link;
    if (!l)
        return;
    s->link = NULL;
    pl_feed_stream **at = &l->streams;
    while (*at != s)
        at = &(*at)->next_in_link;
    *at = s->next_in_link;
    if (!l->streams)
        free_link(f, l);
    else
        zmq_setsockopt(l->sub->z, ZMQ_UNSUBSCRIBE, s->origin->topic, s->origin->topic_n);
}

/* --- asking --- */

static int send_frame(void *z, const void *p, size_t n, bool more)
{
    return zmq_send(z, p, n, ZMQ_DONTWAIT | (more ? ZMQ_SNDMORE : 0)) < 0 ? PL_EIO : 0;
}

int pl_feed_ask_open(pl_feed *f, pl_feed_stream *s)
{
    bool replay = s->trust.ask == PL_ASK_REPLAY;
    char endpoint[256];
    if (!endpoint_of(s, replay ? s->origin->replay : s->origin->snapshot, endpoint))
        return PL_EIO;
    pl_feed_socket *k = open_socket(f, PL_FEED_ASK, ZMQ_DEALER);
    if (!k)
        return PL_EIO;
    k->stream = s;
    uint8_t from[8];
    for (int i = 0; i < 8; i++)
        from[i] = (uint8_t)(s->trust.ask_from >> 8 * (7 - i));
    /* a ROUTER drops what its peer does not take: let there be room */
    if (set(k->z, ZMQ_RCVHWM, f->limits.answer_messages) || zmq_connect(k->z, endpoint) ||
        send_frame(k->z, "", 0, true) ||
        (replay ? send_frame(k->z, from, sizeof from, false)
                : send_frame(k->z, "snapshot-v1", 11, false))) {
        close_socket(f, k);
        return PL_EIO;
    }
    s->ask = k;
    return 0;
}

void pl_feed_ask_close(pl_feed *f, pl_feed_stream *s)
{
    close_socket(f, s->ask);
    s->ask = NULL;
}

/* --- receiving --- */

/* One message with all its frames, those beyond the bound dropped. False: there is none. */
static bool receive(void *z, pl_feed_frames *fr)
{
    fr->n = 0;
    fr->too_many = false;
    int more = 1;
    while (more) {
        zmq_msg_t *m = &fr->part[fr->n];
        zmq_msg_init(m);
        if (zmq_msg_recv(m, z, ZMQ_DONTWAIT) < 0) {
            zmq_msg_close(m);
            for (int i = 0; i < fr->n; i++)
                zmq_msg_close(&fr->part[i]);
            return false;
        }
        more = zmq_msg_more(m);
        if (fr->n + 1 < PL_FEED_FRAMES_MAX) {
            fr->n++;
        } else {
            fr->too_many = true;
            zmq_msg_close(m);
        }
    }
    return true;
}

static void close_frames(pl_feed_frames *fr)
{
    for (int i = 0; i < fr->n; i++)
        zmq_msg_close(&fr->part[i]);
}

/* Who comes to an address that we have bound. A handshake that failed is told of, and then that its
 * connection has ended: none that was one. */
static void on_peer(pl_feed *f, pl_feed_link *l, uint16_t event)
{
    bool up = event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED;
    if (!up && event != ZMQ_EVENT_DISCONNECTED) {
        l->failing++;
        return;
    }
    if (!up && l->failing) {
        l->failing--;
        return;
    }
    l->peers += up ? 1 : l->peers ? -1 : 0;
    l->connected = l->peers > 0;
    /* of several engines on one address it cannot be told which one it was */
    pl_feed_stream *s = l->streams;
    if (!s || s->next_in_link)
        return;
    bool another = !up && l->connected;
    pl_feed_stream_connected(f, s, up);
    if (another)
        pl_feed_stream_connected(f, s, true);
}

static void on_monitor(pl_feed *f, pl_feed_link *l, pl_feed_frames *fr)
{
    uint16_t event = 0;
    if (fr->n && zmq_msg_size(&fr->part[0]) >= sizeof event)
        memcpy(&event, zmq_msg_data(&fr->part[0]), sizeof event);
    if (event == ZMQ_EVENT_CONNECT_RETRIED) {
        l->retrying = true;
        return;
    }
    if (l->bind) {
        on_peer(f, l, event);
        return;
    }
    bool was = l->connected;
    l->connected = event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED;
    l->lost_at = l->connected ? 0 : pl_feed_now(f);
    l->retrying = false;
    if (was || l->connected)
        pl_feed_stream_connected(f, l->streams, l->connected);
}

static void on_message(pl_feed *f, pl_feed_socket *k, pl_feed_frames *fr)
{
    if (k->kind == PL_FEED_ASK) {
        pl_feed_stream_answer(f, k->stream, fr);
    } else if (k->kind == PL_FEED_MONITOR) {
        on_monitor(f, k->link, fr);
    } else {
        pl_str topic =
            fr->n ? (pl_str){zmq_msg_data(&fr->part[0]), zmq_msg_size(&fr->part[0])} : PL_STR("");
        pl_feed_stream *s = pl_feed_stream_by_topic(k->link, topic);
        if (s)
            pl_feed_stream_live(f, s, fr);
    }
}

/* Whose figures a socket's messages change. */
static void publish(pl_feed *f, pl_feed_socket *k)
{
    if (k->kind == PL_FEED_ASK) {
        pl_feed_stream_publish(f, k->stream);
        return;
    }
    for (pl_feed_stream *s = k->link->streams; s; s = s->next_in_link)
        pl_feed_stream_publish(f, s);
}

static void slice(pl_feed *f, pl_feed_socket *k)
{
    pl_feed_frames fr;
    bool any = false;
    /* that a connection was lost must be known before what came over the next one is believed */
    if (k->kind == PL_FEED_SUB)
        slice(f, k->link->monitor);
    /* what a message leads to may close the socket */
    for (int i = 0; i < PL_FEED_SLICE_MESSAGES && k->z; i++) {
        if (!receive(k->z, &fr)) {
            if (any)
                publish(f, k);
            return;
        }
        any = true;
        on_message(f, k, &fr);
        close_frames(&fr);
    }
    if (!k->z)
        return; /* the tick publishes what led to that */
    publish(f, k);
    pl_feed_socket_mark(f, k);
}

void pl_feed_sockets_turn(pl_feed *f)
{
    pl_feed_socket *list = f->ready;
    f->ready = NULL;
    f->ready_tail = &f->ready;
    while (list) {
        pl_feed_socket *k = list;
        list = k->next_ready;
        k->ready = false;
        if (k->z)
            slice(f, k);
    }
}
