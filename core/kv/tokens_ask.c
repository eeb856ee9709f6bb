/* Questions to an engine's tokenizer: see tokens_ask.h. On the thread of whoever asks; pure but for
 * the memory that it says it takes. */
#include "kv/tokens_ask.h"

#include <stdlib.h>

#include "base/err.h"
#include "http/json.h"
#include "kv/keys.h"

/* A message that any template takes as its first. */
#define ANCHOR "{\"role\":\"user\",\"content\":\".\"}"

static const pl_str extras[PL_ASK_EXTRAS] = {PL_STR_INIT("chat_template"),
                                             PL_STR_INIT("chat_template_kwargs"),
                                             PL_STR_INIT("reasoning_effort")};

static void find_extras(pl_ask *q, pl_str body)
{
    pl_json j;
    pl_json_name name;
    pl_member m;
    pl_json_init(&j, body, PL_JSON_DEPTH_MAX, false);
    if (pl_json_enter(&j, '{') != 0)
        return;
    while (pl_json_key(&j, &name) > 0 && pl_json_value(&j, &m) == 0)
        for (int i = 0; i < PL_ASK_EXTRAS; i++)
            if (m.type != PL_JSON_NULL && pl_json_name_is(&name, extras[i])) {
                q->extras[i] = m;
                q->plain = false;
            }
}

static void put_member(pl_kv_canon *c, char name, const pl_member *m)
{
    if (m->type == PL_JSON_ABSENT)
        return;
    pl_kv_canon_put_tag(c, PL_KV_CANON_KEY);
    pl_kv_canon_put(c, &name, 1);
    pl_kv_canon_value(c, m->raw);
}

static bool is_string_of(const pl_member *m, pl_str a, pl_str b, pl_str c)
{
    pl_str s = m->type == PL_JSON_STRING ? (pl_str){m->raw.p + 1, m->raw.n - 2} : PL_STR("");
    return pl_str_eq(s, a) || pl_str_eq(s, b) || pl_str_eq(s, c);
}

/* A content's part that the endpoint takes for text: an image by its URL, say, would be fetched
 * there, and stand as one placeholder for any image. */
static bool is_text_part(const pl_ask *q, const pl_member *part)
{
    pl_json j;
    pl_json_name name;
    pl_member m, type = {.type = PL_JSON_ABSENT}, text = type;
    pl_json_init(&j, part->raw, PL_JSON_DEPTH_MAX, false);
    pl_json_know(&j, q->scan);
    if (part->type != PL_JSON_OBJECT || pl_json_enter(&j, '{') != 0)
        return part->type == PL_JSON_STRING;
    while (pl_json_key(&j, &name) > 0 && pl_json_value(&j, &m) == 0)
        if (pl_json_name_is(&name, PL_STR("type")))
            type = m;
        else if (pl_json_name_is(&name, PL_STR("text")))
            text = m;
    return text.type == PL_JSON_STRING &&
           is_string_of(&type, PL_STR("text"), PL_STR("input_text"), PL_STR("output_text"));
}

static bool is_text_only(const pl_ask *q, pl_str message)
{
    pl_json j;
    pl_json_name name;
    pl_member content, part;
    pl_json_init(&j, message, PL_JSON_DEPTH_MAX, false);
    pl_json_know(&j, q->scan);
    if (pl_json_enter(&j, '{') != 0)
        return false;
    while (pl_json_key(&j, &name) > 0 && pl_json_value(&j, &content) == 0) {
        if (content.type != PL_JSON_ARRAY || !pl_json_name_is(&name, PL_STR("content")))
            continue;
        pl_json parts;
        pl_json_init(&parts, content.raw, PL_JSON_DEPTH_MAX, false);
        pl_json_know(&parts, q->scan);
        if (pl_json_enter(&parts, '[') == 0)
            while (pl_json_item(&parts) > 0 && pl_json_value(&parts, &part) == 0)
                if (!is_text_part(q, &part))
                    return false;
    }
    return true;
}

static int read_messages(pl_ask *q, pl_kv_canon *c)
{
    const pl_member *m = &q->scan->members[PL_MEMBER_MESSAGES];
    if (m->elements == 0)
        return PL_EINVALID;
    if (m->elements > PL_ASK_MESSAGES_MAX)
        return PL_ELIMIT;
    q->keys = malloc(m->elements * sizeof *q->keys);
    q->raw = malloc(m->elements * sizeof *q->raw);
    if (!q->keys || !q->raw)
        return PL_ENOMEM;
    pl_json j;
    pl_json_init(&j, m->raw, PL_JSON_DEPTH_MAX, false);
    pl_json_know(&j, q->scan);
    if (pl_json_enter(&j, '[') != 0)
        return PL_EINVALID;
    while (q->n < m->elements && pl_json_item(&j) > 0) {
        const char *from = j.p;
        pl_kv_canon_message(c, &j);
        if (j.rc)
            return PL_EINVALID;
        q->raw[q->n] = (pl_str){from, (size_t)(j.p - from)};
        if (!is_text_only(q, q->raw[q->n]))
            return PL_EINVALID;
        q->keys[q->n++] = pl_kv_canon_digest(c);
    }
    return 0;
}

