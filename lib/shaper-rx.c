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

#include "shaper-rx.h"

#include "coverage.h"
#include "dp-packet.h"
#include "edt-chains.h"
#include "edt-late.h"
#include "edt-meter.h"
#include "edt-stamp.h"
#include "netdev-provider.h"
#include "openvswitch/dynamic-string.h"
#include "openvswitch/json.h"
#include "openvswitch/list.h"
#include "openvswitch/vlog.h"
#include "ovs-atomic.h"
#include "ovs-rcu.h"
#include "ovs-thread.h"
#include "packets.h"
#include "shaper-delay.h"
#include "shaper-key.h"
#include "smap.h"
#include "sset.h"
#include "timeval.h"
#include "util.h"

VLOG_DEFINE_THIS_MODULE(shaper_rx);

COVERAGE_DEFINE(datapath_drop_shaper_rx);

/* Packets that a delay must have room for: the buffers of a pool, of which the
 * port takes those that it receives in. */
#define MAX_DELAYED_PACKETS 262144

/* What packets need to know.  Immutable once published. */
struct shaper_rx_params {
    struct shaper_delay delay;
    uint64_t delay_bytes;           /* On their way at the port's rate. */
    uint64_t order_until_ns;        /* Without rate and delay, packets have to
                                     * keep behind others until then. */
};

struct shaper_rx {
    /* Read for each batch. */
    OVSRCU_TYPE(struct shaper_rx_params *) params;
    uint32_t id;                    /* In stamps. */

    struct ovs_list node;           /* In 'all_rx'. */
    struct netdev *netdev;
    struct edt_chains *chains;
    uint64_t values[5];             /* In force, by enum rx_key. */
    char *error;                    /* What was refused, or NULL. */

    /* Written by all threads that receive from the port. */
    OVS_ALIGNED_VAR(CACHE_LINE_SIZE) struct edt_meter meter;
    OVS_ALIGNED_VAR(CACHE_LINE_SIZE) atomic_uint64_t n_dropped;
    atomic_uint64_t n_dropped_bytes;
};

/* Protects the list, and what is neither atomic nor under RCU. */
static struct ovs_mutex all_rx_mutex = OVS_MUTEX_INITIALIZER;
static struct ovs_list all_rx OVS_GUARDED_BY(all_rx_mutex)
    = OVS_LIST_INITIALIZER(&all_rx);

/* Configuration. */

enum rx_key {
    RX_RATE,
    RX_BURST,
    RX_MAX_DELAY,
    RX_DELAY,
    RX_JITTER,
    RX_N_KEYS
};

static const struct shaper_key rx_keys[RX_N_KEYS] = {
    [RX_RATE] = { "shaper-rx-rate", EDT_MIN_RATE_BPS, EDT_MAX_RATE_BPS, 0,
                  false, "bit/s", NULL },
    [RX_BURST] = { "shaper-rx-burst", 1, EDT_MAX_BURST_BYTES, 0, false,
                   "bytes", NULL },
    [RX_MAX_DELAY] = { "shaper-rx-max-delay", 1, EDT_MAX_DELAY_US, 50000,
                       false, "us", NULL },
    [RX_DELAY] = { "shaper-rx-delay", 0, SHAPER_MAX_DELAY_US, 0, false, "us",
                   NULL },
    [RX_JITTER] = { "shaper-rx-jitter", 0, SHAPER_MAX_DELAY_US, 0, false, "us",
                    NULL },
};
BUILD_ASSERT_DECL(RX_N_KEYS
                  == ARRAY_SIZE(((struct shaper_rx *) NULL)->values));

/* Parses 'cfg', other_config of an Interface, into 'values'.  Returns NULL if
 * successful, otherwise what is wrong, which the caller must free. */
