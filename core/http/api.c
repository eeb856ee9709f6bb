/* The HTTP APIs the router speaks: see api.h. Tables and formatting, no state; callable from any
 * thread. */
#include "http/api.h"

#include "base/err.h"

static const struct {
    pl_str path;
    enum pl_api_kind kind;
} forwarded[] = {
    {PL_STR_INIT("/v1/chat/completions"), PL_API_CHAT},
    {PL_STR_INIT("/v1/completions"), PL_API_COMPLETIONS},
    {PL_STR_INIT("/v1/responses"), PL_API_RESPONSES},
    {PL_STR_INIT("/v1/messages"), PL_API_MESSAGES},
    {PL_STR_INIT("/v1/embeddings"), PL_API_EMBEDDINGS},
    {PL_STR_INIT("/v1/rerank"), PL_API_RERANK},
    {PL_STR_INIT("/rerank"), PL_API_RERANK},
    {PL_STR_INIT("/v1/score"), PL_API_SCORE},
    {PL_STR_INIT("/v1/classify"), PL_API_CLASSIFY},
    {PL_STR_INIT("/generate"), PL_API_GENERATE},
    {PL_STR_INIT("/tokenize"), PL_API_TOKENIZE},
    {PL_STR_INIT("/v1/tokenize"), PL_API_TOKENIZE},
    {PL_STR_INIT("/detokenize"), PL_API_DETOKENIZE},
    {PL_STR_INIT("/v1/detokenize"), PL_API_DETOKENIZE},
    {PL_STR_INIT("/open_session"), PL_API_OPEN_SESSION},
    {PL_STR_INIT("/close_session"), PL_API_CLOSE_SESSION},
};

enum pl_api_kind pl_api_of_path(pl_str path, bool *known)
{
    for (size_t i = 0; i < sizeof forwarded / sizeof forwarded[0]; i++)
        if (pl_str_eq(path, forwarded[i].path)) {
            *known = true;
            return forwarded[i].kind;
        }
    *known = false;
    return PL_API_OTHER;
}

/* --- control paths --- */

#define DIRECT " is not forwarded by the router; call the engine directly"

static const struct {
    const char *path; /* with a trailing '*': every path that begins so */
    const char *hint;
} control[] = {
    {"/flush_cache", "flushing an engine's cache" DIRECT},
    {"/reset_prefix_cache", "resetting an engine's prefix cache" DIRECT},
    {"/reset_mm_cache", "resetting an engine's multimodal cache" DIRECT},
    {"/reset_encoder_cache", "resetting an engine's encoder cache" DIRECT},
    {"/pause_generation", "pausing an engine" DIRECT},
    {"/continue_generation", "resuming an engine" DIRECT},
    {"/pause", "pausing an engine" DIRECT},
    {"/resume", "resuming an engine" DIRECT},
    {"/is_paused", "an engine's own state" DIRECT},
    {"/sleep", "putting an engine to sleep" DIRECT},
    {"/wake_up", "waking an engine up" DIRECT},
    {"/is_sleeping", "an engine's own state" DIRECT},
    {"/release_memory_occupation", "releasing an engine's memory" DIRECT},
    {"/resume_memory_occupation", "resuming an engine's memory" DIRECT},
    {"/load_lora_adapter", "loading LoRA adapters" DIRECT},
    {"/unload_lora_adapter", "unloading LoRA adapters" DIRECT},
    {"/v1/load_lora_adapter", "loading LoRA adapters" DIRECT},
    {"/v1/unload_lora_adapter", "unloading LoRA adapters" DIRECT},
    {"/abort_request",
     "aborting by id" DIRECT " (closing the connection to the router aborts its request)"},
    {"/abort_requests",
     "aborting by id" DIRECT " (closing the connection to the router aborts its request)"},
    {"/update_weights*", "updating weights" DIRECT},
    {"/init_weights_update_group", "updating weights" DIRECT},
    {"/destroy_weights_update_group", "updating weights" DIRECT},
    {"/get_weights_by_name", "reading weights" DIRECT},
    {"/collective_rpc", "calling an engine's processes" DIRECT},
    {"/start_profile", "profiling an engine" DIRECT},
    {"/stop_profile", "profiling an engine" DIRECT},
    {"/scale_elastic_ep", "scaling an engine" DIRECT},
    {"/is_scaling_elastic_ep", "an engine's own state" DIRECT},
    {"/set_internal_state", "changing an engine's settings" DIRECT},
    {"/configure_logging", "changing an engine's settings" DIRECT},
    {"/clear_hicache_storage_backend", "clearing an engine's cache" DIRECT},
    {"/server_info", "an engine's own description" DIRECT},
    {"/get_server_info", "an engine's own description" DIRECT},
    {"/model_info", "an engine's own description" DIRECT},
    {"/get_model_info", "an engine's own description" DIRECT},
    {"/tokenizer_info", "an engine's own description" DIRECT},
    {"/version", "an engine's version" DIRECT},
    {"/health_generate",
     "an engine's own health" DIRECT "; the router's is at /health and /readyz"},
    {"/get_load", "an engine's own load" DIRECT},
    {"/load", "an engine's own load" DIRECT},
    {"/v1/loads", "an engine's own load" DIRECT},
};

