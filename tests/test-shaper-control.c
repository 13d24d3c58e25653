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


/* Tests of what goes ahead of the rates of ports and queues, in simulated
 * time: what is taken for address resolution, how much of it may, and what
 * that and the switch's own packets do to others, also while all of them are
 * flooded. */

#include <config.h>
#undef NDEBUG

#include "shaper-control.h"

#include <string.h>

#include "dp-packet.h"
#include "dpdk.h"
#include "fb-test.h"
#include "flow-shaper.h"
#include "odp-util.h"
#include "packets.h"
#include "util.h"

#define START_NS UINT64_C(100000000000000)
#define MS UINT64_C(1000000)
#define SECOND (1000 * MS)
#define ARP_BYTES 60
#define DAY (24 * 3600 * SECOND)

/* Frames. */

struct frame {
    size_t size;
    uint8_t bytes[200];
};

static void
put_u16(struct frame *f, uint16_t value)
{
    f->bytes[f->size++] = value >> 8;
    f->bytes[f->size++] = value;
}

/* Puts an Ethernet header with 'n_tags' VLAN tags. */
static void
put_eth(struct frame *f, unsigned int n_tags, uint16_t eth_type)
{
    memset(f, 0, sizeof *f);
    memset(f->bytes, 0xff, ETH_ADDR_LEN);
    f->bytes[ETH_ADDR_LEN] = 2;
    f->size = 2 * ETH_ADDR_LEN;
    for (unsigned int i = 0; i < n_tags; i++) {
        put_u16(f, i + 1 < n_tags ? ETH_TYPE_VLAN_8021AD : ETH_TYPE_VLAN);
        put_u16(f, 7);
    }
    put_u16(f, eth_type);
}

/* Puts an IPv6 header and the first byte of what follows. */
static void
put_ipv6(struct frame *f, uint8_t proto, uint8_t hop_limit, uint8_t first)
{
    f->bytes[f->size] = 0x60;
    f->bytes[f->size + 6] = proto;
    f->bytes[f->size + 7] = hop_limit;
    f->bytes[f->size + IPV6_HEADER_LEN] = first;
    f->size += IPV6_HEADER_LEN + 1;
}

/* Is the frame of 'f', cut off after 'size' bytes, address resolution? */
static bool
is_resolution(const struct frame *f, size_t size)
{
    /* Memory checkers see what is read behind it. */
    struct dp_packet packet;
    void *bytes = xmalloc(size);
    bool answer;

    memcpy(bytes, f->bytes, size);
    dp_packet_use_const(&packet, bytes, size);
    answer = shaper_control_is_resolution(&packet);
    free(bytes);
    return answer;
}

/* Checks that 'f' is address resolution as soon as 'size' bytes of it are
 * there, or never if that is 0. */
static void
check_frame(const struct frame *f, size_t size, const char *what)
{
    for (size_t i = 1; i <= f->size; i++) {
        CHECK(is_resolution(f, i) == (size && i >= size), "%s: %"PRIuSIZE
              " of %"PRIuSIZE" bytes are%s address resolution", what, i,
              f->size, is_resolution(f, i) ? "" : " not");
    }
}

static void
test_resolution(void)
{
    struct frame f;

    for (unsigned int n_tags = 0; n_tags <= 3; n_tags++) {
        size_t header = ETH_HEADER_LEN + n_tags * VLAN_HEADER_LEN;
        size_t arp = n_tags <= FLOW_MAX_VLAN_HEADERS ? header : 0;
        size_t nd = arp ? arp + IPV6_HEADER_LEN + 1 : 0;

        put_eth(&f, n_tags, ETH_TYPE_ARP);
        f.size += ARP_ETH_HEADER_LEN;
        check_frame(&f, arp, "ARP");

        for (int type = 0; type < 256; type++) {
            put_eth(&f, n_tags, ETH_TYPE_IPV6);
            put_ipv6(&f, IPPROTO_ICMPV6, 255, type);
            check_frame(&f, type >= 133 && type <= 136 ? nd : 0, "ICMPv6");
        }

        /* It has come from beyond a router, or is another protocol. */
        put_eth(&f, n_tags, ETH_TYPE_IPV6);
        put_ipv6(&f, IPPROTO_ICMPV6, 254, 135);
        check_frame(&f, 0, "ICMPv6 through a router");
        put_eth(&f, n_tags, ETH_TYPE_IPV6);
        put_ipv6(&f, IPPROTO_UDP, 255, 135);
        check_frame(&f, 0, "UDP");

        static const uint16_t types[] = {
            ETH_TYPE_IP, ETH_TYPE_RARP, ETH_TYPE_LACP, 0x8902, 0x88cc,
            ETH_TYPE_MPLS, 38,
        };
        for (size_t i = 0; i < ARRAY_SIZE(types); i++) {
            put_eth(&f, n_tags, types[i]);
            f.size += 60;
            check_frame(&f, 0, "another Ethernet type");
        }
    }
}

