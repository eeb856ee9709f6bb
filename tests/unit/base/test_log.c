/* Log: whatever a peer manages to put into a message, a line stays one line, and a JSON line stays
 * JSON with the message readable in it. stderr is a pipe here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"
#include "base/log.h"
#include "base/rng.h"

static int saved_stderr, reader;

static void capture(void)
{
    int fd[2];
    assert_int_equal(pipe(fd), 0);
    saved_stderr = dup(2);
    dup2(fd[1], 2);
    close(fd[1]);
    reader = fd[0];
    fcntl(reader, F_SETFL, O_NONBLOCK);
}

/* What was logged since; stderr is back when this returns. */
static size_t captured(char *out, size_t cap)
{
    dup2(saved_stderr, 2);
    close(saved_stderr);
    size_t n = 0;
    for (ssize_t rc; n < cap - 1 && (rc = read(reader, out + n, cap - 1 - n)) > 0;)
        n += (size_t)rc;
    close(reader);
    out[n] = 0;
    return n;
}

static char line[20000];

/* One message, as JSON; the parsed line, to be freed. */
static json_t *logged(const char *message)
{
    pl_log_init(PL_LOG_INFO, 1);
    capture();
    pl_log(PL_LOG_WARN, "some_event", "%s", message);
    size_t n = captured(line, sizeof line);
    assert_true(n > 1 && line[n - 1] == '\n');
    for (size_t i = 0; i + 1 < n; i++)
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f)
            fail_msg("control byte %02x at %zu", line[i], i);
    assert_null(strstr(line, "\xe2\x80\xa8")); /* line separators */
    assert_null(strstr(line, "\xe2\x80\xa9"));
    assert_null(strstr(line, "\xc2\x85"));
    json_error_t e;
    json_t *root = json_loads(line, JSON_REJECT_DUPLICATES, &e);
    if (!root)
        fail_msg("%s in %s", e.text, line);
    assert_string_equal(json_string_value(json_object_get(root, "level")), "warn");
    assert_string_equal(json_string_value(json_object_get(root, "event")), "some_event");
    assert_true(json_number_value(json_object_get(root, "time")) > 1e9);
    assert_int_equal(json_object_size(root), 4);
    return root;
}

static void reads_as(const char *message, const char *want)
{
    json_t *root = logged(message);
    assert_string_equal(json_string_value(json_object_get(root, "message")), want);
    json_decref(root);
}

static void text_survives(void **state)
{
    (void)state;
    reads_as("plain", "plain");
    reads_as("", "");
    reads_as("a \"quoted\" back\\slash", "a \"quoted\" back\\slash");
    reads_as("caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x8c\x99",
             "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x8c\x99");
    reads_as("tab\there\nand\r\nthere\x1b[31m\x7f", "tab\there\nand\r\nthere\x1b[31m\x7f");
    reads_as("x\xe2\x80\xa8y\xe2\x80\xa9z\xc2\x85", "x\xe2\x80\xa8y\xe2\x80\xa9z\xc2\x85");
}

static void a_forged_line_stays_inside(void **state)
{
    (void)state;
    const char *forged = "x\"}\n{\"time\":1,\"level\":\"info\",\"event\":\"fake\",\"message\":\"";
    reads_as(forged, forged);
}

