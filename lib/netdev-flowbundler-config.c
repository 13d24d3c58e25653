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

#include <config.h>

#include "netdev-flowbundler-config.h"

#include "edt-meter.h"
#include "netdev.h"
#include "openvswitch/dynamic-string.h"
#include "openvswitch/json.h"
#include "openvswitch/vlog.h"
#include "shaper-delay.h"
#include "shaper-key.h"
#include "shaper-thread.h"
#include "smap.h"
#include "svec.h"
#include "util.h"

VLOG_DEFINE_THIS_MODULE(netdev_flowbundler_config);

/* Least maximum rate that HTB gives a queue, in bit/s: an MTU a second. */
#define HTB_MIN_RATE_BPS (EDT_MTU_BYTES * 8)

/* HTB's quantum is as many bytes as the minimum rate has in a tenth of a
 * second, but at most this. */
#define HTB_MAX_QUANTUM 200000

/* Packets in the pool of buffers that ports share by default, for advice. */
#define USUAL_POOL 262144

static const struct shaper_key qos_keys[FB_QOS_N_KEYS] = {
    [FB_QOS_MAX_RATE] = { "max-rate", EDT_MIN_RATE_BPS, EDT_MAX_RATE_BPS, 0,
                          false, "bit/s", NULL },
    [FB_QOS_MAX_DELAY] = { "max-delay", 1, EDT_MAX_DELAY_US, 50000,
                           false, "us", NULL },
    [FB_QOS_ECN_THRESHOLD] = { "ecn-threshold", 0, EDT_MAX_DELAY_US - 1, 0,
                               false, "us", NULL },
    [FB_QOS_MAX_BACKLOG] = { "max-backlog", 1, 1 << 24, 1 << 18,
                             false, "packets", NULL },
    [FB_QOS_MAX_BATCH] = { "max-batch", NETDEV_MAX_BURST, 4096, 128, false,
                           "packets", NULL },
    [FB_QOS_MIN_GRANULARITY] = { "min-granularity", 1, 1 << 30, 64,
                                 true, "ns", NULL },
    [FB_QOS_MAX_GRANULARITY] = { "max-granularity", 1, 1 << 30, 65536,
                                 true, "ns", NULL },
    [FB_QOS_MAX_FLOWS] = { "max-flows", 1, 1 << 23, 131072, false, "flows",
                           NULL },
    [FB_QOS_OVERHEAD] = { "overhead", 0, 256, 0, false, "bytes", NULL },
    [FB_QOS_DELAY] = { "delay", 0, SHAPER_MAX_DELAY_US, 0, false, "us",
                       NULL },
    [FB_QOS_JITTER] = { "jitter", 0, SHAPER_MAX_DELAY_US, 0, false, "us",
                        NULL },
};

static const struct shaper_key queue_keys[FB_QUEUE_N_KEYS] = {
    [FB_QUEUE_MAX_RATE] = { "max-rate", EDT_MIN_RATE_BPS, EDT_MAX_RATE_BPS, 0,
                            false, "bit/s", NULL },
    [FB_QUEUE_BURST] = { "burst", 1, EDT_MAX_BURST_BYTES * 8, 0,
                         false, "bits", NULL },
    [FB_QUEUE_MIN_RATE] = { "min-rate", 0, EDT_MAX_RATE_BPS, 0, false,
                            "bit/s", NULL },
    [FB_QUEUE_PRIORITY] = { "priority", 0, UINT32_MAX, 0, false, "0 first",
                            NULL },
    [FB_QUEUE_WEIGHT] = { "weight", 1, 65535, 1, false, "parts", NULL },
};

/* Keys that netdev-linux knows, which come first, are lenient. */
#define LENIENT_QOS_KEYS (FB_QOS_MAX_RATE + 1)
#define LENIENT_QUEUE_KEYS (FB_QUEUE_PRIORITY + 1)

