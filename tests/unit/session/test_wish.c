/* What requests say about their session: all ways in, which one counts, and what is refused with
 * which words. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>

#include "../failing_alloc.h"

#include "base/clock.h"
#include "base/err.h"
#include "session/wish.h"

static pl_arena arena = PL_ARENA_INIT;
static pl_wish w;
static pl_wish_error err;
static bool trusted;

/* "name: value" lines as a head; the strings are the caller's. */
static pl_head head_of(const char *const *lines, pl_header *room)
{
    pl_head h = {.request = true, .headers = room};
    for (; lines && *lines; lines++) {
        const char *colon = strchr(*lines, ':');
        room[h.headers_n].name = (pl_str){*lines, (size_t)(colon - *lines)};
        room[h.headers_n++].value = pl_str_trim(pl_str_c(colon + 1));
    }
    return h;
}

static pl_wish_options options(void)
{
    return (pl_wish_options){
        .headers = pl_wish_default_headers,
        .headers_n = pl_wish_default_headers_n,
        .header_timeout_seconds = 120,
        .max_timeout_seconds = 86400,
        .trusted = trusted,
        .filter = pl_wish_filter(pl_wish_default_headers, pl_wish_default_headers_n)};
}

static char *exact; /* the last body: what was read points into it */

/* Without a terminator behind the body: a read beyond it shows. */
static int read_with(const char *body, const char *const *lines)
{
    pl_header room[110];
    pl_head head = head_of(lines, room);
    pl_wish_options o = options();
    pl_scan s;
    free(exact);
    exact = malloc(strlen(body) + 1);
    assert_non_null(exact);
    memcpy(exact, body, strlen(body));
    exact = realloc(exact, strlen(body));
    pl_str text = {exact, strlen(body)};
    if (pl_scan_body(text, 100, &s) != 0)
        fail_msg("not a body: %s", body);
    err = (pl_wish_error){0};
    return pl_wish_read(&arena, text, &s, &head, &o, &w, &err);
}

static void accept(const char *body)
{
    if (read_with(body, NULL) != 0)
        fail_msg("%s: %s", body, err.text.text);
}

static void refuse_with(const char *body, const char *const *lines, const char *code,
                        const char *text)
{
    int rc = read_with(body, lines);
    if (rc != PL_EINVALID || err.status != 400 || !err.code || strcmp(err.code, code) != 0 ||
        strcmp(err.text.text, text) != 0)
        fail_msg("%s: rc %d, status %d, code %s: %s", body, rc, err.status,
                 err.code ? err.code : "none", err.text.text);
}

static void refuse(const char *body, const char *code, const char *text)
{
    refuse_with(body, NULL, code, text);
}

static void is_str(pl_str got, const char *want)
{
    if (!pl_str_eq(got, pl_str_c(want)))
        fail_msg("got \"%.*s\", not \"%s\"", PL_FMT(got), want);
}

#define HEADERS(...) ((const char *const[]){__VA_ARGS__, NULL})
#define CONTROL(x)   "{\"model\":\"m\",\"nvext\":{\"session_control\":{" x "}}}"

static void test_nothing(void **state)
{
    accept("{\"model\":\"m\",\"messages\":[]}");
    assert_int_equal(w.source, PL_WISH_NONE);
    assert_null(w.id.p);
    assert_null(w.parent.p);
    assert_true(isnan(w.priority));
    assert_true(w.retention_seconds == -1 && w.output_tokens == -1 && w.strict_priority == -1);
    assert_true(w.instance == -1 && w.rank == -1);
    assert_false(w.final || w.delta || w.conflict || w.nvext || w.query_only);
    accept("{\"nvext\":null,\"session_id\":null,\"session_params\":null,\"cache_control\":null}");
    assert_int_equal(w.source, PL_WISH_NONE);
    assert_true(w.nvext);
    accept("{\"nvext\":{\"session_control\":null,\"agent_hints\":null,\"greed_sampling\":true}}");
    assert_int_equal(w.source, PL_WISH_NONE);
}

