/* Mailbox: several threads post to one loop; every message runs once, in the order of its poster,
 * and what is refused at the close stays with its poster. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdatomic.h>
#include <stdlib.h>

#include "base/err.h"
#include "base/mailbox.h"

enum { POSTERS = 4, EACH = 5000 };

typedef struct box {
    uv_loop_t loop;
    pl_mailbox mailbox;
    uv_thread_t thread;
    int next[POSTERS]; /* number that each poster's next message must have */
    int ran;
    int close_after; /* 0: never by count */
} box;

typedef struct numbered {
    pl_message message;
    int poster, number;
} numbered;

static void check_order(pl_message *m, void *ctx)
{
    numbered *n = (numbered *)m;
    box *b = ctx;
    if (n->number != b->next[n->poster]++)
        abort(); /* not on the test's thread: cmocka cannot fail from here */
    free(n);
    if (++b->ran == b->close_after)
        pl_mailbox_close(&b->mailbox);
}

static void run_loop(void *arg)
{
    box *b = arg;
    uv_ref((uv_handle_t *)&b->mailbox.async); /* here, the mailbox is what keeps it running */
    uv_run(&b->loop, UV_RUN_DEFAULT);
}

static void box_open(box *b)
{
    assert_int_equal(uv_loop_init(&b->loop), 0);
    assert_int_equal(pl_mailbox_init(&b->mailbox, &b->loop, b), 0);
}

static void box_done(box *b)
{
    pl_mailbox_destroy(&b->mailbox);
    assert_int_equal(uv_loop_close(&b->loop), 0);
    free(b);
}

typedef struct poster {
    box *box;
    int id, sent, refused;
} poster;

static void post_all(void *arg)
{
    poster *p = arg;
    for (int i = 0; i < EACH; i++) {
        numbered *n = calloc(1, sizeof *n);
        n->message.run = check_order;
        n->poster = p->id;
        n->number = i;
        int rc = pl_mailbox_post(&p->box->mailbox, &n->message);
        if (rc == 0) {
            p->sent++;
        } else {
            if (rc != PL_ECANCELLED)
                abort();
            free(n); /* still ours */
            p->refused++;
            break; /* closed stays closed */
        }
    }
}

static void post_from_threads(box *b, poster *p)
{
    uv_thread_t t[POSTERS];
    for (int i = 0; i < POSTERS; i++) {
        p[i] = (poster){b, i, 0, 0};
        uv_thread_create(&t[i], post_all, &p[i]);
    }
    for (int i = 0; i < POSTERS; i++)
        uv_thread_join(&t[i]);
}

static void all_messages_run_in_order(void **state)
{
    (void)state;
    box *b = calloc(1, sizeof *b);
    box_open(b);
    b->close_after = POSTERS * EACH;
    uv_thread_create(&b->thread, run_loop, b);
    poster p[POSTERS];
    post_from_threads(b, p);
    uv_thread_join(&b->thread);
    for (int i = 0; i < POSTERS; i++) {
        assert_int_equal(p[i].sent, EACH);
        assert_int_equal(b->next[i], EACH);
    }
    box_done(b);
}

static void closing_under_fire_loses_nothing(void **state)
{
    (void)state;
    for (int round = 0; round < 20; round++) {
        box *b = calloc(1, sizeof *b);
        box_open(b);
        b->close_after = 1 + round * 50;
        uv_thread_create(&b->thread, run_loop, b);
        poster p[POSTERS];
        post_from_threads(b, p);
        uv_thread_join(&b->thread);
        int sent = 0;
        for (int i = 0; i < POSTERS; i++) {
            sent += p[i].sent;
            assert_int_equal(b->next[i], p[i].sent);
        }
        assert_int_equal(b->ran, sent); /* leaks show the rest */
        assert_true(sent >= b->close_after);
        box_done(b);
    }
}

static void post_number(box *b, int number, void (*run)(pl_message *m, void *ctx))
{
    numbered *n = calloc(1, sizeof *n);
    n->message.run = run;
    n->number = number;
    assert_int_equal(pl_mailbox_post(&b->mailbox, &n->message), 0);
}

static void post_a_later_one(pl_message *m, void *ctx)
{
    post_number(ctx, 6, check_order);
    check_order(m, ctx);
}

/* The messages behind one that closes used to run after those posted later. */
static void a_message_may_close_in_the_middle(void **state)
{
    (void)state;
    box *b = calloc(1, sizeof *b);
    box_open(b);
    b->close_after = 2;
    for (int i = 0; i < 6; i++)
        post_number(b, i, i == 0 ? post_a_later_one : check_order);
    uv_ref((uv_handle_t *)&b->mailbox.async);
    uv_run(&b->loop, UV_RUN_DEFAULT);
    assert_int_equal(b->ran, 7);
    pl_message late = {NULL, NULL};
    assert_int_equal(pl_mailbox_post(&b->mailbox, &late), PL_ECANCELLED);
    box_done(b);
}

typedef struct reposting {
    pl_message message;
    int left;
} reposting;

static void repost(pl_message *m, void *ctx)
{
    reposting *r = (reposting *)m;
    box *b = ctx;
    b->ran++;
    if (r->left-- > 0)
        assert_int_equal(pl_mailbox_post(&b->mailbox, m), 0);
}

/* A message that posts itself again must not keep the loop from everything else. */
static void a_reposted_message_waits_for_the_next_round(void **state)
{
    (void)state;
    box *b = calloc(1, sizeof *b);
    box_open(b);
    reposting r = {.message.run = repost, .left = 3};
    assert_int_equal(pl_mailbox_post(&b->mailbox, &r.message), 0);
    uv_ref((uv_handle_t *)&b->mailbox.async);
    uv_run(&b->loop, UV_RUN_ONCE);
    assert_int_equal(b->ran, 1);
    for (int i = 0; i < 3; i++)
        uv_run(&b->loop, UV_RUN_ONCE);
    assert_int_equal(b->ran, 4);
    pl_mailbox_close(&b->mailbox);
    uv_run(&b->loop, UV_RUN_DEFAULT);
    box_done(b);
}

static void an_idle_mailbox_does_not_keep_the_loop(void **state)
{
    (void)state;
    box *b = calloc(1, sizeof *b);
    box_open(b);
    assert_int_equal(uv_run(&b->loop, UV_RUN_DEFAULT), 0); /* returns */
    pl_mailbox_close(&b->mailbox);
    uv_run(&b->loop, UV_RUN_DEFAULT);
    box_done(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_messages_run_in_order),
        cmocka_unit_test(closing_under_fire_loses_nothing),
        cmocka_unit_test(a_message_may_close_in_the_middle),
        cmocka_unit_test(a_reposted_message_waits_for_the_next_round),
        cmocka_unit_test(an_idle_mailbox_does_not_keep_the_loop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
