/*
 * Copyright (c) 2026 FlowBundler authors.
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

/* Tests of the multi-level timing wheel, in simulated time. */

#include <config.h>
#undef NDEBUG

#include "mltw.h"

#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mltw-model.h"
#include "openvswitch/util.h"
#include "util.h"

#define MTU 1500
#define N_OUT 4096

static uint64_t seed = 1;
static unsigned int iterations;         /* 0: as many as fit in a minute. */

#define CHECK(CONDITION, ...)                           \
    do {                                                \
        if (!(CONDITION)) {                             \
            mltw_model_fail(NULL, __VA_ARGS__);         \
        }                                               \
    } while (0)

/* Packets as entries. */
struct packet {
    uint64_t edt_ns;
    unsigned int flow;
    unsigned int number;        /* In its flow. */
};

static struct packet *
packet_new(unsigned int flow, unsigned int number, uint64_t edt_ns)
{
    struct packet *packet = xmalloc(sizeof *packet);

    packet->flow = flow;
    packet->number = number;
    packet->edt_ns = edt_ns;
    return packet;
}

static void
packet_add(struct mltw *wheel, unsigned int flow, unsigned int number,
           uint64_t edt_ns, unsigned int level)
{
    CHECK(mltw_enqueue(wheel, packet_new(flow, number, edt_ns), edt_ns, level),
          "wheel is full");
}

/* ns between packets of 'size' bytes at 'mbps' Mbit/s. */
static uint64_t
gap_ns(uint64_t mbps, unsigned int size)
{
    return UINT64_C(8000) * size / mbps;
}

/* Configuration. */

