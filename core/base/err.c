/* Error texts. No state; callable from any thread. */
#include "base/err.h"

#include <stdarg.h>
#include <stdio.h>

const char *pl_strerror(int err)
{
    switch (err) {
    case PL_OK:
        return "ok";
#define XX(name, number, text)                                                                     \
    case PL_E##name:                                                                               \
        return text;
        PL_ERR_MAP(XX)
#undef XX
    default:
        return "unknown error";
    }
}

int pl_fail(pl_errbuf *eb, int err, const char *fmt, ...)
{
    if (eb) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(eb->text, sizeof eb->text, fmt, ap);
        va_end(ap);
    }
    return err;
}
