/* The JSON walk: see json.h. Called on the loops' threads, for each request body and for events
 * that carry usage; keeps no state outside the caller's pl_json and owns nothing. Strings are in
 * json_string.c.
 *
 * Lists of token ids can be most of a body, so there is a path that takes 64 bytes a step (SSE2).
 * It skips whole elements that are certainly right and leaves all else to the plain code. */
#include "http/json_inner.h"

#include "base/err.h"

int pl_json_fail(pl_json *j, const char *pos, int rc, const char *text)
{
    j->rc = rc;
    j->error = pos < j->end || rc == PL_ELIMIT ? text : "the text ends too early";
    j->error_pos = pos;
    return rc;
}

const char *pl_json_stop(pl_json *j, const char *pos, const char *text)
{
    pl_json_fail(j, pos, PL_ESYNTAX, text);
    return NULL;
}

static inline const char *space(const char *p, const char *end)
{
    while (p < end && pl_json_is(*p, PL_JSON_IS_SPACE))
        p++;
    return p;
}

#ifdef PL_JSON_SSE2
static inline unsigned ones(uint64_t x)
{
    x -= x >> 1 & 0x5555555555555555u;
    x = (x & 0x3333333333333333u) + (x >> 2 & 0x3333333333333333u);
    x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0fu;
    return (unsigned)(x * 0x0101010101010101u >> 56);
}

/* From the first byte of an array's element over as many whole elements as are natural numbers
 * followed by "," or ", ", to the first byte after such a separator. *commas counts them. */
static const char *naturals(const char *p, const char *end, uint32_t *commas)
{
    while (end - p >= 64) {
        __m128i v[4] = {pl_json_load(p), pl_json_load(p + 16), pl_json_load(p + 32),
                        pl_json_load(p + 48)};
        uint64_t comma = PL_JSON_BITS(_mm_cmpeq_epi8, ','),
                 blank = PL_JSON_BITS(_mm_cmpeq_epi8, ' ');
        uint64_t zero = PL_JSON_BITS(_mm_cmpeq_epi8, '0');
        /* '0'..'9' are the bytes above '/' and not above '9' */
        uint64_t digit = PL_JSON_BITS(_mm_cmpgt_epi8, '/') & ~PL_JSON_BITS(_mm_cmpgt_epi8, '9');
        uint64_t bad = ~(comma | blank | digit);
        bad |= comma & ~(digit << 1);                    /* no number before it */
        bad |= blank & ~(comma << 1);                    /* not the one blank after a comma */
        bad |= (zero & ~(digit << 1) & digit >> 1) << 1; /* a digit after a leading zero */
        uint64_t fine = bad ? ((uint64_t)1 << __builtin_ctzll(bad)) - 1 : ~(uint64_t)0;
        comma &= fine;
        if (!comma)
            return p;
        *commas += ones(comma);
        p += 64 - __builtin_clzll(comma);
        p += p < end && *p == ' ';
        if (bad)
            return p;
    }
    return p;
}
#endif

/* --- other values --- */

static const char *number(pl_json *j, const char *p)
{
    const char *end = j->end;
    if (*p == '-')
        p++;
    if (p == end || !pl_json_is(*p, PL_JSON_IS_DIGIT))
        return pl_json_stop(j, p, "a digit was expected");
    if (*p++ != '0')
        while (p < end && pl_json_is(*p, PL_JSON_IS_DIGIT))
            p++;
    if (p < end && *p == '.') {
        p++;
        if (p == end || !pl_json_is(*p, PL_JSON_IS_DIGIT))
            return pl_json_stop(j, p, "a digit was expected");
        while (p < end && pl_json_is(*p, PL_JSON_IS_DIGIT))
            p++;
    }
    if (p < end && (*p == 'e' || *p == 'E')) {
        p++;
        if (p < end && (*p == '+' || *p == '-'))
            p++;
        if (p == end || !pl_json_is(*p, PL_JSON_IS_DIGIT))
            return pl_json_stop(j, p, "a digit was expected");
        while (p < end && pl_json_is(*p, PL_JSON_IS_DIGIT))
            p++;
    }
    return p;
}

static const char *literal(pl_json *j, const char *p, const char *word)
{
    for (; *word; word++, p++)
        if (p == j->end || *p != *word)
            return pl_json_stop(j, p, "a value was expected");
    return p;
}

