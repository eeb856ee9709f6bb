/* Publishes a simulated engine's KV events: see publish.h. Called by front_kv.c on the front's
 * thread; it owns its sockets and the batches that are kept.
 *
 * ZeroMQ's descriptor tells only that something may have changed, once: so every callback and every
 * send is followed by reading until nothing is left (drain). Payloads are ZeroMQ messages, which
 * are counted, not copied, when they are sent. */
#include "engine/publish.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

#include "base/clock.h"

enum { LIVE_HWM = 100000, KEPT_BYTES = 256 << 20, FRAME_BYTES = 4096 };

typedef struct kept {
    zmq_msg_t payload;
    bool there; /* false: there was no memory for it */
} kept;

struct pl_publisher {
    pl_publish_options o; /* its strings are owned */
    void *live, *replay;  /* sockets; replay may be NULL */
    uv_poll_t poll[2];
    int polls;
    char endpoint[256], replay_at[256];
    pl_buf events; /* of the batch that is being collected */
    uint32_t events_n;
    bool spoilt; /* an event of it is missing */
    /* Batches [first, next) are kept, at ring[seq % buffer]; those below `sent` were sent. */
    kept *ring;
    uint64_t first, next, sent;
    uint64_t bytes;
    bool paused;
    pl_publish_stats count;
};

/* --- collecting --- */

static void collected(pl_publisher *p, size_t before, int rc)
{
    if (rc == 0) {
        p->events_n++;
        return;
    }
    p->events.n = before;
    p->spoilt = true;
}

static void on_stored(void *user, const pl_sim_kv_run *run)
{
    pl_publisher *p = user;
    size_t before = p->events.n;
    collected(p, before, pl_wire_stored(&p->events, &p->o.wire, run));
}

static void on_removed(void *user, const pl_sim_kv_run *run)
{
    pl_publisher *p = user;
    size_t before = p->events.n;
    collected(p, before, pl_wire_removed(&p->events, &p->o.wire, run));
}

static void on_cleared(void *user)
{
    pl_publisher *p = user;
    size_t before = p->events.n;
    collected(p, before, pl_wire_cleared(&p->events, &p->o.wire));
}

const pl_sim_kv_events pl_publish_events = {on_stored, on_removed, on_cleared};

/* --- the batches that are kept --- */

static kept *at(const pl_publisher *p, uint64_t seq)
{
    return &p->ring[seq % (uint64_t)p->o.buffer];
}

static void drop_first(pl_publisher *p)
{
    kept *k = at(p, p->first++);
    if (!k->there)
        return;
    p->bytes -= zmq_msg_size(&k->payload);
    zmq_msg_close(&k->payload);
    k->there = false;
}

static bool payload_of(pl_publisher *p, zmq_msg_t *m)
{
    pl_buf head = {0}, tail = {0};
    bool ok = !p->spoilt && pl_wire_head(&head, pl_wall_seconds(), p->events_n) == 0 &&
              pl_wire_tail(&tail, p->o.rank) == 0 &&
              zmq_msg_init_size(m, head.n + p->events.n + tail.n) == 0;
    if (ok) {
        char *to = zmq_msg_data(m);
        memcpy(to, head.p, head.n);
        memcpy(to + head.n, p->events.p, p->events.n);
        memcpy(to + head.n + p->events.n, tail.p, tail.n);
    }
    pl_buf_free(&head);
    pl_buf_free(&tail);
    return ok;
}

/* Gives what was collected a number and keeps it. One that there was no memory for is a gap, which
 * its readers will see. */
static void keep(pl_publisher *p)
{
    if (p->next - p->first == (uint64_t)p->o.buffer)
        drop_first(p);
    kept *k = at(p, p->next++);
    k->there = payload_of(p, &k->payload);
    if (k->there)
        p->bytes += zmq_msg_size(&k->payload);
    while (p->bytes > KEPT_BYTES && p->next - p->first > 1)
        drop_first(p);
    p->events.n = 0;
    p->events_n = 0;
    p->spoilt = false;
}

