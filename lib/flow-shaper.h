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

#ifndef FLOW_SHAPER_H
#define FLOW_SHAPER_H 1

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "edt-meter.h"
#include "edt-pace.h"
#include "mltw.h"
#include "openvswitch/list.h"
#include "ovs-atomic.h"
#include "shaper-control.h"
#include "shaper-delay.h"
#include "shaper-flow-key.h"
#include "shaper-thread.h"

struct dp_packet;
struct dp_packet_batch;

/* Shaper of one output port in one thread
 * =======================================
 *
 * Holds packets until their earliest departure time and hands them out in
 * batches made of packets of different flows (FlowBundler, INFOCOM 2023,
 * section IV).  Packets wait in FIFOs, one for each combination of the meters
 * that a packet has passed, its destination and its output queue; only the
 * head of a FIFO waits in a multi-level timing wheel ("mltw.h").
 *
 * Properties
 * ----------
 *
 *  * Never early: a packet with an EDT does not leave before it.
 *
 *  * In order: packets of one FIFO leave in the order in which they came.  Two
 *    packets share a FIFO only if they passed the same meters
 *    (or came from the same port, if none) and have the same destination and
 *    output queue ("shaper-flow-key.h"), so departure times rise along a
 *    FIFO and no packet waits for that of another flow.  FIFOs are found by
 *    hash and full comparison.
 *
 *  * Fair: packets of different FIFOs alternate.  Without a rate a FIFO gives
 *    at most one packet before all the others that are due have had a turn.
 *    The rate of a port or queue is shared in bytes ("edt-pace.h"), also
 *    between threads; the FIFO that has had the least gives the next packet.
 *    Of queues that may send at the same time those of the first priority
 *    do.
 *
 *  * Shared by flows: packets of fair meters ("edt-late.h") wait in a FIFO for
 *    each flow rather than each destination, and these meters give out their
 *    time to FIFOs by turns.
 *
 *  * Paced at departure: the port and each of its queues may have a rate,
 *    which applies when packets leave.  All threads together keep to it.
 *    What keeps links alive is charged to it but does not wait for it
 *    ("shaper-control.h").  The main thread, which polls too seldom to find a
 *    port idle that another thread has packets for, has half of the rate if it
 *    needs that.
 *
 *  * Delayed, if so configured ("shaper-delay.h"): what has waited for its
 *    EDT and for the rates, or did not have to, goes on to a delay line, a
 *    shaper of its own without rates, and leaves when its delay is over.  The
 *    line is behind the rates: it holds what these carry, not what is offered,
 *    nothing in it is late, and it does not fill what waits for a rate.
 *
 *  * Signalled: a packet that leaves by more than 'ecn_threshold_ns' after its
 *    EDT or, without one, its arrival tells its receiver so by the ECN field
 *    of its IP header ("shaper-ecn.h").
 *
 *  * Bounded: packets held are limited per shaper, per pool of packet buffers
 *    and, among those who share a pool, per receiving port; time is limited
 *    by the meters and by 'max_delay_ns'.  Each dropped packet is counted
 *    under its cause (enum shaper_counter).
 *
 *  * Cheap: no lock, system call, division or scan per packet.  Memory is
 *    allocated in slabs when a backlog grows beyond what it has been.
 *
 * Thread-safety
 * -------------
 *
 *  A shaper and its 'struct shaper_thread' belong to one thread at a time.
 *  flow_shaper_detach() and flow_shaper_attach() pass a shaper on.  Only
 *  flow_shaper_get_counters() and flow_shaper_get_busiest() may be called by
 *  others, as long as the shaper exists.  Time is passed in by the caller, in
 *  ns on the monotonic clock that EDTs are stated in.
 */

/* Output queues: Open vSwitch's queue id, bounded so that it can be used as an
 * index: as many as HTB has. */
#define SHAPER_MAX_QUEUES 0xf000

