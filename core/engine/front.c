/* `perilune engine`: one event loop that serves HTTP (core/http/server.h) and drives the simulated
 * engine in real time, times `speed`. Called by main.c; everything on its thread. */
#include "engine/front_call.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/log.h"

static pl_str one_model[] = {PL_STR_INIT("sim")};

void pl_front_options_default(pl_front_options *o)
{
    *o = (pl_front_options){
        .listen = PL_STR("127.0.0.1:0"),
        .kind = PL_STR("sglang"),
        .models = one_model,
        .models_n = 1,
        .speed = 1,
        .default_output_tokens = 64,
        .ranks_n = 1,
        .kv = {.wire.format = PL_WIRE_BY_KIND, .buffer = 10000},
        .seed = 1,
    };
    pl_sim_options_default(&o->sim);
}

/* --- the clock --- */

int64_t pl_front_now_us(const pl_front *f)
{
    return (int64_t)((double)(pl_now_ns() - f->start_ns) * 1e-3 * f->o->speed);
}

void pl_front_arm(pl_front *f)
{
    if (f->stepping)
        return; /* armed when the step is over */
    struct itimerspec when = {0};
    int64_t next = INT64_MAX;
    for (int r = 0; r < f->ranks_n; r++) {
        int64_t at = pl_sim_next_us(f->rank[r].sim);
        next = at < next ? at : next;
    }
    if (next != INT64_MAX) {
        double ns = (double)(next - pl_front_now_us(f)) * 1e3 / f->o->speed;
        uint64_t wait = ns < 1 ? 1 : ns > 1e18 ? (uint64_t)1e18 : (uint64_t)ns + 1;
        when.it_value.tv_sec = (time_t)(wait / 1000000000u);
        when.it_value.tv_nsec = (long)(wait % 1000000000u);
    }
    timerfd_settime(f->alarm_fd, 0, &when, NULL);
}

static void on_alarm(uv_poll_t *poll, int status, int events)
{
    pl_front *f = poll->data;
    uint64_t times;
    if (read(f->alarm_fd, &times, sizeof times) < 0)
        return;
    f->stepping = true;
    for (int r = 0; r < f->ranks_n; r++)
        pl_sim_step(f->rank[r].sim, pl_front_now_us(f));
    f->stepping = false;
    pl_front_arm(f);
}

static void on_tick(uv_timer_t *t)
{
    pl_front *f = t->data;
    pl_wheel_advance(&f->wheel, uv_now(&f->loop));
}

void pl_front_stats(const pl_front *f, pl_sim_stats *out)
{
    pl_sim_stats_of(f->rank[0].sim, out);
    for (int r = 1; r < f->ranks_n; r++) {
        pl_sim_stats st;
        pl_sim_stats_of(f->rank[r].sim, &st);
        out->running += st.running;
        out->waiting += st.waiting;
        out->waiting_tokens += st.waiting_tokens;
        out->pool_tokens += st.pool_tokens;
        out->used_tokens += st.used_tokens;
        out->evictable_tokens += st.evictable_tokens;
        out->available_tokens += st.available_tokens;
        out->retained_tokens += st.retained_tokens;
        out->held_tokens += st.held_tokens;
        out->sessions += st.sessions;
        out->streaming_sessions += st.streaming_sessions;
        out->stalled |= st.stalled;
        out->opened += st.opened;
        out->closed += st.closed;
        out->timed_out += st.timed_out;
        out->turns += st.turns;
        out->requests += st.requests;
        out->finished += st.finished;
        out->aborted += st.aborted;
        out->preempted += st.preempted;
        out->prompt_tokens += st.prompt_tokens;
        out->cached_tokens += st.cached_tokens;
        out->output_tokens += st.output_tokens;
        out->evicted_tokens += st.evicted_tokens;
        out->steps += st.steps;
    }
}

/* --- plain answers --- */

json_t *pl_front_string(pl_str s)
{
    json_t *v = json_stringn(s.p ? s.p : "", s.n);
    return v ? v : json_string("");
}

