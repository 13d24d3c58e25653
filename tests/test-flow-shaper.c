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

/* Tests of the shaper of a port, in simulated time.
 *
 * Most of them run a shaper beside a model of it, struct world: a FIFO for
 * each flow, and the rules for what is held, what passes and what is dropped.
 * The model knows nothing about wheels, slots or ready lists.  It does not
 * predict when exactly a packet leaves; it checks that this is not before its
 * EDT, not before its turn, and not later than its flow's granularity. */

#include <config.h>
#undef NDEBUG

#include "flow-shaper.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dp-packet.h"
#include "edt-stamp.h"
#include "fb-test.h"
#include "hash.h"
#include "odp-util.h"
#include "openvswitch/util.h"
#include "packets.h"
#include "random.h"
#include "shaper-offload.h"
#include "smap.h"
#include "userspace-tso.h"
#include "util.h"

#define MTU EDT_MTU_BYTES
#define START_NS UINT64_C(100000000000000)
#define MAX_BATCH NETDEV_MAX_BURST
#define MS UINT64_C(1000000)

/* Polls may come this late before a packet expires. */
#define SLACK_NS (10 * MS)

/* As documented in "flow-shaper.h" or to be seen in its statistics. */
#define HEAP_PACKETS 65536              /* Packets that are not in a pool... */
#define HEAP_BUDGET (HEAP_PACKETS / 4 * 3)  /* ...that shapers may hold. */
#define FLOWS_SHARE 8       /* Times what is left a port may have of FIFOs. */

/* Configurations. */

struct queue_options {
    uint32_t id;
    uint64_t rate_bps;          /* 0: none. */
    uint64_t burst_bytes;
    uint32_t priority;
};

#define MAX_QUEUES 8

struct options {
    struct mltw_config wheel;
    uint64_t max_delay_ns;
    uint64_t ecn_threshold_ns;  /* UINT64_MAX: none. */
    uint32_t max_backlog;
    uint32_t max_flows;
    uint32_t overhead_bytes;
    uint64_t port_rate_bps;     /* 0: none. */
    size_t n_queues;
    struct queue_options queues[MAX_QUEUES];
};

#define OPTIONS_DEFAULT                 \
    ((struct options) {                 \
        .wheel = MLTW_CONFIG_DEFAULT,   \
        .max_delay_ns = 50 * MS,        \
        .ecn_threshold_ns = UINT64_MAX, \
        .max_backlog = 1 << 18,         \
        .max_flows = 4096,              \
    })

/* Returns parameters for a rate, NULL if that is 0. */
static struct edt_params *
rate_params(uint64_t rate_bps)
{
    const struct edt_limits limits = { .rate = rate_bps };

    return rate_bps ? edt_params_create(&limits) : NULL;
}

/* Makes class 'i' of 'config' have a part in 'pace'. */
static void
config_set_class(struct shaper_config *config, size_t i,
                 struct edt_pace *pace, const struct queue_options *queue)
{
    struct shaper_class_config *cc = &config->classes[i];
    const struct edt_class_limits limits = {
        .priority = queue->priority,
        .weight = 1,
        .max_bps = queue->rate_bps,
        .burst_bytes = queue->burst_bytes,
    };

    edt_class_unref(cc->pace);
    free(cc->params);
    cc->queue_id = queue->id;
    cc->priority = queue->priority;
    cc->params = rate_params(queue->rate_bps);
    cc->pace = (config->port_params || cc->params
                ? edt_class_create(pace, &limits) : NULL);
    shaper_config_set_class(config, queue->id, i);
    config->paced |= cc->pace != NULL;
}

static struct shaper_config *
config_create(const struct options *o)
{
    struct shaper_config *config = xzalloc(sizeof *config);
    struct edt_pace *pace;

    ovs_refcount_init(&config->ref_cnt);
    config->wheel = o->wheel;
    config->max_delay_ns = o->max_delay_ns;
    config->ecn_threshold_ns = o->ecn_threshold_ns;
    config->max_backlog = o->max_backlog;
    config->max_batch = 128;
    config->max_flows = o->max_flows;
    config->overhead_bytes = o->overhead_bytes;
    config->port_params = rate_params(o->port_rate_bps);
    pace = edt_pace_create(o->port_rate_bps);
    config->port_pace = config->port_params ? edt_pace_ref(pace) : NULL;
    config->classes = xcalloc(o->n_queues + 1, sizeof *config->classes);
    config->n_classes = 1;
    config_set_class(config, 0, pace, &(struct queue_options) { .id = 0 });
    for (size_t i = 0; i < o->n_queues; i++) {
        const struct queue_options *queue = &o->queues[i];

        config_set_class(config, queue->id ? config->n_classes++ : 0, pace,
                         queue);
    }
    shaper_config_set_ranks(config);
    edt_pace_unref(pace);
    return config;
}

/* Granularity of a flow. */
static uint64_t
granularity_ns(const struct mltw_config *wheel, uint64_t gap_ns)
{
    uint64_t g = wheel->min_granularity_ns;

    for (uint32_t i = 1; i < wheel->n_wheels && 2 * g <= gap_ns
                         && 2 * g <= wheel->max_granularity_ns; i++) {
        g *= 2;
    }
    return g;
}

/* Packets. */

/* What their stamps name. */
static struct edt_chains *chains;

static struct shaper_thread *
thread_create(void)
{
    struct shaper_thread *thread = shaper_thread_create();

    thread->chains = chains;
    return thread;
}

/* Returns the chain of 'meters'. */
static uint32_t
chain_of(const uint32_t meters[3])
{
    uint32_t chain = EDT_CHAIN_NONE;

    for (int i = 0; i < 3 && meters[0] != EDT_CHAIN_NONE; i++) {
        chain = edt_chains_next(chains, chain, meters[i], false);
    }
    return chain;
}

/* Gives 'packet', one that has passed a meter that is not fair, 'edt_ns',
 * unless that is 0. */
static void
set_edt(struct dp_packet *packet, uint64_t edt_ns, uint32_t gap_ns,
        uint32_t chain)
{
    packet->md.edt = (struct edt_stamp) {
        .edt_ns = edt_ns,
        .chain = chain,
        .gap_ns = gap_ns,
        .flags = EDT_PROMISED,
    };
    packet->md.edt_valid = edt_ns != 0;
}

enum dest_type { DEST_ETH, DEST_IPV4, DEST_IPV6, N_DEST_TYPES };

#define MIN_PACKET 80
#define MAX_PACKET 9018

/* Everything by which FIFOs are told apart. */
struct flow_id {
    uint32_t meters[3];         /* The first is EDT_CHAIN_NONE: no stamp. */
    uint32_t port;              /* Then where its packets are received. */
    uint32_t queue_id;
    enum dest_type dest_type;
    uint32_t dest;
    unsigned int n_vlans;       /* This does not tell FIFOs apart. */
};

static void
put_be32(uint8_t *p, uint32_t value)
{
    ovs_be32 be32 = htonl(value);

    memcpy(p, &be32, sizeof be32);
}

/* Returns a packet of 'size' bytes, with 'number' at its end.  Its ECN field,
 * if it has one, is the end of 'number'. */
static struct dp_packet *
packet_create(const struct flow_id *id, uint64_t edt_ns, uint32_t gap_ns,
              uint32_t size, uint32_t number)
{
    static const ovs_be16 types[] = {
        [DEST_ETH] = CONSTANT_HTONS(ETH_TYPE_RARP),
        [DEST_IPV4] = CONSTANT_HTONS(ETH_TYPE_IP),
        [DEST_IPV6] = CONSTANT_HTONS(ETH_TYPE_IPV6),
    };
    struct dp_packet *packet = dp_packet_new(size);
    uint8_t *data = dp_packet_put_zeros(packet, size);
    size_t ofs = 2 * ETH_ADDR_LEN;

    ovs_assert(size >= MIN_PACKET);

    /* All packets to IP destinations have the same MAC addresses, and each
     * comes from somewhere else. */
    data[0] = 2;
    if (id->dest_type == DEST_ETH) {
        put_be32(data + 2, id->dest);
    }
    for (unsigned int i = 0; i < id->n_vlans; i++) {
        bool outer = i + 1 < id->n_vlans;

        data[ofs++] = outer ? 0x88 : 0x81;
        data[ofs++] = outer ? 0xa8 : 0x00;
        data[ofs++] = 0;
        data[ofs++] = number;
    }
    memcpy(data + ofs, &types[id->dest_type], sizeof types[0]);
    ofs += 2;
    if (id->dest_type == DEST_IPV4) {
        data[ofs] = 0x45;
        data[ofs + 1] = number & IP_ECN_MASK;
        put_be32(data + ofs + 12, number);
        put_be32(data + ofs + 16, id->dest);
    } else if (id->dest_type == DEST_IPV6) {
        data[ofs] = 0x60;
        data[ofs + 1] = (number & IP_ECN_MASK) << 4;
        put_be32(data + ofs + 8, number);
        put_be32(data + ofs + 24 + 4 * (id->dest % 4), id->dest);
    }
    memcpy(data + size - sizeof number, &number, sizeof number);

    pkt_metadata_init(&packet->md, ODPP_NONE);
    packet->md.skb_priority = id->queue_id;
    set_edt(packet, edt_ns, gap_ns, chain_of(id->meters));
    return packet;
}

static uint32_t
packet_number(const struct dp_packet *packet)
{
    uint32_t number;

    memcpy(&number, (uint8_t *) dp_packet_tail(packet) - sizeof number,
           sizeof number);
    return number;
}

/* Returns the ECN field of 'packet', which is one with 'id'. */
static uint8_t
packet_ecn(const struct dp_packet *packet, const struct flow_id *id)
{
    const uint8_t *ip = (const uint8_t *) dp_packet_data(packet)
                        + ETH_HEADER_LEN + id->n_vlans * VLAN_HEADER_LEN;

    return (id->dest_type == DEST_IPV4 ? ip[1] : ip[1] >> 4) & IP_ECN_MASK;
}

/* The model. */

enum fate { FATE_HELD, FATE_PASSED, FATE_SENT, FATE_DROPPED };

struct record {
    uint64_t edt_ns;            /* Time of arrival if 'stamped' is false. */
    uint32_t flow;
    uint32_t size;
    uint16_t source;
    bool stamped;
    enum fate fate;
};

struct fifo {
    struct flow_id id;
    bool stamped;
    uint32_t gap_ns;
    uint32_t max_gap_ns;        /* That it has ever had. */
    uint64_t last_edt_ns;

    uint32_t *numbers;          /* Of its packets. */
    size_t head, tail, allocated;
    uint16_t source;            /* Of the packet that it began to wait with. */
    uint64_t bytes;             /* That it holds. */

    unsigned int n_turns;       /* In the current drain. */
    uint64_t turn_bytes;        /* Of these. */
    bool due;                   /* At its start. */
};

#define MAX_FLOWS 256
#define MAX_SOURCES 16

/* Receive queues that ports with the same remainder share. */
#define MAX_RXQS 3

/* Returns where the packets that 'port' receives come from. */
static struct shaper_source
test_source(uint16_t port)
{
    return (struct shaper_source) {
        .port = port,
        .rxq = port == SHAPER_NO_SOURCE ? SHAPER_NO_RXQ : 1 + port % MAX_RXQS,
    };
}

/* A shaper and its model. */
struct world {
    struct options options;
    struct shaper_config *config;
    struct shaper_thread *thread;
    struct flow_shaper *s;
    uint64_t now_ns;
    bool closing;
    uint64_t release_ns;        /* When what is held leaves if closing. */
    bool expires;               /* Drops may be ahead of the model's. */
    uint64_t drained_ns;        /* Last time. */
    uint64_t ahead_bytes;       /* That a flow may have before others. */

    struct fifo flows[MAX_FLOWS];
    size_t n_flows;
    size_t n_active;            /* Flows that hold packets. */
    size_t n_active_by_source[MAX_SOURCES];
    size_t n_held;
    size_t n_held_by_source[MAX_SOURCES];
    uint64_t bytes_by_rxq[1 + MAX_RXQS];
    uint64_t unstamped_bytes[MAX_QUEUES + 1];

    uint64_t counters[SHAPER_N_COUNTERS];
    uint64_t n_stamped_sent;
    struct shaper_class_stats classes[MAX_QUEUES + 1];
};

/* Of all packets there ever were, by their numbers. */
static struct record *records;
static size_t n_records, allocated_records;

/* Packets that were marked with CE, in all worlds. */
static uint64_t n_marked;

static size_t
fifo_length(const struct fifo *f)
{
    return f->tail - f->head;
}

static struct record *
fifo_first(const struct fifo *f)
{
    return &records[f->numbers[f->head]];
}

static void
fifo_append(struct fifo *f, uint32_t number)
{
    if (f->tail == f->allocated) {
        f->numbers = x2nrealloc(f->numbers, &f->allocated, sizeof *f->numbers);
    }
    f->numbers[f->tail++] = number;
}

static bool
flow_id_same_fifo(const struct flow_id *a, const struct flow_id *b)
{
    return (!memcmp(a->meters, b->meters, sizeof a->meters)
            && a->port == b->port && a->queue_id == b->queue_id
            && a->dest_type == b->dest_type && a->dest == b->dest);
}

/* Adds a flow with a random identity that no other flow of 'w' has. */
static struct fifo *
world_add_flow(struct world *w, bool stamped, uint32_t queue_id)
{
    struct fifo *f = &w->flows[w->n_flows];
    bool again;

    ovs_assert(w->n_flows < MAX_FLOWS);
    memset(f, 0, sizeof *f);
    do {
        f->id = (struct flow_id) {
            .meters = { stamped ? choose(4) : EDT_CHAIN_NONE,
                        stamped ? choose(4) : 0, stamped ? choose(4) : 0 },
            .port = (stamped ? 0 : choose(20) ? choose(MAX_SOURCES - 1)
                     : SHAPER_NO_SOURCE),
            .queue_id = queue_id,
            .dest_type = choose(N_DEST_TYPES),
            .dest = choose(16),
            .n_vlans = choose(3),
        };
        again = false;
        for (size_t i = 0; i < w->n_flows; i++) {
            again |= flow_id_same_fifo(&f->id, &w->flows[i].id);
        }
    } while (again);
    f->stamped = stamped;
    f->gap_ns = f->max_gap_ns = stamped ? 1 + choose_log(10 * MS) : 0;
    w->n_flows++;
    return f;
}

