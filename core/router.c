/* The router: assembly, start, the control loop, drain, stop. Start reading at pl_router_start,
 * then pl_router_run. The control loop runs on the caller's thread (main's); loop.c has the threads
 * that carry traffic. */
#include "router.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "admin/admin.h"
#include "affinity.h"
#include "base/clock.h"
#include "http/proxy.h"
#include "knowledge.h"
#include "loop.h"
#include "policy/check.h"

/* --- create --- */

/* Every change of the fleet goes to every loop; on the thread that made it (the control thread). */
static void publish(void *ctx, pl_view *v)
{
    pl_router *r = ctx;
    for (int i = 0; i < r->loops_inited; i++)
        pl_loop_send_view(&r->loops[i], pl_view_ref(v));
    pl_view_unref(v);
    if (r->redis)
        pl_redis_distrust(r->redis);
    if (r->health)
        pl_health_sync(r->health);
    pl_gauges_sync(r->gauges);
    pl_knowledge_sync(r);
}

static void on_control_wheel(uv_timer_t *t)
{
    pl_router *r = t->data;
    pl_wheel_advance(&r->control_wheel, pl_now_ns() / 1000000u);
}

int pl_router_create(pl_config *config, pl_router **out, pl_errbuf *eb)
{
    pl_router *r = calloc(1, sizeof *r);
    *out = NULL;
    if (!r) {
        pl_config_free(config);
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    }
    r->config = *config;
    r->port = r->admin_port = -1;
    r->generation = 1;
    pl_config *c = &r->config;
    if (c->threads <= 0) {
        int cores = (int)uv_available_parallelism();
        c->threads = cores > 8 ? 8 : cores < 1 ? 1 : cores;
    }
    if (c->seed == 0 && uv_random(NULL, NULL, &c->seed, sizeof c->seed, 0, NULL) != 0)
        c->seed = pl_now_ns();
    r->loops_n = c->threads;
    r->loops = calloc((size_t)r->loops_n, sizeof *r->loops);
    r->queue = pl_queue_new(c->queue_max);
    r->shared = pl_shared_new();
    r->fleet = pl_fleet_new(publish, r);
    if (uv_loop_init(&r->control) == 0) {
        pl_wheel_init(&r->control_wheel, pl_now_ns() / 1000000u);
        uv_timer_init(&r->control, &r->control_wheel_timer);
        r->control_wheel_timer.data = r;
        uv_timer_start(&r->control_wheel_timer, on_control_wheel, PL_WHEEL_TICK_MS,
                       PL_WHEEL_TICK_MS);
        r->control_ready = pl_mailbox_init(&r->control_mailbox, &r->control, r) == 0;
        if (!r->control_ready) {
            uv_close((uv_handle_t *)&r->control_wheel_timer, NULL);
            uv_run(&r->control, UV_RUN_DEFAULT);
            uv_loop_close(&r->control);
        }
    }
    *out = r;
    if (!r->loops || !r->queue || !r->shared || !r->fleet || !r->control_ready) {
        pl_router_free(r);
        *out = NULL;
        return pl_fail(eb, PL_ENOMEM, "out of memory, or too many open files");
    }
    return 0;
}

int pl_router_new(const char *config_json, pl_router **out, char *error, size_t error_cap)
{
    pl_errbuf eb = {""};
    pl_config c;
    bool logs = false;
    *out = NULL;
    int rc = pl_config_init(&c);
    if (rc == 0 && config_json) {
        json_error_t je;
        json_t *root = json_loads(config_json, 0, &je);
        rc = root ? pl_config_json(&c, root, "config", &eb)
                  : pl_fail(&eb, PL_ESYNTAX, "config: %s at byte %d", je.text, je.position);
        logs = json_object_get(root, "log") != NULL;
        json_decref(root);
    }
    if (rc == 0)
        rc = pl_config_finish(&c, &eb);
    if (rc == 0 && logs)
        pl_log_init(c.log_level, c.log_json);
    if (rc == 0)
        rc = pl_router_create(&c, out, &eb);
    else
        pl_config_free(&c);
    if (rc != 0 && error && error_cap)
        snprintf(error, error_cap, "%s", eb.text[0] ? eb.text : pl_strerror(rc));
    return rc;
}

/* --- start --- */

/* A policy that a reload would refuse is started all the same, since its errors fall back; but
 * who started it is told. */
