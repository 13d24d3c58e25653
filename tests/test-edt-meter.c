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

/* Tests of EDT meters, in simulated time.  What a meter does is compared with
 * exact rational arithmetic: times are multiplied by the rate, so that
 * everything is a whole number. */

#include <config.h>
#undef NDEBUG

#include "edt-meter.h"
#include "edt-stamp.h"

#include <inttypes.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dpdk.h"
#include "dp-packet.h"
#include "edt-chains.h"
#include "fb-test.h"
#include "netlink.h"
#include "odp-util.h"
#include "openvswitch/util.h"
#include "ovs-atomic.h"
#include "ovs-rcu.h"
#include "ovs-thread.h"
#include "packets.h"
#include "random.h"
#include "util.h"

#define MTU EDT_MTU_BYTES
#define MAX_N NETDEV_MAX_BURST
#define HOUR_NS UINT64_C(3600000000000)
#define DAY_NS (24 * HOUR_NS)
#define WRAP_NS (UINT64_C(1) << (64 - EDT_TICK_SHIFT))
#define STALE_NS (EDT_STALE_TICKS >> EDT_TICK_SHIFT)

static uint64_t
choose_rate(void)
{
    static const uint64_t rates[] = {
        1000, 10000, 1000000, 9999000, 10000000, 100000000, 1000000000,
        UINT64_C(10000000000), UINT64_C(25000000000), UINT64_C(100000000000),
        UINT64_C(400000000000),
    };

    return choose(2)
           ? rates[choose(ARRAY_SIZE(rates))]
           : EDT_MIN_RATE_BPS
             + choose_log(EDT_MAX_RATE_BPS - EDT_MIN_RATE_BPS + 1);
}

static uint32_t
choose_frame(void)
{
    static const uint32_t frames[] = { 60, 64, 65, 128, 512, 1500, MTU, 9018 };

    return choose(2) ? frames[choose(ARRAY_SIZE(frames))] : 60 + choose(1455);
}

/* A burst that lasts for 'max_s' seconds at most. */
static uint64_t
choose_burst(uint64_t rate, unsigned int max_s)
{
    static const uint64_t bursts[] = { 0, 1, MTU - 1, MTU, MTU + 1, 3000 };

    return choose(2) ? bursts[choose(ARRAY_SIZE(bursts))]
                     : choose_log(MIN(rate / 8 * max_s, 1 << 26));
}

/* An uptime at which something could be special. */
static uint64_t
choose_uptime(void)
{
    static const uint64_t uptimes[] = {
        HOUR_NS, 90 * DAY_NS, WRAP_NS / 2, 120 * DAY_NS, 200 * DAY_NS, WRAP_NS,
        WRAP_NS + 100 * DAY_NS, WRAP_NS * 3 / 2, 2 * WRAP_NS, 7 * WRAP_NS,
    };

    return uptimes[choose(ARRAY_SIZE(uptimes))]
           - choose(2) * choose_log(HOUR_NS / 2);
}

/* Parameters of a meter that counts bytes. */
static struct edt_params *
params_create(uint64_t rate_bps, uint64_t burst_bytes, uint64_t max_delay_us)
{
    const struct edt_limits limits = {
        .rate = rate_bps,
        .burst = burst_bytes,
        .max_delay_us = max_delay_us,
    };

    return edt_params_create(&limits);
}

/* A meter with its parameters. */
struct fixture {
    struct edt_meter meter;
    const struct edt_params *p;
};

static void
fixture_init_limits(struct fixture *f, const struct edt_limits *limits,
                    uint64_t now_ns)
{
    edt_meter_init(&f->meter, edt_params_create(limits));
    edt_meter_reset(&f->meter, now_ns);
    f->p = edt_meter_params(&f->meter);
}

static void
fixture_init(struct fixture *f, uint64_t rate_bps, uint64_t burst_bytes,
             uint64_t max_delay_us, uint64_t now_ns)
{
    edt_meter_init(&f->meter, params_create(rate_bps, burst_bytes,
                                            max_delay_us));
    edt_meter_reset(&f->meter, now_ns);
    f->p = edt_meter_params(&f->meter);
}

static void
fixture_set_params(struct fixture *f, uint64_t rate_bps, uint64_t burst_bytes,
                   uint64_t max_delay_us, uint64_t now_ns)
{
    edt_meter_set_params(&f->meter, params_create(rate_bps, burst_bytes,
                                                  max_delay_us), now_ns);
    f->p = edt_meter_params(&f->meter);
}

static void
fixture_destroy(struct fixture *f)
{
    edt_meter_destroy(&f->meter);
}

static uint64_t
get_tat(struct fixture *f)
{
    uint64_t tat;

    atomic_read_relaxed(&f->meter.tat_ticks, &tat);
    return tat;
}

/* Reserves for 'n' packets of 'size' bytes. */
static size_t
reserve(struct fixture *f, uint64_t now_ns, uint32_t size, size_t n,
        struct edt_reservation *r)
{
    uint32_t ends[MAX_N];

    for (size_t i = 0; i < n; i++) {
        ends[i] = size * (i + 1);
    }
    return edt_meter_reserve(&f->meter, f->p, now_ns, ends, n, r);
}

/* Exact model of a meter: times in ns, multiplied by the rate, so that a byte
 * costs BYTE of them. */
#define BYTE ((__int128) 8000000000)

struct exact {
    uint64_t rate;
    __int128 tolerance;
    __int128 tat;
    __int128 busy_since;
};

static void
exact_init(struct exact *e, uint64_t rate, uint64_t burst)
{
    e->rate = rate;
    e->tolerance = burst > MTU ? (burst - MTU) * BYTE : 0;
    e->tat = e->busy_since = -1;
}

/* Exact time from which on the next packet may leave. */
static __int128
exact_next(struct exact *e, uint64_t now_ns)
{
    __int128 floor = (__int128) now_ns * e->rate - e->tolerance;

    if (e->tat < floor) {
        e->tat = e->busy_since = floor;
    }
    return e->tat;
}

/* The check of a long-run burst bound: a leaky bucket that is filled by what
 * is sent and drained at the rate. */
struct bucket {
    uint64_t rate;
    __int128 level;             /* Bytes times BYTE. */
    uint64_t last_ns;
};

/* Sends 'bytes' at 'now_ns' and returns the level in bytes, rounded up. */
static uint64_t
bucket_add(struct bucket *b, uint64_t now_ns, uint64_t bytes)
{
    __int128 drained = (__int128) (now_ns - b->last_ns) * b->rate;

    CHECK(now_ns >= b->last_ns, "packet leaves at %"PRIu64", before an "
          "earlier one at %"PRIu64, now_ns, b->last_ns);
    b->level = b->level > drained ? b->level - drained : 0;
    b->level += bytes * BYTE;
    b->last_ns = now_ns;
    return (b->level + BYTE - 1) / BYTE;
}

/* Bytes that pass at 'rate' in a ns, rounded up: EDTs are whole ns, which may
 * bring two packets closer together. */
static uint64_t
bytes_per_ns(uint64_t rate)
{
    return DIV_ROUND_UP(rate, UINT64_C(8000000000));
}

/* Parameters. */

static void
test_params(void)
{
    static const struct {
        struct edt_limits asked, got;
    } cases[] = {
        { { false, 1000, 0, 0, 0, false }, { false, 1000, 0, 0, 0, false } },
        { { false, 0, 0, 0, 0, false }, { false, 1000, 0, 0, 0, false } },
        { { false, 999, 5, 7, 6, false }, { false, 1000, 5, 7, 6, false } },
        { { false, EDT_MAX_RATE_BPS, EDT_MAX_BURST_BYTES, EDT_MAX_DELAY_US,
            EDT_MAX_DELAY_US, false },
          { false, EDT_MAX_RATE_BPS, EDT_MAX_BURST_BYTES, EDT_MAX_DELAY_US,
            EDT_MAX_DELAY_US, false } },
        { { false, EDT_MAX_RATE_BPS + 1, EDT_MAX_BURST_BYTES + 1,
            EDT_MAX_DELAY_US + 1, EDT_MAX_DELAY_US + 1, false },
          { false, EDT_MAX_RATE_BPS, EDT_MAX_BURST_BYTES, EDT_MAX_DELAY_US,
            EDT_MAX_DELAY_US, false } },
        { { false, UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX, false },
          { false, EDT_MAX_RATE_BPS, EDT_MAX_BURST_BYTES, EDT_MAX_DELAY_US,
            EDT_MAX_DELAY_US, false } },
        { { true, 0, 0, 0, 0, false }, { true, 1, 0, 0, 0, false } },
        { { true, 999, 5, 7, 0, false }, { true, 999, 5, 7, 0, false } },
        { { true, UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX, false },
          { true, EDT_MAX_RATE_PPS, EDT_MAX_BURST_PACKETS, EDT_MAX_DELAY_US,
            EDT_MAX_DELAY_US, false } },
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct edt_params *p = edt_params_create(&cases[i].asked);
        const struct edt_limits *got = &cases[i].got;
        uint64_t threshold = got->ecn_threshold_us
                             ? got->ecn_threshold_us * 1000 << EDT_TICK_SHIFT
                             : EDT_ECN_OFF;

        CHECK(p->limits.per_packet == got->per_packet
              && p->limits.rate == got->rate
              && p->limits.burst == got->burst
              && p->limits.max_delay_us == got->max_delay_us
              && p->limits.ecn_threshold_us == got->ecn_threshold_us,
              "case %"PRIuSIZE": rate %"PRIu64", burst %"PRIu64", delay "
              "%"PRIu64", threshold %"PRIu64, i, p->limits.rate,
              p->limits.burst, p->limits.max_delay_us,
              p->limits.ecn_threshold_us);
        CHECK(p->ecn_threshold_ticks == threshold,
              "case %"PRIuSIZE": threshold of %"PRIu64" ticks", i,
              p->ecn_threshold_ticks);
        free(p);
    }

    for (unsigned int i = 0; i < rounds(20000); i++) {
        uint64_t rate = choose_rate();
        uint32_t bytes = 1 + choose_log(1 << 22);
        struct edt_params *p = params_create(rate, 0, 1);
        __int128 exact = (bytes * BYTE << EDT_TICK_SHIFT) / rate;
        __int128 error = edt_cost(p, bytes) - exact;

        CHECK(error >= -1 - exact / 10000000 && error <= 2 + exact / 10000000,
              "%"PRIu32" bytes at %"PRIu64" bit/s take %"PRIu64" ticks rather "
              "than %"PRIu64, bytes, rate, edt_cost(p, bytes),
              (uint64_t) exact);
        CHECK(p->gap_ns == MIN(MTU * UINT64_C(8000000000) / rate, UINT32_MAX),
              "gap %"PRIu32" at %"PRIu64" bit/s", p->gap_ns, rate);
        CHECK(p->unit_cost < UINT64_C(1) << 41, "cost overflows");
        free(p);
    }
}

