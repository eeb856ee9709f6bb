/* Server-sent events: the same events whatever the reads, no byte lost, memory bounded. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/err.h"
#include "base/rng.h"
#include "http/sse.h"
#include "../failing_alloc.h"

/* What was reported, as text: each event as <name|data>, a missing field as -; and all raw bytes.
 */
typedef struct event_log {
    pl_buf text, raw;
    int events;
    int stop_at; /* the event that is answered with stop_with */
    int stop_with;
} event_log;

static int on_event(void *ctx, const pl_sse_event *ev)
{
    event_log *l = ctx;
    bool late_lf = pl_str_eq(ev->raw, PL_STR("\n")) && l->raw.n && l->raw.p[l->raw.n - 1] == '\r';
    if (late_lf) { /* the rest of a CRLF: no event of its own */
        assert_null(ev->data.p);
        return pl_buf_add(&l->raw, "\n", 1);
    }
    assert_int_equal(pl_buf_addf(&l->text, "<%.*s|%.*s>", ev->name.p ? (int)ev->name.n : 1,
                                 ev->name.p ? ev->name.p : "-", ev->data.p ? (int)ev->data.n : 1,
                                 ev->data.p ? ev->data.p : "-"),
                     0);
    assert_true(ev->raw.n > 0);
    assert_int_equal(pl_buf_add(&l->raw, ev->raw.p, ev->raw.n), 0);
    l->events++;
    return l->events == l->stop_at ? l->stop_with : 0;
}

static void log_free(event_log *l)
{
    pl_buf_free(&l->text);
    pl_buf_free(&l->raw);
}

/* Feeds in pieces of `step` bytes, each in an allocation of its own. */
static int feed_in(pl_sse *s, pl_str bytes, size_t step, event_log *l)
{
    for (size_t at = 0; at < bytes.n; at += step) {
        size_t n = bytes.n - at < step ? bytes.n - at : step;
        char *copy = malloc(n);
        assert_non_null(copy);
        memcpy(copy, bytes.p + at, n);
        int rc = pl_sse_feed(s, (pl_str){copy, n}, on_event, l);
        free(copy);
        if (rc)
            return rc;
    }
    return 0;
}

static void check(pl_str stream, const char *events, const char *rest)
{
    for (size_t step = 1; step <= stream.n; step++) {
        pl_sse s;
        event_log l = {0};
        pl_sse_init(&s, 1000);
        assert_int_equal(feed_in(&s, stream, step, &l), 0);
        if (!pl_str_eq(pl_buf_str(&l.text), pl_str_c(events))) {
            print_error("in steps of %zu: got %.*s, wanted %s\n", step, PL_FMT(l.text), events);
            fail();
        }
        assert_true(pl_str_eq(pl_sse_rest(&s), pl_str_c(rest)));
        assert_int_equal(pl_buf_add(&l.raw, pl_sse_rest(&s).p, pl_sse_rest(&s).n), 0);
        assert_true(pl_str_eq(pl_buf_str(&l.raw), stream));
        pl_sse_free(&s);
        log_free(&l);
    }
}

static void test_events(void **state)
{
    check(PL_STR("data: a\n\n"), "<-|a>", "");
    check(PL_STR("data: a\n\ndata: [DONE]\n\n"), "<-|a><-|[DONE]>", "");
    check(PL_STR("event: message_start\ndata: {\"a\":1}\n\n"), "<message_start|{\"a\":1}>", "");
    check(PL_STR("data:a\n\n"), "<-|a>", "");
    check(PL_STR("data:  a \n\n"), "<-| a >", "");
    check(PL_STR("data\n\n"), "<-|>", "");
    check(PL_STR("data:\n\n"), "<-|>", "");
    check(PL_STR("data: a\ndata: b\ndata\ndata:c\n\n"), "<-|a\nb\n\nc>", "");
    check(PL_STR("data: a\nevent: x\nid: 7\nretry: 10\ndata: b\nevent: y\n\n"), "<y|a\nb>", "");
    check(PL_STR(": ping\n\ndata: a\n\n"), "<-|-><-|a>", "");
    check(PL_STR("datax: a\nnodata\nDATA: b\n\n"), "<-|->", "");
    check(PL_STR("\n\ndata: a\n\n\n"), "<-|-><-|-><-|a><-|->", "");
    check(PL_STR("\xef\xbb\xbf"
                 "data: a\n\n\xef\xbb\xbf"
                 "data: b\n\n"),
          "<-|a><-|->", "");
}

