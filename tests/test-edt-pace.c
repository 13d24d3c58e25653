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

/* Tests of a rate that flows of many threads share, most of them in simulated
 * time: threads that poll at their own times, flows that are backlogged or
 * not, packets of all sizes, and beside them the fluid that "edt-pace.h"
 * refers to, generalized processor sharing in small steps. */

#include <config.h>
#undef NDEBUG

#include "edt-pace.h"

#include <math.h>

#include "edt-meter.h"
#include "edt-tags.h"
#include "fb-test.h"
#include "ovs-thread.h"
#include "timeval.h"

#define MTU EDT_MTU_BYTES
#define MS UINT64_C(1000000)
#define SECOND (1000 * MS)
#define GBIT 1000000000.0
#define START_NS UINT64_C(100000000000000)

#define LITTLE 0.000001

#define MAX_THREADS 8
#define MAX_CLASSES 4
#define MAX_FLOWS 1200
#define QUEUE 200                   /* Packets that a flood keeps waiting. */

/* A flow, in one thread. */
struct flow {
    int thread, class;
    double load;                    /* Bytes a ns; negative: a flood. */
    uint32_t lo, hi;                /* Bytes of its packets. */
    uint64_t on_ns, off_ns;         /* 0: always on. */
    uint64_t next_ns;               /* Arrival. */
    uint32_t sizes[256];            /* Of what waits. */
    unsigned int head, n;

    bool active, ready;
    struct edt_tag turn;           /* In one of its thread's calendars. */

    uint64_t sent;                  /* Bytes. */
    uint64_t packets;
    uint64_t window;                /* Of 'sent', since the last look. */
    double fluid;                   /* Bytes that wait in the model... */
    double fluid_sent;              /* ...and that it has sent. */
};

struct thread {
    uint64_t poll_ns;
    double jitter;
    uint64_t next_ns;
    uint64_t away_until_ns;
    struct edt_share shares[MAX_CLASSES];
    struct edt_tags ready[MAX_CLASSES];
    struct edt_tags leaving[MAX_CLASSES];
};

struct world {
    struct edt_pace *pace;
    int n_classes;
    struct edt_class *classes[MAX_CLASSES];
    int n_threads;
    struct thread threads[MAX_THREADS];
    int n_flows;
    struct flow flows[MAX_FLOWS];
    double rate;                    /* Bytes a ns, for the bucket. */
    uint64_t now_ns;
    uint64_t packets, sent;
    double level, max_level;        /* Of a leaky bucket. */
    uint64_t level_ns;
    bool model;                     /* Is the fluid to be simulated? */
    uint64_t fluid_ns;
};

static double
real(void)
{
    return choose(UINT64_C(1) << 32) / ldexp(1, 32);
}

static struct world *
world_create(double gbps)
{
    struct world *w = xzalloc(sizeof *w);

    w->rate = gbps / 8;
    w->pace = edt_pace_create(llrint(gbps * GBIT));
    w->now_ns = w->level_ns = w->fluid_ns = START_NS;
    return w;
}

static void
add_class(struct world *w, struct edt_class_limits limits)
{
    w->classes[w->n_classes++] = edt_class_create(w->pace, &limits);
}

static void
add_thread(struct world *w, double poll_us, double jitter)
{
    struct thread *t = &w->threads[w->n_threads++];

    if (!w->n_classes) {
        add_class(w, EDT_CLASS_LIMITS_DEFAULT);
    }
    t->poll_ns = poll_us * 1000;
    t->jitter = jitter;
    t->next_ns = w->now_ns + choose(t->poll_ns);
    for (int c = 0; c < w->n_classes; c++) {
        edt_share_init(&t->shares[c], w->classes[c], w->now_ns);
        edt_tags_init(&t->ready[c]);
        edt_tags_init(&t->leaving[c]);
    }
}

/* Adds 'n' flows of 'class' to the last thread.  'gbps' is what each offers,
 * negative for a flood. */
static void
add_flows(struct world *w, int n, int class, double gbps, uint32_t lo,
          uint32_t hi)
{
    for (int i = 0; i < n; i++) {
        struct flow *f = &w->flows[w->n_flows++];

        memset(f, 0, sizeof *f);
        f->thread = w->n_threads - 1;
        f->class = class;
        f->load = gbps / 8;
        f->lo = lo;
        f->hi = hi;
        f->next_ns = w->now_ns + choose(100000);
    }
}

static void
world_destroy(struct world *w)
{
    for (int i = 0; i < w->n_threads; i++) {
        for (int c = 0; c < w->n_classes; c++) {
            edt_share_leave_all(&w->threads[i].shares[c], w->now_ns);
            edt_share_destroy(&w->threads[i].shares[c]);
        }
    }
    for (int c = 0; c < w->n_classes; c++) {
        edt_class_unref(w->classes[c]);
    }
    edt_pace_unref(w->pace);
    free(w);
}

static bool
is_on(const struct flow *f, uint64_t now_ns)
{
    uint64_t ns = now_ns - START_NS;

    return !f->on_ns || ns % (f->on_ns + f->off_ns) < f->on_ns;
}

static void
flow_push(struct flow *f)
{
    uint32_t size = f->lo + choose(f->hi - f->lo + 1);

    f->sizes[(f->head + f->n++) % ARRAY_SIZE(f->sizes)] = size;
    f->fluid += size;
}

static void
flow_arrivals(struct flow *f, uint64_t now_ns)
{
    if (f->load < 0) {
        while (f->n < QUEUE && is_on(f, now_ns)) {
            flow_push(f);
        }
    } else if (f->load > 0) {
        while (f->next_ns <= now_ns) {
            if (is_on(f, f->next_ns) && f->n < ARRAY_SIZE(f->sizes)) {
                flow_push(f);
            }
            f->next_ns += -log(1 - real()) * (f->lo + f->hi) / 2 / f->load;
        }
    }
}

