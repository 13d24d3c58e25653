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

#include "netdev-flowbundler.h"

#include <errno.h>

#include "coverage.h"
#include "dp-packet.h"
#include "dpif-netdev.h"
#include "dpif.h"
#include "hash.h"
#include "hmapx.h"
#include "openvswitch/dynamic-string.h"
#include "openvswitch/json.h"
#include "openvswitch/vlog.h"
#include "ovs-thread.h"
#include "packets.h"
#include "shaper-delay.h"
#include "shaper-rx.h"
#include "smap.h"
#include "sset.h"
#include "svec.h"
#include "timeval.h"
#include "unixctl.h"
#include "util.h"

VLOG_DEFINE_THIS_MODULE(netdev_flowbundler);

COVERAGE_DEFINE(flowbundler_hand_off);
COVERAGE_DEFINE(flowbundler_hand_off_drop);

/* Packets that the main thread may have handed to PMD threads that have not
 * fetched them yet. */
#define MAX_HANDED_OFF 4096

/* FIFOs that flowbundler/show lists per shaper. */
#define SHOW_FLOWS 8

/* A configured output queue. */
struct fb_queue {
    struct hmap_node node;          /* In struct netdev_flowbundler. */
    unsigned int queue_id;
    bool stale;                     /* Is the QoS row of another type since
                                     * 'details' have been parsed? */
    bool in_range;                  /* Is 'queue_id'?  If not, it is only kept
                                     * for its problem to be told. */
    struct smap details;
    uint64_t values[FB_QUEUE_N_KEYS]; /* In force. */
    struct svec problems;           /* Of 'details', which are not. */
    struct edt_class *pace;         /* Its part in the port's. */
    long long int created;
    struct shaper_class_stats retired;  /* Of shapers that are gone. */
};

/* A shaper in struct netdev_flowbundler's 'parked'. */
struct parked_shaper {
    struct ovs_list node;
    struct flow_shaper *shaper;
};

/* A packet in struct netdev_flowbundler's 'handed_off'. */
struct handed_off_packet {
    struct ovs_list node;
    struct dp_packet *packet;
    struct shaper_source source;
};

static struct ovs_mutex all_ports_mutex = OVS_MUTEX_INITIALIZER;
static struct ovs_list all_ports OVS_GUARDED_BY(all_ports_mutex)
    = OVS_LIST_INITIALIZER(&all_ports);

/* Are rows of types "linux-htb" and "linux-hfsc" taken? */
static atomic_bool take_linux_qos = true;

static unixctl_cb_func netdev_flowbundler_show;

/* Registers the commands of this module.  Idempotent. */
void
netdev_flowbundler_init(void)
{
    static struct ovsthread_once once = OVSTHREAD_ONCE_INITIALIZER;

    if (ovsthread_once_start(&once)) {
        unixctl_command_register("flowbundler/show", "[port]", 0, 1,
                                 netdev_flowbundler_show, NULL);
        ovsthread_once_done(&once);
    }
}

static struct netdev_flowbundler *
netdev_fb(const struct netdev *netdev)
{
    return ovsrcu_get(struct netdev_flowbundler *, &netdev->flowbundler);
}

static struct netdev_flowbundler *
netdev_fb_create(struct netdev *netdev)
{
    struct netdev_flowbundler *fb = netdev_fb(netdev);

    if (!fb) {
        fb = xzalloc(sizeof *fb);
        ovsrcu_init(&fb->config, NULL);
        atomic_init(&fb->attention, FB_NOBODY);
        fb->name = xstrdup(netdev_get_name(netdev));
        ovs_mutex_init(&fb->mutex);
        ovs_mutex_lock(&fb->mutex);
        hmapx_init(&fb->shapers);
        ovs_list_init(&fb->parked);
        ovs_list_init(&fb->handed_off);
        fb->receiver = FB_EVERYBODY;
        smap_init(&fb->details);
        svec_init(&fb->problems);
        hmap_init(&fb->queues);
        fb->pace = edt_pace_create(0);
        fb->default_pace = edt_class_create(fb->pace,
                                            &EDT_CLASS_LIMITS_DEFAULT);
        fb->retired.counters[SHAPER_NEXT_DUE_NS] = UINT64_MAX;
        fb->retired_delay.counters[SHAPER_NEXT_DUE_NS] = UINT64_MAX;
        ovs_mutex_unlock(&fb->mutex);

        ovs_mutex_lock(&all_ports_mutex);
        ovs_list_push_back(&all_ports, &fb->node);
        ovs_mutex_unlock(&all_ports_mutex);
        ovsrcu_set(&netdev->flowbundler, fb);
    }
    return fb;
}

/* Configuration. */

static int
compare_queues(const void *a_, const void *b_)
{
    const struct fb_queue *const *a = a_, *const *b = b_;

    return (*a)->queue_id < (*b)->queue_id ? -1 : 1;
}

/* Returns the queues of 'fb' in the order of their ids, in an array that the
 * caller must free. */
static struct fb_queue **
fb_sorted_queues(const struct netdev_flowbundler *fb)
    OVS_REQUIRES(fb->mutex)
{
    struct fb_queue **queues = xcalloc(hmap_count(&fb->queues) + 1,
                                       sizeof *queues);
    struct fb_queue *queue;
    size_t n = 0;

    HMAP_FOR_EACH (queue, node, &fb->queues) {
        queues[n++] = queue;
    }
    qsort(queues, n, sizeof *queues, compare_queues);
    return queues;
}

/* Adds to 'problems' what of the configuration of 'fb' is not in force. */
static void
fb_get_problems(const struct netdev_flowbundler *fb, struct svec *problems)
    OVS_REQUIRES(fb->mutex)
{
    struct fb_queue **queues = fb_sorted_queues(fb);

    if (fb->type_error) {
        svec_add(problems, fb->type_error);
    }
    svec_append(problems, &fb->problems);
    for (size_t i = 0; i < hmap_count(&fb->queues); i++) {
        svec_append(problems, &queues[i]->problems);
    }
    if (fb->minima_error) {
        svec_add(problems, fb->minima_error);
    }
    free(queues);
}

/* Makes 'problems', of which it takes the contents, what is wrong with a row
 * of 'netdev' instead of 'old'.  Logs those that are new. */
static void
fb_set_problems(struct netdev *netdev, struct svec *old,
                struct svec *problems)
{
    static struct vlog_rate_limit rl = VLOG_RATE_LIMIT_INIT(60, 60);

    for (size_t i = 0; i < problems->n; i++) {
        if (!svec_contains_unsorted(old, problems->names[i])) {
            VLOG_WARN_RL(&rl, "%s: %s", netdev_get_name(netdev),
                         problems->names[i]);
        }
    }
    if (!svec_equal(old, problems)) {
        /* Interface status is refreshed when something changes. */
        netdev_change_seq_changed(netdev);
    }
    svec_swap(old, problems);
    svec_destroy(problems);
}

/* Records 'error' (NULL: none) as why 'netdev' does not have the QoS type that
 * it has been told to have, and takes ownership of it.  Logs it if it is
 * new. */
static void
fb_set_type_error(struct netdev *netdev, struct netdev_flowbundler *fb,
                  char *error)
    OVS_REQUIRES(fb->mutex)
{
    if (!nullable_string_is_equal(fb->type_error, error)) {
        static struct vlog_rate_limit rl = VLOG_RATE_LIMIT_INIT(60, 60);

        if (error) {
            VLOG_WARN_RL(&rl, "%s: %s", fb->name, error);
        }
        free(fb->type_error);
        fb->type_error = error;
        netdev_change_seq_changed(netdev);
    } else {
        free(error);
    }
}