int pl_ask_read(pl_ask *q, pl_str body, const pl_scan *scan, pl_tokcache_api api, uint64_t seed)
{
    *q = (pl_ask){.scan = scan, .plain = true};
    pl_kv_canon c;
    pl_kv_canon_init(&c, seed, PL_KV_CANON_CHUNK, NULL, 0);
    c.scan = scan;
    if (scan->members[PL_MEMBER_MESSAGES].type == PL_JSON_ARRAY) {
        if (api != PL_TOKCACHE_CHAT || scan->members[PL_MEMBER_MESSAGES].attachments ||
            scan->members[PL_MEMBER_SYSTEM].type != PL_JSON_ABSENT)
            return PL_EINVALID; /* `system` is Anthropic's form, which the endpoint does not know */
        q->chat = true;
        find_extras(q, body);
        put_member(&c, 't', &scan->members[PL_MEMBER_TOOLS]);
        for (int i = 0; i < PL_ASK_EXTRAS; i++)
            put_member(&c, (char)('0' + i), &q->extras[i]);
        return read_messages(q, &c);
    }
    const pl_member *m = &scan->members[PL_MEMBER_PROMPT];
    if (m->type == PL_JSON_ABSENT)
        m = &scan->members[PL_MEMBER_TEXT];
    if (m->type != PL_JSON_STRING)
        return PL_EINVALID;
    q->keys = malloc(sizeof *q->keys);
    q->raw = malloc(sizeof *q->raw);
    if (!q->keys || !q->raw)
        return PL_ENOMEM;
    pl_kv_canon_put_tag(&c, PL_KV_CANON_TEXT);
    pl_kv_canon_string(&c, m->raw, m->escaped);
    q->raw[0] = m->raw;
    q->keys[0] = pl_kv_canon_digest(&c);
    q->n = 1;
    return 0;
}

void pl_ask_free(pl_ask *q)
{
    free(q->keys);
    free(q->raw);
    q->keys = NULL;
    q->raw = NULL;
}

bool pl_ask_reply(const pl_ask *q, size_t i)
{
    pl_member role = pl_object_find(q->raw[i], PL_STR("role"));
    return pl_str_eq(role.raw, PL_STR("\"assistant\""));
}

/* --- bodies --- */

static int add(pl_buf *b, pl_str s)
{
    return pl_buf_add(b, s.p, s.n);
}

/* `"model":"...",`: model is what the engine calls it. */
static int add_model(pl_buf *b, pl_str model)
{
    int rc = add(b, PL_STR("\"model\":\""));
    for (size_t i = 0; i < model.n && rc == 0; i++) {
        unsigned char ch = (unsigned char)model.p[i];
        if (ch == '"' || ch == '\\' || ch < 0x20)
            rc = pl_buf_addf(b, "\\u%04x", ch);
        else
            rc = pl_buf_add(b, &model.p[i], 1);
    }
    return rc ? rc : add(b, PL_STR("\","));
}

static int add_messages(const pl_ask *q, size_t from, bool anchor, pl_str model, bool tools,
                        pl_buf *b)
{
    int rc = add(b, PL_STR("{"));
    if (rc == 0)
        rc = add_model(b, model);
    /* with the generation prompt a conversation would not go on where its last prompt ended */
    if (rc == 0)
        rc = add(b, PL_STR("\"add_generation_prompt\":false,\"add_special_tokens\":false,"));
    const pl_member *t = &q->scan->members[PL_MEMBER_TOOLS];
    if (rc == 0 && tools && t->type == PL_JSON_ARRAY && t->elements) {
        rc = add(b, PL_STR("\"tools\":"));
        rc = rc ? rc : add(b, t->raw);
        rc = rc ? rc : add(b, PL_STR(","));
    }
    for (int i = 0; i < PL_ASK_EXTRAS && rc == 0; i++)
        if (q->extras[i].type != PL_JSON_ABSENT)
            rc = pl_buf_addf(b, "\"%.*s\":%.*s,", PL_FMT(extras[i]), PL_FMT(q->extras[i].raw));
    rc = rc ? rc : add(b, PL_STR("\"messages\":["));
    if (rc == 0 && anchor)
        rc = add(b, PL_STR(ANCHOR));
    for (size_t i = from; i < q->n && rc == 0; i++) {
        if (i > from || anchor)
            rc = add(b, PL_STR(","));
        rc = rc ? rc : add(b, q->raw[i]);
    }
    return rc ? rc : add(b, PL_STR("]}"));
}

int pl_ask_whole(const pl_ask *q, pl_str model, pl_buf *out)
{
    if (q->chat)
        return add_messages(q, 0, false, model, true, out);
    int rc = add(out, PL_STR("{"));
    rc = rc ? rc : add_model(out, model);
    rc = rc ? rc : add(out, PL_STR("\"prompt\":"));
    rc = rc ? rc : add(out, q->raw[0]);
    return rc ? rc : add(out, PL_STR("}"));
}

int pl_ask_after(const pl_ask *q, size_t from, pl_str model, pl_buf *out)
{
    return add_messages(q, from, true, model, false, out);
}

int pl_ask_anchor(const pl_ask *q, pl_str model, pl_buf *out)
{
    return add_messages(q, q->n, true, model, false, out);
}

/* --- answers --- */

int64_t pl_ask_answer(pl_str response, uint32_t **ids)
{
    *ids = NULL;
    pl_member m = pl_object_find(response, PL_STR("tokens"));
    if (m.type != PL_JSON_ARRAY)
        return PL_EPROTOCOL;
    *ids = malloc((m.elements ? m.elements : 1) * sizeof **ids);
    if (!*ids)
        return PL_ENOMEM;
    size_t n = pl_keys_parse_ids(m.raw, *ids, m.elements);
    if (n == m.elements)
        return (int64_t)n;
    free(*ids);
    *ids = NULL;
    return PL_EPROTOCOL;
}
