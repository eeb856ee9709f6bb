/* KV events that come as JSON, into the msgpack batch that event.h reads. The shapes are described
 * in feed.h. Pure; any thread. */
#ifndef PL_EVENT_JSON_H
#define PL_EVENT_JSON_H

#include "base/buf.h"
#include "base/err.h"
#include "base/str.h"

/* Appends the batch to out (whose contents are undefined after a failure). PL_ESYNTAX with the
 * place of the error, PL_EPROTOCOL when it is JSON but neither an object nor an array, PL_ELIMIT
 * when it is nested too deep, PL_ENOMEM. */
int pl_event_from_json(pl_str json, pl_buf *out, pl_errbuf *eb) __attribute__((warn_unused_result));

#endif