/* Looks whether the minimum rates of all queues of 'netdev' fit into the
 * port's rate.  If they do not, that is logged when the status is read: while
 * rows are read one by one they may not fit for a moment. */
static void
fb_check_minima(struct netdev *netdev, struct netdev_flowbundler *fb)
    OVS_REQUIRES(fb->mutex)
{
    struct fb_queue *queue;
    uint64_t sum_bps = 0;
    size_t n = 0;
    char *error;

    HMAP_FOR_EACH (queue, node, &fb->queues) {
        if (queue->in_range && queue->values[FB_QUEUE_MIN_RATE]) {
            sum_bps += queue->values[FB_QUEUE_MIN_RATE];
            n++;
        }
    }
    error = fb_queue_minima_error(n, sum_bps, fb->values[FB_QOS_MAX_RATE]);
    if (!nullable_string_is_equal(error, fb->minima_error)) {
        free(fb->minima_error);
        fb->minima_error = error;
        fb->minima_logged = false;
        netdev_change_seq_changed(netdev);
    } else {
        free(error);
    }
}

static struct fb_queue *
fb_queue_find(const struct netdev_flowbundler *fb, unsigned int queue_id)
    OVS_REQUIRES(fb->mutex)
{
    struct fb_queue *queue;

    HMAP_FOR_EACH_WITH_HASH (queue, node, hash_int(queue_id, 0),
                             &fb->queues) {
        if (queue->queue_id == queue_id) {
            return queue;
        }
    }
    return NULL;
}

static void
fb_queue_destroy(struct netdev_flowbundler *fb, struct fb_queue *queue)
    OVS_REQUIRES(fb->mutex)
{
    hmap_remove(&fb->queues, &queue->node);
    smap_destroy(&queue->details);
    svec_destroy(&queue->problems);
    edt_class_unref(queue->pace);
    free(queue);
}

/* Returns parameters for a rate of 'rate_bps' bit/s, owned by the caller, NULL
 * if that is 0. */
static struct edt_params *
rate_params(uint64_t rate_bps)
{
    const struct edt_limits limits = { .rate = rate_bps };

    return rate_bps ? edt_params_create(&limits) : NULL;
}

/* Publishes the configuration that 'values' and 'queues' describe. */
static void
fb_publish(struct netdev_flowbundler *fb)
    OVS_REQUIRES(fb->mutex)
{
    struct shaper_config *config = xzalloc(sizeof *config);
    struct shaper_config *old;
    const uint64_t *qos = fb->values;
    struct fb_queue *queue;

    /* In place, so that threads keep to what has been sent. */
    edt_pace_set_rate(fb->pace, qos[FB_QOS_MAX_RATE], time_nsec());

    ovs_refcount_init(&config->ref_cnt);
    config->wheel = MLTW_CONFIG_DEFAULT;
    config->wheel.min_granularity_ns = qos[FB_QOS_MIN_GRANULARITY];
    config->wheel.max_granularity_ns = qos[FB_QOS_MAX_GRANULARITY];
    config->max_delay_ns = qos[FB_QOS_MAX_DELAY] * 1000;
    config->ecn_threshold_ns = qos[FB_QOS_ECN_THRESHOLD]
                               ? qos[FB_QOS_ECN_THRESHOLD] * 1000 : UINT64_MAX;
    config->max_backlog = qos[FB_QOS_MAX_BACKLOG];
    config->max_batch = qos[FB_QOS_MAX_BATCH];
    config->max_flows = qos[FB_QOS_MAX_FLOWS];
    config->overhead_bytes = qos[FB_QOS_OVERHEAD];
    shaper_delay_init(&config->delay, qos[FB_QOS_DELAY], qos[FB_QOS_JITTER]);
    config->port_params = rate_params(qos[FB_QOS_MAX_RATE]);
    config->paced = config->port_params != NULL;
    if (config->paced) {
        config->port_pace = edt_pace_ref(fb->pace);
    }

    /* Class 0 is queue 0, which always exists. */
    config->classes = xcalloc(hmap_count(&fb->queues) + 1,
                              sizeof *config->classes);
    config->n_classes = 1;
    if (config->paced) {
        config->classes[0].pace = edt_class_ref(fb->default_pace);
    }
    HMAP_FOR_EACH (queue, node, &fb->queues) {
        if (!queue->in_range) {
            continue;
        }

        size_t i = queue->queue_id ? config->n_classes++ : 0;
        struct shaper_class_config *cc = &config->classes[i];

        cc->queue_id = queue->queue_id;
        cc->params = rate_params(queue->values[FB_QUEUE_MAX_RATE]);
        if (config->port_params) {
            /* Otherwise nothing is short, and nobody comes first. */
            cc->priority = queue->values[FB_QUEUE_PRIORITY];
        }
        edt_class_unref(cc->pace);
        cc->pace = (config->port_params || cc->params
                    ? edt_class_ref(queue->pace) : NULL);
        shaper_config_set_class(config, queue->queue_id, i);
        config->paced |= cc->pace != NULL;
    }

    shaper_config_set_ranks(config);

    old = ovsrcu_get_protected(struct shaper_config *, &fb->config);
    ovsrcu_set(&fb->config, config);
    if (old) {
        ovsrcu_postpone(shaper_config_unref, old);
    }
}

/* Returns true if 'netdev' is a port of the userspace datapath that packets
 * are sent to. */
bool
netdev_flowbundler_is_supported(const struct netdev *netdev)
{
    const char *dpif_type = netdev_get_dpif_type(netdev);

    /* Packets to a tunnel port leave through another port. */
    return dpif_type && strcmp(dpif_type, "system")
           && netdev->netdev_class->send
           && !netdev->netdev_class->push_header;
}

/* Does what 'other_config' of the Open_vSwitch row says of all ports.  What
 * they have follows when they are told their QoS types anew. */
void
netdev_flowbundler_set_config(const struct smap *other_config)
{
    atomic_store_relaxed(&take_linux_qos,
                         smap_get_bool(other_config, FLOWBUNDLER_LINUX_QOS_KEY,
                                       true));
}

static bool
takes_linux_qos(void)
{
    bool take;

    atomic_read_relaxed(&take_linux_qos, &take);
    return take;
}

/* Returns true if rows of QoS type 'type' are for this module, rather than for
 * the class of 'netdev'. */
bool
netdev_flowbundler_takes(const struct netdev *netdev, const char *type)
{
    const struct netdev_class *class = netdev->netdev_class;
    enum fb_dialect dialect;
    bool has_it = false;

    if (!fb_dialect_from_type(type, &dialect)) {
        return false;
    } else if (dialect == FB_NATIVE) {
        return true;
    } else if (!takes_linux_qos()
               || !netdev_flowbundler_is_supported(netdev)) {
        return false;
    }
    if (class->get_qos_types) {
        struct sset types = SSET_INITIALIZER(&types);

        class->get_qos_types(netdev, &types);
        has_it = sset_contains(&types, type);
        sset_destroy(&types);
    }
    return !has_it;
}

/* Adds to 'types' the QoS types of rows that 'netdev' can have by this
 * module. */
void
netdev_flowbundler_get_types(const struct netdev *netdev, struct sset *types)
{
    if (netdev_flowbundler_is_supported(netdev)) {
        for (size_t i = 0; i < FB_N_DIALECTS; i++) {
            const char *type = fb_dialect_type(i);

            if (netdev_flowbundler_takes(netdev, type)) {
                sset_add(types, type);
            }
        }
    }
}