/* A name with its colon, up to the value; p is at what should be the opening quote. */
static const char *member_name(pl_json *j, const char *p, pl_json_name *name)
{
    if (p == j->end || *p != '"')
        return pl_json_stop(j, p, "a member's name in quotes was expected");
    name->escaped = false;
    const char *close = pl_json_string_end(j, p + 1, true, &name->escaped);
    if (!close)
        return NULL;
    name->raw = (pl_str){p + 1, (size_t)(close - p - 1)};
    p = space(close + 1, j->end);
    if (p == j->end || *p != ':')
        return pl_json_stop(j, p, "a colon was expected");
    return space(p + 1, j->end);
}

/* Bit d of the stack: is container d an object? */
static inline void set_object(uint64_t *stack, unsigned d, bool object)
{
    uint64_t bit = (uint64_t)1 << (d & 63);
    stack[d >> 6] = object ? stack[d >> 6] | bit : stack[d >> 6] & ~bit;
}

/* A long string: of those that begin with "data:" attachments are counted. */
static void note_long(const pl_json *j, pl_str string, bool escaped, pl_member *m)
{
    if (memcmp(string.p + 1, "data:", 5) == 0) {
        m->attachments++;
        m->attachment_bytes += string.n;
    }
    pl_scan *s = j->note;
    if (s && s->longs_n < PL_SCAN_LONGS)
        s->longs[s->longs_n++] = (pl_scan_long){.at = (uint32_t)(string.p - s->start),
                                                .n = (uint32_t)string.n & INT32_MAX,
                                                .escaped = escaped};
}

void pl_json_know(pl_json *j, const pl_scan *s)
{
    uintptr_t at = (uintptr_t)j->p - (uintptr_t)s->start;
    uint32_t from = 0, to = s->longs_n;
    while (from < to) {
        uint32_t middle = (from + to) / 2;
        if (s->longs[middle].at < at)
            from = middle + 1;
        else
            to = middle;
    }
    j->next_long = from;
    j->known = from < s->longs_n ? s : NULL;
}

/* The long string that begins at p, if it is a known one. */
static inline const pl_scan_long *known_long(pl_json *j, const char *p)
{
    const pl_scan *s = j->known;
    uintptr_t at = (uintptr_t)p - (uintptr_t)s->start;
    while (j->next_long < s->longs_n && s->longs[j->next_long].at < at)
        j->next_long++;
    if (j->next_long == s->longs_n) {
        j->known = NULL;
        return NULL;
    }
    const pl_scan_long *l = &s->longs[j->next_long];
    return l->at == at && l->n <= (size_t)(j->end - p) ? l : NULL;
}

/* Over one value, containers with all that is in them. */
static const char *walk(pl_json *j, const char *p, pl_member *m)
{
    const char *const end = j->end;
    uint64_t stack[PL_JSON_DEPTH_MAX / 64];
    unsigned depth = 0;  /* containers opened here and not closed */
    bool object = false; /* the innermost one */
    pl_json_name name;
    stack[0] = 0;
value:
    p = space(p, end);
    if (p == end)
        return pl_json_stop(j, p, "");
    switch (*p) {
    case '"': {
        const char *open = p;
        bool escaped = false;
        const pl_scan_long *known = j->known ? known_long(j, p) : NULL;
        if (known) {
            escaped = known->escaped;
            p += known->n;
        } else {
            p = pl_json_string_end(j, p + 1, j->utf8, &escaped);
            if (!p)
                return NULL;
            p++;
        }
        if (p - open >= PL_SCAN_LONG)
            note_long(j, (pl_str){open, (size_t)(p - open)}, escaped, m);
        if (depth == 0)
            m->escaped = escaped;
        break;
    }
    case '{':
    case '[':
        if (j->depth + depth >= j->max_depth) {
            pl_json_fail(j, p, PL_ELIMIT, "nested too deeply");
            return NULL;
        }
        object = *p == '{';
        if ((depth & 63) == 0)
            stack[depth >> 6] = 0;
        set_object(stack, depth++, object);
        p = space(p + 1, end);
        if (p < end && *p == (object ? '}' : ']')) {
            p++;
            goto close;
        }
        if (object)
            goto member;
        m->elements += depth == 1;
        goto element;
    case 't':
        p = literal(j, p, "true");
        break;
    case 'f':
        p = literal(j, p, "false");
        break;
    case 'n':
        p = literal(j, p, "null");
        break;
    default:
        if (*p != '-' && !pl_json_is(*p, PL_JSON_IS_DIGIT))
            return pl_json_stop(j, p, "a value was expected");
        p = number(j, p);
        break;
    }
    if (!p)
        return NULL;
after:
    if (depth == 0)
        return p;
    p = space(p, end);
    if (p == end)
        return pl_json_stop(j, p, "");
    if (*p == ',') {
        p = space(p + 1, end);
        if (object)
            goto member;
        m->elements += depth == 1;
        goto value;
    }
    if (*p != (object ? '}' : ']'))
        return pl_json_stop(j, p,
                            object ? "a comma or } was expected" : "a comma or ] was expected");
    p++;
close:
    depth--;
    object = depth && (stack[(depth - 1) >> 6] >> ((depth - 1) & 63) & 1);
    goto after;
member:
    p = member_name(j, p, &name);
    if (!p)
        return NULL;
    goto value;
element: /* the first of an array: of token ids, perhaps thousands */
#ifdef PL_JSON_SSE2
    if (p < end && pl_json_is(*p, PL_JSON_IS_DIGIT)) {
        uint32_t commas = 0;
        p = naturals(p, end, &commas);
        m->elements += depth == 1 ? commas : 0;
    }
#endif
    goto value;
}