static void test_control(void **state)
{
    static const struct {
        const char *body;
        pl_wish_action action;
        double timeout;
        bool given, final;
    } cases[] = {
        {CONTROL("\"session_id\":\"s1\",\"action\":\"open\""), PL_WISH_OPEN, 300, false, false},
        {CONTROL("\"session_id\":\"s1\",\"action\":\"open\",\"timeout\":60"), PL_WISH_OPEN, 60,
         true, false},
        {CONTROL("\"action\":\"bi\\u006ed\",\"timeout\":1,\"session_id\":\"s\\u0031\""),
         PL_WISH_BIND, 1, true, false},
        {CONTROL("\"session_id\":\"s1\",\"action\":\"bind\",\"timeout\":86400"), PL_WISH_BIND,
         86400, true, false},
        {CONTROL("\"session_id\":\"s1\",\"action\":\"close\""), PL_WISH_CLOSE, 300, false, true},
        {CONTROL("\"session_id\":\"s1\""), PL_WISH_TURN, 300, false, false},
        {CONTROL("\"session_id\":\"s1\",\"action\":null,\"timeout\":null,\"history\":null"),
         PL_WISH_TURN, 300, false, false},
        /* the timeout is open's and bind's; others may carry any number */
        {CONTROL("\"session_id\":\"s1\",\"timeout\":0"), PL_WISH_TURN, 300, false, false},
        {CONTROL("\"session_id\":\"s1\",\"action\":\"close\",\"timeout\":1e9"), PL_WISH_CLOSE, 300,
         false, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        accept(cases[i].body);
        assert_int_equal(w.source, PL_WISH_CONTROL);
        assert_int_equal(w.action, cases[i].action);
        assert_true(w.timeout_seconds == cases[i].timeout);
        assert_int_equal(w.timeout_given, cases[i].given);
        assert_int_equal(w.final, cases[i].final);
        assert_true(w.nvext);
        assert_false(w.delta);
        is_str(w.id, "s1");
    }
    accept(CONTROL("\"session_id\":\"s1\",\"history\":\"delta\",\"parent_session_id\":\"p\""));
    assert_true(w.delta);
    is_str(w.parent, "p");
    accept(CONTROL("\"session_id\":\"s1\",\"history\":\"full\",\"parent_session_id\":\"s1\""));
    assert_false(w.delta);
    assert_null(w.parent.p); /* nobody is his own parent */
}

static void test_control_refused(void **state)
{
    static const char id[] = "nvext.session_control.session_id must be a string of 1 to 256 bytes";
    static const char code[] = "invalid_session";
    char text[256];
    snprintf(text, sizeof text, "%s, and is missing", id);
    refuse(CONTROL(""), code, text);
    refuse(CONTROL("\"action\":\"open\""), code, text);
    refuse(CONTROL("\"session_id\":null"), code, text);
    snprintf(text, sizeof text, "%s, not \"\"", id);
    refuse(CONTROL("\"session_id\":\"\""), code, text);
    snprintf(text, sizeof text, "%s, not 7", id);
    refuse(CONTROL("\"session_id\":7"), code, text);
    refuse(CONTROL("\"session_id\":\"a\\nb\""), code,
           "nvext.session_control.session_id must be a string without control characters, not "
           "\"a\\nb\"");
    refuse(CONTROL("\"session_id\":\"a\x7f\""), code,
           "nvext.session_control.session_id must be a string without control characters, not "
           "\"a\x7f\"");
    refuse(CONTROL("\"session_id\":\"a\",\"session_id\":\"b\""), code,
           "nvext.session_control.session_id is given twice");
    refuse(CONTROL("\"session_id\":\"a\",\"action\":\"start\""), code,
           "nvext.session_control.action must be \"open\", \"bind\" or \"close\" (absent: a turn), "
           "not \"start\"");
    refuse(CONTROL("\"session_id\":\"a\",\"action\":true"), code,
           "nvext.session_control.action must be \"open\", \"bind\" or \"close\" (absent: a turn), "
           "not true");
    refuse(CONTROL("\"session_id\":\"a\",\"history\":\"some\""), code,
           "nvext.session_control.history must be \"full\" or \"delta\", not \"some\"");
    static const char *const timeouts[] = {"0", "-5", "0.5", "86401", "1e300", "\"60\"", "true"};
    for (size_t i = 0; i < sizeof timeouts / sizeof *timeouts; i++)
        for (int bind = 0; bind < 2; bind++) {
            char body[256];
            snprintf(body, sizeof body,
                     CONTROL("\"session_id\":\"a\",\"action\":\"%s\",\"timeout\":%s"),
                     bind ? "bind" : "open", timeouts[i]);
            snprintf(text, sizeof text,
                     "nvext.session_control.timeout must be a number of seconds from 1 to 86400, "
                     "not %s",
                     timeouts[i]);
            refuse(body, code, text);
        }
    refuse(CONTROL("\"session_id\":\"a\",\"timeout\":\"x\""), code,
           "nvext.session_control.timeout must be a number of seconds, not \"x\"");
    refuse("{\"nvext\":{\"session_control\":[]}}", code,
           "nvext.session_control must be an object, not a list");
    refuse("{\"nvext\":\"x\"}", "invalid_nvext", "nvext must be an object, not \"x\"");
    refuse("{\"nvext\":{\"session_control\":{\"session_id\":\"a\"},\"session_control\":null}}",
           "invalid_nvext", "nvext.session_control is given twice");
}

static void test_id_length(void **state)
{
    char body[4096], id[600];
    for (size_t n = 255; n <= 257; n++) {
        memset(id, 'x', n);
        id[n] = 0;
        snprintf(body, sizeof body, CONTROL("\"session_id\":\"%s\""), id);
        int rc = read_with(body, NULL);
        assert_int_equal(rc, n > 256 ? PL_EINVALID : 0);
        if (n <= 256)
            is_str(w.id, id);
        else
            assert_non_null(strstr(err.text.text, "... (257 bytes)"));
        snprintf(body, sizeof body, "x-session-id: %s", id);
        rc = read_with("{}", HEADERS(body));
        assert_int_equal(rc, n > 256 ? PL_EINVALID : 0);
        if (rc != 0)
            assert_string_equal(err.text.text, "header x-session-id must have 1 to 256 bytes");
    }
    /* the length counts after unescaping: 256 bytes as 128 escapes of two bytes each */
    char *p = body + snprintf(body, sizeof body, "{\"session_id\":\"");
    for (int i = 0; i < 128; i++)
        p += sprintf(p, "\\u00e9");
    strcpy(p, "\"}");
    accept(body);
    assert_int_equal(w.id.n, 256);
    strcpy(p, "x\"}");
    assert_int_equal(read_with(body, NULL), PL_EINVALID);
    size_t at = (size_t)snprintf(body, sizeof body, "%s",
                                 "{\"nvext\":{\"session_control\":"
                                 "{\"session_id\":\"");
    for (int i = 0; i < 257; i++)
        at += (size_t)snprintf(body + at, sizeof body - at, "\\u0078");
    snprintf(body + at, sizeof body - at, "\"}}}");
    assert_int_equal(read_with(body, NULL), PL_EINVALID);
    assert_non_null(strstr(err.text.text, "... (1542 bytes as written)"));
}

static void test_sglang(void **state)
{
    accept("{\"text\":\"a\",\"session_params\":{\"rid\":\"r\",\"id\":\"s\\u0031\",\"offset\":-1}}");
    assert_int_equal(w.source, PL_WISH_PARAMS);
    assert_int_equal(w.action, PL_WISH_TURN);
    assert_true(w.delta);
    is_str(w.id, "s1");
    is_str(w.params_id_raw, "\"s\\u0031\"");
    accept("{\"text\":\"a\",\"session_id\":\"s1\"}");
    assert_int_equal(w.source, PL_WISH_TAG);
    assert_false(w.delta);
    assert_true(w.timeout_seconds == 120);
    is_str(w.id, "s1");

    refuse("{\"session_id\":\"a\",\"session_params\":{\"id\":\"a\"}}", "invalid_session",
           "session_id and session_params cannot both be given");
    refuse("{\"session_params\":{}}", "invalid_session",
           "session_params.id must be a string of 1 to 256 bytes, and is missing");
    refuse("{\"session_params\":[{\"id\":\"a\"}]}", "invalid_session",
           "session_params must be an object, not a list");
    refuse("{\"session_id\":[\"a\"]}", "invalid_session",
           "session_id must be a string of 1 to 256 bytes, not a list");

    /* with session_control: one session, or a refusal; a tag may differ and then loses */
    accept("{\"nvext\":{\"session_control\":{\"session_id\":\"a\",\"action\":\"open\"}},"
           "\"session_params\":{\"id\":\"a\"}}");
    assert_int_equal(w.source, PL_WISH_CONTROL);
    assert_int_equal(w.action, PL_WISH_OPEN);
    assert_true(w.delta);
    is_str(w.params_id_raw, "\"a\"");
    refuse("{\"session_params\":{\"id\":\"b\"},\"nvext\":{\"session_control\":{\"session_id\":"
           "\"a\"}}}",
           "invalid_session",
           "nvext.session_control.session_id and session_params.id name two different sessions");
    accept("{\"session_id\":\"b\",\"nvext\":{\"session_control\":{\"session_id\":\"a\"}}}");
    assert_true(w.conflict);
    is_str(w.id, "a");
}

static void with(const char *const *lines, const char *id, const char *parent, bool final)
{
    if (read_with("{\"model\":\"m\"}", lines) != 0)
        fail_msg("%s: %s", lines[0], err.text.text);
    assert_int_equal(w.source, PL_WISH_HEADER);
    assert_int_equal(w.action, PL_WISH_TURN);
    assert_true(w.timeout_seconds == 120);
    is_str(w.id, id);
    is_str(w.parent, parent ? parent : "");
    assert_int_equal(w.final, final);
    assert_false(w.conflict);
}

static void test_headers(void **state)
{
    with(HEADERS("X-Dynamo-Session-ID: a"), "a", NULL, false);
    with(HEADERS("x-dynamo-session-final: true", "x-dynamo-session-id: a",
                 "x-dynamo-parent-session-id: p"),
         "a", "p", true);
    with(HEADERS("X-Dynamo-Session-Id: a", "X-Dynamo-Session-Final: 1"), "a", NULL, true);
    with(HEADERS("X-Dynamo-Session-Id: a", "X-Dynamo-Session-Final: FALSE"), "a", NULL, false);
    with(HEADERS("X-Dynamo-Session-Id: a", "X-Dynamo-Session-Final: 0"), "a", NULL, false);
    with(HEADERS("X-Claude-Code-Session-Id: root"), "root", NULL, false);
    with(HEADERS("X-Claude-Code-Session-Id: root", "X-Claude-Code-Agent-Id: kid"), "kid", "root",
         false);
    with(HEADERS("X-Claude-Code-Session-Id: root", "X-Claude-Code-Agent-Id: kid",
                 "X-Claude-Code-Parent-Agent-Id: mid"),
         "kid", "mid", false);
    with(HEADERS("X-Claude-Code-Agent-Id: kid"), "kid", NULL, false);
    with(HEADERS("Session-Id: codex"), "codex", NULL, false);
    with(HEADERS("session_id: codex"), "codex", NULL, false);
    with(HEADERS("X-Session-ID: oc", "X-Parent-Session-ID: p"), "oc", "p", false);
    with(HEADERS("X-SMG-Routing-Key: user 7"), "user 7", NULL, false);
    /* the order of the list counts, not that of the head; an empty one is none */
    with(HEADERS("x-smg-routing-key: k", "x-session-id: x", "x-dynamo-session-id: d"), "d", NULL,
         false);
    with(HEADERS("x-dynamo-session-id:", "x-session-id: x"), "x", NULL, false);
    with(HEADERS("x-session-id: x", "x-dynamo-parent-session-id: other"), "x", NULL, false);
    with(HEADERS("x-session-id: x", "x-session-id: x", "x-parent-session-id: x"), "x", NULL, false);

    assert_int_equal(read_with("{}", HEADERS("x-session-idx: a", "y-session-id: b",
                                             "x-dynamo-parent-session-id: p")),
                     0);
    assert_int_equal(w.source, PL_WISH_NONE);
}

static void test_headers_refused(void **state)
{
    refuse_with("{}", HEADERS("X-Session-Id: caf\xc3\xa9"), "invalid_session",
                "header x-session-id must be printable ASCII");
    refuse_with("{}", HEADERS("X-Session-Id: a\tb"), "invalid_session",
                "header x-session-id must be printable ASCII");
    refuse_with("{}", HEADERS("X-Session-Id: a", "x-session-id: b"), "invalid_session",
                "header x-session-id is given twice with different values");
    refuse_with("{}", HEADERS("X-Session-Id: a", "X-Parent-Session-Id: \x80"), "invalid_session",
                "header x-parent-session-id must be printable ASCII");
    refuse_with("{}", HEADERS("x-dynamo-session-id: a", "x-dynamo-session-final: yes"),
                "invalid_session", "header x-dynamo-session-final must be true, 1, false or 0");
    /* those of a row that lost are not judged */
    with(HEADERS("x-dynamo-session-id: a", "x-session-id: \x80"), "a", NULL, false);
}

static void test_body_wins(void **state)
{
    assert_int_equal(read_with(CONTROL("\"session_id\":\"a\""), HEADERS("x-session-id: b")), 0);
    assert_int_equal(w.source, PL_WISH_CONTROL);
    assert_true(w.conflict);
    is_str(w.id, "a");
    assert_null(w.parent.p);
    /* a header that names another session says nothing about this one */
    assert_int_equal(read_with(CONTROL("\"session_id\":\"a\""),
                               HEADERS("x-dynamo-session-id: b", "x-dynamo-session-final: true",
                                       "x-dynamo-parent-session-id: p")),
                     0);
    assert_true(w.conflict);
    assert_false(w.final);
    assert_null(w.parent.p);
    /* one that names the same, or none, does */
    assert_int_equal(read_with(CONTROL("\"session_id\":\"a\""),
                               HEADERS("x-dynamo-session-id: a", "x-dynamo-session-final: true",
                                       "x-dynamo-parent-session-id: p")),
                     0);
    assert_false(w.conflict);
    assert_true(w.final);
    is_str(w.parent, "p");
    assert_int_equal(read_with("{\"session_id\":\"a\"}", HEADERS("x-parent-session-id: p")), 0);
    assert_int_equal(w.source, PL_WISH_TAG);
    is_str(w.parent, "p");
}

static void test_own_list(void **state)
{
    static const pl_wish_header mine[] = {{.id = PL_STR_INIT("x-correlation-id")}};
    pl_header room[4];
    pl_head head = head_of(HEADERS("X-Session-Id: a", "X-Correlation-ID: c"), room);
    pl_scan s;
    assert_int_equal(pl_scan_body(PL_STR("{}"), 10, &s), 0);
    for (int prepared = 0; prepared < 2; prepared++) {
        pl_wish_options o = options();
        o.headers = mine;
        o.headers_n = 1;
        o.filter = prepared ? pl_wish_filter(mine, 1) : 0;
        assert_int_equal(pl_wish_read(&arena, PL_STR("{}"), &s, &head, &o, &w, &err), 0);
        is_str(w.id, "c");
        o.headers_n = 0;
        o.filter = 0;
        assert_int_equal(pl_wish_read(&arena, PL_STR("{}"), &s, &head, &o, &w, &err), 0);
        assert_int_equal(w.source, PL_WISH_NONE);
    }
}

static void test_hints(void **state)
{
    accept("{\"nvext\":{\"agent_hints\":{\"priority\":-3,\"strict_priority\":2,\"osl\":512,"
           "\"speculative_prefill\":true},\"annotations\":[\"x\",\"query_instance_id:\"],"
           "\"cache_salt\":\"t\\u0031\"},\"cache_salt\":\"other\"}");
    assert_true(w.priority == -3 && w.strict_priority == 2 && w.output_tokens == 512);
    assert_true(w.query_only);
    is_str(w.cache_salt, "t1");
    assert_int_equal(w.source, PL_WISH_NONE);
    accept("{\"nvext\":{\"cache_salt\":\"\",\"annotations\":[\"query_instance_id\"]},"
           "\"cache_salt\":\"other\"}");
    is_str(w.cache_salt, "other");
    assert_false(w.query_only);
    accept("{\"cache_salt\":\"\"}");
    assert_null(w.cache_salt.p);
    accept("{\"cache_salt\":7}"); /* the engine's to judge */
    assert_null(w.cache_salt.p);
    refuse("{\"nvext\":{\"agent_hints\":{\"priority\":1.5}}}", "invalid_nvext",
           "nvext.agent_hints.priority must be a whole number from -2147483648 to 2147483647, not "
           "1.5");
    refuse("{\"nvext\":{\"agent_hints\":{\"osl\":-1}}}", "invalid_nvext",
           "nvext.agent_hints.osl must be a whole number from 0 to 4294967295, not -1");
    refuse("{\"nvext\":{\"agent_hints\":3}}", "invalid_nvext",
           "nvext.agent_hints must be an object, not 3");
    refuse("{\"nvext\":{\"annotations\":[\"a\",1]}}", "invalid_nvext",
           "nvext.annotations[1] must be a string, not 1");
    refuse("{\"nvext\":{\"cache_salt\":{}}}", "invalid_nvext",
           "nvext.cache_salt must be a string, not an object");
}

static void test_pins(void **state)
{
    static const char body[] = "{\"nvext\":{\"backend_instance_id\":12,\"dp_rank\":1,"
                               "\"prefill_worker_id\":3,\"decode_worker_id\":null}}";
    accept(body);
    assert_true(w.instance == -1 && w.rank == -1);
    assert_int_equal(w.pins_removed, 3);
    trusted = true;
    accept(body);
    assert_true(w.instance == 12 && w.rank == 1);
    assert_int_equal(w.pins_removed, 0);
    refuse("{\"nvext\":{\"dp_rank\":-1}}", "invalid_nvext",
           "nvext.dp_rank must be a whole number from 0 to 4294967295, not -1");
    trusted = false;
}

static void test_retention(void **state)
{
    static const struct {
        const char *ttl;
        double seconds; /* -1: not understood */
    } cases[] = {{"\"5m\"", 300},   {"\"1h\"", 3600}, {"\"90s\"", 90},    {"\"45\"", 45},
                 {"120", 120},      {"null", 300},    {"\"0.5h\"", 1800}, {"86400", 86400},
                 {"0", -1},         {"-5", -1},       {"86401", -1},      {"\"2d\"", -1},
                 {"\"m\"", -1},     {"\"\"", -1},     {"\"100h\"", -1},   {"true", -1},
                 {"\"1h30m\"", -1}, {"[5]", -1},      {"\"nan\"", -1}};
    char body[256];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(body, sizeof body, "{\"cache_control\":{\"type\":\"ephemeral\",\"ttl\":%s}}",
                 cases[i].ttl);
        accept(body);
        assert_true(w.retention_seconds == cases[i].seconds);
        assert_false(w.nvext);
        snprintf(body, sizeof body,
                 "{\"cache_control\":{\"type\":\"ephemeral\",\"ttl\":7},\"nvext\":{\"cache_"
                 "control\":{\"ttl\":%s,\"type\":\"ephemer\\u0061l\"}}}",
                 cases[i].ttl);
        int rc = read_with(body, NULL);
        assert_int_equal(rc, cases[i].seconds < 0 ? PL_EINVALID : 0);
        if (rc == 0)
            assert_true(w.retention_seconds == cases[i].seconds);
        else
            assert_string_equal(err.code, "invalid_cache_control");
    }
    accept("{\"cache_control\":{\"type\":\"ephemeral\"}}");
    assert_true(w.retention_seconds == 300);
    accept("{\"cache_control\":{\"type\":\"persistent\"}}");
    assert_true(w.retention_seconds == -1);
    accept("{\"cache_control\":\"no-store\"}");
    assert_true(w.retention_seconds == -1);
    refuse("{\"nvext\":{\"cache_control\":{\"ttl\":\"5m\"}}}", "invalid_cache_control",
           "nvext.cache_control.type must be \"ephemeral\", and is missing");
    refuse("{\"nvext\":{\"cache_control\":{\"type\":\"ephemeral\",\"ttl\":\"2d\"}}}",
           "invalid_cache_control",
           "nvext.cache_control.ttl must be seconds from 1 to 86400, or text like \"5m\" or "
           "\"1h\" within them, not \"2d\"");
    /* inside messages it is the engine's */
    accept("{\"messages\":[{\"content\":[{\"type\":\"text\",\"cache_control\":{\"type\":"
           "\"ephemeral\"}}]}]}");
    assert_true(w.retention_seconds == -1);
}

