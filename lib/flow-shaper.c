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

#include "flow-shaper.h"

#include "compiler.h"
#include "coverage.h"
#include "dp-packet.h"
#include "dpdk.h"
#include "edt-stamp.h"
#include "odp-util.h"
#include "ovs-atomic.h"
#include "packets.h"
#include "shaper-ecn.h"
#include "shaper-offload.h"
#include "shaper-queue.h"
#include "userspace-tso.h"
#include "util.h"

/* Does the wheel of 's' give out one slot at a time, which has to leave by
 * itself?  Never so, but benchmarks/sched/peers.h puts other schedulers in the
 * wheel's place. */
#ifndef SLOT_BY_SLOT
#define SLOT_BY_SLOT(S) false
#endif

COVERAGE_DEFINE(flowbundler_drop_max_delay);
COVERAGE_DEFINE(flowbundler_drop_backlog);
COVERAGE_DEFINE(flowbundler_drop_budget);
COVERAGE_DEFINE(flowbundler_drop_flows);
COVERAGE_DEFINE(flowbundler_drop_expired);
COVERAGE_DEFINE(flowbundler_drop_removed);
COVERAGE_DEFINE(flowbundler_drop_segment);
COVERAGE_DEFINE(flowbundler_ecn_marked);

/* Lag that a rate catches up on while packets wait for it.  Longer ones than
 * this are not polls that came late but a thread that stood still. */
#define MAX_CATCH_UP_NS EDT_PACE_CATCH_UP_NS

/* If there are more queues than this that wait for their rates, they wait in
 * the wheel.  A queue looks at its rate again after MAX_WAIT_NS at the latest,
 * since it may have become more meanwhile. */
#define MAX_POLLED_CLASSES 8
#define MAX_WAIT_NS UINT64_C(100000)

/* Time after which the main thread looks again at rates that it shares. */
#define MAIN_POLL_NS UINT64_C(1000000)

/* Segments of a TSO packet: 64 kB of segments as short as no TCP has them (the
 * least that Linux sends is 48 bytes).  What a guest asks for in one packet
 * must not keep the thread from others. */
#define MAX_SEGMENTS 2048

/* A FIFO that has been empty for this long is freed. */
#define FLOW_IDLE_NS UINT64_C(1000000000)
#define FLOW_REAP_MAX 4             /* FIFOs freed per drain at most. */

/* A port may fill this many times as many FIFOs as are left for all (dynamic
 * thresholds, Choudhury and Hahne, 1998): alone it gets 8/9 of them, and there
 * is always something left for a port that has none yet. */
#define FLOWS_SHARE 8

#define SHARE_PARTS 2               /* See share_begin(). */
#define MAX_EXPIRED 64              /* Dropped in one call at most. */
#define MAX_LINE 4096               /* Packets given times in one call. */
#define DUE_BURST 64                /* FIFOs taken from the wheel at once. */
#define CLASS_TURNS 8               /* Packets of a queue in its turn. */

/* A packet that waits. */
struct held_packet {
    struct dp_packet *packet;
    uint64_t edt_ns;
    struct shaper_source source;
    uint32_t info;                  /* See held_info(). */
};
BUILD_ASSERT_DECL(sizeof(struct held_packet) == 24 || sizeof(void *) != 8);
BUILD_ASSERT_DECL(SHAPER_MAX_POOLS <= 1 << 6);

/* Packs the 'bytes' of a packet (of which even a TSO packet has less than
 * 2^17), what kind of buffer it is in ('type'), the number of its 'pool' in
 * struct shaper_thread and whether it is 'stamped' with an EDT.  (Not a bit
 * field, which compilers assemble in memory and then have to wait for.) */
static inline uint32_t
held_info(uint32_t bytes, enum dp_packet_source type, uint8_t pool,
          bool stamped)
{
    return bytes << 11 | type << 7 | pool << 1 | stamped;
}

static inline uint32_t
held_bytes(const struct held_packet *held)
{
    return held->info >> 11;
}

/* Returns 'type' and 'pool' together. */
static inline uint32_t
held_kind(const struct held_packet *held)
{
    return held->info & 0x7fe;
}

static inline enum dp_packet_source
held_kind_type(uint32_t kind)
{
    return kind >> 7;
}

static inline uint8_t
held_kind_pool(uint32_t kind)
{
    return kind >> 1 & 0x3f;
}

static inline enum dp_packet_source
held_type(const struct held_packet *held)
{
    return held_kind_type(held_kind(held));
}

static inline uint8_t
held_pool(const struct held_packet *held)
{
    return held_kind_pool(held->info);
}

static inline bool
held_is_stamped(const struct held_packet *held)
{
    return held->info & 1;
}

/* Prefetches what sending 'held' will touch: the packet has waited, and its
 * buffer's header, in DPDK's case two cache lines, may have left the cache. */
static inline void
held_prefetch(const struct held_packet *held)
{
    const char *packet = (const char *) held->packet;

    OVS_PREFETCH(packet);
    OVS_PREFETCH(packet + CACHE_LINE_SIZE);
}

/* Makes 'held' a packet that 'thread' counts. */
static void
held_set_pool(struct held_packet *held, struct shaper_thread *thread)
{
    held->info = held_info(held_bytes(held), held_type(held),
                           shaper_thread_pool(thread, held->packet),
                           held_is_stamped(held));
}

#define CHUNK_PACKETS 5

/* Storage of a FIFO: some of its packets. */
struct packet_chunk {
    struct packet_chunk *next;
    struct held_packet held[CHUNK_PACKETS];
};
BUILD_ASSERT_DECL(sizeof(struct packet_chunk) <= 2 * CACHE_LINE_SIZE);

/* What waits in the wheel. */
enum shaper_node_type {
    NODE_FLOW,                      /* A FIFO until its head is due. */
    NODE_CLASS,                     /* An output queue until it may send. */
};

struct shaper_node {
    enum shaper_node_type type;
};

enum flow_state {
    FLOW_IDLE,                      /* Empty, in 'idle_flows'. */
    FLOW_WAITING,                   /* In the wheel. */
    FLOW_READY,                     /* Head is due, in its class's 'ready' or
                                     * 'queue'. */
};

/* A FIFO.  Most packets need nothing but its first two cache lines. */
OVS_ALIGNED_STRUCT(CACHE_LINE_SIZE, flow_queue) {
    /* Written for each packet. */
    struct shaper_node node;
    uint8_t state;                  /* enum flow_state. */
    bool in_use;
    uint8_t head_idx;               /* In 'head'. */
    uint8_t tail_idx;               /* One past the last in 'tail'. */
    uint16_t level;                 /* In the wheel. */
    uint32_t n_packets;
    struct packet_chunk *head;
    struct packet_chunk *tail;
    struct ovs_list list_node;      /* By 'state'. */
    atomic_uint64_t tx_packets;
    atomic_uint64_t tx_bytes;

    /* Set when the FIFO is created. */
    struct shaper_flow_key key;
    struct flow_queue *next;        /* In hash bucket or free list. */
    uint32_t hash;
    uint16_t class_idx;
    uint16_t port;                  /* That its first packet was received at,
                                     * if it holds any. */
    uint32_t first_meter;           /* Of its chain, or EDT_CHAIN_NONE. */
    uint32_t gap_ns;
    uint64_t idle_since_ns;

    /* If 'key.late': its fair meters reserve time for its next packets, its
     * turn, when its last turn is over ("edt-late.h"). */
    uint32_t late_meters[EDT_CHAINS_LATE];
    uint32_t n_bytes;               /* Held (also without an EDT). */
    uint32_t turn_bytes;            /* Left of its turn. */
    bool in_turn;                   /* Has a part of it left? */
    uint32_t n_line;                /* First packets, if there is no turn, for
                                     * which time is reserved: 'edt_ns'. */
    uint64_t turn_edt_ns;           /* Of all packets of the turn. */
    uint64_t max_delay_ns;          /* Of its meters. */
    uint64_t ecn_threshold_ns;      /* Of its meters. */

    struct shaper_turn turn;        /* In its class's 'queue', if that has a
                                     * rate. */
};

/* An output queue. */
struct shaper_class {
    struct shaper_node node;
    bool waiting;                   /* In the wheel, until it may send. */
    bool active;                    /* In 'active_classes'. */
    bool sharing;                   /* In 'sharing_classes'. */
    uint8_t n_turns;                /* Packets sent since its turn came. */
    uint8_t rank;                   /* In 'active_classes'. */
    uint16_t level;
    const struct edt_params *params; /* Of its own rate, or NULL. */
    struct ovs_list ready;          /* Of struct flow_queue: those that no rate
                                     * applies to. */
    struct ovs_list had_turn;       /* Within end_round(). */
    struct ovs_list active_node;
    struct ovs_list sharing_node;
    uint64_t unstamped_bytes;       /* Held without an EDT. */
    uint64_t unstamped_limit;       /* Of these: 'max_delay_ns' at its rate. */
    uint32_t n_unstamped_flows;     /* FIFOs that hold these. */
    uint32_t queue_id;
    atomic_uint64_t tx_packets;
    atomic_uint64_t tx_bytes;
    atomic_uint64_t drops;
    struct shaper_queue queue;      /* Those that have to wait for a rate. */
};

#define SLAB_CHUNKS 256
#define SLAB_FLOWS 128

/* Memory that is kept until the shaper is destroyed. */
struct slab {
    struct slab *next;
    void *mem;
};

typedef ATOMIC(struct slab *) atomic_slab_ptr;

struct flow_shaper {
    /* Read for each batch. */
    struct shaper_config *config;
    struct mltw *wheel;
    struct shaper_thread *thread;   /* NULL while detached. */
    const struct edt_chains *chains; /* That keys of FIFOs name. */
    struct flow_shaper *line;       /* Where packets are delayed, or NULL. */
    struct flow_queue **buckets;    /* See bucket(). */
    uint32_t bucket_mask;
    uint32_t n_buckets;
    uint32_t max_buckets;
    bool closing;                   /* No longer to hold what may pass. */
    bool releasing;                 /* Nor to wait with what it holds. */
    unsigned int core_id;
    uint64_t release_ns;            /* When 'closing' becomes 'releasing'. */

    /* Written for each batch. */
    uint32_t n_held;                /* Packets. */
    uint32_t n_kept;                /* Of them, after the last drain. */
    uint32_t n_unstamped;           /* Of them, without an EDT. */
    uint32_t n_cut;                 /* Segments made in this call. */
    uint64_t held_bytes;
    uint32_t n_flows;
    uint32_t n_busy;                /* Of them, those that hold packets. */
    uint32_t *busy_by_port;         /* Of these, by 'port'. */
    uint32_t n_ports;               /* Elements in 'busy_by_port'. */
    uint64_t share_ticks;           /* Until when the main thread has used its
                                     * share of rates. */
    uint64_t round_ns;              /* If not 0, of drain_due(). */
    struct ovs_list active_classes[SHAPER_RANKS]; /* With FIFOs that are
                                                   * ready. */
    struct ovs_list blocked_classes; /* Within shaper_drain(): those that may
                                      * not send. */
    uint32_t active_ranks;          /* Bitmap: lists that may not be empty. */
    uint32_t n_active_classes;
    struct ovs_list sharing_classes; /* Those that are not quiet. */
    struct ovs_list ahead_ready;    /* Of struct flow_queue, as a class's. */
    struct ovs_list idle_flows;     /* Longest idle first. */
    struct packet_chunk *free_chunks;
    struct flow_queue *free_flows;
    struct shaper_control control;
    struct shaper_source drained[NETDEV_MAX_BURST]; /* Of the last drain. */

    struct shaper_class *classes;
    size_t n_classes;

    atomic_slab_ptr chunk_slabs;
    atomic_slab_ptr flow_slabs;     /* Read by other threads. */

    atomic_uint64_t counters[SHAPER_N_COUNTERS];
    atomic_uint64_t batch_size[SHAPER_BATCH_BINS];
    atomic_uint64_t lateness[SHAPER_LATENESS_BINS];
};

static void
counter_add(atomic_uint64_t *counter, uint64_t n)
{
    uint64_t value;

    /* Only the owning thread writes. */
    atomic_read_relaxed(counter, &value);
    atomic_store_relaxed(counter, value + n);
}

static uint64_t
counter_get(const atomic_uint64_t *counter)
{
    uint64_t value;

    atomic_read_relaxed(CONST_CAST(atomic_uint64_t *, counter), &value);
    return value;
}

/* Returns the name of 'counter' as users see it. */
const char *
shaper_counter_name(enum shaper_counter counter)
{
    switch (counter) {
    case SHAPER_SENT: return "sent";
    case SHAPER_SENT_BYTES: return "sent_bytes";
    case SHAPER_BYPASSED: return "bypassed";
    case SHAPER_BYPASSED_BYTES: return "bypassed_bytes";
    case SHAPER_BATCHES: return "batches";
    case SHAPER_ECN_MARKED: return "ecn_marked";
    case SHAPER_AHEAD: return "ahead";
    case SHAPER_DROP_MAX_DELAY: return "drop_max_delay";
    case SHAPER_DROP_BACKLOG: return "drop_backlog";
    case SHAPER_DROP_BUDGET: return "drop_budget";
    case SHAPER_DROP_FLOWS: return "drop_flows";
    case SHAPER_DROP_EXPIRED: return "drop_expired";
    case SHAPER_DROP_REMOVED: return "drop_removed";
    case SHAPER_DROP_SEGMENT: return "drop_segment";
    case SHAPER_BACKLOG: return "backlog";
    case SHAPER_BACKLOG_BYTES: return "backlog_bytes";
    case SHAPER_FLOWS: return "flows";
    case SHAPER_NEXT_DUE_NS: return "next_due_ns";
    case SHAPER_N_COUNTERS: break;
    }
    OVS_NOT_REACHED();
}

/* Configurations. */

/* Returns 'config_' with another reference.  Thread-safe. */
struct shaper_config *
shaper_config_ref(const struct shaper_config *config_)
{
    struct shaper_config *config = CONST_CAST(struct shaper_config *, config_);

    ovs_refcount_ref(&config->ref_cnt);
    return config;
}

/* Drops a reference to 'config' (which may be NULL).  Thread-safe. */
void
shaper_config_unref(struct shaper_config *config)
{
    if (config && ovs_refcount_unref(&config->ref_cnt) == 1) {
        for (size_t i = 0; i < config->n_classes; i++) {
            edt_class_unref(config->classes[i].pace);
            free(config->classes[i].params);
        }
        edt_pace_unref(config->port_pace);
        free(config->port_params);
        free(config->classes);
        free(config->class_by_queue);
        free(config);
    }
}

