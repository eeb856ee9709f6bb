/* The corpus of requests that must be refused and that must be served: see README.md beside this.
 * Every case through the reader and through a server on a loopback socket, whole and byte by byte,
 * alone, behind a good request and with one behind it. */
#include "../unit/http/server_fixture.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>

#define GOOD "POST /good HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nGOOD"

typedef struct spec {
    const char *name;
    int status;         /* reject: the expected one; accept: 0 */
    int requests;       /* expected to be complete */
    unsigned long body; /* their bytes */
    bool keep;          /* what comes behind is served */
} spec;

typedef struct outcome {
    int requests, status;
    unsigned long body;
} outcome;

static void count_body(void *ctx, const char *p, size_t n)
{
    outcome *o = ctx;
    o->body += n;
}

static outcome through_reader(pl_str in, bool bytes)
{
    outcome o = {0};
    pl_reader r;
    pl_reader_init(&r, true, &pl_limits_default, NULL, count_body, &o);
    bool open = true;
    for (size_t at = 0; at < in.n && open && r.state != PL_READER_ERROR;) {
        size_t n = bytes ? 1 : in.n - at;
        char *exact = malloc(n);
        assert_non_null(exact);
        memcpy(exact, in.p + at, n);
        at += pl_reader_feed(&r, exact, n);
        free(exact);
        if (r.state == PL_READER_DONE) {
            o.requests++;
            open = r.head.keep_alive;
            pl_reader_next(&r);
        }
    }
    o.status = r.status;
    pl_reader_free(&r);
    return o;
}

/* Statuses of the answers in `got`; 100 is not counted. */
static outcome read_answers(const pl_buf *got)
{
    outcome o = {0};
    for (const char *p = got->p; (p = memmem(p, (size_t)(got->p + got->n - p), "HTTP/1.1 ", 9));
         p += 9) {
        int status = atoi(p + 9);
        if (status == 200)
            o.requests++;
        else if (status && status != 100)      /* 0: the version in a message */
            o.status = o.status ? -1 : status; /* never two errors */
    }
    return o;
}

static outcome through_server(fixture *f, pl_str in, bool bytes, const spec *s, bool ends)
{
    pl_buf got = {0};
    int before = f->requests;
    int fd = fx_connect(f);
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, 1 /* TCP_NODELAY */, &on, sizeof on);
    bool up = true;
    for (size_t at = 0; at < in.n && up; at += bytes ? 1 : in.n) {
        ssize_t want = bytes ? 1 : (ssize_t)in.n;
        up = send(fd, in.p + at, (size_t)want, MSG_NOSIGNAL) == want;
        uv_run(&f->loop, UV_RUN_NOWAIT);
    }
    if (ends) {
        if (fx_read(f, fd, &got, NULL) != FX_EOF)
            fail_msg("%s: the answer was lost in a reset", s->name);
    } else {
        uint64_t until = pl_now_ns() + DEADLINE_NS;
        do
            if (fx_take(f, fd, &got) != FX_OPEN)
                fail_msg("%s: closed", s->name);
        while (read_answers(&got).requests < s->requests && pl_now_ns() < until);
    }
    outcome o = read_answers(&got);
    assert_int_equal(f->requests - before, o.requests);
    close(fd);
    fx_pump(f);
    pl_buf_free(&got);
    return o;
}

static void check(const spec *s, const char *how, bool bytes, outcome o, bool server)
{
    if (o.requests != s->requests || o.status != s->status || (!server && o.body < s->body) ||
        (!server && !s->status && o.body != s->body))
        fail_msg("%s, %s%s, %s: wanted %d requests, %lu bytes, status %d; got %d, %lu, %d", s->name,
                 how, bytes ? " byte by byte" : "", server ? "server" : "reader", s->requests,
                 s->body, s->status, o.requests, o.body, o.status);
}

static void run_case(fixture *f, const spec *s, pl_str raw)
{
    const pl_str good = PL_STR(GOOD);
    pl_buf in = {0};
    for (int how = 0; how < 3; how++) {
        static const char *const names[] = {"alone", "behind a good request",
                                            "before a good request"};
        spec want = *s;
        in.n = 0;
        if (how == 1) {
            assert_int_equal(pl_buf_add(&in, good.p, good.n), 0);
            want.requests++;
            want.body += 4;
        }
        assert_int_equal(pl_buf_add(&in, raw.p, raw.n), 0);
        if (how == 2) {
            assert_int_equal(pl_buf_add(&in, good.p, good.n), 0);
            if (want.keep) {
                want.requests++;
                want.body += 4;
            }
        }
        for (int bytes = 0; bytes < 2; bytes++) {
            outcome o = through_reader(pl_buf_str(&in), bytes);
            check(&want, names[how], bytes, o, false);
            if (bytes && in.n > 20000)
                continue; /* as many system calls bring nothing new */
            o = through_server(f, pl_buf_str(&in), bytes, &want, !s->keep);
            check(&want, names[how], bytes, o, true);
        }
    }
    pl_buf_free(&in);
}

static char *read_all(const char *path, size_t *n)
{
    int fd = open(path, O_RDONLY);
    struct stat st;
    assert_true(fd >= 0 && fstat(fd, &st) == 0);
    char *p = malloc((size_t)st.st_size + 1);
    assert_non_null(p);
    assert_int_equal(read(fd, p, (size_t)st.st_size), st.st_size);
    close(fd);
    *n = (size_t)st.st_size;
    p[*n] = 0;
    return p;
}

static int run_folder(const char *folder, bool reject)
{
    char path[600];
    snprintf(path, sizeof path, PL_SOURCE_DIR "/tests/http/%s", folder);
    DIR *d = opendir(path);
    assert_non_null(d);
    fixture f;
    fx_init(&f);
    fx_listen(&f);
    int cases = 0;
    for (struct dirent *e; (e = readdir(d));) {
        if (!pl_str_ends(pl_str_c(e->d_name), PL_STR(".req")))
            continue;
        snprintf(path, sizeof path, PL_SOURCE_DIR "/tests/http/%s/%s", folder, e->d_name);
        size_t n;
        char *bytes = read_all(path, &n);
        char *raw = memchr(bytes, '\n', n);
        assert_non_null(raw);
        raw++;
        spec s = {.name = e->d_name};
        char keep[8] = "";
        int fields = reject ? sscanf(bytes, "%d ", &s.status)
                            : sscanf(bytes, "%d %lu %7s", &s.requests, &s.body, keep);
        assert_int_equal(fields, reject ? 1 : 3);
        s.keep = strcmp(keep, "keep") == 0;
        run_case(&f, &s, (pl_str){raw, n - (size_t)(raw - bytes)});
        free(bytes);
        cases++;
    }
    closedir(d);
    fx_free(&f);
    return cases;
}

static void must_reject(void **state)
{
    assert_true(run_folder("reject", true) > 150);
}

static void must_accept(void **state)
{
    assert_true(run_folder("accept", false) > 50);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(must_reject),
        cmocka_unit_test(must_accept),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
