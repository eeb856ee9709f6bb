/* The command line: perilune serve | engine | check | reload. Everything else is in libperilune.
 * Exit 0: ok, 1: failed, 2: the command line itself is wrong. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "admin/reload_cli.h"
#include "base/opts.h"
#include "engine/front.h"
#include "policy/check.h"
#include "router.h"

enum { EXIT_OK, EXIT_FAILED, EXIT_USAGE };

/* --- messages --- */

static int usage_error(const char *command, const char *text)
{
    fprintf(stderr, "perilune %s: %s\nTry: perilune %s --help\n", command, text, command);
    return EXIT_USAGE;
}

static int failed(const char *command, int err, const pl_errbuf *eb)
{
    fprintf(stderr, "perilune %s: %s\n", command, eb->text[0] ? eb->text : pl_strerror(err));
    return EXIT_FAILED;
}

/* A number given to a flag; false with a message when it is none or out of range. */
static bool number(pl_opts *o, int flag, double min, double max, double *out)
{
    if (pl_str_double(pl_str_c(o->value), out) == 0 && *out >= min && *out <= max)
        return true;
    pl_fail(&o->error, PL_EINVALID, "--%s %s: expected a number from %.12g to %.12g",
            o->table[flag].name, o->value, min, max);
    return false;
}

static bool whole(pl_opts *o, int flag, double min, double max, double *out)
{
    if (!number(o, flag, min, max, out))
        return false;
    if (*out == (double)(long long)*out)
        return true;
    pl_fail(&o->error, PL_EINVALID, "--%s %s: expected a whole number", o->table[flag].name,
            o->value);
    return false;
}

/* The secret in an environment variable. */
static bool secret(pl_opts *o, int flag, pl_str *out)
{
    *out = pl_str_c(getenv(o->value));
    if (out->n)
        return true;
    pl_fail(&o->error, PL_EINVALID, "--%s %s: that environment variable is not set",
            o->table[flag].name, o->value);
    return false;
}

static bool log_level(pl_opts *o, pl_log_level *out)
{
    int level = pl_log_level_parse(o->value);
    if (level >= 0)
        *out = (pl_log_level)level;
    else
        pl_fail(&o->error, PL_EINVALID, "--log-level %s: expected debug, info, warn or error",
                o->value);
    return level >= 0;
}

/* --- serve --- */

enum {
    SERVE_LISTEN,
    SERVE_ADMIN,
    SERVE_ADMIN_TOKEN_ENV,
    SERVE_ENGINE,
    SERVE_WORKER,
    SERVE_POLICY,
    SERVE_SET,
    SERVE_DEFAULT_MODEL,
    SERVE_THREADS,
    SERVE_SEED,
    SERVE_LOG_LEVEL,
    SERVE_LOG_JSON,
    SERVE_HELP_CONFIG,
    SERVE_HELP
};

static const pl_opt serve_flags[] = {
    [SERVE_LISTEN] = {"listen", "HOST:PORT", "where clients come in (127.0.0.1:8000)"},
    [SERVE_ADMIN] = {"admin", "HOST:PORT", "admin API, or off (127.0.0.1:8001)"},
    [SERVE_ADMIN_TOKEN_ENV] = {"admin-token-env", "NAME",
                               "environment variable with the admin API's token (no token)"},
    [SERVE_ENGINE] = {"engine", "[NAME=]URL", "an inference server; may be repeated (none)"},
    [SERVE_WORKER] = {"worker", "[NAME=]URL", "the same as --engine"},
    [SERVE_POLICY] = {"policy", "NAME|FILE", "ready-made policy or a Lua file (prefix_seconds)"},
    [SERVE_SET] = {"set", "KEY=VALUE", "a parameter of the policy; may be repeated"},
    [SERVE_DEFAULT_MODEL] = {"default-model", "ID", "for requests that name no model (none)"},
    [SERVE_THREADS] = {"threads", "N", "event loops, 0: one for each core, at most 8 (0)"},
    [SERVE_SEED] = {"seed", "N", "of all random choices, 0: from the system (0)"},
    [SERVE_LOG_LEVEL] = {"log-level", "LEVEL", "debug, info, warn or error (info)"},
    [SERVE_LOG_JSON] = {"log-json", NULL, "log JSON even on a terminal (off)"},
    [SERVE_HELP_CONFIG] = {"help-config", NULL, "print every key of the configuration file"},
    [SERVE_HELP] = {"help", NULL, "print this"},
    {NULL, NULL, NULL},
};