/* FIFOs. */

/* Adds 'size' bytes of zeros to 'slabs' and returns them. */
static void *
slab_add(atomic_slab_ptr *slabs, size_t size)
{
    struct slab *slab = xmalloc(sizeof *slab);

    slab->mem = xzalloc_cacheline(size);
    atomic_read_relaxed(slabs, &slab->next);
    atomic_store_explicit(slabs, slab, memory_order_release);
    return slab->mem;
}

static void
slabs_destroy(atomic_slab_ptr *slabs)
{
    struct slab *slab;

    atomic_read_relaxed(slabs, &slab);
    while (slab) {
        struct slab *next = slab->next;

        free_cacheline(slab->mem);
        free(slab);
        slab = next;
    }
}

static struct packet_chunk *
chunk_alloc(struct flow_shaper *s)
{
    struct packet_chunk *chunk = s->free_chunks;

    if (OVS_UNLIKELY(!chunk)) {
        chunk = slab_add(&s->chunk_slabs, SLAB_CHUNKS * sizeof *chunk);
        for (size_t i = 0; i < SLAB_CHUNKS; i++) {
            chunk[i].next = i + 1 < SLAB_CHUNKS ? &chunk[i + 1] : NULL;
        }
    }
    s->free_chunks = chunk->next;
    return chunk;
}

static void
chunk_free(struct flow_shaper *s, struct packet_chunk *chunk)
{
    chunk->next = s->free_chunks;
    s->free_chunks = chunk;
}

/* Adds a packet to 'q', which the caller fills in.  (To copy what has just
 * been put together in memory would mean to wait for it to get there.) */
static inline struct held_packet *
flow_push(struct flow_shaper *s, struct flow_queue *q)
{
    if (!q->n_packets) {
        q->head = q->tail = chunk_alloc(s);
        q->head_idx = q->tail_idx = 0;
    } else if (q->tail_idx == CHUNK_PACKETS) {
        q->tail->next = chunk_alloc(s);
        q->tail = q->tail->next;
        q->tail_idx = 0;
    }
    q->n_packets++;
    return &q->tail->held[q->tail_idx++];
}

static const struct held_packet *
flow_head(const struct flow_queue *q)
{
    return &q->head->held[q->head_idx];
}

/* Returns the time at which the first packet of 'q' is due, or that from which
 * on its meters can be asked for it. */
static inline uint64_t
flow_head_edt(const struct flow_queue *q)
{
    return (OVS_UNLIKELY(q->key.late) && q->turn_bytes ? q->turn_edt_ns
            : flow_head(q)->edt_ns);
}

static void
flow_pop(struct flow_shaper *s, struct flow_queue *q)
{
    struct packet_chunk *chunk = q->head;

    q->n_packets--;
    if (!q->n_packets) {
        chunk_free(s, chunk);
        q->head = q->tail = NULL;
    } else if (++q->head_idx == CHUNK_PACKETS) {
        q->head = chunk->next;
        q->head_idx = 0;
        chunk_free(s, chunk);
    }
}

/* The hash table grows by one bucket for each FIFO (linear hashing, Litwin,
 * 1980): as few pages of it are in use as will do, and no insertion takes
 * longer than another.  Of the bucket numbers that 'bucket_mask' allows, those
 * from 'n_buckets' on do not exist yet: what belongs there is still in the
 * bucket that will be split. */
static inline struct flow_queue **
bucket(const struct flow_shaper *s, uint32_t hash)
{
    uint32_t i = hash & s->bucket_mask;

    /* Without a branch, which could not be predicted. */
    return &s->buckets[i & s->bucket_mask >> (i >= s->n_buckets)];
}

/* Adds a bucket if there are more FIFOs than buckets. */
static void
buckets_grow(struct flow_shaper *s)
{
    if (s->n_flows <= s->n_buckets || s->n_buckets >= s->max_buckets) {
        return;
    }
    if (s->n_buckets > s->bucket_mask) {
        s->bucket_mask = s->bucket_mask * 2 + 1;
    }

    struct flow_queue **from = bucket(s, s->n_buckets);
    struct flow_queue **to = &s->buckets[s->n_buckets++];

    while (*from) {
        struct flow_queue *q = *from;

        if (bucket(s, q->hash) == to) {
            *from = q->next;
            q->next = *to;
            *to = q;
        } else {
            from = &q->next;
        }
    }
}

static inline struct flow_queue *
flow_find(const struct flow_shaper *s, const struct shaper_flow_key *key,
          uint32_t hash)
{
    struct flow_queue *q;

    for (q = *bucket(s, hash); q; q = q->next) {
        if (q->hash == hash && shaper_flow_key_equal(&q->key, key)) {
            break;
        }
    }
    return q;
}

static void
flow_insert(struct flow_shaper *s, struct flow_queue *q)
{
    struct flow_queue **head;

    s->n_flows++;
    buckets_grow(s);
    head = bucket(s, q->hash);
    q->next = *head;
    *head = q;
}

/* Frees 'q', which is empty and in 'idle_flows'. */
static void
flow_free(struct flow_shaper *s, struct flow_queue *q)
{
    struct flow_queue **p = bucket(s, q->hash);

    while (*p != q) {
        p = &(*p)->next;
    }
    *p = q->next;
    ovs_list_remove(&q->list_node);
    shaper_queue_leave(&s->classes[q->class_idx].queue, &q->turn);
    q->in_use = false;
    q->next = s->free_flows;
    s->free_flows = q;
    s->n_flows--;
}

/* Returns a new, empty FIFO for 'key', or NULL if there are 'max_flows' that
 * hold packets. */
static struct flow_queue *
flow_create(struct flow_shaper *s, const struct shaper_flow_key *key,
            uint32_t hash, uint16_t class_idx)
{
    struct edt_chain_ends ends;

    while (OVS_UNLIKELY(s->n_flows >= s->config->max_flows)) {
        if (ovs_list_is_empty(&s->idle_flows)) {
            return NULL;
        }
        flow_free(s, CONTAINER_OF(ovs_list_front(&s->idle_flows),
                                  struct flow_queue, list_node));
    }

    struct flow_queue *q = s->free_flows;

    if (OVS_UNLIKELY(!q)) {
        q = slab_add(&s->flow_slabs, SLAB_FLOWS * sizeof *q);
        for (size_t i = 0; i < SLAB_FLOWS; i++) {
            q[i].next = i + 1 < SLAB_FLOWS ? &q[i + 1] : NULL;
        }
    }
    s->free_flows = q->next;

    q->node.type = NODE_FLOW;
    q->state = FLOW_IDLE;
    q->n_packets = 0;
    q->key = *key;
    edt_chains_get(s->chains, key->chain, &ends);
    q->first_meter = ends.first_meter;
    memcpy(q->late_meters, ends.late_meters, sizeof q->late_meters);
    q->hash = hash;
    q->class_idx = class_idx;
    q->gap_ns = 0;
    q->level = 0;
    q->idle_since_ns = 0;
    q->n_bytes = 0;
    q->turn_bytes = 0;
    q->in_turn = false;
    q->n_line = 0;
    q->max_delay_ns = UINT64_MAX;
    q->ecn_threshold_ns = UINT64_MAX;
    q->turn.state = SHAPER_TURN_NONE;
    atomic_store_relaxed(&q->tx_packets, UINT64_C(0));
    atomic_store_relaxed(&q->tx_bytes, UINT64_C(0));
    q->in_use = true;
    ovs_list_push_back(&s->idle_flows, &q->list_node);
    flow_insert(s, q);
    return q;
}

/* Do packets of 'q' wait without a time from a meter? */
static inline bool
flow_is_unstamped(const struct flow_queue *q)
{
    return q->key.chain == EDT_CHAIN_NONE;
}

/* May another FIFO begin to hold packets, the first of them received at
 * 'port'? */
static inline bool
flows_have_room(const struct flow_shaper *s, uint16_t port)
{
    uint32_t mine = port < s->n_ports ? s->busy_by_port[port] : 0;

    return s->n_busy < s->config->max_flows
           && mine / FLOWS_SHARE < s->config->max_flows - s->n_busy;
}

/* Takes 'q', which is about to hold packets, the first of them received at
 * 'port', out of 'idle_flows'. */
static inline void
flow_becomes_busy(struct flow_shaper *s, struct flow_queue *q, uint16_t port)
{
    ovs_list_remove(&q->list_node);
    if (OVS_UNLIKELY(port >= s->n_ports)) {
        s->busy_by_port = shaper_grow(s->busy_by_port, &s->n_ports, port,
                                      sizeof *s->busy_by_port);
    }
    q->port = port;
    s->busy_by_port[port]++;
    s->n_busy++;
    if (flow_is_unstamped(q)) {
        s->classes[q->class_idx].n_unstamped_flows++;
    }
}

/* Scheduling. */

static struct shaper_class *
flow_class(const struct flow_shaper *s, const struct flow_queue *q)
{
    return &s->classes[q->class_idx];
}

/* Puts 'class' behind the active ones of its rank. */
static void
class_push_back(struct flow_shaper *s, struct shaper_class *class)
{
    ovs_list_push_back(&s->active_classes[class->rank], &class->active_node);
    s->active_ranks |= 1u << class->rank;
}

/* Returns the active class that is to send next, NULL if none may. */
static struct shaper_class *
first_class(struct flow_shaper *s)
{
    while (s->active_ranks) {
        struct ovs_list *list = &s->active_classes[raw_ctz(s->active_ranks)];

        if (!ovs_list_is_empty(list)) {
            return CONTAINER_OF(ovs_list_front(list), struct shaper_class,
                                active_node);
        }
        s->active_ranks &= s->active_ranks - 1;
    }
    return NULL;
}

static void
class_activate(struct flow_shaper *s, struct shaper_class *class)
{
    if (!class->active && !class->waiting) {
        class->active = true;
        s->n_active_classes++;
        class_push_back(s, class);
    }
}

/* Takes 'class' out of 'active_classes'. */
static void
class_deactivate(struct flow_shaper *s, struct shaper_class *class)
{
    class->active = false;
    class->n_turns = 0;
    s->n_active_classes--;
    ovs_list_remove(&class->active_node);
}

/* Has 'class' to keep to a rate? */
static inline bool
class_is_paced(const struct flow_shaper *s, const struct shaper_class *class)
{
    return shaper_queue_is_paced(&class->queue) && !s->releasing;
}

/* Returns the FIFO of 'class' that is to send next, or NULL. */
static inline struct flow_queue *
class_first(struct shaper_class *class)
{
    struct shaper_turn *turn;

    if (!ovs_list_is_empty(&class->ready)) {
        return CONTAINER_OF(ovs_list_front(&class->ready), struct flow_queue,
                            list_node);
    }
    turn = shaper_queue_first(&class->queue);
    return turn ? CONTAINER_OF(turn, struct flow_queue, turn) : NULL;
}

/* Has 'class' a FIFO that is ready? */
static inline bool
class_has_ready(const struct shaper_class *class)
{
    return class->queue.ready.n || !ovs_list_is_empty(&class->ready);
}

/* Has 'class' be looked at in each poll until it is quiet. */
static inline void
class_begin_sharing(struct flow_shaper *s, struct shaper_class *class)
{
    if (!class->sharing) {
        class->sharing = true;
        ovs_list_push_back(&s->sharing_classes, &class->sharing_node);
    }
}

/* Notes that 'bytes' bytes of 'class' have gone ahead of its rate. */
static void
class_charge_ahead(struct flow_shaper *s, struct shaper_class *class,
                   uint32_t bytes)
{
    if (bytes && class_is_paced(s, class)) {
        edt_share_charge(&class->queue.share, bytes);
        class_begin_sharing(s, class);
    }
}

/* Takes 'q', which is ready, out of its class's list. */
static inline void
flow_take(struct flow_shaper *s, struct flow_queue *q)
{
    if (q->turn.state == SHAPER_TURN_READY) {
        shaper_queue_take(&flow_class(s, q)->queue, &q->turn);
    } else {
        ovs_list_remove(&q->list_node);
    }
}

/* Lets 'q' rest if it has been taken and is not ready again. */
static inline void
flow_rest(struct flow_shaper *s, struct flow_queue *q)
{
    shaper_queue_rest(&flow_class(s, q)->queue, &q->turn);
}

static struct flow_queue *
node_flow(struct shaper_node *node)
{
    return CONTAINER_OF(node, struct flow_queue, node);
}

/* Do packets of 'q' leave when their time has come, ahead of the rates of the
 * port and the queue? */
static inline bool
flow_goes_ahead(const struct flow_queue *q)
{
    return OVS_UNLIKELY(q->key.addr_type & SHAPER_ADDR_AHEAD);
}

static void
flow_set_ready(struct flow_shaper *s, struct flow_queue *q, uint64_t now_ns)
{
    struct shaper_class *class = flow_class(s, q);

    held_prefetch(flow_head(q));
    q->state = FLOW_READY;
    if (flow_goes_ahead(q)) {
        ovs_list_push_back(&s->ahead_ready, &q->list_node);
        return;
    }
    if (class_is_paced(s, class)) {
        shaper_queue_add(&class->queue, &q->turn, now_ns);
        class_begin_sharing(s, class);
    } else {
        ovs_list_push_back(&class->ready, &q->list_node);
    }
    class_activate(s, class);
}

/* Makes 'gap_ns' the distance of the packets of 'q' from now on. */
static inline void
flow_set_gap(const struct flow_shaper *s, struct flow_queue *q,
             uint32_t gap_ns)
{
    if (gap_ns != q->gap_ns) {
        q->gap_ns = gap_ns;
        q->level = mltw_level(s->wheel, gap_ns);
    }
}

/* Puts 'q', which holds packets, the first of them with 'edt_ns', and is in no
 * list and not in the wheel, where its head belongs. */
static inline void
flow_schedule(struct flow_shaper *s, struct flow_queue *q, uint64_t edt_ns,
              uint64_t now_ns)
{
    if ((edt_ns > now_ns || SLOT_BY_SLOT(s))
        && !s->releasing) {
        /* The wheel has room for all FIFOs. */
        ovs_assert(mltw_enqueue(s->wheel, q, edt_ns, q->level));
        q->state = FLOW_WAITING;
    } else {
        flow_set_ready(s, q, now_ns);
    }
}

