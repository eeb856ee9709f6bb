/* Reading the Prometheus text format: samples, line by line. Pure functions over the bytes: nothing
 * is copied or allocated, every byte is looked at a fixed number of times, and whatever is
 * malformed is passed over. For pages of others: see admin/metrics_text.h for writing our own. */
#ifndef PL_PROM_H
#define PL_PROM_H

#include "base/str.h"

typedef struct pl_prom_line {
    pl_str name; /* of the sample */
    pl_str tail; /* what follows it: labels, value, perhaps a timestamp */
} pl_prom_line;

/* The next line of *rest that begins with a metric name; comments and other lines are passed over.
 * False at the end. The tail is not checked yet. */
bool pl_prom_next(pl_str *rest, pl_prom_line *line);

/* The sample's value; NaN and infinities are values. False when the line is malformed. */
bool pl_prom_value(const pl_prom_line *line, double *value);

/* Longer label values are taken for absent: those that matter here are numbers. */
#define PL_PROM_LABEL_MAX 64

/* The value of a label, unescaped into `out`. False when there is none of this name, when it is too
 * long, or when the labels are malformed up to there. */
bool pl_prom_label(const pl_prom_line *line, pl_str name, char out[PL_PROM_LABEL_MAX], size_t *n);

/* A label that is a whole number up to max; -1 without one. */
int64_t pl_prom_label_whole(const pl_prom_line *line, pl_str name, uint64_t max);

#endif
