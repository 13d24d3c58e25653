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

/* Tests of fair meters ("edt-late.h"), as they are used: meters stamp, a
 * shaper holds, and what leaves when is compared with what should.  Time is
 * simulated; rates are checked by token buckets. */

#include <config.h>
#undef NDEBUG

#include "edt-late.h"
#include "edt-meter.h"
#include "edt-stamp.h"
#include "flow-shaper.h"

#include "dp-packet.h"
#include "edt-chains.h"
#include "fb-test.h"
#include "odp-util.h"
#include "packets.h"

#define MTU EDT_MTU_BYTES
#define START_NS UINT64_C(100000000000000)
#define US UINT64_C(1000)
#define MS UINT64_C(1000000)
#define MBPS UINT64_C(1000000)
#define MAX_METERS 4
#define MAX_FLOWS 64
#define MAX_PACKETS 200000

/* MLTW lets a packet wait for its slot, at most. */
#define GRANULARITY_NS UINT64_C(65536)

/* Packets of one connection: which meters they pass, and what became of
 * them. */
struct test_flow {
    int meters[3];              /* -1: none, and none after it. */
    uint32_t size;
    uint32_t n_sent;            /* By the source. */
    uint32_t n_seen;            /* They left, in this order. */
    uint64_t bytes;             /* That left. */
    uint64_t max_wait_ns;
};

static struct edt_meter meters[MAX_METERS];
static struct leaky_bucket buckets[MAX_METERS];
static struct test_flow flows[MAX_FLOWS];
static size_t n_flows;
static uint64_t now_ns;
static struct flow_shaper *shapers[2];
static struct shaper_thread *threads[2];
static struct edt_chains *chains;
static size_t n_dropped;
static bool any_order;          /* May packets of a flow overtake others? */
static size_t n_ahead;          /* Packets that have, or others dropped. */

/* Times of arrival, by the numbers that packets carry. */
static uint64_t arrivals[MAX_PACKETS];
static uint32_t n_packets;

static struct edt_meter *
find(const void *aux OVS_UNUSED, uint32_t id)
{
    return id < MAX_METERS ? &meters[id] : NULL;
}

static void
set_meter(int id, uint64_t rate_bps, uint64_t burst_bytes,
          uint64_t max_delay_us, bool fair)
{
    const struct edt_limits limits = {
        .rate = rate_bps,
        .burst = burst_bytes,
        .max_delay_us = max_delay_us,
        .fair = fair,
    };

    edt_meter_set_params(&meters[id], rate_bps ? edt_params_create(&limits)
                                               : NULL, now_ns);
    buckets[id].rate_bps = rate_bps;
}

static void
begin(void)
{
    struct shaper_config *config = xzalloc(sizeof *config);

    ovs_refcount_init(&config->ref_cnt);
    config->wheel = MLTW_CONFIG_DEFAULT;
    config->max_delay_ns = 50 * MS;
    config->ecn_threshold_ns = UINT64_MAX;
    config->max_backlog = 1 << 18;
    config->max_batch = 128;
    config->max_flows = 4096;
    config->classes = xcalloc(1, sizeof *config->classes);
    config->n_classes = 1;

    chains = edt_chains_create(EDT_CHAINS_MAX);
    now_ns = START_NS;
    n_flows = n_packets = n_dropped = n_ahead = 0;
    any_order = false;
    memset(flows, 0, sizeof flows);
    memset(buckets, 0, sizeof buckets);
    for (int i = 0; i < MAX_METERS; i++) {
        edt_meter_init(&meters[i], NULL);
        edt_meter_reset(&meters[i], now_ns);
        buckets[i].last_ns = now_ns;
    }
    for (int i = 0; i < ARRAY_SIZE(shapers); i++) {
        threads[i] = shaper_thread_create();
        threads[i]->meters.find = find;
        threads[i]->chains = chains;
        shapers[i] = flow_shaper_create(config, threads[i], i, now_ns);
    }
    shaper_config_unref(config);
}

static void
end(void)
{
    for (int i = 0; i < ARRAY_SIZE(shapers); i++) {
        flow_shaper_destroy(shapers[i]);
        shaper_thread_destroy(threads[i]);
    }
    edt_chains_destroy(chains);
    for (int i = 0; i < MAX_METERS; i++) {
        edt_meter_destroy(&meters[i]);
    }
}

