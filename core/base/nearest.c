/* Closest known word: see nearest.h. No state; callable from any thread. */
#include "base/nearest.h"

#include <limits.h>

#define WORD_MAX 64

static int min3(int a, int b, int c)
{
    int m = a < b ? a : b;
    return m < c ? m : c;
}

/* Optimal string alignment: Levenshtein's table of three rows, with swaps. */
int pl_edit_distance(pl_str a, pl_str b)
{
    if (a.n > WORD_MAX || b.n > WORD_MAX)
        return INT_MAX;
    int rows[3][WORD_MAX + 1];
    int *before = rows[0], *last = rows[1], *row = rows[2];
    for (size_t k = 0; k <= b.n; k++)
        before[k] = last[k] = (int)k;
    for (size_t i = 1; i <= a.n; i++) {
        row[0] = (int)i;
        for (size_t k = 1; k <= b.n; k++) {
            bool same = a.p[i - 1] == b.p[k - 1];
            row[k] = min3(last[k] + 1, row[k - 1] + 1, last[k - 1] + !same);
            if (i > 1 && k > 1 && a.p[i - 1] == b.p[k - 2] && a.p[i - 2] == b.p[k - 1] &&
                before[k - 2] + 1 < row[k])
                row[k] = before[k - 2] + 1;
        }
        int *spare = before;
        before = last;
        last = row;
        row = spare;
    }
    return last[b.n];
}

void pl_nearest_try(pl_nearest *n, pl_str known)
{
    int d = pl_edit_distance(n->word, known);
    if (n->word.n >= 3 && d > 1 && pl_str_starts(known, n->word))
        d = 1; /* a forgotten unit: connect for connect_seconds */
    int plausible = ((int)n->word.n + 2) / 3;
    if (d > plausible || (n->best.p && d >= n->distance))
        return;
    n->best = known;
    n->distance = d;
}
