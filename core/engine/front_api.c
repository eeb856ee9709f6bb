/* Answers of the simulated engine, whole and streamed, in the shapes of the APIs. Called by front.c
 * on the front's thread. Whole answers are built as JSON values; events of a stream are composed
 * from text that is made once per call, since they are what benchmarks drive. Output text is made
 * of plain words (pl_sim_output_token), so it needs no escaping. */
#include "engine/front_call.h"

#include <math.h>
#include <string.h>

#include "base/err.h"

/* --- parts --- */

static int add_text(pl_buf *out, const pl_part *p, int n)
{
    int rc = pl_buf_reserve(out, (size_t)n * 4);
    for (int i = 0; i < n && rc == 0; i++) {
        uint32_t id = pl_sim_output_token(p->seed, i);
        char word[4] = {(char)id, (char)(id >> 8), (char)(id >> 16), (char)(id >> 24)};
        rc = pl_buf_add(out, word, 4);
    }
    return rc;
}

static json_t *text_of(const pl_part *p)
{
    pl_buf b = {0};
    json_t *v = add_text(&b, p, p->ready) == 0 ? json_stringn(b.n ? b.p : "", b.n) : NULL;
    pl_buf_free(&b);
    return v;
}

static const char *reason_of(const pl_front_call *c)
{
    if (c->aborted)
        return "abort";
    return c->limited ? "length" : "stop";
}

static const char *stop_reason_of(const pl_front_call *c)
{
    return c->limited ? "max_tokens" : "end_turn";
}

typedef struct totals {
    int prompt, cached, output;
} totals;

/* Choices of one prompt share it: it is counted once, as it was found the first time. */
static totals sum(const pl_front_call *c)
{
    totals t = {0};
    for (int i = 0; i < c->parts_n; i++) {
        if (i % c->choices == 0) {
            t.prompt += c->parts[i].prompt;
            t.cached += c->parts[i].cached;
        }
        t.output += c->parts[i].ready;
    }
    return t;
}

static json_t *usage_of(const pl_front_call *c)
{
    totals t = sum(c);
    return json_pack("{s:i,s:i,s:i,s:{s:i}}", "prompt_tokens", t.prompt, "completion_tokens",
                     t.output, "total_tokens", t.prompt + t.output, "prompt_tokens_details",
                     "cached_tokens", t.cached);
}

static json_t *anthropic_usage(const pl_front_call *c, int output)
{
    totals t = sum(c);
    return json_pack("{s:i,s:i,s:i,s:i}", "input_tokens", t.prompt - t.cached,
                     "cache_creation_input_tokens", 0, "cache_read_input_tokens", t.cached,
                     "output_tokens", output);
}

/* A number in [0, 1) that only the prompt decides. */
static double grade(const pl_part *p, int k)
{
    pl_rng r = {p->seed + (uint64_t)k * 0x632be59bd9b4e019u};
    return pl_rng_unit(&r);
}

static pl_str id_with(pl_front_call *c, const char *prefix)
{
    pl_str id = pl_arena_printf(&c->x->arena, "%s%.*s", prefix, PL_FMT(c->id));
    return id.p ? id : c->id;
}

static json_t *str(pl_str s)
{
    return pl_front_string(s);
}

/* --- whole answers --- */

static json_t *chat_answer(pl_front_call *c)
{
    json_t *choices = json_array();
    bool chat = c->api == PL_API_CHAT;
    for (int i = 0; i < c->parts_n; i++) {
        json_t *v = chat ? json_pack("{s:i,s:{s:s,s:o,s:n},s:n,s:s}", "index", i, "message", "role",
                                     "assistant", "content", text_of(&c->parts[i]), "tool_calls",
                                     "logprobs", "finish_reason", reason_of(c))
                         : json_pack("{s:i,s:o,s:n,s:s}", "index", i, "text", text_of(&c->parts[i]),
                                     "logprobs", "finish_reason", reason_of(c));
        json_array_append_new(choices, v);
    }
    return json_pack("{s:o,s:s,s:I,s:o,s:o,s:o}", "id",
                     str(c->front->vllm ? id_with(c, chat ? "chatcmpl-" : "cmpl-") : c->id),
                     "object", chat ? "chat.completion" : "text_completion", "created",
                     (json_int_t)c->created, "model", str(c->model), "choices", choices, "usage",
                     usage_of(c));
}

