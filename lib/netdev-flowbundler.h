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

#ifndef NETDEV_FLOWBUNDLER_H
#define NETDEV_FLOWBUNDLER_H 1

#include <stdbool.h>
#include <stdint.h>

#include "flow-shaper.h"
#include "hmapx.h"
#include "netdev-flowbundler-config.h"
#include "netdev-provider.h"
#include "openvswitch/hmap.h"
#include "ovs-atomic.h"
#include "ovs-rcu.h"
#include "ovs-thread.h"
#include "smap.h"
#include "svec.h"

struct dp_packet_batch;
struct netdev_stats;
struct sset;

/* QoS type "flowbundler"
 * ======================
 *
 * Offered for each port of the userspace datapath, whatever its netdev class,
 * because it acts where dpif-netdev hands packets to netdevs: a netdev carries
 * only the configuration and the list of shapers ("flow-shaper.h") that
 * threads have made for it.  See ovs-vswitchd.conf.db(5) for the keys.
 *
 * Configuration
 * -------------
 *
 *  The first group of functions are what netdev.c calls for this QoS type.
 *  They are called by the main thread, and have the contracts of the functions
 *  of 'struct netdev_class' with the same names, but that no row is refused
 *  for what it says: what can be honoured is in force
 *  ("netdev-flowbundler-config.h"), and the rest, all of it, is in "ovs-appctl
 *  flowbundler/show" and in the Interface's status as "qos_error", and each
 *  once in the log.  Rows of types "linux-htb" and "linux-hfsc" are taken,
 *  too, by ports whose own class has neither, unless that has been turned
 *  off; the port then says that it has this type.  A port that cannot have the
 *  type refuses it and keeps what it has.
 *
 * Shapers
 * -------
 *
 *  The second group is called by the threads of the datapath.  Each keeps a
 *  shaper for each port that it sends to, in a pointer that it passes to
 *  netdev_flowbundler_update() whenever netdev_flowbundler_needs_update() says
 *  so.  A thread that stops serving a port parks its shaper, and another
 *  thread that serves the port, or else the main thread, adopts what it
 *  holds.  So nothing that is held is lost, or sent too early, while threads,
 *  receive queues, ports and settings change.
 */

#define FLOWBUNDLER_QOS_TYPE "flowbundler"

/* Of an Open_vSwitch row, whether "linux-htb" and "linux-hfsc" are taken. */
#define FLOWBUNDLER_LINUX_QOS_KEY "shaper-linux-qos"

/* Cores of no thread.  (UINT32_MAX is that of the main thread,
 * NON_PMD_CORE_ID.) */
#define FB_NOBODY (UINT32_MAX - 1)
#define FB_EVERYBODY (UINT32_MAX - 2)

/* Attached to a netdev that has been given this QoS type, for the rest of the
 * netdev's life. */
struct netdev_flowbundler {
    OVSRCU_TYPE(struct shaper_config *) config; /* NULL: do not shape. */
    atomic_uint32_t attention;      /* Core of the thread that has something
                                     * to take, or FB_NOBODY, FB_EVERYBODY. */

    struct ovs_list node;           /* In 'all_ports'. */
    char *name;                     /* Of the netdev. */

    struct ovs_mutex mutex;         /* Protects all of the following. */
    struct hmapx shapers OVS_GUARDED;       /* Of threads. */
    struct ovs_list parked OVS_GUARDED;     /* Of none. */
    unsigned int n_pmd_shapers OVS_GUARDED;
    struct ovs_list handed_off OVS_GUARDED; /* For 'receiver'. */
    size_t n_handed_off OVS_GUARDED;
    uint32_t receiver OVS_GUARDED;  /* Core, or FB_EVERYBODY. */
    struct shaper_stats retired OVS_GUARDED; /* Of shapers that are gone. */
    struct shaper_stats retired_delay OVS_GUARDED; /* Of their delay lines. */

    enum fb_dialect dialect OVS_GUARDED;    /* Of the QoS row... */
    struct smap details OVS_GUARDED;        /* ...and its other_config. */
    uint64_t values[FB_QOS_N_KEYS] OVS_GUARDED; /* In force. */
    struct svec problems OVS_GUARDED;       /* Of 'details', which are not. */
    struct hmap queues OVS_GUARDED;         /* Of struct fb_queue. */
    struct edt_pace *pace OVS_GUARDED;      /* Of the port. */
    struct edt_class *default_pace OVS_GUARDED; /* Of queue 0 if there is no
                                                 * record for it. */
    char *minima_error OVS_GUARDED;         /* What is wrong with minimum rates
                                             * of all queues, or NULL... */
    bool minima_logged OVS_GUARDED;         /* ...and has this been logged? */
    char *type_error OVS_GUARDED;           /* Why the row last set is not in
                                             * force at all, or NULL. */
};

