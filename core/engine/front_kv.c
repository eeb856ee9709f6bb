/* KV events of the simulated engine's front: opens a publisher for each rank (publish.h), lets it
 * tell what its engine's cache does, and breaks it on demand. Called by front.c and front_admin.c
 * on the front's thread; what was told while the loop worked becomes one batch of each rank before
 * the loop waits again, which at --speed 1 is a batch for each step of the engine.
 *
 * GET /sim/kv: what is published how, and for each rank: dp_rank, endpoint, replay (addresses),
 * next_seq (of the next batch), kept_from (the oldest that a replay has), kept_bytes, unsent
 * (during a pause), paused, subscriptions, sent (messages), replays, restarts, faults (how many
 * batches each is still to strike, and has struck); and what the rank's cache really holds, found
 * by walking it: blocks, and of their hashes, as 64-bit numbers, xor and sum (16 hexadecimal
 * digits). Of byte hashes the number is the last 8 bytes, as for vLLM's ints.
 *
 * POST /sim/kv {"action", "count", "dp_rank", "cache"} does something to one rank, or to all, and
 * answers the same:
 *
 * - lose, duplicate, garbage: strike the next `count` batches (1; 0: none any more)
 * - pause, resume: publishing
 * - clear: drops the cache as /flush_cache does, but also while requests run (what they hold stays)
 * - restart: as if the rank's process was replaced: its requests' connections are cut, its sessions
 *   and its cache are gone, numbers begin at 0 again and nothing is kept, without a word to
 *   subscribers, whose connections stay. With "cache": "kept" only the publisher starts anew */
#include "engine/front_call.h"

#include <errno.h>
#include <string.h>
#include <zmq.h>

#include "base/err.h"
#include "base/log.h"

/* tcp://HOST:PORT, its parts; port 0: any. */
typedef struct address {
    pl_str host;
    unsigned port;
} address;

static int address_of(const char *flag, pl_str text, address *out, pl_errbuf *eb)
{
    static const pl_str scheme = PL_STR_INIT("tcp://");
    size_t colon = text.n;
    while (colon > scheme.n && text.p[colon - 1] != ':')
        colon--;
    pl_str port = {text.p + colon, text.n - colon};
    uint64_t n = 0;
    if (!pl_str_starts(text, scheme) || colon <= scheme.n + 1 ||
        (!pl_str_eq(port, PL_STR("*")) && pl_str_u64(port, 65535, &n) != 0))
        return pl_fail(eb, PL_EINVALID, "%s: \"%.*s\" is not tcp://HOST:PORT", flag, PL_FMT(text));
    out->host = (pl_str){text.p + scheme.n, colon - 1 - scheme.n};
    out->port = (unsigned)n;
    return 0;
}

/* The port at the end of a bound address. */
static unsigned port_of(const char *endpoint)
{
    const char *colon = strrchr(endpoint, ':');
    return colon ? (unsigned)strtoul(colon + 1, NULL, 10) : 0;
}

static void close_publishers(pl_front *f)
{
    for (int r = 0; r < f->ranks_n; r++) {
        pl_publish_free(f->rank[r].publisher);
        f->rank[r].publisher = NULL;
    }
}

/* Those of all ranks, with ports that follow each other from what rank 0 got. */
static int open_publishers(pl_front *f, address live, address replay, pl_errbuf *eb)
{
    for (int r = 0; r < f->ranks_n; r++) {
        char at[300], again[300];
        pl_publish_options o = f->kv;
        unsigned add = (unsigned)r;
        snprintf(at, sizeof at, "tcp://%.*s:%u", PL_FMT(live.host),
                 live.port ? live.port + add : 0);
        snprintf(again, sizeof again, "tcp://%.*s:%u", PL_FMT(replay.host),
                 replay.port ? replay.port + add : 0);
        o.endpoint = pl_str_c(at);
        o.replay = replay.host.n ? pl_str_c(again) : (pl_str){NULL, 0};
        o.rank = r;
        int rc = live.port + add > 65535 || replay.port + add > 65535
                     ? pl_fail(eb, PL_EEXISTS, "--kv-events: no port is left for rank %d", r)
                     : pl_publish_new(&f->loop, f->zmq, &o, &f->rank[r].publisher, eb);
        if (rc != 0)
            return rc;
        pl_publish_stats st;
        pl_publish_stats_of(f->rank[r].publisher, &st);
        if (r == 0 && !f->kv.connect)
            live.port = port_of(st.endpoint);
        if (r == 0 && replay.host.n)
            replay.port = port_of(st.replay);
    }
    return 0;
}