static struct test_flow *
add_flow(uint32_t size, int first, int second, int third)
{
    struct test_flow *f = &flows[n_flows++];

    f->meters[0] = first;
    f->meters[1] = second;
    f->meters[2] = third;
    f->size = size;
    return f;
}

static struct dp_packet *
packet_create(const struct test_flow *f)
{
    struct dp_packet *packet = dp_packet_new(f->size);
    uint8_t *data = dp_packet_put_zeros(packet, f->size);
    uint16_t port = f - flows;
    uint32_t number[2] = { f->n_sent, n_packets };

    ovs_assert(f->size >= 64 && n_packets < MAX_PACKETS);
    data[12] = 0x08;
    data[14] = 0x45;
    data[23] = IPPROTO_TCP;
    data[26] = 10;
    data[30] = 10;
    memcpy(data + 34, &port, sizeof port);
    memcpy(data + 56, number, sizeof number);
    pkt_metadata_init(&packet->md, ODPP_NONE);
    return packet;
}

/* Lets 'n' packets of 'f', at most a batch, come to shaper 's'. */
static void
offer(struct test_flow *f, int n, int s)
{
    struct shaper_source sources[NETDEV_MAX_BURST];
    struct dp_packet_batch batch;
    struct edt_chain chain = { .n = 0 };

    dp_packet_batch_init(&batch);
    for (int i = 0; i < n; i++) {
        dp_packet_batch_add(&batch, packet_create(f));
        arrivals[n_packets++] = now_ns;
        f->n_sent++;
        sources[i] = (struct shaper_source) { .port = 1, .rxq = 1 };
    }
    for (int i = 0; i < 3 && f->meters[i] >= 0; i++) {
        struct edt_meter *meter = &meters[f->meters[i]];
        const struct edt_params *p = edt_meter_params(meter);
        struct edt_stamp_result result;

        if (p) {
            edt_stamp_batch(chains, &chain, meter, p, f->meters[i], &batch,
                            UINT32_MAX, now_ns, &result);
            n_dropped += result.n_dropped;
        }
    }
    flow_shaper_enqueue(shapers[s], &batch, sources, now_ns);
    dp_packet_delete_batch(&batch, true);
}

/* A packet leaves. */
static void
leave(const struct dp_packet *packet)
{
    const uint8_t *data = dp_packet_data(packet);
    uint32_t number[2];
    struct test_flow *f;
    uint16_t port;

    memcpy(&port, data + 34, sizeof port);
    memcpy(number, data + 56, sizeof number);
    f = &flows[port];
    CHECK(any_order || number[0] >= f->n_seen,
          "packet %"PRIu32" of flow %d after %"PRIu32, number[0], port,
          f->n_seen);
    n_ahead += number[0] > f->n_seen;
    f->n_seen = MAX(f->n_seen, number[0] + 1);
    f->bytes += dp_packet_size(packet);
    f->max_wait_ns = MAX(f->max_wait_ns, now_ns - arrivals[number[1]]);
    for (int i = 0; i < 3 && f->meters[i] >= 0; i++) {
        leaky_bucket_add(&buckets[f->meters[i]], now_ns,
                         dp_packet_size(packet));
    }
}

/* Polls the shapers now. */
static void
drain(void)
{
    for (int i = 0; i < ARRAY_SIZE(shapers); i++) {
        struct dp_packet_batch batch;
        struct dp_packet *packet;
        size_t n, sent = 0;

        dp_packet_batch_init(&batch);
        while ((n = flow_shaper_drain(shapers[i], &batch, now_ns))) {
            DP_PACKET_BATCH_FOR_EACH (j, packet, &batch) {
                leave(packet);
            }
            dp_packet_delete_batch(&batch, true);
            sent += n;
        }
        flow_shaper_end_drain(shapers[i], sent, now_ns);
    }
}

static uint64_t
shaper_drops(void)
{
    struct shaper_stats stats;

    memset(&stats, 0, sizeof stats);
    for (int i = 0; i < ARRAY_SIZE(shapers); i++) {
        flow_shaper_get_stats(shapers[i], &stats);
    }
    return stats.counters[SHAPER_DROP_MAX_DELAY];
}

