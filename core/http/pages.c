/* What the router answers by itself on the public port: health, readiness, metrics and the merged
 * model list. Called by proxy.c on the loop's thread, after intake.c has let the path and method
 * pass. */
#include <stdio.h>

#include "http/request.h"

static void answer(pl_loop *l, pl_exchange *x, int status, const char *type, pl_buf *body)
{
    const pl_header h = {PL_STR("content-type"), pl_str_c(type)};
    pl_count_status(l, status);
    pl_exchange_respond(x, status, &h, 1, pl_buf_str(body));
    pl_buf_free(body);
}

static int usable_engines(const pl_loop *l)
{
    int n = 0;
    uint64_t now = pl_now_ns();
    for (int i = 0; i < l->view->engines_n; i++)
        n += pl_engine_why(l->view->engines[i], &l->router->config.decider.breaker, now) == 0;
    return n;
}

static int add_model(pl_buf *b, const pl_model *m)
{
    int kind = m->workers_n ? atomic_load(&m->workers[0]->engine->kind) : PL_KIND_OTHER;
    int rc = pl_buf_addf(b, "{\"id\":");
    if (rc == 0)
        rc = pl_json_quote(b, m->id);
    if (rc == 0)
        rc = pl_buf_addf(b, ",\"object\":\"model\",\"created\":0,\"owned_by\":\"%s\"}",
                         pl_engine_kind_name((pl_engine_kind)kind));
    return rc;
}

static int hex(char c)
{
    return c >= '0' && c <= '9'                 ? c - '0'
           : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
                                                : -1;
}

/* Ids have slashes, which clients escape as %2F or not. What is no escape stands for itself. */
static pl_str unescaped(pl_arena *a, pl_str s)
{
    char *out = pl_arena_alloc(a, s.n + 1);
    size_t n = 0;
    for (size_t i = 0; out && i < s.n; i++) {
        int high = s.p[i] == '%' && i + 2 < s.n ? hex(s.p[i + 1]) : -1;
        int low = high >= 0 ? hex(s.p[i + 2]) : -1;
        out[n++] = low < 0 ? s.p[i] : (char)(high << 4 | low);
        i += low < 0 ? 0 : 2;
    }
    return (pl_str){out, n};
}

static void models(pl_loop *l, pl_exchange *x)
{
    pl_buf b = {0};
    pl_str prefix = PL_STR("/v1/models/");
    int rc = 0;
    if (pl_str_starts(x->head.path, prefix)) {
        pl_str id = {x->head.path.p + prefix.n, x->head.path.n - prefix.n};
        const pl_model *m = pl_view_model(l->view, unescaped(&x->arena, id));
        if (!m) {
            pl_answer_error(l, x, 404, "model_not_found", -1, NULL, 0,
                            "no engine serves that model; GET /v1/models lists those there are");
            return;
        }
        rc = add_model(&b, m);
    } else {
        rc = pl_buf_addf(&b, "{\"object\":\"list\",\"data\":[");
        for (int i = 0; i < l->view->models_n && rc == 0; i++) {
            rc = i ? pl_buf_add(&b, ",", 1) : 0;
            if (rc == 0)
                rc = add_model(&b, &l->view->models[i]);
        }
        if (rc == 0)
            rc = pl_buf_addf(&b, "]}");
    }
    if (rc != 0)
        b.n = 0;
    answer(l, x, rc == 0 ? 200 : 503, "application/json", &b);
}

bool pl_pages(pl_loop *l, pl_exchange *x)
{
    pl_buf b = {0};
    pl_str path = x->head.path;
    int rc = 0, status = 200;
    if (pl_str_eq(path, PL_STR("/health"))) {
        rc = pl_buf_addf(&b, "{\"status\":\"ok\"}");
    } else if (pl_str_eq(path, PL_STR("/readyz"))) {
        int usable = usable_engines(l);
        bool draining = atomic_load(&l->router->draining);
        status = usable > 0 && !draining ? 200 : 503;
        rc = pl_buf_addf(&b, "{\"ready\":%s,\"usable_engines\":%d,\"draining\":%s}",
                         status == 200 ? "true" : "false", usable, draining ? "true" : "false");
    } else if (pl_str_eq(path, PL_STR("/metrics"))) {
        pl_router_render_metrics(l->router, &b);
        answer(l, x, 200, "text/plain; version=0.0.4; charset=utf-8", &b);
        return true;
    } else if (pl_str_starts(path, PL_STR("/v1/models"))) {
        models(l, x);
        return true;
    } else {
        return false;
    }
    answer(l, x, rc == 0 ? status : 503, "application/json", &b);
    return true;
}