/* May 'q', a FIFO of 'class' for packets without an EDT or NULL if that does
 * not exist, hold 'bytes' more bytes?
 *
 * What the class' rate carries in max-delay is for all FIFOs that have packets
 * waiting, in equal parts, and what some of them leave is for the others, each
 * of which may have as much as there is then left.  So whoever comes has a
 * place, at least for one packet, however long others have been there and
 * however much they offer. */
static bool
class_has_room(const struct shaper_class *class, const struct flow_queue *q,
               uint32_t bytes)
{
    const uint64_t limit = class->unstamped_limit;
    const bool waits = q && q->n_packets;
    uint64_t mine = (waits ? q->n_bytes : 0) + bytes;
    uint32_t n = class->n_unstamped_flows + !waits;

    if (!class->unstamped_bytes || mine * n <= limit) {
        return true;
    }
    if (class->unstamped_bytes + bytes <= limit) {
        return mine <= limit - class->unstamped_bytes;
    }
    return !waits && class->unstamped_bytes / 2 <= limit;
}

static void flow_schedule_late(struct flow_shaper *, struct flow_queue *,
                               uint64_t since_ns, uint64_t now_ns);

/* Puts 'q', which is in no list and not in the wheel, where it belongs at
 * 'now_ns'.  Its previous packet, if there was one, was due at 'since_ns'. */
static inline void
flow_schedule_head(struct flow_shaper *s, struct flow_queue *q,
                   uint64_t since_ns, uint64_t now_ns)
{
    if (OVS_UNLIKELY(q->key.late)) {
        flow_schedule_late(s, q, since_ns, now_ns);
    } else {
        flow_schedule(s, q, flow_head(q)->edt_ns, now_ns);
    }
}

/* Takes packets off the budgets and totals as they leave. */
static inline void
held_uncount(struct flow_shaper *s, struct flow_queue *q,
             const struct held_packet *held)
{
    s->n_held--;
    s->held_bytes -= held_bytes(held);
    if (!held_is_stamped(held)) {
        s->n_unstamped--;
        flow_class(s, q)->unstamped_bytes -= held_bytes(held);
        q->n_bytes -= held_bytes(held);
    }
    if (s->thread) {
        shaper_thread_uncount(s->thread, held_pool(held), held->source, 1,
                              held_bytes(held));
        shaper_thread_uncount_meter(s->thread, q->first_meter, 1);
    }
}

static void
publish_gauges(struct flow_shaper *s)
{
    atomic_store_relaxed(&s->counters[SHAPER_BACKLOG], s->n_held);
    atomic_store_relaxed(&s->counters[SHAPER_BACKLOG_BYTES], s->held_bytes);
    atomic_store_relaxed(&s->counters[SHAPER_FLOWS], s->n_flows);
}

static void
count_drop(struct flow_shaper *s, struct shaper_class *class,
           enum shaper_counter cause)
{
    counter_add(&s->counters[cause], 1);
    counter_add(&class->drops, 1);

    if (cause == SHAPER_DROP_MAX_DELAY) {
        COVERAGE_INC(flowbundler_drop_max_delay);
    } else if (cause == SHAPER_DROP_BACKLOG) {
        COVERAGE_INC(flowbundler_drop_backlog);
    } else if (cause == SHAPER_DROP_BUDGET) {
        COVERAGE_INC(flowbundler_drop_budget);
    } else if (cause == SHAPER_DROP_FLOWS) {
        COVERAGE_INC(flowbundler_drop_flows);
    } else if (cause == SHAPER_DROP_EXPIRED) {
        COVERAGE_INC(flowbundler_drop_expired);
    } else if (cause == SHAPER_DROP_REMOVED) {
        COVERAGE_INC(flowbundler_drop_removed);
    } else {
        ovs_assert(cause == SHAPER_DROP_SEGMENT);
        COVERAGE_INC(flowbundler_drop_segment);
    }
}

/* Configuration and lifetime. */

/* Makes queue 'queue_id', below SHAPER_MAX_QUEUES, the class with index
 * 'class_idx' of 'config', which has no users yet. */
void
shaper_config_set_class(struct shaper_config *config, uint32_t queue_id,
                        size_t class_idx)
{
    if (queue_id >= config->n_queue_ids) {
        uint32_t n = MIN(MAX(queue_id + 1, 2 * config->n_queue_ids),
                         SHAPER_MAX_QUEUES);

        config->class_by_queue = xrealloc(config->class_by_queue,
                                          n * sizeof *config->class_by_queue);
        memset(&config->class_by_queue[config->n_queue_ids], 0,
               (n - config->n_queue_ids) * sizeof *config->class_by_queue);
        config->n_queue_ids = n;
    }
    config->class_by_queue[queue_id] = class_idx;
}

static int
compare_priorities(const void *a_, const void *b_)
{
    const uint32_t *a = a_, *b = b_;

    return *a < *b ? -1 : *a > *b;
}

/* Works out 'rank' of the classes of 'config', which has no users yet, from
 * their 'priority'. */
void
shaper_config_set_ranks(struct shaper_config *config)
{
    uint32_t *sorted = xcalloc(config->n_classes, sizeof *sorted);
    size_t n = 1;

    for (size_t i = 0; i < config->n_classes; i++) {
        sorted[i] = config->classes[i].priority;
    }
    qsort(sorted, config->n_classes, sizeof *sorted, compare_priorities);
    for (size_t i = 1; i < config->n_classes; i++) {
        if (sorted[i] != sorted[n - 1]) {
            sorted[n++] = sorted[i];
        }
    }
    n = MIN(n, SHAPER_RANKS);
    for (size_t i = 0; i < config->n_classes; i++) {
        struct shaper_class_config *cc = &config->classes[i];

        cc->rank = 0;
        while (cc->rank < n - 1 && sorted[cc->rank] < cc->priority) {
            cc->rank++;
        }
    }
    free(sorted);
}

/* Returns what a rate with 'params' (NULL: none) carries in 'max_delay_ns'. */
static uint64_t
params_limit_bytes(const struct edt_params *params, uint64_t max_delay_ns)
{
    return (params ? (double) params->limits.rate / 8e9 * max_delay_ns
            : UINT64_MAX);
}

/* Makes 'class' follow 'cc' in what can be changed while it is in use. */
static void
class_set_params(struct flow_shaper *s, struct shaper_class *class,
                 const struct shaper_class_config *cc)
{
    const struct shaper_config *config = s->config;
    uint64_t ns = config->max_delay_ns;

    if (class->rank != cc->rank) {
        class->rank = cc->rank;
        if (class->active) {
            ovs_list_remove(&class->active_node);
            class_push_back(s, class);
        }
    }
    class->params = cc->params;
    class->level = cc->params ? mltw_level(s->wheel, cc->params->gap_ns)
                              : 0;
    class->unstamped_limit
        = MAX(MIN(params_limit_bytes(cc->params, ns),
                  params_limit_bytes(config->port_params, ns)), EDT_MTU_BYTES);
}

static void
classes_init(struct flow_shaper *s, uint64_t now_ns)
{
    const struct shaper_config *config = s->config;

    s->n_classes = config->n_classes;
    s->classes = xzalloc_cacheline(s->n_classes * sizeof *s->classes);
    for (size_t i = 0; i < s->n_classes; i++) {
        const struct shaper_class_config *cc = &config->classes[i];
        struct shaper_class *class = &s->classes[i];

        class->node.type = NODE_CLASS;
        class->queue_id = cc->queue_id;
        class_set_params(s, class, cc);
        shaper_queue_init(&class->queue, cc->pace, now_ns);
        ovs_list_init(&class->ready);
        ovs_list_init(&class->had_turn);
    }
}

static void
classes_destroy(struct shaper_class *classes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        shaper_queue_destroy(&classes[i].queue);
    }
    free_cacheline(classes);
}

/* Returns a wheel that takes all FIFOs and queues that 's' has or may have. */
static struct mltw *
wheel_create(const struct flow_shaper *s, uint64_t now_ns)
{
    struct mltw_config config = s->config->wheel;

    config.max_entries = MAX(s->config->max_flows, s->n_flows)
                         + s->config->n_classes;
    return mltw_create(&config, now_ns);
}

static void
buckets_init(struct flow_shaper *s)
{
    uint32_t n = MAX(MIN(ROUND_UP_POW2(s->config->max_flows), 1u << 20), 64u);

    /* Pages that no FIFO falls into are never touched. */
    s->buckets = xcalloc(n, sizeof *s->buckets);
    s->max_buckets = n;
    s->n_buckets = 64;
    s->bucket_mask = s->n_buckets - 1;
}

static void line_update(struct flow_shaper *, uint64_t now_ns);

/* Creates a shaper of 'config', to which it takes a reference, for the thread
 * with 'thread' and on 'core_id'. */
struct flow_shaper *
flow_shaper_create(const struct shaper_config *config,
                   struct shaper_thread *thread, unsigned int core_id,
                   uint64_t now_ns)
{
    struct flow_shaper *s = xzalloc_cacheline(sizeof *s);

    shaper_flow_key_init();
    s->config = shaper_config_ref(config);
    s->thread = thread;
    s->chains = thread->chains;
    s->core_id = core_id;
    s->wheel = wheel_create(s, now_ns);
    for (size_t i = 0; i < SHAPER_RANKS; i++) {
        ovs_list_init(&s->active_classes[i]);
    }
    ovs_list_init(&s->blocked_classes);
    ovs_list_init(&s->sharing_classes);
    ovs_list_init(&s->ahead_ready);
    ovs_list_init(&s->idle_flows);
    buckets_init(s);
    classes_init(s, now_ns);
    atomic_init(&s->counters[SHAPER_NEXT_DUE_NS], UINT64_MAX);
    line_update(s, now_ns);
    return s;
}

/* Drops the first packet of 'q' and counts that. */
static void
flow_drop_head(struct flow_shaper *s, struct flow_queue *q,
               enum shaper_counter cause)
{
    struct held_packet held = *flow_head(q);

    flow_pop(s, q);
    held_uncount(s, q, &held);
    if (q->key.late) {
        q->n_bytes -= held_bytes(&held);
        q->turn_bytes = 0;
        q->in_turn = false;
        q->n_line -= q->n_line != 0;
    }
    count_drop(s, flow_class(s, q), cause);
    dp_packet_delete(held.packet);
}

static void flow_becomes_idle(struct flow_shaper *, struct flow_queue *,
                              uint64_t now_ns);

/* Fills in the packets of 'q' that are to leave next at 'now_ns': as many as
 * an MTU has room for, and at least one. */
static void
turn_init(const struct flow_queue *q, struct edt_turn *turn, uint64_t now_ns)
{
    const struct packet_chunk *c = q->head;
    const struct held_packet *head = flow_head(q);
    int i = q->head_idx;

    turn->first_meter = q->late_meters[0];
    turn->last_meter = q->late_meters[1];
    turn->late = q->key.late;
    turn->tentative = false;
    turn->gap_ns = q->gap_ns;
    turn->arrival_ns = head->edt_ns;
    turn->first_bytes = turn->n_bytes = held_bytes(head);
    for (turn->n_packets = 1; turn->n_packets < q->n_packets;
         turn->n_packets++) {
        if (++i == CHUNK_PACKETS) {
            c = c->next;
            i = 0;
        }
        if (c->held[i].edt_ns > now_ns
            || turn->n_bytes + held_bytes(&c->held[i]) > EDT_MTU_BYTES) {
            break;
        }
        turn->n_bytes += held_bytes(&c->held[i]);
    }
}

/* Reserves time for all packets of 'q', whose meters have granted 'turn' but
 * are not fair any more, if they need not wait for too long: as if they had
 * been in one line with others before packets come that are. */
static void
flow_line_up(struct flow_shaper *s, struct flow_queue *q,
             struct edt_turn *turn, struct edt_grant *grant, uint64_t now_ns)
{
    const uint32_t max = MIN(q->n_packets, MAX_LINE);
    uint32_t turn_bytes = grant->n_bytes;
    struct packet_chunk *c = q->head;
    int i = q->head_idx;

    turn->n_packets = 1;
    turn->tentative = true;
    for (q->n_line = 0; q->n_line < max; q->n_line++) {
        if (i == CHUNK_PACKETS) {
            c = c->next;
            i = 0;
        }

        struct held_packet *held = &c->held[i++];

        if (turn_bytes >= held_bytes(held)) {
            turn_bytes -= held_bytes(held);
        } else {
            turn->first_bytes = turn->n_bytes = held_bytes(held);
            turn->arrival_ns = held->edt_ns;
            turn->since_ns = MAX(turn->since_ns, held->edt_ns);
            if (held->edt_ns > now_ns
                || !edt_late_reserve(&s->thread->meters, turn, grant)) {
                break;
            }
        }
        held->edt_ns = grant->edt_ns;
    }
}

/* Puts 'q', of which the meters reserve late, where it belongs.  If it has no
 * turn, its meters are asked for one; packets that would have to wait for
 * longer than these allow are dropped. */
static void
flow_schedule_late(struct flow_shaper *s, struct flow_queue *q,
                   uint64_t since_ns, uint64_t now_ns)
{
    for (int n_dropped = 0; q->n_packets; n_dropped++) {
        uint64_t edt_ns = flow_head(q)->edt_ns;
        struct edt_turn turn;
        struct edt_grant grant;

        if (q->turn_bytes || q->n_line || s->releasing) {
            flow_schedule(s, q, flow_head_edt(q), now_ns);
            if (q->state == FLOW_READY && q->in_turn && !flow_goes_ahead(q)
                && q->turn.state != SHAPER_TURN_READY) {
                /* The rest of its turn leaves before others have their
                 * next. */
                ovs_list_remove(&q->list_node);
                ovs_list_push_front(&flow_class(s, q)->ready, &q->list_node);
            }
            return;
        }
        if (edt_ns > now_ns || n_dropped == MAX_EXPIRED) {
            /* A meter that is not fair has set an EDT, or there is more to
             * drop: later. */
            flow_schedule(s, q, MAX(edt_ns, now_ns + 1), now_ns);
            return;
        }

        turn_init(q, &turn, now_ns);
        turn.since_ns = MAX(edt_ns, since_ns);
        if (turn.since_ns + MAX_CATCH_UP_NS < now_ns) {
            turn.since_ns = now_ns - MAX_CATCH_UP_NS;
        }
        if (edt_late_reserve(&s->thread->meters, &turn, &grant)) {
            q->in_turn = false;
            q->max_delay_ns = grant.max_delay_ns;
            q->ecn_threshold_ns = grant.ecn_threshold_ns;
            flow_set_gap(s, q, grant.gap_ns);
            if (OVS_LIKELY(grant.fair)) {
                q->turn_bytes = grant.n_bytes;
                q->turn_edt_ns = grant.edt_ns;
            } else {
                flow_line_up(s, q, &turn, &grant, now_ns);
            }
        } else {
            flow_drop_head(s, q, SHAPER_DROP_MAX_DELAY);
        }
    }
    flow_becomes_idle(s, q, now_ns);
}