static int serve_help(void)
{
    puts("usage: perilune serve [CONFIG.lua] [FLAGS]\n\n"
         "Routes inference requests to engines by a Lua policy. Flags win over the file.\n");
    pl_opts_print(serve_flags, stdout);
    fputs("\nready-made policies:", stdout);
    for (const char *const *name = pl_policy_builtin_names(); *name; name++)
        printf(" %s", *name);
    puts("\nSIGTERM drains, a second one cuts; SIGHUP reads the file and the policy again.");
    return EXIT_OK;
}

/* What must be known before the file is read. */
typedef struct serve_first {
    const char *file, *policy;
    bool help, help_config;
} serve_first;

static bool serve_scan(pl_opts o, serve_first *first, pl_errbuf *eb)
{
    for (int flag; (flag = pl_opts_next(&o)) != PL_OPT_END;) {
        if (flag == PL_OPT_BAD) {
            *eb = o.error;
            return false;
        }
        if (flag == PL_OPT_POSITIONAL && first->file) {
            pl_fail(eb, PL_EINVALID, "'%s': there is a configuration file already (%s)", o.value,
                    first->file);
            return false;
        }
        if (flag == PL_OPT_POSITIONAL)
            first->file = o.value;
        else if (flag == SERVE_POLICY)
            first->policy = o.value;
        first->help |= flag == SERVE_HELP;
        first->help_config |= flag == SERVE_HELP_CONFIG;
    }
    return true;
}

/* The command line's strings outlive the configuration. */
static bool serve_flag(pl_opts *o, int flag, pl_config *c)
{
    double n;
    pl_str value = pl_str_c(o->value);
    switch (flag) {
    case SERVE_LISTEN:
        c->listen = value;
        return true;
    case SERVE_ADMIN:
        c->admin_listen = value;
        return true;
    case SERVE_ADMIN_TOKEN_ENV:
        return secret(o, flag, &c->admin_token);
    case SERVE_ENGINE:
    case SERVE_WORKER:
        return pl_config_add_engine(c, value, &o->error) == 0;
    case SERVE_SET:
        return pl_config_set_param(c, value, &o->error) == 0;
    case SERVE_DEFAULT_MODEL:
        c->default_model = value;
        return true;
    case SERVE_THREADS:
        if (!whole(o, flag, 0, 256, &n))
            return false;
        c->threads = (int)n;
        return true;
    case SERVE_SEED:
        if (!whole(o, flag, 0, 9e15, &n))
            return false;
        c->seed = (uint64_t)n;
        return true;
    case SERVE_LOG_LEVEL:
        return log_level(o, &c->log_level);
    case SERVE_LOG_JSON:
        c->log_json = 1;
        return true;
    default:
        return true; /* known from the scan */
    }
}

/* Defaults, then the file, then flags. Returns an exit code; c is to be freed in any case. */
static int serve_config(pl_opts *o, const serve_first *first, pl_config *c)
{
    pl_errbuf eb = {""};
    int rc = pl_config_init(c);
    if (rc == 0 && first->file)
        rc = pl_config_file(c, first->file, &eb);
    if (rc != 0)
        return failed("serve", rc, &eb);
    pl_str policy = pl_str_c(first->policy);
    c->policy_by_flag = policy.p != NULL;
    if (policy.p && !pl_str_eq(policy, c->policy)) {
        c->policy = policy;
        json_object_clear(c->policy_params); /* they were the other one's */
    }
    for (int flag; (flag = pl_opts_next(o)) != PL_OPT_END;)
        if (!serve_flag(o, flag, c))
            return usage_error("serve", o->error.text);
    rc = pl_config_finish(c, &eb);
    return rc == 0 ? EXIT_OK : failed("serve", rc, &eb);
}

static int serve(pl_opts *o)
{
    serve_first first = {0};
    pl_config config = {0};
    pl_errbuf eb = {""};
    if (!serve_scan(*o, &first, &eb))
        return usage_error("serve", eb.text);
    if (first.help)
        return serve_help();
    if (first.help_config)
        return pl_config_print_reference(stdout) == 0 ? EXIT_OK : EXIT_FAILED;

    int code = serve_config(o, &first, &config);
    if (code != EXIT_OK) {
        pl_config_free(&config);
        return code;
    }
    pl_log_init(config.log_level, config.log_json);
    pl_router *router = NULL;
    int rc = pl_router_create(&config, &router, &eb);
    if (rc == 0)
        rc = pl_router_take_signals(router);
    if (rc == 0)
        rc = pl_router_start(router, eb.text, sizeof eb.text);
    if (rc == 0)
        code = pl_router_run(router) == 0 ? EXIT_OK : EXIT_FAILED;
    else
        code = failed("serve", rc, &eb);
    pl_router_free(router);
    return code;
}