static void
world_init(struct world *w, const struct options *o)
{
    memset(w, 0, sizeof *w);
    w->options = *o;
    w->config = config_create(o);
    w->thread = thread_create();
    w->now_ns = START_NS + choose(1 << 20);
    w->s = flow_shaper_create(w->config, w->thread, 3, w->now_ns);
}

/* Index of the class of 'queue_id'. */
static size_t
world_class(const struct world *w, uint32_t queue_id)
{
    return shaper_config_class(w->config, queue_id);
}

static bool
class_is_paced(const struct world *w, size_t class)
{
    return w->config->port_pace || w->config->classes[class].pace;
}

/* How long after its EDT a packet that waits for a port or queue expires. */
static uint64_t
expiry_ns(const struct world *w)
{
    return w->config->max_delay_ns + SLACK_NS;
}

/* Bytes without an EDT that a class may hold. */
static uint64_t
class_unstamped_limit(const struct world *w, size_t class)
{
    uint64_t rate = w->options.port_rate_bps;

    for (size_t i = 0; i < w->options.n_queues; i++) {
        const struct queue_options *q = &w->options.queues[i];

        if (q->id == w->config->classes[class].queue_id && q->rate_bps) {
            rate = rate ? MIN(rate, q->rate_bps) : q->rate_bps;
        }
    }
    return rate ? MAX((__int128) rate * w->options.max_delay_ns / 8000000000,
                      MTU)
                : UINT64_MAX;
}

/* Compares statistics with what the model has counted. */
static void
world_check_stats(const struct world *w)
{
    struct shaper_stats stats;
    uint64_t n;

    if (w->expires) {
        return;
    }
    memset(&stats, 0, sizeof stats);
    stats.counters[SHAPER_NEXT_DUE_NS] = UINT64_MAX;
    flow_shaper_get_stats(w->s, &stats);
    for (int i = 0; i < SHAPER_N_COUNTERS; i++) {
        if (i != SHAPER_FLOWS && i != SHAPER_NEXT_DUE_NS) {
            CHECK(stats.counters[i] == w->counters[i],
                  "%s is %"PRIu64" rather than %"PRIu64,
                  shaper_counter_name(i), stats.counters[i], w->counters[i]);
        }
    }
    CHECK(stats.counters[SHAPER_FLOWS] >= w->n_active
          && stats.counters[SHAPER_FLOWS] <= w->n_flows,
          "%"PRIu64" FIFOs, of %"PRIuSIZE" flows, %"PRIuSIZE" of which hold "
          "packets", stats.counters[SHAPER_FLOWS], w->n_flows, w->n_active);
    CHECK(flow_shaper_backlog(w->s) == w->n_held, "backlog is %"PRIuSIZE,
          flow_shaper_backlog(w->s));

    for (int i = 0; i <= MAX_RXQS; i++) {
        uint64_t bytes = shaper_thread_rxq_bytes(w->thread, i);
        uint64_t expected = i == SHAPER_NO_RXQ ? 0 : w->bytes_by_rxq[i];

        CHECK(bytes == expected, "%"PRIu64" bytes of receive queue %d rather "
              "than %"PRIu64, bytes, i, expected);
    }

    n = 0;
    for (int i = 0; i < SHAPER_BATCH_BINS; i++) {
        n += stats.batch_size[i];
    }
    CHECK(n == w->counters[SHAPER_BATCHES],
          "histogram has %"PRIu64" batches rather than %"PRIu64, n,
          w->counters[SHAPER_BATCHES]);
    n = 0;
    for (int i = 0; i < SHAPER_LATENESS_BINS; i++) {
        n += stats.lateness[i];
    }
    CHECK(n == w->n_stamped_sent, "histogram has the lateness of %"PRIu64
          " packets rather than %"PRIu64, n, w->n_stamped_sent);

    for (size_t i = 0; i < w->config->n_classes; i++) {
        struct shaper_class_stats cs = { 0, 0, 0 };
        uint32_t queue_id = w->config->classes[i].queue_id;

        CHECK(flow_shaper_get_class_stats(w->s, queue_id, &cs)
              && cs.tx_packets == w->classes[i].tx_packets
              && cs.tx_bytes == w->classes[i].tx_bytes
              && cs.drops == w->classes[i].drops,
              "queue %"PRIu32": %"PRIu64" packets, %"PRIu64" bytes sent, "
              "%"PRIu64" dropped rather than %"PRIu64", %"PRIu64", %"PRIu64,
              queue_id, cs.tx_packets, cs.tx_bytes, cs.drops,
              w->classes[i].tx_packets, w->classes[i].tx_bytes,
              w->classes[i].drops);
    }
}

/* Does 'r' not wait for rates, since the switch itself sends it? */
static bool
goes_ahead(const struct world *w, const struct record *r)
{
    size_t class = world_class(w, w->flows[r->flow].id.queue_id);

    return r->source == SHAPER_NO_SOURCE && class_is_paced(w, class);
}

static void
world_count(struct world *w, struct record *r, enum shaper_counter cause)
{
    size_t class = world_class(w, w->flows[r->flow].id.queue_id);

    w->counters[cause]++;
    w->counters[SHAPER_AHEAD] += cause == SHAPER_BYPASSED && goes_ahead(w, r);
    if (cause == SHAPER_SENT || cause == SHAPER_BYPASSED) {
        w->counters[cause + 1] += r->size;
        w->classes[class].tx_packets++;
        w->classes[class].tx_bytes += r->size;
    } else {
        w->classes[class].drops++;
    }
    r->fate = cause == SHAPER_SENT ? FATE_SENT
              : cause == SHAPER_BYPASSED ? FATE_PASSED
              : FATE_DROPPED;
}

static void
world_hold(struct world *w, uint32_t number)
{
    struct record *r = &records[number];
    struct fifo *f = &w->flows[r->flow];

    r->fate = FATE_HELD;
    if (!fifo_length(f)) {
        f->source = r->source;
        w->n_active++;
        w->n_active_by_source[f->source % MAX_SOURCES]++;
    }
    fifo_append(f, number);
    f->bytes += r->size;
    w->n_held++;
    w->n_held_by_source[r->source % MAX_SOURCES]++;
    w->bytes_by_rxq[test_source(r->source).rxq] += r->size;
    w->counters[SHAPER_BACKLOG]++;
    w->counters[SHAPER_BACKLOG_BYTES] += r->size;
    if (!r->stamped) {
        w->unstamped_bytes[world_class(w, f->id.queue_id)] += r->size;
    }
}

/* Takes the first packet out of 'f'. */
static void
world_release(struct world *w, struct fifo *f)
{
    struct record *r = fifo_first(f);

    f->head++;
    f->bytes -= r->size;
    if (!fifo_length(f)) {
        w->n_active--;
        w->n_active_by_source[f->source % MAX_SOURCES]--;
    }
    w->n_held--;
    w->n_held_by_source[r->source % MAX_SOURCES]--;
    w->bytes_by_rxq[test_source(r->source).rxq] -= r->size;
    w->counters[SHAPER_BACKLOG]--;
    w->counters[SHAPER_BACKLOG_BYTES] -= r->size;
    if (!r->stamped) {
        w->unstamped_bytes[world_class(w, f->id.queue_id)] -= r->size;
    }
}

/* May 'f', whose packets have no EDT, hold 'size' more bytes in 'class': its
 * part of what may wait there, or as much as there is left? */
static bool
world_has_room(const struct world *w, size_t class, const struct fifo *f,
               uint32_t size)
{
    uint64_t limit = class_unstamped_limit(w, class);
    uint64_t all = w->unstamped_bytes[class];
    uint32_t n = 0;

    for (size_t i = 0; i < w->n_flows; i++) {
        const struct fifo *other = &w->flows[i];

        n += (!other->stamped && (other == f || fifo_length(other))
              && world_class(w, other->id.queue_id) == class);
    }
    return (!all
            || f->bytes + size <= limit / n
            || (all + size <= limit && f->bytes + size <= limit - all)
            || (all + size > limit && !f->bytes && all / 2 <= limit));
}

/* Says whether 'r' waits (SHAPER_BACKLOG), passes (SHAPER_BYPASSED), or for
 * what cause it is dropped.  'put' says that it does not pass. */
static enum shaper_counter
world_predict(const struct world *w, const struct record *r, bool put)
{
    const struct fifo *f = &w->flows[r->flow];
    size_t class = world_class(w, f->id.queue_id);
    bool due = !r->stamped || r->edt_ns <= w->now_ns;
    bool paced = class_is_paced(w, class);

    if (goes_ahead(w, r)) {
        ovs_assert(!r->stamped);
        return SHAPER_BYPASSED;
    }
    if (!fifo_length(f) && ((due && !paced) || w->closing) && !put) {
        return SHAPER_BYPASSED;
    }

    uint32_t mine = w->n_held_by_source[r->source % MAX_SOURCES];

    if (!r->stamped && !world_has_room(w, class, f, r->size)) {
        return SHAPER_DROP_MAX_DELAY;
    } else if (w->n_held >= w->config->max_backlog) {
        return SHAPER_DROP_BACKLOG;
    } else if (f->stamped
               ? w->n_held >= HEAP_BUDGET + HEAP_PACKETS / 16
               : w->n_held >= HEAP_BUDGET || mine >= HEAP_BUDGET - w->n_held) {
        return SHAPER_DROP_BUDGET;
    } else if (!fifo_length(f)
               && (w->n_active >= w->config->max_flows
                   || (w->n_active_by_source[r->source % MAX_SOURCES]
                       / FLOWS_SHARE
                       >= w->config->max_flows - w->n_active))) {
        return SHAPER_DROP_FLOWS;
    }
    return SHAPER_BACKLOG;
}

/* A packet of 'f', with an EDT unless that is 0, that is not yet offered. */
static struct dp_packet *
world_packet(struct world *w, struct fifo *f, uint64_t edt_ns, uint32_t size,
             uint16_t source)
{
    if (n_records == allocated_records) {
        records = x2nrealloc(records, &allocated_records, sizeof *records);
    }
    records[n_records] = (struct record) {
        .edt_ns = edt_ns ? edt_ns : w->now_ns,
        .flow = f - w->flows,
        .size = size,
        .source = f->stamped ? source : f->id.port,
        .stamped = edt_ns != 0,
    };
    return packet_create(&f->id, edt_ns, f->gap_ns, size, n_records++);
}

/* Offers 'batch' to the shaper and frees what passes. */
static void
world_offer(struct world *w, struct dp_packet_batch *batch)
{
    size_t n = dp_packet_batch_size(batch);
    uint32_t expected[MAX_BATCH];
    uint32_t expected_bitmap = 0;
    struct shaper_source sources[MAX_BATCH] = { { 0, 0 } };
    size_t n_expected = 0;

    for (size_t i = 0; i < n; i++) {
        uint32_t number = packet_number(batch->packets[i]);
        struct record *r = &records[number];
        enum shaper_counter what = world_predict(w, r, false);

        sources[i] = test_source(r->source);
        if (what == SHAPER_BACKLOG) {
            world_hold(w, number);
        } else {
            world_count(w, r, what);
            if (what == SHAPER_BYPASSED) {
                expected[n_expected++] = number;
                expected_bitmap |= UINT32_C(1) << i;
            }
        }
    }

    uint32_t bitmap = flow_shaper_enqueue(w->s, batch, sources, w->now_ns);

    CHECK(bitmap == expected_bitmap, "%#"PRIx32" says which packets pass "
          "rather than %#"PRIx32, bitmap, expected_bitmap);
    CHECK(dp_packet_batch_size(batch) == n_expected, "%"PRIuSIZE" of "
          "%"PRIuSIZE" packets pass rather than %"PRIuSIZE,
          dp_packet_batch_size(batch), n, n_expected);
    for (size_t i = 0; i < n_expected; i++) {
        CHECK(packet_number(batch->packets[i]) == expected[i],
              "packet %"PRIu32" passes rather than %"PRIu32,
              packet_number(batch->packets[i]), expected[i]);
    }
    dp_packet_delete_batch(batch, true);
    world_check_stats(w);
}

/* Offers one packet. */
static void
world_offer_one(struct world *w, struct fifo *f, uint64_t edt_ns,
                uint32_t size, uint16_t source)
{
    struct dp_packet_batch batch;

    dp_packet_batch_init_packet(&batch, world_packet(w, f, edt_ns, size,
                                                     source));
    world_offer(w, &batch);
}

/* Hands one packet over. */
static void
world_put_one(struct world *w, struct fifo *f, uint64_t edt_ns, uint32_t size,
              uint16_t source)
{
    struct dp_packet *packet = world_packet(w, f, edt_ns, size, source);
    uint32_t number = packet_number(packet);
    enum shaper_counter what = world_predict(w, &records[number], true);

    if (what == SHAPER_BACKLOG) {
        world_hold(w, number);
    } else {
        world_count(w, &records[number], what);
    }
    flow_shaper_put(w->s, packet, test_source(records[number].source),
                    w->now_ns);
    world_check_stats(w);
}

static bool
fifo_is_overdue(const struct world *w, const struct fifo *f)
{
    return fifo_length(f)
           && fifo_first(f)->edt_ns
              + granularity_ns(&w->config->wheel, f->max_gap_ns)
              <= w->now_ns;
}

/* Makes the shaper close. */
static void
world_close(struct world *w)
{
    if (!w->closing) {
        w->closing = true;
        w->release_ns = w->now_ns + w->config->max_delay_ns;
    }
    flow_shaper_set_closing(w->s, w->now_ns);
    CHECK(flow_shaper_is_closing(w->s), "not closing");
}