static void before_poll(uv_prepare_t *prepare)
{
    pl_front *f = prepare->data;
    for (int r = 0; r < f->ranks_n; r++)
        pl_publish_flush(f->rank[r].publisher);
}

int pl_front_kv_open(pl_front *f, pl_errbuf *eb)
{
    const pl_publish_options *o = &f->kv;
    address live, replay = {{NULL, 0}, 0};
    f->kv = f->o->kv;
    if (o->wire.format == PL_WIRE_BY_KIND)
        f->kv.wire.format = f->vllm ? PL_WIRE_VLLM_MAP : PL_WIRE_SGLANG;
    if (!o->endpoint.n)
        return o->replay.n ? pl_fail(eb, PL_EINVALID, "--kv-events-replay needs --kv-events") : 0;
    if (o->wire.byte_hashes && o->wire.format == PL_WIRE_SGLANG)
        return pl_fail(eb, PL_EINVALID, "--kv-events-byte-hashes: SGLang has none");
    int rc = address_of("--kv-events", o->endpoint, &live, eb);
    if (rc == 0 && o->replay.n)
        rc = address_of("--kv-events-replay", o->replay, &replay, eb);
    if (rc == 0 && o->connect && live.port == 0)
        rc = pl_fail(eb, PL_EINVALID, "--kv-events-connect needs a port to connect to");
    if (rc != 0)
        return rc;
    f->zmq = zmq_ctx_new();
    if (!f->zmq)
        return pl_fail(eb, PL_ENOMEM, "no ZeroMQ context: %s", zmq_strerror(errno));
    uv_prepare_init(&f->loop, &f->before_poll);
    f->before_poll.data = f;
    /* Of ports that are free for any use, the ones behind may be taken: then again. */
    int tries = (live.port == 0 || (replay.host.n && replay.port == 0)) && f->ranks_n > 1 ? 50 : 1;
    while ((rc = open_publishers(f, live, replay, eb)) == PL_EEXISTS && --tries > 0)
        close_publishers(f);
    for (int r = 0; r < f->ranks_n && rc == 0; r++)
        if (pl_sim_watch_kv(f->rank[r].sim, &pl_publish_events, f->rank[r].publisher,
                            PL_SIM_KV_SHA256) != 0)
            rc = pl_fail(eb, PL_ENOMEM, "out of memory");
    if (rc != 0)
        return rc;
    pl_publish_stats st;
    pl_publish_stats_of(f->rank[0].publisher, &st);
    pl_log(PL_LOG_INFO, "kv_events", "%s%s%s, %s, ranks: %d", st.endpoint,
           st.replay[0] ? ", replay " : "", st.replay, pl_wire_name(o->wire.format), f->ranks_n);
    uv_prepare_start(&f->before_poll, before_poll);
    return 0;
}

void pl_front_kv_close(pl_front *f)
{
    if (!f->zmq)
        return;
    uv_close((uv_handle_t *)&f->before_poll, NULL);
    close_publishers(f);
}

void pl_front_kv_end(pl_front *f)
{
    if (f->zmq)
        zmq_ctx_term(f->zmq);
}