/* How much goes ahead. */

static struct edt_params *
rate_params(uint64_t rate_bps)
{
    const struct edt_limits limits = { .rate = rate_bps };

    return rate_bps ? edt_params_create(&limits) : NULL;
}

/* A rate that packets go ahead of. */
struct pace {
    struct edt_params *params;
    atomic_uint64_t ahead_ticks;
};

static struct pace *
pace_create(uint64_t rate_bps)
{
    struct pace *pace = xzalloc(sizeof *pace);

    pace->params = rate_params(rate_bps);
    return pace;
}

static void
pace_destroy(struct pace *pace)
{
    free(pace->params);
    free(pace);
}

static struct shaper_control_rate
control_rate(struct pace *pace)
{
    return (struct shaper_control_rate) {
        pace->params, &pace->ahead_ticks
    };
}

/* Offers packets of 'bytes' bytes of 'n_ports' ports in turn, one every
 * 'gap_ns' for 'duration_ns', to 'n_threads' threads in turn.  Returns the
 * bytes that go ahead of 'paces' and checks that it never are more than one
 * port's, and all ports' parts of 'rate_bps'. */
static uint64_t
offer(struct pace *const *paces, size_t n_paces, uint64_t rate_bps,
      size_t n_threads, size_t n_ports, uint32_t bytes, uint64_t gap_ns,
      uint64_t duration_ns, uint64_t start_ns)
{
    struct shaper_control *controls = xcalloc(n_threads, sizeof *controls);
    struct leaky_bucket *ports = xcalloc(n_ports * n_threads, sizeof *ports);
    struct leaky_bucket all = { rate_bps / 10, 0, 0, start_ns, 0 };
    struct shaper_control_rate rates[2];

    for (size_t i = 0; i < n_paces; i++) {
        rates[i] = control_rate(paces[i]);
    }
    for (size_t i = 0; i < n_ports * n_threads; i++) {
        ports[i].rate_bps = rate_bps / 100;
        ports[i].last_ns = start_ns;
    }
    for (uint64_t i = 0; i * gap_ns < duration_ns; i++) {
        size_t thread = i % n_threads, port = i / n_threads % n_ports;
        uint64_t now_ns = start_ns + i * gap_ns;

        if (shaper_control_admit(&controls[thread], rates, n_paces, port,
                                 bytes, now_ns)) {
            leaky_bucket_add(&ports[port * n_threads + thread], now_ns, bytes);
            leaky_bucket_add(&all, now_ns, bytes);
        }
    }
    for (size_t i = 0; i < n_ports * n_threads; i++) {
        CHECK(leaky_bucket_max_bytes(&ports[i]) <= SHAPER_CONTROL_BURST + 1,
              "a port sends %"PRIu64" bytes at once",
              leaky_bucket_max_bytes(&ports[i]));
    }
    CHECK(leaky_bucket_max_bytes(&all) <= 10 * SHAPER_CONTROL_BURST + 1,
          "all ports send %"PRIu64" bytes at once",
          leaky_bucket_max_bytes(&all));
    for (size_t i = 0; i < n_threads; i++) {
        shaper_control_destroy(&controls[i]);
    }
    free(controls);
    free(ports);
    return all.bytes;
}