/* What threads do with a share, as "flow-shaper.h" does it. */
static void
thread_poll(struct world *w, struct thread *t)
{
    const uint64_t now_ns = w->now_ns;

    for (int i = 0; i < w->n_flows; i++) {
        struct flow *f = &w->flows[i];

        if (&w->threads[f->thread] == t) {
            struct edt_share *share = &t->shares[f->class];

            flow_arrivals(f, now_ns);
            if (f->n && !f->ready) {
                if (f->active) {
                    edt_tags_remove(&t->leaving[f->class], &f->turn);
                } else {
                    f->turn.tag = edt_share_join(share, now_ns);
                    f->active = true;
                }
                f->ready = true;
                edt_tags_insert(&t->ready[f->class], &f->turn);
            }
        }
    }
    for (int c = 0; c < w->n_classes; c++) {
        struct edt_share *share = &t->shares[c];
        struct edt_tag *turn;

        edt_share_poll(share, now_ns);
        while ((turn = edt_tags_first__(&t->leaving[c], true, share->v))
               && edt_share_may_leave(share, turn->tag)) {
            struct flow *f = CONTAINER_OF(turn, struct flow, turn);

            edt_tags_remove(&t->leaving[c], turn);
            edt_share_leave(share, turn->tag);
            f->active = false;
        }
        edt_share_publish(share, now_ns);
        while ((turn = edt_tags_first(&t->ready[c]))
               && edt_share_may_send(share)) {
            struct flow *f = CONTAINER_OF(turn, struct flow, turn);
            uint32_t size = f->sizes[f->head++ % ARRAY_SIZE(f->sizes)];

            f->n--;
            f->sent += size;
            f->window += size;
            f->packets++;
            w->packets++;
            w->sent += size;
            w->level = MAX(w->level - (now_ns - w->level_ns) * w->rate, 0)
                       + size;
            w->level_ns = now_ns;
            w->max_level = MAX(w->max_level, w->level);
            edt_tags_remove(&t->ready[c], turn);
            turn->tag += edt_share_send(share, size);
            f->ready = f->n != 0;
            if (f->ready) {
                edt_tags_insert(&t->ready[c], turn);
            } else {
                edt_tags_insert__(&t->leaving[c], turn, true);
            }
        }
    }
}

/* Lets the model's fluid flow until now, by equal parts of what is left, for
 * flows of one class. */
static void
model_run(struct world *w)
{
    double left = (w->now_ns - w->fluid_ns) * w->rate;

    w->fluid_ns = w->now_ns;
    while (left > LITTLE) {
        double least = left;
        int n = 0;

        for (int i = 0; i < w->n_flows; i++) {
            n += w->flows[i].fluid > LITTLE;
        }
        if (!n) {
            return;
        }
        for (int i = 0; i < w->n_flows; i++) {
            if (w->flows[i].fluid > LITTLE) {
                least = MIN(least, w->flows[i].fluid);
            }
        }
        least = MIN(least, left / n);
        for (int i = 0; i < w->n_flows; i++) {
            if (w->flows[i].fluid > LITTLE) {
                w->flows[i].fluid -= least;
                w->flows[i].fluid_sent += least;
            }
        }
        left -= least * n;
    }
}

static void
world_run(struct world *w, uint64_t end_ns)
{
    for (;;) {
        struct thread *next = &w->threads[0];

        for (int i = 1; i < w->n_threads; i++) {
            if (w->threads[i].next_ns < next->next_ns) {
                next = &w->threads[i];
            }
        }
        if (next->next_ns >= end_ns) {
            w->now_ns = end_ns;
            return;
        }
        w->now_ns = next->next_ns;
        if (w->model) {
            model_run(w);
        }
        thread_poll(w, next);
        next->next_ns += MAX(next->poll_ns
                             * (1 - next->jitter
                                - next->jitter * log(1 - real())), 1);
        next->next_ns = MAX(next->next_ns, next->away_until_ns);
    }
}

/* Forgets what was sent so far. */
static void
world_reset(struct world *w)
{
    w->sent = w->packets = 0;
    for (int i = 0; i < w->n_flows; i++) {
        w->flows[i].sent = w->flows[i].packets = w->flows[i].window = 0;
    }
}

/* Runs 'w' for 'ns' and returns how much of its rate it has sent. */
static double
world_measure(struct world *w, uint64_t ns)
{
    world_reset(w);
    world_run(w, w->now_ns + ns);
    return w->sent / (w->rate * ns);
}

/* What flows 'from' to 'to' - 1 of 'w' sent in 'ns', the least, the most and
 * all, in Gbit/s. */
struct got {
    double min, max, sum;
};

static struct got
got(const struct world *w, int from, int to, uint64_t ns)
{
    struct got g = { INFINITY, 0, 0 };

    for (int i = from; i < to; i++) {
        double rate = w->flows[i].sent * 8.0 / ns;

        g.min = MIN(g.min, rate);
        g.max = MAX(g.max, rate);
        g.sum += rate;
    }
    return g;
}

#define CHECK_NEAR(VALUE, EXPECTED, SLACK, ...)                         \
    do {                                                                \
        double value__ = (VALUE), expected__ = (EXPECTED);              \
        char *what__ = xasprintf(__VA_ARGS__);                          \
                                                                        \
        CHECK(fabs(value__ - expected__) <= (SLACK), "%s: %.5g, not "   \
              "%.5g", what__, value__, expected__);                     \
        free(what__);                                                   \
    } while (0)

/* Checks that all flows of 'w' got the same in 'ns', NFM at most 'nfm', and
 * all of the rate. */