json_t *pl_front_kv_info(const pl_front *f)
{
    const pl_publish_options *o = &f->kv;
    address live, replay;
    if (!f->zmq || o->connect || address_of("", o->endpoint, &live, NULL) != 0)
        return json_null();
    pl_publish_stats st;
    pl_publish_stats_of(f->rank[0].publisher, &st);
    json_t *v = json_pack("{s:s,s:o,s:i,s:o,s:i,s:i}", "publisher", "zmq", "endpoint_host",
                          pl_front_string(live.host), "endpoint_port_base",
                          (int)port_of(st.endpoint), "topic", pl_front_string(o->topic),
                          "block_size", f->o->sim.page_tokens, "dp_size", f->ranks_n);
    if (v && o->replay.n && address_of("", o->replay, &replay, NULL) == 0) {
        json_object_set_new(v, "replay_endpoint_host", pl_front_string(replay.host));
        json_object_set_new(v, "replay_endpoint_port_base", json_integer(port_of(st.replay)));
        json_object_set_new(v, "replay_buffer_steps", json_integer(o->buffer));
    }
    return v;
}

/* --- the truth --- */

typedef struct sums {
    const pl_wire *wire;
    json_int_t blocks;
    uint64_t mixed, sum;
} sums;

static void add_run(void *user, const pl_sim_kv_run *run)
{
    sums *s = user;
    for (int i = 0; i < run->n; i++) {
        uint64_t hash = pl_wire_number(s->wire, &run->names[i]);
        s->blocks++;
        s->mixed ^= hash;
        s->sum += hash;
    }
}

static const char *const fault_names[PL_PUBLISH_FAULTS] = {"lose", "duplicate", "garbage"};

static json_t *state_of(const pl_front *f, int r)
{
    pl_publish_stats st;
    sums sum = {.wire = &f->kv.wire};
    char mixed[17], total[17];
    pl_publish_flush(f->rank[r].publisher); /* so that what is held was told */
    pl_publish_stats_of(f->rank[r].publisher, &st);
    pl_sim_each_kv(f->rank[r].sim, add_run, &sum);
    snprintf(mixed, sizeof mixed, "%016llx", (unsigned long long)sum.mixed);
    snprintf(total, sizeof total, "%016llx", (unsigned long long)sum.sum);
    json_t *faults = json_object();
    for (int i = 0; i < PL_PUBLISH_FAULTS; i++)
        json_object_set_new(faults, fault_names[i],
                            json_pack("{s:I,s:I}", "left", (json_int_t)st.left[i], "struck",
                                      (json_int_t)st.struck[i]));
    return json_pack("{s:i,s:s,s:s,s:I,s:I,s:I,s:I,s:b,s:I,s:I,s:I,s:I,s:I,s:s,s:s,s:o}", "dp_rank",
                     r, "endpoint", st.endpoint, "replay", st.replay, "next_seq",
                     (json_int_t)st.next, "kept_from", (json_int_t)st.kept_from, "kept_bytes",
                     (json_int_t)st.kept_bytes, "unsent", (json_int_t)st.unsent, "paused",
                     st.paused, "subscriptions", (json_int_t)st.subscriptions, "sent",
                     (json_int_t)st.sent, "replays", (json_int_t)st.replays, "restarts",
                     (json_int_t)st.restarts, "blocks", sum.blocks, "xor", mixed, "sum", total,
                     "faults", faults);
}

static json_t *state(const pl_front *f)
{
    const pl_publish_options *o = &f->kv;
    if (!f->zmq)
        return json_pack("{s:b}", "enabled", 0);
    json_t *ranks = json_array();
    for (int r = 0; r < f->ranks_n; r++)
        json_array_append_new(ranks, state_of(f, r));
    return json_pack("{s:b,s:s,s:b,s:i,s:o,s:i,s:o}", "enabled", 1, "format",
                     pl_wire_name(o->wire.format), "byte_hashes", o->wire.byte_hashes, "block_size",
                     f->o->sim.page_tokens, "topic", pl_front_string(o->topic), "buffer", o->buffer,
                     "ranks", ranks);
}

/* --- faults --- */