/* --- engine --- */

enum {
    ENGINE_LISTEN,
    ENGINE_KIND,
    ENGINE_MODEL,
    ENGINE_PRESET,
    ENGINE_SPEED,
    ENGINE_POOL_TOKENS,
    ENGINE_PAGE_TOKENS,
    ENGINE_MAX_RUNNING,
    ENGINE_MAX_BATCH_TOKENS,
    ENGINE_MAX_WAITING,
    ENGINE_NO_PREFIX_CACHE,
    ENGINE_EVICTION,
    ENGINE_SESSIONS,
    ENGINE_DP_SIZE,
    ENGINE_KV_EVENTS,
    ENGINE_KV_FORMAT,
    ENGINE_KV_BYTES,
    ENGINE_KV_REPLAY,
    ENGINE_KV_TOPIC,
    ENGINE_KV_BUFFER,
    ENGINE_KV_CONNECT,
    ENGINE_OUTPUT_TOKENS,
    ENGINE_SEED,
    ENGINE_LOG_LEVEL,
    ENGINE_HELP
};

static const pl_opt engine_flags[] = {
    [ENGINE_LISTEN] = {"listen", "HOST:PORT", "where requests come in (127.0.0.1:30000)"},
    [ENGINE_KIND] = {"kind", "sglang|vllm", "whose answers it gives (sglang)"},
    [ENGINE_MODEL] = {"model", "NAME", "a model that it serves; may be repeated (sim)"},
    [ENGINE_PRESET] = {"preset", "NAME", "timing, see below (llama-8b-h100-tp1)"},
    [ENGINE_SPEED] = {"speed", "X", "times real time (1)"},
    [ENGINE_POOL_TOKENS] = {"pool-tokens", "N", "KV cache (180224)"},
    [ENGINE_PAGE_TOKENS] = {"page-tokens", "N", "block of the KV cache (16)"},
    [ENGINE_MAX_RUNNING] = {"max-running", "N", "requests in one batch (256)"},
    [ENGINE_MAX_BATCH_TOKENS] = {"max-batch-tokens", "N", "prefill budget of one step (8192)"},
    [ENGINE_MAX_WAITING] = {"max-waiting", "N", "requests that may wait, 0: no bound (0)"},
    [ENGINE_NO_PREFIX_CACHE] = {"no-prefix-cache", NULL, "never reuse KV (reuse)"},
    [ENGINE_EVICTION] = {"radix-eviction-policy", "NAME",
                         "what leaves the cache first: lru, lfu, slru or priority (lru)"},
    [ENGINE_SESSIONS] = {"enable-streaming-session", NULL,
                         "take turns of sessions, as SGLang does with it (refuse them)"},
    [ENGINE_DP_SIZE] = {"dp-size", "N", "data-parallel ranks, each with a cache of its own (1)"},
    [ENGINE_KV_EVENTS] = {"kv-events", "tcp://HOST:PORT",
                          "publish KV events there, rank r at port + r; port *: any (off)"},
    [ENGINE_KV_FORMAT] = {"kv-events-format", "NAME",
                          "sglang, vllm-array or vllm-map (sglang; vllm-map with --kind vllm)"},
    [ENGINE_KV_BYTES] = {"kv-events-byte-hashes", NULL,
                         "vLLM: hashes as 32 bytes rather than numbers (numbers)"},
    [ENGINE_KV_REPLAY] = {"kv-events-replay", "tcp://HOST:PORT",
                          "answer requests for past events there, ports as above (off)"},
    [ENGINE_KV_TOPIC] = {"kv-events-topic", "TEXT", "of the events (empty)"},
    [ENGINE_KV_BUFFER] = {"kv-events-buffer", "N", "batches kept for replay (10000)"},
    [ENGINE_KV_CONNECT] = {"kv-events-connect", NULL,
                           "connect to a subscriber at --kv-events (listen there)"},
    [ENGINE_OUTPUT_TOKENS] = {"output-tokens", "N", "for requests without a limit (64)"},
    [ENGINE_SEED] = {"seed", "N", "of what it says (1)"},
    [ENGINE_LOG_LEVEL] = {"log-level", "LEVEL", "debug, info, warn or error (info)"},
    [ENGINE_HELP] = {"help", NULL, "print this"},
    {NULL, NULL, NULL},
};

