/* Usage in answers: see sse.h. Called by the proxy on a loop's thread for events and whole answers
 * of engines; pure, no allocation. Answers were not validated before, so everything here takes any
 * bytes; what is no JSON has no usage. */
#include "http/sse.h"

#include "http/json.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* Is there "_t" anywhere? Every field that is read has "_tokens" in its name, and most events of a
 * stream have none, so most need not be walked through. */
static bool may_have_tokens(pl_str s)
{
    size_t i = 0;
#ifdef __SSE2__
    for (; s.n - i >= 17; i += 16) {
        __m128i a = _mm_loadu_si128((const __m128i *)(const void *)(s.p + i));
        __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(s.p + i + 1));
        __m128i hit = _mm_and_si128(_mm_cmpeq_epi8(a, _mm_set1_epi8('_')),
                                    _mm_cmpeq_epi8(b, _mm_set1_epi8('t')));
        if (_mm_movemask_epi8(hit))
            break;
    }
#endif
    return s.n > i && memmem(s.p + i, s.n - i, "_tokens", 7) != NULL;
}

#define MOST                                                                                       \
    1e12 /* tokens: figures are summed up in whole numbers, which one answer must not fill */

/* Sets *to when m is a number of tokens. */
static bool number(const pl_member *m, double *to)
{
    double v;
    if (pl_member_number(m, &v) != 0 || v < 0 || v > MOST)
        return false;
    *to = v;
    return true;
}

/* `usage` or `meta_info`. */
static bool read_counts(pl_str object, pl_usage *u)
{
    pl_json j;
    pl_json_name name;
    pl_member m;
    bool found = false, input = false;
    double input_tokens = 0, read = 0, created = 0, cached = -1;
    pl_json_init(&j, object, PL_JSON_DEPTH_MAX, false);
    if (pl_json_enter(&j, '{') != 0)
        return false;
    while (pl_json_key(&j, &name) > 0 && pl_json_value(&j, &m) == 0) {
        pl_member details;
        if (pl_str_eq(name.raw, PL_STR("prompt_tokens"))) {
            found |= number(&m, &u->prompt_tokens);
        } else if (pl_str_eq(name.raw, PL_STR("completion_tokens")) ||
                   pl_str_eq(name.raw, PL_STR("output_tokens"))) {
            found |= number(&m, &u->output_tokens);
        } else if (pl_str_eq(name.raw, PL_STR("input_tokens"))) {
            input = number(&m, &input_tokens);
        } else if (pl_str_eq(name.raw, PL_STR("cached_tokens"))) {
            number(&m, &cached);
        } else if (pl_str_eq(name.raw, PL_STR("cache_read_input_tokens"))) {
            if (number(&m, &read))
                cached = read;
        } else if (pl_str_eq(name.raw, PL_STR("cache_creation_input_tokens"))) {
            number(&m, &created);
        } else if (m.type == PL_JSON_OBJECT &&
                   (pl_str_eq(name.raw, PL_STR("prompt_tokens_details")) ||
                    pl_str_eq(name.raw, PL_STR("input_tokens_details")))) {
            details = pl_object_find(m.raw, PL_STR("cached_tokens"));
            number(&details, &cached);
        }
    }
    if (input)
        u->prompt_tokens = input_tokens + read + created;
    if (cached >= 0)
        u->cached_tokens = cached;
    return found || input || cached >= 0;
}

/* One answer or event; `inside`: this is already its `response` or `message`. */
static bool read_object(pl_str object, bool inside, pl_usage *u)
{
    pl_json j;
    pl_json_name name;
    pl_member m;
    bool found = false;
    pl_json_init(&j, object, PL_JSON_DEPTH_MAX, false);
    if (pl_json_enter(&j, '{') != 0)
        return false;
    while (pl_json_key(&j, &name) > 0 && pl_json_value(&j, &m) == 0) {
        if (m.type != PL_JSON_OBJECT)
            continue;
        if (pl_str_eq(name.raw, PL_STR("usage")) ||
            (!inside && pl_str_eq(name.raw, PL_STR("meta_info"))))
            found |= read_counts(m.raw, u);
        else if (!inside && (pl_str_eq(name.raw, PL_STR("response")) ||
                             pl_str_eq(name.raw, PL_STR("message"))))
            found |= read_object(m.raw, true, u);
    }
    return found;
}

static void sum(double *to, double v)
{
    if (v >= 0)
        *to = (*to > 0 ? *to : 0) + v;
}

static bool read_array(pl_str array, pl_usage *u)
{
    pl_json j;
    pl_member m;
    bool found = false;
    pl_usage all = PL_USAGE_INIT;
    pl_json_init(&j, array, PL_JSON_DEPTH_MAX, false);
    if (pl_json_enter(&j, '[') != 0)
        return false;
    while (pl_json_item(&j) > 0 && pl_json_value(&j, &m) == 0) {
        pl_usage one = PL_USAGE_INIT;
        if (m.type == PL_JSON_OBJECT && read_object(m.raw, false, &one)) {
            found = true;
            sum(&all.prompt_tokens, one.prompt_tokens);
            sum(&all.cached_tokens, one.cached_tokens);
            sum(&all.output_tokens, one.output_tokens);
        }
    }
    if (all.prompt_tokens >= 0)
        u->prompt_tokens = all.prompt_tokens;
    if (all.cached_tokens >= 0)
        u->cached_tokens = all.cached_tokens;
    if (all.output_tokens >= 0)
        u->output_tokens = all.output_tokens;
    return found;
}

bool pl_usage_read(pl_str json, pl_usage *u)
{
    if (!may_have_tokens(json))
        return false;
    return read_object(json, false, u) || read_array(json, u);
}

bool pl_usage_only_chunk(pl_str json)
{
    pl_json j;
    pl_json_name name;
    pl_member m;
    bool choices = false, usage = false;
    pl_json_init(&j, json, PL_JSON_DEPTH_MAX, false);
    if (pl_json_enter(&j, '{') != 0)
        return false;
    while (pl_json_key(&j, &name) > 0 && pl_json_value(&j, &m) == 0) {
        if (pl_str_eq(name.raw, PL_STR("choices"))) {
            choices = m.type == PL_JSON_ARRAY && m.elements == 0;
            if (!choices)
                return false;
        } else if (pl_str_eq(name.raw, PL_STR("usage"))) {
            usage = m.type == PL_JSON_OBJECT;
            if (!usage)
                return false;
        }
    }
    return j.rc == 0 && choices && usage;
}