/* Checks a packet that the shaper has sent. */
static void
world_sent(struct world *w, const struct dp_packet *packet)
{
    uint32_t number = packet_number(packet);

    CHECK(number < n_records, "packet %"PRIu32" never existed", number);

    struct record *r = &records[number];
    struct fifo *f = &w->flows[r->flow];
    bool released = w->closing && w->now_ns >= w->release_ns;

    CHECK(r->fate == FATE_HELD, "packet %"PRIu32" was not held (%d)",
          number, r->fate);
    CHECK(released || w->now_ns >= r->edt_ns,
          "packet %"PRIu32" leaves %"PRIu64" ns early", number,
          r->edt_ns - w->now_ns);

    /* What was before it has expired or was out of order. */
    while (fifo_length(f) && f->numbers[f->head] != number) {
        struct record *first = fifo_first(f);

        CHECK(w->config->paced
              && w->now_ns > first->edt_ns + expiry_ns(w),
              "packet %"PRIu32" overtakes %"PRIu32, number,
              f->numbers[f->head]);
        world_release(w, f);
        world_count(w, first, SHAPER_DROP_EXPIRED);
    }
    CHECK(fifo_length(f), "packet %"PRIu32" leaves twice", number);
    CHECK(!w->config->paced || released
          || w->now_ns <= r->edt_ns + expiry_ns(w),
          "packet %"PRIu32" leaves though it has expired", number);

    /* All that are due have their turns, one by one.  At a rate they have
     * as many bytes as others, but for the largest packet of each and what
     * one that has waited since the last poll has not had meanwhile. */
    if (w->config->n_classes == 1 && f->n_turns && !released) {
        for (size_t i = 0; i < w->n_flows; i++) {
            const struct fifo *other = &w->flows[i];

            CHECK(!other->due || other->n_turns
                  || (w->config->paced && f->turn_bytes <= w->ahead_bytes),
                  "flow %"PRIu32" has had %u turns, %"PRIu64" bytes, before "
                  "flow %"PRIuSIZE" has one", r->flow, f->n_turns,
                  f->turn_bytes, i);
        }
    }
    f->n_turns++;
    f->turn_bytes += r->size;

    if (f->id.dest_type != DEST_ETH) {
        bool late = w->now_ns > r->edt_ns
                    && w->now_ns - r->edt_ns > w->config->ecn_threshold_ns;
        uint8_t ecn = number & IP_ECN_MASK;
        bool marked = late && (ecn == IP_ECN_ECT_0 || ecn == IP_ECN_ECT_1);

        CHECK(packet_ecn(packet, &f->id) == (marked ? IP_ECN_CE : ecn),
              "ECN field of packet %"PRIu32", %"PRIu64" ns late, is %d",
              number, w->now_ns - r->edt_ns, packet_ecn(packet, &f->id));
        w->counters[SHAPER_ECN_MARKED] += marked;
        n_marked += marked;
    }
    world_release(w, f);
    world_count(w, r, SHAPER_SENT);
    w->n_stamped_sent += r->stamped;
}

/* Drains at most 'max' packets and one batch more (0: all that is due) and
 * returns their number. */
static size_t
world_drain(struct world *w, size_t max)
{
    struct dp_packet_batch batch;
    size_t n_sent = 0;

    dp_packet_batch_init(&batch);
    for (size_t i = 0; i < w->n_flows; i++) {
        w->flows[i].due = fifo_is_overdue(w, &w->flows[i]);
        w->flows[i].n_turns = 0;
        w->flows[i].turn_bytes = 0;
    }
    w->ahead_bytes = UINT64_MAX;
    if (w->options.port_rate_bps) {
        w->ahead_bytes = 3 * MAX_PACKET
                         + (double) w->options.port_rate_bps / 8e9
                           * (w->now_ns - w->drained_ns);
    }
    while (!max || n_sent < max) {
        size_t n = flow_shaper_drain(w->s, &batch, w->now_ns);
        struct dp_packet *packet;

        CHECK(n >= dp_packet_batch_size(&batch)
              && dp_packet_batch_size(&batch) <= MAX_BATCH,
              "drain returns %"PRIuSIZE, n);
        if (!n) {
            break;
        }
        n = dp_packet_batch_size(&batch);
        DP_PACKET_BATCH_FOR_EACH (i, packet, &batch) {
            struct shaper_source from = flow_shaper_drained_sources(w->s)[i];
            uint16_t source = records[packet_number(packet)].source;

            CHECK(from.port == source
                  && from.rxq == test_source(source).rxq,
                  "packet from port %u is said to be from %u", source,
                  from.port);
            world_sent(w, packet);
        }
        dp_packet_delete_batch(&batch, true);
        n_sent += n;
    }
    flow_shaper_end_drain(w->s, n_sent, w->now_ns);
    if (!max) {
        w->drained_ns = w->now_ns;
    }
    w->counters[SHAPER_BATCHES] += n_sent > 0;

    if (!max && !w->config->paced) {
        for (size_t i = 0; i < w->n_flows; i++) {
            CHECK(!fifo_is_overdue(w, &w->flows[i]),
                  "packet %"PRIu32" of flow %"PRIuSIZE" should have left "
                  "at %"PRIu64", or %"PRIu64" ns later, now is %"PRIu64,
                  w->flows[i].numbers[w->flows[i].head], i,
                  fifo_first(&w->flows[i])->edt_ns,
                  granularity_ns(&w->config->wheel, w->flows[i].max_gap_ns),
                  w->now_ns);
        }
    }
    if (!w->config->paced) {
        world_check_stats(w);
    }
    return n_sent;
}

/* Goes to the time at which something may be due, checking that nothing leaves
 * a ns before, and that something does then. */
static void
world_next(struct world *w)
{
    uint64_t next_ns = flow_shaper_next_due(w->s, w->now_ns);
    uint64_t backlog = flow_shaper_backlog(w->s);

    if (!backlog) {
        CHECK(next_ns == UINT64_MAX, "nothing is held, but due at %"PRIu64,
              next_ns);
        return;
    }
    CHECK(next_ns != UINT64_MAX && next_ns >= w->now_ns, "next due at %"PRIu64
          ", now is %"PRIu64, next_ns, w->now_ns);
    if (next_ns > w->now_ns) {
        if (next_ns - 1 > w->now_ns && choose(2)) {
            w->now_ns += choose(next_ns - w->now_ns);
        } else {
            w->now_ns = next_ns - 1;
        }
        bool idle = (!world_drain(w, 0)
                     && flow_shaper_backlog(w->s) == backlog);

        /* Queues that become idle leave others their rates. */
        CHECK(idle || (w->config->paced && w->config->n_classes > 1),
              "packet leaves at %"PRIu64", was to be due at %"PRIu64,
              w->now_ns, next_ns);
        w->now_ns = next_ns;
    }

    bool progress = world_drain(w, 0) || flow_shaper_backlog(w->s) < backlog;

    CHECK(progress || (w->config->paced
                       && flow_shaper_next_due(w->s, w->now_ns) > w->now_ns),
          "nothing leaves at %"PRIu64", when it was to be due", w->now_ns);
}

/* Drains everything. */
static void
world_run_dry(struct world *w)
{
    while (flow_shaper_backlog(w->s)) {
        world_next(w);
    }
    if (w->config->paced) {
        /* Packets that expired behind all others. */
        for (size_t i = 0; i < w->n_flows; i++) {
            struct fifo *f = &w->flows[i];

            while (fifo_length(f)) {
                struct record *r = fifo_first(f);

                CHECK(w->now_ns > r->edt_ns + expiry_ns(w),
                      "packet %"PRIu32" is lost", f->numbers[f->head]);
                world_release(w, f);
                world_count(w, r, SHAPER_DROP_EXPIRED);
            }
        }
    }
    w->expires = false;
    CHECK(!w->n_held, "%"PRIuSIZE" packets are lost", w->n_held);
    CHECK(flow_shaper_next_due(w->s, w->now_ns) == UINT64_MAX,
          "nothing is held, but due");
    world_check_stats(w);
}

static void
world_destroy(struct world *w)
{
    flow_shaper_destroy(w->s);
    shaper_thread_destroy(w->thread);
    shaper_config_unref(w->config);
    for (size_t i = 0; i < w->n_flows; i++) {
        free(w->flows[i].numbers);
    }
    free(records);
    records = NULL;
    n_records = allocated_records = 0;
}

/* Makes the shaper follow other options. */
static void
world_set_options(struct world *w, const struct options *o)
{
    struct shaper_config *old = w->config;
    struct shaper_class_stats old_classes[MAX_QUEUES + 1];

    w->config = config_create(o);
    w->options = *o;
    w->closing = false;
    memcpy(old_classes, w->classes, sizeof old_classes);
    memset(w->classes, 0, sizeof w->classes);
    memset(w->unstamped_bytes, 0, sizeof w->unstamped_bytes);
    for (size_t i = 0; i < w->config->n_classes; i++) {
        for (size_t j = 0; j < old->n_classes; j++) {
            if (old->classes[j].queue_id == w->config->classes[i].queue_id) {
                w->classes[i] = old_classes[j];
            }
        }
    }
    for (size_t i = 0; i < w->n_flows; i++) {
        const struct fifo *f = &w->flows[i];

        for (size_t j = f->head; j < f->tail; j++) {
            const struct record *r = &records[f->numbers[j]];

            if (!r->stamped) {
                w->unstamped_bytes[world_class(w, f->id.queue_id)] += r->size;
            }
        }
    }
    flow_shaper_set_config(w->s, w->config, w->now_ns);
    CHECK(flow_shaper_config(w->s) == w->config
          && !flow_shaper_is_closing(w->s), "configuration not followed");
    shaper_config_unref(old);
    world_check_stats(w);
}

/* Passes the shaper on to another thread. */
static void
world_change_thread(struct world *w)
{
    struct shaper_thread *thread = thread_create();

    flow_shaper_detach(w->s);
    shaper_thread_destroy(w->thread);
    w->thread = thread;
    flow_shaper_attach(w->s, thread, 7);
    CHECK(flow_shaper_core_id(w->s) == 7, "wrong core");
    world_check_stats(w);
}

static void
choose_geometry(struct mltw_config *wheel)
{
    unsigned int min_shift = choose(13);

    wheel->n_wheels = 1 + choose(40);
    wheel->n_slots = 4 << choose(8);
    wheel->min_granularity_ns = UINT64_C(1) << min_shift;
    wheel->max_granularity_ns = UINT64_C(1) << (min_shift + choose(12));
}

/* Options without rates. */
static void
choose_options(struct options *o)
{
    *o = OPTIONS_DEFAULT;
    if (choose(2)) {
        choose_geometry(&o->wheel);
    }
    if (choose(4) == 0) {
        o->max_backlog = 1 + choose_log(300);
    }
    if (choose(4) == 0) {
        o->max_flows = 1 + choose_log(200);
    }
    o->max_delay_ns = 1000 + choose_log(50 * MS);
    if (choose(2)) {
        o->ecn_threshold_ns = choose_log(o->max_delay_ns);
    }
    o->n_queues = choose(2) ? choose(4) : 0;
    for (size_t i = 0; i < o->n_queues; i++) {
        o->queues[i].id = i ? 3 * i + choose(3) : choose(3);
    }
}

/* A random batch: of a few of the flows, with EDTs that rise along each one,
 * mostly, and some that are past. */
static void
world_offer_random(struct world *w)
{
    struct dp_packet_batch batch;
    size_t n = 1 + choose(MAX_BATCH);

    dp_packet_batch_init(&batch);
    while (dp_packet_batch_size(&batch) < n) {
        struct fifo *f = &w->flows[choose(1 + choose(w->n_flows))];

        for (size_t run = 1 + choose(4);
             run && dp_packet_batch_size(&batch) < n; run--) {
            uint64_t edt_ns = 0;

            if (f->stamped) {
                if (choose(50) == 0) {
                    f->gap_ns = 1 + choose_log(10 * MS);
                    f->max_gap_ns = MAX(f->max_gap_ns, f->gap_ns);
                }
                edt_ns = MAX(f->last_edt_ns + f->gap_ns, w->now_ns);
                if (edt_ns > w->now_ns + 30 * MS) {
                    edt_ns = w->now_ns + choose(30 * MS);
                } else if (choose(20) == 0) {
                    edt_ns = w->now_ns - choose(1000)
                             + choose(2) * choose_log(50 * MS);
                }
                f->last_edt_ns = edt_ns;
            }
            dp_packet_batch_add(&batch, world_packet(
                w, f, edt_ns, MIN_PACKET + choose(MTU - MIN_PACKET),
                choose(20) || (f->stamped && w->config->paced)
                ? choose(MAX_SOURCES - 1) : SHAPER_NO_SOURCE));
        }
    }
    world_offer(w, &batch);
}

/* Random operations on shapers without rates. */
static void
test_random(void)
{
    for (unsigned int i = 0; i < rounds(400); i++) {
        size_t n_flows = 1 + choose_log(200);
        struct options o;
        struct world w;

        choose_options(&o);
        world_init(&w, &o);
        while (w.n_flows < n_flows) {
            world_add_flow(&w, choose(10) != 0, choose(2) ? 0 : choose(12));
        }
        for (unsigned int j = 0; j < 200; j++) {
            switch (choose(12)) {
            case 0: case 1: case 2: case 3:
                world_offer_random(&w);
                break;
            case 4: case 5:
                world_next(&w);
                break;
            case 6: case 7: case 8:
                w.now_ns += choose_log(20000);
                world_drain(&w, 0);
                break;
            case 9:
                w.now_ns += choose_log(20 * MS);
                world_drain(&w, choose(3) * MAX_BATCH);
                break;
            case 10:
                if (choose(5) == 0) {
                    /* A stall. */
                    w.now_ns += choose_log(1000 * MS);
                    world_drain(&w, 0);
                }
                break;
            case 11:
                if (choose(5) == 0) {
                    world_change_thread(&w);
                }
                if (choose(20) == 0) {
                    world_close(&w);
                } else if (choose(20) == 0) {
                    struct options same = w.options;

                    world_set_options(&w, &same);
                }
                break;
            }
        }
        if (choose(4)) {
            world_run_dry(&w);
        }
        world_destroy(&w);
    }
}

