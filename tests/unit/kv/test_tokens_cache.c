/* The cache of token ids, against engines made up here: right ids whatever the template does, few
 * calls where it adds up, one call for many who ask, budgets that run out, engines that fail or
 * answer nonsense, the byte cap, threads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "base/rng.h"
#include "kv/tokens_cache.h"

/* --- an engine: a tokenizer of bytes and a template --- */

typedef enum template_kind {
    ADDS_UP,
    COUNTS,    /* says first how many messages there are */
    MARKS_LAST /* the last message looks different from the others */
} template_kind;

static void put(json_t *ids, int id)
{
    json_array_append_new(ids, json_integer(id));
}

static void put_text(json_t *ids, const char *text)
{
    for (; *text; text++)
        put(ids, 1000 + (unsigned char)*text);
}

/* The answer to a /tokenize body; the caller frees it. */
static char *answer(const char *body, size_t n, template_kind kind)
{
    json_t *in = json_loadb(body, n, 0, NULL), *out = json_object(), *ids = json_array(), *m;
    size_t i;
    if (!in) /* assert_* is for the main thread only */
        abort();
    json_t *messages = json_object_get(in, "messages"), *tools = json_object_get(in, "tools");
    put(ids, 1);
    if (tools) {
        char *text = json_dumps(tools, JSON_COMPACT);
        put_text(ids, text);
        free(text);
    }
    if (kind == COUNTS)
        put(ids, 500 + (int)json_array_size(messages));
    json_array_foreach(messages, i, m)
    {
        put(ids, kind == MARKS_LAST && i + 1 == json_array_size(messages) ? 9 : 8);
        put_text(ids, json_string_value(json_object_get(m, "role")));
        put_text(ids, json_string_value(json_object_get(m, "content")));
    }
    if (!messages)
        put_text(ids, json_string_value(json_object_get(in, "prompt")));
    json_object_set_new(out, "count", json_integer((json_int_t)json_array_size(ids)));
    json_object_set_new(out, "tokens", ids);
    char *text = json_dumps(out, 0);
    json_decref(out);
    json_decref(in);
    return text;
}

/* --- one who asks --- */

typedef struct asker {
    uv_loop_t loop;
    pl_mailbox mailbox;
    pl_tokcache *c;
    pl_tokcache_answer a;
    pl_scan scan;
    pl_tokcache_api api;
    int ready, rc;
    pl_tokens *ids;
} asker;

static void must(bool ok)
{
    if (!ok)
        abort();
}

static void asker_init(asker *k, pl_tokcache *c)
{
    *k = (asker){.c = c, .api = PL_TOKCACHE_CHAT};
    must(uv_loop_init(&k->loop) == 0);
    must(pl_mailbox_init(&k->mailbox, &k->loop, NULL) == 0);
    uv_ref((uv_handle_t *)&k->mailbox.async); /* the loop has nothing else to live for */
}

static void asker_end(asker *k)
{
    pl_mailbox_close(&k->mailbox);
    uv_run(&k->loop, UV_RUN_DEFAULT);
    pl_mailbox_destroy(&k->mailbox);
    must(uv_loop_close(&k->loop) == 0);
}

static void on_ready(void *ctx, int rc, pl_tokens *ids)
{
    asker *k = ctx;
    k->ready++;
    k->rc = rc;
    k->ids = ids;
}

static pl_tokcache_result ask(asker *k, const char *body)
{
    must(pl_scan_body(pl_str_c(body), 100, &k->scan) == 0);
    pl_tokcache_request r = {
        k->api, PL_STR("mo\"del"), pl_str_c(body), &k->scan, &k->mailbox, on_ready, k};
    k->ready = 0;
    k->ids = NULL;
    return pl_tokcache_get(k->c, &r, &k->a);
}

static void end_call(asker *k, int i, template_kind kind)
{
    pl_tokcache_post *post = &k->a.calls[i];
    char *text = answer(post->body.p, post->body.n, kind);
    pl_tokcache_fill(k->c, post->call, pl_str_c(text));
    free(text);
    pl_buf_free(&post->body);
}

