/* `perilune reload`: one POST /policy/reload on an event loop of its own, and its answer for people
 * or as JSON. Called by main.c on the main thread; everything made here is gone when it returns. */
#include "admin/reload_cli.h"

#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/clock.h"
#include "http/upstream.h"
#include "net.h"

#define ANSWER_MAX ((size_t)1 << 20)

typedef struct errand {
    uv_loop_t loop;
    pl_wheel wheel;
    uv_timer_t timer; /* drives the wheel */
    pl_pool *pool;
    int err, status;
    char detail[128];
    pl_buf body;
} errand;

/* --- asking --- */

static void on_timer(uv_timer_t *t)
{
    errand *e = t->data;
    pl_wheel_advance(&e->wheel, pl_now_ns() / 1000000u);
}

static void on_done(void *user, const pl_fetch_result *r)
{
    errand *e = user;
    e->err = r->err;
    e->status = r->status;
    snprintf(e->detail, sizeof e->detail, "%s", r->detail ? r->detail : pl_strerror(r->err));
    if (r->err == 0 && pl_buf_add(&e->body, r->body.p, r->body.n) != 0)
        e->err = PL_ENOMEM;
    pl_pool_free(e->pool);
    uv_close((uv_handle_t *)&e->timer, NULL);
}

/* Where and what; blocks until on_done has run and everything is closed. */
static int ask(errand *e, const char *host, int port, pl_str extra, pl_str body,
               uint64_t timeout_ms)
{
    pl_pool_options po;
    pl_pool_options_default(&po);
    po.first_byte_timeout_ms = timeout_ms;
    if (uv_loop_init(&e->loop) != 0)
        return PL_ENOMEM;
    pl_wheel_init(&e->wheel, pl_now_ns() / 1000000u);
    uv_timer_init(&e->loop, &e->timer);
    e->timer.data = e;
    uv_timer_start(&e->timer, on_timer, PL_WHEEL_TICK_MS, PL_WHEEL_TICK_MS);
    e->pool = pl_pool_new(&e->loop, &e->wheel, pl_str_c(host), port, &po);
    e->err = PL_ENOMEM;
    if (!e->pool || !pl_fetch_start(e->pool, PL_POST, PL_STR("/policy/reload"), extra, body,
                                    timeout_ms, ANSWER_MAX, on_done, e)) {
        if (e->pool)
            pl_pool_free(e->pool);
        uv_close((uv_handle_t *)&e->timer, NULL);
    }
    uv_run(&e->loop, UV_RUN_DEFAULT);
    uv_loop_close(&e->loop);
    return e->err;
}

/* The admin address as the pool wants it: a literal and a port. */
static int target(pl_str admin, char host[64], int *port, pl_errbuf *eb)
{
    struct sockaddr_storage addr;
    char text[80];
    int rc = pl_parse_listen(admin, &addr, eb);
    if (rc != 0)
        return rc;
    pl_addr_text((const struct sockaddr *)&addr, text, sizeof text);
    char *colon = strrchr(text, ':');
    *colon = 0;
    *port = atoi(colon + 1);
    size_t n = strlen(text);
    bool v6 = text[0] == '[';
    snprintf(host, 64, "%.*s", (int)(v6 ? n - 2 : n), text + v6);
    return 0;
}

/* A file that is here goes by its full path: the router may run in another folder. */
static char *request_body(const pl_reload_options *o)
{
    json_t *body = json_object();
    char *full = NULL, *text = NULL;
    if (o->policy.n) {
        char *policy = pl_str_dup(o->policy);
        bool is_file =
            memchr(o->policy.p, '/', o->policy.n) || pl_str_ends(o->policy, PL_STR(".lua"));
        full = policy && is_file ? realpath(policy, NULL) : NULL;
        json_object_set_new(body, "policy", json_string(full ? full : policy));
        free(policy);
    }
    if (o->params)
        json_object_set(body, "params", (json_t *)o->params);
    if (body)
        text = json_dumps(body, JSON_COMPACT);
    json_decref(body);
    free(full);
    return text;
}