static void warn_of_policy(const pl_router *r)
{
    const char *file = pl_policy_source_file(r->source);
    pl_vm_options o = {.loops = r->loops_n,
                       .seed = r->config.seed,
                       .memory_bytes = r->config.vm_memory_bytes,
                       .clock = r->config.decider.clock};
    pl_vm_error err = {"", "", 0, ""};
    if (pl_str_starts(pl_str_c(file), PL_STR("builtin:")) || pl_try_out(r->source, &o, &err) == 0)
        return;
    pl_log(PL_LOG_WARN, "policy_faulty", "%s:%d: %s (stage %s; perilune check %s says more)",
           err.file[0] ? err.file : file, err.line, err.message, err.stage, file);
}

/* A VM for each loop, in order; stages and errors as for a reload. */
static int load_policy(pl_router *r, pl_vm **vms, pl_errbuf *eb)
{
    pl_config *c = &r->config;
    int rc = pl_policy_source_load(c->policy, c->policy_params, &r->source, eb);
    if (rc != 0)
        return rc;
    pl_vm_error err = {"", "", 0, ""};
    for (int i = 0; i < r->loops_n && rc == 0; i++) {
        pl_vm_options o = {
            .loop = i,
            .loops = r->loops_n,
            .seed = c->seed,
            .memory_bytes = c->vm_memory_bytes,
            .shared = r->shared,
            .clock = c->decider.clock,
        };
        rc = pl_vm_new(r->source, &o, &vms[i], &err);
        if (rc == 0)
            rc = pl_vm_init(vms[i], NULL, &err);
    }
    if (rc != 0) {
        if (err.file[0] && err.line)
            return pl_fail(eb, rc, "policy %s: %s:%d: %s", err.stage, err.file, err.line,
                           err.message);
        return pl_fail(eb, rc, "policy %s: %s: %s", err.stage, pl_policy_source_file(r->source),
                       err.message);
    }
    snprintf(r->policy.name, sizeof r->policy.name, "%s", pl_vm_name(vms[0]));
    snprintf(r->policy.file, sizeof r->policy.file, "%s", pl_policy_source_file(r->source));
    snprintf(r->policy.sha256, sizeof r->policy.sha256, "%s", pl_policy_source_sha256(r->source));
    r->policy.hooks = pl_vm_hooks(vms[0]);
    r->policy.loaded_at = pl_wall_seconds();
    warn_of_policy(r);
    return 0;
}

/* With SO_REUSEPORT a second router would silently share the port: somebody else's listener must
 * show first. */