/* May 'q' hold 'bytes' more bytes?  Not if the rate of its meters does not
 * carry that much in the time for which they let packets wait, even if no
 * other flow needed it. */
static bool
flow_may_hold(const struct flow_queue *q, uint32_t bytes)
{
    return (!q->n_bytes || q->max_delay_ns == UINT64_MAX
            || ((uint64_t) q->n_bytes + bytes) * q->gap_ns
               <= (q->max_delay_ns + q->gap_ns) * EDT_MTU_BYTES);
}

static void
flow_purge(struct flow_shaper *s, struct flow_queue *q)
{
    while (q->n_packets) {
        flow_drop_head(s, q, SHAPER_DROP_REMOVED);
    }
}

/* Destroys 's' (which may be NULL).  Packets that it holds are dropped. */
void
flow_shaper_destroy(struct flow_shaper *s)
{
    if (!s) {
        return;
    }

    for (size_t i = 0; s->n_held && i < s->n_buckets; i++) {
        for (struct flow_queue *q = s->buckets[i]; q; q = q->next) {
            flow_purge(s, q);
        }
    }
    flow_shaper_destroy(s->line);
    mltw_destroy(s->wheel);
    classes_destroy(s->classes, s->n_classes);
    slabs_destroy(&s->chunk_slabs);
    slabs_destroy(&s->flow_slabs);
    free(s->buckets);
    free_cacheline(s->busy_by_port);
    shaper_control_destroy(&s->control);
    shaper_config_unref(s->config);
    free_cacheline(s);
}

/* Calls 'cb' for each FIFO of 's', which 'cb' may free or move. */
static void
flows_for_each(struct flow_shaper *s,
               void (*cb)(struct flow_shaper *, struct flow_queue *, void *),
               void *aux)
{
    for (size_t i = 0; i < s->n_buckets; i++) {
        struct flow_queue *next;

        for (struct flow_queue *q = s->buckets[i]; q; q = next) {
            next = q->next;
            cb(s, q, aux);
        }
    }
}

/* Takes each FIFO that holds packets out of the wheel and of the lists. */
static void
unschedule_all(struct flow_shaper *s)
{
    struct shaper_class *class;
    struct shaper_turn *turn;
    struct flow_queue *q;
    void *nodes[DUE_BURST];

    while (mltw_flush(s->wheel, nodes, ARRAY_SIZE(nodes))) {
        continue;
    }
    s->round_ns = 0;
    for (size_t i = 0; i < s->n_classes; i++) {
        class = &s->classes[i];
        class->waiting = class->active = false;
        LIST_FOR_EACH_POP (q, list_node, &class->ready) {
            q->state = FLOW_WAITING;
        }
        while ((turn = shaper_queue_clear_one(&class->queue))) {
            q = CONTAINER_OF(turn, struct flow_queue, turn);
            if (q->state == FLOW_READY) {
                q->state = FLOW_WAITING;
            }
        }
    }
    LIST_FOR_EACH_POP (q, list_node, &s->ahead_ready) {
        q->state = FLOW_WAITING;
    }
    for (size_t i = 0; i < SHAPER_RANKS; i++) {
        ovs_list_init(&s->active_classes[i]);
    }
    s->active_ranks = 0;
    s->n_active_classes = 0;
}

static void
reschedule_cb(struct flow_shaper *s, struct flow_queue *q, void *now_ns_)
{
    const uint64_t *now_ns = now_ns_;

    q->level = mltw_level(s->wheel, q->gap_ns);
    if (q->n_packets) {
        flow_schedule_head(s, q, *now_ns, *now_ns);
    }
}

static void
reclass_cb(struct flow_shaper *s, struct flow_queue *q, void *aux OVS_UNUSED)
{
    struct shaper_class *class;

    q->class_idx = shaper_config_class(s->config, q->key.queue_id);
    class = flow_class(s, q);
    class->n_unstamped_flows += q->n_packets && flow_is_unstamped(q);
    for (struct packet_chunk *c = q->n_packets ? q->head : NULL; c;
         c = c == q->tail ? NULL : c->next) {
        int end = c == q->tail ? q->tail_idx : CHUNK_PACKETS;

        for (int i = c == q->head ? q->head_idx : 0; i < end; i++) {
            if (!held_is_stamped(&c->held[i])) {
                class->unstamped_bytes += held_bytes(&c->held[i]);
            }
        }
    }
}

static void
rehash_cb(struct flow_shaper *s, struct flow_queue *q, void *aux OVS_UNUSED)
{
    s->n_flows--;               /* flow_insert() counts it again. */
    flow_insert(s, q);
}

static void end_round(struct flow_shaper *);

/* Makes 's' follow 'config' if it differs from the current one only in what
 * can be changed without moving FIFOs: rates, most often.  Returns false if it
 * has changed nothing. */
static bool
config_update_in_place(struct flow_shaper *s,
                       const struct shaper_config *config)
{
    struct shaper_config *old = s->config;

    if (!mltw_config_equal(&old->wheel, &config->wheel)
        || old->max_flows != config->max_flows
        || old->n_classes != config->n_classes) {
        return false;
    }
    for (size_t i = 0; i < s->n_classes; i++) {
        if (old->classes[i].queue_id != config->classes[i].queue_id
            || old->classes[i].pace != config->classes[i].pace) {
            return false;
        }
    }

    if (s->round_ns) {
        end_round(s);
    }
    s->config = shaper_config_ref(config);
    for (size_t i = 0; i < s->n_classes; i++) {
        class_set_params(s, &s->classes[i], &config->classes[i]);
    }
    shaper_config_unref(old);
    return true;
}

/* Makes 's' follow 'config', which differs from what it follows unless it is
 * closing. */
static void
shaper_follow(struct flow_shaper *s, const struct shaper_config *config,
              uint64_t now_ns)
{
    struct shaper_config *old = s->config;
    struct shaper_class *old_classes = s->classes;
    size_t n_old_classes = s->n_classes;

    /* What has been released has to wait again. */
    bool released = s->releasing;

    s->closing = s->releasing = false;
    if (!released && config_update_in_place(s, config)) {
        return;
    }

    unschedule_all(s);
    s->config = shaper_config_ref(config);
    mltw_destroy(s->wheel);
    s->wheel = wheel_create(s, now_ns);

    ovs_list_init(&s->sharing_classes);
    classes_init(s, now_ns);
    for (size_t i = 0; i < s->n_classes; i++) {
        struct shaper_class *class = &s->classes[i];

        for (size_t j = 0; j < n_old_classes; j++) {
            if (old_classes[j].queue_id == class->queue_id) {
                counter_add(&class->tx_packets,
                            counter_get(&old_classes[j].tx_packets));
                counter_add(&class->tx_bytes,
                            counter_get(&old_classes[j].tx_bytes));
                counter_add(&class->drops,
                            counter_get(&old_classes[j].drops));
            }
        }
    }

    if (config->max_flows != old->max_flows) {
        struct flow_queue **buckets = s->buckets;
        uint32_t n = s->n_buckets;

        buckets_init(s);
        for (size_t i = 0; i < n; i++) {
            struct flow_queue *next;

            for (struct flow_queue *q = buckets[i]; q; q = next) {
                next = q->next;
                rehash_cb(s, q, NULL);
            }
        }
        free(buckets);
    }

    flows_for_each(s, reclass_cb, NULL);
    flows_for_each(s, reschedule_cb, &now_ns);

    classes_destroy(old_classes, n_old_classes);
    shaper_config_unref(old);
}

/* Makes 's' follow 'config', to which it takes a reference.  Packets held stay
 * held, in their order and with their EDTs, and what is in the delay line
 * keeps the time at which it will leave.  Takes time in proportion to the
 * FIFOs that exist. */
void
flow_shaper_set_config(struct flow_shaper *s,
                       const struct shaper_config *config, uint64_t now_ns)
{
    if (config != s->config || s->closing) {
        shaper_follow(s, config, now_ns);
        line_update(s, now_ns);
    }
}

/* The delay line. */

/* Returns a configuration for the delay line of a shaper with 'config', owned
 * by the caller. */
static struct shaper_config *
line_config_create(const struct shaper_config *config)
{
    struct shaper_config *line = xzalloc(sizeof *line);

    ovs_refcount_init(&line->ref_cnt);
    line->wheel = config->wheel;
    line->max_delay_ns = config->max_delay_ns;
    line->ecn_threshold_ns = UINT64_MAX;
    line->max_backlog = UINT32_MAX;
    line->max_batch = config->max_batch;
    line->max_flows = config->max_flows;
    line->is_line = true;
    line->n_classes = 1;
    line->classes = xzalloc(sizeof *line->classes);
    return line;
}

/* Gives 's' a delay line if its configuration says so, and makes one that
 * exists follow it.  A line stays, for what is in it, and is passed by when it
 * is empty and there is no delay any more. */
static void
line_update(struct flow_shaper *s, uint64_t now_ns)
{
    if (s->line || s->config->delay.delay_ns) {
        struct shaper_config *config = line_config_create(s->config);

        if (s->line) {
            flow_shaper_set_config(s->line, config, now_ns);
        } else {
            s->line = flow_shaper_create(config, s->thread, s->core_id,
                                         now_ns);
        }
        shaper_config_unref(config);
    }
}

/* Returns the delay line of 's' if packets have to pass it, otherwise NULL. */
static inline struct flow_shaper *
shaper_line(const struct flow_shaper *s)
{
    return (OVS_UNLIKELY(s->line)
            && (s->line->n_held || (s->config->delay.delay_ns && !s->closing))
            ? s->line : NULL);
}

/* Returns the number of packets that 's' holds, those in its delay line
 * included. */
static inline uint32_t
shaper_n_held(const struct flow_shaper *s)
{
    return s->n_held + (OVS_UNLIKELY(s->line) ? s->line->n_held : 0);
}

/* Puts 'packet', received at 'source', that has passed all but the delay line
 * of 's' and could leave at 'when_ns', into the line. */
static void
line_put(struct flow_shaper *s, struct dp_packet *packet,
         struct shaper_source source, uint64_t when_ns, uint64_t now_ns)
{
    struct edt_stamp *stamp = &packet->md.edt;

    if (!packet->md.edt_valid) {
        stamp->chain = EDT_CHAIN_NONE;
        stamp->gap_ns = 0;
        packet->md.edt_valid = true;
    }
    stamp->edt_ns = when_ns;
    stamp->flags = 0;
    if (!s->closing) {
        stamp->edt_ns += shaper_delay_ns(&s->config->delay, packet, when_ns);
    }

    /* What is on its way is no reason to hold back who has sent it. */
    source.rxq = SHAPER_NO_RXQ;
    flow_shaper_put(s->line, packet, source, now_ns);
}

/* Returns true if the delay line of 's' may take 'packet', received at
 * 'source', directly; otherwise stores in '*cause' why not.  Meters have asked
 * for room for packets that have a time. */
static bool
line_has_room(const struct flow_shaper *s, const struct dp_packet *packet,
              struct shaper_source source, enum shaper_counter *cause)
{
    if (shaper_n_held(s) >= s->config->max_backlog) {
        *cause = SHAPER_DROP_BACKLOG;
        return false;
    }
    if (!packet->md.edt_valid
        && !shaper_thread_room(s->thread,
                               shaper_thread_pool(s->thread, packet),
                               source.port)) {
        *cause = SHAPER_DROP_BUDGET;
        return false;
    }
    return true;
}

/* A packet of a burst that a meter lets go at once has an EDT before its
 * arrival.  Its delay begins when it is there. */
static void
line_clamp_edt(struct dp_packet *packet, uint64_t now_ns)
{
    if (packet->md.edt_valid && packet->md.edt.edt_ns < now_ns) {
        packet->md.edt.edt_ns = now_ns;
    }
}

/* Arriving packets. */

/* What there is to know about a packet that is offered. */
struct arrival {
    struct shaper_flow_key key;     /* If 'may_wait'. */
    uint32_t hash;                  /* If 'may_wait'. */
    uint16_t class_idx;
    bool may_wait;                  /* Can it not pass without a look at its
                                     * FIFO? */
    bool must_wait;                 /* Does it have to wait in any case (unless
                                     * the shaper is closing)? */
    bool goes_ahead;                /* Of rates that others wait for? */
};

/* Puts 'packet', received at 'source', at the end of 'q', with 'edt_ns' and
 * 'info' (see held_info()).  The caller has counted it, or will. */
static inline void ALWAYS_INLINE
flow_append(struct flow_shaper *s, struct flow_queue *q,
            struct dp_packet *packet, struct shaper_source source,
            uint64_t edt_ns, uint32_t info, uint64_t now_ns)
{
    struct held_packet *held = flow_push(s, q);

    held->packet = packet;
    held->edt_ns = edt_ns;
    held->source = source;
    held->info = info;
    shaper_thread_count_meter(s->thread, q->first_meter, 1);
    if (q->state == FLOW_IDLE) {
        flow_becomes_busy(s, q, source.port);
        flow_schedule_head(s, q, edt_ns, now_ns);
    }
}

/* Holds 'packet', which was received at 'source' and is that of 'a' or a part
 * of it, until 'edt_ns', taking ownership, or drops it and counts that.  'q'
 * is its FIFO if it exists.  Returns its FIFO if it holds it. */