pl_str pl_front_quote(pl_arena *a, pl_str s)
{
    json_t *v = pl_front_string(s);
    char *text = v ? json_dumps(v, JSON_ENCODE_ANY) : NULL;
    json_decref(v);
    pl_str out = {NULL, 0};
    if (text)
        out = pl_arena_str(a, pl_str_c(text));
    free(text);
    return out;
}

void pl_front_json(pl_exchange *x, int status, pl_str request_id, pl_str body)
{
    pl_header h[2] = {{PL_STR("content-type"), PL_STR("application/json")},
                      {PL_STR("x-request-id"), request_id}};
    pl_exchange_respond(x, status, h, request_id.n ? 2 : 1, body);
}

void pl_front_send(pl_exchange *x, int status, json_t *value)
{
    char *text = value ? json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
    json_decref(value);
    pl_front_json(x, text ? status : 500, pl_head_find(&x->head, PL_STR("x-request-id")),
                  text ? pl_str_c(text) : PL_STR("{\"error\":{\"message\":\"out of memory\"}}"));
    free(text);
}

void pl_front_error(pl_front *f, pl_exchange *x, int status, const char *fmt, ...)
{
    char message[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(message, sizeof message, fmt, ap);
    va_end(ap);
    pl_buf body = {0};
    pl_front_render_error(f, x->head.path, status, message, &body);
    pl_front_json(x, status, pl_head_find(&x->head, PL_STR("x-request-id")), pl_buf_str(&body));
    pl_buf_free(&body);
}

bool pl_front_only(const json_t *object, const char *const *known)
{
    size_t n = 0;
    for (; *known; known++)
        n += json_object_get(object, *known) != NULL;
    return n == json_object_size(object);
}

static void render_error(void *ctx, pl_str path, int status, const char *message, pl_buf *body)
{
    pl_front_render_error(ctx, path, status, message, body);
}

pl_str pl_front_request_id(pl_front *f, pl_exchange *x)
{
    pl_str given = pl_head_find(&x->head, PL_STR("x-request-id"));
    if (given.n)
        return given;
    pl_rng r = {f->o->seed ^ ++f->next_id};
    return pl_arena_printf(&x->arena, "%016llx%016llx", (unsigned long long)pl_rng_next(&r),
                           (unsigned long long)pl_rng_next(&r));
}

/* --- requests --- */

static void infer(pl_front *f, pl_exchange *x, int path)
{
    pl_front_call *c = pl_front_call_begin(f, x, path);
    if (!c) {
        pl_front_error(f, x, 500, "%s", pl_strerror(PL_ENOMEM));
        return;
    }
    c->fault = pl_fault_draw(f, PL_FAULT_REQUESTS);
    if (c->fault == PL_FAULT_REFUSE) {
        pl_front_call_cut(c);
        return;
    }
    if (c->fault == PL_FAULT_500) {
        pl_front_call_refuse(c, 500, "Internal server error (a fault on demand)");
        return;
    }
    if (c->fault == PL_FAULT_HANG)
        return;
    int status = 500, rc;
    pl_errbuf eb = {{0}};
    if (c->api == PL_API_OTHER) { /* the probe: one token of a one-token prompt */
        c->parts_max = 1;
        c->model = f->o->models[0];
        f->scratch.n = 0;
        rc = pl_tokens_mark(&f->scratch, PL_MARK_USER);
        if (rc == 0)
            rc = pl_front_call_submit(c, &(pl_sim_ask){.output_tokens = 1});
    } else {
        json_error_t je;
        json_t *body = json_loadb(x->body.p ? x->body.p : "", x->body.n, 0, &je);
        if (!json_is_object(body)) {
            char why[256];
            snprintf(why, sizeof why, "The body is not a JSON object: %s",
                     body ? "it is another value" : je.text);
            json_decref(body);
            pl_front_call_refuse(c, 400, why);
            return;
        }
        rc = pl_front_call_parse(c, body, &status, &eb);
        json_decref(body);
    }
    if (rc != 0 && c->turn_refused)
        pl_front_call_refuse_turn(c, eb.text);
    else if (rc != 0)
        pl_front_call_refuse(c, status, eb.text[0] ? eb.text : pl_strerror(rc));
    else
        pl_front_arm(f);
}

static void on_request(void *ctx, pl_exchange *x)
{
    pl_front *f = ctx;
    pl_str path = x->head.path;
    int i = 0;
    while (i < PL_FRONT_PATHS && !pl_str_eq(path, pl_front_paths[i]))
        i++;
    if (i < PL_FRONT_PATHS) {
        bool get = pl_front_apis[i] == PL_API_OTHER;
        if (x->head.method == (get ? PL_GET : PL_POST))
            infer(f, x, i);
        else
            pl_front_send(x, 405, json_pack("{s:s}", "detail", "Method Not Allowed"));
    } else if (!pl_front_admin(f, x)) {
        pl_front_send(x, 404, json_pack("{s:s}", "detail", "Not Found"));
    }
}

static void on_gone(void *ctx, pl_exchange *x)
{
    pl_front_user *u = x->user;
    if (u)
        u->gone(u);
}

static void on_drain(void *ctx, pl_exchange *x)
{
    pl_front_user *u = x->user;
    if (u && u->drain)
        u->drain(u);
}

/* --- the loop --- */

static void on_signal(uv_signal_t *sig, int number)
{
    pl_front *f = sig->data;
    if (uv_is_closing((uv_handle_t *)&f->tick))
        return;
    pl_server_free(f->server);
    uv_close((uv_handle_t *)&f->tick, NULL);
    uv_close((uv_handle_t *)&f->alarm, NULL);
    pl_front_kv_close(f);
    for (int i = 0; i < 2; i++)
        uv_close((uv_handle_t *)&f->signals[i], NULL);
}

/* "host:port", "[v6]:port"; names are looked up. */
static int listen_on(pl_front *f, pl_str listen, pl_errbuf *eb)
{
    size_t colon = listen.n;
    while (colon > 0 && listen.p[colon - 1] != ':')
        colon--;
    pl_str host = {listen.p, colon ? colon - 1 : 0}, port = {listen.p + colon, listen.n - colon};
    pl_str bare = host;
    if (bare.n > 2 && bare.p[0] == '[' && bare.p[bare.n - 1] == ']')
        bare = (pl_str){bare.p + 1, bare.n - 2};
    uint64_t number;
    char name[256], service[16];
    if (!bare.n || bare.n >= sizeof name || pl_str_u64(port, 65535, &number) != 0)
        return pl_fail(eb, PL_EINVALID, "listen: \"%.*s\" is not host:port", PL_FMT(listen));
    snprintf(name, sizeof name, "%.*s", PL_FMT(bare));
    snprintf(service, sizeof service, "%u", (unsigned)number);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE};
    uv_getaddrinfo_t look;
    int rc = uv_getaddrinfo(&f->loop, &look, NULL, name, service, &hints);
    if (rc != 0)
        return pl_fail(eb, PL_ERESOLVE, "listen: %s: %s", name, uv_strerror(rc));
    int bound = 0;
    rc = pl_server_listen(f->server, look.addrinfo->ai_addr, false, &bound);
    uv_freeaddrinfo(look.addrinfo);
    if (rc != 0)
        return pl_fail(eb, PL_EIO, "listen: %.*s: %s", PL_FMT(listen), uv_strerror(rc));
    char at[300];
    snprintf(at, sizeof at, "%.*s:%d", PL_FMT(host), bound);
    pl_log(PL_LOG_INFO, "listening", "http://%s", at);
    return 0;
}