static json_t *messages_answer(pl_front_call *c)
{
    return json_pack("{s:o,s:s,s:s,s:o,s:[{s:s,s:o}],s:s,s:n,s:o}", "id", str(id_with(c, "msg_")),
                     "type", "message", "role", "assistant", "model", str(c->model), "content",
                     "type", "text", "text", text_of(&c->parts[0]), "stop_reason",
                     stop_reason_of(c), "stop_sequence", "usage",
                     anthropic_usage(c, c->parts[0].ready));
}

static json_t *response_message(pl_front_call *c, bool over)
{
    json_t *content = over ? json_pack("[{s:s,s:o,s:[],s:[]}]", "type", "output_text", "text",
                                       text_of(&c->parts[0]), "annotations", "logprobs")
                           : json_array();
    return json_pack("{s:s,s:o,s:s,s:s,s:o}", "type", "message", "id", str(id_with(c, "msg_")),
                     "status", over ? "completed" : "in_progress", "role", "assistant", "content",
                     content);
}

static json_t *response(pl_front_call *c, bool over)
{
    totals t = sum(c);
    bool cut = over && c->limited;
    json_t *v = json_pack(
        "{s:o,s:s,s:I,s:s,s:n,s:n,s:n,s:n,s:o,s:b,s:n,s:n,s:{s:{s:s}},s:s,s:[],s:s,s:{},s:b,s:n}",
        "id", str(id_with(c, "resp_")), "object", "response", "created_at", (json_int_t)c->created,
        "status",
        !over ? "in_progress"
        : cut ? "incomplete"
              : "completed",
        "error", "incomplete_details", "instructions", "max_output_tokens", "model", str(c->model),
        "parallel_tool_calls", 1, "previous_response_id", "reasoning", "text", "format", "type",
        "text", "tool_choice", "auto", "tools", "truncation", "disabled", "metadata", "store", 0,
        "user");
    json_object_set_new(v, "output",
                        over ? json_pack("[o]", response_message(c, true)) : json_array());
    json_object_set_new(v, "usage",
                        over ? json_pack("{s:i,s:{s:i},s:i,s:{s:i},s:i}", "input_tokens", t.prompt,
                                         "input_tokens_details", "cached_tokens", t.cached,
                                         "output_tokens", t.output, "output_tokens_details",
                                         "reasoning_tokens", 0, "total_tokens", t.prompt + t.output)
                             : json_null());
    if (cut)
        json_object_set_new(v, "incomplete_details",
                            json_pack("{s:s}", "reason", "max_output_tokens"));
    return v;
}

/* SGLang's own form: the text so far, its ids, what is known. */
static json_t *generated(pl_part *p, int n, bool over)
{
    pl_front_call *c = p->call;
    pl_buf text = {0};
    json_t *ids = json_array(), *reason = json_null();
    int rc = add_text(&text, p, n);
    for (int i = 0; i < n; i++)
        json_array_append_new(ids, json_integer((json_int_t)pl_sim_output_token(p->seed, i)));
    if (over && c->aborted)
        reason = json_pack("{s:s,s:s}", "type", "abort", "message", "Aborted");
    else if (over && c->limited)
        reason = json_pack("{s:s,s:i}", "type", "length", "length", p->want);
    else if (over)
        reason = json_pack("{s:s,s:n}", "type", "stop", "matched");
    json_t *v =
        json_pack("{s:o,s:o,s:{s:o,s:o,s:i,s:i,s:i,s:f}}", "text",
                  rc == 0 ? json_stringn(text.n ? text.p : "", text.n) : NULL, "output_ids", ids,
                  "meta_info", "id", str(c->id), "finish_reason", reason, "prompt_tokens",
                  p->prompt, "completion_tokens", n, "cached_tokens", p->cached, "e2e_latency",
                  (double)(pl_front_now_us(c->front) - c->arrived_us) * 1e-6);
    if (c->stream && c->batch)
        json_object_set_new(v, "index", json_integer(p->index));
    pl_buf_free(&text);
    return v;
}