static inline struct flow_queue * ALWAYS_INLINE
shaper_hold(struct flow_shaper *s, const struct arrival *a,
            struct dp_packet *packet, struct shaper_source source,
            uint64_t edt_ns, bool stamped, struct flow_queue *q,
            uint64_t now_ns)
{
    struct shaper_class *class = &s->classes[a->class_idx];
    uint32_t bytes = dp_packet_size(packet);
    enum shaper_counter cause;

    if (OVS_UNLIKELY(packet->source == DPBUF_AFXDP)) {
        /* The frames of an AF_XDP socket are too few to be held. */
        struct dp_packet *copy = dp_packet_clone(packet);

        dp_packet_delete(packet);
        packet = copy;
    }

    uint8_t pool = shaper_thread_pool(s->thread, packet);
    /* Fair meters do not ask for room: they give no time before a packet is to
     * leave. */
    bool admitted = stamped && packet->md.edt.flags & EDT_PROMISED;

    if (OVS_UNLIKELY(s->config->is_line) && q && q->n_packets) {
        /* In order, and so not before its predecessor. */
        edt_ns = MAX(edt_ns, q->tail->held[q->tail_idx - 1].edt_ns);
    }
    if (OVS_UNLIKELY(!stamped && !class_has_room(class, q, bytes))) {
        cause = SHAPER_DROP_MAX_DELAY;
    } else if (OVS_UNLIKELY(shaper_n_held(s) >= s->config->max_backlog)) {
        cause = SHAPER_DROP_BACKLOG;
    } else if (OVS_UNLIKELY(!(admitted
                              ? shaper_thread_admitted_room(s->thread, pool)
                              : shaper_thread_room(s->thread, pool,
                                                   source.port)))
               && !s->config->is_line) {
        cause = SHAPER_DROP_BUDGET;
    } else if ((!q || !q->n_packets) && !flows_have_room(s, source.port)) {
        cause = SHAPER_DROP_FLOWS;
    } else if (!q && !(q = flow_create(s, &a->key, a->hash, a->class_idx))) {
        cause = SHAPER_DROP_FLOWS;
    } else if (OVS_UNLIKELY(q->key.late) && !flow_may_hold(q, bytes)) {
        cause = SHAPER_DROP_MAX_DELAY;
        edt_late_count_drop(&s->thread->meters,
                            q->late_meters[0], bytes);
    } else {
        if (!s->n_held) {
            /* Nothing was polled for while nothing was held. */
            void *node;

            mltw_dequeue(s->wheel, now_ns, &node, 1);
        }

        shaper_thread_count(s->thread, pool, source, 1, bytes);
        s->n_held++;
        s->held_bytes += bytes;
        if (!stamped) {
            s->n_unstamped++;
            class->unstamped_bytes += bytes;
            q->n_bytes += bytes;
        } else if (OVS_LIKELY(!q->key.late)) {
            flow_set_gap(s, q, packet->md.edt.gap_ns);
        } else {
            q->n_bytes += bytes;
        }

        flow_append(s, q, packet, source, edt_ns,
                    held_info(bytes, packet->source, pool, stamped), now_ns);
        return q;
    }

    count_drop(s, class, cause);
    dp_packet_delete(packet);
    return NULL;
}

/* Returns true if there is room for at least one of the segments, 'n_segs', of
 * 'packet', that of 'a', which 'source' has received and of which the FIFO is
 * 'q', if it exists; otherwise stores in '*cause' why not.  To be asked before
 * they are made. */
static bool
segments_have_room(const struct flow_shaper *s, const struct dp_packet *packet,
                   uint32_t n_segs, struct shaper_source source,
                   const struct flow_queue *q, enum shaper_counter *cause)
{
    uint8_t heap = shaper_thread_heap(s->thread);

    if (!n_segs || n_segs > MAX_SEGMENTS
        || s->n_cut + n_segs > EDT_STAMP_MAX_SEGMENTS) {
        *cause = SHAPER_DROP_SEGMENT;
    } else if (shaper_n_held(s) >= s->config->max_backlog) {
        *cause = SHAPER_DROP_BACKLOG;
    } else if (!(packet->md.edt.flags & EDT_PROMISED
                 ? shaper_thread_admitted_room(s->thread, heap)
                 : shaper_thread_room(s->thread, heap, source.port))) {
        *cause = SHAPER_DROP_BUDGET;
    } else if ((!q || !q->n_packets) && !flows_have_room(s, source.port)) {
        *cause = SHAPER_DROP_FLOWS;
    } else {
        return true;
    }
    return false;
}

/* Replaces TSO packet 'packet' by its segments, which depart one after the
 * other at the rate of the packet's meter. */
static void
shaper_hold_segments(struct flow_shaper *s, const struct arrival *a,
                     struct dp_packet *packet, struct shaper_source source,
                     struct flow_queue *q, uint64_t now_ns)
{
    const struct edt_stamp stamp = packet->md.edt;
    const uint32_t n_segs = edt_stamp_n_segments(packet);
    struct dp_packet_batch *batches;
    enum shaper_counter cause;
    uint64_t bytes_before = 0;
    size_t n_batches;

    if (!segments_have_room(s, packet, n_segs, source, q, &cause)) {
        count_drop(s, &s->classes[a->class_idx], cause);
        dp_packet_delete(packet);
        return;
    }

    s->n_cut += n_segs;
    batches = shaper_segment(packet, n_segs, &n_batches);
    for (size_t i = 0; i < n_batches; i++) {
        struct dp_packet *seg;

        DP_PACKET_BATCH_FOR_EACH (j, seg, &batches[i]) {
            uint64_t edt_ns = stamp.edt_ns;

            if (!(stamp.flags & EDT_LATE)) {
                edt_ns += bytes_before * stamp.gap_ns / EDT_MTU_BYTES;
            }

            pkt_metadata_init(&seg->md, ODPP_NONE);
            pkt_metadata_set_edt(&seg->md, &stamp);
            bytes_before += dp_packet_size(seg);
            shaper_hold(s, a, seg, source, edt_ns, true, q, now_ns);
            q = q ? q : flow_find(s, &a->key, a->hash);
        }
    }
    shaper_free_segments(batches, n_batches);
}

/* Holds 'packet', that of 'a', whose FIFO is 'q' if it exists.  Returns its
 * FIFO if that is known. */
static inline struct flow_queue *
arrival_hold(struct flow_shaper *s, const struct arrival *a,
             struct dp_packet *packet, struct shaper_source source,
             struct flow_queue *q, bool tso_enabled, uint64_t now_ns)
{
    const uint64_t edt_ns = pkt_metadata_edt_ns(&packet->md);

    if (OVS_UNLIKELY(tso_enabled) && edt_ns && shaper_is_tso(packet)) {
        shaper_hold_segments(s, a, packet, source, q, now_ns);
        return NULL;
    }
    return shaper_hold(s, a, packet, source, edt_ns ? edt_ns : now_ns,
                       edt_ns != 0, q, now_ns);
}

/* Fills '*key' with the identity of the FIFO for 'packet', which was received
 * at 'source'.  Senders who have no meters are told apart by their ports. */
static inline void
arrival_key(const struct dp_packet *packet, struct shaper_source source,
            struct shaper_flow_key *key)
{
    shaper_flow_key_extract(packet, key);
    if (key->chain == EDT_CHAIN_NONE) {
        key->port = source.port;
    }
}

/* May 'packet', which 'port' has received, go ahead of the rates of 's' and
 * 'class', since it is address resolution and not too much of that? */
static bool
resolution_goes_ahead(struct flow_shaper *s, const struct shaper_class *class,
                      const struct dp_packet *packet, uint16_t port,
                      uint64_t now_ns)
{
    uint32_t bytes = dp_packet_size(packet) + s->config->overhead_bytes;
    struct shaper_control_rate rates[2];
    size_t n = 0;

    if (s->config->port_params) {
        rates[n].params = s->config->port_params;
        rates[n++].all_ticks = &s->config->port_pace->ahead_ticks;
    }
    if (class->params) {
        rates[n].params = class->params;
        rates[n++].all_ticks = &class->queue.share.class->ahead_ticks;
    }
    return !n || shaper_control_admit(&s->control, rates, n, port, bytes,
                                      now_ns);
}

/* Counts 'packets' packets of 'class' that go ahead, of 'bytes' bytes with
 * what is added to each. */
static void
class_count_ahead(struct flow_shaper *s, struct shaper_class *class,
                  uint32_t packets, uint32_t bytes)
{
    counter_add(&s->counters[SHAPER_AHEAD], packets);
    class_charge_ahead(s, class, bytes);
}

/* Looks at 'packet', received at 'source', and fills in '*a'. */
static inline void
arrival_init(struct flow_shaper *s, struct arrival *a,
             const struct dp_packet *packet, struct shaper_source source,
             bool tso_enabled, uint64_t now_ns)
{
    const uint64_t edt_ns = pkt_metadata_edt_ns(&packet->md);

    a->class_idx = shaper_config_class(s->config, packet->md.skb_priority);
    a->must_wait = edt_ns > now_ns || (edt_ns
                                         && packet->md.edt.flags & EDT_LATE);
    a->goes_ahead = false;
    if (s->config->paced) {
        const struct shaper_class *class = &s->classes[a->class_idx];

        if (shaper_queue_is_paced(&class->queue)) {
            a->goes_ahead = OVS_UNLIKELY(source.port == SHAPER_NO_SOURCE)
                            || (shaper_control_is_resolution(packet)
                                && resolution_goes_ahead(s, class, packet,
                                                         source.port,
                                                         now_ns));
            a->must_wait |= !a->goes_ahead;
        }
    }
    if (OVS_UNLIKELY(tso_enabled) && edt_ns) {
        a->must_wait |= shaper_is_tso(packet);
    }

    /* Without a rate no packet that has no EDT begins to wait. */
    a->may_wait = edt_ns || (!a->goes_ahead
                             && (s->n_unstamped || s->config->paced));
    if (a->may_wait) {
        arrival_key(packet, source, &a->key);
        if (OVS_UNLIKELY(a->goes_ahead)) {
            a->key.addr_type |= SHAPER_ADDR_AHEAD;
        }
    }
}

/* Packets of a batch that wait, not yet part of any total, and how many more
 * may join them without a look at what limits them. */
struct bulk {
    uint32_t room;
    uint32_t n;
    uint64_t bytes;
    struct shaper_source source;    /* Of all of them. */
    const void *mempool;            /* NULL: the heap. */
    uint8_t pool;                   /* In struct shaper_thread. */
};

/* Begins a bulk of packets like the first of 'batch', which is not empty. */
static inline void
bulk_init(const struct flow_shaper *s, struct bulk *bulk,
          const struct dp_packet_batch *batch,
          const struct shaper_source *sources)
{
    const struct dp_packet *first = batch->packets[0];
    uint32_t n_held = shaper_n_held(s);
    uint32_t backlog_room = n_held < s->config->max_backlog
                            ? s->config->max_backlog - n_held : 0;

    bulk->n = 0;
    bulk->bytes = 0;
    bulk->source = sources[0];
    bulk->mempool = shaper_packet_mempool(first);
    bulk->pool = shaper_thread_pool(s->thread, first);
    bulk->room = MIN(backlog_room,
                     shaper_thread_admitted_room(s->thread, bulk->pool));
}

/* Makes the packets of 'bulk' part of the totals. */
static inline void
bulk_end(struct flow_shaper *s, struct bulk *bulk)
{
    if (bulk->n) {
        shaper_thread_count(s->thread, bulk->pool, bulk->source, bulk->n,
                            bulk->bytes);
        s->n_held += bulk->n;
        s->held_bytes += bulk->bytes;
        bulk->room -= bulk->n;
        bulk->n = 0;
        bulk->bytes = 0;
    }
}

/* Holds 'packet' with an EDT, received at 'source', in 'q' if that needs no
 * closer look: what arrival_hold() does for most packets. */
static inline bool
bulk_hold(struct flow_shaper *s, struct bulk *bulk, struct flow_queue *q,
          struct dp_packet *packet, struct shaper_source source,
          uint64_t now_ns)
{
    const struct edt_stamp *stamp = &packet->md.edt;

    if (OVS_UNLIKELY(bulk->n >= bulk->room || packet->source == DPBUF_AFXDP
                     || stamp->flags & EDT_LATE
                     || shaper_packet_mempool(packet) != bulk->mempool
                     || source.port != bulk->source.port
                     || source.rxq != bulk->source.rxq
                     || (!q->n_packets
                         && !flows_have_room(s, source.port)))) {
        return false;
    }

    uint32_t bytes = dp_packet_size(packet);

    bulk->n++;
    bulk->bytes += bytes;
    flow_set_gap(s, q, stamp->gap_ns);
    flow_append(s, q, packet, source, stamp->edt_ns,
                held_info(bytes, packet->source, bulk->pool, true), now_ns);
    return true;
}

/* Offers the packets of 'batch' to 's' at 'now_ns'.  'sources[i]' says where
 * packet i was received (if no port did, the packet waits only for its EDT, if
 * it has one).  Those that may leave now stay in 'batch', in their order; 's'
 * takes the others, or drops and counts them.  Returns a bitmap of those that
 * stay. */