/* Checks that 'bytes' are what 'rate_bps' allows in 'duration_ns', and a
 * 'burst' of which the last packet may not have had room. */
static void
check_bytes(uint64_t bytes, uint64_t rate_bps, uint64_t duration_ns,
            uint64_t burst, uint32_t packet, const char *what)
{
    uint64_t most = (__int128) rate_bps * duration_ns / 8000000000 + burst;

    CHECK(bytes <= most + most / 10000
          && bytes + packet + most / 1000 >= most,
          "%s: %"PRIu64" bytes rather than %"PRIu64, what, bytes, most);
}

static void
test_parts(void)
{
    for (unsigned int i = 0; i < rounds(100); i++) {
        uint64_t rate = 700 * (1500 + choose_log(100000000));
        uint64_t gap_ns = MAX(UINT64_C(8000000000) * ARP_BYTES / rate / 2, 1);
        uint64_t duration_ns = gap_ns * 100000;
        uint64_t start_ns = START_NS + choose(SECOND);
        struct pace *paces[] = { pace_create(rate),
                                        pace_create(rate / 7) };
        uint32_t size = ARP_BYTES + choose(100);
        uint64_t bytes;

        /* One port that sends twice as much as the rate. */
        bytes = offer(paces, 1, rate, 1, 1, size, gap_ns, duration_ns,
                      start_ns);
        check_bytes(bytes, rate / 100, duration_ns, SHAPER_CONTROL_BURST,
                    size, "one port");

        /* Five have five parts, and forty no more than all may have; also
         * if two threads receive from them. */
        start_ns += 100 * duration_ns;
        bytes = offer(paces, 1, rate, 1, 5, size, gap_ns, duration_ns,
                      start_ns);
        check_bytes(bytes, rate / 20, duration_ns, 5 * SHAPER_CONTROL_BURST,
                    5 * size, "five ports");
        for (size_t n_threads = 1; n_threads <= 2; n_threads++) {
            start_ns += 100 * duration_ns;
            bytes = offer(paces, 1, rate, n_threads, 40, size, gap_ns,
                          duration_ns, start_ns);
            check_bytes(bytes, rate / 10, duration_ns,
                        10 * SHAPER_CONTROL_BURST, size, "forty ports");
        }

        /* The slower of two rates counts. */
        start_ns += 100 * duration_ns;
        bytes = offer(paces, 2, rate / 7, 1, 1, size, gap_ns, duration_ns,
                      start_ns);
        check_bytes(bytes, rate / 700, duration_ns, SHAPER_CONTROL_BURST,
                    size, "two rates");

        pace_destroy(paces[0]);
        pace_destroy(paces[1]);
    }
}

/* What was used at a rate of 1 kbit/s, or a long time ago, is not owed. */
static void
test_long_ago(void)
{
    static const uint64_t ages[] = {
        SECOND, DAY, 52 * DAY, 104 * DAY, 105 * DAY, 208 * DAY, 209 * DAY,
        UINT64_C(1000) * DAY,
    };

    for (size_t i = 0; i < ARRAY_SIZE(ages); i++) {
        struct pace *slow = pace_create(1000);
        struct pace *pace = pace_create(100000000);
        struct shaper_control control = { NULL, 0 };
        struct shaper_control_rate rate = control_rate(slow);
        uint64_t now_ns = START_NS;
        size_t n = 0;

        while (shaper_control_admit(&control, &rate, 1, 300, ARP_BYTES,
                                    now_ns)) {
            n++;
        }
        CHECK(n == SHAPER_CONTROL_BURST / ARP_BYTES, "%"PRIuSIZE" at once", n);

        /* At 1 Mbit/s the burst takes 12 ms. */
        now_ns += ages[i];
        rate = control_rate(pace);
        atomic_store_relaxed(&pace->ahead_ticks, START_NS << EDT_TICK_SHIFT);
        for (int j = 0; j < 13; j++) {
            shaper_control_admit(&control, &rate, 1, 300, ARP_BYTES, now_ns);
            now_ns += MS;
        }
        CHECK(shaper_control_admit(&control, &rate, 1, 300, ARP_BYTES, now_ns),
              "nothing goes ahead %"PRIu64" s later", ages[i] / SECOND);
        shaper_control_destroy(&control);
        pace_destroy(slow);
        pace_destroy(pace);
    }
}

