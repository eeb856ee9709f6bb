/* The Prometheus text format: see metrics_text.h. No state; any thread. */
#include "admin/metrics_text.h"

#include <dirent.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"

static void add(pl_text *t, const char *p, size_t n)
{
    if (t->err == 0)
        t->err = pl_buf_add(t->out, p, n);
}

static void add_c(pl_text *t, const char *s)
{
    add(t, s, strlen(s));
}

void pl_text_family(pl_text *t, const char *name, const char *type, const char *help)
{
    t->family = name;
    if (t->err == 0)
        t->err = pl_buf_addf(t->out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void add_label(pl_text *t, const char *name, const char *value, bool first)
{
    add(t, first ? "{" : ",", 1);
    add_c(t, name);
    add(t, "=\"", 2);
    for (const char *s = value; *s; s++) {
        if (*s == '\\')
            add(t, "\\\\", 2);
        else if (*s == '"')
            add(t, "\\\"", 2);
        else if (*s == '\n')
            add(t, "\\n", 2);
        else
            add(t, s, 1);
    }
    add(t, "\"", 1);
}

static void add_number(pl_text *t, double v)
{
    char text[40];
    if (isnan(v)) {
        add_c(t, "NaN");
    } else if (isinf(v)) {
        add_c(t, v > 0 ? "+Inf" : "-Inf");
    } else {
        int n = snprintf(text, sizeof text, "%.15g", v);
        if (strtod(text, NULL) != v)
            n = snprintf(text, sizeof text, "%.17g", v);
        add(t, text, (size_t)n);
    }
}

void pl_text_value(pl_text *t, double value, int n, ...)
{
    va_list ap;
    va_start(ap, n);
    add_c(t, t->family);
    for (int i = 0; i < n; i++) {
        const char *name = va_arg(ap, const char *);
        add_label(t, name, va_arg(ap, const char *), i == 0);
    }
    va_end(ap);
    add(t, n ? "} " : " ", n ? 2 : 1);
    add_number(t, value);
    add(t, "\n", 1);
}

void pl_text_one(pl_text *t, const char *name, const char *type, const char *help, double value)
{
    pl_text_family(t, name, type, help);
    pl_text_value(t, value, 0);
}

/* --- histograms --- */

static void hist_line(pl_text *t, const char *suffix, const char *label, const char *value,
                      const char *le, double number)
{
    add_c(t, t->family);
    add_c(t, suffix);
    if (label)
        add_label(t, label, value, true);
    if (le)
        add_label(t, "le", le, !label);
    add(t, label || le ? "} " : " ", label || le ? 2 : 1);
    add_number(t, number);
    add(t, "\n", 1);
}

void pl_text_hist(pl_text *t, const pl_hist *h, pl_hist_range range, const char *label,
                  const char *value)
{
    /* two buckets of pl_hist to a power of two, the first at 64 ns */
    int first = range == PL_RANGE_REQUEST ? 28 : 4;
    int step = range == PL_RANGE_REQUEST ? 2 : 4;
    int last = range == PL_RANGE_REQUEST ? PL_HIST_BUCKETS - 2 : 48;
    uint64_t seen = 0;
    for (int i = 0; i < PL_HIST_BUCKETS; i++) {
        seen += atomic_load_explicit(&h->count[i], memory_order_relaxed);
        if (i < first || i > last || (i - first) % step != 0)
            continue;
        char le[32];
        snprintf(le, sizeof le, "%.12g", (double)pl_hist_bound_ns(i) / 1e9);
        hist_line(t, "_bucket", label, value, le, (double)seen);
    }
    /* the count is that of the buckets: `total` of a live histogram may be ahead of them */
    hist_line(t, "_bucket", label, value, "+Inf", (double)seen);
    hist_line(t, "_sum", label, value, NULL,
              (double)atomic_load_explicit(&h->sum_ns, memory_order_relaxed) / 1e9);
    hist_line(t, "_count", label, value, NULL, (double)seen);
}

/* --- the process --- */

double pl_process_resident_bytes(void)
{
    double total, resident = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    if (!f)
        return 0;
    if (fscanf(f, "%lf %lf", &total, &resident) != 2)
        resident = 0;
    fclose(f);
    return resident * (double)sysconf(_SC_PAGESIZE);
}

static int open_files(void)
{
    DIR *d = opendir("/proc/self/fd");
    int n = 0;
    if (!d)
        return 0;
    for (const struct dirent *e = readdir(d); e; e = readdir(d))
        n += e->d_name[0] != '.';
    closedir(d);
    return n - 1; /* not the directory itself */
}

/* Wall-clock seconds; field 22 of stat is in ticks since boot. */
static double start_time(void)
{
    char line[1024];
    unsigned long long ticks = 0;
    struct timespec boot;
    FILE *f = fopen("/proc/self/stat", "re");
    if (!f)
        return 0;
    size_t n = fread(line, 1, sizeof line - 1, f);
    fclose(f);
    line[n] = 0;
    const char *p = strrchr(line, ')'); /* the name before it may hold anything */
    for (int field = 2; p && field < 22; field++)
        p = strchr(p + 1, ' ');
    if (!p || sscanf(p, "%llu", &ticks) != 1 || clock_gettime(CLOCK_BOOTTIME, &boot) != 0)
        return 0;
    double up = (double)boot.tv_sec + (double)boot.tv_nsec / 1e9;
    return pl_wall_seconds() - up + (double)ticks / (double)sysconf(_SC_CLK_TCK);
}

void pl_text_process(pl_text *t)
{
    struct timespec cpu = {0, 0};
    struct rlimit files = {0, 0};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
    getrlimit(RLIMIT_NOFILE, &files);
    pl_text_one(t, "process_cpu_seconds_total", "counter", "User and system CPU time",
                (double)cpu.tv_sec + (double)cpu.tv_nsec / 1e9);
    pl_text_one(t, "process_resident_memory_bytes", "gauge", "Memory in RAM",
                pl_process_resident_bytes());
    pl_text_one(t, "process_open_fds", "gauge", "Open file descriptors", open_files());
    pl_text_one(t, "process_max_fds", "gauge", "File descriptors allowed", (double)files.rlim_cur);
    pl_text_one(t, "process_start_time_seconds", "gauge", "Start, in seconds since 1970",
                start_time());
}