static void test_line_ends(void **state)
{
    check(PL_STR("data: a\r\n\r\ndata: b\r\n\r\n"), "<-|a><-|b>", "");
    check(PL_STR("data: a\ndata: b\r\ndata: c\rdata: d\n\r\ndata: e\r\n\n"), "<-|a\nb\nc\nd><-|e>",
          "");
    check(PL_STR("data: a\n\rdata: b\n\n"), "<-|a><-|b>", "");
}

/* A CR ends its line at once; an LF that comes later is part of it, not a line of its own. */
static void test_lone_cr(void **state)
{
    pl_sse s;
    event_log l = {0};
    pl_sse_init(&s, 1000);
    assert_int_equal(pl_sse_feed(&s, PL_STR("data: a\r\r"), on_event, &l), 0);
    assert_int_equal(l.events, 1);
    assert_int_equal(pl_sse_feed(&s, PL_STR("data: b\r\n\r"), on_event, &l), 0);
    assert_int_equal(l.events, 2);
    assert_int_equal(pl_sse_feed(&s, PL_STR("\n"), on_event, &l), 0);
    assert_int_equal(l.events, 2);
    assert_int_equal(pl_sse_feed(&s, PL_STR("data: c\n\n"), on_event, &l), 0);
    assert_true(pl_str_eq(pl_buf_str(&l.text), PL_STR("<-|a><-|b><-|c>")));
    assert_true(pl_str_eq(pl_buf_str(&l.raw), PL_STR("data: a\r\rdata: b\r\n\r\ndata: c\n\n")));
    pl_sse_free(&s);
    log_free(&l);
}

static void test_unfinished(void **state)
{
    check(PL_STR("data: a\n\ndata: b"), "<-|a>", "data: b");
    check(PL_STR("data: a\n\ndata: b\n"), "<-|a>", "data: b\n");
    check(PL_STR("event: x\r\ndata: b\r\n"), "", "event: x\r\ndata: b\r\n");
}

/* Too large an event is an error however it arrives, and not a byte of it is lost. */
static void test_limit(void **state)
{
    pl_str stream = PL_STR("data: a\n\ndata: 0123456789\n\ndata: b\n\n");
    for (size_t step = 1; step <= stream.n; step++) {
        pl_sse s;
        event_log l = {0};
        pl_sse_init(&s, 17);
        assert_int_equal(feed_in(&s, stream, step, &l), PL_ELIMIT);
        assert_int_equal(l.events, 1);
        pl_str rest = pl_sse_rest(&s);
        assert_int_equal(pl_buf_add(&l.raw, rest.p, rest.n), 0);
        assert_true(l.raw.n > 9 + 17);
        assert_memory_equal(l.raw.p, stream.p, l.raw.n);
        pl_sse_free(&s);
        log_free(&l);

        event_log fits = {0};
        pl_sse_init(&s, 18);
        assert_int_equal(feed_in(&s, stream, step, &fits), 0);
        assert_int_equal(fits.events, 3);
        pl_sse_free(&s);
        log_free(&fits);
    }
}

static void test_stop(void **state)
{
    pl_sse s;
    event_log l = {.stop_at = 2, .stop_with = PL_ECANCELLED};
    pl_sse_init(&s, 100);
    assert_int_equal(pl_sse_feed(&s, PL_STR("data: a\n\ndata: b\n\ndata: c\n\nda"), on_event, &l),
                     PL_ECANCELLED);
    assert_int_equal(l.events, 2);
    assert_true(pl_str_eq(pl_sse_rest(&s), PL_STR("data: c\n\nda")));
    pl_sse_free(&s);
    log_free(&l);
}

/* After a large event in pieces, an idle stream does not keep its memory. */
static void test_memory_after_a_large_event(void **state)
{
    pl_sse s;
    event_log l = {0};
    pl_sse_init(&s, 1 << 20);
    static char line[1000];
    memset(line, 'x', sizeof line);
    assert_int_equal(pl_sse_feed(&s, PL_STR("data: "), on_event, &l), 0);
    for (int i = 0; i < 500; i++)
        assert_int_equal(pl_sse_feed(&s, (pl_str){line, sizeof line}, on_event, &l), 0);
    assert_true(s.pending.cap >= 500000);
    assert_int_equal(pl_sse_feed(&s, PL_STR("\n\nd"), on_event, &l), 0);
    assert_int_equal(l.events, 1);
    assert_true(s.pending.cap < 20000);
    pl_sse_free(&s);
    log_free(&l);
}

