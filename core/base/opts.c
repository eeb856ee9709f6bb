/* Command-line flags: see opts.h. Called by main.c on the main thread; borrows argv. */
#include "base/opts.h"

#include <string.h>

#include "base/nearest.h"

static int bad(pl_opts *o, pl_str name)
{
    pl_nearest guess = {name, {NULL, 0}, 0};
    for (const pl_opt *k = o->table; k->name; k++)
        pl_nearest_try(&guess, pl_str_c(k->name));
    if (guess.best.p)
        pl_fail(&o->error, PL_EINVALID, "unknown flag --%.*s, did you mean --%.*s?", PL_FMT(name),
                PL_FMT(guess.best));
    else
        pl_fail(&o->error, PL_EINVALID, "unknown flag --%.*s (--help lists them all)",
                PL_FMT(name));
    return PL_OPT_BAD;
}

static int flag(pl_opts *o, const char *arg)
{
    const char *equals = strchr(arg, '=');
    pl_str name = {arg, equals ? (size_t)(equals - arg) : strlen(arg)};
    for (int i = 0; o->table[i].name; i++) {
        const pl_opt *k = &o->table[i];
        if (!pl_str_eq(name, pl_str_c(k->name)))
            continue;
        o->value = equals ? equals + 1 : NULL;
        if (!k->value && equals) {
            pl_fail(&o->error, PL_EINVALID, "--%s takes no value", k->name);
            return PL_OPT_BAD;
        }
        if (k->value && !equals) {
            if (o->at >= o->argc) {
                pl_fail(&o->error, PL_EINVALID, "--%s needs a value: --%s %s", k->name, k->name,
                        k->value);
                return PL_OPT_BAD;
            }
            o->value = o->argv[o->at++];
        }
        return i;
    }
    return bad(o, name);
}

int pl_opts_next(pl_opts *o)
{
    o->value = NULL;
    if (o->at >= o->argc)
        return PL_OPT_END;
    const char *arg = o->argv[o->at++];
    if (!o->only_positional && strcmp(arg, "--") == 0) {
        o->only_positional = 1;
        return pl_opts_next(o);
    }
    if (o->only_positional || arg[0] != '-' || arg[1] == 0) {
        o->value = arg;
        return PL_OPT_POSITIONAL;
    }
    if (strcmp(arg, "-h") == 0)
        return flag(o, "help");
    if (arg[1] != '-') {
        pl_fail(&o->error, PL_EINVALID,
                "unknown flag %s (flags are long: --name; --help lists "
                "them all)",
                arg);
        return PL_OPT_BAD;
    }
    return flag(o, arg + 2);
}

void pl_opts_print(const pl_opt *table, FILE *out)
{
    for (const pl_opt *k = table; k->name; k++) {
        if (!k->help)
            continue;
        int n = fprintf(out, "  --%s%s%s", k->name, k->value ? " " : "", k->value ? k->value : "");
        fprintf(out, "%*s%s\n", n < 28 ? 28 - n : 2, "", k->help);
    }
}
