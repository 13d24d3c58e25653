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

/* Tests of delay and jitter, in simulated time: of what is added to the times
 * of packets, and of a shaper that has a delay line. */

#include <config.h>
#undef NDEBUG

#include "shaper-delay.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dp-packet.h"
#include "fb-test.h"
#include "flow-shaper.h"
#include "odp-util.h"
#include "openvswitch/util.h"
#include "packets.h"
#include "random.h"
#include "util.h"

#define START_NS UINT64_C(100000000000000)
#define US UINT64_C(1000)
#define MS UINT64_C(1000000)
#define MAX_FLOWS 1024
#define SIZE 100

/* What a packet carries, at its end. */
struct tag {
    uint32_t flow;
    uint32_t number;                /* In its flow. */
    uint64_t arrival_ns;
};

static struct dp_packet *
packet_create(uint32_t flow, uint32_t number, uint64_t now_ns)
{
    const struct tag tag = { flow, number, now_ns };
    struct dp_packet *packet = dp_packet_new(SIZE);
    uint8_t *data = dp_packet_put_zeros(packet, SIZE);
    ovs_be32 dst = htonl(flow);

    data[12] = 0x08;
    data[14] = 0x45;
    memcpy(data + ETH_HEADER_LEN + 16, &dst, sizeof dst);
    memcpy(data + SIZE - sizeof tag, &tag, sizeof tag);
    pkt_metadata_init(&packet->md, ODPP_NONE);
    return packet;
}

static struct tag
packet_tag(const struct dp_packet *packet)
{
    struct tag tag;

    memcpy(&tag, (const char *) dp_packet_data(packet) + SIZE - sizeof tag,
           sizeof tag);
    return tag;
}

static struct shaper_config *
config_create(uint64_t rate_bps, uint64_t delay_us, uint64_t jitter_us)
{
    struct shaper_config *config = xzalloc(sizeof *config);

    ovs_refcount_init(&config->ref_cnt);
    config->wheel = MLTW_CONFIG_DEFAULT;
    config->max_delay_ns = 50 * MS;
    config->ecn_threshold_ns = UINT64_MAX;
    config->max_backlog = 1 << 18;
    config->max_batch = 128;
    config->max_flows = 4096;
    if (rate_bps) {
        const struct edt_limits limits = { .rate = rate_bps };

        config->port_pace = edt_pace_create(rate_bps);
        config->port_params = edt_params_create(&limits);
        config->paced = true;
    }
    config->classes = xzalloc(sizeof *config->classes);
    config->n_classes = 1;
    if (rate_bps) {
        config->classes[0].pace
            = edt_class_create(config->port_pace, &EDT_CLASS_LIMITS_DEFAULT);
    }
    shaper_delay_init(&config->delay, delay_us, jitter_us);
    return config;
}

/* A shaper, and what it is checked by. */
struct world {
    struct shaper_config *config;
    struct shaper_thread *thread;
    struct flow_shaper *s;
    uint64_t now_ns;

    uint32_t n_sent[MAX_FLOWS];     /* Numbers given to packets. */
    uint32_t next[MAX_FLOWS];       /* The one that has to leave next. */
    uint64_t least_ns, most_ns;     /* Times that packets were here. */
    double sum_ns, squares;
    uint64_t n_left;
    void (*left)(struct world *, const struct tag *);
};

static void
world_set(struct world *w, uint64_t rate_bps, uint64_t delay_us,
          uint64_t jitter_us)
{
    struct shaper_config *old = w->config;

    w->config = config_create(rate_bps, delay_us, jitter_us);
    if (old && old->port_pace && w->config->port_pace) {
        edt_class_unref(w->config->classes[0].pace);
        w->config->classes[0].pace = edt_class_ref(old->classes[0].pace);
        edt_pace_unref(w->config->port_pace);
        w->config->port_pace = edt_pace_ref(old->port_pace);
    }
    if (w->s) {
        flow_shaper_set_config(w->s, w->config, w->now_ns);
    }
    shaper_config_unref(old);
}