/* Shapers. */

/* Who has sent a packet, in its last byte but three. */
enum sender { TENANT, SWITCH, ARP, FORGED, MAIN, N_SENDERS };

/* Shapers of one port in several threads, and what has left. */
#define MAX_THREADS 2
struct bed {
    struct shaper_config *config;
    size_t n_threads;
    struct shaper_thread *threads[MAX_THREADS];
    struct flow_shaper *shapers[MAX_THREADS];
    uint64_t now_ns;
    struct leaky_bucket sent;
    uint64_t packets[N_SENDERS];
    uint64_t bytes[N_SENDERS];
    uint64_t last_edt_ns;           /* Of what the switch has sent. */
};

/* Creates shapers of a port, and of its only queue, with these rates, 0 for
 * none, in PMD threads, the second one in the main thread. */
static void
bed_init(struct bed *b, uint64_t port_bps, uint64_t queue_bps,
         size_t n_threads)
{
    struct shaper_config *config = xzalloc(sizeof *config);
    struct edt_pace *pace;

    memset(b, 0, sizeof *b);
    ovs_refcount_init(&config->ref_cnt);
    config->wheel = MLTW_CONFIG_DEFAULT;
    config->max_delay_ns = 50 * MS;
    config->ecn_threshold_ns = UINT64_MAX;
    config->max_backlog = 1 << 18;
    config->max_batch = 128;
    config->max_flows = 65536;
    config->paced = port_bps || queue_bps;
    config->port_params = rate_params(port_bps);
    pace = edt_pace_create(port_bps);
    config->port_pace = port_bps ? edt_pace_ref(pace) : NULL;
    config->n_classes = 1;
    config->classes = xzalloc(sizeof *config->classes);
    config->classes[0].params = rate_params(queue_bps);
    if (config->paced) {
        const struct edt_class_limits limits = {
            .weight = 1,
            .max_bps = queue_bps,
        };

        config->classes[0].pace = edt_class_create(pace, &limits);
    }
    edt_pace_unref(pace);
    b->config = config;
    b->n_threads = n_threads;
    b->now_ns = b->sent.last_ns = START_NS;
    b->sent.rate_bps = port_bps ? port_bps : queue_bps;
    for (size_t i = 0; i < n_threads; i++) {
        b->threads[i] = shaper_thread_create();
        b->shapers[i] = flow_shaper_create(config, b->threads[i],
                                           i ? NON_PMD_CORE_ID : 3,
                                           b->now_ns);
    }
}

static void
bed_destroy(struct bed *b)
{
    for (size_t i = 0; i < b->n_threads; i++) {
        flow_shaper_destroy(b->shapers[i]);
        shaper_thread_destroy(b->threads[i]);
    }
    shaper_config_unref(b->config);
}

/* Returns a packet of 'size' bytes of 'sender' to destination 'dst'. */
static struct dp_packet *
bed_packet(enum sender sender, uint32_t dst, uint32_t size, uint64_t edt_ns)
{
    struct dp_packet *packet = dp_packet_new(size);
    uint8_t *data = dp_packet_put_zeros(packet, size);
    ovs_be32 be32 = htonl(dst);

    data[0] = 2;
    memcpy(data + 2, &be32, sizeof be32);
    if (sender == ARP) {
        memset(data, 0xff, ETH_ADDR_LEN);
        data[12] = 0x08, data[13] = 0x06;
    } else if (sender == FORGED && dst % 2) {
        data[12] = 0x88, data[13] = dst % 4 == 1 ? 0x09 : 0xcc;
    } else {
        data[12] = 0x08;
        data[14] = 0x45;
        data[23] = IPPROTO_UDP;
        memcpy(data + 30, &be32, sizeof be32);
        if (sender == FORGED) {
            /* BFD's destination port. */
            data[36] = 3784 >> 8, data[37] = 3784 & 0xff;
        }
    }
    data[size - 4] = sender;
    pkt_metadata_init(&packet->md, ODPP_NONE);
    if (edt_ns) {
        pkt_metadata_set_edt(&packet->md, &(struct edt_stamp) {
            .edt_ns = edt_ns,
            .chain = 1,
            .gap_ns = 1000,
            .flags = EDT_PROMISED,
        });
    }
    return packet;
}