/* --- sending --- */

static void put_number(unsigned char out[8], uint64_t v)
{
    for (int i = 0; i < 8; i++)
        out[i] = (unsigned char)(v >> (56 - 8 * i));
}

static bool send_bytes(void *socket, const void *bytes, size_t n, int more)
{
    int rc;
    do
        rc = zmq_send(socket, bytes, n, ZMQ_DONTWAIT | more);
    while (rc < 0 && errno == EINTR);
    return rc >= 0;
}

static bool send_payload(void *socket, zmq_msg_t *payload)
{
    zmq_msg_t copy;
    zmq_msg_init(&copy);
    int rc = zmq_msg_copy(&copy, payload);
    while (rc == 0 && (rc = zmq_msg_send(&copy, socket, ZMQ_DONTWAIT)) < 0 && errno == EINTR)
        rc = 0;
    zmq_msg_close(&copy); /* of a message that was sent, nothing is left */
    return rc >= 0;
}

/* True when the next batch is struck. */
static bool strikes(pl_publisher *p, pl_publish_fault fault)
{
    if (p->count.left[fault] == 0)
        return false;
    p->count.left[fault]--;
    p->count.struck[fault]++;
    return true;
}

static void send_live(pl_publisher *p, uint64_t seq, zmq_msg_t *payload)
{
    if (strikes(p, PL_PUBLISH_LOSE))
        return;
    zmq_msg_t broken;
    bool garbage = strikes(p, PL_PUBLISH_GARBAGE);
    if (garbage) {
        size_t half = zmq_msg_size(payload) / 2;
        if (zmq_msg_init_size(&broken, half + 1) != 0)
            return;
        memcpy(zmq_msg_data(&broken), zmq_msg_data(payload), half);
        ((unsigned char *)zmq_msg_data(&broken))[half] = 0xc1;
        payload = &broken;
    }
    unsigned char number[8];
    put_number(number, seq);
    for (int times = strikes(p, PL_PUBLISH_DUPLICATE) ? 2 : 1; times > 0; times--)
        if (send_bytes(p->live, p->o.topic.p, p->o.topic.n, ZMQ_SNDMORE) &&
            send_bytes(p->live, number, sizeof number, ZMQ_SNDMORE) &&
            send_payload(p->live, payload))
            p->count.sent++;
    if (garbage)
        zmq_msg_close(&broken);
}

static void send_due(pl_publisher *p)
{
    if (p->sent < p->first)
        p->sent = p->first;
    for (; p->sent < p->next; p->sent++) {
        kept *k = at(p, p->sent);
        if (k->there)
            send_live(p, p->sent, &k->payload);
    }
}

/* --- receiving --- */

/* A message of at most `most` frames; returns how many it had, more when there were more, 0 when
 * none is there. The caller closes the first `most` of them. */
static int receive(void *socket, zmq_msg_t *frames, int most)
{
    int n = 0, more = 1;
    while (more) {
        zmq_msg_t over, *m = n < most ? &frames[n] : &over;
        zmq_msg_init(m);
        int rc = zmq_msg_recv(m, socket, ZMQ_DONTWAIT);
        if (rc < 0 && errno == EINTR && n == 0)
            continue;
        if (rc < 0) {
            zmq_msg_close(m);
            break; /* messages come whole: this was the first frame */
        }
        more = zmq_msg_more(m);
        if (n++ >= most)
            zmq_msg_close(m);
    }
    return n;
}

static bool answer(pl_publisher *p, zmq_msg_t *peer, uint64_t seq, zmq_msg_t *payload)
{
    unsigned char number[8];
    put_number(number, seq);
    bool topic = p->o.wire.format == PL_WIRE_VLLM_MAP;
    return send_bytes(p->replay, zmq_msg_data(peer), zmq_msg_size(peer), ZMQ_SNDMORE) &&
           send_bytes(p->replay, "", 0, ZMQ_SNDMORE) &&
           (!topic || send_bytes(p->replay, p->o.topic.p, p->o.topic.n, ZMQ_SNDMORE)) &&
           send_bytes(p->replay, number, sizeof number, ZMQ_SNDMORE) &&
           (payload ? send_payload(p->replay, payload) : send_bytes(p->replay, "", 0, 0));
}

