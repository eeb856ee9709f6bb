/* Shared by the tests of core/policy: policies from text, a made-up fleet in a VM's records. */
#ifndef POLICY_TEST_H
#define POLICY_TEST_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "policy/vm.h"

static char test_dir[64];

static inline int make_dir(void **state)
{
    (void)state;
    strcpy(test_dir, "/tmp/pl_policy_XXXXXX");
    return mkdtemp(test_dir) ? 0 : -1;
}

static inline int remove_dir(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", test_dir);
    return system(command) == 0 ? 0 : -1;
}

/* Writes test_dir/name; the path stays valid until the next call. */
static inline const char *put_file(const char *name, const char *text)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", test_dir, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
    return path;
}

static inline pl_policy_source *source_of(const char *text, const json_t *params)
{
    pl_errbuf eb;
    pl_policy_source *src;
    int rc = pl_policy_source_load(pl_str_c(put_file("policy.lua", text)), params, &src, &eb);
    if (rc < 0)
        fail_msg("%s", eb.text);
    return src;
}

/* A VM that is loaded and not initialised; NULL with err filled. */
static inline pl_vm *try_vm(const char *text, pl_shared *shared, pl_vm_error *err)
{
    pl_policy_source *src = source_of(text, NULL);
    pl_vm_options o = {.loops = 1, .seed = 7, .memory_bytes = 16u << 20, .shared = shared};
    pl_vm *vm;
    int rc = pl_vm_new(src, &o, &vm, err);
    pl_policy_source_unref(src);
    assert_int_equal(rc < 0, vm == NULL);
    return vm;
}

static inline pl_vm *ready_vm(const char *text, pl_shared *shared)
{
    pl_vm_error err;
    pl_vm *vm = try_vm(text, shared, &err);
    if (!vm)
        fail_msg("%s: %s:%d: %s", err.stage, err.file, err.line, err.message);
    if (pl_vm_init(vm, NULL, &err) < 0)
        fail_msg("%s: %s:%d: %s", err.stage, err.file, err.line, err.message);
    return vm;
}

static inline pl_str test_worker_name(void *ctx, int index)
{
    static _Thread_local char name[16];
    (void)ctx;
    snprintf(name, sizeof name, "w%d", index);
    return pl_str_c(name);
}

static inline pl_str test_header(void *ctx, pl_str name)
{
    (void)ctx;
    return pl_str_ieq(name, PL_STR("x-key")) ? PL_STR("moon") : (pl_str){NULL, 0};
}

static inline pl_str test_member(void *ctx, pl_str name)
{
    (void)ctx;
    return pl_str_eq(name, PL_STR("user")) ? PL_STR("selene") : (pl_str){NULL, 0};
}

/* n eligible workers with 0, 1, 2 .. requests in flight. */
static inline pl_records *fill(pl_vm *vm, int n, uint64_t seed)
{
    pl_request_view view = {.model = PL_STR_INIT("llama"),
                            .tenant = PL_STR_INIT("acme"),
                            .path = PL_STR_INIT("/v1/chat/completions"),
                            .id = PL_STR_INIT("r-1"),
                            .find_header = test_header,
                            .find_member = test_member,
                            .worker_name = test_worker_name,
                            .seed = seed};
    pl_records *r = pl_vm_records(vm);
    pl_vm_bind(vm, &view);
    r->fleet->n = r->fleet->eligible = n;
    r->req->prompt_tokens = 100;
    r->req->max_tokens = -1;
    for (int i = 0; i < n; i++)
        r->workers[i] = (struct pl_worker){.inflight = i,
                                           .weight = 1,
                                           .max_inflight = INFINITY,
                                           .prefill_tokens_per_second = 8000,
                                           .index = i,
                                           .slot = i,
                                           .generation = 1,
                                           .eligible = true};
    return r;
}

#endif
