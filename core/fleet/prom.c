/* The reader of the Prometheus text format: see prom.h. Called by gauge_read.c on the control loop;
 * no state. A sample is
 *
 *     name{label="value",...} value [timestamp]
 *
 * with \\ \" and \n escaped in label values and blanks between the parts. Lines are found first and
 * read only when somebody wants them: of a page with thousands of histogram lines a handful is. */
#include "fleet/prom.h"

#include <math.h>

static bool name_start(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == ':';
}

static bool name_char(char c)
{
    return name_start(c) || (c >= '0' && c <= '9');
}

static void skip_blanks(pl_str *s)
{
    while (s->n && (*s->p == ' ' || *s->p == '\t')) {
        s->p++;
        s->n--;
    }
}

/* Takes n bytes off the front. */
static pl_str take(pl_str *s, size_t n)
{
    pl_str taken = {s->p, n};
    s->p += n;
    s->n -= n;
    return taken;
}

static pl_str take_name(pl_str *s)
{
    size_t n = 0;
    if (s->n && name_start(*s->p))
        while (n < s->n && name_char(s->p[n]))
            n++;
    return take(s, n);
}

bool pl_prom_next(pl_str *rest, pl_prom_line *line)
{
    while (rest->n) {
        const char *end = memchr(rest->p, '\n', rest->n);
        size_t n = end ? (size_t)(end - rest->p) : rest->n;
        pl_str text = take(rest, n);
        if (end)
            take(rest, 1);
        if (text.n && text.p[text.n - 1] == '\r')
            text.n--;
        skip_blanks(&text);
        line->name = take_name(&text);
        line->tail = text;
        if (line->name.n)
            return true;
    }
    return false;
}

/* --- labels --- */

typedef struct label {
    pl_str name;
    pl_str raw; /* between the quotes, still escaped */
} label;

/* One label and the comma behind it. 1: there is one; 0: the labels are over (past the brace); -1:
 * malformed. */
static int next_label(pl_str *s, label *l)
{
    skip_blanks(s);
    if (s->n && *s->p == '}') {
        take(s, 1);
        return 0;
    }
    l->name = take_name(s);
    skip_blanks(s);
    if (l->name.n == 0 || s->n == 0 || *s->p != '=')
        return -1;
    take(s, 1);
    skip_blanks(s);
    if (s->n == 0 || *s->p != '"')
        return -1;
    take(s, 1);
    size_t n = 0;
    while (n < s->n && s->p[n] != '"')
        n += s->p[n] == '\\' ? 2 : 1;
    if (n >= s->n) /* also an escape as the last byte */
        return -1;
    l->raw = take(s, n);
    take(s, 1);
    skip_blanks(s);
    if (s->n && *s->p == ',')
        take(s, 1);
    else if (s->n == 0 || *s->p != '}')
        return -1;
    return 1;
}

/* Past the opening brace; false when there are no labels. */
static bool open_labels(pl_str *s)
{
    skip_blanks(s);
    if (s->n == 0 || *s->p != '{')
        return false;
    take(s, 1);
    return true;
}

static bool unescape(pl_str raw, char out[PL_PROM_LABEL_MAX], size_t *n)
{
    *n = 0;
    for (size_t i = 0; i < raw.n; i++) {
        char c = raw.p[i];
        if (c == '\\') /* next_label saw to it that a byte follows */
            c = raw.p[++i] == 'n' ? '\n' : raw.p[i];
        if (*n == PL_PROM_LABEL_MAX)
            return false;
        out[(*n)++] = c;
    }
    return true;
}

bool pl_prom_label(const pl_prom_line *line, pl_str name, char out[PL_PROM_LABEL_MAX], size_t *n)
{
    pl_str s = line->tail;
    label l;
    if (!open_labels(&s))
        return false;
    while (next_label(&s, &l) > 0)
        if (pl_str_eq(l.name, name))
            return unescape(l.raw, out, n);
    return false;
}

int64_t pl_prom_label_whole(const pl_prom_line *line, pl_str name, uint64_t max)
{
    char text[PL_PROM_LABEL_MAX];
    size_t n;
    uint64_t v;
    if (!pl_prom_label(line, name, text, &n) || pl_str_u64((pl_str){text, n}, max, &v) != 0)
        return -1;
    return (int64_t)v;
}

/* --- the value --- */

static bool special(pl_str s, double *value)
{
    bool minus = s.n && *s.p == '-';
    if (s.n && (*s.p == '-' || *s.p == '+'))
        take(&s, 1);
    if (pl_str_ieq(s, PL_STR("inf")) || pl_str_ieq(s, PL_STR("infinity")))
        *value = minus ? -INFINITY : INFINITY;
    else if (pl_str_ieq(s, PL_STR("nan")))
        *value = NAN;
    else
        return false;
    return true;
}

bool pl_prom_value(const pl_prom_line *line, double *value)
{
    pl_str s = line->tail;
    label l;
    bool labels = open_labels(&s);
    int more = 0;
    while (labels && (more = next_label(&s, &l)) > 0)
        ;
    if (more < 0)
        return false;
    bool apart = labels || (s.n && s.p > line->tail.p);
    skip_blanks(&s);
    size_t n = 0;
    while (n < s.n && s.p[n] != ' ' && s.p[n] != '\t')
        n++;
    pl_str number = {s.p, n};
    return apart && (pl_str_double(number, value) == 0 || special(number, value));
}