/* The rank's engine is replaced by a new one. */
static const char *restart(pl_front *f, int r)
{
    pl_sim *fresh;
    pl_front_rank *rank = &f->rank[r];
    if (f->stepping) /* a request behind another one on the same connection */
        return "the engine is in the middle of a step: ask again";
    if (pl_sim_new(&f->o->sim, &fresh, NULL) != 0)
        return "out of memory";
    if (pl_sim_watch_kv(fresh, &pl_publish_events, rank->publisher, PL_SIM_KV_SHA256) != 0) {
        pl_sim_free(fresh);
        return "out of memory";
    }
    for (pl_front_call *c = f->calls, *next; c; c = next) {
        next = c->next;
        if (c->rank == r)
            pl_front_call_cut(c);
    }
    pl_sim_free(rank->sim);
    rank->sim = fresh;
    return NULL;
}

enum { PAUSE = PL_PUBLISH_FAULTS, RESUME, CLEAR, RESTART, RESTART_KEPT, ACTIONS };

static const char *act(pl_front *f, int r, int action, uint64_t count)
{
    pl_publisher *p = f->rank[r].publisher;
    const char *wrong = NULL;
    pl_publish_flush(p); /* what was before is not struck */
    switch (action) {
    case PAUSE:
    case RESUME:
        pl_publish_pause(p, action == PAUSE);
        break;
    case CLEAR:
        pl_sim_flush_cache(f->rank[r].sim);
        break;
    case RESTART:
        wrong = restart(f, r);
        if (wrong)
            break;
        /* fall through */
    case RESTART_KEPT:
        pl_publish_restart(p);
        break;
    default:
        pl_publish_break(p, (pl_publish_fault)action, count);
    }
    return wrong;
}

static const char *control(pl_front *f, const json_t *body)
{
    static const char *const names[] = {"pause", "resume", "clear", "restart"};
    static const char *const known[] = {"action", "count", "dp_rank", "cache", NULL};
    const char *name = json_string_value(json_object_get(body, "action"));
    const json_t *count = json_object_get(body, "count"), *rank = json_object_get(body, "dp_rank");
    const json_t *cache = json_object_get(body, "cache");
    const char *kept = json_string_value(cache);
    int action = 0;
    if (!f->zmq)
        return "nothing is published: start the engine with --kv-events";
    if (!pl_front_only(body, known))
        return "members are action, count, dp_rank and cache";
    while (name && action < RESTART_KEPT &&
           strcmp(name, action < PAUSE ? fault_names[action] : names[action - PAUSE]) != 0)
        action++;
    if (!name || action == RESTART_KEPT)
        return "action must be lose, duplicate, garbage, pause, resume, clear or restart";
    if (count && (!json_is_integer(count) || json_integer_value(count) < 0))
        return "count must be an integer, 0 or more";
    if (rank && (!json_is_integer(rank) || json_integer_value(rank) < 0 ||
                 json_integer_value(rank) >= f->ranks_n))
        return "dp_rank must be the number of a rank";
    if (cache &&
        (action != RESTART || !kept || (strcmp(kept, "kept") != 0 && strcmp(kept, "empty") != 0)))
        return "cache must be empty or kept, and belongs to restart";
    if (kept && strcmp(kept, "kept") == 0)
        action = RESTART_KEPT;
    int from = rank ? (int)json_integer_value(rank) : 0, to = rank ? from + 1 : f->ranks_n;
    const char *wrong = NULL;
    for (int r = from; r < to && !wrong; r++)
        wrong = act(f, r, action, count ? (uint64_t)json_integer_value(count) : 1);
    pl_front_arm(f);
    return wrong;
}

void pl_front_kv_control(pl_front *f, pl_exchange *x)
{
    if (x->head.method == PL_POST) {
        json_t *body = json_loadb(x->body.p ? x->body.p : "", x->body.n, 0, NULL);
        const char *wrong = json_is_object(body) ? control(f, body) : "a JSON object is needed";
        json_decref(body);
        if (wrong) {
            pl_front_error(f, x, 400, "%s", wrong);
            return;
        }
    }
    pl_front_send(x, 200, state(f));
}