static int engine_help(void)
{
    puts("usage: perilune engine [FLAGS]\n\n"
         "A simulated inference server: real shapes of answers, a real prefix cache, invented "
         "text.\n");
    pl_opts_print(engine_flags, stdout);
    printf("\npresets: %s\n", pl_timing_names());
    return EXIT_OK;
}

static bool engine_preset(pl_opts *o, pl_front_options *f)
{
    const pl_timing *t = pl_timing_find(pl_str_c(o->value));
    if (t)
        f->sim.timing = *t;
    else
        pl_fail(&o->error, PL_EINVALID, "--preset %s: there are %s", o->value, pl_timing_names());
    return t != NULL;
}

static bool engine_eviction(pl_opts *o, pl_front_options *f)
{
    static const struct {
        const char *name;
        pl_radix_policy policy;
    } known[] = {{"lru", PL_RADIX_LRU},
                 {"lfu", PL_RADIX_LFU},
                 {"slru", PL_RADIX_SLRU},
                 {"priority", PL_RADIX_PRIORITY}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(o->value, known[i].name) == 0) {
            f->sim.eviction = known[i].policy;
            return true;
        }
    pl_fail(&o->error, PL_EINVALID,
            "--radix-eviction-policy %s: expected lru, lfu, slru or priority", o->value);
    return false;
}

static bool engine_kv_flag(pl_opts *o, int flag, pl_publish_options *kv)
{
    double n = 0;
    switch (flag) {
    case ENGINE_KV_EVENTS:
        kv->endpoint = pl_str_c(o->value);
        return true;
    case ENGINE_KV_FORMAT:
        if (pl_wire_parse(o->value, &kv->wire.format))
            return true;
        pl_fail(&o->error, PL_EINVALID,
                "--kv-events-format %s: expected sglang, vllm-array or vllm-map", o->value);
        return false;
    case ENGINE_KV_BYTES:
        kv->wire.byte_hashes = true;
        return true;
    case ENGINE_KV_REPLAY:
        kv->replay = pl_str_c(o->value);
        return true;
    case ENGINE_KV_TOPIC:
        kv->topic = pl_str_c(o->value);
        return true;
    case ENGINE_KV_BUFFER:
        return whole(o, flag, 1, 1e6, &n) && (kv->buffer = (int)n) > 0;
    default:
        kv->connect = true;
        return true;
    }
}

static bool engine_flag(pl_opts *o, int flag, pl_front_options *f, pl_str *models, int *models_n)
{
    double n = 0;
    switch (flag) {
    case ENGINE_LISTEN:
        f->listen = pl_str_c(o->value);
        return true;
    case ENGINE_KIND:
        f->kind = pl_str_c(o->value);
        if (pl_str_eq(f->kind, PL_STR("sglang")) || pl_str_eq(f->kind, PL_STR("vllm")))
            return true;
        pl_fail(&o->error, PL_EINVALID, "--kind %s: expected sglang or vllm", o->value);
        return false;
    case ENGINE_MODEL:
        models[(*models_n)++] = pl_str_c(o->value);
        return true;
    case ENGINE_PRESET:
        return engine_preset(o, f);
    case ENGINE_SPEED:
        return number(o, flag, 1e-3, 1e6, &f->speed);
    case ENGINE_POOL_TOKENS:
        return whole(o, flag, 16, 1e9, &n) && (f->sim.pool_tokens = (int64_t)n) > 0;
    case ENGINE_PAGE_TOKENS:
        return whole(o, flag, 1, 4096, &n) && (f->sim.page_tokens = (int)n) > 0;
    case ENGINE_MAX_RUNNING:
        return whole(o, flag, 1, 1e5, &n) && (f->sim.max_running = (int)n) > 0;
    case ENGINE_MAX_BATCH_TOKENS:
        return whole(o, flag, 1, 1e7, &n) && (f->sim.max_batch_tokens = (int)n) > 0;
    case ENGINE_MAX_WAITING:
        return whole(o, flag, 0, 1e6, &n) && (f->sim.max_waiting = (int)n) >= 0;
    case ENGINE_NO_PREFIX_CACHE:
        f->sim.prefix_cache = false;
        return true;
    case ENGINE_EVICTION:
        return engine_eviction(o, f);
    case ENGINE_SESSIONS:
        f->streaming_sessions = true;
        return true;
    case ENGINE_DP_SIZE:
        return whole(o, flag, 1, PL_FRONT_RANKS_MAX, &n) && (f->ranks_n = (int)n) > 0;
    case ENGINE_KV_EVENTS:
    case ENGINE_KV_FORMAT:
    case ENGINE_KV_BYTES:
    case ENGINE_KV_REPLAY:
    case ENGINE_KV_TOPIC:
    case ENGINE_KV_BUFFER:
    case ENGINE_KV_CONNECT:
        return engine_kv_flag(o, flag, &f->kv);
    case ENGINE_OUTPUT_TOKENS:
        return whole(o, flag, 1, 1e6, &n) && (f->default_output_tokens = (int)n) > 0;
    case ENGINE_SEED:
        if (!whole(o, flag, 0, 9e15, &n))
            return false;
        f->seed = (uint64_t)n;
        return true;
    case ENGINE_LOG_LEVEL: {
        pl_log_level level;
        if (!log_level(o, &level))
            return false;
        pl_log_init(level, -1);
        return true;
    }
    case PL_OPT_POSITIONAL:
        pl_fail(&o->error, PL_EINVALID, "'%s': this command takes flags only", o->value);
        return false;
    default:
        return false;
    }
}