static void
check_equal(struct world *w, uint64_t ns, double nfm, const char *what)
{
    double part = world_measure(w, ns);
    struct got g = got(w, 0, w->n_flows, ns);
    double fair = w->rate * 8 / w->n_flows;

    CHECK_NEAR(part, 1, 0.005, "%s: part of the rate", what);
    CHECK((g.max - g.min) / fair <= nfm, "%s: NFM %.4f", what,
          (g.max - g.min) / fair);
}

/* Floods: 1 in one thread and 15 in another one share equally, whoever polls
 * more often, and hardly write to what they share. */
static void
test_equal(void)
{
    static const double rates[] = { 0.1, 1, 20, 100 };

    for (unsigned int i = 0; i < rounds(8); i++) {
        double gbps = rates[i / 2 % ARRAY_SIZE(rates)];
        uint64_t ns = gbps < 1 ? SECOND : gbps > 1 ? 50 * MS : 300 * MS;
        double jitter = i % 4 / 2 * 0.5;
        struct world *w = world_create(gbps);
        uint64_t writes;

        add_thread(w, i & 1 ? 20 : 1, jitter);
        add_flows(w, 1, 0, -1, MTU, MTU);
        add_thread(w, i & 1 ? 1 : 20, jitter);
        add_flows(w, 15, 0, -1, MTU, MTU);
        world_run(w, w->now_ns + 5 * MS);
        writes = edt_pace_n_writes(w->pace);
        check_equal(w, ns, gbps < 1 ? 0.01 : 0.005, "1 and 15");
        writes = edt_pace_n_writes(w->pace) - writes;
        CHECK(writes < 0.01 * w->packets, "%"PRIu64" writes for %"PRIu64
              " packets", writes, w->packets);
        world_destroy(w);
    }
}

/* Bytes decide, not packets. */
static void
test_sizes(void)
{
    static const uint32_t sizes[][2] = {
        { 64, 64 }, { 64, 1514 }, { 512, 512 }, { 1514, 1514 },
        { 9000, 9000 }, { 64, 65000 },
    };

    for (unsigned int i = 0; i < rounds(ARRAY_SIZE(sizes)); i++) {
        const uint32_t *size = sizes[i % ARRAY_SIZE(sizes)];
        struct world *w = world_create(1);

        add_thread(w, 1, 0.5);
        add_flows(w, 2, 0, -1, MTU, MTU);
        add_flows(w, 2, 0, -1, size[0], size[1]);
        add_thread(w, 20, 0.5);
        add_flows(w, 2, 0, -1, size[0], size[1]);
        world_run(w, w->now_ns + 10 * MS);
        check_equal(w, 400 * MS, size[1] > 9000 ? 0.03 : 0.01, "sizes");
        world_destroy(w);
    }
}

/* Who offers less than his share has it, and the others share the rest. */
static void
test_loads(void)
{
    for (unsigned int i = 0; i < rounds(3); i++) {
        const uint64_t ns = 600 * MS;
        struct world *w = world_create(1);
        double share = 1.0 / 16, part;
        struct got conforming, floods;

        add_thread(w, 1, 0.5);
        add_flows(w, 4, 0, 0.5 * share, MTU, MTU);
        add_thread(w, 20, 0.5);
        add_flows(w, 4, 0, 0.5 * share, 64, MTU);
        add_flows(w, 4, 0, -1, MTU, MTU);
        w->n_threads--;
        add_flows(w, 4, 0, -1, MTU, MTU);
        w->n_threads++;
        world_run(w, w->now_ns + 10 * MS);
        part = world_measure(w, ns);
        conforming = got(w, 0, 8, ns);
        floods = got(w, 8, 16, ns);
        CHECK_NEAR(part, 1, 0.005, "part of the rate");
        CHECK_NEAR(conforming.sum, 4 * share, 0.1 * share, "what is offered");
        CHECK((floods.max - floods.min) / share < 0.02, "NFM %.3f",
              (floods.max - floods.min) / share);
        world_destroy(w);
    }
}

/* Flows that come and go, in either thread, are at their shares at once. */
static void
test_come_and_go(void)
{
    struct world *w = world_create(1);

    add_thread(w, 1, 0.5);
    add_flows(w, 8, 0, -1, MTU, MTU);
    add_thread(w, 20, 0.5);
    add_flows(w, 8, 0, -1, MTU, MTU);
    for (int i = 8; i < 16; i++) {
        w->flows[i].on_ns = w->flows[i].off_ns = 100 * MS;
    }
    for (int i = 0; i < 6; i++) {
        bool on = i % 2 == 0;
        struct got stay, go;
        double part;

        /* The last half of the time, 50 ms after they have come or gone. */
        world_run(w, START_NS + i * 100 * MS + 50 * MS);
        part = world_measure(w, 50 * MS);
        stay = got(w, 0, 8, 50 * MS);
        go = got(w, 8, 16, 50 * MS);
        CHECK_NEAR(part, 1, 0.005, "part of the rate");
        CHECK_NEAR(go.min, on ? 1 / 16. : 0, 0.002, "who comes and goes");
        CHECK_NEAR(go.max, on ? 1 / 16. : 0, 0.002, "who comes and goes");
        CHECK_NEAR(stay.min, on ? 1 / 16. : 1 / 8., 0.002, "who stays");
        CHECK_NEAR(stay.max, on ? 1 / 16. : 1 / 8., 0.002, "who stays");
    }
    world_destroy(w);
}