/* bytes that are no UTF-8 used to go through, and the line was no JSON */
static void bad_utf8_is_replaced(void **state)
{
    (void)state;
    reads_as("a\xff"
             "b",
             "a\xef\xbf\xbd"
             "b");
    reads_as("\xc3", "\xef\xbf\xbd");
    reads_as("\xed\xa0\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
    reads_as("\xc0\xaf", "\xef\xbf\xbd\xef\xbf\xbd");
}

static void random_bytes(void **state)
{
    (void)state;
    pl_rng rng = {11};
    for (int i = 0; i < 3000; i++) {
        char m[3000];
        size_t n = pl_rng_below(&rng, i % 10 ? 60 : sizeof m - 1);
        for (size_t k = 0; k < n; k++) {
            m[k] = (char)pl_rng_next(&rng);
            m[k] = m[k] ? m[k] : 'x';
        }
        m[n] = 0;
        json_decref(logged(m));
    }
}

/* The longest message, of whatever grows most, is cut at a whole character. */
static void long_messages_are_cut(void **state)
{
    (void)state;
    static const char *const units[] = {
        "x", "\"", "\x01", "\xc3\xa9", "\xf0\x9f\x8c\x99", "\xff", "\xe2\x80\xa8"};
    for (size_t u = 0; u < sizeof units / sizeof *units; u++)
        for (size_t shift = 0; shift < 4; shift++) {
            char m[8000] = "";
            memset(m, 'x', shift);
            while (strlen(m) < 5000)
                strcat(m, units[u]);
            json_t *root = logged(m);
            assert_true(json_string_length(json_object_get(root, "message")) > 1000);
            json_decref(root);
        }
}

static void text_lines_are_single_and_harmless(void **state)
{
    (void)state;
    pl_log_init(PL_LOG_INFO, 0);
    capture();
    pl_log(PL_LOG_ERROR, "some_event", "%s",
           "a\nb\x1b[2J\x7f\xc2\x9b"
           "c\xff caf\xc3\xa9");
    captured(line, sizeof line);
    assert_non_null(strstr(line, " error some_event: a b [2J  c? caf\xc3\xa9\n"));
    assert_ptr_equal(strchr(line, '\n'), line + strlen(line) - 1);
}

static void levels(void **state)
{
    (void)state;
    assert_int_equal(pl_log_level_parse("debug"), PL_LOG_DEBUG);
    assert_int_equal(pl_log_level_parse("error"), PL_LOG_ERROR);
    assert_int_equal(pl_log_level_parse("loud"), PL_EINVALID);
    pl_log_init(PL_LOG_WARN, 0);
    capture();
    pl_log(PL_LOG_INFO, "quiet", "x");
    pl_log(PL_LOG_WARN, "heard", "x");
    captured(line, sizeof line);
    assert_null(strstr(line, "quiet"));
    assert_non_null(strstr(line, "heard"));
}

static void floods_are_limited(void **state)
{
    (void)state;
    unsigned long st[2] = {0, 0};
    unsigned passed = 0;
    for (int i = 0; i < 100000; i++)
        passed += pl_log_allow(st, 10);
    assert_true(passed >= 10 && passed <= 100); /* 10 for each second that this took */
    assert_int_equal(passed + st[1], 100000);
}

enum { THREADS = 4, LINES = 300 };

static void *log_many(void *arg)
{
    char body[200];
    memset(body, 'a' + *(int *)arg, sizeof body);
    body[sizeof body - 1] = 0;
    for (int i = 0; i < LINES; i++)
        pl_log(PL_LOG_INFO, "many", "%s", body);
    return NULL;
}

static void lines_of_threads_do_not_mix(void **state)
{
    (void)state;
    char path[] = "/tmp/perilune_test_log_XXXXXX";
    int fd = mkstemp(path), keep = dup(2);
    assert_true(fd >= 0);
    unlink(path);
    int append = fcntl(fd, F_GETFL) | O_APPEND;
    fcntl(fd, F_SETFL, append);
    pl_log_init(PL_LOG_INFO, 1);
    dup2(fd, 2);
    pthread_t t[THREADS];
    int id[THREADS];
    for (int i = 0; i < THREADS; i++) {
        id[i] = i;
        pthread_create(&t[i], NULL, log_many, &id[i]);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(t[i], NULL);
    dup2(keep, 2);
    close(keep);
    lseek(fd, 0, SEEK_SET);
    FILE *f = fdopen(fd, "r");
    int seen = 0;
    while (fgets(line, sizeof line, f)) {
        json_t *root = json_loads(line, 0, NULL);
        assert_non_null(root);
        const char *m = json_string_value(json_object_get(root, "message"));
        assert_int_equal(strspn(m, (char[]){m[0], 0}), 199);
        json_decref(root);
        seen++;
    }
    fclose(f);
    assert_int_equal(seen, THREADS * LINES);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_survives),
        cmocka_unit_test(a_forged_line_stays_inside),
        cmocka_unit_test(bad_utf8_is_replaced),
        cmocka_unit_test(random_bytes),
        cmocka_unit_test(long_messages_are_cut),
        cmocka_unit_test(text_lines_are_single_and_harmless),
        cmocka_unit_test(levels),
        cmocka_unit_test(floods_are_limited),
        cmocka_unit_test(lines_of_threads_do_not_mix),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