static int probe_port(const struct sockaddr_storage *addr, pl_errbuf *eb)
{
    socklen_t len =
        addr->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
    char text[80];
    pl_addr_text((const struct sockaddr *)addr, text, sizeof text);
    int fd = socket(addr->ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    if (fd < 0)
        return pl_fail(eb, PL_EIO, "cannot make a socket for %s", text);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    int rc = bind(fd, (const struct sockaddr *)addr, len);
    if (rc == 0)
        rc = listen(fd, 1);
    int err = errno;
    close(fd);
    if (rc != 0)
        return pl_fail(eb, PL_EIO, "cannot listen on %s: %s%s", text, strerror(err),
                       err == EADDRINUSE ? " (is another router or engine running there? use "
                                           "--listen HOST:PORT)"
                                         : "");
    return 0;
}

static void set_port(struct sockaddr_storage *a, int port)
{
    if (a->ss_family == AF_INET6)
        ((struct sockaddr_in6 *)a)->sin6_port = htons((uint16_t)port);
    else
        ((struct sockaddr_in *)a)->sin_port = htons((uint16_t)port);
}

static int open_loops(pl_router *r, pl_vm **vms, pl_errbuf *eb)
{
    struct sockaddr_storage addr;
    int rc = pl_parse_listen(r->config.listen, &addr, eb);
    if (rc == 0)
        rc = probe_port(&addr, eb);
    for (int i = 0; i < r->loops_n && rc == 0; i++) {
        int port = 0;
        pl_vm *vm = vms[i];
        vms[i] = NULL; /* taken */
        r->loops_inited = i + 1;
        rc = pl_loop_init(&r->loops[i], r, i, vm, (const struct sockaddr *)&addr, r->loops_n > 1,
                          &port, eb);
        if (rc == 0 && i == 0) {
            r->port = port;
            set_port(&addr, port); /* port 0: the others join the first one's */
        }
    }
    return rc;
}

static void on_health_changed(void *ctx, pl_engine *e)
{
    pl_router *r = ctx;
    if (r->redis)
        pl_redis_distrust(r->redis);
    if (atomic_load(&e->health) != PL_HEALTH_UP)
        return;
    pl_gauges_wake(r->gauges, e);
    pl_queue_wake_all(r->queue);
}

static void on_described(void *ctx, pl_engine *e, pl_str server_info)
{
    pl_knowledge_described(ctx, e, server_info);
}

int pl_router_start(pl_router *r, char *error, size_t error_cap)
{
    pl_errbuf eb = {""};
    pl_config *c = &r->config;
    pl_vm **vms = calloc((size_t)r->loops_n, sizeof *vms);
    int rc = vms ? load_policy(r, vms, &eb) : PL_ENOMEM;
    for (int i = 0; i < c->engines_n && rc == 0; i++)
        rc = pl_fleet_add(r->fleet, &c->engines[i], NULL, &eb);
    if (rc == 0)
        rc = pl_affinity_start(r, &eb);
    if (rc == 0)
        rc = pl_knowledge_start(r, &eb);
    if (rc == 0)
        rc = open_loops(r, vms, &eb);
    if (rc == 0 && !pl_str_eq(c->admin_listen, PL_STR("off")))
        rc = pl_admin_start(r, &r->admin, &eb);
    for (int i = 0; i < r->loops_n && vms; i++)
        if (vms[i])
            pl_vm_free(vms[i]);
    free(vms);
    if (rc == 0) {
        r->gauges = pl_gauges_start(&r->control, &r->control_wheel, r->fleet, &c->gauges);
        rc = r->gauges ? 0 : PL_ENOMEM;
    }
    if (rc == 0) {
        r->health = pl_health_start(&r->control, &r->control_wheel, r->fleet, &c->health,
                                    on_health_changed, r);
        rc = r->health ? 0 : PL_ENOMEM;
        if (rc == 0)
            pl_health_on_info(r->health, on_described);
    }
    for (; rc == 0 && r->running < r->loops_n; r->running++)
        rc = pl_loop_start(&r->loops[r->running]);
    if (rc != 0) {
        if (error && error_cap)
            snprintf(error, error_cap, "%s", eb.text[0] ? eb.text : pl_strerror(rc));
        return rc;
    }
    struct sockaddr_storage addr;
    char text[80];
    if (pl_parse_listen(c->listen, &addr, &eb) == 0) {
        set_port(&addr, r->port);
        pl_addr_text((const struct sockaddr *)&addr, text, sizeof text);
        pl_log(PL_LOG_INFO, "listening", "http://%s (%d engines, policy %s, %d loops)", text,
               c->engines_n, r->policy.name, r->loops_n);
    }
    if (c->engines_n == 0)
        pl_log(PL_LOG_WARN, "no_engines",
               "no engines are configured: add some with POST /engines on the admin port");
    return 0;
}

/* --- stop --- */

static void stop_now(pl_router *r)
{
    if (r->stopping)
        return;
    r->stopping = true;
    for (int i = 0; i < r->running; i++)
        pl_loop_send_stop(&r->loops[i]);
    uv_stop(&r->control);
}

/* The requests have ended: what they opened on engines is closed, then the loops. */
static void finish(pl_router *r)
{
    if (r->finishing)
        return;
    r->finishing = true;
    pl_affinity_stop(r, stop_now);
}

static void on_loop_drained(pl_router *r)
{
    if (++r->loops_drained == r->loops_n)
        finish(r);
}

static void on_all_cut(void *ctx, int cut)
{
    pl_router *r = ctx;
    (void)cut;
    if (++r->loops_cut == r->loops_n)
        finish(r); /* what has no request is idle or slow to read: nothing more to wait for */
}

static void cut_all(pl_router *r)
{
    if (atomic_exchange(&r->cutting, 1))
        return;
    r->exit_code = 1;
    pl_log(PL_LOG_WARN, "drain_deadline", "requests still under way are cut");
    for (int i = 0; i < r->loops_n; i++)
        if (pl_loop_send_cut(&r->loops[i], NULL, on_all_cut, r) != 0)
            on_all_cut(r, 0);
}

static void on_drain_deadline(pl_timer *t)
{
    cut_all((pl_router *)((char *)t - offsetof(pl_router, drain_timer)));
}

static void drain(pl_router *r)
{
    if (atomic_exchange(&r->draining, 1)) {
        cut_all(r);
        return;
    }
    pl_log(PL_LOG_INFO, "draining", "no new connections; requests under way get %.0f seconds",
           (double)r->config.drain_timeout_ms / 1000);
    pl_wheel_arm(&r->control_wheel, &r->drain_timer, r->config.drain_timeout_ms, on_drain_deadline);
    for (int i = 0; i < r->loops_n; i++)
        pl_loop_send_drain(&r->loops[i], on_loop_drained);
}

static void on_signal(uv_signal_t *s, int number)
{
    pl_router *r = s->data;
    if (number == SIGHUP)
        pl_router_reconcile(r);
    else
        drain(r);
}

static void take_stop(pl_message *m, void *ctx)
{
    free(m);
    drain(ctx);
}

void pl_router_stop(pl_router *r)
{
    pl_message *m = calloc(1, sizeof *m);
    if (!m)
        return;
    m->run = take_stop;
    if (pl_mailbox_post(&r->control_mailbox, m) != 0)
        free(m);
}

int pl_router_take_signals(pl_router *r)
{
    static const int numbers[] = {SIGTERM, SIGINT, SIGHUP};
    for (int i = r->signals_n; i < 3; i++) {
        if (uv_signal_init(&r->control, &r->signals[i]) != 0)
            return PL_EIO;
        r->signals_n++;
        r->signals[i].data = r;
        if (uv_signal_start(&r->signals[i], on_signal, numbers[i]) != 0)
            return PL_EIO;
    }
    return 0;
}

/* The thread is the caller's: a peer that left must not end the program, and the caller must not
 * find a SIGPIPE of ours afterwards. */
static void hold_sigpipe(sigset_t *before)
{
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, before);
}