static json_t *generate_answer(pl_front_call *c)
{
    if (!c->batch)
        return generated(&c->parts[0], c->parts[0].ready, true);
    json_t *list = json_array();
    for (int i = 0; i < c->parts_n; i++)
        json_array_append_new(list, generated(&c->parts[i], c->parts[i].ready, true));
    return list;
}

static json_t *base64_floats(const float *v, int n)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const unsigned char *b = (const unsigned char *)v;
    size_t size = (size_t)n * sizeof *v, at = 0;
    char *out = malloc((size + 2) / 3 * 4 + 1);
    if (!out)
        return NULL;
    for (size_t i = 0; i < size; i += 3) {
        unsigned have = size - i < 3 ? (unsigned)(size - i) : 3;
        unsigned bits = (unsigned)b[i] << 16 | (have > 1 ? (unsigned)b[i + 1] << 8 : 0u) |
                        (have > 2 ? (unsigned)b[i + 2] : 0u);
        for (unsigned k = 0; k < 4; k++)
            out[at++] = k <= have ? digits[bits >> (18 - 6 * k) & 63] : '=';
    }
    json_t *s = json_stringn(out, at);
    free(out);
    return s;
}

static json_t *embedding(const pl_front_call *c, const pl_part *p)
{
    float *v = malloc((size_t)c->dimensions * sizeof *v);
    if (!v)
        return NULL;
    double squares = 0;
    for (int k = 0; k < c->dimensions; k++) {
        v[k] = (float)(grade(p, k) * 2 - 1);
        squares += (double)v[k] * (double)v[k];
    }
    for (int k = 0; k < c->dimensions && squares > 0; k++)
        v[k] = (float)((double)v[k] / sqrt(squares));
    json_t *out = c->base64 ? base64_floats(v, c->dimensions) : json_array();
    for (int k = 0; k < c->dimensions && !c->base64; k++)
        json_array_append_new(out, json_real((double)v[k]));
    free(v);
    return out;
}

static json_t *list_answer(pl_front_call *c)
{
    json_t *data = json_array();
    for (int i = 0; i < c->parts_n; i++) {
        const pl_part *p = &c->parts[i];
        double g = grade(p, 0);
        if (c->api == PL_API_EMBEDDINGS)
            json_array_append_new(data, json_pack("{s:s,s:i,s:o}", "object", "embedding", "index",
                                                  i, "embedding", embedding(c, p)));
        else if (c->api == PL_API_SCORE)
            json_array_append_new(
                data, json_pack("{s:i,s:s,s:f}", "index", i, "object", "score", "score", g));
        else
            json_array_append_new(data, json_pack("{s:i,s:s,s:[f,f],s:i}", "index", i, "label",
                                                  g < 0.5 ? "LABEL_0" : "LABEL_1", "probs", 1 - g,
                                                  g, "num_classes", 2));
    }
    const char *prefix = c->api == PL_API_EMBEDDINGS ? "embd-"
                         : c->api == PL_API_SCORE    ? "score-"
                                                     : "classify-";
    return json_pack("{s:o,s:s,s:I,s:o,s:o,s:o}", "id", str(id_with(c, prefix)), "object", "list",
                     "created", (json_int_t)c->created, "model", str(c->model), "data", data,
                     "usage", usage_of(c));
}

static json_t *items_answer(pl_front_call *c)
{
    json_t *scores = json_array();
    for (int i = 0; i < c->parts_n; i++) {
        double g = grade(&c->parts[i], 0);
        json_array_append_new(scores, json_pack("[f,f]", g, 1 - g));
    }
    return json_pack("{s:o,s:o,s:o,s:s}", "scores", scores, "model", str(c->model), "usage",
                     usage_of(c), "object", "scoring");
}