/* A row that is being parsed. */
struct row {
    const char *table;              /* In messages: "QoS", "Queue 1". */
    const struct shaper_key *keys;
    size_t n_keys;
    size_t n_lenient;               /* Of them, to be read as netdev-linux
                                     * does. */
    const uint64_t *before;         /* In force until now, or NULL. */
    uint64_t *values;
    char **why;                     /* For each key, why it is not in force as
                                     * it is, or NULL. */
    struct svec *problems;
};

/* Notes that key 'i' of 'row' is not in force as it is, for the reason 'why',
 * of which it takes ownership, unless there is another reason already. */
static void
set_why(const struct row *row, size_t i, char *why)
{
    if (row->why[i]) {
        free(why);
    } else {
        row->why[i] = why;
    }
}

/* Adds to the problems of 'row' why keys are not in force as they are, and
 * what is in force instead. */
static void
row_finish(const struct row *row)
{
    for (size_t i = 0; i < row->n_keys; i++) {
        const struct shaper_key *key = &row->keys[i];
        const uint64_t value = row->values[i];

        if (row->why[i]) {
            svec_add_nocopy(row->problems,
                            value < key->min
                            ? xasprintf("%s; no %s is in force", row->why[i],
                                        key->name)
                            : xasprintf("%s; %"PRIu64" is in force",
                                        row->why[i], value));
            free(row->why[i]);
        }
    }
}

/* Returns the value of 'key' before, NULL if there was none. */
static const uint64_t *
value_before(const struct row *row, const struct shaper_key *key)
{
    const uint64_t *before = row->before ? &row->before[key - row->keys]
                                         : NULL;

    return before && *before >= key->min ? before : NULL;
}

/* Stores in '*value' the whole part of the number 'text', UINT64_MAX if it is
 * too large.  Returns false if it is not a number. */
static bool
parse_whole_part(const char *text, uint64_t *value)
{
    const char *const decimals = "0123456789";
    const size_t n = strspn(text, decimals);
    const char *rest = text + n;
    unsigned long long int number;
    char *whole;

    if (!n || (rest[0] && (rest[0] != '.'
                           || rest[1 + strspn(rest + 1, decimals)]))) {
        return false;
    }
    whole = xmemdup0(text, n);
    *value = str_to_ullong(whole, 10, &number) ? number : UINT64_MAX;
    free(whole);
    return true;
}

/* Takes 'text' for 'key' as netdev-linux does, if it is a number. */
static bool
take_lenient(const struct row *row, const struct shaper_key *key,
             const char *text)
{
    const bool is_max_rate = key == row->keys;
    uint64_t n;

    BUILD_ASSERT_DECL(FB_QOS_MAX_RATE == 0 && FB_QUEUE_MAX_RATE == 0);
    if (!parse_whole_part(text, &n)) {
        return false;
    }
    if (is_max_rate && n > key->max) {
        n = 0;
    }
    row->values[key - row->keys] = n ? MIN(MAX(n, key->min), key->max) : 0;
    return true;
}

/* Takes 'text' for 'key', or what is next best. */
static void
take(const struct row *row, const struct shaper_key *key, const char *text)
{
    uint64_t *value = &row->values[key - row->keys];

    if (key < row->keys + row->n_lenient && take_lenient(row, key, text)) {
        return;
    }
    if (!shaper_key_parse(key, text, value)) {
        const uint64_t *before = value_before(row, key);

        if (before) {
            *value = *before;
        } else if (!shaper_key_nearest(key, text, value)) {
            *value = key->def;
        }
        set_why(row, key - row->keys,
                shaper_key_bad_value(key, row->table, text));
    }
}

/* Stores what 'details' say in the values of 'row'. */
static void
row_parse(const struct row *row, const struct smap *details)
{
    const struct smap_node **nodes = smap_sort(details);

    for (size_t i = 0; i < row->n_keys; i++) {
        row->values[i] = row->keys[i].def;
    }
    for (size_t i = 0; i < smap_count(details); i++) {
        const char *name = nodes[i]->key, *text = nodes[i]->value;
        const struct shaper_key *key = shaper_key_find(row->keys, row->n_keys,
                                                       name);

        if (key) {
            take(row, key, text);
        } else {
            svec_add_nocopy(row->problems,
                            shaper_key_unknown(row->keys, row->n_keys,
                                               row->table, name, text));
        }
    }
    free(nodes);
}

