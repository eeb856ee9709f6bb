/* An event loop: see loop.h. Its thread runs only libuv; everything that others want of it arrives
 * as a message. The control thread initialises the struct before the thread starts and frees it
 * after the thread has ended. */
#include "loop.h"

#include <signal.h>
#include <stdlib.h>

#include "affinity.h"
#include "base/clock.h"
#include "http/proxy.h"

#define POLICY_TICK_MS 250

static uint64_t now_ms(void)
{
    return pl_now_ns() / 1000000u;
}

/* --- timers --- */

static void on_wheel_timer(uv_timer_t *t)
{
    pl_loop *l = t->data;
    pl_wheel_advance(&l->wheel, now_ms());
}

static void on_tick_timer(uv_timer_t *t)
{
    pl_loop *l = t->data;
    pl_decider_tick(l->decider, (double)pl_now_ns() / 1e9);
}

/* Before the loop sleeps: a slice of the VM's garbage collection, when hooks have run. */
static void on_idle(uv_prepare_t *p)
{
    pl_loop *l = p->data;
    if (!l->vm_used)
        return;
    l->vm_used = false;
    if (pl_decider_vm(l->decider))
        pl_vm_idle(pl_decider_vm(l->decider));
}

/* --- start --- */

int pl_loop_init(pl_loop *l, pl_router *r, int index, pl_vm *vm, const struct sockaddr *addr,
                 bool reuse_port, int *bound_port, pl_errbuf *eb)
{
    l->router = r;
    l->index = index;
    l->retry_tokens = 10;
    /* a state of its own, not the next state of its neighbour: their streams would overlap */
    pl_rng seeds = {r->config.seed};
    for (int i = 0; i <= index; i++)
        l->rng.state = pl_rng_next(&seeds);
    if (uv_loop_init(&l->uv) != 0) {
        pl_vm_free(vm);
        return pl_fail(eb, PL_EIO, "cannot make an event loop (too many open files?)");
    }
    l->uv_ready = true;
    pl_wheel_init(&l->wheel, now_ms());
    uv_timer_init(&l->uv, &l->wheel_timer);
    uv_timer_init(&l->uv, &l->tick_timer);
    uv_prepare_init(&l->uv, &l->idle);
    l->wheel_timer.data = l->tick_timer.data = l->idle.data = l;
    uv_timer_start(&l->wheel_timer, on_wheel_timer, PL_WHEEL_TICK_MS, PL_WHEEL_TICK_MS);
    uv_timer_start(&l->tick_timer, on_tick_timer, POLICY_TICK_MS, POLICY_TICK_MS);
    uv_prepare_start(&l->idle, on_idle);
    l->decider = pl_decider_new(&r->config.decider, &l->policy_stats);
    l->view = pl_fleet_view(r->fleet);
    pl_server_options o = r->config.server;
    o.connections = &r->connections;
    o.max_connections = r->config.max_connections;
    o.body_memory = &r->body_memory;
    o.max_body_memory = r->config.max_body_memory;
    o.stats = &l->server_stats;
    l->server = pl_server_new(&l->uv, &l->wheel, &o, &pl_proxy_handlers, l);
    int rc = pl_mailbox_init(&l->mailbox, &l->uv, l);
    l->mailbox_ready = rc == 0;
    if (!l->decider || !l->view || !l->server || rc != 0) {
        pl_vm_free(vm);
        return rc == PL_EIO ? pl_fail(eb, rc, "cannot make a loop's mailbox (too many open files?)")
                            : pl_fail(eb, PL_ENOMEM, "out of memory");
    }
    pl_decider_swap(l->decider, vm, r->generation);
    rc = pl_affinity_loop(l, eb);
    if (rc != 0)
        return rc;
    if (r->holdings && !(l->holdings = pl_holdings_loop_new(r->holdings)))
        return pl_fail(eb, PL_ENOMEM, "out of memory");
    rc = pl_server_listen(l->server, addr, reuse_port, bound_port);
    if (rc != 0) {
        char text[80];
        pl_addr_text(addr, text, sizeof text);
        return pl_fail(eb, PL_EIO, "cannot listen on %s: %s", text, uv_strerror(rc));
    }
    return 0;
}

static void run(void *arg)
{
    pl_loop *l = arg;
    sigset_t pipe; /* a peer that left is an error code, whatever the program has set */
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, NULL);
    uv_run(&l->uv, UV_RUN_DEFAULT);
    uv_close((uv_handle_t *)&l->wheel_timer, NULL);
    uv_run(&l->uv, UV_RUN_DEFAULT);
}

int pl_loop_start(pl_loop *l)
{
    l->started = uv_thread_create(&l->thread, run, l) == 0;
    return l->started ? 0 : PL_ENOMEM;
}

/* --- messages --- */

typedef struct view_message {
    pl_message message;
    pl_view *view;
} view_message;

static void take_view(pl_message *m, void *ctx)
{
    view_message *vm = (view_message *)m;
    pl_loop *l = ctx;
    pl_view_unref(l->view);
    l->view = vm->view;
    pl_proxy_view_changed(l);
    pl_queue_wake_all(l->router->queue);
    free(vm);
}

