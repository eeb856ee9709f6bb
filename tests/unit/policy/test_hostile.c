/* tests/hostile through real VMs: what must be refused is, at its stage and line; what misbehaves
 * at run time gives an error that names its hook, or an answer that C refuses; the VM can be called
 * on or says that it is broken. tests/flow/hostile.test.mjs runs the same files in the program. */
#include "policy_test.h"

#include <dirent.h>

typedef struct hostile {
    char path[512], name[128], verdict[16], at[16];
    int line; /* marked "here"; 0: none */
} hostile;

static bool misbehave;
static pl_shared *shared;

static pl_str header(void *ctx, pl_str name)
{
    (void)ctx;
    return misbehave && pl_str_eq(name, PL_STR("x-misbehave")) ? PL_STR("1") : (pl_str){NULL, 0};
}

static hostile read_hostile(const char *name)
{
    hostile h = {.line = 0};
    char line[512];
    snprintf(h.path, sizeof h.path, "%s/tests/hostile/%s", PL_SOURCE_DIR, name);
    snprintf(h.name, sizeof h.name, "%s", name);
    FILE *f = fopen(h.path, "r");
    assert_non_null(f);
    for (int n = 1; fgets(line, sizeof line, f); n++) {
        if (n == 1 && sscanf(line, "-- expect: %15s %15s", h.verdict, h.at) != 2)
            fail_msg("%s: the first line must say what is expected", name);
        if (strstr(line, "-- here"))
            h.line = n;
    }
    fclose(f);
    return h;
}

static void refused(const hostile *h, const pl_vm_error *err)
{
    if (strcmp(h->verdict, "refused") != 0)
        fail_msg("%s: %s: line %d: %s", h->name, err->stage, err->line, err->message);
    if (strcmp(err->stage, h->at) != 0 || (h->line && err->line != h->line) ||
        (h->line && !strstr(err->file, h->name)) || !err->message[0])
        fail_msg("%s: wanted %s line %d; got %s %s:%d: %s", h->name, h->at, h->line, err->stage,
                 err->file, err->line, err->message);
}

/* C's own check of what came back: see policy/decide.c. */
static bool valid(const pl_records *r)
{
    const struct pl_verdict *v = r->verdict;
    if (v->scored)
        for (int i = 0; i < r->fleet->n; i++)
            if (r->workers[i].eligible && !isfinite(r->cost[i]))
                return false;
    if (!v->routed)
        return true;
    if (!(v->index >= 0 && v->index < r->fleet->n) || v->index != floor(v->index) ||
        !r->workers[(int)v->index].eligible || v->reason_len < 0 || v->reason_len > 64)
        return false;
    for (int i = 0; i < v->reason_len; i++)
        if (!strchr("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-",
                    v->reason[i]))
            return false;
    return true;
}

static const char *const hooks[] = {"init",    "admit",  "session", "score", "route", "retain",
                                    "degrade", "expire", "done",    "tick",  "save"};

/* Runs what a request would; true when all of it was well. */
static bool behaves(pl_vm *vm, const hostile *h, char *hook, size_t cap, pl_vm_error *err)
{
    pl_records *r = fill(vm, 3, 7);
    pl_request_view view = {.model = PL_STR_INIT("m"),
                            .find_header = header,
                            .worker_name = test_worker_name,
                            .seed = 7};
    pl_vm_bind(vm, &view);
    r->workers[1].eligible = false;
    r->workers[1].why = PL_WHY_UNHEALTHY;
    r->fleet->eligible = 2;
    memset(r->outcome, 0, sizeof *r->outcome);
    r->outcome->status = 200;
    int rc = pl_vm_decide(vm, 0, err);
    bool ok = rc == 0 && valid(r);
    if (rc == 0 && !ok)
        snprintf(hook, cap, "%s", r->verdict->scored ? "score" : "route");
    if (rc == 0 && pl_vm_hooks(vm) & 1u << PL_HOOK_DONE)
        rc = pl_vm_done(vm, err);
    if (rc == 0 && pl_vm_hooks(vm) & 1u << PL_HOOK_TICK)
        rc = pl_vm_tick(vm, 1, err);
    if (rc != 0) {
        snprintf(hook, cap, "%s", hooks[r->verdict->hook]);
        if (!err->message[0])
            fail_msg("%s: an error without words", h->name);
        return false;
    }
    return ok;
}

static void one(const char *name)
{
    hostile h = read_hostile(name);
    pl_errbuf eb;
    pl_policy_source *src;
    if (pl_policy_source_load(pl_str_c(h.path), NULL, &src, &eb) < 0)
        fail_msg("%s: %s", name, eb.text);
    pl_vm_options o = {.loops = 1, .seed = 7, .memory_bytes = 16u << 20, .shared = shared};
    pl_vm_error err = {"", "", 0, ""};
    pl_vm *vm;
    misbehave = false;
    int rc = pl_vm_new(src, &o, &vm, &err);
    if (rc == 0)
        rc = pl_vm_init(vm, NULL, &err);
    pl_policy_source_unref(src);
    if (rc < 0) {
        refused(&h, &err);
        if (vm)
            pl_vm_free(vm);
        return;
    }
    if (strcmp(h.verdict, "served") != 0 && strcmp(h.verdict, "clamped") != 0)
        fail_msg("%s was accepted", name);

    char hook[16] = "";
    if (!behaves(vm, &h, hook, sizeof hook, &err))
        fail_msg("%s misbehaves unasked: %s: %s", name, hook, err.message);
    misbehave = true;
    if (behaves(vm, &h, hook, sizeof hook, &err))
        fail_msg("%s got away with it", name);
    if (strcmp(hook, h.at) != 0)
        fail_msg("%s: wanted an error of %s, got one of %s: %s", name, h.at, hook, err.message);
    assert_true(pl_vm_memory_used(vm) <= 17u << 20);
    misbehave = false;
    if (!pl_vm_broken(vm) && strcmp(h.at, "tick") != 0 && !behaves(vm, &h, hook, sizeof hook, &err))
        fail_msg("%s: not broken, but it does not behave again: %s: %s", name, hook, err.message);
    pl_vm_free(vm);
}

static void test_hostile(void **state)
{
    (void)state;
    DIR *d = opendir(PL_SOURCE_DIR "/tests/hostile");
    assert_non_null(d);
    int n = 0;
    for (struct dirent *e; (e = readdir(d));)
        if (strlen(e->d_name) > 4 && strcmp(e->d_name + strlen(e->d_name) - 4, ".lua") == 0) {
            one(e->d_name);
            n++;
        }
    closedir(d);
    assert_true(n > 40);
}

static int setup(void **state)
{
    shared = pl_shared_new();
    return make_dir(state);
}

static int teardown(void **state)
{
    pl_shared_free(shared);
    return remove_dir(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_hostile)};
    return cmocka_run_group_tests_name("hostile policies", tests, setup, teardown);
}