static void fail_calls(asker *k)
{
    for (int i = 0; i < k->a.calls_n; i++) {
        pl_tokcache_fail(k->c, k->a.calls[i].call);
        pl_buf_free(&k->a.calls[i].body);
    }
}

static void wait_ready(asker *k)
{
    while (!k->ready)
        uv_run(&k->loop, UV_RUN_NOWAIT);
}

/* Are these what the engine makes of the whole body? Releases them. */
static bool right(pl_tokens *ids, const char *body, template_kind kind)
{
    char *text = answer(body, strlen(body), kind);
    json_t *all = json_loads(text, 0, NULL), *want = json_object_get(all, "tokens");
    size_t n = pl_tokens_count(ids);
    bool same = n == json_array_size(want);
    uint32_t *got = malloc((n + 1) * sizeof *got);
    must(got != NULL);
    pl_tokens_copy(ids, got);
    for (size_t i = 0; i < n && same; i++)
        same = got[i] == json_integer_value(json_array_get(want, i));
    same = same && pl_tokens_begin(ids, got, n);
    free(got);
    free(text);
    json_decref(all);
    pl_tokens_release(ids);
    return same;
}

/* Asks, answers what has to be asked (last call first when `backwards`) and checks the ids. */
static bool ask_all(asker *k, const char *body, template_kind kind, bool backwards)
{
    pl_tokcache_result r = ask(k, body);
    if (r == PL_TOKCACHE_HIT)
        return right(k->a.ids, body, kind);
    if (r != PL_TOKCACHE_ASK)
        return false;
    for (int i = 0; i < k->a.calls_n; i++)
        end_call(k, backwards ? k->a.calls_n - 1 - i : i, kind);
    wait_ready(k);
    return k->rc == 0 && right(k->ids, body, kind);
}

/* A chat request with this many messages; a client's turns are the odd ones. */
static const char *chat(char *out, size_t size, int messages, const char *who)
{
    size_t at = (size_t)snprintf(out, size, "{\"tools\":[{\"name\":\"f\"}],\"messages\":[");
    for (int i = 0; i < messages; i++)
        at += (size_t)snprintf(out + at, size - at,
                               "%s{\"role\":\"%s\", \"content\":\"%s says %d\\n\"}", i ? "," : "",
                               i % 2 ? "assistant" : "user", who, i * 7);
    snprintf(out + at, size - at, "],\"stream\":true}");
    return out;
}

static uint64_t now_ns;

static pl_tokcache *cache(uint64_t max_bytes, uint32_t max_calls)
{
    pl_tokcache_options o = {pl_clock_virtual(&now_ns), max_bytes, max_calls};
    pl_tokcache *c;
    assert_int_equal(pl_tokcache_new(&o, &c), 0);
    return c;
}

static pl_tokcache_stats stats(pl_tokcache *c)
{
    pl_tokcache_stats s;
    pl_tokcache_stats_of(c, &s);
    return s;
}

/* --- conversations --- */

static void only_what_is_new(void **state)
{
    (void)state;
    pl_tokcache *c = cache(1 << 20, 10);
    asker k;
    char body[8192];
    asker_init(&k, c);
    for (int turn = 0; turn < 20; turn++) {
        pl_tokcache_stats before = stats(c);
        chat(body, sizeof body, 2 * turn + 1, "ann");
        assert_true(ask_all(&k, body, ADDS_UP, turn % 2));
        pl_tokcache_stats s = stats(c);
        assert_int_equal(s.whole - before.whole, turn < 2 + PL_TOKCACHE_CHECKS);
        assert_int_equal(s.parts - before.parts, turn >= 2);
        assert_int_equal(s.anchors - before.anchors, turn == 1);
        assert_int_equal(ask(&k, body), PL_TOKCACHE_HIT);
        pl_tokens_release(k.a.ids);
    }
    /* trusted: what goes out is the reply and the new message, behind the anchor */
    chat(body, sizeof body, 41, "ann");
    assert_int_equal(ask(&k, body), PL_TOKCACHE_ASK);
    assert_int_equal(k.a.calls_n, 1);
    json_t *sent = json_loadb(k.a.calls[0].body.p, k.a.calls[0].body.n, 0, NULL);
    assert_non_null(sent);
    assert_int_equal(json_array_size(json_object_get(sent, "messages")), 3);
    assert_string_equal(json_string_value(json_object_get(sent, "model")), "mo\"del");
    assert_true(json_is_false(json_object_get(sent, "add_generation_prompt")));
    assert_null(json_object_get(sent, "tools"));
    json_decref(sent);
    end_call(&k, 0, ADDS_UP);
    wait_ready(&k);
    assert_true(right(k.ids, body, ADDS_UP));
    /* another conversation starts whole, its second turn needs no trial any more */
    for (int turn = 0; turn < 2; turn++) {
        pl_tokcache_stats before = stats(c);
        assert_true(ask_all(&k, chat(body, sizeof body, 2 * turn + 1, "bob"), ADDS_UP, false));
        assert_int_equal(stats(c).whole - before.whole, turn == 0);
    }
    assert_int_equal(stats(c).agreed, PL_TOKCACHE_CHECKS);
    assert_int_equal(stats(c).differed, 0);
    asker_end(&k);
    pl_tokcache_free(c);
}