/* Many flows of all kinds in eight threads. */
static void
test_many(void)
{
    struct world *w = world_create(10);
    const uint64_t ns = 100 * MS;
    double share = 10. / 1000, part;
    struct got floods;
    uint64_t writes;

    add_thread(w, 1, 0.5);
    add_flows(w, 1, 0, -1, MTU, MTU);
    add_thread(w, 2, 0.5);
    add_flows(w, 9, 0, -1, MTU, MTU);
    add_thread(w, 5, 0.5);
    add_flows(w, 90, 0, -1, 64, MTU);
    add_thread(w, 10, 0.5);
    add_flows(w, 100, 0, -1, MTU, MTU);
    add_thread(w, 20, 0.5);
    add_flows(w, 300, 0, -1, 64, MTU);
    add_thread(w, 50, 0.5);
    add_flows(w, 200, 0, -1, MTU, MTU);
    add_thread(w, 20, 0.5);
    add_flows(w, 100, 0, 0.5 * share, MTU, MTU);
    add_thread(w, 100, 0.5);
    add_flows(w, 200, 0, 0.8 * share, 64, MTU);
    world_run(w, w->now_ns + 30 * MS);
    writes = edt_pace_n_writes(w->pace);
    part = world_measure(w, ns);
    writes = edt_pace_n_writes(w->pace) - writes;
    floods = got(w, 0, 700, ns);
    CHECK_NEAR(part, 1, 0.005, "part of the rate");
    CHECK((floods.max - floods.min) / share < 0.04, "NFM %.3f",
          (floods.max - floods.min) / share);
    CHECK(writes < 0.5 * w->packets, "%"PRIu64" writes for %"PRIu64
          " packets", writes, w->packets);
    world_destroy(w);
}

/* A thread that is away for less than EDT_PACE_CATCH_UP_NS loses nothing; one
 * that is away for longer loses what others have. */
static void
test_away(void)
{
    for (unsigned int i = 0; i < rounds(4); i++) {
        const uint64_t away_ns = i & 1 ? 100 * MS : 3 * MS;
        struct world *w = world_create(1);
        double part, expected;
        struct got here, away;

        add_thread(w, 1, 0.5);
        add_flows(w, 4, 0, -1, MTU, MTU);
        add_thread(w, 1, 0.5);
        add_flows(w, 4, 0, -1, MTU, MTU);
        world_run(w, w->now_ns + 10 * MS);
        world_reset(w);
        for (int j = 0; j < 5; j++) {
            w->threads[1].away_until_ns = w->now_ns + away_ns;
            world_run(w, w->now_ns + 200 * MS);
        }
        part = w->sent / (w->rate * SECOND);
        here = got(w, 0, 4, SECOND);
        away = got(w, 4, 8, SECOND);
        CHECK_NEAR(part, 1, 0.005, "part of the rate with a thread away");
        /* Of 5 to 7.5 ms each time both have their shares. */
        expected = away_ns > 10 * MS ? (500 + 5 * 6.25) / 2000 : 0.5;
        CHECK_NEAR(away.sum, expected, away_ns > 10 * MS ? 0.005 : 0.002,
                   "who is away");
        CHECK((here.max - here.min) / (here.sum / 4) < 0.01, "unequal");
        world_destroy(w);
    }
}

/* A changed rate holds at once, up and down, from 1 kbit/s to 400 Gbit/s. */
static void
test_change_rate(void)
{
    static const double rates[] = { 1, 0.05, 3, 200, 0.1, 0.000001, 1 };
    struct world *w = world_create(1);

    add_thread(w, 1, 0.5);
    add_flows(w, 2, 0, -1, MTU, MTU);
    add_thread(w, 20, 0.5);
    add_flows(w, 6, 0, -1, MTU, MTU);
    for (size_t i = 0; i < ARRAY_SIZE(rates); i++) {
        w->rate = rates[i] / 8;
        edt_pace_set_rate(w->pace, llrint(rates[i] * GBIT), w->now_ns);
        /* What was due before. */
        world_run(w, w->now_ns + 100000);
        if (rates[i] >= 0.05) {
            uint64_t ms = rates[i] > 10 ? 5 : rates[i] < 0.5 ? 500 : 100;

            check_equal(w, ms * MS, 0.03, "changed");
        } else {
            world_measure(w, 50 * MS);
            CHECK(w->packets <= 2, "%"PRIu64" packets at 1 kbit/s",
                  w->packets);
        }
    }
    world_destroy(w);
}

/* In any time no more is sent than the rate allows, one packet of each thread
 * and what the longest gap between polls leaves. */
static void
test_ceiling(void)
{
    for (unsigned int i = 0; i < rounds(12); i++) {
        struct world *w = world_create(1);
        uint64_t gap_ns = 0;
        double bound;

        for (int j = 0; j < 4; j++) {
            uint32_t lo = choose(2) ? MTU : 64;

            add_thread(w, 1 + choose(20), 0);
            gap_ns = MAX(gap_ns, w->threads[j].poll_ns);
            add_flows(w, choose(10), 0, -1, lo, MTU);
            add_flows(w, choose(10), 0, 1 / 30., lo, MTU);
            add_flows(w, choose(10), 0, 1 / 300., lo, MTU);
        }
        for (int j = 0; j < w->n_flows; j++) {
            if (choose(3) == 0) {
                w->flows[j].on_ns = 1 + choose_log(20 * MS);
                w->flows[j].off_ns = 1 + choose_log(20 * MS);
            }
        }
        world_run(w, w->now_ns + 100 * MS);
        /* Whoever leaves is noticed late, as is what he left. */
        bound = w->n_threads * MTU + 3 * gap_ns * w->rate;
        CHECK(w->max_level <= bound, "%.0f bytes at once, more than %.0f",
              w->max_level, bound);
        world_destroy(w);
    }
}