static const pl_handlers handlers = {.on_request = on_request,
                                     .on_gone = on_gone,
                                     .on_drain = on_drain,
                                     .render_error = render_error};

/* Everything that needs the loop; what was opened closes through on_signal. */
static int open_all(pl_front *f, pl_errbuf *eb)
{
    pl_server_options so;
    pl_server_options_default(&so);
    so.keep_alive_timeout_ms = 5000; /* as the engines' server does */
    uv_timer_init(&f->loop, &f->tick);
    uv_poll_init(&f->loop, &f->alarm, f->alarm_fd);
    f->tick.data = f->alarm.data = f;
    uv_timer_start(&f->tick, on_tick, PL_WHEEL_TICK_MS, PL_WHEEL_TICK_MS);
    uv_poll_start(&f->alarm, UV_READABLE, on_alarm);
    for (int i = 0; i < 2; i++) {
        uv_signal_init(&f->loop, &f->signals[i]);
        f->signals[i].data = f;
        uv_signal_start(&f->signals[i], on_signal, i ? SIGINT : SIGTERM);
    }
    f->server = pl_server_new(&f->loop, &f->wheel, &so, &handlers, f);
    if (!f->server)
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    int rc = pl_front_kv_open(f, eb);
    return rc ? rc : listen_on(f, f->o->listen, eb);
}