/* Returns the QoS type of the row that 'netdev' has by this module. */
const char *
netdev_flowbundler_type(const struct netdev *netdev)
{
    struct netdev_flowbundler *fb = netdev_fb(netdev);
    const char *type;

    ovs_mutex_lock(&fb->mutex);
    type = fb_dialect_type(fb->dialect);
    ovs_mutex_unlock(&fb->mutex);
    return type;
}

/* Makes 'fb' follow a row of 'dialect'. */
static void
fb_set_dialect(struct netdev_flowbundler *fb, enum fb_dialect dialect)
    OVS_REQUIRES(fb->mutex)
{
    struct fb_queue *queue;

    if (dialect != fb->dialect) {
        fb->dialect = dialect;
        HMAP_FOR_EACH (queue, node, &fb->queues) {
            queue->stale = true;
        }
    }
}

/* Makes 'type', which netdev_flowbundler_takes(), with 'details' the QoS type
 * of 'netdev'. */
int
netdev_flowbundler_set_qos(struct netdev *netdev, const char *type,
                           const struct smap *details)
{
    struct netdev_flowbundler *fb = netdev_fb_create(netdev);
    enum fb_dialect dialect = FB_NATIVE;
    bool was_on = netdev_flowbundler_is_on(netdev);
    char *error = NULL;

    if (!netdev_flowbundler_is_supported(netdev)) {
        error = xasprintf("QoS type=\"%s\": must be one of the types that "
                          "this port supports, this one is only for ports of "
                          "the userspace datapath (datapath_type=netdev) that "
                          "are not tunnels", FLOWBUNDLER_QOS_TYPE);
    }

    fb_dialect_from_type(type, &dialect);
    ovs_mutex_lock(&fb->mutex);
    if (!error && !(was_on && dialect == fb->dialect
                    && smap_equal(&fb->details, details))) {
        struct svec problems = SVEC_EMPTY_INITIALIZER;
        uint64_t values[FB_QOS_N_KEYS];

        fb_set_dialect(fb, dialect);
        fb_qos_parse(dialect, details, was_on ? fb->values : NULL, values,
                     &problems);
        smap_destroy(&fb->details);
        smap_clone(&fb->details, details);
        memcpy(fb->values, values, sizeof values);
        fb_set_problems(netdev, &fb->problems, &problems);
        fb_check_minima(netdev, fb);
        fb_publish(fb);
        fb_qos_warn_of_delay(fb->name, values);
    }
    fb_set_type_error(netdev, fb, error);
    ovs_mutex_unlock(&fb->mutex);

    return error ? EINVAL : 0;
}

/* Notes that 'netdev' has been told to have QoS type 'type', not this one, and
 * has refused with 'error', a positive errno value.  If it has this QoS type,
 * it keeps it; otherwise nothing limits it, of which the log and the
 * Interface's status would not tell. */
void
netdev_flowbundler_refuse_qos(struct netdev *netdev, const char *type,
                              int error)
{
    struct netdev_flowbundler *fb = netdev_fb_create(netdev);
    enum fb_dialect dialect;
    const char *keeps;

    if (!takes_linux_qos() && netdev_flowbundler_is_on(netdev)
        && strcmp(netdev_flowbundler_type(netdev), FLOWBUNDLER_QOS_TYPE)) {
        /* What it has is not to be had any more. */
        netdev_flowbundler_clear_qos(netdev);
    }
    if (error == EOPNOTSUPP && !takes_linux_qos()
        && fb_dialect_from_type(type, &dialect)) {
        keeps = "other_config:"FLOWBUNDLER_LINUX_QOS_KEY"=false of the "
                "Open_vSwitch row turns it off; nothing limits the port";
    } else if (netdev_flowbundler_is_on(netdev)) {
        keeps = "the port keeps the one that it has";
    } else {
        keeps = "nothing limits the port";
    }

    ovs_mutex_lock(&fb->mutex);
    fb_set_type_error(netdev, fb,
                      error == EOPNOTSUPP
                      ? xasprintf("QoS type=\"%s\": must be one of the types "
                                  "that this port supports; %s", type, keeps)
                      : xasprintf("QoS type=\"%s\": %s; %s", type,
                                  ovs_strerror(error), keeps));
    ovs_mutex_unlock(&fb->mutex);
}

/* Ends this QoS type on 'netdev', if it has it.  What is held is sent at its
 * time all the same. */
void
netdev_flowbundler_clear_qos(struct netdev *netdev)
{
    struct netdev_flowbundler *fb = netdev_fb(netdev);
    struct shaper_config *old;
    struct fb_queue *queue;

    if (!fb) {
        return;
    }

    ovs_mutex_lock(&fb->mutex);
    fb_set_type_error(netdev, fb, NULL);
    old = ovsrcu_get_protected(struct shaper_config *, &fb->config);
    if (old) {
        ovsrcu_set(&fb->config, NULL);
        ovsrcu_postpone(shaper_config_unref, old);
        smap_clear(&fb->details);
        svec_clear(&fb->problems);
        free(fb->minima_error);
        fb->minima_error = NULL;
        netdev_change_seq_changed(netdev);
        HMAP_FOR_EACH_SAFE (queue, node, &fb->queues) {
            fb_queue_destroy(fb, queue);
        }
    }
    ovs_mutex_unlock(&fb->mutex);
}

/* Adds the configuration of 'netdev', which has this QoS type, to
 * 'details'. */
int
netdev_flowbundler_get_qos(const struct netdev *netdev, struct smap *details)
{
    struct netdev_flowbundler *fb = netdev_fb(netdev);
    struct smap_node *node;

    ovs_mutex_lock(&fb->mutex);
    SMAP_FOR_EACH (node, &fb->details) {
        smap_add(details, node->key, node->value);
    }
    ovs_mutex_unlock(&fb->mutex);
    return 0;
}

/* Fills '*caps' for this QoS type. */
void
netdev_flowbundler_get_capabilities(struct netdev_qos_capabilities *caps)
{
    caps->n_queues = SHAPER_MAX_QUEUES;
}

/* Adds the configuration of queue 'queue_id' to 'details'. */
int
netdev_flowbundler_get_queue(const struct netdev *netdev,
                             unsigned int queue_id, struct smap *details)
{
    struct netdev_flowbundler *fb = netdev_fb(netdev);
    struct fb_queue *queue;
    struct smap_node *node;

    ovs_mutex_lock(&fb->mutex);
    queue = fb_queue_find(fb, queue_id);
    if (queue) {
        SMAP_FOR_EACH (node, &queue->details) {
            smap_add(details, node->key, node->value);
        }
    }
    ovs_mutex_unlock(&fb->mutex);
    return queue ? 0 : ENOENT;
}

static struct fb_queue *
fb_queue_create(struct netdev_flowbundler *fb, unsigned int queue_id)
    OVS_REQUIRES(fb->mutex)
{
    struct fb_queue *queue = xzalloc(sizeof *queue);

    queue->queue_id = queue_id;
    queue->in_range = queue_id < SHAPER_MAX_QUEUES;
    queue->created = time_msec();
    smap_init(&queue->details);
    svec_init(&queue->problems);
    queue->pace = edt_class_create(fb->pace, &EDT_CLASS_LIMITS_DEFAULT);
    hmap_insert(&fb->queues, &queue->node, hash_int(queue_id, 0));
    return queue;
}