/* --- telling --- */

static const char *text_of(const json_t *object, const char *key)
{
    const char *s = json_string_value(json_object_get(object, key));
    return s ? s : "";
}

static int tell(const pl_reload_options *o, int status, const json_t *answer, pl_errbuf *eb)
{
    const json_t *error = json_object_get(answer, "error");
    if (o->json) {
        json_dumpf(answer, o->out, JSON_INDENT(2) | JSON_PRESERVE_ORDER);
        fputc('\n', o->out);
    }
    if (status == 200) {
        if (o->json)
            return 0;
        fprintf(o->out, "policy %s, generation %lld, sha256 %.12s, hooks:", text_of(answer, "name"),
                (long long)json_integer_value(json_object_get(answer, "generation")),
                text_of(answer, "sha256"));
        size_t i;
        json_t *hook;
        json_array_foreach(json_object_get(answer, "hooks"), i, hook)
            fprintf(o->out, " %s", json_string_value(hook));
        fputc('\n', o->out);
        return 0;
    }
    if (status == 401)
        return pl_fail(eb, PL_EINVALID,
                       "the router wants its admin token: --token-env NAME names the environment "
                       "variable that holds it");
    if (status == 404 || status == 405)
        return pl_fail(
            eb, PL_EINVALID,
            "what answers at %.*s is no router's admin API (that is 127.0.0.1:8001 unless "
            "told otherwise): --admin HOST:PORT",
            PL_FMT(o->admin));
    if (o->json)
        return PL_EPOLICY;
    const char *file = text_of(error, "file"), *stage = text_of(error, "stage");
    long long line = (long long)json_integer_value(json_object_get(error, "line"));
    fprintf(o->err, "refused%s%s: ", *stage ? " at stage " : "", stage);
    if (*file && line)
        fprintf(o->err, "%s:%lld: ", file, line);
    else if (*file)
        fprintf(o->err, "%s: ", file);
    fprintf(o->err, "%s\nthe running policy stays\n", text_of(error, "message"));
    return PL_EPOLICY;
}

int pl_reload_cli(const pl_reload_options *o, pl_errbuf *eb)
{
    char host[64];
    int port;
    int rc = target(o->admin, host, &port, eb);
    if (rc != 0)
        return rc;
    for (size_t i = 0; i < o->token.n; i++)
        if ((unsigned char)o->token.p[i] < 0x21 || (unsigned char)o->token.p[i] > 0x7e)
            return pl_fail(eb, PL_EINVALID, "the token has bytes that a header cannot carry");
    errand e = {.status = 0};
    pl_buf extra = {0};
    char *body = request_body(o);
    rc = body ? pl_buf_addf(&extra, "Content-Type: application/json\r\n") : PL_ENOMEM;
    if (rc == 0 && o->token.n)
        rc = pl_buf_addf(&extra, "Authorization: Bearer %.*s\r\n", PL_FMT(o->token));
    if (rc == 0)
        rc = ask(&e, host, port, pl_buf_str(&extra), pl_str_c(body), o->timeout_ms);
    free(body);
    pl_buf_free(&extra);
    if (rc != 0) {
        pl_fail(eb, rc,
                "no answer from the admin API at %.*s: %s (is the router running there? "
                "--admin HOST:PORT)",
                PL_FMT(o->admin), e.detail[0] ? e.detail : pl_strerror(rc));
    } else {
        json_t *answer = json_loadb(e.body.p ? e.body.p : "", e.body.n, 0, NULL);
        if (json_is_object(answer))
            rc = tell(o, e.status, answer, eb);
        else
            rc = pl_fail(eb, PL_EPROTOCOL, "what answers at %.*s is no perilune (status %d)",
                         PL_FMT(o->admin), e.status);
        json_decref(answer);
    }
    pl_buf_free(&e.body);
    return rc;
}