static void
world_init(struct world *w, uint64_t rate_bps, uint64_t delay_us,
           uint64_t jitter_us)
{
    memset(w, 0, sizeof *w);
    w->now_ns = START_NS;
    w->least_ns = UINT64_MAX;
    world_set(w, rate_bps, delay_us, jitter_us);
    w->thread = shaper_thread_create();
    w->s = flow_shaper_create(w->config, w->thread, 0, w->now_ns);
}

static void
world_destroy(struct world *w)
{
    flow_shaper_detach(w->s);
    flow_shaper_destroy(w->s);
    shaper_thread_destroy(w->thread);
    shaper_config_unref(w->config);
}

/* Checks those that leave. */
static void
world_leave(struct world *w, struct dp_packet_batch *batch)
{
    struct dp_packet *packet;

    DP_PACKET_BATCH_FOR_EACH (i, packet, batch) {
        struct tag tag = packet_tag(packet);
        uint64_t ns = w->now_ns - tag.arrival_ns;

        CHECK(tag.number >= w->next[tag.flow],
              "packet %"PRIu32" of flow %"PRIu32" was overtaken",
              tag.number, tag.flow);
        w->next[tag.flow] = tag.number + 1;
        w->least_ns = MIN(w->least_ns, ns);
        w->most_ns = MAX(w->most_ns, ns);
        w->sum_ns += ns;
        w->squares += (double) ns * ns;
        w->n_left++;
        if (w->left) {
            w->left(w, &tag);
        }
        dp_packet_delete(packet);
    }
    dp_packet_batch_init(batch);
}

static void
world_drain(struct world *w)
{
    struct dp_packet_batch batch;
    size_t n_sent = 0;

    dp_packet_batch_init(&batch);
    while (flow_shaper_drain(w->s, &batch, w->now_ns)) {
        n_sent += dp_packet_batch_size(&batch);
        world_leave(w, &batch);
    }
    flow_shaper_end_drain(w->s, n_sent, w->now_ns);
}

/* Offers a packet of 'flow'. */
static void
world_offer(struct world *w, uint32_t flow)
{
    const struct shaper_source source = { 1, 1 };
    struct dp_packet_batch batch;

    dp_packet_batch_init(&batch);
    dp_packet_batch_add(&batch, packet_create(flow, w->n_sent[flow]++,
                                              w->now_ns));
    flow_shaper_enqueue(w->s, &batch, &source, w->now_ns);
    world_leave(w, &batch);
}

/* Goes on to 'ns', polling whenever something is due. */
static void
world_advance(struct world *w, uint64_t ns)
{
    uint64_t due_ns;

    while ((due_ns = flow_shaper_next_due(w->s, w->now_ns)) <= ns) {
        w->now_ns = MAX(due_ns, w->now_ns);
        world_drain(w);
    }
    w->now_ns = ns;
}

static void
world_empty(struct world *w)
{
    world_advance(w, w->now_ns + 30000 * MS);
    CHECK(!flow_shaper_backlog(w->s), "packets were left behind");
}

static uint64_t
world_dropped(const struct world *w, bool delayed)
{
    struct shaper_stats stats;
    uint64_t n = 0;

    memset(&stats, 0, sizeof stats);
    if (delayed) {
        flow_shaper_get_delay_stats(w->s, &stats);
    } else {
        flow_shaper_get_stats(w->s, &stats);
    }
    for (int i = SHAPER_DROP_MAX_DELAY; i <= SHAPER_DROP_SEGMENT; i++) {
        n += stats.counters[i];
    }
    return n;
}

/* A million packets that come at random times: all are there for the delay, to
 * the granularity of the wheel. */
static void
test_exact(void)
{
    static const uint64_t delays_us[] = { 1, 100, 15000, 10000000 };

    for (size_t i = 0; i < ARRAY_SIZE(delays_us); i++) {
        const uint64_t delay_ns = delays_us[i] * US;
        const unsigned int n = rounds(250000);
        /* Not more than there are buffers. */
        const uint64_t gap_ns = MAX(delay_ns / 5000, 100);
        struct world w;

        world_init(&w, 0, delays_us[i], 0);
        for (unsigned int j = 0; j < n; j++) {
            world_offer(&w, choose(MAX_FLOWS));
            world_advance(&w, w.now_ns + choose(2 * gap_ns));
        }
        world_empty(&w);
        CHECK(w.n_left == n, "%"PRIu64" of %u left", w.n_left, n);
        CHECK(w.least_ns >= delay_ns, "early by %"PRIu64" ns",
              delay_ns - w.least_ns);
        CHECK(w.most_ns < delay_ns + 64, "late by %"PRIu64" ns",
              w.most_ns - delay_ns);
        world_destroy(&w);
    }
}