/* Everything that can be configured changes while packets are held. */
static void
test_reconfigure(void)
{
    for (unsigned int i = 0; i < rounds(300); i++) {
        size_t n_flows = 1 + choose_log(200);
        struct options o;
        struct world w;

        choose_options(&o);
        o.max_flows = 4096;
        world_init(&w, &o);
        while (w.n_flows < n_flows) {
            world_add_flow(&w, choose(10) != 0, choose(2) ? 0 : choose(12));
        }
        for (unsigned int j = 0; j < 30; j++) {
            uint32_t max_flows = o.max_flows;

            for (size_t n = choose(4); n > 0; n--) {
                world_offer_random(&w);
                w.now_ns += choose_log(1 * MS);
                world_drain(&w, choose(3) * MAX_BATCH);
            }
            choose_options(&o);

            /* The next test is for fewer flows than there are. */
            o.max_flows = MAX_FLOWS + choose(max_flows + 1);
            world_set_options(&w, &o);
        }
        world_run_dry(&w);
        world_destroy(&w);
    }
}

/* With fewer flows allowed than hold packets, all are still served, and no
 * others are taken until there is room. */
static void
test_fewer_flows(void)
{
    for (unsigned int i = 0; i < rounds(50); i++) {
        size_t n_flows = 2 + choose(200);
        struct options o = OPTIONS_DEFAULT;
        struct world w;

        if (choose(2)) {
            o.max_flows = 64 + choose(200);
        }
        o.n_queues = choose(3);
        for (size_t j = 0; j < o.n_queues; j++) {
            o.queues[j].id = 1 + j;
        }
        world_init(&w, &o);
        while (w.n_flows < n_flows) {
            world_add_flow(&w, choose(10) != 0, choose(4));
        }
        for (int j = 0; j < 10; j++) {
            world_offer_random(&w);
        }
        o.max_flows = 1 + choose(MAX(w.n_active, 1));
        world_set_options(&w, &o);

        /* Flows that hold packets, and some that have never existed. */
        for (int j = 0; j < 100; j++) {
            bool fresh = choose(4) == 0 && w.n_flows < MAX_FLOWS;
            struct fifo *f = fresh ? world_add_flow(&w, true, choose(4))
                                   : &w.flows[choose(w.n_flows)];

            if (fresh || fifo_length(f)) {
                world_offer_one(&w, f, f->stamped ? w.now_ns + choose(4 * MS)
                                                  : 0, MTU, 1);
            }
            if (choose(10) == 0) {
                w.now_ns += choose_log(4 * MS);
                world_drain(&w, 0);
            }
        }
        world_run_dry(&w);
        world_destroy(&w);
    }
}

/* What two shapers of the same port hold goes in the order of its EDTs. */
static void
test_merge(void)
{
    for (unsigned int i = 0; i < rounds(200); i++) {
        size_t n_flows = 1 + choose_log(100);
        bool overflow = choose(4) == 0;
        struct world w[2];
        struct options o;

        choose_options(&o);
        o.max_flows = 4096;
        world_init(&w[0], &o);
        while (w[0].n_flows < n_flows) {
            world_add_flow(&w[0], choose(10) != 0, choose(2) ? 0 : choose(12));
        }
        if (choose(2)) {
            choose_options(&o);
        }
        o.max_flows = overflow ? 1 + choose(n_flows) : 4096;
        world_init(&w[1], &o);
        memcpy(w[1].flows, w[0].flows, sizeof w[0].flows);
        w[1].n_flows = n_flows;

        for (size_t j = 0; j < 30; j++) {
            int k = j < 10 ? 0 : choose(2);

            world_offer_random(&w[k]);
            w[k].now_ns += choose_log(2 * MS);
            world_drain(&w[k], choose(2) * MAX_BATCH);
        }
        w[0].now_ns = w[1].now_ns = MAX(w[0].now_ns, w[1].now_ns);

        flow_shaper_detach(w[0].s);
        flow_shaper_merge(w[1].s, w[0].s, w[1].now_ns);
        CHECK(!flow_shaper_backlog(w[0].s), "%"PRIuSIZE" packets left behind",
              flow_shaper_backlog(w[0].s));

        /* The same with the models. */
        struct shaper_stats stats;
        uint64_t n_removed = 0;

        memset(&stats, 0, sizeof stats);
        flow_shaper_get_stats(w[1].s, &stats);
        for (int j = 0; j < SHAPER_BACKLOG; j++) {
            w[1].counters[j] += w[0].counters[j];
        }
        w[1].n_stamped_sent += w[0].n_stamped_sent;
        for (size_t j = 0; j < w[0].config->n_classes; j++) {
            size_t k = world_class(&w[1], w[0].config->classes[j].queue_id);

            w[1].classes[k].tx_packets += w[0].classes[j].tx_packets;
            w[1].classes[k].tx_bytes += w[0].classes[j].tx_bytes;
            w[1].classes[k].drops += w[0].classes[j].drops;
        }
        for (size_t j = 0; j < n_flows; j++) {
            const struct fifo *other = &w[0].flows[j];
            struct fifo *f = &w[1].flows[j];
            size_t mine = f->head, theirs = other->head;
            size_t tail = f->tail;

            f->max_gap_ns = MAX(f->max_gap_ns, other->max_gap_ns);
            while (mine < tail || theirs < other->tail) {
                if (theirs == other->tail
                    || (mine < tail
                        && records[f->numbers[mine]].edt_ns
                           < records[other->numbers[theirs]].edt_ns)) {
                    fifo_append(f, f->numbers[mine++]);
                } else {
                    world_hold(&w[1], other->numbers[theirs++]);
                }
            }
            f->head = tail;
        }

        /* Flows of which there are too many lose their packets. */
        n_removed = w[1].n_held - flow_shaper_backlog(w[1].s);
        CHECK(n_removed == stats.counters[SHAPER_DROP_REMOVED],
              "%"PRIu64" packets are missing, %"PRIu64" are counted",
              n_removed, stats.counters[SHAPER_DROP_REMOVED]);
        if (n_removed) {
            CHECK(overflow, "%"PRIu64" packets removed", n_removed);
            while (flow_shaper_backlog(w[1].s)) {
                struct dp_packet_batch batch;

                dp_packet_batch_init(&batch);
                w[1].now_ns = flow_shaper_next_due(w[1].s, w[1].now_ns);
                flow_shaper_drain(w[1].s, &batch, w[1].now_ns);
                flow_shaper_end_drain(w[1].s, dp_packet_batch_size(&batch),
                                      w[1].now_ns);
                dp_packet_delete_batch(&batch, true);
            }
        } else {
            world_check_stats(&w[1]);
            for (int j = 0; j < 5; j++) {
                world_offer_random(&w[1]);
                w[1].now_ns += choose_log(1 * MS);
                world_drain(&w[1], choose(2) * MAX_BATCH);
            }
            world_run_dry(&w[1]);
        }
        world_destroy(&w[0]);
        world_destroy(&w[1]);
    }
}

/* However many flows are due, each sends one packet before any sends two. */
static void
test_turns(void)
{
    for (unsigned int i = 0; i < rounds(100); i++) {
        size_t n_flows = 1 + choose(MAX_FLOWS - 1);
        struct options o = OPTIONS_DEFAULT;
        struct world w;

        world_init(&w, &o);
        while (w.n_flows < n_flows) {
            world_add_flow(&w, true, 0);
        }
        for (unsigned int j = 0; j < 5; j++) {
            for (size_t k = 0; k < n_flows; k++) {
                for (size_t n = 1 + choose(4); n > 0; n--) {
                    world_offer_one(&w, &w.flows[k],
                                    w.now_ns + 1 + choose(MS), MTU, 1);
                }
            }
            w.now_ns += 2 * MS;
            world_drain(&w, choose(2) * choose(6 * MAX_BATCH));
        }
        world_run_dry(&w);
        world_destroy(&w);
    }
}

/* Limits. */

static void
test_backlog(void)
{
    for (uint32_t max_backlog = 1; max_backlog < 2000; max_backlog *= 3) {
        struct options o = OPTIONS_DEFAULT;
        struct world w;

        o.max_backlog = max_backlog;
        world_init(&w, &o);
        for (int i = 0; i < 10; i++) {
            world_add_flow(&w, i != 9, 0);
        }
        for (uint32_t i = 0; i < max_backlog + 100; i++) {
            world_offer_one(&w, &w.flows[choose(9)], w.now_ns + 1000 + i,
                            MTU, 1);
        }
        CHECK(w.counters[SHAPER_BACKLOG] == max_backlog, "test is wrong");
        w.now_ns += 1000;
        world_drain(&w, 0);
        for (int i = 0; i < 10; i++) {
            world_offer_random(&w);
            world_next(&w);
        }
        world_run_dry(&w);
        world_destroy(&w);
    }
}

static void
test_flows(void)
{
    for (uint32_t max_flows = 1; max_flows < 200; max_flows = max_flows * 2
                                                              + choose(2)) {
        struct options o = OPTIONS_DEFAULT;
        struct world w;

        o.max_flows = max_flows;
        world_init(&w, &o);
        while (w.n_flows < MAX_FLOWS) {
            world_add_flow(&w, true, 0);
        }
        for (int i = 0; i < 3; i++) {
            /* world_offer_one() checks that just the first ones are taken. */
            for (int j = 0; j < MAX_FLOWS; j++) {
                world_offer_one(&w, &w.flows[(j + i * 100) % MAX_FLOWS],
                                w.now_ns + 1000 * (1 + j), MTU, 1);
            }
            w.now_ns += max_flows * 500;
            world_drain(&w, 0);
        }
        world_run_dry(&w);
        CHECK(w.counters[SHAPER_DROP_FLOWS], "test is wrong");

        /* FIFOs age out. */
        for (int i = 0; i < MAX_FLOWS; i++) {
            w.now_ns += 1100 * MS;
            flow_shaper_end_drain(w.s, 0, w.now_ns);
        }
        struct shaper_stats stats;
        memset(&stats, 0, sizeof stats);
        flow_shaper_get_stats(w.s, &stats);
        CHECK(stats.counters[SHAPER_FLOWS] <= 4, "%"PRIu64" FIFOs of no use",
              stats.counters[SHAPER_FLOWS]);
        world_destroy(&w);
    }
}

/* Offers packets from 'source', which a meter of its own lets pass as long as
 * there is room, until it does not, or 'max' and one more are held.  Returns
 * how many are. */
static uint32_t
fill(struct world *w, uint16_t source, uint32_t max)
{
    const struct shaper_source from = test_source(source);
    struct shaper_stats stats;
    uint32_t n;

    for (n = 0; n <= max; n++) {
        struct flow_id id = w->flows[n % w->n_flows].id;
        struct dp_packet_batch batch;

        id.meters[0] = 100 + source;
        dp_packet_batch_init_packet(&batch, packet_create(
            &id, w->now_ns + 1000 + n, 1000, MIN_PACKET, n));
        batch.packets[0]->md.edt_valid = false;
        if (!shaper_thread_admit(w->thread, &batch, from, id.meters[0])) {
            dp_packet_delete_batch(&batch, true);
            break;
        }
        batch.packets[0]->md.edt_valid = true;
        flow_shaper_enqueue(w->s, &batch, &from, w->now_ns);
        CHECK(dp_packet_batch_is_empty(&batch), "packet passes");
    }
    memset(&stats, 0, sizeof stats);
    flow_shaper_get_stats(w->s, &stats);
    CHECK(!stats.counters[SHAPER_DROP_BUDGET], "what was admitted is dropped");
    return n;
}

/* However many destinations a port's packets have, those of others find a
 * FIFO. */
static void
test_flows_share(void)
{
    for (unsigned int i = 0; i < rounds(50); i++) {
        const uint32_t max_flows = 32 + choose(200);
        struct options o = OPTIONS_DEFAULT;
        uint32_t taken = 0;
        struct world w;

        o.max_flows = max_flows;
        world_init(&w, &o);
        while (w.n_flows < MAX_FLOWS) {
            world_add_flow(&w, true, 0);
        }

        /* Each of these sends to all destinations that are left, more than
         * there is room for.  (world_offer_one() checks which are taken.) */
        for (uint16_t source = 0; source < 3; source++) {
            uint32_t left = max_flows - w.n_active;
            uint32_t before = w.n_active;

            for (int j = 0; j < MAX_FLOWS; j++) {
                if (!fifo_length(&w.flows[j])) {
                    world_offer_one(&w, &w.flows[j], w.now_ns + 10 * MS, MTU,
                                    source);
                }
            }
            taken = w.n_active - before;
            CHECK(taken >= left * 8 / 9 && taken <= left * 8 / 9 + 8,
                  "source %u gets %"PRIu32" FIFOs of %"PRIu32, source, taken,
                  left);
            if (source < 1) {
                CHECK(w.n_active < max_flows, "one source has all FIFOs");
            }
        }

        /* Whether it has waited before does not matter: its FIFO is its own
         * only while it holds packets. */
        world_run_dry(&w);
        for (int j = MAX_FLOWS - 1; j >= 0; j--) {
            world_offer_one(&w, &w.flows[j], w.now_ns + 10 * MS, MTU, 0);
        }
        CHECK(w.n_active < max_flows, "one source has all FIFOs");
        world_offer_one(&w, &w.flows[0], w.now_ns + 10 * MS, MTU, 1);
        CHECK(fifo_length(&w.flows[0]), "no FIFO is left for another source");
        world_run_dry(&w);
        world_destroy(&w);
    }
}