static int count_event(void *ctx, const pl_sse_event *ev)
{
    ++*(int *)ctx;
    return 0;
}

static void test_out_of_memory(void **state)
{
    pl_str stream = PL_STR("data: a\ndata: b\n\nevent: x\ndata: cc\n\ndata: rest");
    for (size_t step = 1; step <= stream.n; step += 6) {
        int failures = 0, events = 0, rc = PL_ENOMEM;
        for (long n = 0; rc; n++) {
            pl_sse s;
            pl_sse_init(&s, 100);
            rc = events = 0;
            failing_alloc_after(n);
            for (size_t at = 0; at < stream.n && rc == 0; at += step) {
                size_t part = stream.n - at < step ? stream.n - at : step;
                rc = pl_sse_feed(&s, (pl_str){stream.p + at, part}, count_event, &events);
            }
            failing_alloc_after(-1);
            pl_sse_free(&s);
            failures += rc != 0;
            assert_true(rc == 0 || rc == PL_ENOMEM);
            assert_true(n < 100);
        }
        assert_int_equal(events, 2);
        assert_true(failures >= 2); /* pending and joined */
    }
}

static void close_is(const char *stream, const char *wanted)
{
    size_t n = strlen(stream);
    for (size_t step = 1; step <= n + 1; step++) {
        pl_sse_tail t = {0};
        for (size_t at = 0; at < n; at += step)
            pl_sse_tail_feed(&t, (pl_str){stream + at, n - at < step ? n - at : step});
        pl_sse_tail_feed(&t, (pl_str){NULL, 0});
        pl_str got = pl_sse_tail_close(&t);
        if (!pl_str_eq(got, pl_str_c(wanted)))
            fail_msg("wrong end of a stream of %zu bytes in steps of %zu", n, step);
    }
}

static void test_tail(void **state)
{
    close_is("", "");
    close_is("data: a\n\n", "");
    close_is("data: a\r\n\r\n", "");
    close_is("data: a\r\r", "");
    close_is("data: a\n\r\n", "");
    close_is("data: a\r\n\n", "");
    close_is("data: a\n\r", "");
    close_is("\n", "");
    close_is("\r\n", "");
    close_is("data: a\n", "\n");
    close_is("data: a\r\n", "\n");
    close_is("data: a\r", "\n\n");
    close_is("data: a", "\n\n");
    close_is("d", "\n\n");
    close_is("d\n", "\n");
    close_is("data: a\n\nd", "\n\n");
    close_is("data: a\r\n\r\ndata: b\r\n", "\n");
}

/* What pl_sse_tail_close gives is what makes the reader see a boundary: random ends of streams. */
static void test_tail_agrees_with_the_reader(void **state)
{
    static const char *const pieces[] = {"\n", "\r", "\r\n", "data: x", ":", "event: e"};
    pl_rng r = {5};
    for (int i = 0; i < 3000; i++) {
        pl_buf b = {0};
        pl_sse_tail t = {0};
        pl_sse s;
        event_log l = {0};
        for (unsigned n = pl_rng_below(&r, 7); n--;) {
            const char *piece = pieces[pl_rng_below(&r, 6)];
            assert_int_equal(pl_buf_add(&b, piece, strlen(piece)), 0);
        }
        pl_sse_tail_feed(&t, pl_buf_str(&b));
        pl_str closing = pl_sse_tail_close(&t);
        assert_int_equal(pl_buf_add(&b, closing.p, closing.n), 0);
        assert_int_equal(pl_buf_addf(&b, "event: error\ndata: E\n\n"), 0);
        pl_sse_init(&s, 1000);
        assert_int_equal(pl_sse_feed(&s, pl_buf_str(&b), on_event, &l), 0);
        assert_true(pl_str_ends(pl_buf_str(&l.text), PL_STR("<error|E>")));
        assert_int_equal(pl_sse_rest(&s).n, 0);
        pl_sse_free(&s);
        log_free(&l);
        pl_buf_free(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_events),
        cmocka_unit_test(test_line_ends),
        cmocka_unit_test(test_lone_cr),
        cmocka_unit_test(test_unfinished),
        cmocka_unit_test(test_limit),
        cmocka_unit_test(test_stop),
        cmocka_unit_test(test_memory_after_a_large_event),
        cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_tail),
        cmocka_unit_test(test_tail_agrees_with_the_reader),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
