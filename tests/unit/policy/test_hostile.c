/* Every policy of tests/hostile does no more harm than its first line says: refused at a stage, or
 * served with an error (or a clamp) booked on the hook. tests/hostile/README.md has the format. */
#include "policy_test.h"

#include <dirent.h>

#include "base/log.h"
#include "policy/decide.h"

#define DIR_NAME PL_SOURCE_DIR "/tests/hostile"

static pl_shared *shared;
static bool misbehave;

static pl_str header(void *ctx, pl_str name)
{
    return misbehave && pl_str_ieq(name, PL_STR("x-misbehave")) ? PL_STR("1") : (pl_str){NULL, 0};
}

static char *slurp(const char *path)
{
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    char *text = calloc(1, 65536);
    assert_true(fread(text, 1, 65535, f) > 0);
    fclose(f);
    return text;
}

static int marked_line(const char *text)
{
    const char *here = strstr(text, "-- here\n");
    int line = 1;
    for (const char *p = text; here && p < here; p++)
        line += *p == '\n';
    return here ? line : 0;
}

static int load(const char *path, pl_vm **vm, pl_vm_error *err)
{
    pl_errbuf eb;
    pl_policy_source *src;
    pl_vm_options o = {.loops = 1, .seed = 7, .memory_bytes = 16u << 20, .shared = shared};
    assert_int_equal(pl_policy_source_load(pl_str_c(path), NULL, &src, &eb), 0);
    int rc = pl_vm_new(src, &o, vm, err);
    if (rc == 0 && (rc = pl_vm_init(*vm, NULL, err)) < 0)
        pl_vm_free(*vm);
    pl_policy_source_unref(src);
    return rc;
}

static void refused(const char *path, const char *stage, int line)
{
    pl_vm *vm;
    pl_vm_error err;
    if (load(path, &vm, &err) == 0)
        fail_msg("%s was accepted", path);
    if (strcmp(err.stage, stage) != 0 || (line && err.line != line) || !strstr(path, err.file))
        fail_msg("%s: wanted %s line %d, got %s %s:%d: %s", path, stage, line, err.stage, err.file,
                 err.line, err.message);
}

static int hook_number(const char *name)
{
    for (int i = 0; i < PL_HOOK_COUNT; i++)
        if (strcmp(pl_hook_name(i), name) == 0)
            return i;
    fail_msg("no hook %s", name);
    return 0;
}

/* A turn of a session around the decision, and one that has expired. */
static void session_hooks(pl_decider *d, pl_ask *ask)
{
    pl_session_choice choice = {.ttl_seconds = 300, .kind = PL_ROUTER_ONLY};
    pl_retain_choice keep = {.retention_seconds = -1};
    double seconds;
    pl_str id = misbehave ? PL_STR("misbehave") : PL_STR("behave");
    pl_request_view names = {.session_id = id};
    struct pl_session s = {
        .ttl_seconds = 300, .event = PL_SESSION_TURN, .kind = PL_ROUTER_ONLY, .bound_slot = -1};
    pl_ask turn = *ask;
    turn.session = s;
    turn.strings.session_id = id;
    pl_decide_session(d, &turn, 3600, &choice);
    assert_true(choice.ttl_seconds >= 0 && choice.ttl_seconds <= 3600);
    assert_int_equal(choice.kind, PL_ROUTER_ONLY);
    pl_decide_retain(d, &turn, ask->model->workers[0], &keep);
    assert_true(keep.retention_seconds >= -1 && keep.retention_seconds <= 86400);
    int action = pl_decide_expire(d, &s, &names, 3600, &seconds);
    assert_true(action == PL_CLOSE || action == PL_DROP || action == PL_EXTEND);
    assert_true(action != PL_EXTEND || (seconds > 0 && seconds <= 3600));
}

static void served(const char *path, int hook)
{
    pl_vm *vm;
    pl_vm_error err;
    if (load(path, &vm, &err) < 0)
        fail_msg("%s: %s:%d: %s", path, err.stage, err.line, err.message);
    pl_engine *engines[2];
    pl_worker_state *workers[2];
    for (int i = 0; i < 2; i++) {
        pl_engine_spec spec = {
            .url = i ? PL_STR("http://b") : PL_STR("http://a"), .weight = 1, .dp_size = 1};
        assert_int_equal(pl_engine_new(&spec, &engines[i], NULL), 0);
        atomic_store(&engines[i]->health, PL_HEALTH_UP);
        workers[i] = &engines[i]->workers[0];
        workers[i]->slot = i;
    }
    pl_model model = {.id = PL_STR_INIT("m"), .workers = workers, .workers_n = 2};
    pl_policy_stats stats = {0};
    pl_decider_options o;
    pl_decider_options_default(&o);
    pl_decider *d = pl_decider_new(&o, &stats);
    pl_decider_swap(d, vm, 1);
    pl_decision out;
    pl_ask ask = {.model = &model, .strings = {.find_header = header, .seed = 3}};
    struct pl_outcome outcome = {.status = 200, .slot = 0};
    for (int round = 0; round < 150; round++) {
        misbehave = round == 149; /* in compiled code */
        pl_decide(d, &ask, &out);
        assert_true(out.kind != PL_NO_WORKER);
        session_hooks(d, &ask);
        pl_decide_done(d, &ask, &outcome);
        if (round % 50 == 49)
            pl_decider_tick(d, round);
        uint64_t booked = atomic_load(&stats.errors[hook]) + atomic_load(&stats.clamped[hook]);
        if ((booked > 0) != misbehave)
            fail_msg("%s: round %d, %lu booked", path, round, (unsigned long)booked);
    }
    misbehave = false;
    for (int i = 0; i < 3; i++) {
        pl_decide(d, &ask, &out);
        assert_int_equal(out.kind, PL_DECIDED);
        pl_decider_tick(d, 1);
    }
    pl_decider_free(d);
    for (int i = 0; i < 2; i++)
        pl_engine_unref(engines[i]);
}

static void test_each_file(void **state)
{
    DIR *dir = opendir(DIR_NAME);
    assert_non_null(dir);
    int files = 0;
    for (struct dirent *e; (e = readdir(dir));) {
        char path[512], kind[16], where[16];
        if (!pl_str_ends(pl_str_c(e->d_name), PL_STR(".lua")))
            continue;
        snprintf(path, sizeof path, "%s/%s", DIR_NAME, e->d_name);
        char *text = slurp(path);
        if (sscanf(text, "-- expect: %15s %15s", kind, where) != 2)
            fail_msg("%s has no expectation", path);
        if (strcmp(kind, "refused") == 0)
            refused(path, where, marked_line(text));
        else
            served(path, hook_number(where));
        free(text);
        files++;
    }
    closedir(dir);
    assert_true(files > 40);
}

static int setup(void **state)
{
    shared = pl_shared_new();
    pl_log_init(PL_LOG_ERROR + 1, 0);
    return make_dir(state);
}

static int teardown(void **state)
{
    pl_shared_free(shared);
    return remove_dir(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_each_file)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