static void release_sigpipe(const sigset_t *before)
{
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    if (!sigismember(before, SIGPIPE))
        while (sigtimedwait(&pipe, NULL, &(struct timespec){0, 0}) == SIGPIPE)
            ;
    pthread_sigmask(SIG_SETMASK, before, NULL);
}

int pl_router_run(pl_router *r)
{
    sigset_t before;
    hold_sigpipe(&before);
    uv_run(&r->control, UV_RUN_DEFAULT);
    release_sigpipe(&before);
    return r->exit_code;
}

void pl_router_free(pl_router *r)
{
    if (!r)
        return;
    sigset_t before;
    hold_sigpipe(&before);
    if (!r->stopping)
        stop_now(r);
    for (int i = 0; i < r->running; i++)
        uv_thread_join(&r->loops[i].thread);
    for (int i = 0; i < r->signals_n; i++)
        uv_close((uv_handle_t *)&r->signals[i], NULL);
    for (int i = r->running; i < r->loops_inited; i++)
        pl_affinity_loop_stop(&r->loops[i]); /* they never ran */
    pl_affinity_free(r);
    pl_knowledge_stop(r);
    if (r->control_ready)
        pl_mailbox_close(&r->control_mailbox); /* runs what the threads still reported */
    while (r->removals)
        pl_router_end_removal(r->removals);
    if (r->health)
        pl_health_stop(r->health);
    pl_gauges_stop(r->gauges);
    if (r->admin)
        pl_admin_stop(r->admin);
    if (r->control_ready) {
        uv_close((uv_handle_t *)&r->control_wheel_timer, NULL);
        /* a stop that was asked for before ends a run early: until every handle is closed */
        do
            uv_run(&r->control, UV_RUN_DEFAULT);
        while (uv_loop_close(&r->control) == UV_EBUSY);
        pl_mailbox_destroy(&r->control_mailbox);
    }
    for (int i = 0; i < r->loops_inited; i++)
        pl_loop_free(&r->loops[i]);
    pl_knowledge_free(r);
    free(r->loops);
    if (r->source)
        pl_policy_source_unref(r->source);
    if (r->fleet)
        pl_fleet_free(r->fleet);
    if (r->shared)
        pl_shared_free(r->shared);
    if (r->queue)
        pl_queue_free(r->queue);
    pl_config_free(&r->config);
    free(r);
    release_sigpipe(&before);
}

int pl_router_port(const pl_router *r)
{
    return r->port;
}

int pl_router_admin_port(const pl_router *r)
{
    return r->admin_port;
}