/* Best first: a bare list as SGLang gives it, or vLLM's object. */
static json_t *rerank_answer(pl_front_call *c)
{
    int *order = malloc((size_t)c->parts_n * sizeof *order);
    json_t *list = json_array();
    for (int i = 0; order && i < c->parts_n; i++) {
        int at = i;
        for (; at > 0 && grade(&c->parts[order[at - 1]], 0) < grade(&c->parts[i], 0); at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
    for (int i = 0; order && i < c->parts_n; i++) {
        int k = order[i];
        json_t *d =
            json_is_array(c->documents) ? json_array_get(c->documents, (size_t)k) : c->documents;
        json_t *text = json_is_object(d) ? json_object_get(d, "text") : d;
        json_array_append_new(
            list, c->front->vllm ? json_pack("{s:i,s:{s:O},s:f}", "index", k, "document", "text",
                                             text, "relevance_score", grade(&c->parts[k], 0))
                                 : json_pack("{s:f,s:O,s:i,s:{s:i}}", "score",
                                             grade(&c->parts[k], 0), "document", text, "index", k,
                                             "meta_info", "prompt_tokens", c->parts[k].prompt));
    }
    bool ok = order != NULL;
    free(order);
    if (!ok) {
        json_decref(list);
        return NULL;
    }
    if (!c->front->vllm)
        return list;
    return json_pack("{s:o,s:o,s:{s:i},s:o}", "id", str(id_with(c, "rerank-")), "model",
                     str(c->model), "usage", "total_tokens", sum(c).prompt, "results", list);
}

static int dump(json_t *v, pl_buf *out)
{
    char *text = v ? json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
    json_decref(v);
    int rc = text ? pl_buf_add(out, text, strlen(text)) : PL_ENOMEM;
    free(text);
    return rc;
}

int pl_front_call_answer(pl_front_call *c)
{
    json_t *v;
    switch (c->api) {
    case PL_API_CHAT:
    case PL_API_COMPLETIONS:
        v = chat_answer(c);
        break;
    case PL_API_MESSAGES:
        v = messages_answer(c);
        break;
    case PL_API_RESPONSES:
        v = response(c, true);
        break;
    case PL_API_GENERATE:
        v = generate_answer(c);
        break;
    case PL_API_RERANK:
        v = rerank_answer(c);
        break;
    case PL_API_SCORE:
        v = c->items ? items_answer(c) : list_answer(c);
        break;
    default:
        v = list_answer(c);
    }
    c->front->out.n = 0;
    return dump(v, &c->front->out);
}

/* --- streams --- */

/* event: <type> and data, as the Responses and Messages APIs have it. */
static int event(pl_front_call *c, pl_buf *out, const char *type, json_t *v)
{
    if (!v)
        return PL_ENOMEM;
    json_object_set_new(v, "type", json_string(type));
    if (c->api == PL_API_RESPONSES)
        json_object_set_new(v, "sequence_number", json_integer(c->sequence++));
    int rc = pl_buf_addf(out, "event: %s\ndata: ", type);
    if (rc != 0) {
        json_decref(v);
        return rc;
    }
    rc = dump(v, out);
    return rc ? rc : pl_buf_add(out, "\n\n", 2);
}

/* The start of an OpenAI chunk, up to its choices. */
static int chunk_head(const pl_front_call *c, pl_buf *out)
{
    return pl_buf_addf(out, "data: {\"id\":%.*s,\"object\":\"%s\",\"created\":%lld,\"model\":%.*s,",
                       PL_FMT(c->qid),
                       c->api == PL_API_CHAT ? "chat.completion.chunk" : "text_completion",
                       (long long)c->created, PL_FMT(c->qmodel));
}

/* What stands around each token's text, made once. */
static int around(pl_part *p)
{
    pl_front_call *c = p->call;
    pl_arena *a = &c->x->arena;
    bool chat = c->api == PL_API_CHAT;
    if (c->api == PL_API_CHAT || c->api == PL_API_COMPLETIONS) {
        pl_buf head = {0};
        int rc = chunk_head(c, &head);
        if (rc == 0)
            p->before =
                pl_arena_printf(a, "%.*s\"choices\":[{\"index\":%d,%s", (int)head.n, head.p,
                                p->index, chat ? "\"delta\":{\"content\":\"" : "\"text\":\"");
        pl_buf_free(&head);
        p->after = chat ? PL_STR("\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n")
                        : PL_STR("\",\"logprobs\":null,\"finish_reason\":null}]}\n\n");
    } else if (c->api == PL_API_MESSAGES) {
        p->before = PL_STR("event: content_block_delta\ndata: {\"type\":\"content_block_delta\","
                           "\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"");
        p->after = PL_STR("\"}}\n\n");
    } else {
        return 0; /* each event differs: pl_front_call_stream_token */
    }
    return p->before.p ? 0 : PL_ENOMEM;
}

int pl_front_call_stream_begin(pl_front_call *c, pl_buf *out)
{
    const char *prefix = "";
    if (c->front->vllm && c->api == PL_API_CHAT)
        prefix = "chatcmpl-";
    if (c->front->vllm && c->api == PL_API_COMPLETIONS)
        prefix = "cmpl-";
    c->qid = pl_front_quote(&c->x->arena, id_with(c, prefix));
    c->qmodel = pl_front_quote(&c->x->arena, c->model);
    int rc = c->qid.p && c->qmodel.p ? 0 : PL_ENOMEM;
    for (int i = 0; i < c->parts_n && rc == 0; i++) {
        rc = around(&c->parts[i]);
        if (rc != 0 || c->api != PL_API_CHAT)
            continue;
        rc = chunk_head(c, out);
        if (rc == 0)
            rc = pl_buf_addf(out,
                             "\"choices\":[{\"index\":%d,\"delta\":{\"role\":\"assistant\","
                             "\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n",
                             i);
    }
    if (rc == 0 && c->api == PL_API_MESSAGES) {
        rc = event(c, out, "message_start",
                   json_pack("{s:{s:o,s:s,s:s,s:o,s:[],s:n,s:n,s:o}}", "message", "id",
                             str(id_with(c, "msg_")), "type", "message", "role", "assistant",
                             "model", str(c->model), "content", "stop_reason", "stop_sequence",
                             "usage", anthropic_usage(c, 0)));
        if (rc == 0)
            rc = event(c, out, "content_block_start",
                       json_pack("{s:i,s:{s:s,s:s}}", "index", 0, "content_block", "type", "text",
                                 "text", ""));
    }
    if (rc == 0 && c->api == PL_API_RESPONSES) {
        rc = event(c, out, "response.created", json_pack("{s:o}", "response", response(c, false)));
        if (rc == 0)
            rc = event(c, out, "response.in_progress",
                       json_pack("{s:o}", "response", response(c, false)));
        if (rc == 0)
            rc = event(
                c, out, "response.output_item.added",
                json_pack("{s:i,s:o}", "output_index", 0, "item", response_message(c, false)));
        if (rc == 0)
            rc = event(c, out, "response.content_part.added",
                       json_pack("{s:o,s:i,s:i,s:{s:s,s:s,s:[],s:[]}}", "item_id",
                                 str(id_with(c, "msg_")), "output_index", 0, "content_index", 0,
                                 "part", "type", "output_text", "text", "", "annotations",
                                 "logprobs"));
    }
    return rc;
}

int pl_front_call_stream_token(pl_part *p, int i, pl_buf *out)
{
    pl_front_call *c = p->call;
    if (c->api == PL_API_GENERATE) {
        bool last = i + 1 == p->want && p->done;
        int rc = pl_buf_add(out, "data: ", 6);
        if (rc == 0)
            rc = dump(generated(p, i + 1, last), out);
        if (rc == 0 && last)
            p->told = true;
        return rc ? rc : pl_buf_add(out, "\n\n", 2);
    }
    uint32_t id = pl_sim_output_token(p->seed, i);
    return pl_buf_addf(
        out,
        "event: response.output_text.delta\ndata: {\"type\":"
        "\"response.output_text.delta\",\"sequence_number\":%d,\"item_id\":\"msg_%.*s"
        ",\"output_index\":0,\"content_index\":0,\"logprobs\":[],\"delta\":"
        "\"%c%c%c%c\"}\n\n",
        c->sequence++, (int)c->qid.n - 1, c->qid.p + 1, (int)(id & 0xff), (int)(id >> 8 & 0xff),
        (int)(id >> 16 & 0xff), (int)(id >> 24));
}

int pl_front_call_stream_part_end(pl_part *p, pl_buf *out)
{
    pl_front_call *c = p->call;
    int rc = 0;
    if (c->api == PL_API_CHAT || c->api == PL_API_COMPLETIONS) {
        rc = chunk_head(c, out);
        if (rc == 0)
            rc = pl_buf_addf(out,
                             "\"choices\":[{\"index\":%d,%s,\"logprobs\":null,"
                             "\"finish_reason\":\"%s\"}]}\n\n",
                             p->index, c->api == PL_API_CHAT ? "\"delta\":{}" : "\"text\":\"\"",
                             reason_of(c));
    } else if (c->api == PL_API_GENERATE) {
        rc = pl_buf_add(out, "data: ", 6);
        if (rc == 0)
            rc = dump(generated(p, p->ready, true), out);
        if (rc == 0)
            rc = pl_buf_add(out, "\n\n", 2);
    }
    return rc;
}

int pl_front_call_stream_end(pl_front_call *c, pl_buf *out)
{
    int rc = 0;
    if (c->api == PL_API_MESSAGES) {
        rc = event(c, out, "content_block_stop", json_pack("{s:i}", "index", 0));
        if (rc == 0)
            rc = event(c, out, "message_delta",
                       json_pack("{s:{s:s,s:n},s:o}", "delta", "stop_reason", stop_reason_of(c),
                                 "stop_sequence", "usage", anthropic_usage(c, c->parts[0].ready)));
        return rc ? rc : event(c, out, "message_stop", json_object());
    }
    if (c->api == PL_API_RESPONSES) {
        json_t *part = json_pack("{s:s,s:o,s:[],s:[]}", "type", "output_text", "text",
                                 text_of(&c->parts[0]), "annotations", "logprobs");
        rc = event(c, out, "response.output_text.done",
                   json_pack("{s:o,s:i,s:i,s:o,s:[]}", "item_id", str(id_with(c, "msg_")),
                             "output_index", 0, "content_index", 0, "text", text_of(&c->parts[0]),
                             "logprobs"));
        if (rc == 0)
            rc = event(c, out, "response.content_part.done",
                       json_pack("{s:o,s:i,s:i,s:O}", "item_id", str(id_with(c, "msg_")),
                                 "output_index", 0, "content_index", 0, "part", part));
        json_decref(part);
        if (rc == 0)
            rc =
                event(c, out, "response.output_item.done",
                      json_pack("{s:i,s:o}", "output_index", 0, "item", response_message(c, true)));
        return rc ? rc
                  : event(c, out, "response.completed",
                          json_pack("{s:o}", "response", response(c, true)));
    }
    if (c->include_usage && c->api != PL_API_GENERATE) {
        rc = chunk_head(c, out);
        if (rc == 0)
            rc = pl_buf_add(out, "\"choices\":[],\"usage\":", 21);
        if (rc == 0)
            rc = dump(usage_of(c), out);
        if (rc == 0)
            rc = pl_buf_add(out, "}\n\n", 3);
    }
    return rc ? rc : pl_buf_add(out, "data: [DONE]\n\n", 14);
}

/* --- errors --- */

void pl_front_render_error(pl_front *f, pl_str path, int status, const char *message, pl_buf *out)
{
    static const struct {
        int status;
        const char *vllm, *anthropic;
    } types[] = {{400, "BadRequestError", "invalid_request_error"},
                 {404, "NotFoundError", "not_found_error"},
                 {405, "MethodNotAllowedError", "invalid_request_error"},
                 {413, "RequestTooLargeError", "request_too_large"},
                 {503, "ServiceUnavailableError", "overloaded_error"}};
    const char *type = "InternalServerError", *anthropic = "api_error";
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (types[i].status == status) {
            type = types[i].vllm;
            anthropic = types[i].anthropic;
        }
    json_t *v;
    if (pl_str_eq(path, PL_STR("/v1/messages"))) {
        v = json_pack("{s:s,s:{s:s,s:s}}", "type", "error", "error", "type", anthropic, "message",
                      message);
    } else {
        json_t *error = json_pack("{s:s,s:s,s:n,s:i}", "message", message, "type", type, "param",
                                  "code", status);
        /* SGLang's members stand at the top; the official clients look for `error` only. */
        v = f->vllm ? json_object()
                    : json_pack("{s:s,s:s,s:s,s:n,s:i}", "object", "error", "message", message,
                                "type", type, "param", "code", status);
        json_object_set_new(v, "error", error);
    }
    if (dump(v, out) != 0)
        out->n = 0;
}