static int engine(pl_opts *o)
{
    pl_errbuf eb = {""};
    pl_front_options f;
    pl_front_options_default(&f);
    f.listen = PL_STR("127.0.0.1:30000");
    int models_n = 0, code = EXIT_OK;
    pl_str *models = calloc((size_t)o->argc, sizeof *models);
    if (!models)
        return failed("engine", PL_ENOMEM, &eb);
    for (int flag; code == EXIT_OK && (flag = pl_opts_next(o)) != PL_OPT_END;) {
        if (flag == ENGINE_HELP) {
            free(models);
            return engine_help();
        }
        if (!engine_flag(o, flag, &f, models, &models_n))
            code = usage_error("engine", o->error.text);
    }
    if (code == EXIT_OK) {
        if (models_n) {
            f.models = models;
            f.models_n = models_n;
        }
        int rc = pl_front_run(&f, &eb);
        code = rc == 0 ? EXIT_OK : failed("engine", rc, &eb);
    }
    free(models);
    return code;
}

/* --- check --- */

enum { CHECK_SET, CHECK_JSON, CHECK_HELP };

static const pl_opt check_flags[] = {
    [CHECK_SET] = {"set", "KEY=VALUE", "a parameter of the policy; may be repeated"},
    [CHECK_JSON] = {"json", NULL, "print the result as JSON (text)"},
    [CHECK_HELP] = {"help", NULL, "print this"},
    {NULL, NULL, NULL},
};

static int check(pl_opts *o)
{
    pl_errbuf eb = {""};
    pl_str policy = {NULL, 0};
    pl_config c; /* for its parameters */
    bool json = false;
    int code = EXIT_OK, rc = pl_config_init(&c);
    if (rc != 0)
        return failed("check", rc, &eb);
    for (int flag; code == EXIT_OK && (flag = pl_opts_next(o)) != PL_OPT_END;) {
        if (flag == CHECK_HELP) {
            puts(
                "usage: perilune check POLICY [FLAGS]\n\n"
                "Loads a policy, runs its hooks over made-up fleets, and says which hooks it has,\n"
                "what is wrong, and whether the hot hooks are compiled.\n");
            pl_opts_print(check_flags, stdout);
            pl_config_free(&c);
            return EXIT_OK;
        }
        if (flag == PL_OPT_POSITIONAL && !policy.p)
            policy = pl_str_c(o->value);
        else if (flag == CHECK_JSON)
            json = true;
        else if (flag == PL_OPT_POSITIONAL)
            code = usage_error("check", "one policy at a time");
        else if (flag == PL_OPT_BAD || pl_config_set_param(&c, pl_str_c(o->value), &o->error) != 0)
            code = usage_error("check", o->error.text);
    }
    if (code == EXIT_OK && !policy.n)
        code = usage_error("check", "which policy? A file, or a ready-made one's name");
    if (code == EXIT_OK)
        code = pl_check(policy, c.policy_params, json, stdout) == 0 ? EXIT_OK : EXIT_FAILED;
    pl_config_free(&c);
    return code;
}

/* --- reload --- */

enum { RELOAD_ADMIN, RELOAD_TOKEN_ENV, RELOAD_SET, RELOAD_TIMEOUT, RELOAD_JSON, RELOAD_HELP };