int pl_front_run(const pl_front_options *o, pl_errbuf *eb)
{
    bool vllm = pl_str_eq(o->kind, PL_STR("vllm"));
    if (!vllm && !pl_str_eq(o->kind, PL_STR("sglang")))
        return pl_fail(eb, PL_EINVALID, "kind: \"%.*s\" is neither sglang nor vllm",
                       PL_FMT(o->kind));
    if (!(o->speed >= 1e-3 && o->speed <= 1e6))
        return pl_fail(eb, PL_EINVALID, "speed: %g is not in 0.001 .. 1000000", o->speed);
    if (vllm && o->streaming_sessions)
        return pl_fail(eb, PL_EINVALID, "enable-streaming-session: only SGLang has sessions");
    if (o->ranks_n < 1 || o->ranks_n > PL_FRONT_RANKS_MAX)
        return pl_fail(eb, PL_EINVALID, "dp-size: %d is not in 1 .. %d", o->ranks_n,
                       PL_FRONT_RANKS_MAX);
    if (o->models_n < 1 || o->default_output_tokens < 1)
        return pl_fail(eb, PL_EINVALID, "at least one model and one output token are needed");
    pl_front *f = calloc(1, sizeof *f);
    if (!f)
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    f->o = o;
    f->vllm = vllm;
    for (int i = 0; i < PL_FAULT_TARGETS; i++)
        f->fault[i].rng.state = o->seed + (uint64_t)i;
    f->records = calloc(PL_FRONT_RECORDS, sizeof *f->records);
    f->start_ns = pl_now_ns();
    f->alarm_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    int rc = f->records ? 0 : pl_fail(eb, PL_ENOMEM, "out of memory");
    while (rc == 0 && f->ranks_n < o->ranks_n)
        if ((rc = pl_sim_new(&o->sim, &f->rank[f->ranks_n].sim, eb)) == 0)
            f->ranks_n++;
    if (rc == 0 && (f->alarm_fd < 0 || uv_loop_init(&f->loop) != 0))
        rc = pl_fail(eb, PL_EIO, "no event loop: %s", strerror(errno));
    if (rc == 0) {
        pl_wheel_init(&f->wheel, uv_now(&f->loop));
        signal(SIGPIPE, SIG_IGN);
        rc = open_all(f, eb);
        if (rc != 0)
            on_signal(&f->signals[0], 0);
        uv_run(&f->loop, UV_RUN_DEFAULT);
        uv_loop_close(&f->loop);
    }
    if (f->alarm_fd >= 0)
        close(f->alarm_fd);
    pl_front_kv_end(f);
    for (int r = 0; r < f->ranks_n; r++)
        pl_sim_free(f->rank[r].sim);
    free(f->scratch.v);
    pl_buf_free(&f->out);
    free(f->records);
    free(f);
    return rc;
}