uint32_t
flow_shaper_enqueue(struct flow_shaper *s, struct dp_packet_batch *batch,
                    const struct shaper_source *sources, uint64_t now_ns)
{
    const size_t size = dp_packet_batch_size(batch);
    const bool tso_enabled = userspace_tso_enabled();
    struct flow_shaper *line = shaper_line(s);
    struct arrival arrivals[NETDEV_MAX_BURST];
    const struct arrival *prev = NULL;
    struct flow_queue *q = NULL;
    struct dp_packet *packet;
    struct bulk bulk;
    uint32_t same = 0;
    uint64_t bytes = 0;
    uint32_t kept = 0;
    uint32_t n_line = 0;
    uint32_t n_ahead = 0, ahead_bytes = 0;
    uint16_t ahead_class = 0;
    size_t i;

    BUILD_ASSERT_DECL(NETDEV_MAX_BURST <= 32);

    if (!size) {
        return 0;
    }

    s->n_cut = 0;

    /* In passes, so that the cache misses of different flows overlap.  'same'
     * tells the packets that come right after another one of their flow. */
    DP_PACKET_BATCH_FOR_EACH (j, packet, batch) {
        struct arrival *a = &arrivals[j];

        if (OVS_UNLIKELY(line)) {
            line_clamp_edt(packet, now_ns);
        }
        arrival_init(s, a, packet, sources[j], tso_enabled, now_ns);
        if (a->may_wait) {
            if (prev && shaper_flow_key_equal(&prev->key, &a->key)) {
                same |= UINT32_C(1) << j;
                a->hash = prev->hash;
            } else {
                a->hash = shaper_flow_key_hash(&a->key);
                OVS_PREFETCH(bucket(s, a->hash));
            }
            prev = a;
        } else {
            prev = NULL;
        }
    }
    for (i = 0; i < size; i++) {
        const struct arrival *a = &arrivals[i];

        if (a->may_wait && !(same & UINT32_C(1) << i)) {
            q = *bucket(s, a->hash);
            if (OVS_LIKELY(q)) {
                OVS_PREFETCH(&q->state);
                OVS_PREFETCH(&q->key);
            }
        }
    }

    q = NULL;
    bulk_init(s, &bulk, batch, sources);
    DP_PACKET_BATCH_REFILL_FOR_EACH (i, size, packet, batch) {
        const struct arrival *a = &arrivals[i];

        /* While nothing waits, only what must wait needs a FIFO. */
        if (a->must_wait || (a->may_wait && (s->n_held || bulk.n))) {
            if (!q || !(same & UINT32_C(1) << i)) {
                q = flow_find(s, &a->key, a->hash);
            }
            if ((q && q->n_packets) || (a->must_wait && !s->closing)) {
                if (OVS_UNLIKELY(!q || !s->n_held || tso_enabled
                                 || !packet->md.edt_valid
                                 || !bulk_hold(s, &bulk, q, packet, sources[i],
                                               now_ns))) {
                    bulk_end(s, &bulk);
                    bulk.room -= bulk.room > 0;
                    q = arrival_hold(s, a, packet, sources[i], q, tso_enabled,
                                     now_ns);
                }
                continue;
            }
        }
        q = NULL;

        struct shaper_class *class = &s->classes[a->class_idx];
        uint32_t len = dp_packet_size(packet);
        enum shaper_counter cause;

        if (OVS_UNLIKELY(line)
            && !line_has_room(s, packet, sources[i], &cause)) {
            count_drop(s, class, cause);
            dp_packet_delete(packet);
            continue;
        }
        if (OVS_UNLIKELY(a->goes_ahead)) {
            if (ahead_class != a->class_idx) {
                class_count_ahead(s, &s->classes[ahead_class], n_ahead,
                                  ahead_bytes);
                ahead_class = a->class_idx;
                n_ahead = ahead_bytes = 0;
            }
            n_ahead++;
            ahead_bytes += len + s->config->overhead_bytes;
        }
        bytes += len;
        counter_add(&class->tx_packets, 1);
        counter_add(&class->tx_bytes, len);
        if (OVS_UNLIKELY(line)) {
            bulk.room -= bulk.room > 0;
            n_line++;
            line_put(s, packet, sources[i], now_ns, now_ns);
        } else {
            kept |= UINT32_C(1) << i;
            dp_packet_batch_add(batch, packet);
        }
    }
    bulk_end(s, &bulk);
    if (OVS_UNLIKELY(n_ahead)) {
        class_count_ahead(s, &s->classes[ahead_class], n_ahead, ahead_bytes);
    }
    counter_add(&s->counters[SHAPER_BYPASSED],
                dp_packet_batch_size(batch) + n_line);
    counter_add(&s->counters[SHAPER_BYPASSED_BYTES], bytes);
    publish_gauges(s);
    return kept;
}

/* Takes 'packet', received at 'source', to be sent when it is due, or drops
 * and counts it. */
void
flow_shaper_put(struct flow_shaper *s, struct dp_packet *packet,
                struct shaper_source source, uint64_t now_ns)
{
    /* What is delayed leaves as it would have left without that. */
    const bool tso_enabled = userspace_tso_enabled() && !s->config->is_line;
    struct arrival a;

    if (OVS_UNLIKELY(shaper_line(s))) {
        line_clamp_edt(packet, now_ns);
    }
    s->n_cut = 0;
    arrival_init(s, &a, packet, source, tso_enabled, now_ns);
    if (!a.may_wait) {
        arrival_key(packet, source, &a.key);
    }
    a.hash = shaper_flow_key_hash(&a.key);
    arrival_hold(s, &a, packet, source, flow_find(s, &a.key, a.hash),
                 tso_enabled, now_ns);
    publish_gauges(s);
}

/* Departing packets. */

static unsigned int
histogram_bin(uint64_t value, unsigned int n_bins)
{
    unsigned int bin = value ? log_2_floor(value) : 0;

    return MIN(bin, n_bins - 1);
}

static void
flow_becomes_idle(struct flow_shaper *s, struct flow_queue *q,
                  uint64_t now_ns)
{
    q->state = FLOW_IDLE;
    q->idle_since_ns = now_ns;
    s->n_busy--;
    s->busy_by_port[q->port]--;
    if (flow_is_unstamped(q)) {
        flow_class(s, q)->n_unstamped_flows--;
    }
    ovs_list_push_back(&s->idle_flows, &q->list_node);
}

/* Frees some of the FIFOs that have been empty for long. */
static void
reap_idle_flows(struct flow_shaper *s, uint64_t now_ns)
{
    for (int i = 0; i < FLOW_REAP_MAX && !ovs_list_is_empty(&s->idle_flows);
         i++) {
        struct flow_queue *q = CONTAINER_OF(ovs_list_front(&s->idle_flows),
                                            struct flow_queue, list_node);

        if (now_ns - q->idle_since_ns < FLOW_IDLE_NS
            || q->turn.state != SHAPER_TURN_NONE) {
            break;
        }
        flow_free(s, q);
    }
}

/* Has 'q', which the wheel had due, yet to ask its meters? */
static inline bool
flow_lacks_turn(const struct flow_shaper *s, const struct flow_queue *q)
{
    return OVS_UNLIKELY(q->key.late) && !q->turn_bytes && !q->n_line
           && !s->releasing;
}

/* Makes 'q', which the wheel had due at 'now_ns', ready if it is. */
static inline void
flow_is_due(struct flow_shaper *s, struct flow_queue *q, uint64_t now_ns)
{
    if (flow_lacks_turn(s, q)) {
        flow_schedule_late(s, q, flow_head(q)->edt_ns, now_ns);
    } else {
        flow_set_ready(s, q, now_ns);
    }
}

/* Moves what the wheel has due to the ready lists. */
static size_t
take_due(struct flow_shaper *s, uint64_t now_ns)
{
    void *nodes[DUE_BURST];
    size_t n = mltw_dequeue(s->wheel, now_ns, nodes, ARRAY_SIZE(nodes));

    for (size_t i = 0; i < n; i++) {
        struct shaper_node *node = nodes[i];

        if (node->type == NODE_FLOW) {
            flow_is_due(s, node_flow(node), now_ns);
        } else {
            struct shaper_class *class
                = CONTAINER_OF(node, struct shaper_class, node);

            class->waiting = false;
            if (class_has_ready(class)) {
                class_activate(s, class);
            }
        }
    }
    return n;
}

/* State of one call to flow_shaper_drain(). */
struct drain {
    struct dp_packet_batch *batch;
    uint64_t now_ns;
    bool has_share;                 /* Is this the main thread? */
    int64_t share_ticks;            /* Left of its share. */
    bool progress;                  /* Has anything been sent since classes
                                     * that may not send were asked? */
    uint64_t bytes;                 /* Sent in all. */
    int n_expired;
    bool full;
    bool tso;                       /* Are packets cut when they are sent? */

    struct shaper_source *sources;  /* Where each packet was received. */
    /* Not NULL if packets go on to the delay line: when each could leave. */
    uint64_t *departures;
    uint64_t pace_ns;               /* When port and queue allow the next. */

    /* The last packets, which have left their FIFO but are not yet taken off
     * any total: what they have in common, and how many they are. */
    struct shaper_class *class;
    struct shaper_source source;
    uint32_t kind;                  /* Pool and type, see held_kind(). */
    uint32_t n_run;
    uint32_t n_run_bytes;
};

/* Takes the run of packets in 'd' off the totals. */
static void
drain_end_run(struct flow_shaper *s, struct drain *d)
{
    if (d->n_run) {
        shaper_thread_uncount(s->thread, held_kind_pool(d->kind), d->source,
                              d->n_run, d->n_run_bytes);
        s->n_held -= d->n_run;
        s->held_bytes -= d->n_run_bytes;
        counter_add(&d->class->tx_packets, d->n_run);
        counter_add(&d->class->tx_bytes, d->n_run_bytes);
        d->bytes += d->n_run_bytes;
        d->n_run = 0;
        d->n_run_bytes = 0;
    }
}

/* Could the next packet of 'd', which is 'held', be sent in the same batch?
 * Devices expect all packets of a batch to have one type of buffer. */
static inline bool
drain_fits(const struct drain *d, const struct held_packet *held)
{
    return dp_packet_batch_is_empty(d->batch)
           || held_kind_type(d->kind) == held_type(held);
}

/* Tells the receiver of 'packet' that it has waited for too long. */
static void
mark_late(struct flow_shaper *s, struct dp_packet *packet)
{
    if (shaper_ecn_mark(packet) == SHAPER_ECN_SET) {
        counter_add(&s->counters[SHAPER_ECN_MARKED], 1);
        COVERAGE_INC(flowbundler_ecn_marked);
    }
}

/* Notes of a packet that is about to join the batch and had 'edt_ns' what the
 * delay line has to know.  Its delay begins when it could have left, which may
 * be before this poll, so that a poll that comes late counts once. */
static void
drain_to_line(const struct drain *d, uint64_t edt_ns)
{
    const size_t i = dp_packet_batch_size(d->batch);

    d->departures[i] = MIN(MAX(edt_ns, d->pace_ns), d->now_ns);
}

/* Sends the head of 'q', in 'class', which fits, and lets 'q' wait for its
 * next one. */
static inline void
drain_send(struct flow_shaper *s, struct flow_queue *q,
           struct shaper_class *class, struct drain *d)
{
    const struct held_packet *head = flow_head(q);
    struct dp_packet *packet = head->packet;
    uint32_t bytes = held_bytes(head);
    uint64_t edt_ns = flow_head_edt(q);
    uint64_t late_ns = d->now_ns > edt_ns ? d->now_ns - edt_ns : 0;

    if (OVS_UNLIKELY(d->kind != held_kind(head) || d->class != class
                     || d->source.port != head->source.port
                     || d->source.rxq != head->source.rxq)) {
        drain_end_run(s, d);
        d->kind = held_kind(head);
        d->class = class;
        d->source = head->source;
    }
    d->n_run++;
    d->n_run_bytes += bytes;

    if (OVS_LIKELY(held_is_stamped(head))) {
        unsigned int bin = histogram_bin(late_ns >> (SHAPER_LATENESS_SHIFT
                                                     - 1),
                                         SHAPER_LATENESS_BINS);

        counter_add(&s->lateness[bin], 1);
    } else {
        s->n_unstamped--;
        class->unstamped_bytes -= bytes;
        q->n_bytes -= bytes;
    }
    if (OVS_UNLIKELY(late_ns > s->config->ecn_threshold_ns
                     || (q->key.late && d->now_ns > head->edt_ns
                         && d->now_ns - head->edt_ns > q->ecn_threshold_ns))) {
        mark_late(s, packet);
    }
    counter_add(&q->tx_packets, 1);
    counter_add(&q->tx_bytes, bytes);
    shaper_thread_uncount_meter(s->thread, q->first_meter, 1);

    d->sources[dp_packet_batch_size(d->batch)] = head->source;
    if (OVS_UNLIKELY(d->departures)) {
        drain_to_line(d, MAX(edt_ns, head->edt_ns));
    }
    dp_packet_batch_add(d->batch, packet);
    d->full = dp_packet_batch_size(d->batch) == NETDEV_MAX_BURST;

    flow_pop(s, q);
    if (OVS_UNLIKELY(q->key.late)) {
        q->n_bytes -= bytes;
        q->turn_bytes -= MIN(bytes, q->turn_bytes);
        q->in_turn = q->turn_bytes != 0;
        q->n_line -= q->n_line != 0;
    }
    if (q->n_packets) {
        flow_schedule_head(s, q, edt_ns, d->now_ns);
    } else {
        flow_becomes_idle(s, q, d->now_ns);
    }
}

/* Sends what is left of the turn of 'q', of which the first packet has just
 * left, as long as it fits. */
static void
drain_send_turn(struct flow_shaper *s, struct flow_queue *q, struct drain *d)
{
    while (q->in_turn && q->state == FLOW_READY && !d->full
           && q->turn.state != SHAPER_TURN_READY
           && drain_fits(d, flow_head(q))) {
        ovs_list_remove(&q->list_node);
        drain_send(s, q, flow_class(s, q), d);
    }
}

/* Drops the packets at the head of 'q', the first ready FIFO, that have
 * expired.  Returns true if there were any: then 'q' may be ready, still
 * first, or not.  (If it had to wait for its next turn after each of them, a
 * FIFO that holds more than its turns allow would have nothing but expired
 * packets to send.) */
static bool
flow_expire(struct flow_shaper *s, struct flow_queue *q, struct drain *d)
{
    const uint64_t limit_ns = s->config->max_delay_ns + MAX_CATCH_UP_NS;

    if (OVS_LIKELY(!s->config->paced || s->releasing
                   || d->now_ns <= flow_head_edt(q) + limit_ns)) {
        return false;
    }

    do {
        flow_drop_head(s, q, SHAPER_DROP_EXPIRED);
        d->full = ++d->n_expired >= MAX_EXPIRED;
    } while (!d->full && q->n_packets && !q->key.late
             && d->now_ns > flow_head_edt(q) + limit_ns);

    if (!q->n_packets) {
        flow_take(s, q);
        flow_becomes_idle(s, q, d->now_ns);
    } else if (q->key.late || flow_head_edt(q) > d->now_ns) {
        flow_take(s, q);
        flow_schedule_head(s, q, d->now_ns, d->now_ns);
    }
    flow_rest(s, q);
    return true;
}

/* Returns the bytes of 'held' that count at port and queue: those of what it
 * will be on the wire, and what the configuration adds to each packet. */
static inline uint32_t
held_charged(const struct flow_shaper *s, const struct drain *d,
             const struct held_packet *held)
{
    struct edt_amount amount = { held_bytes(held), 1 };

    if (OVS_UNLIKELY(d->tso) && shaper_is_tso(held->packet)) {
        amount = edt_stamp_tso_amount(held->packet);
    }
    return amount.bytes + amount.packets * s->config->overhead_bytes;
}

/* Sends the head of the first ready FIFO of 'class', unless it has expired.
 * What counts at port and queue is charged to the FIFO or, if it goes 'ahead'
 * of the rate, to all.  Returns the bytes that count, 0 if none. */