/* A source may hold as much as is left, and threads share the budget. */
static void
test_budget(void)
{
    for (unsigned int n_threads = 1; n_threads <= 4; n_threads++) {
        uint32_t budget = HEAP_BUDGET / n_threads;
        struct shaper_thread *threads[4];
        struct options o = OPTIONS_DEFAULT;
        uint32_t held = 0;
        struct world w;

        world_init(&w, &o);
        for (int i = 0; i < 5; i++) {
            world_add_flow(&w, true, 0);
        }
        for (unsigned int i = 1; i < n_threads; i++) {
            threads[i] = thread_create();
        }
        for (uint32_t source = 0; source < 4; source++) {
            /* mine < budget - held - mine - mine */
            uint32_t expected = (budget - held + 2) / 3;
            uint32_t n = fill(&w, source == 3 ? SHAPER_NO_SOURCE : source,
                              budget);

            CHECK(n == expected, "%u threads: source %"PRIu32" may hold "
                  "%"PRIu32" packets rather than %"PRIu32" beside %"PRIu32,
                  n_threads, source, n, expected, held);
            held += n;
        }
        for (unsigned int i = 1; i < n_threads; i++) {
            shaper_thread_destroy(threads[i]);
        }

        /* Another shaper of the same thread shares the budget, and has it to
         * itself once the first one has gone to another thread. */
        struct flow_shaper *first = w.s;
        struct shaper_thread *other = thread_create();
        uint32_t rest = HEAP_BUDGET / 2 > held ? HEAP_BUDGET / 2 - held : 0;

        w.s = flow_shaper_create(w.config, w.thread, 3, w.now_ns);
        uint32_t n = fill(&w, 9, budget);
        CHECK(n == (rest + 2) / 3, "source may hold %"PRIu32" packets rather "
              "than %"PRIu32" in a second shaper", n, (rest + 2) / 3);
        flow_shaper_detach(first);
        flow_shaper_attach(first, other, 4);
        n += fill(&w, 9, budget);
        CHECK(n == HEAP_BUDGET / 6, "source may hold %"PRIu32" packets in a "
              "second shaper after the first has gone", n);
        flow_shaper_destroy(first);
        shaper_thread_destroy(other);
        world_destroy(&w);
    }
}

/* Meters of which all packets are received at one port, where there is little
 * room: those that are flooded with small frames leave at their rates,
 * although there is no room for all that might wait, and one that has its rate
 * kept loses nothing to them. */
static void
test_meters_share(void)
{
    enum { N_FLOODS = 3, BURST = 16, N_THREADS = 16 };
    const uint64_t rate_bps = UINT64_C(1000000000), duration_ns = 20 * MS;
    const uint64_t burst_gap_ns = 2 * BURST * MIN_PACKET * 8;
    const struct shaper_source source = test_source(0);
    struct shaper_thread *threads[N_THREADS];
    struct edt_meter meters[N_FLOODS + 1];
    uint64_t offered[N_FLOODS + 1] = { 0 };
    uint64_t sent[N_FLOODS + 1] = { 0 };
    struct options o = OPTIONS_DEFAULT;
    struct dp_packet_batch batch;
    struct dp_packet *packet;
    struct shaper_stats stats;
    uint64_t start_ns;
    struct world w;

    world_init(&w, &o);
    for (int i = 0; i < N_THREADS; i++) {
        threads[i] = thread_create();    /* They only want a share. */
    }
    for (int m = 0; m <= N_FLOODS; m++) {
        struct edt_limits limits = { .rate = rate_bps, .max_delay_us = 50000 };

        edt_meter_init(&meters[m], edt_params_create(&limits));
    }

    start_ns = w.now_ns;
    for (; w.now_ns < start_ns + duration_ns; w.now_ns += 1000) {
        for (int m = 0; m <= N_FLOODS; m++) {
            const struct edt_params *p = edt_meter_params(&meters[m]);
            struct flow_id id = { .dest_type = DEST_IPV4, .dest = m };
            struct edt_stamp_result result;
            struct edt_chain chain = { .n = 0 };
            size_t n = NETDEV_MAX_BURST;
            uint32_t room;

            if (m == N_FLOODS) {
                n = (w.now_ns - start_ns) % burst_gap_ns < 1000 ? BURST : 0;
            }
            dp_packet_batch_init(&batch);
            for (size_t i = 0; i < n; i++) {
                dp_packet_batch_add(&batch,
                                    packet_create(&id, 0, 0, MIN_PACKET, m));
            }
            if (!n) {
                continue;
            }
            offered[m] += n;
            room = shaper_thread_admit(w.thread, &batch, source, m);
            edt_stamp_batch(chains, &chain, &meters[m], p, m, &batch, room,
                            w.now_ns, &result);

            struct shaper_source sources[NETDEV_MAX_BURST];

            for (size_t i = 0; i < n; i++) {
                sources[i] = source;
            }
            flow_shaper_enqueue(w.s, &batch, sources, w.now_ns);
            sent[m] += dp_packet_batch_size(&batch);
            dp_packet_delete_batch(&batch, true);
        }
        while (flow_shaper_drain(w.s, &batch, w.now_ns)) {
            DP_PACKET_BATCH_FOR_EACH (i, packet, &batch) {
                sent[packet_number(packet)]++;
            }
            dp_packet_delete_batch(&batch, true);
        }
        flow_shaper_end_drain(w.s, 0, w.now_ns);
    }

    memset(&stats, 0, sizeof stats);
    flow_shaper_get_stats(w.s, &stats);
    CHECK(!stats.counters[SHAPER_DROP_BUDGET], "what was admitted is dropped");
    for (int m = 0; m < N_FLOODS; m++) {
        double rate = sent[m] * MIN_PACKET * 8e9 / duration_ns;

        CHECK(rate > rate_bps * 0.99 && rate < rate_bps * 1.01,
              "flood %d leaves at %.0f bit/s", m, rate);
    }
    /* A burst may be on its way. */
    CHECK(sent[N_FLOODS] + BURST >= offered[N_FLOODS]
          && sent[N_FLOODS] > offered[N_FLOODS] / 2,
          "of %"PRIu64" packets within the rate %"PRIu64" have left",
          offered[N_FLOODS], sent[N_FLOODS]);

    world_destroy(&w);
    for (int m = 0; m <= N_FLOODS; m++) {
        edt_meter_destroy(&meters[m]);
    }
    for (int i = 0; i < N_THREADS; i++) {
        shaper_thread_destroy(threads[i]);
    }
}

/* Threads hold packets of receive queues that move between them: the thread
 * that polls a queue knows what all together hold. */
static void
test_queue_moves(void)
{
    enum { N_THREADS = 3, N_RXQS = 5, N_STEPS = 20000 };
    uint64_t held[N_THREADS][N_RXQS] = { { 0 } };
    struct shaper_thread *threads[N_THREADS];
    unsigned int poller[N_RXQS] = { 0 };
    uint16_t ids[N_RXQS];

    struct dp_packet *packet = dp_packet_new(MTU);

    for (int t = 0; t < N_THREADS; t++) {
        threads[t] = thread_create();
        CHECK(!shaper_thread_pool(threads[t], packet), "more than one pool");
    }
    dp_packet_delete(packet);
    for (int q = 0; q < N_RXQS; q++) {
        ids[q] = shaper_rxq_id_alloc();
    }
    for (int step = 0; step < N_STEPS; step++) {
        unsigned int q = choose(N_RXQS);
        unsigned int t = choose(N_THREADS);
        struct shaper_source source = { .port = q, .rxq = ids[q] };
        unsigned int what = step ? choose(8) : 0;

        if (!what) {
            poller[q] = t;
            for (t = 0; t < N_THREADS; t++) {
                uint16_t *polled = xcalloc(N_RXQS, sizeof *polled);
                size_t n = 0;

                for (int i = 0; i < N_RXQS; i++) {
                    if (poller[i] == t) {
                        polled[n++] = ids[i];
                    }
                }
                shaper_thread_set_polled(threads[t], polled, n);
            }
        } else if (what <= 3) {
            uint32_t bytes = 1 + choose(MTU);

            t = poller[q];
            shaper_thread_count(threads[t], 0, source, 0, bytes);
            held[t][q] += bytes;
        } else if (held[t][q]) {
            uint64_t bytes = MIN(held[t][q], 1 + choose(2 * MTU));

            shaper_thread_uncount(threads[t], 0, source, 0, bytes);
            held[t][q] -= bytes;
        }
        for (t = 0; t < N_THREADS; t++) {
            shaper_thread_tell_left(threads[t]);
        }
        for (q = 0; q < N_RXQS; q++) {
            uint64_t bytes = shaper_thread_rxq_bytes(threads[poller[q]],
                                                     ids[q]);
            uint64_t expected = 0;

            for (t = 0; t < N_THREADS; t++) {
                expected += held[t][q];
            }
            CHECK(bytes == expected, "step %d: %"PRIu64" bytes wait of queue "
                  "%u rather than %"PRIu64, step, bytes, q, expected);
        }
    }

    /* A thread that ends takes back what it has told. */
    for (int t = 0; t < N_THREADS; t++) {
        shaper_thread_destroy(threads[t]);
    }
    for (int q = 0; q < N_RXQS; q++) {
        CHECK(!shaper_rxq_left_bytes(ids[q]), "queue %d is left", q);
        shaper_rxq_id_free(ids[q]);
    }
}

/* Packets that nothing keeps. */
static void
test_bypass(void)
{
    struct options o = OPTIONS_DEFAULT;
    struct fifo *stamped, *unstamped;
    struct world w;

    world_init(&w, &o);
    stamped = world_add_flow(&w, true, 0);
    unstamped = world_add_flow(&w, false, 0);

    /* Due, unstamped, and both while others wait; an EDT of now is due. */
    for (int i = 0; i < 2; i++) {
        world_offer_one(&w, world_add_flow(&w, true, 0), w.now_ns, MTU, 1);
        world_offer_one(&w, world_add_flow(&w, true, 0), 1, MTU, 1);
        unstamped->id.port = 1;
        world_offer_one(&w, unstamped, 0, MTU, 1);
        unstamped->id.port = SHAPER_NO_SOURCE;
        world_offer_one(&w, unstamped, 0, MTU, SHAPER_NO_SOURCE);
        CHECK(w.counters[SHAPER_BYPASSED] == 4 * (i + 1), "not bypassed");
        if (!i) {
            world_offer_one(&w, stamped, w.now_ns + 1, MTU, 1);
            CHECK(w.n_held == 1, "not held");
        }
    }

    /* Due, but its flow's first packet is not. */
    world_offer_one(&w, stamped, w.now_ns, MTU, 1);
    CHECK(w.n_held == 2, "overtakes");
    world_put_one(&w, stamped, w.now_ns - 5, MTU, 1);
    world_run_dry(&w);

    /* Handed over when already due. */
    world_put_one(&w, stamped, w.now_ns - 5, MTU, 1);
    CHECK(w.n_held == 1, "not held");
    CHECK(flow_shaper_next_due(w.s, w.now_ns) == w.now_ns, "not due");
    CHECK(world_drain(&w, 0) == 1, "not sent");
    world_destroy(&w);

    /* With a rate, only what no port has received, whatever waits. */
    o.port_rate_bps = 1000000000;
    world_init(&w, &o);
    stamped = world_add_flow(&w, true, 0);
    unstamped = world_add_flow(&w, false, 0);
    world_offer_one(&w, stamped, w.now_ns - 5, MTU, 1);
    CHECK(w.n_held == 1, "not held");
    unstamped->id.port = SHAPER_NO_SOURCE;
    world_offer_one(&w, unstamped, 0, MTU, SHAPER_NO_SOURCE);
    CHECK(w.n_held == 1, "held");
    unstamped->id.port = 1;
    world_offer_one(&w, unstamped, 0, MTU, 1);
    CHECK(w.n_held == 2, "not held");
    world_run_dry(&w);
    world_offer_one(&w, stamped, w.now_ns + 1, MTU, 1);
    world_offer_one(&w, stamped, w.now_ns + 1, MTU, 1);
    unstamped->id.port = SHAPER_NO_SOURCE;
    world_offer_one(&w, unstamped, 0, MTU, SHAPER_NO_SOURCE);
    CHECK(w.n_held == 2, "held");
    world_run_dry(&w);
    world_destroy(&w);
}

/* A shaper that is closing only holds what would overtake, and that not for
 * ever. */
static void
test_closing(void)
{
    for (unsigned int i = 0; i < rounds(50); i++) {
        struct options o = OPTIONS_DEFAULT;
        struct fifo *held, *other;
        struct world w;

        if (choose(2)) {
            o.port_rate_bps = 1000000000;
        }
        world_init(&w, &o);
        held = world_add_flow(&w, true, 0);
        other = world_add_flow(&w, true, 0);
        for (int j = 0; j < 10; j++) {
            world_offer_one(&w, held, w.now_ns + 1000 * j, MTU, 1);
        }
        world_close(&w);
        world_offer_one(&w, other, w.now_ns + MS, MTU, 1);
        CHECK(w.counters[SHAPER_BYPASSED], "held while closing");
        world_offer_one(&w, held, w.now_ns + 100, MTU, 1);
        CHECK(w.counters[SHAPER_BACKLOG] >= 10, "overtakes while closing");
        world_run_dry(&w);
        world_offer_one(&w, held, w.now_ns + MS, MTU, 1);
        CHECK(!flow_shaper_backlog(w.s), "held again while closing");

        /* Configured again. */
        world_set_options(&w, &o);
        for (int j = 1; j < 10; j++) {
            world_offer_one(&w, held, w.now_ns + j * 100 * MS, MTU, 1);
        }
        CHECK(flow_shaper_backlog(w.s) == 9, "not held after closing");

        /* All are released, one by one at most if there are so many. */
        world_close(&w);
        w.now_ns += o.max_delay_ns - 1;
        CHECK(!world_drain(&w, 0), "released too soon");
        CHECK(flow_shaper_next_due(w.s, w.now_ns) == w.release_ns,
              "release not due");
        w.now_ns = w.release_ns;
        if (choose(2)) {
            CHECK(world_drain(&w, 0) == 9, "not released");
        } else {
            /* Another configuration, just after the first ones have been
             * released: the others wait for their times again. */
            for (int j = 0; j < 100; j++) {
                world_offer_one(&w, held, w.now_ns + 1000 * MS + j, MTU, 1);
            }
            world_drain(&w, 1);
            CHECK(flow_shaper_backlog(w.s), "test is wrong");
            if (choose(2)) {
                world_set_options(&w, &o);
            } else {
                choose_options(&o);
                world_set_options(&w, &o);
            }
        }
        world_run_dry(&w);
        world_destroy(&w);
    }
}