static char *
rx_parse(const struct smap *cfg, uint64_t *values)
{
    const char *const table = "Interface";
    uint64_t packets;

    for (size_t i = 0; i < RX_N_KEYS; i++) {
        const struct shaper_key *key = &rx_keys[i];
        const char *value = smap_get(cfg, key->name);

        values[i] = key->def;
        if (value && !shaper_key_parse(key, value, &values[i])) {
            return shaper_key_bad_value(key, table, value);
        }
        if (value && !values[RX_RATE] && (i == RX_BURST
                                          || i == RX_MAX_DELAY)) {
            return xasprintf("%s other_config:%s=\"%s\": must not be set "
                             "without %s", table, key->name, value,
                             rx_keys[RX_RATE].name);
        }
    }
    if (values[RX_JITTER] > values[RX_DELAY]) {
        return xasprintf("%s other_config:%s=\"%"PRIu64"\": must not be more "
                         "than %s (%"PRIu64" us)", table,
                         rx_keys[RX_JITTER].name, values[RX_JITTER],
                         rx_keys[RX_DELAY].name, values[RX_DELAY]);
    }
    packets = shaper_delay_packets(values[RX_RATE],
                                   values[RX_DELAY] + values[RX_JITTER]);
    if (packets > MAX_DELAYED_PACKETS) {
        return xasprintf("%s other_config:%s=\"%"PRIu64"\": must not be so "
                         "long that, with jitter, more than %d packets are on "
                         "their way at %s (%"PRIu64" bit/s), for which there "
                         "are buffers: there would be %"PRIu64" of %d bytes, "
                         "%"PRIu64" us have room",
                         table, rx_keys[RX_DELAY].name, values[RX_DELAY],
                         MAX_DELAYED_PACKETS, rx_keys[RX_RATE].name,
                         values[RX_RATE], packets, EDT_MTU_BYTES,
                         shaper_delay_us(values[RX_RATE],
                                         MAX_DELAYED_PACKETS));
    }
    return NULL;
}

/* Returns true if 'cfg' says anything about what is received. */
static bool
rx_has_keys(const struct smap *cfg)
{
    for (size_t i = 0; i < RX_N_KEYS; i++) {
        if (smap_get(cfg, rx_keys[i].name)) {
            return true;
        }
    }
    return false;
}

static struct shaper_rx *
rx_create(struct edt_chains *chains, struct netdev *netdev)
{
    static atomic_count next_id = ATOMIC_COUNT_INIT(SHAPER_RX_MIN_ID);
    struct shaper_rx *rx = xzalloc_cacheline(sizeof *rx);

    ovsrcu_init(&rx->params, xzalloc(sizeof(struct shaper_rx_params)));
    rx->id = atomic_count_inc(&next_id);
    rx->netdev = netdev_ref(netdev);
    rx->chains = chains;
    for (size_t i = 0; i < RX_N_KEYS; i++) {
        rx->values[i] = rx_keys[i].def;
    }
    edt_meter_init(&rx->meter, NULL);
    edt_meter_reset(&rx->meter, time_nsec());
    atomic_init(&rx->n_dropped, 0);
    atomic_init(&rx->n_dropped_bytes, 0);

    ovs_mutex_lock(&all_rx_mutex);
    ovs_list_push_back(&all_rx, &rx->node);
    ovs_mutex_unlock(&all_rx_mutex);
    return rx;
}

/* Frees 'rx' (which may be NULL), which no thread uses any more. */
void
shaper_rx_destroy(struct shaper_rx *rx)
{
    if (rx) {
        ovs_mutex_lock(&all_rx_mutex);
        ovs_list_remove(&rx->node);
        ovs_mutex_unlock(&all_rx_mutex);
        edt_chains_remove(rx->chains, rx->id);
        edt_meter_destroy(&rx->meter);
        free(ovsrcu_get_protected(struct shaper_rx_params *, &rx->params));
        netdev_close(rx->netdev);
        free(rx->error);
        free_cacheline(rx);
    }
}