static uint32_t
class_send_one(struct flow_shaper *s, struct shaper_class *class,
               bool ahead, struct drain *d)
{
    struct flow_queue *q = class_first(class);
    const struct held_packet *head;
    uint32_t charged;

    if (flow_expire(s, q, d)) {
        return 0;
    }
    head = flow_head(q);
    if (!drain_fits(d, head)) {
        d->full = true;
        return 0;
    }

    charged = held_charged(s, d, head);
    flow_take(s, q);
    if (OVS_UNLIKELY(ahead)) {
        class_charge_ahead(s, class, charged);
    } else if (q->turn.state == SHAPER_TURN_TAKEN) {
        shaper_queue_charge(&class->queue, &q->turn, charged);
    }
    drain_send(s, q, class, d);
    flow_rest(s, q);
    return charged;
}

/* Sends the heads that the wheel has due, one of each FIFO, in the order
 * of their times.  For when nothing but the batch's size limits what is sent.
 *
 * A FIFO of which the next packet is due, too, becomes ready.  So that it does
 * not have a second turn before others have one, a round that the batch's size
 * has cut short goes on in the next call. */
static void
drain_due(struct flow_shaper *s, struct drain *d)
{
    struct shaper_node *nodes[NETDEV_MAX_BURST];
    size_t room, n;

    s->round_ns = d->now_ns;
    do {
        room = NETDEV_MAX_BURST - dp_packet_batch_size(d->batch);
        n = mltw_dequeue(s->wheel, d->now_ns, (void **) nodes, room);

        for (size_t i = 0; i < n; i++) {
            held_prefetch(flow_head(node_flow(nodes[i])));
        }
        for (size_t i = 0; i < n; i++) {
            struct flow_queue *q = node_flow(nodes[i]);

            /* Full before all have sent: a FIFO sent several packets. */
            if (OVS_UNLIKELY(d->full || !drain_fits(d, flow_head(q)))) {
                d->full = true;
                for (; i < n; i++) {
                    flow_is_due(s, node_flow(nodes[i]), d->now_ns);
                }
                return;
            }
            if (flow_lacks_turn(s, q)) {
                flow_schedule_late(s, q, flow_head(q)->edt_ns, d->now_ns);
                continue;
            }
            drain_send(s, q, flow_class(s, q), d);
            if (OVS_UNLIKELY(q->key.late)) {
                drain_send_turn(s, q, d);
            }
        }
    } while (n == room && !d->full);
    if (n < room) {
        s->round_ns = 0;
    }
}

/* Stores in 'd' what is left of the main thread's share of rates.
 *
 * PMD threads poll all the time.  If they have packets for a port they use its
 * rate as soon as there is any, and the main thread would never find some
 * left.  So it need not: it may send at half of the rate in any case, which
 * the others make up for.  As they do for a late poll, its packets gain by
 * waiting, but not for longer than MAX_CATCH_UP_NS. */
static void
share_begin(struct flow_shaper *s, struct drain *d)
{
    int64_t max = s->n_kept ? MAX_CATCH_UP_NS << EDT_TICK_SHIFT : 0;
    int64_t left = (d->now_ns << EDT_TICK_SHIFT) - s->share_ticks;

    /* Ticks wrap around. */
    d->share_ticks = left < -(int64_t) EDT_STALE_TICKS ? 0 : MIN(left, max);
}

/* Notes in 'd' that 'bytes' bytes of 'class' leave.  What a port that was idle
 * has let pass beyond the share is not owed for long. */
static inline void
share_use(const struct flow_shaper *s, const struct shaper_class *class,
          struct drain *d, uint32_t bytes)
{
    const struct edt_params *port = s->config->port_params;
    uint64_t cost = port ? edt_cost(port, bytes) : 0;
    int64_t used;

    if (class->params) {
        cost = MAX(cost, edt_cost(class->params, bytes));
    }
    used = SHARE_PARTS * cost;
    d->share_ticks = MAX(d->share_ticks - used,
                         -MAX(used, (int64_t) (MAX_CATCH_UP_NS
                                               << EDT_TICK_SHIFT)));
}

/* Sends the heads of FIFOs that go ahead and are due. */
static void
ahead_send(struct flow_shaper *s, struct drain *d)
{
    d->pace_ns = 0;
    while (!d->full && !ovs_list_is_empty(&s->ahead_ready)) {
        struct flow_queue *q = CONTAINER_OF(ovs_list_front(&s->ahead_ready),
                                            struct flow_queue, list_node);
        struct shaper_class *class = flow_class(s, q);
        uint32_t bytes = held_bytes(flow_head(q)) + s->config->overhead_bytes;

        if (!drain_fits(d, flow_head(q))) {
            d->full = true;
            return;
        }
        ovs_list_remove(&q->list_node);
        drain_send(s, q, class, d);
        counter_add(&s->counters[SHAPER_AHEAD], 1);
        class_charge_ahead(s, class, bytes);
    }
}

/* Returns the first time, after 'now_ns', at which 'class', which may not send
 * now, is to be looked at again. */
static uint64_t
class_next_ns(const struct shaper_class *class, uint64_t now_ns)
{
    uint64_t next_ns = edt_share_next_ns(&class->queue.share, now_ns);

    return MAX(MIN(next_ns, now_ns + MAX_WAIT_NS), now_ns + 1);
}

/* Lets 'class' send, a packet of the FIFO that has had the least at a time,
 * for as long as its rate and the batch allow. */
static void
class_send(struct flow_shaper *s, struct shaper_class *class, struct drain *d)
{
    struct edt_share *share = &class->queue.share;
    const bool paced = class_is_paced(s, class);
    bool allowed = true;

    if (paced) {
        shaper_queue_poll(&class->queue, d->now_ns);
    }

    /* With several queues, each sends a few packets before the next, in
     * several drains if the rate does not allow them in one. */
    bool alone = s->n_active_classes == 1;
    for (; (alone || class->n_turns < CLASS_TURNS) && !d->full
           && class_has_ready(class); class->n_turns += !alone) {
        bool ahead = false;

        if (paced && !edt_share_may_send(share)) {
            allowed = ahead = d->share_ticks > 0;
            if (OVS_LIKELY(!allowed)) {
                break;
            }
        }
        if (OVS_UNLIKELY(d->departures)) {
            d->pace_ns = !paced ? 0 : d->now_ns - edt_share_lag_ns(share);
        }

        uint32_t bytes = class_send_one(s, class, ahead, d);

        d->progress = true;

        if (OVS_UNLIKELY(d->has_share) && paced) {
            share_use(s, class, d, bytes);
        }
    }

    if (!class_has_ready(class)) {
        class_deactivate(s, class);
        if (paced && edt_share_may_send(share)) {
            /* What it could have sent is for others, not for later.  (When
             * FIFOs have left, V may have reached the tags of the rest.) */
            shaper_queue_poll(&class->queue, d->now_ns);
            shaper_queue_poll(&class->queue, d->now_ns);
        }
    } else if (!allowed && s->n_active_classes <= MAX_POLLED_CLASSES) {
        ovs_list_remove(&class->active_node);
        ovs_list_push_back(&s->blocked_classes, &class->active_node);
    } else if (!allowed) {
        /* Wait in the wheel, which has room for all queues. */
        class->waiting = true;
        class_deactivate(s, class);
        ovs_assert(mltw_enqueue(s->wheel, &class->node,
                                class_next_ns(class, d->now_ns),
                                     class->level));
    } else if (class->n_turns >= CLASS_TURNS) {
        class->n_turns = 0;
        ovs_list_remove(&class->active_node);
        class_push_back(s, class);
    }
}

/* Puts the classes that could not send back among the active ones. */
static void
unblock_classes(struct flow_shaper *s)
{
    struct shaper_class *class;

    LIST_FOR_EACH_POP (class, active_node, &s->blocked_classes) {
        class_push_back(s, class);
    }
}

/* Brings the queues with rates up to 'now_ns', those that have something to
 * tell others, too. */
static void
classes_poll(struct flow_shaper *s, uint64_t now_ns)
{
    struct shaper_class *class;

    LIST_FOR_EACH_SAFE (class, sharing_node, &s->sharing_classes) {
        if (!shaper_queue_is_quiet(&class->queue)) {
            shaper_queue_poll(&class->queue, now_ns);
        }
        if (shaper_queue_is_quiet(&class->queue)) {
            class->sharing = false;
            ovs_list_remove(&class->sharing_node);
        }
    }
}

/* Makes FIFOs ready that have not had their turn in the unfinished round of
 * drain_due(), before those that had theirs. */
static void
end_round(struct flow_shaper *s)
{
    for (size_t i = 0; i < s->n_classes; i++) {
        ovs_list_push_back_all(&s->classes[i].had_turn, &s->classes[i].ready);
    }
    while (take_due(s, s->round_ns) == DUE_BURST) {
        continue;
    }
    for (size_t i = 0; i < s->n_classes; i++) {
        ovs_list_push_back_all(&s->classes[i].ready, &s->classes[i].had_turn);
    }
    s->round_ns = 0;
}

/* Makes all that 's' holds due. */
static void
release_all(struct flow_shaper *s, uint64_t now_ns)
{
    s->releasing = true;
    unschedule_all(s);
    flows_for_each(s, reschedule_cb, &now_ns);
}

/* Does what flow_shaper_drain() is to do, but for the delay line.  Stores in
 * 'sources[i]' where packet i was received and, if there is a delay line, in
 * 'departures[i]' when it could leave; otherwise 'departures' is NULL. */
static size_t
shaper_drain(struct flow_shaper *s, struct dp_packet_batch *batch,
             struct shaper_source *sources, uint64_t *departures,
             uint64_t now_ns)
{
    struct drain d = {
        .batch = batch,
        .now_ns = now_ns,
        .has_share = s->core_id == NON_PMD_CORE_ID && s->config->paced,
        .sources = sources,
        .departures = departures,
        .tso = userspace_tso_enabled(),
    };

    dp_packet_batch_refill_init(batch);
    batch->trunc = false;
    if (!ovs_list_is_empty(&s->sharing_classes)) {
        classes_poll(s, now_ns);
    }
    if (!s->n_held) {
        return 0;
    }

    if (OVS_UNLIKELY(s->closing && !s->releasing && now_ns >= s->release_ns)) {
        release_all(s, now_ns);
    }
    if (d.has_share) {
        share_begin(s, &d);
    }

    if (!SLOT_BY_SLOT(s)) {
        if (s->round_ns && s->round_ns != now_ns) {
            end_round(s);
        }
        if (s->round_ns
            || (!s->config->paced && !s->n_active_classes)) {
            drain_due(s, &d);
        } else {
            while (take_due(s, now_ns) == DUE_BURST) {
                continue;
            }
        }
    }
    while (!d.full) {
        if (OVS_UNLIKELY(!ovs_list_is_empty(&s->ahead_ready))) {
            ahead_send(s, &d);
            continue;
        }
        if (!s->n_active_classes) {
            if ((SLOT_BY_SLOT(s)
                 && !dp_packet_batch_is_empty(batch))
                || !take_due(s, now_ns)) {
                break;
            }
            continue;
        }

        struct shaper_class *class = first_class(s);

        if (class) {
            class_send(s, class, &d);
        } else if (d.progress) {
            /* What others have left may be for them. */
            d.progress = false;
            unblock_classes(s);
        } else {
            break;
        }
    }
    unblock_classes(s);

    drain_end_run(s, &d);
    if (d.has_share) {
        s->share_ticks = (now_ns << EDT_TICK_SHIFT) - d.share_ticks;
    }
    if (!dp_packet_batch_is_empty(batch)) {
        counter_add(&s->counters[SHAPER_SENT], dp_packet_batch_size(batch));
        counter_add(&s->counters[SHAPER_SENT_BYTES], d.bytes);
    }
    return dp_packet_batch_size(batch) + d.n_expired;
}

/* Lets what is due at 'now_ns' pass on to the delay line of 's', and takes
 * from that into 'batch' what has been delayed for long enough. */
static size_t
shaper_drain_line(struct flow_shaper *s, struct dp_packet_batch *batch,
                  uint64_t now_ns)
{
    uint64_t departures[NETDEV_MAX_BURST];
    struct dp_packet *packet;
    size_t n, n_line;

    n = shaper_drain(s, batch, s->drained, departures, now_ns);
    DP_PACKET_BATCH_FOR_EACH (i, packet, batch) {
        line_put(s, packet, s->drained[i], departures[i], now_ns);
    }
    n_line = shaper_drain(s->line, batch, s->drained, NULL, now_ns);
    return MAX(n, n_line);
}

/* Takes packets that are due at 'now_ns' from 's' and puts them into 'batch',
 * an initialized one of which it forgets the contents: at most
 * NETDEV_MAX_BURST, all with the same kind of buffer.  The caller owns them.
 * Returns how many have left: they, or as many as have moved on inside of 's',
 * and some that it has dropped since they had waited for too long.  There may
 * be more until it returns 0.  A caller that has sent all it wants to send
 * says so with flow_shaper_end_drain().
 *
 * What comes faster than the port's rate is dropped only here.  So a caller
 * that leaves off before it returns 0 must have had more leave than
 * flow_shaper_n_new(). */
size_t
flow_shaper_drain(struct flow_shaper *s, struct dp_packet_batch *batch,
                  uint64_t now_ns)
{
    return (OVS_UNLIKELY(shaper_line(s))
            ? shaper_drain_line(s, batch, now_ns)
            : shaper_drain(s, batch, s->drained, NULL, now_ns));
}

/* Returns where the packets that the last flow_shaper_drain() of 's' has put
 * into its batch were received, in their order.  (Of what has been delayed
 * only the port is known.) */
const struct shaper_source *
flow_shaper_drained_sources(const struct flow_shaper *s)
{
    return s->drained;
}

/* Ends a drain of 's' that has sent 'n_sent' packets in all. */
void
flow_shaper_end_drain(struct flow_shaper *s, size_t n_sent, uint64_t now_ns)
{
    if (OVS_UNLIKELY(s->line)) {
        flow_shaper_end_drain(s->line, n_sent, now_ns);
    }
    s->n_kept = s->n_held;
    if (n_sent) {
        unsigned int bin = histogram_bin(n_sent, SHAPER_BATCH_BINS);

        counter_add(&s->counters[SHAPER_BATCHES], 1);
        counter_add(&s->batch_size[bin], 1);
    }
    atomic_store_relaxed(&s->counters[SHAPER_NEXT_DUE_NS],
                         flow_shaper_next_due(s, now_ns));
    publish_gauges(s);
    reap_idle_flows(s, now_ns);
}