/* A million packets of flows that are sparse enough for independent times:
 * their distribution is that which was asked for, and their order kept. */
static void
test_jitter(void)
{
    const uint64_t delay_ns = 20 * MS, jitter_ns = 5 * MS;
    const unsigned int n = rounds(1000000);
    double mean, deviation;
    struct world w;

    world_init(&w, 0, delay_ns / US, jitter_ns / US);
    for (unsigned int i = 0; i < n; i++) {
        world_offer(&w, i % MAX_FLOWS);
        world_advance(&w, w.now_ns + 25 * US + choose(10 * US));
    }
    world_empty(&w);
    mean = w.sum_ns / w.n_left;
    deviation = sqrt(w.squares / w.n_left - mean * mean);
    CHECK(w.n_left == n, "%"PRIu64" of %u left", w.n_left, n);
    CHECK(w.least_ns >= delay_ns - jitter_ns, "early by %"PRIu64" ns",
          delay_ns - jitter_ns - w.least_ns);
    CHECK(w.most_ns < delay_ns + jitter_ns + 64, "late by %"PRIu64" ns",
          w.most_ns - delay_ns - jitter_ns);
    if (n >= 100000) {
        /* Of a uniform distribution. */
        double wanted = jitter_ns / sqrt(3);

        CHECK(w.least_ns < delay_ns - jitter_ns + jitter_ns / 100,
              "least is %"PRIu64" ns", w.least_ns);
        CHECK(w.most_ns > delay_ns + jitter_ns - jitter_ns / 100,
              "most is %"PRIu64" ns", w.most_ns);
        CHECK(fabs(mean - delay_ns) < jitter_ns / 100.0,
              "mean is %.0f ns", mean);
        CHECK(fabs(deviation / wanted - 1) < 0.01,
              "standard deviation is %.0f ns, not %.0f", deviation, wanted);
    }
    world_destroy(&w);
}

/* Packets of few flows that are much closer to each other than the jitter: in
 * order, never early, and their mean is late by a twelfth of it at most. */
static void
test_dense_jitter(void)
{
    const uint64_t delay_ns = 20 * MS, jitter_ns = 5 * MS;
    const unsigned int n = rounds(1000000);
    double mean, deviation;
    struct world w;

    world_init(&w, 0, delay_ns / US, jitter_ns / US);
    for (unsigned int i = 0; i < n; i++) {
        world_offer(&w, choose(8));
        world_advance(&w, w.now_ns + choose(40 * US));
    }
    world_empty(&w);
    mean = w.sum_ns / w.n_left;
    deviation = sqrt(w.squares / w.n_left - mean * mean);
    CHECK(w.n_left == n, "%"PRIu64" of %u left", w.n_left, n);
    CHECK(w.least_ns >= delay_ns - jitter_ns, "early by %"PRIu64" ns",
          delay_ns - jitter_ns - w.least_ns);
    CHECK(w.most_ns < delay_ns + jitter_ns + 64, "late by %"PRIu64" ns",
          w.most_ns - delay_ns - jitter_ns);
    if (n >= 1000000) {
        CHECK(mean > delay_ns - jitter_ns / 20.0
              && mean < delay_ns + jitter_ns * (1 / 12. + 1 / 20.),
              "mean is %.0f ns", mean);
        CHECK(deviation > jitter_ns / 2.5, "standard deviation is %.0f ns",
              deviation);
    }
    world_destroy(&w);
}

/* A flow has the same random times whoever asks, others have others, and they
 * depend on what nobody can know. */