/* Counts the packets of 'batch', which leave. */
static void
bed_sent(struct bed *b, struct dp_packet_batch *batch)
{
    struct dp_packet *packet;

    DP_PACKET_BATCH_FOR_EACH (i, packet, batch) {
        uint32_t size = dp_packet_size(packet);
        uint8_t sender = ((uint8_t *) dp_packet_data(packet))[size - 4];
        uint64_t edt_ns = pkt_metadata_edt_ns(&packet->md);

        CHECK(edt_ns <= b->now_ns, "leaves %"PRIu64" ns early",
              edt_ns - b->now_ns);
        if (sender == SWITCH && edt_ns) {
            CHECK(edt_ns >= b->last_edt_ns, "out of order");
            b->last_edt_ns = edt_ns;
        }
        b->packets[sender]++;
        b->bytes[sender] += size;
        leaky_bucket_add(&b->sent, b->now_ns, size);
    }
    dp_packet_delete_batch(batch, true);
}

/* Offers a packet, which 'port' has received, to the shaper of thread
 * 'thread'. */
static void
bed_offer(struct bed *b, size_t thread, uint16_t port, enum sender sender,
          uint32_t dst, uint32_t size, uint64_t edt_ns)
{
    struct shaper_source source = { port, SHAPER_NO_RXQ };
    struct dp_packet_batch batch;

    dp_packet_batch_init_packet(&batch, bed_packet(sender, dst, size, edt_ns));
    flow_shaper_enqueue(b->shapers[thread], &batch, &source, b->now_ns);
    bed_sent(b, &batch);
}

static void
bed_drain(struct bed *b, size_t thread)
{
    struct flow_shaper *s = b->shapers[thread];
    struct dp_packet_batch batch;
    size_t n_sent = 0;

    dp_packet_batch_init(&batch);
    while (flow_shaper_drain(s, &batch, b->now_ns)) {
        n_sent += dp_packet_batch_size(&batch);
        bed_sent(b, &batch);
        dp_packet_batch_init(&batch);
    }
    flow_shaper_end_drain(s, n_sent, b->now_ns);
}

static uint64_t
bed_total(const struct bed *b)
{
    uint64_t total = 0;

    for (int i = 0; i < N_SENDERS; i++) {
        total += b->bytes[i];
    }
    return total;
}

/* Has tenants, whose meters let that pass, offer three times 'rate_bps' for
 * 'duration_ns' to 1000 destinations, in thread 0, which is polled every
 * 10 us, and lets 'other' do what it wants each time. */
static void
bed_flood(struct bed *b, uint64_t rate_bps, uint64_t duration_ns,
          void (*other)(struct bed *, void *), void *aux)
{
    uint64_t end_ns = b->now_ns + duration_ns;
    uint64_t offered = 0;
    uint64_t start_ns = b->now_ns;

    while (b->now_ns < end_ns) {
        while (offered < (__int128) 3 * rate_bps * (b->now_ns - start_ns)
                         / 8000000000) {
            bed_offer(b, 0, 1, TENANT, choose(1000), 1500, b->now_ns);
            offered += 1500;
        }
        if (other) {
            other(b, aux);
        }
        bed_drain(b, 0);
        b->now_ns += 10000;
    }
}

struct talk {
    uint64_t gap_ns;
    uint64_t next_ns;
    uint64_t n;                     /* Packets offered. */
    uint16_t port;
    enum sender sender;
    size_t thread;
    uint32_t size;
    uint64_t wait_ns;               /* Until its EDT, if not 0. */
    uint64_t max_late_ns;
};

/* Offers a packet every 'gap_ns'. */
static void
talk(struct bed *b, void *aux)
{
    struct talk *t = aux;

    while (t->next_ns <= b->now_ns) {
        bed_offer(b, t->thread, t->port, t->sender, t->n++, t->size,
                  t->wait_ns ? b->now_ns + t->wait_ns : 0);
        t->next_ns += t->gap_ns;
    }
}