/* Lets time pass for 'duration_ns' with a poll each 'poll_ns', while each of
 * the flows from the 'first' to the 'n'th keeps 'window' packets waiting, in
 * shaper 0 or, if 'both', in one of the two by turns. */
static void
run(uint64_t duration_ns, uint64_t poll_ns, size_t first, size_t n,
    uint32_t window, bool both)
{
    uint64_t end_ns = now_ns + duration_ns;

    while (now_ns < end_ns) {
        for (size_t i = first; i < n; i++) {
            struct test_flow *f = &flows[i];

            while (f->n_sent - f->n_seen < window) {
                offer(f, MIN(window - (f->n_sent - f->n_seen),
                             NETDEV_MAX_BURST), both ? i % 2 : 0);
            }
        }
        now_ns += poll_ns;
        drain();
    }
}

/* Checks that 'f' has got 'bps' in 'duration_ns', to 'tolerance' of it. */
static void
check_rate(const struct test_flow *f, uint64_t duration_ns, double bps,
           double tolerance)
{
    double got = f->bytes * 8e9 / duration_ns;

    CHECK(got > bps * (1 - tolerance) && got < bps * (1 + tolerance),
          "flow %"PRIdSIZE" got %.0f rather than %.0f bit/s", f - flows, got,
          bps);
}

/* Checks that no meter let more through than its rate and burst allow: a poll
 * may be 'poll_ns' late, a packet by its slot, too, and then others follow on
 * time. */
static void
check_bursts(uint64_t burst_bytes, uint64_t poll_ns)
{
    for (int i = 0; i < MAX_METERS; i++) {
        const struct leaky_bucket *b = &buckets[i];
        uint64_t limit = MAX(burst_bytes, MTU) + MTU
                         + b->rate_bps * (poll_ns + GRANULARITY_NS) / 8e9;

        CHECK(!b->rate_bps || leaky_bucket_max_bytes(b) <= limit,
              "meter %d let %"PRIu64" bytes through at once rather than "
              "%"PRIu64, i, leaky_bucket_max_bytes(b), limit);
    }
}

/* Checks the totals of meters.  (A packet that waits for one of its two meters
 * may leave together with others that have waited for the other one, so there
 * is no such bound on bursts for chains.)  What has left had reserved time
 * that was no further ahead than the longest wait. */
static void
check_totals(uint64_t burst_bytes, uint64_t max_delay_ns)
{
    for (int i = 0; i < MAX_METERS; i++) {
        const struct leaky_bucket *b = &buckets[i];
        double limit = MAX(burst_bytes, MTU) + MTU
                       + b->rate_bps * (double) (now_ns - START_NS
                                                 + max_delay_ns) / 8e9;

        CHECK(!b->rate_bps || b->bytes <= limit, "meter %d let %"PRIu64
              " bytes through rather than %.0f", i, b->bytes, limit);
    }
}

/* Flows that always have something to send get equal parts of the rate, be
 * their packets small or large, at polls often and seldom, and all of it. */
static void
test_share(void)
{
    static const struct {
        uint64_t bps, poll_ns;
    } cases[] = {
        { 10 * MBPS, 10 * US }, { 100 * MBPS, 3 * US }, { 1000 * MBPS, US },
        { 1000 * MBPS, 100 * US }, { 10000 * MBPS, 50 * US },
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        const uint64_t poll_ns = cases[i].poll_ns;
        /* Of 3,000 MTUs. */
        uint64_t duration_ns = 3000 * MTU * 8000000000 / cases[i].bps;

        begin();
        set_meter(0, cases[i].bps, 0, 10000000, true);
        add_flow(MTU, 0, -1, -1);
        add_flow(MTU, 0, -1, -1);
        add_flow(MTU / 2, 0, -1, -1);
        add_flow(100, 0, -1, -1);
        run(duration_ns, poll_ns, 0, 4, 700, false);
        for (size_t j = 0; j < 4; j++) {
            /* 750 turns of MTU / 100 packets, or of the one that fits; half a
             * turn at the beginning. */
            check_rate(&flows[j], duration_ns,
                       (double) cases[i].bps / 4
                       * (j == 3 ? 1500. / MTU : 1), 0.02);
        }
        check_bursts(0, poll_ns);
        CHECK(leaky_bucket_max_bytes(&buckets[0]) && buckets[0].bytes * 8e9
              > 0.998 * cases[i].bps * duration_ns,
              "%"PRIu64" of %.0f bytes", buckets[0].bytes,
              cases[i].bps / 8e9 * duration_ns);
        end();
    }
}