/* Long-run rate. */

/* Reserves for 'n_packets' packets of 'size' bytes, 'batch' at a time, back to
 * back, and checks the time that they take. */
static void
check_rate(uint64_t rate, uint32_t size, size_t batch, size_t n_packets)
{
    uint64_t now_ns = HOUR_NS + 17;
    uint64_t start_ns = 0, edt_ns;
    struct edt_reservation r;
    struct fixture f;
    size_t n = 0;

    fixture_init(&f, rate, 0, EDT_MAX_DELAY_US, now_ns);
    for (;;) {
        size_t admitted = reserve(&f, now_ns, size, batch, &r);

        CHECK(admitted, "not a packet admitted at %"PRIu64" bit/s", rate);
        edt_ns = edt_reservation_edt_ns(&r, f.p, now_ns, 0);
        if (!n) {
            start_ns = edt_ns;
            CHECK(start_ns == now_ns, "first packet waits");
        } else {
            __int128 exact = n * size * BYTE / rate;
            __int128 error = (__int128) (edt_ns - start_ns) - exact;

            CHECK(error <= exact / 1000 + 2 && error >= -(exact / 1000) - 1,
                  "%"PRIuSIZE" frames of %"PRIu32" bytes, %"PRIuSIZE" at a "
                  "time, take %"PRIu64" ns rather than %"PRIu64" at %"PRIu64
                  " bit/s", n, size, batch, edt_ns - start_ns,
                  (uint64_t) exact, rate);
        }
        if (n >= n_packets) {
            break;
        }
        n += admitted;

        /* Let half of the allowed wait pass, but no more than there is. */
        uint64_t end_ns = now_ns + ((r.end_ticks - (now_ns << EDT_TICK_SHIFT))
                                    >> EDT_TICK_SHIFT);
        now_ns = MAX(now_ns, end_ns - MIN(EDT_MAX_DELAY_US * 500,
                                          end_ns - start_ns));
    }
    fixture_destroy(&f);
}

static void
test_rate(void)
{
    static const uint64_t rates[] = {
        1000, 10000, 1000000, 9999000, 10000000, 100000000, 1000000000,
        UINT64_C(10000000000), UINT64_C(25000000000), UINT64_C(100000000000),
        UINT64_C(400000000000),
    };
    static const uint32_t sizes[] = { 64, 65, 128, 512, 1500, 1514, 9018 };
    static const size_t batches[] = { 1, 2, 7, 32 };
    size_t n_rates = ARRAY_SIZE(rates) + rounds(50);

    for (size_t i = 0; i < n_rates; i++) {
        uint64_t rate = i < ARRAY_SIZE(rates) ? rates[i] : choose_rate();

        for (size_t j = 0; j < ARRAY_SIZE(sizes); j++) {
            for (size_t k = 0; k < ARRAY_SIZE(batches); k++) {
                check_rate(rate, sizes[j], batches[k], 3000);
            }
        }
    }
}

/* Meters that count packets: from idle, as many as the burst leave at once,
 * and then one each 1/rate, whatever the batches they come in.  All of
 * OpenFlow's rates are exact. */
static void
test_packets(void)
{
    const uint64_t s_ns = UINT64_C(1000000000);

    for (unsigned int i = 0; i < rounds(5000); i++) {
        const struct edt_limits limits = {
            .per_packet = true,
            .rate = EDT_MIN_RATE_PPS + choose_log(EDT_MAX_RATE_PPS),
            .burst = choose(2) ? choose_log(100) : 0,
            .max_delay_us = choose(2) ? EDT_MAX_DELAY_US
                                      : 1 + choose_log(EDT_MAX_DELAY_US),
        };
        const uint64_t start_ns = choose_uptime();
        const uint64_t max_wait_ns = limits.max_delay_us * 1000;
        const uint64_t lead = MAX(limits.burst, 1) - 1;
        uint64_t now_ns = start_ns;
        struct fixture f;
        uint64_t n = 0;

        fixture_init_limits(&f, &limits, now_ns);
        CHECK(f.p->gap_ns == MIN(s_ns / limits.rate, UINT32_MAX),
              "gap of %"PRIu32" ns at %"PRIu64" packets/s", f.p->gap_ns,
              limits.rate);
        while (n < 300) {
            size_t batch = 1 + choose(MAX_N);
            struct edt_reservation r;
            size_t admitted = reserve(&f, now_ns, 1, batch, &r);

            for (size_t k = 0; k <= admitted && k < batch; k++) {
                /* Ahead of or behind start_ns, exactly. */
                __int128 exact = ((__int128) (n + k) - lead) * s_ns
                                 / limits.rate;
                __int128 error = (__int128) edt_reservation_edt_ns(
                    &r, f.p, now_ns, k) - start_ns - exact;

                /* The cost of a packet is rounded. */
                __int128 slack = 2 + (exact < 0 ? -exact : exact) / 1000000;
                CHECK(error >= -slack && error <= slack,
                      "packet %"PRIu64" at %"PRIu64" packets/s departs "
                      "%"PRId64" ns late", n + k, limits.rate,
                      (int64_t) error);

                __int128 wait = exact + start_ns - now_ns;
                CHECK(k < admitted ? wait <= max_wait_ns + slack
                                   : wait >= max_wait_ns - slack,
                      "packet %"PRIu64" that would wait %"PRId64" ns is %s",
                      n + k, (int64_t) wait,
                      k < admitted ? "admitted" : "refused");
            }
            n += admitted;

            /* On to when the next departs, before the meter is idle. */
            if (n > lead) {
                now_ns = MAX(now_ns,
                             start_ns + (n - lead) * s_ns / limits.rate);
            }
        }
        fixture_destroy(&f);
    }
}

/* Random arrivals, compared with the exact model: never early, late by less
 * than 0.1 % of the time that the meter has been busy, and within the burst
 * bound. */
static void
check_random(uint64_t rate, uint64_t burst, uint64_t now_ns,
             unsigned int n_batches)
{
    const bool mixed = choose(2);
    uint32_t size = choose_frame();
    uint64_t last_edt_ns = 0;
    uint32_t max_size = 0;
    struct bucket bucket = { .rate = rate, .last_ns = now_ns };
    struct fixture f;
    struct exact e;

    fixture_init(&f, rate, burst, EDT_MAX_DELAY_US, now_ns);
    exact_init(&e, rate, burst);
    for (unsigned int i = 0; i < n_batches; i++) {
        size_t n = 1 + choose(MAX_N);
        uint32_t ends[MAX_N];
        uint32_t bytes = 0;
        struct edt_reservation r;

        for (size_t j = 0; j < n; j++) {
            uint32_t len = mixed ? choose_frame() : size;

            max_size = MAX(max_size, len);
            ends[j] = bytes += len;
        }
        size_t admitted = edt_meter_reserve(&f.meter, f.p, now_ns, ends, n,
                                            &r);
        __int128 next = exact_next(&e, now_ns);

        for (size_t j = 0; j < admitted; j++) {
            uint32_t before = j ? ends[j - 1] : 0;
            __int128 exact = next + before * BYTE;
            __int128 allowed = (exact - e.busy_since) / 1000 + 2 * rate;
            uint64_t edt_ns = edt_reservation_edt_ns(&r, f.p, now_ns, before);
            __int128 late = (__int128) edt_ns * rate - exact;

            CHECK(late >= 0, "rate %"PRIu64", burst %"PRIu64", batch %u, "
                  "packet %"PRIuSIZE": EDT %"PRIu64" is %"PRIu64" ns early",
                  rate, burst, i, j, edt_ns, (uint64_t) (-late / rate));
            CHECK(late <= allowed, "rate %"PRIu64", burst %"PRIu64", batch "
                  "%u, packet %"PRIuSIZE": EDT %"PRIu64" is %"PRIu64" ns late",
                  rate, burst, i, j, edt_ns, (uint64_t) (late / rate));
            CHECK(edt_ns >= last_edt_ns, "EDT %"PRIu64" after %"PRIu64,
                  edt_ns, last_edt_ns);
            last_edt_ns = edt_ns;

            uint64_t level = bucket_add(&bucket, MAX(edt_ns, now_ns),
                                        ends[j] - before);
            CHECK(level <= MAX(burst, MTU) - MTU + max_size
                           + bytes_per_ns(rate),
                  "rate %"PRIu64", burst %"PRIu64": burst of %"PRIu64" bytes",
                  rate, burst, level);
        }
        if (admitted) {
            e.tat = next + ends[admitted - 1] * BYTE;
        }

        /* From a heavy overload to an idle meter. */
        uint64_t batch_ns = bytes * BYTE / rate;
        switch (choose(6)) {
        case 0:
            break;
        case 1: case 2:
            now_ns += choose(batch_ns + 1);
            break;
        case 3: case 4:
            now_ns += choose(2 * batch_ns + 1);
            break;
        case 5:
            now_ns += choose_log(HOUR_NS);
            break;
        }
    }
    fixture_destroy(&f);
}

static void
test_never_early(void)
{
    for (unsigned int i = 0; i < rounds(10000); i++) {
        uint64_t rate = choose_rate();

        check_random(rate, choose_burst(rate, 3600),
                     2 * HOUR_NS + choose(DAY_NS), 200);
    }
}

