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

/* Measures schedulers of departure times ("edt-sched.h") in simulated time,
 * without a switch.  "benchmarks/run.py datastructure" runs this program
 * and says what the figures mean; each line of output is an object of JSON.
 *
 * The traffic: flows that share 100 Gbit/s in packets of 1500 bytes, with a
 * few packets of each waiting.  The clock is polled every 1 us, until nothing
 * more is due.  Each packet that leaves is put back as its flow's next.
 *
 * An entry is a packet whose buffer begins at a multiple of 128 bytes and of
 * which one cache line is read and written when it leaves, as a transmission
 * would.  Packets and flows are alike for all schedulers and in huge pages if
 * possible, as DPDK's are. */

#include <config.h>
#undef NDEBUG

#include "edt-sched.h"

#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "dp-packet.h"
#include "edt-sched-baselines.h"
#include "flow-shaper.h"
#include "odp-util.h"
#include "openvswitch/compiler.h"
#include "openvswitch/util.h"
#include "packets.h"
#include "random.h"
#include "util.h"

#define PACKET_BYTES 1500
#define PACKET_NS 120           /* Of PACKET_BYTES at 100 Gbit/s. */
#define POLL_NS 1000
#define MAX_BATCH 128           /* Entries that a call may return. */
#define START_NS UINT64_C(1700000000000000000)
#define PAGE_BYTES 4096
#define HUGE_PAGE_BYTES (UINT64_C(2) << 20)
#define NOINLINE __attribute__((__noinline__))

/* What a scheduler is given and gives back. */

struct packet {
    uint32_t flow;
    uint32_t length;
    uint64_t n_sent;
    uint8_t pad[112];
};
BUILD_ASSERT_DECL(sizeof(struct packet) == 128);

struct sender {
    uint64_t edt_ns;            /* Of the next packet. */
    uint32_t gap_ns;
    uint32_t level;
};