void netdev_flowbundler_init(void);
void netdev_flowbundler_destroy(struct netdev *);

void netdev_flowbundler_set_config(const struct smap *other_config);
bool netdev_flowbundler_is_supported(const struct netdev *);
bool netdev_flowbundler_takes(const struct netdev *, const char *type);
void netdev_flowbundler_get_types(const struct netdev *, struct sset *types);
const char *netdev_flowbundler_type(const struct netdev *);
int netdev_flowbundler_set_qos(struct netdev *, const char *type,
                               const struct smap *details);
void netdev_flowbundler_refuse_qos(struct netdev *, const char *type,
                                   int error);
void netdev_flowbundler_clear_qos(struct netdev *);
int netdev_flowbundler_get_qos(const struct netdev *, struct smap *details);
void netdev_flowbundler_get_capabilities(struct netdev_qos_capabilities *);
int netdev_flowbundler_get_queue(const struct netdev *, unsigned int queue_id,
                                 struct smap *details);
int netdev_flowbundler_set_queue(struct netdev *, unsigned int queue_id,
                                 const struct smap *details);
int netdev_flowbundler_delete_queue(struct netdev *, unsigned int queue_id);
int netdev_flowbundler_get_queue_stats(const struct netdev *,
                                       unsigned int queue_id,
                                       struct netdev_queue_stats *);
int netdev_flowbundler_queue_dump_start(const struct netdev *, void **state);
int netdev_flowbundler_queue_dump_next(const struct netdev *, void *state,
                                       unsigned int *queue_id,
                                       struct smap *details);
int netdev_flowbundler_queue_dump_done(const struct netdev *, void *state);
int netdev_flowbundler_dump_queue_stats(const struct netdev *,
                                        netdev_dump_queue_stats_cb *,
                                        void *aux);
void netdev_flowbundler_get_status(const struct netdev *, struct smap *);
void netdev_flowbundler_add_stats(const struct netdev *,
                                  struct netdev_stats *);

/* Returns the configuration that threads should shape 'netdev' by, or NULL.
 * Valid until the caller quiesces. */
static inline const struct shaper_config *
netdev_flowbundler_config(const struct netdev *netdev)
{
    const struct netdev_flowbundler *fb
        = ovsrcu_get(struct netdev_flowbundler *, &netdev->flowbundler);

    return fb ? ovsrcu_get(struct shaper_config *, &fb->config) : NULL;
}

/* Returns true if 'netdev' has this QoS type. */
static inline bool
netdev_flowbundler_is_on(const struct netdev *netdev)
{
    return netdev_flowbundler_config(netdev) != NULL;
}

/* Returns true if a thread with 's' as its shaper (NULL if it has none) for
 * 'netdev' has to call netdev_flowbundler_update().  Costs a few loads from
 * lines that are seldom written. */
static inline bool
netdev_flowbundler_needs_update(const struct netdev *netdev,
                                const struct flow_shaper *s)
{
    struct netdev_flowbundler *fb
        = ovsrcu_get(struct netdev_flowbundler *, &netdev->flowbundler);
    const struct shaper_config *config;
    uint32_t attention;

    if (OVS_LIKELY(!fb)) {
        return false;
    }
    config = ovsrcu_get(struct shaper_config *, &fb->config);
    atomic_read_relaxed(&fb->attention, &attention);
    if (OVS_UNLIKELY(attention != FB_NOBODY)
        && (attention == FB_EVERYBODY || !s
            || attention == flow_shaper_core_id(s))) {
        return true;
    }
    return config != (s ? flow_shaper_config(s) : NULL);
}

struct flow_shaper *netdev_flowbundler_update(const struct netdev *,
                                              struct flow_shaper *,
                                              struct shaper_thread *,
                                              unsigned int core_id,
                                              uint64_t now_ns);
void netdev_flowbundler_park(const struct netdev *, struct flow_shaper *);
void netdev_flowbundler_purge(const struct netdev *);
void netdev_flowbundler_hand_off(const struct netdev *,
                                 struct dp_packet_batch *,
                                 struct shaper_source *sources);

#endif /* netdev-flowbundler.h */