/* Brings the value of the key with index 'i', which must be from 'min' to
 * 'max' for the sake of others, there: to the one before if that is allowed,
 * otherwise to the nearest.  Returns what it was. */
static uint64_t
confine(const struct row *row, size_t i, uint64_t min, uint64_t max)
{
    const uint64_t *before = value_before(row, &row->keys[i]);
    uint64_t *value = &row->values[i];
    const uint64_t was = *value;

    if (before && *before >= min && *before <= max) {
        *value = *before;
    } else {
        *value = MIN(MAX(was, min), max);
    }
    return was;
}

/* Notes that key 'i' of 'row' must not be 'was', as 'format' says. */
static void OVS_PRINTF_FORMAT(4, 5)
add_conflict(const struct row *row, size_t i, uint64_t was,
             const char *format, ...)
{
    const struct shaper_key *key = &row->keys[i];
    struct ds s = DS_EMPTY_INITIALIZER;
    va_list args;

    ds_put_format(&s, "%s other_config:%s=\"%"PRIu64"\": must ", row->table,
                  key->name, was);
    va_start(args, format);
    ds_put_format_valist(&s, format, args);
    va_end(args);
    set_why(row, i, ds_steal_cstr(&s));
}

/* Confines the delay of 'row' to what there is room for, if the port's rate
 * says how much that is, and its jitter to the delay. */
static void
check_delay(const struct row *row)
{
    const uint64_t rate = row->values[FB_QOS_MAX_RATE];
    const uint64_t backlog = row->values[FB_QOS_MAX_BACKLOG];
    uint64_t *delay = &row->values[FB_QOS_DELAY];
    uint64_t *jitter = &row->values[FB_QOS_JITTER];
    uint64_t was, packets;

    if (*jitter > *delay) {
        was = confine(row, FB_QOS_JITTER, 0, *delay);
        add_conflict(row, FB_QOS_JITTER, was, "not be more than delay "
                     "(%"PRIu64" us)", *delay);
    }
    packets = shaper_delay_packets(rate, *delay + *jitter);
    if (packets > backlog) {
        uint64_t room = shaper_delay_us(rate, backlog);

        uint64_t was_jitter = *jitter;

        /* Half of it is room for as much jitter. */
        was = confine(row, FB_QOS_DELAY, *jitter,
                      MAX(room - MIN(*jitter, room), room / 2));
        *jitter = MIN(*jitter, room / 2);
        *delay = MIN(*delay, room - *jitter);
        if (*jitter < was_jitter) {
            add_conflict(row, FB_QOS_JITTER, was_jitter,
                         "not be more than delay (%"PRIu64" us)", *delay);
        }
        add_conflict(row, FB_QOS_DELAY, was, "not be so long that, with "
                     "jitter, more than max-backlog (%"PRIu64" packets) are "
                     "on their way at max-rate (%"PRIu64" bit/s): there would "
                     "be %"PRIu64" of %d bytes, %"PRIu64" us have room",
                     backlog, rate, packets, EDT_MTU_BYTES, room);
    }
}

static const char *const types[FB_N_DIALECTS] = {
    [FB_NATIVE] = "flowbundler",
    [FB_HTB] = "linux-htb",
    [FB_HFSC] = "linux-hfsc",
};

/* Returns the QoS type of rows of 'dialect'. */
const char *
fb_dialect_type(enum fb_dialect dialect)
{
    return types[dialect];
}

/* Stores in '*dialect' how rows of QoS type 'type' are read.  Returns false if
 * they are not. */
bool
fb_dialect_from_type(const char *type, enum fb_dialect *dialect)
{
    for (size_t i = 0; i < FB_N_DIALECTS; i++) {
        if (!strcmp(type, types[i])) {
            *dialect = i;
            return true;
        }
    }
    return false;
}

