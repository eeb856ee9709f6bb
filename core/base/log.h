/* Logging: one line each on stderr, text on a terminal, JSON otherwise. Thread-safe (one write per
 * line). Never pass a secret, a prompt or an Authorization value. */
#ifndef PL_LOG_H
#define PL_LOG_H

#include <stdbool.h>

typedef enum pl_log_level { PL_LOG_DEBUG, PL_LOG_INFO, PL_LOG_WARN, PL_LOG_ERROR } pl_log_level;

/* Lines below `level` are dropped. json: -1 decides by isatty(stderr), 0 text, 1 JSON. */
void pl_log_init(pl_log_level level, int json);

/* `event` is a short stable snake_case name that tools match on; the rest is for people. */
void pl_log(pl_log_level level, const char *event, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* debug | info | warn | error; negative pl_err when unknown. */
int pl_log_level_parse(const char *name);

/* For messages that a flood of bad input could repeat: true at most `per_second` times a second for
 * each `state`, which the caller keeps static or per object. Counts what it dropped in state[1]. */
bool pl_log_allow(unsigned long state[2], unsigned per_second);

#endif
