/* The shared store when its server answers and refuses, or is no Redis: as when there is none, and
 * the log says why. */
#include "redis_down.h"

/* However slow this machine is, that is no reason to count as down. */
#define PATIENCE_MS 20000

/* A server that has taken a session and is about to take no more. */
static fixture *serving(void **state)
{
    fixture *f = *state;
    server_start(&f->srv);
    pl_redis_options o = options(f);
    o.command_ms = PATIENCE_MS;
    open_with(f, &o);
    up(f);
    pl_store_call c = put("s", 1, PL_SESSION_ENGINE_BACKED);
    assert_int_equal(ask(f, &c), 0);
    return f;
}

static void it_takes_no_writes_for_a_while(void **state)
{
    fixture *f = serving(state);
    pl_store_call c = put("t", 1, PL_SESSION_ENGINE_BACKED);
    server_tell(&f->srv, "REPLICAOF 127.0.0.1 1");
    assert_int_equal(ask(f, &c), PL_EUNAVAILABLE);
    down(f);
    assert_non_null(strstr(logged(f), "READONLY"));
    server_tell(&f->srv, "REPLICAOF NO ONE");
    up(f);
    assert_int_equal(ask(f, &c), 0);
}

/* It answers, and takes nothing. */
static void it_has_no_memory_for_a_while(void **state)
{
    fixture *f = serving(state);
    pl_store_call c = put("t", 1, PL_SESSION_ENGINE_BACKED);
    server_tell(&f->srv, "CONFIG SET maxmemory 1");
    assert_int_equal(ask(f, &c), PL_EUNAVAILABLE);
    down(f);
    uint64_t until_ns = pl_now_ns() + 2500000000u; /* it is asked again and again */
    DRIVE_UNTIL(&f->d, pl_now_ns() > until_ns);
    assert_int_equal(times(logged(f), "\"warn\""), 1);
    assert_non_null(strstr(logged(f), "OOM command not allowed when used memory > 'maxmemory'. S"));
    server_tell(&f->srv, "CONFIG SET maxmemory 0");
    up(f);
    assert_int_equal(ask(f, &c), 0);
}

/* It would lose them: it has fewer replicas than it is told to have. */
static void it_has_too_few_replicas_for_a_while(void **state)
{
    fixture *f = serving(state);
    server_tell(&f->srv, "CONFIG SET min-replicas-to-write 1");
    pl_store_call n = put("t", 1, PL_SESSION_ENGINE_BACKED);
    assert_int_equal(ask(f, &n), PL_EUNAVAILABLE);
    down(f);
    /* as in any outage: what is known here is told, what is bound here is written later */
    pl_store_call g = call(PL_STORE_GET, "s"), p = put("u", 2, PL_SESSION_ROUTER_ONLY);
    assert_int_equal(pl_store_start(f->s, &g), 0);
    assert_true(g.stale && g.binding.slot == 1);
    assert_int_equal(pl_store_start(f->s, &p), 0);
    assert_true(p.stale);
    uint64_t until_ns = pl_now_ns() + 2500000000u; /* it is asked again and again */
    DRIVE_UNTIL(&f->d, pl_now_ns() > until_ns);
    assert_int_equal(times(logged(f), "\"warn\""), 1);
    assert_non_null(strstr(logged(f), "NOREPLICAS Not enough good replicas to write"));
    server_tell(&f->srv, "CONFIG SET min-replicas-to-write 0");
    up(f);
    assert_int_equal(ask(f, &n), 0);
    DRIVE_UNTIL(&f->d, pl_redis_stats_of(f->r)->written == 1);
    assert_int_equal(times(logged(f), "store_up"), 1);
}

static void the_password_is_wrong(void **state)
{
    fixture *f = *state;
    snprintf(f->srv.password, sizeof f->srv.password, "%s", "correct");
    server_start(&f->srv);
    pl_redis_options o = options(f);
    o.password = PL_STR("hunter2-secret");
    open_with(f, &o);
    down(f);
    assert_unavailable(f);
    DRIVE_UNTIL(&f->d, strstr(logged(f), "WRONGPASS"));
    assert_null(strstr(logged(f), "hunter2"));
    assert_int_equal(atomic_load(&pl_redis_stats_of(f->r)->connects), 0);
}

static void its_name_means_nothing(void **state)
{
    fixture *f = *state;
    pl_redis_options o = options(f);
    o.unix_path = (pl_str){NULL, 0};
    o.host = PL_STR("there-is-no-such-host.invalid");
    open_with(f, &o);
    down(f);
    assert_unavailable(f);
    assert_non_null(strstr(logged(f), "there-is-no-such-host.invalid"));
    /* and the store may go while the name is being asked for */
    DRIVE_UNTIL(&f->d, !((pl_redis_handle *)f->s)->timer.next);
}

/* What listens there is no Redis: it sends `says` (NULL: nothing) to whoever connects. */
static void not_a_redis(fixture *f, const char *says)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(a.sun_path, sizeof a.sun_path, "%s", f->srv.path);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(fd, 16), 0);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    int clients[16], n = 0;
    pl_redis_options o = options(f);
    open_with(f, &o);
    DRIVE_UNTIL(&f->d, ({
        int c = n < 16 ? accept(fd, NULL, NULL) : -1;
        if (c >= 0) {
            clients[n++] = c;
            if (says)
                assert_true(write(c, says, strlen(says)) > 0);
        }
        atomic_load(&pl_redis_stats_of(f->r)->handles_down) == 1 && n > 1;
    }));
    assert_unavailable(f);
    assert_int_equal(atomic_load(&pl_redis_stats_of(f->r)->connects), 0);
    assert_int_equal(times(logged(f), "store_down"), 1);
    for (int i = 0; i < n; i++)
        close(clients[i]);
    close(fd);
}

static void a_web_server_is_there(void **state)
{
    not_a_redis(*state, "HTTP/1.1 400 Bad Request\r\n\r\n");
}

static void somebody_is_there_who_says_nothing(void **state)
{
    not_a_redis(*state, NULL);
}

static void somebody_is_there_who_says_something_else(void **state)
{
    not_a_redis(*state, "*1\r\n$5\r\nhello\r\n:5\r\n$-1\r\n*-1\r\n"); /* well-formed */
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        TEST(it_takes_no_writes_for_a_while),
        TEST(it_has_no_memory_for_a_while),
        TEST(it_has_too_few_replicas_for_a_while),
        TEST(the_password_is_wrong),
        TEST(its_name_means_nothing),
        TEST(a_web_server_is_there),
        TEST(somebody_is_there_who_says_nothing),
        TEST(somebody_is_there_who_says_something_else),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
