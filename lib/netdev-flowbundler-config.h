/*
 * Copyright (c) 2026 The FlowBundler authors.
 *
 * Licensed under the Apache License, Version 2.0 (the "License");
 * you may not use this file except in compliance with the License.
 * You may obtain a copy of the License at:
 *
 *     http://www.apache.org/licenses/LICENSE-2.0
 *
 * Unless required by applicable law or agreed to in writing, software
 * distributed under the License is distributed on an "AS IS" BASIS,
 * WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
 * See the License for the specific language governing permissions and
 * limitations under the License.
 */

#ifndef NETDEV_FLOWBUNDLER_CONFIG_H
#define NETDEV_FLOWBUNDLER_CONFIG_H 1

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "edt-pace.h"

struct ds;
struct json;
struct smap;
struct svec;

/* What QoS and Queue rows of type "flowbundler" say
 * =================================================
 *
 * Turns other_config of a row into numbers, one for each key.  A row is never
 * refused as a whole: what can be honoured is in force, and for each of the
 * rest there is a message that names key, value, what is allowed, and what is
 * in force instead.
 *
 *  * A key that does not exist is ignored.
 *
 *  * A value that is not allowed leaves the one in force that the key has had,
 *    'before'.  If there was none, the nearest that is allowed comes into
 *    force.  What is not a number has none that is near: then the key is taken
 *    as not set.
 *
 *  * Of values that do not go together, such as a jitter above the delay, the
 *    one that the reference says "must not" of is the one that is not allowed.
 *
 * So parsing the same row again, with what is in force as 'before', changes
 * nothing.
 *
 * Rows that say "linux-htb" or "linux-hfsc" are read as netdev-linux reads
 * them, where it differs: a rate or burst of 0 is one that is not set, a
 * fraction of a number is left out, a rate above all that we have is none, a
 * maximum is at least the minimum and an MTU a second, a burst without a
 * maximum says nothing.  All keys of "flowbundler" may be in these rows, too.
 * What is left of a port's rate is shared as HTB's quantum does, or as HFSC's
 * link sharing: in proportion to "min-rate", at least an MTU.
 *
 * Thread-safety: none is needed, these functions keep no state. */

/* QoS types that rows may have. */
enum fb_dialect {
    FB_NATIVE,                      /* "flowbundler". */
    FB_HTB,                         /* "linux-htb". */
    FB_HFSC,                        /* "linux-hfsc". */
    FB_N_DIALECTS
};

/* Keys of QoS rows. */
enum fb_qos_key {
    FB_QOS_MAX_RATE,                /* bit/s, 0: none. */
    FB_QOS_MAX_DELAY,               /* us. */
    FB_QOS_ECN_THRESHOLD,           /* us, 0: none. */
    FB_QOS_MAX_BACKLOG,             /* Packets. */
    FB_QOS_MAX_BATCH,               /* Packets. */
    FB_QOS_MIN_GRANULARITY,         /* ns. */
    FB_QOS_MAX_GRANULARITY,         /* ns. */
    FB_QOS_MAX_FLOWS,
    FB_QOS_OVERHEAD,                /* Bytes. */
    FB_QOS_DELAY,                   /* us. */
    FB_QOS_JITTER,                  /* us. */
    FB_QOS_N_KEYS
};

/* Keys of Queue rows. */
enum fb_queue_key {
    FB_QUEUE_MAX_RATE,              /* bit/s, 0: none. */
    FB_QUEUE_BURST,                 /* bits, 0: an MTU. */
    FB_QUEUE_MIN_RATE,              /* bit/s, 0: none. */
    FB_QUEUE_PRIORITY,              /* 0 first. */
    FB_QUEUE_WEIGHT,
    FB_QUEUE_N_KEYS
};

const char *fb_dialect_type(enum fb_dialect);
bool fb_dialect_from_type(const char *type, enum fb_dialect *);

void fb_qos_parse(enum fb_dialect, const struct smap *details,
                  const uint64_t *before, uint64_t values[FB_QOS_N_KEYS],
                  struct svec *problems);
void fb_qos_show(const uint64_t values[FB_QOS_N_KEYS], struct ds *,
                 struct json *object);
void fb_qos_warn_of_delay(const char *name,
                          const uint64_t values[FB_QOS_N_KEYS]);

void fb_queue_parse(enum fb_dialect, unsigned int queue_id,
                    const struct smap *details, const uint64_t *before,
                    uint64_t values[FB_QUEUE_N_KEYS], struct svec *problems);
void fb_queue_show(const uint64_t values[FB_QUEUE_N_KEYS], struct ds *,
                   struct json *object);
char *fb_queue_minima_error(size_t n, uint64_t sum_bps, uint64_t max_bps);
void fb_queue_limits(enum fb_dialect, const uint64_t values[FB_QUEUE_N_KEYS],
                     struct edt_class_limits *);

#endif /* netdev-flowbundler-config.h */