/* Flow keys. */

/* What 'key' should be for 'size' bytes of 'data'. */
static void
expected_key(const uint8_t *data, size_t size, struct shaper_flow_key *key)
{
    size_t type_ofs = 12;
    uint16_t type;

    memset(key, 0, sizeof *key);
    if (size < 14) {
        return;
    }
    for (int i = 0; ; i++) {
        type = data[type_ofs] << 8 | data[type_ofs + 1];
        if (i == 2 || (type != 0x8100 && type != 0x88a8)
            || size < type_ofs + 6) {
            break;
        }
        type_ofs += 4;
    }
    if (type == 0x0800 && size >= type_ofs + 2 + 20) {
        key->addr_type = SHAPER_ADDR_IPV4;
        memcpy(key->addr, data + type_ofs + 2 + 16, 4);
    } else if (type == 0x86dd && size >= type_ofs + 2 + 40) {
        key->addr_type = SHAPER_ADDR_IPV6;
        memcpy(key->addr, data + type_ofs + 2 + 24, 16);
    } else {
        key->addr_type = SHAPER_ADDR_ETH;
        memcpy(key->addr, data, 6);
    }
}

static void
test_key(void)
{
    static const uint16_t types[] = {
        0x0800, 0x86dd, 0x8100, 0x88a8, 0x9100, 0x0806, 0x8847,
    };

    for (unsigned int i = 0; i < rounds(300000); i++) {
        size_t size = choose(choose(4) ? 80 : 16);
        struct shaper_flow_key key, expected;
        struct dp_packet packet;
        uint8_t *data;

        /* Just as many bytes on the heap as there are in the packet. */
        dp_packet_init(&packet, size);
        data = dp_packet_put_uninit(&packet, size);
        random_bytes(data, size);
        for (size_t ofs = 12; ofs + 2 <= size && ofs <= 24; ofs += 4) {
            if (choose(8)) {
                uint16_t type = types[choose(ARRAY_SIZE(types))];

                data[ofs] = type >> 8;
                data[ofs + 1] = type;
            }
        }
        pkt_metadata_init(&packet.md, ODPP_NONE);
        expected_key(data, size, &expected);
        bool stamped = choose(2);

        set_edt(&packet, stamped, choose(100), choose(100));
        expected.chain = stamped ? packet.md.edt.chain : EDT_CHAIN_NONE;
        memset(&key, 0xcc, sizeof key);
        shaper_flow_key_extract(&packet, &key);
        CHECK(!memcmp(&key, &expected, sizeof key), "packet of %"PRIuSIZE
              " bytes: type %"PRIu32" rather than %"PRIu32, size,
              key.addr_type, expected.addr_type);
        dp_packet_uninit(&packet);
    }
}

static struct edt_meter garbage_meters[4];

/* Finds half of all meters. */
static struct edt_meter *
garbage_find(const void *aux OVS_UNUSED, uint32_t id)
{
    return id & 4 ? &garbage_meters[id % 4] : NULL;
}

/* Garbage through the whole shaper. */
static void
test_garbage(void)
{
    struct options o = OPTIONS_DEFAULT;
    const struct edt_limits limits = {
        .rate = 1000000000,
        .max_delay_us = 1000,
        .fair = true,
    };
    struct world w;
    size_t n_in = 0, n_out = 0;

    o.max_flows = 64;
    world_init(&w, &o);
    w.thread->meters.find = garbage_find;
    for (size_t i = 0; i < ARRAY_SIZE(garbage_meters); i++) {
        edt_meter_init(&garbage_meters[i],
                       i ? edt_params_create(&limits) : NULL);
    }
    for (unsigned int i = 0; i < rounds(20000); i++) {
        struct dp_packet_batch batch;
        struct shaper_source sources[MAX_BATCH];
        size_t n = 1 + choose(MAX_BATCH);

        dp_packet_batch_init(&batch);
        for (size_t j = 0; j < n; j++) {
            size_t size = choose(80);
            struct dp_packet *packet = dp_packet_new(size);

            random_bytes(dp_packet_put_uninit(packet, size), size);
            pkt_metadata_init(&packet->md, ODPP_NONE);
            packet->md.skb_priority = random_uint32();
            set_edt(packet, choose(10) ? w.now_ns + choose(100000) : 0,
                    random_uint32(), random_uint32());
            if (choose(2)) {
                packet->md.edt.flags = choose(8);
            }
            if (choose(2)) {
                /* One that is known, of up to two meters that are fair. */
                packet->md.edt.chain = edt_chains_next(
                    chains, choose(2) ? EDT_CHAIN_NONE
                            : edt_chains_next(chains, EDT_CHAIN_NONE,
                                              choose(8), choose(2)),
                    choose(8), choose(2));
            }
            sources[j] = test_source(random_uint16());
            dp_packet_batch_add(&batch, packet);
        }
        n_in += n;
        flow_shaper_enqueue(w.s, &batch, sources, w.now_ns);
        n_out += dp_packet_batch_size(&batch);
        dp_packet_delete_batch(&batch, true);

        w.now_ns += choose(100000);
        while (flow_shaper_drain(w.s, &batch, w.now_ns) > 0) {
            n_out += dp_packet_batch_size(&batch);
            dp_packet_delete_batch(&batch, true);
        }
        flow_shaper_end_drain(w.s, 0, w.now_ns);
    }

    struct shaper_stats stats;
    memset(&stats, 0, sizeof stats);
    flow_shaper_get_stats(w.s, &stats);
    for (int i = SHAPER_DROP_MAX_DELAY; i <= SHAPER_DROP_SEGMENT; i++) {
        n_out += stats.counters[i];
    }
    n_out += flow_shaper_backlog(w.s);
    CHECK(n_in == n_out, "%"PRIuSIZE" packets in, %"PRIuSIZE" out, dropped or "
          "held", n_in, n_out);
    world_destroy(&w);
    for (size_t i = 0; i < ARRAY_SIZE(garbage_meters); i++) {
        edt_meter_destroy(&garbage_meters[i]);
    }
}

/* Rates of port and queues. */

struct flood_result {
    struct leaky_bucket port;
    struct leaky_bucket queues[MAX_QUEUES];   /* By index in the options. */
};

/* Floods the queues in 'o', or queue 0 if there are none, by flows with and
 * without EDTs for 'duration_ns', so that each of them always has something to
 * send, and polls every 'poll_ns', or at most that if not 'steady'. */
static void
flood(const struct options *o, uint64_t duration_ns, uint64_t poll_ns,
      bool steady, struct flood_result *result)
{
    const size_t n_queues = MAX(o->n_queues, 1);
    size_t backlog[MAX_QUEUES] = { 0 };
    struct world w;
    uint64_t end_ns;

    world_init(&w, o);
    memset(result, 0, sizeof *result);
    result->port.rate_bps = o->port_rate_bps;
    result->port.last_ns = w.now_ns;
    for (size_t i = 0; i < n_queues; i++) {
        result->queues[i].rate_bps = o->queues[i].rate_bps;
        result->queues[i].last_ns = w.now_ns;
        for (size_t j = 0; j < 10; j++) {
            world_add_flow(&w, j < 5, o->queues[i].id);
        }
    }
    end_ns = w.now_ns + duration_ns;
    while (w.now_ns < end_ns) {
        for (size_t i = 0; i < n_queues; i++) {
            while (backlog[i] < 80) {
                struct fifo *f = &w.flows[i * 10 + choose(10)];
                struct dp_packet_batch batch;
                struct shaper_source source = test_source(1);

                dp_packet_batch_init_packet(&batch, world_packet(
                    &w, f, f->stamped ? w.now_ns - choose(2) * choose(1000)
                                      : 0,
                    choose(2) ? 1500 : MIN_PACKET + choose(1400),
                    source.port));
                flow_shaper_enqueue(w.s, &batch, &source, w.now_ns);
                CHECK(dp_packet_batch_is_empty(&batch), "packet passes");
                backlog[i]++;
            }
        }
        w.now_ns += steady ? poll_ns : 1 + choose(poll_ns);
        for (;;) {
            struct dp_packet_batch batch;
            struct dp_packet *packet;

            dp_packet_batch_init(&batch);
            if (!flow_shaper_drain(w.s, &batch, w.now_ns)) {
                break;
            }
            DP_PACKET_BATCH_FOR_EACH (i, packet, &batch) {
                struct record *r = &records[packet_number(packet)];
                size_t queue = r->flow / 10;
                uint32_t size = r->size + o->overhead_bytes;

                backlog[queue]--;
                leaky_bucket_add(&result->port, w.now_ns, size);
                leaky_bucket_add(&result->queues[queue], w.now_ns, size);
            }
            dp_packet_delete_batch(&batch, true);
        }
        flow_shaper_end_drain(w.s, 0, w.now_ns);

        struct shaper_stats stats;
        memset(&stats, 0, sizeof stats);
        flow_shaper_get_stats(w.s, &stats);
        for (int i = SHAPER_DROP_MAX_DELAY; i <= SHAPER_DROP_SEGMENT; i++) {
            CHECK(!stats.counters[i], "%"PRIu64" packets dropped: %s",
                  stats.counters[i], shaper_counter_name(i));
        }
    }
    world_destroy(&w);
}

/* Checks that 'b', to which 'rate' (in bit/s) applies, has had just that, and
 * never more than 'burst' bytes of it at once. */
static void
check_rate(const struct leaky_bucket *b, const char *name, uint64_t rate,
           uint64_t duration_ns, uint64_t burst)
{
    uint64_t exact = (__int128) rate * duration_ns / 8000000000;
    uint64_t slack = burst + exact / 1000;

    CHECK(b->bytes <= exact + slack && b->bytes + slack >= exact,
          "%s sent %"PRIu64" bytes in %"PRIu64" ms rather than %"PRIu64,
          name, b->bytes, (uint64_t) (duration_ns / MS), exact);
    CHECK(!b->rate_bps || leaky_bucket_max_bytes(b) <= burst,
          "%s sent a burst of %"PRIu64" bytes, more than %"PRIu64,
          name, leaky_bucket_max_bytes(b),
          burst);
}

static const uint64_t rates[] = {
    100000000, 1000000000, UINT64_C(10000000000), UINT64_C(25000000000),
};

/* Bytes that a rate with 'poll_ns' between two visits may send at once. */
static uint64_t
max_burst(uint64_t rate, uint64_t poll_ns)
{
    return (__int128) rate * poll_ns / 8000000000 + 2 * MTU;
}

static void
test_port_rate(void)
{
    for (size_t i = 0; i < ARRAY_SIZE(rates) * rounds(3); i++) {
        uint64_t rate = rates[i % ARRAY_SIZE(rates)];
        uint64_t poll_ns = MIN(1 + choose_log(20000),
                               UINT64_C(8000000000) * 50000 / rate);
        uint64_t duration_ns = UINT64_C(8000000000) * 20000000 / rate;
        struct options o = OPTIONS_DEFAULT;
        struct flood_result result;

        poll_ns = MAX(poll_ns, duration_ns / 200000);
        o.max_delay_ns = 1000 * MS;
        o.port_rate_bps = rate;
        o.overhead_bytes = choose(2) * 24;
        flood(&o, duration_ns, poll_ns, choose(2), &result);
        check_rate(&result.port, "port", rate, duration_ns,
                   max_burst(rate, poll_ns));
    }
}

/* A queue waits in the wheel, at a granularity that fits its rate. */
static uint64_t
queue_burst(const struct options *o, const struct queue_options *q,
            uint64_t poll_ns)
{
    uint64_t gap_ns = MTU * UINT64_C(8000000000) / q->rate_bps;

    return MAX(q->burst_bytes, MTU) - MTU
           + max_burst(q->rate_bps,
                       poll_ns + granularity_ns(&o->wheel, gap_ns));
}

static void
test_queue_rate(void)
{
    for (size_t i = 0; i < rounds(12); i++) {
        uint64_t poll_ns = 1 + choose_log(20000);
        uint64_t duration_ns = 200 * MS;
        struct options o = OPTIONS_DEFAULT;
        struct flood_result result;

        poll_ns = MAX(poll_ns, duration_ns / 200000);
        o.max_delay_ns = 1000 * MS;
        o.overhead_bytes = choose(2) * 24;
        o.n_queues = 3;
        for (size_t j = 0; j < 3; j++) {
            o.queues[j] = (struct queue_options) {
                .id = j * 2,
                .rate_bps = 100000000 + choose(900000000),
                .burst_bytes = choose(2) * choose(20000),
            };
        }
        flood(&o, duration_ns, poll_ns, choose(2), &result);
        for (size_t j = 0; j < 3; j++) {
            check_rate(&result.queues[j], "queue", o.queues[j].rate_bps,
                       duration_ns, queue_burst(&o, &o.queues[j], poll_ns));
        }
    }
}

/* A queue with a rate has that, if the port has enough, and the others have
 * the rest. */
static void
test_both_rates(void)
{
    for (size_t i = 0; i < rounds(8); i++) {
        uint64_t poll_ns = 1000 + choose_log(20000);
        uint64_t duration_ns = 200 * MS;
        struct options o = OPTIONS_DEFAULT;
        struct flood_result result;
        uint64_t left;

        o.max_delay_ns = 1000 * MS;
        o.port_rate_bps = 1000000000;
        o.n_queues = 3;
        o.queues[0].id = 0;
        o.queues[1].id = 1;
        o.queues[1].rate_bps = 50000000 + choose(150000000);
        o.queues[2].id = 2;
        o.queues[2].rate_bps = 50000000 + choose(150000000);
        flood(&o, duration_ns, poll_ns, choose(2), &result);
        left = o.port_rate_bps;
        for (size_t j = 1; j < 3; j++) {
            check_rate(&result.queues[j], "queue", o.queues[j].rate_bps,
                       duration_ns,
                       queue_burst(&o, &o.queues[j], poll_ns) + 16 * MTU);
            left -= o.queues[j].rate_bps;
        }
        check_rate(&result.queues[0], "default queue", left, duration_ns,
                   100000);
        /* Each queue may be ahead by a packet. */
        check_rate(&result.port, "port", o.port_rate_bps, duration_ns,
                   max_burst(o.port_rate_bps, poll_ns) + 2 * MTU);
    }
}