/* Memory as DPDK's: in huge pages if possible, and resident. */
static void *
huge_alloc(size_t size)
{
    size = ROUND_UP(size, HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES;
    char *p = mmap(NULL, size, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (p == MAP_FAILED) {
        out_of_memory();
    }
    p = (char *) ROUND_UP((uintptr_t) p, HUGE_PAGE_BYTES);
    size -= HUGE_PAGE_BYTES;
    madvise(p, size, MADV_HUGEPAGE);
    memset(p, 0, size);
    return p;
}

static void
huge_free(void *p, size_t size)
{
    if (p) {
        munmap(p, ROUND_UP(size, HUGE_PAGE_BYTES));
    }
}

static uint64_t
time_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return ts.tv_sec * UINT64_C(1000000000) + ts.tv_nsec;
}

/* No scheduler: a ring that gives out one packet after the other at 100
 * Gbit/s, whatever their times.  What this costs is the rest of the benchmark,
 * and the least that holding packets takes. */

struct ring_sched {
    uint32_t mask;
    uint32_t head, tail;
    uint64_t next_ns;           /* When the next packet may leave. */
    void **entries;
};

static struct ring_sched *
ring_cast(const void *sched)
{
    return (struct ring_sched *) sched;
}

static void
ring_destroy(void *sched)
{
    free(ring_cast(sched)->entries);
    free(ring_cast(sched));
}

static unsigned int
ring_level(const void *sched OVS_UNUSED,
           uint64_t gap_ns OVS_UNUSED)
{
    return 0;
}

static bool
ring_enqueue(void *sched, void *entry, uint64_t edt_ns OVS_UNUSED,
             unsigned int level OVS_UNUSED)
{
    struct ring_sched *r = ring_cast(sched);

    if (r->tail - r->head > r->mask) {
        return false;
    }
    r->entries[r->tail++ & r->mask] = entry;
    return true;
}

static size_t
ring_dequeue(void *sched, uint64_t now_ns, void **entries,
             size_t max)
{
    struct ring_sched *r = ring_cast(sched);
    size_t n = 0;

    while (n < max && r->head != r->tail && r->next_ns <= now_ns) {
        entries[n] = r->entries[r->head++ & r->mask];
        OVS_PREFETCH(entries[n]);
        r->next_ns += PACKET_NS;
        n++;
    }
    return n;
}

static uint64_t
ring_next_due(const void *sched)
{
    const struct ring_sched *r = ring_cast(sched);

    return r->head != r->tail ? r->next_ns : UINT64_MAX;
}

static size_t
ring_flush(void *sched, void **entries, size_t max)
{
    struct ring_sched *r = ring_cast(sched);
    uint64_t next_ns = r->next_ns;
    size_t n = ring_dequeue(sched, UINT64_MAX, entries, max);

    r->next_ns = next_ns;
    return n;
}

static size_t
ring_count(const void *sched)
{
    return ring_cast(sched)->tail - ring_cast(sched)->head;
}

static size_t
ring_memory_bytes(const void *sched)
{
    return (sizeof(struct ring_sched)
            + (ring_cast(sched)->mask + 1) * sizeof(void *));
}

static void *
ring_create(const struct edt_sched_config *config, uint64_t now_ns)
{
    struct ring_sched *r = xzalloc(sizeof *r);
    uint32_t size = 1u << log_2_ceil(config->max_entries);

    r->mask = size - 1;
    r->next_ns = now_ns;
    r->entries = xcalloc(size, sizeof *r->entries);
    return r;
}

static const struct edt_sched_class ring_class = {
    .name = "ring",
    .create = ring_create,
    .destroy = ring_destroy,
    .level = ring_level,
    .enqueue = ring_enqueue,
    .dequeue = ring_dequeue,
    .next_due = ring_next_due,
    .flush = ring_flush,
    .count = ring_count,
    .memory_bytes = ring_memory_bytes,
};

/* What is measured. */

struct subject {
    const char *name;
    const struct edt_sched_class *class; /* NULL: edt_sched_create(). */
    enum edt_sched_type type;
    uint64_t slot_ns;
    bool slot_by_slot;
    bool fine;                  /* mltw: the geometry of the paper. */
    bool shaper;                /* The real flow shaper, with dp_packets. */
};

static const struct subject subjects[] = {
    { .name = "ring", .class = &ring_class },
    { .name = "mltw", .type = EDT_SCHED_MLTW },
    { .name = "mltw-slots", .type = EDT_SCHED_MLTW, .slot_by_slot = true },
    { .name = "mltw-paper", .type = EDT_SCHED_MLTW, .fine = true },
    { .name = "carousel-1us", .type = EDT_SCHED_CAROUSEL, .slot_ns = 1000 },
    { .name = "carousel-100ns", .type = EDT_SCHED_CAROUSEL, .slot_ns = 100 },
    { .name = "carousel-100ns-slots", .type = EDT_SCHED_CAROUSEL,
      .slot_ns = 100, .slot_by_slot = true },
    { .name = "eiffel-1us", .type = EDT_SCHED_EIFFEL, .slot_ns = 1000 },
    { .name = "eiffel-100ns", .type = EDT_SCHED_EIFFEL, .slot_ns = 100 },
    { .name = "eiffel-100ns-slots", .type = EDT_SCHED_EIFFEL, .slot_ns = 100,
      .slot_by_slot = true },
    { .name = "heap", .class = &heap_sched_class },
    { .name = "tree", .class = &tree_sched_class },
    { .name = "flow-shaper", .shaper = true },
};

static struct edt_sched *
subject_create(const struct subject *subject, uint32_t max_entries,
               uint64_t now_ns)
{
    struct edt_sched_config c = EDT_SCHED_CONFIG_DEFAULT;

    c.type = subject->type;
    c.max_entries = max_entries;
    c.slot_ns = subject->slot_ns;
    c.slot_by_slot = subject->slot_by_slot;
    if (subject->fine) {
        c.mltw.n_wheels = 64;
        c.mltw.n_slots = 1024;
        c.mltw.min_granularity_ns = 1;
    }
    return (subject->class ? edt_sched_create_class(subject->class, &c, now_ns)
            : edt_sched_create(&c, now_ns));
}

/* Command line. */

static unsigned int n_rounds = 9;
static uint64_t n_measured = 500000; /* Packets a round. */
static bool mixed;                   /* Flows of different rates? */
static unsigned int flow_counts[16] = { 1, 16, 256, 4096, 100000 };
static size_t n_flow_counts = 5;
static bool selected[ARRAY_SIZE(subjects)];

/* A scheduler with its traffic. */

struct run {
    const struct subject *subject;
    struct edt_sched *sched;
    struct sender *senders;
    struct packet *packets;
    unsigned int n_flows;
    unsigned int backlog;       /* Packets of each flow. */
    uint64_t now_ns;

    /* Results since the last measurement began. */
    uint64_t n_packets;
    uint64_t n_batches;         /* Calls that returned packets. */

    /* Only for the shaper. */
    struct flow_shaper *shaper;
    struct shaper_thread *thread;
    uint8_t *frames;
    uint64_t n_offered;         /* Batches. */
};

/* ns between the packets of each flow, so that all are 100 Gbit/s together. */
static void
choose_gaps(struct sender *senders, unsigned int n)
{
    uint64_t total = 0;

    random_set_seed(1);
    for (unsigned int i = 0; i < n; i++) {
        senders[i].gap_ns = mixed ? 1u << random_range(7) : 1;
        total += senders[i].gap_ns;
    }
    for (unsigned int i = 0; i < n; i++) {
        uint64_t gap = PACKET_NS * total / senders[i].gap_ns;

        senders[i].gap_ns = gap;
        senders[i].edt_ns = START_NS + (mixed ? random_uint64() % gap
                                      : i * PACKET_NS);
    }
}

/* Touches all memory that 'run' has for times until 'until_ns', so that page
 * faults, of which there are none in constant use, are not measured. */
static void
prefault(struct run *run, uint64_t until_ns)
{
    /* A page of slots of 8 bytes. */
    uint64_t step = PAGE_BYTES / 8 * (run->subject->slot_ns
                                      ? run->subject->slot_ns : 1000);
    uint64_t edt_ns = run->now_ns;

    while (edt_ns < until_ns) {
        void *entries[MAX_BATCH];

        for (unsigned int i = 0; i < 8192 && edt_ns < until_ns; i++) {
            ovs_assert(edt_sched_enqueue(run->sched, run->packets, edt_ns, 0));
            edt_ns += step;
        }
        while (edt_sched_flush(run->sched, entries, ARRAY_SIZE(entries))) {
            continue;
        }
    }
}

static void
shaper_init(struct run *run)
{
    struct shaper_config *config = xzalloc(sizeof *config);

    ovs_refcount_init(&config->ref_cnt);
    config->wheel = MLTW_CONFIG_DEFAULT;
    config->max_delay_ns = UINT64_C(1000000000);
    config->ecn_threshold_ns = UINT64_MAX;
    config->max_backlog = 1 << 18;
    config->max_batch = MAX_BATCH;
    config->max_flows = 131072;
    config->classes = xcalloc(1, sizeof *config->classes);
    config->n_classes = 1;
    run->thread = shaper_thread_create();
    run->shaper = flow_shaper_create(config, run->thread, 1, run->now_ns);
    shaper_config_unref(config);
}

/* A frame of PACKET_BYTES behind its metadata, as in a memory pool. */
#define FRAME_BYTES ROUND_UP(sizeof(struct dp_packet) + PACKET_BYTES, 128)

static void
shaper_packet_init(const struct run *run, unsigned int i)
{
    uint8_t *frame = run->frames + i * (size_t) FRAME_BYTES;
    struct dp_packet *packet = (struct dp_packet *) (void *) frame;
    ovs_be32 dst = htonl(0x0a000000 + i % run->n_flows);
    uint8_t *data = frame + sizeof *packet;

    dp_packet_use_stub(packet, data, PACKET_BYTES);
    dp_packet_set_size(packet, PACKET_BYTES);
    data[0] = 2;
    data[12] = 8;
    data[14] = 0x45;
    memcpy(data + 30, &dst, sizeof dst);
    pkt_metadata_init(&packet->md, ODPP_NONE);
    pkt_metadata_set_edt(&packet->md, &(struct edt_stamp) {
        .chain = i % run->n_flows,
        .gap_ns = run->senders[i % run->n_flows].gap_ns,
        .flags = EDT_PROMISED,
    });
}

/* Puts the next packet of a flow into the scheduler. */
static inline void
run_enqueue(struct run *run, struct packet *packet)
{
    struct sender *sender = &run->senders[packet->flow];

    packet->n_sent++;
    ovs_assert(edt_sched_enqueue(run->sched, packet, sender->edt_ns,
                                 sender->level));
    sender->edt_ns += sender->gap_ns;
}

/* Puts packets that have left, or are new, into the shaper. */
static inline void
run_enqueue_shaper(struct run *run, struct dp_packet_batch *batch)
{
    struct shaper_source sources[NETDEV_MAX_BURST];
    struct dp_packet *packet;

    /* A batch comes from one receive queue.  There are many, so that none is
     * over its share. */
    uint16_t rxq = 1 + run->n_offered++ % 16;

    DP_PACKET_BATCH_FOR_EACH (i, packet, batch) {
        uint32_t flow_no = packet->md.edt.chain;
        struct sender *sender = &run->senders[flow_no];

        packet->md.edt.edt_ns = sender->edt_ns;
        sender->edt_ns += sender->gap_ns;
        sources[i].port = sources[i].rxq = rxq;
    }
    flow_shaper_enqueue(run->shaper, batch, sources, run->now_ns);
}

static bool
run_init(struct run *run, const struct subject *subject, unsigned int n_flows)
{
    size_t backlog = n_flows >= 100000 ? 2 : 8;
    size_t n_packets = backlog * n_flows;
    size_t n_all = n_packets * 2 + n_measured * (n_rounds + 1) * 2;

    if (subject->shaper && n_packets > 32768) {
        /* The shaper does not hold as many without a memory pool. */
        return false;
    }
    *run = (struct run) {
        .subject = subject,
        .n_flows = n_flows,
        .backlog = backlog,
        .now_ns = START_NS,
    };
    run->senders = huge_alloc(n_flows * sizeof *run->senders);
    choose_gaps(run->senders, n_flows);

    if (subject->shaper) {
        shaper_init(run);
        run->frames = huge_alloc(n_packets * FRAME_BYTES);
        for (size_t i = 0; i < n_packets; i++) {
            struct dp_packet_batch batch;

            shaper_packet_init(run, i);
            dp_packet_batch_init_packet(
                &batch, (struct dp_packet *) (void *)
                        (run->frames + i * FRAME_BYTES));
            /* As if it came just before its time. */
            run->now_ns = START_NS - 1;
            run_enqueue_shaper(run, &batch);
            ovs_assert(dp_packet_batch_is_empty(&batch));
        }
        run->now_ns = START_NS;
        ovs_assert(flow_shaper_backlog(run->shaper) == n_packets);
        return true;
    }

    run->sched = subject_create(subject, n_packets + 8192, run->now_ns);
    run->packets = huge_alloc(n_packets * sizeof *run->packets);
    prefault(run, run->now_ns + MIN(n_all * PACKET_NS + 50000000,
                                    UINT64_C(9900000000)));
    for (unsigned int i = 0; i < n_flows; i++) {
        struct sender *sender = &run->senders[i];

        sender->level = edt_sched_level(run->sched, sender->gap_ns);
    }
    for (size_t i = 0; i < n_packets; i++) {
        struct packet *packet = &run->packets[i];

        packet->flow = i % n_flows;
        packet->length = PACKET_BYTES;
        run_enqueue(run, packet);
    }
    return true;
}

static void
run_destroy(struct run *run)
{
    size_t n_packets = (size_t) run->backlog * run->n_flows;

    huge_free(run->senders, run->n_flows * sizeof *run->senders);
    huge_free(run->packets, n_packets * sizeof *run->packets);
    if (run->shaper) {
        struct dp_packet_batch batch;

        dp_packet_batch_init(&batch);
        while (flow_shaper_drain(run->shaper, &batch, UINT64_MAX / 2)) {
            continue;
        }
        flow_shaper_destroy(run->shaper);
        shaper_thread_destroy(run->thread);
        huge_free(run->frames, n_packets * FRAME_BYTES);
    }
    edt_sched_destroy(run->sched);
}

/* Moves the clock on until at least 'n' packets have left.  This is what is
 * measured, and what callgrind is told to look at. */
static void NOINLINE
run_packets(struct run *run, uint64_t n)
{
    struct edt_sched *sched = run->sched;

    run->n_packets = 0;
    run->n_batches = 0;
    while (run->n_packets < n) {
        void *entries[MAX_BATCH];
        size_t n_out;

        run->now_ns += POLL_NS;
        while ((n_out = edt_sched_dequeue(sched, run->now_ns, entries,
                                          ARRAY_SIZE(entries))) != 0) {
            for (size_t i = 0; i < n_out; i++) {
                run_enqueue(run, entries[i]);
            }
            run->n_packets += n_out;
            run->n_batches++;
        }
    }
}

/* The same with the shaper. */
static void NOINLINE
run_packets_shaper(struct run *run, uint64_t n)
{
    run->n_packets = 0;
    run->n_batches = 0;
    while (run->n_packets < n) {
        struct dp_packet_batch batch;
        size_t n_poll = 0;
        size_t n_out;

        dp_packet_batch_init(&batch);
        run->now_ns += POLL_NS;
        while ((n_out = flow_shaper_drain(run->shaper, &batch,
                                          run->now_ns)) != 0) {
            n_poll += n_out;
            run->n_packets += n_out;
            run->n_batches++;
            do {
                run_enqueue_shaper(run, &batch);
                /* What is due already has been sent. */
                run->n_packets += dp_packet_batch_size(&batch);
            } while (!dp_packet_batch_is_empty(&batch));
        }
        flow_shaper_end_drain(run->shaper, n_poll, run->now_ns);
    }
}

static void
run_any(struct run *run, uint64_t n)
{
    if (run->shaper) {
        run_packets_shaper(run, n);
    } else {
        run_packets(run, n);
    }
}

/* Packets after which everything in use is in the caches that it fits in. */
static uint64_t
warm_up(const struct run *run)
{
    uint64_t n = (uint64_t) run->n_flows * run->backlog;

    return MAX(n, 20000);
}

/* Commands. */

static const char *
pattern(void)
{
    return mixed ? "mixed" : "equal";
}

/* ns per packet of all subjects, in turns. */
static void
cmd_throughput(void)
{
    for (size_t i = 0; i < n_flow_counts; i++) {
        struct run runs[ARRAY_SIZE(subjects)];
        bool used[ARRAY_SIZE(subjects)];

        for (size_t j = 0; j < ARRAY_SIZE(subjects); j++) {
            used[j] = selected[j] && run_init(&runs[j], &subjects[j],
                                              flow_counts[i]);
        }
        for (unsigned int round = 0; round <= n_rounds; round++) {
            for (size_t k = 0; k < ARRAY_SIZE(subjects); k++) {
                /* Everyone is first once. */
                size_t j = (k + round) % ARRAY_SIZE(subjects);

                if (!used[j]) {
                    continue;
                }
                run_any(&runs[j], warm_up(&runs[j]));

                uint64_t start = time_ns();
                run_any(&runs[j], n_measured);
                uint64_t end = time_ns();

                if (round) {
                    printf("{\"what\": \"throughput\", \"pattern\": \"%s\", "
                           "\"scheduler\": \"%s\", \"flows\": %u, "
                           "\"round\": %u, \"ns\": %.3f, \"batch\": %.3f}\n",
                           pattern(), subjects[j].name, flow_counts[i], round,
                           (double) (end - start) / runs[j].n_packets,
                           (double) runs[j].n_packets / runs[j].n_batches);
                    fflush(stdout);
                }
            }
        }
        for (size_t j = 0; j < ARRAY_SIZE(subjects); j++) {
            if (used[j]) {
                run_destroy(&runs[j]);
            }
        }
    }
}

/* One subject, once: for callgrind. */
static void
cmd_once(void)
{
    for (size_t j = 0; j < ARRAY_SIZE(subjects); j++) {
        struct run run;

        if (!selected[j] || !run_init(&run, &subjects[j], flow_counts[0])) {
            continue;
        }
        run_any(&run, n_measured);
        printf("{\"what\": \"once\", \"pattern\": \"%s\", "
               "\"scheduler\": \"%s\", \"flows\": %u, \"packets\": %"PRIu64
               "}\n", pattern(), subjects[j].name, flow_counts[0],
               run.n_packets);
        run_destroy(&run);
    }
}

/* Memory that is allocated, and resident at various times. */

/* Returns the resident size of this process in bytes, or 0 if that cannot be
 * known. */
static size_t
resident_bytes(void)
{
    static const char file_name[] = "/proc/self/smaps_rollup";
    FILE *stream = fopen(file_name, "r");
    unsigned long int kilobytes = 0;
    char line[256];

    if (stream) {
        while (fgets(line, sizeof line, stream)
               && sscanf(line, "Rss: %lu", &kilobytes) != 1) {
            continue;
        }
        fclose(stream);
    }
    return kilobytes * 1024;
}

static void
run_for(struct run *run, uint64_t ns)
{
    run_packets(run, ns / PACKET_NS);
}

static void
cmd_memory(void)
{
    for (size_t j = 0; j < ARRAY_SIZE(subjects); j++) {
        const struct subject *subject = &subjects[j];
        struct run run = {
            .subject = subject,
            .n_flows = 256,
            .backlog = 8,
            .now_ns = START_NS,
        };
        size_t n_packets = run.n_flows * run.backlog;
        uint64_t rotation_ns = (subject->type == EDT_SCHED_CAROUSEL
                                ? UINT64_C(10100000000)
                                : subject->type == EDT_SCHED_EIFFEL
                                ? UINT64_C(20200000000) : 200000000);

        if (!selected[j] || subject->shaper) {
            continue;
        }
        run.senders = huge_alloc(run.n_flows * sizeof *run.senders);
        run.packets = huge_alloc(n_packets * sizeof *run.packets);
        choose_gaps(run.senders, run.n_flows);

        size_t before = resident_bytes();
        run.sched = subject_create(subject, 131072, run.now_ns);
        size_t created = resident_bytes() - before;
        for (unsigned int i = 0; i < run.n_flows; i++) {
            run.senders[i].level = edt_sched_level(run.sched,
                                                 run.senders[i].gap_ns);
        }
        for (size_t i = 0; i < n_packets; i++) {
            run.packets[i].flow = i % run.n_flows;
            run_enqueue(&run, &run.packets[i]);
        }
        run_for(&run, 100000000);
        size_t soon = resident_bytes() - before;
        run_for(&run, rotation_ns - 100000000);
        size_t rotated = resident_bytes() - before;

        printf("{\"what\": \"memory\", \"scheduler\": \"%s\", "
               "\"allocated\": %"PRIuSIZE", \"created\": %"PRIuSIZE", "
               "\"after_100ms\": %"PRIuSIZE", \"after_rotation\": %"PRIuSIZE
               "}\n", subject->name, edt_sched_memory_bytes(run.sched),
               created, soon, rotated);
        fflush(stdout);
        run_destroy(&run);
    }
}

/* The first calls after nobody has called for long.  256 flows have packets
 * waiting, all of which have become due, and a packet of another one is not
 * due for long. */
static void
cmd_stall(void)
{
    static const uint64_t stalls_ns[] = { 10000000, 1000000000 };

    for (size_t i = 0; i < ARRAY_SIZE(stalls_ns); i++) {
        for (size_t j = 0; j < ARRAY_SIZE(subjects); j++) {
            static struct packet late;
            struct run run;

            if (!selected[j] || subjects[j].shaper
                || !run_init(&run, &subjects[j], 256)) {
                continue;
            }

            size_t n_packets = run.n_flows * run.backlog;
            void **out = xcalloc(n_packets + MAX_BATCH, sizeof *out);
            void *last = NULL;

            for (unsigned int round = 0; round <= n_rounds; round++) {
                uint64_t first_ns = 0, worst_ns = 0, total_ns = 0;
                unsigned int n_calls = 0;
                size_t n = 0;

                /* In the normal course of things, on memory that has been in
                 * use before. */
                while (edt_sched_flush(run.sched, &last, 1)) {
                    continue;
                }
                prefault(&run, run.now_ns + UINT64_C(9900000000));
                for (size_t k = 0; k < n_packets; k++) {
                    struct sender *sender = &run.senders[k % run.n_flows];

                    if (k < run.n_flows) {
                        sender->edt_ns = run.now_ns + k * PACKET_NS;
                    }
                    run_enqueue(&run, &run.packets[k]);
                }
                run_packets(&run, 20000);
                edt_sched_enqueue(run.sched, &late,
                                  run.now_ns + UINT64_C(5000000000), 0);

                run.now_ns += stalls_ns[i];
                for (;;) {
                    uint64_t start = time_ns();
                    size_t n_out = edt_sched_dequeue(run.sched, run.now_ns,
                                                     &out[n], 32);
                    uint64_t ns = time_ns() - start;

                    n_calls++;
                    n += n_out;
                    total_ns += ns;
                    worst_ns = MAX(worst_ns, ns);
                    first_ns = n_calls == 1 ? ns : first_ns;
                    if (!n_out || n >= n_packets + MAX_BATCH - 32) {
                        break;
                    }
                }
                if (round) {
                    printf("{\"what\": \"stall\", \"scheduler\": \"%s\", "
                           "\"stall_ns\": %"PRIu64", \"round\": %u, "
                           "\"first_ns\": %"PRIu64", \"worst_ns\": %"PRIu64
                           ", \"total_ns\": %"PRIu64", \"calls\": %u, "
                           "\"packets\": %"PRIuSIZE"}\n", subjects[j].name,
                           stalls_ns[i], round, first_ns, worst_ns, total_ns,
                           n_calls, n);
                    fflush(stdout);
                }
            }
            while (edt_sched_flush(run.sched, out, MAX_BATCH)) {
                continue;
            }
            free(out);
            run_destroy(&run);
        }
    }
}

static const struct command {
    const char *name;
    void (*run)(void);
} commands[] = {
    { "throughput", cmd_throughput },
    { "stall", cmd_stall },
    { "memory", cmd_memory },
    { "once", cmd_once },
};

static void OVS_NO_RETURN
usage(FILE *stream, const char *name, int status)
{
    fprintf(stream,
            "usage: %s [OPTION]... COMMAND\n"
            "Commands: throughput stall memory once\n"
            "Options:\n"
            "  --rounds=N          measurements of each (default: %u)\n"
            "  --packets=N         packets a measurement (default: %"PRIu64
            ")\n"
            "  --flows=N,...       numbers of flows\n"
            "  --schedulers=X,...  all if not given, of:\n", name, n_rounds,
            n_measured);
    for (size_t i = 0; i < ARRAY_SIZE(subjects); i++) {
        fprintf(stream, "      %s\n", subjects[i].name);
    }
    fprintf(stream, "  --mixed             flows of different rates\n");
    exit(status);
}

int
main(int argc, char *argv[])
{
    static const struct option options[] = {
        { "rounds", required_argument, NULL, 'r' },
        { "packets", required_argument, NULL, 'p' },
        { "flows", required_argument, NULL, 'f' },
        { "schedulers", required_argument, NULL, 's' },
        { "mixed", no_argument, NULL, 'm' },
        { "help", no_argument, NULL, 'h' },
        { NULL, 0, NULL, 0 },
    };
    bool any = false;
    char *name;
    int option;

    while ((option = getopt_long(argc, argv, "r:p:f:s:mh", options, NULL))
           != -1) {
        switch (option) {
        case 'r':
            n_rounds = MAX(1, strtoul(optarg, NULL, 0));
            break;
        case 'p':
            n_measured = MAX(1, strtoull(optarg, NULL, 0));
            break;
        case 'f':
            n_flow_counts = 0;
            for (char *save = NULL, *p = strtok_r(optarg, ",", &save);
                 p && n_flow_counts < ARRAY_SIZE(flow_counts);
                 p = strtok_r(NULL, ",", &save)) {
                flow_counts[n_flow_counts++] = MAX(1, strtoul(p, NULL, 0));
            }
            break;
        case 's':
            for (char *save = NULL, *p = strtok_r(optarg, ",", &save); p;
                 p = strtok_r(NULL, ",", &save)) {
                size_t i = 0;

                while (strcmp(subjects[i].name, p)) {
                    if (++i == ARRAY_SIZE(subjects)) {
                        usage(stderr, argv[0], 2);
                    }
                }
                selected[i] = any = true;
            }
            break;
        case 'm':
            mixed = true;
            break;
        case 'h':
            usage(stdout, argv[0], EXIT_SUCCESS);
        default:
            usage(stderr, argv[0], 2);
        }
    }
    for (size_t i = 0; i < ARRAY_SIZE(subjects); i++) {
        selected[i] |= !any;
    }

    name = optind + 1 == argc ? argv[optind] : "";
    for (size_t i = 0; i < ARRAY_SIZE(commands); i++) {
        if (!strcmp(name, commands[i].name)) {
            commands[i].run();
            return 0;
        }
    }
    usage(stderr, argv[0], 2);
}