static void
test_config(void)
{
    const struct mltw_config good = MLTW_CONFIG_DEFAULT;
    struct mltw_config c;
    const char *error;

    CHECK(!mltw_config_error(&good), "default is refused");

#define REFUSED(FIELD, VALUE, RANGE)                                    \
    c = good;                                                           \
    c.FIELD = VALUE;                                                    \
    error = mltw_config_error(&c);                                      \
    CHECK(error && !strncmp(error, #FIELD, strlen(#FIELD))              \
          && strstr(error, RANGE),                                      \
          #FIELD " = " #VALUE ": %s", error ? error : "accepted")
#define ACCEPTED(FIELD, VALUE)                                          \
    c = good;                                                           \
    c.FIELD = VALUE;                                                    \
    error = mltw_config_error(&c);                                      \
    CHECK(!error, #FIELD " = " #VALUE ": %s", error);                   \
    mltw_destroy(mltw_create(&c, 12345))

    REFUSED(n_wheels, 0, "1 to 64");
    REFUSED(n_wheels, 65, "1 to 64");
    REFUSED(n_wheels, UINT32_MAX, "1 to 64");
    ACCEPTED(n_wheels, 1);
    ACCEPTED(n_wheels, 64);
    REFUSED(n_slots, 0, "power of two, 4 to 65536");
    REFUSED(n_slots, 2, "power of two, 4 to 65536");
    REFUSED(n_slots, 100, "power of two, 4 to 65536");
    REFUSED(n_slots, 131072, "power of two, 4 to 65536");
    ACCEPTED(n_slots, 4);
    ACCEPTED(n_slots, 65536);
    REFUSED(min_granularity_ns, 0, "power of two, 1 to 1073741824");
    REFUSED(min_granularity_ns, 65, "power of two, 1 to 1073741824");
    REFUSED(min_granularity_ns, UINT64_C(1) << 31,
            "power of two, 1 to 1073741824");
    ACCEPTED(min_granularity_ns, 1);
    ACCEPTED(min_granularity_ns, 65536);
    REFUSED(max_granularity_ns, 0, "power of two");
    REFUSED(max_granularity_ns, 65535, "power of two");
    REFUSED(max_granularity_ns, 32, "not be below min_granularity_ns");
    ACCEPTED(max_granularity_ns, 64);
    ACCEPTED(max_granularity_ns, UINT64_C(1) << 63);
    REFUSED(max_entries, 0, "1 to 16777216");
    REFUSED(max_entries, 16777217, "1 to 16777216");
    ACCEPTED(max_entries, 1);
    ACCEPTED(max_entries, 16777216);

    mltw_destroy(NULL);
}

static void
test_level(void)
{
    for (unsigned int min_shift = 0; min_shift <= 30; min_shift++) {
        for (unsigned int max_shift = min_shift; max_shift < 64; max_shift++) {
            struct mltw_config c = MLTW_CONFIG_DEFAULT;
            struct mltw_choices choices = { .state = seed };

            c.n_wheels = 1 + (min_shift * 7 + max_shift) % 64;
            c.n_slots = 4;
            c.max_entries = 1;
            c.min_granularity_ns = UINT64_C(1) << min_shift;
            c.max_granularity_ns = UINT64_C(1) << max_shift;

            struct mltw *wheel = mltw_create(&c, 0);
            for (unsigned int i = 0; i < 64 * 4; i++) {
                uint64_t gap = (i < 64 ? UINT64_C(1) << i
                                : i < 128 ? (UINT64_C(1) << (i - 64)) - 1
                                : mltw_choose(&choices, 0) >> (i % 64));
                uint64_t granularity = c.min_granularity_ns;
                unsigned int level = 0;

                while (level + 1 < c.n_wheels
                       && granularity < c.max_granularity_ns
                       && granularity <= gap / 2) {
                    granularity *= 2;
                    level++;
                }
                CHECK(mltw_level(wheel, gap) == level,
                      "gap %"PRIu64" has level %u, should be %u", gap,
                      mltw_level(wheel, gap), level);
                CHECK(mltw_level_granularity_ns(wheel, level) == granularity,
                      "wrong granularity of level %u", level);
            }
            mltw_destroy(wheel);
        }
    }
}

/* All sequences of operations on small wheels. */

struct exhaustive {
    struct mltw_config config;
    uint64_t horizon;           /* Of the last wheel. */
    uint64_t max_ahead;         /* EDTs are up to this after now. */
    unsigned int n_levels;
    unsigned int n_ops;         /* Length of a sequence. */
    uint64_t n_sequences;
};

/* Does operation number 'op' of all that are possible.  Returns false if there
 * are not as many. */
static bool
exhaustive_op(const struct exhaustive *ex, struct mltw_model *model,
              unsigned int op, uint64_t *now)
{
    uint64_t n_enqueue = (ex->max_ahead + 2) * ex->n_levels;
    static const uint8_t steps[] = { 0, 1, 2, 3, 5, 11 };

    if (op < n_enqueue) {
        uint64_t ahead = op / ex->n_levels;

        mltw_model_enqueue(model, *now + ahead - 1, op % ex->n_levels);
        return true;
    }
    op -= n_enqueue;
    if (op < 2 * ARRAY_SIZE(steps)) {
        *now += steps[op / 2];
        mltw_model_dequeue(model, *now, op % 2 ? 1 : 16);
        return true;
    }
    return false;
}

static void
exhaustive_run(struct exhaustive *ex, struct mltw_model *model,
               unsigned int *ops, unsigned int depth)
{
    if (depth < ex->n_ops) {
        unsigned int n_all = (ex->max_ahead + 2) * ex->n_levels + 12;

        for (ops[depth] = 0; ops[depth] < n_all; ops[depth]++) {
            exhaustive_run(ex, model, ops, depth + 1);
        }
        return;
    }

    /* Start where all wheels begin a turn, plus an offset that takes all
     * values in turn, on a wheel that has been used by all sequences before
     * this one, as wheels in use are. */
    uint64_t turn = 2 * ex->horizon;
    uint64_t now = (mltw_model_now(model) / turn + 2) * turn
                   + ex->n_sequences++ % turn;

    mltw_model_dequeue(model, now, 16);
    for (unsigned int i = 0; i < ex->n_ops; i++) {
        exhaustive_op(ex, model, ops[i], &now);
    }
    mltw_model_run_dry(model, 1 + ex->n_sequences % 3);
}

static void
test_exhaustive(void)
{
    static const struct {
        uint32_t n_wheels, n_slots, min, max, n_ops;
    } geometries[] = {
        { 1, 4, 1, 1, 4 },
        { 2, 4, 1, 2, 4 },
        { 3, 4, 1, 4, 3 },
        { 3, 4, 1, 2, 3 },
        { 2, 8, 1, 2, 3 },
        { 2, 4, 2, 4, 3 },
    };

    for (size_t j = 0; j < 2 * ARRAY_SIZE(geometries); j++) {
        size_t i = j / 2;
        bool few = j % 2;
        struct exhaustive ex = {
            .config = {
                .n_wheels = geometries[i].n_wheels,
                .n_slots = geometries[i].n_slots,
                .min_granularity_ns = geometries[i].min,
                .max_granularity_ns = geometries[i].max,
                .max_entries = 4,
            },
            .horizon = ((uint64_t) geometries[i].n_slots * geometries[i].min
                        << (geometries[i].n_wheels - 1)),
            .n_levels = log_2_floor(geometries[i].max
                                    / geometries[i].min) + 1,
            .n_ops = geometries[i].n_ops,
        };
        struct mltw_model *model = mltw_model_create(&ex.config, 0);
        unsigned int ops[8];

        if (!few) {
            mltw_disable_few__(mltw_model_wheel(model));
        }
        ex.max_ahead = 2 * ex.horizon + 3;
        exhaustive_run(&ex, model, ops, 0);
        mltw_model_destroy(model);
        printf("%"PRIu32" wheels of %"PRIu32" slots of %"PRIu64" ns, few "
               "entries %s: %"PRIu64" sequences\n", ex.config.n_wheels,
               ex.config.n_slots, ex.config.min_granularity_ns,
               few ? "apart" : "in them", ex.n_sequences);
    }
}

/* Random sequences on all geometries. */
static void
test_random(void)
{
    unsigned int n = iterations ? iterations : 4000;
    char *context = xasprintf("random");

    for (unsigned int i = 0; i < n; i++) {
        struct mltw_choices choices = { .state = seed + i };

        free(context);
        context = xasprintf("random (--seed=%"PRIu64" --iterations=1)",
                            seed + i);
        mltw_model_set_context(context);
        mltw_model_random_run(&choices, i % 16 ? 600 : 6000);
    }
    mltw_model_set_context("random");
    free(context);
    printf("%u runs from seed %"PRIu64"\n", n, seed);
}

/* Capacity: as many entries as configured, whatever their times, and not one
 * more. */
static void
test_capacity(void)
{
    static const uint32_t max_entries[] = { 1, 2, 7, 8, 100, 2500 };
    struct mltw_choices choices = { .state = seed };

    for (size_t i = 0; i < ARRAY_SIZE(max_entries); i++) {
        for (unsigned int kind = 0; kind < 5; kind++) {
            struct mltw_config c = MLTW_CONFIG_DEFAULT;

            c.max_entries = max_entries[i];
            c.n_slots = kind == 4 ? 4 : 128;

            struct mltw_model *model = mltw_model_create(&c, 1000);
            for (unsigned int round = 0; round < 5; round++) {
                uint64_t now = mltw_model_now(model);

                for (uint32_t j = 0; j < max_entries[i] + 2; j++) {
                    uint64_t edt;

                    switch (kind) {
                    case 0:     /* One slot. */
                        edt = now;
                        break;
                    case 1:     /* Each in its slot. */
                        edt = now + j * c.min_granularity_ns;
                        break;
                    case 2:     /* Far. */
                        edt = now + UINT64_C(10000000000) + j * 1000000;
                        break;
                    default:
                        edt = now + (mltw_choose(&choices, 0)
                                     >> mltw_choose(&choices, 64));
                        break;
                    }
                    CHECK(mltw_model_enqueue(model, edt, 0)
                          == (j < max_entries[i]), "wrong result");
                }
                if (round == 4) {
                    mltw_model_flush(model, 3);
                    break;
                }

                /* Take a part and fill up again, too. */
                uint64_t due = mltw_next_due(mltw_model_wheel(model));
                mltw_model_dequeue(model, due, 2);
                while (mltw_model_enqueue(model, due + 5 * round, 0)) {
                    continue;
                }
                if (kind != 3 || round < 2) {
                    mltw_model_run_dry(model, 5);
                } else {
                    mltw_model_dequeue(model, due, 1);
                    mltw_model_flush(model, 100);
                }
            }
            mltw_model_destroy(model);
        }
    }
}

/* After a flush the wheel is where it was before. */
static void
test_flush(void)
{
    struct mltw_config c = MLTW_CONFIG_DEFAULT;
    struct mltw_model *model = mltw_model_create(&c, 5000);

    mltw_model_flush(model, 10);
    for (unsigned int round = 0; round < 20; round++) {
        for (unsigned int i = 0; i < 100; i++) {
            mltw_model_enqueue(model, 5000 + i * i * i * 64 * round, i % 12);
        }
        mltw_model_dequeue(model, 5000 + round * 100, round);
        mltw_model_flush(model, 1 + round);
    }
    mltw_model_enqueue(model, 8000, 0);
    mltw_model_run_dry(model, 1);
    mltw_model_destroy(model);
}

/* Returns a wheel that has entries in its wheels even if they are few, for
 * tests of what wheels do.  (That few are the same is for the model to
 * check.) */
static struct mltw *
wheel_create(const struct mltw_config *config, uint64_t now_ns)
{
    struct mltw *wheel = mltw_create(config, now_ns);

    mltw_disable_few__(wheel);
    return wheel;
}

/* What the slot times are for: batches and bursts. */

struct sim_flow {
    uint64_t gap_ns;            /* Between two packets. */
    uint64_t mtu_gap_ns;        /* Between two of full size, if that differs
                                 * from 'gap_ns', otherwise 0. */
    uint64_t edt_ns;            /* Of the next packet to be added. */
    unsigned int level;
    unsigned int n_added;
    unsigned int n_left;
};

struct sim {
    struct mltw *wheel;
    struct sim_flow *flows;
    unsigned int n_flows;
    unsigned int backlog;       /* Packets that each flow has waiting. */

    /* Results. */
    uint64_t n_packets;
    uint64_t n_batches;         /* Drains that returned packets. */
    unsigned int max_burst;     /* Most packets of a flow in one drain. */
    uint64_t max_late_ns;
};

static void
sim_fill(struct sim *sim, unsigned int flow)
{
    struct sim_flow *f = &sim->flows[flow];

    while (f->n_added - f->n_left < sim->backlog) {
        packet_add(sim->wheel, flow, f->n_added++, f->edt_ns, f->level);
        f->edt_ns += f->gap_ns;
    }
}

static void
sim_init(struct sim *sim, struct mltw *wheel, struct sim_flow *flows,
         unsigned int n_flows, unsigned int backlog)
{
    *sim = (struct sim) {
        .wheel = wheel,
        .flows = flows,
        .n_flows = n_flows,
        .backlog = backlog,
    };
    for (unsigned int i = 0; i < n_flows; i++) {
        flows[i].level = mltw_level(wheel, (flows[i].mtu_gap_ns
                                            ? flows[i].mtu_gap_ns
                                            : flows[i].gap_ns));
        sim_fill(sim, i);
    }
}

/* Drains once and keeps the flows' backlog up. */
static size_t
sim_drain(struct sim *sim, uint64_t now)
{
    unsigned int *burst = xcalloc(sim->n_flows, sizeof *burst);
    void *out[N_OUT];
    size_t n = mltw_dequeue(sim->wheel, now, out, N_OUT);

    CHECK(n < N_OUT, "larger batch than expected");
    sim->n_packets += n;
    sim->n_batches += n > 0;
    for (size_t i = 0; i < n; i++) {
        struct packet *packet = out[i];
        struct sim_flow *flow = &sim->flows[packet->flow];

        CHECK(packet->edt_ns <= now, "flow %u, EDT %"PRIu64" left early, at "
              "%"PRIu64, packet->flow, packet->edt_ns, now);
        CHECK(packet->number == flow->n_left, "flow %u: packet %u instead of "
              "%u", packet->flow, packet->number, flow->n_left);
        flow->n_left++;
        sim->max_late_ns = MAX(sim->max_late_ns, now - packet->edt_ns);
        burst[packet->flow]++;
        sim->max_burst = MAX(sim->max_burst, burst[packet->flow]);
        free(packet);
    }
    for (unsigned int i = 0; i < sim->n_flows; i++) {
        sim_fill(sim, i);
    }
    free(burst);
    return n;
}

/* Frees packets and wheel. */
static void
sim_done(struct sim *sim)
{
    void *out[16];
    size_t n;

    while ((n = mltw_flush(sim->wheel, out, ARRAY_SIZE(out))) > 0) {
        for (size_t i = 0; i < n; i++) {
            free(out[i]);
        }
    }
    mltw_destroy(sim->wheel);
}

static void
test_burst(void)
{
    /* One flow at a constant rate, polled as often as its granularity, from
     * any offset: never more than 2 packets at a time.  A poll can fall
     * between a slot and the next, so the flow's slots must not hold more than
     * that, and not two slots be due in one poll. */
    struct mltw_choices choices = { .state = seed };
    struct mltw_config c = MLTW_CONFIG_DEFAULT;
    unsigned int n = iterations ? iterations : 600;

    for (unsigned int i = 0; i < n; i++) {
        uint64_t start = UINT64_C(1000000) + mltw_choose(&choices, 1000000);
        struct sim_flow flow = {
            .gap_ns = (i == 0 ? gap_ns(8000, MTU)
                       : 64 + (mltw_choose(&choices, 0)
                               >> (44 + mltw_choose(&choices, 14)))),
            .edt_ns = start,
        };
        struct sim sim;

        sim_init(&sim, wheel_create(&c, start - 1000), &flow, 1,
                 1 + mltw_choose(&choices, 20));

        uint64_t g = mltw_level_granularity_ns(sim.wheel, flow.level);
        uint64_t period = i % 2 ? g : 1 + mltw_choose(&choices, g);
        period = MAX(period, g / 50);

        /* An arbitrary phase, but the slots' own where a poll is as far from
         * the next as two slots are: then two of them would be due at once
         * only if polls were late. */
        uint64_t now = start - start % g;
        while (flow.n_left < 500) {
            sim_drain(&sim, now);
            now += period;
        }
        CHECK(sim.max_burst <= 2, "burst of %u packets, gap %"PRIu64" ns, "
              "granularity %"PRIu64", polled every %"PRIu64" ns",
              sim.max_burst, flow.gap_ns, g, period);
        CHECK(sim.max_late_ns < g + period, "late by %"PRIu64" ns, "
              "granularity %"PRIu64", polled every %"PRIu64" ns",
              sim.max_late_ns, g, period);
        sim_done(&sim);
    }
}

/* Goes from due time to due time until 'n' packets have left. */
static void
sim_run(struct sim *sim, uint64_t n)
{
    while (sim->n_packets < n) {
        CHECK(sim_drain(sim, mltw_next_due(sim->wheel)) > 0,
              "nothing at the due time");
    }
}

static void
test_batching(void)
{
    struct mltw_choices choices = { .state = seed };
    struct mltw_config c = MLTW_CONFIG_DEFAULT;
    struct sim_flow flows[128];
    struct sim sim;
    double batch;

    /* Equal flows whose gap is a granularity leave together. */
    for (unsigned int i = 0; i < 16; i++) {
        flows[i] = (struct sim_flow) {
            .gap_ns = 2048,
            .edt_ns = 100000 + mltw_choose(&choices, 2048),
        };
    }
    sim_init(&sim, wheel_create(&c, 0), flows, 16, 8);
    sim_run(&sim, 16);
    sim_run(&sim, 16000);
    batch = (double) sim.n_packets / sim.n_batches;
    CHECK(batch > 15, "mean batch of 16 flows is %f", batch);
    CHECK(mltw_get_stats(sim.wheel)->n_slots_visited == sim.n_batches,
          "more than a slot for each batch");
    sim_done(&sim);
    printf("16 equal flows, gap of a granularity: mean batch %.2f\n", batch);

    /* In between, a gap spans one to two slots. */
    for (unsigned int i = 0; i < 16; i++) {
        flows[i] = (struct sim_flow) {
            .gap_ns = 1920,
            .edt_ns = 100000 + i * 120,
        };
    }
    sim_init(&sim, wheel_create(&c, 0), flows, 16, 8);
    sim_run(&sim, 16000);
    batch = (double) sim.n_packets / sim.n_batches;
    CHECK(batch > 8, "mean batch of 16 flows is %f", batch);
    sim_done(&sim);
    printf("16 equal flows, any gap: mean batch %.2f\n", batch);

    /* Rates 8:4:2:1, whatever their phases: every slot of the fastest flow is
     * used, every second one is shared with the next, and so on. */
    for (unsigned int i = 0; i < 4; i++) {
        flows[i] = (struct sim_flow) {
            .gap_ns = UINT64_C(1024) << i,
            .edt_ns = 100000 + mltw_choose(&choices, 8192),
        };
    }
    sim_init(&sim, wheel_create(&c, 0), flows, 4, 8);
    sim_run(&sim, 100);
    sim.n_packets = sim.n_batches = 0;
    sim_run(&sim, 15000);
    batch = (double) sim.n_packets / sim.n_batches;
    CHECK(batch > 1.87 && batch < 1.88, "mean batch of rates 8:4:2:1 is %f",
          batch);
    CHECK(mltw_get_stats(sim.wheel)->n_slots_visited
          <= sim.n_batches + 100, "more than a slot for each batch");
    sim_done(&sim);
    printf("rates 8:4:2:1: mean batch %.3f\n", batch);
}

static void
test_max_granularity(void)
{
    /* A slow flow is not late by its own gap. */
    struct mltw_choices choices = { .state = seed };
    struct mltw_config c = MLTW_CONFIG_DEFAULT;
    struct sim_flow slow = {
        .gap_ns = gap_ns(1, MTU),
        .edt_ns = 1000000,
    };
    struct sim sim;

    CHECK(slow.gap_ns == 12000000, "wrong gap");
    sim_init(&sim, wheel_create(&c, 0), &slow, 1, 4);
    CHECK(mltw_level_granularity_ns(sim.wheel, slow.level) == 65536,
          "wrong level of 1 Mbit/s");
    for (uint64_t now = 0; slow.n_left < 300; now += 1000) {
        sim_drain(&sim, now);
    }
    CHECK(sim.max_late_ns < 65536 + 1000, "late by %"PRIu64" ns",
          sim.max_late_ns);
    CHECK(sim.max_burst == 1, "burst of %u", sim.max_burst);
    sim_done(&sim);

    /* Where there are enough packets to batch, what a device takes in a burst
     * (32) is filled with and without the limit: 10 Gbit/s in flows of
     * 10 Mbit/s. */
    for (unsigned int limited = 0; limited < 2; limited++) {
        struct sim_flow *flows = xcalloc(1000, sizeof *flows);
        double batch;

        for (unsigned int i = 0; i < 1000; i++) {
            flows[i].gap_ns = gap_ns(10, MTU);
            flows[i].edt_ns = 1000000 + mltw_choose(&choices, 1200000);
        }
        c.max_granularity_ns = limited ? 65536 : UINT64_C(1) << 36;
        sim_init(&sim, wheel_create(&c, 0), flows, 1000, 2);
        sim_run(&sim, 100000);
        batch = (double) sim.n_packets / sim.n_batches;
        CHECK(batch >= 32, "mean batch of 1000 slow flows is %f", batch);
        printf("1000 flows of 10 Mbit/s, granularity up to %"PRIu64" ns: "
               "mean batch %.1f, late by up to %"PRIu64" ns\n",
               c.max_granularity_ns, batch, sim.max_late_ns);
        sim_done(&sim);
        free(flows);
    }
}

/* Defects of the published user-space prototype of the structure. */

static void
test_slot_order(void)
{
    /* Slots were filled at the head, which reversed packets of a flow that had
     * two in one slot: small ones, or any where the gap is below the minimum
     * granularity, at a constant rate, and with a backlog that is deeper than
     * the wheel. */
    static const uint32_t mbps[] = { 100, 1000, 8000, 25000, 60000, 400000 };
    static const uint16_t sizes[] = { 64, 512, 1000, 1500 };

    for (size_t i = 0; i < ARRAY_SIZE(mbps) * ARRAY_SIZE(sizes); i++) {
        uint32_t rate = mbps[i / ARRAY_SIZE(sizes)];
        uint16_t size = sizes[i % ARRAY_SIZE(sizes)];

        for (unsigned int backlog = 8; backlog <= 2048; backlog *= 4) {
            struct mltw_config c = MLTW_CONFIG_DEFAULT;
            struct sim_flow flow = {
                .gap_ns = gap_ns(rate, size),
                .mtu_gap_ns = gap_ns(rate, MTU),
                .edt_ns = 777,
            };
            struct sim sim;

            /* sim_drain() checks the order. */
            sim_init(&sim, wheel_create(&c, 0), &flow, 1, backlog);
            sim_run(&sim, 5000);
            sim_done(&sim);
        }
    }
}

static void
test_rate_rise(void)
{
    /* When the rate that was taken for a flow rose 20-fold, a later packet
     * overtook 10 earlier ones.  With each flow's first packet in the wheel
     * and the others behind it, as the shaper has them, none can. */
    struct mltw_choices choices = { .state = seed };

    for (unsigned int round = 0; round < 200; round++) {
        struct mltw_config c = MLTW_CONFIG_DEFAULT;
        struct mltw *wheel = wheel_create(&c, 0);
        uint64_t gap = gap_ns(1 + mltw_choose(&choices, 1000), MTU);
        struct packet head = { .edt_ns = 1000 };
        uint64_t last_left = 0;

        mltw_enqueue(wheel, &head, head.edt_ns, mltw_level(wheel, gap));
        while (head.number < 200) {
            uint64_t due = mltw_next_due(wheel);
            void *out;

            CHECK(mltw_dequeue(wheel, due, &out, 1) == 1 && out == &head,
                  "packet %u is lost", head.number);
            CHECK(due >= head.edt_ns && due >= last_left
                  && due - head.edt_ns < MAX(gap, 65536), "packet %u with EDT "
                  "%"PRIu64" left at %"PRIu64, head.number, head.edt_ns, due);
            last_left = due;

            if (head.number == 100) {
                gap = MAX(gap / 20, 1);
            }
            head.number++;
            head.edt_ns += gap;
            mltw_enqueue(wheel, &head, head.edt_ns, mltw_level(wheel, gap));
        }
        mltw_destroy(wheel);
    }
}

static void
test_front_slow_flow(void)
{
    /* A slow flow's slot took the front ahead of now, and a fast flow's
     * packets had to wait for it. */
    struct mltw_config c = MLTW_CONFIG_DEFAULT;

    c.max_granularity_ns = UINT64_C(1) << 40;
    for (uint64_t start = 0; start < 1000000; start += 9973) {
        struct sim_flow flows[2] = {
            { .gap_ns = gap_ns(1, MTU), .edt_ns = start + 99000000 },
            { .gap_ns = gap_ns(10000, MTU), .edt_ns = start + 5000 },
        };
        struct sim sim;
        struct sim fast;

        /* Only the slow flow for a while. */
        sim_init(&sim, wheel_create(&c, start), flows, 1, 4);
        sim_drain(&sim, start);
        sim_drain(&sim, start + 4000);
        fast = sim;
        sim.n_flows = 2;
        flows[1].level = mltw_level(sim.wheel, flows[1].gap_ns);
        sim_fill(&sim, 1);
        for (uint64_t now = start + 5000; now < start + 200000; now += 500) {
            sim_drain(&sim, now);
        }
        CHECK(flows[1].n_left > 150, "fast flow: only %u packets left",
              flows[1].n_left);
        CHECK(sim.max_late_ns < gap_ns(10000, MTU) + 500,
              "fast flow late by %"PRIu64" ns", sim.max_late_ns);
        sim_done(&fast);
    }
}

static void
test_front_first_packet(void)
{
    /* The first packet's own EDT became the front, and whatever came next with
     * an earlier EDT had to wait for it. */
    for (unsigned int i = 0; i < 64; i++) {
        struct mltw_config c = MLTW_CONFIG_DEFAULT;
        struct mltw_model *model = mltw_model_create(&c, 1000000);
        uint64_t far_ns = 1000000 + (UINT64_C(1) << i);

        mltw_disable_few__(mltw_model_wheel(model));
        mltw_model_enqueue(model, MAX(far_ns, 1000000), 10);
        for (unsigned int j = 0; j < 100; j++) {
            mltw_model_enqueue(model, 1000000 + 100 * j, 0);
        }
        for (unsigned int j = 0; j < 110; j++) {
            mltw_model_dequeue(model, 1000000 + 100 * j, 100);
        }
        CHECK(mltw_count(mltw_model_wheel(model)) <= 1,
              "%"PRIuSIZE" packets wait for another one",
              mltw_count(mltw_model_wheel(model)) - 1);
        mltw_model_run_dry(model, 10);

        /* Again, as the first one after a pause. */
        uint64_t now = MIN(mltw_model_now(model) + 12345678, UINT64_MAX / 2);
        mltw_model_enqueue(model, now + 50000000, 10);
        mltw_model_enqueue(model, now + 1000, 0);
        CHECK(mltw_model_dequeue(model, MAX(now, mltw_model_now(model)) + 1064,
                                 10) >= 1, "packet waits for another one");
        mltw_model_destroy(model);
    }
}

static void
test_horizon_edge(void)
{
    /* One in a thousand of random EDTs was at the edge of the wheel and left a
     * rotation early. */
    static const struct mltw_config configs[] = {
        { 32, 128, 64, 65536, 512 },
        { 64, 1024, 1, UINT64_C(1) << 40, 512 },
        { 4, 16, 8, 64, 512 },
    };
    struct mltw_choices choices = { .state = seed };

    for (size_t i = 0; i < ARRAY_SIZE(configs); i++) {
        const struct mltw_config *c = &configs[i];
        struct mltw *wheel = wheel_create(c, 0);
        uint64_t now = 0;
        unsigned int n = 0;

        while (n < 400000) {
            void *out[32];
            size_t n_out;

            for (unsigned int j = 0; j < 8; j++) {
                unsigned int level
                    = mltw_choose(&choices, MIN(c->n_wheels, 24));
                uint64_t edge = ((uint64_t) c->n_slots * c->min_granularity_ns)
                                << level;
                uint64_t edt;

                edt = (j % 2
                       ? now + mltw_choose(&choices, 2 * edge)
                       : now + edge - 2 * c->min_granularity_ns
                         + mltw_choose(&choices, 4 * c->min_granularity_ns));
                if (mltw_count(wheel) < c->max_entries) {
                    packet_add(wheel, level, n++, edt, level);
                }
            }
            now = MAX(now, mltw_next_due(wheel)) + mltw_choose(&choices, 3000);
            while ((n_out = mltw_dequeue(wheel, now, out,
                                         ARRAY_SIZE(out))) > 0) {
                for (size_t j = 0; j < n_out; j++) {
                    struct packet *packet = out[j];

                    CHECK(packet->edt_ns <= now, "EDT %"PRIu64" left early, "
                          "at %"PRIu64, packet->edt_ns, now);
                    free(packet);
                }
            }
            CHECK(mltw_next_due(wheel) > now, "not all given out");
        }

        struct sim sim = { .wheel = wheel };
        sim_done(&sim);
    }
}

static void
test_stall(void)
{
    /* The first dequeue after a second without any looked at 7.8 million
     * slots.  It must look at none that is empty. */
    static const struct mltw_config configs[] = {
        { 32, 128, 64, 65536, 4096 },
        { 64, 1024, 1, 65536, 4096 },
        { 16, 65536, 1, 1024, 4096 },
        { 2, 4, 1, 2, 4096 },
    };

    for (size_t i = 0; i < ARRAY_SIZE(configs); i++) {
        for (unsigned int n = 0; n <= 100; n += 10) {
            struct mltw *wheel = wheel_create(&configs[i], 0);
            const struct mltw_stats *stats = mltw_get_stats(wheel);
            struct packet packets[128];
            void *out[128];
            uint64_t visited;

            /* Fast flows and slow ones, far ones too. */
            for (unsigned int j = 0; j < n; j++) {
                CHECK(mltw_enqueue(wheel, &packets[j],
                                   1000 + j * (j % 3 ? 120 : 2000000),
                                   j % 11), "wheel is full");
            }
            visited = stats->n_slots_visited;
            CHECK(mltw_dequeue(wheel, 1000000000, out, ARRAY_SIZE(out)) == n,
                  "not all given out after 1 s");
            visited = stats->n_slots_visited - visited;

            /* Each entry is in one slot, and was in another one for each time
             * that it was moved. */
            CHECK(visited <= n + stats->n_moves, "%"PRIu64" slots visited for "
                  "%u entries moved %"PRIu64" times", visited, n,
                  stats->n_moves);
            CHECK(stats->n_far <= n && stats->n_moves <= stats->n_far * 20,
                  "%"PRIu64" far entries moved %"PRIu64" times", stats->n_far,
                  stats->n_moves);

            /* With nothing in the wheel, nothing at all, and one entry costs
             * one slot, after any pause. */
            visited = stats->n_slots_visited;
            CHECK(!mltw_dequeue(wheel, UINT64_C(1) << 40, out, 128),
                  "not empty");
            CHECK(stats->n_slots_visited == visited, "empty slots visited");
            visited -= stats->n_moves;
            mltw_enqueue(wheel, &packets[0], (UINT64_C(1) << 40) + 100, 0);
            mltw_dequeue(wheel, UINT64_C(1) << 60, out, 128);
            visited += stats->n_moves;
            CHECK(stats->n_slots_visited == visited + 1,
                  "%"PRIu64" slots visited for one entry",
                  stats->n_slots_visited - visited);
            mltw_destroy(wheel);
        }
    }
}

static void
test_min_granularity(void)
{
    /* A minimum granularity of more than 1 ns rounded down: early. */
    for (unsigned int shift = 0; shift <= 20; shift++) {
        struct mltw_config c = MLTW_CONFIG_DEFAULT;
        uint64_t g = UINT64_C(1) << shift;

        c.min_granularity_ns = g;
        c.max_granularity_ns = g * 16;
        for (unsigned int level = 0; level <= 4; level++) {
            uint64_t slot = g << level;

            for (unsigned int i = 0; i < 200; i++) {
                struct mltw_model *model
                    = mltw_model_create(&c, i * slot / 3);
                uint64_t edt = i * slot / 3 + i * slot * 3 / 7;

                mltw_disable_few__(mltw_model_wheel(model));
                mltw_model_enqueue(model, edt, level);
                mltw_model_run_dry(model, 1);
                mltw_model_destroy(model);
            }
        }
    }
}

/* Memory. */

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
test_memory(void)
{
    static const struct {
        struct mltw_config config;
        size_t limit;
    } cases[] = {
        { { 32, 128, 64, 65536, 131072 }, 320 * 1024 },
        { { 32, 512, 64, 65536, 131072 }, 400 * 1024 },
        { { 64, 1024, 1, UINT64_C(1) << 40, 131072 }, 1100 * 1000 },
    };

    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        const struct mltw_config *c = &cases[i].config;
        struct mltw_config one = *c;
        size_t before;

        /* Whatever is touched: all but what is for the entries. */
        one.max_entries = 1;
        struct mltw *empty = mltw_create(&one, 0);
        CHECK(mltw_memory_bytes(empty) <= cases[i].limit,
              "%"PRIuSIZE" bytes", mltw_memory_bytes(empty));
        printf("%"PRIu32" wheels of %"PRIu32" slots: %"PRIuSIZE" bytes\n",
               c->n_wheels, c->n_slots, mltw_memory_bytes(empty));
        mltw_destroy(empty);

        before = resident_bytes();
        struct mltw *wheel = wheel_create(c, 0);
        size_t created = resident_bytes() - before;
        uint64_t now = 0;
        struct packet packet;
        void *out[16];

        /* A few entries at a time, in all wheels and all of their slots. */
        for (unsigned int j = 0; j < 500000; j++) {
            now += (UINT64_C(1) << j % 28) / 16;
            mltw_enqueue(wheel, &packet,
                         now + ((c->n_slots * c->min_granularity_ns
                                 << j % 20) - 1) / (1 + j % 7), j % 17);
            mltw_dequeue(wheel, now, out, ARRAY_SIZE(out));
        }

        size_t used = resident_bytes() - before;
        printf("    for up to %"PRIu32" entries: %"PRIuSIZE" bytes allocated, "
               "%"PRIuSIZE" resident when created, %"PRIuSIZE" when used\n",
               c->max_entries, mltw_memory_bytes(wheel), created, used);
#if !defined(__SANITIZE_ADDRESS__)
        CHECK(used <= cases[i].limit, "more than %"PRIuSIZE" bytes",
              cases[i].limit);
#endif
        mltw_destroy(wheel);
    }
}

static const struct test {
    const char *name;
    void (*run)(void);
} tests[] = {
    { "config", test_config },
    { "level", test_level },
    { "exhaustive", test_exhaustive },
    { "random", test_random },
    { "capacity", test_capacity },
    { "flush", test_flush },
    { "burst", test_burst },
    { "batching", test_batching },
    { "max-granularity", test_max_granularity },
    { "slot-order", test_slot_order },
    { "rate-rise", test_rate_rise },
    { "front-slow-flow", test_front_slow_flow },
    { "front-first-packet", test_front_first_packet },
    { "horizon-edge", test_horizon_edge },
    { "stall", test_stall },
    { "min-granularity", test_min_granularity },
    { "memory", test_memory },
};

static void OVS_NO_RETURN
usage(FILE *stream, const char *name, int status)
{
    fprintf(stream, "usage: %s [--seed=N] [--iterations=N] [TEST]...\n"
            "Tests (all if none is named):\n", name);
    for (size_t i = 0; i < ARRAY_SIZE(tests); i++) {
        fprintf(stream, "    %s\n", tests[i].name);
    }
    exit(status);
}

static void
run_test(const struct test *test)
{
    char *context = xasprintf("%s (--seed=%"PRIu64")", test->name, seed);

    printf("%s\n", test->name);
    fflush(stdout);
    mltw_model_set_context(context);
    test->run();
    mltw_model_set_context("");
    free(context);
}

int
main(int argc, char *argv[])
{
    static const struct option options[] = {
        { "seed", required_argument, NULL, 's' },
        { "iterations", required_argument, NULL, 'i' },
        { "help", no_argument, NULL, 'h' },
        { NULL, 0, NULL, 0 },
    };
    int option;

    while ((option = getopt_long(argc, argv, "s:i:h", options, NULL)) != -1) {
        switch (option) {
        case 's':
            seed = strtoull(optarg, NULL, 0);
            break;
        case 'i':
            iterations = strtoul(optarg, NULL, 0);
            break;
        case 'h':
            usage(stdout, argv[0], EXIT_SUCCESS);
        default:
            usage(stderr, argv[0], 2);
        }
    }

    if (optind == argc) {
        for (size_t i = 0; i < ARRAY_SIZE(tests); i++) {
            run_test(&tests[i]);
        }
    }
    for (; optind < argc; optind++) {
        size_t i;

        for (i = 0; i < ARRAY_SIZE(tests); i++) {
            if (!strcmp(argv[optind], tests[i].name)) {
                run_test(&tests[i]);
                break;
            }
        }
        if (i == ARRAY_SIZE(tests)) {
            usage(stderr, argv[0], 2);
        }
    }
    return 0;
}