/* What each flow gets is what the fluid gives it, but for some packets. */
static void
test_model(void)
{
    for (unsigned int i = 0; i < rounds(30); i++) {
        double gbps = choose(2) ? 1 : 10;
        struct world *w = world_create(gbps);
        double bound = 0;

        w->model = true;
        for (int j = 1 + choose(4); j > 0; j--) {
            uint32_t lo = choose(2) ? MTU : 64;

            add_thread(w, choose(2) ? 1 : 20, choose(2) * 0.5);
            add_flows(w, 1 + choose(4), 0, -1, lo, MTU);
            add_flows(w, choose(4), 0, gbps / (4 + choose(60)), lo, MTU);
        }
        for (int j = 0; j < w->n_flows; j++) {
            if (choose(3) == 0) {
                w->flows[j].on_ns = 1 * MS + choose(20 * MS);
                w->flows[j].off_ns = 1 * MS + choose(20 * MS);
            }
        }
        world_run(w, w->now_ns + 60 * MS);

        /* The model has the same arrivals; floods, which react, are a little
         * different, as are sums of many small delays. */
        bound = 12 * MTU + 100e3 * w->rate + 0.005 * w->rate * 60 * MS;
        for (int j = 0; j < w->n_flows; j++) {
            const struct flow *f = &w->flows[j];

            CHECK(fabs(f->sent - f->fluid_sent) <= bound, "flow %d of %d has "
                  "%"PRIu64" bytes, the model %.0f, %.0f apart", j, w->n_flows,
                  f->sent, f->fluid_sent, bound);
        }
        world_destroy(w);
    }
}

static struct edt_class_limits
limits(uint32_t priority, uint32_t weight, double min_gbps, double max_gbps)
{
    return (struct edt_class_limits) {
        .priority = priority,
        .weight = weight,
        .min_bps = llrint(min_gbps * GBIT),
        .max_bps = llrint(max_gbps * GBIT),
    };
}

/* Classes as queues of a port: priorities, weights, minima, maxima. */
static void
test_classes(void)
{
    const uint64_t ns = 300 * MS;
    struct world *w;

    /* Weights, spread over two threads. */
    w = world_create(1);
    add_class(w, limits(0, 1, 0, 0));
    add_class(w, limits(0, 2, 0, 0));
    add_class(w, limits(0, 4, 0, 0));
    add_thread(w, 1, 0.5);
    add_flows(w, 5, 0, -1, MTU, MTU);
    add_flows(w, 8, 1, -1, 64, MTU);
    add_thread(w, 20, 0.5);
    add_flows(w, 8, 1, -1, MTU, MTU);
    add_flows(w, 2, 2, -1, MTU, MTU);
    world_run(w, w->now_ns + 10 * MS);
    CHECK_NEAR(world_measure(w, ns), 1, 0.005, "part of the rate");
    CHECK_NEAR(got(w, 0, 5, ns).sum, 1 / 7., 0.001, "weight 1");
    CHECK_NEAR(got(w, 5, 21, ns).sum, 2 / 7., 0.002, "weight 2");
    CHECK_NEAR(got(w, 21, 23, ns).sum, 4 / 7., 0.002, "weight 4");
    world_destroy(w);

    /* Strict: the second has what the first, in the slow thread, leaves. */
    w = world_create(1);
    add_class(w, limits(0, 1, 0, 0));
    add_class(w, limits(1, 1, 0, 0));
    add_thread(w, 20, 0.5);
    add_flows(w, 8, 0, 0.25 / 8, MTU, MTU);
    add_thread(w, 1, 0.5);
    add_flows(w, 8, 1, -1, MTU, MTU);
    world_run(w, w->now_ns + 10 * MS);
    CHECK_NEAR(world_measure(w, ns), 1, 0.005, "part of the rate");
    CHECK_NEAR(got(w, 0, 8, ns).sum, 0.25, 0.02, "strict, first");
    CHECK(got(w, 8, 16, ns).sum > 0.7, "strict, second: %.3f",
          got(w, 8, 16, ns).sum);
    world_destroy(w);

    /* The first has no more than its maximum, the second its minimum. */
    for (int i = 0; i < 2; i++) {
        w = world_create(1);
        add_class(w, limits(0, 1, 0, i ? 0 : 0.3));
        add_class(w, limits(1, 1, i ? 0.2 : 0, 0));
        add_thread(w, 20, 0.5);
        add_flows(w, 8, 0, -1, MTU, MTU);
        add_thread(w, 1, 0.5);
        add_flows(w, 8, 1, -1, MTU, MTU);
        world_run(w, w->now_ns + 10 * MS);
        CHECK_NEAR(world_measure(w, ns), 1, 0.005, "part of the rate");
        CHECK_NEAR(got(w, 0, 8, ns).sum, i ? 0.8 : 0.3, 0.003, "first");
        CHECK_NEAR(got(w, 8, 16, ns).sum, i ? 0.2 : 0.7, 0.003, "second");
        world_destroy(w);
    }

    /* Of minima that are more than there is, each has the same part. */
    w = world_create(1);
    add_class(w, limits(0, 1, 0.3, 0));
    add_class(w, limits(2, 1, 0.8, 0));
    add_class(w, limits(1, 1, 0.4, 0));
    add_thread(w, 1, 0.5);
    add_flows(w, 2, 0, -1, MTU, MTU);
    add_flows(w, 2, 1, -1, MTU, MTU);
    add_flows(w, 2, 2, -1, MTU, MTU);
    world_run(w, w->now_ns + 10 * MS);
    CHECK_NEAR(world_measure(w, ns), 1, 0.005, "part of the rate");
    CHECK_NEAR(got(w, 0, 2, ns).sum, 0.3 / 1.5, 0.002, "minimum 0.3");
    CHECK_NEAR(got(w, 2, 4, ns).sum, 0.8 / 1.5, 0.002, "minimum 0.8");
    CHECK_NEAR(got(w, 4, 6, ns).sum, 0.4 / 1.5, 0.002, "minimum 0.4");
    world_destroy(w);

    /* Some borrow what others do not use. */
    w = world_create(1);
    add_class(w, limits(0, 4, 0, 0));
    /* With a burst it makes up for what it has less while others send. */
    add_class(w, (struct edt_class_limits) {
        .weight = 1, .max_bps = llrint(0.3 * GBIT), .burst_bytes = 100000 });
    add_class(w, limits(0, 1, 0, 0));
    add_thread(w, 1, 0.5);
    add_flows(w, 8, 0, 0.2 / 8, MTU, MTU);
    add_flows(w, 4, 2, -1, MTU, MTU);
    add_thread(w, 20, 0.5);
    add_flows(w, 8, 1, -1, MTU, MTU);
    world_run(w, w->now_ns + 10 * MS);
    CHECK_NEAR(world_measure(w, ns), 1, 0.005, "part of the rate");
    CHECK_NEAR(got(w, 0, 8, ns).sum, 0.2, 0.02, "who offers less");
    CHECK_NEAR(got(w, 12, 20, ns).sum, 0.3, 0.003, "who has a maximum");
    CHECK(got(w, 8, 12, ns).sum > 0.47, "who has the rest: %.3f",
          got(w, 8, 12, ns).sum);

    /* Changed in place: 4 : 1 becomes strict. */
    w->flows[0].load = w->flows[1].load = -1;
    edt_class_set_limits(w->classes[2], &EDT_CLASS_LIMITS_DEFAULT, w->now_ns);
    edt_class_set_limits(w->classes[0], &(struct edt_class_limits) {
        .weight = 3, .max_bps = llrint(0.5 * GBIT) }, w->now_ns);
    edt_class_set_limits(w->classes[1], &(struct edt_class_limits) {
        .priority = 7, .weight = 1 }, w->now_ns);
    world_run(w, w->now_ns + 10 * MS);
    CHECK_NEAR(world_measure(w, ns), 1, 0.005, "part of the rate");
    CHECK_NEAR(got(w, 0, 8, ns).sum, 0.5, 0.004, "new maximum");
    CHECK_NEAR(got(w, 8, 12, ns).sum, 0.5, 0.004, "first priority");
    CHECK_NEAR(got(w, 12, 20, ns).sum, 0, 0.002, "last priority");
    world_destroy(w);
}