static void templates_that_do_not_add_up(void **state)
{
    (void)state;
    static const template_kind kinds[] = {COUNTS, MARKS_LAST};
    for (int i = 0; i < 2; i++) {
        pl_tokcache *c = cache(1 << 20, 10);
        asker k;
        char body[8192];
        asker_init(&k, c);
        for (int turn = 0; turn < 30; turn++)
            assert_true(
                ask_all(&k, chat(body, sizeof body, 2 * turn + 1, "ann"), kinds[i], turn % 3 == 0));
        assert_int_equal(stats(c).whole, 30);
        assert_int_equal(stats(c).parts, 1);
        assert_int_equal(stats(c).differed, 1);
        asker_end(&k);
        pl_tokcache_free(c);
    }
}

/* The model is reloaded with another template: noticed within PL_TOKCACHE_RECHECK turns, and what
 * was joined by then is not used again. */
static void a_template_that_changes(void **state)
{
    (void)state;
    pl_tokcache *c = cache(4 << 20, 10);
    asker k;
    char body[16384];
    asker_init(&k, c);
    for (int turn = 0; turn < 8; turn++)
        assert_true(ask_all(&k, chat(body, sizeof body, 2 * turn + 1, "ann"), ADDS_UP, false));
    int turn = 8, wrong = 0;
    for (; stats(c).differed == 0; turn++) {
        assert_in_range(turn, 8, 8 + PL_TOKCACHE_RECHECK);
        wrong += !ask_all(&k, chat(body, sizeof body, 2 * turn + 1, "ann"), COUNTS, false);
    }
    assert_true(wrong > 0); /* until then they were of the old template */
    for (int again = turn - 3; again < turn + 40; again++)
        assert_true(ask_all(&k, chat(body, sizeof body, 2 * again + 1, "ann"), COUNTS, false));
    asker_end(&k);
    pl_tokcache_free(c);
}

static void tools_and_extras_count(void **state)
{
    (void)state;
    static const char *const bodies[] = {
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"tools\":[{\"a\":1}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"chat_template_kwargs\":{\"a\":1}}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"chat_template_kwargs\":{\"a\":2}}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"reasoning_effort\":\"low\"}",
        "{\"prompt\":\"x\"}",
    };
    pl_tokcache *c = cache(1 << 20, 10);
    asker k;
    asker_init(&k, c);
    for (int i = 0; i < 6; i++) {
        assert_true(ask_all(&k, bodies[i], ADDS_UP, false));
        assert_int_equal(stats(c).whole, i + 1);
    }
    assert_int_equal(ask(&k, "{\"temperature\":1, \"messages\" : [{\"content\":\"\\u0078\","
                             "\"role\":\"user\"}]}"),
                     PL_TOKCACHE_HIT);
    pl_tokens_release(k.a.ids);
    assert_int_equal(ask(&k, bodies[3]), PL_TOKCACHE_HIT);
    pl_tokens_release(k.a.ids);
    assert_int_equal(ask(&k, bodies[2]), PL_TOKCACHE_HIT);
    pl_tokens_release(k.a.ids);
    k.api = PL_TOKCACHE_PROMPT; /* another kind of engine: by itself */
    assert_true(ask_all(&k, bodies[5], ADDS_UP, false));
    assert_int_equal(stats(c).whole, 7);
    asker_end(&k);
    pl_tokcache_free(c);
}