static const pl_opt reload_flags[] = {
    [RELOAD_ADMIN] = {"admin", "HOST:PORT", "the router's admin API (127.0.0.1:8001)"},
    [RELOAD_TOKEN_ENV] = {"token-env", "NAME",
                          "environment variable with the admin API's token (no token)"},
    [RELOAD_SET] = {"set", "KEY=VALUE", "parameters, in place of those that run; may be repeated"},
    [RELOAD_TIMEOUT] = {"timeout-seconds", "N", "how long to wait for the answer (30)"},
    [RELOAD_JSON] = {"json", NULL, "print the router's answer as JSON (text)"},
    [RELOAD_HELP] = {"help", NULL, "print this"},
    {NULL, NULL, NULL},
};

static bool reload_flag(pl_opts *o, int flag, pl_reload_options *r, pl_config *c)
{
    double n;
    switch (flag) {
    case PL_OPT_POSITIONAL:
        if (r->policy.p) {
            pl_fail(&o->error, PL_EINVALID, "one policy at a time");
            return false;
        }
        r->policy = pl_str_c(o->value);
        return true;
    case RELOAD_ADMIN:
        r->admin = pl_str_c(o->value);
        return true;
    case RELOAD_TOKEN_ENV:
        return secret(o, flag, &r->token);
    case RELOAD_SET:
        r->params = c->policy_params;
        return pl_config_set_param(c, pl_str_c(o->value), &o->error) == 0;
    case RELOAD_TIMEOUT:
        if (!number(o, flag, 0.1, 3600, &n))
            return false;
        r->timeout_ms = (uint64_t)(n * 1000);
        return true;
    case RELOAD_JSON:
        r->json = true;
        return true;
    default:
        return false;
    }
}

static int reload(pl_opts *o)
{
    pl_errbuf eb = {""};
    pl_config c; /* for its parameters */
    pl_reload_options r = {
        .admin = PL_STR("127.0.0.1:8001"), .timeout_ms = 30000, .out = stdout, .err = stderr};
    int code = EXIT_OK, rc = pl_config_init(&c);
    if (rc != 0)
        return failed("reload", rc, &eb);
    for (int flag; code == EXIT_OK && (flag = pl_opts_next(o)) != PL_OPT_END;) {
        if (flag == RELOAD_HELP) {
            puts("usage: perilune reload [POLICY] [FLAGS]\n\n"
                 "Swaps a policy into a running router: the running one read again, or another.\n"
                 "Refused, with stage, file, line and reason, when anything is wrong with it.\n");
            pl_opts_print(reload_flags, stdout);
            pl_config_free(&c);
            return EXIT_OK;
        }
        if (!reload_flag(o, flag, &r, &c))
            code = usage_error("reload", o->error.text);
    }
    if (code == EXIT_OK) {
        rc = pl_reload_cli(&r, &eb);
        if (rc == PL_EPOLICY)
            code = EXIT_FAILED; /* it has been told */
        else if (rc != 0)
            code = failed("reload", rc, &eb);
    }
    pl_config_free(&c);
    return code;
}

/* --- perilune --- */

static const struct {
    const char *name;
    const pl_opt *flags;
    int (*run)(pl_opts *o);
} commands[] = {
    {"serve", serve_flags, serve},
    {"engine", engine_flags, engine},
    {"check", check_flags, check},
    {"reload", reload_flags, reload},
};

static const char help[] =
    "usage: perilune COMMAND [FLAGS]\n\n"
    "  serve [CONFIG.lua]   route inference requests to engines by a Lua policy\n"
    "  engine               a simulated inference server\n"
    "  check POLICY         what is wrong with a policy, and how fast it is\n"
    "  reload [POLICY]      swap a policy into a running router\n\n"
    "perilune COMMAND --help lists the flags; perilune --version.\n";

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN); /* a peer that left is an error code, not the end */
    const char *name = argc > 1 ? argv[1] : "";
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (strcmp(name, commands[i].name) == 0) {
            pl_opts o = {.table = commands[i].flags, .argv = argv, .argc = argc, .at = 2};
            return commands[i].run(&o);
        }
    if (strcmp(name, "--version") == 0) {
        puts("perilune " PERILUNE_VERSION);
        return EXIT_OK;
    }
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || strcmp(name, "help") == 0) {
        fputs(help, stdout);
        return EXIT_OK;
    }
    if (*name)
        fprintf(stderr, "perilune: unknown command '%s'\n", name);
    fputs(help, stderr);
    return EXIT_USAGE;
}