/* A burst is as large as it is set, and unset it is one MTU. */
static void
test_burst(void)
{
    static const uint64_t rates[] = { 1000000, UINT64_C(8000000000) };
    static const uint32_t sizes[] = { 64, 512, 1500, MTU };

    for (size_t i = 0; i < ARRAY_SIZE(rates) * ARRAY_SIZE(sizes); i++) {
        uint64_t rate = rates[i % ARRAY_SIZE(rates)];
        uint32_t size = sizes[i / ARRAY_SIZE(rates)];

        for (unsigned int j = 0; j < rounds(50); j++) {
            uint64_t burst = choose_burst(rate, 1);
            uint64_t now_ns = HOUR_NS + choose(HOUR_NS);
            uint64_t n = 0, expected = MAX(burst, MTU) - MTU;
            struct edt_reservation r;
            struct fixture f;

            expected = expected / size + 1;
            fixture_init(&f, rate, burst, EDT_MAX_DELAY_US, now_ns);
            for (int k = 0; k < 2; k++) {
                /* The second time, after a pause that is long enough. */
                n = 0;
                while (reserve(&f, now_ns, size, 1, &r)
                       && edt_reservation_edt_ns(&r, f.p, now_ns, 0)
                          <= now_ns) {
                    n++;
                }

                /* The last one may be a tick beyond the burst. */
                CHECK(n == expected
                      || (n == expected - 1 && (expected - 1) * size
                                               == MAX(burst, MTU) - MTU),
                      "%"PRIu64" frames of %"PRIu32" bytes rather than "
                      "%"PRIu64" in a burst of %"PRIu64" bytes", n, size,
                      expected, burst);
                now_ns += (n + 1) * size * UINT64_C(8000000000) / rate
                          + MAX(burst, MTU) * UINT64_C(8000000000) / rate + 2;
            }
            fixture_destroy(&f);
        }
    }
}

/* Refusal. */

/* Rates at which a byte is a whole number of ticks, some of them odd. */
static uint64_t
choose_exact_rate(void)
{
    static const uint64_t rates[] = {
        1000, 1000000, 4194304, 8000000, 1000000000, UINT64_C(8000000000),
        UINT64_C(25600000000), UINT64_C(65536000000), UINT64_C(327680000000),
    };

    return rates[choose(ARRAY_SIZE(rates))];
}

/* The longest wait is exact to a tick, and what is refused changes nothing. */
static void
test_max_delay(void)
{
    for (unsigned int i = 0; i < rounds(20000); i++) {
        uint64_t rate = choose_exact_rate();
        uint64_t byte_ticks = (UINT64_C(8000000000) << EDT_TICK_SHIFT) / rate;
        uint64_t delay_us = choose(4) ? choose_log(EDT_MAX_DELAY_US + 1)
                                      : EDT_MAX_DELAY_US;
        uint64_t now_ns = choose_uptime();
        uint64_t limit = (now_ns + delay_us * 1000) << EDT_TICK_SHIFT;
        size_t n = 1 + choose(MAX_N);
        uint32_t ends[MAX_N];
        uint32_t bytes = 0;
        struct edt_reservation r;
        struct fixture f;
        size_t expected;

        for (size_t j = 0; j < n; j++) {
            ends[j] = bytes += choose_frame();
        }

        /* Let the first 'j' packets be those that are just not too late, or
         * are too late by a tick, or by something. */
        size_t j = choose(n);
        uint64_t tat = limit - (j ? ends[j - 1] : 0) * byte_ticks
                       + (choose(2) ? choose(2) : choose(3 * MTU) * byte_ticks)
                       - choose(2) * choose(100);
        uint64_t base = (int64_t) (tat - (now_ns << EDT_TICK_SHIFT)) > 0
                        ? tat : now_ns << EDT_TICK_SHIFT;

        for (expected = 0; expected < n; expected++) {
            uint32_t before = expected ? ends[expected - 1] : 0;

            if ((int64_t) (base + before * byte_ticks - limit) > 0) {
                break;
            }
        }

        fixture_init(&f, rate, 0, delay_us, now_ns);
        atomic_store_relaxed(&f.meter.tat_ticks, tat);
        size_t admitted = edt_meter_reserve(&f.meter, f.p, now_ns, ends, n,
                                            &r);
        CHECK(admitted == expected, "%"PRIuSIZE" of %"PRIuSIZE" packets "
              "admitted rather than %"PRIuSIZE" at %"PRIu64" bit/s",
              admitted, n, expected, rate);
        if (admitted) {
            uint64_t end = base + ends[admitted - 1] * byte_ticks;

            CHECK(r.base_ticks == base && r.end_ticks == end
                  && get_tat(&f) == end, "reserved %"PRIu64" to %"PRIu64
                  " rather than %"PRIu64" to %"PRIu64, r.base_ticks,
                  r.end_ticks, base, end);
        } else {
            CHECK(get_tat(&f) == tat, "refused packets moved the schedule");
        }

        /* At the same time, nothing more is admitted. */
        if (admitted < n) {
            CHECK(!edt_meter_reserve(&f.meter, f.p, now_ns,
                                     &(uint32_t) { MTU }, 1, &r),
                  "packet admitted after another one was refused");
        }
        fixture_destroy(&f);
    }
}

/* Refund. */

/* Tail refunds leave the schedule exactly as it would have been. */
static void
test_refund_tail(void)
{
    for (unsigned int i = 0; i < rounds(300); i++) {
        uint64_t rate = choose_rate();
        uint64_t burst = choose_burst(rate, 3600);
        uint64_t delay_us = choose_log(EDT_MAX_DELAY_US) + 1;
        uint64_t now_ns = 2 * HOUR_NS + choose(DAY_NS);
        struct fixture f[2];

        fixture_init(&f[0], rate, burst, delay_us, now_ns);
        fixture_init(&f[1], rate, burst, delay_us, now_ns);
        for (unsigned int j = 0; j < 100; j++) {
            struct edt_reservation r[2] = { { 0, 0 }, { 0, 0 } };
            size_t n = 1 + choose(MAX_N);
            uint32_t ends[MAX_N];
            uint32_t bytes = 0;

            for (size_t k = 0; k < n; k++) {
                ends[k] = bytes += choose_frame();
            }

            size_t admitted = edt_meter_reserve(&f[0].meter, f[0].p, now_ns,
                                                ends, n, &r[0]);
            size_t kept = choose(admitted + 1);

            if (kept < admitted) {
                uint32_t kept_bytes = kept ? ends[kept - 1] : 0;

                edt_meter_refund(&f[0].meter, f[0].p, &r[0], kept_bytes,
                                 ends[admitted - 1] - kept_bytes, true);
            }
            if (kept) {
                CHECK(edt_meter_reserve(&f[1].meter, f[1].p, now_ns, ends,
                                        kept, &r[1]) == kept
                      && r[0].base_ticks == r[1].base_ticks,
                      "refunded meter differs from one that never saw the "
                      "packets");
                CHECK(get_tat(&f[0]) == get_tat(&f[1]),
                      "schedule at %"PRIu64" after a refund rather than "
                      "%"PRIu64, get_tat(&f[0]), get_tat(&f[1]));
            }
            now_ns += choose(2 * (uint64_t) (bytes * BYTE / rate) + 2);
        }
        fixture_destroy(&f[0]);
        fixture_destroy(&f[1]);
    }
}

/* Refunds keep the rate when other reservations come between: as long as there
 * is a backlog, the schedule advances by what was kept. */
static void
test_refund_interleaved(void)
{
    for (unsigned int i = 0; i < rounds(300); i++) {
        uint64_t rate = choose_rate();
        uint64_t now_ns = choose_uptime();
        uint64_t start_ns = now_ns;
        uint64_t kept_bytes = 0;
        struct fixture f;
        uint64_t tat = 0;

        fixture_init(&f, rate, 0, EDT_MAX_DELAY_US, now_ns);
        for (unsigned int j = 0; j < 300; j++) {
            struct edt_reservation r[4];
            uint32_t bytes[ARRAY_SIZE(r)];
            size_t n = 1 + choose(ARRAY_SIZE(r));
            bool admitted[ARRAY_SIZE(r)];

            for (size_t k = 0; k < n; k++) {
                bytes[k] = choose_frame();
                admitted[k] = edt_meter_reserve(&f.meter, f.p, now_ns,
                                                &bytes[k], 1, &r[k]);
                kept_bytes += admitted[k] ? bytes[k] : 0;
            }
            for (size_t k = 0; k < n; k++) {
                uint32_t refunded = choose(2) ? choose(bytes[k] + 1) : 0;

                if (admitted[k] && refunded) {
                    edt_meter_refund(&f.meter, f.p, &r[k],
                                     bytes[k] - refunded, refunded, choose(2));
                    kept_bytes -= refunded;
                }
            }

            /* Keep the backlog.  All that counts is what was kept. */
            tat = get_tat(&f) - (start_ns << EDT_TICK_SHIFT);
            now_ns = start_ns + (tat >> EDT_TICK_SHIFT);
        }
        uint64_t expected = (kept_bytes * BYTE << EDT_TICK_SHIFT) / rate;

        CHECK(tat <= expected + expected / 1000
              && tat >= expected - expected / 1000,
              "%"PRIu64" bytes kept take %"PRIu64" ticks rather than %"PRIu64
              " at %"PRIu64" bit/s", kept_bytes, tat, expected, rate);

        /* What is given back late, when the meter has long been idle, is no
         * credit. */
        struct edt_reservation r;

        now_ns += HOUR_NS;
        CHECK(reserve(&f, now_ns, MTU, 1, &r) == 1, "idle meter refuses");
        now_ns += HOUR_NS;
        edt_meter_refund(&f.meter, f.p, &r, 0, MTU, choose(2));
        CHECK(reserve(&f, now_ns, MTU, 1, &r) == 1
              && edt_reservation_edt_ns(&r, f.p, now_ns, 0) == now_ns,
              "refund became credit");
        fixture_destroy(&f);
    }
}

/* Stamping with several meters. */

#define N_LINKS EDT_CHAIN_MAX

static struct dp_packet *
packet_new(uint32_t size)
{
    struct dp_packet *packet = dp_packet_new(size);

    dp_packet_put_zeros(packet, size);
    pkt_metadata_init(&packet->md, ODPP_NONE);
    return packet;
}

/* A list of 'n' meter actions. */
static struct nlattr *
actions_init(struct ofpbuf *actions, size_t n)
{
    ofpbuf_init(actions, 0);
    for (size_t i = 0; i < n; i++) {
        nl_msg_put_u32(actions, OVS_ACTION_ATTR_METER, i);
    }
    return actions->data;
}