/* Parses 'details', other_config of a QoS row of 'dialect', into 'values'.
 * 'before' has what is in force until now, or is NULL if nothing is.
 * Adds to 'problems' a message for each key that is not in force as it is. */
void
fb_qos_parse(enum fb_dialect dialect, const struct smap *details,
             const uint64_t *before, uint64_t values[FB_QOS_N_KEYS],
             struct svec *problems)
{
    char *why[FB_QOS_N_KEYS] = { NULL };
    const struct row row = {
        "QoS", qos_keys, FB_QOS_N_KEYS,
        dialect == FB_NATIVE ? 0 : LENIENT_QOS_KEYS,
        before, values, why, problems
    };
    uint64_t was;

    row_parse(&row, details);
    if (values[FB_QOS_MAX_GRANULARITY] < values[FB_QOS_MIN_GRANULARITY]) {
        was = confine(&row, FB_QOS_MAX_GRANULARITY,
                      values[FB_QOS_MIN_GRANULARITY], UINT64_MAX);
        add_conflict(&row, FB_QOS_MAX_GRANULARITY, was, "not be less than "
                     "min-granularity (%"PRIu64" ns)",
                     values[FB_QOS_MIN_GRANULARITY]);
    }
    if (values[FB_QOS_ECN_THRESHOLD] >= values[FB_QOS_MAX_DELAY]) {
        was = confine(&row, FB_QOS_ECN_THRESHOLD, 0,
                      values[FB_QOS_MAX_DELAY] - 1);
        add_conflict(&row, FB_QOS_ECN_THRESHOLD, was, "be less than max-delay "
                     "(%"PRIu64" us)", values[FB_QOS_MAX_DELAY]);
    }
    check_delay(&row);
    row_finish(&row);
}

/* Shows the value of 'key' as text in 's' and as a member of 'object'. */
static void
show_value(const struct shaper_key *key, uint64_t value, struct ds *s,
           struct json *object)
{
    ds_put_format(s, " %s=%"PRIu64, key->name, value);
    json_object_put(object, key->name, json_integer_create(value));
}

/* Shows 'values', which are in force, as text in 's' and as members of
 * 'object'. */
void
fb_qos_show(const uint64_t values[FB_QOS_N_KEYS], struct ds *s,
            struct json *object)
{
    for (size_t i = 0; i < FB_QOS_N_KEYS; i++) {
        if (values[i] || (i != FB_QOS_MAX_RATE && i != FB_QOS_ECN_THRESHOLD
                          && i != FB_QOS_DELAY && i != FB_QOS_JITTER)) {
            show_value(&qos_keys[i], values[i], s, object);
        }
    }
}

/* Warns if the port 'name' with 'values' is to delay more packets than it gets
 * buffers for from a pool of the usual size. */
void
fb_qos_warn_of_delay(const char *name, const uint64_t values[FB_QOS_N_KEYS])
{
    const uint64_t total_us = values[FB_QOS_DELAY] + values[FB_QOS_JITTER];
    const uint64_t packets = shaper_delay_packets(values[FB_QOS_MAX_RATE],
                                                  total_us);
    const uint32_t room = shaper_thread_port_share(USUAL_POOL);

    if (packets > room) {
        VLOG_WARN("%s: with delay=\"%"PRIu64"\" %"PRIu64" packets of %d bytes "
                  "are on their way at max-rate, but those received at one "
                  "port get %"PRIu32" of a pool of %d buffers; others are "
                  "dropped (\"budget\")", name, values[FB_QOS_DELAY], packets,
                  EDT_MTU_BYTES, room, USUAL_POOL);
    }
}

/* Brings 'values' in line with each other as netdev-linux does. */
static void
htb_adjust(uint64_t values[FB_QUEUE_N_KEYS])
{
    if (values[FB_QUEUE_MAX_RATE]) {
        values[FB_QUEUE_MAX_RATE] = MAX(MAX(values[FB_QUEUE_MAX_RATE],
                                            values[FB_QUEUE_MIN_RATE]),
                                        HTB_MIN_RATE_BPS);
    } else {
        values[FB_QUEUE_BURST] = 0;
    }
}