/* --- waiting --- */

static void one_call_for_many(void **state)
{
    (void)state;
    pl_tokcache *c = cache(1 << 20, 10);
    asker k[4];
    char body[1000];
    chat(body, sizeof body, 3, "ann");
    for (int i = 0; i < 4; i++) {
        asker_init(&k[i], c);
        assert_int_equal(ask(&k[i], body), i ? PL_TOKCACHE_WAIT : PL_TOKCACHE_ASK);
    }
    assert_int_equal(k[0].a.calls_n, 1);
    pl_tokcache_leave(k[2].a.ticket); /* its budget has run out */
    pl_tokcache_leave(k[0].a.ticket); /* so has that of the one who asks */
    end_call(&k[0], 0, ADDS_UP);
    pl_tokcache_leave(k[3].a.ticket); /* answered, but not delivered yet */
    wait_ready(&k[1]);
    assert_true(k[1].rc == 0 && right(k[1].ids, body, ADDS_UP));
    for (int i = 0; i < 4; i++) {
        uv_run(&k[i].loop, UV_RUN_NOWAIT);
        assert_int_equal(k[i].ready, i == 1);
    }
    assert_int_equal(ask(&k[2], body), PL_TOKCACHE_HIT);
    assert_true(right(k[2].a.ids, body, ADDS_UP));
    assert_int_equal(stats(c).joined, 3);
    for (int i = 0; i < 4; i++)
        asker_end(&k[i]);
    pl_tokcache_free(c);
}

static void loops_that_end(void **state)
{
    (void)state;
    pl_tokcache *c = cache(1 << 20, 10);
    asker k;
    asker_init(&k, c);
    assert_int_equal(ask(&k, "{\"prompt\":\"x\"}"), PL_TOKCACHE_ASK);
    pl_tokcache_post post = k.a.calls[0];
    pl_tokcache_ticket *t = k.a.ticket;
    pl_mailbox_close(&k.mailbox);
    uv_run(&k.loop, UV_RUN_DEFAULT);
    pl_tokcache_fill(c, post.call, PL_STR("{\"tokens\":[1]}"));
    pl_tokcache_leave(t);
    pl_buf_free(&post.body);
    pl_mailbox_destroy(&k.mailbox);
    assert_int_equal(uv_loop_close(&k.loop), 0);
    assert_int_equal(k.ready, 0);
    pl_tokcache_free(c);
}

/* --- engines that fail --- */

static void failures(void **state)
{
    (void)state;
    static const char *const nonsense[] = {
        "",
        "nonsense",
        "{}",
        "[1,2]",
        "{\"tokens\":7}",
        "{\"tokens\":[1,\"2\"]}",
        "{\"tokens\":[1.5]}",
        "{\"tokens\":[-1]}",
        "{\"tokens\":[[1]]}",
        "{\"tokens\":[1,2",
    };
    pl_tokcache *c = cache(1 << 20, 10);
    asker k;
    char body[1000];
    asker_init(&k, c);
    for (size_t i = 0; i < sizeof nonsense / sizeof nonsense[0]; i++) {
        snprintf(body, sizeof body, "{\"prompt\":\"%zu\"}", i);
        assert_int_equal(ask(&k, body), PL_TOKCACHE_ASK);
        pl_tokcache_fill(c, k.a.calls[0].call, pl_str_c(nonsense[i]));
        pl_buf_free(&k.a.calls[0].body);
        wait_ready(&k);
        assert_int_equal(k.rc, PL_EUNAVAILABLE);
        assert_null(k.ids);
        assert_true(ask_all(&k, "{\"prompt\":\"fine\"}", ADDS_UP, false)); /* not for long */
        if (i == 0)
            continue;
        snprintf(body, sizeof body, "{\"prompt\":\"between %zu\"}", i);
        assert_true(ask_all(&k, body, ADDS_UP, false));
    }
    assert_int_equal(stats(c).entries, 10);
    for (int i = 0; i < PL_TOKCACHE_FAILURES; i++) {
        assert_int_equal(ask(&k, "{\"prompt\":\"y\"}"), PL_TOKCACHE_ASK);
        fail_calls(&k);
        wait_ready(&k);
        assert_int_equal(k.rc, PL_EUNAVAILABLE);
    }
    assert_int_equal(ask(&k, "{\"prompt\":\"y\"}"), PL_TOKCACHE_OFF);
    now_ns += PL_TOKCACHE_PAUSE_MS * 1000000ull;
    assert_true(ask_all(&k, "{\"prompt\":\"y\"}", ADDS_UP, false));
    asker_end(&k);
    pl_tokcache_free(c);
}

