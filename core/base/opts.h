/* Command-line flags by a table: the same table parses them, prints --help and names the nearest
 * flag when one is unknown. Every flag is long (--name VALUE or --name=VALUE); -h is --help. */
#ifndef PL_OPTS_H
#define PL_OPTS_H

#include <stdio.h>

#include "base/err.h"

typedef struct pl_opt {
    const char *name;  /* without the dashes; NULL ends the table */
    const char *value; /* its placeholder in the help; NULL: takes none */
    const char *help;  /* one line; with the default in parentheses. NULL: a silent synonym */
} pl_opt;

enum { PL_OPT_END = -1, PL_OPT_POSITIONAL = -2, PL_OPT_BAD = -3 };

typedef struct pl_opts {
    const pl_opt *table;
    char **argv;
    int argc, at;      /* at: the next argument to look at; start after the command's name */
    const char *value; /* of the last flag, or the positional argument */
    int only_positional;
    pl_errbuf error; /* with PL_OPT_BAD */
} pl_opts;

/* The next flag's place in the table, or one of the numbers above. */
int pl_opts_next(pl_opts *o);

/* One line for each flag, values aligned. */
void pl_opts_print(const pl_opt *table, FILE *out);

#endif