static void
test_agreement(void)
{
    struct dp_packet *a = packet_create(1, 0, 0);
    struct dp_packet *b = packet_create(2, 0, 0);
    struct shaper_delay delay;
    unsigned int n_equal = 0;

    shaper_delay_init(&delay, 1000, 1000);
    for (unsigned int i = 0; i < 1000; i++) {
        uint64_t when_ns = START_NS + i * 10 * MS;
        uint64_t ns = shaper_delay_ns(&delay, a, when_ns);

        CHECK(ns <= 2 * MS, "%"PRIu64" ns", ns);
        CHECK(ns == shaper_delay_ns(&delay, a, when_ns), "not the same");
        n_equal += ns == shaper_delay_ns(&delay, b, when_ns);
    }
    CHECK(n_equal < 5, "%u times the same", n_equal);
    dp_packet_delete(a);
    dp_packet_delete(b);
}

/* Twice the port's rate is offered for ten times as long as the delay, by two
 * flows.  The port sends at its rate, from the delay on, however much is on
 * its way, and holds what the rate carries in that time. */
static uint64_t first_ns, last_ns;

static void
note_times(struct world *w, const struct tag *tag OVS_UNUSED)
{
    first_ns = first_ns ? first_ns : w->now_ns;
    last_ns = w->now_ns;
}

static void
test_rate(void)
{
    const uint64_t rate_bps = 100000000;
    const uint64_t gap_ns = SIZE * UINT64_C(8000000000) / rate_bps;
    static const uint64_t delays_us[] = { 0, 1000, 50000, 120000 };

    for (size_t i = 0; i < ARRAY_SIZE(delays_us); i++) {
        const uint64_t delay_ns = delays_us[i] * US;
        const uint64_t length_ns = MAX(10 * delay_ns, 1000 * MS) / 2;
        /* That wait for the rate, and that are on their way. */
        const size_t most = (50 * MS + delay_ns) / gap_ns;
        uint64_t wanted;
        struct world w;

        world_init(&w, rate_bps, delays_us[i], 0);
        w.left = note_times;
        first_ns = 0;
        while (w.now_ns < START_NS + length_ns) {
            world_offer(&w, 1);
            world_offer(&w, 2);
            CHECK(flow_shaper_backlog(w.s) <= most + 20,
                  "%"PRIuSIZE" packets held", flow_shaper_backlog(w.s));
            world_advance(&w, w.now_ns + gap_ns);
        }
        world_empty(&w);
        CHECK(first_ns >= START_NS + delay_ns
              && first_ns < START_NS + delay_ns + 64,
              "first left after %"PRIu64" ns", first_ns - START_NS);
        wanted = (last_ns - first_ns) / gap_ns + 1;
        CHECK(w.n_left >= wanted - 1 && w.n_left <= wanted,
              "%"PRIu64" have left, not %"PRIu64, w.n_left, wanted);
        CHECK(last_ns > START_NS + length_ns + delay_ns,
              "last left after %"PRIu64" ns", last_ns - START_NS);
        CHECK(w.n_left + world_dropped(&w, false)
              == w.n_sent[1] + w.n_sent[2], "packets are missing");
        CHECK(!world_dropped(&w, true), "dropped after the rate");
        world_destroy(&w);
    }
}

/* Delays, jitters and rates that change, shapers that stop and go on, threads
 * that take over from others: order is kept, nothing lost, and no packet stays
 * for less than the least delay that there has been while it was there. */
static uint64_t least_delay_ns;

static void
check_least(struct world *w, const struct tag *tag)
{
    CHECK(w->now_ns - tag->arrival_ns >= least_delay_ns, "early");
}