/* Queues without a rate of their own share that of the port. */
static void
test_share(void)
{
    for (size_t i = 0; i < rounds(60); i++) {
        uint64_t rate = rates[i % 3];
        uint64_t poll_ns = 1 + choose_log(UINT64_C(8000000000) * 20000 / rate);
        uint64_t duration_ns = UINT64_C(8000000000) * 5000000 / rate;
        struct options o = OPTIONS_DEFAULT;
        struct flood_result result;

        poll_ns = MAX(poll_ns, duration_ns / 100000);
        o.max_delay_ns = 1000 * MS;
        o.port_rate_bps = rate;
        o.n_queues = 2 + choose(MAX_QUEUES - 2);
        for (size_t j = 0; j < o.n_queues; j++) {
            o.queues[j].id = j;
        }
        flood(&o, duration_ns, poll_ns, choose(2), &result);
        for (size_t j = 0; j < o.n_queues; j++) {
            uint64_t share = result.port.bytes / o.n_queues;

            CHECK(result.queues[j].bytes >= share - share / 10,
                  "queue %"PRIuSIZE" of %"PRIuSIZE" has %"PRIu64" of %"PRIu64
                  " bytes, polled every %"PRIu64" ns, %"PRIu64" bit/s", j,
                  o.n_queues, result.queues[j].bytes, result.port.bytes,
                  poll_ns, rate);
        }
    }
}

/* Sends what is allowed and returns the bytes. */
static uint64_t
drain_bytes(struct world *w)
{
    uint64_t before = w->counters[SHAPER_SENT_BYTES];

    world_drain(w, 0);
    return w->counters[SHAPER_SENT_BYTES] - before;
}

/* A port or queue that had nothing to send has gained nothing but its burst,
 * however many packets it has sent before. */
static void
test_idle_pace(void)
{
    for (unsigned int i = 0; i < rounds(400); i++) {
        struct options o = OPTIONS_DEFAULT;
        struct fifo *f;
        struct world w;

        if (choose(2)) {
            o.port_rate_bps = UINT64_C(10000000000);
        } else {
            o.n_queues = 1;
            o.queues[0].rate_bps = UINT64_C(10000000000);
        }
        world_init(&w, &o);
        world_add_flow(&w, false, 0);
        f = world_add_flow(&w, true, 0);
        for (int j = 0; j < 4; j++) {
            size_t n = choose(2) ? choose(200) : choose(7) * MAX_BATCH;

            for (size_t k = 0; k < n; k++) {
                world_offer_one(&w, f, w.now_ns, MTU, 1);
            }
            CHECK(drain_bytes(&w) <= MTU, "burst of more than an MTU");
            while (flow_shaper_backlog(w.s)) {
                w.now_ns += choose(60000);
                /* It may be done without having found nothing more. */
                world_drain(&w, choose(2) * MAX_BATCH);
            }
            w.now_ns += choose(20 * MS) + 2000;
        }
        world_destroy(&w);
    }
}

/* Of the queues of a thread that may send, that of the first priority does,
 * however much a late poll lets the others make up for. */
static void
test_priority(void)
{
    for (unsigned int i = 0; i < rounds(100); i++) {
        struct options o = OPTIONS_DEFAULT;
        struct fifo *first, *f;
        struct world w;

        o.port_rate_bps = 1000000000;
        o.n_queues = 6;
        for (size_t j = 0; j < o.n_queues; j++) {
            o.queues[j].id = j;
            o.queues[j].priority = j == 3 ? choose(10) : 10;
        }
        world_init(&w, &o);
        first = world_add_flow(&w, true, 3);
        for (size_t j = 0; j < o.n_queues; j++) {
            if (j != 3) {
                f = world_add_flow(&w, true, j);
                for (size_t k = 0; k < 400; k++) {
                    world_offer_one(&w, f, w.now_ns, MTU, 1);
                }
            }
        }
        world_drain(&w, 0);
        for (size_t j = 0; j < 10; j++) {
            /* 164 packets are due. */
            w.now_ns += 2 * MS;
            world_offer_one(&w, first, w.now_ns, MTU, 2);
            world_drain(&w, 1);
            CHECK(!first->bytes, "others are served first");
            world_drain(&w, 0);
        }
        world_destroy(&w);
    }
}

/* What has no EDT waits for at most the longest delay at the rate; a single
 * packet always may. */
static void
test_unstamped(void)
{
    for (unsigned int i = 0; i < rounds(100); i++) {
        uint64_t rate = 10000 + choose_log(1000000000);
        struct options o = OPTIONS_DEFAULT;
        uint64_t n_dropped;
        struct world w;

        o.max_delay_ns = 1000 + choose_log(50 * MS);
        if (choose(2)) {
            o.port_rate_bps = rate;
        } else {
            o.n_queues = 2;
            o.queues[0].rate_bps = rate;
            o.queues[1].id = 5;
            o.queues[1].rate_bps = UINT64_C(10000000000);
        }
        world_init(&w, &o);
        for (int j = 0; j < 20; j++) {
            world_add_flow(&w, false, choose(8));
        }

        /* world_offer_one() checks each packet.  Drops by expiry would come
         * only later. */
        for (int j = 0; j < 200; j++) {
            struct fifo *f = &w.flows[choose(w.n_flows)];

            world_offer_one(&w, f, 0, choose(3) ? MTU : 9018, 1);
        }
        n_dropped = w.counters[SHAPER_DROP_MAX_DELAY];
        CHECK(n_dropped || rate > 1000000, "test is wrong");
        world_run_dry(&w);
        world_destroy(&w);
    }
}

/* Packets that a rate has kept too long are dropped, and a ns before they are
 * not. */
static void
test_expired(void)
{
    for (unsigned int i = 0; i < rounds(200); i++) {
        uint64_t late_ns = 10 * MS + SLACK_NS + choose(3) - 1;
        size_t n = 2 + choose(300);
        struct options o = OPTIONS_DEFAULT;
        struct fifo *f;
        struct world w;

        /* A packet takes 1.2 ms. */
        o.max_delay_ns = 10 * MS;
        o.port_rate_bps = 10000000;
        world_init(&w, &o);
        w.expires = true;
        for (int j = 0; j < 5; j++) {
            f = world_add_flow(&w, true, 0);
        }
        for (size_t j = 0; j < n; j++) {
            world_offer_one(&w, &w.flows[choose(5)], w.now_ns, MTU, 1);
        }
        CHECK(drain_bytes(&w) == MTU, "not one packet");
        w.now_ns += late_ns;
        if (late_ns <= 10 * MS + SLACK_NS) {
            /* As many as the port may catch up with in 10 ms. */
            size_t sent = drain_bytes(&w) / MTU;

            CHECK(sent == MIN(n - 1, 9), "%"PRIuSIZE" packets sent", sent);
        } else {
            struct shaper_stats stats;

            for (size_t j = 0; j <= n / 64; j++) {
                CHECK(!drain_bytes(&w), "expired packet sent");
            }
            memset(&stats, 0, sizeof stats);
            flow_shaper_get_stats(w.s, &stats);
            CHECK(stats.counters[SHAPER_DROP_EXPIRED] == n - 1,
                  "%"PRIu64" of %"PRIuSIZE" packets expired",
                  stats.counters[SHAPER_DROP_EXPIRED], n);
        }

        /* Others are not affected. */
        world_offer_one(&w, f, w.now_ns, MTU, 1);
        world_run_dry(&w);
        CHECK(records[n_records - 1].fate == FATE_SENT, "last packet is lost");
        world_destroy(&w);
    }
}

/* However much more comes than the port may send, and waits until it has
 * expired, the port sends at its rate. */
static void
test_overload(void)
{
    const size_t n_offered = 16 * MAX_BATCH;
    const uint64_t poll_ns = 100000;
    struct options o = OPTIONS_DEFAULT;
    uint64_t end_ns, sent_bytes = 0;
    struct world w;

    o.port_rate_bps = 100000000;
    o.max_delay_ns = 1 * MS;
    o.max_backlog = 1 << 16;
    world_init(&w, &o);
    end_ns = w.now_ns + 100 * MS;
    while (w.now_ns < end_ns) {
        struct dp_packet_batch batch;
        size_t n, n_max, n_left = 0;

        for (size_t i = 0; i < n_offered; i += MAX_BATCH) {
            struct shaper_source sources[MAX_BATCH];

            dp_packet_batch_init(&batch);
            for (size_t j = 0; j < MAX_BATCH; j++) {
                struct dp_packet *packet = dp_packet_new(64);

                memset(dp_packet_put_uninit(packet, 64), 0, 64);
                pkt_metadata_init(&packet->md, ODPP_NONE);
                set_edt(packet, w.now_ns, 1000, j % 3);
                sources[j] = test_source(1);
                dp_packet_batch_add(&batch, packet);
            }
            flow_shaper_enqueue(w.s, &batch, sources, w.now_ns);
            CHECK(dp_packet_batch_is_empty(&batch), "packets pass");
        }
        n_max = flow_shaper_n_new(w.s);
        CHECK(n_max <= n_offered, "%"PRIuSIZE" packets are new", n_max);
        w.now_ns += poll_ns;
        while (n_left < 2 * n_max
               && (n = flow_shaper_drain(w.s, &batch, w.now_ns))) {
            n_left += n;
            if (end_ns - w.now_ns < 50 * MS) {
                sent_bytes += dp_packet_batch_size(&batch) * 64;
            }
            dp_packet_delete_batch(&batch, true);
        }
        flow_shaper_end_drain(w.s, 0, w.now_ns);
    }
    /* Of 50 ms.  What it may catch up on after late polls does not count. */
    CHECK(sent_bytes > 600000 && sent_bytes < 650000,
          "%"PRIu64" bytes sent rather than 625000", sent_bytes);
    world_destroy(&w);
}

/* Packets that wait for a rate for longer than the threshold are marked, at
 * the time of their departure. */
static void
test_ecn(void)
{
    for (int stamped = 0; stamped < 2; stamped++) {
        struct options o = OPTIONS_DEFAULT;
        struct world w;
        uint64_t sent = 0;

        /* A packet takes 1.2112 ms, so those that leave after the ninth have
         * waited for more than 10 ms. */
        o.max_delay_ns = 30 * MS;
        o.port_rate_bps = 10000000;
        o.ecn_threshold_ns = 10 * MS;
        world_init(&w, &o);
        while (w.n_flows < 1 || w.flows[w.n_flows - 1].id.dest_type
                                == DEST_ETH) {
            world_add_flow(&w, stamped, 0);
        }
        n_marked = 0;
        for (int i = 0; i < 24; i++) {
            world_offer_one(&w, &w.flows[w.n_flows - 1],
                            stamped ? w.now_ns : 0, MTU, 1);
        }
        for (int i = 0; i < 24; i++) {
            uint64_t before = n_marked;

            sent += world_drain(&w, 0);
            CHECK(sent == i + 1, "%"PRIu64" sent after %d turns", sent, i);
            CHECK(i > 8 || n_marked == before, "packet %d marked", i);
            w.now_ns += 1211200;
        }
        CHECK(n_marked == 7 || n_marked == 8,
              "%"PRIu64" of 15 packets marked, half of which are ECT",
              n_marked);
        world_destroy(&w);
    }
}

/* Rates and EDTs at the same time, random operations. */
static void
test_random_paced(void)
{
    for (unsigned int i = 0; i < rounds(200); i++) {
        size_t n_flows = 1 + choose_log(100);
        struct options o;
        struct world w;

        choose_options(&o);
        o.max_backlog = 1 << 18;
        o.max_flows = 4096;
        o.max_delay_ns = 2000 * MS;
        if (choose(2)) {
            o.port_rate_bps = 10000000 + choose_log(UINT64_C(100000000000));
        }
        for (size_t j = 0; j < o.n_queues; j++) {
            if (choose(2)) {
                o.queues[j].rate_bps
                    = 10000000 + choose_log(UINT64_C(10000000000));
                o.queues[j].burst_bytes = choose(2) * choose_log(100000);
            }
        }
        world_init(&w, &o);
        while (w.n_flows < n_flows) {
            world_add_flow(&w, choose(4) != 0, choose(2) ? 0 : choose(12));
        }
        for (unsigned int j = 0; j < 100; j++) {
            switch (choose(10)) {
            case 0: case 1: case 2: case 3:
                if (w.n_held < 1000) {
                    world_offer_random(&w);
                }
                break;
            case 4: case 5: case 6:
                world_next(&w);
                break;
            case 7:
                w.now_ns += choose_log(20000);
                world_drain(&w, 0);
                break;
            case 8:
                w.now_ns += choose_log(2 * MS);
                world_drain(&w, choose(3) * MAX_BATCH);
                break;
            case 9:
                if (choose(10) == 0) {
                    world_change_thread(&w);
                }
                break;
            }
            world_check_stats(&w);
        }
        world_run_dry(&w);
        world_destroy(&w);
    }
}

/* A rate that changes in place, or comes or goes, while packets are held. */
static void
test_change_rate(void)
{
    for (unsigned int i = 0; i < rounds(100); i++) {
        struct options o = OPTIONS_DEFAULT;
        struct world w;

        o.max_delay_ns = 5000 * MS;
        world_init(&w, &o);
        while (w.n_flows < 20) {
            world_add_flow(&w, choose(2), choose(4));
        }
        for (unsigned int j = 0; j < 10; j++) {
            for (int k = 0; k < 5; k++) {
                world_offer_random(&w);
                for (int l = choose(3); l > 0; l--) {
                    world_next(&w);
                }
            }
            if (w.config->port_pace && choose(2)) {
                /* In place. */
                w.options.port_rate_bps = 0;
                edt_pace_set_rate(w.config->port_pace,
                                  10000000 + choose_log(10000000000),
                                  w.now_ns);
            } else {
                if (choose(2)) {
                    choose_options(&o);
                }
                o.max_backlog = 1 << 18;
                o.max_flows = 4096;
                o.max_delay_ns = 5000 * MS;
                o.port_rate_bps = choose(2) * (1000000000
                                               + choose_log(1000000000));
                for (size_t k = 0; k < o.n_queues; k++) {
                    o.queues[k].rate_bps
                        = choose(2) * (1000000000 + choose_log(1000000000));
                }
                world_set_options(&w, &o);
            }
        }
        world_run_dry(&w);
        world_destroy(&w);
    }
}

