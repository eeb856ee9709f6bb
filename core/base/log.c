/* Logging: see log.h. A line is composed on the stack and written with one write(2), so lines of
 * several threads never mix. */
#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"

static _Atomic int min_level = PL_LOG_INFO;
static _Atomic int as_json = -1;
static const char *const names[] = {"debug", "info", "warn", "error"};

void pl_log_init(pl_log_level level, int json)
{
    atomic_store(&min_level, (int)level);
    atomic_store(&as_json, json < 0 ? !isatty(2) : json);
}

int pl_log_level_parse(const char *name)
{
    for (int i = 0; i < 4; i++)
        if (strcmp(name, names[i]) == 0)
            return i;
    return PL_EINVALID;
}

/* Escapes for JSON; control bytes become \u00xx, so a hostile value cannot forge a line. */
static size_t json_escape(char *out, size_t cap, const char *s)
{
    size_t n = 0;
    for (; *s && n + 7 < cap; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\') {
            out[n++] = '\\';
            out[n++] = (char)c;
        } else if (c < 0x20 || c == 0x7f) {
            n += (size_t)snprintf(out + n, cap - n, "\\u%04x", c);
        } else {
            out[n++] = (char)c;
        }
    }
    out[n] = 0;
    return n;
}

void pl_log(pl_log_level level, const char *event, const char *fmt, ...)
{
    if ((int)level < atomic_load_explicit(&min_level, memory_order_relaxed))
        return;
    int json = atomic_load_explicit(&as_json, memory_order_relaxed);
    if (json < 0)
        json = !isatty(2);
    char msg[2048], line[8192];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    size_t n;
    if (json) {
        n = (size_t)snprintf(line, sizeof line,
                             "{\"time\":%.3f,\"level\":\"%s\",\"event\":\"%s\",\"message\":\"",
                             pl_wall_seconds(), names[level], event);
        n += json_escape(line + n, sizeof line - n - 4, msg);
        memcpy(line + n, "\"}\n", 3);
        n += 3;
    } else {
        time_t now = time(NULL);
        struct tm tm;
        localtime_r(&now, &tm);
        n = strftime(line, sizeof line, "%H:%M:%S", &tm);
        n += (size_t)snprintf(line + n, sizeof line - n, " %-5s %s: ", names[level], event);
        for (const char *s = msg; *s && n + 2 < sizeof line; s++)
            line[n++] = (unsigned char)*s < 0x20 ? ' ' : *s;
        line[n++] = '\n';
    }
    ssize_t ignored = write(2, line, n);
    (void)ignored;
}

bool pl_log_allow(unsigned long state[2], unsigned per_second)
{
    /* state[0]: second << 16 | count; shared states may let one line too many through, never too
     * few */
    unsigned long now = (unsigned long)(pl_now_ns() / 1000000000u);
    unsigned long old = __atomic_load_n(&state[0], __ATOMIC_RELAXED);
    unsigned long count = old >> 16 == now ? (old & 0xffff) + 1 : 1;
    if (count > per_second) {
        __atomic_fetch_add(&state[1], 1, __ATOMIC_RELAXED);
        return false;
    }
    __atomic_store_n(&state[0], now << 16 | count, __ATOMIC_RELAXED);
    return true;
}
