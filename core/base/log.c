/* Logging: see log.h. A line is composed on the stack and written with one write(2), so lines of
 * several threads never mix. */
#include "base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/str.h"

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

/* The length of the well-formed UTF-8 sequence at s, 0 when there is none. */
static size_t sequence(const char *s, size_t left)
{
    unsigned char c = (unsigned char)*s;
    size_t n = c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
    return n <= left && pl_str_utf8((pl_str){s, n}, NULL) ? n : 0;
}

/* What a terminal or a reader of lines could take for more than text: C0, DEL, C1 and the Unicode
 * line separators. 0: harmless. */
static unsigned control(const char *s, size_t n)
{
    unsigned char c = (unsigned char)s[0], d = n > 1 ? (unsigned char)s[1] : 0;
    if (n == 1)
        return c < 0x20 || c == 0x7f ? 0x10000u | c : 0;
    if (n == 2)
        return c == 0xc2 && d < 0xa0 ? 0x10000u | d : 0;
    unsigned char last = (unsigned char)s[n - 1];
    bool separator = n == 3 && c == 0xe2 && d == 0x80 && (last == 0xa8 || last == 0xa9);
    return separator ? 0x12000u | (last - 0x80u) : 0;
}

/* Copies a message into a line, so that a hostile value can neither forge one nor break the JSON.
 * Cuts at a whole character when out is full. */
static size_t clean(char *out, size_t cap, const char *s, bool json)
{
    size_t n = 0, left = strlen(s);
    while (left && n + 8 < cap) {
        size_t len = sequence(s, left);
        unsigned bad = len ? control(s, len) : 0x1fffdu;
        if (bad && json) {
            n += (size_t)snprintf(out + n, cap - n, "\\u%04x", bad & 0xffff);
        } else if (bad) {
            out[n++] = len ? ' ' : '?';
        } else {
            if (json && (*s == '"' || *s == '\\'))
                out[n++] = '\\';
            memcpy(out + n, s, len);
            n += len;
        }
        len += len == 0;
        s += len;
        left -= len;
    }
    return n;
}

/* A signal must not cost a line; a full or closed pipe may. */
static void put(const char *line, size_t n)
{
    ssize_t rc;
    do
        rc = write(2, line, n);
    while (rc < 0 && errno == EINTR);
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
                             "{\"time\":%.3f,\"level\":\"%s\",\"event\":\"%.64s\",\"message\":\"",
                             pl_wall_seconds(), names[level], event);
        n += clean(line + n, sizeof line - n - 4, msg, true);
        memcpy(line + n, "\"}\n", 3);
        n += 3;
    } else {
        time_t now = time(NULL);
        struct tm tm;
        localtime_r(&now, &tm);
        n = strftime(line, sizeof line, "%H:%M:%S", &tm);
        n += (size_t)snprintf(line + n, sizeof line - n, " %-5s %.64s: ", names[level], event);
        n += clean(line + n, sizeof line - n - 4, msg, false);
        line[n++] = '\n';
    }
    put(line, n);
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