/* Makes 'queue' follow 'details'.  'is_new' if it has not followed any. */
static void
fb_queue_configure(struct netdev *netdev, struct netdev_flowbundler *fb,
                   struct fb_queue *queue, const struct smap *details,
                   bool is_new)
    OVS_REQUIRES(fb->mutex)
{
    struct svec problems = SVEC_EMPTY_INITIALIZER;
    uint64_t values[FB_QUEUE_N_KEYS];
    struct edt_class_limits limits;

    fb_queue_parse(fb->dialect, queue->queue_id, details,
                   is_new ? NULL : queue->values, values, &problems);
    queue->stale = false;
    smap_destroy(&queue->details);
    smap_clone(&queue->details, details);
    memcpy(queue->values, values, sizeof values);
    if (!queue->in_range) {
        svec_clear(&problems);
        svec_add_nocopy(&problems,
                        xasprintf("QoS queues: queue %u: must be a whole "
                                  "number from 0 to %d; its packets are those "
                                  "of queue 0", queue->queue_id,
                                  SHAPER_MAX_QUEUES - 1));
    }
    fb_set_problems(netdev, &queue->problems, &problems);
    if (queue->in_range) {
        fb_queue_limits(fb->dialect, values, &limits);
        edt_class_set_limits(queue->pace, &limits, time_nsec());
        fb_check_minima(netdev, fb);
        fb_publish(fb);
    }
}

/* Creates or changes queue 'queue_id' of 'netdev'. */
int
netdev_flowbundler_set_queue(struct netdev *netdev, unsigned int queue_id,
                             const struct smap *details)
{
    struct netdev_flowbundler *fb = netdev_fb(netdev);
    struct fb_queue *queue;
    bool refused;

    ovs_mutex_lock(&fb->mutex);
    /* Otherwise the row that this queue belongs to is not in force. */
    refused = fb->type_error != NULL;
    if (!refused) {
        queue = fb_queue_find(fb, queue_id);
        if (!queue) {
            queue = fb_queue_create(fb, queue_id);
            fb_queue_configure(netdev, fb, queue, details, true);
        } else if (queue->stale || !smap_equal(&queue->details, details)) {
            fb_queue_configure(netdev, fb, queue, details, false);
        }
    }
    ovs_mutex_unlock(&fb->mutex);
    return refused || queue_id >= SHAPER_MAX_QUEUES ? EINVAL : 0;
}

/* Deletes queue 'queue_id' of 'netdev'.  Its packets go to queue 0. */
int
netdev_flowbundler_delete_queue(struct netdev *netdev, unsigned int queue_id)
{
    struct netdev_flowbundler *fb = netdev_fb(netdev);
    struct fb_queue *queue;

    ovs_mutex_lock(&fb->mutex);
    queue = fb->type_error ? NULL : fb_queue_find(fb, queue_id);
    if (queue) {
        if (!svec_is_empty(&queue->problems)) {
            netdev_change_seq_changed(netdev);
        }
        fb_queue_destroy(fb, queue);
        fb_check_minima(netdev, fb);
        fb_publish(fb);
    }
    ovs_mutex_unlock(&fb->mutex);
    return queue ? 0 : ENOENT;
}

static void
fb_queue_get_stats(const struct netdev_flowbundler *fb,
                   const struct fb_queue *queue,
                   struct netdev_queue_stats *stats)
    OVS_REQUIRES(fb->mutex)
{
    struct shaper_class_stats total = queue->retired;
    struct parked_shaper *parked;
    struct hmapx_node *node;

    HMAPX_FOR_EACH (node, &fb->shapers) {
        flow_shaper_get_class_stats(node->data, queue->queue_id, &total);
    }
    LIST_FOR_EACH (parked, node, &fb->parked) {
        flow_shaper_get_class_stats(parked->shaper, queue->queue_id, &total);
    }
    stats->tx_packets = total.tx_packets;
    stats->tx_bytes = total.tx_bytes;
    stats->tx_errors = total.drops;
    stats->created = queue->created;
}

/* Fills '*stats' with what the shapers of all threads sent and dropped for
 * queue 'queue_id'. */
int
netdev_flowbundler_get_queue_stats(const struct netdev *netdev,
                                   unsigned int queue_id,
                                   struct netdev_queue_stats *stats)
{
    struct netdev_flowbundler *fb = netdev_fb(netdev);
    struct fb_queue *queue;

    ovs_mutex_lock(&fb->mutex);
    queue = fb_queue_find(fb, queue_id);
    if (queue && !queue->in_range) {
        queue = NULL;
    }
    if (queue) {
        fb_queue_get_stats(fb, queue, stats);
    }
    ovs_mutex_unlock(&fb->mutex);
    return queue ? 0 : ENOENT;
}

/* Dumping queues: the ids at the time of the start. */
struct queue_dump {
    unsigned int *ids;
    size_t n;
    size_t next;
};

int
netdev_flowbundler_queue_dump_start(const struct netdev *netdev, void **statep)
{
    struct netdev_flowbundler *fb = netdev_fb(netdev);
    struct queue_dump *dump = xzalloc(sizeof *dump);
    struct fb_queue *queue;

    ovs_mutex_lock(&fb->mutex);
    dump->ids = xcalloc(hmap_count(&fb->queues) + 1, sizeof *dump->ids);
    HMAP_FOR_EACH (queue, node, &fb->queues) {
        dump->ids[dump->n++] = queue->queue_id;
    }
    ovs_mutex_unlock(&fb->mutex);

    *statep = dump;
    return 0;
}

int
netdev_flowbundler_queue_dump_next(const struct netdev *netdev, void *state,
                                   unsigned int *queue_id,
                                   struct smap *details)
{
    struct queue_dump *dump = state;

    while (dump->next < dump->n) {
        *queue_id = dump->ids[dump->next++];
        if (!netdev_flowbundler_get_queue(netdev, *queue_id, details)) {
            return 0;
        }
    }
    return EOF;
}

int
netdev_flowbundler_queue_dump_done(const struct netdev *netdev OVS_UNUSED,
                                   void *state)
{
    struct queue_dump *dump = state;

    free(dump->ids);
    free(dump);
    return 0;
}

/* Calls 'cb' with the statistics of each queue of 'netdev'. */
int
netdev_flowbundler_dump_queue_stats(const struct netdev *netdev,
                                    netdev_dump_queue_stats_cb *cb, void *aux)
{
    struct netdev_flowbundler *fb = netdev_fb(netdev);
    struct fb_queue *queue;

    ovs_mutex_lock(&fb->mutex);
    HMAP_FOR_EACH (queue, node, &fb->queues) {
        struct netdev_queue_stats stats;

        if (queue->in_range) {
            fb_queue_get_stats(fb, queue, &stats);
            cb(queue->queue_id, &stats, aux);
        }
    }
    ovs_mutex_unlock(&fb->mutex);
    return 0;
}

/* Adds to 'smap', an Interface's status, what is not in force of the
 * configuration of 'netdev', as a port that is sent to or received from. */
void
netdev_flowbundler_get_status(const struct netdev *netdev, struct smap *smap)
{
    struct netdev_flowbundler *fb = netdev_fb(netdev);

    if (fb) {
        struct svec problems = SVEC_EMPTY_INITIALIZER;

        ovs_mutex_lock(&fb->mutex);
        fb_get_problems(fb, &problems);
        if (fb->minima_error && !fb->minima_logged) {
            VLOG_WARN("%s: %s", fb->name, fb->minima_error);
            fb->minima_logged = true;
        }
        ovs_mutex_unlock(&fb->mutex);
        if (!svec_is_empty(&problems)) {
            smap_add_nocopy(smap, xstrdup("qos_error"),
                            svec_join(&problems, "; ", ""));
        }
        svec_destroy(&problems);
    }
    shaper_rx_get_status(netdev, smap);
}