/* Ranks by which queues of a thread send what is due: 0 first.  If queues have
 * more priorities than that, the last ones share a rank. */
#define SHAPER_RANKS 16

/* The rate of an output queue, its own or a part of the port's. */
struct shaper_class_config {
    uint32_t queue_id;
    uint32_t priority;              /* 0 first. */
    uint8_t rank;                   /* Below SHAPER_RANKS, by 'priority': see
                                     * shaper_config_set_ranks(). */
    struct edt_class *pace;         /* NULL if neither has one. */
    struct edt_params *params;      /* Of the queue's own rate, or NULL. */
};

/* Configuration of a port's shapers.  Immutable; freed with its last user.
 * Paces and their classes are shared by the shapers of all threads and by
 * successive configurations, so that a changed rate takes over where the old
 * one was. */
struct shaper_config {
    struct ovs_refcount ref_cnt;
    struct mltw_config wheel;       /* 'max_entries' is not used. */
    uint64_t max_delay_ns;
    uint64_t ecn_threshold_ns;      /* Lateness above which packets are marked
                                     * with CE; UINT64_MAX: none. */
    uint32_t max_backlog;           /* Packets per shaper. */
    uint32_t max_batch;             /* Packets per drain. */
    uint32_t max_flows;             /* FIFOs per shaper.  One port's packets
                                     * may fill 8/9 of those that others do
                                     * not. */
    uint32_t overhead_bytes;        /* Added per packet to port and queue
                                     * rates. */
    bool paced;                     /* Does the port or any queue have one? */
    bool is_line;                   /* Is this of a delay line?  Then what
                                     * comes has been admitted already. */
    struct shaper_delay delay;      /* Added when all else allows a packet to
                                     * leave. */
    struct edt_pace *port_pace;     /* NULL if the port has no rate. */
    struct edt_params *port_params; /* The same. */

    /* Queue ids that are not configured use class 0. */
    size_t n_classes;               /* At least 1. */
    struct shaper_class_config *classes;
    uint16_t *class_by_queue;       /* 'n_queue_ids' of them. */
    uint32_t n_queue_ids;
};

struct shaper_config *shaper_config_ref(const struct shaper_config *);
void shaper_config_unref(struct shaper_config *);
void shaper_config_set_ranks(struct shaper_config *);
void shaper_config_set_class(struct shaper_config *, uint32_t queue_id,
                             size_t class_idx);

/* Returns the index of the class in 'config' of queue 'queue_id'. */
static inline uint16_t
shaper_config_class(const struct shaper_config *config, uint32_t queue_id)
{
    return (queue_id < config->n_queue_ids ? config->class_by_queue[queue_id]
            : 0);
}

enum shaper_counter {
    SHAPER_SENT,                    /* Packets held and then sent. */
    SHAPER_SENT_BYTES,
    SHAPER_BYPASSED,                /* Packets due on arrival. */
    SHAPER_BYPASSED_BYTES,
    SHAPER_BATCHES,                 /* Drains that sent anything. */
    SHAPER_ECN_MARKED,              /* Sent, marked here with CE. */
    SHAPER_AHEAD,                   /* Sent, ahead of the rates of the port
                                     * and its queue. */
    SHAPER_DROP_MAX_DELAY,          /* Would have waited too long. */
    SHAPER_DROP_BACKLOG,            /* 'max_backlog' held. */
    SHAPER_DROP_BUDGET,             /* Buffers of the source's pool. */
    SHAPER_DROP_FLOWS,              /* 'max_flows' in use, or the port's
                                     * share of them. */
    SHAPER_DROP_EXPIRED,            /* Due 'max_delay_ns' and 10 ms ago. */
    SHAPER_DROP_REMOVED,            /* Port removed. */
    SHAPER_DROP_SEGMENT,            /* TSO packet that can't be segmented. */
    SHAPER_BACKLOG,                 /* Packets held now. */
    SHAPER_BACKLOG_BYTES,
    SHAPER_FLOWS,                   /* FIFOs that exist. */
    SHAPER_NEXT_DUE_NS,             /* UINT64_MAX if nothing waits. */
    SHAPER_N_COUNTERS
};
const char *shaper_counter_name(enum shaper_counter);