/* A class's burst is a token bucket, and the pace's rate holds meanwhile. */
static void
test_burst(void)
{
    for (unsigned int i = 0; i < rounds(20); i++) {
        struct world *w = world_create(i & 1 ? 1 : 0);
        const uint64_t burst = MTU + choose_log(200000);
        struct edt_class_limits l = limits(0, 1, 0, 0.1);
        struct flow *f;
        double port;

        l.burst_bytes = burst;
        add_class(w, l);
        add_thread(w, 1, 0);
        add_flows(w, 1, 0, -1, MTU, MTU);
        f = &w->flows[0];
        f->on_ns = 5 * MS + choose(5 * MS);
        f->off_ns = choose(40 * MS);
        w->rate = 0.1 / 8;
        world_run(w, w->now_ns + 300 * MS);
        CHECK(w->max_level <= burst + 2 * MTU,
              "%.0f bytes at once, burst is %"PRIu64, w->max_level, burst);
        if (burst > 10 * MTU && f->off_ns > 30 * MS) {
            CHECK(w->max_level >= burst * 0.9 - 2 * MTU, "%.0f bytes at once, "
                  "burst is %"PRIu64, w->max_level, burst);
        }
        world_destroy(w);

        /* The port's own rate. */
        if (i & 1) {
            w = world_create(1);
            add_class(w, l);
            add_class(w, limits(0, 1, 0, 0));
            add_thread(w, 1, 0);
            add_flows(w, 1, 0, -1, MTU, MTU);
            add_flows(w, 1, 1, -1, MTU, MTU);
            w->flows[0].on_ns = w->flows[0].off_ns = 10 * MS;
            world_run(w, w->now_ns + 100 * MS);
            port = w->sent / (w->rate * 100 * MS);
            CHECK(w->max_level <= 5 * MTU, "%.0f bytes at once",
                  w->max_level);
            CHECK_NEAR(port, 1, 0.005, "part of the rate");
            world_destroy(w);
        }
    }
}

/* A burst that comes packet by packet, in flows that leave in between, which
 * the thread lets rest or not. */
static void
test_burst_in_parts(void)
{
    for (int rest = 0; rest < 2; rest++) {
        struct edt_pace *pace = edt_pace_create(0);
        struct edt_class *class
            = edt_class_create(pace, &EDT_CLASS_LIMITS_DEFAULT);
        uint64_t now_ns = START_NS;
        struct edt_share share;
        int n = 0;

        edt_class_set_limits(class, &(struct edt_class_limits) {
            .weight = 1, .max_bps = 80000, .burst_bytes = 2000 }, now_ns);
        edt_share_init(&share, class, now_ns);
        now_ns += SECOND;
        for (int i = 0; i < 20; i++) {
            uint64_t tag = edt_share_join(&share, now_ns);

            edt_share_poll(&share, now_ns);
            edt_share_publish(&share, now_ns);
            if (edt_share_may_send(&share)) {
                tag += edt_share_send(&share, 100);
                n++;
            }
            if (!rest || edt_share_may_leave(&share, tag)) {
                edt_share_leave(&share, tag);
                edt_share_publish(&share, now_ns);
            } else {
                break;
            }
        }
        /* 2000 bytes less a frame, and one. */
        CHECK(n == 5, "%d packets of 100 bytes in a burst of 2000 bytes", n);
        edt_share_leave_all(&share, now_ns);
        edt_share_destroy(&share);
        edt_class_unref(class);
        edt_pace_unref(pace);
    }
}