/* Adds to '*stats' what 'get' says of each shaper of 'fb'. */
static void
fb_add_stats(const struct netdev_flowbundler *fb,
             void (*get)(const struct flow_shaper *, struct shaper_stats *),
             struct shaper_stats *stats)
    OVS_REQUIRES(fb->mutex)
{
    struct parked_shaper *parked;
    struct hmapx_node *node;

    HMAPX_FOR_EACH (node, &fb->shapers) {
        get(node->data, stats);
    }
    LIST_FOR_EACH (parked, node, &fb->parked) {
        get(parked->shaper, stats);
    }
}

static void
fb_get_stats(const struct netdev_flowbundler *fb, struct shaper_stats *stats)
    OVS_REQUIRES(fb->mutex)
{
    *stats = fb->retired;
    fb_add_stats(fb, flow_shaper_get_stats, stats);
}

/* Stores in '*stats' the statistics of delay lines. */
static void
fb_get_delay_stats(const struct netdev_flowbundler *fb,
                   struct shaper_stats *stats)
    OVS_REQUIRES(fb->mutex)
{
    *stats = fb->retired_delay;
    fb_add_stats(fb, flow_shaper_get_delay_stats, stats);
}

static uint64_t
shaper_stats_drops(const struct shaper_stats *stats)
{
    uint64_t drops = 0;

    for (int i = SHAPER_DROP_MAX_DELAY; i <= SHAPER_DROP_SEGMENT; i++) {
        drops += stats->counters[i];
    }
    return drops;
}

/* Adds what was dropped before it reached the device to '*stats'. */
void
netdev_flowbundler_add_stats(const struct netdev *netdev,
                             struct netdev_stats *stats)
{
    struct netdev_flowbundler *fb = netdev_fb(netdev);

    if (fb) {
        struct shaper_stats total, delayed;

        ovs_mutex_lock(&fb->mutex);
        fb_get_stats(fb, &total);
        fb_get_delay_stats(fb, &delayed);
        ovs_mutex_unlock(&fb->mutex);
        stats->tx_dropped = (stats->tx_dropped == UINT64_MAX
                             ? 0 : stats->tx_dropped)
                            + shaper_stats_drops(&total)
                            + shaper_stats_drops(&delayed);
    }
}

/* Shapers. */

static bool
is_pmd(unsigned int core_id)
{
    return core_id != NON_PMD_CORE_ID;
}

static void
fb_register(struct netdev_flowbundler *fb, struct flow_shaper *s)
    OVS_REQUIRES(fb->mutex)
{
    hmapx_add(&fb->shapers, s);
    fb->n_pmd_shapers += is_pmd(flow_shaper_core_id(s));
}

/* Tells threads who of them has something to take. */
static void
fb_set_attention(struct netdev_flowbundler *fb)
    OVS_REQUIRES(fb->mutex)
{
    atomic_store_relaxed(&fb->attention,
                         !ovs_list_is_empty(&fb->parked) ? FB_EVERYBODY
                         : fb->n_handed_off ? fb->receiver : FB_NOBODY);
}

static void
fb_unregister(struct netdev_flowbundler *fb, struct flow_shaper *s)
    OVS_REQUIRES(fb->mutex)
{
    hmapx_find_and_delete(&fb->shapers, s);
    fb->n_pmd_shapers -= is_pmd(flow_shaper_core_id(s));
    if (fb->receiver == flow_shaper_core_id(s)) {
        fb->receiver = FB_EVERYBODY;
        fb_set_attention(fb);
    }
}

/* Clears what in '*stats' is of the present. */
static void
stats_clear_gauges(struct shaper_stats *stats)
{
    stats->counters[SHAPER_BACKLOG] = 0;
    stats->counters[SHAPER_BACKLOG_BYTES] = 0;
    stats->counters[SHAPER_FLOWS] = 0;
    stats->counters[SHAPER_NEXT_DUE_NS] = UINT64_MAX;
}

/* Destroys 's', which is not registered, keeping its statistics. */
static void
fb_retire(struct netdev_flowbundler *fb, struct flow_shaper *s)
    OVS_REQUIRES(fb->mutex)
{
    uint64_t backlog = flow_shaper_backlog(s);
    struct fb_queue *queue;

    HMAP_FOR_EACH (queue, node, &fb->queues) {
        flow_shaper_get_class_stats(s, queue->queue_id, &queue->retired);
    }
    flow_shaper_get_stats(s, &fb->retired);
    flow_shaper_get_delay_stats(s, &fb->retired_delay);
    fb->retired.counters[SHAPER_DROP_REMOVED] += backlog;
    stats_clear_gauges(&fb->retired);
    stats_clear_gauges(&fb->retired_delay);
    flow_shaper_destroy(s);
}

/* Gives what waits for some thread, or for this one, to 's' or, if 's' is
 * NULL, returns one of the parked shapers. */
static struct flow_shaper *
fb_adopt(struct netdev_flowbundler *fb, struct flow_shaper *s,
         struct shaper_thread *thread, unsigned int core_id, uint64_t now_ns)
    OVS_REQUIRES(fb->mutex)
{
    struct handed_off_packet *handed_off;
    struct parked_shaper *parked;

    LIST_FOR_EACH_POP (parked, node, &fb->parked) {
        if (!s) {
            s = parked->shaper;
            flow_shaper_attach(s, thread, core_id);
            fb_register(fb, s);
        } else {
            flow_shaper_merge(s, parked->shaper, now_ns);
            flow_shaper_destroy(parked->shaper);
        }
        free(parked);
    }
    if (s) {
        if (fb->receiver == FB_EVERYBODY) {
            /* What the one before had waiting is in 's' now. */
            fb->receiver = core_id;
        }
        if (fb->receiver == core_id) {
            LIST_FOR_EACH_POP (handed_off, node, &fb->handed_off) {
                flow_shaper_put(s, handed_off->packet, handed_off->source,
                                now_ns);
                free(handed_off);
            }
            fb->n_handed_off = 0;
        }
        fb_set_attention(fb);
        shaper_thread_find_left(thread);
    }
    return s;
}

/* Drops packets that no shaper takes, when nothing is parked. */
static void
fb_purge_handed_off(struct netdev_flowbundler *fb)
    OVS_REQUIRES(fb->mutex)
{
    struct handed_off_packet *handed_off;

    LIST_FOR_EACH_POP (handed_off, node, &fb->handed_off) {
        fb->retired.counters[SHAPER_DROP_REMOVED]++;
        COVERAGE_INC(flowbundler_hand_off_drop);
        dp_packet_delete(handed_off->packet);
        free(handed_off);
    }
    fb->n_handed_off = 0;
    fb_set_attention(fb);
}

/* Brings the shaper 's' that the thread with 'thread' on 'core_id' has for
 * 'netdev' (NULL if it has none) in line with the configuration, and adopts
 * what is parked.  Returns the shaper that the thread has from now on, or
 * NULL if it needs none. */