/* What stamps name. */
static struct edt_chains *chains;

/* Returns the chain of what has passed 'n' meters in run_meters(). */
static uint32_t
chain_of(size_t n)
{
    uint32_t chain = EDT_CHAIN_NONE;

    for (size_t i = 0; i < n; i++) {
        chain = edt_chains_next(chains, chain, 10 + i, false);
    }
    return chain;
}

/* Makes 'batch' pass the meters. */
static void
run_meters(struct fixture *meters, size_t n, struct nlattr *actions,
           struct dp_packet_batch *batch, uint64_t now_ns,
           struct edt_stamp_result *results)
{
    struct edt_chain chain = { .n = 0 };
    struct nlattr *a = actions;

    for (size_t i = 0; i < n; i++) {
        edt_chain_begin(&chain, a, batch);
        edt_stamp_batch(chains, &chain, &meters[i].meter, meters[i].p, 10 + i,
                        batch, UINT32_MAX, now_ns, &results[i]);
        edt_chain_end(&chain, a, batch);
        a = nl_attr_next(a);
    }
}

/* 1 to 4 meters in a row, of which some count packets: a packet has the latest
 * of their EDTs, and each meter's schedule has advanced by the packets that
 * passed all of them. */
static void
test_chain(void)
{
    for (unsigned int i = 0; i < rounds(500); i++) {
        size_t n_meters = 1 + choose(N_LINKS);
        uint64_t now_ns = choose_uptime();
        struct fixture f[N_LINKS], twin[N_LINKS];
        struct ofpbuf buf;
        struct nlattr *actions = actions_init(&buf, n_meters);

        for (size_t j = 0; j < n_meters; j++) {
            struct edt_limits limits = {
                .rate = 1000000 + choose_log(UINT64_C(100000000000)),
                .max_delay_us = choose_log(100000),
            };

            if (choose(2)) {
                limits.per_packet = true;
                limits.rate = 100 + choose_log(10000000);
            }
            fixture_init_limits(&f[j], &limits, now_ns);
            limits.max_delay_us = EDT_MAX_DELAY_US;
            fixture_init_limits(&twin[j], &limits, now_ns);
        }
        for (unsigned int j = 0; j < 50; j++) {
            struct edt_stamp_result results[N_LINKS];
            size_t n = 1 + choose(MAX_N);
            uint32_t ends[MAX_N], counts[MAX_N];
            uint32_t bytes = 0;
            struct dp_packet_batch batch;
            struct edt_reservation r[N_LINKS];

            dp_packet_batch_init(&batch);
            for (size_t k = 0; k < n; k++) {
                uint32_t size = choose_frame();

                ends[k] = bytes += size;
                counts[k] = k + 1;
                dp_packet_batch_add(&batch, packet_new(size));
            }
            run_meters(f, n_meters, actions, &batch, now_ns, results);

            size_t left = n;
            for (size_t k = 0; k < n_meters; k++) {
                CHECK(results[k].n_packets == left
                      && results[k].n_bytes == (left ? ends[left - 1] : 0)
                      && results[k].n_dropped <= left, "wrong result");
                left -= results[k].n_dropped;
                CHECK(results[k].n_bytes - results[k].n_dropped_bytes
                      == (left ? ends[left - 1] : 0), "wrong bytes dropped");
            }
            CHECK(left == dp_packet_batch_size(&batch), "wrong batch size");

            for (size_t k = 0; left && k < n_meters; k++) {
                CHECK(edt_meter_reserve(&twin[k].meter, twin[k].p, now_ns,
                                        twin[k].p->limits.per_packet
                                        ? counts : ends, left, &r[k]) == left,
                      "a packet was admitted that would be too late");
                CHECK(get_tat(&f[k]) == get_tat(&twin[k]),
                      "meter %"PRIuSIZE" of %"PRIuSIZE" is at %"PRIu64" rather"
                      " than %"PRIu64, k, n_meters, get_tat(&f[k]),
                      get_tat(&twin[k]));
            }
            for (size_t k = 0; k < left; k++) {
                const struct edt_stamp *stamp = &batch.packets[k]->md.edt;
                uint64_t edt_ns = 0;
                uint32_t gap_ns = 0;

                for (size_t m = 0; m < n_meters; m++) {
                    bool per_packet = f[m].p->limits.per_packet;
                    uint32_t before = per_packet ? k : k ? ends[k - 1] : 0;
                    uint64_t t = edt_reservation_edt_ns(&r[m], f[m].p, now_ns,
                                                        before);

                    if (t > edt_ns) {
                        edt_ns = t;
                        gap_ns = f[m].p->gap_ns;
                    }
                }
                CHECK(stamp->edt_ns == edt_ns && stamp->gap_ns == gap_ns
                      && stamp->chain == chain_of(n_meters),
                      "stamped with EDT %"PRIu64", gap %"PRIu32", chain "
                      "%"PRIu32" rather than %"PRIu64", %"PRIu32", %"PRIu32,
                      stamp->edt_ns, stamp->gap_ns, stamp->chain,
                      edt_ns, gap_ns, chain_of(n_meters));
            }
            dp_packet_delete_batch(&batch, true);
            now_ns += choose_log(100000000);
        }
        for (size_t j = 0; j < n_meters; j++) {
            fixture_destroy(&f[j]);
            fixture_destroy(&twin[j]);
        }
        ofpbuf_uninit(&buf);
    }
}

/* A VM is limited to 300 Mbit/s, destination X to 50.  Floods to X and another
 * destination get 50 and 250: what X's meter refuses does not count at the
 * VM's. */
static void
test_refused_is_free(void)
{
    const uint64_t start_ns = DAY_NS;
    const uint64_t duration_ns = UINT64_C(2000000000);
    struct fixture f[2];
    struct ofpbuf buf;
    struct nlattr *actions = actions_init(&buf, 2);
    uint64_t bytes[2] = { 0, 0 };

    fixture_init(&f[0], 300000000, 0, 50000, start_ns);
    fixture_init(&f[1], 50000000, 0, 50000, start_ns);
    for (uint64_t t = 0; t < duration_ns; t += 50000 + choose(100000)) {
        int first = choose(2);

        for (int i = 0; i < 2; i++) {
            struct edt_stamp_result results[2];
            struct dp_packet_batch batch;
            struct dp_packet *packet;
            bool x = i == first;

            dp_packet_batch_init(&batch);
            for (int j = 0; j < 4; j++) {
                dp_packet_batch_add(&batch, packet_new(MTU));
            }
            run_meters(f, x ? 2 : 1, actions, &batch, start_ns + t, results);
            DP_PACKET_BATCH_FOR_EACH (j, packet, &batch) {
                bytes[x] += dp_packet_size(packet);
            }
            dp_packet_delete_batch(&batch, true);
        }
    }

    /* What waits at the end is up to 50 ms' worth. */
    uint64_t rate[2];
    for (int i = 0; i < 2; i++) {
        rate[i] = bytes[i] * 8 / (duration_ns / 1000);
    }
    CHECK(rate[1] >= 49 && rate[1] <= 52 && rate[0] >= 245 && rate[0] <= 260,
          "%"PRIu64" Mbit/s to X and %"PRIu64" to the others", rate[1],
          rate[0]);
    fixture_destroy(&f[0]);
    fixture_destroy(&f[1]);
    ofpbuf_uninit(&buf);
}

#ifdef DP_PACKET_OL_SHIFT_COUNT
/* Batches can have any size ("shaper-offload.h"): a large one is stamped, and
 * what is too late of it dropped, as if it came in several. */
static void
test_large_batch(void)
{
    enum { N = 5 * MAX_N - 1 };

    for (unsigned int i = 0; i < rounds(500); i++) {
        struct edt_limits limits = {
            .rate = choose_rate(),
            .max_delay_us = 1 + choose_log(EDT_MAX_DELAY_US),
            .fair = !choose(4),
        };
        uint64_t now_ns = choose_uptime();
        struct dp_packet *packets[N];
        struct edt_stamp stamps[N];
        struct dp_packet_batch batch;
        size_t n_dropped[2] = { 0, 0 };

        for (int large = 0; large < 2; large++) {
            struct fixture f;

            fixture_init_limits(&f, &limits, now_ns);
            for (size_t j = 0; j < N; j++) {
                packets[j] = packet_new(MTU);
            }
            dp_packet_batch_init(&batch);
            for (size_t j = 0, n; j < N; j += n) {
                struct edt_chain chain = { .n = 0 };
                struct edt_stamp_result result;
                struct dp_packet *packet;

                n = large ? N : MIN(N - j, MAX_N);
                dp_packet_batch_reset(&batch);
                dp_packet_batch_add_array(&batch, &packets[j], n);
                edt_stamp_batch(chains, &chain, &f.meter, f.p, 1, &batch,
                                UINT32_MAX, now_ns, &result);
                n_dropped[large] += result.n_dropped;
                CHECK(result.n_packets == n && result.n_bytes == n * MTU
                      && dp_packet_batch_size(&batch) == n - result.n_dropped,
                      "wrong counts");
                DP_PACKET_BATCH_FOR_EACH (k, packet, &batch) {
                    const struct edt_stamp *stamp = &packet->md.edt;

                    if (!large) {
                        stamps[j + k] = *stamp;
                        continue;
                    }
                    if (k >= N - n_dropped[0]) {
                        break;
                    }
                    /* Each reservation rounds up to a tick. */
                    CHECK(stamp->edt_ns >= stamps[k].edt_ns - N / MAX_N - 1
                          && stamp->edt_ns <= stamps[k].edt_ns
                          && stamp->gap_ns == stamps[k].gap_ns
                          && stamp->flags == stamps[k].flags,
                          "packet %"PRIuSIZE": %"PRIu64", not %"PRIu64, k,
                          stamp->edt_ns, stamps[k].edt_ns);
                }
                dp_packet_delete_batch(&batch, true);
            }
            dp_packet_batch_destroy(&batch);
            fixture_destroy(&f);
        }
        /* The last one that is admitted may just be too late in several. */
        CHECK(n_dropped[1] <= n_dropped[0]
              && n_dropped[1] + 1 >= n_dropped[0],
              "%"PRIuSIZE" dropped, not %"PRIuSIZE, n_dropped[1],
              n_dropped[0]);
    }
}
#endif