/* What goes ahead is made up for. */
static void
test_charge(void)
{
    for (int i = 0; i < 2; i++) {
        struct world *w = world_create(1);
        uint64_t ahead = 0;

        add_thread(w, 1, 0.5);
        add_flows(w, i ? 0 : 4, 0, -1, MTU, MTU);
        add_thread(w, 20, 0.5);
        add_flows(w, 4, 0, -1, MTU, MTU);
        for (int j = 0; j < 1000; j++) {
            edt_share_charge(&w->threads[j & 1 & !i].shares[0], MTU);
            ahead += MTU;
            world_run(w, w->now_ns + 100000);
        }
        CHECK_NEAR((w->sent + ahead) / (w->rate * 100 * MS), 1, 0.005,
                   "part of the rate with what goes ahead");
        /* More than the rate is not made up for as long as others starve. */
        edt_share_charge(&w->threads[0].shares[0], 10 * MTU);
        for (int j = 0; j < 1000; j++) {
            edt_share_charge(&w->threads[0].shares[0], 1000 * MTU);
            world_run(w, w->now_ns + 10000);
        }
        world_run(w, w->now_ns + 60 * MS);
        CHECK_NEAR(world_measure(w, 10 * MS), 1, 0.01, "part of the rate");
        world_destroy(w);
    }
}

/* The line is right from 1 kbit/s to 400 Gbit/s and for any number of
 * flows. */
static void
test_range(void)
{
    for (unsigned int i = 0; i < rounds(300); i++) {
        uint64_t bps = MAX(choose_log(UINT64_C(400000000000)), 1000);
        uint32_t n = 1 + choose_log(200000);
        struct edt_pace *pace = edt_pace_create(bps);
        struct edt_class *class
            = edt_class_create(pace, &EDT_CLASS_LIMITS_DEFAULT);
        uint64_t now_ns = choose_log(UINT64_C(1) << 40), last_ns, v;
        struct edt_share share;
        uint64_t sum_ns = 0;
        double bytes;

        edt_share_init(&share, class, now_ns);
        for (uint32_t j = 0; j < n; j++) {
            edt_share_join(&share, now_ns);
        }
        edt_share_publish(&share, now_ns);
        last_ns = now_ns;
        v = share.v + share.offset;
        for (int j = 0; j < 40; j++) {
            /* Others come and go. */
            now_ns += 1 + choose_log(SECOND);
            edt_share_poll(&share, now_ns);
            if (choose(2)) {
                edt_share_leave(&share, edt_share_join(&share, now_ns));
            }
            share.d_weight += 0;
            edt_share_publish__(&share, now_ns);
        }
        sum_ns = now_ns - last_ns;
        edt_share_poll(&share, now_ns);
        bytes = ldexp(share.v + share.offset - v, -EDT_PACE_SHIFT) * n;
        CHECK_NEAR(bytes / (bps / 8e9 * sum_ns), 1,
                   LITTLE + 41. * (1 + n * ldexp(1, -EDT_PACE_SHIFT))
                          / (bps / 8e9 * sum_ns),
                   "%"PRIu64" bit/s, %"PRIu32" flows, part", bps, n);
        edt_share_leave_all(&share, now_ns);
        edt_share_destroy(&share);
        edt_class_unref(class);
        edt_pace_unref(pace);
    }
}

/* The time of the next packet is told to the ns. */
static void
test_next(void)
{
    for (unsigned int i = 0; i < rounds(500); i++) {
        struct edt_pace *pace
            = edt_pace_create(10000 + choose_log(UINT64_C(100000000000)));
        struct edt_class *class
            = edt_class_create(pace, &EDT_CLASS_LIMITS_DEFAULT);
        uint64_t now_ns = START_NS + choose(1000);
        uint32_t n = 1 + choose(20);
        struct edt_share share;

        edt_share_init(&share, class, now_ns);
        for (uint32_t j = 0; j < n; j++) {
            edt_share_join(&share, now_ns);
        }
        edt_share_publish(&share, now_ns);
        for (int j = 0; j < 20; j++) {
            uint64_t next_ns;

            edt_share_poll(&share, now_ns);
            edt_share_publish(&share, now_ns);
            while (edt_share_may_send(&share)) {
                edt_share_send(&share, 64 + choose(9000));
            }
            next_ns = edt_share_next_ns(&share, now_ns);
            CHECK(next_ns > now_ns, "next at %"PRIu64", now is %"PRIu64,
                  next_ns, now_ns);
            if (next_ns - now_ns > SECOND) {
                break;
            }
            edt_share_poll(&share, next_ns - 1);
            CHECK(!edt_share_may_send(&share), "before its time");
            for (int k = 0; k < 2000; k++) {
                edt_share_poll(&share, next_ns);
                if (edt_share_may_send(&share)) {
                    break;
                }
                next_ns = edt_share_next_ns(&share, next_ns);
            }
            CHECK(edt_share_may_send(&share), "not at its time");
            now_ns = next_ns + choose(2) * choose(1000);
        }
        edt_share_leave_all(&share, now_ns);
        edt_share_destroy(&share);
        edt_class_unref(class);
        edt_pace_unref(pace);
    }
}

