/* Writing the Prometheus text format: families, values, escaped labels, histograms with a thinned
 * bucket list. */
#ifndef PL_METRICS_TEXT_H
#define PL_METRICS_TEXT_H

#include "base/buf.h"
#include "base/hist.h"

typedef struct pl_text {
    pl_buf *out;
    size_t start;       /* where it began */
    const char *family; /* that the next values belong to */
    int err;            /* sticky PL_ENOMEM */
} pl_text;

/* Begins a family: HELP and TYPE. `name` stays valid until the next one. */
void pl_text_family(pl_text *t, const char *name, const char *type, const char *help);
/* One line of the family; labels: `n` pairs of const char *. */
void pl_text_value(pl_text *t, double value, int n, ...);
/* A family with one value without labels. */
void pl_text_one(pl_text *t, const char *name, const char *type, const char *help, double value);

/* Which buckets are shown: each bound is twice (REQUEST) or four times (CALL) the one before. */
typedef enum pl_hist_range {
    PL_RANGE_REQUEST, /* 1 ms to 9 minutes */
    PL_RANGE_CALL     /* 0.25 us to 1 s */
} pl_hist_range;

/* Buckets, sum and count, with one more label when it is not NULL. */
void pl_text_hist(pl_text *t, const pl_hist *h, pl_hist_range range, const char *label,
                  const char *value);

/* process_*: CPU, memory, file descriptors, start time. */
void pl_text_process(pl_text *t);

/* Memory of this process that is in RAM, bytes; 0 when unknown. */
double pl_process_resident_bytes(void);

/* metrics_sessions.c */
struct pl_router;
void pl_metrics_sessions(pl_text *t, struct pl_router *r);
/* metrics_kv.c */
struct pl_view;
void pl_metrics_kv(pl_text *t, struct pl_router *r, const struct pl_view *v);

#endif