/* Turns of many small packets fill batches before all that is due has had its
 * turn: no packet gets lost. */
static void
test_full_batches(void)
{
    for (size_t size = 64; size < MTU; size += 50) {
        uint64_t n_sent = 0, n_left = 0;

        begin();
        set_meter(0, 1000 * MBPS, 0, 10000000, true);
        for (int i = 0; i < 8; i++) {
            add_flow(size, 0, -1, -1);
        }
        run(20 * MS, 100 * US, 0, 8, 700, false);
        while (flow_shaper_backlog(shapers[0])) {
            now_ns += 100 * US;
            drain();
        }
        for (size_t i = 0; i < 8; i++) {
            n_sent += flows[i].n_sent;
            n_left += flows[i].bytes / size;
        }
        CHECK(n_left > 500 && n_left + n_dropped + shaper_drops() == n_sent,
              "%"PRIu64" packets of %"PRIuSIZE" bytes sent, but %"PRIu64
              " left and %"PRIu64" dropped", n_sent, size, n_left,
              n_dropped + shaper_drops());
        end();
    }
}

/* A single packet does not wait for what others have had waiting, only for a
 * turn of each; at a meter that is not fair it does. */
static void
test_small(void)
{
    for (int fair = 0; fair < 2; fair++) {
        uint64_t mtu_ns = MTU * 8000 / 100;
        struct test_flow *small;

        begin();
        set_meter(0, 100 * MBPS, 0, 100000, fair);
        for (int i = 0; i < 3; i++) {
            add_flow(MTU, 0, -1, -1);
        }
        small = add_flow(100, 0, -1, -1);
        run(10 * MS, US, 0, 3, 80, false);
        for (int i = 0; i < 100; i++) {
            offer(small, 1, 0);
            run(10 * MS, US, 0, 3, 80, false);
        }
        if (fair) {
            CHECK(small->max_wait_ns <= 4 * mtu_ns + GRANULARITY_NS + US,
                  "a small flow's packet waited for %"PRIu64" ns",
                  small->max_wait_ns);
        } else {
            CHECK(small->max_wait_ns >= 200 * mtu_ns, "a meter that is not "
                  "fair let a packet wait for only %"PRIu64" ns",
                  small->max_wait_ns);
        }
        check_bursts(0, US);
        end();
    }
}

/* Chains of meters: a tenant's and a destination's, and one more. */
static void
test_chain(void)
{
    for (int i = 0; i < 4; i++) {
        struct test_flow *a, *b, *c;

        begin();
        /* Each must keep its rate whatever the others are. */
        set_meter(0, 100 * MBPS, 0, 10000000, i != 1);
        set_meter(1, 30 * MBPS, 0, 10000000, i != 2);
        set_meter(2, 20 * MBPS, 0, 10000000, i != 3);
        a = add_flow(MTU, 0, 1, -1);
        b = add_flow(MTU, 0, -1, -1);
        c = add_flow(MTU, 0, 1, 2);
        run(2000 * MS, 5 * US, 0, 3, 40, false);
        check_totals(0, 10000 * MS);
        if (!i) {
            /* The destination's rate is shared by two, the tenant's rest is
             * the third one's. */
            check_rate(a, 2000 * MS, 15e6, 0.02);
            check_rate(c, 2000 * MS, 15e6, 0.02);
            check_rate(b, 2000 * MS, 70e6, 0.02);
        }
        CHECK(a->n_seen && b->n_seen && c->n_seen, "a flow starved");
        end();
    }
}

/* Two meters of a row are fair wherever one that is not stands: a single
 * packet does not wait for more than turns, and the lower rate is used up. */