/* Makes 'rx' follow 'values'.  What has been promised to packets stays as it
 * is, and the schedule goes on from there. */
static void
rx_apply(struct shaper_rx *rx, const uint64_t *values)
{
    const struct edt_limits limits = {
        .rate = values[RX_RATE],
        .burst = values[RX_BURST],
        .max_delay_us = values[RX_MAX_DELAY],
    };
    struct shaper_rx_params *params = xzalloc(sizeof *params);
    struct shaper_rx_params *old
        = ovsrcu_get_protected(struct shaper_rx_params *, &rx->params);
    uint64_t longest_us = rx->values[RX_DELAY] + rx->values[RX_JITTER];
    uint64_t now_ns = time_nsec();

    if (rx->values[RX_RATE]) {
        longest_us += rx->values[RX_MAX_DELAY];
    }
    shaper_delay_init(&params->delay, values[RX_DELAY], values[RX_JITTER]);
    params->delay_bytes = values[RX_RATE] / 8
                          * (values[RX_DELAY] + values[RX_JITTER]) / 1000000;
    params->order_until_ns = MAX(old->order_until_ns,
                                 now_ns + longest_us * 1000);
    ovsrcu_set(&rx->params, params);
    ovsrcu_postpone(free, old);
    edt_meter_set_params(&rx->meter,
                         limits.rate ? edt_params_create(&limits) : NULL,
                         now_ns);
    memcpy(rx->values, values, sizeof rx->values);
}

/* Brings 'rx', the shaping of what is received from 'netdev' (NULL if there
 * has been none), in line with 'cfg', other_config of its Interface.  'chains'
 * are those of the port's datapath, which must outlive it.  Returns
 * what the port has from now on: 'rx', if that is not NULL.  If 'cfg' is not
 * allowed, nothing changes but the status, and there is a message in the log.
 * The caller owns the result. */
struct shaper_rx *
shaper_rx_update(struct shaper_rx *rx, struct edt_chains *chains,
                 struct netdev *netdev, const struct smap *cfg)
{
    uint64_t values[RX_N_KEYS];
    char *error;

    if (!rx && !rx_has_keys(cfg)) {
        return NULL;
    }

    rx = rx ? rx : rx_create(chains, netdev);
    error = rx_parse(cfg, values);
    ovs_mutex_lock(&all_rx_mutex);
    if (!error && memcmp(values, rx->values, sizeof values)) {
        rx_apply(rx, values);
    }
    if (!nullable_string_is_equal(error, rx->error)) {
        if (error) {
            VLOG_WARN("%s: %s", netdev_get_name(netdev), error);
        }
        free(rx->error);
        rx->error = error;
        netdev_change_seq_changed(netdev);
    } else {
        free(error);
    }
    ovs_mutex_unlock(&all_rx_mutex);
    return rx;
}

/* Packets. */

/* Does what edt_stamp_batch() does, without a rate: the first 'room' packets
 * of 'batch' may go on now. */
static void
rx_stamp_now(const struct shaper_rx *rx, struct dp_packet_batch *batch,
             uint32_t room, uint64_t now_ns, struct edt_stamp_result *result)
{
    const size_t n = dp_packet_batch_size(batch);
    struct dp_packet *packet;
    size_t i;

    result->n_packets = n;
    DP_PACKET_BATCH_REFILL_FOR_EACH (i, n, packet, batch) {
        uint32_t bytes = dp_packet_size(packet);

        result->n_bytes += bytes;
        if (OVS_UNLIKELY(i >= room)) {
            result->n_dropped++;
            result->n_dropped_bytes += bytes;
            dp_packet_delete(packet);
            continue;
        }
        pkt_metadata_set_edt(&packet->md, &(struct edt_stamp) {
            .edt_ns = now_ns,
            .chain = rx->id,
            .flags = EDT_PROMISED,
        });
        dp_packet_batch_add(batch, packet);
    }
}