/* The calendar gives out flows by their tags, to within a slot. */
static void
test_turns(void)
{
    const uint64_t slot = UINT64_C(1) << EDT_TAGS_SHIFT;

    for (unsigned int i = 0; i < rounds(200); i++) {
        const size_t n = 1 + choose_log(200);
        const uint64_t reach = choose_log(200 * slot) + 1;
        struct edt_tag *turns = xcalloc(n, sizeof *turns);
        bool *in = xcalloc(n, sizeof *in);
        uint64_t start = random_uint64();
        struct edt_tags t;
        size_t n_in = 0;

        edt_tags_init(&t);
        for (int j = 0; j < 2000; j++) {
            size_t k = choose(n);
            struct edt_tag *first;
            uint64_t least = UINT64_MAX;

            if (!in[k]) {
                turns[k].tag = start + choose(reach);
                edt_tags_insert(&t, &turns[k]);
                in[k] = true;
                n_in++;
            } else if (choose(4) == 0) {
                edt_tags_remove(&t, &turns[k]);
                in[k] = false;
                n_in--;
            }
            CHECK(t.n == n_in, "%"PRIuSIZE" flows, not %"PRIuSIZE, t.n, n_in);
            first = edt_tags_first(&t);
            CHECK(!first == !n_in, "first of %"PRIuSIZE, n_in);
            if (!first) {
                continue;
            }
            for (size_t m = 0; m < n; m++) {
                if (in[m]) {
                    least = MIN(least, turns[m].tag - start);
                }
            }
            CHECK(first->tag - start < least + slot
                  || first->tag - start < t.base - start + slot,
                  "flow is %"PRIu64" units behind the first",
                  first->tag - start - least);
            if (choose(2)) {
                /* It sends. */
                edt_tags_remove(&t, first);
                first->tag += choose(MTU) << EDT_PACE_SHIFT;
                edt_tags_insert(&t, first);
                start += least;
            }
        }
        free(turns);
        free(in);
    }
}

/* Real threads: what they share stays whole. */

struct real_thread {
    struct edt_class *class;
    uint64_t end_ns;
    int n_flows;
    bool restless;                  /* Do its flows come and go? */
    uint64_t sent;
    uint32_t state;
};

static uint64_t
clock_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * UINT64_C(1000000000) + t.tv_nsec;
}

static void *
real_thread_main(void *thread_)
{
    struct real_thread *thread = thread_;
    uint64_t tags[16];
    struct edt_share share;
    uint64_t now_ns = clock_ns();
    int n = 0;

    edt_share_init(&share, thread->class, now_ns);
    while ((now_ns = clock_ns()) < thread->end_ns) {
        thread->state = thread->state * 1103515245 + 12345;
        edt_share_poll(&share, now_ns);
        if (n < thread->n_flows) {
            tags[n++] = edt_share_join(&share, now_ns);
        } else if (thread->restless && n > 1 && (thread->state >> 16) % 8 == 0
                   && edt_share_may_leave(&share, tags[n - 1])) {
            edt_share_leave(&share, tags[--n]);
        } else if (thread->restless && (thread->state >> 16) % 1000 == 1) {
            edt_share_suspend(&share, now_ns);
        }
        edt_share_publish(&share, now_ns);
        while (n && edt_share_may_send(&share)) {
            int first = 0;

            for (int i = 1; i < n; i++) {
                first = (int64_t) (tags[i] - tags[first]) < 0 ? i : first;
            }
            tags[first] += edt_share_send(&share, MTU);
            thread->sent += MTU;
        }
    }
    edt_share_leave_all(&share, now_ns);
    edt_share_destroy(&share);
    return NULL;
}

static void
test_threads(void)
{
    for (unsigned int i = 0; i < rounds(4); i++) {
        const uint64_t ns = 250 * MS;
        struct edt_pace *pace = edt_pace_create(10 * GBIT);
        struct edt_class *classes[2] = {
            edt_class_create(pace, &EDT_CLASS_LIMITS_DEFAULT),
            edt_class_create(pace, &EDT_CLASS_LIMITS_DEFAULT),
        };
        struct real_thread threads[4];
        pthread_t ids[4];
        uint64_t start_ns = clock_ns();
        double sent = 0;

        for (int j = 0; j < 4; j++) {
            threads[j] = (struct real_thread) {
                .class = classes[i & 1 & j],
                .end_ns = start_ns + ns,
                .n_flows = 1 + choose(16),
                .restless = i & 2,
                .state = random_uint32(),
            };
            ids[j] = ovs_thread_create("pace", real_thread_main, &threads[j]);
        }
        for (int k = 0; k < 100; k++) {
            /* The main thread changes rates meanwhile, to what they are. */
            edt_pace_set_rate(pace, k & 1 ? 10 * GBIT : 10 * GBIT + 1000,
                              clock_ns());
            edt_class_set_limits(classes[1], &EDT_CLASS_LIMITS_DEFAULT,
                                 clock_ns());
            xnanosleep(ns / 150);
        }
        for (int j = 0; j < 4; j++) {
            xpthread_join(ids[j], NULL);
            sent += threads[j].sent;
        }
        /* Threads are more than processors: some may be away for long. */
        CHECK(sent <= 10. / 8 * (ns + EDT_PACE_CATCH_UP_NS) + 4 * MTU,
              "%.0f bytes in %"PRIu64" ms, round %u", sent, ns / MS, i);
        CHECK(sent >= 10. / 8 * ns * 0.5, "%.0f bytes only", sent);
        CHECK(ovs_list_is_empty(&pace->active)
              && ovs_list_is_empty(&pace->shares), "somebody is left");
        edt_class_unref(classes[0]);
        edt_class_unref(classes[1]);
        edt_pace_unref(pace);
    }
}

static const struct test tests[] = {
    { "equal", test_equal },
    { "sizes", test_sizes },
    { "loads", test_loads },
    { "come-and-go", test_come_and_go },
    { "many", test_many },
    { "away", test_away },
    { "change-rate", test_change_rate },
    { "ceiling", test_ceiling },
    { "model", test_model },
    { "classes", test_classes },
    { "burst", test_burst },
    { "burst-in-parts", test_burst_in_parts },
    { "charge", test_charge },
    { "range", test_range },
    { "next", test_next },
    { "turns", test_turns },
    { "threads", test_threads },
};

int
main(int argc, char *argv[])
{
    return run_tests(argc, argv, tests, ARRAY_SIZE(tests));
}
