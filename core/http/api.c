/* The HTTP APIs as the router knows them: see api.h. Tables and small writers; no state, any
 * thread. */
#include "http/api.h"

#include <stdbool.h>

static const struct {
    pl_str path;
    enum pl_api_kind kind;
} paths[] = {
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
};

enum pl_api_kind pl_api_of_path(pl_str path, bool *known)
{
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        if (pl_str_eq(path, paths[i].path)) {
            *known = true;
            return paths[i].kind;
        }
    *known = false;
    return PL_API_OTHER;
}

const char *pl_api_control_hint(pl_str path)
{
    static const pl_str control[] = {
        PL_STR_INIT("/flush_cache"),
        PL_STR_INIT("/pause_generation"),
        PL_STR_INIT("/continue_generation"),
        PL_STR_INIT("/load_lora_adapter"),
        PL_STR_INIT("/unload_lora_adapter"),
        PL_STR_INIT("/v1/load_lora_adapter"),
        PL_STR_INIT("/v1/unload_lora_adapter"),
        PL_STR_INIT("/sleep"),
        PL_STR_INIT("/wake_up"),
        PL_STR_INIT("/is_sleeping"),
        PL_STR_INIT("/reset_prefix_cache"),
        PL_STR_INIT("/reset_mm_cache"),
        PL_STR_INIT("/collective_rpc"),
        PL_STR_INIT("/abort_request"),
        PL_STR_INIT("/abort_requests"),
        PL_STR_INIT("/server_info"),
        PL_STR_INIT("/get_server_info"),
        PL_STR_INIT("/model_info"),
        PL_STR_INIT("/get_model_info"),
        PL_STR_INIT("/get_load"),
        PL_STR_INIT("/v1/loads"),
        PL_STR_INIT("/load"),
        PL_STR_INIT("/start_profile"),
        PL_STR_INIT("/stop_profile"),
        PL_STR_INIT("/health_generate"),
        PL_STR_INIT("/version"),
    };
    static const pl_str sessions[] = {PL_STR_INIT("/open_session"), PL_STR_INIT("/close_session")};
    for (size_t i = 0; i < sizeof control / sizeof *control; i++)
        if (pl_str_eq(path, control[i]))
            return "this path controls one engine and is never forwarded; call the engine itself";
    if (pl_str_starts(path, PL_STR("/update_weights")) ||
        pl_str_starts(path, PL_STR("/init_weights")))
        return "this path controls one engine and is never forwarded; call the engine itself";
    for (size_t i = 0; i < 2; i++)
        if (pl_str_eq(path, sessions[i]))
            return "engine sessions are not offered by this version of the router";
    return NULL;
}

int pl_json_quote(pl_buf *out, pl_str s)
{
    static const char hex[] = "0123456789abcdef";
    int rc = pl_buf_add(out, "\"", 1);
    size_t from = 0, i = 0;
    while (i < s.n && rc == 0) {
        unsigned char c = (unsigned char)s.p[i];
        size_t good = 1;
        char esc[7];
        size_t esc_n = 0;
        if (c == '"' || c == '\\') {
            esc[esc_n++] = '\\';
            esc[esc_n++] = (char)c;
        } else if (c < 0x20 || c == 0x7f) {
            memcpy(esc, "\\u00", 4);
            esc[4] = hex[c >> 4];
            esc[5] = hex[c & 15];
            esc_n = 6;
        } else if (c >= 0x80) {
            good = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : 2;
            if (good > s.n - i || !pl_str_utf8((pl_str){s.p + i, good}, NULL)) {
                memcpy(esc, "\xef\xbf\xbd", 3);
                esc_n = 3;
                good = 1;
            }
        }
        if (esc_n) {
            rc = pl_buf_add(out, s.p + from, i - from);
            if (rc == 0)
                rc = pl_buf_add(out, esc, esc_n);
            from = i + good;
        }
        i += good;
    }
    if (rc == 0)
        rc = pl_buf_add(out, s.p + from, s.n - from);
    return rc == 0 ? pl_buf_add(out, "\"", 1) : rc;
}

static bool anthropic(pl_str path)
{
    return pl_str_eq(path, PL_STR("/v1/messages"));
}

int pl_api_overload_status(pl_str path)
{
    return anthropic(path) ? 529 : 503;
}

static const char *openai_type(int status)
{
    switch (status) {
    case 401:
        return "authentication_error";
    case 403:
        return "permission_error";
    case 429:
        return "rate_limit_error";
    default:
        return status >= 500 ? "server_error" : "invalid_request_error";
    }
}

static const char *anthropic_type(int status)
{
    switch (status) {
    case 401:
        return "authentication_error";
    case 403:
        return "permission_error";
    case 404:
        return "not_found_error";
    case 413:
        return "request_too_large";
    case 429:
        return "rate_limit_error";
    case 503:
    case 529:
        return "overloaded_error";
    default:
        return status >= 500 ? "api_error" : "invalid_request_error";
    }
}

int pl_api_error(pl_str path, int status, const char *code, const char *message, pl_buf *out)
{
    pl_str text = pl_str_c(message);
    int rc;
    if (anthropic(path)) {
        rc = pl_buf_addf(out, "{\"type\":\"error\",\"error\":{\"type\":\"%s\",\"message\":",
                         anthropic_type(status));
        if (rc == 0)
            rc = pl_json_quote(out, text);
        return rc == 0 ? pl_buf_addf(out, "}}") : rc;
    }
    rc = pl_buf_addf(out, "{\"error\":{\"message\":");
    if (rc == 0)
        rc = pl_json_quote(out, text);
    if (rc == 0)
        rc = pl_buf_addf(out, ",\"type\":\"%s\",\"param\":null,\"code\":", openai_type(status));
    if (rc == 0)
        rc = code ? pl_json_quote(out, pl_str_c(code)) : pl_buf_addf(out, "null");
    return rc == 0 ? pl_buf_addf(out, "}}") : rc;
}

int pl_api_error_event(pl_str path, int status, const char *code, const char *message, pl_buf *out)
{
    int rc =
        anthropic(path) ? pl_buf_addf(out, "event: error\ndata: ") : pl_buf_addf(out, "data: ");
    if (rc == 0)
        rc = pl_api_error(path, status, code, message, out);
    return rc == 0 ? pl_buf_addf(out, "\n\n") : rc;
}
