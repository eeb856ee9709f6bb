/* Addresses: see net.h. No state. pl_parse_listen may block in the resolver and is called at start
 * and by the configuration only; the rest is safe on the request path. */
#include "net.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>

/* Splits off the port after the last colon; the brackets of [v6] are removed. */
static int split(pl_str s, pl_str *host, uint64_t *port, pl_errbuf *eb)
{
    const char *colon = s.n ? memrchr(s.p, ':', s.n) : NULL;
    if (!colon)
        return pl_fail(eb, PL_EINVALID, "'%.*s' has no port: expected HOST:PORT", PL_FMT(s));
    *host = (pl_str){s.p, (size_t)(colon - s.p)};
    pl_str digits = {colon + 1, s.n - host->n - 1};
    if (pl_str_u64(digits, 65535, port) != 0)
        return pl_fail(eb, PL_EINVALID, "'%.*s': the port is a number from 0 to 65535", PL_FMT(s));
    if (host->n >= 2 && host->p[0] == '[' && host->p[host->n - 1] == ']')
        *host = (pl_str){host->p + 1, host->n - 2};
    else if (memchr(host->p, ':', host->n))
        return pl_fail(eb, PL_EINVALID, "'%.*s': an IPv6 address stands in brackets: [::1]:8000",
                       PL_FMT(s));
    return 0;
}

int pl_parse_listen(pl_str s, struct sockaddr_storage *out, pl_errbuf *eb)
{
    pl_str host = {NULL, 0};
    uint64_t port = 0;
    int rc = split(s, &host, &port, eb);
    if (rc != 0)
        return rc;
    if (host.n == 0)
        host = PL_STR("127.0.0.1");
    char name[256], service[8];
    if (host.n >= sizeof name || memchr(host.p, 0, host.n))
        return pl_fail(eb, PL_EINVALID, "'%.*s' is no host name", PL_FMT(host));
    memcpy(name, host.p, host.n);
    name[host.n] = 0;
    snprintf(service, sizeof service, "%u", (unsigned)port);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV}, *found = NULL;
    int gai = getaddrinfo(name, service, &hints, &found);
    if (gai != 0)
        return pl_fail(eb, PL_ERESOLVE, "cannot resolve '%s': %s", name, gai_strerror(gai));
    const struct addrinfo *pick = found;
    for (const struct addrinfo *a = found; a; a = a->ai_next)
        if (a->ai_family == AF_INET) { /* localhost: what clients try when in doubt */
            pick = a;
            break;
        }
    memset(out, 0, sizeof *out);
    memcpy(out, pick->ai_addr, pick->ai_addrlen);
    freeaddrinfo(found);
    return 0;
}

/* The address as 16 bytes, IPv4 as v4-mapped. False for other families. */
static bool bytes_of(const struct sockaddr *a, unsigned char out[16])
{
    if (a->sa_family == AF_INET6) {
        memcpy(out, &((const struct sockaddr_in6 *)a)->sin6_addr, 16);
        return true;
    }
    if (a->sa_family != AF_INET)
        return false;
    memset(out, 0, 10);
    out[10] = out[11] = 0xff;
    memcpy(out + 12, &((const struct sockaddr_in *)a)->sin_addr, 4);
    return true;
}

static bool in_network(const unsigned char addr[16], const pl_cidr *c)
{
    int whole = c->bits / 8, rest = c->bits % 8;
    if (memcmp(addr, c->addr, (size_t)whole) != 0)
        return false;
    return rest == 0 || ((addr[whole] ^ c->addr[whole]) >> (8 - rest)) == 0;
}

bool pl_addr_is_loopback(const struct sockaddr *a)
{
    static const pl_cidr v4 = {{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127}, 104};
    static const pl_cidr v6 = {{[15] = 1}, 128};
    unsigned char addr[16];
    return bytes_of(a, addr) && (in_network(addr, &v4) || in_network(addr, &v6));
}

void pl_addr_text(const struct sockaddr *a, char *out, size_t cap)
{
    char host[INET6_ADDRSTRLEN] = "?";
    if (a->sa_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)a;
        inet_ntop(AF_INET, &in->sin_addr, host, sizeof host);
        snprintf(out, cap, "%s:%u", host, ntohs(in->sin_port));
    } else if (a->sa_family == AF_INET6) {
        const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)a;
        inet_ntop(AF_INET6, &in6->sin6_addr, host, sizeof host);
        snprintf(out, cap, "[%s]:%u", host, ntohs(in6->sin6_port));
    } else {
        snprintf(out, cap, "?");
    }
}

int pl_cidr_parse(pl_str s, pl_cidr *out)
{
    char text[INET6_ADDRSTRLEN];
    const char *slash = s.n ? memchr(s.p, '/', s.n) : NULL;
    pl_str addr = {s.p, slash ? (size_t)(slash - s.p) : s.n};
    if (addr.n == 0 || addr.n >= sizeof text || memchr(addr.p, 0, addr.n))
        return PL_ESYNTAX;
    memcpy(text, addr.p, addr.n);
    text[addr.n] = 0;
    uint64_t most, bits;
    if (inet_pton(AF_INET, text, out->addr + 12) == 1) {
        memset(out->addr, 0, 10);
        out->addr[10] = out->addr[11] = 0xff;
        most = 32;
    } else if (inet_pton(AF_INET6, text, out->addr) == 1) {
        most = 128;
    } else {
        return PL_ESYNTAX;
    }
    bits = most;
    if (slash && pl_str_u64((pl_str){slash + 1, s.n - addr.n - 1}, most, &bits) != 0)
        return PL_ESYNTAX;
    out->bits = (int)(bits + 128 - most);
    for (int i = out->bits; i < 128; i++)
        out->addr[i / 8] &= (unsigned char)~(0x80 >> (i % 8));
    return 0;
}

bool pl_cidr_match(const pl_cidr *list, int n, const struct sockaddr *a)
{
    unsigned char addr[16];
    if (n == 0 || !bytes_of(a, addr))
        return false;
    for (int i = 0; i < n; i++)
        if (in_network(addr, &list[i]))
            return true;
    return false;
}