struct flow_shaper *
netdev_flowbundler_update(const struct netdev *netdev, struct flow_shaper *s,
                          struct shaper_thread *thread, unsigned int core_id,
                          uint64_t now_ns)
{
    struct netdev_flowbundler *fb = netdev_fb(netdev);
    const struct shaper_config *config;
    uint32_t attention;

    ovs_mutex_lock(&fb->mutex);
    config = ovsrcu_get(struct shaper_config *, &fb->config);

    if (!s && config) {
        s = flow_shaper_create(config, thread, core_id, now_ns);
        fb_register(fb, s);
    }

    /* The main thread polls too seldom to serve a port well: it adopts only
     * what no PMD thread does. */
    atomic_read_relaxed(&fb->attention, &attention);
    if ((attention == FB_EVERYBODY || attention == core_id)
        && (is_pmd(core_id) || !fb->n_pmd_shapers)) {
        if (s && config) {
            /* What is adopted may need what is new: a queue, more FIFOs. */
            flow_shaper_set_config(s, config, now_ns);
        }
        s = fb_adopt(fb, s, thread, core_id, now_ns);
        if (!s) {
            fb_purge_handed_off(fb);
        }
    }

    if (s) {
        if (config) {
            flow_shaper_set_config(s, config, now_ns);
        } else if (flow_shaper_backlog(s)) {
            flow_shaper_set_closing(s, now_ns);
        } else {
            fb_unregister(fb, s);
            fb_retire(fb, s);
            s = NULL;
        }
    }
    ovs_mutex_unlock(&fb->mutex);
    return s;
}

/* Takes 's' from a thread that no longer serves 'netdev'. */
void
netdev_flowbundler_park(const struct netdev *netdev, struct flow_shaper *s)
{
    struct netdev_flowbundler *fb = netdev_fb(netdev);

    ovs_mutex_lock(&fb->mutex);
    fb_unregister(fb, s);
    flow_shaper_detach(s);
    if (flow_shaper_backlog(s)) {
        struct parked_shaper *parked = xmalloc(sizeof *parked);

        parked->shaper = s;
        ovs_list_push_back(&fb->parked, &parked->node);
        fb_set_attention(fb);
    } else {
        fb_retire(fb, s);
    }
    ovs_mutex_unlock(&fb->mutex);
}

/* Drops what is parked at 'netdev', which is no longer a port. */
void
netdev_flowbundler_purge(const struct netdev *netdev)
{
    struct netdev_flowbundler *fb = netdev_fb(netdev);
    struct parked_shaper *parked;

    if (!fb) {
        return;
    }

    ovs_mutex_lock(&fb->mutex);
    LIST_FOR_EACH_POP (parked, node, &fb->parked) {
        fb_retire(fb, parked->shaper);
        free(parked);
    }
    fb_purge_handed_off(fb);
    ovs_mutex_unlock(&fb->mutex);
}

/* Frees all that is attached to 'netdev', which nobody uses any more. */
void
netdev_flowbundler_destroy(struct netdev *netdev)
{
    struct netdev_flowbundler *fb = netdev_fb(netdev);
    struct shaper_config *config;
    struct fb_queue *queue;

    if (!fb) {
        return;
    }

    netdev_flowbundler_purge(netdev);

    ovs_mutex_lock(&all_ports_mutex);
    ovs_list_remove(&fb->node);
    ovs_mutex_unlock(&all_ports_mutex);

    ovs_mutex_lock(&fb->mutex);
    ovs_assert(hmapx_is_empty(&fb->shapers));
    HMAP_FOR_EACH_SAFE (queue, node, &fb->queues) {
        fb_queue_destroy(fb, queue);
    }
    edt_class_unref(fb->default_pace);
    edt_pace_unref(fb->pace);
    hmap_destroy(&fb->queues);
    hmapx_destroy(&fb->shapers);
    smap_destroy(&fb->details);
    svec_destroy(&fb->problems);
    free(fb->minima_error);
    free(fb->type_error);
    ovs_mutex_unlock(&fb->mutex);

    config = ovsrcu_get_protected(struct shaper_config *, &fb->config);
    shaper_config_unref(config);
    ovs_mutex_destroy(&fb->mutex);
    free(fb->name);
    free(fb);
    ovsrcu_set_hidden(&netdev->flowbundler, NULL);
}

/* Chooses who takes what is handed off: always the same thread, so that
 * packets of a flow stay in order, as long as it serves the port.  Who adopts
 * what waited there follows it. */
static void
fb_choose_receiver(struct netdev_flowbundler *fb)
    OVS_REQUIRES(fb->mutex)
{
    struct hmapx_node *node;

    if (is_pmd(fb->receiver)
        && (fb->receiver != FB_EVERYBODY || !ovs_list_is_empty(&fb->parked))) {
        return;
    }
    fb->receiver = FB_EVERYBODY;
    HMAPX_FOR_EACH (node, &fb->shapers) {
        unsigned int core_id = flow_shaper_core_id(node->data);

        if (is_pmd(core_id)) {
            fb->receiver = MIN(fb->receiver, core_id);
        }
    }
}

/* Passes those packets of 'batch', in the main thread, that have an EDT, or
 * all if there is a delay, on to a PMD thread that serves 'netdev', if there
 * is one, because the main thread polls too seldom to keep to times, and so
 * that they stay behind those of their flow.  The others stay in 'batch'.
 * 'sources[i]' says where packet i was received, before and after. */
void
netdev_flowbundler_hand_off(const struct netdev *netdev,
                            struct dp_packet_batch *batch,
                            struct shaper_source *sources)
{
    struct netdev_flowbundler *fb = netdev_fb(netdev);
    const size_t size = dp_packet_batch_size(batch);
    struct dp_packet *packet;
    size_t i;

    ovs_mutex_lock(&fb->mutex);
    if (fb->n_pmd_shapers) {
        const struct shaper_config *config
            = ovsrcu_get(struct shaper_config *, &fb->config);
        bool delayed = config && config->delay.delay_ns;

        fb_choose_receiver(fb);
        DP_PACKET_BATCH_REFILL_FOR_EACH (i, size, packet, batch) {
            if (!packet->md.edt_valid && !delayed) {
                sources[dp_packet_batch_size(batch)] = sources[i];
                dp_packet_batch_add(batch, packet);
            } else if (fb->n_handed_off >= MAX_HANDED_OFF) {
                fb->retired.counters[SHAPER_DROP_BACKLOG]++;
                COVERAGE_INC(flowbundler_hand_off_drop);
                dp_packet_delete(packet);
            } else {
                struct handed_off_packet *handed_off
                    = xmalloc(sizeof *handed_off);

                handed_off->packet = packet;
                handed_off->source = sources[i];
                ovs_list_push_back(&fb->handed_off, &handed_off->node);
                fb->n_handed_off++;
                COVERAGE_INC(flowbundler_hand_off);
            }
        }
        fb_set_attention(fb);
    }
    ovs_mutex_unlock(&fb->mutex);
}

/* ovs-appctl flowbundler/show. */