/* Checks that 'b' has sent at 'rate_bps', and 'extra_bytes' more at once. */
static void
check_port(const struct bed *b, uint64_t rate_bps, uint64_t duration_ns,
           uint64_t extra_bytes)
{
    uint64_t exact = (__int128) rate_bps * duration_ns / 8000000000;

    CHECK(bed_total(b) <= exact + exact / 500 + extra_bytes
          && bed_total(b) + exact / 500 + 3000 >= exact,
          "%"PRIu64" bytes have left rather than %"PRIu64, bed_total(b),
          exact);
    CHECK(leaky_bucket_max_bytes(&b->sent)
          <= 3000 + extra_bytes + rate_bps / 8 / 100000 * 3,
          "a burst of %"PRIu64" bytes", leaky_bucket_max_bytes(&b->sent));
}

/* What the switch sends leaves at once, however much waits, and the port's
 * rate is what it is. */
static void
test_own(void)
{
    const uint64_t rate = 100000000, duration_ns = SECOND;

    for (int paced = 0; paced < 2; paced++) {
        struct talk own = {
            .gap_ns = MS, .next_ns = START_NS, .sender = SWITCH,
            .port = SHAPER_NO_SOURCE, .size = 100,
        };
        struct shaper_stats stats;
        struct bed b;

        bed_init(&b, paced ? 0 : rate, paced ? rate : 0, 1);
        bed_flood(&b, rate, duration_ns, talk, &own);
        CHECK(b.packets[SWITCH] == 1000 && own.n == 1000,
              "%"PRIu64" of %"PRIu64" have left", b.packets[SWITCH], own.n);
        check_port(&b, rate, duration_ns, 0);
        memset(&stats, 0, sizeof stats);
        flow_shaper_get_stats(b.shapers[0], &stats);
        CHECK(stats.counters[SHAPER_AHEAD] == 1000, "%"PRIu64" counted",
              stats.counters[SHAPER_AHEAD]);

        /* All of the rate, and twice of it, for a while: it leaves, and when
         * that is over others have their rate after 12 ms. */
        own.size = 1500;
        own.gap_ns = 60000;
        own.n = 0;
        bed_flood(&b, rate, duration_ns, talk, &own);
        CHECK(b.packets[SWITCH] == 1000 + own.n, "%"PRIu64" of %"PRIu64
              " have left", b.packets[SWITCH], own.n);
        memset(b.bytes, 0, sizeof b.bytes);
        bed_flood(&b, rate, 20 * MS, NULL, NULL);
        CHECK(b.bytes[TENANT] >= rate / 8 / 1000 * 8,
              "%"PRIu64" bytes in 20 ms", b.bytes[TENANT]);
        bed_destroy(&b);
    }
}

/* What the switch sends through a meter leaves at its time, not before and no
 * later than a poll, ahead of what waits. */
static void
test_own_stamped(void)
{
    const uint64_t rate = 100000000, duration_ns = SECOND;

    for (int i = 0; i < 2; i++) {
        struct talk own = {
            .gap_ns = MS, .next_ns = START_NS, .sender = SWITCH,
            .port = SHAPER_NO_SOURCE, .size = 100, .wait_ns = 7 * MS + 3000,
        };
        struct bed b;

        bed_init(&b, i ? 0 : rate, i ? rate : 0, 1);
        bed_flood(&b, rate, 100 * MS, talk, &own);
        for (uint64_t now_ns = b.now_ns; b.now_ns < now_ns + duration_ns;) {
            uint64_t due = 0;

            bed_flood(&b, rate, MS, talk, &own);
            for (uint64_t t = 0; t < own.n; t++) {
                due += START_NS + t * MS + own.wait_ns + 10000 + 8192
                       < b.now_ns;
            }
            CHECK(b.packets[SWITCH] >= due, "%"PRIu64" of %"PRIu64" that are "
                  "due have left", b.packets[SWITCH], due);
        }
        check_port(&b, rate, duration_ns + 100 * MS, 0);
        bed_destroy(&b);
    }
}

