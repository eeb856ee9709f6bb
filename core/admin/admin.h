/* The admin API on its own port, on the control loop: engines, policy reload, status, metrics. JSON
 * in and out; errors are {"error":{"code","message","stage"?,"file"?,"line"?}}. */
#ifndef PL_ADMIN_H
#define PL_ADMIN_H

#include "router.h"

typedef struct pl_admin pl_admin;

int pl_admin_start(pl_router *r, pl_admin **out, pl_errbuf *eb);
/* Closes the listener and all connections; frees when the loop has run. */
void pl_admin_stop(pl_admin *a);

#endif