/* Gives the packets of 'batch', which have just been received at 'source' from
 * 'port_no' by the thread with 'thread' and 'thread_id' (as for
 * edt_meter_count()), their times, after it has initialized their metadata.
 * Drops and counts those at the end that would have to wait for too long, or
 * that shapers have no room for.  Returns false, having done nothing, if there
 * is nothing to do. */
bool
shaper_rx_stamp(struct shaper_rx *rx, struct dp_packet_batch *batch,
                odp_port_t port_no, struct shaper_thread *thread,
                struct shaper_source source, uint32_t thread_id,
                uint64_t now_ns)
{
    const struct shaper_rx_params *params
        = ovsrcu_get(struct shaper_rx_params *, &rx->params);
    const struct edt_params *edt = edt_meter_params(&rx->meter);
    struct edt_stamp_result result = { 0, 0, 0, 0 };
    struct dp_packet *packet;
    uint32_t room;

    if (!edt && !params->delay.delay_ns && now_ns > params->order_until_ns) {
        return false;
    }

    DP_PACKET_BATCH_FOR_EACH (i, packet, batch) {
        pkt_metadata_init(&packet->md, port_no);
    }
    room = shaper_thread_admit(thread, batch, source, rx->id);
    if (edt) {
        struct edt_chain chain = { .n = 0 };

        edt_stamp_batch(thread->chains, &chain, &rx->meter, edt, rx->id, batch,
                        room, now_ns, &result);
    } else {
        rx_stamp_now(rx, batch, room, now_ns, &result);
    }
    if (OVS_UNLIKELY(result.n_dropped)) {
        uint64_t orig;

        atomic_add_relaxed(&rx->n_dropped, result.n_dropped, &orig);
        atomic_add_relaxed(&rx->n_dropped_bytes, result.n_dropped_bytes,
                           &orig);
        COVERAGE_ADD(datapath_drop_shaper_rx, result.n_dropped);
    }
    edt_meter_count(&rx->meter, thread_id, result.n_packets, result.n_bytes);

    if (params->delay.delay_ns) {
        DP_PACKET_BATCH_FOR_EACH (i, packet, batch) {
            struct edt_stamp *stamp = &packet->md.edt;

            /* That of a burst may be in the past. */
            stamp->edt_ns = MAX(stamp->edt_ns, now_ns);
            stamp->edt_ns += shaper_delay_ns(&params->delay, packet,
                                             stamp->edt_ns);
        }
    }
    return true;
}

/* Returns the number of bytes that may be on their way for the delay of 'rx'
 * at its rate, 0 without one.  These are no reason to hold a receive queue
 * back. */
uint64_t
shaper_rx_delay_bytes(const struct shaper_rx *rx)
{
    return ovsrcu_get(struct shaper_rx_params *, &rx->params)->delay_bytes;
}

/* Showing. */

static const struct shaper_rx *
rx_find(const char *name)
    OVS_REQUIRES(all_rx_mutex)
{
    const struct shaper_rx *rx;

    LIST_FOR_EACH (rx, node, &all_rx) {
        if (!strcmp(name, netdev_get_name(rx->netdev))) {
            return rx;
        }
    }
    return NULL;
}

/* Adds to 'smap', an Interface's status, which of its other_config was refused
 * for 'netdev'. */
void
shaper_rx_get_status(const struct netdev *netdev, struct smap *smap)
{
    const struct shaper_rx *rx;

    ovs_mutex_lock(&all_rx_mutex);
    rx = rx_find(netdev_get_name(netdev));
    if (rx && rx->error) {
        smap_add(smap, "shaper_rx_error", rx->error);
    }
    ovs_mutex_unlock(&all_rx_mutex);
}

/* Appends what users know as 'id', that of a meter in the datapath or of a
 * port. */