static int open_body(const char *body, pl_wish_open *open)
{
    pl_wish_options o = options();
    pl_scan s;
    assert_int_equal(pl_scan_body(pl_str_c(body), 10, &s), 0);
    return pl_wish_read_open(&arena, pl_str_c(body), &s, &o, &w, open, &err);
}

static void test_native_open_and_close(void **state)
{
    pl_wish_open open;
    assert_int_equal(open_body("{\"capacity_of_str_len\":1000,\"session_id\":\"s\",\"streaming\":"
                               "true,\"timeout\":2.5}",
                               &open),
                     0);
    assert_int_equal(w.source, PL_WISH_PARAMS);
    assert_int_equal(w.action, PL_WISH_OPEN);
    assert_true(open.streaming && open.capacity_of_str_len == 1000);
    assert_true(w.timeout_seconds == 2.5 && w.timeout_given);
    is_str(w.id, "s");
    assert_int_equal(open_body("{\"session_id\":null,\"timeout\":null,\"streaming\":null}", &open),
                     0);
    assert_null(w.id.p);
    assert_true(w.timeout_seconds == 300 && !w.timeout_given);
    assert_true(!open.streaming && open.capacity_of_str_len == -1);
    static const char *const bad[][2] = {
        {"{\"session_id\":\"\"}", "session_id must be a string of 1 to 256 bytes, not \"\""},
        {"{\"streaming\":1}", "streaming must be true or false, not 1"},
        {"{\"timeout\":0}", "timeout must be a number of seconds from 1 to 86400, not 0"},
        {"{\"timeout\":1,\"timeout\":2}", "timeout is given twice"},
        {"{\"capacity_of_str_len\":-1}",
         "capacity_of_str_len must be a whole number from 0 to 2147483647, not -1"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(open_body(bad[i][0], &open), PL_EINVALID);
        assert_string_equal(err.text.text, bad[i][1]);
    }
    pl_wish_options o = options();
    pl_scan s;
    pl_str body = PL_STR("{\"session_id\":\"s\"}");
    assert_int_equal(pl_scan_body(body, 10, &s), 0);
    assert_int_equal(pl_wish_read_close(&arena, body, &s, &o, &w, &err), 0);
    assert_int_equal(w.action, PL_WISH_CLOSE);
    assert_true(w.final);
    is_str(w.id, "s");
    assert_int_equal(pl_scan_body(PL_STR("{}"), 10, &s), 0);
    assert_int_equal(pl_wish_read_close(&arena, PL_STR("{}"), &s, &o, &w, &err), PL_EINVALID);
    assert_string_equal(err.text.text,
                        "session_id must be a string of 1 to 256 bytes, and is missing");
}

/* A value that is quoted back is short, and cut between characters. */
static void test_long_value_in_error(void **state)
{
    char body[4000], *p = body;
    p += sprintf(p, "{\"nvext\":{\"session_control\":{\"session_id\":\"a\",\"action\":\"x");
    for (int i = 0; i < 900; i++)
        p += sprintf(p, "\xe6\xbd\xae");
    strcpy(p, "\"}}}");
    assert_int_equal(read_with(body, NULL), PL_EINVALID);
    assert_true(strlen(err.text.text) < 200);
    assert_true(pl_str_utf8(pl_str_c(err.text.text), NULL));
    assert_non_null(strstr(err.text.text, "... (2701 bytes)"));
}

/* Ids that must be unescaped need memory; without it the request is answered, not lost. */
static void test_out_of_memory(void **state)
{
    pl_arena_free(&arena);
    failing_alloc_after(0);
    int rc = read_with(CONTROL("\"session_id\":\"s\\u0031\""), NULL);
    failing_alloc_after(-1);
    assert_int_equal(rc, PL_ENOMEM);
    assert_int_equal(err.status, 500);
    assert_string_equal(err.text.text, "the router is out of memory");
    accept(CONTROL("\"session_id\":\"s\\u0031\""));
    is_str(w.id, "s1");
}

/* A request without a session allocates nothing. Prints what 100 headers that look alike cost. */
static void test_plain_request_is_cheap(void **state)
{
    static char lines[100][64];
    static const char *list[101];
    pl_header room[100];
    for (int i = 0; i < 100; i++) {
        snprintf(lines[i], sizeof lines[i], "x-custom-header-%d: %d", i, i);
        list[i] = lines[i];
    }
    pl_head head = head_of(list, room);
    pl_wish_options o = options();
    pl_scan s;
    pl_arena none = PL_ARENA_INIT;
    pl_str body = PL_STR("{\"model\":\"m\",\"messages\":[],\"stream\":true}");
    assert_int_equal(pl_scan_body(body, 10, &s), 0);
    uint64_t best = UINT64_MAX;
    for (int round = 0; round < 20; round++) {
        uint64_t t0 = pl_now_ns();
        for (int i = 0; i < 100; i++)
            pl_wish_read(&none, body, &s, &head, &o, &w, &err);
        uint64_t took = pl_now_ns() - t0;
        best = took < best ? took : best;
    }
    assert_int_equal(none.used_bytes, 0);
    assert_int_equal(w.source, PL_WISH_NONE);
    print_message("100 headers, no session: %.0f ns\n", (double)best / 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nothing),
        cmocka_unit_test(test_control),
        cmocka_unit_test(test_control_refused),
        cmocka_unit_test(test_id_length),
        cmocka_unit_test(test_sglang),
        cmocka_unit_test(test_headers),
        cmocka_unit_test(test_headers_refused),
        cmocka_unit_test(test_body_wins),
        cmocka_unit_test(test_own_list),
        cmocka_unit_test(test_hints),
        cmocka_unit_test(test_pins),
        cmocka_unit_test(test_retention),
        cmocka_unit_test(test_native_open_and_close),
        cmocka_unit_test(test_long_value_in_error),
        cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_plain_request_is_cheap),
    };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    free(exact);
    pl_arena_free(&arena);
    return rc;
}
