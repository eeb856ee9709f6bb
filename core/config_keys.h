/* The tables of configuration keys, between config.c and config_keys.c. */
#ifndef PL_CONFIG_KEYS_H
#define PL_CONFIG_KEYS_H

#include "config.h"
#include "config_schema.h"

extern const pl_key pl_config_keys[]; /* of pl_config */

/* Appends; the spec's strings are the arena's already. */
int pl_config_push_engine(pl_config *c, const pl_engine_spec *spec, pl_errbuf *eb);

/* A secret from a file that holds nothing else. */
int pl_config_secret_file(const pl_reader_ctx *rd, const json_t *value, const char *path,
                          pl_str *out);

/* Keys under `sessions`, config_sessions.c. */
extern const pl_key pl_config_session_keys[], pl_config_session_header_keys[];
int pl_config_read_sessions(const pl_reader_ctx *rd, const json_t *value, const char *path,
                            void *base);

#endif
