/* Trust against a whole engine and the wire to it: batches and replays get lost, the engine
 * restarts, and the news of its connection come when they come. As feed_stream.c does what trust
 * says. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "trust_calls.h"

/* Any order of messages: nothing is applied twice or out of order within a lifetime, and what is
 * asked for always ends. */
static void any_order_ends(void **state)
{
    (void)state;
    uint64_t rng = 7;
    for (int round = 0; round < 300; round++) {
        pl_trust t = make(round % 2, round % 3 == 0);
        unsigned what = pl_trust_start(&t, now);
        uint64_t last = 0;
        bool have = false;
        for (int i = 0; i < 400; i++) {
            if (what & (PL_DO_REPLAY | PL_DO_SNAPSHOT))
                pl_trust_asked(&t, now);
            rng = rng * 6364136223846793005u + 1442695040888963407u;
            unsigned dice = (unsigned)(rng >> 33);
            uint64_t seq = t.next + dice % 7 - (t.next >= 2 ? 2 : 0);
            now += S / 4 * (dice / 7 % 3);
            int life = dice / 64 % 16 == 0 ? i : 1;
            switch (dice / 1024 % 6) {
            case 0:
            case 1:
                what = live(&t, life, seq);
                break;
            case 2:
                what = replayed(&t, life, seq);
                break;
            case 3:
                what = dice / 8192 % 8 ? held(&t, 1, seq) : pl_trust_replay_end(&t, now);
                break;
            case 4:
                what = pl_trust_tick(&t, now, 0);
                break;
            default:
                what = dice / 8192 % 2 ? pl_trust_connected(&t, now)
                                       : pl_trust_snapshot_end(&t, now, seq);
            }
            assert_false((what & PL_DO_APPLY) && (what & PL_DO_HOLD));
            if (what & PL_DO_CLEAR)
                have = false;
            if (what & PL_DO_APPLY) {
                assert_true(!have || t.next - 1 == last + 1 || t.snapshots);
                have = true;
                last = t.next - 1;
            }
            assert_true((t.ask != PL_ASK_NOTHING) ==
                        (t.state == PL_TRUST_GAP || t.state == PL_TRUST_REPLAYING));
        }
        if (what & (PL_DO_REPLAY | PL_DO_SNAPSHOT))
            pl_trust_asked(&t, now);
        for (int i = 0; i < 20 && t.ask != PL_ASK_NOTHING; i++) {
            now += 3 * S;
            if (pl_trust_tick(&t, now, 0) & (PL_DO_REPLAY | PL_DO_SNAPSHOT))
                pl_trust_asked(&t, now);
        }
        assert_int_equal(t.ask, PL_ASK_NOTHING);
    }
}

/* Batches carry (life, seq). What the stream applied since it was last cleared is a run of batches;
 * when the engine has been left alone for a while it must be one of the life that is, up to its
 * last batch. */
typedef struct world {
    pl_trust t;
    uint64_t rng;
    int life; /* of the engine */
    uint64_t next, kept;
    struct batch {
        int life;
        uint64_t seq;
    } wire[512], answer[512], hold[512], have[4096];
    int wire_n, answer_n, hold_n, have_n;
    bool asked, answering; /* a request is on its way; answer[] came, an end behind it */
    uint64_t ask_from;
    char news[64]; /* of the connection: 'l' lost, 'c' connected */
    int news_n, losses;
    int calm; /* nothing is lost any more, nothing restarts */
} world;

static unsigned dice(world *w, unsigned n)
{
    w->rng = w->rng * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(w->rng >> 33) % n;
}

static void push(struct batch *list, int *n, int cap, int life, uint64_t seq)
{
    assert_true(*n < cap);
    list[(*n)++] = (struct batch){life, seq};
}

static struct batch pop(struct batch *list, int *n)
{
    struct batch b = list[0];
    memmove(list, list + 1, (size_t)-- * n * sizeof *list);
    return b;
}

/* As feed_stream.c does it. */
static void act(world *w, unsigned what, struct batch b)
{
    if (what & PL_DO_CLEAR)
        w->have_n = 0;
    if (what & PL_DO_FORGET)
        w->hold_n = 0;
    if (what & PL_DO_STOP)
        w->asked = w->answering = false, w->answer_n = 0;
    if (what & PL_DO_SHUT)
        w->wire_n = w->news_n = 0;
    if (what & PL_DO_APPLY)
        push(w->have, &w->have_n, 4096, b.life, b.seq);
    if (what & PL_DO_HOLD)
        push(w->hold, &w->hold_n, 512, b.life, b.seq);
    if (what & PL_DO_REPLAY) {
        w->asked = true;
        w->answering = false;
        w->answer_n = 0;
        w->ask_from = w->t.ask_from;
        pl_trust_asked(&w->t, now);
    }
    while ((what & PL_DO_FLUSH) && w->hold_n) {
        struct batch h = w->hold[0];
        unsigned then = held(&w->t, h.life, h.seq);
        if (!(then & PL_DO_HOLD))
            pop(w->hold, &w->hold_n);
        act(w, then & ~(unsigned)PL_DO_HOLD, h);
        if (then & PL_DO_HOLD)
            return;
    }
}

