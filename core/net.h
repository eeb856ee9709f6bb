/* Addresses: what is listened on, who is loopback, which client networks are trusted. */
#ifndef PL_NET_H
#define PL_NET_H

#include <stdbool.h>
#include <sys/socket.h>

#include "base/err.h"
#include "base/str.h"

/* "host:port" / "[v6]:port" / ":port" (loopback) to an address; names are resolved (blocking:
 * start-up only). */
int pl_parse_listen(pl_str s, struct sockaddr_storage *out, pl_errbuf *eb);
bool pl_addr_is_loopback(const struct sockaddr *a);
/* The address as text: 127.0.0.1:8000 or [::1]:8000. */
void pl_addr_text(const struct sockaddr *a, char *out, size_t cap);

typedef struct pl_cidr {
    unsigned char addr[16]; /* IPv4 as v4-mapped */
    int bits;               /* of 128 */
} pl_cidr;

/* "10.0.0.0/8", "fd00::/8", or one address. Bits behind the prefix are cleared. */
int pl_cidr_parse(pl_str s, pl_cidr *out);
bool pl_cidr_match(const pl_cidr *list, int n, const struct sockaddr *a);

#endif