/* A flood of ARP has 1 % ahead of others; the rest is one FIFO of many.  What
 * another port resolves meanwhile is not held up, with a meter or without. */
static void
test_arp_flood(void)
{
    const uint64_t rate = 100000000, duration_ns = SECOND;

    for (int stamped = 0; stamped < 2; stamped++) {
        uint64_t ahead = rate / 100 * duration_ns / 8000000000;
        /* At twice the rate. */
        struct talk flood = {
            .gap_ns = 2400, .next_ns = START_NS, .sender = ARP, .port = 2,
            .size = ARP_BYTES,
        };
        struct shaper_stats stats;
        struct bed b;
        uint64_t before;

        bed_init(&b, rate, 0, 1);
        bed_flood(&b, rate, duration_ns, talk, &flood);
        memset(&stats, 0, sizeof stats);
        flow_shaper_get_stats(b.shapers[0], &stats);
        check_bytes(stats.counters[SHAPER_AHEAD] * ARP_BYTES, rate / 100,
                    duration_ns, SHAPER_CONTROL_BURST, ARP_BYTES, "ahead");
        check_port(&b, rate, duration_ns, SHAPER_CONTROL_BURST);
        /* 1,000 others have a turn for each of its own, of 1,500 bytes. */
        CHECK(b.bytes[ARP] <= ahead + SHAPER_CONTROL_BURST + ahead / 4,
              "%"PRIu64" bytes of ARP have left, %"PRIu64" ahead",
              b.bytes[ARP], ahead);

        /* Another port asks ten times a second. */
        for (int i = 0; i < 10; i++) {
            uint64_t waits = stamped ? 5 * MS + 500 : 0;

            bed_flood(&b, rate, 50 * MS, talk, &flood);
            memset(&stats, 0, sizeof stats);
            flow_shaper_get_stats(b.shapers[0], &stats);
            before = stats.counters[SHAPER_AHEAD];
            bed_offer(&b, 0, 3, ARP, 0, ARP_BYTES,
                      waits ? b.now_ns + waits : 0);
            memset(&stats, 0, sizeof stats);
            flow_shaper_get_stats(b.shapers[0], &stats);
            CHECK(stats.counters[SHAPER_AHEAD] == before + !stamped,
                  "does not leave at once");
            if (stamped) {
                uint64_t arp = b.bytes[ARP];

                /* With nothing else that is ahead. */
                bed_flood(&b, rate, 5 * MS, NULL, NULL);
                /* It is another one's turn, of as many bytes as others'. */
                CHECK(b.bytes[ARP] <= arp + SHAPER_CONTROL_BURST
                                      + 2 * ARP_BYTES, "early");
                memset(&stats, 0, sizeof stats);
                flow_shaper_get_stats(b.shapers[0], &stats);
                CHECK(stats.counters[SHAPER_AHEAD] == before, "early");
                bed_flood(&b, rate, 30000, NULL, NULL);
                memset(&stats, 0, sizeof stats);
                flow_shaper_get_stats(b.shapers[0], &stats);
                CHECK(stats.counters[SHAPER_AHEAD] == before + 1, "late");
                flood.next_ns = b.now_ns;
            }
        }
        bed_destroy(&b);
    }
}

/* Twenty ports that all flood have 10 %. */
static void
test_arp_flood_of_all(void)
{
    const uint64_t rate = 100000000, duration_ns = SECOND;
    struct shaper_stats stats;
    struct bed b;

    bed_init(&b, rate, 0, 1);
    for (uint64_t i = 0; i < duration_ns / 10000; i++) {
        bed_offer(&b, 0, 10 + i % 20, ARP, 0, ARP_BYTES, 0);
        bed_offer(&b, 0, 10 + i % 20, ARP, 0, ARP_BYTES, 0);
        bed_offer(&b, 0, 1, TENANT, i % 100, 1500, 0);
        bed_drain(&b, 0);
        b.now_ns += 10000;
    }
    memset(&stats, 0, sizeof stats);
    flow_shaper_get_stats(b.shapers[0], &stats);
    check_bytes(stats.counters[SHAPER_AHEAD] * ARP_BYTES, rate / 10,
                duration_ns, 10 * SHAPER_CONTROL_BURST, ARP_BYTES, "ahead");
    check_port(&b, rate, duration_ns, 10 * SHAPER_CONTROL_BURST);
    bed_destroy(&b);
}