/* Packets that wait for longer than the threshold, and no others, are marked
 * if they are ECT. */
static void
test_ecn(void)
{
    uint64_t n_marked = 0, n_unmarked = 0;

    for (unsigned int i = 0; i < rounds(500); i++) {
        uint64_t now_ns = choose_uptime();
        struct edt_limits limits = {
            .rate = choose_rate(),
            .max_delay_us = 1 + choose_log(EDT_MAX_DELAY_US),
        };
        struct edt_chain chain = { .n = 0 };
        struct fixture f;

        limits.ecn_threshold_us = choose_log(limits.max_delay_us);
        limits.burst = choose_burst(limits.rate, 1);
        fixture_init(&f, limits.rate, 0, 0, now_ns);
        edt_meter_set_params(&f.meter, edt_params_create(&limits), now_ns);
        f.p = edt_meter_params(&f.meter);
        for (unsigned int j = 0; j < 50; j++) {
            struct edt_stamp_result result;
            struct dp_packet_batch batch;
            struct dp_packet *packet;
            uint8_t ecns[MAX_N];

            dp_packet_batch_init(&batch);
            for (size_t n = 1 + choose(MAX_N); n > 0; n--) {
                size_t k = dp_packet_batch_size(&batch);
                uint8_t *data;

                packet = packet_new(choose_frame());
                data = dp_packet_data(packet);
                data[12] = 0x08;
                data[14] = 0x45;
                data[15] = ecns[k] = choose(4);
                dp_packet_batch_add(&batch, packet);
            }
            chain.n = 0;
            edt_stamp_batch(chains, &chain, &f.meter, f.p, 1, &batch,
                            UINT32_MAX, now_ns, &result);
            DP_PACKET_BATCH_FOR_EACH (k, packet, &batch) {
                const uint8_t *data = dp_packet_data(packet);
                int64_t wait_ns = packet->md.edt.edt_ns - now_ns;
                bool late = limits.ecn_threshold_us
                            && wait_ns > (int64_t) limits.ecn_threshold_us
                                         * 1000;
                bool ect = ecns[k] == IP_ECN_ECT_0 || ecns[k] == IP_ECN_ECT_1;
                uint8_t expected = late && ect ? IP_ECN_CE : ecns[k];

                CHECK(data[15] == expected, "ECN field %d rather than %d, "
                      "packet %"PRIuSIZE" waits for %"PRId64" ns, threshold "
                      "%"PRIu64" us", data[15], expected, k, wait_ns,
                      limits.ecn_threshold_us);
                n_marked += late && ect;
                n_unmarked += !late && ect;
            }
            dp_packet_delete_batch(&batch, true);
            now_ns += choose_log(10000000);
        }
        fixture_destroy(&f);
    }
    CHECK(iterations || (n_marked > 1000 && n_unmarked > 1000),
          "%"PRIu64" packets marked, %"PRIu64" not", n_marked, n_unmarked);
}

/* A packet that takes long at a low rate does not keep others away for as long
 * once the rate is high. */
static void
test_raise(void)
{
    for (unsigned int i = 0; i < rounds(500); i++) {
        uint64_t now_ns = choose_uptime();
        uint64_t max_delay_us = 1 + choose_log(100000);
        uint64_t rate = EDT_MIN_RATE_BPS + choose_log(1000000);
        struct edt_reservation r;
        struct fixture f;

        fixture_init(&f, rate, 0, max_delay_us, now_ns);
        while (reserve(&f, now_ns, 1 + choose(9000), 1 + choose(MAX_N), &r)) {
            continue;
        }
        fixture_set_params(&f, 1000 * rate, 0, max_delay_us, now_ns);
        now_ns += max_delay_us * 1000 + 9018 * BYTE / (1000 * rate) + 1;
        CHECK(reserve(&f, now_ns, MTU, 1, &r),
              "refused after %"PRIu64" us at %"PRIu64" bit/s rather than "
              "%"PRIu64, max_delay_us, 1000 * rate, rate);
        fixture_destroy(&f);
    }
}

/* Soon after the machine has started, a burst may be longer than that was
 * ago. */
static void
test_young_clock(void)
{
    for (unsigned int i = 0; i < rounds(2000); i++) {
        uint64_t now_ns = 1 + choose_log(10000000000);
        uint64_t rate = EDT_MIN_RATE_BPS + choose_log(1000000000);
        uint64_t burst = choose_log(rate * 100 / 8);
        struct edt_reservation r;
        struct fixture f;
        uint64_t last_ns = 0;

        fixture_init(&f, rate, burst, 50000, now_ns);
        for (unsigned int j = 0; j < 20; j++) {
            size_t n = reserve(&f, now_ns, MTU, 1 + choose(MAX_N), &r);

            for (size_t k = 0; k < n; k++) {
                uint64_t edt_ns = edt_reservation_edt_ns(&r, f.p, now_ns,
                                                         MTU * k);

                CHECK(edt_ns && edt_ns >= last_ns
                      && edt_ns <= now_ns + 50000000 + 1,
                      "at %"PRIu64": EDT %"PRIu64" after %"PRIu64, now_ns,
                      edt_ns, last_ns);
                last_ns = edt_ns;
            }
            now_ns += choose_log(100000000);
        }
        fixture_destroy(&f);
    }
}

/* Parameters that change in place. */

static void
test_change(void)
{
    for (unsigned int i = 0; i < rounds(500); i++) {
        uint64_t now_ns = choose_uptime();
        uint64_t rate = choose_rate();
        struct edt_reservation r;
        struct bucket bucket;
        struct fixture f;

        fixture_init(&f, rate, 0, EDT_MAX_DELAY_US, now_ns);
        for (unsigned int j = 0; j < 30; j++) {
            uint64_t new_rate = choose_rate();
            uint64_t burst = choose(2) ? choose_log(new_rate / 8) : 0;
            uint64_t tat = 0;
            size_t n;

            /* A backlog, almost always. */
            for (unsigned int k = 0; k < 20; k++) {
                n = reserve(&f, now_ns, MTU, 1 + choose(MAX_N), &r);
                tat = get_tat(&f);
                if (!n) {
                    break;
                }
            }

            /* The change alone changes nothing, except what it takes to send
             * the last packets, which had to wait for the longest time. */
            const uint64_t limit = (now_ns + EDT_MAX_DELAY_US * 1000)
                                   << EDT_TICK_SHIFT;
            bool faster = new_rate > rate && (int64_t) (tat - limit) > 0;

            if (choose(5)) {
                fixture_set_params(&f, new_rate, burst, EDT_MAX_DELAY_US,
                                   now_ns);
            } else {
                edt_meter_set_params(&f.meter, NULL, now_ns);
                CHECK(!edt_meter_params(&f.meter), "not without parameters");
                fixture_set_params(&f, new_rate, burst, EDT_MAX_DELAY_US,
                                   now_ns);
                faster = false;
            }
            if (faster) {
                double excess = (double) (tat - limit) * rate / new_rate;

                CHECK(fabs(get_tat(&f) - limit - excess) <= 2 + excess / 1e6,
                      "%"PRIu64" ticks rather than %.0f beyond the longest "
                      "wait", get_tat(&f) - limit, excess);
                tat = get_tat(&f);
            }
            CHECK(get_tat(&f) == tat, "schedule jumped from %"PRIu64" to "
                  "%"PRIu64, tat, get_tat(&f));
            rate = new_rate;

            /* The backlog goes on where it would have, no earlier, and at the
             * new rate. */
            uint64_t wait_ns = (tat - (now_ns << EDT_TICK_SHIFT)
                                + (1 << EDT_TICK_SHIFT) - 1) >> EDT_TICK_SHIFT;
            if ((int64_t) (tat - (now_ns << EDT_TICK_SHIFT)) >= 0) {
                n = reserve(&f, now_ns, MTU, 2, &r);
                CHECK(!n == (wait_ns > EDT_MAX_DELAY_US * 1000),
                      "wait of %"PRIu64" ns %s", wait_ns,
                      n ? "allowed" : "refused");
                if (n) {
                    CHECK(r.base_ticks == tat, "reserved from %"PRIu64
                          " rather than %"PRIu64, r.base_ticks, tat);
                }
                if (n == 2) {
                    uint64_t gap = edt_reservation_edt_ns(&r, f.p, now_ns, MTU)
                                   - edt_reservation_edt_ns(&r, f.p, now_ns,
                                                            0);
                    uint64_t exact = MTU * BYTE / new_rate;

                    CHECK(gap + 2 + exact / 1000 >= exact
                          && gap <= exact + 2 + exact / 1000,
                          "gap of %"PRIu64" ns at %"PRIu64" bit/s", gap,
                          new_rate);
                }
            }

            /* What leaves from then on keeps to the new rate and burst. */
            now_ns += wait_ns;
            bucket = (struct bucket) { .rate = new_rate, .last_ns = now_ns };
            for (unsigned int k = 0; k < 50; k++) {
                n = reserve(&f, now_ns, 1000, 1 + choose(MAX_N), &r);
                for (size_t m = 0; m < n; m++) {
                    uint64_t edt_ns = edt_reservation_edt_ns(&r, f.p, now_ns,
                                                             1000 * m);
                    uint64_t level = bucket_add(&bucket, MAX(edt_ns, now_ns),
                                                1000);

                    CHECK(level <= MAX(burst, MTU) + bytes_per_ns(new_rate),
                          "burst of %"PRIu64" bytes after a change to %"PRIu64
                          " bit/s, burst %"PRIu64, level, new_rate, burst);
                }
                now_ns += choose(20 * (uint64_t) (1000 * BYTE / new_rate));
            }
            now_ns = MAX(now_ns, bucket.last_ns);
        }
        fixture_destroy(&f);
    }
}

/* Time that wraps around. */