void pl_loop_send_view(pl_loop *l, pl_view *v)
{
    view_message *m = malloc(sizeof *m);
    if (!m)
        abort(); /* a loop that does not learn of a change would route to what is gone */
    *m = (view_message){{NULL, take_view}, v};
    if (pl_mailbox_post(&l->mailbox, &m->message) != 0) {
        pl_view_unref(v);
        free(m);
    }
}

/* A message that is answered on the control thread; it travels there and back. */
typedef struct errand {
    pl_message message;
    pl_loop *loop;
    pl_engine *engine;
    int cut;
    pl_loop_cut_fn cut_done;
    void *ctx;
    void (*drained)(pl_router *r);
} errand;

static errand *errand_new(pl_loop *l, void (*go)(pl_message *m, void *ctx))
{
    errand *e = calloc(1, sizeof *e);
    if (!e)
        abort();
    e->message.run = go;
    e->loop = l;
    return e;
}

static void cut_report(pl_message *m, void *ctx)
{
    (void)ctx;
    errand *e = (errand *)m;
    if (e->cut_done)
        e->cut_done(e->ctx, e->cut);
    if (e->engine)
        pl_engine_unref(e->engine);
    free(e);
}

static void report(errand *e, void (*back)(pl_message *m, void *ctx))
{
    e->message.run = back;
    if (pl_mailbox_post(&e->loop->router->control_mailbox, &e->message) != 0)
        back(&e->message, e->loop->router); /* the control loop has ended: the threads are joined */
}

static void take_cut(pl_message *m, void *ctx)
{
    errand *e = (errand *)m;
    pl_loop *l = ctx;
    if (e->engine)
        e->cut = pl_proxy_cut_engine(l, e->engine);
    else {
        pl_proxy_cut_all(l);
        pl_sessions_loop_drained(l->sessions);
    }
    report(e, cut_report);
}

int pl_loop_send_cut(pl_loop *l, pl_engine *engine, pl_loop_cut_fn done, void *ctx)
{
    errand *e = errand_new(l, take_cut);
    e->engine = engine ? pl_engine_ref(engine) : NULL;
    e->cut_done = done;
    e->ctx = ctx;
    int rc = pl_mailbox_post(&l->mailbox, &e->message);
    if (rc != 0) {
        if (e->engine)
            pl_engine_unref(e->engine);
        free(e);
    }
    return rc;
}

static void drained_report(pl_message *m, void *ctx)
{
    errand *e = (errand *)m;
    e->drained(ctx);
    free(e);
}

void pl_loop_check_drained(pl_loop *l)
{
    if (!l->server_empty || l->requests_n || !l->drained)
        return;
    pl_sessions_loop_drained(l->sessions);
    errand *e = errand_new(l, NULL);
    e->drained = l->drained;
    l->drained = NULL; /* told once */
    report(e, drained_report);
}

static void on_server_empty(void *ctx)
{
    pl_loop *l = ctx;
    l->server_empty = true;
    pl_loop_check_drained(l); /* turns whose clients have left may still be read to their ends */
}

static void take_drain(pl_message *m, void *ctx)
{
    errand *e = (errand *)m;
    pl_loop *l = ctx;
    l->draining = true;
    l->drained = e->drained;
    free(e);
    pl_server_drain(l->server, on_server_empty);
}

void pl_loop_send_drain(pl_loop *l, void (*drained)(pl_router *r))
{
    errand *e = errand_new(l, take_drain);
    e->drained = drained;
    if (pl_mailbox_post(&l->mailbox, &e->message) != 0)
        free(e);
}

static void take_stop(pl_message *m, void *ctx)
{
    pl_loop *l = ctx;
    free(m);
    pl_server_close_all(l->server);
    pl_server_free(l->server);
    l->server = NULL;
    pl_proxy_cut_all(l); /* what is read to its end without a client */
    pl_affinity_loop_stop(l);
    pl_proxy_free_pools(l);
    /* time goes on for what is still under way (the engines are told of aborts), else an engine
     * that does not answer would hold the loop for ever; by itself it does not keep the loop */
    uv_unref((uv_handle_t *)&l->wheel_timer);
    uv_close((uv_handle_t *)&l->tick_timer, NULL);
    uv_close((uv_handle_t *)&l->idle, NULL);
    pl_mailbox_close(&l->mailbox);
}

void pl_loop_send_stop(pl_loop *l)
{
    errand *e = errand_new(l, take_stop);
    if (pl_mailbox_post(&l->mailbox, &e->message) != 0)
        free(e);
}

void pl_loop_free(pl_loop *l)
{
    if (!l->uv_ready)
        return;
    if (!l->started) {
        if (l->server)
            pl_server_free(l->server);
        uv_close((uv_handle_t *)&l->wheel_timer, NULL);
        uv_close((uv_handle_t *)&l->tick_timer, NULL);
        uv_close((uv_handle_t *)&l->idle, NULL);
        if (l->mailbox_ready)
            pl_mailbox_close(&l->mailbox);
        uv_run(&l->uv, UV_RUN_DEFAULT);
    }
    if (l->mailbox_ready)
        pl_mailbox_destroy(&l->mailbox);
    uv_loop_close(&l->uv);
    pl_holdings_loop_free(l->holdings);
    pl_decider_free(l->decider);
    if (l->candidate)
        pl_vm_free(l->candidate);
    pl_view_unref(l->view);
}