/* The time of what is next due can be seen from the outside. */
static void
test_next_due_gauge(void)
{
    struct options o = OPTIONS_DEFAULT;
    struct shaper_stats stats;
    struct fifo *f;
    struct world w;

    world_init(&w, &o);
    f = world_add_flow(&w, true, 0);
    for (int i = 0; i < 3; i++) {
        uint64_t expected;

        if (!i) {
            world_offer_one(&w, f, w.now_ns + 10000, MTU, 1);
            world_offer_one(&w, f, w.now_ns + 20000, MTU, 1);
        }
        world_drain(&w, 0);
        expected = flow_shaper_next_due(w.s, w.now_ns);
        memset(&stats, 0, sizeof stats);
        stats.counters[SHAPER_NEXT_DUE_NS] = UINT64_MAX;
        flow_shaper_get_stats(w.s, &stats);
        CHECK(stats.counters[SHAPER_NEXT_DUE_NS] == expected,
              "next due at %"PRIu64" rather than %"PRIu64" by the statistics, "
              "after %d packets", stats.counters[SHAPER_NEXT_DUE_NS],
              expected, i);
        world_next(&w);
    }
    world_destroy(&w);
}

/* The busiest FIFOs. */
static void
test_busiest(void)
{
    struct options o = OPTIONS_DEFAULT;
    struct shaper_flow_stats flows[20];
    uint64_t bytes[100] = { 0 };
    struct world w;
    size_t n;

    world_init(&w, &o);
    for (int i = 0; i < 100; i++) {
        world_add_flow(&w, true, 0);
    }
    CHECK(!flow_shaper_get_busiest(w.s, flows, 20), "a FIFO is busy");
    for (int i = 0; i < 3000; i++) {
        size_t j = choose(1 + choose(100));
        uint32_t size = MIN_PACKET + choose(MTU - MIN_PACKET);

        world_offer_one(&w, &w.flows[j], w.now_ns + 1 + choose(1000), size, 1);
        bytes[j] += size;
    }
    world_run_dry(&w);
    CHECK(!flow_shaper_get_busiest(w.s, flows, 0), "more than asked for");
    n = flow_shaper_get_busiest(w.s, flows, ARRAY_SIZE(flows));
    CHECK(n == ARRAY_SIZE(flows), "only %"PRIuSIZE" FIFOs", n);
    for (size_t i = 0; i < n; i++) {
        size_t best = 0;

        for (size_t j = 1; j < 100; j++) {
            best = bytes[j] > bytes[best] ? j : best;
        }
        CHECK(flows[i].tx_bytes == bytes[best], "place %"PRIuSIZE" has sent "
              "%"PRIu64" bytes rather than %"PRIu64, i, flows[i].tx_bytes,
              bytes[best]);
        bytes[best] = 0;
    }
    world_destroy(&w);
}

/* Who knows the code cannot find keys that collide.  (With CRC, the hash of
 * most builds, he can, whatever its seed: it is linear.) */
static void
test_hash(void)
{
    enum { N_BITS = 64, N = 1 << 15 };
    uint64_t basis[N_BITS] = { 0 }, kernel[N_BITS];
    struct shaper_flow_key key;
    size_t n_kernel = 0;

    shaper_flow_key_init();
    memset(&key, 0, sizeof key);

    /* Differences in the last 64 bits that CRC does not see. */
    uint32_t zero = hash_words64(key.words, ARRAY_SIZE(key.words), 0);
    for (size_t i = 0; i < N_BITS; i++) {
        key.words[3] = UINT64_C(1) << i;
        uint64_t bits = key.words[3];
        uint64_t v = hash_words64(key.words, ARRAY_SIZE(key.words), 0) ^ zero;

        v <<= 32;

        /* Eliminate: 'v' is what CRC makes of 'bits'. */
        for (size_t j = 0; j < 32 && v; j++) {
            if (!(v & (UINT64_C(1) << (63 - j)))) {
                continue;
            }
            if (!basis[2 * j]) {
                basis[2 * j] = v;
                basis[2 * j + 1] = bits;
                bits = 0;
                break;
            }
            v ^= basis[2 * j];
            bits ^= basis[2 * j + 1];
        }
        if (bits) {
            kernel[n_kernel++] = bits;
        }
    }

    /* Some for CRC; as many others where the hash is not linear. */
    uint32_t *hashes = xmalloc(N * sizeof *hashes);
    size_t n_same = 0;
    for (size_t i = 0; i < N; i++) {
        key.words[3] = 0;
        for (size_t j = 0; j < 15; j++) {
            if (i >> j & 1) {
                key.words[3] ^= n_kernel >= 15 ? kernel[j] : UINT64_C(1) << j;
            }
        }
        hashes[i] = shaper_flow_key_hash(&key);
        for (size_t j = i < 64 ? 0 : i - 64; j < i; j++) {
            n_same += hashes[i] == hashes[j];
        }
    }
    CHECK(n_same < 3, "%"PRIuSIZE" collisions", n_same);

    /* Whatever part of it is used. */
    for (int shift = 0; shift < 32; shift += 8) {
        unsigned int counts[256] = { 0 };

        for (size_t i = 0; i < N; i++) {
            counts[hashes[i] >> shift & 0xff]++;
        }
        for (size_t i = 0; i < 256; i++) {
            /* 128 are expected. */
            CHECK(counts[i] < 4 * N / 256, "%u of %d in one of 256 buckets",
                  counts[i], N);
        }
    }
    free(hashes);
}

static void
enable_tso(void)
{
    struct smap config = SMAP_INITIALIZER(&config);

    smap_add(&config, "userspace-tso-enable", "true");
    userspace_tso_init(&config);
    smap_destroy(&config);
    CHECK(userspace_tso_enabled(), "TSO is not enabled");
}

#define TSO_HEADER (ETH_HEADER_LEN + IP_HEADER_LEN + TCP_HEADER_LEN)

/* Returns a packet of 'size' bytes that is to be cut into segments with
 * 'segsz' bytes of payload, and that says that its TCP header has 'tcp_offset'
 * words. */
static struct dp_packet *
tso_packet_create(size_t size, uint16_t segsz, uint8_t tcp_offset)
{
    struct dp_packet *packet = dp_packet_new(size);
    uint8_t *data = dp_packet_put_zeros(packet, size);

    data[12] = 0x08;
    data[14] = 0x45;
    data[23] = IPPROTO_TCP;
    data[46] = tcp_offset << 4;
    dp_packet_reset_offsets(packet);
    packet->l3_ofs = ETH_HEADER_LEN;
    packet->l4_ofs = ETH_HEADER_LEN + IP_HEADER_LEN;
#ifndef DP_PACKET_OL_SHIFT_COUNT
    dp_packet_hwol_set_tcp_seg(packet);
#endif
    dp_packet_set_tso_segsz(packet, segsz);
    pkt_metadata_init(&packet->md, ODPP_NONE);
    return packet;
}

/* However short the segments are that guests ask for, a batch is not cut into
 * more than there may be, and nothing is cut that there is no room for. */
static void
test_tso_bound(void)
{
    enum { MAX_CUT = 4096, SEGMENTS = 2000 };

    enable_tso();
    for (int full = 0; full < 2; full++) {
        struct shaper_source sources[MAX_BATCH];
        struct options o = OPTIONS_DEFAULT;
        struct dp_packet_batch batch;
        struct shaper_stats stats;
        struct world w;
        uint64_t dropped;
        size_t held;

        if (full) {
            o.max_backlog = 1;
        }
        world_init(&w, &o);
        dp_packet_batch_init(&batch);
        for (int i = 0; i < MAX_BATCH; i++) {
            struct dp_packet *packet
                = tso_packet_create(TSO_HEADER + 32 * SEGMENTS, 32, 5);

            set_edt(packet, w.now_ns + MS, 1000, 1);
            dp_packet_batch_add(&batch, packet);
            sources[i] = test_source(0);
        }
        flow_shaper_enqueue(w.s, &batch, sources, w.now_ns);
        CHECK(dp_packet_batch_is_empty(&batch), "packets pass");

        memset(&stats, 0, sizeof stats);
        flow_shaper_get_stats(w.s, &stats);
        held = flow_shaper_backlog(w.s);
        dropped = stats.counters[full ? SHAPER_DROP_BACKLOG
                                 : SHAPER_DROP_SEGMENT];
        /* The first finds room for one segment, the others for none. */
        CHECK(full ? held == 1 && dropped == SEGMENTS - 1 + MAX_BATCH - 1
              : held == MAX_CUT / SEGMENTS * SEGMENTS
                && dropped == MAX_BATCH - MAX_CUT / SEGMENTS,
              "%"PRIuSIZE" held and %"PRIu64" dropped", held, dropped);
        world_destroy(&w);
    }
}

/* A packet that is cut later is charged to the port's rate as what it will be
 * on the wire. */
static void
test_tso_rate(void)
{
    const struct shaper_source source = test_source(0);
    const uint32_t size = TSO_HEADER + 45 * 1400;
    const uint64_t duration_ns = 1000 * MS;
    struct options o = OPTIONS_DEFAULT;
    struct dp_packet_batch batch;
    uint64_t start_ns, wire, n = 0;
    struct world w;

    enable_tso();
    o.port_rate_bps = 1000000000;
    o.overhead_bytes = 24;
    wire = size + 44 * TSO_HEADER + 45 * o.overhead_bytes;
    world_init(&w, &o);
    for (start_ns = w.now_ns; w.now_ns < start_ns + duration_ns;
         w.now_ns += 10000) {
        while (flow_shaper_backlog(w.s) < 10) {
            dp_packet_batch_init_packet(&batch,
                                        tso_packet_create(size, 1400, 5));
            flow_shaper_enqueue(w.s, &batch, &source, w.now_ns);
            CHECK(dp_packet_batch_is_empty(&batch), "a packet passes");
        }
        while (flow_shaper_drain(w.s, &batch, w.now_ns)) {
            n += dp_packet_batch_size(&batch);
            dp_packet_delete_batch(&batch, true);
        }
        flow_shaper_end_drain(w.s, n, w.now_ns);
    }

    double rate = n * wire * 8e9 / duration_ns / o.port_rate_bps;

    CHECK(rate > 0.995 && rate < 1.005, "%.4f of the rate leaves", rate);
    world_destroy(&w);
}

/* What a guest calls a packet to be segmented and is none is dropped, and
 * counted. */
static void
test_bad_tso(void)
{
    static const struct {
        uint8_t tcp_offset;     /* In words. */
        uint16_t segsz;
        size_t size;
    } cases[] = {
        { 0, 1400, 9000 }, { 4, 1400, 9000 }, { 15, 1400, 90 },
        { 5, 0, 9000 }, { 5, 1, 9000 }, { 5, 3, 9000 },
    };

    enable_tso();
    for (size_t i = 0; i <= ARRAY_SIZE(cases); i++) {
        bool good = i == ARRAY_SIZE(cases);
        struct options o = OPTIONS_DEFAULT;
        struct shaper_source source = test_source(0);
        struct shaper_stats stats;
        struct dp_packet_batch batch;
        struct world w;

        world_init(&w, &o);
        struct dp_packet *packet
            = tso_packet_create(good ? 9000 : cases[i].size,
                                good ? 1400 : cases[i].segsz,
                                good ? 5 : cases[i].tcp_offset);

        /* Without a segment size it is an ordinary packet, or a bad one. */
        bool bad = !good && shaper_is_tso(packet);
        set_edt(packet, w.now_ns + MS, 1000, 1);
        dp_packet_batch_init_packet(&batch, packet);
        flow_shaper_enqueue(w.s, &batch, &source, w.now_ns);
        dp_packet_delete_batch(&batch, true);

        memset(&stats, 0, sizeof stats);
        flow_shaper_get_stats(w.s, &stats);
        CHECK(stats.counters[SHAPER_DROP_SEGMENT] == bad
              && flow_shaper_backlog(w.s) == (good ? 7 : !bad),
              "case %"PRIuSIZE": %"PRIu64" dropped, %"PRIuSIZE" wait", i,
              stats.counters[SHAPER_DROP_SEGMENT], flow_shaper_backlog(w.s));
        world_destroy(&w);
    }
}

static const struct test tests[] = {
    { "key", test_key },
    { "hash", test_hash },
    { "bad-tso", test_bad_tso },
    { "tso-bound", test_tso_bound },
    { "tso-rate", test_tso_rate },
    { "garbage", test_garbage },
    { "bypass", test_bypass },
    { "closing", test_closing },
    { "random", test_random },
    { "turns", test_turns },
    { "backlog", test_backlog },
    { "flows", test_flows },
    { "flows-share", test_flows_share },
    { "budget", test_budget },
    { "meters-share", test_meters_share },
    { "queue-moves", test_queue_moves },
    { "reconfigure", test_reconfigure },
    { "fewer-flows", test_fewer_flows },
    { "merge", test_merge },
    { "port-rate", test_port_rate },
    { "queue-rate", test_queue_rate },
    { "both-rates", test_both_rates },
    { "share", test_share },
    { "idle-pace", test_idle_pace },
    { "priority", test_priority },
    { "unstamped", test_unstamped },
    { "expired", test_expired },
    { "overload", test_overload },
    { "ecn", test_ecn },
    { "random-paced", test_random_paced },
    { "change-rate", test_change_rate },
    { "next-due-gauge", test_next_due_gauge },
    { "busiest", test_busiest },
};

int
main(int argc, char *argv[])
{
    chains = edt_chains_create(EDT_CHAINS_MAX);
    return run_tests(argc, argv, tests, ARRAY_SIZE(tests));
}