static void
test_changes(void)
{
    struct world w;

    for (unsigned int i = 0; i < rounds(30); i++) {
        uint64_t n_offered = 0;

        world_init(&w, 0, 0, 0);
        w.left = check_least;
        least_delay_ns = 0;
        for (unsigned int j = 0; j < 60; j++) {
            uint64_t rate_bps = choose(2) ? 1000000 + choose(100000000) : 0;
            uint64_t delay_us = choose(3) ? choose_log(100000) : 0;
            uint64_t jitter_us = choose(2) ? choose(delay_us + 1) : 0;
            unsigned int what = choose(6);

            if (what == 0) {
                flow_shaper_set_closing(w.s, w.now_ns);
                least_delay_ns = 0;
            } else if (what == 1) {
                /* To another thread and back. */
                struct flow_shaper *other
                    = flow_shaper_create(w.config, w.thread, 1, w.now_ns);

                flow_shaper_detach(w.s);
                flow_shaper_merge(other, w.s, w.now_ns);
                flow_shaper_destroy(w.s);
                w.s = other;
            } else if (what == 2) {
                flow_shaper_detach(w.s);
                flow_shaper_attach(w.s, w.thread, choose(4));
            } else {
                if (delay_us - jitter_us < least_delay_ns / US
                    || flow_shaper_is_closing(w.s)) {
                    least_delay_ns = 0;
                }
                world_set(&w, rate_bps, delay_us, jitter_us);
            }
            for (unsigned int k = 0; k < 50; k++) {
                world_offer(&w, choose(10));
                n_offered++;
                if (choose(2)) {
                    world_advance(&w, w.now_ns + choose_log(MS));
                }
            }
            if (!choose(5)) {
                world_empty(&w);
                if (!flow_shaper_is_closing(w.s)) {
                    least_delay_ns = w.config->delay.delay_ns
                                     - w.config->delay.jitter_ns;
                }
            }
        }
        world_empty(&w);
        CHECK(w.n_left + world_dropped(&w, false) + world_dropped(&w, true)
              == n_offered, "packets are missing");
        world_destroy(&w);
    }
}

/* What is on its way counts as a part of 'max_backlog', and is refused on
 * arrival. */
static void
test_backlog(void)
{
    struct world w;

    for (int paced = 0; paced < 2; paced++) {
        world_init(&w, paced ? 1000000000 : 0, 1000000, 0);
        w.config->max_backlog = 1000;
        for (unsigned int i = 0; i < 3000; i++) {
            world_offer(&w, choose(MAX_FLOWS));
            CHECK(flow_shaper_backlog(w.s) <= 1000, "%"PRIuSIZE" packets",
                  flow_shaper_backlog(w.s));
            world_advance(&w, w.now_ns + US);
        }
        CHECK(flow_shaper_backlog(w.s) == 1000, "%"PRIuSIZE" packets",
              flow_shaper_backlog(w.s));
        world_empty(&w);
        CHECK(w.n_left == 1000 && world_dropped(&w, false) == 2000
              && !world_dropped(&w, true), "%"PRIu64" left", w.n_left);
        world_destroy(&w);
    }
}

/* What is on its way does not hold back who has sent it. */
static void
test_rx_bytes(void)
{
    struct world w;

    world_init(&w, 0, 1000, 0);
    world_offer(&w, 1);
    CHECK(flow_shaper_backlog(w.s) == 1, "nothing held");
    CHECK(!shaper_thread_rxq_bytes(w.thread, 1), "counted");
    world_empty(&w);
    world_destroy(&w);
}

static void
test_packets(void)
{
    CHECK(shaper_delay_packets(1000000000, 50000) == 4128, "50 ms");
    CHECK(shaper_delay_packets(0, 50000) == 0, "no rate");
    CHECK(shaper_delay_packets(EDT_MAX_RATE_BPS, 2 * SHAPER_MAX_DELAY_US)
          == 660501981, "most");
    for (unsigned int i = 0; i < rounds(100000); i++) {
        uint64_t rate_bps = EDT_MIN_RATE_BPS
                            + choose_log(EDT_MAX_RATE_BPS);
        uint64_t packets = 1 + choose_log((1 << 24) - 1);
        uint64_t us = shaper_delay_us(rate_bps, packets);

        if (us <= 2 * SHAPER_MAX_DELAY_US) {
            CHECK(shaper_delay_packets(rate_bps, us) <= packets, "too many");
        }
    }
}

static const struct test tests[] = {
    { "exact", test_exact },
    { "jitter", test_jitter },
    { "dense-jitter", test_dense_jitter },
    { "agreement", test_agreement },
    { "rate", test_rate },
    { "changes", test_changes },
    { "backlog", test_backlog },
    { "rx-bytes", test_rx_bytes },
    { "packets", test_packets },
};

int
main(int argc, char *argv[])
{
    return run_tests(argc, argv, tests, ARRAY_SIZE(tests));
}