void
shaper_rx_format_id(struct ds *s, uint32_t id)
{
    const char *name = "gone";
    const struct shaper_rx *rx;

    if (id < SHAPER_RX_MIN_ID) {
        ds_put_format(s, "%"PRIu32, id);
        return;
    }
    ovs_mutex_lock(&all_rx_mutex);
    LIST_FOR_EACH (rx, node, &all_rx) {
        if (rx->id == id) {
            name = netdev_get_name(rx->netdev);
            break;
        }
    }
    ds_put_format(s, "rx(%s)", name);
    ovs_mutex_unlock(&all_rx_mutex);
}

/* Adds the names of all ports that shaper_rx_show() is for to 'names'. */
void
shaper_rx_get_names(struct sset *names)
{
    const struct shaper_rx *rx;

    ovs_mutex_lock(&all_rx_mutex);
    LIST_FOR_EACH (rx, node, &all_rx) {
        if (rx->error || rx->values[RX_RATE] || rx->values[RX_DELAY]) {
            sset_add(names, netdev_get_name(rx->netdev));
        }
    }
    ovs_mutex_unlock(&all_rx_mutex);
}

/* Returns by how many ns the schedule of 'rx' is ahead of 'now_ns'. */
static uint64_t
rx_ahead_ns(const struct shaper_rx *rx, uint64_t now_ns)
{
    const uint64_t now = now_ns << EDT_TICK_SHIFT;
    const struct edt_params *p = edt_meter_params(&rx->meter);
    uint64_t start = p ? edt_meter_pace_start(&rx->meter, p, now_ns, 0) : now;
    int64_t ahead = start - now;

    return MAX(ahead, 0) >> EDT_TICK_SHIFT;
}

/* Shows what is received from the port 'name' as text in 's' and as member
 * "received" of 'object'. */
void
shaper_rx_show(const char *name, struct ds *s, struct json *object)
{
    const struct shaper_rx *rx;

    ovs_mutex_lock(&all_rx_mutex);
    rx = rx_find(name);
    if (rx) {
        struct json *json = json_object_create();
        struct json *config = json_object_create();
        uint64_t packets, bytes, dropped, dropped_bytes;
        uint64_t ahead_ns = rx_ahead_ns(rx, time_nsec());

        edt_meter_get_counts(&rx->meter, &packets, &bytes);
        atomic_read_relaxed(&CONST_CAST(struct shaper_rx *, rx)->n_dropped,
                            &dropped);
        atomic_read_relaxed(&CONST_CAST(struct shaper_rx *,
                                        rx)->n_dropped_bytes, &dropped_bytes);

        if (rx->error) {
            ds_put_format(s, "  refused: %s\n", rx->error);
            json_object_put_string(json, "refused", rx->error);
        }
        ds_put_cstr(s, "  receives:");
        for (size_t i = 0; i < RX_N_KEYS; i++) {
            if (rx->values[i] && (i != RX_MAX_DELAY || rx->values[RX_RATE])) {
                ds_put_format(s, " %s=%"PRIu64, rx_keys[i].name,
                              rx->values[i]);
                json_object_put(config, rx_keys[i].name,
                                json_integer_create(rx->values[i]));
            }
        }
        ds_put_format(s, "\n    received: %"PRIu64" packets, %"PRIu64" bytes\n"
                      "    dropped: %"PRIu64" packets, %"PRIu64" bytes\n"
                      "    waiting: %"PRIu64" ns for the rate\n",
                      packets, bytes, dropped, dropped_bytes, ahead_ns);
        json_object_put(json, "config", config);
        json_object_put(json, "packets", json_integer_create(packets));
        json_object_put(json, "bytes", json_integer_create(bytes));
        json_object_put(json, "dropped", json_integer_create(dropped));
        json_object_put(json, "dropped_bytes",
                        json_integer_create(dropped_bytes));
        json_object_put(json, "waiting_ns", json_integer_create(ahead_ns));
        json_object_put(object, "received", json);
    }
    ovs_mutex_unlock(&all_rx_mutex);
}