static void
test_wrap(void)
{
    /* Through the wrap-around and through its half, under load. */
    for (unsigned int i = 0; i < rounds(300); i++) {
        uint64_t rate = choose_rate();
        uint64_t at_ns = (1 + choose(4)) * (WRAP_NS / 2);
        uint64_t burst = choose_burst(rate, 60);

        check_random(rate, burst,
                     at_ns - choose_log(100 * MTU * BYTE / rate), 200);
    }

    /* A meter that has been idle for long is an idle meter. */
    for (unsigned int i = 0; i < rounds(20000); i++) {
        uint64_t rate = choose_rate();
        uint64_t burst = choose(2) ? choose_burst(rate, 60) : 0;
        uint64_t now_ns = choose_uptime();
        struct edt_reservation r;
        struct fixture f;

        fixture_init(&f, rate, burst, choose_log(EDT_MAX_DELAY_US), now_ns);
        reserve(&f, now_ns, choose_frame(), 1 + choose(MAX_N), &r);
        for (unsigned int j = 0; j < 3; j++) {
            now_ns += HOUR_NS + choose(WRAP_NS - STALE_NS - 20 * HOUR_NS);
            CHECK(reserve(&f, now_ns, MTU, 1, &r) == 1, "refused at %"PRIu64,
                  now_ns);

            uint64_t edt_ns = edt_reservation_edt_ns(&r, f.p, now_ns, 0);
            uint64_t tolerance_ns = burst > MTU
                                    ? (burst - MTU) * BYTE / rate : 0;
            CHECK(edt_ns <= now_ns && edt_ns >= now_ns - tolerance_ns,
                  "EDT of an idle meter is %"PRIu64" at %"PRIu64, edt_ns,
                  now_ns);
        }
        fixture_destroy(&f);
    }
}

/* A meter that has never been used is idle, whenever it is created and, for
 * some months, whenever it is used first. */
static void
test_created_late(void)
{
    for (uint64_t start_ns = HOUR_NS; start_ns < 5 * WRAP_NS / 2;
         start_ns += HOUR_NS) {
        uint64_t now_ns = start_ns + choose(2) * choose(100 * DAY_NS);
        struct edt_reservation r;
        struct fixture f;

        fixture_init(&f, 1000000, 0, 50000, start_ns);
        CHECK(reserve(&f, now_ns, MTU, 1, &r) == 1, "meter that was created "
              "after %"PRIu64" hours refuses its first packet",
              start_ns / HOUR_NS);
        CHECK(edt_reservation_edt_ns(&r, f.p, now_ns, 0) == now_ns,
              "first EDT of a meter created after %"PRIu64" hours is "
              "%"PRId64" ns ahead", start_ns / HOUR_NS,
              edt_reservation_edt_ns(&r, f.p, now_ns, 0) - now_ns);
        fixture_destroy(&f);

        fixture_init(&f, 1000000, 0, 50000, start_ns);
        uint64_t start = edt_meter_pace_start(&f.meter, f.p, now_ns, 0);
        CHECK(start == now_ns << EDT_TICK_SHIFT, "pace that was created after "
              "%"PRIu64" hours starts %"PRId64" ticks ahead",
              start_ns / HOUR_NS, start - (now_ns << EDT_TICK_SHIFT));
        edt_meter_charge(&f.meter, start, edt_cost(f.p, MTU));
        CHECK(get_tat(&f) == start + edt_cost(f.p, MTU),
              "first charge of a pace created after %"PRIu64" hours leads "
              "to %"PRIu64, start_ns / HOUR_NS, get_tat(&f));
        fixture_destroy(&f);
    }
}

/* Pacing at departure. */

/* Sends as many packets as 'f' allows and as there are.  Returns the bytes. */
static uint64_t
pace(struct fixture *f, uint64_t now_ns, uint64_t catch_up_ns,
     uint64_t *n_packets, bool *backlogged)
{
    uint64_t now = now_ns << EDT_TICK_SHIFT;
    uint64_t start = edt_meter_pace_start(&f->meter, f->p, now_ns,
                                          *backlogged ? catch_up_ns : 0);
    uint64_t cost = 0, bytes = 0;

    while (*n_packets && (int64_t) (start + cost - now) <= 0) {
        uint32_t size = choose_frame();

        cost += edt_cost(f->p, size);
        bytes += size;
        *n_packets -= 1;
    }
    if (cost) {
        edt_meter_charge(&f->meter, start, cost);
    }
    *backlogged = *n_packets > 0;
    return bytes;
}

static void
test_pace(void)
{
    const uint32_t max_frame = 9018;

    for (unsigned int i = 0; i < rounds(60); i++) {
        uint64_t rate = choose_rate();
        uint64_t burst = choose(2) ? choose_burst(rate, 1) : 0;
        uint64_t catch_up_ns = 1 + choose_log(10000000);
        uint64_t now_ns = choose_uptime();
        uint64_t n_packets, bytes = 0, allowed;
        bool backlogged = false;
        struct fixture f;

        /* At least 1,000 gaps, or polls. */
        uint64_t gap_ns = max_frame * BYTE / rate;
        uint64_t duration_ns = MAX(3000 * gap_ns, 3000 * catch_up_ns);

        /* Polled often enough, the rate is exact. */
        fixture_init(&f, rate, burst, 0, now_ns);
        n_packets = 1;
        pace(&f, now_ns, catch_up_ns, &n_packets, &backlogged);
        CHECK(!n_packets, "first packet has to wait");
        n_packets = UINT64_MAX;
        backlogged = true;
        uint64_t start_ns = now_ns;
        uint64_t start_tat = get_tat(&f);
        while (now_ns < start_ns + duration_ns) {
            now_ns += 1 + choose(catch_up_ns);
            if (gap_ns > 100 * catch_up_ns) {
                /* Slow: go to where something may happen. */
                uint64_t t = edt_meter_pace_start(&f.meter, f.p, now_ns,
                                                  catch_up_ns)
                             - (now_ns << EDT_TICK_SHIFT);

                if ((int64_t) t > 0) {
                    now_ns += (t >> EDT_TICK_SHIFT) + choose(catch_up_ns);
                }
            }
            bytes += pace(&f, now_ns, catch_up_ns, &n_packets, &backlogged);
        }
        uint64_t exact = (__int128) (now_ns - start_ns) * rate / BYTE;
        allowed = exact / 1000 + MAX(burst, MTU) + 2 * max_frame
                  + (__int128) catch_up_ns * rate / BYTE;
        CHECK(bytes <= exact + allowed && bytes + allowed >= exact,
              "%"PRIu64" bytes rather than %"PRIu64" in %"PRIu64" ns",
              bytes, exact, now_ns - start_ns);
        __int128 ticks = get_tat(&f) - start_tat;
        __int128 exact_ticks = (bytes * BYTE << EDT_TICK_SHIFT) / rate;
        CHECK(ticks <= exact_ticks + exact_ticks / 1000
              && ticks >= exact_ticks - exact_ticks / 1000,
              "%"PRIu64" bytes are booked with %"PRIu64" ticks rather than "
              "%"PRIu64, bytes, (uint64_t) ticks, (uint64_t) exact_ticks);

        /* A stall is caught up on for 'catch_up_ns' at most... */
        now_ns += duration_ns;
        bytes = pace(&f, now_ns, catch_up_ns, &n_packets, &backlogged);
        allowed = MAX((uint64_t) ((__int128) catch_up_ns * rate / BYTE),
                      MAX(burst, MTU) - MTU) + max_frame
                  + bytes_per_ns(rate);
        CHECK(bytes <= allowed, "%"PRIu64" bytes at once after a stall, with "
              "%"PRIu64" ns to catch up on", bytes, catch_up_ns);

        /* ...and an idle pace gains no more than its burst. */
        uint64_t late_ns = 10 * catch_up_ns + 2 * gap_ns;

        n_packets = 1;
        now_ns += late_ns + (MAX(burst, MTU) + max_frame) * BYTE / rate;
        pace(&f, now_ns, catch_up_ns, &n_packets, &backlogged);
        CHECK(!backlogged, "idle, but has to wait");
        now_ns += late_ns + (MAX(burst, MTU) + max_frame) * BYTE / rate;
        n_packets = UINT64_MAX;
        bytes = pace(&f, now_ns, catch_up_ns, &n_packets, &backlogged);
        allowed = MAX(burst, MTU) - MTU + max_frame + bytes_per_ns(rate);
        CHECK(bytes <= allowed, "%"PRIu64" bytes at once after a pause, burst "
              "%"PRIu64, bytes, burst);
        fixture_destroy(&f);
    }
}

/* Threads. */

#define N_THREADS 8
#define N_RESERVATIONS 20000

struct thread_aux {
    struct fixture *f;
    atomic_uint64_t *now_ns;
    bool refund;
    uint32_t seed;
    uint64_t kept_bytes;
    size_t n;
    struct edt_reservation reservations[N_RESERVATIONS];
};

static void *
thread_main(void *aux_)
{
    struct thread_aux *aux = aux_;
    struct fixture *f = aux->f;

    random_set_seed(aux->seed);
    for (unsigned int i = 0; i < N_RESERVATIONS; i++) {
        struct edt_reservation *r = &aux->reservations[aux->n];
        size_t n = 1 + choose(MAX_N);
        uint32_t ends[MAX_N];
        uint32_t bytes = 0;
        uint64_t now_ns;

        for (size_t j = 0; j < n; j++) {
            ends[j] = bytes += choose_frame();
        }

        /* All threads together advance the time by less than what they ask
         * for takes, mostly. */
        atomic_add_relaxed(aux->now_ns, choose(i % 4096 ? 3000 : 10000000),
                           &now_ns);
        n = edt_meter_reserve(&f->meter, f->p, now_ns, ends, n, r);
        if (!n) {
            continue;
        }
        aux->n++;
        aux->kept_bytes += ends[n - 1];
        if (aux->refund && choose(3) == 0) {
            size_t kept = choose(n);
            uint32_t kept_bytes = kept ? ends[kept - 1] : 0;
            uint32_t refunded = ends[n - 1] - kept_bytes;

            edt_meter_refund(&f->meter, f->p, r, kept_bytes, refunded,
                             choose(2));
            aux->kept_bytes -= refunded;
        }
    }
    return NULL;
}

static int
compare_reservations(const void *a_, const void *b_)
{
    const struct edt_reservation *a = a_;
    const struct edt_reservation *b = b_;

    return a->base_ticks < b->base_ticks ? -1 : a->base_ticks > b->base_ticks;
}