static void
format_flow_key(struct ds *s, const struct shaper_flow_stats *f)
{
    const struct shaper_flow_key *key = &f->key;
    uint16_t addr_type = key->addr_type & ~SHAPER_ADDR_AHEAD;

    ds_put_cstr(s, "meters=");
    if (!f->n_meters) {
        ds_put_cstr(s, key->chain == EDT_CHAIN_NONE ? "none" : "gone");
    }
    for (size_t i = 0; i < MIN(f->n_meters, ARRAY_SIZE(f->meters)); i++) {
        if (i) {
            ds_put_char(s, ',');
        }
        shaper_rx_format_id(s, f->meters[i]);
    }
    if (f->n_meters > ARRAY_SIZE(f->meters)) {
        ds_put_cstr(s, ",...");
    }
    ds_put_format(s, " queue=%"PRIu32" dst=", key->queue_id);
    if (addr_type == SHAPER_ADDR_IPV4) {
        ovs_be32 ip;

        memcpy(&ip, key->addr, sizeof ip);
        ds_put_format(s, IP_FMT, IP_ARGS(ip));
    } else if (addr_type == SHAPER_ADDR_IPV6) {
        struct in6_addr ip6;

        memcpy(&ip6, key->addr, sizeof ip6);
        ipv6_format_addr(&ip6, s);
    } else if (addr_type == SHAPER_FLOW_IPV4) {
        ds_put_format(s, IP_FMT" src="IP_FMT" proto=%"PRIu32
                      " ports=%"PRIu16",%"PRIu16,
                      IP_ARGS(key->ipv4.dst), IP_ARGS(key->ipv4.src),
                      key->ipv4.proto, ntohs(key->ipv4.src_port),
                      ntohs(key->ipv4.dst_port));
    } else if (addr_type == SHAPER_FLOW_IPV6) {
        ds_put_format(s, "ipv6 flow=%016"PRIx64"%016"PRIx64, key->addr[1],
                      key->addr[0]);
    } else {
        struct eth_addr mac;

        memcpy(&mac, key->addr, sizeof mac);
        ds_put_format(s, ETH_ADDR_FMT, ETH_ADDR_ARGS(mac));
        if (addr_type == SHAPER_FLOW_ETH) {
            memcpy(&mac, (const char *) key->addr + sizeof mac, sizeof mac);
            ds_put_format(s, " src="ETH_ADDR_FMT, ETH_ADDR_ARGS(mac));
        }
    }
    if (key->addr_type & SHAPER_ADDR_AHEAD) {
        ds_put_cstr(s, " ahead");
    }
}

static struct json *
histogram_to_json(const uint64_t *bins, size_t n, uint64_t first)
{
    struct json *object = json_object_create();

    for (size_t i = 0; i < n; i++) {
        if (bins[i]) {
            json_object_put_nocopy(object,
                                   xasprintf("%"PRIu64, first << i),
                                   json_integer_create(bins[i]));
        }
    }
    return object;
}

static void
stats_to_json(const struct shaper_stats *stats, uint64_t now_ns,
              struct json *object)
{
    for (int i = 0; i < SHAPER_N_COUNTERS; i++) {
        const char *name = shaper_counter_name(i);
        uint64_t value = stats->counters[i];

        if (i != SHAPER_NEXT_DUE_NS) {
            json_object_put(object, name, json_integer_create(value));
        } else if (stats->counters[SHAPER_BACKLOG] && value != UINT64_MAX) {
            json_object_put(object, "next_due_in_ns",
                            json_integer_create(value > now_ns
                                                ? value - now_ns : 0));
        }
    }
    json_object_put(object, "batch_size",
                    histogram_to_json(stats->batch_size, SHAPER_BATCH_BINS,
                                      1));
    json_object_put(object, "lateness_ns_below",
                    histogram_to_json(stats->lateness, SHAPER_LATENESS_BINS,
                                      1 << SHAPER_LATENESS_SHIFT));
}

static void
format_histogram(struct ds *s, const char *title, const uint64_t *bins,
                 size_t n, uint64_t first, const char *relation)
{
    ds_put_format(s, "    %s:", title);
    for (size_t i = 0; i < n; i++) {
        if (bins[i]) {
            ds_put_format(s, " %s%"PRIu64":%"PRIu64, relation, first << i,
                          bins[i]);
        }
    }
    ds_put_char(s, '\n');
}

static void
format_stats(struct ds *s, const struct shaper_stats *stats, uint64_t now_ns)
{
    const uint64_t *c = stats->counters;

    ds_put_format(s, "    backlog: %"PRIu64" packets, %"PRIu64" bytes, "
                  "%"PRIu64" flows",
                  c[SHAPER_BACKLOG], c[SHAPER_BACKLOG_BYTES],
                  c[SHAPER_FLOWS]);
    if (c[SHAPER_BACKLOG] && c[SHAPER_NEXT_DUE_NS] != UINT64_MAX) {
        ds_put_format(s, ", next due in %"PRIu64" ns",
                      c[SHAPER_NEXT_DUE_NS] > now_ns
                      ? c[SHAPER_NEXT_DUE_NS] - now_ns : 0);
    }
    ds_put_format(s, "\n    sent: %"PRIu64" packets, %"PRIu64" bytes in "
                  "%"PRIu64" batches (mean %.1f)\n",
                  c[SHAPER_SENT], c[SHAPER_SENT_BYTES], c[SHAPER_BATCHES],
                  c[SHAPER_BATCHES]
                  ? (double) c[SHAPER_SENT] / c[SHAPER_BATCHES] : 0.0);
    ds_put_format(s, "    bypassed: %"PRIu64" packets, %"PRIu64" bytes\n",
                  c[SHAPER_BYPASSED], c[SHAPER_BYPASSED_BYTES]);
    ds_put_format(s, "    ecn_marked: %"PRIu64" packets\n",
                  c[SHAPER_ECN_MARKED]);
    ds_put_format(s, "    ahead: %"PRIu64" packets\n", c[SHAPER_AHEAD]);
    ds_put_format(s, "    dropped: max-delay %"PRIu64", backlog %"PRIu64
                  ", budget %"PRIu64", flows %"PRIu64", expired %"PRIu64
                  ", removed %"PRIu64", segment %"PRIu64"\n",
                  c[SHAPER_DROP_MAX_DELAY], c[SHAPER_DROP_BACKLOG],
                  c[SHAPER_DROP_BUDGET], c[SHAPER_DROP_FLOWS],
                  c[SHAPER_DROP_EXPIRED], c[SHAPER_DROP_REMOVED],
                  c[SHAPER_DROP_SEGMENT]);
    format_histogram(s, "batch size", stats->batch_size, SHAPER_BATCH_BINS, 1,
                     ">=");
    format_histogram(s, "lateness ns", stats->lateness, SHAPER_LATENESS_BINS,
                     1 << SHAPER_LATENESS_SHIFT, "<");
}

/* Shows the statistics of delay lines as text in 's' and as member "delayed"
 * of 'object'. */
static void
show_delay(const struct shaper_stats *stats, uint64_t now_ns, struct ds *s,
           struct json *object)
{
    const uint64_t *c = stats->counters;
    struct json *json = json_object_create();

    ds_put_format(s, "  delayed: %"PRIu64" packets, %"PRIu64" bytes, "
                  "%"PRIu64" flows",
                  c[SHAPER_BACKLOG], c[SHAPER_BACKLOG_BYTES],
                  c[SHAPER_FLOWS]);
    if (c[SHAPER_BACKLOG] && c[SHAPER_NEXT_DUE_NS] != UINT64_MAX) {
        ds_put_format(s, ", next due in %"PRIu64" ns",
                      c[SHAPER_NEXT_DUE_NS] > now_ns
                      ? c[SHAPER_NEXT_DUE_NS] - now_ns : 0);
    }
    ds_put_format(s, "\n    sent: %"PRIu64" packets, %"PRIu64" bytes\n"
                  "    dropped: flows %"PRIu64"\n",
                  c[SHAPER_SENT], c[SHAPER_SENT_BYTES], c[SHAPER_DROP_FLOWS]);
    format_histogram(s, "lateness ns", stats->lateness, SHAPER_LATENESS_BINS,
                     1 << SHAPER_LATENESS_SHIFT, "<");

    stats_to_json(stats, now_ns, json);
    json_object_put(object, "delayed", json);
}