static void
test_row(void)
{
    for (int early = 0; early < 3; early++) {
        const uint64_t rates_mbps[] = { 40, 30, 20 };
        uint64_t mtu_ns = MTU * 8000 / 20;
        struct test_flow *bulk[2], *small;

        begin();
        for (int i = 0; i < 3; i++) {
            set_meter(i, i == early ? 1000 * MBPS : rates_mbps[i] * MBPS, 0,
                      10000000, i != early);
        }
        if (early == 2) {
            mtu_ns = MTU * 8000 / 30;
        }
        bulk[0] = add_flow(MTU, 0, 1, 2);
        bulk[1] = add_flow(MTU, 0, 1, 2);
        small = add_flow(100, 0, 1, 2);
        run(20 * MS, US, 0, 2, 40, false);
        for (int i = 0; i < 100; i++) {
            offer(small, 1, 0);
            run(10 * MS, US, 0, 2, 40, false);
        }
        CHECK(small->n_seen == 100 && small->max_wait_ns
              <= 3 * mtu_ns + GRANULARITY_NS + US,
              "meter %d not fair: a small flow's packet waited for %"PRIu64
              " ns", early, small->max_wait_ns);
        /* The small flow's part is 80 kbit/s. */
        for (int i = 0; i < 2; i++) {
            check_rate(bulk[i], 1020 * MS,
                       MTU * 8e9 / mtu_ns / 2 - 40000, 0.02);
        }
        end();
    }
}

/* What a fair meter drops, it counts, and not the one before it in the row
 * that is not fair, even if it is dropped because a FIFO is full. */
static void
test_row_drops(void)
{
    uint64_t drops[2], bytes;
    struct test_flow *f;

    for (int fair = 0; fair < 2; fair++) {
        begin();
        set_meter(!fair, 1000 * MBPS, 0, 50000, false);
        set_meter(fair, 10 * MBPS, 0, 20000, true);
        f = add_flow(MTU, 0, 1, -1);
        for (int i = 0; i < 20; i++) {
            offer(f, 20, 0);
            run(5 * MS, US, 0, 0, 0, false);
        }
        /* The other meter makes the last packet of a batch wait, too. */
        CHECK(f->max_wait_ns <= 20000 * US + 20 * MTU * 8 + GRANULARITY_NS
              + US,
              "a packet waited for %"PRIu64" ns", f->max_wait_ns);
        for (int i = 0; i < 2; i++) {
            edt_meter_get_late_drops(&meters[i], &drops[i], &bytes);
        }
        CHECK(!drops[!fair] && drops[fair] > 200
              && drops[fair] == shaper_drops(),
              "meter 0 has dropped %"PRIu64", meter 1 %"PRIu64" of %"PRIu64
              ", but meter %d is fair", drops[0], drops[1], shaper_drops(),
              fair);
        end();
    }
}

/* A changed rate holds for what waits already, and a meter that is deleted
 * does not set it free. */
static void
test_change(void)
{
    struct test_flow *f;

    begin();
    set_meter(0, 10 * MBPS, 0, 10000000, true);
    f = add_flow(MTU, 0, -1, -1);
    for (int i = 0; i < 10; i++) {
        offer(f, 30, 0);
    }
    run(100 * MS, 10 * US, 0, 0, 0, false);
    check_rate(f, 100 * MS, 10e6, 0.02);
    f->bytes = 0;
    set_meter(0, 20 * MBPS, 0, 10000000, true);
    run(50 * MS, 10 * US, 0, 0, 0, false);
    check_rate(f, 50 * MS, 20e6, 0.02);
    f->bytes = 0;
    set_meter(0, 0, 0, 0, true);
    run(20 * MS, 10 * US, 0, 0, 0, false);
    check_rate(f, 20 * MS, 20e6, 0.04);
    end();
}

/* A meter that becomes fair, and then not, and so on, keeps its rate and uses
 * it up.  If packets wait for less time than between that, and for less than
 * half of what they may, nothing is dropped, and nothing overtakes what waits
 * but what comes within the turns that follow, one of each flow. */