static void
test_threads(void)
{
    const uint64_t start_ns = DAY_NS;
    struct thread_aux *aux = xcalloc(N_THREADS, sizeof *aux);
    struct edt_reservation *all
        = xcalloc(N_THREADS * N_RESERVATIONS, sizeof *all);

    for (unsigned int i = 0; i < rounds(6); i++) {
        uint64_t rate = UINT64_C(10000000000) << (i / 2 % 3);
        uint64_t kept_bytes = 0, last_ns;
        pthread_t threads[N_THREADS];
        atomic_uint64_t now_ns;
        struct fixture f;
        size_t n = 0;

        atomic_init(&now_ns, start_ns);
        fixture_init(&f, rate, 0, 50000, start_ns);
        for (unsigned int j = 0; j < N_THREADS; j++) {
            aux[j].f = &f;
            aux[j].now_ns = &now_ns;
            aux[j].refund = i % 2;
            aux[j].seed = random_uint32() | 1;
            aux[j].kept_bytes = aux[j].n = 0;
            threads[j] = ovs_thread_create("meter", thread_main, &aux[j]);
        }
        for (unsigned int j = 0; j < N_THREADS; j++) {
            xpthread_join(threads[j], NULL);
            memcpy(&all[n], aux[j].reservations,
                   aux[j].n * sizeof *all);
            n += aux[j].n;
            kept_bytes += aux[j].kept_bytes;
        }
        atomic_read_relaxed(&now_ns, &last_ns);

        /* No more than the rate and the longest wait allow. */
        uint64_t limit_ns = last_ns - start_ns + 50000000
                            + MAX_N * 9018 * BYTE / rate;
        uint64_t limit = (__int128) limit_ns * rate / BYTE;
        CHECK(kept_bytes <= limit + limit / 1000 + MTU,
              "%"PRIu64" bytes released in %"PRIu64" ns", kept_bytes,
              last_ns - start_ns);

        /* The schedule has advanced by what was kept, at least. */
        __int128 exact = (kept_bytes * BYTE << EDT_TICK_SHIFT) / rate;
        __int128 advanced = get_tat(&f) - (start_ns << EDT_TICK_SHIFT);
        CHECK(advanced >= exact - exact / 1000 - 1,
              "%"PRIu64" bytes released, but the schedule has only advanced "
              "by %"PRIu64" ticks", kept_bytes, (uint64_t) advanced);

        /* Without refunds, no two reservations overlap. */
        if (!(i % 2)) {
            qsort(all, n, sizeof *all, compare_reservations);
            for (size_t j = 1; j < n; j++) {
                CHECK(all[j].base_ticks >= all[j - 1].end_ticks,
                      "%"PRIu64" to %"PRIu64" reserved, and from %"PRIu64,
                      all[j - 1].base_ticks, all[j - 1].end_ticks,
                      all[j].base_ticks);
            }
        }
        fixture_destroy(&f);
    }
    free(all);
    free(aux);
}

/* Threads that share a meter whose rate changes: what departs in each window
 * of time. */

#define N_CHANGES 8
#define N_CALLS 10000           /* Of each thread. */
#define WINDOW_MAX_N 8          /* Packets of a call. */
#define JUMBO 9018

/* A packet, and the rate that it was given its time by. */
struct departure {
    uint64_t time_ns;
    uint64_t rate;
    uint32_t bytes;
};

/* A rate that has been in force from 'from_ns' to 'until_ns'.  What was
 * promised then may depart for up to the longest wait after that. */
struct phase {
    uint64_t rate;
    uint64_t from_ns;
    uint64_t until_ns;
};

struct windows {
    struct edt_meter meter;
    uint64_t burst;
    uint64_t max_delay_us;
    bool late;                  /* Reserved for as edt_late_reserve() does. */
    atomic_uint64_t now_ns;
    atomic_count n_started;

    struct ovs_mutex mutex;     /* For who changes the rate. */
    uint64_t next_change_ns;
    size_t n_phases;
    struct phase phases[N_CHANGES + 1];
};

struct windows_thread {
    struct windows *w;
    uint32_t seed;
    size_t n;
    uint64_t n_refused;
    uint64_t dropped_bytes;
    struct departure departures[N_CALLS * WINDOW_MAX_N];
};

static uint64_t
windows_now(struct windows *w)
{
    uint64_t now_ns;

    atomic_read_relaxed(&w->now_ns, &now_ns);
    return now_ns;
}

/* Returns how long after a rate was last used packets may depart at it: the
 * last one admitted is behind others of its call. */
static uint64_t
windows_grace_ns(const struct windows *w)
{
    return w->max_delay_us * 1000 + JUMBO * 8;
}

/* Changes the rate of 'w', and notes between which times that was. */
static void
windows_change_rate(struct windows *w)
{
    struct phase *phase = &w->phases[w->n_phases++];

    phase->rate = UINT64_C(1000000000) + choose(UINT64_C(20000000000));
    phase->from_ns = windows_now(w);
    phase->until_ns = UINT64_MAX;
    edt_meter_set_params(&w->meter,
                         params_create(phase->rate, w->burst, w->max_delay_us),
                         phase->from_ns);
    w->next_change_ns = windows_now(w);
    if (w->n_phases > 1) {
        (phase - 1)->until_ns = w->next_change_ns;
    }
    /* When all that was promised at the rate before has departed. */
    w->next_change_ns += windows_grace_ns(w) + choose(10000000);
}

static void *
windows_main(void *aux_)
{
    struct windows_thread *aux = aux_;
    struct windows *w = aux->w;

    random_set_seed(aux->seed);

    /* All together.  None of them quiesces until it ends: what a change
     * replaces is there for who still uses it. */
    atomic_count_inc(&w->n_started);
    while (atomic_count_get(&w->n_started) < N_THREADS) {
        sched_yield();
    }
    for (unsigned int i = 0; i < N_CALLS; i++) {
        size_t n = w->late ? 1 : 1 + choose(WINDOW_MAX_N);
        uint32_t ends[WINDOW_MAX_N];
        const struct edt_params *p;
        struct edt_reservation r;
        uint64_t now_ns;
        size_t admitted;

        if (i % 16 == 0 && !ovs_mutex_trylock(&w->mutex)) {
            if (w->n_phases <= N_CHANGES
                && windows_now(w) > w->next_change_ns) {
                windows_change_rate(w);
            }
            ovs_mutex_unlock(&w->mutex);
        }
        for (size_t j = 0; j < n; j++) {
            ends[j] = (j ? ends[j - 1] : 0) + choose_frame();
        }

        /* The threads together ask for more than any rate, but for pauses
         * that are long enough to fill the bucket again. */
        atomic_add_relaxed(&w->now_ns, choose(i % 4096 == 0 ? 5000000
                                              : w->late ? 400 : 2000),
                           &now_ns);
        p = edt_meter_params(&w->meter);
        if (!w->late) {
            admitted = edt_meter_reserve(&w->meter, p, now_ns, ends, n, &r);
        } else {
            admitted = edt_meter_reserve_late(&w->meter, p, now_ns, now_ns,
                                              ends[0], &r);
            if (!admitted) {
                edt_meter_count_drop(&w->meter, ends[0]);
                aux->dropped_bytes += ends[0];
            }
        }
        for (size_t j = 0; j < admitted; j++) {
            struct departure *d = &aux->departures[aux->n++];
            uint64_t edt_ns = edt_reservation_edt_ns(&r, p, now_ns,
                                                     j ? ends[j - 1] : 0);

            d->time_ns = MAX(edt_ns, now_ns);
            d->rate = p->limits.rate;
            d->bytes = ends[j] - (j ? ends[j - 1] : 0);
        }
        aux->n_refused += n - admitted;
    }
    return NULL;
}

static int
compare_departures(const void *a_, const void *b_)
{
    const struct departure *a = a_;
    const struct departure *b = b_;

    return a->time_ns < b->time_ns ? -1 : a->time_ns > b->time_ns;
}

/* Returns the rate at which packets may depart at 'time_ns', and in '*end_ns'
 * until when, at least, that is so.
 *
 * It is the highest of those in force, or promised by, then.  While a rate is
 * changed, other threads' clocks go on: what they are promised beyond the
 * longest wait from when the change began is taken for the time that the last
 * packet takes, and goes at the new rate if that is higher.  So for as long as
 * the change took both rates may be seen, one longest wait later. */
static uint64_t
windows_rate(const struct windows *w, uint64_t time_ns, uint64_t *end_ns)
{
    const uint64_t max_delay_ns = w->max_delay_us * 1000;
    const uint64_t grace_ns = windows_grace_ns(w);
    uint64_t rate = 0;

    *end_ns = UINT64_MAX;
    for (size_t i = 0; i < w->n_phases; i++) {
        const struct phase *phase = &w->phases[i];
        const uint64_t ends[] = {
            phase->from_ns,
            phase->from_ns + max_delay_ns,
            phase->until_ns == UINT64_MAX
            ? UINT64_MAX : phase->until_ns + grace_ns,
        };

        for (size_t j = 0; j < ARRAY_SIZE(ends); j++) {
            if (time_ns < ends[j]) {
                *end_ns = MIN(*end_ns, ends[j]);
            }
        }
        if (time_ns >= ends[0] && time_ns < ends[2]) {
            rate = i && time_ns >= ends[1]
                   && time_ns < w->phases[i - 1].until_ns + grace_ns
                   ? rate + phase->rate : MAX(rate, phase->rate);
        }
    }
    return rate;
}

/* Returns the number of the phase whose rate is the only one that packets may
 * depart at at 'time_ns', or SIZE_MAX if there are several. */
static size_t
windows_steady(const struct windows *w, uint64_t time_ns)
{
    for (size_t i = 0; i < w->n_phases; i++) {
        if (time_ns >= (i ? w->phases[i - 1].until_ns + windows_grace_ns(w)
                        : w->phases[0].from_ns)
            && (i + 1 == w->n_phases || time_ns < w->phases[i + 1].from_ns)) {
            return i;
        }
    }
    return SIZE_MAX;
}

/* Returns what the highest rates that apply carry from 'from_ns' to 'to_ns',
 * in bytes times 8e9. */