/* A tenant's LACP, BFD and LLDP wait like anything else. */
static void
test_forged(void)
{
    const uint64_t rate = 100000000;
    struct talk forged = {
        .gap_ns = 100000, .next_ns = START_NS, .sender = FORGED, .port = 2,
        .size = 1500,
    };
    struct shaper_stats stats;
    struct bed b;

    bed_init(&b, rate, 0, 1);
    for (uint32_t i = 0; i < 4; i++) {
        bed_offer(&b, 0, 2, FORGED, i, 100, 0);
    }
    CHECK(!bed_total(&b), "leaves at once");
    bed_flood(&b, rate, SECOND, talk, &forged);
    memset(&stats, 0, sizeof stats);
    flow_shaper_get_stats(b.shapers[0], &stats);
    CHECK(!stats.counters[SHAPER_AHEAD], "%"PRIu64" go ahead",
          stats.counters[SHAPER_AHEAD]);
    CHECK(b.packets[FORGED] < forged.n * 9 / 10, "%"PRIu64" of %"PRIu64
          " have left", b.packets[FORGED], forged.n);
    check_port(&b, rate, SECOND, 0);
    bed_destroy(&b);
}

/* What a port's main thread shaper holds, polled every few ms, has up to half
 * of the rate beside a PMD thread that polls all the time. */
struct seldom {
    struct talk talk;
    uint64_t next_poll_ns;
};

static void
poll_seldom(struct bed *b, void *aux)
{
    struct seldom *seldom = aux;

    talk(b, &seldom->talk);
    if (b->now_ns >= seldom->next_poll_ns) {
        seldom->next_poll_ns = b->now_ns + 1 * MS + choose(4 * MS);
        bed_drain(b, 1);
    }
}

static void
test_main_thread(void)
{
    const uint64_t rate = 100000000, duration_ns = SECOND;

    for (int i = 0; i < 8; i++) {
        bool flooded = i % 2;
        /* 24 Mbit/s, or three times the rate. */
        struct seldom seldom = {
            .talk = {
                .gap_ns = flooded ? 40000 : 500000, .next_ns = START_NS,
                .sender = MAIN, .port = 9, .size = 1500, .thread = 1,
            },
            .next_poll_ns = START_NS,
        };
        uint64_t exact = rate / 8 * (duration_ns / SECOND);
        struct bed b;

        bed_init(&b, i & 2 ? rate : 0, i & 4 || !(i & 2) ? rate : 0, 2);
        bed_flood(&b, rate, duration_ns, poll_seldom, &seldom);
        if (flooded) {
            CHECK(b.bytes[MAIN] >= exact / 2 - exact / 20
                  && b.bytes[MAIN] <= exact / 2 + exact / 20,
                  "the main thread has sent %"PRIu64" bytes of %"PRIu64,
                  b.bytes[MAIN], exact);
        } else {
            CHECK(b.packets[MAIN] + 12 >= seldom.talk.n,
                  "%"PRIu64" of %"PRIu64" have left", b.packets[MAIN],
                  seldom.talk.n);
        }
        CHECK(bed_total(&b) <= exact + exact / 50
              && bed_total(&b) >= exact - exact / 100,
              "%"PRIu64" bytes have left rather than %"PRIu64, bed_total(&b),
              exact);
        bed_destroy(&b);
    }
}

static const struct test tests[] = {
    { "resolution", test_resolution },
    { "parts", test_parts },
    { "long-ago", test_long_ago },
    { "own", test_own },
    { "own-stamped", test_own_stamped },
    { "arp-flood", test_arp_flood },
    { "arp-flood-of-all", test_arp_flood_of_all },
    { "forged", test_forged },
    { "main-thread", test_main_thread },
};

int
main(int argc, char *argv[])
{
    return run_tests(argc, argv, tests, ARRAY_SIZE(tests));
}