static void replay(pl_publisher *p, zmq_msg_t *peer, const unsigned char number[8])
{
    uint64_t from = 0;
    for (int i = 0; i < 8; i++)
        from = from << 8 | number[i];
    p->count.replays++;
    for (uint64_t seq = from < p->first ? p->first : from; seq < p->sent; seq++)
        if (at(p, seq)->there && !answer(p, peer, seq, &at(p, seq)->payload))
            return;
    answer(p, peer, UINT64_MAX, NULL);
}

static void drain(pl_publisher *p)
{
    zmq_msg_t f[3];
    int n;
    while ((n = receive(p->live, f, 1)) > 0) { /* who subscribes, and who no longer does */
        if (n == 1 && zmq_msg_size(&f[0]) > 0)
            p->count.subscriptions += *(unsigned char *)zmq_msg_data(&f[0]) ? 1 : -1;
        zmq_msg_close(&f[0]);
    }
    while (p->replay && (n = receive(p->replay, f, 3)) > 0) {
        if (n == 3 && zmq_msg_size(&f[1]) == 0 && zmq_msg_size(&f[2]) == 8)
            replay(p, &f[0], zmq_msg_data(&f[2])); /* anything else is ignored, as engines do */
        for (int i = 0; i < (n < 3 ? n : 3); i++)
            zmq_msg_close(&f[i]);
    }
}

static void on_readable(uv_poll_t *poll, int status, int events)
{
    drain(poll->data);
}

void pl_publish_flush(pl_publisher *p)
{
    if (p->events_n == 0 && !p->spoilt)
        return;
    keep(p);
    if (!p->paused)
        send_due(p);
    drain(p);
}

/* --- faults and figures --- */

void pl_publish_break(pl_publisher *p, pl_publish_fault fault, uint64_t n)
{
    p->count.left[fault] = n;
}

void pl_publish_pause(pl_publisher *p, bool paused)
{
    p->paused = paused;
    if (paused)
        return;
    send_due(p);
    drain(p);
}

void pl_publish_restart(pl_publisher *p)
{
    while (p->first < p->next)
        drop_first(p);
    p->first = p->next = p->sent = 0;
    p->events.n = 0;
    p->events_n = 0;
    p->spoilt = false;
    p->paused = false;
    memset(p->count.left, 0, sizeof p->count.left);
    p->count.restarts++;
}

void pl_publish_stats_of(const pl_publisher *p, pl_publish_stats *out)
{
    *out = p->count;
    out->endpoint = p->endpoint;
    out->replay = p->replay_at;
    out->next = p->next;
    out->unsent = p->next - (p->sent > p->first ? p->sent : p->first);
    out->kept_from = p->first;
    out->kept_bytes = p->bytes;
    out->paused = p->paused;
}

/* --- coming and going --- */

static int set(void *socket, int option, int value)
{
    return zmq_setsockopt(socket, option, &value, sizeof value);
}