static __int128
windows_carried(const struct windows *w, uint64_t from_ns, uint64_t to_ns)
{
    __int128 carried = 0;

    while (from_ns < to_ns) {
        uint64_t end_ns;
        uint64_t rate = windows_rate(w, from_ns, &end_ns);

        end_ns = MIN(end_ns, to_ns);
        carried += (__int128) (end_ns - from_ns) * rate;
        from_ns = end_ns;
    }
    return carried;
}

static void
test_threads_windows(void)
{
    const uint64_t start_ns = DAY_NS;
    struct windows_thread *aux = xcalloc(N_THREADS, sizeof *aux);
    struct departure *all = xcalloc(N_THREADS, sizeof aux->departures);

    for (unsigned int i = 0; i < rounds(8); i++) {
        uint64_t bytes = 0, late_bytes = 0, n_refused = 0, end_ns;
        uint64_t n_dropped, dropped_bytes, refused_bytes = 0;
        pthread_t threads[N_THREADS];
        __int128 level = 0, steady = 0, max_level = 0;
        struct windows w = {
            .burst = i % 2 ? 3000 + choose(200000) : 0,
            .max_delay_us = 500 + choose(1000),
            .late = i & 2,
        };
        size_t n = 0;

        atomic_init(&w.now_ns, start_ns);
        edt_meter_init(&w.meter, NULL);
        edt_meter_reset(&w.meter, start_ns);
        w.next_change_ns = 0;
        windows_change_rate(&w);
        atomic_count_init(&w.n_started, 0);
        ovs_mutex_init(&w.mutex);
        for (unsigned int j = 0; j < N_THREADS; j++) {
            aux[j].w = &w;
            aux[j].seed = random_uint32() | 1;
            aux[j].n = aux[j].n_refused = aux[j].dropped_bytes = 0;
            threads[j] = ovs_thread_create("meter", windows_main, &aux[j]);
        }
        for (unsigned int j = 0; j < N_THREADS; j++) {
            xpthread_join(threads[j], NULL);
            memcpy(&all[n], aux[j].departures, aux[j].n * sizeof *all);
            n += aux[j].n;
            n_refused += aux[j].n_refused;
            refused_bytes += aux[j].dropped_bytes;
        }
        edt_meter_get_late_drops(&w.meter, &n_dropped, &dropped_bytes);
        CHECK(n_dropped == (w.late ? n_refused : 0)
              && dropped_bytes == refused_bytes,
              "%"PRIu64" packets, %"PRIu64" bytes counted as dropped rather "
              "than %"PRIu64", %"PRIu64, n_dropped, dropped_bytes, n_refused,
              refused_bytes);
        CHECK(w.n_phases > 2, "%"PRIuSIZE" rates", w.n_phases);
        CHECK(n && n_refused, "%"PRIuSIZE" packets, %"PRIu64" refused", n,
              n_refused);

        /* Buckets that drain at the rate: the highest level is the burst of
         * the worst window, of all that there are.  One of them takes all
         * windows, the other one those in which there is one rate. */
        qsort(all, n, sizeof *all, compare_departures);
        uint64_t last_ns = start_ns;
        size_t last_phase = 0;

        for (size_t j = 0; j < n; j++) {
            const struct departure *d = &all[j];
            __int128 carried = windows_carried(&w, last_ns, d->time_ns);
            size_t phase = windows_steady(&w, d->time_ns);

            bytes += d->bytes;
            if (d->rate > windows_rate(&w, d->time_ns, &end_ns)) {
                /* One thread's call that began before a change and ended
                 * after it. */
                late_bytes += d->bytes;
            }
            level = MAX(level - carried, 0) + d->bytes * BYTE;
            steady = phase == last_phase ? MAX(steady - carried, 0) : 0;
            steady += phase == SIZE_MAX ? 0 : d->bytes * BYTE;
            max_level = MAX(max_level, level);
            last_ns = d->time_ns;
            last_phase = phase;

            /* The first frame of a window is not paid for in it; a ns because
             * times are rounded. */
            __int128 burst = MAX(w.burst, MTU) - MTU;
            __int128 allowed = (burst + JUMBO + late_bytes) * BYTE
                               + 2 * d->rate;

            CHECK(steady <= allowed, "%"PRIu64" bytes too many in a window "
                  "that ends at %"PRIu64" ns, %"PRIu64" bit/s, burst %"PRIu64
                  ", %"PRIu64" bytes at an old rate",
                  (uint64_t) ((steady - allowed) / BYTE),
                  d->time_ns - start_ns, d->rate, w.burst, late_bytes);

            /* A change gives the time that is left of a burst another worth.
             * And where two rates meet, there are two first frames. */
            allowed += (burst + JUMBO) * BYTE;
            CHECK(level <= allowed, "%"PRIu64" bytes too many in a window "
                  "with several rates, until %"PRIu64" ns, burst %"PRIu64
                  ", %"PRIu64" bytes at an old rate",
                  (uint64_t) ((level - allowed) / BYTE), d->time_ns - start_ns,
                  w.burst, late_bytes);
        }
        CHECK(late_bytes <= (uint64_t) N_CHANGES * N_THREADS * WINDOW_MAX_N
                            * JUMBO,
              "%"PRIu64" bytes at an old rate", late_bytes);

        /* The meter was asked for more than its rate, and did not refuse what
         * it should not have: but for the pauses, which end with an empty
         * schedule, a burst that is there is used. */
        CHECK(max_level >= MAX(w.burst, MTU) * BYTE / 2,
              "at most %"PRIu64" bytes in excess of the rate, burst %"PRIu64,
              (uint64_t) (max_level / BYTE), w.burst);
        CHECK(bytes * BYTE > windows_carried(&w, start_ns, last_ns) / 4,
              "%"PRIu64" bytes", bytes);
        ovs_mutex_destroy(&w.mutex);
        edt_meter_destroy(&w.meter);
    }
    free(all);
    free(aux);
}

/* A meter that threads count at, one after the other or several at once. */
struct count_aux {
    struct edt_meter *meter;
    uint32_t thread_id;
};

#define N_COUNTED 20000

static void *
count_main(void *aux_)
{
    struct count_aux *aux = aux_;

    for (int i = 0; i < N_COUNTED; i++) {
        edt_meter_count(aux->meter, aux->thread_id, 1, 100);
    }
    return NULL;
}

/* When the thread that owns a meter's counts has ended, another one does,
 * also of those that are counting meanwhile, and nothing is lost. */
static void
test_threads_owners(void)
{
    const unsigned int n_rounds = rounds(50);
    uint64_t packets, bytes, own, n;
    struct edt_meter meter;

    edt_meter_init(&meter, NULL);
    for (unsigned int i = 0; i < n_rounds; i++) {
        struct count_aux aux[N_THREADS];
        pthread_t threads[N_THREADS];
        uint32_t first, owner;

        for (unsigned int j = 0; j < N_THREADS; j++) {
            aux[j].meter = &meter;
            aux[j].thread_id = j;
            threads[j] = ovs_thread_create("count", count_main, &aux[j]);
        }
        do {
            atomic_read_relaxed(&meter.owner, &first);
        } while (first == EDT_NO_THREAD);
        xpthread_join(threads[first], NULL);
        edt_meter_disown(&meter, first);
        for (unsigned int j = 0; j < N_THREADS; j++) {
            if (j != first) {
                xpthread_join(threads[j], NULL);
            }
        }
        atomic_read_relaxed(&meter.owner, &owner);
        CHECK(owner != first, "owned by a thread that has ended");
        edt_meter_disown(&meter, owner);
    }

    n = (uint64_t) n_rounds * N_THREADS * N_COUNTED;
    edt_meter_get_counts(&meter, &packets, &bytes);
    CHECK(packets == n && bytes == 100 * n, "%"PRIu64" packets, %"PRIu64" "
          "bytes, not %"PRIu64" packets", packets, bytes, n);
    atomic_read_relaxed(&meter.own_counts.packets, &own);
    CHECK(own >= (uint64_t) n_rounds * N_COUNTED,
          "%"PRIu64" of %"PRIu64" packets counted by owners", own, n);
    edt_meter_destroy(&meter);
}

/* Any thread can own a meter's counts, one that polls nothing, too. */
static void
test_owner(void)
{
    uint64_t packets, bytes;
    struct edt_meter meter;

    edt_meter_init(&meter, NULL);
    edt_meter_count(&meter, NON_PMD_CORE_ID, 1, 100);
    CHECK(!edt_meter_own__(&meter, 5), "counted without owning the meter");
    edt_meter_count(&meter, 5, 2, 200);
    edt_meter_count(&meter, NON_PMD_CORE_ID, 1, 100);
    edt_meter_get_counts(&meter, &packets, &bytes);
    CHECK(packets == 4 && bytes == 400,
          "%"PRIu64" packets, %"PRIu64" bytes", packets, bytes);

    /* Who does not own a meter cannot give it up. */
    edt_meter_disown(&meter, 5);
    CHECK(!edt_meter_own__(&meter, 5), "owned by two threads");
    edt_meter_disown(&meter, NON_PMD_CORE_ID);
    CHECK(edt_meter_own__(&meter, 5), "still owned by one that has ended");
    edt_meter_destroy(&meter);
}

static const struct test tests[] = {
    { "params", test_params },
    { "rate", test_rate },
    { "packets", test_packets },
    { "never-early", test_never_early },
    { "burst", test_burst },
    { "max-delay", test_max_delay },
    { "refund-tail", test_refund_tail },
    { "refund-interleaved", test_refund_interleaved },
    { "chain", test_chain },
    { "refused-is-free", test_refused_is_free },
    { "ecn", test_ecn },
#ifdef DP_PACKET_OL_SHIFT_COUNT
    { "large-batch", test_large_batch },
#endif
    { "raise", test_raise },
    { "young-clock", test_young_clock },
    { "change", test_change },
    { "wrap", test_wrap },
    { "created-late", test_created_late },
    { "pace", test_pace },
    { "owner", test_owner },
    { "threads", test_threads },
    { "threads-windows", test_threads_windows },
    { "threads-owners", test_threads_owners },
};

int
main(int argc, char *argv[])
{
    chains = edt_chains_create(EDT_CHAINS_MAX);
    return run_tests(argc, argv, tests, ARRAY_SIZE(tests));
}