const char *pl_api_control_hint(pl_str path)
{
    for (size_t i = 0; i < sizeof control / sizeof control[0]; i++) {
        pl_str p = pl_str_c(control[i].path);
        bool hit =
            p.p[p.n - 1] == '*' ? pl_str_starts(path, (pl_str){p.p, p.n - 1}) : pl_str_eq(path, p);
        if (hit)
            return control[i].hint;
    }
    return NULL;
}

/* --- errors --- */

static bool is_messages(pl_str path)
{
    return pl_str_eq(path, PL_STR("/v1/messages")) || pl_str_starts(path, PL_STR("/v1/messages/"));
}

int pl_api_overload_status(pl_str path)
{
    return is_messages(path) ? 529 : 503;
}

/* OpenAI's service answers a bad key and an unknown model with invalid_request_error, too, and
 * tells them apart by status and code; its clients pick their exception by the status. */
static const char *openai_type(int status)
{
    if (status == 429)
        return "rate_limit_error";
    return status >= 500 ? "server_error" : "invalid_request_error";
}

static const char *anthropic_type(int status)
{
    switch (status) {
    case 401:
        return "authentication_error";
    case 402:
        return "billing_error";
    case 403:
        return "permission_error";
    case 404:
        return "not_found_error";
    case 409:
        return "conflict_error";
    case 413:
        return "request_too_large";
    case 429:
        return "rate_limit_error";
    case 504:
        return "timeout_error";
    case 503:
    case 529:
        return "overloaded_error";
    default:
        return status >= 500 ? "api_error" : "invalid_request_error";
    }
}

static int anthropic(int status, const char *message, pl_buf *out)
{
    int rc = pl_buf_addf(
        out, "{\"type\":\"error\",\"error\":{\"type\":\"%s\",\"message\":", anthropic_type(status));
    if (rc == 0)
        rc = pl_json_quote(out, pl_str_c(message));
    return rc ? rc : pl_buf_add(out, "}}", 2);
}

static int openai(int status, const char *code, const char *message, pl_buf *out)
{
    int rc = pl_buf_addf(out, "{\"error\":{\"message\":");
    if (rc == 0)
        rc = pl_json_quote(out, pl_str_c(message));
    if (rc == 0)
        rc = pl_buf_addf(out, ",\"type\":\"%s\",\"param\":null,\"code\":", openai_type(status));
    if (rc == 0)
        rc = code ? pl_json_quote(out, pl_str_c(code)) : pl_buf_add(out, "null", 4);
    return rc ? rc : pl_buf_add(out, "}}", 2);
}

int pl_api_error(pl_str path, int status, const char *code, const char *message, pl_buf *out)
{
    size_t before = out->n;
    int rc =
        is_messages(path) ? anthropic(status, message, out) : openai(status, code, message, out);
    if (rc)
        out->n = before;
    return rc;
}

int pl_api_error_event(pl_str path, int status, const char *code, const char *message, pl_buf *out)
{
    size_t before = out->n;
    int rc = pl_buf_addf(out, "%sdata: ", is_messages(path) ? "event: error\n" : "");
    if (rc == 0)
        rc = pl_api_error(path, status, code, message, out);
    if (rc == 0)
        rc = pl_buf_add(out, "\n\n", 2);
    if (rc)
        out->n = before;
    return rc;
}

/* --- strings --- */

/* Adds valid UTF-8. */
static int quote_part(pl_buf *out, pl_str s)
{
    static const char hex[] = "0123456789abcdef";
    int rc = 0;
    size_t done = 0;
    for (size_t i = 0; i < s.n && rc == 0; i++) {
        unsigned char c = (unsigned char)s.p[i];
        if (c >= 0x20 && c != '"' && c != '\\')
            continue;
        char esc[6] = {'\\', (char)c, '0', '0', hex[c >> 4], hex[c & 15]};
        size_t n = 2;
        switch (c) {
        case '"':
        case '\\':
            break;
        case '\n':
            esc[1] = 'n';
            break;
        case '\r':
            esc[1] = 'r';
            break;
        case '\t':
            esc[1] = 't';
            break;
        default:
            esc[1] = 'u';
            n = 6;
        }
        rc = pl_buf_add(out, s.p + done, i - done);
        if (rc == 0)
            rc = pl_buf_add(out, esc, n);
        done = i + 1;
    }
    return rc ? rc : pl_buf_add(out, s.p + done, s.n - done);
}

int pl_json_quote(pl_buf *out, pl_str s)
{
    size_t before = out->n, bad;
    int rc = pl_buf_add(out, "\"", 1);
    while (rc == 0 && !pl_str_utf8(s, &bad)) {
        rc = quote_part(out, (pl_str){s.p, bad});
        if (rc == 0)
            rc = pl_buf_add(out, "\xef\xbf\xbd", 3);
        s.p += bad + 1;
        s.n -= bad + 1;
    }
    if (rc == 0 && s.n)
        rc = quote_part(out, s);
    if (rc == 0)
        rc = pl_buf_add(out, "\"", 1);
    if (rc)
        out->n = before;
    return rc;
}

pl_str pl_json_quoted(pl_arena *a, pl_str s)
{
    pl_buf b = {0};
    pl_str quoted = {NULL, 0};
    if (pl_json_quote(&b, s) == 0)
        quoted = pl_arena_str(a, pl_buf_str(&b));
    pl_buf_free(&b);
    return quoted;
}