/* --- one container, step by step --- */

void pl_json_init(pl_json *j, pl_str text, unsigned max_depth, bool utf8)
{
    static const char nothing[1] = "";
    *j = (pl_json){
        .p = text.p ? text.p : nothing,
        .end = text.p ? text.p + text.n : nothing,
        .max_depth = max_depth < PL_JSON_DEPTH_MAX ? max_depth : PL_JSON_DEPTH_MAX,
        .utf8 = utf8,
    };
}

int pl_json_enter(pl_json *j, char open)
{
    if (j->rc)
        return j->rc;
    j->p = space(j->p, j->end);
    if (j->p == j->end || *j->p != open)
        return pl_json_fail(j, j->p, PL_ESYNTAX,
                            open == '{' ? "not a JSON object" : "not a JSON array");
    if (j->depth >= j->max_depth)
        return pl_json_fail(j, j->p, PL_ELIMIT, "nested too deeply");
    j->depth++;
    j->p++;
    j->first = true;
    return 0;
}

/* To the next member or element: 1, 0 at the end of the container, or an error. */
static int next(pl_json *j, char close)
{
    if (j->rc)
        return j->rc;
    const char *p = space(j->p, j->end);
    bool first = j->first;
    j->first = false;
    if (p < j->end && *p == close) {
        j->p = p + 1;
        j->depth--;
        return 0;
    }
    if (!first) {
        if (p == j->end || *p != ',')
            return pl_json_fail(j, p, PL_ESYNTAX,
                                close == '}' ? "a comma or } was expected"
                                             : "a comma or ] was expected");
        p = space(p + 1, j->end);
    }
    j->p = p;
    return 1;
}

int pl_json_key(pl_json *j, pl_json_name *name)
{
    int rc = next(j, '}');
    if (rc <= 0)
        return rc;
    const char *p = member_name(j, j->p, name);
    if (!p)
        return j->rc;
    j->p = p;
    return 1;
}

int pl_json_item(pl_json *j)
{
    return next(j, ']');
}

int pl_json_value(pl_json *j, pl_member *m)
{
    *m = (pl_member){.type = PL_JSON_ABSENT};
    if (j->rc)
        return j->rc;
    const char *from = space(j->p, j->end);
    const char *to = walk(j, from, m);
    if (!to)
        return j->rc;
    j->p = to;
    m->raw = (pl_str){from, (size_t)(to - from)};
    switch (*from) {
    case '"':
        m->type = PL_JSON_STRING;
        break;
    case '{':
        m->type = PL_JSON_OBJECT;
        break;
    case '[':
        m->type = PL_JSON_ARRAY;
        break;
    case 't':
        m->type = PL_JSON_TRUE;
        break;
    case 'f':
        m->type = PL_JSON_FALSE;
        break;
    case 'n':
        m->type = PL_JSON_NULL;
        break;
    default:
        m->type = PL_JSON_NUMBER;
    }
    return 0;
}

int pl_json_done(pl_json *j)
{
    if (j->rc)
        return j->rc;
    j->p = space(j->p, j->end);
    return j->p == j->end ? 0 : pl_json_fail(j, j->p, PL_ESYNTAX, "text after the value");
}