/* A part or its check fails: the other one still counts, as far as it can be trusted. */
static void one_of_two_fails(void **state)
{
    (void)state;
    for (int victim = 0; victim < 2; victim++) {
        pl_tokcache *c = cache(1 << 20, 10);
        asker k;
        char body[4096];
        asker_init(&k, c);
        for (int turn = 0; turn < 2; turn++)
            assert_true(ask_all(&k, chat(body, sizeof body, 2 * turn + 1, "ann"), ADDS_UP, false));
        assert_int_equal(ask(&k, chat(body, sizeof body, 5, "ann")), PL_TOKCACHE_ASK);
        assert_int_equal(k.a.calls_n, 2);
        pl_tokcache_fail(c, k.a.calls[victim].call);
        pl_buf_free(&k.a.calls[victim].body);
        end_call(&k, 1 - victim, ADDS_UP);
        wait_ready(&k);
        assert_int_equal(k.rc, victim ? 0 : PL_EUNAVAILABLE); /* a part alone is not trusted yet */
        if (victim)
            assert_true(right(k.ids, body, ADDS_UP));
        assert_true(ask_all(&k, body, ADDS_UP, false));
        asker_end(&k);
        pl_tokcache_free(c);
    }
}

static void what_cannot_be_asked(void **state)
{
    (void)state;
    static const char *const bodies[] = {
        "{}",
        "{\"messages\":[]}",
        "{\"messages\":{}}",
        "{\"prompt\":[1,2]}",
        "{\"prompt\":[\"a\"]}",
        "{\"input\":\"a\"}",
        "{\"system\":\"a\",\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}",
        /* whatever image it is, its placeholder is the same */
        "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"x\"},"
        "{\"type\":\"image_url\",\"image_url\":{\"url\":\"http://a/b.png\"}}]}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"},{\"content\":[{\"source\":{\"data\":"
        "\"AA\"},"
        "\"type\":\"image\"}],\"role\":\"user\"}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"input_audio\",\"text\":\"x\","
        "\"input_audio\":{}}]}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":[{\"image_url\":\"http://a/b.png\"}]}]}",
    };
    pl_tokcache *c = cache(1 << 20, 1);
    asker k;
    asker_init(&k, c);
    for (size_t i = 0; i < sizeof bodies / sizeof bodies[0]; i++)
        assert_int_equal(ask(&k, bodies[i]), PL_TOKCACHE_OFF);
    char *image = malloc(2000);
    assert_non_null(image);
    snprintf(image, 2000, "{\"messages\":[{\"role\":\"user\",\"content\":\"data:%0800d\"}]}", 1);
    assert_int_equal(ask(&k, image), PL_TOKCACHE_OFF);
    free(image);
    k.api = PL_TOKCACHE_PROMPT;
    assert_int_equal(ask(&k, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}"),
                     PL_TOKCACHE_OFF);
    k.api = PL_TOKCACHE_CHAT;
    assert_int_equal(ask(&k, "{\"messages\":[{\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
                             "{\"text\":\"b\",\"type\":\"input_text\"},\"c\"]},"
                             "{\"role\":\"tool\",\"content\":null}]}"),
                     PL_TOKCACHE_ASK);
    fail_calls(&k);
    wait_ready(&k);
    k.api = PL_TOKCACHE_PROMPT;
    assert_int_equal(ask(&k, "{\"text\":\"x\"}"), PL_TOKCACHE_ASK);
    asker other;
    asker_init(&other, c);
    assert_int_equal(ask(&other, "{\"prompt\":\"y\"}"), PL_TOKCACHE_OFF); /* one call is the cap */
    end_call(&k, 0, ADDS_UP);
    wait_ready(&k);
    pl_tokens_release(k.ids);
    asker_end(&other);
    asker_end(&k);
    pl_tokcache_free(c);
    pl_tokcache_options bad = {{NULL, NULL}, 1, 1};
    assert_int_equal(pl_tokcache_new(&bad, &c), PL_EINVALID);
    pl_tokcache_free(NULL);
}

static void the_cap(void **state)
{
    (void)state;
    enum { CAP = 64 << 10 };
    pl_tokcache *c = cache(CAP, 10);
    asker k;
    char body[8192], who[20];
    asker_init(&k, c);
    for (int i = 0; i < 40; i++) {
        snprintf(who, sizeof who, "number %d", i);
        for (int turn = 0; turn < 10; turn++) {
            assert_true(ask_all(&k, chat(body, sizeof body, 2 * turn + 1, who), ADDS_UP, false));
            assert_true(stats(c).bytes <= CAP);
        }
    }
    assert_true(stats(c).evicted > 0);
    assert_int_equal(ask(&k, body), PL_TOKCACHE_HIT); /* the last one is there */
    pl_tokens_release(k.a.ids);
    asker_end(&k);
    pl_tokcache_free(c);
}

/* --- threads --- */

enum { THREADS = 3, ROUNDS = 300 };
static _Atomic int bad;
static pl_tokcache *shared;

static void *talk(void *arg)
{
    pl_rng rng = {(uint64_t)(uintptr_t)arg};
    static const char *const who[] = {"ann", "bob", "cid"};
    asker k;
    char body[4096];
    asker_init(&k, shared);
    for (int i = 0; i < ROUNDS; i++) {
        chat(body, sizeof body, 1 + 2 * (int)pl_rng_below(&rng, 12), who[pl_rng_below(&rng, 3)]);
        pl_tokcache_result r = ask(&k, body);
        bool leaves = pl_rng_below(&rng, 4) == 0;
        if (r == PL_TOKCACHE_HIT)
            bad += !right(k.a.ids, body, ADDS_UP);
        if (r == PL_TOKCACHE_HIT || r == PL_TOKCACHE_OFF)
            continue;
        if (leaves)
            pl_tokcache_leave(k.a.ticket);
        if (pl_rng_below(&rng, 10) == 0)
            fail_calls(&k);
        else
            for (int n = 0; n < k.a.calls_n; n++)
                end_call(&k, n, ADDS_UP);
        if (leaves)
            continue;
        wait_ready(&k);
        bad += k.rc == 0 ? !right(k.ids, body, ADDS_UP) : k.rc != PL_EUNAVAILABLE;
    }
    asker_end(&k);
    return NULL;
}

static void threads(void **state)
{
    (void)state;
    pl_tokcache_options o = {pl_clock_real(), 30 << 10, 10};
    assert_int_equal(pl_tokcache_new(&o, &shared), 0);
    pthread_t t[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&t[i], NULL, talk, (void *)(i + 1)), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(t[i], NULL);
    assert_int_equal(bad, 0);
    assert_int_equal(stats(shared).differed, 0);
    assert_true(stats(shared).hits > 0);
    pl_tokcache_free(shared);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_what_is_new),
        cmocka_unit_test(templates_that_do_not_add_up),
        cmocka_unit_test(a_template_that_changes),
        cmocka_unit_test(tools_and_extras_count),
        cmocka_unit_test(one_call_for_many),
        cmocka_unit_test(loops_that_end),
        cmocka_unit_test(failures),
        cmocka_unit_test(one_of_two_fails),
        cmocka_unit_test(what_cannot_be_asked),
        cmocka_unit_test(the_cap),
        cmocka_unit_test(threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