static struct json *
flow_to_json(const struct shaper_flow_stats *f)
{
    struct json *object = json_object_create();
    struct ds key = DS_EMPTY_INITIALIZER;

    format_flow_key(&key, f);
    json_object_put(object, "flow",
                    json_string_create_nocopy(ds_steal_cstr(&key)));
    json_object_put(object, "rate_bps",
                    json_integer_create(f->gap_ns
                                        ? EDT_MTU_BYTES * 8000000000ULL
                                          / f->gap_ns : 0));
    json_object_put(object, "backlog", json_integer_create(f->backlog));
    json_object_put(object, "tx_packets", json_integer_create(f->tx_packets));
    json_object_put(object, "tx_bytes", json_integer_create(f->tx_bytes));
    return object;
}

/* Shows 'fb' as text in 's' or, if 'object' is nonnull, in that. */
static void
fb_show(const struct netdev_flowbundler *fb, struct ds *s,
        struct json *object)
    OVS_REQUIRES(fb->mutex)
{
    const struct shaper_config *config
        = ovsrcu_get(struct shaper_config *, &fb->config);
    struct json *threads = json_array_create_empty();
    struct json *queues = json_array_create_empty();
    struct svec problems = SVEC_EMPTY_INITIALIZER;
    struct fb_queue **sorted = fb_sorted_queues(fb);
    uint64_t now_ns = time_nsec();
    struct shaper_stats stats;
    struct hmapx_node *node;

    ds_put_format(s, "%s: %s\n", fb->name, config ? "shaping" : "off");
    fb_get_problems(fb, &problems);
    if (!svec_is_empty(&problems)) {
        struct json *refused = json_array_create_empty();

        for (size_t i = 0; i < problems.n; i++) {
            ds_put_format(s, "  refused: %s\n", problems.names[i]);
            json_array_add(refused, json_string_create(problems.names[i]));
        }
        json_object_put(object, "refused", refused);
    }
    svec_destroy(&problems);
    json_object_put(object, "shaping", json_boolean_create(config != NULL));

    if (config) {
        struct json *json = json_object_create();

        ds_put_cstr(s, "  config:");
        fb_qos_show(fb->values, s, json);
        ds_put_char(s, '\n');
        json_object_put(object, "config", json);
    }
    for (size_t i = 0; i < hmap_count(&fb->queues); i++) {
        const struct fb_queue *queue = sorted[i];
        struct netdev_queue_stats qstats;
        struct json *json, *json_config;

        if (!queue->in_range) {
            continue;
        }
        json = json_object_create();
        json_config = json_object_create();
        fb_queue_get_stats(fb, queue, &qstats);
        ds_put_format(s, "  queue %u:", queue->queue_id);
        fb_queue_show(queue->values, s, json_config);
        json_object_put(json, "config", json_config);
        ds_put_format(s, " sent %"PRIu64" packets, %"PRIu64" bytes, dropped "
                      "%"PRIu64"\n", qstats.tx_packets, qstats.tx_bytes,
                      qstats.tx_errors);
        json_object_put(json, "queue", json_integer_create(queue->queue_id));
        json_object_put(json, "sent", json_integer_create(qstats.tx_packets));
        json_object_put(json, "sent_bytes",
                        json_integer_create(qstats.tx_bytes));
        json_object_put(json, "dropped",
                        json_integer_create(qstats.tx_errors));
        json_array_add(queues, json);
    }
    free(sorted);
    json_object_put(object, "queues", queues);

    fb_get_stats(fb, &stats);
    stats_to_json(&stats, now_ns, object);
    ds_put_cstr(s, "  total:\n");
    format_stats(s, &stats, now_ns);
    fb_get_delay_stats(fb, &stats);
    if ((config && fb->values[FB_QOS_DELAY]) || stats.counters[SHAPER_SENT]
        || stats.counters[SHAPER_BACKLOG]) {
        show_delay(&stats, now_ns, s, object);
    }

    HMAPX_FOR_EACH (node, &fb->shapers) {
        struct shaper_flow_stats flows[SHOW_FLOWS];
        const struct flow_shaper *shaper = node->data;
        unsigned int core_id = flow_shaper_core_id(shaper);
        struct json *thread = json_object_create();
        struct json *json_flows = json_array_create_empty();
        size_t n;

        memset(&stats, 0, sizeof stats);
        stats.counters[SHAPER_NEXT_DUE_NS] = UINT64_MAX;
        flow_shaper_get_stats(shaper, &stats);
        if (is_pmd(core_id)) {
            ds_put_format(s, "  pmd thread core %u:\n", core_id);
            json_object_put(thread, "core", json_integer_create(core_id));
        } else {
            ds_put_cstr(s, "  main thread:\n");
            json_object_put(thread, "core", json_null_create());
        }
        format_stats(s, &stats, now_ns);
        stats_to_json(&stats, now_ns, thread);

        n = flow_shaper_get_busiest(shaper, flows, SHOW_FLOWS);
        for (size_t i = 0; i < n; i++) {
            ds_put_cstr(s, "    flow: ");
            format_flow_key(s, &flows[i]);
            ds_put_format(s, " rate=%llu backlog=%"PRIu32" sent %"PRIu64
                          " packets, %"PRIu64" bytes\n",
                          flows[i].gap_ns ? EDT_MTU_BYTES * 8000000000ULL
                                            / flows[i].gap_ns : 0,
                          flows[i].backlog, flows[i].tx_packets,
                          flows[i].tx_bytes);
            json_array_add(json_flows, flow_to_json(&flows[i]));
        }
        json_object_put(thread, "busiest_flows", json_flows);
        json_array_add(threads, thread);
    }
    json_object_put(object, "threads", threads);
}

static void
netdev_flowbundler_show(struct unixctl_conn *conn, int argc,
                        const char *argv[], void *aux OVS_UNUSED)
{
    struct json *ports = json_object_create();
    struct ds s = DS_EMPTY_INITIALIZER;
    struct sset receivers = SSET_INITIALIZER(&receivers);
    struct netdev_flowbundler *fb;
    const char *name;
    bool found = false;

    shaper_rx_get_names(&receivers);
    ovs_mutex_lock(&all_ports_mutex);
    LIST_FOR_EACH (fb, node, &all_ports) {
        ovs_mutex_lock(&fb->mutex);
        if (argc > 1 ? !strcmp(argv[1], fb->name)
                     : fb->type_error || ovsrcu_get(struct shaper_config *,
                                               &fb->config)) {
            struct json *port = json_object_create();

            fb_show(fb, &s, port);
            if (sset_find_and_delete(&receivers, fb->name)) {
                shaper_rx_show(fb->name, &s, port);
            }
            json_object_put(ports, fb->name, port);
            found = true;
        }
        ovs_mutex_unlock(&fb->mutex);
    }
    ovs_mutex_unlock(&all_ports_mutex);

    SSET_FOR_EACH (name, &receivers) {
        if (argc == 1 || !strcmp(argv[1], name)) {
            struct json *port = json_object_create();

            ds_put_format(&s, "%s: off\n", name);
            json_object_put(port, "shaping", json_boolean_create(false));
            shaper_rx_show(name, &s, port);
            json_object_put(ports, name, port);
            found = true;
        }
    }
    sset_destroy(&receivers);

    if (argc > 1 && !found) {
        char *error = xasprintf("%s: no port with QoS type=%s", argv[1],
                                FLOWBUNDLER_QOS_TYPE);

        unixctl_command_reply_error(conn, error);
        free(error);
        json_destroy(ports);
    } else if (unixctl_command_get_output_format(conn)
               == UNIXCTL_OUTPUT_FMT_JSON) {
        unixctl_command_reply_json(conn, ports);
    } else {
        unixctl_command_reply(conn, ds_cstr(&s));
        json_destroy(ports);
    }
    ds_destroy(&s);
}
