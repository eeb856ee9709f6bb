/* What the router knows of the HTTP APIs: which paths are forwarded, and in what shape errors are
 * told. */
#ifndef PL_API_H
#define PL_API_H

#include "base/arena.h"
#include "base/buf.h"
#include "base/str.h"
#include "policy_abi.h"

/* The API of a POST path (exact match, no trailing slash); PL_API_OTHER with *known false when it
 * is not one. */
enum pl_api_kind pl_api_of_path(pl_str path, bool *known);

/* For paths that engines have but the router never forwards: a hint for people, else NULL. */
const char *pl_api_control_hint(pl_str path);

/* An error body in the shape of the API behind `path`: OpenAI's
 * {"error":{"message","type","param","code"}} or, for /v1/messages, Anthropic's
 * {"type":"error","error":{"type","message"}}. `code` may be NULL. */
int pl_api_error(pl_str path, int status, const char *code, const char *message, pl_buf *out);

/* The same as one SSE event ("event: error" for Anthropic), with its blank line. */
int pl_api_error_event(pl_str path, int status, const char *code, const char *message, pl_buf *out);

/* JSON string escaping into out, with quotes. Invalid UTF-8 becomes U+FFFD. */
int pl_json_quote(pl_buf *out, pl_str s);
/* The same as a string of the arena's; {NULL,0} when out of memory. */
pl_str pl_json_quoted(pl_arena *a, pl_str s);

/* 503, or Anthropic's 529 on /v1/messages: overload. */
int pl_api_overload_status(pl_str path);

#endif