/* Histograms have a bin for each power of two; the last takes the rest. */
#define SHAPER_BATCH_BINS 9         /* 1, 2-3, 4-7, ... 256 and more. */
#define SHAPER_LATENESS_BINS 24     /* Below 128 ns, 256 ns, ... */
#define SHAPER_LATENESS_SHIFT 7

struct shaper_stats {
    uint64_t counters[SHAPER_N_COUNTERS];
    uint64_t batch_size[SHAPER_BATCH_BINS];
    uint64_t lateness[SHAPER_LATENESS_BINS];
};

/* Totals of an output queue. */
struct shaper_class_stats {
    uint64_t tx_packets;
    uint64_t tx_bytes;
    uint64_t drops;
};

#define SHAPER_SHOWN_METERS 8

struct shaper_flow_stats {
    struct shaper_flow_key key;
    uint32_t meters[SHAPER_SHOWN_METERS]; /* Of its chain, the first ones. */
    size_t n_meters;                /* In its chain, 0 if that has gone. */
    uint32_t gap_ns;                /* Of an MTU at the deciding rate. */
    uint32_t backlog;
    uint64_t tx_packets;
    uint64_t tx_bytes;
};

struct flow_shaper *flow_shaper_create(const struct shaper_config *,
                                       struct shaper_thread *,
                                       unsigned int core_id,
                                       uint64_t now_ns);
void flow_shaper_destroy(struct flow_shaper *);
void flow_shaper_set_config(struct flow_shaper *,
                            const struct shaper_config *, uint64_t now_ns);
void flow_shaper_set_closing(struct flow_shaper *, uint64_t now_ns);
bool flow_shaper_is_closing(const struct flow_shaper *);
const struct shaper_config *flow_shaper_config(const struct flow_shaper *);
unsigned int flow_shaper_core_id(const struct flow_shaper *);

uint32_t flow_shaper_enqueue(struct flow_shaper *, struct dp_packet_batch *,
                             const struct shaper_source *sources,
                             uint64_t now_ns);
void flow_shaper_put(struct flow_shaper *, struct dp_packet *,
                     struct shaper_source source, uint64_t now_ns);
size_t flow_shaper_n_new(const struct flow_shaper *);
size_t flow_shaper_drain(struct flow_shaper *, struct dp_packet_batch *,
                         uint64_t now_ns);
const struct shaper_source *flow_shaper_drained_sources(
    const struct flow_shaper *);
void flow_shaper_end_drain(struct flow_shaper *, size_t n_sent,
                           uint64_t now_ns);
uint64_t flow_shaper_next_due(const struct flow_shaper *, uint64_t now_ns);
size_t flow_shaper_backlog(const struct flow_shaper *);
bool flow_shaper_is_busy(const struct flow_shaper *);

void flow_shaper_detach(struct flow_shaper *);
void flow_shaper_attach(struct flow_shaper *, struct shaper_thread *,
                        unsigned int core_id);
void flow_shaper_merge(struct flow_shaper *, struct flow_shaper *other,
                       uint64_t now_ns);

void flow_shaper_get_stats(const struct flow_shaper *, struct shaper_stats *);
void flow_shaper_get_delay_stats(const struct flow_shaper *,
                                 struct shaper_stats *);
bool flow_shaper_get_class_stats(const struct flow_shaper *,
                                 uint32_t queue_id,
                                 struct shaper_class_stats *);
size_t flow_shaper_get_busiest(const struct flow_shaper *,
                               struct shaper_flow_stats *, size_t max);

#endif /* flow-shaper.h */