static void
test_switch(void)
{
    for (int ms = 1; ms <= 100; ms *= 10) {
        const uint64_t duration_ns = 400 * MS;
        uint64_t bytes = 0;

        begin();
        for (int i = 0; i < 3; i++) {
            add_flow(MTU, 0, -1, -1);
        }
        any_order = true;
        for (int i = 0; i < 400 / ms; i++) {
            set_meter(0, 100 * MBPS, 0, 50000, i % 2);
            /* 22 ms of the rate wait. */
            run(ms * MS, US, 0, 3, 60, false);
        }
        check_bursts(0, US);
        for (int i = 0; i < 3; i++) {
            bytes += flows[i].bytes;
            CHECK(flows[i].max_wait_ns <= 50 * MS + GRANULARITY_NS + US,
                  "a packet waited for %"PRIu64" ns", flows[i].max_wait_ns);
        }
        CHECK(bytes * 8e9 / duration_ns > 0.998 * 100 * MBPS,
              "%"PRIu64" bytes in %"PRIu64" ns", bytes, duration_ns);
        if (ms == 100) {
            CHECK(!n_dropped && !shaper_drops(), "%"PRIuSIZE" dropped on "
                  "arrival and %"PRIu64" later", n_dropped, shaper_drops());
            /* Once it ceases to be fair while packets wait. */
            CHECK(n_ahead <= 3, "%"PRIuSIZE" packets got ahead", n_ahead);
        }
        end();
    }
}

/* Packets wait no longer than the meter allows; what is refused is counted, in
 * the shaper and in the meter, and consumes nothing. */
static void
test_max_delay(void)
{
    const uint64_t max_delay_us = 5000;
    uint64_t packets, bytes, seen;

    begin();
    set_meter(0, 100 * MBPS, 0, max_delay_us, true);
    for (int i = 0; i < 3; i++) {
        add_flow(MTU, 0, -1, -1);
    }
    for (int i = 0; i < 1000; i++) {
        /* More than twice the rate in flows 0 and 1, 1 packet of flow 2. */
        offer(&flows[0], 10, 0);
        offer(&flows[1], 10, 0);
        offer(&flows[2], 1, 0);
        run(MS, 2 * US, 0, 0, 0, false);
    }
    for (int i = 0; i < 3; i++) {
        CHECK(flows[i].max_wait_ns <= max_delay_us * US + 3 * MTU * 80
              + GRANULARITY_NS, "a packet waited for %"PRIu64" ns",
              flows[i].max_wait_ns);
    }
    /* 1 of 8.26 packets in a ms is that of flow 2, which gets all it wants. */
    CHECK(flows[2].bytes == 1000 * MTU, "%"PRIu64" bytes of the flow that "
          "keeps to its share", flows[2].bytes);
    check_rate(&flows[0], 1000 * MS, 43.94e6, 0.02);
    check_rate(&flows[1], 1000 * MS, 43.94e6, 0.02);
    check_bursts(0, 2 * US);

    run(10 * MS, 2 * US, 0, 0, 0, false);
    seen = (flows[0].bytes + flows[1].bytes + flows[2].bytes) / MTU;
    edt_meter_get_late_drops(&meters[0], &packets, &bytes);
    CHECK(packets == shaper_drops() && bytes == packets * MTU
          && seen + packets == n_packets,
          "%"PRIu64" packets seen and %"PRIu64" dropped, %"PRIu64" by the "
          "meter, of %"PRIu32, seen, shaper_drops(), packets, n_packets);
    end();
}

/* Two threads share a meter. */
static void
test_threads(void)
{
    begin();
    set_meter(0, 1000 * MBPS, 0, 10000000, true);
    for (int i = 0; i < 4; i++) {
        add_flow(i ? MTU : 300, 0, -1, -1);
    }
    run(100 * MS, 5 * US, 0, 4, 40, true);
    for (int i = 0; i < 4; i++) {
        check_rate(&flows[i], 100 * MS, 250e6 * (i ? 1 : 1500. / MTU), 0.02);
    }
    check_bursts(0, 5 * US);
    end();
}

/* At a port without a shaper the rate holds in the long run. */
static void
test_police(void)
{
    const struct edt_finder finder = { .find = find };
    uint64_t packets, bytes, sent = 0, total = 0;
    struct test_flow *f;

    begin();
    set_meter(0, 100 * MBPS, 0, 10000, true);
    f = add_flow(MTU, 0, -1, -1);
    for (int i = 0; i < 1000; i++) {
        struct edt_stamp_result result;
        struct edt_chain chain = { .n = 0 };
        struct dp_packet_batch batch;
        uint32_t kept;

        dp_packet_batch_init(&batch);
        for (int j = 0; j < 20; j++) {
            dp_packet_batch_add(&batch, packet_create(f));
            total++;
        }
        edt_stamp_batch(chains, &chain, &meters[0],
                        edt_meter_params(&meters[0]), 0, &batch, UINT32_MAX,
                        now_ns, &result);
        kept = edt_late_police(&finder, chains, &batch, now_ns);
        CHECK(count_1bits(kept) == dp_packet_batch_size(&batch),
              "bitmap %"PRIx32" of %"PRIuSIZE" packets", kept,
              dp_packet_batch_size(&batch));
        sent += dp_packet_batch_size(&batch);
        dp_packet_delete_batch(&batch, true);
        now_ns += MS;
    }
    edt_meter_get_late_drops(&meters[0], &packets, &bytes);
    CHECK(sent + packets == total && bytes == packets * MTU,
          "%"PRIu64" sent and %"PRIu64" dropped of %"PRIu64, sent, packets,
          total);
    /* 1 s and the 10 ms that the port may be ahead. */
    CHECK(sent * MTU * 8 < 101.2e6 && sent * MTU * 8 > 100e6,
          "%"PRIu64" packets", sent);
    end();
}