/* Parses 'details', other_config of the Queue row of queue 'queue_id', as
 * fb_qos_parse() does. */
void
fb_queue_parse(enum fb_dialect dialect, unsigned int queue_id,
               const struct smap *details, const uint64_t *before,
               uint64_t values[FB_QUEUE_N_KEYS], struct svec *problems)
{
    char *table = xasprintf("Queue %u", queue_id);
    char *why[FB_QUEUE_N_KEYS] = { NULL };
    const struct row row = {
        table, queue_keys, FB_QUEUE_N_KEYS,
        dialect == FB_NATIVE ? 0 : LENIENT_QUEUE_KEYS,
        before, values, why, problems
    };

    row_parse(&row, details);
    if (dialect != FB_NATIVE) {
        htb_adjust(values);
    }
    if (values[FB_QUEUE_BURST] && !values[FB_QUEUE_MAX_RATE]) {
        uint64_t was = values[FB_QUEUE_BURST];

        values[FB_QUEUE_BURST] = 0;
        add_conflict(&row, FB_QUEUE_BURST, was, "not be set without max-rate");
    }
    if (values[FB_QUEUE_MAX_RATE]
        && values[FB_QUEUE_MIN_RATE] > values[FB_QUEUE_MAX_RATE]) {
        uint64_t was = confine(&row, FB_QUEUE_MIN_RATE, 0,
                               values[FB_QUEUE_MAX_RATE]);

        add_conflict(&row, FB_QUEUE_MIN_RATE, was, "not be more than max-rate "
                     "(%"PRIu64" bit/s)", values[FB_QUEUE_MAX_RATE]);
    }
    row_finish(&row);
    free(table);
}

/* Shows 'values', which are in force, as text in 's' and as members of
 * 'object'. */
void
fb_queue_show(const uint64_t values[FB_QUEUE_N_KEYS], struct ds *s,
              struct json *object)
{
    for (size_t i = 0; i < FB_QUEUE_N_KEYS; i++) {
        if (values[i] != queue_keys[i].def) {
            show_value(&queue_keys[i], values[i], s, object);
        }
    }
}

/* Returns a message, which the caller must free, if 'n' queues with minimum
 * rates of 'sum_bps' bit/s in all belong to a port of 'max_bps' bit/s (0: no
 * limit), which is too little, otherwise NULL. */
char *
fb_queue_minima_error(size_t n, uint64_t sum_bps, uint64_t max_bps)
{
    return (max_bps && sum_bps > max_bps
            ? xasprintf("Queue other_config:min-rate of %"PRIuSIZE" queues, "
                        "%"PRIu64" bit/s in all: must not be more than "
                        "max-rate of the port (%"PRIu64" bit/s); while all "
                        "need it, each gets %.1f %% of its own", n, sum_bps,
                        max_bps, 100.0 * max_bps / sum_bps)
            : NULL);
}

/* Stores in '*limits' what 'values' of a row of 'dialect' say. */
void
fb_queue_limits(enum fb_dialect dialect,
                const uint64_t values[FB_QUEUE_N_KEYS],
                struct edt_class_limits *limits)
{
    uint64_t quantum = MAX(values[FB_QUEUE_MIN_RATE] / 80, EDT_MTU_BYTES);

    *limits = EDT_CLASS_LIMITS_DEFAULT;
    limits->priority = values[FB_QUEUE_PRIORITY];
    limits->weight = values[FB_QUEUE_WEIGHT];
    if (dialect != FB_NATIVE) {
        if (dialect == FB_HTB) {
            quantum = MIN(quantum, HTB_MAX_QUANTUM);
        }
        limits->weight = MIN(limits->weight * quantum, UINT32_MAX);
    }
    limits->min_bps = values[FB_QUEUE_MIN_RATE];
    limits->max_bps = values[FB_QUEUE_MAX_RATE];
    limits->burst_bytes = DIV_ROUND_UP(values[FB_QUEUE_BURST], 8);
}
