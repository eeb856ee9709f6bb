/* What the feed asks of an index beyond storing and removing, answered by the real one. */
#ifndef PL_KNOWN_H
#define PL_KNOWN_H

#include "kv/apply.h"

/* For pl_feed_options.known and pl_apply_new: for the same index, which must outlive them. */
pl_known pl_known_of(pl_index *ix);

#endif