/* A burst that a meter that is not fair lets go at once has times in the past.
 * The fair meter behind it has saved nothing since these. */
static void
test_behind_burst(void)
{
    const uint64_t poll_ns = 1000;

    begin();
    set_meter(0, 1000 * MBPS, 200000, 50000, false);
    set_meter(1, 100 * MBPS, 0, 50000, true);
    add_flow(MTU, 0, 1, -1);
    offer(&flows[0], NETDEV_MAX_BURST, 0);
    for (uint64_t end_ns = now_ns + MS; now_ns < end_ns; now_ns += poll_ns) {
        drain();
    }
    CHECK(leaky_bucket_max_bytes(&buckets[1])
          <= 2 * MTU + 100 * MBPS * (poll_ns + GRANULARITY_NS) / 8000000000,
          "%"PRIu64" bytes at once", leaky_bucket_max_bytes(&buckets[1]));
    end();
}

/* Anything, as long as the meters' rates and, unless they become fair or cease
 * to be, the flows' order hold. */
static void
test_random(void)
{
    for (unsigned int round = 0; round < rounds(200); round++) {
        uint64_t poll_ns = 500 + choose_log(100000);
        uint64_t burst = choose(3) ? 0 : choose_log(100000);
        uint64_t max_delay_us = 1 + choose_log(100000);
        size_t n_steps = 300;
        bool several = choose(2);

        begin();
        any_order = choose(2);
        for (int i = 0; i < 3; i++) {
            set_meter(i, MBPS + choose_log(10000 * MBPS), burst,
                      max_delay_us, choose(4));
        }
        for (size_t n = 1 + choose(20); n; n--) {
            int first = choose(3);
            int second = several ? (int) choose(4) - 1 : -1;

            add_flow(64 + choose(MTU - 63), first, second,
                     second < 0 ? -1 : (int) choose(4) - 1);
        }
        while (n_steps--) {
            if (any_order && !choose(20)) {
                int i = choose(3);

                set_meter(i, buckets[i].rate_bps, burst, max_delay_us,
                          choose(2));
            }
            if (n_packets < MAX_PACKETS - NETDEV_MAX_BURST) {
                size_t i = choose(n_flows);

                offer(&flows[i], 1 + choose(NETDEV_MAX_BURST), i % 2);
            }
            now_ns += 1 + choose(poll_ns);
            drain();
        }
        if (several) {
            check_totals(burst, max_delay_us * US);
        } else {
            check_bursts(burst, poll_ns);
        }
        while (flow_shaper_backlog(shapers[0])
               || flow_shaper_backlog(shapers[1])) {
            uint64_t next_ns = MIN(flow_shaper_next_due(shapers[0], now_ns),
                                   flow_shaper_next_due(shapers[1], now_ns));

            now_ns = MAX(next_ns, now_ns + 1);
            drain();
        }
        end();
    }
}

static const struct test tests[] = {
    { "share", test_share },
    { "full-batches", test_full_batches },
    { "small", test_small },
    { "chain", test_chain },
    { "row", test_row },
    { "row-drops", test_row_drops },
    { "change", test_change },
    { "switch", test_switch },
    { "max-delay", test_max_delay },
    { "threads", test_threads },
    { "police", test_police },
    { "behind-burst", test_behind_burst },
    { "random", test_random },
};

int
main(int argc, char *argv[])
{
    return run_tests(argc, argv, tests, ARRAY_SIZE(tests));
}