/* Returns what flow_shaper_next_due() does, but for the delay line. */
static uint64_t
shaper_next_due(const struct flow_shaper *s, uint64_t now_ns)
{
    uint64_t due_ns;

    if (!s->n_held) {
        return UINT64_MAX;
    }

    due_ns = MAX(mltw_next_due(s->wheel), now_ns);
    if (s->closing && !s->releasing) {
        due_ns = MIN(due_ns, MAX(s->release_ns, now_ns));
    }
    if (OVS_UNLIKELY(!ovs_list_is_empty(&s->ahead_ready))) {
        due_ns = now_ns;
    } else if (s->n_active_classes) {
        uint64_t wait_ns = UINT64_MAX;
        struct shaper_class *class;

        for (size_t i = 0; i < SHAPER_RANKS; i++) {
            LIST_FOR_EACH (class, active_node, &s->active_classes[i]) {
                uint64_t next_ns
                    = class_is_paced(s, class)
                      ? edt_share_next_ns(&class->queue.share, now_ns)
                      : now_ns;

                wait_ns = MIN(wait_ns, MIN(next_ns, now_ns + MAX_WAIT_NS)
                                       - now_ns);
            }
        }
        if (SLOT_BY_SLOT(s) && due_ns == now_ns) {
            /* The slots that are due wait for the rate, too. */
            due_ns = now_ns + wait_ns;
        } else {
            due_ns = MIN(due_ns, now_ns + wait_ns);
        }
    }
    return due_ns;
}

/* Returns the time in ns at which 's' may next have something to send, or to
 * tell others if that is up to the main thread, not before 'now_ns', or
 * UINT64_MAX if it has nothing. */
uint64_t
flow_shaper_next_due(const struct flow_shaper *s, uint64_t now_ns)
{
    uint64_t due_ns = shaper_next_due(s, now_ns);

    if (OVS_UNLIKELY(s->core_id == NON_PMD_CORE_ID
                     && !ovs_list_is_empty(&s->sharing_classes))) {
        /* Nobody would poll meanwhile. */
        due_ns = MIN(due_ns, now_ns + MAIN_POLL_NS);
    }
    return (OVS_UNLIKELY(s->line)
            ? MIN(due_ns, shaper_next_due(s->line, now_ns)) : due_ns);
}

/* Returns the number of packets that 's' holds. */
size_t
flow_shaper_backlog(const struct flow_shaper *s)
{
    return shaper_n_held(s);
}

/* Is flow_shaper_drain() to be called for 's'?  Yes if it holds packets, or
 * has yet to tell other threads something about rates that they share. */
bool
flow_shaper_is_busy(const struct flow_shaper *s)
{
    return (shaper_n_held(s) != 0
            || OVS_UNLIKELY(!ovs_list_is_empty(&s->sharing_classes)));
}

/* Returns the number of packets by which 's' holds more than at the last
 * flow_shaper_end_drain(), or 0. */
size_t
flow_shaper_n_new(const struct flow_shaper *s)
{
    size_t n = s->n_held > s->n_kept ? s->n_held - s->n_kept : 0;

    return n + (OVS_UNLIKELY(s->line) ? flow_shaper_n_new(s->line) : 0);
}

/* Makes 's' stop shaping at 'now_ns': it holds only those packets that must
 * not overtake others.  What it holds leaves at its time, or after the
 * configuration's 'max_delay_ns' at the latest (a flow that exceeds its rate
 * would keep it busy for ever).  Once its backlog is 0 it can be
 * destroyed. */
void
flow_shaper_set_closing(struct flow_shaper *s, uint64_t now_ns)
{
    if (!s->closing) {
        s->closing = true;
        s->release_ns = now_ns + s->config->max_delay_ns;
        if (s->line) {
            flow_shaper_set_closing(s->line, now_ns);
        }
    }
}

/* Returns true after flow_shaper_set_closing(), until the shaper is given a
 * configuration again. */
bool
flow_shaper_is_closing(const struct flow_shaper *s)
{
    return s->closing;
}

/* Returns the configuration that 's' follows. */
const struct shaper_config *
flow_shaper_config(const struct flow_shaper *s)
{
    return s->config;
}

/* Returns the core of the thread that 's' belongs, or did belong, to. */
unsigned int
flow_shaper_core_id(const struct flow_shaper *s)
{
    return s->core_id;
}

/* Passing shapers between threads. */

struct account_aux {
    struct shaper_thread *thread;
    bool count;
};

static void
account_cb(struct flow_shaper *s OVS_UNUSED, struct flow_queue *q,
           void *aux_)
{
    struct account_aux *aux = aux_;

    if (aux->count) {
        shaper_thread_count_meter(aux->thread, q->first_meter,
                                  q->n_packets);
    } else {
        shaper_thread_uncount_meter(aux->thread, q->first_meter,
                                    q->n_packets);
    }
    for (struct packet_chunk *c = q->n_packets ? q->head : NULL; c;
         c = c == q->tail ? NULL : c->next) {
        int end = c == q->tail ? q->tail_idx : CHUNK_PACKETS;

        for (int i = c == q->head ? q->head_idx : 0; i < end; i++) {
            struct held_packet *held = &c->held[i];

            if (aux->count) {
                held_set_pool(held, aux->thread);
                shaper_thread_count(aux->thread, held_pool(held),
                                    held->source, 1, held_bytes(held));
            } else {
                shaper_thread_uncount(aux->thread, held_pool(held),
                                      held->source, 1, held_bytes(held));
            }
        }
    }
}

/* Ends the current thread's ownership of 's', which may be attached to another
 * thread or destroyed from then on. */
void
flow_shaper_detach(struct flow_shaper *s)
{
    struct account_aux aux = { s->thread, false };

    if (s->line) {
        flow_shaper_detach(s->line);
    }
    for (size_t i = 0; i < s->n_classes; i++) {
        struct edt_share *share = &s->classes[i].queue.share;

        edt_share_suspend(share, share->now_ns);
    }
    if (s->n_held) {
        flows_for_each(s, account_cb, &aux);
    }
    s->thread = NULL;
}

/* Makes 's', which is detached, belong to the thread with 'thread'. */
void
flow_shaper_attach(struct flow_shaper *s, struct shaper_thread *thread,
                   unsigned int core_id)
{
    struct account_aux aux = { thread, true };

    if (s->line) {
        flow_shaper_attach(s->line, thread, core_id);
    }
    s->thread = thread;
    s->core_id = core_id;
    if (s->n_held) {
        flows_for_each(s, account_cb, &aux);
    }
}

struct merge_aux {
    struct flow_shaper *to;
};

/* Gives the packets of 'q', a FIFO of 'from', to the shaper in 'aux', among
 * those that it holds for the same FIFO in the order of their EDTs. */
static void
merge_cb(struct flow_shaper *from, struct flow_queue *q, void *aux_)
{
    struct merge_aux *aux = aux_;
    struct flow_shaper *s = aux->to;
    uint16_t class_idx = shaper_config_class(s->config, q->key.queue_id);
    struct flow_queue *to;
    struct flow_queue mine;

    if (!q->n_packets) {
        return;
    }

    to = flow_find(s, &q->key, q->hash);
    if (!to) {
        to = flow_create(s, &q->key, q->hash, class_idx);
        if (!to) {
            flow_purge(from, q);
            return;
        }
    }
    if (to->state == FLOW_IDLE) {
        flow_becomes_busy(s, to, q->port);
        to->state = FLOW_WAITING;
        to->gap_ns = q->gap_ns;
    }

    /* Each of the two may hold packets that came between those of the other:
     * a receive queue can leave a thread and come back to it.  Their meters
     * (or, for unstamped packets, the clock) gave them times in the order in
     * which they came. */
    mine = *to;
    to->n_packets = 0;
    to->n_bytes = 0;
    /* Among packets without a time those with one are not the first any more.
     * They ask for one again: their meters' rate is kept, if not used up. */
    to->n_line = 0;
    if (q->turn_bytes) {
        to->turn_edt_ns = to->turn_bytes
                          ? MIN(to->turn_edt_ns, q->turn_edt_ns)
                          : q->turn_edt_ns;
        to->turn_bytes += q->turn_bytes;
    }
    while (q->n_packets || mine.n_packets) {
        bool is_mine = !q->n_packets
                       || (mine.n_packets && (flow_head(&mine)->edt_ns
                                              < flow_head(q)->edt_ns));
        struct flow_queue *src = is_mine ? &mine : q;
        struct held_packet held = *flow_head(src);

        flow_pop(is_mine ? s : from, src);
        if (!is_mine) {
            held_uncount(from, q, &held);
            held_set_pool(&held, s->thread);
            shaper_thread_count(s->thread, held_pool(&held), held.source, 1,
                                held_bytes(&held));
            shaper_thread_count_meter(s->thread, to->first_meter, 1);
            s->n_held++;
            s->held_bytes += held_bytes(&held);
            if (!held_is_stamped(&held)) {
                s->n_unstamped++;
                flow_class(s, to)->unstamped_bytes += held_bytes(&held);
            }
        }
        if (to->key.late || !held_is_stamped(&held)) {
            to->n_bytes += held_bytes(&held);
        }
        *flow_push(s, to) = held;
    }
}

/* Moves all that 'other', which is detached, holds to 's' and adds its
 * counters.  In each FIFO packets go in the order of their EDTs, those of
 * 'other' first among equals.  The caller destroys 'other'. */
void
flow_shaper_merge(struct flow_shaper *s, struct flow_shaper *other,
                  uint64_t now_ns)
{
    struct merge_aux aux = { s };

    unschedule_all(s);
    unschedule_all(other);
    flows_for_each(other, merge_cb, &aux);
    flows_for_each(s, reschedule_cb, &now_ns);
    if (s->line && other->line) {
        flow_shaper_merge(s->line, other->line, now_ns);
    } else if (other->line) {
        s->line = other->line;
        other->line = NULL;
        flow_shaper_attach(s->line, s->thread, s->core_id);
        line_update(s, now_ns);
    }

    for (size_t i = 0; i < SHAPER_BACKLOG; i++) {
        counter_add(&s->counters[i], counter_get(&other->counters[i]));
    }
    for (size_t i = 0; i < SHAPER_BATCH_BINS; i++) {
        counter_add(&s->batch_size[i], counter_get(&other->batch_size[i]));
    }
    for (size_t i = 0; i < SHAPER_LATENESS_BINS; i++) {
        counter_add(&s->lateness[i], counter_get(&other->lateness[i]));
    }
    for (size_t i = 0; i < other->n_classes; i++) {
        uint16_t idx = shaper_config_class(s->config,
                                           other->classes[i].queue_id);

        counter_add(&s->classes[idx].tx_packets,
                    counter_get(&other->classes[i].tx_packets));
        counter_add(&s->classes[idx].tx_bytes,
                    counter_get(&other->classes[i].tx_bytes));
        counter_add(&s->classes[idx].drops,
                    counter_get(&other->classes[i].drops));
    }
    publish_gauges(s);
}

/* Statistics. */

/* Adds the statistics of 's' to '*stats'; SHAPER_NEXT_DUE_NS is the earlier
 * one.  Thread-safe. */
void
flow_shaper_get_stats(const struct flow_shaper *s, struct shaper_stats *stats)
{
    for (size_t i = 0; i < SHAPER_N_COUNTERS; i++) {
        uint64_t value = counter_get(&s->counters[i]);

        if (i == SHAPER_NEXT_DUE_NS) {
            stats->counters[i] = MIN(stats->counters[i], value);
        } else {
            stats->counters[i] += value;
        }
    }
    for (size_t i = 0; i < SHAPER_BATCH_BINS; i++) {
        stats->batch_size[i] += counter_get(&s->batch_size[i]);
    }
    for (size_t i = 0; i < SHAPER_LATENESS_BINS; i++) {
        stats->lateness[i] += counter_get(&s->lateness[i]);
    }
}

/* Adds the statistics of the delay line of 's', if it has one, to '*stats'.
 * The caller keeps the configuration of 's' from changing. */
void
flow_shaper_get_delay_stats(const struct flow_shaper *s,
                            struct shaper_stats *stats)
{
    if (s->line) {
        flow_shaper_get_stats(s->line, stats);
    }
}

/* Adds what output queue 'queue_id' has sent and dropped to '*stats'.  Returns
 * false if 's' has no such queue.  The caller keeps the configuration of 's'
 * from changing. */
bool
flow_shaper_get_class_stats(const struct flow_shaper *s, uint32_t queue_id,
                            struct shaper_class_stats *stats)
{
    for (size_t i = 0; i < s->n_classes; i++) {
        const struct shaper_class *class = &s->classes[i];

        if (class->queue_id == queue_id) {
            stats->tx_packets += counter_get(&class->tx_packets);
            stats->tx_bytes += counter_get(&class->tx_bytes);
            stats->drops += counter_get(&class->drops);
            return true;
        }
    }
    return false;
}

/* Fills 'flows' with the 'max' FIFOs of 's' that have sent the most bytes
 * since they were created, the busiest first, and returns how many they are.
 * Thread-safe: the owner goes on meanwhile, so that a FIFO that is freed just
 * now may show up with another one's numbers. */
size_t
flow_shaper_get_busiest(const struct flow_shaper *s,
                        struct shaper_flow_stats *flows, size_t max)
{
    struct slab *slab;
    size_t n = 0;

    if (!max) {
        return 0;
    }

    atomic_read_explicit(&CONST_CAST(struct flow_shaper *, s)->flow_slabs,
                         &slab, memory_order_acquire);
    for (; slab; slab = slab->next) {
        const struct flow_queue *q = slab->mem;

        for (size_t i = 0; i < SLAB_FLOWS; i++, q++) {
            uint64_t tx_bytes = counter_get(&q->tx_bytes);
            size_t pos;

            if (!q->in_use
                || (n == max && tx_bytes <= flows[n - 1].tx_bytes)) {
                continue;
            }
            n += n < max;
            for (pos = n - 1; pos > 0 && flows[pos - 1].tx_bytes < tx_bytes;
                 pos--) {
                flows[pos] = flows[pos - 1];
            }
            flows[pos].key = q->key;
            flows[pos].n_meters
                = edt_chains_meters(s->chains, q->key.chain,
                                    flows[pos].meters,
                                    ARRAY_SIZE(flows[pos].meters));
            flows[pos].gap_ns = q->gap_ns;
            flows[pos].backlog = q->n_packets;
            flows[pos].tx_packets = counter_get(&q->tx_packets);
            flows[pos].tx_bytes = tx_bytes;
        }
    }
    return n;
}