/* A socket at the endpoint, watched by the loop. */
static int open_socket(pl_publisher *p, uv_loop_t *loop, void *zmq, int type, pl_str endpoint,
                       void **out, char *name, size_t name_n, pl_errbuf *eb)
{
    bool live = type == ZMQ_XPUB, connects = live && p->o.connect;
    char at_text[256];
    const char *flag = live ? "--kv-events" : "--kv-events-replay";
    if (endpoint.n >= sizeof at_text)
        return pl_fail(eb, PL_EINVALID, "%s: the address is too long", flag);
    snprintf(at_text, sizeof at_text, "%.*s", PL_FMT(endpoint));
    void *s = *out = zmq_socket(zmq, type);
    if (!s)
        return pl_fail(eb, PL_ENOMEM, "no ZeroMQ socket: %s", zmq_strerror(errno));
    /* A reader that asks for all that is kept shall get it. */
    int hwm = live ? LIVE_HWM : p->o.buffer + 16, fd;
    int64_t most = FRAME_BYTES;
    size_t size = sizeof fd;
    set(s, ZMQ_LINGER, 0);
    set(s, ZMQ_SNDHWM, hwm);
    if (memchr(endpoint.p, '[', endpoint.n))
        set(s, ZMQ_IPV6, 1);
    zmq_setsockopt(s, ZMQ_MAXMSGSIZE, &most, sizeof most);
    if (live)
        set(s, ZMQ_XPUB_VERBOSER, 1); /* every subscription is told, equal ones too */
    if ((connects ? zmq_connect(s, at_text) : zmq_bind(s, at_text)) != 0)
        return pl_fail(eb, errno == EADDRINUSE ? PL_EEXISTS : PL_EIO, "%s %s: %s", flag, at_text,
                       zmq_strerror(errno));
    if (connects)
        snprintf(name, name_n, "%s", at_text);
    else if (zmq_getsockopt(s, ZMQ_LAST_ENDPOINT, name, &name_n) != 0)
        return pl_fail(eb, PL_EIO, "%s %s: %s", flag, at_text, zmq_strerror(errno));
    if (zmq_getsockopt(s, ZMQ_FD, &fd, &size) != 0 ||
        uv_poll_init(loop, &p->poll[p->polls], fd) != 0)
        return pl_fail(eb, PL_EIO, "%s %s: the loop cannot watch it", flag, at_text);
    p->poll[p->polls].data = p;
    uv_poll_start(&p->poll[p->polls++], UV_READABLE, on_readable);
    return 0;
}

static void finish(pl_publisher *p)
{
    free((char *)p->o.topic.p);
    free(p->ring);
    pl_buf_free(&p->events);
    free(p);
}

static void on_closed(uv_handle_t *h)
{
    pl_publisher *p = h->data;
    if (--p->polls == 0)
        finish(p);
}

void pl_publish_free(pl_publisher *p)
{
    if (!p)
        return;
    while (p->ring && p->first < p->next)
        drop_first(p);
    for (int i = 0; i < p->polls; i++)
        uv_close((uv_handle_t *)&p->poll[i], on_closed); /* before the descriptor goes */
    if (p->live)
        zmq_close(p->live);
    if (p->replay)
        zmq_close(p->replay);
    if (p->polls == 0)
        finish(p);
}

int pl_publish_new(uv_loop_t *loop, void *zmq, const pl_publish_options *o, pl_publisher **out,
                   pl_errbuf *eb)
{
    *out = NULL;
    if (o->buffer < 1)
        return pl_fail(eb, PL_EINVALID, "--kv-events-buffer must be at least 1");
    pl_publisher *p = calloc(1, sizeof *p);
    if (!p)
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    p->o = *o;
    p->o.topic.p = malloc(o->topic.n + 1);
    p->ring = calloc((size_t)o->buffer, sizeof *p->ring);
    int rc = 0;
    if (!p->o.topic.p || !p->ring)
        rc = pl_fail(eb, PL_ENOMEM, "out of memory");
    else if (o->topic.n)
        memcpy((char *)p->o.topic.p, o->topic.p, o->topic.n);
    if (rc == 0)
        rc = open_socket(p, loop, zmq, ZMQ_XPUB, o->endpoint, &p->live, p->endpoint,
                         sizeof p->endpoint, eb);
    if (rc == 0 && o->replay.n)
        rc = open_socket(p, loop, zmq, ZMQ_ROUTER, o->replay, &p->replay, p->replay_at,
                         sizeof p->replay_at, eb);
    if (rc != 0) {
        pl_publish_free(p);
        return rc;
    }
    drain(p); /* what came before the loop watched */
    *out = p;
    return 0;
}