static void publish(world *w)
{
    uint64_t seq = w->next++;
    if (w->calm || dice(w, 8))
        push(w->wire, &w->wire_n, 512, w->life, seq);
    if (w->next - w->kept > 40)
        w->kept = w->next - 40;
}

static void engine_restarts(world *w)
{
    w->life++;
    w->next = w->kept = 0;
    w->asked = false; /* the request, and what was not answered yet, is lost with the connection */
    w->answering = w->answering && dice(w, 2);
    w->wire_n = (int)dice(w, (unsigned)w->wire_n + 1); /* some had come through already */
    w->news[w->news_n++] = 'l';
    for (unsigned i = dice(w, 12); i > 0; i--) /* before the subscription is there again */
        w->next++;
    w->news[w->news_n++] = 'c';
}

static void take_news(world *w)
{
    bool up = w->news[0] == 'c';
    memmove(w->news, w->news + 1, (size_t)--w->news_n);
    w->losses += !up;
    if (up)
        act(w, pl_trust_connected(&w->t, now), (struct batch){0, 0});
    else
        pl_trust_lost(&w->t, now);
}

static void step(world *w)
{
    const struct batch none = {0, 0};
    unsigned d = dice(w, 100);
    now += S / 20;
    if (d < 25) {
        if (w->wire_n < 500 && (!w->calm || w->calm++ < 8))
            publish(w);
    } else if (d < 50 && w->wire_n) {
        while (w->wire[0].life > w->losses + 1) /* no other order between wire and news */
            take_news(w);
        struct batch b = pop(w->wire, &w->wire_n);
        act(w, live(&w->t, b.life, b.seq), b);
    } else if (d < 60 && w->asked && (!w->wire_n || w->wire[0].life == w->life)) {
        /* what a former life sent is read long before a new one can be asked */
        w->asked = false;
        w->answering = true;
        for (uint64_t i = w->ask_from > w->kept ? w->ask_from : w->kept; i < w->next; i++)
            if (w->calm || dice(w, 30))
                push(w->answer, &w->answer_n, 512, w->life, i);
    } else if (d < 80 && w->answering) {
        if (w->answer_n) {
            struct batch b = pop(w->answer, &w->answer_n);
            act(w, replayed(&w->t, b.life, b.seq), b);
        } else {
            w->answering = false;
            act(w, pl_trust_replay_end(&w->t, now), none);
        }
    } else if (d < 85 && w->news_n &&
               (w->news[0] == 'l' || !w->wire_n || w->wire[0].life == w->life)) {
        take_news(w);
    } else if (d < 95) {
        act(w, pl_trust_tick(&w->t, now, 0), none);
    } else if (d < 96 && !w->calm && w->news_n < 60 && dice(w, 2)) {
        engine_restarts(w);
    }
}

static void what_is_known_is_true_in_the_end(void **state)
{
    (void)state;
    static world w;
    for (uint64_t round = 0; round < 2000; round++) {
        memset(&w, 0, sizeof w);
        w.t = make(true, false);
        w.t.o.bad_max = 1000;
        w.rng = round;
        w.life = 1;
        w.next = dice(&w, 3) * dice(&w, 60);
        w.kept = w.next > 40 ? w.next - 40 : 0;
        act(&w, pl_trust_start(&w.t, now), (struct batch){0, 0});
        w.news[w.news_n++] = 'c';
        for (unsigned i = dice(&w, 600); i > 0; i--)
            step(&w);
        w.calm = 1;
        for (int i = 0; i < 8000; i++)
            step(&w);
        assert_true(w.wire_n == 0 && w.hold_n == 0 && w.t.ask == PL_ASK_NOTHING);
        bool good = w.have_n > 0 && w.have[w.have_n - 1].seq == w.next - 1;
        for (int i = 0; i < w.have_n; i++)
            good = good && w.have[i].life == w.life &&
                   (i == 0 || w.have[i].seq == w.have[i - 1].seq + 1);
        if (!good) {
            for (int i = 0; i < w.have_n; i++)
                print_error("%d/%d ", w.have[i].life, (int)w.have[i].seq);
            fail_msg("round %d: the engine is in life %d and has published %d", (int)round, w.life,
                     (int)w.next);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_order_ends),
        cmocka_unit_test(what_is_known_is_true_in_the_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
